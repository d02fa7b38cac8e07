// SPDX-License-Identifier: Apache-2.0
#include "model/pieces.hpp"

#include <cstdio>

#include "core/tensor.hpp"

namespace ga {

void begin_pieces(const Model& model, ga_param id, const char* function, const char* array) {
  char text[512];
  std::snprintf(text, sizeof text, "%s of \"%.200s\" (%.100s)", function, model.params.name(id),
                array);
  model.ranks->begin_sharded_call(text);
}

void each_piece(const Model& model, ga_param id, const DividedArray& array, const TakePiece& take) {
  if (model.ranks->divides(id)) return model.ranks->each_piece(id, array, take);
  const Region whole = {array.own.data,
                        static_cast<size_t>(array.count * dtype_info(array.own.format).size)};
  model.backend->read_pieces({&whole, 1}, take);
}

}  // namespace ga
