// SPDX-License-Identifier: Apache-2.0
#include "figures.hpp"

#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <filesystem>
#include <limits>
#include <numeric>

namespace {

// Returns true if gnuplot ran and succeeded.
bool run_gnuplot(const std::string& folder, const std::string& script) {
  const pid_t child = fork();
  if (child == 0) {
    if (chdir(folder.c_str()) == 0) execlp("gnuplot", "gnuplot", script.c_str(), nullptr);
    _exit(127);
  }
  int status = 0;
  return child > 0 && waitpid(child, &status, 0) == child && WIFEXITED(status) &&
         WEXITSTATUS(status) == 0;
}

}  // namespace

double largest_difference(const std::vector<float>& a, const std::vector<float>& b) {
  double largest = 0;
  for (std::size_t i = 0; i < a.size(); ++i) {
    const double difference = std::abs(double{a[i]} - double{b[i]});
    // Negated so that a NaN, for which every comparison is false, is kept.
    if (!(difference <= largest)) largest = difference;
    if (std::isnan(largest)) break;
  }
  return largest;
}

std::pair<double, double> loss_range(const std::vector<double>& losses, std::size_t bin) {
  double low = std::numeric_limits<double>::infinity(), high = 0;
  for (std::size_t first = 0; first < losses.size(); first += bin) {
    const std::size_t end = std::min(first + bin, losses.size());
    const double mean = std::accumulate(&losses[first], losses.data() + end, 0.0) /
                        static_cast<double>(end - first);
    if (!std::isfinite(mean) || mean <= 0) continue;
    low = std::min(low, mean);
    high = std::max(high, mean);
  }
  return high > 0 ? std::make_pair(0.8 * low, 1.25 * high) : std::make_pair(0.1, 1.0);
}

void draw_picture(const std::string& folder, const std::string& name, const char* numbers) {
  const std::string base = (std::filesystem::path(folder) / name).string();
  std::printf("\n%-8s %s.csv\n", (std::string(numbers) + ":").c_str(), base.c_str());
  std::fflush(stdout);
  if (run_gnuplot(folder, name + ".gp")) {
    std::printf("picture: %s.svg\n", base.c_str());
  } else {
    std::printf(
        "picture: none, because gnuplot failed or is not installed (package gnuplot-nox)\n");
  }
}
