// SPDX-License-Identifier: Apache-2.0
// A model and what works on it up to the end of a window, for those that need most of it.
#pragma once

#include "batchnorm/batchnorm.hpp"
#include "model/copies.hpp"
#include "model/model.hpp"
#include "model/preparation.hpp"
#include "model/table_writer.hpp"
#include "window/accumulator.hpp"

namespace ga {

struct Stages {
  Model& model;
  TableWriter& writer;
  Preparation& preparation;
  Copies& copies;
  Accumulator& accumulator;
  BatchNorms& layers;
};

}  // namespace ga
