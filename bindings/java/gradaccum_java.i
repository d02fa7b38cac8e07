// The typemaps of Java. bindings/gradaccum.i says what they are for.
// SPDX-License-Identifier: Apache-2.0
%module Raw

// The raw layer is not part of the public interface of its package.
%pragma(java) moduleclassmodifiers="final class"
%pragma(java) jniclassclassmodifiers="final class"
%typemap(javaclassmodifiers) SWIGTYPE "final class"
%javaconst(1);

%{
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <new>

#include "gradaccum/gradaccum.h"

namespace {

// An array of bytes with a text; null if there is not enough memory, with an exception pending.
jbyteArray new_bytes(JNIEnv* env, const char* text) {
  const jsize size = static_cast<jsize>(std::strlen(text));
  jbyteArray bytes = env->NewByteArray(size);
  if (bytes == nullptr) return nullptr;
  env->SetByteArrayRegion(bytes, 0, size, reinterpret_cast<const jbyte*>(text));
  return bytes;
}

// Leaves an exception pending: the caller returns at once.
void raise_class(JNIEnv* env, const char* name) {
  jclass type = env->FindClass(name);
  if (type != nullptr) env->ThrowNew(type, nullptr);
}

// A GradAccumException with the status and the message of the call that has just failed.
void raise(JNIEnv* env, ga_status status) {
  jbyteArray message = new_bytes(env, ga_last_error());
  if (message == nullptr) return;
  jclass type = env->FindClass("org/gradaccum/GradAccumException");
  if (type == nullptr) return;
  jmethodID constructor = env->GetMethodID(type, "<init>", "(I[B)V");
  if (constructor == nullptr) return;
  jobject thrown = env->NewObject(type, constructor, static_cast<jint>(status), message);
  if (thrown != nullptr) env->Throw(static_cast<jthrowable>(thrown));
}

// A copy of an array of Java's, on the stack if it is short. Nothing of the heap of Java is locked
// during a call.
template <typename Element, typename Array, void (JNIEnv::*get)(Array, jsize, jsize, Element*)>
class Copy {
 public:
  Copy() = default;
  Copy(const Copy&) = delete;
  Copy& operator=(const Copy&) = delete;
  ~Copy() {
    if (data_ != few_) std::free(data_);
  }

  // Returns false if there is not enough memory; an exception of Java is then pending.
  bool take(JNIEnv* env, Array array) {
    if (array == nullptr) return true;
    size_ = env->GetArrayLength(array);
    data_ = few_;
    if (size_ > kFew) {
      data_ = static_cast<Element*>(std::malloc(static_cast<size_t>(size_) * sizeof(Element)));
      if (data_ == nullptr) {
        raise_class(env, "java/lang/OutOfMemoryError");
        return false;
      }
    }
    (env->*get)(array, 0, size_, data_);
    return true;
  }

  Element* data() { return data_; }  // null if the array was
  jsize size() const { return size_; }

 private:
  static constexpr jsize kFew = 512;
  Element few_[kFew];
  Element* data_ = nullptr;
  jsize size_ = 0;
};

using Bytes = Copy<jbyte, jbyteArray, &JNIEnv::GetByteArrayRegion>;
using Longs = Copy<jlong, jlongArray, &JNIEnv::GetLongArrayRegion>;
using Doubles = Copy<jdouble, jdoubleArray, &JNIEnv::GetDoubleArrayRegion>;

static_assert(sizeof(jlong) == sizeof(void*), "an address is a long");

}  // namespace

// ---- Callbacks --------------------------------------------------------------------------------

// What the user pointer of a C callback is: the Callback of Java that is called in its place.
struct Relay {
  JavaVM* vm;
  jobject callback;
  bool weak;
  jmethodID method;
};

// The largest buffer that Java has for memory of others is not much larger.
constexpr size_t kLargestTransfer = size_t{1} << 30;

// Calls of C come on the thread that has called C, which belongs to Java, but for those of
// relay_param_done. Null on a thread that does not belong to Java.
JNIEnv* env_of(const Relay& relay) {
  void* env = nullptr;
  relay.vm->GetEnv(&env, JNI_VERSION_10);
  return static_cast<JNIEnv*>(env);
}

// A Callback keeps what its listener throws. Only what the JVM throws before it gets there, for
// want of stack or memory, is seen here.
bool failed(JNIEnv* env) {
  if (!env->ExceptionCheck()) return false;
  env->ExceptionClear();
  return true;
}

void relay_log(void* user, const char* line) {
  const Relay& relay = *static_cast<Relay*>(user);
  JNIEnv* env = env_of(relay);
  // The listener of a context that was left to the collector may be gone.
  jobject callback = env->NewLocalRef(relay.callback);
  if (callback == nullptr) return;
  jbyteArray bytes = new_bytes(env, line);
  if (bytes != nullptr) env->CallVoidMethod(callback, relay.method, bytes);
  failed(env);
  env->DeleteLocalRef(bytes);
  env->DeleteLocalRef(callback);
}

// Attaches a thread of the library to the JVM until the thread ends.
class Attachment {
 public:
  Attachment() = default;
  Attachment(const Attachment&) = delete;
  Attachment& operator=(const Attachment&) = delete;
  ~Attachment() {
    if (vm_ != nullptr) vm_->DetachCurrentThread();
  }

  // Null if the JVM refuses. It does not wait for the thread when the program ends.
  JNIEnv* attach(JavaVM* vm) {
    char name[] = "gradaccum";
    JavaVMAttachArgs arguments = {JNI_VERSION_10, name, nullptr};
    void* env = nullptr;
    if (vm->AttachCurrentThreadAsDaemon(&env, &arguments) != JNI_OK) return nullptr;
    vm_ = vm;
    return static_cast<JNIEnv*>(env);
  }

 private:
  JavaVM* vm_ = nullptr;
};

thread_local Attachment attachment;

void relay_param_done(void* user, ga_param param) {
  const Relay& relay = *static_cast<Relay*>(user);
  JNIEnv* env = env_of(relay);
  if (env == nullptr) env = attachment.attach(relay.vm);
  if (env == nullptr) return;
  jobject callback = env->NewLocalRef(relay.callback);
  if (callback == nullptr) return;
  env->CallVoidMethod(callback, relay.method, static_cast<jint>(param));
  failed(env);
  env->DeleteLocalRef(callback);
}

int32_t relay_progress(void* user, int64_t done, int64_t total) {
  const Relay& relay = *static_cast<Relay*>(user);
  JNIEnv* env = env_of(relay);
  const jint result = env->CallIntMethod(relay.callback, relay.method, static_cast<jlong>(done),
                                         static_cast<jlong>(total));
  return failed(env) ? 1 : result;
}

int32_t relay_read(void* user, int64_t offset, void* data, size_t size) {
  const Relay& relay = *static_cast<Relay*>(user);
  JNIEnv* env = env_of(relay);
  for (size_t done = 0; done < size;) {
    const size_t piece = size - done < kLargestTransfer ? size - done : kLargestTransfer;
    jobject buffer =
        env->NewDirectByteBuffer(static_cast<char*>(data) + done, static_cast<jlong>(piece));
    jint result = 1;
    if (buffer != nullptr) {
      result = env->CallIntMethod(relay.callback, relay.method,
                                  static_cast<jlong>(offset) + static_cast<jlong>(done), buffer);
    }
    if (failed(env)) result = 1;
    env->DeleteLocalRef(buffer);
    if (result != 0) return result;
    done += piece;
  }
  return 0;
}

int32_t relay_write(void* user, int64_t offset, const void* data, size_t size) {
  return relay_read(user, offset, const_cast<void*>(data), size);
}

#define GA_RAISE(status, null) \
  do {                         \
    raise(jenv, status);       \
    return null;               \
  } while (0)
%}

// The natives are loaded before the first of their functions is called.
%pragma(java) jniclasscode=%{
  static {
    Natives.load();
  }
%}

// ---- Numbers and texts --------------------------------------------------------------------------

%apply int { int32_t, uint32_t };
%apply long long { int64_t, uint64_t, size_t };

// A long of Java's holds the 64 bits of an unsigned number too.
%typemap(in) uint32_t, uint64_t, size_t %{ $1 = static_cast<$1_ltype>($input); %}
%typemap(out) uint32_t %{ $result = static_cast<jint>($1); %}
%typemap(out) uint64_t, size_t %{ $result = static_cast<jlong>($1); %}

%apply long long { void* ADDRESS };
%typemap(in) void* ADDRESS %{ $1 = reinterpret_cast<$1_ltype>($input); %}
%typemap(freearg) void* ADDRESS ""
%typemap(out) void* ADDRESS %{ $result = reinterpret_cast<jlong>($1); %}

%apply void* ADDRESS { void*, const void* };

// Java's own functions for strings use another encoding than UTF-8.
%typemap(jni) const char* "jbyteArray"
%typemap(jtype) const char* "byte[]"
%typemap(jstype) const char* "String"
%typemap(javain) const char* "Text.encode($javainput)"
%typemap(javaout) const char* { return Text.decode($jnicall); }
%typemap(in) const char* (Bytes bytes) %{
  if (!bytes.take(jenv, $input)) return $null;
  $1 = reinterpret_cast<char*>(bytes.data());
%}
%typemap(out) const char* %{ $result = $1 != nullptr ? new_bytes(jenv, $1) : nullptr; %}
%typemap(freearg) const char* ""

// ---- Status -------------------------------------------------------------------------------------

%typemap(jni) ga_status "void"
%typemap(jtype) ga_status "void"
%typemap(jstype) ga_status "void"
%typemap(javaout) ga_status { $jnicall; }
%typemap(out, null="") ga_status %{
  if ($1 != GA_OK) raise(jenv, $1);
%}
// Where a status is an argument, it is a number.
%typemap(jni) ga_status status "jint"
%typemap(jtype) ga_status status "int"
%typemap(jstype) ga_status status "int"

// ---- Out parameters and arrays ------------------------------------------------------------------

// An array whose element 0 is set, or null.
%define %ga_out(TYPE, JNI, JAVA, SET)
%typemap(jni) TYPE* OUT #JNI "Array"
%typemap(jtype) TYPE* OUT #JAVA "[]"
%typemap(jstype) TYPE* OUT #JAVA "[]"
%typemap(javain) TYPE* OUT "$javainput"
%typemap(in) TYPE* OUT ($*1_ltype value) %{
  value = {};
  $1 = $input != nullptr ? &value : nullptr;
%}
%typemap(argout) TYPE* OUT %{
  if ($input != nullptr && !jenv->ExceptionCheck()) {
    const JNI element = (JNI)value$argnum;
    jenv->SET($input, 0, 1, &element);
  }
%}
%typemap(freearg) TYPE* OUT ""
%enddef

%ga_out(int32_t, jint, int, SetIntArrayRegion)
%ga_out(int64_t, jlong, long, SetLongArrayRegion)
%ga_out(size_t, jlong, long, SetLongArrayRegion)
%ga_out(double, jdouble, double, SetDoubleArrayRegion)
%ga_out(void*, jlong, long, SetLongArrayRegion)

// A copy of an array, with what sets the arguments to it.
%define %ga_array(PARAMETER, JNI, JAVA, COPY, SET)
%typemap(jni) PARAMETER #JNI "Array"
%typemap(jtype) PARAMETER #JAVA "[]"
%typemap(jstype) PARAMETER #JAVA "[]"
%typemap(javain) PARAMETER "$javainput"
%typemap(in) PARAMETER (COPY copy) {
  if (!copy.take(jenv, $input)) return $null;
  SET
}
%typemap(freearg) PARAMETER ""
%enddef

%ga_array(const int64_t* ARRAY, jlong, long, Longs,
          $1 = reinterpret_cast<int64_t*>(copy.data());)
%ga_array((const void* const* ARRAY, size_t COUNT), jlong, long, Longs,
          $1 = reinterpret_cast<void**>(copy.data());
          $2 = static_cast<size_t>(copy.size());)
%ga_array((int32_t COUNT, const int64_t* ARRAY), jlong, long, Longs,
          $1 = copy.size();
          $2 = reinterpret_cast<int64_t*>(copy.data());)
%ga_array((const double* ARRAY, int64_t COUNT), jdouble, double, Doubles,
          $1 = copy.data();
          $2 = copy.size();)

// ---- Buffers and callbacks ----------------------------------------------------------------------

%typemap(in, numinputs=0) JNIEnv* "$1 = jenv;"

// Used by Callback and Tensor. An address of 0 means that there is none.
%inline %{
static void* buffer_address(JNIEnv* env, jobject buffer) {
  return env->GetDirectBufferAddress(buffer);
}

static jobject buffer_at(JNIEnv* env, void* address, int64_t bytes) {
  return env->NewDirectByteBuffer(address, static_cast<jlong>(bytes));
}

// A relay to a method of a Callback, which a weak one does not keep alive. 0: an exception is
// pending.
static void* relay_create(JNIEnv* env, jobject callback, const char* method, const char* signature,
                          bool weak) {
  Relay* relay = new (std::nothrow) Relay{};
  if (relay == nullptr) {
    raise_class(env, "java/lang/OutOfMemoryError");
    return nullptr;
  }
  relay->weak = weak;
  env->GetJavaVM(&relay->vm);
  relay->method = env->GetMethodID(env->GetObjectClass(callback), method, signature);
  if (relay->method != nullptr) {
    relay->callback = weak ? env->NewWeakGlobalRef(callback) : env->NewGlobalRef(callback);
    if (relay->callback != nullptr) return relay;
  }
  delete relay;
  return nullptr;
}

static void relay_destroy(JNIEnv* env, void* address) {
  Relay* relay = static_cast<Relay*>(address);
  if (relay == nullptr) return;
  if (relay->weak) {
    env->DeleteWeakGlobalRef(relay->callback);
  } else {
    env->DeleteGlobalRef(relay->callback);
  }
  delete relay;
}

// The addresses of the C callbacks that take a relay.
static void* log_function() { return reinterpret_cast<void*>(relay_log); }
static void* param_done_function() { return reinterpret_cast<void*>(relay_param_done); }
static void* progress_function() { return reinterpret_cast<void*>(relay_progress); }
static void* write_function() { return reinterpret_cast<void*>(relay_write); }
static void* read_function() { return reinterpret_cast<void*>(relay_read); }
%}

// The words of the struct: a step makes one call for all fields in place of a call for each.
%extend ga_step_result {
  void copy(JNIEnv* env, jlongArray words) const {
    env->SetLongArrayRegion(words, 0, sizeof(ga_step_result) / sizeof(jlong),
                            reinterpret_cast<const jlong*>($self));
  }
}

// ---- Structs ------------------------------------------------------------------------------------

// A proxy is closed by who has made it; it has no finalizer.
%typemap(javainterfaces) SWIGTYPE "AutoCloseable"
%typemap(javabody) SWIGTYPE %{
  private long swigCPtr;
  private final boolean swigCMemOwn;

  $javaclassname(long cPtr, boolean cMemoryOwn) {
    swigCMemOwn = cMemoryOwn;
    swigCPtr = cPtr;
  }

  static long getCPtr($javaclassname proxy) {
    return proxy == null ? 0 : proxy.swigCPtr;
  }
%}
%typemap(javafinalize) SWIGTYPE ""
%typemap(javadestruct, methodname="close", methodmodifiers="public") SWIGTYPE {
    if (swigCPtr != 0 && swigCMemOwn) {
      $jnicall;
    }
    swigCPtr = 0;
  }

%include "../gradaccum.i"
