// SPDX-License-Identifier: Apache-2.0
//
// The model of a context in float64: what groups, parameters and options are set to, and which
// calls that set them are legal. The derived classes add the rest: contributions.hpp, layers.hpp,
// model.hpp.
//
// The functions of the model take the arguments of the library's functions and read the same
// memory, but write none. Each returns the set of statuses that the library's call may return. If
// the set is empty, the call should return GA_OK, and the model has changed accordingly. A call
// that is wrong in two ways may be refused for either. A call that is refused leaves the model as
// it was.
#pragma once

#include <algorithm>
#include <cfloat>
#include <cmath>
#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

#include "gradaccum/gradaccum.h"
#include "sequences/layer.hpp"
#include "sequences/parts.hpp"

namespace ga::model {

class Settings {
 public:
  // contexts: the models of all existing contexts. Two contexts must not have master weights for
  // the same memory.
  Settings(const ga_config& config, std::vector<Settings*>& contexts)
      : config_(config), accum_steps_(config.accum_steps), contexts_(contexts) {
    contexts_.push_back(this);
  }
  ~Settings() { contexts_.erase(std::find(contexts_.begin(), contexts_.end(), this)); }
  Settings(const Settings&) = delete;
  Settings& operator=(const Settings&) = delete;

  // ---- Queries ----------------------------------------------------------------------------------

  bool empty() const { return micros_.empty(); }
  int64_t open() const { return open_; }
  int64_t size() const { return static_cast<int64_t>(micros_.size()); }
  bool full() const {
    return (!empty() && micros_.back().last) || (accum_steps() > 0 && size() >= accum_steps());
  }
  bool failed() const { return failed_; }
  bool keeps_emas() const { return ema_.has_value(); }
  bool scheduled() const { return !phases_.empty(); }
  const ga_config& config() const { return config_; }
  const std::vector<Param>& params() const { return params_; }
  const std::vector<Group>& groups() const { return groups_; }
  const std::vector<Layer>& layers() const { return layers_; }
  const std::vector<std::vector<ga_param>>& blocks() const { return blocks_; }
  const Micro& micro(int64_t index) const { return micros_[static_cast<size_t>(index)]; }
  int64_t steps() const { return steps_; }

  int64_t accum_steps() const {
    int64_t k = accum_steps_;
    for (const auto& [from, steps] : phases_)
      if (from <= steps_) k = steps;
    return k;
  }

  double weight() const {
    double sum = 0;
    for (const Micro& m : micros_)
      if (!m.dropped) sum += m.weight;
    return sum;
  }

  double loss_scale() const { return scaler_ ? scaler_->scale : config_.loss_scale; }

  double lr(ga_group group) const {
    const Group& g = groups_[static_cast<size_t>(group)];
    return g.schedule ? ref::learning_rate(*g.schedule, g.optimizer.lr, steps_) : g.optimizer.lr;
  }

  ga_window_info window() const {
    ga_window_info w = {};
    w.state = empty() ? GA_WINDOW_EMPTY : full() ? GA_WINDOW_FULL : GA_WINDOW_OPEN;
    w.micro_batches = size();
    w.open_micro = open_;
    w.accum_steps = accum_steps();
    w.weight = weight();
    w.windows = windows_;
    w.steps = steps_;
    return w;
  }

  // ---- Set-up -----------------------------------------------------------------------------------

  Statuses add_group(const ga_optimizer& o) {
    if (const Statuses wrong = if_not_empty()) return wrong;
    groups_.push_back({o, {}, {}});
    return 0;
  }

  // Adds the parameters of one block, which share a dtype and options.
  Statuses add_params(void* data, int32_t dtype, const ga_flat_entry* entries, size_t count,
                      const ga_param_options& options) {
    Statuses wrong = if_not_empty();
    std::vector<Param> added;
    for (size_t i = 0; i < count; ++i) {
      const ga_flat_entry& e = entries[i];
      if (!has_group(e.group)) wrong |= kArgument;
      Param p;
      p.group = e.group;
      p.dtype = dtype;
      p.count = 1;
      for (int32_t d = 0; d < e.rank; ++d) p.count *= e.shape[d];
      p.rows = e.rank > 0 ? e.shape[0] : 1;
      p.columns = p.rows > 0 ? p.count / p.rows : 0;
      p.offset = e.offset;
      p.data = data ? static_cast<char*>(data) + e.offset * size_of(dtype) : nullptr;
      p.rows_option = options.rows;
      p.maximum = options.reduce == GA_REDUCE_MAX;
      p.external = has_group(e.group) &&
                   groups_[static_cast<size_t>(e.group)].optimizer.kind == GA_OPTIMIZER_EXTERNAL;
      if (p.maximum && (!p.external || p.rows_option != GA_ROWS_NONE)) wrong |= kUnsupported;
      p.has_master = dtype == GA_BF16 && options.master == GA_MASTER_F32 && !p.external;
      p.elements.resize(static_cast<size_t>(p.count));
      if (p.count > 0) wrong |= check_param_data(p, p.data, -1);
      for (const Param& other : added)
        if (other.range().overlaps(p.range())) wrong |= kArgument;
      added.push_back(std::move(p));
    }
    if (wrong) return wrong;
    blocks_.emplace_back();
    for (Param& p : added) {
      blocks_.back().push_back(static_cast<ga_param>(params_.size()));
      params_.push_back(std::move(p));
    }
    return 0;
  }

  Statuses set_lr(ga_group group, double lr) {
    if (!has_group(group) || !is_rate(lr)) return kArgument;
    groups_[static_cast<size_t>(group)].optimizer.lr = lr;
    return 0;
  }

  Statuses set_weight_decay(ga_group group, double decay) {
    if (!has_group(group) || !is_rate(decay)) return kArgument;
    groups_[static_cast<size_t>(group)].optimizer.weight_decay = decay;
    return 0;
  }

  // Hyper-parameters that are in range.
  Statuses set_optimizer(ga_group group, const ga_optimizer& o) {
    if (!has_group(group)) return kArgument;
    ga_optimizer& now = groups_[static_cast<size_t>(group)].optimizer;
    if (now.kind != o.kind || (now.momentum == 0) != (o.momentum == 0)) return kUnsupported;
    for (const Param& p : params_)
      if (p.group == group && !p.removed && p.rows_option == GA_ROWS_LAZY && o.dampening != 0)
        return kUnsupported;
    now = o;
    return 0;
  }

  Statuses set_scale(ga_param id, double scale, double Param::*which) {
    if (!has_param(id) || !is_rate(scale)) return kArgument;
    params_[static_cast<size_t>(id)].*which = scale;
    return 0;
  }

  // The schedule must be valid.
  Statuses set_schedule(ga_group group, const ga_schedule* schedule) {
    if (!has_group(group)) return kArgument;
    auto& slot = groups_[static_cast<size_t>(group)].schedule;
    slot.reset();
    if (schedule) slot = *schedule;
    return 0;
  }

  Statuses set_clip(const ga_clip* clip) {
    if (clip && !is_clip(*clip)) return kArgument;
    clip_.reset();
    if (clip) clip_ = *clip;
    return 0;
  }

  Statuses set_group_clip(ga_group group, const ga_clip* clip) {
    if (!has_group(group) || (clip && !is_clip(*clip))) return kArgument;
    auto& slot = groups_[static_cast<size_t>(group)].clip;
    slot.reset();
    if (clip) slot = *clip;
    return 0;
  }

  Statuses set_loss_scaler(const ga_loss_scaler* scaler) {
    Statuses wrong = if_not_empty();
    if (scaler) {
      const ga_loss_scaler& s = *scaler;
      if (!(s.min_scale > 0 && s.min_scale <= s.initial_scale && s.initial_scale <= s.max_scale &&
            s.max_scale <= FLT_MAX && s.growth_factor > 1 && s.backoff_factor > 0 &&
            s.backoff_factor < 1 && s.growth_interval > 0 && s.hysteresis > 0))
        wrong |= kArgument;
    }
    if (wrong) return wrong;
    scaler_.reset();
    if (scaler) scaler_.emplace(*scaler);
    return 0;
  }

  Statuses set_ema(const ga_ema* ema) {
    Statuses wrong = allocated_ ? kState : 0;
    if (ema && !(ema->decay >= 0 && ema->decay <= 1)) wrong |= kArgument;
    if (wrong) return wrong;
    ema_.reset();
    if (ema) ema_ = *ema;
    return 0;
  }

  Statuses set_accum_steps(int64_t k) {
    Statuses wrong = if_not_empty();
    if (!phases_.empty()) wrong |= kState;
    if (k < 0) wrong |= kArgument;
    if (wrong) return wrong;
    accum_steps_ = k;
    return 0;
  }

  Statuses set_accum_schedule(const int64_t* from, const int64_t* steps, size_t count) {
    Statuses wrong = if_not_empty();
    if (count > 0 && !(from && steps)) return wrong | kArgument;
    for (size_t i = 0; i < count; ++i) {
      const bool ordered = i == 0 ? from[0] == 0 : from[i] > from[i - 1];
      if (!ordered || steps[i] < 0) wrong |= kArgument;
    }
    if (wrong) return wrong;
    phases_.clear();
    for (size_t i = 0; i < count; ++i) phases_.emplace_back(from[i], steps[i]);
    return 0;
  }

  Statuses bind(ga_param id, void* data) {
    Statuses wrong = if_not_empty();
    if (!has_param(id)) return wrong | kArgument;
    Param& p = params_[static_cast<size_t>(id)];
    if (p.count > 0) wrong |= check_param_data(p, data, id);
    if (!wrong && p.has_master && p.allocated && foreign_master({data, p.count * size_of(p.dtype)}))
      wrong |= kState;
    if (wrong) return wrong;
    p.data = data;
    return 0;
  }

  Statuses changed(ga_param id) {
    Statuses wrong = if_not_empty();
    if (!has_param(id)) wrong |= kArgument;
    if (wrong) return wrong;
    Param& p = params_[static_cast<size_t>(id)];
    if (p.has_master && p.allocated) p.master_stale = true;
    return 0;
  }

  Statuses set_group_frozen(ga_group group, int32_t frozen) {
    Statuses wrong = if_not_empty();
    if (!has_group(group) || (frozen != 0 && frozen != 1)) wrong |= kArgument;
    if (wrong) return wrong;
    for (Param& p : params_)
      if (p.group == group && !p.removed) p.frozen = frozen == 1;
    return 0;
  }

  Statuses remove(ga_param id) {
    Statuses wrong = if_not_empty();
    if (!has_param(id)) return wrong | kArgument;
    for (const Layer& layer : layers_)
      if (layer.gamma == id || layer.beta == id) wrong |= kState;
    if (wrong) return wrong;
    Param& p = params_[static_cast<size_t>(id)];
    p.removed = p.frozen = true;
    p.allocated = p.master_stale = false;
    p.data = nullptr;
    return 0;
  }

  // What the program reads next from the state: all of it as at the beginning.
  Statuses reset_state(ga_param id) {
    Statuses wrong = if_not_empty();
    if (!has_param(id)) wrong |= kArgument;
    if (wrong) return wrong;
    Param& p = params_[static_cast<size_t>(id)];
    if (!p.allocated) return 0;
    for (ref::Element& e : p.elements) e = {};
    p.updates = 0;
    p.ema_started = false;
    p.master_stale = p.has_master;
    return 0;
  }

  Statuses ema_swap() const { return if_not_empty() | (ema_ ? 0 : kState); }

  Statuses set_frozen(ga_param id, int32_t frozen) {
    Statuses wrong = if_not_empty();
    if (!has_param(id) || (frozen != 0 && frozen != 1)) wrong |= kArgument;
    if (wrong) return wrong;
    params_[static_cast<size_t>(id)].frozen = frozen == 1;
    return 0;
  }

  // What the library still reads of gradients.
  bool reads_at_micro_end() const { return deferring(); }
  bool reads_nothing_later() const {
    if (deferring()) return open_ < 0;
    return std::none_of(params_.begin(), params_.end(),
                        [&](const Param& p) { return has_live_gradient(p); });
  }

 protected:
  // ---- Checks -----------------------------------------------------------------------------------

  static bool is_rate(double x) { return x >= 0 && std::isfinite(x); }
  static bool is_clip(const ga_clip& c) {
    const bool by_norm = c.scope == GA_CLIP_GLOBAL || c.scope == GA_CLIP_PER_TENSOR;
    return c.scope >= GA_CLIP_NONE && c.scope <= GA_CLIP_AGC && c.max_value > 0 &&
           (!by_norm || is_rate(c.max_norm));
  }
  static bool misaligned(const void* data, int64_t size) {
    return reinterpret_cast<uintptr_t>(data) % static_cast<uintptr_t>(size) != 0;
  }

  Statuses if_not_empty() const { return empty() ? 0 : kState; }
  bool has_group(ga_group id) const { return id >= 0 && static_cast<size_t>(id) < groups_.size(); }
  bool has_param(ga_param id) const {
    return id >= 0 && static_cast<size_t>(id) < params_.size() &&
           !params_[static_cast<size_t>(id)].removed;
  }
  bool has_layer(ga_bn id) const { return id >= 0 && static_cast<size_t>(id) < layers_.size(); }
  bool deferring() const { return config_.nonfinite == GA_NONFINITE_DROP_MICRO; }
  const Micro& open_micro() const { return micros_[static_cast<size_t>(open_)]; }
  // Whether contributions to the parameter are not read.
  bool ignored(const Param& p) const { return p.frozen || open_micro().weight == 0; }
  // ga_gradient returns nothing any more.
  void forget_delivered() {
    for (Param& p : params_) p.delivered = false;
  }
  // Whether another gradient may not overlap the first one.
  bool has_live_gradient(const Param& p) const { return !deferring() && !p.live_gradient.empty(); }

  // Whether the range overlaps the memory of a parameter other than except.
  bool is_param(const Range& r, ga_param except = -1) const {
    for (size_t i = 0; i < params_.size(); ++i)
      if (static_cast<ga_param>(i) != except && !params_[i].removed &&
          params_[i].range().overlaps(r))
        return true;
    return false;
  }

  Statuses check_param_data(const Param& p, const void* data, ga_param self) const {
    if (!data || misaligned(data, size_of(p.dtype))) return kArgument;
    return is_param({data, p.count * size_of(p.dtype)}, self) ? kArgument : 0;
  }

  Statuses check_micro(double weight, const ga_micro_options& o) const {
    const bool right_weight = weight >= 0 && std::isfinite(weight);
    return right_weight && std::isfinite(o.loss_scale) && o.flags <= GA_MICRO_LAST ? 0 : kArgument;
  }
  Micro make_micro(double weight, const ga_micro_options& o) const {
    return {weight, o.loss_scale != 0 ? o.loss_scale : loss_scale(), o.flags == GA_MICRO_LAST,
            false};
  }

  Statuses check_gradient(ga_param id, const void* gradient) const {
    const Param& p = params_[static_cast<size_t>(id)];
    const Range read(gradient, p.count * size_of(p.dtype));
    if (misaligned(gradient, size_of(p.dtype)) || is_param(read)) return kArgument;
    return has_live_gradient(p) && p.live_gradient.overlaps(read) ? kArgument : 0;
  }

  // Checks a call that contributes to the open micro-batch.
  Statuses check_part(ga_param id) const {
    Statuses wrong = open_ < 0 ? kState : 0;
    if (!has_param(id)) return wrong | kArgument;
    const Param& p = params_[static_cast<size_t>(id)];
    if (p.acquired || (p.ready && (open_ < 0 || !ignored(p)))) wrong |= kState;
    return wrong;
  }

  // Whether another context has master weights for a 16-bit parameter in this memory.
  bool foreign_master(const Range& r) const {
    for (const Settings* other : contexts_) {
      if (other == this) continue;
      for (const Param& p : other->params_)
        if (p.has_master && p.allocated && p.range().overlaps(r)) return true;
    }
    return false;
  }
  bool duplicate_masters() const {
    for (const Param& p : params_)
      if (p.has_master && !p.allocated && !p.frozen && foreign_master(p.range())) return true;
    return false;
  }

  ga_config config_;
  int64_t accum_steps_;
  std::vector<Settings*>& contexts_;
  std::vector<std::pair<int64_t, int64_t>> phases_;  // from which step, K
  std::vector<Group> groups_;
  std::vector<Param> params_;
  std::vector<std::vector<ga_param>> blocks_;
  std::vector<Layer> layers_;
  std::optional<ga_clip> clip_;
  std::optional<Scaler> scaler_;
  std::optional<ga_ema> ema_;
  std::vector<Micro> micros_;
  std::vector<Contribution> deferred_;  // to the open micro-batch, under GA_NONFINITE_DROP_MICRO
  int64_t open_ = -1;
  int64_t windows_ = 0, steps_ = 0, skipped_ = 0, dropped_ = 0;
  bool allocated_ = false, failed_ = false;
};

}  // namespace ga::model
