// SPDX-License-Identifier: Apache-2.0
// What a ga_context is: a ParamList with its ParamArrays, the window and the counters. The context has no
// loop over elements and computes no number of a step: it tells a Backend what to do to which tensors, by
// the tables of tables.hpp.
//   context/     groups, parameters, clips, moving averages
//   window/      contributions to a window
//   step/        the end of a window: the step, and the update of parameters and optimizer state
//   checkpoint/  optimizer state by name, and state on disk
//   model/       tables.cpp: what the host writes into the tables
// With a communicator, ranks/ has what the context does together with those of other ranks. step/eager.cpp has updates
// ahead of ga_step.
#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "batchnorm/batchnorm.hpp"
#include "core/callers.hpp"
#include "core/error.hpp"
#include "core/fork.hpp"
#include "core/fp_mode.hpp"
#include "core/log.hpp"
#include "model/arrays.hpp"
#include "model/tables.hpp"
#include "model/window.hpp"
#include "ranks/comm/comm.hpp"
#include "step/eager.hpp"

namespace ga {

inline Params params_of(const std::vector<ga_param>& list) { return {list.data(), list.size()}; }

class Checkpoint;
class Exchange;

class Context : BnContext {
  friend Checkpoint;
  friend Eager;
  friend Exchange;

 public:
  explicit Context(const ga_config& config);
  ~Context();

  // Whether this is a context that has not been destroyed, and that this process made, not its parent (see
  // fork.hpp).
  bool is_of_this_process() const {
    return mark_.load(std::memory_order_relaxed) == kMark + process_generation();
  }

  // Held during a call, which computes in the library's floating-point mode. Throws if the context
  // belongs to the parent process, is in another call, or has failed for good. changing: throws, too,
  // while parameters and EMA are exchanged. function: the one that was called.
  class Use {
   public:
    Use(const Context& context, const char* function, bool changing);
    ~Use() { context_.in_use_.store(false, std::memory_order_release); }
    Use(const Use&) = delete;
    Use& operator=(const Use&) = delete;

   private:
    const FpMode mode_;
    const Context& context_;
  };

  // A call of ga_accumulate_part or ga_params_ready, beside which other threads may make such calls
  // (ga_config.eager).
  class SharedUse {
   public:
    SharedUse(const Context& context, const char* function, bool changing);
    ~SharedUse();
    SharedUse(const SharedUse&) = delete;
    SharedUse& operator=(const SharedUse&) = delete;

   private:
    static thread_local const SharedUse* innermost_;  // of this thread's

    const FpMode mode_;
    const Context& context_;
    const SharedUse* outer_;
  };
  const Callers* callers() const { return callers_.get(); }  // NULL: one thread at a time

  Log* log() const { return log_.get(); }  // NULL: none
  template <class Value>
  void note(const char* key, Value value) const {
    if (log_) log_->note(key, value);
  }

  // context/
  void set_accum_steps(int64_t k);
  void set_accum_schedule(const int64_t* from_steps, const int64_t* accum_steps, size_t count);
  ga_group add_group(const ga_optimizer& optimizer);
  void set_optimizer(ga_group group, ga_optimizer optimizer);
  void set_lr(ga_group group, double lr);
  void set_weight_decay(ga_group group, double weight_decay);
  void set_schedule(ga_group group, const ga_schedule* schedule);
  void set_clip(const ga_clip* clip);
  void set_group_clip(ga_group group, const ga_clip* clip);
  double lr(ga_group group) const;
  double last_lr(ga_group group) const;
  void set_loss_scaler(const ga_loss_scaler* scaler);
  double loss_scale() const;
  const void* device_loss_scale() const;
  ga_param add_params(void* data, int32_t dtype, Span<const NewParam> entries);
  void bind(ga_param param, void* data);
  void changed(ga_param param);
  void set_frozen(ga_param param, bool frozen);
  void set_group_frozen(ga_group group, bool frozen);
  // which: lr_scale or weight_decay_scale, and that name.
  void set_scale(ga_param param, const char* name, double Tensor::*which, double scale);
  void remove(ga_param param);
  ga_memory memory() const;
  // Gives every parameter that is not frozen its arrays, if it has none yet.
  void make_arrays();
  void synchronize() { backend_->wait(); }
  void set_stream(void* stream);
  const ParamList& params() const { return params_; }
  BatchNorms& batch_norms() { return batch_norms_; }
  const BatchNorms& batch_norms() const { return batch_norms_; }
  // Throws if the backend can take no work now: after a fault, or because of a capture.
  void check_device() const { backend_->capturing(); }
  // Throws if an option of an update may not change now.
  void check_settable() const {
    check_device();
    check_not_in_place("a function that sets an option");
  }
  // Throws if parameters of this window have been updated in place.
  void check_not_in_place(const char* what) const {
    if (eager_) eager_->check_not_in_place(what);
  }

  // checkpoint/state.cpp
  int32_t state_count(ga_param param) const;
  ga_state_info state_info(ga_param param, int32_t index) const;
  void get_state(ga_param param, const char* name, void* out, int32_t dtype, int64_t count);
  void set_state(ga_param param, const char* name, const void* data, int32_t dtype, int64_t count);
  void reset_state(ga_param param);
  void set_steps(int64_t steps);

  // context/ema.cpp
  void set_ema(const ga_ema* ema);
  void ema_copy_to(ga_param param, void* out, int32_t dtype);
  void ema_swap(bool on);

  // window/
  void accumulate(const void* const* gradients, size_t count, double weight,
                  const ga_micro_options& options);
  void micro_begin(int64_t index, double weight, const ga_micro_options& options);
  void accumulate_part(ga_param param, const void* gradient);
  void accumulate_rows(ga_param param, const void* indices, int32_t index_dtype, int64_t count,
                       const void* values);
  void accumulate_matmul(ga_param param, int64_t k, const void* a, int64_t lda, bool transpose_a,
                         const void* b, int64_t ldb, bool transpose_b, int32_t dtype);
  ga_accumulator acquire_accumulator(ga_param param);
  void release_accumulator(ga_param param);
  void micro_end();
  void micro_abort();
  void params_ready(Span<const ga_param> ids);

  // step/step.cpp
  ga_window_info window();
  ga_step_result step();
  static ga_step_result pending();
  bool result(int64_t window, bool wait, ga_step_result& out) const {
    return backend_->result(window, wait, out);
  }
  void discard();
  // comm NULL: none.
  void set_comm(std::shared_ptr<Comm> comm, const ga_comm_options& options);
  bool shards() const;  // this rank keeps a part of the state alone
  int32_t rank() const;
  int32_t ranks() const;
  // work(ready) as the part of this rank in a call that succeeds on all ranks or on none: before it
  // changes the context for good, or exchanges anything, work calls ready(), which throws if another rank
  // has failed. alone: only rank 0 works, unless ranks have state that the others do not have.
  using Ready = std::function<void()>;
  void on_all_ranks(const char* what, bool alone, const std::function<void(const Ready&)>& work);
  const void* gradient(ga_param param, int32_t* dtype, int64_t* count) const;

 private:
  // A contribution that is read at the end of its micro-batch.
  struct Contribution {
    ga_param param;
    const void* gradient;
    int32_t format;       // of gradient
    const void* indices;  // NULL: the whole gradient
    int32_t index_dtype;
    int64_t count;  // elements of gradient
    int64_t rows;
    size_t partials;  // the first of its chunks among those of the micro-batch
  };

  // context/
  void check_thread(const char* function) const;
  [[noreturn]] void fail_foreign() const;
  [[noreturn]] static void fail_in_use();
  [[noreturn]] static void fail_swapped(const char* function);
  void check_no_capture(const char* what) const;
  void update_accum_steps();
  void look_up_accum_steps();
  void change_optimizer(ga_group id, const ga_optimizer& o);
  const Control& control() const;
  int64_t steps() const { return control().steps; }
  int64_t steps_seen() const;
  void set_tables() final;
  void check_name(const Subject& of, const char* name) const final;
  int64_t known_accum_steps() const final { return accum_due_ ? 0 : window_.accum_steps(); }
  void check_data(const char* name, const void* data, int64_t count, int32_t size,
                  ga_param self) const;
  void check_options(const NewParam& e, int32_t dtype) const;
  int64_t bytes_of_lists(size_t params) const;
  void prepare();
  void make_lacking();
  void make_own();

  // checkpoint/state.cpp
  std::vector<StateArray> states_of(size_t param) const;
  StateArray state_for(ga_param id, const char* name, int32_t dtype, int64_t count,
                       const char* what);
  void each_piece(ga_param id, const Array& own, int64_t count, const TakePiece& take);
  void begin_piece(ga_param id, const char* what, const char* name);
  ParamState param_state(size_t param) const;
  void follow_data(ga_param id);
  void follow_data();  // of all parameters
  void write_copies(const std::function<bool(ga_param)>& written, const Ready& ready = {});
  std::vector<ParamState> param_states() const;
  void set_param_state(size_t param, const ParamState& state);

  // context/ema.cpp
  void check_ema_kept(const char* what) const;
  bool swaps_in_place(const Param& p) const;

  // model/tables.cpp
  // The other ranks have to be asked whether they agree. tensors: on parameters and layers too.
  void settings_changed(bool tensors) final;
  Exchange* exchange() final { return exchange_.get(); }
  void tell_settings();
  void tell_checksum();
  void tell_groups();
  void tell_scaler();
  void tell_scales(size_t param);
  void describe(size_t param);
  void describe_input(size_t param);
  void describe_update(size_t param);
  void describe_units(size_t param);
  void describe_factored(size_t param);
  void describe_layered(size_t param);
  void set_arrays(size_t param);
  void describe_views(size_t param);
  Source source_of(ga_param id) const;
  template <class F>
  void each_source(size_t param, F&& f);
  void set_gradient(size_t param);
  bool move_gradient(size_t param);
  void tell_moved();
  void edit_params();
  void tell_param(size_t param);
  void tell_sum(size_t param, const Array& sum);
  void flush();

  // window/
  Micro make_micro(double weight, const ga_micro_options& options) const;
  bool late_scale() const { return scaled_ && config_.device != GA_DEVICE_CPU; }
  Source contribution(const void* data, int32_t dtype, const Micro& micro) const final;
  Source adopted_of(const Param& p) const {
    return {p.adopted, p.gradient_dtype, p.adopted_scale,
            p.adopted_late ? &tables_.control.at()->scaler.scale : nullptr};
  }
  void set_micro(const Micro& micro, int64_t index, double window_weight) {
    micro_ = {index, micro.weight, micro.loss_scale, window_weight};
  }
  Callers::Lock lock_callers() const { return callers_ ? callers_->lock() : Callers::Lock(); }
  Param& part(ga_param id, const char* what);
  [[noreturn]] void refuse_taken(ga_param id, const char* what) const;
  [[noreturn]] void refuse_ready(ga_param id) const;
  void release_ready(Callers::Lock lock);
  void refuse(ga_param id, const char* what, bool adds_elsewhere) const;
  void check_gradient(ga_param id, const void* gradient);
  void check_new_gradient(ga_param id, const void* gradient);
  void forget_checks();
  void check_alive(ga_param id, const char* what, const void* data, int64_t bytes) const;
  void check_single(ga_param id) const;
  void check_values(ga_param id, const char* what, const void* data, int64_t count,
                    int32_t size) const;
  Array target_of(ga_param id) const;
  AccumulateTask* add_task(ga_param id, const Source& source, bool may_adopt = true);
  void refine(ga_param id, AccumulateTask& task, Source& source);
  bool repeats(const void* const* gradients, size_t count) const;
  void change_tasks(const Source& like);
  void prepare_parts(Span<const Whole> parts, const char* what) final;
  void contribute(Span<const Whole> given, bool may_adopt) final;
  void add(Span<const Whole> given, bool may_adopt, Callers::Lock* lock);
  bool take_part(ga_param id, const void* gradient);
  void accumulate_among_callers(ga_param id, const void* gradient);
  void add_apart(Param& p, Callers::Lock& lock);
  double unweighted() const;
  void count_contribution(Param& p);
  void store_adopted(ga_param id);
  void make_dense(ga_param id);
  RowsTask rows_task(const Contribution& c, const Source& values) const;
  void add_rows(const Contribution& c, const Source& values, const MicroPlan* plan);
  bool deferring() const final {
    return config_.nonfinite == GA_NONFINITE_DROP_MICRO || clip_micro_;
  }
  void defer(Contribution c);
  void settle(int64_t index);
  void list_contributions(const Micro& micro);
  void add_contributions(const Micro& micro);

  // context/clip.cpp
  void change_clip(const ga_clip* clip, ga_clip& slot, bool* own);
  void choose_path();
  void check_no_sweeps(const ga_clip& clip) const;

  // step/step.cpp
  bool norm_wanted(ga_param id) const;
  bool needs_norm(size_t param);
  bool is_told(size_t param) const;
  StepSums tell_window(bool discards);
  [[noreturn]] void fail_nonfinite(const Control& c) const;
  WindowTotals window_totals() const;
  void empty_window();
  void discard_over_devices();
  void drop_window();
  // Runs an exchange of gradients; the window is invalid if it fails with some of them on their way.
  void or_lose_window(const std::function<void()>& exchange);
  ga_step_result discarded() const;
  void forget_delivered();
  // Runs a pass over parameters and state. If it fails half-way, the context is of no use after it.
  template <class Work>
  void or_break(Work&& work) {
    try {
      work();
    } catch (const Error& e) {
      if (e.status() == GA_ERROR_FAULT) broken_ = e;
      throw;
    }
  }

  // Runs an exchange in the middle of an update. If it fails, the context is of no use after it.
  template <class Work>
  void or_end(Work&& work) {
    try {
      work();
    } catch (const Error& e) {
      broken_ = e;
      throw;
    }
  }

  // step/update.cpp
  // Whether the sums of StepSums are taken before the decision.
  bool sums_first() const { return !backend_->passes_are_cut(); }
  void make_lists();
  void update();
  void update_layers();
  void update_batch(Params ids);
  void orthogonalize(ga_param id);
  void gather_updates();
  OrthogonalizeTask orthogonal_task(ga_param id) const;

  ga_config config_;
  std::unique_ptr<Log> log_;
  std::unique_ptr<Backend> backend_;
  mutable std::atomic<bool> in_use_{false};
  mutable uint64_t calls_ = 0;              // that may have changed something
  const std::unique_ptr<Callers> callers_;  // NULL: one thread at a time, in any call
  static constexpr uint64_t kMark = uint64_t{0x6743'7458} << 32;
  std::atomic<uint64_t> mark_{kMark + process_generation()};  // 0 once it is destroyed
  std::optional<Error> broken_;                               // why only destroy is legal

  ParamList params_;
  MemoryRanges ranges_{config_, *backend_, params_};
  std::optional<ga_ema> ema_;
  ParamArrays arrays_{config_, *backend_, params_, ranges_, ema_};
  bool ema_swapped_ = false;  // parameters and EMA are exchanged
  Buffer ema_kept_;           // parameters that were overwritten by their averages
  std::vector<AccumPhase> phases_;
  bool accum_due_ = false;  // the next window's K has to be looked up in phases_
  bool scaled_ = false;
  ga_loss_scaler scaler_ = {};
  bool clip_micro_ = false;  // some clipping is GA_CLIP_WHEN_MICRO

  ContextTables tables_;
  mutable Control last_control_ = {};  // as last read from a device
  std::vector<Source> told_;           // by parameter: the adopted gradient that the tables name
  std::vector<Word> moved_;            // new addresses of adopted gradients, to be sent

  size_t prepared_ = 0;   // parameters in the tables
  bool checked_ = false;  // some Param::checked is not NULL

  Window window_;
  BatchNorms batch_norms_{config_, *backend_, window_, params_, ranges_, *this};
  int64_t windows_ = 0;                          // calls of ga_step that returned GA_OK
  int64_t steps_set_ = 0, steps_set_after_ = 0;  // by set_steps(), after that many windows
  int64_t tickets_ = 0;
  bool any_ready_ = false;              // ga_params_ready was called in this window
  bool delivered_ = false;              // some accumulator holds a gradient for the program
  std::unique_ptr<Exchange> exchange_;  // NULL: the context is alone
  std::unique_ptr<Eager> eager_;        // NULL: all updates are made by ga_step
  uint64_t rank_key_ = 0;  // tells the random bits of accumulation apart from those of other ranks

  // Working lists, sized by prepare() so that no later call allocates.
  TaskList<AccumulateTask> accumulate_tasks_;
  std::vector<const void*> listed_;  // the gradients of the ga_accumulate whose tasks the list has
  // The number of the call (calls_) that left these tasks: that ga_accumulate, or the ga_step after it. The next
  // ga_accumulate may use them again if no other call came between. 0: the list has other tasks.
  uint64_t listed_by_ = 0;
  TaskList<NormTask> norm_tasks_;
  // Parameters by the passes of their update: one; one that also clips by units; several. Rebuilt when an
  // option changes.
  bool lists_due_ = true;
  bool unit_lists_ = false;        // some parameter is clipped by units
  bool clipped_in_parts_ = false;  // on the CPU: each rank clips its part of some parameter
  bool settles_units_ = false;     // settle_units() follows on the decision
  std::vector<ga_param> plain_, pieces_, layers_;
  std::vector<ga_param> layers_over_ranks_;  // whose norms are of pieces on several ranks
  std::vector<ga_param> ids_[3];             // of a batch of these
  std::vector<ga_param> norms_, units_first_, factored_first_;  // of StepSums
  std::vector<ga_param> units_of_share_;  // on a device: which this rank clips a part of, for all
  bool added_ = false;                    // an accumulator has something of the open micro-batch
  std::vector<ga_param> noted_;           // whose first gradient came with it and is adopted
  int64_t rows_held_ = 0;                 // rows contributed in this window, repeated ones included
  bool maxima_ = false;                   // a parameter with GA_REDUCE_MAX has been added
  bool plain_path_ = true;                // contributions are only added
  bool adopts_ = false;                   // first contributions stay in the program's buffers
  bool noise_repeated_ = false;
  struct {
    int64_t index;
    double weight;
    double loss_scale;     // 0: only the device knows it
    double window_weight;  // of the window including this micro-batch
  } micro_ = {};           // the micro-batch of add_task()
  // Of the open micro-batch, if micro-batches are checked before they are added:
  std::vector<Contribution> contributions_;
  std::vector<MicroInput> micro_inputs_;
  std::vector<ga_param> micro_units_;  // parameters clipped by units
  size_t micro_chunks_ = 0;
  int64_t reserved_chunks_ = 0;  // of the backend, by defer()
  size_t reserved_params_ = 0;
  State<Partial> micro_partials_;
  State<MicroPlan> micro_plans_;
};

ga_config default_config();
void check_config(const ga_config& config);
ga_ema default_ema();
void check_ema(const ga_ema& ema);

}  // namespace ga
