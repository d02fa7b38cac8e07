// SPDX-License-Identifier: Apache-2.0
//
// The header of a safetensors file, written and parsed. Such a file is the length of a JSON text
// (8 bytes, little-endian), the JSON text, and the data, in which the tensors follow each other
// without holes:
//
//   {"__metadata__": {"format": "1"},
//    "w": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}}
//
// The format is described at https://github.com/huggingface/safetensors#format.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace ga::safetensors {

struct Tensor {
  std::string name;
  std::string dtype;           // "F32", ...
  std::vector<int64_t> shape;  // empty for a scalar
  int64_t begin, end;          // bytes, from the first byte of the data
};

struct Header {
  std::vector<std::pair<std::string, std::string>> metadata;  // in the order of the file
  std::vector<Tensor> tensors;                                // in the order of their data
};

constexpr int64_t kLengthBytes = 8;         // the length of the JSON text, in front of it
constexpr int64_t kMostHeader = 100000000;  // bytes of JSON text, as in the reference reader
constexpr int64_t kMostName = 16384;        // bytes of a tensor's name
constexpr int64_t kMostDimensions = 64;     // of a tensor
constexpr int64_t kAlignment = 64;          // bytes; data that write() places begins at a multiple

// Bytes of an element. 0: the dtype is not known, or an element has no whole number of bytes.
int64_t element_size(std::string_view dtype);

// Whether the bytes are UTF-8 as JSON allows it, without surrogates and overlong forms.
bool is_utf8(std::string_view text);

// The first bytes of a file, up to the data: the length and the JSON text, which has the metadata
// first, then the tensors, in the order given. Spaces at its end align the data to kAlignment,
// because state is read in place; the format asks for a multiple of 8. The ranges of the tensors
// must tile the data. most: of the bytes of the JSON text. Throws GA_ERROR_UNSUPPORTED for names and sizes
// that parse() would refuse.
std::string write(const Header& header, int64_t most = kMostHeader);

// Reads a JSON text, of which nothing is trusted. data_bytes is the number of bytes behind the text
// in the file. Throws GA_ERROR_FORMAT with what is wrong and where. Takes up to 12 bytes of memory
// per byte of the text.
//
// Stricter than the reference reader: an entry has no fields but the three of the format, no key
// occurs twice, and no control characters, such as line breaks, stand between the tokens. More
// liberal: a dtype may be unknown, and the size of its tensors is then not checked.
Header parse(std::string_view text, int64_t data_bytes, int64_t most = kMostHeader);

}  // namespace ga::safetensors
