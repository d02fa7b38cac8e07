// SPDX-License-Identifier: Apache-2.0
#include "batchnorm.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <string>

#include "error.hpp"
#include "tensor.hpp"

namespace ga {
namespace {

long long ll(int64_t x) { return static_cast<long long>(x); }

double element(const void* data, int32_t dtype, int64_t i) {
  return dtype == GA_F64 ? static_cast<const double*>(data)[i]
                         : static_cast<double>(static_cast<const float*>(data)[i]);
}

void set_element(void* data, int32_t dtype, int64_t i, double x) {
  if (dtype == GA_F64)
    static_cast<double*>(data)[i] = x;
  else
    static_cast<float*>(data)[i] = static_cast<float>(x);
}

void check_statistics_dtype(const char* name, int32_t dtype) {
  if (dtype != GA_F32 && dtype != GA_F64)
    fail(GA_ERROR_INVALID_ARGUMENT, "layer \"%s\": dtype was %d, expected GA_F32 or GA_F64", name,
         dtype);
}

}  // namespace

ga_bn_options default_bn_options(int32_t flavor) {
  if (flavor != GA_FLAVOR_TORCH && flavor != GA_FLAVOR_KERAS)
    fail(GA_ERROR_INVALID_ARGUMENT,
         "flavor was %d, expected GA_FLAVOR_TORCH or GA_FLAVOR_KERAS for batch normalisation",
         flavor);
  const bool keras = flavor == GA_FLAVOR_KERAS;
  ga_bn_options o = {};
  o.struct_size = sizeof o;
  o.layout = keras ? GA_BN_CHANNELS_LAST : GA_BN_CHANNELS_FIRST;
  o.dtype = GA_F32;
  o.biased = keras;
  o.momentum = keras ? 0.01 : 0.1;
  o.eps = keras ? 1e-3 : 1e-5;
  return o;
}

// What the history has of a micro-batch.
struct BatchNorms::Taken {
  int64_t count = -1;  // elements of a channel; -1: there are none
  bool given = false;  // not by ga_bn_forward
};

struct BatchNorms::Layer {
  std::string name;
  int64_t channels;
  ga_param gamma, beta;
  ga_bn_options options;
  size_t input;  // its place in inputs_
  bool frozen = false;
  Buffer block = {};  // of the next three
  BnChannel* state = nullptr;
  void* dgamma = nullptr;
  void* dbeta = nullptr;
  Whole gradient[2] = {};  // dgamma and dbeta as the window takes them, of the parameters there are
  size_t gradient_count = 0;
  State<Moments> history = {};  // see ops/batchnorm.hpp
  int64_t history_size = 0;     // micro-batches that it has room for

  // In this window:
  int64_t index = -1;  // the micro-batch that the layer normalises by; WINDOW: the last one
  std::vector<Taken> taken = {};  // by micro-batch; WINDOW: of the first sweep
  std::vector<char> summed = {};  // micro-batches whose backward sums are in the window
  int64_t sums_of = -1;           // the one whose sums BnChannel has, for its next ga_bn_backward
  bool final = false;             // WINDOW: the first sweep is over; and how far the others are:
  int64_t forwarded = 0, sums = 0;

  bool windowed() const { return options.mode == GA_BN_WINDOW; }
  bool has(int64_t micro) const {
    return micro < static_cast<int64_t>(taken.size()) &&
           taken[static_cast<size_t>(micro)].count >= 0;
  }
  int32_t sum_dtype() const { return options.dtype == GA_F64 ? GA_F64 : GA_F32; }
  Span<const Whole> gradients() const { return {gradient, gradient_count}; }

  void require_unused(const char* what) const {
    if (index >= 0)
      fail(GA_ERROR_INVALID_STATE,
           "%s: layer \"%s\" has statistics of a window that is not over; ga_step or ga_discard "
           "ends it",
           what, name.c_str());
  }
  // Where an output may be: on top of what is read, element for element, or clear of it.
  void check_overlap(const char* what, const void* in, const char* out_name, const void* out,
                     int64_t count) const;
  // That the second sweep is over what the first one was.
  void check_sweep(const char* what, int64_t micro, int64_t count) const;
};

BatchNorms::BatchNorms(const ga_config& config, Backend& backend, Window& window,
                       MemoryRanges& ranges, BnContext& context)
    : config_(config), backend_(backend), window_(window), ranges_(ranges), context_(context) {}

BatchNorms::~BatchNorms() = default;

const BatchNorms::Layer& BatchNorms::layer(ga_bn id) const {
  if (id < 0 || static_cast<size_t>(id) >= layers_.size())
    fail(GA_ERROR_INVALID_ARGUMENT, "bn was %d, but the context has %zu layers", id,
         layers_.size());
  return layers_[static_cast<size_t>(id)];
}

// The layer of a call that gives the backend work; throws if no work can be given now.
BatchNorms::Layer& BatchNorms::layer_for_work(ga_bn id) {
  backend_.capturing();
  return layer(id);
}

// ---- Adding a layer -----------------------------------------------------------------------------

ga_bn BatchNorms::add(const char* name, int64_t channels, ga_param gamma, ga_param beta,
                      const ga_bn_options& o) {
  window_.check_empty("ga_bn_add");
  backend_.capturing();  // throws if no work can be given now
  check_options(name, channels, o);
  check_params(name, channels, gamma, beta);
  check_mode(name, o.mode);
  Layer b = {name, channels, gamma, beta, o, layers_.size()};
  layers_.reserve(layers_.size() + 1);
  allocate(b);
  layers_.push_back(std::move(b));
  context_.set_tables();
  return static_cast<ga_bn>(layers_.size() - 1);
}

void BatchNorms::check_options(const char* name, int64_t channels, const ga_bn_options& o) const {
  if (!name || !*name) fail(GA_ERROR_INVALID_ARGUMENT, "the layer's name was empty");
  for (const Layer& b : layers_)
    if (b.name == name)
      fail(GA_ERROR_INVALID_ARGUMENT, "layer \"%s\": there is one of that name", name);
  if (channels < 1 || channels > INT64_MAX / 4096)
    fail(GA_ERROR_INVALID_ARGUMENT, "layer \"%s\": channels was %lld, expected >= 1", name,
         ll(channels));
  const std::string prefix = std::string("layer \"") + name + "\": ";
  check_choice((prefix + "mode").c_str(), o.mode, GA_BN_CUMULATIVE, "ga_bn_mode");
  check_choice((prefix + "layout").c_str(), o.layout, GA_BN_CHANNELS_LAST, "ga_bn_layout");
  check_choice((prefix + "biased").c_str(), o.biased, 1, "0 or 1");
  if (!dtype_info(o.dtype).floating)
    fail(GA_ERROR_INVALID_ARGUMENT, "layer \"%s\": dtype was %d, expected f32, f64, f16 or bf16",
         name, o.dtype);
  if (!(o.momentum >= 0 && o.momentum <= 1))
    fail(GA_ERROR_INVALID_ARGUMENT, "layer \"%s\": momentum was %g, expected a number in [0, 1]",
         name, o.momentum);
  if (!(o.eps > 0) || !std::isfinite(o.eps))
    fail(GA_ERROR_INVALID_ARGUMENT, "layer \"%s\": eps was %g, expected a finite number > 0", name,
         o.eps);
}

void BatchNorms::check_params(const char* name, int64_t channels, ga_param gamma,
                              ga_param beta) const {
  const auto check = [&](const char* what, ga_param id) {
    if (id == -1) return;
    const BnParam p = context_.bn_param(id);
    if (p.count != channels)
      fail(GA_ERROR_INVALID_ARGUMENT,
           "layer \"%s\": %s, parameter \"%s\", has %lld elements, expected one for each of %lld "
           "channels",
           name, what, p.name, ll(p.count), ll(channels));
  };
  check("gamma", gamma);
  check("beta", beta);
  if (gamma >= 0 && gamma == beta)
    fail(GA_ERROR_INVALID_ARGUMENT, "layer \"%s\": gamma and beta are both parameter \"%s\"", name,
         context_.bn_param(gamma).name);
}

void BatchNorms::check_mode(const char* name, int32_t mode) const {
  if (mode != GA_BN_MICRO && config_.nonfinite == GA_NONFINITE_DROP_MICRO)
    fail(GA_ERROR_UNSUPPORTED,
         "layer \"%s\": not with GA_NONFINITE_DROP_MICRO in %s mode: other micro-batches would "
         "have been normalised with one that is dropped",
         name, mode == GA_BN_WINDOW ? "WINDOW" : "CUMULATIVE");
  if (mode == GA_BN_WINDOW && context_.deferring())  // by GA_CLIP_MICRO, then
    fail(GA_ERROR_UNSUPPORTED,
         "layer \"%s\": not with GA_CLIP_MICRO in WINDOW mode, which opens micro-batches again",
         name);
}

// Gives a new layer its arrays and its place in the table; throws and is as before if that fails.
void BatchNorms::allocate(Layer& b) {
  const auto n = static_cast<size_t>(b.channels);
  const size_t state = n * sizeof(BnChannel);
  const size_t sums = n * static_cast<size_t>(dtype_info(b.sum_dtype()).size);
  std::vector<BnChannel> initial(n);
  for (BnChannel& c : initial) c.running_variance = 1;
  Table<BnInput> inputs = inputs_.grown(backend_, b.input + 1);
  b.block = Buffer(backend_, state + 2 * sums);
  b.state = static_cast<BnChannel*>(b.block.data());
  b.dgamma = reinterpret_cast<char*>(b.state) + state;
  b.dbeta = static_cast<char*>(b.dgamma) + sums;
  backend_.write(b.state, initial.data(), state);
  ranges_.reserve_more(1);
  inputs.edit(b.input) = {b.state, nullptr, b.channels, b.options.momentum, b.options.biased != 0,
                          false};
  inputs.flush(backend_);
  backend_.bn_reserve(b.channels);
  ranges_.add(b.state, b.block.bytes());
  if (b.gamma >= 0) b.gradient[b.gradient_count++] = {b.gamma, b.dgamma, b.sum_dtype()};
  if (b.beta >= 0) b.gradient[b.gradient_count++] = {b.beta, b.dbeta, b.sum_dtype()};
  inputs_.swap(inputs);
}

void BatchNorms::set_frozen(ga_bn id, bool frozen) {
  window_.check_empty("ga_bn_set_frozen");
  Layer& b = layer(id);
  b.require_unused("ga_bn_set_frozen");
  b.frozen = frozen;
  inputs_.edit(b.input).frozen = frozen;
  inputs_.flush(backend_);  // perhaps nothing but replays of a graph follows
}

// ---- What a call is about -----------------------------------------------------------------------

// An array of the program; output: written too.
void BatchNorms::check_array(const Layer& b, const char* what, const void* data, int64_t count,
                             int32_t dtype, bool output) const {
  if (count == 0) return;
  const int32_t size = dtype_info(dtype).size;
  if (!data) fail(GA_ERROR_INVALID_ARGUMENT, "layer \"%s\": %s was NULL", b.name.c_str(), what);
  if (reinterpret_cast<uintptr_t>(data) % static_cast<uintptr_t>(size) != 0)
    fail(GA_ERROR_INVALID_ARGUMENT,
         "layer \"%s\": %s was at address %p, expected a multiple of its element, %d bytes",
         b.name.c_str(), what, data, size);
  if (output && ranges_.overlap(data, count * size))
    fail(GA_ERROR_INVALID_ARGUMENT,
         "layer \"%s\": %s at %p overlaps a parameter or memory of the library", b.name.c_str(),
         what, data);
  if (config_.device != GA_DEVICE_CPU)
    backend_.check_memory(data, ("layer \"" + b.name + "\": " + what).c_str());
}

void BatchNorms::check_tensor(const Layer& b, const char* what, const void* data,
                              int64_t count) const {
  check_array(b, what, data, count, b.options.dtype, false);
}

void BatchNorms::check_output(const Layer& b, const char* what, const void* data,
                              int64_t count) const {
  check_array(b, what, data, count, b.options.dtype, true);
}

void BatchNorms::Layer::check_overlap(const char* what, const void* in, const char* out_name,
                                      const void* out, int64_t count) const {
  const auto bytes = static_cast<uintptr_t>(count * dtype_info(options.dtype).size);
  const auto i = reinterpret_cast<uintptr_t>(in), o = reinterpret_cast<uintptr_t>(out);
  if (i != o && i < o + bytes && o < i + bytes)
    fail(GA_ERROR_INVALID_ARGUMENT, "layer \"%s\": %s at %p overlaps %s at %p in part",
         name.c_str(), out_name, out, what, in);
}

void BatchNorms::Layer::check_sweep(const char* what, int64_t micro, int64_t count) const {
  const auto seen = static_cast<int64_t>(taken.size());
  if (!final)
    fail(GA_ERROR_INVALID_STATE,
         "%s: layer \"%s\" has seen %lld micro-batches, but ga_bn_finalize is still due", what,
         name.c_str(), ll(seen));
  if (micro >= seen)
    fail(GA_ERROR_INVALID_STATE,
         "%s: layer \"%s\": micro-batch %lld was not in its first sweep, which had %lld", what,
         name.c_str(), ll(micro), ll(seen));
  if (const int64_t first = taken[static_cast<size_t>(micro)].count; count != first)
    fail(GA_ERROR_INVALID_STATE,
         "%s: layer \"%s\": micro-batch %lld had %lld elements a channel in its first sweep, but "
         "%lld now",
         what, name.c_str(), ll(micro), ll(first), ll(count));
}

BnTask BatchNorms::task_of(const Layer& b, int64_t samples, int64_t positions) const {
  int64_t count;
  if (samples < 0 || positions < 0 || __builtin_mul_overflow(samples, positions, &count) ||
      __builtin_mul_overflow(count, b.channels, &count) || count > INT64_MAX / 8)
    fail(GA_ERROR_INVALID_ARGUMENT,
         "layer \"%s\": the shape was %lld samples of %lld positions in %lld channels",
         b.name.c_str(), ll(samples), ll(positions), ll(b.channels));
  const auto array_of = [&](ga_param id) {
    return id < 0 ? Array{nullptr, GA_F32} : context_.bn_param(id).values;
  };
  BnTask t = {};
  t.state = b.state;
  t.input = inputs_.at(b.input);
  t.channels = b.channels;
  t.samples = samples;
  t.positions = positions;
  t.channels_last = b.options.layout == GA_BN_CHANNELS_LAST;
  t.mode = b.options.mode;
  t.dtype = b.options.dtype;
  t.frozen = b.frozen;
  t.eps = b.options.eps;
  t.gamma = array_of(b.gamma);
  t.beta = array_of(b.beta);
  t.dgamma = b.dgamma;
  t.dbeta = b.dbeta;
  t.weight = 1;
  return t;
}

// The micro-batch that a call of the forward pass is about; next: of a sweep in WINDOW mode.
int64_t BatchNorms::index_of(const Layer& b, int64_t next) const {
  window_.check_valid();
  if (window_.open_index() >= 0) return window_.open_index();
  if (!b.windowed()) {
    window_.check_whole();
    return window_.size();
  }
  const int64_t most = context_.known_accum_steps();
  if (most > 0 && next >= most)
    fail(GA_ERROR_INVALID_STATE,
         "layer \"%s\": its sweep has been over all %lld micro-batches of the window",
         b.name.c_str(), ll(most));
  return next;
}

// Checks a call that brings statistics of count elements a channel; returns its micro-batch.
int64_t BatchNorms::index_of_statistics(const Layer& b, const char* what) const {
  const auto seen = static_cast<int64_t>(b.taken.size());
  const int64_t index = index_of(b, seen);
  if (!b.windowed()) return index;
  if (b.final)
    fail(GA_ERROR_INVALID_STATE,
         "%s: the statistics of layer \"%s\" are final, of %lld micro-batches; ga_step or "
         "ga_discard begins a new window",
         what, b.name.c_str(), ll(seen));
  if (index != seen)
    fail(GA_ERROR_INVALID_STATE,
         "%s: layer \"%s\" has seen %lld micro-batches in its first sweep, expected number %lld "
         "next, but %lld is open",
         what, b.name.c_str(), ll(seen), ll(seen), ll(index));
  return index;
}

// Room in the history, by doubling; what it holds stays.
void BatchNorms::make_room(Layer& b, int64_t micro_batches) {
  if (micro_batches <= b.history_size) return;
  constexpr int64_t kFew = 4;
  const int64_t size = std::max({micro_batches, 2 * b.history_size, kFew});
  State<Moments> larger = b.history.grown(backend_, static_cast<size_t>(size * b.channels));
  ranges_.reserve_more(1);
  inputs_.edit(b.input).history = larger.at();
  try {
    inputs_.flush(backend_);
  } catch (...) {
    inputs_.edit(b.input).history = b.history.at();
    throw;
  }
  ranges_.remove(b.history.at());
  ranges_.add(larger.at(), static_cast<size_t>(larger.bytes()));
  b.history.swap(larger);
  b.history_size = size;
}

// work(): a pass of the task that takes statistics of micro-batch index, of as many elements as
// `taken` says. One that has not been opened may be given the same statistics twice, but not
// others: those of several micro-batches would be taken for one.
template <class Work>
void BatchNorms::take(Layer& b, const char* what, int64_t index, const Taken& taken, BnTask& task,
                      Work&& work) {
  const auto at = static_cast<size_t>(index);
  if (at >= b.taken.capacity()) b.taken.reserve(std::max(at + 1, 2 * b.taken.capacity()));
  const bool twice = !b.windowed() && window_.open_index() < 0 && b.has(index);
  if (!b.windowed()) make_room(b, index + (twice ? 2 : 1));
  task.index = index;
  task.aside = twice;
  window_.or_invalidate(work);
  if (twice) {
    const auto n = static_cast<size_t>(b.channels);
    std::vector<Moments> both(2 * n);
    backend_.read(both.data(), b.history.at(static_cast<size_t>(index * b.channels)),
                  both.size() * sizeof(Moments));
    if (std::memcmp(&both[0], &both[n], n * sizeof(Moments)) != 0)
      fail(
          GA_ERROR_INVALID_STATE,
          "%s: layer \"%s\" was given statistics of other data for micro-batch %lld, which has not "
          "been opened; ga_micro_begin and ga_micro_end, with nothing between them where the "
          "gradients come later, tell micro-batches apart",
          what, b.name.c_str(), ll(index));
    return;
  }
  if (at >= b.taken.size()) b.taken.resize(at + 1);
  b.taken[at] = taken;
  b.index = index;
  b.sums_of = -1;
}

void BatchNorms::accumulate(ga_bn id, const void* x, int64_t samples, int64_t positions) {
  Layer& b = layer_for_work(id);
  BnTask task = task_of(b, samples, positions);
  const int64_t index = index_of_statistics(b, "ga_bn_accumulate");
  check_tensor(b, "x", x, task.count());
  if (b.frozen) return;
  task.x = x;
  take(b, "ga_bn_accumulate", index, {task.elements(), true}, task,
       [&] { backend_.bn_statistics(task); });
}

void BatchNorms::accumulate_stats(ga_bn id, int64_t count, const void* mean, const void* spread,
                                  int32_t kind, int32_t dtype) {
  Layer& b = layer_for_work(id);
  BnTask task = task_of(b, 0, 0);
  check_choice("kind", kind, GA_BN_M2, "ga_bn_spread");
  check_statistics_dtype(b.name.c_str(), dtype);
  if (count < 0)
    fail(GA_ERROR_INVALID_ARGUMENT, "layer \"%s\": count was %lld, expected >= 0", b.name.c_str(),
         ll(count));
  const int64_t index = index_of_statistics(b, "ga_bn_accumulate_stats");
  check_array(b, "mean", mean, b.channels, dtype, false);
  check_array(b, "spread", spread, b.channels, dtype, false);
  if (config_.device == GA_DEVICE_CPU)
    for (int64_t c = 0; c < b.channels; ++c)
      if (element(spread, dtype, c) < 0)
        fail(GA_ERROR_INVALID_ARGUMENT, "layer \"%s\": spread[%lld] was %g, expected >= 0",
             b.name.c_str(), ll(c), element(spread, dtype, c));
  if (b.frozen) return;
  const BnGiven given = {count,
                         {const_cast<void*>(mean), dtype},
                         {const_cast<void*>(spread), dtype},
                         kind == GA_BN_M2,
                         false};
  take(b, "ga_bn_accumulate_stats", index, {count, true}, task,
       [&] { backend_.bn_take(task, given); });
}

void BatchNorms::finalize(ga_bn id) {
  Layer& b = layer_for_work(id);
  window_.check_valid();
  if (!b.windowed())
    fail(GA_ERROR_INVALID_STATE, "ga_bn_finalize: layer \"%s\" is not in WINDOW mode",
         b.name.c_str());
  if (b.frozen) return;
  if (b.taken.empty())
    fail(GA_ERROR_INVALID_STATE,
         "ga_bn_finalize: layer \"%s\" has no statistics; ga_bn_accumulate brings them",
         b.name.c_str());
  if (b.final)
    fail(GA_ERROR_INVALID_STATE, "ga_bn_finalize: the statistics of layer \"%s\" are final already",
         b.name.c_str());
  b.summed.reserve(b.taken.size());
  const BnTask task = task_of(b, 0, 0);
  window_.or_invalidate([&] { backend_.bn_finalize(task); });
  b.final = true;
  b.forwarded = b.sums = 0;
}

void BatchNorms::forward(ga_bn id, const void* x, int64_t samples, int64_t positions, void* y) {
  Layer& b = layer_for_work(id);
  BnTask task = task_of(b, samples, positions);
  const int64_t index = index_of(b, b.forwarded);
  const bool own = !b.frozen && !b.windowed();  // by this micro-batch's statistics
  const bool given = own && b.has(index) && b.taken[static_cast<size_t>(index)].given;
  if (!b.frozen && b.windowed()) b.check_sweep("ga_bn_forward", index, task.elements());
  if (given && task.elements() != b.taken[static_cast<size_t>(index)].count)
    fail(GA_ERROR_INVALID_STATE,
         "ga_bn_forward: layer \"%s\": micro-batch %lld brought statistics of %lld elements a "
         "channel, but x has %lld",
         b.name.c_str(), ll(index), ll(b.taken[static_cast<size_t>(index)].count),
         ll(task.elements()));
  check_tensor(b, "x", x, task.count());
  check_output(b, "y", y, task.count());
  b.check_overlap("x", x, "y", y, task.count());
  task.x = x;
  task.out = y;
  task.index = index;
  bool normalised = false;
  if (own && !given) {
    // Statistics for a comparison are taken alone: y is not written where they are others.
    const auto pass = [&] {
      normalised = !task.aside;
      normalised ? backend_.bn_forward(task, true) : backend_.bn_statistics(task);
    };
    take(b, "ga_bn_forward", index, {task.elements(), false}, task, pass);
    task.aside = false;
  }
  if (own && b.index != index) {  // another micro-batch was visited since
    BnGiven known = {};
    known.known = true;
    window_.or_invalidate([&] { backend_.bn_take(task, known); });
    b.index = index;
    b.sums_of = -1;
  }
  if (!normalised) window_.or_invalidate([&] { backend_.bn_forward(task, false); });
  if (window_.open_index() < 0) ++b.forwarded;
}

void BatchNorms::infer(ga_bn id, const void* x, int64_t samples, int64_t positions, void* y) {
  const Layer& b = layer_for_work(id);
  BnTask task = task_of(b, samples, positions);
  check_tensor(b, "x", x, task.count());
  check_output(b, "y", y, task.count());
  b.check_overlap("x", x, "y", y, task.count());
  task.frozen = true;
  task.x = x;
  task.out = y;
  backend_.bn_forward(task, false);
}

// What both backward calls begin with.
BnTask BatchNorms::backward_task(const Layer& b, const char* what, const void* x, const void* dy,
                                 int64_t samples, int64_t positions) const {
  window_.check_part(what);
  BnTask task = task_of(b, samples, positions);
  const int64_t index = window_.open_index();
  const Micro& micro = window_.open_micro();
  if (b.frozen) {
  } else if (b.windowed()) {
    b.check_sweep(what, index, task.elements());
  } else if (b.index != index) {
    if (b.index < 0)
      fail(GA_ERROR_INVALID_STATE, "%s: layer \"%s\" has had no ga_bn_forward in this window", what,
           b.name.c_str());
    fail(GA_ERROR_INVALID_STATE,
         "%s: layer \"%s\" has the statistics of micro-batch %lld, but %lld is open", what,
         b.name.c_str(), ll(b.index), ll(index));
  } else if (const int64_t count = b.taken[static_cast<size_t>(index)].count;
             task.elements() != count) {
    fail(GA_ERROR_INVALID_STATE,
         "%s: layer \"%s\": micro-batch %lld had %lld elements a channel forward, but %lld now",
         what, b.name.c_str(), ll(index), ll(count), ll(task.elements()));
  }
  const bool read = micro.weight > 0;
  if (read) {
    check_tensor(b, "x", x, task.count());
    check_tensor(b, "dy", dy, task.count());
  }
  task.x = x;
  task.dy = dy;
  const Source share = context_.contribution(nullptr, GA_F32, micro);
  task.weight = read ? share.scale : 0;
  task.divisor = share.divisor;
  return task;
}

// Whether the open micro-batch has its sums. Makes room for the answer.
bool BatchNorms::is_summed(Layer& b) {
  const auto index = static_cast<size_t>(window_.open_index());
  if (index >= b.summed.size()) b.summed.resize(std::max(index + 1, 2 * b.summed.size()));
  return b.summed[index] != 0;
}

// Records what a pass over the sums has left, and takes it into the window.
void BatchNorms::add_sums(Layer& b) {
  b.summed[static_cast<size_t>(window_.open_index())] = 1;
  ++b.sums;
  const Span<const Whole> gradients = b.gradients();
  if (gradients.size > 0) window_.or_invalidate([&] { context_.contribute(gradients, false); });
}

void BatchNorms::backward_accumulate(ga_bn id, const void* x, const void* dy, int64_t samples,
                                     int64_t positions) {
  Layer& b = layer_for_work(id);
  const char* const what = "ga_bn_backward_accumulate";
  const BnTask task = backward_task(b, what, x, dy, samples, positions);
  if (is_summed(b))
    fail(GA_ERROR_INVALID_STATE, "%s: layer \"%s\" has the sums of micro-batch %lld already", what,
         b.name.c_str(), ll(window_.open_index()));
  context_.prepare_parts(b.gradients(), what);
  if (task.weight != 0) window_.or_invalidate([&] { backend_.bn_backward_sums(task); });
  b.sums_of = window_.open_index();
  add_sums(b);
}

void BatchNorms::backward(ga_bn id, const void* x, const void* dy, int64_t samples,
                          int64_t positions, void* dx) {
  Layer& b = layer_for_work(id);
  const char* const what = "ga_bn_backward";
  BnTask task = backward_task(b, what, x, dy, samples, positions);
  const bool windowed = b.windowed() && !b.frozen;
  // Gamma and beta get the sums of a micro-batch once; dx needs those of its own x and dy.
  const int64_t index = window_.open_index();
  const bool adding = !is_summed(b) && !windowed;
  const bool summing = adding || (!windowed && !b.frozen && b.sums_of != index);
  if (summing && !adding && context_.deferring())
    fail(GA_ERROR_INVALID_STATE,
         "%s: the sums of layer \"%s\" over micro-batch %lld wait to be judged with it "
         "(GA_NONFINITE_DROP_MICRO, GA_CLIP_MICRO) and cannot be made again",
         what, b.name.c_str(), ll(index));
  if (windowed && b.sums < static_cast<int64_t>(b.taken.size()))
    fail(
        GA_ERROR_INVALID_STATE,
        "%s: layer \"%s\" has the sums of %lld of %lld micro-batches; ga_bn_backward_accumulate is "
        "due for the others",
        what, b.name.c_str(), ll(b.sums), ll(static_cast<int64_t>(b.taken.size())));
  check_output(b, "dx", dx, task.count());
  if (task.weight != 0) {
    b.check_overlap("x", x, "dx", dx, task.count());
    b.check_overlap("dy", dy, "dx", dx, task.count());
  }
  if (adding) context_.prepare_parts(b.gradients(), what);
  task.out = dx;
  window_.or_invalidate([&] { backend_.bn_backward(task, summing && task.weight != 0); });
  b.sums_of = -1;
  if (adding) add_sums(b);
}

// ---- Statistics for the program -----------------------------------------------------------------

std::vector<BnChannel> BatchNorms::read(const Layer& b) const {
  std::vector<BnChannel> state(static_cast<size_t>(b.channels));
  backend_.read(state.data(), b.state, state.size() * sizeof(BnChannel));
  return state;
}

void BatchNorms::running(ga_bn id, void* mean, void* variance, int32_t dtype,
                         int64_t* steps) const {
  const Layer& b = layer(id);
  check_statistics_dtype(b.name.c_str(), dtype);
  const std::vector<BnChannel> state = read(b);
  int64_t most = 0;
  for (int64_t c = 0; c < b.channels; ++c) {
    const BnChannel& channel = state[static_cast<size_t>(c)];
    if (mean) set_element(mean, dtype, c, channel.running_mean);
    if (variance) set_element(variance, dtype, c, channel.running_variance);
    most = std::max(most, channel.steps);
  }
  if (steps) *steps = most;
}

void BatchNorms::set_running(ga_bn id, const void* mean, const void* variance, int32_t dtype,
                             int64_t steps) {
  window_.check_empty("ga_bn_running_set");
  Layer& b = layer_for_work(id);
  b.require_unused("ga_bn_running_set");
  check_statistics_dtype(b.name.c_str(), dtype);
  if (!mean || !variance)
    fail(GA_ERROR_INVALID_ARGUMENT, "layer \"%s\": %s was NULL", b.name.c_str(),
         mean ? "variance" : "mean");
  if (steps < 0)
    fail(GA_ERROR_INVALID_ARGUMENT, "layer \"%s\": steps was %lld, expected >= 0", b.name.c_str(),
         ll(steps));
  std::vector<BnChannel> state = read(b);
  for (int64_t c = 0; c < b.channels; ++c) {
    const double m = element(mean, dtype, c), v = element(variance, dtype, c);
    if (!std::isfinite(m))
      fail(GA_ERROR_INVALID_ARGUMENT, "layer \"%s\": mean[%lld] was %g, expected a finite number",
           b.name.c_str(), ll(c), m);
    if (!(v >= 0) || !std::isfinite(v))
      fail(GA_ERROR_INVALID_ARGUMENT,
           "layer \"%s\": variance[%lld] was %g, expected a finite number >= 0", b.name.c_str(),
           ll(c), v);
    BnChannel& channel = state[static_cast<size_t>(c)];
    channel.running_mean = m;
    channel.running_variance = v;
    channel.steps = steps;
  }
  backend_.write(b.state, state.data(), state.size() * sizeof(BnChannel));
}

void BatchNorms::statistics(ga_bn id, void* mean, void* variance, int32_t dtype,
                            int64_t* count) const {
  const Layer& b = layer(id);
  check_statistics_dtype(b.name.c_str(), dtype);
  if (!b.frozen && b.windowed() && b.index >= 0 && !b.final)
    fail(GA_ERROR_INVALID_STATE, "ga_bn_statistics: layer \"%s\": ga_bn_finalize is due",
         b.name.c_str());
  if (b.frozen || b.index < 0)
    fail(GA_ERROR_INVALID_STATE, "ga_bn_statistics: layer \"%s\" %s", b.name.c_str(),
         b.frozen ? "is frozen: it normalises by its running statistics"
                  : "has no statistics in this window");
  const std::vector<BnChannel> state = read(b);
  for (int64_t c = 0; c < b.channels; ++c) {
    const BnChannel& channel = state[static_cast<size_t>(c)];
    if (mean) set_element(mean, dtype, c, channel.mean);
    if (variance) set_element(variance, dtype, c, channel.variance);
  }
  if (count) *count = static_cast<int64_t>(state[0].count);
}

// ---- For the context ----------------------------------------------------------------------------

bool BatchNorms::has_statistics() const {
  return std::any_of(layers_.begin(), layers_.end(), [](const Layer& b) { return b.index >= 0; });
}

const char* BatchNorms::name_of_windowed() const {
  for (const Layer& b : layers_)
    if (b.windowed()) return b.name.c_str();
  return nullptr;
}

int64_t BatchNorms::bytes() const {
  int64_t bytes = 0;
  for (const Layer& b : layers_) bytes += static_cast<int64_t>(b.block.bytes()) + b.history.bytes();
  return bytes;
}

void BatchNorms::end_window() {
  for (Layer& b : layers_) {
    b.index = b.sums_of = -1;
    b.forwarded = b.sums = 0;
    b.final = false;
    b.taken.clear();
    b.summed.clear();
  }
}

}  // namespace ga
