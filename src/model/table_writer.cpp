// SPDX-License-Identifier: Apache-2.0
// What the host writes into the tables (tables.hpp): the options of the context and its groups, all
// entries of a parameter when something of it changes, and at the end of a window what that has brought.
#include "model/table_writer.hpp"

#include "core/tensor.hpp"

namespace ga {

void TableWriter::reserve(size_t params) {
  known_.resize(params);
  if (model_.config.device != GA_DEVICE_CPU) moved_.reserve(3 * params);
}

// ---- Options of the context and its groups --------------------------------------------------------

void TableWriter::settings_changed(bool tensors) {
  model_.speculation->recall();
  model_.ranks->forget_settings(tensors);
}

void TableWriter::write_settings() {
  ++changes_;
  settings_changed(false);
  Settings& s = model_.tables.settings.edit(0);
  s.reduce = model_.config.reduce;
  s.missing = model_.config.missing;
  s.nonfinite = model_.config.nonfinite;
  s.gradient_kind = model_.config.gradient_kind;
  s.running_mean = model_.config.accumulation == GA_ACCUMULATE_RUNNING_MEAN;
  s.deferring = model_.options.deferring();
  s.clip_micro = model_.options.clip_micro();
  s.scaled = model_.options.scaled;
  s.noise = model_.config.noise_scale != 0;
  s.clips = model_.params.clip.scope != GA_CLIP_NONE;
  for (const Group& g : model_.params.groups)
    s.clips = s.clips || model_.params.clip_of(g).scope != GA_CLIP_NONE;
  s.norms_given = model_.ranks->has_own_parameters();
  s.reduced_over = model_.ranks->samples().reduced_over;
  s.bounded = -1;
  for (const Group& g : model_.params.groups)
    if (g.info->limits_norm && g.optimizer.max_grad_norm > 0) s.bounded = g.optimizer.kind;
  s.loss_scale = model_.config.loss_scale;
  s.noise_smoothing = model_.config.noise_smoothing;
  s.seed = model_.config.seed;
  s.scaler = model_.options.scaler;
  if (model_.options.ema) s.ema = *model_.options.ema;
  write_checksum();
  model_.tables.settings.flush(*model_.backend);
}

void TableWriter::write_checksum() {
  model_.tables.settings.set(0, &Settings::checksum, model_.ranks->checksum_for_device());
}

void TableWriter::write_groups() {
  settings_changed(false);
  for (size_t k = 0; k < model_.params.groups.size(); ++k) {
    const Group& g = model_.params.groups[k];
    model_.tables.group_inputs.edit(k) = {
        g.optimizer, {g.schedule, g.rates.at()}, model_.params.clip_of(g), g.own_clip};
  }
  write_checksum();
  model_.tables.settings.flush(*model_.backend);  // now, since only replays of a graph may follow
  model_.tables.group_inputs.flush(*model_.backend);
}

void TableWriter::write_scaler() {
  const ScalerState state = {as_f32(model_.options.scaler.initial_scale), 0, 0};
  const auto next =
      static_cast<float>(model_.options.scaled ? state.scale : model_.config.loss_scale);
  model_.backend->write(&model_.tables.control.at()->scaler, &state, sizeof state);
  model_.backend->write(&model_.tables.control.at()->loss_scale, &next, sizeof next);
}

void TableWriter::write_scales(size_t i) {
  settings_changed(true);
  if (i >= model_.tables.params()) return;
  const Tensor& t = model_.params.tensor(i);
  model_.tables.param_inputs.set(i, &ParamInput::lr_scale, t.lr_scale);
  model_.tables.param_inputs.set(i, &ParamInput::weight_decay_scale, t.weight_decay_scale);
  write_checksum();
  model_.tables.settings.flush(*model_.backend);
  model_.tables.param_inputs.flush(
      *model_.backend);  // now, since only replays of a graph may follow
}

void TableWriter::set_tables() {
  settings_changed(true);
  const ScalarTables tables = {model_.tables.settings.at(),
                               model_.tables.control.at(),
                               model_.tables.group_inputs.at(),
                               model_.tables.group_states.at(),
                               model_.tables.param_inputs.at(),
                               model_.tables.param_states.at(),
                               model_.tables.plans.at(),
                               static_cast<int64_t>(model_.params.groups.size()),
                               static_cast<int64_t>(model_.tables.params()),
                               model_.tables.layers.at(),
                               static_cast<int64_t>(model_.tables.layers.size())};
  const TaskTables tasks = {model_.tables.updates.host_data(), model_.tables.measures.host_data(),
                            model_.tables.units.host_data(),   model_.tables.factors.host_data(),
                            model_.tables.updates.at(),        model_.tables.measures.at(),
                            model_.tables.units.at(),          model_.tables.factors.at()};
  model_.backend->set_tables(tables, tasks);
  model_.speculation->set_tables(tables, tasks);
}

// ---- What the tables have of a parameter --------------------------------------------------------

void TableWriter::describe(size_t i) {
  ++changes_;
  describe_input(i);
  model_.tables.updates.edit(i) = {};
  model_.tables.measures.edit(i) = {};
  model_.tables.units.edit(i) = {};
  model_.tables.factors.edit(i) = {};
  model_.tables.composites.edit(i) = {};
  if (!model_.params[i].owns) return;
  describe_update(i);
  if (model_.params.tensor(i).units[Tensor::kClipUnits]) describe_units(i);
  const int op = model_.params.op_of(model_.params[i]);
  if (op >= 0 && (op_info(op).factored || op_info(op).row_state)) describe_factored(i);
  set_arrays(i);
  model_.tables.measures.edit(i) = model_.tables.updates[i];
  if (model_.params.is_layered(model_.params[i])) describe_layered(i);
  describe_views(i);
  set_gradient(i);
}

void TableWriter::describe_input(size_t i) {
  settings_changed(true);
  const Param& p = model_.params[i];
  const Tensor& t = model_.params.tensor(i);
  ParamInput& in = model_.tables.param_inputs.edit(i);
  in = {};
  in.partials = p.partials;
  in.rows = t.set;
  in.count = p.count;
  in.measured_count = model_.ranks->measured_count(static_cast<ga_param>(i), p.count);
  const bool cut = model_.params.op_of(p) >= 0 && op_info(model_.params.op_of(p)).orthogonal;
  in.outputs = cut ? t.cut.outputs() : t.rows;
  in.inputs = cut ? t.cut.inputs() : t.rows > 0 ? p.count / t.rows : 0;
  in.weight = 1;
  in.lr_scale = t.lr_scale;
  in.weight_decay_scale = t.weight_decay_scale;
  in.key = t.key;
  in.group = p.group;
  in.op = model_.params.op_of(p);
  in.held = p.held();
  in.f64 = p.f64;
  in.frozen = p.frozen || !p.owns;
  in.clamped = model_.params.norm_after_value(p);
  in.reduction = p.reduction;
  in.by_units = model_.params.by_units(i);
  in.clipped_in_parts = model_.ranks->on_device() && model_.params.is_clipped_in_parts(i);
  in.lazy = t.options.rows == GA_ROWS_LAZY;
  in.average = model_.options.ema && p.owns && p.count > 0;
  in.stochastic = t.options.rounding == GA_ROUND_STOCHASTIC ||
                  rounds_state(model_.params.group_of(p).optimizer) ||
                  (in.average && model_.arrays.average_of(p).format == GA_BF16);
}

void TableWriter::describe_update(size_t i) {
  const Param& p = model_.params[i];
  const Tensor& t = model_.params.tensor(i);
  const int op = model_.params.op_of(p);
  const int64_t columns = t.rows > 0 ? p.count / t.rows : 0;
  Composites& composites = model_.tables.composites.edit(i);
  composites.pair = {p.accumulator, t.low, p.accumulator_dtype};
  composites.sparse = {p.accumulator, columns, t.set};
  UpdateTask& update = model_.tables.updates.edit(i);
  update.plan = model_.tables.plans.at(i);
  update.first = p.shard.first;
  update.drawn = p.shard.first + t.part.offset(t.shape);
  update.count = p.shard.count;
  update.op = op;
  update.f64 = p.f64;
  if (p.master) update.copy = p.shard_data();
  update.follows = p.master && model_.params.follows(i);
  update.delivered = {op < 0 ? p.accumulator : nullptr, p.accumulator_dtype};
  update.padded_state = !model_.params.in_pieces(i);  // a piece may end where another begins
  update.stochastic = t.options.rounding == GA_ROUND_STOCHASTIC;
  update.rows = t.options.rows == GA_ROWS_LAZY ? t.set : nullptr;
  update.columns = columns;
  update.code_block = p.code_block;
  update.partials = p.partials;
}

void TableWriter::describe_units(size_t i) {
  const Param& p = model_.params[i];
  const Units& made = *model_.params.tensor(i).units[Tensor::kClipUnits];
  const ga_clip& clip = model_.params.clip_of(p);
  UnitTask& units = model_.tables.units.edit(i);
  units.f64 = p.f64;
  units.pattern = made.pattern.at();
  units.sums = made.gradient;
  units.param_sums = made.param;
  units.factors = made.factors;
  units.totals = made.totals;
  model_.ranks->describe_units(static_cast<ga_param>(i), made.pattern[0], units);
  units.factor = clip.agc_factor;
  units.eps = clip.agc_eps;
}

// A state that is not element by element: how it is brought up, and the slot that the Op reads.
void TableWriter::describe_factored(size_t i) {
  const Param& p = model_.params[i];
  const Tensor& t = model_.params.tensor(i);
  const bool by_rows = op_info(model_.params.op_of(p)).row_state;
  UpdateTask& update = model_.tables.updates.edit(i);
  update.state[0] = {&model_.tables.composites.at(i)->outer, kOuter};
  if (p.shard.count == 0) return;
  const Units& rows = *t.units[Tensor::kFactorRows];
  const int64_t columns = p.count / t.rows;
  const Matrices m = by_rows ? Matrices{p.shard.count / columns, columns, 1} : matrices_of(t);
  FactorTask& factor = model_.tables.factors.edit(i);
  factor.plan = model_.tables.plans.at(i);
  factor.row_pattern = rows.pattern.at();
  factor.row_sums = rows.gradient;
  factor.f64 = p.f64;
  factor.row_count = m.rows;
  factor.column_count = m.columns;
  factor.matrices = m.count;
  if (by_rows) {
    update.row_state = model_.tables.factors.at(i);
  } else {
    const Units& columns = *t.units[Tensor::kFactorColumns];
    factor.column_pattern = columns.pattern.at();
    factor.column_sums = columns.gradient;
  }
}

void TableWriter::set_arrays(size_t i) {
  const Param& p = model_.params[i];
  const int op = model_.params.op_of(p);
  UpdateTask& update = model_.tables.updates.edit(i);
  update.param = p.values();
  update.average = model_.arrays.average_of(p);
  if (model_.tables.factors[i].row_pattern) {
    FactorTask& factor = model_.tables.factors.edit(i);
    factor.rows = p.state[0];
    if (factor.column_pattern) {
      factor.columns = p.state[1];
      factor.scales = p.state[2];
    }
    model_.tables.composites.edit(i).outer = {factor.rows, factor.columns, factor.scales,
                                              factor.row_count, factor.column_count};
  } else if (op >= 0 && update.state[0].format != kOuter) {
    for (int k = 0; k < op_info(op).slots; ++k) {
      update.state[k] = model_.arrays.state_of(p, k);
      update.scales[k] = ParamArrays::scales_of(p, k);
    }
  }
  if (model_.params.is_layered(p)) {
    UpdateTask& measure = model_.tables.measures.edit(i);
    measure.param = update.param;
    std::copy_n(update.state, kMaxSlots, measure.state);
    std::copy_n(update.scales, kMaxSlots, measure.scales);
  }
  if (!model_.params.tensor(i).units[Tensor::kClipUnits]) return;
  if (update.follows) {
    model_.tables.units.edit(i).param = {model_.tables.updates.at(i), kFollowedWhole, 1, nullptr};
    return;
  }
  const Array param = whole_of(update.param, p.shard.first);
  model_.tables.units.edit(i).param = {param.data, param.format, 1, nullptr};
}

// The passes of a layer-wise Op: what it emits and where, and what its second pass reads in place of the
// gradient.
void TableWriter::describe_layered(size_t i) {
  const Param& p = model_.params[i];
  const OpInfo& info = op_info(model_.params.op_of(p));
  UpdateTask& update = model_.tables.updates.edit(i);
  UpdateTask& measure = model_.tables.measures.edit(i);
  const Array room = p.emitted              ? Array{p.emitted, p.real()}
                     : p.fits_accumulator() ? offset({p.accumulator, p.real()}, p.shard.first)
                                            : Array{model_.arrays.scratch(), p.real()};
  if (info.emits) measure.emitted = room.data;
  if (model_.config.eager)
    measure.partials = p.partials + chunk_count(p.count);  // of the gradient: the first
  model_.ranks->describe_measure(static_cast<ga_param>(i), measure);
  if (info.emits)
    update.gradient = identity({whole_of(room, p.shard.first).data, p.real(), 1, nullptr});
}

OrthogonalizeTask TableWriter::orthogonal_task(ga_param id) const {
  const auto i = static_cast<size_t>(id);
  const Param& p = model_.params[i];
  const ga_optimizer& o = model_.params.group_of(p).optimizer;
  OrthogonalizeTask task = {};
  task.plan = model_.tables.plans.at(i);
  task.x = static_cast<float*>(model_.tables.measures[i].emitted);
  task.cut = model_.params.tensor(i).cut;
  task.steps = o.ns_steps;
  task.table = newton_schulz_table(o);
  task.eps = o.eps;
  task.equilibrate = o.equilibrate;
  if (const OpInfo& info = op_info(model_.params.op_of(p)); info.output_state)
    task.variances = static_cast<float*>(p.state[info.slots]);
  task.beta2 = o.beta2;
  task.precision = o.ns_precision;
  // Behind what may have been emitted there.
  task.scratch = static_cast<float*>(model_.arrays.scratch()) +
                 (task.x == model_.arrays.scratch() ? ParamArrays::emitted_room(p) : 0);
  return task;
}

// The views of the gradient; where it lies, set_gradient() tells.
void TableWriter::describe_views(size_t i) {
  const ParamPlan* const plan = model_.tables.plans.at(i);
  GradientView view = {{}, &plan->gradient}, raw = {{}, &plan->raw};
  if (model_.params.by_units(i)) {
    const Units& units = *model_.params.tensor(i).units[Tensor::kClipUnits];
    model_.tables.composites.edit(i).clipped = {raw, units.pattern.at(), units.factors};
    model_.tables.units.edit(i).gradient = raw;
    view.source = {&model_.tables.composites.at(i)->clipped, kClipped, 1, nullptr};
    raw = identity(view.source);
  }
  const bool layered = model_.params.is_layered(model_.params[i]);
  if (layered) model_.tables.measures.edit(i).gradient = view;
  if (!layered || !op_info(model_.params.op_of(model_.params[i])).emits)
    model_.tables.updates.edit(i).gradient = view;
  model_.tables.factors.edit(i).gradient = raw;
}

// ---- Where the gradients lie --------------------------------------------------------------------

Array TableWriter::target_of(ga_param id) const {
  const Param& p = model_.params[id];
  if (p.pair) return {&model_.tables.composites.at(static_cast<size_t>(id))->pair, kPair};
  return {p.accumulator, p.accumulator_dtype};
}

Source TableWriter::source_of(ga_param id) const {
  const Param& p = model_.params[id];
  switch (p.held()) {
    case Held::kBorrowed:
      return borrowed_of(p);
    case Held::kStored: {
      const Array target = target_of(id);
      return {target.data, target.format, 1, nullptr};
    }
    case Held::kReduced:
      return {p.reduced, p.real(), 1, nullptr};
    case Held::kRows:
      return {&model_.tables.composites.at(static_cast<size_t>(id))->sparse, kSparse, 1, nullptr};
    default:
      return {nullptr, GA_F32, 1, nullptr};
  }
}

// Calls f(table, source) for every table whose entry says where the gradient lies; source(entry) is that
// member of the entry.
template <class F>
void TableWriter::each_source(size_t i, F&& f) {
  const auto of_task = [](auto& task) -> Source& { return task.gradient.source; };
  if (model_.params.by_units(i)) {  // everything else reads the gradient through these two
    f(model_.tables.composites, [](Composites& c) -> Source& { return c.clipped.gradient.source; });
    f(model_.tables.units, of_task);
    return;
  }
  const bool layered = model_.params.is_layered(model_.params[i]);
  if (layered) f(model_.tables.measures, of_task);
  if (!layered || !op_info(model_.params.op_of(model_.params[i])).emits)
    f(model_.tables.updates, of_task);
  if (model_.tables.factors[i].row_pattern) f(model_.tables.factors, of_task);
}

// Writes where the gradient lies into every table.
void TableWriter::set_gradient(size_t i) {
  Source source = source_of(static_cast<ga_param>(i));
  if (model_.params[i].held() == Held::kBorrowed) known_[i] = source;
  // The loss scale of the window that ends: by the time the step reads the gradient, the scaler holds the
  // next one.
  if (source.divisor) source.divisor = &model_.tables.control.at()->result.loss_scale;
  each_source(i, [&](auto& table, auto source_in) { source_in(table.edit(i)) = source; });
}

bool TableWriter::move_gradient(size_t i) {
  if (model_.config.device == GA_DEVICE_CPU ||
      model_.tables.param_inputs[i].held != Held::kBorrowed)
    return false;
  const Source source = borrowed_of(model_.params[i]);
  Source known = known_[i];
  known.data = source.data;
  if (!(known == source)) return false;
  if (known_[i].data == source.data) return true;
  known_[i] = source;
  each_source(i, [&](auto& table, auto source_in) {
    const auto data = [&](auto& entry) -> const void*& { return source_in(entry).data; };
    moved_.push_back(table.put(i, data, source.data));
  });
  return true;
}

void TableWriter::send_moved() {
  if (moved_.empty()) return;
  try {
    // A capture may end before ga_step, which then sends the tables.
    if (model_.backend->capturing())
      edit_params();
    else
      model_.backend->upload({moved_.data(), moved_.size()});
  } catch (...) {
    edit_params();
    moved_.clear();
    throw;
  }
  moved_.clear();
}

// Whether anything but ga_step_result depends on the norm of a parameter's gradient.
bool TableWriter::norm_wanted(ga_param id) const {
  const Param& p = model_.params[id];
  const ga_clip& clip = model_.params.clip_of(p);
  const bool of_groups = clip.scope == GA_CLIP_GLOBAL && !model_.ranks->has_own_parameters();
  if (clip.when == GA_CLIP_WHEN_STEP && (of_groups || clip.scope == GA_CLIP_PER_TENSOR))
    return true;
  const int op = model_.params.op_of(p);
  return (op >= 0 && op_info(op).reads_gradient_norm) ||
         model_.params.group_of(p).optimizer.kind == model_.tables.settings[0].bounded;
}

// Whether the norm of a parameter's gradient is to be taken in a pass of its own. If nobody wants it, the
// tables say that it is not known.
bool TableWriter::needs_norm(size_t i) {
  const Param& p = model_.params[i];
  const bool given = model_.ranks->has_own_parameters();
  const bool checked = !given && model_.config.nonfinite != GA_NONFINITE_IGNORE;
  const bool measured =
      !given && (model_.config.measure_norm != 0 || model_.config.noise_scale != 0);
  const bool unknown = (p.held() == Held::kBorrowed && !p.window.lent) || p.window.stale;
  const bool due = unknown || model_.tables.param_inputs[i].clamped;
  const bool wanted = due && (checked || (measured && is_sum(p.reduction)) ||
                              norm_wanted(static_cast<ga_param>(i)));
  model_.tables.param_inputs.set(i, &ParamInput::unmeasured, unknown && !wanted);
  return wanted;
}

void TableWriter::write_param(size_t i) {
  const bool running = model_.config.accumulation == GA_ACCUMULATE_RUNNING_MEAN;
  const Param& p = model_.params[i];
  const ParamInput& in = model_.tables.param_inputs[i];
  const Held held = p.held();
  const bool weighed = running && held == Held::kStored;
  const bool moved = held == Held::kBorrowed && !(known_[i] == borrowed_of(p));
  const bool elsewhere = in.held != held || moved;
  if (!elsewhere && !weighed && held != Held::kRows) return;
  model_.tables.param_inputs.set(i, &ParamInput::weight, weighed ? p.held_weight : 1.0);
  model_.tables.param_inputs.set(i, &ParamInput::stale_rows, held == Held::kRows && p.window.stale);
  if (!elsewhere) return;
  if (moved && move_gradient(i)) return;
  model_.tables.param_inputs.set(i, &ParamInput::held, held);
  set_gradient(i);
}

void TableWriter::write_sum(size_t i, const Array& sum) {
  model_.tables.param_inputs.set(i, &ParamInput::weight, 1.0);
  model_.tables.param_inputs.set(i, &ParamInput::stale_rows, false);
  model_.tables.param_inputs.set(i, &ParamInput::held, Held::kReduced);
  each_source(i, [&](auto& table, auto source_in) {
    source_in(table.edit(i)) = {sum.data, sum.format, 1, nullptr};
  });
}

void TableWriter::edit_params() { model_.tables.edit_params(sends_layers_); }

void TableWriter::flush() {
  send_moved();
  model_.tables.flush(*model_.backend);
}

}  // namespace ga
