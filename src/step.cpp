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

double clip_factor(const ga_clip& clip, double norm) {
  if (clip.flavor == GA_FLAVOR_KERAS) return norm > clip.max_norm ? clip.max_norm / norm : 1;
  return std::min(1.0, clip.max_norm / (norm + 1e-6));
}

namespace {

GradientView identity(const Source& source) { return {source, 1, HUGE_VAL, 1}; }

int32_t native_dtype(const UpdateTask& task) { return task.f64 ? GA_F64 : GA_F32; }

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

const ga_clip& Context::clip_of(const Param& p) const {
  const Group& g = groups_[static_cast<size_t>(p.group)];
  return g.own_clip ? g.clip : clip_;
}

// What a parameter's accumulator is to be multiplied by; mean is that of the window.
double Context::mean_of(const Param& p, double mean) const {
  const bool running =
      config_.accumulation == GA_ACCUMULATE_RUNNING_MEAN && p.held == Held::kStored;
  return running ? mean * p.held_weight : mean;
}

// Where its gradient of the window is.
Source Context::source_of(ga_param id) {
  Param& p = params_[static_cast<size_t>(id)];
  Tensor& t = tensors_[static_cast<size_t>(id)];
  switch (p.held) {
    case Held::kAdopted:
      return {p.adopted, p.gradient_dtype, p.adopted_scale};
    case Held::kStored: {
      const Array target = target_of(id);
      return {target.data, target.format, 1};
    }
    case Held::kRows:
      t.sparse = {p.accumulator, p.count / std::max<int64_t>(t.rows, 1), t.set.slots,
                  t.set.entries.data(), static_cast<int64_t>(t.set.entries.size())};
      return {&t.sparse, kSparse, 1};
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

// The passes over gradient and parameter that adaptive clipping of a parameter takes.
void Context::add_unit_tasks(ga_param id, const GradientView& view) {
  const Param& p = params_[static_cast<size_t>(id)];
  Units* const units = tensors_[static_cast<size_t>(id)].units.get();
  if (!units) return;  // no elements
  const ga_clip& clip = clip_of(p);
  const Array param = param_of(p);
  unit_tasks_.push_back({view, p.f64, &units->pattern, units->gradient});
  unit_tasks_.push_back(
      {{{param.data, param.format, 1}, 1, HUGE_VAL, 1}, p.f64, &units->pattern, units->param});
  const bool limited = std::isfinite(view.limit);  // else the factors bring the scales with them
  agc_tasks_.push_back({units->gradient, units->param, units->gradient, p.f64, units->pattern.units,
                        clip.agc_factor, clip.agc_eps, limited ? 1 : view.source.scale * view.scale,
                        &units->clipped_squares, &units->smallest});
}

bool Context::by_units(const Param& p) const {
  const ga_clip& clip = clip_of(p);
  return clip_units_ && clip.scope == GA_CLIP_AGC && clip.when == GA_CLIP_STEP &&
         p.held != Held::kNothing;
}

// Clips by units: these parameters' gradients are read through the factors from now on.
void Context::clip_units(Span<const ga_param> ids, double mean, Reduction& r) {
  unit_tasks_.clear();
  agc_tasks_.clear();
  for (size_t i = 0; i < ids.size; ++i) {
    const ga_param id = ids.data[i];
    ClippedGradient& clipped = tensors_[static_cast<size_t>(id)].clipped;
    clipped = {};
    if (!by_units(params_[static_cast<size_t>(id)])) continue;
    fill_view(id, mean, clipped.gradient);
    add_unit_tasks(id, clipped.gradient);
  }
  backend_->unit_norms({unit_tasks_.data(), unit_tasks_.size()});
  backend_->agc({agc_tasks_.data(), agc_tasks_.size()});
  for (size_t i = 0; i < ids.size; ++i) {
    Param& p = params_[static_cast<size_t>(ids.data[i])];
    Tensor& t = tensors_[static_cast<size_t>(ids.data[i])];
    if (!by_units(p) || !t.units) continue;
    t.clipped.pattern = &t.units->pattern;
    t.clipped.factors = t.units->gradient;
    p.sum_squares = t.units->clipped_squares;
    r.smallest_factor = std::min(r.smallest_factor, t.units->smallest);
  }
}

// Divides the gradients of LAMB's groups by what their norm together exceeds max_grad_norm by.
void Context::limit_groups(int32_t kind) {
  const auto optimizer = [&](const Param& p) -> const ga_optimizer& {
    return groups_[static_cast<size_t>(p.group)].optimizer;
  };
  double squares = 0;
  for (ga_param id : touched_) {
    const Param& p = params_[static_cast<size_t>(id)];
    if (optimizer(p).kind == kind) squares += p.sum_squares * p.factor * p.factor;
  }
  for (ga_param id : touched_) {
    Param& p = params_[static_cast<size_t>(id)];
    const double most = optimizer(p).max_grad_norm;
    if (most > 0) p.factor /= std::max(1.0, std::sqrt(squares) / most);
  }
}

// The gradient as the optimizer sees it.
void Context::fill_clipped(ga_param id, double mean, GradientView& v) {
  const Param& p = params_[static_cast<size_t>(id)];
  Tensor& t = tensors_[static_cast<size_t>(id)];
  if (clip_units_ && t.clipped.pattern) {
    v.source = {&t.clipped, kClipped, 1};
    v.scale = p.factor;
    v.limit = HUGE_VAL;
    v.factor = 1;
    return;
  }
  fill_view(id, mean, v);
  if (std::isinf(v.limit))  // then mean and clip factor are one scalar, rounded once
    v.scale *= p.factor;
  else
    v.factor = p.factor;
}

double Context::average_gain(const Param& p) const {
  if (!p.averaged) return 1;
  const double t = static_cast<double>(steps_ + 1);
  return 1 - (ema_->kind == GA_EMA_TORCH ? ema_->decay : std::pow(1 - 1 / t, ema_->gamma + 1));
}

// Everything of an update but Op and gradient.
void Context::fill_update(ga_param id, UpdateTask& task) {
  Param& p = params_[static_cast<size_t>(id)];
  const Tensor& t = tensors_[static_cast<size_t>(id)];
  task.op = -1;
  task.f64 = p.f64;
  task.folded = nullptr;
  task.param = param_of(p);
  task.copy = {p.master ? p.data : nullptr, p.dtype};
  task.average = {nullptr, GA_F32};
  if (ema_) {
    task.average = average_of(p);
    task.average_gain = average_gain(p);
  }
  const int op = op_of(p);
  for (int k = 0; k < (op < 0 ? 0 : op_info(op).slots); ++k) task.state[k] = state_of(p, k);
  task.padded_state = true;
  task.count = p.count;
  task.first = 0;
  task.rounding = {false, 0};
  task.key = 0;
  if (t.options.rounding == GA_ROUND_STOCHASTIC)
    task.rounding = {true, key(Purpose::kCopy, steps_, 0, id)};
  if (ema_ || groups_[static_cast<size_t>(p.group)].optimizer.state_dtype == GA_BF16)
    task.key = key(Purpose::kState, steps_, 0, id);
  task.partials = p.partials;
  task.emitted = nullptr;
}

// One pass over parameters and state, with each parameter's own clip factor. What needs passes
// before that one, for norms over layers and units, comes after the others. Clocks move on the way:
// if a pass fails, nothing is looked at again.
void Context::update(double mean, Reduction& r) {
  folded_.clear();
  folded_for_ = {-1, -1, 0};
  layers_.clear();
  begin_updates();
  int32_t limited = -1;
  for (const Group& g : groups_)
    if (g.optimizer.max_grad_norm > 0) limited = g.optimizer.kind;
  for (ga_param id : touched_) {
    Param& p = params_[static_cast<size_t>(id)];
    const ga_optimizer& o = groups_[static_cast<size_t>(p.group)].optimizer;
    optimizer_info(o.kind, o.flavor).advance(o, p.clock);
    const int op = op_of(p);
    if (by_units(p) || (op >= 0 && op_info(op).norms > 0))
      layers_.push_back(id);
    else
      add_update(id, mean);
  }
  backend_->finish(finish_tasks_.span());
  backend_->update(update_tasks_.span());
  if (!layers_.empty()) update_layers(mean, r, limited);
  if (ema_) move_averages();
  for (Group& g : groups_)
    optimizer_info(g.optimizer.kind, g.optimizer.flavor).advance(g.optimizer, g.clock);
  ++steps_;
}

void Context::begin_updates() {
  update_tasks_.clear();
  finish_tasks_.clear();
}

// The clock that a parameter's optimizer goes by.
Clock Context::clock_of(const Param& p) const {
  const Group& g = groups_[static_cast<size_t>(p.group)];
  if (g.optimizer.flavor == GA_FLAVOR_TORCH) return p.clock;
  Clock clock = g.clock;
  optimizer_info(g.optimizer.kind, g.optimizer.flavor).advance(g.optimizer, clock);
  return clock;
}

// The task of a parameter's update, or of the delivery of its gradient to the program.
void Context::add_update(ga_param id, double mean) {
  Param& p = params_[static_cast<size_t>(id)];
  const int op = op_of(p);
  if (op < 0) {
    p.delivered = delivered_ = true;
    FinishTask& task = finish_tasks_.add();
    fill_clipped(id, mean, task.gradient);
    task.constant = 0;
    task.f64 = p.f64;
    task.target = {p.accumulator, p.accumulator_dtype};
    task.count = p.count;
    task.rounding = {false, 0};
    return;
  }
  UpdateTask& task = update_tasks_.add();
  fill_update(id, task);
  task.op = op;
  fill_clipped(id, mean, task.gradient);
  if (op_info(op).norms > 0) {
    if (op_info(op).factored) task.state[0] = {&tensors_[static_cast<size_t>(id)].outer, kOuter};
    fold_layer(id, task);
  } else {
    fold(p, op, task);
  }
  if (is_lazy(id))
    update_rows(id);
  else
    p.averaged = ema_.has_value();
}

// Parameters of a group have mostly been updated together: folds once for them.
void Context::fold(const Param& p, int op, UpdateTask& task) {
  const ga_optimizer& o = groups_[static_cast<size_t>(p.group)].optimizer;
  const Folded wanted = {p.group, op * 2 + (p.f64 ? 1 : 0),
                         o.flavor == GA_FLAVOR_TORCH ? p.clock.step : 0};
  if (folded_for_ != wanted) {
    op_info(op).fold[p.f64](o, {lr(p.group), clock_of(p), 0, 0, 0, {0, 0}}, folded_.add());
    folded_for_ = wanted;
  }
  task.folded = &folded_.last();
}

// Whether only the rows with a gradient are updated.
bool Context::is_lazy(ga_param id) const {
  return params_[static_cast<size_t>(id)].held == Held::kRows &&
         tensors_[static_cast<size_t>(id)].options.rows == GA_ROWS_LAZY;
}

// Makes of the last task, the update of a whole parameter, those of its rows with a gradient.
void Context::update_rows(ga_param id) {
  const Tensor& t = tensors_[static_cast<size_t>(id)];
  const Param& p = params_[static_cast<size_t>(id)];
  UpdateTask whole = update_tasks_.last();
  update_tasks_.drop_last();
  whole.average.data = nullptr;  // a pass of its own moves those of all rows
  whole.padded_state = false;
  whole.count = t.rows > 0 ? p.count / t.rows : 0;
  if (whole.gradient.source.format == kSparse)  // the rows at hand are there
    whole.gradient.source = {p.accumulator, p.accumulator_dtype, 1};
  const auto move = [](Array& a, int64_t elements) {
    if (a.data) a.data = static_cast<char*>(a.data) + elements * dtype_info(a.format).size;
  };
  for (const RowEntry& row : t.set.entries) {
    UpdateTask& task = update_tasks_.add();
    task = whole;
    task.first = row.row * whole.count;
    move(task.param, task.first);
    move(task.copy, task.first);
    for (int k = 0; k < op_info(task.op).slots; ++k) move(task.state[k], task.first);
  }
}

// Parameters of layer-wise optimizers, and those clipped by units: passes for their norms, then the
// update. So many at a time as the last cache holds, where the later passes then find them.
void Context::update_layers(double mean, Reduction& r, int32_t limited) {
  // A norm over groups is of gradients that have been clipped by units.
  const bool clip_first = limited >= 0 && clip_units_;
  if (clip_first) clip_units({layers_.data(), layers_.size()}, mean, r);
  if (limited >= 0) limit_groups(limited);
  for (size_t first = 0, end; first < layers_.size(); first = end) {
    int64_t bytes = 0;
    for (end = first; end < layers_.size(); ++end) {
      const Param& p = params_[static_cast<size_t>(layers_[end])];
      constexpr int64_t kStreams = 4;  // parameter, gradient, state
      bytes += p.count * kStreams * (p.f64 ? 8 : 4);
      if (end > first && bytes > backend_->cache_bytes() / 2) break;
    }
    const Span<const ga_param> ids = {&layers_[first], end - first};
    if (clip_units_ && !clip_first) clip_units(ids, mean, r);
    update_batch(ids, mean);
  }
}

void Context::update_batch(Span<const ga_param> ids, double mean) {
  factor_tasks_.clear();
  for (size_t i = 0; i < ids.size; ++i) add_factor_task(ids.data[i], mean);
  backend_->factor({factor_tasks_.data(), factor_tasks_.size()});

  begin_updates();
  bool in_turns = false;  // those that share scratch are made one after the other
  const auto layered = [&](ga_param id) {
    const int op = op_of(params_[static_cast<size_t>(id)]);
    return op >= 0 && op_info(op).norms > 0;
  };
  for (size_t i = 0; i < ids.size; ++i)
    if (layered(ids.data[i])) {
      add_update(ids.data[i], mean);
      UpdateTask& task = update_tasks_.last();
      const Param& p = params_[static_cast<size_t>(ids.data[i])];
      const bool fits = p.accumulator_dtype == native_dtype(task);
      task.emitted = fits ? p.accumulator : scratch_;
      in_turns = in_turns || op_info(task.op).orthogonal || (op_info(task.op).emits && !fits);
    }
  const Span<UpdateTask> measured = update_tasks_.span_from(0);
  size_t k = 0;
  if (!in_turns) backend_->measure({measured.data, measured.size});
  for (size_t i = 0; i < ids.size; ++i) {
    if (!layered(ids.data[i])) continue;
    UpdateTask& task = measured.data[k++];
    if (in_turns) backend_->measure({&task, 1});
    if (op_info(task.op).emits) task.gradient = identity({task.emitted, native_dtype(task), 1});
    if (op_info(task.op).orthogonal && task.count > 0) orthogonalize(ids.data[i], task);
    fold_layer(ids.data[i], task);
    if (!in_turns) continue;
    backend_->update({&task, 1});
    task.count = 0;  // done
  }
  for (size_t i = 0; i < ids.size; ++i)
    if (!layered(ids.data[i])) add_update(ids.data[i], mean);
  backend_->finish(finish_tasks_.span());
  backend_->update(update_tasks_.span());
}

// Folds a layer's Op, with the norms of its first pass once that has run.
void Context::fold_layer(ga_param id, UpdateTask& task) {
  const Param& p = params_[static_cast<size_t>(id)];
  const Tensor& t = tensors_[static_cast<size_t>(id)];
  const ga_optimizer& o = groups_[static_cast<size_t>(p.group)].optimizer;
  StepInput in = {lr(p.group),
                  clock_of(p),
                  t.rows,
                  t.rows > 0 ? p.count / t.rows : 0,
                  std::sqrt(p.sum_squares) * p.factor,
                  {0, 0}};
  if (task.folded) {
    const int64_t chunks = chunk_count(p.count);
    in.norm[0] = std::sqrt(sum(p.partials, chunks, &Partial::sum_squares));
    in.norm[1] = std::sqrt(sum(p.partials, chunks, &Partial::limited));
  }
  op_info(task.op).fold[p.f64](o, in, folded_.add());
  task.folded = &folded_.last();
}

// Brings a factored second moment up to this step.
void Context::add_factor_task(ga_param id, double mean) {
  const Param& p = params_[static_cast<size_t>(id)];
  Tensor& t = tensors_[static_cast<size_t>(id)];
  const int op = op_of(p);
  if (op < 0 || !op_info(op).factored || p.count == 0) return;
  const ga_optimizer& o = groups_[static_cast<size_t>(p.group)].optimizer;
  const OptimizerInfo& info = optimizer_info(o.kind, o.flavor);
  const Matrices m = matrices_of(t);
  FactorTask task = {};
  fill_clipped(id, mean, task.gradient);
  // Norms over units do not see the factor.
  task.gradient.scale *= task.gradient.factor;
  task.gradient.limit *= task.gradient.factor;
  task.row_pattern = &t.factor_rows->pattern;
  task.column_pattern = &t.factor_columns->pattern;
  task.row_sums = t.factor_rows->gradient;
  task.column_sums = t.factor_columns->gradient;
  task.f64 = p.f64;
  task.rows = p.state[0];
  task.columns = p.state[1];
  task.scales = p.state[2];
  task.row_count = m.rows;
  task.column_count = m.columns;
  task.matrices = m.count;
  task.gain = info.factor_gain(o, p.clock);
  task.floor = info.factor_floor(o);
  factor_tasks_.push_back(task);
  t.outer = {task.rows, task.columns, task.scales, m.rows, m.columns};
}

// Divides what the first pass has emitted by its norm and makes it orthogonal.
void Context::orthogonalize(ga_param id, UpdateTask& task) {
  const Param& p = params_[static_cast<size_t>(id)];
  const ga_optimizer& o = groups_[static_cast<size_t>(p.group)].optimizer;
  const double norm = std::sqrt(sum(p.partials, chunk_count(p.count), &Partial::sum_squares));
  OrthogonalizeTask ortho = {};
  ortho.x = static_cast<float*>(task.emitted);
  ortho.rows = tensors_[static_cast<size_t>(id)].rows;
  ortho.columns = p.count / ortho.rows;
  const double divisor = std::max(norm, o.eps);
  ortho.scale = static_cast<float>(divisor > 0 ? 1 / divisor : 0);
  ortho.steps = o.ns_steps;
  ortho.a = static_cast<float>(o.ns_coefficients[0]);
  ortho.b = static_cast<float>(o.ns_coefficients[1]);
  ortho.c = static_cast<float>(o.ns_coefficients[2]);
  // Behind what may have been emitted there.
  ortho.scratch = static_cast<float*>(scratch_) + (task.emitted == scratch_ ? p.count : 0);
  task.gradient = identity({backend_->orthogonalize(ortho), GA_F32, 1});
}

// The averages of parameters that no update has moved.
void Context::move_averages() {
  update_tasks_.clear();
  size_t next = 0;
  for (size_t i = 0; i < params_.size(); ++i) {
    const auto id = static_cast<ga_param>(i);
    Param& p = params_[i];
    const bool touched = next < touched_.size() && touched_[next] == id;
    if (touched) ++next;
    if (!p.average || (touched && op_of(p) >= 0 && !is_lazy(id))) continue;
    UpdateTask& task = update_tasks_.add();
    fill_update(id, task);
    task.copy.data = nullptr;
    p.averaged = true;
  }
  backend_->update(update_tasks_.span());
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
         name(id), optimizer_info(o.kind, o.flavor).name);
  if (!delivered_ || !p.delivered)
    fail(GA_ERROR_INVALID_STATE,
         "parameter \"%s\": there is no gradient; ga_gradient is legal after an applied ga_step in "
         "which the parameter had one, until the next accumulate, ga_discard or ga_step",
         name(id));
  if (dtype) *dtype = p.accumulator_dtype;
  return p.accumulator;
}

}  // namespace ga
