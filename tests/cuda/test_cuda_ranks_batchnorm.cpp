// SPDX-License-Identifier: Apache-2.0
//
// Batch normalisation in WINDOW mode over ranks that exchange their statistics on their devices' streams, where
// no host learns what another one does.
#include <atomic>
#include <memory>

#include "device_ranks.hpp"

namespace ga::test {
namespace {

class CudaRanksBatchNorm : public CudaRanks {};

constexpr size_t kLayers = 2;
constexpr int64_t kChannels[kLayers] = {3, 600}, kSamples = 5;

// A rank's part of a window of two layers, which all ranks normalise together.
class Net {
 public:
  Net(ga_comm* comm, const Stream& stream, int32_t rank, int64_t micros,
      const ga_config& c = config(), const ga_comm_options* o = nullptr)
      : ctx(on(c, stream)), p_(Block(2 * (kChannels[0] + kChannels[1]), 1)) {
    const ga_group group = ctx.group(plain_sgd(0.25));
    float* at = p_.data();
    for (size_t l = 0; l < kLayers; ++l) {
      const std::string name = "layer" + std::to_string(l);
      const auto param = [&](const char* of) {
        ids.push_back(ctx.param(group, (name + of).c_str(), at, kChannels[l]));
        at += kChannels[l];
        return ids.back();
      };
      const ga_param gamma = param(".gamma"), beta = param(".beta");
      ga_bn_options options;
      EXPECT_OK(ga_bn_options_init(&options, sizeof options, GA_FLAVOR_TORCH));
      options.mode = GA_BN_WINDOW;
      EXPECT_OK(ga_bn_add(ctx, name.c_str(), kChannels[l], gamma, beta, &options, nullptr));
      for (int64_t k = 0; k < micros; ++k)
        batches_[l].push_back(std::make_unique<Batch>(l, 16 * rank + k));
    }
    EXPECT_OK(ga_context_set_comm(ctx, comm, o));
  }

  void take(size_t l) {
    for (const auto& b : batches_[l])
      EXPECT_OK(ga_bn_accumulate(ctx, static_cast<ga_bn>(l), b->x.data(), kSamples, 1));
  }
  ga_status finalize(size_t l) { return ga_bn_finalize(ctx, static_cast<ga_bn>(l)); }
  void normalise(size_t l) {
    for (const auto& b : batches_[l])
      EXPECT_OK(ga_bn_forward(ctx, static_cast<ga_bn>(l), b->x.data(), kSamples, 1, b->y.data()));
  }
  void sum(size_t l) {
    in_micros(l, [&](const Batch& b) {
      EXPECT_OK(ga_bn_backward_accumulate(ctx, static_cast<ga_bn>(l), b.x.data(), b.dy.data(),
                                          kSamples, 1));
    });
  }
  ga_status finalize_sums(size_t l) { return ga_bn_backward_finalize(ctx, static_cast<ga_bn>(l)); }
  void backward(size_t l) {
    in_micros(l, [&](const Batch& b) {
      EXPECT_OK(ga_bn_backward(ctx, static_cast<ga_bn>(l), b.x.data(), b.dy.data(), kSamples, 1,
                               b.dx.data()));
    });
  }

  void forward() {
    for (size_t l = 0; l < kLayers; ++l) {
      take(l);
      EXPECT_OK(finalize(l));
      normalise(l);
    }
  }
  void passes() {
    forward();
    for (size_t l = kLayers; l-- > 0;) {
      sum(l);
      EXPECT_OK(finalize_sums(l));
      backward(l);
    }
  }
  void window() {
    passes();
    EXPECT_OK(ga_step(ctx, nullptr));
  }
  ga_step_outcome outcome() { return result_of(ctx).outcome; }

  Block parameters() const { return p_.get(); }
  float first() const { return p_[0]; }
  void set_first(float value) const { sim::poke(p_.data(), &value, sizeof value); }
  // All that the rank has computed.
  Block computed() {
    EXPECT_OK(ga_synchronize(ctx));
    Block all = p_.get();
    const auto append = [&](const Block& block) {
      all.insert(all.end(), block.begin(), block.end());
    };
    for (size_t l = 0; l < kLayers; ++l) {
      for (const auto& b : batches_[l]) {
        append(b->y.get());
        append(b->dx.get());
      }
      Block running(2 * static_cast<size_t>(kChannels[l]));
      int64_t steps = 0;
      EXPECT_OK(ga_bn_running(ctx, static_cast<ga_bn>(l), running.data(),
                              running.data() + kChannels[l], GA_F32, &steps));
      append(running);
      all.push_back(static_cast<float>(steps));
    }
    return all;
  }

  Context ctx;
  std::vector<ga_param> ids;

 private:
  struct Batch {
    Batch(size_t l, int64_t seed)
        : x(static_cast<size_t>(kSamples * kChannels[l])), dy(x.size()), y(x.size()), dx(x.size()) {
      for (size_t j = 0; j < x.size(); ++j) {
        const size_t s = static_cast<size_t>(seed) + l;
        x[j] = static_cast<float>((7 * j + 3 * s) % 11) / 3;
        dy[j] = static_cast<float>((5 * j + s) % 13) / 7 - 1;
      }
    }
    Block x, dy;  // in the host's memory
    Parameters y, dx;
  };

  template <class Work>
  void in_micros(size_t l, Work&& work) {
    for (size_t k = 0; k < batches_[l].size(); ++k) {
      EXPECT_OK(ga_micro_begin(ctx, static_cast<int64_t>(k), 1 + static_cast<double>(k), nullptr));
      work(*batches_[l][k]);
      EXPECT_OK(ga_micro_end(ctx));
    }
  }

  const Parameters p_;
  std::vector<std::unique_ptr<Batch>> batches_[kLayers];
};

// What ranks of so many micro-batches have computed after two undisturbed windows.
std::vector<Block> undisturbed(const std::vector<int64_t>& micros, int windows = 2) {
  std::vector<Block> ended(micros.size());
  on_devices(static_cast<int32_t>(micros.size()),
             [&](int32_t r, ga_comm* comm, const Stream& stream) {
               const auto rank = static_cast<size_t>(r);
               Net net(comm, stream, r, micros[rank]);
               for (int w = 0; w < windows; ++w) net.window();
               ended[rank] = net.computed();
             });
  return ended;
}

// ---- The promise ----------------------------------------------------------------------------------

// With ranks that have no micro-batches among them.
TEST_F(CudaRanksBatchNorm, HasTheBitsOfOtherTransports) {
  for (const std::vector<int64_t>& micros :
       {std::vector<int64_t>{2}, {1, 3}, {2, 0, 1}, {0, 1, 2, 1}}) {
    SCOPED_TRACE(micros.size());
    use(false);
    std::vector<Block> local(micros.size());
    on_ranks(static_cast<int32_t>(micros.size()), [&](int32_t r, ga_comm* comm) {
      const Stream stream(r);
      EXPECT_CUDA(cudaSetDevice(r));
      const auto rank = static_cast<size_t>(r);
      ga_comm_options o = comm_options();
      o.adder = GA_COMM_ADDER_LIBRARY;
      Net net(comm, stream, r, micros[rank], config(), &o);
      for (int w = 0; w < 2; ++w) net.window();
      local[rank] = net.computed();
    });
    for (const bool deferred : {false, true}) {
      use(deferred);
      on_devices(static_cast<int32_t>(micros.size()),
                 [&](int32_t r, ga_comm* comm, const Stream& stream) {
                   const auto rank = static_cast<size_t>(r);
                   ga_comm_options o = comm_options();
                   o.adder = GA_COMM_ADDER_LIBRARY;
                   Net net(comm, stream, r, micros[rank], config(), &o);
                   for (int w = 0; w < 2; ++w) net.window();
                   EXPECT_EQ(net.outcome(), GA_STEP_APPLIED);
                   EXPECT_TRUE(same_bits(net.computed(), local[rank])) << r;
                 });
    }
  }
}

// The statistics of all ranks are the same, also where a rank has none of its own, or none has any.
TEST_F(CudaRanksBatchNorm, StatisticsAreThoseOfAllRanks) {
  for (const bool some : {true, false}) {
    std::vector<double> seen[3];
    on_devices(3, [&](int32_t r, ga_comm* comm, const Stream& stream) {
      Net net(comm, stream, r, some ? r : 0);
      net.take(0);
      ASSERT_OK(net.finalize(0));
      std::vector<double>& list = seen[r];
      list.resize(6);
      int64_t count = -1;
      ASSERT_OK(ga_bn_statistics(net.ctx, 0, list.data(), list.data() + 3, GA_F64, &count));
      EXPECT_EQ(count, some ? 3 * kSamples : 0);
      EXPECT_EQ(list[4] > 0, some);
      ASSERT_OK(ga_discard(net.ctx));
    });
    EXPECT_EQ(seen[1], seen[0]);
    EXPECT_EQ(seen[2], seen[0]);
  }
}

// ---- Waits and graphs -------------------------------------------------------------------------------

TEST_F(CudaRanksBatchNorm, TheHostWaitsForNothing) {
  use(true);
  std::atomic<int64_t> waits{0};
  std::atomic<int> begun{0};
  on_devices(2, [&](int32_t r, ga_comm* comm, const Stream& stream) {
    Net net(comm, stream, r, 2);
    net.window();
    ASSERT_OK(ga_synchronize(net.ctx));
    for (++begun; begun < 2;) std::this_thread::yield();
    const int64_t before = sim::counters().synchronizations;
    for (int w = 0; w < 3; ++w) net.window();
    waits += sim::counters().synchronizations - before;
    for (++begun; begun < 4;) std::this_thread::yield();
    EXPECT_EQ(result_of(net.ctx).steps, 4);
  });
  EXPECT_EQ(waits, 0);
}

// Replays are windows of all ranks, of which one has no micro-batches.
TEST_F(CudaRanksBatchNorm, AWindowInAGraph) {
  const std::vector<int64_t> micros = {2, 1, 0};
  const std::vector<Block> want = undisturbed(micros, 5);
  for (const bool deferred : {false, true}) {
    use(deferred);
    on_devices(3, [&](int32_t r, ga_comm* comm, const Stream& stream) {
      const auto rank = static_cast<size_t>(r);
      Net net(comm, stream, r, micros[rank]);
      net.window();
      Graph graph;
      graph.capture(stream, [&] { net.window(); });
      graph.replay(stream);
      net.window();
      graph.replay(stream);
      graph.replay(stream);
      EXPECT_EQ(result_of(net.ctx).steps, 5);
      EXPECT_TRUE(same_bits(net.computed(), want[rank])) << r;
    });
  }
}

// Where hosts have to meet, which is refused before anything has changed.
TEST_F(CudaRanksBatchNorm, WhatAGraphCannotHold) {
  const auto refusals = [](ga_comm* comm, const Stream& stream, int32_t r, const char* words,
                           bool freezes) {
    Net net(comm, stream, r, 1);
    net.window();
    if (freezes) {
      ASSERT_OK(ga_bn_set_frozen(net.ctx, 1, 1));
    }
    Graph graph;
    graph.capture(stream, [&] {
      net.take(0);
      expect_failure(net.finalize(0), words, GA_ERROR_INVALID_STATE);
    });
    ASSERT_OK(net.finalize(0));
    ASSERT_OK(ga_discard(net.ctx));
  };
  on_devices(2, [&](int32_t r, ga_comm* comm, const Stream& stream) {
    refusals(comm, stream, r, "have to agree", true);
  });
  on_ranks(2, [&](int32_t r, ga_comm* comm) {
    const Stream stream(r);
    EXPECT_CUDA(cudaSetDevice(r));
    refusals(comm, stream, r, "statistics are exchanged by way of the host", false);
  });
}

// ---- What ranks may differ in -----------------------------------------------------------------------

// A call that one rank cannot make yet fails there alone, and the device of the others waits for it.
TEST_F(CudaRanksBatchNorm, WhatOneRankLacksIsMadeGood) {
  const std::vector<int64_t> micros = {1, 2};
  const std::vector<Block> want = undisturbed(micros);
  for (const bool deferred : {false, true}) {
    use(deferred);
    on_devices(2, [&](int32_t r, ga_comm* comm, const Stream& stream) {
      const auto rank = static_cast<size_t>(r);
      Net net(comm, stream, r, micros[rank]);
      for (int w = 0; w < 2; ++w) {
        net.forward();
        for (size_t l = kLayers; l-- > 0;) {
          if (r == 1) {
            EXPECT_EQ(net.finalize(l), GA_ERROR_INVALID_STATE);
            expect_failure(net.finalize_sums(l), "0 of 2 micro-batches", GA_ERROR_INVALID_STATE);
          }
          net.sum(l);
          ASSERT_OK(net.finalize_sums(l));
          net.backward(l);
        }
        ASSERT_OK(ga_step(net.ctx, nullptr));
      }
      EXPECT_TRUE(same_bits(net.computed(), want[rank])) << r;
    });
  }
}

// What one rank does in place of the others' passes, and what comes of their window.
struct Deviation {
  const char* name;
  std::function<void(Net&)> window;
  ga_step_outcome outcome;
};
class CudaRanksDeviations : public CudaRanks, public testing::WithParamInterface<Deviation> {};

// The outcome is that of all ranks, which go on together.
TEST_P(CudaRanksDeviations, EndTheWindowOfAllRanks) {
  for (const int32_t late : {0, 1})
    for (const bool deferred : {false, true})
      for (const int64_t check_every : {0, 1}) {
        SCOPED_TRACE(testing::Message() << "rank " << late << (deferred ? " deferred" : "")
                                        << ", check_every " << check_every);
        use(deferred);
        on_devices(
            2,
            [&](int32_t r, ga_comm* comm, const Stream& stream) {
              ga_comm_options o = comm_options();
              o.check_every = check_every;
              Net net(comm, stream, r, 2, config(), &o);
              net.window();
              const Block before = net.computed();
              if (r == late)
                GetParam().window(net);
              else
                net.window();
              EXPECT_EQ(net.outcome(), GetParam().outcome);
              EXPECT_EQ(net.parameters(),
                        Block(before.begin(), before.begin() + net.parameters().size()));
              for (int w = 0; w < 2; ++w) net.window();
              EXPECT_EQ(net.outcome(), GA_STEP_APPLIED);
              EXPECT_EQ(result_of(net.ctx).steps, 3);
              int64_t moved = 0;
              ASSERT_OK(ga_bn_running(net.ctx, 0, nullptr, nullptr, GA_F32, &moved));
              EXPECT_EQ(moved, 3);
            },
            20);
      }
}

ga_status end(Net& net) { return ga_step(net.ctx, nullptr); }

INSTANTIATE_TEST_SUITE_P(
    All, CudaRanksDeviations,
    testing::Values(Deviation{"layers_in_another_order",
                              [](Net& net) {
                                for (const size_t l : {1, 0}) {
                                  net.take(l);
                                  EXPECT_OK(net.finalize(l));
                                }
                                for (const size_t l : {1, 0}) {
                                  net.sum(l);
                                  EXPECT_OK(net.finalize_sums(l));
                                }
                                EXPECT_OK(end(net));
                              },
                              GA_STEP_SKIPPED_ERROR},
                    Deviation{"sums_in_another_order",
                              [](Net& net) {
                                net.forward();
                                for (const size_t l : {0, 1}) {
                                  net.sum(l);
                                  EXPECT_OK(net.finalize_sums(l));
                                }
                                EXPECT_OK(end(net));
                              },
                              GA_STEP_SKIPPED_ERROR},
                    Deviation{"no_layer", [](Net& net) { EXPECT_OK(end(net)); },
                              GA_STEP_SKIPPED_ERROR},
                    Deviation{"no_backward_pass",
                              [](Net& net) {
                                net.forward();
                                EXPECT_OK(end(net));
                              },
                              GA_STEP_SKIPPED_ERROR},
                    Deviation{"discards_at_once", [](Net& net) { EXPECT_OK(ga_discard(net.ctx)); },
                              GA_STEP_SKIPPED_DISCARD},
                    Deviation{"discards_within_the_sweeps",
                              [](Net& net) {
                                net.take(0);
                                EXPECT_OK(net.finalize(0));
                                net.take(1);
                                EXPECT_OK(ga_discard(net.ctx));
                              },
                              GA_STEP_SKIPPED_DISCARD},
                    Deviation{"discards_at_the_end",
                              [](Net& net) {
                                net.passes();
                                EXPECT_OK(ga_discard(net.ctx));
                              },
                              GA_STEP_SKIPPED_DISCARD}),
    [](const auto& info) { return info.param.name; });

// Ranks that leave the same out, as programs with kernels of their own do, lose nothing by it; nor does a
// window that ga_step refuses and all ranks discard.
TEST_F(CudaRanksBatchNorm, PassesThatAllRanksLeaveOut) {
  on_devices(
      2,
      [&](int32_t r, ga_comm* comm, const Stream& stream) {
        ga_config c = config();
        c.nonfinite = GA_NONFINITE_FAIL;
        Net net(comm, stream, r, 1, c);
        for (const bool refused : {false, true, false}) {
          const Block g(3, refused && r == 1 ? INFINITY : 1.0f);
          net.forward();
          ASSERT_OK(ga_micro_begin(net.ctx, 0, 1, nullptr));
          ASSERT_OK(ga_accumulate_part(net.ctx, net.ids[0], g.data()));
          ASSERT_OK(ga_micro_end(net.ctx));
          EXPECT_EQ(ga_step(net.ctx, nullptr), refused ? GA_ERROR_NONFINITE : GA_OK);
          if (refused) {
            ASSERT_OK(ga_discard(net.ctx));
          }
        }
        net.window();
        EXPECT_EQ(result_of(net.ctx).steps, 3);
        EXPECT_EQ(result_of(net.ctx).outcome, GA_STEP_APPLIED);
      },
      20);
}

// The hosts meet in the first call after layers have been frozen, and find out if one rank's have not.
TEST_F(CudaRanksBatchNorm, LayersThatAreFrozen) {
  on_devices(2, [&](int32_t r, ga_comm* comm, const Stream& stream) {
    Net net(comm, stream, r, 1);
    ASSERT_OK(ga_bn_set_frozen(net.ctx, r, 1));
    net.take(0);
    net.take(1);
    expect_failure(net.finalize(static_cast<size_t>(1 - r)),
                   "frozen is 0 on rank 1, but 1 on rank 0");
    ASSERT_OK(ga_discard(net.ctx));
    ASSERT_OK(ga_bn_set_frozen(net.ctx, r, 0));
    ASSERT_OK(ga_bn_set_frozen(net.ctx, 0, 1));
    net.window();
    net.window();
    EXPECT_EQ(net.outcome(), GA_STEP_APPLIED);
    for (const ga_bn bn : {0, 1}) {
      int64_t moved = -1;
      ASSERT_OK(ga_bn_running(net.ctx, bn, nullptr, nullptr, GA_F32, &moved));
      EXPECT_EQ(moved, bn == 0 ? 0 : 2);
    }
  });
}

// A step that fails since parameters differ can be made again, also by a rank that has left out its passes.
TEST_F(CudaRanksBatchNorm, AStepThatIsMadeAgain) {
  on_devices(
      2,
      [&](int32_t r, ga_comm* comm, const Stream& stream) {
        ga_comm_options o = comm_options();
        o.check_every = 1;
        Net net(comm, stream, r, 1, config(), &o);
        net.window();
        ASSERT_OK(ga_synchronize(net.ctx));
        const float before = net.first();
        if (r == 1)
          net.set_first(7);
        else
          net.passes();
        for (int tries = 0; tries < 2; ++tries)
          expect_failure(ga_step(net.ctx, nullptr), "the values of \"layer0.gamma\"");
        if (r == 1) expect_failure(net.finalize(0), "leaves the call out", GA_ERROR_INVALID_STATE);
        if (r == 1) net.set_first(before);
        ASSERT_OK(ga_step(net.ctx, nullptr));
        EXPECT_EQ(net.outcome(), GA_STEP_SKIPPED_ERROR);
        net.window();
        EXPECT_EQ(net.outcome(), GA_STEP_APPLIED);
      },
      20);
}

// ---- Failures -----------------------------------------------------------------------------------------

// A rank that is gone, or does not come, is found by the next call that waits.
TEST_F(CudaRanksBatchNorm, ARankThatDoesNotCome) {
  for (const bool backward : {false, true}) {
    std::atomic<bool> gave_up{false};
    on_devices(
        2,
        [&](int32_t r, ga_comm* comm, const Stream& stream) {
          Net net(comm, stream, r, 1);
          net.window();
          ASSERT_OK(ga_synchronize(net.ctx));
          if (backward) net.forward();
          if (r == 1) {
            while (!gave_up) std::this_thread::yield();
            return;
          }
          if (backward) {
            net.sum(1);
            ASSERT_OK(net.finalize_sums(1));
          } else {
            net.take(0);
            ASSERT_OK(net.finalize(0));
          }
          double mean[kChannels[0]];
          expect_failure(ga_bn_statistics(net.ctx, 0, mean, nullptr, GA_F64, nullptr),
                         "waited 1 s for the other ranks");
          gave_up = true;
          expect_failure(net.finalize_sums(0), "waited 1 s");
        },
        1);
    ga_fake_nccl_reset();
  }
}

// A call that NCCL refuses leaves the statistics, and after ga_discard the context is one alone.
TEST_F(CudaRanksBatchNorm, ACallThatNcclRefuses) {
  on_devices(1, [&](int32_t, ga_comm* comm, const Stream& stream) {
    Net net(comm, stream, 0, 2);
    net.window();
    net.take(0);
    ga_fake_nccl_fail("ncclAllGather", 1, ncclSystemError);
    expect_failure(net.finalize(0), "statistics of batch normalisation: NCCL returned 2");
    double mean[kChannels[0]];
    expect_failure(ga_bn_statistics(net.ctx, 0, mean, nullptr, GA_F64, nullptr), "ga_bn_finalize",
                   GA_ERROR_INVALID_STATE);
    ASSERT_OK(ga_discard(net.ctx));
    ASSERT_OK(ga_context_set_comm(net.ctx, nullptr, nullptr));
    net.window();
    EXPECT_EQ(result_of(net.ctx).steps, 2);
  });
}

}  // namespace
}  // namespace ga::test
