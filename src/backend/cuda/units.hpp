// SPDX-License-Identifier: Apache-2.0
// Sums of squares over the units of tensors (units.hpp), one piece of a tensor by a block, for
// adaptive clipping and for factored second moments.
#pragma once

#include "backend/cuda/kernels.hpp"
#include "backend/cuda/loops.hpp"
#include "backend/decide.hpp"

namespace ga::cuda {

// The number of tiles whose totals are held at a time.
constexpr int kItems = 512;

struct PieceTotals {
  double totals[2][kItems];  // of the gradient and of the parameter
  double run[2];             // so far, of a run with more tiles
};

// The units of one piece of a tensor: [first, last), in sums of the piece.
struct Piece {
  const UnitPattern& pattern;
  int64_t begin, end;  // outermost indices
  int64_t first, last;
  double* sums;
  double* param_sums;  // NULL: none

  GA_DEVICE Piece(const UnitTask& task, int64_t piece)
      : pattern(*task.pattern),
        begin(pattern.begin(piece)),
        end(pattern.begin(piece + 1)),
        first(pattern.shared ? pattern.first_unit(piece) : 0),
        last(pattern.shared ? pattern.first_unit(piece + 1) : pattern.units),
        sums(task.sums + (pattern.shared ? 0 : piece * pattern.units)),
        param_sums(task.param.data ? task.param_sums + (pattern.shared ? 0 : piece * pattern.units)
                                   : nullptr) {}
};

template <class T>
GA_DEVICE T load_one(const Source& source, int64_t element) {
  if (source.data && source.format == native<T>)
    return *global(static_cast<const T*>(source.data) + element);
  return load_packed<T>(source.data, source.format, element, 0, 1).x[0];
}

// ---- Units that lie along the innermost axis ----------------------------------------------------

// The elements of a unit in their order.
struct UnitElements {
  int64_t first;        // the element at index 0 of all reduced axes
  int64_t inner, step;  // along the innermost reduced axis: the number and distance of elements
  int64_t outer;        // combinations of the other reduced axes' indices

  GA_DEVICE UnitElements(const Piece& piece, int64_t unit)
      : first(piece.pattern.first), inner(1), step(0), outer(1) {
    const UnitPattern& p = piece.pattern;
    const int last = p.axes - 1;
    int64_t stride = 1;
    for (int a = last; a >= 0; --a) {
      if (p.kept[a]) {
        const int64_t rest = a > 0 ? quotient(unit, p.extent[a]) : 0;
        first += (unit - rest * p.extent[a]) * stride;
        unit = rest;
      } else {
        const int64_t count = a > 0 ? p.extent[a] : piece.end - piece.begin;
        if (a == 0) first += piece.begin * stride;
        if (a == last - 1) {
          inner = count;
          step = stride;
        } else {
          outer *= count;
        }
      }
      stride *= p.extent[a];
    }
  }

  // The distance of a combination from the first.
  GA_DEVICE int64_t offset(const Piece& piece, int64_t combination) const {
    const UnitPattern& p = piece.pattern;
    const int last = p.axes - 1;
    int64_t stride = 1, sum = 0;
    for (int a = last; a >= 0 && combination > 0; --a) {
      if (!p.kept[a] && a != last - 1) {
        const int64_t count = a > 0 ? p.extent[a] : piece.end - piece.begin;
        const int64_t rest = quotient(combination, count);
        sum += (combination - rest * count) * stride;
        combination = rest;
      }
      stride *= p.extent[a];
    }
    return sum;
  }
};

// Adds the squares of n elements that are `step` apart, in order, loading several ahead.
template <class T, class Load>
GA_DEVICE double add_along(double sum, int64_t at, int64_t n, int64_t step, Load load) {
  constexpr int kAhead = 8;
  const auto add = [&](T value) {
    const double x = static_cast<double>(value);
    sum += x * x;
  };
  int64_t i = 0;
  GA_ROLLED
  for (; i + kAhead <= n; i += kAhead) {
    T loaded[kAhead];
    for (int k = 0; k < kAhead; ++k) loaded[k] = load(at + (i + k) * step);
    for (int k = 0; k < kAhead; ++k) add(loaded[k]);
  }
  GA_ROLLED
  for (; i < n; ++i) add(load(at + i * step));
  return sum;
}

template <class T, class Load>
GA_DEVICE double unit_sum(const Piece& piece, const UnitElements& unit, Load load) {
  double sum = 0;
  GA_ROLLED
  for (int64_t c = 0; c < unit.outer; ++c)
    sum = add_along<T>(sum, unit.first + unit.offset(piece, c), unit.inner, unit.step, load);
  return sum;
}

template <class T>
GA_APART double unit_sum_of(const Piece& piece, const UnitElements& unit, const Source& source,
                            const View<T>& view) {
  if (view.is_plain() && source.data && source.format == native<T>) {
    const T* const from = global(static_cast<const T*>(source.data));
    const T scale = view.source_scale;
    return unit_sum<T>(piece, unit, [&](int64_t i) { return from[i] * scale; });
  }
  double sum = 0;
  GA_ROLLED
  for (int64_t i = 0; i < unit.outer * unit.inner; ++i) {
    const int64_t c = quotient(i, unit.inner);
    const int64_t at = unit.first + unit.offset(piece, c) + (i - c * unit.inner) * unit.step;
    const double x = static_cast<double>(view.clamped(view.scaled(load_one<T>(source, at))));
    sum += x * x;
  }
  return sum;
}

// One thread to a unit; neighbouring threads read neighbouring elements.
template <class T>
GA_DEVICE void sum_kept(Block& block, const UnitTask& task, const Piece& piece,
                        const View<T>& view) {
  block.each_item(piece.last - piece.first, [&](int64_t i) {
    const int64_t u = piece.first + i;
    const UnitElements unit(piece, u);
    piece.sums[u] = unit_sum_of<T>(piece, unit, task.gradient.source, view);
    if (piece.param_sums)
      piece.param_sums[u] = unit_sum_of<T>(piece, unit, task.param, View<T>(identity(task.param)));
  });
}

// ---- Units that are reduced along the innermost axis --------------------------------------------

// The share of thread q of a lane group in a tile of a run: sum 0 is of the gradient, sum 1 of the
// parameter.
template <class T, class Sum>
GA_APART SquaresOf<T, 2, Sum> tile_of_any(const UnitTask& task, const View<T>& view,
                                          int64_t element, int n, int q) {
  SquaresOf<T, 2, Sum> squares;
  const Reader<T> gradient(task.gradient.source, element);
  const Reader<T> param(task.param.data, task.param.format, element);
  each_step(n, q, [&](int i, int count) {
    const auto raw = gradient.fetch(i, count);
    const auto raw_param = param.fetch(i, count);
    Four<T> x = gradient.unpack(raw, count);
    for (T& value : x.x) value = view.clamped(view.scaled(value));
    squares.of[0].add(x, count);
    squares.of[1].add(param.unpack(raw_param, count), count);
  });
  return squares;
}

// The squares of a gradient without a limit and of its parameter, both of the compute type.
template <class T>
GA_APART SquaresOf<T, 2> tile_of_native(const T* gradient, T scale, const T* param, int n, int q) {
  SquaresOf<T, 2> squares;
  const bool aligned = is_aligned(gradient, native<T>),
             aligned_param = is_aligned(param, native<T>);
  struct Loaded {
    Four<T> gradient, param;
  };
  each_step_ahead<2>(
      n, q,
      [&](int i, int count) {
        Loaded x = {};
        x.gradient = load_some<T, native<T>>(gradient, aligned, i, count);
        if (param) x.param = load_some<T, native<T>>(param, aligned_param, i, count);
        return x;
      },
      [&](int, int count, Loaded x) {
        for (T& value : x.gradient.x) value *= scale;
        squares.of[0].add(x.gradient, count);
        squares.of[1].add(x.param, count);
      });
  return squares;
}

template <class T, class Sum>
GA_DEVICE SquaresOf<T, 2, Sum> tile_squares(const UnitTask& task, const View<T>& view,
                                            int64_t element, int n, int q) {
  if constexpr (std::is_same_v<Sum, T>) {
    const Source& g = task.gradient.source;
    if (view.is_plain() && g.data && g.format == native<T> &&
        (!task.param.data || task.param.format == native<T>)) {
      const T* const param = static_cast<const T*>(task.param.data);
      return tile_of_native<T>(static_cast<const T*>(g.data) + element, view.source_scale,
                               param ? param + element : nullptr, n, q);
    }
  }
  return tile_of_any<T, Sum>(task, view, element, n, q);
}

// Totals of `count` tiles of runs: tile t of them is tile (first + t) % tiles of its run.
template <class T>
GA_DEVICE void sum_run_tiles(Block& block, const UnitTask& task, const View<T>& view,
                             int64_t run_begin, int64_t length, int64_t tiles, int64_t first,
                             int count, PieceTotals& shared) {
  const int sums = task.param.data ? 2 : 1;
  sum_lane_groups<T>(block, count, sums, shared.totals, [&](int t, int q, auto sum) {
    const int64_t run = quotient(first + t, tiles), tile = first + t - run * tiles;
    const int n = static_cast<int>(smaller(kTile, length - tile * kTile));
    return tile_squares<T, decltype(sum)>(task, view, run_begin + run * length + tile * kTile, n,
                                          q);
  });
}

// Eight threads sum a tile of a run; then the tiles of a run and the runs of a unit are added one
// after the other.
template <class T>
GA_DEVICE void sum_runs(Block& block, const UnitTask& task, const Piece& piece, const View<T>& view,
                        PieceTotals& shared) {
  const UnitPattern& p = piece.pattern;
  const int last = p.axes - 1;
  const int64_t begin = piece.begin * p.slab(), end = piece.end * p.slab();
  const int64_t length = last > 0 ? p.extent[last] : end - begin;
  const int64_t runs = last > 0 ? quotient(end - begin, length) : 1;
  const int64_t tiles = (length + kTile - 1) / kTile;
  // This many successive runs belong to different units.
  const int64_t apart = last > 1 ? p.extent[last - 1] : runs;
  const auto add = [&](int64_t run, double of_gradient, double of_param) {
    const int64_t u = UnitPlace(p, begin + run * length).unit;
    piece.sums[u] += of_gradient;
    if (piece.param_sums) piece.param_sums[u] += of_param;
  };
  block.each_item(piece.last - piece.first, [&](int64_t i) {
    piece.sums[piece.first + i] = 0;
    if (piece.param_sums) piece.param_sums[piece.first + i] = 0;
  });
  for (int64_t run = 0; run < runs;) {
    if (tiles <= kItems) {
      const int64_t left = apart - (run - quotient(run, apart) * apart);
      const int64_t count = smaller(smaller(left, runs - run), kItems / tiles);
      sum_run_tiles<T>(block, task, view, p.first + begin, length, tiles, run * tiles,
                       static_cast<int>(count * tiles), shared);
      block.each_item(count, [&](int64_t j) {
        double g = 0, w = 0;
        for (int64_t t = j * tiles; t < (j + 1) * tiles; ++t) {
          g += shared.totals[0][t];
          if (piece.param_sums) w += shared.totals[1][t];
        }
        add(run + j, g, w);
      });
      run += count;
      continue;
    }
    block.once([&] { shared.run[0] = shared.run[1] = 0; });
    for (int64_t tile = 0; tile < tiles; tile += kItems) {
      const int count = static_cast<int>(smaller(kItems, tiles - tile));
      sum_run_tiles<T>(block, task, view, p.first + begin, length, tiles, run * tiles + tile, count,
                       shared);
      block.once([&] {
        for (int k = 0; k < (piece.param_sums ? 2 : 1); ++k) {
          double sum = shared.run[k];
          for (int t = 0; t < count; ++t) sum += shared.totals[k][t];
          shared.run[k] = sum;
        }
      });
    }
    block.once([&] { add(run, shared.run[0], shared.run[1]); });
    ++run;
  }
}

// ---- Pieces -------------------------------------------------------------------------------------

// The task may be shared by the threads, so it is not read after the last barrier.
template <class T>
GA_DEVICE void sum_piece_as(Block& block, const UnitTask& task, const Piece& piece,
                            PieceTotals& shared) {
  const View<T> view = View<T>::of_units(task.gradient);
  const double scale = unit_scale(task.gradient);
  if (piece.pattern.kept[piece.pattern.axes - 1])
    sum_kept<T>(block, task, piece, view);
  else
    sum_runs<T>(block, task, piece, view, shared);
  if (scale == 1) return;
  block.each_item(piece.last - piece.first,
                  [&](int64_t i) { piece.sums[piece.first + i] *= scale * scale; });
}

GA_DEVICE void sum_piece(Block& block, const UnitTask& task, const Piece& piece,
                         PieceTotals& shared) {
  if (task.f64)
    sum_piece_as<double>(block, task, piece, shared);
  else
    sum_piece_as<float>(block, task, piece, shared);
}

// Adds a unit's sums of all pieces, in order, into that of the first.
GA_DEVICE void add_pieces(const UnitPattern& pattern, double* sums, int64_t unit) {
  double sum = sums[unit];
  for (int64_t piece = 1; piece < pattern.pieces; ++piece)
    sum += sums[piece * pattern.units + unit];
  sums[unit] = sum;
}

// Sums a piece, and makes the factors of its units if they lie in no other piece; otherwise the
// block that completes the tensor makes the factors of all. counter: of the tensor, for
// Block::last.
GA_DEVICE void clip_piece(Block& block, const UnitTask& task, int64_t at, unsigned* counter,
                          PieceTotals& shared) {
  const UnitPattern& pattern = *task.pattern;
  const Piece piece(task, at);
  const bool clips = task.param.data != nullptr;
  sum_piece(block, task, piece, shared);
  if (pattern.shared && clips)
    block.each_item(piece.last - piece.first,
                    [&](int64_t i) { store_agc_factor(task, piece.first + i); });
  if ((pattern.shared && !clips) || !block.last(counter, pattern.pieces)) return;
  if (!pattern.shared) {
    block.each_item(pattern.units, [&](int64_t u) {
      add_pieces(pattern, task.sums, u);
      if (!clips) return;
      add_pieces(pattern, task.param_sums, u);
      store_agc_factor(task, u);
    });
  }
  if (clips) block.each_warp(1, [&](int64_t, const Warp& warp) { total_units(task, warp); });
}

}  // namespace ga::cuda
