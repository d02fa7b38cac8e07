// SPDX-License-Identifier: Apache-2.0
// The update of parameters and state at the end of a window: one pass, or for layer-wise optimizers
// and clipping by units several, a batch of parameters at a time.
#include <algorithm>
#include <cmath>

#include "context.hpp"
#include "error.hpp"
#include "tensor.hpp"

namespace ga {
namespace {

int32_t native_dtype(const UpdateTask& task) { return task.f64 ? GA_F64 : GA_F32; }

}  // namespace

// A key for random bits: splitmix64 over all that tells one use from another.
uint64_t Context::key(Purpose purpose, int64_t a, int64_t b, int64_t c) const {
  uint64_t z = config_.seed;
  for (const uint64_t part : {static_cast<uint64_t>(purpose), static_cast<uint64_t>(a),
                              static_cast<uint64_t>(b), static_cast<uint64_t>(c)}) {
    z += 0x9e3779b97f4a7c15 + part;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9;
    z = (z ^ (z >> 27)) * 0x94d049bb133111eb;
    z ^= z >> 31;
  }
  return z;
}

// The gradient as the optimizer sees it.
void Context::fill_clipped(ga_param id, double mean, GradientView& v) {
  const Param& p = params_[static_cast<size_t>(id)];
  Tensor& t = tensors_[static_cast<size_t>(id)];
  if (by_units(p) && t.clipped.pattern) {
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

// What changes from step to step in an update, but for Op and gradient.
void Context::begin_update(ga_param id, UpdateTask& task) {
  const Param& p = params_[static_cast<size_t>(id)];
  task.count = p.count;
  if (ema_) task.average_gain = average_gain(p);
  if (p.by_chance) task.rounding = {true, key(Purpose::kCopy, steps_, 0, id)};
  if (ema_ || groups_[static_cast<size_t>(p.group)].optimizer.state_dtype == GA_BF16)
    task.key = key(Purpose::kState, steps_, 0, id);
}

// One pass over parameters and state, with each parameter's own clip factor. What needs passes
// before that one, for norms over layers and units, comes after the others. Clocks move on the way:
// if a pass fails, nothing is looked at again.
void Context::update(double mean, Reduction& r) {
  folded_.clear();
  folded_for_ = {-1, -1, 0};
  layers_.clear();
  update_tasks_.clear();
  finish_tasks_.clear();
  for (UpdateTask& task : updates_) task.count = 0;
  int32_t limited = -1;
  for (const Group& g : groups_)
    if (g.info->limits_norm && g.optimizer.max_grad_norm > 0) limited = g.optimizer.kind;
  for (ga_param id : touched_) {
    Param& p = params_[static_cast<size_t>(id)];
    const Group& g = groups_[static_cast<size_t>(p.group)];
    g.info->advance(g.optimizer, p.clock);
    const int op = op_of(p);
    if (by_units(p) || (op >= 0 && op_info(op).norms > 0))
      layers_.push_back(id);
    else
      add_update(id, mean);
  }
  backend_->finish(finish_tasks_.span());
  backend_->update({updates_.data(), updates_.size()});
  if (!layers_.empty()) update_layers(mean, r, limited);
  if (lazy_)
    for (ga_param id : touched_)
      if (is_lazy(id)) update_rows(id);
  if (ema_) move_averages();
  for (Group& g : groups_) g.info->advance(g.optimizer, g.clock);
  ++steps_;
}

// The clock that a parameter's optimizer goes by.
Clock Context::clock_of(const Param& p) const {
  const Group& g = groups_[static_cast<size_t>(p.group)];
  if (g.optimizer.flavor == GA_FLAVOR_TORCH) return p.clock;
  Clock clock = g.clock;
  g.info->advance(g.optimizer, clock);
  return clock;
}

// The task of a parameter's update, or of the delivery of its gradient to the program.
void Context::add_update(ga_param id, double mean) {
  Param& p = params_[static_cast<size_t>(id)];
  UpdateTask& task = updates_[static_cast<size_t>(id)];
  task.op = op_of(p);
  if (task.op < 0) return deliver(id, mean);
  begin_update(id, task);
  fill_clipped(id, mean, task.gradient);
  fold(p, task);
  if (is_lazy(id))
    task.count = 0;  // see update_rows
  else
    p.averaged = ema_.has_value();
}

void Context::deliver(ga_param id, double mean) {
  Param& p = params_[static_cast<size_t>(id)];
  p.delivered = delivered_ = true;
  FinishTask& task = finish_tasks_.add();
  fill_clipped(id, mean, task.gradient);
  task.constant = 0;
  task.f64 = p.f64;
  task.target = {p.accumulator, p.accumulator_dtype};
  task.count = p.count;
  task.rounding = {false, 0};
}

// The update of a parameter with a layer-wise optimizer, on the list.
UpdateTask& Context::add_layer(ga_param id, double mean) {
  Param& p = params_[static_cast<size_t>(id)];
  UpdateTask& task = update_tasks_.add();
  task = updates_[static_cast<size_t>(id)];
  task.op = op_of(p);
  task.folded = nullptr;
  begin_update(id, task);
  fill_clipped(id, mean, task.gradient);
  if (op_info(task.op).factored) task.state[0] = {&tensors_[static_cast<size_t>(id)].outer, kOuter};
  const bool fits = p.accumulator_dtype == native_dtype(task);
  task.emitted = fits ? p.accumulator : scratch_;
  fold_layer(id, task);
  p.averaged = ema_.has_value();
  return task;
}

// Parameters of a group have mostly been updated together: folds once for them.
void Context::fold(const Param& p, UpdateTask& task) {
  const ga_optimizer& o = groups_[static_cast<size_t>(p.group)].optimizer;
  const Folded wanted = {p.group, task.op * 2 + (p.f64 ? 1 : 0),
                         o.flavor == GA_FLAVOR_TORCH ? p.clock.step : 0};
  if (folded_for_ != wanted) {
    op_info(task.op).fold[p.f64](o, {lr(p.group), clock_of(p), 0, 0, 0, {0, 0}}, folded_.add());
    folded_for_ = wanted;
  }
  task.folded = &folded_.last();
}

// Whether only the rows with a gradient are updated.
bool Context::is_lazy(ga_param id) const {
  const Held held = params_[static_cast<size_t>(id)].held;
  return (held == Held::kRows || held == Held::kNothing) &&
         tensors_[static_cast<size_t>(id)].options.rows == GA_ROWS_LAZY;
}

// The updates of a parameter's rows with a gradient, so many at a time as there is room for.
void Context::update_rows(ga_param id) {
  const Tensor& t = tensors_[static_cast<size_t>(id)];
  const Param& p = params_[static_cast<size_t>(id)];
  UpdateTask whole = updates_[static_cast<size_t>(id)];
  whole.average.data = nullptr;  // a pass of its own moves those of all rows
  whole.padded_state = false;
  whole.count = t.rows > 0 ? p.count / t.rows : 0;
  if (whole.gradient.source.format == kSparse)  // the rows at hand are there
    whole.gradient.source = {p.accumulator, p.accumulator_dtype, 1};
  const auto move = [](Array& a, int64_t elements) {
    if (a.data) a.data = static_cast<char*>(a.data) + elements * dtype_info(a.format).size;
  };
  const std::vector<RowEntry>& rows = t.set.entries;
  for (size_t first = 0; first < rows.size(); first += kRowBatch) {
    update_tasks_.clear();
    const size_t end = std::min(rows.size(), first + kRowBatch);
    for (size_t r = first; r < end; ++r) {
      UpdateTask& task = update_tasks_.add();
      task = whole;
      task.first = rows[r].row * whole.count;
      move(task.param, task.first);
      move(task.copy, task.first);
      for (int k = 0; k < op_info(task.op).slots; ++k) move(task.state[k], task.first);
    }
    backend_->update(update_tasks_.span());
  }
}

// Parameters of layer-wise optimizers, and those clipped by units: passes for their norms, then the
// update. So many at a time as the last cache holds, where the later passes then find them.
void Context::update_layers(double mean, Reduction& r, int32_t limited) {
  // A norm over groups is of gradients that have been clipped by units.
  const bool clip_first = limited >= 0 && clip_units_;
  if (clip_first) clip_units({layers_.data(), layers_.size()}, mean, r);
  if (limited >= 0) limit_groups(limited);
  if (clip_units_ && !clip_first) {
    // Those that can be clipped and updated in one, to the front.
    const auto in_pieces = [&](ga_param id) {
      const Param& p = params_[static_cast<size_t>(id)];
      const Tensor& t = tensors_[static_cast<size_t>(id)];
      const int op = op_of(p);
      return by_units(p) && t.units && t.units->pattern.shared && op >= 0 &&
             op_info(op).norms == 0 && !is_lazy(id);
    };
    const auto rest = std::partition(layers_.begin(), layers_.end(), in_pieces);
    update_units({layers_.data(), static_cast<size_t>(rest - layers_.begin())}, mean, r);
    layers_.erase(layers_.begin(), rest);
  }
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

void Context::update_units(Span<const ga_param> ids, double mean, Reduction& r) {
  plan_units(ids, mean);
  update_tasks_.clear();
  for (size_t i = 0; i < ids.size; ++i) {
    const ga_param id = ids.data[i];
    add_update(id, mean);
    UpdateTask& task = updates_[static_cast<size_t>(id)];
    update_tasks_.add() = task;
    update_tasks_.last().padded_state = false;  // a piece may end where another begins
    update_tasks_.last().units = &unit_tasks_[i];
    update_tasks_.last().agc = &agc_tasks_[i];
    task.count = 0;
  }
  backend_->update_by_units(update_tasks_.span());
  for (size_t i = 0; i < ids.size; ++i) take_clipped(ids.data[i], r);
}

void Context::update_batch(Span<const ga_param> ids, double mean) {
  factor_tasks_.clear();
  for (size_t i = 0; i < ids.size; ++i) add_factor_task(ids.data[i], mean);
  backend_->factor({factor_tasks_.data(), factor_tasks_.size()});

  update_tasks_.clear();
  finish_tasks_.clear();
  bool in_turns = false;  // those that share scratch are made one after the other
  const auto layered = [&](ga_param id) {
    const int op = op_of(params_[static_cast<size_t>(id)]);
    return op >= 0 && op_info(op).norms > 0;
  };
  for (size_t i = 0; i < ids.size; ++i)
    if (layered(ids.data[i])) {
      const UpdateTask& task = add_layer(ids.data[i], mean);
      const OpInfo& op = op_info(task.op);
      in_turns = in_turns || op.orthogonal || (op.emits && task.emitted == scratch_);
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
  for (size_t i = 0; i < ids.size; ++i) {
    const ga_param id = ids.data[i];
    if (layered(id)) continue;
    add_update(id, mean);
    UpdateTask& task = updates_[static_cast<size_t>(id)];
    if (task.count > 0) update_tasks_.add() = task;
    task.count = 0;
  }
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
  const OptimizerInfo& info = info_of(p);
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
    task = updates_[i];
    task.op = -1;
    begin_update(id, task);
    task.copy.data = nullptr;
    p.averaged = true;
  }
  backend_->update(update_tasks_.span());
}

}  // namespace ga
