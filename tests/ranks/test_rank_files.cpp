// SPDX-License-Identifier: Apache-2.0
//
// Checkpoints of ranks with parameters of their own: an index and a file of each rank, loaded on other numbers of ranks
// with other parts, also in the middle of a window.
#include <mutex>

#include "files.hpp"
#include "own_parameters.hpp"

namespace ga::test {
namespace {

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
      // Random bits are those of a place in a part, so that only the same ranks go on with them.
      const bool by_chance = accumulation == GA_ACCUMULATE_STOCHASTIC;
      const int64_t at = kMicros + 2, to = 2 * kMicros;
      Outcome want = train(o, 2, "", 0, to, "");
      want.results.erase(want.results.begin());
      train(o, 2, "", 0, at, path);
      for (const int32_t after : {1, 2, 4}) {
        const Outcome rest = train(o, after, path, at, to, "");
        if (!by_chance || after == 2) expect_same(rest, want);
      }
    }
  }
}

// Codes of state in 8 bits, whose blocks lie in rows, and which a step rounds stochastically.
TEST(RankFiles, StateIn8Bits) {
  const Folder folder;
  const std::string path = folder / "run.ga";
  for (const int32_t kind : {GA_OPTIMIZER_ADAMW, GA_OPTIMIZER_SGD}) {
    Options o;
    o.optimizer = optimizer(kind);
    o.optimizer.momentum = 0.5;
    o.optimizer.state_dtype = GA_STATE_8BIT;
    const int64_t at = kMicros + 2, to = kWindows * kMicros;
    Outcome want = train(o, 1, "", 0, to, "");
    want.results.erase(want.results.begin());
    for (const int32_t before : {1, 2, 4}) {
      train(o, before, "", 0, at, path);
      for (const int32_t after : {1, 2, 4}) {
        SCOPED_TRACE(testing::Message() << kind << ' ' << before << " to " << after);
        expect_same(train(o, after, path, at, to, ""), want);
      }
    }
  }
}

// One parameter with state in 8 bits, of which each rank has a box. The state of all, as numbers.
struct Boxes {
  std::vector<int64_t> whole;
  std::vector<Box> of_rank;
};
Tensor train_boxes(const Boxes& boxes, const std::string& load, const std::string& save) {
  const Whole w = {"w", boxes.whole, Cut::kAxis0};
  Tensor state(GA_F32, w.size());
  std::mutex mutex;
  on_ranks(static_cast<int32_t>(boxes.of_rank.size()), [&](int32_t r, ga_comm* comm) {
    Context ctx(summing());
    ga_optimizer o = optimizer(GA_OPTIMIZER_ADAMW);
    o.state_dtype = GA_STATE_8BIT;
    ctx.group(o);
    const Box& box = boxes.of_rank[static_cast<size_t>(r)];
    Tensor part(GA_F32, count_of(box.shape), 1);
    ga_param id = -1;
    ASSERT_OK(ga_param_add(ctx, 0, "w", part.data(), GA_F32, static_cast<int32_t>(box.shape.size()),
                           box.shape.data(), nullptr, &id));
    ASSERT_OK(ga_param_set_part(ctx, id, w.shape.data(), box.first.data(), 1));
    ga_comm_options options = comm_options();
    options.shard = GA_SHARD_PARAMETERS;
    ASSERT_OK(ga_context_set_comm(ctx, comm, &options)) << ga_last_error();
    if (load.empty()) {
      const Tensor g = part_of(w, box, random_tensor(GA_F32, w.size(), 5));
      ctx.accumulate({g.data()}, 1);
      step(ctx);
    } else {
      ASSERT_OK(ga_load(ctx, load.c_str(), nullptr)) << ga_last_error();
    }
    if (!save.empty()) {
      ASSERT_OK(ga_save(ctx, save.c_str(), nullptr)) << ga_last_error();
    }
    Tensor own(GA_F32, part.count());
    ASSERT_OK(ga_state_get(ctx, id, "exp_avg", own.data(), GA_F32, own.count()));
    const std::lock_guard<std::mutex> lock(mutex);
    each_element(w, box, [&](int64_t k, int64_t at) { state.set(at, own.get(k)); });
  });
  return state;
}

// Codes and scales of parts are put together with the bits that they had.
TEST(RankFiles, BoxesIn8Bits) {
  const Folder folder;
  const std::string path = folder / "run.ga";
  const std::vector<int64_t> shape = {12, 6, 256};
  const std::vector<Boxes> ways = {{shape, {{{0, 0, 0}, shape}}},
                                   {shape, {{{0, 0, 0}, {7, 6, 256}}, {{7, 0, 0}, {5, 6, 256}}}},
                                   {shape, {{{0, 0, 0}, {12, 5, 256}}, {{0, 5, 0}, {12, 1, 256}}}},
                                   {shape,
                                    {{{0, 0, 0}, {4, 2, 256}},
                                     {{0, 2, 0}, {4, 4, 256}},
                                     {{4, 0, 0}, {8, 2, 256}},
                                     {{4, 2, 0}, {8, 4, 256}}}}};
  for (const Boxes& before : ways) {
    const Tensor want = train_boxes(before, "", path);
    EXPECT_TRUE(std::abs(want.get(0)) > 0);
    for (const Boxes& after : ways) {
      SCOPED_TRACE(testing::Message() << before.of_rank.size() << " to " << after.of_rank.size());
      EXPECT_TRUE(train_boxes(after, path, "") == want);
    }
  }
}

// A context alone whose blocks are not those of rows refuses them by name, unless it says that it has such a part.
TEST(RankFiles, OtherBlocksOf8Bits) {
  const Folder folder;
  const std::string path = folder / "run.ga";
  const Boxes halves = {{80, 96}, {{{0, 0}, {40, 96}}, {{40, 0}, {40, 96}}}};
  const Tensor want = train_boxes(halves, "", path);
  EXPECT_NE(contents(path + ".1.rank0").find("code_block=32"), std::string::npos);
  for (const bool as_part : {false, true}) {
    Context ctx(summing());
    ga_optimizer o = optimizer(GA_OPTIMIZER_ADAMW);
    o.state_dtype = GA_STATE_8BIT;
    ctx.group(o);
    std::vector<float> p(80 * 96);
    const ga_param id = ctx.param(0, "w", p.data(), ref::Shape{80, 96});
    const int64_t whole[] = {80, 96}, first[] = {0, 0};
    if (!as_part) {
      expect_failure(ga_load(ctx, path.c_str(), nullptr),
                     "\"w.exp_avg_scale\" is [240] in the file, but [30] here, for other blocks",
                     GA_ERROR_INVALID_ARGUMENT);
      continue;
    }
    ASSERT_OK(ga_param_set_part(ctx, id, whole, first, 1));
    ASSERT_OK(ga_load(ctx, path.c_str(), nullptr)) << ga_last_error();
    Tensor own(GA_F32, 80 * 96);
    ASSERT_OK(ga_state_get(ctx, id, "exp_avg", own.data(), GA_F32, own.count()));
    EXPECT_TRUE(own == want);
  }
}

// Blocks of a context alone that would lie in two parts: 33 of 256 elements, where each part has 33 of 128.
TEST(RankFiles, BlocksIn8BitsThatPartsCut) {
  const Folder folder;
  const std::string path = folder / "alone.ga";
  ga_optimizer o = optimizer(GA_OPTIMIZER_ADAMW);
  o.state_dtype = GA_STATE_8BIT;
  Context alone(summing());
  alone.group(o);
  std::vector<float> p(66 * 128), g(66 * 128, 1.0f);
  alone.param(0, "w", p.data(), ref::Shape{66, 128});
  alone.accumulate({g.data()}, 1);
  step(alone);
  ASSERT_OK(ga_save(alone, path.c_str(), nullptr));
  EXPECT_EQ(contents(path).find("code_block"), std::string::npos)
      << "of which older versions know nothing";
  on_ranks(2, [&](int32_t r, ga_comm* comm) {
    Context ctx(summing());
    ctx.group(o);
    std::vector<float> part(33 * 128);
    const ga_param id = ctx.param(0, "w", part.data(), ref::Shape{33, 128});
    const int64_t whole[] = {66, 128}, first[] = {33 * r, 0};
    ASSERT_OK(ga_param_set_part(ctx, id, whole, first, 1));
    ga_comm_options options = comm_options();
    options.shard = GA_SHARD_PARAMETERS;
    ASSERT_OK(ga_context_set_comm(ctx, comm, &options));
    ga_state_options keep;
    ASSERT_OK(ga_state_options_init(&keep, sizeof keep));
    keep.settings = GA_SETTINGS_KEEP;
    for (const ga_state_options* with : {static_cast<const ga_state_options*>(nullptr),
                                         static_cast<const ga_state_options*>(&keep)})
      expect_failure(ga_load(ctx, path.c_str(), with), "lie in more than one part",
                     GA_ERROR_INVALID_ARGUMENT);
  });
}

// Random bits go on where a context alone has begun, and the other way round.
TEST(RankFiles, RandomBitsOfOneProcess) {
  const Folder folder;
  const std::string path = folder / "run.ga";
  ga_optimizer o = optimizer(GA_OPTIMIZER_ADAMW);
  o.state_dtype = GA_BF16;
  constexpr int64_t kRows = 40, kColumns = 12, kSize = kRows * kColumns;
  // Steps [from, to), on one rank or several, or alone (0).
  const auto run = [&](int32_t ranks, const std::string& load, int from, int to,
                       const std::string& save) {
    std::vector<float> all(kSize, 1.0f);
    const auto work = [&](int32_t r, ga_comm* comm) {
      Context ctx(summing());
      ctx.group(o);
      const int64_t rows = kRows / std::max(ranks, 1), size = rows * kColumns, at = r * size;
      std::vector<float> before(3, 1.0f);  // so that numbers of parameters differ from rank to rank
      if (ranks == 0 || r == 1) ctx.param(0, "a", before.data(), ref::Shape{3});
      const ga_param id =
          ctx.param(0, "w", &all[static_cast<size_t>(at)], ref::Shape{rows, kColumns});
      if (comm) {
        const int64_t whole[] = {kRows, kColumns}, first[] = {r * rows, 0};
        ASSERT_OK(ga_param_set_part(ctx, id, whole, first, 1));
        ga_comm_options options = comm_options();
        options.shard = GA_SHARD_PARAMETERS;
        options.reduced = GA_REDUCED_SUM;
        ASSERT_OK(ga_context_set_comm(ctx, comm, &options));
      }
      ga_state_options s;
      ASSERT_OK(ga_state_options_init(&s, sizeof s));
      s.allow_missing = 1;
      s.allow_extra = 1;
      if (!load.empty()) {
        ASSERT_OK(ga_load(ctx, load.c_str(), &s)) << ga_last_error();
      }
      for (int t = from; t < to; ++t) {
        const Tensor g = random_tensor(GA_F32, kSize, static_cast<uint64_t>(t));
        std::vector<float> own(static_cast<size_t>(size)), none(3);
        for (int64_t i = 0; i < size; ++i)
          own[static_cast<size_t>(i)] = static_cast<float>(g.get(at + i));
        std::vector<const void*> list = {own.data()};
        if (id == 1) list.insert(list.begin(), none.data());
        ctx.accumulate(list, 1.0 / std::max(ranks, 1));
        step(ctx);
      }
      if (!save.empty()) {
        ASSERT_OK(ga_save(ctx, save.c_str(), nullptr)) << ga_last_error();
      }
    };
    if (ranks == 0)
      work(0, nullptr);
    else
      on_ranks(ranks, work);
    return all;
  };
  for (const int32_t before : {0, 2}) {
    const std::vector<float> whole = run(before, "", 0, 4, "");
    run(before, "", 0, 2, path);
    for (const int32_t after : {0, 2}) {
      SCOPED_TRACE(testing::Message() << before << " to " << after);
      EXPECT_EQ(run(after, path, 2, 4, ""), whole);
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

// Ranks that have brought different numbers of micro-batches go on as they were, and with no other parts or ranks.
TEST(RankFiles, WindowsOfDifferentLengths) {
  const Folder folder;
  const std::string path = folder / "run.ga";
  on_ranks(2, [&](int32_t r, ga_comm* comm) {
    Rank rank({}, r, 2);
    rank.join(comm);
    for (int32_t micro = 0; micro < r; ++micro) rank.accumulate(0, micro);
    ASSERT_OK(ga_save(rank.ctx, path.c_str(), nullptr));
  });
  on_ranks(2, [&](int32_t r, ga_comm* comm) {
    Rank rank({}, r, 2);
    rank.join(comm);
    ASSERT_OK(ga_load(rank.ctx, path.c_str(), nullptr));
    EXPECT_EQ(window(rank.ctx).micro_batches, r);
  });
  on_ranks(2, [&](int32_t r, ga_comm* comm) {
    Options o;
    o.shift = 1;
    Rank rank(o, r, 2);
    rank.join(comm);
    expect_failure(ga_load(rank.ctx, path.c_str(), nullptr), "only the ranks that saved it",
                   GA_ERROR_INVALID_ARGUMENT);
  });
  Rank alone({}, 0, 1);
  expect_failure(ga_load(alone.ctx, path.c_str(), nullptr), "only the ranks that saved it",
                 GA_ERROR_INVALID_ARGUMENT);
}

// Each rank has given keys of random bits to parameters of its own, which are known to no other; and parameters may come
// after the communicator.
TEST(RankFiles, EachRankHasOthers) {
  const Folder folder;
  const std::string path = folder / "run.ga";
  const auto add_own = [](Context& ctx, const char* name, Tensor& p) {
    ga_param_options o;
    EXPECT_OK(ga_param_options_init(&o, sizeof o));
    o.rounding = GA_ROUND_STOCHASTIC;
    o.master = GA_MASTER_NONE;
    ga_param id = -1;
    EXPECT_OK(try_add(ctx, 0, name, p.data(), p.dtype(), {p.count()}, o, &id));
  };
  std::vector<Tensor> trained(2, Tensor(GA_BF16, 50));
  for (const bool saves : {true, false})
    on_ranks(2, [&](int32_t r, ga_comm* comm) {
      Context ctx(summing());
      ctx.group(plain_sgd());
      ga_comm_options o = comm_options();
      o.shard = GA_SHARD_PARAMETERS;
      ASSERT_OK(ga_context_set_comm(ctx, comm, &o));
      Tensor p(GA_BF16, 50, saves ? 1 : 7);
      const int32_t which = saves ? r : 1 - r;  // the other rank's, when it loads
      add_own(ctx, which == 0 ? "a" : "b", p);
      if (saves) {
        const Tensor g = random_tensor(GA_BF16, 50, static_cast<uint64_t>(r));
        accumulate(ctx, {&g});
        EXPECT_EQ(step(ctx).outcome, GA_STEP_APPLIED);
        ASSERT_OK(ga_save(ctx, path.c_str(), nullptr));
        memcpy(trained[static_cast<size_t>(r)].data(), p.data(), 100);
      } else {
        ASSERT_OK(ga_load(ctx, path.c_str(), nullptr)) << ga_last_error();
        EXPECT_TRUE(p == trained[static_cast<size_t>(which)]);
      }
    });
  Context one(summing());
  one.group(plain_sgd());
  Tensor a(GA_BF16, 50), b(GA_BF16, 50);
  add_own(one, "b", b);
  add_own(one, "a", a);
  ASSERT_OK(ga_load(one, path.c_str(), nullptr)) << ga_last_error();
  EXPECT_TRUE(a == trained[0] && b == trained[1]);
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
