// SPDX-License-Identifier: Apache-2.0
// Layers with batch normalisation: which micro-batch a call is about, what is legal next, and the
// way of the gradients of gamma and beta into the window. The formulas are in ops/batchnorm.hpp;
// what a step does to running statistics is in decide.hpp.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <string>

#include "context.hpp"
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

int32_t size_of_real(const ga_bn_options& o) { return o.dtype == GA_F64 ? 8 : 4; }

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

const Context::BatchNorm& Context::batch_norm(ga_bn id) const {
  if (id < 0 || static_cast<size_t>(id) >= batch_norms_.size())
    fail(GA_ERROR_INVALID_ARGUMENT, "bn was %d, but the context has %zu layers", id,
         batch_norms_.size());
  return batch_norms_[static_cast<size_t>(id)];
}

Context::BatchNorm& Context::batch_norm(ga_bn id) {
  return const_cast<BatchNorm&>(static_cast<const Context*>(this)->batch_norm(id));
}

ga_bn Context::add_batch_norm(const char* name, int64_t channels, ga_param gamma, ga_param beta,
                              const ga_bn_options& o) {
  require_empty("ga_bn_add");
  check_device();
  if (!name || !*name) fail(GA_ERROR_INVALID_ARGUMENT, "the layer's name was empty");
  for (const BatchNorm& b : batch_norms_)
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
  const auto check_param = [&](const char* what, ga_param id) {
    if (id == -1) return;
    const Param& p = param(id);
    if (p.count != channels)
      fail(GA_ERROR_INVALID_ARGUMENT,
           "layer \"%s\": %s, parameter \"%s\", has %lld elements, expected one for each of %lld "
           "channels",
           name, what, this->name(id), ll(p.count), ll(channels));
  };
  check_param("gamma", gamma);
  check_param("beta", beta);
  if (gamma >= 0 && gamma == beta)
    fail(GA_ERROR_INVALID_ARGUMENT, "layer \"%s\": gamma and beta are both parameter \"%s\"", name,
         this->name(gamma));
  if (o.mode != GA_BN_MICRO && config_.nonfinite == GA_NONFINITE_DROP_MICRO)
    fail(GA_ERROR_UNSUPPORTED,
         "layer \"%s\": not with GA_NONFINITE_DROP_MICRO in %s mode: other micro-batches would "
         "have been normalised with one that is dropped",
         name, o.mode == GA_BN_WINDOW ? "WINDOW" : "CUMULATIVE");

  if (o.mode == GA_BN_WINDOW && clip_micro_)
    fail(GA_ERROR_UNSUPPORTED,
         "layer \"%s\": not with GA_CLIP_MICRO in WINDOW mode, which opens micro-batches again",
         name);

  BatchNorm b = {};
  b.name = name;
  b.channels = channels;
  b.gamma = gamma;
  b.beta = beta;
  b.options = o;
  const size_t n = static_cast<size_t>(channels);
  const size_t state = n * sizeof(BnChannel);
  b.bytes = state + 2 * n * static_cast<size_t>(size_of_real(o));
  std::vector<BnChannel> initial(n);
  for (BnChannel& c : initial) c.running_variance = 1;
  batch_norms_.reserve(batch_norms_.size() + 1);
  Table<BnInput> inputs = bn_inputs_.grown(*backend_, batch_norms_.size() + 1);
  try {
    b.state = static_cast<BnChannel*>(backend_->allocate(b.bytes));
    backend_->write(b.state, initial.data(), state);
    ranges_.reserve_more(1);
    inputs.edit(batch_norms_.size()) = {b.state,    nullptr,       channels,
                                        o.momentum, o.biased != 0, false};
    inputs.flush(*backend_);
    backend_->bn_reserve(channels);
    ranges_.add(b.state, b.bytes);
  } catch (...) {
    backend_->free(b.state, b.bytes);
    throw;
  }
  b.dgamma = reinterpret_cast<char*>(b.state) + state;
  b.dbeta = static_cast<char*>(b.dgamma) + n * static_cast<size_t>(size_of_real(o));
  bn_inputs_.swap(inputs);
  batch_norms_.push_back(std::move(b));
  set_tables();
  return static_cast<ga_bn>(batch_norms_.size() - 1);
}

void Context::bn_set_frozen(ga_bn id, bool frozen) {
  require_empty("ga_bn_set_frozen");
  BatchNorm& b = batch_norm(id);
  bn_require_unused(b, "ga_bn_set_frozen");
  b.frozen = frozen;
  bn_inputs_.edit(static_cast<size_t>(id)).frozen = frozen;
  bn_inputs_.flush(*backend_);  // perhaps nothing but replays of a graph follows
}

void Context::bn_require_unused(const BatchNorm& b, const char* what) const {
  if (b.index >= 0)
    fail(GA_ERROR_INVALID_STATE,
         "%s: layer \"%s\" has statistics of a window that is not over; ga_step or ga_discard ends "
         "it",
         what, b.name.c_str());
}

// ---- What a call is about -----------------------------------------------------------------------

// A tensor of a call; output: written too.
void Context::bn_check_tensor(const BatchNorm& b, const char* what, const void* data, int64_t count,
                              bool output) const {
  if (count == 0) return;
  const DtypeInfo& dtype = dtype_info(b.options.dtype);
  if (!data) fail(GA_ERROR_INVALID_ARGUMENT, "layer \"%s\": %s was NULL", b.name.c_str(), what);
  if (reinterpret_cast<uintptr_t>(data) % static_cast<uintptr_t>(dtype.size) != 0)
    fail(GA_ERROR_INVALID_ARGUMENT,
         "layer \"%s\": %s was at address %p, expected a multiple of its element, %d bytes",
         b.name.c_str(), what, data, dtype.size);
  if (output && ranges_.overlap(data, count * dtype.size))
    fail(GA_ERROR_INVALID_ARGUMENT,
         "layer \"%s\": %s at %p overlaps a parameter or memory of the library", b.name.c_str(),
         what, data);
  if (config_.device != GA_DEVICE_CPU)
    backend_->check_memory(data, ("layer \"" + b.name + "\": " + what).c_str());
}

// Where an output may be: on top of what is read, element for element, or clear of it.
void Context::bn_check_overlap(const BatchNorm& b, const char* what, const void* in,
                               const char* out_name, const void* out, int64_t count) const {
  const auto bytes = static_cast<uintptr_t>(count * dtype_info(b.options.dtype).size);
  const auto i = reinterpret_cast<uintptr_t>(in), o = reinterpret_cast<uintptr_t>(out);
  if (i != o && i < o + bytes && o < i + bytes)
    fail(GA_ERROR_INVALID_ARGUMENT, "layer \"%s\": %s at %p overlaps %s at %p in part",
         b.name.c_str(), out_name, out, what, in);
}

BnTask Context::bn_task(const BatchNorm& b, int64_t samples, int64_t positions) const {
  int64_t count;
  if (samples < 0 || positions < 0 || __builtin_mul_overflow(samples, positions, &count) ||
      __builtin_mul_overflow(count, b.channels, &count) || count > INT64_MAX / 8)
    fail(GA_ERROR_INVALID_ARGUMENT,
         "layer \"%s\": the shape was %lld samples of %lld positions in %lld channels",
         b.name.c_str(), ll(samples), ll(positions), ll(b.channels));
  const auto array_of = [&](ga_param id) {
    if (id < 0) return Array{nullptr, GA_F32};
    const Param& p = params_[static_cast<size_t>(id)];
    return Array{p.data, p.dtype};
  };
  BnTask t = {};
  t.state = b.state;
  t.input = bn_inputs_.at(static_cast<size_t>(&b - batch_norms_.data()));
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
int64_t Context::bn_index(const BatchNorm& b, int64_t next) const {
  window_.check_valid();
  if (window_.open_index() >= 0) return window_.open_index();
  if (b.options.mode != GA_BN_WINDOW) {
    window_.check_whole();
    return window_.size();
  }
  if (!accum_due_ && window_.accum_steps() > 0 && next >= window_.accum_steps())
    fail(GA_ERROR_INVALID_STATE,
         "layer \"%s\": its sweep has been over all %lld micro-batches of the window",
         b.name.c_str(), ll(window_.accum_steps()));
  return next;
}

// Checks a call that brings statistics of count elements a channel; returns its micro-batch.
int64_t Context::bn_check_statistics(const BatchNorm& b, const char* what) const {
  const auto seen = static_cast<int64_t>(b.taken.size());
  const int64_t index = bn_index(b, seen);
  if (b.options.mode != GA_BN_WINDOW) return index;
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
void Context::bn_make_room(ga_bn id, int64_t micro_batches) {
  BatchNorm& b = batch_norm(id);
  if (micro_batches <= b.history_size) return;
  constexpr int64_t kFew = 4;
  const int64_t size = std::max({micro_batches, 2 * b.history_size, kFew});
  const size_t bytes = static_cast<size_t>(size * b.channels) * sizeof(Moments);
  ranges_.reserve_more(1);
  auto* const larger = static_cast<Moments*>(backend_->allocate(bytes));
  Moments* const old = b.history;
  const size_t old_bytes = b.history_bytes();
  BnInput& input = bn_inputs_.edit(static_cast<size_t>(id));
  try {
    if (old) backend_->copy(larger, old, old_bytes);
    input.history = larger;
    bn_inputs_.flush(*backend_);
  } catch (...) {
    input.history = old;
    backend_->free(larger, bytes);
    throw;
  }
  b.history = larger;
  b.history_size = size;
  ranges_.remove(old);
  ranges_.add(larger, bytes);
  backend_->free(old, old_bytes);
}

// work(): a pass of the task that takes statistics of micro-batch index, of as many elements as
// `taken` says. One that has not been opened may be given the same statistics twice, but not
// others: those of several micro-batches would be taken for one. Returns false where they are the
// same, and nothing has changed.
template <class Work>
bool Context::bn_take(ga_bn id, const char* what, int64_t index, BatchNorm::Taken taken,
                      BnTask& task, Work&& work) {
  BatchNorm& b = batch_norm(id);
  const auto at = static_cast<size_t>(index);
  if (at >= b.taken.capacity()) b.taken.reserve(std::max(at + 1, 2 * b.taken.capacity()));
  const bool windowed = b.options.mode == GA_BN_WINDOW;
  const bool twice = !windowed && window_.open_index() < 0 && b.has(index);
  if (!windowed) bn_make_room(id, index + (twice ? 2 : 1));
  task.index = index;
  task.aside = twice;
  or_invalidate(work);
  if (twice) {
    const auto n = static_cast<size_t>(b.channels);
    std::vector<Moments> both(2 * n);
    backend_->read(both.data(), b.history + index * b.channels, both.size() * sizeof(Moments));
    if (std::memcmp(&both[0], &both[n], n * sizeof(Moments)) != 0)
      fail(
          GA_ERROR_INVALID_STATE,
          "%s: layer \"%s\" was given statistics of other data for micro-batch %lld, which has not "
          "been opened; ga_micro_begin and ga_micro_end, with nothing between them where the "
          "gradients come later, tell micro-batches apart",
          what, b.name.c_str(), ll(index));
    return false;
  }
  if (at >= b.taken.size()) b.taken.resize(at + 1);
  b.taken[at] = taken;
  b.index = index;
  b.sums_of = -1;
  return true;
}

void Context::bn_accumulate(ga_bn id, const void* x, int64_t samples, int64_t positions) {
  check_device();
  BatchNorm& b = batch_norm(id);
  BnTask task = bn_task(b, samples, positions);
  const int64_t index = bn_check_statistics(b, "ga_bn_accumulate");
  bn_check_tensor(b, "x", x, task.count(), false);
  if (b.frozen) return;
  task.x = x;
  bn_take(id, "ga_bn_accumulate", index, {task.elements(), true}, task,
          [&] { backend_->bn_statistics(task); });
}

void Context::bn_accumulate_stats(ga_bn id, int64_t count, const void* mean, const void* spread,
                                  int32_t kind, int32_t dtype) {
  check_device();
  BatchNorm& b = batch_norm(id);
  BnTask task = bn_task(b, 0, 0);
  check_choice("kind", kind, GA_BN_M2, "ga_bn_spread");
  if (dtype != GA_F32 && dtype != GA_F64)
    fail(GA_ERROR_INVALID_ARGUMENT, "layer \"%s\": dtype was %d, expected GA_F32 or GA_F64",
         b.name.c_str(), dtype);
  if (count < 0)
    fail(GA_ERROR_INVALID_ARGUMENT, "layer \"%s\": count was %lld, expected >= 0", b.name.c_str(),
         ll(count));
  const int64_t index = bn_check_statistics(b, "ga_bn_accumulate_stats");
  for (const void* array : {mean, spread}) {
    const char* const what = array == mean ? "mean" : "spread";
    if (!array) fail(GA_ERROR_INVALID_ARGUMENT, "layer \"%s\": %s was NULL", b.name.c_str(), what);
    const int32_t size = dtype_info(dtype).size;
    if (reinterpret_cast<uintptr_t>(array) % static_cast<uintptr_t>(size) != 0)
      fail(GA_ERROR_INVALID_ARGUMENT,
           "layer \"%s\": %s was at address %p, expected a multiple of its element, %d bytes",
           b.name.c_str(), what, array, size);
    if (config_.device != GA_DEVICE_CPU)
      backend_->check_memory(array, ("layer \"" + b.name + "\": " + what).c_str());
  }
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
  bn_take(id, "ga_bn_accumulate_stats", index, {count, true}, task,
          [&] { backend_->bn_take(task, given); });
}

void Context::bn_finalize(ga_bn id) {
  check_device();
  BatchNorm& b = batch_norm(id);
  window_.check_valid();
  if (b.options.mode != GA_BN_WINDOW)
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
  const BnTask task = bn_task(b, 0, 0);
  or_invalidate([&] { backend_->bn_finalize(task); });
  b.final = true;
  b.forwarded = b.sums = 0;
}

// That the second sweep is over what the first one was.
void Context::bn_check_sweep(const BatchNorm& b, const char* what, int64_t index,
                             int64_t count) const {
  const auto seen = static_cast<int64_t>(b.taken.size());
  if (!b.final)
    fail(GA_ERROR_INVALID_STATE,
         "%s: layer \"%s\" has seen %lld micro-batches, but ga_bn_finalize is still due", what,
         b.name.c_str(), ll(seen));
  if (index >= seen)
    fail(GA_ERROR_INVALID_STATE,
         "%s: layer \"%s\": micro-batch %lld was not in its first sweep, which had %lld", what,
         b.name.c_str(), ll(index), ll(seen));
  if (count != b.taken[static_cast<size_t>(index)].count)
    fail(GA_ERROR_INVALID_STATE,
         "%s: layer \"%s\": micro-batch %lld had %lld elements a channel in its first sweep, but "
         "%lld "
         "now",
         what, b.name.c_str(), ll(index), ll(b.taken[static_cast<size_t>(index)].count), ll(count));
}

void Context::bn_forward(ga_bn id, const void* x, int64_t samples, int64_t positions, void* y) {
  check_device();
  BatchNorm& b = batch_norm(id);
  BnTask task = bn_task(b, samples, positions);
  const bool windowed = b.options.mode == GA_BN_WINDOW;
  const int64_t index = bn_index(b, b.forwarded);
  const bool own = !b.frozen && !windowed;  // by this micro-batch's statistics
  const bool given = own && b.has(index) && b.taken[static_cast<size_t>(index)].given;
  if (!b.frozen && windowed) bn_check_sweep(b, "ga_bn_forward", index, task.elements());
  if (given && task.elements() != b.taken[static_cast<size_t>(index)].count)
    fail(GA_ERROR_INVALID_STATE,
         "ga_bn_forward: layer \"%s\": micro-batch %lld brought statistics of %lld elements a "
         "channel, but x has %lld",
         b.name.c_str(), ll(index), ll(b.taken[static_cast<size_t>(index)].count),
         ll(task.elements()));
  bn_check_tensor(b, "x", x, task.count(), false);
  bn_check_tensor(b, "y", y, task.count(), true);
  bn_check_overlap(b, "x", x, "y", y, task.count());
  task.x = x;
  task.out = y;
  task.index = index;
  bool normalised = false;
  if (own && !given) {
    // Statistics for a comparison are taken alone: y is not written where they are others.
    const auto take = [&] {
      normalised = !task.aside;
      normalised ? backend_->bn_forward(task, true) : backend_->bn_statistics(task);
    };
    bn_take(id, "ga_bn_forward", index, {task.elements(), false}, task, take);
    task.aside = false;
  }
  if (own && b.index != index) {  // another micro-batch was visited since
    BnGiven known = {};
    known.known = true;
    or_invalidate([&] { backend_->bn_take(task, known); });
    b.index = index;
    b.sums_of = -1;
  }
  if (!normalised) or_invalidate([&] { backend_->bn_forward(task, false); });
  if (window_.open_index() < 0) ++b.forwarded;
}

void Context::bn_infer(ga_bn id, const void* x, int64_t samples, int64_t positions, void* y) {
  check_device();
  const BatchNorm& b = batch_norm(id);
  BnTask task = bn_task(b, samples, positions);
  bn_check_tensor(b, "x", x, task.count(), false);
  bn_check_tensor(b, "y", y, task.count(), true);
  bn_check_overlap(b, "x", x, "y", y, task.count());
  task.frozen = true;
  task.x = x;
  task.out = y;
  backend_->bn_forward(task, false);
}

// What both backward calls begin with.
BnTask Context::bn_backward_task(const BatchNorm& b, const char* what, const void* x,
                                 const void* dy, int64_t samples, int64_t positions) {
  window_.check_part(what);
  BnTask task = bn_task(b, samples, positions);
  const int64_t index = window_.open_index();
  const Micro& micro = window_.open_micro();
  if (b.frozen) {
  } else if (b.options.mode == GA_BN_WINDOW) {
    bn_check_sweep(b, what, index, task.elements());
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
    bn_check_tensor(b, "x", x, task.count(), false);
    bn_check_tensor(b, "dy", dy, task.count(), false);
  }
  task.x = x;
  task.dy = dy;
  const Source share = contribution(nullptr, GA_F32, micro);
  task.weight = read ? share.scale : 0;
  task.divisor = share.divisor;
  return task;
}

// Whether the open micro-batch has its sums. Makes room for the answer.
bool Context::bn_summed(BatchNorm& b) {
  const auto index = static_cast<size_t>(window_.open_index());
  if (index >= b.summed.size()) b.summed.resize(std::max(index + 1, 2 * b.summed.size()));
  return b.summed[index] != 0;
}

// Records what a pass over the sums has left, and takes it into the window.
void Context::bn_add_sums(BatchNorm& b) {
  b.summed[static_cast<size_t>(window_.open_index())] = 1;
  ++b.sums;
  const int32_t dtype = b.options.dtype == GA_F64 ? GA_F64 : GA_F32;
  Whole given[2];
  size_t count = 0;
  if (b.gamma >= 0) given[count++] = {b.gamma, b.dgamma, dtype};
  if (b.beta >= 0) given[count++] = {b.beta, b.dbeta, dtype};
  if (count > 0) or_invalidate([&] { contribute({given, count}, false); });
}

// Makes sure that gamma and beta can take a contribution now.
void Context::bn_prepare_params(const BatchNorm& b, const char* what) {
  bool contributes = false;
  for (const ga_param id : {b.gamma, b.beta}) {
    if (id < 0) continue;
    const Param& p = part(id, what);
    check_single(id);
    contributes = contributes || !p.frozen;
  }
  if (contributes && window_.open_micro().weight > 0) prepare();
}

void Context::bn_backward_accumulate(ga_bn id, const void* x, const void* dy, int64_t samples,
                                     int64_t positions) {
  check_device();
  BatchNorm& b = batch_norm(id);
  const char* const what = "ga_bn_backward_accumulate";
  const BnTask task = bn_backward_task(b, what, x, dy, samples, positions);
  if (bn_summed(b))
    fail(GA_ERROR_INVALID_STATE, "%s: layer \"%s\" has the sums of micro-batch %lld already", what,
         b.name.c_str(), ll(window_.open_index()));
  bn_prepare_params(b, what);
  if (task.weight != 0) or_invalidate([&] { backend_->bn_backward_sums(task); });
  b.sums_of = window_.open_index();
  bn_add_sums(b);
}

void Context::bn_backward(ga_bn id, const void* x, const void* dy, int64_t samples,
                          int64_t positions, void* dx) {
  check_device();
  BatchNorm& b = batch_norm(id);
  const char* const what = "ga_bn_backward";
  BnTask task = bn_backward_task(b, what, x, dy, samples, positions);
  const bool windowed = b.options.mode == GA_BN_WINDOW && !b.frozen;
  // Gamma and beta get the sums of a micro-batch once; dx needs those of its own x and dy.
  const int64_t index = window_.open_index();
  const bool adding = !bn_summed(b) && !windowed;
  const bool summing = adding || (!windowed && !b.frozen && b.sums_of != index);
  if (summing && !adding && deferring())
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
  bn_check_tensor(b, "dx", dx, task.count(), true);
  if (task.weight != 0) {
    bn_check_overlap(b, "x", x, "dx", dx, task.count());
    bn_check_overlap(b, "dy", dy, "dx", dx, task.count());
  }
  if (adding) bn_prepare_params(b, what);
  task.out = dx;
  or_invalidate([&] { backend_->bn_backward(task, summing && task.weight != 0); });
  b.sums_of = -1;
  if (adding) bn_add_sums(b);
}

// ---- Statistics for the program -----------------------------------------------------------------

namespace {

void check_statistics_dtype(const char* name, int32_t dtype) {
  if (dtype != GA_F32 && dtype != GA_F64)
    fail(GA_ERROR_INVALID_ARGUMENT, "layer \"%s\": dtype was %d, expected GA_F32 or GA_F64", name,
         dtype);
}

}  // namespace

std::vector<BnChannel> Context::bn_read(const BatchNorm& b) const {
  std::vector<BnChannel> state(static_cast<size_t>(b.channels));
  backend_->read(state.data(), b.state, state.size() * sizeof(BnChannel));
  return state;
}

void Context::bn_running(ga_bn id, void* mean, void* variance, int32_t dtype,
                         int64_t* steps) const {
  const BatchNorm& b = batch_norm(id);
  check_statistics_dtype(b.name.c_str(), dtype);
  const std::vector<BnChannel> state = bn_read(b);
  int64_t most = 0;
  for (int64_t c = 0; c < b.channels; ++c) {
    const BnChannel& channel = state[static_cast<size_t>(c)];
    if (mean) set_element(mean, dtype, c, channel.running_mean);
    if (variance) set_element(variance, dtype, c, channel.running_variance);
    most = std::max(most, channel.steps);
  }
  if (steps) *steps = most;
}

void Context::bn_running_set(ga_bn id, const void* mean, const void* variance, int32_t dtype,
                             int64_t steps) {
  require_empty("ga_bn_running_set");
  check_device();
  BatchNorm& b = batch_norm(id);
  bn_require_unused(b, "ga_bn_running_set");
  check_statistics_dtype(b.name.c_str(), dtype);
  if (!mean || !variance)
    fail(GA_ERROR_INVALID_ARGUMENT, "layer \"%s\": %s was NULL", b.name.c_str(),
         mean ? "variance" : "mean");
  if (steps < 0)
    fail(GA_ERROR_INVALID_ARGUMENT, "layer \"%s\": steps was %lld, expected >= 0", b.name.c_str(),
         ll(steps));
  std::vector<BnChannel> state = bn_read(b);
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
  backend_->write(b.state, state.data(), state.size() * sizeof(BnChannel));
}

void Context::bn_statistics(ga_bn id, void* mean, void* variance, int32_t dtype,
                            int64_t* count) const {
  const BatchNorm& b = batch_norm(id);
  check_statistics_dtype(b.name.c_str(), dtype);
  if (!b.frozen && b.options.mode == GA_BN_WINDOW && b.index >= 0 && !b.final)
    fail(GA_ERROR_INVALID_STATE, "ga_bn_statistics: layer \"%s\": ga_bn_finalize is due",
         b.name.c_str());
  if (b.frozen || b.index < 0)
    fail(GA_ERROR_INVALID_STATE, "ga_bn_statistics: layer \"%s\" %s", b.name.c_str(),
         b.frozen ? "is frozen: it normalises by its running statistics"
                  : "has no statistics in this window");
  const std::vector<BnChannel> state = bn_read(b);
  for (int64_t c = 0; c < b.channels; ++c) {
    const BnChannel& channel = state[static_cast<size_t>(c)];
    if (mean) set_element(mean, dtype, c, channel.mean);
    if (variance) set_element(variance, dtype, c, channel.variance);
  }
  if (count) *count = static_cast<int64_t>(state[0].count);
}

// The window is over.
void Context::bn_forget() {
  for (BatchNorm& b : batch_norms_) {
    b.index = b.sums_of = -1;
    b.forwarded = b.sums = 0;
    b.final = false;
    b.taken.clear();
    b.summed.clear();
  }
}

}  // namespace ga
