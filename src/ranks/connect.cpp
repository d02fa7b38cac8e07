// SPDX-License-Identifier: Apache-2.0
#include "ranks/connect.hpp"

#include "batchnorm/batchnorm.hpp"
#include "core/error.hpp"
#include "model/model.hpp"
#include "model/table_writer.hpp"
#include "ranks/device_exchange.hpp"
#include "ranks/host_exchange.hpp"
#include "ranks/own_parameters.hpp"

namespace ga {
namespace {

template <class Kind>
std::unique_ptr<Ranks> join_as(const Stages& stages, RankState& state, std::shared_ptr<Comm> comm,
                               const ga_comm_options& options) {
  auto ranks = std::make_unique<Kind>(stages, state, std::move(comm), options);
  ranks->watch(true);
  ranks->agree();
  return ranks;
}

}  // namespace

void connect(const Stages& stages, RankState& state, std::shared_ptr<Comm> comm,
             const ga_comm_options& options) {
  Model& model = stages.model;
  model.window.check_empty("ga_context_set_comm");
  if (stages.layers.has_statistics())
    fail(GA_ERROR_INVALID_STATE,
         "ga_context_set_comm was called while a layer has statistics of the next window; "
         "ga_discard "
         "drops them");
  if (comm && model.config.device != GA_DEVICE_CPU && options.overlap && !comm->on_stream())
    fail(GA_ERROR_UNSUPPORTED,
         "ga_comm_options.overlap was 1, but by way of the host gradients of a device are "
         "exchanged in "
         "ga_step alone");
  const bool prepared = model.tables.params() > 0;
  const bool shards = options.shard == GA_SHARD_OPTIMIZER;
  if (prepared && (shards || model.ranks->shards()))
    fail(GA_ERROR_INVALID_STATE, "ga_context_set_comm was called %s; %s",
         shards ? "with GA_SHARD_OPTIMIZER after the library has made its arrays (in ga_prepare, "
                  "for state by name, or with the first contribution to a window)"
                : "in a context that keeps only this rank's part of the state",
         shards ? "it is legal only before" : "another context loads a state that was saved");
  std::unique_ptr<Ranks> next = std::make_unique<Ranks>();
  if (!prepared) model.ranks->divide_anew();
  const auto undivide = [&](bool sharded) {
    if (prepared) return;
    model.params.sharded = sharded;
    for (Param& p : model.params) p.shard = {0, p.count};
  };
  undivide(false);
  if (model.ranks->on_device()) model.backend->wait();
  model.ranks->watch(false);
  if (comm) {
    try {
      const auto join = options.shard == GA_SHARD_PARAMETERS   ? join_as<OwnParameters>
                        : model.config.device == GA_DEVICE_CPU ? join_as<HostExchange>
                                                               : join_as<DeviceExchange>;
      next = join(stages, state, std::move(comm), options);
    } catch (...) {
      model.ranks->watch(true);
      undivide(model.ranks->shards());
      throw;
    }
  }
  model.ranks = std::move(next);
  stages.writer.write_settings();
  stages.writer.describe_all();  // norms over layers are cut in another way
  model.options.choose_path(model.params, model.ranks->alone());
  model.speculation->look_again();
}

}  // namespace ga
