// One training run. The calls to libgradaccum are in train.cpp and in the backward() of the
// networks.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "gradaccum/gradaccum.hpp"
#include "mlp.hpp"

struct Options {
  ga_optimizer weights{}, biases{};  // the optimizers of weights and of biases
  ga_schedule schedule{};            // train() sets total_steps
  ga_clip clip{};
  Precision precision;
  double loss_scale = 1;
  bool dynamic_loss_scale = false;
  double ema = 0;  // decay of the exponential moving average; 0: none is kept
  std::int64_t batch = 64, accumulation = 16, epochs = 4;
  std::int64_t samples = 0;       // to train on, of the 60000; 0: all
  std::int64_t test_samples = 0;  // to test on, of the 10000; 0: all
  ga_device device = GA_DEVICE_CPU;
  std::int32_t threads = 0;  // 0: OpenMP's number
  bool control = true;
  std::uint64_t seed = 1;
  std::string data, out = "out";
  std::string save;          // file for the state of the run; "": none
  std::int64_t every = 100;  // windows from save to save
  bool resume = false;       // go on from that file, if there is one
};

// A window of batch samples, cut into micro-batches of micro samples; the last one may be shorter.
struct Cut {
  Cut(std::int64_t batch_size, std::int64_t accumulation)
      : batch(batch_size), micro((batch_size + accumulation - 1) / accumulation) {}
  std::string name() const;  // "64", "16 x 4" or "64 reversed"

  std::int64_t batch, micro;
  bool reversed =
      false;  // each window's samples in reverse order: the same mean, different rounding
};

struct Epoch {
  std::int64_t last_step = 0;
  double test_accuracy = 0;     // in [0, 1]
  double average_accuracy = 0;  // in [0, 1], with the exponential moving averages
};

struct Summary {
  double seconds = 0;  // of training, without the tests
  std::int64_t samples = 0, skipped_steps = 0;
  std::int64_t data_bytes = 0, parameter_bytes = 0, activation_bytes = 0;
  std::int64_t accumulator_bytes = 0, state_bytes = 0, workspace_bytes = 0;  // the library's
  std::int64_t master_bytes = 0, average_bytes = 0;
  double loss_scale = 1;  // at the end
  bool stopped = false;   // before the end, because the sink wanted so
};

// Receives the results of a run while it trains.
class Sink {
 public:
  virtual ~Sink() = default;
  virtual void window(double mean_loss) = 0;
  virtual void epoch(const Epoch& epoch) = 0;
  // All parameters, after steps 0, 1, 3, 10, 30, 100, 300 and the last one of every epoch.
  virtual void parameters(std::int64_t step, const Mlp::Values& tensors) = 0;
  // Whether the run is to stop after the window that has just ended.
  virtual bool stops() { return false; }
};

// Throws std::runtime_error, gradaccum::Error or dnnl::error.
Summary train(const Options& options, const Cut& cut, const std::string& data_folder, Sink& sink);
