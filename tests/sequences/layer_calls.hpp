// SPDX-License-Identifier: Apache-2.0
//
// Calls on layers with batch normalisation.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include "gradaccum/gradaccum.h"
#include "sequences/step_calls.hpp"

namespace ga::test::sequences {

class LayerCalls : public StepCalls {
 public:
  using StepCalls::StepCalls;

 protected:
  void bn_add(World& w) {
    if (w.model->layers().size() >= 2) return;
    ga_bn_options o;
    ga_bn_options_init(&o, sizeof o, chance(0.3) ? GA_FLAVOR_KERAS : GA_FLAVOR_TORCH);
    o.mode = chance(0.5) ? GA_BN_CUMULATIVE : GA_BN_MICRO;
    o.momentum = chance(0.03) ? 1.5 : pick({0.1, 0.5, 1});
    ga_param chosen[2] = {-1, -1};
    int64_t channels = 1 + below(3);
    for (size_t i = 0; i < w.model->params().size(); ++i) {
      const Param& p = w.model->params()[i];
      if (p.dtype != GA_F32 || p.count > 3 || p.count < 1 || chance(0.2)) continue;
      if (p.maximum && !chance(0.03)) continue;
      if (chosen[0] < 0) {
        chosen[0] = static_cast<ga_param>(i);
        channels = p.count;
      } else if (p.count == channels) {
        chosen[1] = static_cast<ga_param>(i);
      }
    }
    if (chance(0.04)) channels = pick<int64_t>({0, 4});
    const Statuses want = w.model->bn_add(channels, chosen[0], chosen[1], o);
    const std::string name = "bn" + std::to_string(names_++);
    SAY("%d: ga_bn_add(channels %lld, gamma %d, beta %d, mode %d, layout %d, biased %d, momentum "
        "%g)",
        number_of(w), static_cast<long long>(channels), chosen[0], chosen[1], o.mode, o.layout,
        o.biased, o.momentum);
    check("ga_bn_add", want,
          ga_bn_add(w.ctx, name.c_str(), channels, chosen[0], chosen[1], &o, nullptr));
  }

  struct BnData {
    const void* x;
    int64_t samples, positions;
  };

  BnData bn_data(int64_t channels) {
    BnData d = {nullptr, 1 + below(3), 1 + below(2)};
    const int64_t count = d.samples * d.positions * channels;
    void* const x = take(count * 4);
    const double shift = static_cast<double>(below(5)) - 2;
    for (int64_t i = 0; i < count; ++i)
      store(x, GA_F32, i, shift + 0.5 * static_cast<double>(below(13) - 6));
    d.x = x;
    return d;
  }

  // Returns the input of the last statistics, or a new one.
  BnData bn_input(World& w, size_t k) {
    const Layer& layer = w.model->layers()[k];
    auto& last = bn_last_[static_cast<size_t>(number_of(w))][k];
    BnData d = last.x && chance(0.35) ? last : bn_data(layer.channels);
    if (w.model->near_earlier_statistics(static_cast<ga_bn>(k), list_of(d, layer.channels),
                                         d.samples, d.positions) &&
        last.x)
      d = last;
    return d;
  }
  static std::vector<double> list_of(const BnData& d, int64_t channels) {
    std::vector<double> list;
    for (int64_t i = 0; i < d.samples * d.positions * channels; ++i)
      list.push_back(load(d.x, GA_F32, i));
    return list;
  }

  void compare_tensor(const char* what, const void* got, const std::vector<ga::ref::Near>& want) {
    for (size_t i = 0; i < want.size() && difference_.empty(); ++i) {
      const double x = load(got, GA_F32, static_cast<int64_t>(i));
      if (!want[i].holds(x))
        differ(text("%s[%zu] is %.9g, expected %.9g +- %.3g", what, i, x, want[i].value,
                    want[i].tolerance));
    }
  }
  bool unknown(const World& w, ga_param p) const {
    return p >= 0 && w.model->params()[static_cast<size_t>(p)].unknown;
  }

  void bn_call(World& w) {
    const size_t layers = w.model->layers().size();
    if (layers == 0) return bn_add(w);
    const auto k = static_cast<size_t>(below(static_cast<int64_t>(layers)));
    const auto bn = static_cast<ga_bn>(k);
    const auto kind = below(20);
    if (kind < 9) return bn_forward(w, bn);
    if (kind < 15) return bn_backward(w, bn);
    const Layer& layer = w.model->layers()[k];
    if (kind == 15) {
      const BnData d = bn_input(w, k);
      if (w.model->near_earlier_statistics(bn, list_of(d, layer.channels), d.samples, d.positions))
        return;
      const ga_bn given = chance(0.05) ? 7 : bn;
      const Statuses want = w.model->bn_accumulate(given, d.x, d.samples, d.positions);
      SAY("%d: ga_bn_accumulate(%d,%s)", number_of(w), given,
          describe(d.x, GA_F32, d.samples * d.positions * layer.channels).c_str());
      if (check("ga_bn_accumulate", want,
                ga_bn_accumulate(w.ctx, given, d.x, d.samples, d.positions)))
        bn_last_[static_cast<size_t>(number_of(w))][k] = d;
    } else if (kind == 16) {
      bn_stats(w, bn);
    } else if (kind == 17) {
      const int32_t frozen = chance(0.05) ? 2 : chance(0.4);
      const Statuses want = w.model->bn_set_frozen(bn, frozen);
      SAY("%d: ga_bn_set_frozen(%d, %d)", number_of(w), bn, frozen);
      check("ga_bn_set_frozen", want, ga_bn_set_frozen(w.ctx, bn, frozen));
    } else if (kind == 18) {
      double mean[4], variance[4];
      for (int i = 0; i < 4; ++i) {
        mean[i] = number();
        variance[i] = std::abs(number());
      }
      if (chance(0.1)) variance[0] = pick({-1.0, NAN});
      if (chance(0.1)) mean[0] = INFINITY;
      const Statuses want = w.model->bn_running_set(bn, mean, variance, 3);
      SAY("%d: ga_bn_running_set(%d)", number_of(w), bn);
      check("ga_bn_running_set", want, ga_bn_running_set(w.ctx, bn, mean, variance, GA_F64, 3));
    } else {
      bn_add(w);
    }
  }

  void bn_stats(World& w, ga_bn bn) {
    const Layer& layer = w.model->layers()[static_cast<size_t>(bn)];
    const int32_t dtype = chance(0.5) ? GA_F32 : GA_F64,
                  kind = chance(0.5) ? GA_BN_M2 : GA_BN_VARIANCE;
    void* mean = take(layer.channels * 8);
    void* spread = take(layer.channels * 8);
    const int64_t count = chance(0.05) ? -1 : 1 + below(5);
    // The mean is far from that of all other statistics, so that no two are nearly equal.
    const double base = 10 + static_cast<double>(++given_);
    for (int64_t c = 0; c < layer.channels; ++c) {
      store(mean, dtype, c, base);
      store(spread, dtype, c, count == 1 ? 0 : std::abs(number()));
    }
    if (chance(0.05)) store(spread, dtype, 0, -1);
    const void* const given = chance(0.03) ? nullptr : mean;
    const Statuses want = w.model->bn_accumulate_stats(bn, count, given, spread, kind, dtype);
    SAY("%d: ga_bn_accumulate_stats(%d, count %lld, mean %g, kind %d)", number_of(w), bn,
        static_cast<long long>(count), base, kind);
    if (check("ga_bn_accumulate_stats", want,
              ga_bn_accumulate_stats(w.ctx, bn, count, given, spread, kind, dtype)))
      bn_last_[static_cast<size_t>(number_of(w))][static_cast<size_t>(bn)].x = nullptr;
  }

  void bn_forward(World& w, ga_bn bn) {
    const auto k = static_cast<size_t>(bn);
    const Layer& layer = w.model->layers()[k];
    const BnData d = bn_input(w, k);
    if (w.model->near_earlier_statistics(bn, list_of(d, layer.channels), d.samples, d.positions))
      return;
    const int64_t count = d.samples * d.positions * layer.channels;
    const void* x = d.x;
    void* y = take(count * 4);
    int64_t samples = d.samples;
    ga_bn given = bn;
    if (chance(0.08)) {
      const auto kind = below(7);
      if (kind == 0) x = nullptr;
      if (kind == 1) x = static_cast<const char*>(x) + 1;
      if (kind == 2) y = nullptr;
      if (kind == 3 && !w.model->params().empty()) y = w.model->params()[0].data;
      if (kind == 4 && count > 1) y = const_cast<char*>(static_cast<const char*>(x) + 4);
      if (kind == 5) samples = -1;
      if (kind == 6) given = pick<ga_bn>({-1, 9});
    }
    std::vector<ga::ref::Near> wanted;
    const Statuses want = w.model->bn_forward(given, x, samples, d.positions, y, wanted);
    SAY("%d: ga_bn_forward(%d, %lld x %lld,%s)", number_of(w), given,
        static_cast<long long>(samples), static_cast<long long>(d.positions),
        x ? describe(x, GA_F32, count).c_str() : "NULL");
    if (!check("ga_bn_forward", want, ga_bn_forward(w.ctx, given, x, samples, d.positions, y)))
      return;
    bn_last_[static_cast<size_t>(number_of(w))][k] = d;
    if (!unknown(w, layer.gamma) && !unknown(w, layer.beta)) compare_tensor("y", y, wanted);
    compare_statistics(w, bn);
  }

  // Compares the statistics that the last forward pass has normalised by.
  void compare_statistics(World& w, ga_bn bn) {
    const Layer& layer = w.model->layers()[static_cast<size_t>(bn)];
    double mean[4], variance[4];
    int64_t count = -1;
    const ga_status got = ga_bn_statistics(w.ctx, bn, mean, variance, GA_F64, &count);
    SAY("%d: ga_bn_statistics(%d)", number_of(w), bn);
    if (!check("ga_bn_statistics", layer.frozen ? ga::model::kState : 0, got)) return;
    for (size_t c = 0; c < layer.normalised_by.size(); ++c) {
      const ga::ref::Statistics& want = layer.normalised_by[c];
      equal("ga_bn_statistics: count", count, static_cast<int64_t>(want.count));
      same("ga_bn_statistics: mean", mean[c], want.mean, want.mean_error);
      same("ga_bn_statistics: variance", variance[c], want.variance(),
           (want.squares_error + 4 * ga::ref::kSumUnit * want.squares) / want.count);
    }
  }

  void bn_backward(World& w, ga_bn bn) {
    const auto k = static_cast<size_t>(bn);
    const Layer& layer = w.model->layers()[k];
    const int64_t open = w.model->open();
    if (open < 0 && chance(0.9)) return;
    // Under GA_NONFINITE_DROP_MICRO, sums that have not been checked yet are not computed again.
    const auto at = static_cast<size_t>(std::max<int64_t>(open, 0));
    const bool deferring = w.model->config().nonfinite == GA_NONFINITE_DROP_MICRO;
    if (deferring && open >= 0 && at < layer.summed.size() && layer.summed[at]) return;
    // The statistics were given, and no forward pass followed.
    if (layer.forwarded < 0 && !layer.micros.empty()) return;
    auto& last = bn_last_[static_cast<size_t>(number_of(w))][k];
    const bool right = open >= 0 && layer.forwarded == open;
    const BnData d = right ? last : bn_data(layer.channels);
    const int64_t count = d.samples * d.positions * layer.channels;
    void* const dy = take(count * 4);
    void* const dx = take(count * 4);
    for (int64_t i = 0; i < count; ++i) store(dy, GA_F32, i, number());
    if (chance(nonfinite_rate_ / 2)) store(dy, GA_F32, below(count), NAN);
    bool finite = true;
    for (int64_t i = 0; i < count; ++i) finite = finite && std::isfinite(load(dy, GA_F32, i));
    for (const double p : {0.25, 0.1}) {
      if (!chance(p)) break;
      const Statuses sums = w.model->bn_backward_accumulate(bn, d.x, dy, d.samples, d.positions);
      SAY("%d: ga_bn_backward_accumulate(%d)", number_of(w), bn);
      check("ga_bn_backward_accumulate", sums,
            ga_bn_backward_accumulate(w.ctx, bn, d.x, dy, d.samples, d.positions));
      if (!difference_.empty()) return;
    }
    std::vector<ga::ref::Near> wanted;
    const Statuses want = w.model->bn_backward(bn, d.x, dy, d.samples, d.positions, dx, wanted);
    SAY("%d: ga_bn_backward(%d, %lld x %lld,%s)", number_of(w), bn,
        static_cast<long long>(d.samples), static_cast<long long>(d.positions),
        describe(dy, GA_F32, count).c_str());
    if (!check("ga_bn_backward", want,
               ga_bn_backward(w.ctx, bn, d.x, dy, d.samples, d.positions, dx)))
      return;
    if (finite && !unknown(w, layer.gamma)) compare_tensor("dx", dx, wanted);
  }

  BnData bn_last_[2][2] = {};
};

}  // namespace ga::test::sequences
