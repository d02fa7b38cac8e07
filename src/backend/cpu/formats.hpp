// SPDX-License-Identifier: Apache-2.0
// How arrays are stored: tiles of them unpacked to the type computed in, and packed again. For
// kernels.cpp alone, within its anonymous namespace.
//
// Conversions give the bits of IEEE 754 at every ISA level, whatever the program has set its
// rounding of subnormals to: NaN keeps the upper bits of its payload and becomes quiet.
#pragma once

// ---- Numbers of 16 bits -------------------------------------------------------------------------

GA_INLINE uint32_t bits_of(float x) {
  uint32_t u;
  std::memcpy(&u, &x, sizeof u);
  return u;
}

GA_INLINE float float_of(uint32_t u) {
  float x;
  std::memcpy(&x, &u, sizeof x);
  return x;
}

GA_INLINE float from_bf16(uint16_t h) { return float_of(uint32_t{h} << 16); }

GA_INLINE uint16_t to_bf16(float x) {
  const uint32_t u = bits_of(x);
  const uint32_t rounded = (u + 0x7fff + (u >> 16 & 1)) >> 16;
  const uint32_t nan = u >> 16 | 0x40;
  return static_cast<uint16_t>((u & 0x7fffffff) > 0x7f800000 ? nan : rounded);
}

GA_INLINE float from_f16(uint16_t h) {
  const uint32_t u = h & 0x7fffu;
  const uint32_t normal = (u << 13) + (uint32_t{127 - 15} << 23);
  const uint32_t nan = u << 13 | 0x7fc00000;
  const uint32_t tiny = bits_of(static_cast<float>(static_cast<int32_t>(u)) * 0x1p-24f);
  const uint32_t magnitude =
      u < 0x400 ? tiny : (u < 0x7c00 ? normal : (u == 0x7c00 ? 0x7f800000 : nan));
  return float_of(magnitude | (uint32_t{h} & 0x8000u) << 16);
}

GA_INLINE uint16_t to_f16(float x) {
  const uint32_t u = bits_of(x) & 0x7fffffff;
  const uint32_t sign = bits_of(x) >> 16 & 0x8000;
  const uint32_t normal = (u - (uint32_t{127 - 15} << 23) + 0xfff + (u >> 13 & 1)) >> 13;
  // Adding 1/2 leaves the sum's last bit at the smallest f16, 2^-24, and rounds there.
  const uint32_t tiny = bits_of(float_of(u < 0x38800000 ? u : 0) + 0.5f) - 0x3f000000;
  const uint32_t nan = 0x7e00 | (u >> 13 & 0x3ff);
  const uint32_t magnitude =
      u < 0x38800000 ? tiny : (u < 0x47800000 ? normal : (u <= 0x7f800000 ? 0x7c00 : nan));
  return static_cast<uint16_t>(sign | magnitude);
}

// ---- Rounding by chance -------------------------------------------------------------------------

// 32 random bits for each index below 2^32, from a key of 64: the mixing steps of lowbias32
// (Wellons 2018), the halves of the key put in before each of its multiplications.
struct Chance {
  uint32_t first, second;

  GA_INLINE Chance(uint64_t key, uint64_t high) {
    uint64_t z = key + 0x9e3779b97f4a7c15 * (high + 1);  // splitmix64
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9;
    z = (z ^ (z >> 27)) * 0x94d049bb133111eb;
    z ^= z >> 31;
    first = static_cast<uint32_t>(z);
    second = static_cast<uint32_t>(z >> 32);
  }

  GA_INLINE uint32_t operator()(uint32_t index) const {
    uint32_t x = index ^ first;
    x = (x ^ x >> 16) * 0x7feb352du;
    x = (x ^ x >> 15 ^ second) * 0x846ca68bu;
    return x ^ x >> 16;
  }
};

// Up with a probability of what is cut off: by adding random bits, the lower 16 of those given,
// below the last that stays.
GA_INLINE uint16_t to_bf16(float x, uint32_t random) {
  const uint32_t u = bits_of(x);
  const uint32_t magnitude = u & 0x7fffffff;
  const uint32_t added = magnitude < 0x7f800000 ? random & 0xffff : 0;
  const uint32_t quiet = magnitude > 0x7f800000 ? 0x40 : 0;
  return static_cast<uint16_t>((u + added) >> 16 | quiet);
}

GA_INLINE uint16_t to_f16(float x, uint32_t random) {
  const uint32_t u = bits_of(x) & 0x7fffffff;
  const uint32_t sign = bits_of(x) >> 16 & 0x8000;
  const uint32_t normal = (u - (uint32_t{127 - 15} << 23) + (random & 0x1fff)) >> 13;
  // Below 2^-14: the significand in units of 2^-24, with as many bits behind the point as random
  // ones in front of it.
  const uint32_t exponent = u >> 23;
  const uint32_t shift = exponent < 113 ? 126 - exponent : 14;
  const uint32_t lost = shift > 31 ? shift - 31 : 0;
  const uint32_t significand = exponent == 0 || lost > 23 ? 0 : ((u & 0x7fffff) | 0x800000) >> lost;
  const uint32_t kept = shift - lost;  // 14 to 31
  const uint32_t tiny = (significand + (random >> (32 - kept))) >> kept;
  const uint32_t magnitude = exponent < 113 ? tiny : (u < 0x47800000 ? normal : 0x7c00);
  return u >= 0x7f800000 ? to_f16(x) : static_cast<uint16_t>(sign | magnitude);
}

// ---- Units --------------------------------------------------------------------------------------

// Walks a tensor by its runs: stretches along the innermost axis of a pattern, which are either
// units one after the other (kept) or of one unit.
class UnitCursor {
 public:
  GA_INLINE UnitCursor(const UnitPattern& pattern, int64_t element)
      : pattern_(pattern), last_(pattern.axes - 1), unit_(0) {
    for (int a = last_; a >= 0; --a) {
      index_[a] = element % pattern.extent[a];
      element /= pattern.extent[a];
      unit_ += index_[a] * pattern.unit_stride[a];
    }
  }

  GA_INLINE bool kept() const { return pattern_.kept[last_]; }
  GA_INLINE int64_t unit() const { return unit_; }
  GA_INLINE int64_t left() const { return pattern_.extent[last_] - index_[last_]; }

  // count: at most what is left
  GA_INLINE void advance(int64_t count) {
    index_[last_] += count;
    unit_ += count * pattern_.unit_stride[last_];
    for (int a = last_; a > 0 && index_[a] == pattern_.extent[a]; --a) {
      unit_ += pattern_.unit_stride[a - 1] - pattern_.extent[a] * pattern_.unit_stride[a];
      index_[a] = 0;
      ++index_[a - 1];
    }
  }

 private:
  const UnitPattern& pattern_;
  int last_;
  int64_t unit_;
  int64_t index_[UnitPattern::kMaxAxes];
};

// ---- Reading ------------------------------------------------------------------------------------

template <class T>
constexpr int32_t native = std::is_same_v<T, float> ? GA_F32 : GA_F64;

// Elements [offset, offset + count) of a source as T, in place where they are T already.
template <class T>
using Load = const T* (*)(const void* data, int64_t offset, int64_t count, T* tile);

template <class T>
const T* load_in_place(const void* data, int64_t offset, int64_t, T*) {
  return static_cast<const T*>(data) + offset;
}

GA_INLINE void prefetch_ahead(const void* p) {
  __builtin_prefetch(static_cast<const char*>(p) + 2048, 0, 3);
}

template <class T>
const T* load_float(const void* data, int64_t offset, int64_t count, T* tile) {
  const float* const x = static_cast<const float*>(data) + offset;
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

// Where an element of an array lies, to be fetched ahead of its use.
struct Place {
  const char* at;
  int64_t size;  // of an element; 0: nowhere in particular

  GA_INLINE Place(int32_t format, const void* data, int64_t element) : at(nullptr), size(0) {
    if (format == kClipped) {
      const Source& inner = static_cast<const ClippedGradient*>(data)->gradient.source;
      format = inner.format;
      data = inner.data;
    }
    constexpr int64_t sizes[] = {0, 4, 8, 2, 2};
    if (format > GA_BF16) return;
    size = sizes[format];
    at = static_cast<const char*>(data) + element * size;
  }
  Place() = default;

  // The block of elements from that one on, at a distance of as many elements.
  template <int kWrite>
  GA_INLINE void prefetch_block(int64_t distance) const {
    for (int64_t line = 0; line < kBlock * size; line += 64)
      __builtin_prefetch(at + distance * size + line, kWrite, 3);
  }
};

template <class T>
const T* load_pair(const void* data, int64_t offset, int64_t count, T* tile) {
  const Pair& pair = *static_cast<const Pair*>(data);
  alignas(64) T low[kTile];
  load<T>({pair.high, pair.dtype, 1}, offset, count, tile);
  const T* const l = load<T>({pair.low, pair.dtype, 1}, offset, count, low);
  for (int64_t i = 0; i < count; ++i) tile[i] += l[i];
  return tile;
}

template <class T>
const T* load_sparse(const void* data, int64_t offset, int64_t count, T* tile) {
  const SparseRows& m = *static_cast<const SparseRows*>(data);
  const T* const from = static_cast<const T*>(m.data);
  int64_t row = offset / m.columns;
  int64_t end = (row + 1) * m.columns - offset;  // of the row, counted from offset
  for (int64_t i = 0; i < count; ++row, end += m.columns) {
    const int64_t n = smaller(end, count) - i;
    const int64_t slot = m.slots[row];
    if (slot < m.size && m.entries[slot].row == row)
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
    const int64_t matrix = row / m.row_count;
    const T scale = static_cast<const T*>(m.rows)[row] * static_cast<const T*>(m.scales)[matrix];
    const T* const columns = static_cast<const T*>(m.columns) + matrix * m.column_count + column;
    const int64_t n = smaller(m.column_count - column, count - i);
    for (int64_t j = 0; j < n; ++j) tile[i + j] = scale * columns[j];
    i += n;
  }
  return tile;
}

template <class T>
const T* load_clipped(const void* data, int64_t offset, int64_t count, T* tile);

template <class T>
struct Loads;
template <>
struct Loads<float> {
  static constexpr Load<float> table[] = {nullptr,           load_in_place<float>,
                                          nullptr,           load_f16<float>,
                                          load_bf16<float>,  nullptr,
                                          nullptr,           nullptr,
                                          load_pair<float>,  load_sparse<float>,
                                          load_outer<float>, load_clipped<float>};
};
template <>
struct Loads<double> {
  static constexpr Load<double> table[] = {nullptr,
                                           load_float<double>,
                                           load_in_place<double>,
                                           load_f16<double>,
                                           load_bf16<double>,
                                           nullptr,
                                           nullptr,
                                           nullptr,
                                           nullptr,
                                           load_sparse<double>,
                                           load_outer<double>,
                                           load_clipped<double>};
};

template <class T>
const T* load(const Source& s, int64_t offset, int64_t count, T* tile) {
  alignas(64) static constexpr T zeros[kTile] = {};
  return s.data ? Loads<T>::table[s.format](s.data, offset, count, tile) : zeros;
}

// ---- Writing ------------------------------------------------------------------------------------

// tile to elements [offset, offset + count) of an array; index is that of the first for rounding.
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

// body(first, end, chance) for stretches of indices with the same upper half.
template <class Body>
GA_INLINE void by_chance(uint64_t key, uint64_t index, int64_t count, Body&& body) {
  for (int64_t i = 0; i < count;) {
    const uint64_t at = index + static_cast<uint64_t>(i);
    const auto left = static_cast<int64_t>((uint64_t{1} << 32) - (at & 0xffffffff));
    const int64_t end = i + smaller(left, count - i);
    body(i, end, Chance(key, at >> 32), static_cast<uint32_t>(at));
    i = end;
  }
}

template <class T>
void store_bf16(void* data, int64_t offset, int64_t count, const T* tile, uint64_t index,
                const Rounding& rounding) {
  uint16_t* const __restrict x = static_cast<uint16_t*>(data) + offset;
  if (!rounding.stochastic) {
    for (int64_t i = 0; i < count; ++i) x[i] = to_bf16(static_cast<float>(tile[i]));
    return;
  }
  by_chance(
      rounding.key, index, count, [&](int64_t i, int64_t end, const Chance& chance, uint32_t at) {
        for (int64_t j = i; j < end; ++j)
          x[j] = to_bf16(static_cast<float>(tile[j]), chance(at + static_cast<uint32_t>(j - i)));
      });
}

// Two of them, stochastically, from the lower and the upper halves of the same random bits.
template <class T>
void store_bf16_pair(const Array& a, const Array& b, int64_t offset, int64_t count, const T* tile_a,
                     const T* tile_b, uint64_t index, uint64_t key) {
  uint16_t* const __restrict x = static_cast<uint16_t*>(a.data) + offset;
  uint16_t* const __restrict y = static_cast<uint16_t*>(b.data) + offset;
  by_chance(key, index, count, [&](int64_t i, int64_t end, const Chance& chance, uint32_t at) {
    for (int64_t j = i; j < end; ++j) {
      const uint32_t random = chance(at + static_cast<uint32_t>(j - i));
      x[j] = to_bf16(static_cast<float>(tile_a[j]), random);
      y[j] = to_bf16(static_cast<float>(tile_b[j]), random >> 16);
    }
  });
}

template <class T>
void store_f16(void* data, int64_t offset, int64_t count, const T* tile, uint64_t index,
               const Rounding& rounding) {
  uint16_t* const __restrict x = static_cast<uint16_t*>(data) + offset;
  if (rounding.stochastic) {
    by_chance(
        rounding.key, index, count, [&](int64_t i, int64_t end, const Chance& chance, uint32_t at) {
          for (int64_t j = i; j < end; ++j)
            x[j] = to_f16(static_cast<float>(tile[j]), chance(at + static_cast<uint32_t>(j - i)));
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

// The sum's nearest 16-bit number, and that of what it lacks.
template <class T>
void store_pair(void* data, int64_t offset, int64_t count, const T* tile, uint64_t,
                const Rounding&) {
  const Pair& pair = *static_cast<const Pair*>(data);
  const Rounding nearest = {false, 0};
  store<T>({pair.high, pair.dtype}, offset, count, tile, 0, nearest);
  alignas(64) T high[kTile];
  load<T>({pair.high, pair.dtype, 1}, offset, count, high);
  for (int64_t i = 0; i < count; ++i) {
    const T low = tile[i] - high[i];
    high[i] = low == low ? low : T(0);  // infinities and NaN are in the upper one
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
