// SPDX-License-Identifier: Apache-2.0
// The Ops as nvcc compiles them for the host, compared bit for bit with the CPU's kernels. Both
// fold an Op from the same numbers and run it over the same elements. (The device code of nvcc is
// compared on machines with a device.)
#include <gtest/gtest.h>

#include <cstring>
#include <random>
#include <vector>

#include "backend/cpu/kernels.hpp"
#include "backend/decide.hpp"
#include "numbers/optimizer.hpp"

namespace ga::test {
namespace {

template <class T>
constexpr int32_t kDtype = std::is_same_v<T, float> ? GA_F32 : GA_F64;

// Numbers of all magnitudes, of both signs, and some zeros.
template <class T>
std::vector<T> numbers(size_t count, unsigned seed, bool positive = false) {
  std::mt19937_64 random(seed);
  std::normal_distribution<double> normal;
  std::uniform_real_distribution<double> exponent(-12, 4);
  std::vector<T> x(count);
  for (size_t i = 0; i < count; ++i) {
    x[i] = static_cast<T>(normal(random) * std::pow(10.0, exponent(random)));
    if (positive) x[i] = std::abs(x[i]);
    if (i % 17 == 0) x[i] = 0;
  }
  return x;
}

struct Case {
  ga_optimizer optimizer;
  bool matrix;
};

// Every optimizer in every flavor it has, with options that choose among its Ops.
std::vector<Case> cases() {
  std::vector<Case> list;
  for (int32_t kind = 0; kind < Optimizers::size; ++kind)
    for (const int32_t flavor : {GA_FLAVOR_TORCH, GA_FLAVOR_KERAS, GA_FLAVOR_BERT}) {
      ga_optimizer o = {};
      o.kind = kind;
      o.flavor = flavor;
      const OptimizerInfo* info;
      try {
        info = &optimizer_info(kind, flavor);
      } catch (const Error&) {
        continue;
      }
      info->defaults(o);
      for (const double decay : {0.0, 0.01})
        for (const double momentum : {0.0, 0.9})
          for (const int32_t flag : {0, 1})
            for (const bool matrix : {false, true}) {
              ga_optimizer p = o;
              p.weight_decay = decay;
              if (kind != GA_OPTIMIZER_MUON) p.momentum = momentum;
              p.amsgrad = p.centered = flag;
              p.nesterov = flag && momentum > 0;
              list.push_back({p, matrix});
            }
    }
  return list;
}

template <class T>
struct Arrays {
  std::vector<T> p, g, state[kMaxSlots];
  explicit Arrays(size_t n) : p(numbers<T>(n, 1)), g(numbers<T>(n, 2)) {
    for (int k = 0; k < kMaxSlots; ++k)
      state[k] = numbers<T>(n, static_cast<unsigned>(3 + k), true);
  }
};

template <class T>
void expect_same(const std::vector<T>& a, const std::vector<T>& b, const char* what) {
  ASSERT_EQ(std::memcmp(a.data(), b.data(), a.size() * sizeof(T)), 0) << what;
}

template <class Op>
void compare(const ga_optimizer& o, int op, const StepInput& in) {
  using T = typename Op::Real;
  constexpr size_t kCount = 1000;
  constexpr bool f64 = std::is_same_v<T, double>;
  SCOPED_TRACE(op);
  ParamPlan plan = {};
  ByPosition<AllOps<T>>::fold(op, o, in, plan.folded);
  const Op mine(o, in);
  ASSERT_EQ(std::memcmp(plan.folded.bytes, &mine, sizeof mine), 0) << "folded";

  Arrays<T> theirs(kCount), ours(kCount);
  UpdateTask task = {};
  Partial partial = {};
  std::vector<T> emitted(kCount), expected(kCount);
  task.plan = &plan;
  task.count = kCount;
  task.gradient = identity({theirs.g.data(), kDtype<T>, 1, nullptr});
  task.op = op;
  task.f64 = f64;
  task.param = {theirs.p.data(), kDtype<T>};
  for (int k = 0; k < kMaxSlots; ++k) task.state[k] = {theirs.state[k].data(), kDtype<T>};
  task.partials = &partial;
  task.emitted = emitted.data();
  const cpu::Kernels& kernels = cpu::choose_isa().kernels();

  constexpr int kSlots = Op::factored ? 1 : Op::slots;
  T s[kMaxSlots] = {};
  if constexpr (Op::norms > 0) {
    kernels.measure[f64][op](task, 0, kCount);
    for (size_t i = 0; i < kCount; ++i) {
      T x[2] = {};
      for (int k = 0; k < kSlots; ++k) s[k] = ours.state[k][i];
      mine.measure(ours.p[i], ours.g[i], s, x);
      if (Op::measuring.writes_state)
        for (int k = 0; k < kSlots; ++k) ours.state[k][i] = s[k];
      expected[i] = x[0];
    }
    if (Op::emits) expect_same(emitted, expected, "emitted");
  }
  kernels.update[f64][op](task, 0, kCount);
  for (size_t i = 0; i < kCount; ++i) {
    for (int k = 0; k < kSlots; ++k) s[k] = ours.state[k][i];
    ours.p[i] = mine(ours.p[i], ours.g[i], s);
    if (Op::updating.writes_state)
      for (int k = 0; k < kSlots; ++k) ours.state[k][i] = s[k];
  }
  expect_same(theirs.p, ours.p, "parameters");
  for (int k = 0; k < kSlots; ++k) expect_same(theirs.state[k], ours.state[k], "state");
}

template <class... Op>
void compare_one(TypeList<Op...>, const ga_optimizer& o, int op, const StepInput& in) {
  int at = 0;
  (void)((at++ == op ? (compare<Op>(o, op, in), true) : false) || ...);
}

TEST(OpsByNvcc, AreThoseOfTheCpu) {
  int compared = 0;
  for (const Case& test : cases()) {
    const OptimizerInfo& info = optimizer_info(test.optimizer.kind, test.optimizer.flavor);
    const int op = info.op(test.optimizer, test.matrix);
    if (op < 0) continue;
    Clock clock = {};
    for (int step = 1; step <= 3; ++step) {
      info.advance(test.optimizer, clock, test.optimizer.lr);
      SCOPED_TRACE(info.name);
      const StepInput in = {test.optimizer.lr, test.optimizer.weight_decay, clock, 64, 64, 0.7,
                            {0.3, 2.5}};
      compare_one(AllOps<float>(), test.optimizer, op, in);
      compare_one(AllOps<double>(), test.optimizer, op, in);
      ++compared;
      if (::testing::Test::HasFatalFailure()) return;
    }
  }
  EXPECT_GT(compared, 200);
}

// Schedules call cos_pi(), on the host and on the device, so their bits depend on no library.
TEST(OpsByNvcc, CosineNeedsNoLibrary) {
  for (int k = 0; k <= 1000; ++k) {
    const double x = k / 1000.0;
    EXPECT_NEAR(cos_pi(x), std::cos(3.14159265358979323846 * x), 4e-16);
  }
}

}  // namespace
}  // namespace ga::test
