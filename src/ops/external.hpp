// SPDX-License-Identifier: Apache-2.0
// The program's own optimizer: the reduced, clipped gradient is left for it in the accumulator. No
// Op, no state.
#pragma once

#include "ops/op.hpp"

namespace ga {

struct External {
  static constexpr int32_t kind = GA_OPTIMIZER_EXTERNAL;
  static constexpr const char* name = "external";
  static constexpr const char* const* slot_names = nullptr;
  template <class T>
  using Ops = TypeList<>;

  static bool has_flavor(int32_t flavor) { return flavor == GA_FLAVOR_TORCH; }
  static void defaults(ga_optimizer& o) { o.lr = 0; }
  static void check(const ga_optimizer&) {}
  static int select(const ga_optimizer&) { return -1; }
};

}  // namespace ga
