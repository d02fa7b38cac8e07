// What the program shows: progress in training, then both runs side by side, a CSV and a picture.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "train.hpp"

// One line that is drawn over and over on a terminal; elsewhere a line for every tenth of the run.
class Progress {
 public:
  Progress(std::string name, std::int64_t epochs, std::int64_t samples_per_epoch);
  void window(std::int64_t samples, double loss,
              std::int64_t correct);  // loss: sum over the samples
  void epoch(double test_accuracy);

 private:
  using Clock = std::chrono::steady_clock;
  std::string numbers() const;
  void draw_bar(double fraction) const;
  void clear_bar() const;

  const std::string name_;
  const std::int64_t epochs_, samples_per_epoch_;
  const bool terminal_;
  const Clock::time_point start_ = Clock::now();
  Clock::time_point drawn_ = start_;
  std::int64_t epoch_ = 1, samples_ = 0, tenths_ = 0;  // samples_: in all epochs
  std::int64_t epoch_samples_ = 0, epoch_correct_ = 0;
  double epoch_loss_ = 0;
};

struct Run {
  explicit Run(const Cut& window_cut) : cut(window_cut) {}

  Cut cut;
  std::vector<double> losses;  // of the windows
  std::vector<Epoch> epochs;
  std::map<std::int64_t, std::vector<float>> parameters;  // by step
  Summary summary;
  std::int64_t peak_bytes = 0;  // resident, of the run's own process
};

// The largest difference of any parameter, by step.
std::map<std::int64_t, double> parameter_differences(const Run& a, const Run& b);

// Below: runs[0] with whole batches, runs[1] accumulated, runs[2], if there is one, the control.

void print_comparison(const std::vector<Run>& runs);

// Writes fashion_mnist.csv, and by gnuplot fashion_mnist.svg, to a folder; says where they lie.
void write_report(const std::string& folder, const std::vector<Run>& runs);
