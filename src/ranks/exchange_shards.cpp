// SPDX-License-Identifier: Apache-2.0
// Who has what of the parameters, and what the ranks tell each other where each keeps state of its part
// alone: norms over layers, updated parameters, arrays of state.
#include <algorithm>
#include <cstring>

#include "core/error.hpp"
#include "core/tensor.hpp"
#include "ranks/exchange.hpp"

namespace ga {
namespace {

constexpr int64_t kDividedBytes = int64_t{256} << 10;  // smaller parameters are whole on one rank

}  // namespace

// ---- Division -----------------------------------------------------------------------------------

// The elements of a rank's piece of a large parameter: a multiple of `grain`.
int64_t Exchange::piece_of(size_t i, int64_t grain) const {
  const int64_t count = model_.params[i].count, ranks = comm_->ranks();
  const int64_t grains = (count + grain - 1) / grain;
  return (grains + ranks - 1) / ranks * grain;
}

void Exchange::divide() {
  if (parts_.divisions.size() == model_.params.size()) return;
  Parts next = divided(parts_);
  auto& partials = parts_.layer_partials;  // to which tasks point
  std::swap_ranges(partials.begin(), partials.end(), next.layer_partials.begin());
  take_parts(std::move(next));
}

// Divides the parameters beyond these parts: large ones among all ranks, small ones as a whole, to whoever has
// least so far. Where the optimizer is sharded, the sums of a large one whose state is whole on a rank are
// wanted there alone, and added there too, unless it is so large that the others would wait. The same on every
// rank, since all have added the same parameters: how one that is new is divided follows from those before it,
// also if they are removed by now, for one rank may divide one by one what another divides at a time.
Exchange::Parts Exchange::divided(Parts parts) const {
  const ParamList& params = model_.params;
  const size_t known = parts.divisions.size();
  const auto ranks = static_cast<size_t>(comm_->ranks());
  std::vector<int64_t> small(ranks), kept(ranks);  // elements of each rank
  int64_t owned = 0;  // elements of parameters whose state is whole on a rank
  const auto load_of = [&](const Division& d) -> std::vector<int64_t>& {
    return d.piece == 0 ? small : kept;
  };
  const auto add_load = [&](size_t i) {
    const Division& d = parts.divisions[i];
    if (d.piece == 0 || parts.keepers[i] == Keeper::kOwner)
      load_of(d)[static_cast<size_t>(d.owner)] += parts.counts[i];
  };
  for (size_t i = 0; i < known; ++i) {
    add_load(i);
    if (parts.keepers[i] == Keeper::kOwner) owned += parts.counts[i];
  }
  std::vector<size_t> fresh;
  for (size_t i = known; i < params.size(); ++i) {
    fresh.push_back(i);
    if (known == 0 && params.keeper(i) == Keeper::kOwner) owned += params[i].count;
  }
  if (known == 0)
    std::stable_sort(fresh.begin(), fresh.end(),
                     [&](size_t a, size_t b) { return params[a].count > params[b].count; });
  parts.divisions.resize(params.size());
  parts.counts.resize(params.size());
  parts.keepers.resize(params.size());
  parts.layer_partials.resize(params.size());
  for (const size_t i : fresh) {
    const Param& p = params[i];
    Division& d = parts.divisions[i];
    parts.counts[i] = p.count;
    const Keeper keeper = parts.keepers[i] = params.keeper(i);
    if (known > 0 && keeper == Keeper::kOwner) owned += p.count;
    const bool large = p.count * dtype_info(p.real()).size >= kDividedBytes;
    if (large) {
      constexpr int64_t kLine = 16;
      const bool by_owner = keeper == Keeper::kOwner && p.count <= owned / (2 * comm_->ranks());
      const int64_t grain = params.grain(i);
      const int64_t added = piece_of(i, has_rows(i) ? grain : kLine);
      d.measured_piece = by_owner ? 0 : piece_of(i, grain);
      d.measured_separately = d.measured_piece != added;
      d.piece = shards() ? d.measured_piece : added;
    }
    const std::vector<int64_t>& load = load_of(d);
    d.owner = static_cast<int32_t>(std::min_element(load.begin(), load.end()) - load.begin());
    add_load(i);
    if (!shards() && d.measured_piece > 0 && params.is_layered(p)) {
      const int64_t chunks = chunk_count(d.measured_piece) * comm_->ranks();
      parts.layer_partials[i].resize(static_cast<size_t>(chunks));
    }
  }
  return parts;
}

void Exchange::take_parts(Parts parts) noexcept {
  tensors_known_ = false;
  parts_ = std::move(parts);
  for (size_t i = 0; i < model_.params.size(); ++i) {
    Param& p = model_.params[i];
    p.shard = {0, p.count};
    if (!shards() || i >= parts_.divisions.size()) continue;
    const Division& d = parts_.divisions[i];
    if (parts_.keepers[i] == Keeper::kPieces) p.shard = d.range(rank(), p.count);
    if (parts_.keepers[i] == Keeper::kOwner && d.owner != rank()) p.shard = {0, 0};
  }
}

// Norms over a layer are added up over the ranks' pieces, sharded or not, so that they have the same bits.
void Exchange::describe_measure(ga_param id, UpdateTask& measure) {
  const auto i = static_cast<size_t>(id);
  if (on_device() || parts_.keepers[i] != Keeper::kPieces ||
      parts_.divisions[i].measured_piece == 0)
    return;
  measure.cut = parts_.divisions[i].measured_piece;
  if (shards()) return;
  measure.partials = parts_.layer_partials[i].data();
  measure.padded_state = false;  // where one piece ends, another begins
}

void Exchange::describe_units(ga_param id, const UnitPattern& pattern, UnitTask& units) const {
  const auto i = static_cast<size_t>(id);
  const int64_t piece = parts_.divisions[i].measured_piece;
  if (shards() || parts_.keepers[i] != Keeper::kPieces || piece % pattern.slab() != 0) return;
  units.cut = piece / pattern.slab() * pattern.unit_stride[0];
}

void Exchange::add_layer_norms() {
  const auto ranks = static_cast<size_t>(comm_->ranks());
  std::vector<ParamState*> layers;
  std::vector<double> own;
  for (size_t i = 0; i < parts_.divisions.size(); ++i) {
    if (parts_.divisions[i].piece == 0 || !model_.params.is_layered_over_ranks(i)) continue;
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

std::optional<Exchange::Parts> Exchange::check_division() {
  const bool arrays = model_.tables.params() > 0;
  if (arrays && shards()) {
    check_keepers(model_.params.rules());
    return {};
  }
  if (arrays && (model_.progress.windows() > 0 || !model_.window.empty())) return {};
  Parts next = arrays ? divided({}) : Parts();
  std::optional<Parts> before = std::move(parts_);
  take_parts(std::move(next));
  return before;
}

// Allocates first, so that it cannot fail when it has divided.
std::function<void()> Exchange::divide_anew() {
  const auto kept = std::make_shared<Parts>();
  std::function<void()> divide_back = [this, kept] { take_parts(std::move(*kept)); };
  std::optional<Parts> before = check_division();
  if (!before) return [] {};
  *kept = std::move(*before);
  return divide_back;
}

void Exchange::check_keepers(const Rules& by) const {
  if (!shards()) return;
  const auto place = [](Keeper keeper) {
    return keeper == Keeper::kAll     ? "whole on every rank"
           : keeper == Keeper::kOwner ? "whole on one rank"
                                      : "in parts on the ranks";
  };
  const ParamList& params = model_.params;
  for (size_t i = 0; i < parts_.divisions.size(); ++i) {
    if (params.tensor(i).removed) continue;
    const Keeper next = params.keeper(i, by);
    const int64_t piece = parts_.divisions[i].piece;
    const bool recut = next == Keeper::kPieces && next == parts_.keepers[i] && piece > 0 &&
                       piece != piece_of(i, params.grain(i, by));
    if (next != parts_.keepers[i] || recut)
      params.subject(i).fail(
          GA_ERROR_UNSUPPORTED,
          "its state lies %s, but with this clipping by units (GA_CLIP_AGC), or without it, it "
          "would lie %s; that can be changed only before the library makes its arrays",
          place(parts_.keepers[i]), recut ? "in other parts" : place(next));
  }
}

// ---- Updated parameters ----------------------------------------------------------------------------

void Exchange::gather_parameters(const std::function<Changed(ga_param)>& changed,
                                 const Ready& ready) {
  if (!shards()) return;
  model_.health.or_end([&] {
    if (ready) ready();
    gather_changed(changed);
  });
}

// In the dtype of each parameter.
void Exchange::gather_changed(const std::function<Changed(ga_param)>& changed) {
  buckets_.clear();
  const auto is_in_buckets = [&](ga_param id) {
    return parts_.divisions[static_cast<size_t>(id)].piece == 0 ||
           model_.params.keeper(id) == Keeper::kPieces;
  };
  for (const int32_t dtype : kFloats)
    buckets_.add(parts_.divisions, parts_.counts, dtype, true, Reduction::kSum, [&](ga_param id) {
      const Param& p = model_.params[id];
      if (p.dtype != dtype || p.count == 0 || model_.params.keeper(id) == Keeper::kAll ||
          !is_in_buckets(id) || changed(id) != Changed::kElements)
        return Travel::kNot;
      return Travel::kInPlace;
    });
  reserve(false);
  for (size_t k = 0; k < buckets_.list().size();) k = gather(k);
  std::vector<ga_param> whole;
  for (size_t i = 0; i < parts_.divisions.size(); ++i) {
    const auto id = static_cast<ga_param>(i);
    if (model_.params[id].count == 0 || model_.params.keeper(id) == Keeper::kAll) continue;
    const Changed what = changed(id);
    if (what == Changed::kRows)
      hand_out_rows(id);
    else if (what == Changed::kElements && !is_in_buckets(id))
      whole.push_back(id);
  }
  for (size_t k = 0; k < whole.size();)
    comm_->together("updated parameters", [&] {
      for (const size_t end = std::min(whole.size(), k + Comm::kMostTogether); k < end; ++k) {
        const Param& p = model_.params[whole[k]];
        comm_->broadcast_array("updated parameters", p.data, p.count, p.dtype, maker(whole[k]));
      }
    });
}

// By way of a buffer: a transport that fails may write to it later, and the parameters are the program's.
size_t Exchange::gather(size_t first) {
  const auto data = [&](const Segment& s, int64_t element) {
    const Param& p = model_.params[s.param];
    return offset({p.data, p.dtype}, element);
  };
  each_of_group(first, [&](const Bucket& bucket) {
    if (!bucket.packed) return;
    const Array own = in_room(bucket.at.sent, bucket.dtype);
    moves_.clear();
    each_own(bucket, [&](const Segment& s) {
      moves_.push_back(move(data(s, s.first), offset(own, s.at - rank() * bucket.block), s.count));
    });
    run_moves();
  });
  comm_->together("updated parameters", [&] {
    each_of_group(first, [&](const Bucket& bucket) {
      const Segment& only = buckets_.segments()[bucket.first];
      const Array own = bucket.packed ? in_room(bucket.at.sent, bucket.dtype)
                                      : data(only, rank() * bucket.stride + only.first);
      comm_->all_gather_arrays("updated parameters", own.data,
                               in_room(bucket.at.received, bucket.dtype).data, bucket.block,
                               bucket.block, bucket.dtype);
    });
  });
  return each_of_group(first, [&](const Bucket& bucket) {
    const Segment& only = buckets_.segments()[bucket.first];
    const Array all = in_room(bucket.at.received, bucket.dtype);
    moves_.clear();
    for (size_t k = bucket.first; bucket.packed && k < bucket.end; ++k) {
      const Segment& s = buckets_.segments()[k];
      if (s.rank != rank()) moves_.push_back(move(offset(all, s.at), data(s, s.first), s.count));
    }
    for (int32_t q = 0; !bucket.packed && q < comm_->ranks(); ++q)
      if (q != rank())
        moves_.push_back(move(offset(all, q * bucket.block),
                              data(only, q * bucket.stride + only.first), bucket.block));
    run_moves();
  });
}

// The rows that each rank has updated of its part: every rank knows which.
void Exchange::hand_out_rows(ga_param id) {
  const Param& p = model_.params[id];
  const Tensor& t = model_.params.tensor(id);
  const Division& d = parts_.divisions[static_cast<size_t>(id)];
  const bool pieces = d.piece > 0 && model_.params.keeper(id) == Keeper::kPieces;
  const int64_t columns = p.count / t.rows;
  const auto row_bytes = static_cast<size_t>(columns * dtype_info(p.dtype).size);
  std::vector<std::vector<char*>> rows(static_cast<size_t>(comm_->ranks()));
  for (int64_t k = 0; k < t.set->size; ++k) {
    const int64_t row = t.set->entries[k].row;
    const int64_t owner = pieces ? row * columns / d.piece : d.owner;
    rows[static_cast<size_t>(owner)].push_back(static_cast<char*>(p.data) +
                                               static_cast<size_t>(row) * row_bytes);
  }
  size_t longest = 0;
  for (const auto& list : rows) longest = std::max(longest, list.size());
  const size_t most = std::max<size_t>(1, static_cast<size_t>(kRowBytes) / rows.size() / row_bytes);
  std::vector<char> send(std::min(most, longest) * row_bytes), all(send.size() * rows.size());
  for (size_t first = 0; first < longest; first += most) {
    const size_t block = std::min(most, longest - first) * row_bytes;
    // f(row, at) for the rows of a rank in this bucket, which begin at `from`.
    const auto each = [&](size_t q, char* from, auto&& f) {
      for (size_t k = first; k < std::min(first + most, rows[q].size()); ++k, from += row_bytes)
        f(rows[q][k], from);
    };
    const auto own = static_cast<size_t>(rank());
    each(own, send.data(), [&](char* row, char* at) { std::memcpy(at, row, row_bytes); });
    comm_->all_gather("updated rows", send.data(), all.data(),
                      static_cast<int64_t>(block) / dtype_info(p.dtype).size, p.dtype);
    for (size_t q = 0; q < rows.size(); ++q)
      if (q != own)
        each(q, all.data() + q * block,
             [&](char* row, char* at) { std::memcpy(row, at, row_bytes); });
  }
}

void Exchange::hand_round(float* data, int64_t count, ga_param id) {
  if (shards()) return;
  model_.health.or_end([&] {
    comm_->broadcast_array("an update of Newton-Schulz iterations", data, count, GA_F32, maker(id));
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
  const Division& d = parts_.divisions[static_cast<size_t>(id)];
  if (model_.params.keeper(id) == Keeper::kOwner) return from(d.owner, array.count);
  const Param& p = model_.params[id];
  for (int32_t q = 0; q < comm_->ranks(); ++q)
    from(q, ParamArrays::part_of(array.each, d.range(q, p.count)).count);
}

}  // namespace ga
