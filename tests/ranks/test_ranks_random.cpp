// SPDX-License-Identifier: Apache-2.0
//
// Random programs over two or three ranks, and over other numbers after a load, compared with one context
// that gets all of their micro-batches. After every window all ranks have the same bits, and the values of
// the context that is alone.
//
// One number, the seed, determines a program. A failure prints the seed and the program;
// GA_RANKS_SEED=<number> runs that program alone, GA_RANKS_COUNT=<number> sets how many each case runs.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <mutex>
#include <numeric>
#include <optional>
#include <sstream>

#include "ranks.hpp"

namespace ga::test {
namespace {

const int kPrograms = is_sanitized() ? 6 : 200;
constexpr int kCases = 16;

// ---- A program ----------------------------------------------------------------------------------

struct TensorOf {
  ref::Shape shape;
  ga_group group;
  ga_rows rows;
  bool maximum;
};

struct GroupOf {
  NamedOptimizer optimizer;
  std::optional<ga_clip> clip;
};

struct MicroOf {
  uint64_t number;
  int64_t owner;  // the rank, modulo the number of ranks
  double weight;
  int64_t bad;  // the tensor with a NaN; -1: none
};

enum class End { kStep, kDiscard, kSomeDiscard };

struct WindowOf {
  std::vector<MicroOf> micros;
  End end;
  // Before micro-batch number `moved_at`, the state is saved and loaded onto so many ranks; 0: it is not.
  int32_t moved_to;
  size_t moved_at;
  // Before the window.
  std::vector<std::pair<size_t, bool>> frozen;
  double lr;  // of group 0; 0: stays
  std::optional<ga_clip> clip;
};

struct LayerOf {
  ga_bn_mode mode;
  int64_t channels;
  bool frozen;
};

struct Program {
  uint64_t seed;
  bool wide;      // f64
  bool prepares;  // all arrays are made before the first window
  int32_t ranks;
  ga_config config;
  std::vector<GroupOf> groups;
  std::vector<TensorOf> tensors;
  std::optional<ga_clip> clip;
  std::optional<ga_loss_scaler> scaler;
  std::optional<ga_ema> ema;
  std::vector<LayerOf> layers;
  ga_comm_options options;
  std::vector<WindowOf> windows;
  // How far apart numbers may be, see tolerance().
  double tolerance;
};

class Chance {
 public:
  explicit Chance(uint64_t seed) : random_(seed) {}
  bool one_in(int64_t n) { return random_.below(n) == 0; }
  int64_t below(int64_t n) { return random_.below(n); }
  double unit() { return random_.unit(); }
  template <class T>
  T of(std::initializer_list<T> list) {
    return *(list.begin() + random_.below(static_cast<int64_t>(list.size())));
  }
  Random& random() { return random_; }

 private:
  Random random_;
};

// A number in [0, 2^64) that follows from these.
uint64_t mixed(std::initializer_list<uint64_t> numbers) {
  uint64_t state = 0;
  for (const uint64_t n : numbers) state = Random(state ^ n).bits();
  return state;
}

class Planner {
 public:
  explicit Planner(uint64_t seed) : chance_(seed) { p_.seed = seed; }

  Program plan() {
    p_.wide = !chance_.one_in(3);
    p_.ranks = static_cast<int32_t>(2 + chance_.below(2));
    configure();
    communicate();
    add_groups();
    add_tensors();
    if (!on_device() && chance_.one_in(6) && p_.config.nonfinite != GA_NONFINITE_DROP_MICRO) {
      p_.config.eager = 1;
      p_.config.eager_threads = static_cast<int32_t>(chance_.below(2));
    }
    if (chance_.one_in(4)) {
      p_.ema.emplace();
      EXPECT_OK(ga_ema_init(&*p_.ema, sizeof *p_.ema));
      p_.ema->decay = 0.75;
      p_.ema->kind = chance_.of({GA_EMA_TORCH, GA_EMA_KARRAS});
    }
    // An EMA begins when its parameter has arrays, which ranks without shards get in ga_context_set_comm.
    p_.prepares = p_.ema || chance_.one_in(3);
    add_layers();
    add_windows();
    p_.tolerance = tolerance();
    return p_;
  }

 private:
  void configure() {
    ga_config& c = p_.config;
    c = config();
    c.nonfinite = chance_.of({GA_NONFINITE_SKIP_STEP, GA_NONFINITE_DROP_MICRO,
                              GA_NONFINITE_DROP_MICRO, GA_NONFINITE_IGNORE, GA_NONFINITE_FAIL});
    c.gradient_kind = chance_.one_in(4) ? GA_GRADIENT_SUM : GA_GRADIENT_MEAN;
    c.reduce = chance_.one_in(5) ? GA_REDUCE_SUM : GA_REDUCE_MEAN;
    c.missing = chance_.one_in(4) ? GA_MISSING_ZERO : GA_MISSING_SKIP;
    c.measure_norm = static_cast<int32_t>(chance_.below(2));
    c.seed = 7;
    if (chance_.one_in(4) && c.gradient_kind == GA_GRADIENT_MEAN && c.reduce == GA_REDUCE_MEAN)
      c.accumulation = GA_ACCUMULATE_RUNNING_MEAN;
    c.noise_scale = chance_.one_in(4);
    c.loss_scale = chance_.of({1.0, 1.0, 8.0, -0.5});
    if (chance_.one_in(3)) {
      p_.scaler.emplace();
      EXPECT_OK(ga_loss_scaler_init(&*p_.scaler, sizeof *p_.scaler));
      p_.scaler->initial_scale = 64;
      p_.scaler->growth_interval = 2;
    }
    if (!chance_.one_in(4)) p_.clip = a_clip(true);
  }

  ga_clip a_clip(bool units) {
    ga_clip c = clip(
        chance_.of({GA_CLIP_NONE, GA_CLIP_GLOBAL, GA_CLIP_GLOBAL, GA_CLIP_PER_TENSOR, GA_CLIP_AGC}),
        0.3 + chance_.unit(), chance_.of({GA_FLAVOR_TORCH, GA_FLAVOR_KERAS}));
    if (!units && c.scope == GA_CLIP_AGC) c.scope = GA_CLIP_GLOBAL;
    if (!chance_.one_in(3)) c.max_value = 0.05 + 0.4 * chance_.unit();
    c.agc_factor = 0.2;
    if (chance_.one_in(5)) c.when = GA_CLIP_WHEN_MICRO;
    return c;
  }
  bool by_micro() const {
    bool any = p_.clip && p_.clip->when == GA_CLIP_WHEN_MICRO;
    for (const GroupOf& g : p_.groups) any = any || (g.clip && g.clip->when == GA_CLIP_WHEN_MICRO);
    return any;
  }
  bool defers() const { return by_micro() || p_.config.nonfinite == GA_NONFINITE_DROP_MICRO; }

  void communicate() {
    ga_comm_options& o = p_.options;
    o = comm_options();
    o.shard = chance_.one_in(2) ? GA_SHARD_OPTIMIZER : GA_SHARD_NONE;
    o.overlap = !on_device() && chance_.one_in(3);
    o.check_every = chance_.of({0, 1, 1, 2});
  }

  void add_groups() {
    const auto list = named_optimizers([&](const OptimizerRow& row, const ga_optimizer& o) {
      return o.centered == 0 && (p_.wide ? !row.matrices_only : !row.by_sign) &&
             (!row.matrices_only || has_onednn());
    });
    const int64_t count = 1 + chance_.below(3);
    for (int64_t k = 0; k < count; ++k) {
      GroupOf g = {list[static_cast<size_t>(chance_.below(static_cast<int64_t>(list.size())))], {}};
      ga_optimizer& o = g.optimizer.optimizer;
      // So that no small gradient decides by its rounding error where a parameter goes.
      if (o.eps > 0 && o.kind != GA_OPTIMIZER_ADAFACTOR && o.kind != GA_OPTIMIZER_LARS)
        o.eps = std::max(o.eps, p_.wide ? 1e-2 : 0.1);
      if (chance_.one_in(4)) g.clip = a_clip(true);
      p_.groups.push_back(g);
    }
    if (chance_.one_in(2)) {
      p_.groups.push_back({{"External", optimizer(GA_OPTIMIZER_EXTERNAL)}, {}});
      if (chance_.one_in(3)) p_.groups.back().clip = a_clip(true);
    }
  }

  void add_tensors() {
    const bool rows =
        p_.config.noise_scale == 0 && !by_micro() && p_.config.accumulation == GA_ACCUMULATE_PLAIN;
    const int64_t large = chance_.one_in(5) ? 0 : -1;
    for (int64_t i = 0, count = 3 + chance_.below(4); i < count; ++i) {
      TensorOf t = {};
      t.group = static_cast<ga_group>(chance_.below(static_cast<int64_t>(p_.groups.size())));
      const ga_optimizer& o = p_.groups[static_cast<size_t>(t.group)].optimizer.optimizer;
      const auto row = std::find_if(optimizer_rows().begin(), optimizer_rows().end(),
                                    [&](const OptimizerRow& r) { return r.kind == o.kind; });
      const bool known = row != optimizer_rows().end();
      const int64_t rank = known && row->matrices_only ? 2 : chance_.below(4);
      for (int64_t d = 0; d < rank; ++d) t.shape.push_back(1 + chance_.below(7));
      if (i == large) t.shape = {p_.wide ? 400 : 700, 101};
      if (rows && !t.shape.empty() && chance_.one_in(2)) {
        t.rows = GA_ROWS_DENSE;
        if (known && row->lazy(o) && !on_device() && chance_.one_in(2)) t.rows = GA_ROWS_LAZY;
      }
      t.maximum = o.kind == GA_OPTIMIZER_EXTERNAL && t.rows == GA_ROWS_NONE && chance_.one_in(2);
      p_.tensors.push_back(t);
    }
  }

  void add_layers() {
    if (!chance_.one_in(3)) return;
    LayerOf layer = {GA_BN_MICRO, 1 + chance_.below(3), chance_.one_in(6)};
    if (!defers()) layer.mode = chance_.of({GA_BN_MICRO, GA_BN_CUMULATIVE, GA_BN_WINDOW});
    p_.layers.push_back(layer);
  }

  void add_windows() {
    uint64_t number = 0;
    const bool layers = !p_.layers.empty() && p_.layers[0].mode == GA_BN_WINDOW;
    for (int64_t w = 0, count = 3 + chance_.below(4); w < count; ++w) {
      WindowOf window = {};
      for (int64_t k = 0, micros = chance_.below(7); k < micros; ++k) {
        MicroOf m = {number++, chance_.below(6), chance_.of({1.0, 2.0, 4.0, 0.5, 3.0, 0.0, 7.0}),
                     -1};
        const bool checked = p_.config.nonfinite != GA_NONFINITE_IGNORE;
        const int64_t often = p_.config.nonfinite == GA_NONFINITE_DROP_MICRO ? 4 : 25;
        if (checked && chance_.one_in(often))
          m.bad = chance_.below(static_cast<int64_t>(p_.tensors.size()));
        window.micros.push_back(m);
      }
      window.end = !chance_.one_in(6)                 ? End::kStep
                   : on_device() || chance_.one_in(2) ? End::kDiscard
                                                      : End::kSomeDiscard;
      if (chance_.one_in(4)) {
        window.moved_to = static_cast<int32_t>(1 + chance_.below(4));
        const auto most = static_cast<int64_t>(window.micros.size());
        window.moved_at = layers ? 0 : static_cast<size_t>(chance_.below(most + 1));
      }
      for (size_t i = 0; i < p_.tensors.size(); ++i)
        if (chance_.one_in(6)) window.frozen.push_back({i, chance_.one_in(2)});
      if (chance_.one_in(5)) window.lr = 0.01 + 0.05 * chance_.unit();
      if (p_.clip && p_.clip->scope != GA_CLIP_AGC && chance_.one_in(5)) {
        window.clip = a_clip(false);
        window.clip->when = p_.clip->when;
      }
      p_.windows.push_back(window);
    }
  }

  // Both sides add the same numbers in another order: each sum is off by at most a rounding error for every
  // number in it, of the largest sum of magnitudes. A step multiplies that by its gain: 1 / eps for what is
  // divided by a root of squares, and more where norms of a layer, or Newton-Schulz iterations, follow.
  double tolerance() const {
    const double unit = p_.wide ? 0x1p-53 : 0x1p-24;
    double most = 0;
    for (const WindowOf& w : p_.windows) {
      double weight = 0;
      for (const MicroOf& m : w.micros) weight += std::max(m.weight, 1.0);
      most = std::max(most, weight);
    }
    const double magnitude = p_.config.reduce == GA_REDUCE_SUM ? most : 1;
    double gain = 1;
    for (const GroupOf& g : p_.groups) {
      const ga_optimizer& o = g.optimizer.optimizer;
      double of = o.eps > 0 ? 1 / std::max(o.eps, p_.wide ? 1e-2 : 0.1) : 1;
      if (o.kind == GA_OPTIMIZER_ADAFACTOR || o.kind == GA_OPTIMIZER_LARS) of = 1e3;
      if (o.kind == GA_OPTIMIZER_LAMB) of *= 10;
      if (o.kind == GA_OPTIMIZER_MUON) of = 500;
      gain = std::max(gain, of * std::max(o.lr, 0.05));
    }
    constexpr double kTerms = 16;  // micro-batches, ranks, contributions
    return unit * kTerms * magnitude * gain * static_cast<double>(p_.windows.size());
  }

  Chance chance_;
  Program p_ = {};
};

std::string described(const Program& p) {
  std::ostringstream out;
  out << "GA_RANKS_SEED=" << p.seed << ": " << p.ranks << " ranks, " << (p.wide ? "f64" : "f32")
      << ", nonfinite " << p.config.nonfinite << " kind " << p.config.gradient_kind << " reduce "
      << p.config.reduce << " missing " << p.config.missing << " accumulation "
      << p.config.accumulation << " noise " << p.config.noise_scale << " loss_scale "
      << p.config.loss_scale << " eager " << p.config.eager << "/" << p.config.eager_threads
      << " shard " << p.options.shard << " overlap " << p.options.overlap << " check_every "
      << p.options.check_every << (p.prepares ? " prepared" : "") << (p.scaler ? " scaler" : "")
      << (p.ema ? " ema" : "") << "\n";
  const auto clip = [&](const std::optional<ga_clip>& c) {
    if (c)
      out << " clip scope " << c->scope << " flavor " << c->flavor << " when " << c->when
          << " norm " << c->max_norm << " value " << c->max_value;
  };
  clip(p.clip);
  for (const GroupOf& g : p.groups) {
    out << "\ngroup " << g.optimizer.name;
    clip(g.clip);
  }
  for (const TensorOf& t : p.tensors) {
    out << "\ntensor [";
    for (const int64_t d : t.shape) out << d << " ";
    out << "] group " << t.group << " rows " << t.rows << (t.maximum ? " maximum" : "");
  }
  for (const LayerOf& l : p.layers)
    out << "\nlayer mode " << l.mode << " channels " << l.channels << (l.frozen ? " frozen" : "");
  for (const WindowOf& w : p.windows) {
    out << "\nwindow";
    for (const auto& [i, on] : w.frozen) out << (on ? " freeze " : " unfreeze ") << i;
    if (w.lr > 0) out << " lr " << w.lr;
    clip(w.clip);
    for (const MicroOf& m : w.micros)
      out << " (#" << m.number << " rank~" << m.owner << " w" << m.weight
          << (m.bad >= 0 ? " bad" + std::to_string(m.bad) : "") << ")";
    if (w.moved_to > 0) out << " moved at " << w.moved_at << " to " << w.moved_to;
    out << (w.end == End::kStep ? " step" : w.end == End::kDiscard ? " discard" : " one discards");
  }
  return out.str();
}

// ---- Running it ----------------------------------------------------------------------------------

// What a context has after a window, as numbers with the bits of the original.
struct After {
  ga_status status = GA_OK;
  std::string error;
  ga_step_result result = {};
  std::vector<std::vector<double>> numbers;  // parameters, delivered gradients, EMAs, statistics
};

bool same_bits_of(const std::vector<double>& a, const std::vector<double>& b) {
  return a.size() == b.size() && memcmp(a.data(), b.data(), a.size() * sizeof(double)) == 0;
}

// A context and the memory of its program.
template <class T>
class Host {
 public:
  explicit Host(const Program& p) : p_(p), ctx_(p.config) {
    for (size_t i = 0; i < p.tensors.size(); ++i) {
      Random random(mixed({p.seed, 1, i}));
      values_.emplace_back(static_cast<size_t>(ref::count_of(p.tensors[i].shape)));
      for (T& x : values_.back()) x = static_cast<T>(random.signed_unit());
    }
    for (const GroupOf& g : p.groups) ctx_.group(g.optimizer.optimizer);
    for (size_t i = 0; i < p.tensors.size(); ++i) {
      ga_param_options o;
      EXPECT_OK(ga_param_options_init(&o, sizeof o));
      o.rows = p.tensors[i].rows;
      o.reduce = p.tensors[i].maximum ? int32_t{GA_REDUCE_MAX} : 0;
      ctx_.param(p.tensors[i].group, "p" + std::to_string(i), values_[i].data(), p.tensors[i].shape,
                 &o);
    }
    if (p.clip) {
      EXPECT_OK(ga_context_set_clip(ctx_, &*p.clip));
    }
    for (size_t k = 0; k < p.groups.size(); ++k)
      if (p.groups[k].clip) {
        EXPECT_OK(ga_group_set_clip(ctx_, static_cast<ga_group>(k), &*p.groups[k].clip));
      }
    if (p.scaler) {
      EXPECT_OK(ga_context_set_loss_scaler(ctx_, &*p.scaler));
    }
    if (p.ema) {
      EXPECT_OK(ga_context_set_ema(ctx_, &*p.ema));
    }
    for (const LayerOf& l : p.layers) {
      ga_bn_options o;
      EXPECT_OK(ga_bn_options_init(&o, sizeof o, GA_FLAVOR_TORCH));
      o.mode = l.mode;
      o.dtype = GA_F64;
      o.biased = static_cast<int32_t>(p.seed % 2);
      EXPECT_OK(ga_bn_add(ctx_, "bn", l.channels, -1, -1, &o, nullptr));
      if (l.frozen) {
        EXPECT_OK(ga_bn_set_frozen(ctx_, 0, 1));
      }
    }
  }

  ga_context* context() { return ctx_; }

  void prepare() {
    if (p_.prepares) {
      EXPECT_OK(ga_prepare(ctx_));
    }
  }

  // Options of now, for a context that goes on from the state of another one.
  void before(const WindowOf& w) {
    for (const auto& [i, on] : w.frozen)
      EXPECT_OK(ga_param_set_frozen(ctx_, static_cast<ga_param>(i), on));
    if (w.lr > 0) {
      EXPECT_OK(ga_group_set_lr(ctx_, 0, w.lr));
    }
    if (w.clip) {
      EXPECT_OK(ga_context_set_clip(ctx_, &*w.clip));
    }
  }

  // The passes of the layers over the micro-batches to come, where they are normalised together.
  void pass(const std::vector<MicroOf>& micros) {
    if (!has_window_layer()) return;
    for (const MicroOf& m : micros) {
      const std::vector<double> x = activations(m);
      EXPECT_OK(ga_bn_accumulate(ctx_, 0, x.data(), kSamples, 1));
    }
    if (p_.layers[0].frozen) return;
    const ga_status status = ga_bn_finalize(ctx_, 0);
    EXPECT_TRUE(status == GA_OK || status == GA_ERROR_INVALID_STATE) << ga_last_error();
    for (const MicroOf& m : micros) {
      const std::vector<double> x = activations(m);
      std::vector<double> y(x.size());
      EXPECT_OK(ga_bn_forward(ctx_, 0, x.data(), kSamples, 1, y.data()));
      outputs_[m.number] = y;
    }
  }

  // last: nothing more comes to the window from this context.
  void contribute(const MicroOf& m, bool last, bool ready) {
    double scale = 1;
    EXPECT_OK(ga_loss_scale(ctx_, &scale, nullptr));
    if (!p_.layers.empty() && !has_window_layer()) {
      const std::vector<double> x = activations(m);
      EXPECT_OK(ga_bn_accumulate(ctx_, 0, x.data(), kSamples, 1));
    }
    EXPECT_OK(ga_micro_begin(ctx_, -1, m.weight, MicroOptions(0, last ? GA_MICRO_LAST : 0)));
    std::vector<size_t> order(p_.tensors.size());
    std::iota(order.rbegin(), order.rend(), 0);
    if (!ready) std::iota(order.begin(), order.end(), 0);
    std::vector<std::vector<T>> kept;  // until the micro-batch ends
    std::vector<std::vector<int64_t>> indices;
    for (const size_t i : order) {
      contribute(m, i, scale, kept, indices);
      const auto id = static_cast<ga_param>(i);
      if (last && ready && mixed({m.number, 5, i}) % 4 != 0) {
        EXPECT_OK(ga_params_ready(ctx_, &id, 1));
      }
    }
    EXPECT_OK(ga_micro_end(ctx_));
  }

  After end(End end, bool discards) {
    After a;
    a.result.struct_size = sizeof a.result;
    if (end == End::kStep || (end == End::kSomeDiscard && !discards)) {
      a.status = ga_step(ctx_, &a.result);
      if (a.status != GA_OK) a.error = ga_last_error();
      if (a.result.outcome == GA_STEP_PENDING) {
        EXPECT_OK(ga_step_result_get(ctx_, 0, 1, &a.result));
      }
      a.result.eager = a.result.eager_waited = a.result.eager_redone = 0;
      if (a.status == GA_ERROR_NONFINITE) {
        EXPECT_OK(ga_discard(ctx_));
      }
    } else {
      a.status = ga_discard(ctx_);
      if (a.status != GA_OK) a.error = ga_last_error();
    }
    for (const auto& v : values_) a.numbers.emplace_back(v.begin(), v.end());
    for (size_t i = 0; i < p_.tensors.size(); ++i) {
      const auto id = static_cast<ga_param>(i);
      const auto n = values_[i].size();
      std::vector<double> numbers;
      const void* gradient = nullptr;
      int32_t dtype = 0;
      int64_t count = 0;
      const bool external =
          p_.groups[static_cast<size_t>(p_.tensors[i].group)].optimizer.optimizer.kind ==
          GA_OPTIMIZER_EXTERNAL;
      if (external && ga_gradient(ctx_, id, &gradient, &dtype, &count) == GA_OK) {
        const auto g = from_library<T>(gradient, count);
        numbers.assign(g.begin(), g.end());
      }
      a.numbers.push_back(numbers);
      numbers.clear();
      if (p_.ema) {
        numbers.resize(n);
        EXPECT_OK(ga_ema_copy_to(ctx_, id, numbers.data(), GA_F64));
      }
      a.numbers.push_back(numbers);
    }
    for (const LayerOf& l : p_.layers) {
      std::vector<double> mean(static_cast<size_t>(l.channels)), variance(mean);
      int64_t steps = 0;
      EXPECT_OK(ga_bn_running(ctx_, 0, mean.data(), variance.data(), GA_F64, &steps));
      mean.insert(mean.end(), variance.begin(), variance.end());
      mean.push_back(static_cast<double>(steps));
      a.numbers.push_back(mean);
    }
    return a;
  }

  std::vector<char> save() {
    size_t size = 0;
    EXPECT_OK(ga_save_to_memory(ctx_, nullptr, nullptr, 0, &size));
    std::vector<char> file(size);
    EXPECT_OK(ga_save_to_memory(ctx_, nullptr, file.data(), size, &size));
    return file;
  }
  void load(const std::vector<char>& file) {
    EXPECT_OK(ga_load_from_memory(ctx_, file.data(), file.size(), nullptr));
  }

  const std::map<uint64_t, std::vector<double>>& outputs() const { return outputs_; }

 private:
  static constexpr int64_t kSamples = 3;

  bool has_window_layer() const { return !p_.layers.empty() && p_.layers[0].mode == GA_BN_WINDOW; }

  std::vector<double> activations(const MicroOf& m) const {
    Random random(mixed({p_.seed, 2, m.number}));
    std::vector<double> x(static_cast<size_t>(kSamples * p_.layers[0].channels));
    for (double& v : x) v = 3 * random.signed_unit() + 1;
    return x;
  }

  void contribute(const MicroOf& m, size_t i, double scale, std::vector<std::vector<T>>& kept,
                  std::vector<std::vector<int64_t>>& indices) {
    const TensorOf& t = p_.tensors[i];
    const bool bad = m.bad == static_cast<int64_t>(i);
    Random random(mixed({p_.seed, 3, m.number, i}));
    if (random.below(5) < 2 && !bad) return;  // it has no gradient
    const auto id = static_cast<ga_param>(i);
    const int64_t count = ref::count_of(t.shape);
    const auto fill = [&](int64_t n) {
      kept.emplace_back(static_cast<size_t>(n));
      for (T& x : kept.back()) x = static_cast<T>(scale * random.signed_unit());
      if (bad && n > 0) kept.back()[static_cast<size_t>(n) / 2] = NAN;
      return kept.back().data();
    };
    const bool rows = t.rows != GA_ROWS_NONE && count > 0 && random.below(4) != 0;
    if (!rows) {
      EXPECT_OK(ga_accumulate_part(ctx_, id, fill(count)));
      return;
    }
    const int64_t n = 1 + random.below(4);
    indices.emplace_back();
    for (int64_t k = 0; k < n; ++k) indices.back().push_back(random.below(t.shape[0]));
    EXPECT_OK(ga_accumulate_rows(ctx_, id, indices.back().data(), GA_I64, n,
                                 fill(n * (count / t.shape[0]))));
  }

  const Program& p_;
  Context ctx_;
  std::vector<std::vector<T>> values_;
  std::map<uint64_t, std::vector<double>> outputs_;
};

struct Trace {
  std::vector<After> windows;
  std::map<uint64_t, std::vector<double>> outputs;
};

// The micro-batches of a window that rank r of `ranks` brings before and after the window moves.
std::vector<MicroOf> share(const WindowOf& w, size_t from, size_t to, int32_t r, int32_t ranks) {
  std::vector<MicroOf> list;
  for (size_t k = from; k < to; ++k)
    if (w.micros[k].owner % ranks == r) list.push_back(w.micros[k]);
  return list;
}
size_t moved_at(const WindowOf& w) { return w.moved_to > 0 ? w.moved_at : w.micros.size(); }

template <class T>
Trace run_alone(const Program& p) {
  Trace trace;
  Host<T> host(p);
  host.prepare();
  int32_t ranks = p.ranks;
  for (const WindowOf& w : p.windows) {
    host.before(w);
    if (w.moved_to > 0 && w.moved_at == 0) ranks = w.moved_to;
    std::vector<MicroOf> micros;
    const size_t cut = moved_at(w);
    for (const bool second : {false, true}) {
      if (second && w.moved_to > 0) ranks = w.moved_to;
      for (int32_t r = 0; r < ranks; ++r)
        for (const MicroOf& m :
             second ? share(w, cut, w.micros.size(), r, ranks) : share(w, 0, cut, r, ranks))
          micros.push_back(m);
    }
    host.pass(micros);
    for (const MicroOf& m : micros) host.contribute(m, false, false);
    trace.windows.push_back(host.end(w.end == End::kSomeDiscard ? End::kDiscard : w.end, true));
  }
  trace.outputs = host.outputs();
  return trace;
}

// By rank; of the ranks that there are at the end of each window.
template <class T>
class OverRanks {
 public:
  explicit OverRanks(const Program& p) : p_(p), after_(p.windows.size()) {}

  void run() {
    int32_t ranks = p_.ranks;
    for (size_t w = 0; w < p_.windows.size(); ranks = moved_to_) w = run_on(ranks, w);
  }

  const std::vector<std::map<int32_t, After>>& after() const { return after_; }
  const std::map<uint64_t, std::vector<double>>& outputs() const { return outputs_; }
  // Where the bytes that a rank has saved differ from those of another; empty: nowhere.
  const std::string& difference_of_files() const { return difference_of_files_; }

 private:
  // From where window number `first` begins, or goes on after it has moved, until some window moves.
  // Returns the window to go on with.
  size_t run_on(int32_t ranks, size_t first) {
    const bool goes_on = !files_.empty();
    const std::vector<char> file = goes_on ? files_[0] : std::vector<char>();
    size_t next = p_.windows.size();
    for (size_t w = first + goes_on; w < p_.windows.size() && next == p_.windows.size(); ++w)
      if (p_.windows[w].moved_to > 0) next = w;
    moved_to_ = next < p_.windows.size() ? p_.windows[next].moved_to : ranks;
    std::vector<std::vector<char>> files(static_cast<size_t>(ranks));
    const auto body = [&](int32_t r, ga_comm* comm) {
      Host<T> host(p_);
      if (goes_on) {  // options that no file has
        for (size_t w = 0; w <= first; ++w) host.before(p_.windows[w]);
      }
      if (comm) {
        const ga_status status = ga_context_set_comm(host.context(), comm, &p_.options);
        EXPECT_OK(status);
        if (status != GA_OK) failed_ = true;
      }
      if (goes_on)
        host.load(file);
      else
        host.prepare();
      for (size_t w = first; w < p_.windows.size(); ++w) {
        const WindowOf& window = p_.windows[w];
        const bool second = goes_on && w == first;
        if (!second) host.before(window);
        const bool leaves = w == next;
        const size_t cut = moved_at(window);
        const auto micros = second ? share(window, cut, window.micros.size(), r, ranks)
                                   : share(window, 0, cut, r, ranks);
        if (!leaves) host.pass(micros);
        for (size_t k = 0; k < micros.size(); ++k) {
          const bool last = !leaves && k + 1 == micros.size();
          host.contribute(micros[k], last, p_.options.overlap != 0 || p_.config.eager != 0);
        }
        if (leaves) {
          files[static_cast<size_t>(r)] = host.save();
          break;
        }
        const After a = host.end(window.end, r == static_cast<int32_t>(w) % ranks);
        const std::lock_guard<std::mutex> lock(mutex_);
        after_[w][r] = a;
        if (a.status != GA_OK && a.status != GA_ERROR_NONFINITE) {
          failed_ = true;
          break;
        }
      }
      const std::lock_guard<std::mutex> lock(mutex_);
      for (const auto& [number, y] : host.outputs()) outputs_[number] = y;
    };
    on_ranks(
        ranks, [&](int32_t r, ga_comm* comm) { body(r, comm); }, 20);
    if (failed_) return p_.windows.size();
    if (next < p_.windows.size()) {
      for (const auto& f : files) compare(f, files[0]);
      files_ = files;
    }
    return next;
  }

  void compare(const std::vector<char>& a, const std::vector<char>& b) {
    if (a == b) return;
    const auto n = static_cast<std::ptrdiff_t>(std::min(a.size(), b.size()));
    constexpr std::ptrdiff_t kOwnChecksum = 120;  // of the header
    const auto from = std::min(n, kOwnChecksum);
    const auto at =
        std::mismatch(a.begin() + from, a.begin() + n, b.begin() + from).first - a.begin();
    const auto first = static_cast<size_t>(std::max<std::ptrdiff_t>(at - 60, 0));
    const size_t count = std::min<size_t>(90, static_cast<size_t>(n) - first);
    difference_of_files_ = std::string(&a[first], count) + " | " + std::string(&b[first], count);
  }

  const Program& p_;
  std::mutex mutex_;
  std::vector<std::map<int32_t, After>> after_;
  std::map<uint64_t, std::vector<double>> outputs_;
  std::vector<std::vector<char>> files_;
  std::string difference_of_files_;
  std::atomic<bool> failed_{false};
  int32_t moved_to_ = 0;
};

// ---- Comparing -----------------------------------------------------------------------------------

// How many windows of the programs were what a test of ranks is about.
struct Seen {
  int applied = 0, clipped = 0, dropped = 0, discarded = 0, moved_open = 0;
};

class Comparison {
 public:
  Comparison(const Program& p, Seen& seen) : p_(p), seen_(seen) {}

  // What differs first; empty: nothing.
  template <class T>
  std::string run() {
    const Trace alone = run_alone<T>(p_);
    OverRanks<T> ranks(p_);
    ranks.run();
    for (size_t w = 0; w < p_.windows.size(); ++w) {
      const auto& all = ranks.after()[w];
      if (all.empty()) return at(w) + "no rank got there";
      const After& first = all.begin()->second;
      count(w, first);
      for (const auto& [r, a] : all) {
        const std::string who = at(w) + "rank " + std::to_string(r) + ": ";
        if (std::string d = of_results(a, alone.windows[w], w); !d.empty()) return who + d;
        for (size_t k = 0; k < a.numbers.size(); ++k)
          if (!same_bits_of(a.numbers[k], first.numbers[k]))
            return who + "array " + std::to_string(k) + " is not that of the first rank";
        if (std::string d = of_numbers(a, alone.windows[w]); !d.empty()) return who + d;
      }
    }
    if (const std::string& d = ranks.difference_of_files(); !d.empty())
      return "ranks have saved different bytes: " + d;
    for (const auto& [number, y] : alone.outputs) {
      const auto theirs = ranks.outputs().find(number);
      if (theirs == ranks.outputs().end()) continue;
      for (size_t j = 0; j < y.size(); ++j)
        if (!near(y[j], theirs->second[j], 1e-11))
          return "the layer's output of micro-batch " + std::to_string(number);
    }
    return "";
  }

 private:
  void count(size_t w, const After& a) {
    const WindowOf& window = p_.windows[w];
    if (window.end != End::kStep || a.status != GA_OK)
      ++seen_.discarded;
    else if (a.result.outcome == GA_STEP_APPLIED)
      ++seen_.applied;
    seen_.clipped += window.end == End::kStep && a.result.clip_factor < 1;
    seen_.dropped += a.result.window_dropped > 0;
    seen_.moved_open += window.moved_to > 0 && window.moved_at > 0;
  }

  static std::string at(size_t w) { return "window " + std::to_string(w) + ", "; }

  static bool near(double a, double b, double tolerance) {
    if (std::isnan(a) || std::isnan(b)) return std::isnan(a) && std::isnan(b);
    return a == b || std::abs(a - b) <= tolerance * std::max({1.0, std::abs(a), std::abs(b)});
  }

  std::string of_results(const After& a, const After& alone, size_t w) const {
    const auto differ = [](const char* what, double x, double y) {
      std::ostringstream out;
      out.precision(17);
      out << what << " is " << x << ", alone " << y;
      return out.str();
    };
    const bool one_discards = p_.windows[w].end == End::kSomeDiscard;
    if (a.status != alone.status)
      return differ("the status", a.status, alone.status) + ": " + a.error;
    if (a.status != GA_OK || p_.windows[w].end == End::kDiscard) return "";
    const ga_step_result &x = a.result, &y = alone.result;
    if (one_discards) return "";
    const std::pair<const char*, int64_t ga_step_result::*> counts[] = {
        {"windows", &ga_step_result::windows},
        {"steps", &ga_step_result::steps},
        {"micro_batches", &ga_step_result::micro_batches},
        {"skipped", &ga_step_result::skipped},
        {"dropped", &ga_step_result::dropped},
        {"window_dropped", &ga_step_result::window_dropped}};
    if (x.outcome != y.outcome) return differ("outcome", x.outcome, y.outcome);
    for (const auto& [name, field] : counts)
      if (x.*field != y.*field)
        return differ(name, static_cast<double>(x.*field), static_cast<double>(y.*field));
    const std::pair<const char*, double ga_step_result::*> numbers[] = {
        {"weight", &ga_step_result::weight},
        {"norm", &ga_step_result::norm},
        {"clip_factor", &ga_step_result::clip_factor},
        {"lr", &ga_step_result::lr},
        {"loss_scale", &ga_step_result::loss_scale},
        {"noise_scale", &ga_step_result::noise_scale},
        {"noise_trace", &ga_step_result::noise_trace},
        {"noise_signal", &ga_step_result::noise_signal}};
    const bool finite = x.outcome != GA_STEP_SKIPPED_NONFINITE;
    for (const auto& [name, field] : numbers) {
      const bool norm = field == &ga_step_result::norm;
      if (norm && (!finite || p_.config.measure_norm == 0)) continue;
      const bool noise = name[0] == 'n' && !norm;  // a difference of two sums of squares
      const double tolerance = (p_.wide ? 1e-11 : 3e-6) * (noise ? 1e3 : 1);
      if (!near(x.*field, y.*field, tolerance)) return differ(name, x.*field, y.*field);
    }
    return "";
  }

  std::string of_numbers(const After& a, const After& alone) const {
    for (size_t k = 0; k < a.numbers.size(); ++k) {
      if (a.numbers[k].size() != alone.numbers[k].size())
        return "array " + std::to_string(k) + " is there on one side alone";
      for (size_t j = 0; j < a.numbers[k].size(); ++j) {
        if (near(a.numbers[k][j], alone.numbers[k][j], p_.tolerance)) continue;
        std::ostringstream out;
        out.precision(17);
        out << "array " << k << "[" << j << "] is " << a.numbers[k][j] << ", alone "
            << alone.numbers[k][j] << ", tolerance " << p_.tolerance;
        return out.str();
      }
    }
    return "";
  }

  const Program& p_;
  Seen& seen_;
};

int64_t environment(const char* name, int64_t otherwise) {
  const char* const value = getenv(name);
  return value ? atoll(value) : otherwise;
}

// The values are those of the context that is alone, and the bits those of the other ranks.
class RanksRandom : public testing::TestWithParam<int> {};

TEST_P(RanksRandom, AgreeWithOneContext) {
  const int64_t only = environment("GA_RANKS_SEED", -1);
  const int64_t count = environment("GA_RANKS_COUNT", on_device() ? kPrograms / 8 : kPrograms);
  int failures = 0;
  Seen seen;
  for (int64_t i = 0; i < (only < 0 ? count : 1) && failures < 3; ++i) {
    const int64_t seed = only < 0 ? i * kCases + GetParam() : only;
    if (seed % kCases != GetParam()) return;
    const Program p = Planner(static_cast<uint64_t>(seed)).plan();
    SCOPED_TRACE(described(p));
    Comparison comparison(p, seen);
    const std::string difference = p.wide ? comparison.run<double>() : comparison.run<float>();
    EXPECT_EQ(difference, "");
    failures += HasFailure();
  }
  if (only >= 0 || count < 50) return;
  EXPECT_GT(seen.applied, count);
  EXPECT_GT(seen.clipped, count / 2);
  EXPECT_GT(seen.dropped, count / 5);
  EXPECT_GT(seen.discarded, count / 5);
  EXPECT_GT(seen.moved_open, count / 5);
}

INSTANTIATE_TEST_SUITE_P(Part, RanksRandom, testing::Range(0, kCases));

}  // namespace
}  // namespace ga::test
