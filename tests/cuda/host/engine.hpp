// SPDX-License-Identifier: Apache-2.0
// What the simulated CUDA (runtime.cpp, cublas.cpp) stands on: memory, and work in streams.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "simulator.hpp"

namespace ga::sim {

constexpr int kMaxDevices = 8;
constexpr int kEveryDevice = -1;

enum class Kind { kKernel, kLibrary, kCopy, kFill, kHostFunction, kFree };

struct Work {
  Kind kind;
  int device;  // whose memory it may touch, or kEveryDevice; a fault is the stream's device's
  std::function<void()> run;
};

// The first `index` works of a stream.
struct Mark {
  std::shared_ptr<CUstream_st> stream;
  int64_t index = 0;
};

struct Item {
  std::shared_ptr<const Work> work;  // may be none: it only waits
  std::vector<Mark> after;
};

// How many works of each stream of a capture come before a point in it.
using Clock = std::map<CUstream_st*, int64_t>;

struct Capture {
  unsigned long long id;
  cudaStreamCaptureMode mode;
  std::thread::id thread;
  CUstream_st* origin;
  std::map<CUstream_st*, Clock> streams;  // what comes before the next work of each
  std::vector<std::shared_ptr<const Work>> works;
  bool invalid = false;
};

enum class Memory { kNone, kDevice, kPinned, kRegistered, kManaged };

struct Allocation {
  char* begin = nullptr;
  size_t size = 0;
  Memory memory = Memory::kNone;
  int device = cudaInvalidDeviceId;
  bool pooled = false;    // by cudaMallocAsync
  char* pages = nullptr;  // begin lies at the end of these
  size_t page_bytes = 0;
};

// The device memory of one device: out of reach but while it is open, where it is protected. The
// calls that open and close it come from one thread.
class Arena {
 public:
  void protect(bool on);
  void open(bool on);
  char* take(size_t size);  // whole pages, to be written by the caller; nullptr: it is full
  void seal(char* pages, size_t size);
  void unseal(char* pages, size_t size);
  void give_back(char* pages, size_t size);  // never handed out again
  bool contains(const void* pointer) const;

 private:
  void create();

  char* base_ = nullptr;
  size_t used_ = 0;
  int file_ = -1;
  int key_ = -1;  // of the processor, where it has any: opens for the thread, at next to no cost
  bool protect_ = true;
  bool open_ = false;
};

struct Device {
  Arena arena;
  size_t bytes = 0;
  cudaError_t fault = cudaSuccess;
  std::shared_ptr<CUstream_st> legacy;
  std::map<std::thread::id, std::shared_ptr<CUstream_st>> per_thread;
};

class Engine {
 public:
  static Engine& get();

  std::recursive_mutex mutex;
  Config config;
  Counters counters;
  Device devices[kMaxDevices];
  std::vector<std::shared_ptr<CUstream_st>> streams;  // not destroyed, or not done
  std::set<CUevent_st*> events;
  std::set<std::shared_ptr<Capture>> captures;
  unsigned long long captures_begun = 0;
  int64_t fail_allocation = 0;
  int64_t fail_call = 0;
  cudaError_t fail_call_error = cudaSuccess;
  int64_t fail_execution = 0;

  // Memory.
  cudaError_t allocate(void** pointer, size_t size, Memory memory, int device, bool pooled);
  cudaError_t register_host(void* pointer, size_t size, int device);
  cudaError_t release(char* begin);
  void release_everything();
  const Allocation* find(const void* pointer) const;   // that this byte belongs to
  bool valid(const void* pointer, size_t size) const;  // not a stray piece of device memory

  // Work. enqueue: in the order of the stream, or into its capture.
  std::shared_ptr<CUstream_st> stream(cudaStream_t handle);  // nullptr: there is none
  cudaError_t enqueue(const std::shared_ptr<CUstream_st>& stream, Work work);
  cudaError_t enqueue(const std::shared_ptr<CUstream_st>& stream, std::shared_ptr<const Work> work,
                      std::vector<Mark> after);
  void run(const Mark& upto);
  void run_device(int device);
  void run_everything();
  bool run_one(const Mark& upto);  // false: all of it was done
  Mark end_of(const std::shared_ptr<CUstream_st>& stream) const;

  // Captures.
  std::shared_ptr<Capture> capture_of(const CUstream_st* stream) const;
  bool unsafe_call();  // true, and captures have become invalid, where one forbids such calls here
  bool implicit_capture(const CUstream_st& stream) const;  // a use of the legacy stream meets one
  void end_capture(const std::shared_ptr<Capture>& capture);

  void open_only(int device);  // kEveryDevice; or kMaxDevices for none
  void close_all() { open_only(kMaxDevices); }

 private:
  Engine();
  void execute(const CUstream_st& stream, const Work& work);
  void run_item(CUstream_st& stream);

  std::map<uintptr_t, Allocation> allocations_;
  int depth_ = 0;
};

// Of the calling thread.
struct ThreadState {
  int device = 0;
  cudaError_t last_error = cudaSuccess;
  cudaStreamCaptureMode mode = cudaStreamCaptureModeGlobal;
  bool in_host_function = false;
};
ThreadState& thread_state();

// What a call returns before it does anything, with the engine locked: no driver, a fault, ...
cudaError_t entry_error();

// Runs the body of a call: locks, checks, remembers the error.
template <class Body>
cudaError_t call(Body&& body) {
  const std::lock_guard<std::recursive_mutex> lock(Engine::get().mutex);
  cudaError_t error = entry_error();
  if (error == cudaSuccess) error = body(Engine::get());
  if (error != cudaSuccess) thread_state().last_error = error;
  return error;
}

// The beginning of a call that queues work on a stream of the current device, or of any.
cudaError_t prepare(Engine& engine, cudaStream_t handle, bool current_device,
                    std::shared_ptr<CUstream_st>* stream);

}  // namespace ga::sim

struct CUstream_st {
  int device;
  unsigned flags;
  bool legacy = false;
  bool destroyed = false;
  std::deque<ga::sim::Item> items = {};
  int64_t done = 0;

  int64_t end() const { return done + static_cast<int64_t>(items.size()); }
};

struct CUevent_st {
  int device;
  unsigned flags;
  ga::sim::Mark mark;  // without a stream: never recorded
  std::shared_ptr<ga::sim::Capture> capture;
  ga::sim::Clock clock;
};

struct CUgraph_st {
  std::vector<std::shared_ptr<const ga::sim::Work>> works;
};

struct CUgraphExec_st : CUgraph_st {};
