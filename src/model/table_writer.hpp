// SPDX-License-Identifier: Apache-2.0
// What the host writes into the tables (tables.hpp): the options of the context and its groups, all entries of a
// parameter when something of it changes, and at the end of a window what that has brought.
#pragma once

#include <vector>

#include "model/model.hpp"

namespace ga {

class TableWriter {
 public:
  explicit TableWriter(Model& model) : model_(model) {}

  void reserve(size_t params);
  // How often something was written that may change by which passes a parameter is updated.
  int64_t changes() const { return changes_; }
  // Whether a capture has to send the entries that only layer-wise Ops and clipping by units read.
  void send_layers(bool on) { sends_layers_ = on; }

  // ---- Options ----

  // The other ranks have to be asked whether they agree. tensors: on parameters and layers too.
  void settings_changed(bool tensors);
  void write_settings();
  // Of the settings, for devices to compare over ranks, replays of a graph included.
  void write_checksum();
  void write_groups();
  void write_scaler();  // sets the loss scale and its counters to their initial values
  void write_scales(size_t param);
  void set_tables();  // tells the backends where the tables are

  // ---- A parameter ----

  // Writes all entries of a parameter anew, from its arrays, its options and those of its group.
  void describe(size_t param);
  void describe_all() {
    for (size_t i = 0; i < model_.tables.params(); ++i) describe(i);
  }
  void set_arrays(size_t param);  // where the arrays lie that an update reads and writes
  // What Newton-Schulz makes of a parameter's update, and where.
  OrthogonalizeTask orthogonal_task(ga_param id) const;
  Array target_of(ga_param id) const;  // the accumulator, in the format that it has
  Source borrowed_of(const Param& p) const {
    return {p.borrowed, p.gradient_dtype, p.borrowed_scale,
            p.window.borrowed_late ? &model_.tables.control.at()->scaler.scale : nullptr};
  }
  Source source_of(ga_param id) const;  // where the gradient of the window lies

  // ---- A window ----

  // Whether the norm of a parameter's gradient is to be taken in a pass of its own. If nobody wants it, the
  // tables say that it is not known.
  bool needs_norm(size_t param);
  // Writes what this window has brought to a parameter.
  void write_param(size_t param);
  // Has the tables of a parameter that is updated ahead of ga_step read the sum of its gradients over the ranks, which
  // need not be there yet.
  void write_sum(size_t param, const Array& sum);
  // If only the address of a borrowed gradient is new, has just the words with the address go to a device, not the
  // tables. Returns false if more is new.
  bool move_gradient(size_t param);
  void send_moved();   // sends the addresses that move_gradient() collected
  void edit_params();  // has flush() send every entry of every parameter again
  void flush();

 private:
  void describe_input(size_t param);
  void describe_update(size_t param);
  void describe_units(size_t param);
  void describe_factored(size_t param);
  void describe_layered(size_t param);
  void describe_views(size_t param);
  template <class F>
  void each_source(size_t param, F&& f);
  void set_gradient(size_t param);
  bool norm_wanted(ga_param id) const;

  Model& model_;
  std::vector<Source> known_;  // by parameter: the borrowed gradient that the tables name
  std::vector<Word> moved_;    // new addresses of borrowed gradients, to be sent
  int64_t changes_ = 0;
  bool sends_layers_ = false;
};

}  // namespace ga
