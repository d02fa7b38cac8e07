// SPDX-License-Identifier: Apache-2.0
// Batch normalisation: sums over the channels of a layer, and passes over its elements. The
// formulas are in ops/batchnorm.hpp.
//
// A block works on adjacent channels, its group, in a part of the tensor, its slice, and stores a
// partial for each channel. The last block of a group adds the slices in a fixed order, so the bits
// depend only on the shape, on the alignment of the addresses and on the device.
#include <initializer_list>
#include <type_traits>

#include "backend/cuda/kernels.hpp"
#include "backend/cuda/loops.hpp"

namespace ga::cuda {
namespace {

constexpr int kMostGroup = 128;     // channels of a group
constexpr int kMostParts = 16;      // threads that add the slices of a channel
constexpr int64_t kLeastReads = 4;  // of a thread in a slice

// ---- Reading and writing ------------------------------------------------------------------------

template <int kBytes>
using WordOf = std::conditional_t<kBytes == 2, uint16_t, uint32_t>;

// The bytes of one access.
template <int kBytes>
struct alignas(kBytes) [[gnu::may_alias]] Words {
  WordOf<kBytes> word[kBytes / sizeof(WordOf<kBytes>)];
};

template <int kBytes>
GA_DEVICE void store_words(Words<kBytes>* to, const Words<kBytes>& from) {
  to = global(to);
#ifdef __CUDACC__
  if constexpr (kBytes >= 8) return store_global(to, from.word);
#endif
  *to = from;
}

// 16-bit numbers by the device's instructions, which do not keep the payload of NaN.
template <int32_t kFormat>
GA_DEVICE float from_half(uint16_t h) {
#ifdef __CUDA_ARCH__
  if constexpr (kFormat == GA_F16) return widen_f16(h);
#endif
  return Dtype<kFormat>::template widen<float>(h);
}

template <int32_t kFormat>
GA_DEVICE uint16_t to_half(float x) {
#ifdef __CUDA_ARCH__
  if constexpr (kFormat == GA_F16) return narrow_f16(x);
  if constexpr (kFormat == GA_BF16 && __CUDA_ARCH__ >= 800) return narrow_bf16(x);
#endif
  return Dtype<kFormat>::narrow(x);
}

// kWidth neighbouring elements, read and written at once.
template <int32_t kFormat_, int kWidth_>
struct Access {
  static constexpr int32_t kFormat = kFormat_;
  static constexpr int kWidth = kWidth_;
  static constexpr int kSize = kFormat == GA_F64 ? 8 : kFormat == GA_F32 ? 4 : 2;
  static constexpr int kBytes = kSize * kWidth;
  using Real = std::conditional_t<kFormat == GA_F64, double, float>;
  using Raw = Words<kBytes>;

  GA_DEVICE static Raw load(const void* data, int64_t at) {
    return *global(static_cast<const Raw*>(data) + at);
  }

  GA_DEVICE static Real get(const Raw& raw, int lane) {
    if constexpr (kFormat == GA_F64) {
      const uint64_t bits = uint64_t{raw.word[2 * lane + 1]} << 32 | raw.word[2 * lane];
      double x;
      __builtin_memcpy(&x, &bits, sizeof x);
      return x;
    } else if constexpr (kFormat == GA_F32) {
      return float_of(raw.word[lane]);
    } else if constexpr (kWidth == 1) {
      return from_half<kFormat>(raw.word[0]);
    } else {
      return from_half<kFormat>(static_cast<uint16_t>(raw.word[lane / 2] >> (lane % 2 * 16)));
    }
  }

  GA_DEVICE static void store(void* data, int64_t at, const Real (&x)[kWidth]) {
    Raw raw;
    if constexpr (kFormat == GA_F64) {
      for (int l = 0; l < kWidth; ++l) {
        uint64_t bits;
        __builtin_memcpy(&bits, &x[l], sizeof bits);
        raw.word[2 * l] = static_cast<uint32_t>(bits);
        raw.word[2 * l + 1] = static_cast<uint32_t>(bits >> 32);
      }
    } else if constexpr (kFormat == GA_F32) {
      for (int l = 0; l < kWidth; ++l) raw.word[l] = bits_of(x[l]);
    } else if constexpr (kWidth == 1) {
      raw.word[0] = to_half<kFormat>(x[0]);
    } else {
      for (int l = 0; l < kWidth; l += 2)
        raw.word[l / 2] = uint32_t{to_half<kFormat>(x[l + 1])} << 16 | to_half<kFormat>(x[l]);
    }
    store_words(static_cast<Raw*>(data) + at, raw);
  }
};

GA_DEVICE double element(const Array& a, int64_t i, double otherwise) {
  if (!a.data) return otherwise;
  return load_plain<double>(advanced(a.data, a.format, i), a.format, false, 0, 1).x[0];
}

// ---- Who does what ------------------------------------------------------------------------------

// A tensor as accesses: rows of channels with `per` accesses each. By lane: each lane of an access
// is of another channel. A group is a run of each row.
struct Walk {
  int64_t channels;
  int64_t rows, row;  // their number, and the accesses of each
  int64_t per;
  int group;    // channels of a group; the last may have fewer
  bool single;  // a group is one channel, and slices may end within a row
  int64_t groups, slices;
  int64_t cut;  // rows of a slice, or if single the accesses of its channel
};

// The share of a block. kLanes: channels of an access.
template <int kLanes>
struct Share {
  int64_t group, slice;
  int64_t channel;  // the first one
  int channels;
  int64_t run;         // accesses of a row
  int active;          // threads that read: full rows of the run, so a thread keeps to one column
  int64_t begin, end;  // accesses, counted over the runs of all rows
  int64_t base;        // where the run of row 0 begins

  GA_DEVICE Share(const Walk& w, int64_t block) : slice(quotient(block, w.groups)) {
    group = block - slice * w.groups;
    channel = group * w.group;
    channels = static_cast<int>(smaller(w.group, w.channels - channel));
    run = channels / kLanes * w.per;
    active = w.single ? kThreads : kThreads / static_cast<int>(run) * static_cast<int>(run);
    const int64_t unit = w.single ? 1 : run;
    begin = slice * w.cut * unit;
    end = smaller(begin + w.cut * unit, w.rows * run);
    base = channel / kLanes * w.per;
  }

  // The first channel that a thread reads, counted from the group's first.
  GA_DEVICE int local(const Walk& w, int thread) const {
    if (w.single) return 0;
    const int column = thread % static_cast<int>(run);
    return (kLanes > 1 ? column : column / static_cast<int>(w.per)) * kLanes;
  }

  // use(access, load(access)) for a thread's accesses; kAhead are loaded before the first is used.
  template <int kAhead, class Load, class Use>
  GA_DEVICE void each(const Walk& w, int thread, Load load, Use use) const {
    int64_t left = end - begin - thread;
    if (thread >= active || left <= 0) return;
    const int64_t first = begin + thread, first_row = quotient(first, run);
    int64_t column = first - first_row * run;
    int64_t next = base + first_row * w.row + column;
    const int64_t rows = quotient(active, run), columns = active - rows * run;
    const int64_t step = rows * w.row + columns, gap = w.row - run;
    GA_ROLLED
    for (; left > 0; left -= kAhead * active) {
      decltype(load(next)) loaded[kAhead];
      int64_t access[kAhead];
      for (int k = 0; k < kAhead; ++k) {
        access[k] = next;
        if (left > k * active) loaded[k] = load(next);
        next += step;
        column += columns;
        if (column >= run) {
          column -= run;
          next += gap;
        }
      }
      for (int k = 0; k < kAhead; ++k) {
        if (left > k * active) use(access[k], loaded[k]);
      }
    }
  }
};

// The accesses that a Work is given: of x, and of dy if it has two inputs.
template <class A, int kInputs>
struct Inputs {
  typename A::Raw raw[kInputs];

  GA_DEVICE typename A::Real x(int lane) const { return A::get(raw[0], lane); }
  GA_DEVICE typename A::Real dy(int lane) const {
    if constexpr (kInputs > 1) return A::get(raw[1], lane);
    return 0;
  }
};

template <class A, int kInputs>
GA_DEVICE Inputs<A, kInputs> load_inputs(const BnTask& task, bool reads_x, int64_t at) {
  Inputs<A, kInputs> in = {};
  if (reads_x) in.raw[0] = A::load(task.x, at);
  if constexpr (kInputs > 1) in.raw[1] = A::load(task.dy, at);
  return in;
}

template <class A, int kInputs>
constexpr int ahead = (A::kBytes >= 8 ? 4 : 8) / kInputs;

// f(i) for i < n <= kThreads, each in a thread of its own.
template <class F>
GA_DEVICE void each_of_few(Block& block, int n, F f) {
  block.each([&](int i) {
    if (i < n) f(i);
  });
}

// ---- Sums ---------------------------------------------------------------------------------------

// Two sums for each thread and lane.
template <int kLanes>
struct Totals {
  double of[2][kLanes][kThreads];

  // Adds n numbers that lie `stride` threads apart into the first, by halves: takes(thread, count)
  // tells whether a thread is among the `count` that add another one.
  template <class Takes>
  GA_DEVICE void fold(Block& block, int n, int stride, Takes takes) {
    while (n > 1) {
      const int half = (n + 1) / 2;
      block.each([&](int thread) {
        if (!takes(thread, n - half)) return;
        for (auto& lanes : of) {
          for (auto& lane : lanes) lane[thread] += lane[thread + half * stride];
        }
      });
      n = half;
    }
  }
};

// Work: which two sums are taken, given a coefficient of the channel, and what is made of them.
template <class A, bool kByLane, class Work>
struct Reduce {
  static constexpr int kBlocks = 2;
  static constexpr int kLanes = kByLane ? A::kWidth : 1;
  using Coefficient = typename Work::Coefficient;

  BnTask task;
  Walk walk;
  BnWorkspace workspace;

  GA_DEVICE void operator()(Block& block) const {
    GA_SHARED Coefficient coefficients[kMostGroup];
    GA_SHARED Totals<kLanes> totals;
    const Share<kLanes> share(walk, block.index());
    each_of_few(block, share.channels,
                [&](int j) { coefficients[j] = Work::coefficient(task, share.channel + j); });
    block.each([&](int thread) { add(share, coefficients, thread, totals); });
    // Over the rows of a column, then over the columns of a channel.
    const int run = walk.single ? 1 : static_cast<int>(share.run);
    const int per = walk.single ? 1 : static_cast<int>(walk.per);
    totals.fold(block, share.active / run, run,
                [=](int thread, int count) { return thread < count * run; });
    totals.fold(block, per, 1,
                [=](int thread, int count) { return thread < run && thread % per < count; });
    each_of_few(block, share.channels, [&](int j) {
      const int lane = j % kLanes, thread = j / kLanes * per;
      workspace.partials[share.slice * walk.channels + share.channel + j] = {
          totals.of[0][lane][thread], totals.of[1][lane][thread]};
    });
    if (block.last(workspace.counters + share.group, walk.slices))
      finish(block, share, coefficients, totals);
  }

  GA_DEVICE void add(const Share<kLanes>& share, const Coefficient* coefficients, int thread,
                     Totals<kLanes>& totals) const {
    Coefficient c[kLanes];
    const int local = share.local(walk, thread);
    for (int l = 0; l < kLanes; ++l) c[l] = coefficients[local + l];
    double first[kLanes] = {}, second[kLanes] = {};
    share.template each<ahead<A, Work::kInputs>>(
        walk, thread, [&](int64_t at) { return load_inputs<A, Work::kInputs>(task, true, at); },
        [&](int64_t, const Inputs<A, Work::kInputs>& in) {
          for (int l = 0; l < A::kWidth; ++l) {
            const int k = kByLane ? l : 0;
            Work::add(c[k], in.x(l), in.dy(l), first[k], second[k]);
          }
        });
    for (int l = 0; l < kLanes; ++l) {
      totals.of[0][l][thread] = first[l];
      totals.of[1][l][thread] = second[l];
    }
  }

  // Adds the slices of a channel by `parts` threads, each of which adds every parts-th slice.
  GA_DEVICE void finish(Block& block, const Share<kLanes>& share, const Coefficient* coefficients,
                        Totals<kLanes>& totals) const {
    constexpr int kAhead = 4;
    const int channels = share.channels;
    const int parts =
        static_cast<int>(smaller(kThreads / channels, smaller(kMostParts, walk.slices)));
    double(&first)[kThreads] = totals.of[0][0];
    double(&second)[kThreads] = totals.of[1][0];
    each_of_few(block, channels * parts, [&](int i) {
      const int part = i / channels, j = i - part * channels;
      const BnPartial* const of = workspace.partials + share.channel + j;
      double a = 0, b = 0;
      GA_ROLLED
      for (int64_t s = part; s < walk.slices; s += kAhead * parts) {
        BnPartial p[kAhead] = {};
        for (int k = 0; k < kAhead; ++k) {
          if (s + k * parts < walk.slices) p[k] = of[(s + k * parts) * walk.channels];
        }
        for (int k = 0; k < kAhead; ++k) {
          a += p[k].first;
          b += p[k].second;
        }
      }
      first[i] = a;
      second[i] = b;
    });
    each_of_few(block, channels, [&](int j) {
      double a = 0, b = 0;
      for (int part = 0; part < parts; ++part) {
        a += first[part * channels + j];
        b += second[part * channels + j];
      }
      Work::finish(task, share.channel + j, coefficients[j], a, b);
    });
  }
};

GA_DEVICE double mean_of(const BnTask& task, int64_t channel) {
  const BnChannel& c = task.state[channel];
  return task.frozen ? c.running_mean : c.mean;
}

GA_DEVICE double rstd_of(const BnTask& task, int64_t channel) {
  const BnChannel& c = task.state[channel];
  return task.frozen ? 1 / sqrt(c.running_variance + task.eps) : c.rstd;
}

// Whether the sums are over all micro-batches of the window.
GA_DEVICE bool windowed(const BnTask& task) { return task.mode == GA_BN_WINDOW && !task.frozen; }

template <class A>
struct Statistics {
  static constexpr int kInputs = 1;
  using Coefficient = double;  // the channel's first element

  GA_DEVICE static double coefficient(const BnTask& task, int64_t channel) {
    using First = Access<A::kFormat, 1>;
    if (task.elements() == 0) return 0;
    const int64_t at = task.channels_last ? channel : channel * task.positions;
    return static_cast<double>(First::get(First::load(task.x, at), 0));
  }

  GA_DEVICE static void add(double shift, typename A::Real x, typename A::Real, double& sum,
                            double& squares) {
    const double d = static_cast<double>(x) - shift;
    sum += d;
    squares = fma(d, d, squares);  // one operation on doubles less
  }

  GA_DEVICE static void finish(const BnTask& task, int64_t channel, double shift, double sum,
                               double squares) {
    task.take(channel, moments_of(task.elements(), shift, sum, squares));
  }
};

template <class A>
struct GradientSums {
  static constexpr int kInputs = 2;
  using Real = typename A::Real;
  using Coefficient = Centre<Real>;

  GA_DEVICE static Coefficient coefficient(const BnTask& task, int64_t channel) {
    return Coefficient(mean_of(task, channel));
  }

  GA_DEVICE static void add(const Coefficient& c, Real x, Real dy, double& sum, double& products) {
    const double g = static_cast<double>(dy);
    sum += g;
    products = fma(g, static_cast<double>(Coefficient::deviation(x, c.high, c.low)), products);
  }

  GA_DEVICE static void finish(const BnTask& task, int64_t channel, const Coefficient&,
                               double dbeta, double products) {
    const double dgamma = products * rstd_of(task, channel);
    static_cast<Real*>(task.dgamma)[channel] = static_cast<Real>(dgamma);
    static_cast<Real*>(task.dbeta)[channel] = static_cast<Real>(dbeta);
    BnChannel& c = task.state[channel];
    if (windowed(task)) {
      const double share = task.share();
      c.dbeta += share * dbeta;
      c.dgamma += share * dgamma;
    } else if (!task.frozen) {
      c.dbeta = dbeta;
      c.dgamma = dgamma;
    }
  }
};

// ---- Elements -----------------------------------------------------------------------------------

// Work: what an element becomes, given a coefficient of its channel.
template <class A, bool kByLane, class Work>
struct Map {
  // With many coefficients or many reads ahead a thread needs more registers.
  static constexpr int kBlocks = kByLane && A::kWidth == 8 ? 2 : kByLane || A::kBytes < 8 ? 3 : 4;
  static constexpr int kLanes = kByLane ? A::kWidth : 1;
  using Coefficient = typename Work::Coefficient;

  BnTask task;
  Walk walk;

  GA_DEVICE void operator()(Block& block) const {
    GA_SHARED Coefficient coefficients[kMostGroup];
    const Share<kLanes> share(walk, block.index());
    each_of_few(block, share.channels,
                [&](int j) { coefficients[j] = Work::coefficient(task, share.channel + j); });
    block.each([&](int thread) {
      Coefficient c[kLanes];
      const int local = share.local(walk, thread);
      for (int l = 0; l < kLanes; ++l) c[l] = coefficients[local + l];
      const bool reads_x = Work::reads_x(task);
      share.template each<ahead<A, Work::kInputs>>(
          walk, thread,
          [&](int64_t at) { return load_inputs<A, Work::kInputs>(task, reads_x, at); },
          [&](int64_t at, const Inputs<A, Work::kInputs>& in) {
            typename A::Real out[A::kWidth];
            for (int l = 0; l < A::kWidth; ++l)
              out[l] = Work::apply(c[kByLane ? l : 0], in.x(l), in.dy(l));
            A::store(task.out, at, out);
          });
    });
  }
};

template <class A>
struct Normalise {
  static constexpr int kInputs = 1;
  using Real = typename A::Real;
  using Coefficient = BnForward<Real>;

  GA_DEVICE static bool reads_x(const BnTask&) { return true; }
  GA_DEVICE static Coefficient coefficient(const BnTask& task, int64_t channel) {
    return Coefficient(mean_of(task, channel), rstd_of(task, channel),
                       element(task.gamma, channel, 1), element(task.beta, channel, 0));
  }
  GA_DEVICE static Real apply(const Coefficient& c, Real x, Real) {
    return Coefficient::apply(x, c.centre.high, c.centre.low, c.scale, c.shift);
  }
};

template <class A>
struct InputGradient {
  static constexpr int kInputs = 2;
  using Real = typename A::Real;
  using Coefficient = BnBackward<Real>;

  // Running statistics do not depend on x, so neither x nor the sums matter when they are used.
  GA_DEVICE static bool reads_x(const BnTask& task) { return !task.frozen; }
  GA_DEVICE static Coefficient coefficient(const BnTask& task, int64_t channel) {
    const double mean = mean_of(task, channel), rstd = rstd_of(task, channel);
    const double gamma = element(task.gamma, channel, 1);
    if (task.frozen) return Coefficient(mean, rstd, gamma, 0, 0, 1);
    const BnChannel& c = task.state[channel];
    const double share = windowed(task) ? task.share() : 1;
    return Coefficient(mean, rstd, gamma, c.dbeta, c.dgamma, share * c.count);
  }
  GA_DEVICE static Real apply(const Coefficient& c, Real x, Real dy) {
    return Coefficient::apply(x, dy, c.centre.high, c.centre.low, c.scale, c.shift, c.slope);
  }
};

// ---- Channels -----------------------------------------------------------------------------------

struct Take {
  BnTask task;
  BnGiven given;

  GA_DEVICE void operator()(Block& block) const {
    block.each([&](int thread) {
      const int64_t c = block.index() * kThreads + thread;
      if (c >= task.channels) return;
      Moments m = {0, 0, 0};
      if (given.known) {
        m = task.input->history[task.index * task.channels + c];
      } else if (given.count > 0) {
        const double n = static_cast<double>(given.count), spread = element(given.spread, c, 0);
        m = {n, element(given.mean, c, 0), given.squares ? spread : spread * n};
        if (m.m2 < 0) m.m2 = NAN;
      }
      task.take(c, m);
    });
  }
};

struct Finalize {
  BnTask task;

  GA_DEVICE void operator()(Block& block) const {
    block.each([&](int thread) {
      const int64_t c = block.index() * kThreads + thread;
      if (c < task.channels) finalize(task.state[c], task.eps);
    });
  }
};

struct WriteRecord {
  BnTask task;
  BnPassEnd end;
  double* record;

  GA_DEVICE void operator()(Block& block) const {
    block.each([&](int thread) {
      const int64_t c = block.index() * kThreads + thread;
      if (c == 0) record[0] = end.number();
      if (c < task.channels) end.write(task.state[c], c, record);
    });
  }
};

struct MergeRecords {
  BnTask task;
  BnPassEnd end;
  BnRecords records;
  Control* control;

  GA_DEVICE void operator()(Block& block) const {
    block.each([&](int thread) {
      const int64_t c = block.index() * kThreads + thread;
      if (c == 0 && records.differ()) control->failed = true;
      if (c < task.channels) records.merge_into(task.state[c], c, end, task.eps);
    });
  }
};

int64_t channel_blocks(const BnTask& task) { return (task.channels + kThreads - 1) / kThreads; }

// ---- Launches -----------------------------------------------------------------------------------

int64_t divided(int64_t a, int64_t b) { return (a + b - 1) / b; }

struct Plan {
  Walk walk;
  int width;  // of an access
  bool by_lane;
};

// arrays: all that a task reads or writes. slices_for(groups): the most slices of a group.
template <class Slices>
Plan plan_of(const BnTask& task, std::initializer_list<const void*> arrays, Slices slices_for) {
  int64_t rows = task.samples, inner = task.positions;
  if (task.elements() == 0) {  // empty sums are taken all the same
    rows = 0;
    inner = 1;
  } else if (task.channels == 1) {
    rows = 1;
    inner = task.elements();
  } else if (task.channels_last || task.positions == 1) {
    rows = task.elements();
    inner = 1;
  }
  const int size = static_cast<int>(size_of(task.dtype));
  uintptr_t address = 0;  // the bits of all addresses
  for (const void* array : arrays) address |= reinterpret_cast<uintptr_t>(array);
  Plan plan = {};
  const auto fits = [&](int width) {
    return address % static_cast<uintptr_t>(width * size) == 0 &&
           (inner == 1 ? task.channels : inner) % width == 0;
  };
  plan.width = fits(16 / size) ? 16 / size : size == 2 && fits(4) ? 4 : 1;
  plan.by_lane = plan.width > 1 && inner == 1;

  Walk& w = plan.walk;
  w.channels = task.channels;
  w.rows = rows;
  w.row = rows > 0 ? task.count() / rows / plan.width : 0;
  w.per = plan.by_lane ? 1 : inner / plan.width;
  // Groups of about the same size, with so many channels that their part of a row is read at once.
  const int lanes = plan.by_lane ? plan.width : 1;
  const int64_t columns = task.channels / lanes;
  int64_t most = 1;
  if (w.per <= 1)
    most = plan.by_lane ? smaller(32, kMostGroup / lanes) : 64;
  else if (w.per <= 64)
    most = smaller(kThreads / w.per, kMostGroup);
  w.group = static_cast<int>(divided(columns, divided(columns, most))) * lanes;
  w.groups = divided(task.channels, w.group);
  w.single = w.group == 1;

  const int64_t units = w.single ? rows * w.per : rows;
  const int64_t unit = w.single ? 1 : w.group / lanes * w.per;
  const int64_t least = divided(kLeastReads * kThreads, unit > 0 ? unit : 1);
  const int64_t slices = smaller(slices_for(w.groups), divided(units, least));
  w.cut = slices > 1 ? divided(units, slices) : units;
  w.slices = slices > 1 ? divided(units, w.cut) : 1;
  return plan;
}

template <class F>
void with_access(int32_t dtype, int width, F f) {
  const auto with = [&](auto wide, auto narrow) {
    if (width > 1)
      f(wide);
    else
      f(narrow);
  };
  switch (dtype) {
    case GA_F32:
      return with(Access<GA_F32, 4>(), Access<GA_F32, 1>());
    case GA_F64:
      return with(Access<GA_F64, 2>(), Access<GA_F64, 1>());
    case GA_F16:
      return width == 8 ? f(Access<GA_F16, 8>()) : with(Access<GA_F16, 4>(), Access<GA_F16, 1>());
    default:
      return width == 8 ? f(Access<GA_BF16, 8>())
                        : with(Access<GA_BF16, 4>(), Access<GA_BF16, 1>());
  }
}

// f(Access<...>(), by lane as an std::bool_constant).
template <class F>
void with_plan(const BnTask& task, const Plan& plan, F f) {
  with_access(task.dtype, plan.width, [&](auto access) {
    if constexpr (decltype(access)::kWidth > 1) {
      if (plan.by_lane) return f(access, std::true_type());
    }
    f(access, std::false_type());
  });
}

template <template <class> class Work>
void launch_sums(const Queue& queue, const BnTask& task, const BnWorkspace& workspace,
                 const void* dy) {
  const Plan plan = plan_of(task, {task.x, dy}, [&](int64_t groups) {
    // Two blocks on each multiprocessor keep the memory busy and leave few partials to add. If
    // there are many groups, a few more slices balance the load of the last blocks.
    const int64_t few = divided(queue.blocks, 4 * groups);
    const int64_t even = smaller(8, divided(queue.blocks, groups));
    return smaller(few > even ? few : even, bn_slices(task.channels));
  });
  with_plan(task, plan, [&](auto access, auto by_lane) {
    using A = decltype(access);
    launch(Reduce<A, decltype(by_lane)::value, Work<A>>{task, plan.walk, workspace},
           plan.walk.groups * plan.walk.slices, queue.stream);
  });
}

template <template <class> class Work>
void launch_elements(const Queue& queue, const BnTask& task, const void* dy) {
  if (task.count() == 0) return;
  const Plan plan = plan_of(task, {task.x, dy, task.out},
                            [&](int64_t groups) { return divided(queue.blocks, groups); });
  with_plan(task, plan, [&](auto access, auto by_lane) {
    using A = decltype(access);
    launch(Map<A, decltype(by_lane)::value, Work<A>>{task, plan.walk},
           plan.walk.groups * plan.walk.slices, queue.stream);
  });
}

}  // namespace

void bn_statistics(const Queue& queue, const BnTask& task, const BnWorkspace& workspace) {
  launch_sums<Statistics>(queue, task, workspace, nullptr);
}

void bn_gradient_sums(const Queue& queue, const BnTask& task, const BnWorkspace& workspace) {
  launch_sums<GradientSums>(queue, task, workspace, task.dy);
}

void bn_normalise(const Queue& queue, const BnTask& task) {
  launch_elements<Normalise>(queue, task, nullptr);
}

void bn_input_gradient(const Queue& queue, const BnTask& task) {
  launch_elements<InputGradient>(queue, task, task.dy);
}

void bn_take(const Queue& queue, const BnTask& task, const BnGiven& given) {
  launch(Take{task, given}, channel_blocks(task), queue.stream);
}

void bn_finalize(const Queue& queue, const BnTask& task) {
  launch(Finalize{task}, channel_blocks(task), queue.stream);
}

// One block at least, for the number of the record.
void bn_write_record(const Queue& queue, const BnTask& task, const BnPassEnd& end, double* record) {
  launch(WriteRecord{task, end, record}, task.channels / kThreads + 1, queue.stream);
}

void bn_merge_records(const Queue& queue, const BnTask& task, const BnPassEnd& end,
                      const BnRecords& records, Control* control) {
  launch(MergeRecords{task, end, records, control}, task.channels / kThreads + 1, queue.stream);
}

}  // namespace ga::cuda
