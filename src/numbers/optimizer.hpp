// SPDX-License-Identifier: Apache-2.0
// What the library outside of the kernels knows of an optimizer: tables made from the list in
// ops/all.hpp.
#pragma once

#include <string>
#include <vector>

#include "numbers/control.hpp"
#include "ops/op.hpp"

namespace ga {

struct OptimizerInfo {
  const char* name;
  bool (*has_flavor)(int32_t flavor);
  void (*defaults)(ga_optimizer&);
  void (*check)(const ga_optimizer&);           // beyond check_optimizer()'s own checks
  int (*op)(const ga_optimizer&, bool matrix);  // position in AllOps; -1: no Op
  // See OptimizerBase.
  bool bf16_state, has_codes, matrices_only, limits_norm;
  const ClockNumber* clock_numbers;  // kClockNumbers of them
  double (*share_of_average)(const ga_optimizer&);
  bool (*lazy)(const ga_optimizer&);
  double (*initial)(const ga_optimizer&, int slot);
  void (*advance)(const ga_optimizer&, Clock&, double lr);

  Clock initial_clock() const {
    Clock clock = {};
    for (int k = 0; k < kClockNumbers; ++k) clock.numbers[k] = clock_numbers[k].initial;
    return clock;
  }
  double number_of(const Clock& clock, int k) const {
    return clock.step == 0 ? clock_numbers[k].initial : clock.numbers[k];
  }
};

struct OpInfo {
  int slots, norms;
  Pass measuring, updating;
  bool factored, row_state, emits, orthogonal, output_state, reads_gradient_norm;
  SlotNames slot_names;  // factored: those of the rows and of the columns
  SlotCodes codes;
};

// Throws GA_ERROR_INVALID_ARGUMENT for an unknown kind or flavor, GA_ERROR_UNSUPPORTED if the
// optimizer lacks the flavor.
const OptimizerInfo& optimizer_info(int32_t kind, int32_t flavor);
const OpInfo& op_info(int op);
// "AdamW" and so on, or the number itself if it is no ga_optimizer_kind.
std::string optimizer_name(const std::string& kind);
// Whether state is rounded stochastically.
inline bool rounds_state(const ga_optimizer& o) {
  return o.state_dtype == GA_BF16 || o.state_dtype == GA_STATE_8BIT;
}
// The name of the scales of a slot of codes. It is never freed.
const char* scale_name(const char* slot_name);
// The names of all state of all optimizers; some occur more than once.
std::vector<std::string> slot_names();

// Throws Error if an option is out of range or the optimizer does not support it.
void check_optimizer(const ga_optimizer& o);
// Throws GA_ERROR_UNSUPPORTED if a group cannot take these numbers in place of those it has, because
// its parameters would need other state.
void check_same_state(const ga_optimizer& before, const ga_optimizer& o);

}  // namespace ga
