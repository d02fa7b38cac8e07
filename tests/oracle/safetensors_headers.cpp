// SPDX-License-Identifier: Apache-2.0
//
// Reads files from the standard input, each behind a line with its number of bytes. Answers each
// with a line: "ok N", followed by the N bytes of its header written again, or "refused: " and the
// message.
#include <cstdio>
#include <iostream>

#include "core/error.hpp"
#include "files/safetensors.hpp"

namespace {

using namespace ga::safetensors;

// Trusts the length of the header, which the caller of parse() would check.
void answer(const std::string& file) {
  uint64_t length = 0;
  for (size_t i = kLengthBytes; i-- > 0;)
    length = length << 8 | static_cast<unsigned char>(file[i]);
  const std::string_view behind = std::string_view(file).substr(kLengthBytes);
  try {
    const auto data_bytes = static_cast<int64_t>(behind.size() - length);
    const std::string header = write(parse(behind.substr(0, length), data_bytes));
    std::cout << "ok " << header.size() << '\n' << header;
  } catch (const ga::Error& error) {
    std::cout << "refused: " << error.what() << '\n';
  }
}

}  // namespace

int main() {
  std::ios::sync_with_stdio(false);
  size_t bytes;
  while (std::cin >> bytes && std::cin.get() == '\n') {
    std::string file(bytes, '\0');
    if (!std::cin.read(file.data(), static_cast<std::streamsize>(bytes))) return 1;
    answer(file);
  }
}
