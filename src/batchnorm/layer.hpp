// SPDX-License-Identifier: Apache-2.0
// A layer with batch normalisation, as its passes know it.
#pragma once

#include <vector>

#include "batchnorm/batchnorm.hpp"
#include "core/error.hpp"
#include "model/table.hpp"
#include "window/accumulator.hpp"

namespace ga {

// The statistics of a micro-batch that the history holds.
struct BatchNorms::Taken {
  int64_t count = -1;  // the elements of a channel that they are over; -1: the history has none
  bool given = false;  // by another function than ga_bn_forward
};

struct BatchNorms::Layer {
  const char* name;  // in names_
  int64_t channels;
  ga_param gamma, beta;
  ga_bn_options options;
  size_t input;  // index in model_.tables.layers
  bool frozen = false;
  Buffer block = {};  // holds the next three arrays
  BnChannel* state = nullptr;
  void* dgamma = nullptr;
  void* dbeta = nullptr;
  Whole gradient[2] = {};  // dgamma if there is a gamma, dbeta if there is a beta
  size_t gradient_count = 0;
  State<Moments> history = {};  // see ops/batchnorm.hpp
  int64_t history_size = 0;     // micro-batches that the history has room for

  // In this window:
  int64_t index = -1;  // the micro-batch whose statistics the layer uses; WINDOW: the last one
  std::vector<Taken> taken = {};    // by micro-batch; WINDOW: of the first pass
  std::vector<char> summed = {};    // by micro-batch: whether its backward sums are in the window
  int64_t sums_of = -1;             // the micro-batch whose backward sums BnChannel holds
  bool final = false;               // WINDOW: ga_bn_finalize has ended the first pass
  bool sums_final = false;          // WINDOW: the backward sums are those of all ranks
  bool closed = false;              // WINDOW: ga_step has made the exchanges that its passes lacked
  int64_t forwarded = 0, sums = 0;  // micro-batches of the forward pass, and of the backward sums

  bool windowed() const { return options.mode == GA_BN_WINDOW; }
  int64_t seen() const { return static_cast<int64_t>(taken.size()); }
  const Taken& taken_of(int64_t micro) const { return taken[static_cast<size_t>(micro)]; }
  bool has(int64_t micro) const { return micro < seen() && taken_of(micro).count >= 0; }
  int32_t sum_dtype() const { return options.dtype == GA_F64 ? GA_F64 : GA_F32; }
  Span<const Whole> gradients() const { return {gradient, gradient_count}; }
  bool in_window() const { return seen() > 0 || final; }
  Subject subject(const char* function = nullptr) const { return {"layer", name, function}; }

  void check_not_closed(const Subject& of) const {
    if (closed)
      of.fail(GA_ERROR_INVALID_STATE,
              "ga_step or ga_discard has told the other ranks that this one leaves the call out, "
              "and has to be called again");
  }

  void require_unused(const char* what) const {
    if (in_window())
      subject(what).fail(GA_ERROR_INVALID_STATE,
                         "it has statistics of this window; ga_step or ga_discard ends the window");
  }
  // Checks that an output is either exactly the array that is read, or does not overlap it.
  void check_overlap(const char* what, const void* in, const char* out_name, const void* out,
                     int64_t count) const;
  // Checks that the backward sums of all micro-batches are there.
  void check_sums(const char* what) const;
  // Checks that a later pass reads what the first one has read.
  void check_pass(const char* what, int64_t micro, int64_t count) const;
};

inline double element(const void* data, int32_t dtype, int64_t i) {
  return dtype == GA_F64 ? static_cast<const double*>(data)[i]
                         : static_cast<double>(static_cast<const float*>(data)[i]);
}

inline void check_statistics_dtype(const Subject& of, int32_t dtype) {
  if (dtype != GA_F32 && dtype != GA_F64)
    of.fail(GA_ERROR_INVALID_ARGUMENT, "dtype was %d, expected GA_F32 or GA_F64", dtype);
}

}  // namespace ga
