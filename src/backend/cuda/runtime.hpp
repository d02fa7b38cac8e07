// SPDX-License-Identifier: Apache-2.0
// What a context needs of CUDA: its device, its stream, its allocations, and the fault after which
// it does nothing more.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <vector>

#include "backend/allocator.hpp"
#include "backend/backend.hpp"
#include "backend/cuda/kernels.hpp"
#include "core/error.hpp"

struct CUctx_st;  // a context of the driver

namespace ga::cuda {

// The number of devices; if there is none, throws GA_ERROR_UNSUPPORTED with the reason.
int32_t device_count();
// See CudaModule.
Backend* make_backend(const ga_config& config);
void versions(int32_t& runtime, int32_t& driver);

// The driver's context that work is done in: that of the program's stream; without a stream, the one
// that is current in the calling thread; and if that is of another device or there is none, the
// device's primary context, which this object keeps alive.
class DriverContext {
 public:
  // Throws GA_ERROR_INVALID_ARGUMENT if the stream is of another device.
  DriverContext(int ordinal, cudaStream_t stream);
  ~DriverContext();
  DriverContext(const DriverContext&) = delete;
  DriverContext& operator=(const DriverContext&) = delete;
  CUctx_st* get() const { return context_; }
  // Throws GA_ERROR_INVALID_ARGUMENT if another stream is of another context. This one is current.
  void check(cudaStream_t stream) const;

 private:
  CUctx_st* context_ = nullptr;
  int kept_device_ = -1;
};

// Makes a context current in the calling thread for the life of this object, and then the one that
// was, or none. (cudaSetDevice would make a context on the device that it goes back to.)
class DeviceScope {
 public:
  explicit DeviceScope(CUctx_st* context) noexcept;
  ~DeviceScope();
  DeviceScope(const DeviceScope&) = delete;
  DeviceScope& operator=(const DeviceScope&) = delete;
  cudaError_t error() const { return error_; }

 private:
  CUctx_st* before_ = nullptr;
  bool restores_ = false;
  cudaError_t error_;
};

// Lets the thread allocate and free while another stream of the program is being captured.
// Otherwise such a call would break the capture.
class RelaxedCapture {
 public:
  RelaxedCapture() noexcept { exchange(); }
  ~RelaxedCapture() { exchange(); }
  RelaxedCapture(const RelaxedCapture&) = delete;
  RelaxedCapture& operator=(const RelaxedCapture&) = delete;

 private:
  void exchange() noexcept {
    if (cudaThreadExchangeStreamCaptureMode(&mode_) != cudaSuccess) cudaGetLastError();
  }
  cudaStreamCaptureMode mode_ = cudaStreamCaptureModeRelaxed;
};

class Runtime {
 public:
  // Throws GA_ERROR_INVALID_ARGUMENT if the device does not exist or the stream is of another
  // device.
  explicit Runtime(const ga_config& config);
  ~Runtime();
  Runtime(const Runtime&) = delete;
  Runtime& operator=(const Runtime&) = delete;

  // Returns work(), which runs with the device current. Every later call throws a fault again.
  template <class Work>
  auto call(Work&& work) {
    if (fault_) throw Error(*fault_);
    const DeviceScope scope(context_.get());
    try {
      enter(scope.error());
      return work();
    } catch (const Error& e) {
      const bool lasting = e.status() == GA_ERROR_FAULT || e.status() == GA_ERROR_COMMUNICATION;
      if (lasting && !fault_) fault_.emplace(e);
      throw;
    }
  }

  // All other functions that are not noexcept are called within call().

  // Throws an error as std::bad_alloc, as GA_ERROR_INVALID_STATE if a capture does not allow the
  // operation, else as GA_ERROR_FAULT. doing: "a copy from the device"
  void check(cudaError_t error, const char* doing) const;
  // check(calls(), doing), for a library that takes an error which the program has left in this thread for its
  // own. No call could put the error back, so calls() runs in another thread then.
  void without_pending_error(const std::function<cudaError_t()>& calls, const char* doing) const;
  // Where kernels are launched. Restores the tables that a captured graph may have overwritten.
  const Queue& queue();
  cudaStream_t stream() const { return queue_.stream; }
  int32_t ordinal() const { return ordinal_; }
  CUctx_st* context() const { return context_.get(); }
  bool capturing() const { return capture_ != 0; }
  // The capture that goes on, which has a number of its own; 0: none.
  unsigned long long capture() const { return capture_; }
  void set_window_open(bool open) noexcept { window_open_ = open; }
  void set_stream(cudaStream_t stream);  // see Backend
  int64_t done(int64_t number);          // see DeviceWork
  // Throws GA_ERROR_INVALID_STATE while the stream is captured. what: "this call waits"
  void require_no_capture(const char* what) const;
  void wait();
  void aside(const std::function<void()>& work);  // see Backend
  void join_aside();
  bool is_watched() const { return watch_ != nullptr; }
  void set_watch(std::function<void(double seconds)> watch) { watch_ = std::move(watch); }

  void* allocate(size_t bytes);  // zeros; throws std::bad_alloc
  void free(void* data) noexcept;
  void* allocate_pinned(size_t bytes, void** at);  // zeros; at: as the device sees it
  // Bytes on the device and on the host, without the context's blocks and the device's half of the
  // context's mirrors.
  int64_t own_bytes() const { return own_bytes_; }
  void count_own(int64_t bytes) noexcept { own_bytes_ += bytes; }

  Mirror mirror(size_t bytes);
  void free(Mirror& mirror) noexcept;
  void upload(const Mirror& mirror, size_t offset, size_t bytes);
  // Writes to memory that has no mirror.
  void write(void* at, const void* from, size_t bytes);
  // The host's address for a device address in a mirror, else NULL.
  const void* host_of(const void* at) const;

  void check_memory(const Subject& of, const char* what, const void* data) const;

 private:
  // A part of a mirror that was written during a capture: the graph writes it again when it runs.
  struct Recorded {
    const Mirror* mirror;
    size_t begin, end;
  };

  void enter(cudaError_t device_error);
  unsigned long long capture_of(cudaStream_t stream, const char* subject, const char* name) const;
  bool is_idle() const;
  void order_behind_work(cudaStream_t stream);
  cudaError_t wait_for_stream();
  void settle() noexcept;
  void record(const Mirror& mirror, size_t begin, size_t end);
  void* allocate_device(size_t bytes);
  void free_device(void* data) noexcept;

  Allocator allocator_;
  std::map<void*, size_t> given_;  // by the program's allocator
  int32_t ordinal_;
  const DriverContext context_;
  Queue queue_ = {};
  // Of aside(), made by its first call with the priority that the stream has then.
  cudaStream_t second_ = nullptr;
  // Made when they are first needed, and recorded anew each time.
  cudaEvent_t given_so_far_ = nullptr, done_ = nullptr, mark_ = nullptr;
  int64_t marked_ = 0;  // the number that done() has given to the work before mark_
  int64_t passed_ = 0;  // the highest number of which the work is done
  bool reads_pageable_ = false;
  unsigned long long capture_ = 0;
  bool captured_ = false;     // graphs may use what was allocated
  bool window_open_ = false;  // no graph is replayed until it is closed
  bool restored_ = false;     // queue() has restored the recorded parts since a graph could run
  std::optional<Error> fault_;
  std::function<void(double seconds)> watch_;  // see Backend::set_watch
  std::map<const char*, Mirror> mirrors_;      // by Mirror::at
  std::vector<Recorded> recorded_;
  std::vector<void*> kept_;  // freed blocks that graphs may use
  std::vector<void*> pinned_;
  int64_t own_bytes_ = 0;
};

}  // namespace ga::cuda
