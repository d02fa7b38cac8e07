// SPDX-License-Identifier: Apache-2.0
#include "model/options.hpp"

#include <cmath>

#include "core/error.hpp"
#include "core/tensor.hpp"

namespace ga {

ga_config default_config() {
  ga_config c = {};
  c.struct_size = sizeof c;
  c.loss_scale = 1;
  c.noise_smoothing = 0.9;
  return c;
}

void check_config(const ga_config& c) {
  check_choice("device", c.device, GA_DEVICE_CUDA, "ga_device");
  if (c.num_threads < 0 || c.num_threads > 4096)
    fail(GA_ERROR_INVALID_ARGUMENT, "num_threads was %d, expected 0 to 4096", c.num_threads);
  if (c.accum_steps < 0)
    fail(GA_ERROR_INVALID_ARGUMENT, "accum_steps was %lld, expected >= 0", ll(c.accum_steps));
  check_choice("gradient_kind", c.gradient_kind, GA_GRADIENT_SUM, "ga_gradient_kind");
  if (c.reduce == GA_REDUCE_MAX)
    fail(GA_ERROR_INVALID_ARGUMENT,
         "reduce was GA_REDUCE_MAX, which is for single parameters: ga_param_options.reduce");
  check_choice("reduce", c.reduce, GA_REDUCE_SUM, "ga_reduce");
  check_choice("missing", c.missing, GA_MISSING_ZERO, "ga_missing");
  check_choice("nonfinite", c.nonfinite, GA_NONFINITE_IGNORE, "ga_nonfinite");
  check_choice("gradient_life", c.gradient_life, GA_GRADIENTS_LENT, "ga_gradient_life");
  if (c.gradient_life == GA_GRADIENTS_LENT && c.nonfinite == GA_NONFINITE_DROP_MICRO)
    fail(GA_ERROR_UNSUPPORTED,
         "gradient_life was GA_GRADIENTS_LENT, which is not supported with "
         "GA_NONFINITE_DROP_MICRO: a micro-batch that is dropped must not have been added");
  check_choice("accumulation", c.accumulation, GA_ACCUMULATE_STOCHASTIC, "ga_accumulation");
  if (c.accumulation == GA_ACCUMULATE_RUNNING_MEAN &&
      (c.gradient_kind != GA_GRADIENT_MEAN || c.reduce != GA_REDUCE_MEAN))
    fail(GA_ERROR_INVALID_ARGUMENT,
         "accumulation was GA_ACCUMULATE_RUNNING_MEAN, which needs GA_GRADIENT_MEAN and "
         "GA_REDUCE_MEAN, but gradient_kind was %d and reduce %d",
         c.gradient_kind, c.reduce);
  check_choice("noise_scale", c.noise_scale, 1, "0 or 1");
  check_choice("measure_norm", c.measure_norm, 1, "0 or 1");
  check_choice("ga_config.reserved2", c.reserved2, 0, "reserved");
  if (c.device_ordinal < 0 || (c.device == GA_DEVICE_CPU && c.device_ordinal != 0))
    fail(GA_ERROR_INVALID_ARGUMENT, "device_ordinal was %d, expected %s", c.device_ordinal,
         c.device == GA_DEVICE_CPU ? "0 for GA_DEVICE_CPU" : ">= 0");
  if (c.device == GA_DEVICE_CPU && c.stream)
    fail(GA_ERROR_INVALID_ARGUMENT, "stream was %p, but device is GA_DEVICE_CPU", c.stream);
  if (!c.allocate != !c.free)
    fail(GA_ERROR_INVALID_ARGUMENT, "%s was set without %s", c.allocate ? "allocate" : "free",
         c.allocate ? "free" : "allocate");
  if (!(c.noise_smoothing >= 0 && c.noise_smoothing < 1))
    fail(GA_ERROR_INVALID_ARGUMENT, "noise_smoothing was %g, expected a number in [0, 1)",
         c.noise_smoothing);
  check_choice("eager", c.eager, 1, "0 or 1");
  if (c.eager_threads < 0 || c.eager_threads > 4096)
    fail(GA_ERROR_INVALID_ARGUMENT, "eager_threads was %d, expected 0 to 4096", c.eager_threads);
  if (c.eager_bytes < 0)
    fail(GA_ERROR_INVALID_ARGUMENT, "eager_bytes was %lld, expected >= 0", ll(c.eager_bytes));
  if (c.eager && c.device != GA_DEVICE_CPU)
    fail(GA_ERROR_UNSUPPORTED, "eager was 1, but updates ahead of ga_step are for the CPU alone");
  if (!std::isfinite(c.loss_scale) || c.loss_scale == 0)
    fail(GA_ERROR_INVALID_ARGUMENT, "loss_scale was %g, expected a finite number other than 0",
         c.loss_scale);
}

ga_ema default_ema() {
  ga_ema e = {};
  e.struct_size = sizeof e;
  e.decay = 0.999;
  e.gamma = 6.94;
  return e;
}

void check_ema(const ga_ema& e) {
  check_choice("ema: kind", e.kind, GA_EMA_KARRAS, "ga_ema_kind");
  if (e.dtype != 0 && e.dtype != GA_F32 && e.dtype != GA_BF16)
    fail(GA_ERROR_INVALID_ARGUMENT, "ema: dtype was %d, expected 0, GA_F32 or GA_BF16", e.dtype);
  if (!(e.decay >= 0 && e.decay <= 1))
    fail(GA_ERROR_INVALID_ARGUMENT, "ema: decay was %g, expected a number in [0, 1]", e.decay);
  check_rate("ema: gamma", e.gamma);
}

void Options::choose_path(const ParamList& params, const Rules& by) {
  clip_micro_ = is_of_micros(by.clip);
  for (const Group& g : by.groups) clip_micro_ = clip_micro_ || is_of_micros(by.clip_of(g));
  const bool plain = config_->accumulation == GA_ACCUMULATE_PLAIN && !config_->noise_scale;
  plain_path_ = plain && params.only_sums;
  borrows_ = plain && !deferring() && config_->gradient_life != GA_GRADIENTS_CONSUMED && alone_;
  lends_ =
      borrows_ && config_->gradient_life == GA_GRADIENTS_LENT && config_->device == GA_DEVICE_CPU;
}

}  // namespace ga
