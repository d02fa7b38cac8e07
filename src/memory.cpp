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
    case kRowSet:
      return t.options.rows != GA_ROWS_NONE ? sizeof(RowSet) : 0;
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
  m.rows = bytes(kRowSlots) + bytes(kRowSet) + backend_->row_bytes();
  const int64_t chunks = owned_.chunks + fresh.chunks;
  m.workspace = chunks * static_cast<int64_t>(sizeof(Partial)) + backend_->table_bytes(chunks) +
                static_cast<int64_t>(std::max(scratch_bytes_, fresh.scratch)) +
                bytes_of_tables(groups_.size(), params_.size());
  for (size_t i = 0; i < tensors_.size(); ++i) {
    const Tensor& t = tensors_[i];
    if (i < prepared_) {
      for (const auto* units : {&t.units, &t.factor_rows, &t.factor_columns})
        if (*units) m.workspace += static_cast<int64_t>((*units)->bytes + sizeof(UnitPattern));
    } else if (params_[i].count > 0) {
      const int op = op_of(params_[i]);
      if (clip_of(params_[i]).scope == GA_CLIP_AGC) {
        const UnitPattern p = units_of(t.shape, units_axes(i));
        m.workspace += (2 * p.sums() + p.units) * static_cast<int64_t>(sizeof(double)) +
                       static_cast<int64_t>(sizeof(UnitPattern));
      }
      if (op >= 0 && op_info(op).factored) {
        const Matrices x = matrices_of(t);
        for (const uint32_t reduced : {kRowSums, kColumnSums})
          m.workspace += units_of({x.count, x.rows, x.columns}, reduced).sums() *
                             static_cast<int64_t>(sizeof(double)) +
                         static_cast<int64_t>(sizeof(UnitPattern));
      }
    }
  }
  for (const Group& g : groups_) m.workspace += static_cast<int64_t>(g.rates.bytes);
  m.workspace += micro_partials_.bytes() + micro_plans_.bytes() +
                 static_cast<int64_t>(contributions_.capacity() *
                                      (sizeof(Contribution) + sizeof(MicroInput) +
                                       sizeof(NormTask)));
  for (const BatchNorm& b : batch_norms_)
    m.batch_norm += static_cast<int64_t>(b.bytes + b.history_bytes());
  m.workspace += backend_->bn_bytes() + bn_inputs_.bytes();
  m.total = m.accumulators + m.optimizer_state + m.workspace + m.masters + m.averages + m.rows +
            m.batch_norm;
  return m;
}

// Bytes of the tables and working lists for so many of each.
int64_t Context::bytes_of_tables(size_t groups, size_t params) const {
  const size_t of_param = sizeof(Param) + sizeof(Tensor) + sizeof(Source) + sizeof(ParamInput) +
                          sizeof(ParamState) + sizeof(ParamPlan) + sizeof(Composites) +
                          2 * sizeof(UpdateTask) + sizeof(UnitTask) + sizeof(FactorTask) +
                          sizeof(AccumulateTask) + 9 * sizeof(ga_param) +
                          (config_.device == GA_DEVICE_CPU ? 0 : 3 * sizeof(Word));
  return static_cast<int64_t>(sizeof(Settings) + sizeof(Control) +
                              groups * (sizeof(GroupInput) + sizeof(GroupState)) +
                              params * of_param);
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
  told_.resize(n);
  if (config_.device != GA_DEVICE_CPU) moved_.reserve(3 * n);
  for (auto* list : {&plain_, &pieces_, &layers_, &norms_, &units_first_, &factored_first_, &ids_[0],
                     &ids_[1], &ids_[2]})
    list->reserve(n);
  backend_->reserve(owned_.chunks + fresh.chunks, static_cast<int64_t>(n),
                    static_cast<int64_t>(owned_.bytes[kAccumulator] + fresh.bytes[kAccumulator]));

  constexpr size_t kPartials = kArrays;
  std::array<size_t, kArrays + 1> bytes;
  std::copy(fresh.bytes.begin(), fresh.bytes.end(), bytes.begin());
  bytes[kPartials] = static_cast<size_t>(fresh.chunks) * sizeof(Partial);
  std::array<char*, kArrays + 1> base = {};
  std::vector<std::unique_ptr<Units>> made(3 * (n - prepared_));
  void* scratch = nullptr;
  Table<ParamInput> inputs;
  State<ParamState> states;
  State<ParamPlan> plans;
  Table<Composites> composites;
  Table<UpdateTask> updates, measures;
  Table<UnitTask> unit_tasks;
  Table<FactorTask> factors;
  const auto release = [&] {
    inputs.release(*backend_);
    states.release(*backend_);
    plans.release(*backend_);
    composites.release(*backend_);
    updates.release(*backend_);
    measures.release(*backend_);
    unit_tasks.release(*backend_);
    factors.release(*backend_);
  };
  std::vector<std::pair<RowSet*, uint32_t*>> row_slots;
  row_slots.reserve(n - prepared_);
  arenas_.reserve(arenas_.size() + kArrays + 1);
  ranges_.reserve(ranges_.size() + kArrays + 1);
  try {
    for (size_t a = 0; a <= kPartials; ++a)
      if (bytes[a] > 0) base[a] = static_cast<char*>(backend_->allocate(bytes[a]));
    if (fresh.scratch > scratch_bytes_) scratch = backend_->allocate(fresh.scratch);
    inputs = param_inputs_.grown(*backend_, n);
    states = param_states_.grown(*backend_, n);
    plans = plans_.grown(*backend_, n);
    composites = composites_.grown(*backend_, n);
    updates = updates_.grown(*backend_, n);
    measures = measures_.grown(*backend_, n);
    unit_tasks = units_.grown(*backend_, n);
    factors = factors_.grown(*backend_, n);
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
  } catch (const std::exception& e) {
    for (size_t a = 0; a <= kPartials; ++a) backend_->free(base[a], bytes[a]);
    backend_->free(scratch, fresh.scratch);
    for (auto& units : made) free_units(units);
    release();
    if (!dynamic_cast<const std::bad_alloc*>(&e)) throw;
    fail(
        GA_ERROR_OUT_OF_MEMORY,
        "%zu bytes for accumulators and %zu for optimizer state of %zu parameters could not be had",
        bytes[kAccumulator], bytes[kState] + bytes[kState + 1] + bytes[kState + 2], n - prepared_);
  }
  std::swap(param_inputs_, inputs);
  std::swap(param_states_, states);
  std::swap(plans_, plans);
  std::swap(composites_, composites);
  std::swap(updates_, updates);
  std::swap(measures_, measures);
  std::swap(units_, unit_tasks);
  std::swap(factors_, factors);
  release();
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
    t.low = at(kLow);
    p.pair = t.low != nullptr;
    t.set = static_cast<RowSet*>(at(kRowSet));
    if (t.set) row_slots.push_back({t.set, static_cast<uint32_t*>(at(kRowSlots))});
    p.master_due = p.master != nullptr;
    p.state_due = true;
    unfilled_ = true;
    auto* const units = &made[3 * (prepared_ - first)];
    t.units = std::move(units[0]);
    t.factor_rows = std::move(units[1]);
    t.factor_columns = std::move(units[2]);
  }
  for (const auto& [set, slots] : row_slots) backend_->write(&set->slots, &slots, sizeof slots);
  for (size_t a = 0; a < kArrays; ++a) owned_.bytes[a] += fresh.bytes[a];
  owned_.chunks += fresh.chunks;
  for (size_t i = 0; i < n; ++i) set_update(i);  // the tables have moved
  lists_due_ = true;
  set_tables();
  flush();
  fill_new();
}

// What the tables have of a parameter, from its arrays, its options and those of its group.
void Context::set_update(size_t i) {
  const auto id = static_cast<ga_param>(i);
  const Param& p = params_[i];
  const Tensor& t = tensors_[i];
  const ParamPlan* const plan = plans_.at(i);
  const int op = op_of(p);
  const int64_t columns = t.rows > 0 ? p.count / t.rows : 0;

  ParamInput& in = param_inputs_.edit(i);
  in = {};
  in.partials = p.partials;
  in.rows = t.set;
  in.count = p.count;
  in.extent = t.rows;
  in.weight = 1;
  in.group = p.group;
  in.op = op;
  in.held = p.held();
  in.f64 = p.f64;
  in.frozen = p.frozen;
  in.clamped = norm_after_value(p);
  in.by_units = by_units(id);
  in.lazy = t.options.rows == GA_ROWS_LAZY;
  in.average = p.average != nullptr;
  const bool bf16_state = groups_[static_cast<size_t>(p.group)].optimizer.state_dtype == GA_BF16;
  in.by_chance = t.options.rounding == GA_ROUND_STOCHASTIC || bf16_state ||
                 (in.average && average_of(p).format == GA_BF16);

  Composites& composites = composites_.edit(i);
  composites.pair = {p.accumulator, t.low, p.accumulator_dtype};
  composites.sparse = {p.accumulator, columns, t.set};

  UpdateTask& update = updates_.edit(i);
  update = {};
  update.plan = plan;
  update.count = p.count;
  update.op = op;
  update.f64 = p.f64;
  update.param = param_of(p);
  update.copy = {p.master ? p.data : nullptr, p.dtype};
  update.average = average_of(p);
  update.delivered = {op < 0 ? p.accumulator : nullptr, p.accumulator_dtype};
  for (int k = 0; k < (op < 0 ? 0 : op_info(op).slots); ++k) update.state[k] = state_of(p, k);
  update.padded_state = !in_pieces(id);  // a piece may end where another begins
  update.by_chance = t.options.rounding == GA_ROUND_STOCHASTIC;
  update.rows = in.lazy ? t.set : nullptr;
  update.columns = columns;
  update.partials = p.partials;

  UnitTask& units = units_.edit(i);
  units = {};
  if (t.units) {
    const Array param = update.param;
    const ga_clip& clip = clip_of(p);
    units.param = {param.data, param.format, 1, nullptr};
    units.f64 = p.f64;
    units.pattern = t.units->at();
    units.sums = t.units->gradient;
    units.param_sums = t.units->param;
    units.factors = t.units->factors;
    units.totals = t.units->totals;
    units.factor = clip.agc_factor;
    units.eps = clip.agc_eps;
  }

  FactorTask& factor = factors_.edit(i);
  factor = {};
  measures_.edit(i) = update;
  if (is_layered(id)) {
    const OpInfo& info = op_info(op);
    UpdateTask& measure = measures_.edit(i);
    const bool fits = p.accumulator_dtype == (p.f64 ? GA_F64 : GA_F32);
    if (info.emits) measure.emitted = fits ? p.accumulator : scratch_;
    if (info.factored && p.count > 0) {
      const Matrices m = matrices_of(t);
      composites.outer = {p.state[0], p.state[1], p.state[2], m.rows, m.columns};
      factor.plan = plan;
      factor.row_pattern = t.factor_rows->at();
      factor.column_pattern = t.factor_columns->at();
      factor.row_sums = t.factor_rows->gradient;
      factor.column_sums = t.factor_columns->gradient;
      factor.f64 = p.f64;
      factor.rows = p.state[0];
      factor.columns = p.state[1];
      factor.scales = p.state[2];
      factor.row_count = m.rows;
      factor.column_count = m.columns;
      factor.matrices = m.count;
    }
    if (info.factored) measure.state[0] = update.state[0] = {&composites_.at(i)->outer, kOuter};
    const void* made = measure.emitted;
    if (info.orthogonal && p.count > 0) made = orthogonal_task(id).result();
    if (info.emits) update.gradient = identity({made, p.f64 ? GA_F64 : GA_F32, 1, nullptr});
  }

  // The views of the gradient; where it is, set_gradient tells.
  GradientView view = {{}, &plan->gradient}, raw = {{}, &plan->raw};
  if (by_units(id)) {
    composites.clipped = {raw, t.units->at(), t.units->factors};
    units.gradient = raw;
    view.source = {&composites_.at(i)->clipped, kClipped, 1, nullptr};
    raw = identity(view.source);
  }
  const bool layered = is_layered(id);
  if (layered) measures_.edit(i).gradient = view;
  if (!layered || !op_info(op).emits) update.gradient = view;
  factor.gradient = raw;
  set_gradient(i);
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
      task.gradient = identity({nullptr, GA_F32, 1, nullptr});
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
  task.gradient = identity({p.data, p.dtype, 1, nullptr});
  task.target = {p.master, GA_F32};
  task.count = p.count;
  backend_->finish({&task, 1});
}

}  // namespace ga
