// SPDX-License-Identifier: Apache-2.0
// What a context does together with the contexts of other ranks, over a communicator: it checks that all
// make the same call with the same settings, adds up gradients and sums at the end of a window, and tells
// whether a call has failed on some rank.
//
// Gradients are added in pieces: rank q receives piece q of every rank and adds them in the order of the
// ranks, then the pieces are gathered. So the sums have the same bits on every rank and with every
// transport, and each rank has measured its piece in the same pass. A parameter is exchanged where it
// lies, slice by slice; small ones, and others that have to be converted, are packed into slices.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "comm/comm.hpp"
#include "param.hpp"
#include "table.hpp"

namespace ga {

class Context;

class Exchange {
 public:
  // Takes the communicator; throws if another context has it.
  Exchange(Context& context, std::shared_ptr<Comm> comm, const ga_comm_options& options);
  ~Exchange();
  Exchange(const Exchange&) = delete;
  Exchange& operator=(const Exchange&) = delete;

  int32_t rank() const { return comm_->rank(); }
  int32_t ranks() const { return comm_->ranks(); }
  int64_t bytes() const;  // of its buffers
  // Whether a transport may write to the context's arrays even after they are freed.
  bool may_write_late() const { return comm_->may_write_late(); }
  bool has_failed() const { return comm_->has_failed(); }

  // For ga_context_set_comm: throws unless all ranks agree, and hands out rank 0's state if asked to.
  void agree();
  // Settings may have changed: of the context and its groups, or of parameters and layers too.
  void forget_settings(bool tensors) {
    settings_known_ = false;
    tensors_known_ = tensors_known_ && !tensors;
  }

  // The end of a window. begin_step() replaces the totals of this rank by those of all, and returns false
  // if another rank discards the window. add_gradients() follows if the weight is positive, then
  // add_sums(), between the sums and the judgement of the backend.
  bool begin_step(WindowTotals& totals);
  void add_gradients();
  void add_sums();
  void discard();
  // Products of matrices have bits of their own on each processor, so one rank makes the update of a
  // matrix and hands it to the others.
  int32_t maker(ga_param id) const { return id % comm_->ranks(); }
  void hand_round(float* data, int64_t count, ga_param id);

  // A call that is to succeed on all ranks or on none: begin() checks that all make it; vote() throws if
  // any rank has failed, which tells why. what: the function that was called.
  void begin_call(const char* what);
  void vote(const char* what, const Error* failure);

  // A call about a layer that has one window over all ranks (GA_BN_WINDOW). of: the layer and the
  // function that was called. begin_layer() throws on every rank, before anything is exchanged, unless
  // all make that call, ready() throws on none of them, and some have micro-batches of the layer. It
  // returns room for this rank's numbers; gather_numbers(), those of all ranks: [ranks, numbers].
  double* begin_layer(const Subject& of, int64_t micro_batches, size_t numbers,
                      const std::function<void()>& ready);
  const double* gather_numbers(const char* what);

 private:
  enum Call : int64_t { kSetComm = 1, kStep, kDiscard, kOther };
  using Items = std::vector<std::pair<std::string, std::string>>;

  // The first words of every collective call, the same number of them on all ranks.
  struct Header {
    int64_t call;
    int64_t number;  // of the call
    uint64_t name;   // of the function: a hash
    uint64_t settings, state;
    int64_t params;
    int64_t open;    // the window holds something
    int64_t failed;  // begin_layer(): this rank cannot make the call
    WindowSums sums;
  };
  static constexpr int64_t kHeaderWords = sizeof(Header) / sizeof(int64_t);

  // A part of a parameter in a slice, where it begins at element `at`.
  struct Segment {
    ga_param param;
    int64_t first, count, at;
  };
  // What one exchange moves: elements of one dtype, `piece` for each rank.
  struct Slice {
    int32_t wire;
    bool packed;
    size_t first, end;  // of segments_
    int64_t piece;
  };

  Header header(Call call, const char* function);
  void gather_headers(const Header& own, const std::vector<uint64_t>& payload);
  const Header& header_of(int32_t rank) const;
  const uint64_t* payload_of(int32_t rank) const;
  void check_calls(const char* function);
  void check_settings();
  uint64_t settings_digest();
  Items context_items() const;
  Items tensor_items() const;
  Items settings_items() const;  // both
  [[noreturn]] void explain(const char* function, const Items& own);
  template <class Work>
  void agree_on(const char* what, Work&& work);
  void hand_out();

  int32_t wire_of(const Param& p) const;
  Array summed(ga_param id) const;
  bool has_rows(size_t param) const;
  void gather_rows();
  void gather_rows_of(ga_param id, const uint64_t* counts);
  void make_slices();
  void reserve();
  void exchange(const Slice& slice);
  void pack(const Slice& slice);
  void add_pieces(const Slice& slice);
  void merge_statistics(std::vector<double>& out);

  Context& context_;
  const std::shared_ptr<Comm> comm_;
  const ga_comm_options options_;
  int64_t calls_ = 0;
  bool settings_known_ = false, tensors_known_ = false;
  uint64_t settings_ = 0, tensors_ = 0;
  size_t capacity_ = 0;  // words that travel behind the header
  std::vector<uint64_t> sent_, gathered_;
  std::vector<uint64_t> payloads_;  // of all ranks, where they do not fit behind the header
  size_t payload_words_ = 0;

  std::vector<double> layer_numbers_;  // this rank's numbers, then those of all ranks
  size_t own_numbers_ = 0;             // how many of them are this rank's

  // Of the ending window.
  WindowSums sums_ = {};
  int64_t micro_batches_ = 0;         // of this rank
  bool exchanged_ = false;            // there were gradients to add
  std::vector<char> touched_;         // by parameter, on any rank
  std::vector<uint64_t> row_counts_;  // [parameters with rows, ranks]
  std::vector<ParamSums> param_sums_;
  std::vector<Slice> slices_;
  std::vector<Segment> segments_;

  Buffer send_, received_, added_;  // of one slice
  Buffer wide_;                     // sums in f32 of 16-bit accumulators
  std::vector<int64_t> wide_at_;    // by parameter: the first element of it; -1: none
  std::vector<Partial> partials_;
  std::vector<AccumulateTask> tasks_;
  std::vector<int64_t> starts_;  // of the tasks in the piece
  std::vector<FinishTask> moves_;
  std::vector<Pair> pairs_;
  std::vector<NormTask> norms_;
  std::vector<Numbers> numbers_;
};

}  // namespace ga
