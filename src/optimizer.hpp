// SPDX-License-Identifier: Apache-2.0
// What the rest of the library knows of an optimizer: numbers and functions read off the list in
// ops/all.hpp.
#pragma once

#include "control.hpp"
#include "ops/op.hpp"

namespace ga {

struct OptimizerInfo {
  const char* name;
  bool (*has_flavor)(int32_t flavor);
  void (*defaults)(ga_optimizer&);
  void (*check)(const ga_optimizer&);           // beyond what holds for all
  int (*op)(const ga_optimizer&, bool matrix);  // position in AllOps; -1: no Op
  // As in OptimizerBase.
  bool bf16_state, matrices_only, limits_norm;
  bool (*lazy)(const ga_optimizer&);
  double (*initial)(const ga_optimizer&, int slot);
  void (*advance)(const ga_optimizer&, Clock&);
};

struct OpInfo {
  int slots, norms;
  Pass measuring, updating;
  bool factored, emits, orthogonal, reads_gradient_norm;
  SlotNames slot_names;  // of its slots; factored: of its rows and its columns
};

// Throws GA_ERROR_INVALID_ARGUMENT for an unknown kind, GA_ERROR_UNSUPPORTED for a flavor it has
// not.
const OptimizerInfo& optimizer_info(int32_t kind, int32_t flavor);
const OpInfo& op_info(int op);

// Throws Error unless every number is within its range.
void check_optimizer(const ga_optimizer& o);

}  // namespace ga
