// SPDX-License-Identifier: Apache-2.0
// The scalars of a window and of a step: settings of the program, counts and sums, and the numbers
// that the kernels read. The scalars live where the arrays live, so a step on a device waits for
// nothing. decide.hpp has the code that computes them.
//
// Only the host writes inputs; only the code that runs where the arrays live writes states.
#pragma once

#include <cstdint>

#include "core/hd.hpp"
#include "numbers/loss_scale.hpp"
#include "numbers/noise_scale.hpp"
#include "numbers/reduction.hpp"
#include "numbers/schedule.hpp"
#include "ops/batchnorm.hpp"
#include "ops/op.hpp"

namespace ga {

struct Partial {
  double sum_squares;
  double second_squares;  // NormTask: of the gradient clipped by value; Op::measure(): of x[1]
  double noise;           // squares of the contributions, each times AccumulateTask::noise
  int64_t nonfinite;      // 0 or 1
};

// The rows of a matrix with a gradient in this window, as a sparse set (Briggs & Torczon 1993): the
// set contains row r exactly when entries[slots[r]].row is r, so clearing the set resets only size.
struct RowEntry {
  int64_t row;
  Partial partial;
};
struct RowSet {
  uint32_t* slots;
  RowEntry* entries;  // by first contribution
  int64_t size, capacity;
};

// The optimizer sees the gradient as factor * clamp(scale * source, limit); limit may be infinite.
struct Numbers {
  double scale, limit, factor;
};

// A folded Op as bytes.
struct alignas(16) OpBytes {
  unsigned char bytes[112];
};

// Where the gradient of a parameter lies during a window.
enum class Held : uint8_t {
  kNothing,   // no contribution yet
  kBorrowed,  // in the program's buffer: GA_GRADIENTS_LIVE, GA_GRADIENTS_LENT
  kStored,    // in the accumulator
  kRows,      // in the accumulator, in the rows of the row set
  kReduced    // added up over the ranks, where Exchange has it
};

// The settings of a context.
struct Settings {
  int32_t reduce, missing, nonfinite, gradient_kind;
  bool running_mean;  // GA_ACCUMULATE_RUNNING_MEAN
  bool deferring;     // micro-batches are checked before they are added
  bool clip_micro;    // some clipping is GA_CLIP_WHEN_MICRO
  bool scaled;        // the context has a loss scaler
  bool noise;         // the noise scale is estimated
  bool clips;         // some clipping is by a norm of the reduced gradient
  bool
      norms_given;  // Control and GroupState have norms and the first nonfinite gradient before the decision
  int32_t bounded;      // the ga_optimizer_kind whose groups share a max_grad_norm; -1: none
  double reduced_over;  // of how many ranks gradients are means where they should be sums; 0: 1
  double loss_scale;    // without a loss scaler
  double noise_smoothing;
  uint64_t seed;
  ga_loss_scaler scaler;
  ga_ema ema;
  uint64_t checksum;  // over ranks on a device: of all options that change numbers
};

struct GroupInput {
  ga_optimizer optimizer;
  ScheduleData schedule;
  ga_clip clip;  // the group's own clip, else that of the context
  bool own_clip;
};

struct GroupState {
  Clock clock;         // applied steps of the context, with the products of this optimizer
  double sum_squares;  // of the gradients under the group's own clip
  double clip_factor;
  double lr;
};

struct ParamInput {
  const Partial* partials;
  RowSet* rows;  // NULL: no row set
  int64_t count;
  // Elements of the gradient that the partials are of: all, or over ranks on a device this rank's piece.
  int64_t measured_count;
  // Of a matrix; where the optimizer has none, shape[0] and the product of the other axes.
  int64_t outputs, inputs;
  double weight;  // multiplies the accumulator, as the mean does
  double lr_scale, weight_decay_scale;
  int32_t key;  // see Tensor::key
  ga_group group;
  int32_t op;  // position in AllOps; -1: no Op
  Held held;
  bool f64;
  bool frozen;
  bool clamped;   // the partials also hold the squares of the gradient clipped by value
  bool by_units;  // GA_CLIP_AGC clips the reduced gradient
  // Before the decision, ParamSums has what the clip by units came to, of which each rank makes a part.
  bool clipped_in_parts;
  bool lazy;        // only rows with a gradient are updated
  bool average;     // the parameter has an EMA
  bool stochastic;  // some array of the parameter is rounded stochastically
  bool stale_rows;  // the norm comes from the partials, not from the row set
  bool unmeasured;  // the partials do not match the gradient, and nobody reads its norm
  Reduction reduction;
};

// The sums over a window's gradients that a decision is made from: one WindowSums, and a ParamSums
// for each parameter. Every number may be added up over ranks; a flag is 0 or 1 on one rank.
struct WindowSums {
  double weight;         // of the micro-batches
  double micro_batches;  // number of micro-batches
  double weighted;       // number with a weight > 0
  double dropped;        // number not added
  double failed;         // Control::failed, on a device
  double unestimated;    // the window has no estimate of the noise scale
  double discarded;      // the rank discards the window
};
GA_HD void add(WindowSums& sums, const WindowSums& more) {
  sums.weight += more.weight;
  sums.micro_batches += more.micro_batches;
  sums.weighted += more.weighted;
  sums.dropped += more.dropped;
  sums.failed += more.failed;
  sums.unestimated += more.unestimated;
  sums.discarded += more.discarded;
}
struct ParamSums {
  double squares;    // of the accumulated gradient, before the mean; NaN: not measured
  double clamped;    // under ParamInput::clamped: squares of the mean gradient clipped by value
  double noise;      // Partial::noise
  double nonfinite;  // an element is infinite or NaN
  double gradients;  // the window brought a gradient
  double dense;      // the gradient fills the whole array, not only the rows of a row set
  // Under ParamInput::clipped_in_parts: UnitTotals, of all ranks.
  double unit_squares, unit_smallest;
};

struct ParamState {
  Clock clock;             // updates of this parameter
  ParamSums sums;          // of the ending window
  double sum_squares;      // of the gradient before it is clipped by norm
  double norm_squares[2];  // of the first pass of a layer-wise Op
  double factor;           // of the clip by norm
  double smallest;         // clip factor of any unit
  int64_t contributed;     // Settings::deferring: a contribution was added in this window
  double held_weight;      // Settings::deferring: sum of the weights in a running mean
  bool touched;            // this step updates the parameter or delivers its gradient
  bool averaged;           // the EMA has its first value
};

struct Targets;

// What a step does to a parameter, as bit flags.
enum Action : int32_t {
  kUpdate = 1,      // runs the Op
  kUpdateRows = 2,  // runs the Op on the rows with a gradient
  kDeliver = 4,     // hands the gradient to the program
  kFollow = 8       // moves the EMA: in the pass of kUpdate, else in a pass of its own
};

struct ParamPlan {
  int32_t actions;   // Action
  Numbers raw;       // before the clip by norm
  Numbers gradient;  // after the clip by norm: the view of the Op
  double factor;     // of the clip by norm
  double average_gain;
  uint64_t copy_key, state_key;
  double factor_gain, factor_floor;  // Backend::update_factored
  double orthogonal_scale;           // Backend::orthogonalize
  const Targets* targets;            // of an update; NULL: in place, as always on a device
  OpBytes folded;
};

// A layer with batch normalisation.
struct BnInput {
  BnChannel* state;
  Moments* history;  // see BnHistory; NULL in WINDOW mode, and before the first statistics
  int64_t channels;
  double momentum;
  bool biased, frozen;
};

// A contribution that is checked before it is added.
struct MicroInput {
  const Partial* partials;
  int64_t chunks;
  ga_param param;
  bool again;  // not the parameter's first contribution to this micro-batch
};
struct MicroPlan {
  bool active;  // the contribution is added
  bool nonfinite;
  double squares;             // of the contribution before it is clipped by norm
  double scale, keep, noise;  // of AccumulateTask
  Numbers view;               // of the contribution, clipped, without its loss scale
};

struct Control {
  int64_t windows, steps, skipped, dropped;
  ScalerState scaler;
  NoiseScale noise;
  float loss_scale;  // of the next micro-batch, for programs on a device

  // Of the open window, under Settings::deferring.
  double weight;
  int64_t weighted, window_dropped;
  uint64_t dropped_micros;  // ga_step_result.dropped_micros
  bool micro_finite;        // the last micro-batch was finite
  bool rejected;            // ga_step returned GA_ERROR_NONFINITE: ga_discard lowers the loss scale
  // With or without deferring: a row index was out of range, or ranks have ended different passes.
  bool failed;

  // Of the ending window, over all parameters.
  WindowSums sums;
  struct {
    double all;             // squares of the reduced gradients
    double shared;          // squares of the gradients under the context's clip
    double micros, window;  // arguments of NoiseScale::add
    double bounded;         // squares of the clipped gradients under Settings::bounded
  } totals;

  // Of the last step.
  int64_t ticket;        // WindowTotals::ticket
  bool go;               // the step is applied
  double mean;           // 1 / weight under GA_REDUCE_MEAN, else 1
  double average_gain;   // 1 - d of an EMA that has begun, see ga_ema_kind
  int64_t nonfinite_at;  // first parameter with a nonfinite gradient; -1: none
  ga_step_result result;
};

// What is counted of an open window, by each rank for itself: fields of Control, and two of the context.
struct WindowCounts {
  double weight;
  int64_t weighted, window_dropped;
  uint64_t dropped_micros;
  bool micro_finite, failed;
  int64_t rows_held;
  bool noise_repeated;
};

// What the host knows of a micro-batch.
struct Micro {
  double weight;
  double loss_scale;  // 0: the context's, which only the device knows
  bool last = false;  // GA_MICRO_LAST
  bool own = false;   // the program gave the loss scale in ga_micro_options
};

// What the host knows of an ending window.
struct WindowTotals {
  int64_t ticket;  // unique to the call
  int64_t micro_batches;
  double weight;      // as the next one, not of this rank where it has checked its micro-batches
  int64_t weighted;   // number of micro-batches with a weight > 0
  bool noise_wanted;  // the window yields an estimate of the noise scale
  bool last;          // no settle_units() follows
  bool over_ranks;    // Control::sums has what all ranks bring already
  // On a device over ranks, ParamSums are there already too (ranks.hpp).
  bool reduced;
  bool discards;  // this rank discards the window
};

// What the sum of a window's gradients is multiplied by.
GA_HD double mean_of(const Settings& set, double weight) {
  const double sum = set.reduced_over > 0 ? set.reduced_over : 1;
  return set.reduce == GA_REDUCE_MEAN ? sum / weight : sum;
}

// What this rank brings to the window, as far as it knows.
GA_HD WindowSums brought_by(const Settings& set, const Control& c, const WindowTotals& w) {
  WindowSums sums = {};
  sums.weight = set.deferring ? c.weight : w.weight;
  sums.micro_batches = static_cast<double>(w.micro_batches);
  sums.weighted = static_cast<double>(set.deferring ? c.weighted : w.weighted);
  sums.dropped = static_cast<double>(c.window_dropped);  // 0 if nothing is checked
  sums.failed = c.failed;
  sums.unestimated = !w.noise_wanted;
  return sums;
}

// On a device, what a rank writes down about an ending window for the others (sum_rank() of ranks.hpp): a
// RankRecord, for each parameter whether it has a gradient, and its noise, and for each channel of batch
// normalisation its Moments; all of it doubles, or as long as one.
struct RankRecord {
  WindowSums sums;
  uint64_t settings;  // Settings::checksum, to be equal on all ranks
};
GA_HD int64_t record_words(int64_t params, int64_t channels) {
  return static_cast<int64_t>(sizeof(RankRecord) / sizeof(double)) + 2 * params + 3 * channels;
}
constexpr int64_t kPieceWords = 5;  // what sum_pieces() writes of a parameter

// The tables and states of a context, at the addresses where the code of decide.hpp runs.
struct ScalarTables {
  const Settings* settings;
  Control* control;
  const GroupInput* group_inputs;
  GroupState* group_states;
  const ParamInput* param_inputs;
  ParamState* param_states;
  ParamPlan* plans;
  int64_t groups, params;
  const BnInput* bn;
  int64_t bn_count;
};

}  // namespace ga
