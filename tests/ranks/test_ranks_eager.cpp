// SPDX-License-Identifier: Apache-2.0
//
// ga_config.eager over ranks: a parameter is updated once its gradient has been summed in the background, and
// parameters, state and results are those of the same windows without eager, bit for bit, on every rank. Whatever
// fails leaves parameters and state as they were.
#include <atomic>
#include <chrono>

#include "formats.hpp"
#include "ranks.hpp"
#include "small_run.hpp"
#include "ways.hpp"

namespace ga::test {

using namespace over_ranks;

namespace {

ga_comm_options overlapped(int32_t shard = GA_SHARD_NONE) {
  ga_comm_options o = comm_options();
  o.overlap = 1;
  o.shard = shard;
  return o;
}

ga_config eager_config(int32_t threads = 0) {
  ga_config c = config();
  c.eager = 1;
  c.eager_threads = threads;
  return c;
}

ga_status ready(ga_context* ctx, ga_param id) { return ga_params_ready(ctx, &id, 1); }

void sleep_for(int milliseconds) {
  std::this_thread::sleep_for(std::chrono::milliseconds(milliseconds));
}

Bytes bytes_of(const Tensor& t) {
  const auto* const begin = static_cast<const char*>(t.data());
  return Bytes(begin, begin + static_cast<size_t>(t.count()) * t.size());
}

// Where threads of ranks wait until all have come.
class Meeting {
 public:
  explicit Meeting(int ranks) : ranks_(ranks) {}
  void wait() {
    const int all = (come_++ / ranks_ + 1) * ranks_;
    ASSERT_TRUE(comes_true([&] { return come_ >= all; }));
  }

 private:
  const int ranks_;
  std::atomic<int> come_{0};
};

// ---- The same bits ------------------------------------------------------------------------------

struct Way {
  std::string name;
  ways::Configure configure = ways::as_is;
  ways::Prepare prepare = ways::as_is;
  bool redone = false;  // every window is clipped
};

struct Kind {
  int32_t dtype, gradient_dtype, accumulator_dtype, master, rounding, early;
};
constexpr Kind kKinds[] = {{GA_F32, GA_F32, GA_F32, GA_MASTER_F32, GA_ROUND_NEAREST, 0},
                           {GA_BF16, GA_BF16, GA_F32, GA_MASTER_F32, GA_ROUND_NEAREST, 1},
                           {GA_F64, GA_F64, GA_F64, GA_MASTER_F32, GA_ROUND_NEAREST, 0},
                           {GA_F16, GA_F32, GA_BF16, GA_MASTER_NONE, GA_ROUND_STOCHASTIC, 0}};

struct Layers {
  int32_t ranks;
  int32_t shard;
  int32_t eager_threads;  // -1: not eager
  int wait;               // milliseconds before ga_step
  int callers = 1;        // threads of a rank that bring gradients at once
};

// What the windows leave on a rank.
struct Left {
  std::vector<Bytes> files, parameters;
  std::vector<double> results;
  int64_t eager = 0, redone = 0;

  void expect_same(const Left& other) const {
    ASSERT_EQ(parameters.size(), other.parameters.size());
    for (size_t t = 0; t < parameters.size(); ++t)
      EXPECT_TRUE(parameters[t] == other.parameters[t]) << "parameters after window " << t;
    for (size_t k = 0; k < files.size(); ++k)
      EXPECT_TRUE(files[k] == other.files[k]) << "state after window " << 2 * k + 1;
    EXPECT_EQ(memcmp(results.data(), other.results.data(), results.size() * sizeof(double)), 0);
  }
};

constexpr int kWindows = 6;

// A parameter for each optimizer, of which some are cut into pieces, and one travels where it lies. Window 2 has
// a NaN on one rank, in the gradient that comes last; window 3 is discarded by one rank; to window 4 the last
// rank brings nothing. Ranks bring other weights, and in window 1 other numbers of micro-batches.
// Parameter 1 has a gradient on rank 0 alone, parameter 2 in window 0 alone.
class Rank {
 public:
  Rank(const Way& way, const Kind& kind, const Layers& l, int32_t rank, ga_comm* comm)
      : layers_(l), rank_(rank) {
    ga_config c = config();
    way.configure(c);
    c.eager = l.eager_threads >= 0;
    c.eager_threads = std::max(l.eager_threads, 0);
    EXPECT_OK(ga_context_create(&c, &ctx_));
    ga_param_options o = options(kind.gradient_dtype);
    o.accumulator_dtype = kind.accumulator_dtype;
    o.master = kind.master;
    o.rounding = kind.rounding;
    o.write_early = kind.early;
    auto optimizers = good_optimizers();
    for (size_t i = 0; i < optimizers.size(); ++i) {
      ga_optimizer& optimizer = optimizers[i].optimizer;
      if (!way.redone && optimizer.max_grad_norm > 0) optimizer.max_grad_norm = 1e6;
      if (kind.dtype == GA_F64 && optimizer.state_dtype != 0) continue;
      ga_group group = -1;
      EXPECT_OK(ga_group_add(ctx_, &optimizer, &group));
      const auto n = static_cast<int64_t>(i);
      const int64_t count = i == 4        ? 140002
                            : i == 13     ? 144000
                            : i % 18 == 0 ? 65536 + 1031 + n
                                          : 37 * n + 5;
      const int64_t shape[] = {count % 2 == 0 ? 2 : 1, count % 2 == 0 ? count / 2 : count};
      params_.push_back(std::make_unique<Tensor>(random_tensor(kind.dtype, count, 100 + i)));
      EXPECT_OK(ga_param_add(ctx_, group, ("p" + std::to_string(i)).c_str(), params_.back()->data(),
                             kind.dtype, 2, shape, &o, nullptr));
      for (uint64_t k = 0; k < 2; ++k)
        gradients_[k].push_back(std::make_unique<Tensor>(random_tensor(
            kind.gradient_dtype, count, 1000 * k + 300 * static_cast<uint64_t>(rank + 1) + i)));
    }
    way.prepare(ctx_);
    const ga_comm_options options = overlapped(l.shard);
    EXPECT_OK(ga_context_set_comm(ctx_, comm, &options));
  }
  ~Rank() { ga_context_destroy(ctx_); }
  Rank(const Rank&) = delete;
  Rank& operator=(const Rank&) = delete;

  Left windows() {
    Left left;
    for (int t = 0; t < kWindows; ++t) {
      const bool none = t == 4 && rank_ > 0 && rank_ == layers_.ranks - 1;
      if (!none) window(t);
      if (layers_.eager_threads >= 0) sleep_for(layers_.wait);
      if (!none) {
        EXPECT_OK(ga_params_ready(ctx_, nullptr, 0));
      }
      if (t == 3 && rank_ == 0) {
        EXPECT_OK(ga_discard(ctx_));
      } else {
        const ga_step_result r = step(ctx_);
        for (const double x : {static_cast<double>(r.outcome), r.norm, r.clip_factor, r.lr,
                               r.loss_scale, static_cast<double>(r.steps), r.noise_scale, r.weight})
          left.results.push_back(x);
        left.eager += r.eager;
        left.redone += r.eager_redone;
      }
      if (t % 2 == 1) left.files.push_back(saved(ctx_));
      Bytes all;
      for (const auto& p : params_) {
        const Bytes bytes = bytes_of(*p);
        all.insert(all.end(), bytes.begin(), bytes.end());
      }
      left.parameters.push_back(all);
    }
    return left;
  }

 private:
  void window(int t) {
    const int micros = t == 1 && rank_ == 0 ? 2 : 1;
    for (int m = 0; m < micros; ++m) {
      const bool last = m == micros - 1;
      EXPECT_OK(ga_micro_begin(ctx_, -1, 1 + 0.5 * rank_ + 0.25 * m,
                               MicroOptions(0, last ? GA_MICRO_LAST : 0)));
      std::vector<std::thread> others;
      for (int k = 1; k < layers_.callers; ++k) others.emplace_back([=] { bring(t, m, last, k); });
      bring(t, m, last, 0);
      for (std::thread& other : others) other.join();
      EXPECT_OK(ga_micro_end(ctx_));
    }
  }

  // The gradients that one thread brings.
  void bring(int t, int m, bool last, int caller) {
    for (size_t i = params_.size(); i-- > 0;) {
      if (i % static_cast<size_t>(layers_.callers) != static_cast<size_t>(caller)) continue;
      const auto id = static_cast<ga_param>(i);
      const bool brings = i == 1 ? rank_ == 0 : i == 2 ? t == 0 : true;
      Tensor& g = *gradients_[(t + m) % 2][i];
      const double end = g.get(g.count() - 1);
      if (t == 2 && i == 0 && rank_ == layers_.ranks - 1) g.set(g.count() - 1, NAN);
      if (brings) {
        EXPECT_OK(ga_accumulate_part(ctx_, id, g.data()));
      }
      g.set(g.count() - 1, end);
      if (last) {
        EXPECT_OK(ready(ctx_, id));
      }
    }
  }

  const Layers layers_;
  const int32_t rank_;
  ga_context* ctx_ = nullptr;
  std::vector<std::unique_ptr<Tensor>> params_, gradients_[2];
};

const std::vector<Way>& all_ways() {
  static const std::vector<Way> list = [] {
    using namespace ways;
    std::vector<Way> all;
    all.push_back({"Default"});
    all.push_back({"Clipped", as_is, clipped(GA_CLIP_GLOBAL, 0.5), true});
    all.push_back({"PerTensor", as_is, clipped(GA_CLIP_PER_TENSOR, 0.25), true});
    all.push_back({"Units", as_is, clipped(GA_CLIP_AGC, 0)});
    all.push_back({"ByValueAndNorm", as_is, clipped(GA_CLIP_GLOBAL, 1e6, GA_FLAVOR_KERAS, 0.125)});
    all.push_back({"IgnoredAndAveraged", ignoring, averaged});
    all.push_back({"Scaled", [](ga_config& c) { c.num_threads = 2; }, scaled});
    all.push_back({"ZeroForMissing", [](ga_config& c) { c.missing = GA_MISSING_ZERO; }});
    all.push_back(
        {"SumOfRunningMeans", [](ga_config& c) { c.accumulation = GA_ACCUMULATE_RUNNING_MEAN; }});
    return all;
  }();
  return list;
}

// The first two ways with every kind and number of threads, the others with some.
struct Case {
  size_t way, kind;
};
constexpr size_t kFull = 2;

std::vector<Case> cases() {
  std::vector<Case> all;
  for (size_t way = 0; way < all_ways().size(); ++way)
    for (size_t kind = 0; kind < (way < kFull ? std::size(kKinds) : 2); ++kind)
      all.push_back({way, kind});
  return all;
}

std::vector<Left> run(const Way& way, const Kind& kind, const Layers& l) {
  std::vector<Left> left(static_cast<size_t>(l.ranks));
  on_ranks(l.ranks, [&](int32_t r, ga_comm* comm) {
    left[static_cast<size_t>(r)] = Rank(way, kind, l, r, comm).windows();
  });
  return left;
}

class RanksEagerBits : public testing::TestWithParam<Case> {};
INSTANTIATE_TEST_SUITE_P(RanksEager, RanksEagerBits, testing::ValuesIn(cases()),
                         [](const auto& info) {
                           return all_ways()[info.param.way].name + "_" +
                                  format(kKinds[info.param.kind].dtype).name;
                         });

TEST_P(RanksEagerBits, AreThoseOfTheStep) {
  const Way& way = all_ways()[GetParam().way];
  const Kind& kind = kKinds[GetParam().kind];
  for (const int32_t ranks : {1, 2, 3})
    for (const int32_t shard : {GA_SHARD_NONE, GA_SHARD_OPTIMIZER}) {
      const std::vector<Left> plain = run(way, kind, {ranks, shard, -1, 0});
      for (const int32_t threads : {0, 1, 2}) {
        const auto turn = static_cast<size_t>(ranks + shard + threads);
        if (GetParam().way >= kFull && (turn + GetParam().way) % 3 != 0) continue;
        SCOPED_TRACE(std::to_string(ranks) + " ranks, sharded " + std::to_string(shard) + ", " +
                     std::to_string(threads) + " threads");
        int64_t eager = 0, redone = 0;
        const bool waits =
            kind.dtype == GA_F64 || (way.name == "Units" && shard == GA_SHARD_OPTIMIZER);
        // What has been summed by the end of a window depends on the load of the machine. A window that is skipped,
        // as window 2 is, rolls nothing back.
        const auto enough = [&] { return eager > 0 && (redone > 0 || !way.redone); };
        for (int wait = 2; !enough() && wait < 2000; wait *= 8) {
          const std::vector<Left> ahead = run(way, kind, {ranks, shard, threads, wait});
          for (size_t r = 0; r < ahead.size(); ++r) {
            ahead[r].expect_same(plain[r]);
            eager += ahead[r].eager;
            redone += ahead[r].redone;
          }
          if (waits) break;
        }
        EXPECT_EQ(eager > 0, !waits);
        EXPECT_EQ(redone > 0, way.redone && !waits) << redone << " of " << eager;
      }
    }
}

// Two threads of every rank bring gradients at once, and on one of them, or on one of the library, what has been
// summed is updated. Threads do the same for both ways.
TEST(RanksEager, SeveralThreadsHaveTheBitsOfOne) {
  for (size_t way = 0; way < (kWatchesThreads ? 1 : 2); ++way)
    for (const int32_t shard : {GA_SHARD_NONE, GA_SHARD_OPTIMIZER}) {
      const Way& w = all_ways()[way];
      const Kind& kind = kKinds[way];
      const std::vector<Left> plain = run(w, kind, {2, shard, -1, 0});
      for (const int32_t threads : {0, 1}) {
        if (kWatchesThreads && threads != (shard == GA_SHARD_OPTIMIZER)) continue;
        SCOPED_TRACE(w.name + ", sharded " + std::to_string(shard) + ", " +
                     std::to_string(threads) + " threads");
        int64_t eager = 0;
        for (int wait = 2; eager == 0 && wait < 2000; wait *= 8) {
          const std::vector<Left> ahead = run(w, kind, {2, shard, threads, wait, 2});
          for (size_t r = 0; r < ahead.size(); ++r) {
            ahead[r].expect_same(plain[r]);
            eager += ahead[r].eager;
          }
        }
        EXPECT_GT(eager, 0);
      }
    }
}

// ---- What a program sees ------------------------------------------------------------------------

// Two parameters of bf16, each of which travels in a slice of its own among up to 3 ranks. They are written early
// unless told otherwise.
struct Pair {
  static constexpr int64_t kCount = 16 * 3 * 6000;
  Tensor p = random_tensor(GA_BF16, kCount, 1), q = random_tensor(GA_BF16, kCount, 2);
  const Tensor g = random_tensor(GA_BF16, kCount, 3);
  int32_t early = 1;

  void add_to(Context& ctx) {
    ga_optimizer sgd = plain_sgd(0.5);
    sgd.momentum = 0.5;
    const ga_group group = ctx.group(sgd);
    ga_param_options o = options(GA_BF16);
    o.write_early = early;
    ASSERT_OK(ga_param_add(ctx, group, "p", p.data(), GA_BF16, 1, &kCount, &o, nullptr));
    ASSERT_OK(ga_param_add(ctx, group, "q", q.data(), GA_BF16, 1, &kCount, &o, nullptr));
  }
  void part(ga_context* ctx, ga_param id) const {
    ASSERT_OK(ga_accumulate_part(ctx, id, g.data()));
  }
  static void begin(ga_context* ctx) {
    ASSERT_OK(ga_micro_begin(ctx, -1, 1, MicroOptions(0, GA_MICRO_LAST)));
  }
  // What a rank keeps of state that is whole on it.
  static std::vector<float> momentum(ga_context* ctx, ga_param id) {
    std::vector<float> m(kCount);
    EXPECT_OK(ga_state_get(ctx, id, "momentum_buffer", m.data(), GA_F32, kCount));
    return m;
  }
  // Waits until q has been updated; by the calling thread, which alone may look at it meanwhile.
  void wait_for_q(ga_context* ctx) const {
    const Bytes before = bytes_of(q);
    ASSERT_OK(ready(ctx, 1));
    ASSERT_TRUE(comes_true([&] {
      EXPECT_OK(ga_params_ready(ctx, nullptr, 0));
      return bytes_of(q) != before;
    }));
  }
};

TEST(RanksEager, WhatIsSummedIsUpdatedBeforeTheStep) {
  for (const int32_t shard : {GA_SHARD_NONE, GA_SHARD_OPTIMIZER})
    for (const int32_t ranks : {1, 3}) {
      std::vector<Bytes> written(static_cast<size_t>(ranks));
      on_ranks(ranks, [&](int32_t r, ga_comm* comm) {
        Pair pair;
        Context ctx(eager_config());
        pair.add_to(ctx);
        const ga_comm_options o = overlapped(shard);
        ASSERT_OK(ga_context_set_comm(ctx, comm, &o));
        for (int w = 0; w < 3; ++w) {
          Pair::begin(ctx);
          pair.part(ctx, 1);
          const Bytes before = bytes_of(pair.p);
          pair.wait_for_q(ctx);
          const Bytes early = bytes_of(pair.q);
          pair.part(ctx, 0);
          EXPECT_EQ(bytes_of(pair.p), before);
          ASSERT_OK(ga_micro_end(ctx));
          const ga_step_result result = step(ctx);
          EXPECT_EQ(result.outcome, GA_STEP_APPLIED);
          EXPECT_EQ(result.eager, 1);
          EXPECT_EQ(result.eager_redone, 0);
          EXPECT_NE(bytes_of(pair.p), before);
          EXPECT_EQ(bytes_of(pair.q) == early, shard == GA_SHARD_NONE || ranks == 1);
        }
        written[static_cast<size_t>(r)] = bytes_of(pair.q);
      });
      for (const Bytes& q : written) EXPECT_EQ(q, written[0]);
    }
}

TEST(RanksEager, WithoutOverlapUpdatesWait) {
  OneRank comm;
  Pair pair;
  Context ctx(eager_config());
  pair.add_to(ctx);
  ASSERT_OK(ga_context_set_comm(ctx, comm, nullptr));
  ASSERT_OK(ga_prepare(ctx));
  EXPECT_EQ(memory(ctx).eager, 0);
  Pair::begin(ctx);
  pair.part(ctx, 1);
  ASSERT_OK(ready(ctx, 1));
  sleep_for(20);
  ASSERT_OK(ga_params_ready(ctx, nullptr, 0));
  ASSERT_OK(ga_micro_end(ctx));
  EXPECT_EQ(step(ctx).eager, 0);

  const ga_comm_options o = overlapped();
  ASSERT_OK(ga_context_set_comm(ctx, nullptr, nullptr));
  ASSERT_OK(ga_context_set_comm(ctx, comm, &o));
  EXPECT_GT(memory(ctx).eager, 0);
  Pair::begin(ctx);
  pair.part(ctx, 1);
  pair.wait_for_q(ctx);
  ASSERT_OK(ga_micro_end(ctx));
  EXPECT_EQ(step(ctx).eager, 1);
}

// IGNORE leaves a context alone nothing to decide, but another rank may discard the window.
TEST(RanksEager, NothingIsUpdatedInPlace) {
  for (const int32_t threads : {0, 1}) {
    OneRank comm;
    ga_config c = eager_config(threads);
    c.nonfinite = GA_NONFINITE_IGNORE;
    Pair pair;
    pair.early = 0;
    Context ctx(c);
    pair.add_to(ctx);
    const ga_comm_options o = overlapped();
    ASSERT_OK(ga_context_set_comm(ctx, comm, &o));
    const Bytes before = bytes_of(pair.q);
    int64_t eager = 0;
    for (int wait = 5; eager == 0 && wait < 4000; wait *= 2) {
      Pair::begin(ctx);
      pair.part(ctx, 1);
      ASSERT_OK(ready(ctx, 1));
      sleep_for(wait);
      ASSERT_OK(ga_params_ready(ctx, nullptr, 0));
      ASSERT_OK(ga_micro_end(ctx));
      ASSERT_OK(ga_discard(ctx));
      EXPECT_EQ(bytes_of(pair.q), before);
      EXPECT_EQ(Pair::momentum(ctx, 1), std::vector<float>(Pair::kCount, 0));
      Pair::begin(ctx);
      pair.part(ctx, 1);
      ASSERT_OK(ready(ctx, 1));
      sleep_for(wait);
      ASSERT_OK(ga_params_ready(ctx, nullptr, 0));
      ASSERT_OK(ga_micro_end(ctx));
      ASSERT_OK(ga_group_set_lr(ctx, 0, 0));  // so that the next round finds the same
      eager += step(ctx).eager;
      ASSERT_OK(ga_state_reset(ctx, 1));
      ASSERT_OK(ga_group_set_lr(ctx, 0, 0.5));
    }
    EXPECT_GT(eager, 0) << threads;
  }
}

// Every rank changes the learning rate after its update has begun with the one of before.
TEST(RanksEager, AChangeOfOptionsHasTheStepComputeAnew) {
  std::vector<Bytes> left;
  for (const int32_t threads : {-1, 0, 1}) {
    std::vector<Bytes> of_ranks(2);
    on_ranks(2, [&](int32_t r, ga_comm* comm) {
      Pair pair;
      pair.early = threads == 0;
      Context ctx(threads < 0 ? config() : eager_config(threads));
      pair.add_to(ctx);
      const ga_comm_options o = overlapped();
      ASSERT_OK(ga_context_set_comm(ctx, comm, &o));
      for (int w = 0; w < 2; ++w) {
        Pair::begin(ctx);
        pair.part(ctx, 1);
        if (threads == 0)
          pair.wait_for_q(ctx);
        else
          ASSERT_OK(ready(ctx, 1));
        ASSERT_OK(ga_group_set_lr(ctx, 0, 0.25 * (w + 1)));
        pair.part(ctx, 0);
        ASSERT_OK(ready(ctx, 0));
        ASSERT_OK(ga_micro_end(ctx));
        const ga_step_result result = step(ctx);
        EXPECT_EQ(result.outcome, GA_STEP_APPLIED);
        EXPECT_EQ(result.eager_redone, result.eager);
        if (threads == 0) {
          EXPECT_EQ(result.eager, 1);
        }
      }
      Bytes& all = of_ranks[static_cast<size_t>(r)];
      all = saved(ctx);
      for (const Tensor* t : {&pair.p, &pair.q}) {
        const Bytes bytes = bytes_of(*t);
        all.insert(all.end(), bytes.begin(), bytes.end());
      }
    });
    EXPECT_EQ(of_ranks[0], of_ranks[1]);
    left.push_back(of_ranks[0]);
  }
  // write_early is an option of the parameter, which a file has.
  EXPECT_EQ(left[0].size(), left[2].size());
  EXPECT_EQ(left[0], left[2]);
  const auto parameters = [](const Bytes& all) {
    return Bytes(all.end() - static_cast<ptrdiff_t>(4 * Pair::kCount), all.end());
  };
  EXPECT_EQ(parameters(left[0]), parameters(left[1]));
}

TEST(RanksEager, RanksNeedNotBeEagerAlike) {
  std::vector<Bytes> left(3);
  on_ranks(3, [&](int32_t r, ga_comm* comm) {
    Pair pair;
    Context ctx(r == 0 ? config() : eager_config(r - 1));
    pair.early = 0;
    pair.add_to(ctx);
    const ga_comm_options o = overlapped(GA_SHARD_OPTIMIZER);
    ASSERT_OK(ga_context_set_comm(ctx, comm, &o));
    for (int w = 0; w < 3; ++w) {
      Pair::begin(ctx);
      pair.part(ctx, 1);
      ASSERT_OK(ready(ctx, 1));
      sleep_for(5);
      pair.part(ctx, 0);
      ASSERT_OK(ready(ctx, 0));
      ASSERT_OK(ga_micro_end(ctx));
      EXPECT_EQ(step(ctx).outcome, GA_STEP_APPLIED);
    }
    left[static_cast<size_t>(r)] = bytes_of(pair.q);
  });
  EXPECT_EQ(left[0], left[1]);
  EXPECT_EQ(left[0], left[2]);
}

// The parameters that are compared are those of before the window.
TEST(RanksEager, RanksThatCompareTheirStateWriteNothingEarly) {
  on_ranks(2, [&](int32_t r, ga_comm* comm) {
    Pair pair;
    Context ctx(eager_config());
    pair.add_to(ctx);
    ga_comm_options o = overlapped();
    o.check_every = 2;
    ASSERT_OK(ga_context_set_comm(ctx, comm, &o));
    for (int w = 0; w < 5; ++w) {
      Pair::begin(ctx);
      pair.part(ctx, 1);
      if (r == 0) {
        if (w % 2 == 0) {
          ASSERT_OK(ready(ctx, 1));
          sleep_for(20);
          ASSERT_OK(ga_params_ready(ctx, nullptr, 0));
        } else {
          pair.wait_for_q(ctx);
        }
      } else {
        ASSERT_OK(ready(ctx, 1));
      }
      ASSERT_OK(ga_micro_end(ctx));
      EXPECT_EQ(step(ctx).outcome, GA_STEP_APPLIED);
    }
  });
}

// Once in every window that ga_step ends, a discard by another rank included.
TEST(RanksEager, AParameterIsTold) {
  on_ranks(2, [&](int32_t r, ga_comm* comm) {
    std::vector<ga_param> done;
    ga_config c = eager_config(1);
    c.on_param_done = [](void* user, ga_param id) {
      static_cast<std::vector<ga_param>*>(user)->push_back(id);
    };
    c.on_param_done_user = &done;
    Pair pair;
    Context ctx(c);
    pair.add_to(ctx);
    const ga_comm_options o = overlapped();
    ASSERT_OK(ga_context_set_comm(ctx, comm, &o));
    for (int w = 0; w < 3; ++w) {
      Pair::begin(ctx);
      pair.part(ctx, 1);
      ASSERT_OK(ready(ctx, 1));
      pair.part(ctx, 0);
      if (w != 2) {
        ASSERT_OK(ready(ctx, 0));
      }
      ASSERT_OK(ga_micro_end(ctx));
      EXPECT_TRUE(done.empty());
      if (w == 1 && r == 1) {
        ASSERT_OK(ga_discard(ctx));
        EXPECT_TRUE(done.empty());
        continue;
      }
      EXPECT_EQ(step(ctx).outcome, w == 1 ? GA_STEP_SKIPPED_DISCARD : GA_STEP_APPLIED);
      EXPECT_EQ(done, w == 2 ? std::vector<ga_param>{1} : (std::vector<ga_param>{1, 0}));
      done.clear();
    }
  });
}

// ---- What fails ---------------------------------------------------------------------------------

// The transport fails in each of the calls of a window. What was written early is put back by ga_step itself.
TEST(RanksEager, AFailedExchangeLeavesEverythingAsItWas) {
  for (const int32_t threads : {0, 1}) {
    bool failed = true;
    for (int at = 0; failed; ++at) {
      SCOPED_TRACE(std::to_string(threads) + " threads, call " + std::to_string(at));
      ASSERT_LT(at, 30);
      OneRank comm;
      Pair pair;
      Context ctx(eager_config(threads));
      pair.add_to(ctx);
      const ga_comm_options o = overlapped();
      ASSERT_OK(ga_context_set_comm(ctx, comm, &o));
      for (int w = 0; w < 2; ++w) {
        const Bytes p = bytes_of(pair.p), q = bytes_of(pair.q);
        const auto momentum = Pair::momentum(ctx, 1);
        if (w == 1) comm.fail_at = comm.calls + at;
        const int first = comm.calls;
        Pair::begin(ctx);
        pair.part(ctx, 1);
        // Three calls sum q: the agreement, and two for its slice.
        if (threads == 0 && (w == 0 || at >= 3))
          pair.wait_for_q(ctx);
        else
          ASSERT_OK(ready(ctx, 1));
        if (threads == 1) {
          ASSERT_TRUE(comes_true([&] { return comm.calls >= first + (w == 0 ? 3 : 1); }));
          sleep_for(2);
        }
        pair.part(ctx, 0);
        ASSERT_OK(ready(ctx, 0));
        ASSERT_OK(ga_micro_end(ctx));
        const ga_status status = ga_step(ctx, nullptr);
        if (w == 0) {
          ASSERT_EQ(status, GA_OK);
          continue;
        }
        failed = status != GA_OK;
        if (!failed) break;
        expect_failure(status, "the cable is out (42)");
        EXPECT_EQ(window(ctx).state, at == 0 ? GA_WINDOW_FULL : GA_WINDOW_INVALID);
        EXPECT_TRUE(bytes_of(pair.p) == p);
        EXPECT_TRUE(bytes_of(pair.q) == q);
        ASSERT_OK(ga_discard(ctx));
        ASSERT_OK(ga_context_set_comm(ctx, nullptr, nullptr));
        EXPECT_TRUE(bytes_of(pair.q) == q);
        EXPECT_TRUE(Pair::momentum(ctx, 1) == momentum);
        Pair::begin(ctx);
        pair.part(ctx, 1);
        ASSERT_OK(ready(ctx, 1));
        ASSERT_OK(ga_micro_end(ctx));
        EXPECT_EQ(step(ctx).steps, 2);
      }
    }
  }
}

// GA_NONFINITE_FAIL keeps the window, which ga_discard takes back.
TEST(RanksEager, AWindowThatIsRejectedLeavesEverythingAsItWas) {
  on_ranks(2, [&](int32_t r, ga_comm* comm) {
    ga_config c = eager_config();
    c.nonfinite = GA_NONFINITE_FAIL;
    Pair pair;
    Context ctx(c);
    pair.add_to(ctx);
    const ga_comm_options o = overlapped();
    ASSERT_OK(ga_context_set_comm(ctx, comm, &o));
    const Bytes p = bytes_of(pair.p), q = bytes_of(pair.q);
    for (const bool bad : {true, false}) {
      Pair::begin(ctx);
      pair.part(ctx, 1);
      pair.wait_for_q(ctx);
      Tensor last = pair.g;
      if (bad && r == 1) last.set(5, INFINITY);
      ASSERT_OK(ga_accumulate_part(ctx, 0, last.data()));
      ASSERT_OK(ready(ctx, 0));
      ASSERT_OK(ga_micro_end(ctx));
      if (!bad) {
        EXPECT_EQ(step(ctx).eager_redone, 0);
        EXPECT_FALSE(bytes_of(pair.q) == q);
        continue;
      }
      for (int tries = 0; tries < 2; ++tries)
        expect_failure(ga_step(ctx, nullptr), "parameter \"p\"", GA_ERROR_NONFINITE);
      ASSERT_OK(ga_discard(ctx));
      EXPECT_TRUE(bytes_of(pair.p) == p);
      EXPECT_TRUE(bytes_of(pair.q) == q);
      EXPECT_EQ(Pair::momentum(ctx, 1), std::vector<float>(Pair::kCount, 0));
    }
  });
}

// One rank ends, with its communicator or without, after q has been summed; or the program gives up.
TEST(RanksEager, ARankThatIsLostLeavesTheOthersAsTheyWere) {
  for (const char* how : {"leaves", "is late", "aborts"})
    for (const int32_t shard : {GA_SHARD_NONE, GA_SHARD_OPTIMIZER}) {
      SCOPED_TRACE(how);
      const std::string what = how;
      Meeting meeting(2);
      std::atomic<bool> over{false};
      on_ranks(
          2,
          [&](int32_t r, ga_comm* comm) {
            Pair pair;
            const Bytes p = bytes_of(pair.p), q = bytes_of(pair.q);
            {
              Context ctx(eager_config());
              pair.add_to(ctx);
              const ga_comm_options o = overlapped(shard);
              ASSERT_OK(ga_context_set_comm(ctx, comm, &o));
              Pair::begin(ctx);
              pair.part(ctx, 1);
              pair.wait_for_q(ctx);
              EXPECT_NE(bytes_of(pair.q), q);
              meeting.wait();
              if (r == 0) {
                pair.part(ctx, 0);
                ASSERT_OK(ready(ctx, 0));
                if (what == "aborts") {
                  sleep_for(5);  // so that the thread that exchanges waits for rank 1
                  ASSERT_OK(ga_comm_abort(comm));
                }
                ASSERT_OK(ga_micro_end(ctx));
                expect_failure(ga_step(ctx, nullptr), "");
                EXPECT_TRUE(bytes_of(pair.p) == p);
                EXPECT_TRUE(bytes_of(pair.q) == q);
                EXPECT_EQ(window(ctx).state, GA_WINDOW_INVALID);
                ASSERT_OK(ga_discard(ctx));
                EXPECT_TRUE(bytes_of(pair.q) == q);
                over = true;
              } else if (what != "leaves") {
                EXPECT_TRUE(comes_true([&] { return over.load(); }));
              }
            }
          },
          what == "is late" ? 0.3 : 60);
    }
}

// Ranks that differ find it out in the agreement, before anything is summed, or in ga_step.
TEST(RanksEager, SettingsThatDifferAreNamed) {
  for (const int32_t threads : {0, 1})
    for (const bool tensors : {false, true}) {
      SCOPED_TRACE(tensors);
      Meeting meeting(2);
      std::vector<Bytes> left(2);
      on_ranks(2, [&](int32_t r, ga_comm* comm) {
        Pair pair, plain;
        Context ctx(eager_config(threads));
        pair.add_to(ctx);
        const ga_comm_options o = overlapped();
        ASSERT_OK(ga_context_set_comm(ctx, comm, &o));
        const Bytes p = bytes_of(pair.p), q = bytes_of(pair.q);
        if (r == 1) {
          if (tensors)
            ASSERT_OK(ga_param_set_weight_decay_scale(ctx, 0, 0.5));
          else
            ASSERT_OK(ga_group_set_lr(ctx, 0, 0.25));
        }
        for (int tries = 0; tries < 2; ++tries) {
          if (tries == 0 || !tensors) {
            Pair::begin(ctx);
            pair.part(ctx, 1);
            ASSERT_OK(ready(ctx, 1));
            if (!tensors || tries == 1) sleep_for(5);
            pair.part(ctx, 0);
            ASSERT_OK(ga_micro_end(ctx));
          }
          if (tries == 1) {
            const ga_step_result result = step(ctx);
            EXPECT_EQ(result.outcome, GA_STEP_APPLIED);
            break;
          }
          expect_failure(ga_step(ctx, nullptr),
                         tensors ? "weight_decay_scale is" : "lr is 0.25 on rank 1");
          EXPECT_EQ(window(ctx).state, tensors ? GA_WINDOW_FULL : GA_WINDOW_INVALID);
          EXPECT_TRUE(bytes_of(pair.p) == p);
          EXPECT_TRUE(bytes_of(pair.q) == q);
          if (!tensors) {
            ASSERT_OK(ga_discard(ctx));
          }
          if (r == 1) {
            if (tensors)
              ASSERT_OK(ga_param_set_weight_decay_scale(ctx, 0, 1));
            else
              ASSERT_OK(ga_group_set_lr(ctx, 0, 0.5));
          }
          meeting.wait();
        }
        // The step of the gradient that both have brought: with momentum 0.5, lr g at first.
        Context alone;
        plain.add_to(alone);
        alone.accumulate({plain.g.data(), plain.g.data()});
        step(alone);
        EXPECT_TRUE(bytes_of(pair.p) == bytes_of(plain.p));
        EXPECT_TRUE(bytes_of(pair.q) == bytes_of(plain.q));
      });
    }
}

TEST(RanksEager, AContextEndsWhileItsThreadsWork) {
  for (const int32_t threads : {0, 2}) {
    Meeting meeting(2);
    on_ranks(2, [&](int32_t r, ga_comm* comm) {
      Pair pair;
      const Bytes p = bytes_of(pair.p);
      {
        Context ctx(eager_config(threads));
        pair.early = 0;
        pair.add_to(ctx);
        const ga_comm_options o = overlapped();
        ASSERT_OK(ga_context_set_comm(ctx, comm, &o));
        Pair::begin(ctx);
        pair.part(ctx, 1);
        ASSERT_OK(ready(ctx, 1));
        pair.part(ctx, 0);
        if (r == 0) {
          ASSERT_OK(ready(ctx, 0));
        }
        meeting.wait();
      }
      EXPECT_TRUE(bytes_of(pair.p) == p);
    });
  }
}

}  // namespace
}  // namespace ga::test
