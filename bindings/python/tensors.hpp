// Reads the tensors of other packages in place: by DLPack, or by the buffer protocol.
// SPDX-License-Identifier: Apache-2.0
#ifndef GRADACCUM_PYTHON_TENSORS_HPP_
#define GRADACCUM_PYTHON_TENSORS_HPP_

#include <Python.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <iterator>
#include <new>
#include <string>
#include <vector>

#include "dlpack.hpp"
#include "gradaccum/gradaccum.h"

namespace {

// Owns a reference, or NULL.
class Ref {
 public:
  explicit Ref(PyObject* object) : object_(object) {}
  Ref(const Ref& other) : object_(other.object_) { Py_XINCREF(object_); }
  Ref& operator=(const Ref&) = delete;
  ~Ref() { Py_XDECREF(object_); }
  PyObject* get() const { return object_; }
  PyObject* release() {
    PyObject* object = object_;
    object_ = nullptr;
    return object;
  }
  explicit operator bool() const { return object_ != nullptr; }

 private:
  PyObject* object_;
};

// Names of attributes and so on, made once.
struct Names {
  PyObject* dlpack = PyUnicode_InternFromString("__dlpack__");
  PyObject* device = PyUnicode_InternFromString("__dlpack_device__");
  PyObject* exchange = PyUnicode_InternFromString("__dlpack_c_exchange_api__");
  PyObject* requires_grad = PyUnicode_InternFromString("requires_grad");
  PyObject* dtype = PyUnicode_InternFromString("dtype");
  PyObject* stream = PyUnicode_InternFromString("stream");
  PyObject* no_arguments = PyTuple_New(0);
  PyObject* plain = PyDict_New();
  PyObject* versioned = Py_BuildValue("{s(ii)}", "max_version", 1, 0);
};

const Names& names() {
  static const Names all;
  return all;
}

// ---- What is expected ---------------------------------------------------------------------------

enum : int32_t { kAnyFloat = 0, kAnyIndex = -1, kCodesOrNumbers = -2 };

// What a tensor must be like. A capsule owns it.
struct Expected {
  std::string what;  // "gradient of parameter \"w\"", for messages
  int32_t dtype;     // a ga_dtype, kAnyFloat, kAnyIndex, or kCodesOrNumbers: GA_U8 or GA_F32
  bool has_shape;
  std::vector<int64_t> shape;
  int64_t least;  // elements, where there is no shape
  bool written;
  bool dense;
  int32_t device;  // of DLPack: kCpu or kCuda
  int32_t ordinal;
  Ref stream;  // of a context on a device, as DLPack counts it: a list, whose only item may change
};

constexpr char kExpected[] = "gradaccum.expected";
constexpr char kLoan[] = "gradaccum.loan";

// Memory that another object lends, until the capsule that owns the loan dies.
struct Loan {
  void* data = nullptr;
  int32_t dtype = 0;  // a ga_dtype
  int32_t rank = 0;
  const int64_t* sizes = nullptr;  // [rank], of what was lent
  const int64_t* steps = nullptr;  // [rank], or NULL: dense
  int64_t step_unit = 1;           // of steps, in elements or bytes
  dlpack::Managed* plain = nullptr;
  dlpack::Versioned* versioned = nullptr;
  Py_buffer buffer = {};

  Loan() = default;
  Loan(const Loan&) = delete;
  Loan& operator=(const Loan&) = delete;
  ~Loan() {
    // A deleter may run Python, which an exception of our own must not reach.
    PyObject *type, *value, *trace;
    PyErr_Fetch(&type, &value, &trace);
    if (plain != nullptr && plain->deleter != nullptr) plain->deleter(plain);
    if (versioned != nullptr && versioned->deleter != nullptr) versioned->deleter(versioned);
    if (buffer.obj != nullptr) PyBuffer_Release(&buffer);
    PyErr_Restore(type, value, trace);
  }

  int64_t stride(int axis, int64_t dense) const {
    return steps != nullptr ? steps[axis] / step_unit : dense;
  }
  std::vector<int64_t> shape() const { return std::vector<int64_t>(sizes, sizes + rank); }
  std::vector<int64_t> strides() const {
    std::vector<int64_t> all(static_cast<size_t>(rank));
    int64_t dense = 1;
    for (int i = rank; i-- > 0; dense *= sizes[i]) all[static_cast<size_t>(i)] = stride(i, dense);
    return all;
  }
};

template <typename T, const char* name>
PyObject* new_capsule(T* owned) {
  PyObject* capsule = PyCapsule_New(owned, name, [](PyObject* self) {
    delete static_cast<T*>(PyCapsule_GetPointer(self, name));
  });
  if (capsule == nullptr) delete owned;
  return capsule;
}

void refuse(PyObject* type, const Expected& expected, const std::string& why) {
  PyErr_SetString(type, (expected.what + ": " + why).c_str());
}

// The message of the pending exception, which is cleared.
std::string take_message() {
  PyObject *type, *value, *trace;
  PyErr_Fetch(&type, &value, &trace);
  const Ref types(type), values(value), traces(trace);
  const Ref text(value != nullptr ? PyObject_Str(value) : nullptr);
  const char* chars = text ? PyUnicode_AsUTF8AndSize(text.get(), nullptr) : nullptr;
  std::string message = chars != nullptr ? chars : "it gave no reason";
  PyErr_Clear();
  message.resize(std::min(message.size(), message.find('\n')));  // torch adds a trace
  while (!message.empty() && message.back() == '.') message.pop_back();
  return message;
}

bool is_error_of_memory() {
  return PyErr_ExceptionMatches(PyExc_MemoryError) != 0 ||
         PyErr_ExceptionMatches(PyExc_Exception) == 0;  // KeyboardInterrupt
}

// The dtypes of elements, as DLPack has them and as messages name them.
struct DtypeInfo {
  int32_t dtype;  // a ga_dtype
  uint8_t code, bits;
  const char* name;
};

constexpr DtypeInfo kDtypes[] = {
    {GA_F32, dlpack::kFloat, 32, "float32"},
    {GA_F64, dlpack::kFloat, 64, "float64"},
    {GA_F16, dlpack::kFloat, 16, "float16"},
    {GA_BF16, dlpack::kBfloat, 16, "bfloat16"},
    {GA_I32, dlpack::kInt, 32, "int32"},
    {GA_I64, dlpack::kInt, 64, "int64"},
    {GA_U8, dlpack::kUInt, 8, "uint8"},
    {kAnyFloat, dlpack::kFloat, 16, "float32, float64, float16 or bfloat16"},
};

// That of kAnyFloat, the last one, for what is no dtype of elements.
const DtypeInfo& info_of(int32_t dtype) {
  return *std::find_if(std::begin(kDtypes), std::end(kDtypes) - 1,
                       [dtype](const DtypeInfo& info) { return info.dtype == dtype; });
}

const char* name_of(int32_t dtype) {
  return dtype == kCodesOrNumbers ? "uint8 for codes, or float32 for numbers"
         : dtype == kAnyIndex     ? "int32 or int64"
                                  : info_of(dtype).name;
}

std::string text_of(const std::vector<int64_t>& shape) {
  std::string text = "[";
  for (size_t i = 0; i < shape.size(); ++i) {
    text += (i > 0 ? ", " : "") + std::to_string(shape[i]);
  }
  return text + "]";
}

// ---- Checks -------------------------------------------------------------------------------------

// The ga_dtype of elements, or 0. 16-bit integers are taken as what is expected of 16 bits.
int32_t dtype_of(int code, int bits, int32_t expected) {
  for (const DtypeInfo& info : kDtypes) {
    if (info.code == code && info.bits == bits) return info.dtype;
  }
  return bits == 16 && (expected == GA_F16 || expected == GA_BF16) ? expected : 0;
}

// text: makes the name of what was found, for the message.
template <typename Text>
bool check_dtype(const Expected& expected, int32_t dtype, Text text) {
  const bool is_index = dtype == GA_I32 || dtype == GA_I64;
  const bool fits = expected.dtype == kAnyFloat         ? dtype != 0 && !is_index && dtype != GA_U8
                    : expected.dtype == kAnyIndex       ? is_index
                    : expected.dtype == kCodesOrNumbers ? dtype == GA_U8 || dtype == GA_F32
                                                        : dtype == expected.dtype;
  if (fits) return true;
  refuse(PyExc_TypeError, expected,
         "the tensor has elements of " + (dtype != 0 ? std::string(name_of(dtype)) : text()) +
             ", expected " + name_of(expected.dtype) +
             (expected.dtype == kAnyFloat
                  ? "; for 16-bit integers that hold such numbers, give the dtype"
                  : ""));
  return false;
}

bool check_shape(const Expected& expected, const Loan& loan) {
  int64_t count = 1;
  bool is_dense = true, is_same = expected.shape.size() == static_cast<size_t>(loan.rank);
  for (int i = loan.rank; i-- > 0; count *= loan.sizes[i]) {
    is_dense = is_dense && (loan.sizes[i] == 1 || loan.stride(i, count) == count);
    is_same = is_same && loan.sizes[i] == expected.shape[static_cast<size_t>(i)];
  }
  if (expected.dense && !is_dense && count > 0) {
    refuse(PyExc_ValueError, expected,
           "the tensor of shape " + text_of(loan.shape()) + " and strides " +
               text_of(loan.strides()) +
               " is not dense and row-major; make a copy that is, such as by contiguous()");
    return false;
  }
  if (!expected.has_shape) {
    if (count >= expected.least) return true;
    refuse(PyExc_ValueError, expected,
           "the tensor has " + std::to_string(count) + " elements, expected " +
               std::to_string(expected.least) + " or more");
    return false;
  }
  if (is_same) return true;
  int64_t wanted = 1;
  for (int64_t dimension : expected.shape) wanted *= dimension;
  if (loan.rank == 1 && count == wanted) return true;  // memory without dimensions
  refuse(PyExc_ValueError, expected,
         "the tensor has the shape " + text_of(loan.shape()) + ", expected " +
             text_of(expected.shape));
  return false;
}

bool check_address(const Expected& expected, const Loan& loan) {
  for (int i = 0; i < loan.rank; ++i) {
    if (loan.sizes[i] == 0) return true;
  }
  if (loan.data == nullptr) {
    refuse(PyExc_ValueError, expected, "the tensor has no memory");
    return false;
  }
  if (reinterpret_cast<uintptr_t>(loan.data) % (info_of(loan.dtype).bits / 8) == 0) return true;
  refuse(PyExc_ValueError, expected,
         "the tensor begins at an address that is no multiple of its element size; make a copy");
  return false;
}

std::string device_text(int32_t type, int32_t id) {
  switch (type) {
    case dlpack::kCpu:
    case dlpack::kCudaHost:
      return "the CPU";
    case dlpack::kCuda:
    case dlpack::kCudaManaged:
      return "CUDA device " + std::to_string(id);
    default:
      return "a device of DLPack's type " + std::to_string(type);
  }
}

bool check_device(const Expected& expected, dlpack::Device device) {
  const bool fits = expected.device == dlpack::kCpu
                        ? device.type == dlpack::kCpu || device.type == dlpack::kCudaHost
                        : (device.type == dlpack::kCuda && device.id == expected.ordinal) ||
                              device.type == dlpack::kCudaManaged;
  if (fits) return true;
  refuse(PyExc_ValueError, expected,
         "the tensor is on " + device_text(device.type, device.id) + ", but the context on " +
             device_text(expected.device, expected.ordinal) + "; move one of them");
  return false;
}

bool refuse_read_only(const Expected& expected) {
  refuse(PyExc_ValueError, expected,
         "the tensor is read-only, but it is written in place; make a copy that can be written");
  return false;
}

// ---- Ways to the memory -------------------------------------------------------------------------

// Takes what a DLPack tensor says over into the loan that owns it.
bool take_tensor(const Expected& expected, const dlpack::Tensor& tensor, Loan* loan) {
  if (!check_device(expected, tensor.device)) return false;
  if (tensor.dtype.lanes != 1) {
    refuse(PyExc_TypeError, expected, "the tensor has vectors for elements");
    return false;
  }
  loan->dtype = dtype_of(tensor.dtype.code, tensor.dtype.bits, expected.dtype);
  const auto text = [&tensor] {
    return "DLPack's type " + std::to_string(tensor.dtype.code) + " with " +
           std::to_string(tensor.dtype.bits) + " bits";
  };
  if (!check_dtype(expected, loan->dtype, text)) return false;
  loan->rank = tensor.ndim;
  loan->sizes = tensor.shape;
  loan->steps = tensor.strides;
  if (tensor.data != nullptr) loan->data = static_cast<char*>(tensor.data) + tensor.byte_offset;
  return check_shape(expected, *loan) && check_address(expected, *loan);
}

bool take_versioned(const Expected& expected, Loan* loan) {
  const dlpack::Versioned& managed = *loan->versioned;
  if (managed.version.major != 1) {
    refuse(PyExc_BufferError, expected,
           "the tensor came by version " + std::to_string(managed.version.major) +
               " of DLPack, but only version 1 is known");
    return false;
  }
  if (expected.written && (managed.flags & dlpack::kIsCopied) != 0) {
    refuse(PyExc_BufferError, expected,
           "the tensor was copied by its framework, but it is written in place");
    return false;
  }
  if (expected.written && (managed.flags & dlpack::kReadOnly) != 0) {
    return refuse_read_only(expected);
  }
  return take_tensor(expected, managed.tensor, loan);
}

// An older capsule does not tell whether the memory may be written, but a buffer does.
bool check_plain_is_written(const Expected& expected, PyObject* object) {
  if (!expected.written || PyObject_CheckBuffer(object) == 0) return true;
  Py_buffer view;
  if (PyObject_GetBuffer(object, &view, PyBUF_STRIDES) != 0) {
    PyErr_Clear();  // a dtype that buffers do not have
    return true;
  }
  const bool read_only = view.readonly != 0;
  PyBuffer_Release(&view);
  return !read_only || refuse_read_only(expected);
}

bool take_capsule(const Expected& expected, PyObject* object, PyObject* capsule, Loan* loan) {
  if (PyCapsule_IsValid(capsule, "dltensor_versioned") != 0) {
    loan->versioned =
        static_cast<dlpack::Versioned*>(PyCapsule_GetPointer(capsule, "dltensor_versioned"));
    PyCapsule_SetName(capsule, "used_dltensor_versioned");
    return take_versioned(expected, loan);
  }
  if (PyCapsule_IsValid(capsule, "dltensor") != 0) {
    loan->plain = static_cast<dlpack::Managed*>(PyCapsule_GetPointer(capsule, "dltensor"));
    PyCapsule_SetName(capsule, "used_dltensor");
    return check_plain_is_written(expected, object) &&
           take_tensor(expected, loan->plain->tensor, loan);
  }
  refuse(PyExc_TypeError, expected, "its __dlpack__ returned something else than a capsule");
  return false;
}

// The arguments, and the stream of the context, which the producer makes wait for its own.
PyObject* with_stream(PyObject* options, const Expected& expected) {
  PyObject* stream = PyList_GetItem(expected.stream.get(), 0);  // borrowed
  Ref keywords(stream != nullptr ? PyDict_Copy(options) : nullptr);
  if (!keywords || PyDict_SetItem(keywords.get(), names().stream, stream) != 0) return nullptr;
  return keywords.release();
}

// Asks for max_version=(1, 0), and if the framework is too old to know it, without.
PyObject* call_dlpack(PyObject* method, const Expected& expected) {
  const Names& name = names();
  for (PyObject* options : {name.versioned, name.plain}) {
    const Ref keywords(expected.device == dlpack::kCpu ? Py_NewRef(options)
                                                       : with_stream(options, expected));
    if (!keywords) return nullptr;
    PyObject* capsule = PyObject_Call(method, name.no_arguments, keywords.get());
    if (capsule != nullptr || PyErr_ExceptionMatches(PyExc_TypeError) == 0) return capsule;
    if (options == name.versioned) PyErr_Clear();
  }
  return nullptr;
}

// The device before the memory: a tensor on the CPU has no stream.
bool check_device_first(const Expected& expected, PyObject* object) {
  const Ref pair(PyObject_CallMethodObjArgs(object, names().device, nullptr));
  if (!pair) return false;
  dlpack::Device device = {};
  return PyArg_ParseTuple(pair.get(), "ii", &device.type, &device.id) != 0 &&
         check_device(expected, device);
}

// What the type of an object offers. To ask an object for what it lacks takes a microsecond, so the
// answers are kept, by type.
struct Offers {
  bool dlpack, requires_grad;
  const dlpack::Exchange* exchange;  // functions of C, or NULL
};

constexpr char kOffers[] = "gradaccum.offers";

const dlpack::Exchange* exchange_of(PyObject* type) {
  const Ref capsule(PyObject_GetAttr(type, names().exchange));
  if (!capsule || PyCapsule_IsValid(capsule.get(), "dlpack_exchange_api") == 0) return nullptr;
  auto* api =
      static_cast<dlpack::Exchange*>(PyCapsule_GetPointer(capsule.get(), "dlpack_exchange_api"));
  while (api != nullptr && api->version.major != 1) api = api->previous;
  return api != nullptr && api->from_object != nullptr ? api : nullptr;
}

// NULL: an exception is set.
const Offers* offers_of(PyObject* object) {
  constexpr Py_ssize_t kMostTypes = 64;
  static PyObject* known = PyDict_New();
  PyObject* type = reinterpret_cast<PyObject*>(Py_TYPE(object));
  PyObject* capsule = PyDict_GetItemWithError(known, type);
  if (capsule == nullptr) {
    PyErr_Clear();
    if (PyDict_Size(known) >= kMostTypes) PyDict_Clear(known);
    auto* offers =
        new Offers{PyObject_HasAttr(type, names().dlpack) != 0,
                   PyObject_HasAttr(type, names().requires_grad) != 0, exchange_of(type)};
    PyErr_Clear();
    const Ref made(new_capsule<Offers, kOffers>(offers));
    if (!made || PyDict_SetItem(known, type, made.get()) != 0) return nullptr;
    capsule = PyDict_GetItemWithError(known, type);
    if (capsule == nullptr) return nullptr;
  }
  return static_cast<const Offers*>(PyCapsule_GetPointer(capsule, kOffers));
}

bool check_requires_grad(const Expected& expected, PyObject* object) {
  const Ref flag(PyObject_GetAttr(object, names().requires_grad));
  if (!flag) return false;
  if (flag.get() != Py_True) return true;
  refuse(PyExc_ValueError, expected, "the tensor requires grad; pass tensor.detach()");
  return false;
}

// Of struct's formats, with the byte order of this machine; 0: of no dtype.
int32_t dtype_of_format(const char* format, Py_ssize_t size, int32_t expected, bool* swapped) {
  const bool is_marked = format[0] != '\0' && std::strchr("@=<>!", format[0]) != nullptr;
#if __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__
  *swapped = size > 1 && (format[0] == '>' || format[0] == '!');
#else
  *swapped = size > 1 && format[0] == '<';
#endif
  const char* letter = format + (is_marked ? 1 : 0);
  if (std::strlen(letter) != 1) return 0;
  const int bits = static_cast<int>(8 * size);
  if (std::strchr("efd", *letter) != nullptr) return dtype_of(dlpack::kFloat, bits, expected);
  if (std::strchr("hilqn", *letter) != nullptr) return dtype_of(dlpack::kInt, bits, expected);
  if (std::strchr("BHILQN", *letter) != nullptr) return dtype_of(dlpack::kUInt, bits, expected);
  return 0;
}

bool take_buffer(const Expected& expected, PyObject* object, Loan* loan) {
  Py_buffer& view = loan->buffer;
  constexpr int kFlags = PyBUF_STRIDES | PyBUF_FORMAT;
  if (PyObject_GetBuffer(object, &view, kFlags | (expected.written ? PyBUF_WRITABLE : 0)) != 0) {
    if (is_error_of_memory()) return false;
    const std::string why = take_message();
    if (expected.written && PyObject_GetBuffer(object, &view, kFlags) == 0) {
      return refuse_read_only(expected);
    }
    PyErr_Clear();
    refuse(PyExc_BufferError, expected, "its memory could not be borrowed: " + why);
    return false;
  }
  const dlpack::Device host = {dlpack::kCpu, 0};
  if (!check_device(expected, host)) return false;
  bool swapped = false;
  const char* format = view.format != nullptr ? view.format : "B";
  loan->dtype = dtype_of_format(format, view.itemsize, expected.dtype, &swapped);
  if (swapped) {
    refuse(PyExc_ValueError, expected,
           std::string("the tensor has the format \"") + format +
               "\", which is not the byte order of this machine");
    return false;
  }
  const auto text = [format] { return std::string("the format \"") + format + "\""; };
  if (!check_dtype(expected, loan->dtype, text)) return false;
  for (int i = 0; i < view.ndim; ++i) {
    if (view.strides[i] % view.itemsize != 0 && view.shape[i] > 1) {
      refuse(PyExc_ValueError, expected,
             "the tensor has strides that are no multiples of its element size; make a copy");
      return false;
    }
  }
  static_assert(sizeof(Py_ssize_t) == sizeof(int64_t), "dimensions are read as int64_t");
  loan->rank = view.ndim;
  loan->sizes = reinterpret_cast<const int64_t*>(view.shape);
  loan->steps = reinterpret_cast<const int64_t*>(view.strides);
  loan->step_unit = view.itemsize;
  loan->data = view.buf;
  return check_shape(expected, *loan) && check_address(expected, *loan);
}

// numpy has bfloat16 from ml_dtypes, which neither protocol knows: the 16 bits as integers.
PyObject* view_of_bfloat16(PyObject* object) {
  const Ref dtype(PyObject_GetAttr(object, names().dtype));
  const Ref text(dtype ? PyObject_Str(dtype.get()) : nullptr);
  const char* name = text ? PyUnicode_AsUTF8AndSize(text.get(), nullptr) : nullptr;
  const bool is_bfloat16 = name != nullptr && std::strcmp(name, "bfloat16") == 0;
  PyErr_Clear();
  if (!is_bfloat16 || PyObject_HasAttrString(object, "__array_interface__") == 0) return nullptr;
  PyObject* view = PyObject_CallMethod(object, "view", "s", "uint16");
  if (view == nullptr) PyErr_Clear();
  return view;
}

bool take_exchanged(const Expected& expected, PyObject* object, const dlpack::Exchange& exchange,
                    Loan* loan) {
  if (exchange.from_object(object, &loan->versioned) == 0 && loan->versioned != nullptr) {
    return take_versioned(expected, loan);
  }
  loan->versioned = nullptr;
  if (PyErr_Occurred() != nullptr && is_error_of_memory()) return false;
  refuse(PyExc_BufferError, expected, "its framework did not export it: " + take_message());
  return false;
}

bool take_object(const Expected& expected, PyObject* object, Loan* loan) {
  const Offers* offers = offers_of(object);
  if (offers == nullptr) return false;
  if (offers->requires_grad && !check_requires_grad(expected, object)) return false;
  if (offers->exchange != nullptr && expected.device == dlpack::kCpu) {
    return take_exchanged(expected, object, *offers->exchange, loan);
  }
  std::string why;
  if (offers->dlpack) {
    if (expected.device != dlpack::kCpu && !check_device_first(expected, object)) return false;
    const Ref method(PyObject_GetAttr(object, names().dlpack));
    const Ref capsule(method ? call_dlpack(method.get(), expected) : nullptr);
    if (capsule) return take_capsule(expected, object, capsule.get(), loan);
    if (is_error_of_memory()) return false;
    why = take_message();
  }
  if (expected.dtype == kAnyFloat || expected.dtype == GA_BF16) {
    const Ref bits(view_of_bfloat16(object));
    if (bits) {
      Expected of_bits = expected;
      of_bits.dtype = GA_BF16;
      return take_object(of_bits, bits.get(), loan);
    }
  }
  // A read-only array of an older numpy, or one of the other byte order.
  if (PyObject_CheckBuffer(object) != 0) return take_buffer(expected, object, loan);
  if (!why.empty()) {
    refuse(PyExc_BufferError, expected, "its __dlpack__ refused: " + why);
    return false;
  }
  const Ref type(PyObject_GetAttrString(reinterpret_cast<PyObject*>(Py_TYPE(object)), "__name__"));
  const char* name = type ? PyUnicode_AsUTF8AndSize(type.get(), nullptr) : "?";
  refuse(PyExc_TypeError, expected,
         std::string("a ") + (name != nullptr ? name : "?") +
             " is no tensor: it has neither __dlpack__ nor the buffer protocol");
  return false;
}

// ---- Capsules -----------------------------------------------------------------------------------

Loan* loan_of(PyObject* object) { return static_cast<Loan*>(PyCapsule_GetPointer(object, kLoan)); }

// A loan of the memory of an object.
PyObject* lend(PyObject* object, const Expected& expected) {
  try {
    auto* loan = new Loan;
    if (!take_object(expected, object, loan)) {
      delete loan;
      return nullptr;
    }
    return new_capsule<Loan, kLoan>(loan);
  } catch (const std::bad_alloc&) {
    return PyErr_NoMemory();
  }
}

PyObject* tuple_of(const std::vector<int64_t>& numbers) {
  Ref tuple(PyTuple_New(static_cast<Py_ssize_t>(numbers.size())));
  if (!tuple) return nullptr;
  for (size_t i = 0; i < numbers.size(); ++i) {
    PyObject* number = PyLong_FromLongLong(numbers[i]);
    if (number == nullptr ||
        PyTuple_SetItem(tuple.get(), static_cast<Py_ssize_t>(i), number) != 0) {
      return nullptr;
    }
  }
  return tuple.release();
}

// Numbers of any sequence.
template <typename Number, Number (*convert)(PyObject*)>
bool read_numbers(PyObject* object, std::vector<Number>* numbers) {
  const Ref list(PySequence_List(object));
  if (!list) return false;
  const Py_ssize_t count = PyList_Size(list.get());
  numbers->reserve(static_cast<size_t>(count));
  for (Py_ssize_t i = 0; i < count; ++i) {
    numbers->push_back(convert(PyList_GetItem(list.get(), i)));
    if (PyErr_Occurred() != nullptr) return false;
  }
  return true;
}

int64_t integer_of(PyObject* object) {
  const Ref index(PyNumber_Index(object));
  return index ? PyLong_AsLongLong(index.get()) : -1;
}

double double_of(PyObject* object) { return PyFloat_AsDouble(object); }

}  // namespace

#endif  // GRADACCUM_PYTHON_TENSORS_HPP_
