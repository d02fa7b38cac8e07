// SPDX-License-Identifier: Apache-2.0
//
// Helpers of all tests: tensors at unaligned addresses, adversarial data, a context that destroys
// itself, optimizers with valid options, and a model of the library in float64.
#pragma once

#include <gtest/gtest.h>
#include <stdlib.h>

#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <string>
#include <thread>
#include <type_traits>
#include <utility>
#include <vector>

#include "build.hpp"
#include "gradaccum/gradaccum.h"
#include "optimizers.hpp"
#include "reference.hpp"

#define EXPECT_OK(call) EXPECT_EQ(call, GA_OK) << ga_last_error()
#define ASSERT_OK(call) ASSERT_EQ(call, GA_OK) << ga_last_error()

namespace ga::test {

// ---- Structs with their defaults ----------------------------------------------------------------

// The default configuration with one thread. Only a few tests are about threads; in the others,
// more threads would only compete for the cores.
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

// p -= g, exact if p is 0. So a test can read the gradient that the optimizer got from the
// parameter.
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

// A ga_micro_options, passed in place of a pointer to one.
class MicroOptions {
 public:
  explicit MicroOptions(double loss_scale, uint32_t flags = 0) {
    EXPECT_OK(ga_micro_options_init(&options_, sizeof options_));
    options_.loss_scale = loss_scale;
    options_.flags = flags;
  }
  operator const ga_micro_options*() const { return &options_; }
  const ga_micro_options& operator*() const { return options_; }

 private:
  ga_micro_options options_;
};

inline ga_flat_entry flat_entry(const char* name, ga_group group, int32_t rank,
                                const int64_t* shape, int64_t offset) {
  return {sizeof(ga_flat_entry), name, group, rank, shape, offset, nullptr};
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

// All arrays of state of a parameter, in their order.
inline std::vector<ga_state_info> states_of(const ga_context* ctx, ga_param param) {
  int32_t count = 0;
  EXPECT_OK(ga_state_count(ctx, param, &count));
  std::vector<ga_state_info> list(static_cast<size_t>(count));
  for (int32_t k = 0; k < count; ++k) {
    ga_state_info& info = list[static_cast<size_t>(k)];
    EXPECT_OK(ga_state_info_init(&info, sizeof info));
    EXPECT_OK(ga_state_describe(ctx, param, k, &info));
  }
  return list;
}

// Such an array as it is kept.
inline std::string state_bytes(ga_context* ctx, ga_param param, const ga_state_info& info) {
  const int64_t size = info.dtype == GA_F64 || info.dtype == GA_I64 ? 8
                       : info.dtype == GA_F32                       ? 4
                       : info.dtype == GA_U8                        ? 1
                                                                    : 2;
  std::string bytes(static_cast<size_t>(info.count * size), '\0');
  EXPECT_OK(ga_state_get(ctx, param, info.name, bytes.data(), info.dtype, info.count)) << info.name;
  return bytes;
}

template <class T>
constexpr int32_t dtype_of() {
  return std::is_same_v<T, double> ? GA_F64 : GA_F32;
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
  template <class T>
  ga_param param(ga_group group, const std::string& name, T* data, const ref::Shape& shape,
                 const ga_param_options* options = nullptr) {
    ga_param id = -1;
    EXPECT_OK(ga_param_add(ctx_, group, name.c_str(), data, dtype_of<T>(),
                           static_cast<int32_t>(shape.size()), shape.data(), options, &id));
    return id;
  }
  ga_param param(ga_group group, const std::string& name, float* data, int64_t count) {
    return param(group, name, data, ref::Shape{count});
  }
  void accumulate(std::vector<const void*> gradients, double weight = 1) {
    EXPECT_OK(ga_accumulate(ctx_, gradients.data(), gradients.size(), weight, nullptr));
  }

 private:
  ga_context* ctx_ = nullptr;
};

// ---- Memory that the library hands out -----------------------------------------------------------

// Copies from or to such memory, which may be a device's (device.cpp).
void copy(void* to, const void* from, size_t bytes);

template <class T = float>
std::vector<T> from_library(const void* data, int64_t count) {
  std::vector<T> values(static_cast<size_t>(count));
  copy(values.data(), data, values.size() * sizeof(T));
  return values;
}
template <class T>
void to_library(void* data, const std::vector<T>& values) {
  copy(data, values.data(), values.size() * sizeof(T));
}

// ---- Threads -------------------------------------------------------------------------------------

// Whether ThreadSanitizer watches, under which a pass takes fifty times as long.
#ifdef __SANITIZE_THREAD__
constexpr bool kWatchesThreads = true;
#else
constexpr bool kWatchesThreads = false;
#endif

// Whether the condition, of another thread's doing, comes true within half a minute.
inline bool comes_true(const std::function<bool()>& condition) {
  const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(30);
  while (!condition())
    if (std::chrono::steady_clock::now() > end)
      return false;
    else
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
  return true;
}

// ---- Instruction set levels ---------------------------------------------------------------------

// Sets GA_CPU_ISA for the contexts that are created during its lifetime.
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

  // Whether the level in GA_CPU_ISA is in this build and supported by this processor.
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

// Tensors side by side in one block of numbers. Each starts at an odd index, so no address is a
// multiple of two elements, and is followed by a gap that nobody may write.
struct Layout {
  std::vector<ref::Shape> shapes;
  std::vector<int64_t> counts;
  std::vector<int64_t> offsets;
  std::vector<uint32_t> agc_axes;  // ga_param_options.agc_axes of each
  int64_t total = 1;

  explicit Layout(const std::vector<int64_t>& tensor_counts) {
    for (const int64_t count : tensor_counts) add({count});
  }
  static Layout of(const std::vector<ref::Shape>& tensor_shapes) {
    Layout layout({});
    for (const ref::Shape& shape : tensor_shapes) layout.add(shape);
    return layout;
  }
  size_t size() const { return counts.size(); }

 private:
  void add(const ref::Shape& shape) {
    shapes.push_back(shape);
    counts.push_back(ref::count_of(shape));
    agc_axes.push_back(0);
    offsets.push_back(total);
    total += counts.back() + 3;
    total += 1 - total % 2;
  }
};

using Block = std::vector<float>;
using Block64 = std::vector<double>;

inline constexpr float kCanary = 12345.678f;

template <class T>
bool gaps_untouched(const Layout& layout, const std::vector<T>& block) {
  std::vector<T> gaps = block;
  for (size_t i = 0; i < layout.size(); ++i) {
    std::fill_n(gaps.begin() + static_cast<std::ptrdiff_t>(layout.offsets[i]), layout.counts[i],
                T{kCanary});
  }
  return std::all_of(gaps.begin(), gaps.end(), [](T x) { return x == T{kCanary}; });
}

template <class T>
bool same_bits(const std::vector<T>& a, const std::vector<T>& b) {
  return a.size() == b.size() && memcmp(a.data(), b.data(), a.size() * sizeof(T)) == 0;
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

// Parameters of both signs and mixed magnitudes, with zeros.
template <class T = float>
std::vector<T> parameters(const Layout& layout, uint64_t seed) {
  Random random(seed);
  std::vector<T> block(static_cast<size_t>(layout.total), kCanary);
  for (size_t i = 0; i < layout.size(); ++i) {
    for (int64_t j = 0; j < layout.counts[i]; ++j) {
      const double scale = j % 7 == 0 ? 1e-3 : 1;
      block[static_cast<size_t>(layout.offsets[i] + j)] =
          j % 31 == 30 ? T{0} : static_cast<T>(scale * random.signed_unit());
    }
  }
  return block;
}

// Gradients of both signs. The position of an element in its tensor decides whether it is of order
// 1, of the order of Adam's epsilon, nearly cancels from one round to the next, is always zero, is
// large, is so small that its square underflows, or is subnormal.
template <class T = float>
std::vector<T> gradients(const Layout& layout, uint64_t seed, uint64_t round) {
  Random random(seed * 1000003 + round);
  std::vector<T> block(static_cast<size_t>(layout.total), kCanary);
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
      block[static_cast<size_t>(layout.offsets[i] + j)] = static_cast<T>(g);
    }
  }
  return block;
}

// Gradients of both signs and of order 1, so that in a norm or a mean every element counts.
template <class T = float>
std::vector<T> even_gradients(const Layout& layout, uint64_t seed, uint64_t round) {
  Random random(seed * 1000003 + round);
  std::vector<T> block(static_cast<size_t>(layout.total), kCanary);
  for (size_t i = 0; i < layout.size(); ++i) {
    for (int64_t j = 0; j < layout.counts[i]; ++j) {
      block[static_cast<size_t>(layout.offsets[i] + j)] = static_cast<T>(random.signed_unit());
    }
  }
  return block;
}

// Registers the tensors of a block.
template <class T>
void add_all(Context& ctx, ga_group group, const Layout& layout, T* block) {
  for (size_t i = 0; i < layout.size(); ++i) {
    ga_param_options options;
    memset(&options, 0, sizeof options);
    options.struct_size = sizeof options;
    options.agc_axes = layout.agc_axes[i];
    ctx.param(group, "p" + std::to_string(i), block + layout.offsets[i], layout.shapes[i],
              &options);
  }
}
template <class T>
void add_all(Context& ctx, ga_group group, const Layout& layout, std::vector<T>& block) {
  add_all(ctx, group, layout, block.data());
}

// One pointer per tensor.
template <class T>
std::vector<const void*> pointers(const Layout& layout, const std::vector<T>& block) {
  std::vector<const void*> result;
  for (const int64_t offset : layout.offsets) result.push_back(block.data() + offset);
  return result;
}

// ---- Valid optimizers ---------------------------------------------------------------------------

struct NamedOptimizer {
  std::string name;
  ga_optimizer optimizer;
};

// The valid options of all rows for which chosen(row, optimizer) is true.
template <class Chosen>
std::vector<NamedOptimizer> named_optimizers(Chosen chosen) {
  std::vector<NamedOptimizer> list;
  for (const OptimizerRow& row : optimizer_rows()) {
    for (const OptimizerRow::Good& good : row.good) {
      ga_optimizer o = optimizer(row.kind, good.flavor);
      o.lr = good.lr;
      good.set(o);
      if (chosen(row, o)) list.push_back({good.name, o});
    }
  }
  return list;
}

// The optimizers that take parameters of any shape.
inline std::vector<NamedOptimizer> good_optimizers() {
  return named_optimizers(
      [](const OptimizerRow& row, const ga_optimizer&) { return !row.matrices_only; });
}

// The optimizers that take matrices only.
inline std::vector<NamedOptimizer> matrix_optimizers() {
  return named_optimizers(
      [](const OptimizerRow& row, const ga_optimizer&) { return row.matrices_only; });
}

// The kinds that represent the others, see OptimizerRow.
inline std::vector<int32_t> representative_kinds() {
  std::vector<int32_t> kinds;
  for (const OptimizerRow& row : optimizer_rows()) {
    if (row.stands_for_others) kinds.push_back(row.kind);
  }
  return kinds;
}

// ---- The library in float64 ---------------------------------------------------------------------

// Accumulates and steps as the public header describes, in the arithmetic of the parameters' dtype,
// T.
class Model {
 public:
  template <class T>
  Model(const Layout& layout, std::vector<ga_optimizer> optimizers, const ga_config& config,
        const std::vector<T>& start)
      : layout_(layout),
        optimizers_(std::move(optimizers)),
        config_(config),
        arithmetic_(dtype_of<T>() == GA_F64 ? ref::kFloat64 : ref::kFloat32) {
    optimizers_.resize(layout.size(), optimizers_.back());  // one for all, or one each
    for (size_t i = 0; i < layout.size(); ++i) {
      ref::Tensor tensor;
      tensor.shape = layout.shapes[i];
      tensor.elements.resize(static_cast<size_t>(layout.counts[i]));
      for (size_t j = 0; j < tensor.elements.size(); ++j) {
        tensor.elements[j].p = ref::exact(start[static_cast<size_t>(layout.offsets[i]) + j]);
      }
      updates_.push_back(0);
      sums_.emplace_back(tensor.elements.size());
      paths_.emplace_back(tensor.elements.size());
      tensors_.push_back(std::move(tensor));
    }
    touched_.assign(layout.size(), false);
  }

  // missing: the tensors without a gradient in this micro-batch.
  template <class T>
  void accumulate(const std::vector<T>& block, double weight, double loss_scale = 1,
                  const std::vector<size_t>& missing = {}) {
    weight_ += weight;
    if (weight == 0) return;
    for (size_t i = 0; i < layout_.size(); ++i) {
      if (std::find(missing.begin(), missing.end(), i) == missing.end()) {
        accumulate_part(i, block, weight, loss_scale);
      }
    }
  }

  // Adds one contribution to one tensor, in a micro-batch whose weight has been counted already.
  template <class T>
  void accumulate_part(size_t i, const std::vector<T>& block, double weight,
                       double loss_scale = 1) {
    const ref::With arithmetic(arithmetic_);
    touched_[i] = true;
    for (size_t j = 0; j < sums_[i].size(); ++j) {
      sums_[i][j].add(block[static_cast<size_t>(layout_.offsets[i]) + j], weight, loss_scale,
                      config_.gradient_kind);
    }
  }

  // lr: the learning rate of every group; NaN: that of its optimizer.
  void step(double lr = NAN, const ga_clip* clip = nullptr) {
    if (weight_ == 0) {
      clear();
      return;
    }
    const ref::With arithmetic(arithmetic_);
    Gradients g(layout_.size());
    for (size_t i = 0; i < layout_.size(); ++i) {
      if (!touched_[i]) continue;
      for (const ref::Sum& sum : sums_[i]) g[i].push_back(sum.reduced(weight_, config_.reduce));
    }
    if (clip) clip_all(*clip, g);
    clip_lamb(g);

    ++steps_;
    for (size_t i = 0; i < layout_.size(); ++i) {
      if (!touched_[i] && config_.missing == GA_MISSING_SKIP) continue;
      if (!touched_[i]) g[i].assign(tensors_[i].elements.size(), ref::Real());
      ++updates_[i];
      const ga_optimizer& o = optimizers_[i];
      const int64_t t = o.flavor == GA_FLAVOR_TORCH ? updates_[i] : steps_;
      const std::vector<ref::Real> before = ref::values(tensors_[i]);
      ref::update(o, std::isnan(lr) ? o.lr : lr, t, std::move(g[i]), tensors_[i]);
      for (size_t j = 0; j < before.size(); ++j) {
        paths_[i][j] += std::abs(tensors_[i].elements[j].p.value - before[j].value);
      }
    }
    clear();
  }

  // Whether the library's parameters are right up to rounding.
  template <class T>
  testing::AssertionResult matches(const std::vector<T>& got, double factor = 1) const {
    const ref::With arithmetic(arithmetic_);
    double worst = 0;
    std::string where;
    for (size_t i = 0; i < layout_.size(); ++i) {
      const ref::Tensor& tensor = tensors_[i];
      double squares = 0, bounds = 0;  // over the tensor
      for (size_t j = 0; j < tensor.elements.size(); ++j) {
        const ref::Real& want = tensor.elements[j].p;
        const double x = got[static_cast<size_t>(layout_.offsets[i]) + j];
        const double distance = std::abs(x - want.value);
        const double tolerance = factor * ref::tolerance(want);
        squares += distance * distance;
        bounds += tolerance * tolerance;
        if (distance <= tolerance || tensor.spread > 0) continue;  // false for a NaN
        const double ratio = distance / tolerance;
        if (ratio <= worst) continue;
        worst = std::isnan(ratio) ? INFINITY : ratio;
        char text[200];
        snprintf(text, sizeof text, "tensor %zu[%zu] is %.17g, not %.17g: %.3g times the tolerance",
                 i, j, x, want.value, ratio);
        where = text;
      }
      if (tensor.spread == 0) continue;
      const double ratio = std::sqrt(squares) / (std::sqrt(bounds) + factor * tensor.spread);
      if (ratio <= std::max(1.0, worst)) continue;
      worst = std::isnan(ratio) ? INFINITY : ratio;
      where = "tensor " + std::to_string(i) + " is " + std::to_string(ratio) +
              " times the tolerance away, in Frobenius norm";
    }
    if (!gaps_untouched(layout_, got)) {
      return testing::AssertionFailure() << "a number outside of the tensors was written";
    }
    if (worst > 1) return testing::AssertionFailure() << where;
    return testing::AssertionSuccess();
  }

  // The share of elements whose tolerance is more than the given part of the distance that they
  // have moved, and so proves little. A test that asserts matches() should expect a small share.
  double vague(double part = 1e-3) const {
    const ref::With arithmetic(arithmetic_);
    size_t vague = 0, all = 0;
    for (size_t i = 0; i < layout_.size(); ++i) {
      const auto share = tensors_[i].spread / std::sqrt(static_cast<double>(layout_.counts[i]));
      for (size_t j = 0; j < paths_[i].size(); ++j, ++all) {
        const ref::Real& p = tensors_[i].elements[j].p;
        const double from = std::abs(p.value) + paths_[i][j];
        if (!(ref::tolerance(p) + share <= part * from)) ++vague;
      }
    }
    return all == 0 ? 0 : static_cast<double>(vague) / static_cast<double>(all);
  }

  // Changes hyper-parameters between steps; the state is kept.
  void set_optimizer(size_t i, const ga_optimizer& o) { optimizers_[i] = o; }

  double norm() const { return norm_; }
  double clip_factor() const { return factor_; }
  const ref::Tensor& tensor(size_t i) const { return tensors_[i]; }
  const ref::Element& element(size_t i, size_t j) const { return tensors_[i].elements[j]; }
  double tolerance(size_t i, size_t j) const {
    const ref::With arithmetic(arithmetic_);
    return ref::tolerance(element(i, j).p);
  }

 private:
  using Gradients = std::vector<std::vector<ref::Real>>;

  void clear() {
    weight_ = 0;
    touched_.assign(layout_.size(), false);
    for (auto& sums : sums_) std::fill(sums.begin(), sums.end(), ref::Sum());
  }

  // Multiplies the gradients of the chosen tensors by a factor that is a function of their norm.
  template <class Chosen, class Factor>
  void scale(Gradients& g, Chosen chosen, Factor factor) {
    std::vector<ref::Real> all;
    for (size_t i = 0; i < g.size(); ++i) {
      if (chosen(i)) all.insert(all.end(), g[i].begin(), g[i].end());
    }
    const ref::Real norm = ref::norm(all);
    norm_ = norm.value;
    const double f = factor(norm.value);
    factor_ = std::min(factor_, f);
    for (size_t i = 0; i < g.size(); ++i) {
      if (chosen(i)) multiply(g[i], f, norm);
    }
  }

  // Multiplies g by a factor whose relative error is that of the norm.
  static void multiply(std::vector<ref::Real>& g, double factor, const ref::Real& norm) {
    if (norm.zero()) return;
    const double error = norm.error / norm.value + ref::arithmetic.half_ulp;
    for (ref::Real& x : g) x = x * ref::Real(factor, factor * error);
  }

  void clip_all(const ga_clip& clip, Gradients& g) {
    if (std::isfinite(clip.max_value)) {
      for (auto& tensor : g) {
        for (ref::Real& x : tensor) x = ref::clamp(x, clip.max_value);
      }
    }
    factor_ = 1;
    const auto factor = [&](double norm) {
      return ref::clip_factor(clip.flavor, norm, clip.max_norm);
    };
    if (clip.scope == GA_CLIP_GLOBAL)
      scale(
          g, [](size_t) { return true; }, factor);
    for (size_t i = 0; i < g.size(); ++i) {
      if (clip.scope == GA_CLIP_PER_TENSOR)
        scale(
            g, [=](size_t k) { return k == i; }, factor);
      if (clip.scope != GA_CLIP_AGC || g[i].empty()) continue;
      const ref::Shape& shape = layout_.shapes[i];
      const uint32_t axes =
          layout_.agc_axes[i] ? layout_.agc_axes[i] : ref::agc_axes(clip.agc_units, shape);
      factor_ = std::min(factor_, ref::agc(clip, shape, axes, ref::values(tensors_[i]), g[i]));
    }
  }

  // Clips every LAMB tensor by its own limit and the norm of all LAMB tensors.
  void clip_lamb(Gradients& g) {
    const auto is_lamb = [&](size_t i) { return optimizers_[i].kind == GA_OPTIMIZER_LAMB; };
    std::vector<ref::Real> all;
    for (size_t i = 0; i < g.size(); ++i) {
      if (is_lamb(i)) all.insert(all.end(), g[i].begin(), g[i].end());
    }
    const ref::Real norm = ref::norm(all);
    for (size_t i = 0; i < g.size(); ++i) {
      const double limit = optimizers_[i].max_grad_norm;
      if (is_lamb(i) && limit > 0) multiply(g[i], 1 / std::max(1.0, norm.value / limit), norm);
    }
  }

  Layout layout_;
  std::vector<ga_optimizer> optimizers_;
  ga_config config_;
  ref::Arithmetic arithmetic_;
  std::vector<ref::Tensor> tensors_;
  std::vector<std::vector<ref::Sum>> sums_;
  std::vector<std::vector<double>> paths_;  // sum of the absolute movements of each element
  std::vector<int64_t> updates_;
  std::vector<bool> touched_;
  double weight_ = 0;
  int64_t steps_ = 0;
  double norm_ = 0;
  double factor_ = 1;
};

}  // namespace ga::test
