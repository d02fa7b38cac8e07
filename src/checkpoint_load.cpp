// SPDX-License-Identifier: Apache-2.0
// Loading: finds what the file has for this context, reads and checks all of it, makes room, and only then
// changes the context.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <functional>

#include "checkpoint.hpp"
#include "error.hpp"
#include "names.hpp"
#include "tensor.hpp"

namespace ga {
namespace {

constexpr int64_t kMost = int64_t{1} << 53;  // the largest count
constexpr size_t kPiece = size_t{256} << 10;

std::string text_of(const std::vector<int64_t>& shape) {
  std::string text = "[";
  for (const int64_t extent : shape) text += (text.size() > 1 ? ", " : "") + std::to_string(extent);
  return text + "]";
}

// An integer in [low, high], from a number of a file.
int64_t whole(double x, int64_t low, int64_t high, const char* what) {
  if (!(x >= static_cast<double>(low) && x <= static_cast<double>(high)) || x != std::floor(x))
    fail(GA_ERROR_FORMAT, "%.300s was %g, expected an integer from %lld to %lld", what, x, ll(low),
         ll(high));
  return static_cast<int64_t>(x);
}

}  // namespace

// While it exists, or for good after keep(), the context has the settings that are taken.
class Checkpoint::Exchanged {
 public:
  explicit Exchanged(Checkpoint& checkpoint) : checkpoint_(&checkpoint) { checkpoint.exchange(); }
  ~Exchanged() {
    if (checkpoint_) checkpoint_->exchange();
  }
  Exchanged(const Exchanged&) = delete;
  Exchanged& operator=(const Exchanged&) = delete;
  void keep() { checkpoint_ = nullptr; }

 private:
  Checkpoint* checkpoint_;
};

void Checkpoint::check_load() const {
  context_.window_.check_empty(what_);
  if (context_.batch_norms_.has_statistics())
    fail(GA_ERROR_INVALID_STATE,
         "%s was called while a layer has statistics of the next window; ga_discard drops them",
         what_);
}

void Checkpoint::load(int64_t size, const ReadAt& read, const std::function<void()>& ready) {
  check_load();
  read_ = &read;
  file_ = std::make_unique<StateReader>(size, read, options_.unmarked != 0);
  total_ = 2 * file_->data_bytes();
  find_tensors();
  if (options_.parts != GA_STATE_PARAMETERS) {
    compare_settings();
    read_texts();
  }
  read_all();
  if (options_.settings == GA_SETTINGS_TAKE && texts_.counted) take_settings();
  if (texts_.counted) {
    const Exchanged taken(*this);  // the window is checked against these settings
    read_window();
  }
  context_.backend_->wait();
  try {
    make_room();
    Exchanged taken(*this);
    // Last, because the units of the old settings are gone then.
    if (taken_ && context_.prepared_ > 0) context_.arrays_.make_units();
    if (ready) ready();
    taken.keep();
  } catch (...) {
    tell_all();
    throw;
  }
  try {
    place_arrays();
    place_numbers();
    tell_all();
  } catch (const std::exception& e) {
    fail_halfway(e.what());
  } catch (...) {  // of a callback in C++
    fail_halfway("an unknown exception was thrown");
  }
}

// Leaves a context of no use.
void Checkpoint::fail_halfway(const char* why) {
  char text[1024];
  std::snprintf(text, sizeof text, "%s stopped half-way: %s", what_, why);
  context_.broken_.emplace(GA_ERROR_FAULT, text);
  throw *context_.broken_;
}

// ---- What the file has --------------------------------------------------------------------------

// The file's tensor of that name, which then is not one too many; -1: none.
int64_t Checkpoint::claim(const std::string& name) {
  const auto found = names_.find(name);
  if (found == names_.end()) return -1;
  claimed_[found->second] = true;
  return static_cast<int64_t>(found->second);
}

// Checks the shape of a tensor, in which -1 stands for any extent, and that it is of one of the dtypes.
void Checkpoint::check_tensor(int64_t tensor, std::initializer_list<int32_t> dtypes,
                              const std::vector<int64_t>& shape, Problems& problems) const {
  const safetensors::Tensor& t = file_->tensors()[static_cast<size_t>(tensor)];
  const bool fits = std::any_of(dtypes.begin(), dtypes.end(), [&](int32_t dtype) {
    return t.dtype == dtype_info(dtype).file_name;
  });
  const bool same = std::equal(t.shape.begin(), t.shape.end(), shape.begin(), shape.end(),
                               [](int64_t given, int64_t any) { return any < 0 || given == any; });
  if (!fits)
    problems.add("\"" + t.name + "\" is " + t.dtype + " in the file, but " +
                 dtype_info(*dtypes.begin()).file_name + " here");
  else if (!same)
    problems.add("\"" + t.name + "\" is " + text_of(t.shape) + " in the file, but " +
                 text_of(shape) + " here");
}

// Whether a tensor belongs to a part that is not loaded.
bool Checkpoint::is_left_out(const std::string& name) const {
  if (begins_with(name, kOurs)) return file_->is_ours();
  if (options_.parts == GA_STATE_ALL) return false;
  const auto is_param = [&](std::string_view n) { return context_.params_.find(n) >= 0; };
  if (options_.parts == GA_STATE_LIBRARY) return is_param(name);
  for (size_t dot = name.find('.'); dot != std::string::npos; dot = name.find('.', dot + 1)) {
    const std::string_view owner = std::string_view(name).substr(0, dot);
    if (is_state_of(name, owner) && (is_param(owner) || context_.batch_norms_.find(owner) >= 0))
      return true;
  }
  return false;
}

void Checkpoint::find_tensors() {
  const auto& tensors = file_->tensors();
  claimed_.assign(tensors.size(), false);
  for (size_t k = 0; k < tensors.size(); ++k) names_[tensors[k].name] = k;
  const std::string* const ranks = file_->find("ranks");
  if (ranks && *ranks != "1")
    fail(GA_ERROR_FORMAT, "it is the state of %.20s ranks, but this context is alone",
         ranks->c_str());
  Problems problems;
  params_.resize(context_.params_.size());
  for (size_t i = 0; i < params_.size(); ++i)
    if (!context_.params_.tensor(i).removed) find_param(i, problems);
  layers_.resize(static_cast<size_t>(context_.batch_norms_.count()));
  for (ga_bn id = 0; id < context_.batch_norms_.count(); ++id) find_layer(id, problems);
  if (!options_.allow_extra)
    for (size_t k = 0; k < tensors.size(); ++k)
      if (!claimed_[k] && !is_left_out(tensors[k].name))
        problems.add("the context has no place for \"" + tensors[k].name + "\"");
  problems.fail_if_any("the file does not fit the context");
}

void Checkpoint::find_param(size_t i, Problems& problems) {
  const Param& p = context_.params_[i];
  const Tensor& t = context_.params_.tensor(i);
  const std::string name = t.name;
  ParamIn& in = params_[i];
  const auto missing = [&](const std::string& what) {
    if (!options_.allow_missing) problems.add("the file has no \"" + what + "\"");
  };
  const auto find = [&](int kind, const std::string& key) {
    return in.tensor[static_cast<size_t>(kind)] = claim(key);
  };
  if (options_.parts != GA_STATE_LIBRARY) {
    if (const int64_t at = find(kValues, name); at < 0)
      missing(name);
    else
      check_tensor(at, {p.dtype}, t.shape, problems);
  }
  if (options_.parts == GA_STATE_PARAMETERS) return;

  // A file of ours lists its parameters, and then has all state that there was.
  in.listed = file_->is_ours() && file_->find("parameter." + name);
  std::vector<std::string> lacking;
  for (const auto& [a, dtype, shape] : arrays_of(i)) {
    const std::string key = name + "." + a.name;
    const int64_t at = find(a.kind, key);
    if (at >= 0) check_tensor(at, {dtype}, shape, problems);
    in.state = in.state || (at >= 0 && a.kind < kMaster);
    if (at < 0 && (!in.listed || a.kind < kMaster)) lacking.push_back(key);
  }
  const Group& g = context_.params_.group_of(p);
  const auto find_number = [&](int kind, const char* key, std::initializer_list<int32_t> dtypes) {
    const int64_t at = find(kind, name + "." + key);
    if (at < 0) return lacking.push_back(name + "." + key);
    check_tensor(at, dtypes, {}, problems);
    in.state = true;
  };
  if (context_.params_.op_of(p) >= 0 && g.optimizer.flavor == GA_FLAVOR_TORCH) {
    find_number(kStepNumber, "step", {GA_I64, GA_I32, GA_F32, GA_F64});
    if (g.info->product) find_number(kProductNumber, g.info->product, {GA_F64, GA_F32});
  }
  if (in.state || !in.listed)
    for (const std::string& key : lacking) missing(key);

  if (!in.listed) return;  // only a file of ours has an open window
  const std::string held = name + ".grad_accum";
  const auto optional = [&](int kind, const std::string& key, int32_t dtype,
                            const std::vector<int64_t>& shape) {
    if (const int64_t at = find(kind, key); at >= 0) check_tensor(at, {dtype}, shape, problems);
  };
  std::vector<int64_t> some_rows = t.shape;
  if (!some_rows.empty()) some_rows[0] = -1;
  optional(kAccumulator, held, p.accumulator_dtype, t.shape);
  optional(kLow, held + "_low", p.accumulator_dtype, t.shape);
  optional(kHeldNumbers, held + ".window", GA_F64, {7});
  optional(kHeldPartials, held + ".partials", GA_F64, {-1, 3});
  optional(kHeldRows, held + ".rows", GA_I64, {-1});
  optional(kHeldValues, held + ".values", p.accumulator_dtype, some_rows);
}

void Checkpoint::find_layer(ga_bn id, Problems& problems) {
  const ga_bn_info layer = context_.batch_norms_.info(id);
  const std::string name = layer.name;
  LayerIn& in = layers_[static_cast<size_t>(id)];
  const auto find = [&](int kind, const std::string& key, const std::vector<int64_t>& shape,
                        std::initializer_list<int32_t> dtypes, bool needed) {
    const int64_t at = in.tensor[static_cast<size_t>(kind)] = claim(key);
    if (at >= 0)
      check_tensor(at, dtypes, shape, problems);
    else if (needed && !options_.allow_missing)
      problems.add("the file has no \"" + key + "\"");
  };
  const int64_t channels = layer.channels;
  find(kMean, name + ".running_mean", {channels}, {GA_F64, GA_F32}, true);
  find(kVariance, name + ".running_var", {channels}, {GA_F64, GA_F32}, true);
  find(kSteps, name + ".num_batches_tracked", {}, {GA_I64, GA_I32}, file_->is_ours());
  if (options_.parts == GA_STATE_PARAMETERS || !file_->is_ours()) return;
  const std::string window = name + ".bn_window";
  find(kChannelSteps, name + ".num_batches_tracked.channels", {channels}, {GA_I64}, false);
  find(kChannels, window, {channels, kChannelNumbers}, {GA_F64}, false);
  if (!in.has(kChannels)) return;
  find(kSweep, window + ".sweep", {6}, {GA_I64}, true);
  find(kMicros, window + ".micro_batches", {-1, 3}, {GA_I64}, true);
  find(kHistory, window + ".history", {-1, channels, 3}, {GA_F64}, true);
}

// ---- Numbers of the file ------------------------------------------------------------------------

void Checkpoint::read_texts() {
  if (!file_->is_ours()) return;
  const auto text = [&](const std::string& key) -> const std::string& {
    const std::string* const found = file_->find(key);
    if (!found)
      fail(GA_ERROR_INVALID_ARGUMENT,
           "it holds no state of the library (gradaccum.%s), only parameters: "
           "ga_state_options.parts GA_STATE_PARAMETERS loads them",
           key.c_str());
    return *found;
  };
  TextsIn& in = texts_;
  in.control = context_.control();
  const Fields counters(text("counters"), "counters");
  counters.get_fields(in.control);
  counters.get("host_windows", in.host_windows);
  Fields(text("result"), "result").get_fields(in.control.result);
  in.control.result.struct_size = sizeof in.control.result;
  const Control& c = in.control;
  for (const int64_t count : {c.windows, c.steps, c.skipped, c.dropped, c.scaler.good_steps,
                              int64_t{c.scaler.bad_windows}, c.weighted, c.window_dropped,
                              in.host_windows, c.result.windows, c.result.steps})
    whole(static_cast<double>(count), 0, kMost, "a counter of the file");
  if (c.result.windows != c.windows)
    fail(GA_ERROR_FORMAT, "its last result is of window %lld, but it has %lld windows",
         ll(c.result.windows), ll(c.windows));
  if (!(file_->find("loss_scaler") ? c.scaler.scale > 0 : c.scaler.scale >= 0) ||
      !std::isfinite(c.scaler.scale) || !std::isfinite(c.weight))
    fail(GA_ERROR_FORMAT, "the loss scale of the file was %g and its weight %g", c.scaler.scale,
         c.weight);
  const Fields window(text("window"), "window");
  window.get("rows_held", in.rows_held);
  window.get("noise_repeated", in.noise_repeated);
  whole(static_cast<double>(in.rows_held), 0, kMost, "rows_held");
  for (size_t k = 0; k < context_.params_.groups.size(); ++k) {
    const Group& g = context_.params_.groups[k];
    const std::string key = "group." + std::to_string(k);
    const std::string* const state = file_->find(key + ".state");
    const std::string* const optimizer = file_->find(key);
    GroupState of = {};
    int32_t kind = -1;
    if (optimizer) Fields(*optimizer, key.c_str()).get("kind", kind);
    if (state && kind == g.optimizer.kind) {
      Fields(*state, key.c_str()).get_fields(of);
      whole(static_cast<double>(of.clock.step), 0, kMost, "the step of a group");
    } else {
      of.clock = clock_after(*g.info, g.optimizer, c.steps);
    }
    in.groups.push_back(of);
  }
  in.counted = true;
}

// Reads the whole file: keeps the tensors of numbers that were claimed, and checks all checksums.
void Checkpoint::read_all() {
  const auto& tensors = file_->tensors();
  for (const ParamIn& p : params_)
    for (int kind = kStepNumber; kind <= kHeldRows; ++kind)
      if (p.has(kind)) small_[static_cast<size_t>(p.at(kind))];
  for (const LayerIn& b : layers_)
    for (int kind = 0; kind < kLayerKinds; ++kind)
      if (b.has(kind)) small_[static_cast<size_t>(b.at(kind))];
  for (size_t k = 0; k < tensors.size(); ++k)
    if (file_->is_ours() && begins_with(tensors[k].name, kOurs)) small_[k];
  std::vector<unsigned char> buffer(kPiece);
  for (size_t k = 0; k < tensors.size(); ++k) {
    const auto kept = small_.find(k);
    auto left = static_cast<size_t>(tensors[k].end - tensors[k].begin);
    file_->seek(k);
    if (kept != small_.end()) kept->second.resize(left);
    for (size_t at = 0; left > 0;) {
      const size_t size = std::min(left, kPiece);
      file_->next(*read_, kept != small_.end() ? kept->second.data() + at : buffer.data(), size);
      at += size;
      left -= size;
      report(static_cast<int64_t>(size), true);
    }
  }
  if (total_ == 0) report(0, true);
  for (size_t i = 0; i < params_.size(); ++i)
    if (!context_.params_.tensor(i).removed) read_param(i);
  for (ga_bn id = 0; id < context_.batch_norms_.count(); ++id) read_layer(id);
}

std::vector<double> Checkpoint::numbers(int64_t tensor) const {
  const auto k = static_cast<size_t>(tensor);
  const std::string& dtype = file_->tensors()[k].dtype;
  const std::vector<unsigned char>& bytes = small_.at(k);
  std::vector<double> list;
  const auto take = [&](auto zero) {
    for (size_t at = 0; at + sizeof zero <= bytes.size(); at += sizeof zero) {
      std::memcpy(&zero, bytes.data() + at, sizeof zero);
      list.push_back(static_cast<double>(zero));
    }
  };
  if (dtype == "F64") take(double{});
  if (dtype == "F32") take(float{});
  if (dtype == "I64") take(int64_t{});
  if (dtype == "I32") take(int32_t{});
  return list;
}

std::vector<int64_t> Checkpoint::integers(int64_t tensor) const {
  std::vector<int64_t> list;
  for (const double x : numbers(tensor))
    list.push_back(whole(
        x, -1, kMost,
        ("a number in \"" + file_->tensors()[static_cast<size_t>(tensor)].name + "\"").c_str()));
  return list;
}

void Checkpoint::read_param(size_t i) {
  const Param& p = context_.params_[i];
  const Tensor& t = context_.params_.tensor(i);
  ParamIn& in = params_[i];
  const std::string name = t.name;
  if (in.has(kStepNumber))
    in.step = whole(numbers(in.at(kStepNumber))[0], 0, kMost, (name + ".step").c_str());
  else if (in.state)
    in.step = 1;  // torch's SGD keeps a momentum and no step: state that is there is not of step 0
  if (in.has(kProductNumber)) {
    in.product = numbers(in.at(kProductNumber))[0];
    if (!(in.product >= 0 && in.product <= 1))
      fail(GA_ERROR_FORMAT, "the product of betas of \"%.200s\" was %g, expected one in [0, 1]",
           t.name, in.product);
  }
  if (!in.has(kHeldNumbers)) return;
  const std::string held = "the window of \"" + name + "\"";
  const auto fail_held = [&](const char* what) {
    fail(GA_ERROR_FORMAT, "%.300s %s", held.c_str(), what);
  };
  const std::vector<double> n = numbers(in.at(kHeldNumbers));
  HeldIn& w = in.window;
  static constexpr Held kinds[] = {Held::kNothing, Held::kStored, Held::kRows};
  w.held = kinds[whole(n[0], 0, 2, held.c_str())];
  const bool rows = w.held == Held::kRows;
  w.stale = whole(n[1], 0, 1, held.c_str()) != 0;
  w.contributions = whole(n[2], 0, kMost, held.c_str());
  w.last_micro = whole(n[3], -1, kMost, held.c_str());
  w.held_weight = n[4];
  w.contributed = whole(n[5], 0, 1, held.c_str());
  w.state_held_weight = n[6];
  if (w.held == Held::kNothing) return;
  if (p.count > 0 && !rows && !in.has(kAccumulator)) fail_held("has no gradient");
  if (p.count > 0 && !rows && in.has(kLow) != context_.arrays_.is_compensated(p))
    fail_held("has half of a compensated gradient");
  if (p.count > 0 && rows && t.options.rows == GA_ROWS_NONE)
    fail_held("is a gradient of some rows, but the parameter has no ga_param_options.rows");
  if (p.count > 0 && rows && !(in.has(kHeldRows) && in.has(kHeldValues))) fail_held("has no rows");
  const std::vector<double> sums =
      in.has(kHeldPartials) ? numbers(in.at(kHeldPartials)) : std::vector<double>();
  for (size_t k = 0; k + 2 < sums.size(); k += 3)
    w.partials.push_back({sums[k], 0, sums[k + 1], whole(sums[k + 2], 0, 1, held.c_str())});
  int64_t partials = chunk_count(p.count);
  if (rows && p.count > 0) {
    w.rows = integers(in.at(kHeldRows));
    partials = static_cast<int64_t>(w.rows.size());
    std::vector<bool> seen(static_cast<size_t>(t.rows));
    for (const int64_t row : w.rows) {
      if (row < 0 || row >= t.rows || seen[static_cast<size_t>(row)])
        fail_held("has a row twice, or one that the parameter has not");
      seen[static_cast<size_t>(row)] = true;
    }
    const auto& values = file_->tensors()[static_cast<size_t>(in.at(kHeldValues))].shape;
    if (values[0] != partials) fail_held("has not as many values as rows");
  }
  if (static_cast<int64_t>(w.partials.size()) != partials)
    fail_held("has another number of partial sums than this version of the library");
}

void Checkpoint::read_layer(ga_bn id) {
  const ga_bn_info layer = context_.batch_norms_.info(id);
  const std::string name = "the statistics of \"" + std::string(layer.name) + "\"";
  LayerIn& in = layers_[static_cast<size_t>(id)];
  BatchNorms::Snapshot& s = in.snapshot;
  s = context_.batch_norms_.snapshot(id);
  const auto channels = static_cast<size_t>(layer.channels);
  if (in.has(kMean)) {
    const std::vector<double> mean = numbers(in.at(kMean));
    for (size_t c = 0; c < channels; ++c) s.channels[c].running_mean = mean[c];
  }
  if (in.has(kVariance)) {
    const std::vector<double> variance = numbers(in.at(kVariance));
    for (size_t c = 0; c < channels; ++c) s.channels[c].running_variance = variance[c];
  }
  for (const BnChannel& c : s.channels)
    if (!std::isfinite(c.running_mean) || !(c.running_variance >= 0) ||
        !std::isfinite(c.running_variance))
      fail(GA_ERROR_FORMAT, "%.300s: a running mean was %g and its variance %g", name.c_str(),
           c.running_mean, c.running_variance);
  if (in.has(kSteps)) {
    const int64_t steps = integers(in.at(kSteps))[0];
    for (BnChannel& c : s.channels) c.steps = steps;
  }
  if (in.has(kChannelSteps)) {
    const std::vector<int64_t> steps = integers(in.at(kChannelSteps));
    for (size_t c = 0; c < channels; ++c) s.channels[c].steps = steps[c];
  }
  for (const BnChannel& c : s.channels)
    whole(static_cast<double>(c.steps), 0, kMost, (name + ": num_batches_tracked").c_str());
  if (!in.has(kChannels)) return;
  for (const int kind : {kSweep, kMicros, kHistory})
    if (!in.has(kind)) fail(GA_ERROR_FORMAT, "%.300s are there in part only", name.c_str());

  const std::vector<double> state = numbers(in.at(kChannels));
  const std::vector<int64_t> sweep = integers(in.at(kSweep)), micros = integers(in.at(kMicros));
  const std::vector<double> history = numbers(in.at(kHistory));
  const auto held = static_cast<int64_t>(history.size() / (3 * channels));
  for (size_t c = 0; c < channels; ++c) {
    const double* x = state.data() + kChannelNumbers * c;
    BnChannel& b = s.channels[c];
    each_field(b, [&](const char*, auto& field) {
      if constexpr (std::is_same_v<decltype(field), int64_t&>)
        field = whole(*x++, 0, held, name.c_str());
      else
        field = *x++;
    });
    if (b.merged > b.taken)
      fail(GA_ERROR_FORMAT, "%.300s are merged of more micro-batches than there are", name.c_str());
  }
  s.history.clear();
  for (size_t k = 0; k < history.size(); k += 3)
    s.history.push_back({history[k], history[k + 1], history[k + 2]});
  s.micros.clear();
  for (size_t k = 0; k < micros.size(); k += 3)
    s.micros.push_back({micros[k], micros[k + 1] != 0, micros[k + 2] != 0});
  const auto size = static_cast<int64_t>(s.micros.size());
  s.index = whole(static_cast<double>(sweep[0]), -1, size - 1, name.c_str());
  s.sums_of = whole(static_cast<double>(sweep[1]), -1, size - 1, name.c_str());
  s.forwarded = whole(static_cast<double>(sweep[2]), 0, kMost, name.c_str());
  s.sums = whole(static_cast<double>(sweep[3]), 0, size, name.c_str());
  s.final = whole(static_cast<double>(sweep[4]), 0, 1, name.c_str()) != 0;
  s.seen = whole(static_cast<double>(sweep[5]), 0, size, name.c_str());
  // Without a history, the statistics of a layer that is not in WINDOW mode could not be used.
  if (layer.mode != GA_BN_WINDOW && !layer.frozen && held < s.seen)
    fail(GA_ERROR_FORMAT, "%.300s are of fewer micro-batches than it says", name.c_str());
}

void Checkpoint::read_window() {
  const auto found = names_.find(std::string(kOurs) + "window.micro_batches");
  if (found != names_.end()) {
    const std::vector<int64_t>& shape = file_->tensors()[found->second].shape;
    if (shape.size() != 2 || shape[1] != 4 || file_->tensors()[found->second].dtype != "F64")
      fail(GA_ERROR_FORMAT, "the micro-batches of its window have the shape %s",
           text_of(shape).c_str());
    const std::vector<double> n = numbers(static_cast<int64_t>(found->second));
    // A scale of the context's own is not written down where only the device knows it.
    const bool late = context_.late_scale();
    for (size_t k = 0; k < n.size(); k += 4) {
      const bool own = whole(n[k + 2], 0, 1, "a micro-batch") != 0;
      const bool last = whole(n[k + 3], 0, 1, "a micro-batch") != 0;
      if (!(n[k] >= 0) || !std::isfinite(n[k]) || !std::isfinite(n[k + 1]) || n[k + 1] == 0)
        fail(GA_ERROR_FORMAT, "micro-batch %zu of its window has the weight %g and loss scale %g",
             k / 4, n[k], n[k + 1]);
      texts_.micros.push_back({n[k], !own && late ? 0 : n[k + 1], last, own});
    }
  }
  texts_.open = !texts_.micros.empty();
  for (const LayerIn& b : layers_) texts_.open = texts_.open || b.has(kChannels);
  check_window();
}

// Checks that the context can hold the file's open window.
void Checkpoint::check_window() const {
  for (const ParamIn& p : params_)
    if (p.has(kHeldNumbers) && texts_.micros.empty())
      fail(GA_ERROR_FORMAT, "it has gradients of a window, but no micro-batches");
  if (!texts_.open) return;
  Problems problems;
  window_settings().each_difference(Fields(*file_->find("window"), "window"),
                                    [&](const char* field, const char* theirs, const char* here) {
                                      if (here)
                                        problems.add(std::string(field) + " is " + theirs +
                                                     " in the file, but " + here + " here");
                                    });
  for (size_t i = 0; i < params_.size(); ++i) {
    if (params_[i].window.held == Held::kNothing) continue;
    const Tensor& t = context_.params_.tensor(i);
    const std::string key = "parameter." + std::string(t.name);
    const Fields fields(*file_->find(key), key.c_str());
    int32_t reduce = 0;  // not in files of versions without GA_REDUCE_MAX
    if (fields.has("reduce")) fields.get("reduce", reduce);
    if (reduce != t.options.reduce)
      problems.add(key + ": reduce is " + std::to_string(reduce) + " in the file, but " +
                   std::to_string(t.options.reduce) + " here");
  }
  problems.fail_if_any("the file has an open window, which depends on other settings");
  int64_t k = context_.config_.accum_steps;
  for (const AccumPhase& phase : context_.phases_)
    if (phase.from_step <= texts_.control.steps) k = phase.accum_steps;
  const auto size = static_cast<int64_t>(texts_.micros.size());
  if (k > 0 && size > k)
    fail(GA_ERROR_INVALID_ARGUMENT,
         "the window in the file holds %lld micro-batches, but K (accum_steps) is %lld", ll(size),
         ll(k));
}

// ---- What becomes of the context ----------------------------------------------------------------

// Allocates all that the rest of the load needs, but for units of clipping.
void Checkpoint::make_room() {
  Context& c = context_;
  make_arrays();
  for (ga_bn id = 0; id < c.batch_norms_.count(); ++id)
    c.batch_norms_.reserve(id, layers_[static_cast<size_t>(id)].snapshot);
  size_t indices = 0, values = 0;
  for (size_t i = 0; i < params_.size(); ++i) {
    const HeldIn& w = params_[i].window;
    if (w.rows.empty()) continue;
    const Batch batch = batch_of(i);
    indices = std::max(indices, batch.rows * sizeof(int64_t));
    values = std::max(values, batch.rows * batch.row_bytes);
    Context::Contribution all = {};
    all.param = static_cast<ga_param>(i);
    all.index_dtype = GA_I64;
    all.rows = static_cast<int64_t>(w.rows.size());
    c.backend_->prepare_rows(c.rows_task(all, {}), 0);
  }
  if (indices > 0) row_indices_ = Buffer(*c.backend_, indices);
  if (values > 0) row_values_ = Buffer(*c.backend_, values);
  list_regions();
}

// Makes the arrays of the parameters that the file has state of, also of those that are frozen, but not
// of those that only the settings that are taken freeze.
void Checkpoint::make_arrays() {
  Context& c = context_;
  std::vector<char> frozen;
  for (const Param& p : c.params_) frozen.push_back(p.frozen);
  bool wanted = false;
  for (size_t i = 0; i < params_.size(); ++i) {
    const ParamIn& in = params_[i];
    Param& p = c.params_[i];
    const bool has =
        in.state || in.has(kMaster) || in.has(kAverage) || in.window.held != Held::kNothing;
    wanted = wanted || (has && !p.owns);
    if (has)
      p.frozen = false;
    else if (taken_)
      p.frozen = taken_->params[i].frozen;
  }
  const auto restore = [&] {
    for (size_t i = 0; i < frozen.size(); ++i) c.params_[i].frozen = frozen[i];
  };
  try {
    for (const Param& p : c.params_) c.arrays_.look_for(p);
    if (wanted) c.make_arrays();
  } catch (...) {
    restore();
    throw;
  }
  restore();
}

// How many rows of a window are added at a time.
Checkpoint::Batch Checkpoint::batch_of(size_t i) const {
  constexpr size_t kMostBytes = size_t{8} << 20;
  const Param& p = context_.params_[i];
  const auto size = static_cast<size_t>(dtype_info(p.accumulator_dtype).size);
  const size_t row_bytes = static_cast<size_t>(p.count / context_.params_.tensor(i).rows) * size;
  const size_t rows = std::max<size_t>(1, kMostBytes / std::max<size_t>(1, row_bytes));
  return {std::min(rows, params_[i].window.rows.size()), row_bytes};
}

void Checkpoint::list_regions() {
  const auto add = [&](int64_t tensor, void* data, const Param* of = nullptr) {
    const auto k = static_cast<size_t>(tensor);
    const safetensors::Tensor& t = file_->tensors()[k];
    const int64_t size = safetensors::element_size(t.dtype);
    Range part = {0, (t.end - t.begin) / size};
    if (of) part = ParamArrays::part_of(*of, part.count);
    if (part.count == 0) return;
    regions_.push_back({data, static_cast<size_t>(part.count * size)});
    from_.push_back({k, static_cast<size_t>(part.first * size)});
  };
  for (size_t i = 0; i < params_.size(); ++i) {
    const Param& p = context_.params_[i];
    const ParamIn& in = params_[i];
    if (in.has(kValues)) add(in.at(kValues), p.data);
    if (in.window.held == Held::kStored && p.count > 0) {
      add(in.at(kAccumulator), p.accumulator);
      if (in.has(kLow)) add(in.at(kLow), context_.params_.tensor(i).low);
    }
    for (int kind = kState; kind <= kAverage; ++kind)
      if (in.has(kind)) add(in.at(kind), context_.arrays_.data(p, kind), &p);
  }
}

void Checkpoint::place_arrays() {
  file_->read_anew();
  std::vector<unsigned char> passed_over;
  const auto pass_over = [&](size_t bytes) {  // of a tensor, whose checksum is over all of it
    passed_over.resize(std::min(bytes, kPiece));
    for (size_t size; bytes > 0; bytes -= size) {
      size = std::min(bytes, kPiece);
      file_->next(*read_, passed_over.data(), size);
    }
  };
  size_t at = 0, left = 0, behind = 0;
  const auto fill = [&](void* piece, size_t bytes) {
    if (left == 0) {
      const From& from = from_[at];
      const safetensors::Tensor& t = file_->tensors()[from.tensor];
      file_->seek(from.tensor);
      pass_over(from.first);
      left = regions_[at++].bytes;
      behind = static_cast<size_t>(t.end - t.begin) - from.first - left;
    }
    file_->next(*read_, piece, bytes);
    left -= bytes;
    report(static_cast<int64_t>(bytes), false);
    if (left == 0) pass_over(behind);
  };
  context_.backend_->write_pieces({regions_.data(), regions_.size()}, std::ref(fill));
  for (size_t i = 0; i < params_.size(); ++i)
    if (!params_[i].window.rows.empty()) place_rows(i);
  report(total_ - done_, false);
}

// Adds the rows of a window as contributions, in the order in which they came first.
void Checkpoint::place_rows(size_t i) {
  const ParamIn& in = params_[i];
  const HeldIn& w = in.window;
  Context& c = context_;
  const Batch batch = batch_of(i);
  file_->seek(static_cast<size_t>(in.at(kHeldValues)));
  const auto fill = [&](void* piece, size_t bytes) {
    file_->next(*read_, piece, bytes);
    report(static_cast<int64_t>(bytes), false);
  };
  for (size_t first = 0; first < w.rows.size(); first += batch.rows) {
    const size_t count = std::min(batch.rows, w.rows.size() - first);
    c.backend_->write(row_indices_.data(), &w.rows[first], count * sizeof(int64_t));
    const Region values = {row_values_.data(), count * batch.row_bytes};
    c.backend_->write_pieces({&values, 1}, std::ref(fill));
    Context::Contribution some = {};
    some.param = static_cast<ga_param>(i);
    some.indices = row_indices_.data();
    some.index_dtype = GA_I64;
    some.rows = static_cast<int64_t>(count);
    const int32_t format = c.params_[i].accumulator_dtype;
    c.backend_->accumulate_rows(c.rows_task(some, {values.data, format, 1, nullptr}));
    c.backend_->wait();
  }
}

void Checkpoint::place_numbers() {
  Context& c = context_;
  for (size_t i = 0; i < params_.size(); ++i)
    if (!c.params_.tensor(i).removed) place_param(i);
  for (ga_bn id = 0; id < c.batch_norms_.count(); ++id) {
    const bool frozen = c.batch_norms_.info(id).frozen != 0;
    const auto k = static_cast<size_t>(id);
    if (taken_ && (taken_->frozen_layers[k] != 0) != frozen) c.batch_norms_.set_frozen(id, !frozen);
    c.batch_norms_.restore(id, layers_[k].snapshot);
  }
  c.forget_delivered();
  if (texts_.counted) place_counters();
}

void Checkpoint::place_param(size_t i) {
  Context& c = context_;
  Param& p = c.params_[i];
  const ParamIn& in = params_[i];
  const bool new_master = in.has(kValues) || (in.listed && options_.parts != GA_STATE_PARAMETERS);
  if (p.master && in.has(kMaster))
    p.master_due = false;
  else if (new_master)
    c.arrays_.renew_master(p);
  if (options_.parts == GA_STATE_PARAMETERS || !p.owns) return;
  ParamState state = c.param_state(i);
  // There was no state when the file was written, and the context has some.
  const bool reset = in.listed && !in.state && !p.state_due;
  if (in.state) state.clock = {in.step, in.product};
  if (reset) {
    state.clock = {};
    c.arrays_.reset_state(i);
  }
  if (in.state || reset) {
    p.state_due = false;
    p.state_written = true;
  }
  if (c.ema_ && (in.has(kAverage) || in.listed)) {
    state.averaged = in.has(kAverage);
    p.average_written = true;
    if (!state.averaged && p.average) c.arrays_.clear_average(p);
  }
  const HeldIn& w = in.window;
  state.contributed = w.contributed;
  state.held_weight = w.state_held_weight;
  c.set_param_state(i, state);
  p.hold(w.held);
  p.stale = w.stale;
  p.contributions = w.contributions;
  p.last_micro = w.last_micro;
  p.held_weight = w.held_weight;
  p.accumulator_written = p.accumulator_written || w.held != Held::kNothing;
  if (w.held == Held::kStored && p.count > 0)
    c.backend_->write(p.partials, w.partials.data(), w.partials.size() * sizeof(Partial));
}

void Checkpoint::place_counters() {
  Context& c = context_;
  Control& control = texts_.control;
  for (size_t k = 0; k < texts_.groups.size(); ++k) {
    GroupState state = {};
    c.backend_->read(&state, c.tables_.group_states.at(k), sizeof state);
    state.clock = texts_.groups[k].clock;
    state.lr = texts_.groups[k].lr;
    c.backend_->write(c.tables_.group_states.at(k), &state, sizeof state);
  }
  // A scaler that the file knows nothing of stays as it is.
  if (c.scaled_ != (file_->find("loss_scaler") != nullptr)) control.scaler = c.control().scaler;
  control.loss_scale = static_cast<float>(c.scaled_ ? control.scaler.scale : c.config_.loss_scale);
  control.go = false;
  c.backend_->restore(control);
  c.windows_ = texts_.host_windows;
  c.steps_set_ = control.steps;
  c.steps_set_after_ = control.windows;
  c.rows_held_ = texts_.rows_held;
  c.noise_repeated_ = texts_.noise_repeated;
  c.rejected_ = control.rejected;
  c.window_.restore(std::move(texts_.micros));
}

// Writes the tables anew.
void Checkpoint::tell_all() {
  Context& c = context_;
  c.tell_settings();
  c.tell_groups();
  for (const Param& p : c.params_) c.arrays_.look_for(p);
  for (size_t i = 0; i < c.prepared_; ++i) c.describe(i);
  c.lists_due_ = true;
  c.look_up_accum_steps();
  c.flush();
}

bool read_note(int64_t size, const ReadAt& read, std::string& note) {
  const StateReader file(size, read, false);
  const std::string* const text = file.find("note");
  if (text) note = *text;
  return text != nullptr;
}

}  // namespace ga
