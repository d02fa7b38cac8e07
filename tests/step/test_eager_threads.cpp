// SPDX-License-Identifier: Apache-2.0
//
// With ga_config.eager, ga_accumulate_part and ga_params_ready may run on several threads at once, for different
// parameters. (That bits stay the same is tested with all other ways in test_eager.cpp.)
#include <array>
#include <atomic>
#include <functional>
#include <mutex>
#include <set>
#include <stdexcept>
#include <thread>

#include "small_run.hpp"

namespace ga::test {
namespace {

constexpr int64_t kMany = 1 << 18;  // elements, for which loops go to parallel_for

ga_config eager_config(bool in_place = false) {
  ga_config c = config();
  c.eager = 1;
  if (in_place) c.nonfinite = GA_NONFINITE_IGNORE;
  return c;
}

ga_status ready(ga_context* ctx, ga_param id) { return ga_params_ready(ctx, &id, 1); }

// A parallel_for of the program's that runs hook() once, before a loop.
struct Hooked {
  std::function<void()> hook;

  static void run(void* user, int64_t count, ga_task task, void* data) {
    auto& self = *static_cast<Hooked*>(user);
    if (const auto hook = std::exchange(self.hook, {})) hook();
    for (int64_t i = 0; i < count; ++i) task(data, i);
  }
  ga_config config(ga_config c) {
    c.parallel_for = run;
    c.parallel_for_user = this;
    return c;
  }
};

// Parameters of SGD, 8 in every element, whose gradients are ones.
struct Params {
  explicit Params(const ga_config& c, int params = 2) : ctx(c) {
    const ga_group group = ctx.group(plain_sgd());
    for (int k = 0; k < params; ++k) {
      data.push_back(std::make_unique<Block>(kMany, 8));
      ctx.param(group, "p" + std::to_string(k), data.back()->data(), {kMany});
    }
    EXPECT_OK(ga_prepare(ctx));
    begin();
  }
  void begin() { EXPECT_OK(ga_micro_begin(ctx, -1, 1, MicroOptions(0, GA_MICRO_LAST))); }
  ga_status part(ga_param id) { return ga_accumulate_part(ctx, id, ones.data()); }
  ga_step_result end() {
    EXPECT_OK(ga_micro_end(ctx));
    return step(ctx);
  }

  Context ctx;
  std::vector<std::unique_ptr<Block>> data;
  const Block ones = Block(kMany, 1);
};

// What other threads and callbacks may do while a thread is in a pass over parameter 0.
struct Meanwhile {
  ga_status part, ready, same_part, same_ready, nested, step, end, window, discard, rows;
  std::string message;
  std::atomic<bool> done{false};
  bool overlapped = false;
  std::thread other;

  void look(Params& p) {
    nested = p.part(1);
    other = std::thread([&] {
      same_part = p.part(0);
      message = ga_last_error();
      same_ready = test::ready(p.ctx, 0);
      const int32_t row = 0;
      rows = ga_accumulate_rows(p.ctx, 1, &row, GA_I32, 1, p.ones.data());
      step = ga_step(p.ctx, nullptr);
      end = ga_micro_end(p.ctx);
      discard = ga_discard(p.ctx);
      ga_window_info info;
      info.struct_size = sizeof info;
      window = ga_window(p.ctx, &info);
      part = p.part(1);
      ready = test::ready(p.ctx, 1);
      done = true;
    });
    overlapped = comes_true([&] { return done.load(); });
  }
  void expect() {
    other.join();
    EXPECT_TRUE(overlapped);
    EXPECT_EQ(part, GA_OK);
    EXPECT_EQ(ready, GA_OK);
    for (const ga_status status : {nested, step, end, window, discard, rows})
      EXPECT_EQ(status, GA_ERROR_INVALID_STATE);
  }
};

TEST(EagerThreads, ContributionsOverlap) {
  Hooked hooked;
  Meanwhile seen;
  Params p(hooked.config(eager_config()));
  hooked.hook = [&] { seen.look(p); };
  ASSERT_OK(p.part(0));
  seen.expect();
  EXPECT_EQ(seen.same_part, GA_ERROR_INVALID_STATE);
  EXPECT_NE(seen.message.find("another thread adds a gradient to parameter \"p0\""),
            std::string::npos)
      << seen.message;
  EXPECT_EQ(seen.same_ready, GA_ERROR_INVALID_STATE);
  ASSERT_OK(ready(p.ctx, 0));
  const ga_step_result r = p.end();
  EXPECT_EQ(r.eager, 2);
  EXPECT_EQ(*p.data[0], Block(kMany, 7));
  EXPECT_EQ(*p.data[1], Block(kMany, 7));
}

TEST(EagerThreads, UpdatesOverlap) {
  for (const bool in_place : {false, true}) {
    Hooked hooked;
    Meanwhile seen;
    Params p(hooked.config(eager_config(in_place)));
    ASSERT_OK(p.part(0));
    hooked.hook = [&] { seen.look(p); };
    ASSERT_OK(ready(p.ctx, 0));
    seen.expect();
    EXPECT_EQ(seen.same_part, GA_ERROR_INVALID_STATE);
    EXPECT_EQ(seen.same_ready, GA_OK);  // once more changes nothing
    EXPECT_EQ((*p.data[1])[5], in_place ? 7 : 8);
    EXPECT_EQ(p.end().eager, 2);
    EXPECT_EQ(*p.data[0], Block(kMany, 7));
    EXPECT_EQ(*p.data[1], Block(kMany, 7));
  }
}

TEST(EagerThreads, OnlyWithEagerUpdates) {
  Hooked hooked;
  ga_config c = hooked.config(config());
  Params p(c);
  ga_status other = GA_OK;
  hooked.hook = [&] { std::thread([&] { other = p.part(1); }).join(); };
  ASSERT_OK(p.part(0));
  EXPECT_EQ(other, GA_ERROR_INVALID_STATE);
}

// A callback that is called with the lock held, which the nested call would wait for.
TEST(EagerThreads, ACallbackOfTheFirstContributionMustNotUseTheContext) {
  struct Allocator {
    ga_context* ctx = nullptr;
    std::set<ga_status> calls;
    static void* allocate(void* user, size_t bytes, ga_device, void*) {
      auto& self = *static_cast<Allocator*>(user);
      if (self.ctx) self.calls.insert(ready(self.ctx, 0));
      return std::aligned_alloc(64, (bytes + 63) / 64 * 64);
    }
    static void free(void*, void* data, size_t, ga_device, void*) { std::free(data); }
  } allocator;
  ga_config c = eager_config();
  c.allocate = Allocator::allocate;
  c.free = Allocator::free;
  c.allocator_user = &allocator;
  Context ctx(c);
  Block p(100, 8);
  const Block g(100, 1);
  ctx.param(ctx.group(plain_sgd()), "p", p.data(), {100});
  ASSERT_OK(ga_micro_begin(ctx, -1, 1, nullptr));
  allocator.ctx = ctx;
  ASSERT_OK(ga_accumulate_part(ctx, 0, g.data()));
  allocator.ctx = nullptr;
  EXPECT_EQ(allocator.calls, std::set<ga_status>{GA_ERROR_INVALID_STATE});
}

TEST(EagerThreads, AFaultOfOneThreadInvalidatesTheWindowOfAll) {
  Hooked hooked;
  Params p(hooked.config(eager_config()), 3);
  ga_status during = GA_OK, update = GA_OK;
  hooked.hook = [&] {
    std::thread([&] { during = p.part(1), update = ready(p.ctx, 1); }).join();
    throw std::runtime_error("out of order");
  };
  EXPECT_TRUE(refused(p.part(0), GA_ERROR_FAULT, {"out of order"}));
  EXPECT_OK(during);
  EXPECT_OK(update);
  EXPECT_EQ(p.part(2), GA_ERROR_INVALID_STATE);
  ASSERT_OK(ga_discard(p.ctx));
  p.begin();
  ASSERT_OK(p.part(0));  // another thread's call is no longer in its way
  p.end();
  EXPECT_EQ((*p.data[0])[5], 7);
  EXPECT_EQ((*p.data[1])[5], 8);
}

TEST(EagerThreads, AFaultOfOneUpdateLeavesThoseOfOthers) {
  for (const bool in_place : {false, true}) {
    Hooked hooked;
    Params p(hooked.config(eager_config(in_place)));
    ga_status update = GA_OK;
    ASSERT_OK(p.part(0));
    ASSERT_OK(p.part(1));
    hooked.hook = [&] {
      std::thread([&] { update = ready(p.ctx, 1); }).join();
      throw std::runtime_error("out of order");
    };
    EXPECT_EQ(ready(p.ctx, 0), in_place ? GA_ERROR_FAULT : GA_OK);
    EXPECT_OK(update);
    if (in_place) {
      EXPECT_EQ(p.part(1), GA_ERROR_FAULT);
      EXPECT_EQ(ga_step(p.ctx, nullptr), GA_ERROR_FAULT);
      continue;
    }
    EXPECT_EQ(p.end().eager, 1);
    EXPECT_EQ(*p.data[0], Block(kMany, 7));
    EXPECT_EQ(*p.data[1], Block(kMany, 7));
  }
}

// ---- Many rounds --------------------------------------------------------------------------------

constexpr int kThreads = 4, kParams = 61;

// Tensors of all sizes around those of a chunk and of a loop that pays; the first is tied: it has two
// contributions in a micro-batch.
int64_t count_of(size_t i) {
  constexpr int64_t kCounts[] = {1, 15, 1000, 4097, 20000, 70001};
  return kCounts[i % std::size(kCounts)];
}

class Rounds {
 public:
  Rounds(const ga_config& c, int threads, double max_norm) : ctx_(c), threads_(threads) {
    std::vector<ga_group> groups;
    for (const int32_t kind :
         {GA_OPTIMIZER_ADAMW, GA_OPTIMIZER_LAMB, GA_OPTIMIZER_LARS, GA_OPTIMIZER_ADAFACTOR,
          GA_OPTIMIZER_ROWWISE_ADAGRAD, GA_OPTIMIZER_ADAMW})
      groups.push_back(ctx_.group(without_limit(optimizer(kind))));
    const ga_clip units = clip(GA_CLIP_AGC, 0);
    EXPECT_OK(ga_group_set_clip(ctx_, groups.back(), &units));
    if (max_norm > 0) {
      const ga_clip norm = clip(GA_CLIP_GLOBAL, max_norm);
      EXPECT_OK(ga_context_set_clip(ctx_, &norm));
    }
    params_.reserve(kParams);
    for (size_t i = 0; i < kParams; ++i) {
      params_.push_back(random_tensor(GA_F32, count_of(i), 1 + i));
      const int64_t rows = count_of(i) % 5 == 0 ? 5 : count_of(i) % 17 == 0 ? 17 : 1;
      ctx_.param(groups[i / 6 % groups.size()], "p" + std::to_string(i),
                 static_cast<float*>(params_[i].data()), {rows, count_of(i) / rows});
      for (uint64_t k = 0; k < 3; ++k)
        gradients_[k].push_back(random_tensor(GA_F32, count_of(i), 1000 * (k + 1) + i));
    }
  }

  ga_step_result window() {
    for (const bool last : {false, true}) {
      EXPECT_OK(ga_micro_begin(ctx_, -1, 1, MicroOptions(0, last ? GA_MICRO_LAST : 0)));
      std::vector<std::thread> all;
      for (int t = 1; t < threads_; ++t) all.emplace_back([=] { parts(t, last); });
      parts(0, last);
      for (std::thread& t : all) t.join();
      EXPECT_OK(ga_micro_end(ctx_));
    }
    return step(ctx_);
  }
  bool same(const Rounds& other) const {
    for (size_t i = 0; i < kParams; ++i)
      if (memcmp(params_[i].data(), other.params_[i].data(),
                 static_cast<size_t>(count_of(i)) * sizeof(float)) != 0)
        return false;
    return saved(ctx_) == saved(other.ctx_);
  }
  ga_context* context() const { return ctx_; }

 private:
  // Which would have LAMB wait for the step while units are clipped.
  static ga_optimizer without_limit(ga_optimizer o) {
    o.max_grad_norm = 0;
    return o;
  }
  void parts(int thread, bool last) {
    for (int i = thread; i < kParams; i += threads_) {
      const auto k = static_cast<size_t>(i);
      EXPECT_OK(ga_accumulate_part(ctx_, i, gradients_[last][k].data()));
      if (i == 0) {
        EXPECT_OK(ga_accumulate_part(ctx_, i, gradients_[2][k].data()));
      }
      if (last) {
        EXPECT_OK(ready(ctx_, i));
      }
    }
  }

  Context ctx_;
  const int threads_;
  std::vector<Tensor> params_;
  std::vector<Tensor> gradients_[3];
};

struct Told {
  std::array<std::atomic<int>, kParams> done = {};
  std::atomic<int> wrong{0};
  ga_context* ctx = nullptr;

  static void told(void* user, ga_param param) {
    auto& self = *static_cast<Told*>(user);
    ++self.done[static_cast<size_t>(param)];
    if (self.ctx && ready(self.ctx, param) != GA_ERROR_INVALID_STATE) ++self.wrong;
  }
};

TEST(EagerThreads, ManyRoundsHaveTheBitsOfOneThread) {
  for (const double max_norm : {0.0, 1e6, 0.5}) {
    for (const auto& [in_place, live, threads] :
         {std::tuple(false, false, 0), std::tuple(false, true, 1), std::tuple(true, false, 0),
          std::tuple(true, true, 1)}) {
      if (in_place && max_norm == 0.5) continue;
      SCOPED_TRACE(testing::Message() << max_norm << in_place << live << threads);
      Told told;
      ga_config c = config();
      c.num_threads = 2;
      if (in_place) c.nonfinite = GA_NONFINITE_IGNORE;
      if (live) c.gradient_life = GA_GRADIENTS_LIVE;
      Rounds plain(c, 1, max_norm);
      c.eager = 1;
      c.eager_threads = threads;
      c.on_param_done = Told::told;
      c.on_param_done_user = &told;
      Rounds many(c, kThreads, max_norm);
      told.ctx = many.context();
      constexpr int kWindows = kWatchesThreads ? 4 : 25;
      for (int t = 0; t < kWindows; ++t) {
        const ga_step_result a = plain.window(), b = many.window();
        ASSERT_EQ(memcmp(&a.norm, &b.norm, sizeof a.norm), 0);
        ASSERT_EQ(a.clip_factor, b.clip_factor);
        if (threads == 0) {
          ASSERT_EQ(b.eager, kParams);
        }
      }
      EXPECT_TRUE(many.same(plain));
      for (const auto& n : told.done) EXPECT_EQ(n, kWindows);
      EXPECT_EQ(told.wrong, 0);
    }
  }
}

TEST(EagerThreads, EveryCallHasALineOfItsOwnInTheLog) {
  struct Lines {
    std::mutex mutex;
    std::multiset<std::string> parts;
    int ready = 0;
    static void add(void* user, const char* line) {
      auto& self = *static_cast<Lines*>(user);
      const std::string text = line;
      const std::lock_guard<std::mutex> lock(self.mutex);
      const std::string part = "gradaccum,cpu,ga_accumulate_part,";
      if (text.find(part) == 0)
        self.parts.insert(text.substr(part.size(), text.rfind(',') - part.size()));
      self.ready += text.find("gradaccum,cpu,ga_params_ready,count:1,GA_OK,") == 0;
    }
  } lines;
  ga_config c = eager_config();
  c.log = Lines::add;
  c.log_user = &lines;
  Rounds many(c, kThreads, 0);
  constexpr int kWindows = 10;
  for (int t = 0; t < kWindows; ++t) many.window();
  EXPECT_EQ(lines.ready, kWindows * kParams);
  for (int i = 0; i < kParams; ++i)
    EXPECT_EQ(lines.parts.count("param:" + std::to_string(i) + ",GA_OK"),
              static_cast<size_t>(2 * kWindows * (i == 0 ? 2 : 1)));
}

}  // namespace
}  // namespace ga::test
