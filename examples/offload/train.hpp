// Trains the model with an optimizer on the CPU, step by step, and takes the times.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <vector>

#include "model.hpp"

struct Way {
  bool eager = false;   // updates go on while backward runs
  int threads = 0;      // of ga_step; 0: what OpenMP would use
  double backward = 0;  // seconds
  double clip = 0;      // the largest norm; 0: updates in place, with no clip and no check
  double lr = 0;
};

// Times are in seconds since backward began.
struct Window {
  std::vector<double> arrived, done;  // of each layer: its gradient, all of its parameters
  double last = 0, end = 0;           // the last gradient has arrived; ga_step has returned
  double loss = 0, norm = 0;
  std::int64_t tensors = 0, ahead = 0, redone = 0;  // parameters: all, before ga_step, twice

  double left() const { return end - last; }
};

// p: the parameters, which change.
std::vector<Window> train(const Model& model, const Way& way, int windows,
                          std::vector<std::uint16_t>& p);
