// SPDX-License-Identifier: Apache-2.0
// The update of parameters and state at the end of a window: one pass, or for layer-wise optimizers
// and clipping by units several, a batch of parameters at a time.

#include "step/update.hpp"

#include "core/error.hpp"
#include "core/tensor.hpp"
#include "model/preparation.hpp"
#include "model/table_writer.hpp"

namespace ga {

Update::Update(Model& model, TableWriter& writer, Preparation& preparation)
    : model_(model), writer_(writer) {
  preparation.add(*this);
}

void Update::reserve(size_t params) {
  for (auto* list : {&plain_, &pieces_, &layers_, &layers_over_ranks_, &units_first_,
                     &factored_first_, &units_of_shard_, &ids_[0], &ids_[1], &ids_[2]})
    list->reserve(params);
}

void Update::make_lists() {
  if (made_for_ == writer_.changes()) return;
  made_for_ = writer_.changes();
  for (auto* list : {&plain_, &pieces_, &layers_, &layers_over_ranks_, &units_first_,
                     &factored_first_, &units_of_shard_})
    list->clear();
  unit_lists_ = clipped_in_parts_ = false;
  const bool cut = !sums_first();
  const bool bounded =
      model_.tables.settings[0].bounded >= 0;  // such a norm is of all gradients as clipped
  for (size_t i = 0; i < model_.tables.params(); ++i) {
    const auto id = static_cast<ga_param>(i);
    const bool in_parts = model_.params.is_clipped_in_parts(i);
    clipped_in_parts_ = clipped_in_parts_ || (cut && in_parts);
    if (!model_.params[i].owns) continue;
    if (model_.params.is_layered_over_ranks(i)) layers_over_ranks_.push_back(id);
    if (model_.params.is_layered_over_ranks(i) || model_.params[i].shard.count == 0) continue;
    const bool units = model_.params.by_units(id),
               factored = model_.tables.factors[i].row_pattern != nullptr;
    unit_lists_ = unit_lists_ || units;
    if (!cut && units)
      (in_parts ? units_of_shard_ : units_first_).push_back(id);
    else if (!cut && factored)
      factored_first_.push_back(id);
    if (cut && model_.params.in_pieces(id) && !bounded)
      pieces_.push_back(id);
    else if ((cut && (units || factored)) || (units && factored) ||
             model_.params.is_layered(model_.params[id]))
      layers_.push_back(id);
    else
      plain_.push_back(id);
  }
  settles_units_ = clipped_in_parts_ || (cut ? unit_lists_ : !units_first_.empty());
  writer_.send_layers(!layers_.empty() || !factored_first_.empty() || unit_lists_);
}

// One pass over parameters and state. What needs passes before that one, for norms over layers and
// units, comes after the others.
void Update::run() {
  model_.backend->update(params_of(plain_));
  if (!pieces_.empty() || !layers_.empty() || clipped_in_parts_) update_layers();
  if (layers_over_ranks_.empty()) return;
  const Params layers = params_of(layers_over_ranks_);
  model_.backend->measure(layers, [this] { model_.ranks->add_layer_norms(); });
  model_.backend->update(layers);
}

// Parameters of layer-wise optimizers, those clipped by units and those with a state by rows: passes
// for their norms, then the update. As many parameters are taken at a time as the last cache holds, so that the
// later passes find them there.
void Update::update_layers() {
  // Clips the parameters of list[first, end) that are clipped by units. Parameters that were updated ahead have been
  // measured then, and are not measured again.
  const auto clip_units = [&](const std::vector<ga_param>& list, size_t first, size_t end,
                              bool last) {
    std::vector<ga_param>& all = ids_[0];
    std::vector<ga_param>& due = ids_[1];
    all.clear();
    due.clear();
    for (size_t k = first; k < end; ++k) {
      const ga_param id = list[k];
      if (!model_.params.by_units(id)) continue;
      all.push_back(id);
      const bool made = model_.params[id].ahead != Ahead::kNot &&
                        model_.tables.plans.at(static_cast<size_t>(id))->actions == 0;
      if (!made) due.push_back(id);
    }
    model_.backend->clip_units(params_of(due));
    model_.backend->host()->settle_units(params_of(all), last);
  };
  // A norm over groups is of gradients that have been clipped by units.
  const bool bounded = model_.tables.settings[0].bounded >= 0;
  size_t last_unit = 0;  // behind it, none is clipped by units
  for (size_t k = 0; k < layers_.size() && !sums_first(); ++k)
    if (model_.params.by_units(layers_[k])) last_unit = k + 1;
  // Parameters whose layer norms are added up over the ranks are updated last of all, but clipped here, since the
  // ranks exchange the totals of all units at once.
  const auto settle_parts = [&] {
    clip_units(layers_over_ranks_, 0, layers_over_ranks_.size(), false);
    model_.ranks->share_unit_totals();
    model_.backend->host()->settle_units({nullptr, 0}, true);
  };
  if (bounded && (last_unit > 0 || clipped_in_parts_)) {
    clip_units(layers_, 0, layers_.size(), !clipped_in_parts_);
    if (clipped_in_parts_) settle_parts();
  }
  if (!pieces_.empty()) model_.backend->host()->update_by_units(params_of(pieces_), last_unit == 0);
  HostWork* const host = model_.backend->host();
  const int64_t most = host ? host->cache_bytes() / 2 : INT64_MAX;  // of a batch
  for (size_t first = 0, end; first < layers_.size(); first = end) {
    int64_t bytes = 0;
    for (end = first; end < layers_.size(); ++end) {
      const Param& p = model_.params[layers_[end]];
      constexpr int64_t kStreams = 4;  // parameter, gradient, state
      bytes += p.count * kStreams * (p.f64 ? 8 : 4);
      if (end > first && bytes > most) break;
    }
    if (!bounded && first < last_unit) clip_units(layers_, first, end, end >= last_unit);
    update_batch({&layers_[first], end - first});
  }
  if (!bounded && clipped_in_parts_) settle_parts();
}

void Update::update_batch(Params ids) {
  std::vector<ga_param>& factored = ids_[0];
  std::vector<ga_param>& measured = ids_[1];
  std::vector<ga_param>& updated = ids_[2];
  for (auto& list : ids_) list.clear();
  bool in_turns = false;  // those that share scratch are made one after the other
  for (size_t k = 0; k < ids.size; ++k) {
    const ga_param id = ids.data[k];
    const auto i = static_cast<size_t>(id);
    if (model_.params[i].count == 0) continue;
    if (model_.tables.factors[i].row_pattern && (!sums_first() || model_.params.by_units(id)))
      factored.push_back(id);
    if (model_.params.is_layered(model_.params[id])) {
      const OpInfo& op = op_info(model_.params.op_of(model_.params[id]));
      measured.push_back(id);
      in_turns = in_turns || op.orthogonal ||
                 (op.emits && model_.tables.measures[i].emitted == model_.arrays.scratch());
    } else {
      updated.push_back(id);
    }
  }
  model_.backend->update_factored(params_of(factored));
  if (in_turns) {
    for (const ga_param& id : measured) {
      model_.backend->measure({&id, 1}, {});
      if (op_info(model_.params.op_of(model_.params[id])).orthogonal) orthogonalize(id);
      model_.backend->update({&id, 1});
    }
  } else {
    model_.backend->measure(params_of(measured), {});
    updated.insert(updated.end(), measured.begin(), measured.end());
  }
  model_.backend->update(params_of(updated));
}

void Update::orthogonalize(ga_param id) {
  const OrthogonalizeTask task = writer_.orthogonal_task(id);
  if (model_.ranks->makes_update(id)) model_.backend->orthogonalize(task);
  const bool known =
      model_.config.device == GA_DEVICE_CPU;  // else no rank knows whether it is updated
  if (known && !(model_.tables.plans.at(static_cast<size_t>(id))->actions & kUpdate)) return;
  model_.ranks->hand_round(task.x, task.cut.matrices * task.cut.size(), id);
  if (task.variances)
    model_.ranks->hand_round(task.variances, task.cut.matrices * task.cut.outputs(), id);
}

void Update::gather() {
  using Changed = Ranks::Changed;
  model_.ranks->gather_parameters([this](ga_param id) {
    const auto i = static_cast<size_t>(id);
    const Param& p = model_.params[i];
    const bool prepared = i < model_.tables.params() && p.owns;
    if (model_.config.device != GA_DEVICE_CPU)  // no rank's host knows whether it is updated
      return prepared && !p.frozen ? Changed::kElements : Changed::kNothing;
    if (p.ahead != Ahead::kNot) return Changed::kElements;  // and maybe no action is left
    const int32_t actions = prepared ? model_.tables.plans.at(i)->actions : 0;
    return actions & kUpdateRows ? Changed::kRows
           : actions & kUpdate   ? Changed::kElements
                                 : Changed::kNothing;
  });
}

}  // namespace ga
