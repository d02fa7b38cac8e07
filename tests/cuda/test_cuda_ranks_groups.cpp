// SPDX-License-Identifier: Apache-2.0
//
// How many exchanges a window makes over NCCL, or a library of its name (host/nccl.h): what NCCL takes in a group is one
// exchange. The parameters are those of GPT-2.
#include "device_ranks.hpp"
#include "ranks/buckets.hpp"

namespace ga::test {
namespace {

constexpr int64_t kMiB = int64_t{1} << 20;
constexpr size_t kMost = size_t{64} << 20;  // bytes of the memory for a group

// The 148 tensors of GPT-2 with 12 layers.
std::vector<ref::Shape> gpt2(int64_t words, int64_t positions, int64_t width) {
  std::vector<ref::Shape> shapes = {{words, width}, {positions, width}};
  for (int layer = 0; layer < 12; ++layer)
    for (const int64_t n : {3 * width, width, 4 * width}) {
      if (n != width) shapes.insert(shapes.end(), {{width}, {width}});  // a norm
      shapes.insert(shapes.end(), {{width, n}, {n}});
      if (n == 4 * width) shapes.insert(shapes.end(), {{n, width}, {width}});
    }
  shapes.insert(shapes.end(), {{width}, {width}});
  return shapes;
}

// ---- The groups of buckets ------------------------------------------------------------------------

// Buckets of GPT-2 with 124 M parameters of f32 over 8 ranks.
class GroupsOfGpt2 : public testing::Test {
 protected:
  static constexpr int32_t kRanks = 8;

  GroupsOfGpt2() : buckets_(kRanks) {
    for (const ref::Shape& shape : gpt2(50257, 1024, 768)) counts_.push_back(ref::count_of(shape));
    for (const int64_t count : counts_) {
      Division d;
      if (count >= kMiB / 16) d.piece = (count / 16 + kRanks) / kRanks * 16;
      d.owner = static_cast<int32_t>(divisions_.size()) % kRanks;
      divisions_.push_back(d);
    }
  }
  void add(Travel large, bool gathered = true) {
    buckets_.clear();
    buckets_.add(divisions_, counts_, GA_F32, gathered, Reduction::kSum,
                 [&](ga_param) { return large; });
  }
  // The groups, of which each has the memory to itself.
  size_t groups(size_t most_bytes, size_t most_calls, const Needs& per_byte) {
    const auto needs_of = [&](const Bucket& b) -> Needs {
      const auto bytes = static_cast<size_t>(b.stride == 0 ? 0 : b.block * kRanks * 4);
      const Room& r = per_byte.room;
      return {{r.sent * bytes, r.received * bytes, r.added * bytes}, per_byte.calls};
    };
    const size_t needed = buckets_.group(most_bytes, most_calls, needs_of);
    EXPECT_LE(needed, most_bytes);
    size_t groups = 0, all = 0;
    for (size_t k = 0; k < buckets_.list().size(); ++groups) {
      size_t free = 0, calls = 0;
      for (const size_t end = buckets_.end_of_group(k); k < end; ++k) {
        const Bucket& b = buckets_.list()[k];
        const Room room = needs_of(b).room;
        EXPECT_EQ(b.at.sent % 256, 0);
        EXPECT_GE(b.at.sent, free);
        EXPECT_GE(b.at.received, b.at.sent + room.sent);
        EXPECT_GE(b.at.added, b.at.received + room.received);
        free = b.at.added + room.added;
        all += room.sent + room.received + room.added;
        calls += per_byte.calls;
      }
      EXPECT_LE(free, needed);
      EXPECT_LE(calls, most_calls);
    }
    needed_ = needed;
    all_ = all;
    return groups;
  }

  Buckets buckets_;
  std::vector<Division> divisions_;
  std::vector<int64_t> counts_;
  size_t needed_ = 0, all_ = 0;
};

TEST_F(GroupsOfGpt2, WhereTheTransportAdds) {
  ASSERT_EQ(counts_.size(), 148u);
  add(Travel::kAsAWhole);
  EXPECT_EQ(buckets_.list().size(), 93u);
  EXPECT_EQ(groups(kMost, 2048, {{1, 0, 0}, 1}), 1u);
  EXPECT_LT(needed_, kMiB) << "small parameters alone are packed";
  EXPECT_EQ(groups(kMost, 40, {{1, 0, 0}, 1}), 3u);
}

// A group has as many packed buckets as fit.
TEST_F(GroupsOfGpt2, WhereEverythingIsPacked) {
  add(Travel::kPacked);
  const size_t groups_there = groups(kMost, 2048, {{1, 0, 0}, 1});
  EXPECT_EQ(groups_there, (all_ + kMost - 1) / kMost);
  EXPECT_GT(needed_, kMost - (8 << 20));
  EXPECT_EQ(groups(kMost, 2048, {{2, 2, 4}, 16}), buckets_.list().size()) << "of 64 MiB each";
}

// A transport that takes nothing together has every bucket alone, with room for the largest.
TEST_F(GroupsOfGpt2, EachAlone) {
  add(Travel::kAsAWhole);
  EXPECT_EQ(groups(8 << 20, 1, {{1, 0, 0}, 1}), buckets_.list().size());
  for (const Bucket& b : buckets_.list()) EXPECT_FALSE(b.joins);
  // Nor does what is reduced otherwise, or gathered where the other is not, join a group.
  const size_t sums = buckets_.list().size();
  buckets_.add(divisions_, counts_, GA_F32, true, Reduction::kMaximum,
               [](ga_param id) { return id < 4 ? Travel::kInPlace : Travel::kNot; });
  const size_t maxima = buckets_.list().size();
  buckets_.add(divisions_, counts_, GA_F32, false, Reduction::kMaximum,
               [](ga_param id) { return id < 4 ? Travel::kInPlace : Travel::kNot; });
  buckets_.group(size_t{1} << 40, 2048, [](const Bucket&) -> Needs { return {{1, 1, 1}, 1}; });
  EXPECT_EQ(buckets_.end_of_group(0), sums);
  EXPECT_EQ(buckets_.end_of_group(sums), maxima);
  EXPECT_EQ(buckets_.end_of_group(maxima), buckets_.list().size());
}

// ---- Windows --------------------------------------------------------------------------------------

struct Way {
  const char* name;
  int32_t adder, shard, accumulation;
  int64_t groups;  // of a window, beside two exchanges of numbers
  int64_t room;    // MiB that exchanges take
};

class CudaRanksGroups : public CudaRanks, public testing::WithParamInterface<Way> {
 protected:
  struct Trained {
    std::vector<Block> parameters;  // of each rank
    int64_t collectives = 0;        // of one window, of each rank
    int64_t settled = 0;            // times that a rank has waited for NCCL in it
    int64_t room = 0;               // bytes that exchanges have taken
  };

  // Three windows over two ranks, the last of them a graph if the buckets of each travel together.
  Trained train(const Layout& l, bool together) const {
    constexpr int32_t kRanks = 2;
    ga_fake_nccl_reset();
    ga_fake_nccl_in_progress(1);
    Trained trained;
    trained.parameters.resize(kRanks);
    std::atomic<int> come{0};
    const auto meet = [&](int round) {
      for (++come; come < kRanks * round;) std::this_thread::yield();
    };
    on_devices(kRanks, [&](int32_t r, ga_comm* comm, const Stream& stream) {
      const Parameters p(parameters(l, 3));
      const Block g = gradients(l, 5, static_cast<uint64_t>(r));
      ga_config c = config();
      c.accumulation = GetParam().accumulation;
      Context ctx(on(c, stream));
      add_all(ctx, ctx.group(plain_sgd()), l, p.data());
      ga_comm_options exchange = comm_options();
      exchange.adder = GetParam().adder;
      exchange.shard = GetParam().shard;
      exchange.overlap = !together;  // then each bucket is exchanged when it is ready
      ASSERT_OK(ga_context_set_comm(ctx, comm, &exchange));
      const auto workspace = [&] {
        ga_memory m;
        EXPECT_OK(ga_memory_init(&m, sizeof m));
        EXPECT_OK(ga_context_memory(ctx, &m));
        return m.workspace;
      };
      const auto window = [&] {
        const auto list = pointers(l, g);
        ASSERT_OK(ga_accumulate(ctx, list.data(), list.size(), r + 1, nullptr));
        ASSERT_OK(ga_step(ctx, nullptr));
      };
      const int64_t before = workspace();
      window();
      ASSERT_OK(ga_synchronize(ctx));
      if (r == 0) trained.room = workspace() - before;
      meet(1);
      const int64_t collectives = ga_fake_nccl_collectives();
      const int64_t polls = ga_fake_nccl_calls("ncclCommGetAsyncError");
      meet(2);
      window();
      meet(3);
      if (r == 0) {
        trained.collectives = (ga_fake_nccl_collectives() - collectives) / kRanks;
        trained.settled = (ga_fake_nccl_calls("ncclCommGetAsyncError") - polls) / kRanks;
      }
      meet(4);
      Graph graph;
      if (together) graph.capture(stream, window);
      together ? graph.replay(stream) : window();
      EXPECT_EQ(result_of(ctx).steps, 3);
      trained.parameters[static_cast<size_t>(r)] = p.get();
    });
    return trained;
  }
};

TEST_P(CudaRanksGroups, AWindow) {
  const Way& way = GetParam();
  const Layout l = Layout::of(gpt2(4000, 256, 192));
  ASSERT_EQ(l.size(), 148u);
  const Trained alone = train(l, false), together = train(l, true);
  EXPECT_EQ(together.collectives, way.groups + 2);
  EXPECT_GT(alone.collectives, together.collectives);
  EXPECT_EQ(together.settled, together.collectives + 1) << "and one look for late errors";
  EXPECT_NEAR(static_cast<double>(together.room) / kMiB, static_cast<double>(way.room), 1);
  for (const Block& p : together.parameters) EXPECT_TRUE(same_bits(p, alone.parameters[0]));
}

INSTANTIATE_TEST_SUITE_P(All, CudaRanksGroups,
                         testing::Values(Way{"transport", GA_COMM_ADDER_AUTO, GA_SHARD_NONE,
                                             GA_ACCUMULATE_PLAIN, 1, 7},
                                         Way{"sharded", GA_COMM_ADDER_AUTO, GA_SHARD_OPTIMIZER,
                                             GA_ACCUMULATE_PLAIN, 2, 35},
                                         Way{"library", GA_COMM_ADDER_LIBRARY, GA_SHARD_NONE,
                                             GA_ACCUMULATE_PLAIN, 2, 37},
                                         Way{"library_sharded", GA_COMM_ADDER_LIBRARY,
                                             GA_SHARD_OPTIMIZER, GA_ACCUMULATE_PLAIN, 2, 30},
                                         Way{"more_than_one", GA_COMM_ADDER_LIBRARY, GA_SHARD_NONE,
                                             GA_ACCUMULATE_RUNNING_MEAN, 4, 48}),
                         [](const auto& info) { return info.param.name; });

}  // namespace
}  // namespace ga::test
