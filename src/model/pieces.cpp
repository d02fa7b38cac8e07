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

void each_piece(const Model& model, ga_param id, const Array& own, int64_t count,
                const TakePiece& take) {
  if (model.ranks->divides(id)) return model.ranks->each_piece(id, own, count, take);
  const Region whole = {own.data, static_cast<size_t>(count * dtype_info(own.format).size)};
  model.backend->read_pieces({&whole, 1}, take);
}

}  // namespace ga
