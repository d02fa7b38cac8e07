// SPDX-License-Identifier: Apache-2.0
// The update of parameters and optimizer state at the end of a window: one pass, or for layer-wise optimizers and
// clipping by units several, a batch of parameters at a time.
#pragma once

#include <vector>

#include "model/has_lists.hpp"
#include "model/model.hpp"

namespace ga {

class Preparation;
class TableWriter;

class Update final : HasLists {
 public:
  Update(Model& model, TableWriter& writer, Preparation& preparation);

  // Lists the parameters by the passes of their update, if something has changed since they were listed.
  void make_lists();
  // Lists of the parameters that are read once more before the decision: those clipped by units, those of which
  // Adafactor takes sums, and on a device those that this rank clips a part of, for all ranks.
  Params units_first() const { return params_of(units_first_); }
  Params factored_first() const { return params_of(factored_first_); }
  Params units_of_shard() const { return params_of(units_of_shard_); }
  // Whether the decision is followed by one about the norm of what was clipped by units.
  bool settles_units() const { return settles_units_; }

  void run();
  // Where the optimizer is sharded: gives every rank what the others have updated.
  void gather();

  void reserve(size_t params) override;

 private:
  // Whether the sums of StepSums are taken before the decision.
  bool sums_first() const { return !model_.backend->host(); }
  void update_layers();
  void update_batch(Params ids);
  void orthogonalize(ga_param id);

  Model& model_;
  TableWriter& writer_;
  int64_t made_for_ = -1;          // TableWriter::changes() of the lists
  bool unit_lists_ = false;        // some parameter is clipped by units
  bool clipped_in_parts_ = false;  // on the CPU: each rank clips its part of some parameter
  bool settles_units_ = false;
  // By the passes of their update: one; one that also clips by units; several.
  std::vector<ga_param> plain_, pieces_, layers_;
  std::vector<ga_param> layers_over_ranks_;  // whose norms are of pieces on several ranks
  std::vector<ga_param> units_first_, factored_first_, units_of_shard_;
  std::vector<ga_param> ids_[3];  // of a batch of these
};

}  // namespace ga
