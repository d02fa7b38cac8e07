// SPDX-License-Identifier: Apache-2.0
#include "numbers/optimizer.hpp"

#include <array>
#include <cmath>
#include <cstring>
#include <map>
#include <type_traits>

#include "core/error.hpp"
#include "ops/all.hpp"

namespace ga {
namespace {

template <class List>
struct HasCodes;
template <class... Op>
struct HasCodes<TypeList<Op...>> {
  static constexpr bool value = (has_codes(Op::codes) || ...);
};

template <class List>
struct OptimizerTable;

template <class... O>
struct OptimizerTable<TypeList<O...>> {
  template <class Optimizer>
  static int op_of(const ga_optimizer& o, bool matrix) {
    int first = 0;  // number of Ops of the optimizers before this one in the list
    bool found = false;
    ((found = found || std::is_same_v<O, Optimizer>,
      first += found ? 0 : O::template Ops<float>::size),
     ...);
    const int chosen = Optimizer::select(o, matrix);
    return chosen < 0 ? -1 : first + chosen;
  }

  static constexpr std::array<OptimizerInfo, sizeof...(O)> infos = {OptimizerInfo{
      O::name, O::has_flavor, O::defaults, O::check, op_of<O>, O::bf16_state,
      HasCodes<typename O::template Ops<float>>::value, O::matrices_only, O::limits_norm,
      O::clock_numbers, O::share_of_average, O::lazy, O::initial, O::advance}...};
};

template <class Op>
constexpr int named_slots = [] {
  int count = 0;
  while (count < kMaxSlots && Op::slot_names.of[count]) ++count;
  return count;
}();

template <class List>
struct OpTable;

template <class... Op>
struct OpTable<TypeList<Op...>> {
  static_assert(((named_slots<Op> == (Op::factored ? 2 : Op::slots + Op::output_state)) && ...),
                "every slot is named");
  static constexpr std::array<OpInfo, sizeof...(Op)> infos = {OpInfo{
      Op::slots, Op::norms, Op::measuring, Op::updating, Op::factored, Op::row_state, Op::emits,
      Op::orthogonal, Op::output_state, Op::reads_gradient_norm, Op::slot_names, Op::codes}...};
};

constexpr auto& optimizers = OptimizerTable<Optimizers>::infos;
constexpr auto& ops = OpTable<AllOps<float>>::infos;

constexpr const char* flavor_names[] = {"torch", "Keras", "BERT"};

void check_flag(const char* optimizer, const char* name, int32_t value) {
  if (value != 0 && value != 1)
    fail(GA_ERROR_INVALID_ARGUMENT, "%s: %s was %d, expected 0 or 1", optimizer, name, value);
}

}  // namespace

void check_range(const char* optimizer, const char* name, double value, double low, double high,
                 bool high_is_legal) {
  if (value >= low && (value < high || (high_is_legal && value == high)) && std::isfinite(value))
    return;
  if (std::isinf(high))
    fail(GA_ERROR_INVALID_ARGUMENT, "%s: %s was %g, expected a finite number >= %g", optimizer,
         name, value, low);
  fail(GA_ERROR_INVALID_ARGUMENT, "%s: %s was %g, expected a number in [%g, %g%c", optimizer, name,
       value, low, high, high_is_legal ? ']' : ')');
}

const OptimizerInfo& optimizer_info(int32_t kind, int32_t flavor) {
  if (kind < 0 || kind >= static_cast<int32_t>(optimizers.size()))
    fail(GA_ERROR_INVALID_ARGUMENT, "optimizer kind was %d, expected 0 to %d (ga_optimizer_kind)",
         kind, static_cast<int>(optimizers.size()) - 1);
  if (flavor < GA_FLAVOR_TORCH || flavor > GA_FLAVOR_BERT)
    fail(GA_ERROR_INVALID_ARGUMENT, "optimizer flavor was %d, expected 0 to 2 (ga_flavor)", flavor);
  const OptimizerInfo& info = optimizers[static_cast<size_t>(kind)];
  if (!info.has_flavor(flavor))
    fail(GA_ERROR_UNSUPPORTED, "optimizer %s has no %s flavor", info.name, flavor_names[flavor]);
  return info;
}

std::string optimizer_name(const std::string& kind) {
  for (size_t k = 0; k < optimizers.size(); ++k)
    if (std::to_string(k) == kind) return optimizers[k].name;
  return kind;
}

const char* scale_name(const char* slot_name) {
  static const std::map<std::string, std::string> names = [] {
    std::map<std::string, std::string> made;
    for (const OpInfo& op : ops)
      for (int k = 0; k < op.slots; ++k)
        if (op.codes.of[k] != Code::kNone)
          made[op.slot_names.of[k]] = std::string(op.slot_names.of[k]) + "_scale";
    return made;
  }();
  return names.at(slot_name).c_str();
}

std::vector<std::string> slot_names() {
  std::vector<std::string> names;
  for (const OpInfo& op : ops)
    for (int k = 0; k < kMaxSlots; ++k) {
      if (op.slot_names.of[k]) names.push_back(op.slot_names.of[k]);
      if (op.codes.of[k] != Code::kNone) names.push_back(scale_name(op.slot_names.of[k]));
    }
  for (const OptimizerInfo& info : optimizers)
    for (int k = 0; k < kClockNumbers; ++k)
      if (info.clock_numbers[k].name) names.push_back(info.clock_numbers[k].name);
  return names;
}

const OpInfo& op_info(int op) { return ops[static_cast<size_t>(op)]; }

void check_optimizer(const ga_optimizer& o) {
  const OptimizerInfo& info = optimizer_info(o.kind, o.flavor);
  const double inf = HUGE_VAL;
  check_range(info.name, "lr", o.lr, 0, inf, false);
  check_range(info.name, "weight_decay", o.weight_decay, 0, inf, false);
  check_range(info.name, "momentum", o.momentum, 0, inf, false);
  check_range(info.name, "dampening", o.dampening, 0, 1, true);
  check_range(info.name, "beta1", o.beta1, 0, 1, false);
  check_range(info.name, "beta2", o.beta2, 0, 1, false);
  check_range(info.name, "eps", o.eps, 0, inf, false);
  check_flag(info.name, "nesterov", o.nesterov);
  check_flag(info.name, "amsgrad", o.amsgrad);
  check_flag(info.name, "maximize", o.maximize);
  check_range(info.name, "rho", o.rho, 0, 1, false);
  check_range(info.name, "lr_decay", o.lr_decay, 0, inf, false);
  check_range(info.name, "initial_accumulator", o.initial_accumulator, 0, inf, false);
  check_range(info.name, "momentum_decay", o.momentum_decay, 0, inf, false);
  check_range(info.name, "trust_coefficient", o.trust_coefficient, 0, inf, false);
  check_range(info.name, "max_grad_norm", o.max_grad_norm, 0, inf, false);
  check_range(info.name, "eps2", o.eps2, 0, inf, false);
  check_flag(info.name, "centered", o.centered);
  check_flag(info.name, "decoupled", o.decoupled);
  check_flag(info.name, "always_adapt", o.always_adapt);
  if (o.state_dtype != 0 && o.state_dtype != GA_F32 && !rounds_state(o))
    fail(GA_ERROR_INVALID_ARGUMENT,
         "%s: state_dtype was %d, expected 0, GA_F32, GA_BF16 or GA_STATE_8BIT", info.name,
         o.state_dtype);
  if (o.state_dtype == GA_BF16 && !info.bf16_state)
    fail(GA_ERROR_UNSUPPORTED, "%s: state_dtype was bf16, but its state is f32 only", info.name);
  if (o.state_dtype == GA_STATE_8BIT && !info.has_codes)
    fail(GA_ERROR_UNSUPPORTED,
         "%s: state_dtype was GA_STATE_8BIT, but no state of it can be 8 bits", info.name);
  info.check(o);
}

void check_same_state(const ga_optimizer& before, const ga_optimizer& o) {
  const OptimizerInfo& info = optimizer_info(before.kind, before.flavor);
  const auto fixed = [&](const char* field, double was, double is) {
    if (was != is)
      fail(GA_ERROR_UNSUPPORTED,
           "%s: %s was %g and would become %g, but it decides which state there is and cannot "
           "change",
           info.name, field, was, is);
  };
  const auto same_slots = [&](const ga_optimizer& x) {
    bool same = true;
    for (const bool matrix : {false, true}) {
      const int a = info.op(before, matrix), b = info.op(x, matrix);
      for (int k = 0; k < kMaxSlots && a >= 0; ++k) {
        const char *const p = op_info(a).slot_names.of[k], *const q = op_info(b).slot_names.of[k];
        same = same && (p && q ? std::strcmp(p, q) == 0 : p == q);
      }
    }
    return same;
  };
  fixed("kind", before.kind, o.kind);
  fixed("flavor", before.flavor, o.flavor);
  if (rounds_state(before) || rounds_state(o))
    fixed("state_dtype", before.state_dtype, o.state_dtype);
  if (!same_slots(o)) {  // by which of these fields?
    ga_optimizer one = before;
    one.amsgrad = o.amsgrad;
    if (!same_slots(one)) fixed("amsgrad", before.amsgrad, o.amsgrad);
    one = before;
    one.centered = o.centered;
    if (!same_slots(one)) fixed("centered", before.centered, o.centered);
    one = before;
    one.beta2 = o.beta2;
    if (!same_slots(one)) fixed("beta2", before.beta2, o.beta2);
    fixed("momentum", before.momentum, o.momentum);
  }
  for (int slot = 0; slot < kMaxSlots; ++slot)
    fixed("initial_accumulator", info.initial(before, slot), info.initial(o, slot));
}

}  // namespace ga
