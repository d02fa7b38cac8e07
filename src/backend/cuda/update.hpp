// SPDX-License-Identifier: Apache-2.0
// Kernels of the update of parameters and state: one for each Op and pass, made from the list of
// them. Included by the files that instantiate them, for float and for double.
#pragma once

#include "backend/cuda/kernels.hpp"
#include "backend/cuda/loops.hpp"
#include "ops/all.hpp"

namespace ga::cuda {

// Launches by the position of an Op in AllOps.
using UpdateLaunch = void (*)(const Queue&, const UpdateTask*, const ChunkRef*, int64_t);
using MeasureLaunch = void (*)(const Queue&, const UpdateTask*, const ChunkRef*, int64_t,
                               const ScalarTables&, const ga_param*, int64_t);
using RowsLaunch = void (*)(const Queue&, const UpdateTask*, const ga_param*, int64_t);
struct UpdateLaunches {
  const UpdateLaunch* updates;
  const MeasureLaunch* measures;  // NULL where an Op has no such pass
  const RowsLaunch* rows;
};
UpdateLaunches float_launches();
UpdateLaunches double_launches();

template <class Op>
constexpr int slots_of = Op::factored ? 1 : Op::slots;
template <class Op, bool kMeasuring>
constexpr Pass pass_of = kMeasuring ? Op::measuring : Op::updating;
// State values that a pass works on.
template <class Op, bool kMeasuring>
constexpr int kSlotsOf =
    pass_of<Op, kMeasuring>.reads_state || pass_of<Op, kMeasuring>.writes_state ? slots_of<Op> : 0;

template <class Op>
GA_DEVICE Op op_of(const ParamPlan& plan) {
  return *reinterpret_cast<const Op*>(plan.folded.bytes);
}

// ---- Arrays of any format -----------------------------------------------------------------------

// What follows a parameter's update: its rounded copy, where copied, and its moving average.
// Elements [first + i, first + i + count).
template <class T>
GA_APART void follow(const UpdateTask& task, const ParamPlan& plan, bool copied, bool averaged,
                     int64_t first, int i, int count, Four<T> p) {
  const int64_t index = task.first + first;
  if (copied && task.copy.data)
    Writer<T>(task.copy, first, {task.by_chance, plan.copy_key}, index)(i, count, p);
  if (!averaged || !task.average.data) return;
  const T gain = static_cast<T>(plan.average_gain);
  Four<T> e = Reader<T>(task.average, first)(i, count);
  for (int l = 0; l < 4; ++l) e.x[l] += gain * (p.x[l] - e.x[l]);
  Writer<T>(task.average, first, {true, plan.state_key + kMaxSlots}, index)(i, count, e);
}

// The state of a parameter from an element on.
template <class T, int kSlots>
class StateArrays {
 public:
  GA_DEVICE StateArrays(const UpdateTask& task, int64_t first) : task_(task), first_(first) {
    for (int k = 0; k < kSlots; ++k) readers_[k] = Reader<T>(task.state[k], first);
  }

  GA_DEVICE const Reader<T>& operator[](int k) const { return readers_[k]; }

  GA_DEVICE void store(const ParamPlan& plan, int i, int count, const Four<T>* s) const {
    const int64_t index = task_.first + first_;
    if (task_.state[0].format == native<T>) {
      for (int k = 0; k < kSlots; ++k)
        Writer<T>(task_.state[k], first_, kNearest, index)(i, count, s[k]);
      return;
    }
    for (int k = 0; k < kSlots; k += 2) {
      const uint64_t key = plan.state_key + static_cast<uint64_t>(k);
      if (k + 1 < kSlots)
        store_bf16_pair<T>(task_.state[k].data, task_.state[k + 1].data, first_, i, count, s[k],
                           s[k + 1], key, static_cast<uint64_t>(index + i));
      else
        store_packed<T>(task_.state[k].data, GA_BF16, first_, i, count, s[k], {true, key},
                        static_cast<uint64_t>(index + i));
    }
  }

 private:
  const UpdateTask& task_;
  int64_t first_;
  Reader<T> readers_[kSlots + 1];
};

// The thread's share of the elements [first, first + count): from, from + step, ..., four of each.
// rows: they are of a row that has a gradient, and their average is moved elsewhere.
template <class Op>
GA_APART void update_any(const UpdateTask& task, const ParamPlan& plan, bool rows, int64_t first,
                         int count, int from, int step) {
  using T = typename Op::Real;
  constexpr Pass pass = pass_of<Op, false>;
  constexpr int kSlots = kSlotsOf<Op, false>;
  const Op op = op_of<Op>(plan);
  const View<T> view(task.gradient);
  Source source = task.gradient.source;
  if (source.format == kSparse && rows) {  // where it lies densely
    source.data = static_cast<const SparseRows*>(source.data)->data;
    source.format = native<T>;
  }
  const Reader<T> gradient(source, task.first + first);
  const Reader<T> param(task.param, first);
  const Writer<T> store(task.param, first, {task.by_chance, plan.copy_key}, task.first + first);
  const StateArrays<T, kSlots> state(task, first);
  GA_ROLLED
  for (int i = from; i < count; i += step) {
    const int m = count - i < 4 ? count - i : 4;
    typename Reader<T>::Raw raw_g = {}, raw_p = {}, raw_s[kSlots + 1];
    if (pass.gradient) raw_g = gradient.fetch(i, m);
    if (pass.parameter) raw_p = param.fetch(i, m);
    for (int k = 0; k < kSlots; ++k) raw_s[k] = state[k].fetch(i, m);
    const Four<T> g = gradient.unpack(raw_g, m);
    Four<T> p = param.unpack(raw_p, m), s[kSlots + 1];
    for (int k = 0; k < kSlots; ++k) s[k] = state[k].unpack(raw_s[k], m);
    for (int l = 0; l < 4; ++l) {
      T slots[kSlots + 1];
      for (int k = 0; k < kSlots; ++k) slots[k] = s[k].x[l];
      p.x[l] = op(p.x[l], pass.gradient ? view(g.x[l]) : T(0), slots);
      for (int k = 0; k < kSlots; ++k) s[k].x[l] = slots[k];
    }
    if (pass.writes_state) state.store(plan, i, m, s);
    const Four<T> stored = store(i, m, p);
    if (task.copy.data || task.average.data) {  // an average is of the parameter as it is now
      const bool averaged = task.average.data && !rows;
      follow<T>(task, plan, true, averaged, first, i, m, averaged ? stored : p);
    }
  }
}

// What a step does to elements of a parameter that no Op moves: its average follows it, its
// gradient goes to the program.
template <class T>
GA_APART void follow_any(const UpdateTask& task, const ParamPlan& plan, int64_t first, int count,
                         int from, int step) {
  if ((plan.duty & kFollow) != 0 && task.average.data) {
    const Reader<T> param(task.param, first);
    GA_ROLLED
    for (int i = from; i < count; i += step) {
      const int m = count - i < 4 ? count - i : 4;
      follow<T>(task, plan, false, true, first, i, m, param(i, m));
    }
  }
  if ((plan.duty & kDeliver) != 0 && task.delivered.data) {
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

template <class Op>
GA_APART SquaresOf<typename Op::Real, Op::norms> measure_any(const UpdateTask& task,
                                                             const ParamPlan& plan, int64_t first,
                                                             int n, int q) {
  using T = typename Op::Real;
  constexpr Pass pass = pass_of<Op, true>;
  constexpr int kSlots = kSlotsOf<Op, true>;
  const Op op = op_of<Op>(plan);
  const View<T> view(task.gradient);
  const Reader<T> gradient(task.gradient.source, task.first + first);
  const Reader<T> param(task.param, first);
  const StateArrays<T, kSlots> state(task, first);
  T* const emitted = static_cast<T*>(task.emitted) + first;
  const bool aligned = is_aligned(emitted, native<T>);
  SquaresOf<T, Op::norms> squares;
  squares.clear();
  each_step(n, q, [&](int i, int m) {
    typename Reader<T>::Raw raw_g = {}, raw_p = {}, raw_s[kSlots + 1];
    if (pass.gradient) raw_g = gradient.fetch(i, m);
    if (pass.parameter) raw_p = param.fetch(i, m);
    for (int k = 0; k < kSlots; ++k) raw_s[k] = state[k].fetch(i, m);
    const Four<T> g = gradient.unpack(raw_g, m);
    const Four<T> p = param.unpack(raw_p, m);
    Four<T> s[kSlots + 1], x[2];
    for (int k = 0; k < kSlots; ++k) s[k] = state[k].unpack(raw_s[k], m);
    for (int l = 0; l < 4; ++l) {
      T slots[kSlots + 1], norms[2] = {};
      for (int k = 0; k < kSlots; ++k) slots[k] = s[k].x[l];
      op.measure(p.x[l], pass.gradient ? view(g.x[l]) : T(0), slots, norms);
      for (int k = 0; k < kSlots; ++k) s[k].x[l] = slots[k];
      for (int k = 0; k < 2; ++k) x[k].x[l] = norms[k];
    }
    if (pass.writes_state) state.store(plan, i, m, s);
    for (int k = 0; k < Op::norms; ++k) squares.of[k].add(x[k], m);
    if (Op::emits) store_some<T, native<T>>(emitted, aligned, i, m, x[0]);
  });
  return squares;
}

// ---- Arrays of floats ---------------------------------------------------------------------------

// The addresses of an update whose arrays are all floats and aligned, from a chunk's first element
// on; but the rounded copy may be of 16 bits, to nearest.
template <class Op, bool kMeasuring>
struct Floats {
  static constexpr Pass pass = pass_of<Op, kMeasuring>;
  static constexpr int kSlots = kSlotsOf<Op, kMeasuring>;
  const float* gradient;
  float* param;
  float* state[kSlots + 1];
  void* copy;
  float* average;
  float* emitted;
  int32_t copy_format;

  GA_DEVICE static bool fits(const Array& a, int64_t first) {
    return is_whole<GA_F32>(a.data, a.format, first);
  }

  // Returns whether they are.
  GA_DEVICE bool open(const UpdateTask& task, int64_t first) {
    bool good = true;
    if (pass.gradient) {
      const Source& g = task.gradient.source;
      good = is_whole<GA_F32>(g.data, g.format, task.first + first);
      gradient = static_cast<const float*>(g.data) + task.first + first;
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
      good = good && is_aligned(copy, copy_format) && (copy_format == GA_F32 || !task.by_chance);
    }
    average = nullptr;
    if (task.average.data) {
      good = good && fits(task.average, first);
      average = static_cast<float*>(task.average.data) + first;
    }
    return good;
  }
};

template <class Op>
GA_DEVICE void update_floats(const Floats<Op, false>& at, const Op& op, const View<float>& view,
                             float gain, int i) {
  constexpr Pass pass = Op::updating;
  constexpr int kSlots = Floats<Op, false>::kSlots;
  Four<float> g = {}, p, s[kSlots + 1];
  if (pass.gradient) g = load_whole<float, GA_F32>(at.gradient, i);
  p = load_whole<float, GA_F32>(at.param, i);
  for (int k = 0; k < kSlots; ++k) s[k] = load_whole<float, GA_F32>(at.state[k], i);
  for (int l = 0; l < 4; ++l) {
    float slots[kSlots + 1];
    for (int k = 0; k < kSlots; ++k) slots[k] = s[k].x[l];
    p.x[l] = op(p.x[l], pass.gradient ? view(g.x[l]) : 0.0f, slots);
    for (int k = 0; k < kSlots; ++k) s[k].x[l] = slots[k];
  }
  if (pass.writes_state) {
    for (int k = 0; k < kSlots; ++k) store_whole<float, GA_F32>(at.state[k], i, s[k]);
  }
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

template <class Op>
GA_DEVICE SquaresOf<float, Op::norms> measure_floats(Floats<Op, true> at, const Op& op,
                                                     const View<float>& view, int first, int n,
                                                     int q) {
  constexpr Pass pass = Op::measuring;
  constexpr int kSlots = Floats<Op, true>::kSlots;
  SquaresOf<float, Op::norms> squares;
  squares.clear();
  if (pass.gradient) at.gradient += first;
  if (pass.parameter) at.param += first;
  for (int k = 0; k < kSlots; ++k) at.state[k] += first;
  if (Op::emits) at.emitted += first;
  each_step(n, q, [&](int i, int count) {
    Four<float> g = {}, p = {}, s[kSlots + 1], x[2];
    if (pass.gradient) g = load_some<float, GA_F32>(at.gradient, true, i, count);
    if (pass.parameter) p = load_some<float, GA_F32>(at.param, true, i, count);
    for (int k = 0; k < kSlots; ++k) s[k] = load_some<float, GA_F32>(at.state[k], true, i, count);
    for (int l = 0; l < 4; ++l) {
      float slots[kSlots + 1], norms[2] = {};
      for (int k = 0; k < kSlots; ++k) slots[k] = s[k].x[l];
      op.measure(p.x[l], pass.gradient ? view(g.x[l]) : 0.0f, slots, norms);
      for (int k = 0; k < kSlots; ++k) s[k].x[l] = slots[k];
      for (int k = 0; k < 2; ++k) x[k].x[l] = norms[k];
    }
    if (pass.writes_state) {
      for (int k = 0; k < kSlots; ++k) store_some<float, GA_F32>(at.state[k], true, i, count, s[k]);
    }
    for (int k = 0; k < Op::norms; ++k) squares.of[k].add(x[k], count);
    if (Op::emits) store_some<float, GA_F32>(at.emitted, true, i, count, x[0]);
  });
  return squares;
}

// ---- Kernels ------------------------------------------------------------------------------------

// Of tasks[chunk.item] for each chunk, or, with params, of the rows in the sets of these.
template <class Op>
struct Update {
  using T = typename Op::Real;
  static constexpr int kBlocks = 3;
  const UpdateTask* tasks;
  const ChunkRef* chunks;
  int64_t count;
  const ga_param* params;

  GA_DEVICE void operator()(Block& block) const {
    if (params) return update_rows(block);
    GA_ROLLED
    for (int64_t k = block.index(); k < count; k += block.count()) {
      const ChunkRef at = chunks[k];
      const UpdateTask& task = tasks[at.item];
      const ParamPlan& plan = *task.plan;
      if ((plan.duty & (kUpdate | kFollow)) == 0) continue;
      const int64_t first = int64_t{at.chunk} * kChunk;
      const int n = chunk_length(task.count, at.chunk);
      if ((plan.duty & kUpdate) == 0) {
        block.each(
            [&](int thread) { follow_any<T>(task, plan, first, n, 4 * thread, 4 * kThreads); });
        continue;
      }
      if constexpr (std::is_same_v<T, float>) {
        Floats<Op, false> floats;
        if (floats.open(task, first)) {
          const Op op = op_of<Op>(plan);
          const View<float> view(task.gradient);
          const float gain = static_cast<float>(plan.average_gain);
          const int whole = n / 4 * 4;
          block.each([&](int thread) {
            GA_ROLLED
            for (int i = 4 * thread; i < whole; i += 4 * kThreads)
              update_floats<Op>(floats, op, view, gain, i);
            if (whole < n && thread == 0)
              update_any<Op>(task, plan, false, first + whole, n - whole, 0, 4);
          });
          continue;
        }
      }
      block.each([&](int thread) {
        update_any<Op>(task, plan, false, first, n, 4 * thread, 4 * kThreads);
      });
    }
  }

 private:
  // As many threads to a row as it has work for, but at least eight.
  GA_DEVICE void update_rows(Block& block) const {
    for (int64_t k = 0; k < count; ++k) {
      const UpdateTask& task = tasks[params[k]];
      const ParamPlan& plan = *task.plan;
      if ((plan.duty & kUpdateRows) == 0 || !task.rows) continue;
      int group = 8;
      while (group < kThreads && 4 * group < task.columns) group *= 2;
      const int64_t rows = task.rows->size, together = kThreads / group;
      for (int64_t r = block.index() * together; r < rows; r += block.count() * together) {
        block.each([&](int thread) {
          const int64_t entry = r + thread / group;
          if (entry >= rows) return;
          const int64_t row = task.rows->entries[entry].row * task.columns;
          for (int64_t column = 0; column < task.columns; column += kChunk) {
            const int n = static_cast<int>(smaller(kChunk, task.columns - column));
            update_any<Op>(task, plan, true, row + column, n, 4 * (thread % group), 4 * group);
          }
        });
      }
    }
  }
};

// Of parameters that no Op moves.
template <class T>
struct Follow {
  static constexpr int kBlocks = 4;
  const UpdateTask* tasks;
  const ChunkRef* chunks;
  int64_t count;

  GA_DEVICE void operator()(Block& block) const {
    for (int64_t k = block.index(); k < count; k += block.count()) {
      const ChunkRef at = chunks[k];
      const UpdateTask& task = tasks[at.item];
      const ParamPlan& plan = *task.plan;
      if ((plan.duty & (kDeliver | kFollow)) == 0) continue;
      const int64_t first = int64_t{at.chunk} * kChunk;
      const int n = chunk_length(task.count, at.chunk);
      block.each(
          [&](int thread) { follow_any<T>(task, plan, first, n, 4 * thread, 4 * kThreads); });
    }
  }
};

GA_APART inline void fold_measured(Block& block, const ScalarTables& tables,
                                   const UpdateTask* tasks, const ga_param* params, int64_t count) {
  sum_layers(block, tables, tasks, params, count);
  fold_layers(block, tables, params, count);
}

// The first pass of a layer-wise Op; the last block folds it for the second.
template <class Op>
struct Measure {
  using T = typename Op::Real;
  static constexpr int kBlocks = 3;
  const UpdateTask* tasks;
  const ChunkRef* chunks;
  int64_t count;
  ScalarTables tables;
  const ga_param* params;
  int64_t param_count;
  unsigned* counter;

  GA_DEVICE void operator()(Block& block) const {
    GA_SHARED ChunkTotals<Op::norms> sums;
    GA_ROLLED
    for (int64_t k = block.index(); k < count; k += block.count()) {
      const ChunkRef at = chunks[k];
      const UpdateTask& task = tasks[at.item];
      const ParamPlan& plan = *task.plan;
      if ((plan.duty & kUpdate) == 0) continue;
      measure_chunk(block, task, plan, at.chunk, sums);
    }
    if (block.last(counter)) fold_measured(block, tables, tasks, params, param_count);
  }

 private:
  GA_DEVICE static void measure_chunk(Block& block, const UpdateTask& task, const ParamPlan& plan,
                                      int64_t chunk, ChunkTotals<Op::norms>& sums) {
    const int64_t offset = chunk * kChunk;
    const int n = chunk_length(task.count, chunk);
    bool done = false;
    if constexpr (std::is_same_v<T, float> && !Op::factored) {
      Floats<Op, true> floats;
      if (floats.open(task, offset)) {
        const Op op = op_of<Op>(plan);
        const View<float> view(task.gradient);
        sum_tiles<T, Op::norms>(block, n, sums, [&](int first, int m, int q) {
          return measure_floats<Op>(floats, op, view, first, m, q);
        });
        done = true;
      }
    }
    if (!done) {
      sum_tiles<T, Op::norms>(block, n, sums, [&](int first, int m, int q) {
        return measure_any<Op>(task, plan, offset + first, m, q);
      });
    }
    take_totals<T>(block, n, sums, [&](const double* total, bool) {
      Partial& partial = task.partials[chunk];
      partial.sum_squares = total[0];
      partial.second_squares = Op::norms == 2 ? total[Op::norms - 1] : 0;
    });
  }
};

// ---- Launches -----------------------------------------------------------------------------------

template <class Op>
void launch_update(const Queue& queue, const UpdateTask* tasks, const ChunkRef* chunks,
                   int64_t count) {
  launch(Update<Op>{tasks, chunks, count, nullptr}, blocks_for(queue, count), queue.stream);
}

template <class Op>
void launch_rows(const Queue& queue, const UpdateTask* tasks, const ga_param* params,
                 int64_t count) {
  launch(Update<Op>{tasks, nullptr, count, params}, count > 0 ? queue.blocks : 0, queue.stream);
}

template <class Op>
void launch_measure(const Queue& queue, const UpdateTask* tasks, const ChunkRef* chunks,
                    int64_t count, const ScalarTables& tables, const ga_param* params,
                    int64_t param_count) {
  const int64_t blocks = count > 0 ? blocks_for(queue, count) : (param_count > 0 ? 1 : 0);
  launch(Measure<Op>{tasks, chunks, count, tables, params, param_count, queue.counters}, blocks,
         queue.stream);
}

template <class Op>
constexpr MeasureLaunch measure_of() {
  if constexpr (Op::norms > 0)
    return launch_measure<Op>;
  else
    return nullptr;
}

template <class List>
struct LaunchTables;
template <class... Op>
struct LaunchTables<TypeList<Op...>> {
  static constexpr UpdateLaunch updates[] = {launch_update<Op>...};
  static constexpr MeasureLaunch measures[] = {measure_of<Op>()...};
  static constexpr RowsLaunch rows[] = {launch_rows<Op>...};
};

template <class T>
UpdateLaunches launches() {
  using Launches = LaunchTables<AllOps<T>>;
  return {Launches::updates, Launches::measures, Launches::rows};
}

}  // namespace ga::cuda
