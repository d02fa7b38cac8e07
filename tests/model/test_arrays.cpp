// SPDX-License-Identifier: Apache-2.0
//
// When a parameter's arrays are made: by the first contribution that is certain to succeed, not by
// calls that fail or contribute nothing, and never for frozen parameters. Two contexts cannot have
// master weights for the same memory. Also what ga_context_memory reports.
#include <cstdlib>
#include <memory>

#include "formats.hpp"
#include "model/placer.hpp"

namespace ga::test {
namespace {

// A bf16 parameter with master weights, and an f32 parameter with the same gradient.
struct Net {
  explicit Net(const ga_config& c = config()) : ctx(c) {
    group = ctx.group(plain_sgd());
    ga_param_options o = options();
    o.master = GA_MASTER_F32;
    first = add(ctx, group, narrow, {}, o);
    second = add(ctx, group, wide);
    at_first = memory(ctx).resident;
  }
  bool has_arrays() const { return memory(ctx).resident > at_first; }
  ga_status accumulate(const void* a, const void* b, double weight = 1) {
    const void* list[] = {a, b};
    return ga_accumulate(ctx, list, 2, weight, nullptr);
  }

  Context ctx;
  Tensor narrow{GA_BF16, 64, 1.0}, wide{GA_F32, 64, 1.0};
  Tensor narrow_gradient{GA_BF16, 64, 0.0}, wide_gradient{GA_F32, 64, 0.0};
  ga_group group = -1;
  ga_param first = -1, second = -1;
  int64_t at_first = 0;
};

const void* off_by_one(const Tensor& t) { return static_cast<const char*>(t.data()) + 1; }

// Calls that fail or contribute nothing. None of them may leave a trace.
struct Attempt {
  const char* name;
  void (*run)(Net& net);
};

void PrintTo(const Attempt& a, std::ostream* out) { *out << a.name; }

const Attempt kAttempts[] = {
    {"MisalignedGradient",
     [](Net& n) {
       EXPECT_EQ(n.accumulate(n.narrow_gradient.data(), off_by_one(n.wide_gradient)),
                 GA_ERROR_INVALID_ARGUMENT);
     }},
    {"GradientOverAParameter",
     [](Net& n) {
       EXPECT_EQ(n.accumulate(n.narrow_gradient.data(), n.wide.data()), GA_ERROR_INVALID_ARGUMENT);
     }},
    {"WrongCount",
     [](Net& n) {
       EXPECT_EQ(ga_accumulate(n.ctx, nullptr, 5, 1, nullptr), GA_ERROR_INVALID_ARGUMENT);
     }},
    {"NegativeWeight",
     [](Net& n) {
       EXPECT_EQ(n.accumulate(n.narrow_gradient.data(), nullptr, -1), GA_ERROR_INVALID_ARGUMENT);
     }},
    {"WeightZero",
     [](Net& n) {
       EXPECT_OK(n.accumulate(n.narrow_gradient.data(), nullptr, 0));
       EXPECT_EQ(step(n.ctx).outcome, GA_STEP_SKIPPED_EMPTY);
     }},
    {"NoGradients",
     [](Net& n) {
       EXPECT_OK(n.accumulate(nullptr, nullptr));
       EXPECT_EQ(step(n.ctx).outcome, GA_STEP_APPLIED);
     }},
    {"BeginWithAWrongIndex",
     [](Net& n) { EXPECT_EQ(ga_micro_begin(n.ctx, 3, 1, nullptr), GA_ERROR_INVALID_ARGUMENT); }},
    {"BeginAndDiscard",
     [](Net& n) {
       EXPECT_OK(ga_micro_begin(n.ctx, 0, 1, nullptr));
       EXPECT_OK(ga_discard(n.ctx));
     }},
    {"PartsThatFail",
     [](Net& n) {
       EXPECT_OK(ga_micro_begin(n.ctx, 0, 1, nullptr));
       EXPECT_EQ(ga_accumulate_part(n.ctx, n.second, off_by_one(n.wide_gradient)),
                 GA_ERROR_INVALID_ARGUMENT);
       EXPECT_EQ(ga_accumulate_part(n.ctx, n.second, nullptr), GA_ERROR_INVALID_ARGUMENT);
       EXPECT_EQ(ga_accumulate_part(n.ctx, 7, n.wide_gradient.data()), GA_ERROR_INVALID_ARGUMENT);
       const int64_t row = 0;
       EXPECT_EQ(ga_accumulate_rows(n.ctx, n.second, &row, GA_I64, 1, n.wide_gradient.data()),
                 GA_ERROR_INVALID_ARGUMENT);
       EXPECT_EQ(ga_accumulate_matmul(n.ctx, n.second, 1, nullptr, 1, 0, nullptr, 1, 0, GA_F32),
                 GA_ERROR_INVALID_ARGUMENT);
       EXPECT_OK(ga_micro_end(n.ctx));
       EXPECT_OK(ga_discard(n.ctx));
     }},
    {"PartsOfWeightZero",
     [](Net& n) {
       EXPECT_OK(ga_micro_begin(n.ctx, 0, 0, nullptr));
       EXPECT_OK(ga_accumulate_part(n.ctx, n.second, n.wide_gradient.data()));
       ga_accumulator a;
       a.struct_size = sizeof a;
       EXPECT_OK(ga_accumulator_acquire(n.ctx, n.second, &a));
       EXPECT_EQ(a.data, nullptr);
       EXPECT_OK(ga_accumulator_release(n.ctx, n.second));
       // The call does not open a matrix engine either.
       EXPECT_OK(ga_accumulate_matmul(n.ctx, n.second, 1, n.wide_gradient.data(), 1, 0,
                                      n.wide_gradient.data(), 1, 0, GA_F32));
       EXPECT_OK(ga_micro_end(n.ctx));
       EXPECT_OK(ga_discard(n.ctx));
     }},
};

class LeavesNothing : public testing::TestWithParam<Attempt> {};
INSTANTIATE_TEST_SUITE_P(All, LeavesNothing, testing::ValuesIn(kAttempts),
                         [](const auto& i) { return std::string(i.param.name); });

// After such a call, the step starts from what the program writes to the parameter, an EMA can
// still be set, and no array exists.
TEST_P(LeavesNothing, NoArraysAndNoMasterWeights) {
  Net net;
  GetParam().run(net);
  EXPECT_FALSE(net.has_arrays());
  const ga_ema ema = [] {
    ga_ema e;
    EXPECT_OK(ga_ema_init(&e, sizeof e));
    return e;
  }();
  EXPECT_OK(ga_context_set_ema(net.ctx, &ema));
  net.narrow.fill(5);
  net.wide.fill(7);
  EXPECT_OK(net.accumulate(net.narrow_gradient.data(), net.wide_gradient.data()));
  EXPECT_TRUE(net.has_arrays());
  EXPECT_EQ(step(net.ctx).outcome, GA_STEP_APPLIED);
  EXPECT_EQ(net.narrow.get(0), 5) << "master weights made earlier overwrote the program's write";
  EXPECT_EQ(net.wide.get(0), 7);
}

// No arrays are made either if a whole micro-batch is checked before it is added.
TEST_P(LeavesNothing, UnderDropMicro) {
  ga_config c = config();
  c.nonfinite = GA_NONFINITE_DROP_MICRO;
  Net net(c);
  if (std::string(GetParam().name) == "PartsOfWeightZero" ||
      std::string(GetParam().name) == "PartsThatFail")
    return;  // this policy refuses some of their calls
  GetParam().run(net);
  EXPECT_FALSE(net.has_arrays());
}

// A step that moves parameters without a gradient makes the arrays that no contribution has made.
TEST(Arrays, OfAStepWithoutGradients) {
  ga_config c = config();
  c.missing = GA_MISSING_ZERO;
  Context ctx(c);
  ga_optimizer o = plain_sgd(0.5);
  o.weight_decay = 0.5;
  Tensor p(GA_BF16, 8, 1.0);
  add(ctx, ctx.group(o), p);
  const void* none = nullptr;
  EXPECT_OK(ga_accumulate(ctx, &none, 1, 1, nullptr));
  EXPECT_EQ(step(ctx).outcome, GA_STEP_APPLIED);
  EXPECT_EQ(p.get(0), 0.75) << "p -= lr weight_decay p";
}

// ---- Frozen parameters --------------------------------------------------------------------------

// A tenth of 3 x 1,000,000 elements is trained: adapters beside a frozen model.
TEST(Frozen, OwnNothingUntilTheyAreUnfrozen) {
  for (const int32_t kind : {GA_OPTIMIZER_ADAMW, GA_OPTIMIZER_LAMB, GA_OPTIMIZER_ADAFACTOR}) {
    SCOPED_TRACE(testing::Message() << "optimizer " << kind);
    Context ctx;
    ga_optimizer o = optimizer(kind);
    o.lr = 0.1;
    const ga_group group = ctx.group(o);
    ga_ema ema;
    EXPECT_OK(ga_ema_init(&ema, sizeof ema));
    EXPECT_OK(ga_context_set_ema(ctx, &ema));
    const ga_clip agc = clip(GA_CLIP_AGC, 0);
    EXPECT_OK(ga_context_set_clip(ctx, &agc));
    Tensor model(GA_BF16, 1000000, 0.5), adapter(GA_F32, 100000, 0.5);
    Tensor model_gradient(GA_BF16, 1000000, 0.25), adapter_gradient(GA_F32, 100000, 0.25);
    const ga_param frozen = add(ctx, group, model, {1000, 1000});
    const int64_t with_model = memory(ctx).total;
    EXPECT_OK(ga_param_set_frozen(ctx, frozen, 1));
    EXPECT_LT(memory(ctx).total, 100000) << "includes frozen parameters; unfrozen " << with_model;
    add(ctx, group, adapter, {100, 1000});

    const ga_memory planned = memory(ctx);
    const void* const list[] = {model_gradient.data(), adapter_gradient.data()};
    for (int w = 0; w < 2; ++w) {
      EXPECT_OK(ga_accumulate(ctx, list, 2, 1, nullptr));
      EXPECT_EQ(step(ctx).outcome, GA_STEP_APPLIED);
    }
    const ga_memory used = memory(ctx);
    EXPECT_EQ(used.total, planned.total);
    EXPECT_EQ(used.masters, 0);
    EXPECT_LT(used.total, 4000000);
    EXPECT_EQ(model, Tensor(GA_BF16, 1000000, 0.5));

    // Its EMA is still the parameter itself.
    Tensor average(GA_F32, 1000000);
    EXPECT_OK(ga_ema_copy_to(ctx, frozen, average.data(), GA_F32));
    EXPECT_EQ(average, Tensor(GA_F32, 1000000, 0.5));

    // When it is unfrozen it gets all its arrays, and its first step starts its EMA.
    EXPECT_OK(ga_param_set_frozen(ctx, frozen, 0));
    EXPECT_GT(memory(ctx).total, 8000000);
    EXPECT_NEAR(static_cast<double>(memory(ctx).masters), 4e6, 4096);
    EXPECT_OK(ga_accumulate(ctx, list, 2, 1, nullptr));
    EXPECT_EQ(step(ctx).outcome, GA_STEP_APPLIED);
    EXPECT_NE(model.get(0), 0.5);
    EXPECT_OK(ga_ema_copy_to(ctx, frozen, average.data(), GA_F32));
    EXPECT_NEAR(average.get(0), model.get(0), 0x1p-8)
        << "the EMA is not that of the master weights";
    EXPECT_NE(average.get(0), 0.5);

    // When it is frozen again it keeps its arrays.
    const int64_t all = memory(ctx).total;
    EXPECT_OK(ga_param_set_frozen(ctx, frozen, 1));
    EXPECT_EQ(memory(ctx).total, all);
  }
}

// A parameter that was frozen for some windows ends with the same bits as a parameter that was
// added when the other was unfrozen.
TEST(Frozen, BeginsAsIfItWereNew) {
  for (const int32_t kind : representative_kinds()) {
    const auto run = [&](bool frozen) {
      Context ctx;
      ga_optimizer o = optimizer(kind);
      if (kind == GA_OPTIMIZER_SGD) o.momentum = 0.9;
      const ga_group group = ctx.group(o);
      auto p = std::make_unique<Tensor>(GA_F32, 40, 0.5);
      Tensor q(GA_F32, 40, 0.25), g(GA_F32, 40, 0.125);
      ga_param late = -1;
      add(ctx, group, q);
      if (frozen) {
        late = add(ctx, group, *p);
        EXPECT_OK(ga_param_set_frozen(ctx, late, 1));
      }
      const void* list[] = {g.data(), g.data()};
      for (int w = 0; w < 5; ++w) {
        if (w == 2 && frozen) {
          EXPECT_OK(ga_param_set_frozen(ctx, late, 0));
        } else if (w == 2) {
          late = add(ctx, group, *p);
        }
        EXPECT_OK(ga_accumulate(ctx, list, late < 0 ? 1 : 2, 1, nullptr));
        EXPECT_EQ(step(ctx).outcome, GA_STEP_APPLIED);
      }
      return p;
    };
    EXPECT_EQ(*run(true), *run(false));
    EXPECT_NE(run(true)->get(0), 0.5);
  }
}

// ---- Two contexts -------------------------------------------------------------------------------

struct Trainer {
  explicit Trainer(Tensor& p, int32_t master = GA_MASTER_F32)
      : gradient(p.dtype(), p.count(), 1.0) {
    ga_param_options o = options();
    o.master = master;
    param = add(ctx, ctx.group(plain_sgd()), p, {}, o);
  }
  ga_status window() {
    const void* list[] = {gradient.data()};
    const ga_status status = ga_accumulate(ctx, list, 1, 1, nullptr);
    if (status != GA_OK) return status;
    return ga_step(ctx, nullptr);
  }
  Context ctx;
  Tensor gradient;
  ga_param param = -1;
};

// Two contexts with master weights for one parameter would overwrite each other's updates: -1, -2,
// -2, -3 instead of -1, -2, -3, -4.
TEST(TwoContexts, MayNotBothHaveMasterWeights) {
  Tensor p(GA_BF16, 16);
  auto a = std::make_unique<Trainer>(p);
  Trainer b(p);
  EXPECT_OK(a->window());
  EXPECT_TRUE(refused(b.window(), GA_ERROR_INVALID_STATE, {"another context", "master"}));
  EXPECT_EQ(window(b.ctx).state, GA_WINDOW_EMPTY);
  EXPECT_OK(a->window());
  EXPECT_EQ(p.get(0), -2);
  // After the first context is destroyed, the second continues from the parameter's value.
  a.reset();
  EXPECT_OK(b.window());
  EXPECT_EQ(p.get(0), -3);
}

TEST(TwoContexts, OverlapCountsAndSoDoesBind) {
  Tensor block(GA_F16, 100), other(GA_F16, 16);
  const int64_t n = 16;
  Context a, b;
  const ga_group ga = a.group(plain_sgd()), gb = b.group(plain_sgd());
  ga_param pa = -1, pb = -1;
  EXPECT_OK(ga_param_add(a, ga, "p", block.at(20), GA_F16, 1, &n, nullptr, &pa));
  EXPECT_OK(ga_param_add(b, gb, "q", block.at(35), GA_F16, 1, &n, nullptr, &pb));
  Tensor g(GA_F16, 16, 1.0);
  a.accumulate({g.data()});
  const void* list[] = {g.data()};
  EXPECT_TRUE(refused(ga_accumulate(b, list, 1, 1, nullptr), GA_ERROR_INVALID_STATE, {"\"q\""}));
  EXPECT_OK(ga_param_bind(b, pb, block.at(36)));
  b.accumulate({g.data()});
  EXPECT_EQ(step(a).outcome, GA_STEP_APPLIED);
  EXPECT_EQ(step(b).outcome, GA_STEP_APPLIED);
  EXPECT_TRUE(refused(ga_param_bind(a, pa, block.at(25)), GA_ERROR_INVALID_STATE, {"\"p\""}));
  EXPECT_TRUE(refused(ga_param_bind(b, pb, block.at(10)), GA_ERROR_INVALID_STATE, {"\"q\""}));
  // A refused ga_param_bind changes nothing; memory that a parameter has left is free for another.
  a.accumulate({g.data()});
  EXPECT_EQ(step(a).outcome, GA_STEP_APPLIED);
  EXPECT_EQ(block.get(20), -2);
  EXPECT_OK(ga_param_bind(a, pa, other.data()));
  EXPECT_OK(ga_param_bind(b, pb, block.at(22)));
  EXPECT_OK(ga_param_bind(b, pb, block.at(24))) << "a parameter may overlap its own former memory";
}

// Without master weights, each context reads what the other has written.
TEST(TwoContexts, MayShareParametersWithoutMasterWeights) {
  for (const bool f32 : {false, true}) {
    Tensor p(f32 ? GA_F32 : GA_BF16, 16);
    Trainer a(p, GA_MASTER_NONE), b(p, GA_MASTER_NONE);
    for (int w = 0; w < 2; ++w) {
      EXPECT_OK(a.window());
      EXPECT_OK(b.window());
    }
    EXPECT_EQ(p.get(0), -4);
  }
}

// ---- Where arrays lie ---------------------------------------------------------------------------

// Where the streams of a kernel are alike in their low 12 bits, a load waits for a store to another stream.
TEST(Placer, ArraysOfALargeParameterAreApartWithinAPage) {
  constexpr size_t kLarge = size_t{4} << 20;
  for (const size_t address : {size_t{0x7f0012340000}, size_t{0x7f0012345678}}) {
    std::vector<size_t> streams = {address};
    Placer first(false, reinterpret_cast<const void*>(address));
    for (size_t end : {size_t{0}, 3 * kLarge + 192, size_t{64}})
      streams.push_back(first.place(end, kLarge));
    Placer more(false, reinterpret_cast<const void*>(address), 3);
    size_t end = 0;
    const size_t begin = more.place(end, kLarge);
    EXPECT_EQ(end, begin + kLarge);
    EXPECT_LE(end, Placer::room(kLarge));
    for (size_t a = 0; a < streams.size(); ++a)
      for (size_t b = 0; b < a; ++b) {
        const size_t apart = (streams[a] - streams[b]) % 4096;
        EXPECT_GE(std::min(apart, 4096 - apart), 512u) << a << " and " << b;
      }
    EXPECT_EQ((begin - streams[3]) % 4096, (streams[3] - streams[2]) % 4096);
  }
}

// Parameters that lie side by side, as the arrays of each kind do: the streams of all are apart if the first ones are.
TEST(Placer, ArenasOfSmallArraysAreApartWithinAPage) {
  for (const size_t address : {size_t{0x7f0012340000}, size_t{0x7f0012345678}}) {
    std::vector<size_t> streams = {address};
    Placer first(false, reinterpret_cast<const void*>(address));
    for (int k = 0; k < 3; ++k) streams.push_back(first.next_begin(size_t{400} * 2048));
    for (size_t a = 0; a < streams.size(); ++a)
      for (size_t b = 0; b < a; ++b) {
        const size_t apart = (streams[a] - streams[b]) % 4096;
        EXPECT_GE(std::min(apart, 4096 - apart), 512u) << a << " and " << b;
      }
  }
  Placer few(false, reinterpret_cast<const void*>(0x7f0012345678)),
      device(true, reinterpret_cast<const void*>(0x7f0012345678));
  EXPECT_EQ(few.next_begin(10000), 0u) << "of which a page would be much";
  EXPECT_EQ(device.next_begin(size_t{1} << 30), 0u);
}

// What lies before their first arrays is counted as workspace, before it is allocated and after.
TEST(MemoryReport, ArenasOfSmallArrays) {
  constexpr int64_t kCount = 1024, kParams = 200;
  Block block(kCount * (kParams + 1), 1);
  const Block g(kCount, 1);
  const std::vector<const void*> gradients(kParams, g.data());
  // The workspace, and the bytes of all arenas.
  const auto run = [&](int64_t offset) {
    int64_t given = 0;
    ga_config c = config();
    c.allocator_user = &given;
    c.allocate = [](void* user, size_t bytes, ga_device, void*) {
      *static_cast<int64_t*>(user) += static_cast<int64_t>(bytes);
      return std::aligned_alloc(64, (bytes + 63) / 64 * 64);
    };
    c.free = [](void*, void* data, size_t, ga_device, void*) { std::free(data); };
    Context ctx(c);
    const ga_group group = ctx.group(optimizer(GA_OPTIMIZER_ADAMW));
    for (int64_t i = 0; i < kParams; ++i)
      ctx.param(group, "p" + std::to_string(i), &block[static_cast<size_t>(offset + i * kCount)],
                kCount);
    const ga_memory planned = memory(ctx);
    ctx.accumulate(gradients);
    EXPECT_EQ(step(ctx).outcome, GA_STEP_APPLIED);
    const ga_memory used = memory(ctx);
    EXPECT_EQ(used.accumulators, kParams * kCount * 4);
    EXPECT_EQ(used.optimizer_state, 2 * kParams * kCount * 4);
    EXPECT_EQ(planned.workspace, used.workspace);
    EXPECT_EQ(planned.total, used.total);
    EXPECT_EQ(used.resident, used.total);
    return std::pair(used.workspace, given);
  };
  const auto here = run(0),
             there = run(kCount /
                         2);  // half a page apart, so that each of three arenas begins elsewhere
  EXPECT_NE(here.second, there.second);
  EXPECT_EQ(here.first - there.first, here.second - there.second);
}

TEST(Placer, SmallArraysLieSideBySideAndThoseOfADeviceAtALine) {
  Placer host(false, nullptr), device(true, nullptr);
  size_t end = 64;
  EXPECT_EQ(host.place(end, 8192), 64u);
  EXPECT_EQ(end, 8256u);
  end = 64;
  EXPECT_EQ(device.place(end, 64), 64u);
  end = 64;
  EXPECT_EQ(device.place(end, 8192), 128u);
  EXPECT_EQ(end, 8320u);
  end = INT64_MAX - 1;
  device.place(end, INT64_MAX);
  EXPECT_EQ(end, static_cast<size_t>(INT64_MAX)) << "what no address space holds";
}

// ---- What ga_context_memory reports -------------------------------------------------------------

// A window of one live gradient never writes the accumulator, which is then address space, not
// memory.
TEST(MemoryReport, AccumulatorsOfLiveGradients) {
  constexpr int64_t kCount = 1 << 20;
  const auto run = [&](int64_t accum_steps, int micro_batches) {
    ga_config c = config();
    c.gradient_life = GA_GRADIENTS_LIVE;
    c.accum_steps = accum_steps;
    Context ctx(c);
    Tensor p(GA_F32, kCount), g(GA_F32, kCount, 1.0), h(GA_F32, kCount, 1.0);
    add(ctx, ctx.group(optimizer(GA_OPTIMIZER_ADAMW)), p);
    const ga_memory planned = memory(ctx);
    for (int k = 0; k < micro_batches; ++k) ctx.accumulate({k == 0 ? g.data() : h.data()});
    EXPECT_EQ(step(ctx).outcome, GA_STEP_APPLIED);
    const ga_memory used = memory(ctx);
    EXPECT_EQ(planned.accumulators, used.accumulators);
    EXPECT_EQ(planned.total, used.total);
    return used;
  };
  const ga_memory one = run(1, 1), open = run(0, 1), two = run(2, 2);
  constexpr int64_t kPage = 4096;  // large arrays start at different offsets within a page
  EXPECT_LT(one.accumulators, kPage);
  EXPECT_EQ(one.resident, one.total);
  EXPECT_GE(open.accumulators, 4 * kCount) << "the next window may have two";
  EXPECT_EQ(open.resident, open.total - 4 * kCount);
  EXPECT_NEAR(static_cast<double>(two.accumulators), static_cast<double>(open.accumulators), kPage);
  EXPECT_EQ(two.resident, two.total);
}

// The sizes are the same before and after the first contribution, for every clip and optimizer with
// arrays of its own.
TEST(MemoryReport, PlanEqualsUse) {
  for (const int32_t scope : {GA_CLIP_NONE, GA_CLIP_AGC}) {
    for (const int32_t kind : representative_kinds()) {
      Context ctx;
      const ga_clip c = clip(scope, 0);
      EXPECT_OK(ga_context_set_clip(ctx, &c));
      const ga_group group = ctx.group(optimizer(kind));
      std::vector<std::unique_ptr<Tensor>> p;
      std::vector<const void*> list;
      const Tensor g(GA_F32, 60, 1.0);
      for (int k = 0; k < 50; ++k) {
        p.push_back(std::make_unique<Tensor>(GA_F32, 60, 0.5));
        add(ctx, group, *p.back(), {3, 4, 5});
        list.push_back(g.data());
      }
      const ga_memory planned = memory(ctx);
      ctx.accumulate(list);
      EXPECT_EQ(step(ctx).outcome, GA_STEP_APPLIED);
      const ga_memory used = memory(ctx);
      EXPECT_EQ(planned.total, used.total) << "clip " << scope << ", optimizer " << kind;
      EXPECT_EQ(planned.workspace, used.workspace);
      EXPECT_EQ(used.resident, used.total);
    }
  }
}

}  // namespace
}  // namespace ga::test
