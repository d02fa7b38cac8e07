// SPDX-License-Identifier: Apache-2.0
// The arrays that the library owns for its parameters: how large, where, and what they begin with. Which
// arrays a parameter has is the list of param.hpp.
#include <algorithm>
#include <stdexcept>

#include "context.hpp"
#include "error.hpp"
#include "tensor.hpp"

namespace ga {
namespace {

// Axes of (matrices, rows, columns) that the sums of a factored second moment are taken over.
constexpr uint32_t kRowSums = 4, kColumnSums = 2;

// Sizes stay below what no address space holds.
size_t add_capped(size_t a, size_t b) {
  constexpr auto kMost = static_cast<size_t>(INT64_MAX);
  return a > kMost || b > kMost - a ? kMost : a + b;
}

// The field of ga_memory that counts a kind of array.
int64_t ga_memory::*purpose_of(size_t kind) {
  if (kind == kAccumulator || kind == kLow) return &ga_memory::accumulators;
  if (kind == kMaster) return &ga_memory::masters;
  if (kind == kAverage) return &ga_memory::averages;
  if (kind == kRowSlots || kind == kRowSet) return &ga_memory::rows;
  return kind == kPartials ? &ga_memory::workspace : &ga_memory::optimizer_state;
}

// Whether memory that is given when it is written has been given for an array.
bool is_written(const Param& p, const OwnedArray& a) {
  if (a.kind == kAccumulator || a.kind == kLow) return p.accumulator_written;
  if (a.kind == kAverage) return p.average_written;
  if (a.kind >= kState && a.kind < kMaster) return p.state_written || a.initial != 0;
  return true;
}

}  // namespace

OwnedArrays Context::arrays_of(size_t i) const {
  return ga::arrays_of(params_[i], params_.tensor(i), params_.group_of(params_[i]),
                       config_.accumulation, ema_);
}

Array Context::state_of(const Param& p, int slot) const {
  return {p.state[slot], state_format(p, params_.group_of(p))};
}

Array Context::average_of(const Param& p) const { return {p.average, average_format(p, ema_)}; }

// f(which, pattern, both) for each of the Units that a parameter has or is going to have.
template <class F>
void Context::each_units(size_t i, F&& f) const {
  const Param& p = params_[i];
  const Tensor& t = params_.tensor(i);
  if (p.count == 0) return;
  if (params_.clip_of(p).scope == GA_CLIP_AGC)
    f(Tensor::kClipUnits, units_of(t.shape, params_.units_axes(i)), true);
  const int op = params_.op_of(p);
  if (op >= 0 && op_info(op).row_state) {
    UnitPattern rows = units_of({t.rows, p.count / t.rows}, 2);
    if (t.rows == 1) rows.pieces = 1;  // a row is summed as a whole, also when it is updated lazily
    f(Tensor::kFactorRows, rows, false);
  }
  if (op < 0 || !op_info(op).factored) return;
  const Matrices m = matrices_of(t);
  const std::vector<int64_t> shape = {m.count, m.rows, m.columns};
  f(Tensor::kFactorRows, units_of(shape, kRowSums), false);
  f(Tensor::kFactorColumns, units_of(shape, kColumnSums), false);
}

// f(array, offset) for each of a parameter's arrays, placed in the arena of its kind behind what l holds.
// One kernel walks them all together with the parameter. Where the addresses of two streams are nearly
// alike in their low 12 bits, a core takes the load of one for depending on the store to the other
// (measured: half the speed), so the arrays of a large parameter lie 17 cache lines apart within a page,
// counted from it.
template <class F>
void Context::place(size_t i, Layout& l, F&& f) const {
  constexpr size_t kLine = 64, kPage = 4096, kApart = 17 * kLine, kLarge = size_t{1} << 20;
  const Param& p = params_[i];
  size_t apart = 0;
  for (const OwnedArray& a : arrays_of(i)) {
    size_t& end = l.bytes[static_cast<size_t>(a.kind)];
    size_t offset = end;
    apart += kApart;
    if (a.bytes >= kLarge && a.kind != kPartials) {
      const size_t wanted = reinterpret_cast<uintptr_t>(p.data) / kLine * kLine + apart;
      offset += (wanted - offset) % kPage;
    }
    end = add_capped(offset, a.bytes);
    f(a, offset);
  }
  const int op = params_.op_of(p);
  if (op < 0 || !op_info(op).emits || p.count == 0) return;
  int64_t elements = 0;
  if (!p.fits_accumulator()) elements = p.count;
  if (op_info(op).orthogonal)
    elements +=
        OrthogonalizeTask::scratch_size(params_.tensor(i).rows, p.count / params_.tensor(i).rows);
  l.scratch = std::max(l.scratch, static_cast<size_t>(elements) * (p.f64 ? 8 : 4));
}

Context::Layout Context::layout_of_new() const {
  Layout l;
  for (size_t i = 0; i < params_.size(); ++i)
    if (params_[i].lacks_arrays()) place(i, l, [](const OwnedArray&, size_t) {});
  return l;
}

// ---- Accounting ---------------------------------------------------------------------------------

// Whether windows with these options never write the parameter's accumulator, because its one gradient
// is read where the program has it. On the CPU, memory that is never written is never given.
bool Context::never_stores(size_t i) const {
  const Param& p = params_[i];
  const int op = params_.op_of(p);
  return params_.tensor(i).options.rows == GA_ROWS_NONE && adopts_ && !config_.allocate &&
         config_.accum_steps == 1 && phases_.empty() && config_.device == GA_DEVICE_CPU &&
         !p.accumulator_written && op >= 0 && !op_info(op).emits && p.fits_accumulator();
}

// Whether memory is given when it is written.
bool Context::gives_on_demand() const {
  return config_.device == GA_DEVICE_CPU && !config_.allocate;
}

ga_memory Context::memory() const {
  ga_memory m = {};
  const auto add = [](int64_t& sum, size_t bytes) {
    sum = static_cast<int64_t>(add_capped(static_cast<size_t>(sum), bytes));
  };
  const Layout fresh = layout_of_new();
  const bool on_demand = gives_on_demand();
  int64_t planned = 0;  // of what follows, not resident yet
  for (size_t kind = 0; kind < kArrayKinds; ++kind) {
    add(m.*purpose_of(kind), add_capped(owned_.bytes[kind], fresh.bytes[kind]));
    add(planned, fresh.bytes[kind]);
  }
  for (size_t i = 0; i < params_.size(); ++i) {
    const Param& p = params_[i];
    if (!p.owns && p.frozen) continue;
    const bool stores = !never_stores(i);
    for (const OwnedArray& a : arrays_of(i)) {
      const auto bytes = static_cast<int64_t>(a.bytes);
      if (a.kind == kAccumulator && !stores) {
        m.accumulators -= bytes;
        if (!p.owns) planned -= bytes;
      } else if (p.owns && on_demand && !is_written(p, a)) {
        planned += bytes;
      }
    }
    each_units(i, [&](int, const UnitPattern& pattern, bool both) {
      const auto bytes = static_cast<int64_t>(Units::bytes(pattern, both) + sizeof(UnitPattern));
      m.workspace += bytes;
      if (!p.owns) planned += bytes;
    });
  }
  const int64_t chunks = owned_.chunks() + fresh.chunks();
  const auto scratch = static_cast<int64_t>(scratch_.bytes());
  const int64_t more_scratch = std::max<int64_t>(static_cast<int64_t>(fresh.scratch) - scratch, 0);
  m.workspace += backend_->table_bytes(chunks) + scratch + more_scratch +
                 bytes_of_lists(params_.size()) +
                 ContextTables::bytes(params_.groups.size(), params_.size());
  planned += backend_->table_bytes(chunks) - backend_->table_bytes(owned_.chunks()) + more_scratch +
             bytes_of_lists(params_.size()) - bytes_of_lists(prepared_) +
             ContextTables::bytes(0, params_.size()) - ContextTables::bytes(0, prepared_);
  for (const Group& g : params_.groups) m.workspace += g.rates.bytes();
  m.workspace +=
      micro_partials_.bytes() + micro_plans_.bytes() +
      static_cast<int64_t>(contributions_.capacity() *
                           (sizeof(Contribution) + sizeof(MicroInput) + sizeof(NormTask)));
  m.rows += backend_->row_bytes();
  m.averages += static_cast<int64_t>(ema_kept_.bytes());
  m.batch_norm = batch_norms_.bytes();
  m.workspace += backend_->bn_bytes() + batch_norms_.inputs().bytes();
  for (const int64_t bytes : {m.accumulators, m.optimizer_state, m.workspace, m.masters, m.averages,
                              m.rows, m.batch_norm})
    add(m.total, static_cast<size_t>(bytes));
  m.resident = m.total - planned;
  return m;
}

// Bytes of the working lists for so many parameters, and of what the host knows of them.
int64_t Context::bytes_of_lists(size_t params) const {
  const size_t words = config_.device == GA_DEVICE_CPU ? 0 : 3 * sizeof(Word);
  return static_cast<int64_t>(params * (sizeof(Param) + sizeof(Tensor) + sizeof(Source) +
                                        sizeof(AccumulateTask) + 9 * sizeof(ga_param) + words));
}

// ---- Allocation ---------------------------------------------------------------------------------

// What prepare() has allocated and not yet handed over to the parameters.
struct Context::NewArrays {
  Made made;
  Buffer scratch;
  std::vector<std::array<std::unique_ptr<Units>, Tensor::kUnits>> units;  // by parameter
  ContextTables tables;
};

// Called after the last check of a call that contributes, so that no other call leaves arrays behind.
void Context::prepare() {
  if (lacking_) make_arrays();
  if (unfilled_) fill_new();
}

// Gives every parameter that is not frozen its arrays, if it has none yet: all of them or, if this throws,
// none. Throws if memory runs out, or if another context has master weights for the same memory.
void Context::make_arrays() {
  if (!lacking_) return;
  check_device();
  NewArrays fresh;
  try {
    allocate_new(fresh);
  } catch (const std::bad_alloc&) {
    fail_allocation();
  } catch (const std::length_error&) {  // of a list that would have been larger than memory
    fail_allocation();
  }
  hand_over(fresh);
  for (size_t i = 0; i < params_.size(); ++i) describe(i);  // the tables have moved
  lists_due_ = true;
  set_tables();
  flush();
}

// Names the largest of the parameters whose arrays could not be allocated.
void Context::fail_allocation() const {
  size_t total = 0, most = 0, largest = 0, count = 0;
  for (size_t i = 0; i < params_.size(); ++i) {
    if (!params_[i].lacks_arrays()) continue;
    size_t bytes = 0;
    for (const OwnedArray& a : arrays_of(i))
      if (a.kind != kPartials) bytes = add_capped(bytes, a.bytes);
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
       total, count, params_.tensor(largest).name, most);
}

void Context::allocate_new(NewArrays& fresh) {
  const size_t n = params_.size();
  accumulate_tasks_.reserve(n);
  told_.resize(n);
  if (config_.device != GA_DEVICE_CPU) moved_.reserve(3 * n);
  for (auto* list : {&plain_, &pieces_, &layers_, &norms_, &units_first_, &factored_first_,
                     &ids_[0], &ids_[1], &ids_[2], &noted_})
    list->reserve(n);
  made_.reserve(made_.size() + 1);
  ranges_.reserve_more(kArrayKinds);

  fresh.made.layout = layout_of_new();
  const auto& bytes = fresh.made.layout.bytes;
  backend_->reserve(
      owned_.chunks() + fresh.made.layout.chunks(), static_cast<int64_t>(n),
      static_cast<int64_t>(add_capped(owned_.bytes[kAccumulator], bytes[kAccumulator])));
  for (size_t k = 0; k < kArrayKinds; ++k)
    if (bytes[k] > 0) fresh.made.arenas[k] = Buffer(*backend_, bytes[k]);
  if (fresh.made.layout.scratch > scratch_.bytes())
    fresh.scratch = Buffer(*backend_, fresh.made.layout.scratch);
  fresh.tables = tables_.grown(*backend_, ContextTables::kParam, n);
  fresh.units.resize(n);
  Layout l;
  for (size_t i = 0; i < n; ++i) {
    if (!params_[i].lacks_arrays()) continue;
    each_units(i, [&](int which, const UnitPattern& pattern, bool both) {
      fresh.units[i][static_cast<size_t>(which)] =
          std::make_unique<Units>(*backend_, pattern, both);
    });
    char* slots = nullptr;
    place(i, l, [&](const OwnedArray& a, size_t offset) {
      char* const at =
          static_cast<char*>(fresh.made.arenas[static_cast<size_t>(a.kind)].data()) + offset;
      if (a.kind == kRowSlots) slots = at;
      if (a.kind == kRowSet)
        backend_->write(&reinterpret_cast<RowSet*>(at)->slots, &slots, sizeof slots);
    });
  }
  claim_masters();
}

// Claims the parameters whose master weights are new: all of them or, if this throws, none.
void Context::claim_masters() {
  const auto is_new = [&](const Param& p, size_t i) {
    return p.lacks_arrays() && p.count > 0 && has_master(p, params_.tensor(i), params_.group_of(p));
  };
  size_t i = 0;
  try {
    for (; i < params_.size(); ++i)
      if (const Param& p = params_[i]; is_new(p, i))
        claims_.add(p.data, static_cast<size_t>(p.count) * 2, params_.name(i));
  } catch (...) {
    while (i-- > 0)
      if (is_new(params_[i], i)) claims_.remove(params_[i].data);
    throw;
  }
}

void Context::hand_over(NewArrays& fresh) {
  tables_.swap(fresh.tables, ContextTables::kParam);
  if (fresh.scratch.data()) scratch_.swap(fresh.scratch);
  Layout l;
  for (size_t i = 0; i < params_.size(); ++i) {
    Param& p = params_[i];
    if (!p.lacks_arrays()) continue;
    place(i, l, [&](const OwnedArray& a, size_t offset) {
      const Buffer& arena = fresh.made.arenas[static_cast<size_t>(a.kind)];
      set_array(p, params_.tensor(i), a.kind, static_cast<char*>(arena.data()) + offset);
    });
    p.owns = true;
    params_.tensor(i).made_by = made_.size();
    ++fresh.made.params;
    p.state_due = p.count > 0;
    unfilled_ = unfilled_ || p.state_due;
    std::move(fresh.units[i].begin(), fresh.units[i].end(), params_.tensor(i).units);
  }
  for (size_t k = 0; k < kArrayKinds; ++k) {
    owned_.bytes[k] += fresh.made.layout.bytes[k];
    if (const Buffer& arena = fresh.made.arenas[k]; arena.data())
      ranges_.add(arena.data(), arena.bytes());
  }
  made_.push_back(std::move(fresh.made));
  prepared_ = params_.size();
  lacking_ = false;
}

// Takes a parameter's arrays away, and frees those that were made with them if no parameter has any left.
void Context::free_arrays(size_t i) {
  Param& p = params_[i];
  Tensor& t = params_.tensor(i);
  Made& made = made_[t.made_by];
  for (const OwnedArray& a : arrays_of(i)) {  // what was never written takes no memory
    if (!gives_on_demand() || is_written(p, a)) continue;
    owned_.bytes[static_cast<size_t>(a.kind)] -= a.bytes;
    made.layout.bytes[static_cast<size_t>(a.kind)] -= a.bytes;
  }
  if (t.set) backend_->free_rows(t.set);
  for (int kind = 0; kind < kArrayKinds; ++kind) set_array(p, t, kind, nullptr);
  for (auto& units : t.units) units.reset();
  p.owns = p.state_due = p.master_due = false;
  if (--made.params > 0) return;
  for (size_t k = 0; k < kArrayKinds; ++k) {
    if (!made.arenas[k].data()) continue;
    ranges_.remove(made.arenas[k].data());
    owned_.bytes[k] -= made.layout.bytes[k];
    made.arenas[k] = Buffer();
  }
}

// from without data: the constant.
void Context::fill(const Param& p, const Array& from, double constant, const Array& to,
                   int64_t count) {
  FinishTask task = {};
  task.gradient = identity({from.data, from.format, 1, nullptr});
  task.constant = constant;
  task.f64 = p.f64;
  task.target = to;
  task.count = count;
  backend_->finish({&task, 1});
}

void Context::fill_state(const Param& p, const OwnedArray& a) {
  fill(p, {nullptr, GA_F32}, a.initial, {p.state[a.kind - kState], a.format}, a.count);
}

// Fills new arrays whose initial value is not zero, and copies parameters to their master weights. If this
// fails, the next call does the rest.
void Context::fill_new() {
  for (size_t i = 0; i < prepared_; ++i) {
    Param& p = params_[i];
    if (p.master_due) copy(p, {p.data, p.dtype}, {p.master, GA_F32});
    p.master_due = false;
    if (!p.state_due) continue;
    for (const OwnedArray& a : arrays_of(i))
      if (a.initial != 0) fill_state(p, a);
    p.state_due = false;
  }
  unfilled_ = false;
}

}  // namespace ga
