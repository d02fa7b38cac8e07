// SPDX-License-Identifier: Apache-2.0
// The scalars of a window and of a step: what the program has set, what was counted and summed up,
// and the numbers that the loops read. They live where the arrays live, so a step on a device waits
// for nothing. What is computed from them is in decide.hpp.
//
// Inputs are written by the host alone, states where the arrays are alone.
#pragma once

#include <cstdint>

#include "hd.hpp"
#include "loss_scale.hpp"
#include "noise_scale.hpp"
#include "ops/batchnorm.hpp"
#include "ops/op.hpp"
#include "schedule.hpp"

namespace ga {

struct Partial {
  double sum_squares;
  double second_squares;  // NormTask: of the gradient as clipped by value; measure(): of x[1]
  double noise;           // of the contributions, each times AccumulateTask::noise
  int64_t nonfinite;      // 0 or 1
};

// The rows of a matrix that a window has touched, as a sparse set (Briggs & Torczon 1993): row r is
// in it exactly when entries[slots[r]].row is r. So nothing is ever cleared but size.
struct RowEntry {
  int64_t row;
  Partial partial;
};
struct RowSet {
  uint32_t* slots;
  RowEntry* entries;  // in the order of their first contribution
  int64_t size, capacity;
};

// The gradient as an optimizer sees it: factor * clamp(scale * source, limit). limit may be
// infinite.
struct Numbers {
  double scale, limit, factor;
};

// A folded Op as bytes.
struct alignas(16) OpBytes {
  unsigned char bytes[112];
};

// Where a parameter's gradient of the window is.
enum class Held : int32_t {
  kNothing,  // no contribution yet
  kAdopted,  // in the program's buffer, GA_GRADIENTS_LIVE
  kStored,   // in the accumulator
  kRows      // in the accumulator's rows that are in the row set
};

// Of the context.
struct Settings {
  int32_t reduce, missing, nonfinite, gradient_kind;
  bool running_mean;  // GA_ACCUMULATE_RUNNING_MEAN
  bool deferring;     // micro-batches are judged before they are added
  bool clip_micro;    // some clipping is GA_CLIP_MICRO
  bool scaled;        // there is a scaler
  bool averaged;      // there are averages
  bool noise;         // the noise scale is estimated
  bool clips;         // by some norm, of the reduced gradient
  int32_t bounded;    // the ga_optimizer_kind whose groups share a bound of their norm; -1: none
  int32_t reserved;
  double loss_scale;  // without a scaler
  double noise_smoothing;
  uint64_t seed;
  ga_loss_scaler scaler;
  ga_ema ema;
};

struct GroupInput {
  ga_optimizer optimizer;
  ScheduleData schedule;
  ga_clip clip;  // that in force
  bool own_clip;
};

struct GroupState {
  Clock clock;         // the context's applied steps, with this optimizer's products
  double sum_squares;  // of the gradients that share its clip
  double clip_factor;
  double lr;
};

struct ParamInput {
  const Partial* partials;
  RowSet* rows;  // NULL: none
  int64_t count;
  int64_t extent;  // shape[0]
  double weight;   // what the accumulator is to be multiplied by beside the mean
  ga_group group;
  int32_t op;  // position in AllOps; -1: none
  Held held;
  bool f64;
  bool frozen;
  bool clamped;     // its partials are also of the gradient as clipped by value
  bool by_units;    // its clip is GA_CLIP_AGC of the reduced gradient
  bool lazy;        // only rows with a gradient are updated
  bool average;     // it has one
  bool by_chance;   // something of it is rounded stochastically
  bool stale_rows;  // the norm is of the partials, not of the rows
  bool unmeasured;  // the partials are not those of the gradient, and nobody reads its norm
};

// What the gradients of a window come to before anything is decided: a WindowSums, and ParamSums for
// each parameter. Every number adds up over ranks: the flags are 0 or 1 on one rank.
struct WindowSums {
  double weight;         // of the micro-batches
  double micro_batches;  // how many there are
  double weighted;       // of these, with a weight > 0
  double dropped;        // of these, not added
  double failed;         // a call came with something that only a device has seen
  double unestimated;    // the window has no estimate of the noise scale
};
struct ParamSums {
  double squares;    // of what is accumulated, not yet divided by weights; NaN: nobody measured it
  double clamped;    // under ParamInput::clamped: of the mean gradient as clipped by value
  double noise;      // Partial::noise
  double nonfinite;  // some element is infinite or NaN
  double gradients;  // the window brought a gradient
  double dense;      // a gradient lies in the whole array, not in some of its rows
};

struct ParamState {
  Clock clock;             // its own updates
  ParamSums sums;          // of the window that ends
  double sum_squares;      // of what a clip by norm sees
  double norm_squares[2];  // of the first pass of a layer-wise Op
  double factor;           // of its clip by norm
  double smallest;         // of the factors of its units
  int64_t contributed;     // Settings::deferring: a contribution was added in this window
  double held_weight;      // likewise, the weights that a running mean is over
  bool touched;            // this step is about it
  bool averaged;           // the average holds something
};

// What a step does to a parameter, as bits.
enum Duty : int32_t {
  kUpdate = 1,      // its Op
  kUpdateRows = 2,  // likewise, of the rows with a gradient
  kDeliver = 4,     // its gradient goes to the program
  kFollow = 8       // its average moves alone; with kUpdate it does so in that pass
};

struct ParamPlan {
  int32_t duty;      // Duty
  Numbers raw;       // not yet clipped by norm
  Numbers gradient;  // as the Op sees it
  double factor;     // of the clip by norm
  double average_gain;
  uint64_t copy_key, state_key;
  double factor_gain, factor_floor;  // Backend::update_factored
  double orthogonal_scale;           // Backend::orthogonalize
  OpBytes folded;
};

// A layer with batch normalisation.
struct BnInput {
  BnChannel* state;
  Moments* history;  // see ops/batchnorm.hpp; NULL: nothing was taken yet, or WINDOW mode
  int64_t channels;
  double momentum;
  bool biased, frozen;
};

// A contribution that is judged before it is added.
struct MicroInput {
  const Partial* partials;
  int64_t chunks;
  ga_param param;
  bool again;  // not the parameter's first in this micro-batch
  bool rows;
};
struct MicroPlan {
  bool active;  // else it is not added
  bool nonfinite;
  double squares;             // of what a clip by norm sees
  double scale, keep, noise;  // of AccumulateTask
  Numbers view;               // of the gradient as clipped, the loss scale undone
};

struct Control {
  int64_t windows, steps, dropped;
  ScalerState scaler;
  NoiseScale noise;
  float loss_scale;  // of the next micro-batch, for programs on a device

  // Of a window whose micro-batches are judged, and of the last of them.
  double weight;
  int64_t weighted, window_dropped;
  bool micro_finite;
  bool rejected;  // ga_step returned GA_ERROR_NONFINITE: ga_discard backs the loss scale off
  bool failed;    // a call of the window came with something that only a device has seen

  // Of the window that ends, and over all parameters.
  WindowSums sums;
  struct {
    double all;             // squares of the reduced gradients
    double shared;          // of what the context's own clip is for
    double micros, window;  // of NoiseScale::add
    double bounded;         // of those that share a bound of their norm, as clipped
  } totals;

  // Of the last step.
  int64_t ticket;        // WindowTotals::ticket
  bool go;               // it is applied
  double mean;           // what divides by the weights
  int64_t nonfinite_at;  // the first such parameter; -1: none
  ga_step_result result;
};

// What the host knows of a window at its end.
struct WindowTotals {
  int64_t ticket;  // of the call: every one has its own
  int64_t micro_batches;
  double weight;  // these three where no micro-batch was judged
  int64_t weighted, dropped;
  bool noise_wanted;  // the window has an estimate
  bool last;          // no settle_units follows
};

// What decide.hpp goes by: the tables and states of a context, where it runs.
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
