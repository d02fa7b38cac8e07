// The program's output after training: the runs side by side, a CSV file and a picture.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "train.hpp"

struct Run {
  explicit Run(const Cut& window_cut) : cut(window_cut) {}

  Cut cut;
  std::vector<double> losses;  // of the windows
  std::vector<Epoch> epochs;
  std::map<std::int64_t, std::vector<float>> parameters;  // by step
  Summary summary;
  std::int64_t peak_bytes = 0;  // peak resident memory of the run's own process
};

// The largest difference of any parameter, by step.
std::map<std::int64_t, double> parameter_differences(const Run& a, const Run& b);

// Below, runs[0] is the run with whole batches, runs[1] the accumulated one, and runs[2], if
// present, the control.

void print_comparison(const std::vector<Run>& runs);

// Writes fashion_mnist.csv and, with gnuplot, fashion_mnist.svg to a folder; prints their paths.
void write_report(const std::string& folder, const std::vector<Run>& runs);
