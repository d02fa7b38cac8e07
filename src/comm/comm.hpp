// SPDX-License-Identifier: Apache-2.0
// A communicator: one rank's end of a transport that moves blocks between ranks. It adds nothing up.
// Every transport is a ga_comm_table: of threads (local.cpp), of MPI or NCCL (mpi.cpp and nccl.cpp, side
// modules), or of the program.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>

#include "error.hpp"
#include "gradaccum/gradaccum.h"

namespace ga {

// A rank's end of a transport: its table, and who ends it.
struct Transport {
  ga_comm_table table;
  int32_t rank, ranks;
  std::function<void()> close;  // may be empty
  bool of_program;              // the functions run in the program's floating-point mode
  bool writes_late;             // after a failure, it may still write to what it was to receive
  std::function<int32_t()> poll = {};  // what has failed since, 0: nothing; may be empty
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
  // The first four are for arrays of a backend, which it keeps if may_write_late(); the others for any
  // memory. The second two only where the transport adds.
  void all_to_all(const char* what, const void* send, int64_t stride, void* recv, int64_t count,
                  int32_t dtype);
  void all_gather_arrays(const char* what, const void* send, void* recv, int64_t stride,
                         int64_t count, int32_t dtype);
  void all_reduce(const char* what, void* data, int64_t count, int32_t dtype, int32_t op);
  void reduce_scatter(const char* what, const void* send, void* recv, int64_t count, int32_t dtype,
                      int32_t op);
  void all_gather(const char* what, const void* send, void* recv, int64_t count, int32_t dtype);
  void broadcast(const char* what, void* data, int64_t count, int32_t dtype, int32_t root);
  void abort() noexcept;
  bool may_write_late() const { return has_failed() && transport_.writes_late; }
  bool has_failed() const { return failed_.load(std::memory_order_acquire); }
  bool adds() const { return transport_.table.all_reduce && transport_.table.reduce_scatter; }
  bool any_thread() const { return transport_.table.any_thread != 0; }
  // Throws the failure of a former call, if there was one.
  void check() const {
    if (has_failed()) throw *failure_;
  }

  // A context uses a communicator alone. take() throws GA_ERROR_INVALID_STATE if another one has it.
  void take();
  void give_back() noexcept { taken_.store(false); }

 private:
  template <class Call>
  void run(const char* what, Call&& call);
  char* lent(size_t bytes);

  const Transport transport_;
  std::optional<Error> failure_;
  std::atomic<bool> failed_{false};  // failure_ is there
  // What a transport that writes late works on in place of the caller's memory; left to it if it fails.
  std::unique_ptr<char[]> lent_;
  size_t lent_bytes_ = 0;
  std::atomic<bool> aborted_{false}, taken_{false};
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
