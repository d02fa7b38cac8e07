// SPDX-License-Identifier: Apache-2.0
// What the host writes into the tables (tables.hpp): the options of the context and its groups, all
// entries of a parameter when something of it changes, and at the end of a window what that has brought.
#include "context/context.hpp"
#include "core/tensor.hpp"
#include "ranks/exchange.hpp"

namespace ga {

// ---- Options of the context and its groups --------------------------------------------------------

void Context::settings_changed(bool tensors) {
  if (eager_) eager_->recall();
  if (exchange_) exchange_->forget_settings(tensors);
}

void Context::tell_settings() {
  settings_changed(false);
  Settings& s = tables_.settings.edit(0);
  s.reduce = config_.reduce;
  s.missing = config_.missing;
  s.nonfinite = config_.nonfinite;
  s.gradient_kind = config_.gradient_kind;
  s.running_mean = config_.accumulation == GA_ACCUMULATE_RUNNING_MEAN;
  s.deferring = deferring();
  s.clip_micro = clip_micro_;
  s.scaled = scaled_;
  s.noise = config_.noise_scale != 0;
  s.clips = params_.clip.scope != GA_CLIP_NONE;
  for (const Group& g : params_.groups)
    s.clips = s.clips || params_.clip_of(g).scope != GA_CLIP_NONE;
  s.bounded = -1;
  for (const Group& g : params_.groups)
    if (g.info->limits_norm && g.optimizer.max_grad_norm > 0) s.bounded = g.optimizer.kind;
  s.loss_scale = config_.loss_scale;
  s.noise_smoothing = config_.noise_smoothing;
  s.seed = config_.seed;
  s.scaler = scaler_;
  if (ema_) s.ema = *ema_;
  tell_checksum();
  tables_.settings.flush(*backend_);
}

// Of the settings, to be compared over ranks by a device, replays of a graph included.
void Context::tell_checksum() {
  if (exchange_ && exchange_->on_device())
    tables_.settings.set(0, &Settings::checksum, exchange_->settings_digest());
}

void Context::tell_groups() {
  settings_changed(false);
  for (size_t k = 0; k < params_.groups.size(); ++k) {
    const Group& g = params_.groups[k];
    tables_.group_inputs.edit(k) = {
        g.optimizer, {g.schedule, g.rates.at()}, params_.clip_of(g), g.own_clip};
  }
  tell_checksum();
  tables_.settings.flush(*backend_);  // now, since only replays of a graph may follow
  tables_.group_inputs.flush(*backend_);
}

// Sets the loss scale and its counters to their initial values.
void Context::tell_scaler() {
  const ScalerState state = {as_f32(scaler_.initial_scale), 0, 0};
  const auto next = static_cast<float>(scaled_ ? state.scale : config_.loss_scale);
  backend_->write(&tables_.control.at()->scaler, &state, sizeof state);
  backend_->write(&tables_.control.at()->loss_scale, &next, sizeof next);
}

void Context::tell_scales(size_t i) {
  settings_changed(true);
  if (i >= prepared_) return;
  const Tensor& t = params_.tensor(i);
  tables_.param_inputs.set(i, &ParamInput::lr_scale, t.lr_scale);
  tables_.param_inputs.set(i, &ParamInput::weight_decay_scale, t.weight_decay_scale);
  tell_checksum();
  tables_.settings.flush(*backend_);
  tables_.param_inputs.flush(*backend_);  // now, since only replays of a graph may follow
}

void Context::set_tables() {
  settings_changed(true);
  const ScalarTables tables = {tables_.settings.at(),
                               tables_.control.at(),
                               tables_.group_inputs.at(),
                               tables_.group_states.at(),
                               tables_.param_inputs.at(),
                               tables_.param_states.at(),
                               tables_.plans.at(),
                               static_cast<int64_t>(params_.groups.size()),
                               static_cast<int64_t>(prepared_),
                               batch_norms_.inputs().at(),
                               static_cast<int64_t>(batch_norms_.inputs().size())};
  const TaskTables tasks = {tables_.updates.host_data(), tables_.measures.host_data(),
                            tables_.units.host_data(),   tables_.factors.host_data(),
                            tables_.updates.at(),        tables_.measures.at(),
                            tables_.units.at(),          tables_.factors.at()};
  backend_->set_tables(tables, tasks);
  if (eager_) eager_->set_tables(tables, tasks);
}

// ---- What the tables have of a parameter --------------------------------------------------------

// Writes all entries of a parameter anew, from its arrays, its options and those of its group.
void Context::describe(size_t i) {
  describe_input(i);
  tables_.updates.edit(i) = {};
  tables_.measures.edit(i) = {};
  tables_.units.edit(i) = {};
  tables_.factors.edit(i) = {};
  tables_.composites.edit(i) = {};
  if (!params_[i].owns) return;
  describe_update(i);
  if (params_.tensor(i).units[Tensor::kClipUnits]) describe_units(i);
  const int op = params_.op_of(params_[i]);
  if (op >= 0 && (op_info(op).factored || op_info(op).row_state)) describe_factored(i);
  set_arrays(i);
  tables_.measures.edit(i) = tables_.updates[i];
  if (params_.is_layered(params_[i])) describe_layered(i);
  describe_views(i);
  set_gradient(i);
}

void Context::describe_input(size_t i) {
  settings_changed(true);
  const Param& p = params_[i];
  const Tensor& t = params_.tensor(i);
  ParamInput& in = tables_.param_inputs.edit(i);
  in = {};
  in.partials = p.partials;
  in.rows = t.set;
  in.count = in.measured_count = p.count;
  if (exchange_ && exchange_->on_device())
    in.measured_count = exchange_->own_piece(static_cast<ga_param>(i)).count;
  in.extent = t.rows;
  in.weight = 1;
  in.lr_scale = t.lr_scale;
  in.weight_decay_scale = t.weight_decay_scale;
  in.key = t.key;
  in.group = p.group;
  in.op = params_.op_of(p);
  in.held = p.held();
  in.f64 = p.f64;
  in.frozen = p.frozen || !p.owns;
  in.clamped = params_.norm_after_value(p);
  in.maximum = p.maximum;
  in.by_units = params_.by_units(i);
  in.clipped_in_parts = exchange_ && exchange_->on_device() && params_.is_clipped_in_parts(i);
  in.lazy = t.options.rows == GA_ROWS_LAZY;
  in.average = ema_ && p.owns && p.count > 0;
  in.by_chance = t.options.rounding == GA_ROUND_STOCHASTIC ||
                 params_.group_of(p).optimizer.state_dtype == GA_BF16 ||
                 (in.average && arrays_.average_of(p).format == GA_BF16);
}

void Context::describe_update(size_t i) {
  const Param& p = params_[i];
  const Tensor& t = params_.tensor(i);
  const int op = params_.op_of(p);
  const int64_t columns = t.rows > 0 ? p.count / t.rows : 0;
  Composites& composites = tables_.composites.edit(i);
  composites.pair = {p.accumulator, t.low, p.accumulator_dtype};
  composites.sparse = {p.accumulator, columns, t.set};
  UpdateTask& update = tables_.updates.edit(i);
  update.plan = tables_.plans.at(i);
  update.first = p.share.first;
  update.count = p.share.count;
  update.op = op;
  update.f64 = p.f64;
  if (p.master) update.copy = p.shared_data();
  update.follows = p.master && params_.follows(i);
  update.delivered = {op < 0 ? p.accumulator : nullptr, p.accumulator_dtype};
  update.padded_state = !params_.in_pieces(i);  // a piece may end where another begins
  update.by_chance = t.options.rounding == GA_ROUND_STOCHASTIC;
  update.rows = t.options.rows == GA_ROWS_LAZY ? t.set : nullptr;
  update.columns = columns;
  update.partials = p.partials;
}

void Context::describe_units(size_t i) {
  const Param& p = params_[i];
  const Units& made = *params_.tensor(i).units[Tensor::kClipUnits];
  const ga_clip& clip = params_.clip_of(p);
  UnitTask& units = tables_.units.edit(i);
  units.f64 = p.f64;
  units.pattern = made.pattern.at();
  units.sums = made.gradient;
  units.param_sums = made.param;
  units.factors = made.factors;
  units.totals = made.totals;
  if (exchange_) exchange_->describe_units(static_cast<ga_param>(i), made.pattern[0], units);
  units.factor = clip.agc_factor;
  units.eps = clip.agc_eps;
}

// A state that is not element by element: how it is brought up, and the slot that the Op reads.
void Context::describe_factored(size_t i) {
  const Param& p = params_[i];
  const Tensor& t = params_.tensor(i);
  const bool by_rows = op_info(params_.op_of(p)).row_state;
  UpdateTask& update = tables_.updates.edit(i);
  update.state[0] = {&tables_.composites.at(i)->outer, kOuter};
  if (p.share.count == 0) return;
  const Units& rows = *t.units[Tensor::kFactorRows];
  const int64_t columns = p.count / t.rows;
  const Matrices m = by_rows ? Matrices{p.share.count / columns, columns, 1} : matrices_of(t);
  FactorTask& factor = tables_.factors.edit(i);
  factor.plan = tables_.plans.at(i);
  factor.row_pattern = rows.pattern.at();
  factor.row_sums = rows.gradient;
  factor.f64 = p.f64;
  factor.row_count = m.rows;
  factor.column_count = m.columns;
  factor.matrices = m.count;
  if (by_rows) {
    update.row_state = tables_.factors.at(i);
  } else {
    const Units& columns = *t.units[Tensor::kFactorColumns];
    factor.column_pattern = columns.pattern.at();
    factor.column_sums = columns.gradient;
  }
}

// Where the arrays lie that an update reads and writes.
void Context::set_arrays(size_t i) {
  const Param& p = params_[i];
  const int op = params_.op_of(p);
  UpdateTask& update = tables_.updates.edit(i);
  update.param = p.values();
  update.average = arrays_.average_of(p);
  if (tables_.factors[i].row_pattern) {
    FactorTask& factor = tables_.factors.edit(i);
    factor.rows = p.state[0];
    if (factor.column_pattern) {
      factor.columns = p.state[1];
      factor.scales = p.state[2];
    }
    tables_.composites.edit(i).outer = {factor.rows, factor.columns, factor.scales,
                                        factor.row_count, factor.column_count};
  } else if (op >= 0 && update.state[0].format != kOuter) {
    for (int k = 0; k < op_info(op).slots; ++k) update.state[k] = arrays_.state_of(p, k);
  }
  if (params_.is_layered(p)) {
    UpdateTask& measure = tables_.measures.edit(i);
    measure.param = update.param;
    std::copy_n(update.state, kMaxSlots, measure.state);
  }
  if (!params_.tensor(i).units[Tensor::kClipUnits]) return;
  if (update.follows) {
    tables_.units.edit(i).param = {tables_.updates.at(i), kFollowedWhole, 1, nullptr};
    return;
  }
  const Array param = whole_of(update.param, p.share.first);
  tables_.units.edit(i).param = {param.data, param.format, 1, nullptr};
}

// The passes of a layer-wise Op: what it emits and where, and what its second pass reads in place of the
// gradient.
void Context::describe_layered(size_t i) {
  const Param& p = params_[i];
  const OpInfo& info = op_info(params_.op_of(p));
  UpdateTask& update = tables_.updates.edit(i);
  UpdateTask& measure = tables_.measures.edit(i);
  const Array room = p.emitted              ? Array{p.emitted, p.real()}
                     : p.fits_accumulator() ? offset({p.accumulator, p.real()}, p.share.first)
                                            : Array{arrays_.scratch(), p.real()};
  if (info.emits) measure.emitted = room.data;
  if (eager_) measure.partials = p.partials + chunk_count(p.count);  // of the gradient: the first
  if (exchange_) exchange_->describe_measure(static_cast<ga_param>(i), measure);
  const void* made = whole_of(room, p.share.first).data;
  if (info.orthogonal && p.share.count > 0)
    made = orthogonal_task(static_cast<ga_param>(i)).result();
  if (info.emits) update.gradient = identity({made, p.real(), 1, nullptr});
}

// The views of the gradient; where it lies, set_gradient() tells.
void Context::describe_views(size_t i) {
  const ParamPlan* const plan = tables_.plans.at(i);
  GradientView view = {{}, &plan->gradient}, raw = {{}, &plan->raw};
  if (params_.by_units(i)) {
    const Units& units = *params_.tensor(i).units[Tensor::kClipUnits];
    tables_.composites.edit(i).clipped = {raw, units.pattern.at(), units.factors};
    tables_.units.edit(i).gradient = raw;
    view.source = {&tables_.composites.at(i)->clipped, kClipped, 1, nullptr};
    raw = identity(view.source);
  }
  const bool layered = params_.is_layered(params_[i]);
  if (layered) tables_.measures.edit(i).gradient = view;
  if (!layered || !op_info(params_.op_of(params_[i])).emits)
    tables_.updates.edit(i).gradient = view;
  tables_.factors.edit(i).gradient = raw;
}

// ---- Where the gradients lie --------------------------------------------------------------------

// Where the gradient of the window lies.
Source Context::source_of(ga_param id) const {
  const Param& p = params_[id];
  switch (p.held()) {
    case Held::kAdopted:
      return adopted_of(p);
    case Held::kStored: {
      const Array target = target_of(id);
      return {target.data, target.format, 1, nullptr};
    }
    case Held::kSummed:
      return {p.summed, p.real(), 1, nullptr};
    case Held::kRows:
      return {&tables_.composites.at(static_cast<size_t>(id))->sparse, kSparse, 1, nullptr};
    default:
      return {nullptr, GA_F32, 1, nullptr};
  }
}

// Calls f(table, source) for every table whose entry says where the gradient lies; source(entry) is that
// member of the entry.
template <class F>
void Context::each_source(size_t i, F&& f) {
  const auto of_task = [](auto& task) -> Source& { return task.gradient.source; };
  if (params_.by_units(i)) {  // everything else reads the gradient through these two
    f(tables_.composites, [](Composites& c) -> Source& { return c.clipped.gradient.source; });
    f(tables_.units, of_task);
    return;
  }
  const bool layered = params_.is_layered(params_[i]);
  if (layered) f(tables_.measures, of_task);
  if (!layered || !op_info(params_.op_of(params_[i])).emits) f(tables_.updates, of_task);
  if (tables_.factors[i].row_pattern) f(tables_.factors, of_task);
}

// Writes where the gradient lies into every table.
void Context::set_gradient(size_t i) {
  Source source = source_of(static_cast<ga_param>(i));
  if (params_[i].held() == Held::kAdopted) told_[i] = source;
  // The loss scale of the window that ends: by the time the step reads the gradient, the scaler holds the
  // next one.
  if (source.divisor) source.divisor = &tables_.control.at()->result.loss_scale;
  each_source(i, [&](auto& table, auto source_in) { source_in(table.edit(i)) = source; });
}

// Like set_gradient(), if only the address of an adopted gradient is new: then only the words with the
// address go to a device, not the tables. Returns false if more is new.
bool Context::move_gradient(size_t i) {
  if (config_.device == GA_DEVICE_CPU || tables_.param_inputs[i].held != Held::kAdopted)
    return false;
  const Source source = adopted_of(params_[i]);
  Source known = told_[i];
  known.data = source.data;
  if (!(known == source)) return false;
  if (told_[i].data == source.data) return true;
  told_[i] = source;
  each_source(i, [&](auto& table, auto source_in) {
    const auto data = [&](auto& entry) -> const void*& { return source_in(entry).data; };
    moved_.push_back(table.put(i, data, source.data));
  });
  return true;
}

// Sends the addresses that move_gradient() collected.
void Context::tell_moved() {
  if (moved_.empty()) return;
  try {
    // A capture may end before ga_step, which then sends the tables.
    if (backend_->capturing())
      edit_params();
    else
      backend_->upload({moved_.data(), moved_.size()});
  } catch (...) {
    edit_params();
    moved_.clear();
    throw;
  }
  moved_.clear();
}

// Writes what this window has brought to a parameter.
void Context::tell_param(size_t i) {
  const bool running = config_.accumulation == GA_ACCUMULATE_RUNNING_MEAN;
  const Param& p = params_[i];
  const ParamInput& in = tables_.param_inputs[i];
  const Held held = p.held();
  const bool weighed = running && held == Held::kStored;
  const bool moved = held == Held::kAdopted && !(told_[i] == adopted_of(p));
  const bool elsewhere = in.held != held || moved;
  if (!elsewhere && !weighed && held != Held::kRows) return;
  tables_.param_inputs.set(i, &ParamInput::weight, weighed ? p.held_weight : 1.0);
  tables_.param_inputs.set(i, &ParamInput::stale_rows, held == Held::kRows && p.stale);
  if (!elsewhere) return;
  if (moved && move_gradient(i)) return;
  tables_.param_inputs.set(i, &ParamInput::held, held);
  set_gradient(i);
}

// Has the tables of a parameter that is updated ahead of ga_step read the sum of its gradients over the ranks, which
// need not be there yet.
void Context::tell_sum(size_t i, const Array& sum) {
  tables_.param_inputs.set(i, &ParamInput::weight, 1.0);
  tables_.param_inputs.set(i, &ParamInput::stale_rows, false);
  tables_.param_inputs.set(i, &ParamInput::held, Held::kSummed);
  each_source(i, [&](auto& table, auto source_in) {
    source_in(table.edit(i)) = {sum.data, sum.format, 1, nullptr};
  });
}

void Context::edit_params() {
  tables_.edit_params(!layers_.empty() || !factored_first_.empty() || unit_lists_);
}

void Context::flush() {
  tell_moved();
  tables_.flush(*backend_);
  batch_norms_.flush();
}

}  // namespace ga
