// SPDX-License-Identifier: Apache-2.0
//
// The model's window: its micro-batches and their contributions to the accumulators.
#pragma once

#include <cmath>
#include <cstdint>
#include <utility>
#include <vector>

#include "gradaccum/gradaccum.h"
#include "sequences/settings.hpp"

namespace ga::model {

class Contributions : public Settings {
 public:
  using Settings::Settings;

  Statuses accumulate(const void* const* gradients, size_t count, double weight,
                      const ga_micro_options& options) {
    Statuses wrong = check_micro(weight, options);
    if (open_ >= 0 || failed_) wrong |= kState;
    if (full()) wrong |= kFull;
    if (count != blocks_.size()) {
      wrong |= kArgument;
    } else if (weight > 0) {
      if (count > 0 && !gradients) return wrong | kArgument;
      each(gradients, [&](ga_param id, const void* g) {
        if (params_[static_cast<size_t>(id)].ready) wrong |= kState;
        wrong |= check_gradient(id, g);
      });
    }
    if (wrong) return wrong;
    const Micro micro = make_micro(weight, options);
    std::vector<Contribution> list;
    if (weight > 0)
      each(gradients, [&](ga_param id, const void* g) { list.push_back(whole(id, g, micro)); });
    if (!list.empty() && duplicate_masters()) return kState;
    forget_delivered();
    micros_.push_back(micro);
    if (deferring()) {
      settle(size() - 1, list);
    } else {
      for (Contribution& c : list) add(c);
    }
    return 0;
  }

  Statuses micro_begin(int64_t index, double weight, const ga_micro_options& options) {
    Statuses wrong = check_micro(weight, options);
    if (index == -1) index = size();
    if (open_ >= 0 || failed_) wrong |= kState;
    if (index < 0 || index > size()) wrong |= kArgument;
    if (index == size() && full()) wrong |= kFull;
    const Micro micro = make_micro(weight, options);
    if (index >= 0 && index < size()) {
      const Micro& first = micros_[static_cast<size_t>(index)];
      if (deferring()) wrong |= kUnsupported;
      if (first.weight != micro.weight || first.loss_scale != micro.loss_scale) wrong |= kArgument;
      if (micro.last && index + 1 < size()) wrong |= kArgument;
    }
    if (wrong) return wrong;
    forget_delivered();
    added_ = index < size();
    adopted_.clear();
    if (index == size()) micros_.push_back(micro);
    micros_.back().last |= micro.last;
    open_ = index;
    return 0;
  }

  Statuses accumulate_part(ga_param id, const void* gradient) {
    const Statuses wrong = check_part(id);
    if (wrong) return wrong;
    const Param& p = params_[static_cast<size_t>(id)];
    if (ignored(p)) return 0;
    if (!gradient && p.count > 0) return kArgument;
    if (const Statuses bad = check_gradient(id, gradient)) return bad;
    if (duplicate_masters()) return kState;
    deliver(whole(id, gradient, open_micro()));
    return 0;
  }

  Statuses accumulate_rows(ga_param id, const void* indices, int32_t index_dtype, int64_t count,
                           const void* values) {
    const Statuses wrong = check_part(id);
    if (wrong) return wrong;
    const Param& p = params_[static_cast<size_t>(id)];
    if (p.maximum) return kUnsupported;
    if (p.rows_option == GA_ROWS_NONE || (index_dtype != GA_I32 && index_dtype != GA_I64) ||
        count < 0)
      return kArgument;
    if (count > 0 && (!indices || !values)) return kArgument;
    if (ignored(p)) return 0;
    const int64_t size = size_of(p.dtype);
    if (misaligned(indices, size_of(index_dtype)) || misaligned(values, size)) return kArgument;
    const Range bytes(values, count * p.columns * size);
    if (is_param(bytes) || is_param({indices, count * size_of(index_dtype)})) return kArgument;
    if (has_live_gradient(p) && p.live_gradient.overlaps(bytes)) return kArgument;
    Contribution c;
    c.param = id;
    c.by_rows = true;
    for (int64_t i = 0; i < count; ++i) {
      const int64_t row = load_index(indices, index_dtype, i);
      if (row < 0 || row >= p.rows) return kArgument;
      c.rows.push_back(row);
    }
    if (duplicate_masters()) return kState;
    read(c, values, count * p.columns, open_micro());
    deliver(std::move(c));
    return 0;
  }

  // Sets wanted to what the library should hand out, except for the address.
  Statuses acquire(ga_param id, ga_accumulator* wanted, bool* handed) {
    Statuses wrong = check_part(id);
    if (deferring()) wrong |= kUnsupported;
    if (has_param(id) && params_[static_cast<size_t>(id)].maximum) wrong |= kUnsupported;
    if (wrong) return wrong;
    Param& p = params_[static_cast<size_t>(id)];
    if (!ignored(p)) {
      if (duplicate_masters()) return kState;
      allocate_all();
    }
    p.acquired = true;
    *handed = !ignored(p);
    added_ = added_ || *handed;
    if (*handed) p.live_gradient = {};
    const Micro& m = open_micro();
    *wanted = {};
    wanted->dtype = p.dtype == GA_F64 ? GA_F64 : GA_F32;
    wanted->rows = p.rows;
    wanted->columns = p.columns;
    wanted->leading_dimension = p.columns;
    wanted->alpha = factor(m);
    wanted->beta = p.touched ? 1 : 0;
    return 0;
  }

  // gradient: the gradient that the program has written, before the multiplication by alpha.
  Statuses release(ga_param id, const std::vector<double>& gradient) {
    Statuses wrong = open_ < 0 ? kState : 0;
    if (!has_param(id)) return wrong | kArgument;
    Param& p = params_[static_cast<size_t>(id)];
    if (!p.acquired) return wrong | kState;
    if (wrong) return wrong;
    p.acquired = false;
    if (ignored(p)) return 0;
    Contribution c;
    c.param = id;
    const ref::With arithmetic(p.arithmetic());
    for (const double g : gradient)
      c.values.push_back(g == 0 ? Real() : contribution(g, open_micro()));
    add(c);
    return 0;
  }

  Statuses micro_end() {
    if (open_ < 0) return kState;
    for (const Param& p : params_)
      if (p.acquired) return kState;
    if (deferring()) settle(open_, deferred_);
    deferred_.clear();
    open_ = -1;
    return 0;
  }

  // Legal while nothing of the open micro-batch has been added; a live gradient is only noted.
  Statuses micro_abort() {
    if (open_ < 0 || added_) return kState;
    for (const ga_param id : adopted_) {
      Param& p = params_[static_cast<size_t>(id)];
      p.touched = p.dense = p.nonfinite = false;
      p.live_gradient = {};
    }
    for (Param& p : params_) p.acquired = false;
    for (Layer& layer : layers_) layer.forget(open_);
    deferred_.clear();
    micros_.pop_back();
    open_ = -1;
    return 0;
  }

  // Without other ranks, all that it does is to refuse what comes later in the window.
  Statuses params_ready(const ga_param* params, size_t count) {
    if (count > 0 && !params) return kArgument;
    Statuses wrong = failed_ ? kState : 0;
    for (size_t k = 0; k < count; ++k) {
      if (!has_param(params[k]))
        wrong |= kArgument;
      else if (params_[static_cast<size_t>(params[k])].acquired)
        wrong |= kState;
    }
    if (wrong) return wrong;
    for (size_t k = 0; k < count; ++k) params_[static_cast<size_t>(params[k])].ready = true;
    return 0;
  }

  Statuses prepare() {
    if (duplicate_masters()) return kState;
    for (Param& p : params_) {
      if (p.allocated || p.frozen) continue;
      p.ema.assign(static_cast<size_t>(p.count), Real());
      p.allocated = true;
      p.master_stale = p.has_master;  // taken later
    }
    allocated_ = allocated_ || !params_.empty();
    return 0;
  }

  // steps: the updates that the parameter has had. An optimizer of the program's has no state.
  Statuses get_step(ga_param id, int64_t& steps) {
    Statuses wrong = if_not_empty();
    if (!has_param(id)) return wrong | kArgument;
    const Param& p = params_[static_cast<size_t>(id)];
    if (p.external) wrong |= kArgument;
    if (p.frozen && !p.allocated) wrong |= kState;
    if (wrong) return wrong;
    if (duplicate_masters()) return kState;
    allocate_all();
    steps = p.updates;
    return 0;
  }

 protected:
  // Calls f(parameter, its gradient) for every parameter that has a gradient in the micro-batch and
  // is not frozen.
  template <class F>
  void each(const void* const* gradients, F&& f) const {
    for (size_t b = 0; b < blocks_.size(); ++b) {
      if (!gradients[b]) continue;
      for (const ga_param id : blocks_[b]) {
        const Param& p = params_[static_cast<size_t>(id)];
        if (!p.frozen) f(id, static_cast<const char*>(gradients[b]) + p.offset * size_of(p.dtype));
      }
    }
  }

  // Whether the memory of the first gradient becomes the accumulator.
  bool is_lent(const Param& p) const {
    return config_.gradient_life == GA_GRADIENTS_LENT && size_of(p.dtype) >= 4 && !p.maximum;
  }

  double factor(const Micro& m) const {
    return (config_.gradient_kind == GA_GRADIENT_MEAN ? m.weight : 1) / m.loss_scale;
  }

  Real contribution(double g, const Micro& m) const {
    const double by = factor(m);
    if (!std::isfinite(g) || !std::isfinite(by) || (!in_f64() && std::abs(by) >= 0x1p128))
      return {NAN, 0};
    return times(scalar(by), ref::exact(g));
  }

  // Of a maximum: unscaled, but not weighted.
  Real unscaled(double g, const Micro& m) const {
    if (!std::isfinite(g)) return {g / m.loss_scale, 0};
    return times(scalar(1 / m.loss_scale), ref::exact(g));
  }

  void read(Contribution& c, const void* data, int64_t count, const Micro& m) const {
    const Param& p = params_[static_cast<size_t>(c.param)];
    const ref::With arithmetic(p.arithmetic());
    for (int64_t i = 0; i < count; ++i) {
      const double g = load(data, p.dtype, i);
      c.values.push_back(p.maximum ? unscaled(g, m) : contribution(g, m));
      c.finite = c.finite && std::isfinite(g);
    }
  }

  Contribution whole(ga_param id, const void* gradient, const Micro& m) const {
    const Param& p = params_[static_cast<size_t>(id)];
    Contribution c;
    c.param = id;
    read(c, gradient, p.count, m);
    c.data = gradient;
    c.factor = factor(m);
    return c;
  }

  void deliver(Contribution c) {
    if (deferring()) {
      allocate_all();
      deferred_.push_back(std::move(c));
    } else {
      add(c);
    }
  }

  void deliver_sums(const Layer& layer, const std::vector<ref::ChannelSums>& sums) {
    for (const ga_param id : {layer.gamma, layer.beta}) {
      if (id < 0 || params_[static_cast<size_t>(id)].frozen) continue;
      const ref::With arithmetic(params_[static_cast<size_t>(id)].arithmetic());
      Contribution c;
      c.param = id;
      for (const ref::ChannelSums& s : sums) {
        const double value = id == layer.gamma ? s.dgamma : s.dbeta;
        const Real g = ref::round(value, id == layer.gamma ? s.dgamma_error : s.dbeta_error);
        c.finite = c.finite && std::isfinite(value);
        c.values.push_back(times(scalar(factor(open_micro())), g));
      }
      deliver(std::move(c));
    }
  }

  // Decides whether a micro-batch is dropped, and adds its contributions if it is not.
  void settle(int64_t index, std::vector<Contribution>& list) {
    Micro& micro = micros_[static_cast<size_t>(index)];
    if (!list.empty()) allocate_all();
    for (const Contribution& c : list) micro.dropped = micro.dropped || !c.finite;
    if (micro.dropped) return;
    for (Contribution& c : list) add(c);
  }

  void add(const Contribution& c) {
    allocate_all();
    Param& p = params_[static_cast<size_t>(c.param)];
    const ref::With arithmetic(p.arithmetic());
    const bool first = !p.touched;
    if (first) p.sum.assign(static_cast<size_t>(p.count), Real());
    p.touched = true;
    if (c.by_rows) {
      for (size_t i = 0; i < c.values.size(); ++i) {
        const int64_t row = c.rows[i / static_cast<size_t>(p.columns)];
        const auto at = static_cast<size_t>(row * p.columns) + i % static_cast<size_t>(p.columns);
        p.sum[at] = plus(p.sum[at], c.values[i]);
        p.nonfinite = p.nonfinite || std::isnan(p.sum[at].value);
      }
      added_ = true;
      p.rows_seen.insert(c.rows.begin(), c.rows.end());
      p.live_gradient = {};
      return;
    }
    p.dense = true;
    if (p.maximum) p.nonfinite = false;  // an infinity may have given way
    for (size_t i = 0; i < c.values.size(); ++i) {
      Real& a = p.sum[i];
      a = first ? c.values[i] : p.maximum ? larger(a, c.values[i]) : plus(a, c.values[i]);
      p.nonfinite = p.nonfinite || !std::isfinite(a.value);
    }
    const bool lives = first && c.data && config_.gradient_life != GA_GRADIENTS_CONSUMED;
    if (lives) {
      p.live_gradient = {c.data, p.count * size_of(p.dtype)};
      p.live_factor = c.factor;
    } else if (!(is_lent(p) && p.live_factor > 0)) {
      p.live_gradient = {};
    }
    if (lives && !deferring())
      adopted_.push_back(c.param);
    else
      added_ = true;
  }

  // The first contribution allocates the arrays of all parameters; master weights are then copied
  // from the parameters.
  void allocate_all() {
    allocated_ = allocated_ || !params_.empty();
    for (Param& p : params_) {
      const bool first = !p.allocated && !p.frozen;
      if (p.has_master && (first || p.master_stale))
        for (int64_t i = 0; i < p.count; ++i)
          p.elements[static_cast<size_t>(i)].p = ref::exact(load(p.data, p.dtype, i));
      p.master_stale = false;
      if (!first) continue;
      p.ema.assign(static_cast<size_t>(p.count), Real());
      p.allocated = true;
    }
  }

 private:
  // Of the open micro-batch: whether something was added, and the parameters whose first gradient in
  // the window it has brought, where that lives.
  bool added_ = false;
  std::vector<ga_param> adopted_;
};

}  // namespace ga::model
