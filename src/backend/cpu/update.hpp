// SPDX-License-Identifier: Apache-2.0
// Updates parameters and state by an Op of src/ops. Included in the same way as vectors.hpp.
#pragma once

#include "backend/cpu/codes.hpp"
#include "backend/cpu/follow.hpp"
#include "backend/cpu/sums.hpp"

// A tile of an array, in place or unpacked.
template <class T>
struct Stream {
  alignas(64) T tile[kTile];
  T* data;
  T* out;  // of a tile in place: where it is written, if not there; else NULL
  bool in_place;
  Place next;  // of the next tile

  // target: where the array is written; NULL: in place.
  GA_INLINE void open(const Array& a, const Array* target, int64_t offset, int64_t count) {
    in_place = a.format == native<T>;
    out = in_place && target ? static_cast<T*>(target->data) + offset : nullptr;
    if (in_place) {
      data = static_cast<T*>(a.data) + offset;
      return;
    }
    data = tile;
    next = Place(a.format, a.data, offset + kTile);
    load<T>({a.data, a.format, 1, nullptr}, offset, count, tile);
    pad_tile(tile, count);
  }

  GA_INLINE void open_coded(const CodedState& s, int64_t offset, int64_t count) {
    in_place = false;
    out = nullptr;
    data = tile;
    next = Place(GA_U8, s.codes, offset + kTile);
    load_coded(s, offset, count, tile);
    pad_tile(tile, count);
  }

  // Prefetches `ahead` elements ahead of block b, or the same block of the next tile.
  template <int kWrite>
  GA_INLINE void prefetch(int64_t b, int64_t ahead = kAhead) const {
    if (in_place)
      prefetch_block<kWrite>(data + b + ahead);
    else
      next.template prefetch_block<kWrite>(b);
  }
};

// Copies the last elements of an array, padded to whole groups; and writes a block elsewhere: past the caches block by
// block, since tile by tile took 1.5 times as long on one core. Every Op calls these, which would be large if each had
// them inlined.
template <class T>
[[gnu::noinline]] T* pad_end(const T* from, int64_t count, T* block) {
  const Padded<T> end(from, count);
  std::memcpy(block, end.data, static_cast<size_t>(whole_groups(count)) * sizeof(T));
  return block;
}
template <class T>
[[gnu::noinline]] void write_out_of_place(bool stream, T* to, const T* block, int64_t count) {
  if (count < kBlock)
    std::memcpy(to, block, static_cast<size_t>(count) * sizeof(T));
  else if (stream)
    stream_block(to, block);
  else
    copy_block(to, block);
}

// Updates the EMA of a parameter.
template <class T, bool kOutOfPlace>
[[gnu::noinline]] void move_average(const UpdateTask& task, int64_t offset, int64_t count,
                                    const T* p) {
  const auto index = static_cast<uint64_t>(task.drawn + offset);
  const T gain = static_cast<T>(task.plan->average_gain);
  const Targets* const targets = kOutOfPlace ? task.plan->targets : nullptr;
  const Array* const target = kOutOfPlace ? &targets->average : &task.average;
  Stream<T> e;
  e.open(task.average, kOutOfPlace ? target : nullptr, offset, count);
  if (kOutOfPlace && e.out) {
    alignas(64) T block[kBlock];
    for (int64_t b = 0; b < count; b += kBlock) {
      const int64_t n = smaller(kBlock, count - b);
      prefetch_block<0>(e.data + b + kAhead);
      for (int64_t i = 0; i < n; ++i) block[i] = e.data[b + i] + gain * (p[b + i] - e.data[b + i]);
      write_out_of_place(targets->stream, e.out + b, block, n);
    }
    return;
  }
  T* const average = e.data;
  // clang-format off
  GA_INDEPENDENT  // the EMA does not overlap the parameter
  for (int64_t i = 0; i < count; ++i) average[i] += gain * (p[i] - average[i]);
  // clang-format on
  if (!e.in_place)
    store<T>(*target, offset, count, average, index, {true, task.plan->state_key + kMaxSlots});
}

template <class T>
void follow_as(const UpdateTask& task, int64_t offset, int64_t count) {
  for (int64_t t = 0; t < count; t += kTile) {
    const int64_t n = smaller(kTile, count - t);
    follow_data(task, offset + t, n);
    Stream<T> p;
    p.open(task.param, nullptr, offset + t, n);
    move_average<T, false>(task, offset + t, n, p.data);
  }
}

void follow(const UpdateTask& task, int64_t offset, int64_t count) {
  (task.f64 ? follow_as<double> : follow_as<float>)(task, offset, count);
}

// How the loops over elements read a gradient: as a View does, but for a limit and a third factor, which few
// views have, and which an earlier pass over the tile takes then.
template <class T>
class Scaled {
 public:
  GA_INLINE explicit Scaled(const GradientView& g) : view_(g) {
    T* next = factors_;
    for (const T factor : {view_.source_scale, view_.scale, view_.factor}) {
      if (factor == 1) continue;
      in_tile_ = next == factors_ + 2;
      if (!in_tile_) *next++ = factor;
    }
    in_tile_ = in_tile_ || view_.limit != static_cast<T>(HUGE_VAL);
    if (in_tile_) factors_[0] = factors_[1] = 1;
  }
  GA_INLINE T operator()(T x) const { return x * factors_[0] * factors_[1]; }

  GA_INLINE bool in_tile() const { return in_tile_; }
  [[gnu::noinline]] void pass(const T* g, int64_t count, T* tile) const {
    for (int64_t i = 0; i < count; ++i) tile[i] = view_(g[i]);
  }

 private:
  const View<T> view_;
  T factors_[2] = {1, 1};
  bool in_tile_ = false;
};

template <class Op>
constexpr int slots_of = Op::factored ? 1 : Op::slots;

// One tile of all arrays of an update.
// kOutOfPlace: written to ParamPlan::targets.
template <class Op, bool kMeasuring, bool kOutOfPlace = false>
struct UpdateTile {
  using T = typename Op::Real;
  static constexpr Pass kPass = kMeasuring ? Op::measuring : Op::updating;
  static constexpr int kSlots = kPass.reads_state || kPass.writes_state ? slots_of<Op> : 0;
  const Scaled<T> scaled;
  const Targets* const targets;  // NULL: in place
  alignas(64) T gradient_tile[kTile];
  const T* g;
  Place next_g;
  Stream<T> p;
  Stream<T> state[kSlots + 1];
  // Where packing a tile takes longer than to update it, memory has that time too to bring the next one.
  int64_t ahead = kAhead;

  static constexpr bool kMayBeCoded = std::is_same_v<T, float> && has_codes(Op::codes);

  GA_INLINE static bool is_coded(const UpdateTask& task, int slot) {
    return task.state[slot].format >= kSignedCodes;
  }

  // Codes are unpacked and packed block by block, so that memory is never long without a request.
  GA_INLINE static int64_t size(const UpdateTask& task) {
    if constexpr (kMayBeCoded)
      for (int k = 0; k < kSlots; ++k)
        if (is_coded(task, k)) return kCodeBlock;
    return kTile;
  }

  GA_INLINE explicit UpdateTile(const UpdateTask& task)
      : scaled(task.gradient), targets(kOutOfPlace ? task.plan->targets : nullptr) {}

  GA_INLINE void open(const UpdateTask& task, int64_t offset, int64_t count) {
    g = kPass.gradient ? load<T>(task.gradient.source, task.first + offset, count, gradient_tile)
                       : nullptr;
    if (kPass.gradient && scaled.in_tile()) {
      scaled.pass(g, count, gradient_tile);
      g = gradient_tile;
    }
    if (kPass.gradient && g == gradient_tile)
      next_g = Place(task.gradient.source.format, task.gradient.source.data,
                     task.first + offset + kTile);
    p.data = p.tile;
    p.out = nullptr;
    if (kPass.parameter)
      p.open(task.param, kOutOfPlace && !kMeasuring ? &targets->param : nullptr, offset, count);
    for (int k = 0; k < kSlots; ++k) {
      if constexpr (kMayBeCoded)
        if (is_coded(task, k)) {
          state[k].open_coded({task.state[k], task.scales[k], task.code_block}, offset, count);
          ahead = kTile;
          continue;
        }
      state[k].open(task.state[k], kOutOfPlace ? &targets->state[k] : nullptr, offset, count);
    }
  }

  GA_INLINE void prefetch(int64_t b) const {
    if (kPass.gradient) {
      if (g == gradient_tile)
        next_g.template prefetch_block<0>(b);
      else
        prefetch_block<0>(g + b + ahead);
    }
    if (kPass.parameter) p.template prefetch<!kMeasuring && !kOutOfPlace>(b, ahead);
    for (int k = 0; k < kSlots; ++k)
      state[k].template prefetch<kPass.writes_state && !kOutOfPlace>(b, ahead);
  }

  // Runs body(g, p, state, b) over the whole blocks at b, and end(g, p, state, b, n) on what is left, n elements.
  template <class Body, class End>
  GA_INLINE void each_block(int64_t count, Body&& body, End&& end) {
    T* s[kSlots + 1];
    int64_t b = 0;
    for (; b + kBlock <= count; b += kBlock) {
      prefetch(b);
      for (int k = 0; k < kSlots; ++k) s[k] = state[k].data + b;
      body(kPass.gradient ? g + b : nullptr, p.data + b, s, b);
    }
    if (b == count) return;
    for (int k = 0; k < kSlots; ++k) s[k] = state[k].data + b;
    end(kPass.gradient ? g + b : nullptr, p.data + b, s, b, count - b);
  }

  // As each_block(), where arrays are written elsewhere. Runs body(g, p, state, new_p, new_state, b, n): new_p and
  // new_state are blocks that are then written to the targets, or the tile itself.
  template <class Body>
  GA_INLINE void each_block_out_of_place(int64_t count, Body&& body) {
    alignas(64) T blocks[(kSlots + 1) * kBlock];
    for (int64_t b = 0; b < count; b += kBlock) {
      const int64_t n = smaller(kBlock, count - b);
      const bool end = n < kBlock;
      prefetch(b);
      T *s[kSlots + 1], *new_s[kSlots + 1];
      for (int k = 0; k < kSlots; ++k) {
        s[k] = new_s[k] = state[k].data + b;
        if (!state[k].out) continue;
        new_s[k] = blocks + k * kBlock;
        if (end) s[k] = pad_end(s[k], n, new_s[k]);
      }
      T *q = p.data + b, *new_q = q;
      if (p.out) new_q = p.tile + b;
      if (kPass.parameter && end && p.in_place) q = new_q = pad_end(q, n, p.tile + b);
      T* const end_g = blocks + kSlots * kBlock;
      body(kPass.gradient && end ? pad_end(g + b, n, end_g) : g + b, q, s, new_q, new_s, b, n);
      for (int k = 0; k < kSlots; ++k)
        if (state[k].out) write_out_of_place<T>(targets->stream, state[k].out + b, new_s[k], n);
      if (p.out) write_out_of_place<T>(targets->stream, p.out + b, new_q, n);
    }
  }

  GA_INLINE void close_state(const UpdateTask& task, int64_t offset, int64_t count) {
    if (!kPass.writes_state || kSlots == 0) return;
    const Array* const to = kOutOfPlace ? targets->state : task.state;
    float* const* const scales = kOutOfPlace ? targets->scales : task.scales;
    const auto index = static_cast<uint64_t>(task.drawn + offset);
    if constexpr (kMayBeCoded)
      for (int k = 0; k < kSlots; k += 2) {
        CodedState slots[2];
        const float* tiles[2] = {};
        for (int half = 0; half < 2 && k + half < kSlots; ++half) {
          const int slot = k + half;
          if (!is_coded(task, slot)) continue;
          slots[half] = {{to[slot].data, task.state[slot].format}, scales[slot], task.code_block};
          tiles[half] = state[slot].data;
        }
        if (tiles[0] || tiles[1])
          store_coded_pair(slots, tiles, offset, count, index,
                           task.plan->state_key + static_cast<uint64_t>(k));
      }
    if (task.state[0].format != GA_BF16) return;
    for (int k = 0; k < kSlots; k += 2) {
      const uint64_t key = task.plan->state_key + static_cast<uint64_t>(k);
      if (k + 1 < kSlots)
        store_bf16_pair<T>(to[k], to[k + 1], offset, count, state[k].data, state[k + 1].data, index,
                           key);
      else
        store_bf16<T>(to[k].data, offset, count, state[k].data, index, {true, key});
    }
  }
};

// new_p, new_state: p and state, or what lies elsewhere.
template <class Op>
GA_INLINE void update_groups(const Op& op, const Scaled<typename Op::Real>& scaled,
                             const typename Op::Real* g, const typename Op::Real* p,
                             typename Op::Real* const* state, typename Op::Real* new_p,
                             typename Op::Real* const* new_state, int64_t count) {
  using T = typename Op::Real;
  using Tile = UpdateTile<Op, false>;
  constexpr Pass pass = Op::updating;
  // clang-format off
  GA_INDEPENDENT  // parameters, gradients and state do not overlap
  for (int64_t i = 0; i < count; ++i) {
    // clang-format on
    T s[Tile::kSlots + 1];
    for (int k = 0; k < Tile::kSlots; ++k) s[k] = state[k][i];
    const T updated = op(p[i], pass.gradient ? scaled(g[i]) : T(0), s);
    if (pass.writes_state)
      for (int k = 0; k < Tile::kSlots; ++k) new_state[k][i] = s[k];
    new_p[i] = updated;
  }
}

// The last elements of arrays, fewer than a block, padded to whole groups. A function of its own, since a compiler takes
// as long for the second copy of an Op's loop as for the first.
template <class Op>
[[gnu::noinline]] void update_end(const UpdateTask& task, const typename Op::Real* g,
                                  typename Op::Real* p, typename Op::Real* const* state,
                                  int64_t count) {
  using T = typename Op::Real;
  using Tile = UpdateTile<Op, false>;
  const Op op = *reinterpret_cast<const Op*>(task.plan->folded.bytes);
  const Scaled<T> scaled(task.gradient);
  const int64_t groups = whole_groups(count);
  const Padded<T> end_g(g, Op::updating.gradient ? count : 0);
  Padded<T> end_p(p, count);
  if (task.padded_state) {
    update_groups(op, scaled, end_g.data, end_p.data, state, end_p.data, state, groups);
  } else {
    alignas(64) T ends[Tile::kSlots + 1][kBlock];
    T* s[Tile::kSlots + 1];
    for (int k = 0; k < Tile::kSlots; ++k) {
      const Padded<T> end(state[k], count);
      s[k] = ends[k];
      std::memcpy(s[k], end.data, static_cast<size_t>(groups) * sizeof(T));
    }
    update_groups(op, scaled, end_g.data, end_p.data, s, end_p.data, s, groups);
    if (Op::updating.writes_state)
      for (int k = 0; k < Tile::kSlots; ++k)
        std::memcpy(state[k], s[k], static_cast<size_t>(count) * sizeof(T));
  }
  end_p.copy_to(p, count);
}

// As update(), for one tile of arrays of the type computed in, and nothing that follows the update:
// what a chunk of many tiles needs would take longer than the loop. Returns whether it is one.
template <class Op>
GA_INLINE bool update_tile(const Op& op, const UpdateTask& task, int64_t offset, int64_t count) {
  using T = typename Op::Real;
  constexpr int kSlots = UpdateTile<Op, false>::kSlots;
  const Source& source = task.gradient.source;
  bool plain =
      count <= kTile && task.param.format == native<T> && !task.copy.data && !task.average.data;
  plain = plain && (!Op::updating.gradient || (source.format == native<T> && source.data));
  for (int k = 0; k < kSlots; ++k) plain = plain && task.state[k].format == native<T>;
  if (!plain) return false;
  const Scaled<T> scaled(task.gradient);
  if (scaled.in_tile()) return false;

  const T* const g =
      Op::updating.gradient ? static_cast<const T*>(source.data) + task.first + offset : nullptr;
  T* const p = static_cast<T*>(task.param.data) + offset;
  T* state[kSlots + 1];
  for (int k = 0; k < kSlots; ++k) state[k] = static_cast<T*>(task.state[k].data) + offset;
  const int64_t whole = count & -kGroup;
  update_groups(op, scaled, g, p, state, p, state, whole);
  if (whole == count) return true;
  for (int k = 0; k < kSlots; ++k) state[k] += whole;
  update_end<Op>(task, g + whole, p + whole, state, count - whole);
  return true;
}

// Ends the update of a tile, whose parameter is p now: stores it, its copy, and moves the average.
template <class T, bool kOutOfPlace>
GA_INLINE void store_param(const UpdateTask& task, Stream<T>& s, int64_t offset, int64_t count) {
  const Targets* const targets = kOutOfPlace ? task.plan->targets : nullptr;
  const Array& param = kOutOfPlace ? targets->param : task.param;
  const Array& copy = kOutOfPlace ? targets->copy : task.copy;
  const T* p = kOutOfPlace && s.out ? s.tile : s.data;
  const auto store_to = [&](const Array& a) {
    store<T>(a, offset, count, p, static_cast<uint64_t>(task.drawn + offset),
             {task.stochastic, task.plan->copy_key});
  };
  if (!s.in_place) {
    store_to(param);
    if (task.average.data)  // which follows the parameter as stored
      load<T>({param.data, param.format, 1, nullptr}, offset, count, s.tile);
  }
  if (copy.data) store_to(copy);
  if (task.average.data) move_average<T, kOutOfPlace>(task, offset, count, p);
}

// Not inlined, for the same reason as pad_end().
template <class T>
[[gnu::noinline]] void store_param_out_of_place(const UpdateTask& task, Stream<T>& s,
                                                int64_t offset, int64_t count) {
  store_param<T, true>(task, s, offset, count);
}

template <class Op, bool kOutOfPlace>
GA_INLINE void update_tiles(const Op& op, const UpdateTask& task, int64_t offset, int64_t count) {
  using T = typename Op::Real;
  UpdateTile<Op, false, kOutOfPlace> tile(task);
  const int64_t size = tile.size(task);
  for (int64_t t = 0; t < count; t += size) {
    const int64_t n = smaller(size, count - t);
    follow_data(task, offset + t, n);
    tile.open(task, offset + t, n);
    if constexpr (kOutOfPlace)
      tile.each_block_out_of_place(n, [&](const T* g, const T* p, T* const* state, T* new_p,
                                          T* const* new_state, int64_t, int64_t m) {
        const int64_t groups = m == kBlock ? kBlock : whole_groups(m);
        update_groups(op, tile.scaled, g, p, state, new_p, new_state, groups);
      });
    else
      tile.each_block(
          n,
          [&](const T* g, T* p, T* const* state, int64_t) {
            update_groups(op, tile.scaled, g, p, state, p, state, kBlock);
          },
          [&](const T* g, T* p, T* const* state, int64_t, int64_t m) {
            update_end<Op>(task, g, p, state, m);
          });
    tile.close_state(task, offset + t, n);
    if constexpr (kOutOfPlace)
      store_param_out_of_place<T>(task, tile.p, offset + t, n);
    else
      store_param<T, false>(task, tile.p, offset + t, n);
  }
  if constexpr (kOutOfPlace)
    if (tile.targets->stream) stream_fence();
}

// Whether a pass of an Op is ever written to shadow arrays (Eager::may_go_ahead() and needs_shadow()).
template <class Op>
constexpr bool goes_out_of_place = !Op::orthogonal && std::is_same_v<typename Op::Real, float>;

// A function of its own, so that it costs the update in place nothing.
template <class Op>
[[gnu::noinline]] void update_out_of_place(const Op& op, const UpdateTask& task, int64_t offset,
                                           int64_t count) {
  update_tiles<Op, true>(op, task, offset, count);
}

template <class Op>
void update(const UpdateTask& task, int64_t offset, int64_t count) {
  const Op op = *reinterpret_cast<const Op*>(task.plan->folded.bytes);
  if constexpr (goes_out_of_place<Op>)
    if (task.plan->targets) return update_out_of_place(op, task, offset, count);
  if (!update_tile(op, task, offset, count)) update_tiles<Op, false>(op, task, offset, count);
}

template <class Op, bool kOutOfPlace>
GA_INLINE void measure_tiles(const UpdateTask& task, int64_t offset, int64_t count) {
  using T = typename Op::Real;
  const Op op = *reinterpret_cast<const Op*>(task.plan->folded.bytes);
  using Tile = UpdateTile<Op, true, kOutOfPlace>;
  constexpr Pass pass = Op::measuring;
  ChunkSum<T> first_sum, second_sum;
  Tile tile(task);
  for (int64_t t = 0; t < count; t += kTile) {
    const int64_t n = smaller(kTile, count - t);
    WideLanes first, second;
    const auto block = [&](const T* g, const T* p, T* const* state, T* const* new_state, int64_t b,
                           int64_t m) {
      alignas(64) T x0[kBlock], x1[kBlock];
      const int64_t groups = m == kBlock ? kBlock : whole_groups(m);
      // clang-format off
      GA_INDEPENDENT
      for (int64_t i = 0; i < groups; ++i) {
        // clang-format on
        T s[Tile::kSlots + 1];
        T x[2] = {};
        for (int k = 0; k < Tile::kSlots; ++k) s[k] = state[k][i];
        op.measure(p[i], pass.gradient ? tile.scaled(g[i]) : T(0), s, x);
        if (pass.writes_state)
          for (int k = 0; k < Tile::kSlots; ++k) new_state[k][i] = s[k];
        x0[i] = x[0];
        if (Op::norms == 2) x1[i] = x[1];
      }
      for (int64_t i = m; i < groups; ++i) x0[i] = x1[i] = 0;
      add_groups(first, x0, groups);
      if (Op::norms == 2) add_groups(second, x1, groups);
      if constexpr (Op::emits)
        std::memcpy(static_cast<T*>(task.emitted) + offset + t + b, x0,
                    static_cast<size_t>(m) * sizeof(T));
    };
    if (Op::measuring.parameter) follow_data(task, offset + t, n);
    tile.open(task, offset + t, n);
    if constexpr (kOutOfPlace)
      tile.each_block_out_of_place(
          n, [&](const T* g, const T* p, T* const* state, T*, T* const* new_state, int64_t b,
                 int64_t m) { block(g, p, state, new_state, b, m); });
    else
      tile.each_block(
          n,
          [&](const T* g, const T* p, T* const* state, int64_t b) {
            block(g, p, state, state, b, kBlock);
          },
          [&](const T* g, const T* p, T* const* state, int64_t b, int64_t m) {
            alignas(64) T ends[Tile::kSlots + 2][kBlock];
            T* s[Tile::kSlots + 1];
            for (int k = 0; k < Tile::kSlots; ++k) s[k] = pad_end(state[k], m, ends[k]);
            if (pass.gradient) g = pad_end(g, m, ends[Tile::kSlots]);
            if (pass.parameter) p = pad_end(p, m, ends[Tile::kSlots + 1]);
            block(g, p, s, s, b, m);
            if (pass.writes_state)
              for (int k = 0; k < Tile::kSlots; ++k)
                std::memcpy(state[k], s[k], static_cast<size_t>(m) * sizeof(T));
          });
    first_sum.add_wide_tile(first);
    if (Op::norms == 2) second_sum.add_wide_tile(second);
    tile.close_state(task, offset + t, n);
  }
  if constexpr (kOutOfPlace)
    if (tile.targets->stream) stream_fence();
  const int64_t stretch = task.stretch(), before = offset / stretch;
  Partial& partial =
      task.partials[before * chunk_count(stretch) + (offset - before * stretch) / kChunk];
  partial.sum_squares = first_sum.total();
  partial.second_squares = Op::norms == 2 ? second_sum.total() : 0;
}

template <class Op>
[[gnu::noinline]] void measure_out_of_place(const UpdateTask& task, int64_t offset, int64_t count) {
  measure_tiles<Op, true>(task, offset, count);
}

// The first pass of a layer-wise optimizer.
template <class Op>
void measure(const UpdateTask& task, int64_t offset, int64_t count) {
  if constexpr (goes_out_of_place<Op> && Op::measuring.writes_state)
    if (task.plan->targets) return measure_out_of_place<Op>(task, offset, count);
  measure_tiles<Op, false>(task, offset, count);
}

template <class Op>
constexpr auto measure_of = [] {
  if constexpr (Op::norms > 0)
    return measure<Op>;
  else
    return nullptr;
}();
