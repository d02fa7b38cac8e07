// SPDX-License-Identifier: Apache-2.0
// What a ga_context is: groups, parameters, the window and the counters. No loop over elements is
// in here; it tells a Backend what to do to which tensors.
//   context.cpp     registration and memory
//   accumulate.cpp  contributions to a window
//   step.cpp        the end of a window
#pragma once

#include <atomic>
#include <memory>
#include <optional>
#include <string>
#include <unordered_set>
#include <vector>

#include "backend/backend.hpp"
#include "error.hpp"
#include "optimizer.hpp"
#include "schedule.hpp"
#include "window.hpp"

namespace ga {

// Tasks for a backend, written in place, field by field: one that is put together first and copied
// then makes the copy wait for its stores (measured: two thirds of the time of Context::plan).
template <class Task>
class TaskList {
 public:
  void reserve(size_t capacity) { tasks_.resize(capacity); }
  void clear() { size_ = 0; }
  Task& add() { return tasks_[size_++]; }  // holds what a former list left there
  Task& last() { return tasks_[size_ - 1]; }
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
  ga_param add_params(void* data, int32_t dtype, const ga_flat_entry* entries, size_t count,
                      const ga_param_options& options);
  void bind(ga_param param, void* data);
  void set_frozen(ga_param param, bool frozen);
  ga_memory memory() const;

  // accumulate.cpp
  void accumulate(const void* const* gradients, size_t count, double weight, const double* scale);
  void micro_begin(int64_t index, double weight, const double* scale);
  void accumulate_part(ga_param param, const void* gradient);
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
    Schedule schedule;
    Clock clock;  // the context's applied steps, with this optimizer's products
    int op;       // position in AllOps; -1: none
    int slots;
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
  };

  // A parameter: what the passes read. The first cache line is all that a contribution needs.
  struct alignas(64) Param {
    float* accumulator = nullptr;
    Partial* partials = nullptr;
    int64_t count;
    int64_t offset;                 // elements from the start of its block
    const void* checked = nullptr;  // the gradient address last found clear of the ranges
    Source adopted = {};
    int32_t gradient_dtype;
    Held held = Held::kNothing;
    bool frozen = false;
    bool acquired = false;
    bool stale = false;  // the partials are not those of the accumulator

    float* data;
    float* state[kMaxSlots] = {};
    Clock clock;             // its own updates
    double sum_squares = 0;  // of what a clip by norm sees, while stepping
    ga_group group;
    bool delivered = false;  // the accumulator holds the last step's gradient, for the program
  };

  // A parameter: what only messages and matrices read.
  struct Tensor {
    std::string name;
    int64_t rows;
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

  // Places in the arenas, in bytes: the accumulators, then the slots of optimizer state.
  static constexpr int kArrays = 1 + kMaxSlots;
  struct Layout {
    size_t bytes[kArrays] = {};
    int64_t chunks = 0;
  };

  // context.cpp
  void require_empty(const char* what) const;
  const Group& group(ga_group id) const;
  Group& group(ga_group id);
  const Param& param(ga_param id) const;
  Param& param(ga_param id);
  const char* name(ga_param id) const { return tensors_[static_cast<size_t>(id)].name.c_str(); }
  void update_accum_steps();
  void check_data(const char* name, const void* data, int64_t count, ga_param self) const;
  const Range* overlap(const void* data, int64_t bytes, ga_param except) const;
  void add_range(const Range& range);
  int arrays_of(const Param& p) const;
  void place(const Param& p, Layout& l, size_t (&offset)[kArrays]) const;
  Layout layout_of_new() const;
  void prepare();

  // accumulate.cpp
  Micro make_micro(double weight, const double* scale) const;
  float contribution_scale(const Micro& micro) const;
  void check_gradient(ga_param id, const void* gradient);
  void plan(Param& p, const void* gradient, float scale);
  void store_adopted(ga_param id);
  Param& part(ga_param id, const char* what);
  template <class Work>
  void or_invalidate(Work&& work);

  // step.cpp
  struct Reduction {
    double norm;  // of the whole gradient before clipping
    double smallest_factor;
    bool finite;
  };
  const ga_clip& clip_of(const Param& p) const;
  void fill_view(const Param& p, double mean, GradientView& v) const;
  bool norm_after_value(const Param& p) const;
  void take_norms(double mean);
  Reduction reduce(double mean);
  void update(double mean, Reduction& r);
  void empty_window();
  const char* first_nonfinite() const;
  void forget_delivered();
  template <class Work>
  void or_break(Work&& work);

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

  size_t prepared_ = 0;  // parameters that have their arrays
  Layout owned_;         // of these
  std::vector<Arena> arenas_;

  Window window_;
  int64_t windows_ = 0;
  int64_t steps_ = 0;
  bool delivered_ = false;  // some parameter's gradient is

  // Working lists, sized by prepare() so that no later call allocates.
  TaskList<AccumulateTask> accumulate_tasks_;
  TaskList<NormTask> norm_tasks_;
  TaskList<UpdateTask> update_tasks_;
  TaskList<FinishTask> finish_tasks_;
  TaskList<OpBytes> folded_;
  std::vector<ga_param> touched_;
};

ga_clip default_clip();
void check_clip(const ga_clip& clip);
ga_config default_config();
void check_config(const ga_config& config);

}  // namespace ga
