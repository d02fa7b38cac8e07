// SPDX-License-Identifier: Apache-2.0
#include "model/param.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>

#include "backend/codes.hpp"
#include "core/tensor.hpp"
#include "files/names.hpp"
#include "files/state_file.hpp"

namespace ga {
namespace {

// The last axis of a part that is not whole, and the elements of one index of it; -1: all are.
struct LastCut {
  LastCut(const std::vector<int64_t>& whole, const std::vector<int64_t>& shape) {
    for (axis = static_cast<int>(whole.size()) - 1; axis >= 0; --axis) {
      const auto a = static_cast<size_t>(axis);
      if (shape[a] != whole[a]) return;
      inner *= whole[a];
    }
  }
  int axis = -1;
  int64_t inner = 1;
};

// Makes room for more elements, by doubling: else each of many calls would move all elements.
template <class T>
void reserve_more(std::vector<T>& list, size_t more) {
  const size_t size = list.size() + more;
  if (size > list.capacity()) list.reserve(std::max(size, 2 * list.capacity()));
}

// The axes that a unit of adaptive clipping is reduced over, as a bit mask: see ga_agc_units.
uint32_t agc_axes(int32_t units, const std::vector<int64_t>& shape) {
  constexpr uint32_t kAll = ~0u;
  const auto rank = static_cast<int32_t>(shape.size());
  const auto ones = static_cast<int32_t>(std::count(shape.begin(), shape.end(), 1));
  const int32_t counted = units == GA_AGC_NFNETS ? rank - ones : rank;
  if (counted <= 1) return kAll;
  if (units == GA_AGC_TORCH) return kAll & ~1u;
  return rank <= 3 ? 1u : (1u << std::min(rank - 1, 31)) - 1;
}

}  // namespace

bool Part::has_whole(int64_t block, const std::vector<int64_t>& shape) const {
  if (!is_cut(shape) || count_of(shape) == 0) return true;
  const LastCut cut(whole, shape);
  const auto a = static_cast<size_t>(cut.axis);
  const auto fits = [&](int64_t indices) { return indices * cut.inner % block == 0; };
  return fits(first[a]) && fits(shape[a]) && (a == 0 || fits(whole[a]));
}

int64_t Part::offset(const std::vector<int64_t>& shape) const {
  if (!is_cut(shape)) return 0;
  const LastCut cut(whole, shape);
  int64_t offset = 0;
  for (size_t a = 0; a < shape.size(); ++a) {
    if (static_cast<int>(a) < cut.axis && shape[a] > 1) return 0;
    offset = offset * whole[a] + first[a];
  }
  return offset;
}

void check_clip(const ga_clip& c, const ga_config& config) {
  check_choice("clip: scope", c.scope, GA_CLIP_AGC, "ga_clip_scope");
  check_choice("clip: flavor", c.flavor, GA_FLAVOR_KERAS, "GA_FLAVOR_TORCH or GA_FLAVOR_KERAS");
  check_choice("clip: agc_units", c.agc_units, GA_AGC_TORCH, "ga_agc_units");
  check_choice("clip: when", c.when, GA_CLIP_WHEN_MICRO, "ga_clip_when");
  if (c.scope == GA_CLIP_GLOBAL || c.scope == GA_CLIP_PER_TENSOR)
    check_rate("clip: max_norm", c.max_norm);
  if (!(c.max_value > 0))
    fail(GA_ERROR_INVALID_ARGUMENT, "clip: max_value was %g, expected > 0", c.max_value);
  check_positive("clip: agc_factor", c.agc_factor);
  check_positive("clip: agc_eps", c.agc_eps);
  if (is_of_micros(c) && config.gradient_life == GA_GRADIENTS_LENT)
    fail(GA_ERROR_UNSUPPORTED,
         "clip: when was GA_CLIP_WHEN_MICRO, which is not supported with GA_GRADIENTS_LENT: a "
         "gradient is clipped before it is added");
}

bool is_of_micros(const ga_clip& c) {
  return c.when == GA_CLIP_WHEN_MICRO && (c.scope != GA_CLIP_NONE || std::isfinite(c.max_value));
}

size_t Units::bytes(const UnitPattern& p, bool both) {
  const auto sums = static_cast<size_t>(p.sums()), count = static_cast<size_t>(p.units);
  return both ? sizeof(double) * (2 * sums + count) + sizeof(UnitTotals) : sizeof(double) * sums;
}

Units::Units(Backend& backend, const UnitPattern& p, bool both)
    : pattern(backend, 1),
      block(backend, bytes(p, both)),
      gradient(static_cast<double*>(block.data())) {
  pattern.edit(0) = p;
  pattern.flush(backend);
  if (!both) return;
  param = gradient + p.sums();
  factors = param + p.sums();
  totals = reinterpret_cast<UnitTotals*>(param + p.sums() + p.units);
}

void Group::set_optimizer(const ga_optimizer& o) {
  optimizer = o;
  if (o.kind != GA_OPTIMIZER_MUON || !o.ns_table) {
    ns_table = nullptr;
  } else {
    std::vector<double> table(o.ns_table, o.ns_table + int64_t{3} * o.ns_rows);
    if (!ns_table || *ns_table != table)  // else it keeps its address
      ns_table = std::make_shared<const std::vector<double>>(std::move(table));
  }
  optimizer.ns_table = ns_table ? ns_table->data() : nullptr;
  if (!ns_table) optimizer.ns_rows = 0;
}

const Group& ParamList::group(ga_group id) const {
  if (id < 0 || static_cast<size_t>(id) >= groups.size())
    fail(GA_ERROR_INVALID_ARGUMENT, "group was %d, but the context has %zu", id, groups.size());
  return groups[static_cast<size_t>(id)];
}

const Param& ParamList::get(ga_param id) const {
  if (id < 0 || static_cast<size_t>(id) >= size())
    fail(GA_ERROR_INVALID_ARGUMENT, "parameter was %d, but the context has %zu", id, size());
  if (tensor(id).removed)
    fail(GA_ERROR_INVALID_ARGUMENT, "parameter %d, \"%s\", was removed", id, name(id));
  return (*this)[id];
}

// The name and the shape keep their addresses when other parameters are added.
ga_param_info ParamList::info(ga_param id) const {
  const Param& p = get(id);
  const Tensor& t = tensor(id);
  ga_param_info info = {};
  info.struct_size = sizeof info;
  info.name = t.name;
  info.group = p.group;
  info.dtype = p.dtype;
  info.gradient_dtype = p.gradient_dtype;
  info.accumulator_dtype = p.accumulator_dtype;
  info.data = p.data;
  info.shape = t.shape.data();
  info.rank = static_cast<int32_t>(t.shape.size());
  info.frozen = p.frozen;
  info.count = p.count;
  info.offset = p.offset;
  info.slot = slot(id);
  info.lr_scale = t.lr_scale;
  info.weight_decay_scale = t.weight_decay_scale;
  return info;
}

size_t ParamList::slot(ga_param id) const {
  get(id);
  const auto after = std::upper_bound(
      blocks_.begin(), blocks_.end(), id,
      [](ga_param value, const Block& block) { return value < block.first + block.count; });
  return static_cast<size_t>(after - blocks_.begin());
}

ga_param ParamList::find(std::string_view name) const {
  const auto found = names_.find(name);
  return found == names_.end() ? -1 : found->second;
}

ga_param ParamList::find_state_of(const char* owner) const {
  const std::string prefix = std::string(owner) + ".";
  for (auto at = names_.lower_bound(prefix);
       at != names_.end() && at->first.compare(0, prefix.size(), prefix) == 0; ++at)
    if (is_state_of(at->first, owner)) return at->second;
  return -1;
}

void ParamList::make_room(size_t count) {
  reserve_more(params_, count);
  reserve_more(tensors_, count);
  reserve_more(blocks_, 1);
}

ga_param ParamList::add(const NewParam& e, void* data, int32_t dtype, int64_t count) {
  const ga_param_options& options = e.options;
  Tensor t = {};
  t.shape.assign(e.shape, e.shape + e.rank);
  t.options = options;
  t.rows = e.rank > 0 ? e.shape[0] : 1;
  if (e.rank == 2 || options.cut_matrices) t.cut = make_cut(e.rank, e.shape, options);
  t.name = names_.emplace(e.name, static_cast<ga_param>(size())).first->first.c_str();
  t.key = next_key_++;
  tensors_.push_back(std::move(t));
  Param p = {};
  p.data = data;
  p.count = count;
  p.shard = {0, count};
  p.offset = e.offset;
  p.group = e.group;
  p.matrix = e.rank >= 2;
  p.f64 = dtype == GA_F64;
  p.reduction = reduction_of(options.reduce);
  p.dtype = static_cast<unsigned char>(dtype);
  p.gradient_dtype =
      static_cast<unsigned char>(options.gradient_dtype ? options.gradient_dtype : dtype);
  p.accumulator_dtype = static_cast<unsigned char>(
      options.accumulator_dtype ? options.accumulator_dtype : (p.f64 ? GA_F64 : GA_F32));
  p.code_block = code_block_of(tensors_.back(), {});
  params_.push_back(p);
  return static_cast<ga_param>(size()) - 1;
}

void ParamList::add_block(ga_param first) {
  blocks_.push_back({first, static_cast<ga_param>(size()) - first});
}

void ParamList::drop_from(size_t first) {
  for (size_t i = first; i < size(); ++i)
    names_.erase(names_.find(tensors_[i].name));  // allocates nothing
  next_key_ -= static_cast<int32_t>(size() - first);
  params_.resize(first, Param{});
  tensors_.erase(tensors_.begin() + static_cast<std::ptrdiff_t>(first), tensors_.end());
}

void ParamList::remove(ga_param id) {
  removed_names_.reserve(removed_names_.size() + 1);
  removed_names_.push_back(names_.extract(names_.find(name(id))));  // keeps the address of the name
  Param& p = (*this)[id];
  p.frozen = tensor(id).removed = true;
  p.delivered = false;
}

void ParamList::set_part(Which w, Part part) {
  Tensor& t = tensor(w);
  (*this)[w].code_block = code_block_of(t, part);
  if (!part.whole.empty()) {
    Checksum sum;
    sum.add(t.name, std::strlen(t.name));
    t.key = kLeastNameKey | static_cast<int32_t>(sum.value() % kLeastNameKey);
  }
  t.part = std::move(part);
}

// Small parameters have state of f32, and so have parts whose rows are of no whole blocks.
int16_t ParamList::code_block_of(const Tensor& t, const Part& part) {
  const std::vector<int64_t>& whole = part.whole.empty() ? t.shape : part.whole;
  const int64_t count = count_of(whole);
  const bool by_rows = !part.whole.empty() || t.options.rows == GA_ROWS_LAZY;
  int32_t block = 0;
  if (count > kMostSmall) block = by_rows ? block_of_rows(count / whole[0]) : kCodeBlock;
  return static_cast<int16_t>(block);
}

Code ParamList::code_of(const Param& p, int slot, const Rules& by) {
  const int op = by.op_of(p);
  if (op < 0 || by.group_of(p).optimizer.state_dtype != GA_STATE_8BIT || p.code_block == 0)
    return Code::kNone;
  return op_info(op).codes.of[slot];
}

bool ParamList::is_coded(const Param& p, const Rules& by) {
  for (int k = 0; k < kMaxSlots; ++k)
    if (code_of(p, k, by) != Code::kNone) return true;
  return false;
}

bool ParamList::has_master(Which w, const Rules& by) const {
  const Param& p = (*this)[w];
  return dtype_info(p.dtype).size == 2 && tensor(w).options.master == GA_MASTER_F32 &&
         by.op_of(p) >= 0;
}

Keeper ParamList::keeper(Which w, const Rules& by) const {
  const Param& p = (*this)[w];
  const int op = by.op_of(p);
  if (op < 0) return Keeper::kAll;
  const ga_clip& clip = by.clip_of(p);
  const bool by_units = clip.scope == GA_CLIP_AGC;
  // Each rank clips its micro-batches by what the optimizer has, the master weights.
  if (by_units && clip.when == GA_CLIP_WHEN_MICRO && has_master(w, by)) return Keeper::kAll;
  const OpInfo& info = op_info(op);
  const Tensor& t = tensor(w);
  const bool whole =
      info.factored || info.orthogonal || (whole_layers && info.norms > 0) ||
      (info.row_state && t.rows == 1) ||
      (by_units && clip.when == GA_CLIP_WHEN_STEP && !units_of(t.shape, units_axes(w, by)).shared);
  return whole ? Keeper::kOwner : Keeper::kPieces;
}

int64_t ParamList::grain(Which w, const Rules& by) const {
  const int64_t grain = grain_of_updates(w, by);
  return is_coded((*this)[w], by) ? std::lcm(grain, int64_t{(*this)[w].code_block}) : grain;
}

int64_t ParamList::grain_of_updates(Which w, const Rules& by) const {
  constexpr int64_t kLine = 16;
  const Param& p = (*this)[w];
  const Tensor& t = tensor(w);
  if (t.options.rows != GA_ROWS_NONE) return p.count / t.rows;
  if (keeper(w, by) != Keeper::kPieces || by.op_of(p) < 0) return kLine;
  if (op_info(by.op_of(p)).row_state) return p.count / t.rows;
  const ga_clip& clip = by.clip_of(p);
  if (clip.scope != GA_CLIP_AGC || clip.when != GA_CLIP_WHEN_STEP) return kLine;
  return units_of(t.shape, units_axes(w, by)).slab();
}

bool ParamList::needs_units(Which w, const Rules& by) const {
  const Param& p = (*this)[w];
  const ga_clip& clip = by.clip_of(p);
  const bool of_micros = clip.when == GA_CLIP_WHEN_MICRO;
  return clip.scope == GA_CLIP_AGC && (of_micros ? p.count : p.shard.count) > 0;
}

bool ParamList::is_clipped_in_parts(Which w, const Rules& by) const {
  const Param& p = (*this)[w];
  const ga_clip& clip = by.clip_of(p);
  return sharded && by.op_of(p) >= 0 && clip.scope == GA_CLIP_AGC && clip.when == GA_CLIP_WHEN_STEP;
}

UnitPattern ParamList::clip_units(Which w, const Rules& by) const {
  const UnitPattern whole = units_of(tensor(w).shape, units_axes(w, by));
  const Range& shard = (*this)[w].shard;
  return is_clipped_in_parts(w, by) ? part_of(whole, shard.first, shard.count) : whole;
}

UnitPattern ParamList::state_rows(Which w) const {
  const Param& p = (*this)[w];
  const int64_t rows = tensor(w).rows;
  UnitPattern pattern = part_of(units_of({rows, p.count / rows}, 2), p.shard.first, p.shard.count);
  if (rows == 1) pattern.pieces = 1;  // a row is summed as a whole, also when it is updated lazily
  return pattern;
}

bool ParamList::is_layered(const Param& p) const {
  const int op = op_of(p);
  return op >= 0 && op_info(op).norms > 0;
}

uint32_t ParamList::units_axes(Which w, const Rules& by) const {
  const Tensor& t = tensor(w);
  if (t.options.agc_axes != 0) return t.options.agc_axes;
  const int32_t units = by.clip_of((*this)[w]).agc_units;
  if (units == GA_AGC_NFNETS && t.shape.size() > 4)
    subject(w).fail(GA_ERROR_UNSUPPORTED,
                    "its rank is %zu, but GA_AGC_NFNETS defines units up to rank 4; "
                    "ga_param_options.agc_axes defines them for any rank",
                    t.shape.size());
  return agc_axes(units, t.shape);
}

bool ParamList::by_units(Which w) const {
  const ga_clip& c = clip_of((*this)[w]);
  return c.scope == GA_CLIP_AGC && c.when == GA_CLIP_WHEN_STEP &&
         tensor(w).units[Tensor::kClipUnits];
}

bool ParamList::clips_units() const {
  return std::any_of(groups.begin(), groups.end(), [this](const Group& g) {
    const ga_clip& c = clip_of(g);
    return c.scope == GA_CLIP_AGC && c.when == GA_CLIP_WHEN_STEP;
  });
}

bool ParamList::in_pieces(Which w) const {
  const Tensor& t = tensor(w);
  const int op = op_of((*this)[w]);
  return by_units(w) && t.units[Tensor::kClipUnits]->pattern[0].shared && !is_layered((*this)[w]) &&
         op >= 0 && !op_info(op).row_state && t.options.rows != GA_ROWS_LAZY &&
         !is_coded((*this)[w]);
}

bool ParamList::norm_after_value(const Param& p) const {
  const ga_clip& c = clip_of(p);
  return c.when == GA_CLIP_WHEN_STEP && std::isfinite(c.max_value) &&
         (c.scope != GA_CLIP_NONE || is_layered(p));
}

Array Param::shard_data() const { return ga::offset({data, dtype}, shard.first); }

Matrices matrices_of(const Tensor& t) {
  const size_t rank = t.shape.size();
  Matrices m = {t.shape[rank - 2], t.shape[rank - 1], 1};
  for (size_t d = 0; d + 2 < rank; ++d) m.count *= t.shape[d];
  return m;
}

size_t data_bytes(const Param& p) {
  return static_cast<size_t>(p.count * dtype_info(p.dtype).size);
}

void ParamList::forget_delivered() {
  if (any_delivered_)
    for (Param& p : params_) p.delivered = false;
  any_delivered_ = false;
}

Clock clock_after(const OptimizerInfo& info, const ga_optimizer& o, int64_t steps) {
  Clock clock = {};
  if (o.flavor == GA_FLAVOR_TORCH) clock.step = steps;  // nobody reads its numbers
  while (clock.step < steps) {
    info.advance(o, clock, o.lr);
    if (clock.numbers[0] == 0) clock.step = steps;  // a product stays 0
  }
  return clock;
}

}  // namespace ga
