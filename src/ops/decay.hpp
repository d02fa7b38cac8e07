// SPDX-License-Identifier: Apache-2.0
// The usual weight decay: decoupled (Loshchilov & Hutter 2019), p <- (1 - lr weight_decay) p, in
// Keras and for some optimizers in every flavor; else L2, g <- g + weight_decay p.
#pragma once

#include "ops/op.hpp"

namespace ga {

template <class T>
struct Decay {
  T keep, l2;

  GA_HD Decay(const ga_optimizer& o, const StepInput& in, bool decoupled = false)
      : keep(T(1)), l2(T(0)) {
    if (decoupled || o.flavor == GA_FLAVOR_KERAS)
      keep = T(1 - in.lr * in.weight_decay);
    else
      l2 = T(in.weight_decay);
  }
};

}  // namespace ga
