// SPDX-License-Identifier: Apache-2.0
// Groups and parameters as the host knows them, and the list of the arrays that a parameter owns.
#pragma once

#include <array>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "optimizer.hpp"
#include "tables.hpp"

namespace ga {

struct Group {
  ga_optimizer optimizer;
  const OptimizerInfo* info;
  int op[2];  // position in AllOps for vectors and for matrices; -1: none
  bool own_clip;
  ga_clip clip;
  ga_schedule schedule;
  Table<double> rates;  // of a GA_SCHEDULE_TABLE
};

// What the passes read of a parameter. The first cache line is all that a plain contribution needs.
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
  unsigned char held_as = 0;  // Held
  bool f64 : 1;               // computed in double
  bool acquired : 1;
  bool adopted_late : 1;  // what it is adopted with is to be divided by the loss scale of the step
  bool frozen = false;
  bool stale = false;  // the partials are not those of the accumulator

  void* data;
  void* state[kMaxSlots] = {};
  void* master = nullptr;
  void* average = nullptr;
  double held_weight = 0;     // GA_ACCUMULATE_RUNNING_MEAN: the weights that the mean is over
  int64_t contributions = 0;  // in this window
  int64_t last_micro = -1;    // micro-batch of the last one
  ga_group group;
  bool matrix = false;     // rank >= 2
  bool delivered = false;  // the accumulator holds the last step's gradient, for the program
  bool pending = false;    // in the list of tasks
  bool pair = false;       // its accumulator is one, of two arrays
  bool owns = false;       // it has its arrays
  bool accumulator_written = false;  // in some window; so are the others
  bool state_written = false;
  bool average_written = false;
  bool state_due = false;   // its state is to be filled with what it begins with
  bool master_due = false;  // its master is to be taken from it

  Param() : f64(false), acquired(false), adopted_late(false) {}
  Held held() const { return static_cast<Held>(held_as); }
  void hold(Held h) { held_as = static_cast<unsigned char>(h); }
  int32_t real() const { return f64 ? GA_F64 : GA_F32; }  // the dtype that it is computed in
};

inline UnitPattern units_of(const std::vector<int64_t>& shape, uint32_t reduced) {
  return make_units(static_cast<int32_t>(shape.size()), shape.data(), reduced);
}

// Sums over units and what is made of them.
struct Units {
  // both: sums over the parameter too, and factors.
  Units(Backend& backend, const UnitPattern& pattern, bool both);
  static size_t bytes(const UnitPattern& pattern, bool both);  // of the arrays

  Table<UnitPattern> pattern;  // one
  Buffer block;                // of all four arrays
  double* gradient;            // sums
  double* param = nullptr;
  void* factors = nullptr;  // of the type computed in
  UnitTotals* totals = nullptr;
};

// What few passes read of a parameter.
struct Tensor {
  std::string name;
  std::vector<int64_t> shape;
  ga_param_options options;
  int64_t rows;           // shape[0]
  void* low = nullptr;    // of a compensated accumulator
  RowSet* set = nullptr;  // with ga_param_options.rows
  // kClipUnits: under GA_CLIP_AGC. The other two: of a factored second moment, the sums over the last
  // two axes as matrices.
  enum { kClipUnits, kFactorRows, kFactorColumns, kUnits };
  std::unique_ptr<Units> units[kUnits];
};

// The last two axes of a tensor, taken as matrices.
struct Matrices {
  int64_t rows, columns, count;
};
Matrices matrices_of(const Tensor& t);

// ---- The arrays that a parameter owns -----------------------------------------------------------

// Each kind lies in arenas of its own.
enum ArrayKind {
  kAccumulator,
  kLow,                          // of a compensated accumulator
  kState,                        // the first slot; the others follow
  kMaster = kState + kMaxSlots,  // f32, of a 16-bit parameter
  kAverage,
  kRowSlots,
  kRowSet,
  kPartials,
  kArrayKinds
};

struct OwnedArray {
  int kind;          // ArrayKind; kState + k for slot k
  int32_t format;    // ga_dtype of its elements; 0: structs of the library
  int64_t count;     // elements
  size_t bytes;      // padded to whole cache lines, but for partials
  double initial;    // what every element begins with
  const char* name;  // as PyTorch names it, whatever the flavor; NULL: derived, not to be saved
};

// Fixed capacity: asking for it allocates nothing.
struct OwnedArrays {
  std::array<OwnedArray, kArrayKinds> list;
  size_t size = 0;

  const OwnedArray* begin() const { return list.data(); }
  const OwnedArray* end() const { return list.data() + size; }
};

// All arrays that a parameter has or is going to have, in the order of ArrayKind, except its Units: this
// list is what layout, accounting, allocation and filling go by. ema: of the context.
OwnedArrays arrays_of(const Param& p, const Tensor& t, const Group& g, int32_t accumulation,
                      const std::optional<ga_ema>& ema);
// Hands one of them to the parameter.
void set_array(Param& p, Tensor& t, int kind, void* data);

int32_t state_format(const Param& p, const Group& g);
int32_t average_format(const Param& p, const std::optional<ga_ema>& ema);
bool has_master(const Param& p, const Tensor& t, const Group& g);

}  // namespace ga
