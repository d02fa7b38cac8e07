// SPDX-License-Identifier: Apache-2.0
//
// BERT's published recipe, computed step by step from its paper and its source, compared with the
// library: the mean over a window of four micro-batches, clipping by the global norm,
// AdamWeightDecay without decay of LayerNorm and biases, linear warm-up and decay.

#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

#include "support.hpp"

namespace ga::test {
namespace {

constexpr double kLr = 0.01, kDecay = 0.01, kClip = 1;
constexpr int64_t kSteps = 80, kWarmup = 10, kMicros = 4;
constexpr double kMicroSize = 8;

struct Named {
  const char* name;
  ref::Shape shape;
  bool decays;
};
const std::vector<Named> kTensors = {
    {"dense/kernel", {12, 16}, true}, {"dense/bias", {16}, false},
    {"LayerNorm/gamma", {16}, false}, {"LayerNorm/beta", {16}, false},
    {"output/kernel", {16, 4}, true}, {"output/bias", {4}, false}};

using Values = std::vector<std::vector<double>>;  // [tensor][element]

// ---- The recipe, in float64 ---------------------------------------------------------------------

struct Recipe {
  // Common mistakes in using the recipe.
  bool clips_micro_batches = false, counts_micro_batches = false, decays_all = false;

  Values p, m, v;
  int64_t global_step = 0;
  int64_t clipped = 0;  // number of clipped steps
  double lr = 0;

  explicit Recipe(const Values& start) : p(start), m(start), v(start) {
    for (Values* moment : {&m, &v}) {
      for (auto& tensor : *moment) std::fill(tensor.begin(), tensor.end(), 0.0);
    }
  }

  static double clip_by_global_norm(Values& g) {
    double squares = 0;
    for (const auto& tensor : g) {
      for (const double x : tensor) squares += x * x;
    }
    const double norm = std::sqrt(squares);
    for (auto& tensor : g) {
      for (double& x : tensor) x = x * kClip / std::max(norm, kClip);
    }
    return norm;
  }

  void window(const std::vector<Values>& micro_batches) {
    Values g = p;
    for (auto& tensor : g) std::fill(tensor.begin(), tensor.end(), 0.0);
    for (Values micro : micro_batches) {
      if (clips_micro_batches) clip_by_global_norm(micro);
      for (size_t i = 0; i < g.size(); ++i) {
        for (size_t j = 0; j < g[i].size(); ++j) g[i][j] += micro[i][j] / kMicros;
      }
    }
    if (!clips_micro_batches) clipped += clip_by_global_norm(g) > kClip;

    const auto step = static_cast<double>(global_step);
    lr = kLr * (1 - std::min(step, double{kSteps}) / double{kSteps});
    if (global_step < kWarmup) lr = kLr * step / double{kWarmup};
    global_step += counts_micro_batches ? kMicros : 1;

    for (size_t i = 0; i < p.size(); ++i) {
      for (size_t j = 0; j < p[i].size(); ++j) {
        m[i][j] = 0.9 * m[i][j] + (1 - 0.9) * g[i][j];
        v[i][j] = 0.999 * v[i][j] + (1 - 0.999) * g[i][j] * g[i][j];
        double update = m[i][j] / (std::sqrt(v[i][j]) + 1e-6);
        if (kTensors[i].decays || decays_all) update += kDecay * p[i][j];
        p[i][j] -= lr * update;
      }
    }
  }
};

// ---- The same through the library ---------------------------------------------------------------

template <class T>
class Library {
 public:
  Library() {
    ga_optimizer o = optimizer(GA_OPTIMIZER_ADAMW, GA_FLAVOR_BERT);
    o.lr = kLr;
    EXPECT_EQ(o.weight_decay, kDecay);  // as published
    const ga_group decayed = ctx.group(o);
    o.weight_decay = 0;
    const ga_group spared = ctx.group(o);
    ga_schedule s = schedule(GA_SCHEDULE_BERT);
    s.warmup_steps = kWarmup;
    s.total_steps = kSteps;
    for (const ga_group group : {decayed, spared}) EXPECT_OK(ga_group_set_schedule(ctx, group, &s));
    const ga_clip c = clip(GA_CLIP_GLOBAL, kClip, GA_FLAVOR_KERAS);
    EXPECT_OK(ga_context_set_clip(ctx, &c));

    Random random(7);
    for (const Named& tensor : kTensors) {
      std::vector<T> values(static_cast<size_t>(ref::count_of(tensor.shape)));
      for (T& x : values) x = static_cast<T>(random.signed_unit());
      tensors.push_back(std::move(values));
    }
    for (size_t i = 0; i < kTensors.size(); ++i) {
      ctx.param(kTensors[i].decays ? decayed : spared, kTensors[i].name, tensors[i].data(),
                kTensors[i].shape);
    }
  }

  void accumulate(const Values& micro) {
    std::vector<std::vector<T>> g;
    std::vector<const void*> pointers;
    for (const auto& tensor : micro) {
      g.emplace_back(tensor.begin(), tensor.end());
      pointers.push_back(g.back().data());
    }
    ctx.accumulate(pointers, kMicroSize);
  }

  Values values() const {
    Values all;
    for (const auto& tensor : tensors) all.emplace_back(tensor.begin(), tensor.end());
    return all;
  }

  Context ctx;
  std::vector<std::vector<T>> tensors;
};

// Gradients of a noisy quadratic at p. The noise differs between micro-batches and between steps,
// so that some steps are clipped and some are not. All are multiples of 2^-16 below 4, so every sum
// of four is exact.
std::vector<Values> micro_gradients(const Values& p, Random& random) {
  const double amplitude = std::pow(10, random.signed_unit()) * 0.05;
  std::vector<Values> all;
  for (int64_t k = 0; k < kMicros; ++k) {
    const double noise = k == 3 ? 5 : 1;
    Values g = p;
    for (auto& tensor : g) {
      for (double& x : tensor) {
        x = amplitude * (x + noise * random.signed_unit());
        x = std::nearbyint(std::clamp(x, -3.9, 3.9) * 0x1p16) * 0x1p-16;
      }
    }
    all.push_back(std::move(g));
  }
  return all;
}

double distance(const Values& a, const Values& b) {
  double largest = 0;
  for (size_t i = 0; i < a.size(); ++i) {
    for (size_t j = 0; j < a[i].size(); ++j) {
      const double d = std::abs(a[i][j] - b[i][j]);
      if (!(d <= largest)) largest = d;  // keeps a NaN
    }
  }
  return largest;
}

// The largest difference of the parameters of both sides after each step. u is half an ulp of 1 in
// the library's arithmetic, u64 in float64. The mean is exact. The norm, in float64, is known to
// (count + 4) u64, and the clipped gradient g to this plus 4 u. The moments m and v gain an error
// of 4 u per step, relative to M, which sums |g| as m sums g, and to v. So m / (sqrt(v) + eps) is
// known to (2 (count + 4) u64 + 8 u + 6 t u) M / sqrt(v), with M / sqrt(v) <= (1 - beta1) / sqrt((1
// - beta2) (1 - beta1^2 / beta2)) < 7.3 by Cauchy-Schwarz. Decay and subtraction add 2 u of p. The
// bound is twice this sum, because float64 rounds too.
class Bound {
 public:
  Bound(double u, const Values& p) : u_(u) {
    for (const auto& tensor : p) count_ += static_cast<double>(tensor.size());
  }
  double step(double t, double lr, const Values& p) {
    double largest = 0;
    for (const auto& tensor : p) {
      for (const double x : tensor) largest = std::max(largest, std::abs(x));
    }
    const double moments = 2 * (count_ + 4) * 0x1p-53 + (8 + 6 * t) * u_;
    return sum_ += 2 * (lr * 7.3 * moments + 2 * u_ * largest);
  }

 private:
  double u_, count_ = 0, sum_ = 0;
};

template <class T>
void expect_recipe(double u) {
  Library<T> library;
  const Values start = library.values();
  Recipe right(start), clips_micro(start), counts_micro(start), decays_all(start);
  clips_micro.clips_micro_batches = true;
  counts_micro.counts_micro_batches = true;
  decays_all.decays_all = true;
  Bound bound(u, start);
  double allowed = 0;

  Random random(11);
  for (int64_t t = 1; t <= kSteps; ++t) {
    // All sides get the gradients at the library's parameters, so that only the recipes differ.
    const std::vector<Values> micros = micro_gradients(library.values(), random);
    for (const Values& micro : micros) library.accumulate(micro);
    const ga_step_result result = step(library.ctx);
    for (Recipe* recipe : {&right, &clips_micro, &counts_micro, &decays_all}) {
      recipe->window(micros);
    }

    ASSERT_EQ(result.outcome, GA_STEP_APPLIED);
    ASSERT_NEAR(result.lr, right.lr, 4 * kLr * 0x1p-53) << "step " << t;
    allowed = bound.step(static_cast<double>(t), right.lr, right.p);
    ASSERT_LE(distance(library.values(), right.p), allowed) << "step " << t;
    if (t == 1) {
      EXPECT_EQ(result.lr, 0);
      EXPECT_EQ(library.values(), start);  // nothing moves in the first step
    }
  }

  EXPECT_GT(right.clipped, kSteps / 4);
  EXPECT_LT(right.clipped, kSteps * 3 / 4);
  // The bound is far smaller than the effect of a mistake.
  for (const Recipe* wrong : {&clips_micro, &counts_micro, &decays_all}) {
    EXPECT_GT(distance(library.values(), wrong->p), 10 * allowed);
  }
  for (size_t i = 0; i < kTensors.size(); ++i) {
    SCOPED_TRACE(kTensors[i].name);
    const double apart = distance({library.values()[i]}, {decays_all.p[i]});
    if (kTensors[i].decays) {
      EXPECT_LE(apart, allowed);
    } else {
      EXPECT_GT(apart, 2 * allowed);
    }
  }
}

TEST(BertRecipe, Float64StepForStep) { expect_recipe<double>(0x1p-53); }

TEST(BertRecipe, Float32StepForStep) { expect_recipe<float>(0x1p-24); }

// With gradients of zero only decay moves parameters.
TEST(BertRecipe, LayerNormAndBiasesDoNotDecay) {
  Library<double> library;
  const Values start = library.values();
  Values zero = start;
  for (auto& tensor : zero) std::fill(tensor.begin(), tensor.end(), 0.0);
  double kept = 1;
  for (int64_t t = 0; t < kSteps; ++t) {
    for (int64_t k = 0; k < kMicros; ++k) library.accumulate(zero);
    kept *= 1 - step(library.ctx).lr * kDecay;
  }
  EXPECT_LT(kept, 0.997);
  for (size_t i = 0; i < kTensors.size(); ++i) {
    SCOPED_TRACE(kTensors[i].name);
    if (!kTensors[i].decays) {
      EXPECT_EQ(library.values()[i], start[i]);
      continue;
    }
    // Each step has three roundings in the library and two here.
    Values want = {start[i]};
    for (double& x : want[0]) x *= kept;
    EXPECT_LE(distance({library.values()[i]}, want), 5 * kSteps * 0x1p-53);
  }
}

}  // namespace
}  // namespace ga::test
