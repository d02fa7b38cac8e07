// SPDX-License-Identifier: Apache-2.0
// Layers with batch normalisation.
#include "batchnorm/batchnorm.hpp"

#include "api/call.hpp"
#include "batchnorm/batchnorm.hpp"

using namespace ga::api;
using ga::fail;
using ga::guard;

namespace {

void note_shape(const ga::Context* ctx, ga_bn bn, int64_t samples, int64_t positions) {
  ctx->note("bn", bn);
  ctx->note("samples", static_cast<double>(samples));
  ctx->note("positions", static_cast<double>(positions));
}

}  // namespace

extern "C" {

ga_status ga_bn_options_init(ga_bn_options* out, size_t struct_size, ga_flavor flavor) {
  return guard(
      [&] { init_struct(out, struct_size, ga::default_bn_options(flavor), "ga_bn_options"); });
}

ga_status ga_bn_add(ga_context* ctx, const char* name, int64_t channels, ga_param gamma,
                    ga_param beta, const ga_bn_options* options, ga_bn* out) {
  return on(ctx, [&] {
    const ga_bn_options defaults = ga::default_bn_options(GA_FLAVOR_TORCH);
    const ga_bn_options o = read_struct(options, defaults, "ga_bn_options");
    give(out, ctx->layers->add(name, channels, gamma, beta, o));
  });
}

ga_status ga_bn_count(const ga_context* ctx, int32_t* out) {
  return ask(ctx, [&] {
    require(out, "out");
    *out = ctx->layers->count();
  });
}

ga_status ga_bn_find(const ga_context* ctx, const char* name, ga_bn* out) {
  return ask(ctx, [&] {
    require(name, "name");
    require(out, "out");
    const ga_bn bn = ctx->layers->find(name);
    if (bn < 0) fail(GA_ERROR_INVALID_ARGUMENT, "the context has no layer \"%s\"", name);
    *out = bn;
  });
}

ga_status ga_bn_info_init(ga_bn_info* out, size_t struct_size) {
  return init_zeros(out, struct_size, "ga_bn_info");
}

ga_status ga_bn_describe(const ga_context* ctx, ga_bn bn, ga_bn_info* out) {
  return ask(ctx, [&] {
    check_out(out, "ga_bn_info");
    write_struct(out, ctx->layers->info(bn));
  });
}

ga_status ga_bn_set_frozen(ga_context* ctx, ga_bn bn, int32_t frozen) {
  return on(ctx, [&] { ctx->layers->set_frozen(bn, flag("frozen", frozen)); });
}

ga_status ga_bn_accumulate(ga_context* ctx, ga_bn bn, const void* x, int64_t samples,
                           int64_t positions) {
  return on(ctx, [&] {
    note_shape(ctx, bn, samples, positions);
    ctx->layers->accumulate(bn, x, samples, positions);
  });
}

ga_status ga_bn_accumulate_stats(ga_context* ctx, ga_bn bn, int64_t count, const void* mean,
                                 const void* spread, ga_bn_spread kind, ga_dtype dtype) {
  return on(ctx, [&] { ctx->layers->accumulate_stats(bn, count, mean, spread, kind, dtype); });
}

ga_status ga_bn_finalize(ga_context* ctx, ga_bn bn) {
  return on(ctx, [&] { ctx->layers->finalize(bn); });
}

ga_status ga_bn_forward(ga_context* ctx, ga_bn bn, const void* x, int64_t samples,
                        int64_t positions, void* y) {
  return on(ctx, [&] {
    note_shape(ctx, bn, samples, positions);
    ctx->layers->forward(bn, x, samples, positions, y);
  });
}

ga_status ga_bn_backward_accumulate(ga_context* ctx, ga_bn bn, const void* x, const void* dy,
                                    int64_t samples, int64_t positions) {
  return on(ctx, [&] {
    note_shape(ctx, bn, samples, positions);
    ctx->layers->backward_accumulate(bn, x, dy, samples, positions);
  });
}

ga_status ga_bn_backward_finalize(ga_context* ctx, ga_bn bn) {
  return on(ctx, [&] { ctx->layers->backward_finalize(bn); });
}

ga_status ga_bn_backward(ga_context* ctx, ga_bn bn, const void* x, const void* dy, int64_t samples,
                         int64_t positions, void* dx) {
  return on(ctx, [&] {
    note_shape(ctx, bn, samples, positions);
    ctx->layers->backward(bn, x, dy, samples, positions, dx);
  });
}

ga_status ga_bn_infer(ga_context* ctx, ga_bn bn, const void* x, int64_t samples, int64_t positions,
                      void* y) {
  return ask(ctx, [&] {
    note_shape(ctx, bn, samples, positions);
    ctx->layers->infer(bn, x, samples, positions, y);
  });
}

ga_status ga_bn_running(ga_context* ctx, ga_bn bn, void* out_mean, void* out_variance,
                        ga_dtype dtype, int64_t* out_steps) {
  return ask(ctx, [&] { ctx->layers->running(bn, out_mean, out_variance, dtype, out_steps); });
}

ga_status ga_bn_running_set(ga_context* ctx, ga_bn bn, const void* mean, const void* variance,
                            ga_dtype dtype, int64_t steps) {
  return on(ctx, [&] { ctx->layers->set_running(bn, mean, variance, dtype, steps); });
}

ga_status ga_bn_statistics(ga_context* ctx, ga_bn bn, void* out_mean, void* out_variance,
                           ga_dtype dtype, int64_t* out_count) {
  return ask(ctx, [&] { ctx->layers->statistics(bn, out_mean, out_variance, dtype, out_count); });
}

}  // extern "C"
