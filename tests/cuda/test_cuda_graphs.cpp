// SPDX-License-Identifier: Apache-2.0
//
// Asynchronous work: calls return before their work is done, results become available later, and
// windows that were captured in a graph are replayed.
#include <deque>

#include "device.hpp"

namespace ga::test {
namespace {

// ---- Work that runs when something waits for it --------------------------------------------------

class Asynchronous : public OnDevice<> {
 protected:
  void SetUp() override {
    OnDevice<>::SetUp();
#ifdef GA_SIMULATED
    configure([](sim::Config& c) { c.deferred = true; });
#endif
  }
};

// A few parameters on a device, and gradients for them.
struct Small {
  Stream stream;
  ga_context* ctx = nullptr;
  std::vector<std::unique_ptr<DeviceTensor>> params, gradients;

  explicit Small(ga_config c = config(), const ga_optimizer& o = plain_sgd(), int64_t n = 3) {
    c.device = GA_DEVICE_CUDA;
    c.stream = static_cast<cudaStream_t>(stream);
    EXPECT_OK(ga_context_create(&c, &ctx));
    EXPECT_OK(ga_group_add(ctx, &o, nullptr));
    for (int64_t i = 0; i < n; ++i) {
      const auto seed = static_cast<uint64_t>(i);
      params.push_back(std::make_unique<DeviceTensor>(numbers(GA_F32, 100 + i, 10 + seed), stream));
      gradients.push_back(
          std::make_unique<DeviceTensor>(numbers(GA_F32, 100 + i, 20 + seed), stream));
      const int64_t shape[] = {100 + i};
      const std::string name = "p" + std::to_string(i);
      EXPECT_OK(ga_param_add(ctx, 0, name.c_str(), params.back()->data(), GA_F32, 1, shape, nullptr,
                             nullptr));
    }
  }
  ~Small() { ga_context_destroy(ctx); }

  std::vector<const void*> list() const {
    std::vector<const void*> result;
    for (const auto& g : gradients) result.push_back(g->data());
    return result;
  }
  void accumulate(double weight = 1) {
    const auto now = list();
    EXPECT_OK(ga_accumulate(ctx, now.data(), now.size(), weight, nullptr));
  }
  ga_step_result step() {
    ga_step_result r = {};
    r.struct_size = sizeof r;
    EXPECT_OK(ga_step(ctx, &r));
    return r;
  }
  ga_step_result window() {
    accumulate();
    return step();
  }
};

// All host memory that a call was given may change as soon as the call has returned.
TEST_F(Asynchronous, ArgumentsMayChangeAfterACall) {
  std::vector<Tensor> expected, got;
  for (const bool changes : {false, true}) {
    ga_config c = config();
    ga_optimizer o = optimizer(GA_OPTIMIZER_ADAMW);
    Small s(c, o, 700);
    std::vector<double> table = {0.5, 0.25, 0.125, 0.0625};
    ga_schedule schedule = test::schedule(GA_SCHEDULE_TABLE);
    schedule.table = table.data();
    schedule.table_size = 4;
    EXPECT_OK(ga_group_set_schedule(s.ctx, 0, &schedule));
    if (changes) std::fill(table.begin(), table.end(), 1e9);
    ga_clip clip = test::clip(GA_CLIP_GLOBAL, 0.5);
    EXPECT_OK(ga_context_set_clip(s.ctx, &clip));
    if (changes) memset(&clip, 0xff, sizeof clip);
    for (int w = 0; w < 3; ++w) {
      for (int k = 0; k < 3; ++k) {
        auto list = s.list();
        double scale = 1 << k;
        EXPECT_OK(ga_accumulate(s.ctx, list.data(), list.size(), 2, MicroOptions(scale)));
        if (!changes) continue;
        std::fill(list.begin(), list.end(), nullptr);
        scale = NAN;
      }
      EXPECT_OK(ga_step(s.ctx, nullptr));
      EXPECT_OK(ga_group_set_weight_decay(s.ctx, 0, 0.1 * w));
    }
    for (const auto& p : s.params) (changes ? got : expected).push_back(p->get());
  }
  for (size_t i = 0; i < expected.size(); ++i) ASSERT_TRUE(expected[i] == got[i]) << i;
}

// Programs as in test_cuda_bits.cpp that pass many kinds of arguments, on devices that run work
// late.
TEST_F(Asynchronous, TheBitsOfTheCpu) {
  for (const int32_t nonfinite : {GA_NONFINITE_SKIP_STEP, GA_NONFINITE_DROP_MICRO}) {
    for (const int32_t kind : {GA_OPTIMIZER_ADAMW, GA_OPTIMIZER_LAMB, GA_OPTIMIZER_ADAFACTOR}) {
      ga_config c = config();
      c.nonfinite = nonfinite;
      SCOPED_TRACE(testing::Message() << nonfinite << " " << kind);
      expect_same(c, [&](Machine& m) {
        const ga_clip clipped = clip(GA_CLIP_AGC, 0);
        EXPECT_OK(ga_context_set_clip(m, &clipped));
        Training t;
        t.add(m, m.group(optimizer(kind)));
        for (uint64_t w = 0; w < 3; ++w) {
          for (uint64_t k = 0; k < 3; ++k) {
            auto list = t.gradients(m, 3 * w + k);
            if (w == 1) list[3] = nullptr;
            m.accumulate(list, t.weight(k));
          }
          EXPECT_OK(ga_step(m, nullptr));
          EXPECT_OK(ga_group_set_lr(m, 0, 1e-3 * static_cast<double>(w + 1)));
        }
        m.note_result(result_of(m), 0);
        m.note_params();
      });
    }
  }
}

#ifdef GA_SIMULATED

TEST_F(Asynchronous, ResultsArePending) {
  Small s;
  const ga_step_result pending = s.window();
  EXPECT_EQ(pending.outcome, GA_STEP_PENDING);
  EXPECT_EQ(pending.micro_batches, 1);
  EXPECT_EQ(pending.weight, 1);
  EXPECT_TRUE(std::isnan(pending.norm));
  EXPECT_EQ(window(s.ctx).windows, 1);
  EXPECT_EQ(window(s.ctx).steps, 0);  // as far as the host knows
  EXPECT_EQ(result_of(s.ctx, 1, 0).outcome, GA_STEP_PENDING);
  EXPECT_EQ(result_of(s.ctx, 0, 0).outcome, GA_STEP_PENDING);
  const ga_step_result r = result_of(s.ctx, 1, 1);
  EXPECT_EQ(r.outcome, GA_STEP_APPLIED);
  EXPECT_EQ(r.windows, 1);
  EXPECT_EQ(r.steps, 1);
  EXPECT_GT(r.norm, 0);
  EXPECT_EQ(r.clip_factor, 1);
  EXPECT_EQ(r.lr, 1);
  EXPECT_EQ(window(s.ctx).steps, 1);
  EXPECT_EQ(result_of(s.ctx, 0, 0).outcome, GA_STEP_APPLIED);

  // The next window is pending, and the result of the last one is still available.
  s.window();
  EXPECT_EQ(result_of(s.ctx, 2, 0).outcome, GA_STEP_PENDING);
  EXPECT_EQ(result_of(s.ctx, 1, 0).outcome, GA_STEP_APPLIED);
  EXPECT_OK(ga_synchronize(s.ctx));
  EXPECT_EQ(result_of(s.ctx, 2, 0).outcome, GA_STEP_APPLIED);
  EXPECT_EQ(sim::queued(), 0);
}

// If the device runs work at once, the result is available at once.
TEST_F(Asynchronous, ResultsOfFinishedWork) {
  configure([](sim::Config& c) { c.deferred = false; });
  Small s;
  EXPECT_EQ(s.window().outcome, GA_STEP_APPLIED);
}

// Under GA_NONFINITE_FAIL, ga_step waits for the device.
TEST_F(Asynchronous, FailWaits) {
  ga_config c = config();
  c.nonfinite = GA_NONFINITE_FAIL;
  Small s(c);
  EXPECT_EQ(s.window().outcome, GA_STEP_APPLIED);
  Tensor bad(GA_F32, 101);
  bad.set(50, NAN);
  s.gradients[1]->put(bad);
  s.accumulate();
  EXPECT_TRUE(refused(ga_step(s.ctx, nullptr), GA_ERROR_NONFINITE, {"\"p1\"", "infinite or NaN"}));
  EXPECT_EQ(window(s.ctx).state, GA_WINDOW_OPEN);
  EXPECT_OK(ga_discard(s.ctx));
  s.gradients[1]->put(numbers(GA_F32, 101, 5));
  EXPECT_EQ(s.window().outcome, GA_STEP_APPLIED);
}

#endif

TEST_F(Asynchronous, ResultsOfTheLastWindows) {
  Small s;
  for (int w = 1; w <= 70; ++w) {
    EXPECT_OK(ga_group_set_lr(s.ctx, 0, w * 0x1p-10));
    s.window();
  }
  EXPECT_OK(ga_synchronize(s.ctx));
  for (int64_t w = 7; w <= 70; ++w) {
    for (const int32_t wait : {0, 1}) {
      const ga_step_result r = result_of(s.ctx, w, wait);
      EXPECT_EQ(r.windows, w);
      EXPECT_EQ(r.steps, w);
      EXPECT_EQ(r.lr, static_cast<double>(w) * 0x1p-10);
    }
  }
  EXPECT_EQ(result_of(s.ctx).windows, 70);
  ga_step_result r = {};
  r.struct_size = sizeof r;
  for (const int32_t wait : {0, 1}) {
    EXPECT_TRUE(refused(ga_step_result_get(s.ctx, 6, wait, &r), GA_ERROR_INVALID_ARGUMENT,
                        {"window 6", "not kept any more", "70", "64"}));
    EXPECT_TRUE(
        refused(ga_step_result_get(s.ctx, -1, wait, &r), GA_ERROR_INVALID_ARGUMENT, {"-1"}));
  }
  EXPECT_TRUE(refused(ga_step_result_get(s.ctx, 71, 1, &r), GA_ERROR_INVALID_ARGUMENT,
                      {"window 71", "70"}));
}

TEST_F(Asynchronous, ResultsBeforeTheFirstWindow) {
  Small s;
  ga_step_result r = {};
  r.struct_size = sizeof r;
  EXPECT_EQ(ga_step_result_get(s.ctx, 0, 1, &r), GA_ERROR_INVALID_ARGUMENT);
  EXPECT_EQ(ga_step_result_get(s.ctx, 1, 1, &r), GA_ERROR_INVALID_ARGUMENT);
}

// Work on the stream can read the loss scale at the address that ga_loss_scale returns.
TEST_F(Asynchronous, LossScaleOnTheDevice) {
  Small s;
  const void* at = nullptr;
  double scale = 0;
  EXPECT_OK(ga_loss_scale(s.ctx, &scale, &at));
  EXPECT_EQ(scale, 1);
  ASSERT_NE(at, nullptr);
  const auto there = [&] {
    float x = 0;
    EXPECT_CUDA(cudaMemcpyAsync(&x, at, sizeof x, cudaMemcpyDeviceToHost, s.stream));
    s.stream.wait();
    return x;
  };
  EXPECT_EQ(there(), 1);
  ga_loss_scaler scaler;
  EXPECT_OK(ga_loss_scaler_init(&scaler, sizeof scaler));
  scaler.initial_scale = 1000;
  scaler.growth_factor = 3;
  scaler.growth_interval = 2;
  EXPECT_OK(ga_context_set_loss_scaler(s.ctx, &scaler));
  EXPECT_OK(ga_loss_scale(s.ctx, nullptr, &at));
  EXPECT_EQ(there(), 1000);
  const double expected[] = {1000, 3000, 3000, 9000, 4500, 4500, 13500};
  const Tensor good = numbers(GA_F32, 100, 20);
  for (int w = 0; w < 7; ++w) {
    Tensor g = good;
    if (w == 4) g.set(3, INFINITY);
    s.gradients[0]->put(g);
    s.window();
    EXPECT_EQ(there(), static_cast<float>(expected[w])) << w;
    EXPECT_OK(ga_loss_scale(s.ctx, &scale, nullptr));
    EXPECT_EQ(scale, expected[w]) << w;
  }
  EXPECT_OK(ga_context_set_loss_scaler(s.ctx, nullptr));
  EXPECT_EQ(there(), 1);
}

// ---- Graphs --------------------------------------------------------------------------------------

// A kind of training that is captured.
struct Plan {
  std::string name;
  std::function<void(ga_config&)> configure = [](ga_config&) {};
  std::function<ga_group(Machine&)> prepare = [](Machine& m) {
    return m.group(optimizer(GA_OPTIMIZER_ADAMW));
  };
  std::vector<Param> params = some_params();
  bool rows = false;  // also an embedding table
  bool averages = false;
  bool once = false;  // some parameters get no gradient in later micro-batches
};

constexpr int kMicros = 2;

// A training whose gradients lie at the same addresses in every window.
class Loop {
 public:
  Loop(Machine& m, const Plan& plan) : m_(m), plan_(plan) {
    training_.params = plan.params;
    const ga_group group = plan.prepare(m);
    training_.add(m, group);
    for (int k = 0; k < kMicros; ++k) {
      buffers_.emplace_back();
      for (size_t i = 0; i < plan.params.size(); ++i)
        buffers_.back().push_back(
            std::make_unique<DeviceTensor>(training_.gradient(i, 0), m.stream(), k));
    }
    if (plan.rows) {
      ga_param_options o = options();
      o.rows = GA_ROWS_LAZY;
      table_ = m.add(group, numbers(GA_F32, 100 * 7, 70), {100, 7}, o);
      values_ = std::make_unique<DeviceTensor>(numbers(GA_F32, 30 * 7, 71), m.stream());
      indices_ = std::make_unique<DeviceTensor>(Tensor(GA_F64, 30), m.stream());
    }
  }
  // Writes the gradients of a window. bad: the micro-batch that gets a NaN, or -1.
  void fill(uint64_t window, int bad = -1) {
    for (int k = 0; k < kMicros; ++k) {
      for (size_t i = 0; i < plan_.params.size(); ++i) {
        Tensor g = training_.gradient(i, 10 * window + static_cast<uint64_t>(k));
        if (k == bad && i == 2) g.set(100, NAN);
        buffers_[static_cast<size_t>(k)][i]->put(g);
      }
    }
    if (!plan_.rows) return;
    values_->put(numbers(GA_F32, 30 * 7, 900 + window));
    Tensor indices(GA_F64, 30);
    Random random(window);
    for (int64_t i = 0; i < 30; ++i) {
      const int64_t row = random.below(100);
      memcpy(indices.at(i), &row, sizeof row);
    }
    indices_->put(indices);
  }
  // missing: the parameter without a gradient.
  void window(size_t missing = SIZE_MAX) {
    for (int k = 0; k < kMicros; ++k) {
      const auto& buffers = buffers_[static_cast<size_t>(k)];
      if (plan_.rows) {
        EXPECT_OK(ga_micro_begin(m_, k, k + 1, nullptr));
        for (size_t i = 0; i < buffers.size(); ++i)
          if (i != missing) {
            EXPECT_OK(ga_accumulate_part(m_, training_.ids[i], buffers[i]->data()));
          }
        EXPECT_OK(ga_accumulate_rows(m_, table_, indices_->data(), GA_I64, 30, values_->data()));
        EXPECT_OK(ga_micro_end(m_));
        continue;
      }
      std::vector<const void*> list;
      for (size_t i = 0; i < buffers.size(); ++i)
        list.push_back(i == missing || (plan_.once && k > 0 && i % 2 == 1) ? nullptr
                                                                           : buffers[i]->data());
      EXPECT_OK(ga_accumulate(m_, list.data(), list.size(), k + 1, nullptr));
    }
    EXPECT_OK(ga_step(m_, nullptr));
  }
  void note() {
    m_.note_result(result_of(m_), 0);
    m_.note_params();
    if (plan_.averages) m_.note_averages();
  }

 private:
  Machine& m_;
  const Plan& plan_;
  Training training_;
  std::vector<std::vector<std::unique_ptr<DeviceTensor>>> buffers_;
  ga_param table_ = -1;
  std::unique_ptr<DeviceTensor> values_, indices_;
};

std::vector<Plan> plans() {
  std::vector<Plan> list;
  const auto named = [&](const char* name) -> Plan& {
    list.emplace_back();
    list.back().name = name;
    return list.back();
  };
  const auto scaler = [](Machine& m) {
    ga_loss_scaler s;
    EXPECT_OK(ga_loss_scaler_init(&s, sizeof s));
    s.initial_scale = 1024;
    s.growth_interval = 2;
    EXPECT_OK(ga_context_set_loss_scaler(m, &s));
  };
  {
    Plan& p = named("AdamWWithEverything");
    p.averages = true;
    p.prepare = [scaler](Machine& m) {
      scaler(m);
      const ga_clip c = clip(GA_CLIP_GLOBAL, 1e-3);
      EXPECT_OK(ga_context_set_clip(m, &c));
      ga_ema e;
      EXPECT_OK(ga_ema_init(&e, sizeof e));
      e.decay = 0.75;
      EXPECT_OK(ga_context_set_ema(m, &e));
      const ga_group g = m.group(optimizer(GA_OPTIMIZER_ADAMW));
      ga_schedule s = schedule(GA_SCHEDULE_COSINE);
      s.warmup_steps = 2;
      s.total_steps = 6;
      EXPECT_OK(ga_group_set_schedule(m, g, &s));
      return g;
    };
  }
  named("Lamb").prepare = [](Machine& m) { return m.group(optimizer(GA_OPTIMIZER_LAMB)); };
  {
    Plan& p = named("LambInBf16");
    p.prepare = [](Machine& m) {
      ga_optimizer o = optimizer(GA_OPTIMIZER_LAMB);
      o.state_dtype = GA_BF16;
      return m.group(o);
    };
    p.params = some_params(false);
  }
  named("Adafactor").prepare = [](Machine& m) {
    return m.group(optimizer(GA_OPTIMIZER_ADAFACTOR));
  };
  for (const int32_t units : {GA_AGC_TF, GA_AGC_TORCH}) {
    for (const int32_t kind : {GA_OPTIMIZER_SGD, GA_OPTIMIZER_LAMB}) {
      Plan& p = named("Agc");
      p.name += std::to_string(units) + (kind == GA_OPTIMIZER_SGD ? "Sgd" : "Lamb");
      p.prepare = [=](Machine& m) {
        ga_clip c = clip(GA_CLIP_AGC, 0);
        c.agc_units = units;
        EXPECT_OK(ga_context_set_clip(m, &c));
        return m.group(optimizer(kind));
      };
    }
  }
  {
    Plan& p = named("Muon");
    p.prepare = [](Machine& m) { return m.group(optimizer(GA_OPTIMIZER_MUON)); };
    p.params = {{GA_F32, {40, 30}, options()},
                {GA_BF16, {33, 65}, options()},
                {GA_F32, {64, 64}, options(0, GA_BF16)}};
  }
  {
    Plan& p = named("Rows");
    p.rows = true;
  }
  {
    Plan& p = named("RowsDropped");
    p.rows = true;
    p.configure = [](ga_config& c) { c.nonfinite = GA_NONFINITE_DROP_MICRO; };
  }
  {
    Plan& p = named("Dropped");
    p.configure = [](ga_config& c) { c.nonfinite = GA_NONFINITE_DROP_MICRO; };
    p.prepare = [scaler](Machine& m) {
      scaler(m);
      ga_optimizer o = optimizer(GA_OPTIMIZER_ADAM);
      o.weight_decay = 0.01;  // another Op handles zero weight decay
      return m.group(o);
    };
  }
  for (const bool scaled : {false, true}) {
    Plan& p = named(scaled ? "LiveAndScaled" : "Live");
    p.configure = [](ga_config& c) { c.gradient_life = GA_GRADIENTS_LIVE; };
    p.once = true;
    if (!scaled) continue;
    p.prepare = [scaler](Machine& m) {
      scaler(m);
      const ga_clip c = clip(GA_CLIP_GLOBAL, 1e-3);
      EXPECT_OK(ga_context_set_clip(m, &c));
      return m.group(optimizer(GA_OPTIMIZER_ADAMW));
    };
  }
  named("MeansWithNoise").configure = [](ga_config& c) {
    c.accumulation = GA_ACCUMULATE_RUNNING_MEAN;
    c.noise_scale = 1;
  };
  {
    Plan& p = named("ByChance");
    p.configure = [](ga_config& c) {
      c.accumulation = GA_ACCUMULATE_STOCHASTIC;
      c.seed = 17;
    };
    for (Param& q : p.params)
      if (q.dtype != GA_F64) q.options.accumulator_dtype = GA_BF16;
  }
  {
    Plan& p = named("MissingAsZeros");
    p.configure = [](ga_config& c) { c.missing = GA_MISSING_ZERO; };
  }
  {
    Plan& p = named("ClippedMicroBatches");
    p.prepare = [](Machine& m) {
      ga_clip c = clip(GA_CLIP_GLOBAL, 0.3);
      c.when = GA_CLIP_WHEN_MICRO;
      EXPECT_OK(ga_context_set_clip(m, &c));
      return m.group(optimizer(GA_OPTIMIZER_ADAMW));
    };
  }
  {
    Plan& p = named("ValueBeforeNorm");
    p.prepare = [](Machine& m) {
      const ga_clip c = clip(GA_CLIP_GLOBAL, 0.3, GA_FLAVOR_TORCH, 0.1);
      EXPECT_OK(ga_context_set_clip(m, &c));
      return m.group(optimizer(GA_OPTIMIZER_ADAMW));
    };
  }
  return list;
}

class Graphs : public OnDevice<> {};
class PlannedGraphs : public OnDevice<testing::TestWithParam<size_t>> {
 protected:
  const Plan plan_ = plans()[GetParam()];

  // Runs the same windows in two contexts, the second with graphs, and compares their records.
  template <class Program>
  void expect_same_windows(Program&& program) {
    ga_config c = config();
    plan_.configure(c);
    std::vector<Record> eager;
    for (const bool captured : {false, true}) {
      Machine m(GA_DEVICE_CUDA, c);
      Loop loop(m, plan_);
      program(m, loop, captured);
      if (captured)
        expect_same_records(eager, m.records());
      else
        eager = m.records();
    }
  }
};

// Windows after a first eager one. Window 3 has a NaN in its second micro-batch.
TEST_P(PlannedGraphs, AreTheEagerWindows) {
  expect_same_windows([](Machine& m, Loop& loop, bool captured) {
    loop.fill(0);
    loop.window();
    loop.note();
    Graph graph;
    if (captured) graph.capture(m.stream(), [&] { loop.window(); });
    for (uint64_t w = 1; w < 6; ++w) {
      loop.fill(w, w == 3 ? 1 : -1);
      if (captured)
        graph.replay(m.stream());
      else
        loop.window();
      loop.note();
      EXPECT_EQ(result_of(m, static_cast<int64_t>(w) + 1, 0).windows, static_cast<int64_t>(w) + 1);
    }
    // One more window without the graph.
    loop.fill(7);
    loop.window();
    loop.note();
  });
}

// Eager windows between the replays, with other numbers or with one parameter fewer.
TEST_P(PlannedGraphs, BesideEagerWindows) {
  expect_same_windows([](Machine& m, Loop& loop, bool captured) {
    loop.fill(0);
    loop.window();
    loop.fill(1);
    loop.window(1);
    Graph graph, other;
    if (captured) graph.capture(m.stream(), [&] { loop.window(); });
    if (captured) other.capture(m.stream(), [&] { loop.window(4); });
    for (uint64_t w = 2; w < 9; ++w) {
      loop.fill(w);
      if (w == 4 || w == 6) {
        EXPECT_OK(ga_group_set_lr(m, 0, w == 4 ? 0.0123 : 0.5));
      } else if (w == 5) {
        EXPECT_OK(ga_group_set_weight_decay(m, 0, 0.25));
      }
      const bool one = w % 3 == 2, two = w % 3 == 1;
      if (captured && one)
        graph.replay(m.stream());
      else if (captured && two)
        other.replay(m.stream());
      else
        loop.window(one ? SIZE_MAX : two ? 4 : 0);
      loop.note();
    }
  });
}

INSTANTIATE_TEST_SUITE_P(All, PlannedGraphs, testing::Range<size_t>(0, plans().size()),
                         [](const testing::TestParamInfo<size_t>& info) {
                           return plans()[info.param].name;
                         });

// Each set of parameters with a gradient has its own lists on the device. A new set replaces the
// least recently used one, but lists that a captured graph reads are kept. There are more graphs,
// and more other sets between capture and replay, than lists at the start.
TEST_F(Graphs, ListsOutliveTheSetsThatComeLater) {
  constexpr size_t kParams = 6, kSets = 15;
  std::vector<Record> eager;
  for (const bool captured : {false, true}) {
    ga_config c = config();
    c.gradient_life = GA_GRADIENTS_LIVE;  // the step itself takes the norms of gradients
    Machine m(GA_DEVICE_CUDA, c);
    const ga_group group = m.group(optimizer(GA_OPTIMIZER_ADAFACTOR));
    const ga_clip agc = clip(GA_CLIP_AGC, 0);
    EXPECT_OK(ga_context_set_clip(m, &agc));
    std::vector<std::unique_ptr<DeviceTensor>> gradients;
    const auto numbers_of = [](size_t i, uint64_t round) {
      return numbers(GA_F32, static_cast<int64_t>(20 * (30 + i)), 100 * round + i);
    };
    for (size_t i = 0; i < kParams; ++i) {
      const Tensor start = numbers_of(i, 0);
      ASSERT_GE(m.add(group, start, {static_cast<int64_t>(30 + i), 20}), 0);
      gradients.push_back(std::make_unique<DeviceTensor>(start, m.stream()));
    }
    uint64_t round = 0;
    const auto fill = [&] {
      ++round;
      for (size_t i = 0; i < kParams; ++i) gradients[i]->put(numbers_of(i, round));
    };
    // missing: one bit for each parameter without a gradient.
    const auto window = [&](size_t missing) {
      std::vector<const void*> list;
      for (size_t i = 0; i < kParams; ++i) {
        list.push_back(missing >> i & 1 ? nullptr : gradients[i]->data());
      }
      EXPECT_OK(ga_accumulate(m, list.data(), list.size(), 1, nullptr));
      EXPECT_OK(ga_step(m, nullptr));
    };
    const auto note = [&] {
      m.note_result(result_of(m), 0);
      m.note_params();
    };
    std::vector<Graph> graphs(kSets);
    for (size_t set = 0; set < kSets; ++set) {
      fill();
      window(set);
      if (captured) graphs[set].capture(m.stream(), [&] { window(set); });
    }
    for (size_t set = kSets + 1; set < 3 * kSets; ++set) {
      fill();
      window(set);
    }
    note();
    for (size_t set = 0; set < kSets; ++set) {
      fill();
      if (captured)
        graphs[set].replay(m.stream());
      else
        window(set);
      note();
    }
    fill();
    window(0);
    note();
    if (captured)
      expect_same_records(eager, m.records());
    else
      eager = m.records();
  }
}

// Calls that wait or allocate are refused, and the capture continues.
TEST_F(Graphs, CallsThatWaitAreRefused) {
  const Plan plan = plans()[0];
  std::vector<Record> eager;
  for (const bool captured : {false, true}) {
    Machine m(GA_DEVICE_CUDA);
    Loop loop(m, plan);
    loop.fill(0);
    loop.window();
    if (!captured) {
      loop.fill(1);
      loop.window();
      loop.note();
      eager = m.records();
      continue;
    }
    EXPECT_OK(ga_synchronize(m));
    DeviceTensor out(Tensor(GA_F32, 70000), m.stream());
    DeviceTensor more(Tensor(GA_F32, 10), m.stream());
    Graph graph;
    graph.capture(m.stream(), [&] {
      const auto refusals = [&] {
        double number = 0;
        ga_step_result r = {};
        r.struct_size = sizeof r;
        const auto refused = [&](ga_status status) {
          return test::refused(status, GA_ERROR_INVALID_STATE, {"captured"});
        };
        EXPECT_TRUE(refused(ga_synchronize(m)));
        EXPECT_TRUE(refused(ga_ema_copy_to(m, 0, out.data(), GA_F32)));
        EXPECT_TRUE(refused(ga_loss_scale(m, &number, nullptr)));
        EXPECT_TRUE(refused(ga_group_lr(m, 0, &number)));
        EXPECT_TRUE(refused(ga_group_last_lr(m, 0, &number)));
        EXPECT_TRUE(refused(ga_step_result_get(m, 0, 1, &r)));
        int64_t steps = 3;
        EXPECT_TRUE(refused(ga_state_get(m, 0, "step", &steps, GA_I64, 1)));
        EXPECT_TRUE(refused(ga_state_set(m, 0, "step", &steps, GA_I64, 1)));
        EXPECT_TRUE(refused(ga_state_reset(m, 0)));
        EXPECT_TRUE(refused(ga_context_set_steps(m, 3)));
        EXPECT_TRUE(refused(ga_ema_swap(m, 1)));
        size_t size = 0;
        EXPECT_TRUE(refused(ga_save_to_memory(m, nullptr, nullptr, 0, &size)));
        EXPECT_TRUE(refused(ga_load_from_memory(m, "", 0, nullptr)));
        EXPECT_TRUE(refused(ga_param_remove(m, 0)));
        EXPECT_EQ(ga_step_result_get(m, 0, 0, &r), GA_OK);
      };
      refusals();
      loop.window();
      refusals();
    });
    loop.fill(1);
    graph.replay(m.stream());
    loop.note();
    expect_same_records(eager, m.records());
  }
}

// A load writes in place, so a graph that was captured before goes on from what was loaded.
TEST_F(Graphs, ALoadedStateGoesOnInTheGraph) {
  Small s(config(), optimizer(GA_OPTIMIZER_ADAMW));
  s.window();
  EXPECT_OK(ga_synchronize(s.ctx));
  Graph graph;
  graph.capture(s.stream, [&] { s.window(); });
  graph.replay(s.stream);
  s.window();  // pending when the save begins
  size_t size = 0;
  EXPECT_OK(ga_save_to_memory(s.ctx, nullptr, nullptr, 0, &size));
  std::vector<char> bytes(size);
  EXPECT_OK(ga_save_to_memory(s.ctx, nullptr, bytes.data(), bytes.size(), &size));
  std::vector<Tensor> expected;
  for (const bool loaded : {false, true}) {
    if (loaded) {
      EXPECT_OK(ga_load_from_memory(s.ctx, bytes.data(), bytes.size(), nullptr));
      EXPECT_EQ(result_of(s.ctx).windows, 3);
      EXPECT_EQ(window(s.ctx).steps, 3);
    }
    for (int k = 0; k < 2; ++k) graph.replay(s.stream);
    s.stream.wait();
    EXPECT_EQ(result_of(s.ctx).windows, 5);
    EXPECT_EQ(result_of(s.ctx).steps, 5);
    for (size_t i = 0; i < s.params.size(); ++i) {
      if (!loaded) expected.push_back(s.params[i]->get());
      EXPECT_TRUE(s.params[i]->get() == expected[i]) << i;
    }
  }
}

// The first window allocates memory.
TEST_F(Graphs, TheFirstWindowIsRefused) {
  Small s;
  s.stream.wait();
  Graph graph;
  graph.capture(s.stream, [&] {
    const auto list = s.list();
    EXPECT_TRUE(refused(ga_accumulate(s.ctx, list.data(), list.size(), 1, nullptr),
                        GA_ERROR_INVALID_STATE, {"captured", "before the capture"}));
  });
  EXPECT_EQ(s.window().micro_batches, 1);
  EXPECT_EQ(result_of(s.ctx).outcome, GA_STEP_APPLIED);
}

TEST_F(Graphs, FailIsRefused) {
  ga_config c = config();
  c.nonfinite = GA_NONFINITE_FAIL;
  Small s(c);
  s.window();
  s.stream.wait();
  EXPECT_CUDA(cudaStreamBeginCapture(s.stream, cudaStreamCaptureModeThreadLocal));
  s.accumulate();
  EXPECT_TRUE(refused(ga_step(s.ctx, nullptr), GA_ERROR_INVALID_STATE, {"captured"}));
  cudaGraph_t graph = nullptr;
  EXPECT_CUDA(cudaStreamEndCapture(s.stream, &graph));
  EXPECT_CUDA(cudaGraphDestroy(graph));
  EXPECT_OK(ga_discard(s.ctx));
  s.window();
  EXPECT_EQ(result_of(s.ctx).outcome, GA_STEP_APPLIED);
}

// The program ends a capture in the middle of a window.
TEST_F(Graphs, ACaptureThatEndsEarly) {
  Small s;
  s.window();
  s.stream.wait();
  const Tensor before = s.params[0]->get();
  EXPECT_CUDA(cudaStreamBeginCapture(s.stream, cudaStreamCaptureModeThreadLocal));
  s.accumulate();
  EXPECT_OK(ga_discard(s.ctx));
  cudaGraph_t graph = nullptr;
  EXPECT_CUDA(cudaStreamEndCapture(s.stream, &graph));
  EXPECT_CUDA(cudaGraphDestroy(graph));
  EXPECT_TRUE(s.params[0]->get() == before);
  s.window();
  EXPECT_EQ(result_of(s.ctx).outcome, GA_STEP_APPLIED);
  EXPECT_EQ(result_of(s.ctx).windows, 2);
}

#ifdef GA_SIMULATED

// A capture that breaks while a call works costs the window, and no more. Later calls do not read the
// gradients of that call, which may have been freed.
TEST_F(Graphs, ACaptureThatBreaksInACall) {
  std::vector<Tensor> results[2];
  for (const bool breaks : {false, true}) {
    Small s;
    s.window();
    if (breaks) {
      sim::fail_call(1, cudaErrorStreamCaptureInvalidated);
      std::vector<const void*> gradients;
      for (const auto& g : s.gradients) gradients.push_back(g->data());
      EXPECT_TRUE(refused(ga_accumulate(s.ctx, gradients.data(), gradients.size(), 1, nullptr),
                          GA_ERROR_FAULT, {"cudaErrorStreamCaptureInvalidated"}));
      EXPECT_OK(ga_discard(s.ctx));
    }
    std::vector<const void*> outer(s.gradients.size());  // of the first and the last parameter
    for (const size_t i : {size_t{0}, outer.size() - 1}) outer[i] = s.gradients[i]->data();
    s.gradients[1].reset();
    EXPECT_OK(ga_accumulate(s.ctx, outer.data(), outer.size(), 1, nullptr));
    s.step();
    for (const auto& p : s.params) results[breaks].push_back(p->get());
  }
  EXPECT_TRUE(results[0] == results[1]);
}

#endif

// A setter in a capture is a part of the graph, and one between replays lasts until the next of them.
TEST_F(Graphs, ASetterInTheCapture) {
  Small s;
  s.window();
  Graph graph;
  graph.capture(s.stream, [&] {
    EXPECT_OK(ga_group_set_lr(s.ctx, 0, 0.5));
    s.window();
  });
  EXPECT_OK(ga_group_set_lr(s.ctx, 0, 0.25));
  s.window();
  EXPECT_EQ(result_of(s.ctx).lr, 0.25);
  graph.replay(s.stream);
  EXPECT_EQ(result_of(s.ctx).lr, 0.5);
  s.window();
  EXPECT_EQ(result_of(s.ctx).lr, 0.25);
}

// A capture that ends before the step and contains a live gradient at a new address. The graph
// never runs, so the step must send the address to the device itself.
TEST_F(Graphs, ACaptureThatEndsBeforeTheStep) {
  std::vector<Tensor> results[2];
  for (const bool captures : {false, true}) {
    ga_config c = config();
    c.gradient_life = GA_GRADIENTS_LIVE;
    Small s(c);
    s.window();
    s.window();
    for (size_t i = 0; i < s.gradients.size(); ++i)
      s.gradients[i] = std::make_unique<DeviceTensor>(
          numbers(GA_F32, 100 + static_cast<int64_t>(i), 30 + i), s.stream);
    s.stream.wait();
    if (captures) {
      cudaGraph_t graph = nullptr;
      EXPECT_CUDA(cudaStreamBeginCapture(s.stream, cudaStreamCaptureModeThreadLocal));
      s.accumulate();
      EXPECT_CUDA(cudaStreamEndCapture(s.stream, &graph));
      EXPECT_CUDA(cudaGraphDestroy(graph));
    } else {
      s.accumulate();
    }
    s.step();
    for (const auto& p : s.params) results[captures].push_back(p->get());
  }
  EXPECT_TRUE(results[0] == results[1]);
}

// A capture that another call of the program has invalidated.
TEST_F(Graphs, ABrokenCapture) {
  Small s;
  s.window();
  s.stream.wait();
  EXPECT_CUDA(cudaStreamBeginCapture(s.stream, cudaStreamCaptureModeGlobal));
  s.accumulate();
  void* memory = nullptr;
  EXPECT_NE(cudaMalloc(&memory, 64), cudaSuccess);
  const auto list = s.list();
  EXPECT_TRUE(refused(ga_accumulate(s.ctx, list.data(), list.size(), 1, nullptr),
                      GA_ERROR_INVALID_STATE, {"capture"}));
  EXPECT_TRUE(refused(ga_synchronize(s.ctx), GA_ERROR_INVALID_STATE, {"capture"}));
  cudaGraph_t graph = nullptr;
  EXPECT_NE(cudaStreamEndCapture(s.stream, &graph), cudaSuccess);
  cudaGetLastError();
  EXPECT_OK(ga_discard(s.ctx));
  s.window();
  EXPECT_EQ(result_of(s.ctx).windows, 2);
  EXPECT_EQ(result_of(s.ctx).outcome, GA_STEP_APPLIED);
}

// A context on the default stream while a stream that waits for the default stream is captured.
TEST_F(Graphs, TheDefaultStreamBesideACapture) {
  const Stream own;
  DeviceTensor p(numbers(GA_F32, 64, 1), own), g(numbers(GA_F32, 64, 2), own);
  own.wait();
  ga_config c = config();
  c.device = GA_DEVICE_CUDA;
  ga_context* ctx = nullptr;
  ASSERT_OK(ga_context_create(&c, &ctx));
  const ga_optimizer o = plain_sgd();
  EXPECT_OK(ga_group_add(ctx, &o, nullptr));
  const int64_t shape[] = {64};
  EXPECT_OK(ga_param_add(ctx, 0, "p", p.data(), GA_F32, 1, shape, nullptr, nullptr));
  const void* const list[] = {g.data()};
  EXPECT_OK(ga_accumulate(ctx, list, 1, 1, nullptr));
  EXPECT_OK(ga_step(ctx, nullptr));
  EXPECT_OK(ga_synchronize(ctx));
  cudaStream_t blocking = nullptr;
  cudaGraph_t graph = nullptr;
  EXPECT_CUDA(cudaStreamCreate(&blocking));
  EXPECT_CUDA(cudaStreamBeginCapture(blocking, cudaStreamCaptureModeThreadLocal));
  const auto refusal = [](ga_status status) {
    return refused(status, GA_ERROR_INVALID_STATE, {"default stream", "ga_config.stream"});
  };
  EXPECT_TRUE(refusal(ga_accumulate(ctx, list, 1, 1, nullptr)));
  ga_optimizer other = o;
  other.lr = 0.125;
  EXPECT_TRUE(refusal(ga_group_set_optimizer(ctx, 0, &other)));
  EXPECT_TRUE(refusal(ga_group_set_lr(ctx, 0, 0.125)));
  EXPECT_TRUE(refusal(ga_group_set_weight_decay(ctx, 0, 0.125)));
  EXPECT_TRUE(refusal(ga_param_set_lr_scale(ctx, 0, 0.125)));
  EXPECT_TRUE(refusal(ga_param_set_weight_decay_scale(ctx, 0, 0.125)));
  EXPECT_TRUE(refusal(ga_state_reset(ctx, 0)));
  EXPECT_TRUE(refusal(ga_param_remove(ctx, 0)));
  ga_optimizer got = o;
  EXPECT_OK(ga_group_optimizer(ctx, 0, &got));
  EXPECT_EQ(0, memcmp(&got, &o, sizeof o)) << "changed by a call that failed";
  ga_param_info info;
  EXPECT_OK(ga_param_info_init(&info, sizeof info));
  EXPECT_OK(ga_param_describe(ctx, 0, &info));
  EXPECT_EQ(info.lr_scale, 1);
  EXPECT_EQ(info.weight_decay_scale, 1);
  EXPECT_CUDA(cudaStreamEndCapture(blocking, &graph));
  EXPECT_CUDA(cudaGraphDestroy(graph));
  EXPECT_CUDA(cudaStreamDestroy(blocking));
  EXPECT_OK(ga_accumulate(ctx, list, 1, 1, nullptr));
  EXPECT_OK(ga_step(ctx, nullptr));
  EXPECT_EQ(result_of(ctx).windows, 2);
  ga_context_destroy(ctx);
}

// More replays than the number of results that are kept.
TEST_F(Graphs, ResultsOfReplays) {
  Small s;
  s.window();
  Graph graph;
  s.stream.wait();
  graph.capture(s.stream, [&] { s.window(); });
  for (int r = 0; r < 80; ++r) graph.replay(s.stream);
  EXPECT_EQ(result_of(s.ctx).windows, 81);
  EXPECT_EQ(result_of(s.ctx).steps, 81);
  for (int64_t w = 18; w <= 81; ++w) EXPECT_EQ(result_of(s.ctx, w, 0).windows, w);
  ga_step_result r = {};
  r.struct_size = sizeof r;
  EXPECT_TRUE(refused(ga_step_result_get(s.ctx, 17, 1, &r), GA_ERROR_INVALID_ARGUMENT,
                      {"not kept any more"}));
  s.window();
  EXPECT_EQ(result_of(s.ctx).windows, 82);
}

// Contexts are created, used and destroyed while another's stream is captured.
TEST_F(Graphs, OtherContextsWorkDuringACapture) {
  Small s;
  s.window();
  s.stream.wait();
  const Tensor expected = [] {
    Small alone;
    alone.window();
    alone.window();
    return alone.params[0]->get();
  }();
  auto other = std::make_unique<Small>(config(), optimizer(GA_OPTIMIZER_ADAMW));
  other->window();
  Graph graph;
  graph.capture(s.stream, [&] {
    s.accumulate();
    other->window();
    ga_config c = cuda_config(other->stream);
    ga_context* third = nullptr;
    EXPECT_OK(ga_context_create(&c, &third));
    ga_context_destroy(third);
    EXPECT_OK(ga_discard(other->ctx));
    ga_context_destroy(other->ctx);
    other->ctx = nullptr;
    s.step();
  });
  graph.replay(s.stream);
  EXPECT_TRUE(s.params[0]->get() == expected);
}

}  // namespace
}  // namespace ga::test
