// SPDX-License-Identifier: Apache-2.0
#include "ranks/divisions.hpp"

#include <algorithm>
#include <memory>

#include "core/error.hpp"
#include "core/tensor.hpp"
#include "model/model.hpp"
#include "ranks/comm/comm.hpp"

namespace ga {
namespace {

constexpr int64_t kDividedBytes = int64_t{256} << 10;  // smaller parameters are whole on one rank

}  // namespace

Divisions::Divisions(Model& model, const Comm& comm, bool sharded)
    : model_(model), comm_(comm), sharded_(sharded) {
  model_.params.sharded = sharded;
  model_.params.whole_layers = model.config.device != GA_DEVICE_CPU;
}

// Whether the sum of a gradient stays where it is added, since nobody else updates the parameter.
bool Divisions::stays(ga_param id) const {
  const auto i = static_cast<size_t>(id);
  return sharded_ && (parts_.keepers[i] == Keeper::kPieces ||
                      (parts_.keepers[i] == Keeper::kOwner && parts_.divisions[i].piece == 0));
}

// What this rank has of the sum of a gradient in the end.
Range Divisions::reduced_range(ga_param id) const {
  const Param& p = model_.params[id];
  return stays(id) ? p.shard : Range{0, p.count};
}

Range Divisions::measured(ga_param id) const {
  return parts_.divisions[static_cast<size_t>(id)].measured(comm_.rank(), model_.params[id].count);
}

// The elements of a rank's piece of a large parameter: a multiple of `grain`.
int64_t Divisions::piece_of(size_t i, int64_t grain) const {
  const int64_t count = model_.params[i].count, ranks = comm_.ranks();
  const int64_t grains = (count + grain - 1) / grain;
  return (grains + ranks - 1) / ranks * grain;
}

void Divisions::divide() {
  if (parts_.divisions.size() == model_.params.size()) return;
  Parts next = divided(parts_);
  auto& partials = parts_.layer_partials;  // to which tasks point
  std::swap_ranges(partials.begin(), partials.end(), next.layer_partials.begin());
  take(std::move(next));
}

// Divides the parameters beyond these parts: large ones among all ranks, small ones as a whole, to whoever has
// least so far. Where the optimizer is sharded, the sums of a large one whose state is whole on a rank are
// wanted there alone, and added there too, unless it is so large that the others would wait. The same on every
// rank, since all have added the same parameters: how one that is new is divided follows from those before it,
// also if they are removed by now, for one rank may divide one by one what another divides at a time.
Divisions::Parts Divisions::divided(Parts parts) const {
  const ParamList& params = model_.params;
  const size_t known = parts.divisions.size();
  const auto ranks = static_cast<size_t>(comm_.ranks());
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
      const bool by_owner = keeper == Keeper::kOwner && p.count <= owned / (2 * comm_.ranks());
      const int64_t grain = params.grain(i);
      const int64_t added = piece_of(i, params.takes_rows(i) ? grain : kLine);
      d.measured_piece = by_owner ? 0 : piece_of(i, grain);
      d.measured_separately = d.measured_piece != added;
      d.piece = sharded_ ? d.measured_piece : added;
    }
    const std::vector<int64_t>& load = load_of(d);
    d.owner = static_cast<int32_t>(std::min_element(load.begin(), load.end()) - load.begin());
    add_load(i);
    if (!sharded_ && d.measured_piece > 0 && params.is_layered(p)) {
      const int64_t chunks = chunk_count(d.measured_piece) * comm_.ranks();
      parts.layer_partials[i].resize(static_cast<size_t>(chunks));
    }
  }
  return parts;
}

void Divisions::take(Parts parts) noexcept {
  ++changes_;
  parts_ = std::move(parts);
  for (size_t i = 0; i < model_.params.size(); ++i) {
    Param& p = model_.params[i];
    p.shard = {0, p.count};
    if (!sharded_ || i >= parts_.divisions.size()) continue;
    const Division& d = parts_.divisions[i];
    if (parts_.keepers[i] == Keeper::kPieces) p.shard = d.range(comm_.rank(), p.count);
    if (parts_.keepers[i] == Keeper::kOwner && d.owner != comm_.rank()) p.shard = {0, 0};
  }
}

// Norms over a layer are added up over the ranks' pieces, sharded or not, so that they have the same bits.
void Divisions::describe_measure(ga_param id, UpdateTask& measure) {
  const auto i = static_cast<size_t>(id);
  if (model_.config.device != GA_DEVICE_CPU || parts_.keepers[i] != Keeper::kPieces ||
      parts_.divisions[i].measured_piece == 0)
    return;
  measure.cut = parts_.divisions[i].measured_piece;
  if (sharded_) return;
  measure.partials = parts_.layer_partials[i].data();
  measure.padded_state = false;  // where one piece ends, another begins
}

void Divisions::describe_units(ga_param id, const UnitPattern& pattern, UnitTask& units) const {
  const auto i = static_cast<size_t>(id);
  const int64_t piece = parts_.divisions[i].measured_piece;
  if (sharded_ || parts_.keepers[i] != Keeper::kPieces || piece % pattern.slab() != 0) return;
  units.cut = piece / pattern.slab() * pattern.unit_stride[0];
}

std::optional<Divisions::Parts> Divisions::check_division() {
  const bool arrays = model_.tables.params() > 0;
  if (arrays && sharded_) {
    check_keepers(model_.params.rules());
    return {};
  }
  if (arrays && (model_.progress.windows() > 0 || !model_.window.empty())) return {};
  Parts next = arrays ? divided({}) : Parts();
  std::optional<Parts> before = std::move(parts_);
  take(std::move(next));
  return before;
}

// Allocates first, so that it cannot fail when it has divided.
std::function<void()> Divisions::divide_anew() {
  const auto kept = std::make_shared<Parts>();
  std::function<void()> divide_back = [this, kept] { take(std::move(*kept)); };
  std::optional<Parts> before = check_division();
  if (!before) return [] {};
  *kept = std::move(*before);
  return divide_back;
}

void Divisions::check_keepers(const Rules& by) const {
  if (!sharded_) return;
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

}  // namespace ga
