// SPDX-License-Identifier: Apache-2.0
// A window: gradients, and the step at its end.
#include "api/call.hpp"
#include "step/step.hpp"

using namespace ga::api;

namespace {

ga_micro_options read_micro(const ga_micro_options* options) {
  const auto o = read_struct(options, zeros<ga_micro_options>(), "ga_micro_options");
  check_reserved("ga_micro_options", o.reserved);
  return o;
}

}  // namespace

extern "C" {

ga_status ga_micro_options_init(ga_micro_options* out, size_t struct_size) {
  return init_zeros(out, struct_size, "ga_micro_options");
}

ga_status ga_accumulate(ga_context* ctx, const void* const* gradients, size_t count, double weight,
                        const ga_micro_options* options) {
  return on(ctx, [&] {
    ctx->note("count", static_cast<double>(count));
    ctx->note("weight", weight);
    ctx->accumulator.accumulate(gradients, count, weight, read_micro(options));
  });
}

ga_status ga_micro_begin(ga_context* ctx, int64_t index, double weight,
                         const ga_micro_options* options) {
  return on(ctx, [&] {
    ctx->note("index", static_cast<double>(index));
    ctx->note("weight", weight);
    ctx->accumulator.micro_begin(index, weight, read_micro(options));
  });
}

ga_status ga_accumulate_part(ga_context* ctx, ga_param param, const void* gradient) {
  return contribute(ctx, [&] {
    ctx->note("param", param);
    ctx->accumulator.accumulate_part(param, gradient);
  });
}

ga_status ga_accumulate_rows(ga_context* ctx, ga_param param, const void* indices,
                             ga_dtype index_dtype, int64_t count, const void* values) {
  return on(ctx, [&] {
    ctx->note("param", param);
    ctx->note("count", static_cast<double>(count));
    ctx->accumulator.accumulate_rows(param, indices, index_dtype, count, values);
  });
}

ga_status ga_accumulate_matmul(ga_context* ctx, ga_param param, int64_t k, const void* a,
                               int64_t lda, ga_transpose transpose_a, const void* b, int64_t ldb,
                               ga_transpose transpose_b, ga_dtype dtype) {
  return on(ctx, [&] {
    ctx->note("param", param);
    ctx->note("k", static_cast<double>(k));
    const bool turn_a = flag("transpose_a", transpose_a), turn_b = flag("transpose_b", transpose_b);
    ctx->accumulator.accumulate_matmul(param, k, a, lda, turn_a, b, ldb, turn_b, dtype);
  });
}

ga_status ga_accumulator_init(ga_accumulator* out, size_t struct_size) {
  return init_zeros(out, struct_size, "ga_accumulator");
}

ga_status ga_accumulator_acquire(ga_context* ctx, ga_param param, ga_accumulator* out) {
  return on(ctx, [&] {
    check_out(out, "ga_accumulator");
    write_struct(out, ctx->accumulator.acquire(param));
  });
}

ga_status ga_accumulator_release(ga_context* ctx, ga_param param) {
  return on(ctx, [&] {
    ctx->note("param", param);
    ctx->accumulator.release(param);
  });
}

ga_status ga_micro_end(ga_context* ctx) {
  return on(ctx, [&] { ctx->accumulator.micro_end(); });
}

ga_status ga_params_ready(ga_context* ctx, const ga_param* params, size_t count) {
  return contribute(ctx, [&] {
    ctx->note("count", static_cast<double>(count));
    if (count > 0) require(params, "params");
    ctx->accumulator.params_ready({params, count});
  });
}

ga_status ga_micro_abort(ga_context* ctx) {
  return on(ctx, [&] { ctx->micro_abort(); });
}

ga_status ga_kept_info_init(ga_kept_info* out, size_t struct_size) {
  return init_zeros(out, struct_size, "ga_kept_info");
}

ga_status ga_gradients_kept(const ga_context* ctx, int64_t since, ga_kept_info* out) {
  return ask(ctx, [&] {
    check_out(out, "ga_kept_info");
    write_struct(out, ctx->accumulator.kept(since));
  });
}

ga_status ga_window_info_init(ga_window_info* out, size_t struct_size) {
  return init_zeros(out, struct_size, "ga_window_info");
}

ga_status ga_window(const ga_context* ctx, ga_window_info* out) {
  return ask(ctx, [&] {
    check_out(out, "ga_window_info");
    write_struct(out, const_cast<ga_context*>(ctx)->step->window());  // which may look up K
  });
}

ga_status ga_step_result_init(ga_step_result* out, size_t struct_size) {
  return init_zeros(out, struct_size, "ga_step_result");
}

ga_status ga_step(ga_context* ctx, ga_step_result* out) {
  return on(ctx, [&] {
    if (out) check_out(out, "ga_step_result");
    const ga_step_result r = ctx->step->step();
    ctx->note("outcome", r.outcome);
    ctx->note("micro_batches", static_cast<double>(r.micro_batches));
    ctx->note("weight", r.weight);
    ctx->note("norm", r.norm);
    ctx->note("lr", r.lr);
    if (out) write_struct(out, r);
  });
}

ga_status ga_step_result_get(ga_context* ctx, int64_t window, int32_t wait, ga_step_result* out) {
  return ask(ctx, [&] {
    check_out(out, "ga_step_result");
    ga_step_result r = {};
    if (!ctx->step->result(window, flag("wait", wait), r)) r = ga::Step::pending();
    write_struct(out, r);
  });
}

ga_status ga_discard(ga_context* ctx) {
  return on(ctx, [&] { ctx->step->discard(); });
}

ga_status ga_gradient(ga_context* ctx, ga_param param, const void** out_data, ga_dtype* out_dtype,
                      int64_t* out_count) {
  return ask(ctx, [&] {
    require(out_data, "out_data");
    *out_data = ctx->step->gradient(param, out_dtype, out_count);
  });
}

}  // extern "C"
