// SPDX-License-Identifier: Apache-2.0
// What a step over ranks decides from, on a device (ranks/device_exchange.hpp). Templates of a ThreadGroup, as in
// decide.hpp, which decides.
//
// The host knows neither what other ranks bring nor, where micro-batches are checked, what its own does. So
// each rank writes that down, the ranks' records are gathered, and each adds them up in the order of the
// ranks: sum_rank() and add_ranks(). Then gradients are added, each rank measures its pieces of the sums,
// and these numbers are gathered and added up too: sum_pieces() and add_pieces().
#pragma once

#include "backend/decide.hpp"

namespace ga {

template <class ThreadGroup>
GA_DEVICE void sum_rank(ThreadGroup& threads, const ScalarTables& t, const WindowTotals& w,
                        const uint64_t* brought_bits, double* out) {
  threads.once([&] {
    RankRecord& record = *reinterpret_cast<RankRecord*>(out);
    record.sums = brought_by(*t.settings, *t.control, w);
    record.sums.discarded = w.discards;
    record.settings = t.settings->checksum;
  });
  double* const of_params = out + record_words(0, 0);
  threads.each_lane_group(t.params, [&](int64_t i, auto& warp) {
    const bool brought = !t.param_inputs[i].frozen &&
                         (t.settings->deferring ? t.param_states[i].contributed != 0
                                                : (brought_bits[i / 64] >> (i % 64) & 1) != 0);
    const Partial* const partials = t.param_inputs[i].partials;
    const int64_t n = brought && t.settings->noise ? chunk_count(t.param_inputs[i].count) : 0;
    const double noise = warp.sum(n, [&](int64_t k) { return partials[k].noise; });
    if (!warp.leader()) return;
    of_params[2 * i] = brought;
    of_params[2 * i + 1] = noise;
    // As FinishTask reads what a mean of this rank's micro-batches comes to as a sum.
    const bool mean = t.settings->deferring && t.settings->running_mean;
    t.plans[i].gradient = {mean ? t.param_states[i].held_weight : 1, HUGE_VAL, 1};
  });
  Moments* of_channels = reinterpret_cast<Moments*>(of_params + 2 * t.params);
  for (int64_t l = 0; l < t.bn_count; of_channels += t.bn[l++].channels) {
    const BnInput& layer = t.bn[l];
    threads.each_item(layer.channels, [&](int64_t k) {
      BnChannel& c = layer.state[k];
      merge_up_to(c, {layer.history, layer.channels, k}, w.micro_batches);
      of_channels[k] = c.window;
    });
  }
}

// records: those of all ranks, `words` from one to the next. Their sums go to Control::sums, ParamSums and
// BnChannel::window.
template <class ThreadGroup>
GA_DEVICE void add_ranks(ThreadGroup& threads, const ScalarTables& t, const double* records,
                         int64_t words, int32_t ranks) {
  threads.once([&] {
    WindowSums sums = {};
    bool differ = false;
    for (int32_t q = 0; q < ranks; ++q) {
      const RankRecord& record = *reinterpret_cast<const RankRecord*>(records + q * words);
      add(sums, record.sums);
      differ = differ || record.settings != reinterpret_cast<const RankRecord*>(records)->settings;
    }
    if (differ) ++sums.failed;
    t.control->sums = sums;
  });
  const double* const of_params = records + record_words(0, 0);
  threads.each_item(t.params, [&](int64_t i) {
    ParamSums& sums = t.param_states[i].sums;
    sums.gradients = sums.noise = 0;
    for (int32_t q = 0; q < ranks; ++q) {
      sums.gradients += of_params[q * words + 2 * i];
      sums.noise += of_params[q * words + 2 * i + 1];
    }
    t.plans[i].raw = raw_numbers(t, mean_of(*t.settings, t.control->sums.weight), i);
  });
  const double* of_channels = of_params + 2 * t.params;
  for (int64_t l = 0; l < t.bn_count; of_channels += 3 * t.bn[l++].channels) {
    const BnInput& layer = t.bn[l];
    threads.each_item(layer.channels, [&](int64_t k) {
      BnChannel& c = layer.state[k];
      Moments merged = {};
      for (int32_t q = 0; q < ranks; ++q)
        merged = merge(merged, *reinterpret_cast<const Moments*>(of_channels + q * words + 3 * k));
      c.window = merged;
      c.taken = c.merged;  // so that commit() merges nothing more
    });
  }
}

template <class ThreadGroup>
GA_DEVICE void sum_pieces(ThreadGroup& threads, const ScalarTables& t, const UnitTask* units,
                          double* out) {
  threads.each_lane_group(t.params, [&](int64_t i, auto& warp) {
    const bool held = some_rank_has_gradient(t, i);
    sum_partials(warp, t, i, held, [&](double squares, double clamped, double, bool nonfinite) {
      double* const of_param = out + kPieceWords * i;
      of_param[0] = squares;
      of_param[1] = clamped;
      of_param[2] = nonfinite;
      const bool clips = t.param_inputs[i].clipped_in_parts && t.param_inputs[i].by_units;
      of_param[3] = clips ? units[i].totals->squares : 0;
      of_param[4] = clips ? units[i].totals->smallest : 1;
    });
  });
}

// sums: those of all ranks, one behind the other.
template <class ThreadGroup>
GA_DEVICE void add_pieces(ThreadGroup& threads, const ScalarTables& t, const double* sums,
                          int32_t ranks) {
  threads.each_item(t.params, [&](int64_t i) {
    double total[kPieceWords - 1] = {};
    double smallest = 1;
    for (int32_t q = 0; q < ranks; ++q) {
      const double* const of_rank = sums + kPieceWords * (q * t.params + i);
      for (int64_t k = 0; k < kPieceWords - 1; ++k) total[k] += of_rank[k];
      if (of_rank[kPieceWords - 1] < smallest) smallest = of_rank[kPieceWords - 1];
    }
    ParamSums& s = t.param_states[i].sums;
    s.squares = total[0];
    s.clamped = total[1];
    s.nonfinite = total[2];
    s.unit_squares = total[3];
    s.unit_smallest = smallest;
    s.dense = 1;
  });
}

}  // namespace ga
