// SPDX-License-Identifier: Apache-2.0
#include "yardsticks.hpp"

#include <math.h>
#include <omp.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include <algorithm>
#include <atomic>

#if defined(__SSE2__)
#include <immintrin.h>
#endif

namespace {

constexpr int64_t kChunk = 64 * 1024;

// Small arrays are divided evenly, in multiples of 4 KiB.
int64_t chunk_size(int64_t n, int threads) {
  const int64_t share = ((n + threads - 1) / threads + 1023) / 1024 * 1024;
  return std::max(int64_t{1024}, std::min(kChunk, share));
}

// A thread's own chunks are the same in each pass, so that it finds them in its cache. A thread
// that has finished takes chunks of the others, so that a delayed thread does not slow the
// yardstick down.
struct alignas(64) Share {
  std::atomic<int64_t> next;
  int64_t end;
};
constexpr int kMaxThreads = 256;

// Sum of loop(i, j) over chunks [i, j) of [0, n).
template <class Loop>
double sum_chunks(int64_t n, int threads, Loop loop) {
  double sum = 0;
  if (threads == 1) {  // avoids the cost of a parallel region
    for (int64_t i = 0; i < n; i += kChunk) sum += loop(i, std::min(n, i + kChunk));
    return sum;
  }
  threads = std::min(threads, kMaxThreads);
  const int64_t chunk = chunk_size(n, threads), chunks = (n + chunk - 1) / chunk;
  Share shares[kMaxThreads];
  for (int k = 0; k < threads; ++k) {
    shares[k].next.store(chunks * k / threads, std::memory_order_relaxed);
    shares[k].end = chunks * (k + 1) / threads;
  }
#pragma omp parallel num_threads(threads) reduction(+ : sum)
  for (int k = 0; k < threads; ++k) {
    Share& share = shares[(omp_get_thread_num() + k) % threads];
    for (int64_t c; (c = share.next.fetch_add(1, std::memory_order_relaxed)) < share.end;) {
      sum += loop(c * chunk, std::min(n, (c + 1) * chunk));
    }
  }
  return sum;
}

template <class Loop>
void for_chunks(int64_t n, int threads, Loop loop) {
  sum_chunks(n, threads, [loop](int64_t i, int64_t end) {
    loop(i, end);
    return 0.0;
  });
}

// Sixteen floats: one cache line, independent of the processor's registers.
typedef float Line __attribute__((vector_size(64), aligned(4), may_alias));
constexpr int64_t kLine = 16;

// By pointer cast: with memcpy, gcc splits a line in two and stalls on the halves.
Line& line(float* p) { return *reinterpret_cast<Line*>(p); }
const Line& line(const float* p) { return *reinterpret_cast<const Line*>(p); }

void store_nt(float* to, Line value) {
#if defined(__AVX512F__)
  _mm512_stream_ps(to, reinterpret_cast<__m512>(value));
#elif defined(__SSE2__)
  for (int k = 0; k < kLine; k += 4) {
    _mm_stream_ps(to + k, _mm_setr_ps(value[k], value[k + 1], value[k + 2], value[k + 3]));
  }
#else
  line(to) = value;
#endif
}

void fence_nt() {
#if defined(__SSE2__)
  _mm_sfence();
#endif
}

float widen(uint16_t half) {
  const uint32_t bits = uint32_t{half} << 16;
  float x;
  memcpy(&x, &bits, sizeof x);
  return x;
}

uint16_t upper_half(float x) {
  uint32_t bits;
  memcpy(&bits, &x, sizeof bits);
  return static_cast<uint16_t>(bits >> 16);
}

// Two kibibytes ahead: the best distance measured, by a small margin.
constexpr int64_t kAhead = 512;

}  // namespace

float yard_mix_1_0(const float* a, int64_t n, int threads) {
  return static_cast<float>(sum_chunks(n, threads, [=](int64_t i, int64_t end) {
    // Four independent sums, so that the latency of an addition is not what is measured.
    Line sum0 = {}, sum1 = {}, sum2 = {}, sum3 = {};
    for (; i + 4 * kLine <= end; i += 4 * kLine) {
      sum0 += line(a + i);
      sum1 += line(a + i + kLine);
      sum2 += line(a + i + 2 * kLine);
      sum3 += line(a + i + 3 * kLine);
    }
    sum0 += sum1 + sum2 + sum3;
    double sum = 0;
    for (int k = 0; k < kLine; ++k) sum += static_cast<double>(sum0[k]);
    for (; i < end; ++i) sum += static_cast<double>(a[i]);
    return sum;
  }));
}

void yard_mix_1_1(float* a, int64_t n, int threads) {
  for_chunks(n, threads, [=](int64_t i, int64_t end) {
    for (; i < end; ++i) a[i] += 1e-9f;
  });
}

void yard_mix_2_1(float* a, const float* g, int64_t n, int threads) {
  for_chunks(n, threads, [=](int64_t i, int64_t end) {
#pragma omp simd
    for (int64_t k = i; k < end; ++k) a[k] += g[k];
  });
}

void yard_mix_4_3(float* p, float* m, float* v, const float* g, int64_t n, int threads) {
  for_chunks(n, threads, [=](int64_t i, int64_t end) {
#pragma omp simd
    for (int64_t k = i; k < end; ++k) {
      const float sum_p = p[k] + g[k], sum_m = m[k] + g[k], sum_v = v[k] + g[k];
      p[k] = sum_p;
      m[k] = sum_m;
      v[k] = sum_v;
    }
  });
}

void yard_mix_2_1_prefetch(float* a, const float* g, int64_t n, int threads) {
  for_chunks(n, threads, [=](int64_t i, int64_t end) {
    for (; i + kLine <= end; i += kLine) {
      __builtin_prefetch(a + i + kAhead, 1);
      __builtin_prefetch(g + i + kAhead);
      line(a + i) += line(g + i);
    }
    for (; i < end; ++i) a[i] += g[i];
  });
}

void yard_mix_4_3_prefetch(float* p, float* m, float* v, const float* g, int64_t n, int threads) {
  for_chunks(n, threads, [=](int64_t i, int64_t end) {
    for (; i + kLine <= end; i += kLine) {
      __builtin_prefetch(p + i + kAhead, 1);
      __builtin_prefetch(m + i + kAhead, 1);
      __builtin_prefetch(v + i + kAhead, 1);
      __builtin_prefetch(g + i + kAhead);
      const Line x = line(g + i);
      const Line sum_p = line(p + i) + x, sum_m = line(m + i) + x, sum_v = line(v + i) + x;
      line(p + i) = sum_p;
      line(m + i) = sum_m;
      line(v + i) = sum_v;
    }
    for (; i < end; ++i) {
      const float x = g[i];
      p[i] += x;
      m[i] += x;
      v[i] += x;
    }
  });
}

void yard_mix_2_1_half(float* a, const uint16_t* g, int64_t n, int threads) {
  for_chunks(n, threads, [=](int64_t i, int64_t end) {
#pragma omp simd
    for (int64_t k = i; k < end; ++k) a[k] += widen(g[k]);
  });
}

void yard_mix_4_4_half(float* p, float* m, float* v, const float* g, uint16_t* copy, int64_t n,
                       int threads) {
  for_chunks(n, threads, [=](int64_t i, int64_t end) {
#pragma omp simd
    for (int64_t k = i; k < end; ++k) {
      const float sum_p = p[k] + g[k], sum_m = m[k] + g[k], sum_v = v[k] + g[k];
      p[k] = sum_p;
      m[k] = sum_m;
      v[k] = sum_v;
      copy[k] = upper_half(sum_p);
    }
  });
}

void yard_mix_4_3_half(float* p, uint16_t* m, uint16_t* v, const float* g, int64_t n, int threads) {
  for_chunks(n, threads, [=](int64_t i, int64_t end) {
#pragma omp simd
    for (int64_t k = i; k < end; ++k) {
      const float sum_p = p[k] + g[k], sum_m = widen(m[k]) + g[k], sum_v = widen(v[k]) + g[k];
      p[k] = sum_p;
      m[k] = upper_half(sum_m);
      v[k] = upper_half(sum_v);
    }
  });
}

void yard_widen_nt(float* to, const uint16_t* from, int64_t n, int threads) {
  for_chunks(n, threads, [=](int64_t i, int64_t end) {
    for (; i + kLine <= end; i += kLine) {
      alignas(64) float x[kLine];
#pragma omp simd
      for (int64_t k = 0; k < kLine; ++k) x[k] = widen(from[i + k]);
      store_nt(to + i, line(x));
    }
    for (; i < end; ++i) to[i] = widen(from[i]);
    fence_nt();
  });
}

void yard_add_half_nt(float* to, const uint16_t* a, const uint16_t* b, int64_t n, int threads) {
  for_chunks(n, threads, [=](int64_t i, int64_t end) {
    for (; i + kLine <= end; i += kLine) {
      alignas(64) float x[kLine];
#pragma omp simd
      for (int64_t k = 0; k < kLine; ++k) x[k] = widen(a[i + k]) + widen(b[i + k]);
      store_nt(to + i, line(x));
    }
    for (; i < end; ++i) to[i] = widen(a[i]) + widen(b[i]);
    fence_nt();
  });
}

float yard_mix_1_0_half(const uint16_t* a, int64_t n, int threads) {
  return static_cast<float>(sum_chunks(n, threads, [=](int64_t i, int64_t end) {
    float sums[4 * kLine] = {};
    for (; i + 4 * kLine <= end; i += 4 * kLine)
#pragma omp simd
      for (int64_t k = 0; k < 4 * kLine; ++k) sums[k] += widen(a[i + k]);
    double sum = 0;
    for (float x : sums) sum += static_cast<double>(x);
    for (; i < end; ++i) sum += static_cast<double>(widen(a[i]));
    return sum;
  }));
}

void yard_copy(float* to, const float* from, int64_t n, int threads) {
  for_chunks(n, threads, [=](int64_t i, int64_t end) {
#pragma omp simd
    for (int64_t k = i; k < end; ++k)
      to[k] = from[k] + 0.0f;  // the addition keeps it from becoming memcpy
  });
}

void yard_copy_nt(float* to, const float* from, int64_t n, int threads) {
  for_chunks(n, threads, [=](int64_t i, int64_t end) {
    for (; i + kLine <= end; i += kLine) store_nt(to + i, line(from + i));
    for (; i < end; ++i) to[i] = from[i];
    fence_nt();
  });
}

void yard_add_nt(float* to, const float* a, const float* b, int64_t n, int threads) {
  for_chunks(n, threads, [=](int64_t i, int64_t end) {
    for (; i + kLine <= end; i += kLine) store_nt(to + i, line(a + i) + line(b + i));
    for (; i < end; ++i) to[i] = a[i] + b[i];
    fence_nt();
  });
}

void yard_overwrite(float* a, const float* g, float alpha, int64_t n, int threads) {
  for_chunks(n, threads, [=](int64_t i, int64_t end) {
#pragma omp simd
    for (int64_t k = i; k < end; ++k) a[k] = alpha * g[k];
  });
}

void yard_accumulate(float* a, const float* g, float alpha, int64_t n, int threads) {
  for_chunks(n, threads, [=](int64_t i, int64_t end) {
#pragma omp simd
    for (int64_t k = i; k < end; ++k) a[k] += alpha * g[k];
  });
}

double yard_overwrite_norm(float* a, const float* g, float alpha, int64_t n, int threads) {
  return sum_chunks(n, threads, [=](int64_t i, int64_t end) {
    double squares[4 * kLine] = {};
    for (; i + 4 * kLine <= end; i += 4 * kLine) {
#pragma omp simd
      for (int k = 0; k < 4 * kLine; ++k) {
        const float value = alpha * g[i + k];
        a[i + k] = value;
        squares[k] += static_cast<double>(value) * static_cast<double>(value);
      }
    }
    for (; i < end; ++i) {
      a[i] = alpha * g[i];
      squares[0] += static_cast<double>(a[i]) * static_cast<double>(a[i]);
    }
    double sum = 0;
    for (double square : squares) sum += square;
    return sum;
  });
}

void yard_adamw(float* p, float* m, float* v, const float* g, float scale, int64_t n, int threads) {
  for_chunks(n, threads, [=](int64_t i, int64_t end) {
#pragma omp simd
    for (int64_t k = i; k < end; ++k) {
      const float x = scale * g[k];
      const float mean = 0.9f * m[k] + 0.1f * x;
      const float square = 0.999f * v[k] + 0.001f * x * x;
      m[k] = mean;
      v[k] = square;
      p[k] = 0.99999f * p[k] - 1e-3f * mean / (sqrtf(square) + 1e-8f);
    }
  });
}

namespace {

constexpr size_t kHugePage = size_t{2} << 20;

// The arguments of munmap, stored just before a block's first float.
struct Mapping {
  void* start;
  size_t bytes;
};

}  // namespace

float* yard_alloc(int64_t n, int number, int threads) {
  // Blocks are 17 cache lines apart: never at the same offset in a page, nor close to it.
  const size_t offset = 64 + (static_cast<size_t>(number) * 17 * 64) % 4096;
  const size_t bytes = static_cast<size_t>(n) * sizeof(float) + offset + 2 * kHugePage;
  void* start = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (start == MAP_FAILED) return nullptr;
  const uintptr_t first =
      (reinterpret_cast<uintptr_t>(start) + kHugePage - 1) & ~uintptr_t{kHugePage - 1};
  madvise(reinterpret_cast<void*>(first), bytes - kHugePage, MADV_HUGEPAGE);
  float* block = reinterpret_cast<float*>(first + offset);
  const Mapping mapping{start, bytes};
  memcpy(reinterpret_cast<char*>(block) - sizeof mapping, &mapping, sizeof mapping);
  for_chunks(n, threads, [=](int64_t i, int64_t end) {
    // A cheap sequence that does not depend on the number of threads.
    for (; i < end; ++i) {
      const uint32_t bits =
          (static_cast<uint32_t>(i) + 977u * static_cast<uint32_t>(number)) * 2654435761u;
      block[i] = (static_cast<float>(bits >> 8) - 8388608.0f) * 1e-10f;
    }
  });
  return block;
}

void yard_free(float* block) {
  if (!block) return;
  Mapping mapping;
  memcpy(&mapping, reinterpret_cast<char*>(block) - sizeof mapping, sizeof mapping);
  munmap(mapping.start, mapping.bytes);
}
