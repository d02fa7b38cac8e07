// SPDX-License-Identifier: Apache-2.0
#include "model/window.hpp"

#include "core/error.hpp"

namespace ga {

ga_window_state Window::state() const {
  if (invalid_) return GA_WINDOW_INVALID;
  if (micros_.empty()) return GA_WINDOW_EMPTY;
  const bool whole = accum_steps_ > 0 && size() >= accum_steps_;
  return whole || micros_.back().last ? GA_WINDOW_FULL : GA_WINDOW_OPEN;
}

void Window::add(const Micro& micro) {
  micros_.push_back(micro);
  count(micro);
}

void Window::count(const Micro& micro) {
  weight_before_last_ = weight_;
  weight_ += micro.weight;
  weighted_ += micro.weight > 0;
}

void Window::drop_last() {
  weighted_ -= micros_.back().weight > 0;
  micros_.back().weight = 0;
  weight_ = weight_before_last_;
}

void Window::check_valid() const {
  if (invalid_)
    fail(GA_ERROR_INVALID_STATE,
         "the window is invalid because a call failed half-way through its gradients; only "
         "ga_discard is "
         "legal");
}

void Window::check_takes_more() const {
  check_valid();
  if (rejected_)
    fail(GA_ERROR_INVALID_STATE,
         "the window has an infinite or NaN gradient, for which ga_step has returned "
         "GA_ERROR_NONFINITE; ga_discard must be called next");
}

void Window::check_closed(const char* what) const {
  check_valid();
  if (open_ >= 0)
    fail(GA_ERROR_INVALID_STATE,
         "%s was called while micro-batch %lld is open; ga_micro_end must be called first", what,
         ll(open_));
}

void Window::check_whole() const {
  check_closed("a function that adds a whole micro-batch");
  check_takes_more();
  if (state() == GA_WINDOW_FULL)
    fail(GA_ERROR_WINDOW_FULL,
         "the window is full: it holds %lld micro-batches%s; ga_step must be called next",
         ll(size()), micros_.back().last ? ", and the last had GA_MICRO_LAST" : "");
}

void Window::begin(int64_t index, const Micro& micro) {
  check_closed("ga_micro_begin");
  check_takes_more();
  if (index < 0 || index > size())
    fail(GA_ERROR_INVALID_ARGUMENT,
         "micro-batch index was %lld, but the window holds %lld: expected -1 to %lld", ll(index),
         ll(size()), ll(size()));
  if (index == size()) {
    check_whole();
    add(micro);
  } else {
    const Micro& first = this->micro(index);
    if (first.weight != micro.weight)
      fail(GA_ERROR_INVALID_ARGUMENT,
           "micro-batch %lld was resumed with weight %g, but was opened with %g", ll(index),
           micro.weight, first.weight);
    if (first.loss_scale != micro.loss_scale)
      fail(
          GA_ERROR_INVALID_ARGUMENT,
          "micro-batch %lld was resumed with loss scale %g, but was opened with %g (0: that of the "
          "context)",
          ll(index), micro.loss_scale, first.loss_scale);
    if (micro.last && index + 1 < size())
      fail(GA_ERROR_INVALID_ARGUMENT,
           "micro-batch %lld was resumed with GA_MICRO_LAST, but the window holds %lld", ll(index),
           ll(size()));
    if (micro.last) micros_.back().last = true;
  }
  open_ = index;
}

void Window::check_part(const char* what) const {
  check_valid();
  if (open_ < 0)
    fail(GA_ERROR_INVALID_STATE, "%s was called with no micro-batch open; ga_micro_begin opens one",
         what);
}

void Window::end() {
  check_part("ga_micro_end");
  open_ = -1;
}

void Window::abort() {
  weighted_ -= micros_.back().weight > 0;
  micros_.pop_back();
  weight_ = weight_before_last_;
  open_ = -1;
}

void Window::check_empty(const char* what) const {
  if (!empty())
    fail(GA_ERROR_INVALID_STATE,
         "%s was called within a window; it is legal only while the window is empty", what);
}

void Window::break_off() {
  invalid_ = true;
  try {
    throw;
  } catch (const std::bad_alloc&) {
    fail(GA_ERROR_FAULT, "memory ran out in the middle of a pass over the gradients");
  } catch (const std::exception& e) {
    throw Error(GA_ERROR_FAULT, e.what());
  }
}

void Window::restore(std::vector<Micro> micros) {
  clear();
  micros_.swap(micros);
  for (const Micro& micro : micros_) count(micro);
}

void Window::clear() {
  micros_.clear();
  weight_ = weight_before_last_ = 0;
  weighted_ = 0;
  open_ = -1;
  invalid_ = rejected_ = false;
}

}  // namespace ga
