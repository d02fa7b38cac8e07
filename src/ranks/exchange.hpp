// SPDX-License-Identifier: Apache-2.0
// What a context does together with the contexts of other ranks, over a communicator: it checks that all
// make the same call with the same settings, adds up gradients and sums at the end of a window, and tells
// whether a call has failed on some rank. Which part of a parameter a rank has, divisions.hpp knows, and transfer.hpp moves
// gradients and updated parameters.
//   exchange.cpp         calls of all ranks, their settings, and layers
//   exchange_state.cpp   updates and state, of which a rank may have a part alone
// What follows are the two ways in which a window ends: that of hosts, which know what each rank brings
// (host_exchange.hpp), and that of devices, whose hosts wait for nothing but a transport that needs it
// (device_exchange.hpp).
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "model/model.hpp"
#include "ranks/agreement.hpp"
#include "ranks/divisions.hpp"
#include "ranks/rank_state.hpp"
#include "ranks/stages.hpp"
#include "ranks/transfer.hpp"

namespace ga {

class Exchange : public Ranks, protected Agreement {
 public:
  ~Exchange() override;
  Exchange(const Exchange&) = delete;
  Exchange& operator=(const Exchange&) = delete;

  // For ga_context_set_comm: throws unless all ranks agree, and hands out rank 0's state if asked to.
  virtual void agree();

  // See model/ranks.hpp.
  bool alone() const override { return false; }
  int32_t rank() const override { return comm_->rank(); }
  int32_t ranks() const override { return comm_->ranks(); }
  bool shards() const override { return divisions_.sharded(); }
  bool divides(ga_param id) const override {
    return shards() && model_.params.keeper(id) != Keeper::kAll;
  }
  int64_t bytes() const override;
  void forget_settings(bool tensors) override {
    settings_known_ = false;
    tensors_known_ = tensors_known_ && !tensors;
  }
  void divide() override { divisions_.divide(); }
  std::function<void()> divide_anew() override { return divisions_.divide_anew(); }
  void check_keepers(const Rules& by) const override { divisions_.check_keepers(by); }
  void describe_measure(ga_param id, UpdateTask& measure) override {
    divisions_.describe_measure(id, measure);
  }
  void describe_units(ga_param id, const UnitPattern& pattern, UnitTask& units) const override {
    divisions_.describe_units(id, pattern, units);
  }
  double weight_ahead(double) const override { return 0; }
  bool has_begun() const override { return begun_; }
  void prepare_release() override;
  void release_ready() override;
  bool is_check_due() const override;
  bool has_failed() const override { return comm_->has_failed(); }
  void add_layer_norms() override;
  void share_unit_totals() override;
  bool makes_update(ga_param id) const override {
    return shards() || divisions_.owner(id) == rank();
  }
  void hand_round(float* data, int64_t count, ga_param id) override;
  void end_pass(const Subject& of, const BnTask& task, const BnPassEnd& end, int64_t micro_batches,
                const std::function<void()>& ready) override;
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

 protected:
  enum Call : int64_t { kSetComm = 1, kBegin, kStep, kDiscard, kOther };

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
    int64_t failed;    // end_pass(): this rank cannot make the call
    uint64_t dropped;  // begin_call(): dropped_micros of this rank's last result
    WindowSums sums;
  };
  static constexpr int64_t kHeaderWords = sizeof(Header) / sizeof(int64_t);

  // Takes the communicator; throws if another context has it.
  Exchange(const Stages& stages, RankState& state, std::shared_ptr<Comm> comm,
           const ga_comm_options& options);
  // First in every destructor: an exchange that was given up may go on.
  void keep_late_memory() {
    if (may_write_late()) model_.backend->keep_memory();
  }

  // ---- Of hosts or of devices ----

  // Exchanges what is ready, in the background or on a second stream.
  virtual void run_ready() = 0;
  // Throws if there is a parameter that this exchange cannot have.
  virtual void check_tensors() const {}
  // Whether this rank has a gradient of a parameter that travels.
  virtual bool brings(ga_param id) const { return model_.params[id].held() != Held::kNothing; }

  // ---- For both ----

  // Whether gradients are exchanged in the background, as soon as they are ready.
  bool overlaps() const { return options_.overlap != 0; }
  // Runs an exchange of gradients; the window is invalid if it fails with some of them on their way.
  template <class Work>
  void or_lose_window(Work&& exchange) {
    try {
      exchange();
    } catch (...) {
      keep_late_memory();
      if (moved_) model_.window.invalidate();
      model_.speculation->discard();
      throw;
    }
  }
  // Moves and adds up a group of buckets; returns the first bucket of the next group.
  size_t run(size_t first) {
    moved_ = true;
    return transfer_.run(first);
  }
  // Whether all gradients in it are there.
  bool is_ready(const Bucket& bucket) const;
  Header header(Call call, const char* function);
  void gather_headers(const Header& own, const std::vector<uint64_t>& payload);
  const Header& header_of(int32_t rank) const;
  const uint64_t* payload_of(int32_t rank) const;
  void check_calls(const char* function);
  void check_settings();
  uint64_t tensors_digest();
  uint64_t settings_digest();  // of all that changes numbers
  Items tensor_items() const;
  void share_arrays(const char* what);
  void check_state();

  // A checksum of what decides how much is exchanged, which changes between windows alone. Where it is agreed_on_, and
  // the transport works on a stream, the hosts need not meet.
  uint64_t shape_digest() const;
  // Throws if the hosts would have to meet while the stream is being captured.
  void check_capturing(const char* what) const;
  [[noreturn]] static void refuse_capture(const char* why);
  double* room_for_records(int64_t words);
  void exchange_records(const BnTask& task, const BnPassEnd& end, int64_t words);
  int64_t longest_record() const;

  const Stages stages_;
  Model& model_;
  RankState& state_;
  const ga_comm_options options_;
  Divisions divisions_;
  Transfer transfer_;
  int64_t calls_ = 0;
  size_t capacity_ = 0;             // words that travel behind the header
  std::vector<uint64_t> payloads_;  // of all ranks, where they do not fit behind the header
  uint64_t agreed_on_ = 0;          // shape_digest() when all ranks last agreed

  // Of the ending window.
  bool moved_ = false;         // some gradient has
  std::vector<char> touched_;  // by parameter, on any rank
  bool begun_ = false;         // the exchange, before ga_step
  size_t released_ = 0;        // of the buckets: those that are under way

 private:
  // The beginning of a call that is to succeed on all ranks or on none: checks that all make it. what: the function
  // that was called.
  void begin_call(const char* what);
  void check_empty(const char* what) const;  // throws, on every rank, if a window was not empty
  uint64_t own_dropped_micros() const;
  uint64_t arrays_digest() const;
  Items settings_items() const;
  void hand_out();
  // Whether a transport may write to the context's arrays even after they are freed.
  bool may_write_late() const { return comm_->may_write_late(); }
  void agree_on_pass(const Subject& of, int64_t micro_batches, const std::function<void()>& ready);

  bool settings_known_ = false, tensors_known_ = false;
  int64_t divisions_known_ = 0;  // Divisions::changes() of tensors_
  uint64_t settings_ = 0, tensors_ = 0;
  std::vector<uint64_t> sent_, gathered_;
  size_t payload_words_ = 0;
  // This rank's record, then those of all ranks: of the end of a pass, or on a device of a window.
  Buffer records_;
};

}  // namespace ga
