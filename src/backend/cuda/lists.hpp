// SPDX-License-Identifier: Apache-2.0
// Lists of chunks and of parameters on the device, which are made once and used by every later
// step.
#pragma once

#include <cstdint>
#include <vector>

#include "backend/backend.hpp"
#include "backend/cuda/kernels.hpp"
#include "backend/cuda/runtime.hpp"

namespace ga::cuda {

// A mirror that grows; growing clears it.
class Buffer {
 public:
  // Throws std::bad_alloc, which changes nothing.
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

// The chunks of all parameters in order, and the ids 0, 1, ... of the parameters.
class AllChunks {
 public:
  explicit AllChunks(Runtime& runtime) : runtime_(runtime) {}

  void reserve(int64_t chunks, int64_t params);
  // The element counts come from the updates once they are written; set_count() gives the count of
  // a parameter that has no update.
  void set_tasks(const TaskTables& tasks, int64_t params);
  void set_count(ga_param param, int64_t count);
  // Brings the lists that the following functions return up to date with the counts.
  void update();
  int64_t params() const { return static_cast<int64_t>(counts_.size()); }
  int64_t first(int64_t param) const { return first_[static_cast<size_t>(param)]; }
  const ChunkRef* at() const { return refs_.at<ChunkRef>(); }
  const ga_param* ids() const { return ids_.at<ga_param>(); }

 private:
  Runtime& runtime_;
  Span<const UpdateTask> tasks_ = {nullptr, 0};
  bool read_ = true;    // counts_ has the counts of the tasks
  bool stale_ = false;  // the lists differ from counts_
  std::vector<int64_t> counts_;
  std::vector<int64_t> first_;  // the first chunk of each parameter, and the end of the last
  Buffer refs_, ids_;
};

enum class ListKind { kUpdate, kMeasure, kNorm, kUnits, kFactor };

// The launches' lists for lists of parameters, which are few and the same in every step. A new one,
// or one whose tasks have changed, replaces the least recently used.
class ParamLists {
 public:
  ParamLists(Runtime& runtime, AllChunks& chunks) : runtime_(runtime), chunks_(chunks) {}

  void reserve(int64_t chunks, int64_t params);
  void set_tasks(const TaskTables& tasks, int64_t params);
  // The host has written at that address; it may be part of a task table.
  void written(const void* host, size_t bytes);
  // Valid until the next call.
  Span<const ListPart> get(ListKind kind, Params params);

 private:
  // What a list is made from beside the ids of its parameters.
  struct Mark {
    int64_t refs, columns;
    int32_t op;
    bool f64, rows, mixed, coded;
    bool operator==(const Mark& m) const {
      return refs == m.refs && columns == m.columns && rows == m.rows && is_of(m);
    }
    // Of a Mark or a ListPart: whether they belong to one launch.
    template <class Other>
    bool is_of(const Other& other) const {
      return op == other.op && f64 == other.f64 && mixed == other.mixed && coded == other.coded;
    }
  };
  struct List {
    ListKind kind;
    std::vector<ga_param> params;
    std::vector<Mark> marks;
    std::vector<ListPart> parts;
    Buffer buffer;
    int64_t version = 0;  // of the tasks that the list was last checked against; 0: no list yet
    int64_t used = 0;
    bool captured = false;  // a graph may use the list, so it does not change
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
