// SPDX-License-Identifier: Apache-2.0
// One context's hold on CUDA: its device, its stream, what it has allocated, and the fault after
// which nothing more is done.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <vector>

#include "backend/backend.hpp"
#include "backend/cuda/kernels.hpp"
#include "error.hpp"

namespace ga::cuda {

// How many devices there are; throws GA_ERROR_UNSUPPORTED with what is missing where there are none.
int32_t device_count();

// Makes a device the calling thread's while it lives.
class DeviceScope {
 public:
  explicit DeviceScope(int ordinal) noexcept;
  ~DeviceScope();
  DeviceScope(const DeviceScope&) = delete;
  DeviceScope& operator=(const DeviceScope&) = delete;
  cudaError_t error() const { return error_; }

 private:
  int before_ = -1;  // to go back to; -1: nothing to do
  cudaError_t error_;
};

// Lets the thread allocate and free while another stream of the program is captured, which such
// calls would otherwise break.
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
  // Throws GA_ERROR_INVALID_ARGUMENT for a device that is not there and a stream of another one.
  Runtime(int32_t ordinal, cudaStream_t stream);
  ~Runtime();
  Runtime(const Runtime&) = delete;
  Runtime& operator=(const Runtime&) = delete;

  // Runs work with the device current. A fault is thrown again by every later call.
  template <class Work>
  auto call(Work&& work) {
    if (fault_) throw Error(*fault_);
    const DeviceScope scope(ordinal_);
    try {
      enter(scope.error());
      return work();
    } catch (const Error& e) {
      if (e.status() == GA_ERROR_FAULT && !fault_) fault_.emplace(e);
      throw;
    }
  }

  // The rest is to be called within call(), but for what is noexcept.

  // Throws what the error is: std::bad_alloc, GA_ERROR_INVALID_STATE for what a capture does not
  // allow, else GA_ERROR_FAULT. doing: "a copy from the device"
  void check(cudaError_t error, const char* doing) const;
  // Where kernels go. Tables that a captured graph may have written are first as the host has them.
  const Queue& queue();
  cudaStream_t stream() const { return queue_.stream; }
  int32_t ordinal() const { return ordinal_; }
  bool capturing() const { return capturing_; }
  bool reads_pageable() const { return reads_pageable_; }
  // Throws GA_ERROR_INVALID_STATE while the stream is captured. what: "this call waits"
  void require_no_capture(const char* what) const;
  void wait();

  void* allocate(size_t bytes);  // zeros; throws std::bad_alloc
  void free(void* data, size_t bytes) noexcept;
  void* allocate_pinned(size_t bytes, void** at);  // zeros; at: as the device sees it
  // Bytes on the device and on the host that are neither blocks of the context's nor the device's
  // half of its mirrors.
  int64_t own_bytes() const { return own_bytes_; }
  void count_own(int64_t bytes) noexcept { own_bytes_ += bytes; }

  Mirror mirror(size_t bytes);
  void free(Mirror& mirror) noexcept;
  void upload(const Mirror& mirror, size_t offset, size_t bytes);
  // The same for what has no mirror.
  void write(void* at, const void* from, size_t bytes);
  // What the host has of an address in a mirror; NULL for others.
  const void* host_of(const void* at) const;

  void check_memory(const void* data, const char* what) const;

 private:
  // A part of a mirror that was written during a capture, so by the graph each time it runs.
  struct Recorded {
    const Mirror* mirror;
    size_t begin, end;
  };

  void enter(cudaError_t device_error);
  void record(const Mirror& mirror, size_t begin, size_t end);
  void free_device(void* data) noexcept;

  int32_t ordinal_;
  Queue queue_ = {};
  bool reads_pageable_ = false;
  bool capturing_ = false;
  bool captured_ = false;  // there may be graphs that use what was allocated
  bool restored_ = false;  // recorded parts of mirrors were sent again in this call
  std::optional<Error> fault_;
  std::map<const char*, Mirror> mirrors_;  // by Mirror::at
  std::vector<Recorded> recorded_;
  std::vector<void*> kept_;  // released, but graphs may use it
  std::vector<void*> pinned_;
  int64_t own_bytes_ = 0;
};

}  // namespace ga::cuda
