// SPDX-License-Identifier: Apache-2.0
// Every optimizer. To add one, in this order:
//
//   include/gradaccum/gradaccum.h   its value, the last of ga_optimizer_kind; who reads which field of
//                                   ga_optimizer, where new ones come last
//   src/ops/NAME.hpp                the formula and the rest: copy lion.hpp, where norms of the
//                                   parameter are taken lamb.hpp; op.hpp says what there is
//   src/ops/all.hpp                 its #include, and its place in Optimizers, below
//   tests/reference.hpp             its formula in float64, from the paper
//   tests/optimizers.hpp            its row, which every suite goes by
//   tests/oracle/make_vectors.py    what another system makes of it; run it
//
// The loops, on the CPU and on devices, need no line. Then, once: the value in
// tests/abi/test_abi_freeze.c and `tests/abi/check update`, the new rows of tests/bits.txt (test_bits
// with GA_TEST_WRITE_BITS), the name in examples/fashion_mnist/main.cpp and in README.md.
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
#include "ops/sgd.hpp"

namespace ga {

using Optimizers = TypeList<Sgd, Adam, AdamW, External, Rmsprop, Adagrad, Adadelta, Adamax, Nadam,
                            Radam, Lion, Lamb, Lars, Adafactor, Muon, Adopt, Ademamix>;

template <class List>
constexpr bool in_order_of_kind = false;
template <class... O>
constexpr bool in_order_of_kind<TypeList<O...>> = [] {
  int32_t next = 0;
  return ((O::kind == next++) && ...);
}();
static_assert(in_order_of_kind<Optimizers>, "the list follows ga_optimizer_kind");

// The Ops of all optimizers, one after the other: a loop is known by its Op's position here.
template <class T, class List>
struct AllOpsOf;
template <class T, class... O>
struct AllOpsOf<T, TypeList<O...>> {
  using type = typename ConcatTypes<typename O::template Ops<T>...>::type;
};
template <class T>
using AllOps = typename AllOpsOf<T, Optimizers>::type;

}  // namespace ga
