// Progress output of a training program, and numbers as text.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>
#include <cstdint>
#include <string>

__attribute__((format(printf, 1, 2))) std::string text(const char* format, ...);
double mib(std::int64_t bytes);

// On a terminal, redraws one line; elsewhere, prints a line for every tenth of the run.
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
