// SPDX-License-Identifier: Apache-2.0
// The end of a window in one launch: the sums over its gradients that are still missing, and the
// decision (decide.hpp). All blocks sum; the last one to finish decides.
#include "backend/cuda/kernels.hpp"
#include "backend/cuda/loops.hpp"
#include "backend/cuda/units.hpp"
#include "backend/decide.hpp"

namespace ga::cuda {
namespace {

// ---- Norms --------------------------------------------------------------------------------------

// How far norms_of() looks ahead: 64 bytes.
template <int32_t kFormat>
constexpr int kNormsAhead = kFormat == GA_F64   ? 2
                            : kFormat == GA_F32 ? 4
                                                : 8;

template <class T, class Sum>
GA_DEVICE void add_norms(const View<T>& view, bool limited, const Four<T>& four, int count,
                         SquaresOf<T, 2, Sum>& squares) {
  for (int l = 0; l < 4; ++l) {
    if (l >= count) continue;
    const T x = four.x[l] * view.source_scale;
    squares.of[0].add(l, x);
    if (limited) squares.of[1].add(l, view.clamped(x * view.scale));
  }
}

// at: an aligned address.
template <class T, int32_t kFormat, bool kLimited>
GA_DEVICE SquaresOf<T, 2> norms_of(const void* at, const View<T>& view, int first, int n, int q) {
  SquaresOf<T, 2> squares;
  at = advanced(at, kFormat, first);
  each_step_ahead<kNormsAhead<kFormat>>(
      n, q, [&](int i, int m) { return load_some<T, kFormat>(at, true, i, m); },
      [&](int, int m, const Four<T>& four) { add_norms(view, kLimited, four, m, squares); });
  return squares;
}

template <class T, class Sum>
GA_APART SquaresOf<T, 2, Sum> norms_of_any(const Source& source, int64_t offset, View<T> view,
                                           bool limited, int first, int n, int q) {
  SquaresOf<T, 2, Sum> squares;
  const Reader<T> g(source, offset + first);
  each_step(n, q, [&](int i, int m) { add_norms(view, limited, g(i, m), m, squares); });
  return squares;
}

template <class T>
GA_DEVICE void norm_chunk(Block& block, const NormTask& task, int64_t chunk,
                          ChunkTotals<2>& shared) {
  const int64_t offset = chunk * kChunk;
  const int count = chunk_length(task.count, chunk);
  const Source& source = task.gradient.source;
  const View<T> view(task.gradient);
  const bool limited = is_limited(task.gradient);
  const void* const at = advanced(source.data, source.format, offset);
  const bool whole = source.data && source.format <= GA_BF16 && is_aligned(at, source.format);
  const int sums = limited ? 2 : 1;
  // Few gradients are limited, and the limit takes most instructions.
  const auto each_tile = [&](auto known, auto is_limited) {
    constexpr int32_t kKnown = decltype(known)::value;
    constexpr bool kLimited = decltype(is_limited)::value;
    sum_tiles<T>(block, count, sums, shared, [&](int first, int n, int q, auto sum) {
      using Sum = decltype(sum);
      if constexpr (kKnown != 0 && std::is_same_v<Sum, T>)
        return norms_of<T, kKnown, kLimited>(at, view, first, n, q);
      else
        return norms_of_any<T, Sum>(source, offset, view, limited, first, n, q);
    });
  };
  const auto each_of = [&](auto known) {
    if (limited)
      each_tile(known, std::true_type());
    else
      each_tile(known, std::false_type());
  };
  if (whole && source.format == native<T>)
    each_of(Known<native<T>>());
  else if (whole && source.format == GA_BF16)
    each_of(Known<GA_BF16>());
  else
    each_tile(Known<0>(), std::true_type());
  take_totals<T>(block, count, sums, shared, [&](const double* total, bool finite) {
    Partial& partial = task.partials[chunk];
    partial.sum_squares = total[0];
    if (limited) partial.second_squares = total[1];
    partial.nonfinite = !finite;
  });
}

GA_DEVICE void take_norm(Block& block, const NormTask& task, int64_t chunk, ChunkTotals<2>& sums) {
  if (task.f64)
    norm_chunk<double>(block, task, chunk, sums);
  else
    norm_chunk<float>(block, task, chunk, sums);
}

template <size_t kMost>
struct Norm {
  static constexpr int kBlocks = 3;
  Tasks<NormTask, kMost> list;

  GA_DEVICE void operator()(Block& block) const {
    GA_SHARED ChunkTotals<2> sums;
    list.each_chunk(
        block, [&](const NormTask& task, int64_t chunk) { take_norm(block, task, chunk, sums); });
  }
};

// ---- Units --------------------------------------------------------------------------------------

struct ClipUnits {
  static constexpr int kBlocks = 2;
  UnitPieces units;

  GA_DEVICE void operator()(Block& block) const {
    GA_SHARED PieceTotals shared;
    GA_ROLLED
    for (int64_t k = block.index(); k < units.chunk_count; k += block.count()) {
      const ChunkRef at = units.chunks[k];
      clip_piece(block, units.tasks[at.item], at.chunk, &units.counters[at.item], shared);
    }
  }
};

struct Factor {
  static constexpr int kBlocks = 2;
  FactorPieces pieces;
  unsigned* counter;

  GA_DEVICE void operator()(Block& block) const {
    GA_SHARED PieceTotals shared;
    GA_ROLLED
    for (int64_t k = block.index(); k < pieces.count(); k += block.count()) {
      const ChunkRef at = pieces.piece(k);
      const FactorTask& task = pieces.tasks[at.item];
      if ((task.plan->actions & kUpdate) != 0)
        clip_piece(block, sums_of(task, pieces.is_row(k)), at.chunk, pieces.counter(k), shared);
    }
    if (!block.last(counter)) return;
    GA_ROLLED
    for (int64_t k = 0; k < pieces.param_count; ++k) blend(block, pieces.tasks[pieces.params[k]]);
  }
};

// ---- The step -----------------------------------------------------------------------------------

struct ThreadGroup : Block {
  GA_DEVICE explicit ThreadGroup(const Block& block) : Block(block) {}
  // Never: every Op is folded anew.
  GA_DEVICE bool recall(const ScalarTables&, int64_t) const { return false; }
};

GA_DEVICE void show_host() {
#ifdef __CUDACC__
  __threadfence_system();
#endif
}

// Writes the result of the window where the host sees it. The host looks at the slot's window
// before and after it reads; the window is 0 while the rest is written. A window that does not
// count, under GA_NONFINITE_FAIL, is not published.
GA_DEVICE void publish(Block& block, const ScalarTables& tables, const Ring& ring) {
  block.once([&] {
    const Control& c = *tables.control;
    if (c.result.windows == 0) return;
    RingSlot& slot = ring.slots[c.result.windows % ring.size];
    volatile int64_t& window = slot.window;
    window = 0;
    show_host();
    slot.result = c.result;
    slot.ticket = c.ticket;
    slot.nonfinite_at = c.nonfinite_at;
    show_host();
    window = c.result.windows;
  });
}

// A window whose step is not decided yet.
struct Undecided {
  ScalarTables tables;
  WindowTotals totals;

  GA_DEVICE Numbers raw(ga_param param) const {
    return raw_numbers(tables, mean_of(tables, totals), param);
  }
};

// The launch sums nothing before it decides.
struct NoSums {
  static constexpr int kBlocks = 1;
  static constexpr bool kWide = true;
  GA_DEVICE void take(Block&, const Undecided&) const {}
  GA_DEVICE void settle(Block&, const ScalarTables&) const {}
  GA_DEVICE void follow(Block&) const {}
};

// The launch sums norms first.
struct NormSums : NoSums {
  static constexpr int kBlocks = 3;
  static constexpr bool kWide = false;
  NormChunks norms;

  explicit NormSums(const NormChunks& norms) : norms(norms) {}

  GA_DEVICE void take(Block& block, const Undecided& window) const {
    GA_SHARED ChunkTotals<2> sums;
    GA_SHARED NormTask task;
    GA_SHARED Numbers raw;
    GA_ROLLED
    for (int64_t k = block.index(); k < norms.chunk_count; k += block.count()) {
      const ChunkRef at = norms.chunks[k];
      block.once([&] {
        raw = window.raw(at.item);
        task = norm_task(window.tables, norms.tasks, at.item, &raw);
      });
      take_norm(block, task, at.chunk, sums);
    }
  }
};

// The launch takes norms and sums over units first.
struct AllSums : NormSums {
  static constexpr int kBlocks = 2;
  UnitPieces units;
  FactorPieces factors;

  AllSums(const NormChunks& norms, const UnitPieces& units, const FactorPieces& factors)
      : NormSums(norms), units(units), factors(factors) {}

  GA_DEVICE void take(Block& block, const Undecided& window) const {
    NormSums::take(block, window);
    GA_SHARED PieceTotals shared;
    GA_SHARED UnitTask task;
    GA_SHARED Numbers raw;
    GA_ROLLED
    for (int64_t k = block.index(); k < units.chunk_count + factors.count(); k += block.count()) {
      const bool unit = k < units.chunk_count;
      const int64_t f = k - units.chunk_count;
      const ChunkRef at = unit ? units.chunks[k] : factors.piece(f);
      const bool gradient = window.totals.reduced ? some_rank_has_gradient(window.tables, at.item)
                                                  : has_gradient(window.tables, at.item);
      if (!is_touched(window.tables, at.item, gradient)) continue;
      const ParamInput& input = window.tables.param_inputs[at.item];
      if (!unit && input.lazy && !is_dense(input)) continue;  // Update sums these rows
      unsigned* const counter = unit ? &units.counters[at.item] : factors.counter(f);
      block.once([&] {
        raw = window.raw(at.item);
        task = unit ? units.tasks[at.item] : sums_of(factors.tasks[at.item], factors.is_row(f));
        task.gradient.numbers = &raw;
        undecided(window.tables, task.gradient.source);
      });
      clip_piece(block, task, at.chunk, counter, shared);
    }
  }
  GA_DEVICE void settle(Block& block, const ScalarTables& tables) const {
    if (units.param_count == 0) return;
    sum_units(block, tables, units.tasks, units.params, units.param_count);
    settle_units(block, tables, units.params, units.param_count, true);
  }
  GA_DEVICE void follow(Block& block) const {
    GA_ROLLED
    for (int64_t k = 0; k < factors.param_count; ++k)
      blend(block, factors.tasks[factors.params[k]]);
  }
};

// The decision on a window whose sums are complete, and what follows from it. It could run in a
// launch of its own, after a sum over ranks.
template <class Sums>
GA_DEVICE void decide_by_sums(Block& block, const Undecided& window, const Ring& ring,
                              const Sums& sums) {
  ThreadGroup threads(block);
  decide_window(threads, window.tables, window.totals.last);
  sums.settle(block, window.tables);
  publish(block, window.tables, ring);
  sums.follow(block);
}

// Not inlined, so that the loops before it keep their registers.
template <class Sums>
GA_APART void decide_by(Block& block, const Undecided& window, const Ring& ring, const Sums& sums) {
  sum_window(block, window.tables, window.totals);
  decide_by_sums(block, window, ring, sums);
}

template <class Sums>
struct Decide {
  static constexpr int kBlocks = Sums::kBlocks;
  static constexpr bool kWide = Sums::kWide;
  Undecided window;
  Ring ring;
  unsigned* counter;
  Sums sums;

  GA_DEVICE void operator()(Block& block) const {
    sums.take(block, window);
    if (block.last(counter)) decide_by(block, window, ring, sums);
  }
};

template <class Sums>
void launch_decide(const Queue& queue, const Undecided& window, const Ring& ring, const Sums& sums,
                   int64_t items) {
  using Kernel = Decide<Sums>;
  launch(Kernel{window, ring, queue.counters, sums}, chunk_blocks<Kernel>(queue, items),
         queue.stream);
}

}  // namespace

void norm(const Queue& queue, Span<const NormTask> tasks) { launch_tasks<Norm>(queue, tasks); }

void clip_units(const Queue& queue, const UnitPieces& units) {
  launch(ClipUnits{units}, blocks_for(queue, units.chunk_count), queue.stream);
}

void update_factored(const Queue& queue, const FactorPieces& pieces) {
  launch(Factor{pieces, queue.counters}, blocks_for(queue, pieces.count()), queue.stream);
}

void decide(const Queue& queue, const ScalarTables& tables, const WindowTotals& totals,
            const Ring& ring, const NormChunks& norms, const UnitPieces& units,
            const FactorPieces& factors) {
  const Undecided window = {tables, totals};
  const int64_t pieces = units.chunk_count + factors.count();
  if (pieces > 0)
    launch_decide(queue, window, ring, AllSums(norms, units, factors),
                  larger(norms.chunk_count, pieces));
  else if (norms.chunk_count > 0)
    launch_decide(queue, window, ring, NormSums(norms), norms.chunk_count);
  else
    launch_decide(queue, window, ring, NoSums(), 1);
}

}  // namespace ga::cuda
