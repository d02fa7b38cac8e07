// SPDX-License-Identifier: Apache-2.0
// The functions of nccl.h. All state is under the lock of the simulated CUDA.
#include "nccl.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <thread>
#include <vector>

#include "engine.hpp"

using namespace ga::sim;

namespace {

enum class What { kSend, kRecv, kBroadcast, kAllGather, kAllReduce, kReduceScatter };

struct Call {
  What what;
  const void* send;
  void* recv;
  size_t count;
  ncclDataType_t type;
  int other;  // a peer, a root or a ncclRedOp_t

  bool pairs() const { return what == What::kSend || what == What::kRecv; }
  bool matches(const Call& c) const {
    return what == c.what && count == c.count && type == c.type && other == c.other;
  }
};
// The calls of a group, or one.
using Calls = std::vector<Call>;

// A collective that some ranks' streams have come to.
struct Meeting {
  std::vector<std::shared_ptr<const Calls>> arrived;  // [ranks]; NULL: not yet
  bool hangs = false, done = false;
  int left = 0;  // ranks that have gone on
};

// Communicators made with the same id.
struct Clique {
  int ranks;
  std::vector<ncclComm*> members;  // [ranks]; NULL: has not joined, or is gone
  int joined = 0;
  std::map<int64_t, Meeting> meetings;  // by their number
};

}  // namespace

struct ncclComm {
  std::shared_ptr<Clique> clique;
  int rank, device;
  bool blocking;
  bool aborted = false, finalized = false;
  int64_t ended = 0;  // collectives
  Mark last = {};     // the end of the newest collective
  int64_t polls = 0;  // for which it is in progress; < 0: for ever
  std::function<void()> pending = {};
  ncclResult_t error = ncclSuccess;
};

namespace {

using Lock = std::lock_guard<std::recursive_mutex>;

struct State {
  std::map<ncclComm*, std::shared_ptr<ncclComm>> comms;
  std::map<std::string, std::shared_ptr<Clique>> cliques;  // by id
  int64_t ids = 0, collectives = 0;
  std::map<std::string, int64_t> calls;
  std::map<std::string, std::pair<int64_t, ncclResult_t>> failing;
  int64_t hang = 0;
  std::map<int, ncclResult_t> errors;
  int64_t polls = 0;
  int version = 0;
  std::string last_error;
};

State& state() {
  static auto* state = new State;
  return *state;
}

std::recursive_mutex& mutex() { return Engine::get().mutex; }

[[noreturn]] void die(const char* text) {
  std::fprintf(stderr, "fake NCCL: %s\n", text);
  std::abort();
}

ncclResult_t refuse(ncclResult_t result, const std::string& text) {
  state().last_error = text;
  return result;
}

// Begins every function: counts the call, and fails it if a test said so.
ncclResult_t begin(const char* function) {
  ++state().calls[function];
  const auto found = state().failing.find(function);
  if (found == state().failing.end() || --found->second.first > 0) return ncclSuccess;
  const ncclResult_t result = found->second.second;
  state().failing.erase(found);
  return refuse(result, std::string("a test had ") + function + " fail");
}

std::shared_ptr<ncclComm> alive(ncclComm_t comm) {
  const auto found = state().comms.find(comm);
  if (found == state().comms.end()) die("a call with a communicator that is destroyed or aborted");
  return found->second;
}

bool is_joining(const ncclComm& c) { return c.clique->joined < c.clique->ranks; }
bool has_work(const ncclComm& c) { return c.last.stream && c.last.stream->done < c.last.index; }
bool in_progress(const ncclComm& c) {
  return c.pending || (!c.blocking && (is_joining(c) || (c.finalized && has_work(c))));
}

// As begin(), for a function of a communicator.
ncclResult_t begin(const char* function, ncclComm_t comm) {
  const std::shared_ptr<ncclComm> c = alive(comm);
  if (const ncclResult_t failed = begin(function)) return failed;
  if (in_progress(*c))
    return refuse(ncclInvalidArgument, "the communicator's last operation is still in progress");
  return ncclSuccess;
}

// Does what a function is to do, now or while the communicator is asked about its progress.
ncclResult_t carry_out(ncclComm& c, std::function<void()> action) {
  if (c.blocking || state().polls == 0) {
    action();
    return ncclSuccess;
  }
  c.polls = state().polls;
  c.pending = std::move(action);
  return ncclInProgress;
}

// ---- Collectives -----------------------------------------------------------------------------------

size_t size_of(ncclDataType_t type) {
  constexpr size_t sizes[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2};
  return sizes[type];
}

Calls of_kind(const Calls& calls, bool pairs) {
  Calls result;
  std::copy_if(calls.begin(), calls.end(), std::back_inserter(result),
               [=](const Call& c) { return c.pairs() == pairs; });
  return result;
}

// What is sent to a peer, or received from it, in the order of the calls.
Calls between(const Calls& calls, What what, int peer) {
  Calls result;
  std::copy_if(calls.begin(), calls.end(), std::back_inserter(result),
               [=](const Call& c) { return c.what == what && c.other == peer; });
  return result;
}

bool agree(const std::vector<std::shared_ptr<const Calls>>& all) {
  const auto ranks = static_cast<int>(all.size());
  const Calls first = of_kind(*all[0], false);
  for (int r = 0; r < ranks; ++r) {
    const Calls own = of_kind(*all[static_cast<size_t>(r)], false);
    if (!std::equal(own.begin(), own.end(), first.begin(), first.end(),
                    [](const Call& a, const Call& b) { return a.matches(b); }))
      return false;
    for (int q = 0; q < ranks; ++q) {
      const Calls sent = between(*all[static_cast<size_t>(r)], What::kSend, q);
      const Calls received = between(*all[static_cast<size_t>(q)], What::kRecv, r);
      if (!std::equal(
              sent.begin(), sent.end(), received.begin(), received.end(),
              [](const Call& a, const Call& b) { return a.count == b.count && a.type == b.type; }))
        return false;
    }
  }
  return true;
}

using Bytes = std::vector<char>;

Bytes read(const void* from, size_t size) {
  const auto* bytes = static_cast<const char*>(from);
  return Bytes(bytes, bytes + size);
}

// As NCCL, takes the maximum of NaN and a number to be the number.
template <class Real>
void add(Bytes& into, const Bytes& bytes, int op) {
  for (size_t at = 0; at < into.size(); at += sizeof(Real)) {
    Real a, b;
    std::memcpy(&a, &into[at], sizeof a);
    std::memcpy(&b, &bytes[at], sizeof b);
    a = op == ncclMax ? std::fmax(a, b) : a + b;
    std::memcpy(&into[at], &a, sizeof a);
  }
}

// The sum or maximum of blocks of all ranks.
Bytes reduce(const std::vector<Bytes>& blocks, const Call& call) {
  Bytes sum = blocks.back();
  for (size_t r = blocks.size() - 1; r-- > 0;) {
    if (call.type == ncclFloat64) {
      add<double>(sum, blocks[r], call.other);
    } else {
      add<float>(sum, blocks[r], call.other);
    }
  }
  return sum;
}

// Reads everything before it writes anything, since outputs may be inputs.
void carry_out(const std::vector<std::shared_ptr<const Calls>>& all) {
  const size_t ranks = all.size();
  std::vector<std::pair<void*, Bytes>> writes;
  std::vector<Calls> calls;
  for (const auto& own : all) calls.push_back(of_kind(*own, false));
  for (size_t i = 0; i < calls[0].size(); ++i) {
    const Call& call = calls[0][i];
    const size_t size = call.count * size_of(call.type);
    const bool scatters = call.what == What::kReduceScatter;
    std::vector<Bytes> sent;
    for (size_t r = 0; r < ranks; ++r)
      sent.push_back(call.what == What::kBroadcast && static_cast<int>(r) != call.other
                         ? Bytes()
                         : read(calls[r][i].send, scatters ? size * ranks : size));
    const Bytes sum = call.what == What::kAllReduce || scatters ? reduce(sent, call) : Bytes();
    for (size_t r = 0; r < ranks; ++r) {
      auto* const out = static_cast<char*>(calls[r][i].recv);
      if (call.what == What::kBroadcast) {
        writes.emplace_back(out, sent[static_cast<size_t>(call.other)]);
      } else if (call.what == What::kAllGather) {
        for (size_t q = 0; q < ranks; ++q) writes.emplace_back(out + q * size, sent[q]);
      } else {
        const size_t at = scatters ? r * size : 0;
        writes.emplace_back(out, read(sum.data() + at, size));
      }
    }
  }
  for (size_t r = 0; r < ranks; ++r)
    for (size_t q = 0; q < ranks; ++q) {
      const Calls sent = between(*all[r], What::kSend, static_cast<int>(q));
      const Calls received = between(*all[q], What::kRecv, static_cast<int>(r));
      for (size_t i = 0; i < sent.size(); ++i)
        writes.emplace_back(received[i].recv,
                            read(sent[i].send, sent[i].count * size_of(sent[i].type)));
    }
  for (const auto& [to, bytes] : writes)
    if (!bytes.empty()) std::memcpy(to, bytes.data(), bytes.size());
}

// The collective that the rank's stream has come to.
Meeting& meeting(ncclComm& c) {
  const auto [found, fresh] = c.clique->meetings.try_emplace(c.ended);
  Meeting& m = found->second;
  if (fresh) {
    m.arrived.resize(static_cast<size_t>(c.clique->ranks));
    m.hangs = state().hang > 0 && --state().hang == 0;
  }
  return m;
}

bool ready(ncclComm& c, const std::shared_ptr<const Calls>& calls) {
  if (c.aborted) return true;
  Meeting& m = meeting(c);
  m.arrived[static_cast<size_t>(c.rank)] = calls;
  if (m.hangs || m.done) return m.done;
  for (const auto& other : m.arrived)
    if (!other) return false;
  if (agree(m.arrived)) return true;
  m.hangs = true;
  for (ncclComm* member : c.clique->members)
    if (member) member->error = ncclInvalidUsage;
  return false;
}

// The rank's part; the first of them does everybody's.
void take_part(ncclComm& c) {
  if (c.aborted) return;
  Meeting& m = meeting(c);
  if (!m.done) carry_out(m.arrived);
  m.done = true;
  if (++m.left == c.clique->ranks) c.clique->meetings.erase(c.ended);
  ++c.ended;
}

ncclResult_t queue(const std::shared_ptr<ncclComm>& c, Calls list, cudaStream_t handle) {
  Engine& engine = Engine::get();
  // NCCL works on the communicator's device, whatever the thread's is.
  ThreadState& thread = thread_state();
  const ThreadState before = thread;
  thread.context = &engine.devices[c->device].primary;
  std::shared_ptr<CUstream_st> stream;
  const cudaError_t error = prepare(engine, handle, true, &stream);
  thread = before;
  if (error != cudaSuccess) return refuse(ncclUnhandledCudaError, cudaGetErrorString(error));
  ++engine.counters.library_calls;
  ++engine.counters.by_library["nccl"];
  ++state().collectives;
  const auto calls = std::make_shared<const Calls>(std::move(list));
  std::vector<Mark> after;
  if (c->last.stream && c->last.stream != stream) after.push_back(c->last);
  const bool captured = engine.capture_of(stream.get()) != nullptr;
  engine.enqueue(
      stream,
      std::make_shared<const Work>(Work{Kind::kLibrary, kEveryDevice, [=] { take_part(*c); },
                                        [=] { return ready(*c, calls); }}),
      captured ? std::vector<Mark>() : after);
  if (!captured) c->last = engine.end_of(stream);
  return ncclSuccess;
}

// Groups of the calling thread.
struct Group {
  int depth = 0;
  std::map<ncclComm*, std::pair<Calls, cudaStream_t>> calls;
};
Group& group() {
  static thread_local Group group;
  return group;
}

ncclResult_t run(const std::shared_ptr<ncclComm>& c, const Calls& calls, cudaStream_t stream) {
  ncclResult_t queued = ncclSuccess;
  const ncclResult_t result = carry_out(*c, [=, &queued] {
    const ncclResult_t error = queue(c, calls, stream);
    if (!c->pending) {
      queued = error;
    } else if (error != ncclSuccess) {
      c->error = error;  // the call has returned
    }
  });
  return result == ncclSuccess ? queued : result;
}

bool is_memory(const ncclComm& c, const void* data, size_t size) {
  if (size == 0) return true;
  const Allocation* a = Engine::get().find(data);
  return a && Engine::get().valid(data, size) &&
         (a->memory != Memory::kDevice || a->device == c.device);
}

ncclResult_t call(const char* function, ncclComm_t comm, const Call& call, cudaStream_t stream) {
  const Lock lock(mutex());
  if (const ncclResult_t failed = begin(function, comm)) return failed;
  const std::shared_ptr<ncclComm> c = alive(comm);
  const size_t size = call.count * size_of(call.type);
  const size_t all = size * static_cast<size_t>(c->clique->ranks);
  const bool sends =
      call.what != What::kRecv && (call.what != What::kBroadcast || call.other == c->rank);
  if (sends && !is_memory(*c, call.send, call.what == What::kReduceScatter ? all : size))
    return refuse(ncclInvalidArgument, "what is sent is not memory of the device");
  if (call.what != What::kSend &&
      !is_memory(*c, call.recv, call.what == What::kAllGather ? all : size))
    return refuse(ncclInvalidArgument, "what is received into is not memory of the device");
  const bool adds = call.what == What::kAllReduce || call.what == What::kReduceScatter;
  if (adds && ((call.type != ncclFloat32 && call.type != ncclFloat64) ||
               (call.other != ncclSum && call.other != ncclMax)))
    return refuse(ncclInvalidArgument, "the fake cannot add this");
  if (!adds && call.what != What::kAllGather && (call.other < 0 || call.other >= c->clique->ranks))
    return refuse(ncclInvalidArgument, "no such rank");
  if (group().depth == 0) {
    if (call.pairs()) die("a single ncclSend or ncclRecv, which would need its peer's at once");
    return run(c, {call}, stream);
  }
  auto& [calls, its_stream] = group().calls[comm];
  if (!calls.empty() && its_stream != stream) die("a group on several streams");
  if (calls.size() == 2048) return refuse(ncclInvalidUsage, "more than 2048 calls in a group");
  calls.push_back(call);
  its_stream = stream;
  return ncclSuccess;
}

ncclResult_t join(const char* function, ncclComm_t* out, int ranks, const ncclUniqueId& id,
                  int rank, bool blocking) {
  std::unique_lock<std::recursive_mutex> lock(mutex());
  *out = nullptr;
  if (const ncclResult_t failed = begin(function)) return failed;
  if (entry_error() != cudaSuccess)
    return refuse(ncclUnhandledCudaError, cudaGetErrorString(entry_error()));
  need_context();
  if (ranks < 1 || rank < 0 || rank >= ranks) return refuse(ncclInvalidArgument, "no such rank");
  std::shared_ptr<Clique>& clique = state().cliques[std::string(id.internal, sizeof id.internal)];
  if (!clique) {
    clique = std::make_shared<Clique>();
    clique->ranks = ranks;
    clique->members.resize(static_cast<size_t>(ranks));
  }
  ncclComm*& member = clique->members[static_cast<size_t>(rank)];
  if (clique->ranks != ranks || clique->joined == ranks || member)
    return refuse(ncclInvalidUsage, "the id is another communicator's");
  const auto comm = std::make_shared<ncclComm>(ncclComm{clique, rank, current_device(), blocking});
  member = comm.get();
  state().comms[comm.get()] = comm;
  *out = comm.get();
  ++clique->joined;
  if (!blocking) {
    const ncclResult_t result = carry_out(*comm, [] {});
    return is_joining(*comm) ? ncclInProgress : result;
  }
  while (is_joining(*comm) && !comm->aborted) {
    lock.unlock();
    std::this_thread::sleep_for(std::chrono::microseconds(50));
    lock.lock();
  }
  return comm->aborted ? ncclRemoteError : ncclSuccess;
}

void forget(ncclComm& c) {
  c.clique->members[static_cast<size_t>(c.rank)] = nullptr;
  state().comms.erase(&c);
}

void abort_comm(const std::shared_ptr<ncclComm>& c) {
  c->aborted = true;
  c->pending = nullptr;
  for (auto& [number, meeting] : c->clique->meetings)
    if (number >= c->ended && !meeting.done) meeting.hangs = true;
  forget(*c);
}

}  // namespace

// ---- The functions of nccl.h -------------------------------------------------------------------------

ncclResult_t ncclGetVersion(int* version) {
  const Lock lock(mutex());
  if (const ncclResult_t failed = begin("ncclGetVersion")) return failed;
  const char* const text = std::getenv("GA_FAKE_NCCL_VERSION");
  *version = state().version > 0 ? state().version : text ? std::atoi(text) : 23000;
  return ncclSuccess;
}

ncclResult_t ncclGetUniqueId(ncclUniqueId* id) {
  const Lock lock(mutex());
  if (const ncclResult_t failed = begin("ncclGetUniqueId")) return failed;
  std::memset(id->internal, 0x5a, sizeof id->internal);
  std::snprintf(id->internal, sizeof id->internal, "%lld", static_cast<long long>(++state().ids));
  return ncclSuccess;
}

ncclResult_t ncclCommInitRank(ncclComm_t* comm, int ranks, ncclUniqueId id, int rank) {
  return join("ncclCommInitRank", comm, ranks, id, rank, true);
}

ncclResult_t ncclCommInitRankConfig(ncclComm_t* comm, int ranks, ncclUniqueId id, int rank,
                                    ncclConfig_t* config) {
  if (config->magic != 0xcafebeef || config->version < 21400 || config->size < sizeof *config) {
    const Lock lock(mutex());
    return refuse(ncclInvalidArgument, "the config was not initialized");
  }
  return join("ncclCommInitRankConfig", comm, ranks, id, rank, config->blocking != 0);
}

// That of a non-blocking communicator succeeds at once: its state tells when it has ended.
ncclResult_t ncclCommFinalize(ncclComm_t comm) {
  const Lock lock(mutex());
  if (const ncclResult_t failed = begin("ncclCommFinalize", comm)) return failed;
  const std::shared_ptr<ncclComm> c = alive(comm);
  if (c->finalized) return refuse(ncclInvalidArgument, "finalized twice");
  c->finalized = true;
  carry_out(*c, [] {});
  if (c->blocking) Engine::get().run(c->last);
  return ncclSuccess;
}

// As NCCL, waits for the work of a communicator that was not finalized.
ncclResult_t ncclCommDestroy(ncclComm_t comm) {
  const Lock lock(mutex());
  if (const ncclResult_t failed = begin("ncclCommDestroy", comm)) return failed;
  const std::shared_ptr<ncclComm> c = alive(comm);
  Engine::get().run(c->last);
  forget(*c);
  return ncclSuccess;
}

ncclResult_t ncclCommAbort(ncclComm_t comm) {
  const Lock lock(mutex());
  const std::shared_ptr<ncclComm> c = alive(comm);
  const ncclResult_t failed = begin("ncclCommAbort");
  abort_comm(c);
  return failed;
}

ncclResult_t ncclCommGetAsyncError(ncclComm_t comm, ncclResult_t* error) {
  const Lock lock(mutex());
  const std::shared_ptr<ncclComm> c = alive(comm);
  if (const ncclResult_t failed = begin("ncclCommGetAsyncError")) return failed;
  if (c->pending && !is_joining(*c) && c->polls > 0 && --c->polls == 0) {
    c->pending();
    c->pending = nullptr;
  }
  if (c->finalized) Engine::get().advance(c->last);
  const auto told = state().errors.find(c->rank);
  *error = told != state().errors.end() ? told->second
           : in_progress(*c)            ? ncclInProgress
                                        : c->error;
  return ncclSuccess;
}

ncclResult_t ncclCommCount(ncclComm_t comm, int* count) {
  const Lock lock(mutex());
  if (const ncclResult_t failed = begin("ncclCommCount", comm)) return failed;
  *count = alive(comm)->clique->ranks;
  return ncclSuccess;
}

ncclResult_t ncclCommUserRank(ncclComm_t comm, int* rank) {
  const Lock lock(mutex());
  if (const ncclResult_t failed = begin("ncclCommUserRank", comm)) return failed;
  *rank = alive(comm)->rank;
  return ncclSuccess;
}

ncclResult_t ncclCommCuDevice(ncclComm_t comm, int* device) {
  const Lock lock(mutex());
  if (const ncclResult_t failed = begin("ncclCommCuDevice", comm)) return failed;
  *device = alive(comm)->device;
  return ncclSuccess;
}

const char* ncclGetErrorString(ncclResult_t result) {
  constexpr const char* texts[] = {"no error",
                                   "unhandled cuda error",
                                   "unhandled system error",
                                   "internal error",
                                   "invalid argument",
                                   "invalid usage",
                                   "remote process exited or there was a network error",
                                   "NCCL operation in progress"};
  return result >= 0 && result <= ncclInProgress ? texts[result] : "unknown result code";
}

const char* ncclGetLastError(ncclComm_t comm) {
  const Lock lock(mutex());
  if (comm) alive(comm);
  static thread_local std::string text;
  text = state().last_error;
  return text.c_str();
}

ncclResult_t ncclGroupStart() {
  const Lock lock(mutex());
  if (const ncclResult_t failed = begin("ncclGroupStart")) return failed;
  ++group().depth;
  return ncclSuccess;
}

ncclResult_t ncclGroupEnd() {
  const Lock lock(mutex());
  if (group().depth == 0) return refuse(ncclInvalidUsage, "ncclGroupEnd without ncclGroupStart");
  const ncclResult_t failed = begin("ncclGroupEnd");
  if (--group().depth > 0) return failed;
  ncclResult_t result = failed;
  for (const auto& [comm, work] : group().calls) {
    if (failed) break;
    const ncclResult_t one = run(alive(comm), work.first, work.second);
    if (one != ncclSuccess) result = one;
  }
  group().calls.clear();
  return result;
}

ncclResult_t ncclSend(const void* send, size_t count, ncclDataType_t type, int peer,
                      ncclComm_t comm, cudaStream_t stream) {
  return call("ncclSend", comm, {What::kSend, send, nullptr, count, type, peer}, stream);
}

ncclResult_t ncclRecv(void* recv, size_t count, ncclDataType_t type, int peer, ncclComm_t comm,
                      cudaStream_t stream) {
  return call("ncclRecv", comm, {What::kRecv, nullptr, recv, count, type, peer}, stream);
}

ncclResult_t ncclBroadcast(const void* send, void* recv, size_t count, ncclDataType_t type,
                           int root, ncclComm_t comm, cudaStream_t stream) {
  return call("ncclBroadcast", comm, {What::kBroadcast, send, recv, count, type, root}, stream);
}

ncclResult_t ncclAllGather(const void* send, void* recv, size_t count, ncclDataType_t type,
                           ncclComm_t comm, cudaStream_t stream) {
  return call("ncclAllGather", comm, {What::kAllGather, send, recv, count, type, 0}, stream);
}

ncclResult_t ncclAllReduce(const void* send, void* recv, size_t count, ncclDataType_t type,
                           ncclRedOp_t op, ncclComm_t comm, cudaStream_t stream) {
  return call("ncclAllReduce", comm, {What::kAllReduce, send, recv, count, type, op}, stream);
}

ncclResult_t ncclReduceScatter(const void* send, void* recv, size_t count, ncclDataType_t type,
                               ncclRedOp_t op, ncclComm_t comm, cudaStream_t stream) {
  return call("ncclReduceScatter", comm, {What::kReduceScatter, send, recv, count, type, op},
              stream);
}

// ---- For tests ---------------------------------------------------------------------------------------

void ga_fake_nccl_fail(const char* function, int64_t n, ncclResult_t result) {
  const Lock lock(mutex());
  state().failing[function] = {n, result};
}

void ga_fake_nccl_hang(int64_t n) {
  const Lock lock(mutex());
  state().hang = n;
}

void ga_fake_nccl_async_error(int rank, ncclResult_t result) {
  const Lock lock(mutex());
  state().errors[rank] = result;
}

void ga_fake_nccl_in_progress(int64_t polls) {
  const Lock lock(mutex());
  state().polls = polls;
}

void ga_fake_nccl_version(int version) {
  const Lock lock(mutex());
  state().version = version;
}

int64_t ga_fake_nccl_calls(const char* function) {
  const Lock lock(mutex());
  return state().calls[function];
}

int64_t ga_fake_nccl_collectives() {
  const Lock lock(mutex());
  return state().collectives;
}

int64_t ga_fake_nccl_communicators() {
  const Lock lock(mutex());
  return static_cast<int64_t>(state().comms.size());
}

void ga_fake_nccl_reset() {
  const Lock lock(mutex());
  while (!state().comms.empty()) abort_comm(state().comms.begin()->second);
  const int64_t ids = state().ids;
  state() = State();
  state().ids = ids;
}
