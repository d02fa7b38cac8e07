// SPDX-License-Identifier: Apache-2.0
//
// A model of which ranks have parts in many ways, and ranks that train it with GA_SHARD_PARAMETERS.
#pragma once

#include <functional>
#include <mutex>
#include <numeric>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "formats.hpp"
#include "ranks.hpp"

namespace ga::test {

constexpr int64_t kWindows = 3, kMicros = 3;

// The elements [first, first + shape) of a parameter, which so many ranks have. A shape of no elements: none.
struct Box {
  std::vector<int64_t> first, shape;
  int32_t copies = 1;
};

inline int64_t count_of(const std::vector<int64_t>& shape) {
  return std::accumulate(shape.begin(), shape.end(), int64_t{1}, std::multiplies<>());
}

// The part of [0, size) that a rank has, as torch.chunk cuts it.
inline std::pair<int64_t, int64_t> chunk(int64_t size, int32_t rank, int32_t ranks) {
  const int64_t each = (size + ranks - 1) / ranks, first = std::min(size, rank * each);
  return {first, std::min(each, size - first)};
}

// How ranks divide a parameter.
enum class Cut { kAxis0, kAxis1, kGrid, kOwned, kCopied };
struct Whole {
  const char* name;
  std::vector<int64_t> shape;
  Cut cut;
  int32_t dtype = GA_F32;
  int64_t size() const { return count_of(shape); }
  bool is_at(int32_t rank, int32_t ranks) const { return cut != Cut::kOwned || rank == ranks - 1; }
  Box box(int32_t rank, int32_t ranks) const {
    Box box = {std::vector<int64_t>(shape.size()), shape};
    const auto cut_axis = [&](size_t axis, int32_t place, int32_t places) {
      std::tie(box.first[axis], box.shape[axis]) = chunk(shape[axis], place, places);
    };
    if (cut == Cut::kAxis0) cut_axis(0, rank, ranks);
    if (cut == Cut::kAxis1) cut_axis(1, rank, ranks);
    if (cut == Cut::kGrid && ranks % 2 == 0) cut_axis(0, rank % 2, 2);
    if (cut == Cut::kGrid)
      cut_axis(1, ranks % 2 == 0 ? rank / 2 : rank, ranks % 2 == 0 ? ranks / 2 : ranks);
    if (cut == Cut::kCopied) box.copies = ranks;
    return box;
  }
};
inline const std::vector<Whole> kModel = {
    {"rows", {37, 12}, Cut::kAxis0},          {"columns", {5, 301}, Cut::kAxis1},
    {"middle", {3, 8, 5}, Cut::kAxis1},       {"grid", {70, 90}, Cut::kGrid},
    {"long", {70001}, Cut::kAxis0},           {"few", {2, 3}, Cut::kAxis0},
    {"owned", {9, 4}, Cut::kOwned},           {"copied", {33}, Cut::kCopied},
    {"half", {129, 7}, Cut::kAxis1, GA_BF16}, {"scalar", {}, Cut::kCopied},
    {"embedding", {90, 128}, Cut::kAxis0},    {"kernel", {41, 8, 3, 8}, Cut::kAxis0, GA_BF16}};

// Element by element, what of the whole a box has.
inline void each_element(const Whole& w, const Box& box,
                         const std::function<void(int64_t, int64_t)>& f) {
  std::vector<int64_t> at(w.shape.size());
  for (int64_t k = 0; k < count_of(box.shape); ++k) {
    int64_t whole = 0;
    for (size_t a = 0; a < at.size(); ++a) whole = whole * w.shape[a] + box.first[a] + at[a];
    f(k, whole);
    for (size_t a = at.size(); a-- > 0;) {
      if (++at[a] < box.shape[a]) break;
      at[a] = 0;
    }
  }
}
inline Tensor part_of(const Whole& w, const Box& box, const Tensor& whole) {
  Tensor part(w.dtype, count_of(box.shape));
  each_element(w, box, [&](int64_t k, int64_t at) { part.set(k, whole.get(at)); });
  return part;
}

inline ga_config summing() {
  ga_config c = config();
  c.gradient_kind = GA_GRADIENT_SUM;
  return c;
}

struct Options {
  ga_optimizer optimizer = test::optimizer(GA_OPTIMIZER_ADAMW);
  ga_config config = summing();
  bool mean = true, ema = true;
  double max_norm = 0.01;
  bool by_parts =
      false;  // gradients come one by one, and ga_params_ready after each of the last micro-batch
  int64_t nan_in = -1;  // a window in which one has a NaN
  int32_t shift = 0;    // rank r has the parts of rank r + shift
};

// One rank's context.
class Rank {
 public:
  Rank(const Options& o, int32_t rank, int32_t ranks)
      : options_(o), rank_(rank), ranks_(ranks), ctx(o.config) {
    ctx.group(o.optimizer);
    if (o.max_norm > 0) {
      const ga_clip c = clip(GA_CLIP_GLOBAL, o.max_norm);
      EXPECT_OK(ga_context_set_clip(ctx, &c));
    }
    if (o.ema) {
      ga_ema ema;
      EXPECT_OK(ga_ema_init(&ema, sizeof ema));
      ema.decay = 0.75;
      EXPECT_OK(ga_context_set_ema(ctx, &ema));
    }
    parts.reserve(kModel.size());
    for (size_t i = 0; i < kModel.size(); ++i) {
      const Whole& w = kModel[i];
      const int32_t place = (rank + o.shift) % ranks;
      if (!w.is_at(place, ranks)) continue;
      boxes.push_back(w.box(place, ranks));
      wholes.push_back(i);
      parts.push_back(part_of(w, boxes.back(), random_tensor(w.dtype, w.size(), 7 + i)));
      ga_param id = -1;
      EXPECT_OK(ga_param_add(ctx, 0, w.name, parts.back().data(), w.dtype,
                             static_cast<int32_t>(w.shape.size()), boxes.back().shape.data(),
                             nullptr, &id));
      EXPECT_OK(ga_param_set_part(ctx, id, w.shape.data(), boxes.back().first.data(),
                                  boxes.back().copies));
    }
  }
  void join(ga_comm* comm) {
    ga_comm_options o = comm_options();
    o.shard = GA_SHARD_PARAMETERS;
    o.reduced = options_.mean ? GA_REDUCED_MEAN : GA_REDUCED_SUM;
    ASSERT_OK(ga_context_set_comm(ctx, comm, &o));
  }
  // A micro-batch of all ranks: of a window's whole gradient in f32, what this rank gets of it, and its share of the
  // weight, 12 in all.
  void accumulate(int64_t window, int64_t micro) {
    std::vector<Tensor> gradients;
    std::vector<const void*> pointers;
    gradients.reserve(wholes.size());
    for (size_t k = 0; k < wholes.size(); ++k) {
      const Whole& w = kModel[wholes[k]];
      Tensor whole = random_tensor(w.dtype, w.size(),
                                   static_cast<uint64_t>(1000 * window + 100 * micro) + wholes[k]);
      if (window == options_.nan_in && wholes[k] == 3) whole.set(5000, NAN);
      if (options_.mean)
        for (int64_t i = 0; i < w.size(); ++i) whole.set(i, whole.get(i) / ranks_);
      gradients.push_back(part_of(w, boxes[k], whole));
      pointers.push_back(gradients.back().data());
    }
    if (!options_.by_parts) return ctx.accumulate(pointers, weight_of(rank_, micro));
    const bool last = micro == kMicros - 1;
    ga_micro_options o;
    ASSERT_OK(ga_micro_options_init(&o, sizeof o));
    o.flags = last ? GA_MICRO_LAST : 0;
    ASSERT_OK(ga_micro_begin(ctx, -1, weight_of(rank_, micro), &o));
    for (size_t k = pointers.size(); k-- > 0;) {
      const auto id = static_cast<ga_param>(k);
      ASSERT_OK(ga_accumulate_part(ctx, id, pointers[k]));
      if (last) {
        ASSERT_OK(ga_params_ready(ctx, &id, 1));
      }
    }
    ASSERT_OK(ga_micro_end(ctx));
  }
  // Uneven, and the rank that comes last has none in the second.
  double weight_of(int32_t rank, int64_t micro) const {
    if (micro == 1 && ranks_ > 1) return rank == ranks_ - 1 ? 0 : 12.0 / (ranks_ - 1);
    return 12.0 / ranks_;
  }
  // Puts what it has into wholes.
  void collect(std::vector<Tensor>& to) const {
    for (size_t k = 0; k < wholes.size(); ++k)
      each_element(kModel[wholes[k]], boxes[k],
                   [&](int64_t from, int64_t at) { to[wholes[k]].set(at, parts[k].get(from)); });
  }

 private:
  const Options options_;
  const int32_t rank_, ranks_;

 public:
  std::vector<size_t> wholes;  // of the parts, in kModel
  std::vector<Box> boxes;
  std::vector<Tensor> parts;
  Context ctx;
};

struct Outcome {
  std::vector<Tensor> parameters, averages;
  std::vector<ga_step_result> results;
};
inline std::vector<Tensor> empty_model(int32_t dtype = -1) {
  std::vector<Tensor> list;
  for (const Whole& w : kModel) list.emplace_back(dtype < 0 ? w.dtype : dtype, w.size());
  return list;
}

// Trains from a micro-batch of all windows, counted from 0, to another. Loads before, and saves afterwards, unless the
// path is "".
inline Outcome train(const Options& o, int32_t ranks, const std::string& load, int64_t from,
                     int64_t to, const std::string& save) {
  Outcome out = {empty_model(), empty_model(GA_F64), {}};
  std::mutex mutex;
  on_ranks(ranks, [&](int32_t r, ga_comm* comm) {
    Rank rank(o, r, ranks);
    rank.join(comm);
    if (!load.empty()) {
      rank.accumulate(9, 0);  // what it has of its own by then is forgotten
      step(rank.ctx);
      ASSERT_OK(ga_load(rank.ctx, load.c_str(), nullptr)) << ga_last_error();
      EXPECT_EQ(window(rank.ctx).micro_batches, from % kMicros);
    }
    std::vector<ga_step_result> results;
    for (int64_t t = from; t < to; ++t) {
      rank.accumulate(t / kMicros, t % kMicros);
      if (t % kMicros == kMicros - 1) results.push_back(step(rank.ctx));
    }
    if (!save.empty()) {
      ASSERT_OK(ga_save(rank.ctx, save.c_str(), nullptr)) << ga_last_error();
    }
    const std::lock_guard<std::mutex> lock(mutex);
    rank.collect(out.parameters);
    for (size_t k = 0; k < rank.wholes.size() && o.ema; ++k) {
      const int64_t count = rank.parts[k].count();
      Tensor average(GA_F64, count);
      EXPECT_OK(ga_ema_copy_to(rank.ctx, static_cast<ga_param>(k), average.data(), GA_F64));
      each_element(kModel[rank.wholes[k]], rank.boxes[k], [&](int64_t i, int64_t at) {
        out.averages[rank.wholes[k]].set(at, average.get(i));
      });
    }
    if (r == 0) out.results = results;
  });
  return out;
}

inline void expect_same(const Outcome& got, const Outcome& want) {
  for (size_t i = 0; i < kModel.size(); ++i) {
    EXPECT_TRUE(got.parameters[i] == want.parameters[i]) << kModel[i].name;
    EXPECT_TRUE(got.averages[i] == want.averages[i]) << kModel[i].name << ", the average";
  }
  ASSERT_EQ(got.results.size(), want.results.size());
  for (size_t t = 0; t < got.results.size(); ++t) {
    EXPECT_EQ(0, memcmp(&got.results[t].norm, &want.results[t].norm, sizeof(double)))
        << got.results[t].norm << ' ' << want.results[t].norm;  // maybe NaN
    EXPECT_EQ(got.results[t].weight, want.results[t].weight);
    EXPECT_EQ(got.results[t].steps, want.results[t].steps);
    EXPECT_EQ(got.results[t].outcome, want.results[t].outcome);
  }
}

}  // namespace ga::test
