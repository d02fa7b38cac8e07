// SPDX-License-Identifier: Apache-2.0
#include "small_run.hpp"

#include <iterator>

namespace ga::test {

Bytes saved(ga_context* ctx) {
  size_t size = 0;
  EXPECT_OK(ga_save_to_memory(ctx, nullptr, nullptr, 0, &size));
  Bytes bytes(size);
  EXPECT_OK(ga_save_to_memory(ctx, nullptr, bytes.data(), bytes.size(), &size));
  return bytes;
}

ga_status load(ga_context* ctx, const Bytes& bytes, const ga_state_options* options) {
  return ga_load_from_memory(ctx, bytes.data(), bytes.size(), options);
}

SmallRun::SmallRun(With with, bool other) : with_(with) {
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

void SmallRun::accumulate(uint64_t number) {
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

ga_param SmallRun::add(const char* name, int32_t dtype, const std::vector<int64_t>& shape,
                       const ga_param_options& o, ga_group group) {
  params.emplace_back(dtype, ref::count_of(shape), 0.5);
  EXPECT_OK(try_add(ctx, group, name, params.back().data(), dtype, shape, o));
  return static_cast<ga_param>(params.size()) - 1;
}

void SmallRun::set_table() {
  static constexpr double kRates[] = {0.5, 0.25, 0.125};
  ga_schedule table = schedule(GA_SCHEDULE_TABLE);
  table.table = kRates;
  table.table_size = 3;
  EXPECT_OK(ga_group_set_schedule(ctx, 0, &table));
}

void SmallRun::add_rows_and_layer() {
  ga_param_options rows = options();
  rows.rows = GA_ROWS_LAZY;
  rows_ = add("rows", GA_F32, {4, 3}, rows);
  add("h", GA_BF16, {5}, options(GA_F32));
  gamma_ = add("bn.weight", GA_F32, {2});
  add("bn.bias", GA_F32, {2});
  const ga_bn_options o = bn_options(GA_BN_MICRO);
  EXPECT_OK(ga_bn_add(ctx, "bn", 2, gamma_, gamma_ + 1, &o, &layer_));
}

void SmallRun::set_scaler() {
  ga_loss_scaler scaler;
  EXPECT_OK(ga_loss_scaler_init(&scaler, sizeof scaler));
  scaler.initial_scale = 4;
  scaler.growth_interval = 1;
  EXPECT_OK(ga_context_set_loss_scaler(ctx, &scaler));
}

void SmallRun::add_factored(bool other) {
  const ga_optimizer adafactor = optimizer(GA_OPTIMIZER_ADAFACTOR);
  EXPECT_OK(ga_group_add(ctx, &adafactor, nullptr));
  add("h", GA_BF16, {70}, options(GA_BF16, GA_BF16));
  add("factored", GA_F32, {4, 3}, options(), 1);
  const ga_clip agc = clip(GA_CLIP_AGC, 1);
  EXPECT_OK(ga_group_set_clip(ctx, other ? 1 : 0, &agc));
}

const Tensor& SmallRun::gradient(size_t i, uint64_t number) {
  auto p = params.begin();
  std::advance(p, i);
  const bool narrow = p->dtype() == GA_BF16 && with_ == With::kRows;
  const int64_t count = static_cast<ga_param>(i) == rows_ ? 9 : p->count();
  kept_.push_back(random_tensor(narrow ? GA_F32 : p->dtype(), count, 100 * number + i));
  return kept_.back();
}

}  // namespace ga::test
