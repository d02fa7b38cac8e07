// SPDX-License-Identifier: Apache-2.0
#include "model/shadow_arrays.hpp"

#include <algorithm>
#include <new>

#include "core/tensor.hpp"
#include "model/placer.hpp"

namespace ga {
namespace {

constexpr size_t kLine = 64;

}  // namespace

// Master weights or the parameter, state, the rounded copy of the master weights, the average, and what a first
// pass emits, which else takes the place of the parameter.
template <class F>
void ShadowArrays::each(size_t i, Targets& targets, F&& f) const {
  const Param& p = params_[i];
  const auto place = [&](Array& array, int32_t format, int64_t count) {
    const auto size = static_cast<size_t>(dtype_info(format).size);
    array.format = format;
    f(array, (static_cast<size_t>(count) * size + 2 * kLine - 1) / kLine * kLine);
  };
  const bool master = params_.has_master(i);
  place(targets.param, master ? int32_t{GA_F32} : p.dtype, p.shard.count);
  if (master && !writes_early(i)) place(targets.copy, p.dtype, p.shard.count);
  const OwnedArrays arrays = arrays_.of(i);
  for (const OwnedArray& a : arrays) {
    if (a.kind >= kState && a.kind < kScales)
      place(targets.state[a.kind - kState], a.format, a.count);
    if (ParamArrays::is_scales(a.kind)) {
      Array scales = {};
      place(scales, a.format, a.count);
      targets.scales[a.kind - kScales] = static_cast<float*>(scales.data);
    }
    if (a.kind == kAverage) place(targets.average, a.format, a.count);
  }
  if (op_info(params_.op_of(p)).emits && targets.param.format != GA_F32)
    place(targets.emitted, GA_F32, p.shard.count);
}

size_t ShadowArrays::bytes_of(size_t i) const {
  Targets targets = {};
  size_t sum = 0;
  each(i, targets, [&](Array&, size_t bytes) { sum += Placer::room(bytes); });
  return sum;
}

size_t ShadowArrays::within_limit(size_t more) const {
  if (config_.eager_bytes == 0) return more;
  const auto most = static_cast<size_t>(config_.eager_bytes);
  return std::min(more, most > allocated_ ? most - allocated_ : 0);
}

void ShadowArrays::grow(size_t bytes) {
  size_t room = 0;
  if (!pools_.empty()) room = pools_.back().memory.bytes() - pools_.back().taken;
  bytes = within_limit(bytes > room ? bytes - room : 0);
  if (bytes == 0) return;
  try {
    sets_.resize(std::max(sets_.size(), params_.size()));
    ranges_.reserve_more(1);
    pools_.reserve(pools_.size() + 1);
    Pool pool;
    pool.memory = Buffer(backend_, bytes);
    arrays_.write(pool.memory, arrays_.chunks());
    pools_.push_back(std::move(pool));
  } catch (const std::bad_alloc&) {
    return;
  }
  ranges_.add(pools_.back().memory.data(), bytes);
  allocated_ += bytes;
}

bool ShadowArrays::writes_early(size_t i) const {
  return params_.tensor(i).options.write_early != 0;
}

const Targets* ShadowArrays::give(size_t i) {
  if (!has(i) && !place(i)) return nullptr;
  Targets& targets = sets_[i].targets;
  if (writes_early(i)) targets.copy = params_[i].shard_data();
  if (targets.param.format == GA_F32) targets.emitted = targets.param;
  return &targets;
}

bool ShadowArrays::place(size_t i) {
  if (i >= sets_.size()) return false;
  const size_t bytes = bytes_of(i);
  for (size_t k = pools_.size(); k-- > 0;) {
    Pool& pool = pools_[k];
    if (pool.memory.bytes() - pool.taken < bytes) continue;
    Set& set = sets_[i];
    Placer placer(false, params_[i].data, arrays_.of(i).size);
    each(i, set.targets, [&](Array& array, size_t size) {
      array.data = static_cast<char*>(pool.memory.data()) + placer.place(pool.taken, size);
    });
    // A plain store reads the line of memory that it writes. Where the arrays do not fit the caches, stores that
    // bypass them (streaming) save that read.
    set.targets.stream = static_cast<int64_t>(allocated_) > backend_.host()->cache_bytes() / 2;
    set.pool = k + 1;
    ++pool.users;
    return true;
  }
  return false;
}

Array ShadowArrays::exchange(size_t i) {
  Param& p = params_[i];
  Targets& t = sets_[i].targets;
  for (int k = 0; k < kMaxSlots; ++k) {
    if (t.state[k].data) std::swap(p.state[k], t.state[k].data);
    void*& scales = p.state[kMaxSlots + k];
    if (t.scales[k]) scales = std::exchange(t.scales[k], static_cast<float*>(scales));
  }
  if (p.master) std::swap(p.master, t.param.data);
  if (t.average.data) std::swap(p.average, t.average.data);
  return !p.master ? t.param : writes_early(i) ? Array{nullptr, p.dtype} : t.copy;
}

void ShadowArrays::forget(size_t i) {
  if (!has(i)) return;
  Pool& pool = pools_[sets_[i].pool - 1];
  sets_[i] = Set();
  if (--pool.users > 0) return;
  pool.taken = 0;
}

}  // namespace ga
