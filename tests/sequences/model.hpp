// SPDX-License-Identifier: Apache-2.0
//
// The end of a window in the model: the result that ga_step should return, and the values that
// parameters, EMAs and running statistics should get.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <utility>
#include <vector>

#include "gradaccum/gradaccum.h"
#include "sequences/layers.hpp"

namespace ga::model {

class Model : public Layers {
 public:
  using Layers::Layers;

  // Stores the expected parameters in Param::wanted.
  Statuses step(StepResult& r) {
    if (open_ >= 0) return kState;
    for (Param& p : params_) p.moved = false;
    r = {};
    r.micro_batches = size();
    r.weight = weight();
    r.loss_scale = loss_scale();
    for (const Micro& m : micros_) r.window_dropped += m.dropped;

    if (!(r.weight > 0)) {
      r.outcome = GA_STEP_SKIPPED_EMPTY;
      r.norm = {};
      if (r.window_dropped > 0 && scaler_) scaler_->failed();
    } else {
      // A step that updates parameters without a gradient, or their EMAs, allocates their arrays.
      const bool moves_all = config_.missing == GA_MISSING_ZERO || ema_;
      if (moves_all && duplicate_masters()) return kState;
      if (moves_all) allocate_all();
      bool nonfinite = false, nonfinite_maximum = false;
      for (const Param& p : params_) {
        bool& of_kind = p.maximum ? nonfinite_maximum : nonfinite;
        of_kind = of_kind || (p.touched && p.nonfinite);
      }
      if (config_.reduce == GA_REDUCE_MEAN && out_of_weight_range(r.weight)) {
        r.outcome = GA_STEP_SKIPPED_WEIGHT;
        if (r.window_dropped > 0 && scaler_) scaler_->failed();
      } else if ((nonfinite || nonfinite_maximum) && config_.nonfinite != GA_NONFINITE_IGNORE) {
        if (config_.nonfinite == GA_NONFINITE_FAIL) {
          failed_ = true;
          return kNonfinite;
        }
        r.outcome = GA_STEP_SKIPPED_NONFINITE;
        r.norm = {NAN, 0};
        if (!nonfinite) measure(reduced(r.weight), r);  // maxima are outside of the norm
        if (scaler_) scaler_->failed();
      } else {
        apply(r, nonfinite);
        if (scaler_) {
          if (r.window_dropped > 0) {
            scaler_->failed();
          } else {
            scaler_->applied();
          }
        }
      }
    }
    ++windows_;
    if (r.outcome != GA_STEP_APPLIED) {
      forget_delivered();
      ++skipped_;
    }
    dropped_ += r.window_dropped;
    r.windows = windows_;
    r.steps = steps_;
    r.skipped = skipped_;
    r.dropped = dropped_;
    clear();
    return 0;
  }

  // Updates the EMAs from the parameters in memory, after these were compared with Param::wanted.
  void update_emas() {
    for (Param& p : params_) {
      const ref::With arithmetic(p.arithmetic());
      if (ema_ && p.allocated) {
        for (int64_t i = 0; i < p.count; ++i) {
          Real& e = p.ema[static_cast<size_t>(i)];
          const Real now = p.now(i);
          e = p.ema_started ? e + ref::scalar(1 - ema_->decay) * (now - e) : now;
        }
        p.ema_started = true;
      }
      p.moved = false;
    }
  }

  void discard() {
    if (failed_ && scaler_) scaler_->failed();
    forget_delivered();
    clear();
  }

  // A load does not bring the gradients that were delivered.
  void load_state() { forget_delivered(); }

  // Whether ga_gradient returns Param::wanted.
  Statuses gradient(ga_param id) const {
    if (!has_param(id)) return kArgument;
    const Param& p = params_[static_cast<size_t>(id)];
    return !p.external ? kArgument : p.delivered ? 0 : kState;
  }

 private:
  // Whether the step updates the parameter, or delivers its gradient. The maximum of nothing is not
  // zero.
  bool is_updated(const Param& p) const {
    return !p.frozen && (p.touched || (config_.missing == GA_MISSING_ZERO && !p.maximum));
  }

  // Whether the sum of the weights is too small or too large to divide by.
  bool out_of_weight_range(double weight) const {
    bool wide = true;
    for (const Param& p : params_)
      wide = wide && (!is_updated(p) || p.dtype == GA_F64 || p.maximum);
    return !(weight >= (wide ? 0x1p-400 : 0x1p-126) && weight <= (wide ? 0x1p400 : 0x1p127));
  }

  const ga_clip* clip_of(const Param& p) const {
    const Group& g = groups_[static_cast<size_t>(p.group)];
    return g.clip ? &*g.clip : clip_ ? &*clip_ : nullptr;
  }

  // The gradient of each parameter that is updated; of a maximum, none.
  std::vector<std::vector<Real>> reduced(double weight) const {
    std::vector<std::vector<Real>> g(params_.size());
    for (size_t i = 0; i < params_.size(); ++i) {
      const Param& p = params_[i];
      if (!is_updated(p) || p.maximum) continue;
      g[i].assign(static_cast<size_t>(p.count), Real());
      if (!p.touched) continue;
      const ref::With arithmetic(p.arithmetic());
      for (size_t j = 0; j < g[i].size(); ++j)
        g[i][j] = config_.reduce == GA_REDUCE_MEAN ? times(p.sum[j], scalar(1 / weight)) : p.sum[j];
    }
    return g;
  }

  void measure(const std::vector<std::vector<Real>>& g, StepResult& r) const {
    std::vector<Real> everything;
    for (size_t i = 0; i < g.size(); ++i)
      if (params_[i].touched) everything.insert(everything.end(), g[i].begin(), g[i].end());
    r.norm = ref::norm(everything);
    r.norm_known = squares_in_range(everything);
  }

  void apply(StepResult& r, bool nonfinite) {
    std::vector<std::vector<Real>> g = reduced(r.weight);
    measure(g, r);
    r.norm_known = r.norm_known && !nonfinite;
    r.unmeasured = config_.nonfinite == GA_NONFINITE_IGNORE;
    r.out_of_range = clips_by_norm() && !r.norm_known;
    clip_all(g, r);
    for (Param& p : params_)
      if (p.external) p.unknown = false;  // what it was about is the gradient of an earlier window
    for (size_t i = 0; i < g.size(); ++i)
      if (params_[i].dtype != GA_F64)
        for (const Real& x : g[i])
          params_[i].unknown = params_[i].unknown || std::abs(x.value) > kLargest;
    if (nonfinite)
      for (Param& p : params_)
        p.unknown = p.unknown || (!p.maximum && (p.nonfinite || clips_by_norm()));
    r.lr = groups_.empty() ? 0 : lr(0);
    const std::vector<double> rates = rates_now();
    ++steps_;
    for (size_t i = 0; i < params_.size(); ++i) {
      Param& p = params_[i];
      p.delivered = p.external && is_updated(p);
      if (p.delivered)
        deliver(p, std::move(g[i]));
      else if (is_updated(p))
        update(p, rates[static_cast<size_t>(p.group)], std::move(g[i]));
    }
    for (Layer& layer : layers_) {
      for (int64_t k = 0; k < size(); ++k)
        if (micro(k).dropped) layer.micros.erase(k);
      layer.commit(size());
    }
  }

  // Whether the squares of all reduced gradients and of all accumulated sums are in the range of
  // float64.
  bool squares_in_range(const std::vector<Real>& reduced) const {
    const auto good = [](const Real& x) {
      const double a = std::abs(x.value);
      return a == 0 || (a > 1e-140 && a < 1e140);
    };
    bool all = std::all_of(reduced.begin(), reduced.end(), good);
    for (const Param& p : params_)
      if (p.touched && !p.maximum) all = all && std::all_of(p.sum.begin(), p.sum.end(), good);
    return all;
  }

  bool clips_by_norm() const {
    bool any = clip_ && clip_->scope != GA_CLIP_NONE;
    for (const Group& g : groups_) any = any || (g.clip && g.clip->scope != GA_CLIP_NONE);
    return any;
  }

  std::vector<double> rates_now() const {
    std::vector<double> list;
    for (size_t k = 0; k < groups_.size(); ++k) list.push_back(lr(static_cast<ga_group>(k)));
    return list;
  }

  static Real least(const Real& a, const Real& b) { return -ref::max(-a, -b); }

  void clip_all(std::vector<std::vector<Real>>& g, StepResult& r) {
    // Each clip with the parameters that share its norm.
    std::vector<std::pair<const ga_clip*, std::vector<size_t>>> clips;
    for (size_t i = 0; i < params_.size(); ++i) {
      const ga_clip* const clip = clip_of(params_[i]);
      if (!clip || g[i].empty()) continue;
      const ref::With arithmetic(params_[i].arithmetic());
      if (std::isfinite(clip->max_value))
        for (Real& x : g[i])
          if (std::abs(x.value) + ref::tolerance(x) > clip->max_value)
            x = ref::clamp(x, clip->max_value);
      if (clip->scope == GA_CLIP_NONE) continue;
      const auto same = std::find_if(clips.begin(), clips.end(), [&](const auto& c) {
        return c.first == clip && clip->scope == GA_CLIP_GLOBAL;
      });
      if (same != clips.end()) {
        same->second.push_back(i);
      } else {
        clips.push_back({clip, {i}});
      }
    }
    for (const auto& each : clips) {
      const ga_clip* const clip = each.first;
      const std::vector<size_t>& members = each.second;
      std::vector<Real> all;
      for (const size_t i : members) all.insert(all.end(), g[i].begin(), g[i].end());
      const Real norm = ref::norm(all);
      const auto factor = [&](double n) {
        return ref::clip_factor(clip->flavor, std::max(n, 0.0), clip->max_norm);
      };
      Real by(factor(norm.value), 0);
      const double off = ref::tolerance(norm);
      by.error =
          std::max(factor(norm.value - off) - by.value, by.value - factor(norm.value + off)) /
          ref::arithmetic.order;
      r.clip_factor = least(r.clip_factor, by);
      if (by.value == 1 && by.error == 0) continue;
      for (const size_t i : members) {
        const ref::With arithmetic(params_[i].arithmetic());
        for (Real& x : g[i]) x = x * ref::round(by.value, by.error);
      }
    }
  }

  // What ga_gradient returns of a parameter of GA_OPTIMIZER_EXTERNAL.
  void deliver(Param& p, std::vector<Real> g) {
    p.wanted = p.maximum ? p.sum : std::move(g);
    if (groups_[static_cast<size_t>(p.group)].optimizer.maximize && !p.maximum)
      for (Real& x : p.wanted) x = -x;
  }

  void update(Param& p, double rate, std::vector<Real> g) {
    const ref::With arithmetic(p.arithmetic());
    const bool lazy = p.rows_option == GA_ROWS_LAZY && !p.dense;
    ++p.updates;
    ga_optimizer o = groups_[static_cast<size_t>(p.group)].optimizer;
    o.weight_decay *= p.weight_decay_scale;
    rate *= p.lr_scale;
    const int64_t t = o.flavor == GA_FLAVOR_TORCH ? p.updates : steps_;
    p.moved = true;
    p.wanted.resize(static_cast<size_t>(p.count));
    p.written.assign(static_cast<size_t>(p.count), false);
    for (int64_t i = 0; i < p.count; ++i) {
      const auto k = static_cast<size_t>(i);
      if (lazy && p.rows_seen.count(i / p.columns) == 0) {
        p.wanted[k] = ref::exact(load(p.data, p.dtype, i));
        continue;
      }
      ref::Element& e = p.elements[k];
      if (!p.has_master) e.p = ref::exact(load(p.data, p.dtype, i));
      ref::update(o, rate, t, g[k], e);
      p.unknown = p.unknown || !std::isfinite(e.p.value) || !std::isfinite(e.p.error);
      p.wanted[k] = e.p;
      p.written[k] = true;
    }
  }

  void clear() {
    for (Param& p : params_) {
      p.touched = p.dense = p.nonfinite = p.acquired = p.ready = false;
      p.rows_seen.clear();
      p.live_gradient = {};
    }
    for (Layer& layer : layers_) layer.forget();
    micros_.clear();
    deferred_.clear();
    open_ = -1;
    failed_ = false;
  }
};

}  // namespace ga::model
