// SPDX-License-Identifier: Apache-2.0
// What a state file holds of a context: which tensors, under which names, and which texts. One save or
// one load. The file itself is state_file.hpp's.
//
// An open window is in the file rank by rank. What rank 0's window has lies under the names that a context
// alone gives it; in front of the names of rank r's stands "gradaccum.rank.r.", and so no parameter or
// layer can have them. A load on as many ranks gives each rank its own window; on any other number, rank r
// of R gets those of ranks r, r + R, and so on, one behind the other.
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <initializer_list>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "batchnorm/batchnorm.hpp"
#include "checkpoint/assembled_file.hpp"
#include "checkpoint/rank_files.hpp"
#include "core/error.hpp"
#include "files/fields.hpp"
#include "files/state_file.hpp"
#include "ranks/rank_state.hpp"
#include "ranks/stages.hpp"

namespace ga {

// What does not fit, one thing after the other.
class Problems {
 public:
  void add(const std::string& text) {
    constexpr size_t kMost = 700;
    ++count_;
    if (text_.empty())  // cut if need be, so that there is something to read
      text_ = text.size() < kMost ? text : text.substr(0, kMost) + "...";
    else if (text_.size() + text.size() < kMost)
      text_ += "; " + text;
    else
      ++left_out_;
  }
  void fail_if_any(const char* what) const {
    if (count_ == 0) return;
    const std::string more =
        left_out_ > 0 ? "; and " + std::to_string(left_out_) + " more" : std::string();
    fail(GA_ERROR_INVALID_ARGUMENT, "%s: %.800s%s", what, text_.c_str(), more.c_str());
  }

 private:
  std::string text_;
  size_t count_ = 0, left_out_ = 0;
};

class Checkpoint {
 public:
  // Throws if the context cannot be saved now. what: the function that was called.
  Checkpoint(const Stages& stages, const ga_state_options& options, const char* what);
  explicit Checkpoint(const Stages& stages);  // at any time, for settings

  using Ready = Ranks::Ready;

  // Where some rank's window is open, tells the ranks what each of them has to save; else does nothing.
  // Comes before the next two, in a call that all ranks make. ready() is called whenever no rank may fail
  // alone any more, and throws if one has.
  void gather(const Ready& ready);
  int64_t file_bytes();  // of what save() would write now
  // Where the optimizer is sharded or gather() has found an open window, every rank saves. An empty write:
  // this rank stores nothing. ready: as above; may be empty in a context that is alone.
  void save(const WriteAt& write, const Ready& ready = {});
  void check_load() const;  // throws if the context cannot be loaded now
  // ready, unless empty, is called when everything is checked and nothing has changed yet; it may throw. open: opens
  // files beside this one, if there is such a place.
  void load(int64_t size, const ReadAt& read, const Ready& ready = {}, const OpenBeside& open = {});

  // All that changes numbers, by key, in the order of groups, or of parameters and layers.
  using Settings = RankState::Settings;
  Settings settings() const;             // both of the next two
  Settings settings_of_context() const;  // and of its groups
  Settings settings_of_tensors(bool with_keys = true) const;
  static RankState::Items state_items(const Stages& stages);  // see RankState::items()

 private:
  // Kinds of a parameter's tensors, after those of its arrays (ArrayKind).
  enum {
    kValues = kArrayKinds,  // the parameter itself
    kStepNumber,
    kClockNumber,  // the first of kClockNumbers
    kParamKinds = kClockNumber + kClockNumbers
  };
  // Of a parameter in an open window: the gradient, and what its rounding lost; numbers of the host and of
  // the decision; the partials; of a gradient of some rows, which rows, and their values.
  enum { kHeldSums, kHeldLow, kHeldNumbers, kHeldPartials, kHeldRows, kHeldValues, kHeldKinds };
  // Of a layer, and of a layer in an open window.
  enum { kMean, kVariance, kSteps, kChannelSteps, kLayerKinds };
  enum { kChannels, kPass, kMicros, kHistory, kLayerWindowKinds };

  static constexpr int64_t kChannelNumbers = 11;      // those of each_field() of a BnChannel
  static constexpr int64_t kMost = int64_t{1} << 53;  // the largest count

  struct Saved {
    std::string name;
    int32_t dtype;
    std::vector<int64_t> shape;
    std::vector<Region> regions;    // where the elements lie
    std::vector<uint64_t> numbers;  // or the elements themselves, of GA_F64 and GA_I64
    ga_param shared_by = -1;        // or this rank's part of an array that all ranks have together
    DividedArray part = {};
    int32_t rank = -1;  // whose window it is of; regions and numbers are there on that rank alone

    int64_t bytes() const;
  };

  // What a file has for a parameter or a layer, by kind; -1: nothing.
  template <int kinds>
  struct Found {
    std::array<int64_t, kinds> tensor;
    Found() { tensor.fill(-1); }
    bool has(int kind) const { return tensor[static_cast<size_t>(kind)] >= 0; }
    int64_t at(int kind) const { return tensor[static_cast<size_t>(kind)]; }
  };
  struct ParamIn : Found<kParamKinds> {
    bool listed = false;  // the file is ours and has what this library knows of the parameter
    bool state = false;   // the file has state of it
    int64_t step = 0;
    double numbers[kClockNumbers] = {};  // of the clock
  };
  // What a window holds of a parameter, but for the gradient itself.
  struct Holding {
    Held held = Held::kNothing;
    bool stale = false;
    ParamContributions contributions = {};
    int64_t contributed = 0;
    double held_weight = 0, state_held_weight = 0;
  };
  struct HeldIn : Found<kHeldKinds>, Holding {
    std::vector<Partial> partials;
    std::vector<int64_t> rows;
  };
  struct LayerWindowIn : Found<kLayerWindowKinds> {
    BatchNorms::Snapshot snapshot;  // but for the running statistics
  };
  // The window of a rank in the file.
  struct WindowIn {
    int32_t rank;
    WindowCounts counts = {};
    int64_t micro_tensor = -1;
    std::vector<Micro> micros = {};
    std::vector<HeldIn> params = {};
    std::vector<LayerWindowIn> layers = {};

    int64_t size() const { return static_cast<int64_t>(micros.size()); }
  };
  // What this rank's window will hold of a parameter: the sum of these gradients.
  struct Joined : Holding {
    std::vector<const HeldIn*> dense, rows;
    std::vector<Partial> partials;  // of the first dense one, with the noise of all
  };
  // What the file says beside its tensors.
  struct TextsIn {
    bool counted = false;  // it has the counters
    Control control = {};
    WindowCounts window = {};  // of rank 0, then of the window of this rank
    int64_t host_windows = 0;
    std::vector<GroupState> groups;
    std::vector<Micro> micros;
  };
  // Settings that the context takes from the file.
  struct Taken {
    std::vector<Group> groups;
    ga_clip clip;
    Options options;
    uint64_t seed;
    double loss_scale;
    struct OfParam {
      double lr_scale, weight_decay_scale;
      bool frozen;
    };
    std::vector<OfParam> params;
    std::vector<char> frozen_layers;
    ParamArrays::ClipUnits clip_units;

    Rules rules() const { return {groups, clip}; }
  };

  // Both ways.
  bool has_parts() const;
  struct NamedArray {
    OwnedArray array;
    int32_t dtype;
    std::vector<int64_t> shape;
  };
  std::vector<NamedArray> arrays_of(size_t param) const;
  bool is_stochastic(size_t param) const;
  Fields param_settings(size_t param, bool with_key) const;
  Fields window_settings() const;
  void report(int64_t bytes, bool may_cancel);
  static std::string name_of_rank(int32_t rank, const std::string& name);
  static void put_counts(const WindowCounts& counts, Control& control);

  // Saving.
  StateWriter& writer();
  void collect();
  void sort();
  void collect_param(size_t param, const ParamState& state);
  void collect_held(size_t param, const ParamState& state);
  void collect_layer(ga_bn layer);
  void collect_layer_window(const std::string& window, int64_t channels,
                            const BatchNorms::Snapshot& s);
  void collect_rates();
  void collect_micros();
  template <class F>
  void collect_of_window(F&& collect);
  WindowCounts window_counts() const;
  void put_windows(size_t first, size_t end, const TakePiece& put);
  Metadata texts();
  void add_numbers(std::string name, int32_t dtype, std::vector<int64_t> shape,
                   std::vector<uint64_t> numbers);
  void store_live_gradients();

  // Loading: what the file has.
  void open_file(int64_t size, const ReadAt& read, const OpenBeside& open);
  static int64_t whole(double x, int64_t low, int64_t high, const char* what);
  void find_tensors();
  void find_param(size_t param, Problems& problems);
  void find_layer(ga_bn layer, Problems& problems);
  int64_t claim(const std::string& name);
  bool is_left_out(const std::string& name) const;
  void check_tensor(int64_t tensor, std::initializer_list<int32_t> dtypes,
                    const std::vector<int64_t>& shape, Problems& problems,
                    const char* why = "") const;
  bool is_cut(std::string_view key, std::string_view field) const;
  void compare_settings() const;
  bool may_be_taken(std::string_view key, std::string_view field) const;
  void read_keys();
  void read_all();
  std::vector<double> numbers(int64_t tensor) const;
  std::vector<int64_t> integers(int64_t tensor) const;
  void read_texts();
  void read_dropped_micros(uint64_t& dropped) const;
  void read_param(size_t param);
  void read_layer(ga_bn layer);
  void read_settings();
  void read_schedule(const std::string& key, Group& g) const;
  // The options of the context after the load.
  const Options& next_options() const { return taken_ ? taken_->options : model_.options; }

  // Loading: the open windows in the file, and what becomes of them.
  void find_ranks();
  void check_rank(const std::string& name) const;
  void find_windows(Problems& problems);
  WindowIn find_window(int32_t rank, Problems& problems);
  void read_windows();
  void read_held(size_t param, HeldIn& held) const;
  void read_layer_window(ga_bn layer, LayerWindowIn& in) const;
  void read_micros(WindowIn& window) const;
  static void check_counts(const WindowCounts& counts);
  void join_windows();
  void check_windows() const;
  void check_accum_steps() const;
  bool is_running_mean(const Param& p) const;
  double weight_of(const HeldIn& held) const;
  void join_param(size_t param);
  void join_layer(ga_bn layer);
  void reserve_joining();
  void fill(const Buffer& buffer, int64_t tensor);
  void place_windows();
  // The gradients of a parameter that lie in place as the file has them.
  size_t placed() const { return assembled_ ? 0 : 1; }
  void place_dense(size_t param);
  void place_rows(size_t param, const HeldIn& held);

  // Loading: what becomes of the context.
  void make_room();
  void make_arrays();
  struct Batch {
    size_t rows, row_bytes;
  };
  Batch batch_of(size_t param, size_t most) const;
  void take_settings();
  [[noreturn]] void fail_halfway(const char* why);
  void write_all();
  void list_regions();
  void place_keys();
  void place_arrays();
  void place_numbers();
  void place_param(size_t param);
  void place_counters();

  const Stages& stages_;
  Model& model_;
  const ga_state_options options_;
  const char* const what_;
  bool with_window_ = true;  // what is collected has the contents of the open window
  bool with_shared_ = true;  // and the arrays of which each rank has a part
  std::vector<Saved> saved_;
  std::vector<WindowCounts> counts_;  // by rank, if gather() has found an open window
  std::vector<uint64_t>
      dropped_micros_;          // of the last result, by rank; empty: the context is alone
  std::vector<int64_t> piece_;  // of what ranks hand to each other
  std::unique_ptr<StateWriter> writer_;

  OwnParts own_;
  std::unique_ptr<AssembledFile>
      assembled_;  // what file_ reads, where it has other parts of parameters
  ReadAt read_;
  std::unique_ptr<StateReader> file_;
  std::map<std::string_view, size_t> names_;            // of the file's tensors
  std::vector<char> claimed_;                           // by tensor
  std::map<size_t, std::vector<unsigned char>> small_;  // the bytes of tensors of numbers
  std::vector<ParamIn> params_;
  std::vector<Found<kLayerKinds>> layers_;
  std::vector<BatchNorms::Snapshot> snapshots_;  // by layer: what it is to become
  int32_t ranks_ = 1;                            // whose windows are in the file
  bool open_ = false;                            // it has an open window
  std::vector<WindowIn> windows_;                // those that this rank takes
  std::vector<Joined> joined_;                   // by parameter
  TextsIn texts_;
  std::vector<int32_t> keys_;  // by parameter, as Tensor::key; empty: they stay
  int32_t next_key_ = 0;
  std::unique_ptr<Taken> taken_;  // under GA_SETTINGS_TAKE, until take_settings()
  // To be filled: with which part of which tensor, in bytes.
  struct From {
    size_t tensor, first;
  };
  std::vector<Region> regions_;
  std::vector<From> from_;
  Buffer row_indices_, row_values_;      // of a batch of rows
  Buffer added_, added_low_, added_by_;  // a gradient that is added to another, and Adding
  int64_t done_ = 0, total_ = 0;         // bytes, for progress
};

// The settings and the state of a context, for other ranks.
class RankCheckpoint final : public RankState {
 public:
  explicit RankCheckpoint(const Stages& stages) : stages_(stages) {}

  Settings settings_of_context() const override {
    return Checkpoint(stages_).settings_of_context();
  }
  // The keys of random bits are state, which rank 0 may have yet to hand out.
  Settings settings_of_tensors() const override {
    return Checkpoint(stages_).settings_of_tensors(false);
  }
  Items items() override { return Checkpoint::state_items(stages_); }
  std::vector<uint64_t> write(const char* what, int64_t& size) override;
  void read(const char* what, const std::vector<uint64_t>& file, int64_t size) override;

 private:
  const Stages& stages_;
};

// The note in a file; false: there is none.
bool read_note(int64_t size, const ReadAt& read, std::string& note);

}  // namespace ga
