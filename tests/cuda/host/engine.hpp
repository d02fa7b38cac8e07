// SPDX-License-Identifier: Apache-2.0
// The base of the simulated CUDA (runtime.cpp, cublas.cpp, nccl.cpp): memory, and work in streams.
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

struct CUctx_st {
  int device = 0;
  bool exists = false;
  std::set<std::string> kernels = {};  // that are loaded
};

namespace ga::sim {

constexpr int kMaxDevices = 8;
constexpr int kEveryDevice = -1;

enum class Kind { kKernel, kLibrary, kCopy, kFill, kHostFunction, kFree };

struct Work {
  Kind kind;
  int device;  // whose memory it may touch, or kEveryDevice; a fault is the stream's device's
  std::function<void()> run;
  // Asked before the work runs, any number of times; false keeps the stream waiting for other streams, or
  // for calls of other threads. May be empty.
  std::function<bool()> ready = {};
};

// A point in a stream: after its first `index` works.
struct Mark {
  std::shared_ptr<CUstream_st> stream;
  int64_t index = 0;
};

struct Item {
  std::shared_ptr<const Work> work;  // may be null: the entry only waits
  std::vector<Mark> after;
};

// For a point in a capture, the number of works of each stream that come before the point.
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
  char* pages = nullptr;  // the pages at whose end the allocation lies
  size_t page_bytes = 0;
};

// The memory of one device. If it is protected, it is accessible only while it is open. One thread
// makes the calls that open and close it.
class Arena {
 public:
  void protect(bool on);
  void open(bool on);
  char* take(size_t size);  // whole pages, or nullptr if the memory is full
  char* unseal(char* pages,
               size_t size);  // address for reading and writing the pages until they are sealed
  void seal(char* pages, size_t size);
  void give_back(char* pages, size_t size);  // the pages are sealed and never handed out again
  bool contains(const void* pointer) const;

 private:
  // A part of the address space, whose contents move away as a whole, see simulator.cpp.
  struct Window {
    size_t begin = 0;
    size_t size = 0;
    int64_t allocations = 0;

    size_t end() const { return begin + size; }
  };

  void create();
  bool create_windows();
  bool add_window(size_t size);
  void remove_window(std::vector<Window>::iterator window);
  void move(const Window& window, bool here);
  void seal_mappings(char* pages, size_t size);

  char* base_ = nullptr;
  size_t used_ = 0;
  char* away_ = nullptr;  // the addresses that closed windows move to
  std::vector<Window> windows_;
  int file_ = -1;  // mapped by allocations
  int key_ =
      -1;  // protection key, if the processor has them: opens the memory for the thread cheaply
  bool protect_ = true;
  bool open_ = false;
};

struct Device {
  Arena arena;
  CUctx_st primary;
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
  std::vector<std::shared_ptr<CUstream_st>> streams;  // not destroyed, or with work left
  std::set<CUevent_st*> events;
  std::set<std::shared_ptr<Capture>> captures;
  unsigned long long captures_begun = 0;
  int64_t fail_allocation = 0;
  int64_t fail_call = 0;
  cudaError_t fail_call_error = cudaSuccess;
  int64_t fail_execution = 0;
  int64_t fail_switch = 0;
  std::vector<std::unique_ptr<CUctx_st>> contexts;  // of the program's own

  // Memory.
  cudaError_t allocate(void** pointer, size_t size, Memory memory, int device, bool pooled);
  cudaError_t register_host(void* pointer, size_t size, int device);
  cudaError_t release(char* begin);
  void release_everything();
  const Allocation* find(const void* pointer) const;     // the allocation of this byte
  std::vector<Allocation> accessible(int device) const;  // by work of the device
  bool valid(const void* pointer, size_t size) const;    // false beyond the end of an allocation

  // Work. enqueue: to the end of the stream, or into its capture.
  std::shared_ptr<CUstream_st> stream(cudaStream_t handle);  // nullptr if there is none
  cudaError_t enqueue(const std::shared_ptr<CUstream_st>& stream, Work work);
  cudaError_t enqueue(const std::shared_ptr<CUstream_st>& stream, std::shared_ptr<const Work> work,
                      std::vector<Mark> after);
  // Waits until the stream has got there; the engine is locked once, and unlocked meanwhile where another
  // thread has to act.
  void run(const Mark& upto);
  bool advance(const Mark& upto);  // as far as possible; false if work on the way is not ready
  void run_device(int device);
  void run_everything();
  bool run_one(const Mark& upto);  // false if nothing was left to run
  Mark end_of(const std::shared_ptr<CUstream_st>& stream) const;

  // Captures.
  std::shared_ptr<Capture> capture_of(const CUstream_st* stream) const;
  bool unsafe_call();  // if a capture forbids such calls: makes it invalid and returns true
  bool implicit_capture(
      const CUstream_st& stream) const;  // true if the legacy stream meets a capture
  void end_capture(const std::shared_ptr<Capture>& capture);

  void open_only(int device);  // a device, kEveryDevice for all, or kMaxDevices for none
  void close_all() { open_only(kMaxDevices); }

 private:
  Engine();
  void execute(const CUstream_st& stream, const Work& work);
  bool run_item(CUstream_st& stream);
  void advance_to_waiting();

  std::map<uintptr_t, Allocation> allocations_;
  int depth_ = 0;
};

// State of the calling thread.
struct ThreadState {
  int device = 0;               // that the runtime chose, where no context is current
  CUctx_st* context = nullptr;  // current
  cudaError_t last_error = cudaSuccess;
  cudaStreamCaptureMode mode = cudaStreamCaptureModeGlobal;
  bool in_host_function = false;
};
ThreadState& thread_state();
// The device of the calling thread.
int current_device();
// Makes it have a context, as calls of the runtime do that need one.
void need_context();

// The error that a call returns before it does anything: no driver, a fault, ... The engine is
// locked.
cudaError_t entry_error();

// Runs the body of a call: locks, checks, remembers the error.
template <class Body>
cudaError_t call(Body&& body, bool needs_context = true) {
  const std::lock_guard<std::recursive_mutex> lock(Engine::get().mutex);
  cudaError_t error = entry_error();
  if (error == cudaSuccess && needs_context) need_context();
  if (error == cudaSuccess) error = body(Engine::get());
  if (error != cudaSuccess) thread_state().last_error = error;
  return error;
}

// Begins a call that queues work on a stream of the current context, or of any one.
cudaError_t prepare(Engine& engine, cudaStream_t handle, bool current_context,
                    std::shared_ptr<CUstream_st>* stream);

}  // namespace ga::sim

struct CUstream_st {
  int device;
  unsigned flags;
  bool legacy = false;
  bool destroyed = false;
  std::deque<ga::sim::Item> items = {};
  int64_t done = 0;
  CUctx_st* context =
      nullptr;       // that it was made in; NULL for a legacy stream, which is every context's
  int priority = 0;  // is told, and orders nothing

  int64_t end() const { return done + static_cast<int64_t>(items.size()); }
};

struct CUevent_st {
  CUctx_st* context;
  unsigned flags;
  ga::sim::Mark mark;  // without a stream if the event was never recorded
  std::shared_ptr<ga::sim::Capture> capture;
  ga::sim::Clock clock;
};

struct CUgraph_st {
  std::vector<std::shared_ptr<const ga::sim::Work>> works;
};

struct CUgraphExec_st : CUgraph_st {};
