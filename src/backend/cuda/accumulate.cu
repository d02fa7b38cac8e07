// SPDX-License-Identifier: Apache-2.0
// Kernels that add gradients up, take norms of them and hand them out.
#include "backend/cuda/kernels.hpp"
#include "backend/cuda/loops.hpp"

namespace ga::cuda {
namespace {

// ---- Plain contributions ------------------------------------------------------------------------

constexpr int kStepsAhead = 2;

// a <- [a +] scale g, both aligned.
template <int32_t kFormat>
GA_DEVICE SquaresOf<float, 1> add_plain(float* a, const void* g, float scale, bool keep, int first,
                                        int n, int q) {
  SquaresOf<float, 1> squares;
  squares.clear();
  struct Loaded {
    Four<float> a, g;
  };
  a += first;
  g = advanced(g, kFormat, first);
  each_step_ahead<kStepsAhead>(
      n, q,
      [&](int i, int count) {
        Loaded x;
        x.g = load_some<float, kFormat>(g, true, i, count);
        x.a = x.g;
        if (keep) x.a = load_some<float, GA_F32>(a, true, i, count);
        return x;
      },
      [&](int i, int count, Loaded x) {
        for (int l = 0; l < 4; ++l) {
          const float c = x.g.x[l] * scale;
          x.a.x[l] = keep ? x.a.x[l] + c : c;
        }
        store_some<float, GA_F32>(a, true, i, count, x.a);
        squares.of[0].add(x.a, count);
      });
  return squares;
}

// Those of any other format or address.
template <class T>
GA_DEVICE SquaresOf<T, 1> add_any(T* a, const void* g, int32_t format, T scale, bool keep,
                                  int first, int n, int q) {
  SquaresOf<T, 1> squares;
  squares.clear();
  const bool aligned = is_aligned(a, native<T>), aligned_g = is_aligned(g, format);
  a += first;
  g = advanced(g, format, first);
  each_step(n, q, [&](int i, int count) {
    Four<T> x = {};
    if (keep) x = load_some<T, native<T>>(a, aligned, i, count);
    const Four<T> contribution = load_plain<T>(g, format, aligned_g, i, count);
    for (int l = 0; l < 4; ++l) {
      const T c = contribution.x[l] * scale;
      x.x[l] = keep ? x.x[l] + c : c;
    }
    store_some<T, native<T>>(a, aligned, i, count, x);
    squares.of[0].add(x, count);
  });
  return squares;
}

template <class T>
GA_DEVICE void accumulate_plain_chunk(Block& block, const PlainTarget& target, int64_t chunk,
                                      const void* gradient, T scale, bool keep,
                                      ChunkTotals<1>& sums) {
  const int64_t offset = chunk * kChunk;
  const int count = chunk_length(target.count, chunk);
  T* const a = static_cast<T*>(target.target) + offset;
  const int32_t format = target.gradient_format;
  const void* const g = advanced(gradient, format, offset);
  const bool aligned = is_aligned(a, native<T>) && is_aligned(g, format);
  const auto each_tile = [&](auto add) { sum_tiles<T, 1>(block, count, sums, add); };
  const auto any = [&](int first, int n, int q) {
    return add_any<T>(a, g, format, scale, keep, first, n, q);
  };
  if constexpr (std::is_same_v<T, float>) {
    if (!aligned || format == GA_F64)
      each_tile(any);
    else if (format == GA_F32)
      each_tile([&](int first, int n, int q) {
        return add_plain<GA_F32>(a, g, scale, keep, first, n, q);
      });
    else if (format == GA_BF16)
      each_tile([&](int first, int n, int q) {
        return add_plain<GA_BF16>(a, g, scale, keep, first, n, q);
      });
    else
      each_tile([&](int first, int n, int q) {
        return add_plain<GA_F16>(a, g, scale, keep, first, n, q);
      });
  } else {
    each_tile(any);
  }
  take_totals<T>(block, count, sums, [&](const double* total, bool finite) {
    Partial& partial = target.partials[chunk];
    partial.sum_squares = total[0];
    if (!keep) partial.noise = 0;
    partial.nonfinite = !finite;
  });
}

template <size_t kMost>
struct AccumulatePlain {
  static constexpr int kBlocks = 4;
  const PlainTarget* targets;
  const ChunkRef* chunks;
  int64_t first_chunk, last_chunk;
  double scale;
  const double* divisor;
  ga_param first;
  uintptr_t gradients[kMost];

  GA_DEVICE void operator()(Block& block) const {
    GA_SHARED ChunkTotals<1> sums;
    const double factor = divisor ? scale / *divisor : scale;
    for (int64_t k = first_chunk + block.index(); k < last_chunk; k += block.count()) {
      const ChunkRef at = chunks[k];
      const uintptr_t tagged = gradients[at.item - first];
      if (tagged == 0) continue;
      const auto* const gradient = reinterpret_cast<const void*>(tagged & ~uintptr_t{1});
      const bool keep = (tagged & 1) != 0;
      const PlainTarget& target = targets[at.item];
      if (target.format == GA_F64)
        accumulate_plain_chunk<double>(block, target, at.chunk, gradient, factor, keep, sums);
      else
        accumulate_plain_chunk<float>(block, target, at.chunk, gradient, static_cast<float>(factor),
                                      keep, sums);
    }
  }
};

template <size_t kMost>
void launch_plain(const Queue& queue, const PlainTarget* targets, const ChunkRef* chunks,
                  int64_t first_chunk, int64_t last_chunk, ga_param first,
                  Span<const uintptr_t> gradients, double scale, const double* divisor) {
  AccumulatePlain<kMost> kernel;  // only what is used of it is written
  kernel.targets = targets;
  kernel.chunks = chunks;
  kernel.first_chunk = first_chunk;
  kernel.last_chunk = last_chunk;
  kernel.scale = scale;
  kernel.divisor = divisor;
  kernel.first = first;
  for (size_t i = 0; i < gradients.size; ++i) kernel.gradients[i] = gradients.data[i];
  launch(kernel, blocks_for(queue, last_chunk - first_chunk), queue.stream);
}

// ---- Any contributions --------------------------------------------------------------------------

// What a chunk of a task does.
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
    squares.clear();
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
};

template <class T>
GA_DEVICE void accumulate_chunk(Block& block, const AccumulateTask& task, int64_t chunk,
                                ChunkTotals<2>& sums) {
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
                                     task.contribution, task.param)};
  add.offset = chunk * kChunk;
  sum_tiles<T, 2>(block, count, sums, add);
  take_totals<T>(block, count, sums, [&](const double* total, bool finite) {
    Partial& partial = task.partials[chunk];
    const double own = noise == 0 ? 0 : noise * total[1];
    partial.sum_squares = total[0];
    partial.noise = keep != 0 ? partial.noise + own : own;
    partial.nonfinite = !finite;
  });
}

template <int kMost>
struct Accumulate {
  static constexpr int kBlocks = 3;
  Tasks<AccumulateTask, kMost> list;

  GA_DEVICE void operator()(Block& block) const {
    GA_SHARED ChunkTotals<2> sums;
    for (int64_t k = block.index(); k < list.chunks(); k += block.count()) {
      const int64_t t = list.task_of(k);
      AccumulateTask task = list.tasks[t];
      if (task.plan && !task.plan->active) {
        if (task.plan->keep != 0) continue;
        // Of a micro-batch that is dropped: zeros, where the host takes it for held already.
        task.source[0].data = nullptr;
      }
      if (task.target.format == GA_F64)
        accumulate_chunk<double>(block, task, k - list.before[t], sums);
      else
        accumulate_chunk<float>(block, task, k - list.before[t], sums);
    }
  }
};

// ---- Norms --------------------------------------------------------------------------------------

template <class T>
GA_DEVICE void add_norms(const View<T>& view, bool limited, const Four<T>& four, int count,
                         SquaresOf<T, 2>& squares) {
  for (int l = 0; l < 4; ++l) {
    if (l >= count) continue;
    const T x = four.x[l] * view.source;
    squares.of[0].add(l, x);
    if (limited) squares.of[1].add(l, view.clamped(x * view.scale));
  }
}

// From an aligned address.
template <class T, int32_t kFormat>
GA_DEVICE SquaresOf<T, 2> norms_of(const void* at, const View<T>& view, bool limited, int first,
                                   int n, int q) {
  SquaresOf<T, 2> squares;
  squares.clear();
  at = advanced(at, kFormat, first);
  each_step_ahead<kStepsAhead>(
      n, q, [&](int i, int m) { return load_some<T, kFormat>(at, true, i, m); },
      [&](int, int m, const Four<T>& four) { add_norms(view, limited, four, m, squares); });
  return squares;
}

template <class T>
GA_APART SquaresOf<T, 2> norms_of_any(const Source& source, int64_t offset, View<T> view,
                                      bool limited, int first, int n, int q) {
  SquaresOf<T, 2> squares;
  squares.clear();
  const Reader<T> g(source, offset + first);
  each_step(n, q, [&](int i, int m) { add_norms(view, limited, g(i, m), m, squares); });
  return squares;
}

template <class T>
GA_DEVICE void norm_chunk(Block& block, const NormTask& task, int64_t chunk, ChunkTotals<2>& sums) {
  const int64_t offset = chunk * kChunk;
  const int count = chunk_length(task.count, chunk);
  const Source& source = task.gradient.source;
  const View<T> view(task.gradient);
  const bool limited = is_limited(task.gradient);
  const void* const at = advanced(source.data, source.format, offset);
  const bool whole = source.data && source.format <= GA_BF16 && is_aligned(at, source.format);
  const auto each_tile = [&](auto norms) { sum_tiles<T, 2>(block, count, sums, norms); };
  if (whole && source.format == native<T>)
    each_tile([&](int first, int n, int q) {
      return norms_of<T, native<T>>(at, view, limited, first, n, q);
    });
  else if (whole && source.format == GA_BF16)
    each_tile([&](int first, int n, int q) {
      return norms_of<T, GA_BF16>(at, view, limited, first, n, q);
    });
  else
    each_tile([&](int first, int n, int q) {
      return norms_of_any<T>(source, offset, view, limited, first, n, q);
    });
  take_totals<T>(block, count, sums, [&](const double* total, bool finite) {
    Partial& partial = task.partials[chunk];
    partial.sum_squares = total[0];
    if (limited) partial.limited = total[1];
    partial.nonfinite = !finite;
  });
}

template <int kMost>
struct Norm {
  static constexpr int kBlocks = 4;
  Tasks<NormTask, kMost> list;

  GA_DEVICE void operator()(Block& block) const {
    GA_SHARED ChunkTotals<2> sums;
    for (int64_t k = block.index(); k < list.chunks(); k += block.count()) {
      const int64_t t = list.task_of(k);
      if (list.tasks[t].f64)
        norm_chunk<double>(block, list.tasks[t], k - list.before[t], sums);
      else
        norm_chunk<float>(block, list.tasks[t], k - list.before[t], sums);
    }
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
  block.each([&](int thread) {
    GA_ROLLED
    for (int i = 4 * thread; i < count; i += 4 * kThreads) {
      const int m = count - i < 4 ? count - i : 4;
      Four<T> x = {{constant, constant, constant, constant}};
      if (task.gradient.source.data) {
        x = g(i, m);
        for (T& value : x.x) value = view(value);
      }
      target(i, m, x);
    }
  });
}

template <int kMost>
struct Finish {
  static constexpr int kBlocks = 4;
  Tasks<FinishTask, kMost> list;

  GA_DEVICE void operator()(Block& block) const {
    for (int64_t k = block.index(); k < list.chunks(); k += block.count()) {
      const int64_t t = list.task_of(k);
      if (list.tasks[t].f64)
        finish_chunk<double>(block, list.tasks[t], k - list.before[t]);
      else
        finish_chunk<float>(block, list.tasks[t], k - list.before[t]);
    }
  }
};

}  // namespace

void accumulate_plain(const Queue& queue, const PlainTarget* targets, const ChunkRef* chunks,
                      int64_t first_chunk, int64_t last_chunk, ga_param first,
                      Span<const uintptr_t> gradients, double scale, const double* divisor) {
  // Few tensors do not carry the arguments of many.
  const auto launch_for = gradients.size <= 64     ? launch_plain<64>
                          : gradients.size <= 1000 ? launch_plain<1000>
                                                   : launch_plain<kMostGradients>;
  if (gradients.size > kMostGradients)
    fail(GA_ERROR_INTERNAL, "%zu gradients were given to one launch", gradients.size);
  launch_for(queue, targets, chunks, first_chunk, last_chunk, first, gradients, scale, divisor);
}

void accumulate(const Queue& queue, Span<const AccumulateTask> tasks) {
  launch_tasks<Accumulate>(queue, tasks);
}

void norm(const Queue& queue, Span<const NormTask> tasks) { launch_tasks<Norm>(queue, tasks); }

void finish(const Queue& queue, Span<const FinishTask> tasks) {
  launch_tasks<Finish>(queue, tasks);
}

}  // namespace ga::cuda
