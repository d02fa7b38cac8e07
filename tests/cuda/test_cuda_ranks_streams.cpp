// SPDX-License-Identifier: Apache-2.0
//
// Ranks with a simulated device each, whose contexts change their streams (ga_context_set_stream): what NCCL
// exchanges, also on the second stream, stays in order.
#include "device_ranks.hpp"

namespace ga::test {
namespace {

using namespace over_ranks;

// As over_ranks::run() on devices, where every rank changes its stream before each call, at other times than the
// other ranks.
std::vector<Ended> run_on_changing_streams(const Layout& l, const Options& s, const Shares& shares,
                                           const Block& start) {
  const auto ranks = static_cast<int32_t>(shares[0].size());
  std::vector<Ended> ended(shares[0].size());
  on_devices(ranks, [&](int32_t r, ga_comm* comm, const Stream& stream) {
    Ended& e = ended[static_cast<size_t>(r)];
    const Parameters p(start);
    const Stream others[] = {Stream(r), Stream(r)};
    int turns = 0;
    Context ctx(on(s.config, stream));
    const auto turn = [&] {
      const int k = ++turns % (r + 3);
      ASSERT_OK(ga_context_set_stream(ctx, k < 2    ? cudaStream_t(others[k])
                                           : k == 2 ? cudaStream_t(stream)
                                                    : nullptr));
    };
    add_all(ctx, ctx.group(s.optimizer), l, p.data());
    ASSERT_OK(ga_context_set_clip(ctx, &s.clip));
    turn();
    ASSERT_OK(ga_context_set_comm(ctx, comm, &s.options));
    for (const auto& window : shares) {
      const std::vector<Micro>& micros = window[static_cast<size_t>(r)];
      for (const Micro& m : micros) {
        const bool last = &m == &micros.back();
        const auto list = pointers(l, m.gradients);
        turn();
        ASSERT_OK(ga_micro_begin(ctx, -1, m.weight, MicroOptions(0, last ? GA_MICRO_LAST : 0)));
        for (size_t i = list.size(); i-- > 0;) {
          const auto id = static_cast<ga_param>(i);
          turn();
          if (std::find(m.missing.begin(), m.missing.end(), i) == m.missing.end()) {
            ASSERT_OK(ga_accumulate_part(ctx, id, list[i]));
          }
          turn();
          if (s.options.overlap && last) {
            ASSERT_OK(ga_params_ready(ctx, &id, 1));
          }
        }
        turn();
        ASSERT_OK(ga_micro_end(ctx));
      }
      turn();
      ASSERT_OK(ga_step(ctx, nullptr));
      turn();
      e.results.push_back(result_of(ctx));
    }
    ASSERT_OK(ga_synchronize(ctx));
    e.parameters = p.get();
  });
  return ended;
}

TEST_F(CudaRanks, ChangingStreamsKeepTheBits) {
  const Layout l = layout();
  Options s;
  s.optimizer = optimizer(GA_OPTIMIZER_ADAMW);
  s.clip = clip(GA_CLIP_GLOBAL, 0.5);
  s.options.adder = GA_COMM_ADDER_LIBRARY;
  for (const int32_t ranks : {1, 3}) {
    const Shares shares = make_shares(l, ranks, 4);
    const Block start = parameters(l, 3);
    s.options.shard = GA_SHARD_NONE;
    s.options.overlap = 0;
    const std::vector<Ended> cpu = run(l, s, shares, start);
    for (const bool shards : {false, true})
      for (const bool overlaps : {false, true}) {
        SCOPED_TRACE(std::to_string(ranks) + (shards ? " sharded" : "") +
                     (overlaps ? " overlapped" : ""));
        use(true);
        s.options.shard = shards ? GA_SHARD_OPTIMIZER : GA_SHARD_NONE;
        s.options.overlap = overlaps;
        const std::vector<Ended> ended = run_on_changing_streams(l, s, shares, start);
        for (size_t r = 0; r < ended.size(); ++r) {
          EXPECT_TRUE(same_bits(ended[r].parameters, cpu[r].parameters)) << "rank " << r;
          ASSERT_EQ(ended[r].results.size(), cpu[r].results.size());
          for (size_t w = 0; w < cpu[r].results.size(); ++w)
            EXPECT_EQ(ended[r].results[w].weight, cpu[r].results[w].weight);
        }
      }
  }
}

// A graph cannot wait for what the second stream still has to do either.
TEST_F(CudaRanks, ACaptureBesideTheSecondStream) {
  use(true);
  on_devices(1, [&](int32_t, ga_comm* comm, const Stream& stream) {
    const Parameters p(900);
    const std::vector<float> g(900, 1);
    const Stream other;
    Context ctx(on(config(), stream));
    const ga_param id = ctx.param(ctx.group(plain_sgd()), "p", p.data(), 900);
    ga_comm_options o = comm_options();
    o.overlap = 1;
    ASSERT_OK(ga_context_set_comm(ctx, comm, &o));
    for (int w = 0; w < 2; ++w) {
      ASSERT_OK(ga_micro_begin(ctx, -1, 1, MicroOptions(0, GA_MICRO_LAST)));
      ASSERT_OK(ga_accumulate_part(ctx, id, g.data()));
      ASSERT_OK(ga_params_ready(ctx, &id, 1));
      ASSERT_OK(ga_micro_end(ctx));
      stream.wait();
      if (w == 1) {
        EXPECT_GT(sim::queued(), 0) << "on the second stream";
        ASSERT_CUDA(cudaStreamBeginCapture(other, cudaStreamCaptureModeThreadLocal));
        expect_failure(ga_context_set_stream(ctx, cudaStream_t(other)),
                       "work from before the capture", GA_ERROR_INVALID_STATE);
        cudaGraph_t graph = nullptr;
        ASSERT_CUDA(cudaStreamEndCapture(other, &graph));
        ASSERT_CUDA(cudaGraphDestroy(graph));
        ASSERT_OK(ga_context_set_stream(ctx, cudaStream_t(other)));
      }
      ASSERT_OK(ga_step(ctx, nullptr));
      EXPECT_EQ(result_of(ctx).outcome, GA_STEP_APPLIED);
    }
    EXPECT_EQ(p[0], -2);
  });
}

int priority_of(cudaStream_t stream) {
  int (*ask)(cudaStream_t, int*) = nullptr;
  cudaDriverEntryPointQueryResult found = cudaDriverEntryPointSymbolNotFound;
  EXPECT_CUDA(cudaGetDriverEntryPointByVersion(
      "cuStreamGetPriority", reinterpret_cast<void**>(&ask), 12000, cudaEnableDefault, &found));
  int priority = 99;
  EXPECT_CUDA(ask(stream, &priority));
  return priority;
}

// The second stream is as urgent as the one that it serves. A transport of the program's sees both.
TEST_F(CudaRanks, PriorityOfTheSecondStream) {
  for (const int priority : {0, -3}) {
    cudaStream_t stream = nullptr;
    EXPECT_CUDA(cudaStreamCreateWithPriority(&stream, cudaStreamNonBlocking, priority));
    std::map<void*, int> seen;
    ga_comm_table table = {};
    table.struct_size = sizeof table;
    table.user = &seen;
    table.on_stream = 1;
    const auto copy = [](void* user, const void* from, void* to, int64_t count, ga_dtype dtype,
                         void* on) {
      auto* const at = static_cast<cudaStream_t>(on);
      (*static_cast<std::map<void*, int>*>(user))[on] = priority_of(at);
      const size_t bytes = static_cast<size_t>(count) * format(dtype).size;
      return int32_t{cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, at)};
    };
    static const auto copies = copy;
    table.all_to_all = [](void* user, const void* from, int64_t, void* to, int64_t count,
                          ga_dtype dtype,
                          void* on) { return copies(user, from, to, count, dtype, on); };
    table.all_gather = [](void* user, const void* from, void* to, int64_t, int64_t count,
                          ga_dtype dtype,
                          void* on) { return copies(user, from, to, count, dtype, on); };
    table.broadcast = [](void*, void*, int64_t, ga_dtype, int32_t, void*) { return int32_t{0}; };
    ga_comm_config of_table;
    EXPECT_OK(ga_comm_config_init(&of_table, sizeof of_table, GA_COMM_TABLE));
    of_table.ranks = 1;
    of_table.table = &table;
    {
      const Parameters p(900);
      const std::vector<float> g(900, 1);
      const Comm comm(of_table);
      ga_config c = config();
      c.device = GA_DEVICE_CUDA;
      c.stream = stream;
      Context ctx(c);
      const ga_param id = ctx.param(ctx.group(plain_sgd()), "p", p.data(), 900);
      ga_comm_options o = comm_options();
      o.overlap = 1;
      ASSERT_OK(ga_context_set_comm(ctx, comm, &o));
      for (int w = 0; w < 2; ++w) {
        ASSERT_OK(ga_micro_begin(ctx, -1, 1, MicroOptions(0, GA_MICRO_LAST)));
        ASSERT_OK(ga_accumulate_part(ctx, id, g.data()));
        ASSERT_OK(ga_params_ready(ctx, &id, 1));
        ASSERT_OK(ga_micro_end(ctx));
        ASSERT_OK(ga_step(ctx, nullptr));
      }
      EXPECT_EQ(result_of(ctx).steps, 2);
      EXPECT_EQ(p[0], -2);
    }
    EXPECT_EQ(seen.size(), 2u);
    for (const auto& [on, found] : seen) EXPECT_EQ(found, priority) << on;
    EXPECT_CUDA(cudaStreamDestroy(stream));
  }
}

// A window in a graph of a stream that is not the one before it.
TEST_F(CudaRanks, AGraphOfAnotherStream) {
  const Layout l = layout();
  std::vector<Block> ended[2];
  for (const bool captured : {false, true}) {
    ended[captured].resize(2);
    on_devices(2, [&](int32_t r, ga_comm* comm, const Stream& stream) {
      const Parameters p(parameters(l, 3));
      const Block g = gradients(l, 5, static_cast<uint64_t>(r));
      const Stream other(r);
      Context ctx(on(config(), stream));
      add_all(ctx, ctx.group(optimizer(GA_OPTIMIZER_ADAMW)), l, p.data());
      ASSERT_OK(ga_context_set_comm(ctx, comm, nullptr));
      const auto window = [&] {
        const auto list = pointers(l, g);
        ASSERT_OK(ga_accumulate(ctx, list.data(), list.size(), r + 1, nullptr));
        ASSERT_OK(ga_step(ctx, nullptr));
      };
      window();
      ASSERT_OK(ga_synchronize(ctx));
      Graph graph;
      if (captured) {
        graph.capture(other, [&] {
          ASSERT_OK(ga_context_set_stream(ctx, cudaStream_t(other)));
          window();
        });
        ASSERT_OK(ga_context_set_stream(ctx, cudaStream_t(stream)));
      }
      for (int w = 0; w < 2; ++w) {
        window();
        captured ? graph.replay(stream) : window();
      }
      EXPECT_EQ(result_of(ctx).steps, 5);
      ended[captured][static_cast<size_t>(r)] = p.get();
    });
  }
  for (int r = 0; r < 2; ++r) EXPECT_TRUE(same_bits(ended[0][0], ended[1][r]));
}

}  // namespace
}  // namespace ga::test
