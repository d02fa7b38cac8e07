// SPDX-License-Identifier: Apache-2.0
#include "batchnorm.hpp"

#include <cstdio>
#include <string>
#include <utility>

namespace ga::test {

ga_bn_options bn_options(int32_t mode, int32_t flavor) {
  ga_bn_options o;
  EXPECT_OK(ga_bn_options_init(&o, sizeof o, flavor));
  o.mode = mode;
  return o;
}

BnWindow bn_window(const ref::BnShape& shape, int32_t dtype, const std::vector<int64_t>& samples,
                   uint64_t seed) {
  static constexpr double kDeviations[] = {1, 0.1, 10};
  BnWindow window;
  Random random(seed);
  for (const int64_t n : samples) {
    const int64_t count = n * shape.channels * shape.positions;
    BnData data{n, Tensor(dtype, count), Tensor(dtype, count)};
    for (int64_t c = 0; c < shape.channels; ++c) {
      Random of_channel(static_cast<uint64_t>(c) + 77);
      const double mean = 3 * of_channel.signed_unit();
      for (int64_t s = 0; s < n; ++s) {
        for (int64_t p = 0; p < shape.positions; ++p) {
          const int64_t i = shape.at(s, c, p);
          data.x.set(i, mean + kDeviations[c % 3] * random.signed_unit());
          data.dy.set(i, random.signed_unit() + 0.25);
        }
      }
    }
    window.push_back(std::move(data));
  }
  return window;
}

BnData joined(const BnWindow& window, const ref::BnShape& shape) {
  int64_t samples = 0, next = 0;
  for (const BnData& m : window) samples += m.samples;
  const int64_t count = samples * shape.channels * shape.positions;
  const int32_t dtype = window[0].x.dtype();
  BnData all{samples, Tensor(dtype, count), Tensor(dtype, count)};
  all.weight = 0;
  for (const BnData& m : window) {
    for (int64_t i = 0; i < m.x.count(); ++i, ++next) {
      all.x.set(next, m.x.get(i));
      all.dy.set(next, m.dy.get(i));
    }
    all.weight += m.weight;
  }
  return all;
}

std::vector<double> joined(const std::vector<Tensor>& parts) {
  std::vector<double> all;
  for (const Tensor& t : parts)
    for (int64_t i = 0; i < t.count(); ++i) all.push_back(t.get(i));
  return all;
}

BnWindow without(const BnWindow& window, size_t k) {
  BnWindow others;
  for (size_t j = 0; j < window.size(); ++j) {
    if (j != k) others.push_back(window[j]);
  }
  return others;
}

double bn_share(const BnData& m, int32_t gradient_kind) {
  if (m.weight == 0) return 0;
  return (gradient_kind == GA_GRADIENT_MEAN ? m.weight : 1) / m.loss_scale;
}

std::vector<double> numbers(const Tensor& t) {
  std::vector<double> result;
  for (int64_t i = 0; i < t.count(); ++i) result.push_back(t.get(i));
  return result;
}

std::vector<ref::BnMicro> bn_micros(const BnWindow& window, int32_t gradient_kind) {
  std::vector<ref::BnMicro> result;
  for (const BnData& m : window)
    result.push_back({m.samples, numbers(m.x), numbers(m.dy), bn_share(m, gradient_kind)});
  return result;
}

testing::AssertionResult near(const std::vector<double>& got, const std::vector<ref::Near>& want) {
  if (got.size() != want.size())
    return testing::AssertionFailure() << got.size() << " numbers, not " << want.size();
  for (size_t i = 0; i < got.size(); ++i) {
    if (want[i].holds(got[i])) continue;
    char text[200];
    snprintf(text, sizeof text, "[%zu] is %.17g, not %.17g: %.3g times the tolerance", i, got[i],
             want[i].value, std::abs(got[i] - want[i].value) / want[i].tolerance);
    return testing::AssertionFailure() << text;
  }
  return testing::AssertionSuccess();
}

std::vector<ref::Near> reduced(std::vector<ref::Near> sums, double divisor, double unit) {
  for (ref::Near& s : sums) {
    s.value /= divisor;
    s.tolerance = s.tolerance / std::abs(divisor) + 2 * unit * std::abs(s.value);
  }
  return sums;
}

BnOutput bn_output(const BnWindow& window) {
  BnOutput out;
  for (const BnData& m : window) {
    out.y.emplace_back(m.x.dtype(), m.x.count(), NAN);
    out.dx.emplace_back(m.x.dtype(), m.x.count(), NAN);
  }
  return out;
}

BnNet::BnNet(const ref::BnShape& shape, const ga_bn_options& o, const ga_config& c, bool affine)
    : ctx(c),
      options_(o),
      shape_(shape),
      config_(c),
      gamma_(o.dtype == GA_F64 ? GA_F64 : GA_F32, shape.channels),
      beta_(gamma_.dtype(), shape.channels) {
  options_.layout = shape.layout;
  const ga_group group = ctx.group(optimizer(GA_OPTIMIZER_EXTERNAL));
  for (int64_t i = 0; i < shape.channels; ++i) {
    gamma_.set(i, i % 5 == 3 ? -0.5 : 1 + 0.125 * static_cast<double>(i % 7));
    beta_.set(i, 0.3 * static_cast<double>(i % 4) - 0.5);
  }
  const auto named = [&](const char* name, Tensor& t) {
    ga_param id = -1;
    EXPECT_OK(try_add(ctx, group, name, t.data(), t.dtype(), {shape.channels}, options(), &id));
    return id;
  };
  if (affine) {
    gamma = named("gamma", gamma_);
    beta = named("beta", beta_);
  }
  EXPECT_OK(ga_bn_add(ctx, "bn", shape.channels, gamma, beta, &options_, &bn));
}

BnOutput BnNet::run(const BnWindow& window) {
  BnOutput out = bn_output(window);
  if (options_.mode == GA_BN_WINDOW) {
    for (const BnData& m : window) take(m);
    EXPECT_OK(ga_bn_finalize(ctx, bn));
    for (size_t k = 0; k < window.size(); ++k) forward(window[k], out.y[k]);
    for (size_t k = 0; k < window.size(); ++k) in_micro(k, window[k], [&] { sum(window[k]); });
    if (finalize_sums) {
      EXPECT_OK(ga_bn_backward_finalize(ctx, bn));
    }
    for (size_t k = 0; k < window.size(); ++k)
      in_micro(k, window[k], [&] { backward(window[k], out.dx[k]); });
  } else {
    for (size_t k = 0; k < window.size(); ++k) {
      forward(window[k], out.y[k]);
      in_micro(k, window[k], [&] {
        if (k % 2) sum(window[k]);
        backward(window[k], out.dx[k]);
      });
    }
  }
  return out;
}

BnOutput BnNet::step(const BnWindow& window) {
  BnOutput out = run(window);
  EXPECT_EQ(test::step(ctx).outcome, GA_STEP_APPLIED);
  if (gamma >= 0) out.dgamma = external_gradient(ctx, gamma, shape_.channels);
  if (beta >= 0) out.dbeta = external_gradient(ctx, beta, shape_.channels);
  return out;
}

void BnNet::take(const BnData& m) {
  EXPECT_OK(ga_bn_accumulate(ctx, bn, m.x.data(), m.samples, shape_.positions));
}

void BnNet::forward(const BnData& m, Tensor& y) {
  EXPECT_OK(ga_bn_forward(ctx, bn, m.x.data(), m.samples, shape_.positions, y.data()));
}

void BnNet::sum(const BnData& m) {
  EXPECT_OK(
      ga_bn_backward_accumulate(ctx, bn, m.x.data(), m.dy.data(), m.samples, shape_.positions));
}

void BnNet::backward(const BnData& m, Tensor& dx) {
  EXPECT_OK(
      ga_bn_backward(ctx, bn, m.x.data(), m.dy.data(), m.samples, shape_.positions, dx.data()));
}

ref::BnLayer BnNet::layer() const {
  ref::BnLayer l{shape_, options_.mode, options_.eps, {}, {}};
  if (gamma >= 0) l.gamma = numbers(gamma_);
  if (beta >= 0) l.beta = numbers(beta_);
  return l;
}

void BnNet::expect_right(const BnWindow& window, const BnOutput& got) const {
  const auto want =
      ref::batch_norm(layer(), bn_micros(window, config_.gradient_kind), options_.dtype);
  for (size_t k = 0; k < window.size(); ++k) {
    EXPECT_TRUE(near(got.y[k], want.y[k])) << "y of micro-batch " << k;
    EXPECT_TRUE(near(got.dx[k], want.dx[k])) << "dx of micro-batch " << k;
    EXPECT_TRUE(got.y[k].canaries() && got.dx[k].canaries()) << "wrote outside a tensor";
  }
  double weight = 0;
  for (const BnData& m : window) weight += m.weight;
  const double divisor = config_.reduce == GA_REDUCE_MEAN ? weight : 1;
  const double unit = ref::bn_arithmetic(options_.dtype).unit;
  if (gamma >= 0) {
    EXPECT_TRUE(near(got.dgamma, reduced(want.dgamma, divisor, unit))) << "dgamma";
  }
  if (beta >= 0) {
    EXPECT_TRUE(near(got.dbeta, reduced(want.dbeta, divisor, unit))) << "dbeta";
  }
}

Running::Running(ga_context* ctx, ga_bn bn, int64_t channels)
    : mean(static_cast<size_t>(channels)), variance(mean.size()) {
  EXPECT_OK(ga_bn_running(ctx, bn, mean.data(), variance.data(), GA_F64, &steps));
}

TwoLayers::TwoLayers(const std::vector<int64_t>& cut, int64_t first, ga_comm* comm)
    : cut_(cut), first_(first) {
  ga_config c = config();
  c.gradient_kind = GA_GRADIENT_SUM;
  c.reduce = GA_REDUCE_SUM;
  Context ctx(c);
  ctx.group(plain_sgd(0.05));
  std::vector<std::vector<double>> p(4, std::vector<double>(4, 1));
  for (size_t i = 0; i < 4; ++i) ctx.param(0, "p" + std::to_string(i), p[i].data(), ref::Shape{4});
  ga_bn_options o = bn_options(GA_BN_WINDOW);
  o.dtype = GA_F64;
  EXPECT_OK(ga_bn_add(ctx, "first", 4, 0, 1, &o, nullptr));
  EXPECT_OK(ga_bn_add(ctx, "second", 4, 2, 3, &o, nullptr));
  if (comm) {
    EXPECT_OK(ga_context_set_comm(ctx, comm, nullptr));
  }
  for (uint64_t t = 0; t < 3; ++t) train(ctx, t);
  for (const auto& list : p) ended.insert(ended.end(), list.begin(), list.end());
  for (const ga_bn bn : {0, 1}) {
    const Running r(ctx, bn, 4);
    ended.insert(ended.end(), r.mean.begin(), r.mean.end());
    ended.insert(ended.end(), r.variance.begin(), r.variance.end());
  }
}

void TwoLayers::train(ga_context* ctx, uint64_t t) {
  const ref::BnShape shape{4, 5, GA_BN_CHANNELS_FIRST};
  const BnData all = joined(bn_window(shape, GA_F64, std::vector<int64_t>(12, 1), t), shape);
  const size_t micros = cut_.size();
  std::vector<std::vector<Tensor>> x(2), out(2);
  std::vector<Tensor> d;  // the gradient in the backward pass
  int64_t at = 20 * first_;
  for (const int64_t n : cut_) {
    x[0].emplace_back(GA_F64, 20 * n);
    d.emplace_back(GA_F64, 20 * n);
    memcpy(x[0].back().data(), all.x.at(at), static_cast<size_t>(20 * n) * 8);
    memcpy(d.back().data(), all.dy.at(at), static_cast<size_t>(20 * n) * 8);
    at += 20 * n;
  }
  for (const ga_bn bn : {0, 1}) {
    const auto l = static_cast<size_t>(bn);
    for (size_t k = 0; k < micros; ++k) {
      if (l == 1) {
        x[1].push_back(out[0][k]);
        for (int64_t i = 0; i < x[1][k].count(); ++i) x[1][k].set(i, std::sin(out[0][k].get(i)));
      }
      EXPECT_OK(ga_bn_accumulate(ctx, bn, x[l][k].data(), cut_[k], 5));
    }
    EXPECT_OK(ga_bn_finalize(ctx, bn));
    for (size_t k = 0; k < micros; ++k) {
      out[l].push_back(x[l][k]);
      EXPECT_OK(ga_bn_forward(ctx, bn, x[l][k].data(), cut_[k], 5, out[l][k].data()));
    }
  }
  for (const ga_bn bn : {1, 0}) {
    const auto l = static_cast<size_t>(bn);
    for (const bool sums : {true, false}) {
      for (size_t k = 0; k < micros; ++k) {
        EXPECT_OK(ga_micro_begin(ctx, static_cast<int64_t>(k), 1, nullptr));
        const void* const in = x[l][k].data();
        void* const g = d[k].data();
        EXPECT_OK(sums ? ga_bn_backward_accumulate(ctx, bn, in, g, cut_[k], 5)
                       : ga_bn_backward(ctx, bn, in, g, cut_[k], 5, g));
        EXPECT_OK(ga_micro_end(ctx));
      }
      if (sums) {
        EXPECT_OK(ga_bn_backward_finalize(ctx, bn));
      }
    }
    for (size_t k = 0; k < micros && l == 1; ++k)
      for (int64_t i = 0; i < d[k].count(); ++i)
        d[k].set(i, d[k].get(i) * std::cos(out[0][k].get(i)));
  }
  EXPECT_EQ(step(ctx).outcome, GA_STEP_APPLIED);
  y.push_back(joined(out[1]));
  dx.push_back(joined(d));
}

}  // namespace ga::test
