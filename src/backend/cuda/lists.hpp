// SPDX-License-Identifier: Apache-2.0
// Lists of chunks and of parameters on the device, made once and used by every step after that.
#pragma once

#include <cstdint>
#include <vector>

#include "backend/backend.hpp"
#include "backend/cuda/kernels.hpp"
#include "backend/cuda/runtime.hpp"

namespace ga::cuda {

// A mirror that grows; what it has held is lost then.
class Buffer {
 public:
  // Throws std::bad_alloc and is as before then.
  void reserve(Runtime& runtime, size_t bytes) {
    if (bytes <= mirror_.bytes) return;
    Mirror larger = runtime.mirror(bytes);
    free(runtime);
    mirror_ = larger;
    runtime.count_own(static_cast<int64_t>(mirror_.bytes));  // the device's half
  }
  void free(Runtime& runtime) noexcept {
    runtime.count_own(-static_cast<int64_t>(mirror_.bytes));
    runtime.free(mirror_);
  }
  size_t bytes() const { return mirror_.bytes; }
  template <class T>
  T* host(size_t offset = 0) const {
    return reinterpret_cast<T*>(static_cast<char*>(mirror_.host) + offset);
  }
  template <class T>
  T* at(size_t offset = 0) const {
    return reinterpret_cast<T*>(static_cast<char*>(mirror_.at) + offset);
  }
  void upload(Runtime& runtime, size_t offset, size_t bytes) const {
    runtime.upload(mirror_, offset, bytes);
  }

 private:
  Mirror mirror_;
};

// The chunks of all parameters in their order, and the numbers 0, 1, ... of these.
class AllChunks {
 public:
  explicit AllChunks(Runtime& runtime) : runtime_(runtime) {}

  void reserve(int64_t chunks, int64_t params);
  // Counts are those of the updates, once these are written; of a parameter that has none there, of
  // what is told here.
  void set_tasks(const TaskTables& tasks, int64_t params);
  void set_count(ga_param param, int64_t count);
  // After that, what follows is as the counts say.
  void update();
  int64_t params() const { return static_cast<int64_t>(counts_.size()); }
  int64_t count(ga_param param) const {
    return param < params() ? counts_[static_cast<size_t>(param)] : 0;
  }
  int64_t first(int64_t param) const { return first_[static_cast<size_t>(param)]; }
  const ChunkRef* at() const { return refs_.at<ChunkRef>(); }
  const ga_param* ids() const { return ids_.at<ga_param>(); }

 private:
  Runtime& runtime_;
  Span<const UpdateTask> tasks_ = {nullptr, 0};
  bool told_ = true;  // counts are known to be those of the tasks
  bool due_ = false;
  std::vector<int64_t> counts_;
  std::vector<int64_t> first_;  // of each parameter's chunks, and the end of the last one's
  Buffer refs_, ids_;
};

// What a launch is given.
struct ListPart {
  int op;  // position in AllOps; -1: none
  bool f64;
  const ChunkRef* chunks;  // or pieces, of a FactorTask those of rows
  int64_t chunk_count;
  const ChunkRef* columns;  // pieces of a FactorTask
  int64_t column_count;
  const ga_param* params;  // of ListKind::kUpdate those with rows
  int64_t param_count;
};

enum class ListKind { kUpdate, kMeasure, kNorm, kUnits, kFactor };

// For lists of parameters, which are few and the same in every step. One that has not been seen
// before, or whose tasks have changed, is made in the place of the one not used for longest.
class ParamLists {
 public:
  ParamLists(Runtime& runtime, AllChunks& chunks) : runtime_(runtime), chunks_(chunks) {}

  void reserve(int64_t chunks, int64_t params);
  void set_tasks(const TaskTables& tasks, int64_t params);
  // The host has written there.
  void written(const void* host, size_t bytes);
  // Valid until the next call.
  Span<const ListPart> get(ListKind kind, Params params);

 private:
  // What a list is made from, beside the numbers of its parameters.
  struct Mark {
    int64_t refs, columns;
    int32_t op;
    bool f64, rows;
    bool operator==(const Mark& m) const {
      return refs == m.refs && columns == m.columns && op == m.op && f64 == m.f64 && rows == m.rows;
    }
  };
  struct List {
    ListKind kind;
    std::vector<ga_param> params;
    std::vector<Mark> marks;
    std::vector<ListPart> parts;
    Buffer buffer;
    int64_t version = 0;  // of the tasks when it was last found right; 0: it is no list yet
    int64_t used = 0;
    bool captured = false;  // a graph may use it: it stays as it is
  };

  List new_list(size_t bytes, size_t params);
  Mark mark_of(ListKind kind, ga_param param) const;
  int64_t pieces_of(const UnitPattern* pattern) const;
  bool is_right(List& list) const;
  List& place();
  void make(List& list, ListKind kind, Params params);
  bool get_one(ListKind kind, ga_param param);

  Runtime& runtime_;
  AllChunks& chunks_;
  TaskTables tasks_;
  size_t params_ = 0;
  size_t bytes_ = 0, most_params_ = 0;  // room in each list
  std::vector<List> lists_;
  ListPart one_ = {};
  int64_t version_ = 1;
  int64_t clock_ = 0;
};

}  // namespace ga::cuda
