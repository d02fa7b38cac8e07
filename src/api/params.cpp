// SPDX-License-Identifier: Apache-2.0
// Parameters, and their state by name.
#include "api/call.hpp"
#include "checkpoint/state.hpp"
#include "context/averages.hpp"
#include "context/parameters.hpp"

using namespace ga::api;
using ga::fail;
using ga::guard;

namespace {

ga_param_options read_param_options(const ga_param_options* options) {
  const auto o = read_struct(options, zeros<ga_param_options>(), "ga_param_options");
  check_reserved("ga_param_options", o.reserved);
  check_reserved("ga_param_options", o.reserved2);
  return o;
}

ga_flat_entry default_flat_entry() {
  auto e = zeros<ga_flat_entry>();
  e.group = -1;
  return e;
}

// Entry i of an array whose elements have the size that the first one says.
ga_flat_entry read_entry(const ga_flat_entry* entries, size_t i) {
  const size_t size = entries->struct_size;
  check_size<ga_flat_entry>(size, "ga_flat_entry");
  const auto* const entry =
      reinterpret_cast<const ga_flat_entry*>(reinterpret_cast<const char*>(entries) + i * size);
  if (entry->struct_size != size)
    fail(GA_ERROR_INVALID_ARGUMENT,
         "struct_size of entries[%zu] was %zu, but that of entries[0] is %zu", i,
         entry->struct_size, size);
  return read_struct(entry, default_flat_entry(), "ga_flat_entry");
}

}  // namespace

extern "C" {

ga_status ga_param_options_init(ga_param_options* out, size_t struct_size) {
  return init_zeros(out, struct_size, "ga_param_options");
}

ga_status ga_param_add(ga_context* ctx, ga_group group, const char* name, void* data,
                       ga_dtype dtype, int32_t rank, const int64_t* shape,
                       const ga_param_options* options, ga_param* out) {
  return on(ctx, [&] {
    ctx->note("name", name);
    ctx->note("group", group);
    ctx->note("dtype", dtype);
    const ga::NewParam entry = {name, group, rank, shape, 0, read_param_options(options)};
    give(out, ctx->parameters->add(data, dtype, {&entry, 1}));
  });
}

ga_status ga_flat_entry_init(ga_flat_entry* out, size_t struct_size) {
  return guard([&] { init_struct(out, struct_size, default_flat_entry(), "ga_flat_entry"); });
}

ga_status ga_params_add_flat(ga_context* ctx, void* data, ga_dtype dtype,
                             const ga_flat_entry* entries, size_t count,
                             const ga_param_options* options, ga_param* out) {
  return on(ctx, [&] {
    const auto common = read_param_options(options);
    if (count > 0) require(entries, "entries");
    std::vector<ga::NewParam> list;
    for (size_t i = 0; i < count; ++i) {
      const ga_flat_entry e = read_entry(entries, i);
      list.push_back({e.name, e.group, e.rank, e.shape, e.offset,
                      e.options ? read_param_options(e.options) : common});
    }
    give(out, ctx->parameters->add(data, dtype, {list.data(), list.size()}));
  });
}

ga_status ga_param_count(const ga_context* ctx, int32_t* out) {
  return ask(ctx, [&] {
    require(out, "out");
    *out = static_cast<int32_t>(ctx->model.params.size());
  });
}

ga_status ga_param_find(const ga_context* ctx, const char* name, ga_param* out) {
  return ask(ctx, [&] {
    require(name, "name");
    require(out, "out");
    const ga_param param = ctx->model.params.find(name);
    if (param < 0) fail(GA_ERROR_INVALID_ARGUMENT, "the context has no parameter \"%s\"", name);
    *out = param;
  });
}

ga_status ga_param_info_init(ga_param_info* out, size_t struct_size) {
  return init_zeros(out, struct_size, "ga_param_info");
}

ga_status ga_param_describe(const ga_context* ctx, ga_param param, ga_param_info* out) {
  return ask(ctx, [&] {
    check_out(out, "ga_param_info");
    write_struct(out, ctx->model.params.info(param));
  });
}

ga_status ga_slot_count(const ga_context* ctx, size_t* out) {
  return ask(ctx, [&] {
    require(out, "out");
    *out = ctx->model.params.blocks().size();
  });
}

ga_status ga_param_slot(const ga_context* ctx, ga_param param, size_t* out) {
  return ask(ctx, [&] {
    require(out, "out");
    *out = ctx->model.params.slot(param);
  });
}

ga_status ga_param_bind(ga_context* ctx, ga_param param, void* data) {
  return on(ctx, [&] {
    ctx->note("param", param);
    ctx->parameters->bind(param, data);
  });
}

ga_status ga_param_changed(ga_context* ctx, ga_param param) {
  return on(ctx, [&] {
    ctx->note("param", param);
    ctx->parameters->changed(param);
  });
}

ga_status ga_ema_copy_to(ga_context* ctx, ga_param param, void* out, ga_dtype dtype) {
  return ask(ctx, [&] { ctx->averages->copy_to(param, out, dtype); });
}

ga_status ga_param_set_frozen(ga_context* ctx, ga_param param, int32_t frozen) {
  return on(ctx, [&] {
    ctx->note("param", param);
    ctx->note("frozen", frozen);
    ctx->parameters->set_frozen(param, flag("frozen", frozen));
  });
}

ga_status ga_param_set_lr_scale(ga_context* ctx, ga_param param, double lr_scale) {
  return on(
      ctx, [&] { ctx->parameters->set_scale(param, "lr_scale", &ga::Tensor::lr_scale, lr_scale); });
}

ga_status ga_param_set_weight_decay_scale(ga_context* ctx, ga_param param,
                                          double weight_decay_scale) {
  return on(ctx, [&] {
    ctx->parameters->set_scale(param, "weight_decay_scale", &ga::Tensor::weight_decay_scale,
                               weight_decay_scale);
  });
}

ga_status ga_param_set_part(ga_context* ctx, ga_param param, const int64_t* whole_shape,
                            const int64_t* first, int32_t copies) {
  return on(ctx, [&] {
    ctx->note("param", param);
    ctx->parameters->set_part(param, whole_shape, first, copies);
  });
}

ga_status ga_param_remove(ga_context* ctx, ga_param param) {
  return on(ctx, [&] {
    ctx->note("param", param);
    ctx->parameters->remove(param);
  });
}

ga_status ga_state_info_init(ga_state_info* out, size_t struct_size) {
  return init_zeros(out, struct_size, "ga_state_info");
}

ga_status ga_state_count(const ga_context* ctx, ga_param param, int32_t* out) {
  return ask(ctx, [&] {
    require(out, "out");
    *out = ctx->state->count(param);
  });
}

ga_status ga_state_describe(const ga_context* ctx, ga_param param, int32_t index,
                            ga_state_info* out) {
  return ask(ctx, [&] {
    check_out(out, "ga_state_info");
    write_struct(out, ctx->state->info(param, index));
  });
}

ga_status ga_state_get(ga_context* ctx, ga_param param, const char* name, void* out, ga_dtype dtype,
                       int64_t count) {
  return on(ctx, [&] {
    ctx->note("param", param);
    ctx->note("name", name);
    ctx->state->get(param, name, out, dtype, count);
  });
}

ga_status ga_state_set(ga_context* ctx, ga_param param, const char* name, const void* data,
                       ga_dtype dtype, int64_t count) {
  return on(ctx, [&] {
    ctx->note("param", param);
    ctx->note("name", name);
    ctx->state->set(param, name, data, dtype, count);
  });
}

ga_status ga_state_reset(ga_context* ctx, ga_param param) {
  return on(ctx, [&] {
    ctx->note("param", param);
    ctx->state->reset(param);
  });
}

}  // extern "C"
