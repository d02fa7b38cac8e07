// SPDX-License-Identifier: Apache-2.0
// The end of a window: what the ranks bring, and the sums that follow.
#include <vector>

#include "ranks/bits.hpp"
#include "ranks/exchange.hpp"

namespace ga {

template <class Work>
void Exchange::or_lose_window(Work&& exchange) {
  try {
    exchange();
  } catch (...) {
    if (may_write_late()) model_.backend->keep_memory();
    if (moved_) model_.window.invalidate();
    model_.speculation->discard();
    throw;
  }
}

void Exchange::check_queued() {
  model_.health.or_end([this] {
    if (comm_->on_stream() && !has_failed()) comm_->watch(0);
  });
}

bool Exchange::begin_end(WindowTotals& totals, bool discards) {
  if (on_device()) check_queued();
  bool goes_on = false;
  or_lose_window([&] { goes_on = on_device() ? hold_all(discards) : begin_step(totals); });
  return goes_on;
}

void Exchange::add_gradients() {
  if (on_device()) return;
  or_lose_window([this] { sum_gradients(); });
  // Updates ahead go on while ranks exchange the rest, and read the control block.
  model_.speculation->join();
  model_.tables.control.at()->sums = sums_;
}

OverRanks Exchange::over_ranks() {
  if (on_device()) return {};
  return [this] { or_lose_window([this] { add_sums(); }); };
}

void Exchange::exchange_all(const WindowTotals& totals, Params& norms, Params units) {
  if (!on_device()) return;
  or_lose_window([&] { put_sums(totals, norms, units); });
  norms = {};
}

void Exchange::release_ready() {
  or_lose_window([this] { run_ready(); });
}

bool Exchange::begin_step(WindowTotals& totals) {
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
    if (!has_rows(i)) continue;  // else how many rows, or that all have a gradient
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
    if (!has_rows(i)) continue;
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

void Exchange::discard() {
  or_lose_window([this] {
    if (has_failed()) return;
    if (overlaps()) finish_buckets();
    moved_ = moved_ && overlaps();
    gather_headers(header(kDiscard, "ga_discard"), {});
    check_calls("ga_discard");
  });
}

// ---- The end of a window: sums -------------------------------------------------------------------

// The statistics that this rank's window has of each channel, to `out`; also where ga_bn_finalize has
// normalised by those of all ranks (see finalize() of ops/batchnorm.hpp).
void Exchange::merge_statistics(std::vector<double>& out) {
  const Table<BnInput>& layers = model_.tables.layers;
  for (size_t l = 0; l < layers.size(); ++l)
    for (int64_t k = 0; k < layers[l].channels; ++k) {
      BnChannel& c = layers[l].state[k];
      merge_up_to(c, {layers[l].history, layers[l].channels, k}, micro_batches_);
      c.taken = c.merged;  // so that commit() merges nothing more
      for (const double x : {c.window.count, c.window.mean, c.window.m2}) out.push_back(x);
    }
}

void Exchange::add_sums() {
  // Sent: for each touched parameter the sums of this rank, then statistics.
  std::vector<double> own;
  const bool noise = model_.config.noise_scale != 0;
  const auto in_pieces = [&](size_t i) {  // else every rank has measured it
    return touched_[i] && model_.params[i].held() != Held::kRows;
  };
  for (size_t i = 0; i < touched_.size(); ++i) {
    if (!in_pieces(i)) continue;
    const ParamSums& s = param_sums_[i];
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

}  // namespace ga
