// SPDX-License-Identifier: Apache-2.0
//
// The call that ends a window, and the comparison of everything that it updates.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include "gradaccum/gradaccum.h"
#include "sequences/gradient_calls.hpp"

namespace ga::test::sequences {

class StepCalls : public GradientCalls {
 public:
  using GradientCalls::GradientCalls;

 protected:
  void step(World& w) {
    auto got = to_fill<ga_step_result>();
    if (chance(0.03)) {
      got.struct_size = 16;
      SAY("%d: ga_step() with a wrong size", number_of(w));
      check("ga_step", ga::model::kArgument | (w.model->open() >= 0 ? ga::model::kState : 0),
            ga_step(w.ctx, &got));
      return;
    }
    StepResult want;
    const Statuses statuses = w.model->step(want);
    const bool asked = chance(0.9);
    SAY("%d: ga_step(%s)", number_of(w), asked ? "" : "NULL");
    if (!check("ga_step", statuses, ga_step(w.ctx, asked ? &got : nullptr))) return;
    if (!asked && ga_step_result_get(w.ctx, 0, 1, &got) != GA_OK)
      return differ("ga_step_result_get failed");
    w.last = got;
    if (want.out_of_range) {
      over_ = true;
      return;
    }
    compare(got, want);
    if (!difference_.empty()) return;
    for (size_t i = 0; i < w.model->params().size(); ++i) compare(i, w.model->params()[i]);
    if (!difference_.empty()) return;
    for (size_t i = 0; i < w.model->params().size(); ++i)
      if (w.model->params()[i].external) compare_gradient(w, static_cast<ga_param>(i));
    if (!difference_.empty()) return;
    if (want.outcome == GA_STEP_APPLIED) {
      w.model->update_emas();
      if (w.model->keeps_emas())
        for (size_t i = 0; i < w.model->params().size(); ++i)
          if (!w.model->params()[i].removed) compare_ema(w, static_cast<ga_param>(i));
    }
    for (size_t k = 0; k < w.model->layers().size(); ++k) compare_running(w, k);
  }

  void compare(const ga_step_result& got, const StepResult& want) {
    if (verbose_)
      log_.back() += text(" outcome %d weight %g norm %g", got.outcome, got.weight, got.norm);
    equal("result: outcome", got.outcome, want.outcome);
    equal("result: windows", got.windows, want.windows);
    equal("result: steps", got.steps, want.steps);
    equal("result: micro_batches", got.micro_batches, want.micro_batches);
    equal("result: skipped", got.skipped, want.skipped);
    equal("result: dropped", got.dropped, want.dropped);
    equal("result: window_dropped", got.window_dropped, want.window_dropped);
    same("result: weight", got.weight, want.weight, std::abs(want.weight) * 0x1p-48);
    same("result: loss_scale", got.loss_scale, want.loss_scale, std::abs(want.loss_scale) * 1e-14);
    same("result: lr", got.lr, want.lr, 1e-12);
    if (!want.norm_known) return;
    if (want.outcome == GA_STEP_SKIPPED_NONFINITE && std::isnan(want.norm.value)) {
      if (std::isfinite(got.norm)) differ(text("result: norm is %g, expected none", got.norm));
      return;
    }
    if (!(want.unmeasured && std::isnan(got.norm)))
      same("result: norm", got.norm, want.norm.value,
           ga::ref::tolerance(want.norm) + want.norm.value * 1e-14);
    if (want.outcome == GA_STEP_APPLIED)
      same("result: clip_factor", got.clip_factor, want.clip_factor.value,
           ga::ref::tolerance(want.clip_factor) + want.clip_factor.value * 1e-14);
  }

  // Compares a parameter after a step.
  void compare(size_t index, const Param& p) {
    if (!p.moved) return;
    const ga::ref::With arithmetic(p.arithmetic());
    for (int64_t i = 0; i < p.count; ++i) {
      const auto k = static_cast<size_t>(i);
      const Real& want = p.wanted[k];
      const double got = load(p.data, p.dtype, i);
      const double tolerance = p.written[k] ? ga::ref::tolerance(want) : 0;
      double low = want.value - tolerance, high = want.value + tolerance;
      if (p.dtype == GA_BF16) {
        low = ga::model::through_bf16(low);
        high = ga::model::through_bf16(high);
      }
      if (!p.unknown && !(got >= low && got <= high) && difference_.empty())
        differ(text("parameter %zu[%lld]%s is %.17g, expected %.17g +- %.3g", index,
                    static_cast<long long>(i), p.has_master ? " with master weights" : "", got,
                    want.value, tolerance));
    }
    const auto at = static_cast<size_t>(static_cast<char*>(p.data) - memory_.data());
    const auto bytes = static_cast<size_t>(p.count * size_of(p.dtype));
    memcpy(shadow_.data() + at, memory_.data() + at, bytes);
  }

  // Asks for the gradient that the last step delivered, and compares it.
  void compare_gradient(World& w, ga_param id) {
    const void* data = nullptr;
    int32_t dtype = 0;
    int64_t count = -1;
    const Statuses want = w.model->gradient(id);
    SAY("%d: ga_gradient(%d)", number_of(w), id);
    if (!check("ga_gradient", want, ga_gradient(w.ctx, id, &data, &dtype, &count))) return;
    const Param& p = w.model->params()[static_cast<size_t>(id)];
    equal("ga_gradient: dtype", dtype, p.dtype == GA_F64 ? GA_F64 : GA_F32);
    equal("ga_gradient: count", count, p.count);
    if (p.unknown || !difference_.empty()) return;
    const ga::ref::With arithmetic(p.arithmetic());
    for (int64_t i = 0; i < count; ++i) {
      const Real& x = p.wanted[static_cast<size_t>(i)];
      same(p.maximum ? "ga_gradient: maximum" : "ga_gradient: element", load(data, dtype, i),
           x.value, std::isfinite(x.value) ? ga::ref::tolerance(x) : 0);
    }
  }
  void ask_gradient(World& w) { compare_gradient(w, any_param(w)); }

  void compare_ema(World& w, ga_param id) {
    const Param& p = w.model->params()[static_cast<size_t>(id)];
    if (p.unknown) return;
    const int32_t dtype = p.dtype == GA_F64 ? GA_F64 : chance(0.8) ? GA_F32 : GA_BF16;
    double buffer[64];
    if (ga_ema_copy_to(w.ctx, id, buffer, dtype) != GA_OK) return differ("ga_ema_copy_to failed");
    const ga::ref::With arithmetic(p.arithmetic());
    for (int64_t i = 0; i < p.count && difference_.empty(); ++i) {
      if (!p.ema_started && p.has_master && p.allocated) continue;
      const Real want =
          p.ema_started ? p.ema[static_cast<size_t>(i)] : ga::ref::exact(load(p.data, p.dtype, i));
      if (!std::isfinite(want.value))
        continue;  // another context shares the memory and has written NaN
      const double got = load(buffer, dtype, i), tolerance = ga::ref::tolerance(want);
      double low = want.value - tolerance, high = want.value + tolerance;
      if (dtype == GA_BF16) {
        low = ga::model::through_bf16(low);
        high = ga::model::through_bf16(high);
      }
      if (!(got >= low && got <= high))
        differ(text("EMA of parameter %d[%lld] is %.17g, expected %.17g +- %.3g", id,
                    static_cast<long long>(i), got, want.value, tolerance));
    }
  }

  void compare_running(World& w, size_t k) {
    const Layer& layer = w.model->layers()[k];
    double mean[4], variance[4];
    int64_t steps = -1;
    if (ga_bn_running(w.ctx, static_cast<ga_bn>(k), mean, variance, GA_F64, &steps) != GA_OK)
      return differ("ga_bn_running failed");
    for (size_t c = 0; c < layer.running.size() && difference_.empty(); ++c) {
      const ga::ref::BnRunning& want = layer.running[c];
      if (!want.mean.holds(mean[c]))
        differ(text("layer %zu: running mean[%zu] is %.17g, expected %.17g +- %.3g", k, c, mean[c],
                    want.mean.value, want.mean.tolerance));
      if (!want.variance.holds(variance[c]))
        differ(text("layer %zu: running variance[%zu] is %.17g, expected %.17g +- %.3g", k, c,
                    variance[c], want.variance.value, want.variance.tolerance));
      if (steps != want.steps)
        differ(text("layer %zu: running steps are %lld, expected %lld", k,
                    static_cast<long long>(steps), static_cast<long long>(want.steps)));
    }
  }

  // Saves the context and, where that is legal, loads it from what was saved. The model stays as it is.
  // (A save ends the life of a live gradient early, which the model does not predict.)
  void save_and_load(World& w) {
    const bool live = w.model->config().gradient_life != GA_GRADIENTS_CONSUMED;
    if (live && !w.model->empty()) return;
    const Statuses closed = w.model->open() >= 0 ? ga::model::kState : 0;
    size_t size = 0;
    SAY("%d: ga_save_to_memory()", number_of(w));
    if (!check("ga_save_to_memory", closed, ga_save_to_memory(w.ctx, nullptr, nullptr, 0, &size)))
      return;
    std::vector<char> bytes(size);
    check("ga_save_to_memory", 0, ga_save_to_memory(w.ctx, nullptr, bytes.data(), size, &size));
    bool empty = w.model->empty();
    for (const Layer& layer : w.model->layers()) empty = empty && layer.micros.empty();
    SAY("%d: ga_load_from_memory(%zu bytes)", number_of(w), size);
    if (check("ga_load_from_memory", empty ? 0 : ga::model::kState,
              ga_load_from_memory(w.ctx, bytes.data(), size, nullptr)))
      w.model->load_state();
    ask_gradient(w);
  }

  void ask_result(World& w) {
    const ga_window_info info = w.model->window();
    const int64_t number = pick<int64_t>({0, info.windows, info.windows + 1, -1});
    auto got = to_fill<ga_step_result>();
    const bool known = number >= 0 && number <= info.windows && info.windows > 0;
    SAY("%d: ga_step_result_get(%lld)", number_of(w), static_cast<long long>(number));
    if (!check("ga_step_result_get", known ? 0 : ga::model::kArgument,
               ga_step_result_get(w.ctx, number, 1, &got)))
      return;
    if (memcmp(&got, &w.last, sizeof got) != 0) differ("ga_step_result_get gave another result");
  }
};

}  // namespace ga::test::sequences
