// SPDX-License-Identifier: Apache-2.0
#include "batchnorm/batchnorm.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <string>

#include "core/error.hpp"
#include "core/tensor.hpp"
#include "model/param.hpp"
#include "ranks/exchange.hpp"

namespace ga {
namespace {

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

// Copies a field of every channel to an array of the program; out NULL: does nothing.
void copy_out(const std::vector<BnChannel>& state, double BnChannel::*field, void* out,
              int32_t dtype) {
  for (size_t c = 0; out && c < state.size(); ++c)
    set_element(out, dtype, static_cast<int64_t>(c), state[c].*field);
}

void check_statistics_dtype(const Subject& of, int32_t dtype) {
  if (dtype != GA_F32 && dtype != GA_F64)
    of.fail(GA_ERROR_INVALID_ARGUMENT, "dtype was %d, expected GA_F32 or GA_F64", dtype);
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

// The statistics of a micro-batch that the history holds.
struct BatchNorms::Taken {
  int64_t count = -1;  // the elements of a channel that they are over; -1: the history has none
  bool given = false;  // by another function than ga_bn_forward
};

struct BatchNorms::Layer {
  const char* name;  // in names_
  int64_t channels;
  ga_param gamma, beta;
  ga_bn_options options;
  size_t input;  // index in inputs_
  bool frozen = false;
  Buffer block = {};  // holds the next three arrays
  BnChannel* state = nullptr;
  void* dgamma = nullptr;
  void* dbeta = nullptr;
  Whole gradient[2] = {};  // dgamma if there is a gamma, dbeta if there is a beta
  size_t gradient_count = 0;
  State<Moments> history = {};  // see ops/batchnorm.hpp
  int64_t history_size = 0;     // micro-batches that the history has room for

  // In this window:
  int64_t index = -1;  // the micro-batch whose statistics the layer uses; WINDOW: the last one
  std::vector<Taken> taken = {};    // by micro-batch; WINDOW: of the first sweep
  std::vector<char> summed = {};    // by micro-batch: whether its backward sums are in the window
  int64_t sums_of = -1;             // the micro-batch whose backward sums BnChannel holds
  bool final = false;               // WINDOW: ga_bn_finalize has ended the first sweep
  bool sums_final = false;          // WINDOW: the backward sums are those of all ranks
  bool closed = false;              // WINDOW: ga_step has made the exchanges that its sweeps lacked
  int64_t forwarded = 0, sums = 0;  // micro-batches of the forward sweep, and of the backward sums

  bool windowed() const { return options.mode == GA_BN_WINDOW; }
  int64_t seen() const { return static_cast<int64_t>(taken.size()); }
  const Taken& taken_of(int64_t micro) const { return taken[static_cast<size_t>(micro)]; }
  bool has(int64_t micro) const { return micro < seen() && taken_of(micro).count >= 0; }
  int32_t sum_dtype() const { return options.dtype == GA_F64 ? GA_F64 : GA_F32; }
  Span<const Whole> gradients() const { return {gradient, gradient_count}; }
  bool in_window() const { return seen() > 0 || final; }
  Subject subject(const char* function = nullptr) const { return {"layer", name, function}; }

  void check_not_closed(const Subject& of) const {
    if (closed)
      of.fail(GA_ERROR_INVALID_STATE,
              "ga_step or ga_discard has told the other ranks that this one leaves the call out, "
              "and has to be called again");
  }

  void require_unused(const char* what) const {
    if (in_window())
      subject(what).fail(GA_ERROR_INVALID_STATE,
                         "it has statistics of this window; ga_step or ga_discard ends the window");
  }
  // Checks that an output is either exactly the array that is read, or does not overlap it.
  void check_overlap(const char* what, const void* in, const char* out_name, const void* out,
                     int64_t count) const;
  // Checks that the backward sums of all micro-batches are there.
  void check_sums(const char* what) const;
  // Checks that a later sweep reads what the first one has read.
  void check_sweep(const char* what, int64_t micro, int64_t count) const;
};

BatchNorms::BatchNorms(const ga_config& config, Backend& backend, Window& window,
                       const ParamList& params, MemoryRanges& ranges, BnContext& context)
    : config_(config),
      backend_(backend),
      window_(window),
      params_(params),
      ranges_(ranges),
      context_(context) {}

BatchNorms::~BatchNorms() = default;

const BatchNorms::Layer& BatchNorms::layer(ga_bn id) const {
  if (id < 0 || static_cast<size_t>(id) >= layers_.size())
    fail(GA_ERROR_INVALID_ARGUMENT, "bn was %d, but the context has %zu layers", id,
         layers_.size());
  return layers_[static_cast<size_t>(id)];
}

// The layer of a call that enqueues work; throws if that is not possible now.
BatchNorms::Layer& BatchNorms::layer_for_work(ga_bn id) {
  backend_.capturing();
  return layer(id);
}

// ---- Adding a layer -----------------------------------------------------------------------------

ga_bn BatchNorms::add(const char* name, int64_t channels, ga_param gamma, ga_param beta,
                      const ga_bn_options& o) {
  window_.check_empty("ga_bn_add");
  backend_.capturing();  // throws if no work can be enqueued now
  check_options(name, channels, o);
  check_params(name, channels, gamma, beta);
  check_mode(name, o.mode);
  Layer b = {name, channels, gamma, beta, o, layers_.size()};
  layers_.reserve(layers_.size() + 1);
  Names added = {{name, count()}};
  allocate(b);
  b.name = names_.insert(added.extract(added.begin())).position->first.c_str();
  layers_.push_back(std::move(b));
  context_.set_tables();
  return count() - 1;
}

void BatchNorms::check_options(const char* name, int64_t channels, const ga_bn_options& o) const {
  if (!name || !*name) fail(GA_ERROR_INVALID_ARGUMENT, "the layer's name was empty");
  const Subject of = {"layer", name};
  if (find(name) >= 0)
    of.fail(GA_ERROR_INVALID_ARGUMENT, "the context has a layer of that name already");
  context_.check_name(of, name);
  if (channels < 1 || channels > INT64_MAX / 4096)
    of.fail(GA_ERROR_INVALID_ARGUMENT, "channels was %lld, expected >= 1", ll(channels));
  const std::string prefix = std::string("layer \"") + name + "\": ";
  check_choice((prefix + "mode").c_str(), o.mode, GA_BN_CUMULATIVE, "ga_bn_mode");
  check_choice((prefix + "layout").c_str(), o.layout, GA_BN_CHANNELS_LAST, "ga_bn_layout");
  check_choice((prefix + "biased").c_str(), o.biased, 1, "0 or 1");
  if (!dtype_info(o.dtype).floating)
    of.fail(GA_ERROR_INVALID_ARGUMENT, "dtype was %d, expected f32, f64, f16 or bf16", o.dtype);
  if (!(o.momentum >= 0 && o.momentum <= 1))
    of.fail(GA_ERROR_INVALID_ARGUMENT, "momentum was %g, expected a number in [0, 1]", o.momentum);
  check_positive((prefix + "eps").c_str(), o.eps);
}

void BatchNorms::check_params(const char* name, int64_t channels, ga_param gamma,
                              ga_param beta) const {
  const Subject of = {"layer", name};
  const auto check = [&](const char* what, ga_param id) {
    if (id == -1) return;
    const int64_t count = params_.get(id).count;
    if (count != channels)
      of.fail(GA_ERROR_INVALID_ARGUMENT,
              "%s, parameter \"%s\", has %lld elements, expected one for each of %lld channels",
              what, params_.name(id), ll(count), ll(channels));
    if (params_[id].maximum)
      of.fail(GA_ERROR_UNSUPPORTED, "%s, parameter \"%s\", has GA_REDUCE_MAX", what,
              params_.name(id));
  };
  check("gamma", gamma);
  check("beta", beta);
  if (gamma >= 0 && gamma == beta)
    of.fail(GA_ERROR_INVALID_ARGUMENT, "gamma and beta are both parameter \"%s\"",
            params_.name(gamma));
}

void BatchNorms::check_mode(const char* name, int32_t mode) const {
  const Subject of = {"layer", name};
  if (mode != GA_BN_MICRO && config_.nonfinite == GA_NONFINITE_DROP_MICRO)
    of.fail(GA_ERROR_UNSUPPORTED,
            "%s mode is not supported with GA_NONFINITE_DROP_MICRO: other micro-batches would have "
            "been normalised with one that is dropped",
            mode == GA_BN_WINDOW ? "WINDOW" : "CUMULATIVE");
  if (mode == GA_BN_WINDOW && context_.deferring())
    of.fail(
        GA_ERROR_UNSUPPORTED,
        "WINDOW mode, which opens micro-batches again, is not supported with GA_CLIP_WHEN_MICRO");
}

// Gives a new layer its arrays and its entry in the table. On failure nothing has changed.
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

ga_bn BatchNorms::count() const { return static_cast<ga_bn>(layers_.size()); }

ga_bn BatchNorms::find(std::string_view name) const {
  const auto found = names_.find(name);
  return found == names_.end() ? -1 : found->second;
}

// The name keeps its address when other layers are added.
ga_bn_info BatchNorms::info(ga_bn id) const {
  const Layer& b = layer(id);
  ga_bn_info info = {};
  info.struct_size = sizeof info;
  info.name = b.name;
  info.channels = b.channels;
  info.gamma = b.gamma;
  info.beta = b.beta;
  info.mode = b.options.mode;
  info.layout = b.options.layout;
  info.dtype = b.options.dtype;
  info.biased = b.options.biased;
  info.frozen = b.frozen;
  info.momentum = b.options.momentum;
  info.eps = b.options.eps;
  return info;
}

const ga_bn_options& BatchNorms::options(ga_bn id) const { return layer(id).options; }

void BatchNorms::set_frozen(ga_bn id, bool frozen) {
  window_.check_empty("ga_bn_set_frozen");
  Layer& b = layer(id);
  b.require_unused("ga_bn_set_frozen");
  b.frozen = frozen;
  inputs_.edit(b.input).frozen = frozen;
  inputs_.flush(backend_);  // because only replays of a captured graph may follow
  context_.settings_changed(true);
}

// ---- Arguments ----------------------------------------------------------------------------------

void BatchNorms::check_array(const Layer& b, const char* what, const void* data, int64_t count,
                             int32_t dtype) const {
  if (count == 0) return;
  if (!data) b.subject().fail(GA_ERROR_INVALID_ARGUMENT, "%s was NULL", what);
  ranges_.check_readable(b.subject(), what, data, count, dtype_info(dtype).size);
}

void BatchNorms::check_output(const Layer& b, const char* what, const void* data,
                              int64_t count) const {
  check_array(b, what, data, count, b.options.dtype);
  ranges_.check_apart(b.subject(), what, data, count * dtype_info(b.options.dtype).size);
}

void BatchNorms::Layer::check_overlap(const char* what, const void* in, const char* out_name,
                                      const void* out, int64_t count) const {
  const auto bytes = static_cast<uintptr_t>(count * dtype_info(options.dtype).size);
  const auto i = reinterpret_cast<uintptr_t>(in), o = reinterpret_cast<uintptr_t>(out);
  if (i != o && i < o + bytes && o < i + bytes)
    subject().fail(GA_ERROR_INVALID_ARGUMENT, "%s at %p overlaps %s at %p in part", out_name, out,
                   what, in);
}

void BatchNorms::Layer::check_sweep(const char* what, int64_t micro, int64_t count) const {
  const Subject of = subject(what);
  if (!final)
    of.fail(GA_ERROR_INVALID_STATE,
            "it has seen %lld micro-batches, but ga_bn_finalize is still due", ll(seen()));
  if (micro >= seen())
    of.fail(GA_ERROR_INVALID_STATE,
            "micro-batch %lld was not in its first sweep, which had %lld micro-batches", ll(micro),
            ll(seen()));
  if (const int64_t first = taken_of(micro).count; count != first)
    of.fail(GA_ERROR_INVALID_STATE,
            "micro-batch %lld had %lld elements a channel in the first sweep, but %lld now",
            ll(micro), ll(first), ll(count));
}

BnTask BatchNorms::task_of(const Layer& b, int64_t samples, int64_t positions) const {
  int64_t count;
  if (samples < 0 || positions < 0 || __builtin_mul_overflow(samples, positions, &count) ||
      __builtin_mul_overflow(count, b.channels, &count) || count > INT64_MAX / 8)
    b.subject().fail(GA_ERROR_INVALID_ARGUMENT,
                     "the shape was %lld samples of %lld positions in %lld channels", ll(samples),
                     ll(positions), ll(b.channels));
  const auto array_of = [&](ga_param id) {
    return id < 0 ? Array{nullptr, GA_F32} : Array{params_[id].data, params_[id].dtype};
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

// The index of the micro-batch that a call of the forward pass works on. next: the next one of a
// sweep in WINDOW mode.
int64_t BatchNorms::index_of(const Layer& b, int64_t next) const {
  window_.check_takes_more();
  if (window_.open_index() >= 0) return window_.open_index();
  if (!b.windowed()) {
    window_.check_whole();
    return window_.size();
  }
  const int64_t most = context_.known_accum_steps();
  if (most > 0 && next >= most)
    b.subject().fail(GA_ERROR_INVALID_STATE,
                     "its sweep has been over all %lld micro-batches of the window", ll(most));
  return next;
}

// The index of the micro-batch whose statistics a call brings; throws if the call is not legal now.
int64_t BatchNorms::index_of_statistics(const Layer& b, const char* what) const {
  const Subject of = b.subject(what);
  const int64_t seen = b.seen(), index = index_of(b, seen);
  if (!b.windowed()) return index;
  if (b.final)
    of.fail(
        GA_ERROR_INVALID_STATE,
        "its statistics are final, of %lld micro-batches; ga_step or ga_discard ends the window",
        ll(seen));
  if (index != seen)
    of.fail(GA_ERROR_INVALID_STATE,
            "in its first sweep, micro-batch number %lld is expected next, but %lld is open",
            ll(seen), ll(index));
  return index;
}

// Makes room in the history, by doubling, and keeps what the history holds.
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

// Takes the statistics of micro-batch `index`: work() is the pass that stores them, `taken` says of
// how many elements they are. A micro-batch that is not open may be given the same statistics
// twice, but not others, because the statistics of several micro-batches would then pass for those
// of one.
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
      b.subject(what).fail(
          GA_ERROR_INVALID_STATE,
          "it was given statistics of other data for micro-batch %lld, which has not been opened; "
          "ga_micro_begin and ga_micro_end tell micro-batches apart, even with nothing between "
          "them",
          ll(index));
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
  check_array(b, "x", x, task.count(), b.options.dtype);
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
  const Subject of = b.subject();
  check_statistics_dtype(of, dtype);
  if (count < 0) of.fail(GA_ERROR_INVALID_ARGUMENT, "count was %lld, expected >= 0", ll(count));
  const int64_t index = index_of_statistics(b, "ga_bn_accumulate_stats");
  check_array(b, "mean", mean, b.channels, dtype);
  check_array(b, "spread", spread, b.channels, dtype);
  if (config_.device == GA_DEVICE_CPU)
    for (int64_t c = 0; c < b.channels; ++c)
      if (element(spread, dtype, c) < 0)
        of.fail(GA_ERROR_INVALID_ARGUMENT, "spread[%lld] was %g, expected >= 0", ll(c),
                element(spread, dtype, c));
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
  const Subject of = b.subject("ga_bn_finalize");
  const bool alone = !context_.exchange();
  if (alone || b.frozen) window_.check_valid();
  if (!b.windowed()) of.fail(GA_ERROR_INVALID_STATE, "it is not in WINDOW mode");
  if (b.frozen) return;
  if (alone && b.taken.empty())
    of.fail(GA_ERROR_INVALID_STATE, "it has no statistics; ga_bn_accumulate brings them");
  if (b.final) of.fail(GA_ERROR_INVALID_STATE, "its statistics are final already");
  b.check_not_closed(of);
  const BnTask task = task_of(b, 0, 0);
  const auto make_room = [&] { b.summed.reserve(b.taken.size()); };
  if (alone) {
    make_room();
    window_.or_invalidate([&] { backend_.bn_finalize(task); });
  } else {
    context_.exchange()->end_sweep(of, task, {id, false}, b.seen(), make_room);
  }
  b.final = true;
  b.forwarded = b.sums = 0;
}

void BatchNorms::forward(ga_bn id, const void* x, int64_t samples, int64_t positions, void* y) {
  Layer& b = layer_for_work(id);
  BnTask task = task_of(b, samples, positions);
  const int64_t index = index_of(b, b.forwarded);
  const bool own = !b.frozen && !b.windowed();  // by this micro-batch's statistics
  const bool given = own && b.has(index) && b.taken_of(index).given;
  if (!b.frozen && b.windowed()) b.check_sweep("ga_bn_forward", index, task.elements());
  if (given && task.elements() != b.taken_of(index).count)
    b.subject("ga_bn_forward")
        .fail(GA_ERROR_INVALID_STATE,
              "the statistics of micro-batch %lld are of %lld elements a channel, but x has %lld",
              ll(index), ll(b.taken_of(index).count), ll(task.elements()));
  set_forward(b, task, x, y);
  task.index = index;
  bool normalised = false;
  if (own && !given) {
    // Statistics that are only compared are taken alone, so that a call that fails does not write
    // y.
    const auto pass = [&] {
      normalised = !task.aside;
      normalised ? backend_.bn_forward(task, true) : backend_.bn_statistics(task);
    };
    take(b, "ga_bn_forward", index, {task.elements(), false}, task, pass);
    task.aside = false;
  }
  if (own && b.index != index) {  // another micro-batch was visited in between
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
  set_forward(b, task, x, y);
  task.frozen = true;
  backend_.bn_forward(task, false);
}

void BatchNorms::set_forward(const Layer& b, BnTask& task, const void* x, void* y) const {
  check_array(b, "x", x, task.count(), b.options.dtype);
  check_output(b, "y", y, task.count());
  b.check_overlap("x", x, "y", y, task.count());
  task.x = x;
  task.out = y;
}

// Checks the arguments that both backward calls have, and makes their task.
BnTask BatchNorms::backward_task(const Layer& b, const char* what, const void* x, const void* dy,
                                 int64_t samples, int64_t positions) const {
  window_.check_part(what);
  BnTask task = task_of(b, samples, positions);
  const int64_t index = window_.open_index();
  const Micro& micro = window_.open_micro();
  const Subject of = b.subject(what);
  if (!b.frozen && b.windowed()) {
    b.check_sweep(what, index, task.elements());
  } else if (!b.frozen) {
    if (b.index < 0) of.fail(GA_ERROR_INVALID_STATE, "it has had no ga_bn_forward in this window");
    if (b.index != index)
      of.fail(GA_ERROR_INVALID_STATE, "it has the statistics of micro-batch %lld, but %lld is open",
              ll(b.index), ll(index));
    if (const int64_t count = b.taken_of(index).count; task.elements() != count)
      of.fail(GA_ERROR_INVALID_STATE,
              "micro-batch %lld had %lld elements a channel in the forward pass, but %lld now",
              ll(index), ll(count), ll(task.elements()));
  }
  const bool read = micro.weight > 0;
  if (read) {
    check_array(b, "x", x, task.count(), b.options.dtype);
    check_array(b, "dy", dy, task.count(), b.options.dtype);
  }
  task.x = x;
  task.dy = dy;
  const Source share = context_.contribution(nullptr, GA_F32, micro);
  task.weight = read ? share.scale : 0;
  task.divisor = share.divisor;
  return task;
}

// Whether the backward sums of the open micro-batch are in the window. Makes room in b.summed.
bool BatchNorms::is_summed(Layer& b) {
  const auto index = static_cast<size_t>(window_.open_index());
  if (index >= b.summed.size()) b.summed.resize(std::max(index + 1, 2 * b.summed.size()));
  return b.summed[index] != 0;
}

// Adds the backward sums of the open micro-batch to the window.
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
    b.subject(what).fail(GA_ERROR_INVALID_STATE, "it has the sums of micro-batch %lld already",
                         ll(window_.open_index()));
  context_.prepare_parts(b.gradients(), what);
  if (task.weight != 0) window_.or_invalidate([&] { backend_.bn_backward_sums(task); });
  b.sums_of = window_.open_index();
  add_sums(b);
}

void BatchNorms::Layer::check_sums(const char* what) const {
  if (sums < seen())
    subject(what).fail(GA_ERROR_INVALID_STATE,
                       "it has the sums of %lld of %lld micro-batches; ga_bn_backward_accumulate "
                       "is due for the others",
                       ll(sums), ll(seen()));
}

void BatchNorms::backward_finalize(ga_bn id) {
  Layer& b = layer_for_work(id);
  const char* const what = "ga_bn_backward_finalize";
  const Subject of = b.subject(what);
  const bool alone = !context_.exchange();
  if (alone || b.frozen) window_.check_valid();
  if (!b.windowed()) of.fail(GA_ERROR_INVALID_STATE, "it is not in WINDOW mode");
  if (b.frozen) return;
  b.check_not_closed(of);
  if (!b.final) of.fail(GA_ERROR_INVALID_STATE, "ga_bn_finalize must be called first");
  if (b.sums_final) of.fail(GA_ERROR_INVALID_STATE, "its sums are those of all ranks already");
  if (alone) return b.check_sums(what);
  // Those in b.dgamma and b.dbeta stay this rank's: they are gradients, which ga_step adds up.
  context_.exchange()->end_sweep(of, task_of(b, 0, 0), {id, true}, b.seen(),
                                 [&] { b.check_sums(what); });
  b.sums_final = true;
}

void BatchNorms::backward(ga_bn id, const void* x, const void* dy, int64_t samples,
                          int64_t positions, void* dx) {
  Layer& b = layer_for_work(id);
  const char* const what = "ga_bn_backward";
  BnTask task = backward_task(b, what, x, dy, samples, positions);
  const bool windowed = b.windowed() && !b.frozen;
  // The sums of a micro-batch are added to gamma and beta once; dx needs the sums of its own x and
  // dy.
  const int64_t index = window_.open_index();
  const bool adding = !is_summed(b) && !windowed;
  const bool summing = adding || (!windowed && !b.frozen && b.sums_of != index);
  if (summing && !adding && context_.deferring())
    b.subject(what).fail(
        GA_ERROR_INVALID_STATE,
        "its sums over micro-batch %lld are kept to be judged with it at its end "
        "(GA_NONFINITE_DROP_MICRO, GA_CLIP_WHEN_MICRO) and cannot be computed again",
        ll(index));
  if (windowed) b.check_sums(what);
  if (windowed && !b.sums_final && context_.exchange())
    b.subject(what).fail(GA_ERROR_INVALID_STATE,
                         "ga_bn_backward_finalize must be called first, on every rank: it adds up "
                         "the sums of all ranks");
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
  check_statistics_dtype(b.subject(), dtype);
  const std::vector<BnChannel> state = read(b);
  copy_out(state, &BnChannel::running_mean, mean, dtype);
  copy_out(state, &BnChannel::running_variance, variance, dtype);
  if (!steps) return;
  *steps = 0;
  for (const BnChannel& channel : state) *steps = std::max(*steps, channel.steps);
}

void BatchNorms::set_running(ga_bn id, const void* mean, const void* variance, int32_t dtype,
                             int64_t steps) {
  window_.check_empty("ga_bn_running_set");
  Layer& b = layer_for_work(id);
  b.require_unused("ga_bn_running_set");
  const Subject of = b.subject();
  check_statistics_dtype(of, dtype);
  if (!mean || !variance)
    of.fail(GA_ERROR_INVALID_ARGUMENT, "%s was NULL", mean ? "variance" : "mean");
  if (steps < 0) of.fail(GA_ERROR_INVALID_ARGUMENT, "steps was %lld, expected >= 0", ll(steps));
  std::vector<BnChannel> state = read(b);
  for (int64_t c = 0; c < b.channels; ++c) {
    const double m = element(mean, dtype, c), v = element(variance, dtype, c);
    if (!std::isfinite(m))
      of.fail(GA_ERROR_INVALID_ARGUMENT, "mean[%lld] was %g, expected a finite number", ll(c), m);
    if (!(v >= 0) || !std::isfinite(v))
      of.fail(GA_ERROR_INVALID_ARGUMENT, "variance[%lld] was %g, expected a finite number >= 0",
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
  const Subject of = b.subject("ga_bn_statistics");
  check_statistics_dtype(of, dtype);
  if (!b.frozen && b.windowed() && b.index >= 0 && !b.final)
    of.fail(GA_ERROR_INVALID_STATE, "ga_bn_finalize is due");
  if (b.frozen || (b.index < 0 && !b.final))
    of.fail(GA_ERROR_INVALID_STATE, "%s",
            b.frozen ? "it is frozen and normalises by its running statistics"
                     : "it has no statistics in this window");
  const std::vector<BnChannel> state = read(b);
  if (state[0].count == 0 && b.index >= 0 && b.has(b.index) && b.taken_of(b.index).count > 0)
    of.fail(GA_ERROR_INVALID_STATE,
            "micro-batch %lld, whose statistics it uses, had an infinite or NaN gradient and was "
            "dropped",
            ll(b.index));
  copy_out(state, &BnChannel::mean, mean, dtype);
  copy_out(state, &BnChannel::variance, variance, dtype);
  if (count) *count = static_cast<int64_t>(state[0].count);
}

// ---- For a state file ---------------------------------------------------------------------------

BatchNorms::Snapshot BatchNorms::snapshot(ga_bn id) const {
  const Layer& b = layer(id);
  Snapshot s;
  s.channels = read(b);
  s.index = b.index;
  s.sums_of = b.sums_of;
  s.forwarded = b.forwarded;
  s.sums = b.sums;
  s.final = b.final;
  s.sums_final = b.sums_final;
  s.seen = b.seen();
  size_t size = b.taken.size();
  for (size_t k = size; k < b.summed.size(); ++k)
    if (b.summed[k]) size = k + 1;
  s.micros.resize(size);
  for (size_t k = 0; k < b.taken.size(); ++k) {
    s.micros[k].count = b.taken[k].count;
    s.micros[k].given = b.taken[k].given;
  }
  for (size_t k = 0; k < std::min(size, b.summed.size()); ++k) s.micros[k].summed = b.summed[k];
  int64_t held = 0;
  for (const BnChannel& c : s.channels) held = std::max(held, c.taken);
  s.history.resize(static_cast<size_t>(held * b.channels));
  if (held > 0) backend_.read(s.history.data(), b.history.at(), s.history.size() * sizeof(Moments));
  return s;
}

void BatchNorms::reserve(ga_bn id, const Snapshot& s) {
  Layer& b = layer(id);
  b.taken.reserve(s.micros.size());
  b.summed.reserve(s.micros.size());
  const int64_t held = static_cast<int64_t>(s.history.size()) / b.channels;
  if (held > 0) make_room(b, held);
}

void BatchNorms::restore(ga_bn id, const Snapshot& s) {
  Layer& b = layer(id);
  backend_.write(b.state, s.channels.data(), s.channels.size() * sizeof(BnChannel));
  if (!s.history.empty())
    backend_.write(b.history.at(), s.history.data(), s.history.size() * sizeof(Moments));
  b.index = s.index;
  b.sums_of = s.sums_of;
  b.forwarded = s.forwarded;
  b.sums = s.sums;
  b.final = s.final;
  b.sums_final = s.sums_final;
  b.taken.resize(static_cast<size_t>(s.seen));
  b.summed.resize(s.micros.size());
  for (size_t k = 0; k < s.micros.size(); ++k) {
    if (k < b.taken.size()) b.taken[k] = {s.micros[k].count, s.micros[k].given};
    b.summed[k] = s.micros[k].summed;
  }
}

// ---- For the context ----------------------------------------------------------------------------

bool BatchNorms::has_statistics() const {
  return std::any_of(layers_.begin(), layers_.end(), [](const Layer& b) { return b.in_window(); });
}

const char* BatchNorms::name_of_windowed() const {
  for (const Layer& b : layers_)
    if (b.windowed()) return b.name;
  return nullptr;
}

bool BatchNorms::awaits_sums() const {
  return std::any_of(layers_.begin(), layers_.end(), [](const Layer& b) {
    return b.windowed() && !b.frozen && !b.sums_final && !b.closed;
  });
}

int64_t BatchNorms::close_sweeps() {
  int64_t left = 0;
  for (Layer& b : layers_) {
    if (!b.windowed() || b.frozen || b.closed) continue;
    left += !b.final + !b.sums_final;
    b.closed = true;
  }
  return left;
}

const char* BatchNorms::name_of_user(ga_param id) const {
  for (const Layer& b : layers_)
    if (b.gamma == id || b.beta == id) return b.name;
  return nullptr;
}

bool BatchNorms::is_swept(int64_t micro) const {
  return std::any_of(layers_.begin(), layers_.end(),
                     [&](const Layer& b) { return b.windowed() && b.seen() > micro; });
}

void BatchNorms::forget(int64_t micro) {
  const auto at = static_cast<size_t>(micro);
  int64_t most = 0;
  for (const Layer& b : layers_) most = std::max(most, b.channels);
  const std::vector<Moments> none(static_cast<size_t>(most));
  for (Layer& b : layers_) {
    if (at < b.summed.size()) b.summed[at] = 0;
    if (b.sums_of == micro) b.sums_of = -1;
    if (b.seen() <= micro || b.windowed()) continue;
    backend_.write(b.history.at(static_cast<size_t>(micro * b.channels)), none.data(),
                   static_cast<size_t>(b.channels) * sizeof(Moments));
    b.taken.resize(at);
    if (b.index == micro) b.index = -1;
  }
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
    b.final = b.sums_final = b.closed = false;
    b.taken.clear();
    b.summed.clear();
  }
}

}  // namespace ga
