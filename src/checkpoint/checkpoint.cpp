// SPDX-License-Identifier: Apache-2.0
// What saving and loading have in common, and saving.
#include "checkpoint/checkpoint.hpp"

#include <algorithm>
#include <cstring>

#include "batchnorm/batchnorm.hpp"
#include "core/callback.hpp"
#include "core/error.hpp"
#include "core/tensor.hpp"
#include "model/copies.hpp"
#include "model/pieces.hpp"
#include "model/preparation.hpp"
#include "window/accumulator.hpp"

namespace ga {
namespace {

uint64_t bits_of(double x) {
  uint64_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  return bits;
}
uint64_t bits_of(int64_t x) { return static_cast<uint64_t>(x); }

}  // namespace

Checkpoint::Checkpoint(const Stages& stages, const ga_state_options& options, const char* what)
    : stages_(stages), model_(stages.model), options_(options), what_(what) {
  model_.window.check_closed(what);
  model_.check_no_capture(what);
  if (model_.ranks->shards())
    stages_.preparation.prepare();  // so that all ranks have the same arrays
}

Checkpoint::Checkpoint(const Stages& stages)
    : stages_(stages), model_(stages.model), options_(), what_("") {}

// The name of a tensor, or the key of a text, of a rank's window.
std::string Checkpoint::name_of_rank(int32_t rank, const std::string& name) {
  if (rank == 0) return name;
  return std::string(kOfRank) + std::to_string(rank) + "." + name;
}

// ---- The tensors of a parameter -----------------------------------------------------------------

// The arrays of the optimizer, the master weights and the EMA that the parameter has or may have, in the
// shapes of PyTorch.
std::vector<Checkpoint::NamedArray> Checkpoint::arrays_of(size_t i) const {
  const Param& p = model_.params[i];
  const Tensor& t = model_.params.tensor(i);
  const int op = model_.params.op_of(p);
  std::vector<NamedArray> list;
  for (const OwnedArray& a : model_.arrays.whole_of(i)) {
    if (!a.name || a.kind < kState || a.kind > kAverage) continue;
    std::vector<int64_t> shape = t.shape;
    const bool slot = a.kind < kMaster;
    if (ParamArrays::is_scales(a.kind))
      shape = {a.count};
    else if (slot && op_info(op).factored)
      shape[shape.size() - (a.kind == kState ? 1 : 2)] = 1;
    else if (slot && op_info(op).row_state)
      shape = {a.count};
    else if (slot && op_info(op).output_state && a.kind == kState + op_info(op).slots)
      shape = {t.cut.matrices, t.cut.outputs()};
    list.push_back({a, a.format ? a.format : p.real(), std::move(shape)});
  }
  return list;
}

void Checkpoint::report(int64_t bytes, bool may_cancel) {
  done_ += bytes;
  if (!options_.progress) return;
  const int32_t result = call_program("progress function", [&] {
    return options_.progress(options_.progress_user, done_, total_);
  });
  if (result != 0 && may_cancel)
    fail(GA_ERROR_CANCELLED, "%s was cancelled by the progress callback after %lld of %lld bytes",
         what_, ll(done_), ll(total_));
}

// ---- Saving -------------------------------------------------------------------------------------

// The file with all tensors of saved_, which are listed first.
StateWriter& Checkpoint::writer() {
  if (writer_) return *writer_;
  if (counts_.empty()) collect();
  std::vector<safetensors::Tensor> tensors;
  for (const Saved& s : saved_)
    tensors.push_back({s.name, dtype_info(s.dtype).file_name, s.shape, 0, 0});
  writer_ = std::make_unique<StateWriter>(texts(), std::move(tensors));
  return *writer_;
}

int64_t Checkpoint::file_bytes() { return writer().file_bytes(); }

int64_t Checkpoint::Saved::bytes() const {
  int64_t bytes = dtype_info(dtype).size;
  for (const int64_t extent : shape) bytes *= extent;
  return bytes;
}

void Checkpoint::save(const WriteAt& write, const Ready& ready) {
  store_live_gradients();
  StateWriter& file = writer();
  total_ = file.data_bytes();
  if (ready) ready();
  const bool together = model_.ranks->shards() || !counts_.empty();
  std::exception_ptr failure;
  const auto put = [&](const void* piece, size_t bytes) {
    if (failure) return;
    try {
      if (write) file.put(write, piece, bytes);
      report(static_cast<int64_t>(bytes), true);
    } catch (...) {
      if (!together) throw;
      failure = std::current_exception();  // other ranks wait for this one's parts
    }
  };
  std::vector<Region> regions;
  const auto put_regions = [&] {
    if (regions.empty()) return;
    model_.backend->read_pieces({regions.data(), regions.size()}, put);
    regions.clear();
  };
  for (size_t k = 0, end; k < saved_.size(); k = end) {
    const Saved& s = saved_[k];
    end = k + 1;
    if (!counts_.empty() && s.rank >= 0) {
      while (end < saved_.size() && saved_[end].rank == s.rank) ++end;
      put_regions();
      put_windows(k, end, put);
      continue;
    }
    if (!s.numbers.empty()) {
      put_regions();
      put(s.numbers.data(), s.numbers.size() * sizeof s.numbers[0]);
    }
    for (const Region& r : s.regions)
      if (r.bytes > 0 && write) regions.push_back(r);
    if (s.shared_by < 0) continue;
    put_regions();
    each_piece(model_, s.shared_by, s.part, put);
  }
  put_regions();
  if (failure) std::rethrow_exception(failure);
  if (done_ < total_ || total_ == 0) report(total_ - done_, true);
  if (together && ready) ready();  // before the header makes a file of what was written
  if (write) file.finish(write);
}

// Gradients that live in the program's buffers, which only a context that is alone has, are copied into the
// accumulators. Norms that were unknown stay so.
void Checkpoint::store_live_gradients() {
  for (size_t i = 0; i < model_.params.size(); ++i) {
    Param& p = model_.params[i];
    if (p.held() != Held::kBorrowed) continue;
    const bool known = p.window.lent;
    stages_.accumulator.store_borrowed(static_cast<ga_param>(i));
    p.window.stale = !known;
    writer_.reset();  // which has read other partials
  }
}

void Checkpoint::add_numbers(std::string name, int32_t dtype, std::vector<int64_t> shape,
                             std::vector<uint64_t> numbers) {
  saved_.push_back({std::move(name), dtype, std::move(shape), {}, std::move(numbers), -1, {}});
}

// Lists what this rank has.
void Checkpoint::collect() {
  saved_.clear();
  model_.backend->wait();
  const std::vector<ParamState> states = model_.progress.param_states();
  for (size_t i = 0; i < model_.params.size(); ++i)
    if (!model_.params.tensor(i).removed)
      collect_param(i, i < states.size() ? states[i] : ParamState());
  for (ga_bn id = 0; id < stages_.layers.count(); ++id) collect_layer(id);
  if (options_.parts != GA_STATE_PARAMETERS) {
    collect_rates();
    if (with_window_ && model_.window.size() > 0) collect_of_window([&] { collect_micros(); });
  }
  sort();
}

// By the size of elements, the largest first, so that all tensors are aligned. Numbers come before arrays,
// but not where other ranks' are on the list, which this rank does not have.
void Checkpoint::sort() {
  const bool own = counts_.empty();
  std::stable_sort(saved_.begin(), saved_.end(), [&](const Saved& a, const Saved& b) {
    const bool first = own && !a.numbers.empty(), second = own && !b.numbers.empty();
    return first != second ? first : dtype_info(a.dtype).size > dtype_info(b.dtype).size;
  });
}

// Lists what this rank's window has.
template <class F>
void Checkpoint::collect_of_window(F&& collect) {
  const size_t begin = saved_.size();
  collect();
  for (size_t k = begin; k < saved_.size(); ++k) saved_[k].rank = model_.ranks->rank();
}

void Checkpoint::collect_param(size_t i, const ParamState& state) {
  const Param& p = model_.params[i];
  const Tensor& t = model_.params.tensor(i);
  const std::string name = t.name;
  const auto bytes = [](int64_t count, int32_t dtype) {
    return static_cast<size_t>(count) * static_cast<size_t>(dtype_info(dtype).size);
  };
  if (options_.parts != GA_STATE_LIBRARY)
    saved_.push_back({name, p.dtype, t.shape, {{p.data, data_bytes(p)}}, {}, -1, {}});
  if (options_.parts == GA_STATE_PARAMETERS || !p.owns) return;
  for (const auto& [a, dtype, shape] : arrays_of(i)) {
    if (a.kind == kMaster ? p.master_due : a.kind == kAverage ? !state.averaged : p.state_due)
      continue;
    void* const data = model_.arrays.data(p, a.kind);
    const bool shared = model_.ranks->divides(static_cast<ga_param>(i));
    Saved s = {name + "." + a.name, dtype, shape, {}, {}};
    if (!shared) {
      s.regions = {{data, bytes(a.count, dtype)}};
    } else {
      s.shared_by = static_cast<ga_param>(i);
      s.part = {{data, dtype}, a.count, ParamArrays::each_of(p, a.kind, a.count)};
    }
    if (!shared || with_shared_) saved_.push_back(std::move(s));
  }
  const Group& g = model_.params.group_of(p);
  if (model_.params.op_of(p) >= 0 && g.optimizer.flavor == GA_FLAVOR_TORCH && !p.state_due) {
    add_numbers(name + ".step", GA_I64, {}, {bits_of(state.clock.step)});
    for (int k = 0; k < kClockNumbers; ++k)
      if (const char* const number = g.info->clock_numbers[k].name)
        add_numbers(name + "." + number, GA_F64, {}, {bits_of(g.info->number_of(state.clock, k))});
  }
  // Contributions that were dropped count too.
  if (with_window_ && (p.held() != Held::kNothing || p.contributions.count > 0))
    collect_of_window([&] { collect_held(i, state); });
}

// What the window holds of a parameter.
void Checkpoint::collect_held(size_t i, const ParamState& state) {
  const Param& p = model_.params[i];
  const Tensor& t = model_.params.tensor(i);
  const std::string name = std::string(t.name) + ".grad_accum";
  const auto size = static_cast<size_t>(dtype_info(p.accumulator_dtype).size);
  const size_t bytes = static_cast<size_t>(p.count) * size;
  Backend& backend = *model_.backend;
  const bool rows_alone = p.held() == Held::kRows, nothing = p.held() == Held::kNothing;
  add_numbers(
      name + ".window", GA_F64, {7},
      {bits_of(nothing      ? 0.0
               : rows_alone ? 2.0
                            : 1.0),
       bits_of(p.window.stale ? 1.0 : 0.0), bits_of(static_cast<double>(p.contributions.count)),
       bits_of(static_cast<double>(p.contributions.last_micro)), bits_of(p.held_weight),
       bits_of(static_cast<double>(state.contributed)), bits_of(state.held_weight)});
  if (nothing) return;
  std::vector<Partial> partials;
  if (rows_alone && p.count > 0) {
    RowSet set;
    backend.read(&set, t.set, sizeof set);
    std::vector<RowEntry> entries(static_cast<size_t>(set.size));
    if (!entries.empty())
      backend.read(entries.data(), set.entries, entries.size() * sizeof(RowEntry));
    const size_t row_bytes = bytes / static_cast<size_t>(t.rows);
    std::vector<uint64_t> rows;
    Saved values = {name + ".values", p.accumulator_dtype, t.shape, {}, {}};
    values.shape[0] = set.size;
    for (const RowEntry& e : entries) {
      rows.push_back(bits_of(e.row));
      partials.push_back(e.partial);
      values.regions.push_back(
          {static_cast<char*>(p.accumulator) + static_cast<size_t>(e.row) * row_bytes, row_bytes});
    }
    add_numbers(name + ".rows", GA_I64, {set.size}, std::move(rows));
    saved_.push_back(std::move(values));
  } else if (p.count > 0) {
    saved_.push_back({name, p.accumulator_dtype, t.shape, {{p.accumulator, bytes}}, {}});
    if (t.low)
      saved_.push_back({name + "_low", p.accumulator_dtype, t.shape, {{t.low, bytes}}, {}});
    partials.resize(static_cast<size_t>(chunk_count(p.count)));
    backend.read(partials.data(), p.partials, partials.size() * sizeof(Partial));
  }
  std::vector<uint64_t> sums;
  for (const Partial& x : partials)
    for (const double sum : {x.sum_squares, x.noise, static_cast<double>(x.nonfinite)})
      sums.push_back(bits_of(sum));
  add_numbers(name + ".partials", GA_F64, {static_cast<int64_t>(partials.size()), 3},
              std::move(sums));
}

void Checkpoint::collect_layer(ga_bn id) {
  const ga_bn_info layer = stages_.layers.info(id);
  const BatchNorms::Snapshot s = stages_.layers.snapshot(id);
  const std::string name = layer.name;
  const int64_t channels = layer.channels;
  std::vector<uint64_t> mean, variance, steps;
  for (const BnChannel& c : s.channels) {
    mean.push_back(bits_of(c.running_mean));
    variance.push_back(bits_of(c.running_variance));
    steps.push_back(bits_of(c.steps));
  }
  const uint64_t most = *std::max_element(steps.begin(), steps.end());
  const bool alike = *std::min_element(steps.begin(), steps.end()) == most;
  add_numbers(name + ".running_mean", GA_F64, {channels}, std::move(mean));
  add_numbers(name + ".running_var", GA_F64, {channels}, std::move(variance));
  add_numbers(name + ".num_batches_tracked", GA_I64, {}, {most});
  if (options_.parts == GA_STATE_PARAMETERS) return;
  if (!alike)
    add_numbers(name + ".num_batches_tracked.channels", GA_I64, {channels}, std::move(steps));
  if (with_window_ && s.in_window())
    collect_of_window([&] { collect_layer_window(name + ".bn_window", channels, s); });
}

void Checkpoint::collect_layer_window(const std::string& window, int64_t channels,
                                      const BatchNorms::Snapshot& s) {
  std::vector<uint64_t> state, micros, history;
  for (const BnChannel& c : s.channels)
    each_field(c, [&](const char*, auto x) { state.push_back(bits_of(static_cast<double>(x))); });
  for (const auto& m : s.micros)
    for (const int64_t x : {m.count, int64_t{m.given}, int64_t{m.summed}})
      micros.push_back(bits_of(x));
  for (const Moments& m : s.history)
    for (const double x : {m.count, m.mean, m.m2}) history.push_back(bits_of(x));
  add_numbers(window, GA_F64, {channels, kChannelNumbers}, std::move(state));
  add_numbers(window + ".sweep", GA_I64, {6},
              {bits_of(s.index), bits_of(s.sums_of), bits_of(s.forwarded), bits_of(s.sums),
               bits_of(int64_t{s.final} + int64_t{s.sums_final}), bits_of(s.seen)});
  add_numbers(window + ".micro_batches", GA_I64, {static_cast<int64_t>(s.micros.size()), 3},
              std::move(micros));
  add_numbers(window + ".history", GA_F64,
              {static_cast<int64_t>(s.history.size()) / channels, channels, 3}, std::move(history));
}

void Checkpoint::collect_rates() {
  for (size_t k = 0; k < model_.params.groups.size(); ++k) {
    const Group& g = model_.params.groups[k];
    if (g.schedule.table_size == 0) continue;
    std::vector<uint64_t> rates;
    for (int64_t i = 0; i < g.schedule.table_size; ++i)
      rates.push_back(bits_of(g.rates.host_data()[i]));
    add_numbers(std::string(kOurs) + "group." + std::to_string(k) + ".rates", GA_F64,
                {g.schedule.table_size}, std::move(rates));
  }
}

void Checkpoint::collect_micros() {
  const Window& window = model_.window;
  // A scale that only the device knows is that of the whole window.
  const double scale = model_.loss_scale();
  std::vector<uint64_t> micros;
  for (int64_t k = 0; k < window.size(); ++k) {
    const Micro& m = window.micro(k);
    for (const double x : {m.weight, m.loss_scale == 0 ? scale : m.loss_scale, m.own ? 1.0 : 0.0,
                           m.last ? 1.0 : 0.0})
      micros.push_back(bits_of(x));
  }
  add_numbers(std::string(kOurs) + "window.micro_batches", GA_F64, {window.size(), 4},
              std::move(micros));
}

RankState::Items Checkpoint::state_items(const Stages& stages) {
  ga_state_options whole = {};
  whole.struct_size = sizeof whole;
  Model& model = stages.model;
  Checkpoint checkpoint(stages, whole, "ga_step");
  checkpoint.with_window_ = checkpoint.with_shared_ = false;
  stages.copies.follow_data();
  checkpoint.collect();
  RankState::Items items;
  Checksum sum;
  for (const Saved& s : checkpoint.saved_) {
    sum.restart();
    sum.add(s.numbers.data(), s.numbers.size() * sizeof(uint64_t));
    model.backend->read_pieces({s.regions.data(), s.regions.size()},
                               [&](const void* piece, size_t bytes) { sum.add(piece, bytes); });
    Fields f;
    f.add("xxh3", sum.value());
    items.emplace_back(s.name, f.text());
  }
  Fields keys;
  for (size_t i = 0; i < model.params.size(); ++i)
    if (!model.params.tensor(i).removed && checkpoint.is_stochastic(i))
      keys.add(("parameter_" + std::to_string(i)).c_str(), model.params.tensor(i).key);
  items.emplace_back("keys of random bits", keys.text());
  Control control = model.progress.control();
  put_counts(WindowCounts(), control);
  Fields counters;
  counters.add_fields(control);
  items.emplace_back("counters", counters.text());
  for (size_t k = 0; k < model.params.groups.size(); ++k) {
    GroupState state;
    model.backend->read(&state, model.tables.group_states.at(k), sizeof state);
    Fields f;
    f.add_fields(state);
    items.emplace_back("group " + std::to_string(k), f.text());
  }
  return items;
}

std::vector<uint64_t> RankCheckpoint::write(const char* what, int64_t& size) {
  ga_state_options whole = {};
  whole.struct_size = sizeof whole;
  stages_.copies.follow_data();
  Checkpoint checkpoint(stages_, whole, what);
  size = checkpoint.file_bytes();
  std::vector<uint64_t> file((static_cast<size_t>(size) + 7) / 8);
  checkpoint.save([&](int64_t offset, const void* data, size_t n) {
    std::memcpy(reinterpret_cast<char*>(file.data()) + offset, data, n);
  });
  return file;
}

void RankCheckpoint::read(const char* what, const std::vector<uint64_t>& file, int64_t size) {
  ga_state_options whole = {};
  whole.struct_size = sizeof whole;
  Checkpoint(stages_, whole, what).load(size, [&](int64_t offset, void* to, size_t n) {
    std::memcpy(to, reinterpret_cast<const char*>(file.data()) + offset, n);
  });
}

WindowCounts Checkpoint::window_counts() const {
  const Control& c = model_.progress.control();
  return {c.weight,
          c.weighted,
          c.window_dropped,
          c.dropped_micros,
          c.micro_finite,
          c.failed,
          stages_.accumulator.rows_held(),
          stages_.accumulator.noise_repeated()};
}

// Sets the fields of the control block that are of an open window.
void Checkpoint::put_counts(const WindowCounts& counts, Control& control) {
  control.weight = counts.weight;
  control.weighted = counts.weighted;
  control.window_dropped = counts.window_dropped;
  control.dropped_micros = counts.dropped_micros;
  control.micro_finite = counts.micro_finite;
  control.failed = counts.failed;
}

// The texts in the metadata.
Metadata Checkpoint::texts() {
  Metadata list;
  const auto add = [&](const std::string& key, std::string text) {
    list.emplace_back(std::string(kOurs) + key, std::move(text));
  };
  add("version", std::to_string(GA_VERSION_MAJOR) + "." + std::to_string(GA_VERSION_MINOR) + "." +
                     std::to_string(GA_VERSION_PATCH));
  add("ranks", std::to_string(std::max<size_t>(counts_.size(), 1)));
  static constexpr const char* parts[] = {"all", "library", "parameters"};
  add("parts", parts[options_.parts]);
  if (options_.note) add("note", options_.note);
  if (has_parts()) add("own_parts", OwnParts::of(model_.params, model_.ranks->samples()).text());
  if (options_.parts == GA_STATE_PARAMETERS) return list;
  Backend& backend = *model_.backend;
  Control control = model_.progress.control();
  const WindowCounts window_of_0 = counts_.empty() ? window_counts() : counts_[0];
  put_counts(window_of_0, control);
  Fields counters, result;
  counters.add_fields(control);
  counters.add("host_windows", model_.progress.windows());
  // Not Control::result, which may be that of a window that was rejected.
  ga_step_result last = {};
  if (control.windows > 0) backend.result(0, true, last);
  if (!dropped_micros_.empty()) last.dropped_micros = dropped_micros_[0];
  result.add_fields(last);
  add("counters", counters.text());
  add("result", result.text());
  if (std::any_of(dropped_micros_.begin(), dropped_micros_.end(),
                  [](uint64_t d) { return d != 0; })) {
    Fields of_ranks;
    of_ranks.add("ranks", static_cast<int64_t>(dropped_micros_.size()));
    for (size_t q = 0; q < dropped_micros_.size(); ++q)
      of_ranks.add(("rank_" + std::to_string(q)).c_str(), dropped_micros_[q]);
    add("dropped_micros", of_ranks.text());
  }
  for (size_t k = 0; k < model_.params.groups.size(); ++k) {
    GroupState state;
    backend.read(&state, model_.tables.group_states.at(k), sizeof state);
    Fields f;
    f.add_fields(state);
    add("group." + std::to_string(k) + ".state", f.text());
  }
  Fields window = window_settings();
  window.add("rows_held", window_of_0.rows_held);
  window.add("noise_repeated", window_of_0.noise_repeated);
  add("window", window.text());
  for (size_t q = 1; q < counts_.size(); ++q) {
    Fields f;
    f.add_fields(counts_[q]);
    add("rank." + std::to_string(q) + ".window", f.text());
  }
  const ParamList& params = model_.params;
  const auto& tensors = params.tensors();
  const auto there =
      std::count_if(tensors.begin(), tensors.end(), [](const Tensor& t) { return !t.removed; });
  if (there != params.next_key()) {  // some were removed
    Fields keys;
    keys.add("next", params.next_key());
    add("keys", keys.text());
  }
  for (const auto& [key, fields] : settings()) add(key, fields.text());
  return list;
}

}  // namespace ga
