// SPDX-License-Identifier: Apache-2.0
//
// A state file as two parts, which a test changes. Then it repairs the checksums, so that what a load
// says is not of them.
#pragma once

#include <cstdint>
#include <cstdio>
#include <string>
#include <vector>

#include "core/error.hpp"
#include "files/safetensors.hpp"
#include "files/state_file.hpp"

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

// A file as several ranks save it, from the files of contexts that are alone and agree in everything but
// their open windows.
template <class Bytes>
Bytes file_of_ranks(const std::vector<Bytes>& files) {
  StateParts all;
  safetensors::Header header;
  const auto text_of = [](const safetensors::Header& h, const char* key) {
    for (const auto& [name, text] : h.metadata)
      if (name == key) return text;
    return std::string();
  };
  const auto is_of_window = [](const std::string& name) {
    return name.find(".grad_accum") != name.npos || name.find(".bn_window") != name.npos ||
           name == "gradaccum.window.micro_batches";
  };
  for (size_t q = 0; q < files.size(); ++q) {
    StateParts parts;
    safetensors::Header h;
    if (!parts.read(files[q].data(), files[q].size()) || !parts.parse(h)) return {};
    if (q == 0) {
      all = parts;
      header = h;
      for (auto& [name, text] : header.metadata)
        if (name == "gradaccum.ranks") text = std::to_string(files.size());
      continue;
    }
    const std::string prefix = "gradaccum.rank." + std::to_string(q) + ".";
    std::string counts;
    const std::string from =
        " " + text_of(h, "gradaccum.counters") + " " + text_of(h, "gradaccum.window") + " ";
    for (const char* name : {"weight", "weighted", "window_dropped", "dropped_micros",
                             "micro_finite", "failed", "rows_held", "noise_repeated"}) {
      const size_t at = from.find(" " + std::string(name) + "=") + 1;
      counts += (counts.empty() ? "" : " ") + from.substr(at, from.find(' ', at) - at);
    }
    header.metadata.emplace_back(prefix + "window", counts);
    for (auto& t : h.tensors) {
      if (!is_of_window(t.name)) continue;
      const auto begin = parts.data.begin() + t.begin, end = parts.data.begin() + t.end;
      t.name = prefix + t.name;
      t.begin = static_cast<int64_t>(all.data.size());
      all.data.insert(all.data.end(), begin, end);
      t.end = static_cast<int64_t>(all.data.size());
      header.tensors.push_back(t);
    }
  }
  all.text = safetensors::write(header).substr(safetensors::kLengthBytes);
  all.repair();
  Bytes bytes;
  all.write(bytes);
  return bytes;
}

}  // namespace ga::test
