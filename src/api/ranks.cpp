// SPDX-License-Identifier: Apache-2.0
// Communicators.
#include "api/call.hpp"
#include "ranks/comm/comm.hpp"

using namespace ga::api;
using ga::fail;
using ga::guard;

extern "C" {

ga_status ga_comm_config_init(ga_comm_config* out, size_t struct_size, ga_comm_kind kind) {
  return guard([&] {
    ga::check_choice("kind", kind, GA_COMM_NCCL, "ga_comm_kind");
    init_struct(out, struct_size, ga::default_comm_config(kind), "ga_comm_config");
  });
}

ga_status ga_comm_unique_id(ga_comm_kind kind, void* out, size_t size) {
  return guard([&] {
    require(out, "out");
    if (size != GA_COMM_ID_SIZE)
      fail(GA_ERROR_INVALID_ARGUMENT, "size was %zu, expected GA_COMM_ID_SIZE, %d", size,
           GA_COMM_ID_SIZE);
    ga::make_unique_id(kind, out);
  });
}

ga_status ga_comm_create(const ga_comm_config* config, ga_comm** out) {
  return guard([&] {
    require(config, "config");
    require(out, "out");
    check_size<ga_comm_config>(config->struct_size, "ga_comm_config");
    ga_comm_config c = read_struct(config, ga::default_comm_config(config->kind), "ga_comm_config");
    ga_comm_table table = {};
    if (c.table) {
      table = read_struct(c.table, zeros<ga_comm_table>(), "ga_comm_table");
      c.table = &table;
    }
    auto made = std::make_unique<ga_comm>();
    made->comm = ga::Comm::make(c);
    *out = made.release();
  });
}

ga_status ga_comm_size(const ga_comm* comm, int32_t* out_rank, int32_t* out_ranks) {
  return guard([&] {
    require(comm, "comm");
    if (out_rank) *out_rank = comm->comm->rank();
    if (out_ranks) *out_ranks = comm->comm->ranks();
  });
}

ga_status ga_comm_abort(ga_comm* comm) {
  return guard([&] {
    require(comm, "comm");
    comm->comm->abort();
  });
}

void ga_comm_destroy(ga_comm* comm) { delete comm; }

ga_status ga_comm_options_init(ga_comm_options* out, size_t struct_size) {
  return guard(
      [&] { init_struct(out, struct_size, ga::default_comm_options(), "ga_comm_options"); });
}

ga_status ga_context_set_comm(ga_context* ctx, ga_comm* comm, const ga_comm_options* options) {
  return on(ctx, [&] {
    const auto o = read_struct(options, ga::default_comm_options(), "ga_comm_options");
    ga::check_comm_options(o);
    ctx->set_comm(comm ? comm->comm : nullptr, o);
  });
}

}  // extern "C"
