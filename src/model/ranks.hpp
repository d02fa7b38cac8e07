// SPDX-License-Identifier: Apache-2.0
// The other ranks, as the parts and stages of a context see them. ranks/ has the real ones; what stands here is a
// context that is alone.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "backend/backend.hpp"
#include "core/error.hpp"
#include "model/own_parts.hpp"
#include "model/param.hpp"

namespace ga {

class Ranks {
 public:
  virtual ~Ranks() = default;

  virtual bool alone() const { return true; }
  virtual int32_t rank() const { return 0; }
  virtual int32_t ranks() const { return 1; }
  // Whether each rank keeps state of a part of the parameters alone, GA_SHARD_OPTIMIZER; and of a parameter, whether
  // some rank has less than all of its state.
  virtual bool shards() const { return false; }
  virtual bool divides(ga_param) const { return false; }
  // Whether windows end on a device, whose host waits for nothing but a transport that needs it: then every rank
  // exchanges the gradients of all parameters that are not frozen.
  virtual bool on_device() const { return false; }
  // Whether each rank has parameters of its own, GA_SHARD_PARAMETERS: gradients arrive weighted and reduced, norms over
  // groups are of all ranks, and Control has them before the decision. Then, of which samples this rank's gradients
  // are, which rank this is, and whether some rank has a parameter of that name.
  virtual bool has_own_parameters() const { return false; }
  virtual Samples samples() const { return {}; }
  virtual size_t place() const { return 0; }  // of this rank among all
  virtual bool knows(const std::string& name) const { return (void)name, false; }
  virtual int64_t bytes() const { return 0; }  // of buffers
  // Whether waits for a device look after what is exchanged. Of a context's exchanges one at a time may.
  virtual void watch(bool on) { (void)on; }

  // ---- Settings and arrays ----

  // Settings may have changed: of the context and its groups, or of parameters and layers too.
  virtual void forget_settings(bool tensors) { (void)tensors; }
  // A checksum of all that changes numbers, for devices to compare; 0 where hosts do.
  virtual uint64_t checksum_for_device() { return 0; }
  // Decides which rank has what of parameters that are new; before they get arrays.
  virtual void divide() {}
  // Throws if a parameter cannot have these options over ranks.
  virtual void check_options(const Subject& of, const ga_param_options&) const { (void)of; }
  // Clipping has changed: divides anew, or throws if arrays are divided in another way than they would be now.
  // What is not sharded is divided anew before the first window alone, since sharded arrays may have been then.
  // Returns what takes that back.
  virtual std::function<void()> divide_anew() {
    return [] {};
  }
  // Throws if by these rules parameters would be divided in another way.
  virtual void check_keepers(const Rules& by) const { (void)by; }
  // How many of a gradient's elements this rank measures for the decision.
  virtual int64_t measured_count(ga_param, int64_t count) const { return count; }
  // Where norms over a layer, or over its clipped units, are those of pieces.
  virtual void describe_measure(ga_param, UpdateTask&) {}
  virtual void describe_units(ga_param, const UnitPattern&, UnitTask&) const {}

  // ---- A window ----

  // Exchanges in the background what is ready (Param::ready), if that was asked for.
  virtual void release_ready() {}
  // Makes what that needs, and may fail, before anything is ready.
  virtual void prepare_release() {}
  virtual bool has_begun() const { return false; }
  // For updates ahead (Speculation::release()). The last micro-batch has begun of a window of that weight, which the ranks
  // tell each other if each has parameters of its own. Then, the weight over all ranks, 0 while it is not known; and what
  // sums the squares of a gradient that is complete, for the decision, NULL where that is not asked for.
  virtual void meet_ahead(double weight) { (void)weight; }
  virtual double weight_ahead(double own) const { return own; }
  virtual const BinnedTask* sum_ahead(ga_param) { return nullptr; }
  // Whether the gradient of a parameter may be summed before ga_step.
  virtual bool is_early(size_t) const { return true; }
  virtual bool is_check_due() const { return false; }  // this window compares parameters and state

  // ---- The end of a window ----

  // Begins the end of a window, and replaces the totals of this rank by those of all. Returns false if another rank
  // discards the window. discards: this one does. If an exchange of this section, or of release_ready(),
  // fails with gradients on their way, the window is invalid.
  virtual bool begin_end(WindowTotals&, bool discards) {
    (void)discards;
    return true;
  }
  // Adds up what the ranks have brought. write() has the tables say what the window has brought, and returns what is
  // still to be summed before the decision: hosts call it when they have the sums of the gradients, devices before they
  // add up, for they do so by the tables. Returns the same, without the norms that were taken here. units: of a device,
  // which parameters this rank clips a part of, for all.
  using WriteWindow = std::function<StepSums()>;
  virtual StepSums reduce(const WindowTotals&, Params units, const WriteWindow& write) {
    (void)units;
    return write();
  }
  // What the backend calls between the sums and the decision: adds up the sums where hosts do.
  virtual OverRanks over_ranks() { return {}; }
  // Tells the other ranks that this one discards the window.
  virtual void discard() {}
  virtual bool has_failed() const { return false; }

  // ---- Updates; if one of these fails, the context is of no use after it ----

  virtual void add_layer_norms() {}
  // After the clip by units of which each rank has made a part: gives every rank the norms and the smallest factors
  // of all parts.
  virtual void share_unit_totals() {}
  // Products of matrices have bits of their own on each processor, so one rank makes the update of a matrix and hands
  // it to the others, unless the optimizer is sharded.
  virtual bool makes_update(ga_param) const { return true; }
  virtual void hand_round(float*, int64_t count, ga_param) { (void)count; }

  // ---- Layers ----

  // The end of a pass of a layer that has one window over all ranks (GA_BN_WINDOW): merges the records of all
  // ranks. of: the layer and the function that was called. Where the hosts meet, throws on every rank, before
  // anything is exchanged, unless all make that call, ready() throws on none of them, and some have micro-batches
  // of the layer. Where the transport works on a stream, the host waits for nothing, and what ready() throws is
  // this rank's failure alone: it has not exchanged anything yet.
  virtual void end_pass(const Subject&, const BnTask&, const BnPassEnd&, int64_t micro_batches,
                        const std::function<void()>& ready) {
    (void)micro_batches;
    ready();
  }

  // ---- State ----

  using Ready = std::function<void()>;
  // work(ready) as the part of this rank in a call that succeeds on all ranks or on none: before it changes the
  // context for good, or exchanges anything, work calls ready(), which throws if another rank has failed. by_one:
  // only rank 0 works, unless ranks have state that the others do not have.
  virtual void on_all_ranks(const char* what, bool by_one,
                            const std::function<void(const Ready&)>& work) {
    (void)what, (void)by_one;
    work([] {});
  }
  // In such a call, where each rank has parameters of its own: whether all gave one path. Throws on all ranks if some
  // gave the same and others another.
  virtual bool has_one_path(const char* what, const char* path) {
    return (void)what, (void)path, false;
  }
  // In such a call: whether the window of any rank was not empty when it began.
  virtual bool has_open_window() const { return false; }
  // And ga_step_result.dropped_micros of the last window, by rank.
  virtual std::vector<uint64_t> dropped_micros() const { return {}; }
  // A text of each rank.
  virtual std::vector<std::string> gather_texts(const char* what, std::string own) {
    (void)what;
    return {std::move(own)};
  }
  // Hands every rank the bytes that rank q has: there, read(take) hands them over, in pieces of any sizes.
  // piece: room for what travels at a time, as large on every rank.
  virtual void hand_round_bytes(int32_t q, int64_t bytes, std::vector<int64_t>& piece,
                                const std::function<void(const TakePiece&)>& read,
                                const TakePiece& take) {
    (void)q, (void)bytes, (void)piece;
    read(take);
  }
  // A call that all ranks make about what is sharded, while no window is open.
  virtual void begin_sharded_call(const char* what) { (void)what; }
  // Gives every rank what the others have changed of the parameters that are sharded, after ready(), unless empty. If
  // it fails, the context is of no use after it.
  enum class Changed { kNothing, kRows, kElements };
  virtual void gather_parameters(const std::function<Changed(ga_param)>&, const Ready& ready = {}) {
    (void)ready;
  }
  // Hands over the whole of an array of state of a parameter that is sharded, piece by piece in the order of its
  // elements: take(piece, bytes).
  virtual void each_piece(ga_param, const DividedArray&, const TakePiece&) {}
};

}  // namespace ga
