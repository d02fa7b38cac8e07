// SPDX-License-Identifier: Apache-2.0
// A model and what works on it up to the end of a window, for those that need most of it. Whoever calls a stage includes
// its header.
#pragma once

namespace ga {

class Accumulator;
class BatchNorms;
class Copies;
struct Model;
class Preparation;
class TableWriter;

struct Stages {
  Model& model;
  TableWriter& writer;
  Preparation& preparation;
  Copies& copies;
  Accumulator& accumulator;
  BatchNorms& layers;
};

}  // namespace ga
