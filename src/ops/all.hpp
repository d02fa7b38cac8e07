// SPDX-License-Identifier: Apache-2.0
// Every optimizer. To add one: its header, its line here, its value in ga_optimizer_kind, its
// formula in tests/reference.hpp.
#pragma once

#include "ops/adadelta.hpp"
#include "ops/adafactor.hpp"
#include "ops/adagrad.hpp"
#include "ops/adam.hpp"
#include "ops/adamax.hpp"
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
                            Radam, Lion, Lamb, Lars, Adafactor, Muon>;

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
