// SPDX-License-Identifier: Apache-2.0
//
// What ga_step costs over MPI ranks more than alone, in several ways, beside a bare MPI_Allreduce of as many
// bytes in the same rounds. Run by `tests/bench/run ranks`.
#include <mpi.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <string>
#include <vector>

#include "gradaccum/gradaccum.h"

namespace {

constexpr int64_t kCount = 25000000;
constexpr int kRounds = 15;

void check(ga_status status) {
  if (status == GA_OK) return;
  std::fprintf(stderr, "%s\n", ga_last_error());
  MPI_Abort(MPI_COMM_WORLD, 1);
}

// A context with one parameter, or with tensors of 100000 elements, and the seconds of its steps.
class Steps {
 public:
  explicit Steps(ga_comm* comm, const ga_comm_options* options = nullptr, int64_t tensors = 1)
      : parameters_(kCount), gradient_(kCount, 1e-3f) {
    ga_config config;
    check(ga_config_init(&config, sizeof config));
    config.num_threads = 1;
    check(ga_context_create(&config, &ctx_));
    ga_optimizer o;
    check(ga_optimizer_init(&o, sizeof o, GA_OPTIMIZER_SGD, GA_FLAVOR_TORCH));
    check(ga_group_add(ctx_, &o, nullptr));
    const int64_t count = kCount / tensors;
    for (int64_t t = 0; t < tensors; ++t) {
      check(ga_param_add(ctx_, 0, ("p" + std::to_string(t)).c_str(),
                         &parameters_[static_cast<size_t>(t * count)], GA_F32, 1, &count, nullptr,
                         nullptr));
      gradients_.push_back(&gradient_[static_cast<size_t>(t * count)]);
    }
    if (comm) check(ga_context_set_comm(ctx_, comm, options));
  }
  ~Steps() { ga_context_destroy(ctx_); }

  void round() {
    check(ga_accumulate(ctx_, gradients_.data(), gradients_.size(), 1, nullptr));
    MPI_Barrier(MPI_COMM_WORLD);
    const double start = MPI_Wtime();
    check(ga_step(ctx_, nullptr));
    seconds_.push_back(MPI_Wtime() - start);
  }
  double median() {
    std::sort(seconds_.begin(), seconds_.end());
    return seconds_[seconds_.size() / 2];
  }

 private:
  std::vector<float> parameters_, gradient_;
  std::vector<const void*> gradients_;
  ga_context* ctx_ = nullptr;
  std::vector<double> seconds_;
};

ga_comm* join() {
  ga_comm_config c;
  check(ga_comm_config_init(&c, sizeof c, GA_COMM_MPI));
  c.mpi_comm = MPI_Comm_c2f(MPI_COMM_WORLD);
  ga_comm* comm = nullptr;
  check(ga_comm_create(&c, &comm));
  return comm;
}

}  // namespace

int main(int argc, char** argv) {
  MPI_Init(&argc, &argv);
  int rank = 0, ranks = 0;
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  MPI_Comm_size(MPI_COMM_WORLD, &ranks);
  struct Way {
    const char* name;
    int64_t tensors;
    ga_comm_wire wire;
    ga_shard shard;
    ga_comm_adder adder;
    ga_comm* comm = nullptr;
    std::unique_ptr<Steps> steps = nullptr;
  };
  Way ways[] = {
      {"exact", 1, GA_COMM_WIRE_EXACT, GA_SHARD_NONE, GA_COMM_ADDER_LIBRARY},
      {"exact, 250 tensors", 250, GA_COMM_WIRE_EXACT, GA_SHARD_NONE, GA_COMM_ADDER_LIBRARY},
      {"sharded", 1, GA_COMM_WIRE_EXACT, GA_SHARD_OPTIMIZER, GA_COMM_ADDER_LIBRARY},
      {"bf16 on the wire", 1, GA_COMM_WIRE_BF16, GA_SHARD_NONE, GA_COMM_ADDER_LIBRARY},
      {"added by MPI", 1, GA_COMM_WIRE_EXACT, GA_SHARD_NONE, GA_COMM_ADDER_TRANSPORT},
  };
  for (Way& w : ways) {
    w.comm = join();
    ga_comm_options options;
    check(ga_comm_options_init(&options, sizeof options));
    options.wire = w.wire;
    options.shard = w.shard;
    options.adder = w.adder;
    w.steps = std::make_unique<Steps>(w.comm, &options, w.tensors);
  }
  Steps alone(nullptr);
  std::vector<float> sums(kCount, 1);
  std::vector<double> bare;
  for (int round = 0; round < kRounds; ++round) {
    alone.round();
    for (Way& w : ways) w.steps->round();
    MPI_Barrier(MPI_COMM_WORLD);
    const double start = MPI_Wtime();
    MPI_Allreduce(MPI_IN_PLACE, sums.data(), static_cast<int>(kCount), MPI_FLOAT, MPI_SUM,
                  MPI_COMM_WORLD);
    bare.push_back(MPI_Wtime() - start);
    std::fill(sums.begin(), sums.end(), 1.0f);
  }
  std::sort(bare.begin(), bare.end());
  const double allreduce = bare[bare.size() / 2], own = alone.median();
  if (rank == 0) {
    std::printf("%d ranks, %lld M parameters, f32\n", ranks,
                static_cast<long long>(kCount / 1000000));
    std::printf("MPI_Allreduce, bare                      %8.1f ms\n", 1e3 * allreduce);
    std::printf("ga_step, one rank alone                  %8.1f ms\n", 1e3 * own);
    std::printf("ga_step over the ranks, more:\n");
  }
  for (Way& w : ways) {
    const double over = w.steps->median() - own;
    if (rank == 0)
      std::printf("  %-38s %8.1f ms: %.2f of the bare one%s\n", w.name, 1e3 * over,
                  over / allreduce, &w == ways ? " (<= 1.10)" : "");
    w.steps.reset();
    ga_comm_destroy(w.comm);
  }
  MPI_Finalize();
  return 0;
}
