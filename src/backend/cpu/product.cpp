// SPDX-License-Identifier: Apache-2.0
// Matrix products of f32 by the library itself, for where oneDNN is not. Compiled once per ISA level, which GA_ISA
// names.
//
// The bits are the same at every level and for any way to cut a product into pieces: an element is the sum of its
// products in their order, each rounded (no contraction to FMA), in blocks of kDepth, which are scaled and added to c
// one after the other.
#include <cstdint>

#include "backend/cpu/matmul_module.h"

namespace ga::cpu {
namespace {

#define GA_CONCAT_(a, b) a##b
#define GA_CONCAT(a, b) GA_CONCAT_(a, b)

// A tile is what the registers hold of c. Rows times two vectors, beside two vectors of b and one of a.
#if defined(__AVX512F__)
constexpr int64_t kWidth = 16, kTileRows = 12;
#elif defined(__AVX__)
constexpr int64_t kWidth = 8, kTileRows = 6;
#elif defined(__aarch64__)
constexpr int64_t kWidth = 4, kTileRows = 8;
#else
constexpr int64_t kWidth = 4, kTileRows = 6;
#endif
constexpr int64_t kTileColumns = 2 * kWidth;

typedef float Vector __attribute__((vector_size(kWidth * sizeof(float))));

// A block of a and one of b fit the second-level cache together, and kDepth rows of a tile of b the first.
constexpr int64_t kDepth = 256, kBlockRows = 16 * kTileRows, kBlockColumns = 256;

constexpr int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

// op(a) or op(b), with the side that a tile has rows or columns of first: element (i, p) is data[i * across + p *
// along], for a sum over p.
struct Factor {
  const float* data;
  int64_t across, along;
};

// Copies `count` lines of a factor into panels of kWide lines. A panel has the elements of one p side by side; lines
// that are missing in the last panel are zeros.
template <int64_t kWide>
void pack(const Factor& from, int64_t count, int64_t depth, float* to) {
  for (int64_t first = 0; first < count; first += kWide, to += kWide * depth) {
    const float* const data = from.data + first * from.across;
    const int64_t lines = least(kWide, count - first);
    if (lines == kWide && from.across == 1) {
      for (int64_t p = 0; p < depth; ++p)
        for (int64_t i = 0; i < kWide; ++i) to[p * kWide + i] = data[p * from.along + i];
      continue;
    }
    for (int64_t i = 0; i < kWide; ++i)
      for (int64_t p = 0; p < depth; ++p)
        to[p * kWide + i] = i < lines ? data[i * from.across + p * from.along] : 0.0f;
  }
}

// The rows of a tile from one on. Not an array, which gcc keeps in memory.
template <int64_t kRows>
struct Sums {
  Vector low = {}, high = {};
  Sums<kRows - 1> rest;

  __attribute__((always_inline)) void add(const float* a, Vector b_low, Vector b_high) {
    low += *a * b_low;
    high += *a * b_high;
    rest.add(a + 1, b_low, b_high);
  }
  __attribute__((always_inline)) void store(float* to) const {
    __builtin_memcpy(to, &low, sizeof low);
    __builtin_memcpy(to + kWidth, &high, sizeof high);
    rest.store(to + kTileColumns);
  }
};
template <>
struct Sums<0> {
  void add(const float*, Vector, Vector) {}
  void store(float*) const {}
};

// The sums of a tile, row by row, from a panel of a and one of b.
void sum_tile(int64_t depth, const float* a, const float* b, float* to) {
  Sums<kTileRows> sums;
  for (int64_t p = 0; p < depth; ++p, a += kTileRows, b += kTileColumns) {
    Vector low, high;
    __builtin_memcpy(&low, b, sizeof low);
    __builtin_memcpy(&high, b + kWidth, sizeof high);
    sums.add(a, low, high);
  }
  sums.store(to);
}

const char* multiply(int64_t m, int64_t n, int64_t k, float alpha, const float* a, int64_t lda,
                     int transpose_a, const float* b, int64_t ldb, int transpose_b, float beta,
                     float* c, int64_t ldc, float* workspace) noexcept {
  if (m < 0 || n < 0 || k < 0) return "arguments refused";
  if (m == 0 || n == 0) return nullptr;
  if (ldc < n || (k > 0 && (lda < (transpose_a ? m : k) || ldb < (transpose_b ? k : n))))
    return "arguments refused";
  if (k == 0) {  // an empty sum
    for (int64_t i = 0; i < m && beta != 1; ++i)
      for (int64_t j = 0; j < n; ++j) c[i * ldc + j] = beta == 0 ? 0 : beta * c[i * ldc + j];
    return nullptr;
  }
  const Factor left = {a, transpose_a ? 1 : lda, transpose_a ? lda : 1};
  const Factor right = {b, transpose_b ? ldb : 1, transpose_b ? 1 : ldb};
  float *const rows_of_a = workspace, *const columns_of_b = workspace + kDepth * kBlockRows;
  for (int64_t p = 0; p < k; p += kDepth) {
    const int64_t depth = least(kDepth, k - p);
    const float keep = p == 0 ? beta : 1;
    for (int64_t column = 0; column < n; column += kBlockColumns) {
      const int64_t columns = least(kBlockColumns, n - column);
      pack<kTileColumns>(
          {right.data + column * right.across + p * right.along, right.across, right.along},
          columns, depth, columns_of_b);
      for (int64_t row = 0; row < m; row += kBlockRows) {
        const int64_t rows = least(kBlockRows, m - row);
        pack<kTileRows>({left.data + row * left.across + p * left.along, left.across, left.along},
                        rows, depth, rows_of_a);
        for (int64_t j = 0; j < columns; j += kTileColumns) {
          const int64_t wide = least(kTileColumns, columns - j);
          for (int64_t i = 0; i < rows; i += kTileRows) {
            float sums[kTileRows * kTileColumns];
            sum_tile(depth, rows_of_a + i * depth, columns_of_b + j * depth, sums);
            const int64_t high = least(kTileRows, rows - i);
            for (int64_t y = 0; y < high; ++y) {
              float* const to = c + (row + i + y) * ldc + column + j;
              const float* const sum = sums + y * kTileColumns;
              if (keep == 0)
                for (int64_t x = 0; x < wide; ++x) to[x] = alpha * sum[x];
              else
                for (int64_t x = 0; x < wide; ++x) to[x] = keep * to[x] + alpha * sum[x];
            }
          }
        }
      }
    }
  }
  return nullptr;
}

constexpr ga_matmul_module products = {GA_MATMUL_ABI, "the library's own products", multiply,
                                       nullptr, kDepth*(kBlockRows + kBlockColumns)};

}  // namespace

const ga_matmul_module& GA_CONCAT(products_, GA_ISA)();
const ga_matmul_module& GA_CONCAT(products_, GA_ISA)() { return products; }

}  // namespace ga::cpu
