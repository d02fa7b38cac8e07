// SPDX-License-Identifier: Apache-2.0
// The batch-normalisation layers of a context: which micro-batch a call works on, which call is
// legal next, and how the gradients of gamma and beta reach the window. The formulas are in
// ops/batchnorm.hpp; decide.hpp updates the running statistics.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "core/error.hpp"
#include "model/model.hpp"

namespace ga {

class Accumulator;
class TableWriter;

class BatchNorms {
 public:
  BatchNorms(Model& model, TableWriter& writer, Accumulator& accumulator);
  ~BatchNorms();
  BatchNorms(const BatchNorms&) = delete;
  BatchNorms& operator=(const BatchNorms&) = delete;

  // The functions ga_bn_*.
  ga_bn add(const char* name, int64_t channels, ga_param gamma, ga_param beta,
            const ga_bn_options& options);
  ga_bn count() const;
  ga_bn find(std::string_view name) const;  // -1: there is no layer of that name
  ga_bn_info info(ga_bn id) const;
  const ga_bn_options& options(ga_bn id) const;
  void set_frozen(ga_bn id, bool frozen);
  void accumulate(ga_bn id, const void* x, int64_t samples, int64_t positions);
  void accumulate_stats(ga_bn id, int64_t count, const void* mean, const void* spread, int32_t kind,
                        int32_t dtype);
  void finalize(ga_bn id);
  void forward(ga_bn id, const void* x, int64_t samples, int64_t positions, void* y);
  void backward_accumulate(ga_bn id, const void* x, const void* dy, int64_t samples,
                           int64_t positions);
  void backward_finalize(ga_bn id);
  void backward(ga_bn id, const void* x, const void* dy, int64_t samples, int64_t positions,
                void* dx);
  void infer(ga_bn id, const void* x, int64_t samples, int64_t positions, void* y);
  void running(ga_bn id, void* mean, void* variance, int32_t dtype, int64_t* steps) const;
  void set_running(ga_bn id, const void* mean, const void* variance, int32_t dtype, int64_t steps);
  void statistics(ga_bn id, void* mean, void* variance, int32_t dtype, int64_t* count) const;

  // What a layer knows of its channels and of the window.
  struct Snapshot {
    std::vector<BnChannel> channels;
    // As in Layer:
    int64_t index = -1, sums_of = -1, forwarded = 0, sums = 0;
    bool final = false, sums_final = false;
    struct Micro {
      int64_t count = -1;
      bool given = false, summed = false;
    };
    int64_t seen = 0;              // micro-batches whose statistics were taken
    std::vector<Micro> micros;     // the seen ones, and others that are summed
    std::vector<Moments> history;  // [micro-batches, channels]

    bool in_window() const { return !micros.empty() || index >= 0 || final; }
  };
  Snapshot snapshot(ga_bn id) const;
  // Makes room for a snapshot, so that restore() allocates nothing.
  void reserve(ga_bn id, const Snapshot& s);
  void restore(ga_bn id, const Snapshot& s);

  // Whether a layer has statistics of this window, be they those of other ranks alone.
  bool has_statistics() const;
  const char* name_of_windowed() const;  // of a layer in WINDOW mode; NULL if there is none
  // Throws if micro-batches that are clipped so cannot be opened again, as the second pass of WINDOW mode does.
  void check_no_passes(const ga_clip& clip) const;
  // Throws unless a parameter or a layer may have that name (names.hpp).
  void check_name(const Subject& of, const char* name) const;
  // Over ranks: whether a layer has yet to add up its backward sums, the last that it exchanges in a window.
  bool awaits_sums() const;
  // Over ranks: how many passes of this window have yet to be ended. From now on no call ends one.
  int64_t close_passes();
  const char* name_of_user(ga_param id) const;  // of a layer that has this parameter, or NULL
  // Whether a layer in WINDOW mode has the statistics of a micro-batch, which cannot be taken back.
  bool has_statistics_of(int64_t micro) const;
  void forget(int64_t micro);  // the newest micro-batch, which is dropped
  int64_t bytes() const;       // of the layers' arrays
  void end_window();

 private:
  struct Layer;
  struct Taken;
  using Names = std::map<std::string, ga_bn, std::less<>>;

  const Layer& layer(ga_bn id) const;
  Layer& layer(ga_bn id) {
    return const_cast<Layer&>(static_cast<const BatchNorms*>(this)->layer(id));
  }
  Layer& layer_for_work(ga_bn id);
  void check_options(const char* name, int64_t channels, const ga_bn_options& o) const;
  void check_params(const char* name, int64_t channels, ga_param gamma, ga_param beta) const;
  void check_mode(const char* name, int32_t mode) const;
  void allocate(Layer& b);
  void check_array(const Layer& b, const char* what, const void* data, int64_t count,
                   int32_t dtype) const;
  void check_output(const Layer& b, const char* what, const void* data, int64_t count) const;
  BnTask task_of(const Layer& b, int64_t samples, int64_t positions) const;
  void set_forward(const Layer& b, BnTask& task, const void* x, void* y) const;
  int64_t index_of(const Layer& b, int64_t next) const;
  int64_t index_of_statistics(const Layer& b, const char* what) const;
  void make_room(Layer& b, int64_t micro_batches);
  template <class Work>
  void take(Layer& b, const char* what, int64_t index, const Taken& taken, BnTask& task,
            Work&& work);
  BnTask backward_task(const Layer& b, const char* what, const void* x, const void* dy,
                       int64_t samples, int64_t positions) const;
  bool is_summed(Layer& b);
  void add_sums(Layer& b);
  std::vector<BnChannel> read(const Layer& b) const;

  Model& model_;
  TableWriter& writer_;
  Accumulator& accumulator_;
  std::vector<Layer> layers_;
  Names names_;
};

ga_bn_options default_bn_options(int32_t flavor);

}  // namespace ga
