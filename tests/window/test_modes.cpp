// SPDX-License-Identifier: Apache-2.0
//
// The four accumulation modes and what each is for: many equal terms, a sum that overflows, a term
// that vanishes; with unequal weights, missing gradients and micro-batches filled in turns.
#include "formats.hpp"

namespace ga::test {
namespace {

const int32_t kModes[] = {GA_ACCUMULATE_PLAIN, GA_ACCUMULATE_RUNNING_MEAN,
                          GA_ACCUMULATE_COMPENSATED, GA_ACCUMULATE_STOCHASTIC};
const char* const kModeNames[] = {"plain_", "running_mean_", "compensated_", "stochastic_"};

ga_config mode(int32_t accumulation) {
  ga_config c = config();
  c.accumulation = accumulation;
  return c;
}

// Parameters at 0 that plain SGD with lr 1 moves by minus the reduced gradient, with accumulators
// of one dtype.
class Probe {
 public:
  Probe(const ga_config& c, int32_t accumulator, int64_t count, size_t params = 1) : ctx(c) {
    ctx.group(plain_sgd());
    const int32_t dtype = accumulator == GA_F64 ? GA_F64 : GA_F32;
    p_.reserve(params);
    for (size_t i = 0; i < params; ++i) {
      p_.emplace_back(dtype, count);
      add(ctx, 0, p_.back(), {}, options(dtype, accumulator));
    }
  }
  // Returns the gradient of the last step and sets the parameter to 0 again.
  std::vector<double> gradient(size_t param = 0) {
    std::vector<double> result;
    for (int64_t i = 0; i < p_[param].count(); ++i) result.push_back(0 - p_[param].get(i));
    p_[param].fill(0);
    return result;
  }
  Context ctx;

 private:
  std::vector<Tensor> p_;
};

double mean(const std::vector<double>& x) {
  double sum = 0;
  for (const double v : x) sum += v / static_cast<double>(x.size());
  return sum;
}

// The largest error of a 16-bit pair: each term is rounded to f32, and once more when the lower
// half is stored, by half a spacing of a number 2^precision smaller than the sum.
double pair_bound(const Format& f, double term, int terms) {
  double bound = 0;
  for (int k = 1; k <= terms; ++k) {
    bound += std::abs(term) * k * (f.roundoff() * f.roundoff() + 0x1p-24) * 1.01;
  }
  return bound;
}

class Accumulators16 : public testing::TestWithParam<int32_t> {};
INSTANTIATE_TEST_SUITE_P(Dtype, Accumulators16, testing::Values(GA_F16, GA_BF16),
                         [](const auto& info) { return format(info.param).name; });

// ---- Equal terms --------------------------------------------------------------------------------

// With 4 times as many terms as the format has numbers between two powers of two, plain sums stop
// growing when a term is half a spacing.
TEST_P(Accumulators16, EqualTermsStallPlainSumsAlone) {
  const int32_t dtype = GetParam();
  const Format& f = format(dtype);
  const int64_t n = 4096;
  const int terms = 4 << f.precision;
  for (const double term : {1.0, 0.7}) {
    const double want = static_cast<double>(static_cast<float>(term));
    for (const int32_t m : kModes) {
      SCOPED_TRACE(m);
      const int64_t count = m == GA_ACCUMULATE_STOCHASTIC ? n : 17;
      Probe probe(mode(m), dtype, count);
      const Tensor g(GA_F32, count, term);
      for (int k = 0; k < terms; ++k) accumulate(probe.ctx, {&g});
      EXPECT_EQ(step(probe.ctx).outcome, GA_STEP_APPLIED);
      const std::vector<double> got = probe.gradient();
      switch (m) {
        case GA_ACCUMULATE_PLAIN:
          // The term 1 is half a spacing at 2^precision; other terms stall earlier.
          EXPECT_LE(got[0], term * 0.5);
          EXPECT_GT(got[0], 0);
          break;
        case GA_ACCUMULATE_RUNNING_MEAN:
          // The mean of equal terms is within one rounding of them. Later terms may move it by
          // another rounding, but never beyond the two numbers next to the term.
          EXPECT_NEAR(got[0], want, 1.01 * f.spacing(want));
          break;
        case GA_ACCUMULATE_COMPENSATED:
          if (term == 1) {
            EXPECT_EQ(got[0], 1) << "the sum is an integer of at most 16 bits";
          } else {
            EXPECT_NEAR(got[0], want, pair_bound(f, want, terms) / terms);
          }
          break;
        default: {
          // Each term adds at most the variance of a fair coin toss between two numbers. (The
          // spacing may double early: it is taken at a sum larger by one term and two spacings.)
          double variance = 0;
          for (int k = 1; k <= terms; ++k) {
            variance += std::pow(f.spacing(1.1 * k * want + want), 2) / 4;
          }
          const double deviation = std::sqrt(variance / static_cast<double>(count)) / terms;
          EXPECT_NEAR(mean(got), want, 6 * deviation);
          EXPECT_LT(6 * deviation, 0.01 * want);  // the bound is narrow enough to mean something
        }
      }
    }
  }
}

// llm.c's case: 1024 terms in bf16.
TEST(Accumulators, OneThousandAndTwentyFourTermsInBf16) {
  double got[4];
  for (const int32_t m : kModes) {
    const int64_t n = 4096;
    Probe probe(mode(m), GA_BF16, n);
    const Tensor g(GA_F32, n, 1.0078125);  // all 8 bits in use
    for (int k = 0; k < 1024; ++k) accumulate(probe.ctx, {&g});
    step(probe.ctx);
    got[m] = mean(probe.gradient()) / 1.0078125 - 1;
  }
  EXPECT_LT(got[GA_ACCUMULATE_PLAIN], -0.5);
  EXPECT_LE(std::abs(got[GA_ACCUMULATE_RUNNING_MEAN]), 0x1p-7);
  EXPECT_LE(std::abs(got[GA_ACCUMULATE_COMPENSATED]), pair_bound(format(GA_BF16), 1, 1024) / 1024);
  EXPECT_LE(std::abs(got[GA_ACCUMULATE_STOCHASTIC]), 6 * 0x1p-7 * std::sqrt(1024.0 / 4) / 64);
}

// ---- A sum that overflows -----------------------------------------------------------------------

TEST(Accumulators, RunningMeanOfF16SurvivesWhereTheSumOverflows) {
  for (const int32_t m : kModes) {
    SCOPED_TRACE(m);
    Probe probe(mode(m), GA_F16, 17);
    const Tensor up(GA_F32, 17, 30000), down(GA_F32, 17, 31000);
    for (int k = 0; k < 8; ++k) accumulate(probe.ctx, {k % 2 ? &up : &down});
    const ga_step_result r = step(probe.ctx);
    if (m == GA_ACCUMULATE_RUNNING_MEAN) {
      EXPECT_EQ(r.outcome, GA_STEP_APPLIED);
      // Each micro-batch rounds numbers of at most 31000 once to f16 and four times to f32.
      EXPECT_NEAR(probe.gradient()[16], 30500, 8 * 31000 * (0x1p-11 + 4 * 0x1p-24));
    } else {
      EXPECT_EQ(r.outcome, GA_STEP_SKIPPED_NONFINITE) << "240000 is too large for f16";
    }
  }
}

TEST(Accumulators, RunningMeanNeverExceedsTheLargestTerm) {
  Probe probe(mode(GA_ACCUMULATE_RUNNING_MEAN), GA_F32, 5);
  const Tensor g(GA_F32, 5, 3e38);
  for (int k = 0; k < 10; ++k) accumulate(probe.ctx, {&g}, 1 + k);
  EXPECT_EQ(step(probe.ctx).outcome, GA_STEP_APPLIED);
  EXPECT_NEAR(probe.gradient()[4], 3e38, 3e38 * 50 * 0x1p-24);
}

// Under GA_NONFINITE_IGNORE an infinity stays an infinity in every mode: in a pair the upper half
// is infinite and the lower half adds nothing. Clipping by value turns the infinity into a finite
// number, but would not change a NaN.
TEST_P(Accumulators16, AnInfinityStaysOne) {
  for (const int32_t m : kModes) {
    for (const double limit : {double{INFINITY}, 2.0}) {
      SCOPED_TRACE("mode " + std::to_string(m) + ", limit " + std::to_string(limit));
      ga_config c = mode(m);
      c.nonfinite = GA_NONFINITE_IGNORE;
      Probe probe(c, GetParam(), 19);
      const ga_clip by_value = clip(GA_CLIP_NONE, 0, GA_FLAVOR_TORCH, limit);
      EXPECT_OK(ga_context_set_clip(probe.ctx, &by_value));
      Tensor g(GA_F32, 19, 1);
      const Tensor one(GA_F32, 19, 1);
      g.set(0, INFINITY);
      g.set(17, -INFINITY);
      for (int k = 0; k < 3; ++k) accumulate(probe.ctx, {k == 1 ? &g : &one});
      EXPECT_EQ(step(probe.ctx).outcome, GA_STEP_APPLIED);
      const std::vector<double> got = probe.gradient();
      EXPECT_EQ(got[0], limit);
      EXPECT_EQ(got[17], -limit);
      EXPECT_NEAR(got[18], 1, format(GetParam()).spacing(3));
    }
  }
}

// A sum of finite numbers that is too large for f16 becomes an infinity too, with a lower half of
// 0: the opposite infinity there would make the pair a NaN.
TEST(Accumulators, ASumTooLargeForF16IsInfinite) {
  for (const int32_t m : kModes) {
    if (m == GA_ACCUMULATE_RUNNING_MEAN) continue;  // stores no sum
    for (const double limit : {double{INFINITY}, 2.0}) {
      SCOPED_TRACE("mode " + std::to_string(m) + ", limit " + std::to_string(limit));
      ga_config c = mode(m);
      c.nonfinite = GA_NONFINITE_IGNORE;
      Probe probe(c, GA_F16, 19);
      const ga_clip by_value = clip(GA_CLIP_NONE, 0, GA_FLAVOR_TORCH, limit);
      EXPECT_OK(ga_context_set_clip(probe.ctx, &by_value));
      Tensor g(GA_F32, 19, 60000);
      g.set(18, -60000);
      for (int k = 0; k < 3; ++k) accumulate(probe.ctx, {&g});
      EXPECT_EQ(step(probe.ctx).outcome, GA_STEP_APPLIED);
      const std::vector<double> got = probe.gradient();
      EXPECT_EQ(got[0], limit);
      EXPECT_EQ(got[18], -limit);
    }
  }
}

// ---- A term that vanishes -----------------------------------------------------------------------

// After 1 come terms of a quarter of the spacing above 1; rounding to nearest loses each of them.
TEST_P(Accumulators16, SmallTermsBesideALargeOne) {
  const int32_t dtype = GetParam();
  const Format& f = format(dtype);
  const int64_t n = 1 << 14;
  const double small = f.spacing(1) / 4;
  const int terms = 512;
  for (const int32_t m : kModes) {
    if (m == GA_ACCUMULATE_RUNNING_MEAN) continue;  // prevents overflow, does not add accuracy
    SCOPED_TRACE(m);
    ga_config c = mode(m);
    c.reduce = GA_REDUCE_SUM;
    Probe probe(c, dtype, n);
    const Tensor one(GA_F32, n, 1), g(GA_F32, n, small);
    accumulate(probe.ctx, {&one});
    for (int k = 0; k < terms; ++k) accumulate(probe.ctx, {&g});
    step(probe.ctx);
    const double got = mean(probe.gradient()), want = 1 + terms * small;
    if (m == GA_ACCUMULATE_PLAIN) {
      EXPECT_EQ(got, 1);
    } else if (m == GA_ACCUMULATE_COMPENSATED) {
      EXPECT_EQ(got, want) << "multiples of 2^-9 (f16: 2^-12) below 2 fit into a pair";
    } else {
      const double deviation = f.spacing(want) * std::sqrt(terms / 4.0 / static_cast<double>(n));
      EXPECT_NEAR(got, want, 6 * deviation);
    }
  }
}

// ---- What they have in common -------------------------------------------------------------------

// COMPENSATED and STOCHASTIC do not change f32 and f64 accumulators.
TEST(Accumulators, ModesOf16BitsLeaveOthersAlone) {
  for (const int32_t dtype : {GA_F32, GA_F64}) {
    std::vector<std::vector<double>> results;
    for (const int32_t m :
         {GA_ACCUMULATE_PLAIN, GA_ACCUMULATE_COMPENSATED, GA_ACCUMULATE_STOCHASTIC}) {
      Probe probe(mode(m), dtype, 1023);
      for (uint64_t k = 0; k < 5; ++k) {
        const Tensor g = random_tensor(dtype, 1023, k);
        accumulate(probe.ctx, {&g}, 0.3 + static_cast<double>(k));
      }
      step(probe.ctx);
      results.push_back(probe.gradient());
    }
    EXPECT_EQ(results[0], results[1]);
    EXPECT_EQ(results[0], results[2]);
  }
}

// A whole training run, compared with the weighted mean in float64: parameters of every size,
// unequal weights, parameters without a gradient in some micro-batches, and micro-batches filled in
// turns.
class Modes : public testing::TestWithParam<std::tuple<int32_t, int32_t>> {};
INSTANTIATE_TEST_SUITE_P(ModeAndDtype, Modes,
                         testing::Combine(testing::ValuesIn(kModes),
                                          testing::Values(GA_F32, GA_F64, GA_F16, GA_BF16)),
                         [](const auto& info) {
                           return std::string(kModeNames[std::get<0>(info.param)]) +
                                  format(std::get<1>(info.param)).name;
                         });

TEST_P(Modes, WeightedMeans) {
  const auto [m, dtype] = GetParam();
  const Format& f = format(dtype);
  const int32_t gradient_dtype = dtype == GA_F64 ? GA_F64 : GA_F32;
  const double unit = format(gradient_dtype).roundoff();
  const int64_t n = 1023;
  // The bound per contribution, the rescaling of a running mean included: the rounding of a store,
  // and at most seven roundings of the arithmetic.
  double store = 0, floor = 0;
  if (f.size == 2) {
    store = m == GA_ACCUMULATE_COMPENSATED  ? f.roundoff() * f.roundoff()
            : m == GA_ACCUMULATE_STOCHASTIC ? 2 * f.roundoff()
                                            : f.roundoff();
    if (m == GA_ACCUMULATE_RUNNING_MEAN) store *= 2;  // one for rescaling, one for adding
    floor = f.smallest();
  }
  const ga_param params = 4;
  struct Contribution {
    int micro;
    ga_param param;
    Tensor g;
  };
  const double weights[] = {0, 2, 0.5, 0, 7, 1};
  ga_config c = mode(m);
  Probe probe(c, dtype, n, params);
  for (int window = 0; window < 3; ++window) {
    // Parameter 0 has a gradient in each micro-batch, 1 only in the first one with a weight, 2 from
    // the fifth on, 3 never.
    std::vector<Contribution> done;
    const auto give = [&](int micro, ga_param param) {
      done.push_back({micro, param, random_tensor(gradient_dtype, n, 100 * window + done.size())});
      return &done.back().g;
    };
    done.reserve(100);
    if (window < 2) {
      for (int k = 0; k < 6; ++k) {
        std::vector<const Tensor*> list(params, nullptr);
        list[0] = give(k, 0);
        if (k == 1) list[1] = give(k, 1);
        if (k >= 4) list[2] = give(k, 2);
        accumulate(probe.ctx, list, weights[k]);
      }
    } else {
      // By part: micro-batches are opened in order, then filled in turns, some parameters twice.
      const auto part = [&](int micro, ga_param param) {
        EXPECT_OK(ga_accumulate_part(probe.ctx, param, give(micro, param)->data()));
      };
      for (int k = 0; k < 6; ++k) {
        EXPECT_OK(ga_micro_begin(probe.ctx, k, weights[k], nullptr));
        part(k, 0);
        if (k == 1) part(k, 1);
        EXPECT_OK(ga_micro_end(probe.ctx));
      }
      for (const int k : {4, 1, 5, 2, 4}) {
        EXPECT_OK(ga_micro_begin(probe.ctx, k, weights[k], nullptr));
        part(k, 2);
        part(k, 0);
        part(k, 2);
        EXPECT_OK(ga_micro_end(probe.ctx));
      }
    }
    const ga_step_result r = step(probe.ctx);
    ASSERT_EQ(r.outcome, GA_STEP_APPLIED);
    EXPECT_EQ(r.weight, 10.5);
    for (ga_param i = 0; i < 3; ++i) {
      const std::vector<double> got = probe.gradient(static_cast<size_t>(i));
      int terms = 0;
      for (const Contribution& each : done) terms += each.param == i && weights[each.micro] > 0;
      double worst = 0;
      for (int64_t j = 0; j < n; ++j) {
        long double sum = 0, magnitude = 0;
        for (const Contribution& each : done) {
          if (each.param != i) continue;
          const long double term = static_cast<long double>(weights[each.micro]) * each.g.get(j);
          sum += term;
          magnitude += std::abs(term);
        }
        const double bound =
            1.02 * ((terms + 1) * (store + 7 * unit) * static_cast<double>(magnitude) / 10.5 +
                    2 * terms * floor);
        const double x = got[static_cast<size_t>(j)];
        const double distance = std::abs(x - static_cast<double>(sum / 10.5L));
        worst = std::max(worst, magnitude == 0 ? (x == 0 ? 0 : INFINITY) : distance / bound);
      }
      EXPECT_LE(worst, 1) << "times the bound, parameter " << i << ", window " << window;
    }
    for (const double x : probe.gradient(3)) EXPECT_EQ(x, 0);
  }
}

// Every mode except PLAIN reads live gradients at once.
TEST_P(Modes, LiveGradientsAreReadAtOnce) {
  const auto [m, dtype] = GetParam();
  if (m == GA_ACCUMULATE_PLAIN) return;  // reads them later: test_window.cpp
  std::vector<double> results[2];
  for (const int32_t life : {GA_GRADIENTS_CONSUMED, GA_GRADIENTS_LIVE}) {
    ga_config c = mode(m);
    c.gradient_life = life;
    Probe probe(c, dtype, 1023);
    Tensor g = random_tensor(dtype == GA_F64 ? GA_F64 : GA_F32, 1023, 1);
    accumulate(probe.ctx, {&g}, 3);
    g.fill(NAN);
    step(probe.ctx);
    results[life] = probe.gradient();
  }
  EXPECT_EQ(results[0], results[1]);
}

// No window leaves anything behind, not even a discarded one.
TEST_P(Modes, NothingOfAFormerWindowSurvives) {
  const auto [m, dtype] = GetParam();
  const int32_t gradient_dtype = dtype == GA_F64 ? GA_F64 : GA_F32;
  ga_config c = mode(m);
  Probe used(c, dtype, 1023);
  const Tensor bad(gradient_dtype, 1023, NAN), g(gradient_dtype, 1023, 0.75);
  accumulate(used.ctx, {&bad});
  accumulate(used.ctx, {&g});
  EXPECT_EQ(step(used.ctx).outcome, GA_STEP_SKIPPED_NONFINITE);
  accumulate(used.ctx, {&g});
  accumulate(used.ctx, {&bad});
  EXPECT_OK(ga_discard(used.ctx));
  accumulate(used.ctx, {&g}, 2);
  EXPECT_EQ(step(used.ctx).outcome, GA_STEP_APPLIED);
  EXPECT_EQ(used.gradient()[1022], 0.75);
}

// The bits are the same for any number of threads and on every instruction set level.
TEST_P(Modes, SameBitsForAnyThreadsAndIsa) {
  const int32_t m = std::get<0>(GetParam()), dtype = std::get<1>(GetParam());
  const int64_t n = 2 * 65536 + 5;
  static const Tensor single[] = {random_tensor(GA_F32, n, 1), random_tensor(GA_F32, n, 2)};
  static const Tensor wide[] = {random_tensor(GA_F64, n, 1), random_tensor(GA_F64, n, 2)};
  const Tensor* g = dtype == GA_F64 ? wide : single;
  const auto run = [&](int32_t threads) {
    ga_config c = mode(m);
    c.num_threads = threads;
    Probe probe(c, dtype, n);
    for (int k = 0; k < 3; ++k) accumulate(probe.ctx, {&g[k % 2]}, 0.7 + k);
    std::vector<double> result = {step(probe.ctx).norm};
    const std::vector<double> gradient = probe.gradient();
    result.insert(result.end(), gradient.begin(), gradient.end());
    return result;
  };
  const std::vector<double> one = run(1);
  EXPECT_TRUE(run(3) == one);
  on_every_isa([&] { EXPECT_TRUE(run(2) == one); });
}

TEST(Accumulators, PairsTakeTwiceTheMemory) {
  const int64_t n = 100000;
  for (const int32_t dtype : {GA_F16, GA_BF16, GA_F32}) {
    int64_t bytes[4];
    for (const int32_t m : kModes) {
      Probe probe(mode(m), dtype, n);
      bytes[m] = memory(probe.ctx).accumulators;
    }
    const auto size = static_cast<int64_t>(format(dtype).size);
    const int64_t pair = size == 2 ? 2 * size * n : size * n;
    EXPECT_GE(bytes[GA_ACCUMULATE_PLAIN], size * n);
    EXPECT_LE(bytes[GA_ACCUMULATE_PLAIN], size * n + 8192);
    EXPECT_EQ(bytes[GA_ACCUMULATE_RUNNING_MEAN], bytes[GA_ACCUMULATE_PLAIN]);
    EXPECT_EQ(bytes[GA_ACCUMULATE_STOCHASTIC], bytes[GA_ACCUMULATE_PLAIN]);
    EXPECT_GE(bytes[GA_ACCUMULATE_COMPENSATED], pair);
    EXPECT_LE(bytes[GA_ACCUMULATE_COMPENSATED], pair + 8192);
  }
}

// ---- What does not go together ------------------------------------------------------------------

TEST(WrongModes, AreRefused) {
  const auto create = [](const ga_config& c) {
    ga_context* ctx = nullptr;
    const ga_status status = ga_context_create(&c, &ctx);
    EXPECT_EQ(ctx == nullptr, status != GA_OK);
    ga_context_destroy(ctx);
    return status;
  };
  for (const int32_t m : {-1, 4}) {
    EXPECT_TRUE(
        refused(create(mode(m)), GA_ERROR_INVALID_ARGUMENT, {"accumulation", std::to_string(m)}));
  }
  ga_config sums = mode(GA_ACCUMULATE_RUNNING_MEAN);
  sums.gradient_kind = GA_GRADIENT_SUM;
  EXPECT_NE(create(sums), GA_OK);
  EXPECT_NE(std::string(ga_last_error()).find("RUNNING_MEAN"), std::string::npos)
      << ga_last_error();
  sums = mode(GA_ACCUMULATE_RUNNING_MEAN);
  sums.reduce = GA_REDUCE_SUM;
  EXPECT_NE(create(sums), GA_OK);
  EXPECT_NE(std::string(ga_last_error()).find("RUNNING_MEAN"), std::string::npos)
      << ga_last_error();
}

TEST(WrongModes, OtherWaysToContributeAreRefused) {
  for (const int32_t m : kModes) {
    if (m == GA_ACCUMULATE_PLAIN) continue;
    SCOPED_TRACE(m);
    Tensor p(GA_F32, 16), g(GA_F32, 16, 1);
    Context ctx(mode(m));
    ctx.group(plain_sgd());
    add(ctx, 0, p, {4, 4});
    EXPECT_OK(ga_micro_begin(ctx, 0, 1, nullptr));
    EXPECT_OK(ga_accumulate_part(ctx, 0, g.data()));
    ga_accumulator out;
    out.struct_size = sizeof out;
    EXPECT_EQ(ga_accumulator_acquire(ctx, 0, &out), GA_ERROR_UNSUPPORTED);
    EXPECT_STRNE(ga_last_error(), "");
    EXPECT_EQ(ga_accumulate_matmul(ctx, 0, 4, g.data(), 4, GA_NO_TRANSPOSE, g.data(), 4,
                                   GA_NO_TRANSPOSE, GA_F32),
              GA_ERROR_UNSUPPORTED);
    const int32_t row = 0;
    EXPECT_EQ(ga_accumulate_rows(ctx, 0, &row, GA_I32, 1, g.data()), GA_ERROR_UNSUPPORTED);
    EXPECT_OK(ga_micro_end(ctx));
    step(ctx);
    EXPECT_EQ(p.get(15), -1);
    Tensor q(GA_F32, 16);
    ga_param_options rows = options();
    rows.rows = GA_ROWS_DENSE;
    EXPECT_TRUE(refused(try_add(ctx, 0, "q", q.data(), GA_F32, {4, 4}, rows), GA_ERROR_UNSUPPORTED,
                        {"\"q\"", "rows"}));
  }
}

}  // namespace
}  // namespace ga::test
