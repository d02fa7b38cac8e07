// SPDX-License-Identifier: Apache-2.0
// The end of a window on a device. Its host knows neither what other ranks bring nor whether the window is
// applied, and does not wait to learn it: every rank exchanges all gradients of all windows, zeros where it
// has none, and the device decides by the ranks' records (backend/decide/ranks.hpp).
#pragma once

#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "ranks/exchange.hpp"

namespace ga {

class DeviceExchange final : public Exchange {
 public:
  DeviceExchange(const Stages& stages, RankState& state, std::shared_ptr<Comm> comm,
                 const ga_comm_options& options)
      : Exchange(stages, state, std::move(comm), options) {}
  ~DeviceExchange() override;

  void agree() override;

  bool on_device() const override { return true; }
  int64_t bytes() const override;
  void watch(bool on) override;
  uint64_t checksum_for_device() override { return settings_digest(); }
  void check_options(const Subject& of, const ga_param_options& options) const override;
  int64_t measured_count(ga_param id, int64_t) const override {
    return divisions_.measured(id).count;
  }
  bool is_early(size_t) const override { return false; }
  bool begin_end(WindowTotals& totals, bool discards) override;
  StepSums reduce(const WindowTotals& totals, Params units, const WriteWindow& write) override;

 private:
  void run_ready() override;
  void check_tensors() const override;
  // Where micro-batches are checked, the host does not know: if all are dropped, the kernels leave zeros, which is right
  // for sums; of others, ParamState::contributed tells kernels.
  bool brings(ga_param id) const override;

  // Throws if what earlier windows have queued has failed, which may have reached parameters.
  void check_queued();
  // Says of all gradients that their sums are there (Held::kReduced). Before any gradient has moved, throws if ranks
  // turn out to have different parameters, and returns false if a rank turns out to discard the window.
  bool hold_all(bool discards);
  void end_open_passes();
  void begin_window();
  // Puts the sums there. measured: the parameters whose sums are measured. units: those clipped in parts.
  void put_sums(const WindowTotals& totals, Params measured, Params units);
  const uint64_t* send_brought();

  bool watching_ = false;
  bool captured_ = false;      // a window is in some graph
  std::vector<char> brought_;  // by parameter: this rank has a gradient
  std::vector<uint64_t> brought_bits_;
  Buffer device_bits_;  // the same bits
  Buffer pieces_;       // the sums of this rank's pieces, then those of all ranks
  std::vector<NormTask> norms_;
};

}  // namespace ga
