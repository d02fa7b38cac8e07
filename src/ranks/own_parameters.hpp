// SPDX-License-Identifier: Apache-2.0
// Ranks that have parameters, or parts of them, of their own (GA_SHARD_PARAMETERS). The program's framework has reduced
// the gradients; a window is clipped, skipped and counted as that of one process. For that, each rank tells the others in
// one message what it brings: weights, and a binned sum of squares for each group, which says if something is not finite.
#pragma once

#include <cstdint>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "model/model.hpp"
#include "model/own_parts.hpp"
#include "numbers/binned.hpp"
#include "ranks/agreement.hpp"
#include "ranks/stages.hpp"

namespace ga {

class TableWriter;

class OwnParameters final : public Ranks, private Agreement {
 public:
  // Takes the communicator; throws if another context has it, or if the context has what does not go with this.
  OwnParameters(const Stages& stages, RankState& state, std::shared_ptr<Comm> comm,
                const ga_comm_options& options);
  ~OwnParameters() override;

  // For ga_context_set_comm: throws unless all ranks agree.
  void agree();

  // See model/ranks.hpp. rank() and ranks() are those of a context alone: what it has is its own.
  bool alone() const override { return false; }
  int64_t bytes() const override;
  void forget_settings(bool tensors) override {
    checked_ = settings_known_ = false;
    parts_known_ = parts_known_ && !tensors;
    laid_out_ = laid_out_ && !tensors;
  }
  bool has_own_parameters() const override { return true; }
  Samples samples() const override { return {data_ranks(), data_rank(), reduced_over_}; }
  size_t place() const override { return static_cast<size_t>(comm_->rank()); }
  bool knows(const std::string& name) const override { return names_.count(name) > 0; }
  void meet_ahead(double weight) override;
  double weight_ahead(double) const override { return weight_ahead_; }
  const BinnedTask* sum_ahead(ga_param param) override;
  bool begin_end(WindowTotals& totals, bool discards) override;
  StepSums reduce(const WindowTotals& totals, Params units, const WriteWindow& write) override;
  void discard() override;
  bool has_failed() const override { return comm_->has_failed(); }
  void on_all_ranks(const char* what, bool by_one,
                    const std::function<void(const Ready&)>& work) override;
  bool has_one_path(const char* what, const char* path) override;
  std::vector<std::string> gather_texts(const char* what, std::string own) override {
    return Agreement::gather_texts(what, std::move(own));
  }

 private:
  enum Call : int64_t { kSetComm = 1, kFull, kStep, kDiscard, kOther };

  // What a rank says of itself, before the sums of its groups.
  struct Message {
    int64_t call;
    int64_t number;  // of the call
    uint64_t name;   // of the function: a hash
    uint64_t settings;
    int64_t fresh;   // its parts are not those that the ranks have agreed on
    int64_t failed;  // it cannot make the call
    int64_t data_rank;
    double micro_batches, weighted;
    double weight;
  };
  static constexpr int64_t kMessageWords = sizeof(Message) / sizeof(int64_t);
  static constexpr int64_t kSumWords = sizeof(BinnedSum) / sizeof(int64_t);
  static constexpr size_t kSums = 20;  // that fit behind it, so that all calls exchange as much
  static constexpr int64_t kWords = kMessageWords + kSums * kSumWords;

  struct PartOfRank : OwnPart {
    int32_t rank;
  };

  Message message(Call call, const char* function);
  // Sends the message and the sums, and takes those of all ranks. Throws on every rank if one makes another call
  // (but ga_discard in place of ga_step), has other settings, or has failed.
  void gather(const Message& own, const std::optional<Error>& failure, const char* function);
  const Message& message_of(int32_t rank) const;
  BinnedSum sum_of(int32_t rank, size_t group) const;
  void check_comm_settings() const;
  void check() const;
  void check_param(size_t param) const;
  // What the ranks bring to the window, by their messages; throws if they cannot.
  WindowSums brought() const;
  // Sums squares of what this rank has in the window, but for what was summed ahead.
  void sum_squares();
  void lay_out_sums();
  BinnedTask task_of(size_t param);
  Source gradient_of(size_t param) const;
  // The parts of all ranks are to be those of whole parameters.
  void agree_on_parts(const char* what);
  static size_t most_cut_axis(const std::vector<PartOfRank>& parts);
  void check_whole(const char* what, const std::string& name,
                   const std::vector<PartOfRank>& parts) const;
  OwnParts own_parts() const { return OwnParts::of(model_.params, samples()); }
  bool is_fresh();
  bool is_anyone_fresh() const;  // of the last messages
  Items items() const;
  uint64_t settings_digest();
  int32_t data_ranks() const {
    return options_.data_ranks > 0 ? options_.data_ranks : comm_->ranks();
  }
  int32_t data_rank() const {
    return options_.data_rank >= 0 ? options_.data_rank : comm_->rank() % data_ranks();
  }

  const Stages stages_;
  Model& model_;
  RankState& state_;
  const ga_comm_options options_;
  const double reduced_over_;
  int64_t calls_ = 0;
  bool checked_ = false;  // nothing has changed since check()
  bool settings_known_ = false;
  uint64_t settings_ = 0;
  bool parts_known_ = false;  // parts_ is the digest of what this rank has now
  uint64_t parts_ = 0, agreed_parts_ = 0;
  bool has_agreed_ = false;
  std::set<std::string> names_;  // of the parameters of all ranks
  std::vector<char> counts_;     // by parameter: its squares are this rank's to count

  // Of the ending window.
  std::vector<BinnedSum> sums_;  // of the groups
  std::vector<BinnedSum> rest_;  // of all ranks: sums that do not fit
  std::vector<uint64_t> sent_, gathered_;
  std::vector<BinnedTask> tasks_, ahead_;  // ahead_: by parameter
  std::vector<BinnedSum> chunks_;          // sums of chunks, parameter behind parameter
  std::vector<size_t> first_chunks_;       // of each parameter
  bool laid_out_ = false;                  // these are those of the parameters that there are
  double weight_ahead_ = 0;
  WindowSums window_ = {};
  int64_t nonfinite_at_ = -1;  // as Control has it
};

}  // namespace ga
