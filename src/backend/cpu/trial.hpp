// SPDX-License-Identifier: Apache-2.0
// Whether passes take all threads less time than one. What they cost together is more than a hand-over: threads
// have to be woken, another program may have their cores, and the lines that one has written come from its cache
// to the others'. So it is tried.
#pragma once

#include <algorithm>
#include <cstdint>

namespace ga::cpu {

// Passes of about the same size go one way until a row of them has gone the other way in less time. They are
// decided about by all kinds of passes together, since each finds in the caches what the one before has left there.
class Trial {
 public:
  static constexpr int kKinds = 4;

  // Whether the next pass is for all threads; after it took() is called.
  bool next() {
    if (left_ == 0 && --wait_ <= 0) turn(!chosen_, kSettling + kTried);
    return now_;
  }

  void took(int kind, double nanoseconds) {
    double& usual = taken_[now_][kind];
    const bool settled = settling_ == 0;
    if (!settled)
      --settling_;
    else
      usual = usual > 0 ? usual + (nanoseconds - usual) / 4 : nanoseconds;
    ++passes_[kind];
    if (left_ > 0) {
      const double other = taken_[chosen_][kind];
      lost_ += nanoseconds - other;
      const bool hopeless = other > 0 && lost_ > kTried * other;
      if (hopeless) usual = std::max(usual, nanoseconds);
      if (--left_ > 0 && !hopeless) return;
      left_ = 0;
      if (!hopeless && is_better(1)) return change();
      turn(chosen_, 0);
      wait_ = interval_ = std::min(2 * interval_, kSeldom);
    } else if (settled && is_better(kClearly)) {
      change();
    }
  }

 private:
  // The first passes find the data in the caches of those that went the other way, and do not count.
  static constexpr int kSettling = 4, kTried = 20;
  static constexpr int64_t kOften = 32, kSeldom = 4096;  // passes between two trials
  static constexpr double kClearly = 0.8;

  void turn(bool way, int left) {
    now_ = way;
    left_ = left;
    settling_ = kSettling;
    lost_ = 0;
  }

  void change() {
    chosen_ = !chosen_;
    turn(chosen_, 0);
    wait_ = interval_ = kOften;
  }

  // Whether the way that is not chosen takes less than `part` of the time of the chosen one.
  bool is_better(double part) {
    double chosen = 0, other = 0;
    int64_t most = 0;
    for (int k = 0; k < kKinds; ++k) {
      if (taken_[0][k] == 0 || taken_[1][k] == 0) continue;
      chosen += static_cast<double>(passes_[k]) * taken_[chosen_][k];
      other += static_cast<double>(passes_[k]) * taken_[!chosen_][k];
      most = std::max(most, passes_[k]);
    }
    if (most > kSeldom)
      for (int64_t& passes : passes_) passes /= 2;
    return other < part * chosen;
  }

  double taken_[2][kKinds] = {};  // nanoseconds, by way: a moving mean; 0: not known
  int64_t passes_[kKinds] = {};
  bool chosen_ = true, now_ = true;  // all threads
  int settling_ = kSettling, left_ = 0;
  double lost_ = 0;
  int64_t wait_ = 2 * kSettling, interval_ = kOften;
};

}  // namespace ga::cpu
