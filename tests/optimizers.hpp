// SPDX-License-Identifier: Apache-2.0
//
// One row per optimizer, with everything that the suites need to know about it. The rows are
// written independently of the library: test_optimizers.cpp fails if a row and the library
// disagree, or if the library has an optimizer without a row. The formulas are in reference.cpp.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "gradaccum/gradaccum.h"

namespace ga::test {

// A field of ga_optimizer and its value.
struct OptimizerField {
  const char* name;
  double value;
  double ga_optimizer::*number;
  int32_t ga_optimizer::*integer;

  OptimizerField(const char* n, double ga_optimizer::*field, double v)
      : name(n), value(v), number(field), integer(nullptr) {}
  OptimizerField(const char* n, int32_t ga_optimizer::*field, int32_t v)
      : name(n), value(v), number(nullptr), integer(field) {}
  double of(const ga_optimizer& o) const { return number ? o.*number : o.*integer; }
};

struct OptimizerRow {
  using Options = void (*)(ga_optimizer&);

  // The defaults of a flavor: every field that the optimizer reads and whose default is not 0.
  struct Defaults {
    int32_t flavor;
    std::vector<OptimizerField> fields;
  };
  // Options that are worth a test.
  struct Good {
    const char* name;
    int32_t flavor;
    double lr;
    Options set;
  };
  // Options that ga_group_add refuses, with words of the message.
  struct Bad {
    int32_t flavor;
    std::vector<const char*> words;
    Options set;
    ga_status status;
  };

  int32_t kind;
  const char* name;     // in messages of the library
  const char* example;  // value of --optimizer in examples/fashion_mnist, or NULL

  std::vector<Defaults> defaults = {};
  std::vector<Good> good = {};
  std::vector<Bad> bad = {};
  // The names of a parameter's state in torch, or in timm, separated by spaces. A matrix has rank
  // >= 2.
  const char* (*state)(const ga_optimizer&, bool matrix) = [](const ga_optimizer&, bool) {
    return "";
  };
  // Those of what it counts besides its steps, in the torch flavor.
  const char* numbers = "";
  // Whether the optimizer supports GA_ROWS_LAZY.
  bool (*lazy)(const ga_optimizer&) = [](const ga_optimizer&) { return false; };
  bool layer_wise = false;     // its steps take norms or means of the parameter
  bool matrices_only = false;  // takes only matrices of f32
  bool bf16_state = true;
  bool by_sign = false;  // only the sign of its state moves the parameter
  // Suites that are not about formulas and would take long with all optimizers use those that stand
  // for the others. Each of these runs different code of the kernels.
  bool stands_for_others = false;
  std::vector<int32_t> paired = {};  // flavors that test_pairs.cpp combines with everything else

  bool has(int32_t flavor) const {
    for (const Defaults& d : defaults)
      if (d.flavor == flavor) return true;
    return false;
  }
  void add_defaults(int32_t flavor, std::vector<OptimizerField> fields) {
    defaults.push_back({flavor, std::move(fields)});
  }
  void add(const char* variant, int32_t flavor, double lr, Options set) {
    good.push_back({variant, flavor, lr, set});
  }
  void refuses(int32_t flavor, std::vector<const char*> words, Options set,
               ga_status status = GA_ERROR_INVALID_ARGUMENT) {
    bad.push_back({flavor, std::move(words), set, status});
  }
};

// In the order of ga_optimizer_kind.
const std::vector<OptimizerRow>& optimizer_rows();

inline const OptimizerRow& row_of(const ga_optimizer& o) {
  return optimizer_rows()[static_cast<size_t>(o.kind)];
}

}  // namespace ga::test
