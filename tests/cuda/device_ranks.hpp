// SPDX-License-Identifier: Apache-2.0
//
// Ranks with a simulated device each, over a library of NCCL's name (host/nccl.h).
#pragma once

#include <functional>

#include "../ranks.hpp"
#include "device.hpp"
#include "host/nccl.h"

namespace ga::test {

class CudaRanks : public testing::Test {
 protected:
  void SetUp() override { use(false); }
  void TearDown() override {
    ga_fake_nccl_reset();
    sim::configure(sim::Config());
    sim::reset();
  }
  // Work runs when somebody waits for it, or at once. Gradients are the test's, in the host's memory.
  static void use(bool deferred) {
    sim::Config c;
    c.devices = 4;
    c.deferred = deferred;
    c.pageable_access = true;
    sim::configure(c);
  }
};

// Runs body(rank, comm, stream) as each of these ranks.
inline void on_devices(int32_t ranks,
                       const std::function<void(int32_t, ga_comm*, const Stream&)>& body,
                       double timeout = 60) {
  each_rank(GA_COMM_NCCL, ranks, timeout, [&](const ga_comm_config& config) {
    const Stream stream(config.rank);
    EXPECT_CUDA(cudaSetDevice(config.rank));
    const Comm comm(config);
    body(config.rank, comm, stream);
  });
  EXPECT_EQ(ga_fake_nccl_communicators(), 0);
}

// Parameters of a rank, in memory of its device.
class Parameters {
 public:
  explicit Parameters(const Block& start) : count_(start.size()) {
    EXPECT_CUDA(cudaMalloc(reinterpret_cast<void**>(&data_), count_ * sizeof(float)));
    sim::poke(data_, start.data(), count_ * sizeof(float));
  }
  explicit Parameters(size_t count) : Parameters(Block(count)) {}
  ~Parameters() { EXPECT_CUDA(cudaFree(data_)); }
  Parameters(const Parameters&) = delete;
  Parameters& operator=(const Parameters&) = delete;
  float* data() const { return data_; }
  float operator[](size_t i) const { return get()[i]; }
  Block get() const {
    Block values(count_);
    sim::peek(values.data(), data_, count_ * sizeof(float));
    return values;
  }

 private:
  const size_t count_;
  float* data_ = nullptr;
};

inline ga_config on(const ga_config& config, const Stream& stream) {
  ga_config c = config;
  c.device = GA_DEVICE_CUDA;
  c.device_ordinal = stream.device();
  c.stream = static_cast<cudaStream_t>(stream);
  return c;
}

}  // namespace ga::test
