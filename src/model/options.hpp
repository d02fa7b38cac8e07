// SPDX-License-Identifier: Apache-2.0
// Options of a context that are not those of a group or a parameter, and which way contributions go by all options
// together.
#pragma once

#include <optional>

#include "model/param.hpp"

namespace ga {

class Options {
 public:
  explicit Options(const ga_config& config) : config_(&config) {}

  std::optional<ga_ema> ema;
  bool scaled = false;  // the loss scale is dynamic
  ga_loss_scaler scaler = {};

  // Follows a change of options, of the rules, or of whether the context has a communicator.
  void choose_path(const ParamList& params) { choose_path(params, params.rules()); }
  void choose_path(const ParamList& params, const Rules& by);
  void choose_path(const ParamList& params, bool alone) {
    alone_ = alone;
    choose_path(params);
  }
  bool clip_micro() const { return clip_micro_; }  // some clipping is GA_CLIP_WHEN_MICRO
  // Whether micro-batches are checked or clipped as a whole when they end.
  bool deferring() const { return config_->nonfinite == GA_NONFINITE_DROP_MICRO || clip_micro_; }
  bool plain_path() const { return plain_path_; }  // contributions are only added
  bool borrows() const { return borrows_; }  // first contributions stay in the program's buffers
  bool lends() const { return lends_; }      // and further ones are added to them there
  // Whether only the device knows the loss scale.
  bool late_scale() const { return scaled && config_->device != GA_DEVICE_CPU; }

 private:
  const ga_config* config_;
  bool alone_ = true;  // the context has no communicator
  bool clip_micro_ = false;
  bool plain_path_ = true;
  bool borrows_ = false;
  bool lends_ = false;
};

ga_config default_config();
void check_config(const ga_config& config);
ga_ema default_ema();
void check_ema(const ga_ema& ema);

}  // namespace ga
