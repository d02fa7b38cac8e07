// SPDX-License-Identifier: Apache-2.0
// All loops over elements on the CPU but those of batch normalisation, compiled once per ISA level,
// which GA_ISA names. Only one function has external linkage, so that no code of a higher level can
// be linked in place of a lower one's.
//
// The bits are the same at every level: every element takes the same IEEE operations (no
// contraction, no reassociation), and sums of squares are in the order of numbers.hpp.
#include "backend/cpu/kernels.hpp"

#include <cstring>
#include <limits>
#include <type_traits>

#if defined(__SSE2__)
#include <immintrin.h>
#endif

#if defined(__GNUC__) && !defined(__clang__)
// GCC 12 means its own intrinsics.
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif

#include "backend/codes.hpp"
#include "backend/numbers.hpp"
#include "ops/all.hpp"

namespace ga::cpu {
namespace {

#include "backend/cpu/accumulate.hpp"
#include "backend/cpu/binned.hpp"
#include "backend/cpu/gradient.hpp"
#include "backend/cpu/units.hpp"
#include "backend/cpu/update.hpp"

template <class List>
struct OpLoops;
template <class... Op>
struct OpLoops<TypeList<Op...>> {
  static constexpr UpdateLoop updates[] = {update<Op>...};
  static constexpr UpdateLoop measures[] = {measure_of<Op>...};
};

constexpr Kernels kernels = {accumulate,
                             norm,
                             finish,
                             follow,
                             {OpLoops<AllOps<float>>::updates, OpLoops<AllOps<double>>::updates},
                             {OpLoops<AllOps<float>>::measures, OpLoops<AllOps<double>>::measures},
                             unit_norms,
                             binned};

}  // namespace

const Kernels& GA_CONCAT(kernels_, GA_ISA)();
const Kernels& GA_CONCAT(kernels_, GA_ISA)() { return kernels; }

}  // namespace ga::cpu
