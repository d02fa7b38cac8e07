// SPDX-License-Identifier: Apache-2.0
//
// GA_SHARD_PARAMETERS: ranks with parameters, or parts of them, of their own, whose gradients the program reduces.
#include <numeric>

#include "formats.hpp"
#include "ranks.hpp"

namespace ga::test {
namespace {

ga_comm_options own_parameters() {
  ga_comm_options o = comm_options();
  o.shard = GA_SHARD_PARAMETERS;
  return o;
}

ga_config summing() {
  ga_config c = config();
  c.gradient_kind = GA_GRADIENT_SUM;
  return c;
}

// A model of which ranks have rows [first, first + rows) of each parameter.
struct Whole {
  const char* name;
  int64_t rows, columns;
  ga_group group = 0;
  int64_t size() const { return rows * columns; }
};
const std::vector<Whole> kModel = {{"embedding", 37, 12}, {"wide", 1, 300},      {"deep", 129, 7},
                                   {"late", 64, 64, 1},   {"long", 70001, 1, 1}, {"scalar", 1, 1}};

struct Rows {
  int64_t first, count;
};
// As torch.chunk: all but the last are as large; some may have none.
Rows rows_of(const Whole& w, int32_t rank, int32_t ranks) {
  const int64_t each = (w.rows + ranks - 1) / ranks;
  const int64_t first = std::min(w.rows, rank * each);
  return {first, std::min(each, w.rows - first)};
}

// The gradient of one rank's micro-batch with weight 1, of the whole model.
std::vector<float> gradient_of(size_t param, int32_t rank, int window, int micro) {
  const uint64_t seed = param * 1000 + static_cast<uint64_t>(rank * 100 + window * 10 + micro);
  const Tensor t = random_tensor(GA_F32, kModel[param].size(), seed);
  std::vector<float> g(static_cast<size_t>(kModel[param].size()));
  for (size_t i = 0; i < g.size(); ++i)
    g[i] = static_cast<float>(t.get(static_cast<int64_t>(i))) *
           std::ldexp(1.0f, static_cast<int>(i % 9) - 12);
  return g;
}

// What a framework hands to every rank: the mean over ranks of weight times gradient, in f32.
std::vector<float> reduced(size_t param, const std::vector<double>& weights, int window, int micro,
                           bool mean) {
  const auto ranks = static_cast<int32_t>(weights.size());
  std::vector<double> sum(static_cast<size_t>(kModel[param].size()));
  for (int32_t r = 0; r < ranks; ++r) {
    const std::vector<float> g = gradient_of(param, r, window, micro);
    for (size_t i = 0; i < sum.size(); ++i) sum[i] += weights[static_cast<size_t>(r)] * g[i];
  }
  std::vector<float> out(sum.size());
  for (size_t i = 0; i < sum.size(); ++i)
    out[i] = static_cast<float>(mean ? sum[i] / ranks : sum[i]);
  return out;
}

struct Options {
  ga_optimizer optimizer = test::optimizer(GA_OPTIMIZER_ADAMW);
  double max_norm = 0.01;
  double of_group = 0;  // the second group's own clip
  bool mean = true;
  int life = GA_GRADIENTS_CONSUMED;
  int bad_window = -1;  // in which a rank's gradient has a NaN
  bool scaled = false;
  std::vector<std::vector<double>> weights;  // by rank and micro-batch
};

struct Outcome {
  std::vector<std::vector<float>> parameters;  // whole
  std::vector<ga_step_result> results;
};

constexpr int kWindows = 3;

void set_up(Context& ctx, const Options& o) {
  ctx.group(o.optimizer);
  ctx.group(o.optimizer);
  if (o.max_norm > 0) {
    const ga_clip c = clip(GA_CLIP_GLOBAL, o.max_norm);
    EXPECT_OK(ga_context_set_clip(ctx, &c));
  }
  if (o.of_group > 0) {
    const ga_clip c = clip(GA_CLIP_GLOBAL, o.of_group);
    EXPECT_OK(ga_group_set_clip(ctx, 1, &c));
  }
  if (o.scaled) {
    ga_loss_scaler scaler;
    EXPECT_OK(ga_loss_scaler_init(&scaler, sizeof scaler));
    scaler.initial_scale = 1024;
    scaler.growth_interval = 2;
    EXPECT_OK(ga_context_set_loss_scaler(ctx, &scaler));
  }
}

std::vector<float> start_of(size_t param) {
  const Tensor t = random_tensor(GA_F32, kModel[param].size(), 7 + param);
  std::vector<float> p(static_cast<size_t>(kModel[param].size()));
  for (size_t i = 0; i < p.size(); ++i) p[i] = static_cast<float>(t.get(static_cast<int64_t>(i)));
  return p;
}

// Trains on so many ranks, each with its rows of gradients that are reduced over `data` ranks.
Outcome run(const Options& o, int32_t ranks) {
  Outcome out;
  for (size_t i = 0; i < kModel.size(); ++i) out.parameters.push_back(start_of(i));
  std::vector<std::vector<ga_step_result>> results(static_cast<size_t>(ranks));
  const auto data = static_cast<int32_t>(o.weights.size());
  on_ranks(ranks, [&](int32_t r, ga_comm* comm) {
    ga_config c = summing();
    c.gradient_life = o.life;
    Context ctx(c);
    set_up(ctx, o);
    std::vector<std::vector<float>> parts;
    parts.reserve(kModel.size());
    for (size_t i = 0; i < kModel.size(); ++i) {
      const Whole& w = kModel[i];
      const Rows rows = rows_of(w, r, ranks);
      const float* from = out.parameters[i].data() + rows.first * w.columns;
      parts.emplace_back(from, from + rows.count * w.columns);
      const ga_param id =
          ctx.param(w.group, w.name, parts.back().data(), ref::Shape{rows.count, w.columns});
      const int64_t whole[] = {w.rows, w.columns}, first[] = {rows.first, 0};
      ASSERT_OK(ga_param_set_part(ctx, id, whole, first, 1));
    }
    // Where fewer ranks train, they bring what more had brought: the weights of all.
    ga_comm_options options = own_parameters();
    options.reduced = o.mean ? GA_REDUCED_MEAN : GA_REDUCED_SUM;
    ASSERT_OK(ga_context_set_comm(ctx, comm, &options));
    for (int t = 0; t < kWindows; ++t) {
      std::vector<std::vector<float>> alive;
      for (size_t m = 0; m < o.weights[0].size(); ++m) {
        std::vector<double> weights;
        for (int32_t q = 0; q < data; ++q) weights.push_back(o.weights[static_cast<size_t>(q)][m]);
        double scale = 1;
        if (o.scaled) {
          ASSERT_OK(ga_loss_scale(ctx, &scale, nullptr));
        }
        std::vector<const void*> pointers;
        for (size_t i = 0; i < kModel.size(); ++i) {
          std::vector<float> g = reduced(i, weights, t, static_cast<int>(m), o.mean);
          // The library multiplies a mean by the number of ranks, which here are not those of the data.
          if (o.mean)
            for (float& x : g) x = static_cast<float>(x * (static_cast<double>(data) / ranks));
          if (t == o.bad_window && i == 3) g[5] = NAN;
          for (float& x : g) x *= static_cast<float>(scale);
          const Rows rows = rows_of(kModel[i], r, ranks);
          const float* from = g.data() + rows.first * kModel[i].columns;
          alive.emplace_back(from, from + rows.count * kModel[i].columns);
        }
        for (size_t i = 0; i < kModel.size(); ++i)
          pointers.push_back(alive[alive.size() - kModel.size() + i].data());
        // Rank r brings the weights of the data ranks r, r + ranks, ...
        double weight = 0;
        for (int32_t q = r; q < data; q += ranks) weight += weights[static_cast<size_t>(q)];
        ctx.accumulate(pointers, weight);
      }
      results[static_cast<size_t>(r)].push_back(step(ctx));
    }
    for (size_t i = 0; i < kModel.size(); ++i) {
      const Rows rows = rows_of(kModel[i], r, ranks);
      std::copy(parts[i].begin(), parts[i].end(),
                out.parameters[i].begin() + rows.first * kModel[i].columns);
    }
  });
  for (const auto& of_rank : results) {
    EXPECT_EQ(of_rank.size(), static_cast<size_t>(kWindows));
    for (size_t t = 0; t < of_rank.size(); ++t)
      EXPECT_EQ(0, memcmp(&of_rank[t], &results[0][t], sizeof(ga_step_result))) << t;
  }
  out.results = results[0];
  return out;
}

// Full batches in float64: AdamW of the definition, with the clip of the whole gradient.
struct Reference {
  std::vector<std::vector<double>> p, m, v;
  std::vector<double> norms;
};
Reference reference(const Options& o) {
  Reference ref;
  for (size_t i = 0; i < kModel.size(); ++i) {
    const std::vector<float> start = start_of(i);
    ref.p.emplace_back(start.begin(), start.end());
    ref.m.emplace_back(start.size());
    ref.v.emplace_back(start.size());
  }
  int64_t applied = 0;
  for (int t = 0; t < kWindows; ++t) {
    std::vector<std::vector<double>> g;
    double total = 0, squares[2] = {};
    for (const auto& of_rank : o.weights)
      total += std::accumulate(of_rank.begin(), of_rank.end(), 0.0);
    for (size_t i = 0; i < kModel.size(); ++i) {
      g.emplace_back(static_cast<size_t>(kModel[i].size()));
      for (size_t r = 0; r < o.weights.size(); ++r)
        for (size_t k = 0; k < o.weights[r].size(); ++k) {
          const std::vector<float> part =
              gradient_of(i, static_cast<int32_t>(r), t, static_cast<int>(k));
          for (size_t e = 0; e < part.size(); ++e) g[i][e] += o.weights[r][k] * part[e] / total;
        }
      for (const double x : g[i]) squares[kModel[i].group] += x * x;
    }
    ref.norms.push_back(std::sqrt(squares[0] + squares[1]));
    if (t == o.bad_window) continue;
    ++applied;
    const auto factor = [](double most, double square) {
      return most > 0 ? std::min(1.0, most / (std::sqrt(square) + 1e-6)) : 1.0;
    };
    const double shared = factor(o.max_norm, o.of_group > 0 ? squares[0] : squares[0] + squares[1]);
    const double factors[] = {shared, o.of_group > 0 ? factor(o.of_group, squares[1]) : shared};
    const ga_optimizer& a = o.optimizer;
    for (size_t i = 0; i < kModel.size(); ++i)
      for (size_t e = 0; e < g[i].size(); ++e) {
        const double x = g[i][e] * factors[kModel[i].group];
        double &m = ref.m[i][e], &v = ref.v[i][e], &p = ref.p[i][e];
        m = a.beta1 * m + (1 - a.beta1) * x;
        v = a.beta2 * v + (1 - a.beta2) * x * x;
        p -= a.lr * a.weight_decay * p;
        p -= a.lr * (m / (1 - std::pow(a.beta1, applied))) /
             (std::sqrt(v / (1 - std::pow(a.beta2, applied))) + a.eps);
      }
  }
  return ref;
}

void expect_near(const Outcome& got, const Options& o) {
  const Reference want = reference(o);
  for (int t = 0; t < kWindows; ++t) {
    const double norm = want.norms[static_cast<size_t>(t)];
    const ga_step_result& r = got.results[static_cast<size_t>(t)];
    if (t == o.bad_window) {
      EXPECT_EQ(r.outcome, GA_STEP_SKIPPED_NONFINITE);
      continue;
    }
    EXPECT_EQ(r.outcome, GA_STEP_APPLIED);
    EXPECT_NEAR(r.norm, norm, norm * 1e-6) << t;
  }
  for (size_t i = 0; i < kModel.size(); ++i)
    for (size_t e = 0; e < want.p[i].size(); ++e)
      // A step of AdamW is at most lr, and here its relative error that of the gradients, some 2^-22.
      ASSERT_NEAR(got.parameters[i][e], want.p[i][e], 3e-7 + o.optimizer.lr * 2e-3)
          << kModel[i].name << '[' << e << ']';
}

Options uneven() {
  Options o;
  // Ranks with weights 1 : 4, and one without samples.
  o.weights = {{1, 2}, {4, 8}, {0, 0}, {3, 0}};
  o.optimizer.lr = 1e-3;
  return o;
}

TEST(OwnParameters, AWindowIsOneBatch) {
  for (const bool mean : {true, false}) {
    Options o = uneven();
    o.mean = mean;
    const Outcome four = run(o, 4);
    expect_near(four, o);
    EXPECT_EQ(four.results[0].weight, 18);
    EXPECT_EQ(four.results[0].micro_batches, 8);
    EXPECT_LT(four.results[0].clip_factor, 1);
  }
}

// The same reduced gradients give the same bits on every number of ranks, one included, whoever has which rows.
TEST(OwnParameters, TheBitsOfOneProcess) {
  for (const int life : {GA_GRADIENTS_CONSUMED, GA_GRADIENTS_LIVE}) {
    for (const double of_group : {0.0, 0.003}) {
      SCOPED_TRACE(testing::Message() << life << ' ' << of_group);
      Options o = uneven();
      o.mean = false;  // what a mean is depends on the number of ranks
      o.life = life;
      o.of_group = of_group;
      const Outcome one = run(o, 1);
      expect_near(one, o);
      for (const int32_t ranks : {2, 3, 4}) {
        const Outcome more = run(o, ranks);
        for (size_t i = 0; i < kModel.size(); ++i)
          EXPECT_EQ(more.parameters[i], one.parameters[i]) << ranks << ' ' << kModel[i].name;
        for (size_t t = 0; t < one.results.size(); ++t) {
          EXPECT_EQ(more.results[t].norm, one.results[t].norm);
          EXPECT_EQ(more.results[t].clip_factor, one.results[t].clip_factor);
        }
      }
    }
  }
}

TEST(OwnParameters, ANanOfOneRankSkipsTheWindowOnAll) {
  Options o = uneven();
  o.bad_window = 1;
  o.scaled = true;
  const Outcome got = run(o, 4);
  expect_near(got, o);
  EXPECT_EQ(got.results[0].loss_scale, 1024);
  EXPECT_EQ(got.results[2].loss_scale, 512);
  EXPECT_EQ(got.results[2].skipped, 1);
}

// Two data ranks, in each of which two ranks have a half of a matrix each, and all of a vector.
TEST(OwnParameters, TensorParallelAndReplicated) {
  constexpr int64_t kRows = 6, kColumns = 10, kLength = 33;
  std::vector<float> whole(kRows * kColumns), vector(kLength, 1.0f), gradient(whole.size());
  for (size_t i = 0; i < whole.size(); ++i) {
    whole[i] = 1;
    gradient[i] = std::ldexp(static_cast<float>(i % 7) - 3, -3);
  }
  const std::vector<float> of_vector(kLength, 0.25f);
  double squares = 0;
  for (const float x : gradient) squares += 4.0 * x * x;
  for (const float x : of_vector) squares += 4.0 * x * x;
  on_ranks(4, [&](int32_t r, ga_comm* comm) {
    Context ctx(summing());
    ctx.group(plain_sgd(1));
    const int32_t half = r % 2;  // its columns; ranks 0 and 1 have the first data
    std::vector<float> part(kRows * kColumns / 2), g(part.size()), v = vector;
    for (size_t k = 0; k < part.size(); ++k) {
      const size_t at = k / 5 * kColumns + k % 5 + static_cast<size_t>(half) * 5;
      part[k] = whole[at];
      g[k] = gradient[at];
    }
    const ga_param w = ctx.param(0, "w", part.data(), ref::Shape{kRows, kColumns / 2});
    const ga_param b = ctx.param(0, "b", v.data(), ref::Shape{kLength});
    const int64_t shape[] = {kRows, kColumns}, first[] = {0, half * kColumns / 2};
    ASSERT_OK(ga_param_set_part(ctx, w, shape, first, 2));
    const int64_t length = kLength, zero = 0;
    ASSERT_OK(ga_param_set_part(ctx, b, &length, &zero, 4));
    ga_comm_options options = own_parameters();
    options.data_ranks = 2;
    options.data_rank = r / 2;
    ASSERT_OK(ga_context_set_comm(ctx, comm, &options));
    // The mean over two ranks of 1.5 g and 0.5 g, with these weights: the step is 2 / 2 of it.
    for (const double of_second : {0.5, 0.75}) {
      ctx.accumulate({g.data(), of_vector.data()}, r < 2 ? 1.5 : of_second);
      if (of_second == 0.75) break;
      const ga_step_result result = step(ctx);
      EXPECT_EQ(result.weight, 2);
      EXPECT_NEAR(result.norm, std::sqrt(squares / 4), 1e-12);
      EXPECT_EQ(v[0], 1 - 0.25f);
      EXPECT_EQ(part[1], 1 - g[1]);
    }
    // Ranks with the same samples bring the same weights.
    ASSERT_OK(ga_discard(ctx));
    ctx.accumulate({g.data(), of_vector.data()}, r == 3 ? 2 : 1);
    expect_failure(ga_step(ctx, nullptr), "data_rank 1");
  });
}

// With GA_NONFINITE_IGNORE a window whose gradient has an infinity or a NaN on one rank has that norm on all.
TEST(OwnParameters, NormsOfWhatIsNotFinite) {
  for (const float bad : {INFINITY, -INFINITY, NAN}) {
    on_ranks(3, [&](int32_t r, ga_comm* comm) {
      ga_config c = summing();
      c.nonfinite = GA_NONFINITE_IGNORE;
      Context ctx(c);
      ctx.group(plain_sgd());
      std::vector<float> p(5000), g(5000, 1.0f);
      const ga_param id = ctx.param(0, "w", p.data(), ref::Shape{5000});
      const int64_t whole = 15000, first = 5000 * r;
      ASSERT_OK(ga_param_set_part(ctx, id, &whole, &first, 1));
      const ga_comm_options options = own_parameters();
      ASSERT_OK(ga_context_set_comm(ctx, comm, &options));
      if (r == 1) g[4000] = bad;
      ctx.accumulate({g.data()});
      const double norm = step(ctx).norm;
      if (std::isnan(bad))
        EXPECT_TRUE(std::isnan(norm)) << norm;
      else
        EXPECT_EQ(norm, INFINITY);
    });
  }
}

// Copies that should be alike are all looked at, though the squares of one count.
TEST(OwnParameters, ANanInACopy) {
  for (const int32_t bad : {0, 1, 2}) {
    on_ranks(3, [&](int32_t r, ga_comm* comm) {
      Context ctx(summing());
      ctx.group(plain_sgd());
      std::vector<float> p(10, 1.0f), g(10, 3.0f);
      const ga_param id = ctx.param(0, "w", p.data(), ref::Shape{10});
      const int64_t whole = 10, first = 0;
      ASSERT_OK(ga_param_set_part(ctx, id, &whole, &first, 3));
      const ga_comm_options options = own_parameters();
      ASSERT_OK(ga_context_set_comm(ctx, comm, &options));
      ctx.accumulate({g.data()});
      EXPECT_NEAR(step(ctx).norm, 3 * std::sqrt(10), 1e-12);
      const std::vector<float> before = p;
      if (r == bad) g[9] = NAN;
      ctx.accumulate({g.data()});
      EXPECT_EQ(step(ctx).outcome, GA_STEP_SKIPPED_NONFINITE);
      EXPECT_EQ(p, before);
    });
  }
}

struct Box {
  std::vector<int64_t> whole, first, shape;
  int32_t copies = 1;
};
void expect_refused(const std::vector<Box>& boxes, const char* words,
                    ga_status status = GA_ERROR_COMMUNICATION) {
  on_ranks(static_cast<int32_t>(boxes.size()), [&](int32_t r, ga_comm* comm) {
    const Box& box = boxes[static_cast<size_t>(r)];
    Context ctx(summing());
    ctx.group(plain_sgd());
    std::vector<float> p(64);
    const ga_param id = ctx.param(0, "w", p.data(), box.shape);
    ASSERT_OK(ga_param_set_part(ctx, id, box.whole.data(), box.first.data(), box.copies));
    const ga_comm_options options = own_parameters();
    expect_failure(ga_context_set_comm(ctx, comm, &options), words, status);
    // Nothing has changed: the context is alone.
    const std::vector<float> g(64, 1.0f);
    ctx.accumulate({g.data()});
    EXPECT_EQ(step(ctx).outcome, GA_STEP_APPLIED);
    EXPECT_EQ(p[0], -1);
  });
}

TEST(OwnParameters, PartsMakeUpTheWhole) {
  expect_refused({{{8, 4}, {0, 0}, {4, 4}}, {{8, 4}, {5, 0}, {3, 4}}}, "28 of its 32 elements");
  expect_refused({{{8, 4}, {0, 0}, {5, 4}}, {{8, 4}, {4, 0}, {4, 4}}}, "overlap");
  // With one that is not next to it in any order of the parts.
  expect_refused({{{8, 4}, {0, 0}, {8, 1}}, {{8, 4}, {0, 1}, {4, 3}}, {{8, 4}, {4, 0}, {4, 4}}},
                 "rank 0, [8, 1] from [0, 0], and of rank 2, [4, 4] from [4, 0], overlap");
  expect_refused({{{8, 4}, {0, 0}, {8, 4}}, {{8, 4}, {0, 0}, {8, 4}}}, "2 ranks have");
  expect_refused({{{8, 4}, {0, 0}, {4, 4}, 2}, {{8, 4}, {4, 0}, {4, 4}, 1}}, "1 rank has");
  expect_refused({{{8, 4}, {0, 0}, {4, 4}}, {{9, 4}, {4, 0}, {5, 4}}}, "[9, 4]");
}

TEST(OwnParameters, APartIsWithinTheWhole) {
  Context ctx;
  ctx.group(plain_sgd());
  std::vector<float> p(12);
  const ga_param id = ctx.param(0, "w", p.data(), ref::Shape{3, 4});
  const auto refused = [&](std::vector<int64_t> whole, std::vector<int64_t> first, int32_t copies,
                           const char* words) {
    expect_failure(ga_param_set_part(ctx, id, whole.data(), first.data(), copies), words,
                   GA_ERROR_INVALID_ARGUMENT);
  };
  refused({8, 4}, {6, 0}, 1, "[6, 9)");
  refused({8, 3}, {0, 0}, 1, "axis 1");
  refused({8, 4}, {-1, 0}, 1, "[-1, 2)");
  refused({8, 4}, {0, 0}, 0, "copies was 0");
  expect_failure(ga_param_set_part(ctx, id, nullptr, nullptr, 1), "NULL",
                 GA_ERROR_INVALID_ARGUMENT);
  EXPECT_EQ(ga_param_set_part(ctx, 5, nullptr, nullptr, 1), GA_ERROR_INVALID_ARGUMENT);
}

// What needs more than its part is refused by name, on every rank, and the others do not wait.
TEST(OwnParameters, WhatDoesNotGoTogether) {
  const auto refused = [](const std::function<void(Context&)>& set, const char* words,
                          ga_config c = summing(), ga_optimizer o = plain_sgd()) {
    on_ranks(2, [&](int32_t r, ga_comm* comm) {
      Context ctx(c);
      ctx.group(o);
      std::vector<float> p(8);
      const ga_param id = ctx.param(0, "w", p.data(), ref::Shape{2, 4});
      const int64_t whole[] = {4, 4}, first[] = {2 * r, 0};
      ASSERT_OK(ga_param_set_part(ctx, id, whole, first, 1));
      if (set) set(ctx);
      const ga_comm_options options = own_parameters();
      expect_failure(ga_context_set_comm(ctx, comm, &options), words, GA_ERROR_UNSUPPORTED);
    });
  };
  const auto clipped = [](int32_t scope, double value) {
    return [=](Context& ctx) {
      ga_clip c = clip(scope, 1);
      c.max_value = value;
      ASSERT_OK(ga_context_set_clip(ctx, &c));
    };
  };
  refused(clipped(GA_CLIP_PER_TENSOR, HUGE_VAL), "GA_CLIP_PER_TENSOR");
  refused(clipped(GA_CLIP_AGC, HUGE_VAL), "GA_CLIP_AGC");
  refused(clipped(GA_CLIP_GLOBAL, 1), "max_value");
  ga_config c = summing();
  c.gradient_kind = GA_GRADIENT_MEAN;
  refused({}, "GA_GRADIENT_SUM", c);
  c = summing();
  c.nonfinite = GA_NONFINITE_DROP_MICRO;
  refused({}, "GA_NONFINITE_DROP_MICRO", c);
  ga_optimizer o = optimizer(GA_OPTIMIZER_LARS);
  refused({}, "LARS", summing(), o);
  o = optimizer(GA_OPTIMIZER_LAMB);
  refused({}, "max_grad_norm", summing(), o);
  o = optimizer(GA_OPTIMIZER_ADAFACTOR);
  refused({}, "Adafactor", summing(), o);
}

// A part of rows of state in 8 bits has whole blocks, which are as long as the largest power of two that divides a row.
TEST(OwnParameters, BlocksOfStateAreWhole) {
  ga_optimizer coded = optimizer(GA_OPTIMIZER_ADAMW);
  coded.state_dtype = GA_STATE_8BIT;
  // [40, middle, columns], cut in two along the last axis.
  const auto join = [&](int64_t middle, int64_t columns, int64_t cut, bool fits) {
    on_ranks(2, [&](int32_t r, ga_comm* comm) {
      Context ctx(summing());
      ctx.group(coded);
      const int64_t mine = r == 0 ? cut : columns - cut;
      std::vector<float> p(static_cast<size_t>(40 * middle * mine));
      const ga_param id = ctx.param(0, "w", p.data(), ref::Shape{40, middle, mine});
      const int64_t whole[] = {40, middle, columns}, first[] = {0, 0, r * cut};
      ASSERT_OK(ga_param_set_part(ctx, id, whole, first, 1));
      const ga_comm_options options = own_parameters();
      if (!fits)
        return expect_failure(ga_context_set_comm(ctx, comm, &options), "within blocks of",
                              GA_ERROR_UNSUPPORTED);
      ASSERT_OK(ga_context_set_comm(ctx, comm, &options));
      ga_state_info info;
      ASSERT_OK(ga_state_info_init(&info, sizeof info));
      ASSERT_OK(ga_state_describe(ctx, id, 0, &info));
      EXPECT_EQ(info.dtype, middle * columns % 16 == 0 ? GA_U8 : GA_F32) << columns;
    });
  };
  join(1, 512, 256, true);
  join(1, 512, 128, false);
  join(1, 512, 300, false);
  join(1, 192, 64, true);
  join(1, 192, 96, false);
  join(2, 96, 64, false);  // in the second of its indices, the axis begins within a block
  join(2, 128, 64, false);
  join(3, 128, 64, false);
  join(1, 300, 4, true);  // f32: its rows have no whole blocks

  Context ctx(summing());
  ctx.group(coded);
  std::vector<float> p(40 * 192), g(40 * 192, 1.0f);
  const ga_param id = ctx.param(0, "w", p.data(), ref::Shape{40, 192});
  ctx.accumulate({g.data()}, 1);
  step(ctx);
  const int64_t whole[] = {40, 192}, first[] = {0, 0};
  expect_failure(ga_param_set_part(ctx, id, whole, first, 1), "before the first window",
                 GA_ERROR_INVALID_STATE);
  ctx.accumulate({g.data()}, 1);
  step(ctx);
}

// A change that only one rank has made, or an option of one, is named by the next step, and nothing is lost.
TEST(OwnParameters, RanksThatDiffer) {
  on_ranks(3, [&](int32_t r, ga_comm* comm) {
    Context ctx(summing());
    ctx.group(plain_sgd(0.5));
    std::vector<float> p(4, 1.0f), q(4, 1.0f);
    const std::vector<float> g(4, 1.0f);
    const ga_param id = ctx.param(0, "w", p.data(), ref::Shape{4});
    const int64_t whole = 12, first = 4 * r;
    ASSERT_OK(ga_param_set_part(ctx, id, &whole, &first, 1));
    const ga_comm_options options = own_parameters();
    ASSERT_OK(ga_context_set_comm(ctx, comm, &options));
    ASSERT_OK(ga_group_set_lr(ctx, 0, r == 1 ? 0.25 : 0.5));
    ctx.accumulate({g.data()});
    expect_failure(ga_step(ctx, nullptr), "lr");
    EXPECT_EQ(p[0], 1);
    ASSERT_OK(ga_group_set_lr(ctx, 0, 0.5));
    EXPECT_EQ(step(ctx).outcome, GA_STEP_APPLIED) << "the window was kept";
    // The sum is 3 times the mean, and the weights are 3 in all.
    EXPECT_EQ(p[0], 0.5);

    // Another parameter comes, of which all have a copy, whose squares count once.
    const ga_param late = ctx.param(0, "late", q.data(), ref::Shape{4});
    const int64_t four = 4, zero = 0;
    std::vector<const void*> pointers = {g.data(), g.data()};
    ctx.accumulate(pointers);
    expect_failure(ga_step(ctx, nullptr), "3 ranks have");
    ASSERT_OK(ga_discard(ctx));
    ASSERT_OK(ga_param_set_part(ctx, late, &four, &zero, 3));
    ctx.accumulate(pointers);
    const ga_step_result result = step(ctx);
    EXPECT_EQ(result.outcome, GA_STEP_APPLIED);
    EXPECT_NEAR(result.norm, 4, 1e-12);
    EXPECT_EQ(q[0], 0.5);

    // One discards what the others step.
    ctx.accumulate(pointers);
    const std::vector<float> before = p;
    if (r == 0) {
      ASSERT_OK(ga_discard(ctx));
    } else {
      EXPECT_EQ(step(ctx).outcome, GA_STEP_SKIPPED_DISCARD);
    }
    EXPECT_EQ(p, before);
    ctx.accumulate(pointers);
    EXPECT_EQ(step(ctx).outcome, GA_STEP_APPLIED);
  });
}

TEST(OwnParameters, MoreGroupsThanAMessageHas) {
  std::vector<double> norms(2);
  on_ranks(2, [&](int32_t r, ga_comm* comm) {
    Context ctx(summing());
    std::vector<std::vector<float>> p(23, std::vector<float>(2, 1.0f));
    const std::vector<float> g = {3, 4};
    std::vector<const void*> pointers;
    for (size_t k = 0; k < p.size(); ++k) {
      ctx.group(plain_sgd());
      const std::string name = std::to_string(k) + (r == 0 ? "a" : "b");
      ctx.param(static_cast<ga_group>(k), name, p[k].data(), ref::Shape{2});
      pointers.push_back(g.data());
    }
    const ga_comm_options options = own_parameters();
    ASSERT_OK(ga_context_set_comm(ctx, comm, &options));
    ctx.accumulate(pointers);
    norms[static_cast<size_t>(r)] = step(ctx).norm;
  });
  EXPECT_EQ(norms[0], std::sqrt(46 * 25.0));
  EXPECT_EQ(norms[1], norms[0]);
}

// Each rank's state goes on where it was saved, in the middle of a window too; one path for two is refused.
TEST(OwnParameters, StateOfEachRank) {
  const std::string folder = testing::TempDir();
  on_ranks(2, [&](int32_t r, ga_comm* comm) {
    const auto path = [&](int32_t rank) { return folder + "own_" + std::to_string(rank); };
    std::vector<float> p(500, 1.0f), q(500, 1.0f);
    const ga_comm_options options = own_parameters();
    const auto make = [&](Context& ctx, std::vector<float>& data) {
      ctx.group(optimizer(GA_OPTIMIZER_ADAMW));
      const ga_param id = ctx.param(0, "w", data.data(), ref::Shape{500});
      const int64_t whole = 1000, first = 500 * r;
      ASSERT_OK(ga_param_set_part(ctx, id, &whole, &first, 1));
      const ga_clip c = clip(GA_CLIP_GLOBAL, 0.5);
      ASSERT_OK(ga_context_set_clip(ctx, &c));
    };
    const auto accumulate_one = [&](Context& ctx, int t) {
      const Tensor g = random_tensor(GA_F32, 500, static_cast<uint64_t>(10 * t + r));
      accumulate(ctx, {&g});
    };
    Context ctx(summing());
    make(ctx, p);
    ASSERT_OK(ga_context_set_comm(ctx, comm, &options));
    accumulate_one(ctx, 0);
    EXPECT_EQ(step(ctx).outcome, GA_STEP_APPLIED);
    accumulate_one(ctx, 1);
    ASSERT_OK(ga_save(ctx, path(r).c_str(), nullptr));
    accumulate_one(ctx, 2);
    const ga_step_result want = step(ctx);
    ASSERT_OK(ga_context_set_comm(ctx, nullptr, nullptr));

    Context other(summing());
    make(other, q);
    expect_failure(ga_load(other, path(r).c_str(), nullptr), "data rank",
                   GA_ERROR_INVALID_ARGUMENT);
    ASSERT_OK(ga_context_set_comm(other, comm, &options));
    ASSERT_OK(ga_load(other, path(r).c_str(), nullptr));
    accumulate_one(other, 2);
    const ga_step_result got = step(other);
    EXPECT_EQ(got.norm, want.norm);
    EXPECT_EQ(got.windows, want.windows);
    EXPECT_EQ(q, p);
  });
}

}  // namespace
}  // namespace ga::test
