// SPDX-License-Identifier: Apache-2.0
// What a ga_context is: groups, parameters, the window and the counters. No loop over elements is
// in here; it tells a Backend what to do to which tensors.
//   context.cpp     groups and parameters
//   memory.cpp      the arrays they have
//   accumulate.cpp  contributions to a window
//   step.cpp        the end of a window
//   clip.cpp        clipping
//   update.cpp      parameters and optimizer state
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <memory>
#include <optional>
#include <string>
#include <unordered_set>
#include <vector>

#include "backend/backend.hpp"
#include "error.hpp"
#include "loss_scale.hpp"
#include "noise_scale.hpp"
#include "optimizer.hpp"
#include "schedule.hpp"
#include "units.hpp"
#include "window.hpp"

namespace ga {

// Tasks for a backend, written in place, field by field: one that is put together first and copied
// then makes the copy wait for its stores (measured: two thirds of the time of Context::plan).
template <class Task>
class TaskList {
 public:
  void reserve(size_t capacity) {
    if (capacity > tasks_.size()) tasks_.resize(capacity);
  }
  void clear() { size_ = 0; }
  Task& add() { return tasks_[size_++]; }  // holds what a former list left there
  Task& last() { return tasks_[size_ - 1]; }
  Span<Task> span_from(size_t first) { return {tasks_.data() + first, size_ - first}; }
  Span<const Task> span() const { return {tasks_.data(), size_}; }

 private:
  std::vector<Task> tasks_;
  size_t size_ = 0;
};

class Context {
 public:
  explicit Context(const ga_config& config);
  ~Context();
  Context(const Context&) = delete;
  Context& operator=(const Context&) = delete;

  // Held during a call: throws where the context is in another call already, or has failed for
  // good.
  class Use {
   public:
    explicit Use(const Context& context);
    ~Use() { context_.in_use_.store(false, std::memory_order_release); }
    Use(const Use&) = delete;
    Use& operator=(const Use&) = delete;

   private:
    const Context& context_;
  };

  // context.cpp
  void set_accum_steps(int64_t k);
  void set_accum_schedule(const ga_accum_phase* phases, size_t count);
  ga_group add_group(const ga_optimizer& optimizer);
  void set_lr(ga_group group, double lr);
  void set_weight_decay(ga_group group, double weight_decay);
  void set_schedule(ga_group group, const ga_schedule* schedule);
  void set_clip(const ga_clip* clip);
  void set_group_clip(ga_group group, const ga_clip* clip);
  double lr(ga_group group) const;
  void set_loss_scaler(const ga_loss_scaler* scaler);
  double loss_scale() const { return scaler_ ? scaler_->scale() : config_.loss_scale; }
  void set_ema(const ga_ema* ema);
  ga_param add_params(void* data, int32_t dtype, const ga_flat_entry* entries, size_t count,
                      const ga_param_options& options);
  void bind(ga_param param, void* data);
  void changed(ga_param param);
  void ema_copy_to(ga_param param, void* out, int32_t dtype);
  void set_frozen(ga_param param, bool frozen);
  ga_memory memory() const;

  // accumulate.cpp
  void accumulate(const void* const* gradients, size_t count, double weight, const double* scale);
  void micro_begin(int64_t index, double weight, const double* scale);
  void accumulate_part(ga_param param, const void* gradient);
  void accumulate_rows(ga_param param, const void* indices, int32_t index_dtype, int64_t count,
                       const void* values);
  void accumulate_matmul(ga_param param, int64_t k, const void* a, int64_t lda, bool transpose_a,
                         const void* b, int64_t ldb, bool transpose_b, int32_t dtype);
  ga_accumulator acquire(ga_param param);
  void release(ga_param param);
  void micro_end();

  // step.cpp
  ga_window_info window() const;
  ga_step_result step();
  void discard();
  const void* gradient(ga_param param, int32_t* dtype) const;

 private:
  struct Group {
    ga_optimizer optimizer;
    const OptimizerInfo* info;
    Schedule schedule;
    Clock clock;  // the context's applied steps, with this optimizer's products
    int op[2];    // position in AllOps for vectors and for matrices; -1: none
    bool own_clip;
    ga_clip clip;
    double sum_squares = 0;  // of the group's reduced gradients, while stepping
    double clip_factor = 1;  // of a global norm, likewise
  };

  // Where a parameter's gradient of the window is.
  enum class Held : unsigned char {
    kNothing,  // no contribution yet
    kAdopted,  // in the program's buffer, GA_GRADIENTS_LIVE
    kStored,   // in the accumulator
    kRows,     // in the accumulator's rows that are in the row set
  };

  // A parameter: what the passes read. The first cache line is all that a plain contribution needs.
  struct alignas(64) Param {
    void* accumulator = nullptr;
    Partial* partials = nullptr;
    int64_t count;
    int64_t offset;                 // elements from the start of its block
    const void* checked = nullptr;  // the gradient address last found clear of the ranges
    const void* adopted = nullptr;
    double adopted_scale = 0;
    unsigned char dtype;
    unsigned char gradient_dtype;
    unsigned char accumulator_dtype;
    Held held = Held::kNothing;
    bool f64 = false;  // computed in double
    bool frozen = false;
    bool acquired = false;
    bool stale = false;  // the partials are not those of the accumulator

    void* data;
    void* state[kMaxSlots] = {};
    void* master = nullptr;
    void* average = nullptr;
    Clock clock;                // its own updates
    double sum_squares = 0;     // of what a clip by norm sees, while stepping
    double factor = 1;          // of its clip by norm, likewise
    double held_weight = 0;     // GA_ACCUMULATE_RUNNING_MEAN: the weights that the mean is over
    int64_t contributions = 0;  // in this window
    int64_t last_micro = -1;    // micro-batch of the last one
    ga_group group;
    bool matrix = false;      // rank >= 2
    bool averaged = false;    // the average holds something
    bool delivered = false;   // the accumulator holds the last step's gradient, for the program
    bool pending = false;     // in the list of tasks
    bool pair = false;        // its accumulator is one, of two arrays
    bool by_chance = false;   // it is rounded stochastically
    bool state_due = false;   // its state is to be filled with what it begins with
    bool master_due = false;  // its master is to be taken from it
  };

  // Sums over units and what is made of them, for clipping.
  struct Units {
    UnitPattern pattern;
    double* gradient = nullptr;  // sums
    double* param = nullptr;
    void* factors = nullptr;  // of the type computed in
    size_t bytes = 0;         // of all, in one block
    double clipped_squares = 0;
    double smallest = 1;
  };

  // A parameter: what few passes read.
  struct Tensor {
    std::string name;
    std::vector<int64_t> shape;
    ga_param_options options;
    int64_t rows;                  // shape[0]
    Pair pair = {};                // of a compensated accumulator
    RowSet set = {};               // with ga_param_options.rows
    SparseRows sparse = {};        // the accumulator with that set
    std::unique_ptr<Units> units;  // under GA_CLIP_AGC
    ClippedGradient clipped = {};
    // Of a factored second moment: the last two axes as matrices, and their sums.
    std::unique_ptr<Units> factor_rows, factor_columns;
    OuterProduct outer = {};
  };

  // One pointer of ga_accumulate.
  struct Block {
    ga_param first;
    ga_param count;
  };

  // Memory that gradients and parameters must keep clear of: parameters, and the library's own
  // arrays (param -1).
  struct Range {
    uintptr_t begin, end;
    ga_param param;
  };

  struct Arena {
    void* data;
    size_t bytes;
  };

  // The kinds of arrays a parameter may have, each kind in arenas of its own.
  enum ArrayKind {
    kAccumulator,
    kLow,                          // of a compensated accumulator
    kState,                        // the first slot; the others follow
    kMaster = kState + kMaxSlots,  // f32, of a 16-bit parameter
    kAverage,
    kRowSlots,
    kArrays
  };
  // Places in the arenas, in bytes.
  struct Layout {
    std::array<size_t, kArrays> bytes = {};
    int64_t chunks = 0;
    size_t scratch = 0;  // of the parameter that needs most while it is updated
  };

  // A contribution that is read at the end of its micro-batch.
  struct Contribution {
    ga_param param;
    const void* gradient;
    const void* indices;  // NULL: the whole gradient
    int32_t index_dtype;
    int64_t count;  // elements of gradient
    int64_t rows;
    size_t partials;  // the first of its chunks in micro_partials_
  };

  // What random bits are for: no two uses share any.
  enum class Purpose : uint64_t { kAccumulate = 1, kCopy, kState };

  // The last two axes of a tensor, taken as matrices.
  struct Matrices {
    int64_t rows, columns, count;
  };

  struct Reduction {
    double norm;  // of the whole gradient before clipping
    double smallest_factor;
    bool finite;
  };

  // context.cpp
  void require_empty(const char* what) const;
  const Group& group(ga_group id) const;
  Group& group(ga_group id);
  const Param& param(ga_param id) const;
  Param& param(ga_param id);
  const char* name(ga_param id) const { return tensors_[static_cast<size_t>(id)].name.c_str(); }
  int op_of(const Param& p) const {
    return groups_[static_cast<size_t>(p.group)].op[p.matrix ? 1 : 0];
  }
  const OptimizerInfo& info_of(const Param& p) const {
    return *groups_[static_cast<size_t>(p.group)].info;
  }
  void update_accum_steps();
  const Range* overlap(const void* data, int64_t bytes, ga_param except) const;
  void add_range(const Range& range);
  void check_data(const char* name, const void* data, int64_t count, int32_t size,
                  ga_param self) const;
  void check_options(const ga_flat_entry& e, int32_t dtype, const ga_param_options& o) const;

  // memory.cpp
  bool has_master(size_t param) const;
  Array param_of(const Param& p) const;
  Array state_of(const Param& p, int slot) const;
  Array average_of(const Param& p) const;
  Matrices matrices_of(const Tensor& t) const;
  size_t bytes_of(size_t param, int kind) const;
  static size_t bytes_of_lists();
  void place(size_t param, Layout& l, std::array<size_t, kArrays>& offset) const;
  Layout layout_of_new() const;
  void prepare();
  void set_update(size_t param);
  void fill_new();
  void take_master(Param& p);

  // accumulate.cpp
  Micro make_micro(double weight, const double* scale) const;
  double contribution_scale(const Micro& micro) const;
  void set_micro(const Micro& micro, int64_t index, double window_weight);
  Param& part(ga_param id, const char* what);
  void refuse(ga_param id, const char* what, bool adds_elsewhere) const;
  void check_gradient(ga_param id, const void* gradient);
  void check_values(ga_param id, const void* data, int64_t count, int32_t size,
                    const char* what) const;
  Array target_of(ga_param id);
  void plan(ga_param id, const Source& source);
  void store_adopted(ga_param id);
  void make_dense(ga_param id);
  RowsTask rows_task(const Contribution& c, double scale);
  void add_rows(const Contribution& c, double scale);
  // Whether micro-batches are judged as a whole, when they end.
  bool deferring() const { return config_.nonfinite == GA_NONFINITE_DROP_MICRO || clip_micro_; }
  void defer(Contribution c);
  GradientView micro_view(const Contribution& c, const Micro& micro) const;
  void settle(int64_t index);
  template <class Work>
  void or_invalidate(Work&& work);

  // clip.cpp
  const ga_clip& clip_of(const Param& p) const;
  void change_clip(const ga_clip* clip, ga_clip& slot, bool* own);
  void choose_path();
  uint32_t units_axes(size_t param) const;
  std::unique_ptr<Units> new_units(const std::vector<int64_t>& shape, uint32_t reduced,
                                   bool both) const;
  void free_units(std::unique_ptr<Units>& units) noexcept;
  void prepare_units();
  void add_unit_tasks(ga_param id, const GradientView& view);
  void clip_micro_batch(const Micro& micro);
  bool by_units(const Param& p) const;
  void plan_units(Span<const ga_param> ids, double mean);
  void clip_units(Span<const ga_param> ids, double mean, Reduction& r);
  void take_clipped(ga_param id, Reduction& r);
  void limit_groups(int32_t kind);

  // step.cpp
  double mean_of(const Param& p, double mean) const;
  Source source_of(ga_param id);
  void fill_view(ga_param id, double mean, GradientView& v);
  bool norm_after_value(const Param& p) const;
  void take_norms(double mean);
  Reduction reduce(double mean);
  const char* first_nonfinite() const;
  void estimate_noise();
  void empty_window();
  void forget_delivered();
  template <class Work>
  void or_break(Work&& work);

  // update.cpp
  uint64_t key(Purpose purpose, int64_t a, int64_t b, int64_t c) const;
  void fill_clipped(ga_param id, double mean, GradientView& v);
  double average_gain(const Param& p) const;
  Clock clock_of(const Param& p) const;
  void begin_update(ga_param id, UpdateTask& task);
  void update(double mean, Reduction& r);
  void add_update(ga_param id, double mean);
  void fold(const Param& p, UpdateTask& task);
  void deliver(ga_param id, double mean);
  bool is_lazy(ga_param id) const;
  void update_rows(ga_param id);
  void update_layers(double mean, Reduction& r, int32_t limited);
  void update_batch(Span<const ga_param> ids, double mean);
  void update_units(Span<const ga_param> ids, double mean, Reduction& r);
  UpdateTask& add_layer(ga_param id, double mean);
  void fold_layer(ga_param id, UpdateTask& task);
  void add_factor_task(ga_param id, double mean);
  void orthogonalize(ga_param id, UpdateTask& task);
  void move_averages();

  ga_config config_;
  std::unique_ptr<Backend> backend_;
  mutable std::atomic<bool> in_use_{false};
  std::optional<Error> broken_;  // why only destroy is legal

  std::vector<Group> groups_;
  std::vector<Param> params_;
  std::vector<Tensor> tensors_;
  std::vector<Block> blocks_;
  std::vector<Range> ranges_;  // sorted, apart from each other
  std::unordered_set<std::string> names_;
  ga_clip clip_;
  std::vector<ga_accum_phase> phases_;

  std::optional<LossScaler> scaler_;
  std::optional<ga_ema> ema_;
  NoiseScale noise_;
  bool clip_micro_ = false;  // some clipping is GA_CLIP_MICRO
  bool clip_units_ = false;  // some is GA_CLIP_AGC, of the reduced gradient

  size_t prepared_ = 0;    // parameters that have their arrays
  bool unfilled_ = false;  // some of these do not hold yet what they begin with
  bool lazy_ = false;      // some parameter has GA_ROWS_LAZY
  Layout owned_;           // of these
  std::vector<Arena> arenas_;
  void* scratch_ = nullptr;
  size_t scratch_bytes_ = 0;

  Window window_;
  int64_t windows_ = 0;
  int64_t steps_ = 0;
  int64_t dropped_ = 0;
  bool delivered_ = false;  // some parameter's gradient is

  // Working lists, sized by prepare() so that no later call allocates.
  TaskList<AccumulateTask> accumulate_tasks_;
  TaskList<NormTask> norm_tasks_;
  TaskList<UpdateTask> update_tasks_;  // of layers, rows and averages
  std::vector<UpdateTask> updates_;    // of each parameter; of no elements where it has none
  TaskList<FinishTask> finish_tasks_;
  TaskList<OpBytes> folded_;
  // What the last Op was folded for.
  struct Folded {
    ga_group group;
    int op;
    int64_t step;
    bool operator!=(const Folded& o) const {
      return group != o.group || op != o.op || step != o.step;
    }
  } folded_for_ = {};
  std::vector<ga_param> touched_;
  std::vector<ga_param> layers_;  // of these, those whose update needs other passes first
  std::vector<UnitTask> unit_tasks_;
  std::vector<AgcTask> agc_tasks_;
  std::vector<FactorTask> factor_tasks_;
  int64_t rows_held_ = 0;  // contributed in this window, repeated ones too
  bool plain_ = true;      // contributions need nothing but to be added
  bool adopts_ = false;    // first ones are left where they are
  bool noise_repeated_ = false;
  struct {
    int64_t index;
    double weight;
    double window_weight;                    // with it
  } micro_ = {};                             // of the contributions that are being planned
  std::vector<Contribution> contributions_;  // of the open micro-batch, when deferring
  std::vector<Partial> micro_partials_;
};

// The sum over partials in a fixed pairwise order.
double sum(const Partial* partials, int64_t count, double Partial::*field);
double clip_factor(const ga_clip& clip, double norm);

ga_clip default_clip();
void check_clip(const ga_clip& clip);
ga_config default_config();
void check_config(const ga_config& config);
ga_ema default_ema();
void check_ema(const ga_ema& ema);

}  // namespace ga
