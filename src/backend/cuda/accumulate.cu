// SPDX-License-Identifier: Apache-2.0
// Kernels that accumulate gradients and copy them out.
#include <iterator>

#include "backend/cuda/kernels.hpp"
#include "backend/cuda/loops.hpp"

namespace ga::cuda {
namespace {

// ---- Plain contributions ------------------------------------------------------------------------

// A contribution: its gradient from a chunk's first element on. T is float or double.
template <class T>
struct Plain {
  const void* gradient;
  T scale;
};

// What a contribution is added to: nothing, the target's contents (keep), or with kPair a
// contribution of the same format that was not stored.
template <class T>
struct PlainBase {
  Plain<T> pair;
  bool keep;
};

// a <- [base +] scale g, all aligned.
template <int32_t kFormat, bool kPair>
GA_DEVICE SquaresOf<float, 1> add_plain(float* a, Plain<float> of, PlainBase<float> base, int first,
                                        int n, int q) {
  SquaresOf<float, 1> squares;
  struct Loaded {
    Four<float> a, g;
  };
  a += first;
  const void* const g = advanced(of.gradient, kFormat, first);
  const void* const pair = kPair ? advanced(base.pair.gradient, kFormat, first) : nullptr;
  each_step_ahead<kStepsAhead>(
      n, q,
      [&](int i, int count) {
        Loaded x;
        x.g = load_some<float, kFormat>(g, true, i, count);
        x.a = {};  // not x.g, which would wait for the gradient before the target is read
        if (kPair)
          x.a = load_some<float, kFormat>(pair, true, i, count);
        else if (base.keep)
          x.a = load_some<float, GA_F32>(a, true, i, count);
        return x;
      },
      [&](int i, int count, Loaded x) {
        for (int l = 0; l < 4; ++l) {
          const float c = x.g.x[l] * of.scale;
          if (kPair)
            x.a.x[l] = x.a.x[l] * base.pair.scale + c;
          else
            x.a.x[l] = base.keep ? x.a.x[l] + c : c;
        }
        store_some<float, GA_F32>(a, true, i, count, x.a);
        squares.of[0].add(x.a, count);
      });
  return squares;
}

// a <- [base +] scale g, of any format and alignment.
template <class T, bool kPair>
GA_DEVICE SquaresOf<T, 1> add_any(T* a, Plain<T> of, PlainBase<T> base, int32_t format, int first,
                                  int n, int q) {
  SquaresOf<T, 1> squares;
  a += first;
  const void* const g = advanced(of.gradient, format, first);
  const void* const pair = kPair ? advanced(base.pair.gradient, format, first) : nullptr;
  const bool aligned = is_aligned(a, native<T>), aligned_g = is_aligned(g, format),
             aligned_pair = is_aligned(pair, format);
  each_step(n, q, [&](int i, int count) {
    Four<T> x = {};
    if (kPair)
      x = load_plain<T>(pair, format, aligned_pair, i, count);
    else if (base.keep)
      x = load_some<T, native<T>>(a, aligned, i, count);
    const Four<T> contribution = load_plain<T>(g, format, aligned_g, i, count);
    for (int l = 0; l < 4; ++l) {
      const T c = contribution.x[l] * of.scale;
      if (kPair)
        x.x[l] = x.x[l] * base.pair.scale + c;
      else
        x.x[l] = base.keep ? x.x[l] + c : c;
    }
    store_some<T, native<T>>(a, aligned, i, count, x);
    squares.of[0].add(x, count);
  });
  return squares;
}

// The squares of what was stored, in double.
template <class T>
GA_APART SquaresOf<T, 1, double> squares_stored(const Array& target, int64_t first, int n, int q) {
  SquaresOf<T, 1, double> squares;
  const Reader<T> stored(target.data, target.format, first);
  each_step(n, q, [&](int i, int count) { squares.of[0].add(stored(i, count), count); });
  return squares;
}

// of and base begin at the parameter's first element.
template <class T, bool kPair>
GA_DEVICE void accumulate_plain_chunk(Block& block, const PlainTarget& target, int64_t chunk,
                                      Plain<T> of, PlainBase<T> base, ChunkTotals<1>& shared) {
  const int64_t offset = chunk * kChunk;
  const int count = chunk_length(target.count, chunk);
  T* const a = static_cast<T*>(target.target) + offset;
  const int32_t format = target.gradient_format;
  of.gradient = advanced(of.gradient, format, offset);
  bool aligned = is_aligned(a, native<T>) && is_aligned(of.gradient, format);
  if (kPair) {
    base.pair.gradient = advanced(base.pair.gradient, format, offset);
    aligned = aligned && is_aligned(base.pair.gradient, format);
  }
  const auto each_tile = [&](auto known) {
    constexpr int32_t kKnown = decltype(known)::value;
    sum_tiles<T>(block, count, 1, shared, [&](int first, int n, int q, auto sum) {
      if constexpr (!std::is_same_v<decltype(sum), T>)
        return squares_stored<T>({target.target, target.format}, offset + first, n, q);
      else if constexpr (kKnown != 0)
        return add_plain<kKnown, kPair>(a, of, base, first, n, q);
      else
        return add_any<T, kPair>(a, of, base, format, first, n, q);
    });
  };
  if (std::is_same_v<T, double> || !aligned || format == GA_F64) {
    each_tile(Known<0>());
  } else if constexpr (std::is_same_v<T, float>) {
    if (format == GA_F32)
      each_tile(Known<GA_F32>());
    else if (format == GA_BF16)
      each_tile(Known<GA_BF16>());
    else
      each_tile(Known<GA_F16>());
  }
  take_totals<T>(block, count, 1, shared, [&](const double* total, bool finite) {
    Partial& partial = target.partials[chunk];
    partial.sum_squares = total[0];
    if (kPair || !base.keep) partial.noise = 0;
    partial.nonfinite = !finite;
  });
}

GA_DEVICE const void* address_of(uintptr_t tagged) {
  return reinterpret_cast<const void*>(tagged & ~uintptr_t{1});
}

// gradients: kMost, then with kPair as many that were not stored.
template <size_t kMost, bool kPair>
struct AccumulatePlain {
  static constexpr int kBlocks = kPair ? 3 : 4;
  static constexpr bool kPaired = kPair;
  PlainCall call;
  uintptr_t gradients[kMost * (kPair ? 2 : 1)];

  GA_DEVICE void operator()(Block& block) const {
    GA_SHARED ChunkTotals<1> sums;
    const double scale = scale_of(call.of), scale_before = kPair ? scale_of(call.before) : 0;
    for (int64_t k = call.first_chunk + block.index(); k < call.last_chunk; k += block.count()) {
      const ChunkRef at = call.chunks[k];
      const int64_t i = at.item - call.first;
      const uintptr_t tagged = gradients[i];
      if (tagged == 0) continue;
      const void* const gradient = address_of(tagged);
      const void* const before = kPair ? address_of(gradients[kMost + i]) : nullptr;
      const bool keep = (tagged & 1) != 0;
      const PlainTarget& target = call.targets[at.item];
      if (target.format == GA_F64)
        accumulate_plain_chunk<double, kPair>(block, target, at.chunk, {gradient, scale},
                                              {{before, scale_before}, keep}, sums);
      else
        accumulate_plain_chunk<float, kPair>(
            block, target, at.chunk, {gradient, static_cast<float>(scale)},
            {{before, static_cast<float>(scale_before)}, keep}, sums);
    }
  }
};

template <size_t kMost>
using AccumulateSingle = AccumulatePlain<kMost, false>;
template <size_t kMost>
using AccumulatePair = AccumulatePlain<kMost, true>;

// ---- Any contributions --------------------------------------------------------------------------

// What a task does to a chunk.
template <class T>
struct Contribution {
  Array target;
  Source source[2];
  int sources;
  T scale[2], kept;
  bool keep, noise;
  Rounding rounding;
  int64_t offset;

  GA_APART SquaresOf<T, 2> operator()(int first, int n, int q) const {
    const int64_t at = offset + first;
    const Reader<T> old(target, at);
    const Writer<T> store(target, at, rounding, at);
    const Reader<T> g0(source[0], at), g1(source[1], at);
    SquaresOf<T, 2> squares;
    each_step(n, q, [&](int i, int count) {
      typename Reader<T>::Raw raw = {}, raw0, raw1 = {};
      if (keep) raw = old.fetch(i, count);
      raw0 = g0.fetch(i, count);
      if (sources == 2) raw1 = g1.fetch(i, count);
      Four<T> x = g0.unpack(raw0, count);
      for (T& c : x.x) c *= scale[0];
      if (sources == 2) {
        const Four<T> y = g1.unpack(raw1, count);
        for (int l = 0; l < 4; ++l) x.x[l] += y.x[l] * scale[1];
      }
      if (noise) squares.of[1].add(x, count);
      if (keep) {
        const Four<T> a = old.unpack(raw, count);
        for (int l = 0; l < 4; ++l) x.x[l] = a.x[l] * kept + x.x[l];
      }
      squares.of[0].add(store(i, count, x), count);
    });
    return squares;
  }

  // The squares of what this has stored, and with noise of what it has added, in double.
  GA_APART SquaresOf<T, 2, double> stored(int first, int n, int q) const {
    const int64_t at = offset + first;
    SquaresOf<T, 2, double> squares;
    squares.of[0] = squares_stored<T>(target, at, n, q).of[0];
    if (!noise) return squares;
    const Reader<T> g0(source[0], at), g1(source[1], at);
    each_step(n, q, [&](int i, int count) {
      Four<T> x = g0(i, count);
      for (T& c : x.x) c *= scale[0];
      if (sources == 2) {
        const Four<T> y = g1(i, count);
        for (int l = 0; l < 4; ++l) x.x[l] += y.x[l] * scale[1];
      }
      squares.of[1].add(x, count);
    });
    return squares;
  }

  // With kMaximum: the larger of target and source, or of two sources.
  GA_APART SquaresOf<T, 2> largest(int first, int n, int q) const {
    const int64_t at = offset + first;
    const bool two = sources == 2;
    const Reader<T> a(two ? source[0].data : target.data, two ? source[0].format : target.format,
                      at),
        b(source[two ? 1 : 0], at);
    const T scale_a = two ? scale[0] : T(1), scale_b = scale[two ? 1 : 0];
    const Writer<T> store(target, at, kNearest, at);
    SquaresOf<T, 2> squares;
    each_step(n, q, [&](int i, int count) {
      const typename Reader<T>::Raw raw_a = a.fetch(i, count), raw_b = b.fetch(i, count);
      Four<T> x = a.unpack(raw_a, count);
      const Four<T> y = b.unpack(raw_b, count);
      for (int l = 0; l < 4; ++l) x.x[l] = maximum(x.x[l] * scale_a, y.x[l] * scale_b);
      squares.of[0].add(store(i, count, x), count);
    });
    return squares;
  }
};

template <class T>
GA_DEVICE void accumulate_chunk(Block& block, const AccumulateTask& task, int64_t chunk,
                                ChunkTotals<2>& shared) {
  const MicroPlan* const plan = task.plan;
  const double keep = plan ? plan->keep : task.keep, noise = plan ? plan->noise : task.noise;
  const int count = chunk_length(task.count, chunk);
  Contribution<T> add;
  add.target = task.target;
  add.source[0] = task.source[0];
  add.source[1] = task.source[1];
  add.sources = task.sources;
  add.scale[0] = static_cast<T>(plan ? plan->scale : scale_of(task.source[0]));
  add.scale[1] = task.sources == 2 ? static_cast<T>(scale_of(task.source[1])) : T(0);
  add.kept = static_cast<T>(keep);
  add.keep = keep != 0;
  add.noise = noise != 0;
  add.rounding = kNearest;
  if (task.counter)
    add.rounding = {true, random_key(task.seed, Purpose::kAccumulate, *task.counter,
                                     task.contribution, task.key)};
  add.offset = chunk * kChunk;
  const bool larger = keep == kMaximum;
  const int sums = add.noise ? 2 : 1;
  sum_tiles<T>(block, count, sums, shared, [&](int first, int n, int q, auto sum) {
    if constexpr (std::is_same_v<decltype(sum), T>)
      return larger ? add.largest(first, n, q) : add(first, n, q);
    else
      return add.stored(first, n, q);
  });
  take_totals<T>(block, count, sums, shared, [&](const double* total, bool finite) {
    Partial& partial = task.partials[chunk];
    const double own = noise == 0 ? 0 : noise * total[1];
    partial.sum_squares = total[0];
    partial.noise = keep != 0 ? partial.noise + own : own;
    partial.nonfinite = !finite;
  });
}

template <size_t kMost>
struct Accumulate {
  static constexpr int kBlocks = 3;
  Tasks<AccumulateTask, kMost> list;

  GA_DEVICE void operator()(Block& block) const {
    GA_SHARED ChunkTotals<2> sums;
    list.each_chunk(block, [&](AccumulateTask task, int64_t chunk) {
      if (task.plan && !task.plan->active) {
        if (task.plan->keep != 0) return;
        // The micro-batch is dropped, but the host takes the target for held: it becomes zeros.
        task.source[0].data = nullptr;
      }
      if (task.target.format == GA_F64)
        accumulate_chunk<double>(block, task, chunk, sums);
      else
        accumulate_chunk<float>(block, task, chunk, sums);
    });
  }
};

// ---- Finish -------------------------------------------------------------------------------------

template <class T>
GA_DEVICE void finish_chunk(Block& block, const FinishTask& task, int64_t chunk) {
  const int64_t offset = chunk * kChunk;
  const int count = chunk_length(task.count, chunk);
  const View<T> view(task.gradient);
  const Reader<T> g(task.gradient.source, offset);
  const Writer<T> target(task.target, offset, kNearest, offset);
  const T constant = static_cast<T>(task.constant);
  const bool there = task.has_gradient();
  if (there && task.contributed && task.gradient.source.data == task.target.data) return;
  block.each([&](int thread) {
    GA_ROLLED
    for (int i = 4 * thread; i < count; i += 4 * kThreads) {
      const int m = count - i < 4 ? count - i : 4;
      Four<T> x = {{constant, constant, constant, constant}};
      if (there) {
        x = g(i, m);
        for (T& value : x.x) value = view(value);
      }
      target(i, m, x);
    }
  });
}

template <size_t kMost>
struct Finish {
  static constexpr int kBlocks = 4;
  Tasks<FinishTask, kMost> list;

  GA_DEVICE void operator()(Block& block) const {
    list.each_chunk(block, [&](const FinishTask& task, int64_t chunk) {
      if (task.f64)
        finish_chunk<double>(block, task, chunk);
      else
        finish_chunk<float>(block, task, chunk);
    });
  }
};

}  // namespace

void accumulate_plain(const Queue& queue, const PlainCall& call, Span<const uintptr_t> gradients,
                      const uintptr_t* before) {
  const size_t n = gradients.size;
  if (n > (before ? kMostGradients / 2 : kMostGradients))
    fail(GA_ERROR_INTERNAL, "%zu gradients were given to one launch", n);
  const auto fill = [&](auto& kernel) {
    kernel.call = call;
    std::copy_n(gradients.data, n, kernel.gradients);
    using Kernel = std::decay_t<decltype(kernel)>;
    if constexpr (Kernel::kPaired)
      std::copy_n(before, n, kernel.gradients + std::size(kernel.gradients) / 2);
    return blocks_for(queue, call.last_chunk - call.first_chunk);
  };
  if (before)
    launch_sized<AccumulatePair, 64, kMostGradients / 2>(queue, n, fill);
  else
    launch_sized<AccumulateSingle, 64, 1000, kMostGradients>(queue, n, fill);
}

void accumulate(const Queue& queue, Span<const AccumulateTask> tasks) {
  launch_tasks<Accumulate>(queue, tasks);
}

void finish(const Queue& queue, Span<const FinishTask> tasks) {
  launch_tasks<Finish>(queue, tasks);
}

}  // namespace ga::cuda
