// SPDX-License-Identifier: Apache-2.0
#include "console.hpp"

#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdarg>
#include <cstdio>
#include <utility>

namespace {

std::string minutes(double seconds) {
  const long whole = std::lround(seconds);
  return text("%ld:%02ld", whole / 60, whole % 60);
}

std::size_t terminal_width() {
  winsize size{};
  if (ioctl(STDOUT_FILENO, TIOCGWINSZ, &size) != 0 || size.ws_col == 0) return 80;
  return size.ws_col;
}

}  // namespace

std::string text(const char* format, ...) {
  char buffer[512];
  va_list arguments;
  va_start(arguments, format);
  std::vsnprintf(buffer, sizeof buffer, format, arguments);
  va_end(arguments);
  return buffer;
}

double mib(std::int64_t bytes) { return static_cast<double>(bytes) / (1024.0 * 1024.0); }

Progress::Progress(std::string name, std::int64_t epochs, std::int64_t samples_per_epoch)
    : name_(std::move(name)),
      epochs_(epochs),
      samples_per_epoch_(samples_per_epoch),
      terminal_(isatty(STDOUT_FILENO) == 1) {}

void Progress::window(std::int64_t samples, double loss, std::int64_t correct) {
  samples_ += samples;
  epoch_samples_ += samples;
  epoch_loss_ += loss;
  epoch_correct_ += correct;
  const std::int64_t all = epochs_ * samples_per_epoch_;
  if (terminal_) {
    const Clock::time_point now = Clock::now();
    if (now - drawn_ < std::chrono::milliseconds(100)) return;
    drawn_ = now;
    draw_bar(static_cast<double>(samples_) / static_cast<double>(all));
  } else if (samples_ * 10 / all > tenths_) {
    tenths_ = samples_ * 10 / all;
    std::printf("%-11s %3d %%  epoch %d/%d  %s\n", name_.c_str(), static_cast<int>(tenths_ * 10),
                static_cast<int>(epoch_), static_cast<int>(epochs_), numbers().c_str());
    std::fflush(stdout);
  }
}

void Progress::epoch(double test_accuracy) {
  clear_bar();
  const auto samples = static_cast<double>(epoch_samples_);
  std::printf("%-11s epoch %d/%d: loss %.4f, accuracy %.2f %%, test accuracy %.2f %%\n",
              name_.c_str(), static_cast<int>(epoch_), static_cast<int>(epochs_),
              epoch_loss_ / samples, 100 * static_cast<double>(epoch_correct_) / samples,
              100 * test_accuracy);
  std::fflush(stdout);
  ++epoch_;
  epoch_samples_ = epoch_correct_ = 0;
  epoch_loss_ = 0;
}

// Loss and accuracy are means over this epoch so far.
std::string Progress::numbers() const {
  const auto samples = static_cast<double>(epoch_samples_);
  const double seconds = std::chrono::duration<double>(Clock::now() - start_).count();
  const double rate = static_cast<double>(samples_) / seconds;
  const double left = static_cast<double>(epochs_ * samples_per_epoch_ - samples_) / rate;
  return text("loss %.4f  accuracy %.2f %%  %.0f samples/s  %s left", epoch_loss_ / samples,
              100 * static_cast<double>(epoch_correct_) / samples, rate, minutes(left).c_str());
}

void Progress::draw_bar(double fraction) const {
  const std::string head = text("%-11s epoch %d/%d ", name_.c_str(), static_cast<int>(epoch_),
                                static_cast<int>(epochs_));
  const std::string tail = text(" %3.0f %%  ", 100 * fraction) + numbers();
  const std::size_t width = terminal_width() - 1, taken = head.size() + tail.size() + 2;
  std::string bar;
  if (taken + 4 <= width) {
    const std::size_t cells = std::min<std::size_t>(width - taken, 40);
    const auto full = static_cast<std::size_t>(fraction * static_cast<double>(cells));
    bar = "[" + std::string(full, '=') + std::string(cells - full, ' ') + "]";
  }
  std::printf("\r\033[K%s", (head + bar + tail).substr(0, width).c_str());
  std::fflush(stdout);
}

void Progress::clear_bar() const {
  if (terminal_) std::printf("\r\033[K");
}
