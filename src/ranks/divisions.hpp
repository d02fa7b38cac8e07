// SPDX-License-Identifier: Apache-2.0
// Which part of each parameter a rank adds up, takes norms of and, where the optimizer is sharded, keeps the state of.
// Every rank divides the parameters in the same way without asking the others, since all have added the same ones.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <vector>

#include "model/division.hpp"
#include "model/param.hpp"

namespace ga {

class Comm;
struct Model;

class Divisions {
 public:
  // sharded: GA_SHARD_OPTIMIZER, which the list of parameters learns.
  Divisions(Model& model, const Comm& comm, bool sharded);

  bool sharded() const { return sharded_; }
  const Division& of(ga_param id) const { return of(static_cast<size_t>(id)); }
  const Division& of(size_t param) const { return parts_.divisions[param]; }
  const std::vector<Division>& list() const { return parts_.divisions; }
  const std::vector<int64_t>& counts() const { return parts_.counts; }  // elements
  int32_t owner(ga_param id) const { return of(id).owner; }
  // Whether the sum of a gradient stays where it is added, since nobody else updates the parameter.
  bool stays(ga_param id) const;
  // What this rank has of the sum of a gradient in the end, and what it takes norms of.
  Range reduced_range(ga_param id) const;
  Range measured(ga_param id) const;
  int64_t changes() const { return changes_; }  // grows when parameters are divided in another way

  // See model/ranks.hpp.
  void divide();
  std::function<void()> divide_anew();
  void check_keepers(const Rules& by) const;
  void describe_measure(ga_param id, UpdateTask& measure);
  void describe_units(ga_param id, const UnitPattern& pattern, UnitTask& units) const;

 private:
  struct Parts {
    std::vector<Division> divisions;
    std::vector<int64_t> counts;
    std::vector<Keeper> keepers;                       // when it was divided
    std::vector<std::vector<Partial>> layer_partials;  // where the state is not sharded
  };

  int64_t piece_of(size_t param, int64_t grain) const;
  Parts divided(Parts parts) const;
  void take(Parts parts) noexcept;
  // Divides anew. Returns the division that was before if it has changed.
  std::optional<Parts> check_division();

  Model& model_;
  const Comm& comm_;
  const bool sharded_;
  Parts parts_;
  int64_t changes_ = 0;
};

}  // namespace ga
