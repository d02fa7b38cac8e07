// SPDX-License-Identifier: Apache-2.0
//
// A small training with many kinds of state, for the suites in which saving and loading fail.
#pragma once

#include <list>
#include <vector>

#include "batchnorm.hpp"

namespace ga::test {

using Bytes = std::vector<char>;

// Saves to memory. Two contexts of the same state give the same bytes.
Bytes saved(ga_context* ctx);

ga_status load(ga_context* ctx, const Bytes& bytes, const ga_state_options* options = nullptr);

// What a SmallRun has beside AdamW, EMA and a clip of the norm.
enum class With {
  kAdopted,     // gradients that stay in the program's buffers, and a table of learning rates
  kRows,        // rows, a layer of batch normalisation, master weights and a loss scaler
  kCompensated  // adaptive clipping, compensated accumulators, factored state, noise scale
};
constexpr With kRuns[] = {With::kAdopted, With::kRows, With::kCompensated};

class SmallRun {
 public:
  // other: other hyper-parameters, which GA_SETTINGS_TAKE would replace.
  explicit SmallRun(With with, bool other = false);
  ~SmallRun() { ga_context_destroy(ctx); }
  SmallRun(const SmallRun&) = delete;
  SmallRun& operator=(const SmallRun&) = delete;

  // A micro-batch that depends on its number alone.
  void accumulate(uint64_t number);
  ga_step_result step() {
    const ga_step_result result = test::step(ctx);
    kept_.clear();
    return result;
  }
  void discard() {
    EXPECT_OK(ga_discard(ctx));
    kept_.clear();
  }
  // Windows number first to last - 1, of two micro-batches each.
  void windows(uint64_t first, uint64_t last) {
    for (uint64_t w = first; w < last; ++w) {
      accumulate(2 * w);
      accumulate(2 * w + 1);
      EXPECT_EQ(step().outcome, GA_STEP_APPLIED);
    }
  }
  // Two windows, and half of the third.
  void train() {
    windows(0, 2);
    accumulate(4);
  }
  // The rest of the third window, and the fourth.
  void go_on() {
    accumulate(5);
    EXPECT_EQ(step().outcome, GA_STEP_APPLIED);
    windows(3, 4);
  }
  std::vector<double> values() const {
    std::vector<double> all;
    for (const Tensor& p : params)
      for (int64_t k = 0; k < p.count(); ++k) all.push_back(p.get(k));
    return all;
  }

  ga_context* ctx = nullptr;
  std::list<Tensor> params;

 private:
  ga_param add(const char* name, int32_t dtype, const std::vector<int64_t>& shape,
               const ga_param_options& o = options(), ga_group group = 0);
  void set_table();
  void add_rows_and_layer();
  void set_scaler();
  void add_factored(bool other);
  const Tensor& gradient(size_t i, uint64_t number);

  const With with_;
  ga_param rows_ = -1, gamma_ = -3;
  ga_bn layer_ = -1;
  std::list<Tensor> kept_;  // the gradients of the window
};

}  // namespace ga::test
