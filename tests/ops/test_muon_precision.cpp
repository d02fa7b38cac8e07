// SPDX-License-Identifier: Apache-2.0
//
// Muon with products whose factors are rounded: ns_precision. One step from zero with learning rate 1
// and without decay gives -O, where O is the gradient made orthogonal; a step is compared with float64,
// and with float64 in which the factors are rounded as the library says.
#include <cmath>
#include <utility>

#include "small_run.hpp"
#include "support.hpp"

namespace ga::test {
namespace {

using ref::combine;
using ref::Matrix;

double distance(const Matrix& a, const Matrix& b) { return combine(1, a, -1, b).frobenius(); }

// To the nearest number of so many significant bits, ties to even; 0: as it is.
Matrix rounded(Matrix a, int bits) {
  if (bits == 0) return a;
  for (double& x : a.data) {
    int exponent = 0;
    const double fraction = std::frexp(x, &exponent);
    x = std::ldexp(std::nearbyint(std::ldexp(fraction, bits)), exponent - bits);
  }
  return a;
}

// Newton-Schulz in float64; the factors of products have so many bits. With bf16, both terms of the
// polynomial have the rounded G.
Matrix orthogonalized(const Matrix& gradient, const ga_optimizer& o, int bits) {
  if (gradient.rows > gradient.columns)
    return ref::transpose(orthogonalized(ref::transpose(gradient), o, bits));
  const double size = std::max(gradient.frobenius(), o.eps);
  Matrix x = combine(1 / size, gradient, 0, gradient);
  for (int step = 0; step < o.ns_steps; ++step) {
    const Matrix factor = rounded(x, bits);
    const Matrix gram = factor * ref::transpose(factor);
    const Matrix small = rounded(gram, bits);
    const Matrix poly = combine(o.ns_coefficients[1], bits == 8 ? small : gram,
                                o.ns_coefficients[2], small * small);
    x = combine(o.ns_coefficients[0], x, 1, rounded(poly, bits) * factor);
  }
  return x;
}

ga_optimizer muon_of(ga_precision precision) {
  ga_optimizer o = optimizer(GA_OPTIMIZER_MUON);
  o.lr = 1;
  o.weight_decay = 0;
  o.adjust_lr = GA_ADJUST_NONE;
  o.ns_precision = precision;
  return o;
}

// Uniform numbers, or such numbers beside a matrix of rank 1 that is a hundred times as large, as
// gradients often are.
Block gradient_of(size_t rows, size_t columns, bool low_rank, uint64_t seed) {
  Block g(rows * columns), left(rows), right(columns);
  Random random(seed);
  for (Block* part : {&g, &left, &right})
    for (float& x : *part) x = static_cast<float>(random.signed_unit());
  if (low_rank)
    for (size_t i = 0; i < g.size(); ++i)
      g[i] = 0.01f * g[i] + left[i / columns] * right[i % columns];
  return g;
}

Matrix exact(const Block& g, size_t rows, size_t columns) {
  Matrix result(rows, columns);
  for (size_t i = 0; i < g.size(); ++i) result.data[i] = double{g[i]};
  return result;
}

// What one step per gradient takes from parameters that are 0.
Block moved(const ga_optimizer& o, size_t rows, size_t columns,
            const std::vector<Block>& gradients) {
  Block p(rows * columns);
  Context ctx;
  ctx.param(ctx.group(o), "p", p.data(),
            {static_cast<int64_t>(rows), static_cast<int64_t>(columns)});
  for (const Block& g : gradients) {
    ctx.accumulate({g.data()});
    step(ctx);
  }
  for (float& x : p) x = -x;
  return p;
}

constexpr const char* kNames[] = {"F32", "TF32", "BF16"};

class MuonPrecision : public testing::TestWithParam<ga_precision> {
 protected:
  void SetUp() override {
    if (!has_onednn()) GTEST_SKIP() << "this build has no oneDNN";
    Context ctx;
    const ga_optimizer o = muon_of(GetParam());
    if (const ga_status status = ga_group_add(ctx, &o, nullptr); status == GA_ERROR_UNSUPPORTED)
      GTEST_SKIP() << ga_last_error();
  }

  int bits() const {
    return GetParam() == GA_PRECISION_BF16 ? 8 : GetParam() == GA_PRECISION_TF32 ? 11 : 0;
  }
};

INSTANTIATE_TEST_SUITE_P(All, MuonPrecision,
                         testing::Values(GA_PRECISION_F32, GA_PRECISION_TF32, GA_PRECISION_BF16),
                         [](const testing::TestParamInfo<ga_precision>& info) {
                           return std::string(kNames[info.param]);
                         });

constexpr size_t kShapes[][2] = {{64, 48}, {48, 64}, {33, 70}, {70, 33}, {128, 128},
                                 {5, 300}, {1, 9},   {9, 1},   {1, 1},   {270, 280}};

// The Frobenius norm of what rounding changes, relative to that of the result, is at most what
// docs/reference.md states. Beside float64 that rounds the same factors, only the errors of f32 are
// left, and single numbers that lie so close to the middle of two others that they are rounded to the
// other one. How a GPU rounds to TF32 is not specified: the test only sees that it does.
TEST_P(MuonPrecision, HasTheStatedError) {
  const ga_precision precision = GetParam();
  const double stated[] = {5e-5, 2e-2, 5e-2};
  for (const auto& [rows, columns] : kShapes)
    for (const bool low_rank : {false, true}) {
      const Block g = gradient_of(rows, columns, low_rank, 7);
      for (const int32_t steps : {1, 2, 5}) {
        if (steps > 1 && rows > 256) continue;  // which takes float64 long
        SCOPED_TRACE(testing::Message() << rows << " x " << columns << ", " << steps << " steps"
                                        << (low_rank ? ", of low rank" : ""));
        ga_optimizer o = muon_of(precision);
        o.ns_steps = steps;
        const Matrix got = exact(moved(o, rows, columns, {g}), rows, columns);
        const Matrix want = orthogonalized(exact(g, rows, columns), o, 0);
        const Matrix same = orthogonalized(exact(g, rows, columns), o, bits());
        const double error = distance(got, want) / want.frobenius();
        const double beside = distance(got, same) / want.frobenius();
        EXPECT_LE(error, stated[precision]);
        if (precision == GA_PRECISION_TF32) {
          EXPECT_TRUE(error > 1e-6 || rows < 64) << error;
        } else {
          const bool sharp = steps == 1 && !low_rank;
          const double limit = sharp ? 1e-6 : precision == GA_PRECISION_F32 ? 2e-6 : 1e-3;
          EXPECT_TRUE(steps > 2 || beside < limit) << beside;
        }
      }
    }
}

// A window of micro-batches, whose sums are exact here, is one batch.
TEST_P(MuonPrecision, WindowIsOneBatch) {
  const size_t rows = 40, columns = 56;
  std::vector<Block> micros;
  Block whole(rows * columns);
  for (uint64_t k = 0; k < 4; ++k) {
    micros.push_back(gradient_of(rows, columns, false, k));
    for (size_t i = 0; i < whole.size(); ++i) {
      float& x = micros.back()[i];
      x = std::ldexp(std::round(std::ldexp(x, 8)), -8);
      whole[i] += x / 4;
    }
  }
  const ga_optimizer o = muon_of(GetParam());
  Block p(rows * columns);
  Context ctx;
  ctx.param(ctx.group(o), "p", p.data(),
            {static_cast<int64_t>(rows), static_cast<int64_t>(columns)});
  for (const Block& g : micros) ctx.accumulate({g.data()});
  step(ctx);
  for (float& x : p) x = -x;
  EXPECT_TRUE(same_bits(p, moved(o, rows, columns, {whole})));
}

// A group may change its precision between windows, and threads change no bits.
TEST_P(MuonPrecision, ChangesBetweenWindows) {
  const size_t rows = 300, columns = 200;
  const Block first = gradient_of(rows, columns, false, 1);
  const Block second = gradient_of(rows, columns, true, 2);
  for (const int32_t steps : {4, 5}) {
    std::vector<Block> results;
    for (const ga_precision before : {ga_precision{GA_PRECISION_F32}, GetParam()}) {
      ga_optimizer o = muon_of(before);
      o.ns_steps = steps;
      Block p(rows * columns);
      Context ctx;
      const ga_group group = ctx.group(o);
      ctx.param(group, "p", p.data(), {static_cast<int64_t>(rows), static_cast<int64_t>(columns)});
      ctx.accumulate({first.data()});
      step(ctx);
      o.ns_precision = GetParam();
      EXPECT_OK(ga_group_set_optimizer(ctx, group, &o));
      std::fill(p.begin(), p.end(), 0.0f);
      ctx.accumulate({second.data()});
      step(ctx);
      results.push_back(p);
    }
    EXPECT_TRUE(same_bits(results[0], results[1]));
  }
}

// What a file does not name is f32, so files of f32 are those of older versions.
TEST_P(MuonPrecision, IsPartOfTheFile) {
  const auto trained = [](ga_precision precision, const Bytes* from) {
    const ga_optimizer o = muon_of(precision);
    Block p(12);
    Context ctx;
    ctx.param(ctx.group(o), "p", p.data(), {3, 4});
    if (from) {
      const ga_status status = load(ctx, *from);
      EXPECT_EQ(status, precision == GA_PRECISION_F32 ? GA_OK : GA_ERROR_INVALID_ARGUMENT);
      const std::string text = status == GA_OK ? "" : ga_last_error();
      EXPECT_TRUE(status == GA_OK || text.find("ns_precision is 0 in the file") != text.npos)
          << text;
      return Bytes();
    }
    ctx.accumulate({gradient_of(3, 4, false, 1).data()});
    step(ctx);
    return saved(ctx);
  };
  const Bytes file = trained(GetParam(), nullptr);
  const bool named =
      std::string(file.begin(), file.end()).find("ns_precision") != std::string::npos;
  EXPECT_EQ(named, GetParam() != GA_PRECISION_F32);
  const Bytes of_f32 = trained(GA_PRECISION_F32, nullptr);
  trained(GetParam(), &of_f32);
}

// Programs that were compiled without the field.
TEST(MuonPrecisionOf, AnOlderStructIsF32) {
  if (!has_onednn()) GTEST_SKIP() << "this build has no oneDNN";
  const Block g = gradient_of(20, 30, false, 3);
  ga_optimizer older = muon_of(GA_PRECISION_F32);
  older.struct_size = offsetof(ga_optimizer, ns_precision);
  older.ns_precision = GA_PRECISION_BF16;
  EXPECT_TRUE(same_bits(moved(older, 20, 30, {g}), moved(muon_of(GA_PRECISION_F32), 20, 30, {g})));
}

}  // namespace
}  // namespace ga::test
