// SPDX-License-Identifier: Apache-2.0
// What the stages of a window share. The model has parts and no work of its own: each part keeps its own
// invariants, and what is done to several of them is a stage's.
#pragma once

#include <memory>

#include "model/arrays.hpp"
#include "model/health.hpp"
#include "model/options.hpp"
#include "model/param.hpp"
#include "model/progress.hpp"
#include "model/ranges.hpp"
#include "model/ranks.hpp"
#include "model/speculation.hpp"
#include "model/tables.hpp"
#include "model/window.hpp"
#include "model/window_length.hpp"

namespace ga {

struct Model {
  explicit Model(const ga_config& config)
      : config(config),
        backend(config.device == GA_DEVICE_CUDA ? make_cuda_backend(config)
                                                : make_cpu_backend(config)) {}
  Model(const Model&) = delete;
  Model& operator=(const Model&) = delete;

  ga_config config;
  const std::unique_ptr<Backend> backend;
  ParamList params;
  MemoryRanges ranges{config, *backend, params};
  Options options{config};
  ParamArrays arrays{config, *backend, params, ranges, options.ema};
  ContextTables tables;
  Window window;
  Progress progress{*backend, tables};
  WindowLength length{config, *backend, progress, window};
  Health health;
  std::unique_ptr<Ranks> ranks = std::make_unique<Ranks>();
  std::unique_ptr<Speculation> speculation = std::make_unique<Speculation>();

  double loss_scale() const {
    return options.scaled ? progress.control().scaler.scale : config.loss_scale;
  }
  // Throws if the backend can take no work now: after a fault, or because of a capture.
  void check_device() const { backend->capturing(); }
  // For calls that read or write the state of a device at once, and not in the order of a graph.
  void check_no_capture(const char* what) const {
    if (backend->capturing())
      fail(GA_ERROR_INVALID_STATE,
           "%s waits for the device, which is not possible while the stream is being captured",
           what);
  }
  // Throws if an option of an update may not change now.
  void check_settable() const {
    check_device();
    speculation->check_not_in_place("a function that sets an option");
  }
};

inline Params params_of(const std::vector<ga_param>& list) { return {list.data(), list.size()}; }

}  // namespace ga
