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
inline Bytes saved(ga_context* ctx) {
  size_t size = 0;
  EXPECT_OK(ga_save_to_memory(ctx, nullptr, nullptr, 0, &size));
  Bytes bytes(size);
  EXPECT_OK(ga_save_to_memory(ctx, nullptr, bytes.data(), bytes.size(), &size));
  return bytes;
}

inline ga_status load(ga_context* ctx, const Bytes& bytes,
                      const ga_state_options* options = nullptr) {
  return ga_load_from_memory(ctx, bytes.data(), bytes.size(), options);
}

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
  explicit SmallRun(With with, bool other = false) : with_(with) {
    ga_config c = config();
    c.accum_steps = 2;
    c.noise_scale = with == With::kCompensated;
    c.gradient_life = with == With::kAdopted ? GA_GRADIENTS_LIVE : GA_GRADIENTS_CONSUMED;
    if (with == With::kCompensated) c.accumulation = GA_ACCUMULATE_COMPENSATED;
    EXPECT_OK(ga_context_create(&c, &ctx));
    ga_optimizer adamw = optimizer(GA_OPTIMIZER_ADAMW);
    adamw.amsgrad = with != With::kRows;
    if (other) adamw.lr = 0.5;
    EXPECT_OK(ga_group_add(ctx, &adamw, nullptr));
    ga_ema ema;
    EXPECT_OK(ga_ema_init(&ema, sizeof ema));
    EXPECT_OK(ga_context_set_ema(ctx, &ema));
    const ga_clip norm = clip(GA_CLIP_GLOBAL, other ? 2 : 0.5);
    EXPECT_OK(ga_context_set_clip(ctx, &norm));
    add("a weight with a name too long to be kept in place", GA_F32, {3, 2});
    if (with == With::kAdopted) {
      add("b", GA_F64, {5});
      if (!other) set_table();
    } else if (with == With::kRows) {
      add_rows_and_layer();
      if (!other) set_scaler();
    } else {
      add_factored(other);
    }
  }
  ~SmallRun() { ga_context_destroy(ctx); }
  SmallRun(const SmallRun&) = delete;
  SmallRun& operator=(const SmallRun&) = delete;

  // A micro-batch that depends on its number alone.
  void accumulate(uint64_t number) {
    EXPECT_OK(ga_micro_begin(ctx, -1, 1, nullptr));
    for (size_t i = 0; i < params.size(); ++i) {
      const auto id = static_cast<ga_param>(i);
      if (id == gamma_ || id == gamma_ + 1) continue;
      const Tensor& g = gradient(i, number);
      const int64_t rows[] = {3, static_cast<int64_t>(number % 3), 3};
      if (id == rows_) {
        EXPECT_OK(ga_accumulate_rows(ctx, id, rows, GA_I64, 3, g.data()));
      } else {
        EXPECT_OK(ga_accumulate_part(ctx, id, g.data()));
      }
    }
    if (layer_ >= 0) {
      const Tensor x = random_tensor(GA_F32, 8, 50 + number), dy = random_tensor(GA_F32, 8, number);
      Tensor y(GA_F32, 8), dx(GA_F32, 8);
      EXPECT_OK(ga_bn_forward(ctx, layer_, x.data(), 4, 1, y.data()));
      EXPECT_OK(ga_bn_backward(ctx, layer_, x.data(), dy.data(), 4, 1, dx.data()));
    }
    EXPECT_OK(ga_micro_end(ctx));
  }
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
               const ga_param_options& o = options(), ga_group group = 0) {
    params.emplace_back(dtype, ref::count_of(shape), 0.5);
    EXPECT_OK(try_add(ctx, group, name, params.back().data(), dtype, shape, o));
    return static_cast<ga_param>(params.size()) - 1;
  }
  void set_table() {
    static constexpr double kRates[] = {0.5, 0.25, 0.125};
    ga_schedule table = schedule(GA_SCHEDULE_TABLE);
    table.table = kRates;
    table.table_size = 3;
    EXPECT_OK(ga_group_set_schedule(ctx, 0, &table));
  }
  void add_rows_and_layer() {
    ga_param_options rows = options();
    rows.rows = GA_ROWS_LAZY;
    rows_ = add("rows", GA_F32, {4, 3}, rows);
    add("h", GA_BF16, {5}, options(GA_F32));
    gamma_ = add("bn.weight", GA_F32, {2});
    add("bn.bias", GA_F32, {2});
    const ga_bn_options o = bn_options(GA_BN_MICRO);
    EXPECT_OK(ga_bn_add(ctx, "bn", 2, gamma_, gamma_ + 1, &o, &layer_));
  }
  void set_scaler() {
    ga_loss_scaler scaler;
    EXPECT_OK(ga_loss_scaler_init(&scaler, sizeof scaler));
    scaler.initial_scale = 4;
    scaler.growth_interval = 1;
    EXPECT_OK(ga_context_set_loss_scaler(ctx, &scaler));
  }
  void add_factored(bool other) {
    const ga_optimizer adafactor = optimizer(GA_OPTIMIZER_ADAFACTOR);
    EXPECT_OK(ga_group_add(ctx, &adafactor, nullptr));
    add("h", GA_BF16, {70}, options(GA_BF16, GA_BF16));
    add("factored", GA_F32, {4, 3}, options(), 1);
    const ga_clip agc = clip(GA_CLIP_AGC, 1);
    EXPECT_OK(ga_group_set_clip(ctx, other ? 1 : 0, &agc));
  }
  const Tensor& gradient(size_t i, uint64_t number) {
    auto p = params.begin();
    std::advance(p, i);
    const bool narrow = p->dtype() == GA_BF16 && with_ == With::kRows;
    const int64_t count = static_cast<ga_param>(i) == rows_ ? 9 : p->count();
    kept_.push_back(random_tensor(narrow ? GA_F32 : p->dtype(), count, 100 * number + i));
    return kept_.back();
  }

  const With with_;
  ga_param rows_ = -1, gamma_ = -3;
  ga_bn layer_ = -1;
  std::list<Tensor> kept_;  // the gradients of the window
};

}  // namespace ga::test
