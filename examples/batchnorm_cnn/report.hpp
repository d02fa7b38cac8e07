// What the program shows when it has trained: the runs side by side, a CSV and a picture.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>
#include <vector>

#include "train.hpp"

// The first run is the one with whole batches.

void print_comparison(const std::vector<Run>& runs);

// Writes batchnorm_cnn.csv, and by gnuplot batchnorm_cnn.svg, to a folder; says where they lie.
void write_report(const std::string& folder, const std::vector<Run>& runs);

// Largest difference of a window's loss from that of the first run, over the first so many steps.
double loss_difference(const std::vector<Run>& runs, const Run& run, std::size_t steps);
