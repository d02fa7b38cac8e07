// SPDX-License-Identifier: Apache-2.0
// Replaces NVIDIA's header, as cuda_runtime.h does: sorts, scans and selections. As in CUB, a call
// without temporary storage only returns the size that it needs.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <cstring>
#include <iterator>
#include <numeric>
#include <type_traits>
#include <vector>

namespace cub {
namespace detail {

// The work may use all of the temporary storage, so overwrite it all.
template <class Work>
cudaError_t run(const char* name, void* storage, size_t& storage_bytes, size_t needed, Work work,
                cudaStream_t stream) {
  if (const cudaError_t left = cudaGetLastError(); left != cudaSuccess)
    return left;  // whoever left it
  needed += 1;    // never 0, because a null pointer only asks for the size
  if (storage == nullptr) {
    storage_bytes = needed;
    return cudaSuccess;
  }
  if (storage_bytes < needed) return cudaErrorInvalidValue;
  return ga::sim::library_call(
      name,
      [=] {
        work();
        std::memset(storage, 0xcd, needed);
      },
      stream);
}

// Bits [begin, end) of a key, transformed so that unsigned order is the order of keys.
template <class Key>
uint64_t digits(Key key, int begin, int end) {
  static_assert(std::is_integral_v<Key>, "keys of other types are not simulated");
  using Bits = std::make_unsigned_t<Key>;
  auto bits = static_cast<Bits>(key);
  if (std::is_signed_v<Key>) bits ^= static_cast<Bits>(Bits{1} << (8 * sizeof(Key) - 1));
  const uint64_t from_begin = begin >= 64 ? 0 : uint64_t{bits} >> begin;
  return end - begin >= 64 ? from_begin : from_begin & ((uint64_t{1} << (end - begin)) - 1);
}

template <class Key>
std::vector<size_t> sorted(const Key* keys, size_t n, int begin, int end) {
  std::vector<size_t> order(n);
  std::iota(order.begin(), order.end(), size_t{0});
  std::stable_sort(order.begin(), order.end(), [=](size_t i, size_t j) {
    return digits(keys[i], begin, end) < digits(keys[j], begin, end);
  });
  return order;
}

template <class T>
void gather(const std::vector<size_t>& order, const T* in, T* out) {
  const std::vector<T> copy(in, in + order.size());
  for (size_t i = 0; i < order.size(); ++i) out[i] = copy[order[i]];
}

}  // namespace detail

template <class T>
struct DoubleBuffer {
  T* d_buffers[2] = {nullptr, nullptr};
  int selector = 0;

  DoubleBuffer() = default;
  DoubleBuffer(T* current, T* alternate) : d_buffers{current, alternate} {}
  T* Current() { return d_buffers[selector]; }
  T* Alternate() { return d_buffers[selector ^ 1]; }
};

struct DeviceRadixSort {
  template <class Key, class Value, class Count>
  static cudaError_t SortPairs(void* storage, size_t& storage_bytes, const Key* keys_in,
                               Key* keys_out, const Value* values_in, Value* values_out, Count n,
                               int begin_bit = 0, int end_bit = sizeof(Key) * 8,
                               cudaStream_t stream = nullptr) {
    const auto count = static_cast<size_t>(n);
    return detail::run(
        "cub::DeviceRadixSort", storage, storage_bytes, count * (sizeof(Key) + sizeof(Value)),
        [=] {
          const auto order = detail::sorted(keys_in, count, begin_bit, end_bit);
          detail::gather(order, keys_in, keys_out);
          detail::gather(order, values_in, values_out);
        },
        stream);
  }

  // The result is in the buffers that are current afterwards.
  template <class Key, class Value, class Count>
  static cudaError_t SortPairs(void* storage, size_t& storage_bytes, DoubleBuffer<Key>& keys,
                               DoubleBuffer<Value>& values, Count n, int begin_bit = 0,
                               int end_bit = sizeof(Key) * 8, cudaStream_t stream = nullptr) {
    const Key* keys_in = keys.Current();
    const Value* values_in = values.Current();
    Key* keys_out = keys.Alternate();
    Value* values_out = values.Alternate();
    const auto count = static_cast<size_t>(n);
    if (storage != nullptr) {
      keys.selector ^= 1;
      values.selector ^= 1;
    }
    return detail::run(
        "cub::DeviceRadixSort", storage, storage_bytes, 1024,
        [=] {
          const auto order = detail::sorted(keys_in, count, begin_bit, end_bit);
          detail::gather(order, keys_in, keys_out);
          detail::gather(order, values_in, values_out);
        },
        stream);
  }

  template <class Key, class Count>
  static cudaError_t SortKeys(void* storage, size_t& storage_bytes, const Key* keys_in,
                              Key* keys_out, Count n, int begin_bit = 0,
                              int end_bit = sizeof(Key) * 8, cudaStream_t stream = nullptr) {
    const auto count = static_cast<size_t>(n);
    return detail::run(
        "cub::DeviceRadixSort", storage, storage_bytes, count * sizeof(Key),
        [=] {
          const auto order = detail::sorted(keys_in, count, begin_bit, end_bit);
          detail::gather(order, keys_in, keys_out);
        },
        stream);
  }
};

struct DeviceScan {
  template <class In, class Out, class Count>
  static cudaError_t ExclusiveSum(void* storage, size_t& storage_bytes, In in, Out out, Count n,
                                  cudaStream_t stream = nullptr) {
    return sum<true>(storage, storage_bytes, in, out, n, stream);
  }

  template <class In, class Out, class Count>
  static cudaError_t InclusiveSum(void* storage, size_t& storage_bytes, In in, Out out, Count n,
                                  cudaStream_t stream = nullptr) {
    return sum<false>(storage, storage_bytes, in, out, n, stream);
  }

 private:
  template <bool exclusive, class In, class Out, class Count>
  static cudaError_t sum(void* storage, size_t& storage_bytes, In in, Out out, Count n,
                         cudaStream_t stream) {
    using Value = typename std::iterator_traits<In>::value_type;
    return detail::run(
        "cub::DeviceScan", storage, storage_bytes, 1024,
        [=] {
          Value total{};
          In from = in;
          Out to = out;
          for (Count i = 0; i < n; ++i, ++from, ++to) {
            const Value before = total;
            total = static_cast<Value>(total + *from);
            *to = exclusive ? before : total;
          }
        },
        stream);
  }
};

struct DeviceSelect {
  template <class In, class Flags, class Out, class Selected, class Count>
  static cudaError_t Flagged(void* storage, size_t& storage_bytes, In in, Flags flags, Out out,
                             Selected selected, Count n, cudaStream_t stream = nullptr) {
    return detail::run(
        "cub::DeviceSelect", storage, storage_bytes, 1024,
        [=] {
          Out to = out;
          Count taken = 0;
          for (Count i = 0; i < n; ++i) {
            if (!flags[i]) continue;
            *to++ = in[i];
            ++taken;
          }
          *selected = static_cast<std::remove_reference_t<decltype(*selected)>>(taken);
        },
        stream);
  }
};

}  // namespace cub
