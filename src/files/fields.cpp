// SPDX-License-Identifier: Apache-2.0
#include "files/fields.hpp"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstring>

#include "core/error.hpp"

namespace ga {
namespace {

template <class T>
std::string decimal(T value) {
  char text[24];
  const auto end = std::to_chars(text, text + sizeof text, value).ptr;
  return std::string(text, end);
}

// The whole text is a number of that type.
template <class T>
bool parse(std::string_view text, T& value) {
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  return error == std::errc() && end == text.data() + text.size();
}

}  // namespace

std::string Fields::written(int64_t value) { return decimal(value); }
std::string Fields::written(uint64_t value) { return decimal(value); }

// As "%a" in the C locale: "-0x1.8p-3", "inf", "-nan".
std::string Fields::written(double value) {
  char text[40];
  const bool negative = std::signbit(value);
  const auto end =
      std::to_chars(text, text + sizeof text, negative ? -value : value, std::chars_format::hex)
          .ptr;
  const bool digits = std::isfinite(value);
  if (value != value) return negative ? "-nan" : "nan";
  return std::string(negative ? "-" : "") + (digits ? "0x" : "") + std::string(text, end);
}

bool Fields::read(const std::string& text, double& value) {
  std::string_view rest = text;
  const bool negative = !rest.empty() && rest[0] == '-';
  if (negative) rest.remove_prefix(1);
  if (rest == "inf" || rest == "nan") {
    value = std::copysign(rest == "nan" ? NAN : HUGE_VAL, negative ? -1 : 1);
    return true;
  }
  if (rest.substr(0, 2) != "0x" || rest.size() < 3 || rest[2] == '-') return false;
  rest.remove_prefix(2);
  double magnitude = 0;
  const auto [end, error] =
      std::from_chars(rest.data(), rest.data() + rest.size(), magnitude, std::chars_format::hex);
  value = negative ? -magnitude : magnitude;
  return error == std::errc() && end == rest.data() + rest.size() && std::isfinite(value);
}

bool Fields::read(const std::string& text, int64_t& value) { return parse(text, value); }
bool Fields::read(const std::string& text, uint64_t& value) { return parse(text, value); }
bool Fields::read(const std::string& text, int32_t& value) { return parse(text, value); }
bool Fields::read(const std::string& text, uint32_t& value) { return parse(text, value); }

bool Fields::read(const std::string& text, bool& value) {
  value = text == "1";
  return text == "1" || text == "0";
}

Fields::Fields(std::string_view text, const char* what) : what_(what) {
  while (!text.empty()) {
    const std::string_view field = text.substr(0, text.find(' '));
    const size_t equals = field.find('=');
    if (equals == 0 || equals == std::string_view::npos)
      fail(GA_ERROR_FORMAT, "%s: \"%.*s\" was found in place of name=number", what,
           static_cast<int>(std::min<size_t>(field.size(), 80)), field.data());
    list_.emplace_back(field.substr(0, equals), field.substr(equals + 1));
    text.remove_prefix(std::min(text.size(), field.size() + 1));
  }
}

std::string Fields::text() const {
  std::string text;
  for (const auto& [name, value] : list_) text += (text.empty() ? "" : " ") + name + "=" + value;
  return text;
}

const std::string* Fields::find(const List& list, std::string_view name) {
  for (const auto& field : list)
    if (field.first == name) return &field.second;
  return nullptr;
}

void Fields::fail_field(const char* name) const {
  const std::string* const text = find(name);
  fail(GA_ERROR_FORMAT, "%s: %s was %.80s, which is not a number that it can be", what_, name,
       text ? text->c_str() : "missing");
}

// 0.25 is better to read than 0x1p-2.
std::string readable(const char* number) {
  const bool is_float = std::strpbrk(number, "xn") != nullptr;  // hexadecimal, inf or nan
  double x = 0;
  if (!is_float) return number;
  Fields(std::string("x=") + number, "a number").get("x", x);
  char text[32];
  const auto end = std::to_chars(text, text + sizeof text, x).ptr;
  return std::string(text, end);
}

}  // namespace ga
