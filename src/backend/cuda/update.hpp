// SPDX-License-Identifier: Apache-2.0
// Kernels of the update of parameters and state: one for each Op and pass. Included by the files
// that instantiate update() and measure(), for float and for double.
#pragma once

#include "backend/cuda/kernels.hpp"
#include "backend/cuda/loops.hpp"
#include "backend/cuda/units.hpp"
#include "ops/all.hpp"

namespace ga::cuda {

template <class Op, bool kMeasuring>
constexpr Pass pass_of = kMeasuring ? Op::measuring : Op::updating;
// State values that a pass works on.
template <class Op, bool kMeasuring>
constexpr int kSlotsOf =
    !(pass_of<Op, kMeasuring>.reads_state || pass_of<Op, kMeasuring>.writes_state) ? 0
    : Op::factored                                                                 ? 1
                                                                                   : Op::slots;

template <class Op>
GA_DEVICE Op op_of(const ParamPlan& plan) {
  return *reinterpret_cast<const Op*>(plan.folded.bytes);
}

// f(l, slots) for each of four elements, whose state is s.
template <int kSlots, class T, class F>
GA_DEVICE void each_element(Four<T>* s, F f) {
  for (int l = 0; l < 4; ++l) {
    T slots[kSlots + 1];
    for (int k = 0; k < kSlots; ++k) slots[k] = s[k].x[l];
    f(l, slots);
    for (int k = 0; k < kSlots; ++k) s[k].x[l] = slots[k];
  }
}

template <class Op, class T>
GA_DEVICE void update_four(const Op& op, const View<T>& view, const Four<T>& g, Four<T>& p,
                           Four<T>* s) {
  each_element<kSlotsOf<Op, false>>(s, [&](int l, T* slots) {
    p.x[l] = op(p.x[l], Op::updating.gradient ? view(g.x[l]) : T(0), slots);
  });
}

// x: what the Op takes norms of.
template <class Op, class T>
GA_DEVICE void measure_four(const Op& op, const View<T>& view, const Four<T>& g, const Four<T>& p,
                            Four<T>* s, Four<T> (&x)[2]) {
  each_element<kSlotsOf<Op, true>>(s, [&](int l, T* slots) {
    T norms[2] = {};
    op.measure(p.x[l], Op::measuring.gradient ? view(g.x[l]) : T(0), slots, norms);
    for (int k = 0; k < 2; ++k) x[k].x[l] = norms[k];
  });
}

// ---- Arrays of any format -----------------------------------------------------------------------

// Moves what follows a parameter: its rounded copy, if copied, and its moving average, if averaged.
// The elements are [first + i, first + i + count).
template <class T>
GA_APART void follow(const UpdateTask& task, const ParamPlan& plan, bool copied, bool averaged,
                     int64_t first, int i, int count, Four<T> p) {
  const int64_t index = task.first + first;
  if (copied && task.copy.data)
    Writer<T>(task.copy, first, {task.stochastic, plan.copy_key}, index)(i, count, p);
  if (!averaged || !task.average.data) return;
  const T gain = static_cast<T>(plan.average_gain);
  Four<T> e = Reader<T>(task.average, first)(i, count);
  for (int l = 0; l < 4; ++l) e.x[l] += gain * (p.x[l] - e.x[l]);
  Writer<T>(task.average, first, {true, plan.state_key + kMaxSlots}, index)(i, count, e);
}

// UpdateTask::follows, for a thread's share of the elements [first, first + count), as in update_any().
GA_APART inline void follow_data(const UpdateTask& task, int64_t first, int count, int from,
                                 int step) {
  const bool bf16 = task.copy.format == GA_BF16;
  float* const masters = global(static_cast<float*>(task.param.data) + first);
  const uint16_t* const copy = global(static_cast<const uint16_t*>(task.copy.data) + first);
  GA_ROLLED
  for (int i = from; i < count; i += step)
    for (int l = i; l < i + 4 && l < count; ++l)
      if (to_16(masters[l], bf16) != copy[l]) masters[l] = from_16(copy[l], bf16);
}

GA_DEVICE void follow_data(Block& block, const UpdateTask& task, int64_t first, int count) {
  if (!task.follows) return;
  block.each([&](int thread) { follow_data(task, first, count, 4 * thread, 4 * kThreads); });
}

// The arrays of an update from element `first` of the parameter on. source: the gradient's.
template <class Op, bool kMeasuring>
struct AnyArrays {
  using T = typename Op::Real;
  static constexpr Pass pass = pass_of<Op, kMeasuring>;
  static constexpr int kSlots = kSlotsOf<Op, kMeasuring>;
  static constexpr int kAhead = 1;
  const UpdateTask& task;
  const ParamPlan& plan;
  int64_t first;
  Reader<T> gradient, param, state[kSlots + 1];

  GA_DEVICE AnyArrays(const UpdateTask& task, const ParamPlan& plan, const Source& source,
                      int64_t first)
      : task(task),
        plan(plan),
        first(first),
        gradient(source, task.first + first),
        param(task.param, first) {
    for (int k = 0; k < kSlots; ++k) state[k] = Reader<T>(task.state[k], first);
  }

  GA_DEVICE void load(int i, int count, Four<T>& g, Four<T>& p, Four<T>* s) const {
    typename Reader<T>::Raw raw_g = {}, raw_p = {}, raw_s[kSlots + 1];
    if (pass.gradient) raw_g = gradient.fetch(i, count);
    if (pass.parameter) raw_p = param.fetch(i, count);
    for (int k = 0; k < kSlots; ++k) raw_s[k] = state[k].fetch(i, count);
    g = gradient.unpack(raw_g, count);
    p = param.unpack(raw_p, count);
    for (int k = 0; k < kSlots; ++k) s[k] = state[k].unpack(raw_s[k], count);
  }

  GA_DEVICE void store_state(int i, int count, const Four<T>* s) const {
    if (!pass.writes_state) return;
    const int64_t index = task.first + first;
    if (task.state[0].format == native<T>) {
      for (int k = 0; k < kSlots; ++k)
        Writer<T>(task.state[k], first, kNearest, index)(i, count, s[k]);
      return;
    }
    for (int k = 0; k < kSlots; k += 2) {
      const uint64_t key = plan.state_key + static_cast<uint64_t>(k);
      if (k + 1 < kSlots)
        store_bf16_pair<T>(task.state[k].data, task.state[k + 1].data, first, i, count, s[k],
                           s[k + 1], key, static_cast<uint64_t>(index + i));
      else
        store_packed<T>(task.state[k].data, GA_BF16, first, i, count, s[k], {true, key},
                        static_cast<uint64_t>(index + i));
    }
  }

  GA_DEVICE void emit(int i, int count, const Four<T>& x) const {
    T* const to = static_cast<T*>(task.emitted) + first;
    store_some<T, native<T>>(to, is_aligned(to, native<T>), i, count, x);
  }
};

// A thread's share of the elements [first, first + count): four elements from each of from, from +
// step, ... on. rows: they are of a row that has a gradient; their average is moved elsewhere.
template <class Op>
GA_APART void update_any(const UpdateTask& task, const ParamPlan& plan, bool rows, int64_t first,
                         int count, int from, int step) {
  using T = typename Op::Real;
  const Op op = op_of<Op>(plan);
  const View<T> view(task.gradient);
  Source source = task.gradient.source;
  if (source.format == kSparse && rows) {  // the row is held
    source.data = static_cast<const SparseRows*>(source.data)->data;
    source.format = native<T>;
  }
  const AnyArrays<Op, false> at(task, plan, source, first);
  const Writer<T> store(task.param, first, {task.stochastic, plan.copy_key}, task.first + first);
  GA_ROLLED
  for (int i = from; i < count; i += step) {
    const int m = count - i < 4 ? count - i : 4;
    Four<T> g, p, s[kSlotsOf<Op, false> + 1];
    at.load(i, m, g, p, s);
    update_four(op, view, g, p, s);
    at.store_state(i, m, s);
    const Four<T> stored = store(i, m, p);
    if (task.copy.data || task.average.data) {  // the average follows the parameter as stored
      const bool averaged = task.average.data && !rows;
      follow<T>(task, plan, true, averaged, first, i, m, averaged ? stored : p);
    }
  }
}

// A thread's share of the averages of the elements [first, first + count) of a parameter, as in update_any().
template <class T>
GA_DEVICE void move_average(const UpdateTask& task, const ParamPlan& plan, int64_t first, int count,
                            int from, int step) {
  const Reader<T> param(task.param, first);
  GA_ROLLED
  for (int i = from; i < count; i += step) {
    const int m = count - i < 4 ? count - i : 4;
    follow<T>(task, plan, false, true, first, i, m, param(i, m));
  }
}

// What a step does to a parameter that no Op moves: its average follows it, and its gradient goes
// to the program.
template <class T>
GA_APART void follow_any(const UpdateTask& task, const ParamPlan& plan, int64_t first, int count,
                         int from, int step) {
  if ((plan.actions & kFollow) != 0 && task.average.data)
    move_average<T>(task, plan, first, count, from, step);
  if ((plan.actions & kDeliver) != 0 && task.delivered.data) {
    const View<T> view(task.gradient);
    const Reader<T> gradient(task.gradient.source, task.first + first);
    const Writer<T> delivered(task.delivered, first, kNearest, first);
    GA_ROLLED
    for (int i = from; i < count; i += step) {
      const int m = count - i < 4 ? count - i : 4;
      Four<T> x = {};
      if (task.gradient.source.data) {
        x = gradient(i, m);
        for (T& value : x.x) value = view(value);
      }
      delivered(i, m, x);
    }
  }
}

// Measures a thread's share of the n elements of a tile; the arrays have its first element at
// `first`.
template <class Op, class Arrays, class T>
GA_DEVICE SquaresOf<T, Op::norms, double> measure_tile(const Arrays& at, const Op& op,
                                                       const View<T>& view, int first, int n,
                                                       int q) {
  SquaresOf<T, Op::norms, double> squares;
  struct Loaded {
    Four<T> g, p, s[Arrays::kSlots + 1];
  };
  const auto load = [&](int i, int count) {
    Loaded x;
    at.load(first + i, count, x.g, x.p, x.s);
    return x;
  };
  const auto use = [&](int i, int count, Loaded loaded) {
    Four<T> x[2];
    measure_four(op, view, loaded.g, loaded.p, loaded.s, x);
    at.store_state(first + i, count, loaded.s);
    for (int k = 0; k < Op::norms; ++k) squares.of[k].add(x[k], count);
    if (Op::emits) at.emit(first + i, count, x[0]);
  };
  if constexpr (Arrays::kAhead > 1)
    each_step_ahead<Arrays::kAhead>(n, q, load, use);
  else
    each_step(n, q, [&](int i, int count) { use(i, count, load(i, count)); });
  return squares;
}

template <class Op>
GA_APART SquaresOf<typename Op::Real, Op::norms, double> measure_any(const UpdateTask& task,
                                                                     const ParamPlan& plan,
                                                                     int64_t first, int n, int q) {
  const AnyArrays<Op, true> at(task, plan, task.gradient.source, first);
  const View<typename Op::Real> view(task.gradient);
  return measure_tile(at, op_of<Op>(plan), view, 0, n, q);
}

// ---- Arrays of floats ---------------------------------------------------------------------------

// The addresses for an update whose arrays are all floats and aligned, from a chunk's first element
// on. Only the gradient may have another dtype, kGradient, and the rounded copy 16 bits, if it is rounded
// to nearest.
template <class Op, bool kMeasuring, int32_t kGradient = GA_F32>
struct Floats {
  static constexpr Pass pass = pass_of<Op, kMeasuring>;
  static constexpr int kSlots = kSlotsOf<Op, kMeasuring>;
  static constexpr int kArrays = (pass.gradient ? 1 : 0) + (pass.parameter ? 1 : 0) + kSlots;
  static constexpr int kAhead = kArrays == 1 ? 4 : kArrays == 2 ? 2 : 1;  // 64 bytes of f32
  const void* gradient;
  float* param;
  float* state[kSlots + 1];
  void* copy;
  float* average;
  float* emitted;
  int32_t copy_format;

  GA_DEVICE static bool fits(const Array& a, int64_t first) {
    return is_whole<GA_F32>(a.data, a.format, first);
  }

  // Returns whether the arrays are so.
  GA_DEVICE bool open(const UpdateTask& task, int64_t first) {
    bool good = true;
    if (pass.gradient) {
      const Source& g = task.gradient.source;
      good = is_whole<kGradient>(g.data, g.format, task.first + first);
      gradient = advanced(g.data, kGradient, task.first + first);
    }
    if (pass.parameter) {
      good = good && fits(task.param, first);
      param = static_cast<float*>(task.param.data) + first;
    }
    for (int k = 0; k < kSlots; ++k) {
      good = good && fits(task.state[k], first);
      state[k] = static_cast<float*>(task.state[k].data) + first;
    }
    if (kMeasuring) {
      if (!Op::emits) return good;
      emitted = static_cast<float*>(task.emitted) + first;
      return good && is_aligned(emitted, GA_F32);
    }
    copy_format = task.copy.format;
    copy = nullptr;
    if (task.copy.data) {
      copy = advanced(task.copy.data, copy_format, first);
      good = good && is_aligned(copy, copy_format) && (copy_format == GA_F32 || !task.stochastic);
    }
    average = nullptr;
    if (task.average.data) {
      good = good && fits(task.average, first);
      average = static_cast<float*>(task.average.data) + first;
    }
    return good;
  }

  GA_DEVICE void load(int i, int count, Four<float>& g, Four<float>& p, Four<float>* s) const {
    g = p = {};
    if (pass.gradient) g = load_some<float, kGradient>(gradient, true, i, count);
    if (pass.parameter) p = load_some<float, GA_F32>(param, true, i, count);
    for (int k = 0; k < kSlots; ++k) s[k] = load_some<float, GA_F32>(state[k], true, i, count);
  }

  GA_DEVICE void store_state(int i, int count, const Four<float>* s) const {
    for (int k = 0; pass.writes_state && k < kSlots; ++k)
      store_some<float, GA_F32>(state[k], true, i, count, s[k]);
  }

  GA_DEVICE void emit(int i, int count, const Four<float>& x) const {
    store_some<float, GA_F32>(emitted, true, i, count, x);
  }
};

template <class Op, int32_t kGradient>
GA_DEVICE void update_floats(const Floats<Op, false, kGradient>& at, const Op& op,
                             const View<float>& view, float gain, int i) {
  Four<float> g, p, s[Floats<Op, false>::kSlots + 1];
  at.load(i, 4, g, p, s);
  update_four(op, view, g, p, s);
  at.store_state(i, 4, s);
  store_whole<float, GA_F32>(at.param, i, p);
  if (at.copy) {
    if (at.copy_format == GA_BF16)
      store_whole<float, GA_BF16>(at.copy, i, p);
    else if (at.copy_format == GA_F16)
      store_whole<float, GA_F16>(at.copy, i, p);
    else
      store_whole<float, GA_F32>(at.copy, i, p);
  }
  if (at.average) {
    Four<float> e = load_whole<float, GA_F32>(at.average, i);
    for (int l = 0; l < 4; ++l) e.x[l] += gain * (p.x[l] - e.x[l]);
    store_whole<float, GA_F32>(at.average, i, e);
  }
}

// ---- Kernels ------------------------------------------------------------------------------------

// The pieces of a list's chunks, in order: `whole` chunks, then each of the others in 1 << shift parts.
struct Pieces {
  int32_t whole, count;
  int32_t shift;
};

// Of `chunks` chunks, where the device holds `held` blocks at a time. It starts a block when another one ends. If
// less than half of these places have a chunk in the last round, the chunks of that round are cut to fill them,
// since a few blocks do not keep the memory busy.
inline Pieces pieces_of(int64_t chunks, int64_t held) {
  constexpr int kMostShift = 3;
  const auto last = static_cast<int32_t>(chunks % held);
  Pieces pieces = {static_cast<int32_t>(chunks) - last, 0, 0};
  while (pieces.shift < kMostShift && (2 * last) << pieces.shift <= held) ++pieces.shift;
  pieces.count = pieces.whole + (last << pieces.shift);
  return pieces;
}

// f(task, plan, first, n) for the pieces of a block, of parameters with one of the actions: n elements from `first`
// on.
template <class F>
GA_DEVICE void each_piece(const Block& block, const UpdateTask* tasks, const ListPart& list,
                          const Pieces& pieces, int actions, F f) {
  GA_ROLLED
  for (auto k = static_cast<int32_t>(block.index()); k < pieces.count;
       k += static_cast<int32_t>(block.count())) {
    const int32_t part = k < pieces.whole ? 0 : k - pieces.whole;
    const int shift = k < pieces.whole ? 0 : pieces.shift;
    const ChunkRef at = list.chunks[k < pieces.whole ? k : pieces.whole + (part >> shift)];
    const UpdateTask& task = tasks[at.item];
    if ((task.plan->actions & actions) == 0) continue;
    const auto size = static_cast<int32_t>(kChunk >> shift);
    const int64_t first = at.chunk * kChunk + (part & ((1 << shift) - 1)) * size;
    const int64_t n = smaller(int64_t{size}, task.count - first);
    if (n > 0) f(task, *task.plan, first, static_cast<int>(n));
  }
}

template <class T>
GA_DEVICE void follow_piece(Block& block, const UpdateTask& task, const ParamPlan& plan,
                            int64_t first, int n) {
  if (task.average.data) follow_data(block, task, first, n);
  block.each([&](int thread) { follow_any<T>(task, plan, first, n, 4 * thread, 4 * kThreads); });
}

// The update of all chunks of the list, or of the rows that the sets of its parameters have.
template <class Op>
struct Update {
  using T = typename Op::Real;
  static constexpr int kBlocks = 3;
  const UpdateTask* tasks;
  ListPart list;
  Pieces pieces;
  bool rows;

  GA_DEVICE void operator()(Block& block) const {
    if (rows) return update_rows(block);
    each_piece(block, tasks, list, pieces, kUpdate | kFollow,
               [&](const UpdateTask& task, const ParamPlan& plan, int64_t first, int n) {
                 if ((plan.actions & kUpdate) != 0)
                   update_piece(block, task, plan, first, n);
                 else
                   follow_piece<T>(block, task, plan, first, n);
               });
  }

 private:
  GA_DEVICE static void update_piece(Block& block, const UpdateTask& task, const ParamPlan& plan,
                                     int64_t first, int n) {
    follow_data(block, task, first, n);
    if constexpr (std::is_same_v<T, float>) {
      if (update_aligned<GA_F32>(block, task, plan, first, n)) return;
      if constexpr (Op::updating.gradient) {  // one that lives
        if (update_aligned<GA_BF16>(block, task, plan, first, n)) return;
      }
    }
    block.each(
        [&](int thread) { update_any<Op>(task, plan, false, first, n, 4 * thread, 4 * kThreads); });
  }

  // Returns false, without an update, if the arrays are not Floats with such a gradient.
  template <int32_t kGradient>
  GA_DEVICE static bool update_aligned(Block& block, const UpdateTask& task, const ParamPlan& plan,
                                       int64_t first, int n) {
    Floats<Op, false, kGradient> floats;
    if (!floats.open(task, first)) return false;
    const Op op = op_of<Op>(plan);
    const View<float> view(task.gradient);
    const float gain = static_cast<float>(plan.average_gain);
    const int whole = n / 4 * 4;
    block.each([&](int thread) {
      GA_ROLLED
      for (int i = 4 * thread; i < whole; i += 4 * kThreads)
        update_floats(floats, op, view, gain, i);
      if (whole < n && thread == 0)
        update_any<Op>(task, plan, false, first + whole, n - whole, 0, 4);
    });
    return true;
  }

  // A row has as many threads as it has work for, but at least eight.
  GA_DEVICE void update_rows(Block& block) const {
    for (int64_t k = 0; k < list.param_count; ++k) {
      const UpdateTask& task = tasks[list.params[k]];
      const ParamPlan& plan = *task.plan;
      if ((plan.actions & kUpdateRows) == 0 || !task.rows) continue;
      int group = 8;
      while (group < kThreads && 4 * group < task.columns) group *= 2;
      const int64_t rows = task.rows->size, together = kThreads / group;
      const int64_t batch = Op::row_state ? kLaneGroups : together;
      for (int64_t r = block.index() * batch; r < rows; r += block.count() * batch) {
        if constexpr (Op::row_state) sum_rows(block, task, r);
        for (int64_t e = r; e < r + batch && e < rows; e += together) {
          block.each([&](int thread) {
            const int64_t entry = e + thread / group;
            if (entry >= rows) return;
            const int64_t row = task.rows->entries[entry].row * task.columns;
            for (int64_t column = 0; column < task.columns; column += kChunk) {
              const int n = static_cast<int>(smaller(kChunk, task.columns - column));
              if (task.follows) follow_data(task, row + column, n, 4 * (thread % group), 4 * group);
              update_any<Op>(task, plan, true, row + column, n, 4 * (thread % group), 4 * group);
            }
          });
        }
      }
    }
  }

  // Brings up the state of kLaneGroups rows of the set, from entry r on: eight threads sum a row, in the
  // order of sum_runs().
  GA_DEVICE static void sum_rows(Block& block, const UpdateTask& task, int64_t r) {
    GA_SHARED double totals[2][kLaneGroups];
    GA_SHARED double sums[kLaneGroups];
    const FactorTask& state = *task.row_state;
    UnitTask unit = sums_of(state, true);
    Source& source = unit.gradient.source;
    if (source.format == kSparse) {  // these rows lie there densely
      source.data = static_cast<const SparseRows*>(source.data)->data;
      source.format = native<T>;
    }
    const View<T> view = View<T>::of_units(unit.gradient);
    const int rows = static_cast<int>(smaller(int64_t{kLaneGroups}, task.rows->size - r));
    // Rows of one element each are summed in double, as sum_kept() does.
    const bool kept = unit.pattern->kept[unit.pattern->axes - 1];
    block.each_item(kLaneGroups, [&](int64_t i) {
      double x = 0;
      if (kept && i < rows)
        x = static_cast<double>(
            view.clamped(view.scaled(load_one<T>(source, task.rows->entries[r + i].row))));
      sums[i] = x * x;
    });
    GA_ROLLED
    for (int64_t tile = 0; tile < task.columns && !kept; tile += kTile) {
      const int n = static_cast<int>(smaller(kTile, task.columns - tile));
      sum_lane_groups<T>(block, rows, 1, totals, [&](int row, int q, auto sum) {
        const int64_t first = task.rows->entries[r + row].row * task.columns + tile;
        return tile_squares<T, decltype(sum)>(unit, view, first, n, q);
      });
      block.each_item(rows, [&](int64_t i) { sums[i] += totals[0][i]; });
    }
    const double scale = unit_scale(unit.gradient);
    block.each_item(rows, [&](int64_t i) {
      const int64_t row = task.rows->entries[r + i].row;
      state.row_sums[row] = sums[i] * (scale * scale);
      add_row_mean<T>(state, row);
    });
  }
};

// Parameters that no Op moves.
template <class T>
struct Follow {
  static constexpr int kBlocks = 4;
  const UpdateTask* tasks;
  ListPart list;
  Pieces pieces;

  GA_DEVICE void operator()(Block& block) const {
    each_piece(block, tasks, list, pieces, kDeliver | kFollow,
               [&](const UpdateTask& task, const ParamPlan& plan, int64_t first, int n) {
                 follow_piece<T>(block, task, plan, first, n);
               });
  }
};

GA_APART inline void fold_measured(Block& block, const ScalarTables& tables,
                                   const UpdateTask* tasks, const ListPart& list) {
  sum_layers(block, tables, tasks, list.params, list.param_count);
  fold_layers(block, tables, list.params, list.param_count);
}

// The first pass of a layer-wise Op; the last block folds the Op for the second pass.
template <class Op>
struct Measure {
  using T = typename Op::Real;
  static constexpr int kBlocks = 3;
  const UpdateTask* tasks;
  ListPart list;
  ScalarTables tables;
  unsigned* counter;

  GA_DEVICE void operator()(Block& block) const {
    GA_SHARED ChunkTotals<Op::norms> sums;
    GA_ROLLED
    for (int64_t k = block.index(); k < list.chunk_count; k += block.count()) {
      const ChunkRef at = list.chunks[k];
      const UpdateTask& task = tasks[at.item];
      if ((task.plan->actions & kUpdate) != 0)
        measure_chunk(block, task, *task.plan, at.chunk, sums);
    }
    if (block.last(counter)) fold_measured(block, tables, tasks, list);
  }

 private:
  GA_DEVICE static void measure_chunk(Block& block, const UpdateTask& task, const ParamPlan& plan,
                                      int64_t chunk, ChunkTotals<Op::norms>& sums) {
    const int64_t offset = chunk * kChunk;
    const int n = chunk_length(task.count, chunk);
    if (Op::measuring.parameter) follow_data(block, task, offset, n);
    bool done = false;
    if constexpr (std::is_same_v<T, float> && !Op::factored) {
      done = measure_aligned<GA_F32>(block, task, plan, offset, n, sums);
      if constexpr (Op::measuring.gradient)
        done = done || measure_aligned<GA_BF16>(block, task, plan, offset, n, sums);
    }
    if (!done) {
      sum_tiles<T, double>(block, n, Op::norms, sums, [&](int first, int m, int q, double) {
        return measure_any<Op>(task, plan, offset + first, m, q);
      });
    }
    take_totals<T>(block, n, Op::norms, sums, [&](const double* total, bool) {
      Partial& partial = task.partials[chunk];
      partial.sum_squares = total[0];
      partial.second_squares = Op::norms == 2 ? total[Op::norms - 1] : 0;
    });
  }

  // Returns false, without sums, if the arrays are not Floats with such a gradient.
  template <int32_t kGradient>
  GA_DEVICE static bool measure_aligned(Block& block, const UpdateTask& task, const ParamPlan& plan,
                                        int64_t offset, int n, ChunkTotals<Op::norms>& sums) {
    Floats<Op, true, kGradient> floats;
    if (!floats.open(task, offset)) return false;
    const Op op = op_of<Op>(plan);
    const View<float> view(task.gradient);
    sum_tiles<T, double>(block, n, Op::norms, sums, [&](int first, int m, int q, double) {
      return measure_tile(floats, op, view, first, m, q);
    });
    return true;
  }
};

// ---- Launches -----------------------------------------------------------------------------------

template <class Op>
struct Tag {
  using type = Op;
};

// f(Tag<Op>()) for the Op at that position of the list.
template <class... Op, class F>
void with_op(TypeList<Op...>, int position, F f) {
  int at = 0;
  (void)((at++ == position ? (f(Tag<Op>()), true) : false) || ...);
}

// launch_as(pieces, blocks) for a Kernel over the pieces of a list.
template <class Kernel, class F>
void with_pieces(const Queue& queue, const ListPart& list, F launch_as) {
  const Pieces pieces = pieces_of(list.chunk_count, held_blocks<Kernel>(queue));
  launch_as(pieces, chunk_blocks<Kernel>(queue, pieces.count));
}

template <class T>
void update(const Queue& queue, const UpdateTask* tasks, const ListPart& list) {
  if (list.op < 0) {
    return with_pieces<Follow<T>>(queue, list, [&](const Pieces& pieces, int64_t blocks) {
      launch(Follow<T>{tasks, list, pieces}, blocks, queue.stream);
    });
  }
  with_op(AllOps<T>(), list.op, [&](auto tag) {
    using Kernel = Update<typename decltype(tag)::type>;
    with_pieces<Kernel>(queue, list, [&](const Pieces& pieces, int64_t blocks) {
      // Rows first: the pass over all chunks moves the averages of the new values.
      if (list.param_count > 0)
        launch(Kernel{tasks, list, pieces, true}, queue.blocks, queue.stream);
      launch(Kernel{tasks, list, pieces, false}, blocks, queue.stream);
    });
  });
}

template <class T>
void measure(const Queue& queue, const UpdateTask* tasks, const ListPart& list,
             const ScalarTables& tables) {
  with_op(AllOps<T>(), list.op, [&](auto tag) {
    using Op = typename decltype(tag)::type;
    if constexpr (Op::norms > 0) {
      using Kernel = Measure<Op>;
      const int64_t blocks = list.chunk_count > 0 ? chunk_blocks<Kernel>(queue, list.chunk_count)
                                                  : (list.param_count > 0 ? 1 : 0);
      launch(Kernel{tasks, list, tables, queue.counters}, blocks, queue.stream);
    }
  });
}

}  // namespace ga::cuda
