// SPDX-License-Identifier: Apache-2.0
// Moves what travels between ranks in buckets (buckets.hpp): gradients to where they are added up, and their sums back;
// where the optimizer is sharded, updated parameters. All ranks make the same buckets and run them in the same order; when
// that may be, Exchange knows. A thread of its own may run them, on a backend of its own: then no other does until it has
// stopped.
//
// Gradients are added in pieces: rank q receives its piece from every rank and adds them in the order of the ranks,
// then the pieces are gathered. So the sums have the same bits on every rank and with every transport, and each rank has
// measured its piece in the same pass. Where the optimizer is sharded, the sums stay where they were added.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "model/model.hpp"
#include "ranks/buckets.hpp"
#include "ranks/divisions.hpp"

namespace ga {

class Comm;

class Transfer {
 public:
  // brings(id): whether this rank has a gradient of a parameter that travels.
  Transfer(Model& model, Comm& comm, const Divisions& divisions, const ga_comm_options& options,
           std::function<bool(ga_param)> brings);

  // Whether the transport adds up. Nothing but sums: of a maximum, MPI and NCCL lose a NaN that is among other numbers.
  bool adds_there(Reduction reduction) const {
    return options_.adder == GA_COMM_ADDER_TRANSPORT && is_sum(reduction);
  }
  int64_t bytes() const;

  // ---- Gradients ----

  // Makes the buckets of those parameters that which(id) picks, and room for them.
  void make_buckets(const std::function<bool(ga_param)>& which);
  const Buckets& buckets() const { return buckets_; }
  // Moves and adds up the gradients of a group of buckets; returns the first bucket of the next group.
  size_t run(size_t first);
  // Which runs the kernels of the buckets from now on.
  void set_adder(Backend& adder) { adder_ = &adder; }
  void reserve_for(Backend& adder) const;
  // Where the sum of a gradient lies: in the accumulator, or in an array of f32.
  Array reduced(ga_param id) const;

  // ---- What a host has measured of its pieces ----

  void clear_param_sums(size_t params) { param_sums_.assign(params, ParamSums()); }
  const ParamSums& param_sums(size_t param) const { return param_sums_[param]; }
  // What adding up has not measured of these parameters: squares of gradients clipped by value, which take the weight
  // of the window; all squares of what the transport has added, or of other pieces.
  void measure_rest(const std::vector<char>& touched, double weight);

  // ---- Updated parameters ----

  // Gives every rank what the others have changed of the parameters that are sharded.
  void gather_parameters(const std::function<Ranks::Changed(ga_param)>& changed);

 private:
  int32_t wire_of(const Param& p) const;
  Array accumulator_of(ga_param id) const;
  const int64_t* contributed_to(ga_param id) const;
  // f(segment) for what this rank has of a packed bucket.
  template <class F>
  void each_own(const Bucket& bucket, F&& f) const;
  // f(bucket) for the group that begins with a bucket; returns the first bucket of the next group.
  template <class F>
  size_t each_of_group(size_t first, F&& f) const;
  void reserve(bool gradients);
  void reserve_sums(const std::function<bool(ga_param)>& which);
  void run_moves() { adder_->finish({moves_.data(), moves_.size()}); }
  Array in_room(size_t at, int32_t dtype) const {
    return {static_cast<char*>(room_.data()) + at, dtype};
  }
  void send(const Bucket& bucket);
  void gather_sums(const Bucket& bucket);
  void clear(const Bucket& bucket);
  void pack(const Bucket& bucket, const Array& to);
  void unpack(const Bucket& bucket);
  void add_blocks(const Bucket& bucket);
  static void add_partials(const Partial* partials, int64_t count, ParamSums& sums);
  bool is_unmeasured(size_t param) const;
  size_t gather(size_t first);
  void hand_out_rows(ga_param id);

  Model& model_;
  Comm& comm_;
  const Divisions& divisions_;
  const ga_comm_options options_;
  const bool on_device_;
  const std::function<bool(ga_param)> brings_;
  Buckets buckets_;
  Backend* adder_;
  Buffer room_;               // of a group of buckets
  std::vector<Buffer> wide_;  // by parameter: sums in f32 of a 16-bit accumulator
  std::vector<ParamSums> param_sums_;
  // What the bucket works with that is being moved.
  std::vector<Partial> partials_;
  Buffer device_partials_, device_pairs_;
  std::vector<AccumulateTask> tasks_;
  std::vector<int64_t> starts_;  // of the tasks in the block
  std::vector<FinishTask> moves_;
  std::vector<Pair> pairs_;
  // What measure_rest() works with.
  std::vector<NormTask> norms_;
  std::vector<Numbers> numbers_;
  std::vector<ga_param> measured_;
};

}  // namespace ga
