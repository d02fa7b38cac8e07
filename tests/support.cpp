// SPDX-License-Identifier: Apache-2.0
#include "support.hpp"

#include <algorithm>
#include <cctype>
#include <chrono>
#include <cstdio>
#include <thread>
#include <utility>

namespace ga::test {

// ---- Structs with their defaults ----------------------------------------------------------------

ga_config config() {
  ga_config c;
  EXPECT_OK(ga_config_init(&c, sizeof c));
  c.num_threads = 1;
  return c;
}

ga_optimizer optimizer(int32_t kind, int32_t flavor) {
  ga_optimizer o;
  EXPECT_OK(ga_optimizer_init(&o, sizeof o, kind, flavor));
  return o;
}

ga_optimizer plain_sgd(double lr) {
  ga_optimizer o = optimizer(GA_OPTIMIZER_SGD);
  o.lr = lr;
  return o;
}

ga_schedule schedule(int32_t kind) {
  ga_schedule s;
  EXPECT_OK(ga_schedule_init(&s, sizeof s, kind));
  return s;
}

ga_flat_entry flat_entry(const char* name, ga_group group, int32_t rank, const int64_t* shape,
                         int64_t offset) {
  return {sizeof(ga_flat_entry), name, group, rank, shape, offset, nullptr};
}

ga_clip clip(int32_t scope, double max_norm, int32_t flavor, double max_value) {
  ga_clip c;
  EXPECT_OK(ga_clip_init(&c, sizeof c));
  c.scope = scope;
  c.flavor = flavor;
  c.max_norm = max_norm;
  c.max_value = max_value;
  return c;
}

ga_window_info window(const ga_context* ctx) {
  auto info = to_fill<ga_window_info>();
  EXPECT_OK(ga_window(ctx, &info));
  return info;
}

ga_memory memory(const ga_context* ctx) {
  auto m = to_fill<ga_memory>();
  EXPECT_OK(ga_context_memory(ctx, &m));
  return m;
}

ga_step_result step(ga_context* ctx) {
  auto r = to_fill<ga_step_result>();
  EXPECT_OK(ga_step(ctx, &r));
  return r;
}

double group_lr(const ga_context* ctx, ga_group group) {
  double lr = NAN;
  EXPECT_OK(ga_group_lr(ctx, group, &lr));
  return lr;
}

std::vector<ga_state_info> states_of(const ga_context* ctx, ga_param param) {
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

std::string state_bytes(ga_context* ctx, ga_param param, const ga_state_info& info) {
  const int64_t size = info.dtype == GA_F64 || info.dtype == GA_I64 ? 8
                       : info.dtype == GA_F32                       ? 4
                       : info.dtype == GA_U8                        ? 1
                                                                    : 2;
  std::string bytes(static_cast<size_t>(info.count * size), '\0');
  EXPECT_OK(ga_state_get(ctx, param, info.name, bytes.data(), info.dtype, info.count)) << info.name;
  return bytes;
}

MicroOptions::MicroOptions(double loss_scale, uint32_t flags) {
  EXPECT_OK(ga_micro_options_init(&options_, sizeof options_));
  options_.loss_scale = loss_scale;
  options_.flags = flags;
}

Context::Context(const ga_config& config) { EXPECT_OK(ga_context_create(&config, &ctx_)); }

ga_group Context::group(const ga_optimizer& o) {
  ga_group id = -1;
  EXPECT_OK(ga_group_add(ctx_, &o, &id));
  return id;
}

ga_param Context::add_param(ga_group group, const std::string& name, void* data, int32_t dtype,
                            const ref::Shape& shape, const ga_param_options* options) {
  ga_param id = -1;
  EXPECT_OK(ga_param_add(ctx_, group, name.c_str(), data, dtype, static_cast<int32_t>(shape.size()),
                         shape.data(), options, &id));
  return id;
}

void Context::accumulate(std::vector<const void*> gradients, double weight) {
  EXPECT_OK(ga_accumulate(ctx_, gradients.data(), gradients.size(), weight, nullptr));
}

// ---- Threads ------------------------------------------------------------------------------------

bool comes_true(const std::function<bool()>& condition) {
  const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(30);
  while (!condition())
    if (std::chrono::steady_clock::now() > end)
      return false;
    else
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
  return true;
}

// ---- Instruction set levels ---------------------------------------------------------------------

Isa::Isa(const char* level) {
  if (const char* old = getenv("GA_CPU_ISA")) old_ = old;
  setenv("GA_CPU_ISA", level, 1);
}

Isa::~Isa() {
  if (old_.empty()) {
    unsetenv("GA_CPU_ISA");
  } else {
    setenv("GA_CPU_ISA", old_.c_str(), 1);
  }
}

bool Isa::available() {
  ga_context* ctx = nullptr;
  const ga_status status = ga_context_create(nullptr, &ctx);
  ga_context_destroy(ctx);
  return status != GA_ERROR_UNSUPPORTED;
}

std::string identifier(std::string text) {
  for (char& c : text) {
    if (!isalnum(static_cast<unsigned char>(c))) c = '_';
  }
  return text;
}

// ---- Tensors ------------------------------------------------------------------------------------

Layout::Layout(const std::vector<int64_t>& tensor_counts) {
  for (const int64_t count : tensor_counts) add({count});
}

Layout Layout::of(const std::vector<ref::Shape>& tensor_shapes) {
  Layout layout({});
  for (const ref::Shape& shape : tensor_shapes) layout.add(shape);
  return layout;
}

void Layout::add(const ref::Shape& shape) {
  shapes.push_back(shape);
  counts.push_back(ref::count_of(shape));
  agc_axes.push_back(0);
  offsets.push_back(total);
  total += counts.back() + 3;
  total += 1 - total % 2;
}

template <class T>
bool gaps_untouched(const Layout& layout, const std::vector<T>& block) {
  std::vector<T> gaps = block;
  for (size_t i = 0; i < layout.size(); ++i) {
    std::fill_n(gaps.begin() + static_cast<std::ptrdiff_t>(layout.offsets[i]), layout.counts[i],
                T{kCanary});
  }
  return std::all_of(gaps.begin(), gaps.end(), [](T x) { return x == T{kCanary}; });
}
template bool gaps_untouched(const Layout& layout, const std::vector<float>& block);
template bool gaps_untouched(const Layout& layout, const std::vector<double>& block);

template <class T>
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
template std::vector<float> parameters(const Layout& layout, uint64_t seed);
template std::vector<double> parameters(const Layout& layout, uint64_t seed);

template <class T>
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
template std::vector<float> gradients(const Layout& layout, uint64_t seed, uint64_t round);
template std::vector<double> gradients(const Layout& layout, uint64_t seed, uint64_t round);

template <class T>
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
template std::vector<float> even_gradients(const Layout& layout, uint64_t seed, uint64_t round);
template std::vector<double> even_gradients(const Layout& layout, uint64_t seed, uint64_t round);

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
template void add_all(Context& ctx, ga_group group, const Layout& layout, float* block);
template void add_all(Context& ctx, ga_group group, const Layout& layout, double* block);

// ---- Valid optimizers ---------------------------------------------------------------------------

std::vector<NamedOptimizer> good_optimizers() {
  return named_optimizers(
      [](const OptimizerRow& row, const ga_optimizer&) { return !row.matrices_only; });
}

std::vector<NamedOptimizer> matrix_optimizers() {
  return named_optimizers(
      [](const OptimizerRow& row, const ga_optimizer&) { return row.matrices_only; });
}

std::vector<int32_t> representative_kinds() {
  std::vector<int32_t> kinds;
  for (const OptimizerRow& row : optimizer_rows()) {
    if (row.stands_for_others) kinds.push_back(row.kind);
  }
  return kinds;
}

// ---- The library in float64 ---------------------------------------------------------------------

template <class T>
Model::Model(const Layout& layout, std::vector<ga_optimizer> optimizers, const ga_config& config,
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
template Model::Model(const Layout& layout, std::vector<ga_optimizer> optimizers,
                      const ga_config& config, const std::vector<float>& start);
template Model::Model(const Layout& layout, std::vector<ga_optimizer> optimizers,
                      const ga_config& config, const std::vector<double>& start);

template <class T>
void Model::accumulate(const std::vector<T>& block, double weight, double loss_scale,
                       const std::vector<size_t>& missing) {
  weight_ += weight;
  if (weight == 0) return;
  for (size_t i = 0; i < layout_.size(); ++i) {
    if (std::find(missing.begin(), missing.end(), i) == missing.end()) {
      accumulate_part(i, block, weight, loss_scale);
    }
  }
}
template void Model::accumulate(const std::vector<float>& block, double weight, double loss_scale,
                                const std::vector<size_t>& missing);
template void Model::accumulate(const std::vector<double>& block, double weight, double loss_scale,
                                const std::vector<size_t>& missing);

template <class T>
void Model::accumulate_part(size_t i, const std::vector<T>& block, double weight,
                            double loss_scale) {
  const ref::With arithmetic(arithmetic_);
  touched_[i] = true;
  for (size_t j = 0; j < sums_[i].size(); ++j) {
    sums_[i][j].add(block[static_cast<size_t>(layout_.offsets[i]) + j], weight, loss_scale,
                    config_.gradient_kind);
  }
}
template void Model::accumulate_part(size_t i, const std::vector<float>& block, double weight,
                                     double loss_scale);
template void Model::accumulate_part(size_t i, const std::vector<double>& block, double weight,
                                     double loss_scale);

void Model::step(double lr, const ga_clip* clip) {
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

template <class T>
testing::AssertionResult Model::matches(const std::vector<T>& got, double factor) const {
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
template testing::AssertionResult Model::matches(const std::vector<float>& got,
                                                 double factor) const;
template testing::AssertionResult Model::matches(const std::vector<double>& got,
                                                 double factor) const;

double Model::vague(double part) const {
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

double Model::tolerance(size_t i, size_t j) const {
  const ref::With arithmetic(arithmetic_);
  return ref::tolerance(element(i, j).p);
}

void Model::clear() {
  weight_ = 0;
  touched_.assign(layout_.size(), false);
  for (auto& sums : sums_) std::fill(sums.begin(), sums.end(), ref::Sum());
}

void Model::multiply(std::vector<ref::Real>& g, double factor, const ref::Real& norm) {
  if (norm.zero()) return;
  const double error = norm.error / norm.value + ref::arithmetic.half_ulp;
  for (ref::Real& x : g) x = x * ref::Real(factor, factor * error);
}

template <class Chosen, class Factor>
void Model::scale(Gradients& g, Chosen chosen, Factor factor) {
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

void Model::clip_all(const ga_clip& clip, Gradients& g) {
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

void Model::clip_lamb(Gradients& g) {
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

}  // namespace ga::test
