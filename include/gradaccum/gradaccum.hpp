// libgradaccum for C++17: ownership and exceptions over gradaccum.h, header only.
// SPDX-License-Identifier: Apache-2.0
//
// Every function here is one call of the C function of nearly the same name, and gradaccum.h says
// what it does. What C++ adds:
//
//   gradaccum::Context      owns a ga_context; it moves and is never copied.
//   gradaccum::MicroBatch   an open micro-batch. end() closes it; one that is destroyed without end(),
//                           because an exception passed by, discards the window: half a micro-batch
//                           never reaches a step.
//   gradaccum::Error        thrown by every call whose status is not GA_OK, with that status and the
//                           sentence of ga_last_error(). What it has left unchanged: as in C.
//   float*, double*         say their dtype by their type.
//   default_...()           structs with struct_size and all defaults filled in.
//
//     gradaccum::Context context;
//     ga_optimizer adamw = gradaccum::default_optimizer(GA_OPTIMIZER_ADAMW);
//     adamw.lr = 3e-4;
//     ga_group group = context.add_group(adamw);
//     context.add_param(group, "fc1.weight", w1.data(), {512, 784});
//     context.add_param(group, "fc1.bias", b1.data(), {512});
//     for (each window) {
//       for (each micro-batch of the window) {
//         backward();
//         context.accumulate({dw1.data(), db1.data()}, samples_in_this_micro_batch);
//       }
//       context.step();
//     }
//
// The C functions take a Context by get(), so the two may be mixed.
#ifndef GRADACCUM_GRADACCUM_HPP_
#define GRADACCUM_GRADACCUM_HPP_

#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "gradaccum/gradaccum.h"

namespace gradaccum {

// ---- Errors -------------------------------------------------------------------------------------

class Error : public std::runtime_error {
 public:
  Error(ga_status status, const std::string& sentence)
      : std::runtime_error(sentence), status_(status) {}
  ga_status status() const noexcept { return status_; }

 private:
  ga_status status_;
};

// Throws what ga_last_error() says, unless status is GA_OK. For calls of C functions.
inline void check(ga_status status) {
  if (status != GA_OK) {
    throw Error(status, std::string(ga_status_name(status)) + ": " + ga_last_error());
  }
}

// ---- Types --------------------------------------------------------------------------------------

// The ga_dtype of a C++ type.
template <typename T>
struct DtypeOf;
template <>
struct DtypeOf<float> {
  static constexpr std::int32_t value = GA_F32;
};
template <>
struct DtypeOf<double> {
  static constexpr std::int32_t value = GA_F64;
};
template <>
struct DtypeOf<std::int32_t> {
  static constexpr std::int32_t value = GA_I32;
};
template <>
struct DtypeOf<std::int64_t> {
  static constexpr std::int32_t value = GA_I64;
};
template <typename T>
inline constexpr std::int32_t dtype_of = DtypeOf<T>::value;

// ---- Structs with their defaults ----------------------------------------------------------------

namespace detail {

// What an _init function gives. Where the library is older than this header, it does not know the
// last fields: they are 0, and struct_size still counts them, so that it refuses them if they are set.
template <typename T, typename Init, typename... Arguments>
T defaults(Init init, Arguments... arguments) {
  T filled{};
  check(init(&filled, sizeof filled, arguments...));
  filled.struct_size = sizeof filled;
  return filled;
}

}  // namespace detail

inline ga_config default_config() { return detail::defaults<ga_config>(ga_config_init); }

inline ga_optimizer default_optimizer(ga_optimizer_kind kind, ga_flavor flavor = GA_FLAVOR_TORCH) {
  return detail::defaults<ga_optimizer>(ga_optimizer_init, kind, flavor);
}

inline ga_schedule default_schedule(ga_schedule_kind kind) {
  return detail::defaults<ga_schedule>(ga_schedule_init, kind);
}

inline ga_clip default_clip() { return detail::defaults<ga_clip>(ga_clip_init); }

inline ga_loss_scaler default_loss_scaler() {
  return detail::defaults<ga_loss_scaler>(ga_loss_scaler_init);
}

inline ga_ema default_ema() { return detail::defaults<ga_ema>(ga_ema_init); }

inline ga_bn_options default_bn_options(ga_flavor flavor = GA_FLAVOR_TORCH) {
  return detail::defaults<ga_bn_options>(ga_bn_options_init, flavor);
}

inline ga_param_options default_param_options() {
  return detail::defaults<ga_param_options>(ga_param_options_init);
}

inline ga_flat_entry default_flat_entry() {
  return detail::defaults<ga_flat_entry>(ga_flat_entry_init);
}

inline ga_micro_options default_micro_options() {
  return detail::defaults<ga_micro_options>(ga_micro_options_init);
}

// Devices of a kind; 0 where this build or this machine has none (ga_last_error() says why).
inline std::int32_t device_count(ga_device device) {
  std::int32_t count = 0;
  check(ga_device_count(device, &count));
  return count;
}

// ---- Micro-batch --------------------------------------------------------------------------------

// Made by Context::micro_begin; must not outlive the context.
class MicroBatch {
 public:
  MicroBatch(MicroBatch&&) noexcept = default;
  MicroBatch& operator=(MicroBatch&&) = delete;

  // Closes the micro-batch, with all that was contributed. It may be opened again until the step.
  void end() {
    check(ga_micro_end(open_.get()));
    open_.release();
  }

 private:
  friend class Context;
  struct Discard {
    void operator()(ga_context* context) const noexcept { ga_discard(context); }
  };
  explicit MicroBatch(ga_context* context) noexcept : open_(context) {}

  std::unique_ptr<ga_context, Discard> open_;  // borrowed; null after end()
};

// ---- Context ------------------------------------------------------------------------------------

class Context {
 public:
  Context() : Context(default_config()) {}
  explicit Context(const ga_config& config) {
    ga_context* context = nullptr;
    check(ga_context_create(&config, &context));
    context_.reset(context);
  }

  // For the C functions. Null after the context has been moved from.
  ga_context* get() const noexcept { return context_.get(); }

  void synchronize() { check(ga_synchronize(get())); }

  ga_memory memory() const {
    auto memory = detail::defaults<ga_memory>(ga_memory_init);
    check(ga_context_memory(get(), &memory));
    return memory;
  }

  void set_accum_steps(std::int64_t accum_steps) {
    check(ga_context_set_accum_steps(get(), accum_steps));
  }
  // From applied step from_steps[i] on, windows have accum_steps[i] micro-batches.
  void set_accum_schedule(const std::vector<std::int64_t>& from_steps,
                          const std::vector<std::int64_t>& accum_steps) {
    if (from_steps.size() != accum_steps.size()) {
      throw Error(GA_ERROR_INVALID_ARGUMENT,
                  "GA_ERROR_INVALID_ARGUMENT: from_steps and accum_steps differ in size");
    }
    check(ga_context_set_accum_schedule(get(), from_steps.data(), accum_steps.data(),
                                        from_steps.size()));
  }

  // -- Groups

  ga_group add_group(const ga_optimizer& optimizer) {
    ga_group group = -1;
    check(ga_group_add(get(), &optimizer, &group));
    return group;
  }

  std::int32_t group_count() const {
    std::int32_t count = 0;
    check(ga_group_count(get(), &count));
    return count;
  }
  ga_optimizer optimizer(ga_group group) const {
    ga_optimizer optimizer{};
    optimizer.struct_size = sizeof optimizer;
    check(ga_group_optimizer(get(), group, &optimizer));
    return optimizer;
  }

  void set_lr(ga_group group, double lr) { check(ga_group_set_lr(get(), group, lr)); }
  double lr(ga_group group) const {
    double lr = 0;
    check(ga_group_lr(get(), group, &lr));
    return lr;
  }

  void set_weight_decay(ga_group group, double weight_decay) {
    check(ga_group_set_weight_decay(get(), group, weight_decay));
  }

  void set_schedule(ga_group group, const ga_schedule& schedule) {
    check(ga_group_set_schedule(get(), group, &schedule));
  }
  void clear_schedule(ga_group group) { check(ga_group_set_schedule(get(), group, nullptr)); }

  void set_clip(const ga_clip& clip) { check(ga_context_set_clip(get(), &clip)); }
  void clear_clip() { check(ga_context_set_clip(get(), nullptr)); }
  void set_clip(ga_group group, const ga_clip& clip) {
    check(ga_group_set_clip(get(), group, &clip));
  }
  void clear_clip(ga_group group) { check(ga_group_set_clip(get(), group, nullptr)); }

  // -- Loss scale and averages

  void set_loss_scaler(const ga_loss_scaler& scaler) {
    check(ga_context_set_loss_scaler(get(), &scaler));
  }
  void clear_loss_scaler() { check(ga_context_set_loss_scaler(get(), nullptr)); }
  double loss_scale() const {
    double scale = 0;
    check(ga_loss_scale(get(), &scale, nullptr));
    return scale;
  }

  void set_ema(const ga_ema& ema) { check(ga_context_set_ema(get(), &ema)); }
  void clear_ema() { check(ga_context_set_ema(get(), nullptr)); }
  template <typename T>
  void ema_copy_to(ga_param param, T* out) {
    ema_copy_to(param, out, dtype_of<T>);
  }
  void ema_copy_to(ga_param param, void* out, std::int32_t dtype) {
    check(ga_ema_copy_to(get(), param, out, dtype));
  }

  // -- Parameters

  template <typename T>
  ga_param add_param(ga_group group, const std::string& name, T* data,
                     const std::vector<std::int64_t>& shape,
                     const ga_param_options* options = nullptr) {
    return add_param(group, name, data, dtype_of<T>, shape, options);
  }
  ga_param add_param(ga_group group, const std::string& name, void* data, std::int32_t dtype,
                     const std::vector<std::int64_t>& shape,
                     const ga_param_options* options = nullptr) {
    ga_param param = -1;
    check(ga_param_add(get(), group, name.c_str(), data, dtype,
                       static_cast<std::int32_t>(shape.size()), shape.data(), options, &param));
    return param;
  }

  // The id of entries[0]; the others follow.
  template <typename T>
  ga_param add_flat(T* data, const std::vector<ga_flat_entry>& entries,
                    const ga_param_options* options = nullptr) {
    return add_flat(data, dtype_of<T>, entries, options);
  }
  ga_param add_flat(void* data, std::int32_t dtype, const std::vector<ga_flat_entry>& entries,
                    const ga_param_options* options = nullptr) {
    ga_param first = -1;
    check(ga_params_add_flat(get(), data, dtype, entries.data(), entries.size(), options, &first));
    return first;
  }

  std::int32_t param_count() const {
    std::int32_t count = 0;
    check(ga_param_count(get(), &count));
    return count;
  }
  ga_param find_param(const std::string& name) const {
    ga_param param = -1;
    check(ga_param_find(get(), name.c_str(), &param));
    return param;
  }
  ga_param_info param_info(ga_param param) const {
    auto info = detail::defaults<ga_param_info>(ga_param_info_init);
    check(ga_param_describe(get(), param, &info));
    return info;
  }
  std::size_t slot_count() const {
    std::size_t count = 0;
    check(ga_slot_count(get(), &count));
    return count;
  }
  std::size_t slot(ga_param param) const {
    std::size_t slot = 0;
    check(ga_param_slot(get(), param, &slot));
    return slot;
  }

  void bind(ga_param param, void* data) { check(ga_param_bind(get(), param, data)); }
  void changed(ga_param param) { check(ga_param_changed(get(), param)); }
  void set_frozen(ga_param param, bool frozen) {
    check(ga_param_set_frozen(get(), param, frozen ? 1 : 0));
  }

  // -- Accumulate: a whole micro-batch

  void accumulate(const void* const* gradients, std::size_t count, double weight,
                  const ga_micro_options* options = nullptr) {
    check(ga_accumulate(get(), gradients, count, weight, options));
  }
  void accumulate(const std::vector<const void*>& gradients, double weight = 1,
                  const ga_micro_options* options = nullptr) {
    accumulate(gradients.data(), gradients.size(), weight, options);
  }
  void accumulate(std::initializer_list<const void*> gradients, double weight = 1,
                  const ga_micro_options* options = nullptr) {
    accumulate(gradients.begin(), gradients.size(), weight, options);
  }

  // -- Accumulate: by part, within micro_begin ... MicroBatch::end

  // index: -1: the next one.
  [[nodiscard]] MicroBatch micro_begin(std::int64_t index, double weight = 1,
                                       const ga_micro_options* options = nullptr) {
    check(ga_micro_begin(get(), index, weight, options));
    return MicroBatch(get());
  }

  void accumulate_part(ga_param param, const void* gradient) {
    check(ga_accumulate_part(get(), param, gradient));
  }

  template <typename Index>
  void accumulate_rows(ga_param param, const Index* indices, std::int64_t count,
                       const void* values) {
    check(ga_accumulate_rows(get(), param, indices, dtype_of<Index>, count, values));
  }

  // 16-bit matrices, which have no C++ type of their own, go through the C function.
  template <typename T>
  void accumulate_matmul(ga_param param, std::int64_t k, const T* a, std::int64_t lda,
                         ga_transpose transpose_a, const T* b, std::int64_t ldb,
                         ga_transpose transpose_b) {
    check(ga_accumulate_matmul(get(), param, k, a, lda, transpose_a, b, ldb, transpose_b,
                               dtype_of<T>));
  }

  ga_accumulator acquire(ga_param param) {
    auto accumulator = detail::defaults<ga_accumulator>(ga_accumulator_init);
    check(ga_accumulator_acquire(get(), param, &accumulator));
    return accumulator;
  }
  void release(ga_param param) { check(ga_accumulator_release(get(), param)); }

  // -- Step

  ga_window_info window() const {
    auto info = detail::defaults<ga_window_info>(ga_window_info_init);
    check(ga_window(get(), &info));
    return info;
  }

  ga_step_result step() {
    auto result = detail::defaults<ga_step_result>(ga_step_result_init);
    check(ga_step(get(), &result));
    return result;
  }

  void discard() { check(ga_discard(get())); }

  // GA_ERROR_INVALID_ARGUMENT: the gradient is not of type T.
  template <typename T>
  const T* gradient(ga_param param) {
    const void* data = nullptr;
    std::int32_t dtype = 0;
    check(ga_gradient(get(), param, &data, &dtype, nullptr));
    if (dtype != dtype_of<T>) {
      throw Error(GA_ERROR_INVALID_ARGUMENT,
                  "GA_ERROR_INVALID_ARGUMENT: the gradient has ga_dtype " + std::to_string(dtype));
    }
    return static_cast<const T*>(data);
  }

  // -- Batch normalisation

  ga_bn add_batch_norm(const std::string& name, std::int64_t channels, ga_param gamma,
                       ga_param beta, const ga_bn_options& options = default_bn_options()) {
    ga_bn bn = -1;
    check(ga_bn_add(get(), name.c_str(), channels, gamma, beta, &options, &bn));
    return bn;
  }
  void bn_set_frozen(ga_bn bn, bool frozen) { check(ga_bn_set_frozen(get(), bn, frozen ? 1 : 0)); }
  void bn_accumulate(ga_bn bn, const void* x, std::int64_t samples, std::int64_t positions) {
    check(ga_bn_accumulate(get(), bn, x, samples, positions));
  }
  template <typename T>
  void bn_accumulate_stats(ga_bn bn, std::int64_t count, const T* mean, const T* spread,
                           ga_bn_spread kind) {
    check(ga_bn_accumulate_stats(get(), bn, count, mean, spread, kind, dtype_of<T>));
  }
  void bn_finalize(ga_bn bn) { check(ga_bn_finalize(get(), bn)); }
  void bn_forward(ga_bn bn, const void* x, std::int64_t samples, std::int64_t positions, void* y) {
    check(ga_bn_forward(get(), bn, x, samples, positions, y));
  }
  void bn_backward_accumulate(ga_bn bn, const void* x, const void* dy, std::int64_t samples,
                              std::int64_t positions) {
    check(ga_bn_backward_accumulate(get(), bn, x, dy, samples, positions));
  }
  void bn_backward(ga_bn bn, const void* x, const void* dy, std::int64_t samples,
                   std::int64_t positions, void* dx) {
    check(ga_bn_backward(get(), bn, x, dy, samples, positions, dx));
  }
  void bn_infer(ga_bn bn, const void* x, std::int64_t samples, std::int64_t positions, void* y) {
    check(ga_bn_infer(get(), bn, x, samples, positions, y));
  }
  // Arrays of the layer's channels, in the host's memory. Returns how often they have moved.
  template <typename T>
  std::int64_t bn_running(ga_bn bn, T* mean, T* variance) const {
    std::int64_t steps = 0;
    check(ga_bn_running(get(), bn, mean, variance, dtype_of<T>, &steps));
    return steps;
  }
  template <typename T>
  void bn_set_running(ga_bn bn, const T* mean, const T* variance, std::int64_t steps) {
    check(ga_bn_running_set(get(), bn, mean, variance, dtype_of<T>, steps));
  }
  // Returns the elements of a channel that they are of.
  template <typename T>
  std::int64_t bn_statistics(ga_bn bn, T* mean, T* variance) const {
    std::int64_t count = 0;
    check(ga_bn_statistics(get(), bn, mean, variance, dtype_of<T>, &count));
    return count;
  }

 private:
  struct Destroy {
    void operator()(ga_context* context) const noexcept { ga_context_destroy(context); }
  };
  std::unique_ptr<ga_context, Destroy> context_;
};

}  // namespace gradaccum

#endif  // GRADACCUM_GRADACCUM_HPP_
