// SPDX-License-Identifier: Apache-2.0
//
// Batch normalisation on devices: windows of all modes, layouts and dtypes against sums in float64
// that this file computes, the number of launches, and windows that were captured in a graph.
#include "device.hpp"

namespace ga::test {
namespace {

constexpr double kEps = 1e-3, kMomentum = 0.25;
enum Frozen { kAwake = 0, kFrozen = 1 };

struct Shape {
  int32_t layout;
  std::vector<int64_t> samples;  // of each micro-batch
  int64_t channels, positions;

  int64_t elements(size_t k) const { return samples[k] * positions; }  // per channel
  int64_t count(size_t k) const { return elements(k) * channels; }
  int64_t at(int64_t element, int64_t channel) const {
    if (layout == GA_BN_CHANNELS_LAST) return element * channels + channel;
    const int64_t sample = element / positions, position = element % positions;
    return (sample * channels + channel) * positions + position;
  }
};

std::vector<Shape> shapes() {
  const int32_t first = GA_BN_CHANNELS_FIRST, last = GA_BN_CHANNELS_LAST;
  return {{first, {4, 3}, 3, 49},      // planes of an odd size, few in a row
          {first, {3, 2}, 64, 49},     // a last group that is smaller
          {first, {2, 3}, 5, 196},     // 16-bit numbers are read four at a time
          {first, {7, 9}, 33, 4},      // several planes at a time
          {first, {2, 1}, 2, 1025},    // slices that end within a plane
          {first, {2, 2}, 3, 4096},    //
          {first, {300, 200}, 2, 64},  // slices of whole planes
          {first, {1, 1}, 1, 5003},    // one channel
          {first, {3, 1}, 1, 777},
          {first, {2, 2}, 300, 2},
          {first, {40, 3}, 130, 1},  // a matrix
          {first, {500, 700}, 8, 1},
          {last, {4, 3}, 3, 49},
          {last, {2, 3}, 64, 100},
          {last, {5, 1}, 67, 9},  // columns that vector accesses do not divide
          {last, {6, 6}, 200, 11},
          {last, {2, 1}, 1, 501},
          {last, {2, 2}, 4, 1000},
          {last, {3, 2}, 1032, 1},  // groups of several columns
          {last, {1, 1}, 2, 1},
          {last, {1, 1}, 1, 1},
          {first, {0, 2}, 5, 12},  // empty micro-batches
          {last, {2, 0}, 16, 3}};
}

// Every channel has its own mean, which is large compared with the deviations from it.
Tensor activations(const Shape& s, size_t k, int32_t dtype, uint64_t seed) {
  Tensor t(dtype, s.count(k));
  Random random(seed);
  for (int64_t e = 0; e < s.elements(k); ++e) {
    for (int64_t c = 0; c < s.channels; ++c) {
      const double mean = static_cast<double>(c % 7 - 3) * (dtype == GA_F32 ? 100 : 4);
      t.set(s.at(e, c), mean + (1 + 0.1 * static_cast<double>(c % 5)) * random.signed_unit());
    }
  }
  return t;
}

struct Case {
  Shape shape;
  int32_t mode, dtype;
  Frozen frozen = kAwake;
  int64_t shift = 0;      // added to the tensors' addresses, in elements
  bool in_place = false;  // y is x, dx is dy
  bool affine = true;     // the layer has gamma and beta
  int32_t param_dtype = GA_F32;
  std::vector<double> weights = {1, 2.5};
  std::vector<double> scales = {1, 1};  // loss scale of each micro-batch; 0: that of the context
};

// The results of a window.
struct Outcome {
  std::vector<std::vector<double>> y, dx;
  std::vector<std::vector<double>> mean, variance;  // statistics of each forward pass
  std::vector<double> dgamma, dbeta, running_mean, running_variance;
  int64_t steps = 0;
};

std::vector<double> values(const Tensor& t) {
  std::vector<double> list(static_cast<size_t>(t.count()));
  for (int64_t i = 0; i < t.count(); ++i) list[static_cast<size_t>(i)] = t.get(i);
  return list;
}

// A layer with its micro-batches.
class Layer {
 public:
  // external: the optimizer is GA_OPTIMIZER_EXTERNAL, so the gradients can be read. Otherwise SGD.
  explicit Layer(const Case& c, bool external = true, ga_config config = test::config())
      : c_(c), gamma_(c.param_dtype, c.shape.channels), beta_(c.param_dtype, c.shape.channels) {
    config.device = GA_DEVICE_CUDA;
    config.stream = static_cast<cudaStream_t>(stream_);
    EXPECT_OK(ga_context_create(&config, &ctx_));
    const ga_optimizer o = external ? optimizer(GA_OPTIMIZER_EXTERNAL) : plain_sgd(0.25);
    EXPECT_OK(ga_group_add(ctx_, &o, nullptr));
    Random random(77);
    for (int64_t i = 0; i < c.shape.channels; ++i) {
      gamma_.set(i, c.affine ? 1 + random.signed_unit() : 1);
      beta_.set(i, c.affine ? random.signed_unit() : 0);
    }
    ga_param gamma = -1, beta = -1;
    if (c.affine) {
      gamma_at_ = std::make_unique<DeviceTensor>(gamma_, stream_, 1);
      beta_at_ = std::make_unique<DeviceTensor>(beta_, stream_, 0);
      gamma = add("gamma", *gamma_at_);
      beta = add("beta", *beta_at_);
    }
    ga_bn_options b;
    EXPECT_OK(ga_bn_options_init(&b, sizeof b, GA_FLAVOR_TORCH));
    b.mode = c.mode;
    b.layout = c.shape.layout;
    b.dtype = c.dtype;
    b.momentum = kMomentum;
    b.eps = kEps;
    EXPECT_OK(ga_bn_add(ctx_, "bn", c.shape.channels, gamma, beta, &b, nullptr));
    if (c.frozen) {
      std::vector<double> mean, variance;
      for (int64_t i = 0; i < c.shape.channels; ++i) {
        mean.push_back(static_cast<double>(i % 7 - 3) * (c.dtype == GA_F32 ? 100 : 4) + 0.125);
        variance.push_back(0.25 + 0.01 * static_cast<double>(i));
      }
      EXPECT_OK(ga_bn_running_set(ctx_, 0, mean.data(), variance.data(), GA_F64, 3));
      EXPECT_OK(ga_bn_set_frozen(ctx_, 0, 1));
    }
    for (size_t k = 0; k < micros(); ++k) {
      const Tensor shape(c.dtype, c.shape.count(k));
      x_at_.push_back(std::make_unique<DeviceTensor>(shape, stream_, c.shift));
      dy_at_.push_back(std::make_unique<DeviceTensor>(shape, stream_, c.shift));
      y_at_.push_back(std::make_unique<DeviceTensor>(shape, stream_, c.shift));
      dx_at_.push_back(std::make_unique<DeviceTensor>(shape, stream_, c.shift));
    }
    fill(1);
  }
  ~Layer() { ga_context_destroy(ctx_); }

  operator ga_context*() const { return ctx_; }
  const Stream& stream() const { return stream_; }
  size_t micros() const { return c_.shape.samples.size(); }
  const Tensor& x(size_t k) const { return x_[k]; }
  const Tensor& dy(size_t k) const { return dy_[k]; }
  double gamma(int64_t c) const { return gamma_.get(c); }
  double beta(int64_t c) const { return beta_.get(c); }
  void* x_data(size_t k) const { return x_at_[k]->data(); }
  void* dy_data(size_t k) const { return dy_at_[k]->data(); }
  void* y_data(size_t k) const { return c_.in_place ? x_data(k) : y_at_[k]->data(); }
  void* dx_data(size_t k) const { return c_.in_place ? dy_data(k) : dx_at_[k]->data(); }
  Tensor y_tensor(size_t k) const { return (c_.in_place ? x_at_ : y_at_)[k]->get(); }
  Tensor dx_tensor(size_t k) const { return (c_.in_place ? dy_at_ : dx_at_)[k]->get(); }
  Tensor gamma_now() const { return gamma_at_->get(); }
  Tensor beta_now() const { return beta_at_->get(); }

  // Fills the tensors, which all windows share, with the numbers of a window. bad: the micro-batch
  // that gets a NaN, or -1.
  void fill(uint64_t window, int bad = -1) {
    x_.clear();
    dy_.clear();
    for (size_t k = 0; k < micros(); ++k) {
      x_.push_back(activations(c_.shape, k, c_.dtype, 10 * window + k));
      Tensor dy(c_.dtype, c_.shape.count(k));
      Random random(1000 * window + k);
      for (int64_t i = 0; i < dy.count(); ++i) dy.set(i, random.signed_unit() + 0.25);
      if (bad == static_cast<int>(k)) x_.back().set(0, NAN);
      dy_.push_back(dy);
      restore(k);
    }
  }
  // Restores the tensors that the passes have overwritten in place.
  void restore(size_t k) {
    x_at_[k]->put(x_[k]);
    dy_at_[k]->put(dy_[k]);
  }

  void set_x(size_t k, const Tensor& x) {
    x_at_[k]->put(x);
    memcpy(x_[k].data(), x.data(), static_cast<size_t>(x.count()) * x.size());
  }
  void set_dy(size_t k, const Tensor& dy) {
    dy_at_[k]->put(dy);
    memcpy(dy_[k].data(), dy.data(), static_cast<size_t>(dy.count()) * dy.size());
  }

  void forward(size_t k) {
    EXPECT_OK(
        ga_bn_forward(ctx_, 0, x_data(k), c_.shape.samples[k], c_.shape.positions, y_data(k)));
  }
  void accumulate(size_t k) {
    EXPECT_OK(ga_bn_accumulate(ctx_, 0, x_data(k), c_.shape.samples[k], c_.shape.positions));
  }
  void open(size_t k) {
    EXPECT_OK(
        ga_micro_begin(ctx_, static_cast<int64_t>(k), c_.weights[k], MicroOptions(c_.scales[k])));
  }
  void close() { EXPECT_OK(ga_micro_end(ctx_)); }
  void sums(size_t k) {
    const bool read = c_.weights[k] != 0;
    EXPECT_OK(ga_bn_backward_accumulate(ctx_, 0, x_data(k), read ? dy_data(k) : nullptr,
                                        c_.shape.samples[k], c_.shape.positions));
  }
  void backward(size_t k) {
    const bool read = c_.weights[k] != 0;
    EXPECT_OK(ga_bn_backward(ctx_, 0, read ? x_data(k) : nullptr, read ? dy_data(k) : nullptr,
                             c_.shape.samples[k], c_.shape.positions, dx_data(k)));
  }
  // Whether the mode needs two passes over the micro-batches.
  bool windowed() const { return c_.mode == GA_BN_WINDOW && !c_.frozen; }

  // Runs a whole window except for the step. Calls between(k) after forward pass k.
  template <class Between>
  void passes(Between between) {
    const auto begin = [&](size_t k) {
      if (c_.in_place) restore(k);
    };
    if (windowed()) {
      for (size_t k = 0; k < micros(); ++k) accumulate(k);
      EXPECT_OK(ga_bn_finalize(ctx_, 0));
    }
    for (size_t k = 0; k < micros(); ++k) {
      forward(k);
      between(k);
      if (windowed()) continue;
      begin(k);
      open(k);
      if (k % 2 == 1) sums(k);  // gives the same as backward() alone
      backward(k);
      close();
    }
    for (size_t k = 0; windowed() && k < micros(); ++k) {
      begin(k);
      open(k);
      sums(k);
      close();
    }
    for (size_t k = 0; windowed() && k < micros(); ++k) {
      open(k);
      backward(k);
      close();
    }
  }
  void window() {
    passes([](size_t) {});
    EXPECT_OK(ga_step(ctx_, nullptr));
  }

  Outcome outcome() {
    Outcome o;
    const auto channels = static_cast<size_t>(c_.shape.channels);
    passes([&](size_t k) {
      o.y.push_back(values(y_tensor(k)));
      std::vector<double> mean(channels), variance(channels);
      if (!c_.frozen) {
        EXPECT_OK(ga_bn_statistics(ctx_, 0, mean.data(), variance.data(), GA_F64, nullptr));
      }
      o.mean.push_back(mean);
      o.variance.push_back(variance);
    });
    for (size_t k = 0; k < micros(); ++k) o.dx.push_back(values(dx_tensor(k)));
    EXPECT_OK(ga_step(ctx_, nullptr));
    if (c_.affine) {
      o.dgamma = gradient(0);
      o.dbeta = gradient(1);
    }
    o.running_mean.resize(channels);
    o.running_variance.resize(channels);
    EXPECT_OK(
        ga_bn_running(ctx_, 0, o.running_mean.data(), o.running_variance.data(), GA_F64, &o.steps));
    return o;
  }
  std::vector<double> gradient(ga_param param) {
    const void* data = nullptr;
    int32_t dtype = 0;
    EXPECT_OK(ga_gradient(ctx_, param, &data, &dtype, nullptr));
    Tensor t(dtype, c_.shape.channels);
    EXPECT_CUDA(cudaMemcpyAsync(t.data(), data, static_cast<size_t>(t.count()) * t.size(),
                                cudaMemcpyDeviceToHost, stream_));
    stream_.wait();
    return values(t);
  }

 private:
  ga_param add(const char* name, const DeviceTensor& t) {
    ga_param id = -1;
    const int64_t shape[] = {t.count()};
    const ga_param_options o = options();
    EXPECT_OK(ga_param_add(ctx_, 0, name, t.data(), t.dtype(), 1, shape, &o, &id));
    return id;
  }

  Case c_;
  Stream stream_;
  ga_context* ctx_ = nullptr;
  Tensor gamma_, beta_;
  std::unique_ptr<DeviceTensor> gamma_at_, beta_at_;
  std::vector<Tensor> x_, dy_;
  std::vector<std::unique_ptr<DeviceTensor>> x_at_, dy_at_, y_at_, dx_at_;
};

// ---- In float64 ----------------------------------------------------------------------------------

struct Sums {
  long double n = 0, mean = 0, m2 = 0;
  double largest = 0;  // largest deviation from the mean
};

// The sums over the micro-batches [from, to], in two passes.
Sums sums_of(const Layer& layer, const Shape& s, int64_t channel, size_t from, size_t to) {
  Sums r;
  const auto each = [&](auto f) {
    for (size_t k = from; k <= to; ++k)
      for (int64_t e = 0; e < s.elements(k); ++e) f(layer.x(k).get(s.at(e, channel)));
  };
  each([&](double x) { r.n += 1, r.mean += x; });
  if (r.n > 0) r.mean /= r.n;
  each([&](double x) {
    const long double d = x - r.mean;
    r.m2 += d * d;
    r.largest = std::max(r.largest, std::abs(static_cast<double>(d)));
  });
  return r;
}

// Checks that a number is within the tolerance of the expected one.
testing::AssertionResult near(const char* what, double is, long double should, double tolerance) {
  const double off = std::abs(static_cast<double>(is - should));
  if (off <= tolerance) return testing::AssertionSuccess();
  char text[160];
  snprintf(text, sizeof text, "%s: %.17g, expected %.17g; %g is more than %g", what, is,
           static_cast<double>(should), off, tolerance);
  return testing::AssertionFailure() << text;
}

// Checks a window. Results that are computed in T may be off by a few roundings of T, and
// statistics by the roundings of n additions in double.
void check(const Case& c, const Layer& layer, const Outcome& o) {
  const Shape& s = c.shape;
  const size_t micros = s.samples.size();
  const Format& out = format(c.dtype);
  const double u = format(c.dtype == GA_F64 ? GA_F64 : GA_F32).roundoff();
  const double rounding = c.dtype == GA_F64 || c.dtype == GA_F32 ? 0 : out.roundoff();
  const double grad_u = format(c.dtype == GA_F64 ? c.param_dtype : GA_F32).roundoff();
  const double u64 = format(GA_F64).roundoff();
  double weight = 0;
  for (const double w : c.weights) weight += w;
  int wrong = 0;
  const auto expect = [&](const testing::AssertionResult& r, size_t k, int64_t channel) {
    if (!r && ++wrong <= 5)
      ADD_FAILURE() << r.message() << " (micro-batch " << k << ", channel " << channel << ")";
  };
  for (int64_t ch = 0; ch < s.channels; ++ch) {
    const auto at = static_cast<size_t>(ch);
    const Sums whole = sums_of(layer, s, ch, 0, micros - 1);
    std::vector<long double> mean(micros), rstd(micros), n(micros), dgamma(micros), dbeta(micros);
    std::vector<double> slack(micros), products(micros), dys(micros);
    for (size_t k = 0; k < micros; ++k) {
      Sums m =
          c.mode == GA_BN_WINDOW ? whole : sums_of(layer, s, ch, c.mode == GA_BN_MICRO ? k : 0, k);
      long double variance = m.n > 0 ? m.m2 / m.n : 0;
      if (c.frozen) {
        m = {};
        m.mean = static_cast<double>(ch % 7 - 3) * (c.dtype == GA_F32 ? 100 : 4) + 0.125;
        variance = 0.25 + 0.01 * static_cast<double>(ch);
      }
      mean[k] = m.mean;
      rstd[k] = 1 / std::sqrt(variance + kEps);
      n[k] = m.n;
      // Relative to the deviation, since the sums are shifted by an element of the channel.
      slack[k] = 64 * u64 * (1 + static_cast<double>(m.n)) +
                 8 * u64 * std::abs(static_cast<double>(m.mean * rstd[k]));
      if (!c.frozen) {
        const double wide = 1 + m.largest;
        expect(near("mean", o.mean[k][at], m.mean, slack[k] * wide), k, ch);
        expect(near("variance", o.variance[k][at], variance, slack[k] * wide * wide), k, ch);
      }
      dbeta[k] = dgamma[k] = 0;
      for (int64_t e = 0; e < s.elements(k); ++e) {
        const auto i = static_cast<size_t>(s.at(e, ch));
        const long double dev = layer.x(k).get(s.at(e, ch)) - mean[k], hat = dev * rstd[k];
        const long double y = hat * layer.gamma(ch) + layer.beta(ch);
        const double size =
            std::abs(static_cast<double>(hat * layer.gamma(ch))) + std::abs(layer.beta(ch));
        expect(near("y", o.y[k][i], y,
                    (4 * u + slack[k]) * (size + std::abs(layer.gamma(ch))) +
                        rounding * std::abs(static_cast<double>(y)) + out.smallest()),
               k, ch);
        const double dy = layer.dy(k).get(s.at(e, ch));
        dbeta[k] += dy;
        dgamma[k] += dy * hat;
        products[k] += std::abs(static_cast<double>(dy * hat));
        dys[k] += std::abs(dy);
      }
    }
    const auto share = [&](size_t k) {
      return c.weights[k] / (c.scales[k] == 0 ? 1 : c.scales[k]);
    };
    long double sum_dgamma = 0, sum_dbeta = 0;
    double size_dgamma = 0, size_dbeta = 0;
    for (size_t k = 0; k < micros; ++k) {
      if (c.weights[k] == 0) continue;
      sum_dgamma += share(k) * dgamma[k];
      sum_dbeta += share(k) * dbeta[k];
      size_dgamma += share(k) * (products[k] + slack[k] * dys[k]);
      size_dbeta += share(k) * dys[k];
    }
    for (size_t k = 0; k < micros; ++k) {
      const bool all = c.mode == GA_BN_WINDOW && !c.frozen;
      const long double an = all ? share(k) * n[k] : n[k];
      const long double grows = c.frozen ? 0 : (all ? sum_dbeta : dbeta[k]) / an;
      const long double leans = c.frozen ? 0 : (all ? sum_dgamma : dgamma[k]) / an;
      const double of_sums = c.frozen ? 0
                                      : (all ? size_dbeta + size_dgamma : dys[k] + products[k]) /
                                            static_cast<double>(an);
      for (int64_t e = 0; e < s.elements(k); ++e) {
        const auto i = static_cast<size_t>(s.at(e, ch));
        if (c.weights[k] == 0) {
          expect(near("dx without weight", o.dx[k][i], 0, 0), k, ch);
          continue;
        }
        const long double hat = (layer.x(k).get(s.at(e, ch)) - mean[k]) * rstd[k];
        const double dy = layer.dy(k).get(s.at(e, ch));
        const long double scale = layer.gamma(ch) * rstd[k];
        const long double dx = scale * (dy - grows - hat * leans);
        const double size = std::abs(static_cast<double>(scale)) *
                            (std::abs(dy) + of_sums * (1 + std::abs(static_cast<double>(hat))));
        expect(near("dx", o.dx[k][i], dx,
                    (8 * u + 4 * slack[k]) * size + rounding * std::abs(static_cast<double>(dx)) +
                        out.smallest()),
               k, ch);
      }
    }
    if (c.affine) {
      const double adding = 4 * grad_u + 4 * u + 64 * u64 * static_cast<double>(whole.n + 1);
      expect(near("dgamma", o.dgamma[at], sum_dgamma / weight, adding * size_dgamma / weight), 0,
             ch);
      expect(near("dbeta", o.dbeta[at], sum_dbeta / weight, adding * size_dbeta / weight), 0, ch);
    }
    const double wide = (1 + whole.largest) * (1 + whole.largest);
    const double slack_all = 64 * u64 * static_cast<double>(whole.n + 1) * wide +
                             8 * u64 * std::abs(static_cast<double>(whole.mean));
    const long double became_mean = c.frozen ? mean[0] : kMomentum * whole.mean;
    long double became = 0.25 + 0.01 * static_cast<double>(ch);
    if (!c.frozen) became = whole.n > 1 ? 1 + kMomentum * (whole.m2 / (whole.n - 1) - 1) : 1;
    if (o.running_mean.empty()) continue;
    expect(near("running mean", o.running_mean[at], became_mean, c.frozen ? 0 : slack_all), 0, ch);
    expect(near("running variance", o.running_variance[at], became, c.frozen ? 1e-15 : slack_all),
           0, ch);
  }
  EXPECT_EQ(o.steps, c.frozen ? 3 : 1);
  EXPECT_EQ(wrong, 0);
}

class BatchNorm : public OnDevice<> {
 protected:
  void run(const Case& c) {
    char name[200];
    snprintf(name, sizeof name, "mode %d, %s, %s, %lld x %lld x %lld, shift %lld%s%s", c.mode,
             format(c.dtype).name,
             c.shape.layout == GA_BN_CHANNELS_LAST ? "channels last" : "channels first",
             static_cast<long long>(c.shape.samples[0]), static_cast<long long>(c.shape.channels),
             static_cast<long long>(c.shape.positions), static_cast<long long>(c.shift),
             c.in_place ? ", in place" : "", c.frozen ? ", frozen" : "");
    SCOPED_TRACE(name);
    Layer layer(c);
    const Outcome o = layer.outcome();
    check(c, layer, o);
  }
};

std::vector<int32_t> dtypes() { return {GA_F32, GA_F64, GA_F16, GA_BF16}; }

TEST_F(BatchNorm, OfAllShapes) {
  for (const Shape& shape : shapes()) {
    for (const int32_t dtype : dtypes()) {
      for (const int64_t shift : {0, 1}) {
        Case c = {shape, GA_BN_MICRO, dtype};
        c.shift = shift;
        run(c);
      }
    }
  }
}

TEST_F(BatchNorm, OfAllModes) {
  for (const Shape& shape : shapes()) {
    for (const int32_t mode : {GA_BN_MICRO, GA_BN_WINDOW, GA_BN_CUMULATIVE}) {
      for (const Frozen frozen : {kAwake, kFrozen}) {
        for (const bool in_place : {false, true}) {
          Case c = {shape, mode, GA_F32, frozen};
          c.in_place = in_place;
          c.scales = {4, 0.5};
          run(c);
        }
      }
    }
  }
}

TEST_F(BatchNorm, OfAllDtypesInAllModes) {
  const Shape some[] = {{GA_BN_CHANNELS_FIRST, {3, 2}, 18, 20},
                        {GA_BN_CHANNELS_LAST, {3, 2}, 24, 20}};
  for (const Shape& shape : some) {
    for (const int32_t mode : {GA_BN_MICRO, GA_BN_WINDOW, GA_BN_CUMULATIVE}) {
      for (const Frozen frozen : {kAwake, kFrozen}) {
        for (const int32_t dtype : dtypes()) {
          // Gamma and beta may have any dtype, or be absent.
          for (const int32_t param_dtype : std::vector<int32_t>{0, GA_F32, GA_F64}) {
            Case c = {shape, mode, dtype, frozen};
            c.affine = param_dtype != 0;
            c.param_dtype = param_dtype != 0 ? param_dtype : GA_F32;
            run(c);
          }
        }
      }
    }
  }
}

// Gamma and beta of 16 bits: the gradients are those of the master weights.
TEST_F(BatchNorm, ParametersOf16Bits) {
  for (const int32_t param_dtype : {GA_F16, GA_BF16}) {
    for (const int32_t dtype : std::vector<int32_t>{GA_F32, param_dtype}) {
      Case c = {{GA_BN_CHANNELS_FIRST, {3, 2}, 18, 20}, GA_BN_MICRO, dtype};
      c.param_dtype = param_dtype;
      run(c);
    }
  }
}

TEST_F(BatchNorm, WithoutWeight) {
  for (const int32_t mode : {GA_BN_MICRO, GA_BN_WINDOW, GA_BN_CUMULATIVE}) {
    for (const int32_t dtype : dtypes()) {
      Case c = {{GA_BN_CHANNELS_FIRST, {3, 2, 4}, 6, 25}, mode, dtype};
      c.weights = {1.5, 0, 0.5};
      c.scales = {1, 1, 1};
      run(c);
    }
  }
}

// The mean takes most digits of the f32 numbers.
TEST_F(BatchNorm, AMeanThatIsLarge) {
  for (const int32_t mode : {GA_BN_MICRO, GA_BN_WINDOW}) {
    Case c = {{GA_BN_CHANNELS_LAST, {700, 300}, 3, 1}, mode, GA_F32};
    c.weights = {1, 1};
    Layer layer(c);
    for (size_t k = 0; k < 2; ++k) {
      Tensor x = layer.x(k);
      Random random(k);
      for (int64_t i = 0; i < x.count(); ++i) x.set(i, 1e6 + 4 * random.signed_unit());
      layer.set_x(k, x);
    }
    check(c, layer, layer.outcome());
  }
}

// A window without elements: the gradients are zeros, and the running statistics do not change.
TEST_F(BatchNorm, OfNothing) {
  for (const int32_t mode : {GA_BN_MICRO, GA_BN_WINDOW}) {
    for (const int32_t layout : {GA_BN_CHANNELS_FIRST, GA_BN_CHANNELS_LAST}) {
      for (const int64_t positions : {0, 3}) {
        Layer layer({{layout, {positions == 0 ? 4 : 0, 0}, 5, positions}, mode, GA_F32});
        const Outcome o = layer.outcome();
        EXPECT_EQ(o.dgamma, std::vector<double>(5, 0.0));
        EXPECT_EQ(o.dbeta, std::vector<double>(5, 0.0));
        EXPECT_EQ(o.running_mean, std::vector<double>(5, 0.0));
        EXPECT_EQ(o.running_variance, std::vector<double>(5, 1.0));
        EXPECT_EQ(o.steps, 0);
      }
    }
  }
}

// Statistics that the program gives, also for a micro-batch that already had statistics.
TEST_F(BatchNorm, GivenStatistics) {
  for (const int32_t dtype : {GA_F32, GA_F64}) {
    for (const int32_t kind : {GA_BN_VARIANCE, GA_BN_M2}) {
      SCOPED_TRACE(testing::Message() << dtype << " " << kind);
      Case c = {{GA_BN_CHANNELS_FIRST, {1, 1}, 700, 1}, GA_BN_CUMULATIVE, GA_F32};
      Layer layer(c);
      const int64_t counts[] = {10, 0, 30};
      std::vector<double> mean(700), variance(700);
      for (const bool negative : {false, true}) {
        double n = 0;
        std::vector<double> means(700, 0.0), m2(700, 0.0);
        for (size_t k = 0; k < 3; ++k) {
          Tensor m(dtype, 700), spread(dtype, 700);
          for (int64_t i = 0; i < 700; ++i) {
            m.set(i, 0.5 * static_cast<double>(i % 9) + static_cast<double>(k));
            spread.set(i, negative && i == 699 ? -1 : 0.25 * static_cast<double>(i % 5 + 1));
          }
          const DeviceTensor m_at(m, layer.stream()), spread_at(spread, layer.stream());
          const DeviceTensor wrong(Tensor(dtype, 700, 99), layer.stream());
          EXPECT_OK(ga_micro_begin(layer, static_cast<int64_t>(k), 1, nullptr));
          if (k == 2) {  // replaced
            EXPECT_OK(ga_bn_accumulate_stats(layer, 0, 7, wrong.data(), wrong.data(), kind, dtype));
          }
          EXPECT_OK(ga_bn_accumulate_stats(layer, 0, counts[k], m_at.data(), spread_at.data(), kind,
                                           dtype));
          EXPECT_OK(ga_micro_end(layer));
          const auto add = static_cast<double>(counts[k]);
          for (size_t i = 0; i < 700 && add > 0; ++i) {
            const double value = spread.get(static_cast<int64_t>(i));
            const double d = m.get(static_cast<int64_t>(i)) - means[i];
            m2[i] += (kind == GA_BN_M2 ? value : value * add) + d * d * n * add / (n + add);
            means[i] += d * add / (n + add);
          }
          n += add;
          int64_t count = 0;
          EXPECT_OK(ga_bn_statistics(layer, 0, mean.data(), variance.data(), GA_F64, &count));
          EXPECT_EQ(count, static_cast<int64_t>(n));
          for (size_t i = 0; i < 700; ++i) {
            ASSERT_NEAR(mean[i], means[i], 1e-14) << i;
            if (negative && i == 699) {
              EXPECT_TRUE(std::isnan(variance[i]));
            } else {
              ASSERT_NEAR(variance[i], m2[i] / n, 1e-14) << i;
            }
          }
          layer.stream().wait();  // the arrays are freed
        }
        EXPECT_OK(ga_discard(layer));
      }
    }
  }
}

// The dx of a frozen layer depends neither on x nor on sums that are not finite.
TEST_F(BatchNorm, FrozenBesideNaN) {
  for (const int32_t layout : {GA_BN_CHANNELS_FIRST, GA_BN_CHANNELS_LAST}) {
    const Case c = {{layout, {2}, 8, 6}, GA_BN_MICRO, GA_F32, kFrozen};
    Layer layer({c.shape, c.mode, c.dtype, c.frozen, 0, false, true, GA_F32, {1}, {1}});
    Tensor dy = layer.dy(0);
    dy.set(c.shape.at(5, 3), INFINITY);
    layer.set_dy(0, dy);
    layer.open(0);
    layer.backward(0);
    layer.close();
    const Tensor dx = layer.dx_tensor(0);
    for (int64_t i = 0; i < dx.count(); ++i)
      EXPECT_EQ(std::isfinite(dx.get(i)), i != c.shape.at(5, 3)) << i;
    EXPECT_OK(ga_discard(layer));
  }
}

// A NaN or infinity affects its own channel alone.
TEST_F(BatchNorm, NaNStaysInItsChannel) {
  for (const int32_t layout : {GA_BN_CHANNELS_FIRST, GA_BN_CHANNELS_LAST}) {
    for (const int64_t channels : {5, 8}) {
      const Case c = {{layout, {2}, channels, 6},
                      GA_BN_MICRO,
                      GA_F32,
                      kAwake,
                      0,
                      false,
                      true,
                      GA_F32,
                      {1},
                      {1}};
      Layer layer(c);
      Tensor x = layer.x(0);
      x.set(c.shape.at(0, 2), NAN);  // the element that the sums are shifted by
      x.set(c.shape.at(9, 4), INFINITY);
      layer.set_x(0, x);
      layer.forward(0);
      const Tensor y = layer.y_tensor(0);
      for (int64_t e = 0; e < 12; ++e)
        for (int64_t ch = 0; ch < channels; ++ch)
          EXPECT_EQ(std::isnan(y.get(c.shape.at(e, ch))), ch == 2 || ch == 4) << e << " " << ch;
      EXPECT_OK(ga_discard(layer));
    }
  }
}

// Layers that are added after one was used: the workspace has the size that the largest layer
// needs.
TEST_F(BatchNorm, LayersBesideEachOther) {
  Case c = {{GA_BN_CHANNELS_LAST, {40, 30}, 37, 2}, GA_BN_MICRO, GA_F32};
  Layer layer(c);
  int64_t before = memory(layer).workspace;
  for (const int64_t channels : {3, 600, 4}) {
    const std::string name = "of " + std::to_string(channels);
    ga_bn id = -1;
    EXPECT_OK(ga_bn_add(layer, name.c_str(), channels, -1, -1, nullptr, &id));
    const int64_t now = memory(layer).workspace;
    if (channels == 600) {  // slices of each, two doubles for each channel of them
      EXPECT_GT(now - before, (64 * 600 - 512 * 37) * 16);
    } else {
      EXPECT_LT(now - before, 1000);
    }
    before = now;
    DeviceTensor x(numbers(GA_F32, 5 * channels, 4), layer.stream(), 0);
    EXPECT_OK(ga_bn_forward(layer, id, x.data(), 5, 1, x.data()));
    for (size_t k = 0; k < 2; ++k) {
      layer.open(k);
      layer.forward(k);
      layer.close();
    }
    EXPECT_OK(ga_discard(layer));
    layer.stream().wait();
  }
  check(c, layer, layer.outcome());
}

TEST_F(BatchNorm, Infers) {
  for (const Shape& shape : shapes()) {
    Case c = {shape, GA_BN_WINDOW, GA_F32};
    Layer layer(c);
    const size_t k = shape.samples[0] > 0 ? 0 : 1;
    std::vector<double> mean, variance;
    for (int64_t i = 0; i < shape.channels; ++i) {
      mean.push_back(static_cast<double>(i % 7 - 3) * 100);
      variance.push_back(0.5 + 0.1 * static_cast<double>(i % 3));
    }
    EXPECT_OK(ga_bn_running_set(layer, 0, mean.data(), variance.data(), GA_F64, 1));
    EXPECT_OK(
        ga_bn_infer(layer, 0, layer.x_data(k), shape.samples[k], shape.positions, layer.y_data(k)));
    const Tensor y = layer.y_tensor(k);
    for (int64_t ch = 0; ch < shape.channels; ++ch) {
      const auto at = static_cast<size_t>(ch);
      for (int64_t e = 0; e < shape.elements(k); ++e) {
        const int64_t i = shape.at(e, ch);
        const double hat = (layer.x(k).get(i) - mean[at]) / std::sqrt(variance[at] + kEps);
        ASSERT_NEAR(y.get(i), hat * layer.gamma(ch) + layer.beta(ch), 2e-6) << ch << " " << e;
      }
    }
  }
}

#ifdef GA_SIMULATED

// ---- On other devices ----------------------------------------------------------------------------

// Devices with more and with fewer multiprocessors, and blocks in either order.
TEST_F(BatchNorm, OnOtherDevices) {
  std::vector<Shape> all = shapes();
  all.push_back({GA_BN_CHANNELS_LAST, {900, 700}, 64, 4});  // more slices than are read at once
  for (const int multiprocessors : {1, 132}) {
    for (const bool reverse : {false, true}) {
      configure([&](sim::Config& config) {
        config.multiprocessors = multiprocessors;
        config.reverse_blocks = reverse;
      });
      for (const Shape& shape : all) {
        for (const int32_t mode : {GA_BN_MICRO, GA_BN_WINDOW})
          run({shape, mode, multiprocessors == 1 ? GA_F32 : GA_BF16});
      }
    }
  }
}

// The bits do not depend on the order in which blocks run.
TEST_F(BatchNorm, AnyOrderOfBlocks) {
  for (const Shape& shape : shapes()) {
    const Case c = {shape, GA_BN_WINDOW, GA_F32};
    std::vector<Outcome> outcomes;
    for (const bool reverse : {false, true}) {
      configure([&](sim::Config& config) {
        config.multiprocessors = 20;
        config.reverse_blocks = reverse;
      });
      Layer layer(c);
      outcomes.push_back(layer.outcome());
    }
    const Outcome &a = outcomes[0], &b = outcomes[1];
    EXPECT_TRUE(a.y == b.y && a.dx == b.dx && same_bits(a.dgamma, b.dgamma) &&
                same_bits(a.dbeta, b.dbeta) && same_bits(a.running_mean, b.running_mean) &&
                same_bits(a.running_variance, b.running_variance));
  }
}

// ---- Launches ------------------------------------------------------------------------------------

std::string describe(const sim::Counters& c) {
  std::string text = std::to_string(c.launches) + " launches";
  for (const auto& [kernel, n] : c.by_kernel) text += "\n  " + std::to_string(n) + " " + kernel;
  return text;
}

template <class Work>
void expect_launches(const char* what, int64_t launches, int64_t fills, Work&& work) {
  sim::reset_counters();
  work();
  const sim::Counters c = sim::counters();
  EXPECT_EQ(c.launches, launches) << what << ": " << describe(c);
  EXPECT_EQ(c.fills, fills) << what;
  EXPECT_EQ(c.synchronizations, 0) << what;
  EXPECT_EQ(c.allocations, 0) << what;
  EXPECT_EQ(c.frees, 0) << what;
  EXPECT_EQ(c.queries, 0) << what;
  EXPECT_EQ(c.copies, 0) << what;
  EXPECT_EQ(c.library_calls, 0) << what;
}

TEST_F(BatchNorm, Launches) {
  for (const int32_t mode : {GA_BN_MICRO, GA_BN_WINDOW}) {
    Case c = {{GA_BN_CHANNELS_FIRST, {9, 8, 7}, 130, 64}, mode, GA_F32};
    c.weights = {1, 2, 0};
    c.scales = {1, 1, 1};
    Layer layer(c, false);
    layer.window();
    layer.fill(2);
    const bool windowed = mode == GA_BN_WINDOW;
    const Tensor given(GA_F32, 130, 1);
    const DeviceTensor array(given, layer.stream());
    if (windowed) {
      for (size_t k = 0; k < 3; ++k)
        expect_launches("accumulate", 1, 0, [&] { layer.accumulate(k); });
      expect_launches("finalize", 1, 0, [&] { EXPECT_OK(ga_bn_finalize(layer, 0)); });
      for (size_t k = 0; k < 3; ++k) expect_launches("forward", 1, 0, [&] { layer.forward(k); });
    }
    for (size_t k = 0; k < 3; ++k) {
      const bool read = c.weights[k] != 0;
      if (!windowed) expect_launches("forward", 2, 0, [&] { layer.forward(k); });
      expect_launches("begin", 0, 0, [&] { layer.open(k); });
      // One launch for the sums and one that adds them to gamma and beta.
      expect_launches("sums", read ? 2 : 0, 0, [&] { layer.sums(k); });
      if (!windowed)
        expect_launches("backward", read ? 1 : 0, read ? 0 : 1, [&] { layer.backward(k); });
      expect_launches("end", 0, 0, [&] { layer.close(); });
    }
    for (size_t k = 0; k < 3 && windowed; ++k) {
      const bool read = c.weights[k] != 0;
      layer.open(k);
      expect_launches("backward", read ? 1 : 0, read ? 0 : 1, [&] { layer.backward(k); });
      layer.close();
    }
    expect_launches("step", 2, 0, [&] { EXPECT_OK(ga_step(layer, nullptr)); });
    expect_launches("infer", 1, 0, [&] {
      EXPECT_OK(ga_bn_infer(layer, 0, layer.x_data(0), 9, 64, layer.y_data(0)));
    });
    expect_launches("given statistics", 1, 0, [&] {
      EXPECT_OK(ga_bn_accumulate_stats(layer, 0, 5, array.data(), array.data(), 0, GA_F32));
    });
    EXPECT_OK(ga_discard(layer));
    layer.stream().wait();
  }
}

#endif

// ---- Numbers on the device -----------------------------------------------------------------------

// One micro-batch has its own loss scale. The others use that of the context, which has grown on
// the device since the host last read it.
TEST_F(BatchNorm, TheLossScaleOfTheDevice) {
#ifdef GA_SIMULATED
  configure([](sim::Config& config) { config.deferred = true; });
#endif
  Case c = {{GA_BN_CHANNELS_FIRST, {4, 3, 2}, 6, 25}, GA_BN_WINDOW, GA_F32};
  c.weights = {1, 2.5, 0.5};
  c.scales = {8, 0, 0};
  Layer layer(c);
  ga_loss_scaler scaler;
  EXPECT_OK(ga_loss_scaler_init(&scaler, sizeof scaler));
  scaler.initial_scale = 2;
  scaler.growth_factor = 3;
  scaler.growth_interval = 1;
  EXPECT_OK(ga_context_set_loss_scaler(layer, &scaler));
  for (uint64_t w = 1; w <= 2; ++w) {
    layer.fill(w);
    layer.window();
  }
  layer.fill(3);
  Outcome o = layer.outcome();
  // 2 * 3 * 3 in that window; the running statistics cover all three.
  Case known = c;
  known.scales = {8, 18, 18};
  EXPECT_EQ(o.steps, 3);
  o.steps = 1;
  o.running_mean = o.running_variance = {};
  check(known, layer, o);
}

// ---- Graphs --------------------------------------------------------------------------------------

TEST_F(BatchNorm, Graphs) {
  for (const int32_t mode : {GA_BN_MICRO, GA_BN_WINDOW, GA_BN_CUMULATIVE}) {
    for (const int32_t layout : {GA_BN_CHANNELS_FIRST, GA_BN_CHANNELS_LAST}) {
      SCOPED_TRACE(testing::Message() << mode << " " << layout);
      Case c = {{layout, {4, 3, 2}, 40, 25}, mode, GA_F32};
      c.weights = {1, 2.5, 0};
      c.scales = {4, 0, 0};
      std::vector<std::vector<std::vector<double>>> all;
      for (const bool captured : {false, true}) {
        Layer layer(c, false);
        ga_loss_scaler scaler;
        EXPECT_OK(ga_loss_scaler_init(&scaler, sizeof scaler));
        scaler.initial_scale = 16;
        scaler.growth_interval = 2;
        EXPECT_OK(ga_context_set_loss_scaler(layer, &scaler));
        layer.window();
        Graph graph;
        if (captured) graph.capture(layer.stream(), [&] { layer.window(); });
        all.emplace_back();
        const auto note = [&] {
          auto& list = all.back();
          for (size_t k = 0; k < 3; ++k) {
            list.push_back(values(layer.y_tensor(k)));
            list.push_back(values(layer.dx_tensor(k)));
          }
          list.push_back(values(layer.gamma_now()));
          list.push_back(values(layer.beta_now()));
          std::vector<double> mean(40), variance(40);
          int64_t steps = 0;
          EXPECT_OK(ga_bn_running(layer, 0, mean.data(), variance.data(), GA_F64, &steps));
          list.push_back(mean);
          list.push_back(variance);
          list.push_back({static_cast<double>(steps)});
        };
        for (uint64_t w = 1; w < 6; ++w) {
          layer.fill(w, w == 3 ? 1 : -1);
          if (captured)
            graph.replay(layer.stream());
          else
            layer.window();
          note();
          // The window with a NaN was skipped.
          EXPECT_EQ(all.back().back()[0], static_cast<double>(w < 3 ? w + 1 : w));
        }
        // One more window without the graph, after another layer has moved the workspace.
        EXPECT_OK(ga_bn_add(layer, "more", 5000, -1, -1, nullptr, nullptr));
        layer.fill(7);
        layer.window();
        note();
        layer.fill(8);
        if (captured)
          graph.replay(layer.stream());
        else
          layer.window();
        note();
      }
      ASSERT_EQ(all[0].size(), all[1].size());
      for (size_t i = 0; i < all[0].size(); ++i)
        EXPECT_TRUE(same_bits(all[0][i], all[1][i])) << "record " << i;
    }
  }
}

// Layers give f32 gradients to 16-bit parameters, and programs 16-bit ones. A graph that was captured
// with one of them goes on with it after a window with the other.
TEST_F(BatchNorm, GraphsKeepTheDtypeOfGradients) {
  Case c = {{GA_BN_CHANNELS_FIRST, {4, 3}, 40, 25}, GA_BN_MICRO, GA_F32};
  c.param_dtype = GA_BF16;
  for (const bool captures_layer : {true, false}) {
    std::vector<std::vector<double>> all;
    for (const bool captured : {false, true}) {
      Layer layer(c, false);
      const DeviceTensor g(numbers(GA_BF16, 40, 3), layer.stream());
      const auto by_layer = [&] { layer.window(); };
      const auto by_program = [&] {
        const void* const gradients[] = {g.data(), g.data()};
        EXPECT_OK(ga_accumulate(layer, gradients, 2, 1, nullptr));
        EXPECT_OK(ga_step(layer, nullptr));
      };
      const std::function<void()> one =
          captures_layer ? std::function<void()>(by_layer) : by_program;
      const std::function<void()> other =
          captures_layer ? std::function<void()>(by_program) : by_layer;
      one();
      Graph graph;
      if (captured) graph.capture(layer.stream(), one);
      for (int turn = 0; turn < 2; ++turn) {
        other();
        if (captured)
          graph.replay(layer.stream());
        else
          one();
        other();
      }
      layer.stream().wait();
      all.push_back(values(layer.gamma_now()));
      all.push_back(values(layer.beta_now()));
    }
    EXPECT_TRUE(same_bits(all[0], all[2])) << captures_layer;
    EXPECT_TRUE(same_bits(all[1], all[3])) << captures_layer;
  }
}

}  // namespace
}  // namespace ga::test
