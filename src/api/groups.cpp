// SPDX-License-Identifier: Apache-2.0
// Groups: optimizers, schedules, clips.
#include "api/call.hpp"
#include "context/configuration.hpp"
#include "context/parameters.hpp"
#include "numbers/optimizer.hpp"
#include "numbers/schedule.hpp"

using namespace ga::api;
using ga::guard;

namespace {

ga_optimizer default_optimizer(int32_t kind, int32_t flavor) {
  auto o = zeros<ga_optimizer>();
  o.kind = kind;
  o.flavor = flavor;
  ga::optimizer_info(kind, flavor).defaults(o);
  return o;
}

ga_optimizer read_optimizer(const ga_optimizer* optimizer) {
  require(optimizer, "optimizer");
  check_size<ga_optimizer>(optimizer->struct_size, "ga_optimizer");
  const ga_optimizer o =
      read_struct(optimizer, default_optimizer(optimizer->kind, optimizer->flavor), "ga_optimizer");
  check_reserved("ga_optimizer", o.reserved);
  check_reserved("ga_optimizer", o.reserved2);
  return o;
}

}  // namespace

extern "C" {

ga_status ga_optimizer_init(ga_optimizer* out, size_t struct_size, ga_optimizer_kind kind,
                            ga_flavor flavor) {
  return guard(
      [&] { init_struct(out, struct_size, default_optimizer(kind, flavor), "ga_optimizer"); });
}

ga_status ga_group_add(ga_context* ctx, const ga_optimizer* optimizer, ga_group* out) {
  return on(ctx, [&] { give(out, ctx->configuration->add_group(read_optimizer(optimizer))); });
}

ga_status ga_group_set_optimizer(ga_context* ctx, ga_group group, const ga_optimizer* optimizer) {
  return on(ctx, [&] { ctx->configuration->set_optimizer(group, read_optimizer(optimizer)); });
}

ga_status ga_group_set_frozen(ga_context* ctx, ga_group group, int32_t frozen) {
  return on(ctx, [&] { ctx->parameters->set_group_frozen(group, flag("frozen", frozen)); });
}

ga_status ga_group_set_lr(ga_context* ctx, ga_group group, double lr) {
  return on(ctx, [&] {
    ctx->note("group", group);
    ctx->note("lr", lr);
    ctx->configuration->set_lr(group, lr);
  });
}

ga_status ga_group_set_weight_decay(ga_context* ctx, ga_group group, double weight_decay) {
  return on(ctx, [&] { ctx->configuration->set_weight_decay(group, weight_decay); });
}

ga_status ga_group_count(const ga_context* ctx, int32_t* out) {
  return ask(ctx, [&] {
    require(out, "out");
    *out = static_cast<int32_t>(ctx->model.params.groups.size());
  });
}

ga_status ga_group_optimizer(const ga_context* ctx, ga_group group, ga_optimizer* out) {
  return ask(ctx, [&] {
    check_out(out, "ga_optimizer");
    write_struct(out, ctx->model.params.group(group).optimizer);
  });
}

ga_status ga_schedule_init(ga_schedule* out, size_t struct_size, ga_schedule_kind kind) {
  return guard([&] { init_struct(out, struct_size, ga::default_schedule(kind), "ga_schedule"); });
}

ga_status ga_group_set_schedule(ga_context* ctx, ga_group group, const ga_schedule* schedule) {
  return on(ctx, [&] {
    if (!schedule) return ctx->configuration->set_schedule(group, nullptr);
    check_size<ga_schedule>(schedule->struct_size, "ga_schedule");
    const ga_schedule s =
        read_struct(schedule, ga::default_schedule(schedule->kind), "ga_schedule");
    check_reserved("ga_schedule", s.reserved);
    ctx->configuration->set_schedule(group, &s);
  });
}

ga_status ga_group_lr(const ga_context* ctx, ga_group group, double* out) {
  return ask(ctx, [&] {
    require(out, "out");
    *out = ctx->configuration->lr(group);
  });
}

ga_status ga_group_last_lr(const ga_context* ctx, ga_group group, double* out) {
  return ask(ctx, [&] {
    require(out, "out");
    *out = ctx->configuration->last_lr(group);
  });
}

ga_status ga_group_set_clip(ga_context* ctx, ga_group group, const ga_clip* clip) {
  return on(ctx, [&] {
    set_struct(clip, ga::default_clip, "ga_clip",
               [&](const ga_clip* c) { ctx->configuration->set_group_clip(group, c); });
  });
}

ga_status ga_group_clip(const ga_context* ctx, ga_group group, ga_clip* out) {
  return ask(ctx, [&] {
    check_out(out, "ga_clip");
    write_struct(out, ctx->model.params.clip_of(ctx->model.params.group(group)));
  });
}

}  // extern "C"
