// SPDX-License-Identifier: Apache-2.0
#include "backend/cuda/lists.hpp"

#include <algorithm>
#include <tuple>
#include <utility>

namespace ga::cuda {

// ---- All chunks ---------------------------------------------------------------------------------

void AllChunks::reserve(int64_t chunks, int64_t params) {
  const auto n = static_cast<size_t>(params);
  const bool grows = static_cast<size_t>(chunks) * sizeof(ChunkRef) > refs_.bytes() ||
                     n * sizeof(ga_param) > ids_.bytes();
  counts_.reserve(n);
  first_.reserve(n + 1);
  refs_.reserve(runtime_, static_cast<size_t>(chunks) * sizeof(ChunkRef));
  ids_.reserve(runtime_, n * sizeof(ga_param));
  stale_ = stale_ || grows;
}

void AllChunks::set_count(ga_param param, int64_t count) {
  const auto i = static_cast<size_t>(param);
  if (i >= counts_.size()) {
    counts_.resize(i + 1);
    stale_ = true;
  }
  if (counts_[i] == count) return;
  counts_[i] = count;
  stale_ = true;
}

void AllChunks::set_tasks(const TaskTables& tasks, int64_t params) {
  tasks_ = {tasks.updates, static_cast<size_t>(params)};
  read_ = false;
}

void AllChunks::update() {
  if (!read_) {
    for (size_t i = 0; i < tasks_.size; ++i)
      set_count(static_cast<ga_param>(i), tasks_.data[i].count);
    read_ = true;
  }
  if (!stale_) return;
  first_.assign(1, 0);
  for (const int64_t count : counts_) first_.push_back(first_.back() + chunk_count(count));
  const size_t n = counts_.size();
  refs_.reserve(runtime_, static_cast<size_t>(first_.back()) * sizeof(ChunkRef));
  ids_.reserve(runtime_, n * sizeof(ga_param));
  auto* ref = refs_.host<ChunkRef>();
  auto* const ids = ids_.host<ga_param>();
  for (size_t i = 0; i < n; ++i) {
    ids[i] = static_cast<ga_param>(i);
    for (int64_t c = 0; c < chunk_count(counts_[i]); ++c)
      *ref++ = {static_cast<int32_t>(i), static_cast<int32_t>(c)};
  }
  refs_.upload(runtime_, 0, static_cast<size_t>(first_.back()) * sizeof(ChunkRef));
  ids_.upload(runtime_, 0, n * sizeof(ga_param));
  stale_ = false;
}

// ---- Lists --------------------------------------------------------------------------------------

namespace {

// More than a step uses: the lists for norms, units, factors, measures and two updates, and all of
// them twice if some parameters are factored later.
constexpr size_t kLists = 12;
constexpr size_t kMostParts = 64;

}  // namespace

ParamLists::List ParamLists::new_list(size_t bytes, size_t params) {
  List list = {};
  list.params.reserve(params);
  list.marks.reserve(params);
  list.parts.reserve(kMostParts);
  list.buffer.reserve(runtime_, bytes);
  return list;
}

// A pattern has at most as many pieces as its parameter has chunks; a factored parameter has two
// patterns.
void ParamLists::reserve(int64_t chunks, int64_t params) {
  const size_t bytes = static_cast<size_t>(2 * chunks) * sizeof(ChunkRef) +
                       static_cast<size_t>(params) * sizeof(ga_param);
  if (bytes <= bytes_ && static_cast<size_t>(params) <= most_params_ && !lists_.empty()) return;
  std::vector<List> fresh;
  fresh.reserve(2 * kLists);
  try {
    for (size_t i = 0; i < kLists; ++i)
      fresh.push_back(new_list(bytes, static_cast<size_t>(params)));
  } catch (...) {
    for (List& list : fresh) list.buffer.free(runtime_);
    throw;
  }
  for (List& list : lists_) list.buffer.free(runtime_);
  lists_ = std::move(fresh);
  bytes_ = bytes;
  most_params_ = static_cast<size_t>(params);
}

void ParamLists::set_tasks(const TaskTables& tasks, int64_t params) {
  tasks_ = tasks;
  params_ = static_cast<size_t>(params);
  ++version_;
}

void ParamLists::written(const void* host, size_t bytes) {
  const auto begin = reinterpret_cast<uintptr_t>(host);
  const auto within = [&](const auto* tasks) {
    const auto first = reinterpret_cast<uintptr_t>(tasks);
    return first < begin + bytes && begin < first + params_ * sizeof *tasks;
  };
  if (within(tasks_.updates) || within(tasks_.measures) || within(tasks_.units) ||
      within(tasks_.factored))
    ++version_;
}

int64_t ParamLists::pieces_of(const UnitPattern* pattern) const {
  if (!pattern) return 0;
  const void* const host = runtime_.host_of(pattern);
  if (!host) fail(GA_ERROR_INTERNAL, "a pattern of units was not in a mirror");
  return static_cast<const UnitPattern*>(host)->pieces;
}

ParamLists::Mark ParamLists::mark_of(ListKind kind, ga_param param) const {
  const auto i = static_cast<size_t>(param);
  Mark mark = {};
  mark.op = -1;
  if (kind == ListKind::kNorm) {
    mark.refs = chunk_count(tasks_.updates[i].count);
  } else if (kind == ListKind::kUnits) {
    mark.refs = pieces_of(tasks_.units[i].pattern);
  } else if (kind == ListKind::kFactor) {
    mark.refs = pieces_of(tasks_.factored[i].row_pattern);
    mark.columns = pieces_of(tasks_.factored[i].column_pattern);
  } else {
    const bool update = kind == ListKind::kUpdate;
    const UpdateTask& task = update ? tasks_.updates[i] : tasks_.measures[i];
    mark.refs = chunk_count(task.count);
    mark.op = task.op;
    mark.f64 = task.f64;
    mark.rows = update && task.rows;
    mark.mixed = update && is_mixed(task);
    mark.coded = is_coded(task, !update);
  }
  return mark;
}

bool ParamLists::is_right(List& list) const {
  if (list.version == version_) return true;
  for (size_t k = 0; k < list.params.size(); ++k)
    if (!(mark_of(list.kind, list.params[k]) == list.marks[k])) return false;
  list.version = version_;
  return true;
}

// The place for the next list: the least recently used, except the two last, because a launch takes
// up to three lists.
ParamLists::List& ParamLists::place() {
  List* oldest = nullptr;
  for (List& list : lists_) {
    const bool free = !list.captured && (list.used == 0 || list.used + 2 <= clock_);
    if (free && (!oldest || list.used < oldest->used)) oldest = &list;
  }
  if (oldest) return *oldest;
  lists_.push_back(new_list(bytes_, most_params_));
  return lists_.back();
}

void ParamLists::make(List& list, ListKind kind, Params params) {
  list.version = 0;
  list.kind = kind;
  list.params.assign(params.data, params.data + params.size);
  list.marks.clear();
  list.parts.clear();
  size_t refs = 0;
  for (const ga_param param : list.params) {
    const Mark mark = mark_of(kind, param);
    refs += static_cast<size_t>(mark.refs + mark.columns);
    list.marks.push_back(mark);
    const bool known = std::any_of(list.parts.begin(), list.parts.end(),
                                   [&](const ListPart& p) { return mark.is_of(p); });
    if (mark.refs + mark.columns == 0 || known) continue;
    ListPart part = {};
    part.op = mark.op;
    part.f64 = mark.f64;
    part.mixed = mark.mixed;
    part.coded = mark.coded;
    list.parts.push_back(part);
  }
  const Buffer& buffer = list.buffer;
  const size_t ids_offset = refs * sizeof(ChunkRef);
  list.buffer.reserve(runtime_, ids_offset + params.size * sizeof(ga_param));
  size_t ref = 0, id = 0;
  const auto add_refs = [&](const ListPart& part, int64_t Mark::*count) {
    auto* const host = buffer.host<ChunkRef>();
    const size_t first = ref;
    for (size_t k = 0; k < list.params.size(); ++k) {
      const Mark& mark = list.marks[k];
      if (!mark.is_of(part)) continue;
      for (int64_t c = 0; c < mark.*count; ++c)
        host[ref++] = {static_cast<int32_t>(list.params[k]), static_cast<int32_t>(c)};
    }
    return std::pair<const ChunkRef*, int64_t>(buffer.at<ChunkRef>(first * sizeof(ChunkRef)),
                                               static_cast<int64_t>(ref - first));
  };
  for (ListPart& part : list.parts) {
    std::tie(part.chunks, part.chunk_count) = add_refs(part, &Mark::refs);
    std::tie(part.columns, part.column_count) = add_refs(part, &Mark::columns);
    const size_t first = id;
    for (size_t k = 0; k < list.params.size(); ++k) {
      const Mark& mark = list.marks[k];
      if (!mark.is_of(part) || mark.refs == 0) continue;
      if (kind == ListKind::kUpdate && !mark.rows) continue;
      buffer.host<ga_param>(ids_offset)[id++] = list.params[k];
    }
    part.params = buffer.at<ga_param>(ids_offset + first * sizeof(ga_param));
    part.param_count = static_cast<int64_t>(id - first);
  }
  buffer.upload(runtime_, 0, ids_offset + id * sizeof(ga_param));
  list.version = version_;
}

// Sets one_ to the list of one parameter, as a part of the lists of all. Returns false if those do
// not have it.
bool ParamLists::get_one(ListKind kind, ga_param param) {
  const Mark mark = mark_of(kind, param);
  chunks_.update();
  if (param >= chunks_.params()) return false;
  const int64_t first = chunks_.first(param);
  if (chunks_.first(param + 1) - first != mark.refs) return false;
  one_ = {};
  one_.op = mark.op;
  one_.f64 = mark.f64;
  one_.mixed = mark.mixed;
  one_.coded = mark.coded;
  one_.chunks = chunks_.at() + first;
  one_.chunk_count = mark.refs;
  one_.params = chunks_.ids() + param;
  one_.param_count = kind != ListKind::kUpdate || mark.rows ? 1 : 0;
  return true;
}

Span<const ListPart> ParamLists::get(ListKind kind, Params params) {
  if (params.size == 0) return {nullptr, 0};
  const bool by_chunks = kind != ListKind::kUnits && kind != ListKind::kFactor;
  if (params.size == 1 && by_chunks && get_one(kind, params.data[0])) return {&one_, 1};
  const auto same = [&](const List& list) {
    return list.version != 0 && list.kind == kind && list.params.size() == params.size &&
           std::equal(list.params.begin(), list.params.end(), params.data);
  };
  List* list = nullptr;
  for (List& l : lists_) {
    if (!same(l)) continue;
    if (is_right(l)) {
      list = &l;
      break;
    }
    if (!l.captured) list = &l;  // made anew here, unless a right one is found
  }
  if (!list) list = &place();
  if (!same(*list) || list->version != version_) make(*list, kind, params);
  list->used = ++clock_;
  list->captured = list->captured || runtime_.capturing();
  return {list->parts.data(), list->parts.size()};
}

}  // namespace ga::cuda
