// SPDX-License-Identifier: Apache-2.0
#include "model/copies.hpp"

#include "core/tensor.hpp"
#include "model/table_writer.hpp"

namespace ga {

void Copies::follow_data(ga_param id) {
  const auto i = static_cast<size_t>(id);
  const Param& p = model_.params[id];
  if (!p.master || !model_.params.follows(id) || p.master_due || p.shard.count == 0) return;
  // An update that has begun does so, and writes the parameter early maybe.
  if (p.ahead != Ahead::kNot || model_.speculation->is_written_early(id)) return;
  writer_.flush();
  const Array followed = {model_.tables.updates.at(i), kFollowed};
  model_.arrays.copy(p, followed, {p.master, GA_F32}, p.shard.count);
}

void Copies::follow_data() {
  for (size_t i = 0; i < model_.params.size(); ++i) follow_data(static_cast<ga_param>(i));
}

void Copies::write(const std::function<bool(ga_param)>& written, const Ranks::Ready& ready) {
  const auto is_due = [&](ga_param id) { return model_.params.follows(id) && written(id); };
  bool any = false;
  for (size_t i = 0; i < model_.params.size(); ++i) {
    const auto id = static_cast<ga_param>(i);
    if (!is_due(id)) continue;
    const Param& p = model_.params[id];
    any = true;
    if (p.master && p.shard.count > 0)
      model_.health.or_break([&] {
        model_.arrays.copy(p, {p.master, GA_F32}, p.shard_data(), p.shard.count);
      });
  }
  const auto changed = [&](ga_param id) {
    return is_due(id) ? Ranks::Changed::kElements : Ranks::Changed::kNothing;
  };
  if (any) model_.ranks->gather_parameters(changed, ready);
}

}  // namespace ga
