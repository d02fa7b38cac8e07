// SPDX-License-Identifier: Apache-2.0
//
// All pairs of options of a context. Most failures of software with many options depend on one
// option or on two of them together (Kuhn, Wallace & Gallo 2004). So every pair of choices that the
// library supports occurs in several trainings of a few windows, which are compared with float64. A
// training can be stopped and resumed wherever that is legal, for the tests of saved state.
#pragma once

#include <array>
#include <map>
#include <optional>
#include <set>
#include <tuple>

#include "formats.hpp"

namespace ga::test {

// ---- Options and their choices ------------------------------------------------------------------

enum Option {
  kPolicy,
  kMode,
  kClip,
  kLife,
  kRows,
  kParts,
  kAverage,
  kNoise,
  kLate,
  kFrozen,
  kOptimizer,
  kState,
  kDtype,
  kMaster,
  kGradient,
  kKind,
  kReduce,
  kMissing,
  kScale,
  kInfinity,
  kOptions
};

struct Choices {
  const char* name;
  std::vector<const char*> names;
};

// An optimizer and flavor that optimizers.cpp names for this suite.
struct Paired {
  const OptimizerRow* row;
  int32_t flavor;
  std::string name;
};

inline const std::vector<Paired>& paired() {
  static const std::vector<Paired> list = [] {
    const char* const of[] = {"", " of Keras", " of BERT"};
    std::vector<Paired> all;
    for (const OptimizerRow& row : optimizer_rows()) {
      for (const int32_t flavor : row.paired) {
        all.push_back({&row, flavor, row.name + std::string(of[flavor])});
      }
    }
    return all;
  }();
  return list;
}

inline std::vector<const char*> paired_names() {
  std::vector<const char*> names;
  for (const Paired& p : paired()) names.push_back(p.name.c_str());
  return names;
}

// The library supports the first choice of each option together with all choices of the others.
inline const Choices kChoices[kOptions] = {
    {"policy", {"skip", "fail", "drop", "ignore"}},
    {"mode", {"plain", "running mean", "compensated", "stochastic"}},
    {"clip",
     {"none", "global", "per tensor", "AGC", "by value", "global in micro-batches",
      "per tensor in micro-batches", "AGC in micro-batches", "by value in micro-batches"}},
    {"life", {"consumed", "live"}},
    {"rows", {"none", "dense", "lazy"}},
    {"contributions",
     {"one", "two", "written by the program"}},  // to some parameters, per micro-batch
    {"EMA", {"none", "torch", "Karras", "torch in bf16"}},
    {"noise scale", {"off", "on"}},
    {"late parameters", {"none", "added"}},
    {"frozen", {"none", "one"}},  // parameters, in one window
    {"optimizer", paired_names()},
    {"state", {"f32", "bf16"}},
    {"dtype", {"f32", "bf16", "f16", "f64"}},
    {"master", {"f32", "none"}},  // of 16-bit parameters
    {"gradient dtype", {"the parameter's", "bf16"}},
    {"gradients", {"means", "sums"}},
    {"reduce", {"mean", "sum"}},
    {"missing gradients", {"skipped", "zeros"}},
    {"loss scale", {"static", "dynamic"}},
    {"infinity", {"none", "one"}}};

enum { kSkip, kFail, kDrop, kIgnore };                     // kPolicy
enum { kPlain, kRunningMean, kCompensated, kStochastic };  // kMode
enum {                                                     // kClip
  kNone,
  kGlobal,
  kPerTensor,
  kAgc,
  kByValue,
  kGlobalMicro,
  kPerTensorMicro,
  kAgcMicro,
  kByValueMicro
};
enum { kNoRows, kDenseRows, kLazyRows };             // kRows
enum { kOne, kTwo, kWritten };                       // kParts
enum { kNoAverage, kTorch, kKarras, kTorchInBf16 };  // kAverage
enum { kF32, kBf16, kF16, kF64 };                    // kDtype

using Case = std::array<int, kOptions>;

// Choice x of option a with choice y of option b; a < b.
struct Pair {
  int a, x, b, y;
  bool operator<(const Pair& p) const {
    return std::tie(a, x, b, y) < std::tie(p.a, p.x, p.b, p.y);
  }
};

inline Pair pair_of(int a, int x, int b, int y) {
  return a < b ? Pair{a, x, b, y} : Pair{b, y, a, x};
}

inline std::string describe(const Pair& p) {
  return std::string(kChoices[p.a].name) + " " + kChoices[p.a].names[static_cast<size_t>(p.x)] +
         ", " + kChoices[p.b].name + " " + kChoices[p.b].names[static_cast<size_t>(p.y)];
}

inline std::string describe(const Case& c) {
  std::string text;
  for (int a = 0; a < kOptions; ++a) {
    text += std::string(a ? ", " : "") + kChoices[a].name + ": " +
            kChoices[a].names[static_cast<size_t>(c[static_cast<size_t>(a)])];
  }
  return text;
}

inline std::vector<Pair> pairs_of(const Case& c) {
  std::vector<Pair> list;
  for (int b = 0; b < kOptions; ++b) {
    for (int a = 0; a < b; ++a) {
      list.push_back({a, c[static_cast<size_t>(a)], b, c[static_cast<size_t>(b)]});
    }
  }
  return list;
}

// The status of an unsupported pair, and a word of the message.
struct Refusal {
  ga_status status;
  const char* word;
};

inline std::map<Pair, Refusal> refusals() {
  std::map<Pair, Refusal> list;
  const auto add = [&](int a, int x, int b, int y, ga_status status, const char* word) {
    list[pair_of(a, x, b, y)] = {status, word};
  };
  add(kMode, kRunningMean, kKind, 1, GA_ERROR_INVALID_ARGUMENT, "GA_ACCUMULATE_RUNNING_MEAN");
  add(kMode, kRunningMean, kReduce, 1, GA_ERROR_INVALID_ARGUMENT, "GA_ACCUMULATE_RUNNING_MEAN");
  for (const int rows : {kDenseRows, kLazyRows}) {
    for (const int mode : {kRunningMean, kCompensated, kStochastic}) {
      add(kRows, rows, kMode, mode, GA_ERROR_UNSUPPORTED, "accumulation");
    }
    for (const int clip : {kGlobalMicro, kPerTensorMicro, kAgcMicro, kByValueMicro}) {
      add(kRows, rows, kClip, clip, GA_ERROR_UNSUPPORTED, "GA_CLIP_WHEN_MICRO");
    }
    add(kRows, rows, kNoise, 1, GA_ERROR_UNSUPPORTED, "noise_scale");
  }
  for (const int clip : {kGlobalMicro, kPerTensorMicro, kAgcMicro, kByValueMicro}) {
    add(kParts, kTwo, kClip, clip, GA_ERROR_UNSUPPORTED, "second contribution");
    add(kParts, kWritten, kClip, clip, GA_ERROR_UNSUPPORTED, "GA_CLIP_WHEN_MICRO");
  }
  for (const int mode : {kRunningMean, kCompensated, kStochastic}) {
    add(kParts, kWritten, kMode, mode, GA_ERROR_UNSUPPORTED, "accumulation");
  }
  add(kParts, kWritten, kPolicy, kDrop, GA_ERROR_UNSUPPORTED, "DROP_MICRO");
  add(kParts, kWritten, kNoise, 1, GA_ERROR_UNSUPPORTED, "noise_scale");
  add(kAverage, kTorchInBf16, kDtype, kF64, GA_ERROR_UNSUPPORTED, "EMA");
  add(kState, 1, kDtype, kF64, GA_ERROR_UNSUPPORTED, "state_dtype");
  for (int i = 0; i < static_cast<int>(paired().size()); ++i) {
    const Paired& p = paired()[static_cast<size_t>(i)];
    if (!p.row->bf16_state) add(kState, 1, kOptimizer, i, GA_ERROR_UNSUPPORTED, "state_dtype");
    if (!p.row->lazy(optimizer(p.row->kind, p.flavor))) {
      add(kRows, kLazyRows, kOptimizer, i, GA_ERROR_UNSUPPORTED, "GA_ROWS_LAZY");
    }
  }
  return list;
}

inline std::set<Pair> all_pairs() {
  std::set<Pair> pairs;
  for (int b = 0; b < kOptions; ++b) {
    for (int a = 0; a < b; ++a) {
      for (size_t x = 0; x < kChoices[a].names.size(); ++x) {
        for (size_t y = 0; y < kChoices[b].names.size(); ++y) {
          pairs.insert({a, static_cast<int>(x), b, static_cast<int>(y)});
        }
      }
    }
  }
  return pairs;
}

inline std::set<Pair> supported_pairs() {
  std::set<Pair> pairs = all_pairs();
  for (const auto& [pair, refusal] : refusals()) pairs.erase(pair);
  return pairs;
}

// Cases in which each supported pair occurs at least so many times. Each begins with a pair that is in too few cases so far. Every further option then gets the
// choice that adds the most such pairs.
inline std::vector<Case> cases(int at_least) {
  std::map<Pair, int> due;  // the number of cases that still need the pair
  for (const Pair& pair : supported_pairs()) due[pair] = at_least;
  const auto wanted = [&](const Pair& pair) { return due[pair] > 0; };
  std::vector<Case> list;
  Random random(1);
  for (const auto& [first, times] : due) {
    while (wanted(first)) {
      constexpr int kOpen = -1;
      Case c;
      c.fill(kOpen);
      c[static_cast<size_t>(first.a)] = first.x;
      c[static_cast<size_t>(first.b)] = first.y;
      for (int a = 0; a < kOptions; ++a) {
        if (c[static_cast<size_t>(a)] != kOpen) continue;
        const auto n = static_cast<int>(kChoices[a].names.size());
        const auto first_choice = static_cast<int>(random.below(n));  // breaks ties
        int best = kOpen, most = -1;
        for (int k = 0; k < n; ++k) {
          const int x = (first_choice + k) % n;
          int fresh = 0;
          bool supported = true;
          for (int b = 0; b < kOptions; ++b) {
            const int y = c[static_cast<size_t>(b)];
            if (y == kOpen) continue;
            const auto found = due.find(pair_of(a, x, b, y));
            supported = supported && found != due.end();
            fresh += found != due.end() && found->second > 0;
          }
          if (!supported || fresh <= most) continue;
          best = x;
          most = fresh;
        }
        c[static_cast<size_t>(a)] = best;
      }
      for (const Pair& pair : pairs_of(c)) --due[pair];
      list.push_back(c);
    }
  }
  return list;
}

// ---- A training, in the library and in float64 --------------------------------------------------

using Reals = std::vector<ref::Real>;

// One parameter with its EMA and the sums of its window.
struct Parameter {
  ga_param id;
  size_t group;
  Tensor data;
  ref::Tensor tensor;
  int32_t rows;  // ga_param_options.rows
  bool frozen = false;
  int64_t updates = 0;
  Reals average;
  // The open window.
  bool touched = false, dense = false;
  double held = 0;  // total weight of a running mean
  Reals sum;
  std::vector<bool> row_touched;
  std::vector<double> path;  // sum of the absolute movements of each element

  Parameter(int32_t dtype, size_t in, const ref::Shape& shape, int32_t by_rows)
      : id(-1), group(in), data(dtype, ref::count_of(shape)), rows(by_rows) {
    tensor.shape = shape;
    tensor.elements.resize(size());
    path.resize(size());
    row_touched.resize(static_cast<size_t>(shape[0]));
  }
  size_t size() const { return static_cast<size_t>(data.count()); }
  size_t columns() const { return size() / static_cast<size_t>(tensor.shape[0]); }
};

// A gradient of a micro-batch: a whole one, or rows.
struct Gradient {
  Parameter* to;
  Tensor values;
  std::vector<int32_t> indices;  // empty: a whole gradient
};

// Whether a training is stopped after micro-batches and windows: saved, and loaded by a new context. Each
// time, always where it was or on the CPU and on a device in turn; or once, which shows what a later stop
// would put right again.
enum class Stops { kNever, kAlways, kToTheOtherDevice, kOnce };

class Trial {
 public:
  // once: after how many other occasions.
  explicit Trial(const Case& c, Stops stops = Stops::kNever, int once = 0)
      : case_(c),
        stops_(stops),
        once_(once),
        arithmetic_(is(kDtype, kF64) ? ref::kFloat64 : ref::kFloat32) {
    if (!make()) return;
    window({3, 0.5, 2});
    if (is(kLate, 1)) add_late();
    window({2, 5, 0});
    window({4});  // the short last window of an epoch
    freeze(is(kFrozen, 1));
    window({1, 2.5, 3});
    freeze(false);
    window({0.75, 6});
  }
  ~Trial() { ga_context_destroy(ctx_); }
  Trial(const Trial&) = delete;
  Trial& operator=(const Trial&) = delete;

  // The status of the first call that was refused.
  ga_status status() const { return status_; }
  const std::string& sentence() const { return sentence_; }
  // How often the training could be stopped.
  int occasions() const { return occasions_; }
  // The bits of all parameters and results after each window.
  const std::vector<std::vector<uint8_t>>& bits() const { return bits_; }
  // Whether sums, state and parameters are nearly as precise as f32, and everything is finite at
  // the end.
  bool is_sharp() const {
    const bool sums = format(accumulator()).size > 2 || is(kMode, kCompensated);
    return sums && is(kState, 0) && !(narrow() && is(kMaster, 1)) &&
           !(is(kPolicy, kIgnore) && is(kInfinity, 1));
  }
  // The share of elements whose tolerance is more than a hundredth of the distance that they have
  // moved, and so proves little.
  double vague() const {
    const ref::With arithmetic(arithmetic_);
    double vague = 0, all = 0;
    for (const Parameter& p : params_) {
      for (size_t i = 0; i < p.size(); ++i) {
        if (p.path[i] == 0) continue;
        vague += !(ref::tolerance(p.tensor.elements[i].p) <= 0.01 * p.path[i]);
        ++all;
      }
    }
    return vague / all;
  }

 private:
  struct Group {
    ga_optimizer optimizer;
    std::optional<ga_clip> own;
  };

  bool is(int option, int choice) const { return case_[static_cast<size_t>(option)] == choice; }
  int choice(int option) const { return case_[static_cast<size_t>(option)]; }
  bool ok(ga_status status) {
    if (status_ == GA_OK && status != GA_OK) {
      status_ = status;
      sentence_ = ga_last_error();
    }
    return status == GA_OK;
  }

  // ---- The context ----

  int32_t dtype() const {
    static const int32_t dtypes[] = {GA_F32, GA_BF16, GA_F16, GA_F64};
    return dtypes[choice(kDtype)];
  }
  bool narrow() const { return format(dtype()).size == 2; }
  int32_t gradient_dtype() const { return is(kGradient, 0) ? dtype() : GA_BF16; }
  // The dtype of the accumulator: 16 bits if the mode of accumulation needs it.
  int32_t accumulator() const {
    return is(kDtype, kF64) ? GA_F64 : narrow() && !is(kMode, kPlain) ? dtype() : GA_F32;
  }

  bool make() {
    config_ = config();
    config_.nonfinite = choice(kPolicy);
    config_.accumulation = choice(kMode);
    config_.gradient_life = choice(kLife);
    config_.noise_scale = choice(kNoise);
    config_.noise_smoothing = 0.75;
    config_.gradient_kind = choice(kKind);
    config_.reduce = choice(kReduce);
    config_.missing = choice(kMissing);
    config_.loss_scale = 8;
    config_.accum_steps = 3;
    config_.seed = 11;
    scale_ = is(kScale, 1) ? 256 : config_.loss_scale;
    clip_ = clip_of(1.25);
    EXPECT_OK(ga_ema_init(&ema_, sizeof ema_));
    ema_.kind = is(kAverage, kKarras) ? GA_EMA_KARRAS : GA_EMA_TORCH;
    ema_.dtype = is(kAverage, kTorchInBf16) ? GA_BF16 : 0;
    ema_.decay = 0.75;
    ema_.gamma = 2;
    if (!open()) return false;
    add_group(optimizer_of_case());
    ga_optimizer other = plain_sgd(0.125);
    other.momentum = 0.5;
    // The second group has its own clip, applied at the same time.
    add_group(other, is(kClip, kNone) ? std::nullopt : std::optional<ga_clip>(clip_of(0.5)));
    if (status_ != GA_OK) return false;
    params_.reserve(7);
    return add_param(0, {5, 4}) && add_param(0, {7}) && add_param(0, {6, 3}, choice(kRows)) &&
           add_param(1, {3, 3}) && add_param(1, {2});
  }

  // Makes the context, without groups and parameters.
  bool open() {
    if (!ok(ga_context_create(&config_, &ctx_))) return false;
    if (!is(kClip, kNone) && !ok(ga_context_set_clip(ctx_, &clip_))) return false;
    if (is(kScale, 1)) {
      ga_loss_scaler scaler;
      EXPECT_OK(ga_loss_scaler_init(&scaler, sizeof scaler));
      scaler.initial_scale = 256;
      scaler.growth_interval = 2;
      if (!ok(ga_context_set_loss_scaler(ctx_, &scaler))) return false;
    }
    return is(kAverage, kNoAverage) || ok(ga_context_set_ema(ctx_, &ema_));
  }

  // Goes on as a new process would, with another number of threads and other values in the memory of
  // the parameters.
  void stop_and_go() {
    const int occasion = occasions_++;
    if (stops_ == Stops::kNever || status_ != GA_OK) return;
    if (stops_ == Stops::kOnce && occasion != once_) return;
    size_t size = 0;
    if (!ok(ga_save_to_memory(ctx_, nullptr, nullptr, 0, &size))) return;
    std::vector<char> saved(size);
    if (!ok(ga_save_to_memory(ctx_, nullptr, saved.data(), saved.size(), &size))) return;
    ga_context_destroy(ctx_);
    ctx_ = nullptr;
    config_.num_threads = 1 + config_.num_threads % 3;
    if (stops_ == Stops::kToTheOtherDevice)
      config_.device = config_.device == GA_DEVICE_CPU ? GA_DEVICE_CUDA : GA_DEVICE_CPU;
    if (!open()) return;
    for (Group& group : groups_) register_group(group);
    for (Parameter& p : params_) {
      for (int64_t i = 0; i < p.data.count(); ++i) p.data.set(i, 12345);
      register_param(p);
      if (p.frozen) ok(ga_param_set_frozen(ctx_, p.id, 1));
    }
    ok(ga_load_from_memory(ctx_, saved.data(), saved.size(), nullptr));
  }

  void record(const ga_step_result& r) {
    std::vector<uint8_t> bits;
    const auto add = [&](const void* data, size_t size) {
      const auto* const bytes = static_cast<const uint8_t*>(data);
      bits.insert(bits.end(), bytes, bytes + size);
    };
    add(&r, sizeof r);
    for (const Parameter& p : params_) {
      add(p.data.data(), static_cast<size_t>(p.data.count()) * p.data.size());
      if (is(kAverage, kNoAverage)) continue;
      Tensor ema(GA_F64, p.data.count());
      EXPECT_OK(ga_ema_copy_to(ctx_, p.id, ema.data(), GA_F64));
      add(ema.data(), static_cast<size_t>(ema.count()) * ema.size());
    }
    bits_.push_back(bits);
  }

  ga_optimizer optimizer_of_case() const {
    const Paired& p = paired()[static_cast<size_t>(choice(kOptimizer))];
    ga_optimizer o = optimizer(p.row->kind, p.flavor);
    o.lr = 0x1p-5;
    o.state_dtype = is(kState, 1) ? GA_BF16 : 0;
    if (o.kind == GA_OPTIMIZER_LARS) o.weight_decay = 0.01, o.trust_coefficient = 0.25;
    if (o.kind == GA_OPTIMIZER_SGD) o.momentum = 0.875;
    return o;
  }

  ga_clip clip_of(double most) const {
    const int scope[] = {GA_CLIP_NONE, GA_CLIP_GLOBAL, GA_CLIP_PER_TENSOR, GA_CLIP_AGC,
                         GA_CLIP_NONE};
    const int which = choice(kClip) >= kGlobalMicro ? choice(kClip) - 4 : choice(kClip);
    ga_clip c = clip(scope[which], most, which == kGlobal ? GA_FLAVOR_TORCH : GA_FLAVOR_KERAS);
    if (which == kByValue) c.max_value = most / 4;
    if (which == kPerTensor) c.max_value = 0.875;
    c.agc_factor = most;
    c.when = choice(kClip) >= kGlobalMicro ? GA_CLIP_WHEN_MICRO : GA_CLIP_WHEN_STEP;
    return c;
  }

  void add_group(const ga_optimizer& o, const std::optional<ga_clip>& own = {}) {
    groups_.push_back({o, own});
    register_group(groups_.back());
  }
  void register_group(const Group& group) {
    ga_group id = -1;
    ok(ga_group_add(ctx_, &group.optimizer, &id));
    if (group.own) ok(ga_group_set_clip(ctx_, id, &*group.own));
  }

  bool add_param(size_t group, const ref::Shape& shape, int rows = kNoRows) {
    params_.emplace_back(dtype(), group, shape, rows);
    Parameter& p = params_.back();
    for (int64_t i = 0; i < p.data.count(); ++i) p.data.set(i, 0.25 * random_.signed_unit());
    for (size_t i = 0; i < p.size(); ++i) {
      p.tensor.elements[i].p = ref::exact(p.data.get(static_cast<int64_t>(i)));
    }
    return register_param(p);
  }
  bool register_param(Parameter& p) {
    ga_param_options o = options(gradient_dtype(), accumulator());
    o.rows = p.rows;
    o.master = choice(kMaster);
    const std::string name = "p" + std::to_string(&p - params_.data());
    return ok(try_add(ctx_, static_cast<ga_group>(p.group), name.c_str(), p.data.data(), dtype(),
                      p.tensor.shape, o, &p.id));
  }

  void add_late() {
    add_param(0, {3, 2});
    add_group(optimizer_of_case());
    add_param(groups_.size() - 1, {5});
  }

  void freeze(bool frozen) {
    if (status_ != GA_OK || params_[0].frozen == frozen) return;
    ok(ga_param_set_frozen(ctx_, 0, frozen));
    params_[0].frozen = frozen;
  }

  // ---- A window ----

  // Whether a parameter has a gradient in a micro-batch. The first parameter has none in the short
  // last window. In window 1, the second parameter has one only in the micro-batch that may have an
  // infinity.
  bool brings(size_t param, size_t micro, size_t micros) const {
    if (param == 0) return micros > 1;
    if (param == 1 && window_ == 1) return micro == bad_micro();
    return param != 4 || (window_ + static_cast<int64_t>(micro)) % 2 == 0;
  }
  size_t bad_micro() const { return static_cast<size_t>(choice(kKind) + choice(kScale)) % 2; }
  // If no step is skipped, the infinity is in the last window, because nothing is finite after it.
  bool is_bad(size_t micro) const {
    return is(kInfinity, 1) && window_ == (is(kPolicy, kIgnore) ? 4 : 1) && micro == bad_micro();
  }

  void window(const std::vector<double>& weights) {
    if (status_ != GA_OK) return;
    const ref::With arithmetic(arithmetic_);
    std::vector<std::vector<Gradient>> kept(weights.size());  // kept for GA_GRADIENTS_LIVE
    double scale = NAN;
    EXPECT_OK(ga_loss_scale(ctx_, &scale, nullptr));
    if (all_known_) {
      EXPECT_EQ(scale, scale_);
    }
    scale_ = scale;
    begin_window();
    for (size_t k = 0; k < weights.size(); ++k) {
      make_gradients(k, weights.size(), kept[k]);
      if (!contribute(static_cast<int64_t>(k), weights[k], kept[k])) return;
      add(weights[k], kept[k], is_bad(k));
      stop_and_go();
    }
    finish(static_cast<int64_t>(weights.size()));
    stop_and_go();
    ++window_;
  }

  void make_gradients(size_t micro, size_t micros, std::vector<Gradient>& list) {
    list.reserve(2 * params_.size());
    for (size_t i = 0; i < params_.size(); ++i) {
      if (!brings(i, micro, micros)) continue;
      Parameter& p = params_[i];
      const bool whole = p.rows == kNoRows || (window_ == 3 && micro == 1);
      std::vector<int32_t> indices;
      if (!whole) indices = micro == 0 ? std::vector<int32_t>{4, 1, 4} : std::vector<int32_t>{1, 5};
      const auto n = whole ? p.size() : indices.size() * p.columns();
      const int parts = is(kParts, kTwo) && i != 1 ? 2 : 1;
      for (int part = 1; part <= parts; ++part) {
        Tensor values(gradient_dtype(), static_cast<int64_t>(n));
        for (int64_t j = 0; j < values.count(); ++j) values.set(j, scale_ * random_.signed_unit());
        if (i == 0 && part == parts && is_bad(micro)) values.set(2, INFINITY);
        list.push_back({&p, values, indices});
      }
    }
  }

  bool contribute(int64_t micro, double weight, const std::vector<Gradient>& list) {
    if (is(kRows, kNoRows) && is(kParts, kOne)) {
      std::vector<const void*> pointers(params_.size(), nullptr);
      for (const Gradient& g : list) pointers[static_cast<size_t>(g.to->id)] = g.values.data();
      return ok(ga_accumulate(ctx_, pointers.data(), pointers.size(), weight, nullptr));
    }
    if (!ok(ga_micro_begin(ctx_, micro, weight, nullptr))) return false;
    for (const Gradient& g : list) {
      const bool writes = is(kParts, kWritten) && g.indices.empty() && (g.to->id + micro) % 3 != 1;
      if (writes) {
        if (!write(g)) return false;
      } else if (g.indices.empty()) {
        if (!ok(ga_accumulate_part(ctx_, g.to->id, g.values.data()))) return false;
      } else {
        const auto n = static_cast<int64_t>(g.indices.size());
        if (!ok(ga_accumulate_rows(ctx_, g.to->id, g.indices.data(), GA_I32, n, g.values.data())))
          return false;
      }
    }
    return ok(ga_micro_end(ctx_));
  }

  // Adds to the accumulator as a kernel of the program does.
  bool write(const Gradient& g) {
    ga_accumulator a;
    a.struct_size = sizeof a;
    if (!ok(ga_accumulator_acquire(ctx_, g.to->id, &a))) return false;
    const auto add = [&](auto to) {
      using T = typename decltype(to)::value_type;
      for (size_t j = 0; j < to.size(); ++j) {
        const T c = static_cast<T>(a.alpha) * static_cast<T>(g.values.get(static_cast<int64_t>(j)));
        to[j] = a.beta == 0 ? c : static_cast<T>(a.beta) * to[j] + c;
      }
      to_library(a.data, to);
    };
    if (a.data && a.dtype == GA_F64) add(from_library<double>(a.data, g.values.count()));
    if (a.data && a.dtype == GA_F32) add(from_library<float>(a.data, g.values.count()));
    return ok(ga_accumulator_release(ctx_, g.to->id));
  }

  // ---- The same in float64 ----

  void begin_window() {
    weight_ = 0;
    weighted_ = 0;
    dropped_ = 0;
    nonfinite_ = false;
    squares_by_weight_ = ref::Real();
    for (Parameter& p : params_) {
      p.touched = p.dense = false;
      p.held = 0;
      p.sum.assign(p.size(), ref::Real());
      std::fill(p.row_touched.begin(), p.row_touched.end(), false);
    }
  }

  void add(double weight, const std::vector<Gradient>& list, bool bad) {
    if (weight == 0) return;
    if (bad && is(kPolicy, kDrop)) {
      ++dropped_;
      return;
    }
    nonfinite_ = nonfinite_ || bad;
    weight_ += weight;
    ++weighted_;
    std::vector<Reals> gradients;  // unscaled
    for (const Gradient& g : list) {
      gradients.emplace_back();
      for (int64_t j = 0; j < g.values.count(); ++j) {
        gradients.back().push_back(ref::exact(g.values.get(j)) * ref::scalar(1 / scale_));
      }
    }
    if (clip_.when == GA_CLIP_WHEN_MICRO && (!bad || is(kPolicy, kIgnore))) {
      std::vector<Reals*> at(params_.size(), nullptr);
      for (size_t k = 0; k < list.size(); ++k) {
        if (!list[k].to->frozen) at[static_cast<size_t>(list[k].to->id)] = &gradients[k];
      }
      clip_all(at);
    }
    Reals all;
    for (size_t k = 0; k < list.size(); ++k) {
      if (list[k].to->frozen) continue;
      const ref::Real factor = ref::scalar(is(kKind, 0) ? weight : 1);
      for (ref::Real& x : gradients[k]) x = x * factor;
      all.insert(all.end(), gradients[k].begin(), gradients[k].end());
      add_to(*list[k].to, gradients[k], list[k].indices);
    }
    {
      const ref::With host(ref::kFloat64);
      const ref::Real norm = ref::norm(all);
      squares_by_weight_ = squares_by_weight_ + norm * norm / ref::exact(weight);
    }
  }

  void add_to(Parameter& p, const Reals& contribution, const std::vector<int32_t>& indices) {
    const size_t columns = p.columns();
    const double held = p.held;
    p.held = weight_;
    p.dense = p.dense || indices.empty();
    for (size_t j = 0; j < contribution.size(); ++j) {
      const size_t row = indices.empty() ? j / columns : static_cast<size_t>(indices[j / columns]);
      ref::Real& sum = p.sum[row * columns + j % columns];
      p.row_touched[row] = true;
      ref::Real c = contribution[j];
      if (is(kMode, kRunningMean)) {
        sum = sum * ref::scalar(held / weight_);
        c = c * ref::scalar(1 / weight_);
      }
      sum = stored(sum + c);
    }
    p.touched = true;
  }

  // Adds the error of rounding to nearest, or of stochastic rounding.
  static ref::Real rounded(ref::Real x, int32_t dtype, bool by_chance) {
    if (!std::isfinite(x.value)) return x;
    const double spacing = format(dtype).spacing(std::abs(x.value) + x.error);
    x.error += by_chance ? spacing : spacing / 2;
    return x;
  }
  // Rounds x as a 16-bit accumulator does.
  ref::Real stored(ref::Real x) const {
    const Format& f = format(accumulator());
    if (f.size != 2 || !std::isfinite(x.value)) return x;
    const double spacing = f.spacing(std::abs(x.value) + x.error);
    x.error += is(kMode, kStochastic)    ? spacing
               : is(kMode, kCompensated) ? f.spacing(spacing / 2) / 2
                                         : spacing / 2;
    return x;
  }

  // Multiplies the gradients of the chosen parameters by a factor that is a function of their
  // common norm.
  template <class Chosen, class Factor>
  void scale(const std::vector<Reals*>& g, Chosen chosen, Factor factor) {
    Reals all;
    for (size_t i = 0; i < g.size(); ++i) {
      if (g[i] && chosen(i)) all.insert(all.end(), g[i]->begin(), g[i]->end());
    }
    const ref::Real norm = ref::norm(all);
    const double f = factor(norm.value);
    const bool finite = std::isfinite(norm.value);
    const double error =
        norm.zero() || !finite ? 0 : norm.error / norm.value + arithmetic_.half_ulp;
    if (f < factor_.value) factor_ = {f, f * error};
    for (size_t i = 0; i < g.size(); ++i) {
      if (!g[i] || !chosen(i)) continue;
      for (ref::Real& x : *g[i]) {
        x = !std::isfinite(x.value) && f == 0 ? ref::exact(NAN) : x * ref::Real(f, f * error);
      }
    }
  }

  // Clips gradients. An entry is NULL if the parameter has none.
  void clip_all(const std::vector<Reals*>& g) {
    const auto clip_of_param = [&](size_t i) -> const ga_clip& {
      const Group& group = groups_[params_[i].group];
      return group.own ? *group.own : clip_;
    };
    const auto factor_of = [](const ga_clip& c) {
      return [&c](double norm) { return ref::clip_factor(c.flavor, norm, c.max_norm); };
    };
    for (size_t i = 0; i < g.size(); ++i) {
      const ga_clip& c = clip_of_param(i);
      if (!g[i] || !std::isfinite(c.max_value)) continue;
      for (ref::Real& x : *g[i]) x = ref::clamp(x, c.max_value);
    }
    for (size_t i = 0; i < g.size(); ++i) {
      const ga_clip& c = clip_of_param(i);
      if (!g[i]) continue;
      if (c.scope == GA_CLIP_PER_TENSOR) {
        scale(
            g, [=](size_t k) { return k == i; }, factor_of(c));
      } else if (c.scope == GA_CLIP_AGC) {
        const ref::Shape& shape = params_[i].tensor.shape;
        const double least = ref::agc(c, shape, ref::agc_axes(c.agc_units, shape),
                                      ref::values(params_[i].tensor), *g[i]);
        factor_.value = std::min(factor_.value, least);
      }
    }
    if (clip_.scope != GA_CLIP_GLOBAL) return;
    scale(
        g, [&](size_t i) { return !groups_[params_[i].group].own; }, factor_of(clip_));
    for (const Group& group : groups_) {
      if (!group.own) continue;
      scale(
          g, [&](size_t i) { return &groups_[params_[i].group] == &group; }, factor_of(*group.own));
    }
  }

  void finish(int64_t micros) {
    const bool skipped = nonfinite_ && !is(kPolicy, kIgnore);
    auto r = to_fill<ga_step_result>();
    if (skipped && is(kPolicy, kFail)) {
      EXPECT_EQ(ga_step(ctx_, &r), GA_ERROR_NONFINITE);
      stop_and_go();
      EXPECT_OK(ga_discard(ctx_));
      all_known_ = false;  // test_loss_scale.cpp tests the scale after a discarded window
      record(r);
      compare();
      return;
    }
    if (!ok(ga_step(ctx_, &r))) return;
    record(r);
    ++windows_;
    all_dropped_ += dropped_;
    EXPECT_EQ(r.outcome, skipped ? GA_STEP_SKIPPED_NONFINITE : GA_STEP_APPLIED);
    EXPECT_EQ(r.loss_scale, scale_);
    EXPECT_EQ(r.micro_batches, micros);
    EXPECT_EQ(r.weight, weight_);
    EXPECT_EQ(r.window_dropped, dropped_);
    EXPECT_EQ(r.dropped, all_dropped_);
    move_scale(skipped || dropped_ > 0);
    if (!skipped) apply(r);
    EXPECT_EQ(r.windows, windows_);
    EXPECT_EQ(r.steps, steps_);
    EXPECT_EQ(r.skipped, windows_ - steps_);
    compare();
  }

  void move_scale(bool backs_off) {
    if (is(kScale, 0)) return;
    growth_ = backs_off ? 0 : growth_ + 1;
    if (backs_off) scale_ /= 2;
    if (growth_ < 2) return;
    growth_ = 0;
    scale_ *= 2;
  }

  void apply(const ga_step_result& r) {
    ++steps_;
    std::vector<Reals> reduced(params_.size());
    std::vector<Reals*> g(params_.size(), nullptr);
    Reals all, sums;
    for (size_t i = 0; i < params_.size(); ++i) {
      Parameter& p = params_[i];
      if (p.frozen || (!p.touched && is(kMissing, 0))) continue;
      const bool mean = is(kReduce, 0), running = is(kMode, kRunningMean);
      const double factor = (running && p.touched ? p.held : 1) / (mean ? weight_ : 1);
      for (const ref::Real& x : p.sum) {
        reduced[i].push_back(factor == 1 ? x : x * ref::scalar(factor));
        sums.push_back(running ? x * ref::scalar(p.held) : x);
      }
      g[i] = &reduced[i];
      all.insert(all.end(), reduced[i].begin(), reduced[i].end());
    }
    expect(r.norm, ref::norm(all), "norm");
    EXPECT_EQ(r.lr, groups_[0].optimizer.lr);

    factor_ = ref::exact(1);
    if (clip_.when == GA_CLIP_WHEN_STEP) clip_all(g);
    if (clip_.scope == GA_CLIP_AGC && clip_.when == GA_CLIP_WHEN_STEP) {
      EXPECT_LE(r.clip_factor, 1);
      EXPECT_EQ(r.clip_factor < 1, factor_.value < 1);
    } else {
      expect(r.clip_factor, factor_, "clip_factor");
    }
    bound_lamb(g);
    for (size_t i = 0; i < params_.size(); ++i) {
      if (g[i]) update(params_[i], reduced[i]);
      if (!is(kAverage, kNoAverage)) follow(params_[i]);
    }

    if (is(kNoise, 1) && weighted_ >= 2 && is(kParts, kOne)) {
      noise_.add(squares_by_weight_, ref::norm(sums), weighted_, weight_, config_.noise_smoothing);
    }
    if (noise_.weight == 0) {
      EXPECT_TRUE(std::isnan(r.noise_trace) && std::isnan(r.noise_signal));
      return;
    }
    const ref::Real weight = ref::exact(noise_.weight);
    expect(r.noise_trace, noise_.trace / weight, "noise_trace");
    expect(r.noise_signal, noise_.signal / weight, "noise_signal");
    if (std::isfinite(r.noise_signal)) {
      EXPECT_DOUBLE_EQ(r.noise_scale, r.noise_trace / r.noise_signal);
    }
  }

  // The limit of the norm that LAMB groups share.
  void bound_lamb(const std::vector<Reals*>& g) {
    if (groups_[0].optimizer.kind != GA_OPTIMIZER_LAMB) return;
    const ref::Real before = factor_;
    const double most = groups_[0].optimizer.max_grad_norm;
    scale(
        g, [&](size_t i) { return params_[i].group != 1; },
        [=](double norm) { return 1 / std::max(1.0, norm / most); });
    factor_ = before;
  }

  void update(Parameter& p, Reals& g) {
    const ga_optimizer& o = groups_[p.group].optimizer;
    ++p.updates;
    const int64_t t = o.flavor == GA_FLAVOR_TORCH ? p.updates : steps_;
    const Reals before = ref::values(p.tensor);
    const bool all = p.rows != kLazyRows || p.dense;
    if (all) ref::update(o, o.lr, t, g, p.tensor);
    const size_t columns = p.columns();
    for (size_t first = 0; first < p.size() && !all; first += columns) {
      if (!p.row_touched[first / columns]) continue;
      const Reals row(&g[first], &g[first] + columns);
      ref::update_row(o, o.lr, t, row, p.tensor, static_cast<int64_t>(first / columns));
    }
    for (size_t i = 0; i < p.size(); ++i) {
      ref::Element& e = p.tensor.elements[i];
      if (!all && !p.row_touched[i / columns]) continue;
      if (narrow() && is(kMaster, 1)) e.p = rounded(e.p, dtype(), false);
      if (o.state_dtype != GA_BF16) continue;
      for (ref::Real* x : {&e.m, &e.v, &e.w}) *x = rounded(*x, GA_BF16, true);
    }
    const bool finite =
        std::all_of(g.begin(), g.end(), [](const ref::Real& x) { return std::isfinite(x.value); });
    for (size_t i = 0; i < p.size(); ++i) {
      ref::Real& to = p.tensor.elements[i].p;
      p.path[i] += std::abs(to.value - before[i].value);
      // An infinity in a factored second moment affects its whole row and column, and their mean
      // all.
      if (!finite && o.kind == GA_OPTIMIZER_ADAFACTOR) to.error = INFINITY;
    }
  }

  void follow(Parameter& p) {
    const bool begun = !p.average.empty();
    p.average.resize(p.size());
    for (size_t i = 0; i < p.size(); ++i) {
      ref::Real& e = p.average[i];
      e = ref::follow(ema_, steps_, begun, e, p.tensor.elements[i].p);
      if (ema_.dtype == GA_BF16) e = rounded(e, GA_BF16, true);
    }
  }

  // ---- The comparison ----

  // The library must not be finite where the reference is not. An infinite error allows any number.
  testing::AssertionResult right(double got, const ref::Real& want, double rounding = 0) const {
    if (!std::isfinite(want.value)) {
      if (!std::isfinite(got)) return testing::AssertionSuccess();
    } else {
      const double tolerance = ref::tolerance(want) + rounding;
      if (!std::isfinite(tolerance) || std::abs(got - want.value) <= tolerance) {
        return testing::AssertionSuccess();
      }
      return testing::AssertionFailure() << got << ", not " << want.value << " to " << tolerance;
    }
    return testing::AssertionFailure() << got << ", not " << want.value;
  }
  void expect(double got, const ref::Real& want, const char* what) const {
    if (is(kPolicy, kIgnore) && std::isnan(got)) return;  // the norm is not checked
    EXPECT_TRUE(right(got, want)) << what << " of window " << window_;
  }

  void compare() {
    for (size_t i = 0; i < params_.size(); ++i) {
      const Parameter& p = params_[i];
      EXPECT_TRUE(p.data.canaries());
      for (size_t j = 0; j < p.size(); ++j) {
        const double got = p.data.get(static_cast<int64_t>(j));
        const double rounding = narrow() ? format(dtype()).spacing(got) / 2 : 0;
        ASSERT_TRUE(right(got, p.tensor.elements[j].p, rounding))
            << "parameter " << i << "[" << j << "] after window " << window_;
      }
      if (is(kAverage, kNoAverage)) continue;
      Tensor out(GA_F64, p.data.count());
      EXPECT_OK(ga_ema_copy_to(ctx_, p.id, out.data(), GA_F64));
      for (size_t j = 0; j < p.size(); ++j) {
        const auto at = static_cast<int64_t>(j);
        if (p.average.empty()) {
          ASSERT_EQ(out.get(at), p.data.get(at));
        } else {
          ASSERT_TRUE(right(out.get(at), p.average[j]))
              << "EMA " << i << "[" << j << "] after window " << window_;
        }
      }
    }
  }

  const Case case_;
  const Stops stops_;
  const int once_;
  int occasions_ = 0;
  const ref::Arithmetic arithmetic_;
  ga_config config_ = {};
  ga_clip clip_ = {};
  ga_ema ema_ = {};
  ga_context* ctx_ = nullptr;
  ga_status status_ = GA_OK;
  std::string sentence_;
  std::vector<Group> groups_;
  std::vector<Parameter> params_;
  std::vector<std::vector<uint8_t>> bits_;
  Random random_{7};
  // Counters over all windows.
  int64_t window_ = 0, windows_ = 0, steps_ = 0, all_dropped_ = 0, growth_ = 0;
  double scale_ = 1;
  bool all_known_ = true;  // this class can predict the loss scale
  ref::Noise noise_;
  // The open window.
  double weight_ = 0;
  int weighted_ = 0, dropped_ = 0;
  bool nonfinite_ = false;
  ref::Real squares_by_weight_, factor_;
};

}  // namespace ga::test
