// SPDX-License-Identifier: Apache-2.0
// ga_context_set_comm: a context joins other ranks, or leaves them.
#pragma once

#include <memory>

#include "ranks/comm/comm.hpp"
#include "ranks/rank_state.hpp"
#include "ranks/stages.hpp"

namespace ga {

// comm NULL: the context is alone from now on. Throws, and leaves the context with the ranks that it had, unless all
// ranks of the communicator agree.
void connect(const Stages& stages, RankState& state, std::shared_ptr<Comm> comm,
             const ga_comm_options& options);

}  // namespace ga
