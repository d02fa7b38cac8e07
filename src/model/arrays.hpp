// SPDX-License-Identifier: Apache-2.0
// The arrays that the library owns for the parameters of a context: which ones a parameter has, how large
// they are, where they lie, and what they begin with.
#pragma once

#include <array>
#include <memory>
#include <numeric>
#include <optional>
#include <vector>

#include "backend/codes.hpp"
#include "model/masters.hpp"
#include "model/param.hpp"
#include "model/placer.hpp"
#include "model/ranges.hpp"

namespace ga {

// The kinds of arrays that a parameter may own. Each kind lies in arenas of its own.
enum ArrayKind {
  kAccumulator,
  kLow,                             // of a compensated accumulator
  kState,                           // the first slot; the others follow
  kScales = kState + kMaxSlots,     // of a slot of codes; the others follow
  kMaster = kState + kStateArrays,  // f32, of a 16-bit parameter
  kAverage,
  kEmitted,  // of the first pass of a layer-wise Op, where it has no other place
  kRowSlots,
  kRowSet,
  kPartials,
  kArrayKinds
};

struct OwnedArray {
  int kind;          // ArrayKind; kState + k for slot k, kScales + k for its scales
  int32_t format;    // ga_dtype of its elements; 0: structs of the library
  int64_t count;     // elements
  size_t bytes;      // padded to whole cache lines, but for partials
  double initial;    // what every element begins with
  const char* name;  // as PyTorch names it, whatever the flavor; NULL: derived, not to be saved
};

// An array of a parameter's state that the program may read and write, under its name.
struct StateArray {
  const char* name;
  int32_t dtype;
  int64_t count;
  int kind;  // ArrayKind, or a number of the clock: see checkpoint/state.cpp
};

// A list of fixed capacity, so that no call for it allocates.
struct OwnedArrays {
  std::array<OwnedArray, kArrayKinds> list;
  size_t size = 0;

  const OwnedArray* begin() const { return list.data(); }
  const OwnedArray* end() const { return list.data() + size; }
};

class ParamArrays {
 public:
  ParamArrays(const ga_config& config, Backend& backend, ParamList& params, MemoryRanges& ranges,
              const std::optional<ga_ema>& ema)
      : config_(config), backend_(backend), params_(params), ranges_(ranges), ema_(ema) {}

  // All arrays that a parameter has or will have, in the order of ArrayKind, except its Units. Layout,
  // accounting, allocation and filling follow this list.
  OwnedArrays of(size_t param) const { return of(param, params_[param].shard); }
  // The same, as one rank alone would have them.
  OwnedArrays whole_of(size_t param) const { return of(param, {0, params_[param].count}); }
  // For how many elements of the parameter an array of state of that kind has one, if it has `count` for all: for
  // each, for a row, or for a block.
  static int64_t each_of(const Param& p, int kind, int64_t count) {
    return is_scales(kind) ? p.code_block : p.count / count;
  }
  // The elements of such an array that this rank has.
  static Range part_of(const Param& p, int kind, int64_t count) {
    if (p.shard.count == p.count) return {0, count};
    if (p.shard.count == 0) return {0, 0};
    return part_of(each_of(p, kind, count), p.shard);
  }
  // The elements of such an array that belong to a share of the parameter.
  static Range part_of(int64_t each, const Range& shard) {
    return {shard.first / each, (shard.count + each - 1) / each};
  }
  bool is_compensated(const Param& p) const;  // whether its accumulator is a pair
  static bool is_scales(int kind) { return kind >= kScales && kind < kMaster; }
  Array state_of(const Param& p, int slot) const;
  static float* scales_of(const Param& p, int slot) {  // of a slot of codes
    return static_cast<float*>(p.state[kMaxSlots + slot]);
  }
  Array average_of(const Param& p) const;
  static void* data(const Param& p, int kind) {  // kState to kAverage
    return kind == kMaster ? p.master : kind == kAverage ? p.average : p.state[kind - kState];
  }
  void* scratch() const { return scratch_.data(); }  // for the updates that emit
  // Elements that what an update emits takes there, whole cache lines, if it is not the accumulator.
  static int64_t emitted_room(const Param& p) { return (p.count + 15) / 16 * 16; }
  int64_t chunks() const { return owned_.chunks(); }
  // Has the backend allocate for calls with that many chunks and parameters.
  void reserve(int64_t chunks, size_t params) const;

  // Whether some parameter that is not frozen has no arrays yet.
  bool lacking() const { return lacking_; }
  void look_for(const Param& p) { lacking_ = lacking_ || p.lacks_arrays(); }
  // Gives every parameter that is not frozen its arrays, if it has none yet: all of them or, if this throws,
  // none. Throws std::bad_alloc or std::length_error if memory runs out, and Error if another context has
  // master weights for the same memory.
  void make();
  // Throws GA_ERROR_OUT_OF_MEMORY with the name of the largest of the parameters that lack arrays.
  [[noreturn]] void fail_allocation() const;
  // Allocates the arrays of units for every parameter that has its other arrays and would be under GA_CLIP_AGC by
  // these rules. By parameter; NULL: it needs none.
  using ClipUnits = std::vector<std::unique_ptr<Units>>;
  ClipUnits new_clip_units(const Rules& by) const;
  void take_clip_units(ClipUnits made) noexcept;
  // Takes a parameter's arrays away, and frees those that were made with them if no parameter has any left.
  void free(size_t param);
  void claim(ga_param id, void* data);  // the parameter's new address, for its master weights
  // Adds the bytes of arrays to `m`, and returns how many of these are not resident yet. borrowing: windows
  // consist of one gradient, which stays in the program's buffer. lending: they are added up in such buffers.
  int64_t count(ga_memory& m, bool borrowing, bool lending) const;

  // Has master weights, if there are any, copied from their parameter again.
  void renew_master(Param& p) {
    if (p.master) p.master_due = unfilled_ = true;
  }
  // Fills new arrays whose initial value is not zero, and copies parameters to their master weights. If this
  // fails, the next call does the rest.
  void fill_new() {
    if (unfilled_) fill_unfilled();
  }
  // Copies between arrays of elements of a parameter, of any floating dtypes.
  void copy(const Param& p, const Array& from, const Array& to, int64_t count) {
    fill(p, from, 0, to, count);
  }
  // Writes zeros, for which the system gives the memory now and not when it is needed. No call of the backend has
  // more chunks than so many.
  void write(const Buffer& memory, int64_t most_chunks) const;
  void reset_state(size_t param);
  // Puts the average back to zeros, from which the first step makes it the parameter, to the last bit.
  void clear_average(Param& p);

 private:
  OwnedArrays of(size_t param, const Range& shard) const;
  // How much of the arenas is taken, in bytes.
  struct Layout {
    std::array<size_t, kArrayKinds> bytes = {};
    std::array<size_t, kArrayKinds> begin = {};  // not taken, before the first array
    size_t scratch = 0;                          // for the parameter whose update needs most

    size_t end(size_t kind) const { return add_capped(begin[kind], bytes[kind]); }
    int64_t before() const { return std::accumulate(begin.begin(), begin.end(), int64_t{0}); }
    int64_t chunks() const { return static_cast<int64_t>(bytes[kPartials] / sizeof(Partial)); }
  };
  // Arenas of the arrays that one call has made, and how many of their parameters are left.
  struct Made {
    Layout layout;
    std::array<Buffer, kArrayKinds> arenas;
    size_t params = 0;
  };
  struct New;

  bool gives_on_demand() const;
  bool is_written(const Param& p, const OwnedArray& a) const;
  bool is_written_at_once(int kind) const;
  bool never_stores(size_t param) const;
  template <class F>
  void each_units(size_t param, F&& f) const;
  template <class F>
  void place(size_t param, Layout& l, F&& f) const;
  Layout layout_of_new() const;
  void allocate(New& fresh);
  void claim_masters();
  void hand_over(New& fresh);
  void fill(const Param& p, const Array& from, double constant, const Array& to, int64_t count);
  void fill_unfilled();
  void fill_state(const Param& p, const OwnedArray& a);

  const ga_config& config_;
  Backend& backend_;
  ParamList& params_;
  MemoryRanges& ranges_;
  const std::optional<ga_ema>& ema_;
  Layout owned_;  // of all arrays
  std::vector<Made> made_;
  Buffer scratch_;
  MasterClaims claims_;
  bool lacking_ = false;
  bool unfilled_ = false;  // some arrays do not hold their initial values yet
};

}  // namespace ga
