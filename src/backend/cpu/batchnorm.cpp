// SPDX-License-Identifier: Apache-2.0
#include "backend/cpu/batchnorm.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "backend/numbers.hpp"
#include "tensor.hpp"

namespace ga::cpu {
namespace {

constexpr int64_t kAlone = 16384;        // elements that one thread does best alone
constexpr int64_t kSmallestItem = 4096;  // likewise of an item
constexpr int64_t kMostItems = 1024;
constexpr int64_t kMostSlices = 64;
constexpr int64_t kSlice = 65536;    // elements of a channel
constexpr int64_t kSliceRows = 128;  // at least, of a matrix
constexpr int64_t kColumns = 1024;   // of a matrix: their sums fit L1
constexpr int64_t kStretch = 8192;   // elements of several planes that follow each other
constexpr int64_t kWarm = 1 << 20;   // bytes that are still in L2 when they are read once more
constexpr int64_t kNarrow = 64;      // fewer channels than that are folded
constexpr int64_t kWidest = 4096;    // of folded ones
constexpr int64_t kGroup = 16;
constexpr int kNumbers = 5;

int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Rows of so many channels that make one.
int64_t fold_of(int64_t channels) {
  int64_t fold = 1;
  while (fold * channels < kNarrow || fold * channels % kGroup != 0) ++fold;
  return channels < kNarrow || fold * channels <= kWidest ? fold : 1;
}

double number_of(const Array& a, int64_t i, double missing) {
  if (!a.data) return missing;
  switch (a.format) {
    case GA_F64:
      return static_cast<const double*>(a.data)[i];
    case GA_F16:
      return static_cast<double>(from_f16(static_cast<const uint16_t*>(a.data)[i]));
    case GA_BF16:
      return static_cast<double>(from_bf16(static_cast<const uint16_t*>(a.data)[i]));
    default:
      return static_cast<double>(static_cast<const float*>(a.data)[i]);
  }
}

// What a channel is normalised by.
struct Normal {
  double mean, rstd, count;

  Normal(const BnTask& task, const BnChannel& c)
      : mean(task.frozen ? c.running_mean : c.mean),
        rstd(task.frozen ? 1 / std::sqrt(c.running_variance + task.eps) : c.rstd),
        count(task.frozen ? HUGE_VAL : c.count) {}
};

template <class T>
void put(T* numbers, int64_t columns, const Centre<T>& centre) {
  numbers[0] = centre.high;
  numbers[columns] = centre.low;
}

}  // namespace

// How a task is cut.
struct BatchNorm::Cut {
  bool rows;        // a matrix of rows
  int64_t fold;     // channels come fold times in a row
  int64_t columns;  // of a matrix, or channels
  int64_t stride;   // between their arrays of sums
  int64_t length;   // rows of it, or elements of a channel
  int64_t slice;    // of these
  int64_t slices;

  explicit Cut(const BnTask& t) : rows(t.channels_last || t.positions == 1) {
    fold = rows ? fold_of(t.channels) : 1;
    columns = fold * t.channels;
    stride = divide_up(columns, kGroup) * kGroup;
    length = rows ? divide_up(t.elements(), fold) : t.elements();
    slice = std::max(rows ? kSliceRows : kSlice,
                     divide_up(divide_up(length, kMostSlices), kGroup) * kGroup);
    if (!rows && t.positions <= kTile && t.positions > 0)  // small planes are not cut
      slice = divide_up(slice, t.positions) * t.positions;
    slices = divide_up(length, slice);
  }
  int64_t begin(int64_t s) const { return s * slice; }
  int64_t end(int64_t s) const { return std::min(length, (s + 1) * slice); }
};

// ---- What is summed up, and what it makes of a channel ------------------------------------------

struct BatchNorm::Statistics {
  static constexpr auto kPlanes = &BnPlanes::statistics;
  static constexpr auto kRows = &BnRows::statistics;

  static int64_t size(const BnTask&) { return 8; }  // of a number
  // x of the channel's first element.
  static double shift(const BnTask& t, int64_t c) {
    if (t.elements() == 0) return 0;
    const int64_t at = t.channels_last ? c : c * t.positions;
    return number_of({const_cast<void*>(t.x), t.dtype}, at, 0);
  }
  static void prepare(const BnTask& t, int64_t c, void* numbers, int64_t, int64_t column) {
    static_cast<double*>(numbers)[column] = shift(t, c);
  }
  static void finish(const BnTask& t, int64_t c, double sum, double squares) {
    t.take(c, moments_of(t.elements(), shift(t, c), sum, squares));
  }
};

struct BatchNorm::Products {
  static constexpr auto kPlanes = &BnPlanes::sums;
  static constexpr auto kRows = &BnRows::sums;

  static int64_t size(const BnTask&) { return 8; }
  static void prepare(const BnTask& t, int64_t c, void* numbers, int64_t, int64_t column) {
    static_cast<double*>(numbers)[column] = Normal(t, t.state[c]).mean;
  }
  static void finish(const BnTask& t, int64_t c, double dbeta, double products) {
    BnChannel& channel = t.state[c];
    const double dgamma = products * Normal(t, channel).rstd;
    if (t.dtype == GA_F64) {
      static_cast<double*>(t.dbeta)[c] = dbeta;
      static_cast<double*>(t.dgamma)[c] = dgamma;
    } else {
      static_cast<float*>(t.dbeta)[c] = static_cast<float>(dbeta);
      static_cast<float*>(t.dgamma)[c] = static_cast<float>(dgamma);
    }
    if (t.frozen) return;
    const bool window = t.mode == GA_BN_WINDOW;
    channel.dbeta = window ? channel.dbeta + t.share() * dbeta : dbeta;
    channel.dgamma = window ? channel.dgamma + t.share() * dgamma : dgamma;
  }
};

// ---- What is made of elements -------------------------------------------------------------------

struct BatchNorm::Forward {
  static constexpr auto kPlanes = &BnPlanes::forward;
  static constexpr auto kRows = &BnRows::forward;
  static int64_t size(const BnTask& t) { return t.dtype == GA_F64 ? 8 : 4; }

  template <class T>
  static void put_numbers(const BnTask& t, int64_t c, void* numbers, int64_t columns,
                          int64_t column) {
    const Normal n(t, t.state[c]);
    const BnForward<T> f(n.mean, n.rstd, number_of(t.gamma, c, 1), number_of(t.beta, c, 0));
    T* const to = static_cast<T*>(numbers) + column;
    put(to, columns, f.centre);
    to[2 * columns] = f.scale;
    to[3 * columns] = f.shift;
  }
  static void prepare(const BnTask& t, int64_t c, void* numbers, int64_t columns, int64_t column) {
    (t.dtype == GA_F64 ? put_numbers<double> : put_numbers<float>)(t, c, numbers, columns, column);
  }
};

struct BatchNorm::Backward {
  static constexpr auto kPlanes = &BnPlanes::backward;
  static constexpr auto kRows = &BnRows::backward;
  static int64_t size(const BnTask& t) { return t.dtype == GA_F64 ? 8 : 4; }

  template <class T>
  static void put_numbers(const BnTask& t, int64_t c, void* numbers, int64_t columns,
                          int64_t column) {
    const BnChannel& channel = t.state[c];
    const Normal n(t, channel);
    const double share = t.mode == GA_BN_WINDOW ? t.share() : 1;
    const BnBackward<T> b(n.mean, n.rstd, number_of(t.gamma, c, 1), t.frozen ? 0 : channel.dbeta,
                          t.frozen ? 0 : channel.dgamma, t.frozen ? 1 : share * n.count);
    T* const to = static_cast<T*>(numbers) + column;
    put(to, columns, b.centre);
    to[2 * columns] = b.scale;
    to[3 * columns] = b.shift;
    to[4 * columns] = b.slope;
  }
  static void prepare(const BnTask& t, int64_t c, void* numbers, int64_t columns, int64_t column) {
    (t.dtype == GA_F64 ? put_numbers<double> : put_numbers<float>)(t, c, numbers, columns, column);
  }
};

// ---- Passes -------------------------------------------------------------------------------------

void BatchNorm::reserve(int64_t channels) {
  if (channels <= channels_) return;
  const int64_t columns = divide_up(std::max(channels, kWidest), kGroup) * kGroup;
  const auto room = [](int64_t count) {
    return Doubles(static_cast<double*>(
        ::operator new (static_cast<size_t>(count) * sizeof(double), std::align_val_t{64})));
  };
  Doubles sums = room(2 * columns * kMostSlices), numbers = room(columns * kNumbers);
  threads_.reserve(kMostItems);
  sums_ = std::move(sums);
  numbers_ = std::move(numbers);
  channels_ = channels;
  bytes_ = columns * (2 * kMostSlices + kNumbers) * static_cast<int64_t>(sizeof(double));
}

// body(first, last) for ranges of units, of so many elements together.
template <class Body>
void BatchNorm::run(int64_t units, int64_t elements, const Body& body) {
  if (units == 0) return;
  const int64_t wanted = std::clamp(elements / (4 * threads_.count()), kSmallestItem, kSlice);
  const int64_t items =
      std::min({units, kMostItems, std::max<int64_t>(1, divide_up(elements, wanted))});
  struct Job {
    int64_t units, items;
    const Body& body;
  } job = {units, items, body};
  const ga_task task = [](void* data, int64_t i) {
    const Job& j = *static_cast<const Job*>(data);
    j.body(j.units * i / j.items, j.units * (i + 1) / j.items);
  };
  threads_.run(items, elements <= kAlone, task, &job);
}

// Whether the output is better not left in the caches.
bool BatchNorm::past_caches(const BnTask& t) const {
  return (t.dtype == GA_F32 || t.dtype == GA_F64) && t.out != t.x && t.out != t.dy &&
         2 * t.count() * dtype_info(t.dtype).size > cache_;
}

template <class Sum>
void BatchNorm::sum(const BnTask& t) {
  const Cut cut(t);
  const bool f64 = t.dtype == GA_F64;
  const auto sums_of = [&](int64_t slice, int64_t column) {
    double* const at = sums_.get() + 2 * slice * cut.stride + column;
    return BnSums{at, at + cut.stride};
  };
  if (t.elements() > 0) {
    run(cut.columns, cut.columns * 8, [&](int64_t first, int64_t last) {
      for (int64_t c = first; c < last; ++c)
        Sum::prepare(t, c % t.channels, numbers_.get(), cut.columns, c);
    });
    const int64_t block = cut.rows ? kColumns : planes_at_once(t, kMostPlanes);
    const int64_t blocks = divide_up(cut.columns, block);
    run(cut.slices * blocks, t.count(), [&](int64_t from, int64_t to) {
      for (int64_t u = from; u < to; ++u) {
        const int64_t s = u / blocks, first = u % blocks * block;
        const int64_t last = std::min(cut.columns, first + block);
        if (cut.rows)
          (kernels_.rows[f64].*Sum::kRows)(t, cut.begin(s), cut.end(s),
                                           {numbers_.get(), cut.columns}, first, last,
                                           sums_of(s, 0));
        else
          (kernels_.planes[f64].*Sum::kPlanes)(t, first, last, cut.begin(s), cut.end(s),
                                               numbers_from<Sum>(t, cut.columns, first),
                                               sums_of(s, first));
      }
    });
  }
  run(t.channels, cut.slices * cut.columns, [&](int64_t first, int64_t last) {
    for (int64_t c = first; c < last; ++c) {
      double sum[2] = {0, 0};
      for (int64_t s = 0; s < cut.slices; ++s)
        for (int64_t k = 0; k < cut.fold; ++k) {
          const BnSums part = sums_of(s, k * t.channels + c);
          sum[0] += *part.first;
          sum[1] += *part.second;
        }
      Sum::finish(t, c, sum[0], sum[1]);
    }
  });
}

// The numbers from a column on.
template <class Pass>
BnNumbers BatchNorm::numbers_from(const BnTask& t, int64_t columns, int64_t first) const {
  return {reinterpret_cast<const char*>(numbers_.get()) + first * Pass::size(t), columns};
}

template <class Map>
void BatchNorm::map(const BnTask& t) {
  if (t.count() == 0) return;
  const Cut cut(t);
  const bool f64 = t.dtype == GA_F64, stream = past_caches(t);
  run(cut.columns, cut.columns * 8, [&](int64_t first, int64_t last) {
    for (int64_t c = first; c < last; ++c)
      Map::prepare(t, c % t.channels, numbers_.get(), cut.columns, c);
  });
  if (cut.rows) {
    run(cut.length, t.count(), [&](int64_t first, int64_t last) {
      (kernels_.rows[f64].*Map::kRows)(t, first, last, {numbers_.get(), cut.columns}, stream);
    });
    return;
  }
  const int64_t block = planes_at_once(t, kMostPlanes), blocks = divide_up(cut.columns, block);
  run(cut.slices * blocks, t.count(), [&](int64_t from, int64_t to) {
    for (int64_t u = from; u < to; ++u) {
      const int64_t s = u / blocks, first = u % blocks * block;
      (kernels_.planes[f64].*Map::kPlanes)(t, first, std::min(cut.columns, first + block),
                                           cut.begin(s), cut.end(s),
                                           numbers_from<Map>(t, cut.columns, first), stream);
    }
  });
}

// Both; where a channel is one slice, while that is in the cache.
template <class Sum, class Map>
void BatchNorm::sum_and_map(const BnTask& t) {
  const Cut cut(t);
  const int64_t bytes = t.elements() * dtype_info(t.dtype).size * (t.dy ? 2 : 1);
  const int64_t warm = bytes > 0 ? kWarm / bytes : 0;  // channels that stay in the cache
  if (cut.rows || cut.slices != 1 || warm * t.positions < kStretch / 2) {
    sum<Sum>(t);
    map<Map>(t);
    return;
  }
  const bool f64 = t.dtype == GA_F64, stream = past_caches(t);
  const int64_t block = planes_at_once(t, warm);
  run(divide_up(t.channels, block), t.count(), [&](int64_t from, int64_t to) {
    for (int64_t first = from * block; first < std::min(t.channels, to * block); first += block) {
      const int64_t last = std::min(t.channels, first + block), columns = last - first;
      double numbers[kNumbers * kMostPlanes], sums[2][kMostPlanes];
      for (int64_t c = first; c < last; ++c) Sum::prepare(t, c, numbers, columns, c - first);
      (kernels_.planes[f64].*Sum::kPlanes)(t, first, last, 0, cut.length, {numbers, columns},
                                           {sums[0], sums[1]});
      for (int64_t c = first; c < last; ++c) {
        Sum::finish(t, c, sums[0][c - first], sums[1][c - first]);
        Map::prepare(t, c, numbers, columns, c - first);
      }
      (kernels_.planes[f64].*Map::kPlanes)(t, first, last, 0, cut.length, {numbers, columns},
                                           stream);
    }
  });
}

// Channels whose planes are taken together: as many as are a good stretch of memory in a sample, but
// no more than leave some for every thread.
int64_t BatchNorm::planes_at_once(const BnTask& t, int64_t most) const {
  const int64_t share = divide_up(t.channels, 2 * threads_.count());
  return std::clamp<int64_t>(divide_up(kStretch, t.positions), 1,
                             std::min({most, share, kMostPlanes}));
}

void BatchNorm::statistics(const BnTask& task) { sum<Statistics>(task); }

void BatchNorm::take(const BnTask& t, const BnGiven& given) {
  const double n = static_cast<double>(given.count);
  for (int64_t c = 0; c < t.channels; ++c) {
    Moments m = {0, 0, 0};
    if (given.known)
      m = t.input->history[t.index * t.channels + c];
    else if (given.count > 0)
      m = {n, number_of(given.mean, c, 0), number_of(given.spread, c, 0) * (given.squares ? 1 : n)};
    t.take(c, m);
  }
}

void BatchNorm::finalize(const BnTask& t) {
  for (int64_t c = 0; c < t.channels; ++c) ga::finalize(t.state[c], t.eps);
}

void BatchNorm::forward(const BnTask& task, bool taking) {
  if (taking)
    sum_and_map<Statistics, Forward>(task);
  else
    map<Forward>(task);
}

void BatchNorm::backward_sums(const BnTask& task) { sum<Products>(task); }

void BatchNorm::backward(const BnTask& task, bool summing) {
  if (task.weight == 0) {
    const auto bytes = static_cast<size_t>(task.count() * dtype_info(task.dtype).size);
    if (bytes > 0) std::memset(task.out, 0, bytes);  // else out may be NULL
  } else if (summing) {
    sum_and_map<Products, Backward>(task);
  } else {
    map<Backward>(task);
  }
}

}  // namespace ga::cpu
