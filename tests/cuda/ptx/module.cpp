// SPDX-License-Identifier: Apache-2.0
// Finds the functions in a PTX file.
#include <algorithm>

#include "ptx.hpp"
#include "text.hpp"

namespace ga::ptx {

alignas(64) static char argument_memory[kMostArguments];

char* arguments() { return argument_memory; }

Module::Module(std::string text, std::map<std::string, std::string> changes)
    : text_(std::move(text)), changes_(std::move(changes)) {
  const std::string_view all = text_;
  for (size_t at = 0; at < all.size();) {
    size_t end = std::min(all.find('\n', at), all.size());
    std::string_view line = all.substr(at, end - at);
    const bool entry = line.find(".entry ") != line.npos;
    if (line.starts_with(".") && line.find(".shared ") != line.npos) {
      shared_.push_back(line.substr(line.find(".shared ") + 7));
    } else if (line.starts_with(".") && (entry || line.find(".func ") != line.npos)) {
      const size_t brace = all.find_first_of("{;", at);
      if (brace == all.npos) throw Error("the PTX ends within a function");
      if (all[brace] == '{') {
        const std::string_view header = all.substr(at, brace - at);
        end = brace + 1;
        for (int depth = 1; depth > 0; ++end) {
          end = all.find_first_of("{}", end);
          if (end == all.npos) throw Error("the PTX ends within a function");
          depth += all[end] == '{' ? 1 : -1;
        }
        // `.func (results) name(parameters)` or `.entry name(parameters)`
        std::string_view rest =
            header.substr(header.find(entry ? ".entry" : ".func") + (entry ? 6 : 5));
        rest = trim(rest);
        if (rest.starts_with("(")) rest.remove_prefix(rest.find(')') + 1);
        functions_[std::string(take_name(rest))] = {header, all.substr(brace + 1, end - brace - 2),
                                                    entry};
      }
    }
    at = end + 1;
  }
}

std::vector<std::string> Module::entries() const {
  std::vector<std::string> names;
  for (const auto& [name, function] : functions_)
    if (function.entry) names.push_back(name);
  return names;
}

}  // namespace ga::ptx
