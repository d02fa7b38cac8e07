// SPDX-License-Identifier: Apache-2.0
// Batch normalisation on the CPU: cuts tensors into items for the threads, and updates the channels
// from the sums over the items.
//
// [samples, channels, positions] is processed a few channels at a time, so that the second pass of
// channels that are normalised by their own statistics reads them from the cache. [samples,
// positions, channels] is a matrix with a column for each channel; if it is narrow, several rows
// are folded to one, to fill registers.
#pragma once

#include <memory>
#include <new>

#include "backend/cpu/batchnorm_kernels.hpp"
#include "backend/cpu/threads.hpp"

namespace ga::cpu {

class BatchNorm {
 public:
  BatchNorm(Threads& threads, const BnKernels& kernels, int64_t cache_bytes)
      : threads_(threads), kernels_(kernels), cache_(cache_bytes) {}

  void reserve(int64_t channels);
  int64_t bytes() const { return bytes_; }

  // See Backend.
  void statistics(const BnTask& task);
  void take(const BnTask& task, const BnGiven& given);
  void finalize(const BnTask& task);
  void write_record(const BnTask& task, const BnPassEnd& end, double* record);
  void merge_records(const BnTask& task, const BnPassEnd& end, const BnRecords& records);
  void forward(const BnTask& task, bool taking);
  void backward_sums(const BnTask& task);
  void backward(const BnTask& task, bool summing);

 private:
  struct Cut;
  struct Statistics;
  struct Products;
  template <class Pass>
  struct Writes;
  struct Forward;
  struct Backward;
  template <class Sum>
  void sum(const BnTask& task);
  template <class Map>
  void map(const BnTask& task);
  template <class Sum, class Map>
  void sum_and_map(const BnTask& task);
  template <class Pass>
  void prepare(const BnTask& task, int64_t columns);
  template <class Body>
  void run(int64_t units, int64_t elements, const Body& body);
  template <class Body>
  void run_blocks(const BnTask& task, const Cut& cut, int64_t block, const Body& body);
  bool past_caches(const BnTask& task) const;
  template <class Pass>
  BnNumbers numbers_from(const BnTask& task, int64_t columns, int64_t first) const;
  int64_t planes_at_once(const BnTask& task, int64_t most) const;

  struct Free {
    void operator()(double* p) const { ::operator delete (p, std::align_val_t{64}); }
  };
  using Doubles = std::unique_ptr<double, Free>;

  Threads& threads_;
  const BnKernels& kernels_;
  int64_t cache_;
  int64_t channels_ = 0;
  int64_t bytes_ = 0;
  Doubles sums_;     // BnSums of all slices
  Doubles numbers_;  // BnNumbers
};

}  // namespace ga::cpu
