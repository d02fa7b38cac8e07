// SPDX-License-Identifier: Apache-2.0
#include "backend/cuda/plain.hpp"

#include <algorithm>

namespace ga::cuda {
namespace {

bool same(const PlainTarget& a, const PlainTarget& b) {
  return a.target == b.target && a.partials == b.partials && a.count == b.count &&
         a.format == b.format && a.gradient_format == b.gradient_format;
}

// Widens [first, last) to contain `at`.
void widen(size_t at, size_t& first, size_t& last) {
  first = first < last ? std::min(first, at) : at;
  last = std::max(last, at + 1);
}

}  // namespace

void PlainTargets::reserve(int64_t params) {
  const auto n = static_cast<size_t>(params);
  if (n <= params_) return;
  gradients_.resize(n);
  before_.resize(n);
  captures_.resize(n);
  others_.reserve(n);
  // A larger buffer is all zeros, so the next calls write all targets that they use.
  buffer_.reserve(runtime_, n * sizeof(PlainTarget));
  params_ = n;
}

bool PlainTargets::is_plain(const AccumulateTask& task) const {
  const Source &source = task.source[task.sources - 1], &before = task.source[0];
  const bool paired = task.sources == 2;
  return (task.keep == 0 || (task.keep == 1 && !paired)) && task.noise == 0 && !task.plan &&
         !task.counter && source.data && before.data && before.format == source.format &&
         (task.target.format == GA_F32 || task.target.format == GA_F64) &&
         source.format >= GA_F32 && source.format <= GA_BF16 && task.param >= 0 &&
         static_cast<size_t>(task.param) < params_;
}

void PlainTargets::take(const AccumulateTask& task) {
  const auto i = static_cast<size_t>(task.param);
  const Source& source = task.source[task.sources - 1];
  const PlainTarget target = {task.target.data, task.partials, task.count, task.target.format,
                              source.format};
  // A graph sets the targets that it uses, which another window may have changed before it is replayed.
  if (PlainTarget& known = buffer_.host<PlainTarget>()[i];
      !same(known, target) || (runtime_.capturing() && captures_[i] != runtime_.capture())) {
    known = target;
    captures_[i] = runtime_.capture();
    widen(i, changed_first_, changed_last_);
  }
  chunks_.set_count(task.param, task.count);
  gradients_[i] = reinterpret_cast<uintptr_t>(source.data) | (task.keep != 0 ? 1u : 0u);
  before_[i] = reinterpret_cast<uintptr_t>(task.source[0].data);
  widen(i, first_, last_);
}

void PlainTargets::accumulate(Span<const AccumulateTask> tasks) {
  others_.clear();
  chunks_.update();
  for (const int sources : {1, 2}) add(tasks, sources);
  if (!others_.empty()) cuda::accumulate(runtime_.queue(), {others_.data(), others_.size()});
}

// Adds the tasks with that number of sources.
void PlainTargets::add(Span<const AccumulateTask> tasks, int sources) {
  // The addresses of the call before, which may have failed.
  std::fill(gradients_.begin() + static_cast<std::ptrdiff_t>(first_),
            gradients_.begin() + static_cast<std::ptrdiff_t>(last_), uintptr_t{0});
  first_ = last_ = 0;
  const AccumulateTask* like = nullptr;  // its scales are those of the launch
  const auto is_like = [&](const AccumulateTask& task) {
    for (int k = 0; like && k < sources; ++k)
      if (task.source[k].scale != like->source[k].scale ||
          task.source[k].divisor != like->source[k].divisor)
        return false;
    return true;
  };
  for (size_t t = 0; t < tasks.size; ++t) {
    const AccumulateTask& task = tasks.data[t];
    if (task.count == 0 || task.sources != sources) continue;
    if (is_plain(task) && is_like(task)) {
      like = &task;
      take(task);
    } else {
      others_.push_back(task);
    }
  }
  if (like) launch(*like);
}

void PlainTargets::launch(const AccumulateTask& like) {
  const size_t end = last_;
  const Queue& queue = runtime_.queue();
  chunks_.update();
  if (changed_first_ < changed_last_) {
    buffer_.upload(runtime_, changed_first_ * sizeof(PlainTarget),
                   (changed_last_ - changed_first_) * sizeof(PlainTarget));
    changed_first_ = changed_last_ = 0;
  }
  const bool paired = like.sources == 2;
  const size_t most = paired ? kMostGradients / 2 : kMostGradients;
  PlainCall call = {};
  call.targets = buffer_.at<PlainTarget>();
  call.chunks = chunks_.at();
  call.of = like.source[like.sources - 1];
  call.before = like.source[0];
  for (size_t first = first_; first < end;) {
    if (gradients_[first] == 0) {
      ++first;
      continue;
    }
    size_t last = std::min(end, first + most);
    while (gradients_[last - 1] == 0) --last;
    call.first = static_cast<ga_param>(first);
    call.first_chunk = chunks_.first(static_cast<int64_t>(first));
    call.last_chunk = chunks_.first(static_cast<int64_t>(last));
    accumulate_plain(queue, call, {&gradients_[first], last - first},
                     paired ? &before_[first] : nullptr);
    first = last;
  }
}

}  // namespace ga::cuda
