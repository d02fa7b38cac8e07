// SPDX-License-Identifier: Apache-2.0
// What a context does together with the contexts of other ranks, over a communicator: it checks that all
// make the same call with the same settings, adds up gradients and sums at the end of a window, and tells
// whether a call has failed on some rank.
//
// Gradients are added in pieces (division.hpp): rank q receives its piece from every rank and adds them in
// the order of the ranks, then the pieces are gathered. So the sums have the same bits on every rank and
// with every transport, and each rank has measured its piece in the same pass. What travels together,
// buckets.hpp says. Where the optimizer is sharded, the sums stay where they were added, and updated
// parameters are gathered.
//   exchange.cpp            calls of all ranks
//   exchange_window.cpp     the end of a window: what ranks bring, and the sums
//   exchange_gradients.cpp  gradients
//   exchange_device.cpp     the end of a window on a device
//   exchange_shards.cpp     who has what, updated parameters and pieces of state
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "core/background.hpp"
#include "model/model.hpp"
#include "model/preparation.hpp"
#include "ranks/agreement.hpp"
#include "ranks/buckets.hpp"
#include "ranks/rank_state.hpp"
#include "ranks/stages.hpp"

namespace ga {

class Exchange final : public Ranks, private Agreement {
 public:
  // Takes the communicator; throws if another context has it.
  Exchange(const Stages& stages, RankState& state, std::shared_ptr<Comm> comm,
           const ga_comm_options& options);
  ~Exchange() override;
  Exchange(const Exchange&) = delete;
  Exchange& operator=(const Exchange&) = delete;

  // For ga_context_set_comm: throws unless all ranks agree, and hands out rank 0's state if asked to.
  void agree();

  // See model/ranks.hpp.
  bool alone() const override { return false; }
  int32_t rank() const override { return comm_->rank(); }
  int32_t ranks() const override { return comm_->ranks(); }
  bool shards() const override { return options_.shard == GA_SHARD_OPTIMIZER; }
  bool divides(ga_param id) const override {
    return shards() && model_.params.keeper(id) != Keeper::kAll;
  }
  bool on_device() const override;
  int64_t bytes() const override;
  void watch(bool on) override;
  void forget_settings(bool tensors) override {
    settings_known_ = false;
    tensors_known_ = tensors_known_ && !tensors;
  }
  uint64_t checksum_for_device() override { return on_device() ? settings_digest() : 0; }
  void divide() override;
  void check_options(const Subject& of, const ga_param_options& options) const override;
  std::function<void()> divide_anew() override;
  void check_keepers(const Rules& by) const override;
  int64_t measured_count(ga_param id, int64_t count) const override {
    return on_device() ? own_piece(id).count : count;
  }
  void describe_measure(ga_param id, UpdateTask& measure) override;
  void describe_units(ga_param id, const UnitPattern& pattern, UnitTask& units) const override;
  void prepare_release() override {
    if (overlaps()) stages_.preparation.prepare();
  }
  void release_ready() override;
  double weight_ahead(double) const override { return 0; }
  bool has_begun() const override { return begun_; }
  bool is_early(size_t param) const override { return background_ && !has_rows(param); }
  bool is_check_due() const override;
  bool begin_end(WindowTotals& totals, bool discards) override;
  void add_gradients() override;
  OverRanks over_ranks() override;
  void exchange_all(const WindowTotals& totals, Params& norms, Params units) override;
  void discard() override;
  bool has_failed() const override { return comm_->has_failed(); }
  void add_layer_norms() override;
  void share_unit_totals() override;
  bool makes_update(ga_param id) const override { return shards() || maker(id) == rank(); }
  void hand_round(float* data, int64_t count, ga_param id) override;
  void end_sweep(const Subject& of, const BnTask& task, const BnSweepEnd& end,
                 int64_t micro_batches, const std::function<void()>& ready) override;
  void on_all_ranks(const char* what, bool by_one,
                    const std::function<void(const Ready&)>& work) override;
  bool has_open_window() const override;
  std::vector<uint64_t> dropped_micros() const override;
  std::vector<std::string> gather_texts(const char* what, std::string own) override {
    return Agreement::gather_texts(what, std::move(own));
  }
  void hand_round_bytes(int32_t q, int64_t bytes, std::vector<int64_t>& piece,
                        const std::function<void(const TakePiece&)>& read,
                        const TakePiece& take) override;
  void begin_sharded_call(const char* what) override;
  void gather_parameters(const std::function<Changed(ga_param)>& changed,
                         const Ready& ready) override;
  void each_piece(ga_param id, const DividedArray& array, const TakePiece& take) override;

 private:
  static constexpr int64_t kRowBytes = int64_t{8} << 20;  // of rows, at most, in one exchange
  static constexpr uint64_t kDense = ~uint64_t{0};        // in place of a number of rows
  enum Call : int64_t { kSetComm = 1, kBegin, kStep, kDiscard, kOther };

  // Which rank has what of each parameter.
  struct Parts {
    std::vector<Division> divisions;
    std::vector<int64_t> counts;                       // elements
    std::vector<Keeper> keepers;                       // when it was divided
    std::vector<std::vector<Partial>> layer_partials;  // where the state is not sharded
  };

  // The first words of every collective call, the same number of them on all ranks.
  struct Header {
    int64_t call;
    int64_t number;  // of the call
    uint64_t name;   // of the function: a hash
    uint64_t settings;
    uint64_t arrays;  // arrays_digest()
    int64_t params;
    int64_t next_key;  // of random bits: ParamList::next_key()
    int64_t open;      // the window holds something
    int64_t failed;    // end_sweep(): this rank cannot make the call
    uint64_t dropped;  // begin_call(): dropped_micros of this rank's last result
    WindowSums sums;
  };
  static constexpr int64_t kHeaderWords = sizeof(Header) / sizeof(int64_t);

  static constexpr int32_t kFloats[] = {GA_F32, GA_F64, GA_F16, GA_BF16};

  // Whether gradients are exchanged in the background, as soon as they are ready.
  bool overlaps() const { return options_.overlap != 0; }
  // Runs an exchange of gradients; the window is invalid if it fails with some of them on their way.
  template <class Work>
  void or_lose_window(Work&& exchange);
  // The beginning of a call that is to succeed on all ranks or on none: checks that all make it. what: the function
  // that was called.
  void begin_call(const char* what);
  void check_empty(const char* what) const;  // throws, on every rank, if a window was not empty
  Header header(Call call, const char* function);
  void gather_headers(const Header& own, const std::vector<uint64_t>& payload);
  const Header& header_of(int32_t rank) const;
  const uint64_t* payload_of(int32_t rank) const;
  void check_calls(const char* function);
  uint64_t own_dropped_micros() const;
  void check_settings();
  uint64_t arrays_digest() const;
  void share_arrays(const char* what);
  void check_tensors() const;
  void check_tensors_of_device() const;
  uint64_t tensors_digest();
  uint64_t settings_digest();  // of all that changes numbers
  Items tensor_items() const;
  Items settings_items() const;  // both
  void hand_out();

  // Whether the transport adds up. Nothing but sums: of a maximum, MPI and NCCL lose a NaN that is among other numbers.
  bool adds_there(Reduction reduction) const {
    return options_.adder == GA_COMM_ADDER_TRANSPORT && is_sum(reduction);
  }
  // Whether a transport may write to the context's arrays even after they are freed.
  bool may_write_late() const { return comm_->may_write_late(); }
  // Throws if what earlier windows have queued has failed, which may have reached parameters.
  void check_queued();
  // The end of a window, where hosts meet: replaces the totals of this rank by those of all, and returns false if
  // another rank discards the window.
  bool begin_step(WindowTotals& totals);
  void sum_gradients();
  void add_sums();
  // On a device: says of all gradients that their sums are there (Held::kReduced). Before any gradient has moved, throws
  // if ranks turn out to have different parameters, and returns false if a rank turns out to discard the window.
  bool hold_all(bool discards);
  // Puts the sums there. measured: the parameters whose sums are measured. units: those clipped in parts.
  void put_sums(const WindowTotals& totals, Params measured, Params units);
  Range own_piece(ga_param id) const;  // what this rank measures of a gradient
  int32_t maker(ga_param id) const { return parts_.divisions[static_cast<size_t>(id)].owner; }
  // Divides anew. Returns the division that was before if it has changed.
  std::optional<Parts> check_division();
  void take_parts(Parts parts) noexcept;
  bool stays(ga_param id) const;
  bool is_unmeasured(size_t param) const;
  Range reduced_range(ga_param id) const;
  int32_t wire_of(const Param& p) const;
  Array reduced(ga_param id) const;
  Array accumulator_of(ga_param id) const;
  // f(segment) for what this rank has of a packed bucket.
  template <class F>
  void each_own(const Bucket& bucket, F&& f) const {
    for (size_t k = bucket.first; k < bucket.end; ++k)
      if (buckets_.segments()[k].rank == rank()) f(buckets_.segments()[k]);
  }
  // f(bucket) for the group that begins with a bucket; returns the first bucket of the next group.
  template <class F>
  size_t each_of_group(size_t first, F&& f) const {
    const size_t end = buckets_.end_of_group(first);
    for (size_t k = first; k < end; ++k) f(buckets_.list()[k]);
    return end;
  }
  void reserve(bool gradients);
  void reserve_sums();
  static FinishTask move(const Array& from, const Array& to, int64_t count) {
    FinishTask task = {};
    task.gradient = identity({from.data, from.format, 1, nullptr});
    task.f64 = from.format == GA_F64;
    task.target = to;
    task.count = count;
    return task;
  }
  void run_moves();
  bool brings(ga_param id) const;
  const int64_t* contributed_to(ga_param id) const;
  Array in_room(size_t at, int32_t dtype) const {
    return {static_cast<char*>(room_.data()) + at, dtype};
  }
  void clear(const Bucket& bucket);
  void pack(const Bucket& bucket, const Array& to);
  void send(const Bucket& bucket);
  void add_blocks(const Bucket& bucket);
  void gather_sums(const Bucket& bucket);
  static void add_partials(const Partial* partials, int64_t count, ParamSums& sums);
  void gather_changed(const std::function<Changed(ga_param)>& changed);
  size_t gather(size_t first);
  void make_buckets(const std::function<bool(ga_param)>& which);
  size_t run(size_t first);
  void run_ready();
  void begin_buckets();
  void run_item(size_t item, Backend& adder);
  void finish_buckets();
  void agree_on_tensors();
  void check_state();
  void agree_on_sweep(const Subject& of, int64_t micro_batches, const std::function<void()>& ready);
  double* room_for_records(int64_t words);
  void exchange_records(const BnTask& task, const BnSweepEnd& end, int64_t words);
  void end_open_sweeps();
  int64_t longest_record() const;
  void check_capturing(const char* what) const;
  const uint64_t* send_brought();
  uint64_t shape_digest() const;
  bool is_ready(const Bucket& bucket) const;
  void await(size_t item);
  void release_on_device();
  void begin_on_device();
  void unpack(const Bucket& bucket);
  void hold_sums();
  void measure_own();
  int64_t piece_of(size_t param, int64_t grain) const;
  Parts divided(Parts parts) const;
  bool has_rows(size_t param) const;
  void gather_rows();
  void gather_rows_of(ga_param id, const uint64_t* counts);
  void hand_out_rows(ga_param id);
  void merge_statistics(std::vector<double>& out);

  const Stages stages_;
  Model& model_;
  RankState& state_;
  ga_comm_options options_;
  int64_t calls_ = 0;
  bool settings_known_ = false, tensors_known_ = false;
  uint64_t settings_ = 0, tensors_ = 0;
  size_t capacity_ = 0;  // words that travel behind the header
  std::vector<uint64_t> sent_, gathered_;
  std::vector<uint64_t> payloads_;  // of all ranks, where they do not fit behind the header
  size_t payload_words_ = 0;

  // This rank's record, then those of all ranks: of the end of a sweep, or on a device of a window.
  Buffer records_;

  // On a device.
  bool watching_ = false;
  uint64_t agreed_on_ = 0;     // shape_digest() when all ranks last agreed
  bool captured_ = false;      // a window is in some graph
  std::vector<char> brought_;  // by parameter: this rank has a gradient
  std::vector<uint64_t> brought_bits_;
  Buffer device_bits_;                     // the same bits
  Buffer pieces_;                          // this rank's, then those of all ranks
  Buffer device_partials_, device_pairs_;  // of one bucket

  // Of the ending window.
  WindowSums sums_ = {};
  int64_t micro_batches_ = 0;  // of this rank
  bool exchanged_ = false;     // there were gradients to add
  bool moved_ = false;
  std::vector<char> touched_;         // by parameter, on any rank
  std::vector<uint64_t> row_counts_;  // [parameters with rows, ranks]
  std::vector<ParamSums> param_sums_;
  Buckets buckets_;

  // Of an exchange in the background. Item 0 is the agreement on the parameters, the others are buckets.
  // Nothing here is touched by two threads at a time: what runs has been released, and stops first.
  bool begun_ = false;
  uint64_t begun_with_ = 0;  // tensors_digest()
  double begun_weight_ = 0;  // of this rank, which adds no more micro-batches
  size_t released_ = 0;
  // With ga_config.eager: the last item with a part of each parameter, and how many parameters Eager has begun
  // with whose sums are there when an item has run.
  std::vector<size_t> last_items_, begun_by_;
  std::unique_ptr<Backend> own_backend_;    // one thread, for what runs in the background
  Backend* adder_;                          // which runs the kernels of the buckets now
  std::unique_ptr<Background> background_;  // NULL: the transport allows no other thread

  Parts parts_;
  Buffer room_;               // of a group of buckets
  std::vector<Buffer> wide_;  // by parameter: sums in f32 of a 16-bit accumulator
  std::vector<Partial> partials_;
  std::vector<AccumulateTask> tasks_;
  std::vector<int64_t> starts_;  // of the tasks in the block
  std::vector<FinishTask> moves_;
  std::vector<Pair> pairs_;
  std::vector<NormTask> norms_;
  std::vector<Numbers> numbers_;
  std::vector<ga_param> measured_;
};

}  // namespace ga
