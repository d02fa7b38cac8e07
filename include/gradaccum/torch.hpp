// libgradaccum for LibTorch: an optimizer of torch whose windows are right, header only.
// SPDX-License-Identifier: Apache-2.0
//
// gradaccum::torch::Optimizer is a torch::optim::Optimizer: torch's schedulers of the learning
// rate, zero_grad(), param_groups(), step(closure), torch::save() and torch::load() work with it. N
// micro-batches give what one batch of all their samples would have given, to rounding.
//
//     gradaccum::torch::Optimizer optimizer(model->parameters(), torch::optim::AdamWOptions(3e-4));
//     for (each window) {
//       for (each micro-batch of the window) {
//         optimizer.backward(loss_of(micro_batch), samples_in_this_micro_batch);
//       }
//       optimizer.step();
//     }
//
// Three ways lead to a step:
//
//   by hook       backward(loss, weight), or micro_batch(weight, body) where body calls backward.
//                 Each gradient goes to the window as soon as backward has made it, and is freed.
//   by call       loss.backward(), then accumulate(weight), which takes what is in .grad.
//   at the step   the loop stays zero_grad(), loss.backward(), step(). With config.accum_steps = K,
//                 step() takes what is in .grad as a micro-batch of weight 1, and every K-th call
//                 updates the parameters; flush() applies what is left at the end of an epoch.
//
// The weight of a micro-batch says of how many samples or tokens its loss is the mean. The default,
// 1, is right only if all micro-batches of a window are of one size. Losses are not divided by K.
//
// Parameters are on the CPU, of f32, f64, f16 or bf16, dense in any order of their dimensions. A
// tensor that is in the lists several times is one parameter, and so are tied weights. Different
// tensors over the same memory are refused. Sparse gradients need ga_param_options.rows: see
// GroupOptions.
//
// Bad input throws gradaccum::Error, or c10::Error where torch itself refuses it, and changes
// nothing. An exception that leaves a micro-batch drops it; if some of it is in the window already,
// it drops the window, and window().micro_batches is 0 then.
//
// Needs LibTorch 2.1 or later, and of C++ what LibTorch needs. The component `torch` of the CMake
// package makes the target gradaccum::torch: docs/libtorch.md. In code that says both `using
// namespace gradaccum` and `torch::`, the name torch is ambiguous: write ::torch there.
#ifndef GRADACCUM_TORCH_HPP_
#define GRADACCUM_TORCH_HPP_

#include <ATen/Parallel.h>
#include <c10/util/Type.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/optim/adagrad.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/optimizer.h>
#include <torch/optim/rmsprop.h>
#include <torch/optim/sgd.h>
#include <torch/ordered_dict.h>
#include <torch/serialize/archive.h>
#include <torch/types.h>
#include <torch/version.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <list>
#include <memory>
#include <optional>
#include <sstream>
#include <string>
#include <tuple>
#include <type_traits>
#include <typeinfo>
#include <utility>
#include <vector>

#include "gradaccum/gradaccum.hpp"

#if TORCH_VERSION_MAJOR < 2 || (TORCH_VERSION_MAJOR == 2 && TORCH_VERSION_MINOR < 1)
#error "gradaccum/torch.hpp needs LibTorch 2.1 or later"
#endif

namespace gradaccum::torch {

using ::torch::Tensor;
using ::torch::optim::OptimizerOptions;
using ::torch::optim::OptimizerParamGroup;

// ---- Options ------------------------------------------------------------------------------------

// The options of a group, where those of torch (SGDOptions, AdamOptions, AdamWOptions,
// RMSpropOptions, AdagradOptions) do not say enough: for the library's other optimizers, and for
// what params and clip say. Either kind may be in param_groups(); hyper-parameters that are written
// there hold from the next step on.
class GroupOptions : public OptimizerOptions {
 public:
  GroupOptions(const ga_optimizer& settings) { set(settings); }
  GroupOptions(ga_optimizer_kind kind, double lr) : optimizer(default_optimizer(kind)) {
    optimizer.lr = lr;
  }
  // Takes over the numbers of torch's options. GA_ERROR_UNSUPPORTED: of an optimizer that the
  // library does not have, such as LBFGS.
  explicit GroupOptions(const OptimizerOptions& options);

  ga_optimizer optimizer{};      // the rule and its hyper-parameters, without ns_table
  std::vector<double> ns_table;  // MUON: three numbers for each iteration
  // Of the parameters of the group, in place of Options::params. Its rows, GA_ROWS_LAZY or
  // GA_ROWS_DENSE, let embeddings have sparse gradients.
  std::optional<ga_param_options> params;
  std::optional<ga_clip> clip;  // in place of Options::clip

  // The hyper-parameters with ns_table, which they point to.
  ga_optimizer settings() const;
  void set(const ga_optimizer& settings);

  double get_lr() const override { return optimizer.lr; }
  void set_lr(const double lr) override { optimizer.lr = lr; }
  std::unique_ptr<OptimizerOptions> clone() const override {
    return std::make_unique<GroupOptions>(*this);
  }
  void serialize(::torch::serialize::InputArchive& archive) override;
  void serialize(::torch::serialize::OutputArchive& archive) const override;
};

// The options of an Optimizer.
struct Options {
  // Policies of the window. num_threads: default: as many as torch has. accum_steps: K. Refused are
  // another device than the CPU, and eager. With a gradient_life of GA_GRADIENTS_LIVE, the library
  // reads the first gradients of a window where torch has them, until the second micro-batch or
  // step(), so that a program that has kept one must not write to it until then. With
  // GA_GRADIENTS_LENT it adds to them there until step(), and what is in one that the program has
  // kept is undefined.
  Config config;
  std::optional<ga_clip> clip;  // of the window's gradient, in place of clip_grad_norm_
  std::optional<ga_loss_scaler> loss_scaler;          // a dynamic loss scale: see scale_loss()
  std::optional<ga_ema> ema;                          // moving averages: see context().ema_scope()
  ga_param_options params = default_param_options();  // of all parameters
};

namespace detail {

[[noreturn]] inline void fail(ga_status status, const std::string& message) {
  throw Error(status, message);
}

template <typename... Parts>
std::string text(const Parts&... parts) {
  std::ostringstream stream;
  (stream << ... << parts);
  return stream.str();
}

// ---- Hyper-parameters

// Calls visit(name, field) for each hyper-parameter that is a number of its own.
template <typename Settings, typename Visit>
void each_field(Settings& s, Visit&& visit) {
  visit("lr", s.lr), visit("weight_decay", s.weight_decay), visit("momentum", s.momentum);
  visit("dampening", s.dampening), visit("beta1", s.beta1), visit("beta2", s.beta2);
  visit("beta3", s.beta3), visit("eps", s.eps), visit("eps2", s.eps2), visit("rho", s.rho);
  visit("nesterov", s.nesterov), visit("amsgrad", s.amsgrad), visit("maximize", s.maximize);
  visit("centered", s.centered), visit("decoupled", s.decoupled);
  visit("always_adapt", s.always_adapt), visit("state_dtype", s.state_dtype);
  visit("lr_decay", s.lr_decay), visit("initial_accumulator", s.initial_accumulator);
  visit("momentum_decay", s.momentum_decay), visit("trust_coefficient", s.trust_coefficient);
  visit("max_grad_norm", s.max_grad_norm), visit("beta2_decay", s.beta2_decay);
  visit("clip_threshold", s.clip_threshold), visit("ns_steps", s.ns_steps);
  visit("ns_coefficient0", s.ns_coefficients[0]), visit("ns_coefficient1", s.ns_coefficients[1]);
  visit("ns_coefficient2", s.ns_coefficients[2]), visit("adjust_lr", s.adjust_lr);
  visit("alpha", s.alpha), visit("alpha_warmup", s.alpha_warmup);
  visit("beta3_warmup", s.beta3_warmup), visit("clip_exponent", s.clip_exponent);
  visit("ns_precision", s.ns_precision), visit("ns_preset", s.ns_preset);
  visit("cautious", s.cautious), visit("equilibrate", s.equilibrate);
  visit("average_power", s.average_power), visit("average_lr_power", s.average_lr_power);
}

template <typename TorchOptions>
void take_moments(ga_optimizer& settings, const TorchOptions& options) {
  std::tie(settings.beta1, settings.beta2) = options.betas();
  settings.eps = options.eps();
  settings.weight_decay = options.weight_decay();
  settings.amsgrad = options.amsgrad() ? 1 : 0;
}

template <typename TorchOptions>
void give_moments(TorchOptions& options, const ga_optimizer& settings) {
  options.betas(std::make_tuple(settings.beta1, settings.beta2)).eps(settings.eps);
  options.weight_decay(settings.weight_decay).amsgrad(settings.amsgrad != 0);
}

// The library's words for the options of a group.
inline ga_optimizer settings_of(const OptimizerOptions& options) {
  namespace optim = ::torch::optim;
  if (const auto* own = dynamic_cast<const GroupOptions*>(&options)) return own->settings();
  ga_optimizer settings{};
  if (const auto* sgd = dynamic_cast<const optim::SGDOptions*>(&options)) {
    settings = default_optimizer(GA_OPTIMIZER_SGD);
    settings.momentum = sgd->momentum();
    settings.dampening = sgd->dampening();
    settings.weight_decay = sgd->weight_decay();
    settings.nesterov = sgd->nesterov() ? 1 : 0;
  } else if (const auto* adam = dynamic_cast<const optim::AdamOptions*>(&options)) {
    settings = default_optimizer(GA_OPTIMIZER_ADAM);
    take_moments(settings, *adam);
  } else if (const auto* adamw = dynamic_cast<const optim::AdamWOptions*>(&options)) {
    settings = default_optimizer(GA_OPTIMIZER_ADAMW);
    take_moments(settings, *adamw);
  } else if (const auto* rmsprop = dynamic_cast<const optim::RMSpropOptions*>(&options)) {
    settings = default_optimizer(GA_OPTIMIZER_RMSPROP);
    settings.rho = rmsprop->alpha();
    settings.eps = rmsprop->eps();
    settings.weight_decay = rmsprop->weight_decay();
    settings.momentum = rmsprop->momentum();
    settings.centered = rmsprop->centered() ? 1 : 0;
  } else if (const auto* adagrad = dynamic_cast<const optim::AdagradOptions*>(&options)) {
    settings = default_optimizer(GA_OPTIMIZER_ADAGRAD);
    settings.lr_decay = adagrad->lr_decay();
    settings.weight_decay = adagrad->weight_decay();
    settings.initial_accumulator = adagrad->initial_accumulator_value();
    settings.eps = adagrad->eps();
  } else {
    fail(
        GA_ERROR_UNSUPPORTED,
        text(
            "the options of a group were ", c10::demangle(typeid(options).name()),
            ", expected SGDOptions, AdamOptions, AdamWOptions, RMSpropOptions or AdagradOptions of "
            "torch::optim, or gradaccum::torch::GroupOptions"));
  }
  settings.lr = options.get_lr();
  return settings;
}

// The reverse, for settings of the same kind.
inline void give_settings(OptimizerOptions& options, const ga_optimizer& settings) {
  namespace optim = ::torch::optim;
  if (auto* own = dynamic_cast<GroupOptions*>(&options)) {
    own->set(settings);
  } else if (auto* sgd = dynamic_cast<optim::SGDOptions*>(&options)) {
    sgd->momentum(settings.momentum).dampening(settings.dampening);
    sgd->weight_decay(settings.weight_decay).nesterov(settings.nesterov != 0);
  } else if (auto* adam = dynamic_cast<optim::AdamOptions*>(&options)) {
    give_moments(*adam, settings);
  } else if (auto* adamw = dynamic_cast<optim::AdamWOptions*>(&options)) {
    give_moments(*adamw, settings);
  } else if (auto* rmsprop = dynamic_cast<optim::RMSpropOptions*>(&options)) {
    rmsprop->alpha(settings.rho).eps(settings.eps).weight_decay(settings.weight_decay);
    rmsprop->momentum(settings.momentum).centered(settings.centered != 0);
  } else if (auto* adagrad = dynamic_cast<optim::AdagradOptions*>(&options)) {
    adagrad->lr_decay(settings.lr_decay).weight_decay(settings.weight_decay).eps(settings.eps);
    adagrad->initial_accumulator_value(settings.initial_accumulator);
  }
  options.set_lr(settings.lr);
}

inline void write_settings(::torch::serialize::OutputArchive& archive,
                           const ga_optimizer& settings) {
  archive.write("kind", c10::IValue(std::int64_t{settings.kind}));
  archive.write("flavor", c10::IValue(std::int64_t{settings.flavor}));
  each_field(settings, [&archive](const char* name, const auto& field) {
    if constexpr (std::is_same_v<std::decay_t<decltype(field)>, double>) {
      archive.write(name, c10::IValue(field));
    } else {
      archive.write(name, c10::IValue(std::int64_t{field}));
    }
  });
  std::vector<double> table;
  if (settings.ns_table) table.assign(settings.ns_table, settings.ns_table + 3 * settings.ns_rows);
  archive.write("ns_table", c10::IValue(table));
}

// A part of an archive; otherwise the archive is no optimizer's of this header.
template <typename Value>
void read_part(::torch::serialize::InputArchive& archive, const std::string& key, Value& value) {
  if (!archive.try_read(key, value)) {
    fail(GA_ERROR_FORMAT,
         text("the archive has no \"", key, "\": it is not that of a gradaccum::torch::Optimizer"));
  }
}

// Fields that the archive lacks, since an older version has written it, have their defaults.
inline GroupOptions read_settings(::torch::serialize::InputArchive& archive) {
  c10::IValue kind, flavor, value;
  read_part(archive, "kind", kind);
  read_part(archive, "flavor", flavor);
  GroupOptions loaded(default_optimizer(static_cast<ga_optimizer_kind>(kind.toInt()),
                                        static_cast<ga_flavor>(flavor.toInt())));
  each_field(loaded.optimizer, [&archive, &value](const char* name, auto& field) {
    using Field = std::decay_t<decltype(field)>;
    if (!archive.try_read(name, value)) return;
    if constexpr (std::is_same_v<Field, double>) {
      field = value.toDouble();
    } else {
      field = static_cast<Field>(value.toInt());
    }
  });
  if (archive.try_read("ns_table", value)) loaded.ns_table = value.toDoubleVector();
  return loaded;
}

// ---- Parameters

// 0: the library has no such dtype.
inline ga_dtype dtype_of(c10::ScalarType type) {
  switch (type) {
    case c10::ScalarType::Float:
      return GA_F32;
    case c10::ScalarType::Double:
      return GA_F64;
    case c10::ScalarType::Half:
      return GA_F16;
    case c10::ScalarType::BFloat16:
      return GA_BF16;
    default:
      return 0;
  }
}

// A parameter of torch, and that of the library with the same memory.
struct Slot {
  Tensor tensor;
  std::string name;
  c10::ScalarType dtype;
  std::vector<std::int64_t> shape, strides;
  std::vector<std::int64_t> memory;  // the shape with the dimensions in the order of the memory
  Tensor data;           // keeps the memory that the library has, if the program replaces it
  std::int64_t version;  // torch's, of what the library has seen
  bool rows;             // whether it may have sparse gradients
  Param param{-1};
  std::size_t place = 0;  // in the list of Context::accumulate
  bool tells = false;     // whether the library has to be told if the program writes the parameter
  bool touched = false;   // whether it has a gradient in this window
  bool hooked = false;
};

// The shape of a parameter with its dimensions in the order of the memory. by_shape: the optimizer
// or the clip goes by rows and columns, so that the order must be that of the dimensions.
inline std::vector<std::int64_t> shape_in_memory(const Tensor& tensor, const std::string& name,
                                                 bool by_shape) {
  if (tensor.is_contiguous()) return tensor.sizes().vec();
  std::vector<std::int64_t> order(static_cast<std::size_t>(tensor.dim()));
  for (std::size_t axis = 0; axis < order.size(); ++axis)
    order[axis] = static_cast<std::int64_t>(axis);
  std::stable_sort(order.begin(), order.end(), [&tensor](std::int64_t a, std::int64_t b) {
    return tensor.stride(a) > tensor.stride(b);
  });
  const Tensor ordered = tensor.detach().permute(order);
  const char* why = nullptr;
  if (!ordered.is_contiguous()) {
    why = ", which are not dense: make it contiguous()";
  } else if (by_shape) {
    why = ", but its optimizer or clip goes by rows and columns: make it contiguous()";
  }
  if (why) {
    fail(GA_ERROR_INVALID_ARGUMENT, text("parameter \"", name, "\" of shape ", tensor.sizes(),
                                         " had the strides ", tensor.strides(), why));
  }
  return ordered.sizes().vec();
}

// Refuses what the library cannot use in place.
inline void look_at_tensor(const Tensor& tensor, const std::string& name) {
  const auto refuse = [&name](const auto& what, const char* expected) {
    fail(GA_ERROR_INVALID_ARGUMENT,
         text("parameter \"", name, "\" was ", what, ", expected ", expected));
  };
  if (!tensor.defined()) refuse("undefined", "a tensor");
  if (!tensor.device().is_cpu()) refuse(text("on ", tensor.device()), "the CPU");
  if (tensor.layout() != c10::kStrided) refuse(tensor.layout(), "a strided tensor");
  if (dtype_of(tensor.scalar_type()) == 0) {
    refuse(tensor.scalar_type(), "Float, Double, Half or BFloat16");
  }
  if (tensor.is_inference()) refuse("an inference tensor", "one of another mode");
}

inline Slot slot_of(const Tensor& tensor, const std::string& name, const ga_param_options& options,
                    bool by_shape) {
  return Slot{tensor,
              name,
              tensor.scalar_type(),
              tensor.sizes().vec(),
              tensor.strides().vec(),
              shape_in_memory(tensor, name, by_shape),
              tensor.detach(),
              static_cast<std::int64_t>(tensor._version()),
              options.rows != GA_ROWS_NONE};
}

// ---- The window

// Whether a gradient can be read where it is.
inline bool fits(const Tensor& gradient, const Slot& slot) {
  return gradient.scalar_type() == slot.dtype && gradient.strides() == slot.strides &&
         !gradient.is_neg() && !gradient._is_zerotensor();
}

// Refuses a gradient that is not one of the parameter.
inline void look_at_gradient(const Tensor& gradient, const Slot& slot) {
  if (gradient.sizes() != slot.shape) {
    fail(GA_ERROR_INVALID_STATE,
         text("the gradient of parameter \"", slot.name, "\" had the shape ", gradient.sizes(),
              ", expected ", c10::IntArrayRef(slot.shape),
              ": the parameter has changed while a window was open"));
  }
  if (gradient.layout() == c10::kStrided) return;
  if (gradient.layout() != c10::kSparse || gradient.sparse_dim() != 1) {
    fail(GA_ERROR_INVALID_ARGUMENT,
         text("the gradient of parameter \"", slot.name, "\" had the layout ", gradient.layout(),
              ", expected a strided one, or one that is sparse in its rows alone"));
  }
  if (!slot.rows) {
    fail(GA_ERROR_INVALID_ARGUMENT,
         text("parameter \"", slot.name,
              "\" had a sparse gradient: give its group GroupOptions with params->rows = "
              "GA_ROWS_LAZY (or GA_ROWS_DENSE)"));
  }
}

inline Tensor like(const Tensor& gradient, const Slot& slot) {
  return ::torch::empty_strided(slot.shape, slot.strides, slot.dtype).copy_(gradient);
}

// Gradients that the library may still read, by the numbers that it gives them.
class KeptGradients {
 public:
  KeptGradients(const Context& context, ga_gradient_life life)
      : context_(context),
        is_live_(life != GA_GRADIENTS_CONSUMED),
        is_lent_(life == GA_GRADIENTS_LENT) {}

  // Where the library finds a gradient. One that is lent is written to, and gets memory of its own
  // if it shared that of another tensor until one of them would be written.
  const void* address_of(const Tensor& gradient) const {
    return is_lent_ ? gradient.mutable_data_ptr() : gradient.const_data_ptr();
  }

  // A micro-batch was opened.
  void opened() { keeps_parts_ = is_live_ || context_.gradients_kept().until_micro_end != 0; }

  // One tensor of a gradient.
  struct Entry {
    std::int64_t number;  // of the gradient; before add(), counted back from the latest one
    Tensor tensor;
  };
  using Entries = std::list<Entry>;

  // Makes what add() is given after the library has accumulated. Memory may run out here, but not in add().
  Entries of_part(std::initializer_list<Tensor> tensors) const {
    Entries entries;
    if (!keeps_parts_) return entries;
    for (const Tensor& tensor : tensors) entries.push_back({0, tensor});
    return entries;
  }
  Entries of_all(const std::vector<Tensor>& gradients) const {
    Entries entries;
    if (!is_live_) return entries;
    std::int64_t number = -static_cast<std::int64_t>(gradients.size());
    for (const Tensor& gradient : gradients) {
      ++number;
      if (gradient.defined()) entries.push_back({number, gradient});
    }
    return entries;
  }

  // Adds the tensors of gradients that the library now has.
  void add(Entries&& entries) {
    if (entries.empty()) return;
    const std::int64_t latest = context_.gradients_kept(last_ + 1).latest;
    for (Entry& entry : entries) entry.number += latest;
    last_ = latest;
    kept_.splice(kept_.end(), entries);
    first_read_ = 0;
    while (!kept_.empty() && !is_read(kept_.front())) kept_.pop_front();
  }
  // Lets go of what is not read any more.
  void release() {
    first_read_ = 0;
    kept_.remove_if([this](const Entry& entry) { return !is_read(entry); });
  }

 private:
  // Whether the library may still read a gradient. To be asked of one after the other.
  bool is_read(const Entry& entry) {
    if (first_read_ < entry.number) first_read_ = context_.gradients_kept(entry.number).oldest;
    return first_read_ == entry.number;
  }

  const Context& context_;
  const bool is_live_, is_lent_;  // gradients are read after the call that brings them; written to
  bool keeps_parts_ = false;      // in the open micro-batch
  Entries kept_;                  // in the order of the numbers
  std::int64_t last_ = 0;         // the highest of them so far
  std::int64_t first_read_ = 0;   // of the gradients from the one last asked about on
};

// What the hooks of parameters share with the optimizer. It does not move when the optimizer does.
struct State {
  explicit State(const Config& config) : context(config), kept(context, config.gradient_life) {}

  Context context;
  KeptGradients kept;
  std::vector<Slot> slots;
  gradaccum::MicroBatch* open = nullptr;
  bool any = false;           // whether the open micro-batch has a gradient
  bool is_scaled = false;     // whether scale_loss() was called since the last micro-batch
  bool is_explicit = false;   // whether a micro-batch of the window came otherwise than by step()
  bool said_nothing = false;  // whether these two warnings were given
  bool said_unscaled = false;

  // Adds a gradient to a micro-batch.
  void add(gradaccum::MicroBatch& micro, Slot& slot, const Tensor& from) {
    look_at_gradient(from, slot);
    Tensor gradient = from.detach();
    if (gradient.layout() == c10::kSparse) {
      const Tensor indices = gradient._indices().select(0, 0).contiguous();
      const Tensor values = gradient._values().to(slot.dtype).contiguous();
      KeptGradients::Entries entries = kept.of_part({indices, values});
      micro.accumulate_rows(slot.param, indices.const_data_ptr<std::int64_t>(), indices.numel(),
                            values.const_data_ptr());
      kept.add(std::move(entries));
    } else {
      if (!fits(gradient, slot)) gradient = like(gradient, slot);
      KeptGradients::Entries entries = kept.of_part({gradient});
      micro.accumulate_part(slot.param, kept.address_of(gradient));
      kept.add(std::move(entries));
    }
    any = slot.touched = true;
  }

  // Called by the hook of a parameter: takes its gradient out of .grad.
  void take(std::size_t index) {
    if (!open) return;
    Slot& slot = slots[index];
    if (!slot.tensor.grad().defined()) {
      fail(GA_ERROR_INVALID_STATE,
           text("the gradient of parameter \"", slot.name,
                "\" is gone from .grad, where another hook, or an open micro-batch of another "
                "optimizer, has taken it"));
    }
    add(*open, slot, slot.tensor.grad());
    slot.tensor.mutable_grad().reset();
  }
  void clear_gradients() {
    for (Slot& slot : slots) {
      if (slot.tensor.grad().defined()) slot.tensor.mutable_grad().reset();
    }
  }
  bool has_gradients() const {
    return std::any_of(slots.begin(), slots.end(),
                       [](const Slot& slot) { return slot.tensor.grad().defined(); });
  }
  void window_ended() {
    is_explicit = false;
    for (Slot& slot : slots) slot.touched = false;
    kept.release();
  }
  // Tells autograd that the library has written parameters.
  void written(bool all) {
    for (Slot& slot : slots) {
      if (all || slot.touched) slot.tensor.unsafeGetTensorImpl()->bump_version();
      slot.version = slot.tensor._version();
    }
  }
};

// Takes the gradient of a parameter after backward has put it into .grad. A parameter has one such
// hook, so this one calls the one that was there before. Once the optimizer is gone, it does no
// more.
class Hook : public ::torch::autograd::PostAccumulateGradHook {
 public:
  Hook(const std::shared_ptr<State>& state, std::size_t index,
       std::unique_ptr<PostAccumulateGradHook> before)
      : state_(state), index_(index), before_(std::move(before)) {}
  // Adds the hook of a parameter.
  static void set(const std::shared_ptr<State>& state, std::size_t index, const Tensor& tensor) {
    namespace impl = ::torch::autograd::impl;
    std::unique_ptr<PostAccumulateGradHook> before = std::move(impl::post_acc_grad_hooks(tensor));
    for (;;) {  // leaves out those of optimizers that are gone
      auto* other = dynamic_cast<Hook*>(before.get());
      if (!other || !other->state_.expired()) break;
      before = std::unique_ptr<PostAccumulateGradHook>(std::move(other->before_));
    }
    impl::set_post_acc_grad_hooks(tensor, std::make_unique<Hook>(state, index, std::move(before)));
  }

  void operator()(const ::torch::autograd::Variable& tensor) override {
    if (before_) (*before_)(tensor);
    if (const std::shared_ptr<State> state = state_.lock()) state->take(index_);
  }

 private:
  std::weak_ptr<State> state_;
  std::size_t index_;
  std::unique_ptr<PostAccumulateGradHook> before_;
};

// A micro-batch of the library that is open for hooks. If an exception ends its scope, it is
// dropped if nothing was added yet; otherwise the destructor of MicroBatch discards the window.
// owns: whether .grad of its parameters is then cleared.
class OpenMicroBatch {
 public:
  OpenMicroBatch(State& state, double weight, bool owns)
      : state_(state), owns_(owns), micro_(state.context.micro_begin(-1, weight)) {
    state.any = false;
    state.kept.opened();
    state.open = &*micro_;
  }
  OpenMicroBatch(OpenMicroBatch&&) = delete;
  ~OpenMicroBatch() noexcept(false) {
    state_.open = nullptr;
    if (ended_) return;
    if (owns_) state_.clear_gradients();
    try {
      micro_->abort();
    } catch (const Error&) {  // something was added
      micro_.reset();
      state_.window_ended();
    }
    state_.kept.release();
  }
  gradaccum::MicroBatch& operator*() noexcept { return *micro_; }
  void end() {
    micro_->end();
    ended_ = true;
    state_.kept.release();
  }

 private:
  State& state_;
  bool owns_;
  std::optional<gradaccum::MicroBatch> micro_;
  bool ended_ = false;
};

}  // namespace detail

inline GroupOptions::GroupOptions(const OptimizerOptions& options) {
  if (const auto* own = dynamic_cast<const GroupOptions*>(&options)) {
    *this = *own;
  } else {
    optimizer = detail::settings_of(options);
  }
}

inline ga_optimizer GroupOptions::settings() const {
  ga_optimizer settings = optimizer;
  settings.ns_table = ns_table.empty() ? nullptr : ns_table.data();
  settings.ns_rows = static_cast<std::int32_t>(ns_table.size() / 3);
  return settings;
}

inline void GroupOptions::set(const ga_optimizer& settings) {
  std::vector<double> table;
  if (settings.ns_table) table.assign(settings.ns_table, settings.ns_table + 3 * settings.ns_rows);
  ns_table = std::move(table);
  optimizer = settings;
  optimizer.ns_table = nullptr;
  optimizer.ns_rows = 0;
}

inline void GroupOptions::serialize(::torch::serialize::OutputArchive& archive) const {
  detail::write_settings(archive, settings());
}

inline void GroupOptions::serialize(::torch::serialize::InputArchive& archive) {
  set(detail::read_settings(archive).settings());
}

// ---- Optimizer ----------------------------------------------------------------------------------

// One thread at a time uses an optimizer. It can be moved, but not copied.
class Optimizer : public ::torch::optim::Optimizer {
 public:
  // defaults: the options of groups without any, of torch or a GroupOptions.
  Optimizer(const std::vector<OptimizerParamGroup>& groups, const OptimizerOptions& defaults,
            const Options& options = {})
      : Optimizer(groups, {}, defaults, options) {}
  Optimizer(std::vector<Tensor> params, const OptimizerOptions& defaults,
            const Options& options = {})
      : Optimizer({OptimizerParamGroup(std::move(params))}, {}, defaults, options) {}
  // With the names of model->named_parameters(), which messages and archives then have, in place of
  // param0, param1 and so on. They are those by which load() finds what belongs to a parameter.
  Optimizer(const ::torch::OrderedDict<std::string, Tensor>& params,
            const OptimizerOptions& defaults, const Options& options = {})
      : Optimizer({OptimizerParamGroup(params.values())}, params.keys(), defaults, options) {}

  // The context of the library, for what it offers beside: memory, EMA, frozen parameters, ranks.
  // Micro-batches and steps are the optimizer's to make, and what param_groups() says replaces the
  // hyper-parameters that are set there.
  Context& context() noexcept { return state_->context; }
  // The parameter of the library with the memory of a tensor. GA_ERROR_INVALID_ARGUMENT: there is
  // none.
  Param param(const Tensor& tensor) const {
    for (const detail::Slot& slot : state_->slots) {
      if (slot.tensor.is_same(tensor)) return slot.param;
    }
    detail::fail(GA_ERROR_INVALID_ARGUMENT, "the tensor was not a parameter of this optimizer");
  }
  ga_window_info window() const { return state_->context.window(); }
  // Of the last step that has ended a window; none before the first.
  const std::optional<ga_step_result>& result() const noexcept { return result_; }

  // Adds a group, as a whole or not at all. Between windows.
  void add_param_group(const OptimizerParamGroup& group) {
    look_at_groups();
    ::torch::optim::Optimizer::add_param_group(group);
    try {
      keep_options(param_groups_.back(), group);
      add(param_groups_.back(), {});
    } catch (...) {
      param_groups_.pop_back();
      throw;
    }
  }

  // -- Micro-batches

  // A micro-batch whose gradients go to the window as the backwards that body() calls make them.
  template <typename Body>
  void micro_batch(double weight, Body&& body) {
    require_closed("micro_batch()");
    if (state_->has_gradients()) {
      detail::fail(
          GA_ERROR_INVALID_STATE,
          "a parameter has a .grad of an earlier backward: call zero_grad() or accumulate() "
          "first");
    }
    const bool is_first = begin();
    set_hooks();
    detail::OpenMicroBatch open(*state_, weight, true);
    std::forward<Body>(body)();
    for (detail::Slot& slot : state_->slots) {  // of parameters that had no hook when it was opened
      if (!slot.tensor.grad().defined()) continue;
      state_->add(*open, slot, slot.tensor.grad());
      slot.tensor.mutable_grad().reset();
    }
    open.end();
    took(weight, is_first, true);
  }

  // loss.backward() as a micro-batch. The scale of a loss scaler is applied.
  void backward(const Tensor& loss, double weight = 1,
                std::optional<bool> retain_graph = std::nullopt) {
    micro_batch(weight, [&] { scale_loss(loss).backward({}, retain_graph); });
  }

  // Takes the gradients of a micro-batch from .grad, which becomes undefined.
  void accumulate(double weight = 1) {
    require_closed("accumulate()");
    take(weight, true);
  }

  // The loss times the scale of the loss scaler; the loss itself without one.
  Tensor scale_loss(const Tensor& loss) {
    if (!loss.defined()) detail::fail(GA_ERROR_INVALID_ARGUMENT, "the loss was undefined");
    state_->is_scaled = true;
    return options_.loss_scaler ? loss * context().loss_scale() : loss;
  }

  // -- Steps

  // Takes what is in .grad as a micro-batch of weight 1, if there is anything, and ends the window.
  // With config.accum_steps, a window ends when it is full; until then, step() returns without one.
  // closure: is called first, with gradients enabled. Returns what it returns.
  Tensor step(LossClosure closure = nullptr) override {
    require_closed("step()");
    Tensor loss;
    if (closure) {
      const at::AutoGradMode enabled(true);
      loss = closure();
    }
    if (state_->has_gradients()) {
      if (state_->is_explicit && window().micro_batches > 0) {
        detail::fail(
            GA_ERROR_INVALID_STATE,
            "step() found gradients in .grad, in a window whose micro-batches came by "
            "backward() or accumulate(): zero_grad() drops them if they are of another loss, "
            "and accumulate(weight) after that backward takes them");
      }
      take(1, false);
    }
    const ga_window_info info = window();
    if (info.micro_batches > 0 && (info.state == GA_WINDOW_FULL || info.accum_steps == 0)) apply();
    return loss;
  }

  // Ends a window that is not full, as at the end of an epoch. Returns whether there was one.
  bool flush() {
    require_closed("flush()");
    if (window().micro_batches == 0) return false;
    apply();
    return true;
  }

  // Drops the window. zero_grad() clears .grad alone.
  void discard() {
    require_closed("discard()");
    context().discard();
    state_->window_ended();
  }

  // -- State, by torch::save() and torch::load()

  // Everything that the library keeps, an open window too, and the hyper-parameters of the groups.
  // The parameters are the model's to save, as with other optimizers of torch.
  void save(::torch::serialize::OutputArchive& archive) const override {
    auto options = default_state_options();
    options.parts = GA_STATE_LIBRARY;
    require_closed("save()");
    push();
    look_at_memory(window().micro_batches == 0);
    std::size_t size = 0;
    ga_context* const context = state_->context.get();
    check(ga_save_to_memory(context, &options, nullptr, 0, &size));
    const Tensor bytes = ::torch::empty({static_cast<std::int64_t>(size)}, ::torch::kUInt8);
    check(ga_save_to_memory(context, &options, bytes.data_ptr(), size, &size));
    archive.write("gradaccum", bytes);
    archive.write("is_explicit", c10::IValue(state_->is_explicit));
    archive.write("groups", c10::IValue(static_cast<std::int64_t>(param_groups_.size())));
    for (std::size_t i = 0; i < param_groups_.size(); ++i) {
      ::torch::serialize::OutputArchive group(archive.compilation_unit());
      detail::write_settings(group, detail::settings_of(param_groups_[i].options()));
      archive.write("group" + std::to_string(i), group);
    }
  }

  // Takes over what save() of an optimizer with the same parameters has written, as a whole or not
  // at all. As in torch, hyper-parameters are those that were saved. Between windows. After that of
  // the model: torch::load() moves its parameters, which they may not within the window that comes
  // with the optimizer, and writes them.
  void load(::torch::serialize::InputArchive& archive) override {
    require_closed("load()");
    look_at_groups();
    if (window().micro_batches > 0) {
      detail::fail(GA_ERROR_INVALID_STATE, "load() was called within a window: discard() drops it");
    }
    look_at_memory(true);
    Tensor bytes;
    c10::IValue is_explicit, count;
    detail::read_part(archive, "gradaccum", bytes);
    detail::read_part(archive, "is_explicit", is_explicit);
    detail::read_part(archive, "groups", count);
    if (count.toInt() != static_cast<std::int64_t>(param_groups_.size())) {
      detail::fail(GA_ERROR_INVALID_ARGUMENT,
                   detail::text("the archive has ", count.toInt(),
                                " groups, but the optimizer has ", param_groups_.size()));
    }
    std::vector<GroupOptions> loaded;
    std::vector<ga_optimizer> before;
    for (std::size_t i = 0; i < param_groups_.size(); ++i) {
      ::torch::serialize::InputArchive group;
      detail::read_part(archive, "group" + std::to_string(i), group);
      loaded.push_back(detail::read_settings(group));
      before.push_back(detail::settings_of(param_groups_[i].options()));
      const ga_optimizer& other = loaded[i].optimizer;
      if (other.kind != before[i].kind || other.flavor != before[i].flavor) {
        detail::fail(GA_ERROR_INVALID_ARGUMENT,
                     detail::text("group ", i, " of the archive has another optimizer, of kind ",
                                  other.kind, " and flavor ", other.flavor, ", expected ",
                                  before[i].kind, " and ", before[i].flavor));
      }
      require_place(i, loaded[i].settings());
    }
    bytes = bytes.cpu().contiguous();
    auto options = default_state_options();
    options.parts = GA_STATE_LIBRARY;
    options.settings = GA_SETTINGS_KEEP;
    try {
      for (std::size_t i = 0; i < loaded.size(); ++i) {
        context().set_optimizer(groups_[i].group, loaded[i].settings());
      }
      check(ga_load_from_memory(context().get(), bytes.data_ptr(),
                                static_cast<std::size_t>(bytes.numel()), &options));
    } catch (...) {
      for (std::size_t i = 0; i < before.size(); ++i) {
        ga_group_set_optimizer(context().get(), id(groups_[i].group), &before[i]);
      }
      throw;
    }
    for (std::size_t i = 0; i < loaded.size(); ++i) {
      detail::give_settings(param_groups_[i].options(), loaded[i].settings());
    }
    state_->is_explicit = is_explicit.toBool();
    const bool is_open = window().micro_batches > 0;
    for (detail::Slot& slot : state_->slots) {
      slot.touched = slot.tensor.element_size() == 2;  // is now what its master weights round to
    }
    state_->written(false);
    for (detail::Slot& slot : state_->slots) slot.touched = is_open;
  }

 private:
  // What is known of a group: its id, and the tensors that it was made of.
  struct Known {
    gradaccum::Group group;
    std::vector<c10::TensorImpl*> tensors;
  };

  // names: of the parameters of the first group; or empty.
  Optimizer(const std::vector<OptimizerParamGroup>& groups, const std::vector<std::string>& names,
            const OptimizerOptions& defaults, const Options& options)
      : ::torch::optim::Optimizer(groups, defaults.clone()),
        options_(options),
        state_(std::make_shared<detail::State>(own_config(options.config))) {
    if (options.clip) context().set_clip(*options.clip);
    if (options.loss_scaler) context().set_loss_scaler(*options.loss_scaler);
    if (options.ema) context().set_ema(*options.ema);
    for (std::size_t i = 0; i < groups.size(); ++i) {
      keep_options(param_groups_[i], groups[i]);
      add(param_groups_[i], names);
    }
  }

  // torch merges the options of a group with the defaults, but where it does not know their class,
  // or the defaults have another one, it puts the defaults in their place.
  void keep_options(OptimizerParamGroup& added, const OptimizerParamGroup& group) const {
    if (!group.has_options()) return;
    const OptimizerOptions& options = group.options();
    const OptimizerOptions& defaults = *defaults_;
    const bool is_own = dynamic_cast<const GroupOptions*>(&options) != nullptr;
    if (is_own || typeid(options) != typeid(defaults)) added.set_options(options.clone());
  }

  static Config own_config(Config config) {
    const auto refuse = [](const char* what) { detail::fail(GA_ERROR_UNSUPPORTED, what); };
    if (config.device != GA_DEVICE_CPU) {
      refuse(
          "config.device was not GA_DEVICE_CPU: gradaccum::torch::Optimizer is for parameters on "
          "the CPU");
    }
    if (config.eager != 0) {
      refuse("config.eager was 1, which gradaccum::torch::Optimizer does not support");
    }
    if (config.num_threads == 0) config.num_threads = at::get_num_threads();
    return config;
  }

  ga_param_options param_options(const OptimizerOptions& group) const {
    const auto* own = dynamic_cast<const GroupOptions*>(&group);
    ga_param_options options = own && own->params ? *own->params : options_.params;
    if (options.gradient_dtype != 0) {
      detail::fail(
          GA_ERROR_INVALID_ARGUMENT,
          "params has a gradient_dtype, but gradients of torch have that of their parameter");
    }
    // What the program writes to a parameter goes into its master weights. Where these are rounded
    // stochastically, that cannot be seen in the numbers, and the version of the tensor has to tell
    // it.
    options.follow_data = options.rounding == GA_ROUND_NEAREST ? 1 : 0;
    return options;
  }

  // Adds a group to the library, as a whole or not at all.
  void add(const OptimizerParamGroup& group, const std::vector<std::string>& names) {
    if (window().micro_batches > 0) {
      detail::fail(GA_ERROR_INVALID_STATE,
                   "a group was added within a window: call step() or discard() first");
    }
    const ga_optimizer settings = detail::settings_of(group.options());
    const ga_param_options params = param_options(group.options());
    const auto* own = dynamic_cast<const GroupOptions*>(&group.options());
    const std::optional<ga_clip>& clip = own && own->clip ? own->clip : options_.clip;
    const bool by_shape = settings.kind == GA_OPTIMIZER_ADAFACTOR ||
                          settings.kind == GA_OPTIMIZER_MUON ||
                          settings.kind == GA_OPTIMIZER_ROWWISE_ADAGRAD ||
                          params.rows != GA_ROWS_NONE || (clip && clip->scope == GA_CLIP_AGC);
    Known known{};
    std::vector<detail::Slot> slots;
    for (std::size_t i = 0; i < group.params().size(); ++i) {
      const Tensor& tensor = group.params()[i];
      const std::string name =
          names.empty() ? "param" + std::to_string(state_->slots.size() + slots.size()) : names[i];
      detail::look_at_tensor(tensor, name);
      known.tensors.push_back(tensor.unsafeGetTensorImpl());
      refuse_if_elsewhere(tensor, name);
      const auto is_tied = [&tensor](const detail::Slot& slot) {
        return slot.tensor.is_same(tensor);
      };
      if (std::any_of(slots.begin(), slots.end(), is_tied)) continue;
      slots.push_back(detail::slot_of(tensor, name, params, by_shape));
    }
    known.group = context().add_group(settings);
    std::size_t added = 0;
    try {
      if (own && own->clip) context().set_clip(known.group, *own->clip);
      for (; added < slots.size(); ++added) add_param(known.group, slots[added], params);
    } catch (...) {
      while (added-- > 0) ga_param_remove(context().get(), id(slots[added].param));
      throw;
    }
    std::move(slots.begin(), slots.end(), std::back_inserter(state_->slots));
    groups_.push_back(std::move(known));
  }

  void refuse_if_elsewhere(const Tensor& tensor, const std::string& name) const {
    for (const detail::Slot& slot : state_->slots) {
      if (slot.tensor.is_same(tensor)) {
        detail::fail(GA_ERROR_INVALID_ARGUMENT,
                     detail::text("parameter \"", name, "\" was in an earlier group too, as \"",
                                  slot.name, "\": a parameter has one group"));
      }
    }
  }

  void add_param(gradaccum::Group group, detail::Slot& slot, const ga_param_options& options) {
    slot.param = context().add_param(group, slot.name, slot.data.data_ptr(),
                                     detail::dtype_of(slot.dtype), slot.memory, &options);
    slot.place = context().slot(slot.param);
    const std::vector<ga_state_info> arrays = context().state(slot.param);
    slot.tells = options.follow_data == 0 &&
                 std::any_of(arrays.begin(), arrays.end(), [](const ga_state_info& array) {
                   return array.name == std::string("master");
                 });
  }

  void require_closed(const char* call) const {
    if (state_->open) {
      detail::fail(GA_ERROR_INVALID_STATE,
                   detail::text(call, " was called in an open micro-batch"));
    }
  }

  // Throws if the program has taken groups away, or put other parameters into one.
  void look_at_groups() const {
    if (param_groups_.size() != groups_.size()) {
      detail::fail(GA_ERROR_INVALID_STATE,
                   detail::text("param_groups() has ", param_groups_.size(),
                                " groups, but the optimizer has ", groups_.size(),
                                ": groups cannot be taken away, and add_param_group() of "
                                "gradaccum::torch::Optimizer adds one"));
    }
    for (std::size_t i = 0; i < groups_.size(); ++i) {
      const std::vector<Tensor>& params = param_groups_[i].params();
      const auto same = [](const Tensor& tensor, const c10::TensorImpl* known) {
        return tensor.unsafeGetTensorImpl() == known;
      };
      if (!std::equal(params.begin(), params.end(), groups_[i].tensors.begin(),
                      groups_[i].tensors.end(), same)) {
        detail::fail(
            GA_ERROR_INVALID_STATE,
            detail::text("the parameters of group ", i,
                         " were changed, but the optimizer has those that the group was made "
                         "of: add_param_group() adds others"));
      }
    }
  }

  // Throws if the options of a group have no place for some of these settings.
  void require_place(std::size_t group, const ga_optimizer& settings) const {
    const std::unique_ptr<OptimizerOptions> options = param_groups_[group].options().clone();
    detail::give_settings(*options, settings);
    const ga_optimizer kept = detail::settings_of(*options);
    std::vector<double> fields;
    detail::each_field(
        kept, [&fields](const char*, auto field) { fields.push_back(static_cast<double>(field)); });
    std::size_t at = 0;
    detail::each_field(settings, [&](const char* name, auto field) {
      const auto value = static_cast<double>(field);
      if (value == fields[at++]) return;
      detail::fail(GA_ERROR_INVALID_ARGUMENT,
                   detail::text("group ", group, " of the archive has ", name, " = ", value,
                                ", for which the options of the group have no place: give it "
                                "GroupOptions"));
    });
  }

  // Tells the library which parameters have moved or were written; throws if they may not.
  void look_at_memory(bool may_move) const {
    for (detail::Slot& slot : state_->slots) {
      const Tensor& tensor = slot.tensor;
      if (tensor.sizes() != slot.shape || tensor.strides() != slot.strides ||
          tensor.scalar_type() != slot.dtype || !tensor.device().is_cpu()) {
        detail::fail(
            GA_ERROR_INVALID_STATE,
            detail::text("parameter \"", slot.name, "\" was ", slot.dtype, " of shape ",
                         c10::IntArrayRef(slot.shape), ", and is another one now, ",
                         tensor.scalar_type(), " of shape ", tensor.sizes(), " on ",
                         tensor.device(), ": convert a model before its optimizer is made"));
      }
      if (tensor.data_ptr() != slot.data.data_ptr()) {
        if (!may_move) {
          detail::fail(GA_ERROR_INVALID_STATE,
                       detail::text("parameter \"", slot.name,
                                    "\" has moved while a window was open. torch::load() of a "
                                    "model moves it, and so comes before that of its optimizer"));
        }
        state_->context.bind(slot.param, tensor.data_ptr());
        slot.data = tensor.detach();
      }
      const auto version = static_cast<std::int64_t>(tensor._version());
      if (version == slot.version) continue;
      if (slot.tells) {
        if (!may_move) {
          detail::fail(
              GA_ERROR_INVALID_STATE,
              detail::text("parameter \"", slot.name, "\" was written while a window was open"));
        }
        state_->context.changed(slot.param);
      }
      slot.version = version;
    }
  }

  // Passes on what was written to param_groups(), which are the truth.
  void push() const {
    look_at_groups();
    for (std::size_t i = 0; i < groups_.size(); ++i) {
      state_->context.set_optimizer(groups_[i].group,
                                    detail::settings_of(param_groups_[i].options()));
    }
  }

  void set_hooks() {
    for (std::size_t i = 0; i < state_->slots.size(); ++i) {
      detail::Slot& slot = state_->slots[i];
      if (slot.hooked || !slot.tensor.requires_grad()) continue;
      detail::Hook::set(state_, i, slot.tensor);
      slot.hooked = true;
    }
  }

  // Before a micro-batch. Returns whether it is the first of the window.
  bool begin() const {
    const bool is_first = window().micro_batches == 0;
    if (is_first) look_at_groups();
    look_at_memory(is_first);
    return is_first;
  }

  // Adds what is in .grad as a micro-batch. is_explicit: it is not step() that takes it.
  void take(double weight, bool is_explicit) {
    bool any_sparse = false;
    for (const detail::Slot& slot : state_->slots) {
      const Tensor& gradient = slot.tensor.grad();
      if (!gradient.defined()) continue;
      detail::look_at_gradient(gradient, slot);
      any_sparse = any_sparse || gradient.layout() != c10::kStrided;
    }
    const bool is_first = begin();
    state_->any = false;
    if (any_sparse) {
      detail::OpenMicroBatch open(*state_, weight, false);
      for (detail::Slot& slot : state_->slots) {
        if (slot.tensor.grad().defined()) state_->add(*open, slot, slot.tensor.grad());
      }
      open.end();
    } else {
      std::vector<Tensor> gradients(context().slot_count());
      std::vector<const void*> addresses(gradients.size(), nullptr);
      for (detail::Slot& slot : state_->slots) {
        Tensor gradient = slot.tensor.grad();
        if (!gradient.defined()) continue;
        if (!detail::fits(gradient, slot)) gradient = detail::like(gradient, slot);
        addresses[slot.place] = state_->kept.address_of(gradient);
        gradients[slot.place] = std::move(gradient);
      }
      detail::KeptGradients::Entries entries = state_->kept.of_all(gradients);
      context().accumulate(addresses, weight);
      state_->kept.add(std::move(entries));
      state_->kept.release();
      for (detail::Slot& slot : state_->slots) {
        if (addresses[slot.place]) slot.touched = state_->any = true;
      }
    }
    state_->clear_gradients();
    took(weight, is_first, is_explicit);
  }

  // After a micro-batch: warns once of what its gradients show of the loop.
  void took(double weight, bool is_first, bool is_explicit) {
    state_->is_explicit = is_explicit || (state_->is_explicit && !is_first);
    if (!state_->any && weight > 0 && !state_->said_nothing) {
      state_->said_nothing = true;
      TORCH_WARN(
          "a micro-batch gave no gradient to any parameter of the optimizer, and counts as a "
          "gradient of zero. accumulate() leaves nothing in .grad for a second call");
    }
    if (state_->any && options_.loss_scaler && !state_->is_scaled && !state_->said_unscaled) {
      state_->said_unscaled = true;
      TORCH_WARN(
          "the optimizer has a loss_scaler, and divides gradients by its scale, but "
          "scale_loss() was not called for this micro-batch: call "
          "optimizer.scale_loss(loss).backward(), or optimizer.backward(loss)");
    }
    state_->is_scaled = false;
  }

  void apply() {
    look_at_memory(false);
    push();
    result_ = context().step();
    if (result_->outcome == GA_STEP_APPLIED) {
      state_->written(options_.config.missing == GA_MISSING_ZERO);
    }
    state_->window_ended();
  }

  Options options_;
  std::shared_ptr<detail::State> state_;
  std::vector<Known> groups_;
  std::optional<ga_step_result> result_;
};

}  // namespace gradaccum::torch

#endif  // GRADACCUM_TORCH_HPP_
