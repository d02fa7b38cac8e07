// SPDX-License-Identifier: Apache-2.0
//
// Batch normalisation under accumulation, compared with float64: a window in WINDOW mode equals one
// big batch, MICRO and CUMULATIVE normalise by their own statistics, and in every mode the running
// statistics move once per applied step by those of the window.
#include "batchnorm.hpp"

namespace ga::test {
namespace {

constexpr int32_t kModes[] = {GA_BN_MICRO, GA_BN_WINDOW, GA_BN_CUMULATIVE};
constexpr int32_t kLayouts[] = {GA_BN_CHANNELS_FIRST, GA_BN_CHANNELS_LAST};
constexpr int32_t kDtypes[] = {GA_F32, GA_F64, GA_F16, GA_BF16};

const char* mode_name(int32_t mode) {
  return mode == GA_BN_MICRO ? "Micro" : mode == GA_BN_WINDOW ? "Window" : "Cumulative";
}

ga_bn_options of_dtype(int32_t mode, int32_t dtype) {
  ga_bn_options o = bn_options(mode);
  o.dtype = dtype;
  return o;
}

std::vector<ref::Near> joined(const std::vector<std::vector<ref::Near>>& parts) {
  std::vector<ref::Near> all;
  for (const auto& part : parts) all.insert(all.end(), part.begin(), part.end());
  return all;
}

// ---- The reference ------------------------------------------------------------------------------

struct Loss {
  ref::BnLayer layer;
  std::vector<ref::BnMicro> window;

  // The loss of micro-batch k alone (share 1), or of the window. The statistics are those of the
  // current x.
  double operator()(int k) const {
    const ref::BnResult r = ref::batch_norm(layer, window, GA_F64);
    double sum = 0;
    for (size_t j = 0; j < window.size(); ++j) {
      if (k >= 0 && j != static_cast<size_t>(k)) continue;
      double loss = 0;
      for (size_t i = 0; i < window[j].x.size(); ++i) loss += window[j].dy[i] * r.y[j][i].value;
      sum += (k < 0 ? window[j].share : 1) * loss;
    }
    return sum;
  }
  double slope(double& number, int k) {
    const double before = number, h = 1e-5;
    number = before + h;
    const double above = (*this)(k);
    number = before - h;
    const double below = (*this)(k);
    number = before;
    return (above - below) / (2 * h);
  }
};

// The reference's gradients equal difference quotients of its loss: the micro-batch's own loss, or
// in WINDOW mode the window's, divided by the micro-batch's share.
TEST(BatchNormReference, GradientsAreTheSlopesOfTheLoss) {
  for (const int32_t mode : kModes) {
    for (const bool weighted : {false, true}) {
      SCOPED_TRACE(testing::Message() << mode_name(mode) << ", weighted " << weighted);
      const ref::BnShape shape{2, 3, GA_BN_CHANNELS_FIRST};
      Loss loss{{shape, mode, 1e-2, {1.5, -0.5}, {0.25, 1}}, {}};
      const double shares[] = {1, 0.5, 3};
      BnWindow data = bn_window(shape, GA_F64, {2, 3, 1});
      loss.window = bn_micros(data, GA_GRADIENT_MEAN);
      for (size_t k = 0; k < 3; ++k) loss.window[k].share = weighted ? shares[k] : 1;
      const ref::BnResult r = ref::batch_norm(loss.layer, loss.window, GA_F64);
      for (size_t k = 0; k < 3; ++k) {
        for (size_t i = 0; i < loss.window[k].x.size(); ++i) {
          const bool whole = mode == GA_BN_WINDOW;
          const double slope = loss.slope(loss.window[k].x[i], whole ? -1 : static_cast<int>(k));
          // The error: h^2 = 1e-10 times a third derivative of order 1e3 (deviations of 0.1), and
          // rounding noise of 1e-15 / h.
          EXPECT_NEAR(r.dx[k][i].value * (whole ? loss.window[k].share : 1), slope, 1e-6);
        }
      }
      for (size_t c = 0; c < 2; ++c) {
        EXPECT_NEAR(r.dgamma[c].value, loss.slope(loss.layer.gamma[c], -1), 1e-8);
        EXPECT_NEAR(r.dbeta[c].value, loss.slope(loss.layer.beta[c], -1), 1e-8);
      }
    }
  }
}

// In WINDOW mode a window equals one batch, wherever it is cut.
TEST(BatchNormReference, AWindowIsOneBatch) {
  const ref::BnShape shape{5, 4, GA_BN_CHANNELS_LAST};
  const BnWindow window = bn_window(shape, GA_F64, {3, 1, 4});
  const ref::BnLayer layer{shape, GA_BN_WINDOW, 1e-5, {}, {}},
      one{shape, GA_BN_MICRO, 1e-5, {}, {}};
  const auto many = ref::batch_norm(layer, bn_micros(window, GA_GRADIENT_SUM), GA_F64);
  const auto whole =
      ref::batch_norm(one, bn_micros({joined(window, shape)}, GA_GRADIENT_SUM), GA_F64);
  const auto y = joined(many.y), dx = joined(many.dx);
  for (size_t i = 0; i < y.size(); ++i) {
    EXPECT_NEAR(y[i].value, whole.y[0][i].value, 1e-13);
    EXPECT_NEAR(dx[i].value, whole.dx[0][i].value, 1e-13);
  }
}

// The reference's bounds are narrow, relative to the numbers that they bound.
TEST(BatchNormReference, BoundsAreNarrow) {
  const ref::BnShape shape{3, 49, GA_BN_CHANNELS_FIRST};
  for (const int32_t dtype : kDtypes) {
    const BnWindow window = bn_window(shape, dtype, {8, 8, 5});
    const ref::BnLayer layer{shape, GA_BN_WINDOW, 1e-5, {}, {}};
    const auto r = ref::batch_norm(layer, bn_micros(window, GA_GRADIENT_MEAN), dtype);
    const double unit = std::max(ref::bn_arithmetic(dtype).unit, ref::bn_arithmetic(dtype).round);
    // In f64 the sums over 1029 elements dominate.
    const double most = dtype == GA_F64 ? 0x1p-53 * 1029 * 200 : 16 * unit;
    for (const ref::Near& y : joined(r.y)) EXPECT_LE(y.tolerance, most * 2);
    for (const ref::Near& d : r.dgamma) EXPECT_LE(d.tolerance, most * 1029);
  }
}

// ---- Every mode, layout, dtype and shape --------------------------------------------------------

using Case = std::tuple<int32_t, int32_t, int32_t>;  // mode, layout, dtype

std::string case_name(const testing::TestParamInfo<Case>& info) {
  const auto [mode, layout, dtype] = info.param;
  return std::string(mode_name(mode)) + (layout ? "Last_" : "First_") + format(dtype).name;
}

class BatchNorm : public testing::TestWithParam<Case> {
 protected:
  const int32_t mode_ = std::get<0>(GetParam());
  const int32_t layout_ = std::get<1>(GetParam());
  const int32_t dtype_ = std::get<2>(GetParam());
};

INSTANTIATE_TEST_SUITE_P(All, BatchNorm,
                         testing::Combine(testing::ValuesIn(kModes), testing::ValuesIn(kLayouts),
                                          testing::ValuesIn(kDtypes)),
                         case_name);

TEST_P(BatchNorm, IsRightForEveryShape) {
  // One, two and five micro-batches: equal, with a tail, unequal, and of one sample each.
  const std::vector<std::vector<int64_t>> cuts = {
      {6}, {1}, {4, 4}, {4, 1}, {1, 1}, {3, 3, 3, 3, 2}, {1, 5, 2, 1, 3}, {1, 1, 1, 1, 1}};
  size_t next = static_cast<size_t>(mode_ + layout_);
  for (const int64_t channels : {1, 3, 16, 64, 100}) {
    for (const int64_t positions : {1, 7, 49, 130}) {
      for (int k = 0; k < 3; ++k) {
        const std::vector<int64_t>& samples = cuts[next++ % cuts.size()];
        const ref::BnShape shape{channels, positions, layout_};
        SCOPED_TRACE(testing::Message()
                     << channels << " channels, " << positions << " positions, samples "
                     << testing::PrintToString(samples));
        BnNet net(shape, of_dtype(mode_, dtype_));
        const BnWindow window = bn_window(shape, dtype_, samples, next);
        net.expect_right(window, net.step(window));
        if (HasFailure()) return;
      }
    }
  }
}

// Channels cut into several pieces, and more channels than a pass takes at once.
TEST_P(BatchNorm, IsRightForLargeTensors) {
  for (const auto& [channels, positions] :
       {std::pair<int64_t, int64_t>(2, 40000), {4500, 2}, {70, 1030}}) {
    const ref::BnShape shape{channels, positions, layout_};
    SCOPED_TRACE(testing::Message() << channels << " channels, " << positions << " positions");
    BnNet net(shape, of_dtype(mode_, dtype_));
    const BnWindow window = bn_window(shape, dtype_, {2, 1});
    net.expect_right(window, net.step(window));
  }
}

// Weights that count samples or tokens, and weight 0; loss scales of a micro-batch and of the
// context; gradients that are means or sums, reduced to a mean or a sum. With weight 0 dx is 0, but
// x counts.
TEST_P(BatchNorm, WeightsAndLossScales) {
  const double weights[][4] = {{4, 4, 4, 2}, {11, 101, 1037, 4096}, {1, 0, 0.125, 0}, {0, 2, 1, 3}};
  const double scales[][4] = {{1, 1, 1, 1}, {16, 3, 1, 64}, {-2, -2, -2, -2}, {512, 8, 4, 1}};
  const ref::BnShape shape{3, 7, layout_};
  for (const int32_t kind : {GA_GRADIENT_MEAN, GA_GRADIENT_SUM}) {
    for (const int32_t reduce : {GA_REDUCE_MEAN, GA_REDUCE_SUM}) {
      for (size_t i = 0; i < std::size(weights); ++i) {
        SCOPED_TRACE(testing::Message()
                     << "kind " << kind << ", reduce " << reduce << ", weights " << i);
        ga_config c = config();
        c.gradient_kind = kind;
        c.reduce = reduce;
        BnNet net(shape, of_dtype(mode_, dtype_), c);
        BnWindow window = bn_window(shape, dtype_, {4, 4, 4, 2}, i);
        for (size_t k = 0; k < window.size(); ++k) {
          window[k].weight = weights[i][k];
          window[k].loss_scale = scales[i][k];
          if (window[k].weight == 0) window[k].dy.fill(NAN);  // not read
        }
        const BnOutput got = net.step(window);
        net.expect_right(window, got);
        for (size_t k = 0; k < window.size(); ++k) {
          if (window[k].weight > 0) continue;
          EXPECT_EQ(got.dx[k], Tensor(dtype_, got.dx[k].count())) << "dx of weight 0";
        }
      }
    }
  }
}

// A loss scale of the context, fixed or dynamic.
TEST_P(BatchNorm, LossScaleOfTheContext) {
  const ref::BnShape shape{3, 7, layout_};
  for (const bool dynamic : {false, true}) {
    ga_config c = config();
    c.loss_scale = dynamic ? 1 : 4096;
    BnNet net(shape, of_dtype(mode_, dtype_), c);
    if (dynamic) {
      ga_loss_scaler s;
      EXPECT_OK(ga_loss_scaler_init(&s, sizeof s));
      s.initial_scale = 4096;
      EXPECT_OK(ga_context_set_loss_scaler(net.ctx, &s));
    }
    BnWindow window = bn_window(shape, dtype_, {4, 1});
    const BnOutput scaled = net.step(window);  // each micro-batch brings a scale of its own, 1
    BnOutput out = bn_output(window);
    const auto micro = [&](size_t k, auto body) {
      EXPECT_OK(ga_micro_begin(net.ctx, static_cast<int64_t>(k), window[k].weight, nullptr));
      body();
      EXPECT_OK(ga_micro_end(net.ctx));
    };
    if (mode_ == GA_BN_WINDOW) {
      for (const BnData& m : window) net.take(m);
      EXPECT_OK(ga_bn_finalize(net.ctx, net.bn));
      for (size_t k = 0; k < 2; ++k) net.forward(window[k], out.y[k]);
      for (size_t k = 0; k < 2; ++k) micro(k, [&] { net.sum(window[k]); });
      for (size_t k = 0; k < 2; ++k) micro(k, [&] { net.backward(window[k], out.dx[k]); });
    } else {
      for (size_t k = 0; k < 2; ++k) {
        net.forward(window[k], out.y[k]);
        micro(k, [&] { net.backward(window[k], out.dx[k]); });
      }
    }
    EXPECT_EQ(step(net.ctx).outcome, GA_STEP_APPLIED);
    EXPECT_TRUE(out.y == scaled.y);
    EXPECT_TRUE(out.dx == scaled.dx) << "dx is scaled as dy is";
    out.dgamma = external_gradient(net.ctx, net.gamma, shape.channels);
    for (size_t i = 0; i < out.dgamma.size(); ++i) {
      EXPECT_EQ(out.dgamma[i], scaled.dgamma[i] / 4096);
    }
  }
}

// y over x, and dx over dy or x, give the bits of separate memory.
TEST_P(BatchNorm, InPlace) {
  const ref::BnShape shape{16, 49, layout_};
  for (const bool over_dy : {false, true}) {
    BnNet apart(shape, of_dtype(mode_, dtype_)), in_place(shape, of_dtype(mode_, dtype_));
    const BnWindow window = bn_window(shape, dtype_, {3, 1});
    const BnOutput want = apart.step(window);
    BnWindow copy = window;
    if (mode_ == GA_BN_WINDOW) {
      for (const BnData& m : copy) in_place.take(m);
      EXPECT_OK(ga_bn_finalize(in_place.ctx, in_place.bn));
    }
    for (size_t k = 0; k < 2; ++k) {
      Tensor y = copy[k].x;
      EXPECT_OK(ga_bn_forward(in_place.ctx, in_place.bn, y.data(), copy[k].samples, shape.positions,
                              y.data()));
      EXPECT_EQ(y, want.y[k]);
      const auto backward = [&] {
        BnData& m = copy[k];
        in_place.backward(m, over_dy ? m.dy : m.x);
        EXPECT_EQ(over_dy ? m.dy : m.x, want.dx[k]);
      };
      if (mode_ != GA_BN_WINDOW) in_place.in_micro(k, copy[k], backward);
    }
    if (mode_ == GA_BN_WINDOW) {
      for (size_t k = 0; k < 2; ++k) in_place.in_micro(k, copy[k], [&] { in_place.sum(copy[k]); });
      for (size_t k = 0; k < 2; ++k) {
        in_place.in_micro(k, copy[k],
                          [&] { in_place.backward(copy[k], over_dy ? copy[k].dy : copy[k].x); });
        EXPECT_EQ(over_dy ? copy[k].dy : copy[k].x, want.dx[k]);
      }
    }
    EXPECT_EQ(step(in_place.ctx).outcome, GA_STEP_APPLIED);
    EXPECT_EQ(external_gradient(in_place.ctx, in_place.gamma, shape.channels), want.dgamma);
  }
}

TEST_P(BatchNorm, WithoutGammaOrBeta) {
  const ref::BnShape shape{5, 7, layout_};
  for (const bool gamma : {false, true}) {
    ga_bn_options o = of_dtype(mode_, dtype_);
    o.layout = layout_;
    BnNet net(shape, o);
    ga_bn bn = -1;
    EXPECT_OK(ga_bn_add(net.ctx, "one of them", shape.channels, gamma ? net.gamma : -1,
                        gamma ? -1 : net.beta, &o, &bn));
    (gamma ? net.beta : net.gamma) = -1;
    net.bn = bn;
    const BnWindow window = bn_window(shape, dtype_, {2, 3});
    net.expect_right(window, net.step(window));
    BnNet plain(shape, o, config(), false);
    // The backward pass gives only dx, so another parameter's gradient makes the window's step.
    const BnOutput out = plain.run(window);
    plain.expect_right(window, out);
    const ga_step_result r = step(plain.ctx);
    EXPECT_EQ(r.outcome, GA_STEP_APPLIED);
    EXPECT_EQ(Running(plain.ctx, plain.bn, shape.channels),
              Running(net.ctx, net.bn, shape.channels));
  }
}

// The running statistics of several windows, by both conventions; a channel of one element has no
// unbiased variance.
TEST_P(BatchNorm, RunningStatistics) {
  for (const int32_t flavor : {GA_FLAVOR_TORCH, GA_FLAVOR_KERAS}) {
    for (const int64_t positions : {1, 49}) {
      const ref::BnShape shape{3, positions, layout_};
      ga_bn_options o = bn_options(mode_, flavor);
      EXPECT_EQ(o.momentum, flavor == GA_FLAVOR_TORCH ? 0.1 : 0.01);
      EXPECT_EQ(o.eps, flavor == GA_FLAVOR_TORCH ? 1e-5 : 1e-3);
      o.dtype = dtype_;
      BnNet net(shape, o);
      std::vector<ref::BnRunning> want(3);
      const std::vector<std::vector<int64_t>> windows = {
          {4, 4, 4}, {1}, {2, 1}, {1, 1, 1, 1, 1}, {5}};
      for (size_t w = 0; w < windows.size(); ++w) {
        const BnWindow window = bn_window(shape, dtype_, windows[w], w);
        net.step(window);
        const auto r = ref::batch_norm(net.layer(), bn_micros(window, GA_GRADIENT_MEAN), dtype_);
        const Running got(net.ctx, net.bn, 3);
        EXPECT_EQ(got.steps, static_cast<int64_t>(w + 1));
        for (size_t c = 0; c < 3; ++c) {
          want[c].move(r.window[c], flavor == GA_FLAVOR_TORCH ? 0.1 : 0.01,
                       flavor == GA_FLAVOR_KERAS);
          EXPECT_TRUE(want[c].mean.holds(got.mean[c])) << got.mean[c] << ' ' << want[c].mean.value;
          EXPECT_TRUE(want[c].variance.holds(got.variance[c]))
              << got.variance[c] << ' ' << want[c].variance.value;
        }
      }
    }
  }
}

// ga_bn_statistics returns the statistics of the last forward pass.
TEST_P(BatchNorm, StatisticsForThePrograms) {
  const ref::BnShape shape{3, 7, layout_};
  BnNet net(shape, of_dtype(mode_, dtype_));
  const BnWindow window = bn_window(shape, dtype_, {2, 1, 4});
  BnOutput out = bn_output(window);
  if (mode_ == GA_BN_WINDOW) {
    for (const BnData& m : window) net.take(m);
    EXPECT_OK(ga_bn_finalize(net.ctx, net.bn));
  }
  for (size_t k = 0; k < window.size(); ++k) {
    if (mode_ == GA_BN_WINDOW) {
      net.forward(window[k], out.y[k]);
    } else {
      net.forward(window[k], out.y[k]);
      net.in_micro(k, window[k], [] {});
    }
    const size_t first = mode_ == GA_BN_MICRO ? k : 0;
    const size_t last = mode_ == GA_BN_WINDOW ? window.size() : k + 1;
    const BnWindow of(window.begin() + static_cast<ptrdiff_t>(first),
                      window.begin() + static_cast<ptrdiff_t>(last));
    const auto r = ref::batch_norm(net.layer(), bn_micros(of, GA_GRADIENT_MEAN), dtype_);
    std::vector<double> mean(3), variance(3);
    std::vector<float> mean32(3), variance32(3);
    int64_t count = -1;
    EXPECT_OK(ga_bn_statistics(net.ctx, net.bn, mean.data(), variance.data(), GA_F64, &count));
    EXPECT_OK(ga_bn_statistics(net.ctx, net.bn, mean32.data(), variance32.data(), GA_F32, nullptr));
    EXPECT_OK(ga_bn_statistics(net.ctx, net.bn, nullptr, nullptr, GA_F32, nullptr));
    EXPECT_EQ(static_cast<double>(count), r.window[0].count);
    for (size_t c = 0; c < 3; ++c) {
      EXPECT_NEAR(mean[c], r.window[c].mean, r.window[c].mean_error);
      EXPECT_NEAR(variance[c], r.window[c].variance(),
                  r.window[c].squares_error / r.window[c].count);
      EXPECT_EQ(mean32[c], static_cast<float>(mean[c]));
      EXPECT_EQ(variance32[c], static_cast<float>(variance[c]));
    }
  }
}

// ---- The same window, cut differently -----------------------------------------------------------

TEST(BatchNormWindow, HoweverItIsCut) {
  for (const int32_t layout : kLayouts) {
    for (const int32_t dtype : {GA_F32, GA_F64}) {
      const ref::BnShape shape{6, 35, layout};
      BnWindow ones = bn_window(shape, dtype, std::vector<int64_t>(24, 1));
      const BnData all = joined(ones, shape);
      const int64_t sample = shape.channels * shape.positions;
      BnNet whole(shape, of_dtype(GA_BN_MICRO, dtype));
      // The weights are samples, and dy is that of a mean over the micro-batch, so dx scales
      // likewise.
      const auto want = ref::batch_norm(whole.layer(), bn_micros({all}, GA_GRADIENT_MEAN), dtype);
      const Running running = [&] {
        whole.expect_right({all}, whole.step({all}));
        return Running(whole.ctx, whole.bn, shape.channels);
      }();
      for (const std::vector<int64_t>& cut : std::vector<std::vector<int64_t>>{
               {24}, {12, 12}, {20, 4}, {1, 23}, {5, 5, 5, 5, 4}, std::vector<int64_t>(24, 1)}) {
        SCOPED_TRACE(testing::PrintToString(cut));
        BnWindow window;
        int64_t at = 0;
        for (const int64_t n : cut) {
          BnData m{n, Tensor(dtype, n * sample), Tensor(dtype, n * sample)};
          memcpy(m.x.data(), all.x.at(at), static_cast<size_t>(n * sample) * all.x.size());
          memcpy(m.dy.data(), all.dy.at(at), static_cast<size_t>(n * sample) * all.x.size());
          at += n * sample;
          window.push_back(std::move(m));
        }
        ga_config c = config();
        c.gradient_kind = GA_GRADIENT_SUM;
        c.reduce = GA_REDUCE_SUM;
        BnNet net(shape, of_dtype(GA_BN_WINDOW, dtype), c);
        const BnOutput got = net.step(window);
        net.expect_right(window, got);
        // Each cut has its own bounds; the values are those of one batch.
        auto one = ref::batch_norm(net.layer(), bn_micros(window, GA_GRADIENT_SUM), dtype);
        auto y = joined(one.y), dx = joined(one.dx);
        for (size_t i = 0; i < y.size(); ++i) {
          y[i].value = want.y[0][i].value;
          dx[i].value = want.dx[0][i].value;
        }
        EXPECT_TRUE(near(joined(got.y), y));
        EXPECT_TRUE(near(joined(got.dx), dx));
        const Running moved(net.ctx, net.bn, shape.channels);
        for (size_t i = 0; i < moved.mean.size(); ++i) {
          const ref::Statistics& s = one.window[i];
          EXPECT_NEAR(moved.mean[i], running.mean[i], 0.2 * s.mean_error);
          EXPECT_NEAR(moved.variance[i], running.variance[i],
                      0.2 * s.squares_error / (s.count - 1));
        }
      }
    }
  }
}

// Run layer by layer, forward and backward, each over all micro-batches, a network equals itself on one
// batch.
TEST(BatchNormWindow, TwoLayersAreThoseOfOneBatch) {
  const auto list = [](const TwoLayers& net) {
    std::vector<double> all = net.ended;
    for (const auto& steps : {net.y, net.dx})
      for (const auto& step : steps) all.insert(all.end(), step.begin(), step.end());
    return all;
  };
  const std::vector<double> whole = list(TwoLayers({12}));
  for (const std::vector<int64_t>& cut :
       {std::vector<int64_t>{6, 6}, {5, 5, 2}, std::vector<int64_t>(12, 1)}) {
    const std::vector<double> parts = list(TwoLayers(cut));
    ASSERT_EQ(parts.size(), whole.size());
    double largest = 0;
    for (size_t i = 0; i < whole.size(); ++i) {
      EXPECT_NEAR(parts[i], whole[i], TwoLayers::tolerance(whole[i])) << i;
      largest = std::max(largest, std::abs(whole[i]));
    }
    EXPECT_GT(largest, 1);
  }
}

// ---- The same bits ------------------------------------------------------------------------------

// All results of two windows, for shapes whose tensors are cut into several pieces.
std::vector<BnOutput> everything(const ga_config& c) {
  std::vector<BnOutput> all;
  const ref::BnShape shapes[] = {{3, 40000, GA_BN_CHANNELS_FIRST},
                                 {3, 40000, GA_BN_CHANNELS_LAST},
                                 {100, 49, GA_BN_CHANNELS_FIRST},
                                 {5, 1, GA_BN_CHANNELS_LAST},
                                 {700, 7, GA_BN_CHANNELS_LAST}};
  for (const ref::BnShape& shape : shapes) {
    for (const int32_t mode : kModes) {
      for (const int32_t dtype : {GA_F32, GA_BF16, GA_F64}) {
        if (shape.positions > 1000 && dtype == GA_BF16) continue;
        BnNet net(shape, of_dtype(mode, dtype), c);
        const std::vector<int64_t> samples = {shape.positions > 1000 ? 2 : 19, 1};
        all.push_back(net.step(bn_window(shape, dtype, samples)));
        const Running running(net.ctx, net.bn, shape.channels);
        all.back().dgamma.insert(all.back().dgamma.end(), running.mean.begin(), running.mean.end());
        all.back().dbeta.insert(all.back().dbeta.end(), running.variance.begin(),
                                running.variance.end());
      }
    }
  }
  return all;
}

const std::vector<BnOutput>& baseline() {
  static const std::vector<BnOutput> outputs = [] {
    const Isa scalar("scalar");
    return everything(config());
  }();
  return outputs;
}

TEST(BatchNormBits, SameProgramTwice) { EXPECT_TRUE(everything(config()) == baseline()); }

TEST(BatchNormBits, NumberOfThreads) {
  for (const int32_t threads : {2, 3}) {
    ga_config c = config();
    c.num_threads = threads;
    EXPECT_TRUE(everything(c) == baseline()) << threads << " threads";
  }
}

class BatchNormIsa : public testing::TestWithParam<const char*> {};
INSTANTIATE_TEST_SUITE_P(All, BatchNormIsa, testing::ValuesIn(kIsaLevels),
                         [](const testing::TestParamInfo<const char*>& info) {
                           return identifier(info.param);
                         });

TEST_P(BatchNormIsa, SameBitsAsScalar) {
  const Isa isa(GetParam());
  if (!Isa::available()) GTEST_SKIP() << "this build or this processor has no " << GetParam();
  EXPECT_TRUE(everything(config()) == baseline());
}

// ---- Adversarial data ---------------------------------------------------------------------------

// x by channel, sample and position.
BnWindow adversarial(const ref::BnShape& shape, const std::vector<int64_t>& samples) {
  BnWindow window = bn_window(shape, GA_F32, samples);
  Random random(5);
  for (size_t k = 0; k < window.size(); ++k) {
    for (int64_t s = 0; s < window[k].samples; ++s) {
      for (int64_t p = 0; p < shape.positions; ++p) {
        const auto set = [&](int64_t channel, double x) {
          window[k].x.set(shape.at(s, channel, p), x);
        };
        const bool first = k == 0 && s == 0 && p == 0;
        const bool last =
            k + 1 == window.size() && s + 1 == window[k].samples && p + 1 == shape.positions;
        const double unit = random.signed_unit();
        set(0, 1e4 + 0.17 * unit);   // variance 1e-2
        set(1, 3.7);                 // constant
        set(2, first ? 1e8 : unit);  // an outlier as the first element
        set(3, last ? -1e8 : unit);
        set(4, s == 0 && p == shape.positions / 2 ? 1e6 : 1e-3 * unit);
        set(5, 0);
        set(6, 1e30 * unit);
        set(7, 1e-25 * unit);
        set(8, static_cast<double>(k) * 1e6 + unit);  // another mean for each micro-batch
        set(9, (p % 2 ? 1 : -1) * 65504 + unit);
        set(10, -1e7 + std::floor(4 * unit));  // a few units in the last place
      }
    }
  }
  return window;
}

TEST(BatchNormNumbers, DataThatHurts) {
  for (const int32_t mode : kModes) {
    for (const int32_t layout : kLayouts) {
      for (const int64_t positions : {1, 49, 1000}) {
        for (const std::vector<int64_t>& samples :
             {std::vector<int64_t>{1}, {1, 1}, {8}, {3, 1, 4}}) {
          SCOPED_TRACE(testing::Message()
                       << mode_name(mode) << ", layout " << layout << ", " << positions
                       << " positions, samples " << testing::PrintToString(samples));
          const ref::BnShape shape{11, positions, layout};
          BnNet net(shape, of_dtype(mode, GA_F32));
          const BnWindow window = adversarial(shape, samples);
          const BnOutput got = net.step(window);
          net.expect_right(window, got);
          // A constant channel gives exactly beta.
          const double beta = net.layer().beta[1];
          for (size_t k = 0; k < window.size(); ++k)
            for (int64_t s = 0; s < window[k].samples; ++s)
              for (int64_t p = 0; p < positions; ++p)
                EXPECT_EQ(got.y[k].get(shape.at(s, 1, p)), beta);
        }
      }
    }
  }
}

// A mean 1e5 times the deviation costs no accuracy: y is as accurate as with a mean of 0. (E[x^2] -
// mean^2 would lose every digit of the variance in f32, and with 1e9 in f64.)
TEST(BatchNormNumbers, ALargeMeanCostsNothing) {
  const ref::BnShape shape{1, 4096, GA_BN_CHANNELS_FIRST};
  for (const double mean : {0.0, 1e5, 1e9}) {
    const int32_t dtype = mean == 1e9 ? GA_F64 : GA_F32;
    BnWindow window = bn_window(shape, dtype, {1, 1});
    Random random(3);
    for (BnData& m : window)  // multiples of 2^-6, which f32 can represent there
      for (int64_t i = 0; i < 4096; ++i)
        m.x.set(i, mean + static_cast<double>(random.below(129) - 64) / 64);
    BnNet net(shape, of_dtype(GA_BN_WINDOW, dtype));
    net.step(window);
    const Running r(net.ctx, net.bn, 1);
    // Numbers k / 64 with k uniform in [-64, 64] have the variance (129^2 - 1) / 12 / 4096, on
    // average.
    const double variance = (r.variance[0] - 0.9) / 0.1;
    EXPECT_NEAR(variance, 0.3385, 0.01);
    const auto want = ref::batch_norm(net.layer(), bn_micros(window, GA_GRADIENT_MEAN), dtype);
    EXPECT_NEAR(variance, want.window[0].squares / 8191, 1e-12);
  }
}

// n = 1: y is beta and dx is 0, exactly.
TEST(BatchNormNumbers, OneElement) {
  for (const int32_t mode : kModes) {
    for (const int32_t dtype : kDtypes) {
      const ref::BnShape shape{4, 1, GA_BN_CHANNELS_LAST};
      BnNet net(shape, of_dtype(mode, dtype));
      const BnWindow window = bn_window(shape, dtype, {1});
      const BnOutput got = net.step(window);
      for (int64_t c = 0; c < 4; ++c) {
        const double beta = net.layer().beta[static_cast<size_t>(c)];
        EXPECT_EQ(got.y[0].get(c), to_nearest(beta, format(dtype)));
        EXPECT_EQ(got.dx[0].get(c), 0);
        EXPECT_EQ(got.dgamma[static_cast<size_t>(c)], 0);
        EXPECT_EQ(got.dbeta[static_cast<size_t>(c)], window[0].dy.get(c));
      }
      const Running r(net.ctx, net.bn, 4);
      EXPECT_EQ(r.variance, std::vector<double>(4, 1)) << "one element has no unbiased variance";
      EXPECT_EQ(r.steps, 1);
    }
  }
}

// Without samples or positions nothing is read, written or counted.
TEST(BatchNormNumbers, NoElements) {
  for (const int32_t mode : kModes) {
    const ref::BnShape shape{4, 7, GA_BN_CHANNELS_FIRST};
    BnNet net(shape, of_dtype(mode, GA_F32)), others(shape, of_dtype(mode, GA_F32));
    const BnWindow window = bn_window(shape, GA_F32, {2, 0, 3});
    const BnOutput got = net.step(window);
    net.expect_right(window, got);
    const BnOutput want = others.step(without(window, 1));
    EXPECT_EQ(got.y[2], want.y[1]);
    EXPECT_EQ(got.dx[2], want.dx[1]);
    EXPECT_EQ(Running(net.ctx, net.bn, 4), Running(others.ctx, others.bn, 4));
    // A window without elements moves nothing.
    const Running before(net.ctx, net.bn, 4);
    net.run(bn_window(shape, GA_F32, {0}));
    step(net.ctx);
    EXPECT_EQ(Running(net.ctx, net.bn, 4), before);
  }
}

// ---- Running statistics: what moves them --------------------------------------------------------

const ref::BnShape kShape{3, 7, GA_BN_CHANNELS_FIRST};

// Statistics that the program computes: as variances or sums of squares, in f32 or f64.
TEST(BatchNormRunning, FromStatisticsOfTheProgram) {
  for (const int32_t mode : kModes) {
    for (const int32_t dtype : {GA_F32, GA_F64}) {
      for (const int32_t kind : {GA_BN_VARIANCE, GA_BN_M2}) {
        BnNet net(kShape, of_dtype(mode, GA_F32));
        Random random(9);
        double n = 0, sum[3] = {}, m2[3] = {};
        std::vector<std::vector<double>> means, spreads;
        const std::vector<int64_t> counts = {20, 1, 0, 7, 300};
        for (size_t k = 0; k < counts.size(); ++k) {
          Tensor mean(dtype, 3), spread(dtype, 3);
          for (int64_t c = 0; c < 3; ++c) {
            mean.set(c, 100 + random.signed_unit());
            spread.set(c, counts[k] == 1 ? 0 : 2 + random.signed_unit());
          }
          EXPECT_OK(ga_bn_accumulate_stats(net.ctx, net.bn, counts[k], mean.data(), spread.data(),
                                           kind, dtype));
          n += static_cast<double>(counts[k]);
          for (size_t c = 0; c < 3; ++c)
            sum[c] += static_cast<double>(counts[k]) * mean.get(static_cast<int64_t>(c));
          means.push_back(numbers(mean));
          spreads.push_back(numbers(spread));
          if (mode == GA_BN_WINDOW) continue;
          EXPECT_OK(ga_micro_begin(net.ctx, static_cast<int64_t>(k), 1, nullptr));
          EXPECT_OK(ga_micro_end(net.ctx));
        }
        if (mode == GA_BN_WINDOW) {
          EXPECT_OK(ga_bn_finalize(net.ctx, net.bn));
          EXPECT_OK(ga_micro_begin(net.ctx, 0, 1, nullptr));
          EXPECT_OK(ga_micro_end(net.ctx));
        }
        EXPECT_EQ(step(net.ctx).outcome, GA_STEP_APPLIED);
        const Running got(net.ctx, net.bn, 3);
        for (size_t c = 0; c < 3; ++c) {
          const double mean = sum[c] / n;
          for (size_t k = 0; k < counts.size(); ++k) {
            const auto n_k = static_cast<double>(counts[k]);
            const double d = means[k][c] - mean;
            if (counts[k] > 0) m2[c] += spreads[k][c] * (kind == GA_BN_M2 ? 1 : n_k) + n_k * d * d;
          }
          // A few roundings of numbers of order 100 for each micro-batch.
          EXPECT_NEAR(got.mean[c], 0.1 * mean, 0x1p-53 * 64 * 100);
          EXPECT_NEAR(got.variance[c], 0.9 + 0.1 * m2[c] / (n - 1), 0x1p-53 * 64 * 100);
        }
      }
    }
  }
}

// MICRO and CUMULATIVE: ga_bn_forward uses statistics that were taken before it, of the same x or
// not; later statistics replace earlier ones.
TEST(BatchNormRunning, StatisticsBeforeTheForwardPass) {
  for (const int32_t mode : {GA_BN_MICRO, GA_BN_CUMULATIVE}) {
    BnNet net(kShape, of_dtype(mode, GA_F32)), plain(kShape, of_dtype(mode, GA_F32));
    const BnWindow window = bn_window(kShape, GA_F32, {2, 3}),
                   other = bn_window(kShape, GA_F32, {9}, 7);
    BnOutput out = bn_output(window);
    for (size_t k = 0; k < 2; ++k) {
      net.take(window[k]);
      net.take(window[k]);  // the same statistics again change nothing
      net.forward(window[k], out.y[k]);
      net.forward(window[k], out.y[k]);
      net.in_micro(k, window[k], [&] {
        net.take(other[0]);
        net.take(window[k]);  // replaces the other statistics
        net.forward(window[k], out.y[k]);
        net.backward(window[k], out.dx[k]);
      });
    }
    EXPECT_EQ(step(net.ctx).outcome, GA_STEP_APPLIED);
    const BnOutput want = plain.step(window);
    EXPECT_TRUE(out.y == want.y);
    EXPECT_TRUE(out.dx == want.dx);
    EXPECT_EQ(Running(net.ctx, net.bn, 3), Running(plain.ctx, plain.bn, 3));

    const float mean[3] = {1, 2, 3}, variance[3] = {4, 4, 4};
    Tensor y(GA_F32, 42);
    EXPECT_OK(ga_bn_accumulate_stats(net.ctx, net.bn, 14, mean, variance, GA_BN_VARIANCE, GA_F32));
    net.forward(window[0], y);
    for (int64_t i = 0; i < 42; ++i) {
      const auto c = static_cast<size_t>(i / 7 % 3);
      const double want_y =
          net.layer().gamma[c] * (window[0].x.get(i) - mean[c]) / std::sqrt(4 + 1e-5) +
          net.layer().beta[c];
      EXPECT_NEAR(y.get(i), want_y, 8 * 0x1p-24 * (1 + std::abs(want_y)));
    }
  }
}

// Micro-batches filled in turns: new statistics of a micro-batch replace its old ones, in every
// order of visits, and CUMULATIVE normalises micro-batch k by those of 0..k.
TEST(BatchNormRunning, MicroBatchesInTurns) {
  const BnWindow data = bn_window(kShape, GA_F64, {2, 3, 1, 4}),
                 other = bn_window(kShape, GA_F64, {5, 2, 3, 2}, 9);
  const struct {
    size_t micro;
    bool others;  // x of `other`
  } visits[] = {{0, true},  {1, false}, {0, false}, {2, true},  {1, true},
                {3, false}, {2, false}, {1, false}, {3, false}, {0, false}};
  for (const int32_t mode : {GA_BN_MICRO, GA_BN_CUMULATIVE}) {
    SCOPED_TRACE(mode_name(mode));
    BnNet net(kShape, of_dtype(mode, GA_F64));
    std::vector<const BnData*> seen;
    for (const auto& visit : visits) {
      const BnData& m = visit.others ? other[visit.micro] : data[visit.micro];
      seen.resize(std::max(seen.size(), visit.micro + 1));
      seen[visit.micro] = &m;
      Tensor y(GA_F64, m.x.count()), dx(GA_F64, m.x.count());
      EXPECT_OK(ga_micro_begin(net.ctx, static_cast<int64_t>(visit.micro), 1, nullptr));
      net.forward(m, y);
      EXPECT_OK(ga_micro_end(net.ctx));
      // The reference computes the micro-batches up to this one as a window of their own.
      BnWindow until;
      for (size_t k = 0; k <= visit.micro; ++k) until.push_back(*seen[k]);
      const auto want = ref::batch_norm(net.layer(), bn_micros(until, GA_GRADIENT_MEAN), GA_F64);
      EXPECT_TRUE(near(y, want.y.back())) << "micro-batch " << visit.micro;
    }
    EXPECT_EQ(step(net.ctx).outcome, GA_STEP_APPLIED);
    BnNet plain(kShape, of_dtype(mode, GA_F64));
    plain.step(data);
    EXPECT_EQ(Running(net.ctx, net.bn, 3), Running(plain.ctx, plain.bn, 3));
  }
}

// dx uses the sums of its own x and dy, whatever was visited in between and however often; gamma
// and beta get the sums of a micro-batch once.
TEST(BatchNormRunning, BackwardOfMicroBatchesInTurns) {
  const BnWindow data = bn_window(kShape, GA_F64, {2, 3, 1}),
                 other = bn_window(kShape, GA_F64, {2, 3, 1}, 9);
  for (const int32_t mode : {GA_BN_MICRO, GA_BN_CUMULATIVE}) {
    SCOPED_TRACE(mode_name(mode));
    BnNet net(kShape, of_dtype(mode, GA_F64)), plain(kShape, of_dtype(mode, GA_F64));
    const BnOutput want = plain.step(data);
    BnOutput out = bn_output(data);
    Tensor y(GA_F64, out.y[1].count()), dx(GA_F64, out.dx[1].count());
    for (size_t k = 0; k < 3; ++k) {
      net.in_micro(k, data[k], [&] {
        net.forward(data[k], out.y[k]);
        net.sum(data[k]);
        if (k == 1) net.backward(data[k], out.dx[k]);
      });
    }
    // All once more; micro-batch 1 first with other data, which affect nothing but their own dx.
    net.in_micro(1, data[1], [&] {
      net.forward(other[1], y);
      net.backward(other[1], dx);
      net.forward(data[1], y);
      net.backward(other[1], dx);
      net.backward(data[1], dx);
      EXPECT_EQ(dx, out.dx[1]);
    });
    for (const size_t k : {2, 0, 1}) {
      net.in_micro(k, data[k], [&] {
        net.forward(data[k], out.y[k]);
        net.backward(data[k], out.dx[k]);
      });
    }
    EXPECT_EQ(step(net.ctx).outcome, GA_STEP_APPLIED);
    out.dgamma = external_gradient(net.ctx, net.gamma, 3);
    out.dbeta = external_gradient(net.ctx, net.beta, 3);
    EXPECT_TRUE(out == want);
    EXPECT_EQ(Running(net.ctx, net.bn, 3), Running(plain.ctx, plain.bn, 3));
  }
}

// Sums that wait for the check of their micro-batch are not replaced.
TEST(BatchNormRunning, DeferredSumsAreKept) {
  ga_config c = config();
  c.nonfinite = GA_NONFINITE_DROP_MICRO;
  const BnWindow data = bn_window(kShape, GA_F64, {2}), other = bn_window(kShape, GA_F64, {2}, 9);
  BnNet net(kShape, of_dtype(GA_BN_MICRO, GA_F64), c),
      plain(kShape, of_dtype(GA_BN_MICRO, GA_F64), c);
  const BnOutput want = plain.step(data);
  BnOutput out = bn_output(data);
  Tensor y(GA_F64, out.y[0].count());
  net.in_micro(0, data[0], [&] {
    net.forward(data[0], out.y[0]);
    net.backward(data[0], out.dx[0]);
    net.forward(other[0], y);
    EXPECT_TRUE(refused(
        ga_bn_backward(net.ctx, net.bn, other[0].x.data(), other[0].dy.data(), 2, 7, y.data()),
        GA_ERROR_INVALID_STATE, {"ga_bn_backward", "judged"}));
    net.forward(data[0], y);
  });
  EXPECT_EQ(step(net.ctx).outcome, GA_STEP_APPLIED);
  out.dgamma = external_gradient(net.ctx, net.gamma, 3);
  out.dbeta = external_gradient(net.ctx, net.beta, 3);
  EXPECT_TRUE(out == want);
}

// One channel of a layer with momentum 1, so that the running statistics are those of the window.
struct OneChannel {
  explicit OneChannel(int32_t mode, const ga_config& c = config()) : ctx(c) {
    const ga_group group = ctx.group(optimizer(GA_OPTIMIZER_SGD));
    add(ctx, group, param);
    ga_bn_options o = of_dtype(mode, GA_F64);
    o.momentum = 1;
    o.biased = 1;
    EXPECT_OK(ga_bn_add(ctx, "bn", 1, -1, -1, &o, &bn));
  }
  ga_status forward(std::vector<double> values, std::vector<double>* out = nullptr) {
    Tensor x(GA_F64, static_cast<int64_t>(values.size())), y(GA_F64, x.count());
    for (int64_t i = 0; i < x.count(); ++i) x.set(i, values[static_cast<size_t>(i)]);
    const ga_status status = ga_bn_forward(ctx, bn, x.data(), x.count(), 1, y.data());
    EXPECT_OK(ga_synchronize(ctx));  // x and y go out of scope
    if (out) *out = numbers(y);
    return status;
  }
  ga_status give(double mean, double variance) {
    Tensor m(GA_F64, 1, mean), v(GA_F64, 1, variance);
    const ga_status status =
        ga_bn_accumulate_stats(ctx, bn, 2, m.data(), v.data(), GA_BN_VARIANCE, GA_F64);
    EXPECT_OK(ga_synchronize(ctx));
    return status;
  }
  void whole() {  // a micro-batch with a gradient
    const void* const at = gradient.data();
    EXPECT_OK(ga_accumulate(ctx, &at, 1, 1, nullptr));
  }
  void empty(int64_t index) {
    EXPECT_OK(ga_micro_begin(ctx, index, 1, nullptr));
    EXPECT_OK(ga_micro_end(ctx));
  }

  Context ctx;
  Tensor param{GA_F64, 1, 1.0}, gradient{GA_F64, 1, 0.5};
  ga_bn bn = -1;
};

// By hand: [0, 2] and [10, 12] have the mean 6 and the variance 26.
TEST(BatchNormRunning, AnEarlierMicroBatchOnceMore) {
  for (const int32_t mode : {GA_BN_MICRO, GA_BN_CUMULATIVE}) {
    OneChannel net(mode);
    std::vector<double> y;
    for (const int64_t index : {0, 1, 0}) {
      EXPECT_OK(ga_micro_begin(net.ctx, index, 1, nullptr));
      EXPECT_OK(
          net.forward(index == 0 ? std::vector<double>{0, 2} : std::vector<double>{10, 12}, &y));
      EXPECT_OK(ga_micro_end(net.ctx));
    }
    EXPECT_NEAR(y[0], -1 / std::sqrt(1 + 1e-5), 1e-15) << "not normalised by itself alone";
    EXPECT_EQ(step(net.ctx).outcome, GA_STEP_APPLIED);
    const Running running(net.ctx, net.bn, 1);
    EXPECT_EQ(running.mean[0], 6);
    EXPECT_EQ(running.variance[0], 26);
  }
}

// A program that adds up its gradients itself might bring the statistics of four micro-batches and
// call ga_accumulate once: that would be one micro-batch with the last statistics. Each call after
// the first is refused.
TEST(BatchNormRunning, StatisticsOfAnUnopenedMicroBatchComeOnce) {
  for (const int32_t mode : {GA_BN_MICRO, GA_BN_CUMULATIVE}) {
    OneChannel net(mode);
    EXPECT_OK(net.give(1, 1));
    for (int k = 2; k <= 4; ++k)
      EXPECT_TRUE(refused(net.give(k, 1), GA_ERROR_INVALID_STATE,
                          {"ga_bn_accumulate_stats", "\"bn\"", "micro-batch 0", "ga_micro_begin"}));
    EXPECT_OK(net.give(1, 1)) << "the same statistics may come again";
    net.whole();
    EXPECT_EQ(step(net.ctx).outcome, GA_STEP_APPLIED);
    EXPECT_EQ(Running(net.ctx, net.bn, 1).mean[0], 1) << "changed by a call that failed";

    // The right way opens and closes each micro-batch. 1..4 have the mean 2.5 and the variance 1 +
    // 1.25.
    for (int64_t k = 0; k < 4; ++k) {
      EXPECT_OK(net.give(static_cast<double>(k + 1), 1));
      net.empty(k);
    }
    net.whole();
    EXPECT_EQ(step(net.ctx).outcome, GA_STEP_APPLIED);
    const Running running(net.ctx, net.bn, 1);
    EXPECT_EQ(running.mean[0], 2.5);
    EXPECT_EQ(running.variance[0], 2.25);

    // The same holds for the forward pass; a refused call does not write y.
    EXPECT_OK(net.forward({0, 2}));
    EXPECT_OK(net.forward({0, 2}));
    std::vector<double> y;
    EXPECT_TRUE(refused(net.forward({10, 12}, &y), GA_ERROR_INVALID_STATE, {"ga_bn_forward"}));
    EXPECT_EQ(y, std::vector<double>(2, 0.0));
    Tensor x(GA_F64, 2, 3.0);
    EXPECT_TRUE(refused(ga_bn_accumulate(net.ctx, net.bn, x.data(), 2, 1), GA_ERROR_INVALID_STATE,
                        {"ga_bn_accumulate"}));
    net.whole();
    EXPECT_EQ(step(net.ctx).outcome, GA_STEP_APPLIED);
    EXPECT_EQ(Running(net.ctx, net.bn, 1).mean[0], 1);
  }
}

// A forward pass for a micro-batch that is never opened does not belong to the window.
TEST(BatchNormRunning, AMicroBatchThatIsNeverOpenedDoesNotCount) {
  for (const int32_t mode : {GA_BN_MICRO, GA_BN_CUMULATIVE}) {
    OneChannel net(mode);
    EXPECT_OK(net.forward({0, 2}));
    net.whole();
    EXPECT_OK(net.forward({100, 200}));
    EXPECT_EQ(step(net.ctx).outcome, GA_STEP_APPLIED);
    Running running(net.ctx, net.bn, 1);
    EXPECT_EQ(running.mean[0], 1);
    EXPECT_EQ(running.variance[0], 1);
    // It does not belong to the next window either.
    EXPECT_OK(net.forward({4, 8}));
    net.whole();
    EXPECT_EQ(step(net.ctx).outcome, GA_STEP_APPLIED);
    running = Running(net.ctx, net.bn, 1);
    EXPECT_EQ(running.mean[0], 6);
    EXPECT_EQ(running.variance[0], 4);
    EXPECT_EQ(running.steps, 2);
  }
}

// A micro-batch keeps the statistics that the program gave when it is visited again.
TEST(BatchNormRunning, GivenStatisticsStayWithTheirMicroBatch) {
  for (const int32_t mode : {GA_BN_MICRO, GA_BN_CUMULATIVE}) {
    OneChannel net(mode);
    EXPECT_OK(net.give(5, 3));
    net.empty(0);
    EXPECT_OK(net.give(7, 3));
    net.empty(1);
    EXPECT_OK(ga_micro_begin(net.ctx, 0, 1, nullptr));
    std::vector<double> y;
    EXPECT_OK(net.forward({5, 5 + std::sqrt(3 + 1e-5)}, &y));  // not the statistics of [5, 6.7]
    EXPECT_OK(ga_micro_end(net.ctx));
    EXPECT_NEAR(y[0], 0, 1e-15);
    EXPECT_NEAR(y[1], 1, 1e-15);
    EXPECT_EQ(step(net.ctx).outcome, GA_STEP_APPLIED);
    EXPECT_EQ(Running(net.ctx, net.bn, 1).mean[0], 6);
    EXPECT_EQ(Running(net.ctx, net.bn, 1).variance[0], 4);
  }
}

// A skipped or discarded window does not move the running statistics; under FAIL the window is
// kept.
TEST(BatchNormRunning, OnlyAppliedStepsMoveThem) {
  for (const int32_t mode : kModes) {
    for (const int32_t policy : {GA_NONFINITE_SKIP_STEP, GA_NONFINITE_FAIL, GA_NONFINITE_IGNORE}) {
      SCOPED_TRACE(testing::Message() << mode_name(mode) << ", policy " << policy);
      ga_config c = config();
      c.nonfinite = policy;
      BnNet net(kShape, of_dtype(mode, GA_F32), c), calm(kShape, of_dtype(mode, GA_F32), c);
      const BnWindow good = bn_window(kShape, GA_F32, {2, 3}),
                     better = bn_window(kShape, GA_F32, {4}, 2);
      net.step(good);
      calm.step(good);
      const Running before(net.ctx, net.bn, 3);
      EXPECT_EQ(before.steps, 1);

      BnWindow bad = bn_window(kShape, GA_F32, {2, 3}, 3);
      bad[1].dy.set(11, INFINITY);
      net.run(bad);
      if (policy == GA_NONFINITE_FAIL) {
        EXPECT_TRUE(refused(ga_step(net.ctx, nullptr), GA_ERROR_NONFINITE, {}));
        EXPECT_EQ(Running(net.ctx, net.bn, 3), before);
        int64_t count = 0;
        EXPECT_OK(ga_bn_statistics(net.ctx, net.bn, nullptr, nullptr, GA_F64, &count));
        EXPECT_EQ(count, mode == GA_BN_MICRO ? 21 : 35) << "the window is kept";
        EXPECT_OK(ga_discard(net.ctx));
      } else if (policy == GA_NONFINITE_SKIP_STEP) {
        EXPECT_EQ(step(net.ctx).outcome, GA_STEP_SKIPPED_NONFINITE);
      } else {
        EXPECT_OK(ga_discard(net.ctx));
      }
      EXPECT_EQ(Running(net.ctx, net.bn, 3), before);
      EXPECT_EQ(ga_bn_statistics(net.ctx, net.bn, nullptr, nullptr, GA_F64, nullptr),
                GA_ERROR_INVALID_STATE);

      // Windows discarded in the middle of a micro-batch and of a pass, an empty one, one of
      // weight 0.
      net.run(better);
      EXPECT_OK(ga_micro_begin(net.ctx, 1, 1, nullptr));
      EXPECT_OK(ga_discard(net.ctx));
      net.take(better[0]);
      EXPECT_OK(ga_discard(net.ctx));
      net.take(better[0]);
      EXPECT_EQ(step(net.ctx).outcome, GA_STEP_SKIPPED_EMPTY);
      BnWindow weightless = better;
      weightless[0].weight = 0;
      net.run(weightless);
      EXPECT_EQ(step(net.ctx).outcome, GA_STEP_SKIPPED_EMPTY);
      EXPECT_EQ(Running(net.ctx, net.bn, 3), before);

      EXPECT_TRUE(net.step(better) == calm.step(better)) << "these windows left a trace";
      EXPECT_EQ(Running(net.ctx, net.bn, 3), Running(calm.ctx, calm.bn, 3));
    }
  }
}

// Nothing normalises by the statistics of a micro-batch that was dropped.
TEST(BatchNorm, NoStatisticsOfADroppedMicroBatch) {
  ga_config c = config();
  c.nonfinite = GA_NONFINITE_DROP_MICRO;
  Context ctx(c);
  float p = 0;
  ctx.param(ctx.group(plain_sgd()), "p", &p, 1);
  ga_bn bn = -1;
  const ga_bn_options o = bn_options(GA_BN_MICRO);
  ASSERT_OK(ga_bn_add(ctx, "bn", 2, -1, -1, &o, &bn));
  const Tensor x = random_tensor(GA_F32, 8, 1);
  Tensor y(GA_F32, 8);
  double mean[2];
  int64_t count = 0;
  for (const float g : {1.0f, NAN, 1.0f}) {
    ASSERT_OK(ga_micro_begin(ctx, -1, 1, nullptr));
    ASSERT_OK(ga_bn_forward(ctx, bn, x.data(), 4, 1, y.data()));
    ASSERT_OK(ga_accumulate_part(ctx, 0, &g));
    ASSERT_OK(ga_bn_statistics(ctx, bn, mean, nullptr, GA_F64, &count)) << "not dropped yet";
    ASSERT_OK(ga_micro_end(ctx));
    const ga_status status = ga_bn_statistics(ctx, bn, mean, nullptr, GA_F64, &count);
    if (std::isnan(g)) {
      EXPECT_TRUE(refused(status, GA_ERROR_INVALID_STATE, {"\"bn\"", "micro-batch 1", "dropped"}));
    } else {
      EXPECT_OK(status);
      EXPECT_EQ(count, 4);
    }
  }
  EXPECT_EQ(step(ctx).window_dropped, 1);
}

// The running statistics leave out a dropped micro-batch with its x.
TEST(BatchNormRunning, DroppedMicroBatchesAreLeftOut) {
  ga_config c = config();
  c.nonfinite = GA_NONFINITE_DROP_MICRO;
  for (const size_t dropped : {0, 1, 2, 3}) {
    for (const bool in_x : {false, true}) {
      SCOPED_TRACE(testing::Message() << "micro-batch " << dropped << ", in x " << in_x);
      BnNet net(kShape, of_dtype(GA_BN_MICRO, GA_F32), c),
          calm(kShape, of_dtype(GA_BN_MICRO, GA_F32), c);
      BnWindow window = bn_window(kShape, GA_F32, {2, 3, 1, 4});
      const BnWindow others = without(window, dropped);
      (in_x ? window[dropped].x : window[dropped].dy).set(5, NAN);
      const BnOutput got = net.run(window);
      EXPECT_EQ(step(net.ctx).window_dropped, 1);
      const BnOutput want = calm.step(others);
      EXPECT_EQ(external_gradient(net.ctx, net.gamma, 3), want.dgamma);
      EXPECT_EQ(external_gradient(net.ctx, net.beta, 3), want.dbeta);
      const Running running(net.ctx, net.bn, 3), right(calm.ctx, calm.bn, 3);
      EXPECT_EQ(running, right);
      for (size_t k = 0; k < 3; ++k) EXPECT_EQ(got.y[k < dropped ? k : k + 1], want.y[k]);
      // All dropped: nothing moves.
      BnWindow bad = bn_window(kShape, GA_F32, {2});
      bad[0].dy.fill(INFINITY);
      net.run(bad);
      EXPECT_NE(step(net.ctx).outcome, GA_STEP_APPLIED);
      EXPECT_EQ(Running(net.ctx, net.bn, 3), right);
    }
  }
}

// A non-finite x in one channel never enters the running statistics, under any policy; other
// channels move.
TEST(BatchNormRunning, NonFiniteInputsNeverGetThere) {
  for (const int32_t mode : kModes) {
    for (const float bad : {NAN, INFINITY, -INFINITY}) {
      for (const int64_t where : {int64_t{7}, int64_t{12}}) {  // the channel's first, or another
        ga_config c = config();
        c.nonfinite = GA_NONFINITE_IGNORE;
        BnNet net(kShape, of_dtype(mode, GA_F32), c), clean(kShape, of_dtype(mode, GA_F32), c);
        BnWindow window = bn_window(kShape, GA_F32, {2, 3});
        clean.step(window);
        window[0].x.set(where, bad);
        net.run(window);
        EXPECT_EQ(step(net.ctx).outcome, GA_STEP_APPLIED) << "IGNORE does not check gradients";
        const Running got(net.ctx, net.bn, 3), want(clean.ctx, clean.bn, 3);
        EXPECT_EQ(got.mean[1], 0);
        EXPECT_EQ(got.variance[1], 1);
        for (const size_t c2 : {0, 2}) {
          EXPECT_EQ(got.mean[c2], want.mean[c2]);
          EXPECT_EQ(got.variance[c2], want.variance[c2]);
        }
        // The same without non-finite gradients: a window of statistics alone.
        BnNet alone(kShape, of_dtype(mode, GA_F32));
        alone.take(window[0]);
        EXPECT_OK(ga_micro_begin(alone.ctx, 0, 1, nullptr));
        EXPECT_OK(ga_micro_end(alone.ctx));
        EXPECT_EQ(step(alone.ctx).outcome, GA_STEP_APPLIED);
        const Running of(alone.ctx, alone.bn, 3);
        EXPECT_EQ(of.mean[1], 0);
        EXPECT_EQ(of.variance[1], 1);
        EXPECT_NE(of.mean[0], 0);
      }
    }
  }
}

// Squares that overflow never enter the running statistics either, even if the mean is finite.
TEST(BatchNormRunning, InfiniteVariancesNeverGetThere) {
  for (const int32_t mode : kModes) {
    BnNet net(kShape, of_dtype(mode, GA_F64));
    BnWindow window = bn_window(kShape, GA_F64, {2});
    for (int64_t i = 7; i < 14; ++i) window[0].x.set(i, i % 2 ? 1e200 : -1e200);
    net.take(window[0]);
    EXPECT_OK(ga_micro_begin(net.ctx, 0, 1, nullptr));
    EXPECT_OK(ga_micro_end(net.ctx));
    EXPECT_EQ(step(net.ctx).outcome, GA_STEP_APPLIED);
    const Running r(net.ctx, net.bn, 3);
    EXPECT_EQ(r.mean[1], 0);
    EXPECT_EQ(r.variance[1], 1);
    EXPECT_NE(r.mean[0], 0);
    EXPECT_EQ(r.steps, 1);
  }
}

// ga_bn_running_set takes what ga_bn_running returns, bit for bit in f64, in another context too.
TEST(BatchNormRunning, GoFromLayerToLayer) {
  BnNet from(kShape, of_dtype(GA_BN_WINDOW, GA_F32)), to(kShape, of_dtype(GA_BN_WINDOW, GA_F32)),
      in_f32(kShape, of_dtype(GA_BN_MICRO, GA_F32));
  const Running fresh(from.ctx, from.bn, 3);
  EXPECT_EQ(fresh.mean, std::vector<double>(3, 0));
  EXPECT_EQ(fresh.variance, std::vector<double>(3, 1));
  EXPECT_EQ(fresh.steps, 0);
  for (uint64_t w = 0; w < 3; ++w) from.step(bn_window(kShape, GA_F32, {2, 3}, w));
  const Running r(from.ctx, from.bn, 3);
  EXPECT_EQ(r.steps, 3);
  EXPECT_OK(ga_bn_running_set(to.ctx, to.bn, r.mean.data(), r.variance.data(), GA_F64, r.steps));
  EXPECT_EQ(Running(to.ctx, to.bn, 3), r);

  std::vector<float> mean(3), variance(3);
  EXPECT_OK(ga_bn_running(from.ctx, from.bn, mean.data(), variance.data(), GA_F32, nullptr));
  EXPECT_OK(ga_bn_running_set(in_f32.ctx, in_f32.bn, mean.data(), variance.data(), GA_F32, 7));
  const Running single(in_f32.ctx, in_f32.bn, 3);
  for (size_t c = 0; c < 3; ++c) {
    EXPECT_EQ(mean[c], static_cast<float>(r.mean[c]));
    EXPECT_EQ(single.mean[c], static_cast<double>(mean[c]));
    EXPECT_EQ(single.variance[c], static_cast<double>(variance[c]));
  }
  EXPECT_EQ(single.steps, 7);
  EXPECT_OK(ga_bn_running(from.ctx, from.bn, nullptr, nullptr, GA_F64, nullptr));

  // Both continue alike.
  const BnWindow next = bn_window(kShape, GA_F32, {5, 1}, 9);
  EXPECT_TRUE(from.step(next) == to.step(next));
  EXPECT_EQ(Running(from.ctx, from.bn, 3), Running(to.ctx, to.bn, 3));

  // A layer of another mode takes them too.
  ga_bn other = -1;
  ga_bn_options o = bn_options(GA_BN_MICRO);
  EXPECT_OK(ga_bn_add(to.ctx, "another", 3, to.gamma, to.beta, &o, &other));
  const Running kept(to.ctx, to.bn, 3);
  EXPECT_OK(
      ga_bn_running_set(to.ctx, other, kept.mean.data(), kept.variance.data(), GA_F64, kept.steps));
  EXPECT_EQ(Running(to.ctx, other, 3), kept);
}

// With momentum 1 the running statistics are the window's; with 0 they do not move.
TEST(BatchNormRunning, MomentumOneAndZero) {
  for (const double momentum : {0.0, 1.0}) {
    ga_bn_options o = bn_options(GA_BN_MICRO);
    o.momentum = momentum;
    o.biased = 1;
    BnNet net(kShape, o);
    const BnWindow window = bn_window(kShape, GA_F32, {2, 3});
    net.step(window);
    const auto r = ref::batch_norm(net.layer(), bn_micros(window, GA_GRADIENT_MEAN), GA_F32);
    const Running got(net.ctx, net.bn, 3);
    for (size_t c = 0; c < 3; ++c) {
      if (momentum == 0) {
        EXPECT_EQ(got.mean[c], 0);
        EXPECT_EQ(got.variance[c], 1);
      } else {
        EXPECT_NEAR(got.mean[c], r.window[c].mean, r.window[c].mean_error + 0x1p-52);
        EXPECT_NEAR(got.variance[c], r.window[c].variance(), r.window[c].squares_error);
      }
    }
    EXPECT_EQ(got.steps, 1);
  }
}

// ---- Frozen layers, inference -------------------------------------------------------------------

// y as normalised by the running statistics.
std::vector<ref::Near> inferred(const BnNet& net, const Running& r, const Tensor& x,
                                const ref::BnShape& shape, double eps, int32_t dtype) {
  const ref::BnArithmetic a = ref::bn_arithmetic(dtype);
  std::vector<ref::Near> y(static_cast<size_t>(x.count()));
  const ref::BnLayer layer = net.layer();
  for (int64_t s = 0; s < x.count() / shape.channels / shape.positions; ++s) {
    for (int64_t c = 0; c < shape.channels; ++c) {
      for (int64_t p = 0; p < shape.positions; ++p) {
        const auto channel = static_cast<size_t>(c);
        const int64_t i = shape.at(s, c, p);
        const double scale = layer.gamma[channel] / std::sqrt(r.variance[channel] + eps);
        const double d = x.get(i) - r.mean[channel], value = d * scale + layer.beta[channel];
        // Two roundings of d, one of the second part of the mean; scale, product, sum, beta.
        const double error =
            a.unit * (4 * std::abs(d * scale) + std::abs(value) + std::abs(layer.beta[channel])) +
            3 * a.unit * a.unit * std::abs(r.mean[channel] * scale) +
            8 * 0x1p-53 * std::abs(d * scale);
        y[static_cast<size_t>(i)] = {value, error + a.round * (std::abs(value) + error) + a.least};
      }
    }
  }
  return y;
}

TEST_P(BatchNorm, InferenceAndFrozenLayers) {
  const ref::BnShape shape{5, 7, layout_};
  const ga_bn_options o = of_dtype(mode_, dtype_);
  BnNet net(shape, o);
  net.step(bn_window(shape, dtype_, {2, 3}));
  net.step(bn_window(shape, dtype_, {4}, 2));
  const Running running(net.ctx, net.bn, 5);
  const BnWindow window = bn_window(shape, dtype_, {3, 2, 4}, 4);

  // Inference, also in the middle of a window, counts nothing.
  Tensor y(dtype_, window[0].x.count(), NAN);
  const auto infer = [&] {
    y.fill(NAN);
    EXPECT_OK(ga_bn_infer(net.ctx, net.bn, window[0].x.data(), 3, 7, y.data()));
    EXPECT_TRUE(near(y, inferred(net, running, window[0].x, shape, o.eps, dtype_)));
  };
  const ga_window_info before = test::window(net.ctx);
  infer();
  EXPECT_TRUE(same_window(before, test::window(net.ctx)));
  BnNet twin(shape, o);
  EXPECT_OK(ga_bn_running_set(twin.ctx, twin.bn, running.mean.data(), running.variance.data(),
                              GA_F64, running.steps));
  net.take(window[0]);
  infer();
  EXPECT_OK(ga_discard(net.ctx));
  net.run(window);
  infer();
  Tensor in_place = window[0].x;
  EXPECT_OK(ga_bn_infer(net.ctx, net.bn, in_place.data(), 3, 7, in_place.data()));
  EXPECT_EQ(in_place, y);
  EXPECT_OK(ga_discard(net.ctx));
  EXPECT_TRUE(net.step(window) == twin.step(window));

  // A frozen layer: y is that of inference, dx = gamma rstd dy, the running statistics stay, and
  // gamma and beta get their gradients once, whatever the mode's calls.
  const Running later(net.ctx, net.bn, 5);
  EXPECT_OK(ga_bn_set_frozen(net.ctx, net.bn, 1));
  const BnOutput got = net.step(window);
  EXPECT_EQ(Running(net.ctx, net.bn, 5), later);
  const ref::BnLayer layer = net.layer();
  const double u = ref::bn_arithmetic(dtype_).unit, round = ref::bn_arithmetic(dtype_).round;
  std::vector<double> dgamma(5), dbeta(5), magnitude(5), products(5);
  for (size_t k = 0; k < window.size(); ++k) {
    EXPECT_TRUE(near(got.y[k], inferred(net, later, window[k].x, shape, o.eps, dtype_)));
    for (int64_t s = 0; s < window[k].samples; ++s) {
      for (int64_t c = 0; c < 5; ++c) {
        for (int64_t p = 0; p < 7; ++p) {
          const auto channel = static_cast<size_t>(c);
          const int64_t i = shape.at(s, c, p);
          const double rstd = 1 / std::sqrt(later.variance[channel] + o.eps);
          const double dy = window[k].dy.get(i);
          const double x = (window[k].x.get(i) - later.mean[channel]) * rstd;
          const double dx = layer.gamma[channel] * rstd * dy;
          EXPECT_NEAR(got.dx[k].get(i), dx,
                      (2 * u + round + 8 * 0x1p-53) * std::abs(dx) * (1 + 0x1p-10) +
                          ref::bn_arithmetic(dtype_).least);
          dbeta[channel] += dy / 3;
          dgamma[channel] += dy * x / 3;
          magnitude[channel] += std::abs(dy) / 3;
          products[channel] += std::abs(dy * x) / 3;
        }
      }
    }
  }
  for (size_t c = 0; c < 5; ++c) {
    const double few = (6 + 2) * u + 80 * 0x1p-53;  // additions, the mean, deviations; sums
    EXPECT_NEAR(got.dbeta[c], dbeta[c], few * magnitude[c]);
    EXPECT_NEAR(got.dgamma[c], dgamma[c], few * products[c] + 0x1p-40 * u * magnitude[c]);
  }

  // A frozen layer takes no statistics and requires no further call.
  net.take(window[0]);
  if (mode_ == GA_BN_WINDOW) {
    EXPECT_OK(ga_bn_finalize(net.ctx, net.bn));
    EXPECT_OK(ga_bn_finalize(net.ctx, net.bn));
  }
  EXPECT_OK(ga_bn_set_frozen(net.ctx, net.bn, 0));
  const BnOutput awake = net.step(window);
  net.expect_right(window, awake);
  EXPECT_EQ(Running(net.ctx, net.bn, 5).steps, later.steps + 1);
}

// ---- Gamma and beta as parameters ---------------------------------------------------------------

// Two layers with the same gamma and beta: gradients add up.
TEST(BatchNormParameters, SharedByTwoLayers) {
  for (const int32_t mode : kModes) {
    BnNet shared(kShape, of_dtype(mode, GA_F32)), one(kShape, of_dtype(mode, GA_F32)),
        other(kShape, of_dtype(mode, GA_F32));
    ga_bn_options o = of_dtype(mode, GA_F32);
    const ga_bn first = shared.bn;
    ga_bn second = -1;
    EXPECT_OK(ga_bn_add(shared.ctx, "second", 3, shared.gamma, shared.beta, &o, &second));
    const BnWindow a = bn_window(kShape, GA_F32, {2, 3}, 1),
                   b = bn_window(kShape, GA_F32, {4, 1}, 2);
    const BnOutput want_a = one.step(a), want_b = other.step(b);
    BnOutput got_a = bn_output(a), got_b = bn_output(b);
    const auto both = [&](auto body) {
      shared.bn = first;
      body(a, got_a);
      shared.bn = second;
      body(b, got_b);
    };
    if (mode == GA_BN_WINDOW) {
      both([&](const BnWindow& w, BnOutput& out) {
        for (const BnData& m : w) shared.take(m);
        EXPECT_OK(ga_bn_finalize(shared.ctx, shared.bn));
        for (size_t k = 0; k < 2; ++k) shared.forward(w[k], out.y[k]);
      });
      for (size_t k = 0; k < 2; ++k)
        shared.in_micro(k, a[k],
                        [&] { both([&](const BnWindow& w, BnOutput&) { shared.sum(w[k]); }); });
      for (size_t k = 0; k < 2; ++k)
        shared.in_micro(k, a[k], [&] {
          both([&](const BnWindow& w, BnOutput& out) { shared.backward(w[k], out.dx[k]); });
        });
    } else {
      for (size_t k = 0; k < 2; ++k) {
        both([&](const BnWindow& w, BnOutput& out) { shared.forward(w[k], out.y[k]); });
        shared.in_micro(k, a[k], [&] {
          both([&](const BnWindow& w, BnOutput& out) { shared.backward(w[k], out.dx[k]); });
        });
      }
    }
    EXPECT_EQ(step(shared.ctx).outcome, GA_STEP_APPLIED);
    EXPECT_TRUE(got_a.y == want_a.y && got_a.dx == want_a.dx);
    EXPECT_TRUE(got_b.y == want_b.y && got_b.dx == want_b.dx);
    const auto dgamma = external_gradient(shared.ctx, shared.gamma, 3);
    for (size_t c = 0; c < 3; ++c) {
      const double sum = want_a.dgamma[c] + want_b.dgamma[c];
      const double size = std::abs(want_a.dgamma[c]) + std::abs(want_b.dgamma[c]);
      // Each of the three sums rounds 2 or 4 contributions, each as large as a micro-batch's.
      EXPECT_NEAR(dgamma[c], sum, 12 * 0x1p-24 * (size + 35));
    }
    EXPECT_EQ(Running(shared.ctx, first, 3), Running(one.ctx, one.bn, 3));
    EXPECT_EQ(Running(shared.ctx, second, 3), Running(other.ctx, other.bn, 3));
  }
}

// Gamma of every dtype: y uses the stored parameter, and the step its master weights.
TEST(BatchNormParameters, OfEveryDtype) {
  for (const int32_t dtype : kDtypes) {
    for (const int32_t master : {GA_MASTER_F32, GA_MASTER_NONE}) {
      if (master == GA_MASTER_NONE && dtype != GA_BF16 && dtype != GA_F16) continue;
      Tensor gamma(dtype, 3, 1.5), beta(dtype, 3, 0.25);
      Context ctx;
      const double lr = 0x1p-12;  // an update of 14 lr is below half a spacing of bf16 at 1.5
      const ga_group group = ctx.group(plain_sgd(lr));
      ga_param_options po = options(dtype == GA_F64 ? GA_F64 : GA_F32);
      po.master = master;
      const ga_param g = add(ctx, group, gamma, {3}, po), b = add(ctx, group, beta, {3}, po);
      ga_bn bn = -1;
      EXPECT_OK(ga_bn_add(ctx, "bn", 3, g, b, nullptr, &bn));
      double want = 1.5;
      for (int t = 0; t < 64; ++t) {
        BnWindow window = bn_window(kShape, GA_F32, {2});
        // x = +-1 has mean 0 and variance 1, and dy = x: dgamma = 14 / sqrt(1 + eps).
        for (int64_t i = 0; i < 42; ++i) {
          window[0].x.set(i, (i / 7 / 3) % 2 ? 1 : -1);
          window[0].dy.set(i, window[0].x.get(i));
        }
        Tensor y(GA_F32, 42), dx(GA_F32, 42);
        EXPECT_OK(ga_bn_forward(ctx, bn, window[0].x.data(), 2, 7, y.data()));
        EXPECT_NEAR(y.get(41), gamma.get(2) / std::sqrt(1 + 1e-5) + beta.get(2), 4e-7);
        EXPECT_OK(ga_micro_begin(ctx, 0, 1, nullptr));
        EXPECT_OK(
            ga_bn_backward(ctx, bn, window[0].x.data(), window[0].dy.data(), 2, 7, dx.data()));
        EXPECT_OK(ga_micro_end(ctx));
        EXPECT_EQ(step(ctx).outcome, GA_STEP_APPLIED);
        want -= lr * 14 / std::sqrt(1 + 1e-5);
      }
      // 64 steps of 14 * 2^-12 are 0.21875.
      const Format& f = format(dtype);
      if (master == GA_MASTER_NONE && dtype == GA_BF16) {
        EXPECT_EQ(gamma.get(0), 1.5) << "without master weights the updates are lost";
      } else {
        const double each = master == GA_MASTER_NONE ? 64 : 1;
        EXPECT_NEAR(gamma.get(0), want, each * 2 * f.roundoff() * 1.5 + 64 * 4 * 0x1p-24);
      }
      EXPECT_EQ(beta.get(0), 0.25) << "its gradient is 0";
    }
  }
}

// Gamma and beta are clipped by a global norm together with other parameters.
TEST(BatchNormParameters, ClippedWithOthers) {
  for (const int32_t mode : kModes) {
    BnNet net(kShape, of_dtype(mode, GA_F32)), free(kShape, of_dtype(mode, GA_F32));
    Tensor other(GA_F32, 4), g(GA_F32, 4);
    for (int64_t i = 0; i < 4; ++i) g.set(i, 3);
    const ga_param id = add(net.ctx, 0, other);
    const ga_clip clipping = clip(GA_CLIP_GLOBAL, 0.5);
    EXPECT_OK(ga_context_set_clip(net.ctx, &clipping));
    const BnWindow window = bn_window(kShape, GA_F32, {2, 3});
    const BnOutput want = free.step(window);
    net.run(window);
    net.in_micro(1, window[1], [&] { EXPECT_OK(ga_accumulate_part(net.ctx, id, g.data())); });
    double squares = 4 * 1.5 * 1.5;
    for (size_t c = 0; c < 3; ++c)
      squares += want.dgamma[c] * want.dgamma[c] + want.dbeta[c] * want.dbeta[c];
    const ga_step_result r = step(net.ctx);
    EXPECT_NEAR(r.norm, std::sqrt(squares), ref::kUsualNorm * r.norm);
    EXPECT_NEAR(r.clip_factor, 0.5 / (std::sqrt(squares) + 1e-6), ref::kUsualNorm);
    const auto dgamma = external_gradient(net.ctx, net.gamma, 3);
    for (size_t c = 0; c < 3; ++c) {
      EXPECT_NEAR(dgamma[c], r.clip_factor * want.dgamma[c],
                  2 * 0x1p-24 * std::abs(r.clip_factor * want.dgamma[c]));
    }
  }
}

// Live gradients, a running mean and 16-bit accumulators give the same window.
TEST(BatchNormParameters, WaysToAccumulate) {
  const BnWindow window = [] {
    BnWindow w = bn_window(kShape, GA_F32, {2, 3, 1});
    for (size_t k = 0; k < 3; ++k) w[k].weight = static_cast<double>(w[k].samples);
    return w;
  }();
  for (const int32_t mode : kModes) {
    BnNet plain(kShape, of_dtype(mode, GA_F32));
    const BnOutput want = plain.step(window);
    ga_config live = config();
    live.gradient_life = GA_GRADIENTS_LIVE;
    BnNet net(kShape, of_dtype(mode, GA_F32), live);
    EXPECT_TRUE(net.step(window) == want) << "GA_GRADIENTS_LIVE";
    EXPECT_TRUE(net.step(window) == want) << "the second time";

    for (const int32_t way :
         {GA_ACCUMULATE_RUNNING_MEAN, GA_ACCUMULATE_COMPENSATED, GA_ACCUMULATE_STOCHASTIC}) {
      ga_config c = config();
      c.accumulation = way;
      BnNet other(kShape, of_dtype(mode, GA_F32), c);
      const BnOutput got = other.step(window);
      EXPECT_TRUE(got.y == want.y && got.dx == want.dx);
      if (way != GA_ACCUMULATE_RUNNING_MEAN) {
        EXPECT_TRUE(got == want) << "f32 accumulators must not differ";
        continue;
      }
      const auto r = ref::batch_norm(other.layer(), bn_micros(window, GA_GRADIENT_MEAN), GA_F32);
      // Each micro-batch adds two roundings.
      auto dgamma = reduced(r.dgamma, 6, 0x1p-24);
      for (ref::Near& d : dgamma) d.tolerance *= 2;
      EXPECT_TRUE(near(got.dgamma, dgamma));
    }
  }
}

// Together with other contributions to the same parameters, also with live gradients of the
// program.
TEST(BatchNormParameters, BesideOtherContributions) {
  for (const int32_t life : {GA_GRADIENTS_CONSUMED, GA_GRADIENTS_LIVE}) {
    ga_config c = config();
    c.gradient_life = life;
    BnNet net(kShape, of_dtype(GA_BN_MICRO, GA_F32), c),
        alone(kShape, of_dtype(GA_BN_MICRO, GA_F32));
    const BnWindow window = bn_window(kShape, GA_F32, {4});
    const BnOutput want = alone.step(window);
    const Tensor penalty(GA_F32, 3, 0.5);
    Tensor dx(GA_F32, window[0].x.count()), y = dx;
    for (const bool before : {true, false}) {
      net.forward(window[0], y);
      net.in_micro(0, window[0], [&] {
        const auto add = [&] { EXPECT_OK(ga_accumulate_part(net.ctx, net.gamma, penalty.data())); };
        if (before) add();
        net.backward(window[0], dx);
        if (!before) add();
      });
      EXPECT_EQ(step(net.ctx).outcome, GA_STEP_APPLIED);
      EXPECT_EQ(dx, want.dx[0]);
      const auto dgamma = external_gradient(net.ctx, net.gamma, 3);
      for (size_t i = 0; i < 3; ++i)
        EXPECT_EQ(dgamma[i], static_cast<float>(want.dgamma[i]) + 0.5f);
    }
  }
}

// A frozen parameter gets no gradient; dx does not depend on freezing.
TEST(BatchNormParameters, Frozen) {
  for (const int32_t mode : kModes) {
    BnNet net(kShape, of_dtype(mode, GA_F32)), awake(kShape, of_dtype(mode, GA_F32));
    EXPECT_OK(ga_param_set_frozen(net.ctx, net.gamma, 1));
    const BnWindow window = bn_window(kShape, GA_F32, {2, 3});
    const BnOutput got = net.run(window), want = awake.step(window);
    EXPECT_EQ(step(net.ctx).outcome, GA_STEP_APPLIED);
    EXPECT_TRUE(got.y == want.y && got.dx == want.dx);
    EXPECT_EQ(external_gradient(net.ctx, net.beta, 3), want.dbeta);
    const void* data;
    EXPECT_EQ(ga_gradient(net.ctx, net.gamma, &data, nullptr, nullptr), GA_ERROR_INVALID_STATE);
  }
}

}  // namespace
}  // namespace ga::test
