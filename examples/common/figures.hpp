// Numbers and pictures of several runs beside each other.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>
#include <utility>
#include <vector>

// Of any element; NaN, if one is.
double largest_difference(const std::vector<float>& a, const std::vector<float>& b);

// The range of the means over bin windows each, with some room; of what is finite and not 0.
std::pair<double, double> loss_range(const std::vector<double>& losses, std::size_t bin);

// Has gnuplot make NAME.svg of NAME.gp and NAME.csv in the folder; says where they lie.
void draw_picture(const std::string& folder, const std::string& name);
