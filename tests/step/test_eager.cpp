// SPDX-License-Identifier: Apache-2.0
//
// ga_config.eager: parameters are updated by ga_params_ready, ahead of ga_step, and parameters, state and
// results are those of the same windows without it, bit for bit: for every optimizer, dtype, clip, policy and
// length of a window. What is compared are state files, which hold all but the parameters.
#include <atomic>
#include <chrono>
#include <functional>
#include <thread>

#include "formats.hpp"
#include "small_run.hpp"
#include "ways.hpp"

namespace ga::test {
namespace {

ga_config eager_config() {
  ga_config c = config();
  c.eager = 1;
  return c;
}

ga_status ready(ga_context* ctx, ga_param id) { return ga_params_ready(ctx, &id, 1); }

// ---- The same bits ------------------------------------------------------------------------------

// What a run of windows is made with.
struct Way {
  std::string name;
  ways::Configure configure = ways::as_is;
  ways::Prepare prepare = ways::as_is;
  int micro_batches = 1;

  bool in_place() const { return name.find("InPlace") != std::string::npos; }
  bool by_units() const { return name.find("Units") != std::string::npos; }
};

// What it leaves: files after each window, parameters, and numbers of results.
struct Trace {
  std::vector<Bytes> files;
  std::vector<Bytes> parameters;
  std::vector<double> results;
  int64_t eager = 0, waited = 0, redone = 0;

  void expect_same(const Trace& other) const {
    ASSERT_EQ(files.size(), other.files.size());
    for (size_t t = 0; t < files.size(); ++t) {
      EXPECT_TRUE(files[t] == other.files[t]) << "state after window " << t;
      EXPECT_TRUE(parameters[t] == other.parameters[t]) << "parameters after window " << t;
    }
    EXPECT_EQ(memcmp(results.data(), other.results.data(), results.size() * sizeof(double)), 0);
  }
};

struct Kind {
  int32_t dtype;
  int32_t gradient_dtype;
  int32_t master;
  int32_t rounding;
  int32_t accumulator = 0;  // 0: the dtype of the computation
};
constexpr Kind kKinds[] = {{GA_F32, GA_F32, GA_MASTER_F32, GA_ROUND_NEAREST},
                           {GA_F64, GA_F64, GA_MASTER_F32, GA_ROUND_NEAREST},
                           {GA_BF16, GA_BF16, GA_MASTER_F32, GA_ROUND_NEAREST},
                           {GA_F16, GA_F32, GA_MASTER_F32, GA_ROUND_STOCHASTIC},
                           {GA_BF16, GA_BF16, GA_MASTER_NONE, GA_ROUND_STOCHASTIC, GA_BF16}};

// A window ends with a micro-batch layer by layer, the last parameter first. Every fourth parameter becomes
// ready before that, one never. In window 3 the last gradient that comes has a NaN. With several threads all
// micro-batches come layer by layer, from all threads at once.
class Training {
 public:
  // Parameters that are updated ahead in each window, and of these, those that a norm over all parameters of their
  // optimizer clips: by random gradients in every window.
  int64_t ahead = 0, bounded = 0;

  Training(const Way& setup, const std::vector<NamedOptimizer>& optimizers, const Kind& kind,
           bool eager, int threads = 1)
      : eager_(eager), micro_batches_(setup.micro_batches), threads_(threads) {
    ga_config c = config();
    setup.configure(c);
    c.eager = eager;
    live_ = c.gradient_life == GA_GRADIENTS_LIVE || c.nonfinite == GA_NONFINITE_DROP_MICRO;
    EXPECT_OK(ga_context_create(&c, &ctx_));
    ga_param_options o = options(kind.gradient_dtype);
    o.master = kind.master;
    o.rounding = kind.rounding;
    o.accumulator_dtype = kind.accumulator;
    for (size_t i = 0; i < optimizers.size(); ++i) {
      ga_optimizer optimizer = optimizers[i].optimizer;
      if (kind.dtype == GA_F64 && optimizer.state_dtype != 0) continue;
      const bool limited = optimizer.max_grad_norm > 0;
      const bool emits =
          optimizer.kind == GA_OPTIMIZER_LAMB || optimizer.kind == GA_OPTIMIZER_ADAFACTOR;
      if (limited && setup.name == "RarelyClipped") optimizer.max_grad_norm = 1e6;
      const bool in_place = setup.in_place() && !limited;
      if (params_.size() != 2 && !(limited && setup.by_units()) &&
          !(kind.dtype == GA_F64 && !in_place) && !(kind.accumulator != 0 && emits && in_place)) {
        ++ahead;
        bounded += limited && optimizer.max_grad_norm < 1e6;
      }
      ga_group group = -1;
      EXPECT_OK(ga_group_add(ctx_, &optimizer, &group));
      const auto n = static_cast<int64_t>(i);
      const bool large = i == 8 || (i > 50 && i % 9 == 8), uneven = i % 18 == 0 || i == 61;
      const int64_t count = large ? 350 * 400 : uneven ? 65536 + 1031 + n : 37 * n + 5;
      const int64_t rows = large ? 350 : count % 2 == 0 ? 2 : 1;
      const int64_t shape[] = {rows, count / rows};
      o.agc_axes = i % 2 == 0 ? 1 : 2;  // the axis that its units are reduced over
      params_.push_back(std::make_unique<Tensor>(random_tensor(kind.dtype, count, 100 + i)));
      EXPECT_OK(ga_param_add(ctx_, group, ("p" + std::to_string(i)).c_str(), params_.back()->data(),
                             kind.dtype, 2, shape, &o, nullptr));
    }
    gradient_dtype_ = kind.gradient_dtype;
    setup.prepare(ctx_);
  }
  ~Training() { ga_context_destroy(ctx_); }
  Training(const Training&) = delete;
  Training& operator=(const Training&) = delete;

  Trace windows(int count) {
    Trace trace;
    for (int t = 0; t < count; ++t) {
      window(t);
      const ga_step_result r = step(ctx_);
      kept_.clear();
      for (const double x : {static_cast<double>(r.outcome), r.norm, r.clip_factor, r.lr,
                             r.loss_scale, static_cast<double>(r.steps), r.noise_scale})
        trace.results.push_back(x);
      trace.eager += r.eager;
      trace.waited += r.eager_waited;
      trace.redone += r.eager_redone;
      trace.files.push_back(saved(ctx_));
      Bytes all;
      for (const auto& p : params_) {
        const auto* const begin = static_cast<const char*>(p->data());
        all.insert(all.end(), begin, begin + static_cast<size_t>(p->count()) * p->size());
      }
      trace.parameters.push_back(all);
    }
    return trace;
  }

 private:
  const Tensor& gradient(size_t i, uint64_t seed) {
    kept_.push_back(std::make_unique<Tensor>(
        random_tensor(gradient_dtype_, params_[i]->count(), seed * 1000 + i)));
    return *kept_.back();
  }
  void window(int t) {
    const auto seed = static_cast<uint64_t>(t * 10);
    const auto n = static_cast<ga_param>(params_.size());
    for (int m = 0; m + 1 < micro_batches_; ++m) {
      if (threads_ > 1) {
        EXPECT_OK(ga_micro_begin(ctx_, -1, 1 + 0.5 * m, nullptr));
        parts_by_threads(
            seed + static_cast<uint64_t>(m), [](ga_param) { return true; }, false);
        continue;
      }
      std::vector<const void*> all;
      for (size_t i = 0; i < params_.size(); ++i)
        all.push_back(gradient(i, seed + static_cast<uint64_t>(m)).data());
      EXPECT_OK(ga_accumulate(ctx_, all.data(), all.size(), 1 + 0.5 * m, nullptr));
      if (!live_) kept_.clear();
    }
    const bool before = micro_batches_ > 1;
    for (ga_param id = 0; eager_ && before && id < n; id += 4) {
      EXPECT_OK(ready(ctx_, id));
    }
    EXPECT_OK(ga_micro_begin(ctx_, -1, 0.75, MicroOptions(0, GA_MICRO_LAST)));
    const auto comes = [=](ga_param id) { return !(before && id % 4 == 0); };
    if (threads_ > 1) return parts_by_threads(seed + 9, comes, true, t == 3);
    for (ga_param id = n; id-- > 0;) {
      if (!comes(id)) continue;
      kept_.push_back(std::make_unique<Tensor>(last_gradient(id, seed + 9, t == 3)));
      const void* const data = kept_.back()->data();
      EXPECT_OK(ga_accumulate_part(ctx_, id, data));
      if (eager_ && id != 2) {
        EXPECT_OK(ready(ctx_, id));
      }
      if (!live_) kept_.clear();
    }
    EXPECT_OK(ga_micro_end(ctx_));
  }

  Tensor last_gradient(ga_param id, uint64_t seed, bool bad) {
    Tensor g = gradient(static_cast<size_t>(id), seed);
    if (bad && id == 1) g.set(g.count() - 1, NAN);
    return g;
  }
  // The gradients of the open micro-batch, and its end.
  void parts_by_threads(uint64_t seed, const std::function<bool(ga_param)>& comes, bool last,
                        bool bad = false) {
    std::vector<std::pair<ga_param, const void*>> parts;
    for (auto id = static_cast<ga_param>(params_.size()); id-- > 0;) {
      if (!comes(id)) continue;
      kept_.push_back(std::make_unique<Tensor>(last_gradient(id, seed, bad)));
      parts.emplace_back(id, kept_.back()->data());
    }
    std::vector<std::thread> all;
    for (int thread = 0; thread < threads_; ++thread)
      all.emplace_back([&, thread] {
        for (auto k = static_cast<size_t>(thread); k < parts.size();
             k += static_cast<size_t>(threads_)) {
          const auto [id, data] = parts[k];
          EXPECT_OK(ga_accumulate_part(ctx_, id, data));
          if (last && id != 2) {
            EXPECT_OK(ready(ctx_, id));
          }
        }
      });
    for (std::thread& thread : all) thread.join();
    EXPECT_OK(ga_micro_end(ctx_));
    if (!live_) kept_.clear();
  }

  const bool eager_;
  const int micro_batches_, threads_;
  bool live_;  // gradients are read until the window ends
  int32_t gradient_dtype_;
  ga_context* ctx_ = nullptr;
  std::vector<std::unique_ptr<Tensor>> params_, kept_;
};

const std::vector<Way>& setups() {
  static const std::vector<Way> list = [] {
    using namespace ways;
    std::vector<Way> all;
    all.push_back({"Default"});
    all.push_back({"Live", live});
    all.push_back({"LiveTwo", live, as_is, 2});
    all.push_back({"Three", as_is, as_is, 3});
    all.push_back({"Clipped", live, clipped(GA_CLIP_GLOBAL, 0.5)});
    all.push_back({"RarelyClipped", live, clipped(GA_CLIP_GLOBAL, 1e6), 2});
    all.push_back({"PerTensor", live, clipped(GA_CLIP_PER_TENSOR, 0.5)});
    all.push_back(
        {"ByValueAndNorm", live, clipped(GA_CLIP_GLOBAL, 1e6, GA_FLAVOR_KERAS, 0.125), 2});
    all.push_back({"Units", live, clipped(GA_CLIP_AGC, 0)});
    all.push_back({"UnitsByValueTwo", as_is, clipped(GA_CLIP_AGC, 0, GA_FLAVOR_TORCH, 0.125), 2});
    all.push_back({"Averaged", live, averaged});
    all.push_back({"InPlace", [](ga_config& c) { live(c), ignoring(c); }});
    all.push_back({"InPlaceThree", ignoring, averaged, 3});
    all.push_back({"InPlaceMeasured",
                   [](ga_config& c) { live(c), ignoring(c), c.measure_norm = 1; },
                   clipped(GA_CLIP_PER_TENSOR, 0.5, GA_FLAVOR_TORCH, 0.5)});
    all.push_back(
        {"InPlaceUnits", [](ga_config& c) { live(c), ignoring(c); }, clipped(GA_CLIP_AGC, 0)});
    all.push_back({"InPlaceUnitsThree", [](ga_config& c) { ignoring(c), c.num_threads = 3; },
                   clipped(GA_CLIP_AGC, 0), 3});
    all.push_back({"IgnoredAndClipped", ignoring, clipped(GA_CLIP_GLOBAL, 0.5), 2});
    all.push_back({"Scaled", as_is, scaled, 2});
    all.push_back({"ZeroForMissing",
                   [](ga_config& c) {
                     c.missing = GA_MISSING_ZERO;
                     c.noise_scale = 1;
                   },
                   as_is, 2});
    all.push_back({"RunningMean", [](ga_config& c) { c.accumulation = GA_ACCUMULATE_RUNNING_MEAN; },
                   as_is, 3});
    all.push_back(
        {"DroppingMicros", [](ga_config& c) { c.nonfinite = GA_NONFINITE_DROP_MICRO; }, as_is, 2});
    all.push_back({"Threads", [](ga_config& c) { live(c), c.num_threads = 3; }, averaged});
    all.push_back({"LibraryThreads", [](ga_config& c) { live(c), c.eager_threads = 2; }, averaged});
    all.push_back({"LibraryThreadsInPlace",
                   [](ga_config& c) { live(c), ignoring(c), c.eager_threads = 1; },
                   clipped(GA_CLIP_PER_TENSOR, 0.25), 2});
    all.push_back({"LibraryThreadsUnits", [](ga_config& c) { c.eager_threads = 2; },
                   clipped(GA_CLIP_AGC, 0), 2});
    all.push_back({"LibraryThreadsClipped", [](ga_config& c) { c.eager_threads = 1; },
                   clipped(GA_CLIP_GLOBAL, 0.5), 2});
    all.push_back({"LittleMemory", [](ga_config& c) { live(c), c.eager_bytes = 300000; }});
    return all;
  }();
  return list;
}

class EagerBits : public testing::TestWithParam<std::tuple<size_t, size_t>> {};
INSTANTIATE_TEST_SUITE_P(Eager, EagerBits,
                         testing::Combine(testing::Range(size_t{0}, setups().size()),
                                          testing::Range(size_t{0}, std::size(kKinds))),
                         [](const auto& info) {
                           const Kind& kind = kKinds[std::get<1>(info.param)];
                           return setups()[std::get<0>(info.param)].name + "_" +
                                  format(kind.dtype).name + "_" +
                                  (kind.master == GA_MASTER_NONE ? "none" : "master");
                         });

TEST_P(EagerBits, AreThoseOfTheStep) {
  const Way& setup = setups()[std::get<0>(GetParam())];
  const Kind& kind = kKinds[std::get<1>(GetParam())];
  const auto optimizers = good_optimizers();
  constexpr int kWindows = 5;
  const Trace plain = Training(setup, optimizers, kind, false).windows(kWindows);
  Training training(setup, optimizers, kind, true);
  const Trace ahead = training.windows(kWindows);
  ahead.expect_same(plain);
  const Trace shared = Training(setup, optimizers, kind, true, 3).windows(kWindows);
  shared.expect_same(plain);
  EXPECT_EQ(plain.eager, 0);
  if (setup.name == "DroppingMicros") {
    EXPECT_EQ(ahead.eager, 0);
    return;
  }
  if (setup.name.find("LibraryThreads") == 0)
    return;  // ga_step takes what they have not begun with
  EXPECT_EQ(ahead.eager + ahead.waited, training.ahead * kWindows);
  EXPECT_EQ(shared.eager + shared.waited, ahead.eager + ahead.waited);
  if (setup.name == "LittleMemory") {
    EXPECT_EQ(ahead.waited > 0, training.ahead > 0);
    return;
  }
  EXPECT_EQ(ahead.waited, 0);
  // In window 3, the step is skipped or its norm, a NaN, clips nothing, other than that of a group.
  const bool clips = setup.name == "Clipped" || setup.name == "IgnoredAndClipped";
  const bool ignores = setup.in_place() || setup.name == "IgnoredAndClipped";
  EXPECT_EQ(ahead.redone,
            (clips ? training.ahead : training.bounded) * 4 + (ignores ? training.bounded : 0));
}

// ---- What a program sees ------------------------------------------------------------------------

constexpr int64_t kCount = 3000;

// One or two parameters of SGD, whose gradients are ones.
struct Small {
  explicit Small(ga_config c, int params = 2) {
    EXPECT_OK(ga_context_create(&c, &ctx));
    ga_optimizer o = plain_sgd();
    o.momentum = 0.5;
    EXPECT_OK(ga_group_add(ctx, &o, nullptr));
    for (int k = 0; k < params; ++k)
      EXPECT_OK(ga_param_add(ctx, 0, k == 0 ? "p" : "q", data[k].data(), GA_F32, 1, &kCount,
                             nullptr, nullptr));
  }
  ~Small() { ga_context_destroy(ctx); }
  Small(const Small&) = delete;
  Small& operator=(const Small&) = delete;

  void begin() { ASSERT_OK(ga_micro_begin(ctx, -1, 1, MicroOptions(0, GA_MICRO_LAST))); }
  void part(ga_param id) { ASSERT_OK(ga_accumulate_part(ctx, id, ones.data())); }
  void ready(ga_param id) { ASSERT_OK(test::ready(ctx, id)); }
  ga_step_result end() {
    EXPECT_OK(ga_micro_end(ctx));
    return step(ctx);
  }

  ga_context* ctx = nullptr;
  Block data[2] = {Block(kCount, 8), Block(kCount, 8)};
  const Block ones = Block(kCount, 1);
};

ga_config ignoring() {
  ga_config c = eager_config();
  c.nonfinite = GA_NONFINITE_IGNORE;
  return c;
}

TEST(Eager, ParametersAreWrittenInPlaceWhereNothingIsLeftToDecide) {
  Small s(ignoring());
  s.begin();
  s.part(0);
  EXPECT_EQ(s.data[0][5], 8);
  s.ready(0);
  EXPECT_EQ(s.data[0][5], 7);
  EXPECT_EQ(s.data[0].back(), 7);
  s.part(1);
  EXPECT_EQ(s.data[1][5], 8);
  const ga_step_result r = s.end();
  EXPECT_EQ(r.outcome, GA_STEP_APPLIED);
  EXPECT_EQ(r.eager, 1);
  EXPECT_EQ(r.eager_redone, 0);
  EXPECT_EQ(s.data[0][5], 7);
  EXPECT_EQ(s.data[1][5], 7);
  EXPECT_EQ(memory(s.ctx).eager, 0);
}

TEST(Eager, ParametersAreWrittenByTheStepWhereItDecides) {
  Small s(eager_config());
  s.begin();
  for (const ga_param id : {1, 0}) {
    s.part(id);
    s.ready(id);
    EXPECT_EQ(s.data[id][5], 8);
  }
  const ga_step_result r = s.end();
  EXPECT_EQ(r.eager, 2);
  EXPECT_EQ(r.eager_redone, 0);
  EXPECT_EQ(s.data[0][5], 7);
  EXPECT_EQ(s.data[1].back(), 7);
}

TEST(Eager, NothingBeginsBeforeTheLastMicroBatch) {
  ga_config c = ignoring();
  c.accum_steps = 2;
  Small s(c);
  ASSERT_OK(ga_micro_begin(s.ctx, -1, 1, nullptr));
  s.part(0);
  s.part(1);
  s.ready(0);
  ASSERT_OK(ga_micro_end(s.ctx));
  EXPECT_EQ(s.data[0][5], 8);
  ASSERT_OK(ga_micro_begin(s.ctx, -1, 3, nullptr));  // the K-th, with which all weights are known
  EXPECT_EQ(s.data[0][5], 8 - 0.25f);
  s.part(1);
  EXPECT_EQ(s.end().eager, 1);
  EXPECT_EQ(s.data[1][5], 7);
}

TEST(Eager, WhatIsUpdatedInPlaceIsThereToStay) {
  Small s(ignoring());
  ga_ema ema;
  ASSERT_OK(ga_ema_init(&ema, sizeof ema));
  ASSERT_OK(ga_context_set_ema(s.ctx, &ema));
  s.begin();
  s.part(0);
  s.ready(0);
  const char* const words = "updated parameters of this window in place";
  const ga_clip norm = clip(GA_CLIP_GLOBAL, 1);
  Bytes bytes(100000);
  size_t size = 0;
  Block out(kCount);
  const ga_status calls[] = {
      ga_micro_abort(s.ctx),
      ga_discard(s.ctx),
      ga_group_set_lr(s.ctx, 0, 0.5),
      ga_group_set_weight_decay(s.ctx, 0, 0.5),
      ga_group_set_schedule(s.ctx, 0, nullptr),
      ga_param_set_lr_scale(s.ctx, 1, 0.5),
      ga_context_set_clip(s.ctx, &norm),
      ga_group_set_clip(s.ctx, 0, &norm),
      ga_ema_copy_to(s.ctx, 0, out.data(), GA_F32),
      ga_save_to_memory(s.ctx, nullptr, bytes.data(), bytes.size(), &size),
  };
  for (const ga_status status : calls) EXPECT_EQ(status, GA_ERROR_INVALID_STATE);
  EXPECT_TRUE(refused(ga_discard(s.ctx), GA_ERROR_INVALID_STATE, {words}));
  EXPECT_TRUE(refused(ga_accumulate_part(s.ctx, 0, s.ones.data()), GA_ERROR_INVALID_STATE,
                      {"after ga_params_ready"}));
  s.ready(0);  // once more changes nothing
  ASSERT_OK(ga_micro_end(s.ctx));
  EXPECT_TRUE(refused(ga_save_to_memory(s.ctx, nullptr, bytes.data(), bytes.size(), &size),
                      GA_ERROR_INVALID_STATE, {words}));
  EXPECT_EQ(step(s.ctx).outcome, GA_STEP_APPLIED);
  EXPECT_EQ(s.data[0][5], 7);
  EXPECT_OK(ga_group_set_lr(s.ctx, 0, 0.5));
  EXPECT_OK(ga_save_to_memory(s.ctx, nullptr, bytes.data(), bytes.size(), &size));
}

TEST(Eager, AMicroBatchThatHasBegunToBeUpdatedIsNotDropped) {
  for (ga_config c : {eager_config(), ignoring()}) {
    c.gradient_life = GA_GRADIENTS_LIVE;
    Small s(c);
    s.begin();
    s.part(0);
    s.ready(0);
    EXPECT_EQ(ga_micro_abort(s.ctx), GA_ERROR_INVALID_STATE);
    s.part(1);
    EXPECT_EQ(s.end().eager, 1);
    EXPECT_EQ(s.data[0][5], 7);
    EXPECT_EQ(s.data[1][5], 7);
  }
}

TEST(Eager, AChangeOfOptionsHasTheStepComputeAnew) {
  Small s(eager_config());
  s.begin();
  s.part(0);
  s.ready(0);
  ASSERT_OK(ga_group_set_lr(s.ctx, 0, 0.5));
  s.part(1);
  s.ready(1);
  const ga_step_result r = s.end();
  EXPECT_EQ(r.eager, 2);
  EXPECT_EQ(r.eager_redone, 1);
  EXPECT_EQ(s.data[0][5], 8 - 0.5f);
  EXPECT_EQ(s.data[1][5], 8 - 0.5f);
}

TEST(Eager, AChangeOfTheOptimizerHasTheStepComputeAnew) {
  Small s(eager_config()), plain(config());
  for (Small* x : {&s, &plain}) {
    for (int t = 0; t < 3; ++t) {
      x->begin();
      for (const ga_param id : {0, 1}) {
        x->part(id);
        x->ready(id);
      }
      ga_optimizer o = plain_sgd();
      o.momentum = 0.25 * (1 + t % 2);
      EXPECT_OK(ga_group_set_optimizer(x->ctx, 0, &o));
      EXPECT_EQ(x->end().eager_redone, x == &s ? 2 : 0);
    }
  }
  EXPECT_TRUE(same_bits(s.data[0], plain.data[0]));
}

TEST(Eager, NothingBeginsInAWindowThatItsWeightMayEnd) {
  Small s(ignoring());
  ASSERT_OK(ga_micro_begin(s.ctx, -1, 1e-40, MicroOptions(0, GA_MICRO_LAST)));
  s.part(0);
  s.ready(0);
  EXPECT_EQ(s.data[0][5], 8);
  const ga_step_result r = s.end();
  EXPECT_EQ(r.outcome, GA_STEP_SKIPPED_WEIGHT);
  EXPECT_EQ(r.eager, 0);
  EXPECT_EQ(s.data[0][5], 8);
}

TEST(Eager, ADiscardForgetsWhatWasComputed) {
  for (const int life : {GA_GRADIENTS_CONSUMED, GA_GRADIENTS_LIVE}) {
    ga_config c = eager_config();
    c.gradient_life = life;
    Small s(c), plain(config());
    for (Small* x : {&s, &plain}) {
      x->begin();
      x->part(0);
      x->ready(0);
      EXPECT_OK(ga_discard(x->ctx));
      for (int t = 0; t < 2; ++t) {
        x->begin();
        for (const ga_param id : {0, 1}) {
          x->part(id);
          x->ready(id);
        }
        const ga_step_result r = x->end();
        EXPECT_EQ(r.eager, x == &s ? 2 : 0);
      }
    }
    EXPECT_TRUE(same_bits(s.data[0], plain.data[0]));
    EXPECT_TRUE(saved(s.ctx) == saved(plain.ctx));
  }
}

// The state in a file is that of before, with the gradients of the open window.
TEST(Eager, AWindowIsSavedAsItWas) {
  for (const int life : {GA_GRADIENTS_CONSUMED, GA_GRADIENTS_LIVE}) {
    ga_config c = eager_config();
    c.gradient_life = life;
    Small s(c), other(c);
    for (int t = 0; t < 3; ++t) {
      s.begin();
      s.part(0);
      s.part(1);
      s.ready(0);
      if (t == 1) {
        ASSERT_OK(ga_micro_end(s.ctx));
        const Bytes file = saved(s.ctx);
        other.data[0] = s.data[0];
        other.data[1] = s.data[1];
        ASSERT_OK(load(other.ctx, file));
        EXPECT_EQ(step(other.ctx).outcome, GA_STEP_APPLIED);
        const ga_step_result r = step(s.ctx);
        EXPECT_EQ(r.eager, 1);
        EXPECT_EQ(r.eager_redone, 0);
        EXPECT_TRUE(same_bits(s.data[0], other.data[0]));
        EXPECT_TRUE(same_bits(s.data[1], other.data[1]));
        EXPECT_TRUE(saved(s.ctx) == saved(other.ctx));
      } else {
        EXPECT_EQ(s.end().eager, 1);
      }
    }
  }
}

TEST(Eager, ParametersMayComeAndGo) {
  Small s(eager_config(), 1), plain(config(), 1);
  for (Small* x : {&s, &plain}) {
    for (int t = 0; t < 6; ++t) {
      if (t == 2) {
        EXPECT_OK(
            ga_param_add(x->ctx, 0, "q", x->data[1].data(), GA_F32, 1, &kCount, nullptr, nullptr));
      }
      if (t == 4) {
        EXPECT_OK(ga_param_remove(x->ctx, 0));
      }
      x->begin();
      for (ga_param id = t < 4 ? 0 : 1; id < (t < 2 ? 1 : 2); ++id) {
        x->part(id);
        x->ready(id);
      }
      const ga_step_result r = x->end();
      EXPECT_EQ(r.eager, x != &s ? 0 : t == 2 || t == 3 ? 2 : 1) << t;
    }
  }
  EXPECT_TRUE(same_bits(s.data[0], plain.data[0]));
  EXPECT_TRUE(same_bits(s.data[1], plain.data[1]));
}

TEST(Eager, MemoryIsToldBeforeItIsTaken) {
  Small s(eager_config());
  const ga_memory before = memory(s.ctx);
  ASSERT_OK(ga_prepare(s.ctx));
  EXPECT_EQ(memory(s.ctx).eager, before.eager);
  EXPECT_GE(before.eager, 2 * 2 * kCount * 4);  // parameter and momentum of two parameters
  EXPECT_LE(before.eager, 2 * 2 * kCount * 4 + 4 * 256);
  for (int t = 0; t < 3; ++t) {
    s.begin();
    s.part(0);
    s.part(1);
    s.ready(0);
    s.end();
    const ga_memory m = memory(s.ctx);
    EXPECT_EQ(m.eager, before.eager);
    EXPECT_EQ(m.total, before.total);
  }
}

// In the place of the parameter, if that has 4 bytes.
TEST(Eager, TheSecondSetHasRoomForWhatAFirstPassEmits) {
  for (const auto& [dtype, bytes] : {std::pair(GA_F32, 12), std::pair(GA_BF16, 8 + 2 + 4)}) {
    Context ctx(eager_config());
    Tensor p(dtype, kCount);
    ga_param_options o = options();
    o.master = GA_MASTER_NONE;
    ASSERT_OK(ga_param_add(ctx, ctx.group(optimizer(GA_OPTIMIZER_LAMB)), "p", p.data(), dtype, 1,
                           &kCount, &o, nullptr));
    EXPECT_GE(memory(ctx).eager, bytes * kCount);
    EXPECT_LE(memory(ctx).eager, bytes * kCount + 4 * 128);
  }
}

TEST(Eager, WhatIsBeyondTheLimitWaits) {
  ga_config c = eager_config();
  c.eager_bytes = 2 * kCount * 4 + 512;
  Small s(c), plain(config());
  EXPECT_EQ(memory(s.ctx).eager, c.eager_bytes);
  for (int t = 0; t < 3; ++t) {
    for (Small* x : {&s, &plain}) {
      x->begin();
      for (const ga_param id : {1, 0}) {  // the first to be ready gains
        x->part(id);
        x->ready(id);
      }
      const ga_step_result r = x->end();
      if (x == &plain) continue;
      EXPECT_EQ(r.eager, 1);
      EXPECT_EQ(r.eager_waited, 1);
    }
    EXPECT_TRUE(same_bits(s.data[0], plain.data[0]));
    EXPECT_TRUE(same_bits(s.data[1], plain.data[1]));
  }
}

// Memory that gives out after so many blocks.
struct Allocator {
  int left = 1000;
  static void* allocate(void* user, size_t bytes, ga_device, void*) {
    auto& self = *static_cast<Allocator*>(user);
    if (self.left-- <= 0) return nullptr;
    return std::aligned_alloc(64, (bytes + 63) / 64 * 64);
  }
  static void free(void*, void* data, size_t, ga_device, void*) { std::free(data); }
};

TEST(Eager, WithoutMemoryForTheSecondSetUpdatesWait) {
  int64_t last = -1;
  for (int blocks = 0; blocks < 40; ++blocks) {
    Allocator allocator;
    ga_config c = eager_config();
    c.allocate = Allocator::allocate;
    c.free = Allocator::free;
    c.allocator_user = &allocator;
    Small s(c);
    allocator.left = blocks;
    s.begin();
    const ga_status status = ga_accumulate_part(s.ctx, 0, s.ones.data());
    if (status == GA_ERROR_OUT_OF_MEMORY) continue;  // of the first set
    EXPECT_OK(status);
    s.ready(0);
    const ga_step_result r = s.end();
    EXPECT_EQ(r.outcome, GA_STEP_APPLIED);
    EXPECT_EQ(r.eager + r.eager_waited, 1);
    EXPECT_EQ(s.data[0][5], 7);
    if (last < 0) {
      EXPECT_EQ(r.eager_waited, 1);  // memory for all but the second set
    }
    last = r.eager;
  }
  EXPECT_EQ(last, 1);
}

TEST(Eager, TheSecondSetIsMadeByPrepare) {
  Allocator allocator;
  ga_config c = eager_config();
  c.allocate = Allocator::allocate;
  c.free = Allocator::free;
  c.allocator_user = &allocator;
  Small s(c);
  ASSERT_OK(ga_prepare(s.ctx));
  allocator.left = 0;
  for (int t = 0; t < 3; ++t) {
    s.begin();
    for (const ga_param id : {0, 1}) {
      s.part(id);
      s.ready(id);
    }
    EXPECT_EQ(s.end().eager, 2);
  }
}

void failing(void* user, int64_t count, ga_task task, void* data) {
  const int loop = ++*static_cast<int*>(user);
  for (int64_t i = 0; i < count; ++i)
    if (loop >= 0 || i > 0) task(data, i);
}

TEST(Eager, AfterAFaultTheStepUpdatesAnew) {
  for (const bool in_place : {false, true}) {
    constexpr int64_t kMany = 1 << 18;
    int loop = 0;
    ga_config c = in_place ? ignoring() : eager_config();
    c.parallel_for = failing;
    c.parallel_for_user = &loop;
    Context ctx(c);
    Block p(kMany, 8);
    const Block g(kMany, 1);
    ctx.param(ctx.group(plain_sgd()), "p", p.data(), kMany);
    ASSERT_OK(ga_micro_begin(ctx, -1, 1, MicroOptions(0, GA_MICRO_LAST)));
    ASSERT_OK(ga_accumulate_part(ctx, 0, g.data()));
    loop = -100;  // from here on a task is left out
    EXPECT_EQ(ready(ctx, 0), in_place ? GA_ERROR_FAULT : GA_OK);
    loop = 0;
    if (in_place) {
      EXPECT_EQ(ga_micro_end(ctx), GA_ERROR_FAULT);
      EXPECT_EQ(ga_step(ctx, nullptr), GA_ERROR_FAULT);
      continue;
    }
    EXPECT_EQ(p, Block(kMany, 8));
    ASSERT_OK(ga_micro_end(ctx));
    const ga_step_result r = step(ctx);
    EXPECT_EQ(r.outcome, GA_STEP_APPLIED);
    EXPECT_EQ(r.eager, 0);
    EXPECT_EQ(p, Block(kMany, 7));
  }
}

TEST(Eager, WithACommunicatorUpdatesWait) {
  ga_comm_config cc;
  ASSERT_OK(ga_comm_config_init(&cc, sizeof cc, GA_COMM_LOCAL));
  unsigned char id[GA_COMM_ID_SIZE];
  ASSERT_OK(ga_comm_unique_id(GA_COMM_LOCAL, id, sizeof id));
  cc.id = id;
  cc.ranks = 1;
  ga_comm* comm = nullptr;
  ASSERT_OK(ga_comm_create(&cc, &comm));
  {
    Small s(eager_config());
    ASSERT_OK(ga_context_set_comm(s.ctx, comm, nullptr));
    s.begin();
    s.part(0);
    s.ready(0);
    const ga_step_result r = s.end();
    EXPECT_EQ(r.outcome, GA_STEP_APPLIED);
    EXPECT_EQ(r.eager, 0);
    EXPECT_EQ(s.data[0][5], 7);
  }
  ga_comm_destroy(comm);
}

// ---- What a program is told ---------------------------------------------------------------------

struct Listener {
  std::vector<ga_param> done;
  std::vector<std::thread::id> threads;
  ga_context* ctx = nullptr;
  std::vector<ga_status> calls;  // of the context, from within
  bool throws = false;
  std::atomic<int> count{0};

  static void told(void* user, ga_param param) {
    auto& self = *static_cast<Listener*>(user);
    self.done.push_back(param);
    self.threads.push_back(std::this_thread::get_id());
    ga_window_info info;
    info.struct_size = sizeof info;
    if (self.ctx) self.calls.push_back(ga_window(self.ctx, &info));
    ++self.count;
    if (self.throws) throw 1;
  }
  ga_config config(ga_config c) {
    c.on_param_done = told;
    c.on_param_done_user = this;
    return c;
  }
};

TEST(Eager, AParameterIsTold) {
  for (const bool in_place : {false, true}) {
    Listener listener;
    Small s(listener.config(in_place ? ignoring() : eager_config()));
    listener.ctx = s.ctx;
    for (int t = 0; t < 2; ++t) {
      listener.done.clear();
      s.begin();
      s.part(1);
      s.ready(1);
      EXPECT_EQ(listener.done.size(), in_place ? 1u : 0u);
      s.part(0);  // which never becomes ready
      s.end();
      EXPECT_EQ(listener.done, std::vector<ga_param>{1});
    }
    for (const ga_status status : listener.calls) EXPECT_EQ(status, GA_ERROR_INVALID_STATE);
    EXPECT_EQ(listener.threads[0], std::this_thread::get_id());
    EXPECT_EQ(s.data[0][5], s.data[1][5]);
  }
}

TEST(Eager, ASkippedWindowIsToldToo) {
  Listener listener;
  Small s(listener.config(eager_config()));
  s.begin();
  Block bad = s.ones;
  bad.back() = NAN;
  ASSERT_OK(ga_accumulate_part(s.ctx, 0, bad.data()));
  s.ready(0);
  s.part(1);
  s.ready(1);
  EXPECT_EQ(s.end().outcome, GA_STEP_SKIPPED_NONFINITE);
  EXPECT_EQ(listener.done, (std::vector<ga_param>{0, 1}));
  EXPECT_EQ(s.data[1][5], 8);
}

TEST(Eager, AnExceptionOfACallbackIsAFault) {
  for (const int threads : {0, 1}) {
    for (const bool in_place : {false, true}) {
      Listener listener;
      listener.throws = true;
      ga_config c = listener.config(in_place ? ignoring() : eager_config());
      c.eager_threads = threads;
      Small s(c);
      s.begin();
      s.part(0);
      const ga_param id = 0;
      const ga_status ready = ga_params_ready(s.ctx, &id, 1);
      std::string error = ga_last_error();
      if (!in_place || threads == 0) {  // else a thread may be done before the call is
        EXPECT_EQ(ready, in_place ? GA_ERROR_FAULT : GA_OK);
      }
      ASSERT_OK(ga_micro_end(s.ctx));
      EXPECT_EQ(ga_step(s.ctx, nullptr), ready == GA_OK ? GA_ERROR_FAULT : GA_OK);
      if (ready == GA_OK) error = ga_last_error();
      EXPECT_NE(error.find("on_param_done"), std::string::npos);
      EXPECT_EQ(listener.count, 1);
      EXPECT_EQ(s.data[0][5], 7);
      EXPECT_EQ(window(s.ctx).steps, 1);
    }
  }
}

// ---- Threads of the library ---------------------------------------------------------------------

TEST(Eager, ThreadsOfTheLibraryWorkWhileTheProgramGoesOn) {
  Listener listener;
  ga_config c = listener.config(ignoring());
  c.eager_threads = 2;
  Small s(c);
  listener.ctx = s.ctx;
  for (int t = 0; t < 3; ++t) {
    s.begin();
    s.part(1);
    s.ready(1);
    ASSERT_TRUE(comes_true([&] { return listener.count == 2 * t + 1; }));
    EXPECT_EQ(s.data[1][5], s.data[0][5] - (t == 0 ? 1 : t == 1 ? 1.5f : 1.75f));
    s.part(0);
    s.ready(0);
    const ga_step_result r = s.end();
    EXPECT_GE(r.eager, 1);
    EXPECT_EQ(s.data[0][5], s.data[1][5]);
    EXPECT_EQ(listener.count, 2 * t + 2);
  }
  EXPECT_NE(listener.threads[0], std::this_thread::get_id());
  for (const ga_status status : listener.calls) EXPECT_EQ(status, GA_ERROR_INVALID_STATE);
}

TEST(Eager, OtherCallsWaitForThreads) {
  constexpr int64_t kMany = 3 << 20;
  for (const char* call : {"discard", "lr", "save", "destroy", "step"}) {
    SCOPED_TRACE(call);
    ga_config c = eager_config();
    c.eager_threads = 1;
    c.gradient_life = GA_GRADIENTS_LIVE;
    Block p(kMany, 8);
    const Block g(kMany, 1);
    {
      Context ctx(c);
      ctx.param(ctx.group(optimizer(GA_OPTIMIZER_ADAMW)), "p", p.data(), kMany);
      ASSERT_OK(ga_micro_begin(ctx, -1, 1, MicroOptions(0, GA_MICRO_LAST)));
      ASSERT_OK(ga_accumulate_part(ctx, 0, g.data()));
      ASSERT_OK(ready(ctx, 0));
      ASSERT_OK(ga_micro_end(ctx));
      const std::string what = call;
      if (what == "discard") {
        ASSERT_OK(ga_discard(ctx));
      }
      if (what == "lr") {
        ASSERT_OK(ga_group_set_lr(ctx, 0, 0.25));
      }
      if (what == "save") {
        ASSERT_FALSE(saved(ctx).empty());
      }
      if (what != "discard" && what != "destroy") {
        const ga_step_result r = step(ctx);
        EXPECT_LE(r.eager, 1);
        EXPECT_EQ(r.eager_redone, what == "lr" ? r.eager : 0);
        EXPECT_NEAR(p[kMany - 1], 8 - (what == "lr" ? 0.25 : 0.001) * (1 + 8 * 0.01), 1e-4);
        continue;
      }
    }
    EXPECT_EQ(p, Block(kMany, 8));
  }
}

// ---- Parameters that are written early ----------------------------------------------------------

// Two parameters of bf16 with master weights.
struct Early {
  explicit Early(ga_config c, int32_t early = 1) {
    EXPECT_OK(ga_context_create(&c, &ctx));
    ga_optimizer o = plain_sgd(0.5);
    EXPECT_OK(ga_group_add(ctx, &o, nullptr));
    ga_param_options po = options();
    po.write_early = early;
    EXPECT_OK(ga_param_add(ctx, 0, "p", p.data(), GA_BF16, 1, &kCount, &po, nullptr));
    EXPECT_OK(ga_param_add(ctx, 0, "q", q.data(), GA_BF16, 1, &kCount, &po, nullptr));
  }
  ~Early() { ga_context_destroy(ctx); }
  Early(const Early&) = delete;
  Early& operator=(const Early&) = delete;

  // Returns whether p is another before ga_step than before the window.
  bool window(uint64_t seed, bool bad, bool discards) {
    const Tensor g = random_tensor(GA_BF16, kCount, seed);
    Tensor h = g;
    if (bad) h.set(7, INFINITY);
    const Tensor before = p;
    EXPECT_OK(ga_micro_begin(ctx, -1, 1, MicroOptions(0, GA_MICRO_LAST)));
    EXPECT_OK(ga_accumulate_part(ctx, 0, g.data()));
    EXPECT_OK(ready(ctx, 0));
    EXPECT_OK(ga_accumulate_part(ctx, 1, h.data()));
    EXPECT_OK(ready(ctx, 1));
    EXPECT_OK(ga_micro_end(ctx));
    const bool written = memcmp(p.data(), before.data(), kCount * 2) != 0;
    if (discards) {
      EXPECT_OK(ga_discard(ctx));
    } else {
      EXPECT_EQ(step(ctx).outcome, bad ? GA_STEP_SKIPPED_NONFINITE : GA_STEP_APPLIED);
    }
    return written;
  }
  bool same(const Early& other) const {
    return memcmp(p.data(), other.p.data(), kCount * 2) == 0 &&
           memcmp(q.data(), other.q.data(), kCount * 2) == 0 && saved(ctx) == saved(other.ctx);
  }

  ga_context* ctx = nullptr;
  Tensor p = random_tensor(GA_BF16, kCount, 1), q = random_tensor(GA_BF16, kCount, 2);
};

TEST(Eager, WhatIsWrittenEarlyIsRightWhenTheStepReturns) {
  for (const double most : {1e6, 0.1}) {  // a clip that never clips, and one that always does
    ga_config c = config();
    Early plain(c, 0);
    c.eager = 1;
    Early early(c), late(c, 0);
    const ga_clip norm = clip(GA_CLIP_GLOBAL, most);
    for (const Early* x : {&plain, &early, &late}) ASSERT_OK(ga_context_set_clip(x->ctx, &norm));
    EXPECT_LT(memory(early.ctx).eager, memory(late.ctx).eager);
    for (uint64_t t = 0; t < 6; ++t) {
      const bool bad = t == 2, discards = t == 4;
      EXPECT_FALSE(plain.window(t, bad, discards));
      EXPECT_TRUE(early.window(t, bad, discards));
      EXPECT_FALSE(late.window(t, bad, discards));
      EXPECT_TRUE(early.same(plain)) << t;
      EXPECT_TRUE(late.same(plain)) << t;
    }
  }
}

// Master weights of the program's, which the parameter is not rounded from yet: a skipped step would have
// nothing to restore the parameter from.
TEST(Eager, AParameterThatItsMasterWeightsDoNotRoundToIsNotWrittenEarly) {
  ga_config c = config();
  Early plain(c, 0);
  c.eager = 1;
  Early early(c);
  const Block master(kCount, 3);
  for (const Early* x : {&plain, &early})
    ASSERT_OK(ga_state_set(x->ctx, 0, "master", master.data(), GA_F32, kCount));
  EXPECT_FALSE(early.window(1, true, false));
  plain.window(1, true, false);
  EXPECT_TRUE(early.same(plain));
  for (uint64_t t = 2; t < 4; ++t) {
    EXPECT_EQ(early.window(t, false, false), t == 3);
    plain.window(t, false, false);
    EXPECT_TRUE(early.same(plain));
  }
}

TEST(Eager, WhatCannotBeWrittenEarlyIsRefused) {
  Context ctx(eager_config());
  const ga_group group = ctx.group(plain_sgd());
  Tensor p(GA_BF16, kCount);
  const auto add = [&](int32_t dtype, int32_t master, int32_t rounding, int32_t early) {
    ga_param_options o = options();
    o.master = master;
    o.rounding = rounding;
    o.write_early = early;
    return ga_param_add(ctx, group, "p", p.data(), dtype, 1, &kCount, &o, nullptr);
  };
  EXPECT_TRUE(refused(add(GA_BF16, GA_MASTER_F32, GA_ROUND_NEAREST, 2), GA_ERROR_INVALID_ARGUMENT,
                      {"write_early", "2"}));
  EXPECT_TRUE(refused(add(GA_BF16, GA_MASTER_NONE, GA_ROUND_NEAREST, 1), GA_ERROR_UNSUPPORTED,
                      {"write_early", "master"}));
  EXPECT_TRUE(refused(add(GA_BF16, GA_MASTER_F32, GA_ROUND_STOCHASTIC, 1), GA_ERROR_UNSUPPORTED,
                      {"write_early", "nearest"}));
  const int64_t half = kCount / 2;
  ga_param_options o = options();
  o.write_early = 1;
  EXPECT_TRUE(refused(ga_param_add(ctx, group, "p", p.data(), GA_F32, 1, &half, &o, nullptr),
                      GA_ERROR_UNSUPPORTED, {"write_early", "master"}));
}

TEST(Eager, OptionsThatCannotBeAreRefused) {
  ga_context* ctx = nullptr;
  ga_config c = eager_config();
  c.eager = 2;
  EXPECT_TRUE(refused(ga_context_create(&c, &ctx), GA_ERROR_INVALID_ARGUMENT, {"eager was 2"}));
  c = eager_config();
  c.eager_bytes = -1;
  EXPECT_TRUE(
      refused(ga_context_create(&c, &ctx), GA_ERROR_INVALID_ARGUMENT, {"eager_bytes was -1"}));
  c = eager_config();
  c.eager_threads = 5000;
  EXPECT_TRUE(
      refused(ga_context_create(&c, &ctx), GA_ERROR_INVALID_ARGUMENT, {"eager_threads was 5000"}));
  c = eager_config();
  c.device = GA_DEVICE_CUDA;
  EXPECT_TRUE(refused(ga_context_create(&c, &ctx), GA_ERROR_UNSUPPORTED, {"eager was 1"}));
}

}  // namespace
}  // namespace ga::test
