// SPDX-License-Identifier: Apache-2.0
// What comes to a window: gradients of whole micro-batches or of single parameters, rows, products, and what the
// program writes into an accumulator itself.
//   accumulator.cpp   whole gradients
//   micro.cpp         micro-batches, those that are checked or clipped as a whole, and the end of a window
//   products.cpp      matrix products, and accumulators in the program's hands
//   rows.cpp          gradients of some rows
#pragma once

#include <cstdint>
#include <vector>

#include "core/concurrent_calls.hpp"
#include "model/has_lists.hpp"
#include "model/model.hpp"
#include "window/lent_buffers.hpp"
#include "window/repetition.hpp"

namespace ga {

class Preparation;
class TableWriter;

// The gradient of a whole parameter.
struct Whole {
  ga_param param;
  const void* gradient;
  int32_t format;
};

class Accumulator final : HasLists {
 public:
  // callers: NULL where one thread at a time may use the context. calls: the number of the call that is being made,
  // of those that may change something.
  Accumulator(Model& model, TableWriter& writer, Preparation& preparation, ConcurrentCalls* callers,
              const uint64_t& calls);

  // The functions of the ABI.
  void accumulate(const void* const* gradients, size_t count, double weight,
                  const ga_micro_options& options);
  void micro_begin(int64_t index, double weight, const ga_micro_options& options);
  void accumulate_part(ga_param param, const void* gradient);
  void accumulate_rows(ga_param param, const void* indices, int32_t index_dtype, int64_t count,
                       const void* values);
  void accumulate_matmul(ga_param param, int64_t k, const void* a, int64_t lda, bool transpose_a,
                         const void* b, int64_t ldb, bool transpose_b, int32_t dtype);
  ga_accumulator acquire(ga_param param);
  void release(ga_param param);
  void micro_end();
  void micro_abort();
  void params_ready(Span<const ga_param> ids);
  ga_kept_info kept(int64_t since) const;

  // Throws unless the open micro-batch may be aborted. kept_by: why not, for another reason; NULL: none.
  void check_abort(const char* kept_by) const;

  // ---- Contributions of layers ----

  // data as it is added to an accumulator: divided by the loss scale, times the weight.
  Source contribution(const void* data, int32_t dtype, const Micro& micro) const;
  // Checks that these parameters can take a contribution to the open micro-batch now, and allocates their arrays.
  // what: the function that was called.
  void prepare_parts(Span<const Whole> parts, const char* what);
  // Adds the gradients of different parameters to the open micro-batch, in one pass.
  void contribute(Span<const Whole> given, bool may_borrow);

  // ---- What the window holds ----

  WindowTotals totals() const;                      // of the window as if it ended now
  int64_t rows_held() const { return rows_held_; }  // rows contributed, repeated ones included
  bool noise_repeated() const { return noise_repeated_; }
  void restore(int64_t rows_held, bool noise_repeated);
  void hold_rows(int64_t count) { rows_held_ += count; }  // which other ranks have brought
  // Zeros the rows that have no gradient yet, before something adds to all rows.
  void make_dense(ga_param id);
  // Copies a borrowed gradient into the accumulator, before something other than add_task adds to it.
  void store_borrowed(ga_param id);
  // The task of some rows of a parameter.
  RowsTask rows_task(ga_param id, const void* indices, int32_t index_dtype, int64_t rows,
                     const Source& values) const;
  // Tells the random bits of accumulation apart from those of other ranks.
  uint64_t rank_key() const {
    return static_cast<uint64_t>(model_.ranks->rank()) * 0x9e3779b97f4a7c15;
  }
  void forget_checks();  // there is new memory that gradients must not overlap
  void end_window();
  // Whether the window that ga_step ends has brought the same arrays as the one before, in the same way.
  bool repeats_window() const { return repetition_.is_same_window(calls_); }
  // ga_step has ended the window, which the next one may repeat.
  void keep_window() { repetition_.end_window(calls_); }
  int64_t bytes() const;

  void reserve(size_t params) override;

 private:
  // A contribution that is read at the end of its micro-batch.
  struct Contribution {
    int64_t number;  // see ga_kept_info
    ga_param param;
    int32_t format;  // of gradient
    const void* gradient;
    int64_t count;                  // elements of gradient
    const void* indices = nullptr;  // NULL: the whole gradient
    int64_t rows = 0;
    int32_t index_dtype = 0;
    size_t partials = 0;  // the first of its chunks among those of the micro-batch
  };
  // A gradient that came to Held::kBorrowed.
  struct Borrowed {
    int64_t number;  // see ga_kept_info
    ga_param param;
  };

  Micro make_micro(double weight, const ga_micro_options& options) const;
  // Whether gradients of the micro-batch are read. Those that the program has reduced over ranks are also of the others.
  bool reads(const Micro& micro) const {
    return micro.weight > 0 || model_.ranks->has_own_parameters();
  }
  void set_micro(const Micro& micro, int64_t index, double window_weight) {
    micro_ = {index, micro.weight, micro.loss_scale, window_weight};
  }
  ConcurrentCalls::Lock lock_callers() const {
    return callers_ ? callers_->lock() : ConcurrentCalls::Lock();
  }
  Param& part(ga_param id, const char* what);
  [[noreturn]] void refuse_taken(ga_param id, const char* what) const;
  [[noreturn]] void refuse_ready(ga_param id) const;
  void release_ready(ConcurrentCalls::Lock lock);
  void refuse(ga_param id, const char* what, bool adds_elsewhere) const;
  void check_gradient(ga_param id, const void* gradient);
  void check_new_gradient(ga_param id, const void* gradient);
  void check_lent(ga_param id, const void* gradient);
  void borrow(ga_param id, int64_t number, const Source& given);
  void add_to_held(Param& p, AccumulateTask& task, const Source& given);
  void lend(Param& p, AccumulateTask& task) const;
  void check_alive(ga_param id, const char* what, const void* data, int64_t bytes) const;
  void check_single(ga_param id) const;
  AccumulateTask* add_task(ga_param id, int64_t number, const Source& source,
                           bool may_borrow = true);
  void refine(ga_param id, AccumulateTask& task, Source& source);
  template <class Body>
  void each_gradient(const void* const* gradients, Body&& body);
  Repetition::Call list_tasks(const void* const* gradients, const Micro& micro, const Source& like,
                              bool opens);
  void borrow_again(const void* const* gradients, const Source& like);
  void change_tasks(const Source& like);
  void add(Span<const Whole> given, bool may_borrow, ConcurrentCalls::Lock* lock);
  bool take_part(ga_param id, const void* gradient);
  void accumulate_among_callers(ga_param id, const void* gradient);
  void add_unlocked(Param& p, ConcurrentCalls::Lock& lock);
  double unweighted() const;
  void count_contribution(Param& p);
  RowsTask rows_task(const Contribution& c, const Source& values) const {
    return rows_task(c.param, c.indices, c.index_dtype, c.rows, values);
  }
  int64_t oldest(int64_t since) const;
  void add_rows(const Contribution& c, const Source& values, const MicroPlan* plan);
  void defer(Contribution c);
  void settle(int64_t index);
  void list_contributions(const Micro& micro);
  void add_contributions(const Micro& micro);

  Model& model_;
  TableWriter& writer_;
  Preparation& preparation_;
  ConcurrentCalls* const callers_;
  const uint64_t& calls_;

  bool checked_ = false;            // some Param::checked is not NULL
  bool any_ready_ = false;          // ga_params_ready was called in this window
  bool added_ = false;              // an accumulator has something of the open micro-batch
  std::vector<Borrowed> borrowed_;  // in this window, in the order in which they came
  size_t borrowed_before_ = 0;      // of these, those that came before the open micro-batch
  LentBuffers lent_;
  int64_t latest_ = 0;  // the number of the gradient that came last
  int64_t rows_held_ = 0;
  bool noise_repeated_ = false;
  struct {
    int64_t index;
    double weight;
    double loss_scale;     // 0: only the device knows it
    double window_weight;  // of the window including this micro-batch
  } micro_ = {};           // the micro-batch of add_task()

  // Working lists, sized by reserve() so that no later call allocates.
  TaskList<AccumulateTask> tasks_;
  Repetition repetition_;

  // Of the open micro-batch, if micro-batches are checked before they are added:
  TaskList<NormTask> norm_tasks_;
  std::vector<Contribution> contributions_;
  std::vector<MicroInput> micro_inputs_;
  std::vector<ga_param> micro_units_;  // parameters clipped by units
  size_t micro_chunks_ = 0;
  int64_t reserved_chunks_ = 0;  // of the backend, by defer()
  size_t reserved_params_ = 0;
  State<Partial> micro_partials_;
  State<MicroPlan> micro_plans_;
};

}  // namespace ga
