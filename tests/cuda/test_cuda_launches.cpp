// SPDX-License-Identifier: Apache-2.0
//
// The cost of a call beyond its work on the data: launches, copies and waits, as the simulated
// devices count them.
#include "device.hpp"

namespace ga::test {
namespace {

class Launches : public OnDevice<> {};

// A context with n parameters, and gradients for them.
struct Many {
  Stream stream;
  ga_context* ctx = nullptr;
  std::unique_ptr<DeviceTensor> params, gradients, others;
  int64_t n, count;

  Many(int64_t n, const ga_optimizer& o, ga_config c = config(), int64_t count = 5,
       const std::vector<int32_t>& dtypes = {GA_F32}, const ga_param_options& options = {})
      : n(n), count(count) {
    c.device = GA_DEVICE_CUDA;
    c.stream = static_cast<cudaStream_t>(stream);
    EXPECT_OK(ga_context_create(&c, &ctx));
    const int64_t total = 2 * n * count;  // for f64 too
    params = std::make_unique<DeviceTensor>(numbers(GA_F32, total, 1), stream, 0);
    gradients = std::make_unique<DeviceTensor>(numbers(GA_F32, total, 2), stream, 0);
    others = std::make_unique<DeviceTensor>(numbers(GA_F32, total, 3), stream, 0);
    EXPECT_OK(ga_group_add(ctx, &o, nullptr));
    ga_param_options given = options;
    given.struct_size = sizeof given;
    const std::vector<int64_t> shape =
        count % 5 == 0 ? std::vector<int64_t>{count / 5, 5} : std::vector<int64_t>{count};
    for (int64_t i = 0; i < n; ++i) {
      const std::string name = "p" + std::to_string(i);
      EXPECT_OK(ga_param_add(ctx, 0, name.c_str(), at(*params, i),
                             dtypes[static_cast<size_t>(i) % dtypes.size()],
                             static_cast<int32_t>(shape.size()), shape.data(), &given, nullptr));
    }
  }
  ~Many() { ga_context_destroy(ctx); }

  void* at(const DeviceTensor& t, int64_t i) const {
    return static_cast<char*>(t.data()) + 8 * i * count;
  }
  std::vector<const void*> list(const DeviceTensor& t) const {
    std::vector<const void*> result;
    for (int64_t i = 0; i < n; ++i) result.push_back(at(t, i));
    return result;
  }
  void accumulate(bool other = false) {
    const auto gradients_now = list(other ? *others : *gradients);
    EXPECT_OK(ga_accumulate(ctx, gradients_now.data(), gradients_now.size(), 1, nullptr));
  }
  void window() {
    for (int k = 0; k < 3; ++k) accumulate(k == 1);
    EXPECT_OK(ga_step(ctx, nullptr));
  }
};

#ifdef GA_SIMULATED

std::string describe(const sim::Counters& c) {
  std::string text = std::to_string(c.launches) + " launches";
  for (const auto& [kernel, n] : c.by_kernel) text += "\n  " + std::to_string(n) + " " + kernel;
  for (const auto& [call, n] : c.by_library) text += "\n  " + std::to_string(n) + " " + call;
  return text;
}

// Expects that nothing waits, allocates or copies.
void expect_quiet(const sim::Counters& c) {
  EXPECT_EQ(c.synchronizations, 0);
  EXPECT_EQ(c.allocations, 0);
  EXPECT_EQ(c.frees, 0);
  EXPECT_EQ(c.queries, 0);
  EXPECT_EQ(c.copies, 0);
}

template <class Work>
sim::Counters count(Work&& work) {
  sim::reset_counters();
  work();
  return sim::counters();
}

TEST_F(Launches, OfAccumulate) {
  for (const int64_t n : {1, 400, 4000, 4001}) {
    SCOPED_TRACE(n);
    Many m(n, plain_sgd());
    m.accumulate();
    EXPECT_OK(ga_step(m.ctx, nullptr));
    m.accumulate();
    EXPECT_OK(ga_step(m.ctx, nullptr));
    bool known[] = {true, false};  // whether the addresses have been checked
    for (const bool other :
         {false, true, false, true}) {  // other pointers, or not the first call of the window
      const sim::Counters c = count([&] { m.accumulate(other); });
      EXPECT_EQ(c.launches, (n + 3999) / 4000) << describe(c);
      EXPECT_EQ(c.pointer_queries, known[other] ? 0 : n);
      known[other] = true;
      expect_quiet(c);
    }
    EXPECT_OK(ga_step(m.ctx, nullptr));
  }
}

// A maximum, whose contributions have a scale of their own, does not keep the others from sharing a launch.
TEST_F(Launches, OfAccumulateBesideAMaximum) {
  const int64_t n = 1000;
  ga_param_options largest = {};
  largest.reduce = GA_REDUCE_MAX;
  Many m(1, optimizer(GA_OPTIMIZER_EXTERNAL), config(), 5, {GA_F32}, largest);
  const DeviceTensor params(numbers(GA_F32, 5 * n, 1), m.stream, 0),
      gradients(numbers(GA_F32, 5 * n, 2), m.stream, 0);
  const ga_optimizer sgd = plain_sgd();
  EXPECT_OK(ga_group_add(m.ctx, &sgd, nullptr));
  auto list = m.list(*m.gradients);
  for (int64_t i = 0; i < n; ++i) {
    const std::string name = "sum" + std::to_string(i);
    const int64_t five = 5;
    EXPECT_OK(ga_param_add(m.ctx, 1, name.c_str(), static_cast<float*>(params.data()) + 5 * i,
                           GA_F32, 1, &five, nullptr, nullptr));
    list.push_back(static_cast<const float*>(gradients.data()) + 5 * i);
  }
  for (int k = 0; k < 5; ++k) {
    const sim::Counters c =
        count([&] { EXPECT_OK(ga_accumulate(m.ctx, list.data(), list.size(), 3, nullptr)); });
    if (k > 0) {  // the first one allocates
      EXPECT_EQ(c.launches, 2) << describe(c);
    }
    if (k % 2 == 0) {
      EXPECT_OK(ga_step(m.ctx, nullptr));
    }
  }
}

// Parameters with arrays of bf16, or arrays that are not aligned, have an update of their own, but not if they are small,
// nor with LAMB.
TEST_F(Launches, OfMixedArrays) {
  const auto steps = [](Many& m) {
    m.window();
    m.accumulate();
    const sim::Counters c = count([&] { EXPECT_OK(ga_step(m.ctx, nullptr)); });
    expect_quiet(c);
    return c.launches;
  };
  struct {
    int32_t kind;
    int64_t count, one, both;  // one, both: launches
  } const cases[] = {{GA_OPTIMIZER_ADAMW, 2050, 2, 3},
                     {GA_OPTIMIZER_ADAMW, 2046, 2, 2},
                     {GA_OPTIMIZER_LAMB, 2050, 3, 3}};
  for (const auto& k : cases) {
    SCOPED_TRACE(testing::Message() << k.kind << ", " << k.count);
    ga_param_options bf16 = {};
    bf16.master = GA_MASTER_NONE;
    Many low(3, optimizer(k.kind), config(), k.count, {GA_BF16}, bf16),
        both(3, optimizer(k.kind), config(), k.count, {GA_BF16, GA_F32}, bf16),
        high(3, optimizer(k.kind), config(), k.count);
    EXPECT_EQ(steps(low), k.one);
    EXPECT_EQ(steps(both), k.both);
    EXPECT_EQ(steps(high), k.one);
    for (int64_t i = 0; i < 3; ++i) {
      EXPECT_OK(ga_param_bind(high.ctx, static_cast<ga_param>(i),
                              static_cast<char*>(high.at(*high.params, i)) + 4));
      EXPECT_EQ(steps(high), i < 2 ? k.both : k.one);
    }
  }
}

struct Case {
  const char* name;
  ga_optimizer optimizer;
  ga_clip clip;
  std::vector<int32_t> dtypes;
  int64_t launches;  // by ga_step
};

// One launch sums up and decides. One more follows for each Op and dtype of its arithmetic, or two
// if the Op is layer-wise.
std::vector<Case> cases() {
  const ga_clip global = clip(GA_CLIP_GLOBAL, 0.1), none = clip(GA_CLIP_NONE, 0),
                tensor = clip(GA_CLIP_PER_TENSOR, 0.1);
  // Clipping by value comes before the norm, so no accumulating pass has computed the norm.
  const ga_clip value = clip(GA_CLIP_GLOBAL, 0.1, GA_FLAVOR_TORCH, 0.3);
  ga_clip rows = clip(GA_CLIP_AGC, 0), columns = rows;
  rows.agc_units = GA_AGC_TORCH;
  ga_clip value_columns = columns;
  value_columns.max_value = 0.3;
  ga_optimizer momentum = plain_sgd();
  momentum.momentum = 0.9;
  const ga_optimizer adamw = optimizer(GA_OPTIMIZER_ADAMW), lamb = optimizer(GA_OPTIMIZER_LAMB),
                     lars = optimizer(GA_OPTIMIZER_LARS),
                     adafactor = optimizer(GA_OPTIMIZER_ADAFACTOR);
  const std::vector<int32_t> f32 = {GA_F32}, mixed = {GA_F32, GA_BF16}, two = {GA_F64, GA_F32};
  return {{"SGD", momentum, none, f32, 2},
          {"AdamW", adamw, none, f32, 2},
          {"AdamW, global", adamw, global, f32, 2},
          {"AdamW, per tensor", adamw, tensor, f32, 2},
          {"AdamW, f32 and bf16", adamw, global, mixed, 2},
          {"AdamW, f32 and f64", adamw, global, two, 3},
          {"AdamW, value and global", adamw, value, f32, 2},
          {"LAMB", lamb, global, f32, 3},
          {"LAMB, value and global", lamb, value, f32, 3},
          {"LARS", lars, none, f32, 3},
          {"Adafactor", adafactor, none, f32, 3},
          {"Adafactor, global", adafactor, global, f32, 3},
          {"Adafactor, value and global", adafactor, value, f32, 3},
          {"SGD, AGC by columns", momentum, columns, f32, 2},
          {"SGD, AGC by rows", momentum, rows, f32, 2},
          {"SGD, value and AGC", momentum, value_columns, f32, 2},
          {"LAMB, AGC", lamb, columns, f32, 3},
          {"LAMB, value and AGC", lamb, value_columns, f32, 3},
          {"Adafactor, AGC", adafactor, columns, f32, 4}};  // of what is clipped by units
}

TEST_F(Launches, OfAWindow) {
  for (const int32_t life : {GA_GRADIENTS_CONSUMED, GA_GRADIENTS_LIVE}) {
    for (const Case& k : cases()) {
      for (const int64_t n : {1, 400}) {
        SCOPED_TRACE(testing::Message()
                     << k.name << (life == GA_GRADIENTS_LIVE ? ", live, " : ", ") << n);
        if (n == 1 && k.dtypes.size() > 1) continue;
        ga_config c = config();
        c.gradient_life = life;
        Many m(n, k.optimizer, c, n == 1 ? 200000 : 35, k.dtypes);
        EXPECT_OK(ga_context_set_clip(m.ctx, &k.clip));
        m.window();
        m.window();
        const sim::Counters accumulated = count([&] {
          for (int i = 0; i < 3; ++i) m.accumulate(i == 1);
        });
        EXPECT_EQ(accumulated.launches, life == GA_GRADIENTS_LIVE ? 2 : 3) << describe(accumulated);
        expect_quiet(accumulated);
        sim::Counters stepped = count([&] { EXPECT_OK(ga_step(m.ctx, nullptr)); });
        EXPECT_EQ(stepped.launches, k.launches) << describe(stepped);
        expect_quiet(stepped);
        if (life != GA_GRADIENTS_LIVE) continue;
        // Windows of one micro-batch, whose gradients the step reads in place. The first such
        // window updates the tables on the device. When the gradients move, ga_accumulate sends the
        // new addresses in its one launch.
        for (int w = 0; w < 4; ++w) {
          const sim::Counters adopted = count([&] { m.accumulate(w >= 2); });
          EXPECT_EQ(adopted.launches, w == 2) << describe(adopted);
          expect_quiet(adopted);
          stepped = count([&] { EXPECT_OK(ga_step(m.ctx, nullptr)); });
          if (w > 0) {
            EXPECT_EQ(stepped.launches, k.launches) << describe(stepped);
          }
          expect_quiet(stepped);
        }
      }
    }
  }
}

// More live gradients than the arguments of one launch can hold.
TEST_F(Launches, OfManyLiveGradients) {
  ga_config c = config();
  c.gradient_life = GA_GRADIENTS_LIVE;
  for (const int64_t n : {2000, 4001}) {
    SCOPED_TRACE(n);
    Many m(n, optimizer(GA_OPTIMIZER_ADAMW), c);
    m.window();
    m.window();
    m.accumulate();
    const sim::Counters second = count([&] { m.accumulate(true); });
    EXPECT_EQ(second.launches, (n + 1999) / 2000) << describe(second);
    expect_quiet(second);
    EXPECT_OK(ga_step(m.ctx, nullptr));
    for (int w = 0; w < 2;
         ++w) {  // the first differs from the window before it and uploads all tables
      m.accumulate();
      expect_quiet(count([&] { EXPECT_OK(ga_step(m.ctx, nullptr)); }));
    }
    const sim::Counters moved = count([&] { m.accumulate(true); });
    EXPECT_EQ(moved.launches, (n + 2039) / 2040) << describe(moved);
    expect_quiet(moved);
    const sim::Counters stepped = count([&] { EXPECT_OK(ga_step(m.ctx, nullptr)); });
    EXPECT_EQ(stepped.launches, 2) << describe(stepped);
    expect_quiet(stepped);
  }
}

// A window like the one before it waits for nothing and copies nothing, whatever the options are.
struct Way {
  const char* name;
  void (*set)(ga_config&);
  void (*prepare)(ga_context*);
  int64_t first, accumulate, step;  // launches
};

std::vector<Way> ways() {
  using C = ga_config&;
  using X = ga_context*;
  const auto scaler = [](X ctx) {
    ga_loss_scaler s;
    EXPECT_OK(ga_loss_scaler_init(&s, sizeof s));
    EXPECT_OK(ga_context_set_loss_scaler(ctx, &s));
  };
  const auto nothing = [](X) {};
  return {
      {"a dynamic loss scale", [](C) {}, scaler, 1, 1, 2},
      {"live gradients", [](C c) { c.gradient_life = GA_GRADIENTS_LIVE; }, nothing, 0, 1, 2},
      {"missing gradients as zeros", [](C c) { c.missing = GA_MISSING_ZERO; }, nothing, 1, 1, 2},
      {"dropped micro-batches", [](C c) { c.nonfinite = GA_NONFINITE_DROP_MICRO; }, scaler, 4, 4,
       2},
      {"running means", [](C c) { c.accumulation = GA_ACCUMULATE_RUNNING_MEAN; }, nothing, 1, 1, 2},
      {"a noise scale", [](C c) { c.noise_scale = 1; }, nothing, 1, 1, 2},
      {"averages", [](C) {},
       [](X ctx) {
         ga_ema e;
         EXPECT_OK(ga_ema_init(&e, sizeof e));
         EXPECT_OK(ga_context_set_ema(ctx, &e));
       },
       1, 1, 2},
      {"clipped micro-batches", [](C) {},
       [](X ctx) {
         ga_clip c = clip(GA_CLIP_GLOBAL, 0.1);
         c.when = GA_CLIP_WHEN_MICRO;
         EXPECT_OK(ga_context_set_clip(ctx, &c));
       },
       5, 5, 2},
      {"a schedule", [](C) {},
       [](X ctx) {
         ga_schedule s = schedule(GA_SCHEDULE_COSINE);
         s.warmup_steps = 10;
         s.total_steps = 100;
         EXPECT_OK(ga_group_set_schedule(ctx, 0, &s));
       },
       1, 1, 2}};
}

TEST_F(Launches, OfOtherWindows) {
  for (const Way& w : ways()) {
    SCOPED_TRACE(w.name);
    ga_config c = config();
    w.set(c);
    Many m(100, optimizer(GA_OPTIMIZER_ADAMW), c, 35);
    w.prepare(m.ctx);
    m.window();
    m.window();
    for (int k = 0; k < 3; ++k) {
      const sim::Counters accumulated = count([&] { m.accumulate(k == 1); });
      EXPECT_EQ(accumulated.launches, k == 0 ? w.first : w.accumulate)
          << k << ": " << describe(accumulated);
      expect_quiet(accumulated);
    }
    const sim::Counters stepped = count([&] { EXPECT_OK(ga_step(m.ctx, nullptr)); });
    EXPECT_EQ(stepped.launches, w.step) << describe(stepped);
    expect_quiet(stepped);
  }
}

TEST_F(Launches, OfRows) {
  for (const int32_t kind : {GA_ROWS_DENSE, GA_ROWS_LAZY}) {
    for (const int32_t nonfinite : {GA_NONFINITE_SKIP_STEP, GA_NONFINITE_DROP_MICRO}) {
      SCOPED_TRACE(testing::Message() << kind << " " << nonfinite);
      ga_config c = config();
      c.nonfinite = nonfinite;
      ga_param_options o = options();
      o.rows = kind;
      Many m(1, optimizer(GA_OPTIMIZER_ADAMW), c, 5000, {GA_F32}, o);
      const Tensor zeros(GA_F32, 100);
      const DeviceTensor indices(zeros, m.stream, 0), values(numbers(GA_F32, 500, 9), m.stream, 0);
      const auto micro = [&](int64_t k) {
        EXPECT_OK(ga_micro_begin(m.ctx, k, 1, nullptr));
        EXPECT_OK(ga_accumulate_rows(m.ctx, 0, indices.data(), GA_I32, 100, values.data()));
        EXPECT_OK(ga_micro_end(m.ctx));
      };
      const auto window = [&] {
        for (int64_t k = 0; k < 3; ++k) micro(k);
        EXPECT_OK(ga_step(m.ctx, nullptr));
      };
      window();
      window();
      const sim::Counters counted = count(window);
      expect_quiet(counted);
      EXPECT_EQ(counted.library_calls, 3) << describe(counted);  // one sort each
      const bool drops = nonfinite == GA_NONFINITE_DROP_MICRO;
      EXPECT_EQ(counted.launches, (drops ? 27 : 18) + (kind == GA_ROWS_LAZY)) << describe(counted);
    }
  }
}

// Queries and setters, which may be called within a window.
TEST_F(Launches, OfSmallCalls) {
  Many m(10, optimizer(GA_OPTIMIZER_ADAMW));
  m.window();
  m.window();
  const sim::Counters asked = count([&] {
    ga_step_result r = {};
    r.struct_size = sizeof r;
    const void* at = nullptr;
    EXPECT_OK(ga_loss_scale(m.ctx, nullptr, &at));
    EXPECT_OK(ga_step_result_get(m.ctx, 0, 0, &r));
    window(m.ctx);
    memory(m.ctx);
  });
  EXPECT_EQ(asked.launches, 0) << describe(asked);
  expect_quiet(asked);
  // Options of a group that change in every window go to the device with one launch.
  for (int w = 0; w < 3; ++w) {
    m.accumulate();
    const sim::Counters c = count([&] {
      EXPECT_OK(ga_group_set_lr(m.ctx, 0, 0.1 * w));
      EXPECT_OK(ga_step(m.ctx, nullptr));
    });
    EXPECT_EQ(c.launches, 3) << describe(c);
    expect_quiet(c);
  }
  for (int w = 0; w < 3; ++w) {
    m.accumulate();
    const sim::Counters c = count([&] {
      EXPECT_OK(ga_group_set_weight_decay(m.ctx, 0, 0.1 * (w + 1)));
      EXPECT_OK(ga_step(m.ctx, nullptr));
    });
    EXPECT_LE(c.launches, 3) << describe(c);
    expect_quiet(c);
  }
}

// A kernel's accesses to the library's arrays do not straddle lines of the device's caches.
TEST_F(Launches, ArraysBeginWithALine) {
  for (const int64_t count : {1035, 300005}) {
    Many m(3, optimizer(GA_OPTIMIZER_ADAMW), config(), count, {GA_F32, GA_F64, GA_F32});
    m.window();
    EXPECT_OK(ga_micro_begin(m.ctx, -1, 1, nullptr));
    for (ga_param i = 0; i < 3; ++i) {
      ga_accumulator a = {};
      a.struct_size = sizeof a;
      EXPECT_OK(ga_accumulator_acquire(m.ctx, i, &a));
      EXPECT_EQ(reinterpret_cast<uintptr_t>(a.data) % 128, 0) << count << " elements, " << i;
      EXPECT_OK(ga_accumulator_release(m.ctx, i));
    }
    EXPECT_OK(ga_micro_end(m.ctx));
  }
}

// After a capture, tables that a replay may have overwritten are sent again in each window, without a
// wait.
TEST_F(Launches, OfWindowsBesideAGraph) {
  for (const int64_t n : {10, 400, 9000}) {
    SCOPED_TRACE(n);
    Many m(n, optimizer(GA_OPTIMIZER_ADAMW));
    m.window();
    cudaGraph_t graph = nullptr;
    EXPECT_CUDA(cudaStreamBeginCapture(m.stream, cudaStreamCaptureModeThreadLocal));
    const sim::Counters captured = count([&] { m.window(); });
    EXPECT_CUDA(cudaStreamEndCapture(m.stream, &graph));
    expect_quiet(captured);
    m.window();
    for (int k = 0; k < 3; ++k) {
      const sim::Counters c = count([&] { m.accumulate(k == 1); });
      expect_quiet(c);
      // The first call of a window uploads the tables, 544 bytes for a parameter, 32 KB of a table at a time; the
      // others no more than without a graph.
      EXPECT_LE(c.launches, k == 0 ? 5 + n / 59 : 1 + n / 4000) << describe(c);
    }
    const sim::Counters c = count([&] { EXPECT_OK(ga_step(m.ctx, nullptr)); });
    expect_quiet(c);
    EXPECT_LE(c.launches, 2) << describe(c);
    EXPECT_CUDA(cudaGraphDestroy(graph));
  }
}

#endif

}  // namespace
}  // namespace ga::test
