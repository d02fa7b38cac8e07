// Hands tensors of the library to other packages, by DLPack.
// SPDX-License-Identifier: Apache-2.0
#ifndef GRADACCUM_PYTHON_EXPORT_HPP_
#define GRADACCUM_PYTHON_EXPORT_HPP_

#include "tensors.hpp"

namespace {

// A tensor of this library's, for other frameworks: the capsule of DLPack, versioned or not.
template <typename ManagedTensor>
struct Exported {
  ManagedTensor managed;
  std::vector<int64_t> shape, strides;
  PyObject* owner;

  static void destroy(ManagedTensor* managed) {
    auto* self = static_cast<Exported*>(managed->manager_ctx);
    if (Py_IsInitialized() != 0) {  // a framework may let go of it on any thread
      const PyGILState_STATE state = PyGILState_Ensure();
      Py_DECREF(self->owner);
      PyGILState_Release(state);
    }
    delete self;
  }
};

inline void mark(dlpack::Managed*, bool) {}
inline void mark(dlpack::Versioned* managed, bool read_only) {
  managed->version = {1, 0};
  managed->flags = read_only ? dlpack::kReadOnly : 0;
}

template <typename ManagedTensor>
PyObject* new_export(void* data, int32_t dtype, std::vector<int64_t> shape, dlpack::Device device,
                     bool read_only, PyObject* owner, const char* name,
                     PyCapsule_Destructor destroy) {
  auto* exported = new Exported<ManagedTensor>{{}, std::move(shape), {}, owner};
  Py_INCREF(owner);
  int64_t dense = 1;
  exported->strides.resize(exported->shape.size());
  for (size_t i = exported->shape.size(); i-- > 0;) {
    exported->strides[i] = dense;
    dense *= exported->shape[i];
  }
  const DtypeInfo& info = info_of(dtype);
  ManagedTensor& managed = exported->managed;
  mark(&managed, read_only);
  managed.manager_ctx = exported;
  managed.deleter = &Exported<ManagedTensor>::destroy;
  managed.tensor = {data,
                    device,
                    static_cast<int32_t>(exported->shape.size()),
                    {info.code, info.bits, 1},
                    exported->shape.data(),
                    exported->strides.data(),
                    0};
  PyObject* capsule = PyCapsule_New(&managed, name, destroy);
  if (capsule == nullptr) managed.deleter(&managed);
  return capsule;
}

template <typename ManagedTensor, const char* name>
void destroy_unused(PyObject* capsule) {
  if (PyCapsule_IsValid(capsule, name) == 0) return;  // somebody has taken it
  auto* managed = static_cast<ManagedTensor*>(PyCapsule_GetPointer(capsule, name));
  managed->deleter(managed);
}

constexpr char kPlain[] = "dltensor";
constexpr char kVersioned[] = "dltensor_versioned";

}  // namespace

#endif  // GRADACCUM_PYTHON_EXPORT_HPP_
