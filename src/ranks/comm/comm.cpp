// SPDX-License-Identifier: Apache-2.0
#include "ranks/comm/comm.hpp"

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <exception>

#include "backend/backend.hpp"
#include "core/callback.hpp"
#include "core/module.hpp"
#include "core/tensor.hpp"
#include "ranks/comm/mpi_module.h"
#include "ranks/comm/nccl_module.h"

namespace ga {
namespace {

constexpr int64_t kLent = int64_t{1} << 20;  // bytes of a block

void check_rank(const ga_comm_config& c) {
  if (c.ranks < 1) fail(GA_ERROR_INVALID_ARGUMENT, "ranks was %d, expected >= 1", c.ranks);
  if (c.rank < 0 || c.rank >= c.ranks)
    fail(GA_ERROR_INVALID_ARGUMENT, "rank was %d, but ranks is %d: expected 0 to %d", c.rank,
         c.ranks, c.ranks - 1);
}

Transport join_mpi(const ga_comm_config& config) {
  const auto& module = *static_cast<const ga_mpi_module*>(open_module("mpi", GA_MPI_ABI));
  char error[512] = "no reason given";
  ga_mpi_end end = {};
  const int32_t status = module.join(config.mpi_comm, config.timeout, &end, error, sizeof error);
  if (status != GA_OK) fail(status, "ga_comm_create: %s", error);
  void* const user = end.table.user;
  const auto leave = [leave = module.leave, user] { leave(user); };
  Transport transport = {end.table, end.rank, end.ranks, leave, false, true};
  transport.attend = [attend = module.attend, user](bool comes) { attend(user, comes); };
  return transport;
}

const ga_nccl_module& nccl_module() {
  return *static_cast<const ga_nccl_module*>(open_module("nccl", GA_NCCL_ABI));
}

Transport join_nccl(const ga_comm_config& config) {
  const ga_nccl_module& module = nccl_module();
  char error[1024] = "no reason given";
  ga_nccl_end end = {};
  const int32_t status = module.join(&config, &end, error, sizeof error);
  if (status != GA_OK) fail(status, "ga_comm_create: %s", error);
  void* const user = end.table.user;
  Transport transport = {end.table,
                         end.rank,
                         end.ranks,
                         [leave = module.leave, user] { leave(user); },
                         false,
                         false,
                         [poll = module.poll, user] { return poll(user); },
                         config.timeout,
                         GA_COMM_ADDER_TRANSPORT,
                         end.device};
  transport.group = [group = module.group, user](std::function<void()> work) {
    return group(
        user, [](void* arg) { (*static_cast<std::function<void()>*>(arg))(); }, &work);
  };
  return transport;
}

Transport join_table(const ga_comm_config& config) {
  if (!config.table) fail(GA_ERROR_INVALID_ARGUMENT, "table was NULL");
  const ga_comm_table& t = *config.table;
  check_rank(config);
  const auto require = [](bool there, const char* name) {
    if (!there) fail(GA_ERROR_INVALID_ARGUMENT, "ga_comm_table.%s was NULL", name);
  };
  require(t.all_to_all, "all_to_all");
  require(t.all_gather, "all_gather");
  require(t.broadcast, "broadcast");
  check_choice("ga_comm_table.any_thread", t.any_thread, 1, "0 or 1");
  check_choice("ga_comm_table.on_stream", t.on_stream, 1, "0 or 1");
  return {t, config.rank, config.ranks, {}, true, false};
}

}  // namespace

ga_comm_config default_comm_config(int32_t kind) {
  ga_comm_config c = {};
  c.struct_size = sizeof c;
  c.kind = kind;
  c.timeout = 600;
  return c;
}

ga_comm_options default_comm_options() {
  ga_comm_options o = {};
  o.struct_size = sizeof o;
  o.adder = GA_COMM_ADDER_AUTO;
  o.data_rank = -1;
  return o;
}

void check_comm_options(const ga_comm_options& o) {
  check_choice("wire", o.wire, GA_COMM_WIRE_BF16, "ga_comm_wire");
  check_choice("hand_out", o.hand_out, 1, "0 or 1");
  check_choice("shard", o.shard, GA_SHARD_PARAMETERS, "ga_shard");
  check_choice("adder", o.adder, GA_COMM_ADDER_AUTO, "ga_comm_adder");
  check_choice("overlap", o.overlap, 1, "0 or 1");
  check_choice("ga_comm_options.reserved", o.reserved, 0, "reserved");
  check_choice("ga_comm_options.reserved2", o.reserved2, 0, "reserved");
  if (o.check_every < 0)
    fail(GA_ERROR_INVALID_ARGUMENT, "check_every was %lld, expected >= 0", ll(o.check_every));
  check_choice("reduced", o.reduced, GA_REDUCED_SUM, "ga_reduced");
  const bool own = o.shard == GA_SHARD_PARAMETERS;
  if (!own && (o.reduced != GA_REDUCED_MEAN || o.data_ranks != 0 || o.data_rank != -1))
    fail(GA_ERROR_INVALID_ARGUMENT,
         "reduced was %d, data_ranks %d and data_rank %d, which are for GA_SHARD_PARAMETERS",
         o.reduced, o.data_ranks, o.data_rank);
}

std::shared_ptr<Comm> Comm::make(const ga_comm_config& c) {
  check_choice("kind", c.kind, GA_COMM_NCCL, "ga_comm_kind");
  if (!(c.timeout > 0))
    fail(GA_ERROR_INVALID_ARGUMENT, "timeout was %g, expected a number of seconds > 0", c.timeout);
  if (c.kind == GA_COMM_LOCAL || (c.kind == GA_COMM_NCCL && !c.nccl_comm)) {
    check_rank(c);
    if (!c.id) fail(GA_ERROR_INVALID_ARGUMENT, "id was NULL; ga_comm_unique_id makes one");
  }
  switch (c.kind) {
    case GA_COMM_LOCAL:
      return std::make_shared<Comm>(join_local(c));
    case GA_COMM_MPI:
      return std::make_shared<Comm>(join_mpi(c));
    case GA_COMM_NCCL:
      return std::make_shared<Comm>(join_nccl(c));
    default:
      return std::make_shared<Comm>(join_table(c));
  }
}

void make_unique_id(int32_t kind, void* out) {
  if (kind == GA_COMM_LOCAL) return make_local_id(out);
  if (kind != GA_COMM_NCCL)
    fail(GA_ERROR_INVALID_ARGUMENT, "kind was %d, but only GA_COMM_LOCAL and GA_COMM_NCCL have ids",
         kind);
  char error[1024] = "no reason given";
  const int32_t status = nccl_module().unique_id(out, error, sizeof error);
  if (status != GA_OK) fail(status, "ga_comm_unique_id: %s", error);
}

// Runs call(table, stream).
template <class Call>
void Comm::run(const char* what, Call&& call) {
  check();
  int32_t result = -1;
  std::string thrown;  // by a function of the program
  const auto transfer = [&](void* stream) { result = call(transport_.table, stream); };
  const auto run_here = [&](void* stream) {
    if (!transport_.of_program) return transfer(stream);
    try {
      call_program("ga_comm_table", [&] { transfer(stream); });
    } catch (const Error& e) {
      thrown = e.what();
    }
  };
  if (!aborted_.load()) {
    if (on_stream())
      device_->device()->with_stream(run_here);
    else
      run_here(nullptr);
  }
  if (result != 0) fail_with("in the exchange of ", what, result, thrown);
}

void Comm::fail_with(const char* where, const char* what, int32_t result,
                     const std::string& thrown) {
  const ga_comm_table& t = transport_.table;
  const char* const text = aborted_.load()   ? "ga_comm_abort was called"
                           : !thrown.empty() ? thrown.c_str()
                           : t.error_text    ? t.error_text(t.user, result)
                                             : nullptr;
  char message[640];
  char code[32] = "";
  if (transport_.of_program && !aborted_.load() && thrown.empty())
    std::snprintf(code, sizeof code, " (%d)", result);
  std::snprintf(message, sizeof message, "rank %d of %d failed %s%s: %s%s", rank(), ranks(), where,
                what, text ? text : "the table gave no reason", code);
  failure_.emplace(GA_ERROR_COMMUNICATION, message);
  failed_.store(true, std::memory_order_release);
  if (transport_.writes_late) (void)lent_.release();
  throw *failure_;
}

void Comm::watch(double seconds) {
  constexpr const char* kWhere = "in what its device exchanges";
  check();
  if (aborted_.load()) fail_with(kWhere, "", -1);
  if (const int32_t result = transport_.poll ? transport_.poll() : 0) fail_with(kWhere, "", result);
  if (!(seconds > transport_.timeout)) return;
  if (transport_.table.abort) transport_.table.abort(transport_.table.user);
  char message[128];
  std::snprintf(message, sizeof message,
                "rank %d of %d waited %g s for the other ranks in what its device exchanges",
                rank(), ranks(), transport_.timeout);
  failure_.emplace(GA_ERROR_COMMUNICATION, message);
  failed_.store(true, std::memory_order_release);
  throw *failure_;
}

// Runs call(table, send, recv, stride, stream) on arrays of the backend. On a device, a transport of the
// host's memory gets copies there, in which one block lies behind the other.
template <class Call>
void Comm::run_on(const char* what, const Blocks& send, const Blocks& recv, int64_t stride,
                  int64_t count, Call&& call) {
  if (!device_ || on_stream())
    return run(what, [&](const ga_comm_table& t, void* stream) {
      return call(t, send.data, const_cast<void*>(recv.data), stride, stream);
    });
  char* const sent = lent(send.count * send.bytes + recv.count * recv.bytes);
  char* const received = sent + send.count * send.bytes;
  const auto each = [](const Blocks& blocks, char* host, auto&& copy) {
    for (size_t k = 0; k < blocks.count; ++k)
      copy(host + k * blocks.bytes,
           static_cast<char*>(const_cast<void*>(blocks.data)) + k * blocks.stride, blocks.bytes);
  };
  each(send, sent, [&](char* host, char* at, size_t bytes) { device_->read(host, at, bytes); });
  run(what,
      [&](const ga_comm_table& t, void* stream) { return call(t, sent, received, count, stream); });
  if (recv.count == 0)
    each(send, sent, [&](char* host, char* at, size_t bytes) { device_->write(at, host, bytes); });
  each(recv, received,
       [&](char* host, char* at, size_t bytes) { device_->write(at, host, bytes); });
}

static size_t bytes_of(int64_t count, int32_t dtype) {
  return static_cast<size_t>(count * dtype_info(dtype).size);
}

void Comm::all_to_all(const char* what, const void* send, int64_t stride, void* recv, int64_t count,
                      int32_t dtype) {
  const auto n = static_cast<size_t>(ranks());
  const size_t bytes = bytes_of(count, dtype);
  run_on(what, {send, n, bytes, bytes_of(stride, dtype)}, {recv, n, bytes, bytes}, stride, count,
         [&](const ga_comm_table& t, const void* from, void* to, int64_t apart, void* stream) {
           return t.all_to_all(t.user, from, apart, to, count, dtype, stream);
         });
}

void Comm::all_gather_arrays(const char* what, const void* send, void* recv, int64_t stride,
                             int64_t count, int32_t dtype) {
  const size_t bytes = bytes_of(count, dtype);
  run_on(what, {send, 1, bytes, bytes},
         {recv, static_cast<size_t>(ranks()), bytes, bytes_of(stride, dtype)}, stride, count,
         [&](const ga_comm_table& t, const void* from, void* to, int64_t apart, void* stream) {
           return t.all_gather(t.user, from, to, apart, count, dtype, stream);
         });
}

void Comm::all_reduce(const char* what, void* data, int64_t count, int32_t dtype, int32_t op) {
  const size_t bytes = bytes_of(count, dtype);
  run_on(what, {data, 1, bytes, bytes}, {}, count, count,
         [&](const ga_comm_table& t, const void* at, void*, int64_t, void* stream) {
           return t.all_reduce(t.user, const_cast<void*>(at), count, dtype, op, stream);
         });
}

void Comm::reduce_scatter(const char* what, const void* send, void* recv, int64_t count,
                          int32_t dtype, int32_t op) {
  const size_t bytes = bytes_of(count, dtype);
  run_on(what, {send, static_cast<size_t>(ranks()), bytes, bytes}, {recv, 1, bytes, bytes}, count,
         count, [&](const ga_comm_table& t, const void* from, void* to, int64_t, void* stream) {
           return t.reduce_scatter(t.user, from, to, count, dtype, op, stream);
         });
}

void Comm::broadcast_array(const char* what, void* data, int64_t count, int32_t dtype,
                           int32_t root) {
  const size_t bytes = bytes_of(count, dtype);
  run_on(what, {data, 1, bytes, bytes}, {}, count, count,
         [&](const ga_comm_table& t, const void* at, void*, int64_t, void* stream) {
           return t.broadcast(t.user, const_cast<void*>(at), count, dtype, root, stream);
         });
}

void Comm::together(const char* what, const std::function<void()>& work) {
  if (!groups()) return work();
  // What work() throws passes neither through the module, which is C, nor through the backend, which would take it
  // for a fault of its device.
  std::exception_ptr thrown;
  const auto calls = [&] {
    try {
      work();
    } catch (...) {
      thrown = std::current_exception();
    }
  };
  run(what, [&](const ga_comm_table&, void*) {
    const int32_t result = transport_.group(calls);
    return thrown ? 0 : result;
  });
  if (thrown) std::rethrow_exception(thrown);
}

// Memory for the host's data on its way: of the device where the transport is one of devices.
char* Comm::lent(size_t bytes) {
  if (on_stream()) {
    if (on_device_.bytes() < bytes) on_device_ = Buffer(*device_, bytes);
    return static_cast<char*>(on_device_.data());
  }
  if (lent_bytes_ < bytes) {
    lent_.reset(new char[bytes]);
    lent_bytes_ = bytes;
  }
  return lent_.get();
}

// Copies to and from what lent() gave.
void Comm::put(char* to, const void* from, size_t bytes) {
  if (on_stream())
    device_->write(to, from, bytes);
  else
    std::memcpy(to, from, bytes);
}
void Comm::get(void* to, const char* from, size_t bytes) {
  if (on_stream())
    device_->read(to, from, bytes);
  else
    std::memcpy(to, from, bytes);
}

void Comm::all_gather(const char* what, const void* send, void* recv, int64_t count,
                      int32_t dtype) {
  const auto gather = [&](const void* from, void* to, int64_t n) {
    run(what, [&](const ga_comm_table& t, void* stream) {
      return t.all_gather(t.user, from, to, n, n, dtype, stream);
    });
  };
  if (!transport_.writes_late && !on_stream()) return gather(send, recv, count);
  const int64_t size = dtype_info(dtype).size;
  const int64_t most = kLent / size;
  for (int64_t at = 0; at < count; at += most) {
    const int64_t n = std::min(most, count - at);
    const auto bytes = static_cast<size_t>(n * size);
    char* const memory = lent(bytes * static_cast<size_t>(ranks() + 1));
    put(memory, static_cast<const char*>(send) + at * size, bytes);
    gather(memory, memory + bytes, n);
    for (int32_t q = 0; q < ranks(); ++q)
      get(static_cast<char*>(recv) + (q * count + at) * size,
          memory + static_cast<size_t>(q + 1) * bytes, bytes);
  }
}

void Comm::broadcast(const char* what, void* data, int64_t count, int32_t dtype, int32_t root) {
  const auto send = [&](void* from, int64_t n) {
    run(what, [&](const ga_comm_table& t, void* stream) {
      return t.broadcast(t.user, from, n, dtype, root, stream);
    });
  };
  if (!transport_.writes_late && !on_stream()) return send(data, count);
  const int64_t size = dtype_info(dtype).size;
  const int64_t most = kLent / size;
  for (int64_t at = 0; at < count; at += most) {
    const int64_t n = std::min(most, count - at);
    const auto bytes = static_cast<size_t>(n * size);
    char* const memory = lent(bytes);
    char* const own = static_cast<char*>(data) + at * size;
    put(memory, own, bytes);
    send(memory, n);
    get(own, memory, bytes);
  }
}

void Comm::abort() noexcept {
  aborted_.store(true);
  if (transport_.table.abort) transport_.table.abort(transport_.table.user);
}

void Comm::take(Backend* device, int32_t ordinal) {
  if (on_stream() && !device)
    fail(GA_ERROR_UNSUPPORTED,
         "the communicator is one of devices (ga_comm_table.on_stream, or NCCL), but the context "
         "works "
         "on the CPU");
  if (device && transport_.device >= 0 && transport_.device != ordinal)
    fail(GA_ERROR_INVALID_ARGUMENT,
         "the communicator is of CUDA device %d, but the context's device_ordinal was %d: make the "
         "context's device current (cudaSetDevice) before ga_comm_create, or before NCCL makes the "
         "program's communicator",
         transport_.device, ordinal);
  if (taken_.exchange(true))
    fail(GA_ERROR_INVALID_STATE,
         "another context has this communicator: each rank needs one of its own");
  device_ = device;
}

void Comm::give_back() noexcept {
  if (attended_ && transport_.attend) transport_.attend(false);
  attended_ = false;
  on_device_ = Buffer();
  device_ = nullptr;
  taken_.store(false);
}

}  // namespace ga
