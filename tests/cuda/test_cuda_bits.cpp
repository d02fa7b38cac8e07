// SPDX-License-Identifier: Apache-2.0
//
// A device gives the bits of the CPU: every optimizer, dtype, way of accumulating, clip and EMA, as
// one program that runs on both.
#include "device.hpp"

namespace ga::test {
namespace {

// ---- Optimizers ----------------------------------------------------------------------------------

// A parameter's dtype and options.
struct Kind {
  const char* name;
  int32_t dtype;
  ga_param_options options;
};

std::vector<Kind> kinds() {
  const int32_t m = GA_MASTER_F32, none = GA_MASTER_NONE;
  const int32_t near = GA_ROUND_NEAREST, chance = GA_ROUND_STOCHASTIC;
  return {{"f32", GA_F32, options()},
          {"f32 of bf16", GA_F32, options(GA_BF16)},
          {"f64", GA_F64, options()},
          {"f64 of f32", GA_F64, options(GA_F32)},
          {"bf16, master", GA_BF16, with(m, near)},
          {"bf16, master, by chance", GA_BF16, with(m, chance)},
          {"bf16", GA_BF16, with(none, near)},
          {"bf16 by chance", GA_BF16, with(none, chance)},
          {"f16, master", GA_F16, with(m, near, GA_F32)},
          {"f16", GA_F16, with(none, near)},
          {"f16 by chance", GA_F16, with(none, chance)}};
}

int32_t gradient_dtype(const Kind& k) {
  return k.options.gradient_dtype ? k.options.gradient_dtype : k.dtype;
}

struct Spec {
  Kind kind;
  std::vector<int64_t> shape;
  int64_t count() const {
    int64_t n = 1;
    for (const int64_t extent : shape) n *= extent;
    return n;
  }
};

// Every kind of some size, and every size of some kind.
std::vector<Spec> specs(bool matrices) {
  std::vector<Spec> list;
  const std::vector<std::vector<int64_t>> shapes = {
      {0}, {}, {1}, {15}, {16}, {17}, {1023}, {1025}, {17, 33}, {40, 30}, {3, 5, 7}};
  for (const Kind& k : kinds()) {
    for (const auto& shape : shapes)
      if (!matrices || shape.size() == 2) list.push_back({k, shape});
  }
  for (const size_t k : {0, 2, 4, 7}) {
    if (matrices)
      list.push_back({kinds()[k], {300, 220}});
    else
      list.push_back({kinds()[k], {65536 + 3}});
  }
  return list;
}

// Three windows of two micro-batches with adversarial numbers. Some parameters get no gradient in
// the third window.
void train(Machine& m, const ga_optimizer& o, bool matrices) {
  const ga_group group = m.group(o);
  std::vector<Spec> list;
  uint64_t seed = 1;
  for (const Spec& s : specs(matrices)) {
    const ga_param id = m.add(group, numbers(s.kind.dtype, s.count(), seed), s.shape,
                              s.kind.options, static_cast<int64_t>(seed % 4));
    ++seed;
    if (id >= 0) list.push_back(s);
  }
  ASSERT_FALSE(list.empty());
  for (uint64_t window = 0; window < 3; ++window) {
    for (uint64_t micro = 0; micro < 2; ++micro) {
      std::vector<const void*> gradients;
      for (size_t i = 0; i < list.size(); ++i) {
        const Spec& s = list[i];
        const Tensor g =
            numbers(gradient_dtype(s.kind), s.count(), 1000 * (2 * window + micro) + i);
        gradients.push_back(window == 2 && i % 5 == 2 ? nullptr
                                                      : m.put(g, static_cast<int64_t>(i % 3)));
      }
      m.accumulate(gradients, micro == 0 ? 3 : 1.5);
    }
    m.step();
  }
}

class Bits : public OnDevice<> {};
class OptimizerBits : public OnDevice<testing::TestWithParam<size_t>> {};

TEST_P(OptimizerBits, OfEveryDtype) {
  const ga_optimizer o = good_optimizers()[GetParam()].optimizer;
  expect_same([&](Machine& m) { train(m, o, false); });
}

TEST_P(OptimizerBits, OfStateInBf16) {
  ga_optimizer o = good_optimizers()[GetParam()].optimizer;
  o.state_dtype = GA_BF16;
  ga_context* ctx = nullptr;
  ASSERT_OK(ga_context_create(nullptr, &ctx));
  const ga_status status = ga_group_add(ctx, &o, nullptr);
  ga_context_destroy(ctx);
  if (status != GA_OK) GTEST_SKIP() << "the optimizer has no state, or none in bf16";
  ga_config c = config();
  c.seed = 0x123456789abcdef;
  expect_same(c, [&](Machine& m) { train(m, o, false); });
}

INSTANTIATE_TEST_SUITE_P(All, OptimizerBits, testing::Range<size_t>(0, good_optimizers().size()),
                         [](const testing::TestParamInfo<size_t>& info) {
                           return good_optimizers()[info.param].name;
                         });

// ---- Ways of accumulating ------------------------------------------------------------------------

TEST_F(Bits, OfAccumulators) {
  for (const int32_t mode : {GA_ACCUMULATE_PLAIN, GA_ACCUMULATE_RUNNING_MEAN,
                             GA_ACCUMULATE_COMPENSATED, GA_ACCUMULATE_STOCHASTIC}) {
    for (const int32_t life : {GA_GRADIENTS_CONSUMED, GA_GRADIENTS_LIVE}) {
      ga_config c = config();
      c.accumulation = mode;
      c.gradient_life = life;
      c.seed = 77;
      SCOPED_TRACE(mode);
      SCOPED_TRACE(life);
      expect_same(c, [](Machine& m) {
        Training t;
        t.params.clear();
        for (const int64_t n : {0, 1, 15, 16, 17, 1023, 66000}) {
          for (const int32_t accumulator : {0, 1 * GA_F32, 1 * GA_F16, 1 * GA_BF16}) {
            for (const int32_t g : {GA_F32, GA_F16, GA_BF16})
              if (n < 2000 || (accumulator != GA_F32 && g == GA_BF16))
                t.params.push_back({GA_F32, {n}, options(g, accumulator)});
          }
          for (const int32_t g : {GA_F32, GA_F64, GA_BF16})
            if (n < 2000) t.params.push_back({GA_F64, {n}, options(g)});
        }
        t.add(m, m.group(plain_sgd()));
        t.windows(m, 2, 4);
        // A loss scale that is not a power of two, and a negative one.
        const double scale = 3, negative = -7;
        m.accumulate(t.gradients(m, 100), 3, scale);
        m.accumulate(t.gradients(m, 101), 0);
        m.accumulate(t.gradients(m, 102), 1.75, negative);
        m.step();
      });
    }
  }
}

TEST_F(Bits, OfSumsAndMeans) {
  for (const int32_t kind : {GA_GRADIENT_MEAN, GA_GRADIENT_SUM}) {
    for (const int32_t reduce : {GA_REDUCE_MEAN, GA_REDUCE_SUM}) {
      ga_config c = config();
      c.gradient_kind = kind;
      c.reduce = reduce;
      c.loss_scale = 640;
      expect_same(c, [](Machine& m) {
        Training t;
        t.add(m, m.group(optimizer(GA_OPTIMIZER_ADAMW)));
        t.windows(m);
      });
    }
  }
}

TEST_F(Bits, OfMissingGradients) {
  for (const int32_t missing : {GA_MISSING_SKIP, GA_MISSING_ZERO}) {
    for (const int32_t life : {GA_GRADIENTS_CONSUMED, GA_GRADIENTS_LIVE}) {
      ga_config c = config();
      c.missing = missing;
      c.gradient_life = life;
      for (const int32_t kind : representative_kinds()) {
        expect_same(c, [kind](Machine& m) {
          ga_optimizer o = optimizer(kind);
          o.weight_decay = 0.01;
          if (kind == GA_OPTIMIZER_SGD) o.momentum = 0.9;
          Training t;
          t.add(m, m.group(o));
          for (uint64_t w = 0; w < 4; ++w) {
            for (uint64_t k = 0; k < 2; ++k) {
              auto list = t.gradients(m, 2 * w + k);
              for (size_t i = 0; i < list.size(); ++i)
                if ((i + w + (i % 2) * k) % 3 == 0) list[i] = nullptr;
              m.accumulate(list);
            }
            m.step();
          }
          EXPECT_OK(ga_param_set_frozen(m, t.ids[0], 1));
          t.windows(m, 1);
          EXPECT_OK(ga_param_set_frozen(m, t.ids[0], 0));
          t.windows(m, 1);
          m.step();  // an empty window
        });
      }
    }
  }
}

TEST_F(Bits, OfGradientsByPart) {
  for (const int32_t life : {GA_GRADIENTS_CONSUMED, GA_GRADIENTS_LIVE}) {
    ga_config c = config();
    c.gradient_life = life;
    expect_same(c, [](Machine& m) {
      Training t;
      t.add(m, m.group(optimizer(GA_OPTIMIZER_ADAMW)));
      for (uint64_t w = 0; w < 2; ++w) {
        // The micro-batches are filled in turns, with two contributions to one parameter in each.
        for (size_t i = 0; i < t.ids.size(); ++i) {
          for (const int64_t micro : {0, 1, 2}) {
            const double weight = t.weight(static_cast<uint64_t>(micro));
            m.note("begin", ga_micro_begin(m, micro, weight, nullptr));
            for (uint64_t k = 0; k < (i == 2 ? 2 : 1); ++k) {
              const uint64_t round = 10 * w + 3 * static_cast<uint64_t>(micro) + k;
              m.note("part", ga_accumulate_part(m, t.ids[i], m.put(t.gradient(i, round))));
            }
            m.note("end", ga_micro_end(m));
          }
        }
        m.step();
      }
    });
  }
}

// The program adds to accumulators itself.
TEST_F(Bits, OfAccumulatorsThatTheProgramWrites) {
  expect_same([](Machine& m) {
    Training t;
    EXPECT_OK(ga_context_set_clip(m, [] {
      static const ga_clip c = clip(GA_CLIP_GLOBAL, 0.5);
      return &c;
    }()));
    t.add(m, m.group(optimizer(GA_OPTIMIZER_ADAMW)));
    for (uint64_t w = 0; w < 2; ++w) {
      m.accumulate(t.gradients(m, w));
      m.note("begin", ga_micro_begin(m, 1, 2, nullptr));
      for (const size_t i : {0, 2, 3}) {
        ga_accumulator a = {};
        a.struct_size = sizeof a;
        m.note("acquire", ga_accumulator_acquire(m, t.ids[i], &a));
        m.note("alpha", a.alpha);
        m.note("beta", a.beta);
        const int64_t n = t.params[i].count();
        Tensor sum = m.read(a.data, a.dtype, n);
        const Tensor g = numbers(GA_F32, n, 900 + i);
        for (int64_t j = 0; j < n; ++j) sum.set(j, a.alpha * g.get(j) + a.beta * sum.get(j));
        m.write(a.data, sum);
        m.note("release", ga_accumulator_release(m, t.ids[i]));
      }
      m.note("end", ga_micro_end(m));
      m.step();
    }
  });
}

TEST_F(Bits, OfAFlatBlock) {
  expect_same([](Machine& m) {
    const ga_group group = m.group(optimizer(GA_OPTIMIZER_ADAM));
    const int64_t a[] = {1000}, b[] = {3, 7}, d[] = {66000};
    const ga_flat_entry entries[] = {
        flat_entry("a", group, 1, a, 0), flat_entry("b", group, 2, b, 1003),
        flat_entry("c", group, 0, nullptr, 1024), flat_entry("d", group, 1, d, 1030)};
    const int64_t total = 1030 + 66000 + 1;
    for (const int32_t dtype : {GA_F32, GA_BF16}) {
      void* const data = m.keep(numbers(dtype, total, 3));
      ga_flat_entry named[4];
      std::vector<std::string> names;
      for (int i = 0; i < 4; ++i) names.push_back(entries[i].name + std::to_string(dtype));
      for (int i = 0; i < 4; ++i)
        named[i] = entries[i], named[i].name = names[static_cast<size_t>(i)].c_str();
      m.note("adding", ga_params_add_flat(m, data, dtype, named, 4, nullptr, nullptr));
    }
    for (uint64_t w = 0; w < 3; ++w) {
      for (uint64_t k = 0; k < 2; ++k)
        m.accumulate({m.put(numbers(GA_F32, total, 10 * w + k)),
                      m.put(numbers(GA_BF16, total, 100 + 10 * w + k))});
      m.step();
      m.note("block", m.kept(0));
      m.note("block", m.kept(1));
    }
  });
}

// Parameters and state of bf16, and arrays at any address: every format with every other one, where the threads of a
// block take whole rounds and where elements are left over.
void train_mixed(Machine& m, const ga_optimizer& o, const std::vector<int64_t>& counts) {
  const int32_t none = GA_MASTER_NONE, f32 = GA_MASTER_F32;
  const int32_t near = GA_ROUND_NEAREST, chance = GA_ROUND_STOCHASTIC;
  const std::vector<Kind> kinds = {{"f32", GA_F32, options()},
                                   {"f32 of bf16", GA_F32, options(GA_BF16)},
                                   {"bf16", GA_BF16, with(none, near)},
                                   {"bf16 by chance", GA_BF16, with(none, chance)},
                                   {"bf16, master", GA_BF16, with(f32, near)},
                                   {"bf16, master, by chance", GA_BF16, with(f32, chance)}};
  std::vector<ga_optimizer> optimizers(2, o);
  optimizers[1].state_dtype = GA_BF16;
  if (o.kind == GA_OPTIMIZER_SGD && o.momentum == 0) optimizers.pop_back();
  std::vector<Spec> list;
  for (const ga_optimizer& of : optimizers) {
    const ga_group group = m.group(of);
    for (const Kind& kind : kinds) {
      for (const int64_t shift : {0, 1}) {
        for (const int64_t count : counts) {
          list.push_back({kind, {count}});
          m.add(group, numbers(kind.dtype, count, list.size()), {count}, kind.options, shift);
        }
      }
    }
  }
  uint64_t seed = 1000;
  for (const int micros : {2, 1}) {  // accumulated; one that lives
    for (int micro = 0; micro < micros; ++micro) {
      std::vector<const void*> gradients;
      for (size_t i = 0; i < list.size(); ++i, ++seed)
        gradients.push_back(m.put(numbers(gradient_dtype(list[i].kind), list[i].count(), seed),
                                  static_cast<int64_t>(i / 2 % 2)));
      m.accumulate(gradients);
    }
    m.step();
  }
}

ga_config mixed_config() {
  ga_config c = config();
  c.seed = 77;
  c.gradient_life = GA_GRADIENTS_LIVE;
  return c;
}

TEST_F(Bits, OfMixedArrays) {
  std::vector<ga_optimizer> optimizers = {plain_sgd(), plain_sgd()};
  optimizers[1].momentum = 0.9;
  for (const int32_t kind :
       {GA_OPTIMIZER_ADAM, GA_OPTIMIZER_ADAMW, GA_OPTIMIZER_RMSPROP, GA_OPTIMIZER_LION})
    optimizers.push_back(optimizer(kind));
  for (const ga_optimizer& o : optimizers) {
    SCOPED_TRACE(testing::Message() << o.kind << ' ' << o.momentum);
    expect_same(mixed_config(), [&](Machine& m) {
      train_mixed(m, o, {2048, 2 * 2048 + 13, 65536 + 2048 + 3});
    });
  }
}

TEST_F(Bits, OfEmasOfMixedArrays) {
  for (const int32_t dtype : {0, int32_t{GA_BF16}}) {
    expect_same(mixed_config(), [&](Machine& m) {
      ga_ema e;
      EXPECT_OK(ga_ema_init(&e, sizeof e));
      e.dtype = dtype;
      e.decay = 0.9;
      EXPECT_OK(ga_context_set_ema(m, &e));
      train_mixed(m, plain_sgd(), {2048 + 5});
      m.note_averages();
    });
  }
}

// More gradients, contributions and other list entries than one launch takes.
TEST_F(Bits, OfManyParameters) {
  std::vector<int64_t> counts;
  int64_t total = 0;
  constexpr int64_t kParams = 4100;
  for (int64_t i = 0; i < kParams; ++i) {
    counts.push_back(i % 41 == 7 ? 0 : i % 13 + 1);
    total += counts.back();
  }
  struct Way {
    int32_t kind, nonfinite, accumulation, when;
  };
  for (const Way& w :
       {Way{GA_OPTIMIZER_ADAMW, GA_NONFINITE_SKIP_STEP, GA_ACCUMULATE_PLAIN, GA_CLIP_WHEN_STEP},
        Way{GA_OPTIMIZER_SGD, GA_NONFINITE_DROP_MICRO, GA_ACCUMULATE_PLAIN, GA_CLIP_WHEN_STEP},
        Way{GA_OPTIMIZER_ADAMW, GA_NONFINITE_SKIP_STEP, GA_ACCUMULATE_PLAIN, GA_CLIP_WHEN_MICRO},
        Way{GA_OPTIMIZER_LAMB, GA_NONFINITE_SKIP_STEP, GA_ACCUMULATE_RUNNING_MEAN,
            GA_CLIP_WHEN_STEP}}) {
    SCOPED_TRACE(testing::Message() << w.kind << w.nonfinite << w.accumulation << w.when);
    ga_config c = config();
    c.nonfinite = w.nonfinite;
    c.accumulation = w.accumulation;
    expect_same(c, [&](Machine& m) {
      ga_clip clipped = clip(GA_CLIP_PER_TENSOR, 0.5);
      clipped.when = w.when;
      EXPECT_OK(ga_context_set_clip(m, &clipped));
      const ga_group group = m.group(optimizer(w.kind));
      // Added one by one, so each parameter has its own pointer.
      char* const data = static_cast<char*>(m.keep(numbers(GA_F32, total, 3)));
      int64_t offset = 0;
      for (int64_t i = 0; i < kParams; ++i) {
        const int64_t n = counts[static_cast<size_t>(i)];
        const std::string name = "q" + std::to_string(i);
        m.note("adding", ga_param_add(m, group, name.c_str(), data + 4 * offset, GA_F32, 1, &n,
                                      nullptr, nullptr));
        offset += n;
      }
      for (uint64_t k = 0; k < 6; ++k) {
        const Tensor g = numbers(GA_F32, total, 40 + k);
        char* const from = static_cast<char*>(m.put(g));
        std::vector<const void*> list;
        offset = 0;
        for (int64_t i = 0; i < kParams; ++i) {
          list.push_back(i % 97 == 3 ? nullptr : from + 4 * offset);
          offset += counts[static_cast<size_t>(i)];
        }
        m.accumulate(list, 1 + static_cast<double>(k));
        if (k % 2 == 1) m.step();
      }
      m.note("all", m.kept(0));
    });
  }
}

// The program writes and moves its parameters.
TEST_F(Bits, OfParametersThatMove) {
  expect_same([](Machine& m) {
    Training t;
    t.add(m, m.group(optimizer(GA_OPTIMIZER_ADAMW)));
    t.windows(m, 1);
    for (size_t i = 0; i < t.ids.size(); ++i) {
      const Param& p = t.params[i];
      const Tensor values = numbers(p.dtype, p.count(), 7777 + i);
      if (i % 2 == 0) {
        m.set(t.ids[i], values);
        m.note("changed", ga_param_changed(m, t.ids[i]));
      } else {
        m.note("bind", m.move(t.ids[i], values));
      }
    }
    t.windows(m, 2);
  });
}

// More chunks than a warp has lanes, and more than the tree that adds up chunks has leaves.
TEST_F(Bits, OfAManyChunkTensor) {
  for (const int32_t kind : {GA_OPTIMIZER_ADAMW, GA_OPTIMIZER_LAMB}) {
    expect_same([kind](Machine& m) {
      const ga_clip c = clip(GA_CLIP_GLOBAL, 0.25);
      EXPECT_OK(ga_context_set_clip(m, &c));
      Training t;
      t.params = {{GA_F32, {70 * 65536 + 5}, options()},
                  {GA_BF16, {33 * 65536}, with(GA_MASTER_NONE, GA_ROUND_NEAREST)},
                  {GA_F32, {17}, options()}};
      t.add(m, m.group(optimizer(kind)));
      t.windows(m, 1, 1);
    });
  }
}

// The chunks of an update's last round are cut in parts: of 9 blocks, these leave 1, 2, 4, 5 and again 1 chunk for
// it; where averages alone move, there are 12 blocks. What is rounded by chance depends on the place of an element.
TEST_F(Bits, OfChunksInParts) {
  const std::vector<ga_param_options> all = {options(), with(GA_MASTER_NONE, GA_ROUND_STOCHASTIC)};
  for (const int64_t count : {7, 65536 + 16389, 4 * 65536 - 1, 5 * 65536, 9 * 65536 + 20003}) {
    for (const int32_t kind : {GA_OPTIMIZER_ADAMW, GA_OPTIMIZER_EXTERNAL}) {
      for (const size_t low : {0, 1}) {
        ga_config c = config();
        c.seed = 5;
        expect_same(c, [&](Machine& m) {
          ga_ema e;
          EXPECT_OK(ga_ema_init(&e, sizeof e));
          e.dtype = low ? GA_BF16 : 0;
          e.decay = 0.9;
          EXPECT_OK(ga_context_set_ema(m, &e));
          Training t;
          t.params = {{low ? GA_BF16 : GA_F32, {count}, all[low]}};
          t.add(m, m.group(optimizer(kind)));
          t.windows(m, 2, 1);
          m.note_averages();
        });
      }
    }
  }
}

// ---- Clipping ------------------------------------------------------------------------------------

struct NamedClip {
  std::string name;
  ga_clip clip;
};

std::vector<NamedClip> clips() {
  const int32_t torch = GA_FLAVOR_TORCH, keras = GA_FLAVOR_KERAS;
  std::vector<NamedClip> list = {
      {"Value", clip(GA_CLIP_NONE, 0, torch, 0.3)},
      {"Global", clip(GA_CLIP_GLOBAL, 0.7)},
      {"GlobalKeras", clip(GA_CLIP_GLOBAL, 0.7, keras)},
      {"GlobalValue", clip(GA_CLIP_GLOBAL, 0.7, torch, 0.3)},
      {"GlobalNever", clip(GA_CLIP_GLOBAL, 1e9)},
      {"PerTensor", clip(GA_CLIP_PER_TENSOR, 0.7)},
      {"PerTensorKerasValue", clip(GA_CLIP_PER_TENSOR, 0.7, keras, 0.25)}};
  for (const int32_t units : {GA_AGC_TF, GA_AGC_TORCH}) {
    ga_clip c = clip(GA_CLIP_AGC, 0);
    c.agc_units = units;
    c.agc_factor = 0.1;
    list.push_back({units == GA_AGC_TF ? "AgcColumns" : "AgcRows", c});
    c.max_value = 0.3;
    list.push_back({units == GA_AGC_TF ? "AgcColumnsValue" : "AgcRowsValue", c});
  }
  return list;
}

class ClipBits : public OnDevice<testing::TestWithParam<size_t>> {};

std::vector<Param> clipped_params() {
  std::vector<Param> list = some_params();
  list.push_back({GA_F32, {300, 250}, options()});
  list.push_back({GA_BF16, {2, 40000}, options()});
  list.push_back({GA_BF16, {40000, 2}, with(GA_MASTER_NONE, GA_ROUND_STOCHASTIC)});
  list.push_back({GA_F64, {70, 1000}, options()});
  for (const uint32_t axes : {1u, 2u, 3u, 4u, 5u, 6u, 7u}) {
    ga_param_options o = options();
    o.agc_axes = axes;
    list.push_back({GA_F32, {11, 13, 17}, o});
  }
  return list;
}

TEST_P(ClipBits, OfEveryOptimizer) {
  const ga_clip c = clips()[GetParam()].clip;
  for (const int32_t kind : representative_kinds()) {
    SCOPED_TRACE(kind);
    expect_same([&](Machine& m) {
      EXPECT_OK(ga_context_set_clip(m, &c));
      Training t;
      t.params = clipped_params();
      ga_optimizer o = optimizer(kind);
      o.weight_decay = 0.01;
      t.add(m, m.group(o));
      t.windows(m, 2, 2);
    });
  }
}

// Units with more tiles than a block holds the sums of, one and two of them in a piece.
TEST_F(Bits, OfUnitsOfManyTiles) {
  ga_clip c = clip(GA_CLIP_AGC, 0);
  c.agc_factor = 0.1;
  expect_same([&](Machine& m) {
    EXPECT_OK(ga_context_set_clip(m, &c));
    constexpr int64_t kLong = 512 * 1024 + 5;
    Training t;
    t.params.clear();
    for (const uint32_t axes : {2u, 5u}) {
      ga_param_options o = options();
      o.agc_axes = axes;
      t.params.push_back({GA_F32, {2, kLong}, o});
      if (axes == 5) t.params.back().shape = {2, 2, kLong};
    }
    t.add(m, m.group(plain_sgd()));
    m.accumulate(t.gradients(m, 0), 2.5);
    m.step();
  });
}

// More parameters than a warp has lanes, and more units than the blocks of a launch take at a time.
TEST_F(Bits, OfMoreParametersThanLanes) {
  for (const int32_t kind : {GA_OPTIMIZER_SGD, GA_OPTIMIZER_LAMB, GA_OPTIMIZER_ADAFACTOR}) {
    for (const int32_t scope : {GA_CLIP_NONE, GA_CLIP_AGC}) {
      expect_same([kind, scope](Machine& m) {
        ga_clip c = clip(scope, 0);
        c.agc_factor = 0.1;
        EXPECT_OK(ga_context_set_clip(m, &c));
        Training t;
        t.params.assign(60, {GA_F32, {5, 7}, options()});
        t.add(m, m.group(optimizer(kind)));
        t.windows(m, 2, 1);
      });
    }
  }
}

// Live gradients, which lie at other addresses in every window; also with a loss scale that only
// the device knows.
TEST_P(ClipBits, OfLiveGradients) {
  const ga_clip c = clips()[GetParam()].clip;
  ga_config config = test::config();
  config.gradient_life = GA_GRADIENTS_LIVE;
  struct Way {
    int32_t kind;
    bool scaled;
  };
  for (const Way& way :
       {Way{GA_OPTIMIZER_ADAMW, false}, Way{GA_OPTIMIZER_ADAMW, true}, Way{GA_OPTIMIZER_LAMB, true},
        Way{GA_OPTIMIZER_LARS, false}, Way{GA_OPTIMIZER_ADAFACTOR, true}}) {
    SCOPED_TRACE(testing::Message() << way.kind << (way.scaled ? ", scaled" : ""));
    expect_same(config, [&](Machine& m) {
      EXPECT_OK(ga_context_set_clip(m, &c));
      if (way.scaled) {
        ga_loss_scaler scaler;
        EXPECT_OK(ga_loss_scaler_init(&scaler, sizeof scaler));
        scaler.initial_scale = 4;
        scaler.growth_interval = 1;
        EXPECT_OK(ga_context_set_loss_scaler(m, &scaler));
      }
      Training t;
      t.params = clipped_params();
      ga_optimizer o = optimizer(way.kind);
      o.weight_decay = 0.01;
      t.add(m, m.group(o));
      uint64_t round = 0;
      const auto micros = [&](int count, double weight) {
        for (int k = 0; k < count; ++k) m.accumulate(t.gradients(m, round++), weight);
      };
      for (const int count : {1, 1, 2, 1, 3, 1, 1}) {
        micros(count, round == 5 ? 2.5 : 1);
        if (round == 9) {
          m.note("discard", ga_discard(m));
          micros(1, 1);
        }
        m.step();
      }
    });
  }
}

TEST_P(ClipBits, OfMicroBatches) {
  ga_clip c = clips()[GetParam()].clip;
  c.when = GA_CLIP_WHEN_MICRO;
  for (const int32_t nonfinite : {GA_NONFINITE_SKIP_STEP, GA_NONFINITE_DROP_MICRO}) {
    SCOPED_TRACE(nonfinite);
    ga_config config = test::config();
    config.nonfinite = nonfinite;
    expect_same(config, [&](Machine& m) {
      EXPECT_OK(ga_context_set_clip(m, &c));
      Training t;
      t.params = clipped_params();
      t.add(m, m.group(optimizer(GA_OPTIMIZER_ADAMW)));
      t.windows(m, 2, 3);
      Tensor bad = t.gradient(2, 1);
      bad.set(bad.count() / 2, INFINITY);
      for (uint64_t k = 0; k < 3; ++k) {
        auto list = t.gradients(m, 60 + k);
        if (k == 1) list[2] = m.put(bad);
        m.accumulate(list, t.weight(k));
      }
      m.step();
      t.windows(m, 1, 2);
    });
  }
}

// Groups with their own clips, and frozen and missing parameters.
TEST_P(ClipBits, OfGroups) {
  const ga_clip c = clips()[GetParam()].clip;
  for (const int32_t missing : {GA_MISSING_SKIP, GA_MISSING_ZERO}) {
    ga_config config = test::config();
    config.missing = missing;
    config.gradient_life = GA_GRADIENTS_LIVE;
    expect_same(config, [&](Machine& m) {
      const ga_clip other = clip(GA_CLIP_GLOBAL, 0.1, GA_FLAVOR_KERAS);
      const ga_clip tensor = clip(GA_CLIP_PER_TENSOR, 0.2);
      EXPECT_OK(ga_context_set_clip(m, &other));
      std::vector<ga_group> groups;
      ga_optimizer lamb = optimizer(GA_OPTIMIZER_LAMB);
      lamb.max_grad_norm = 0.05;
      for (const ga_optimizer& o :
           {optimizer(GA_OPTIMIZER_SGD), lamb, lamb, optimizer(GA_OPTIMIZER_ADAMW),
            optimizer(GA_OPTIMIZER_ADAFACTOR), optimizer(GA_OPTIMIZER_EXTERNAL)})
        groups.push_back(m.group(o));
      EXPECT_OK(ga_group_set_clip(m, groups[0], &c));
      EXPECT_OK(ga_group_set_clip(m, groups[1], &c));
      EXPECT_OK(ga_group_set_clip(m, groups[2], &tensor));
      EXPECT_OK(ga_group_set_clip(m, groups[4], &c));
      EXPECT_OK(ga_group_set_clip(m, groups[5], &c));
      std::vector<std::pair<Param, ga_param>> list;
      for (const ga_group g : groups) {
        for (const Param& p : {Param{GA_F32, {50, 41}, options()}, Param{GA_F32, {1000}, options()},
                               Param{GA_BF16, {66, 1009}, options()}}) {
          const ga_param id = m.add(g, numbers(p.dtype, p.count(), static_cast<uint64_t>(g) + 5),
                                    p.shape, p.options);
          ASSERT_GE(id, 0);
          list.push_back({p, id});
        }
      }
      EXPECT_OK(ga_param_set_frozen(m, list[3].second, 1));
      for (uint64_t w = 0; w < 3; ++w) {
        for (uint64_t k = 0; k < 2; ++k) {
          std::vector<const void*> gradients;
          for (size_t i = 0; i < list.size(); ++i) {
            const Param& p = list[i].first;
            gradients.push_back(
                (i + w) % 4 == 1 ? nullptr : m.put(numbers(p.dtype, p.count(), 10 * w + k + i)));
          }
          m.accumulate(gradients, 1.5);
        }
        m.step();
        for (size_t i = list.size() - 3; i < list.size(); ++i) m.note_gradient(list[i].second);
      }
    });
  }
}

INSTANTIATE_TEST_SUITE_P(All, ClipBits, testing::Range<size_t>(0, clips().size()),
                         [](const testing::TestParamInfo<size_t>& info) {
                           return clips()[info.param].name;
                         });

// ---- EMA, loss scales, schedules -----------------------------------------------------------------

TEST_F(Bits, OfEmas) {
  for (const int32_t kind : {GA_EMA_TORCH, GA_EMA_KARRAS}) {
    for (const int32_t dtype : {0, 1 * GA_BF16}) {
      for (const int32_t missing : {GA_MISSING_SKIP, GA_MISSING_ZERO}) {
        ga_config c = config();
        c.missing = missing;
        c.seed = 5;
        expect_same(c, [&](Machine& m) {
          ga_ema e;
          EXPECT_OK(ga_ema_init(&e, sizeof e));
          e.kind = kind;
          e.dtype = dtype;
          e.decay = 0.9;
          EXPECT_OK(ga_context_set_ema(m, &e));
          Training t;
          t.params = some_params(dtype == 0);
          t.add(m, m.group(optimizer(GA_OPTIMIZER_ADAMW)));
          m.note_averages();
          t.windows(m, 2, 1);
          m.note_averages();
          EXPECT_OK(ga_param_set_frozen(m, t.ids[0], 1));
          auto list = t.gradients(m, 9);
          list[3] = nullptr;
          m.accumulate(list);
          m.step();
          m.note_averages();
          // A skipped window and another one, then a parameter that is added late.
          list = t.gradients(m, 10);
          Tensor bad = t.gradient(2, 10);
          bad.set(7, NAN);
          list[2] = m.put(bad);
          m.accumulate(list);
          m.step();
          t.params.push_back({GA_BF16, {130}, with(GA_MASTER_F32, GA_ROUND_NEAREST)});
          const Param& p = t.params.back();
          t.ids.push_back(m.add(0, numbers(p.dtype, 130, 3), p.shape, p.options));
          t.windows(m, 1, 1);
          m.note_averages();
        });
      }
    }
  }
}

TEST_F(Bits, OfEmasOfExternalParameters) {
  expect_same([&](Machine& m) {
    ga_ema e;
    EXPECT_OK(ga_ema_init(&e, sizeof e));
    e.decay = 0.5;
    EXPECT_OK(ga_context_set_ema(m, &e));
    Training t;
    t.add(m, m.group(optimizer(GA_OPTIMIZER_EXTERNAL)));
    for (int w = 0; w < 3; ++w) {
      t.windows(m, 1, 2);
      for (size_t i = 0; i < t.ids.size(); ++i) {
        m.note_gradient(t.ids[i]);
        m.set(t.ids[i],
              numbers(t.params[i].dtype, t.params[i].count(), static_cast<uint64_t>(w) * 100 + i));
      }
      m.note_averages();
    }
  });
}

void spoil(const Training& t, Machine& m, std::vector<const void*>& list, size_t i, double value) {
  Tensor bad = t.gradient(i, 333);
  if (bad.count() > 0) bad.set(bad.count() - 1, value);
  list[i] = m.put(bad);
}

// Growth and backoff factors that are not powers of two, so the division is not exact.
TEST_F(Bits, OfLossScales) {
  for (const int32_t nonfinite :
       {GA_NONFINITE_SKIP_STEP, GA_NONFINITE_DROP_MICRO, GA_NONFINITE_IGNORE, GA_NONFINITE_FAIL}) {
    for (const int32_t mode : {GA_ACCUMULATE_PLAIN, GA_ACCUMULATE_RUNNING_MEAN}) {
      for (const int32_t life : {GA_GRADIENTS_CONSUMED, GA_GRADIENTS_LIVE}) {
        ga_config c = config();
        c.nonfinite = nonfinite;
        c.accumulation = mode;
        c.gradient_life = life;
        SCOPED_TRACE(testing::Message() << nonfinite << " " << mode << " " << life);
        expect_same(c, [&](Machine& m) {
          ga_loss_scaler s;
          EXPECT_OK(ga_loss_scaler_init(&s, sizeof s));
          s.initial_scale = 1000;
          s.growth_factor = 1.7;
          s.backoff_factor = 0.3;
          s.growth_interval = 2;
          s.hysteresis = 2;
          EXPECT_OK(ga_context_set_loss_scaler(m, &s));
          const ga_clip clipped = clip(GA_CLIP_GLOBAL, 1e-3);
          EXPECT_OK(ga_context_set_clip(m, &clipped));
          Training t;
          t.add(m, m.group(optimizer(GA_OPTIMIZER_ADAMW)));
          for (uint64_t w = 0; w < 8; ++w) {
            // Some windows have one micro-batch, whose live gradients the step itself reads.
            const uint64_t micros = w % 3 == 1 || w == 5 ? 1 : 3;
            for (uint64_t k = 0; k < micros; ++k) {
              auto list = t.gradients(m, 3 * w + k);
              if ((w == 2 && k == 0) || (w == 4 && k > 0) || w == 5)
                spoil(t, m, list, w % t.ids.size(), k == 0 ? NAN : INFINITY);
              m.accumulate(list, t.weight(k));
            }
            double scale = 0;
            m.note("scale", ga_loss_scale(m, &scale, nullptr));
            m.note("scale", scale);
            const ga_step_result r = m.step();
            if (nonfinite == GA_NONFINITE_FAIL && r.outcome != GA_STEP_APPLIED)
              m.note("discard", ga_discard(m));
            if (window(m).state != GA_WINDOW_EMPTY) m.note("discard", ga_discard(m));
          }
          double scale = 0;
          m.note("scale", ga_loss_scale(m, &scale, nullptr));
          m.note("scale", scale);
        });
      }
    }
  }
}

// Parts that are kept until their micro-batch is checked.
TEST_F(Bits, OfDroppedMicroBatchesByPart) {
  ga_config c = config();
  c.nonfinite = GA_NONFINITE_DROP_MICRO;
  for (const int32_t mode : {GA_ACCUMULATE_PLAIN, GA_ACCUMULATE_RUNNING_MEAN,
                             GA_ACCUMULATE_COMPENSATED, GA_ACCUMULATE_STOCHASTIC}) {
    c.accumulation = mode;
    c.seed = 99;
    SCOPED_TRACE(mode);
    expect_same(c, [](Machine& m) {
      Training t;
      for (const int64_t n : {33, 66000}) {
        t.params.push_back({GA_F32, {n}, options(GA_F32, GA_BF16)});
        t.params.push_back({GA_F32, {n}, options(GA_BF16, GA_F16)});
      }
      t.add(m, m.group(optimizer(GA_OPTIMIZER_ADAM)));
      for (uint64_t w = 0; w < 3; ++w) {
        for (uint64_t k = 0; k < 4; ++k) {
          m.note("begin", ga_micro_begin(m, static_cast<int64_t>(k), t.weight(k), nullptr));
          for (size_t i = 0; i < t.ids.size(); ++i) {
            if ((i + k) % 3 == 2) continue;
            std::vector<const void*> list = {nullptr};
            for (int twice = 0; twice < (i == 2 ? 2 : 1); ++twice) {
              Tensor g = t.gradient(i, 4 * w + k + 50 * static_cast<uint64_t>(twice));
              if (i == 3 && (w + k) % 3 == 0) g.set(5, -INFINITY);
              m.note("part", ga_accumulate_part(m, t.ids[i], m.put(g)));
            }
          }
          m.note("end", ga_micro_end(m));
        }
        m.step();
      }
    });
  }
}

TEST_F(Bits, OfSchedules) {
  const double table[] = {0.5, 0.25, 0.3};
  for (int32_t kind = GA_SCHEDULE_CONSTANT; kind <= GA_SCHEDULE_BERT; ++kind) {
    SCOPED_TRACE(kind);
    expect_same([&](Machine& m) {
      ga_schedule s = schedule(kind);
      s.warmup_steps = 2;
      s.total_steps = 5;
      s.end_factor = 0.1;
      s.power = 1.7;
      s.gamma = 0.7;
      s.step_size = 2;
      s.table = kind == GA_SCHEDULE_TABLE ? table : nullptr;
      s.table_size = kind == GA_SCHEDULE_TABLE ? 3 : 0;
      Training t;
      t.params = {{GA_F32, {100}, options()}};
      const ga_group g = m.group(optimizer(GA_OPTIMIZER_ADAMW));
      m.note("schedule", ga_group_set_schedule(m, g, &s));
      t.add(m, g);
      for (int w = 0; w < 7; ++w) {
        t.windows(m, 1, 1);
        double lr = 0;
        m.note("lr", ga_group_lr(m, g, &lr));
        m.note("lr", lr);
        if (w == 4) m.note("set lr", ga_group_set_lr(m, g, 0.123));
      }
    });
  }
}

// Options that change between windows, and a schedule of the window length.
TEST_F(Bits, OfChanges) {
  expect_same([](Machine& m) {
    const int64_t from[] = {0, 2, 4}, steps[] = {2, 3, 1};
    m.note("phases", ga_context_set_accum_schedule(m, from, steps, 3));
    Training t;
    const ga_group g = m.group(optimizer(GA_OPTIMIZER_ADAMW));
    t.add(m, g);
    for (int w = 0; w < 6; ++w) {
      uint64_t micros = 0;
      for (; window(m).state != GA_WINDOW_FULL; ++micros)
        m.accumulate(t.gradients(m, 10 * static_cast<uint64_t>(w) + micros), t.weight(micros));
      EXPECT_EQ(micros, w < 2 ? 2 : w < 4 ? 3 : 1);
      m.note("K", window(m).accum_steps);
      m.step();
      m.note("lr", ga_group_set_lr(m, g, 0.01 * (w + 1)));
      m.note("decay", ga_group_set_weight_decay(m, g, 0.1 * w));
      const ga_clip c = w % 2 ? clip(GA_CLIP_PER_TENSOR, 0.3) : clip(GA_CLIP_AGC, 0);
      m.note("clip", ga_context_set_clip(m, w == 3 ? nullptr : &c));
    }
  });
}

// Squares that underflow or overflow in f32, and zeros, so that tiles are summed in double: of accumulating
// passes, of norms, and over units.
TEST_F(Bits, OfTinyAndHugeGradients) {
  for (const double scale : {0x1p45, 0x1p50, 0x1p70, 0x1p-66}) {
    for (const int32_t life : {GA_GRADIENTS_CONSUMED, GA_GRADIENTS_LIVE}) {
      for (const int32_t scope : {GA_CLIP_GLOBAL, GA_CLIP_AGC}) {
        ga_config c = config();
        c.gradient_life = life;
        c.noise_scale = life == GA_GRADIENTS_CONSUMED;
        SCOPED_TRACE(testing::Message() << scale << " " << life << " " << scope);
        expect_same(c, [&](Machine& m) {
          ga_clip by = clip(scope, scope == GA_CLIP_GLOBAL ? 1e-3 : 0);
          by.agc_units = GA_AGC_TORCH;
          EXPECT_OK(ga_context_set_clip(m, &by));
          const ga_group g = m.group(optimizer(GA_OPTIMIZER_ADAMW));
          const std::vector<std::vector<int64_t>> shapes = {{17}, {40, 30}, {3, 2500}, {70000}};
          for (size_t i = 0; i < shapes.size(); ++i) {
            int64_t n = 1;
            for (const int64_t extent : shapes[i]) n *= extent;
            m.add(g, numbers(GA_F32, n, i), shapes[i]);
          }
          for (uint64_t w = 0; w < 2; ++w) {
            for (uint64_t k = 0; k <= w; ++k) {
              std::vector<const void*> list;
              for (const auto& shape : shapes) {
                int64_t n = 1;
                for (const int64_t extent : shape) n *= extent;
                Tensor t = numbers(GA_F32, n, 100 * w + 10 * k + list.size());
                for (int64_t j = 0; j < n; ++j) t.set(j, j % 5000 < 4000 ? t.get(j) / scale : 0);
                list.push_back(m.put(t));
              }
              m.accumulate(list, 1.5);
            }
            m.step();
          }
        });
      }
    }
  }
}

TEST_F(Bits, OfNoiseScales) {
  for (const int32_t mode : {GA_ACCUMULATE_PLAIN, GA_ACCUMULATE_RUNNING_MEAN}) {
    for (const int32_t life : {GA_GRADIENTS_CONSUMED, GA_GRADIENTS_LIVE}) {
      for (const int32_t nonfinite : {GA_NONFINITE_SKIP_STEP, GA_NONFINITE_DROP_MICRO}) {
        ga_config c = config();
        c.noise_scale = 1;
        c.accumulation = mode;
        c.gradient_life = life;
        c.nonfinite = nonfinite;
        SCOPED_TRACE(testing::Message() << mode << life << nonfinite);
        expect_same(c, [](Machine& m) {
          Training t;
          t.add(m, m.group(optimizer(GA_OPTIMIZER_ADAMW)));
          t.windows(m, 3);
          for (uint64_t k = 0; k < 3; ++k) {
            auto list = t.gradients(m, 60 + k);
            if (k == 1) spoil(t, m, list, 3, NAN);
            m.accumulate(list, t.weight(k));
          }
          m.step();
          t.windows(m, 2, 2);
        });
      }
    }
  }
}

// NaN and infinities under every clip, also when no check looks for them.
TEST_F(Bits, OfNonfiniteGradients) {
  for (const int32_t nonfinite : {GA_NONFINITE_SKIP_STEP, GA_NONFINITE_IGNORE}) {
    for (const int32_t life : {GA_GRADIENTS_CONSUMED, GA_GRADIENTS_LIVE}) {
      ga_config c = config();
      c.nonfinite = nonfinite;
      c.gradient_life = life;
      for (const NamedClip& n : clips()) {
        expect_same(c, [&](Machine& m) {
          EXPECT_OK(ga_context_set_clip(m, &n.clip));
          Training t;
          t.add(m, m.group(optimizer(GA_OPTIMIZER_SGD)));
          for (uint64_t w = 0; w < 3; ++w) {
            auto list = t.gradients(m, w);
            if (w == 1) spoil(t, m, list, 2, INFINITY);
            if (w == 2) spoil(t, m, list, 5, NAN);
            m.accumulate(list);
            m.step();
          }
        });
      }
    }
  }
}

// Running means of micro-batches that are checked, with several contributions to a parameter.
TEST_F(Bits, OfMeansThatAreChecked) {
  ga_config c = config();
  c.accumulation = GA_ACCUMULATE_RUNNING_MEAN;
  c.nonfinite = GA_NONFINITE_DROP_MICRO;
  expect_same(c, [](Machine& m) {
    Training t;
    t.params.assign(40, {GA_F32, {50}, options()});
    t.add(m, m.group(plain_sgd()));
    for (int64_t micro = 0; micro < 3; ++micro) {
      m.note("begin", ga_micro_begin(m, micro, t.weight(static_cast<uint64_t>(micro)), nullptr));
      for (uint64_t k = 0; k < 2; ++k) {
        for (size_t i = 0; i < t.ids.size(); ++i) {
          Tensor g = t.gradient(i, 2 * static_cast<uint64_t>(micro) + k);
          if (micro == 1 && i == 7) g.set(3, NAN);
          m.note("part", ga_accumulate_part(m, t.ids[i], m.put(g)));
        }
      }
      m.note("end", ga_micro_end(m));
    }
    m.step();
  });
}

// What is not finite in doubles is a flag of its own, since their squares may overflow.
TEST_F(Bits, OfNonfiniteDoubles) {
  for (const double bad : {INFINITY, NAN}) {
    expect_same([bad](Machine& m) {
      const ga_group group = m.group(plain_sgd());
      Training t;
      t.params = {{GA_F64, {3000}, options()}};
      t.add(m, group);
      ga_param_options o = options();
      o.rows = GA_ROWS_LAZY;
      const ga_param table = m.add(group, numbers(GA_F64, 40 * 8, 7), {40, 8}, o);
      for (uint64_t w = 0; w < 5; ++w) {
        Tensor g = t.gradient(0, w), rows = numbers(GA_F64, 20 * 8, w);
        for (const int64_t i : {17, 1500, 2999})
          if (w == 1) g.set(i, bad);
        for (const int64_t i : {3, 85})
          if (w == 3) rows.set(i, bad);
        Tensor indices(GA_F64, 20);
        for (int64_t i = 0; i < 20; ++i) {
          const int64_t row = 2 * i;
          memcpy(indices.at(i), &row, sizeof row);
        }
        m.note("begin", ga_micro_begin(m, 0, 1, nullptr));
        m.note("part", ga_accumulate_part(m, t.ids[0], m.put(g)));
        m.note("rows", ga_accumulate_rows(m, table, m.put(indices), GA_I64, 20, m.put(rows)));
        m.note("end", ga_micro_end(m));
        m.step();
      }
    });
  }
}

// ---- Rows ----------------------------------------------------------------------------------------

struct Rows {
  Tensor values;
  std::vector<int64_t> indices;
};

// Random rows of a parameter, some of them more than once.
Rows some_rows(int32_t dtype, int64_t rows, int64_t columns, int64_t count, uint64_t seed) {
  Random random(seed);
  Rows r = {numbers(dtype, count * columns, seed), {}};
  for (int64_t i = 0; i < count; ++i) r.indices.push_back(random.below(rows));
  return r;
}

// The indices as a tensor of numbers of the same size, so that they can be copied like one.
Tensor as_tensor(const std::vector<int64_t>& indices, int32_t index_dtype) {
  Tensor t(index_dtype == GA_I32 ? GA_F32 : GA_F64, static_cast<int64_t>(indices.size()));
  for (size_t i = 0; i < indices.size(); ++i) {
    const auto narrow = static_cast<int32_t>(indices[i]);
    if (index_dtype == GA_I32)
      memcpy(t.at(static_cast<int64_t>(i)), &narrow, 4);
    else
      memcpy(t.at(static_cast<int64_t>(i)), &indices[i], 8);
  }
  return t;
}

// More contributions than the blocks of a launch take at a time.
TEST_F(Bits, OfManyContributions) {
  expect_same([](Machine& m) {
    ga_param_options o = options();
    o.rows = GA_ROWS_LAZY;
    const ga_param table = m.add(m.group(plain_sgd()), numbers(GA_F32, 5000, 7), {5000, 1}, o);
    constexpr int64_t kCount = 110000;
    const Rows r = some_rows(GA_F32, 5000, 1, kCount, 1);
    m.note("begin", ga_micro_begin(m, 0, 1, nullptr));
    m.note("rows", ga_accumulate_rows(m, table, m.put(as_tensor(r.indices, GA_I32)), GA_I32, kCount,
                                      m.put(r.values)));
    m.note("end", ga_micro_end(m));
    m.step();
  });
}

class RowBits : public OnDevice<testing::TestWithParam<int32_t>> {};

TEST_P(RowBits, OfManyWindows) {
  for (const OptimizerRow& row : optimizer_rows()) {
    const int32_t kind = row.kind;
    if (!row.lazy(optimizer(kind))) continue;
    for (const int32_t nonfinite : {GA_NONFINITE_SKIP_STEP, GA_NONFINITE_DROP_MICRO}) {
      for (const int32_t scope : {GA_CLIP_NONE, GA_CLIP_GLOBAL, GA_CLIP_AGC}) {
        SCOPED_TRACE(testing::Message() << kind << " " << nonfinite << " " << scope);
        ga_config c = config();
        c.nonfinite = nonfinite;
        const bool averaged = kind == GA_OPTIMIZER_ADAM;
        const bool wide = kind == GA_OPTIMIZER_ADAMW;  // rows longer than a chunk
        expect_same(c, [&](Machine& m) {
          // The norm of rows may be summed in another order, which changes the clipped gradients.
          if (scope == GA_CLIP_GLOBAL) m.params_tolerance = 1e-5;
          ga_clip clipped = clip(scope, scope == GA_CLIP_GLOBAL ? 0.2 : 0);
          EXPECT_OK(ga_context_set_clip(m, &clipped));
          ga_ema e;
          EXPECT_OK(ga_ema_init(&e, sizeof e));
          if (averaged) {
            EXPECT_OK(ga_context_set_ema(m, &e));
          }
          ga_optimizer o = optimizer(kind);
          if (kind == GA_OPTIMIZER_SGD) o.momentum = 0.9;
          const ga_group g = m.group(o);
          struct Table {
            int32_t dtype, gradient;
            int64_t rows, columns;
            int32_t index_dtype;
          };
          std::vector<Table> tables = {
              {GA_F32, GA_F32, 50, 17, GA_I32},   {GA_F32, GA_BF16, 1000, 3, GA_I64},
              {GA_BF16, GA_BF16, 70, 33, GA_I32}, {GA_F64, GA_F32, 40, 8, GA_I64},
              {GA_F32, GA_F32, 300, 257, GA_I32}, {GA_F32, GA_F32, 77, 1, GA_I64},
              {GA_F16, GA_F16, 9, 1200, GA_I64},  {GA_F32, GA_F32, 3, 66000, GA_I32}};
          std::vector<ga_param> ids;
          if (!wide) tables.pop_back();
          for (const Table& t : tables) {
            ga_param_options p = options(t.gradient);
            p.rows = GetParam();
            ids.push_back(
                m.add(g, numbers(t.dtype, t.rows * t.columns, 7), {t.rows, t.columns}, p));
          }
          const ga_param dense = m.add(g, numbers(GA_F32, 500, 8));
          for (uint64_t w = 0; w < 4; ++w) {
            for (uint64_t k = 0; k < 3; ++k) {
              m.note("begin", ga_micro_begin(m, static_cast<int64_t>(k), 1.5, nullptr));
              for (size_t i = 0; i < tables.size(); ++i) {
                const Table& t = tables[i];
                if ((i + w) % 4 == 3) continue;
                const int64_t count = k == 2 ? 0 : i == 4 ? 70 : i == 7 ? 2 : 23;
                Rows r = some_rows(t.gradient, t.rows, t.columns, count, 100 * w + 10 * k + i);
                if (nonfinite == GA_NONFINITE_DROP_MICRO && w == 1 && k == 1 && i == 1)
                  r.values.set(0, NAN);
                const void* const indices = m.put(as_tensor(r.indices, t.index_dtype));
                m.note("rows", ga_accumulate_rows(m, ids[i], indices, t.index_dtype, count,
                                                  m.put(r.values)));
                // A whole gradient after rows, or before.
                if (w == 2 && k == 1 && i % 2 == 0)
                  m.note("part", ga_accumulate_part(
                                     m, ids[i], m.put(numbers(t.gradient, t.rows * t.columns, i))));
              }
              m.note("part", ga_accumulate_part(m, dense, m.put(numbers(GA_F32, 500, w + k))));
              m.note("end", ga_micro_end(m));
            }
            m.step(1e-12);
          }
          if (averaged && scope == GA_CLIP_NONE) m.note_averages();
        });
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(All, RowBits, testing::Values(GA_ROWS_DENSE, GA_ROWS_LAZY),
                         [](const testing::TestParamInfo<int32_t>& info) {
                           return info.param == GA_ROWS_DENSE ? "Dense" : "Lazy";
                         });

}  // namespace
}  // namespace ga::test
