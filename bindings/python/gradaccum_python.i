// The typemaps of Python. bindings/gradaccum.i says what they are for.
// SPDX-License-Identifier: Apache-2.0
%module(package="gradaccum") _raw

%{
#include <atomic>
#include <chrono>
#include <climits>
#include <cstdint>
#include <thread>

#include "gradaccum/gradaccum.h"
#include "export.hpp"
#include "tensors.hpp"

namespace {

// ---- The interpreter's lock ---------------------------------------------------------------------

// Gives the interpreter's lock to other threads while the library works.
class Released {
 public:
  Released() : outer_(innermost), state_(PyEval_SaveThread()) { innermost = this; }
  Released(const Released&) = delete;
  Released& operator=(const Released&) = delete;
  ~Released() {
    PyEval_RestoreThread(state_);
    innermost = outer_;
  }

  // Whether this thread has called the library.
  static bool is_in_call() { return innermost != nullptr; }

  // Takes it back for a callback, which the library calls on the thread of its caller.
  class Back {
   public:
    Back() : released_(innermost) { PyEval_RestoreThread(released_->state_); }
    Back(const Back&) = delete;
    Back& operator=(const Back&) = delete;
    ~Back() {
      innermost = released_;
      released_->state_ = PyEval_SaveThread();
    }

   private:
    Released* released_;
  };

 private:
  static thread_local Released* innermost;
  Released* outer_;
  PyThreadState* state_;
};

thread_local Released* Released::innermost = nullptr;

// ---- Callbacks ----------------------------------------------------------------------------------

// user is a callable, which the caller of the library keeps alive. An exception of one that can end
// the call is raised in place of the call's own.
thread_local PyObject* stopped_by[3];

int32_t stop(PyObject* result) {
  if (result != nullptr) {
    const bool stops = result != Py_None && PyObject_IsTrue(result) == 1;
    Py_DECREF(result);
    return stops ? 1 : 0;
  }
  for (PyObject* former : stopped_by) Py_XDECREF(former);
  PyErr_Fetch(&stopped_by[0], &stopped_by[1], &stopped_by[2]);
  return 1;
}

void relay_log(void* user, const char* line) {
  const Released::Back back;
  PyObject* callable = static_cast<PyObject*>(user);
  const Ref text(PyUnicode_DecodeUTF8(line, static_cast<Py_ssize_t>(std::strlen(line)), "replace"));
  const Ref result(text ? PyObject_CallFunctionObjArgs(callable, text.get(), nullptr) : nullptr);
  if (!result) PyErr_WriteUnraisable(callable);
}

int32_t relay_progress(void* user, int64_t done, int64_t total) {
  const Released::Back back;
  return stop(PyObject_CallFunction(static_cast<PyObject*>(user), "LL",
                                    static_cast<long long>(done), static_cast<long long>(total)));
}

// The callable is given a memoryview, which it cannot use any more once it has returned.
int32_t relay_memory(void* user, int64_t offset, void* data, size_t size, int access) {
  const Released::Back back;
  const Ref view(PyMemoryView_FromMemory(static_cast<char*>(data), static_cast<Py_ssize_t>(size),
                                         access));
  if (!view) return stop(nullptr);
  Ref result(PyObject_CallFunction(static_cast<PyObject*>(user), "LO",
                                   static_cast<long long>(offset), view.get()));
  const Ref released(result ? PyObject_CallMethod(view.get(), "release", nullptr) : nullptr);
  return stop(released ? result.release() : nullptr);
}

int32_t relay_write(void* user, int64_t offset, const void* data, size_t size) {
  return relay_memory(user, offset, const_cast<void*>(data), size, PyBUF_READ);
}

int32_t relay_read(void* user, int64_t offset, void* data, size_t size) {
  return relay_memory(user, offset, data, size, PyBUF_WRITE);
}

// Callbacks on threads of the library, those included that wait for the interpreter's lock. None begins once
// callbacks_ended is set, because a thread cannot take the lock of an interpreter that ends.
std::atomic<int> library_callbacks{0};
std::atomic<bool> callbacks_ended{false};

// On a thread of the library: the callable that it calls.
thread_local PyObject* running_callback = nullptr;

void tell_param_done(PyObject* callable, ga_param param) {
  const Ref result(PyObject_CallFunction(callable, "i", static_cast<int>(param)));
  if (!result) PyErr_WriteUnraisable(callable);
}

void relay_param_done(void* user, ga_param param) {
  PyObject* callable = static_cast<PyObject*>(user);
  if (Released::is_in_call()) {
    const Released::Back back;
    tell_param_done(callable, param);
    return;
  }
  ++library_callbacks;
  if (!callbacks_ended) {
    running_callback = callable;
    const PyGILState_STATE state = PyGILState_Ensure();
    tell_param_done(callable, param);
    PyGILState_Release(state);
    running_callback = nullptr;
  }
  --library_callbacks;
}

// ---- Errors -------------------------------------------------------------------------------------

PyObject* error_class = nullptr;

// gradaccum.Error with the status and the message of the call that has just failed, or what a
// callback of that call raised.
void raise(ga_status status) {
  if (stopped_by[0] != nullptr) {
    PyErr_Restore(stopped_by[0], stopped_by[1], stopped_by[2]);
    for (PyObject*& part : stopped_by) part = nullptr;
    return;
  }
  const char* message = ga_last_error();
  const Ref text(
      PyUnicode_DecodeUTF8(message, static_cast<Py_ssize_t>(std::strlen(message)), "replace"));
  if (!text) return;
  if (error_class == nullptr) {
    PyErr_SetObject(PyExc_RuntimeError, text.get());
    return;
  }
  const Ref error(PyObject_CallFunction(error_class, "iO", static_cast<int>(status), text.get()));
  if (error) PyErr_SetObject(error_class, error.get());
}

// ---- Arguments ----------------------------------------------------------------------------------

// A list as it is, or a list of the items of another sequence.
PyObject* new_list(PyObject* sequence) {
  return PyList_Check(sequence) ? Py_NewRef(sequence) : PySequence_List(sequence);
}

// An address: an int, None, or the capsule of a loan.
bool address_of(PyObject* object, void** address) {
  if (PyLong_Check(object)) {
    *address = PyLong_AsVoidPtr(object);
    return *address != nullptr || PyErr_Occurred() == nullptr;
  }
  if (object == Py_None) {
    *address = nullptr;
    return true;
  }
  if (PyCapsule_IsValid(object, kLoan) != 0) {
    *address = loan_of(object)->data;
    return true;
  }
  PyErr_SetString(PyExc_TypeError, "an address is an int");
  return false;
}

// A text of Python's, or bytes; NULL for None.
bool text_of(PyObject* object, const char** text) {
  *text = nullptr;
  if (object == Py_None) return true;
  Py_ssize_t size = 0;
  char* bytes = nullptr;
  if (PyBytes_Check(object)) {
    if (PyBytes_AsStringAndSize(object, &bytes, &size) != 0) return false;
    *text = bytes;
  } else if (PyUnicode_Check(object)) {
    *text = PyUnicode_AsUTF8AndSize(object, &size);
    if (*text == nullptr) return false;
  } else {
    PyErr_SetString(PyExc_TypeError, "a text is a str");
    return false;
  }
  if (std::strlen(*text) != static_cast<size_t>(size)) {
    PyErr_SetString(PyExc_ValueError, "a text has a character NUL within");
    return false;
  }
  return true;
}

}  // namespace

#define GA_RAISE(status, null) \
  do {                         \
    raise(status);             \
    return null;               \
  } while (0)
%}

// ---- Numbers and texts --------------------------------------------------------------------------

%apply int { int32_t };
%apply unsigned int { uint32_t };
%apply long long { int64_t };
%apply unsigned long long { uint64_t, size_t };

%typemap(in) void* ADDRESS (void* address) %{
  if (!address_of($input, &address)) SWIG_fail;
  $1 = ($1_ltype)address;
%}
%typemap(out) void* ADDRESS %{ $result = PyLong_FromVoidPtr((void*)$1); %}
%typemap(freearg) void* ADDRESS ""

%typemap(in) const char* (const char* text) %{
  if (!text_of($input, &text)) SWIG_fail;
  $1 = const_cast<char*>(text);
%}
%typemap(out) const char* %{
  $result = $1 != nullptr ? PyUnicode_DecodeUTF8($1, (Py_ssize_t)std::strlen($1), "replace")
                          : SWIG_Py_Void();
%}
%typemap(freearg) const char* ""

// ---- Status -------------------------------------------------------------------------------------

%typemap(out) ga_status %{
  if ($1 != GA_OK || stopped_by[0] != nullptr) {
    raise($1);
    SWIG_fail;
  }
  $result = SWIG_Py_Void();
%}

// ---- Out parameters and arrays ------------------------------------------------------------------

// Adds a result, which is NULL where memory ran out.
%define %ga_append(VALUE)
{
  PyObject* const more = VALUE;
  if (!more) SWIG_fail;
  $result = SWIG_Python_AppendOutput($result, more, 1);
}
%enddef

// Out parameters are results: one as it is, several as a list.
%define %ga_out(TYPE, TO_PYTHON)
%typemap(in, numinputs=0) TYPE* OUT ($*1_ltype value) %{
  value = {};
  $1 = &value;
%}
%typemap(argout) TYPE* OUT { %ga_append(TO_PYTHON(value$argnum)) }
%typemap(freearg) TYPE* OUT ""
%enddef

%ga_out(int32_t, PyLong_FromLong)
%ga_out(int64_t, PyLong_FromLongLong)
%ga_out(size_t, PyLong_FromSize_t)
%ga_out(double, PyFloat_FromDouble)
%ga_out(void*, PyLong_FromVoidPtr)
%typemap(argout) void** OUT { %ga_append(PyLong_FromVoidPtr(const_cast<void*>((const void*)value$argnum))) }

%typemap(in) (const void* const* ARRAY, size_t COUNT) (std::vector<void*> addresses) {
  const Ref list(new_list($input));
  if (!list) SWIG_fail;
  addresses.resize((size_t)PyList_Size(list.get()));
  bool is_read = true;
  for (size_t i = 0; is_read && i < addresses.size(); ++i) {
    is_read = address_of(PyList_GetItem(list.get(), (Py_ssize_t)i), &addresses[i]);
  }
  if (!is_read) SWIG_fail;
  $1 = ($1_ltype)addresses.data();
  $2 = addresses.size();
}
%typemap(in) const int64_t* ARRAY (std::vector<int64_t> numbers) %{
  if (!read_numbers<int64_t, integer_of>($input, &numbers)) SWIG_fail;
  $1 = numbers.data();
%}
%typemap(in) (int32_t COUNT, const int64_t* ARRAY) (std::vector<int64_t> numbers) %{
  if (!read_numbers<int64_t, integer_of>($input, &numbers)) SWIG_fail;
  $1 = (int32_t)(numbers.size() < INT32_MAX ? numbers.size() : INT32_MAX);
  $2 = numbers.data();
%}
%typemap(in) (const double* ARRAY, int64_t COUNT) (std::vector<double> numbers) %{
  if (!read_numbers<double, double_of>($input, &numbers)) SWIG_fail;
  $1 = numbers.data();
  $2 = (int64_t)numbers.size();
%}
%typemap(freearg) (const void* const* ARRAY, size_t COUNT), const int64_t* ARRAY,
                  (int32_t COUNT, const int64_t* ARRAY), (const double* ARRAY, int64_t COUNT) ""

// ---- Tensors ------------------------------------------------------------------------------------

%inline %{
// The class that a failure is raised as: called with the status and the message.
static void set_error_class(PyObject* type) {
  Py_XINCREF(type);
  Py_XDECREF(error_class);
  error_class = type;
}

// The classes that this module keeps are those of one interpreter.
static bool is_main_interpreter() { return PyInterpreterState_GetID(PyInterpreterState_Get()) == 0; }

// What a tensor must be like. shape: None: at least that many elements. stream: a list of one number.
static PyObject* expect(const char* what, int dtype, PyObject* shape, long long least, bool written,
                        bool dense, int device, int ordinal, PyObject* stream) {
  Py_INCREF(stream);
  auto* expected = new Expected{what,    dtype, shape != Py_None, {},      least,
                                written, dense, device,           ordinal, Ref(stream)};
  if (expected->has_shape && !read_numbers<int64_t, integer_of>(shape, &expected->shape)) {
    delete expected;
    return nullptr;
  }
  return new_capsule<Expected, kExpected>(expected);
}

// Borrows the memory of an object: a capsule that stands for its address.
static PyObject* borrow(PyObject* object, PyObject* expected) {
  auto* wanted = static_cast<Expected*>(PyCapsule_GetPointer(expected, kExpected));
  return wanted != nullptr ? lend(object, *wanted) : nullptr;
}

// What borrow() gives for each object; as many are expected. None and ints, which are addresses, pass;
// where None is expected, an object is not read.
static PyObject* borrow_all(PyObject* objects, PyObject* expected) {
  const Ref list(new_list(objects));
  if (!list) return nullptr;
  const Py_ssize_t count = PyList_Size(list.get());
  if (count != PyList_Size(expected)) {
    PyErr_Format(PyExc_ValueError,
                 "there are %zd gradients, expected %zd: one for each parameter and each flat block, "
                 "in the order in which they were added",
                 count, PyList_Size(expected));
    return nullptr;
  }
  Ref loans(PyList_New(count));
  if (!loans) return nullptr;
  for (Py_ssize_t i = 0; i < count; ++i) {
    PyObject* wanted = PyList_GetItem(expected, i);
    PyObject* object = wanted != Py_None ? PyList_GetItem(list.get(), i) : Py_None;
    if (object == nullptr) return nullptr;  // an object has changed the list
    const Ref kept(Py_NewRef(object));
    const bool passes = object == Py_None || PyLong_CheckExact(object);
    PyObject* loan = passes ? Py_NewRef(object) : borrow(object, wanted);
    if (loan == nullptr || PyList_SetItem(loans.get(), i, loan) != 0) return nullptr;
  }
  return loans.release();
}

// (address, dtype, shape, strides) of a loan.
static PyObject* describe(PyObject* capsule) {
  const Loan* loan = loan_of(capsule);
  if (loan == nullptr) return nullptr;
  return Py_BuildValue("NiNN", PyLong_FromVoidPtr(loan->data), loan->dtype, tuple_of(loan->shape()),
                       tuple_of(loan->strides()));
}

// A capsule of DLPack over memory that owner keeps alive.
static PyObject* export_tensor(PyObject* address, int dtype, PyObject* shape, int device,
                               int ordinal, bool read_only, bool versioned, PyObject* owner) {
  std::vector<int64_t> dimensions;
  void* data = nullptr;
  if (!address_of(address, &data) || !read_numbers<int64_t, integer_of>(shape, &dimensions)) {
    return nullptr;
  }
  const dlpack::Device where = {device, ordinal};
  return versioned
             ? new_export<dlpack::Versioned>(data, dtype, dimensions, where, read_only, owner,
                                             kVersioned, destroy_unused<dlpack::Versioned, kVersioned>)
             : new_export<dlpack::Managed>(data, dtype, dimensions, where, read_only, owner, kPlain,
                                           destroy_unused<dlpack::Managed, kPlain>);
}

// The fields of a result in the order of gradaccum.StepResult.
static PyObject* values_of(const ga_step_result* r) {
  return Py_BuildValue("iLLLdddddLLLdddKLLL", (int)r->outcome, (long long)r->windows,
                       (long long)r->steps, (long long)r->micro_batches, r->weight, r->norm,
                       r->clip_factor, r->lr, r->loss_scale, (long long)r->skipped,
                       (long long)r->dropped, (long long)r->window_dropped, r->noise_scale,
                       r->noise_trace, r->noise_signal, (unsigned long long)r->dropped_micros,
                       (long long)r->eager, (long long)r->eager_waited, (long long)r->eager_redone);
}
%}

// The addresses of the C callbacks whose user is a callable of Python's.
%inline %{
static PyObject* log_function() { return PyLong_FromVoidPtr((void*)relay_log); }
static PyObject* progress_function() { return PyLong_FromVoidPtr((void*)relay_progress); }
static PyObject* write_function() { return PyLong_FromVoidPtr((void*)relay_write); }
static PyObject* read_function() { return PyLong_FromVoidPtr((void*)relay_read); }
static PyObject* param_done_function() { return PyLong_FromVoidPtr((void*)relay_param_done); }

// Whether this thread is one of the library that calls the callable.
static bool runs_callback(PyObject* callable) { return running_callback == callable; }

// An interpreter may be started again after one that has ended: this module stays in memory, and what it knows
// of the former one goes.
static void begin_callbacks() { callbacks_ended = false; }

// Before the interpreter ends: has threads of the library call Python no more, and waits for those that do.
static void end_callbacks() {
  callbacks_ended = true;
  const Released released;
  while (library_callbacks > 0) std::this_thread::sleep_for(std::chrono::milliseconds(1));
}

// In a child after fork(), which has none of these threads.
static void forget_callbacks() { library_callbacks = 0; }
%}

%inline %{
// The note in a file as a str, or None.
static PyObject* state_note(const char* path) {
  std::vector<char> note(1);
  size_t size = 0;
  for (;;) {
    ga_status status;
    {
      const Released released;
      status = ga_state_note(path, note.data(), note.size(), &size);
    }
    if (status == GA_OK) break;
    if (size <= note.size()) {
      raise(status);
      return nullptr;
    }
    note.resize(size);
  }
  if (size == 0) Py_RETURN_NONE;
  return PyUnicode_DecodeUTF8(note.data(), static_cast<Py_ssize_t>(size - 1), "replace");
}
%}

// ---- Calls --------------------------------------------------------------------------------------

// Everything after this: the interpreter's lock is not held during a call. (Fields of structs are
// read and written with it.)
%exception {
  const Released released;
  $action
}

#define GA_NULL nullptr
%include "../gradaccum.i"

%inline %{
// The address of the loss scale on a device, without waiting for its value.
static ga_status loss_scale_address(const ga_context* ctx, const void** out_device) {
  return ga_loss_scale(ctx, nullptr, out_device);
}

// table: the address of a ga_comm_table that ctypes has made.
static void set_comm_table(ga_comm_config* config, const void* table) {
  config->table = static_cast<const ga_comm_table*>(table);
}
%}

// ---- Memory of Python's -------------------------------------------------------------------------

%typemap(in) (const void* BYTES, size_t SIZE) (Py_buffer view) {
  view = {};
  if (PyObject_GetBuffer($input, &view, PyBUF_SIMPLE) != 0) SWIG_fail;
  $1 = ($1_ltype)view.buf;
  $2 = (size_t)view.len;
}
%typemap(freearg) (const void* BYTES, size_t SIZE) %{
  if (view$argnum.obj != nullptr) PyBuffer_Release(&view$argnum);
%}
%apply (const void* BYTES, size_t SIZE) { (const void* bytes, size_t size) };
%typemap(in) (void* bytes, size_t capacity) = (const void* BYTES, size_t SIZE);
%typemap(freearg) (void* bytes, size_t capacity) = (const void* BYTES, size_t SIZE);

%inline %{
static ga_status load_from_buffer(ga_context* ctx, const void* bytes, size_t size,
                                  const ga_state_options* options) {
  return ga_load_from_memory(ctx, bytes, size, options);
}

static ga_status save_to_buffer(ga_context* ctx, const ga_state_options* options, void* bytes,
                                size_t capacity, size_t* out_size) {
  return ga_save_to_memory(ctx, options, bytes, capacity, out_size);
}
%}
