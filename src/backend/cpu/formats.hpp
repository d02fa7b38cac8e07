// SPDX-License-Identifier: Apache-2.0
// Unpacks tiles of arrays to the type computed in, and packs them again. Included in the same way
// as vectors.hpp. The conversions of single numbers are in numbers.hpp.
#pragma once

#include "backend/cpu/vectors.hpp"

// ---- Reading ------------------------------------------------------------------------------------

template <class T>
constexpr int32_t native = std::is_same_v<T, float> ? GA_F32 : GA_F64;

// Converts elements [offset, offset + count) of a source to T.
template <class T>
using Load = const T* (*)(const void* data, int64_t offset, int64_t count, T* tile);

GA_INLINE void prefetch_ahead(const void* p) {
  if (prefetching) __builtin_prefetch(static_cast<const char*>(p) + 2048, 0, 3);
}

template <class T, class Stored>
const T* load_other(const void* data, int64_t offset, int64_t count, T* tile) {
  const Stored* const x = static_cast<const Stored*>(data) + offset;
  for (int64_t i = 0; i < count; ++i) tile[i] = static_cast<T>(x[i]);
  return tile;
}

template <class T>
const T* load_bf16(const void* data, int64_t offset, int64_t count, T* tile) {
  const uint16_t* const x = static_cast<const uint16_t*>(data) + offset;
  int64_t i = 0;
  for (; i + kBlock <= count; i += kBlock) {
    prefetch_ahead(x + i);
    prefetch_ahead(x + i + kBlock / 2);
    for (int64_t j = i; j < i + kBlock; ++j) tile[j] = static_cast<T>(from_bf16(x[j]));
  }
  for (; i < count; ++i) tile[i] = static_cast<T>(from_bf16(x[i]));
  return tile;
}

GA_INLINE void widen_f16_block(const uint16_t* x, float* block) {
#if defined(__AVX512F__)
  for (int64_t j = 0; j < kBlock; j += 16)
    _mm512_storeu_ps(block + j,
                     _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(x + j))));
#elif defined(__F16C__)
  for (int64_t j = 0; j < kBlock; j += 8)
    _mm256_storeu_ps(block + j,
                     _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(x + j))));
#elif defined(__aarch64__)
  __fp16 h[kBlock];
  std::memcpy(h, x, sizeof h);
  for (int64_t j = 0; j < kBlock; ++j) block[j] = static_cast<float>(h[j]);
#else
  for (int64_t j = 0; j < kBlock; ++j) block[j] = from_f16(x[j]);
#endif
}

template <class T>
const T* load_f16(const void* data, int64_t offset, int64_t count, T* tile) {
  const uint16_t* const x = static_cast<const uint16_t*>(data) + offset;
  int64_t i = 0;
  for (; i + kBlock <= count; i += kBlock) {
    prefetch_ahead(x + i);
    prefetch_ahead(x + i + kBlock / 2);
    if constexpr (std::is_same_v<T, float>) {
      widen_f16_block(x + i, tile + i);
    } else {
      float block[kBlock];
      widen_f16_block(x + i, block);
      for (int64_t j = 0; j < kBlock; ++j) tile[i + j] = static_cast<T>(block[j]);
    }
  }
  for (; i < count; ++i) tile[i] = static_cast<T>(from_f16(x[i]));
  return tile;
}

template <class T>
const T* load(const Source& s, int64_t offset, int64_t count, T* tile);

// The address of an element, for prefetching.
struct Place {
  const char* at;
  int64_t size;  // of an element; 0: the address is not known

  GA_INLINE Place(int32_t format, const void* data, int64_t element) : at(nullptr), size(0) {
    if (format == kClipped) {
      const Source& inner = static_cast<const ClippedGradient*>(data)->gradient.source;
      format = inner.format;
      data = inner.data;
    }
    constexpr int64_t sizes[] = {0, 4, 8, 2, 2, 4, 8, 1};
    if (format > GA_U8 || !data) return;  // NULL: a gradient of zeros
    size = sizes[format];
    at = static_cast<const char*>(data) + element * size;
  }
  Place() = default;

  // Fetches a block that starts `distance` elements after that element.
  template <int kWrite>
  GA_INLINE void prefetch_block(int64_t distance) const {
    if (!prefetching) return;
    for (int64_t line = 0; line < kBlock * size; line += 64)
      __builtin_prefetch(at + distance * size + line, kWrite, 3);
  }
};

template <class T>
const T* load_pair(const void* data, int64_t offset, int64_t count, T* tile) {
  const Pair& pair = *static_cast<const Pair*>(data);
  alignas(64) T low[kTile];
  load<T>({pair.high, pair.dtype, 1, nullptr}, offset, count, tile);
  const T* const l = load<T>({pair.low, pair.dtype, 1, nullptr}, offset, count, low);
  for (int64_t i = 0; i < count; ++i) tile[i] += l[i];
  return tile;
}

template <class T>
const T* load_sparse(const void* data, int64_t offset, int64_t count, T* tile) {
  const SparseRows& m = *static_cast<const SparseRows*>(data);
  const T* const from = static_cast<const T*>(m.data);
  int64_t row = offset / m.columns;
  int64_t end = (row + 1) * m.columns - offset;  // of the row, relative to offset
  for (int64_t i = 0; i < count; ++row, end += m.columns) {
    const int64_t n = smaller(end, count) - i;
    const int64_t slot = m.rows->slots[row];
    if (slot < m.rows->size && m.rows->entries[slot].row == row)
      std::memcpy(tile + i, from + offset + i, static_cast<size_t>(n) * sizeof(T));
    else
      std::memset(tile + i, 0, static_cast<size_t>(n) * sizeof(T));
    i += n;
  }
  return tile;
}

template <class T>
const T* load_outer(const void* data, int64_t offset, int64_t count, T* tile) {
  const OuterProduct& m = *static_cast<const OuterProduct*>(data);
  int64_t row = offset / m.column_count;  // over all matrices
  int64_t column = offset % m.column_count;
  for (int64_t i = 0; i < count; ++row, column = 0) {
    const int64_t n = smaller(m.column_count - column, count - i);
    const T value = static_cast<const T*>(m.rows)[row];
    if (m.columns) {
      const int64_t matrix = row / m.row_count;
      const T scale = value * static_cast<const T*>(m.scales)[matrix];
      const T* const columns = static_cast<const T*>(m.columns) + matrix * m.column_count + column;
      for (int64_t j = 0; j < n; ++j) tile[i + j] = scale * columns[j];
    } else {
      for (int64_t j = 0; j < n; ++j) tile[i + j] = value;
    }
    i += n;
  }
  return tile;
}

template <class T>
const T* load_clipped(const void* data, int64_t offset, int64_t count, T* tile);
template <class T>
const T* load_followed(const void* data, int64_t offset, int64_t count, T* tile);
template <class T>
const T* load_followed_whole(const void* data, int64_t offset, int64_t count, T* tile);

template <class T>
struct Loads {
  using Other = std::conditional_t<std::is_same_v<T, float>, double, float>;
  static constexpr Load<T> table[] = {nullptr,
                                      load_other<T, Other>,  // T itself is used in place
                                      load_other<T, Other>,
                                      load_f16<T>,
                                      load_bf16<T>,
                                      nullptr,
                                      nullptr,
                                      nullptr,
                                      load_pair<T>,
                                      load_sparse<T>,
                                      load_outer<T>,
                                      load_clipped<T>,
                                      load_followed<T>,
                                      load_followed_whole<T>};
};

template <class T>
const T* load(const Source& s, int64_t offset, int64_t count, T* tile) {
  alignas(64) static constexpr T zeros[kTile] = {};
  if (!s.data) return zeros;
  if (s.format == native<T>) return static_cast<const T*>(s.data) + offset;
  return Loads<T>::table[s.format](s.data, offset, count, tile);
}

// ---- Writing ------------------------------------------------------------------------------------

// Converts a tile to elements [offset, offset + count) of an array. index: of the first element,
// for stochastic rounding.
template <class T>
using Store = void (*)(void* data, int64_t offset, int64_t count, const T* tile, uint64_t index,
                       const Rounding& rounding);

template <class T, class Stored>
void store_plain(void* data, int64_t offset, int64_t count, const T* tile, uint64_t,
                 const Rounding&) {
  Stored* const x = static_cast<Stored*>(data) + offset;
  if constexpr (std::is_same_v<T, Stored>) {
    if (x != tile) std::memcpy(x, tile, static_cast<size_t>(count) * sizeof(T));
  } else {
    for (int64_t i = 0; i < count; ++i) x[i] = static_cast<Stored>(tile[i]);
  }
}

// Runs body(i, bits) for i in [0, count) with the random bits of element index + i. The inner loop
// is over indices with the same upper half.
template <class Body>
GA_INLINE void stochastic(uint64_t key, uint64_t index, int64_t count, Body&& body) {
  for (int64_t i = 0; i < count;) {
    const uint64_t at = index + static_cast<uint64_t>(i);
    const auto left = static_cast<int64_t>((uint64_t{1} << 32) - (at & 0xffffffff));
    const int64_t end = i + smaller(left, count - i);
    const Chance chance(key, at >> 32);
    for (int64_t j = i; j < end; ++j)
      body(j, chance(static_cast<uint32_t>(at) + static_cast<uint32_t>(j - i)));
    i = end;
  }
}

template <class T>
[[gnu::noinline]] void store_bf16(void* data, int64_t offset, int64_t count, const T* tile,
                                  uint64_t index, const Rounding& rounding) {
  uint16_t* const __restrict x = static_cast<uint16_t*>(data) + offset;
  if (!rounding.stochastic) {
    for (int64_t i = 0; i < count; ++i) x[i] = to_bf16(static_cast<float>(tile[i]));
    return;
  }
  stochastic(rounding.key, index, count, [&](int64_t i, uint32_t random) GA_INLINE_BODY {
    x[i] = to_bf16(static_cast<float>(tile[i]), random);
  });
}

// Stores two arrays, rounded stochastically by the lower and the upper halves of the same random
// bits.
template <class T>
[[gnu::noinline]] void store_bf16_pair(const Array& a, const Array& b, int64_t offset,
                                       int64_t count, const T* tile_a, const T* tile_b,
                                       uint64_t index, uint64_t key) {
  uint16_t* const __restrict x = static_cast<uint16_t*>(a.data) + offset;
  uint16_t* const __restrict y = static_cast<uint16_t*>(b.data) + offset;
  stochastic(key, index, count, [&](int64_t i, uint32_t random) GA_INLINE_BODY {
    x[i] = to_bf16(static_cast<float>(tile_a[i]), random);
    y[i] = to_bf16(static_cast<float>(tile_b[i]), random >> 16);
  });
}

template <class T>
void store_f16(void* data, int64_t offset, int64_t count, const T* tile, uint64_t index,
               const Rounding& rounding) {
  uint16_t* const __restrict x = static_cast<uint16_t*>(data) + offset;
  if (rounding.stochastic) {
    stochastic(rounding.key, index, count, [&](int64_t i, uint32_t random) GA_INLINE_BODY {
      x[i] = to_f16(static_cast<float>(tile[i]), random);
    });
    return;
  }
  int64_t i = 0;
#if defined(__F16C__)
  if constexpr (std::is_same_v<T, float>)
    for (; i + 8 <= count; i += 8)
      _mm_storeu_si128(reinterpret_cast<__m128i*>(x + i),
                       _mm256_cvtps_ph(_mm256_loadu_ps(tile + i), _MM_FROUND_TO_NEAREST_INT));
#endif
  for (; i < count; ++i) x[i] = to_f16(static_cast<float>(tile[i]));
}

template <class T>
void store(const Array& a, int64_t offset, int64_t count, const T* tile, uint64_t index,
           const Rounding& rounding);

// Stores the nearest 16-bit number, and the nearest one to the remainder.
template <class T>
void store_pair(void* data, int64_t offset, int64_t count, const T* tile, uint64_t,
                const Rounding&) {
  const Pair& pair = *static_cast<const Pair*>(data);
  const Rounding nearest = {false, 0};
  store<T>({pair.high, pair.dtype}, offset, count, tile, 0, nearest);
  alignas(64) T high[kTile];
  load<T>({pair.high, pair.dtype, 1, nullptr}, offset, count, high);
  for (int64_t i = 0; i < count; ++i) {
    const T low = tile[i] - high[i];
    high[i] = low - low == 0 ? low : T(0);  // infinities and NaN are in pair.high
  }
  store<T>({pair.low, pair.dtype}, offset, count, high, 0, nearest);
}

template <class T>
struct Stores {
  static constexpr Store<T> table[] = {nullptr,
                                       store_plain<T, float>,
                                       store_plain<T, double>,
                                       store_f16<T>,
                                       store_bf16<T>,
                                       nullptr,
                                       nullptr,
                                       nullptr,
                                       store_pair<T>};
};

template <class T>
void store(const Array& a, int64_t offset, int64_t count, const T* tile, uint64_t index,
           const Rounding& rounding) {
  Stores<T>::table[a.format](a.data, offset, count, tile, index, rounding);
}
