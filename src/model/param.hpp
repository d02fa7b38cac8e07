// SPDX-License-Identifier: Apache-2.0
// Groups and parameters as the host knows them, and the list of all that a context has.
#pragma once

#include <cmath>
#include <cstddef>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "core/error.hpp"
#include "model/division.hpp"
#include "model/table.hpp"
#include "numbers/cut.hpp"
#include "numbers/optimizer.hpp"

namespace ga {

struct Group {
  ga_optimizer optimizer;
  const OptimizerInfo* info;
  int op[2];  // position in AllOps for vectors and for matrices; -1: none
  bool own_clip;
  ga_clip clip;
  ga_schedule schedule;
  Table<double> rates;                                  // of a GA_SCHEDULE_TABLE
  std::shared_ptr<const std::vector<double>> ns_table;  // what optimizer.ns_table points to

  // See OptimizerBase.
  double share_of_average() const { return info->share_of_average(optimizer); }
  // Takes an optimizer of the same kind, and its own copy of what that points to.
  void set_optimizer(const ga_optimizer& o);

  // Opens the engine of the matrix products that its matrices need with that optimizer, of the same
  // kind. See Backend::prepare_matmul().
  void prepare_products(Backend& backend, const ga_optimizer& o) const {
    if (op[1] >= 0 && op_info(op[1]).orthogonal) backend.prepare_matmul(0, o.ns_precision);
  }
};

constexpr ga_clip default_clip() {
  ga_clip c = {};
  c.struct_size = sizeof c;
  c.max_norm = -1;
  c.max_value = HUGE_VAL;
  c.agc_factor = 0.01;
  c.agc_eps = 1e-3;
  return c;
}
void check_clip(const ga_clip& clip, const ga_config& config);
// Whether every micro-batch is clipped.
bool is_of_micros(const ga_clip& c);

// What ga_param_add and one entry of ga_params_add_flat say of a parameter.
struct NewParam {
  const char* name;
  ga_group group;
  int32_t rank;
  const int64_t* shape;
  int64_t offset;
  ga_param_options options;
};

// The parameters of one pointer of ga_accumulate.
struct Block {
  ga_param first;
  ga_param count;
};

// Whether the parameter was updated before its window was decided, and where the result is.
enum class Ahead : unsigned char { kNot, kInPlace, kOutOfPlace };

// What the open window has brought to a parameter. The initial values are those of an empty window.
struct InWindow {
  Held held = Held::kNothing;
  bool acquired : 1;       // the program has the accumulator
  bool busy : 1;           // a call adds to it, while calls of other threads may run
  bool borrowed_late : 1;  // borrowed_scale still lacks the loss scale, which only the device knows
  bool lent : 1;           // the borrowed gradient has become the sum, whose norm is known
  bool stale = false;      // someone wrote the accumulator without its partials
  bool ready = false;      // nothing more comes to it in this window

  InWindow() : acquired(false), busy(false), borrowed_late(false), lent(false) {}
};

// What some options have to know of the contributions of the open window. The initial values are those of an empty one.
struct ParamContributions {
  int64_t count = 0;
  int64_t last_micro = -1;  // micro-batch of the last one
  bool pending = false;     // one is in the list of tasks
};

// The arrays of state: those of the slots and, behind them, the scales of the slots that are codes.
constexpr int kStateArrays = 2 * kMaxSlots;

// What the passes need of a parameter. A plain contribution needs the first cache line alone.
struct alignas(64) Param {
  void* accumulator = nullptr;
  Partial* partials = nullptr;
  int64_t count;
  int64_t offset;                  // elements from the start of its block
  const void* checked = nullptr;   // the last gradient address that was found to be readable
  const void* borrowed = nullptr;  // under Held::kBorrowed: the gradient, in the program's buffer
  double borrowed_scale = 0;
  unsigned char dtype;
  unsigned char gradient_dtype;
  unsigned char accumulator_dtype;
  // Threads that exchange in the background read these while calls write `window`.
  bool f64 : 1;  // computed in double
  Reduction reduction : 2;
  bool frozen : 1;
  InWindow window;

  const void* checked_before = nullptr;  // the one before it: programs use two buffers in turn
  void* data;
  void* state[kStateArrays] = {};
  void* master = nullptr;
  void* average = nullptr;
  void* emitted = nullptr;
  const void* reduced =
      nullptr;             // under Held::kReduced: the gradient, of the compute type; it may exist
                           // in `shard` alone
  Range shard = {0, 0};    // the elements that this rank keeps state of and updates; count: all
  double held_weight = 0;  // GA_ACCUMULATE_RUNNING_MEAN: sum of the weights in the mean
  ParamContributions contributions;
  ga_group group;
  int16_t code_block = 0;  // elements of a block of state in 8 bits (codes.hpp); 0: it is f32
  bool matrix = false;     // rank >= 2
  bool delivered = false;  // the accumulator holds the last step's gradient, for the program
  bool pair = false;       // the accumulator consists of two 16-bit arrays
  bool owns = false;       // the arrays of the parameter exist
  bool wanted = false;     // they are to exist although it is frozen, since another rank has them
  bool accumulator_written = false;  // by some window since it was allocated
  bool state_written = false;
  bool average_written = false;
  Ahead ahead = Ahead::kNot;
  bool state_due = false;   // the state has yet to be filled with its initial value
  bool unrounded = false;   // the parameter is not what the master weights round to
  bool master_due = false;  // the master weights have yet to be copied from the parameter

  Param() : f64(false), reduction(Reduction::kSum), frozen(false) {}
  Held held() const { return window.held; }
  void hold(Held h) { window.held = h; }
  int32_t real() const { return f64 ? GA_F64 : GA_F32; }  // the dtype of the computation
  bool fits_accumulator() const { return accumulator_dtype == real(); }
  // Whether a buffer with a gradient may become the accumulator.
  bool may_lend() const {
    return fits_accumulator() && gradient_dtype == accumulator_dtype && is_sum(reduction);
  }
  bool lacks_arrays() const { return !owns && (!frozen || wanted); }
  Array shard_data() const;  // of the parameter itself: its shard
  Array values() const { return master ? Array{master, GA_F32} : shard_data(); }
  // The same while the master weights have yet to be copied from the parameter.
  Array current() const { return master_due ? shard_data() : values(); }
};

// What decides how the parameters are clipped and updated: the groups, and the clipping of those that have none of
// their own.
struct Rules {
  const std::vector<Group>& groups;
  const ga_clip& clip;

  const Group& group_of(const Param& p) const { return groups[static_cast<size_t>(p.group)]; }
  int op_of(const Param& p) const { return group_of(p).op[p.matrix ? 1 : 0]; }
  const ga_clip& clip_of(const Group& g) const { return g.own_clip ? g.clip : clip; }
  const ga_clip& clip_of(const Param& p) const {
    return is_sum(p.reduction) ? clip_of(group_of(p)) : unclipped;
  }

 private:
  // Not left to a constructor: those of a program that links the library statically may run earlier.
  static constexpr ga_clip unclipped = default_clip();
};

static_assert(sizeof(void*) != 8 || offsetof(Param, checked_before) == 64, "the first cache line");

// Which rank keeps the state of a parameter where the optimizer is sharded: each that of a piece, if an
// element is updated by itself, by norms over the parameter and by sums over rows or units, none of which
// lies in two pieces; one rank, where an update needs the whole; every rank all of it.
enum class Keeper { kPieces, kOwner, kAll };

inline UnitPattern units_of(const std::vector<int64_t>& shape, uint32_t reduced) {
  return make_units(static_cast<int32_t>(shape.size()), shape.data(), reduced);
}

// Sums over the units of a tensor, and the clip factors computed from them.
struct Units {
  // both: with the sums over the parameter and the factors.
  Units(Backend& backend, const UnitPattern& pattern, bool both);
  static size_t bytes(const UnitPattern& pattern, bool both);  // of the arrays

  Table<UnitPattern> pattern;  // one
  Buffer block;                // of all four arrays
  double* gradient;            // sums
  double* param = nullptr;
  void* factors = nullptr;  // float or double, as the parameter is computed
  UnitTotals* totals = nullptr;
};

// Where a parameter lies in one that several ranks have in parts.
struct Part {
  std::vector<int64_t> whole,
      first;           // its shape, and where this part begins; empty: this is the whole
  int32_t copies = 1;  // ranks that have the same part
  bool is_cut(const std::vector<int64_t>& shape) const { return !whole.empty() && whole != shape; }
  // Whether runs of `block` elements of a row of the whole, counted from its start, are in the part whole or not at all.
  bool has_whole(int64_t block, const std::vector<int64_t>& shape) const;
  // The place of its first element in the whole, where the elements of the part lie side by side there; else 0.
  int64_t offset(const std::vector<int64_t>& shape) const;
};

// Keys of random bits that are given in turn are less.
constexpr int32_t kLeastNameKey = 1 << 30;

// What few passes need of a parameter.
struct Tensor {
  const char* name;  // a key of ParamList::names_
  std::vector<int64_t> shape;
  ga_param_options options;
  int64_t rows;  // shape[0]
  Cut cut;       // of a tensor of rank 2, or with ga_param_options.cut_matrices
  double lr_scale = 1, weight_decay_scale = 1;
  Part part;
  bool removed = false;
  // Its number in the keys of random bits, which no other has or had. That of a part, which the ranks do not add in one
  // order, is made of its name.
  int32_t key = 0;
  size_t made_by = 0;     // of the calls that made arrays, the one that made its own
  void* low = nullptr;    // of a compensated accumulator
  RowSet* set = nullptr;  // with ga_param_options.rows
  // kClipUnits: under GA_CLIP_AGC. The other two: of a factored second moment, the sums over the last
  // two axes as matrices.
  enum { kClipUnits, kFactorRows, kFactorColumns, kUnits };
  std::unique_ptr<Units> units[kUnits];
};

// The groups and parameters of a context, in the order in which they were added. A removed parameter stays
// in the list, as one that is frozen and owns nothing.
class ParamList {
 public:
  std::vector<Group> groups;
  ga_clip clip = default_clip();  // of the groups that have none of their own
  bool sharded = false;           // state lies on the ranks as keeper() says
  bool whole_layers = false;      // layer-wise optimizers need the whole tensor
  bool only_sums = true;          // no parameter with another Reduction has been added

  size_t size() const { return params_.size(); }
  auto begin() { return params_.begin(); }
  auto end() { return params_.end(); }
  auto begin() const { return params_.begin(); }
  auto end() const { return params_.end(); }
  // Which: a ga_param, or the same number as size_t.
  struct Which {
    Which(size_t i) : i(i) {}
    Which(ga_param id) : i(static_cast<size_t>(id)) {}
    size_t i;
  };
  Param& operator[](Which w) { return params_[w.i]; }
  const Param& operator[](Which w) const { return params_[w.i]; }
  Tensor& tensor(Which w) { return tensors_[w.i]; }
  const Tensor& tensor(Which w) const { return tensors_[w.i]; }
  const char* name(Which w) const { return tensors_[w.i].name; }
  Subject subject(Which w) const { return {"parameter", name(w)}; }
  const std::vector<Tensor>& tensors() const { return tensors_; }
  const std::vector<Block>& blocks() const { return blocks_; }

  // Each of these throws GA_ERROR_INVALID_ARGUMENT if there is no such group or parameter.
  const Group& group(ga_group id) const;
  Group& group(ga_group id) { return const_cast<Group&>(std::as_const(*this).group(id)); }
  const Param& get(ga_param id) const;
  Param& get(ga_param id) { return const_cast<Param&>(std::as_const(*this).get(id)); }
  ga_param_info info(ga_param id) const;
  size_t slot(ga_param id) const;

  ga_param find(std::string_view name) const;  // -1: there is no parameter of that name
  // A parameter whose name is that of state of an owner with this name; -1: there is none.
  ga_param find_state_of(const char* owner) const;

  void make_room(size_t count);  // for parameters of one block, so that only names are allocated
  ga_param add(const NewParam& e, void* data, int32_t dtype, int64_t count);
  void add_block(ga_param first);  // of all parameters from this one on
  void drop_from(size_t first);    // takes back what was added since
  void remove(ga_param id);
  int32_t next_key() const { return next_key_; }  // larger than all keys that there are or were
  void set_next_key(int32_t key) { next_key_ = key; }

  // The rules that the parameters follow. A function that takes others says what would follow from those.
  Rules rules() const { return {groups, clip}; }
  const Group& group_of(const Param& p) const { return rules().group_of(p); }
  int op_of(const Param& p) const { return rules().op_of(p); }
  void set_part(Which w, Part part);
  static int16_t code_block_of(const Tensor& t, const Part& part);
  // How the state of a slot is kept in 8 bits.
  Code code_of(const Param& p, int slot) const { return code_of(p, slot, rules()); }
  // Whether some of its state is.
  bool is_coded(const Param& p) const { return is_coded(p, rules()); }
  bool has_master(Which w) const { return has_master(w, rules()); }
  // Whether gradients of some of its rows may come.
  bool takes_rows(Which w) const {
    return tensor(w).options.rows != GA_ROWS_NONE && !tensor(w).removed;
  }
  // Whether its master weights follow what the program writes to it.
  bool follows(Which w) const { return tensor(w).options.follow_data != 0 && has_master(w); }
  Keeper keeper(Which w) const { return keeper(w, rules()); }
  Keeper keeper(Which w, const Rules& by) const;
  // Elements of which each piece has a whole number: under Keeper::kPieces those of a row or of the units with
  // an outermost index, where there are any, else a cache line.
  int64_t grain(Which w) const { return grain(w, rules()); }
  int64_t grain(Which w, const Rules& by) const;
  // Whether its update takes norms over the parameter first.
  bool is_layered(const Param& p) const;
  // Whether a norm over all parameters of its optimizer clips its gradient (ga_optimizer.max_grad_norm).
  bool is_bounded(const Param& p) const {
    const Group& g = group_of(p);
    return g.info->limits_norm && g.optimizer.max_grad_norm > 0;
  }
  // Whether these norms are of pieces on several ranks.
  bool is_layered_over_ranks(Which w) const {
    return sharded && is_layered((*this)[w]) && keeper(w) == Keeper::kPieces;
  }

  // The accumulator of a parameter holds its gradient for the program, until forget_delivered().
  void deliver(Param& p) { p.delivered = any_delivered_ = true; }
  void forget_delivered();

  const ga_clip& clip_of(const Group& g) const { return rules().clip_of(g); }
  const ga_clip& clip_of(const Param& p) const { return rules().clip_of(p); }
  bool clips_micro(const Param& p) const { return is_of_micros(clip_of(p)); }
  // Whether this rank clips its gradients by units: contributions are clipped by whoever brings them, the
  // gradient of a window by those who update the parameter.
  bool needs_units(Which w) const { return needs_units(w, rules()); }
  bool needs_units(Which w, const Rules& by) const;
  // Whether the ranks that keep its state clip the gradient of a window by units, each those that it keeps.
  bool is_clipped_in_parts(Which w) const { return is_clipped_in_parts(w, rules()); }
  // The units under GA_CLIP_AGC that this rank clips, and the rows of state that it keeps.
  UnitPattern clip_units(Which w) const { return clip_units(w, rules()); }
  UnitPattern clip_units(Which w, const Rules& by) const;
  UnitPattern state_rows(Which w) const;
  // The axes that the units of a parameter under GA_CLIP_AGC are reduced over.
  uint32_t units_axes(Which w) const { return units_axes(w, rules()); }
  // Whether the reduced gradient is clipped by units.
  bool by_units(Which w) const;
  // Whether some group's reduced gradients are.
  bool clips_units() const;
  // Whether it can be clipped by units and updated in one pass, piece by piece.
  bool in_pieces(Which w) const;
  // Whether a norm of the gradient after clipping by value is needed, which accumulating passes do not
  // compute.
  bool norm_after_value(const Param& p) const;

 private:
  static Code code_of(const Param& p, int slot, const Rules& by);
  static bool is_coded(const Param& p, const Rules& by);
  bool has_master(Which w, const Rules& by) const;
  bool is_clipped_in_parts(Which w, const Rules& by) const;
  int64_t grain_of_updates(Which w, const Rules& by) const;
  uint32_t units_axes(Which w, const Rules& by) const;

  std::vector<Param> params_;
  std::vector<Tensor> tensors_;
  std::vector<Block> blocks_;
  using Names = std::map<std::string, ga_param, std::less<>>;
  Names names_;
  int32_t next_key_ = 0;
  bool any_delivered_ = false;
  std::vector<Names::node_type> removed_names_;
};

// The last two axes of a tensor, taken as matrices.
struct Matrices {
  int64_t rows, columns, count;
};
Matrices matrices_of(const Tensor& t);

// The clock of a context after so many steps with these numbers.
Clock clock_after(const OptimizerInfo& info, const ga_optimizer& o, int64_t steps);

size_t data_bytes(const Param& p);  // of the parameter itself

}  // namespace ga
