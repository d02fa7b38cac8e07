// SPDX-License-Identifier: Apache-2.0
// A communicator: one rank's end of a transport that moves blocks between ranks, and adds them up if the
// transport can (adds()).
// Every transport is a ga_comm_table: of threads (local.cpp), of MPI or NCCL (mpi.cpp and nccl.cpp, side
// modules), or of the program.
#pragma once

#include <atomic>
#include <cmath>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>

#include "core/error.hpp"
#include "gradaccum/gradaccum.h"
#include "model/table.hpp"

namespace ga {

// A rank's end of a transport: its table, and who ends it.
struct Transport {
  ga_comm_table table;
  int32_t rank, ranks;
  std::function<void()> close;  // may be empty
  bool of_program;              // the functions run in the program's floating-point mode
  bool writes_late;             // after a failure, it may still write to what it was to receive
  // Of functions that queue their work: what has failed since, 0: nothing; and how many seconds the work
  // may wait for other ranks.
  std::function<int32_t()> poll = {};
  double timeout = HUGE_VAL;
  ga_comm_adder adder = GA_COMM_ADDER_LIBRARY;  // under GA_COMM_ADDER_AUTO and GA_COMM_WIRE_EXACT
  int32_t device = -1;  // the CUDA device whose memory it moves; -1: not known, or of the host
  // A context is about to make its first call (true), or makes no more (false), which the others may learn at
  // once. Every rank's contexts come in the same order. May be empty.
  std::function<void(bool)> attend = {};
  // Runs work(), which does not throw, and makes one exchange of its calls for arrays; fails as a function does.
  // Empty: every call is an exchange of its own.
  std::function<int32_t(std::function<void()> work)> group = {};
};

class Comm {
 public:
  explicit Comm(Transport transport) : transport_(std::move(transport)) {}
  ~Comm() {
    if (transport_.close) transport_.close();
  }
  Comm(const Comm&) = delete;
  Comm& operator=(const Comm&) = delete;

  // Throws GA_ERROR_INVALID_ARGUMENT, GA_ERROR_UNSUPPORTED or GA_ERROR_COMMUNICATION.
  static std::shared_ptr<Comm> make(const ga_comm_config& config);

  int32_t rank() const { return transport_.rank; }
  int32_t ranks() const { return transport_.ranks; }

  // As in ga_comm_table. what: what is exchanged, for the message of the GA_ERROR_COMMUNICATION that they
  // throw, now and at every later call.
  // The first five are for arrays of a backend, which it keeps if may_write_late(); the others for memory
  // of the host. all_reduce and reduce_scatter only where the transport adds.
  void all_to_all(const char* what, const void* send, int64_t stride, void* recv, int64_t count,
                  int32_t dtype);
  void all_gather_arrays(const char* what, const void* send, void* recv, int64_t stride,
                         int64_t count, int32_t dtype);
  void all_reduce(const char* what, void* data, int64_t count, int32_t dtype, int32_t op);
  void reduce_scatter(const char* what, const void* send, void* recv, int64_t count, int32_t dtype,
                      int32_t op);
  void broadcast_array(const char* what, void* data, int64_t count, int32_t dtype, int32_t root);
  // Runs work(), which makes calls for arrays, the same ones on every rank. If groups(), the calls become one
  // exchange, which begins when work() has returned, and of at most kMostTogether operations: NCCL took no more in a
  // group until 2.11.
  static constexpr size_t kMostTogether = 2048;
  void together(const char* what, const std::function<void()>& work);
  bool groups() const { return static_cast<bool>(transport_.group); }
  void all_gather(const char* what, const void* send, void* recv, int64_t count, int32_t dtype);
  void broadcast(const char* what, void* data, int64_t count, int32_t dtype, int32_t root);
  void abort() noexcept;
  bool may_write_late() const { return has_failed() && transport_.writes_late; }
  bool has_failed() const { return failed_.load(std::memory_order_acquire); }
  ga_comm_adder default_adder() const { return transport_.adder; }
  bool adds() const { return transport_.table.all_reduce && transport_.table.reduce_scatter; }
  bool any_thread() const { return transport_.table.any_thread != 0; }
  // Throws the failure of a former call, if there was one.
  void check() const {
    if (has_failed()) throw *failure_;
  }

  // A context uses a communicator alone. take() throws GA_ERROR_INVALID_STATE if another one has it.
  // device: the backend of a context on a device, whose arrays a transport of the host's memory gets by way
  // of the host, with a wait, and whose stream the others queue their work on; NULL: the CPU. ordinal: which
  // device of its kind.
  void take(Backend* device, int32_t ordinal);
  void give_back() noexcept;
  // Of the context that has it, before its first call.
  void attend() {
    if (transport_.attend) transport_.attend(true);
    attended_ = true;
  }
  // During a wait for work that the functions have queued: throws if it has failed, ga_comm_abort was called,
  // or the wait takes too long, in which case it ends the work of all ranks that wait.
  void watch(double seconds);
  // Whether the functions queue their work and return at once.
  bool on_stream() const { return transport_.table.on_stream != 0; }

 private:
  // Blocks of an array, each `bytes` long and `stride` bytes behind the one before.
  struct Blocks {
    const void* data;
    size_t count, bytes, stride;
  };
  template <class Call>
  void run(const char* what, Call&& call);
  [[noreturn]] void fail_with(const char* where, const char* what, int32_t result,
                              const std::string& thrown = "");
  template <class Call>
  void run_on(const char* what, const Blocks& send, const Blocks& recv, int64_t stride,
              int64_t count, Call&& call);
  char* lent(size_t bytes);
  void put(char* to, const void* from, size_t bytes);
  void get(void* to, const char* from, size_t bytes);

  const Transport transport_;
  std::optional<Error> failure_;
  std::atomic<bool> failed_{false};  // failure_ is there
  // What a transport that writes late works on in place of the caller's memory; left to it if it fails.
  std::unique_ptr<char[]> lent_;
  size_t lent_bytes_ = 0;
  Backend* device_ = nullptr;
  Buffer on_device_;  // what the host's memory travels in where the transport is one of a device
  std::atomic<bool> aborted_{false}, taken_{false};
  bool attended_ = false;
};

ga_comm_config default_comm_config(int32_t kind);
ga_comm_options default_comm_options();
void check_comm_options(const ga_comm_options& options);

// Fills out, GA_COMM_ID_SIZE bytes. Throws GA_ERROR_INVALID_ARGUMENT for a kind without ids.
void make_unique_id(int32_t kind, void* out);

// local.cpp
void make_local_id(void* out);
Transport join_local(const ga_comm_config& config);

}  // namespace ga
