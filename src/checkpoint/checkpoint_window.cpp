// SPDX-License-Identifier: Apache-2.0
// Open windows in a state file, rank by rank: what the ranks tell each other to save them, and how a load
// reads those that come together on this rank, checks them and makes one window of them.
#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstring>
#include <iterator>

#include "batchnorm/batchnorm.hpp"
#include "checkpoint/checkpoint.hpp"
#include "core/error.hpp"
#include "core/tensor.hpp"
#include "model/copies.hpp"
#include "model/preparation.hpp"
#include "model/table_writer.hpp"
#include "window/accumulator.hpp"

namespace ga {
namespace {

int32_t dtype_of(const std::string& file_name) {
  int32_t dtype = GA_F32;
  while (dtype_info(dtype).file_name != file_name) ++dtype;
  return dtype;
}

// What the kernels read when a gradient is added to another one.
struct Adding {
  Pair pair;
  int64_t windows;  // see AccumulateTask::counter
};

}  // namespace

// ---- Saving -------------------------------------------------------------------------------------

void Checkpoint::gather(const Ready& ready) {
  model_.speculation->check_not_in_place(what_);
  model_.speculation->join();  // before anything is read
  if (options_.parts != GA_STATE_PARAMETERS) stages_.copies.follow_data();
  Ranks& ranks = *model_.ranks;
  if (ranks.ranks() > 1) dropped_micros_ = ranks.dropped_micros();
  if (!ranks.has_open_window() || options_.parts == GA_STATE_PARAMETERS) return;
  if (model_.window.rejected())
    fail(GA_ERROR_INVALID_STATE,
         "%s: ga_step has returned GA_ERROR_NONFINITE for the window, whose gradients are added up "
         "over the ranks by now; ga_discard must be called first",
         what_);
  if (ranks.ranks() == 1) return;
  stages_.preparation.prepare();  // so that all ranks have the same arrays
  collect();
  const auto own_begin = std::stable_partition(saved_.begin(), saved_.end(),
                                               [](const Saved& s) { return s.rank < 0; });
  std::vector<Saved> own(std::make_move_iterator(own_begin), std::make_move_iterator(saved_.end()));
  saved_.erase(own_begin, saved_.end());

  // A header as in a file says what this rank has; in front of it, how many bytes these are.
  Fields counts;
  counts.add_fields(window_counts());
  safetensors::Header header = {{{"window", counts.text()}}, {}};
  int64_t bytes = 0;
  for (const Saved& s : own) {
    header.tensors.push_back(
        {s.name, dtype_info(s.dtype).file_name, s.shape, bytes, bytes + s.bytes()});
    bytes += s.bytes();
  }
  const std::string text = std::to_string(bytes) +
                           safetensors::write(header, kMostIndex).substr(safetensors::kLengthBytes);
  piece_.resize((size_t{1} << 20) / sizeof(int64_t));
  ready();
  const std::vector<std::string> texts = ranks.gather_texts("what each window has", text);
  for (size_t q = 0; q < texts.size(); ++q) {
    const auto rank = static_cast<int32_t>(q);
    const std::string_view all = texts[q], begin = all.substr(0, all.find('{'));
    std::from_chars(begin.data(), begin.data() + begin.size(), bytes);
    header = safetensors::parse(all.substr(begin.size()), bytes, kMostIndex);
    Fields(header.metadata[0].second, "window").get_fields(counts_.emplace_back());
    for (size_t k = 0; k < header.tensors.size(); ++k) {
      const safetensors::Tensor& t = header.tensors[k];
      Saved s = {t.name, dtype_of(t.dtype), t.shape, {}, {}};
      if (rank == ranks.rank()) s = std::move(own[k]);
      s.name = name_of_rank(rank, t.name);
      s.rank = rank;
      saved_.push_back(std::move(s));
    }
  }
  sort();
}

// Puts entries of the list that are of one rank's window.
void Checkpoint::put_windows(size_t first, size_t end, const TakePiece& put) {
  int64_t bytes = 0;
  for (size_t k = first; k < end; ++k) bytes += saved_[k].bytes();
  const auto read = [&](const TakePiece& take) {
    for (size_t k = first; k < end; ++k) {
      const Saved& s = saved_[k];
      if (!s.numbers.empty()) take(s.numbers.data(), s.numbers.size() * sizeof s.numbers[0]);
      model_.backend->read_pieces({s.regions.data(), s.regions.size()}, take);
    }
  };
  model_.ranks->hand_round_bytes(saved_[first].rank, bytes, piece_, read, put);
}

// ---- Loading: what the file has -----------------------------------------------------------------

// Checks how many ranks' windows the file says it has, and that there is something of each and nothing of
// any other.
void Checkpoint::find_ranks() {
  if (const std::string* const text = file_->find("ranks")) {
    std::from_chars(text->data(), text->data() + text->size(), ranks_);
    if (ranks_ < 1 || std::to_string(ranks_) != *text || (ranks_ > 1 && !file_->is_ours()))
      fail(GA_ERROR_FORMAT, "it says that it has the windows of \"%.20s\" ranks", text->c_str());
  }
  if (!file_->is_ours()) return;
  for (const safetensors::Tensor& t : file_->tensors())
    if (begins_with(t.name, kOfRank)) check_rank(t.name);
  for (const auto& entry : file_->metadata())
    if (begins_with(entry.first, kOfRank)) check_rank(entry.first);
  for (int32_t q = 1; q < ranks_; ++q)
    if (!file_->find("rank." + std::to_string(q) + ".window"))
      fail(GA_ERROR_FORMAT,
           "it has nothing of the window of rank %d, but says that %d ranks saved it", q, ranks_);
}

// Checks a name that begins with kOfRank.
void Checkpoint::check_rank(const std::string& name) const {
  const size_t dot = std::min(name.find('.', kOfRank.size()), name.size());
  const std::string number = name.substr(kOfRank.size(), dot - kOfRank.size());
  int32_t rank = 0;
  std::from_chars(number.data(), number.data() + number.size(), rank);
  if (rank < 1 || rank >= ranks_ || std::to_string(rank) != number || dot + 1 >= name.size() ||
      begins_with(std::string_view(name).substr(dot + 1), kOfRank))
    fail(GA_ERROR_FORMAT, "\"%.200s\" is not of one of the %d ranks whose windows it has",
         name.c_str(), ranks_);
}

// Which windows come to this rank. If none is open, every rank takes that of rank 0.
void Checkpoint::find_windows(Problems& problems) {
  joined_.resize(params_.size());
  if (options_.parts == GA_STATE_PARAMETERS || !file_->is_ours()) return;
  open_ = ranks_ > 1;
  for (int32_t q = 0; q < ranks_; ++q) {
    WindowIn window = find_window(q, problems);
    open_ = open_ || window.micro_tensor >= 0 ||
            std::any_of(window.layers.begin(), window.layers.end(),
                        [](const LayerWindowIn& b) { return b.has(kChannels); });
    if (!open_ || q % model_.ranks->ranks() == model_.ranks->rank())
      windows_.push_back(std::move(window));
  }
}

Checkpoint::WindowIn Checkpoint::find_window(int32_t rank, Problems& problems) {
  WindowIn window = {rank};
  window.micro_tensor = claim(name_of_rank(rank, std::string(kOurs) + "window.micro_batches"));
  window.params.resize(params_.size());
  for (size_t i = 0; i < params_.size(); ++i) {
    if (!params_[i].listed) continue;
    const Param& p = model_.params[i];
    const Tensor& t = model_.params.tensor(i);
    HeldIn& in = window.params[i];
    const auto find = [&](int kind, const char* end, int32_t dtype,
                          const std::vector<int64_t>& shape) {
      const int64_t at = claim(name_of_rank(rank, std::string(t.name) + ".grad_accum" + end));
      in.tensor[static_cast<size_t>(kind)] = at;
      if (at >= 0) check_tensor(at, {dtype}, shape, problems);
    };
    std::vector<int64_t> some_rows = t.shape;
    if (!some_rows.empty()) some_rows[0] = -1;
    find(kHeldSums, "", p.accumulator_dtype, t.shape);
    find(kHeldLow, "_low", p.accumulator_dtype, t.shape);
    find(kHeldNumbers, ".window", GA_F64, {7});
    find(kHeldPartials, ".partials", GA_F64, {-1, 3});
    find(kHeldRows, ".rows", GA_I64, {-1});
    find(kHeldValues, ".values", p.accumulator_dtype, some_rows);
  }
  for (ga_bn id = 0; id < stages_.layers.count(); ++id) {
    const ga_bn_info layer = stages_.layers.info(id);
    LayerWindowIn& in = window.layers.emplace_back();
    const auto find = [&](int kind, const char* end, int32_t dtype,
                          const std::vector<int64_t>& shape) {
      const std::string name = name_of_rank(rank, std::string(layer.name) + ".bn_window" + end);
      const int64_t at = in.tensor[static_cast<size_t>(kind)] = claim(name);
      if (at >= 0)
        check_tensor(at, {dtype}, shape, problems);
      else if (kind != kChannels && !options_.allow_missing)
        problems.add("the file has no \"" + name + "\"");
    };
    find(kChannels, "", GA_F64, {layer.channels, kChannelNumbers});
    if (!in.has(kChannels)) continue;
    find(kPass, ".sweep", GA_I64, {6});
    find(kMicros, ".micro_batches", GA_I64, {-1, 3});
    find(kHistory, ".history", GA_F64, {-1, layer.channels, 3});
  }
  return window;
}

// ---- Loading: numbers of the file ---------------------------------------------------------------

void Checkpoint::read_windows() {
  for (WindowIn& window : windows_) {
    if (window.rank == 0) {
      window.counts = texts_.window;
    } else {
      const std::string key = "rank." + std::to_string(window.rank) + ".window";
      Fields(*file_->find(key), key.c_str()).get_fields(window.counts);
      check_counts(window.counts);
    }
    int64_t rows = 0;
    for (size_t i = 0; i < params_.size(); ++i)
      if (HeldIn& held = window.params[i]; held.has(kHeldNumbers)) {
        read_held(i, held);
        rows += static_cast<int64_t>(held.rows.size());
      }
    if (rows > window.counts.rows_held)
      fail(GA_ERROR_FORMAT, "its window has %lld rows, but says that it has %lld",
           static_cast<long long>(rows), static_cast<long long>(window.counts.rows_held));
    for (ga_bn id = 0; id < stages_.layers.count(); ++id) {
      LayerWindowIn& in = window.layers[static_cast<size_t>(id)];
      if (in.has(kChannels)) read_layer_window(id, in);
    }
  }
}

void Checkpoint::check_counts(const WindowCounts& counts) {
  for (const int64_t count : {counts.weighted, counts.window_dropped, counts.rows_held})
    whole(static_cast<double>(count), 0, kMost, "a counter of its window");
  if (!std::isfinite(counts.weight))
    fail(GA_ERROR_FORMAT, "the weight of its window was %g", counts.weight);
}

void Checkpoint::read_held(size_t i, HeldIn& w) const {
  const Param& p = model_.params[i];
  const Tensor& t = model_.params.tensor(i);
  const std::string held = std::string("the window of \"") + t.name + "\"";
  const auto fail_held = [&](const char* what) {
    fail(GA_ERROR_FORMAT, "%.300s %s", held.c_str(), what);
  };
  const std::vector<double> n = numbers(w.at(kHeldNumbers));
  static constexpr Held kinds[] = {Held::kNothing, Held::kStored, Held::kRows};
  w.held = kinds[whole(n[0], 0, 2, held.c_str())];
  const bool rows = w.held == Held::kRows;
  w.stale = whole(n[1], 0, 1, held.c_str()) != 0;
  w.contributions.count = whole(n[2], 0, kMost, held.c_str());
  w.contributions.last_micro = whole(n[3], -1, kMost, held.c_str());
  w.held_weight = n[4];
  w.contributed = whole(n[5], 0, 1, held.c_str());
  w.state_held_weight = n[6];
  if (w.held == Held::kNothing) return;
  if (p.count > 0 && !rows && !w.has(kHeldSums)) fail_held("has no gradient");
  if (p.count > 0 && !rows && w.has(kHeldLow) != model_.arrays.is_compensated(p))
    fail_held("has half of a compensated gradient");
  if (p.count > 0 && rows && t.options.rows == GA_ROWS_NONE)
    fail_held("is a gradient of some rows, but the parameter has no ga_param_options.rows");
  if (p.count > 0 && rows && !(w.has(kHeldRows) && w.has(kHeldValues))) fail_held("has no rows");
  const std::vector<double> sums =
      w.has(kHeldPartials) ? numbers(w.at(kHeldPartials)) : std::vector<double>();
  for (size_t k = 0; k + 2 < sums.size(); k += 3)
    w.partials.push_back({sums[k], 0, sums[k + 1], whole(sums[k + 2], 0, 1, held.c_str())});
  int64_t partials = chunk_count(p.count);
  if (rows && p.count > 0) {
    w.rows = integers(w.at(kHeldRows));
    partials = static_cast<int64_t>(w.rows.size());
    std::vector<bool> seen(static_cast<size_t>(t.rows));
    for (const int64_t row : w.rows) {
      if (row < 0 || row >= t.rows || seen[static_cast<size_t>(row)])
        fail_held("has a row twice, or one that the parameter has not");
      seen[static_cast<size_t>(row)] = true;
    }
    const auto& values = file_->tensors()[static_cast<size_t>(w.at(kHeldValues))].shape;
    if (values[0] != partials) fail_held("has not as many values as rows");
  }
  if (!assembled_ && static_cast<int64_t>(w.partials.size()) != partials)
    fail_held("has another number of partial sums than this version of the library");
}

void Checkpoint::read_layer_window(ga_bn id, LayerWindowIn& in) const {
  const ga_bn_info layer = stages_.layers.info(id);
  const std::string name = "the statistics of \"" + std::string(layer.name) + "\"";
  const auto channels = static_cast<size_t>(layer.channels);
  BatchNorms::Snapshot& s = in.snapshot;
  s.channels.resize(channels);
  for (const int kind : {kPass, kMicros, kHistory})
    if (!in.has(kind)) fail(GA_ERROR_FORMAT, "%.300s are there in part only", name.c_str());

  const std::vector<double> state = numbers(in.at(kChannels));
  const std::vector<int64_t> pass = integers(in.at(kPass)), micros = integers(in.at(kMicros));
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
  for (size_t k = 0; k < history.size(); k += 3)
    s.history.push_back({history[k], history[k + 1], history[k + 2]});
  for (size_t k = 0; k < micros.size(); k += 3)
    s.micros.push_back({micros[k], micros[k + 1] != 0, micros[k + 2] != 0});
  const auto size = static_cast<int64_t>(s.micros.size());
  s.index = whole(static_cast<double>(pass[0]), -1, size - 1, name.c_str());
  s.sums_of = whole(static_cast<double>(pass[1]), -1, size - 1, name.c_str());
  s.forwarded = whole(static_cast<double>(pass[2]), 0, kMost, name.c_str());
  s.sums = whole(static_cast<double>(pass[3]), 0, size, name.c_str());
  const int64_t final = whole(static_cast<double>(pass[4]), 0, 2, name.c_str());
  s.final = final > 0;
  s.sums_final = final > 1;
  s.seen = whole(static_cast<double>(pass[5]), 0, size, name.c_str());
  // Without a history, the statistics of a layer that is not in WINDOW mode could not be used.
  if (layer.mode != GA_BN_WINDOW && !layer.frozen && held < s.seen)
    fail(GA_ERROR_FORMAT, "%.300s are of fewer micro-batches than it says", name.c_str());
}

void Checkpoint::read_micros(WindowIn& window) const {
  if (window.micro_tensor < 0) return;
  const safetensors::Tensor& t = file_->tensors()[static_cast<size_t>(window.micro_tensor)];
  if (t.shape.size() != 2 || t.shape[1] != 4 || t.dtype != "F64")
    fail(GA_ERROR_FORMAT, "the micro-batches of its window have the shape %s",
         text_of(t.shape).c_str());
  const std::vector<double> n = numbers(window.micro_tensor);
  // A scale of the context's own is not written down where only the device knows it.
  const bool late = next_options().late_scale();
  for (size_t k = 0; k < n.size(); k += 4) {
    const bool own = whole(n[k + 2], 0, 1, "a micro-batch") != 0;
    const bool last = whole(n[k + 3], 0, 1, "a micro-batch") != 0;
    if (!(n[k] >= 0) || !std::isfinite(n[k]) || !std::isfinite(n[k + 1]) || n[k + 1] == 0)
      fail(GA_ERROR_FORMAT, "micro-batch %zu of its window has the weight %g and loss scale %g",
           k / 4, n[k], n[k + 1]);
    window.micros.push_back({n[k], !own && late ? 0 : n[k + 1], last, own});
  }
}

// ---- Loading: one window ------------------------------------------------------------------------

void Checkpoint::join_windows() {
  for (WindowIn& window : windows_) read_micros(window);
  check_windows();
  if (!open_) return;
  WindowCounts& all = texts_.window = {};
  bool last = true;
  for (const WindowIn& window : windows_) {
    const WindowCounts& counts = window.counts;
    const size_t begin = texts_.micros.size();
    all.weight += counts.weight;
    all.weighted += counts.weighted;
    all.window_dropped += counts.window_dropped;
    if (begin < 64) all.dropped_micros |= counts.dropped_micros << begin;
    all.micro_finite = counts.micro_finite;
    all.failed = all.failed || counts.failed;
    all.rows_held += counts.rows_held;
    all.noise_repeated = all.noise_repeated || counts.noise_repeated;
    if (window.micros.empty()) continue;
    // The window is full where all that it is made of were.
    last = last && window.micros.back().last;
    if (begin > 0) texts_.micros.back().last = false;
    texts_.micros.insert(texts_.micros.end(), window.micros.begin(), window.micros.end());
    texts_.micros.back().last = last;
  }
  check_counts(all);
  check_accum_steps();
  for (size_t i = 0; i < params_.size(); ++i) join_param(i);
  for (ga_bn id = 0; id < stages_.layers.count(); ++id) join_layer(id);
}

// Checks that the context can hold the file's open windows.
void Checkpoint::check_windows() const {
  for (const WindowIn& window : windows_)
    for (const HeldIn& h : window.params)
      if (h.has(kHeldNumbers) && window.micros.empty())
        fail(GA_ERROR_FORMAT, "it has gradients of a window, but no micro-batches");
  if (!open_) return;
  Problems problems;
  window_settings().each_difference(Fields(*file_->find("window"), "window"),
                                    [&](const char* field, const char* theirs, const char* here) {
                                      if (here)
                                        problems.add(std::string(field) + " is " + theirs +
                                                     " in the file, but " + here + " here");
                                    });
  for (size_t i = 0; i < params_.size(); ++i) {
    if (std::all_of(windows_.begin(), windows_.end(),
                    [&](const WindowIn& w) { return w.params[i].held == Held::kNothing; }))
      continue;
    const Tensor& t = model_.params.tensor(i);
    const std::string key = "parameter." + std::string(t.name);
    const Fields fields(*file_->find(key), key.c_str());
    int32_t reduce = 0;  // not in files of versions without GA_REDUCE_MAX
    if (fields.has("reduce")) fields.get("reduce", reduce);
    if (reduce != t.options.reduce)
      problems.add(key + ": reduce is " + std::to_string(reduce) + " in the file, but " +
                   std::to_string(t.options.reduce) + " here");
  }
  problems.fail_if_any("the file has an open window, which depends on other settings");
}

void Checkpoint::check_accum_steps() const {
  const int64_t k = model_.length.at(texts_.control.steps);
  const auto size = static_cast<int64_t>(texts_.micros.size());
  if (k <= 0 || size <= k) return;
  if (windows_.size() == 1)
    fail(GA_ERROR_INVALID_ARGUMENT,
         "the window in the file holds %lld micro-batches, but K (accum_steps) is %lld", ll(size),
         ll(k));
  fail(GA_ERROR_INVALID_ARGUMENT,
       "the windows of %zu ranks, which come together on this one, hold %lld micro-batches, but K "
       "(accum_steps) is %lld; a larger K or as many ranks as saved the file can hold them",
       windows_.size(), ll(size), ll(k));
}

bool Checkpoint::is_running_mean(const Param& p) const {
  return model_.config.accumulation == GA_ACCUMULATE_RUNNING_MEAN && is_sum(p.reduction);
}

// The weight of a running mean.
double Checkpoint::weight_of(const HeldIn& held) const {
  return next_options().deferring() ? held.state_held_weight : held.held_weight;
}

void Checkpoint::join_param(size_t i) {
  Joined& j = joined_[i];
  const bool running = is_running_mean(model_.params[i]);
  int64_t begin = 0;  // of the micro-batches of a window
  for (const WindowIn& window : windows_) {
    const HeldIn& h = window.params[i];
    if (windows_.size() == 1) {
      static_cast<Holding&>(j) = h;
    } else {
      j.contributions.count += h.contributions.count;
      if (h.contributions.last_micro >= 0)
        j.contributions.last_micro = begin + h.contributions.last_micro;
    }
    begin += window.size();
    if (h.held == Held::kNothing) continue;
    if (windows_.size() > 1) {
      // What a device has only made room for, since all contributions were dropped.
      if (next_options().deferring() && h.contributed == 0) continue;
      if (running && !(weight_of(h) > 0 && std::isfinite(weight_of(h))))
        fail(GA_ERROR_FORMAT, "the window of \"%.200s\" is a mean over the weight %g",
             model_.params.name(i), weight_of(h));
      j.contributed = j.contributed || h.contributed != 0;
      j.held_weight += h.held_weight;
      j.state_held_weight += h.state_held_weight;
      j.stale = j.stale || h.stale;
    }
    (h.held == Held::kRows ? j.rows : j.dense).push_back(&h);
  }
  if (!j.dense.empty()) j.partials = j.dense[0]->partials;
  if (windows_.size() <= 1) return;
  for (size_t k = 1; k < j.dense.size(); ++k)
    for (size_t chunk = 0; chunk < j.partials.size(); ++chunk)
      j.partials[chunk].noise += j.dense[k]->partials[chunk].noise;
  j.held = !j.dense.empty() ? Held::kStored : !j.rows.empty() ? Held::kRows : Held::kNothing;
  if (!j.dense.empty()) {
    // The pass that adds a gradient measures the sum, one that adds rows does not.
    j.stale = (j.stale && j.dense.size() == 1) || !j.rows.empty();
    // Each rounds by bits of its own.
    j.contributions.count += static_cast<int64_t>(j.dense.size()) - 1;
  }
  for (const int64_t count : {j.contributions.count, j.contributions.last_micro})
    whole(static_cast<double>(count), -1, kMost, "a counter of its windows together");
}

// On as many ranks as saved it, a window is what it was. Else the statistics of its micro-batches come one
// behind the other, without those of a micro-batch that was never opened, and each can be visited again.
void Checkpoint::join_layer(ga_bn id) {
  const ga_bn_info layer = stages_.layers.info(id);
  BatchNorms::Snapshot& s = snapshots_[static_cast<size_t>(id)];
  const auto channels = static_cast<size_t>(layer.channels);
  const auto put_running = [&](BatchNorms::Snapshot& to) {
    for (size_t c = 0; c < channels; ++c) {
      to.channels[c].running_mean = s.channels[c].running_mean;
      to.channels[c].running_variance = s.channels[c].running_variance;
      to.channels[c].steps = s.channels[c].steps;
    }
  };
  if (ranks_ == model_.ranks->ranks()) {
    LayerWindowIn& in = windows_[0].layers[static_cast<size_t>(id)];
    if (!in.has(kChannels)) return;
    put_running(in.snapshot);
    s = std::move(in.snapshot);
    return;
  }
  BatchNorms::Snapshot all;
  all.channels.resize(channels);
  put_running(all);
  all.micros.resize(texts_.micros.size());
  all.history.resize(all.micros.size() * channels);
  size_t begin = 0;
  for (const WindowIn& window : windows_) {
    const LayerWindowIn& in = window.layers[static_cast<size_t>(id)];
    if (in.has(kChannels) && layer.mode == GA_BN_WINDOW && layer.frozen == 0)
      fail(
          GA_ERROR_UNSUPPORTED,
          "layer \"%.200s\" is in the middle of its passes (GA_BN_WINDOW), so the file loads on %d "
          "%s, as it was saved, not on %d; a state that is saved between windows loads on any "
          "number",
          layer.name, ranks_, ranks_ == 1 ? "rank" : "ranks", model_.ranks->ranks());
    const BatchNorms::Snapshot& from = in.snapshot;
    const size_t size = window.micros.size();
    for (size_t k = 0; k < std::min(size, from.micros.size()); ++k) {
      all.micros[begin + k] = from.micros[k];
      if (from.micros[k].count >= 0) all.seen = static_cast<int64_t>(begin + k) + 1;
      all.sums += from.micros[k].summed;
    }
    std::copy_n(from.history.begin(), std::min(size * channels, from.history.size()),
                all.history.begin() + static_cast<std::ptrdiff_t>(begin * channels));
    begin += size;
  }
  all.history.resize(static_cast<size_t>(all.seen) * channels);
  for (BnChannel& c : all.channels) c.taken = all.seen;
  s = std::move(all);
}

// ---- Loading: gradients into place --------------------------------------------------------------

// Allocates what adding gradients to each other takes.
void Checkpoint::reserve_joining() {
  size_t indices = 0, values = 0, added = 0, low = 0;
  for (size_t i = 0; i < params_.size(); ++i) {
    const Joined& j = joined_[i];
    int64_t rows = 0;
    for (const HeldIn* h : j.rows) {
      if (h->rows.empty()) continue;
      const Batch batch = batch_of(i, h->rows.size());
      indices = std::max(indices, batch.rows * sizeof(int64_t));
      values = std::max(values, batch.rows * batch.row_bytes);
      rows += static_cast<int64_t>(h->rows.size());
    }
    if (rows > 0)
      model_.backend->prepare_rows(
          stages_.accumulator.rows_task(static_cast<ga_param>(i), nullptr, GA_I64, rows, {}), 0);
    if (j.dense.size() <= placed()) continue;
    const auto bytes = static_cast<size_t>(model_.params[i].count) *
                       static_cast<size_t>(dtype_info(model_.params[i].accumulator_dtype).size);
    added = std::max(added, bytes);
    if (j.dense[0]->has(kHeldLow)) low = std::max(low, bytes);
  }
  if (indices > 0) row_indices_ = Buffer(*model_.backend, indices);
  if (values > 0) row_values_ = Buffer(*model_.backend, values);
  if (added > 0) added_ = Buffer(*model_.backend, added);
  if (low > 0) added_low_ = Buffer(*model_.backend, low);
  if (added > 0) added_by_ = Buffer(*model_.backend, sizeof(Adding));
}

// Reads a tensor of the file to a buffer, for the second time.
void Checkpoint::fill(const Buffer& buffer, int64_t tensor) {
  const safetensors::Tensor& t = file_->tensors()[static_cast<size_t>(tensor)];
  const Region region = {buffer.data(), static_cast<size_t>(t.end - t.begin)};
  file_->seek(static_cast<size_t>(tensor));
  model_.backend->write_pieces({&region, 1}, [&](void* piece, size_t bytes) {
    file_->next(read_, piece, bytes);
    report(static_cast<int64_t>(bytes), false);
  });
}

// Completes the gradients of which the first ones are in the accumulators.
void Checkpoint::place_windows() {
  for (size_t i = 0; i < params_.size(); ++i) {
    const Joined& j = joined_[i];
    Param& p = model_.params[i];
    if (p.count == 0) continue;
    if (!j.dense.empty()) {
      place_dense(i);
      p.hold(Held::kStored);  // to which rows are added
    }
    for (const HeldIn* h : j.rows)
      if (!h->rows.empty()) place_rows(i, *h);
  }
}

void Checkpoint::place_dense(size_t i) {
  const Joined& j = joined_[i];
  const auto id = static_cast<ga_param>(i);
  const Param& p = model_.params[id];
  if (placed() > 0)
    model_.backend->write(p.partials, j.partials.data(), j.partials.size() * sizeof(Partial));
  const bool running = is_running_mean(p);
  auto* const by = static_cast<Adding*>(added_by_.data());
  double weight = weight_of(*j.dense[0]);
  for (size_t k = placed(); k < j.dense.size(); ++k) {
    const HeldIn& h = *j.dense[k];
    fill(added_, h.at(kHeldSums));
    if (p.pair) fill(added_low_, h.at(kHeldLow));
    const Adding adding = {{added_.data(), added_low_.data(), p.accumulator_dtype},
                           texts_.control.windows};
    model_.backend->write(by, &adding, sizeof adding);
    AccumulateTask task = {};
    task.target = stages_.writer.target_of(id);
    task.count = p.count;
    task.partials = p.partials;
    task.source[0] = {added_.data(), p.accumulator_dtype, 1, nullptr};
    if (p.pair) task.source[0] = {&by->pair, kPair, 1, nullptr};
    task.sources = 1;
    task.keep = k == 0 ? 0 : keep_of(p.reduction);
    if (assembled_) task.source[0].scale = assembled_->gradient_scale();
    task.param = is_sum(p.reduction) ? id : -1;
    if (running) {
      const double before = weight;
      weight += weight_of(h);
      task.keep = before / weight;
      task.source[0].scale = weight_of(h) / weight;
    }
    if (model_.config.accumulation == GA_ACCUMULATE_STOCHASTIC && is_sum(p.reduction) && k > 0) {
      task.counter = &by->windows;
      task.seed = model_.config.seed ^ stages_.accumulator.rank_key();
      task.contribution = j.contributions.count - static_cast<int64_t>(k);
      task.key = model_.params.tensor(id).key;
    }
    model_.backend->accumulate({&task, 1});
    model_.backend->wait();
  }
}

// How many rows of a window are added at a time.
Checkpoint::Batch Checkpoint::batch_of(size_t i, size_t most) const {
  constexpr size_t kMostBytes = size_t{8} << 20;
  const Param& p = model_.params[i];
  const auto size = static_cast<size_t>(dtype_info(p.accumulator_dtype).size);
  const size_t row_bytes = static_cast<size_t>(p.count / model_.params.tensor(i).rows) * size;
  const size_t rows = std::max<size_t>(1, kMostBytes / std::max<size_t>(1, row_bytes));
  return {std::min(rows, most), row_bytes};
}

// Adds the rows of a window as contributions, in the order in which they came first.
void Checkpoint::place_rows(size_t i, const HeldIn& w) {
  const Batch batch = batch_of(i, w.rows.size());
  file_->seek(static_cast<size_t>(w.at(kHeldValues)));
  const auto fill = [&](void* piece, size_t bytes) {
    file_->next(read_, piece, bytes);
    report(static_cast<int64_t>(bytes), false);
  };
  for (size_t first = 0; first < w.rows.size(); first += batch.rows) {
    const size_t count = std::min(batch.rows, w.rows.size() - first);
    model_.backend->write(row_indices_.data(), &w.rows[first], count * sizeof(int64_t));
    const Region values = {row_values_.data(), count * batch.row_bytes};
    model_.backend->write_pieces({&values, 1}, std::ref(fill));
    const int32_t format = model_.params[i].accumulator_dtype;
    model_.backend->accumulate_rows(stages_.accumulator.rows_task(
        static_cast<ga_param>(i), row_indices_.data(), GA_I64, static_cast<int64_t>(count),
        {values.data, format, 1, nullptr}));
    model_.backend->wait();
  }
}

}  // namespace ga
