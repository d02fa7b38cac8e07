// The structs by which packages hand tensors to each other.
// SPDX-License-Identifier: Apache-2.0
#ifndef GRADACCUM_PYTHON_DLPACK_HPP_
#define GRADACCUM_PYTHON_DLPACK_HPP_

#include <cstdint>

namespace {

// The structs of DLPack 1, https://dmlc.github.io/dlpack, whose layout is an ABI.
namespace dlpack {

struct Version {
  uint32_t major, minor;
};

struct Device {
  int32_t type, id;
};
enum { kCpu = 1, kCuda = 2, kCudaHost = 3, kCudaManaged = 13 };

struct DataType {
  uint8_t code, bits;
  uint16_t lanes;
};
enum { kInt = 0, kUInt = 1, kFloat = 2, kBfloat = 4 };

struct Tensor {
  void* data;
  Device device;
  int32_t ndim;
  DataType dtype;
  int64_t* shape;
  int64_t* strides;  // in elements; NULL: dense, row-major
  uint64_t byte_offset;
};

struct Managed {
  Tensor tensor;
  void* manager_ctx;
  void (*deleter)(Managed*);
};

struct Versioned {
  Version version;
  void* manager_ctx;
  void (*deleter)(Versioned*);
  uint64_t flags;
  Tensor tensor;
};
enum { kReadOnly = 1, kIsCopied = 2 };

// What a type gives in __dlpack_c_exchange_api__.
struct Exchange {
  Version version;
  Exchange* previous;
  void* allocate;
  int (*from_object)(void* object, Versioned** out);
  void* to_object;
  void* borrow_object;
  void* current_stream;
};

}  // namespace dlpack

}  // namespace

#endif  // GRADACCUM_PYTHON_DLPACK_HPP_
