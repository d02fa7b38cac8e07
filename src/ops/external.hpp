// SPDX-License-Identifier: Apache-2.0
// The program's own optimizer, which reads the reduced, clipped gradient from the accumulator.
// There is no Op and no state.
#pragma once

#include "ops/op.hpp"

namespace ga {

struct External : OptimizerBase {
  static constexpr int32_t kind = GA_OPTIMIZER_EXTERNAL;
  static constexpr const char* name = "external";
  template <class T>
  using Ops = TypeList<>;

  static void defaults(ga_optimizer& o) { o.lr = 0; }
  static int select(const ga_optimizer&, bool) { return -1; }
};

}  // namespace ga
