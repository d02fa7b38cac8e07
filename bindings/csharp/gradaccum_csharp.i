// The typemaps of C#. bindings/gradaccum.i says what they are for.
// SPDX-License-Identifier: Apache-2.0
%module Raw

// The raw layer is not part of the public interface of its assembly.
%pragma(csharp) moduleclassmodifiers="internal unsafe class"
%pragma(csharp) imclassclassmodifiers="internal class"
%typemap(csclassmodifiers) SWIGTYPE "internal unsafe class"
%csconst(1);

// Mono looks for native functions when it compiles the methods that call them, and it compiles methods
// inline as far as it can; but not those of a class whose static constructor has not run. So no method of
// a program is compiled with functions of a library that is yet to be loaded: see Natives.First.
%pragma(csharp) modulecode="  static $module() {}"
%typemap(cscode) SWIGTYPE "  static $csclassname() {}"

// SWIG's own helpers for exceptions and strings are left out, by SWIG_CSHARP_NO_EXCEPTION_HELPER,
// SWIG_CSHARP_NO_STRING_HELPER and SWIG_CSHARP_NO_IMCLASS_STATIC_CONSTRUCTOR: they would call native
// code before it is loaded, and they register functions of managed code in variables of the process.
// Each AppDomain and each AssemblyLoadContext would overwrite those of the others, and leave addresses
// behind when it is unloaded. So native code knows no function of managed code but those that are
// passed with a context or a call. A wrapper returns the status, and managed code throws.
%insert(runtime) %{
#include <cstdint>

#include "gradaccum/gradaccum.h"

// Why the last constructor on this thread has returned NULL.
static thread_local int32_t ga_failure = GA_OK;

extern "C" SWIGEXPORT int32_t SWIGSTDCALL GaFailure() { return ga_failure; }

#define GA_RAISE(status, null) \
  do {                         \
    ga_failure = status;       \
    return null;               \
  } while (0)
%}

%pragma(csharp) imclasscode=%{
  [global::System.Runtime.InteropServices.DllImport("$dllimport")]
  internal static extern int GaFailure();

  static $imclassname() {
    Natives.TryLoad();
  }
%}

%typemap(csconstruct, excode="
    if (swigCPtr.Handle == global::System.IntPtr.Zero) throw GradAccumException.Of($imclassname.GaFailure());") SWIGTYPE %{: this($imcall, true) {$excode
  }
%}

// ---- Numbers and texts --------------------------------------------------------------------------

%apply int { int32_t };
%apply unsigned int { uint32_t };
%apply long long { int64_t };
%apply unsigned long long { uint64_t };

%typemap(ctype) size_t "size_t"
%typemap(imtype) size_t "global::System.UIntPtr"
%typemap(cstype) size_t "ulong"
%typemap(csin) size_t "new global::System.UIntPtr($csinput)"
%typemap(csout, excode=SWIGEXCODE) size_t {
    ulong ret = (ulong)$imcall;$excode
    return ret;
  }
%typemap(csvarout, excode=SWIGEXCODE2) size_t %{
    get {
      ulong ret = (ulong)$imcall;$excode
      return ret;
    } %}
%typemap(in) size_t "$1 = $input;"
%typemap(out) size_t "$result = $1;"

%apply void* VOID_INT_PTR { void* ADDRESS };

// A string that is marshalled would be in an encoding of the runtime's choice.
%typemap(ctype) const char* "const char*"
%typemap(imtype, out="global::System.IntPtr") const char* "byte[]"
%typemap(cstype) const char* "string"
%typemap(csin) const char* "Text.Encode($csinput)"
%typemap(csout, excode=SWIGEXCODE) const char* {
    global::System.IntPtr ret = $imcall;$excode
    return Text.Decode(ret);
  }
%typemap(csvarout, excode=SWIGEXCODE2) const char* %{
    get {
      global::System.IntPtr ret = $imcall;$excode
      return Text.Decode(ret);
    } %}
%typemap(in) const char* "$1 = ($1_ltype)$input;"
%typemap(out) const char* "$result = $1;"
%typemap(freearg) const char* ""

// ---- Status -------------------------------------------------------------------------------------

%typemap(ctype) ga_status "int32_t"
%typemap(imtype) ga_status "int"
%typemap(cstype, out="void") ga_status "int"
%typemap(csout) ga_status {
    int status = $imcall;
    if (status != 0) throw GradAccumException.Of(status);
  }
%typemap(out, null="GA_ERROR_INTERNAL") ga_status "$result = $1;"

// ---- Out parameters and arrays ------------------------------------------------------------------

%define GA_CSHARP_OUT(TYPE, CSHARP)
%typemap(ctype) TYPE* OUT "TYPE*"
%typemap(imtype) TYPE* OUT "out CSHARP"
%typemap(cstype) TYPE* OUT "out CSHARP"
%typemap(csin) TYPE* OUT "out $csinput"
%typemap(in) TYPE* OUT "$1 = ($1_ltype)$input;"
%enddef
GA_CSHARP_OUT(void*, global::System.IntPtr)
GA_CSHARP_OUT(int32_t, int)
GA_CSHARP_OUT(int64_t, long)
GA_CSHARP_OUT(size_t, global::System.UIntPtr)
GA_CSHARP_OUT(double, double)

// Arrays are pinned for the call. The runtimes would do the same for an argument of an array's type, only slower.
%typemap(ctype) const int64_t* ARRAY "const int64_t*"
%typemap(imtype) const int64_t* ARRAY "global::System.IntPtr"
%typemap(cstype) const int64_t* ARRAY "long[]"
%typemap(csin, pre="    fixed (long* pinned_$csinput = $csinput) {", terminator="    }")
    const int64_t* ARRAY "(global::System.IntPtr)pinned_$csinput"
%typemap(in) const int64_t* ARRAY "$1 = ($1_ltype)$input;"

%typemap(ctype) (const void* const* ARRAY, size_t COUNT) "size_t jcount, void*"
%typemap(imtype) (const void* const* ARRAY, size_t COUNT)
    "global::System.UIntPtr jcount, global::System.IntPtr"
%typemap(cstype) (const void* const* ARRAY, size_t COUNT) "global::System.IntPtr[]"
%typemap(csin, pre="    fixed (global::System.IntPtr* pinned_$csinput = $csinput) {", terminator="    }")
    (const void* const* ARRAY, size_t COUNT)
    "(global::System.UIntPtr)$csinput.Length, (global::System.IntPtr)pinned_$csinput"
%typemap(in) (const void* const* ARRAY, size_t COUNT) "$1 = ($1_ltype)$input; $2 = jcount;"

%typemap(ctype) (int32_t COUNT, const int64_t* ARRAY) "int32_t jcount, void*"
%typemap(imtype) (int32_t COUNT, const int64_t* ARRAY) "int jcount, global::System.IntPtr"
%typemap(cstype) (int32_t COUNT, const int64_t* ARRAY) "long[]"
%typemap(csin, pre="    fixed (long* pinned_$csinput = $csinput) {", terminator="    }")
    (int32_t COUNT, const int64_t* ARRAY) "$csinput.Length, (global::System.IntPtr)pinned_$csinput"
%typemap(in) (int32_t COUNT, const int64_t* ARRAY) "$1 = jcount; $2 = ($2_ltype)$input;"

%typemap(ctype) (const double* ARRAY, int64_t COUNT) "int64_t jcount, void*"
%typemap(imtype) (const double* ARRAY, int64_t COUNT) "long jcount, global::System.IntPtr"
%typemap(cstype) (const double* ARRAY, int64_t COUNT) "double[]"
%typemap(csin, pre="    fixed (double* pinned_$csinput = $csinput) {", terminator="    }")
    (const double* ARRAY, int64_t COUNT) "$csinput.LongLength, (global::System.IntPtr)pinned_$csinput"
%typemap(in) (const double* ARRAY, int64_t COUNT) "$1 = ($1_ltype)$input; $2 = jcount;"

// ---- What a training loop calls -----------------------------------------------------------------

// Options of a micro-batch are plain arguments, without a proxy: 0 and 0 are the defaults.
%ignore ga_micro_options;
%typemap(ctype) const ga_micro_options* options "double jloss_scale, uint32_t"
%typemap(imtype) const ga_micro_options* options "double jloss_scale, uint"
%typemap(cstype) const ga_micro_options* options "double loss_scale, uint"
%typemap(csin) const ga_micro_options* options "loss_scale, $csinput"
%typemap(in) const ga_micro_options* options (ga_micro_options micro) %{
  $1 = nullptr;
  if (jloss_scale != 0 || $input != 0) {
    const ga_status status = ga_micro_options_init(&micro, sizeof micro);
    if (status != GA_OK) return status;
    micro.loss_scale = jloss_scale;
    micro.flags = $input;
    $1 = &micro;
  }
%}

// Structs of C# that are laid out as in C take these results.
%apply void* ADDRESS { ga_step_result* out, ga_window_info* out };

// The properties name and note have accessors of these names in C#.
%rename(SetName) ga_flat_entry::set_name;
%rename(SetNote) ga_state_options::set_note;

%include "../gradaccum.i"
