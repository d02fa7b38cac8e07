// SPDX-License-Identifier: Apache-2.0
#include "files/names.hpp"

#include <algorithm>
#include <iterator>

#include "files/safetensors.hpp"
#include "files/state_file.hpp"
#include "numbers/optimizer.hpp"

namespace ga {

const std::vector<std::string>& state_names() {
  static const std::vector<std::string> names = [] {
    std::vector<std::string> list = slot_names();
    for (const char* name : {"step", "master", "ema", "grad_accum", "grad_accum_low",
                             "running_mean", "running_var", "num_batches_tracked", "bn_window"})
      list.push_back(name);
    std::sort(list.begin(), list.end());
    list.erase(std::unique(list.begin(), list.end()), list.end());
    return list;
  }();
  return names;
}

bool is_state_of(std::string_view key, std::string_view name) {
  if (key.size() <= name.size() + 1 || key.substr(0, name.size()) != name ||
      key[name.size()] != '.')
    return false;
  const std::string_view rest = key.substr(name.size() + 1);
  const auto& names = state_names();
  return std::binary_search(names.begin(), names.end(), rest.substr(0, rest.find('.')));
}

std::string_view owner_of(std::string_view key,
                          const std::function<bool(std::string_view)>& is_used) {
  for (size_t dot = key.find('.'); dot != std::string_view::npos; dot = key.find('.', dot + 1)) {
    const std::string_view owner = key.substr(0, dot);
    if (is_state_of(key, owner) && is_used(owner)) return owner;
  }
  return {};
}

void check_name(const Subject& of, std::string_view name,
                const std::function<bool(std::string_view)>& is_used) {
  if (name.size() > kLongestName)
    fail(GA_ERROR_INVALID_ARGUMENT, "the name of a %s has %zu bytes, more than %zu: \"%.60s...\"",
         of.kind, name.size(), kLongestName, of.name);
  if (!safetensors::is_utf8(name))
    of.fail(GA_ERROR_INVALID_ARGUMENT,
            "its name is not UTF-8, so it could not be saved (ga_save) under it");
  if (name == "__metadata__" || begins_with(name, kOurs))
    of.fail(
        GA_ERROR_INVALID_ARGUMENT,
        "its name is one that state files use themselves: __metadata__, or one that begins with "
        "%s",
        kOurs.data());
  if (const std::string_view owner = owner_of(name, is_used); !owner.empty())
    of.fail(GA_ERROR_INVALID_ARGUMENT,
            "its name is also that of state of \"%.200s\" in a state file (ga_save)",
            std::string(owner).c_str());
}

}  // namespace ga
