// The program's output after training: the runs side by side, a CSV file and a picture.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>
#include <vector>

#include "train.hpp"

// The first run is the one with whole batches.

void print_comparison(const std::vector<Run>& runs);

// Writes batchnorm_cnn.csv and, with gnuplot, batchnorm_cnn.svg to a folder; prints their paths.
void write_report(const std::string& folder, const std::vector<Run>& runs);

// The largest difference of a window's loss from the first run's, over the first steps windows.
double loss_difference(const std::vector<Run>& runs, const Run& run, std::size_t steps);
