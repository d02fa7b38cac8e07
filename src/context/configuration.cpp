// SPDX-License-Identifier: Apache-2.0
#include "context/configuration.hpp"

#include <algorithm>
#include <functional>

#include "batchnorm/batchnorm.hpp"
#include "core/error.hpp"
#include "core/tensor.hpp"
#include "model/table_writer.hpp"

namespace ga {

// ---- Groups -------------------------------------------------------------------------------------

ga_group Configuration::add_group(const ga_optimizer& o) {
  model_.window.check_empty("ga_group_add");
  check_optimizer(o);
  if (model_.params.groups.size() >= INT32_MAX) fail(GA_ERROR_INVALID_ARGUMENT, "too many groups");
  const OptimizerInfo& info = optimizer_info(o.kind, o.flavor);
  Group g = {{}, &info,  {info.op(o, false), info.op(o, true)}, false, default_clip(), {},
             {}, nullptr};
  g.set_optimizer(o);
  g.prepare_products(*model_.backend, o);
  GroupState state = {};
  state.clock = clock_after(info, o,
                            model_.params.groups.empty() && model_.progress.windows() == 0
                                ? model_.progress.steps_set()
                                : model_.progress.steps());
  model_.params.groups.reserve(model_.params.groups.size() + 1);
  ContextTables tables =
      model_.tables.grown(*model_.backend, ContextTables::kGroup, model_.params.groups.size() + 1);
  model_.backend->write(tables.group_states.at(model_.params.groups.size()), &state, sizeof state);
  model_.tables.swap(tables, ContextTables::kGroup);
  model_.params.groups.push_back(std::move(g));
  stages_.writer.write_groups();
  stages_.writer.write_settings();
  stages_.writer.set_tables();
  return static_cast<ga_group>(model_.params.groups.size()) - 1;
}

void Configuration::set_lr(ga_group id, double lr) {
  Group& g = model_.params.group(id);
  check_rate("lr", lr);
  model_.check_settable();
  g.optimizer.lr = lr;
  stages_.writer.write_groups();
}

void Configuration::set_weight_decay(ga_group id, double weight_decay) {
  ga_optimizer o = model_.params.group(id).optimizer;
  check_rate("weight_decay", weight_decay);
  o.weight_decay = weight_decay;
  change_optimizer(id, o);
}

void Configuration::set_optimizer(ga_group id, ga_optimizer o) {
  const Group& g = model_.params.group(id);
  check_optimizer(o);
  check_same_state(g.optimizer, o);
  g.prepare_products(*model_.backend, o);
  o.state_dtype = g.optimizer.state_dtype;
  for (size_t i = 0; i < model_.params.size(); ++i)
    if (model_.params[i].group == id && model_.params.tensor(i).options.rows == GA_ROWS_LAZY &&
        !model_.params.tensor(i).removed && !g.info->lazy(o))
      model_.params.subject(i).fail(
          GA_ERROR_UNSUPPORTED,
          "its rows are GA_ROWS_LAZY, but with these hyper-parameters %s moves every element",
          g.info->name);
  change_optimizer(id, o);
  stages_.writer.write_settings();  // max_grad_norm
}

// Gives a group other hyper-parameters, with which its parameters may need another Op.
void Configuration::change_optimizer(ga_group id, const ga_optimizer& o) {
  Group& g = model_.params.group(id);
  model_.check_settable();
  g.set_optimizer(o);
  const int before[] = {g.op[0], g.op[1]};
  for (int matrix = 0; matrix < 2; ++matrix) g.op[matrix] = g.info->op(o, matrix);
  stages_.writer.write_groups();
  if (std::equal(before, before + 2, g.op)) return;
  for (size_t i = 0; i < model_.tables.params(); ++i)
    if (model_.params[i].group == id) stages_.writer.describe(i);
}

void Configuration::set_schedule(ga_group id, const ga_schedule* schedule) {
  Group& g = model_.params.group(id);
  model_.check_settable();
  ga_schedule next = {};
  Table<double> rates;
  if (schedule) {
    check_schedule(*schedule);
    next = *schedule;
    if (next.kind == GA_SCHEDULE_TABLE) {
      rates = Table<double>(*model_.backend, static_cast<size_t>(next.table_size));
      std::copy_n(next.table, next.table_size, &rates.edit(0));
      rates.edit_all();
      rates.flush(*model_.backend);
    }
  }
  next.table = nullptr;
  g.rates.swap(rates);
  g.schedule = next;
  stages_.writer.write_groups();
}

double Configuration::lr(ga_group id) const {
  const Group& g = model_.params.group(id);
  const ScheduleData schedule = {g.schedule, g.rates.host_data()};
  return schedule.rate(g.optimizer.lr, model_.progress.steps());
}

double Configuration::last_lr(ga_group id) const {
  model_.params.group(id);
  GroupState state = {};
  model_.backend->read(&state, model_.tables.group_states.at(static_cast<size_t>(id)),
                       sizeof state);
  return state.lr;
}

void Configuration::set_loss_scaler(const ga_loss_scaler* scaler) {
  model_.window.check_empty("ga_context_set_loss_scaler");
  if (scaler) check_loss_scaler(*scaler);
  model_.options.scaler = scaler ? *scaler : ga_loss_scaler{};
  model_.options.scaled = scaler != nullptr;
  stages_.writer.write_settings();
  stages_.writer.write_scaler();
}

// ---- Clipping -----------------------------------------------------------------------------------

void Configuration::set_clip(const ga_clip* clip) {
  change_clip(clip, model_.params.clip, nullptr);
}

void Configuration::set_group_clip(ga_group id, const ga_clip* clip) {
  Group& g = model_.params.group(id);
  change_clip(clip, g.clip, &g.own_clip);
}

// Sets the clipping of the context or of a group, and allocates the arrays that it needs. On
// failure nothing has changed. own: whether the group has a clipping of its own; NULL for the
// context.
void Configuration::change_clip(const ga_clip* clip, ga_clip& slot, bool* own) {
  if (clip) check_clip(*clip, model_.config);
  model_.speculation->check_not_in_place("a function that sets an option");
  const ga_clip next = clip ? *clip : default_clip();
  stages_.layers.check_no_passes(next);
  if (next.when == GA_CLIP_WHEN_MICRO || model_.options.clip_micro())
    model_.window.check_empty(
        "a function that changes the clipping of micro-batches (GA_CLIP_WHEN_MICRO)");
  const ga_clip before = slot;
  const bool before_own = own && *own;
  std::function<void()> divide_back = [] {};
  slot = next;
  if (own) *own = clip != nullptr;
  try {
    for (size_t i = 0; i < model_.params.size(); ++i)
      if (!model_.params.tensor(i).removed &&
          model_.params.clip_of(model_.params[i]).scope == GA_CLIP_AGC)
        model_.params.units_axes(i);
    const bool units =
        before.scope == GA_CLIP_AGC || next.scope == GA_CLIP_AGC ||
        model_.params.clip.scope == GA_CLIP_AGC;  // which a group may have had, or gets
    divide_back = model_.ranks->divide_anew();
    if (model_.tables.params() > 0 && units)
      model_.arrays.take_clip_units(model_.arrays.new_clip_units(model_.params.rules()));
  } catch (...) {
    slot = before;
    if (own) *own = before_own;
    divide_back();
    stages_.writer.describe_all();
    throw;
  }
  model_.options.choose_path(model_.params);
  model_.speculation->look_again();
  stages_.writer.write_settings();
  stages_.writer.write_groups();
  stages_.writer.describe_all();
}

// ---- The context --------------------------------------------------------------------------------

void Configuration::set_steps(int64_t steps) {
  model_.window.check_empty("ga_context_set_steps");
  if (steps < 0 || steps > kMostSteps)
    fail(GA_ERROR_INVALID_ARGUMENT, "steps was %lld, expected 0 to 2^53", ll(steps));
  model_.check_no_capture("ga_context_set_steps");
  const Control now = model_.progress.control();
  model_.backend->write(&model_.tables.control.at()->steps, &steps, sizeof steps);
  for (size_t k = 0; k < model_.params.groups.size(); ++k) {
    const Clock clock =
        clock_after(*model_.params.groups[k].info, model_.params.groups[k].optimizer, steps);
    model_.backend->write(&model_.tables.group_states.at(k)->clock, &clock, sizeof clock);
  }
  model_.progress.set_steps(steps, now.windows);
  model_.length.look_up();
}

void Configuration::set_stream(void* stream) {
  if (model_.config.device == GA_DEVICE_CPU)
    fail(GA_ERROR_UNSUPPORTED, "stream was %p, but the context is on the CPU, which has no streams",
         stream);
  model_.backend->device()->set_stream(stream);
  model_.config.stream = stream;
}

const void* Configuration::device_loss_scale() const {
  return model_.config.device == GA_DEVICE_CPU ? nullptr : &model_.tables.control.at()->loss_scale;
}

}  // namespace ga
