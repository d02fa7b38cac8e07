// SPDX-License-Identifier: Apache-2.0
#include "param.hpp"

#include "tensor.hpp"

namespace ga {
namespace {

size_t size_of(int32_t dtype) { return static_cast<size_t>(dtype_info(dtype).size); }

int op_of(const Param& p, const Group& g) { return g.op[p.matrix ? 1 : 0]; }

}  // namespace

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

Matrices matrices_of(const Tensor& t) {
  const size_t rank = t.shape.size();
  Matrices m = {t.shape[rank - 2], t.shape[rank - 1], 1};
  for (size_t d = 0; d + 2 < rank; ++d) m.count *= t.shape[d];
  return m;
}

size_t data_bytes(const Param& p) { return static_cast<size_t>(p.count) * size_of(p.dtype); }

int32_t state_format(const Param& p, const Group& g) {
  return p.f64 ? GA_F64 : g.optimizer.state_dtype == GA_BF16 ? GA_BF16 : GA_F32;
}

int32_t average_format(const Param& p, const std::optional<ga_ema>& ema) {
  return p.f64 ? GA_F64 : ema && ema->dtype == GA_BF16 ? GA_BF16 : GA_F32;
}

bool has_master(const Param& p, const Tensor& t, const Group& g) {
  return size_of(p.dtype) == 2 && t.options.master == GA_MASTER_F32 && op_of(p, g) >= 0;
}

OwnedArrays arrays_of(const Param& p, const Tensor& t, const Group& g, int32_t accumulation,
                      const std::optional<ga_ema>& ema) {
  OwnedArrays arrays;
  if (p.count == 0) return arrays;
  const auto add = [&](int kind, const char* name, int32_t format, int64_t count, size_t bytes,
                       double initial = 0) {
    constexpr size_t kLine = 64;
    const size_t padded = kind == kPartials ? bytes : (bytes + kLine - 1) / kLine * kLine;
    arrays.list[arrays.size++] = {kind, format, count, padded, initial, name};
  };
  const auto numbers = [&](int kind, const char* name, int32_t format, int64_t count) {
    add(kind, name, format, count, static_cast<size_t>(count) * size_of(format));
  };
  numbers(kAccumulator, "grad_accum", p.accumulator_dtype, p.count);
  if (accumulation == GA_ACCUMULATE_COMPENSATED && size_of(p.accumulator_dtype) == 2)
    numbers(kLow, "grad_accum_low", p.accumulator_dtype, p.count);

  const int op = op_of(p, g);
  if (op >= 0 && op_info(op).factored) {
    const Matrices m = matrices_of(t);
    const char* const* const names = op_info(op).slot_names.of;
    numbers(kState, names[0], p.real(), m.count * m.rows);
    numbers(kState + 1, names[1], p.real(), m.count * m.columns);
    numbers(kState + 2, nullptr, p.real(), m.count);  // OuterProduct::scales
  } else if (op >= 0 && op_info(op).row_state) {
    add(kState, op_info(op).slot_names.of[0], p.real(), t.rows,
        static_cast<size_t>(t.rows) * size_of(p.real()), g.info->initial(g.optimizer, 0));
  } else if (op >= 0) {
    const int32_t format = state_format(p, g);
    // Kernels that compute in double go by groups of two cache lines.
    const int64_t room = format == GA_F64 ? (p.count + 15) / 16 * 16 : p.count;
    for (int k = 0; k < op_info(op).slots; ++k)
      add(kState + k, op_info(op).slot_names.of[k], format, p.count,
          static_cast<size_t>(room) * size_of(format), g.info->initial(g.optimizer, k));
  }
  if (has_master(p, t, g)) numbers(kMaster, "master", GA_F32, p.count);
  if (ema) numbers(kAverage, "ema", average_format(p, ema), p.count);
  if (t.options.rows != GA_ROWS_NONE) {
    add(kRowSlots, nullptr, 0, t.rows, static_cast<size_t>(t.rows) * sizeof(uint32_t));
    add(kRowSet, nullptr, 0, 1, sizeof(RowSet));
  }
  const int64_t chunks = chunk_count(p.count);
  add(kPartials, nullptr, 0, chunks, static_cast<size_t>(chunks) * sizeof(Partial));
  return arrays;
}

void set_array(Param& p, Tensor& t, int kind, void* data) {
  if (kind == kAccumulator) p.accumulator = data;
  if (kind == kLow) t.low = data;
  if (kind >= kState && kind < kMaster) p.state[kind - kState] = data;
  if (kind == kMaster) p.master = data;
  if (kind == kAverage) p.average = data;
  if (kind == kRowSet) t.set = static_cast<RowSet*>(data);  // its slots are RowSet::slots
  if (kind == kPartials) p.partials = static_cast<Partial*>(data);
  p.pair = t.low != nullptr;
  p.master_due = p.master_due || kind == kMaster;
}

}  // namespace ga
