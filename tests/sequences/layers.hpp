// SPDX-License-Identifier: Apache-2.0
//
// The model's layers with batch normalisation: which micro-batch a call applies to, and which calls
// are legal.
#pragma once

#include <cmath>
#include <cstdint>
#include <vector>

#include "gradaccum/gradaccum.h"
#include "sequences/contributions.hpp"

namespace ga::model {

class Layers : public Contributions {
 public:
  using Contributions::Contributions;

  Statuses bn_add(int64_t channels, ga_param gamma, ga_param beta, const ga_bn_options& options) {
    Statuses wrong = if_not_empty();
    if (channels < 1 || !(options.momentum >= 0 && options.momentum <= 1) || !(options.eps > 0))
      wrong |= kArgument;
    for (const ga_param id : {gamma, beta}) {
      if (id != -1 && (!has_param(id) || params_[static_cast<size_t>(id)].count != channels))
        wrong |= kArgument;
      if (has_param(id) && params_[static_cast<size_t>(id)].maximum) wrong |= kUnsupported;
    }
    if (gamma >= 0 && gamma == beta) wrong |= kArgument;
    if (options.mode != GA_BN_MICRO && deferring()) wrong |= kUnsupported;
    if (wrong) return wrong;
    Layer layer;
    layer.channels = channels;
    layer.gamma = gamma;
    layer.beta = beta;
    layer.options = options;
    layer.running.resize(static_cast<size_t>(channels));
    layers_.push_back(layer);
    return 0;
  }

  Statuses bn_set_frozen(ga_bn bn, int32_t frozen) {
    Statuses wrong = if_not_empty();
    if (!has_layer(bn) || (frozen != 0 && frozen != 1)) return wrong | kArgument;
    if (!layers_[static_cast<size_t>(bn)].micros.empty()) wrong |= kState;
    if (wrong) return wrong;
    Layer& layer = layers_[static_cast<size_t>(bn)];
    layer.frozen = frozen == 1;
    layer.forwarded = -1;
    return 0;
  }

  Statuses bn_accumulate(ga_bn bn, const void* x, int64_t samples, int64_t positions) {
    Statuses wrong = check_statistics(bn, samples, positions);
    if (!has_layer(bn) || samples < 0 || positions < 0) return wrong;
    Layer& layer = layers_[static_cast<size_t>(bn)];
    wrong |= check_tensor(layer, x, samples * positions, false);
    if (wrong) return wrong;
    if (layer.frozen) return 0;
    return take(layer, layer.moments(tensor(layer, x, samples, positions), samples, positions),
                true);
  }

  Statuses bn_accumulate_stats(ga_bn bn, int64_t count, const void* mean, const void* spread,
                               int32_t kind, int32_t dtype) {
    Statuses wrong = check_statistics(bn, count, 1);
    if ((kind != GA_BN_VARIANCE && kind != GA_BN_M2) || (dtype != GA_F32 && dtype != GA_F64) ||
        !mean || !spread || misaligned(mean, size_of(dtype)) || misaligned(spread, size_of(dtype)))
      return wrong | kArgument;
    if (!has_layer(bn)) return wrong;
    Layer& layer = layers_[static_cast<size_t>(bn)];
    std::vector<Moments> list;
    for (int64_t c = 0; c < layer.channels; ++c) {
      const double s = load(spread, dtype, c);
      if (s < 0) wrong |= kArgument;
      Moments m;
      m.count = static_cast<double>(count);
      if (count > 0) {
        m.mean = load(mean, dtype, c);
        m.squares = kind == GA_BN_M2 ? s : s * static_cast<double>(count);
      }
      m.largest = std::sqrt(static_cast<double>(m.squares));
      list.push_back(m);
    }
    if (wrong) return wrong;
    return layer.frozen ? 0 : take(layer, list, true);
  }

  Statuses bn_forward(ga_bn bn, const void* x, int64_t samples, int64_t positions, const void* y,
                      std::vector<ref::Near>& wanted) {
    Statuses wrong = check_statistics(bn, samples, positions);
    if (!has_layer(bn) || samples < 0 || positions < 0) return wrong;
    Layer& layer = layers_[static_cast<size_t>(bn)];
    const int64_t count = samples * positions * layer.channels;
    wrong |= check_tensor(layer, x, samples * positions, false);
    wrong |= check_tensor(layer, y, samples * positions, true);
    wrong |= check_overlap(layer, x, y, count);
    const int64_t index = current_micro();
    const auto it = layer.micros.find(index);
    const bool given = !layer.frozen && it != layer.micros.end() && it->second.given;
    if (given && it->second.channel[0].count != static_cast<double>(samples * positions))
      wrong |= kState;
    if (wrong) return wrong;
    const std::vector<double> list = tensor(layer, x, samples, positions);
    if (!layer.frozen && !given)
      if (const Statuses refused = take(layer, layer.moments(list, samples, positions), false))
        return refused;
    layer.forwarded = index;
    layer.forward_x = list;
    layer.forward_samples = samples;
    layer.forward_positions = positions;
    layer.normalised_by = layer.statistics_for(index);
    wanted = layer.normalised(list, samples, positions, layer.normalised_by, values(layer.gamma),
                              values(layer.beta));
    return 0;
  }

  // The shape is that of the forward pass, and x still holds what the forward pass read.
  Statuses bn_backward(ga_bn bn, const void* x, const void* dy, int64_t samples, int64_t positions,
                       const void* dx, std::vector<ref::Near>& wanted) {
    return backward(bn, x, dy, samples, positions, true, dx, wanted);
  }

  Statuses bn_backward_accumulate(ga_bn bn, const void* x, const void* dy, int64_t samples,
                                  int64_t positions) {
    std::vector<ref::Near> none;
    return backward(bn, x, dy, samples, positions, false, nullptr, none);
  }

  // mean and variance are NULL or have one number per channel.
  Statuses bn_running_set(ga_bn bn, const double* mean, const double* variance, int64_t steps) {
    Statuses wrong = if_not_empty();
    if (!has_layer(bn) || !mean || !variance || steps < 0) return wrong | kArgument;
    Layer& layer = layers_[static_cast<size_t>(bn)];
    if (!layer.micros.empty()) wrong |= kState;
    for (size_t c = 0; c < layer.running.size(); ++c)
      if (!std::isfinite(mean[c]) || !std::isfinite(variance[c]) || variance[c] < 0)
        wrong |= kArgument;
    if (wrong) return wrong;
    for (size_t c = 0; c < layer.running.size(); ++c)
      layer.running[c] = {{mean[c], 0}, {variance[c], 0}, steps};
    return 0;
  }

  // Whether the micro-batch already has statistics that equal those of x up to rounding. Only the
  // library's own bits decide then whether a call with x is refused.
  bool near_earlier_statistics(ga_bn bn, const std::vector<double>& x, int64_t samples,
                               int64_t positions) const {
    const Layer& layer = layers_[static_cast<size_t>(bn)];
    const auto it = layer.micros.find(current_micro());
    if (it == layer.micros.end() || open_ >= 0) return false;
    const std::vector<Moments> now = layer.moments(x, samples, positions);
    if (it->second.channel == now) return false;
    for (size_t c = 0; c < now.size(); ++c) {
      const Moments &a = it->second.channel[c], &b = now[c];
      if (a.count != b.count || std::abs(a.mean - b.mean) > 0.01 ||
          std::abs(a.squares - b.squares) > 0.01)
        return false;
    }
    return true;
  }

 private:
  // writes: the pass computes dx, and the sums if they have not been added yet. Otherwise the pass
  // computes the sums alone.
  Statuses backward(ga_bn bn, const void* x, const void* dy, int64_t samples, int64_t positions,
                    bool writes, const void* dx, std::vector<ref::Near>& wanted) {
    Statuses wrong = open_ < 0 ? kState : 0;
    if (!has_layer(bn) || samples < 0 || positions < 0) return wrong | kArgument;
    if (wrong) return wrong;
    Layer& layer = layers_[static_cast<size_t>(bn)];
    const bool read = open_micro().weight > 0;
    const int64_t count = samples * positions * layer.channels;
    const auto index = static_cast<size_t>(open_);
    const bool summing = index >= layer.summed.size() || !layer.summed[index];
    if (!writes && !summing) wrong |= kState;
    if (!layer.frozen && (layer.forwarded != open_ ||
                          samples * positions != layer.forward_samples * layer.forward_positions))
      wrong |= kState;
    if (read) {
      wrong |= check_tensor(layer, x, samples * positions, false);
      wrong |= check_tensor(layer, dy, samples * positions, false);
    }
    if (writes) {
      wrong |= check_tensor(layer, dx, samples * positions, true);
      if (read) wrong |= check_overlap(layer, x, dx, count) | check_overlap(layer, dy, dx, count);
    }
    bool contributing = false;
    for (const ga_param id : {layer.gamma, layer.beta}) {
      if (id < 0 || !summing) continue;
      wrong |= check_part(id);
      contributing = contributing || !params_[static_cast<size_t>(id)].frozen;
    }
    if (wrong) return wrong;
    wanted.assign(static_cast<size_t>(count), {});
    if (read) {
      if (contributing && duplicate_masters()) return kState;
      const std::vector<double> lx = tensor(layer, x, samples, positions),
                                ldy = tensor(layer, dy, samples, positions);
      const auto by = layer.frozen ? layer.statistics_for(open_) : layer.normalised_by;
      const auto sums = layer.sums(lx, ldy, samples, positions, by);
      wanted = layer.derivative(lx, ldy, samples, positions, by, sums, values(layer.gamma));
      if (summing) deliver_sums(layer, sums);
    }
    if (layer.summed.size() <= index) layer.summed.resize(index + 1);
    layer.summed[index] = true;
    return 0;
  }

  // The micro-batch that statistics and forward passes belong to.
  int64_t current_micro() const { return open_ >= 0 ? open_ : size(); }

  std::vector<double> values(ga_param id) const {
    std::vector<double> list;
    if (id < 0) return list;
    const Param& p = params_[static_cast<size_t>(id)];
    for (int64_t i = 0; i < p.count; ++i) list.push_back(load(p.data, p.dtype, i));
    return list;
  }

  std::vector<double> tensor(const Layer& layer, const void* x, int64_t samples,
                             int64_t positions) const {
    std::vector<double> list;
    for (int64_t i = 0; i < samples * positions * layer.channels; ++i)
      list.push_back(load(x, layer.options.dtype, i));
    return list;
  }

  Statuses check_statistics(ga_bn bn, int64_t samples, int64_t positions) const {
    Statuses wrong = (open_ < 0 && full() ? kFull : 0) | (failed_ ? kState : 0);
    if (!has_layer(bn) || samples < 0 || positions < 0) wrong |= kArgument;
    return wrong;
  }

  Statuses check_tensor(const Layer& layer, const void* data, int64_t elements,
                        bool written) const {
    if (elements == 0) return 0;
    const int64_t size = size_of(layer.options.dtype);
    if (!data || misaligned(data, size)) return kArgument;
    return written && is_param({data, elements * layer.channels * size}) ? kArgument : 0;
  }

  static Statuses check_overlap(const Layer& layer, const void* in, const void* out,
                                int64_t count) {
    const int64_t bytes = count * size_of(layer.options.dtype);
    return in != out && Range(in, bytes).overlaps({out, bytes}) ? kArgument : 0;
  }

  Statuses take(Layer& layer, const std::vector<Moments>& list, bool given) {
    const int64_t index = current_micro();
    if (open_ < 0 && layer.micros.count(index) > 0) return layer.differs(index, list) ? kState : 0;
    layer.micros[index] = {list, given};
    if (given) layer.forwarded = -1;
    return 0;
  }
};

}  // namespace ga::model
