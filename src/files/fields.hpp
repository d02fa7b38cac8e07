// SPDX-License-Identifier: Apache-2.0
// Structs of numbers as text, "lr=0x1.8p-10 kind=2": exact, and the same in every locale. This is how
// a state file holds the options and the counters of a context.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include "numbers/control.hpp"

namespace ga {

// f(name, field) for every field of a struct that the program fills, but struct_size, reserved ones,
// pointers and sizes of arrays; and for the numbers of a struct of ours that are to be kept. For a
// field that files had not from the beginning f(name, field, implied): a text without it means
// `implied`, and a text is written without it where it has this value, so that older versions of the
// library read the file.
template <class Struct, class F>
void each_field(Struct& s, F&& f) {
  using T = std::remove_const_t<Struct>;
  if constexpr (std::is_same_v<T, ga_optimizer>) {
    f("kind", s.kind), f("flavor", s.flavor), f("lr", s.lr), f("weight_decay", s.weight_decay);
    f("momentum", s.momentum), f("dampening", s.dampening), f("beta1", s.beta1);
    f("beta2", s.beta2), f("eps", s.eps), f("nesterov", s.nesterov), f("amsgrad", s.amsgrad);
    f("maximize", s.maximize), f("state_dtype", s.state_dtype), f("rho", s.rho);
    f("lr_decay", s.lr_decay), f("initial_accumulator", s.initial_accumulator);
    f("momentum_decay", s.momentum_decay), f("trust_coefficient", s.trust_coefficient);
    f("max_grad_norm", s.max_grad_norm), f("eps2", s.eps2), f("beta2_decay", s.beta2_decay);
    f("clip_threshold", s.clip_threshold), f("ns_coefficients_a", s.ns_coefficients[0]);
    f("ns_coefficients_b", s.ns_coefficients[1]), f("ns_coefficients_c", s.ns_coefficients[2]);
    f("ns_steps", s.ns_steps), f("adjust_lr", s.adjust_lr), f("centered", s.centered);
    f("decoupled", s.decoupled), f("always_adapt", s.always_adapt), f("beta3", s.beta3);
    f("alpha", s.alpha), f("alpha_warmup", s.alpha_warmup), f("beta3_warmup", s.beta3_warmup);
    f("clip_exponent", s.clip_exponent, s.kind == GA_OPTIMIZER_ADOPT ? 0.25 : 0.0);
    f("ns_precision", s.ns_precision, ga_precision{GA_PRECISION_F32});
    f("ns_rows", s.ns_rows, int32_t{0});  // then numbers of ns_table: see ns_numbers()
    f("ns_preset", s.ns_preset, ga_newton_schulz{GA_NS_OWN});
    f("cautious", s.cautious, int32_t{0});
    f("equilibrate", s.equilibrate, ga_equilibrate{GA_EQUILIBRATE_NONE});
    f("average_power", s.average_power, 0.0), f("average_lr_power", s.average_lr_power, 0.0);
  } else if constexpr (std::is_same_v<T, ga_schedule>) {
    f("kind", s.kind), f("warmup_steps", s.warmup_steps), f("total_steps", s.total_steps);
    f("end_factor", s.end_factor), f("power", s.power), f("gamma", s.gamma);
    f("step_size", s.step_size), f("first_step", s.first_step);
  } else if constexpr (std::is_same_v<T, ga_clip>) {
    f("scope", s.scope), f("flavor", s.flavor), f("max_norm", s.max_norm);
    f("max_value", s.max_value), f("agc_factor", s.agc_factor), f("agc_eps", s.agc_eps);
    f("agc_units", s.agc_units), f("when", s.when);
  } else if constexpr (std::is_same_v<T, ga_loss_scaler>) {
    f("initial_scale", s.initial_scale), f("growth_factor", s.growth_factor);
    f("backoff_factor", s.backoff_factor), f("min_scale", s.min_scale);
    f("max_scale", s.max_scale), f("growth_interval", s.growth_interval);
    f("hysteresis", s.hysteresis);
  } else if constexpr (std::is_same_v<T, ga_ema>) {
    f("kind", s.kind), f("dtype", s.dtype), f("decay", s.decay), f("gamma", s.gamma);
  } else if constexpr (std::is_same_v<T, ga_bn_options>) {
    f("mode", s.mode), f("biased", s.biased), f("momentum", s.momentum), f("eps", s.eps);
  } else if constexpr (std::is_same_v<T, ga_param_options>) {
    f("master", s.master), f("rounding", s.rounding), f("rows", s.rows), f("agc_axes", s.agc_axes);
    f("reduce", s.reduce), f("cut_matrices", s.cut_matrices, int32_t{0});
    f("batch_axes", s.batch_axes, int32_t{0}), f("output_axis", s.output_axis, int32_t{0});
    f("split_axis", s.split_axis, int32_t{0}), f("matrix_parts", s.matrix_parts, int32_t{0});
  } else if constexpr (std::is_same_v<T, ga_step_result>) {
    f("outcome", s.outcome), f("windows", s.windows), f("steps", s.steps);
    f("micro_batches", s.micro_batches), f("weight", s.weight), f("norm", s.norm);
    f("clip_factor", s.clip_factor), f("lr", s.lr), f("loss_scale", s.loss_scale);
    f("skipped", s.skipped), f("dropped", s.dropped), f("window_dropped", s.window_dropped);
    f("noise_scale", s.noise_scale), f("noise_trace", s.noise_trace);
    f("noise_signal", s.noise_signal), f("dropped_micros", s.dropped_micros);
  } else if constexpr (std::is_same_v<T, Control>) {
    f("windows", s.windows), f("steps", s.steps), f("skipped", s.skipped), f("dropped", s.dropped);
    f("scale", s.scaler.scale), f("good_steps", s.scaler.good_steps);
    f("bad_windows", s.scaler.bad_windows), f("noise_weight", s.noise.weight_sum);
    f("noise_trace", s.noise.trace_sum), f("noise_signal", s.noise.signal_sum);
    f("weight", s.weight), f("weighted", s.weighted), f("window_dropped", s.window_dropped);
    f("dropped_micros", s.dropped_micros), f("micro_finite", s.micro_finite);
    f("rejected", s.rejected), f("failed", s.failed);
  } else if constexpr (std::is_same_v<T, WindowCounts>) {
    f("weight", s.weight), f("weighted", s.weighted), f("window_dropped", s.window_dropped);
    f("dropped_micros", s.dropped_micros), f("micro_finite", s.micro_finite);
    f("failed", s.failed), f("rows_held", s.rows_held), f("noise_repeated", s.noise_repeated);
  } else if constexpr (std::is_same_v<T, BnChannel>) {  // of an open window
    f("window_count", s.window.count), f("window_mean", s.window.mean);
    f("window_m2", s.window.m2), f("merged", s.merged), f("taken", s.taken), f("count", s.count);
    f("mean", s.mean), f("variance", s.variance), f("rstd", s.rstd), f("dbeta", s.dbeta);
    f("dgamma", s.dgamma);
  } else {
    static_assert(std::is_same_v<T, GroupState>, "a struct without a list of its fields");
    f("step", s.clock.step), f("product", s.clock.numbers[0]), f("lr", s.lr);
  }
}

// Numbers by name, in the order in which they were written.
class Fields {
  using List = std::vector<std::pair<std::string, std::string>>;

 public:
  Fields() = default;
  // Throws GA_ERROR_FORMAT if the text is not of this form. what: the text's name, for the message.
  Fields(std::string_view text, const char* what);

  std::string text() const;
  bool has(std::string_view name) const { return find(name) != nullptr; }

  template <class T>
  void add(const char* name, T value) {
    list_.emplace_back(name, written(value));
  }
  // A field that files had not from the beginning, as of each_field().
  template <class T>
  void add(const char* name, T value, T implied) {
    implied_.emplace_back(name, written(implied));
    if (!(value == implied)) add(name, value);
  }
  template <class Struct>
  void add_fields(const Struct& s) {
    each_field(
        s, [&](const char* name, auto value, auto... implied) { add(name, value, implied...); });
  }
  // Throws GA_ERROR_FORMAT unless the number is there and fits T.
  template <class T>
  void get(const char* name, T& value) const {
    const std::string* const text = find(name);
    if (!text || !read(*text, value)) fail_field(name);
  }
  template <class Struct>
  void get_fields(Struct& s) const {
    each_field(s, [&](const char* name, auto& value, auto... implied) {
      ((value = implied), ...);
      if (sizeof...(implied) == 0 || has(name)) get(name, value);
    });
  }

  // f(name, theirs, ours) for each number of `theirs` that differs from the one of that name here,
  // or that is not here (ours: NULL). What is implied here is implied there.
  template <class F>
  void each_difference(const Fields& theirs, F&& f) const {
    for (const auto& [name, text] : theirs.list_)
      if (const std::string* const mine = find_or_implied(name); !mine || *mine != text)
        f(name.c_str(), text.c_str(), mine ? mine->c_str() : nullptr);
    for (const auto& [name, implied] : implied_)
      if (const std::string* const mine = find(name); mine && !theirs.has(name))
        f(name.c_str(), implied.c_str(), mine->c_str());
  }

 private:
  static const std::string* find(const List& list, std::string_view name);
  const std::string* find(std::string_view name) const { return find(list_, name); }
  const std::string* find_or_implied(std::string_view name) const {
    const std::string* const mine = find(name);
    return mine ? mine : find(implied_, name);
  }
  [[noreturn]] void fail_field(const char* name) const;

  static std::string written(double value);
  static std::string written(int64_t value);
  static std::string written(uint64_t value);
  static std::string written(int32_t value) { return written(int64_t{value}); }
  static std::string written(uint32_t value) { return written(uint64_t{value}); }
  static std::string written(bool value) { return value ? "1" : "0"; }
  static bool read(const std::string& text, double& value);
  static bool read(const std::string& text, int64_t& value);
  static bool read(const std::string& text, uint64_t& value);
  static bool read(const std::string& text, int32_t& value);
  static bool read(const std::string& text, uint32_t& value);
  static bool read(const std::string& text, bool& value);

  const char* what_ = "";
  List list_;
  List implied_;  // the values of fields that the text may lack
};

// A number of a Fields for people.
std::string readable(const char* number);

}  // namespace ga
