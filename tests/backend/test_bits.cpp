// SPDX-License-Identifier: Apache-2.0
//
// Hashes of whole runs, compared with the table bits.txt: the bits are the same on every processor,
// with every compiler, and from one version to the next.
//
// After a change of the library that is meant to change bits, GA_TEST_WRITE_BITS=<file> makes the
// tests write the table instead of comparing with it.
#include <algorithm>
#include <cinttypes>
#include <fstream>
#include <map>
#include <sstream>

#include "batchnorm.hpp"
#include "core/elementary.hpp"
#include "small_run.hpp"

namespace ga::test {
namespace {

// ---- Hashes -------------------------------------------------------------------------------------

// FNV-1a (Fowler, Noll and Vo 1991), 64 bits.
class Hash {
 public:
  void add(const void* data, size_t size) {
    for (size_t i = 0; i < size; ++i) {
      state_ = (state_ ^ static_cast<const uint8_t*>(data)[i]) * 0x100000001b3;
    }
  }
  // The bits of a NaN depend on the processor, so no run here may end in one.
  void add(double x) {
    EXPECT_FALSE(std::isnan(x));
    add(&x, sizeof x);
  }
  void add(const std::vector<double>& list) {
    for (const double x : list) add(x);
  }
  void add(const Tensor& t) {
    for (int64_t i = 0; i < t.count(); ++i) EXPECT_FALSE(std::isnan(t.get(i)));
    add(t.data(), static_cast<size_t>(t.count()) * t.size());
  }
  std::string text() const {
    char text[17];
    snprintf(text, sizeof text, "%016" PRIx64, state_);
    return text;
  }

 private:
  uint64_t state_ = 0xcbf29ce484222325;
};

const std::map<std::string, std::string>& table() {
  static const std::map<std::string, std::string> hashes = [] {
    std::map<std::string, std::string> result;
    std::ifstream file(GA_TEST_BITS);
    for (std::string name, hash; file >> name >> hash;) result[name] = hash;
    return result;
  }();
  return hashes;
}

void expect(const std::string& name, const Hash& hash) {
  if (const char* path = getenv("GA_TEST_WRITE_BITS")) {
    std::ofstream(path, std::ios::app) << name << ' ' << hash.text() << '\n';
    return;
  }
  const auto found = table().find(name);
  ASSERT_NE(found, table().end()) << name << " is not in " << GA_TEST_BITS;
  EXPECT_EQ(hash.text(), found->second) << name;
}

// Runs body(hash) on every instruction set level of the processor.
template <class Body>
void expect_on_all_levels(const std::string& name, const Body& body) {
  for (const char* level : kIsaLevels) {
    const Isa isa(level);
    if (!Isa::available()) continue;
    SCOPED_TRACE(level);
    Hash hash;
    body(hash);
    expect(name, hash);
    if (getenv("GA_TEST_WRITE_BITS")) return;
  }
}

// ---- Optimizers ---------------------------------------------------------------------------------

struct Mix {
  const char* name;
  int32_t dtype = GA_F32;  // of parameters and gradients
  int32_t accumulator = 0;
  int32_t accumulation = GA_ACCUMULATE_PLAIN;
  int32_t master = GA_MASTER_F32;
  int32_t rounding = GA_ROUND_NEAREST;
  int32_t state = 0;
  int32_t averages = 0;
  int32_t life = GA_GRADIENTS_CONSUMED;
  int32_t scope = GA_CLIP_NONE;
  int32_t units = GA_AGC_TORCH;
  double max_value = INFINITY;
};

// Together, the mixes cover every dtype, way to accumulate, way to round and scope of clipping.
std::vector<Mix> mixes() {
  std::vector<Mix> list(8);
  list[0].name = "f32";
  list[1].name = "f32-live-clipped-by-norm";
  list[1].life = GA_GRADIENTS_LIVE;
  list[1].scope = GA_CLIP_GLOBAL;
  list[1].averages = GA_BF16;
  list[2].name = "f32-clipped-by-units";
  list[2].scope = GA_CLIP_AGC;
  list[2].state = GA_BF16;
  list[2].accumulator = GA_BF16;
  list[2].accumulation = GA_ACCUMULATE_STOCHASTIC;
  list[3].name = "f64-clipped-by-tensor";
  list[3].dtype = GA_F64;
  list[3].scope = GA_CLIP_PER_TENSOR;
  list[3].max_value = 0.75;
  list[4].name = "f16";
  list[4].dtype = list[4].accumulator = GA_F16;
  list[4].accumulation = GA_ACCUMULATE_COMPENSATED;
  list[4].scope = GA_CLIP_GLOBAL;
  list[5].name = "bf16";
  list[5].dtype = list[5].accumulator = GA_BF16;
  list[5].accumulation = GA_ACCUMULATE_RUNNING_MEAN;
  list[5].scope = GA_CLIP_PER_TENSOR;
  list[6].name = "bf16-stochastic";
  list[6].dtype = list[6].accumulator = list[6].state = GA_BF16;
  list[6].accumulation = GA_ACCUMULATE_STOCHASTIC;
  list[6].master = GA_MASTER_NONE;
  list[6].rounding = GA_ROUND_STOCHASTIC;
  list[6].max_value = 0.5;
  list[7].name = "f32-clipped-by-columns";
  list[7].scope = GA_CLIP_AGC;
  list[7].units = GA_AGC_TF;
  return list;
}

const std::vector<ref::Shape>& shapes() {
  static const std::vector<ref::Shape> list = {{0}, {1}, {17}, {33, 31}, {1025}, {2, 3, 5, 7}};
  return list;
}

void run(ga_optimizer o, const Mix& mix, Hash& hash) {
  ga_config c = config();
  c.gradient_life = mix.life;
  c.accumulation = mix.accumulation;
  c.seed = 5;
  Context ctx(c);
  if (row_of(o).bf16_state) o.state_dtype = mix.state;
  const ga_group group = ctx.group(o);
  ga_schedule cosine = schedule(GA_SCHEDULE_COSINE);
  cosine.warmup_steps = 2;
  cosine.total_steps = 7;
  EXPECT_OK(ga_group_set_schedule(ctx, group, &cosine));
  ga_clip by = clip(mix.scope, 0.25, GA_FLAVOR_TORCH, mix.max_value);
  by.agc_factor = 0.5;
  by.agc_units = mix.units;
  EXPECT_OK(ga_context_set_clip(ctx, &by));
  ga_ema ema;
  EXPECT_OK(ga_ema_init(&ema, sizeof ema));
  ema.decay = 0.75;
  ema.dtype = mix.averages;
  EXPECT_OK(ga_context_set_ema(ctx, &ema));
  const ga_loss_scaler scaler = [] {
    ga_loss_scaler s;
    EXPECT_OK(ga_loss_scaler_init(&s, sizeof s));
    s.initial_scale = 8;
    s.growth_interval = 2;
    return s;
  }();
  EXPECT_OK(ga_context_set_loss_scaler(ctx, &scaler));

  std::vector<Tensor> parameters;
  parameters.reserve(shapes().size());
  for (const ref::Shape& shape : shapes()) {
    parameters.push_back(random_tensor(mix.dtype, ref::count_of(shape), parameters.size()));
    ga_param_options p = options(0, mix.accumulator);
    if (parameters.back().size() == 2) p.master = mix.master, p.rounding = mix.rounding;
    add(ctx, group, parameters.back(), shape, p);
  }
  uint64_t seed = 100;
  for (int t = 0; t < 5; ++t) {
    std::vector<Tensor> gradients;
    gradients.reserve(3 * parameters.size());
    for (int k = 0; k < 3; ++k) {
      std::vector<const Tensor*> list;
      for (const Tensor& p : parameters) {
        gradients.push_back(random_tensor(mix.dtype, p.count(), ++seed));
        list.push_back(&gradients.back());
      }
      accumulate(ctx, list, 1 + 0.7 * k);
    }
    const ga_step_result r = step(ctx);
    EXPECT_EQ(r.outcome, GA_STEP_APPLIED);
    hash.add(r.norm);
    hash.add(r.clip_factor);
    hash.add(r.lr);
  }
  for (size_t i = 0; i < parameters.size(); ++i) {
    hash.add(parameters[i]);
    Tensor average(mix.dtype == GA_F64 ? GA_F64 : GA_F32, parameters[i].count());
    EXPECT_OK(ga_ema_copy_to(ctx, static_cast<ga_param>(i), average.data(), average.dtype()));
    hash.add(average);
  }
}

class OptimizerBits : public testing::TestWithParam<size_t> {};
INSTANTIATE_TEST_SUITE_P(Bits, OptimizerBits, testing::Range<size_t>(0, good_optimizers().size()),
                         [](const auto& info) { return good_optimizers()[info.param].name; });

TEST_P(OptimizerBits, MatchTheTable) {
  const NamedOptimizer named = good_optimizers()[GetParam()];
  for (const Mix& mix : mixes()) {
    expect_on_all_levels(named.name + '/' + mix.name,
                         [&](Hash& hash) { run(named.optimizer, mix, hash); });
  }
}

// Norms, and the kernels of AdamW and LAMB, over several chunks on three threads.
TEST(Bits, OfManyChunks) {
  expect_on_all_levels("many-chunks", [](Hash& hash) {
    ga_config c = config();
    c.num_threads = 3;
    Context ctx(c);
    const ga_clip by = clip(GA_CLIP_GLOBAL, 10);
    EXPECT_OK(ga_context_set_clip(ctx, &by));
    Tensor p = random_tensor(GA_F32, 200003, 1), q = random_tensor(GA_BF16, 70001, 2);
    add(ctx, ctx.group(optimizer(GA_OPTIMIZER_ADAMW)), p);
    add(ctx, ctx.group(optimizer(GA_OPTIMIZER_LAMB)), q);
    for (uint64_t t = 0; t < 4; ++t) {
      const Tensor g = random_tensor(GA_F32, p.count(), 10 + t);
      const Tensor h = random_tensor(GA_BF16, q.count(), 20 + t);
      accumulate(ctx, {&g, &h}, 3);
      if (t % 2) accumulate(ctx, {&g, &h}, 0.7);
      hash.add(step(ctx).norm);
    }
    hash.add(p);
    hash.add(q);
  });
}

// State in 8 bits, with a short last block, gradients of many magnitudes, and blocks of zeros.
TEST(Bits, OfCodes) {
  struct Way {
    const char* name;
    int32_t kind;
    void (*set)(ga_optimizer&);
  };
  const Way ways[] = {
      {"adamw", GA_OPTIMIZER_ADAMW, [](ga_optimizer&) {}},
      {"amsgrad", GA_OPTIMIZER_ADAM, [](ga_optimizer& o) { o.amsgrad = 1; }},
      {"sgd", GA_OPTIMIZER_SGD, [](ga_optimizer& o) { o.momentum = 0.9, o.nesterov = 1; }},
      {"rmsprop", GA_OPTIMIZER_RMSPROP, [](ga_optimizer& o) { o.momentum = 0.9; }},
      {"centered", GA_OPTIMIZER_RMSPROP, [](ga_optimizer& o) { o.momentum = 0.9, o.centered = 1; }},
      {"ademamix", GA_OPTIMIZER_ADEMAMIX, [](ga_optimizer&) {}},
      {"lamb", GA_OPTIMIZER_LAMB, [](ga_optimizer&) {}},
  };
  for (const Way& way : ways)
    for (const int32_t dtype : {GA_F32, GA_BF16})
      expect_on_all_levels(
          std::string("codes-") + way.name + (dtype == GA_BF16 ? "-bf16" : ""), [&](Hash& hash) {
            ga_optimizer o = optimizer(way.kind);
            way.set(o);
            o.state_dtype = GA_STATE_8BIT;
            Context ctx;
            const ga_group group = ctx.group(o);
            Tensor p = random_tensor(dtype, 70001, 1), q = random_tensor(dtype, 4097, 2);
            ga_param_options masters = options();
            masters.master = GA_MASTER_NONE;
            const ga_param id = add(ctx, group, p);
            add(ctx, group, q, {}, masters);
            for (uint64_t t = 0; t < 4; ++t) {
              Tensor g = random_tensor(dtype, p.count(), 10 + t);
              for (int64_t i = 0; i < g.count(); ++i) {
                const int64_t block = i / 256 % 8;
                g.set(i, block == 7 ? 0 : std::ldexp(g.get(i), static_cast<int>(-i % 5 * block)));
              }
              const Tensor h = random_tensor(dtype, q.count(), 20 + t);
              accumulate(ctx, {&g, &h});
              step(ctx);
            }
            hash.add(p);
            hash.add(q);
            for (const ga_state_info& info : states_of(ctx, id)) {
              if (info.dtype != GA_U8 && info.dtype != GA_F32) continue;
              Tensor state(GA_F32, info.count);
              EXPECT_OK(ga_state_get(ctx, id, info.name, state.data(), GA_F32, info.count));
              hash.add(state);
            }
          });
}

// Squares that underflow or overflow in float32, and zeros, so that tiles are summed in double.
TEST(Bits, OfTinyAndHugeGradients) {
  for (const double scale : {0x1p-45, 0x1p-50, 0x1p-70, 0x1p66}) {
    for (const int32_t life : {GA_GRADIENTS_CONSUMED, GA_GRADIENTS_LIVE}) {
      expect_on_all_levels(std::string("scaled-") + (life == GA_GRADIENTS_LIVE ? "live-" : "") +
                               std::to_string(std::ilogb(scale)),
                           [&](Hash& hash) {
                             ga_config c = config();
                             c.gradient_life = life;
                             c.noise_scale = life == GA_GRADIENTS_CONSUMED;
                             Context ctx(c);
                             Tensor p = random_tensor(GA_F32, 70001, 1);
                             add(ctx, ctx.group(plain_sgd(0.1)), p);
                             std::vector<Tensor> gs;
                             for (size_t k = 0; k < 3; ++k) {
                               gs.push_back(random_tensor(GA_F32, p.count(), 10 + k));
                               for (int64_t i = 0; i < p.count(); ++i)
                                 gs[k].set(i, i % 5000 < 4000 ? gs[k].get(i) * scale : 0);
                             }
                             accumulate(ctx, {&gs[0]}, 1);
                             hash.add(step(ctx).norm);
                             accumulate(ctx, {&gs[1]}, 1);
                             accumulate(ctx, {&gs[2]}, 2);
                             hash.add(step(ctx).norm);
                           });
    }
  }
}

// ---- Scalars of a step --------------------------------------------------------------------------

TEST(Bits, OfElementaryFunctions) {
  Hash powers, exponentials, logarithms;
  Random random(1);
  for (int i = 0; i < 4096; ++i) {
    const double base = random.unit();
    powers.add(real_power(base, 8 * random.unit()));
    powers.add(real_power(base, -0x1p20 * random.unit()));
    exponentials.add(exponential(1500 * random.signed_unit()));
    logarithms.add(natural_log(base));
    logarithms.add(natural_log(real_power(0.5, 2000 * random.signed_unit())));
  }
  expect("power", powers);
  expect("exponential", exponentials);
  expect("logarithm", logarithms);
}

TEST(Bits, OfSchedules) {
  for (int32_t kind = GA_SCHEDULE_CONSTANT; kind <= GA_SCHEDULE_BERT; ++kind) {
    if (kind == GA_SCHEDULE_TABLE) continue;
    ga_schedule s = schedule(kind);
    s.warmup_steps = 7;
    s.total_steps = 90;
    s.end_factor = 0.125;
    s.power = 1.7;
    s.gamma = 0.93;
    s.step_size = 5;
    Hash hash;
    Context ctx;
    float p = 0;
    const float g = 1;
    ctx.param(ctx.group(plain_sgd(0.3)), "p", &p, 1);
    EXPECT_OK(ga_group_set_schedule(ctx, 0, &s));
    for (int t = 0; t < 100; ++t) {
      hash.add(group_lr(ctx));
      ctx.accumulate({&g});
      step(ctx);
    }
    expect("schedule-" + std::to_string(kind), hash);
  }
}

TEST(Bits, OfKarrasEma) {
  Hash hash;
  Context ctx;
  ga_ema ema;
  EXPECT_OK(ga_ema_init(&ema, sizeof ema));
  ema.kind = GA_EMA_KARRAS;
  EXPECT_OK(ga_context_set_ema(ctx, &ema));
  Tensor p = random_tensor(GA_F32, 100, 1), average(GA_F64, 100);
  add(ctx, ctx.group(plain_sgd(0.1)), p);
  for (uint64_t t = 0; t < 50; ++t) {
    const Tensor g = random_tensor(GA_F32, 100, 2 + t);
    accumulate(ctx, {&g});
    step(ctx);
    EXPECT_OK(ga_ema_copy_to(ctx, 0, average.data(), GA_F64));
    hash.add(average);
  }
  expect("karras", hash);
}

// ---- State --------------------------------------------------------------------------------------

// What a state says of the version that wrote it, its value and the checksum of the header, is not of these bits.
void blank(Bytes& state, const std::string& key) {
  const std::string name = "\"gradaccum." + key + "\":\"";
  auto at = std::search(state.begin(), state.end(), name.begin(), name.end());
  ASSERT_NE(at, state.end()) << key;
  for (at += static_cast<std::ptrdiff_t>(name.size()); *at != '"'; ++at) *at = ' ';
}

// A state that is saved within a window has the same bytes everywhere, and a context that loads it goes on to the same
// bits: so any system reads what any other has written.
TEST(Bits, OfStates) {
  for (const int32_t kind : {GA_OPTIMIZER_NADAM, GA_OPTIMIZER_ADAFACTOR, GA_OPTIMIZER_ADEMAMIX}) {
    for (const int32_t dtype : {GA_F32, GA_F64, GA_BF16}) {
      ga_optimizer o = optimizer(kind);
      if (dtype == GA_BF16 && row_of(o).bf16_state) o.state_dtype = GA_BF16;
      const auto prepare = [&](Context& ctx, Tensor& p) {
        const ga_clip by = clip(GA_CLIP_GLOBAL, 0.5);
        EXPECT_OK(ga_context_set_clip(ctx, &by));
        const ga_group group = ctx.group(o);
        ga_schedule s = schedule(GA_SCHEDULE_POLYNOMIAL);
        s.total_steps = 9;
        s.power = 1.7;
        EXPECT_OK(ga_group_set_schedule(ctx, group, &s));
        EXPECT_OK(try_add(ctx, group, "p", p.data(), dtype, {13, 31}, options()));
      };
      uint64_t seed = 1;
      const auto bring = [&](Context& ctx, int32_t of) {
        const Tensor g = random_tensor(of, 13 * 31, ++seed);
        accumulate(ctx, {&g}, 0.7);
      };
      Hash hash;
      Tensor p = random_tensor(dtype, 13 * 31, 1);
      Context ctx;
      prepare(ctx, p);
      for (int t = 0; t < 3; ++t) {
        bring(ctx, dtype);
        step(ctx);
      }
      bring(ctx, dtype);
      Bytes state = saved(ctx);

      Tensor q = random_tensor(dtype, 13 * 31, 2);
      Context next;
      prepare(next, q);
      EXPECT_OK(load(next, state));
      bring(next, dtype);
      hash.add(step(next).norm);
      hash.add(q);
      blank(state, "version");
      blank(state, "header");
      hash.add(state.data(), state.size());
      expect("state-" + std::to_string(kind) + '-' + std::to_string(dtype), hash);
    }
  }
}

// ---- Rows, the noise scale, batch normalisation -------------------------------------------------

TEST(Bits, OfRows) {
  for (const int32_t rows : {GA_ROWS_DENSE, GA_ROWS_LAZY}) {
    expect_on_all_levels(rows == GA_ROWS_LAZY ? "rows-lazy" : "rows-dense", [&](Hash& hash) {
      Context ctx;
      const ga_clip by = clip(GA_CLIP_GLOBAL, 0.5);
      EXPECT_OK(ga_context_set_clip(ctx, &by));
      Tensor p = random_tensor(GA_F32, 50 * 33, 1);
      ga_param_options o = options(GA_BF16);
      o.rows = rows;
      add(ctx, ctx.group(optimizer(GA_OPTIMIZER_ADAMW)), p, {50, 33}, o);
      Random random(2);
      for (uint64_t t = 0; t < 6; ++t) {
        for (int64_t k = 0; k < 2; ++k) {
          const Tensor values = random_tensor(GA_BF16, 9 * 33, 10 * t + static_cast<uint64_t>(k));
          std::vector<int64_t> indices(9);
          for (int64_t& index : indices) index = random.below(t % 2 ? 50 : 4);
          EXPECT_OK(ga_micro_begin(ctx, k, 1.7, nullptr));
          EXPECT_OK(ga_accumulate_rows(ctx, 0, indices.data(), GA_I64, 9, values.data()));
          EXPECT_OK(ga_micro_end(ctx));
        }
        hash.add(step(ctx).norm);
      }
      hash.add(p);
    });
  }
}

TEST(Bits, OfTheNoiseScale) {
  expect_on_all_levels("noise-scale", [](Hash& hash) {
    ga_config c = config();
    c.noise_scale = 1;
    Context ctx(c);
    Tensor p = random_tensor(GA_F32, 3001, 1);
    add(ctx, ctx.group(plain_sgd(0.1)), p);
    for (uint64_t t = 0; t < 4; ++t) {
      for (uint64_t k = 0; k < 3; ++k) {
        const Tensor g = random_tensor(GA_F32, p.count(), 2 + 3 * t + k);
        accumulate(ctx, {&g}, 1 + static_cast<double>(k));
      }
      const ga_step_result r = step(ctx);
      hash.add(r.noise_trace);
      hash.add(r.noise_signal);
      hash.add(r.noise_scale);
    }
  });
}

TEST(Bits, OfBatchNormalisation) {
  const char* const modes[] = {"micro", "window", "cumulative"};
  const char* const dtypes[] = {"", "f32", "f64", "f16", "bf16"};
  for (const int32_t mode : {GA_BN_MICRO, GA_BN_WINDOW, GA_BN_CUMULATIVE}) {
    for (const int32_t dtype : {GA_F32, GA_F64, GA_F16, GA_BF16}) {
      for (const int32_t layout : {GA_BN_CHANNELS_FIRST, GA_BN_CHANNELS_LAST}) {
        std::string name = std::string("batchnorm-") + modes[mode] + '-' + dtypes[dtype];
        if (layout == GA_BN_CHANNELS_LAST) name += "-last";
        expect_on_all_levels(name, [&](Hash& hash) {
          const ref::BnShape shape = {19, 21, layout};
          ga_bn_options o = bn_options(mode);
          o.dtype = dtype;
          BnNet net(shape, o);
          for (uint64_t t = 0; t < 2; ++t) {
            const BnOutput out = net.step(bn_window(shape, dtype, {3, 1, 5}, t));
            for (const Tensor& y : out.y) hash.add(y);
            for (const Tensor& dx : out.dx) hash.add(dx);
            hash.add(out.dgamma);
            hash.add(out.dbeta);
          }
          const Running running(net.ctx, net.bn, shape.channels);
          hash.add(running.mean);
          hash.add(running.variance);
        });
      }
    }
  }
}

}  // namespace
}  // namespace ga::test
