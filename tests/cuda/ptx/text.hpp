// SPDX-License-Identifier: Apache-2.0
// Parts of a text.
#pragma once

#include <algorithm>
#include <cctype>
#include <cstring>
#include <string_view>
#include <vector>

namespace ga::ptx {

inline bool is_space(char c) { return std::isspace(static_cast<unsigned char>(c)) != 0; }
inline bool is_name(char c) {
  return std::isalnum(static_cast<unsigned char>(c)) != 0 || c == '_' || c == '$' || c == '%' ||
         c == '.';
}

inline std::string_view trim(std::string_view s) {
  while (!s.empty() && is_space(s.front())) s.remove_prefix(1);
  while (!s.empty() && is_space(s.back())) s.remove_suffix(1);
  return s;
}

// The part before the first of `ends`, which is removed from s; the character that ended it stays.
inline std::string_view take_until(std::string_view& s, std::string_view ends) {
  const size_t n = std::min(s.find_first_of(ends), s.size());
  const std::string_view part = s.substr(0, n);
  s.remove_prefix(n);
  return trim(part);
}

inline std::string_view take_name(std::string_view& s) {
  s = trim(s);
  size_t n = 0;
  while (n < s.size() && is_name(s[n])) ++n;
  const std::string_view name = s.substr(0, n);
  s.remove_prefix(n);
  return name;
}

// The commas of a list that are not within brackets separate it.
inline std::vector<std::string_view> split(std::string_view list) {
  std::vector<std::string_view> parts;
  int depth = 0;
  size_t begin = 0;
  for (size_t k = 0; k <= list.size(); ++k) {
    if (k == list.size() || (list[k] == ',' && depth == 0)) {
      const std::string_view part = trim(list.substr(begin, k - begin));
      if (!part.empty()) parts.push_back(part);
      begin = k + 1;
    } else if (std::strchr("{[(", list[k])) {
      ++depth;
    } else if (std::strchr("}])", list[k])) {
      --depth;
    }
  }
  return parts;
}

inline std::vector<std::string_view> split_dots(std::string_view opcode) {
  std::vector<std::string_view> parts;
  while (!opcode.empty()) {
    parts.push_back(take_until(opcode, "."));
    if (!opcode.empty()) opcode.remove_prefix(1);
  }
  return parts;
}

}  // namespace ga::ptx
