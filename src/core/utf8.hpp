// SPDX-License-Identifier: Apache-2.0
// Table 3-7 of the Unicode Standard, "Well-Formed UTF-8 Byte Sequences".
#pragma once

#include <cstddef>

namespace ga {

// The number of bytes of the character that begins at p; 0 if none does. end: behind the text.
inline size_t utf8_character(const char* p, const char* end) {
  const auto byte = [p](int i) { return static_cast<unsigned char>(p[i]); };
  const unsigned first = byte(0);
  if (first < 0x80) return 1;
  const int more = first < 0xC2 ? 0 : first < 0xE0 ? 1 : first < 0xF0 ? 2 : first < 0xF5 ? 3 : 0;
  if (more == 0 || end - p <= more) return 0;
  const unsigned low = first == 0xE0 ? 0xA0 : first == 0xF0 ? 0x90 : 0x80;
  const unsigned high = first == 0xED ? 0x9F : first == 0xF4 ? 0x8F : 0xBF;
  if (byte(1) < low || byte(1) > high) return 0;
  for (int i = 2; i <= more; ++i)
    if ((byte(i) & 0xC0) != 0x80) return 0;
  return static_cast<size_t>(more) + 1;
}

}  // namespace ga
