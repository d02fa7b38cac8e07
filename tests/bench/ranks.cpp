// SPDX-License-Identifier: Apache-2.0
//
// What ga_step costs over MPI ranks, over what it costs alone, beside a bare MPI_Allreduce of as many
// bytes in the same rounds. Run by `tests/bench/run ranks`.
#include <mpi.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
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

// A context with one parameter, and the seconds of its steps.
class Steps {
 public:
  explicit Steps(ga_comm* comm, ga_comm_wire wire = GA_COMM_WIRE_EXACT)
      : parameters_(kCount), gradient_(kCount, 1e-3f) {
    ga_config config;
    check(ga_config_init(&config, sizeof config));
    config.num_threads = 1;
    check(ga_context_create(&config, &ctx_));
    ga_optimizer o;
    check(ga_optimizer_init(&o, sizeof o, GA_OPTIMIZER_SGD, GA_FLAVOR_TORCH));
    check(ga_group_add(ctx_, &o, nullptr));
    check(ga_param_add(ctx_, 0, "p", parameters_.data(), GA_F32, 1, &kCount, nullptr, nullptr));
    if (!comm) return;
    ga_comm_options options;
    check(ga_comm_options_init(&options, sizeof options));
    options.wire = wire;
    check(ga_context_set_comm(ctx_, comm, &options));
  }
  ~Steps() { ga_context_destroy(ctx_); }

  void round() {
    const void* gradients[] = {gradient_.data()};
    check(ga_accumulate(ctx_, gradients, 1, 1, nullptr));
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
  ga_comm* const exact_comm = join();
  ga_comm* const narrow_comm = join();
  {
    Steps alone(nullptr), exact(exact_comm), narrow(narrow_comm, GA_COMM_WIRE_BF16);
    std::vector<float> sums(kCount, 1);
    std::vector<double> bare;
    for (int round = 0; round < kRounds; ++round) {
      alone.round();
      exact.round();
      narrow.round();
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
      std::printf("MPI_Allreduce, bare                         %8.1f ms\n", 1e3 * allreduce);
      std::printf("ga_step, one rank alone                     %8.1f ms\n", 1e3 * own);
      for (auto* steps : {&exact, &narrow}) {
        const double over = steps->median() - own;
        std::printf("ga_step over the ranks, %s  %8.1f ms: %.2f of the bare one%s\n",
                    steps == &exact ? "exact, more       " : "bf16 on the wire, more", 1e3 * over,
                    over / allreduce, steps == &exact ? " (<= 1.10)" : "");
      }
    }
  }
  ga_comm_destroy(exact_comm);
  ga_comm_destroy(narrow_comm);
  MPI_Finalize();
  return 0;
}
