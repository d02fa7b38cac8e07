// SPDX-License-Identifier: Apache-2.0
// Updates and state, of which a rank may have a part alone: what ranks tell each other of norms, updated parameters and
// arrays, and the calls about state that all of them make.
#include <algorithm>
#include <cstring>

#include "core/error.hpp"
#include "core/tensor.hpp"
#include "model/preparation.hpp"
#include "ranks/bits.hpp"
#include "ranks/comm/comm.hpp"
#include "ranks/exchange.hpp"

namespace ga {

// A parameter has arrays on all ranks or on none, for state that is there is compared, saved and averaged. A rank
// may have made them alone, in ga_prepare or for a window that was discarded, before the parameter was frozen.
void Exchange::share_arrays(const char* what) {
  bool same = true;
  for (int32_t q = 1; q < comm_->ranks(); ++q)
    same = same && header_of(q).arrays == header_of(0).arrays;
  if (same) return;
  const size_t n = model_.params.size(), words = words_for_bits(n);
  std::vector<uint64_t> own(words), all(static_cast<size_t>(comm_->ranks()) * words);
  for (size_t i = 0; i < n; ++i)
    if (model_.params[i].owns) set_bit(own.data(), i);
  comm_->all_gather("which parameters have arrays", own.data(), all.data(),
                    static_cast<int64_t>(words), GA_I64);
  for (size_t k = 0; k < all.size(); ++k) own[k % words] |= all[k];
  for (size_t i = 0; i < n; ++i) {
    Param& p = model_.params[i];
    p.wanted = p.wanted || bit(own.data(), i);
    model_.arrays.look_for(p);
  }
  agree_on(what, [&] { stages_.preparation.make_own(); });
}

void Exchange::on_all_ranks(const char* what, bool by_one,
                            const std::function<void(const Ready&)>& work) {
  begin_call(what);
  by_one = by_one && !shards() && !has_open_window();
  all_or_none(what, !by_one || rank() == 0, by_one, work);
}

void Exchange::begin_sharded_call(const char* what) {
  if (!shards()) return;
  begin_call(what);
  check_empty(what);
}

void Exchange::add_layer_norms() {
  const auto ranks = static_cast<size_t>(comm_->ranks());
  std::vector<ParamState*> layers;
  std::vector<double> own;
  for (size_t i = 0; i < divisions_.list().size(); ++i) {
    if (divisions_.of(i).piece == 0 || !model_.params.is_layered_over_ranks(i)) continue;
    if ((model_.tables.plans.at(i)->actions & kUpdate) == 0) continue;
    layers.push_back(model_.tables.param_states.at(i));
    for (const double squares : layers.back()->norm_squares) own.push_back(squares);
  }
  if (own.empty()) return;
  std::vector<double> all(ranks * own.size());
  model_.health.or_end([&] {
    comm_->all_gather("norms over layers", own.data(), all.data(), static_cast<int64_t>(own.size()),
                      GA_F64);
  });
  for (size_t k = 0; k < own.size(); ++k) {
    double sum = 0;
    for (size_t q = 0; q < ranks; ++q) sum += all[q * own.size() + k];
    layers[k / 2]->norm_squares[k % 2] = sum;
  }
}

void Exchange::share_unit_totals() {
  struct Totals {
    double squares, smallest;
  };
  std::vector<size_t> clipped;
  for (size_t i = 0; i < model_.tables.params(); ++i)
    if (model_.params.is_clipped_in_parts(i) && model_.tables.param_states.at(i)->touched)
      clipped.push_back(i);
  std::vector<Totals> own(clipped.size()), all(static_cast<size_t>(comm_->ranks()) * own.size());
  for (size_t k = 0; k < own.size(); ++k) {
    const ParamState& s = *model_.tables.param_states.at(clipped[k]);
    const bool clips = model_.params.by_units(clipped[k]);  // some unit of it
    own[k] = clips ? Totals{s.sum_squares, s.smallest} : Totals{0, 1};
  }
  if (own.empty()) return;
  model_.health.or_end([&] {
    comm_->all_gather("norms of what is clipped by units", own.data(), all.data(),
                      static_cast<int64_t>(2 * own.size()), GA_F64);
  });
  for (size_t k = 0; k < own.size(); ++k) {
    Totals total = {0, 1};
    for (size_t at = k; at < all.size(); at += own.size()) {
      total.squares += all[at].squares;
      total.smallest = std::min(total.smallest, all[at].smallest);
    }
    ParamState& s = *model_.tables.param_states.at(clipped[k]);
    s.sum_squares = total.squares;
    s.smallest = total.smallest;
  }
}

void Exchange::gather_parameters(const std::function<Changed(ga_param)>& changed,
                                 const Ready& ready) {
  if (!shards()) return;
  model_.health.or_end([&] {
    if (ready) ready();
    transfer_.gather_parameters(changed);
  });
}

void Exchange::hand_round(float* data, int64_t count, ga_param id) {
  if (shards()) return;
  model_.health.or_end([&] {
    comm_->broadcast_array("an update of Newton-Schulz iterations", data, count, GA_F32,
                           divisions_.owner(id));
  });
}

// Hands every rank the whole of an array of state, piece by piece in the order of its elements: take(piece,
// bytes).
void Exchange::each_piece(ga_param id, const DividedArray& array, const TakePiece& take) {
  constexpr int64_t kPiece = int64_t{1} << 20;  // bytes
  constexpr int64_t kWord = 4;                  // what transports send of codes
  const Array& own = array.own;
  const int64_t size = int64_t{dtype_info(own.format).size};
  std::vector<char> piece(static_cast<size_t>(kPiece));
  const auto from = [&](int32_t q, int64_t elements) {
    for (int64_t at = 0; at < elements; at += kPiece / size) {
      const int64_t n = std::min(kPiece / size, elements - at);
      const auto bytes = static_cast<size_t>(n * size);
      if (q == rank()) model_.backend->read(piece.data(), offset(own, at).data, bytes);
      if (size == 1)
        comm_->broadcast("state", piece.data(), (n + kWord - 1) / kWord, GA_I32, q);
      else
        comm_->broadcast("state", piece.data(), n, own.format, q);
      take(piece.data(), bytes);
    }
  };
  const Division& d = divisions_.of(id);
  if (model_.params.keeper(id) == Keeper::kOwner) return from(d.owner, array.count);
  const Param& p = model_.params[id];
  for (int32_t q = 0; q < comm_->ranks(); ++q)
    from(q, ParamArrays::part_of(array.each, d.range(q, p.count)).count);
}

void Exchange::hand_round_bytes(int32_t q, int64_t bytes, std::vector<int64_t>& piece,
                                const std::function<void(const TakePiece&)>& read,
                                const TakePiece& take) {
  const size_t most = piece.size() * sizeof(int64_t);
  const auto hand_round = [&](size_t size) {
    comm_->broadcast("windows", piece.data(), static_cast<int64_t>((size + 7) / 8), GA_I64, q);
    take(piece.data(), size);
  };
  if (q != rank()) {
    for (auto left = static_cast<size_t>(bytes); left > 0;) {
      const size_t size = std::min(left, most);
      hand_round(size);
      left -= size;
    }
    return;
  }
  size_t filled = 0;
  read([&](const void* data, size_t size) {
    for (const char* from = static_cast<const char*>(data); size > 0;) {
      const size_t n = std::min(size, most - filled);
      std::memcpy(reinterpret_cast<char*>(piece.data()) + filled, from, n);
      from += n;
      size -= n;
      filled += n;
      if (filled < most) continue;
      hand_round(filled);
      filled = 0;
    }
  });
  if (filled > 0) hand_round(filled);
}

// Throws, on every rank, the first difference of parameters and state.
void Exchange::check_state() {
  const Items own = state_.items();
  const uint64_t digest = digest_of(own);
  std::vector<uint64_t> all(static_cast<size_t>(comm_->ranks()));
  comm_->all_gather("the checksum of parameters and state", &digest, all.data(), 1, GA_I64);
  if (std::any_of(all.begin(), all.end(), [&](uint64_t d) { return d != all[0]; }))
    explain("parameters and state", own);
}

// Rank 0's parameters and state, as a state file in memory, for all ranks.
void Exchange::hand_out() {
  const char* const what = "ga_context_set_comm";
  int64_t size = 0;
  std::vector<uint64_t> bytes;
  agree_on(what, [&] {
    if (rank() == 0) bytes = state_.write(what, size);
  });
  comm_->broadcast("the size of rank 0's state", &size, 1, GA_I64, 0);
  const size_t words = (static_cast<size_t>(size) + 7) / 8;
  agree_on(what, [&] { bytes.resize(words); });
  comm_->broadcast("rank 0's state", bytes.data(), static_cast<int64_t>(words), GA_I64, 0);
  agree_on(what, [&] {
    if (rank() != 0) state_.read(what, bytes, size);
  });
}

}  // namespace ga
