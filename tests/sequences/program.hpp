// SPDX-License-Identifier: Apache-2.0
//
// A program that makes random calls: its memory, its contexts with their models, and the comparison
// of the two. The derived classes make the calls: setting_calls.hpp, gradient_calls.hpp,
// step_calls.hpp, layer_calls.hpp.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <initializer_list>
#include <memory>
#include <string>
#include <vector>

#include "gradaccum/gradaccum.h"
#include "sequences/model.hpp"
#include "support.hpp"

namespace ga::test::sequences {

using ga::model::Layer;
using ga::model::load;
using ga::model::Model;
using ga::model::Param;
using ga::model::Range;
using ga::model::size_of;
using ga::model::Statuses;
using ga::model::StepResult;
using ga::ref::Real;

inline std::string text(const char* format, ...) __attribute__((format(printf, 1, 2)));
inline std::string text(const char* format, ...) {
  char buffer[400];
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(buffer, sizeof buffer, format, arguments);
  va_end(arguments);
  return buffer;
}

inline std::string names(Statuses statuses) {
  if (statuses == 0) return ga_status_name(GA_OK);
  std::string list;
  for (int k = 1; k < 8; ++k)
    if (statuses >> k & 1)
      list += (list.empty() ? "" : " or ") + std::string(ga_status_name(static_cast<ga_status>(k)));
  return list;
}

// One context and its model.
struct World {
  ga_context* ctx = nullptr;
  std::unique_ptr<Model> model;
  ga_step_result last{};

  // An accumulator that the program holds.
  struct Held {
    ga_param param;
    ga_accumulator at;
  };
  std::vector<Held> held;

  // Gradients that the library may still read.
  struct Kept {
    int64_t number;
    Range memory;
  };
  std::vector<Kept> kept;
};

// Adds a call to the log if the program is verbose.
#define SAY(...) \
  if (verbose_) say(text(__VA_ARGS__))

// The source of all choices: a seed, or bytes, of which each choice takes one or two.
class Chance {
 public:
  explicit Chance(uint64_t seed) : random_(seed) {}
  Chance(const uint8_t* bytes, size_t size) : random_(0), bytes_(bytes), left_(size) {}

  int64_t below(int64_t n) {
    if (!bytes_) return random_.below(n);
    const int64_t upper = n <= 256 ? 0 : 256 * next();
    return (upper + next()) % n;
  }
  double unit() { return bytes_ ? static_cast<double>(next()) / 256 : random_.unit(); }  // [0, 1)
  bool ended() const { return bytes_ && left_ == 0; }

 private:
  int64_t next() {
    if (left_ == 0) return 255;  // most calls of chance() are then false
    --left_;
    return *bytes_++;
  }

  ga::test::Random random_;
  const uint8_t* bytes_ = nullptr;
  size_t left_ = 0;
};

class Program {
 public:
  Program(const Chance& random, int32_t policy, bool verbose)
      : random_(random), policy_(policy), verbose_(verbose) {
    memory_.assign(kMemory, 0x5a);
    shadow_ = memory_;
    scratch_.assign(kScratch, 0);
    nonfinite_rate_ = pick({0, 0, 0.02, policy == GA_NONFINITE_IGNORE ? 0 : 0.15});
    extreme_ = chance(0.25);
  }
  ~Program() {
    for (World& w : worlds_) {
      w.model.reset();
      ga_context_destroy(w.ctx);
    }
  }
  Program(const Program&) = delete;
  Program& operator=(const Program&) = delete;

  const std::string& difference() const { return difference_; }
  std::string log() const {
    std::string all;
    for (const std::string& line : log_) all += "  " + line + "\n";
    return all;
  }

 protected:
  static constexpr size_t kMemory = 4096, kScratch = 1 << 17;

  // ---- Chance -----------------------------------------------------------------------------------

  int64_t below(int64_t n) { return random_.below(n); }
  bool chance(double p) { return random_.unit() < p; }
  template <class T>
  T pick(std::initializer_list<T> list) {
    return list.begin()[below(static_cast<int64_t>(list.size()))];
  }
  double pick(std::initializer_list<double> list) { return pick<double>(list); }

  double number() { return pick({0, 1, -1, 0.5, -0.5, 2, 0.25, -2, 1.5, 3}); }
  double weight() {
    if (chance(0.04)) return pick({-1.0, NAN, INFINITY, -0.25});
    if (extreme_ && chance(0.15))
      return pick({1e-200, 1e308, 1e-45, 1e38, 1e-37, 1e-38, 1e200, 8e307});
    return pick({1, 1, 1, 1, 2, 4, 3, 0, 0.5, 7});
  }
  ga_micro_options micro_options() {
    ga_micro_options o;
    ga_micro_options_init(&o, sizeof o);
    if (chance(0.3))
      o.loss_scale =
          chance(0.06) ? pick({-INFINITY, NAN, INFINITY}) : pick({1, 2, 0.5, 1024, -1, 3});
    if (chance(0.04)) o.flags = chance(0.9) ? GA_MICRO_LAST : 2;
    return o;
  }
  template <class Id>
  Id id(size_t count) {
    if (count == 0 || chance(0.03)) return pick({static_cast<Id>(-1), static_cast<Id>(count)});
    return static_cast<Id>(below(static_cast<int64_t>(count)));
  }
  ga_param any_param(const World& w) { return id<ga_param>(w.model->params().size()); }
  static bool is_param(const World& w, ga_param p) {
    return p >= 0 && static_cast<size_t>(p) < w.model->params().size() &&
           !w.model->params()[static_cast<size_t>(p)].removed;
  }

  // ---- Memory -----------------------------------------------------------------------------------

  void* take(int64_t bytes) {
    used_ = (used_ + 15) / 16 * 16 + 8 * static_cast<size_t>(chance(0.3));
    void* const at = scratch_.data() + used_;
    used_ += static_cast<size_t>(bytes);
    if (used_ > kScratch - 4096) over_ = true;
    return at;
  }
  static void store(void* data, int32_t dtype, int64_t i, double x) {
    char* const at = static_cast<char*>(data) + i * size_of(dtype);
    if (dtype == GA_F64) {
      memcpy(at, &x, sizeof x);
    } else if (dtype == GA_F32) {
      const auto f = static_cast<float>(x);
      memcpy(at, &f, sizeof f);
    } else {
      const uint16_t half = ga::model::to_bf16(x);
      memcpy(at, &half, sizeof half);
    }
  }
  void* numbers(int32_t dtype, int64_t count, bool may_be_nonfinite = true) {
    void* const data = take(count * size_of(dtype));
    for (int64_t i = 0; i < count; ++i) store(data, dtype, i, number());
    if (count > 0 && may_be_nonfinite && chance(nonfinite_rate_))
      store(data, dtype, below(count), pick({NAN, INFINITY, -INFINITY}));
    return data;
  }

  // ---- Comparison -------------------------------------------------------------------------------

  void say(const std::string& line) { log_.push_back(line); }
  void differ(const std::string& what) {
    if (difference_.empty()) difference_ = what;
  }

  // Compares the status of a call with the expected ones. Returns true if the call should succeed
  // and did.
  bool check(const char* call, Statuses want, ga_status got) {
    if (verbose_) log_.back() += std::string(" = ") + ga_status_name(got);
    const bool right = want == 0 ? got == GA_OK : (want >> got & 1) != 0;
    if (!right)
      differ(std::string(call) + " returned " + ga_status_name(got) + ", expected " + names(want) +
             (got == GA_OK ? "" : std::string(": ") + ga_last_error()));
    return right && got == GA_OK;
  }

  int number_of(const World& w) const { return static_cast<int>(&w - worlds_.data()); }

  void equal(const char* what, int64_t got, int64_t want) {
    if (got != want)
      differ(text("%s is %lld, expected %lld", what, static_cast<long long>(got),
                  static_cast<long long>(want)));
  }
  void same(const char* what, double got, double want, double error = 0) {
    if (got == want || (std::isnan(got) && std::isnan(want))) return;
    if (!(std::abs(got - want) <= error))
      differ(text("%s is %.17g, expected %.17g", what, got, want));
  }

  static ga_kept_info kept_info(const World& w, int64_t from) {
    auto info = to_fill<ga_kept_info>();
    if (ga_gradients_kept(w.ctx, from, &info) != GA_OK) info.oldest = INT64_MIN;
    return info;
  }

  // After a call: has the library say what it may still read, and overwrites all other gradients.
  void overwrite_rest(World& w) {
    ga_kept_info info = kept_info(w, w.kept.empty() ? 0 : w.kept.front().number);
    if (info.oldest < 0) return differ("ga_gradients_kept failed");
    std::vector<World::Kept> rest;
    std::vector<Range> released;
    for (const World::Kept& k : w.kept) {
      if (info.oldest < k.number) info = kept_info(w, k.number);
      if (info.oldest == k.number)
        rest.push_back(k);
      else
        released.push_back(k.memory);
    }
    w.kept = std::move(rest);
    for (const Range& r : released) overwrite(w, r);
    if (w.model->reads_nothing_later())
      equal("kept: oldest", kept_info(w, 0).oldest, info.latest + 1);
    equal("kept: until_micro_end", info.until_micro_end, w.model->reads_at_micro_end());
  }

  // A gradient that was not read may overlap one that will be.
  void overwrite(const World& w, const Range& r) {
    const Range own(scratch_.data(), kScratch);
    const bool shared = std::any_of(w.kept.begin(), w.kept.end(),
                                    [&](const World::Kept& k) { return k.memory.overlaps(r); });
    if (!shared && r.begin >= own.begin && r.end <= own.end)
      memset(reinterpret_cast<void*>(r.begin), 0xff, r.end - r.begin);
  }

  // Compares the window, the loss scale and the program's memory with the model after a call.
  void compare_window(const World& w) {
    auto got = to_fill<ga_window_info>();
    if (ga_window(w.ctx, &got) != GA_OK) return differ("ga_window failed");
    const ga_window_info want = w.model->window();
    equal("window: state", got.state, want.state);
    equal("window: micro_batches", got.micro_batches, want.micro_batches);
    equal("window: open_micro", got.open_micro, want.open_micro);
    equal("window: accum_steps", got.accum_steps, want.accum_steps);
    equal("window: windows", got.windows, want.windows);
    equal("window: steps", got.steps, want.steps);
    same("window: weight", got.weight, want.weight, std::abs(want.weight) * 0x1p-48);
    double scale = 0;
    ga_loss_scale(w.ctx, &scale, nullptr);
    same("ga_loss_scale", scale, w.model->loss_scale(), w.model->loss_scale() * 1e-14);
    if (memory_ != shadow_) differ("memory that no step updates was written");
  }

  Chance random_;
  int32_t policy_;
  bool verbose_;
  double nonfinite_rate_ = 0;
  bool extreme_ = false, over_ = false;
  std::vector<char> memory_, shadow_, scratch_;
  size_t next_ = 0, used_ = 0;
  int names_ = 0, given_ = 0;
  std::vector<ga::model::Settings*> contexts_;
  std::vector<World> worlds_;
  std::vector<std::string> log_;
  std::string difference_;
};

}  // namespace ga::test::sequences
