// SPDX-License-Identifier: Apache-2.0
// An array of state as a whole, of which this rank may have a piece alone: then all ranks make the call.
#pragma once

#include "model/model.hpp"

namespace ga {

// Where the optimizer is sharded: checks that all ranks make this call about the same array, between windows.
void begin_pieces(const Model& model, ga_param id, const char* function, const char* array);
// take(piece, bytes) gets the whole array, piece by piece in the order of its elements.
void each_piece(const Model& model, ga_param id, const DividedArray& array, const TakePiece& take);

}  // namespace ga
