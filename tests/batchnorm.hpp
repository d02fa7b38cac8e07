// SPDX-License-Identifier: Apache-2.0
//
// Shared by the tests of batch normalisation: micro-batches of data, and a layer in a context that
// runs windows through the calls of its mode.
#pragma once

#include <cmath>
#include <vector>

#include "batchnorm_reference.hpp"
#include "formats.hpp"

namespace ga::test {

ga_bn_options bn_options(int32_t mode, int32_t flavor = GA_FLAVOR_TORCH);

struct BnData {
  int64_t samples;
  Tensor x, dy;
  double weight = 1, loss_scale = 1;
};
using BnWindow = std::vector<BnData>;

// Each channel has a mean of its own within [-3, 3) and a deviation of 1, 0.1 or 10; dy has both
// signs, is of order 1 and has a nonzero mean.
BnWindow bn_window(const ref::BnShape& shape, int32_t dtype, const std::vector<int64_t>& samples,
                   uint64_t seed = 1);

// All micro-batches as one.
BnData joined(const BnWindow& window, const ref::BnShape& shape);

std::vector<double> joined(const std::vector<Tensor>& parts);

BnWindow without(const BnWindow& window, size_t k);

// The weight of a micro-batch in the sums over a window.
double bn_share(const BnData& m, int32_t gradient_kind);

std::vector<double> numbers(const Tensor& t);

std::vector<ref::BnMicro> bn_micros(const BnWindow& window, int32_t gradient_kind);

testing::AssertionResult near(const std::vector<double>& got, const std::vector<ref::Near>& want);
inline testing::AssertionResult near(const Tensor& got, const std::vector<ref::Near>& want) {
  return near(numbers(got), want);
}

// The reduced gradient: the sums divided by the sum of the weights, with two more roundings.
std::vector<ref::Near> reduced(std::vector<ref::Near> sums, double divisor, double unit);

// The results of a window; dgamma and dbeta are those that an external optimizer sees.
struct BnOutput {
  std::vector<Tensor> y, dx;
  std::vector<double> dgamma, dbeta;

  bool operator==(const BnOutput& other) const {
    return y == other.y && dx == other.dx && same_bits(dgamma, other.dgamma) &&
           same_bits(dbeta, other.dbeta);
  }
};

BnOutput bn_output(const BnWindow& window);

// One layer, with gamma and beta in an external group.
class BnNet {
 public:
  BnNet(const ref::BnShape& shape, const ga_bn_options& o, const ga_config& c = config(),
        bool affine = true);

  // Runs a whole window except ga_step. With a communicator, the window is this rank's part of one.
  BnOutput run(const BnWindow& window);

  // Runs a window with ga_step, and reads the gradients of gamma and beta.
  BnOutput step(const BnWindow& window);

  void take(const BnData& m);
  void forward(const BnData& m, Tensor& y);
  void sum(const BnData& m);
  void backward(const BnData& m, Tensor& dx);
  template <class Body>
  void in_micro(size_t k, const BnData& m, const Body& body) {
    EXPECT_OK(ga_micro_begin(ctx, static_cast<int64_t>(k), m.weight, MicroOptions(m.loss_scale)));
    body();
    EXPECT_OK(ga_micro_end(ctx));
  }

  ref::BnLayer layer() const;

  // Compares the results with the reference.
  void expect_right(const BnWindow& window, const BnOutput& got) const;

  Tensor& gamma_data() { return gamma_; }
  Tensor& beta_data() { return beta_; }

  Context ctx;
  ga_bn bn = -1;
  ga_param gamma = -1, beta = -1;
  bool finalize_sums = false;  // as several ranks do

 private:
  ga_bn_options options_;
  ref::BnShape shape_;
  ga_config config_;
  Tensor gamma_, beta_;
};

// The running statistics of a layer, in double.
struct Running {
  std::vector<double> mean, variance;
  int64_t steps = -1;

  Running(ga_context* ctx, ga_bn bn, int64_t channels);
  bool operator==(const Running& other) const {
    return same_bits(mean, other.mean) && same_bits(variance, other.variance) &&
           steps == other.steps;
  }
};

// Two layers in WINDOW mode with a sine between them, trained with SGD for some steps of 12 samples, or
// a rank's part of that training: the samples from `first` on, in micro-batches of these sizes.
class TwoLayers {
 public:
  explicit TwoLayers(const std::vector<int64_t>& cut, int64_t first = 0, ga_comm* comm = nullptr);

  // The rounding of sums over 60 numbers in f64, which the next layer multiplies by 1 / 0.1.
  static double tolerance(double x) { return 1e-11 * (1 + std::abs(x)); }
  static constexpr size_t kSample = 20;  // numbers

  std::vector<std::vector<double>> y, dx;  // of the second layer and of the first, by step
  std::vector<double> ended;               // parameters and running statistics

 private:
  void train(ga_context* ctx, uint64_t t);

  const std::vector<int64_t> cut_;
  const int64_t first_;
};

}  // namespace ga::test
