// SPDX-License-Identifier: Apache-2.0
// The text of Windows is UTF-16, the library's is UTF-8. For the sources for Windows alone.
#pragma once

#include <windows.h>

#include <string>

namespace ga::os {

// "" if the text is not UTF-8; GetLastError() then says so.
inline std::wstring wide(const std::string& text) {
  const int size = static_cast<int>(text.size());
  const auto convert = [&](wchar_t* to, int room) {
    return MultiByteToWideChar(CP_UTF8, MB_ERR_INVALID_CHARS, text.data(), size, to, room);
  };
  std::wstring result(static_cast<size_t>(size > 0 ? convert(nullptr, 0) : 0), L'\0');
  if (!result.empty()) convert(result.data(), static_cast<int>(result.size()));
  return result;
}

inline std::string utf8(const std::wstring& text) {
  const int size = static_cast<int>(text.size());
  const auto convert = [&](char* to, int room) {
    return WideCharToMultiByte(CP_UTF8, 0, text.data(), size, to, room, nullptr, nullptr);
  };
  std::string result(static_cast<size_t>(size > 0 ? convert(nullptr, 0) : 0), '\0');
  if (!result.empty()) convert(result.data(), static_cast<int>(result.size()));
  return result;
}

// What a function of Windows writes that takes room for text and returns how much it has written, or would have
// written if that is more. "" if it has failed.
template <class Function>
std::wstring text_of(Function&& function) {
  std::wstring text(MAX_PATH, L'\0');
  for (;;) {
    const DWORD length = function(text.data(), static_cast<DWORD>(text.size()));
    const bool fits = length < text.size();
    text.resize(fits ? length : length == text.size() ? 2 * length : length);
    if (fits) return text;
  }
}

// A path that may have more than 260 characters, absolute and without "..": "\\?\C:\folder\name"; the name of a device
// is "\\.\NUL". "" if there is no such path.
inline std::wstring full_path(const std::string& path) {
  const std::wstring given = wide(path);
  if (given.empty()) return given;
  std::wstring full = text_of(
      [&](wchar_t* to, DWORD room) { return GetFullPathNameW(given.c_str(), room, to, nullptr); });
  if (full.compare(0, 4, L"\\\\?\\") == 0 || full.compare(0, 4, L"\\\\.\\") == 0) return full;
  if (full.compare(0, 2, L"\\\\") == 0) return L"\\\\?\\UNC" + full.substr(1);
  return full.empty() ? full : L"\\\\?\\" + full;
}

// In English if Windows has it, else in the user's language.
inline std::string message_of(DWORD error) {
  constexpr DWORD kFlags = FORMAT_MESSAGE_FROM_SYSTEM | FORMAT_MESSAGE_IGNORE_INSERTS;
  wchar_t text[512];
  DWORD length = 0;
  for (const DWORD language :
       {static_cast<DWORD>(MAKELANGID(LANG_ENGLISH, SUBLANG_ENGLISH_US)), DWORD{0}})
    if (length == 0)
      length = FormatMessageW(kFlags, nullptr, error, language, text,
                              static_cast<DWORD>(std::size(text)), nullptr);
  while (length > 0 && (text[length - 1] <= L' ' || text[length - 1] == L'.')) --length;
  if (length == 0) return "error " + std::to_string(error) + " of Windows";
  std::string message = utf8({text, length});
  if (const size_t at = message.find("%1"); at != std::string::npos)
    message.replace(at, 2, "the file");
  return message;
}

}  // namespace ga::os
