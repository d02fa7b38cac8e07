// SPDX-License-Identifier: Apache-2.0
//
// Helpers of all tests: tensors at unaligned addresses, adversarial data, a context that destroys
// itself, optimizers with valid options, and a model of the library in float64.
#pragma once

#include <gtest/gtest.h>
#include <stdlib.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <string>
#include <type_traits>
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
ga_config config();

ga_optimizer optimizer(int32_t kind, int32_t flavor = GA_FLAVOR_TORCH);

// p -= g, exact if p is 0. So a test can read the gradient that the optimizer got from the
// parameter.
ga_optimizer plain_sgd(double lr = 1);

ga_schedule schedule(int32_t kind);

// A ga_micro_options, passed in place of a pointer to one.
class MicroOptions {
 public:
  explicit MicroOptions(double loss_scale, uint32_t flags = 0);
  operator const ga_micro_options*() const { return &options_; }
  const ga_micro_options& operator*() const { return options_; }

 private:
  ga_micro_options options_;
};

ga_flat_entry flat_entry(const char* name, ga_group group, int32_t rank, const int64_t* shape,
                         int64_t offset);

ga_clip clip(int32_t scope, double max_norm, int32_t flavor = GA_FLAVOR_TORCH,
             double max_value = INFINITY);

ga_window_info window(const ga_context* ctx);

ga_memory memory(const ga_context* ctx);

ga_step_result step(ga_context* ctx);

double group_lr(const ga_context* ctx, ga_group group = 0);

// All arrays of state of a parameter, in their order.
std::vector<ga_state_info> states_of(const ga_context* ctx, ga_param param);

// Such an array as it is kept.
std::string state_bytes(ga_context* ctx, ga_param param, const ga_state_info& info);

// A struct for a call to fill, of bytes that it has to overwrite.
template <class T>
T to_fill() {
  T s;
  memset(&s, 0xee, sizeof s);
  s.struct_size = sizeof s;
  return s;
}

template <class T>
constexpr int32_t dtype_of() {
  return std::is_same_v<T, double> ? GA_F64 : GA_F32;
}

class Context {
 public:
  Context() : Context(config()) {}
  explicit Context(const ga_config& config);
  ~Context() { ga_context_destroy(ctx_); }
  Context(const Context&) = delete;
  Context& operator=(const Context&) = delete;

  operator ga_context*() const { return ctx_; }

  ga_group group(const ga_optimizer& o);
  template <class T>
  ga_param param(ga_group group, const std::string& name, T* data, const ref::Shape& shape,
                 const ga_param_options* options = nullptr) {
    return add_param(group, name, data, dtype_of<T>(), shape, options);
  }
  ga_param param(ga_group group, const std::string& name, float* data, int64_t count) {
    return param(group, name, data, ref::Shape{count});
  }
  void accumulate(std::vector<const void*> gradients, double weight = 1);

 private:
  ga_param add_param(ga_group group, const std::string& name, void* data, int32_t dtype,
                     const ref::Shape& shape, const ga_param_options* options);

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
bool comes_true(const std::function<bool()>& condition);

// ---- Instruction set levels ---------------------------------------------------------------------

// Sets GA_CPU_ISA for the contexts that are created during its lifetime.
class Isa {
 public:
  explicit Isa(const char* level);
  ~Isa();
  Isa(const Isa&) = delete;
  Isa& operator=(const Isa&) = delete;

  // Whether the level in GA_CPU_ISA is in this build and supported by this processor.
  static bool available();

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
std::string identifier(std::string text);

// ---- Tensors ------------------------------------------------------------------------------------

// Tensors side by side in one block of numbers. Each starts at an odd index, so no address is a
// multiple of two elements, and is followed by a gap that nobody may write.
struct Layout {
  std::vector<ref::Shape> shapes;
  std::vector<int64_t> counts;
  std::vector<int64_t> offsets;
  std::vector<uint32_t> agc_axes;  // ga_param_options.agc_axes of each
  int64_t total = 1;

  explicit Layout(const std::vector<int64_t>& tensor_counts);
  static Layout of(const std::vector<ref::Shape>& tensor_shapes);
  size_t size() const { return counts.size(); }

 private:
  void add(const ref::Shape& shape);
};

using Block = std::vector<float>;
using Block64 = std::vector<double>;

inline constexpr float kCanary = 12345.678f;

template <class T>
bool gaps_untouched(const Layout& layout, const std::vector<T>& block);

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
std::vector<T> parameters(const Layout& layout, uint64_t seed);

// Gradients of both signs. The position of an element in its tensor decides whether it is of order
// 1, of the order of Adam's epsilon, nearly cancels from one round to the next, is always zero, is
// large, is so small that its square underflows, or is subnormal.
template <class T = float>
std::vector<T> gradients(const Layout& layout, uint64_t seed, uint64_t round);

// Gradients of both signs and of order 1, so that in a norm or a mean every element counts.
template <class T = float>
std::vector<T> even_gradients(const Layout& layout, uint64_t seed, uint64_t round);

// Registers the tensors of a block.
template <class T>
void add_all(Context& ctx, ga_group group, const Layout& layout, T* block);
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
std::vector<NamedOptimizer> good_optimizers();

// The optimizers that take matrices only.
std::vector<NamedOptimizer> matrix_optimizers();

// The kinds that represent the others, see OptimizerRow.
std::vector<int32_t> representative_kinds();

// ---- The library in float64 ---------------------------------------------------------------------

// Accumulates and steps as the public header describes, in the arithmetic of the parameters' dtype,
// T.
class Model {
 public:
  template <class T>
  Model(const Layout& layout, std::vector<ga_optimizer> optimizers, const ga_config& config,
        const std::vector<T>& start);

  // missing: the tensors without a gradient in this micro-batch.
  template <class T>
  void accumulate(const std::vector<T>& block, double weight, double loss_scale = 1,
                  const std::vector<size_t>& missing = {});

  // Adds one contribution to one tensor, in a micro-batch whose weight has been counted already.
  template <class T>
  void accumulate_part(size_t i, const std::vector<T>& block, double weight, double loss_scale = 1);

  // lr: the learning rate of every group; NaN: that of its optimizer.
  void step(double lr = NAN, const ga_clip* clip = nullptr);

  // Whether the library's parameters are right up to rounding.
  template <class T>
  testing::AssertionResult matches(const std::vector<T>& got, double factor = 1) const;

  // The share of elements whose tolerance is more than the given part of the distance that they
  // have moved, and so proves little. A test that asserts matches() should expect a small share.
  double vague(double part = 1e-3) const;

  // Changes hyper-parameters between steps; the state is kept.
  void set_optimizer(size_t i, const ga_optimizer& o) { optimizers_[i] = o; }

  double norm() const { return norm_; }
  double clip_factor() const { return factor_; }
  const ref::Tensor& tensor(size_t i) const { return tensors_[i]; }
  const ref::Element& element(size_t i, size_t j) const { return tensors_[i].elements[j]; }
  double tolerance(size_t i, size_t j) const;

 private:
  using Gradients = std::vector<std::vector<ref::Real>>;

  void clear();

  // Multiplies the gradients of the chosen tensors by a factor that is a function of their norm.
  template <class Chosen, class Factor>
  void scale(Gradients& g, Chosen chosen, Factor factor);

  // Multiplies g by a factor whose relative error is that of the norm.
  static void multiply(std::vector<ref::Real>& g, double factor, const ref::Real& norm);

  void clip_all(const ga_clip& clip, Gradients& g);

  // Clips every LAMB tensor by its own limit and the norm of all LAMB tensors.
  void clip_lamb(Gradients& g);

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
