// SPDX-License-Identifier: Apache-2.0
//
// C1, C3 and C6 with 16-bit dtypes, state in 8 bits, and the cost of layer-wise optimizers, clipping by units, the
// noise scale and row-sparse gradients against the plain step.
#include <string.h>

#include <memory>
#include <utility>

#include "program.hpp"

namespace bench {
namespace {

// Converts a block in place to n bfloat16 numbers, the upper halves of its floats.
uint16_t* halves(const Block& block, int64_t n) {
  const float* const from = block.get();
  uint16_t* const to = reinterpret_cast<uint16_t*>(block.get());
  for (int64_t i = 0; i < n; ++i) {  // each is written at or below the address it was read from
    uint32_t bits;
    memcpy(&bits, from + i, sizeof bits);
    to[i] = static_cast<uint16_t>(bits >> 16);
  }
  return to;
}

double rate_of(double bytes, const Layout& layout, const Times& seconds) {
  return 1e-9 * bytes * static_cast<double>(layout.n) / median(seconds);
}

void accumulate_16(const Options& options, Report& report, const Place& place) {
  const int threads = options.threads;
  const int64_t n = place.layout.n;
  const Block p = make_block(n, 0, threads), a = make_block(n, 2, threads),
              raw = make_block(n, 1, threads);
  const uint16_t* const g = halves(raw, n);
  const Pointers gradients = place.layout.pointers(g);
  for (const auto& [name, dtype] : {std::pair{"C1_bf16", GA_BF16}, {"C1_f16", GA_F16}}) {
    Setting setting;
    setting.threads = threads;
    setting.gradient_dtype = dtype;
    Context context(place.layout, p.get(), setting);
    const auto accumulate = [&] { context.accumulate(gradients); };
    accumulate();
    const std::vector<Times> t =
        race(options.rounds(), place.times,
             {{[&] { yard_mix_2_1_half(a.get(), g, n, threads); }, {}}, {accumulate, {}}});
    report.figure(name, t[0] / t[1], Sense::kAtLeast, 0.95,
                  format("accumulate %.1f, mix(2,1) of these bytes %.1f GB/s",
                         rate_of(10, place.layout, t[1]), rate_of(10, place.layout, t[0])));
  }
}

// Master weights that follow what the program writes to their parameters, against those that do not.
void steps_that_follow(const Options& options, Report& report, const Place& place) {
  const int64_t n = place.layout.n;
  const Block p = make_block(n, 0, options.threads), q = make_block(n, 0, options.threads),
              g = make_block(n, 1, options.threads);
  const Pointers gradients = place.layout.pointers(g.get());
  for (const auto& [name, dtype] : {std::pair{"bf16", GA_BF16}, {"f16", GA_F16}}) {
    Setting setting;
    setting.threads = options.threads;
    setting.dtype = dtype;
    Context plain(place.layout, halves(p, n), setting);
    setting.follow_data = 1;
    Context following(place.layout, halves(q, n), setting);
    const std::vector<Times> t =
        race(options.rounds(), place.times,
             {{[&] { plain.step(); }, [&] { plain.accumulate(gradients); }},
              {[&] { following.step(); }, [&] { following.accumulate(gradients); }}});
    report.figure(format("step_%s_follow_data", name), t[1] / t[0], Sense::kNone, 0,
                  format("AdamW with %s parameters and follow_data %.1f, without %.1f GB/s", name,
                         rate_of(30, place.layout, t[1]), rate_of(30, place.layout, t[0])));
  }
}

void steps_16(const Options& options, Report& report, const Place& place) {
  const int threads = options.threads;
  const int64_t n = place.layout.n;
  const Block p = make_block(n, 0, threads), g = make_block(n, 1, threads);
  const Block a = make_block(n, 2, threads), b = make_block(n, 3, threads),
              c = make_block(n, 4, threads), d = make_block(n, 5, threads);
  uint16_t* const p16 = halves(p, n);
  uint16_t* const d16 = halves(d, n);
  const Pointers gradients = place.layout.pointers(g.get());
  {
    Setting setting;
    setting.threads = threads;
    setting.dtype = GA_BF16;
    Context context(place.layout, p16, setting);
    const std::vector<Times> t = race(
        options.rounds(), place.times,
        {{[&] { yard_mix_4_4_half(a.get(), b.get(), c.get(), g.get(), d16, n, threads); }, [] {}},
         {[&] { context.step(); }, [&] { context.accumulate(gradients); }}});
    report.figure("C3_bf16_copy", t[0] / t[1], Sense::kAtLeast, 0.92,
                  format("AdamW on f32 master weights with a bf16 copy %.1f, its mix %.1f GB/s",
                         rate_of(30, place.layout, t[1]), rate_of(30, place.layout, t[0])));
  }
  const Block q = make_block(n, 0, threads), e = make_block(n, 6, threads);
  uint16_t* const e16 = halves(e, n);
  Setting setting;
  setting.threads = threads;
  setting.state_dtype = GA_BF16;
  Context context(place.layout, q.get(), setting);
  const std::vector<Times> t =
      race(options.rounds(), place.times,
           {{[&] { yard_mix_4_3_half(a.get(), d16, e16, g.get(), n, threads); }, [] {}},
            {[&] { context.step(); }, [&] { context.accumulate(gradients); }}});
  report.figure("C3_bf16_state", t[0] / t[1], Sense::kAtLeast, 0.65,
                format("AdamW with bf16 state %.1f, its mix %.1f GB/s",
                       rate_of(20, place.layout, t[1]), rate_of(20, place.layout, t[0])));
}

// Gradients and parameters in bf16, accumulators and master weights in f32.
void windows_16(const Options& options, Report& report, const Place& place) {
  const int threads = options.threads;
  const int64_t n = place.layout.n;
  const Block p = make_block(n, 0, threads), raw0 = make_block(n, 1, threads),
              raw1 = make_block(n, 2, threads), raw = make_block(n, 3, threads);
  const Block a = make_block(n, 4, threads), b = make_block(n, 5, threads),
              c = make_block(n, 6, threads), g = make_block(n, 7, threads);
  uint16_t* const copy16 = halves(raw, n);
  const uint16_t *const g0 = halves(raw0, n), *const g1 = halves(raw1, n);
  const Pointers gradients[2] = {place.layout.pointers(g0), place.layout.pointers(g1)};
  Setting consuming;
  consuming.threads = threads;
  consuming.dtype = consuming.gradient_dtype = GA_BF16;
  Setting keeping = consuming;
  keeping.life = GA_GRADIENTS_LIVE;
  const Block p_live = make_block(n, 0, threads);  // two contexts cannot both have masters of one
  Context consumed(place.layout, halves(p, n), consuming);
  Context live(place.layout, halves(p_live, n), keeping);
  const auto window = [&](Context& context, int micros) {
    return [&context, &gradients, micros] {
      for (int micro = 0; micro < micros; ++micro) context.accumulate(gradients[micro % 2]);
      context.step();
    };
  };
  volatile float sink = 0;
  const int counts[] = {1, 4, 8};
  std::vector<Side> sides = {
      {[&] { sink = yard_mix_1_0_half(g0, n, threads); }, {}},
      {[&] { yard_mix_2_1_half(a.get(), g0, n, threads); }, {}},
      {[&] { yard_mix_4_4_half(a.get(), b.get(), c.get(), g.get(), copy16, n, threads); }, {}},
      {[&] { yard_widen_nt(a.get(), g0, n, threads); }, {}},
      {[&] { yard_add_half_nt(a.get(), g0, g1, n, threads); }, {}}};
  for (int micros : counts) sides.push_back({window(consumed, micros), {}});
  for (int micros : counts) sides.push_back({window(live, micros), {}});
  const std::vector<Times> t = race(options.rounds(), place.times, sides);
  const Times &norm = t[0], &add = t[1], &step = t[2], &first = t[3], &first_add = t[4];
  Times worst(norm.size(), 1e9);
  for (size_t k = 0; k < 6; ++k) {
    const bool is_live = k >= 3;
    const int micros = counts[k % 3];
    Times passes = step;
    if (!is_live)
      passes = passes + first + (micros - 1.0) * add;
    else if (micros == 1)
      passes = passes + norm;  // the step reads 2 bytes fewer than its yardstick
    else
      passes = passes + first_add + (micros - 2.0) * add;
    const int bytes = is_live ? (micros == 1 ? 30 : 18 + 10 * micros) : 26 + 10 * micros;
    const Times ratios = passes / t[5 + k];
    if (median(ratios) < median(worst)) worst = ratios;
    report.figure(format("C6_bf16_%s_n%d", is_live ? "live" : "consumed", micros), ratios,
                  Sense::kAtLeast, 0.92,
                  format("%d bytes a parameter, %.1f GB/s, %.2f ms", bytes,
                         rate_of(bytes, place.layout, t[5 + k]), 1e3 * median(t[5 + k])));
  }
  report.figure("C6_bf16", worst, Sense::kAtLeast, 0.92,
                "sum of the passes / time, the worst of the six");
}

// Steps compared with the plain one: AdamW, clipped by the global norm.
void layers(const Options& options, Report& report, const Place& place) {
  const int threads = options.threads;
  const int64_t n = place.layout.n;
  const Block p = make_block(n, 0, threads), q = make_block(n, 1, threads),
              g = make_block(n, 2, threads);
  const Pointers gradients = place.layout.pointers(g.get());
  Setting plain;
  plain.threads = threads;
  const auto against = [&](const char* id, const Setting& setting, double target,
                           const char* text) {
    Context usual(place.layout, p.get(), plain), other(place.layout, q.get(), setting);
    const std::vector<Times> t =
        race(options.rounds(), place.times,
             {{[&] { usual.step(); }, [&] { usual.accumulate(gradients); }},
              {[&] { other.step(); }, [&] { other.accumulate(gradients); }}});
    report.figure(id, t[1] / t[0], target > 0 ? Sense::kAtMost : Sense::kNone, target, text);
  };
  Setting lamb = plain, adafactor = plain, agc = plain, lars = plain;
  lamb.optimizer = GA_OPTIMIZER_LAMB;
  lars.optimizer = GA_OPTIMIZER_LARS;
  adafactor.optimizer = GA_OPTIMIZER_ADAFACTOR;
  agc.scope = GA_CLIP_AGC;
  if (options.wants("LAMB")) {
    against("LAMB", lamb, 1.5, "time of LAMB's step / AdamW's (40, 28 bytes)");
    against("LARS", lars, 0, "time of LARS' step / AdamW's (16, 28 bytes)");
  }
  if (options.wants("ADAFACTOR"))
    against("ADAFACTOR", adafactor, 0, "time of Adafactor's step / AdamW's (32, 28 bytes)");
  if (options.wants("AGC")) {
    agc.units = GA_AGC_TORCH;
    against("AGC_torch", agc, 1.35,
            "time of AdamW's step with AGC by rows / with a global clip (28 bytes each)");
    agc.units = GA_AGC_TF;
    against("AGC_tf", agc, 1.35,
            "time of AdamW's step with AGC by columns / with a global clip (36, 28 bytes)");
  }
}

void noise(const Options& options, Report& report, const Place& place) {
  const int threads = options.threads;
  const int64_t n = place.layout.n;
  const Block p = make_block(n, 0, threads), q = make_block(n, 1, threads),
              g = make_block(n, 2, threads);
  const Pointers gradients = place.layout.pointers(g.get());
  Setting plain, noisy;
  plain.threads = noisy.threads = threads;
  noisy.noise_scale = 1;
  Context without(place.layout, p.get(), plain), with(place.layout, q.get(), noisy);
  without.accumulate(gradients);
  with.accumulate(gradients);
  const std::vector<Times> t = race(
      options.rounds(), place.times,
      {{[&] { without.accumulate(gradients); }, {}}, {[&] { with.accumulate(gradients); }, {}}});
  report.figure("NOISE", t[1] / t[0], Sense::kAtMost, 1.03,
                "time of accumulate with the noise scale / without");
}

void adafactor_state(Report& report) {
  const Layout layout(std::vector<Shape>{Shape{4096, 4096}});
  const Block p = make_block(layout.n, 0, 1);
  const auto state = [&](int32_t optimizer) {
    Setting setting;
    setting.optimizer = optimizer;
    const Context context(layout, p.get(), setting);
    ga_memory memory;
    memory.struct_size = sizeof memory;
    check(ga_context_memory(context.get(), &memory));
    return static_cast<double>(memory.optimizer_state);
  };
  report.figure("ADAFACTOR_state", {state(GA_OPTIMIZER_ADAFACTOR) / state(GA_OPTIMIZER_ADAMW)},
                Sense::kAtMost, 0.006, "bytes of state / AdamW's, 4096 x 4096");
}

// 1000 rows of an embedding, lazily updated, against a dense parameter of these rows alone.
void rows(const Options& options, Report& report) {
  constexpr int64_t kRows = int64_t{1} << 20, kColumns = 64, kTouched = 1000;
  const int threads = options.threads;
  const Layout whole(std::vector<Shape>{Shape{kRows, kColumns}}),
      alone(std::vector<Shape>{Shape{kTouched, kColumns}});
  const Block p = make_block(whole.n, 0, threads), q = make_block(alone.n, 1, threads),
              g = make_block(alone.n, 2, threads);
  std::vector<int32_t> indices;
  for (int64_t i = 0; i < kTouched; ++i)
    indices.push_back(static_cast<int32_t>(i * 2654435761u % kRows));
  Setting plain, lazy;
  plain.threads = lazy.threads = threads;
  lazy.rows = GA_ROWS_LAZY;
  Context embedding(whole, p.get(), lazy), dense(alone, q.get(), plain);
  const Pointers gradients = alone.pointers(g.get());
  const auto window = [&] {
    ga_context* const ctx = embedding.get();
    check(ga_micro_begin(ctx, 0, 1.0, nullptr));
    check(ga_accumulate_rows(ctx, 0, indices.data(), GA_I32, kTouched, g.get()));
    check(ga_micro_end(ctx));
    embedding.step();
  };
  const auto dense_window = [&] {
    dense.accumulate(gradients);
    dense.step();
  };
  const std::vector<Times> t =
      race(options.rounds(), options.quick ? 20 : 100, {{dense_window, {}}, {window, {}}});
  report.figure(
      "ROWS", t[1] / t[0], Sense::kNone, 0,
      format("window of %d rows of 2^20 x 64, lazy, %.0f us / a parameter of these rows alone",
             static_cast<int>(kTouched), 1e6 * median(t[1])));
}

// Steps with state in 8 bits, against those with state in f32 and in bf16.
void low_bit(const Options& options, Report& report, const Place& place) {
  const int64_t n = place.layout.n;
  Setting setting;
  setting.threads = options.threads;
  const Block g = make_block(n, 1, options.threads);
  const Pointers gradients = place.layout.pointers(g.get());
  std::vector<Block> parameters;
  std::vector<std::unique_ptr<Context>> contexts;
  std::vector<Side> sides;
  for (const int32_t dtype : {int32_t{0}, int32_t{GA_BF16}, int32_t{GA_STATE_8BIT}}) {
    setting.state_dtype = dtype;
    parameters.push_back(make_block(n, 0, options.threads));
    contexts.push_back(std::make_unique<Context>(place.layout, parameters.back().get(), setting));
    Context& context = *contexts.back();
    sides.push_back({[&context] { context.step(); },
                     [&context, &gradients] { context.accumulate(gradients); }});
  }
  const std::vector<Times> t = race(options.rounds(), place.times, sides);
  report.figure("LOWBIT", t[0] / t[2], Sense::kAtLeast, 1.3,
                format("AdamW's step with state in 8 bits, %.1f GB/s, against f32, %.1f GB/s",
                       rate_of(16.06, place.layout, t[2]), rate_of(28, place.layout, t[0])));
  report.figure("LOWBIT_bf16", t[0] / t[1], Sense::kNone, 0,
                format("the same with state in bf16, %.1f GB/s", rate_of(20, place.layout, t[1])));
}

}  // namespace

void variant_figures(const Options& options, Report& report, const Place& place) {
  if (options.wants("C1")) accumulate_16(options, report, place);
  if (options.wants("C3")) steps_16(options, report, place);
  if (options.wants("FOLLOW")) steps_that_follow(options, report, place);
  if (options.wants("C6")) windows_16(options, report, place);
  if (options.wants("LAMB") || options.wants("AGC") || options.wants("ADAFACTOR"))
    layers(options, report, place);
  if (options.wants("NOISE")) noise(options, report, place);
  if (options.wants("ADAFACTOR")) adafactor_state(report);
  if (options.wants("ROWS")) rows(options, report);
  if (options.wants("LOWBIT")) low_bit(options, report, place);
}

}  // namespace bench
