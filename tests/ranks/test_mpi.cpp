// SPDX-License-Identifier: Apache-2.0
//
// Ranks of an MPI program, under mpirun: the bits of threads as ranks, also of batch normalisation, and a
// rank that stalls.
#include <mpi.h>

#include <chrono>
#include <thread>

#include "batchnorm.hpp"
#include "ranks.hpp"

namespace ga::test {
namespace {

int32_t world(int (*ask)(MPI_Comm, int*)) {
  int x = 0;
  ask(MPI_COMM_WORLD, &x);
  return x;
}

ga_comm_config world_config() {
  ga_comm_config c = comm_config(GA_COMM_MPI);
  c.mpi_comm = MPI_Comm_c2f(MPI_COMM_WORLD);
  c.timeout = 60;
  return c;
}

// Trains as one of these ranks: slices of several dtypes, as they lie and packed, of which the longest parameter has two,
// and norms of pieces.
std::vector<float> train(int32_t rank, ga_comm* comm,
                         const ga_comm_options& options = comm_options()) {
  const Layout l = Layout::of({{90001}, {7}, {33, 5}, {2200001}});
  std::vector<float> block = parameters(l, 3);
  std::vector<float> small(1003, 1);
  Context ctx;
  const ga_group group = ctx.group(optimizer(GA_OPTIMIZER_ADAMW));
  add_all(ctx, group, l, block);
  ga_param_options o;
  EXPECT_OK(ga_param_options_init(&o, sizeof o));
  o.accumulator_dtype = GA_BF16;
  ctx.param(group, "small", small.data(), ref::Shape{1003}, &o);
  const ga_clip c = clip(GA_CLIP_GLOBAL, 1);
  EXPECT_OK(ga_context_set_clip(ctx, &c));
  EXPECT_OK(ga_context_set_comm(ctx, comm, &options));
  const MicroOptions any(0), last(0, GA_MICRO_LAST);
  for (uint64_t w = 0; w < 3; ++w) {
    const int32_t micros = (rank + static_cast<int32_t>(w)) % 3;
    for (int32_t k = 0; k < micros; ++k) {
      const auto round = static_cast<uint64_t>(100 * rank + k) + 10 * w;
      const Block g = gradients(l, 9, round);
      auto list = pointers(l, g);
      list.push_back(g.data() + 1);
      const bool ends = options.overlap && k + 1 == micros;
      EXPECT_OK(ga_accumulate(ctx, list.data(), list.size(), 1 + k, ends ? last : any));
    }
    for (ga_param id = 0; options.overlap && id < 5; ++id) EXPECT_OK(ga_params_ready(ctx, &id, 1));
    EXPECT_EQ(step(ctx).outcome, GA_STEP_APPLIED);
  }
  block.insert(block.end(), small.begin(), small.end());
  return block;
}

TEST(Mpi, TheBitsOfThreads) {
  const int32_t rank = world(MPI_Comm_rank), ranks = world(MPI_Comm_size);
  const Comm comm(world_config());
  int32_t its_rank = -1, its_ranks = -1;
  ASSERT_OK(ga_comm_size(comm, &its_rank, &its_ranks));
  EXPECT_EQ(its_rank, rank);
  EXPECT_EQ(its_ranks, ranks);
  const std::vector<float> own = train(rank, comm);
  std::vector<float> threads;
  on_ranks(ranks, [&](int32_t r, ga_comm* local) {
    std::vector<float> ended = train(r, local);
    if (r == rank) threads = std::move(ended);
  });
  EXPECT_TRUE(same_bits(own, threads));
  for (const bool shards : {false, true})
    for (const bool overlaps : {false, true}) {
      if (overlaps && on_device()) continue;
      SCOPED_TRACE(std::to_string(shards) + std::to_string(overlaps));
      ga_comm_options o = comm_options();
      o.shard = shards ? GA_SHARD_OPTIMIZER : GA_SHARD_NONE;
      o.overlap = overlaps;
      const Comm another(world_config());
      EXPECT_TRUE(same_bits(train(rank, another, o), threads));
    }
}

// MPI adds in an order of its own: to rounding, and alike on all ranks.
TEST(Mpi, Adds) {
  const int32_t rank = world(MPI_Comm_rank);
  const Comm comm(world_config());
  const std::vector<float> ours = train(rank, comm);
  for (const bool shards : {false, true}) {
    ga_comm_options o = comm_options();
    o.adder = GA_COMM_ADDER_TRANSPORT;
    o.shard = shards ? GA_SHARD_OPTIMIZER : GA_SHARD_NONE;
    o.check_every = 1;
    const Comm another(world_config());
    const std::vector<float> theirs = train(rank, another, o);
    double most = 0;
    for (size_t j = 0; j < ours.size(); ++j)
      most = std::max(most, std::abs(static_cast<double>(ours[j]) - theirs[j]));
    EXPECT_LT(most, 3e-3) << shards;  // of steps of 1e-3, where a gradient is near 0
    double mean = 0;
    for (size_t j = 0; j < ours.size(); ++j)
      mean += std::abs(static_cast<double>(ours[j]) - theirs[j]) / static_cast<double>(ours.size());
    EXPECT_LT(mean, 1e-6) << shards;
  }
}

// Batch normalisation over the window of all ranks, of which rank 1 has no samples if there are more than
// two, is that of one batch, with the bits of threads.
TEST(Mpi, BatchNormalisationHasTheBitsOfThreads) {
  const int32_t rank = world(MPI_Comm_rank), ranks = world(MPI_Comm_size);
  std::vector<std::vector<int64_t>> cuts = {{3, 2}, {}, {4}, {}};
  cuts[static_cast<size_t>(ranks - 1)] = {ranks == 4 ? 3 : 7};
  const auto train = [&](int32_t r, ga_comm* comm) {
    int64_t first = 0;
    for (size_t q = 0; q < static_cast<size_t>(r); ++q)
      for (const int64_t n : cuts[q]) first += n;
    return TwoLayers(cuts[static_cast<size_t>(r)], first, comm);
  };
  const Comm comm(world_config());
  const TwoLayers own = train(rank, comm), whole({12});
  for (size_t i = 0; i < whole.ended.size(); ++i)
    EXPECT_NEAR(own.ended[i], whole.ended[i], TwoLayers::tolerance(whole.ended[i])) << i;
  on_ranks(ranks, [&](int32_t r, ga_comm* local) {
    const TwoLayers threads = train(r, local);
    if (r != rank) return;
    EXPECT_TRUE(same_bits(own.ended, threads.ended));
    for (size_t t = 0; t < own.y.size(); ++t) {
      EXPECT_TRUE(same_bits(own.y[t], threads.y[t]));
      EXPECT_TRUE(same_bits(own.dx[t], threads.dx[t]));
    }
  });
}

// Saves in an open window, to which rank 1 has brought nothing, and goes on with what was loaded.
TEST(Mpi, WindowsAreSavedAndLoaded) {
  const int32_t rank = world(MPI_Comm_rank);
  for (const int32_t shard : {GA_SHARD_NONE, GA_SHARD_OPTIMIZER}) {
    ga_comm_options o = comm_options();
    o.shard = shard;
    const auto train = [&](bool stops) {
      std::string bytes;
      std::vector<float> p(300001, 1), g(300001);
      for (size_t j = 0; j < g.size(); ++j)
        g[j] = static_cast<float>(static_cast<double>(j % 11) + 0.1 * rank);
      for (const bool second : {false, true}) {
        if (second && !stops) continue;
        const Comm comm(world_config());
        Context ctx;
        ctx.param(ctx.group(optimizer(GA_OPTIMIZER_ADAM)), "p", p.data(), 300001);
        EXPECT_OK(ga_context_set_comm(ctx, comm, &o));
        if (second) {
          std::fill(p.begin(), p.end(), 0.0f);
          EXPECT_OK(ga_load_from_memory(ctx, bytes.data(), bytes.size(), nullptr));
        } else {
          ctx.accumulate({g.data()});
          EXPECT_EQ(step(ctx).outcome, GA_STEP_APPLIED);
          for (int k = 0; k < (rank == 1 ? 0 : rank + 1); ++k) ctx.accumulate({g.data()});
        }
        if (!second && stops) {
          size_t size = 0;
          EXPECT_OK(ga_save_to_memory(ctx, nullptr, nullptr, 0, &size));
          bytes.resize(size);
          EXPECT_OK(ga_save_to_memory(ctx, nullptr, bytes.data(), size, &size));
          // All load what the last rank has.
          MPI_Bcast(bytes.data(), static_cast<int>(size), MPI_BYTE, world(MPI_Comm_size) - 1,
                    MPI_COMM_WORLD);
          continue;
        }
        ctx.accumulate({g.data()}, 2);
        EXPECT_EQ(step(ctx).outcome, GA_STEP_APPLIED);
      }
      return p;
    };
    EXPECT_TRUE(same_bits(train(true), train(false))) << shard;
  }
}

TEST(Mpi, HandsOut) {
  const int32_t rank = world(MPI_Comm_rank);
  const Comm comm(world_config());
  Context ctx;
  std::vector<float> p(5, static_cast<float>(rank));
  ctx.param(ctx.group(plain_sgd()), "p", p.data(), 5);
  ga_comm_options o = comm_options();
  EXPECT_EQ(ga_context_set_comm(ctx, comm, &o), GA_ERROR_COMMUNICATION);
  EXPECT_NE(std::string(ga_last_error()).find("the values of \"p\" on rank 1"), std::string::npos)
      << ga_last_error();
  o.hand_out = 1;
  ASSERT_OK(ga_context_set_comm(ctx, comm, &o));
  EXPECT_EQ(p, std::vector<float>(5, 0));
}

TEST(Mpi, NoCommunicator) {
  ga_comm_config c = world_config();
  c.mpi_comm = MPI_Comm_c2f(MPI_COMM_NULL);
  ga_comm* comm = nullptr;
  EXPECT_EQ(ga_comm_create(&c, &comm), GA_ERROR_INVALID_ARGUMENT);
  EXPECT_EQ(comm, nullptr);
}

// Contexts follow one another over a communicator, and communicators one another, while ranks leave at different
// moments: nobody takes a farewell for one of now.
TEST(Mpi, RanksLeaveInAnyOrderAfterTheLastCall) {
  const int32_t rank = world(MPI_Comm_rank), ranks = world(MPI_Comm_size);
  for (int32_t round = 0; round < 20; ++round) {
    const Comm comm(world_config());
    for (int32_t k = 0; k < 2; ++k) {
      Context ctx;
      float p = 1;
      ctx.param(ctx.group(plain_sgd()), "p", &p, 1);
      if ((round + k) % ranks == rank) std::this_thread::sleep_for(std::chrono::milliseconds(5));
      ASSERT_OK(ga_context_set_comm(ctx, comm, nullptr));
      const float g = 1;
      ctx.accumulate({&g});
      EXPECT_EQ(step(ctx).outcome, GA_STEP_APPLIED);
    }
  }
}

// What ranks see of one that has left, or aborted, which they would wait a minute for.
void expect_at_once(bool aborts, const char* words) {
  const int32_t rank = world(MPI_Comm_rank);
  const Comm comm(world_config());
  auto ctx = std::make_unique<Context>();
  float p = 1;
  ctx->param(ctx->group(plain_sgd()), "p", &p, 1);
  ASSERT_OK(ga_context_set_comm(*ctx, comm, nullptr));
  step(*ctx);
  MPI_Barrier(MPI_COMM_WORLD);
  const auto begin = std::chrono::steady_clock::now();
  if (rank == 1 && aborts) {
    EXPECT_OK(ga_comm_abort(comm));
    expect_failure(ga_step(*ctx, nullptr), "ga_comm_abort was called");
    ctx.reset();  // with fewer threads, only now the others learn of it
  } else if (rank == 1) {
    ctx.reset();
  } else {
    expect_failure(ga_step(*ctx, nullptr), words);
    expect_failure(ga_step(*ctx, nullptr), words);
  }
  MPI_Barrier(MPI_COMM_WORLD);
  EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(20));
}

TEST(Mpi, ZyAContextThatIsDestroyedIsNotWaitedFor) {
  expect_at_once(false, "rank 1 has left: its context was destroyed or given another communicator");
}

TEST(Mpi, ZzAnAbortIsToldToTheOthers) {
  const bool funneled = getenv("GA_TEST_MPI_FUNNELED") != nullptr;
  expect_at_once(true, funneled ? "rank 1 has left" : "ga_comm_abort was called on rank 1");
}

// Last, for MPI keeps what a rank that comes too late still sends.
TEST(Mpi, ZzzAStalledRankIsATimeout) {
  const int32_t rank = world(MPI_Comm_rank);
  ga_comm_config c = world_config();
  c.timeout = 3;
  const Comm comm(c);
  float p = 1;
  Context ctx;
  ctx.param(ctx.group(plain_sgd()), "p", &p, 1);
  ASSERT_OK(ga_context_set_comm(ctx, comm, nullptr));
  const float g = 1;
  ctx.accumulate({&g});
  int done = 0;
  if (rank == 1) {  // stalls until the others have given up
    for (int32_t q = 0; q < world(MPI_Comm_size); ++q)
      if (q != rank) MPI_Recv(&done, 1, MPI_INT, q, 0, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
    for (int32_t q = 0; q < world(MPI_Comm_size); ++q)
      if (q != rank) MPI_Send(&done, 1, MPI_INT, q, 0, MPI_COMM_WORLD);
  } else {
    EXPECT_EQ(ga_step(ctx, nullptr), GA_ERROR_COMMUNICATION);
    EXPECT_NE(std::string(ga_last_error()).find("waited 3 s for the other ranks"),
              std::string::npos)
        << ga_last_error();
    MPI_Send(&done, 1, MPI_INT, 1, 0, MPI_COMM_WORLD);
    // Until all have: those that still wait would be told that this one has left.
    MPI_Recv(&done, 1, MPI_INT, 1, 0, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
  }
  EXPECT_EQ(p, 1);
  EXPECT_OK(ga_discard(ctx));
  ASSERT_OK(ga_context_set_comm(ctx, nullptr, nullptr));
  ctx.accumulate({&g});
  EXPECT_EQ(step(ctx).outcome, GA_STEP_APPLIED);
  EXPECT_EQ(p, 0);
}

}  // namespace
}  // namespace ga::test

int main(int argc, char** argv) {
  testing::InitGoogleTest(&argc, argv);
  setenv("GA_MODULE_PATH", GA_TEST_MODULE_PATH, 0);
  ga_comm* comm = nullptr;
  ga_comm_config c;
  ga_comm_config_init(&c, sizeof c, GA_COMM_MPI);
  const bool refused = ga_comm_create(&c, &comm) == GA_ERROR_INVALID_STATE && !comm;
  // With FUNNELED, gradients cannot travel in the background.
  const int wanted = getenv("GA_TEST_MPI_FUNNELED") ? MPI_THREAD_FUNNELED : MPI_THREAD_MULTIPLE;
  int threads = 0;
  MPI_Init_thread(&argc, &argv, wanted, &threads);
  if (threads != wanted) {
    printf("MPI allows thread level %d instead of %d\n", threads, wanted);
    return 1;
  }
  if (!refused) printf("ga_comm_create was not refused before MPI_Init: %s\n", ga_last_error());
  const int failed = RUN_ALL_TESTS() != 0 || !refused;
  // Not MPI_Finalize, which would wait for what the stalled rank has left open.
  fflush(stdout);
  if (failed) MPI_Abort(MPI_COMM_WORLD, 1);
  MPI_Barrier(MPI_COMM_WORLD);
  MPI_Finalize();
  return failed;
}
