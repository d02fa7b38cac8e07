// SPDX-License-Identifier: Apache-2.0
// Every optimizer. To add one, in this order:
//
//   include/gradaccum/gradaccum.h   a value at the end of ga_optimizer_kind; new fields at the end
//                                   of ga_optimizer
//   docs/reference.md               which optimizer reads which field, defaults, state, flavors
//   src/ops/NAME.hpp                the formula, options and checks: copy lion.hpp, or lamb.hpp if
//                                   layer-wise; op.hpp is their reference
//   src/ops/all.hpp                 the #include, and a place in Optimizers, below
//   tests/reference.cpp             the formula in float64, from the paper
//   tests/optimizers.cpp            a row, which every suite reads
//   tests/oracle/make_vectors.py    test vectors from another library; run the script
//
// Kernels, on the CPU and on devices, need no change. Then add the value to
// tests/abi/test_abi_freeze.c and run `tests/abi/check update`, add new rows to tests/bits.txt (run
// test_bits with GA_TEST_WRITE_BITS), the name to the facades of the languages,
// examples/fashion_mnist/main.cpp and README.md.
#pragma once

#include "ops/adadelta.hpp"
#include "ops/adafactor.hpp"
#include "ops/adagrad.hpp"
#include "ops/adam.hpp"
#include "ops/adamax.hpp"
#include "ops/ademamix.hpp"
#include "ops/adopt.hpp"
#include "ops/external.hpp"
#include "ops/lamb.hpp"
#include "ops/lars.hpp"
#include "ops/lion.hpp"
#include "ops/muon.hpp"
#include "ops/nadam.hpp"
#include "ops/radam.hpp"
#include "ops/rmsprop.hpp"
#include "ops/rowwise_adagrad.hpp"
#include "ops/schedule_free.hpp"
#include "ops/sgd.hpp"

namespace ga {

using Optimizers = TypeList<Sgd, Adam, AdamW, External, Rmsprop, Adagrad, Adadelta, Adamax, Nadam,
                            Radam, Lion, Lamb, Lars, Adafactor, Muon, Adopt, Ademamix,
                            RowwiseAdagrad, ScheduleFreeAdamW, ScheduleFreeSgd>;

template <class List>
constexpr bool in_order_of_kind = false;
template <class... O>
constexpr bool in_order_of_kind<TypeList<O...>> = [] {
  int32_t next = 0;
  return ((O::kind == next++) && ...);
}();
static_assert(in_order_of_kind<Optimizers>, "the list follows ga_optimizer_kind");

// The Ops of all optimizers in one list. The kernels identify an Op by its position in the list.
template <class T, class List>
struct AllOpsOf;
template <class T, class... O>
struct AllOpsOf<T, TypeList<O...>> {
  using type = typename ConcatTypes<typename O::template Ops<T>...>::type;
};
template <class T>
using AllOps = typename AllOpsOf<T, Optimizers>::type;

}  // namespace ga
