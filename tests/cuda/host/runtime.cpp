// SPDX-License-Identifier: Apache-2.0
// The functions of cuda_runtime.h.
#include <algorithm>
#include <cstdio>
#include <cstring>

#include "engine.hpp"

using namespace ga::sim;

namespace {

using Stream = std::shared_ptr<CUstream_st>;

int current() { return current_device(); }

// The check that every call that waits, or may wait, makes first.
cudaError_t may_wait(Engine& engine, const Stream& stream) {
  if (stream == nullptr) return cudaErrorInvalidResourceHandle;
  if (const std::shared_ptr<Capture> capture = engine.capture_of(stream.get())) {
    capture->invalid = true;
    return cudaErrorStreamCaptureUnsupported;
  }
  if (engine.implicit_capture(*stream)) {
    for (const auto& capture : engine.captures) capture->invalid = true;
    return cudaErrorStreamCaptureImplicit;
  }
  return cudaSuccess;
}

bool is_device(const Allocation* a) {
  return a != nullptr && (a->memory == Memory::kDevice || a->memory == Memory::kManaged);
}

// Returns true if the memory may be the source or target of this kind of copy.
bool suits(const Engine& engine, const void* pointer, size_t size, bool device) {
  if (!engine.valid(pointer, size)) return false;
  const Allocation* a = engine.find(pointer);
  return device ? a != nullptr || engine.config.pageable_access
                : a == nullptr || a->memory != Memory::kDevice;
}

cudaError_t copy(Engine& engine, void* to, const void* from, size_t size, cudaMemcpyKind kind,
                 cudaStream_t handle, bool wait) {
  Stream stream;
  const cudaError_t error = prepare(engine, handle, false, &stream);
  if (error != cudaSuccess) return error;
  ++engine.counters.copies;
  engine.counters.copied_bytes += static_cast<int64_t>(size);
  if (size > 0) {
    if (kind < cudaMemcpyHostToHost || kind > cudaMemcpyDefault) {
      return cudaErrorInvalidMemcpyDirection;
    }
    const bool any = kind == cudaMemcpyDefault;
    const bool to_device = kind == cudaMemcpyHostToDevice || kind == cudaMemcpyDeviceToDevice;
    const bool from_device = kind == cudaMemcpyDeviceToHost || kind == cudaMemcpyDeviceToDevice;
    if (!engine.valid(to, size) || !engine.valid(from, size) ||
        (!any &&
         (!suits(engine, to, size, to_device) || !suits(engine, from, size, from_device)))) {
      return cudaErrorInvalidValue;
    }
    auto run = [=] { std::memmove(to, from, size); };
    const bool pageable_to = engine.find(to) == nullptr;
    const bool pageable_from = engine.find(from) == nullptr;
    const bool captured = engine.capture_of(stream.get()) != nullptr;
    if (pageable_to || pageable_from) ++engine.counters.pageable_copies;
    if (pageable_from && !pageable_to && !captured) {
      // Staged before the call returns, because the program may then change the source.
      const auto* bytes = static_cast<const char*>(from);
      const std::vector<char> staged(bytes, bytes + size);
      engine.enqueue(stream,
                     {Kind::kCopy, kEveryDevice, [=] { std::memcpy(to, staged.data(), size); }});
    } else {
      engine.enqueue(stream, {Kind::kCopy, kEveryDevice, run});
      wait = wait || (pageable_to && !captured);
    }
  }
  if (wait) {
    ++engine.counters.synchronizations;
    engine.run(engine.end_of(stream));
  }
  return wait ? engine.devices[stream->device].fault : cudaSuccess;
}

cudaError_t fill(Engine& engine, void* to, int value, size_t size, cudaStream_t handle) {
  Stream stream;
  const cudaError_t error = prepare(engine, handle, false, &stream);
  if (error != cudaSuccess) return error;
  ++engine.counters.fills;
  if (size == 0) return cudaSuccess;
  if (!suits(engine, to, size, true)) return cudaErrorInvalidValue;
  return engine.enqueue(stream, {Kind::kFill, kEveryDevice, [=] { std::memset(to, value, size); }});
}

cudaError_t take(void** pointer, size_t size, Memory memory) {
  return call([=](Engine& engine) {
    if (pointer == nullptr) return cudaErrorInvalidValue;
    if (engine.unsafe_call()) return cudaErrorStreamCaptureUnsupported;
    return engine.allocate(pointer, size, memory, current(), false);
  });
}

// The address of the byte on the device. Nothing is there if that is another one than the host's.
void* seen_by_device(const Engine& engine, const Allocation& a, void* host) {
  const bool apart = a.memory == Memory::kRegistered && engine.config.registered_apart;
  return apart ? reinterpret_cast<void*>(reinterpret_cast<uintptr_t>(host) ^ uintptr_t{1} << 46)
               : host;
}

// Frees memory that was allocated as one of these kinds.
cudaError_t release(Engine& engine, void* pointer, std::initializer_list<Memory> kinds) {
  if (pointer == nullptr) return cudaSuccess;
  const Allocation* a = engine.find(pointer);
  if (a == nullptr || a->begin != pointer ||
      std::find(kinds.begin(), kinds.end(), a->memory) == kinds.end()) {
    return cudaErrorInvalidValue;
  }
  return engine.release(a->begin);
}

cudaError_t create_stream(cudaStream_t* out, unsigned flags, int priority = 0) {
  return call([=](Engine& engine) {
    if (out == nullptr || flags > cudaStreamNonBlocking) return cudaErrorInvalidValue;
    engine.streams.push_back(std::make_shared<CUstream_st>(CUstream_st{current(), flags}));
    engine.streams.back()->context = thread_state().context;
    engine.streams.back()->priority = priority;
    *out = engine.streams.back().get();
    return cudaSuccess;
  });
}

bool known(const Engine& engine, cudaEvent_t event) { return engine.events.count(event) != 0; }

cudaError_t capture_info(cudaStream_t handle, cudaStreamCaptureStatus* status,
                         unsigned long long* id) {
  return call([=](Engine& engine) {
    const Stream stream = engine.stream(handle);
    if (stream == nullptr) return cudaErrorInvalidResourceHandle;
    if (status == nullptr) return cudaErrorInvalidValue;
    if (engine.implicit_capture(*stream)) return cudaErrorStreamCaptureImplicit;
    const std::shared_ptr<Capture> capture = engine.capture_of(stream.get());
    *status = capture == nullptr ? cudaStreamCaptureStatusNone
              : capture->invalid ? cudaStreamCaptureStatusInvalidated
                                 : cudaStreamCaptureStatusActive;
    if (id != nullptr && capture != nullptr) *id = capture->id;
    return cudaSuccess;
  });
}

void merge(Clock& clock, const Clock& other) {
  for (const auto& [stream, count] : other) {
    int64_t& own = clock[stream];
    own = std::max(own, count);
  }
}

// Returns true if all work of the capture comes before the end of its first stream.
bool joined(const Capture& capture) {
  const Clock& all = capture.streams.at(capture.origin);
  for (const auto& [stream, clock] : capture.streams) {
    for (const auto& [other, count] : clock) {
      const auto found = all.find(other);
      if (count > (found == all.end() ? 0 : found->second)) return false;
    }
  }
  return true;
}

struct ErrorText {
  cudaError_t error;
  const char* name;
  const char* text;
};

constexpr ErrorText kErrors[] = {
    {cudaSuccess, "cudaSuccess", "no error"},
    {cudaErrorInvalidValue, "cudaErrorInvalidValue", "invalid argument"},
    {cudaErrorMemoryAllocation, "cudaErrorMemoryAllocation", "out of memory"},
    {cudaErrorInitializationError, "cudaErrorInitializationError", "initialization error"},
    {cudaErrorCudartUnloading, "cudaErrorCudartUnloading", "driver shutting down"},
    {cudaErrorInvalidConfiguration, "cudaErrorInvalidConfiguration",
     "invalid configuration argument"},
    {cudaErrorInvalidMemcpyDirection, "cudaErrorInvalidMemcpyDirection",
     "invalid copy direction for memcpy"},
    {cudaErrorInsufficientDriver, "cudaErrorInsufficientDriver",
     "CUDA driver version is insufficient for CUDA runtime version"},
    {cudaErrorNoDevice, "cudaErrorNoDevice", "no CUDA-capable device is detected"},
    {cudaErrorInvalidDevice, "cudaErrorInvalidDevice", "invalid device ordinal"},
    {cudaErrorNoKernelImageForDevice, "cudaErrorNoKernelImageForDevice",
     "no kernel image is available for execution on the device"},
    {cudaErrorInvalidResourceHandle, "cudaErrorInvalidResourceHandle", "invalid resource handle"},
    {cudaErrorIllegalState, "cudaErrorIllegalState",
     "the operation cannot be performed in the present state"},
    {cudaErrorNotReady, "cudaErrorNotReady", "device not ready"},
    {cudaErrorIllegalAddress, "cudaErrorIllegalAddress",
     "an illegal memory access was encountered"},
    {cudaErrorLaunchOutOfResources, "cudaErrorLaunchOutOfResources",
     "too many resources requested for launch"},
    {cudaErrorHostMemoryAlreadyRegistered, "cudaErrorHostMemoryAlreadyRegistered",
     "part or all of the requested memory range is already mapped"},
    {cudaErrorHostMemoryNotRegistered, "cudaErrorHostMemoryNotRegistered",
     "pointer does not correspond to a registered memory region"},
    {cudaErrorLaunchFailure, "cudaErrorLaunchFailure", "unspecified launch failure"},
    {cudaErrorNotPermitted, "cudaErrorNotPermitted", "operation not permitted"},
    {cudaErrorNotSupported, "cudaErrorNotSupported", "operation not supported"},
    {cudaErrorStreamCaptureUnsupported, "cudaErrorStreamCaptureUnsupported",
     "operation not permitted when stream is capturing"},
    {cudaErrorStreamCaptureInvalidated, "cudaErrorStreamCaptureInvalidated",
     "operation failed due to a previous error during capture"},
    {cudaErrorStreamCaptureMerge, "cudaErrorStreamCaptureMerge",
     "operation would result in a merge of separate capture sequences"},
    {cudaErrorStreamCaptureUnmatched, "cudaErrorStreamCaptureUnmatched",
     "capture was not ended in the same stream as it began"},
    {cudaErrorStreamCaptureUnjoined, "cudaErrorStreamCaptureUnjoined",
     "capturing stream has unjoined work"},
    {cudaErrorStreamCaptureIsolation, "cudaErrorStreamCaptureIsolation",
     "dependency created on uncaptured work in another stream"},
    {cudaErrorStreamCaptureImplicit, "cudaErrorStreamCaptureImplicit",
     "operation would make the legacy stream depend on a capturing blocking stream"},
    {cudaErrorCapturedEvent, "cudaErrorCapturedEvent",
     "operation not permitted on an event last recorded in a capturing stream"},
    {cudaErrorStreamCaptureWrongThread, "cudaErrorStreamCaptureWrongThread",
     "attempt to terminate a thread-local capture sequence from another thread"},
    {cudaErrorUnknown, "cudaErrorUnknown", "unknown error"},
};

const ErrorText* error_text(cudaError_t error) {
  for (const ErrorText& entry : kErrors) {
    if (entry.error == error) return &entry;
  }
  return nullptr;
}

}  // namespace

// ---- Errors, versions, devices -----------------------------------------------------------------

const char* cudaGetErrorName(cudaError_t error) {
  const ErrorText* entry = error_text(error);
  return entry != nullptr ? entry->name : "unrecognized error code";
}

const char* cudaGetErrorString(cudaError_t error) {
  const ErrorText* entry = error_text(error);
  return entry != nullptr ? entry->text : "unrecognized error code";
}

cudaError_t cudaPeekAtLastError() {
  const std::lock_guard<std::recursive_mutex> lock(Engine::get().mutex);
  const cudaError_t error = entry_error();
  return error == cudaErrorIllegalAddress ? error : thread_state().last_error;
}

cudaError_t cudaGetLastError() {
  const cudaError_t error = cudaPeekAtLastError();
  thread_state().last_error = cudaSuccess;
  return error;
}

cudaError_t cudaDriverGetVersion(int* version) {
  *version = config().driver_version;
  return cudaSuccess;
}

cudaError_t cudaRuntimeGetVersion(int* version) {
  *version = CUDART_VERSION;
  return cudaSuccess;
}

cudaError_t cudaGetDeviceCount(int* count) {
  return call(
      [=](Engine& engine) {
        if (count == nullptr) return cudaErrorInvalidValue;
        *count = engine.config.devices;
        return cudaSuccess;
      },
      false);
}

cudaError_t cudaGetDevice(int* device) {
  const std::lock_guard<std::recursive_mutex> lock(Engine::get().mutex);
  const cudaError_t error = entry_error();
  if (error == cudaSuccess || error == cudaErrorIllegalAddress) {  // needs no device
    *device = current();
    return cudaSuccess;
  }
  thread_state().last_error = error;
  return error;
}

// A program may also switch away from a device with a fault.
cudaError_t cudaSetDevice(int device) {
  const std::lock_guard<std::recursive_mutex> lock(Engine::get().mutex);
  cudaError_t error = entry_error();
  if (error == cudaSuccess || error == cudaErrorIllegalAddress) {
    error = device < 0 || device >= Engine::get().config.devices
                ? cudaErrorInvalidDevice
                : Engine::get().devices[device].fault;
    if (error != cudaErrorInvalidDevice) {  // makes the primary context, as from CUDA 12 on
      thread_state().device = device;
      thread_state().context = nullptr;
      need_context();
    }
  }
  if (error != cudaSuccess) thread_state().last_error = error;
  return error;
}

// ---- Functions of the driver

namespace {

int get_current(CUctx_st** context) {
  *context = thread_state().context;
  return Engine::get().config.driver;
}

int set_current(CUctx_st* context) {
  const std::lock_guard<std::recursive_mutex> lock(Engine::get().mutex);
  thread_state().context = context;
  int64_t& fails = Engine::get().fail_switch;
  if (fails > 0 && --fails == 0) return cudaErrorUnknown;
  return context ? Engine::get().devices[context->device].fault : cudaSuccess;
}

int device_of(int* device, int ordinal) {
  *device = ordinal;
  return cudaSuccess;
}

int retain(CUctx_st** context, int device) {
  const std::lock_guard<std::recursive_mutex> lock(Engine::get().mutex);
  Engine& engine = Engine::get();
  if (engine.fail_allocation > 0 && --engine.fail_allocation == 0) return cudaErrorMemoryAllocation;
  *context = &engine.devices[device].primary;
  (*context)->exists = true;
  return cudaSuccess;
}

// The runtime keeps it for itself.
int release_primary(int) { return cudaSuccess; }

// As cudaStreamQuery, but leaves no error in the thread.
int stream_query(cudaStream_t handle) {
  const cudaError_t before = thread_state().last_error, error = cudaStreamQuery(handle);
  thread_state().last_error = before;
  return error;
}

// As cudaEventQuery, but leaves no error in the thread.
int event_query(cudaEvent_t event) {
  const cudaError_t before = thread_state().last_error, error = cudaEventQuery(event);
  thread_state().last_error = before;
  return error;
}

int stream_context(cudaStream_t handle, CUctx_st** context) {
  const std::lock_guard<std::recursive_mutex> lock(Engine::get().mutex);
  const Stream stream = Engine::get().stream(handle);
  if (stream == nullptr) return cudaErrorInvalidResourceHandle;
  *context = stream->context;
  return cudaSuccess;
}

int stream_priority(cudaStream_t handle, int* priority) {
  const std::lock_guard<std::recursive_mutex> lock(Engine::get().mutex);
  const Stream stream = Engine::get().stream(handle);
  if (stream == nullptr) return cudaErrorInvalidResourceHandle;
  *priority = stream->priority;
  return cudaSuccess;
}

}  // namespace

cudaError_t cudaGetDriverEntryPointByVersion(const char* name, void** function, unsigned version,
                                             unsigned long long,
                                             cudaDriverEntryPointQueryResult* result) {
  const std::map<std::string, void*> functions = {
      {"cuCtxGetCurrent", reinterpret_cast<void*>(get_current)},
      {"cuCtxSetCurrent", reinterpret_cast<void*>(set_current)},
      {"cuDeviceGet", reinterpret_cast<void*>(device_of)},
      {"cuDevicePrimaryCtxRetain", reinterpret_cast<void*>(retain)},
      {"cuDevicePrimaryCtxRelease", reinterpret_cast<void*>(release_primary)},
      {"cuEventQuery", reinterpret_cast<void*>(event_query)},
      {"cuStreamGetCtx", reinterpret_cast<void*>(stream_context)},
      {"cuStreamGetPriority", reinterpret_cast<void*>(stream_priority)},
      {"cuStreamQuery", reinterpret_cast<void*>(stream_query)}};
  const auto found = functions.find(name);
  const bool old = static_cast<unsigned>(config().driver_version) < version;
  *function = found == functions.end() || old ? nullptr : found->second;
  if (result)
    *result = *function ? cudaDriverEntryPointSuccess
              : old     ? cudaDriverEntryPointVersionNotSufficent
                        : cudaDriverEntryPointSymbolNotFound;
  return cudaSuccess;
}

cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int device) {
  return call(
      [=](Engine& engine) {
        const Config& config = engine.config;
        if (properties == nullptr) return cudaErrorInvalidValue;
        if (device < 0 || device >= config.devices) return cudaErrorInvalidDevice;
        *properties = cudaDeviceProp{};
        std::snprintf(properties->name, sizeof properties->name, "simulated device");
        properties->totalGlobalMem = config.memory;
        properties->sharedMemPerBlock = 48 << 10;
        properties->warpSize = 32;
        properties->maxThreadsPerBlock = 1024;
        properties->major = config.major;
        properties->minor = config.minor;
        properties->multiProcessorCount = config.multiprocessors;
        properties->canMapHostMemory = 1;
        properties->unifiedAddressing = 1;
        properties->l2CacheSize = config.l2_bytes;
        properties->maxThreadsPerMultiProcessor = 2048;
        properties->managedMemory = 1;
        properties->pageableMemoryAccess = config.pageable_access ? 1 : 0;
        properties->concurrentManagedAccess = 1;
        properties->memoryPoolsSupported = config.memory_pools ? 1 : 0;
        return cudaSuccess;
      },
      false);
}

cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device) {
  if (value == nullptr) return cudaErrorInvalidValue;
  cudaDeviceProp properties;
  const cudaError_t error = cudaGetDeviceProperties(&properties, device);
  if (error != cudaSuccess) return error;
  switch (attribute) {
    case cudaDevAttrMaxThreadsPerBlock:
      *value = properties.maxThreadsPerBlock;
      break;
    case cudaDevAttrMaxGridDimX:
      *value = INT32_MAX;
      break;
    case cudaDevAttrMaxSharedMemoryPerBlock:
      *value = static_cast<int>(properties.sharedMemPerBlock);
      break;
    case cudaDevAttrWarpSize:
      *value = properties.warpSize;
      break;
    case cudaDevAttrMultiProcessorCount:
      *value = properties.multiProcessorCount;
      break;
    case cudaDevAttrIntegrated:
      *value = 0;
      break;
    case cudaDevAttrCanMapHostMemory:
      *value = 1;
      break;
    case cudaDevAttrL2CacheSize:
      *value = properties.l2CacheSize;
      break;
    case cudaDevAttrMaxThreadsPerMultiProcessor:
      *value = properties.maxThreadsPerMultiProcessor;
      break;
    case cudaDevAttrUnifiedAddressing:
      *value = 1;
      break;
    case cudaDevAttrComputeCapabilityMajor:
      *value = properties.major;
      break;
    case cudaDevAttrComputeCapabilityMinor:
      *value = properties.minor;
      break;
    case cudaDevAttrManagedMemory:
      *value = 1;
      break;
    case cudaDevAttrPageableMemoryAccess:
      *value = properties.pageableMemoryAccess;
      break;
    case cudaDevAttrConcurrentManagedAccess:
      *value = 1;
      break;
    case cudaDevAttrPageableMemoryAccessUsesHostPageTables:
      *value = properties.pageableMemoryAccess != 0 && ga::sim::config().host_page_tables ? 1 : 0;
      break;
    case cudaDevAttrMemoryPoolsSupported:
      *value = properties.memoryPoolsSupported;
      break;
    default:
      return cudaErrorInvalidValue;
  }
  return cudaSuccess;
}

cudaError_t cudaDeviceSynchronize() {
  return call([](Engine& engine) {
    bool capturing = engine.unsafe_call();
    for (const auto& capture : engine.captures) {
      for (const auto& [stream, clock] : capture->streams) {
        if (stream->device == current()) capturing = capture->invalid = true;
      }
    }
    if (capturing) return cudaErrorStreamCaptureUnsupported;
    ++engine.counters.synchronizations;
    engine.run_device(current());
    return engine.devices[current()].fault;
  });
}

cudaError_t cudaMemGetInfo(size_t* free, size_t* total) {
  return call([=](Engine& engine) {
    *total = engine.config.memory;
    *free = *total - std::min(*total, engine.devices[current()].bytes);
    return cudaSuccess;
  });
}

// ---- Memory --------------------------------------------------------------------------------------

cudaError_t cudaMalloc(void** pointer, size_t size) { return take(pointer, size, Memory::kDevice); }

cudaError_t cudaMallocManaged(void** pointer, size_t size, unsigned) {
  return take(pointer, size, Memory::kManaged);
}

cudaError_t cudaHostAlloc(void** pointer, size_t size, unsigned) {
  return take(pointer, size, Memory::kPinned);
}

cudaError_t cudaMallocHost(void** pointer, size_t size, unsigned flags) {
  return cudaHostAlloc(pointer, size, flags);
}

// Waits for the device, except for memory from a pool.
cudaError_t cudaFree(void* pointer) {
  return call([=](Engine& engine) {
    if (engine.unsafe_call()) return cudaErrorStreamCaptureUnsupported;
    const Allocation* a = engine.find(pointer);
    if (a != nullptr && !a->pooled) {
      const int device = a->device;
      ++engine.counters.synchronizations;
      engine.run_device(device);
      if (engine.devices[device].fault != cudaSuccess) return engine.devices[device].fault;
    }
    return release(engine, pointer, {Memory::kDevice, Memory::kManaged});
  });
}

// The memory may be gone when this returns: CUDA's manual does not say that the call waits.
cudaError_t cudaFreeHost(void* pointer) {
  return call([=](Engine& engine) {
    if (engine.unsafe_call()) return cudaErrorStreamCaptureUnsupported;
    return release(engine, pointer, {Memory::kPinned});
  });
}

cudaError_t cudaMallocAsync(void** pointer, size_t size, cudaStream_t handle) {
  return call([=](Engine& engine) {
    if (pointer == nullptr) return cudaErrorInvalidValue;
    if (!engine.config.memory_pools) return cudaErrorNotSupported;
    const Stream stream = engine.stream(handle);
    if (stream == nullptr) return cudaErrorInvalidResourceHandle;
    if (const auto capture = engine.capture_of(stream.get())) {
      capture->invalid = true;  // CUDA makes it a node of the graph
      return cudaErrorNotSupported;
    }
    return engine.allocate(pointer, size, Memory::kDevice, stream->device, true);
  });
}

cudaError_t cudaMallocFromPoolAsync(void** pointer, size_t size, cudaMemPool_t,
                                    cudaStream_t stream) {
  return cudaMallocAsync(pointer, size, stream);
}

cudaError_t cudaFreeAsync(void* pointer, cudaStream_t handle) {
  return call([=](Engine& engine) {
    const Stream stream = engine.stream(handle);
    if (stream == nullptr) return cudaErrorInvalidResourceHandle;
    if (const auto capture = engine.capture_of(stream.get())) {
      capture->invalid = true;
      return cudaErrorNotSupported;
    }
    if (pointer == nullptr) return cudaSuccess;
    const Allocation* a = engine.find(pointer);
    if (a == nullptr || a->begin != pointer || a->memory != Memory::kDevice) {
      return cudaErrorInvalidValue;
    }
    return engine.enqueue(stream, {Kind::kFree, stream->device,
                                   [=, &engine] { engine.release(static_cast<char*>(pointer)); }});
  });
}

cudaError_t cudaHostRegister(void* pointer, size_t size, unsigned) {
  return call([=](Engine& engine) {
    if (engine.unsafe_call()) return cudaErrorStreamCaptureUnsupported;
    return engine.register_host(pointer, size, current());
  });
}

cudaError_t cudaHostUnregister(void* pointer) {
  return call([=](Engine& engine) {
    if (engine.unsafe_call()) return cudaErrorStreamCaptureUnsupported;
    const cudaError_t error = release(engine, pointer, {Memory::kRegistered});
    return error == cudaSuccess ? error : cudaErrorHostMemoryNotRegistered;
  });
}

cudaError_t cudaHostGetDevicePointer(void** device, void* host, unsigned flags) {
  return call([=](Engine& engine) {
    const Allocation* a = engine.find(host);
    if (flags != 0 || a == nullptr || a->memory == Memory::kDevice) return cudaErrorInvalidValue;
    *device = seen_by_device(engine, *a, host);
    return cudaSuccess;
  });
}

cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* attributes, const void* pointer) {
  return call(
      [=](Engine& engine) {
        if (attributes == nullptr) return cudaErrorInvalidValue;
        ++engine.counters.pointer_queries;
        void* address = const_cast<void*>(pointer);
        *attributes = {cudaMemoryTypeUnregistered, cudaInvalidDeviceId, nullptr, address};
        const Allocation* a = engine.find(pointer);
        if (a == nullptr) return engine.config.known_only ? cudaErrorInvalidValue : cudaSuccess;
        attributes->device = a->device;
        attributes->devicePointer = seen_by_device(engine, *a, address);
        if (a->memory == Memory::kDevice) attributes->hostPointer = nullptr;
        attributes->type = a->memory == Memory::kManaged ? cudaMemoryTypeManaged
                           : is_device(a)                ? cudaMemoryTypeDevice
                                                         : cudaMemoryTypeHost;
        return cudaSuccess;
      },
      false);
}

cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t size, cudaMemcpyKind kind,
                            cudaStream_t stream) {
  return call([=](Engine& engine) { return copy(engine, to, from, size, kind, stream, false); });
}

cudaError_t cudaMemcpy(void* to, const void* from, size_t size, cudaMemcpyKind kind) {
  return call([=](Engine& engine) {
    if (engine.unsafe_call()) return cudaErrorStreamCaptureUnsupported;
    return copy(engine, to, from, size, kind, nullptr, true);
  });
}

cudaError_t cudaMemsetAsync(void* to, int value, size_t size, cudaStream_t stream) {
  return call([=](Engine& engine) { return fill(engine, to, value, size, stream); });
}

cudaError_t cudaMemset(void* to, int value, size_t size) {
  return call([=](Engine& engine) {
    if (engine.unsafe_call()) return cudaErrorStreamCaptureUnsupported;
    return fill(engine, to, value, size, nullptr);
  });
}

cudaError_t cudaDeviceGetDefaultMemPool(cudaMemPool_t* pool, int device) {
  return call([=](Engine& engine) {
    if (pool == nullptr) return cudaErrorInvalidValue;
    if (device < 0 || device >= engine.config.devices) return cudaErrorInvalidDevice;
    if (!engine.config.memory_pools) return cudaErrorNotSupported;
    *pool = reinterpret_cast<cudaMemPool_t>(&engine.devices[device]);
    return cudaSuccess;
  });
}

cudaError_t cudaMemPoolSetAttribute(cudaMemPool_t, cudaMemPoolAttr, void*) {
  return call([](Engine&) { return cudaSuccess; });
}

cudaError_t cudaMemPoolTrimTo(cudaMemPool_t, size_t) {
  return call([](Engine&) { return cudaSuccess; });
}

// ---- Streams and events ----------------------------------------------------------------------------

cudaError_t cudaStreamCreate(cudaStream_t* stream) {
  return create_stream(stream, cudaStreamDefault);
}

cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned flags) {
  return create_stream(stream, flags);
}

cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned flags, int priority) {
  return create_stream(stream, flags, priority);
}

// Work in the stream still runs, as on a real device.
cudaError_t cudaStreamDestroy(cudaStream_t handle) {
  return call([=](Engine& engine) {
    const Stream stream = engine.stream(handle);
    if (stream == nullptr || stream.get() != handle) return cudaErrorInvalidResourceHandle;
    if (const auto capture = engine.capture_of(handle)) {
      capture->invalid = true;
      capture->streams.erase(handle);
      if (capture->origin == handle) engine.end_capture(capture);
    }
    stream->destroyed = true;
    if (stream->items.empty()) {
      engine.streams.erase(std::find(engine.streams.begin(), engine.streams.end(), stream));
    }
    return cudaSuccess;
  });
}

cudaError_t cudaStreamSynchronize(cudaStream_t handle) {
  return call([=](Engine& engine) {
    const Stream stream = engine.stream(handle);
    const cudaError_t error = may_wait(engine, stream);
    if (error != cudaSuccess) return error;
    ++engine.counters.synchronizations;
    if (stream->legacy) {
      engine.enqueue(stream, nullptr, {});  // waits for the other streams
    }
    engine.run(engine.end_of(stream));
    return engine.devices[stream->device].fault;
  });
}

cudaError_t cudaStreamQuery(cudaStream_t handle) {
  return call([=](Engine& engine) {
    const Stream stream = engine.stream(handle);
    const cudaError_t error = may_wait(engine, stream);
    if (error != cudaSuccess) return error;
    ++engine.counters.queries;
    const bool busy = engine.run_one(engine.end_of(stream));
    const cudaError_t fault = engine.devices[stream->device].fault;
    return fault != cudaSuccess ? fault : busy ? cudaErrorNotReady : cudaSuccess;
  });
}

cudaError_t cudaStreamGetDevice(cudaStream_t handle, int* device) {
  return call([=](Engine& engine) {
    const Stream stream = engine.stream(handle);
    if (stream == nullptr) return cudaErrorInvalidResourceHandle;
    *device = stream->device;
    return cudaSuccess;
  });
}

cudaError_t cudaStreamGetFlags(cudaStream_t handle, unsigned* flags) {
  return call([=](Engine& engine) {
    const Stream stream = engine.stream(handle);
    if (stream == nullptr) return cudaErrorInvalidResourceHandle;
    *flags = stream->flags;
    return cudaSuccess;
  });
}

cudaError_t cudaLaunchHostFunc(cudaStream_t handle, cudaHostFn_t function, void* data) {
  return call([=](Engine& engine) {
    if (function == nullptr) return cudaErrorInvalidValue;
    Stream stream;
    const cudaError_t error = prepare(engine, handle, false, &stream);
    if (error != cudaSuccess) return error;
    return engine.enqueue(stream, {Kind::kHostFunction, kEveryDevice, [=] { function(data); }});
  });
}

cudaError_t cudaStreamWaitEvent(cudaStream_t handle, cudaEvent_t event, unsigned) {
  return call([=](Engine& engine) {
    const Stream stream = engine.stream(handle);
    if (stream == nullptr || !known(engine, event)) return cudaErrorInvalidResourceHandle;
    const std::shared_ptr<Capture> own = engine.capture_of(stream.get());
    if (event->capture != nullptr) {
      Capture& capture = *event->capture;
      if (own != nullptr && own != event->capture) {
        own->invalid = capture.invalid = true;
        return cudaErrorStreamCaptureMerge;
      }
      if (stream->legacy) {
        capture.invalid = true;
        return cudaErrorStreamCaptureImplicit;
      }
      if (capture.invalid) return cudaErrorStreamCaptureInvalidated;
      merge(capture.streams[stream.get()], event->clock);  // a fork, or a join
      return cudaSuccess;
    }
    if (own != nullptr) {
      if (own->invalid) return cudaErrorStreamCaptureInvalidated;
      if (event->mark.stream == nullptr) return cudaSuccess;
      own->invalid = true;
      return cudaErrorStreamCaptureIsolation;
    }
    if (engine.implicit_capture(*stream)) {
      for (const auto& capture : engine.captures) capture->invalid = true;
      return cudaErrorStreamCaptureImplicit;
    }
    if (event->mark.stream == nullptr) return cudaSuccess;
    return engine.enqueue(stream, nullptr, {event->mark});
  });
}

cudaError_t cudaEventCreate(cudaEvent_t* event) {
  return cudaEventCreateWithFlags(event, cudaEventDefault);
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned flags) {
  return call([=](Engine& engine) {
    if (event == nullptr) return cudaErrorInvalidValue;
    *event = new CUevent_st{thread_state().context, flags, {}, nullptr, {}};
    engine.events.insert(*event);
    return cudaSuccess;
  });
}

cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t handle) {
  return call([=](Engine& engine) {
    const Stream stream = engine.stream(handle);
    if (stream == nullptr || !known(engine, event)) return cudaErrorInvalidResourceHandle;
    const CUctx_st* context = stream->context ? stream->context : thread_state().context;
    if (event->context != context) return cudaErrorInvalidResourceHandle;
    if (const std::shared_ptr<Capture> capture = engine.capture_of(stream.get())) {
      if (capture->invalid) return cudaErrorStreamCaptureInvalidated;
      event->capture = capture;
      event->clock = capture->streams[stream.get()];
      event->mark = {};
      return cudaSuccess;
    }
    if (engine.implicit_capture(*stream)) {
      for (const auto& capture : engine.captures) capture->invalid = true;
      return cudaErrorStreamCaptureImplicit;
    }
    event->capture = nullptr;
    if (stream->legacy) engine.enqueue(stream, nullptr, {});
    event->mark = engine.end_of(stream);
    return cudaSuccess;
  });
}

namespace {

cudaError_t wait_or_ask(cudaEvent_t event, bool wait) {
  return call([=](Engine& engine) {
    if (!known(engine, event)) return cudaErrorInvalidResourceHandle;
    if (event->capture != nullptr) {
      event->capture->invalid = true;
      return cudaErrorCapturedEvent;
    }
    if (engine.unsafe_call()) return cudaErrorStreamCaptureUnsupported;
    bool busy = false;
    if (wait) {
      ++engine.counters.synchronizations;
      engine.run(event->mark);
    } else {
      ++engine.counters.queries;
      busy = engine.run_one(event->mark);
    }
    const cudaError_t fault = engine.devices[event->context->device].fault;
    return fault != cudaSuccess ? fault : busy ? cudaErrorNotReady : cudaSuccess;
  });
}

}  // namespace

cudaError_t cudaEventSynchronize(cudaEvent_t event) { return wait_or_ask(event, true); }

cudaError_t cudaEventQuery(cudaEvent_t event) { return wait_or_ask(event, false); }

cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t start, cudaEvent_t end) {
  return call([=](Engine& engine) {
    for (const cudaEvent_t event : {start, end}) {
      if (!known(engine, event) || event->mark.stream == nullptr ||
          (event->flags & cudaEventDisableTiming) != 0) {
        return cudaErrorInvalidResourceHandle;
      }
      if (event->mark.stream->done < event->mark.index) return cudaErrorNotReady;
    }
    *milliseconds = 0.0f;
    return cudaSuccess;
  });
}

cudaError_t cudaEventDestroy(cudaEvent_t event) {
  return call([=](Engine& engine) {
    if (engine.events.erase(event) == 0) return cudaErrorInvalidResourceHandle;
    delete event;
    return cudaSuccess;
  });
}

// ---- Graphs ----------------------------------------------------------------------------------------

cudaError_t cudaStreamBeginCapture(cudaStream_t handle, cudaStreamCaptureMode mode) {
  return call([=](Engine& engine) {
    const Stream stream = engine.stream(handle);
    if (stream == nullptr) return cudaErrorInvalidResourceHandle;
    if (stream->legacy) return cudaErrorStreamCaptureUnsupported;
    if (engine.capture_of(stream.get()) != nullptr) return cudaErrorIllegalState;
    auto capture = std::make_shared<Capture>();
    capture->id = ++engine.captures_begun;
    capture->mode = mode;
    capture->thread = std::this_thread::get_id();
    capture->origin = stream.get();
    capture->streams[stream.get()] = {};
    engine.captures.insert(capture);
    return cudaSuccess;
  });
}

cudaError_t cudaStreamEndCapture(cudaStream_t handle, cudaGraph_t* graph) {
  return call([=](Engine& engine) {
    const Stream stream = engine.stream(handle);
    if (stream == nullptr) return cudaErrorInvalidResourceHandle;
    if (graph == nullptr) return cudaErrorInvalidValue;
    const std::shared_ptr<Capture> capture = engine.capture_of(stream.get());
    if (capture == nullptr) return cudaErrorIllegalState;
    if (capture->mode != cudaStreamCaptureModeRelaxed &&
        capture->thread != std::this_thread::get_id()) {
      return cudaErrorStreamCaptureWrongThread;
    }
    *graph = nullptr;
    if (capture->origin != stream.get()) {
      capture->invalid = true;
      return cudaErrorStreamCaptureUnmatched;
    }
    engine.end_capture(capture);
    if (capture->invalid) return cudaErrorStreamCaptureInvalidated;
    if (!joined(*capture)) return cudaErrorStreamCaptureUnjoined;
    *graph = new CUgraph_st{capture->works};
    return cudaSuccess;
  });
}

cudaError_t cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus* status) {
  return capture_info(stream, status, nullptr);
}

cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream, cudaStreamCaptureStatus* status,
                                     unsigned long long* id, cudaGraph_t* graph,
                                     const cudaGraphNode_t** dependencies,
                                     const cudaGraphEdgeData** edges, size_t* count) {
  if (graph != nullptr || dependencies != nullptr || edges != nullptr || count != nullptr) {
    return cudaErrorNotSupported;
  }
  return capture_info(stream, status, id);
}

cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* mode) {
  return call(
      [=](Engine&) {
        std::swap(*mode, thread_state().mode);
        return cudaSuccess;
      },
      false);
}

cudaError_t cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t* nodes, size_t* count) {
  return call([=](Engine&) {
    if (nodes != nullptr) return cudaErrorNotSupported;
    *count = graph->works.size();
    return cudaSuccess;
  });
}

cudaError_t cudaGraphInstantiate(cudaGraphExec_t* exec, cudaGraph_t graph, unsigned long long) {
  return call([=](Engine&) {
    if (exec == nullptr || graph == nullptr) return cudaErrorInvalidValue;
    *exec = new CUgraphExec_st{*graph};
    return cudaSuccess;
  });
}

cudaError_t cudaGraphLaunch(cudaGraphExec_t exec, cudaStream_t handle) {
  return call([=](Engine& engine) {
    if (exec == nullptr) return cudaErrorInvalidValue;
    Stream stream;
    const cudaError_t error = prepare(engine, handle, false, &stream);
    if (error != cudaSuccess) return error;
    ++engine.counters.graph_launches;
    for (const auto& work : exec->works) engine.enqueue(stream, work, {});
    return cudaSuccess;
  });
}

cudaError_t cudaGraphExecDestroy(cudaGraphExec_t exec) {
  return call([=](Engine&) {
    delete exec;
    return cudaSuccess;
  });
}

cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
  return call([=](Engine&) {
    delete graph;
    return cudaSuccess;
  });
}
