// SPDX-License-Identifier: Apache-2.0
// The decisions of a step, from the partials of the gradients to the numbers that the kernels read.
// All backends share this code and run it with a ThreadGroup, one thread on the CPU or a block on a GPU:
//
//     struct ThreadGroup {
//       void each_item(int64_t n, F f);   // f(i) for i in [0, n), then a barrier
//       void each_warp(int64_t n, F f);   // f(i, warp) for i in [0, n), then a barrier
//       void each_lane_group(int64_t n, F f);  // as each_warp, for many items of few numbers each
//       void once(F f);                   // f() in one thread, then a barrier
//       bool recall(const ScalarTables&, int64_t i);  // for plan_param() alone, see below
//     };
//     struct Warp {
//       double sum(int64_t n, F f);       // the sum of f(j), in 32 lanes, in a fixed order
//       double smallest(int64_t n, F f);  // the least f(j); infinite for n = 0
//       int64_t first(int64_t n, F f);    // the least j with f(j) true; -1: none
//       bool leader() const;              // true in one thread of the warp
//     };
//
// All threads of a ThreadGroup call each function. f(i) runs for several i at a time, none of which may
// depend on another; f(j) of a Warp has no side effect and may run more than once for a j. recall()
// is called for each updated parameter and may always return false. True means that recall() has
// taken what plan_anew() would compute from a parameter for which it comes to equal bytes.
//
// The order of sums, and so their bits, does not depend on the ThreadGroup.
#pragma once

#include "backend/decide/layers.hpp"
#include "backend/decide/micro.hpp"
#include "backend/decide/window.hpp"
