// SPDX-License-Identifier: Apache-2.0
//
// Checkpoints of ranks with parameters of their own: an index and a file of each rank, loaded on other numbers of ranks
// with other parts, also in the middle of a window.
#include <numeric>

#include "files.hpp"
#include "formats.hpp"
#include "ranks.hpp"

namespace ga::test {
namespace {

constexpr int64_t kWindows = 3, kMicros = 3;

// The elements [first, first + shape) of a parameter, which so many ranks have. A shape of no elements: none.
struct Box {
  std::vector<int64_t> first, shape;
  int32_t copies = 1;
};

int64_t count_of(const std::vector<int64_t>& shape) {
  return std::accumulate(shape.begin(), shape.end(), int64_t{1}, std::multiplies<>());
}

// The part of [0, size) that a rank has, as torch.chunk cuts it.
std::pair<int64_t, int64_t> chunk(int64_t size, int32_t rank, int32_t ranks) {
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
const std::vector<Whole> kModel = {
    {"rows", {37, 12}, Cut::kAxis0},          {"columns", {5, 301}, Cut::kAxis1},
    {"middle", {3, 8, 5}, Cut::kAxis1},       {"grid", {70, 90}, Cut::kGrid},
    {"long", {70001}, Cut::kAxis0},           {"few", {2, 3}, Cut::kAxis0},
    {"owned", {9, 4}, Cut::kOwned},           {"copied", {33}, Cut::kCopied},
    {"half", {129, 7}, Cut::kAxis1, GA_BF16}, {"scalar", {}, Cut::kCopied}};

// Element by element, what of the whole a box has.
void each_element(const Whole& w, const Box& box, const std::function<void(int64_t, int64_t)>& f) {
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
Tensor part_of(const Whole& w, const Box& box, const Tensor& whole) {
  Tensor part(w.dtype, count_of(box.shape));
  each_element(w, box, [&](int64_t k, int64_t at) { part.set(k, whole.get(at)); });
  return part;
}

ga_config summing() {
  ga_config c = config();
  c.gradient_kind = GA_GRADIENT_SUM;
  return c;
}

struct Options {
  ga_optimizer optimizer = test::optimizer(GA_OPTIMIZER_ADAMW);
  ga_config config = summing();
  bool mean = true, ema = true;
};

// One rank's context.
class Rank {
 public:
  Rank(const Options& o, int32_t rank, int32_t ranks)
      : options_(o), rank_(rank), ranks_(ranks), ctx(o.config) {
    ctx.group(o.optimizer);
    const ga_clip c = clip(GA_CLIP_GLOBAL, 0.01);
    EXPECT_OK(ga_context_set_clip(ctx, &c));
    if (o.ema) {
      ga_ema ema;
      EXPECT_OK(ga_ema_init(&ema, sizeof ema));
      ema.decay = 0.75;
      EXPECT_OK(ga_context_set_ema(ctx, &ema));
    }
    parts.reserve(kModel.size());
    for (size_t i = 0; i < kModel.size(); ++i) {
      const Whole& w = kModel[i];
      if (!w.is_at(rank, ranks)) continue;
      boxes.push_back(w.box(rank, ranks));
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
    for (size_t k = 0; k < wholes.size(); ++k) {
      const Whole& w = kModel[wholes[k]];
      Tensor whole = random_tensor(w.dtype, w.size(),
                                   static_cast<uint64_t>(1000 * window + 100 * micro) + wholes[k]);
      if (options_.mean)
        for (int64_t i = 0; i < w.size(); ++i) whole.set(i, whole.get(i) / ranks_);
      gradients.push_back(part_of(w, boxes[k], whole));
    }
    for (const Tensor& g : gradients) pointers.push_back(g.data());
    ctx.accumulate(pointers, weight_of(rank_, micro));
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
std::vector<Tensor> empty_model(int32_t dtype = -1) {
  std::vector<Tensor> list;
  for (const Whole& w : kModel) list.emplace_back(dtype < 0 ? w.dtype : dtype, w.size());
  return list;
}

// Trains from a micro-batch of all windows, counted from 0, to another. Loads before, and saves afterwards, unless the
// path is "".
Outcome train(const Options& o, int32_t ranks, const std::string& load, int64_t from, int64_t to,
              const std::string& save) {
  Outcome out = {empty_model(), empty_model(GA_F64), {}};
  std::mutex mutex;
  on_ranks(ranks, [&](int32_t r, ga_comm* comm) {
    Rank rank(o, r, ranks);
    rank.join(comm);
    if (!load.empty()) {
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

void expect_same(const Outcome& got, const Outcome& want) {
  for (size_t i = 0; i < kModel.size(); ++i) {
    EXPECT_TRUE(got.parameters[i] == want.parameters[i]) << kModel[i].name;
    EXPECT_TRUE(got.averages[i] == want.averages[i]) << kModel[i].name << ", the average";
  }
  ASSERT_EQ(got.results.size(), want.results.size());
  for (size_t t = 0; t < got.results.size(); ++t) {
    EXPECT_EQ(got.results[t].norm, want.results[t].norm);
    EXPECT_EQ(got.results[t].weight, want.results[t].weight);
    EXPECT_EQ(got.results[t].steps, want.results[t].steps);
    EXPECT_EQ(got.results[t].outcome, want.results[t].outcome);
  }
}

// A run goes on with the bits that it would have had, on whatever number of ranks, whether it was saved between windows
// or within one. The means of 1, 2 and 4 ranks are the same to the bit, those of 3 are not.
TEST(RankFiles, GoOnOnAnyNumberOfRanks) {
  const Folder folder;
  for (const bool mean : {true, false}) {
    for (const int64_t at : {kMicros, 2 * kMicros - 1}) {
      for (const int32_t before : {1, 2, 3, 4}) {
        if (mean && before == 3) continue;
        Options o;
        o.mean = mean;
        const std::string path = folder / "run.ga";
        const Outcome whole = train(o, 1, "", 0, kWindows * kMicros, "");
        train(o, before, "", 0, at, path);
        for (const int32_t after : {1, 2, 3, 4}) {
          if (mean && after == 3) continue;
          SCOPED_TRACE(testing::Message() << mean << ' ' << at << ' ' << before << " to " << after);
          Outcome rest = train(o, after, path, at, kWindows * kMicros, "");
          Outcome want = whole;
          want.results.erase(want.results.begin(), want.results.begin() + at / kMicros);
          expect_same(rest, want);
        }
      }
    }
  }
}

// With means over 3 ranks, gradients that were added up before are multiplied by a number that is no power of two.
TEST(RankFiles, MeansOverThreeRanks) {
  const Folder folder;
  const std::string path = folder / "run.ga";
  const Outcome whole = train({}, 1, "", 0, kWindows * kMicros, "");
  for (const int32_t before : {1, 2, 3}) {
    train({}, before, "", 0, 2 * kMicros - 1, path);
    for (const int32_t after : {1, 3, 4}) {
      SCOPED_TRACE(testing::Message() << before << " to " << after);
      const Outcome rest = train({}, after, path, 2 * kMicros - 1, kWindows * kMicros, "");
      for (size_t t = 0; t < rest.results.size(); ++t) {
        EXPECT_EQ(rest.results[t].weight, 36);
        // One in eighty gradients is bf16, which a third rounds by 2^-9.
        EXPECT_NEAR(rest.results[t].norm, whole.results[t + 1].norm,
                    1e-5 * whole.results[t + 1].norm);
      }
      for (size_t i = 0; i < kModel.size(); ++i)
        for (int64_t k = 0; k < kModel[i].size(); ++k)
          ASSERT_NEAR(rest.parameters[i].get(k), whole.parameters[i].get(k),
                      kModel[i].dtype == GA_BF16 ? 0.01 : 1e-5)
              << kModel[i].name;
    }
  }
}

// Other kinds of state: 16-bit accumulators with what their rounding lost, numbers of a clock, more arrays.
TEST(RankFiles, EveryKindOfState) {
  const Folder folder;
  const std::string path = folder / "run.ga";
  for (const int32_t kind : {GA_OPTIMIZER_ADAMW, GA_OPTIMIZER_NADAM, GA_OPTIMIZER_ADEMAMIX,
                             GA_OPTIMIZER_SGD, GA_OPTIMIZER_SCHEDULE_FREE_ADAMW}) {
    for (const int32_t accumulation : {GA_ACCUMULATE_COMPENSATED, GA_ACCUMULATE_STOCHASTIC}) {
      SCOPED_TRACE(testing::Message() << kind << ' ' << accumulation);
      Options o;
      o.optimizer = optimizer(kind);
      o.optimizer.amsgrad = kind == GA_OPTIMIZER_ADAMW;
      o.optimizer.momentum = 0.5;
      o.config.accumulation = accumulation;
      o.ema = kind != GA_OPTIMIZER_SCHEDULE_FREE_ADAMW;
      // Random bits are those of a place in a part.
      const int64_t at = accumulation == GA_ACCUMULATE_STOCHASTIC ? kMicros : kMicros + 2;
      const int64_t to = accumulation == GA_ACCUMULATE_STOCHASTIC ? at : 2 * kMicros;
      Outcome want = train(o, 1, "", 0, to, "");
      want.results.erase(want.results.begin(), want.results.begin() + at / kMicros);
      train(o, 2, "", 0, at, path);
      for (const int32_t after : {1, 4}) {
        const Outcome rest = train(o, after, path, at, to, "");
        if (accumulation == GA_ACCUMULATE_COMPENSATED) expect_same(rest, want);
      }
    }
  }
}

// A context alone loads all of it, in the middle of a window too, and one rank each its part of what one process has
// saved.
TEST(RankFiles, OneProcessThereAndBack) {
  const Folder folder;
  const std::string path = folder / "run.ga", alone = folder / "alone.ga";
  const int64_t at = 2 * kMicros - 1;
  const Outcome whole = train({}, 2, "", 0, 2 * kMicros, "");
  train({}, 4, "", 0, at, path);
  Rank one({}, 0, 1);
  ASSERT_OK(ga_load(one.ctx, path.c_str(), nullptr));
  ASSERT_OK(ga_save(one.ctx, alone.c_str(), nullptr));
  one.accumulate(at / kMicros, at % kMicros);
  const ga_step_result result = step(one.ctx);
  EXPECT_EQ(result.weight, 36);
  EXPECT_NEAR(result.norm, whole.results[1].norm, 1e-7 * result.norm) << "added up in f32";
  EXPECT_EQ(result.micro_batches, kMicros);
  // Data-parallel ranks, of which the first one goes on with the window.
  on_ranks(2, [&](int32_t r, ga_comm* comm) {
    Rank rank({}, 0, 1);
    ASSERT_OK(ga_context_set_comm(rank.ctx, comm, nullptr));
    ASSERT_OK(ga_load(rank.ctx, path.c_str(), nullptr)) << ga_last_error();
    EXPECT_EQ(window(rank.ctx).micro_batches, r == 0 ? kMicros - 1 : 0);
    if (r == 1) rank.accumulate(at / kMicros, at % kMicros);
    const ga_step_result of_both = step(rank.ctx);
    EXPECT_EQ(of_both.weight, 36);
    EXPECT_NEAR(of_both.norm, whole.results[1].norm, 1e-6 * of_both.norm);
  });
  for (const int32_t ranks : {1, 2, 4}) {
    const Outcome rest = train({}, ranks, alone, at, 2 * kMicros, "");
    for (size_t i = 0; i < kModel.size(); ++i)
      EXPECT_TRUE(rest.parameters[i] == whole.parameters[i]) << ranks << ' ' << kModel[i].name;
  }
}

// The files that an index names are there until another index is in its place, and no longer.
TEST(RankFiles, AreReplacedAsAWhole) {
  const Folder folder;
  const std::string path = folder / "run.ga";
  const std::set<std::string> first = {"run.ga", "run.ga.1.rank0", "run.ga.1.rank1"};
  train({}, 2, "", 0, kMicros, path);
  EXPECT_EQ(folder.names(), first);
  const std::string index = contents(path);
  train({}, 3, "", 0, 2 * kMicros, path);
  const std::set<std::string> second = {"run.ga", "run.ga.2.rank0", "run.ga.2.rank1",
                                        "run.ga.2.rank2"};
  EXPECT_EQ(folder.names(), second);
  const Outcome want = train({}, 3, path, 2 * kMicros, 2 * kMicros, "");

  // A rank that cannot write its file stops all, and an index that cannot be written leaves what was there.
  const auto save = [&](const char* words) {
    on_ranks(2, [&](int32_t r, ga_comm* comm) {
      Rank rank({}, r, 2);
      rank.join(comm);
      rank.accumulate(0, 0);
      const ga_status status = ga_save(rank.ctx, path.c_str(), nullptr);
      EXPECT_NE(status, GA_OK);
      EXPECT_NE(std::string(ga_last_error()).find(words), std::string::npos) << ga_last_error();
      EXPECT_EQ(window(rank.ctx).micro_batches, 1);
    });
  };
  fs::create_directory(folder / "run.ga.3.rank1");
  save("run.ga.3.rank1");
  std::set<std::string> names = second;
  names.insert("run.ga.3.rank1");
  EXPECT_EQ(folder.names(), names);
  expect_same(train({}, 3, path, 2 * kMicros, 2 * kMicros, ""), want);
  fs::remove(folder / "run.ga.3.rank1");

  // What is no index is replaced by one.
  put(path, index);
  fs::remove(path);
  put(path, "something else");
  train({}, 2, "", 0, kMicros, path);
  EXPECT_EQ(folder.names().count("run.ga.1.rank1"), 1u);
  train({}, 2, path, kMicros, kMicros, "");
}

// The parameters of a context as they were before a call that fails.
void expect_refused(const std::string& path, const char* words, ga_status status,
                    const Options& o = {}, const ga_state_options* options = nullptr) {
  on_ranks(2, [&](int32_t r, ga_comm* comm) {
    Rank rank(o, r, 2);
    rank.join(comm);
    const std::vector<Tensor> before = rank.parts;
    const ga_status got = ga_load(rank.ctx, path.c_str(), options);
    EXPECT_TRUE(got == status || got == GA_ERROR_COMMUNICATION) << got;
    EXPECT_NE(std::string(ga_last_error()).find(words), std::string::npos) << ga_last_error();
    EXPECT_TRUE(rank.parts == before);
    rank.accumulate(0, 0);
    EXPECT_EQ(step(rank.ctx).outcome, GA_STEP_APPLIED);
  });
}

TEST(RankFiles, WhatIsDamaged) {
  const Folder folder;
  const std::string path = folder / "run.ga";
  train({}, 3, "", 0, kMicros + 1, path);
  const std::string index = contents(path), one = contents(path + ".1.rank1"),
                    two = contents(path + ".1.rank2");

  put(path + ".1.rank1", two);
  expect_refused(path, "\"run.ga.1.rank1\" is not the file that was saved with this index",
                 GA_ERROR_FORMAT);
  std::string bad = one;
  bad[bad.size() - 9] = static_cast<char>(bad[bad.size() - 9] ^ 4);
  put(path + ".1.rank1", bad);
  expect_refused(path, "checksum", GA_ERROR_FORMAT);
  put(path + ".1.rank1", one.substr(0, one.size() - 64));
  expect_refused(path, "run.ga", GA_ERROR_FORMAT);
  fs::remove(path + ".1.rank1");
  expect_refused(path, "run.ga.1.rank1", GA_ERROR_IO);
  put(path + ".1.rank1", one);
  bad = index;
  bad[bad.find("rank2")] = 'x';
  put(path, bad);
  expect_refused(path, "damaged", GA_ERROR_FORMAT);
  put(path, index);
  train({}, 2, path, kMicros + 1, kMicros + 1, "");

  // A rank's own file has the window of its own samples alone, and none of the rest.
  expect_refused(path + ".1.rank1", "", GA_ERROR_INVALID_ARGUMENT);
  Rank alone({}, 0, 1);
  expect_failure(ga_load_from_memory(alone.ctx, index.data(), index.size(), nullptr), "by its path",
                 GA_ERROR_UNSUPPORTED);
}

TEST(RankFiles, WhatDoesNotFit) {
  const Folder folder;
  const std::string path = folder / "run.ga";
  train({}, 3, "", 0, kMicros + 1, path);
  Options o;
  o.optimizer.beta1 = 0.25;
  expect_refused(path, "beta1", GA_ERROR_INVALID_ARGUMENT, o);

  // A parameter that no rank has, and one of another shape.
  on_ranks(2, [&](int32_t r, ga_comm* comm) {
    Context ctx(summing());
    ctx.group(test::optimizer(GA_OPTIMIZER_ADAMW));
    std::vector<float> p(40000, 1.0f);
    const ga_param id = ctx.param(0, "long", p.data(), ref::Shape{r == 0 ? 40000 : 30001});
    const int64_t whole = 70001, first = 40000 * r;
    ASSERT_OK(ga_param_set_part(ctx, id, &whole, &first, 1));
    ga_comm_options options = comm_options();
    options.shard = GA_SHARD_PARAMETERS;
    ASSERT_OK(ga_context_set_comm(ctx, comm, &options));
    ga_state_options s;
    ASSERT_OK(ga_state_options_init(&s, sizeof s));
    s.settings = GA_SETTINGS_KEEP;
    expect_failure(ga_load(ctx, path.c_str(), &s), "no place for \"columns",
                   GA_ERROR_INVALID_ARGUMENT);
    s.allow_extra = 1;
    ASSERT_OK(ga_load(ctx, path.c_str(), &s)) << ga_last_error();
    EXPECT_NE(p[0], 1);
  });
  on_ranks(2, [&](int32_t r, ga_comm* comm) {
    Context ctx(summing());
    ctx.group(test::optimizer(GA_OPTIMIZER_ADAMW));
    std::vector<float> p(10);
    const ga_param id = ctx.param(0, "rows", p.data(), ref::Shape{5, 2});
    const int64_t whole[] = {10, 2}, first[] = {5 * r, 0};
    ASSERT_OK(ga_param_set_part(ctx, id, whole, first, 1));
    ga_comm_options options = comm_options();
    options.shard = GA_SHARD_PARAMETERS;
    ASSERT_OK(ga_context_set_comm(ctx, comm, &options));
    expect_failure(ga_load(ctx, path.c_str(), nullptr), "[37, 12]", GA_ERROR_INVALID_ARGUMENT);
  });
}

// Ranks that have brought different numbers of micro-batches go on as they were, and on no other number of ranks.
TEST(RankFiles, WindowsOfDifferentLengths) {
  const Folder folder;
  const std::string path = folder / "run.ga";
  on_ranks(2, [&](int32_t r, ga_comm* comm) {
    Rank rank({}, r, 2);
    rank.join(comm);
    rank.accumulate(0, 0);
    if (r == 1) rank.accumulate(0, 1);
    ASSERT_OK(ga_save(rank.ctx, path.c_str(), nullptr));
  });
  on_ranks(2, [&](int32_t r, ga_comm* comm) {
    Rank rank({}, r, 2);
    rank.join(comm);
    ASSERT_OK(ga_load(rank.ctx, path.c_str(), nullptr));
    EXPECT_EQ(window(rank.ctx).micro_batches, r + 1);
  });
  Rank alone({}, 0, 1);
  expect_failure(ga_load(alone.ctx, path.c_str(), nullptr), "only with as many data ranks",
                 GA_ERROR_INVALID_ARGUMENT);
}

TEST(RankFiles, PathsAndNotes) {
  const Folder folder;
  const std::string path = folder / "run.ga";
  on_ranks(3, [&](int32_t r, ga_comm* comm) {
    Rank rank({}, r, 3);
    rank.join(comm);
    ga_state_options s;
    ASSERT_OK(ga_state_options_init(&s, sizeof s));
    s.note = "epoch 3";
    expect_failure(ga_save(rank.ctx, (folder / (r == 1 ? "b" : "a")).c_str(), nullptr),
                   "ranks 0 and 2", GA_ERROR_INVALID_ARGUMENT);
    ASSERT_OK(ga_save(rank.ctx, path.c_str(), &s));
    ASSERT_OK(ga_save(rank.ctx, (path + "." + std::to_string(r)).c_str(), &s))
        << "paths of their own";
  });
  char note[16];
  size_t size = 0;
  ASSERT_OK(ga_state_note(path.c_str(), note, sizeof note, &size));
  EXPECT_STREQ(note, "epoch 3");
}

}  // namespace
}  // namespace ga::test
