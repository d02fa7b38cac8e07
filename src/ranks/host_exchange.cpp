// SPDX-License-Identifier: Apache-2.0
#include "ranks/host_exchange.hpp"

#include <algorithm>
#include <cstring>

#include "batchnorm/batchnorm.hpp"
#include "core/fp_mode.hpp"
#include "core/tensor.hpp"
#include "model/preparation.hpp"
#include "ranks/bits.hpp"
#include "ranks/comm/comm.hpp"
#include "window/accumulator.hpp"

namespace ga {
namespace {

constexpr uint64_t kDense = ~uint64_t{0};  // in place of a number of rows

}  // namespace

HostExchange::HostExchange(const Stages& stages, RankState& state, std::shared_ptr<Comm> comm,
                           const ga_comm_options& options)
    : Exchange(stages, state, std::move(comm), options) {
  if (!overlaps() || !comm_->any_thread()) return;
  ga_config config = model_.config;
  config.num_threads = 1;
  config.parallel_for = nullptr;
  own_backend_ = make_cpu_backend(config);
  background_ = std::make_unique<Background>([this](size_t item) {
    const FpMode mode;
    run_item(item, *own_backend_);
  });
}

HostExchange::~HostExchange() {
  keep_late_memory();
  if (background_ && background_->close()) comm_->abort();
  background_.reset();
}

// ---- What the ranks bring -----------------------------------------------------------------------

bool HostExchange::begin_end(WindowTotals& totals, bool) {
  bool goes_on = false;
  or_lose_window([&] { goes_on = begin_step(totals); });
  return goes_on;
}

// Replaces the totals of this rank by those of all; returns false if another rank discards the window.
bool HostExchange::begin_step(WindowTotals& totals) {
  if (overlaps()) finish_buckets();
  comm_->check();
  moved_ = moved_ && overlaps();
  const auto ranks = comm_->ranks();
  const size_t n = model_.params.size();
  Header own = header(kStep, "ga_step");
  own.sums = brought_by(model_.tables.settings[0], *model_.tables.control.at(), totals);
  micro_batches_ = totals.micro_batches;
  std::vector<uint64_t> payload(words_for_bits(n));  // which parameters have a gradient
  for (size_t i = 0; i < n; ++i) {
    const Param& p = model_.params[i];
    const bool held = !p.frozen && p.held() != Held::kNothing;
    if (held) set_bit(payload.data(), i);
    if (!model_.params.takes_rows(i)) continue;  // else how many rows, or that all have a gradient
    const bool rows = held && p.held() == Held::kRows;
    const RowSet* const set = model_.params.tensor(i).set;
    payload.push_back(rows && set ? static_cast<uint64_t>(set->size) : held ? kDense : 0);
  }
  payloads_.clear();
  gather_headers(own, payload);
  check_calls("ga_step");
  for (int32_t q = 0; q < ranks; ++q)
    if (header_of(q).call == kDiscard) return false;
  check_settings();
  share_arrays("ga_step");
  if (is_check_due()) check_state();

  sums_ = {};
  for (int32_t q = 0; q < ranks; ++q) add(sums_, header_of(q).sums);
  if (payload.size() > capacity_) {  // on every rank, since they agree on the parameters
    payloads_.resize(static_cast<size_t>(ranks) * payload.size());
    comm_->all_gather("which parameters have gradients", payload.data(), payloads_.data(),
                      static_cast<int64_t>(payload.size()), GA_I64);
  }
  touched_.assign(n, 0);
  for (int32_t q = 0; q < ranks; ++q)
    for (size_t i = 0; i < n; ++i) touched_[i] = touched_[i] || bit(payload_of(q), i);
  row_counts_.clear();
  size_t word = words_for_bits(n);
  for (size_t i = 0; i < n; ++i) {
    if (!model_.params.takes_rows(i)) continue;
    for (int32_t q = 0; q < ranks; ++q) row_counts_.push_back(payload_of(q)[word]);
    ++word;
  }
  if (!payloads_.empty()) {
    capacity_ = payload.size();
    payloads_.clear();
  }
  exchanged_ = sums_.weight > 0 && sums_.failed == 0;
  totals.over_ranks = true;
  totals.micro_batches = static_cast<int64_t>(sums_.micro_batches);
  totals.weight = sums_.weight;
  totals.weighted = static_cast<int64_t>(sums_.weighted);
  return true;
}

void HostExchange::discard() {
  or_lose_window([this] {
    if (has_failed()) return;
    if (overlaps()) finish_buckets();
    moved_ = moved_ && overlaps();
    gather_headers(header(kDiscard, "ga_discard"), {});
    check_calls("ga_discard");
  });
}

// ---- Gradients and sums -------------------------------------------------------------------------

StepSums HostExchange::reduce(const WindowTotals&, Params, const WriteWindow& write) {
  or_lose_window([this] { sum_gradients(); });
  // Updates ahead go on while ranks exchange the rest, and read the control block.
  model_.speculation->join();
  model_.tables.control.at()->sums = sums_;
  return write();
}

OverRanks HostExchange::over_ranks() {
  return [this] { or_lose_window([this] { add_sums(); }); };
}

void HostExchange::sum_gradients() {
  moved_ = true;
  if (!overlaps()) transfer_.clear_param_sums(touched_.size());
  if (!exchanged_) return;
  gather_rows();
  // In the background, gradients that may consist of rows have not been exchanged yet.
  transfer_.make_buckets([&](ga_param id) {
    return touched_[static_cast<size_t>(id)] && model_.params[id].held() != Held::kRows &&
           (!overlaps() || model_.params.takes_rows(id));
  });
  for (size_t k = 0; k < transfer_.buckets().list().size();) k = run(k);
  hold_sums();
  transfer_.measure_rest(touched_, sums_.weight);
}

void HostExchange::hold_sums() {
  for (size_t i = 0; i < touched_.size(); ++i) {
    Param& p = model_.params[i];
    if (!touched_[i] || p.held() == Held::kRows) continue;
    if (p.held() == Held::kNothing)  // the partials are those of an earlier window
      for (int64_t k = 0; k < chunk_count(p.count); ++k) p.partials[k].noise = 0;
    p.hold(Held::kReduced);
    const auto id = static_cast<ga_param>(i);
    p.reduced = divisions_.reduced_range(id).count > 0 ? transfer_.reduced(id).data : nullptr;
    p.window.stale = false;
  }
}

void HostExchange::add_sums() {
  // Sent: for each touched parameter the sums of this rank, then statistics.
  std::vector<double> own;
  const bool noise = model_.config.noise_scale != 0;
  const auto in_pieces = [&](size_t i) {  // else every rank has measured it
    return touched_[i] && model_.params[i].held() != Held::kRows;
  };
  for (size_t i = 0; i < touched_.size(); ++i) {
    if (!in_pieces(i)) continue;
    const ParamSums& s = transfer_.param_sums(i);
    own.push_back(s.squares);
    own.push_back(s.nonfinite);
    if (model_.tables.param_inputs[i].clamped) own.push_back(s.clamped);
    if (noise) own.push_back((*model_.tables.param_states.at(i)).sums.noise);
  }
  merge_statistics(own);
  const auto ranks = static_cast<size_t>(comm_->ranks());
  std::vector<double> all(ranks * own.size());
  if (!own.empty())
    comm_->all_gather("norms and statistics", own.data(), all.data(),
                      static_cast<int64_t>(own.size()), GA_F64);
  size_t at = 0;
  const auto total = [&] {
    double sum = 0;
    for (size_t q = 0; q < ranks; ++q) sum += all[q * own.size() + at];
    ++at;
    return sum;
  };
  for (size_t i = 0; i < touched_.size(); ++i) {
    ParamSums sums = {};
    if (touched_[i] && !in_pieces(i)) sums = (*model_.tables.param_states.at(i)).sums;
    if (in_pieces(i)) {
      sums.squares = total();
      sums.nonfinite = total();
      if (model_.tables.param_inputs[i].clamped) sums.clamped = total();
      if (noise) sums.noise = total();
      sums.gradients = sums.dense = 1;
    }
    if (i < model_.tables.params()) {
      (*model_.tables.param_states.at(i)).sums = sums;
      (*model_.tables.param_states.at(i)).held_weight =
          1;  // the sum is one of gradients, not a mean
    }
  }
  const Table<BnInput>& layers = model_.tables.layers;
  for (size_t l = 0; l < layers.size(); ++l)
    for (int64_t k = 0; k < layers[l].channels; ++k) {
      Moments merged = {};
      for (size_t q = 0; q < ranks; ++q) {
        const double* const m = &all[q * own.size() + at];
        merged = merge(merged, {m[0], m[1], m[2]});
      }
      layers[l].state[k].window = merged;
      at += 3;
    }
}

// The statistics that this rank's window has of each channel, to `out`; also where ga_bn_finalize has
// normalised by those of all ranks (see finalize() of ops/batchnorm.hpp).
void HostExchange::merge_statistics(std::vector<double>& out) {
  const Table<BnInput>& layers = model_.tables.layers;
  for (size_t l = 0; l < layers.size(); ++l)
    for (int64_t k = 0; k < layers[l].channels; ++k) {
      BnChannel& c = layers[l].state[k];
      merge_up_to(c, {layers[l].history, layers[l].channels, k}, micro_batches_);
      c.taken = c.merged;  // so that commit() merges nothing more
      for (const double x : {c.window.count, c.window.mean, c.window.m2}) out.push_back(x);
    }
}

// ---- In the background ----------------------------------------------------------------------------

// Has the buckets run whose parameters are ready, in their order, which is the same on every rank.
void HostExchange::run_ready() {
  if (!background_) return;
  if (!begun_) begin_buckets();
  const size_t before = released_;
  const std::vector<Bucket>& list = transfer_.buckets().list();
  for (; released_ < list.size() && is_ready(list[released_]); ++released_)
    if (model_.speculation->active()) await(1 + released_);
  if (released_ > before) background_->release(1 + released_);
}

// Has the parameters updated that are summed when this item has run.
void HostExchange::await(size_t item) {
  const Bucket& bucket = transfer_.buckets().list()[item - 1];
  for (size_t k = bucket.first; k < bucket.end; ++k) {
    const ga_param id = transfer_.buckets().segments()[k].param;
    size_t& last = last_items_[static_cast<size_t>(id)];
    if (last != item) continue;
    last = 0;  // it may have further segments in the bucket
    model_.speculation->await(id, transfer_.reduced(id));
  }
  begun_by_[item] = model_.speculation->begun();
}

// Makes the buckets of a window, of which nobody knows yet what other ranks bring: they are of all
// parameters but those of which a gradient may be rows.
void HostExchange::begin_buckets() {
  stages_.preparation.prepare();
  begun_with_ = tensors_digest();
  touched_.assign(model_.params.size(), 0);
  for (size_t i = 0; i < touched_.size(); ++i)
    touched_[i] = !model_.params[i].frozen && !model_.params.takes_rows(i);
  transfer_.make_buckets([&](ga_param id) { return touched_[static_cast<size_t>(id)] != 0; });
  transfer_.clear_param_sums(touched_.size());
  if (own_backend_) transfer_.reserve_for(*own_backend_);
  begun_weight_ = model_.window.weight();
  if (model_.speculation->active()) {
    last_items_.assign(touched_.size(), 0);
    begun_by_.assign(1 + transfer_.buckets().list().size(), 0);
    for (size_t item = 1; item < begun_by_.size(); ++item) {
      const Bucket& bucket = transfer_.buckets().list()[item - 1];
      for (size_t k = bucket.first; k < bucket.end; ++k)
        last_items_[static_cast<size_t>(transfer_.buckets().segments()[k].param)] = item;
    }
    model_.speculation->open();
  }
  moved_ = false;
  begun_ = true;
  released_ = 0;
}

// On one thread or the other, each with a backend of its own.
void HostExchange::run_item(size_t item, Backend& adder) {
  transfer_.set_adder(adder);
  if (item == 0)
    agree_on_tensors();
  else
    run(item - 1);
  if (model_.speculation->active() && begun_by_[item] > 0)
    model_.speculation->arrived(begun_by_[item]);
}

// Runs what has not run in the background.
void HostExchange::finish_buckets() {
  if (!begun_) begin_buckets();
  begun_ = false;
  size_t item = background_ ? background_->stop() : 0;
  for (; item < 1 + transfer_.buckets().list().size(); ++item) run_item(item, *model_.backend);
  transfer_.set_adder(*model_.backend);
}

// Before anything moves: all ranks cut the same parameters into buckets.
void HostExchange::agree_on_tensors() {
  Header h = {};
  h.call = kBegin;
  h.number = calls_;
  h.name = digest_of("ga_step");
  h.settings = begun_with_;
  h.sums.weight = begun_weight_;
  gather_headers(h, {});
  check_calls("ga_step");
  for (int32_t q = 1; q < comm_->ranks(); ++q)
    if (header_of(q).settings != header_of(0).settings) explain("the settings", tensor_items());
  if (!model_.speculation->active()) return;
  WindowSums sums = {};
  for (int32_t q = 0; q < comm_->ranks(); ++q) add(sums, header_of(q).sums);
  model_.speculation->agreed(sums.weight);
}

// ---- Gradients of some rows -----------------------------------------------------------------------

// Every rank adds the rows of all ranks to an empty set, in the order of the ranks, and so has the same
// sums; a parameter of which some rank has a gradient of all rows is made dense on every rank.
void HostExchange::gather_rows() {
  const auto ranks = static_cast<size_t>(comm_->ranks());
  const uint64_t* counts = row_counts_.data();
  for (size_t i = 0; i < touched_.size(); ++i) {
    if (!model_.params.takes_rows(i)) continue;
    const uint64_t* const of_ranks = counts;
    counts += ranks;
    if (!touched_[i] || model_.params[i].frozen) continue;
    const auto id = static_cast<ga_param>(i);
    if (std::find(of_ranks, of_ranks + ranks, kDense) != of_ranks + ranks)
      stages_.accumulator.make_dense(id);
    else
      gather_rows_of(id, of_ranks);
  }
}

void HostExchange::gather_rows_of(ga_param id, const uint64_t* counts) {
  Backend& backend = *model_.backend;
  Param& p = model_.params[id];
  const Tensor& t = model_.params.tensor(id);
  p.hold(Held::kRows);
  (*model_.tables.param_states.at(static_cast<size_t>(id))).contributed = 1;  // by some rank
  const auto ranks = static_cast<size_t>(comm_->ranks());
  const auto most = static_cast<size_t>(*std::max_element(counts, counts + ranks));
  if (p.count == 0 || most == 0) return;
  const auto columns = static_cast<size_t>(p.count / t.rows);
  const auto size = static_cast<size_t>(dtype_info(p.accumulator_dtype).size);
  const size_t row_bytes = columns * size;

  std::vector<int64_t> indices(most, 0), all(ranks * most);
  std::vector<char> values(most * row_bytes);
  for (int64_t k = 0; k < t.set->size; ++k) {
    const int64_t row = t.set->entries[k].row;
    indices[static_cast<size_t>(k)] = row;
    std::memcpy(&values[static_cast<size_t>(k) * row_bytes],
                static_cast<char*>(p.accumulator) + static_cast<size_t>(row) * row_bytes,
                row_bytes);
  }
  comm_->all_gather("rows of gradients", indices.data(), all.data(), static_cast<int64_t>(most),
                    GA_I64);
  backend.clear_rows({&model_.params.tensor(id).set, 1});
  RowsTask task = {};
  task.target = {p.accumulator, p.accumulator_dtype};
  task.rows = t.rows;
  task.columns = static_cast<int64_t>(columns);
  task.set = t.set;
  task.index_dtype = GA_I64;
  for (size_t q = 0; q < ranks; ++q) task.count += static_cast<int64_t>(counts[q]);
  backend.prepare_rows(task, 0);
  stages_.accumulator.hold_rows(task.count);

  const size_t bucket = std::max<size_t>(1, static_cast<size_t>(kRowBytes) / (ranks * row_bytes));
  std::vector<char> gathered(ranks * std::min(bucket, most) * row_bytes);
  for (size_t at = 0; at < most; at += bucket) {
    const size_t rows = std::min(bucket, most - at);
    comm_->all_gather("rows of gradients", &values[at * row_bytes], gathered.data(),
                      static_cast<int64_t>(rows * columns), p.accumulator_dtype);
    for (size_t q = 0; q < ranks; ++q) {
      if (counts[q] <= at) continue;
      task.count = static_cast<int64_t>(std::min<uint64_t>(counts[q] - at, rows));
      task.indices = &all[q * most + at];
      task.values = {&gathered[q * rows * row_bytes], p.accumulator_dtype, 1, nullptr};
      backend.accumulate_rows(task);
    }
  }
}

}  // namespace ga
