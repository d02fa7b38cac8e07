// The raw layer of every binding: gradaccum.h and its parts as they are, wrapped by SWIG.
// SPDX-License-Identifier: Apache-2.0
//
// A language has a file of its own, bindings/<language>/gradaccum_<language>.i, which names the
// module, defines the typemaps and macros below, and then includes this file. A facade written by
// hand, in the same folder, is what programs see; the raw layer is hidden in its package.
//
// The raw layer deals in numbers: an address is a number as wide as a pointer, integers keep their
// width, strings are UTF-8, and structs are proxies that come sized and initialised. It knows
// nothing of how long memory lives, and checks nothing: both are the facade's business.
//
// Typemaps that a language defines:
//
//   int32_t, int64_t, uint32_t, uint64_t, size_t, double, const char*
//   ga_status                              a result. A failure becomes an exception with
//                                          ga_last_error(), raised before the wrapper returns
//   void* ADDRESS                          a number
//   void** OUT, int32_t* OUT, int64_t* OUT, size_t* OUT, double* OUT
//                                          an out parameter, which may be left out
//   const int64_t* ARRAY                   an array
//   (const void* const* ARRAY, size_t COUNT), (int32_t COUNT, const int64_t* ARRAY),
//   (const double* ARRAY, int64_t COUNT)   an array and its length
//
// and a macro of C: GA_RAISE(status, null), with which a constructor reports its status and returns null.
//
// What is not wrapped, and why:
//
//   parallel_for, allocate, free of ga_config    They are called on threads, or need memory, that
//                                                the runtime of the language does not manage.
//   ga_comm_table                                Its functions would wait for other ranks inside
//                                                the runtime's locks, and move raw memory. Python
//                                                makes one by ctypes, whose all_gather is enough
//                                                for GA_SHARD_PARAMETERS.
//   ga_comm_op                                   Only functions of a ga_comm_table take one.
//   ga_..._init, struct_size, reserved           The constructors of the proxies call them, with
//                                                the sizeof of C.
//   setters of what a struct only points to      name, shape, table and note are copied by set_...
//                                                below, and freed with the proxy.

%{
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <new>
#include <vector>

#include "gradaccum/gradaccum.h"

namespace {

struct Failure {
  ga_status status;
};

// What an _init function gives, in memory of its own. Where the library is older than the header,
// it does not know the last fields: they are 0, and struct_size still counts them, so that it
// refuses them if they are set.
template <typename T, typename... Arguments>
T* new_struct(ga_status (*init)(T*, size_t, Arguments...), Arguments... arguments) {
  T* filled = static_cast<T*>(std::calloc(1, sizeof(T)));
  if (filled == nullptr) throw Failure{GA_ERROR_OUT_OF_MEMORY};
  const ga_status status = init(filled, sizeof(T), arguments...);
  if (status != GA_OK) {
    std::free(filled);
    throw Failure{status};
  }
  filled->struct_size = sizeof(T);
  return filled;
}

// Makes *field point to a copy of count elements, in place of its former copy. NULL: to nothing.
template <typename T>
ga_status replace_copy(const T** field, const T* values, size_t count) {
  T* copy = nullptr;
  if (values != nullptr) {
    copy = static_cast<T*>(std::malloc(count * sizeof(T) + 1));  // never of 0 bytes
    if (copy == nullptr) return GA_ERROR_OUT_OF_MEMORY;
    if (count > 0) std::memcpy(copy, values, count * sizeof(T));
  }
  std::free(const_cast<T*>(*field));
  *field = copy;
  return GA_OK;
}

size_t size_of_text(const char* text) { return text != nullptr ? std::strlen(text) + 1 : 0; }

}  // namespace
%}

// ---- Types --------------------------------------------------------------------------------------

%apply void* ADDRESS {
  void*, const void*, char* out,
  ga_context*, const ga_context*, ga_comm*, const ga_comm*,
  ga_log, ga_progress, ga_write_fn, ga_read_fn, ga_param_done
};
%apply void** OUT { ga_context** out, ga_comm** out, const void** out_device, const void** out_data };
%apply int32_t* OUT { int32_t* out, int32_t* out_rank, int32_t* out_ranks, ga_group* out, ga_param* out, ga_bn* out, ga_dtype* out_dtype };
%apply int64_t* OUT { int64_t* out_count, int64_t* out_steps };
%apply size_t* OUT { size_t* out, size_t* out_size };
%apply double* OUT { double* out, double* out_scale };
%apply const int64_t* ARRAY {
  const int64_t* from_steps, const int64_t* accum_steps, const int64_t* whole_shape, const int64_t* first
};
%apply (const void* const* ARRAY, size_t COUNT) {
  (const void* const* gradients, size_t count),
  (const void* const* entries, size_t count),
  (const void* const* params, size_t count)
};
%apply (int32_t COUNT, const int64_t* ARRAY) { (int32_t rank, const int64_t* shape) };
%apply (const double* ARRAY, int64_t COUNT) { (const double* table, int64_t table_size) };

// ---- Structs ------------------------------------------------------------------------------------

%ignore struct_size;
%ignore reserved;
%ignore reserved2;
%rename("$ignore", regextarget=1) "^ga_.*_init$";

%ignore ga_config::parallel_for;
%ignore ga_config::parallel_for_user;
%ignore ga_config::allocate;
%ignore ga_config::free;
%ignore ga_config::allocator_user;

%ignore ga_comm_table;
%ignore ga_comm_config::table;
%ignore GA_COMM_SUM;  // ga_comm_op
%ignore GA_COMM_MAX;

%ignore ga_optimizer::ns_coefficients;  // ns_coefficient, set_ns_coefficient
%ignore ga_optimizer::ns_table;         // ns_table_size, ns_table_number, set_ns_table
%ignore ga_optimizer::ns_rows;
%ignore ga_schedule::table;             // set_table
%ignore ga_schedule::table_size;
%ignore ga_flat_entry::rank;            // set_shape
%ignore ga_flat_entry::shape;
%ignore ga_param_info::shape;           // dimension

// What a wrapper returns with an exception, where SWIG has no $null for the language.
#ifndef GA_NULL
#define GA_NULL $null
#endif

// A constructor, which may throw a Failure.
%define %ga_throws(FUNCTION)
%exception FUNCTION {
  try {
    $action
  } catch (const Failure& failure) {
    GA_RAISE(failure.status, GA_NULL);
  }
}
%enddef

// Structs that own nothing else.
%define %ga_struct(NAME, PARAMETERS, ARGUMENTS...)
%ga_throws(NAME::NAME)
%extend NAME {
  NAME PARAMETERS { return new_struct(ARGUMENTS); }
  ~NAME() { std::free($self); }
}
%enddef

%ga_struct(ga_config, (), ga_config_init)
%ga_struct(ga_clip, (), ga_clip_init)
%ga_struct(ga_loss_scaler, (), ga_loss_scaler_init)
%ga_struct(ga_ema, (), ga_ema_init)
%ga_struct(ga_bn_options, (ga_flavor flavor), ga_bn_options_init, flavor)
%ga_struct(ga_param_options, (), ga_param_options_init)
%ga_struct(ga_micro_options, (), ga_micro_options_init)
%ga_struct(ga_window_info, (), ga_window_info_init)
%ga_struct(ga_kept_info, (), ga_kept_info_init)
%ga_struct(ga_step_result, (), ga_step_result_init)
%ga_struct(ga_accumulator, (), ga_accumulator_init)
%ga_struct(ga_param_info, (), ga_param_info_init)
%ga_struct(ga_bn_info, (), ga_bn_info_init)
%ga_struct(ga_state_info, (), ga_state_info_init)
%ga_struct(ga_memory, (), ga_memory_init)
%ga_struct(ga_build, (), ga_build_init)
%ga_struct(ga_comm_config, (ga_comm_kind kind), ga_comm_config_init, kind)
%ga_struct(ga_comm_options, (), ga_comm_options_init)

%ga_throws(ga_optimizer::ga_optimizer)
%ga_throws(ga_schedule::ga_schedule)
%ga_throws(ga_flat_entry::ga_flat_entry)
%ga_throws(ga_state_options::ga_state_options)

%extend ga_schedule {
  ga_schedule(ga_schedule_kind kind) { return new_struct(ga_schedule_init, kind); }
  ~ga_schedule() {
    std::free(const_cast<double*>($self->table));
    std::free($self);
  }
  ga_status set_table(const double* table, int64_t table_size) {
    const ga_status status =
        replace_copy(&$self->table, table, static_cast<size_t>(table_size));
    if (status == GA_OK) $self->table_size = table_size;
    return status;
  }
}

// options is a proxy of the caller's, which must outlive the entry.
%extend ga_flat_entry {
  ga_flat_entry() { return new_struct(ga_flat_entry_init); }
  ~ga_flat_entry() {
    std::free(const_cast<char*>($self->name));
    std::free(const_cast<int64_t*>($self->shape));
    std::free($self);
  }
  ga_status set_name(const char* name) {
    return replace_copy(&$self->name, name, size_of_text(name));
  }
  ga_status set_shape(int32_t rank, const int64_t* shape) {
    const ga_status status = replace_copy(&$self->shape, shape, static_cast<size_t>(rank));
    if (status == GA_OK) $self->rank = rank;
    return status;
  }
}

%extend ga_state_options {
  ga_state_options() { return new_struct(ga_state_options_init); }
  ~ga_state_options() {
    std::free(const_cast<char*>($self->note));
    std::free($self);
  }
  ga_status set_note(const char* note) {
    return replace_copy(&$self->note, note, size_of_text(note));
  }
}

// ns_table is always a copy of its own, or NULL.
%extend ga_optimizer {
  ga_optimizer(ga_optimizer_kind kind, ga_flavor flavor) {
    return new_struct(ga_optimizer_init, kind, flavor);
  }
  ~ga_optimizer() {
    std::free(const_cast<double*>($self->ns_table));
    std::free($self);
  }
  int32_t ns_table_size() const { return 3 * $self->ns_rows; }
  double ns_table_number(int32_t index) const {
    return index >= 0 && index < 3 * $self->ns_rows ? $self->ns_table[index] : NAN;
  }
  // An empty table is none. GA_ERROR_INVALID_ARGUMENT: no whole number of rows.
  ga_status set_ns_table(const double* table, int64_t table_size) {
    if (table_size % 3 != 0 || table_size > INT32_MAX) return GA_ERROR_INVALID_ARGUMENT;
    const ga_status status = replace_copy(&$self->ns_table, table_size > 0 ? table : nullptr,
                                          static_cast<size_t>(table_size));
    if (status == GA_OK) $self->ns_rows = static_cast<int32_t>(table_size / 3);
    return status;
  }
  double ns_coefficient(int32_t index) const {
    return index >= 0 && index < 3 ? $self->ns_coefficients[index] : NAN;
  }
  void set_ns_coefficient(int32_t index, double value) {
    if (index >= 0 && index < 3) $self->ns_coefficients[index] = value;
  }
}

// Valid as long as the context of the info.
%extend ga_param_info {
  int64_t dimension(int32_t axis) const {
    return axis >= 0 && axis < $self->rank ? $self->shape[axis] : -1;
  }
}

// ---- Functions ----------------------------------------------------------------------------------

// entries: the addresses of proxies, in place of an array of structs.
%ignore ga_params_add_flat;
%rename(ga_params_add_flat) params_add_flat;
%inline %{
static ga_status params_add_flat(ga_context* ctx, void* data, ga_dtype dtype,
                                 const void* const* entries, size_t count,
                                 const ga_param_options* options, ga_param* out) {
  try {
    std::vector<ga_flat_entry> array;
    array.reserve(count);
    for (size_t i = 0; i < count; ++i) {
      array.push_back(*static_cast<const ga_flat_entry*>(entries[i]));
    }
    return ga_params_add_flat(ctx, data, dtype, array.data(), count, options, out);
  } catch (const std::bad_alloc&) {
    return GA_ERROR_OUT_OF_MEMORY;
  }
}
%}

// The table of the result is copied: the context's lives no longer than that.
%ignore ga_group_optimizer;
%rename(ga_group_optimizer) group_optimizer;
%inline %{
static ga_status group_optimizer(const ga_context* ctx, ga_group group, ga_optimizer* out) {
  if (out == nullptr) return ga_group_optimizer(ctx, group, out);
  ga_optimizer read = *out;
  ga_status status = ga_group_optimizer(ctx, group, &read);
  if (status != GA_OK) return status;
  const double* const table = read.ns_table;
  read.ns_table = out->ns_table;
  status = replace_copy(&read.ns_table, table, 3 * static_cast<size_t>(read.ns_rows));
  if (status == GA_OK) *out = read;
  return status;
}
%}

// params: the numbers of parameters, each as wide as an address, in place of an array of int32_t.
%ignore ga_params_ready;
%rename(ga_params_ready) params_ready;
%inline %{
static ga_status params_ready(ga_context* ctx, const void* const* params, size_t count) {
  try {
    std::vector<ga_param> array;
    array.reserve(count);
    for (size_t i = 0; i < count; ++i) {
      array.push_back(static_cast<ga_param>(reinterpret_cast<intptr_t>(params[i])));
    }
    return ga_params_ready(ctx, array.data(), count);
  } catch (const std::bad_alloc&) {
    return GA_ERROR_OUT_OF_MEMORY;
  }
}
%}

%include "gradaccum/gradaccum.h"
%include "gradaccum/batchnorm.h"
%include "gradaccum/comm.h"
%include "gradaccum/state.h"
