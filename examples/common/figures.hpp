// Numbers and pictures that compare several runs.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>
#include <utility>
#include <vector>

// The largest absolute difference of an element; NaN if any difference is NaN.
double largest_difference(const std::vector<float>& a, const std::vector<float>& b);

// The range of the finite, positive means over bin windows each, widened for a plot's axis.
std::pair<double, double> loss_range(const std::vector<double>& losses, std::size_t bin);

// Runs gnuplot to make NAME.svg from NAME.gp and NAME.csv in the folder; prints their paths.
// numbers: what the CSV holds.
void draw_picture(const std::string& folder, const std::string& name,
                  const char* numbers = "losses");
