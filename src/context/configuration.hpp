// SPDX-License-Identifier: Apache-2.0
// Groups with their optimizers, schedules and clips, and the options of the context.
#pragma once

#include "model/model.hpp"
#include "ranks/stages.hpp"

namespace ga {

class Configuration {
 public:
  explicit Configuration(const Stages& stages) : stages_(stages), model_(stages.model) {}

  ga_group add_group(const ga_optimizer& optimizer);
  void set_optimizer(ga_group group, ga_optimizer optimizer);
  void set_lr(ga_group group, double lr);
  void set_weight_decay(ga_group group, double weight_decay);
  void set_schedule(ga_group group, const ga_schedule* schedule);
  double lr(ga_group group) const;
  double last_lr(ga_group group) const;
  void set_clip(const ga_clip* clip);
  void set_group_clip(ga_group group, const ga_clip* clip);
  void set_loss_scaler(const ga_loss_scaler* scaler);
  void set_steps(int64_t steps);
  void set_stream(void* stream);
  double loss_scale() const { return model_.loss_scale(); }
  const void* device_loss_scale() const;

 private:
  void change_optimizer(ga_group id, const ga_optimizer& o);
  void change_clip(const ga_clip* clip, ga_clip& slot, bool* own);

  const Stages stages_;
  Model& model_;
};

}  // namespace ga
