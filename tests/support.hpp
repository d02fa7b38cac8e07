// SPDX-License-Identifier: Apache-2.0
//
// What the tests share: tensors at awkward addresses, data chosen to hurt, a context that ends by
// itself, the table of optimizers, and a model of the library in float64.
#pragma once

#include <gtest/gtest.h>
#include <stdlib.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "gradaccum/gradaccum.h"
#include "reference.hpp"

#define EXPECT_OK(call) EXPECT_EQ(call, GA_OK) << ga_last_error()
#define ASSERT_OK(call) ASSERT_EQ(call, GA_OK) << ga_last_error()

namespace ga::test {

// ---- Structs with their defaults ----------------------------------------------------------------

// One thread: what threads do is the subject of a few tests, and elsewhere they would only fight
// over the cores.
inline ga_config config() {
  ga_config c;
  EXPECT_OK(ga_config_init(&c, sizeof c));
  c.num_threads = 1;
  return c;
}

inline ga_optimizer optimizer(int32_t kind, int32_t flavor = GA_FLAVOR_TORCH) {
  ga_optimizer o;
  EXPECT_OK(ga_optimizer_init(&o, sizeof o, kind, flavor));
  return o;
}

// p -= g, to the bit when p is 0: what the optimizer was given can be read from the parameter.
inline ga_optimizer plain_sgd(double lr = 1) {
  ga_optimizer o = optimizer(GA_OPTIMIZER_SGD);
  o.lr = lr;
  return o;
}

inline ga_schedule schedule(int32_t kind) {
  ga_schedule s;
  EXPECT_OK(ga_schedule_init(&s, sizeof s, kind));
  return s;
}

inline ga_clip clip(int32_t scope, double max_norm, int32_t flavor = GA_FLAVOR_TORCH,
                    double max_value = INFINITY) {
  ga_clip c;
  EXPECT_OK(ga_clip_init(&c, sizeof c));
  c.scope = scope;
  c.flavor = flavor;
  c.max_norm = max_norm;
  c.max_value = max_value;
  return c;
}

inline ga_window_info window(const ga_context* ctx) {
  ga_window_info info;
  memset(&info, 0xee, sizeof info);
  info.struct_size = sizeof info;
  EXPECT_OK(ga_window(ctx, &info));
  return info;
}

inline ga_memory memory(const ga_context* ctx) {
  ga_memory m;
  memset(&m, 0xee, sizeof m);
  m.struct_size = sizeof m;
  EXPECT_OK(ga_context_memory(ctx, &m));
  return m;
}

inline ga_step_result step(ga_context* ctx) {
  ga_step_result r;
  memset(&r, 0xee, sizeof r);
  r.struct_size = sizeof r;
  EXPECT_OK(ga_step(ctx, &r));
  return r;
}

inline double group_lr(const ga_context* ctx, ga_group group = 0) {
  double lr = NAN;
  EXPECT_OK(ga_group_lr(ctx, group, &lr));
  return lr;
}

class Context {
 public:
  Context() : Context(config()) {}
  explicit Context(const ga_config& config) { EXPECT_OK(ga_context_create(&config, &ctx_)); }
  ~Context() { ga_context_destroy(ctx_); }
  Context(const Context&) = delete;
  Context& operator=(const Context&) = delete;

  operator ga_context*() const { return ctx_; }

  ga_group group(const ga_optimizer& o) {
    ga_group id = -1;
    EXPECT_OK(ga_group_add(ctx_, &o, &id));
    return id;
  }
  ga_param param(ga_group group, const std::string& name, float* data, int64_t count) {
    ga_param id = -1;
    EXPECT_OK(ga_param_add(ctx_, group, name.c_str(), data, GA_F32, 1, &count, nullptr, &id));
    return id;
  }
  void accumulate(std::vector<const void*> gradients, double weight = 1) {
    EXPECT_OK(ga_accumulate(ctx_, gradients.data(), gradients.size(), weight, nullptr));
  }

 private:
  ga_context* ctx_ = nullptr;
};

// ---- Instruction set levels ---------------------------------------------------------------------

// Sets GA_CPU_ISA for the contexts made while it lives.
class Isa {
 public:
  explicit Isa(const char* level) {
    if (const char* old = getenv("GA_CPU_ISA")) old_ = old;
    setenv("GA_CPU_ISA", level, 1);
  }
  ~Isa() {
    if (old_.empty()) {
      unsetenv("GA_CPU_ISA");
    } else {
      setenv("GA_CPU_ISA", old_.c_str(), 1);
    }
  }
  Isa(const Isa&) = delete;
  Isa& operator=(const Isa&) = delete;

  // Whether this build and this processor have the level.
  static bool available() {
    ga_context* ctx = nullptr;
    const ga_status status = ga_context_create(nullptr, &ctx);
    ga_context_destroy(ctx);
    return status != GA_ERROR_UNSUPPORTED;
  }

 private:
  std::string old_;
};

#if defined(__x86_64__)
inline const char* const kIsaLevels[] = {"scalar", "x86-64-v2", "x86-64-v3", "x86-64-v4"};
#elif defined(__aarch64__)
inline const char* const kIsaLevels[] = {"scalar", "neon"};
#else
inline const char* const kIsaLevels[] = {"scalar"};
#endif

// A name for GoogleTest, of letters, digits and underscores.
inline std::string identifier(std::string text) {
  for (char& c : text) {
    if (!isalnum(static_cast<unsigned char>(c))) c = '_';
  }
  return text;
}

// ---- Tensors ------------------------------------------------------------------------------------

// Tensors side by side in one block of floats. Each lies at an odd index, so at no multiple of 8
// bytes or more, with a gap before the next that nobody may touch.
struct Layout {
  std::vector<int64_t> counts;
  std::vector<int64_t> offsets;
  int64_t total = 1;

  explicit Layout(std::vector<int64_t> tensor_counts) : counts(std::move(tensor_counts)) {
    for (const int64_t count : counts) {
      offsets.push_back(total);
      total += count + 3;
      total += 1 - total % 2;
    }
  }
  size_t size() const { return counts.size(); }
};

using Block = std::vector<float>;

inline constexpr float kCanary = 12345.678f;

inline bool gaps_untouched(const Layout& layout, const Block& block) {
  Block gaps = block;
  for (size_t i = 0; i < layout.size(); ++i) {
    std::fill_n(gaps.begin() + layout.offsets[i], layout.counts[i], kCanary);
  }
  return std::all_of(gaps.begin(), gaps.end(), [](float x) { return x == kCanary; });
}

inline bool same_bits(const Block& a, const Block& b) {
  return a.size() == b.size() && memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

// splitmix64 (Steele et al. 2014)
class Random {
 public:
  explicit Random(uint64_t seed) : state_(seed) {}
  uint64_t bits() {
    uint64_t z = (state_ += 0x9e3779b97f4a7c15);
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9;
    z = (z ^ (z >> 27)) * 0x94d049bb133111eb;
    return z ^ (z >> 31);
  }
  double unit() { return static_cast<double>(bits() >> 11) * 0x1p-53; }  // [0, 1)
  double signed_unit() { return 2 * unit() - 1; }                        // [-1, 1)
  int64_t below(int64_t n) { return static_cast<int64_t>(bits() % static_cast<uint64_t>(n)); }

 private:
  uint64_t state_;
};

// Parameters: of both signs and mixed size, with zeros.
inline Block parameters(const Layout& layout, uint64_t seed) {
  Random random(seed);
  Block block(static_cast<size_t>(layout.total), kCanary);
  for (size_t i = 0; i < layout.size(); ++i) {
    for (int64_t j = 0; j < layout.counts[i]; ++j) {
      const double scale = j % 7 == 0 ? 1e-3 : 1;
      block[static_cast<size_t>(layout.offsets[i] + j)] =
          j % 31 == 30 ? 0.0f : static_cast<float>(scale * random.signed_unit());
    }
  }
  return block;
}

// Gradients of both signs. By the position of the element in its tensor: of order 1; of the order
// of Adam's epsilon; nearly cancelling from one round to the next; always zero; large; so small
// that the square underflows; subnormal.
inline Block gradients(const Layout& layout, uint64_t seed, uint64_t round) {
  Random random(seed * 1000003 + round);
  Block block(static_cast<size_t>(layout.total), kCanary);
  for (size_t i = 0; i < layout.size(); ++i) {
    for (int64_t j = 0; j < layout.counts[i]; ++j) {
      double g = random.signed_unit();
      switch (j % 13) {
        case 3:
          g *= 1e-8;
          break;
        case 5:
          g = (round % 2 == 0 ? 1 : -1) * (1 + 1e-5 * g);
          break;
        case 7:
          g = 0;
          break;
        case 8:
          g *= 1e4;
          break;
        case 10:
          g *= 1e-25;
          break;
        case 12:
          g *= 1e-40;
          break;
        default:
          break;
      }
      block[static_cast<size_t>(layout.offsets[i] + j)] = static_cast<float>(g);
    }
  }
  return block;
}

// One pointer per tensor.
inline std::vector<const void*> pointers(const Layout& layout, const Block& block) {
  std::vector<const void*> result;
  for (const int64_t offset : layout.offsets) result.push_back(block.data() + offset);
  return result;
}

// ---- Optimizers that must work ------------------------------------------------------------------

struct NamedOptimizer {
  std::string name;
  ga_optimizer optimizer;
};

inline std::vector<NamedOptimizer> good_optimizers() {
  std::vector<NamedOptimizer> list;
  const auto add = [&](const char* name, int32_t kind, int32_t flavor, double lr, auto change) {
    ga_optimizer o = optimizer(kind, flavor);
    o.lr = lr;
    change(o);
    list.push_back({name, o});
  };
  using O = ga_optimizer&;
  const int32_t torch = GA_FLAVOR_TORCH, keras = GA_FLAVOR_KERAS, bert = GA_FLAVOR_BERT;

  const int32_t sgd = GA_OPTIMIZER_SGD;
  add("Sgd", sgd, torch, 0.05, [](O) {});
  add("SgdDecay", sgd, torch, 0.05, [](O o) { o.weight_decay = 0.1; });
  add("SgdMomentum", sgd, torch, 0.05, [](O o) { o.momentum = 0.9; });
  add("SgdDampening", sgd, torch, 0.05,
      [](O o) { o.momentum = 0.9, o.dampening = 0.5, o.weight_decay = 0.01; });
  add("SgdNesterov", sgd, torch, 0.05,
      [](O o) { o.momentum = 0.9, o.nesterov = 1, o.weight_decay = 0.01; });
  add("SgdMaximize", sgd, torch, 0.05,
      [](O o) { o.momentum = 0.5, o.maximize = 1, o.weight_decay = 0.01; });
  add("SgdKeras", sgd, keras, 0.05, [](O o) { o.weight_decay = 0.1; });
  add("SgdKerasMomentum", sgd, keras, 0.05, [](O o) { o.momentum = 0.9, o.weight_decay = 0.01; });
  add("SgdKerasNesterov", sgd, keras, 0.05,
      [](O o) { o.momentum = 0.9, o.nesterov = 1, o.maximize = 1; });

  const int32_t adam = GA_OPTIMIZER_ADAM, adamw = GA_OPTIMIZER_ADAMW;
  add("Adam", adam, torch, 1e-2, [](O) {});
  add("AdamDecay", adam, torch, 1e-2, [](O o) { o.weight_decay = 0.1; });
  add("AdamAmsgrad", adam, torch, 1e-2, [](O o) { o.amsgrad = 1; });
  add("AdamDecayAmsgrad", adam, torch, 1e-2,
      [](O o) { o.amsgrad = 1, o.weight_decay = 0.1, o.maximize = 1; });
  add("AdamBetas", adam, torch, 1e-2, [](O o) { o.beta1 = 0, o.beta2 = 0.5, o.eps = 1e-3; });
  add("AdamKeras", adam, keras, 1e-2, [](O) {});
  add("AdamKerasDecay", adam, keras, 1e-2, [](O o) { o.weight_decay = 0.1, o.amsgrad = 1; });
  add("AdamW", adamw, torch, 1e-2, [](O) {});
  add("AdamWAmsgrad", adamw, torch, 1e-2,
      [](O o) { o.amsgrad = 1, o.maximize = 1, o.weight_decay = 0.1; });
  add("AdamWKeras", adamw, keras, 1e-2, [](O) {});
  add("AdamWBert", adamw, bert, 1e-2, [](O) {});
  return list;
}

// ---- The library in float64 ---------------------------------------------------------------------

// Accumulates and steps as the public header says, one element at a time.
class Model {
 public:
  Model(const Layout& layout, std::vector<ga_optimizer> optimizers, const ga_config& config,
        const Block& start)
      : layout_(layout), optimizers_(std::move(optimizers)), config_(config) {
    optimizers_.resize(layout.size(), optimizers_.back());  // one for all, or one each
    for (size_t i = 0; i < layout.size(); ++i) {
      std::vector<ref::Element> tensor(static_cast<size_t>(layout.counts[i]));
      for (size_t j = 0; j < tensor.size(); ++j) {
        tensor[j].p = ref::exact(start[static_cast<size_t>(layout.offsets[i]) + j]);
      }
      updates_.push_back(0);
      sums_.emplace_back(tensor.size());
      tensors_.push_back(std::move(tensor));
    }
    touched_.assign(layout.size(), false);
  }

  // missing: tensors that this micro-batch brings no gradient for.
  void accumulate(const Block& block, double weight, double loss_scale = 1,
                  const std::vector<size_t>& missing = {}) {
    weight_ += weight;
    if (weight == 0) return;
    for (size_t i = 0; i < layout_.size(); ++i) {
      if (std::find(missing.begin(), missing.end(), i) == missing.end()) {
        accumulate_part(i, block, weight, loss_scale);
      }
    }
  }

  // One contribution to one tensor, in a micro-batch whose weight has been counted.
  void accumulate_part(size_t i, const Block& block, double weight, double loss_scale = 1) {
    touched_[i] = true;
    for (size_t j = 0; j < sums_[i].size(); ++j) {
      sums_[i][j].add(block[static_cast<size_t>(layout_.offsets[i]) + j], weight, loss_scale,
                      config_.gradient_kind);
    }
  }

  // lr: for every group; NaN: what the optimizer says.
  void step(double lr = NAN, const ga_clip* clip = nullptr) {
    if (weight_ == 0) {
      clear();
      return;
    }
    std::vector<std::vector<ref::Real>> g(layout_.size());
    for (size_t i = 0; i < layout_.size(); ++i) {
      if (!touched_[i]) continue;
      for (const ref::Sum& sum : sums_[i]) g[i].push_back(sum.reduced(weight_, config_.reduce));
    }
    if (clip) clip_all(*clip, g);

    ++steps_;
    for (size_t i = 0; i < layout_.size(); ++i) {
      if (!touched_[i] && config_.missing == GA_MISSING_SKIP) continue;
      if (!touched_[i]) g[i].assign(tensors_[i].size(), ref::Real());
      ++updates_[i];
      const ga_optimizer& o = optimizers_[i];
      const int64_t t = o.flavor == GA_FLAVOR_TORCH ? updates_[i] : steps_;
      for (size_t j = 0; j < g[i].size(); ++j) {
        ref::update(o, std::isnan(lr) ? o.lr : lr, t, g[i][j], tensors_[i][j]);
      }
    }
    clear();
  }

  // Whether the library's parameters are right, to rounding.
  testing::AssertionResult matches(const Block& got, double factor = 1) const {
    double worst = 0;
    std::string where;
    for (size_t i = 0; i < layout_.size(); ++i) {
      for (size_t j = 0; j < tensors_[i].size(); ++j) {
        const ref::Real& want = tensors_[i][j].p;
        const float x = got[static_cast<size_t>(layout_.offsets[i]) + j];
        const double distance = std::abs(x - want.value);
        const double tolerance = factor * ref::tolerance(want);
        if (distance <= tolerance) continue;  // false for a NaN
        const double ratio = distance / tolerance;
        if (ratio <= worst) continue;
        worst = std::isnan(ratio) ? INFINITY : ratio;
        char text[200];
        snprintf(text, sizeof text, "tensor %zu[%zu] is %.9g, not %.9g: %.3g times the tolerance",
                 i, j, static_cast<double>(x), want.value, ratio);
        where = text;
      }
    }
    if (!gaps_untouched(layout_, got)) {
      return testing::AssertionFailure() << "a float outside of the tensors was written";
    }
    if (worst > 1) return testing::AssertionFailure() << where;
    return testing::AssertionSuccess();
  }

  // Hyper-parameters that change between steps; the state stays.
  void set_optimizer(size_t i, const ga_optimizer& o) { optimizers_[i] = o; }

  double norm() const { return norm_; }
  double clip_factor() const { return factor_; }
  const ref::Element& element(size_t i, size_t j) const { return tensors_[i][j]; }

 private:
  void clear() {
    weight_ = 0;
    touched_.assign(layout_.size(), false);
    for (auto& sums : sums_) std::fill(sums.begin(), sums.end(), ref::Sum());
  }

  void clip_all(const ga_clip& clip, std::vector<std::vector<ref::Real>>& g) {
    if (std::isfinite(clip.max_value)) {
      for (auto& tensor : g) {
        for (ref::Real& x : tensor) x = ref::clamp(x, clip.max_value);
      }
    }
    factor_ = 1;
    if (clip.scope == GA_CLIP_NONE) return;
    for (size_t first = 0; first < g.size(); ++first) {
      const size_t last = clip.scope == GA_CLIP_GLOBAL ? g.size() : first + 1;
      double squares = 0, errors = 0;
      for (size_t i = first; i < last; ++i) {
        for (const ref::Real& x : g[i]) {
          squares += x.value * x.value;
          errors += x.error * x.error;
        }
      }
      const double norm = std::sqrt(squares);
      const double factor = ref::clip_factor(clip.flavor, norm, clip.max_norm);
      factor_ = std::min(factor_, factor);
      norm_ = norm;
      // |g + e| lies within |e| of |g|, and the factor moves as the norm does.
      const ref::Real scale(factor, factor * (std::sqrt(errors) / norm + ref::kHalfUlp));
      for (size_t i = first; i < last && norm > 0; ++i) {
        for (ref::Real& x : g[i]) x = x * scale;
      }
      if (clip.scope == GA_CLIP_GLOBAL) break;
    }
  }

  Layout layout_;
  std::vector<ga_optimizer> optimizers_;
  ga_config config_;
  std::vector<std::vector<ref::Element>> tensors_;
  std::vector<std::vector<ref::Sum>> sums_;
  std::vector<int64_t> updates_;
  std::vector<bool> touched_;
  double weight_ = 0;
  int64_t steps_ = 0;
  double norm_ = 0;
  double factor_ = 1;
};

}  // namespace ga::test
