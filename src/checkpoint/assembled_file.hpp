// SPDX-License-Identifier: Apache-2.0
// A state file as it would be if the parts of parameters that this context has had been saved, put together from files
// in which the parameters are in other parts: of ranks with parameters of their own (GA_SHARD_PARAMETERS), or of a
// context that had the whole.
//
// An array of a parameter, its sums of an open window included, is what those of the other parts have of these
// elements; numbers of a parameter are those of its first part. Ranks that hand their samples on to others hand on the
// weights of their micro-batches: data rank r of R gets those of data ranks r, r + R, and so on, and a new one 0.
// Partial sums are left out, since they are of other chunks.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "files/state_file.hpp"
#include "model/own_parts.hpp"

namespace ga {

class AssembledFile {
 public:
  struct Source {
    std::unique_ptr<StateReader> file;
    ReadAt read;
    OwnParts own;
  };

  // here: what the file is to have. knows(name): whether another rank has a parameter of that name, which is left out
  // then; what nobody knows is in the file. Throws GA_ERROR_FORMAT or GA_ERROR_INVALID_ARGUMENT if the sources do not
  // make up the parts.
  AssembledFile(const OwnParts& here, std::vector<Source> sources,
                const std::function<bool(const std::string&)>& knows);

  std::unique_ptr<StateReader> reader() const;
  bool is_of_one() const { return sources_.size() == 1; }
  void read(int64_t offset, void* to, size_t size);
  // What the gradients of an open window are to be multiplied by, since they are means over other numbers of ranks.
  double gradient_scale() const { return gradient_scale_; }

  // Reads what it takes from the sources, of which each tensor must match its checksum. report(bytes): has read so many
  // of bytes_to_check().
  int64_t bytes_to_check() const;
  void check(const std::function<void(int64_t bytes)>& report);

 private:
  // Where the bytes of a tensor come from.
  struct Place {
    size_t source, tensor;
    const OwnPart* part;  // NULL: all of it are those of the tensor
  };
  struct Made {
    const OwnPart* part;  // the one that it is of
    std::vector<Place> places;
    std::vector<double> numbers;  // or the bytes themselves
    int64_t each = 1;  // so many elements of the part, side by side, have one of the tensor
  };
  // Bytes that lie side by side in both files.
  struct Run {
    int64_t to, bytes;
    size_t source;
    int64_t from;
  };

  const safetensors::Tensor& tensor_of(const Place& place) const {
    return sources_[place.source].file->tensors()[place.tensor];
  }
  void add(std::string name, std::string dtype, std::vector<int64_t> shape, Made made);
  void add_param(const std::string& name, const OwnPart& part);
  int64_t elements_for_each(size_t source, const safetensors::Tensor& t, const OwnPart& part,
                            const OwnPart& to) const;
  void add_others(const std::function<bool(const std::string&)>& knows);
  void add_micro_batches();
  void add_metadata();
  std::vector<double> micro_batches_of(int32_t data_rank);
  void list_runs(size_t tensor);
  void read_tensor(size_t tensor, int64_t from, char* to, size_t size);
  void read_source(size_t source, int64_t from, char* to, size_t size);

  const OwnParts& here_;
  std::vector<Source> sources_;
  std::vector<std::map<std::string_view, size_t>> names_;  // by source: of its tensors
  safetensors::Header header_;
  std::vector<Made> made_;                       // by tensor
  std::map<std::string, std::string> settings_;  // of parameters, by key
  double gradient_scale_ = 1;

  std::vector<Run> runs_;     // of the tensor that is being read
  size_t listed_ = SIZE_MAX;  // which
  // The last bytes of each source that were read for short runs.
  struct Block {
    int64_t from = 0;
    std::vector<char> bytes = {};
  };
  std::vector<Block> blocks_;
};

}  // namespace ga
