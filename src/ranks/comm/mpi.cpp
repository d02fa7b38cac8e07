// SPDX-License-Identifier: Apache-2.0
// libgradaccum_mpi.so: ranks that are processes of an MPI program. MPI waits for ever for a rank that
// does not come, so every collective is a nonblocking one that is tested until a deadline.
//
// A rank that leaves says so: it sends every other one a few bytes, and does not wait until they are received.
// A rank that has to wait looks for them. They must not meet another communicator, which MPI might give the same
// number, so a communicator is freed only when all ranks have said that they are gone: by the next call that makes
// or ends one.
#include <mpi.h>
#include <sched.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <list>
#include <memory>
#include <mutex>
#include <new>
#include <thread>
#include <vector>

#include "ranks/comm/mpi_module.h"

namespace {

using Clock = std::chrono::steady_clock;

constexpr int32_t kLate = -1, kAborted = -2, kLeft = -3;
constexpr int kTag = 1;  // of farewells

// What a rank says when it makes no more calls.
enum Why : int64_t { kStays, kContextGone, kGone, kAborts };
struct Farewell {
  int64_t why;
  int64_t contexts;  // that it has had; under kContextGone alone, the next one makes calls again
  int64_t done;      // exchanges that it has completed
};
constexpr int kNumbers = sizeof(Farewell) / sizeof(int64_t);

struct Sent {
  Farewell farewell;
  MPI_Request request;
};

struct End {
  MPI_Comm comm = MPI_COMM_NULL;
  int rank = 0, ranks = 0;
  double timeout = 0;
  std::atomic<bool> aborted{false};
  bool failed = false;
  std::atomic<int64_t> contexts{0}, done{0};  // read by ga_comm_abort on another thread
  bool any_thread = false;                    // may call MPI
  std::atomic<std::thread::id> caller{std::this_thread::get_id()};
  std::mutex mutex;      // of what follows
  std::list<Sent> sent;  // where they stay, for MPI reads them
  bool told_of_abort = false;
  std::vector<Farewell> farewells;  // by rank
  int left = -1;                    // whom a call has not waited for
  char text[MPI_MAX_ERROR_STRING + 64] = "";
};

bool may_call_mpi(const End& end) {
  int over = 0;
  MPI_Finalized(&over);
  return !over && (end.any_thread || end.caller.load() == std::this_thread::get_id());
}

void say(End& end, Why why) {
  if (!may_call_mpi(end)) return;
  const std::lock_guard<std::mutex> lock(end.mutex);
  if (end.told_of_abort && why != kGone) return;
  end.told_of_abort = end.told_of_abort || why == kAborts;
  for (int q = 0; q < end.ranks; ++q) {
    if (q == end.rank) continue;
    end.sent.push_back({{why, end.contexts.load(), end.done.load()}, MPI_REQUEST_NULL});
    Sent& s = end.sent.back();
    MPI_Isend(&s.farewell, kNumbers, MPI_INT64_T, q, kTag, end.comm, &s.request);
    int done = 0;
    MPI_Test(&s.request, &done, MPI_STATUS_IGNORE);
  }
}

void hear(End& end) {
  const std::lock_guard<std::mutex> lock(end.mutex);
  for (;;) {
    int there = 0;
    MPI_Status status;
    if (MPI_Iprobe(MPI_ANY_SOURCE, kTag, end.comm, &there, &status) != MPI_SUCCESS || !there)
      return;
    Farewell f = {};
    const int from = status.MPI_SOURCE;
    MPI_Recv(&f, kNumbers, MPI_INT64_T, from, kTag, end.comm, MPI_STATUS_IGNORE);
    end.farewells[static_cast<size_t>(from)] = f;
  }
}

// Whether a rank will never make its part of the exchange that this one waits for.
bool is_left_alone(End& end) {
  hear(end);
  for (int q = 0; q < end.ranks; ++q) {
    const Farewell& f = end.farewells[static_cast<size_t>(q)];
    const bool gone = f.why == kContextGone ? f.contexts >= end.contexts : f.why != kStays;
    if (!gone || f.done > end.done) continue;
    end.left = q;
    return true;
  }
  return false;
}

// Waits for a request, which is left behind if the others do not come in time.
int32_t wait(End& end, MPI_Request request, Clock::time_point start) {
  for (int64_t turns = 0;; ++turns) {
    int done = 0;
    if (const int code = MPI_Test(&request, &done, MPI_STATUS_IGNORE)) return code;
    if (done) return MPI_SUCCESS;
    if (end.aborted.load(std::memory_order_relaxed)) {
      say(end, kAborts);
      return kAborted;
    }
    if (turns < 1000) continue;
    sched_yield();  // another rank may need this processor to get on
    if (turns % 64 == 0 && !end.farewells.empty() && is_left_alone(end)) return kLeft;
    if (std::chrono::duration<double>(Clock::now() - start).count() > end.timeout) return kLate;
  }
}

MPI_Datatype type_of(ga_dtype dtype) {
  switch (dtype) {
    case GA_F64:
    case GA_I64:
      return MPI_INT64_T;
    case GA_F16:
    case GA_BF16:
      return MPI_INT16_T;
    default:
      return MPI_INT32_T;
  }
}

int64_t size_of(ga_dtype dtype) {
  return dtype == GA_F64 || dtype == GA_I64 ? 8 : dtype == GA_F16 || dtype == GA_BF16 ? 2 : 4;
}

// Collectives take counts of type int, and transports have had trouble with blocks of 2 GiB: longer
// blocks go in slices. begin(offset in elements, count, request) starts one.
template <class Begin>
int32_t in_slices(End& end, int64_t count, ga_dtype dtype, Begin&& begin) {
  constexpr int64_t kMost = int64_t{1} << 28;  // bytes
  const auto start = Clock::now();
  end.caller.store(std::this_thread::get_id());
  const int64_t slice = kMost / size_of(dtype);
  for (int64_t at = 0; at < count; at += slice) {
    MPI_Request request = MPI_REQUEST_NULL;
    int32_t code = begin(at, static_cast<int>(std::min(slice, count - at)), &request);
    if (code == MPI_SUCCESS) code = wait(end, request, start);
    if (code == MPI_SUCCESS) {
      ++end.done;
      continue;
    }
    end.failed = true;
    return code;
  }
  return MPI_SUCCESS;
}

// The type and the count by which MPI finds blocks of `block` elements a stride apart. A gap takes a type of
// the whole block whose extent is the stride.
class Blocks {
 public:
  Blocks(ga_dtype dtype, int block, int64_t stride)
      : type_(type_of(dtype)), count_(block), made_(block != stride) {
    if (!made_) return;
    count_ = 1;
    MPI_Datatype whole = MPI_DATATYPE_NULL;
    MPI_Type_contiguous(block, type_of(dtype), &whole);
    MPI_Type_create_resized(whole, 0, stride * size_of(dtype), &type_);
    MPI_Type_commit(&type_);
    MPI_Type_free(&whole);
  }
  ~Blocks() {
    if (made_) MPI_Type_free(&type_);
  }
  Blocks(const Blocks&) = delete;
  Blocks& operator=(const Blocks&) = delete;
  MPI_Datatype type() const { return type_; }
  int count() const { return count_; }

 private:
  MPI_Datatype type_;
  int count_;
  const bool made_;
};

const char* at_element(const void* data, int64_t offset, ga_dtype dtype) {
  return static_cast<const char*>(data) + offset * size_of(dtype);
}
char* at_element(void* data, int64_t offset, ga_dtype dtype) {
  return static_cast<char*>(data) + offset * size_of(dtype);
}

int32_t all_to_all(void* user, const void* send, int64_t stride, void* recv, int64_t count,
                   ga_dtype dtype, void*) {
  End& end = *static_cast<End*>(user);
  return in_slices(end, count, dtype, [&](int64_t at, int n, MPI_Request* request) {
    const Blocks from(dtype, n, stride), to(dtype, n, count);
    return MPI_Ialltoall(at_element(send, at, dtype), from.count(), from.type(),
                         at_element(recv, at, dtype), to.count(), to.type(), end.comm, request);
  });
}

int32_t all_gather(void* user, const void* send, void* recv, int64_t stride, int64_t count,
                   ga_dtype dtype, void*) {
  End& end = *static_cast<End*>(user);
  const void* const own = at_element(recv, end.rank * stride, dtype);
  return in_slices(end, count, dtype, [&](int64_t at, int n, MPI_Request* request) {
    const void* const from = send == own ? MPI_IN_PLACE : at_element(send, at, dtype);
    const Blocks to(dtype, n, stride);
    return MPI_Iallgather(from, n, type_of(dtype), at_element(recv, at, dtype), to.count(),
                          to.type(), end.comm, request);
  });
}

int32_t broadcast(void* user, void* data, int64_t count, ga_dtype dtype, int32_t root, void*) {
  End& end = *static_cast<End*>(user);
  return in_slices(end, count, dtype, [&](int64_t at, int n, MPI_Request* request) {
    return MPI_Ibcast(at_element(data, at, dtype), n, type_of(dtype), root, end.comm, request);
  });
}

MPI_Datatype number_of(ga_dtype dtype) { return dtype == GA_F64 ? MPI_DOUBLE : MPI_FLOAT; }
MPI_Op op_of(ga_comm_op op) { return op == GA_COMM_MAX ? MPI_MAX : MPI_SUM; }

int32_t all_reduce(void* user, void* data, int64_t count, ga_dtype dtype, ga_comm_op op, void*) {
  End& end = *static_cast<End*>(user);
  return in_slices(end, count, dtype, [&](int64_t at, int n, MPI_Request* request) {
    return MPI_Iallreduce(MPI_IN_PLACE, at_element(data, at, dtype), n, number_of(dtype), op_of(op),
                          end.comm, request);
  });
}

// MPI finds no blocks a stride apart here, so a block is not cut into slices: the library's have at most
// 8 MiB.
int32_t reduce_scatter(void* user, const void* send, void* recv, int64_t count, ga_dtype dtype,
                       ga_comm_op op, void*) {
  End& end = *static_cast<End*>(user);
  if (count > (int64_t{1} << 28) / size_of(dtype) / end.ranks) return MPI_ERR_COUNT;
  return in_slices(end, count, dtype, [&](int64_t, int n, MPI_Request* request) {
    return MPI_Ireduce_scatter_block(send, recv, n, number_of(dtype), op_of(op), end.comm, request);
  });
}

void abort(void* user) {
  End& end = *static_cast<End*>(user);
  end.aborted.store(true);
  say(end,
      kAborts);  // where this thread may call MPI; else the one that waits does, or a farewell follows
}

void attend(void* user, int32_t comes) {
  End& end = *static_cast<End*>(user);
  if (comes)
    ++end.contexts;
  else
    say(end, kContextGone);
}

// Ends whose ranks have left, but not all of the others.
struct Leaving {
  std::mutex mutex;
  std::list<std::unique_ptr<End>> ends;
};
Leaving& leaving() {
  static Leaving* const all = new Leaving;  // never freed: MPI may still read what was sent
  return *all;
}

// Whether nothing more comes over a communicator, nor is on its way.
bool is_over(End& end) {
  hear(end);
  const std::lock_guard<std::mutex> lock(end.mutex);
  for (int q = 0; q < end.ranks; ++q)
    if (q != end.rank && end.farewells[static_cast<size_t>(q)].why != kGone) return false;
  for (Sent& s : end.sent) {
    int done = 0;
    MPI_Test(&s.request, &done, MPI_STATUS_IGNORE);
    if (!done) return false;
  }
  return true;
}

// Not those in which MPI may still work on an exchange.
void free_those_that_are_over() {
  Leaving& all = leaving();
  const std::lock_guard<std::mutex> lock(all.mutex);
  for (auto at = all.ends.begin(); at != all.ends.end();) {
    End& end = **at;
    const bool over = !end.failed && may_call_mpi(end) && is_over(end);
    if (over) MPI_Comm_free(&end.comm);
    at = over ? all.ends.erase(at) : std::next(at);
  }
}

const char* error_text(void* user, int32_t failure) {
  End& end = *static_cast<End*>(user);
  if (failure == kLate) {
    std::snprintf(end.text, sizeof end.text, "rank %d waited %g s for the other ranks", end.rank,
                  end.timeout);
  } else if (failure == kAborted) {
    std::snprintf(end.text, sizeof end.text, "ga_comm_abort was called");
  } else if (failure == kLeft) {
    const int64_t why = end.farewells[static_cast<size_t>(end.left)].why;
    if (why == kAborts)
      std::snprintf(end.text, sizeof end.text, "ga_comm_abort was called on rank %d", end.left);
    else
      std::snprintf(end.text, sizeof end.text, "rank %d has left: its %s", end.left,
                    why == kGone ? "ga_comm and its context were destroyed"
                                 : "context was destroyed or given another communicator");
  } else {
    int length = 0;
    if (MPI_Error_string(failure, end.text, &length) != MPI_SUCCESS)
      std::snprintf(end.text, sizeof end.text, "MPI returned an unknown error");
  }
  return end.text;
}

ga_status join(int32_t comm, double timeout, ga_mpi_end* out, char* error, size_t error_size) {
  const auto refuse = [&](ga_status status, const char* why) {
    std::snprintf(error, error_size, "%s", why);
    return status;
  };
  int running = 0, over = 0;
  MPI_Initialized(&running);
  MPI_Finalized(&over);
  if (!running || over)
    return refuse(GA_ERROR_INVALID_STATE, over ? "MPI_Finalize has been called"
                                               : "MPI_Init has not been called in this process");
  const MPI_Comm given = MPI_Comm_f2c(comm);
  int rank = 0, ranks = 0;
  if (given == MPI_COMM_NULL)
    return refuse(GA_ERROR_INVALID_ARGUMENT,
                  "mpi_comm is MPI_COMM_NULL; MPI_Comm_c2f gives the number of a communicator");
  MPI_Comm_rank(given, &rank);
  MPI_Comm_size(given, &ranks);
  free_those_that_are_over();
  End* const end = new (std::nothrow) End;
  if (!end) return refuse(GA_ERROR_OUT_OF_MEMORY, "memory ran out");
  end->rank = rank, end->ranks = ranks, end->timeout = timeout;
  MPI_Request request = MPI_REQUEST_NULL;
  int32_t code = MPI_Comm_idup(given, &end->comm, &request);
  if (code == MPI_SUCCESS) code = wait(*end, request, Clock::now());
  if (code != MPI_SUCCESS) {
    std::snprintf(error, error_size, "the communicator could not be duplicated: %s",
                  error_text(end, code));
    if (code != kLate) delete end;  // else MPI may still write to it
    return GA_ERROR_COMMUNICATION;
  }
  MPI_Comm_set_errhandler(end->comm, MPI_ERRORS_RETURN);
  int threads = MPI_THREAD_SINGLE;
  MPI_Query_thread(&threads);
  end->any_thread = threads == MPI_THREAD_MULTIPLE;
  try {
    end->farewells.resize(static_cast<size_t>(ranks));
  } catch (const std::bad_alloc&) {
    MPI_Comm_free(&end->comm);
    delete end;
    return refuse(GA_ERROR_OUT_OF_MEMORY, "memory ran out");
  }
  out->table = {sizeof(ga_comm_table),
                end,
                all_to_all,
                all_gather,
                broadcast,
                abort,
                error_text,
                all_reduce,
                reduce_scatter,
                end->any_thread,
                0};
  out->rank = rank;
  out->ranks = ranks;
  return GA_OK;
}

void leave(void* user) {
  std::unique_ptr<End> end(static_cast<End*>(user));
  say(*end, kGone);
  {
    Leaving& all = leaving();
    const std::lock_guard<std::mutex> lock(all.mutex);
    all.ends.push_back(std::move(end));
  }
  free_those_that_are_over();
}

constexpr ga_mpi_module kModule = {GA_MPI_ABI, join, leave, attend};

}  // namespace

extern "C" __attribute__((visibility("default"))) const void* ga_module_mpi(char* error,
                                                                            size_t error_size);
const void* ga_module_mpi(char* error, size_t error_size) {
  // Handles and constants differ between implementations; this function is alike in all.
  char text[MPI_MAX_LIBRARY_VERSION_STRING] = "";
  int length = 0;
  MPI_Get_library_version(text, &length);
#ifdef OPEN_MPI
  static const char kBuiltFor[] = "Open MPI";
#else
  static const char kBuiltFor[] = "MPICH";
#endif
  if (std::strncmp(text, kBuiltFor, sizeof kBuiltFor - 1) == 0) return &kModule;
  std::snprintf(error, error_size, "it was built for %s, but this process has loaded %.100s",
                kBuiltFor, text);
  return nullptr;
}
