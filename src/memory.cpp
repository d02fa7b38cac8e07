// SPDX-License-Identifier: Apache-2.0
// The arrays that the library owns for its parameters: how large, where, and what they begin with.
#include <algorithm>
#include <cmath>

#include "context.hpp"
#include "error.hpp"
#include "tensor.hpp"

namespace ga {
namespace {

// Every array begins on a cache line and is padded to whole ones: the loops may run over the end of
// optimizer state, to the end of the line.
constexpr size_t kAlign = 64;

// Axes of (matrices, rows, columns) that the sums of a factored second moment are taken over.
constexpr uint32_t kRowSums = 4, kColumnSums = 2;

size_t align_up(size_t bytes) { return (bytes + kAlign - 1) / kAlign * kAlign; }

UnitPattern units_of(const std::vector<int64_t>& shape, uint32_t reduced) {
  return make_units(static_cast<int32_t>(shape.size()), shape.data(), reduced);
}

}  // namespace

bool Context::has_master(size_t i) const {
  const Param& p = params_[i];
  return dtype_info(p.dtype).size == 2 && tensors_[i].options.master == GA_MASTER_F32 &&
         op_of(p) >= 0;
}

Array Context::average_of(const Param& p) const {
  return {p.average, p.f64 ? GA_F64 : ema_ && ema_->dtype == GA_BF16 ? GA_BF16 : GA_F32};
}

Array Context::state_of(const Param& p, int slot) const {
  const ga_optimizer& o = groups_[static_cast<size_t>(p.group)].optimizer;
  return {p.state[slot], p.f64 ? GA_F64 : o.state_dtype == GA_BF16 ? GA_BF16 : GA_F32};
}

Array Context::param_of(const Param& p) const {
  if (p.master) return {p.master, GA_F32};
  return {p.data, p.dtype};
}

// The last two axes of a tensor as matrices.
Context::Matrices Context::matrices_of(const Tensor& t) const {
  const size_t rank = t.shape.size();
  Matrices m = {t.shape[rank - 2], t.shape[rank - 1], 1};
  for (size_t d = 0; d + 2 < rank; ++d) m.count *= t.shape[d];
  return m;
}

size_t Context::bytes_of(size_t i, int kind) const {
  const Param& p = params_[i];
  const Tensor& t = tensors_[i];
  if (p.count == 0) return 0;
  const auto count = static_cast<size_t>(p.count);
  const size_t real = p.f64 ? 8 : 4;
  const auto size = [](int32_t dtype) { return static_cast<size_t>(dtype_info(dtype).size); };
  switch (kind) {
    case kAccumulator:
      return count * size(p.accumulator_dtype);
    case kLow: {
      const bool pair =
          config_.accumulation == GA_ACCUMULATE_COMPENSATED && size(p.accumulator_dtype) == 2;
      return pair ? count * 2 : 0;
    }
    case kMaster:
      return has_master(i) ? count * 4 : 0;
    case kAverage:
      return ema_ ? count * size(average_of(p).format) : 0;
    case kRowSlots:
      return t.options.rows != GA_ROWS_NONE ? static_cast<size_t>(t.rows) * sizeof(uint32_t) : 0;
    default:
      break;
  }
  const int slot = kind - kState, op = op_of(p);
  if (op < 0) return 0;
  if (op_info(op).factored) {
    const Matrices m = matrices_of(t);
    const int64_t lengths[] = {m.count * m.rows, m.count * m.columns, m.count};
    return static_cast<size_t>(lengths[slot]) * real;
  }
  if (slot >= op_info(op).slots) return 0;
  const bool bf16 = groups_[static_cast<size_t>(p.group)].optimizer.state_dtype == GA_BF16;
  // Loops in double go by groups of two cache lines.
  return bf16 ? count * 2 : p.f64 ? (count * 8 + 127) / 128 * 128 : count * 4;
}

// Finds a place for each of a parameter's arrays, behind what l holds. One loop walks them all
// together with the parameter. Where the addresses of two streams are nearly alike in their low 12
// bits, a core takes the load of one for depending on the store to the other (measured: half the
// speed), so the arrays of a large parameter lie 17 cache lines apart within a page, counted from
// it.
void Context::place(size_t i, Layout& l, std::array<size_t, kArrays>& offset) const {
  constexpr size_t kPage = 4096, kApart = 17 * kAlign, kLarge = size_t{1} << 20;
  const Param& p = params_[i];
  size_t apart = 0;
  for (int a = 0; a < kArrays; ++a) {
    const size_t kind = static_cast<size_t>(a);
    const size_t bytes = align_up(bytes_of(i, a));
    offset[kind] = l.bytes[kind];
    if (bytes == 0) continue;
    apart += kApart;
    if (bytes >= kLarge) {
      const size_t wanted = reinterpret_cast<uintptr_t>(p.data) / kAlign * kAlign + apart;
      offset[kind] += (wanted - offset[kind]) % kPage;
    }
    l.bytes[kind] = offset[kind] + bytes;
  }
  l.chunks += chunk_count(p.count);
  const int op = op_of(p);
  if (op < 0 || !op_info(op).emits || p.count == 0) return;
  int64_t elements = 0;
  if (p.accumulator_dtype != (p.f64 ? GA_F64 : GA_F32)) elements = p.count;
  if (op_info(op).orthogonal)
    elements += OrthogonalizeTask::scratch_size(tensors_[i].rows, p.count / tensors_[i].rows);
  l.scratch = std::max(l.scratch, static_cast<size_t>(elements) * (p.f64 ? 8 : 4));
}

Context::Layout Context::layout_of_new() const {
  Layout l;
  std::array<size_t, kArrays> offset;
  for (size_t i = prepared_; i < params_.size(); ++i) place(i, l, offset);
  return l;
}

ga_memory Context::memory() const {
  const Layout fresh = layout_of_new();
  const auto bytes = [&](int kind) {
    return static_cast<int64_t>(owned_.bytes[static_cast<size_t>(kind)] +
                                fresh.bytes[static_cast<size_t>(kind)]);
  };
  ga_memory m = {};
  m.accumulators = bytes(kAccumulator) + bytes(kLow);
  for (int k = 0; k < kMaxSlots; ++k) m.optimizer_state += bytes(kState + k);
  m.masters = bytes(kMaster);
  m.averages = bytes(kAverage);
  m.rows = bytes(kRowSlots);
  const int64_t chunks = owned_.chunks + fresh.chunks;
  m.workspace = chunks * static_cast<int64_t>(sizeof(Partial)) + backend_->table_bytes(chunks) +
                static_cast<int64_t>(std::max(scratch_bytes_, fresh.scratch)) +
                static_cast<int64_t>(params_.size() * (sizeof(Param) + sizeof(Tensor)) +
                                     params_.size() * bytes_of_lists());
  for (size_t i = 0; i < tensors_.size(); ++i) {
    const Tensor& t = tensors_[i];
    m.rows += static_cast<int64_t>(t.set.entries.capacity() * sizeof(RowEntry));
    if (i < prepared_) {
      for (const auto* units : {&t.units, &t.factor_rows, &t.factor_columns})
        if (*units) m.workspace += static_cast<int64_t>((*units)->bytes);
    } else if (params_[i].count > 0) {
      const int op = op_of(params_[i]);
      if (clip_of(params_[i]).scope == GA_CLIP_AGC) {
        const UnitPattern p = units_of(t.shape, units_axes(i));
        m.workspace += (2 * p.sums() + p.units) * static_cast<int64_t>(sizeof(double));
      }
      if (op >= 0 && op_info(op).factored) {
        const Matrices x = matrices_of(t);
        for (const uint32_t reduced : {kRowSums, kColumnSums})
          m.workspace += units_of({x.count, x.rows, x.columns}, reduced).sums() *
                         static_cast<int64_t>(sizeof(double));
      }
    }
  }
  m.workspace += static_cast<int64_t>(micro_partials_.capacity() * sizeof(Partial) +
                                      contributions_.capacity() * sizeof(Contribution));
  m.total = m.accumulators + m.optimizer_state + m.workspace + m.masters + m.averages + m.rows;
  return m;
}

// Bytes of the working lists for each parameter.
size_t Context::bytes_of_lists() {
  return sizeof(AccumulateTask) + sizeof(NormTask) + 2 * sizeof(UpdateTask) + sizeof(FinishTask) +
         2 * sizeof(OpBytes) + 2 * sizeof(ga_param) + 2 * sizeof(UnitTask) + sizeof(AgcTask) +
         sizeof(FactorTask);
}

// Gives the parameters added since the last window their arrays. All or nothing.
void Context::prepare() {
  if (prepared_ == params_.size()) {
    if (unfilled_) fill_new();
    return;
  }
  const size_t n = params_.size();
  const Layout fresh = layout_of_new();
  accumulate_tasks_.reserve(n);
  norm_tasks_.reserve(n);
  update_tasks_.reserve(lazy_ ? std::max(n, kRowBatch) : n);
  finish_tasks_.reserve(n);
  updates_.resize(n);
  folded_.reserve(2 * n);  // layer-wise optimizers fold twice
  touched_.reserve(n);
  layers_.reserve(n);
  unit_tasks_.reserve(2 * n);
  agc_tasks_.reserve(n);
  factor_tasks_.reserve(n);
  backend_->reserve(owned_.chunks + fresh.chunks + static_cast<int64_t>(lazy_ ? kRowBatch : 0),
                    static_cast<int64_t>(owned_.bytes[kAccumulator] + fresh.bytes[kAccumulator]));

  constexpr size_t kPartials = kArrays;
  std::array<size_t, kArrays + 1> bytes;
  std::copy(fresh.bytes.begin(), fresh.bytes.end(), bytes.begin());
  bytes[kPartials] = static_cast<size_t>(fresh.chunks) * sizeof(Partial);
  std::array<char*, kArrays + 1> base = {};
  std::vector<std::unique_ptr<Units>> made(3 * (n - prepared_));
  void* scratch = nullptr;
  arenas_.reserve(arenas_.size() + kArrays + 1);
  ranges_.reserve(ranges_.size() + kArrays + 1);
  try {
    for (size_t a = 0; a <= kPartials; ++a)
      if (bytes[a] > 0) base[a] = static_cast<char*>(backend_->allocate(bytes[a]));
    if (fresh.scratch > scratch_bytes_) scratch = backend_->allocate(fresh.scratch);
    for (size_t i = prepared_; i < n; ++i) {
      const Tensor& t = tensors_[i];
      auto* const units = &made[3 * (i - prepared_)];
      if (params_[i].count == 0) continue;
      if (clip_of(params_[i]).scope == GA_CLIP_AGC)
        units[0] = new_units(t.shape, units_axes(i), true);
      const int op = op_of(params_[i]);
      if (op < 0 || !op_info(op).factored) continue;
      const Matrices m = matrices_of(t);
      const std::vector<int64_t> shape = {m.count, m.rows, m.columns};
      units[1] = new_units(shape, kRowSums, false);
      units[2] = new_units(shape, kColumnSums, false);
    }
  } catch (const std::bad_alloc&) {
    for (size_t a = 0; a <= kPartials; ++a) backend_->free(base[a], bytes[a]);
    backend_->free(scratch, fresh.scratch);
    for (auto& units : made) free_units(units);
    fail(
        GA_ERROR_OUT_OF_MEMORY,
        "%zu bytes for accumulators and %zu for optimizer state of %zu parameters could not be had",
        bytes[kAccumulator], bytes[kState] + bytes[kState + 1] + bytes[kState + 2], n - prepared_);
  }
  if (scratch) {
    backend_->free(scratch_, scratch_bytes_);
    scratch_ = scratch;
    scratch_bytes_ = fresh.scratch;
  }
  for (size_t a = 0; a <= kPartials; ++a) {
    if (!base[a]) continue;
    arenas_.push_back({base[a], bytes[a]});
    const auto begin = reinterpret_cast<uintptr_t>(base[a]);
    add_range({begin, begin + bytes[a], -1});
  }
  auto* partials = reinterpret_cast<Partial*>(base[kPartials]);
  Layout l;
  for (size_t first = prepared_; prepared_ < n; ++prepared_) {
    Param& p = params_[prepared_];
    Tensor& t = tensors_[prepared_];
    std::array<size_t, kArrays> offset = {};
    place(prepared_, l, offset);
    if (p.count == 0) continue;
    const auto at = [&](int kind) -> void* {
      const auto k = static_cast<size_t>(kind);
      return bytes_of(prepared_, kind) > 0 ? base[k] + offset[k] : nullptr;
    };
    p.accumulator = at(kAccumulator);
    for (int k = 0; k < kMaxSlots; ++k) p.state[k] = at(kState + k);
    p.master = at(kMaster);
    p.average = at(kAverage);
    p.partials = partials;
    partials += chunk_count(p.count);
    t.pair = {p.accumulator, at(kLow), p.accumulator_dtype};
    p.pair = t.pair.low != nullptr;
    p.by_chance = t.options.rounding == GA_ROUND_STOCHASTIC;
    t.set.slots = static_cast<uint32_t*>(at(kRowSlots));
    p.master_due = p.master != nullptr;
    p.state_due = true;
    unfilled_ = true;
    set_update(prepared_);
    auto* const units = &made[3 * (prepared_ - first)];
    t.units = std::move(units[0]);
    t.factor_rows = std::move(units[1]);
    t.factor_columns = std::move(units[2]);
  }
  for (size_t a = 0; a < kArrays; ++a) owned_.bytes[a] += fresh.bytes[a];
  owned_.chunks += fresh.chunks;
  fill_new();
}

// What stays the same in a parameter's updates.
void Context::set_update(size_t i) {
  const Param& p = params_[i];
  UpdateTask& task = updates_[i];
  task = {};
  task.op = -1;
  task.f64 = p.f64;
  task.param = param_of(p);
  task.copy = {p.master ? p.data : nullptr, p.dtype};
  task.average = average_of(p);
  const int op = op_of(p);
  for (int k = 0; k < (op < 0 ? 0 : op_info(op).slots); ++k) task.state[k] = state_of(p, k);
  task.padded_state = true;
  task.partials = p.partials;
}

// What new arrays begin with, where that is not zero, and masters that are due. What fails is done
// again by the next call.
void Context::fill_new() {
  for (size_t i = 0; i < prepared_; ++i) {
    Param& p = params_[i];
    if (p.master_due) take_master(p);
    p.master_due = false;
    for (int k = 0; p.state_due && k < kMaxSlots; ++k) {
      const ga_optimizer& o = groups_[static_cast<size_t>(p.group)].optimizer;
      const double initial = info_of(p).initial(o, k);
      if (!p.state[k] || initial == 0) continue;
      FinishTask task = {};
      task.gradient = identity({nullptr, GA_F32, 1});
      task.constant = initial;
      task.f64 = p.f64;
      task.target = state_of(p, k);
      task.count = p.count;
      backend_->finish({&task, 1});
    }
    p.state_due = false;
  }
  unfilled_ = false;
}

void Context::take_master(Param& p) {
  FinishTask task = {};
  task.gradient = identity({p.data, p.dtype, 1});
  task.target = {p.master, GA_F32};
  task.count = p.count;
  backend_->finish({&task, 1});
}

}  // namespace ga
