// SPDX-License-Identifier: Apache-2.0
// libgradaccum_nccl.so: ranks with a GPU each, connected by NCCL. It is built without NCCL and without CUDA:
// the part of NCCL's ABI that it uses is declared here, and libnccl.so.2 is opened when a rank first joins.
// Communicators that it makes are non-blocking: a call that has to wait for other ranks returns
// ncclInProgress and is asked about until a deadline.
#include <dlfcn.h>
#include <sched.h>

#include <atomic>
#include <chrono>
#include <climits>
#include <cstdarg>
#include <cstdio>
#include <cstring>
#include <memory>
#include <mutex>
#include <new>
#include <thread>

#include "ranks/comm/nccl_module.h"

namespace {

using Clock = std::chrono::steady_clock;

// ---- The ABI of NCCL 2 -----------------------------------------------------------------------------

constexpr char kLibrary[] = "libnccl.so.2";
constexpr int kOldest = 21800;  // 2.18, which came with CUDA 12.1

struct NcclComm;  // ncclComm_t points to one
using Stream = void*;

struct UniqueId {
  char bytes[GA_COMM_ID_SIZE];
};

// The beginning of ncclConfig_t, as NCCL 2.14 knew it. NCCL takes defaults for what came later.
struct Config {
  size_t size = sizeof(Config);
  unsigned magic = 0xcafebeef, version = 21400;
  int blocking = 0;
  int cga_cluster_size = INT_MIN;  // not set
};
static_assert(sizeof(Config) == 24);

enum Result { kSuccess = 0, kInProgress = 7 };
enum Type { kInt32 = 2, kInt64 = 4, kFloat16 = 6, kFloat32 = 7, kFloat64 = 8, kBfloat16 = 9 };
enum Op { kSum = 0, kMax = 2 };

struct Nccl {
  int (*get_version)(int* version);
  int (*get_unique_id)(UniqueId* out);
  int (*comm_init_rank_config)(NcclComm** out, int ranks, UniqueId id, int rank, Config* config);
  int (*comm_count)(const NcclComm* comm, int* ranks);
  int (*comm_user_rank)(const NcclComm* comm, int* rank);
  int (*comm_cu_device)(const NcclComm* comm, int* device);
  int (*comm_get_async_error)(NcclComm* comm, int* result);
  int (*comm_finalize)(NcclComm* comm);
  int (*comm_destroy)(NcclComm* comm);
  int (*comm_abort)(NcclComm* comm);
  const char* (*get_error_string)(int result);
  const char* (*get_last_error)(NcclComm* comm);
  int (*group_start)();
  int (*group_end)();
  int (*send)(const void* data, size_t count, int type, int peer, NcclComm* comm, Stream stream);
  int (*recv)(void* data, size_t count, int type, int peer, NcclComm* comm, Stream stream);
  int (*broadcast)(const void* send, void* recv, size_t count, int type, int root, NcclComm* comm,
                   Stream stream);
  int (*all_gather)(const void* send, void* recv, size_t count, int type, NcclComm* comm,
                    Stream stream);
  int (*all_reduce)(const void* send, void* recv, size_t count, int type, int op, NcclComm* comm,
                    Stream stream);
  int (*reduce_scatter)(const void* send, void* recv, size_t count, int type, int op,
                        NcclComm* comm, Stream stream);
};

struct Refusal {
  char* text;
  size_t size;

  ga_status operator()(ga_status status, const char* format, ...) const
      __attribute__((format(printf, 3, 4))) {
    va_list arguments;
    va_start(arguments, format);
    std::vsnprintf(text, size, format, arguments);
    va_end(arguments);
    return status;
  }
};

ga_status find_functions(void* library, Nccl* out, const Refusal& refuse) {
  const char* missing = nullptr;
  const auto find = [&](const char* name, auto& function) {
    void* const found = dlsym(library, name);
    if (!found && !missing) missing = name;
    std::memcpy(&function, &found, sizeof function);
  };
  Nccl& n = *out;
  find("ncclGetVersion", n.get_version);
  int version = 0;
  if (n.get_version && n.get_version(&version) == kSuccess && version < kOldest) {
    const int unit = version < 10000 ? 1000 : 10000;  // of the major version; 2.9 changed it
    return refuse(GA_ERROR_UNSUPPORTED, "%s is NCCL %d.%d.%d, but at least %d.%d is needed",
                  kLibrary, version / unit, version % unit / 100, version % 100, kOldest / 10000,
                  kOldest % 10000 / 100);
  }
  find("ncclGetUniqueId", n.get_unique_id);
  find("ncclCommInitRankConfig", n.comm_init_rank_config);
  find("ncclCommCount", n.comm_count);
  find("ncclCommUserRank", n.comm_user_rank);
  find("ncclCommCuDevice", n.comm_cu_device);
  find("ncclCommGetAsyncError", n.comm_get_async_error);
  find("ncclCommFinalize", n.comm_finalize);
  find("ncclCommDestroy", n.comm_destroy);
  find("ncclCommAbort", n.comm_abort);
  find("ncclGetErrorString", n.get_error_string);
  find("ncclGetLastError", n.get_last_error);
  find("ncclGroupStart", n.group_start);
  find("ncclGroupEnd", n.group_end);
  find("ncclSend", n.send);
  find("ncclRecv", n.recv);
  find("ncclBroadcast", n.broadcast);
  find("ncclAllGather", n.all_gather);
  find("ncclAllReduce", n.all_reduce);
  find("ncclReduceScatter", n.reduce_scatter);
  if (missing) return refuse(GA_ERROR_UNSUPPORTED, "%s lacks the function %s", kLibrary, missing);
  return GA_OK;
}

// Finds NCCL, once. of_program: a communicator of the program's is to be used, so it must be the NCCL that
// the program has loaded.
ga_status bind(bool of_program, const Nccl** out, const Refusal& refuse) {
  static std::mutex mutex;
  static Nccl nccl;
  static bool bound = false;
  const std::lock_guard<std::mutex> lock(mutex);
  *out = &nccl;
  if (bound) return GA_OK;
  void* library = dlopen(kLibrary, RTLD_NOW | RTLD_NOLOAD);
  if (!library && of_program)
    return refuse(
        GA_ERROR_UNSUPPORTED,
        "nccl_comm was given, but this process has not loaded %s: the program uses another "
        "NCCL than the library would",
        kLibrary);
  if (!library) library = dlopen(kLibrary, RTLD_NOW | RTLD_LOCAL);
  if (!library) {
    const char* const text = dlerror();
    return refuse(GA_ERROR_UNSUPPORTED, "%s could not be loaded: %s", kLibrary,
                  text ? text : "the loader gave no reason");
  }
  const ga_status status = find_functions(library, &nccl, refuse);
  bound = status == GA_OK;
  if (!bound) dlclose(library);
  return status;
}

// ---- A rank ----------------------------------------------------------------------------------------

constexpr int32_t kLate = -1, kAborted = -2;  // besides the results of NCCL

struct End {
  const Nccl* nccl = nullptr;
  bool of_program = false;
  int rank = 0, ranks = 0, device = -1;
  double timeout = 0;
  std::mutex mutex;                      // held while a function of NCCL uses comm
  std::atomic<NcclComm*> comm{nullptr};  // NULL after ncclCommAbort
  std::atomic<int32_t> failure{0};       // the first one
  char reason[512] = "";                 // of a failure that NCCL returned
  char text[640] = "";                   // of error_text
};

// The group that this thread is making.
struct Group {
  const End* of = nullptr;
  int code = kSuccess;  // of the first call that failed
};
thread_local Group open_group;

void set_failure(End& end, int32_t failure) {
  int32_t none = 0;
  end.failure.compare_exchange_strong(none, failure);
}

// Ends the communicator, and with it what is left of its work on streams; the first time.
void end_comm(End& end) {
  if (NcclComm* const comm = end.comm.exchange(nullptr)) end.nccl->comm_abort(comm);
}

// The mutex is held.
int32_t fail(End& end, int32_t code) {
  NcclComm* const comm = end.comm.load();
  if (code > 0 && comm) {
    const char* const last = end.nccl->get_last_error(comm);
    std::snprintf(end.reason, sizeof end.reason, "NCCL returned %d, %s%s%s", code,
                  end.nccl->get_error_string(code), last && *last ? ": " : "", last ? last : "");
  }
  set_failure(end, code);
  end_comm(end);
  return end.failure.load();
}

// Waits until what a call has begun is done, with the mutex held but for pauses.
int32_t settle(End& end, std::unique_lock<std::mutex>& lock, int32_t code) {
  const auto start = Clock::now();
  while (code == kInProgress) {
    const std::chrono::duration<double> waited = Clock::now() - start;
    if (waited.count() > end.timeout) return kLate;
    lock.unlock();
    if (waited < std::chrono::milliseconds(1)) {
      sched_yield();
    } else {
      std::this_thread::sleep_for(std::chrono::microseconds(100));
    }
    lock.lock();
    NcclComm* const comm = end.comm.load();
    if (!comm) return end.failure.load();
    int state = kSuccess;
    code = end.nccl->comm_get_async_error(comm, &state);
    if (code == kSuccess) code = state;
  }
  return code;
}

// Runs call(nccl, comm), which returns a result of NCCL.
template <class Call>
int32_t run(void* user, Call&& call) {
  End& end = *static_cast<End*>(user);
  if (open_group.of == &end) {  // group() holds the mutex, and returns what fails here
    NcclComm* const comm = end.comm.load();
    if (!comm || open_group.code != kSuccess) return 0;
    const int code = call(*end.nccl, comm);
    if (code != kInProgress) open_group.code = code;  // which the end of the group returns too
    return 0;
  }
  std::unique_lock<std::mutex> lock(end.mutex);
  NcclComm* const comm = end.comm.load();
  if (!comm) return end.failure.load();
  const int32_t code = settle(end, lock, call(*end.nccl, comm));
  // While NCCL blocked the call, another thread may have ended the communicator.
  if (!end.comm.load()) return end.failure.load();
  return code == kSuccess ? 0 : fail(end, code);
}

// Runs calls(), which returns a result of NCCL, as one operation of NCCL.
template <class Calls>
int as_group(const Nccl& nccl, Calls&& calls) {
  if (const int code = nccl.group_start()) return code;
  const int code = calls();
  const int ended = nccl.group_end();
  return code == kSuccess ? ended : code;
}

// Runs call(q) for each rank q, as one operation of NCCL.
template <class Call>
int for_each_rank(const Nccl& nccl, int ranks, Call&& call) {
  return as_group(nccl, [&] {
    int code = kSuccess;
    for (int q = 0; q < ranks && code == kSuccess; ++q) {
      code = call(q);
      if (code == kInProgress) code = kSuccess;  // the end of the group returns it too
    }
    return code;
  });
}

int type_of(ga_dtype dtype) {
  switch (dtype) {
    case GA_F64:
      return kFloat64;
    case GA_F16:
      return kFloat16;
    case GA_BF16:
      return kBfloat16;
    case GA_I32:
      return kInt32;
    case GA_I64:
      return kInt64;
    default:
      return kFloat32;
  }
}

int op_of(ga_comm_op op) { return op == GA_COMM_MAX ? kMax : kSum; }

int64_t size_of(ga_dtype dtype) {
  return dtype == GA_F64 || dtype == GA_I64 ? 8 : dtype == GA_F16 || dtype == GA_BF16 ? 2 : 4;
}

const char* at_element(const void* data, int64_t offset, ga_dtype dtype) {
  return static_cast<const char*>(data) + offset * size_of(dtype);
}
char* at_element(void* data, int64_t offset, ga_dtype dtype) {
  return static_cast<char*>(data) + offset * size_of(dtype);
}

// ---- The table -------------------------------------------------------------------------------------

int32_t all_to_all(void* user, const void* send, int64_t stride, void* recv, int64_t count,
                   ga_dtype dtype, void* stream) {
  return run(user, [&](const Nccl& nccl, NcclComm* comm) {
    const auto n = static_cast<size_t>(count);
    const int type = type_of(dtype);
    return for_each_rank(nccl, static_cast<End*>(user)->ranks, [&](int q) {
      const int code = nccl.send(at_element(send, q * stride, dtype), n, type, q, comm, stream);
      if (code != kSuccess && code != kInProgress) return code;
      return nccl.recv(at_element(recv, q * count, dtype), n, type, q, comm, stream);
    });
  });
}

int32_t all_gather(void* user, const void* send, void* recv, int64_t stride, int64_t count,
                   ga_dtype dtype, void* stream) {
  return run(user, [&](const Nccl& nccl, NcclComm* comm) {
    const auto n = static_cast<size_t>(count);
    const int type = type_of(dtype);
    if (stride == count) return nccl.all_gather(send, recv, n, type, comm, stream);
    return for_each_rank(nccl, static_cast<End*>(user)->ranks, [&](int q) {
      return nccl.broadcast(send, at_element(recv, q * stride, dtype), n, type, q, comm, stream);
    });
  });
}

int32_t broadcast(void* user, void* data, int64_t count, ga_dtype dtype, int32_t root,
                  void* stream) {
  return run(user, [&](const Nccl& nccl, NcclComm* comm) {
    return nccl.broadcast(data, data, static_cast<size_t>(count), type_of(dtype), root, comm,
                          stream);
  });
}

int32_t all_reduce(void* user, void* data, int64_t count, ga_dtype dtype, ga_comm_op op,
                   void* stream) {
  return run(user, [&](const Nccl& nccl, NcclComm* comm) {
    return nccl.all_reduce(data, data, static_cast<size_t>(count), type_of(dtype), op_of(op), comm,
                           stream);
  });
}

int32_t reduce_scatter(void* user, const void* send, void* recv, int64_t count, ga_dtype dtype,
                       ga_comm_op op, void* stream) {
  return run(user, [&](const Nccl& nccl, NcclComm* comm) {
    return nccl.reduce_scatter(send, recv, static_cast<size_t>(count), type_of(dtype), op_of(op),
                               comm, stream);
  });
}

void abort(void* user) {
  End& end = *static_cast<End*>(user);
  set_failure(end, kAborted);
  // A call on a blocking communicator of the program's holds the mutex while NCCL waits in it, and only
  // ncclCommAbort, which NCCL allows there, makes it return.
  std::unique_lock<std::mutex> lock(end.mutex, std::defer_lock);
  for (int tries = 0; tries < 1000 && !lock.try_lock(); ++tries)
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  end_comm(end);
}

const char* error_text(void* user, int32_t failure) {
  End& end = *static_cast<End*>(user);
  const std::lock_guard<std::mutex> lock(end.mutex);
  if (failure == kLate) {
    std::snprintf(end.text, sizeof end.text, "rank %d waited %g s for the other ranks", end.rank,
                  end.timeout);
  } else if (failure == kAborted) {
    std::snprintf(end.text, sizeof end.text, "ga_comm_abort was called");
  } else {
    std::snprintf(end.text, sizeof end.text, "%s", end.reason);
  }
  return end.text;
}

// ---- The module ------------------------------------------------------------------------------------

int32_t poll(void* user) {
  return run(user, [](const Nccl& nccl, NcclComm* comm) {
    int state = kSuccess;
    const int code = nccl.comm_get_async_error(comm, &state);
    return code != kSuccess ? code : state == kInProgress ? kSuccess : state;
  });
}

int32_t group(void* user, void (*body)(void*), void* arg) {
  return run(user, [&](const Nccl& nccl, NcclComm*) {
    return as_group(nccl, [&] {
      open_group = {static_cast<End*>(user), kSuccess};
      body(arg);
      const int code = open_group.code;
      open_group = {};
      return code;
    });
  });
}

ga_status unique_id(void* out, char* error, size_t error_size) {
  const Refusal refuse{error, error_size};
  const Nccl* nccl = nullptr;
  if (const ga_status status = bind(false, &nccl, refuse)) return status;
  UniqueId id;
  if (const int code = nccl->get_unique_id(&id))
    return refuse(GA_ERROR_COMMUNICATION, "ncclGetUniqueId returned %d, %s: %s", code,
                  nccl->get_error_string(code), nccl->get_last_error(nullptr));
  std::memcpy(out, id.bytes, sizeof id.bytes);
  return GA_OK;
}

// Makes a communicator, or finds out about the program's, and waits until all ranks have joined it.
int32_t connect(End& end, const ga_comm_config& config) {
  std::unique_lock<std::mutex> lock(end.mutex);
  const Nccl& nccl = *end.nccl;
  NcclComm* comm = static_cast<NcclComm*>(config.nccl_comm);
  int code = kSuccess, state = kSuccess;
  if (comm) {
    end.comm.store(comm);
    code = nccl.comm_get_async_error(comm, &state);
    if (code == kSuccess) code = state;
  } else {
    UniqueId id;
    std::memcpy(id.bytes, config.id, sizeof id.bytes);
    Config options;
    code = nccl.comm_init_rank_config(&comm, end.ranks, id, end.rank, &options);
    end.comm.store(comm);
  }
  code = settle(end, lock, code);
  if (code == kSuccess && end.of_program) code = nccl.comm_count(comm, &end.ranks);
  if (code == kSuccess && end.of_program) code = nccl.comm_user_rank(comm, &end.rank);
  if (code == kSuccess) code = nccl.comm_cu_device(comm, &end.device);
  if (code == kSuccess) return 0;
  if (!end.of_program && comm) return fail(end, code);
  // Nothing to end: there is no communicator, or it stays the program's.
  std::snprintf(end.reason, sizeof end.reason, "NCCL returned %d, %s: %s", code,
                nccl.get_error_string(code), nccl.get_last_error(nullptr));
  return code;
}

ga_status join(const ga_comm_config* config, ga_nccl_end* out, char* error, size_t error_size) {
  const Refusal refuse{error, error_size};
  const bool of_program = config->nccl_comm != nullptr;
  const Nccl* nccl = nullptr;
  if (const ga_status status = bind(of_program, &nccl, refuse)) return status;
  std::unique_ptr<End> end(new (std::nothrow) End);
  if (!end) return refuse(GA_ERROR_OUT_OF_MEMORY, "memory ran out");
  end->nccl = nccl, end->of_program = of_program, end->timeout = config->timeout;
  end->rank = config->rank, end->ranks = config->ranks;
  if (const int32_t code = connect(*end, *config))
    return refuse(GA_ERROR_COMMUNICATION, "%s", error_text(end.get(), code));
  out->table = {sizeof(ga_comm_table),
                end.get(),
                all_to_all,
                all_gather,
                broadcast,
                abort,
                error_text,
                all_reduce,
                reduce_scatter,
                1,
                1};
  out->rank = end->rank;
  out->ranks = end->ranks;
  out->device = end->device;
  end.release();
  return GA_OK;
}

void leave(void* user) {
  const std::unique_ptr<End> end(static_cast<End*>(user));
  if (end->of_program) return;
  // Finalizing first leaves nothing for which ncclCommDestroy would wait. It may succeed at once, and the state of
  // the communicator is ncclInProgress until it has ended.
  const int32_t code = run(end.get(), [](const Nccl& nccl, NcclComm* comm) {
    const int begun = nccl.comm_finalize(comm);
    return begun == kSuccess ? kInProgress : begun;
  });
  if (code == 0) end->nccl->comm_destroy(end->comm.load());
}

constexpr ga_nccl_module kModule = {GA_NCCL_ABI, unique_id, join, poll, group, leave};

}  // namespace

extern "C" __attribute__((visibility("default"))) const void* ga_module_nccl(char* error,
                                                                             size_t error_size);
const void* ga_module_nccl(char*, size_t) { return &kModule; }
