// SPDX-License-Identifier: Apache-2.0
// What the rest of the library knows of an optimizer: numbers and functions read off the list in
// ops/all.hpp.
#pragma once

#include "ops/op.hpp"

namespace ga {

// A folded Op as bytes.
struct alignas(16) OpBytes {
  unsigned char bytes[112];
};

struct OptimizerInfo {
  const char* name;
  bool (*has_flavor)(int32_t flavor);
  void (*defaults)(ga_optimizer&);
  void (*check)(const ga_optimizer&);  // beyond what holds for all
  int (*op)(const ga_optimizer&);      // position in AllOps; -1: no Op
  const char* const* slot_names;
};

struct OpInfo {
  int slots;
  void (*fold)(const ga_optimizer&, const StepInput&, OpBytes&);
};

// Throws GA_ERROR_INVALID_ARGUMENT for an unknown kind, GA_ERROR_UNSUPPORTED for a flavor it has
// not.
const OptimizerInfo& optimizer_info(int32_t kind, int32_t flavor);
const OpInfo& op_info(int op);

// Throws Error unless every number is within its range.
void check_optimizer(const ga_optimizer& o);

}  // namespace ga
