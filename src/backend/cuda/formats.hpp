// SPDX-License-Identifier: Apache-2.0
// How kernels read and write arrays: four neighbouring elements at a time, unpacked to the type
// that is computed in and packed again. Functions for formats other than that type are not inlined,
// so that they cost the loops few registers and little code.
#pragma once

#include <cstdint>
#include <type_traits>

#include "backend/backend.hpp"
#include "backend/cuda/block.hpp"
#ifdef __CUDACC__
#include "backend/cuda/ptx.hpp"
#endif
#include "backend/decide.hpp"
#include "backend/numbers.hpp"

namespace ga::cuda {

template <class T>
constexpr int32_t native = std::is_same_v<T, float> ? GA_F32 : GA_F64;

GA_HD int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }

// Tells the compiler that an address from a table is not one of shared memory.
template <class T>
GA_DEVICE T* global(T* p) {
#ifdef __CUDACC__
  __builtin_assume(__isGlobal(p));
#endif
  return p;
}

template <class T>
struct Four {
  T x[4];
};

// Four elements in aligned memory: one access, two for doubles.
template <class Stored>
struct alignas(4 * sizeof(Stored) < 16 ? 4 * sizeof(Stored) : 16) [[gnu::may_alias]] Packed {
  Stored x[4];
};

// How the numbers of a dtype are stored and converted.
template <class S>
struct Plainly {
  using Stored = S;
  template <class T>
  GA_HD static T widen(S x) {
    return static_cast<T>(x);
  }
  template <class T>
  GA_HD static S narrow(T x) {
    return static_cast<S>(x);
  }
};
template <int32_t kFormat>
struct Dtype;
template <>
struct Dtype<GA_F32> : Plainly<float> {};
template <>
struct Dtype<GA_F64> : Plainly<double> {};
template <>
struct Dtype<GA_F16> {
  using Stored = uint16_t;
  template <class T>
  GA_HD static T widen(uint16_t x) {
#ifdef __CUDA_ARCH__
    // The instruction gives the same bits except in NaN.
    const float f = widen_f16(x);
    return static_cast<T>((x & 0x7fff) > 0x7c00 ? from_f16(x) : f);
#else
    return static_cast<T>(from_f16(x));
#endif
  }
  template <class T>
  GA_HD static uint16_t narrow(T x) {
    return to_f16(static_cast<float>(x));
  }
};
template <>
struct Dtype<GA_BF16> {
  using Stored = uint16_t;
  template <class T>
  GA_HD static T widen(uint16_t x) {
    return static_cast<T>(from_bf16(x));
  }
  template <class T>
  GA_HD static uint16_t narrow(T x) {
    return to_bf16(static_cast<float>(x));
  }
};

GA_HD float from_16(uint16_t h, bool bf16) { return bf16 ? from_bf16(h) : from_f16(h); }
GA_HD uint16_t to_16(float x, bool bf16) { return bf16 ? to_bf16(x) : to_f16(x); }

// Bytes of an element; 0 if the data of the format is a descriptor.
GA_HD int64_t size_of(int32_t format) {
  return format == GA_F64 ? 8 : format == GA_F32 ? 4 : format <= GA_BF16 ? 2 : 0;
}

// Whether four elements from that address on are one access.
GA_HD bool is_aligned(const void* at, int32_t format) {
  const int64_t size = 4 * size_of(format);
  return (reinterpret_cast<uintptr_t>(at) & static_cast<uintptr_t>((size < 16 ? size : 16) - 1)) ==
         0;
}

GA_HD const void* advanced(const void* data, int32_t format, int64_t elements) {
  return static_cast<const char*>(data) + elements * size_of(format);
}
GA_HD void* advanced(void* data, int32_t format, int64_t elements) {
  return static_cast<char*>(data) + elements * size_of(format);
}

// Elements [i, i + 4) from an aligned address.
template <class T, int32_t kFormat>
GA_DEVICE Four<T> load_whole(const void* at, int i) {
  using D = Dtype<kFormat>;
  using Stored = typename D::Stored;
  const Packed<Stored> packed =
      *reinterpret_cast<const Packed<Stored>*>(global(static_cast<const Stored*>(at) + i));
  Four<T> four;
  for (int l = 0; l < 4; ++l) four.x[l] = D::template widen<T>(packed.x[l]);
  return four;
}

template <class T, int32_t kFormat>
GA_DEVICE void store_whole(void* at, int i, const Four<T>& four) {
  using D = Dtype<kFormat>;
  using Stored = typename D::Stored;
  auto* const to = global(reinterpret_cast<Packed<Stored>*>(static_cast<Stored*>(at) + i));
  Packed<Stored> packed;
  for (int l = 0; l < 4; ++l) packed.x[l] = D::template narrow<T>(four.x[l]);
#ifdef __CUDACC__
  store_global(to, packed.x);
#else
  *to = packed;
#endif
}

// Elements [i, i + count), count <= 4, then zeros.
template <class T, int32_t kFormat>
GA_DEVICE Four<T> load_some(const void* at, bool aligned, int i, int count) {
  using D = Dtype<kFormat>;
  if (aligned && count == 4) return load_whole<T, kFormat>(at, i);
  const auto* const x = global(static_cast<const typename D::Stored*>(at) + i);
  Four<T> four;
  for (int l = 0; l < 4; ++l) four.x[l] = l < count ? D::template widen<T>(x[l]) : T(0);
  return four;
}

template <class T, int32_t kFormat>
GA_DEVICE void store_some(void* at, bool aligned, int i, int count, const Four<T>& four) {
  using D = Dtype<kFormat>;
  if (aligned && count == 4) return store_whole<T, kFormat>(at, i, four);
  auto* const x = global(static_cast<typename D::Stored*>(at) + i);
  for (int l = 0; l < 4; ++l) {
    if (l < count) x[l] = D::template narrow<T>(four.x[l]);
  }
}

// load_some for a dtype that is known at run time.
template <class T>
GA_DEVICE Four<T> load_plain(const void* at, int32_t format, bool aligned, int i, int count) {
  switch (format) {
    case GA_F32:
      return load_some<T, GA_F32>(at, aligned, i, count);
    case GA_F64:
      return load_some<T, GA_F64>(at, aligned, i, count);
    case GA_F16:
      return load_some<T, GA_F16>(at, aligned, i, count);
    default:
      return load_some<T, GA_BF16>(at, aligned, i, count);
  }
}

// ---- Units --------------------------------------------------------------------------------------

// a / b. 64-bit division is slow, and few tensors have so many elements.
GA_HD int64_t quotient(int64_t a, int64_t b) {
  if (static_cast<uint64_t>(a | b) >> 32 != 0) return a / b;
  return static_cast<int64_t>(static_cast<uint32_t>(a) / static_cast<uint32_t>(b));
}

// The unit of an element, and how many elements from that one on belong to its run (see
// UnitCursor).
struct UnitPlace {
  int64_t unit, left, step;  // step: units from element to element of a run

  GA_DEVICE UnitPlace(const UnitPattern& pattern, int64_t element) : unit(0) {
    const int last = pattern.axes - 1;
    for (int a = last; a >= 0; --a) {
      const int64_t extent = pattern.extent[a];
      const int64_t rest = a > 0 ? quotient(element, extent) : 0;
      const int64_t index = element - rest * extent;
      if (a == last) left = extent - index;
      unit += index * pattern.unit_stride[a];
      element = rest;
    }
    step = pattern.unit_stride[last];
  }
};

// ---- Reading ------------------------------------------------------------------------------------

// Elements [first + i, first + i + count) of an array that is plain, a pair, rows, or master weights that follow
// the program. data: where element 0 is.
template <class T>
GA_APART Four<T> load_stored(const void* data, int32_t format, int64_t first, int i, int count) {
  if (!data) return {};
  if (format <= GA_BF16) {
    const void* const at = advanced(data, format, first);
    return load_plain<T>(at, format, is_aligned(at, format), i, count);
  }
  Four<T> four = {};
  if (format == kPair) {
    const Pair& pair = *static_cast<const Pair*>(data);
    const bool bf16 = pair.dtype == GA_BF16;
    const auto* const high = static_cast<const uint16_t*>(pair.high) + first + i;
    const auto* const low = static_cast<const uint16_t*>(pair.low) + first + i;
    for (int l = 0; l < 4 && l < count; ++l) {
      four.x[l] = static_cast<T>(from_16(high[l], bf16));
      four.x[l] += static_cast<T>(from_16(low[l], bf16));
    }
  } else if (format == kSparse) {
    const SparseRows& m = *static_cast<const SparseRows*>(data);
    const auto* const from = static_cast<const T*>(m.data) + first + i;
    int64_t row = quotient(first + i, m.columns);
    int64_t left = (row + 1) * m.columns - (first + i);
    for (int l = 0; l < count; ++row, left = m.columns) {
      const int64_t slot = m.rows->slots[row];
      const bool held = slot < m.rows->size && m.rows->entries[slot].row == row;
      for (; l < count && left > 0; ++l, --left) {
        if (held) four.x[l] = from[l];
      }
    }
  } else if (format == kFollowed || format == kFollowedWhole) {
    const UpdateTask& u = *static_cast<const UpdateTask*>(data);
    const bool bf16 = u.copy.format == GA_BF16;
    const int64_t at = first + i - (format == kFollowedWhole ? u.first : 0);
    const auto* const master = static_cast<const float*>(u.param.data) + at;
    const auto* const copy = static_cast<const uint16_t*>(u.copy.data) + at;
    for (int l = 0; l < 4 && l < count; ++l)
      four.x[l] =
          static_cast<T>(to_16(master[l], bf16) == copy[l] ? master[l] : from_16(copy[l], bf16));
  }
  return four;
}

// As load_stored, for any source.
template <class T>
GA_APART Four<T> load_packed(const void* data, int32_t format, int64_t first, int i, int count) {
  if (format == kOuter && data) {
    const OuterProduct& m = *static_cast<const OuterProduct*>(data);
    int64_t row = quotient(first + i, m.column_count);  // over all matrices
    int64_t column = first + i - row * m.column_count;
    Four<T> four = {};
    for (int l = 0; l < count; ++row, column = 0) {
      const T value = static_cast<const T*>(m.rows)[row];
      if (!m.columns) {
        for (; l < count && column < m.column_count; ++l, ++column) four.x[l] = value;
        continue;
      }
      const int64_t matrix = quotient(row, m.row_count);
      const T scale = value * static_cast<const T*>(m.scales)[matrix];
      const T* const columns = static_cast<const T*>(m.columns) + matrix * m.column_count;
      for (; l < count && column < m.column_count; ++l, ++column)
        four.x[l] = scale * columns[column];
    }
    return four;
  }
  if (format != kClipped || !data) return load_stored<T>(data, format, first, i, count);

  const ClippedGradient& c = *static_cast<const ClippedGradient*>(data);
  const Source& inner = c.gradient.source;
  Four<T> four = load_stored<T>(inner.data, inner.format, first, i, count);
  const View<T> view = c.pattern ? View<T>::of_units(c.gradient) : View<T>(c.gradient);
  for (int l = 0; l < 4; ++l) four.x[l] = view(four.x[l]);
  if (!c.pattern) return four;
  const T* const factors = static_cast<const T*>(c.factors);
  for (int l = 0; l < count;) {
    const UnitPlace at(*c.pattern, first + i + l - c.pattern->first);
    for (int64_t k = 0; l < count && k < at.left; ++l, ++k)
      four.x[l] *= factors[at.unit + k * at.step];
  }
  return four;
}

// The elements of an array from element `first` on, which has index 0 here. A loop first fetches
// from all its arrays and then unpacks, so that it waits for memory once.
template <class T>
class Reader {
 public:
  // Four elements, as they are stored or unpacked.
  struct Raw {
    uint32_t word[sizeof(T)];
  };

  Reader() = default;
  GA_DEVICE Reader(const void* data, int32_t format, int64_t first)
      : data_(data), first_(first), format_(data ? format : 0), whole_(false) {
    if (!data || format > GA_BF16) return;
    const void* const at = advanced(data, format, first);
    whole_ = is_aligned(at, format);
    if (whole_) data_ = at;
  }
  GA_DEVICE Reader(const Array& a, int64_t first) : Reader(a.data, a.format, first) {}
  GA_DEVICE Reader(const Source& s, int64_t first) : Reader(s.data, s.format, first) {}

  // Elements [i, i + count), count <= 4, then zeros; i is a multiple of 4.
  GA_DEVICE Raw fetch(int i, int count) const {
    Raw raw = {};
    if (!is_stored(count)) {
      const void* const from = whole_ ? advanced(data_, format_, -first_) : data_;
      const Four<T> four = load_packed<T>(from, format_, first_, i, count);
      __builtin_memcpy(raw.word, four.x, sizeof raw.word);
    } else if (format_ == GA_F64) {
      copy_words<8>(raw.word, static_cast<const double*>(data_) + i);
    } else if (format_ == GA_F32) {
      copy_words<4>(raw.word, static_cast<const float*>(data_) + i);
    } else {
      copy_words<2>(raw.word, static_cast<const uint16_t*>(data_) + i);
    }
    return raw;
  }

  GA_DEVICE Four<T> unpack(const Raw& raw, int count) const {
    if (is_stored(count) && format_ != native<T>) return widen(raw, format_);
    Four<T> four;
    __builtin_memcpy(four.x, raw.word, sizeof raw.word);
    return four;
  }

  GA_DEVICE Four<T> operator()(int i, int count) const { return unpack(fetch(i, count), count); }

 private:
  GA_DEVICE bool is_stored(int count) const { return whole_ && count == 4; }

  GA_APART static Four<T> widen(Raw raw, int32_t format) {
    Four<T> four;
    for (int l = 0; l < 4; ++l) {
      const auto half = static_cast<uint16_t>(raw.word[l / 2] >> (l % 2 * 16));
      four.x[l] = format == GA_F32    ? static_cast<T>(float_of(raw.word[l]))
                  : format == GA_BF16 ? Dtype<GA_BF16>::widen<T>(half)
                                      : Dtype<GA_F16>::widen<T>(half);
    }
    return four;
  }

  // Reads words from an aligned address. Four doubles do not fit where T is float; then the result
  // is not used.
  template <int kWords>
  GA_DEVICE static void copy_words(uint32_t (&words)[sizeof(T)], const void* at) {
    struct alignas(kWords < 4 ? 4 * kWords : 16) [[gnu::may_alias]] Block {
      uint32_t word[kWords];
    };
    const Block block = *global(static_cast<const Block*>(at));
    for (int w = 0; w < kWords && w < static_cast<int>(sizeof(T)); ++w) words[w] = block.word[w];
  }

  const void* data_;
  int64_t first_;
  int32_t format_;
  bool whole_;
};

// Whether load_whole can read an array of that format from an element on.
template <int32_t kFormat>
GA_DEVICE bool is_whole(const void* data, int32_t format, int64_t first) {
  return data && format == kFormat && is_aligned(advanced(data, kFormat, first), kFormat);
}

// ---- Writing ------------------------------------------------------------------------------------

// Random bits for elements from an index on.
class Random {
 public:
  GA_DEVICE Random(uint64_t key, uint64_t index)
      : key_(key), high_(index >> 32), chance_(key, index >> 32) {}

  GA_DEVICE uint32_t operator()(uint64_t index) {
    if (index >> 32 != high_) *this = Random(key_, index);
    return chance_(static_cast<uint32_t>(index));
  }

 private:
  uint64_t key_, high_;
  Chance chance_;
};

// Writes elements [first + i, first + i + count) of a pair or of an array that does not have the
// type that is computed in. Returns the elements as they are stored.
template <class T>
GA_APART Four<T> store_packed(void* data, int32_t format, int64_t first, int i, int count,
                              Four<T> four, Rounding rounding, uint64_t index) {
  void* const at = advanced(data, format, first);
  if (format == GA_F32 || format == GA_F64) {
    if (format == GA_F32) {
      store_some<T, GA_F32>(at, is_aligned(at, GA_F32), i, count, four);
      for (T& x : four.x) x = static_cast<T>(static_cast<float>(x));
    } else {
      store_some<T, GA_F64>(at, is_aligned(at, GA_F64), i, count, four);
    }
    return four;
  }
  const Pair* const pair = format == kPair ? static_cast<const Pair*>(data) : nullptr;
  const bool bf16 = (pair ? pair->dtype : format) == GA_BF16;
  Four<float> value;
  for (int l = 0; l < 4; ++l) value.x[l] = static_cast<float>(four.x[l]);
  Four<uint16_t> bits;
  if (rounding.stochastic && !pair) {
    Random random(rounding.key, index);
    for (int l = 0; l < 4; ++l) {
      const uint32_t r = random(index + static_cast<uint64_t>(l));
      bits.x[l] = bf16 ? to_bf16(value.x[l], r) : to_f16(value.x[l], r);
    }
  } else {
    for (int l = 0; l < 4; ++l) bits.x[l] = to_16(value.x[l], bf16);
  }
  Four<T> stored;
  for (int l = 0; l < 4; ++l) stored.x[l] = static_cast<T>(from_16(bits.x[l], bf16));
  auto* const x = static_cast<uint16_t*>(pair ? pair->high : data) + first + i;
  const bool aligned = is_aligned(x, GA_BF16) && count == 4;
  if (aligned)
    *reinterpret_cast<Packed<uint16_t>*>(x) = {{bits.x[0], bits.x[1], bits.x[2], bits.x[3]}};
  for (int l = 0; l < 4; ++l) {
    if (!aligned && l < count) x[l] = bits.x[l];
  }
  if (!pair) return stored;
  // What the nearest 16-bit number lacks; infinities and NaN are in the upper number alone.
  auto* const low_at = static_cast<uint16_t*>(pair->low) + first + i;
  for (int l = 0; l < 4; ++l) {
    const T lacking = four.x[l] - stored.x[l];
    const float low = static_cast<float>(lacking - lacking == 0 ? lacking : T(0));
    const uint16_t low_bits = to_16(low, bf16);
    stored.x[l] += static_cast<T>(from_16(low_bits, bf16));
    if (l < count) low_at[l] = low_bits;
  }
  return stored;
}

// Writes to two bf16 arrays with stochastic rounding, from the two halves of the same random bits.
template <class T>
GA_APART void store_bf16_pair(void* a, void* b, int64_t first, int i, int count, Four<T> four_a,
                              Four<T> four_b, uint64_t key, uint64_t index) {
  auto* const x = static_cast<uint16_t*>(a) + first + i;
  auto* const y = static_cast<uint16_t*>(b) + first + i;
  Packed<uint16_t> packed_x, packed_y;
  Random random(key, index);
  for (int l = 0; l < 4; ++l) {
    const uint32_t r = random(index + static_cast<uint64_t>(l));
    packed_x.x[l] = to_bf16(static_cast<float>(four_a.x[l]), r);
    packed_y.x[l] = to_bf16(static_cast<float>(four_b.x[l]), r >> 16);
  }
  if (count == 4 && is_aligned(x, GA_BF16) && is_aligned(y, GA_BF16)) {
    *reinterpret_cast<Packed<uint16_t>*>(x) = packed_x;
    *reinterpret_cast<Packed<uint16_t>*>(y) = packed_y;
    return;
  }
  for (int l = 0; l < 4; ++l) {
    if (l >= count) continue;
    x[l] = packed_x.x[l];
    y[l] = packed_y.x[l];
  }
}

// As Reader, for writing. index: of element `first` in the random bits for rounding.
template <class T>
class Writer {
 public:
  GA_DEVICE Writer(const Array& a, int64_t first, Rounding rounding, int64_t index)
      : data_(a.data),
        first_(first),
        index_(static_cast<uint64_t>(index)),
        rounding_(rounding),
        format_(a.format),
        aligned_(false) {
    if (format_ != native<T>) return;
    data_ = advanced(a.data, a.format, first);
    aligned_ = is_aligned(data_, a.format);
  }

  // Returns the elements as they are stored.
  GA_DEVICE Four<T> operator()(int i, int count, const Four<T>& four) const {
    if (format_ != native<T>)
      return store_packed<T>(data_, format_, first_, i, count, four, rounding_,
                             index_ + static_cast<uint64_t>(i));
    store_some<T, native<T>>(data_, aligned_, i, count, four);
    return four;
  }

 private:
  void* data_;
  int64_t first_;
  uint64_t index_;
  Rounding rounding_;
  int32_t format_;
  bool aligned_;
};

constexpr Rounding kNearest = {false, 0};

}  // namespace ga::cuda
