// SPDX-License-Identifier: Apache-2.0
// Adding a layer, its state in a file, and what a window leaves to it.
#include "batchnorm/batchnorm.hpp"

#include <algorithm>
#include <string>

#include "batchnorm/layer.hpp"
#include "core/error.hpp"
#include "core/tensor.hpp"
#include "files/names.hpp"
#include "model/table_writer.hpp"

namespace ga {
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

BatchNorms::BatchNorms(Model& model, TableWriter& writer, Accumulator& accumulator)
    : model_(model), writer_(writer), accumulator_(accumulator) {}

BatchNorms::~BatchNorms() = default;

const BatchNorms::Layer& BatchNorms::layer(ga_bn id) const {
  if (id < 0 || static_cast<size_t>(id) >= layers_.size())
    fail(GA_ERROR_INVALID_ARGUMENT, "bn was %d, but the context has %zu layers", id,
         layers_.size());
  return layers_[static_cast<size_t>(id)];
}

// The layer of a call that enqueues work; throws if that is not possible now.
BatchNorms::Layer& BatchNorms::layer_for_work(ga_bn id) {
  model_.backend->capturing();
  return layer(id);
}

// ---- Adding a layer -----------------------------------------------------------------------------

ga_bn BatchNorms::add(const char* name, int64_t channels, ga_param gamma, ga_param beta,
                      const ga_bn_options& o) {
  model_.window.check_empty("ga_bn_add");
  model_.backend->capturing();  // throws if no work can be enqueued now
  check_options(name, channels, o);
  check_params(name, channels, gamma, beta);
  check_mode(name, o.mode);
  Layer b = {name, channels, gamma, beta, o, layers_.size()};
  layers_.reserve(layers_.size() + 1);
  Names added = {{name, count()}};
  allocate(b);
  b.name = names_.insert(added.extract(added.begin())).position->first.c_str();
  layers_.push_back(std::move(b));
  writer_.set_tables();
  return count() - 1;
}

void BatchNorms::check_options(const char* name, int64_t channels, const ga_bn_options& o) const {
  if (!name || !*name) fail(GA_ERROR_INVALID_ARGUMENT, "the layer's name was empty");
  const Subject of = {"layer", name};
  if (find(name) >= 0)
    of.fail(GA_ERROR_INVALID_ARGUMENT, "the context has a layer of that name already");
  check_name(of, name);
  if (channels < 1 || channels > INTPTR_MAX / 4096)
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

void BatchNorms::check_name(const Subject& of, const char* name) const {
  const auto is_used = [&](std::string_view owner) {
    return model_.params.find(owner) >= 0 || find(owner) >= 0;
  };
  ga::check_name(of, name, is_used);
  const auto refuse = [&](const char* other) {
    of.fail(GA_ERROR_INVALID_ARGUMENT,
            "\"%.200s\" is also the name of its state in a state file (ga_save)", other);
  };
  if (const ga_param id = model_.params.find_state_of(name); id >= 0)
    refuse(model_.params.name(id));
  for (ga_bn id = 0; id < count(); ++id)
    if (const char* const layer = info(id).name; is_state_of(layer, name)) refuse(layer);
}

// Micro-batches that are clipped cannot be opened again, as the second pass of WINDOW mode does.
void BatchNorms::check_no_passes(const ga_clip& clip) const {
  if (!is_of_micros(clip)) return;
  if (const char* const layer = name_of_windowed())
    fail(
        GA_ERROR_UNSUPPORTED,
        "clip: GA_CLIP_WHEN_MICRO was set, but batch-normalisation layer \"%s\" is in WINDOW mode, "
        "which opens micro-batches again",
        layer);
}

void BatchNorms::check_params(const char* name, int64_t channels, ga_param gamma,
                              ga_param beta) const {
  const Subject of = {"layer", name};
  const auto check = [&](const char* what, ga_param id) {
    if (id == -1) return;
    const int64_t count = model_.params.get(id).count;
    if (count != channels)
      of.fail(GA_ERROR_INVALID_ARGUMENT,
              "%s, parameter \"%s\", has %lld elements, expected one for each of %lld channels",
              what, model_.params.name(id), ll(count), ll(channels));
    if (const Reduction r = model_.params[id].reduction; !is_sum(r))
      of.fail(GA_ERROR_UNSUPPORTED, "%s, parameter \"%s\", has %s", what, model_.params.name(id),
              name_of(r));
  };
  check("gamma", gamma);
  check("beta", beta);
  if (gamma >= 0 && gamma == beta)
    of.fail(GA_ERROR_INVALID_ARGUMENT, "gamma and beta are both parameter \"%s\"",
            model_.params.name(gamma));
}

void BatchNorms::check_mode(const char* name, int32_t mode) const {
  const Subject of = {"layer", name};
  if (mode != GA_BN_MICRO && model_.config.nonfinite == GA_NONFINITE_DROP_MICRO)
    of.fail(GA_ERROR_UNSUPPORTED,
            "%s mode is not supported with GA_NONFINITE_DROP_MICRO: other micro-batches would have "
            "been normalised with one that is dropped",
            mode == GA_BN_WINDOW ? "WINDOW" : "CUMULATIVE");
  if (mode == GA_BN_WINDOW && model_.options.deferring())
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
  Table<BnInput> inputs = model_.tables.layers.grown(*model_.backend, b.input + 1);
  b.block = Buffer(*model_.backend, state + 2 * sums);
  b.state = static_cast<BnChannel*>(b.block.data());
  b.dgamma = reinterpret_cast<char*>(b.state) + state;
  b.dbeta = static_cast<char*>(b.dgamma) + sums;
  model_.backend->write(b.state, initial.data(), state);
  model_.ranges.reserve_more(1);
  inputs.edit(b.input) = {b.state, nullptr, b.channels, b.options.momentum, b.options.biased != 0,
                          false};
  inputs.flush(*model_.backend);
  model_.backend->bn_reserve(b.channels);
  model_.ranges.add(b.state, b.block.bytes());
  if (b.gamma >= 0) b.gradient[b.gradient_count++] = {b.gamma, b.dgamma, b.sum_dtype()};
  if (b.beta >= 0) b.gradient[b.gradient_count++] = {b.beta, b.dbeta, b.sum_dtype()};
  model_.tables.layers.swap(inputs);
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
  model_.window.check_empty("ga_bn_set_frozen");
  Layer& b = layer(id);
  b.require_unused("ga_bn_set_frozen");
  b.frozen = frozen;
  model_.tables.layers.edit(b.input).frozen = frozen;
  model_.tables.layers.flush(
      *model_.backend);  // because only replays of a captured graph may follow
  writer_.settings_changed(true);
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
  if (held > 0)
    model_.backend->read(s.history.data(), b.history.at(), s.history.size() * sizeof(Moments));
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
  model_.backend->write(b.state, s.channels.data(), s.channels.size() * sizeof(BnChannel));
  if (!s.history.empty())
    model_.backend->write(b.history.at(), s.history.data(), s.history.size() * sizeof(Moments));
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

int64_t BatchNorms::close_passes() {
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

bool BatchNorms::has_statistics_of(int64_t micro) const {
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
    model_.backend->write(b.history.at(static_cast<size_t>(micro * b.channels)), none.data(),
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
