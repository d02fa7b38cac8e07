// SPDX-License-Identifier: Apache-2.0
// Arithmetic, comparisons and conversions, as the PTX ISA defines them (chapter 9.7).
#include <bit>
#include <cmath>
#include <concepts>
#include <limits>
#include <type_traits>
#include <unordered_map>

#include "ptx.hpp"
#include "registers.hpp"

namespace ga::ptx {
namespace {

// to[0] <- F()(from[0], ...)
template <class F, class... From>
void compute(Warp& warp, const Instruction& i, u32 lanes) {
  u64* to = warp.lanes(i.to[0]);
  const u64* from[sizeof...(From)];
  for (size_t k = 0; k < sizeof...(From); ++k) from[k] = warp.lanes(i.from[k]);
  each(lanes, [&](int l) {
    [&]<size_t... k>(std::index_sequence<k...>) {
      to[l] = bits_of(F()(value<From>(from[k][l])...));
    }
    (std::index_sequence_for<From...>());
  });
}

using Table = std::unordered_map<std::string_view, Operation>;

template <class... From, class F>
void add(Table& table, std::string_view name, F) {
  table[name] = {compute<F, From...>, sizeof...(From)};
}

// ---- Integers ------------------------------------------------------------------------------------------

template <std::integral T>
void add_integers(Table& table, const char* const (&names)[12]) {
  using U = std::make_unsigned_t<T>;
  add<T, T>(table, names[0], [](T a, T b) { return static_cast<T>(U(a) + U(b)); });
  add<T, T>(table, names[1], [](T a, T b) { return static_cast<T>(U(a) - U(b)); });
  add<T, T>(table, names[2], [](T a, T b) { return static_cast<T>(u64(a) * u64(b)); });
  add<T, T, T>(table, names[3],
               [](T a, T b, T c) { return static_cast<T>(u64(a) * u64(b) + u64(c)); });
  add<T, T>(table, names[4], [](T a, T b) { return a < b ? a : b; });
  add<T, T>(table, names[5], [](T a, T b) { return a < b ? b : a; });
  // What a division by 0 makes is not defined; code may divide before it looks.
  add<T, T>(table, names[6], [](T a, T b) {
    if (b == 0) return static_cast<T>(-1);
    return std::is_signed_v<T> && b == static_cast<T>(-1) ? static_cast<T>(U(0) - U(a))
                                                          : static_cast<T>(a / b);
  });
  add<T, T>(table, names[7], [](T a, T b) {
    if (b == 0) return a;
    return std::is_signed_v<T> && b == static_cast<T>(-1) ? T{0} : static_cast<T>(a % b);
  });
  // A shift by more than the width counts as one by the width.
  constexpr u32 kWidth = 8 * sizeof(T);
  add<T, u32>(table, names[8], [](T a, u32 by) {
    if (by < kWidth) return static_cast<T>(a >> by);
    return static_cast<T>(std::is_signed_v<T> && a < 0 ? -1 : 0);
  });
  if constexpr (std::is_signed_v<T>) {
    add<T>(table, names[9], [](T a) { return static_cast<T>(U(0) - U(a)); });
    add<T>(table, names[10], [](T a) { return a < 0 ? static_cast<T>(U(0) - U(a)) : a; });
  }
  add<T, T>(table, names[11], [](T a, T b) {
    using P = std::conditional_t<std::is_signed_v<T>, __int128, unsigned __int128>;
    return static_cast<T>((P{a} * P{b}) >> kWidth);
  });
}
#define GA_INTEGERS(T)                                                                            \
  add_integers<T>(table, {"add." #T, "sub." #T, "mul.lo." #T, "mad.lo." #T, "min." #T, "max." #T, \
                          "div." #T, "rem." #T, "shr." #T, "neg." #T, "abs." #T, "mul.hi." #T})

template <std::unsigned_integral T>
void add_bits(Table& table, const char* const (&names)[6]) {
  add<T, T>(table, names[0], [](T a, T b) { return static_cast<T>(a & b); });
  add<T, T>(table, names[1], [](T a, T b) { return static_cast<T>(a | b); });
  add<T, T>(table, names[2], [](T a, T b) { return static_cast<T>(a ^ b); });
  add<T>(table, names[3], [](T a) { return static_cast<T>(~a); });
  add<T, u32>(table, names[4],
              [](T a, u32 by) { return by < 8 * sizeof(T) ? static_cast<T>(a << by) : T{0}; });
  add<T, u32>(table, names[5],
              [](T a, u32 by) { return by < 8 * sizeof(T) ? static_cast<T>(a >> by) : T{0}; });
}
#define GA_BITS(n) \
  add_bits<u##n>(table, {"and.b" #n, "or.b" #n, "xor.b" #n, "not.b" #n, "shl.b" #n, "shr.b" #n})

// The low `length` bits of a, inserted into b at `at`.
template <class T>
T insert_bits(T a, T b, u32 at, u32 length) {
  at &= 0xff;
  length &= 0xff;
  T result = b;
  for (u32 k = 0; k < length && at + k < 8 * sizeof(T); ++k) {
    const T bit = T{1} << (at + k);
    result = k < 8 * sizeof(T) && (a >> k & 1) != 0 ? result | bit : result & ~bit;
  }
  return result;
}

// Of the eight bytes of a and, above, b, those that the four nibbles of `which` number; or the sign of one, eight times.
u32 permute_bytes(u32 a, u32 b, u32 which) {
  const u64 bytes = u64{b} << 32 | a;
  u32 result = 0;
  for (u32 k = 0; k < 4; ++k) {
    const u32 nibble = which >> 4 * k & 15, byte = u32(bytes >> 8 * (nibble & 7)) & 0xff;
    const u32 sign = byte >> 7 != 0 ? 0xff : 0;
    result |= (nibble >= 8 ? sign : byte) << 8 * k;
  }
  return result;
}

void add_integer_operations(Table& table) {
  GA_INTEGERS(s16);
  GA_INTEGERS(u16);
  GA_INTEGERS(s32);
  GA_INTEGERS(u32);
  GA_INTEGERS(s64);
  GA_INTEGERS(u64);
  GA_BITS(16);
  GA_BITS(32);
  GA_BITS(64);
  add<bool, bool>(table, "and.pred", [](bool a, bool b) { return a && b; });
  add<bool, bool>(table, "or.pred", [](bool a, bool b) { return a || b; });
  add<bool, bool>(table, "xor.pred", [](bool a, bool b) { return a != b; });
  add<bool>(table, "not.pred", [](bool a) { return !a; });
  add<s16, s16>(table, "mul.wide.s16", [](s16 a, s16 b) { return s32{a} * b; });
  add<u16, u16>(table, "mul.wide.u16", [](u16 a, u16 b) { return u32{a} * b; });
  add<s32, s32>(table, "mul.wide.s32", [](s32 a, s32 b) { return s64{a} * b; });
  add<u32, u32>(table, "mul.wide.u32", [](u32 a, u32 b) { return u64{a} * b; });
  add<u64, u64, u32, u32>(table, "bfi.b64", [](u64 a, u64 b, u32 at, u32 length) {
    return insert_bits(a, b, at, length);
  });
  add<u32, u32, u32, u32>(table, "bfi.b32", [](u32 a, u32 b, u32 at, u32 length) {
    return insert_bits(a, b, at, length);
  });
  add<u32, u32, u32>(table, "prmt.b32",
                     [](u32 a, u32 b, u32 which) { return permute_bytes(a, b, which); });
  add<u32>(table, "popc.b32", [](u32 a) { return u32(std::popcount(a)); });
  add<u32>(table, "clz.b32", [](u32 a) { return u32(std::countl_zero(a)); });
  add<u32>(table, "brev.b32", [](u32 a) {
    u32 r = 0;
    for (int k = 0; k < 32; ++k) r |= (a >> k & 1) << (31 - k);
    return r;
  });
  // How far to shift the highest 1 to the left until it is the highest bit.
  add<u32>(table, "bfind.shiftamt.u32",
           [](u32 a) { return a == 0 ? ~u32{0} : u32(std::countl_zero(a)); });
}

// ---- Floating point ------------------------------------------------------------------------------------

// A NaN is passed over, and -0 is less than +0.
template <class T>
T least(T a, T b) {
  if (a != a) return b;
  if (b != b) return a;
  if (a == b) return std::signbit(a) ? a : b;
  return a < b ? a : b;
}
template <class T>
T greatest(T a, T b) {
  if (a != a) return b;
  if (b != b) return a;
  if (a == b) return std::signbit(a) ? b : a;
  return a < b ? b : a;
}

// Without a change of a NaN.
template <class T, class U>
void add_signs(Table& table, const char* neg, const char* abs) {
  constexpr U kSign = U{1} << (8 * sizeof(U) - 1);
  add<U>(table, neg, [](U a) { return static_cast<U>(a ^ kSign); });
  add<U>(table, abs, [](U a) { return static_cast<U>(a & ~kSign); });
}

// Round to nearest, which is how the host computes.
template <std::floating_point T>
void add_arithmetic(Table& table, const char* const (&names)[9]) {
  add<T, T>(table, names[0], [](T a, T b) { return a + b; });
  add<T, T>(table, names[1], [](T a, T b) { return a - b; });
  add<T, T>(table, names[2], [](T a, T b) { return a * b; });
  add<T, T>(table, names[3], [](T a, T b) { return a / b; });
  add<T, T, T>(table, names[4], [](T a, T b, T c) { return std::fma(a, b, c); });
  add<T>(table, names[5], [](T a) { return std::sqrt(a); });
  add<T>(table, names[6], [](T a) { return 1 / a; });
  add<T, T>(table, names[7], [](T a, T b) { return least(a, b); });
  add<T, T>(table, names[8], [](T a, T b) { return greatest(a, b); });
}
#define GA_ARITHMETIC(T)                                                                          \
  add_arithmetic<T>(table, {"add.rn." #T, "sub.rn." #T, "mul.rn." #T, "div.rn." #T, "fma.rn." #T, \
                            "sqrt.rn." #T, "rcp.rn." #T, "min." #T, "max." #T})

f32 toward_zero(f64 x) {
  const auto r = static_cast<f32>(x);
  return std::fabs(f64{r}) > std::fabs(x) ? std::nextafter(r, 0.0f) : r;
}

void add_float_operations(Table& table) {
  GA_ARITHMETIC(f32);
  GA_ARITHMETIC(f64);
  add_signs<f32, u32>(table, "neg.f32", "abs.f32");
  add_signs<f64, u64>(table, "neg.f64", "abs.f64");
  add<f32, f32>(table, "mul.rz.f32", [](f32 a, f32 b) { return toward_zero(f64{a} * f64{b}); });
}

// ---- Comparison, selection, moves ----------------------------------------------------------------------

template <class T>
void add_comparisons(Table& table, const char* const (&names)[6]) {
  add<T, T>(table, names[0], [](T a, T b) { return a == b; });
  add<T, T>(table, names[1], [](T a, T b) { return a < b || b < a; });  // false for a NaN
  add<T, T>(table, names[2], [](T a, T b) { return a < b; });
  add<T, T>(table, names[3], [](T a, T b) { return a <= b; });
  add<T, T>(table, names[4], [](T a, T b) { return a > b; });
  add<T, T>(table, names[5], [](T a, T b) { return a >= b; });
}
#define GA_COMPARISONS(T)                                                                \
  add_comparisons<T>(table, {"setp.eq." #T, "setp.ne." #T, "setp.lt." #T, "setp.le." #T, \
                             "setp.gt." #T, "setp.ge." #T})

// True for a NaN.
template <class T>
void add_unordered(Table& table, const char* const (&names)[8]) {
  add<T, T>(table, names[0], [](T a, T b) { return !(a < b || b < a); });
  add<T, T>(table, names[1], [](T a, T b) { return !(a == b); });
  add<T, T>(table, names[2], [](T a, T b) { return !(a >= b); });
  add<T, T>(table, names[3], [](T a, T b) { return !(a > b); });
  add<T, T>(table, names[4], [](T a, T b) { return !(a <= b); });
  add<T, T>(table, names[5], [](T a, T b) { return !(a < b); });
  add<T, T>(table, names[6], [](T a, T b) { return a != a || b != b; });
  add<T, T>(table, names[7], [](T a, T b) { return a == a && b == b; });
}
#define GA_UNORDERED(T)                                                                    \
  add_unordered<T>(table, {"setp.equ." #T, "setp.neu." #T, "setp.ltu." #T, "setp.leu." #T, \
                           "setp.gtu." #T, "setp.geu." #T, "setp.nan." #T, "setp.num." #T})

template <class T>
void add_moves(Table& table, std::initializer_list<std::pair<const char*, const char*>> names) {
  for (const auto& [move, select] : names) {
    add<T>(table, move, [](T a) { return a; });
    add<T, T, bool>(table, select, [](T a, T b, bool first) { return first ? a : b; });
  }
}

void add_choices(Table& table) {
  GA_COMPARISONS(s16);
  GA_COMPARISONS(u16);
  GA_COMPARISONS(s32);
  GA_COMPARISONS(u32);
  GA_COMPARISONS(s64);
  GA_COMPARISONS(u64);
  GA_COMPARISONS(f32);
  GA_COMPARISONS(f64);
  GA_UNORDERED(f32);
  GA_UNORDERED(f64);
  for (const auto& [name, like] : {std::pair{"setp.eq.b16", "setp.eq.u16"},
                                   {"setp.ne.b16", "setp.ne.u16"},
                                   {"setp.eq.b32", "setp.eq.u32"},
                                   {"setp.ne.b32", "setp.ne.u32"},
                                   {"setp.eq.b64", "setp.eq.u64"},
                                   {"setp.ne.b64", "setp.ne.u64"}}) {
    table[name] = table.at(like);
  }
  add_moves<u16>(table,
                 {{"mov.b16", "selp.b16"}, {"mov.u16", "selp.u16"}, {"mov.s16", "selp.s16"}});
  add_moves<u32>(table, {{"mov.b32", "selp.b32"},
                         {"mov.u32", "selp.u32"},
                         {"mov.s32", "selp.s32"},
                         {"mov.f32", "selp.f32"}});
  add_moves<u64>(table, {{"mov.b64", "selp.b64"},
                         {"mov.u64", "selp.u64"},
                         {"mov.s64", "selp.s64"},
                         {"mov.f64", "selp.f64"}});
  for (const char* name : {"cvta.global.u64", "cvta.to.global.u64", "cvta.param.u64"})
    table[name] = table.at("mov.u64");
  add<bool>(table, "mov.pred", [](bool a) { return a; });
}

// ---- Conversions ---------------------------------------------------------------------------------------

template <class To, class From>
To saturate(From x) {
  constexpr auto least = std::numeric_limits<To>::min(), most = std::numeric_limits<To>::max();
  if (x != x) {
    return sizeof(From) == 8 || sizeof(To) == 8 ? static_cast<To>(u64{1} << (8 * sizeof(To) - 1))
                                                : To{0};
  }
  if (x <= static_cast<From>(least)) return least;
  if (x >= static_cast<From>(most)) return most;  // `most` may be rounded up: then x does not fit
  return static_cast<To>(x);
}

u16 narrow_f16(f32 x) {
  const auto sign = static_cast<u16>(std::bit_cast<u32>(x) >> 16 & 0x8000);
  if (x != x) return 0x7fff;
  const f64 size = std::fabs(f64{x});
  if (size >= 65520) return sign | 0x7c00;
  // The unit of the last place, 2^-24 for subnormal numbers.
  const int exponent = size < 0x1p-14 ? -14 : std::ilogb(size);
  const auto units = static_cast<u32>(std::nearbyint(std::ldexp(size, 10 - exponent)));
  // 1024 units are a 1 in front of the fraction, which counts the exponent up; so do 2048.
  return static_cast<u16>(sign | ((static_cast<u32>(exponent + 14) << 10) + units));
}

f32 widen_f16(u16 h) {
  const u32 exponent = h >> 10 & 31, fraction = h & 1023;
  const f32 sign = (h & 0x8000) != 0 ? -1.0f : 1.0f;
  if (exponent == 31) return fraction != 0 ? value<f32>(kNaN) : sign * HUGE_VALF;
  if (exponent == 0) return sign * std::ldexp(static_cast<f32>(fraction), -24);
  return sign * std::ldexp(static_cast<f32>(1024 + fraction), static_cast<int>(exponent) - 25);
}

u16 narrow_bf16(f32 x) {
  if (x != x) return 0x7fff;
  const u32 bits = std::bit_cast<u32>(x), half = 0x7fff + (bits >> 16 & 1);
  return static_cast<u16>((bits + half) >> 16);
}

template <class To, class From>
void add_cut(Table& table, const char* name) {
  add<From>(table, name, [](From x) { return static_cast<To>(x); });
}
#define GA_CUT(To, From) add_cut<To, From>(table, "cvt." #To "." #From)
#define GA_CUTS(To) \
  GA_CUT(To, u8);   \
  GA_CUT(To, s8);   \
  GA_CUT(To, u16);  \
  GA_CUT(To, s16);  \
  GA_CUT(To, u32);  \
  GA_CUT(To, s32);  \
  GA_CUT(To, u64);  \
  GA_CUT(To, s64)
#define GA_FROM_INTEGER(To, From) add_cut<To, From>(table, "cvt.rn." #To "." #From)
#define GA_FROM_INTEGERS(To) \
  GA_FROM_INTEGER(To, u16);  \
  GA_FROM_INTEGER(To, s16);  \
  GA_FROM_INTEGER(To, u32);  \
  GA_FROM_INTEGER(To, s32);  \
  GA_FROM_INTEGER(To, u64);  \
  GA_FROM_INTEGER(To, s64)
#define GA_TO_INTEGER(To, From)                                                                   \
  add<From>(table, "cvt.rzi." #To "." #From, [](From x) { return saturate<To>(std::trunc(x)); }); \
  add<From>(table, "cvt.rni." #To "." #From, [](From x) { return saturate<To>(std::nearbyint(x)); })
#define GA_TO_INTEGERS(From) \
  GA_TO_INTEGER(u32, From);  \
  GA_TO_INTEGER(s32, From);  \
  GA_TO_INTEGER(u64, From);  \
  GA_TO_INTEGER(s64, From)
#define GA_ROUNDED(T)                                                     \
  add<T>(table, "cvt.rzi." #T "." #T, [](T x) { return std::trunc(x); }); \
  add<T>(table, "cvt.rmi." #T "." #T, [](T x) { return std::floor(x); }); \
  add<T>(table, "cvt.rpi." #T "." #T, [](T x) { return std::ceil(x); });  \
  add<T>(table, "cvt.rni." #T "." #T, [](T x) { return std::nearbyint(x); })

void add_conversions(Table& table) {
  GA_CUTS(u8);
  GA_CUTS(s8);
  GA_CUTS(u16);
  GA_CUTS(s16);
  GA_CUTS(u32);
  GA_CUTS(s32);
  GA_CUTS(u64);
  GA_CUTS(s64);
  GA_FROM_INTEGERS(f32);
  GA_FROM_INTEGERS(f64);
  GA_TO_INTEGERS(f32);
  GA_TO_INTEGERS(f64);
  GA_ROUNDED(f32);
  GA_ROUNDED(f64);
  add<f32>(table, "cvt.f64.f32", [](f32 x) { return f64{x}; });
  add<f64>(table, "cvt.rn.f32.f64", [](f64 x) { return static_cast<f32>(x); });
  add<f64>(table, "cvt.rz.f32.f64", [](f64 x) { return toward_zero(x); });
  add<u16>(table, "cvt.f32.f16", [](u16 x) { return widen_f16(x); });
  add<f32>(table, "cvt.rn.f16.f32", [](f32 x) { return narrow_f16(x); });
  add<f32>(table, "cvt.rn.bf16.f32", [](f32 x) { return narrow_bf16(x); });
}

Table make_table() {
  Table table;
  add_integer_operations(table);
  add_float_operations(table);
  add_choices(table);
  add_conversions(table);
  return table;
}

}  // namespace

const Operation* find_operation(std::string_view name) {
  static const Table table = make_table();
  const auto found = table.find(name);
  return found == table.end() ? nullptr : &found->second;
}

}  // namespace ga::ptx
