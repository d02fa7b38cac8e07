// SPDX-License-Identifier: Apache-2.0
//
// Batch normalisation in WINDOW mode over several ranks: what the ranks compute together is what one
// batch of all samples gives, with the same bits where ranks compute the same, and the order of the
// collective calls, their failures and what a failure leaves behind.
#include <atomic>
#include <chrono>
#include <optional>
#include <stdexcept>

#include "batchnorm.hpp"
#include "ranks.hpp"

namespace ga::test {
namespace {

constexpr ga_status kState = GA_ERROR_INVALID_STATE;
constexpr ga_status kOthers = GA_ERROR_COMMUNICATION;
const ref::BnShape kShape{3, 7, GA_BN_CHANNELS_FIRST};

ga_bn_options windowed(int32_t dtype = GA_F32, int32_t flavor = GA_FLAVOR_TORCH) {
  ga_bn_options o = bn_options(GA_BN_WINDOW, flavor);
  o.dtype = dtype;
  return o;
}

// A layer on one of several ranks.
class RankNet : public BnNet {
 public:
  explicit RankNet(ga_comm* comm, const ref::BnShape& shape = kShape,
                   const ga_bn_options& o = windowed(), const ga_config& c = config(),
                   bool affine = true, const ga_comm_options* comm_options = nullptr)
      : BnNet(shape, o, c, affine) {
    finalize_sums = true;
    EXPECT_OK(ga_context_set_comm(ctx, comm, comm_options));
  }

  ga_status finalize() { return ga_bn_finalize(ctx, bn); }
  ga_status sums_finalize() { return ga_bn_backward_finalize(ctx, bn); }
  void take_all(const BnWindow& window) {
    for (const BnData& m : window) take(m);
  }
  void sum_all(const BnWindow& window) {
    for (size_t k = 0; k < window.size(); ++k) in_micro(k, window[k], [&] { sum(window[k]); });
  }
};

// The parts of a window, one for each rank, of so many micro-batches.
std::vector<BnWindow> shares_of(const BnWindow& window, const std::vector<size_t>& counts) {
  std::vector<BnWindow> shares;
  auto at = window.begin();
  for (const size_t n : counts) {
    shares.emplace_back(at, at + static_cast<ptrdiff_t>(n));
    at += static_cast<ptrdiff_t>(n);
  }
  EXPECT_TRUE(at == window.end());
  return shares;
}

// ---- The promise --------------------------------------------------------------------------------

struct Setting {
  ref::BnShape shape;
  ga_bn_options options;
  ga_config config;
  bool affine;
};

// What a rank has computed in each window.
struct Ended {
  std::vector<BnOutput> outputs;
  std::vector<Running> running;
};

// shares: [window][rank]
std::vector<Ended> run(const Setting& s, const std::vector<std::vector<BnWindow>>& shares) {
  std::vector<Ended> ended(shares[0].size());
  on_ranks(static_cast<int32_t>(ended.size()), [&](int32_t r, ga_comm* comm) {
    Ended& e = ended[static_cast<size_t>(r)];
    RankNet net(comm, s.shape, s.options, s.config, s.affine);
    for (const auto& window : shares) {
      e.outputs.push_back(net.step(window[static_cast<size_t>(r)]));
      e.running.emplace_back(net.ctx, net.bn, s.shape.channels);
    }
  });
  return ended;
}

std::vector<ref::Near> around(const std::vector<double>& values, std::vector<ref::Near> want) {
  for (size_t i = 0; i < want.size(); ++i) want[i] = {values[i], 2 * want[i].tolerance};
  return want;
}

using Case = std::tuple<int32_t, int32_t>;  // layout, dtype

class RanksBatchNorm : public testing::TestWithParam<Case> {
 protected:
  // Runs windows of so many micro-batches on each rank: [window][rank]. Compares with the formula for one
  // batch, and with one context that has all micro-batches.
  void expect_one_batch(const Setting& s, const std::vector<std::vector<size_t>>& counts) {
    static const double weights[] = {1, 4, 0.5, 0, 3}, scales[] = {1, 16, 3, 8, -2};
    std::vector<BnWindow> windows;
    std::vector<std::vector<BnWindow>> shares;
    for (size_t w = 0; w < counts.size(); ++w) {
      std::vector<int64_t> samples;
      for (const size_t n : counts[w])
        for (size_t k = 0; k < n; ++k)
          samples.push_back(1 + static_cast<int64_t>(samples.size() * 2 % 5));
      windows.push_back(bn_window(s.shape, s.options.dtype, samples, w + 1));
      for (size_t k = 0; k < samples.size(); ++k) {
        BnData& m = windows[w][k];
        m.weight = weights[(k + w) % 5];
        m.loss_scale = scales[(k + w) % 5];
        if (m.weight == 0) m.dy.fill(NAN);  // not read
      }
      shares.push_back(shares_of(windows[w], counts[w]));
    }
    const std::vector<Ended> ended = run(s, shares);
    BnNet alone(s.shape, s.options, s.config, s.affine);
    std::vector<ref::BnRunning> moved(static_cast<size_t>(s.shape.channels));
    for (size_t w = 0; w < windows.size(); ++w) {
      SCOPED_TRACE("window " + std::to_string(w));
      BnOutput got;
      got.dgamma = ended[0].outputs[w].dgamma;
      got.dbeta = ended[0].outputs[w].dbeta;
      for (const Ended& e : ended) {
        for (const Tensor& t : e.outputs[w].y) got.y.push_back(t);
        for (const Tensor& t : e.outputs[w].dx) got.dx.push_back(t);
        EXPECT_TRUE(same_bits(e.outputs[w].dgamma, got.dgamma));
        EXPECT_TRUE(same_bits(e.outputs[w].dbeta, got.dbeta));
        EXPECT_TRUE(e.running[w] == ended[0].running[w]);
        for (const auto* list : {&e.outputs[w].y, &e.outputs[w].dx})
          for (const Tensor& t : *list) EXPECT_TRUE(t.canaries());
      }
      const BnOutput one = alone.step(windows[w]);
      alone.expect_right(windows[w], one);
      alone.expect_right(windows[w], got);
      const auto want = ref::batch_norm(
          alone.layer(), bn_micros(windows[w], s.config.gradient_kind), s.options.dtype);
      for (size_t k = 0; k < windows[w].size(); ++k) {
        EXPECT_TRUE(near(got.y[k], around(numbers(one.y[k]), want.y[k])));
        EXPECT_TRUE(near(got.dx[k], around(numbers(one.dx[k]), want.dx[k])));
      }
      for (size_t c = 0; c < moved.size(); ++c) {
        moved[c].move(want.window[c], s.options.momentum, s.options.biased != 0);
        const Running& running = ended[0].running[w];
        EXPECT_TRUE(moved[c].mean.holds(running.mean[c])) << running.mean[c];
        EXPECT_TRUE(moved[c].variance.holds(running.variance[c])) << running.variance[c];
        EXPECT_EQ(running.steps, static_cast<int64_t>(w + 1));
      }
    }
  }

  const int32_t layout_ = std::get<0>(GetParam());
  const int32_t dtype_ = std::get<1>(GetParam());
};

// Uneven parts, ranks without data, micro-batches of several sizes, weights and loss scales, one of weight
// 0 among them; with gamma and beta and without.
TEST_P(RanksBatchNorm, AnySharesAreOneBatch) {
  for (const int32_t kind : {GA_GRADIENT_MEAN, GA_GRADIENT_SUM})
    for (const bool affine : {true, false})
      for (const std::vector<std::vector<size_t>>& counts :
           {std::vector<std::vector<size_t>>{{3}, {1}},
            {{2, 3}, {0, 1}, {4, 0}},
            {{3, 0, 2}, {0, 4, 1}, {1, 1, 1}},
            {{0, 2, 2, 1}, {1, 0, 0, 0}}}) {
        SCOPED_TRACE(testing::Message()
                     << "kind " << kind << ", affine " << affine << ", ranks " << counts[0].size());
        ga_config c = config();
        c.gradient_kind = kind;
        expect_one_batch({{5, 7, layout_}, windowed(dtype_), c, affine}, counts);
      }
}

// The running variance of Keras, gradients that are reduced to a sum, several threads, and so many
// channels that not all of them are in one piece of work.
TEST_P(RanksBatchNorm, OtherOptions) {
  ga_config c = config();
  c.reduce = GA_REDUCE_SUM;
  c.num_threads = 2;
  expect_one_batch({{700, 3, layout_}, windowed(dtype_, GA_FLAVOR_KERAS), c, true},
                   {{2, 0, 1}, {1, 1, 2}});
}

INSTANTIATE_TEST_SUITE_P(All, RanksBatchNorm,
                         testing::Combine(testing::Values(GA_BN_CHANNELS_FIRST,
                                                          GA_BN_CHANNELS_LAST),
                                          testing::Values(GA_F32, GA_F64, GA_F16, GA_BF16)),
                         [](const auto& info) {
                           return std::string(std::get<0>(info.param) ? "Last_" : "First_") +
                                  format(std::get<1>(info.param)).name;
                         });

// A network of two layers, layer by layer, on ranks of which one has no samples.
TEST(RanksBatchNorm, TwoLayersAreThoseOfOneBatch) {
  const TwoLayers whole({12});
  const std::vector<std::vector<int64_t>> cuts = {{3, 2}, {}, {1, 1, 1}, {4}};
  std::vector<std::optional<TwoLayers>> parts(cuts.size());
  on_ranks(static_cast<int32_t>(cuts.size()), [&](int32_t r, ga_comm* comm) {
    int64_t first = 0;
    for (size_t q = 0; q < static_cast<size_t>(r); ++q)
      for (const int64_t n : cuts[q]) first += n;
    parts[static_cast<size_t>(r)].emplace(cuts[static_cast<size_t>(r)], first, comm);
  });
  const auto expect_near = [](const double* got, const double* want, size_t count) {
    for (size_t i = 0; i < count; ++i)
      EXPECT_NEAR(got[i], want[i], TwoLayers::tolerance(want[i])) << i;
  };
  size_t at = 0;
  for (const auto& part : parts) {
    EXPECT_TRUE(same_bits(part->ended, parts[0]->ended));
    const size_t count = part->y[0].size();
    for (size_t t = 0; t < whole.y.size(); ++t) {
      expect_near(part->y[t].data(), whole.y[t].data() + at, count);
      expect_near(part->dx[t].data(), whole.dx[t].data() + at, count);
    }
    at += count;
  }
  EXPECT_EQ(at, 12 * TwoLayers::kSample);
  ASSERT_EQ(parts[0]->ended.size(), whole.ended.size());
  expect_near(parts[0]->ended.data(), whole.ended.data(), whole.ended.size());
}

// Micro-batches that are equal on two ranks are normalised alike, and have the same dx.
TEST(RanksBatchNorm, SameBitsOnAllRanks) {
  for (const int32_t dtype : {GA_F32, GA_F64}) {
    const ref::BnShape shape{33, 5, GA_BN_CHANNELS_LAST};
    const BnWindow same = bn_window(shape, dtype, {3, 2}, 1),
                   other = bn_window(shape, dtype, {7}, 2);
    const std::vector<Ended> ended =
        run({shape, windowed(dtype), config(), true}, {{same, other, same}});
    EXPECT_TRUE(ended[0].outputs[0] == ended[2].outputs[0]);
    EXPECT_TRUE(ended[0].running[0] == ended[1].running[0]);
  }
}

// The only rank of a communicator computes what a context alone does, bit for bit.
TEST(RanksBatchNorm, OneRankIsAContextAlone) {
  const BnWindow window = bn_window(kShape, GA_F32, {2, 3, 1});
  BnNet alone(kShape, windowed());
  const BnOutput want = alone.step(window);
  const std::vector<Ended> ended = run({kShape, windowed(), config(), true}, {{window}});
  EXPECT_TRUE(ended[0].outputs[0] == want);
  EXPECT_TRUE(ended[0].running[0] == Running(alone.ctx, alone.bn, 3));
}

// Ranks merge their statistics and sums as a context alone merges those of its micro-batches: in order.
TEST(RanksBatchNorm, AMicroBatchOnEachRankHasTheBitsOfAContextAlone) {
  const ref::BnShape shape{33, 5, GA_BN_CHANNELS_FIRST};
  for (const int32_t dtype : {GA_F32, GA_F64}) {
    const BnWindow window = bn_window(shape, dtype, {3, 7, 1, 4});
    BnNet alone(shape, windowed(dtype));
    const BnOutput want = alone.step(window);
    const std::vector<Ended> ended =
        run({shape, windowed(dtype), config(), true}, {shares_of(window, {1, 1, 1, 1})});
    for (size_t r = 0; r < ended.size(); ++r) {
      EXPECT_TRUE(ended[r].outputs[0].y[0] == want.y[r]) << r;
      EXPECT_TRUE(ended[r].outputs[0].dx[0] == want.dx[r]) << r;
      EXPECT_TRUE(ended[r].running[0] == Running(alone.ctx, alone.bn, shape.channels)) << r;
    }
  }
}

// ---- While backward goes on ---------------------------------------------------------------------

// Gradients travel in the background once no layer has anything to exchange any more, with the same results.
// Ranks tell differently what is ready: one before its sums are those of all ranks, one after, one nothing.
TEST(RanksBatchNorm, GradientsTravelBehindTheSums) {
  ga_config c = config();
  c.accum_steps = 2;
  std::vector<BnWindow> shares;
  for (uint64_t r = 0; r < 3; ++r) shares.push_back(bn_window(kShape, GA_F32, {2, 3}, r + 1));
  std::vector<std::vector<BnOutput>> ended[2];
  for (const bool overlap : {false, true}) {
    if (overlap && on_device()) continue;
    std::vector<std::vector<BnOutput>>& of_ranks = ended[overlap];
    of_ranks.resize(shares.size());
    ga_comm_options o = comm_options();
    o.overlap = overlap;
    on_ranks(3, [&](int32_t r, ga_comm* comm) {
      RankNet net(comm, kShape, windowed(), c, true, &o);
      const BnWindow& own = shares[static_cast<size_t>(r)];
      const ga_param both[] = {net.gamma, net.beta};
      const auto ready = [&](int32_t rank) {
        if (r == rank) {
          ASSERT_OK(ga_params_ready(net.ctx, both, 2));
        }
      };
      for (int w = 0; w < 3; ++w) {
        BnOutput out = bn_output(own);
        net.take_all(own);
        EXPECT_OK(net.finalize());
        for (size_t k = 0; k < own.size(); ++k) net.forward(own[k], out.y[k]);
        net.sum_all(own);
        ready(0);
        EXPECT_OK(net.sums_finalize());
        ready(1);
        for (size_t k = 0; k < own.size(); ++k)
          net.in_micro(k, own[k], [&] { net.backward(own[k], out.dx[k]); });
        EXPECT_EQ(step(net.ctx).outcome, GA_STEP_APPLIED);
        out.dgamma = external_gradient(net.ctx, net.gamma, kShape.channels);
        out.dbeta = external_gradient(net.ctx, net.beta, kShape.channels);
        of_ranks[static_cast<size_t>(r)].push_back(out);
      }
    });
  }
  if (!on_device()) {
    EXPECT_TRUE(ended[0] == ended[1]);
  }
}

TEST(RanksBatchNorm, WhatIsReadyTravelsBehindTheSums) {
  OneRank comm;
  if (on_device())
    GTEST_SKIP() << "gradients of a device do not travel by way of the host's thread";
  ga_config c = config();
  c.accum_steps = 1;
  ga_comm_options o = comm_options();
  o.overlap = 1;
  RankNet net(comm, kShape, windowed(), c, true, &o);
  const BnWindow window = bn_window(kShape, GA_F32, {4});
  const ga_param both[] = {net.gamma, net.beta};
  const ga_bn_options options = windowed();
  ga_bn frozen = -1;  // by which nothing is exchanged
  ASSERT_OK(ga_bn_add(net.ctx, "frozen", 3, -1, -1, &options, &frozen));
  ASSERT_OK(ga_bn_set_frozen(net.ctx, frozen, 1));
  for (int w = 0; w < 2; ++w) {
    net.take_all(window);
    EXPECT_OK(net.finalize());
    net.sum_all(window);
    const int begin = comm.calls;
    ASSERT_OK(ga_params_ready(net.ctx, both, 2));
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    EXPECT_EQ(comm.calls, begin);
    EXPECT_OK(net.sums_finalize());
    EXPECT_EQ(comm.calls, begin + 2);
    ASSERT_OK(ga_params_ready(net.ctx, nullptr, 0));
    const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(30);
    while (comm.calls < begin + 5 && std::chrono::steady_clock::now() < end)
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    EXPECT_EQ(comm.calls, begin + 5);  // the agreement, and two for a slice
    EXPECT_TRUE(refused(net.finalize(), kState, {"final already"}));
    EXPECT_EQ(step(net.ctx).outcome, GA_STEP_APPLIED);
  }
}

// ---- Ranks without data -------------------------------------------------------------------------

TEST(RanksBatchNorm, ARankWithoutDataHasTheStatisticsOfAll) {
  const BnWindow window = bn_window(kShape, GA_F32, {2, 3});
  std::vector<std::vector<double>> seen(3);
  on_ranks(3, [&](int32_t r, ga_comm* comm) {
    RankNet net(comm);
    const BnWindow own = r == 1 ? BnWindow() : BnWindow{window[r == 0 ? 0 : 1]};
    net.take_all(own);
    double mean[3], variance[3];
    int64_t count = 0;
    const auto statistics = [&] {
      return ga_bn_statistics(net.ctx, net.bn, mean, variance, GA_F64, &count);
    };
    EXPECT_TRUE(refused(statistics(), kState, {r == 1 ? "no statistics" : "ga_bn_finalize"}));
    EXPECT_OK(net.finalize());
    EXPECT_OK(statistics());
    EXPECT_EQ(count, 5 * 7);
    std::vector<double>& list = seen[static_cast<size_t>(r)];
    list.assign(mean, mean + 3);
    list.insert(list.end(), variance, variance + 3);
    if (r == 1) {  // the layer is within a window, though the rank has no micro-batch
      Tensor y = window[0].x;
      EXPECT_TRUE(refused(ga_bn_forward(net.ctx, net.bn, window[0].x.data(), 2, 7, y.data()),
                          kState, {"first pass", "0 micro-batches"}));
      EXPECT_TRUE(refused(ga_bn_set_frozen(net.ctx, net.bn, 1), kState, {"ga_discard ends"}));
      EXPECT_TRUE(refused(ga_bn_running_set(net.ctx, net.bn, mean, variance, GA_F64, 1), kState,
                          {"ga_discard ends"}));
      EXPECT_TRUE(refused(ga_context_set_comm(net.ctx, nullptr, nullptr), kState, {"statistics"}));
    }
    net.sum_all(own);
    EXPECT_OK(net.sums_finalize());
    EXPECT_EQ(step(net.ctx).outcome, GA_STEP_APPLIED);
    EXPECT_TRUE(refused(statistics(), kState, {"no statistics"}));  // of the next window
  });
  EXPECT_TRUE(same_bits(seen[0], seen[1]) && same_bits(seen[0], seen[2]));
}

TEST(RanksBatchNorm, NoDataOnAnyRank) {
  const BnWindow window = bn_window(kShape, GA_F32, {2, 3});
  BnNet alone(kShape, windowed());
  EXPECT_TRUE(refused(ga_bn_finalize(alone.ctx, alone.bn), kState, {"ga_bn_accumulate"}));
  on_ranks(2, [&](int32_t r, ga_comm* comm) {
    RankNet net(comm);
    for (int k = 0; k < 2; ++k)
      EXPECT_TRUE(refused(net.finalize(), kState,
                          {"ga_bn_finalize", "\"bn\"", "on any rank", "ga_bn_accumulate"}));
    EXPECT_TRUE(refused(net.sums_finalize(), kState, {"ga_bn_finalize must be called first"}));
    net.step({window[static_cast<size_t>(r)]});
  });
}

// Micro-batches without samples are data: the layer has a mean of nothing, as it has alone.
TEST(RanksBatchNorm, MicroBatchesWithoutSamples) {
  on_ranks(2, [&](int32_t r, ga_comm* comm) {
    RankNet net(comm);
    for (int k = 0; k < r; ++k) EXPECT_OK(ga_bn_accumulate(net.ctx, net.bn, nullptr, 0, 7));
    EXPECT_OK(net.finalize());
    int64_t count = -1;
    EXPECT_OK(ga_bn_statistics(net.ctx, net.bn, nullptr, nullptr, GA_F64, &count));
    EXPECT_EQ(count, 0);
    EXPECT_OK(ga_discard(net.ctx));
  });
}

// ---- Which call is legal when -------------------------------------------------------------------

TEST(RanksBatchNorm, DxNeedsTheSumsOfAllRanks) {
  for (const int32_t ranks : {1, 2}) {
    const BnWindow window = bn_window(kShape, GA_F32, {2, 3});
    on_ranks(ranks, [&](int32_t r, ga_comm* comm) {
      RankNet net(comm);
      const BnWindow own = {window[static_cast<size_t>(r)]};
      EXPECT_TRUE(refused(net.sums_finalize(), kState,
                          {"ga_bn_backward_finalize", "\"bn\"", "ga_bn_finalize must be"}));
      net.take_all(own);
      EXPECT_OK(net.finalize());
      EXPECT_TRUE(refused(net.finalize(), kState, {"final already"}));
      net.sum_all(own);
      Tensor dx = own[0].x;
      const auto backward = [&] {
        return ga_bn_backward(net.ctx, net.bn, own[0].x.data(), own[0].dy.data(), own[0].samples, 7,
                              dx.data());
      };
      EXPECT_OK(ga_micro_begin(net.ctx, 0, 1, MicroOptions(1)));
      EXPECT_TRUE(refused(backward(), kState,
                          {"ga_bn_backward", "ga_bn_backward_finalize must be called first"}));
      EXPECT_OK(net.sums_finalize());  // legal while a micro-batch is open, as ga_bn_finalize is
      EXPECT_OK(backward());
      EXPECT_TRUE(refused(net.sums_finalize(), kState, {"those of all ranks already"}));
      EXPECT_OK(ga_micro_end(net.ctx));
      EXPECT_EQ(step(net.ctx).outcome, GA_STEP_APPLIED);
      net.step(own);  // the next window begins anew
    });
  }
}

// Alone, ga_bn_backward_finalize checks and changes nothing.
TEST(RanksBatchNorm, AloneTheSumsNeedNoCall) {
  const BnWindow window = bn_window(kShape, GA_F32, {2, 3});
  BnNet without_call(kShape, windowed()), with_call(kShape, windowed());
  const BnOutput want = without_call.step(window);
  with_call.finalize_sums = true;
  EXPECT_TRUE(with_call.step(window) == want);

  BnNet net(kShape, windowed());
  const auto finalize = [&] { return ga_bn_backward_finalize(net.ctx, net.bn); };
  EXPECT_TRUE(refused(finalize(), kState, {"ga_bn_finalize must be called first"}));
  for (const BnData& m : window) net.take(m);
  EXPECT_OK(ga_bn_finalize(net.ctx, net.bn));
  net.in_micro(0, window[0], [&] { net.sum(window[0]); });
  EXPECT_TRUE(refused(finalize(), kState, {"1 of 2 micro-batches", "ga_bn_backward_accumulate"}));
  net.in_micro(1, window[1], [&] { net.sum(window[1]); });
  EXPECT_OK(finalize());
  EXPECT_OK(finalize());
  BnOutput out = bn_output(window);
  for (size_t k = 0; k < 2; ++k)
    net.in_micro(k, window[k], [&] { net.backward(window[k], out.dx[k]); });
  EXPECT_TRUE(out.dx == want.dx);
  EXPECT_OK(ga_discard(net.ctx));
  EXPECT_OK(ga_bn_set_frozen(net.ctx, net.bn, 1));
  EXPECT_OK(finalize());
  EXPECT_EQ(ga_bn_backward_finalize(net.ctx, 1), GA_ERROR_INVALID_ARGUMENT);
  EXPECT_EQ(ga_bn_backward_finalize(nullptr, 0), GA_ERROR_INVALID_ARGUMENT);
  BnNet micro(kShape, bn_options(GA_BN_MICRO));
  EXPECT_TRUE(refused(ga_bn_backward_finalize(micro.ctx, micro.bn), kState, {"WINDOW"}));
}

// ---- What ranks may differ in -------------------------------------------------------------------

// What one rank cannot do fails on all of them, and can be made good.
TEST(RanksBatchNorm, SumsThatOneRankLacks) {
  const BnWindow window = bn_window(kShape, GA_F32, {2, 3, 1, 4});
  const std::vector<BnWindow> shares = shares_of(window, {1, 2, 1});
  const std::vector<Ended> want = run({kShape, windowed(), config(), true}, {shares});
  on_ranks(3, [&](int32_t r, ga_comm* comm) {
    RankNet net(comm);
    const BnWindow& own = shares[static_cast<size_t>(r)];
    BnOutput out = bn_output(own);
    net.take_all(own);
    EXPECT_OK(net.finalize());
    for (size_t k = 0; k < own.size(); ++k) net.forward(own[k], out.y[k]);
    net.in_micro(0, own[0], [&] { net.sum(own[0]); });
    if (r == 1) {
      EXPECT_TRUE(refused(net.sums_finalize(), kState, {"1 of 2 micro-batches"}));
      net.in_micro(1, own[1], [&] { net.sum(own[1]); });
    } else {
      EXPECT_TRUE(
          refused(net.sums_finalize(), kOthers,
                  {"ga_bn_backward_finalize", "\"bn\"", "rank 1 failed", "1 of 2 micro-batches"}));
    }
    EXPECT_EQ(test::window(net.ctx).state, GA_WINDOW_OPEN);
    EXPECT_OK(net.sums_finalize());
    for (size_t k = 0; k < own.size(); ++k)
      net.in_micro(k, own[k], [&] { net.backward(own[k], out.dx[k]); });
    EXPECT_EQ(step(net.ctx).outcome, GA_STEP_APPLIED);
    const Ended& e = want[static_cast<size_t>(r)];
    EXPECT_TRUE(out.y == e.outputs[0].y && out.dx == e.outputs[0].dx);
    EXPECT_TRUE(Running(net.ctx, net.bn, 3) == e.running[0]);
  });
}

// The program's parallel_for, which leaves out one piece on demand.
struct Unreliable {
  bool fails = false;
  static void run(void* user, int64_t count, ga_task task, void* data) {
    const bool fails = static_cast<Unreliable*>(user)->fails;
    for (int64_t i = 0; i < count; ++i)
      if (!fails || i != count / 2) task(data, i);
  }
};

// A rank whose window is invalid tells the others, whose windows stay as they are.
TEST(RanksBatchNorm, AnInvalidWindowOfOneRank) {
  const ref::BnShape shape{64, 1024, GA_BN_CHANNELS_FIRST};
  const BnWindow window = bn_window(shape, GA_F32, {4, 4});
  const std::vector<Ended> want =
      run({shape, windowed(), config(), true}, {{{window[0]}, {window[1]}}});
  on_ranks(2, [&](int32_t r, ga_comm* comm) {
    Unreliable threads;
    ga_config c = config();
    c.num_threads = 4;
    c.parallel_for = Unreliable::run;
    c.parallel_for_user = &threads;
    RankNet net(comm, shape, windowed(), c);
    const BnWindow own = {window[static_cast<size_t>(r)]};
    threads.fails = r == 1;
    EXPECT_EQ(ga_bn_accumulate(net.ctx, net.bn, own[0].x.data(), 4, 1024),
              r == 1 ? GA_ERROR_FAULT : GA_OK);
    threads.fails = false;
    if (r == 1) {
      EXPECT_TRUE(refused(net.finalize(), kState, {"the window is invalid"}));
    } else {
      EXPECT_TRUE(refused(net.finalize(), kOthers, {"rank 1 failed", "the window is invalid"}));
    }
    EXPECT_EQ(test::window(net.ctx).state, r == 1 ? GA_WINDOW_INVALID : GA_WINDOW_EMPTY);
    EXPECT_OK(ga_discard(net.ctx));
    EXPECT_TRUE(net.step(own) == want[static_cast<size_t>(r)].outputs[0]);
  });
}

TEST(RanksBatchNorm, ALayerThatIsFrozenOnOneRankAlone) {
  const BnWindow window = bn_window(kShape, GA_F32, {2, 3});
  on_ranks(2, [&](int32_t r, ga_comm* comm) {
    RankNet net(comm);
    const BnWindow own = {window[static_cast<size_t>(r)]};
    const char* const words = "\"layer.bn\", frozen is 1 on rank 1, but 0 on rank 0";
    if (r == 1) {
      EXPECT_OK(ga_bn_set_frozen(net.ctx, net.bn, 1));
      EXPECT_OK(net.finalize());  // it does nothing with other ranks, which wait for the next call
      expect_failure(ga_step(net.ctx, nullptr), words);
    } else {
      net.take_all(own);
      expect_failure(net.finalize(), words);
    }
    // ga_discard does not compare settings: a rank that waits is told of another call.
    expect_failure(r == 1 ? ga_discard(net.ctx) : net.finalize(), "makes another call");
    EXPECT_OK(ga_discard(net.ctx));
    if (r == 1) {
      EXPECT_OK(ga_bn_set_frozen(net.ctx, net.bn, 0));
    }
    net.step(own);
  });
}

// Other settings are compared too, before the statistics change.
TEST(RanksBatchNorm, AChangeHoldsWhenAllHaveMadeIt) {
  const BnWindow window = bn_window(kShape, GA_F32, {2, 3});
  on_ranks(2, [&](int32_t r, ga_comm* comm) {
    RankNet net(comm);
    net.take_all({window[static_cast<size_t>(r)]});
    EXPECT_OK(ga_group_set_lr(net.ctx, 0, r == 0 ? 2 : 3));
    expect_failure(net.finalize(), "lr is 3 on rank 1, but 2 on rank 0");
    EXPECT_OK(ga_group_set_lr(net.ctx, 0, 3));
    EXPECT_OK(net.finalize());
    EXPECT_OK(ga_discard(net.ctx));
  });
}

TEST(RanksBatchNorm, ModesAreComparedWhenRanksJoin) {
  on_ranks(2, [&](int32_t r, ga_comm* comm) {
    BnNet net(kShape, bn_options(r == 0 ? GA_BN_WINDOW : GA_BN_MICRO));
    expect_failure(ga_context_set_comm(net.ctx, comm, nullptr), "mode is 0 on rank 1, but 1");
  });
}

// ---- What travels -------------------------------------------------------------------------------

// A layer that is not frozen takes four exchanges, whatever the number of micro-batches, and few bytes.
TEST(RanksBatchNorm, WhatTravels) {
  for (const int64_t micros : {1, 8}) {
    OneRank comm;
    const ref::BnShape shape{500, 3, GA_BN_CHANNELS_FIRST};
    const BnWindow window =
        bn_window(shape, GA_F32, std::vector<int64_t>(static_cast<size_t>(micros), 2));
    RankNet net(comm, shape);
    comm.calls = 0;
    comm.bytes = 0;
    net.run(window);
    EXPECT_EQ(comm.calls, 2 + 2);
    EXPECT_LE(comm.bytes, 500 * (3 + 2) * 8 + 500);
    EXPECT_OK(ga_discard(net.ctx));
    EXPECT_OK(ga_bn_set_frozen(net.ctx, net.bn, 1));
    comm.calls = 0;
    EXPECT_OK(net.finalize());
    EXPECT_OK(net.sums_finalize());
    EXPECT_EQ(comm.calls, 0);
  }
}

// ---- Another order of calls ---------------------------------------------------------------------

// Two layers over the same data, as a rank makes their calls.
struct TwoNorms {
  explicit TwoNorms(ga_comm* comm, int32_t rank)
      : data(bn_window(kShape, GA_F32, {2, 3})[static_cast<size_t>(rank)]),
        dx{Tensor(GA_F32, data.x.count()), Tensor(GA_F32, data.x.count())} {
    ctx.param(ctx.group(plain_sgd()), "p", &p, 1);
    for (const char* name : {"a", "b"}) {
      const ga_bn_options o = windowed();
      EXPECT_OK(ga_bn_add(ctx, name, 3, -1, -1, &o, nullptr));
    }
    EXPECT_OK(ga_context_set_comm(ctx, comm, nullptr));
  }
  void take() {
    for (const ga_bn bn : {0, 1})
      EXPECT_OK(ga_bn_accumulate(ctx, bn, data.x.data(), data.samples, 7));
  }
  void sum() {
    EXPECT_OK(ga_micro_begin(ctx, 0, 1, nullptr));
    for (const ga_bn bn : {0, 1})
      EXPECT_OK(ga_bn_backward_accumulate(ctx, bn, data.x.data(), data.dy.data(), data.samples, 7));
    EXPECT_OK(ga_micro_end(ctx));
  }
  void backward() {
    EXPECT_OK(ga_micro_begin(ctx, 0, 1, nullptr));
    for (const ga_bn bn : {0, 1})
      EXPECT_OK(ga_bn_backward(ctx, bn, data.x.data(), data.dy.data(), data.samples, 7,
                               dx[static_cast<size_t>(bn)].data()));
    EXPECT_OK(ga_micro_end(ctx));
    EXPECT_EQ(step(ctx).outcome, GA_STEP_APPLIED);
  }

  Context ctx;
  float p = 0;
  const BnData data;
  std::vector<Tensor> dx;
};

// Calls that do not fit each other fail on both ranks and change nothing: with the right calls the window
// goes on.
TEST(RanksBatchNorm, AnotherOrderOfCalls) {
  using Call = std::function<ga_status(ga_context*)>;
  const Call step = [](ga_context* ctx) { return ga_step(ctx, nullptr); };
  const Call discard = [](ga_context* ctx) { return ga_discard(ctx); };
  const Call save = [](ga_context* ctx) {
    size_t size = 0;
    return ga_save_to_memory(ctx, nullptr, nullptr, 0, &size);
  };
  for (int32_t late = 0; late < 2; ++late) {  // the rank that makes the other call
    on_ranks(2, [&](int32_t r, ga_comm* comm) {
      TwoNorms net(comm, r);
      std::optional<std::vector<Tensor>> undisturbed;
      for (const bool disturbed : {false, true}) {
        const auto expect_refused = [&](ga_status (*finalize)(ga_context*, ga_bn),
                                        const char* name) {
          const Call second = [=](ga_context* ctx) { return finalize(ctx, 1); };
          for (const Call& other : {second, step, discard, save}) {
            if (!disturbed) continue;
            const ga_status status = r == late ? other(net.ctx) : finalize(net.ctx, 0);
            EXPECT_TRUE(refused(status, kOthers, {"rank 1 makes another call than rank 0"}));
            if (r != late) {
              EXPECT_TRUE(refused(status, kOthers, {name, "of layer \"a\""}));
            }
            EXPECT_NE(test::window(net.ctx).state, GA_WINDOW_INVALID);
          }
        };
        net.take();
        expect_refused(ga_bn_finalize, "ga_bn_finalize");
        for (const ga_bn bn : {0, 1}) EXPECT_OK(ga_bn_finalize(net.ctx, bn));
        net.sum();
        expect_refused(ga_bn_backward_finalize, "ga_bn_backward_finalize");
        for (const ga_bn bn : {0, 1}) EXPECT_OK(ga_bn_backward_finalize(net.ctx, bn));
        net.backward();
        if (!disturbed) undisturbed.emplace(net.dx);
      }
      EXPECT_TRUE(net.dx == *undisturbed);
      EXPECT_EQ(Running(net.ctx, 0, 3).steps, 2);
    });
  }
}

// A window that another rank discards after its statistics were merged leaves nothing behind, also where
// the rank had no data.
TEST(RanksBatchNorm, ADiscardedWindowLeavesNothing) {
  const BnWindow window = bn_window(kShape, GA_F32, {2, 3}, 1),
                 next = bn_window(kShape, GA_F32, {4, 1}, 2);
  const std::vector<Ended> want = run({kShape, windowed(), config(), true}, {{{}, next, {}}});
  on_ranks(3, [&](int32_t r, ga_comm* comm) {
    RankNet net(comm);
    net.run(r == 1 ? BnWindow() : BnWindow{window[r == 0 ? 0 : 1]});
    if (r == 0) {
      EXPECT_OK(ga_discard(net.ctx));
    } else {
      EXPECT_EQ(step(net.ctx).outcome, GA_STEP_SKIPPED_DISCARD);
    }
    const Running running(net.ctx, net.bn, 3);
    EXPECT_EQ(running.steps, 0);
    EXPECT_EQ(running.mean, std::vector<double>(3, 0));
    const BnOutput out = net.step(r == 1 ? next : BnWindow());
    EXPECT_TRUE(out == want[static_cast<size_t>(r)].outputs[0]);
    EXPECT_TRUE(Running(net.ctx, net.bn, 3) == want[0].running[0]);
  });
}

// ---- Exchanges that fail ------------------------------------------------------------------------

// A failure in each exchange of a layer: the statistics are as they were, and after ga_discard the context
// is one alone.
TEST(RanksBatchNorm, AFailureOfATable) {
  const BnWindow window = bn_window(kShape, GA_F32, {2, 3}),
                 next = bn_window(kShape, GA_F32, {4, 1}, 2);
  const BnOutput want = BnNet(kShape, windowed()).step(next);
  for (int at = 0; at < 4; ++at) {
    SCOPED_TRACE(at);
    OneRank comm;
    RankNet net(comm);
    net.take_all(window);
    comm.fail_at = comm.calls + at;
    double mean[3];
    const auto statistics = [&] {
      return ga_bn_statistics(net.ctx, net.bn, mean, nullptr, GA_F64, nullptr);
    };
    if (at < 2) {
      expect_failure(net.finalize(), "the cable is out (42)");
      EXPECT_TRUE(refused(statistics(), kState, {"ga_bn_finalize"}));
      expect_failure(net.finalize(), "the cable is out (42)");
    } else {
      EXPECT_OK(net.finalize());
      net.sum_all(window);
      expect_failure(net.sums_finalize(), "the cable is out (42)");
      Tensor dx = window[0].x;
      EXPECT_OK(ga_micro_begin(net.ctx, 0, 1, MicroOptions(1)));
      EXPECT_TRUE(refused(
          ga_bn_backward(net.ctx, net.bn, window[0].x.data(), window[0].dy.data(), 2, 7, dx.data()),
          kState, {"ga_bn_backward_finalize"}));
      EXPECT_OK(ga_micro_end(net.ctx));
    }
    EXPECT_EQ(test::window(net.ctx).state, at < 2 ? GA_WINDOW_EMPTY : GA_WINDOW_OPEN);
    EXPECT_EQ(Running(net.ctx, net.bn, 3).steps, 0);
    EXPECT_OK(ga_discard(net.ctx));
    EXPECT_OK(ga_context_set_comm(net.ctx, nullptr, nullptr));
    net.finalize_sums = false;
    EXPECT_TRUE(net.step(next) == want);
  }
}

TEST(RanksBatchNorm, AMissingRankIsNamedInTime) {
  const BnWindow window = bn_window(kShape, GA_F32, {2, 3});
  const BnOutput want = BnNet(kShape, windowed()).step(window);
  for (const bool backward : {false, true}) {
    std::atomic<bool> gave_up{false};
    on_ranks(
        2,
        [&](int32_t r, ga_comm* comm) {
          RankNet net(comm);
          const BnWindow own = {window[static_cast<size_t>(r)]};
          net.take_all(own);
          if (backward) {
            EXPECT_OK(net.finalize());
            net.sum_all(own);
          }
          const auto call = [&] { return backward ? net.sums_finalize() : net.finalize(); };
          if (r == 1) {
            while (!gave_up) std::this_thread::yield();
            EXPECT_EQ(call(), kOthers);
          } else {
            expect_failure(call(), "waited 1 s for rank 1");
            gave_up = true;
          }
          EXPECT_OK(ga_discard(net.ctx));
          EXPECT_OK(ga_context_set_comm(net.ctx, nullptr, nullptr));
          net.finalize_sums = false;
          EXPECT_TRUE(net.step(window) == want);
        },
        1);
  }
}

TEST(RanksBatchNorm, AbortFreesARankThatWaits) {
  on_ranks(2, [&](int32_t r, ga_comm* comm) {
    RankNet net(comm);
    net.take_all(bn_window(kShape, GA_F32, {2}));
    if (r == 1) {
      std::this_thread::sleep_for(std::chrono::milliseconds(100));
      EXPECT_OK(ga_comm_abort(comm));
    }
    expect_failure(net.finalize(), "ga_comm_abort was called");
    EXPECT_OK(ga_discard(net.ctx));
  });
}

}  // namespace
}  // namespace ga::test
