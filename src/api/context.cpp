// SPDX-License-Identifier: Apache-2.0
// A context: its life, its memory, and the options that are not those of a group.
#include <chrono>
#include <string>

#include "api/call.hpp"
#include "context/averages.hpp"
#include "context/configuration.hpp"
#include "core/environment.hpp"

using namespace ga::api;
using ga::guard;

extern "C" {

ga_status ga_config_init(ga_config* out, size_t struct_size) {
  return guard([&] { init_struct(out, struct_size, ga::default_config(), "ga_config"); });
}

ga_status ga_context_create(const ga_config* config, ga_context** out) {
  return guard([&] {
    require(out, "out");
    const ga::FpMode mode;
    const ga_config c = read_struct(config, ga::default_config(), "ga_config");
    ga::check_config(c);
    ga::watch_forks();
    const auto start = std::chrono::steady_clock::now();
    auto context = std::make_unique<ga_context>(c);
    if (ga::Log* const log = context->log())
      log->call(
          "ga_context_create",
          [&] {
            log->note("build", ga_build_info());
            ga::each_ignored_variable([&](const char* name, const char* value,
                                          const char* expected) {
              log->note("ignored",
                        (std::string(name) + "=" + value + " (expected " + expected + ")").c_str());
            });
          },
          start);
    *out = context.release();
  });
}

void ga_context_destroy(ga_context* ctx) {
  if (ctx && ctx->is_of_this_process()) delete ctx;
}

ga_status ga_synchronize(ga_context* ctx) {
  return ask(ctx, [&] { ctx->model.backend->wait(); });
}

ga_status ga_context_set_stream(ga_context* ctx, void* stream) {
  return ask(ctx, [&] { ctx->configuration->set_stream(stream); });
}

ga_status ga_memory_init(ga_memory* out, size_t struct_size) {
  return init_zeros(out, struct_size, "ga_memory");
}

ga_status ga_context_memory(const ga_context* ctx, ga_memory* out) {
  return ask(ctx, [&] {
    check_out(out, "ga_memory");
    write_struct(out, ctx->memory());
  });
}

ga_status ga_context_set_accum_steps(ga_context* ctx, int64_t accum_steps) {
  return on(ctx, [&] {
    ctx->note("accum_steps", static_cast<double>(accum_steps));
    ctx->model.length.set(accum_steps);
  });
}

ga_status ga_context_set_accum_schedule(ga_context* ctx, const int64_t* from_steps,
                                        const int64_t* accum_steps, size_t count) {
  return on(ctx, [&] { ctx->model.length.set_schedule(from_steps, accum_steps, count); });
}

ga_status ga_context_set_steps(ga_context* ctx, int64_t steps) {
  return on(ctx, [&] { ctx->configuration->set_steps(steps); });
}

ga_status ga_clip_init(ga_clip* out, size_t struct_size) {
  return guard([&] { init_struct(out, struct_size, ga::default_clip(), "ga_clip"); });
}

ga_status ga_context_set_clip(ga_context* ctx, const ga_clip* clip) {
  return on(ctx, [&] {
    set_struct(clip, ga::default_clip, "ga_clip",
               [&](const ga_clip* c) { ctx->configuration->set_clip(c); });
  });
}

ga_status ga_context_clip(const ga_context* ctx, ga_clip* out) {
  return ask(ctx, [&] {
    check_out(out, "ga_clip");
    write_struct(out, ctx->model.params.clip);
  });
}

ga_status ga_loss_scaler_init(ga_loss_scaler* out, size_t struct_size) {
  return guard([&] { init_struct(out, struct_size, ga::default_loss_scaler(), "ga_loss_scaler"); });
}

ga_status ga_context_set_loss_scaler(ga_context* ctx, const ga_loss_scaler* scaler) {
  return on(ctx, [&] {
    set_struct(scaler, ga::default_loss_scaler, "ga_loss_scaler", [&](const ga_loss_scaler* s) {
      if (s) check_reserved("ga_loss_scaler", s->reserved);
      ctx->configuration->set_loss_scaler(s);
    });
  });
}

ga_status ga_loss_scale(const ga_context* ctx, double* out_scale, const void** out_device) {
  return ask(ctx, [&] {
    if (!out_device || !ctx->configuration->device_loss_scale()) require(out_scale, "out_scale");
    if (out_scale) *out_scale = ctx->configuration->loss_scale();
    give(out_device, ctx->configuration->device_loss_scale());
  });
}

ga_status ga_ema_init(ga_ema* out, size_t struct_size) {
  return guard([&] { init_struct(out, struct_size, ga::default_ema(), "ga_ema"); });
}

ga_status ga_context_set_ema(ga_context* ctx, const ga_ema* ema) {
  return on(ctx, [&] {
    set_struct(ema, ga::default_ema, "ga_ema", [&](const ga_ema* e) { ctx->averages->set(e); });
  });
}

ga_status ga_ema_swap(ga_context* ctx, int32_t on) {
  return ask(ctx, [&] {
    ctx->note("on", on);
    ctx->averages->swap(flag("on", on));
  });
}

ga_status ga_prepare(ga_context* ctx) {
  return on(ctx, [&] { ctx->make_arrays(); });
}

}  // extern "C"
