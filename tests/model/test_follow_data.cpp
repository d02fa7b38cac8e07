// SPDX-License-Identifier: Apache-2.0
//
// ga_param_options.follow_data: what the program writes to a 16-bit parameter goes into its master weights. The
// reference is a context without the option, whose master weights the test itself sets, element by element, for
// the elements that it has written: from then on both must have the same bits.
#include <cstring>
#include <functional>
#include <map>
#include <string>

#include "formats.hpp"
#include "optimizers.hpp"
#include "ranks.hpp"
#include "small_run.hpp"

namespace ga::test {

using namespace over_ranks;

namespace {

using Halves = std::vector<uint16_t>;

// What beside the optimizer takes part in an update.
struct Way {
  const char* name;
  int32_t dtype = GA_BF16;
  int32_t by_units = -1;  // ga_clip.when of GA_CLIP_AGC
  bool norm = false;      // clipped by the norm over all parameters
  bool average = false;
  int32_t ranks = 1;
  bool shard = false;
  bool eager = false, early = false;
  bool ignores = false;  // GA_NONFINITE_IGNORE: updates ahead are in place
  bool bf16_state = false;
};

const Way kWays[] = {{"plain"},
                     {"f16", GA_F16},
                     {"averaged", GA_BF16, -1, true, true},
                     {"units_of_steps", GA_BF16, GA_CLIP_WHEN_STEP},
                     {"units_of_micros", GA_BF16, GA_CLIP_WHEN_MICRO, false, true},
                     {"bf16_state", GA_BF16, -1, false, true, 1, false, false, false, false, true},
                     {"ranks", GA_BF16, -1, true, false, 2},
                     {"sharded", GA_BF16, -1, true, true, 3, true},
                     {"sharded_units", GA_BF16, GA_CLIP_WHEN_STEP, false, false, 2, true},
                     {"eager", GA_BF16, -1, false, true, 1, false, true},
                     {"eager_in_place", GA_BF16, -1, false, false, 1, false, true, false, true},
                     {"eager_units", GA_BF16, GA_CLIP_WHEN_STEP, false, false, 1, false, true},
                     {"early", GA_F16, -1, false, true, 1, false, true, true},
                     {"early_and_clipped", GA_BF16, -1, true, false, 1, false, true, true},
                     {"early_sharded", GA_BF16, -1, false, false, 2, true, true, true}};

// Matrices that are divided over ranks in different ways; the second has no gradient in every third window.
constexpr int64_t kRows[] = {260, 9, 3}, kColumns[] = {300, 7, 1};

class Net {
 public:
  Net(const Way& way, const ga_optimizer& o, bool follows, ga_comm* comm = nullptr)
      : way_(way), eager_(way.eager && follows) {
    ga_config c = config();
    c.seed = 5;
    c.eager = eager_;
    if (way.ignores) c.nonfinite = GA_NONFINITE_IGNORE;
    EXPECT_OK(ga_context_create(&c, &ctx));
    if (way.average) {
      ga_ema ema;
      EXPECT_OK(ga_ema_init(&ema, sizeof ema));
      ema.decay = 0.5;
      EXPECT_OK(ga_context_set_ema(ctx, &ema));
    }
    ga_optimizer optimizer = o;
    if (way.bf16_state) optimizer.state_dtype = GA_BF16;
    EXPECT_OK(ga_group_add(ctx, &optimizer, nullptr));
    ga_param_options options;
    EXPECT_OK(ga_param_options_init(&options, sizeof options));
    options.follow_data = follows;
    options.write_early = way.early && follows;
    for (size_t i = 0; i < 3; ++i) {
      const int64_t shape[] = {kRows[i], kColumns[i]};
      options.agc_axes =
          way.shard && i == 0 ? 2 : 0;  // units are rows, and pieces end between them
      Tensor start = random_tensor(way.dtype, shape[0] * shape[1], 40 + i);
      data.emplace_back(static_cast<size_t>(start.count()));
      memcpy(data[i].data(), start.data(), data[i].size() * 2);
      EXPECT_OK(
          ga_param_add(ctx, 0, names_[i], data[i].data(), way.dtype, 2, shape, &options, nullptr));
    }
    ga_clip clipped = clip(way.by_units >= 0 ? GA_CLIP_AGC : GA_CLIP_GLOBAL, 0.5);
    if (way.by_units >= 0) clipped.when = way.by_units, clipped.agc_factor = 0.01;
    if (way.by_units >= 0 || way.norm) {
      EXPECT_OK(ga_context_set_clip(ctx, &clipped));
    }
    if (!comm) return;
    rank_ = comm_rank(comm);
    ga_comm_options sharing = comm_options();
    sharing.shard = way.shard ? GA_SHARD_OPTIMIZER : GA_SHARD_NONE;
    sharing.check_every = 1;
    EXPECT_OK(ga_context_set_comm(ctx, comm, &sharing));
  }
  ~Net() { ga_context_destroy(ctx); }
  Net(const Net&) = delete;
  Net& operator=(const Net&) = delete;

  // Two micro-batches. bad: one gradient is not a number.
  void accumulate(int window, bool bad = false) {
    for (int m = 0; m < 2; ++m) {
      const bool last = m == 1;
      EXPECT_OK(ga_micro_begin(ctx, -1, 1 + m, MicroOptions(0, last ? GA_MICRO_LAST : 0)));
      std::vector<Tensor> gradients;  // which some clips read when the micro-batch ends
      gradients.reserve(3);
      for (size_t i = 3; i-- > 0;) {
        if (i == 1 && window % 3 == 2) continue;
        const auto seed = static_cast<uint64_t>(100 * window + 10 * m + rank_ * 1000);
        gradients.push_back(
            random_tensor(way_.dtype, static_cast<int64_t>(data[i].size()), seed + i));
        Tensor& g = gradients.back();
        if (bad && last && i == 0) g.set(1, NAN);
        EXPECT_OK(ga_accumulate_part(ctx, static_cast<ga_param>(i), g.data()));
        const auto id = static_cast<ga_param>(i);
        if (last && eager_) {
          EXPECT_OK(ga_params_ready(ctx, &id, 1));
        }
      }
      EXPECT_OK(ga_micro_end(ctx));
    }
  }
  ga_step_result window(int number) {
    accumulate(number);
    return step(ctx);
  }

  std::vector<float> master(size_t i) {
    std::vector<float> values(data[i].size());
    EXPECT_OK(ga_state_get(ctx, static_cast<ga_param>(i), "master", values.data(), GA_F32,
                           static_cast<int64_t>(values.size())));
    return values;
  }
  void set_master(size_t i, const std::vector<float>& values) {
    EXPECT_OK(ga_state_set(ctx, static_cast<ga_param>(i), "master", values.data(), GA_F32,
                           static_cast<int64_t>(values.size())));
  }
  std::map<std::string, std::string> state() {
    std::map<std::string, std::string> all;
    for (ga_param id = 0; id < 3; ++id)
      for (const ga_state_info& s : states_of(ctx, id))
        all[std::string(names_[id]) + "." + s.name] = state_bytes(ctx, id, s);
    return all;
  }

  ga_context* ctx = nullptr;
  std::vector<Halves> data;

 private:
  static int32_t comm_rank(ga_comm* comm) {
    int32_t rank = 0;
    EXPECT_OK(ga_comm_size(comm, &rank, nullptr));
    return rank;
  }
  static constexpr const char* names_[] = {"large", "small", "tiny"};
  const Way way_;
  const bool eager_;
  int32_t rank_ = 0;
};

// What a program may do to a parameter between steps: some elements move by the smallest amount that there is, some
// change their sign, some become 0; the others stay.
void scribble(Halves& x, int round) {
  for (size_t i = 0; i < x.size(); ++i) {
    const size_t k = i + static_cast<size_t>(round);
    if (k % 5 == 0) x[i] = static_cast<uint16_t>(x[i] ^ 1);
    if (k % 17 == 1) x[i] = static_cast<uint16_t>(x[i] ^ 0x8000);
    if (k % 23 == 2) x[i] = 0;
  }
}

// Writes the same elements and tells the library their master weights, as a program without follow_data would.
void scribble_and_tell(Net& net, size_t i, int32_t dtype, int round) {
  std::vector<float> master = net.master(i);
  const Halves before = net.data[i];
  scribble(net.data[i], round);
  for (size_t k = 0; k < before.size(); ++k)
    if (net.data[i][k] != before[k]) master[k] = static_cast<float>(decode(net.data[i][k], dtype));
  net.set_master(i, master);
}

struct Trace {
  std::vector<std::vector<Halves>> data;  // after each window
  std::vector<std::map<std::string, std::string>> states;
  int64_t ahead = 0;
};

// Before some windows the program writes parameters. Window 4 has a gradient that is not a number, with what was
// written before it in the parameters; none is written between it and the next, since what is written and put back
// before a step is no change.
Trace trained(const Way& way, const ga_optimizer& o, bool follows, ga_comm* comm) {
  Trace trace;
  Net net(way, o, follows, comm);
  for (int w = 0; w < 7; ++w) {
    for (size_t i = 0; i < 3; ++i) {
      if (w == 0 || w == 5 || (w + static_cast<int>(i)) % 3 == 0) continue;
      if (follows)
        scribble(net.data[i], w);
      else
        scribble_and_tell(net, i, way.dtype, w);
    }
    net.accumulate(w, w == 4 && !way.ignores);
    trace.ahead += step(net.ctx).eager;
    trace.data.push_back(net.data);
    if (w != 4) trace.states.push_back(net.state());  // which would take what was written
  }
  return trace;
}

void expect_same(const Trace& trace, const Trace& reference) {
  for (size_t w = 0; w < reference.data.size(); ++w)
    for (size_t i = 0; i < 3; ++i) {
      ASSERT_EQ(trace.data[w][i], reference.data[w][i]) << "parameter " << i << ", window " << w;
    }
  for (size_t k = 0; k < reference.states.size(); ++k)
    for (const auto& [name, bytes] : reference.states[k]) {
      ASSERT_EQ(trace.states[k].at(name), bytes) << name << ", state " << k;
    }
}

class FollowData : public testing::TestWithParam<std::tuple<size_t, int32_t>> {};
INSTANTIATE_TEST_SUITE_P(
    All, FollowData,
    testing::Combine(testing::Range<size_t>(0, std::size(kWays)),
                     testing::Range<int32_t>(0, GA_OPTIMIZER_ROWWISE_ADAGRAD + 1)),
    [](const auto& info) {
      return identifier(std::string(kWays[std::get<0>(info.param)].name) + "_" +
                        optimizer_rows()[static_cast<size_t>(std::get<1>(info.param))].name);
    });

TEST_P(FollowData, IsWhatTheMasterWeightsAreSetTo) {
  const Way& way = kWays[std::get<0>(GetParam())];
  const int32_t kind = std::get<1>(GetParam());
  const OptimizerRow& row = optimizer_rows()[static_cast<size_t>(kind)];
  if (kind == GA_OPTIMIZER_EXTERNAL) GTEST_SKIP() << "it has no master weights";
  if (row.matrices_only && !has_onednn() && !on_device()) GTEST_SKIP() << "without oneDNN";
  if (way.bf16_state && !row.bf16_state) GTEST_SKIP() << "its state is f32";
  if (way.eager && on_device()) GTEST_SKIP() << "updates ahead are for the CPU";
  ga_optimizer o = optimizer(kind);
  o.lr = 0.05;
  o.weight_decay = 0.1;
  const auto of_ranks = [&](bool follows) {
    std::vector<Trace> traces(static_cast<size_t>(way.ranks));
    if (way.ranks == 1) {
      traces[0] = trained(way, o, follows, nullptr);
    } else {
      on_ranks(way.ranks, [&](int32_t r, ga_comm* comm) {
        traces[static_cast<size_t>(r)] = trained(way, o, follows, comm);
      });
    }
    return traces;
  };
  const std::vector<Trace> traces = of_ranks(true), references = of_ranks(false);
  for (size_t r = 0; r < traces.size(); ++r) {
    SCOPED_TRACE(testing::Message() << "rank " << r);
    expect_same(traces[r], references[r]);
    EXPECT_EQ(traces[r].data, traces[0].data) << "parameters differ from rank to rank";
  }
  if (way.eager && way.ranks == 1 && !row.matrices_only && o.max_grad_norm == 0) {
    EXPECT_GT(traces[0].ahead, 0) << "nothing was updated ahead";
  }
}

// ---- What the option itself says ------------------------------------------------------------------------------

// Plain SGD with a gradient of 1 and a learning rate of 2^-12, in float64: far below the spacing of bf16.
TEST(FollowDataOption, InFloat64) {
  Halves p = {0x3f80, 0x3f80, 0x3f80, 0xbf80};  // 1, 1, 1, -1
  const Halves g(4, 0x3f80);
  const ga_optimizer o = [] {
    ga_optimizer sgd = plain_sgd();
    sgd.lr = 0x1p-12;
    return sgd;
  }();
  Context ctx;
  ctx.group(o);
  ga_param_options options;
  ASSERT_OK(ga_param_options_init(&options, sizeof options));
  EXPECT_EQ(options.follow_data, 0);
  options.follow_data = 1;
  const int64_t shape[] = {4};
  ASSERT_OK(ga_param_add(ctx, 0, "p", p.data(), GA_BF16, 1, shape, &options, nullptr));
  double want[] = {1, 1, 1, -1};
  for (int w = 0; w < 40; ++w) {
    if (w == 9) want[0] = decode(p[0] = 0x3f81, GA_BF16);   // 1 + 2^-7, the next number
    if (w == 17) want[1] = decode(p[1] = 0x3e00, GA_BF16);  // 0.125
    if (w == 17) want[3] = decode(p[3] = 0x8000, GA_BF16);  // -0
    ctx.accumulate({g.data()});
    step(ctx);
    std::vector<float> master(4);
    ASSERT_OK(ga_state_get(ctx, 0, "master", master.data(), GA_F32, 4));
    for (size_t k = 0; k < 4; ++k) {
      want[k] -= 0x1p-12;
      EXPECT_EQ(master[k], want[k]) << k << " after window " << w;  // exact in f32
      EXPECT_EQ(p[k], encode(want[k], GA_BF16)) << k << " after window " << w;
    }
  }
}

const Way kPlain = {"plain"};

// On a device, the threads that update such a parameter are not those that compare it.
TEST(FollowDataOption, BesideStateOfBf16) {
  Halves p(4100, 0x3f80), q = p;
  const Halves g(p.size(), 0x3f00);
  ga_optimizer o = optimizer(GA_OPTIMIZER_SGD);
  o.momentum = 0.5;
  o.state_dtype = GA_BF16;
  const auto count = static_cast<int64_t>(p.size());
  Context following, reference;
  for (Context* ctx : {&following, &reference}) {
    ctx->group(o);
    ga_param_options options;
    ASSERT_OK(ga_param_options_init(&options, sizeof options));
    options.follow_data = ctx == &following;
    ASSERT_OK(ga_param_add(*ctx, 0, "p", (ctx == &following ? p : q).data(), GA_BF16, 1, &count,
                           &options, nullptr));
    ctx->accumulate({g.data()});
    step(*ctx);
  }
  std::vector<float> master(p.size());
  ASSERT_OK(ga_state_get(reference, 0, "master", master.data(), GA_F32, count));
  for (size_t k = 0; k < p.size(); k += 3) {
    p[k] = q[k] = static_cast<uint16_t>(0x4000 + k % 64);
    master[k] = static_cast<float>(decode(p[k], GA_BF16));
  }
  ASSERT_OK(ga_state_set(reference, 0, "master", master.data(), GA_F32, count));
  for (Context* ctx : {&following, &reference}) {
    ctx->accumulate({g.data()});
    step(*ctx);
  }
  EXPECT_EQ(p, q);
}

ga_optimizer adamw() {
  ga_optimizer o = optimizer(GA_OPTIMIZER_ADAMW);
  o.lr = 0.05;
  return o;
}

TEST(FollowDataOption, OffTheMasterWeightsWin) {
  Net net(kPlain, adamw(), false), calm(kPlain, adamw(), false);
  for (Net* n : {&net, &calm}) n->window(0);
  scribble(net.data[0], 3);
  for (Net* n : {&net, &calm}) n->window(1);
  EXPECT_EQ(net.data, calm.data);
  EXPECT_EQ(net.state(), calm.state());
}

TEST(FollowDataOption, IsSeenByWhoAsksForStateAndBySaves) {
  const Way way = {"averaged", GA_BF16, -1, false, true};
  Net net(way, adamw(), true), reference(way, adamw(), false);
  for (Net* n : {&net, &reference}) n->window(0);
  scribble(net.data[0], 1);
  scribble_and_tell(reference, 0, GA_BF16, 1);
  EXPECT_EQ(net.state(), reference.state());
  scribble(net.data[1], 2);
  scribble_and_tell(reference, 1, GA_BF16, 2);
  const Bytes file = saved(net.ctx);
  EXPECT_EQ(file, saved(reference.ctx));  // the option is no part of it
  // Into contexts whose parameters hold something else.
  Net loaded(way, adamw(), true);
  for (Halves& x : loaded.data) std::fill(x.begin(), x.end(), uint16_t{0x4000});
  ASSERT_OK(load(loaded.ctx, file));
  for (int w = 1; w < 4; ++w) {
    for (Net* n : {&net, &loaded, &reference}) n->window(w);
    EXPECT_EQ(loaded.data, net.data);
    EXPECT_EQ(loaded.state(), net.state());
    EXPECT_EQ(net.data, reference.data);
  }
}

// A file of the library's state alone: the parameters become what its master weights round to, at once.
TEST(FollowDataOption, ALoadOfMasterWeightsWritesTheParameter) {
  for (const int32_t ranks : {1, 2}) {
    const Way way = {"sharded", GA_F16, -1, false, false, ranks, true};
    Net whole(way, adamw(), false);
    for (int w = 0; w < 3; ++w) whole.window(w);
    ga_state_options library;
    ASSERT_OK(ga_state_options_init(&library, sizeof library));
    library.parts = GA_STATE_LIBRARY;
    size_t size = 0;
    ASSERT_OK(ga_save_to_memory(whole.ctx, &library, nullptr, 0, &size));
    Bytes file(size);
    ASSERT_OK(ga_save_to_memory(whole.ctx, &library, file.data(), size, &size));
    const std::vector<float> master = whole.master(0);
    const auto body = [&](int32_t, ga_comm* comm) {
      Net net(way, adamw(), true, comm);
      net.window(0);
      ASSERT_OK(load(net.ctx, file, &library));
      EXPECT_EQ(net.data, whole.data);
      // The model comes after the optimizer: the same bits, and for one parameter others.
      for (size_t i = 0; i < 2; ++i) net.data[i] = whole.data[i];
      net.data[2] = {0x3c00, 0x3c00, 0x3c00};
      EXPECT_EQ(net.master(0), master);
      EXPECT_EQ(net.master(2), (std::vector<float>{1, 1, 1}));
    };
    if (ranks == 1)
      body(0, nullptr);
    else
      on_ranks(ranks, body);
  }
}

TEST(FollowDataOption, MasterWeightsThatAreSetWriteTheParameter) {
  for (const int32_t ranks : {1, 3}) {
    const Way way = {"sharded", GA_BF16, -1, false, false, ranks, ranks > 1};
    const auto body = [&](int32_t, ga_comm* comm) {
      Net net(way, adamw(), true, comm);
      net.window(0);
      std::vector<float> master(net.data[0].size());
      Random random(7);
      for (float& x : master) x = static_cast<float>(random.signed_unit());
      net.set_master(0, master);
      for (size_t k = 0; k < master.size(); ++k)
        ASSERT_EQ(net.data[0][k], encode(static_cast<double>(master[k]), GA_BF16)) << k;
      EXPECT_EQ(net.master(0), master);
    };
    if (ranks == 1)
      body(0, nullptr);
    else
      on_ranks(ranks, body);
  }
}

// data of ga_param_bind holds the parameter's values: what differs in it was written by the program.
TEST(FollowDataOption, AParameterThatMovesMayHaveChanged) {
  Net net(kPlain, adamw(), true), reference(kPlain, adamw(), false);
  for (Net* n : {&net, &reference}) n->window(0);
  Halves moved = net.data[0];
  std::fill(net.data[0].begin(), net.data[0].end(), uint16_t{0});
  scribble(moved, 2);
  ASSERT_OK(ga_param_bind(net.ctx, 0, moved.data()));
  scribble_and_tell(reference, 0, GA_BF16, 2);
  for (Net* n : {&net, &reference}) n->window(1);
  EXPECT_EQ(moved, reference.data[0]);
  EXPECT_EQ(net.state(), reference.state());
}

TEST(FollowDataOption, TheAverageIsSwappedInAndOut) {
  const Way way = {"averaged", GA_BF16, -1, false, true};
  Net net(way, adamw(), true), calm(way, adamw(), true);
  for (int w = 0; w < 3; ++w) {
    for (Net* n : {&net, &calm}) n->window(w);
    const std::vector<Halves> before = net.data;
    ASSERT_OK(ga_ema_swap(net.ctx, 1));
    if (w > 0) {  // the first average is the parameter
      EXPECT_NE(net.data, before);
    }
    ASSERT_OK(ga_ema_swap(net.ctx, 0));
    EXPECT_EQ(net.data, before);
  }
  EXPECT_EQ(net.state(), calm.state());
}

// Rows without a gradient keep what the program wrote, and take it when they are updated.
TEST(FollowDataOption, RowsThatAreLazy) {
  constexpr int64_t kRow = 5;
  struct Table {
    explicit Table(bool follows) {
      ctx.group(adamw());
      ga_param_options o = options();
      o.rows = GA_ROWS_LAZY;
      o.follow_data = follows;
      const Tensor start = random_tensor(GA_BF16, 8 * kRow, 3);
      data.resize(8 * kRow);
      memcpy(data.data(), start.data(), data.size() * 2);
      const int64_t shape[] = {8, kRow};
      EXPECT_OK(ga_param_add(ctx, 0, "table", data.data(), GA_BF16, 2, shape, &o, nullptr));
    }
    void window(int w) {
      const int32_t rows[] = {w % 8, 5, (3 * w) % 8};
      const Tensor values = random_tensor(GA_BF16, 3 * kRow, 50 + static_cast<uint64_t>(w));
      EXPECT_OK(ga_micro_begin(ctx, -1, 1, nullptr));
      EXPECT_OK(ga_accumulate_rows(ctx, 0, rows, GA_I32, 3, values.data()));
      EXPECT_OK(ga_micro_end(ctx));
      step(ctx);
    }
    std::vector<float> master() {
      std::vector<float> all(data.size());
      EXPECT_OK(ga_state_get(ctx, 0, "master", all.data(), GA_F32, 8 * kRow));
      return all;
    }
    Context ctx;
    Halves data;
  } table(true), reference(false);
  for (int w = 0; w < 9; ++w) {
    if (w % 3 == 1) {
      std::vector<float> master = reference.master();
      for (size_t k = static_cast<size_t>(w); k < table.data.size(); k += 3) {
        table.data[k] = reference.data[k] = static_cast<uint16_t>(table.data[k] + 1);
        master[k] = static_cast<float>(decode(table.data[k], GA_BF16));
      }
      ASSERT_OK(ga_state_set(reference.ctx, 0, "master", master.data(), GA_F32, 8 * kRow));
    }
    for (Table* t : {&table, &reference}) t->window(w);
    EXPECT_EQ(table.data, reference.data) << w;
  }
  EXPECT_EQ(table.master(), reference.master());
}

// A group's rate that changes after a parameter was updated ahead and written early: ga_step updates it anew, from
// what was there before.
TEST(FollowDataOption, UpdatesAheadInVainAreNoChangesOfTheProgram) {
  if (on_device()) GTEST_SKIP() << "updates ahead are for the CPU";
  const Way way = {"early", GA_BF16, -1, false, false, 1, false, true, true};
  Net net(way, adamw(), true), reference(way, adamw(), false);
  int64_t redone = 0;
  for (int w = 0; w < 5; ++w) {
    if (w == 2) {
      scribble(net.data[0], w);
      scribble_and_tell(reference, 0, GA_BF16, w);
    }
    for (Net* n : {&net, &reference}) {
      n->accumulate(w);
      if (w == 3) {  // a save in between finds what the program wrote, not what was written early
        const Bytes file = saved(n->ctx);
        Net other(kPlain, adamw(), false);
        EXPECT_OK(ga_group_set_lr(other.ctx, 0, 0.01 * w));
        ASSERT_OK(load(other.ctx, file));
        step(other.ctx);
        step(n->ctx);
        EXPECT_EQ(other.data, n->data);
        continue;
      }
      EXPECT_OK(ga_group_set_lr(n->ctx, 0, 0.01 * (w + 1)));
      const ga_step_result r = step(n->ctx);
      redone += r.eager_redone;
    }
    ASSERT_EQ(net.data, reference.data) << w;
    ASSERT_EQ(net.state(), reference.state()) << w;
  }
  EXPECT_GT(redone, 0);
  // A window that is discarded leaves what the program wrote.
  scribble(net.data[0], 7);
  scribble_and_tell(reference, 0, GA_BF16, 7);
  for (Net* n : {&net, &reference}) {
    n->accumulate(9);
    EXPECT_OK(ga_discard(n->ctx));
  }
  EXPECT_EQ(net.data, reference.data);
  for (Net* n : {&net, &reference}) n->window(10);
  EXPECT_EQ(net.data, reference.data);
  EXPECT_EQ(net.state(), reference.state());
}

TEST(FollowDataOption, WhatIsRefused) {
  Context ctx;
  ctx.group(adamw());
  Halves p(4);
  const int64_t shape[] = {4};
  const auto add = [&](int32_t dtype, const ga_param_options& o) {
    return ga_param_add(ctx, 0, "p", p.data(), dtype, 1, shape, &o, nullptr);
  };
  ga_param_options o = options();
  o.follow_data = 2;
  EXPECT_TRUE(refused(add(GA_BF16, o), GA_ERROR_INVALID_ARGUMENT, {"\"p\"", "follow_data", "2"}));
  o.follow_data = 1;
  o.rounding = GA_ROUND_STOCHASTIC;
  EXPECT_TRUE(refused(add(GA_BF16, o), GA_ERROR_UNSUPPORTED, {"\"p\"", "follow_data"}));
  o.rounding = GA_ROUND_NEAREST;
  o.reserved = 1;
  EXPECT_TRUE(refused(add(GA_BF16, o), GA_ERROR_INVALID_ARGUMENT, {"reserved", "1"}));
}

// Ranks must agree on it: replicas would drift apart.
TEST(FollowDataOption, RanksThatDiffer) {
  on_ranks(2, [](int32_t r, ga_comm* comm) {
    Net net(kPlain, adamw(), r == 0);
    const ga_comm_options sharing = comm_options();
    expect_failure(ga_context_set_comm(net.ctx, comm, &sharing), "follow_data");
  });
}

}  // namespace
}  // namespace ga::test
