// SPDX-License-Identifier: Apache-2.0
//
// Gradients, accumulators and parameters in f32, f64, f16 and bf16: conversions of every value,
// also in a program that flushes subnormals, and every mix of dtypes over whole windows.
#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

#include <cfloat>
#include <functional>
#include <map>

#include "formats.hpp"

namespace ga::test {
namespace {

constexpr int64_t kAll = 65536;  // number of 16-bit values

Tensor every_value(int32_t dtype) {
  Tensor t(dtype, kAll);
  for (int64_t i = 0; i < kAll; ++i) t.set_bits(i, static_cast<uint16_t>(i));
  return t;
}

ga_config unjudged() {
  ga_config c = config();
  c.nonfinite = GA_NONFINITE_IGNORE;
  c.reduce = GA_REDUCE_SUM;
  return c;
}

ga_optimizer external() { return optimizer(GA_OPTIMIZER_EXTERNAL); }

std::vector<uint32_t> external_bits(ga_context* ctx, int64_t count) {
  const void* data = nullptr;
  int32_t dtype = 0;
  EXPECT_OK(ga_gradient(ctx, 0, &data, &dtype, nullptr));
  EXPECT_EQ(dtype, GA_F32);
  return data ? from_library<uint32_t>(data, count) : std::vector<uint32_t>();
}

float as_float(uint32_t bits) {
  float x;
  memcpy(&x, &bits, sizeof x);
  return x;
}

uint32_t as_bits(float x) {
  uint32_t bits;
  memcpy(&bits, &x, sizeof bits);
  return bits;
}

// ---- Gradients of 16 bits -----------------------------------------------------------------------

enum Way { kFirst, kAdded, kScaled, kLive, kWays };

// Converts all values as gradients of an f32 parameter, by one of the ways into an accumulator.
std::vector<uint32_t> convert(int32_t dtype, Way way, const Tensor& g, const Tensor& zeros) {
  ga_config c = unjudged();
  if (way == kLive) c.gradient_life = GA_GRADIENTS_LIVE;
  Tensor p(GA_F32, kAll);
  Context ctx(c);
  ctx.group(external());
  add(ctx, 0, p, {}, options(dtype));
  if (way == kAdded) accumulate(ctx, {&zeros});
  accumulate(ctx, {&g}, way == kScaled ? 0.5 : 1);
  EXPECT_EQ(step(ctx).outcome, GA_STEP_APPLIED);
  return external_bits(ctx, kAll);
}

class Gradients16 : public testing::TestWithParam<int32_t> {};
INSTANTIATE_TEST_SUITE_P(Dtype, Gradients16, testing::Values(GA_F16, GA_BF16),
                         [](const auto& info) { return format(info.param).name; });

// The numbers at which rounding changes, and their neighbours in f64, on both sides of zero.
TEST_P(Gradients16, EncodingIsThatOfTheDefinition) {
  const int32_t dtype = GetParam();
  const auto same = [=](double x) {
    ASSERT_EQ(encode(x, dtype), encode_by_definition(x, dtype)) << std::hexfloat << x;
    ASSERT_EQ(encode(-x, dtype), encode_by_definition(-x, dtype)) << std::hexfloat << -x;
  };
  for (int bits = 0; std::isfinite(decode(static_cast<uint16_t>(bits), dtype)); ++bits) {
    const double x = decode(static_cast<uint16_t>(bits), dtype);
    const double middle = x + format(dtype).spacing(x) / 2;
    for (const double at : {x, middle})
      for (const double beside : {at, std::nextafter(at, 0), std::nextafter(at, INFINITY)})
        same(beside);
  }
  for (const double x : {1.0 * INFINITY, 1.0 * NAN, 0x1p-1074, 0x1p-1022, 0x1p1023}) same(x);
}

TEST_P(Gradients16, EveryValueIsConverted) {
  const int32_t dtype = GetParam();
  const Tensor g = every_value(dtype), zeros(dtype, kAll);
  const int shift = 24 - format(dtype).precision;  // from a fraction to that of an f32
  for (int way = kFirst; way < kWays; ++way) {
    SCOPED_TRACE(way);
    on_every_isa([&] {
      const std::vector<uint32_t> got = convert(dtype, static_cast<Way>(way), g, zeros);
      int wrong = 0;
      for (int64_t i = 0; i < kAll && wrong < 5; ++i) {
        const auto bits = static_cast<uint16_t>(i);
        const double value = decode(bits, dtype) * (way == kScaled ? 0.5 : 1);
        const uint32_t x = got[static_cast<size_t>(i)];
        bool right;
        if (std::isnan(value)) {
          // A signalling NaN becomes a quiet one; its other bits stay.
          const uint32_t fraction = static_cast<uint32_t>(bits << shift) & 0x7fffff;
          const uint32_t want = (bits & 0x8000u) << 16 | 0x7fc00000 | fraction;
          right = std::isnan(as_float(x)) && (way == kAdded || (x | 0x400000) == want);
        } else if (way == kAdded && value == 0) {
          right = x == 0;  // 0 + -0
        } else {
          right = x == as_bits(static_cast<float>(value));
        }
        if (!right) {
          ++wrong;
          ADD_FAILURE() << std::hex << "0x" << i << " became 0x" << x << ", value " << value;
        }
      }
    });
  }
}

// One value at a time: the finite check finds infinities and NaN, and nothing else.
TEST_P(Gradients16, EveryNonfiniteValueIsFound) {
  const int32_t dtype = GetParam();
  for (const int32_t policy : {GA_NONFINITE_SKIP_STEP, GA_NONFINITE_DROP_MICRO}) {
    ga_config c = config();
    c.nonfinite = policy;
    Tensor p(GA_F32, 1), g(dtype, 1);
    Context ctx(c);
    ctx.group(plain_sgd(0));
    add(ctx, 0, p, {}, options(dtype));
    for (int i = 0; i < kAll; ++i) {
      g.set_bits(0, static_cast<uint16_t>(i));
      const void* list[] = {g.data()};
      ASSERT_OK(ga_accumulate(ctx, list, 1, 1, nullptr));
      ga_step_result r;
      r.struct_size = sizeof r;
      ASSERT_OK(ga_step(ctx, &r));
      const int want = std::isfinite(g.get(0))            ? GA_STEP_APPLIED
                       : policy == GA_NONFINITE_SKIP_STEP ? GA_STEP_SKIPPED_NONFINITE
                                                          : GA_STEP_SKIPPED_EMPTY;
      ASSERT_EQ(r.outcome, want) << std::hex << i;
    }
    EXPECT_EQ(p.get(0), 0);
  }
}

// Every 16-bit number is an f32 number, so whole runs agree bit for bit with runs on f32 gradients.
TEST_P(Gradients16, AsTheSameValuesInF32) {
  const int32_t dtype = GetParam();
  const int64_t sizes[] = {0, 1, 15, 16, 17, 1023, kAll + 3};
  for (const int32_t life : {GA_GRADIENTS_CONSUMED, GA_GRADIENTS_LIVE}) {
    ga_config c = config();
    c.gradient_life = life;
    std::vector<Tensor> narrow_p, wide_p;
    Context narrow(c), wide(c);
    for (Context* ctx : {&narrow, &wide}) ctx->group(optimizer(GA_OPTIMIZER_ADAMW));
    for (const int64_t n : sizes) {
      narrow_p.push_back(random_tensor(GA_F32, n, 1));
      wide_p.push_back(narrow_p.back());
    }
    for (size_t i = 0; i < narrow_p.size(); ++i) {
      add(narrow, 0, narrow_p[i], {}, options(dtype));
      add(wide, 0, wide_p[i]);
    }
    std::vector<Tensor> kept;  // live gradients, until the step
    kept.reserve(1000);
    for (uint64_t t = 0; t < 6; ++t) {
      kept.clear();
      for (uint64_t k = 0; k < 1 + t % 3; ++k) {
        std::vector<const Tensor*> a, b;
        for (const int64_t n : sizes) {
          kept.push_back(random_tensor(dtype, n, 10 * t + k));
          a.push_back(&kept.back());
          kept.emplace_back(GA_F32, n);
          for (int64_t j = 0; j < n; ++j) kept.back().set(j, a.back()->get(j));
          b.push_back(&kept.back());
        }
        const double weight = 1.3 + static_cast<double>(k), scale = 128;
        accumulate(narrow, a, weight, scale);
        accumulate(wide, b, weight, scale);
      }
      EXPECT_EQ(step(narrow).norm, step(wide).norm);
    }
    for (size_t i = 0; i < narrow_p.size(); ++i) {
      EXPECT_TRUE(narrow_p[i] == wide_p[i]) << "tensor " << i << ", life " << life;
      EXPECT_TRUE(narrow_p[i].canaries());
    }
  }
}

// ---- Parameters of 16 bits, to nearest ----------------------------------------------------------

// Every number of the format, the midpoint to the next, and the f32 numbers beside the midpoint.
std::vector<float> around_every_value(int32_t dtype) {
  const Format& f = format(dtype);
  std::vector<float> list;
  for (int bits = 0; std::isfinite(decode(static_cast<uint16_t>(bits), dtype)); ++bits) {
    const double x = decode(static_cast<uint16_t>(bits), dtype);
    const auto middle = static_cast<float>(x + f.spacing(x) / 2);
    const float sign = bits % 2 == 0 ? 1.0f : -1.0f;
    list.push_back(x == 0 ? 0 : sign * static_cast<float>(x));
    list.push_back(sign * middle);
    list.push_back(-sign * std::nextafter(middle, 0.0f));
    list.push_back(-sign * std::nextafter(middle, INFINITY));
  }
  for (const float x :
       {FLT_MAX, FLT_MIN, 0x1p-149f, 0x1.8p-140f, 1e38f, 65519.996f, 65520.0f, 65536.0f, 0x1p-25f,
        INFINITY, NAN, as_float(0x7f800001), as_float(0x7fffffff), as_float(0x7f80ffff)}) {
    list.push_back(x);
    list.push_back(-x);
  }
  return list;
}

// Moves parameters from 0 to x by a step of plain SGD and returns their bits.
std::vector<uint16_t> copy_out(const std::vector<float>& x, int32_t dtype, int32_t master,
                               int32_t rounding) {
  const auto n = static_cast<int64_t>(x.size());
  Tensor p(dtype, n), g(GA_F32, n);
  for (int64_t i = 0; i < n; ++i) {
    const uint32_t turned = as_bits(x[static_cast<size_t>(i)]) ^ 0x80000000;  // keeps a NaN's bits
    memcpy(g.at(i), &turned, sizeof turned);
  }
  Context ctx(unjudged());
  ctx.group(plain_sgd());
  ga_param_options o = options(GA_F32);
  o.master = master;
  o.rounding = rounding;
  add(ctx, 0, p, {}, o);
  accumulate(ctx, {&g});
  EXPECT_EQ(step(ctx).outcome, GA_STEP_APPLIED);
  EXPECT_TRUE(p.canaries());
  std::vector<uint16_t> bits;
  for (int64_t i = 0; i < n; ++i) bits.push_back(p.bits(i));
  return bits;
}

void expect_bits(const std::vector<float>& x, const std::vector<uint16_t>& got, int32_t dtype) {
  int wrong = 0;
  for (size_t i = 0; i < x.size() && wrong < 5; ++i) {
    const bool right = std::isnan(x[i]) ? std::isnan(decode(got[i], dtype))
                                        : got[i] == encode(static_cast<double>(x[i]), dtype);
    if (right) continue;
    ++wrong;
    ADD_FAILURE() << std::hexfloat << x[i] << " became " << decode(got[i], dtype) << ", not "
                  << to_nearest(static_cast<double>(x[i]), format(dtype));
  }
}

class CopyOut : public testing::TestWithParam<int32_t> {};
INSTANTIATE_TEST_SUITE_P(Dtype, CopyOut, testing::Values(GA_F16, GA_BF16),
                         [](const auto& info) { return format(info.param).name; });

TEST_P(CopyOut, RoundsToNearestEven) {
  const std::vector<float> x = around_every_value(GetParam());
  for (const int32_t master : {GA_MASTER_F32, GA_MASTER_NONE}) {
    on_every_isa(
        [&] { expect_bits(x, copy_out(x, GetParam(), master, GA_ROUND_NEAREST), GetParam()); });
  }
}

// Stochastic rounding gives one of the two neighbours; numbers of the format, infinities and NaN
// stay.
TEST_P(CopyOut, StochasticallyToANeighbour) {
  const int32_t dtype = GetParam();
  const Format& f = format(dtype);
  const std::vector<float> x = around_every_value(dtype);
  for (const int32_t master : {GA_MASTER_F32, GA_MASTER_NONE}) {
    std::vector<uint16_t> baseline;
    on_every_isa([&] {
      const std::vector<uint16_t> got = copy_out(x, dtype, master, GA_ROUND_STOCHASTIC);
      if (baseline.empty()) baseline = got;
      EXPECT_TRUE(got == baseline);
      int wrong = 0;
      for (size_t i = 0; i < x.size() && wrong < 5; ++i) {
        const double want = x[i], value = decode(got[i], dtype);
        bool right;
        if (std::isnan(want)) {
          right = std::isnan(value);
        } else if (to_nearest(want, f) == want) {
          right = value == want;
        } else if (std::abs(want) > f.largest()) {
          right = std::abs(value) >= f.largest() && std::signbit(value) == std::signbit(want);
        } else {
          const double down = std::floor(want / f.spacing(want)) * f.spacing(want);
          const double up = down + f.spacing(want);
          right = value == down || value == up || (std::isinf(value) && std::abs(up) > f.largest());
        }
        if (right) continue;
        ++wrong;
        ADD_FAILURE() << std::hexfloat << want << " became " << value;
      }
    });
  }
}

// ---- A program that flushes subnormals ----------------------------------------------------------

#if defined(__x86_64__)
class FlushToZero {
 public:
  FlushToZero() : old_(_mm_getcsr()) { _mm_setcsr(old_ | 0x8040); }  // FTZ and DAZ
  ~FlushToZero() { _mm_setcsr(old_); }
  FlushToZero(const FlushToZero&) = delete;
  FlushToZero& operator=(const FlushToZero&) = delete;

 private:
  unsigned old_;
};

// The start-up code that -ffast-math links in sets this mode for the whole program. Subnormals of
// f16 are normal in f32; those of bf16 are subnormal in f32 too, and arithmetic in this mode
// flushes them.
TEST(FlushedSubnormals, GradientsAreConverted) {
  for (const int32_t dtype : {GA_F16, GA_BF16}) {
    SCOPED_TRACE(format(dtype).name);
    const Tensor g = every_value(dtype), zeros(dtype, kAll);
    for (const Way way : {kFirst, kAdded, kLive}) {
      on_every_isa([&] {
        std::vector<uint32_t> got;
        {
          const FlushToZero guard;
          got = convert(dtype, way, g, zeros);
        }
        int wrong = 0;
        for (int64_t i = 0; i < kAll && wrong < 5; ++i) {
          const double value = decode(static_cast<uint16_t>(i), dtype);
          if (!std::isfinite(value) || std::abs(value) < static_cast<double>(FLT_MIN)) continue;
          const auto x = static_cast<double>(as_float(got[static_cast<size_t>(i)]));
          if (x == value) continue;
          ++wrong;
          ADD_FAILURE() << std::hex << "0x" << i << " became " << std::hexfloat << x;
        }
      });
    }
  }
}

TEST(FlushedSubnormals, ParametersAreRounded) {
  for (const int32_t dtype : {GA_F16, GA_BF16}) {
    SCOPED_TRACE(format(dtype).name);
    std::vector<float> x;
    for (const float value : around_every_value(dtype)) {
      if (std::isfinite(value) && std::abs(value) >= FLT_MIN) x.push_back(value);
    }
    for (const int32_t master : {GA_MASTER_F32, GA_MASTER_NONE}) {
      on_every_isa([&] {
        std::vector<uint16_t> got;
        {
          const FlushToZero guard;
          got = copy_out(x, dtype, master, GA_ROUND_NEAREST);
        }
        expect_bits(x, got, dtype);
      });
    }
  }
}

// The next step reads what the last one wrote.
TEST(FlushedSubnormals, ParametersAreRead) {
  Tensor p(GA_F16, 2047), g(GA_F32, 2047);
  for (int64_t i = 0; i < p.count(); ++i) p.set_bits(i, static_cast<uint16_t>(i + 1));
  const Tensor before = p;
  for (const int32_t master : {GA_MASTER_F32, GA_MASTER_NONE}) {
    on_every_isa([&] {
      const FlushToZero guard;
      Context ctx;
      ctx.group(plain_sgd());
      ga_param_options o = options(GA_F32);
      o.master = master;
      add(ctx, 0, p, {}, o);
      accumulate(ctx, {&g});
      step(ctx);
    });
    EXPECT_TRUE(p == before);
  }
}
#endif

// ---- Every mix ----------------------------------------------------------------------------------

struct Mix {
  int32_t parameter, gradient, accumulator, master, rounding;

  std::string name() const {
    std::string text = std::string(format(parameter).name) + "_from_" + format(gradient).name +
                       "_in_" + format(accumulator).name;
    if (master == GA_MASTER_NONE) text += "_without_master";
    if (rounding == GA_ROUND_STOCHASTIC) text += "_stochastic";
    return text;
  }
  ga_param_options param_options() const {
    ga_param_options o = options(gradient, accumulator);
    o.master = master;
    o.rounding = rounding;
    return o;
  }
  bool narrow() const { return format(parameter).size == 2; }
  int32_t compute() const { return parameter == GA_F64 ? GA_F64 : GA_F32; }
};

std::vector<Mix> mixes() {
  std::vector<Mix> list;
  for (const int32_t g : {GA_F64, GA_F32, GA_F16, GA_BF16}) {
    list.push_back({GA_F64, g, GA_F64, GA_MASTER_F32, GA_ROUND_NEAREST});
  }
  for (const int32_t g : {GA_F32, GA_F16, GA_BF16}) {
    for (const int32_t a : {GA_F32, GA_F16, GA_BF16}) {
      list.push_back({GA_F32, g, a, GA_MASTER_F32, GA_ROUND_NEAREST});
      for (const int32_t p : {GA_F16, GA_BF16}) {
        for (const int32_t master : {GA_MASTER_F32, GA_MASTER_NONE}) {
          for (const int32_t rounding : {GA_ROUND_NEAREST, GA_ROUND_STOCHASTIC}) {
            list.push_back({p, g, a, master, rounding});
          }
        }
      }
    }
  }
  return list;
}

class Mixes : public testing::TestWithParam<Mix> {};
INSTANTIATE_TEST_SUITE_P(Dtypes, Mixes, testing::ValuesIn(mixes()),
                         [](const auto& info) { return info.param.name(); });

const int64_t kSizes[] = {0, 1, 15, 16, 17, 1023, 65536 + 3};
const double kWeights[] = {3, 1, 0, 2.5};
constexpr int64_t kContributions = 3;  // with a weight above 0

// Gradients of one dtype, computed once.
const Tensor& gradient_of(int32_t dtype, int64_t count, uint64_t number) {
  static std::map<std::tuple<int32_t, int64_t, uint64_t>, Tensor> made;
  const auto key = std::make_tuple(dtype, count, number);
  const auto found = made.find(key);
  if (found != made.end()) return found->second;
  return made.emplace(key, random_tensor(dtype, count, 17 * number + 1)).first->second;
}

// Two windows of plain SGD against the weighted mean in extended precision. The bound counts, for
// each of K contributions, a rounded factor, a product and a sum in f32 (f64), and a rounding to
// the accumulator's dtype; for the mean a factor and a product; and the update.
TEST_P(Mixes, WeightedMeanOverAWindow) {
  const Mix& mix = GetParam();
  const Format &p_format = format(mix.parameter), &a_format = format(mix.accumulator);
  const double unit = format(mix.compute()).roundoff(), lr = 0.5;
  const double store = mix.accumulator == mix.compute() ? 0 : a_format.roundoff();
  const double relative = 1.01 * ((kContributions + 1) * (store + unit) + 4 * unit);
  const double absolute = kContributions * a_format.smallest();

  std::vector<Tensor> p;
  for (const int64_t n : kSizes) p.push_back(random_tensor(mix.parameter, n, 1));
  const std::vector<Tensor> start = p;
  std::vector<std::vector<long double>> value(p.size()), error(p.size());
  Context ctx;
  ctx.group(plain_sgd(lr));
  for (size_t i = 0; i < p.size(); ++i) add(ctx, 0, p[i], {}, mix.param_options());
  for (size_t i = 0; i < p.size(); ++i) {
    error[i].assign(static_cast<size_t>(kSizes[i]), 0);
    for (int64_t j = 0; j < kSizes[i]; ++j) value[i].push_back(start[i].get(j));
  }

  for (uint64_t t = 0; t < 2; ++t) {
    for (size_t k = 0; k < 4; ++k) {
      std::vector<const Tensor*> list;
      for (const int64_t n : kSizes) list.push_back(&gradient_of(mix.gradient, n, 4 * t + k));
      accumulate(ctx, list, kWeights[k]);
    }
    const ga_step_result r = step(ctx);
    ASSERT_EQ(r.outcome, GA_STEP_APPLIED);
    double worst = 0;
    long double squares = 0, square_errors = 0;
    for (size_t i = 0; i < p.size(); ++i) {
      for (int64_t j = 0; j < kSizes[i]; ++j) {
        long double sum = 0, magnitude = 0, weight = 0;
        for (size_t k = 0; k < 4; ++k) {
          const long double term = static_cast<long double>(kWeights[k]) *
                                   gradient_of(mix.gradient, kSizes[i], 4 * t + k).get(j);
          sum += term;
          magnitude += std::abs(term);
          weight += kWeights[k];
        }
        const long double mean = sum / weight;
        const long double mean_error = (relative * magnitude + absolute) / weight;
        squares += mean * mean;
        square_errors += mean_error * mean_error;
        long double& x = value[i][static_cast<size_t>(j)];
        long double& e = error[i][static_cast<size_t>(j)];
        e += lr * mean_error + unit * (2 * lr * std::abs(mean) + 2 * std::abs(x));
        x -= lr * mean;
        // Rounding to the parameter's dtype: half a spacing, stochastically up to a whole one.
        long double stored = e;
        if (mix.narrow()) {
          const double span = mix.rounding == GA_ROUND_STOCHASTIC ? 1 : 0.5;
          stored += 1.01 * span * p_format.spacing(static_cast<double>(std::abs(x) + e));
        }
        if (mix.master == GA_MASTER_NONE) e = stored;
        const double distance = static_cast<double>(std::abs(p[i].get(j) - x) / stored);
        worst = std::max(worst, std::isnan(distance) ? INFINITY : distance);
      }
      EXPECT_TRUE(p[i].canaries());
    }
    EXPECT_LE(worst, 1) << "times the bound, in window " << t;
    const auto norm = static_cast<double>(std::sqrt(squares));
    EXPECT_NEAR(r.norm, norm, static_cast<double>(std::sqrt(square_errors)) + ref::kNorm * norm);
  }
}

// If every sum and mean is exact, four micro-batches give the bits of one.
const int64_t kSmallSizes[] = {0, 1, 15, 16, 17, 1023};

TEST_P(Mixes, FourMicroBatchesGiveTheBitsOfOne) {
  const Mix& mix = GetParam();
  std::vector<Tensor> parts, whole;
  for (const bool one : {false, true}) {
    std::vector<Tensor>& p = one ? whole : parts;
    for (const int64_t n : kSmallSizes) p.push_back(random_tensor(mix.parameter, n, 1));
    Context ctx;
    ctx.group(optimizer(GA_OPTIMIZER_ADAM));
    for (Tensor& tensor : p) add(ctx, 0, tensor, {}, mix.param_options());
    for (uint64_t t = 0; t < 2; ++t) {
      std::vector<std::vector<Tensor>> g(5);
      for (const int64_t n : kSmallSizes) {
        Random random(t + 7);
        for (auto& list : g) list.emplace_back(mix.gradient, n);
        for (int64_t j = 0; j < n; ++j) {
          double sum = 0;
          for (size_t k = 0; k < 4; ++k) {
            const auto x = static_cast<double>(random.below(17) - 8);
            g[k].back().set(j, x);
            sum += x;
          }
          g[4].back().set(j, sum / 4);
        }
      }
      for (size_t k = one ? 4 : 0; k < (one ? 5 : 4); ++k) {
        std::vector<const Tensor*> list;
        for (const Tensor& tensor : g[k]) list.push_back(&tensor);
        accumulate(ctx, list, one ? 4 : 1);
      }
      EXPECT_EQ(step(ctx).outcome, GA_STEP_APPLIED);
    }
  }
  for (size_t i = 0; i < parts.size(); ++i) EXPECT_TRUE(parts[i] == whole[i]) << i;
}

// Live gradients are read in place, with the bits of copied ones, in windows of one micro-batch and
// of more.
TEST_P(Mixes, LiveGradientsGiveTheSameBits) {
  const Mix& mix = GetParam();
  std::vector<Tensor> results[2];
  for (const int32_t life : {GA_GRADIENTS_CONSUMED, GA_GRADIENTS_LIVE}) {
    ga_config c = config();
    c.gradient_life = life;
    std::vector<Tensor>& p = results[life];
    for (const int64_t n : kSizes) p.push_back(random_tensor(mix.parameter, n, 1));
    Context ctx(c);
    ctx.group(optimizer(GA_OPTIMIZER_ADAM));
    for (Tensor& tensor : p) add(ctx, 0, tensor, {}, mix.param_options());
    const ga_clip norm = clip(GA_CLIP_GLOBAL, 3);
    EXPECT_OK(ga_context_set_clip(ctx, &norm));
    for (uint64_t t = 0; t < 3; ++t) {
      for (uint64_t k = 0; k <= t; ++k) {
        std::vector<const Tensor*> list;
        for (const int64_t n : kSizes) list.push_back(&gradient_of(mix.gradient, n, 2 * t + k));
        accumulate(ctx, list, 0.7 + static_cast<double>(k));
      }
      EXPECT_EQ(step(ctx).outcome, GA_STEP_APPLIED);
    }
  }
  for (size_t i = 0; i < results[0].size(); ++i) EXPECT_TRUE(results[0][i] == results[1][i]) << i;
}

// The gradient that an external optimizer sees has the dtype of the accumulator: it is rounded to
// that dtype once more after clipping.
TEST_P(Mixes, ExternalGradient) {
  const Mix& mix = GetParam();
  if (mix.master == GA_MASTER_NONE || mix.rounding == GA_ROUND_STOCHASTIC) return;  // no difference
  const Format& f = format(mix.accumulator);
  const double unit = format(mix.compute()).roundoff() + (f.size == 2 ? f.roundoff() : 0);
  Tensor p(mix.parameter, 65536 + 3, 1);
  const Tensor before = p;
  Context ctx;
  ctx.group(external());
  add(ctx, 0, p, {}, mix.param_options());
  const ga_clip value = clip(GA_CLIP_NONE, 0, GA_FLAVOR_TORCH, 0.25);
  for (const bool clipped : {false, true}) {
    EXPECT_OK(ga_context_set_clip(ctx, clipped ? &value : nullptr));
    for (uint64_t k = 0; k < 3; ++k) {
      accumulate(ctx, {&gradient_of(mix.gradient, p.count(), k)}, kWeights[k] + 1);
    }
    step(ctx);
    const std::vector<double> got = external_gradient(ctx, 0, p.count());
    double worst = 0;
    for (int64_t j = 0; j < p.count(); ++j) {
      double sum = 0, magnitude = 0, weight = 0;
      for (uint64_t k = 0; k < 3; ++k) {
        const double w = kWeights[k] + 1;
        sum += w * gradient_of(mix.gradient, p.count(), k).get(j);
        magnitude += w * std::abs(gradient_of(mix.gradient, p.count(), k).get(j));
        weight += w;
      }
      const double want = sum / weight;
      const double bound = 1.02 * (9 * unit * magnitude / weight + 4 * f.smallest());
      const double error =
          std::abs(got[static_cast<size_t>(j)] - (clipped ? std::clamp(want, -0.25, 0.25) : want));
      worst = std::max(worst, error / bound);
    }
    EXPECT_LE(worst, 1) << "times the bound, clipped " << clipped;
    EXPECT_TRUE(p == before);
  }
}

// ---- f64 throughout -----------------------------------------------------------------------------

// Adam in extended precision. The gradients have one sign, so nothing cancels: after t steps the
// moments carry at most 3 t roundings and a step 4 t + 12, each of 2^-53 (and those of the powers
// of the betas, kHost).
TEST(F64, AdamToFullPrecision) {
  const int64_t n = 1025;
  const ga_optimizer o = optimizer(GA_OPTIMIZER_ADAM);
  Tensor p(GA_F64, n, 1);
  Context ctx;
  ctx.group(o);
  add(ctx, 0, p);
  std::vector<long double> x(n, 1), m(n, 0), v(n, 0), error(n, 0);
  for (int t = 1; t <= 20; ++t) {
    Tensor g(GA_F64, n);
    Random random(static_cast<uint64_t>(t));
    for (int64_t j = 0; j < n; ++j) g.set(j, 0.5 + random.unit());
    accumulate(ctx, {&g}, 3);
    step(ctx);
    double worst = 0;
    for (int64_t j = 0; j < n; ++j) {
      const auto i = static_cast<size_t>(j);
      const long double gradient = g.get(j);
      m[i] += (1 - static_cast<long double>(o.beta1)) * (gradient - m[i]);
      v[i] += (1 - static_cast<long double>(o.beta2)) * (gradient * gradient - v[i]);
      const long double c1 = 1 - std::pow(static_cast<long double>(o.beta1), t);
      const long double c2 = 1 - std::pow(static_cast<long double>(o.beta2), t);
      const long double move = o.lr / c1 * m[i] / (std::sqrt(v[i] / c2) + o.eps);
      x[i] -= move;
      // For small t, 1 - beta2^t loses up to 1 / (1 - beta2) = 1000 units.
      error[i] += 0x1p-53L * ((4 * t + 12 + 16 + 2000) * move + std::abs(x[i]));
      worst = std::max(worst, static_cast<double>(std::abs(p.get(j) - x[i]) / error[i]));
    }
    ASSERT_LE(worst, 1) << "times the bound, step " << t;
  }
}

TEST(F64, SquaresThatOverflowAreFinite) {
  for (const int64_t n : {int64_t{1}, int64_t{17}, int64_t{70000}}) {
    for (const int32_t life : {GA_GRADIENTS_CONSUMED, GA_GRADIENTS_LIVE}) {
      for (const int32_t policy :
           {GA_NONFINITE_SKIP_STEP, GA_NONFINITE_FAIL, GA_NONFINITE_DROP_MICRO}) {
        ga_config c = config();
        c.gradient_life = life;
        c.nonfinite = policy;
        Tensor p(GA_F64, n), g(GA_F64, n, 1e200);
        Context ctx(c);
        ctx.group(plain_sgd());
        add(ctx, 0, p);
        accumulate(ctx, {&g});
        const ga_step_result r = step(ctx);
        EXPECT_EQ(r.outcome, GA_STEP_APPLIED);
        EXPECT_EQ(r.dropped, 0);
        EXPECT_FALSE(std::isnan(r.norm));
        EXPECT_EQ(p.get(n - 1), -1e200);
      }
    }
  }
}

TEST(F64, InfinitiesAndNaNAreFound) {
  const int64_t n = 70001;
  for (const int32_t life : {GA_GRADIENTS_CONSUMED, GA_GRADIENTS_LIVE}) {
    ga_config c = config();
    c.gradient_life = life;
    Tensor p(GA_F64, n, 0.5);
    const Tensor before = p;
    Context ctx(c);
    ctx.group(plain_sgd());
    add(ctx, 0, p);
    for (const int64_t where : {int64_t{0}, int64_t{7}, int64_t{65535}, int64_t{65536}, n - 1}) {
      for (const double bad : {double{INFINITY}, -double{INFINITY}, double{NAN}}) {
        for (const bool later : {false, true}) {
          Tensor g(GA_F64, n, 1e200), h(GA_F64, n, 1);
          (later ? h : g).set(where, bad);
          accumulate(ctx, {&g});
          if (later) accumulate(ctx, {&h});
          const ga_step_result r = step(ctx);
          EXPECT_EQ(r.outcome, GA_STEP_SKIPPED_NONFINITE) << bad << " at " << where;
          EXPECT_FALSE(std::isfinite(r.norm));
          EXPECT_TRUE(p == before);
        }
      }
    }
    Tensor g(GA_F64, n, 1.5e308), h(GA_F64, n, 1.5e308);
    accumulate(ctx, {&g});
    accumulate(ctx, {&h});
    EXPECT_EQ(step(ctx).outcome, GA_STEP_SKIPPED_NONFINITE) << "the sum overflows";
    EXPECT_TRUE(p == before);
  }
}

// With numbers that f32 cannot represent: neither the accumulator nor the loss scale passes through
// f32.
TEST(F64, NothingPassesThroughF32) {
  ga_config c = config();
  c.loss_scale = 3;
  Tensor p(GA_F64, 3), g(GA_F64, 3);
  const double values[] = {1 + 0x1p-40, 1e-300, -1e300};
  for (int64_t i = 0; i < 3; ++i) g.set(i, 3 * values[i]);
  Context ctx(c);
  ctx.group(plain_sgd());
  add(ctx, 0, p);
  accumulate(ctx, {&g}, 7);
  accumulate(ctx, {&g}, 5);
  EXPECT_EQ(step(ctx).outcome, GA_STEP_APPLIED);
  // Each contribution rounds a factor, a product and a sum; the mean a factor and a product.
  for (int64_t i = 0; i < 3; ++i) {
    EXPECT_NEAR(p.get(i), -values[i], 8 * 0x1p-53 * std::abs(values[i]));
  }
}

TEST(F64, BesideF32InOneContext) {
  Tensor wide(GA_F64, 5), narrow(GA_F32, 5), half(GA_BF16, 5);
  Tensor a(GA_F64, 5, 3), b(GA_F32, 5, 4), d(GA_BF16, 5, 12);
  Context ctx;
  ctx.group(plain_sgd());
  add(ctx, 0, wide);
  add(ctx, 0, narrow);
  add(ctx, 0, half);
  const ga_clip c = clip(GA_CLIP_GLOBAL, 6.5 * std::sqrt(5.0), GA_FLAVOR_KERAS);
  EXPECT_OK(ga_context_set_clip(ctx, &c));
  accumulate(ctx, {&a, &b, &d});
  const ga_step_result r = step(ctx);
  EXPECT_NEAR(r.norm, 13 * std::sqrt(5.0), 1e-13 * 30);
  EXPECT_NEAR(wide.get(4), -1.5, 1e-14);
  EXPECT_NEAR(narrow.get(4), -2, 1e-6);
  EXPECT_NEAR(half.get(4), -6, 1e-6);
}

// ---- Wrong mixes --------------------------------------------------------------------------------

TEST(WrongDtypes, AreRefused) {
  Tensor p(GA_F32, 10), wide(GA_F64, 10), half(GA_BF16, 10);
  Context ctx;
  ctx.group(plain_sgd());
  const auto expect_refused = [&](Tensor& t, const ga_param_options& o, ga_status status,
                                  std::vector<std::string> words) {
    words.push_back("\"new\"");
    ga_param id = -7;
    EXPECT_TRUE(refused(try_add(ctx, 0, "new", t.data(), t.dtype(), {10}, o, &id), status, words));
    EXPECT_EQ(id, -7);
  };
  const ga_status unsupported = GA_ERROR_UNSUPPORTED, invalid = GA_ERROR_INVALID_ARGUMENT;
  expect_refused(p, options(GA_F64), unsupported, {"f64"});
  expect_refused(half, options(GA_F64), unsupported, {"f64"});
  expect_refused(p, options(0, GA_F64), unsupported, {"f64"});
  expect_refused(wide, options(0, GA_F32), unsupported, {"accumulator_dtype", "f64"});
  expect_refused(wide, options(0, GA_BF16), unsupported, {"accumulator_dtype", "f64"});
  for (const int32_t dtype : {static_cast<int32_t>(GA_I32), static_cast<int32_t>(GA_I64)}) {
    for (const bool of_gradient : {true, false}) {
      const ga_param_options o = of_gradient ? options(dtype) : options(0, dtype);
      ga_param id = -7;
      const ga_status status = try_add(ctx, 0, "new", p.data(), GA_F32, {10}, o, &id);
      EXPECT_TRUE(status == invalid || status == unsupported);
      EXPECT_NE(std::string(ga_last_error()).find("\"new\""), std::string::npos);
      EXPECT_EQ(id, -7);
    }
  }
  expect_refused(p, options(77), invalid, {"77"});
  expect_refused(p, options(0, -3), invalid, {"-3"});
  ga_param_options o = options();
  o.master = 2;
  expect_refused(half, o, invalid, {"master", "2"});
  o = options();
  o.rounding = -1;
  expect_refused(half, o, invalid, {"rounding", "-1"});

  // State dtypes that the optimizer or the parameter does not support.
  ga_optimizer adam = optimizer(GA_OPTIMIZER_ADAM);
  adam.state_dtype = GA_F16;
  ga_status status = ga_group_add(ctx, &adam, nullptr);
  EXPECT_TRUE(status == invalid || status == unsupported);
  EXPECT_NE(std::string(ga_last_error()).find("state_dtype"), std::string::npos);
  ga_optimizer adafactor = optimizer(GA_OPTIMIZER_ADAFACTOR);
  adafactor.state_dtype = GA_BF16;
  status = ga_group_add(ctx, &adafactor, nullptr);
  EXPECT_EQ(status, unsupported);
  EXPECT_NE(std::string(ga_last_error()).find("state_dtype"), std::string::npos);
  adam.state_dtype = GA_BF16;
  ga_group narrow = -1;
  EXPECT_OK(ga_group_add(ctx, &adam, &narrow));
  EXPECT_EQ(narrow, 1) << "a refused group took an id";
  EXPECT_TRUE(refused(try_add(ctx, narrow, "new", wide.data(), GA_F64, {10}, options()),
                      unsupported, {"\"new\"", "f64"}));
  // None of the refused calls left a trace.
  ga_param id = -1;
  EXPECT_OK(try_add(ctx, 0, "new", p.data(), GA_F32, {10}, options(), &id));
  EXPECT_EQ(id, 0);
}

}  // namespace
}  // namespace ga::test
