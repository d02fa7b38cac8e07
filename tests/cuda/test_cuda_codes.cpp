// SPDX-License-Identifier: Apache-2.0
//
// State in 8 bits has the bits of the CPU on a device: codes, scales, and the parameters that follow from them.
#include "device.hpp"

namespace ga::test {
namespace {

using Shape = std::vector<int64_t>;

int64_t elements(const Shape& shape) {
  int64_t n = 1;
  for (const int64_t extent : shape) n *= extent;
  return n;
}

// Records all state of a parameter, with params_tolerance where it follows the parameter. Codes are recorded as
// numbers.
void note_state(Machine& m, ga_param id) {
  for (const ga_state_info& info : states_of(m, id)) {
    const std::string what = info.name + (" of " + std::to_string(id));
    m.note(what + ", dtype", int64_t{info.dtype});
    if (info.dtype == GA_I64) {
      int64_t number = 0;
      ASSERT_EQ(info.count, 1);
      ASSERT_OK(ga_state_get(m, id, info.name, &number, info.dtype, 1));
      m.note(what, number);
    } else if (info.dtype == GA_U8) {
      std::vector<uint8_t> codes(static_cast<size_t>(info.count));
      ASSERT_OK(ga_state_get(m, id, info.name, codes.data(), info.dtype, info.count));
      Tensor t(GA_F32, info.count);
      for (int64_t i = 0; i < info.count; ++i) t.set(i, codes[static_cast<size_t>(i)]);
      m.note(what, t);
    } else {
      Tensor t(info.dtype, info.count);
      ASSERT_OK(ga_state_get(m, id, info.name, t.data(), info.dtype, info.count));
      const bool follows = what.rfind("master", 0) == 0 || what.rfind("ema", 0) == 0;
      m.note(what, t, follows ? m.params_tolerance : 0);
    }
  }
}

// Whether some state of an optimizer may be in 8 bits.
bool has_codes(ga_optimizer& o) {
  o.state_dtype = GA_STATE_8BIT;
  ga_context* ctx = nullptr;
  EXPECT_OK(ga_context_create(nullptr, &ctx));
  const ga_status status = ga_group_add(ctx, &o, nullptr);
  ga_context_destroy(ctx);
  return status == GA_OK;
}

std::vector<NamedOptimizer> coded_optimizers() {
  std::vector<NamedOptimizer> list = good_optimizers();
  for (const NamedOptimizer& o : matrix_optimizers()) list.push_back(o);
  list.erase(std::remove_if(list.begin(), list.end(),
                            [](NamedOptimizer& o) { return !has_codes(o.optimizer); }),
             list.end());
  return list;
}

struct Kind {
  int32_t dtype;
  ga_param_options options;
};

std::vector<Kind> kinds() {
  const int32_t m = GA_MASTER_F32, none = GA_MASTER_NONE;
  const int32_t near = GA_ROUND_NEAREST, chance = GA_ROUND_STOCHASTIC;
  ga_param_options follows = with(m, near);
  follows.follow_data = 1;
  return {
      {GA_F32, options()},         {GA_F32, options(GA_BF16)},    {GA_F32, options(0, GA_BF16)},
      {GA_BF16, with(m, near)},    {GA_BF16, with(m, chance)},    {GA_BF16, follows},
      {GA_BF16, with(none, near)}, {GA_BF16, with(none, chance)}, {GA_F16, with(m, near, GA_F32)},
      {GA_F16, with(none, chance)}};
}

// Parameters of all kinds whose state is in 8 bits, but for the first.
struct Coded {
  std::vector<Kind> kind;
  std::vector<Shape> shapes;
  std::vector<ga_param> ids;

  void add(Machine& m, const ga_optimizer& o, bool matrices) {
    const std::vector<Shape> all =
        matrices ? std::vector<Shape>{{16, 256}, {17, 300}, {20, 256}, {300, 234}}
                 : std::vector<Shape>{{4096}, {4097}, {5000}, {20 * 256}, {70000}};
    const ga_group group = m.group(o);
    for (const Kind& k : kinds()) {
      for (const Shape& shape : all) {
        if (elements(shape) < 4097 && !ids.empty()) continue;
        const ga_param id = m.add(group, numbers(k.dtype, elements(shape), 7 + ids.size()), shape,
                                  k.options, static_cast<int64_t>(ids.size() % 4));
        if (id < 0) continue;
        kind.push_back(k);
        shapes.push_back(shape);
        ids.push_back(id);
      }
    }
    ASSERT_FALSE(ids.empty());
  }

  std::vector<const void*> gradients(Machine& m, uint64_t round) const {
    std::vector<const void*> list;
    for (size_t i = 0; i < ids.size(); ++i) {
      const int32_t g = kind[i].options.gradient_dtype;
      list.push_back(
          m.put(numbers(g ? g : kind[i].dtype, elements(shapes[i]), 1000 * (round + 1) + i),
                static_cast<int64_t>((i + round) % 3)));
    }
    return list;
  }

  // Three windows. Some parameters get no gradient in the second, and the program writes some after it.
  void train(Machine& m, uint64_t micros) const {
    for (uint64_t w = 0; w < 3; ++w) {
      for (uint64_t k = 0; k < micros; ++k) {
        auto list = gradients(m, micros * w + k);
        for (size_t i = 0; w == 1 && i < list.size(); i += 7) list[i] = nullptr;
        m.accumulate(list, k == 0 ? 3 : 1.5);
      }
      m.step();
      for (size_t i = 0; w == 1 && i < ids.size(); ++i) {
        if (!kind[i].options.follow_data) continue;
        Tensor values = m.value(ids[i]);
        for (int64_t j = static_cast<int64_t>(i); j < values.count(); j += 100) values.set(j, 0.5);
        m.set(ids[i], values);
      }
    }
    for (const ga_param id : ids) note_state(m, id);
  }
};

ga_config seeded() {
  ga_config c = config();
  c.seed = 0x123456789abcdef;
  return c;
}

bool is_matrices_only(const ga_optimizer& o) { return o.kind == GA_OPTIMIZER_MUON; }

// The products of matrices that MUON updates parameters with are rounded in other orders there.
void set_tolerance(Machine& m, const ga_optimizer& o) {
  if (is_matrices_only(o)) m.params_tolerance = 1e9;
}

class OptimizerCodes : public OnDevice<testing::TestWithParam<size_t>> {
 protected:
  ga_optimizer optimizer() const { return coded_optimizers()[GetParam()].optimizer; }
};

TEST_P(OptimizerCodes, OfEveryDtype) {
  const ga_optimizer o = optimizer();
  expect_same(seeded(), [&](Machine& m) {
    set_tolerance(m, o);
    Coded c;
    c.add(m, o, is_matrices_only(o));
    c.train(m, 2);
  });
}

TEST_P(OptimizerCodes, WithClipsAndAverages) {
  const ga_optimizer o = optimizer();
  ga_config config = seeded();
  config.gradient_life = GA_GRADIENTS_LIVE;
  for (const int32_t dtype : {0, int32_t{GA_BF16}}) {
    for (const int32_t scope : {GA_CLIP_GLOBAL, GA_CLIP_AGC}) {
      // What AGC clips depends on the parameters.
      if (scope == GA_CLIP_AGC && (dtype != 0 || is_matrices_only(o))) continue;
      SCOPED_TRACE(testing::Message() << dtype << " " << scope);
      expect_same(config, [&](Machine& m) {
        set_tolerance(m, o);
        const ga_clip by = clip(scope, scope == GA_CLIP_GLOBAL ? 0.7 : 0);
        EXPECT_OK(ga_context_set_clip(m, &by));
        ga_ema e;
        EXPECT_OK(ga_ema_init(&e, sizeof e));
        e.dtype = dtype;
        e.decay = 0.9;
        EXPECT_OK(ga_context_set_ema(m, &e));
        Coded c;
        c.add(m, o, is_matrices_only(o));
        c.train(m, 1);
        if (!is_matrices_only(o)) m.note_averages();
      });
    }
  }
}

INSTANTIATE_TEST_SUITE_P(All, OptimizerCodes, testing::Range<size_t>(0, coded_optimizers().size()),
                         [](const testing::TestParamInfo<size_t>& info) {
                           return coded_optimizers()[info.param].name;
                         });

class StateCodes : public OnDevice<> {};

// What is in 8 bits, and what is not.
TEST_F(StateCodes, AreThere) {
  for (const int64_t count : {4096, 4097}) {
    for (const int32_t device : {GA_DEVICE_CPU, GA_DEVICE_CUDA}) {
      Machine m(device, seeded());
      ga_optimizer o = optimizer(GA_OPTIMIZER_ADAMW);
      o.state_dtype = GA_STATE_8BIT;
      const ga_param id = m.add(m.group(o), numbers(GA_F32, count, 3));
      Tensor g = numbers(GA_F32, count, 1);
      g.set(count - 1, 1);
      m.accumulate({m.put(g)});
      m.step();
      std::vector<uint8_t> codes(static_cast<size_t>(count));
      std::vector<float> scales(17);
      const bool coded = count > 4096;
      for (const std::string name : {"exp_avg", "exp_avg_sq"}) {
        const char* const state = name.c_str();
        EXPECT_EQ(ga_state_get(m, id, state, codes.data(), GA_U8, count) == GA_OK, coded);
        const std::string scale = name + "_scale";
        EXPECT_EQ(ga_state_get(m, id, scale.c_str(), scales.data(), GA_F32, 17) == GA_OK, coded);
        if (!coded) continue;
        EXPECT_GT(scales[16], 0);
        EXPECT_EQ(codes[4096] & 127, 127);  // alone in its block: the largest there
      }
    }
  }
}

// A small program of many phases: averages and what follows the program.
TEST_F(StateCodes, OfAverages) {
  expect_same(seeded(), [](Machine& m) {
    ga_ema e;
    EXPECT_OK(ga_ema_init(&e, sizeof e));
    e.decay = 0.9;
    EXPECT_OK(ga_context_set_ema(m, &e));
    ga_optimizer o = optimizer(GA_OPTIMIZER_ADAMW);
    o.state_dtype = GA_STATE_8BIT;
    ga_param_options follows = with(GA_MASTER_F32, GA_ROUND_NEAREST);
    follows.follow_data = 1;
    const ga_group group = m.group(o);
    const ga_param a = m.add(group, numbers(GA_F32, 5000, 3), {5000}, options(), 0);
    const ga_param b = m.add(group, numbers(GA_BF16, 5000, 4), {5000}, follows, 0);
    for (uint64_t w = 0; w < 2; ++w) {
      m.accumulate({m.put(numbers(GA_F32, 5000, w), 0), m.put(numbers(GA_BF16, 5000, 9 + w), 0)});
      m.step();
      m.set(b, numbers(GA_BF16, 5000, 20 + w));
    }
    for (const ga_param id : {a, b}) note_state(m, id);
    m.note_averages();
  });
}

// The program reads codes and scales, and writes them.
TEST_F(StateCodes, ThatAreSet) {
  expect_same(seeded(), [](Machine& m) {
    constexpr int64_t kCount = 5000, kBlocks = 20;
    ga_optimizer o = optimizer(GA_OPTIMIZER_ADAMW);
    o.state_dtype = GA_STATE_8BIT;
    const ga_param id = m.add(m.group(o), numbers(GA_F32, kCount, 3));
    std::vector<uint8_t> codes(kCount);
    std::vector<float> scales(kBlocks), floats(kCount);
    for (uint64_t w = 0; w < 3; ++w) {
      m.accumulate({m.put(numbers(GA_F32, kCount, w))});
      m.step();
      for (const std::string name : {"exp_avg", "exp_avg_sq"}) {
        const std::string scale = name + "_scale";
        if (w == 0) {
          ASSERT_OK(ga_state_get(m, id, name.c_str(), codes.data(), GA_U8, kCount));
          ASSERT_OK(ga_state_get(m, id, scale.c_str(), scales.data(), GA_F32, kBlocks));
          std::reverse(codes.begin(), codes.end());
          std::reverse(scales.begin(), scales.end());
          ASSERT_OK(ga_state_set(m, id, name.c_str(), codes.data(), GA_U8, kCount));
          ASSERT_OK(ga_state_set(m, id, scale.c_str(), scales.data(), GA_F32, kBlocks));
        } else {
          const ga_status got = ga_state_get(m, id, name.c_str(), floats.data(), GA_F32, kCount);
          m.note("as floats", got);
          std::reverse(floats.begin(), floats.end());
          m.note("from floats", ga_state_set(m, id, name.c_str(), floats.data(), GA_F32, kCount));
        }
      }
      note_state(m, id);
    }
  });
}

// The pieces of an update: whole chunks and parts of the last ones, of arrays that are aligned and others.
TEST_F(StateCodes, OfManyChunks) {
  for (const int32_t kind : {GA_OPTIMIZER_ADAMW, GA_OPTIMIZER_LAMB}) {
    for (const int64_t count : {65536 + 16389, 5 * 65536, 13 * 65536 + 20003}) {
      for (const int64_t shift : {0, 1}) {
        expect_same(seeded(), [&](Machine& m) {
          ga_optimizer o = optimizer(kind);
          o.state_dtype = GA_STATE_8BIT;
          const ga_group group = m.group(o);
          const ga_param a = m.add(group, numbers(GA_F32, count, 3), {count}, options(), shift);
          const ga_param b = m.add(group, numbers(GA_BF16, count, 4), {count},
                                   with(GA_MASTER_NONE, GA_ROUND_STOCHASTIC), shift);
          for (uint64_t w = 0; w < 2; ++w) {
            m.accumulate({m.put(numbers(GA_F32, count, w), shift),
                          m.put(numbers(GA_BF16, count, 9), shift)});
            m.step();
          }
          for (const ga_param id : {a, b}) note_state(m, id);
        });
      }
    }
  }
}

// Blocks whose largest magnitude is 0, subnormal, near the largest float, infinite or NaN.
TEST_F(StateCodes, OfExtremeNumbers) {
  for (const int32_t kind :
       {GA_OPTIMIZER_ADAMW, GA_OPTIMIZER_ADAGRAD, GA_OPTIMIZER_LION, GA_OPTIMIZER_LAMB}) {
    ga_config config = seeded();
    config.nonfinite = GA_NONFINITE_IGNORE;
    expect_same(config, [&](Machine& m) {
      ga_optimizer o = optimizer(kind);
      o.state_dtype = GA_STATE_8BIT;
      if (kind == GA_OPTIMIZER_LAMB) o.max_grad_norm = 0;
      constexpr int64_t kCount = 20 * 256 + 100;
      const ga_param id = m.add(m.group(o), numbers(GA_F32, kCount, 3));
      const double factors[] = {0,       0x1p-149, 0x1p-100, 0x1p-70, 0x1p-60,
                                0x1p-30, 1,        0x1p30,   0x1p62,  0x1p100};
      for (uint64_t w = 0; w < 3; ++w) {
        Tensor g = numbers(GA_F32, kCount, 50 + w);
        for (int64_t i = 0; i < kCount; ++i)
          g.set(i, std::clamp(g.get(i), -8.0, 8.0) * factors[i / 256 % 10]);
        g.set(12 * 256 + 7, w == 1 ? INFINITY : 1);
        g.set(13 * 256 + 250, w == 1 ? -INFINITY : 1);
        g.set(14 * 256, w == 1 ? NAN : 1);
        m.accumulate({m.put(g)});
        m.step(1e-6);
        note_state(m, id);
      }
    });
  }
}

// Of the rows of a table, some get contributions: lazily, blocks of the others stay as they are.
TEST_F(StateCodes, OfRows) {
  for (const OptimizerRow& row : optimizer_rows()) {
    ga_optimizer o = optimizer(row.kind);
    if (row.kind == GA_OPTIMIZER_SGD) o.momentum = 0.9;
    if (!row.lazy(o) || !has_codes(o)) continue;
    for (const int32_t rows : {GA_ROWS_DENSE, GA_ROWS_LAZY}) {
      for (const bool averaged : {false, true}) {
        SCOPED_TRACE(testing::Message() << row.name << " " << rows << " " << averaged);
        expect_same(seeded(), [&](Machine& m) {
          if (averaged) {
            ga_ema e;
            EXPECT_OK(ga_ema_init(&e, sizeof e));
            EXPECT_OK(ga_context_set_ema(m, &e));
          }
          const ga_group group = m.group(o);
          std::vector<Kind> tables = {{GA_F32, options()},
                                      {GA_F32, options(GA_BF16)},
                                      {GA_BF16, with(GA_MASTER_F32, GA_ROUND_NEAREST)},
                                      {GA_BF16, with(GA_MASTER_NONE, GA_ROUND_STOCHASTIC)}};
          const std::vector<Shape> shapes = {{50, 256}, {90, 96}, {3, 66048}, {400, 16}, {34, 384}};
          std::vector<ga_param> ids;
          for (size_t i = 0; i < 10; ++i) {
            Kind& k = tables[i % 4];
            const Shape& shape = shapes[i % 5];
            k.options.rows = rows;
            k.options.follow_data = i == 2;
            ids.push_back(m.add(group, numbers(k.dtype, elements(shape), i), shape, k.options));
            ASSERT_GE(ids.back(), 0) << ga_last_error();
          }
          for (uint64_t w = 0; w < 3; ++w) {
            m.note("begin", ga_micro_begin(m, 0, 1.5, nullptr));
            for (size_t i = 0; i < ids.size(); ++i) {
              const Shape& shape = shapes[i % 5];
              const Kind& k = tables[i % 4];
              const int32_t g = k.options.gradient_dtype ? k.options.gradient_dtype : k.dtype;
              if ((i + w) % 4 == 3) {
                const Tensor all = numbers(g, elements(shape), 100 * w + i);
                if (w == 1) m.note("all", ga_accumulate_part(m, ids[i], m.put(all)));
                continue;
              }
              const int64_t count = shape[0] < 10 ? 2 : 23;
              Tensor indices(GA_F32, count);  // of the size of int32_t
              for (int64_t j = 0; j < count; ++j) {
                const auto index =
                    static_cast<int32_t>((j * j + 5 * static_cast<int64_t>(w)) % shape[0]);
                memcpy(indices.at(j), &index, sizeof index);
              }
              const Tensor values = numbers(g, count * shape[1], 100 * w + i);
              m.note("rows",
                     ga_accumulate_rows(m, ids[i], m.put(indices), GA_I32, count, m.put(values)));
            }
            m.note("end", ga_micro_end(m));
            m.step(1e-12);
            Tensor written = m.value(ids[2]);
            for (int64_t j = 0; j < written.count(); j += 17) written.set(j, 0.5);
            m.set(ids[2], written);
          }
          for (const ga_param id : ids) note_state(m, id);
          if (averaged) m.note_averages();
        });
      }
    }
  }
}

// Of parts of parameters, whose rows are blocks or several: updates and, of LAMB, first passes.
TEST_F(StateCodes, OfParts) {
  for (const NamedOptimizer& named : coded_optimizers()) {
    const ga_optimizer& o = named.optimizer;
    if (o.kind != GA_OPTIMIZER_ADAMW && o.kind != GA_OPTIMIZER_LAMB) continue;
    SCOPED_TRACE(named.name);
    expect_same(seeded(), [&](Machine& m) {
      const ga_group group = m.group(o);
      const std::vector<Shape> shapes = {{700, 16}, {13000, 96}, {1100, 192}, {40, 7, 64}};
      std::vector<ga_param> ids;
      for (const Shape& shape : shapes) {
        ids.push_back(m.add(group, numbers(GA_F32, elements(shape), ids.size()), shape));
        const Shape first(shape.size());
        ASSERT_OK(ga_param_set_part(m, ids.back(), shape.data(), first.data(), 1));
      }
      for (uint64_t w = 0; w < 3; ++w) {
        std::vector<const void*> list;
        for (size_t i = 0; i < ids.size(); ++i)
          list.push_back(m.put(numbers(GA_F32, elements(shapes[i]), 100 * (w + 1) + i)));
        m.accumulate(list, 1);
        m.step(1e-12);
      }
      for (const ga_param id : ids) note_state(m, id);
    });
  }
}

}  // namespace
}  // namespace ga::test
