// SPDX-License-Identifier: Apache-2.0
// The end of a window on hosts, which tell each other what they bring, and then exchange that alone. With
// ga_comm_options.overlap, gradients travel as soon as they are ready, on a thread of the library's where the transport
// allows it.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "core/background.hpp"
#include "ranks/exchange.hpp"

namespace ga {

class HostExchange final : public Exchange {
 public:
  HostExchange(const Stages& stages, RankState& state, std::shared_ptr<Comm> comm,
               const ga_comm_options& options);
  ~HostExchange() override;

  bool is_early(size_t param) const override {
    return background_ && !model_.params.takes_rows(param);
  }
  bool begin_end(WindowTotals& totals, bool discards) override;
  StepSums reduce(const WindowTotals& totals, Params units, const WriteWindow& write) override;
  OverRanks over_ranks() override;
  void discard() override;

 private:
  void run_ready() override;

  bool begin_step(WindowTotals& totals);
  void sum_gradients();
  void hold_sums();
  void gather_rows();
  void gather_rows_of(ga_param id, const uint64_t* counts);
  void add_sums();
  void merge_statistics(std::vector<double>& out);

  void agree_on_tensors();
  void begin_buckets();
  void await(size_t item);
  void run_item(size_t item, Backend& adder);
  void finish_buckets();

  // Of the ending window.
  WindowSums sums_ = {};
  int64_t micro_batches_ = 0;         // of this rank
  bool exchanged_ = false;            // there were gradients to add
  std::vector<uint64_t> row_counts_;  // [parameters with rows, ranks]

  // Of an exchange in the background. Item 0 is the agreement on the parameters, the others are buckets. What its thread
  // touches, here, in Exchange and in Transfer, no other thread touches meanwhile: what runs has been released, and
  // stops first.
  uint64_t begun_with_ = 0;  // tensors_digest()
  double begun_weight_ = 0;  // of this rank, which adds no more micro-batches
  // With ga_config.eager: the last item with a part of each parameter, and how many parameters Eager has begun
  // with whose sums are there when an item has run.
  std::vector<size_t> last_items_, begun_by_;
  std::unique_ptr<Backend> own_backend_;    // one thread, for what runs in the background
  std::unique_ptr<Background> background_;  // NULL: the transport allows no other thread
};

}  // namespace ga
