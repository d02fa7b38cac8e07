// SPDX-License-Identifier: Apache-2.0
#include "backend/cpu/batchnorm.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <initializer_list>

#include "backend/numbers.hpp"
#include "core/tensor.hpp"

namespace ga::cpu {
namespace {

constexpr int64_t kAlone = 16384;        // elements for which a second thread does not pay
constexpr int64_t kSmallestItem = 4096;  // elements, so that an item pays
constexpr int64_t kMostItems = 1024;
constexpr int64_t kMostSlices = 64;
constexpr int64_t kSlice = 65536;    // elements of a channel, at least
constexpr int64_t kSliceRows = 128;  // rows of a matrix, at least
constexpr int64_t kColumns = 1024;   // of a matrix: their sums fit L1
constexpr int64_t kStretch = 8192;   // elements of consecutive planes
constexpr int64_t kWarm = 1 << 20;   // bytes that are still in L2 when they are read again
constexpr int64_t kNarrow = 64;      // rows of fewer channels are folded
constexpr int64_t kWidest = 4096;    // columns of folded rows, at most
constexpr int64_t kGroup = 16;
constexpr int kNumbers = 5;

int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

// How many rows of a matrix with so many channels are folded to one.
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

// The statistics that a channel is normalised by.
struct Normal {
  double mean, rstd, count;

  Normal(const BnTask& task, const BnChannel& c)
      : mean(task.frozen ? c.running_mean : c.mean),
        rstd(task.frozen ? 1 / std::sqrt(c.running_variance + task.eps) : c.rstd),
        count(task.frozen ? HUGE_VAL : c.count) {}
};

// Stores the numbers of a channel, one for each array.
template <class T>
void put(T* to, int64_t columns, std::initializer_list<T> numbers) {
  for (size_t k = 0; k < numbers.size(); ++k)
    to[static_cast<int64_t>(k) * columns] = numbers.begin()[k];
}

}  // namespace

// How a task is cut into items.
struct BatchNorm::Cut {
  bool rows;        // whether the tensor is a matrix with a column for each channel
  int64_t fold;     // how many times a row has each channel
  int64_t columns;  // of the matrix, or channels
  int64_t stride;   // from one array of sums to the next
  int64_t length;   // rows of the matrix, or elements of a channel
  int64_t slice;    // rows or elements of a slice
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

// ---- Sums, and what a channel keeps of them -----------------------------------------------------

struct BatchNorm::Statistics {
  static constexpr auto kPlanes = &BnPlanes::statistics;
  static constexpr auto kRows = &BnRows::statistics;

  static int64_t size(const BnTask&) { return 8; }  // bytes of a number
  // The channel's first element.
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

// ---- Passes that write elements -----------------------------------------------------------------

// Numbers of the type computed in; Pass::set<T>(task, channel, to, columns) writes those of a
// channel.
template <class Pass>
struct BatchNorm::Writes {
  static int64_t size(const BnTask& t) { return t.dtype == GA_F64 ? 8 : 4; }
  static void prepare(const BnTask& t, int64_t c, void* numbers, int64_t columns, int64_t column) {
    if (t.dtype == GA_F64)
      Pass::set(t, c, static_cast<double*>(numbers) + column, columns);
    else
      Pass::set(t, c, static_cast<float*>(numbers) + column, columns);
  }
};

struct BatchNorm::Forward : Writes<Forward> {
  static constexpr auto kPlanes = &BnPlanes::forward;
  static constexpr auto kRows = &BnRows::forward;

  template <class T>
  static void set(const BnTask& t, int64_t c, T* to, int64_t columns) {
    const Normal n(t, t.state[c]);
    const BnForward<T> f(n.mean, n.rstd, number_of(t.gamma, c, 1), number_of(t.beta, c, 0));
    put<T>(to, columns, {f.centre.high, f.centre.low, f.scale, f.shift});
  }
};

struct BatchNorm::Backward : Writes<Backward> {
  static constexpr auto kPlanes = &BnPlanes::backward;
  static constexpr auto kRows = &BnRows::backward;

  template <class T>
  static void set(const BnTask& t, int64_t c, T* to, int64_t columns) {
    const BnChannel& channel = t.state[c];
    const Normal n(t, channel);
    const double share = t.mode == GA_BN_WINDOW ? t.share() : 1;
    const BnBackward<T> b(n.mean, n.rstd, number_of(t.gamma, c, 1), t.frozen ? 0 : channel.dbeta,
                          t.frozen ? 0 : channel.dgamma, t.frozen ? 1 : share * n.count);
    put<T>(to, columns, {b.centre.high, b.centre.low, b.scale, b.shift, b.slope});
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

// Runs body(first, last) for ranges of units, which have so many elements together.
template <class Body>
void BatchNorm::run(int64_t units, int64_t elements, const Body& body) {
  if (units == 0) return;
  const int64_t wanted = std::clamp(elements / (4 * threads_.count()), kSmallestItem, kSlice);
  const int64_t items =
      std::min({units, kMostItems, std::max<int64_t>(1, divide_up(elements, wanted))});
  const auto item = [&](int64_t i) { body(units * i / items, units * (i + 1) / items); };
  threads_.run(items, elements <= kAlone, item);
}

// Computes the numbers that a pass needs of each channel.
template <class Pass>
void BatchNorm::prepare(const BnTask& t, int64_t columns) {
  run(columns, columns * 8, [&](int64_t first, int64_t last) {
    for (int64_t c = first; c < last; ++c)
      Pass::prepare(t, c % t.channels, numbers_.get(), columns, c);
  });
}

// Runs body(slice, first, last) for blocks of columns [first, last) in each slice.
template <class Body>
void BatchNorm::run_blocks(const BnTask& t, const Cut& cut, int64_t block, const Body& body) {
  const int64_t blocks = divide_up(cut.columns, block);
  run(cut.slices * blocks, t.count(), [&](int64_t from, int64_t to) {
    for (int64_t u = from; u < to; ++u) {
      const int64_t first = u % blocks * block;
      body(u / blocks, first, std::min(cut.columns, first + block));
    }
  });
}

// Whether the output had better bypass the caches.
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
    prepare<Sum>(t, cut.columns);
    const int64_t block = cut.rows ? kColumns : planes_at_once(t, kMostPlanes);
    run_blocks(t, cut, block, [&](int64_t s, int64_t first, int64_t last) {
      if (cut.rows)
        (kernels_.rows[f64].*Sum::kRows)(t, cut.begin(s), cut.end(s), {numbers_.get(), cut.columns},
                                         first, last, sums_of(s, 0));
      else
        (kernels_.planes[f64].*Sum::kPlanes)(t, first, last, cut.begin(s), cut.end(s),
                                             numbers_from<Sum>(t, cut.columns, first),
                                             sums_of(s, first));
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

// The numbers from a column onwards.
template <class Pass>
BnNumbers BatchNorm::numbers_from(const BnTask& t, int64_t columns, int64_t first) const {
  return {reinterpret_cast<const char*>(numbers_.get()) + first * Pass::size(t), columns};
}

template <class Map>
void BatchNorm::map(const BnTask& t) {
  if (t.count() == 0) return;
  const Cut cut(t);
  const bool f64 = t.dtype == GA_F64, stream = past_caches(t);
  prepare<Map>(t, cut.columns);
  if (cut.rows) {
    run(cut.length, t.count(), [&](int64_t first, int64_t last) {
      (kernels_.rows[f64].*Map::kRows)(t, first, last, {numbers_.get(), cut.columns}, stream);
    });
    return;
  }
  const auto body = [&](int64_t s, int64_t first, int64_t last) {
    (kernels_.planes[f64].*Map::kPlanes)(t, first, last, cut.begin(s), cut.end(s),
                                         numbers_from<Map>(t, cut.columns, first), stream);
  };
  run_blocks(t, cut, planes_at_once(t, kMostPlanes), body);
}

// Runs both passes; if a channel is one slice, the second one while the slice is in the cache.
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

// The number of channels whose planes one call of a kernel takes: enough for a long stretch of
// memory in each sample, but few enough to leave some for every thread.
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

void BatchNorm::write_record(const BnTask& t, const BnPassEnd& end, double* record) {
  record[0] = end.number();
  for (int64_t c = 0; c < t.channels; ++c) end.write(t.state[c], c, record);
}

void BatchNorm::merge_records(const BnTask& t, const BnPassEnd& end, const BnRecords& records) {
  for (int64_t c = 0; c < t.channels; ++c) records.merge_into(t.state[c], c, end, t.eps);
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
    if (bytes > 0) std::memset(task.out, 0, bytes);  // out may be NULL if it has no elements
  } else if (summing) {
    sum_and_map<Products, Backward>(task);
  } else {
    map<Backward>(task);
  }
}

}  // namespace ga::cpu
