// SPDX-License-Identifier: Apache-2.0
//
// A communicator of one rank over NCCL, which one GPU is enough for: a context with it computes what a
// context without it does. Skipped without a device or without NCCL.
#include "../ranks.hpp"
#include "device.hpp"
#ifdef GA_SIMULATED
#include "host/nccl.h"
#endif

namespace ga::test {
namespace {

class OneRankOfNccl : public OnDevice<> {
 protected:
  void SetUp() override {
    OnDevice<>::SetUp();
    if (IsSkipped() || HasFatalFailure()) return;
    join();
  }
  void TearDown() override {
    leave();
#ifdef GA_SIMULATED
    ga_fake_nccl_reset();
#endif
    OnDevice<>::TearDown();
  }

  void join() {
    unsigned char id[GA_COMM_ID_SIZE];
    ga_status status = ga_comm_unique_id(GA_COMM_NCCL, id, sizeof id);
    ga_comm_config c = comm_config(GA_COMM_NCCL);
    c.ranks = 1;
    c.timeout = 30;
    c.id = id;
    if (status == GA_OK) status = ga_comm_create(&c, &comm_);
    if (status == GA_ERROR_UNSUPPORTED) GTEST_SKIP() << ga_last_error();
    ASSERT_EQ(status, GA_OK) << ga_last_error();
  }
  void leave() {
    ga_comm_destroy(comm_);
    comm_ = nullptr;
#ifdef GA_SIMULATED
    EXPECT_EQ(ga_fake_nccl_communicators(), 0);
#endif
  }

  enum class Way { kWhole, kOverlapped, kCaptured };

  // What three windows compute. options: NULL without the communicator.
  std::vector<Record> train(const ga_comm_options* options, Way way = Way::kWhole) {
    Machine m(GA_DEVICE_CUDA);
    Training training;
    training.add(m, m.group(optimizer(GA_OPTIMIZER_ADAMW)));
    if (options) {
      EXPECT_OK(ga_context_set_comm(m, comm_, options));
    }
    const std::vector<const void*> first = training.gradients(m, 0);
    const std::vector<const void*> second = training.gradients(m, 1);
    const auto window = [&] {
      EXPECT_OK(ga_accumulate(m, first.data(), first.size(), 2, nullptr));
      EXPECT_OK(ga_micro_begin(m, -1, 1, MicroOptions(0, GA_MICRO_LAST)));
      for (size_t i = second.size(); i-- > 0;) {
        EXPECT_OK(ga_accumulate_part(m, training.ids[i], second[i]));
        if (options && way == Way::kOverlapped) {
          EXPECT_OK(ga_params_ready(m, &training.ids[i], 1));
        }
      }
      EXPECT_OK(ga_micro_end(m));
      EXPECT_OK(ga_step(m, nullptr));
    };
    window();
    Graph graph;
    if (way == Way::kCaptured) graph.capture(m.stream(), window);
    for (int w = 0; w < 2; ++w) way == Way::kCaptured ? graph.replay(m.stream()) : window();
    const ga_step_result result = result_of(m);
    EXPECT_EQ(result.outcome, GA_STEP_APPLIED);
    EXPECT_EQ(result.steps, 3);
    m.note("norm", result.norm, 1e-6);
    m.note_params();
    return m.records();
  }

  ga_comm* comm_ = nullptr;
};

TEST_F(OneRankOfNccl, StepsAreThoseWithoutIt) {
  const std::vector<Record> alone = train(nullptr);
  ga_comm_options o = comm_options();
  expect_same_records(alone, train(&o));
  o.adder = GA_COMM_ADDER_TRANSPORT;
  expect_same_records(alone, train(&o));
  o = comm_options();
  o.shard = GA_SHARD_OPTIMIZER;
  expect_same_records(alone, train(&o));
}

TEST_F(OneRankOfNccl, GradientsThatAreReadyTravelAtOnce) {
  ga_comm_options o = comm_options();
  o.overlap = 1;
  expect_same_records(train(nullptr), train(&o, Way::kOverlapped));
}

TEST_F(OneRankOfNccl, WindowsInAGraph) {
  const ga_comm_options o = comm_options();
  const std::vector<Record> alone = train(nullptr);
  expect_same_records(alone, train(&o, Way::kCaptured));
  expect_same_records(alone, train(nullptr, Way::kCaptured));
}

TEST_F(OneRankOfNccl, LeavesAndJoinsAgain) {
  const ga_comm_options o = comm_options();
  const std::vector<Record> first = train(&o);
  leave();
  join();
  expect_same_records(first, train(&o));
}

}  // namespace
}  // namespace ga::test
