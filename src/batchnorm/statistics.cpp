// SPDX-License-Identifier: Apache-2.0
// Statistics that the program asks for, or sets.
#include <algorithm>
#include <cmath>

#include "batchnorm/layer.hpp"
#include "core/error.hpp"

namespace ga {
namespace {

void set_element(void* data, int32_t dtype, int64_t i, double x) {
  if (dtype == GA_F64)
    static_cast<double*>(data)[i] = x;
  else
    static_cast<float*>(data)[i] = static_cast<float>(x);
}

// Copies a field of every channel to an array of the program; out NULL: does nothing.
void copy_out(const std::vector<BnChannel>& state, double BnChannel::*field, void* out,
              int32_t dtype) {
  for (size_t c = 0; out && c < state.size(); ++c)
    set_element(out, dtype, static_cast<int64_t>(c), state[c].*field);
}

}  // namespace

std::vector<BnChannel> BatchNorms::read(const Layer& b) const {
  std::vector<BnChannel> state(static_cast<size_t>(b.channels));
  model_.backend->read(state.data(), b.state, state.size() * sizeof(BnChannel));
  return state;
}

void BatchNorms::running(ga_bn id, void* mean, void* variance, int32_t dtype,
                         int64_t* steps) const {
  const Layer& b = layer(id);
  check_statistics_dtype(b.subject(), dtype);
  const std::vector<BnChannel> state = read(b);
  copy_out(state, &BnChannel::running_mean, mean, dtype);
  copy_out(state, &BnChannel::running_variance, variance, dtype);
  if (!steps) return;
  *steps = 0;
  for (const BnChannel& channel : state) *steps = std::max(*steps, channel.steps);
}

void BatchNorms::set_running(ga_bn id, const void* mean, const void* variance, int32_t dtype,
                             int64_t steps) {
  model_.window.check_empty("ga_bn_running_set");
  Layer& b = layer_for_work(id);
  b.require_unused("ga_bn_running_set");
  const Subject of = b.subject();
  check_statistics_dtype(of, dtype);
  if (!mean || !variance)
    of.fail(GA_ERROR_INVALID_ARGUMENT, "%s was NULL", mean ? "variance" : "mean");
  if (steps < 0) of.fail(GA_ERROR_INVALID_ARGUMENT, "steps was %lld, expected >= 0", ll(steps));
  std::vector<BnChannel> state = read(b);
  for (int64_t c = 0; c < b.channels; ++c) {
    const double m = element(mean, dtype, c), v = element(variance, dtype, c);
    if (!std::isfinite(m))
      of.fail(GA_ERROR_INVALID_ARGUMENT, "mean[%lld] was %g, expected a finite number", ll(c), m);
    if (!(v >= 0) || !std::isfinite(v))
      of.fail(GA_ERROR_INVALID_ARGUMENT, "variance[%lld] was %g, expected a finite number >= 0",
              ll(c), v);
    BnChannel& channel = state[static_cast<size_t>(c)];
    channel.running_mean = m;
    channel.running_variance = v;
    channel.steps = steps;
  }
  model_.backend->write(b.state, state.data(), state.size() * sizeof(BnChannel));
}

void BatchNorms::statistics(ga_bn id, void* mean, void* variance, int32_t dtype,
                            int64_t* count) const {
  const Layer& b = layer(id);
  const Subject of = b.subject("ga_bn_statistics");
  check_statistics_dtype(of, dtype);
  if (!b.frozen && b.windowed() && b.index >= 0 && !b.final)
    of.fail(GA_ERROR_INVALID_STATE, "ga_bn_finalize is due");
  if (b.frozen || (b.index < 0 && !b.final))
    of.fail(GA_ERROR_INVALID_STATE, "%s",
            b.frozen ? "it is frozen and normalises by its running statistics"
                     : "it has no statistics in this window");
  const std::vector<BnChannel> state = read(b);
  if (state[0].count == 0 && b.index >= 0 && b.has(b.index) && b.taken_of(b.index).count > 0)
    of.fail(GA_ERROR_INVALID_STATE,
            "micro-batch %lld, whose statistics it uses, had an infinite or NaN gradient and was "
            "dropped",
            ll(b.index));
  copy_out(state, &BnChannel::mean, mean, dtype);
  copy_out(state, &BnChannel::variance, variance, dtype);
  if (count) *count = static_cast<int64_t>(state[0].count);
}

}  // namespace ga
