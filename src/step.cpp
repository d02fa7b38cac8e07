// SPDX-License-Identifier: Apache-2.0
// The end of a window: reduce, check, clip, update, in this order. Norms are sums of the partials
// that the accumulating passes left; a pass of its own is made only for what has none (see
// take_norms).
#include <algorithm>
#include <cfloat>
#include <cmath>

#include "context.hpp"
#include "error.hpp"

namespace ga {
namespace {

// The sum over partials in a fixed pairwise order.
double sum(const Partial* partials, int64_t count, double Partial::*field) {
  if (count <= 0) return 0;
  if (count == 1) return partials[0].*field;
  const int64_t half = count / 2;
  return sum(partials, half, field) + sum(partials + half, count - half, field);
}

double clip_factor(const ga_clip& clip, double norm) {
  if (clip.flavor == GA_FLAVOR_KERAS) return norm > clip.max_norm ? clip.max_norm / norm : 1;
  return std::min(1.0, clip.max_norm / (norm + 1e-6));
}

}  // namespace

ga_window_info Context::window() const {
  ga_window_info w = {};
  w.struct_size = sizeof w;
  w.state = window_.state();
  w.micro_batches = window_.size();
  w.open_micro = window_.open_index();
  w.accum_steps = window_.accum_steps();
  w.weight = window_.weight();
  w.windows = windows_;
  w.steps = steps_;
  return w;
}

const ga_clip& Context::clip_of(const Param& p) const {
  const Group& g = groups_[static_cast<size_t>(p.group)];
  return g.own_clip ? g.clip : clip_;
}

// The parameter's reduced gradient, clipped by value, not yet by norm. mean divides by the weights.
void Context::fill_view(const Param& p, double mean, GradientView& v) const {
  const double sign = groups_[static_cast<size_t>(p.group)].optimizer.maximize ? -1 : 1;
  const bool adopted = p.held == Held::kAdopted;
  v.source.data = adopted ? p.adopted.data : p.held == Held::kStored ? p.accumulator : nullptr;
  v.source.dtype = adopted ? p.adopted.dtype : static_cast<int32_t>(GA_F32);
  v.source.scale = adopted ? p.adopted.scale : 1;
  v.scale = static_cast<float>(mean * sign);
  v.limit = static_cast<float>(clip_of(p).max_value);
  v.factor = 1;
}

// Whether a norm is to be taken of the gradient as clipped by value, which no accumulating pass has
// seen.
bool Context::norm_after_value(const Param& p) const {
  const ga_clip& clip = clip_of(p);
  return std::isfinite(clip.max_value) && clip.scope != GA_CLIP_NONE;
}

// Finds the parameters that this step is about, and makes a pass over the data for the norms that
// no accumulating pass has left: of gradients that were never stored, of accumulators last written
// by the program or by some products, and of gradients as clipped by value.
void Context::take_norms(double mean) {
  touched_.clear();
  norm_tasks_.clear();
  for (size_t i = 0; i < params_.size(); ++i) {
    Param& p = params_[i];
    if (p.frozen || (p.held == Held::kNothing && config_.missing == GA_MISSING_SKIP)) continue;
    touched_.push_back(static_cast<ga_param>(i));
    if (p.held == Held::kNothing) continue;
    const bool clamped = norm_after_value(p);
    if (p.held == Held::kStored && !p.stale && !clamped) continue;
    NormTask& task = norm_tasks_.add();
    fill_view(p, mean, task.gradient);
    if (!clamped) task.gradient.limit = HUGE_VALF;
    task.count = p.count;
    task.partials = p.partials;
    p.stale = false;
  }
  backend_->norm(norm_tasks_.span());
}

// Adds up the partials, in the order of the chunks, and finds the clip factor of every group with a
// global norm.
Context::Reduction Context::reduce(double mean) {
  Reduction r = {0, 1, true};
  double all = 0, shared = 0;  // shared: of the groups without a clipping of their own
  for (Group& g : groups_) g.sum_squares = 0;
  for (ga_param id : touched_) {
    Param& p = params_[static_cast<size_t>(id)];
    p.sum_squares = 0;
    if (p.held == Held::kNothing) continue;
    const int64_t chunks = chunk_count(p.count);
    for (int64_t c = 0; c < chunks; ++c) r.finite = r.finite && !p.partials[c].nonfinite;
    p.sum_squares = sum(p.partials, chunks, &Partial::sum_squares) * mean * mean;
    all += p.sum_squares;
    if (norm_after_value(p)) p.sum_squares = sum(p.partials, chunks, &Partial::limited);
    Group& g = groups_[static_cast<size_t>(p.group)];
    (g.own_clip ? g.sum_squares : shared) += p.sum_squares;
  }
  for (Group& g : groups_) {
    const ga_clip& clip = g.own_clip ? g.clip : clip_;
    g.clip_factor = 1;
    if (clip.scope == GA_CLIP_GLOBAL)
      g.clip_factor = clip_factor(clip, std::sqrt(g.own_clip ? g.sum_squares : shared));
  }
  r.norm = std::sqrt(all);
  return r;
}

// One pass over parameters and state, with each parameter's own clip factor. Its clock moves on the
// way: if the pass fails, nothing is looked at again.
void Context::update(double mean, Reduction& r) {
  update_tasks_.clear();
  finish_tasks_.clear();
  folded_.clear();
  ga_group folded_group = -1;
  int64_t folded_step = 0;
  for (ga_param id : touched_) {
    Param& p = params_[static_cast<size_t>(id)];
    const Group& g = groups_[static_cast<size_t>(p.group)];
    const ga_optimizer& o = g.optimizer;
    const ga_clip& clip = clip_of(p);
    const double factor = clip.scope == GA_CLIP_PER_TENSOR
                              ? clip_factor(clip, std::sqrt(p.sum_squares))
                              : g.clip_factor;
    r.smallest_factor = std::min(r.smallest_factor, factor);

    const auto fill = [&](GradientView& v) {
      fill_view(p, mean, v);
      if (std::isinf(v.limit))  // then mean and clip factor are one scalar, rounded once
        v.scale = static_cast<float>(mean * factor * (o.maximize ? -1 : 1));
      else
        v.factor = static_cast<float>(factor);
    };
    p.clock.advance(o);
    if (g.op < 0) {
      p.delivered = delivered_ = true;
      FinishTask& task = finish_tasks_.add();
      fill(task.gradient);
      task.target = p.accumulator;
      task.count = p.count;
      continue;
    }
    Clock clock = p.clock;
    if (o.flavor != GA_FLAVOR_TORCH) (clock = g.clock).advance(o);
    // Parameters of a group have mostly been updated together: fold once for them.
    if (folded_group != p.group || folded_step != clock.step) {
      op_info(g.op).fold(o, {lr(p.group), clock}, folded_.add());
      folded_group = p.group;
      folded_step = clock.step;
    }
    UpdateTask& task = update_tasks_.add();
    task.op = g.op;
    task.folded = &folded_.last();
    fill(task.gradient);
    task.param = p.data;
    for (int k = 0; k < kMaxSlots; ++k) task.state[k] = p.state[k];
    task.count = p.count;
  }
  backend_->finish(finish_tasks_.span());
  backend_->update(update_tasks_.span());
  for (Group& g : groups_) g.clock.advance(g.optimizer);
  ++steps_;
}

void Context::empty_window() {
  for (Param& p : params_) {
    p.held = Held::kNothing;
    p.acquired = false;
    p.stale = false;
  }
  window_.clear();
  update_accum_steps();
}

ga_step_result Context::step() {
  window_.check_step();
  ga_step_result r = {};
  r.struct_size = sizeof r;
  r.micro_batches = window_.size();
  r.weight = window_.weight();
  r.clip_factor = 1;
  r.loss_scale = config_.loss_scale;
  forget_delivered();

  if (r.weight > 0) {
    const double mean = config_.reduce == GA_REDUCE_MEAN ? 1 / r.weight : 1;
    or_break([&] {
      take_norms(mean);
      Reduction reduction = reduce(mean);
      r.norm = reduction.norm;
      // A sum of weights so small that its inverse is no float would make everything infinite.
      if (!reduction.finite || mean > FLT_MAX) {
        if (config_.nonfinite == GA_NONFINITE_FAIL)
          fail(GA_ERROR_NONFINITE,
               "the gradient of parameter \"%s\" is infinite or NaN; the window is kept until "
               "ga_discard",
               first_nonfinite());
        r.outcome = GA_STEP_SKIPPED_NONFINITE;
        return;
      }
      r.lr = groups_.empty() ? 0 : lr(0);
      update(mean, reduction);
      r.clip_factor = reduction.smallest_factor;
    });
  } else {
    r.outcome = GA_STEP_SKIPPED_EMPTY;
  }
  empty_window();
  r.windows = ++windows_;
  r.steps = steps_;
  return r;
}

const char* Context::first_nonfinite() const {
  for (ga_param id : touched_) {
    const Param& p = params_[static_cast<size_t>(id)];
    for (int64_t c = 0; p.held != Held::kNothing && c < chunk_count(p.count); ++c)
      if (p.partials[c].nonfinite) return name(id);
  }
  return "(none: the sum of the weights is too small to divide by)";
}

// A pass of ga_step that breaks off half-way may leave parameters half updated: nothing after it
// can be right.
template <class Work>
void Context::or_break(Work&& work) {
  try {
    work();
  } catch (const Error& e) {
    if (e.status() == GA_ERROR_FAULT) broken_ = e;
    throw;
  }
}

void Context::discard() {
  forget_delivered();
  empty_window();
}

void Context::forget_delivered() {
  if (delivered_)
    for (Param& p : params_) p.delivered = false;
  delivered_ = false;
}

const void* Context::gradient(ga_param id, int32_t* dtype) const {
  const Param& p = param(id);
  const ga_optimizer& o = groups_[static_cast<size_t>(p.group)].optimizer;
  if (o.kind != GA_OPTIMIZER_EXTERNAL)
    fail(GA_ERROR_INVALID_ARGUMENT,
         "parameter \"%s\": its group has the optimizer %s; ga_gradient is for "
         "GA_OPTIMIZER_EXTERNAL",
         name(id), optimizer_info(o.kind, o.flavor).name);
  if (!delivered_ || !p.delivered)
    fail(GA_ERROR_INVALID_STATE,
         "parameter \"%s\": there is no gradient; ga_gradient is legal after an applied ga_step in "
         "which the parameter had one, until the next accumulate, ga_discard or ga_step",
         name(id));
  if (dtype) *dtype = GA_F32;
  return p.accumulator;
}

}  // namespace ga
