// SPDX-License-Identifier: Apache-2.0
//
// Ranks with a simulated device each, over NCCL, or a library of its name (host/nccl.h). What transports of
// the host's memory do with contexts on a device, the suites of ranks test once more (device.cpp).
#include "device_ranks.hpp"

namespace ga::test {
namespace {

using namespace over_ranks;

// As over_ranks::run(), on devices.
std::vector<Ended> run_on_devices(const Layout& l, const Options& s, const Shares& shares,
                                  const Block& start) {
  const auto ranks = static_cast<int32_t>(shares[0].size());
  std::vector<Ended> ended(shares[0].size());
  on_devices(ranks, [&](int32_t r, ga_comm* comm, const Stream& stream) {
    Ended& e = ended[static_cast<size_t>(r)];
    const Parameters p(start);
    Context ctx(on(s.config, stream));
    add_all(ctx, ctx.group(s.optimizer), l, p.data());
    ASSERT_OK(ga_context_set_clip(ctx, &s.clip));
    ASSERT_OK(ga_context_set_comm(ctx, comm, &s.options));
    for (const auto& window : shares) {
      if (s.options.overlap)
        contribute_ready(ctx, l, window[static_cast<size_t>(r)], r);
      else
        contribute(ctx, l, window[static_cast<size_t>(r)]);
      ASSERT_OK(ga_step(ctx, nullptr));
      e.results.push_back(result_of(ctx));
    }
    e.parameters = p.get();
  });
  return ended;
}

// Parameters have the bits of ranks on the CPU. Results are alike on all ranks, and norms those of the CPU up
// to the order in which squares are added.
void expect_like_the_cpu(const std::vector<Ended>& ended, const std::vector<Ended>& cpu) {
  ASSERT_EQ(ended.size(), cpu.size());
  for (size_t r = 0; r < ended.size(); ++r) {
    SCOPED_TRACE("rank " + std::to_string(r));
    expect_alike(ended[r], ended[0]);
    EXPECT_TRUE(same_bits(ended[r].parameters, cpu[r].parameters));
    ASSERT_EQ(ended[r].results.size(), cpu[r].results.size());
    for (size_t w = 0; w < cpu[r].results.size(); ++w) {
      const ga_step_result &a = ended[r].results[w], &b = cpu[r].results[w];
      EXPECT_EQ(a.outcome, b.outcome);
      EXPECT_EQ(a.micro_batches, b.micro_batches);
      EXPECT_EQ(a.weight, b.weight);
      EXPECT_EQ(a.steps, b.steps);
      EXPECT_EQ(a.windows, b.windows);
      EXPECT_NEAR(a.norm, b.norm, ref::kUsualNorm * b.norm);
      EXPECT_NEAR(a.clip_factor, b.clip_factor, ref::kUsualNorm);
    }
  }
}

// ---- The promise ----------------------------------------------------------------------------------

struct Way {
  const char* name;
  std::function<void(Options&)> set;
};

class CudaRanksWays : public CudaRanks,
                      public testing::WithParamInterface<std::tuple<Way, int32_t>> {};

TEST_P(CudaRanksWays, HaveTheBitsOfTheCpu) {
  const Layout l = layout();
  Options s;
  s.optimizer = optimizer(GA_OPTIMIZER_ADAMW);
  s.clip = clip(GA_CLIP_GLOBAL, 0.5);
  s.options.adder = GA_COMM_ADDER_LIBRARY;
  const auto& [way, ranks] = GetParam();
  way.set(s);
  const Shares shares = make_shares(l, ranks, 4);
  const Block start = parameters(l, 3);
  const std::vector<Ended> cpu = run(l, s, shares, start);
  for (const bool deferred : {false, true})
    for (const bool shards : {false, true})
      for (const bool overlaps : {false, true}) {
        SCOPED_TRACE(std::string(deferred ? " deferred" : "") + (shards ? " sharded" : "") +
                     (overlaps ? " overlapped" : ""));
        use(deferred);
        s.options.shard = shards ? GA_SHARD_OPTIMIZER : GA_SHARD_NONE;
        s.options.overlap = overlaps;
        expect_like_the_cpu(run_on_devices(l, s, shares, start), cpu);
      }
}

INSTANTIATE_TEST_SUITE_P(
    All, CudaRanksWays,
    testing::Combine(
        testing::Values(
            Way{"plain", [](Options&) {}},
            Way{"checked", [](Options& s) { s.config.nonfinite = GA_NONFINITE_DROP_MICRO; }},
            Way{"clipped_micro",
                [](Options& s) {
                  s.clip = clip(GA_CLIP_GLOBAL, 0.5);
                  s.clip.when = GA_CLIP_WHEN_MICRO;
                }},
            Way{"clamped",
                [](Options& s) { s.clip = clip(GA_CLIP_GLOBAL, 0.5, GA_FLAVOR_TORCH, 0.01); }},
            Way{"running_mean",
                [](Options& s) { s.config.accumulation = GA_ACCUMULATE_RUNNING_MEAN; }},
            Way{"checked_running_mean",
                [](Options& s) {
                  s.config.accumulation = GA_ACCUMULATE_RUNNING_MEAN;
                  s.config.nonfinite = GA_NONFINITE_DROP_MICRO;
                }},
            Way{"missing_zero", [](Options& s) { s.config.missing = GA_MISSING_ZERO; }},
            Way{"compared", [](Options& s) { s.options.check_every = 2; }},
            Way{"bf16_on_the_wire",
                [](Options& s) {
                  s.options.wire = GA_COMM_WIRE_BF16;
                  s.options.adder = GA_COMM_ADDER_AUTO;  // which is the library then
                }},
            Way{"by_units", [](Options& s) { s.clip = clip(GA_CLIP_AGC, 0); }},
            Way{"adafactor", [](Options& s) { s.optimizer = optimizer(GA_OPTIMIZER_ADAFACTOR); }}),
        testing::Values(1, 2, 3, 4)),
    [](const auto& info) {
      return std::get<0>(info.param).name + std::string("_") +
             std::to_string(std::get<1>(info.param));
    });

// Shares of tensors consist of whole blocks of state in 8 bits.
TEST_F(CudaRanks, StateIn8Bits) {
  const Layout l = Layout::of({{5000}, {7}, {70, 1001}, {17, 300}, {4097}});
  Options s;
  s.options.adder = GA_COMM_ADDER_LIBRARY;
  const Shares shares = make_shares(l, 3, 3);
  const Block start = parameters(l, 3);
  for (const int32_t kind : {GA_OPTIMIZER_ADAMW, GA_OPTIMIZER_LION}) {
    s.options.shard = GA_SHARD_NONE;
    s.optimizer = optimizer(kind);
    const Block floats = run(l, s, shares, start)[0].parameters;
    s.optimizer.state_dtype = GA_STATE_8BIT;
    const std::vector<Ended> cpu = run(l, s, shares, start);
    EXPECT_FALSE(same_bits(cpu[0].parameters, floats));
    expect_like_the_cpu(run_on_devices(l, s, shares, start), cpu);
    s.options.shard = GA_SHARD_OPTIMIZER;
    expect_like_the_cpu(run_on_devices(l, s, shares, start), cpu);
  }
  s.optimizer = optimizer(GA_OPTIMIZER_LAMB);
  s.optimizer.state_dtype = GA_STATE_8BIT;
  s.options.shard = GA_SHARD_NONE;
  const std::vector<Ended> whole = run_on_devices(l, s, shares, start);
  s.options.shard = GA_SHARD_OPTIMIZER;
  expect_alike(whole, run_on_devices(l, s, shares, start));
}

// The norms of layers are those of whole tensors on a device, and of pieces on the CPU.
TEST_F(CudaRanks, LayersAreThoseOfTheCpuToRounding) {
  const Layout l = layout();
  Options s;
  s.optimizer = optimizer(GA_OPTIMIZER_LAMB);
  const Shares shares = make_shares(l, 3, 4);
  const Block start = parameters(l, 3);
  const Ended alone = run_alone(l, s, shares, start);
  const std::vector<Ended> whole = run_on_devices(l, s, shares, start);
  s.options.shard = GA_SHARD_OPTIMIZER;
  const std::vector<Ended> sharded = run_on_devices(l, s, shares, start);
  expect_alike(whole, sharded);
  EXPECT_LT(distance(l, whole[0].parameters, alone.parameters), 1e-6);
}

// One rank clips a tensor by units and updates it; what the others need of that is there before the decision.
// A norm over all gradients of LAMB is one after that clip.
TEST_F(CudaRanks, ClippedByUnits) {
  // Tensors of several chunks take long, so each optimizer has them with one way to clip.
  const Layout layouts[] = {Layout::of({{300, 260}, {7}, {130, 600}, {33, 5}, {70001}, {260, 270}}),
                            Layout::of({{30, 26}, {7}, {13, 60}, {33, 5}, {701}, {26, 27}})};
  size_t turn = 0;
  for (const int32_t kind : {GA_OPTIMIZER_ADAMW, GA_OPTIMIZER_LAMB, GA_OPTIMIZER_ADAFACTOR}) {
    ++turn;
    for (const int32_t units : {GA_AGC_TF, GA_AGC_TORCH})
      for (const int32_t when : {GA_CLIP_WHEN_STEP, GA_CLIP_WHEN_MICRO}) {
        const Layout& l = layouts[turn++ % 4 == 0 ? 0 : 1];
        const Block start = parameters(l, 3);
        SCOPED_TRACE(std::to_string(kind) + " " + std::to_string(units) + " " +
                     std::to_string(when));
        Options s;
        s.optimizer = optimizer(kind);
        if (kind == GA_OPTIMIZER_LAMB) s.optimizer.max_grad_norm = 0.1;
        s.clip = clip(GA_CLIP_AGC, 0);
        s.clip.agc_units = units;
        s.clip.when = when;
        s.options.adder = GA_COMM_ADDER_LIBRARY;
        const Shares shares = make_shares(l, 3, 2, 1);
        const std::vector<Ended> whole = run_on_devices(l, s, shares, start);
        if (when == GA_CLIP_WHEN_STEP) {
          EXPECT_LT(whole[0].results[0].clip_factor, 0.5);
        }
        EXPECT_LT(distance(l, whole[0].parameters, run_alone(l, s, shares, start).parameters),
                  1e-4);
        s.options.shard = GA_SHARD_OPTIMIZER;
        for (const bool deferred : {false, true}) {
          use(deferred);
          expect_alike(whole, run_on_devices(l, s, shares, start));
        }
        use(false);
      }
  }
}

// A gradient for the program, which every rank clips by itself, beside one that its owner clips for all.
TEST_F(CudaRanks, ClippedByUnitsForTheProgram) {
  std::vector<ga_step_result> results;
  std::vector<std::vector<double>> gradients;
  std::mutex lock;
  for (const bool shards : {false, true})
    on_devices(2, [&](int32_t r, ga_comm* comm, const Stream& stream) {
      const Parameters p(Block(90600, 1));
      Context ctx(on(config(), stream));
      ga_optimizer lamb = optimizer(GA_OPTIMIZER_LAMB);
      lamb.max_grad_norm = 0.1;
      ctx.param(ctx.group(lamb), "w", p.data(), ref::Shape{300, 300});
      const ga_param own = ctx.param(ctx.group(optimizer(GA_OPTIMIZER_EXTERNAL)), "own",
                                     p.data() + 90000, ref::Shape{20, 30});
      const ga_clip c = clip(GA_CLIP_AGC, 0);
      ASSERT_OK(ga_context_set_clip(ctx, &c));
      ga_comm_options o = comm_options();
      o.shard = shards ? GA_SHARD_OPTIMIZER : GA_SHARD_NONE;
      o.adder = GA_COMM_ADDER_LIBRARY;
      ASSERT_OK(ga_context_set_comm(ctx, comm, &o));
      std::vector<float> g(90600);
      for (size_t j = 0; j < g.size(); ++j)
        g[j] = static_cast<float>(j % 13) - static_cast<float>(4 + r);
      for (int w = 0; w < 2; ++w) {
        ctx.accumulate({g.data(), g.data() + 90000});
        ASSERT_OK(ga_step(ctx, nullptr));
        const ga_step_result result = result_of(ctx);
        std::vector<double> all = external_gradient(ctx, own, 600);
        const Block all_of_p = p.get();
        all.insert(all.end(), all_of_p.begin(), all_of_p.begin() + 90000);
        const std::lock_guard<std::mutex> hold(lock);
        if (w == 0) continue;
        results.push_back(result);
        gradients.push_back(all);
      }
    });
  ASSERT_EQ(results.size(), 4u);
  for (size_t k = 1; k < results.size(); ++k) {
    EXPECT_EQ(memcmp(&results[k], &results[0], sizeof results[0]), 0) << k;
    EXPECT_EQ(gradients[k], gradients[0]) << k;
  }
}

// NCCL adds in an order of its own, also where nobody has asked for it. LAMB's tensors are whole on a rank: many
// large ones, one that is too large to travel to its owner alone, and small ones.
TEST_F(CudaRanks, TheTransportAdds) {
  std::vector<ref::Shape> shapes(10, ref::Shape{260, 260});
  shapes.insert(shapes.end(), {{600, 400}, {7}, {33, 5}});
  const Layout layouts[] = {layout(), Layout::of(shapes)};
  for (const auto& [kind, l] :
       {std::pair(GA_OPTIMIZER_ADAMW, layouts[0]), {GA_OPTIMIZER_LAMB, layouts[1]}})
    for (const int32_t adder : {GA_COMM_ADDER_TRANSPORT, GA_COMM_ADDER_AUTO, GA_COMM_ADDER_LIBRARY})
      for (const bool shards : {false, true}) {
        SCOPED_TRACE(std::to_string(kind) + " " + std::to_string(adder) +
                     (shards ? " sharded" : ""));
        Options s;
        s.optimizer = optimizer(kind);
        s.clip = clip(GA_CLIP_GLOBAL, 0.5);
        s.options.adder = adder;
        s.options.shard = shards ? GA_SHARD_OPTIMIZER : GA_SHARD_NONE;
        const Shares shares = make_shares(l, 4, 2);
        const Block start = parameters(l, 3);
        ga_fake_nccl_reset();
        const std::vector<Ended> ended = run_on_devices(l, s, shares, start);
        EXPECT_EQ(ga_fake_nccl_calls(shards ? "ncclReduceScatter" : "ncclAllReduce") > 0,
                  adder != GA_COMM_ADDER_LIBRARY);
        expect_alike(ended);
        const Ended alone = run_alone(l, s, shares, start);
        EXPECT_LT(distance(l, ended[0].parameters, alone.parameters), 1e-6);
        for (size_t w = 0; w < alone.results.size(); ++w)
          EXPECT_NEAR(ended[0].results[w].norm, alone.results[w].norm,
                      1e-6 * alone.results[w].norm);
      }
}

// Nothing but the result wants it: a pass would tell, which is made if it is asked for.
TEST_F(CudaRanks, NormsThatNobodyReadsAreLeftOut) {
  const Layout l = layout();
  const Shares shares = make_shares(l, 3, 2);
  const Block start = parameters(l, 3);
  for (const bool shards : {false, true})
    for (const bool measures : {false, true}) {
      Options s;
      s.config.nonfinite = GA_NONFINITE_IGNORE;
      s.config.measure_norm = measures;
      s.options.shard = shards ? GA_SHARD_OPTIMIZER : GA_SHARD_NONE;
      s.options.adder = GA_COMM_ADDER_LIBRARY;
      const std::vector<Ended> ended = run_on_devices(l, s, shares, start);
      expect_alike(ended);
      const std::vector<Ended> cpu = run(l, s, shares, start);
      EXPECT_TRUE(same_bits(ended[0].parameters, cpu[0].parameters));
      for (size_t w = 0; w < shares.size(); ++w) {
        const double norm = ended[0].results[w].norm, wanted = cpu[0].results[w].norm;
        EXPECT_FALSE(std::isnan(wanted));
        EXPECT_EQ(std::isnan(norm), !measures);
        if (measures) {
          EXPECT_NEAR(norm, wanted, ref::kUsualNorm * wanted);
        }
      }
    }
}

// NCCL's maximum of a NaN and a number is the number, so the library takes maxima.
TEST_F(CudaRanks, MaximaThatAreNotNumbers) {
  on_devices(3, [&](int32_t r, ga_comm* comm, const Stream& stream) {
    const Parameters p(2);
    Context ctx(on(config(), stream));
    ga_param_options o = options();
    o.reduce = GA_REDUCE_MAX;
    const ga_param id =
        ctx.param(ctx.group(optimizer(GA_OPTIMIZER_EXTERNAL)), "p", p.data(), ref::Shape{2}, &o);
    ga_comm_options adds = comm_options();
    adds.adder = GA_COMM_ADDER_TRANSPORT;
    ASSERT_OK(ga_context_set_comm(ctx, comm, &adds));
    for (const float bad : {-7.0f, NAN, -INFINITY}) {
      const float g[] = {static_cast<float>(-1 - r), r == 1 ? bad : static_cast<float>(-2 - r)};
      ctx.accumulate({g});
      ASSERT_OK(ga_step(ctx, nullptr));
      EXPECT_EQ(result_of(ctx).outcome,
                std::isnan(bad) ? GA_STEP_SKIPPED_NONFINITE : GA_STEP_APPLIED);
      if (!std::isnan(bad)) {
        EXPECT_EQ(external_gradient(ctx, id, 2), (std::vector<double>{-1, -2}));
      }
    }
  });
}

// What a layer exchanges within a window comes before the gradients that travel meanwhile. Ranks tell
// differently what is ready: before the sums of the layer are those of all ranks, behind that, not at all.
TEST_F(CudaRanks, GradientsTravelBehindTheSumsOfALayer) {
  constexpr int64_t kCount = 140000, kChannels = 3, kSamples = 8;
  std::vector<Block> ended[2];
  for (const bool overlap : {false, true}) {
    ended[overlap].resize(3);
    on_devices(3, [&](int32_t r, ga_comm* comm, const Stream& stream) {
      const Parameters p(Block(kCount + 2 * kChannels, 1));
      ga_config c = config();
      c.accum_steps = 1;
      Context ctx(on(c, stream));
      const ga_group group = ctx.group(plain_sgd(0.25));
      const ga_param w = ctx.param(group, "w", p.data(), kCount);
      const ga_param gamma = ctx.param(group, "gamma", p.data() + kCount, kChannels);
      const ga_param beta = ctx.param(group, "beta", p.data() + kCount + kChannels, kChannels);
      ga_bn_options layer;
      ASSERT_OK(ga_bn_options_init(&layer, sizeof layer, GA_FLAVOR_TORCH));
      layer.mode = GA_BN_WINDOW;
      ga_bn bn = -1;
      ASSERT_OK(ga_bn_add(ctx, "bn", kChannels, gamma, beta, &layer, &bn));
      ga_comm_options o = comm_options();
      o.overlap = overlap;
      ASSERT_OK(ga_context_set_comm(ctx, comm, &o));
      Block x(kSamples * kChannels), dy(x.size()), g(kCount, static_cast<float>(r + 1));
      for (size_t j = 0; j < x.size(); ++j) {
        x[j] = static_cast<float>((7 * j + static_cast<size_t>(r)) % 11);
        dy[j] = static_cast<float>((5 * j + static_cast<size_t>(r)) % 13) - 6;
      }
      const Parameters dx(x.size());
      const ga_param all[] = {beta, gamma, w};
      for (int k = 0; k < 3; ++k) {
        ASSERT_OK(ga_bn_accumulate(ctx, bn, x.data(), kSamples, 1));
        ASSERT_OK(ga_bn_finalize(ctx, bn));
        ASSERT_OK(ga_micro_begin(ctx, 0, 1, nullptr));
        ASSERT_OK(ga_accumulate_part(ctx, w, g.data()));
        ASSERT_OK(ga_bn_backward_accumulate(ctx, bn, x.data(), dy.data(), kSamples, 1));
        ASSERT_OK(ga_micro_end(ctx));
        if (r == 0) {
          ASSERT_OK(ga_params_ready(ctx, all, 3));
        }
        ASSERT_OK(ga_bn_backward_finalize(ctx, bn));
        if (r == 1) {
          ASSERT_OK(ga_params_ready(ctx, all, 3));
        }
        ASSERT_OK(ga_micro_begin(ctx, 0, 1, nullptr));
        ASSERT_OK(ga_bn_backward(ctx, bn, x.data(), dy.data(), kSamples, 1, dx.data()));
        ASSERT_OK(ga_micro_end(ctx));
        ASSERT_OK(ga_step(ctx, nullptr));
        EXPECT_EQ(result_of(ctx).outcome, GA_STEP_APPLIED);
      }
      Block& end = ended[overlap][static_cast<size_t>(r)];
      end = p.get();
      EXPECT_EQ(end[0], 1 - 3 * 0.25f * 2);
      const Block of_dx = dx.get();
      end.insert(end.end(), of_dx.begin(), of_dx.end());
    });
  }
  for (size_t r = 0; r < 3; ++r) EXPECT_TRUE(same_bits(ended[1][r], ended[0][r])) << r;
}

// ---- Waits and graphs -------------------------------------------------------------------------------

// Once all ranks have agreed, a window waits neither for the device nor for other ranks' hosts.
TEST_F(CudaRanks, TheHostWaitsForNothing) {
  use(true);
  const Layout l = layout();
  for (const bool shards : {false, true}) {
    std::atomic<int64_t> waits{0};
    std::atomic<int> begun{0};
    on_devices(2, [&](int32_t r, ga_comm* comm, const Stream& stream) {
      const Parameters p(parameters(l, 3));
      const Block g = gradients(l, 5, static_cast<uint64_t>(r));
      Context ctx(on(config(), stream));
      add_all(ctx, ctx.group(optimizer(GA_OPTIMIZER_ADAMW)), l, p.data());
      ga_comm_options o = comm_options();
      o.shard = shards ? GA_SHARD_OPTIMIZER : GA_SHARD_NONE;
      ASSERT_OK(ga_context_set_comm(ctx, comm, &o));
      const auto window = [&] {
        ASSERT_OK(ga_accumulate(ctx, pointers(l, g).data(), l.size(), 1, nullptr));
        ga_step_result result = step(ctx);
        EXPECT_EQ(result.outcome, GA_STEP_PENDING);
      };
      window();
      ASSERT_OK(ga_synchronize(ctx));
      for (++begun; begun < 2;) std::this_thread::yield();
      const int64_t before = sim::counters().synchronizations;
      for (int w = 0; w < 3; ++w) window();
      waits += sim::counters().synchronizations - before;
      for (++begun; begun < 4;) std::this_thread::yield();
      EXPECT_EQ(result_of(ctx).steps, 4);
    });
    EXPECT_EQ(waits, 0);
  }
}

// Norms are taken of the sums of all ranks, in one launch before the decision, which takes none any more.
TEST_F(CudaRanks, NormsAreTakenOnce) {
  const Layout l = layout();
  on_devices(1, [&](int32_t, ga_comm* comm, const Stream& stream) {
    const Parameters p(parameters(l, 3));
    const Block g = gradients(l, 5, 0);
    Context ctx(on(config(), stream));
    add_all(ctx, ctx.group(optimizer(GA_OPTIMIZER_ADAMW)), l, p.data());
    const ga_clip norm = clip(GA_CLIP_GLOBAL, 0.5);
    ASSERT_OK(ga_context_set_clip(ctx, &norm));
    ASSERT_OK(ga_context_set_comm(ctx, comm, nullptr));
    sim::reset_counters();
    ASSERT_OK(ga_accumulate(ctx, pointers(l, g).data(), l.size(), 1, nullptr));
    ASSERT_OK(ga_step(ctx, nullptr));
    int64_t launches = 0;
    for (const auto& [kernel, n] : sim::counters().by_kernel)
      if (kernel.find("Norm") != std::string::npos) launches += n;
    EXPECT_EQ(launches, 1);
  });
}

// Windows of 2 micro-batches, by calls and by replays of a graph, in which one tensor has a gradient on some
// ranks and another one on none.
TEST_F(CudaRanks, AWindowInAGraph) {
  const Layout l = layout();
  std::vector<std::vector<Block>> ended(2, std::vector<Block>(3));
  for (const bool captured : {false, true}) {
    on_devices(3, [&](int32_t r, ga_comm* comm, const Stream& stream) {
      const Parameters p(parameters(l, 3));
      std::vector<Block> g;
      for (uint64_t k = 0; k < 2; ++k)
        g.push_back(gradients(l, 5, 2 * static_cast<uint64_t>(r) + k));
      Context ctx(on(config(), stream));
      add_all(ctx, ctx.group(optimizer(GA_OPTIMIZER_ADAMW)), l, p.data());
      const ga_clip c = clip(GA_CLIP_GLOBAL, 0.5);
      ASSERT_OK(ga_context_set_clip(ctx, &c));
      ASSERT_OK(ga_context_set_comm(ctx, comm, nullptr));
      const auto window = [&](bool missing) {
        for (const Block& one : g) {
          auto list = pointers(l, one);
          if (missing) list[static_cast<size_t>(r)] = list[4] = nullptr;
          ASSERT_OK(ga_accumulate(ctx, list.data(), list.size(), r + 1, nullptr));
        }
        ASSERT_OK(ga_step(ctx, nullptr));
      };
      window(false);
      Graph graph;
      if (captured) graph.capture(stream, [&] { window(true); });
      for (int w = 0; w < 2; ++w) {
        window(false);
        captured ? graph.replay(stream) : window(true);
      }
      window(false);
      const ga_step_result result = result_of(ctx);
      EXPECT_EQ(result.steps, 6);
      EXPECT_EQ(result.micro_batches, 6);
      ended[captured][static_cast<size_t>(r)] = p.get();
    });
    for (int r = 1; r < 3; ++r) EXPECT_TRUE(same_bits(ended[captured][r], ended[captured][0]));
  }
  EXPECT_TRUE(same_bits(ended[0][0], ended[1][0]));
}

// Gradients that are ready are exchanged before ga_step is called, by calls and in a graph; one rank tells
// that they are, the other does not.
TEST_F(CudaRanks, ReadyGradientsTravelAtOnce) {
  const Layout l = layout();
  Block ended[3];
  for (const int way : {0, 1, 2}) {  // without overlap, with it, in a graph
    std::atomic<int> begun{0};
    on_devices(2, [&](int32_t r, ga_comm* comm, const Stream& stream) {
      const Parameters p(parameters(l, 3));
      const Block g = gradients(l, 5, static_cast<uint64_t>(r));
      ga_config c = config();
      c.accum_steps = 1;
      Context ctx(on(c, stream));
      add_all(ctx, ctx.group(optimizer(GA_OPTIMIZER_ADAMW)), l, p.data());
      ga_comm_options o = comm_options();
      o.overlap = way > 0;
      ASSERT_OK(ga_context_set_comm(ctx, comm, &o));
      const auto window = [&] {
        const auto list = pointers(l, g);
        ASSERT_OK(ga_micro_begin(ctx, -1, r + 1, nullptr));
        for (size_t i = list.size(); i-- > 0;) {
          const auto id = static_cast<ga_param>(i);
          ASSERT_OK(ga_accumulate_part(ctx, id, list[i]));
          ASSERT_OK(ga_params_ready(ctx, &id, r == 0 ? 1 : 0));
        }
        ASSERT_OK(ga_micro_end(ctx));
      };
      window();
      for (++begun; begun < 2;) std::this_thread::yield();
      const int64_t calls = ga_fake_nccl_calls("ncclAllReduce");
      EXPECT_EQ(calls > 0, way > 0) << "of a rank whose gradients are ready";
      for (++begun; begun < 4;) std::this_thread::yield();
      ASSERT_OK(ga_step(ctx, nullptr));
      Graph graph;
      const auto all = [&] {
        window();
        ASSERT_OK(ga_step(ctx, nullptr));
      };
      if (way == 2) graph.capture(stream, all);
      for (int w = 0; w < 2; ++w) way == 2 ? graph.replay(stream) : all();
      EXPECT_EQ(result_of(ctx).steps, 3);
      if (r == 0) ended[way] = p.get();
    });
    ga_fake_nccl_reset();
  }
  EXPECT_TRUE(same_bits(ended[0], ended[1]));
  EXPECT_TRUE(same_bits(ended[0], ended[2]));
}

// Gradients of some rows do not travel before ga_step has made them gradients of all rows, ready or not.
TEST_F(CudaRanks, RowsThatAreReadyWaitForTheStep) {
  for (const int64_t rows : {4, 50000})  // packed, and as they lie
    on_devices(2, [&](int32_t r, ga_comm* comm, const Stream& stream) {
      const auto count = static_cast<size_t>(3 * rows);
      const Parameters p(count);
      const std::vector<float> g(count, 1);
      Context ctx(on(config(), stream));
      ga_param_options o = options();
      o.rows = GA_ROWS_DENSE;
      const ga_param id = ctx.param(ctx.group(plain_sgd()), "p", p.data(), ref::Shape{rows, 3}, &o);
      ga_comm_options overlapped = comm_options();
      overlapped.overlap = 1;
      ASSERT_OK(ga_context_set_comm(ctx, comm, &overlapped));
      for (const bool whole : {true, false}) {
        ASSERT_OK(ga_micro_begin(ctx, -1, 1, MicroOptions(0, GA_MICRO_LAST)));
        if (whole) {
          ASSERT_OK(ga_accumulate_part(ctx, id, g.data()));
        } else {
          const int32_t row = r;
          ASSERT_OK(ga_accumulate_rows(ctx, id, &row, GA_I32, 1, g.data()));
        }
        ASSERT_OK(ga_params_ready(ctx, &id, 1));
        ASSERT_OK(ga_micro_end(ctx));
        ASSERT_OK(ga_step(ctx, nullptr));
        EXPECT_EQ(result_of(ctx).outcome, GA_STEP_APPLIED);
        EXPECT_EQ(cudaPeekAtLastError(), cudaSuccess) << "the wait leaves no error";
      }
      Block want(count, -1);
      std::fill(want.begin(), want.begin() + 6, -1.5f);
      EXPECT_EQ(p.get(), want);
    });
}

// What a graph cannot hold is refused before anything has changed.
TEST_F(CudaRanks, WhatAGraphCannotHold) {
  on_devices(2, [&](int32_t, ga_comm* comm, const Stream& stream) {
    const Parameters p(9);
    std::vector<float> g(9, 1);
    Context ctx(on(config(), stream));
    const ga_group group = ctx.group(plain_sgd());
    const ga_param id = ctx.param(group, "p", p.data(), 9);
    ASSERT_OK(ga_context_set_comm(ctx, comm, nullptr));
    ctx.accumulate({g.data()});
    ASSERT_OK(ga_step(ctx, nullptr));
    ASSERT_OK(ga_param_set_frozen(ctx, id, 1));
    Graph graph;
    graph.capture(stream, [&] {
      expect_failure(ga_step(ctx, nullptr), "have to agree", GA_ERROR_INVALID_STATE);
    });
    ASSERT_OK(ga_param_set_frozen(ctx, id, 0));
    ctx.accumulate({g.data()});
    ASSERT_OK(ga_step(ctx, nullptr));
    EXPECT_EQ(result_of(ctx).steps, 2);
    EXPECT_EQ(p[0], -2);
  });
}

// ---- Outcomes of all ranks ----------------------------------------------------------------------------

// The ranks' counts stay alike, also those of the rank that discards.
TEST_F(CudaRanks, WhereOneDiscardsNoneSteps) {
  on_devices(3, [&](int32_t r, ga_comm* comm, const Stream& stream) {
    const Parameters p(50000);
    std::vector<float> g(50000, 1);
    Context ctx(on(config(), stream));
    const ga_param id = ctx.param(ctx.group(plain_sgd()), "p", p.data(), 50000);
    ga_comm_options o = comm_options();
    o.overlap = 1;
    ASSERT_OK(ga_context_set_comm(ctx, comm, &o));
    for (const int32_t who : {1, 2}) {
      const void* const list[] = {g.data()};
      ASSERT_OK(ga_accumulate(ctx, list, 1, 1, MicroOptions(0, GA_MICRO_LAST)));
      ASSERT_OK(ga_params_ready(ctx, &id, r == who ? 1 : 0));
      ASSERT_OK(r == who ? ga_discard(ctx) : ga_step(ctx, nullptr));
      EXPECT_EQ(result_of(ctx).outcome, GA_STEP_SKIPPED_DISCARD);
      EXPECT_EQ(result_of(ctx).skipped, who);
      EXPECT_EQ(p[0], 0);
    }
    ctx.accumulate({g.data()});
    ASSERT_OK(ga_step(ctx, nullptr));
    const ga_step_result result = result_of(ctx);
    EXPECT_EQ(result.outcome, GA_STEP_APPLIED);
    EXPECT_EQ(result.windows, 3);
    EXPECT_EQ(p[0], -1);
  });
}

// Where ranks exchange what they update too: the one that discards takes part.
TEST_F(CudaRanks, WhereOneDiscardsNothingIsUpdated) {
  for (const int32_t kind : {GA_OPTIMIZER_ADAMW, GA_OPTIMIZER_MUON})
    for (const int32_t shard : {GA_SHARD_NONE, GA_SHARD_OPTIMIZER})
      on_devices(
          2,
          [&](int32_t r, ga_comm* comm, const Stream& stream) {
            const Parameters p(70000);
            std::vector<float> g(70000, 1);
            Context ctx(on(config(), stream));
            ctx.param(ctx.group(optimizer(kind)), "p", p.data(), ref::Shape{700, 100});
            ga_comm_options o = comm_options();
            o.shard = shard;
            ASSERT_OK(ga_context_set_comm(ctx, comm, &o));
            for (const bool discards : {true, false, true}) {
              const Block before = p.get();
              ctx.accumulate({g.data()});
              ASSERT_OK(discards && r == 1 ? ga_discard(ctx) : ga_step(ctx, nullptr));
              EXPECT_EQ(result_of(ctx).outcome,
                        discards ? GA_STEP_SKIPPED_DISCARD : GA_STEP_APPLIED);
              EXPECT_EQ(p.get() == before, discards);
            }
          },
          5);
}

// The result of such a window has nothing of what the ranks had brought, and a micro-batch that one of them had
// dropped moves no loss scale and is not counted.
TEST_F(CudaRanks, ADiscardedWindowHasNoMicroBatches) {
  on_devices(2, [&](int32_t r, ga_comm* comm, const Stream& stream) {
    ga_config c = config();
    c.nonfinite = GA_NONFINITE_DROP_MICRO;
    const Parameters p(3);
    Context ctx(on(c, stream));
    ctx.param(ctx.group(plain_sgd()), "p", p.data(), 3);
    ga_loss_scaler scaler;
    ASSERT_OK(ga_loss_scaler_init(&scaler, sizeof scaler));
    scaler.initial_scale = 8;
    scaler.growth_interval = 1;
    ASSERT_OK(ga_context_set_loss_scaler(ctx, &scaler));
    ASSERT_OK(ga_context_set_comm(ctx, comm, nullptr));
    const std::vector<float> bad(3, NAN), good(3, 8);
    ctx.accumulate({bad.data()});
    ctx.accumulate({good.data()});
    ASSERT_OK(r == 1 ? ga_discard(ctx) : ga_step(ctx, nullptr));
    const ga_step_result discarded = result_of(ctx);
    EXPECT_EQ(discarded.outcome, GA_STEP_SKIPPED_DISCARD);
    EXPECT_EQ(discarded.micro_batches, 0);
    EXPECT_EQ(discarded.weight, 0);
    EXPECT_EQ(discarded.window_dropped, 0);
    EXPECT_EQ(discarded.dropped_micros, 0u);
    EXPECT_EQ(discarded.dropped, 0);
    EXPECT_EQ(discarded.skipped, 1);
    double scale = 0;
    ASSERT_OK(ga_loss_scale(ctx, &scale, nullptr));
    EXPECT_EQ(scale, 8);
    ctx.accumulate({good.data()});
    ASSERT_OK(ga_step(ctx, nullptr));
    const ga_step_result applied = result_of(ctx);
    EXPECT_EQ(applied.outcome, GA_STEP_APPLIED);
    EXPECT_EQ(applied.micro_batches, 2);
    EXPECT_EQ(applied.weight, 2);
    EXPECT_EQ(applied.dropped_micros, 0u);
    EXPECT_EQ(applied.dropped, 0);
    EXPECT_EQ(p[0], -1);
    ASSERT_OK(ga_loss_scale(ctx, &scale, nullptr));
    EXPECT_EQ(scale, 16);
  });
}

// A window that ga_step has refused is discarded by all, and moves the loss scale of all.
TEST_F(CudaRanks, ARefusedWindowIsDiscarded) {
  on_devices(2, [&](int32_t r, ga_comm* comm, const Stream& stream) {
    ga_config c = config();
    c.nonfinite = GA_NONFINITE_FAIL;
    const Parameters p(3);
    std::vector<float> g(3, r == 1 ? INFINITY : 1.0f);
    Context ctx(on(c, stream));
    ctx.param(ctx.group(plain_sgd()), "p", p.data(), 3);
    ga_loss_scaler scaler;
    ASSERT_OK(ga_loss_scaler_init(&scaler, sizeof scaler));
    scaler.initial_scale = 8;
    ASSERT_OK(ga_context_set_loss_scaler(ctx, &scaler));
    ASSERT_OK(ga_context_set_comm(ctx, comm, nullptr));
    ctx.accumulate({g.data()});
    expect_failure(ga_step(ctx, nullptr), "infinite or NaN", GA_ERROR_NONFINITE);
    ASSERT_OK(ga_discard(ctx));
    double scale = 0;
    ASSERT_OK(ga_loss_scale(ctx, &scale, nullptr));
    EXPECT_EQ(scale, 4);
    g.assign(3, 4);
    ctx.accumulate({g.data()});
    ASSERT_OK(ga_step(ctx, nullptr));
    EXPECT_EQ(result_of(ctx).steps, 1);
    EXPECT_EQ(p[0], -1);
  });
}

// Settings that differ are found on the device, and named by the next call that waits for all.
TEST_F(CudaRanks, SettingsThatDiffer) {
  on_devices(2, [&](int32_t r, ga_comm* comm, const Stream& stream) {
    const Parameters p(3);
    std::vector<float> g(3, 1);
    Context ctx(on(config(), stream));
    const ga_group group = ctx.group(plain_sgd());
    ctx.param(group, "p", p.data(), 3);
    ASSERT_OK(ga_context_set_comm(ctx, comm, nullptr));
    ASSERT_OK(ga_group_set_weight_decay(ctx, group, r == 1 ? 0.5 : 0));
    ctx.accumulate({g.data()});
    ASSERT_OK(ga_step(ctx, nullptr));
    EXPECT_EQ(result_of(ctx).outcome, GA_STEP_SKIPPED_ERROR);
    EXPECT_EQ(p[0], 0);
    size_t size = 0;
    expect_failure(ga_save_to_memory(ctx, nullptr, nullptr, 0, &size),
                   "weight_decay is 0.5 on rank 1");
    ASSERT_OK(ga_group_set_weight_decay(ctx, group, 0));
    ctx.accumulate({g.data()});
    ASSERT_OK(ga_step(ctx, nullptr));
    EXPECT_EQ(result_of(ctx).outcome, GA_STEP_APPLIED);
  });
}

TEST_F(CudaRanks, AParameterThatIsFrozenOnAllRanks) {
  on_devices(2, [&](int32_t, ga_comm* comm, const Stream& stream) {
    const Parameters p(3), q(3);
    std::vector<float> g(3, 1);
    Context ctx(on(config(), stream));
    const ga_group group = ctx.group(plain_sgd());
    const ga_param id = ctx.param(group, "p", p.data(), 3);
    ctx.param(group, "q", q.data(), 3);
    ASSERT_OK(ga_context_set_comm(ctx, comm, nullptr));
    for (const int32_t frozen : {0, 1, 0}) {
      ASSERT_OK(ga_param_set_frozen(ctx, id, frozen));
      ctx.accumulate({g.data(), g.data()});
      ASSERT_OK(ga_step(ctx, nullptr));
    }
    ASSERT_OK(ga_synchronize(ctx));
    EXPECT_EQ(p[0], -2);
    EXPECT_EQ(q[0], -3);
  });
}

// A graph has not the settings of its capture: one that has been changed on one rank is found in a replay.
TEST_F(CudaRanks, ReplaysCompareSettings) {
  on_devices(2, [&](int32_t r, ga_comm* comm, const Stream& stream) {
    const Parameters p(3);
    std::vector<float> g(3, 1);
    Context ctx(on(config(), stream));
    const ga_group group = ctx.group(plain_sgd());
    ctx.param(group, "p", p.data(), 3);
    ASSERT_OK(ga_context_set_comm(ctx, comm, nullptr));
    const auto window = [&] {
      ctx.accumulate({g.data()});
      ASSERT_OK(ga_step(ctx, nullptr));
    };
    window();
    Graph graph;
    graph.capture(stream, window);
    for (const bool differ : {true, false}) {
      ASSERT_OK(ga_group_set_lr(ctx, group, differ && r == 1 ? 0.25 : 0.5));
      graph.replay(stream);
      EXPECT_EQ(result_of(ctx).outcome, differ ? GA_STEP_SKIPPED_ERROR : GA_STEP_APPLIED);
      EXPECT_EQ(p[0], differ ? -1 : -1.5);
    }
  });
}

// The ranks freeze different parameters in the same window.
TEST_F(CudaRanks, WhatRanksFreezeIsCompared) {
  on_devices(2, [&](int32_t r, ga_comm* comm, const Stream& stream) {
    const Parameters p(3), q(70000);
    std::vector<float> g(70000, 1);
    Context ctx(on(config(), stream));
    const ga_group group = ctx.group(plain_sgd());
    const ga_param ids[] = {ctx.param(group, "p", p.data(), 3),
                            ctx.param(group, "q", q.data(), 70000)};
    ASSERT_OK(ga_context_set_comm(ctx, comm, nullptr));
    ASSERT_OK(ga_param_set_frozen(ctx, ids[r], 1));
    ctx.accumulate({g.data(), g.data()});
    expect_failure(ga_step(ctx, nullptr),
                   "of \"parameter.p\", frozen is 0 on rank 1, but 1 on rank 0");
    ASSERT_OK(ga_discard(ctx));
    ASSERT_OK(ga_param_set_frozen(ctx, ids[r], 0));
    ctx.accumulate({g.data(), g.data()});
    ASSERT_OK(ga_step(ctx, nullptr));
    EXPECT_EQ(result_of(ctx).steps, 1);
    EXPECT_EQ(p[0], -1);
    EXPECT_EQ(q[0], -1);
  });
}

// What a rank had in its accumulators from an earlier window does not come back where it drops all it has.
TEST_F(CudaRanks, ADroppedMicroBatchLeavesNothing) {
  for (const int32_t accumulation : {GA_ACCUMULATE_PLAIN, GA_ACCUMULATE_RUNNING_MEAN})
    on_devices(2, [&](int32_t r, ga_comm* comm, const Stream& stream) {
      constexpr int64_t kCounts[] = {300001, 3};  // one that travels as it lies, if it is a sum
      const Parameters p(static_cast<size_t>(kCounts[0])), q(static_cast<size_t>(kCounts[1]));
      std::vector<float> g(static_cast<size_t>(kCounts[0]), 1);
      ga_config c = config();
      c.nonfinite = GA_NONFINITE_DROP_MICRO;
      c.accumulation = accumulation;
      Context ctx(on(c, stream));
      const ga_group group = ctx.group(plain_sgd());
      ctx.param(group, "p", p.data(), kCounts[0]);
      ctx.param(group, "q", q.data(), kCounts[1]);
      ASSERT_OK(ga_context_set_comm(ctx, comm, nullptr));
      for (const float weight : {1.0f, 2.0f}) {
        const float bad = weight == 2 && r == 1 ? NAN : 1;
        g[0] = bad;
        const void* const list[] = {g.data(), g.data()};
        ASSERT_OK(ga_accumulate(ctx, list, 2, weight, nullptr));
        ASSERT_OK(ga_step(ctx, nullptr));
        const ga_step_result result = result_of(ctx);
        EXPECT_EQ(result.outcome, GA_STEP_APPLIED);
        EXPECT_EQ(result.weight, 2);  // of two ranks, then of one
      }
      EXPECT_EQ(p.get(), Block(static_cast<size_t>(kCounts[0]), -2));
      EXPECT_EQ(q.get(), Block(static_cast<size_t>(kCounts[1]), -2));
    });
}

// Nor zeros, which would be the largest number.
TEST_F(CudaRanks, ADroppedMicroBatchHasNoMaximum) {
  on_devices(2, [&](int32_t r, ga_comm* comm, const Stream& stream) {
    constexpr int64_t kCounts[] = {300001, 3};
    const Parameters p(static_cast<size_t>(kCounts[0])), q(static_cast<size_t>(kCounts[1])), w(1);
    std::vector<float> g(static_cast<size_t>(kCounts[0]), static_cast<float>(-2 + r));
    ga_config c = config();
    c.nonfinite = GA_NONFINITE_DROP_MICRO;
    Context ctx(on(c, stream));
    ga_param_options o = options();
    o.reduce = GA_REDUCE_MAX;
    const ga_group group = ctx.group(optimizer(GA_OPTIMIZER_EXTERNAL));
    const ga_param ids[] = {ctx.param(group, "p", p.data(), ref::Shape{kCounts[0]}, &o),
                            ctx.param(group, "q", q.data(), ref::Shape{kCounts[1]}, &o)};
    ctx.param(ctx.group(plain_sgd()), "w", w.data(), 1);
    ASSERT_OK(ga_context_set_comm(ctx, comm, nullptr));
    const float good = 1, bad = r == 1 ? NAN : 1;
    for (const bool drops : {false, true}) {
      ctx.accumulate({g.data(), g.data(), drops ? &bad : &good});
      ASSERT_OK(ga_step(ctx, nullptr));
      EXPECT_EQ(result_of(ctx).weight, drops ? 1 : 2);
      for (size_t i = 0; i < 2; ++i)
        EXPECT_EQ(external_gradient(ctx, ids[i], kCounts[i]),
                  std::vector<double>(static_cast<size_t>(kCounts[i]), drops ? -2 : -1));
    }
  });
}

TEST_F(CudaRanks, AFileLoadsOnOtherDevices) {
  const Layout l = layout();
  std::vector<char> file;
  std::vector<Block> ended(3);
  const auto build_and = [&](ga_comm* comm, const Stream& stream, Block& block, auto&& body) {
    const Parameters p(parameters(l, 3));
    Context ctx(on(config(), stream));
    add_all(ctx, ctx.group(optimizer(GA_OPTIMIZER_ADAMW)), l, p.data());
    ga_comm_options o = comm_options();
    o.shard = GA_SHARD_OPTIMIZER;
    ASSERT_OK(ga_context_set_comm(ctx, comm, &o));
    body(ctx);
    block = p.get();
  };
  const auto window = [&](ga_context* ctx, int32_t r) {
    const Block g = gradients(l, 5, static_cast<uint64_t>(r));
    ASSERT_OK(ga_accumulate(ctx, pointers(l, g).data(), l.size(), 1, nullptr));
    ASSERT_OK(ga_step(ctx, nullptr));
    ASSERT_OK(ga_synchronize(ctx));
  };
  on_devices(3, [&](int32_t r, ga_comm* comm, const Stream& stream) {
    build_and(comm, stream, ended[static_cast<size_t>(r)], [&](ga_context* ctx) {
      window(ctx, 0);
      size_t size = 0;
      ASSERT_OK(ga_save_to_memory(ctx, nullptr, nullptr, 0, &size));
      std::vector<char> own(size);
      ASSERT_OK(ga_save_to_memory(ctx, nullptr, own.data(), own.size(), &size));
      if (r == 0) file = own;
      window(ctx, 0);
    });
  });
  on_devices(2, [&](int32_t, ga_comm* comm, const Stream& stream) {
    Block block;
    build_and(comm, stream, block, [&](ga_context* ctx) {
      ASSERT_OK(ga_load_from_memory(ctx, file.data(), file.size(), nullptr));
      window(ctx, 0);
    });
    EXPECT_LT(distance(l, block, ended[0]), 1e-6);
  });
}

// ---- Failures -------------------------------------------------------------------------------------------

// Every failure ends the context, and none of its calls waits for ever, ga_context_destroy included.
struct Failure {
  const char* name;
  std::function<void()> begin;  // before the window
  const char* words;
  bool at_once;  // ga_step finds it, not the wait after it
};
class CudaRanksFailures : public CudaRanks, public testing::WithParamInterface<Failure> {};

TEST_P(CudaRanksFailures, EndTheContext) {
  for (const int way : {0, 1, 2, 3}) {
    const bool deferred = way % 2 != 0, waits = way < 2;  // else the context is destroyed at once
    use(deferred);
    std::atomic<int> ready{0};
    on_devices(
        2,
        [&](int32_t r, ga_comm* comm, const Stream& stream) {
          const Parameters p(50000);
          std::vector<float> g(50000, 1);
          Context ctx(on(config(), stream));
          ctx.param(ctx.group(plain_sgd()), "p", p.data(), 50000);
          ASSERT_OK(ga_context_set_comm(ctx, comm, nullptr));
          ctx.accumulate({g.data()});
          ASSERT_OK(ga_step(ctx, nullptr));
          ASSERT_OK(ga_synchronize(ctx));
          ++ready;
          while (ready < 2) std::this_thread::yield();
          if (r == 0) GetParam().begin();
          ++ready;
          while (ready < 4) std::this_thread::yield();
          ctx.accumulate({g.data()});
          const ga_status stepped = ga_step(ctx, nullptr);
          EXPECT_EQ(stepped != GA_OK, GetParam().at_once);
          if (!waits) return;
          expect_failure(stepped == GA_OK ? ga_synchronize(ctx) : stepped, GetParam().words);
          expect_failure(ga_discard(ctx), GetParam().words);
          expect_failure(ga_step(ctx, nullptr), GetParam().words);
        },
        0.3);
    ga_fake_nccl_reset();
  }
}

INSTANTIATE_TEST_SUITE_P(All, CudaRanksFailures,
                         testing::Values(Failure{"a_collective_hangs", [] { ga_fake_nccl_hang(1); },
                                                 "waited 0.3 s for the other ranks", false},
                                         Failure{"gradients_hang", [] { ga_fake_nccl_hang(3); },
                                                 "waited 0.3 s for the other ranks", false},
                                         Failure{"an_error_comes_late",
                                                 [] {
                                                   ga_fake_nccl_async_error(0, ncclRemoteError);
                                                   ga_fake_nccl_async_error(1, ncclRemoteError);
                                                 },
                                                 "NCCL returned 6", true}),
                         [](const auto& info) { return info.param.name; });

// A call that NCCL refuses leaves the parameters, and the window is lost.
TEST_F(CudaRanks, ACallThatNcclRefuses) {
  on_devices(
      1,
      [&](int32_t, ga_comm* comm, const Stream& stream) {
        const Parameters p(50000);
        std::vector<float> g(50000, 1);
        Context ctx(on(config(), stream));
        ctx.param(ctx.group(plain_sgd()), "p", p.data(), 50000);
        ASSERT_OK(ga_context_set_comm(ctx, comm, nullptr));
        ctx.accumulate({g.data()});
        ga_fake_nccl_fail("ncclAllReduce", 1, ncclSystemError);
        expect_failure(ga_step(ctx, nullptr), "gradients: NCCL returned 2");
        EXPECT_EQ(p[0], 0);
        ASSERT_OK(ga_discard(ctx));
        ASSERT_OK(ga_context_set_comm(ctx, nullptr, nullptr));
        ctx.accumulate({g.data()});
        ASSERT_OK(ga_step(ctx, nullptr));
        ASSERT_OK(ga_synchronize(ctx));
        EXPECT_EQ(p[0], -1);
      },
      0.3);
}

// Every call that waits looks after what is exchanged, also where another communicator has come in between.
TEST_F(CudaRanks, NoCallWaitsForEver) {
  enum Waits { kRejecting, kReading, kReplaced, kRefused };
  for (const Waits how : {kRejecting, kReading, kReplaced, kRefused}) {
    unsigned char id[GA_COMM_ID_SIZE];
    ASSERT_OK(ga_comm_unique_id(GA_COMM_NCCL, id, sizeof id));
    on_devices(
        2,
        [&](int32_t r, ga_comm* comm, const Stream& stream) {
          const Parameters p(3);
          std::vector<float> g(3, 1);
          ga_config c = config();
          c.nonfinite = how == kRejecting ? GA_NONFINITE_FAIL : GA_NONFINITE_SKIP_STEP;
          Context ctx(on(c, stream));
          const ga_param param =
              ctx.param(ctx.group(optimizer(GA_OPTIMIZER_ADAM)), "p", p.data(), 3);
          ASSERT_OK(ga_context_set_comm(ctx, comm, nullptr));
          ga_comm_config another = comm_config(GA_COMM_NCCL);
          another.rank = r;
          another.ranks = 2;
          another.timeout = 0.3;
          another.id = id;
          const Comm second(another);
          ga_comm_options o = comm_options();
          o.wire = how == kRefused && r == 1 ? GA_COMM_WIRE_BF16 : GA_COMM_WIRE_EXACT;
          if (how == kRefused) {
            expect_failure(ga_context_set_comm(ctx, second, &o), "differ");
          } else if (how == kReplaced) {
            ASSERT_OK(ga_context_set_comm(ctx, second, &o));
          }
          ctx.accumulate({g.data()});
          ASSERT_OK(ga_step(ctx, nullptr));
          ASSERT_OK(ga_synchronize(ctx));
          if (r == 1) return;  // the other rank comes alone
          ctx.accumulate({g.data()});
          const ga_status stepped = ga_step(ctx, nullptr);
          EXPECT_EQ(stepped != GA_OK, how == kRejecting);
          float state[3];
          expect_failure(stepped != GA_OK  ? stepped
                         : how == kReading ? ga_state_get(ctx, param, "exp_avg", state, GA_F32, 3)
                                           : ga_synchronize(ctx),
                         "waited 0.3 s for the other ranks");
        },
        0.3);
    ga_fake_nccl_reset();
  }
}

// Many windows that are queued take longer than the timeout, but none of them waits that long.
TEST_F(CudaRanks, OnlyAWindowThatStandsStillIsLate) {
  use(true);
  on_devices(
      2,
      [&](int32_t, ga_comm* comm, const Stream& stream) {
        const Parameters p(3);
        std::vector<float> g(3, 1);
        Context ctx(on(config(), stream));
        ctx.param(ctx.group(plain_sgd()), "p", p.data(), 3);
        ASSERT_OK(ga_context_set_comm(ctx, comm, nullptr));
        for (int w = 0; w < 40; ++w) {
          ctx.accumulate({g.data()});
          EXPECT_CUDA(cudaLaunchHostFunc(
              stream, [](void*) { std::this_thread::sleep_for(std::chrono::milliseconds(20)); },
              nullptr));
          ASSERT_OK(ga_step(ctx, nullptr));
        }
        EXPECT_OK(ga_synchronize(ctx));
        EXPECT_EQ(p[0], -40);
      },
      0.5);
}

TEST_F(CudaRanks, AveragesAreCopiedPieceByPiece) {
  use(true);
  on_devices(2, [&](int32_t, ga_comm* comm, const Stream& stream) {
    constexpr size_t kCount = 700001;
    const Parameters p(kCount), out(kCount);
    std::vector<float> g(kCount);
    for (size_t j = 0; j < kCount; ++j) g[j] = static_cast<float>(j % 1000);
    Context ctx(on(config(), stream));
    const ga_param id = ctx.param(ctx.group(plain_sgd()), "p", p.data(), int64_t{kCount});
    ga_ema ema;
    ASSERT_OK(ga_ema_init(&ema, sizeof ema));
    ASSERT_OK(ga_context_set_ema(ctx, &ema));
    ga_comm_options o = comm_options();
    o.shard = GA_SHARD_OPTIMIZER;
    ASSERT_OK(ga_context_set_comm(ctx, comm, &o));
    ctx.accumulate({g.data()});
    ASSERT_OK(ga_step(ctx, nullptr));
    ASSERT_OK(ga_ema_copy_to(ctx, id, out.data(), GA_F32));
    ASSERT_OK(ga_synchronize(ctx));
    EXPECT_EQ(out.get(), p.get());  // the first average is the parameter
  });
}

TEST_F(CudaRanks, AbortFreesARankThatWaits) {
  on_devices(2, [&](int32_t r, ga_comm* comm, const Stream& stream) {
    const Parameters p(3);
    std::vector<float> g(3, 1);
    Context ctx(on(config(), stream));
    ctx.param(ctx.group(plain_sgd()), "p", p.data(), 3);
    ASSERT_OK(ga_context_set_comm(ctx, comm, nullptr));
    if (r == 1) return;  // which the other waits for
    std::thread other([&] {
      std::this_thread::sleep_for(std::chrono::milliseconds(50));
      EXPECT_OK(ga_comm_abort(comm));
    });
    ctx.accumulate({g.data()});
    const ga_status stepped = ga_step(ctx, nullptr);
    expect_failure(stepped == GA_OK ? ga_synchronize(ctx) : stepped, "ga_comm_abort was called");
    other.join();
  });
}

// ---- Refusals -----------------------------------------------------------------------------------------

TEST_F(CudaRanks, WhatIsNotSupported) {
  on_devices(1, [&](int32_t, ga_comm* comm, const Stream& stream) {
    const Parameters p(12);
    {
      Context ctx;
      expect_failure(ga_context_set_comm(ctx, comm, nullptr), "works on the CPU",
                     GA_ERROR_UNSUPPORTED);
    }
    Context ctx(on(config(), stream));
    ga_param_options o = options(GA_F32, GA_F32);
    o.rows = GA_ROWS_LAZY;
    ctx.param(ctx.group(plain_sgd()), "p", p.data(), ref::Shape{4, 3}, &o);
    expect_failure(ga_context_set_comm(ctx, comm, nullptr), "GA_ROWS_LAZY", GA_ERROR_UNSUPPORTED);
  });
}

// NCCL takes the device that is current when the rank joins, which need not be the context's.
TEST_F(CudaRanks, OfAnotherDevice) {
  on_devices(1, [&](int32_t, ga_comm* comm, const Stream&) {
    EXPECT_CUDA(cudaSetDevice(1));
    const Parameters p(3);
    EXPECT_CUDA(cudaSetDevice(0));
    const Stream stream(1);
    Context ctx(on(config(), stream));
    ctx.param(ctx.group(plain_sgd()), "p", p.data(), 3);
    for (const char* words : {"CUDA device 0", "device_ordinal was 1"})
      expect_failure(ga_context_set_comm(ctx, comm, nullptr), words, GA_ERROR_INVALID_ARGUMENT);
    const float g[] = {1, 1, 1};
    ctx.accumulate({g});
    ASSERT_OK(ga_step(ctx, nullptr));
    EXPECT_EQ(result_of(ctx).outcome, GA_STEP_APPLIED);
    EXPECT_EQ(p.get(), Block(3, -1));
    const Stream own(0);
    Context right(on(config(), own));  // the communicator is still free
    ASSERT_OK(ga_context_set_comm(right, comm, nullptr));
  });
}

// Nor does a lazy parameter come later, alone or in a block. On the CPU it is legal.
TEST_F(CudaRanks, ALazyParameterThatComesLater) {
  const auto add = [](Context& ctx, float* data, int32_t rows) {
    ga_param_options o = options(GA_F32, GA_F32);
    o.rows = rows;
    const int64_t shape[] = {4, 3};
    return ga_param_add(ctx, 0, "e", data, GA_F32, 2, shape, &o, nullptr);
  };
  const auto expect_refusals = [&](Context& ctx, float* data) {
    expect_failure(add(ctx, data, GA_ROWS_LAZY), "\"e\": rows was GA_ROWS_LAZY",
                   GA_ERROR_UNSUPPORTED);
    const ga_param_options dense = options(GA_F32, GA_F32);
    ga_param_options lazy = dense;
    lazy.rows = GA_ROWS_LAZY;
    const int64_t shape[] = {2, 3};
    ga_flat_entry entries[2] = {{sizeof *entries, "a", 0, 2, shape, 0, nullptr},
                                {sizeof *entries, "b", 0, 2, shape, 6, &lazy}};
    expect_failure(ga_params_add_flat(ctx, data, GA_F32, entries, 2, &dense, nullptr),
                   "\"b\": rows was GA_ROWS_LAZY", GA_ERROR_UNSUPPORTED);
    int32_t count = -1;
    ASSERT_OK(ga_param_count(ctx, &count));
    EXPECT_EQ(count, 1);
  };
  on_devices(1, [&](int32_t, ga_comm* comm, const Stream& stream) {
    const Parameters p(3), e(12);
    const float g[12] = {1, 1, 1};
    Context ctx(on(config(), stream));
    ctx.param(ctx.group(plain_sgd()), "p", p.data(), 3);
    ASSERT_OK(ga_context_set_comm(ctx, comm, nullptr));
    expect_refusals(ctx, e.data());
    ASSERT_OK(add(ctx, e.data(), GA_ROWS_DENSE));
    ctx.accumulate({g, g});
    ASSERT_OK(ga_step(ctx, nullptr));
    EXPECT_EQ(result_of(ctx).steps, 1);
    EXPECT_EQ(e[0], -1);
    // Nor without a communicator that it would be too late for.
    ASSERT_OK(ga_param_remove(ctx, 1));
    ASSERT_OK(ga_context_set_comm(ctx, nullptr, nullptr));
    ASSERT_OK(add(ctx, e.data(), GA_ROWS_LAZY));
    expect_failure(ga_context_set_comm(ctx, comm, nullptr), "GA_ROWS_LAZY", GA_ERROR_UNSUPPORTED);
  });
  on_ranks(1, [&](int32_t, ga_comm* comm) {  // by way of the host
    const Stream stream(0);
    const Parameters p(3), e(12);
    Context ctx(on(config(), stream));
    ctx.param(ctx.group(plain_sgd()), "p", p.data(), 3);
    ASSERT_OK(ga_context_set_comm(ctx, comm, nullptr));
    expect_refusals(ctx, e.data());
  });
  on_ranks(1, [&](int32_t, ga_comm* comm) {
    std::vector<float> p(3), e(12);
    Context ctx;
    ctx.param(ctx.group(plain_sgd()), "p", p.data(), 3);
    ASSERT_OK(ga_context_set_comm(ctx, comm, nullptr));
    ASSERT_OK(add(ctx, e.data(), GA_ROWS_LAZY));
  });
}

}  // namespace
}  // namespace ga::test
