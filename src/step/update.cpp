// SPDX-License-Identifier: Apache-2.0
// The update of parameters and state at the end of a window: one pass, or for layer-wise optimizers
// and clipping by units several, a batch of parameters at a time.

#include "context/context.hpp"
#include "core/error.hpp"
#include "core/tensor.hpp"
#include "ranks/exchange.hpp"

namespace ga {

void Context::make_lists() {
  for (auto* list : {&plain_, &pieces_, &layers_, &layers_over_ranks_, &units_first_,
                     &factored_first_, &units_of_share_})
    list->clear();
  unit_lists_ = clipped_in_parts_ = false;
  const bool cut = !sums_first();
  const bool bounded =
      tables_.settings[0].bounded >= 0;  // such a norm is of all gradients as clipped
  for (size_t i = 0; i < prepared_; ++i) {
    const auto id = static_cast<ga_param>(i);
    const bool in_parts = params_.is_clipped_in_parts(i);
    clipped_in_parts_ = clipped_in_parts_ || (cut && in_parts);
    if (!params_[i].owns) continue;
    if (params_.is_layered_over_ranks(i)) layers_over_ranks_.push_back(id);
    if (params_.is_layered_over_ranks(i) || params_[i].share.count == 0) continue;
    const bool units = params_.by_units(id), factored = tables_.factors[i].row_pattern != nullptr;
    unit_lists_ = unit_lists_ || units;
    if (!cut && units)
      (in_parts ? units_of_share_ : units_first_).push_back(id);
    else if (!cut && factored)
      factored_first_.push_back(id);
    if (cut && params_.in_pieces(id) && !bounded)
      pieces_.push_back(id);
    else if ((cut && (units || factored)) || (units && factored) || params_.is_layered(params_[id]))
      layers_.push_back(id);
    else
      plain_.push_back(id);
  }
  settles_units_ = clipped_in_parts_ || (cut ? unit_lists_ : !units_first_.empty());
  lists_due_ = false;
}

// One pass over parameters and state. What needs passes before that one, for norms over layers and
// units, comes after the others.
void Context::update() {
  backend_->update(params_of(plain_));
  if (!pieces_.empty() || !layers_.empty() || clipped_in_parts_) update_layers();
  if (layers_over_ranks_.empty()) return;
  const Params layers = params_of(layers_over_ranks_);
  or_end([&] { backend_->measure(layers, [this] { exchange_->add_layer_norms(); }); });
  backend_->update(layers);
}

// Parameters of layer-wise optimizers, those clipped by units and those with a state by rows: passes
// for their norms, then the update. As many parameters are taken at a time as the last cache holds, so that the
// later passes find them there.
void Context::update_layers() {
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
      if (!params_.by_units(id)) continue;
      all.push_back(id);
      const bool made =
          params_[id].ahead != Ahead::kNot && tables_.plans.at(static_cast<size_t>(id))->duty == 0;
      if (!made) due.push_back(id);
    }
    backend_->clip_units(params_of(due));
    backend_->settle_units(params_of(all), last);
  };
  // A norm over groups is of gradients that have been clipped by units.
  const bool bounded = tables_.settings[0].bounded >= 0;
  size_t last_unit = 0;  // behind it, none is clipped by units
  for (size_t k = 0; k < layers_.size() && !sums_first(); ++k)
    if (params_.by_units(layers_[k])) last_unit = k + 1;
  // Parameters whose layer norms are added up over the ranks are updated last of all, but clipped here, since the
  // ranks exchange the totals of all units at once.
  const auto settle_parts = [&] {
    clip_units(layers_over_ranks_, 0, layers_over_ranks_.size(), false);
    or_end([&] { exchange_->share_unit_totals(); });
    backend_->settle_units({nullptr, 0}, true);
  };
  if (bounded && (last_unit > 0 || clipped_in_parts_)) {
    clip_units(layers_, 0, layers_.size(), !clipped_in_parts_);
    if (clipped_in_parts_) settle_parts();
  }
  if (!pieces_.empty()) backend_->update_by_units(params_of(pieces_), last_unit == 0);
  for (size_t first = 0, end; first < layers_.size(); first = end) {
    int64_t bytes = 0;
    for (end = first; end < layers_.size(); ++end) {
      const Param& p = params_[layers_[end]];
      constexpr int64_t kStreams = 4;  // parameter, gradient, state
      bytes += p.count * kStreams * (p.f64 ? 8 : 4);
      if (end > first && backend_->passes_are_cut() && bytes > backend_->cache_bytes() / 2) break;
    }
    if (!bounded && first < last_unit) clip_units(layers_, first, end, end >= last_unit);
    update_batch({&layers_[first], end - first});
  }
  if (!bounded && clipped_in_parts_) settle_parts();
}

void Context::update_batch(Params ids) {
  std::vector<ga_param>& factored = ids_[0];
  std::vector<ga_param>& measured = ids_[1];
  std::vector<ga_param>& updated = ids_[2];
  for (auto& list : ids_) list.clear();
  bool in_turns = false;  // those that share scratch are made one after the other
  for (size_t k = 0; k < ids.size; ++k) {
    const ga_param id = ids.data[k];
    const auto i = static_cast<size_t>(id);
    if (params_[i].count == 0) continue;
    if (tables_.factors[i].row_pattern && (!sums_first() || params_.by_units(id)))
      factored.push_back(id);
    if (params_.is_layered(params_[id])) {
      const OpInfo& op = op_info(params_.op_of(params_[id]));
      measured.push_back(id);
      in_turns = in_turns || op.orthogonal ||
                 (op.emits && tables_.measures[i].emitted == arrays_.scratch());
    } else {
      updated.push_back(id);
    }
  }
  backend_->update_factored(params_of(factored));
  if (in_turns) {
    for (const ga_param& id : measured) {
      backend_->measure({&id, 1}, {});
      if (op_info(params_.op_of(params_[id])).orthogonal) orthogonalize(id);
      backend_->update({&id, 1});
    }
  } else {
    backend_->measure(params_of(measured), {});
    updated.insert(updated.end(), measured.begin(), measured.end());
  }
  backend_->update(params_of(updated));
}

void Context::orthogonalize(ga_param id) {
  const OrthogonalizeTask task = orthogonal_task(id);
  const bool alone = !exchange_ || exchange_->shards();  // in having to make this update
  if (alone || exchange_->maker(id) == exchange_->rank()) backend_->orthogonalize(task);
  if (alone) return;
  const bool known = config_.device == GA_DEVICE_CPU;  // else no rank knows whether it is updated
  if (known && !(tables_.plans.at(static_cast<size_t>(id))->duty & kUpdate)) return;
  or_end([&] { exchange_->hand_round(task.result(), task.rows * task.columns, id); });
}

// Where the optimizer is sharded: gives every rank what the others have updated.
void Context::gather_updates() {
  using Changed = Exchange::Changed;
  const auto changed = [this](ga_param id) {
    const auto i = static_cast<size_t>(id);
    const Param& p = params_[i];
    if (config_.device != GA_DEVICE_CPU)  // no rank's host knows whether it is updated
      return i < prepared_ && p.owns && !p.frozen ? Changed::kElements : Changed::kNothing;
    if (p.ahead != Ahead::kNot) return Changed::kElements;  // and maybe no duty is left
    const int32_t duty = i < prepared_ && params_[i].owns ? tables_.plans.at(i)->duty : 0;
    return duty & kUpdateRows ? Changed::kRows
           : duty & kUpdate   ? Changed::kElements
                              : Changed::kNothing;
  };
  or_end([&] { exchange_->gather_parameters(changed); });
}

// What Newton-Schulz makes of a parameter's update, and where.
OrthogonalizeTask Context::orthogonal_task(ga_param id) const {
  const auto i = static_cast<size_t>(id);
  const Param& p = params_[i];
  const ga_optimizer& o = params_.group_of(p).optimizer;
  OrthogonalizeTask task = {};
  task.plan = tables_.plans.at(i);
  task.x = static_cast<float*>(tables_.measures[i].emitted);
  task.rows = params_.tensor(i).rows;
  task.columns = p.count / task.rows;
  task.steps = o.ns_steps;
  task.a = static_cast<float>(o.ns_coefficients[0]);
  task.b = static_cast<float>(o.ns_coefficients[1]);
  task.c = static_cast<float>(o.ns_coefficients[2]);
  // Behind what may have been emitted there.
  task.scratch =
      static_cast<float*>(arrays_.scratch()) + (task.x == arrays_.scratch() ? p.count : 0);
  return task;
}

}  // namespace ga
