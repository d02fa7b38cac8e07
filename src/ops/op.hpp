// SPDX-License-Identifier: Apache-2.0
// An Op is the update formula for one element:
//
//     struct Op {
//       using Real = T;                                    // float, or double for f64 parameters
//       static constexpr int slots = 2;                    // state values per element
//       GA_HD Op(const ga_optimizer&, const StepInput&);   // folds the hyper-parameters, in double
//       GA_HD T operator()(T p, T g, T* state) const;      // the new p; state is updated in place
//     };
//
// It is trivially copyable and knows no pointer, index, dtype or loop. A mode is a template flag or
// another Op. The loops (one file for the CPU, one for CUDA) are instantiated for every Op of every
// optimizer in ops/all.hpp.
//
// An optimizer is a header beside this one; sgd.hpp is the one to copy:
//
//     struct Sgd {
//       static constexpr int32_t kind = GA_OPTIMIZER_SGD;
//       static constexpr const char* name = "SGD";
//       static constexpr const char* slot_names[] = {...};  // as PyTorch's state_dict has them
//       template <class T> using Ops = TypeList<...>;
//       static bool has_flavor(int32_t flavor);
//       static void defaults(ga_optimizer&);               // for optimizer.flavor
//       static void check(const ga_optimizer&);            // throws Error
//       static int select(const ga_optimizer&);            // which of Ops
//     };
#pragma once

#include <math.h>

#include <cstdint>

#include "gradaccum/gradaccum.h"

// Always inlined on the host: an object compiled for one ISA level must not export a function that
// the linker could pick for another.
#ifdef __CUDACC__
#define GA_HD __host__ __device__ __forceinline__
#else
#define GA_HD __attribute__((always_inline)) inline
#endif

namespace ga {

template <class... T>
struct TypeList {
  static constexpr int size = sizeof...(T);
};

template <class... Lists>
struct ConcatTypes;
template <class... A>
struct ConcatTypes<TypeList<A...>> {
  using type = TypeList<A...>;
};
template <class... A, class... B, class... Rest>
struct ConcatTypes<TypeList<A...>, TypeList<B...>, Rest...> {
  using type = typename ConcatTypes<TypeList<A..., B...>, Rest...>::type;
};

// Applied steps, of a parameter or of the context, and the running products of the decay rates:
// beta^t, never by pow.
struct Clock {
  int64_t step = 0;
  double beta1_power = 1;
  double beta2_power = 1;

  GA_HD void advance(const ga_optimizer& o) {
    ++step;
    beta1_power *= o.beta1;
    beta2_power *= o.beta2;
  }
};

// What changes from step to step: clock is that of the step being taken, so its first step is 1.
struct StepInput {
  double lr;
  Clock clock;
};

constexpr int kMaxSlots = 3;

GA_HD float square_root(float x) { return sqrtf(x); }
GA_HD double square_root(double x) { return sqrt(x); }

}  // namespace ga
