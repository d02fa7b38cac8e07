// SPDX-License-Identifier: Apache-2.0
//
// Fuzzes the parser of safetensors headers. An input is a line with the number of bytes of data, in
// decimal digits, and the JSON text behind the line. Whatever the text, parse() returns a header or
// throws an error with a message in UTF-8. write() writes each header that parse() returns, so that
// parse() reads the same.
#include <charconv>
#include <cstdlib>

#include "../same_header.hpp"
#include "core/error.hpp"

using namespace ga::safetensors;

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* bytes, size_t size) {
  const std::string_view input(reinterpret_cast<const char*>(bytes), size);
  const size_t line = input.find('\n');
  if (line == input.npos) return -1;
  int64_t data_bytes = 0;
  const char* const end = input.data() + line;
  if (std::from_chars(input.data(), end, data_bytes).ptr != end) return -1;

  Header header;
  try {
    header = parse(input.substr(line + 1), data_bytes);
  } catch (const ga::Error& error) {
    if (error.status() != GA_ERROR_FORMAT || !is_utf8(error.what())) std::abort();
    return 0;
  }
  const std::string written = write(header);
  if (!ga::test::same(parse(ga::test::json_of(written), data_bytes), header)) std::abort();
  return 0;
}
