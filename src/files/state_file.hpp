// SPDX-License-Identifier: Apache-2.0
// A state file: a safetensors file with a format mark, and with an XXH3 checksum of each tensor and of
// the header. It is written and read piece by piece, through functions of whoever stores it. What the
// tensors mean, checkpoint.hpp knows.
//
// The metadata of our files begins with the mark and the header's own checksum, so both lie at fixed
// places. A file of another program has no checksums and says so by another mark.
//
// A header of more than 100 MB is beyond what safetensors allows, as of some 190,000 parameters with AdamW's
// state. Such a file has format 2: its own header names two tensors of bytes, gradaccum.data, which has the data
// of a file of format 1, and behind it gradaccum.index, which has its header.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "files/safetensors.hpp"

namespace ga {

using Metadata = std::vector<std::pair<std::string, std::string>>;

// All keys of ours begin with this, and so do the names of tensors that belong to no parameter or layer.
constexpr std::string_view kOurs = "gradaccum.";
// And what is of the window of another rank than 0 with this, then the number of the rank, a dot and the
// name that it has of rank 0's.
constexpr std::string_view kOfRank = "gradaccum.rank.";

constexpr int64_t kMostIndex = INT32_MAX;  // bytes of a header of format 2

inline bool begins_with(std::string_view text, std::string_view begin) {
  return text.substr(0, begin.size()) == begin;
}

// Stores `size` bytes at an offset of the file, or reads them; throws Error.
using WriteAt = std::function<void(int64_t offset, const void* data, size_t size)>;
using ReadAt = std::function<void(int64_t offset, void* data, size_t size)>;

// An XXH3 checksum of 64 bits.
class Checksum {
 public:
  Checksum();
  ~Checksum();
  Checksum(const Checksum&) = delete;
  Checksum& operator=(const Checksum&) = delete;
  void restart();
  void add(const void* data, size_t size);
  uint64_t value() const;

 private:
  void* state_;
};

class StateWriter {
 public:
  // metadata: without what this class adds. tensors: name, dtype and shape of each, in the order in
  // which their bytes will come.
  StateWriter(Metadata metadata, std::vector<safetensors::Tensor> tensors);

  int64_t file_bytes() const { return data_begin_ + data_bytes_ + index_bytes_; }
  int64_t data_bytes() const { return data_bytes_; }
  // Writes the next bytes of the data. Small pieces are gathered first.
  void put(const WriteAt& write, const void* data, size_t size);
  void finish(const WriteAt& write);  // writes the header

 private:
  std::string text() const;
  void put_some(const WriteAt& write, const void* data, size_t size);
  void flush(const WriteAt& write);

  safetensors::Header header_;
  std::vector<uint64_t> sums_;  // by tensor
  Checksum sum_;
  std::vector<char> gathered_;  // the last bytes that were put, not written yet
  size_t tensor_ = 0;           // whose bytes come next
  int64_t done_ = 0;            // bytes of the data
  int64_t data_begin_ = 0, data_bytes_ = 0;
  int64_t index_bytes_ = 0;  // 0: format 1
};

class StateReader {
 public:
  // Reads the header of a file of that size and checks it. unmarked: a file without a mark is legal.
  // Throws GA_ERROR_FORMAT.
  StateReader(int64_t size, const ReadAt& read, bool unmarked);
  // Reads data that have no header in front of them; this is it. There are no checksums, so the second reading of a tensor
  // must find what the first one found.
  StateReader(safetensors::Header header, bool is_ours);

  bool is_ours() const { return ours_; }  // written by this library, so there are checksums
  const std::vector<safetensors::Tensor>& tensors() const { return header_.tensors; }
  // The text of one of our keys, which is given without kOurs; NULL: there is none.
  const std::string* find(std::string_view key) const;
  const Metadata& metadata() const { return header_.metadata; }
  int64_t data_begin() const { return data_begin_; }  // in the file
  int64_t data_bytes() const { return data_bytes_; }

  // next() goes on with the first byte of that tensor.
  void seek(size_t tensor);
  void read_anew() { ahead_.clear(); }  // bytes that were read ahead are read once more
  // Reads the next bytes of the tensor. With the last of them, throws GA_ERROR_FORMAT if the tensor is
  // not what its checksum says or, of a file without checksums, not what the first reading found.
  void next(const ReadAt& read, void* to, size_t size);

 private:
  void make_room();
  void check_mark(bool unmarked);
  std::string read_index(const ReadAt& read) const;
  void take_sums();
  void read_small(const ReadAt& read, int64_t at, void* to, size_t size);

  bool ours_ = false;
  safetensors::Header header_;
  std::map<std::string_view, const std::string*> keys_;  // of ours, without kOurs
  std::vector<uint64_t> sums_;                           // by tensor
  std::vector<char> known_;                              // whether sums_ has that of a tensor
  Checksum sum_;
  std::vector<char> ahead_;  // bytes of the data that were read with those of a small piece
  int64_t ahead_begin_ = 0;  // where they begin
  size_t tensor_ = 0;
  int64_t done_ = 0;  // bytes of the tensor
  int64_t data_begin_ = 0, data_bytes_ = 0;
};

}  // namespace ga
