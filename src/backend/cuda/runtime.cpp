// SPDX-License-Identifier: Apache-2.0
#include "backend/cuda/runtime.hpp"

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <thread>

namespace ga::cuda {
namespace {

constexpr size_t kAlign = 64;
// From CUDA 12.1 on (R530), a kernel takes more than 4 KB of arguments.
constexpr int32_t kOldestDriver = 12010;

struct Version {
  int major, minor;
  explicit Version(int number) : major(number / 1000), minor(number % 1000 / 10) {}
};

// The numbers of the driver's errors are those of the runtime's.
cudaError_t error_of(int result) { return static_cast<cudaError_t>(result); }

// Functions of the driver: for contexts, which the runtime can only choose by their device; and to ask
// about a stream or an event, since the runtime leaves «not ready» as an error in the program's thread.
struct Driver {
  int (*get_current)(CUctx_st**);
  int (*set_current)(CUctx_st*);
  int (*device)(int* device, int ordinal);
  int (*retain)(CUctx_st**, int device);
  int (*release)(int device);
  int (*stream_context)(cudaStream_t, CUctx_st**);
  int (*query)(cudaStream_t);
  int (*query_event)(cudaEvent_t);
  int (*priority)(cudaStream_t, int* priority);

  // Throws GA_ERROR_UNSUPPORTED. Callable where there is a device.
  static const Driver& get() {
    static const Driver driver = [] {
      Driver d;
      find("cuCtxGetCurrent", d.get_current);
      find("cuCtxSetCurrent", d.set_current);
      find("cuDeviceGet", d.device);
      find("cuDevicePrimaryCtxRetain", d.retain);
      find("cuDevicePrimaryCtxRelease", d.release);
      find("cuStreamGetCtx", d.stream_context);
      find("cuStreamQuery", d.query);
      find("cuEventQuery", d.query_event);
      find("cuStreamGetPriority", d.priority);
      return d;
    }();
    return driver;
  }

 private:
  template <class Function>
  static void find(const char* name, Function& function) {
    void* found = nullptr;
    cudaDriverEntryPointQueryResult result = cudaDriverEntryPointSymbolNotFound;
#if CUDART_VERSION >= 12050
    const cudaError_t error =
        cudaGetDriverEntryPointByVersion(name, &found, 12000, cudaEnableDefault, &result);
#else
    const cudaError_t error = cudaGetDriverEntryPoint(name, &found, cudaEnableDefault, &result);
#endif
    if (error != cudaSuccess) cudaGetLastError();
    if (error != cudaSuccess || result != cudaDriverEntryPointSuccess)
      fail(GA_ERROR_UNSUPPORTED, "the CUDA driver of this machine has no %s", name);
    function = reinterpret_cast<Function>(found);
  }
};

// Whether the program has made the stream. The legacy default stream has two names.
bool is_own(cudaStream_t stream) { return stream && stream != cudaStreamLegacy; }

void check_kind(cudaStream_t stream) {
  if (stream == cudaStreamPerThread)
    fail(GA_ERROR_INVALID_ARGUMENT,
         "stream was cudaStreamPerThread, which is another stream in each thread, so that the "
         "calls of two threads would not be in order: make a stream, or pass NULL, the legacy "
         "default stream");
}

}  // namespace

// ---- Devices ------------------------------------------------------------------------------------

void versions(int32_t& runtime, int32_t& driver) {
  if (cudaRuntimeGetVersion(&runtime) != cudaSuccess) cudaGetLastError();
  if (cudaDriverGetVersion(&driver) != cudaSuccess) cudaGetLastError();
}

int32_t device_count() {
  int count = 0;
  const cudaError_t error = cudaGetDeviceCount(&count);
  int32_t driver = 0, runtime = 0;
  if (error == cudaSuccess && count > 0) {
    versions(runtime, driver);
    const Version has(driver), needs(kOldestDriver);
    if (driver < kOldestDriver)
      fail(GA_ERROR_UNSUPPORTED,
           "the CUDA driver of this machine is too old: it is for CUDA %d.%d, this library needs "
           "%d.%d",
           has.major, has.minor, needs.major, needs.minor);
    return count;
  }
  cudaGetLastError();
  versions(runtime, driver);
  if (error != cudaSuccess && driver == 0)
    fail(GA_ERROR_UNSUPPORTED, "there is no CUDA driver on this machine (libcuda.so.1): %s (%s)",
         cudaGetErrorString(error), cudaGetErrorName(error));
  const Version has(driver), needs(runtime);
  if (error == cudaErrorInsufficientDriver)
    fail(GA_ERROR_UNSUPPORTED,
         "the CUDA driver of this machine is too old: it is for CUDA %d.%d, this library was built "
         "with CUDA %d.%d",
         has.major, has.minor, needs.major, needs.minor);
  if (error == cudaSuccess || error == cudaErrorNoDevice)
    fail(GA_ERROR_UNSUPPORTED,
         "the CUDA driver of this machine (CUDA %d.%d) shows no device; CUDA_VISIBLE_DEVICES is %s",
         has.major, has.minor,
         std::getenv("CUDA_VISIBLE_DEVICES") ? std::getenv("CUDA_VISIBLE_DEVICES") : "not set");
  fail(GA_ERROR_UNSUPPORTED, "the CUDA driver of this machine (CUDA %d.%d) does not work: %s (%s)",
       has.major, has.minor, cudaGetErrorString(error), cudaGetErrorName(error));
}

DeviceScope::DeviceScope(CUctx_st* context) noexcept {
  error_ = error_of(Driver::get().get_current(&before_));
  if (error_ != cudaSuccess || before_ == context) return;
  error_ = error_of(Driver::get().set_current(context));
  restores_ = true;  // also if that failed, since it may have switched
}

DeviceScope::~DeviceScope() {
  if (restores_) Driver::get().set_current(before_);
}

DriverContext::DriverContext(int ordinal, cudaStream_t stream) {
  const Driver& driver = Driver::get();
  const bool own = is_own(stream);
  if ((own ? driver.stream_context(stream, &context_) : driver.get_current(&context_)) != 0)
    context_ = nullptr;  // unknown
  int device = -1;
  if (context_) {
    const DeviceScope scope(context_);
    if (scope.error() == cudaSuccess && cudaGetDevice(&device) != cudaSuccess) cudaGetLastError();
  }
  if (device == ordinal) return;
  if (own && device >= 0)
    fail(GA_ERROR_INVALID_ARGUMENT, "stream is of CUDA device %d, but device_ordinal was %d",
         device, ordinal);
  cudaError_t error = error_of(driver.device(&device, ordinal));
  if (error == cudaSuccess) error = error_of(driver.retain(&context_, device));
  if (error == cudaErrorMemoryAllocation) throw std::bad_alloc();
  if (error != cudaSuccess)
    fail(GA_ERROR_FAULT, "CUDA device %d: making its context failed: %s (%s)", ordinal,
         cudaGetErrorString(error), cudaGetErrorName(error));
  kept_device_ = device;
}

void DriverContext::check(cudaStream_t stream) const {
  if (!is_own(stream)) return;
  CUctx_st* context = nullptr;
  if (Driver::get().stream_context(stream, &context) != 0 || !context)
    fail(GA_ERROR_INVALID_ARGUMENT, "stream was %p, which is no stream of CUDA",
         static_cast<void*>(stream));
  if (context == context_) return;
  int device = -1, own = -1;
  if (cudaGetDevice(&own) != cudaSuccess) cudaGetLastError();
  {
    const DeviceScope scope(context);
    if (scope.error() == cudaSuccess && cudaGetDevice(&device) != cudaSuccess) cudaGetLastError();
  }
  if (device != own)
    fail(GA_ERROR_INVALID_ARGUMENT, "stream is of CUDA device %d, but the context is of device %d",
         device, own);
  fail(GA_ERROR_INVALID_ARGUMENT,
       "stream is of another driver context of CUDA device %d than the context's arrays", own);
}

DriverContext::~DriverContext() {
  if (kept_device_ >= 0) Driver::get().release(kept_device_);
}

// ---- Calls --------------------------------------------------------------------------------------

static int32_t checked_ordinal(const ga_config& config) {
  const int32_t count = device_count(), ordinal = config.device_ordinal;
  if (ordinal < 0 || ordinal >= count)
    fail(GA_ERROR_INVALID_ARGUMENT, "device_ordinal was %d, but there are %d CUDA devices", ordinal,
         count);
  check_kind(static_cast<cudaStream_t>(config.stream));
  return ordinal;
}

Runtime::Runtime(const ga_config& config)
    : allocator_(config),
      ordinal_(checked_ordinal(config)),
      context_(ordinal_, static_cast<cudaStream_t>(config.stream)) {
  const int32_t ordinal = ordinal_;
  queue_.stream = static_cast<cudaStream_t>(config.stream);
  call([&] {
    const auto attribute = [&](cudaDeviceAttr which) {
      int value = 0;
      check(cudaDeviceGetAttribute(&value, which, ordinal), "asking for what the device is");
      return value;
    };
    // By the page tables of the host. Heterogeneous memory management reads such memory too, page by
    // page over the bus: an address that is the host's by mistake would be slow, and no error.
    reads_pageable_ = attribute(cudaDevAttrPageableMemoryAccessUsesHostPageTables) != 0;
    queue_.multiprocessors = attribute(cudaDevAttrMultiProcessorCount);
    queue_.blocks = queue_.multiprocessors *
                    std::max(1, attribute(cudaDevAttrMaxThreadsPerMultiProcessor) / 256);
    const size_t bytes = kCounters * sizeof(unsigned);
    queue_.counters = static_cast<unsigned*>(allocate(bytes));
    const unsigned zeros[kCounters] = {};
    try {  // fails if this build has no code for the device
      const RelaxedCapture relaxed;
      check(load_kernels(), "loading the kernels");
      cuda::upload(queue_, queue_.counters, zeros, bytes);
    } catch (const std::bad_alloc&) {
      free_device(queue_.counters);
      throw;
    } catch (const Error& e) {
      free_device(queue_.counters);
      fail(GA_ERROR_UNSUPPORTED, "CUDA device %d, of compute capability %d.%d, cannot be used: %s",
           ordinal, attribute(cudaDevAttrComputeCapabilityMajor),
           attribute(cudaDevAttrComputeCapabilityMinor), e.what());
    }
    count_own(static_cast<int64_t>(bytes));
  });
}

Runtime::~Runtime() {
  const DeviceScope scope(context_.get());
  const RelaxedCapture relaxed;
  settle();
  for (const auto& [at, mirror] : mirrors_) {
    std::free(mirror.host);
    free_device(mirror.at);
  }
  for (const cudaEvent_t event : {given_so_far_, done_, mark_})
    if (event && cudaEventDestroy(event) != cudaSuccess) cudaGetLastError();
  if (second_ && cudaStreamDestroy(second_) != cudaSuccess) cudaGetLastError();
  for (void* data : kept_) free_device(data);
  free_device(queue_.counters);
  for (void* data : pinned_)
    if (cudaFreeHost(data) != cudaSuccess) cudaGetLastError();
}

void Runtime::enter(cudaError_t device_error) {
  check(device_error, "choosing the device");
  const unsigned long long capture =
      capture_of(queue_.stream, "the context works on", "the context's stream");
  restored_ = restored_ && window_open_ && capture == capture_;
  capture_ = capture;
  captured_ = captured_ || capturing();
}

// The capture of a stream, as capture(). subject, name: what messages call the stream.
unsigned long long Runtime::capture_of(cudaStream_t stream, const char* subject,
                                       const char* name) const {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  unsigned long long id = 0;
  const cudaError_t error = cudaStreamGetCaptureInfo(stream, &status, &id);
  if (error == cudaErrorStreamCaptureImplicit) {
    cudaGetLastError();
    fail(GA_ERROR_INVALID_STATE,
         "a stream of the program is being captured, and %s the default stream, "
         "which nothing can be given to then: give it a stream of its own (ga_config.stream)",
         subject);
  }
  check(error, "asking whether the stream is being captured");
  if (status == cudaStreamCaptureStatusInvalidated)
    fail(GA_ERROR_INVALID_STATE, "the capture of %s is broken: end it first", name);
  return status == cudaStreamCaptureStatusActive ? id + 1 : 0;
}

void Runtime::check(cudaError_t error, const char* doing) const {
  if (error == cudaSuccess) return;
  cudaGetLastError();  // reported here, so the program does not find it later
  if (error == cudaErrorMemoryAllocation) throw std::bad_alloc();
  if (is_capture_error(error))
    fail(GA_ERROR_INVALID_STATE, "%s is not possible while a stream is being captured: %s (%s)",
         doing, cudaGetErrorString(error), cudaGetErrorName(error));
  fail(GA_ERROR_FAULT, "CUDA device %d: %s failed: %s (%s)", ordinal_, doing,
       cudaGetErrorString(error), cudaGetErrorName(error));
}

const Queue& Runtime::queue() {
  // A graph that has run since then has written what it recorded.
  if (!capturing() && !restored_)
    for (const Recorded& r : recorded_)
      cuda::upload(queue_, static_cast<char*>(r.mirror->at) + r.begin,
                   static_cast<const char*>(r.mirror->host) + r.begin, r.end - r.begin);
  restored_ = true;
  return queue_;
}

void Runtime::require_no_capture(const char* what) const {
  if (capturing())
    fail(GA_ERROR_INVALID_STATE, "%s, which is not possible while the stream is being captured",
         what);
}

void Runtime::without_pending_error(const std::function<cudaError_t()>& calls,
                                    const char* doing) const {
  if (cudaPeekAtLastError() == cudaSuccess) return check(calls(), doing);
  cudaError_t error = cudaSuccess;
  std::thread thread([&] {
    const DeviceScope scope(context_.get());
    error = scope.error() == cudaSuccess ? calls() : scope.error();
  });
  thread.join();
  check(error, doing);
}

void Runtime::wait() {
  require_no_capture("this call waits for the device");
  check(wait_for_stream(), "the work of the stream");
}

cudaError_t Runtime::wait_for_stream() {
  if (!watch_) return cudaStreamSynchronize(queue_.stream);
  using Clock = std::chrono::steady_clock;
  constexpr double kShort = 1e-3;  // so long, the thread is ready to go on at once
  const auto start = Clock::now();
  for (;;) {
    const cudaError_t error = error_of(Driver::get().query(queue_.stream));
    if (error != cudaErrorNotReady) return error;
    const double seconds = std::chrono::duration<double>(Clock::now() - start).count();
    watch_(seconds);
    if (seconds < kShort)
      std::this_thread::yield();
    else
      std::this_thread::sleep_for(std::chrono::microseconds(20));
  }
}

// Waits before memory is given back.
void Runtime::settle() noexcept {
  if (fault_) return;
  try {
    if (wait_for_stream() != cudaSuccess) cudaGetLastError();
  } catch (const Error& e) {
    fault_.emplace(e);
  }
}

// ---- Streams ------------------------------------------------------------------------------------

void Runtime::set_stream(cudaStream_t stream) {
  check_kind(stream);
  context_.check(stream);
  if (stream == queue_.stream || (!is_own(stream) && !is_own(queue_.stream))) return;
  const unsigned long long capture = capture_of(stream, "stream was", "stream");
  if (capture == capture_) {
    order_behind_work(stream);
  } else if (capturing() && capture != 0) {
    fail(GA_ERROR_INVALID_STATE,
         "stream is being captured into another graph than the context's stream, which no graph "
         "can wait for: end one of the captures first");
  } else if (capturing()) {
    fail(GA_ERROR_INVALID_STATE,
         "the context's stream is being captured, and stream is no part of that capture: end the "
         "capture first, or have stream wait for an event of the context's stream");
  } else if (!is_idle()) {
    fail(GA_ERROR_INVALID_STATE,
         "stream is being captured, and the context's stream still has work from before the "
         "capture, which a graph cannot wait for: call ga_context_set_stream, or wait "
         "(ga_synchronize), before the capture begins");
  }
  queue_.stream = stream;
  allocator_.set_stream(stream);
}

// Whether the device is done with all that the context has queued.
bool Runtime::is_idle() const {
  const RelaxedCapture relaxed;
  const auto is_done = [&](cudaStream_t stream) {
    const cudaError_t error = error_of(Driver::get().query(stream));
    if (error == cudaErrorNotReady) return false;
    check(error, "asking whether the stream is done");
    return true;
  };
  return is_done(queue_.stream) && (!second_ || is_done(second_));
}

int64_t Runtime::done(int64_t number) {
  if (capturing()) return passed_;
  const RelaxedCapture relaxed;
  if (!mark_) check(cudaEventCreateWithFlags(&mark_, cudaEventDisableTiming), "an event");
  while (passed_ < number) {
    if (marked_ == passed_) {
      check(cudaEventRecord(mark_, queue_.stream), "an event");
      marked_ = number;
    }
    const cudaError_t error = error_of(Driver::get().query_event(mark_));
    if (error == cudaErrorNotReady) break;
    check(error, "asking whether an event has happened");
    passed_ = marked_;
  }
  return passed_;
}

// Has a stream wait for all that the context's stream has been given so far.
void Runtime::order_behind_work(cudaStream_t stream) {
  if (!given_so_far_)
    check(cudaEventCreateWithFlags(&given_so_far_, cudaEventDisableTiming), "an event");
  check(cudaEventRecord(given_so_far_, queue_.stream), "an event");
  check(cudaStreamWaitEvent(stream, given_so_far_, 0), "a wait of a stream");
}

void Runtime::aside(const std::function<void()>& work) {
  if (!second_) {
    require_no_capture("this call makes a stream (run one window before the capture)");
    int priority = 0;
    check(error_of(Driver::get().priority(queue_.stream, &priority)), "asking for a priority");
    check(cudaStreamCreateWithPriority(&second_, cudaStreamNonBlocking, priority),
          "a second stream");
  }
  if (!done_) check(cudaEventCreateWithFlags(&done_, cudaEventDisableTiming), "an event");
  queue();  // restores tables before the second stream reads them
  order_behind_work(second_);
  std::swap(queue_.stream, second_);
  try {
    work();
  } catch (...) {
    std::swap(queue_.stream, second_);
    throw;
  }
  std::swap(queue_.stream, second_);
}

void Runtime::join_aside() {
  check(cudaEventRecord(done_, second_), "an event");
  check(cudaStreamWaitEvent(queue_.stream, done_, 0), "a wait of a stream");
}

// ---- Memory -------------------------------------------------------------------------------------

void* Runtime::allocate(size_t bytes) {
  require_no_capture("this call needs memory (run one window before the capture)");
  const RelaxedCapture relaxed;
  bytes = std::max<size_t>(bytes, 1);
  void* const data = allocate_device(bytes);
  const cudaError_t error = cudaMemsetAsync(data, 0, bytes, queue_.stream);
  if (error != cudaSuccess) free_device(data);
  check(error, "zeroing memory");
  return data;
}

void* Runtime::allocate_device(size_t bytes) {
  void* data = nullptr;
  if (!allocator_.is_set()) {
    check(cudaMalloc(&data, bytes), "an allocation");
    return data;
  }
  data = allocator_.allocate(bytes);
  try {
    given_.emplace(data, bytes);
  } catch (...) {
    allocator_.free(data, bytes);
    throw;
  }
  return data;
}

void Runtime::free_device(void* data) noexcept {
  if (const auto given = given_.find(data); given != given_.end()) {
    const size_t bytes = given->second;
    given_.erase(given);
    allocator_.free(data, bytes);
    return;
  }
  if (cudaFree(data) != cudaSuccess) cudaGetLastError();
}

void Runtime::free(void* data) noexcept {
  if (!data) return;
  if (captured_) {
    try {
      kept_.push_back(data);
    } catch (const std::bad_alloc&) {  // stays allocated, as a graph needs
    }
    return;
  }
  const DeviceScope scope(context_.get());
  const RelaxedCapture relaxed;
  settle();
  free_device(data);
}

void* Runtime::allocate_pinned(size_t bytes, void** at) {
  require_no_capture("this call needs memory (run one window before the capture)");
  const RelaxedCapture relaxed;
  pinned_.reserve(pinned_.size() + 1);
  void* data = nullptr;
  check(cudaHostAlloc(&data, bytes, cudaHostAllocMapped | cudaHostAllocPortable),
        "an allocation of pinned memory");
  pinned_.push_back(data);
  check(cudaHostGetDevicePointer(at, data, 0), "mapping pinned memory");
  std::memset(data, 0, bytes);
  count_own(static_cast<int64_t>(bytes));
  return data;
}

Mirror Runtime::mirror(size_t bytes) {
  const size_t padded = (std::max<size_t>(bytes, 1) + kAlign - 1) / kAlign * kAlign;
  Mirror m;
  m.bytes = bytes;
  m.host = std::aligned_alloc(kAlign, padded);
  if (!m.host) throw std::bad_alloc();
  std::memset(m.host, 0, padded);
  try {
    m.at = allocate(bytes);
    mirrors_.emplace(static_cast<const char*>(m.at), m);
  } catch (...) {
    std::free(m.host);
    if (m.at) free_device(m.at);
    throw;
  }
  count_own(static_cast<int64_t>(bytes));  // the host's half
  return m;
}

void Runtime::free(Mirror& mirror) noexcept {
  if (!mirror.at) return;
  const auto known = mirrors_.find(static_cast<const char*>(mirror.at));
  recorded_.erase(std::remove_if(recorded_.begin(), recorded_.end(),
                                 [&](const Recorded& r) { return r.mirror == &known->second; }),
                  recorded_.end());
  mirrors_.erase(known);
  free(mirror.at);
  std::free(mirror.host);
  count_own(-static_cast<int64_t>(mirror.bytes));
  mirror = {};
}

const void* Runtime::host_of(const void* at) const {
  const auto* const address = static_cast<const char*>(at);
  auto m = mirrors_.upper_bound(address);
  if (m == mirrors_.begin()) return nullptr;
  --m;
  const auto offset = static_cast<size_t>(address - m->first);
  return offset < m->second.bytes ? static_cast<const char*>(m->second.host) + offset : nullptr;
}

void Runtime::upload(const Mirror& mirror, size_t offset, size_t bytes) {
  if (capturing()) record(mirror, offset, offset + bytes);
  cuda::upload(queue_, static_cast<char*>(mirror.at) + offset,
               static_cast<const char*>(mirror.host) + offset, bytes);
}

void Runtime::write(void* at, const void* from, size_t bytes) {
  cuda::upload(queue_, at, from, bytes);
}

void Runtime::record(const Mirror& mirror, size_t begin, size_t end) {
  const Mirror* const known = &mirrors_.at(static_cast<const char*>(mirror.at));
  for (Recorded& r : recorded_) {
    if (r.mirror != known || begin > r.end || r.begin > end) continue;
    r.begin = std::min(r.begin, begin);
    r.end = std::max(r.end, end);
    return;
  }
  recorded_.push_back({known, begin, end});
}

void Runtime::check_memory(const Subject& of, const char* what, const void* data) const {
  if (!data) return;
  cudaPointerAttributes attributes = {};
  const cudaError_t error = cudaPointerGetAttributes(&attributes, data);
  if (error == cudaErrorInvalidValue)  // from CUDA 10, for an address that it does not know
    cudaGetLastError();
  else
    check(error, "asking for what memory is at an address");
  const auto refuse = [&](const char* kind) {
    of.fail(GA_ERROR_INVALID_ARGUMENT, "%s at %p is %s, expected memory of CUDA device %d", what,
            data, kind, ordinal_);
  };
  switch (error == cudaSuccess ? attributes.type : cudaMemoryTypeUnregistered) {
    case cudaMemoryTypeManaged:
      return;
    case cudaMemoryTypeDevice:
      if (attributes.device == ordinal_) return;
      char text[64];
      std::snprintf(text, sizeof text, "memory of CUDA device %d", attributes.device);
      refuse(text);
      return;
    case cudaMemoryTypeHost:
      if (attributes.devicePointer == data || reads_pageable_) return;
      refuse("pinned host memory that the device has at another address or not at all");
      return;
    default:
      if (!reads_pageable_) refuse("host memory");
  }
}

}  // namespace ga::cuda
