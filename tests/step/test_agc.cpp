// SPDX-License-Identifier: Apache-2.0
//
// Adaptive gradient clipping: units by preset and by axes, compared with the formula in float64;
// and clipping of each micro-batch, compared with numbers computed by hand.
#include <algorithm>
#include <functional>

#include "formats.hpp"

namespace ga::test {
namespace {

using Shape = std::vector<int64_t>;

ga_clip agc(int32_t units = GA_AGC_TF, double factor = 0.01, double eps = 1e-3,
            double max_value = INFINITY) {
  ga_clip c = clip(GA_CLIP_AGC, 0, GA_FLAVOR_TORCH, max_value);
  c.agc_units = units;
  c.agc_factor = factor;
  c.agc_eps = eps;
  return c;
}

ga_clip in_micro(ga_clip c) {
  c.when = GA_CLIP_WHEN_MICRO;
  return c;
}

// The axes of a preset, written from the definitions: TensorFlow's kernels end in (in, out) and
// timm's begin with (out, in); the released NFNets code treats a shape as a vector if it has at
// most one dimension other than 1.
uint32_t axes_of(int32_t units, const Shape& shape) {
  const auto rank = static_cast<int>(shape.size());
  const uint32_t all = (1u << rank) - 1;
  int squeezed = 0;
  for (const int64_t extent : shape) squeezed += extent != 1;
  if (rank <= 1 || (units == GA_AGC_NFNETS && squeezed <= 1)) return all;
  if (units == GA_AGC_TORCH) return all & ~1u;
  if (rank <= 3) return 1u;
  return all & ~(1u << (rank - 1));  // all but the last: 0 to 2 at rank 4, 0 to 3 at rank 5
}

// The unit that element i belongs to: its coordinates along the axes that are not reduced.
int64_t unit_of(int64_t i, const Shape& shape, uint32_t axes) {
  int64_t unit = 0, scale = 1;
  for (size_t d = shape.size(); d-- > 0;) {
    const int64_t at = i % shape[d];
    i /= shape[d];
    if (axes >> d & 1) continue;
    unit += at * scale;
    scale *= shape[d];
  }
  return unit;
}

// Returns the clipped gradient in float64; *least is the smallest factor.
std::vector<double> clipped(const Tensor& p, const std::vector<double>& gradient,
                            const Shape& shape, uint32_t axes, const ga_clip& c,
                            double* least = nullptr) {
  std::vector<double> g = gradient;
  if (std::isfinite(c.max_value)) {
    for (double& x : g) x = std::clamp(x, -c.max_value, c.max_value);
  }
  std::vector<double> of_p(g.size(), 0), of_g(g.size(), 0);
  for (size_t i = 0; i < g.size(); ++i) {
    const auto u = static_cast<size_t>(unit_of(static_cast<int64_t>(i), shape, axes));
    of_p[u] += std::pow(p.get(static_cast<int64_t>(i)), 2);
    of_g[u] += g[i] * g[i];
  }
  for (size_t i = 0; i < g.size(); ++i) {
    const auto u = static_cast<size_t>(unit_of(static_cast<int64_t>(i), shape, axes));
    const double norm = std::sqrt(of_g[u]);
    const double most = c.agc_factor * std::max(std::sqrt(of_p[u]), c.agc_eps);
    if (norm <= most) continue;
    const double factor = most / std::max(norm, 1e-6);
    g[i] *= factor;
    if (least) *least = std::min(*least, factor);
  }
  return g;
}

std::vector<double> values(const Tensor& t) {
  std::vector<double> result;
  for (int64_t i = 0; i < t.count(); ++i) result.push_back(t.get(i));
  return result;
}

// The factor is the quotient of two norms, accurate to kUsualNorm, and rounded once; the product is
// rounded once more.
testing::AssertionResult close(const std::vector<double>& got, const std::vector<double>& want,
                               double relative = 2 * ref::kUsualNorm + 3 * 0x1p-24) {
  if (got.size() != want.size()) return testing::AssertionFailure() << got.size() << " elements";
  for (size_t i = 0; i < got.size(); ++i) {
    if (std::abs(got[i] - want[i]) <= relative * std::abs(want[i]) + ref::kUnderflow) continue;
    return testing::AssertionFailure()
           << "element " << i << " is " << got[i] << ", not " << want[i];
  }
  return testing::AssertionSuccess();
}

// Gradients with about half of the units clipped, and parameters with units of all norms: zero,
// below eps, larger.
Tensor agc_parameter(int32_t dtype, const Shape& shape, uint32_t axes, uint64_t seed) {
  Random random(seed);
  Tensor p(dtype, ref::count_of(shape));
  for (int64_t i = 0; i < p.count(); ++i) {
    const int64_t kind = unit_of(i, shape, axes) % 5;
    const double scale = kind == 0 ? 0 : kind == 1 ? 1e-6 : kind == 2 ? 1 : 30;
    p.set(i, scale * random.signed_unit());
  }
  return p;
}

Tensor agc_gradient(int32_t dtype, const Shape& shape, uint32_t axes, uint64_t seed) {
  Random random(seed);
  Tensor g(dtype, ref::count_of(shape));
  for (int64_t i = 0; i < g.count(); ++i) {
    const int64_t kind = unit_of(i, shape, axes) % 7;
    const double scale = kind == 0 ? 0 : kind == 1 ? 1e-9 : kind < 4 ? 1e-4 : kind < 6 ? 1 : 1e4;
    g.set(i, scale * random.signed_unit());
  }
  return g;
}

// Returns the gradient of one external parameter after clipping.
std::vector<double> run(Tensor& p, const Tensor& g, const Shape& shape, const ga_clip& c,
                        uint32_t axes = 0, ga_step_result* result = nullptr,
                        ga_config with = config()) {
  Context ctx(with);
  ctx.group(optimizer(GA_OPTIMIZER_EXTERNAL));
  ga_param_options o = options(g.dtype());
  o.agc_axes = axes;
  ga_param id = -1;
  EXPECT_OK(try_add(ctx, 0, "p", p.data(), p.dtype(), shape, o, &id));
  EXPECT_OK(ga_context_set_clip(ctx, &c));
  accumulate(ctx, {&g});
  const ga_step_result r = step(ctx);
  EXPECT_EQ(r.outcome, GA_STEP_APPLIED);
  if (result) *result = r;
  return external_gradient(ctx, id, p.count());
}

// ---- Units --------------------------------------------------------------------------------------

const char* const kUnitNames[] = {"Tf", "Nfnets", "Torch"};

std::vector<Shape> shapes() {
  return {{},
          {1},
          {300},
          {70000},
          {20, 30},
          {1, 30},
          {30, 1},
          {1, 1},
          {3, 70000},
          {70000, 3},
          {5, 6, 7},
          {1, 1, 40},
          {1, 6, 7},
          {3, 3, 16, 32},
          {3, 3, 16, 1},   // depthwise, one filter per channel
          {3, 3, 1, 16},   // depthwise as a grouped convolution
          {16, 1, 3, 3},   // depthwise, out first
          {1, 1, 16, 32},  // 1 x 1
          {1, 1, 1, 50},
          {5, 7, 130, 65},  // units across chunks
          {2, 3, 3, 8, 9},
          {9, 8, 2, 3, 3},
          {1, 1, 1, 1, 9},
          {2, 3, 2, 3, 2, 4}};
}

class Units : public testing::TestWithParam<int32_t> {};
INSTANTIATE_TEST_SUITE_P(Agc, Units, testing::Values(GA_AGC_TF, GA_AGC_NFNETS, GA_AGC_TORCH),
                         [](const auto& info) { return kUnitNames[info.param]; });

TEST_P(Units, OfPresets) {
  const int32_t units = GetParam();
  for (const Shape& shape : shapes()) {
    const uint32_t axes = axes_of(units, shape);
    if (units == GA_AGC_NFNETS && shape.size() >= 5) continue;  // refused, below
    SCOPED_TRACE(testing::PrintToString(shape));
    for (const int32_t dtype : {GA_F32, GA_F64}) {
      Tensor p = agc_parameter(dtype, shape, axes, 1);
      const Tensor g = agc_gradient(dtype, shape, axes, 2);
      ga_step_result r;
      double least = 1;
      const std::vector<double> want = clipped(p, values(g), shape, axes, agc(units), &least);
      const std::vector<double> got = run(p, g, shape, agc(units), 0, &r);
      EXPECT_TRUE(close(got, want));
      EXPECT_NEAR(r.clip_factor, least, 1e-6 * least);
      double squares = 0;
      for (const double x : values(g)) squares += x * x;
      EXPECT_NEAR(r.norm, std::sqrt(squares), ref::kUsualNorm * std::sqrt(squares))
          << "before clipping";
    }
  }
}

// Tests every set of axes of every shape.
TEST(Agc, ExplicitAxes) {
  for (const Shape& shape :
       {Shape{12}, {5, 8}, {4, 5, 6}, {3, 2, 4, 5}, {2, 3, 2, 3, 4}, {2, 70000}, {300, 400}}) {
    const auto rank = static_cast<unsigned>(shape.size());
    for (uint32_t axes = 1; axes < 1u << rank; ++axes) {
      SCOPED_TRACE(testing::PrintToString(shape) + " axes " + std::to_string(axes));
      Tensor p = agc_parameter(GA_F32, shape, axes, 3);
      const Tensor g = agc_gradient(GA_F32, shape, axes, 4);
      const std::vector<double> want = clipped(p, values(g), shape, axes, agc());
      // With explicit axes, a preset without a rule for the rank does not matter.
      EXPECT_TRUE(close(run(p, g, shape, agc(GA_AGC_NFNETS), axes), want));
    }
  }
}

TEST(Agc, SixteenBits) {
  const Shape shape = {40, 30};
  for (const int32_t dtype : {GA_F16, GA_BF16}) {
    // The norms are those of the master weights, which start with the parameter's values.
    Tensor p = agc_parameter(dtype, shape, 1, 5);
    Tensor g(dtype, ref::count_of(shape));
    const Tensor from = agc_gradient(GA_F32, shape, 1, 6);
    for (int64_t i = 0; i < g.count(); ++i) g.set(i, from.get(i));
    EXPECT_TRUE(close(run(p, g, shape, agc()), clipped(p, values(g), shape, 1, agc())));
  }
}

// ---- The formula --------------------------------------------------------------------------------

TEST(Agc, ByHand) {
  Tensor p(GA_F32, 4), g(GA_F32, 4);
  const double weights[] = {3, 0, 4, 0}, gradients[] = {0.3, 3e-6, 0.4, 4e-6};
  for (int64_t i = 0; i < 4; ++i) p.set(i, weights[i]), g.set(i, gradients[i]);
  // Columns: (3, 4) of norm 5 with a gradient of norm 0.5; zeros with a gradient of norm 5e-6.
  std::vector<double> got = run(p, g, {2, 2}, agc());
  EXPECT_TRUE(close(got, {0.03, 3e-6, 0.04, 4e-6}, 1e-6)) << "to 0.01 * 5; to 0.01 * 1e-3";
  got = run(p, g, {2, 2}, agc(GA_AGC_TF, 0.2));
  EXPECT_TRUE(close(got, values(g), 0)) << "neither norm exceeds its limit";
  got = run(p, g, {2, 2}, agc(GA_AGC_TF, 0.01, 1e-4));
  EXPECT_TRUE(close(got, {0.03, 6e-7, 0.04, 8e-7}, 1e-6)) << "to 0.01 * 1e-4";
  // A norm below 1e-6 counts as 1e-6.
  for (int64_t i = 0; i < 4; ++i) g.set(i, 1e-3 * gradients[i]);
  g.set(1, 3e-7);
  g.set(3, 4e-7);
  got = run(p, g, {2, 2}, agc(GA_AGC_TF, 0.01, 1e-5));
  EXPECT_TRUE(close(got, {3e-4, 3e-8, 4e-4, 4e-8}, 1e-6)) << "times 1e-7 / 1e-6";
}

// A zero-initialised unit gets a gradient of norm agc_factor * agc_eps, not 0.
TEST(Agc, ZeroWeightsMove) {
  Tensor p(GA_F32, 50), g(GA_F32, 50, 1);
  const std::vector<double> got = run(p, g, {50}, agc());
  EXPECT_TRUE(close(got, std::vector<double>(50, 1e-5 / std::sqrt(50.0)), 1e-6));
}

TEST(Agc, AGradientOfZeroStaysZero) {
  Tensor p(GA_F32, 50), g(GA_F32, 50);
  ga_step_result r;
  EXPECT_TRUE(close(run(p, g, {50}, agc(), 0, &r), std::vector<double>(50, 0), 0));
  EXPECT_EQ(r.clip_factor, 1);
}

TEST(Agc, NormsOfLargeUnits) {
  const Shape shape = {1 << 21, 2};
  Tensor p(GA_F32, ref::count_of(shape), 0.1), g(GA_F32, ref::count_of(shape), 0.3);
  const std::vector<double> got = run(p, g, shape, agc());
  // Both norms have the same number of terms: 0.3 becomes 0.01 of 0.1.
  const double want = 0.01 * static_cast<double>(0.1f);
  EXPECT_NEAR(got.front(), want, 4 * 0x1p-24 * want);
  EXPECT_NEAR(got.back(), want, 4 * 0x1p-24 * want);
}

TEST(Agc, AfterTheClipByValue) {
  const Shape shape = {20, 30};
  Tensor p = agc_parameter(GA_F32, shape, 1, 1);
  const Tensor g = agc_gradient(GA_F32, shape, 1, 2);
  const ga_clip c = agc(GA_AGC_TF, 0.01, 1e-3, 0.5);
  EXPECT_TRUE(close(run(p, g, shape, c), clipped(p, values(g), shape, 1, c)));
}

// AGC sees the reduced gradient, so it clips as for the full batch.
TEST(Agc, SeesTheReducedUnscaledGradient) {
  const Shape shape = {20, 30};
  Tensor p = agc_parameter(GA_F32, shape, 1, 1);
  const Tensor g = agc_gradient(GA_F32, shape, 1, 2);
  Tensor a(GA_F32, g.count()), b(GA_F32, g.count());
  for (int64_t i = 0; i < g.count(); ++i) {
    a.set(i, 1024 * 2 * g.get(i));
    b.set(i, 1024 * -2 * g.get(i));
  }
  ga_config c = config();
  c.loss_scale = 1024;
  Context ctx(c);
  ctx.group(optimizer(GA_OPTIMIZER_EXTERNAL));
  add(ctx, 0, p, shape);
  const ga_clip mode = agc();
  EXPECT_OK(ga_context_set_clip(ctx, &mode));
  accumulate(ctx, {&a}, 3);  // (3 * 2 - 1 * 2) / 4 = 1
  accumulate(ctx, {&b}, 1);
  step(ctx);
  EXPECT_TRUE(close(external_gradient(ctx, 0, g.count()), clipped(p, values(g), shape, 1, mode),
                    6 * 0x1p-24));
}

// Each step clips by the parameter before the step, and the optimizer gets the clipped gradient.
TEST(Agc, OverATrainingRun) {
  const Shape shape = {20, 30};
  Tensor p = random_tensor(GA_F32, ref::count_of(shape), 1);
  std::vector<double> want = values(p);
  std::vector<double> error(want.size(), 0);
  Context ctx;
  ctx.group(plain_sgd(1));
  add(ctx, 0, p, shape);
  const ga_clip c = agc();
  EXPECT_OK(ga_context_set_clip(ctx, &c));
  for (uint64_t t = 0; t < 10; ++t) {
    const Tensor g = agc_gradient(GA_F32, shape, 1, t);
    const std::vector<double> step_by = clipped(p, values(g), shape, 1, c);
    const Tensor before = p;
    accumulate(ctx, {&g});
    step(ctx);
    for (int64_t i = 0; i < p.count(); ++i) {
      const double x = before.get(i) - step_by[static_cast<size_t>(i)];
      ASSERT_NEAR(p.get(i), x,
                  4 * 0x1p-24 * (std::abs(x) + std::abs(step_by[static_cast<size_t>(i)])));
    }
  }
}

// The classifier's group is not clipped, or has options of its own.
TEST(Agc, ExclusionByGroup) {
  const Shape shape = {8, 4};
  std::vector<Tensor> p;
  for (uint64_t i = 0; i < 3; ++i) p.push_back(random_tensor(GA_F32, 32, i + 1));
  const Tensor g(GA_F32, 32, 1);
  Context ctx;
  for (ga_group group = 0; group < 3; ++group) {
    ctx.group(optimizer(GA_OPTIMIZER_EXTERNAL));
    add(ctx, group, p[static_cast<size_t>(group)], shape);
  }
  const ga_clip all = agc(), none = clip(GA_CLIP_NONE, 0), own = agc(GA_AGC_TORCH, 0.5);
  EXPECT_OK(ga_context_set_clip(ctx, &all));
  EXPECT_OK(ga_group_set_clip(ctx, 1, &none));
  EXPECT_OK(ga_group_set_clip(ctx, 2, &own));
  accumulate(ctx, {&g, &g, &g});
  step(ctx);
  EXPECT_TRUE(close(external_gradient(ctx, 0, 32), clipped(p[0], values(g), shape, 1, all)));
  EXPECT_TRUE(close(external_gradient(ctx, 1, 32), values(g), 0));
  EXPECT_TRUE(close(external_gradient(ctx, 2, 32), clipped(p[2], values(g), shape, 2, own)));
}

// Under GA_MISSING_ZERO a missing gradient is zero; frozen parameters are not read.
TEST(Agc, MissingAndFrozen) {
  ga_config with = config();
  with.missing = GA_MISSING_ZERO;
  Tensor p(GA_F32, 4, 1), q(GA_F32, 4, 1), g(GA_F32, 4, 1);
  Context ctx(with);
  ctx.group(plain_sgd());
  add(ctx, 0, p);
  add(ctx, 0, q);
  const ga_clip c = agc();
  EXPECT_OK(ga_context_set_clip(ctx, &c));
  accumulate(ctx, {&g, nullptr});
  EXPECT_EQ(step(ctx).outcome, GA_STEP_APPLIED);
  EXPECT_EQ(q.get(0), 1);
  EXPECT_NEAR(p.get(0), 1 - 0.01, 1e-6);
  EXPECT_OK(ga_param_set_frozen(ctx, 0, 1));
  accumulate(ctx, {&g, &g});
  step(ctx);
  EXPECT_NEAR(p.get(0), 1 - 0.01, 1e-6);
  EXPECT_NEAR(q.get(0), 1 - 0.01, 1e-6);
}

TEST(Agc, SkipsWhatIsNotFinite) {
  Tensor p(GA_F32, 70000, 1), g(GA_F32, 70000, 1);
  g.set(69999, INFINITY);
  const Tensor before = p;
  for (const ga_clip& c :
       {agc(), in_micro(agc()), in_micro(clip(GA_CLIP_GLOBAL, 1)),
        in_micro(clip(GA_CLIP_GLOBAL, 1, GA_FLAVOR_KERAS)), in_micro(clip(GA_CLIP_PER_TENSOR, 1)),
        in_micro(clip(GA_CLIP_NONE, 0, GA_FLAVOR_TORCH, 1))}) {
    SCOPED_TRACE("scope " + std::to_string(c.scope) + " when " + std::to_string(c.when));
    for (const double bad : {double{INFINITY}, -double{INFINITY}, double{NAN}}) {
      g.set(69999, bad);
      Context ctx;
      ctx.group(plain_sgd());
      add(ctx, 0, p, {7, 10000});
      EXPECT_OK(ga_context_set_clip(ctx, &c));
      accumulate(ctx, {&g});
      EXPECT_EQ(step(ctx).outcome, GA_STEP_SKIPPED_NONFINITE) << bad;
      EXPECT_TRUE(p == before);
    }
  }
}

// AGC by rows works piece by piece, and one piece may end in the middle of a cache line of state in
// which the next piece begins.
TEST(Agc, PiecesLeaveTheirNeighboursAlone) {
  const Shape shape = {1001, 131};
  const int64_t count = ref::count_of(shape);
  const ga_clip none = clip(GA_CLIP_NONE, 0), all = agc(GA_AGC_TORCH, 1e9);
  Block first;
  for (const int32_t threads : {1, 2, 3}) {
    for (const ga_clip& c : {none, all}) {
      ga_config config = test::config();
      config.num_threads = threads;
      Context ctx(config);
      ga_optimizer sgd = plain_sgd(0.1);
      sgd.momentum = 0.9;
      Block p(static_cast<size_t>(count), 0.5f), g(static_cast<size_t>(count));
      Random random(7);
      for (float& x : g) x = static_cast<float>(random.signed_unit());
      EXPECT_OK(ga_param_add(ctx, ctx.group(sgd), "p", p.data(), GA_F32, 2, shape.data(), nullptr,
                             nullptr));
      EXPECT_OK(ga_context_set_clip(ctx, &c));
      for (int t = 0; t < 3; ++t) {
        ctx.accumulate({g.data()});
        step(ctx);
      }
      if (first.empty()) first = p;
      EXPECT_TRUE(same_bits(first, p)) << threads << " threads, scope " << c.scope;
    }
  }
}

// The factors of a gradient's units are used in their own window only.
TEST(Agc, IsForgottenWithItsWindow) {
  const auto window = [](ga_context* ctx, std::vector<const void*> gradients) {
    EXPECT_OK(ga_accumulate(ctx, gradients.data(), gradients.size(), 1, nullptr));
    step(ctx);
  };
  const float one = 1, two = 2;
  const ga_clip units = agc(GA_AGC_TF, 1e9);
  {  // a window without a gradient, under GA_MISSING_ZERO
    ga_config c = config();
    c.missing = GA_MISSING_ZERO;
    Context ctx(c);
    const ga_group group = ctx.group(plain_sgd());
    float a = 0, b = 0;
    ctx.param(group, "a", &a, 1);
    ctx.param(group, "b", &b, 1);
    EXPECT_OK(ga_context_set_clip(ctx, &units));
    window(ctx, {&one, &one});
    window(ctx, {&one, nullptr});
    EXPECT_EQ(b, -1);
  }
  {  // a group that is no longer clipped
    Context ctx;
    const ga_group first = ctx.group(plain_sgd()), second = ctx.group(plain_sgd());
    float a = 0, b = 0;
    ctx.param(first, "a", &a, 1);
    ctx.param(second, "b", &b, 1);
    EXPECT_OK(ga_context_set_clip(ctx, &units));
    window(ctx, {&one, &one});
    const ga_clip none = clip(GA_CLIP_NONE, 0);
    EXPECT_OK(ga_group_set_clip(ctx, first, &none));
    window(ctx, {&two, &two});
    EXPECT_EQ(a, -3);
    EXPECT_EQ(b, -3);
  }
  {  // one group clipped per micro-batch, another in the step
    Context ctx;
    const ga_group first = ctx.group(plain_sgd()), second = ctx.group(plain_sgd());
    float a = 0, b = 0, g = 1;
    ctx.param(first, "a", &a, 1);
    ctx.param(second, "b", &b, 1);
    const ga_clip micro = in_micro(units);
    EXPECT_OK(ga_group_set_clip(ctx, first, &micro));
    EXPECT_OK(ga_group_set_clip(ctx, second, &units));
    ctx.accumulate({&g, &g});
    g = 99;  // the gradient was consumed
    step(ctx);
    EXPECT_EQ(a, -1);
    EXPECT_EQ(b, -1);
  }
}

TEST(Agc, SameBitsForAnyThreadsAndIsa) {
  const std::vector<Shape> all = {
      {70000}, {3, 70000}, {70000, 3}, {3, 3, 64, 128}, {5, 7, 130, 65}};
  const auto trace = [&](int32_t threads, int32_t when) {
    ga_config with = config();
    with.num_threads = threads;
    Context ctx(with);
    ctx.group(optimizer(GA_OPTIMIZER_ADAM));
    std::vector<Tensor> p, g;
    p.reserve(10);
    for (const Shape& shape : all) {
      p.push_back(random_tensor(GA_F32, ref::count_of(shape), 1));
      g.push_back(random_tensor(GA_F32, ref::count_of(shape), 2));
      add(ctx, 0, p.back(), shape);
    }
    ga_clip c = agc();
    c.when = when;
    EXPECT_OK(ga_context_set_clip(ctx, &c));
    std::vector<double> result;
    for (int t = 0; t < 2; ++t) {
      std::vector<const Tensor*> list;
      for (const Tensor& each : g) list.push_back(&each);
      accumulate(ctx, list, 0.7);
      accumulate(ctx, list, 1.9);
      const ga_step_result r = step(ctx);
      result.push_back(r.norm);
      result.push_back(r.clip_factor);
    }
    for (const Tensor& each : p) {
      const std::vector<double> of = values(each);
      result.insert(result.end(), of.begin(), of.end());
    }
    return result;
  };
  for (const int32_t when : {GA_CLIP_WHEN_STEP, GA_CLIP_WHEN_MICRO}) {
    const std::vector<double> one = trace(1, when);
    EXPECT_TRUE(trace(3, when) == one);
    on_every_isa([&] { EXPECT_TRUE(trace(2, when) == one); });
  }
}

// ---- Micro-batch by micro-batch -----------------------------------------------------------------

// Two parameters and micro-batches of unequal weight. The expected gradient clips each micro-batch
// in float64, then averages.
struct MicroCase {
  std::string name;
  ga_clip clip;
};

std::vector<MicroCase> micro_cases() {
  return {{"Agc", in_micro(agc())},
          {"AgcTorch", in_micro(agc(GA_AGC_TORCH, 0.1))},
          {"AgcByValue", in_micro(agc(GA_AGC_TF, 0.01, 1e-3, 0.5))},
          {"Global", in_micro(clip(GA_CLIP_GLOBAL, 1))},
          {"GlobalKeras", in_micro(clip(GA_CLIP_GLOBAL, 1, GA_FLAVOR_KERAS))},
          {"GlobalToZero", in_micro(clip(GA_CLIP_GLOBAL, 0))},
          {"PerTensor", in_micro(clip(GA_CLIP_PER_TENSOR, 0.5))},
          {"ByValue", in_micro(clip(GA_CLIP_NONE, 0, GA_FLAVOR_TORCH, 0.01))},
          {"ByValueThenGlobal", in_micro(clip(GA_CLIP_GLOBAL, 1, GA_FLAVOR_TORCH, 0.5))}};
}

class Micro : public testing::TestWithParam<MicroCase> {};
INSTANTIATE_TEST_SUITE_P(Clip, Micro, testing::ValuesIn(micro_cases()),
                         [](const auto& info) { return info.param.name; });

// Clips the gradient of one micro-batch.
void clip_micro(const ga_clip& c, const std::vector<const Tensor*>& p,
                const std::vector<Shape>& shape, std::vector<std::vector<double>>& g) {
  if (c.scope == GA_CLIP_AGC) {
    for (size_t i = 0; i < p.size(); ++i) {
      g[i] = clipped(*p[i], g[i], shape[i], axes_of(c.agc_units, shape[i]), c);
    }
    return;
  }
  for (auto& tensor : g) {
    for (double& x : tensor) x = std::clamp(x, -c.max_value, c.max_value);
  }
  if (c.scope == GA_CLIP_NONE) return;
  for (size_t first = 0; first < g.size(); ++first) {
    const size_t last = c.scope == GA_CLIP_GLOBAL ? g.size() : first + 1;
    double squares = 0;
    for (size_t i = first; i < last; ++i) {
      for (const double x : g[i]) squares += x * x;
    }
    const double factor = ref::clip_factor(c.flavor, std::sqrt(squares), c.max_norm);
    for (size_t i = first; i < last; ++i) {
      for (double& x : g[i]) x *= factor;
    }
    if (c.scope == GA_CLIP_GLOBAL) break;
  }
}

TEST_P(Micro, ClipsThenAverages) {
  const ga_clip& c = GetParam().clip;
  const std::vector<Shape> shape = {{20, 30}, {65541}, {3, 3, 4, 5}};
  const double weights[] = {3, 1, 4}, loss_scale = 64;
  for (const bool by_part : {false, true}) {
    for (const int32_t life : {GA_GRADIENTS_CONSUMED, GA_GRADIENTS_LIVE}) {
      ga_config with = config();
      with.gradient_life = life;
      with.loss_scale = loss_scale;
      std::vector<Tensor> p, g;
      std::vector<const Tensor*> at;
      p.reserve(3);
      g.reserve(100);
      Context ctx(with);
      ctx.group(optimizer(GA_OPTIMIZER_EXTERNAL));
      for (const Shape& each : shape) {
        p.push_back(agc_parameter(GA_F32, each, 1, 7));
        add(ctx, 0, p.back(), each);
        at.push_back(&p.back());
      }
      EXPECT_OK(ga_context_set_clip(ctx, &c));
      for (int t = 0; t < 2; ++t) {
        std::vector<std::vector<double>> sum(3), magnitude(3);
        for (size_t k = 0; k < 3; ++k) {
          std::vector<std::vector<double>> micro(3);
          std::vector<const Tensor*> list;
          for (size_t i = 0; i < 3; ++i) {
            Tensor from = agc_gradient(GA_F32, shape[i], 1, 10 * k + i + 1);
            for (int64_t j = 0; j < from.count(); ++j) from.set(j, loss_scale * from.get(j));
            g.push_back(from);
            list.push_back(&g.back());
            micro[i] = values(from);
            for (double& x : micro[i]) x /= loss_scale;
          }
          if (by_part) {
            EXPECT_OK(ga_micro_begin(ctx, static_cast<int64_t>(k), weights[k], nullptr));
            for (const ga_param i : {2, 0, 1}) {
              EXPECT_OK(ga_accumulate_part(ctx, i, list[static_cast<size_t>(i)]->data()));
            }
            EXPECT_OK(ga_micro_end(ctx));
          } else {
            accumulate(ctx, list, weights[k]);
          }
          clip_micro(c, at, shape, micro);
          for (size_t i = 0; i < 3; ++i) {
            sum[i].resize(micro[i].size());
            magnitude[i].resize(micro[i].size());
            for (size_t j = 0; j < micro[i].size(); ++j) {
              sum[i][j] += weights[k] * micro[i][j] / 8;
              magnitude[i][j] += weights[k] * std::abs(micro[i][j]) / 8;
            }
          }
        }
        const ga_step_result r = step(ctx);
        EXPECT_EQ(r.outcome, GA_STEP_APPLIED);
        double squares = 0;
        for (size_t i = 0; i < 3; ++i) {
          const auto got = external_gradient(ctx, static_cast<ga_param>(i), p[i].count());
          for (size_t j = 0; j < got.size(); ++j) {
            // Each contribution rounds unscaling, clipping and weighting, a factor and a product
            // each, and the sum; then comes the mean.
            ASSERT_NEAR(got[j], sum[i][j], 12 * 0x1p-24 * magnitude[i][j] + 0x1p-140)
                << "parameter " << i << "[" << j << "], by part " << by_part;
            squares += got[j] * got[j];
          }
        }
        EXPECT_NEAR(r.norm, std::sqrt(squares), 2 * ref::kUsualNorm * std::sqrt(squares))
            << "not the norm of the mean of the clipped gradients";
      }
    }
  }
}

// A gradient that is a sum is clipped as it is, without dividing by the weight first.
TEST(ClipMicro, SumsAndReductions) {
  for (const int32_t reduce : {GA_REDUCE_MEAN, GA_REDUCE_SUM}) {
    ga_config with = config();
    with.gradient_kind = GA_GRADIENT_SUM;
    with.reduce = reduce;
    with.loss_scale = 2;
    Tensor p(GA_F32, 2), g(GA_F32, 2), h(GA_F32, 2);
    g.set(0, 6), g.set(1, 8);  // of norm 5 after unscaling
    h.set(0, 0.5), h.set(1, 0);
    Context ctx(with);
    ctx.group(plain_sgd());
    add(ctx, 0, p);
    const ga_clip c = in_micro(clip(GA_CLIP_GLOBAL, 1, GA_FLAVOR_KERAS));
    EXPECT_OK(ga_context_set_clip(ctx, &c));
    accumulate(ctx, {&g}, 3);
    accumulate(ctx, {&h}, 1);
    step(ctx);
    const double divisor = reduce == GA_REDUCE_MEAN ? 4 : 1;
    EXPECT_NEAR(p.get(0), -(0.6 + 0.25) / divisor, 1e-6);
    EXPECT_NEAR(p.get(1), -0.8 / divisor, 1e-6);
  }
}

// The sum of clipped micro-batches may exceed the limit and is not clipped again.
TEST(ClipMicro, TheSumIsNotClippedAgain) {
  for (const ga_clip& c :
       {clip(GA_CLIP_NONE, 0, GA_FLAVOR_TORCH, 0.5), clip(GA_CLIP_GLOBAL, 0.5, GA_FLAVOR_KERAS),
        clip(GA_CLIP_PER_TENSOR, 0.5, GA_FLAVOR_KERAS)}) {
    ga_config with = config();
    with.reduce = GA_REDUCE_SUM;
    Tensor p(GA_F32, 1), g(GA_F32, 1, 2);
    Context ctx(with);
    ctx.group(plain_sgd());
    add(ctx, 0, p);
    const ga_clip micro = in_micro(c);
    EXPECT_OK(ga_context_set_clip(ctx, &micro));
    for (int k = 0; k < 3; ++k) accumulate(ctx, {&g});
    EXPECT_EQ(step(ctx).norm, 1.5);
    EXPECT_EQ(p.get(0), -1.5);
  }
}

// Groups with clippings of their own: one per micro-batch, one in the step, one without.
TEST(ClipMicro, ByGroup) {
  float p[3] = {0, 0, 0};
  const float g[2] = {3, -1};
  Context ctx;
  for (int i = 0; i < 3; ++i) ctx.param(ctx.group(plain_sgd()), std::to_string(i), &p[i], 1);
  const ga_clip micro = in_micro(clip(GA_CLIP_GLOBAL, 2, GA_FLAVOR_KERAS)),
                whole = clip(GA_CLIP_GLOBAL, 0.5, GA_FLAVOR_KERAS), none = clip(GA_CLIP_NONE, 0);
  EXPECT_OK(ga_context_set_clip(ctx, &none));
  EXPECT_OK(ga_group_set_clip(ctx, 0, &micro));
  EXPECT_OK(ga_group_set_clip(ctx, 1, &whole));
  for (const float& each : g) ctx.accumulate({&each, &each, &each});
  step(ctx);
  EXPECT_NEAR(p[0], -(2 - 1) / 2.0, 1e-6);
  EXPECT_NEAR(p[1], -0.5, 1e-6);
  EXPECT_NEAR(p[2], -1, 1e-6);
}

// The shared norm leaves out groups with a clipping of their own, which have a norm of their own.
// All numbers are exact in f32.
TEST(ClipMicro, OneNormForThoseThatShareItAndOneForEachOther) {
  for (const int32_t policy : {GA_NONFINITE_SKIP_STEP, GA_NONFINITE_DROP_MICRO}) {
    ga_config with = config();
    with.nonfinite = policy;
    Context ctx(with);
    for (int i = 0; i < 3; ++i) ctx.group(plain_sgd());
    // Group 1 has two parameters and a norm of its own; 0 and 2 share the context's.
    const ga_group group[] = {0, 1, 1, 2};
    const float g[] = {6, 5, 12, 8}, small[] = {1.5f, 1.25f, 3, 2};
    float p[] = {0, 0, 0, 0};
    for (size_t i = 0; i < 4; ++i) ctx.param(group[i], std::to_string(i), &p[i], 1);
    const ga_clip shared = in_micro(clip(GA_CLIP_GLOBAL, 5, GA_FLAVOR_KERAS)),
                  own = in_micro(clip(GA_CLIP_GLOBAL, 3.25, GA_FLAVOR_KERAS));
    EXPECT_OK(ga_context_set_clip(ctx, &shared));
    EXPECT_OK(ga_group_set_clip(ctx, 1, &own));
    ctx.accumulate({&g[0], &g[1], &g[2], &g[3]}, 1);                  // norms 10 and 13
    ctx.accumulate({&small[0], &small[1], &small[2], &small[3]}, 3);  // 2.5 and 3.25
    EXPECT_EQ(step(ctx).outcome, GA_STEP_APPLIED);
    EXPECT_EQ(p[0], -(6 / 2.0 + 3 * 1.5) / 4);
    EXPECT_EQ(p[1], -(5 / 4.0 + 3 * 1.25) / 4);
    EXPECT_EQ(p[2], -(12 / 4.0 + 3 * 3) / 4);
    EXPECT_EQ(p[3], -(8 / 2.0 + 3 * 2) / 4);
  }
}

// (6, 8) is clipped to (3, 4) and (0, 1) stays; all are exact in every dtype.
TEST(ClipMicro, EveryDtypeAndMode) {
  const std::pair<int32_t, int32_t> dtypes[] = {{GA_F32, GA_F32},  {GA_F16, GA_F32},
                                                {GA_BF16, GA_F32}, {GA_BF16, GA_BF16},
                                                {GA_F16, GA_F16},  {GA_F64, GA_F64}};
  for (const auto& [dtype, accumulator] : dtypes) {
    for (const int32_t mode : {GA_ACCUMULATE_PLAIN, GA_ACCUMULATE_RUNNING_MEAN,
                               GA_ACCUMULATE_COMPENSATED, GA_ACCUMULATE_STOCHASTIC}) {
      for (const int32_t life : {GA_GRADIENTS_CONSUMED, GA_GRADIENTS_LIVE}) {
        SCOPED_TRACE(std::string(format(dtype).name) + " mode " + std::to_string(mode));
        ga_config with = config();
        with.accumulation = mode;
        with.gradient_life = life;
        with.loss_scale = 4;
        Tensor p(dtype == GA_F64 ? GA_F64 : GA_F32, 2), g(dtype, 2), h(dtype, 2);
        g.set(0, 24), g.set(1, 32);
        h.set(0, 0), h.set(1, 4);
        Context ctx(with);
        ctx.group(plain_sgd());
        add(ctx, 0, p, {}, options(dtype, accumulator));
        const ga_clip c = in_micro(clip(GA_CLIP_GLOBAL, 5, GA_FLAVOR_KERAS));
        EXPECT_OK(ga_context_set_clip(ctx, &c));
        accumulate(ctx, {&g}, 2);
        accumulate(ctx, {&h}, 2);
        step(ctx);
        EXPECT_EQ(p.get(0), -1.5);
        EXPECT_EQ(p.get(1), -2.5);
      }
    }
  }
}

TEST(ClipMicro, WithOtherPolicies) {
  // A dropped micro-batch has no norm to clip by; the others are clipped as usual.
  ga_config with = config();
  with.nonfinite = GA_NONFINITE_DROP_MICRO;
  Tensor p(GA_F32, 2), g(GA_F32, 2, 3), bad(GA_F32, 2, NAN);
  Context ctx(with);
  ctx.group(plain_sgd());
  add(ctx, 0, p);
  const ga_clip c = in_micro(clip(GA_CLIP_PER_TENSOR, 1, GA_FLAVOR_KERAS));
  EXPECT_OK(ga_context_set_clip(ctx, &c));
  accumulate(ctx, {&g}, 2);
  accumulate(ctx, {&bad}, 2);
  const ga_step_result r = step(ctx);
  EXPECT_EQ(r.window_dropped, 1);
  EXPECT_NEAR(p.get(0), -1 / std::sqrt(2.0), 1e-6);
}

TEST(Clip, IsReadBack) {
  Tensor p(GA_F32, 4);
  Context ctx;
  ctx.group(plain_sgd());
  ctx.group(plain_sgd());
  const auto equal = [](const ga_clip& a, const ga_clip& b) {
    return memcmp(&a, &b, sizeof a) == 0;
  };
  const auto whole = [&] {
    ga_clip got = {};
    got.struct_size = sizeof got;
    EXPECT_OK(ga_context_clip(ctx, &got));
    return got;
  };
  const auto of = [&](ga_group group) {
    ga_clip got = {};
    got.struct_size = sizeof got;
    EXPECT_OK(ga_group_clip(ctx, group, &got));
    return got;
  };
  ga_clip none;
  EXPECT_OK(ga_clip_init(&none, sizeof none));
  EXPECT_TRUE(equal(whole(), none));
  EXPECT_TRUE(equal(of(1), none));

  ga_clip common = none, own = none;
  common.scope = GA_CLIP_GLOBAL;
  common.max_norm = 3;
  own.scope = GA_CLIP_AGC;
  own.when = GA_CLIP_WHEN_MICRO;
  own.agc_units = GA_AGC_TORCH;
  EXPECT_OK(ga_context_set_clip(ctx, &common));
  EXPECT_OK(ga_group_set_clip(ctx, 1, &own));
  EXPECT_TRUE(equal(whole(), common));
  EXPECT_TRUE(equal(of(0), common));
  EXPECT_TRUE(equal(of(1), own));
  EXPECT_OK(ga_group_set_clip(ctx, 1, nullptr));
  EXPECT_TRUE(equal(of(1), common));
  EXPECT_OK(ga_context_set_clip(ctx, nullptr));
  EXPECT_TRUE(equal(whole(), none));

  ga_clip got = own;
  EXPECT_TRUE(refused(ga_context_clip(ctx, nullptr), GA_ERROR_INVALID_ARGUMENT, {"ga_clip"}));
  EXPECT_TRUE(refused(ga_group_clip(ctx, 0, nullptr), GA_ERROR_INVALID_ARGUMENT, {"ga_clip"}));
  EXPECT_TRUE(refused(ga_group_clip(ctx, 2, &got), GA_ERROR_INVALID_ARGUMENT, {"2"}));
  EXPECT_TRUE(equal(got, own)) << "written by a call that failed";
  EXPECT_EQ(ga_context_clip(nullptr, &got), GA_ERROR_INVALID_ARGUMENT);
  EXPECT_EQ(ga_group_clip(nullptr, 0, &got), GA_ERROR_INVALID_ARGUMENT);
}

TEST(ClipMicro, IsSetWhileTheWindowIsEmpty) {
  Tensor p(GA_F32, 4), g(GA_F32, 4, 1);
  Context ctx;
  ctx.group(plain_sgd());
  add(ctx, 0, p);
  const ga_clip micro = in_micro(clip(GA_CLIP_GLOBAL, 1)), whole = clip(GA_CLIP_GLOBAL, 1);
  accumulate(ctx, {&g});
  EXPECT_EQ(ga_context_set_clip(ctx, &micro), GA_ERROR_INVALID_STATE);
  EXPECT_EQ(ga_group_set_clip(ctx, 0, &micro), GA_ERROR_INVALID_STATE);
  EXPECT_OK(ga_context_set_clip(ctx, &whole));
  EXPECT_NEAR(step(ctx).clip_factor, 0.5, 1e-6);
  EXPECT_OK(ga_context_set_clip(ctx, &micro));
  accumulate(ctx, {&g});
  EXPECT_EQ(ga_context_set_clip(ctx, &whole), GA_ERROR_INVALID_STATE);
  EXPECT_EQ(ga_context_set_clip(ctx, nullptr), GA_ERROR_INVALID_STATE);
  EXPECT_OK(ga_discard(ctx));
  EXPECT_OK(ga_context_set_clip(ctx, nullptr));
  EXPECT_OK(ga_group_set_clip(ctx, 0, &micro));
  accumulate(ctx, {&g});
  EXPECT_EQ(ga_group_set_clip(ctx, 0, nullptr), GA_ERROR_INVALID_STATE);
  step(ctx);
  EXPECT_OK(ga_group_set_clip(ctx, 0, nullptr));
}

TEST(ClipMicro, OtherWaysToContributeAreRefused) {
  Tensor p(GA_F32, 16), table(GA_F32, 16), g(GA_F32, 16, 1);
  Context ctx;
  ctx.group(plain_sgd());
  add(ctx, 0, p, {4, 4});
  ga_param_options o = options();
  o.rows = GA_ROWS_DENSE;
  add(ctx, 0, table, {4, 4}, o);
  const ga_clip c = in_micro(clip(GA_CLIP_NONE, 0, GA_FLAVOR_TORCH, 0.5));
  EXPECT_OK(ga_context_set_clip(ctx, &c));
  EXPECT_OK(ga_micro_begin(ctx, 0, 1, nullptr));
  EXPECT_OK(ga_accumulate_part(ctx, 0, g.data()));
  const ga_window_info before = window(ctx);
  const ga_status unsupported = GA_ERROR_UNSUPPORTED;
  EXPECT_TRUE(refused(ga_accumulate_part(ctx, 0, g.data()), unsupported, {"GA_CLIP_WHEN_MICRO"}));
  ga_accumulator out;
  out.struct_size = sizeof out;
  EXPECT_TRUE(refused(ga_accumulator_acquire(ctx, 1, &out), unsupported, {"GA_CLIP_WHEN_MICRO"}));
  EXPECT_TRUE(refused(ga_accumulate_matmul(ctx, 1, 4, g.data(), 4, GA_NO_TRANSPOSE, g.data(), 4,
                                           GA_NO_TRANSPOSE, GA_F32),
                      unsupported, {"GA_CLIP_WHEN_MICRO"}));
  const int32_t row = 0;
  EXPECT_TRUE(refused(ga_accumulate_rows(ctx, 1, &row, GA_I32, 1, g.data()), unsupported,
                      {"GA_CLIP_WHEN_MICRO"}));
  EXPECT_TRUE(same_window(window(ctx), before));
  EXPECT_OK(ga_micro_end(ctx));
  EXPECT_TRUE(refused(ga_micro_begin(ctx, 0, 1, nullptr), unsupported, {"GA_CLIP_WHEN_MICRO"}));
  step(ctx);
  EXPECT_EQ(p.get(15), -0.5);
  EXPECT_EQ(table.get(0), 0);
}

// ---- Wrong numbers ------------------------------------------------------------------------------

TEST(Agc, WrongNumbersChangeNothing) {
  struct Bad {
    std::function<void(ga_clip&)> change;
    std::vector<std::string> words;
  };
  using C = ga_clip&;
  const std::vector<Bad> list = {{[](C c) { c.agc_factor = 0; }, {"agc_factor", "0"}},
                                 {[](C c) { c.agc_factor = -1; }, {"agc_factor", "-1"}},
                                 {[](C c) { c.agc_factor = NAN; }, {"agc_factor", "nan"}},
                                 {[](C c) { c.agc_eps = 0; }, {"agc_eps", "0"}},
                                 {[](C c) { c.agc_eps = -1e-3; }, {"agc_eps", "-0.001"}},
                                 {[](C c) { c.agc_eps = NAN; }, {"agc_eps", "nan"}},
                                 {[](C c) { c.agc_units = 3; }, {"agc_units", "3"}},
                                 {[](C c) { c.agc_units = -1; }, {"agc_units", "-1"}},
                                 {[](C c) { c.when = 2; }, {"when", "2"}},
                                 {[](C c) { c.when = -1; }, {"when", "-1"}}};
  float p = 1;
  const float g = 1;
  Context ctx;
  ctx.group(plain_sgd());
  ctx.param(0, "p", &p, 1);
  const ga_clip good = agc(GA_AGC_TF, 0.5);
  ASSERT_OK(ga_context_set_clip(ctx, &good));
  for (const Bad& bad : list) {
    ga_clip c = agc();
    bad.change(c);
    EXPECT_TRUE(refused(ga_context_set_clip(ctx, &c), GA_ERROR_INVALID_ARGUMENT, bad.words));
    EXPECT_TRUE(refused(ga_group_set_clip(ctx, 0, &c), GA_ERROR_INVALID_ARGUMENT, bad.words));
    p = 1;
    ctx.accumulate({&g});
    EXPECT_NEAR(step(ctx).clip_factor, 0.5, 1e-6);
  }
}

TEST(Agc, Defaults) {
  ga_clip c;
  memset(&c, 0xee, sizeof c);
  ASSERT_OK(ga_clip_init(&c, sizeof c));
  EXPECT_EQ(c.agc_factor, 0.01);
  EXPECT_EQ(c.agc_eps, 1e-3);
  EXPECT_EQ(c.agc_units, GA_AGC_TF);
  EXPECT_EQ(c.when, GA_CLIP_WHEN_STEP);
}

TEST(Agc, AxesOutsideTheRankAreRefused) {
  Tensor p(GA_F32, 24);
  Context ctx;
  ctx.group(plain_sgd());
  const std::pair<Shape, uint32_t> list[] = {{{}, 1},       {{24}, 2},        {{4, 6}, 4},
                                             {{4, 6}, 5},   {{2, 3, 4}, 8},   {{2, 3, 4}, 1u << 31},
                                             {{4, 6}, ~0u}, {{2, 3, 4}, 0x80}};
  for (const auto& [shape, axes] : list) {
    ga_param_options o = options();
    o.agc_axes = axes;
    ga_param id = -7;
    EXPECT_TRUE(refused(try_add(ctx, 0, "conv", p.data(), GA_F32, shape, o, &id),
                        GA_ERROR_INVALID_ARGUMENT, {"\"conv\"", "agc_axes"}))
        << testing::PrintToString(shape) << " " << axes;
    EXPECT_EQ(id, -7);
  }
  ga_param_options o = options();
  o.agc_axes = 3;
  EXPECT_OK(try_add(ctx, 0, "conv", p.data(), GA_F32, {4, 6}, o));
}

// The released NFNets code has no rule for rank 5.
TEST(Agc, NfnetsOfRankFiveIsRefused) {
  const Shape shape = {2, 3, 2, 2, 2};
  Tensor p(GA_F32, 48), q(GA_F32, 48), vector(GA_F32, 48);
  const ga_clip nfnets = agc(GA_AGC_NFNETS), tf = agc(GA_AGC_TF);
  {
    Context ctx;  // the parameter first
    ctx.group(plain_sgd());
    EXPECT_OK(try_add(ctx, 0, "conv3d", p.data(), GA_F32, shape, options()));
    EXPECT_TRUE(refused(ga_context_set_clip(ctx, &nfnets), GA_ERROR_UNSUPPORTED, {"\"conv3d\""}));
    EXPECT_TRUE(refused(ga_group_set_clip(ctx, 0, &nfnets), GA_ERROR_UNSUPPORTED, {"\"conv3d\""}));
    EXPECT_OK(ga_context_set_clip(ctx, &tf));
    const ga_clip none = clip(GA_CLIP_NONE, 0);
    EXPECT_OK(ga_group_set_clip(ctx, 0, &none));
    EXPECT_OK(ga_context_set_clip(ctx, &nfnets)) << "its group has another clipping";
  }
  {
    Context ctx;  // a parameter without elements, whose arrays exist
    ctx.group(plain_sgd());
    EXPECT_OK(try_add(ctx, 0, "empty", nullptr, GA_F32, {2, 0, 2, 2, 2}, options()));
    EXPECT_OK(ga_prepare(ctx));
    EXPECT_TRUE(refused(ga_context_set_clip(ctx, &nfnets), GA_ERROR_UNSUPPORTED, {"\"empty\""}));
  }
  {
    Context ctx;  // the clipping first
    ctx.group(plain_sgd());
    EXPECT_OK(ga_context_set_clip(ctx, &nfnets));
    EXPECT_TRUE(refused(try_add(ctx, 0, "conv3d", p.data(), GA_F32, shape, options()),
                        GA_ERROR_UNSUPPORTED, {"\"conv3d\""}));
    ga_param_options o = options();
    o.agc_axes = 0xf;
    EXPECT_OK(try_add(ctx, 0, "conv3d", p.data(), GA_F32, shape, o));
  }
}

// Groups are independent: one with AGC, one whose steps take two passes and one of neither kind
// give the same parameters together, in any order, as each does alone.
TEST(Agc, BesideOtherGroups) {
  const Shape shape = {24, 40};
  const int64_t n = ref::count_of(shape);
  constexpr int kGroups = 4, kWindows = 3;
  const auto add = [&](Context& ctx, int which, Tensor& p) {
    ga_optimizer o = optimizer(which == 1   ? GA_OPTIMIZER_LAMB
                               : which == 2 ? GA_OPTIMIZER_LION
                               : which == 3 ? GA_OPTIMIZER_LARS
                                            : GA_OPTIMIZER_ADAMW);
    o.lr = 0.01;
    o.max_grad_norm = 0;
    const ga_group group = ctx.group(o);
    const ga_clip own = which == 0 || which == 3 ? agc() : clip(GA_CLIP_NONE, 0);
    EXPECT_OK(ga_group_set_clip(ctx, group, &own));
    EXPECT_OK(try_add(ctx, group, ("p" + std::to_string(which)).c_str(), p.data(), GA_F32, shape,
                      options()));
  };
  const auto gradient = [&](int which, int window) {
    return random_tensor(GA_F32, n, static_cast<uint64_t>(100 + 10 * which + window));
  };
  const auto start = [&](int which) {
    return random_tensor(GA_F32, n, static_cast<uint64_t>(which + 1));
  };
  std::vector<Tensor> alone;
  for (int which = 0; which < kGroups; ++which) {
    Tensor p = start(which);
    Context ctx;
    add(ctx, which, p);
    for (int w = 0; w < kWindows; ++w) {
      const Tensor g = gradient(which, w);
      ctx.accumulate({g.data()});
      EXPECT_EQ(step(ctx).outcome, GA_STEP_APPLIED);
    }
    alone.push_back(p);
  }
  std::vector<int> order = {0, 1, 2, 3};
  do {
    std::vector<Tensor> together;
    for (const int which : order) together.push_back(start(which));
    Context ctx;
    for (size_t k = 0; k < order.size(); ++k) add(ctx, order[k], together[k]);
    for (int w = 0; w < kWindows; ++w) {
      std::vector<Tensor> gradients;
      for (const int which : order) gradients.push_back(gradient(which, w));
      std::vector<const void*> pointers;
      for (const Tensor& g : gradients) pointers.push_back(g.data());
      ctx.accumulate(pointers);
      EXPECT_EQ(step(ctx).outcome, GA_STEP_APPLIED);
    }
    for (size_t k = 0; k < order.size(); ++k) {
      const auto which = static_cast<size_t>(order[k]);
      EXPECT_EQ(0, memcmp(together[k].data(), alone[which].data(),
                          static_cast<size_t>(n) * sizeof(float)))
          << "group " << which << " at place " << k << " of " << testing::PrintToString(order);
    }
  } while (std::next_permutation(order.begin(), order.end()));
}

}  // namespace
}  // namespace ga::test
