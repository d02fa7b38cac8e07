// SPDX-License-Identifier: Apache-2.0
// Clipping: its options.
#include <algorithm>
#include <cmath>

#include "context/context.hpp"
#include "core/error.hpp"
#include "ranks/exchange.hpp"

namespace ga {

ga_clip default_clip() {
  ga_clip c = {};
  c.struct_size = sizeof c;
  c.max_norm = -1;
  c.max_value = HUGE_VAL;
  c.agc_factor = 0.01;
  c.agc_eps = 1e-3;
  return c;
}

void check_clip(const ga_clip& c) {
  check_choice("clip: scope", c.scope, GA_CLIP_AGC, "ga_clip_scope");
  check_choice("clip: flavor", c.flavor, GA_FLAVOR_KERAS, "GA_FLAVOR_TORCH or GA_FLAVOR_KERAS");
  check_choice("clip: agc_units", c.agc_units, GA_AGC_TORCH, "ga_agc_units");
  check_choice("clip: when", c.when, GA_CLIP_WHEN_MICRO, "ga_clip_when");
  if (c.scope == GA_CLIP_GLOBAL || c.scope == GA_CLIP_PER_TENSOR)
    check_rate("clip: max_norm", c.max_norm);
  if (!(c.max_value > 0))
    fail(GA_ERROR_INVALID_ARGUMENT, "clip: max_value was %g, expected > 0", c.max_value);
  check_positive("clip: agc_factor", c.agc_factor);
  check_positive("clip: agc_eps", c.agc_eps);
}

bool is_of_micros(const ga_clip& c) {
  return c.when == GA_CLIP_WHEN_MICRO && (c.scope != GA_CLIP_NONE || std::isfinite(c.max_value));
}

// Micro-batches that are clipped cannot be opened again, as the second sweep of WINDOW mode does.
void Context::check_no_sweeps(const ga_clip& clip) const {
  if (!is_of_micros(clip)) return;
  if (const char* const layer = batch_norms_.name_of_windowed())
    fail(
        GA_ERROR_UNSUPPORTED,
        "clip: GA_CLIP_WHEN_MICRO was set, but batch-normalisation layer \"%s\" is in WINDOW mode, "
        "which opens micro-batches again",
        layer);
}

void Context::choose_path() {
  clip_micro_ = is_of_micros(params_.clip);
  for (const Group& g : params_.groups)
    clip_micro_ = clip_micro_ || is_of_micros(params_.clip_of(g));
  const bool plain = config_.accumulation == GA_ACCUMULATE_PLAIN && !config_.noise_scale;
  plain_path_ = plain && !maxima_;
  adopts_ = plain && !deferring() && config_.gradient_life == GA_GRADIENTS_LIVE && !exchange_;
}

void Context::set_clip(const ga_clip* clip) { change_clip(clip, params_.clip, nullptr); }

void Context::set_group_clip(ga_group id, const ga_clip* clip) {
  Group& g = params_.group(id);
  change_clip(clip, g.clip, &g.own_clip);
}

// Sets the clipping of the context or of a group, and allocates the arrays that it needs. On
// failure nothing has changed. own: whether the group has a clipping of its own; NULL for the
// context.
void Context::change_clip(const ga_clip* clip, ga_clip& slot, bool* own) {
  if (clip) check_clip(*clip);
  check_not_in_place("a function that sets an option");
  const ga_clip next = clip ? *clip : default_clip();
  check_no_sweeps(next);
  if (next.when == GA_CLIP_WHEN_MICRO || clip_micro_)
    window_.check_empty(
        "a function that changes the clipping of micro-batches (GA_CLIP_WHEN_MICRO)");
  const ga_clip before = slot;
  const bool before_own = own && *own;
  std::optional<Exchange::Parts> parts_before;
  slot = next;
  if (own) *own = clip != nullptr;
  try {
    for (size_t i = 0; i < params_.size(); ++i)
      if (!params_.tensor(i).removed && params_.clip_of(params_[i]).scope == GA_CLIP_AGC)
        params_.units_axes(i);
    const bool units = before.scope == GA_CLIP_AGC || next.scope == GA_CLIP_AGC ||
                       params_.clip.scope == GA_CLIP_AGC;  // which a group may have had, or gets
    if (exchange_) parts_before = exchange_->check_division();
    if (prepared_ > 0 && units) arrays_.make_units();
  } catch (...) {
    slot = before;
    if (own) *own = before_own;
    if (parts_before) exchange_->take_parts(std::move(*parts_before));
    for (size_t i = 0; i < prepared_; ++i) describe(i);
    throw;
  }
  choose_path();
  if (eager_) eager_->look_again();
  tell_settings();
  tell_groups();
  for (size_t i = 0; i < prepared_; ++i) describe(i);
  lists_due_ = true;
}

}  // namespace ga
