// SPDX-License-Identifier: Apache-2.0
//
// fork(): in the child, the parent's contexts only return errors, and the child can make its own.
#include <functional>

#include "child.hpp"
#include "formats.hpp"

namespace ga::test {
namespace {

constexpr int64_t kCount = 4 * 65536 + 5;

ga_config with_threads(int32_t threads) {
  ga_config c = config();
  c.num_threads = threads;
  return c;
}

// A model in training.
struct Model {
  explicit Model(const ga_config& c) : ctx(c) {
    ga_ema ema;
    EXPECT_OK(ga_ema_init(&ema, sizeof ema));
    EXPECT_OK(ga_context_set_ema(ctx, &ema));
    ctx.param(ctx.group(optimizer(GA_OPTIMIZER_ADAMW)), "p", block.data() + layout.offsets[0],
              kCount);
    ctx.param(ctx.group(optimizer(GA_OPTIMIZER_EXTERNAL)), "w", w, ref::Shape{2, 3});
    EXPECT_OK(ga_bn_add(ctx, "bn", 2, -1, -1, nullptr, nullptr));
  }
  void window(uint64_t round) {
    const Block g = gradients(layout, 2, round);
    for (const double weight : {3.0, 0.7}) {
      ctx.accumulate({g.data() + layout.offsets[0], g.data() + layout.offsets[0]}, weight);
    }
    EXPECT_EQ(step(ctx).outcome, GA_STEP_APPLIED);
  }

  Layout layout = Layout({kCount});
  Block block = parameters(layout, 1);
  float w[6] = {};
  Context ctx;
};

Block trained(const ga_config& c) {
  Model model(c);
  for (uint64_t t = 0; t < 3; ++t) model.window(t);
  return model.block;
}

using Calls = std::vector<std::pair<const char*, std::function<ga_status()>>>;

// Calls every function that takes a context, with valid arguments.
void expect_all_refused(ga_context* ctx) {
  static float data[64], out[64];
  static const double numbers[] = {1, 2};
  const void* const list[] = {data, data};
  const int64_t shape[] = {2, 3};
  const int32_t rows[] = {0};
  const ga_flat_entry entry = flat_entry("flat", 0, 2, shape, 0);
  const int64_t from = 0, steps = 4;
  const ga_param ready = 1;
  const ga_optimizer o = plain_sgd();
  const ga_schedule s = schedule(GA_SCHEDULE_CONSTANT);
  const ga_clip c = clip(GA_CLIP_GLOBAL, 1);
  ga_loss_scaler scaler;
  EXPECT_OK(ga_loss_scaler_init(&scaler, sizeof scaler));
  ga_ema ema;
  EXPECT_OK(ga_ema_init(&ema, sizeof ema));
  double number = -7;
  int32_t id = -7, dtype = -7;
  int64_t count = -7;
  const void* at = nullptr;
  ga_memory memory = {};
  memory.struct_size = sizeof memory;
  ga_optimizer known = o;
  ga_param_info param = {};
  param.struct_size = sizeof param;
  ga_bn_info layer = {};
  layer.struct_size = sizeof layer;
  ga_clip got = c;
  ga_state_info state = {};
  state.struct_size = sizeof state;
  size_t slots = 7;
  ga_window_info info = {};
  info.struct_size = sizeof info;
  ga_step_result result = {};
  result.struct_size = sizeof result;
  ga_accumulator accumulator = {};
  accumulator.struct_size = sizeof accumulator;
  const Calls calls = {
      {"ga_synchronize", [&] { return ga_synchronize(ctx); }},
      {"ga_context_set_stream", [&] { return ga_context_set_stream(ctx, nullptr); }},
      {"ga_context_memory", [&] { return ga_context_memory(ctx, &memory); }},
      {"ga_context_set_accum_steps", [&] { return ga_context_set_accum_steps(ctx, 2); }},
      {"ga_context_set_accum_schedule",
       [&] { return ga_context_set_accum_schedule(ctx, &from, &steps, 1); }},
      {"ga_group_add", [&] { return ga_group_add(ctx, &o, &id); }},
      {"ga_group_count", [&] { return ga_group_count(ctx, &id); }},
      {"ga_group_optimizer", [&] { return ga_group_optimizer(ctx, 0, &known); }},
      {"ga_param_count", [&] { return ga_param_count(ctx, &id); }},
      {"ga_param_find", [&] { return ga_param_find(ctx, "p", &id); }},
      {"ga_param_describe", [&] { return ga_param_describe(ctx, 0, &param); }},
      {"ga_slot_count", [&] { return ga_slot_count(ctx, &slots); }},
      {"ga_param_slot", [&] { return ga_param_slot(ctx, 0, &slots); }},
      {"ga_group_set_lr", [&] { return ga_group_set_lr(ctx, 0, 0.5); }},
      {"ga_group_set_weight_decay", [&] { return ga_group_set_weight_decay(ctx, 0, 0.5); }},
      {"ga_group_set_optimizer", [&] { return ga_group_set_optimizer(ctx, 0, &o); }},
      {"ga_group_set_frozen", [&] { return ga_group_set_frozen(ctx, 0, 1); }},
      {"ga_group_last_lr", [&] { return ga_group_last_lr(ctx, 0, &number); }},
      {"ga_context_set_steps", [&] { return ga_context_set_steps(ctx, 4); }},
      {"ga_param_set_lr_scale", [&] { return ga_param_set_lr_scale(ctx, 0, 2); }},
      {"ga_param_set_weight_decay_scale",
       [&] { return ga_param_set_weight_decay_scale(ctx, 0, 2); }},
      {"ga_param_remove", [&] { return ga_param_remove(ctx, 0); }},
      {"ga_prepare", [&] { return ga_prepare(ctx); }},
      {"ga_state_count", [&] { return ga_state_count(ctx, 0, &id); }},
      {"ga_state_describe", [&] { return ga_state_describe(ctx, 0, 0, &state); }},
      {"ga_state_get", [&] { return ga_state_get(ctx, 0, "step", &count, GA_I64, 1); }},
      {"ga_state_set", [&] { return ga_state_set(ctx, 0, "step", &count, GA_I64, 1); }},
      {"ga_state_reset", [&] { return ga_state_reset(ctx, 0); }},
      {"ga_save", [&] { return ga_save(ctx, "unused", nullptr); }},
      {"ga_load", [&] { return ga_load(ctx, "unused", nullptr); }},
      {"ga_save_to_memory", [&] { return ga_save_to_memory(ctx, nullptr, nullptr, 0, &slots); }},
      {"ga_load_from_memory", [&] { return ga_load_from_memory(ctx, &number, 8, nullptr); }},
      {"ga_state_write",
       [&] {
         return ga_state_write(
             ctx, [](void*, int64_t, const void*, size_t) { return 0; }, nullptr, nullptr);
       }},
      {"ga_state_read",
       [&] {
         return ga_state_read(
             ctx, [](void*, int64_t, void*, size_t) { return 0; }, nullptr, 8, nullptr);
       }},
      {"ga_ema_swap", [&] { return ga_ema_swap(ctx, 1); }},
      {"ga_micro_abort", [&] { return ga_micro_abort(ctx); }},
      {"ga_group_set_schedule", [&] { return ga_group_set_schedule(ctx, 0, &s); }},
      {"ga_group_lr", [&] { return ga_group_lr(ctx, 0, &number); }},
      {"ga_context_set_clip", [&] { return ga_context_set_clip(ctx, &c); }},
      {"ga_group_set_clip", [&] { return ga_group_set_clip(ctx, 0, &c); }},
      {"ga_context_clip", [&] { return ga_context_clip(ctx, &got); }},
      {"ga_group_clip", [&] { return ga_group_clip(ctx, 0, &got); }},
      {"ga_context_set_loss_scaler", [&] { return ga_context_set_loss_scaler(ctx, &scaler); }},
      {"ga_loss_scale", [&] { return ga_loss_scale(ctx, &number, nullptr); }},
      {"ga_context_set_ema", [&] { return ga_context_set_ema(ctx, &ema); }},
      {"ga_param_add",
       [&] { return ga_param_add(ctx, 0, "new", data, GA_F32, 2, shape, nullptr, &id); }},
      {"ga_params_add_flat",
       [&] { return ga_params_add_flat(ctx, data, GA_F32, &entry, 1, nullptr, &id); }},
      {"ga_param_bind", [&] { return ga_param_bind(ctx, 1, data); }},
      {"ga_param_changed", [&] { return ga_param_changed(ctx, 1); }},
      {"ga_ema_copy_to", [&] { return ga_ema_copy_to(ctx, 1, out, GA_F32); }},
      {"ga_param_set_frozen", [&] { return ga_param_set_frozen(ctx, 1, 1); }},
      {"ga_accumulate", [&] { return ga_accumulate(ctx, list, 2, 1, nullptr); }},
      {"ga_micro_begin", [&] { return ga_micro_begin(ctx, 0, 1, nullptr); }},
      {"ga_accumulate_part", [&] { return ga_accumulate_part(ctx, 1, data); }},
      {"ga_accumulate_rows", [&] { return ga_accumulate_rows(ctx, 1, rows, GA_I32, 1, data); }},
      {"ga_accumulate_matmul",
       [&] { return ga_accumulate_matmul(ctx, 1, 1, data, 2, 1, data, 3, 0, GA_F32); }},
      {"ga_accumulator_acquire", [&] { return ga_accumulator_acquire(ctx, 1, &accumulator); }},
      {"ga_accumulator_release", [&] { return ga_accumulator_release(ctx, 1); }},
      {"ga_micro_end", [&] { return ga_micro_end(ctx); }},
      {"ga_params_ready", [&] { return ga_params_ready(ctx, &ready, 1); }},
      {"ga_context_set_comm", [&] { return ga_context_set_comm(ctx, nullptr, nullptr); }},
      {"ga_window", [&] { return ga_window(ctx, &info); }},
      {"ga_step", [&] { return ga_step(ctx, &result); }},
      {"ga_step_result_get", [&] { return ga_step_result_get(ctx, 0, 1, &result); }},
      {"ga_discard", [&] { return ga_discard(ctx); }},
      {"ga_gradient", [&] { return ga_gradient(ctx, 1, &at, &dtype, nullptr); }},
      {"ga_bn_add", [&] { return ga_bn_add(ctx, "new", 2, -1, -1, nullptr, &id); }},
      {"ga_bn_count", [&] { return ga_bn_count(ctx, &id); }},
      {"ga_bn_find", [&] { return ga_bn_find(ctx, "bn", &id); }},
      {"ga_bn_describe", [&] { return ga_bn_describe(ctx, 0, &layer); }},
      {"ga_bn_set_frozen", [&] { return ga_bn_set_frozen(ctx, 0, 1); }},
      {"ga_bn_accumulate", [&] { return ga_bn_accumulate(ctx, 0, data, 3, 2); }},
      {"ga_bn_accumulate_stats",
       [&] { return ga_bn_accumulate_stats(ctx, 0, 3, numbers, numbers, 0, GA_F64); }},
      {"ga_bn_finalize", [&] { return ga_bn_finalize(ctx, 0); }},
      {"ga_bn_forward", [&] { return ga_bn_forward(ctx, 0, data, 3, 2, out); }},
      {"ga_bn_backward_accumulate",
       [&] { return ga_bn_backward_accumulate(ctx, 0, data, data, 3, 2); }},
      {"ga_bn_backward_finalize", [&] { return ga_bn_backward_finalize(ctx, 0); }},
      {"ga_bn_backward", [&] { return ga_bn_backward(ctx, 0, data, data, 3, 2, out); }},
      {"ga_bn_infer", [&] { return ga_bn_infer(ctx, 0, data, 3, 2, out); }},
      {"ga_bn_running", [&] { return ga_bn_running(ctx, 0, out, nullptr, GA_F32, &count); }},
      {"ga_bn_running_set", [&] { return ga_bn_running_set(ctx, 0, numbers, numbers, GA_F64, 1); }},
      {"ga_bn_statistics", [&] { return ga_bn_statistics(ctx, 0, out, nullptr, GA_F32, &count); }},
  };
  for (const auto& [name, call] : calls) {
    EXPECT_EQ(ga_discard(nullptr), GA_ERROR_INVALID_ARGUMENT);  // sets another error message first
    EXPECT_EQ(call(), GA_ERROR_INVALID_STATE) << name;
    EXPECT_NE(std::string(ga_last_error()).find("fork"), std::string::npos) << ga_last_error();
  }
  EXPECT_EQ(number, -7);
  EXPECT_EQ(id, -7);
  EXPECT_EQ(count, -7);
  EXPECT_EQ(at, nullptr);
  EXPECT_EQ(info.windows, 0);
  EXPECT_EQ(result.windows, 0);
}

TEST(Fork, ContextsOfTheParent) {
  const Block expected = trained(config());
  Model model(with_threads(2));
  model.window(0);  // makes OpenMP create its threads
  const Block before = model.block;
  in_child([&] {
    expect_all_refused(model.ctx);
    EXPECT_TRUE(same_bits(model.block, before));
    ga_context_destroy(model.ctx);
    EXPECT_NE(std::string(ga_build_info()).find("libgradaccum"), std::string::npos);
    EXPECT_STREQ(ga_status_name(GA_OK), "GA_OK");
    int32_t devices = 0;
    EXPECT_OK(ga_device_count(GA_DEVICE_CPU, &devices));
    EXPECT_EQ(devices, 1);
  });
  for (uint64_t t = 1; t < 3; ++t) model.window(t);
  EXPECT_TRUE(same_bits(model.block, expected)) << "the parent does not go on as before";
}

TEST(Fork, ContextsOfTheChild) {
  const Block expected = trained(with_threads(2));
  for (const int32_t threads : {1, 2, 0}) {
    in_child([&] { EXPECT_TRUE(same_bits(trained(with_threads(threads)), expected)); });
  }
  EXPECT_TRUE(same_bits(trained(with_threads(2)), expected)) << "the parent's threads fail";
}

struct Loops {
  int count = 0;
  static void run(void* user, int64_t count, ga_task task, void* data) {
    ++static_cast<Loops*>(user)->count;
    for (int64_t i = count; i-- > 0;) task(data, i);
  }
};

TEST(Fork, ParallelForOfTheChild) {
  const Block expected = trained(with_threads(2));
  in_child([&] {
    Loops loops;
    ga_config c = with_threads(2);
    c.parallel_for = Loops::run;
    c.parallel_for_user = &loops;
    EXPECT_TRUE(same_bits(trained(c), expected));
    EXPECT_GT(loops.count, 3);
  });
}

#ifdef _OPENMP
// A program that has started OpenMP's threads before it makes a context.
TEST(Fork, OpenMpOfTheProgram) {
  int threads = 0;
#pragma omp parallel num_threads(2) reduction(+ : threads)
  threads += 1;
  in_child([&] { trained(with_threads(2)); });
  EXPECT_GT(threads, 0);
}
#endif

TEST(Fork, Grandchildren) {
  const Block expected = trained(with_threads(2));
  Model parents(with_threads(2));
  in_child([&] {
    Model childs(with_threads(2));
    childs.window(0);
    in_child([&] {
      expect_all_refused(parents.ctx);
      expect_all_refused(childs.ctx);
      EXPECT_TRUE(same_bits(trained(with_threads(2)), expected));
    });
    for (uint64_t t = 1; t < 3; ++t) childs.window(t);
    EXPECT_TRUE(same_bits(childs.block, expected));
  });
}

// A context that is inside a call while the process forks belongs to the parent too.
TEST(Fork, InAParallelFor) {
  struct Forking {
    ga_context* ctx = nullptr;
    int forks = 0;
    static void run(void* user, int64_t count, ga_task task, void* data) {
      Forking& f = *static_cast<Forking*>(user);
      if (f.forks++ == 0) {
        in_child([&] {
          expect_all_refused(f.ctx);
          ga_context_destroy(f.ctx);
        });
      }
      for (int64_t i = 0; i < count; ++i) task(data, i);
    }
  } forking;
  ga_config c = config();
  c.parallel_for = Forking::run;
  c.parallel_for_user = &forking;
  Model model(c);
  forking.ctx = model.ctx;
  model.window(0);
  EXPECT_GT(forking.forks, 1);
}

// Matrix products go through oneDNN, which uses OpenMP's threads itself.
TEST(Fork, MatrixProducts) {
  has_onednn();  // whose products are used if it is there
  constexpr int64_t kRows = 512, kColumns = 512, kBatch = 64;
  const Layout layout({kRows * kColumns, kBatch * kRows, kBatch * kColumns});
  const Block data = even_gradients(layout, 3, 0);
  const auto train = [&] {
    Block w = parameters(layout, 1);
    Context ctx(with_threads(2));
    ga_optimizer muon = optimizer(GA_OPTIMIZER_MUON);
    ctx.param(ctx.group(muon), "w", w.data() + 1, ref::Shape{kRows, kColumns});
    EXPECT_OK(ga_micro_begin(ctx, 0, 1, nullptr));
    EXPECT_OK(ga_accumulate_matmul(ctx, 0, kBatch, data.data() + layout.offsets[1], kRows,
                                   GA_TRANSPOSE, data.data() + layout.offsets[2], kColumns,
                                   GA_NO_TRANSPOSE, GA_F32));
    EXPECT_OK(ga_micro_end(ctx));
    EXPECT_EQ(step(ctx).outcome, GA_STEP_APPLIED);
    for (const float x : w) EXPECT_TRUE(std::isfinite(x));
  };
  train();
  in_child(train);
  train();
}

// The parent's master weights do not count in the child, so the child may have its own for the same
// memory.
TEST(Fork, MasterWeightsOfTheParentAreNotThoseOfTheChild) {
  Tensor p(GA_BF16, 16), g(GA_BF16, 16, 1.0);
  const auto window = [&](ga_context* ctx) {
    accumulate(ctx, {&g});
    EXPECT_EQ(step(ctx).outcome, GA_STEP_APPLIED);
  };
  Context parent;
  add(parent, parent.group(plain_sgd()), p);
  window(parent);
  in_child([&] {
    Context child;
    add(child, child.group(plain_sgd()), p);
    window(child);
    EXPECT_EQ(p.get(0), -2);
    Context second;
    add(second, second.group(plain_sgd()), p);
    const void* const list[] = {g.data()};
    EXPECT_EQ(ga_accumulate(second, list, 1, 1, nullptr), GA_ERROR_INVALID_STATE);
  });
  window(parent);
  EXPECT_EQ(p.get(0), -2);
}

}  // namespace
}  // namespace ga::test
