// SPDX-License-Identifier: Apache-2.0
// The arrays that the library owns for its parameters: how large, where, and what they begin with.
#include <algorithm>
#include <cmath>
#include <stdexcept>

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

// Sizes stay below what no address space holds.
size_t add_capped(size_t a, size_t b) {
  constexpr auto kMost = static_cast<size_t>(INT64_MAX);
  return a > kMost || b > kMost - a ? kMost : a + b;
}

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
    l.bytes[kind] = add_capped(offset[kind], bytes);
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
  for (size_t i = 0; i < params_.size(); ++i)
    if (lacks_arrays(params_[i])) place(i, l, offset);
  return l;
}

// Whether windows with these options never write the parameter's accumulator, because its one gradient
// is read where the program has it. On the CPU, memory that is never written is never given.
bool Context::never_stores(size_t i) const {
  const Param& p = params_[i];
  const int op = op_of(p);
  return tensors_[i].options.rows == GA_ROWS_NONE && adopts_ && config_.accum_steps == 1 &&
         phases_.empty() && config_.device == GA_DEVICE_CPU && !p.accumulator_written && op >= 0 &&
         !op_info(op).emits && p.accumulator_dtype == (p.f64 ? GA_F64 : GA_F32);
}

// Of the sums over units that a parameter has or is going to have.
int64_t Context::bytes_of_units(size_t i) const {
  const Param& p = params_[i];
  const Tensor& t = tensors_[i];
  if (p.count == 0 || (!p.owns && p.frozen)) return 0;
  int64_t bytes = 0;
  const auto add = [&](const std::unique_ptr<Units>& made, const std::vector<int64_t>& shape,
                       uint32_t axes, bool both) {
    const size_t block = made ? made->bytes : bytes_of_units(units_of(shape, axes), both);
    bytes += static_cast<int64_t>(block + sizeof(UnitPattern));
  };
  const int op = op_of(p);
  if (clip_of(p).scope == GA_CLIP_AGC) add(t.units, t.shape, units_axes(i), true);
  if (op >= 0 && op_info(op).factored) {
    const Matrices m = matrices_of(t);
    const std::vector<int64_t> shape = {m.count, m.rows, m.columns};
    add(t.factor_rows, shape, kRowSums, false);
    add(t.factor_columns, shape, kColumnSums, false);
  }
  return bytes;
}

ga_memory Context::memory() const {
  ga_memory m = {};
  const auto add = [](int64_t& sum, size_t bytes) {
    sum = static_cast<int64_t>(add_capped(static_cast<size_t>(sum), bytes));
  };
  const Layout fresh = layout_of_new();
  const bool on_demand = config_.device == GA_DEVICE_CPU;  // memory comes when it is written
  int64_t planned = 0;                                     // of what follows, not resident yet
  std::array<int64_t, kArrays> all = {};
  for (size_t kind = 0; kind < kArrays; ++kind) {
    add(all[kind], add_capped(owned_.bytes[kind], fresh.bytes[kind]));
    add(planned, fresh.bytes[kind]);
  }
  for (size_t i = 0; i < params_.size(); ++i) {
    const Param& p = params_[i];
    const auto bytes = [&](int kind) { return static_cast<int64_t>(align_up(bytes_of(i, kind))); };
    if (never_stores(i) && (p.owns || lacks_arrays(p))) {
      all[kAccumulator] -= bytes(kAccumulator);
      if (!p.owns) planned -= bytes(kAccumulator);
    } else if (p.owns && on_demand && !p.accumulator_written) {
      planned += bytes(kAccumulator) + bytes(kLow);
    }
    if (!p.owns || !on_demand) continue;
    for (int k = 0; k < kMaxSlots && !p.state_written; ++k) {
      const ga_optimizer& o = groups_[static_cast<size_t>(p.group)].optimizer;
      if (info_of(p).initial(o, k) == 0) planned += bytes(kState + k);
    }
    if (!p.average_written) planned += bytes(kAverage);
  }
  const auto both = [&](int a, int b) {
    return all[static_cast<size_t>(a)] + all[static_cast<size_t>(b)];
  };
  m.accumulators = both(kAccumulator, kLow);
  for (int k = 0; k < kMaxSlots; ++k)
    add(m.optimizer_state, static_cast<size_t>(all[static_cast<size_t>(kState + k)]));
  m.masters = all[kMaster];
  m.averages = all[kAverage];
  m.rows = both(kRowSlots, kRowSet) + backend_->row_bytes();
  const int64_t chunks = owned_.chunks + fresh.chunks;
  m.workspace = chunks * static_cast<int64_t>(sizeof(Partial)) + backend_->table_bytes(chunks) +
                static_cast<int64_t>(std::max(scratch_bytes_, fresh.scratch)) +
                bytes_of_tables(groups_.size(), params_.size());
  planned +=
      fresh.chunks * static_cast<int64_t>(sizeof(Partial)) + backend_->table_bytes(chunks) -
      backend_->table_bytes(owned_.chunks) +
      static_cast<int64_t>(fresh.scratch > scratch_bytes_ ? fresh.scratch - scratch_bytes_ : 0) +
      bytes_of_tables(0, params_.size()) - bytes_of_tables(0, prepared_);
  for (size_t i = 0; i < params_.size(); ++i) {
    const int64_t bytes = bytes_of_units(i);
    m.workspace += bytes;
    if (!params_[i].owns) planned += bytes;
  }
  for (const Group& g : groups_) m.workspace += static_cast<int64_t>(g.rates.bytes);
  m.workspace +=
      micro_partials_.bytes() + micro_plans_.bytes() +
      static_cast<int64_t>(contributions_.capacity() *
                           (sizeof(Contribution) + sizeof(MicroInput) + sizeof(NormTask)));
  for (const BatchNorm& b : batch_norms_)
    m.batch_norm += static_cast<int64_t>(b.bytes + b.history_bytes());
  m.workspace += backend_->bn_bytes() + bn_inputs_.bytes();
  for (const int64_t bytes : {m.accumulators, m.optimizer_state, m.workspace, m.masters, m.averages,
                              m.rows, m.batch_norm})
    add(m.total, static_cast<size_t>(bytes));
  m.resident = m.total - planned;
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

struct Context::Fresh {
  std::array<size_t, kArrays + 1> bytes = {};
  std::array<char*, kArrays + 1> base = {};
  void* scratch = nullptr;
  size_t scratch_bytes = 0;
  std::vector<std::array<std::unique_ptr<Units>, 3>> units;  // by parameter
  Table<ParamInput> inputs;
  State<ParamState> states;
  State<ParamPlan> plans;
  Table<Composites> composites;
  Table<UpdateTask> updates, measures;
  Table<UnitTask> unit_tasks;
  Table<FactorTask> factors;
  std::vector<const void*> claimed;  // parameters whose masters are new
};

void Context::release_fresh(Fresh& f) noexcept {
  for (size_t a = 0; a <= kPartials; ++a) backend_->free(f.base[a], f.bytes[a]);
  backend_->free(f.scratch, f.scratch_bytes);
  for (auto& of_param : f.units)
    for (auto& units : of_param) free_units(units);
  f.inputs.release(*backend_);
  f.states.release(*backend_);
  f.plans.release(*backend_);
  f.composites.release(*backend_);
  f.updates.release(*backend_);
  f.measures.release(*backend_);
  f.unit_tasks.release(*backend_);
  f.factors.release(*backend_);
  for (const void* data : f.claimed) claims_.remove(data);
}

// Gives every parameter that is not frozen and has no arrays its own. All or nothing. To be called
// after all checks of a call that contributes, so that no other call leaves arrays behind; throws if
// memory runs out, or if another context has a master of the same memory.
void Context::prepare() {
  if (!lacking_) {
    if (unfilled_) fill_new();
    return;
  }
  const Layout layout = layout_of_new();
  Fresh fresh;
  try {
    allocate_new(layout, fresh);
  } catch (const std::bad_alloc&) {
    release_fresh(fresh);
    fail_allocation();
  } catch (const std::length_error&) {  // of a list that would have been larger than memory
    release_fresh(fresh);
    fail_allocation();
  } catch (...) {
    release_fresh(fresh);
    throw;
  }
  hand_over(layout, fresh);
  for (size_t i = 0; i < params_.size(); ++i) set_update(i);  // the tables have moved
  lists_due_ = true;
  set_tables();
  flush();
  fill_new();
}

// Names the largest of the parameters whose arrays could not be allocated.
void Context::fail_allocation() const {
  size_t total = 0, most = 0, largest = 0, count = 0;
  for (size_t i = 0; i < params_.size(); ++i) {
    if (!lacks_arrays(params_[i])) continue;
    size_t bytes = 0;
    for (int kind = 0; kind < kArrays; ++kind) bytes = add_capped(bytes, bytes_of(i, kind));
    total = add_capped(total, bytes);
    ++count;
    if (bytes <= most) continue;
    most = bytes;
    largest = i;
  }
  if (most == 0) throw std::bad_alloc();
  fail(GA_ERROR_OUT_OF_MEMORY,
       "%zu bytes for the accumulators and the optimizer state of %zu parameters could not be "
       "allocated; parameter \"%s\" alone takes %zu",
       total, count, tensors_[largest].name.c_str(), most);
}

void Context::allocate_new(const Layout& layout, Fresh& f) {
  const size_t n = params_.size();
  accumulate_tasks_.reserve(n);
  told_.resize(n);
  if (config_.device != GA_DEVICE_CPU) moved_.reserve(3 * n);
  for (auto* list : {&plain_, &pieces_, &layers_, &norms_, &units_first_, &factored_first_,
                     &ids_[0], &ids_[1], &ids_[2]})
    list->reserve(n);
  arenas_.reserve(arenas_.size() + kArrays + 1);
  ranges_.reserve(ranges_.size() + kArrays + 1);
  f.units.resize(n);
  f.claimed.reserve(n);
  for (size_t i = 0; i < n; ++i) {
    const Param& p = params_[i];
    if (!lacks_arrays(p) || !has_master(i) || p.count == 0) continue;
    claims_.add(p.data, static_cast<size_t>(p.count) * 2, name(static_cast<ga_param>(i)));
    f.claimed.push_back(p.data);
  }

  backend_->reserve(
      owned_.chunks + layout.chunks, static_cast<int64_t>(n),
      static_cast<int64_t>(add_capped(owned_.bytes[kAccumulator], layout.bytes[kAccumulator])));
  std::copy(layout.bytes.begin(), layout.bytes.end(), f.bytes.begin());
  f.bytes[kPartials] = static_cast<size_t>(layout.chunks) * sizeof(Partial);
  for (size_t a = 0; a <= kPartials; ++a)
    if (f.bytes[a] > 0) f.base[a] = static_cast<char*>(backend_->allocate(f.bytes[a]));
  if (layout.scratch > scratch_bytes_) {
    f.scratch = backend_->allocate(layout.scratch);
    f.scratch_bytes = layout.scratch;
  }
  f.inputs = param_inputs_.grown(*backend_, n);
  f.states = param_states_.grown(*backend_, n);
  f.plans = plans_.grown(*backend_, n);
  f.composites = composites_.grown(*backend_, n);
  f.updates = updates_.grown(*backend_, n);
  f.measures = measures_.grown(*backend_, n);
  f.unit_tasks = units_.grown(*backend_, n);
  f.factors = factors_.grown(*backend_, n);
  for (size_t i = 0; i < n; ++i) {
    const Tensor& t = tensors_[i];
    if (!lacks_arrays(params_[i]) || params_[i].count == 0) continue;
    if (clip_of(params_[i]).scope == GA_CLIP_AGC)
      f.units[i][0] = new_units(t.shape, units_axes(i), true);
    const int op = op_of(params_[i]);
    if (op < 0 || !op_info(op).factored) continue;
    const Matrices m = matrices_of(t);
    const std::vector<int64_t> shape = {m.count, m.rows, m.columns};
    f.units[i][1] = new_units(shape, kRowSums, false);
    f.units[i][2] = new_units(shape, kColumnSums, false);
  }
  // The last that can fail: what a row set has of its rows.
  Layout l;
  std::array<size_t, kArrays> offset;
  for (size_t i = 0; i < n; ++i) {
    if (!lacks_arrays(params_[i])) continue;
    place(i, l, offset);
    if (bytes_of(i, kRowSet) == 0) continue;
    auto* const set = reinterpret_cast<RowSet*>(f.base[kRowSet] + offset[kRowSet]);
    char* const slots = f.base[kRowSlots] + offset[kRowSlots];
    backend_->write(&set->slots, &slots, sizeof slots);
  }
}

void Context::hand_over(const Layout& layout, Fresh& f) {
  std::swap(param_inputs_, f.inputs);
  std::swap(param_states_, f.states);
  std::swap(plans_, f.plans);
  std::swap(composites_, f.composites);
  std::swap(updates_, f.updates);
  std::swap(measures_, f.measures);
  std::swap(units_, f.unit_tasks);
  std::swap(factors_, f.factors);
  if (f.scratch) {
    std::swap(scratch_, f.scratch);
    std::swap(scratch_bytes_, f.scratch_bytes);
  }
  const auto base = f.base;
  for (size_t a = 0; a <= kPartials; ++a) {
    if (!base[a]) continue;
    arenas_.push_back({base[a], f.bytes[a]});
    const auto begin = reinterpret_cast<uintptr_t>(base[a]);
    add_range({begin, begin + f.bytes[a], -1});
  }
  f.base = {};
  f.claimed.clear();
  auto* partials = reinterpret_cast<Partial*>(base[kPartials]);
  Layout l;
  for (size_t i = 0; i < params_.size(); ++i) {
    Param& p = params_[i];
    Tensor& t = tensors_[i];
    if (!lacks_arrays(p)) continue;
    std::array<size_t, kArrays> offset = {};
    place(i, l, offset);
    p.owns = true;
    if (p.count == 0) continue;
    const auto at = [&](int kind) -> void* {
      const auto k = static_cast<size_t>(kind);
      return bytes_of(i, kind) > 0 ? base[k] + offset[k] : nullptr;
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
    p.master_due = p.master != nullptr;
    p.state_due = true;
    unfilled_ = true;
    t.units = std::move(f.units[i][0]);
    t.factor_rows = std::move(f.units[i][1]);
    t.factor_columns = std::move(f.units[i][2]);
  }
  release_fresh(f);  // what has been replaced
  for (size_t a = 0; a < kArrays; ++a) owned_.bytes[a] += layout.bytes[a];
  owned_.chunks += layout.chunks;
  prepared_ = params_.size();
  lacking_ = false;
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
  in.frozen = p.frozen || !p.owns;
  in.clamped = norm_after_value(p);
  in.by_units = by_units(id);
  in.lazy = t.options.rows == GA_ROWS_LAZY;
  in.average = p.average != nullptr;
  const bool bf16_state = groups_[static_cast<size_t>(p.group)].optimizer.state_dtype == GA_BF16;
  in.by_chance = t.options.rounding == GA_ROUND_STOCHASTIC || bf16_state ||
                 (in.average && average_of(p).format == GA_BF16);

  updates_.edit(i) = measures_.edit(i) = {};
  units_.edit(i) = {};
  factors_.edit(i) = {};
  composites_.edit(i) = {};
  if (!p.owns) return;

  Composites& composites = composites_.edit(i);
  composites.pair = {p.accumulator, t.low, p.accumulator_dtype};
  composites.sparse = {p.accumulator, columns, t.set};

  UpdateTask& update = updates_.edit(i);
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
