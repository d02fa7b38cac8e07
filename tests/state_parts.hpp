// SPDX-License-Identifier: Apache-2.0
//
// A state file as two parts, which a test changes. Then it repairs the checksums, so that what a load
// says is not of them.
#pragma once

#include <cstdint>
#include <cstdio>
#include <string>
#include <vector>

#include "error.hpp"
#include "safetensors.hpp"
#include "state_file.hpp"

namespace ga::test {

class StateParts {
 public:
  std::string text;           // of the header
  std::vector<uint8_t> data;  // of all tensors

  // false: the length in front of the text is not that of a text.
  bool read(const void* file, size_t size) {
    const auto* const bytes = static_cast<const uint8_t*>(file);
    uint64_t length = 0;
    if (size < kLengthBytes) return false;
    for (size_t k = kLengthBytes; k-- > 0;) length = length << 8 | bytes[k];
    if (length > size - kLengthBytes) return false;
    text.assign(reinterpret_cast<const char*>(bytes) + kLengthBytes, static_cast<size_t>(length));
    data.assign(bytes + kLengthBytes + length, bytes + size);
    return true;
  }
  // false: the text is not that of a header.
  bool parse(safetensors::Header& header) const {
    try {
      header = safetensors::parse(text, static_cast<int64_t>(data.size()));
      return true;
    } catch (const Error&) {
      return false;
    }
  }
  // Puts the right checksums into a header that begins as those of the library do.
  void repair() {
    const std::string begin =
        "{\"__metadata__\":{\"gradaccum.format\":\"1 xxh3\",\"gradaccum.header\":\"";
    const std::string before_sums = "\",\"gradaccum.xxh3\":\"";
    constexpr size_t kDigits = 16;
    if (text.compare(0, begin.size(), begin) != 0) return;
    const size_t at = begin.size() + kDigits, sums = at + before_sums.size();
    if (text.size() < sums) return;
    safetensors::Header header;
    const size_t end = text.find('"', sums);
    if (text.compare(at, before_sums.size(), before_sums) == 0 && end != text.npos &&
        parse(header)) {
      std::string list;
      for (const auto& t : header.tensors)
        list += (list.empty() ? "" : " ") +
                sum_of(data.data() + t.begin, static_cast<size_t>(t.end - t.begin));
      text.replace(sums, end - sums, list);
    }
    text.replace(begin.size(), kDigits, kDigits, '0');
    text.replace(begin.size(), kDigits, sum_of(text.data(), text.size()));
  }
  // Appends the file.
  template <class Bytes>
  void write(Bytes& bytes) const {
    for (size_t k = 0; k < kLengthBytes; ++k)
      bytes.push_back(static_cast<typename Bytes::value_type>(uint64_t{text.size()} >> 8 * k));
    bytes.insert(bytes.end(), text.begin(), text.end());
    bytes.insert(bytes.end(), data.begin(), data.end());
  }

 private:
  static constexpr size_t kLengthBytes = safetensors::kLengthBytes;

  static std::string sum_of(const void* data, size_t size) {
    Checksum sum;
    sum.add(data, size);
    char digits[17];
    std::snprintf(digits, sizeof digits, "%016llx", static_cast<unsigned long long>(sum.value()));
    return digits;
  }
};

}  // namespace ga::test
