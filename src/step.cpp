// SPDX-License-Identifier: Apache-2.0
// The end of a window: reduce, check, clip, update, in this order. Norms are sums of the partials
// that the accumulating passes left; a pass of its own is made only for what has none (see
// take_norms).
#include <algorithm>
#include <cfloat>
#include <cmath>

#include "context.hpp"
#include "error.hpp"
#include "tensor.hpp"

namespace ga {
double sum(const Partial* partials, int64_t count, double Partial::*field) {
  if (count <= 0) return 0;
  if (count == 1) return partials[0].*field;
  const int64_t half = count / 2;
  return sum(partials, half, field) + sum(partials + half, count - half, field);
}

namespace {

// The same over the rows of a window.
double sum(const RowEntry* rows, size_t count) {
  if (count == 0) return 0;
  if (count == 1) return rows[0].partial.sum_squares;
  const size_t half = count / 2;
  return sum(rows, half) + sum(rows + half, count - half);
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

// What a parameter's accumulator is to be multiplied by; mean is that of the window.
double Context::mean_of(const Param& p, double mean) const {
  const bool running =
      config_.accumulation == GA_ACCUMULATE_RUNNING_MEAN && p.held == Held::kStored;
  return running ? mean * p.held_weight : mean;
}

// Where its gradient of the window is.
Source Context::source_of(ga_param id) {
  const Param& p = params_[static_cast<size_t>(id)];
  switch (p.held) {
    case Held::kAdopted:
      return {p.adopted, p.gradient_dtype, p.adopted_scale};
    case Held::kStored: {
      const Array target = target_of(id);
      return {target.data, target.format, 1};
    }
    case Held::kRows: {
      Tensor& t = tensors_[static_cast<size_t>(id)];
      t.sparse = {p.accumulator, p.count / std::max<int64_t>(t.rows, 1), t.set.slots,
                  t.set.entries.data(), static_cast<int64_t>(t.set.entries.size())};
      return {&t.sparse, kSparse, 1};
    }
    default:
      return {nullptr, GA_F32, 1};
  }
}

// The parameter's reduced gradient, clipped by value, not yet by norm. mean divides by the weights.
void Context::fill_view(ga_param id, double mean, GradientView& v) {
  const Param& p = params_[static_cast<size_t>(id)];
  const ga_clip& clip = clip_of(p);
  const double sign = groups_[static_cast<size_t>(p.group)].optimizer.maximize ? -1 : 1;
  v.source = source_of(id);
  v.scale = mean_of(p, mean) * sign;
  v.limit = clip.when == GA_CLIP_STEP ? clip.max_value : HUGE_VAL;
  v.factor = 1;
}

// Whether a norm is to be taken of the gradient as clipped by value, which no accumulating pass has
// seen.
bool Context::norm_after_value(const Param& p) const {
  const ga_clip& clip = clip_of(p);
  const bool layered = op_of(p) >= 0 && op_info(op_of(p)).norms > 0;
  return clip.when == GA_CLIP_STEP && std::isfinite(clip.max_value) &&
         (clip.scope != GA_CLIP_NONE || layered);
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
    if ((p.held == Held::kStored || p.held == Held::kRows) && !p.stale && !clamped) continue;
    NormTask& task = norm_tasks_.add();
    fill_view(static_cast<ga_param>(i), mean, task.gradient);
    if (!clamped) task.gradient.limit = HUGE_VAL;
    task.f64 = p.f64;
    task.count = p.count;
    task.partials = p.partials;
    p.stale = p.held == Held::kRows;  // the partials of the rows are not wanted
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
    const double scale = mean_of(p, mean);
    if (p.held == Held::kRows && !p.stale) {
      const std::vector<RowEntry>& rows = tensors_[static_cast<size_t>(id)].set.entries;
      for (const RowEntry& row : rows) r.finite = r.finite && !row.partial.nonfinite;
      p.sum_squares = sum(rows.data(), rows.size()) * scale * scale;
      all += p.sum_squares;
    } else {
      const int64_t chunks = chunk_count(p.count);
      for (int64_t c = 0; c < chunks; ++c) r.finite = r.finite && !p.partials[c].nonfinite;
      p.sum_squares = sum(p.partials, chunks, &Partial::sum_squares) * scale * scale;
      all += p.sum_squares;
      if (norm_after_value(p)) p.sum_squares = sum(p.partials, chunks, &Partial::limited);
    }
    Group& g = groups_[static_cast<size_t>(p.group)];
    (g.own_clip ? g.sum_squares : shared) += p.sum_squares;
  }
  for (Group& g : groups_) {
    const ga_clip& clip = g.own_clip ? g.clip : clip_;
    g.clip_factor = 1;
    if (clip.scope == GA_CLIP_GLOBAL && clip.when == GA_CLIP_STEP)
      g.clip_factor = clip_factor(clip, std::sqrt(g.own_clip ? g.sum_squares : shared));
  }
  for (ga_param id : touched_) {
    Param& p = params_[static_cast<size_t>(id)];
    const ga_clip& clip = clip_of(p);
    p.factor = groups_[static_cast<size_t>(p.group)].clip_factor;
    if (clip.scope == GA_CLIP_PER_TENSOR && clip.when == GA_CLIP_STEP)
      p.factor = clip_factor(clip, std::sqrt(p.sum_squares));
    r.smallest_factor = std::min(r.smallest_factor, p.factor);
  }
  r.norm = std::sqrt(all);
  return r;
}

// From the squares that the accumulating passes left of every micro-batch, and those of the window.
void Context::estimate_noise() {
  const double samples = window_.weight();
  if (!config_.noise_scale || noise_repeated_ || window_.weighted() < 2) return;
  double micros = 0, window = 0;
  for (ga_param id : touched_) {
    const Param& p = params_[static_cast<size_t>(id)];
    if (p.held == Held::kNothing) continue;
    const int64_t chunks = chunk_count(p.count);
    const double scale = mean_of(p, 1) / samples;
    micros += sum(p.partials, chunks, &Partial::noise);
    window += sum(p.partials, chunks, &Partial::sum_squares) * scale * scale;
  }
  noise_.add(micros / samples, window, window_.weighted(), samples, config_.noise_smoothing);
}

void Context::empty_window() {
  for (Param& p : params_) {
    p.held = Held::kNothing;
    p.acquired = false;
    p.stale = false;
    p.pending = false;
    p.contributions = 0;
    p.last_micro = -1;
  }
  if (rows_held_ > 0)
    for (Tensor& t : tensors_) t.set.entries.clear();
  rows_held_ = 0;
  noise_repeated_ = false;
  contributions_.clear();
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
  r.loss_scale = loss_scale();
  r.window_dropped = window_.dropped();
  forget_delivered();

  if (r.weight > 0) {
    const double mean = config_.reduce == GA_REDUCE_MEAN ? 1 / r.weight : 1;
    or_break([&] {
      take_norms(mean);
      Reduction reduction = reduce(mean);
      r.norm = reduction.norm;
      // A sum of weights so small that its inverse is no float would make everything infinite.
      if ((!reduction.finite || mean > FLT_MAX) && config_.nonfinite != GA_NONFINITE_IGNORE) {
        if (config_.nonfinite == GA_NONFINITE_FAIL)
          fail(GA_ERROR_NONFINITE,
               "the gradient of parameter \"%s\" is infinite or NaN; the window is kept until "
               "ga_discard",
               first_nonfinite());
        r.outcome = GA_STEP_SKIPPED_NONFINITE;
        return;
      }
      r.lr = groups_.empty() ? 0 : lr(0);
      estimate_noise();
      update(mean, reduction);
      r.clip_factor = reduction.smallest_factor;
    });
  } else {
    r.outcome = GA_STEP_SKIPPED_EMPTY;
  }
  if (scaler_) {
    if (r.outcome == GA_STEP_SKIPPED_NONFINITE || r.window_dropped > 0)
      scaler_->back_off();
    else if (r.outcome == GA_STEP_APPLIED)
      scaler_->advance();
  }
  dropped_ += r.window_dropped;
  empty_window();
  r.windows = ++windows_;
  r.steps = steps_;
  r.skipped = windows_ - steps_;
  r.dropped = dropped_;
  r.noise_scale = noise_.scale();
  r.noise_trace = noise_.trace();
  r.noise_signal = noise_.signal();
  return r;
}

const char* Context::first_nonfinite() const {
  for (ga_param id : touched_) {
    const Param& p = params_[static_cast<size_t>(id)];
    if (p.held == Held::kRows && !p.stale) {
      for (const RowEntry& row : tensors_[static_cast<size_t>(id)].set.entries)
        if (row.partial.nonfinite) return name(id);
      continue;
    }
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
         name(id), info_of(p).name);
  if (!delivered_ || !p.delivered)
    fail(GA_ERROR_INVALID_STATE,
         "parameter \"%s\": there is no gradient; ga_gradient is legal after an applied ga_step in "
         "which the parameter had one, until the next accumulate, ga_discard or ga_step",
         name(id));
  if (dtype) *dtype = p.accumulator_dtype;
  return p.accumulator;
}

}  // namespace ga
