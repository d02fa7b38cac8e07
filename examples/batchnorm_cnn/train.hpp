// One training run and its results.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "../common/data.hpp"

struct Options {
  std::int64_t batch = 64, accumulation = 8, epochs = 2;
  std::int64_t samples = 0;       // to train on, of the 60000; 0: all
  std::int64_t test_samples = 0;  // to test on, of the 10000; 0: all
  double lr = 0.05;
  std::int32_t threads = 0;  // 0: OpenMP's number
  bool control = true;
  std::uint64_t seed = 1;
  std::string data, out = "out";
};

// How a run processes its windows.
struct Setup {
  std::string name;
  std::int32_t mode;   // ga_bn_mode
  std::int64_t micro;  // samples per micro-batch
  bool reversed;       // each window's samples in reverse order: different rounding, nothing else
};

// The running variance of a layer at the end.
struct LayerVariance {
  std::string name;
  std::int64_t count;  // elements of a channel in a micro-batch
  double error;        // largest relative error of a channel, against the exact running variance
  double averaged;  // a running mean of the micro-batches' variances, divided by the exact running
                    // variance, both biased; the mean over the channels
};

struct Epoch {
  std::int64_t last_step;
  double test_accuracy;  // in [0, 1]
};

struct Run {
  Setup setup;
  std::vector<double> losses;  // of the windows
  std::vector<Epoch> epochs;
  std::map<std::int64_t, std::vector<float>> parameters;  // by step
  std::vector<LayerVariance> variances;
  std::int64_t activation_bytes = 0, statistics_bytes = 0;
  double seconds = 0;  // processor time of the training, without the tests
};

// Throws std::runtime_error, gradaccum::Error or dnnl::error.
Run train(const Options& options, const Setup& setup, const Dataset& training, const Dataset& test);
