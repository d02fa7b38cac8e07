// SPDX-License-Identifier: Apache-2.0
// The names of parameters and layers, which become the names of tensors in a state file: "w" is the
// parameter, "w.exp_avg" state of it, "bn1.running_mean" a statistic of a layer.
#pragma once

#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "core/error.hpp"

namespace ga {

constexpr size_t kLongestName = 4096;  // bytes

// All names that the library gives to state, in the order of the alphabet.
const std::vector<std::string>& state_names();
// Whether key is that of state of a parameter or a layer with this name.
bool is_state_of(std::string_view key, std::string_view name);
// The name of the parameter or layer whose state has this key, of those that is_used() knows; "": none.
std::string_view owner_of(std::string_view key,
                          const std::function<bool(std::string_view)>& is_used);

// Throws GA_ERROR_INVALID_ARGUMENT if the name could not be one in a state file, for itself or beside
// another. is_used(name): whether a parameter or a layer has that name.
void check_name(const Subject& of, std::string_view name,
                const std::function<bool(std::string_view)>& is_used);

}  // namespace ga
