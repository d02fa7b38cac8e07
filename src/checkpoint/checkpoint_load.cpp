// SPDX-License-Identifier: Apache-2.0
// Loading: finds what the file has for this context, reads and checks all of it, makes room, and only then
// changes the context.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <functional>

#include "backend/codes.hpp"
#include "batchnorm/batchnorm.hpp"
#include "checkpoint/checkpoint.hpp"
#include "core/error.hpp"
#include "core/tensor.hpp"
#include "files/names.hpp"
#include "model/copies.hpp"
#include "model/preparation.hpp"
#include "model/table_writer.hpp"
#include "window/accumulator.hpp"

namespace ga {
namespace {

constexpr size_t kPiece = size_t{256} << 10;

}  // namespace

// An integer in [low, high], from a number of a file.
int64_t Checkpoint::whole(double x, int64_t low, int64_t high, const char* what) {
  if (!(x >= static_cast<double>(low) && x <= static_cast<double>(high)) || x != std::floor(x))
    fail(GA_ERROR_FORMAT, "%.300s was %g, expected an integer from %lld to %lld", what, x, ll(low),
         ll(high));
  return static_cast<int64_t>(x);
}

void Checkpoint::check_load() const {
  model_.window.check_empty(what_);
  if (stages_.layers.has_statistics())
    fail(GA_ERROR_INVALID_STATE,
         "%s was called while a layer has statistics of the next window; ga_discard drops them",
         what_);
}

void Checkpoint::load(int64_t size, const ReadAt& read, const Ready& ready,
                      const OpenBeside& open) {
  check_load();
  open_file(size, read, open);
  find_tensors();
  if (options_.parts != GA_STATE_PARAMETERS) {
    compare_settings();
    read_keys();
    read_texts();
  }
  read_all();
  if (options_.settings == GA_SETTINGS_TAKE && texts_.counted) read_settings();
  if (taken_) model_.ranks->check_keepers(taken_->rules());
  if (texts_.counted) join_windows();
  model_.backend->wait();
  make_room();
  if (ready) ready();
  try {
    if (taken_) take_settings();
    place_keys();
    place_arrays();
    place_numbers();
    write_all();
    stages_.copies.write(
        [this](ga_param id) {
          const auto i = static_cast<size_t>(id);
          return i < params_.size() && params_[i].has(kMaster);
        },
        ready);
  } catch (const std::exception& e) {
    fail_halfway(e.what());
  }
}

// Opens the file; or, where it has not the parts of parameters that this context has, one that is put together of it, or
// of the files that it is the index of.
void Checkpoint::open_file(int64_t size, const ReadAt& read, const OpenBeside& open) {
  read_ = read;
  file_ = std::make_unique<StateReader>(size, read, options_.unmarked != 0);
  total_ = 2 * file_->data_bytes();
  const std::string* const parts = file_->find("own_parts");
  if (!is_index(*file_) && !parts && !has_parts()) return;
  own_ = OwnParts::of(model_.params, model_.ranks->samples());
  std::vector<AssembledFile::Source> sources;
  if (is_index(*file_)) {
    if (!open)
      fail(GA_ERROR_UNSUPPORTED,
           "it is the index of the files of several ranks, which ga_load loads by its path");
    sources = open_rank_files(*file_, open);
  } else {
    OwnParts theirs = parts ? OwnParts::from(*parts) : own_.whole();
    sources.push_back({std::move(file_), read, std::move(theirs)});
  }
  for (const AssembledFile::Source& s : sources)
    if (const std::string* const ranks = s.file->find("ranks"); ranks && *ranks != "1")
      fail(GA_ERROR_UNSUPPORTED,
           "it has the open windows of %s ranks, which have no parts of parameters; a state that "
           "is saved between windows loads here",
           ranks->c_str());
  const auto same = std::find_if(sources.begin(), sources.end(), [&](const auto& s) {
    return s.own.samples == own_.samples && s.own.has_parts_of(own_);
  });
  if (same != sources.end()) {
    file_ = std::move(same->file);
    read_ = std::move(same->read);
    total_ = 2 * file_->data_bytes();
    return;
  }
  assembled_ = std::make_unique<AssembledFile>(
      own_, std::move(sources),
      [this](const std::string& name) { return model_.ranks->knows(name); });
  file_ = assembled_->reader();
  read_ = [this](int64_t offset, void* to, size_t n) { assembled_->read(offset, to, n); };
  total_ = 2 * file_->data_bytes() + assembled_->bytes_to_check();
  assembled_->check([this](int64_t bytes) { report(bytes, true); });
}

// Whether other ranks may have what this context has not.
bool Checkpoint::has_parts() const {
  const auto& tensors = model_.params.tensors();
  return model_.ranks->has_own_parameters() ||
         std::any_of(tensors.begin(), tensors.end(),
                     [](const Tensor& t) { return !t.removed && t.part.is_cut(t.shape); });
}

// Leaves a context of no use.
void Checkpoint::fail_halfway(const char* why) {
  char text[1024];
  std::snprintf(text, sizeof text, "%s stopped half-way: %s", what_, why);
  model_.health.end(Error(GA_ERROR_FAULT, text));
  model_.health.check();
  fail(GA_ERROR_INTERNAL, "%s", text);
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
                              const std::vector<int64_t>& shape, Problems& problems,
                              const char* why) const {
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
                 text_of(shape) + " here" + why);
}

// Whether a tensor belongs to a part that is not loaded.
bool Checkpoint::is_left_out(const std::string& name) const {
  if (file_->is_ours() && begins_with(name, kOfRank))
    return is_left_out(name.substr(name.find('.', kOfRank.size()) + 1));
  if (begins_with(name, kOurs)) return file_->is_ours();
  if (options_.parts == GA_STATE_ALL) return false;
  const auto is_param = [&](std::string_view n) { return model_.params.find(n) >= 0; };
  if (options_.parts == GA_STATE_LIBRARY) return is_param(name);
  return !owner_of(name, [&](std::string_view n) {
            return is_param(n) || stages_.layers.find(n) >= 0;
          }).empty();
}

void Checkpoint::find_tensors() {
  const auto& tensors = file_->tensors();
  claimed_.assign(tensors.size(), false);
  for (size_t k = 0; k < tensors.size(); ++k) names_[tensors[k].name] = k;
  find_ranks();
  Problems problems;
  params_.resize(model_.params.size());
  for (size_t i = 0; i < params_.size(); ++i)
    if (!model_.params.tensor(i).removed) find_param(i, problems);
  layers_.resize(static_cast<size_t>(stages_.layers.count()));
  for (ga_bn id = 0; id < stages_.layers.count(); ++id) find_layer(id, problems);
  find_windows(problems);
  if (!options_.allow_extra)
    for (size_t k = 0; k < tensors.size(); ++k)
      if (!claimed_[k] && !is_left_out(tensors[k].name))
        problems.add("the context has no place for \"" + tensors[k].name + "\"");
  problems.fail_if_any("the file does not fit the context");
}

void Checkpoint::find_param(size_t i, Problems& problems) {
  const Param& p = model_.params[i];
  const Tensor& t = model_.params.tensor(i);
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
    const bool scales = ParamArrays::is_scales(a.kind);
    if (at >= 0)
      check_tensor(at, {dtype}, shape, problems,
                   scales ? ", for other blocks (see ga_param_set_part)" : "");
    in.state = in.state || (at >= 0 && a.kind < kMaster);
    if (at < 0 && (!in.listed || a.kind < kMaster)) lacking.push_back(key);
  }
  for (int slot = 0; slot < kMaxSlots; ++slot)
    if (in.has(kState + slot) != in.has(kScales + slot) &&
        model_.params.code_of(p, slot) != Code::kNone)
      problems.add("the file has only one of codes and scales of a state of \"" + name + "\"");
  const Group& g = model_.params.group_of(p);
  const auto find_number = [&](int kind, const char* key, std::initializer_list<int32_t> dtypes) {
    const int64_t at = find(kind, name + "." + key);
    if (at < 0) return lacking.push_back(name + "." + key);
    check_tensor(at, dtypes, {}, problems);
    in.state = true;
  };
  if (model_.params.op_of(p) >= 0 && g.optimizer.flavor == GA_FLAVOR_TORCH) {
    find_number(kStepNumber, "step", {GA_I64, GA_I32, GA_F32, GA_F64});
    for (int k = 0; k < kClockNumbers; ++k)
      if (const char* const number = g.info->clock_numbers[k].name)
        find_number(kClockNumber + k, number, {GA_F64, GA_F32});
  }
  if (in.state || !in.listed)
    for (const std::string& key : lacking) missing(key);
}

void Checkpoint::find_layer(ga_bn id, Problems& problems) {
  const ga_bn_info layer = stages_.layers.info(id);
  const std::string name = layer.name;
  Found<kLayerKinds>& in = layers_[static_cast<size_t>(id)];
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
  if (options_.parts != GA_STATE_PARAMETERS && file_->is_ours())
    find(kChannelSteps, name + ".num_batches_tracked.channels", {channels}, {GA_I64}, false);
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
  in.control = model_.progress.control();
  const Fields counters(text("counters"), "counters");
  counters.get_fields(in.control);
  counters.get("host_windows", in.host_windows);
  Fields(text("result"), "result").get_fields(in.control.result);
  in.control.result.struct_size = sizeof in.control.result;
  read_dropped_micros(in.control.result.dropped_micros);
  const Control& c = in.control;
  for (const int64_t count :
       {c.windows, c.steps, c.skipped, c.dropped, c.scaler.good_steps,
        int64_t{c.scaler.bad_windows}, in.host_windows, c.result.windows, c.result.steps})
    whole(static_cast<double>(count), 0, kMost, "a counter of the file");
  if (c.result.windows != c.windows)
    fail(GA_ERROR_FORMAT, "its last result is of window %lld, but it has %lld windows",
         ll(c.result.windows), ll(c.windows));
  if (!(file_->find("loss_scaler") ? c.scaler.scale > 0 : c.scaler.scale >= 0) ||
      !std::isfinite(c.scaler.scale))
    fail(GA_ERROR_FORMAT, "the loss scale of the file was %g", c.scaler.scale);
  const Fields window(text("window"), "window");
  WindowCounts& counts = in.window;
  counts = {c.weight, c.weighted, c.window_dropped, c.dropped_micros, c.micro_finite, c.failed,
            0,        false};
  window.get("rows_held", counts.rows_held);
  window.get("noise_repeated", counts.noise_repeated);
  check_counts(counts);
  for (size_t k = 0; k < model_.params.groups.size(); ++k) {
    const Group& g = model_.params.groups[k];
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

// Which micro-batches of its last window this rank has dropped. The result in the file is that of rank 0;
// where other ranks saved it, that is all that is known.
void Checkpoint::read_dropped_micros(uint64_t& dropped) const {
  if (model_.ranks->rank() > 0) dropped = 0;
  const std::string* const text = file_->find("dropped_micros");
  if (!text) return;
  const Fields of_ranks(*text, "dropped_micros");
  int64_t ranks = 0;
  of_ranks.get("ranks", ranks);
  if (ranks == model_.ranks->ranks())
    of_ranks.get(("rank_" + std::to_string(model_.ranks->rank())).c_str(), dropped);
}

// Reads the whole file: keeps the tensors of numbers that were claimed, and checks all checksums.
void Checkpoint::read_all() {
  const auto& tensors = file_->tensors();
  for (const ParamIn& p : params_) {
    for (int kind = kStepNumber; kind < kParamKinds; ++kind)
      if (p.has(kind)) small_[static_cast<size_t>(p.at(kind))];
    for (int kind = kScales; kind < kMaster; ++kind)
      if (p.has(kind)) small_[static_cast<size_t>(p.at(kind))];
  }
  for (const auto& b : layers_)
    for (int kind = 0; kind < kLayerKinds; ++kind)
      if (b.has(kind)) small_[static_cast<size_t>(b.at(kind))];
  for (size_t k = 0; k < tensors.size(); ++k)
    if (file_->is_ours() && begins_with(tensors[k].name, kOurs) &&
        !begins_with(tensors[k].name, kOfRank))
      small_[k];
  for (const WindowIn& w : windows_) {
    if (w.micro_tensor >= 0) small_[static_cast<size_t>(w.micro_tensor)];
    for (const HeldIn& h : w.params)
      for (int kind = kHeldNumbers; kind <= kHeldRows; ++kind)
        if (h.has(kind)) small_[static_cast<size_t>(h.at(kind))];
    for (const LayerWindowIn& b : w.layers)
      for (int kind = 0; kind < kLayerWindowKinds; ++kind)
        if (b.has(kind)) small_[static_cast<size_t>(b.at(kind))];
  }
  std::vector<unsigned char> buffer(kPiece);
  for (size_t k = 0; k < tensors.size(); ++k) {
    const auto kept = small_.find(k);
    auto left = static_cast<size_t>(tensors[k].end - tensors[k].begin);
    file_->seek(k);
    if (kept != small_.end()) kept->second.resize(left);
    for (size_t at = 0; left > 0;) {
      const size_t size = std::min(left, kPiece);
      file_->next(read_, kept != small_.end() ? kept->second.data() + at : buffer.data(), size);
      at += size;
      left -= size;
      report(static_cast<int64_t>(size), true);
    }
  }
  if (total_ == 0) report(0, true);
  for (size_t i = 0; i < params_.size(); ++i)
    if (!model_.params.tensor(i).removed) read_param(i);
  for (ga_bn id = 0; id < stages_.layers.count(); ++id) read_layer(id);
  read_windows();
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
  const Tensor& t = model_.params.tensor(i);
  ParamIn& in = params_[i];
  const std::string name = t.name;
  if (in.has(kStepNumber))
    in.step = whole(numbers(in.at(kStepNumber))[0], 0, kMost, (name + ".step").c_str());
  else if (in.state)
    in.step = 1;  // torch's SGD keeps a momentum and no step: state that is there is not of step 0
  for (int kind = kScales; kind < kMaster; ++kind) {
    if (!in.has(kind)) continue;
    const safetensors::Tensor& scales = file_->tensors()[static_cast<size_t>(in.at(kind))];
    for (const double scale : numbers(in.at(kind)))
      if (!is_scale(scale))
        fail(GA_ERROR_FORMAT, "\"%.200s\" has the scale %g, expected 0 or a positive normal number",
             scales.name.c_str(), scale);
  }
  const OptimizerInfo& optimizer = *model_.params.group_of(model_.params[i]).info;
  for (int k = 0; k < kClockNumbers; ++k) {
    const auto [key, initial, most] = optimizer.clock_numbers[k];
    in.numbers[k] = initial;
    if (!in.has(kClockNumber + k)) continue;
    const double x = in.numbers[k] = numbers(in.at(kClockNumber + k))[0];
    if (!(x >= 0 && x <= most && std::isfinite(x)))
      fail(GA_ERROR_FORMAT, "\"%.200s.%s\" was %g, expected a finite number in [0, %g]", t.name,
           key, x, most);
  }
}

void Checkpoint::read_layer(ga_bn id) {
  const ga_bn_info layer = stages_.layers.info(id);
  const std::string name = "the statistics of \"" + std::string(layer.name) + "\"";
  const Found<kLayerKinds>& in = layers_[static_cast<size_t>(id)];
  snapshots_.push_back(stages_.layers.snapshot(id));
  BatchNorms::Snapshot& s = snapshots_.back();
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
}

// ---- What becomes of the context ----------------------------------------------------------------

// Allocates all that the rest of the load needs.
void Checkpoint::make_room() {
  make_arrays();
  if (taken_ && model_.tables.params() > 0)
    taken_->clip_units = model_.arrays.new_clip_units(taken_->rules());
  for (ga_bn id = 0; id < stages_.layers.count(); ++id)
    stages_.layers.reserve(id, snapshots_[static_cast<size_t>(id)]);
  reserve_joining();
  list_regions();
}

// Makes the arrays of the parameters that the file has state of. Those that are frozen now get theirs too. Those that
// become frozen by the settings in the file (GA_SETTINGS_TAKE) do not.
void Checkpoint::make_arrays() {
  ParamList& params = model_.params;
  std::vector<char> frozen;
  bool lacking = false;
  for (size_t i = 0; i < params_.size(); ++i) {
    const ParamIn& in = params_[i];
    Param& p = params[i];
    frozen.push_back(p.frozen);
    const bool has =
        in.state || in.has(kMaster) || in.has(kAverage) || joined_[i].held != Held::kNothing;
    lacking = lacking || (has && !p.owns);
    if (has)
      p.frozen = false;
    else if (taken_)
      p.frozen = taken_->params[i].frozen;
  }
  const auto restore = [&] {
    for (size_t i = 0; i < frozen.size(); ++i) params[i].frozen = frozen[i];
    stages_.writer.describe_all();
    stages_.writer.flush();
  };
  try {
    for (const Param& p : params) model_.arrays.look_for(p);
    if (lacking) stages_.preparation.make_arrays();
  } catch (...) {
    restore();
    throw;
  }
  restore();
}

void Checkpoint::list_regions() {
  const auto add = [&](int64_t tensor, void* data, const Param* of = nullptr, int kind = kState) {
    const auto k = static_cast<size_t>(tensor);
    const safetensors::Tensor& t = file_->tensors()[k];
    const int64_t size = safetensors::element_size(t.dtype);
    Range part = {0, (t.end - t.begin) / size};
    if (of) part = ParamArrays::part_of(*of, kind, part.count);
    if (part.count == 0) return;
    regions_.push_back({data, static_cast<size_t>(part.count * size)});
    from_.push_back({k, static_cast<size_t>(part.first * size)});
  };
  for (size_t i = 0; i < params_.size(); ++i) {
    const Param& p = model_.params[i];
    const ParamIn& in = params_[i];
    if (in.has(kValues)) add(in.at(kValues), p.data);
    if (!joined_[i].dense.empty() && p.count > 0 && placed() > 0) {
      const HeldIn& first = *joined_[i].dense[0];
      add(first.at(kHeldSums), p.accumulator);
      if (first.has(kHeldLow)) add(first.at(kHeldLow), model_.params.tensor(i).low);
    }
    for (int kind = kState; kind <= kAverage; ++kind)
      if (in.has(kind)) add(in.at(kind), model_.arrays.data(p, kind), &p, kind);
  }
}

void Checkpoint::place_keys() {
  ParamList& params = model_.params;
  for (size_t i = 0; i < keys_.size(); ++i) params.tensor(i).key = keys_[i];
  if (!keys_.empty()) params.set_next_key(next_key_);
}

void Checkpoint::place_arrays() {
  file_->read_anew();
  std::vector<unsigned char> passed_over;
  const auto pass_over = [&](size_t bytes) {  // of a tensor, whose checksum is over all of it
    passed_over.resize(std::min(bytes, kPiece));
    for (size_t size; bytes > 0; bytes -= size) {
      size = std::min(bytes, kPiece);
      file_->next(read_, passed_over.data(), size);
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
    file_->next(read_, piece, bytes);
    left -= bytes;
    report(static_cast<int64_t>(bytes), false);
    if (left == 0) pass_over(behind);
  };
  model_.backend->write_pieces({regions_.data(), regions_.size()}, std::ref(fill));
  place_windows();
  report(total_ - done_, false);
}

void Checkpoint::place_numbers() {
  for (size_t i = 0; i < params_.size(); ++i)
    if (!model_.params.tensor(i).removed) place_param(i);
  for (ga_bn id = 0; id < stages_.layers.count(); ++id)
    stages_.layers.restore(id, snapshots_[static_cast<size_t>(id)]);
  model_.params.forget_delivered();
  if (texts_.counted) place_counters();
}

void Checkpoint::place_param(size_t i) {
  Param& p = model_.params[i];
  const ParamIn& in = params_[i];
  const bool new_master = in.has(kValues) || (in.listed && options_.parts != GA_STATE_PARAMETERS);
  if (p.master) p.unrounded = !model_.params.follows(i);  // as far as this rank knows
  if (p.master && in.has(kMaster))
    p.master_due = false;
  else if (new_master)
    model_.arrays.renew_master(p);
  if (options_.parts == GA_STATE_PARAMETERS || !p.owns) return;
  ParamState state = model_.progress.param_state(i);
  // There was no state when the file was written, and the context has some.
  const bool reset = in.listed && !in.state && !p.state_due;
  if (in.state) state.clock = {in.step, {in.numbers[0], in.numbers[1]}};
  if (reset) {
    state.clock = {};
    model_.arrays.reset_state(i);
  }
  if (in.state || reset) {
    p.state_due = false;
    p.state_written = true;
  }
  if (model_.options.ema && (in.has(kAverage) || in.listed)) {
    state.averaged = in.has(kAverage);
    p.average_written = true;
    if (!state.averaged && p.average) model_.arrays.clear_average(p);
  }
  const Joined& w = joined_[i];
  state.contributed = w.contributed;
  state.held_weight = w.state_held_weight;
  model_.progress.set_param_state(i, state);
  p.hold(w.held);
  p.window.stale = w.stale;
  p.contributions = w.contributions;
  p.held_weight = w.held_weight;
  p.accumulator_written = p.accumulator_written || w.held != Held::kNothing;
}

void Checkpoint::place_counters() {
  Control& control = texts_.control;
  for (size_t k = 0; k < texts_.groups.size(); ++k) {
    GroupState state = {};
    model_.backend->read(&state, model_.tables.group_states.at(k), sizeof state);
    state.clock = texts_.groups[k].clock;
    state.lr = texts_.groups[k].lr;
    model_.backend->write(model_.tables.group_states.at(k), &state, sizeof state);
  }
  // A scaler that the file knows nothing of stays as it is.
  if (model_.options.scaled != (file_->find("loss_scaler") != nullptr))
    control.scaler = model_.progress.control().scaler;
  control.loss_scale =
      static_cast<float>(model_.options.scaled ? control.scaler.scale : model_.config.loss_scale);
  control.go = false;
  put_counts(texts_.window, control);
  model_.backend->restore(control);
  model_.progress.restore(texts_.host_windows, control.steps, control.windows);
  stages_.accumulator.restore(texts_.window.rows_held, texts_.window.noise_repeated);
  model_.window.restore(std::move(texts_.micros));
  if (control.rejected) model_.window.reject();
}

// Writes the tables anew.
void Checkpoint::write_all() {
  stages_.writer.write_settings();
  stages_.writer.write_groups();
  for (const Param& p : model_.params) model_.arrays.look_for(p);
  stages_.writer.describe_all();
  model_.length.look_up();
  stages_.writer.flush();
}

bool read_note(int64_t size, const ReadAt& read, std::string& note) {
  const StateReader file(size, read, false);
  const std::string* const text = file.find("note");
  if (text) note = *text;
  return text != nullptr;
}

}  // namespace ga
