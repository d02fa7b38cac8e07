// SPDX-License-Identifier: Apache-2.0
#include "comm/comm.hpp"

#include <algorithm>
#include <cstdio>
#include <cstring>

#include "comm/mpi_module.h"
#include "comm/nccl_module.h"
#include "fp_mode.hpp"
#include "module.hpp"
#include "tensor.hpp"

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
  return {end.table, end.rank,
          end.ranks, [leave = module.leave, user = end.table.user] { leave(user); },
          false,     true};
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
  return {end.table,
          end.rank,
          end.ranks,
          [leave = module.leave, user] { leave(user); },
          false,
          false,
          [poll = module.poll, user] { return poll(user); }};
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
  return o;
}

void check_comm_options(const ga_comm_options& o) {
  check_choice("wire", o.wire, GA_COMM_WIRE_BF16, "ga_comm_wire");
  check_choice("hand_out", o.hand_out, 1, "0 or 1");
  check_choice("shard", o.shard, GA_SHARD_OPTIMIZER, "ga_shard");
  check_choice("adder", o.adder, GA_COMM_ADDER_TRANSPORT, "ga_comm_adder");
  check_choice("overlap", o.overlap, 1, "0 or 1");
  check_choice("ga_comm_options.reserved", o.reserved, 0, "reserved");
  if (o.check_every < 0)
    fail(GA_ERROR_INVALID_ARGUMENT, "check_every was %lld, expected >= 0", ll(o.check_every));
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

template <class Call>
void Comm::run(const char* what, Call&& call) {
  check();
  int32_t result = -1;
  if (!aborted_.load()) {
    if (transport_.of_program) {
      const ProgramFpMode programs;
      result = call(transport_.table);
    } else {
      result = call(transport_.table);
    }
  }
  if (result == 0) return;
  const ga_comm_table& t = transport_.table;
  const char* const text = aborted_.load() ? "ga_comm_abort was called"
                           : t.error_text  ? t.error_text(t.user, result)
                                           : nullptr;
  char message[640];
  char code[32] = "";
  if (transport_.of_program && !aborted_.load()) std::snprintf(code, sizeof code, " (%d)", result);
  std::snprintf(message, sizeof message, "rank %d of %d failed in the exchange of %s: %s%s", rank(),
                ranks(), what, text ? text : "the table gave no reason", code);
  failure_.emplace(GA_ERROR_COMMUNICATION, message);
  failed_.store(true, std::memory_order_release);
  if (transport_.writes_late) (void)lent_.release();
  throw *failure_;
}

void Comm::all_to_all(const char* what, const void* send, int64_t stride, void* recv, int64_t count,
                      int32_t dtype) {
  run(what, [&](const ga_comm_table& t) {
    return t.all_to_all(t.user, send, stride, recv, count, dtype, nullptr);
  });
}

void Comm::all_gather_arrays(const char* what, const void* send, void* recv, int64_t stride,
                             int64_t count, int32_t dtype) {
  run(what, [&](const ga_comm_table& t) {
    return t.all_gather(t.user, send, recv, stride, count, dtype, nullptr);
  });
}

void Comm::all_reduce(const char* what, void* data, int64_t count, int32_t dtype, int32_t op) {
  run(what, [&](const ga_comm_table& t) {
    return t.all_reduce(t.user, data, count, dtype, op, nullptr);
  });
}

void Comm::reduce_scatter(const char* what, const void* send, void* recv, int64_t count,
                          int32_t dtype, int32_t op) {
  run(what, [&](const ga_comm_table& t) {
    return t.reduce_scatter(t.user, send, recv, count, dtype, op, nullptr);
  });
}

void Comm::all_gather(const char* what, const void* send, void* recv, int64_t count,
                      int32_t dtype) {
  if (!transport_.writes_late) return all_gather_arrays(what, send, recv, count, count, dtype);
  const int64_t size = dtype_info(dtype).size;
  const int64_t most = kLent / size;
  for (int64_t at = 0; at < count; at += most) {
    const int64_t n = std::min(most, count - at);
    const auto bytes = static_cast<size_t>(n * size);
    char* const memory = lent(bytes * static_cast<size_t>(ranks() + 1));
    std::memcpy(memory, static_cast<const char*>(send) + at * size, bytes);
    all_gather_arrays(what, memory, memory + bytes, n, n, dtype);
    for (int32_t q = 0; q < ranks(); ++q)
      std::memcpy(static_cast<char*>(recv) + (q * count + at) * size,
                  memory + static_cast<size_t>(q + 1) * bytes, bytes);
  }
}

void Comm::broadcast(const char* what, void* data, int64_t count, int32_t dtype, int32_t root) {
  const auto send = [&](void* from, int64_t n) {
    run(what,
        [&](const ga_comm_table& t) { return t.broadcast(t.user, from, n, dtype, root, nullptr); });
  };
  if (!transport_.writes_late) return send(data, count);
  const int64_t size = dtype_info(dtype).size;
  const int64_t most = kLent / size;
  for (int64_t at = 0; at < count; at += most) {
    const int64_t n = std::min(most, count - at);
    const auto bytes = static_cast<size_t>(n * size);
    char* const memory = lent(bytes);
    char* const own = static_cast<char*>(data) + at * size;
    std::memcpy(memory, own, bytes);
    send(memory, n);
    std::memcpy(own, memory, bytes);
  }
}

char* Comm::lent(size_t bytes) {
  if (lent_bytes_ < bytes) {
    lent_.reset(new char[bytes]);
    lent_bytes_ = bytes;
  }
  return lent_.get();
}

void Comm::abort() noexcept {
  aborted_.store(true);
  if (transport_.table.abort) transport_.table.abort(transport_.table.user);
}

void Comm::take() {
  if (taken_.exchange(true))
    fail(GA_ERROR_INVALID_STATE,
         "another context has this communicator: each rank needs one of its own");
}

}  // namespace ga
