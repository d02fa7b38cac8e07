/* SPDX-License-Identifier: Apache-2.0
 *
 * The header as a C program sees it: every public function is called here at least once, with
 * numbers that are easy to follow by hand. */
#include <float.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "gradaccum/gradaccum.h"

static int failures = 0;

static void check(int right, const char* what, int line) {
  if (right) return;
  ++failures;
  fprintf(stderr, "test_api.c:%d: %s\n  last error: %s\n", line, what, ga_last_error());
}

#define CHECK(condition) check((condition) != 0, #condition, __LINE__)
#define OK(call) CHECK((call) == GA_OK)
#define FAILS(call, status) CHECK((call) == (status))
#define NEAR(a, b) CHECK(fabs((double)(a) - (double)(b)) <= 4 * FLT_EPSILON * fabs((double)(b)))

static void serial(void* user, int64_t count, ga_task task, void* data) {
  int64_t i;
  ++*(int*)user;
  for (i = 0; i < count; ++i) task(data, i);
}

static void versions_and_errors(void) {
  int32_t devices = -1;
  CHECK(ga_version() == 10000 * GA_VERSION_MAJOR + 100 * GA_VERSION_MINOR + GA_VERSION_PATCH);
  CHECK(strstr(ga_build_info(), "gradaccum") != NULL);
  CHECK(strchr(ga_build_info(), '\n') == NULL);
  CHECK(strcmp(ga_status_name(GA_ERROR_FAULT), "GA_ERROR_FAULT") == 0);
  CHECK(ga_last_error()[0] == '\0');
  CHECK(ga_synchronize(NULL) == GA_ERROR_INVALID_ARGUMENT);
  CHECK(ga_last_error()[0] != '\0');
  OK(ga_device_count(GA_DEVICE_CPU, &devices));
  CHECK(devices == 1);
}

static void build(void) {
  ga_build parts;
  OK(ga_build_init(&parts, sizeof parts));
  OK(ga_build_describe(&parts));
  CHECK(parts.version == GA_VERSION && parts.compiler[0] != '\0');
}

/* Two parameters in two groups, with all that may change between windows. */
static void changes(void) {
  float w[2] = {1, 1}, dw[2] = {1, 1}, buffer[2] = {4, 4};
  const void* list[2];
  int64_t two = 2, three = 3, one = 1, steps = -1;
  int32_t count = 0;
  double lr = 0;
  ga_context* ctx = NULL;
  ga_optimizer sgd;
  ga_ema ema;
  ga_state_info state;
  list[0] = dw, list[1] = NULL;
  OK(ga_context_create(NULL, &ctx));
  OK(ga_optimizer_init(&sgd, sizeof sgd, GA_OPTIMIZER_SGD, GA_FLAVOR_TORCH));
  sgd.lr = 1, sgd.momentum = 0.5;
  OK(ga_group_add(ctx, &sgd, NULL));
  OK(ga_ema_init(&ema, sizeof ema));
  ema.decay = 0.5;
  OK(ga_context_set_ema(ctx, &ema));
  OK(ga_param_add(ctx, 0, "w", w, GA_F32, 1, &two, NULL, NULL));
  OK(ga_param_add(ctx, 0, "gone", buffer, GA_F32, 1, &two, NULL, NULL));
  OK(ga_param_remove(ctx, 1));
  OK(ga_prepare(ctx));
  OK(ga_group_set_frozen(ctx, 0, 1));
  OK(ga_group_set_frozen(ctx, 0, 0));
  OK(ga_param_set_lr_scale(ctx, 0, 0.5));
  OK(ga_param_set_weight_decay_scale(ctx, 0, 0));
  OK(ga_param_set_part(ctx, 0, &three, &one, 1));
  sgd.momentum = 0.25;
  OK(ga_group_set_optimizer(ctx, 0, &sgd));
  OK(ga_state_count(ctx, 0, &count));
  CHECK(count == 3); /* momentum_buffer, step, ema */
  OK(ga_state_info_init(&state, sizeof state));
  OK(ga_state_describe(ctx, 0, 0, &state));
  CHECK(strcmp(state.name, "momentum_buffer") == 0 && state.dtype == GA_F32 && state.count == 2);
  OK(ga_state_set(ctx, 0, "momentum_buffer", buffer, GA_F32, 2));
  OK(ga_micro_begin(ctx, -1, 1, NULL));
  OK(ga_micro_abort(ctx));
  OK(ga_accumulate(ctx, list, 2, 1, NULL));
  OK(ga_step(ctx, NULL));
  CHECK(w[0] == 0); /* 1 - 0.5 * (0.25 * 4 + 1) */
  OK(ga_group_last_lr(ctx, 0, &lr));
  CHECK(lr == 1);
  OK(ga_accumulate(ctx, list, 2, 1, NULL));
  OK(ga_step(ctx, NULL));
  CHECK(w[0] == -0.75); /* - 0.5 * (0.25 * 2 + 1) */
  OK(ga_ema_swap(ctx, 1));
  CHECK(w[0] == -0.375); /* of 0 and -0.75 */
  OK(ga_ema_swap(ctx, 0));
  OK(ga_state_get(ctx, 0, "step", &steps, GA_I64, 1));
  CHECK(w[0] == -0.75 && steps == 3);
  OK(ga_state_reset(ctx, 0));
  OK(ga_context_set_steps(ctx, 9));
  OK(ga_state_get(ctx, 0, "momentum_buffer", buffer, GA_F32, 2));
  CHECK(buffer[1] == 0);
  ga_context_destroy(ctx);
}

/* Where a program stores a state itself. */
struct store {
  char bytes[16384];
  int64_t size;
  int32_t result;
};

static int32_t write_store(void* user, int64_t offset, const void* data, size_t size) {
  struct store* const s = user;
  if (s->result != 0) return s->result;
  if ((size_t)offset + size > sizeof s->bytes) return -1;
  memcpy(s->bytes + offset, data, size);
  if (offset + (int64_t)size > s->size) s->size = offset + (int64_t)size;
  return 0;
}

static int32_t read_store(void* user, int64_t offset, void* data, size_t size) {
  const struct store* const s = user;
  memcpy(data, s->bytes + offset, size);
  return s->result;
}

static int32_t count_progress(void* user, int64_t done, int64_t total) {
  int* const calls = user;
  if (done > total) return 1;
  ++*calls;
  return 0;
}

static ga_context* with_one_parameter(float* w) {
  const int64_t two = 2;
  ga_context* ctx = NULL;
  ga_optimizer sgd;
  OK(ga_context_create(NULL, &ctx));
  OK(ga_optimizer_init(&sgd, sizeof sgd, GA_OPTIMIZER_SGD, GA_FLAVOR_TORCH));
  sgd.lr = 1, sgd.momentum = 0.5;
  OK(ga_group_add(ctx, &sgd, NULL));
  OK(ga_param_add(ctx, 0, "w", w, GA_F32, 1, &two, NULL, NULL));
  return ctx;
}

/* A window that is saved after its first micro-batch, in each of the four ways. */
static void state_on_disk(void) {
  static struct store store;
  static char bytes[16384];
  const char* const path = "test_api_state.safetensors";
  float w[2] = {1, 2}, w2[2];
  float dw[2] = {4, -4};
  const void* list[1];
  ga_state_options options;
  char note[16];
  size_t size = 0, note_size = 0;
  int calls = 0, way;
  ga_context *ctx = with_one_parameter(w), *other;
  list[0] = dw;
  OK(ga_state_options_init(&options, sizeof options));
  CHECK(options.struct_size == sizeof options && options.parts == GA_STATE_ALL);
  options.note = "epoch 3";
  options.progress = count_progress;
  options.progress_user = &calls;
  OK(ga_accumulate(ctx, list, 1, 1, NULL));
  OK(ga_step(ctx, NULL));
  OK(ga_accumulate(ctx, list, 1, 1, NULL));

  OK(ga_save(ctx, path, &options));
  CHECK(calls > 0);
  OK(ga_state_note(path, NULL, 0, &note_size));
  CHECK(note_size == sizeof "epoch 3");
  OK(ga_state_note(path, note, sizeof note, &note_size));
  CHECK(strcmp(note, "epoch 3") == 0);
  OK(ga_save_to_memory(ctx, NULL, NULL, 0, &size));
  CHECK(size > 0 && size <= sizeof bytes);
  FAILS(ga_save_to_memory(ctx, NULL, bytes, size - 1, &size), GA_ERROR_INVALID_ARGUMENT);
  OK(ga_save_to_memory(ctx, NULL, bytes, sizeof bytes, &size));
  OK(ga_state_write(ctx, write_store, &store, NULL));
  CHECK((size_t)store.size == size && memcmp(store.bytes, bytes, size) == 0);

  dw[0] = 8;
  OK(ga_accumulate(ctx, list, 1, 1, NULL));
  OK(ga_step(ctx, NULL));
  for (way = 0; way < 3; ++way) {
    w2[0] = w2[1] = 77;
    other = with_one_parameter(w2);
    OK(way == 0   ? ga_load(other, path, NULL)
       : way == 1 ? ga_load_from_memory(other, bytes, size, NULL)
                  : ga_state_read(other, read_store, &store, store.size, NULL));
    CHECK(w2[0] == -3); /* 1 - 4 */
    OK(ga_accumulate(other, list, 1, 1, NULL));
    OK(ga_step(other, NULL));
    CHECK(w2[0] == w[0] && w2[1] == w[1]);
    ga_context_destroy(other);
  }
  store.result = 5;
  FAILS(ga_state_write(ctx, write_store, &store, NULL), GA_ERROR_IO);
  CHECK(remove(path) == 0);
  ga_context_destroy(ctx);
}

/* One layer y = x W^T with a bias, trained for two windows of two micro-batches. */
static void life_cycle(void) {
  float w[6] = {1, 2, 3, 4, 5, 6}, bias[2] = {0, 0}, moved[2];
  float dw[6] = {1, 1, 1, 1, 1, 1}, db[2] = {2, 4};
  const void* whole[2];
  int64_t shape[2] = {2, 3}, two = 2;
  ga_config config;
  ga_context* ctx = NULL;
  ga_optimizer sgd;
  ga_schedule warm;
  ga_clip clip;
  ga_memory memory;
  ga_window_info window;
  ga_kept_info kept;
  ga_step_result result;
  ga_accumulator accumulator;
  ga_micro_options micro;
  ga_param_info info;
  int32_t count = 0;
  size_t slots = 0;
  ga_group group = -1;
  ga_param param = -1;
  const int64_t from_step = 0, one_step = 1;
  double rate = 0;
  int loops = 0;

  OK(ga_config_init(&config, sizeof config));
  CHECK(config.struct_size == sizeof config && config.loss_scale == 1);
  config.parallel_for = serial;
  config.parallel_for_user = &loops;
  OK(ga_context_create(&config, &ctx));
  OK(ga_synchronize(ctx));
  CHECK(ga_context_set_stream(ctx, NULL) == GA_ERROR_UNSUPPORTED);

  OK(ga_optimizer_init(&sgd, sizeof sgd, GA_OPTIMIZER_SGD, GA_FLAVOR_TORCH));
  sgd.lr = 1;
  OK(ga_group_add(ctx, &sgd, &group));
  CHECK(group == 0);
  OK(ga_param_add(ctx, group, "fc.weight", w, GA_F32, 2, shape, NULL, &param));
  CHECK(param == 0);
  OK(ga_param_add(ctx, group, "fc.bias", bias, GA_F32, 1, &two, NULL, &param));
  CHECK(param == 1);

  OK(ga_group_count(ctx, &count));
  CHECK(count == 1);
  OK(ga_group_optimizer(ctx, group, &sgd));
  CHECK(sgd.kind == GA_OPTIMIZER_SGD && sgd.lr == 1);
  OK(ga_param_count(ctx, &count));
  CHECK(count == 2);
  OK(ga_param_find(ctx, "fc.weight", &param));
  CHECK(param == 0);
  OK(ga_param_find(ctx, "fc.bias", &param));
  CHECK(param == 1);
  OK(ga_param_info_init(&info, sizeof info));
  OK(ga_param_describe(ctx, 0, &info));
  CHECK(strcmp(info.name, "fc.weight") == 0 && info.rank == 2 && info.shape[1] == 3);
  CHECK(info.data == w && info.count == 6 && info.group == group && info.dtype == GA_F32);
  OK(ga_slot_count(ctx, &slots));
  CHECK(slots == 2);
  OK(ga_param_slot(ctx, param, &slots));
  CHECK(slots == 1);
  OK(ga_memory_init(&memory, sizeof memory));
  OK(ga_context_memory(ctx, &memory));
  CHECK(memory.accumulators >= 8 * 4 && memory.optimizer_state == 0);
  CHECK(memory.total == memory.accumulators + memory.optimizer_state + memory.workspace);
  CHECK(memory.masters == 0 && memory.averages == 0 && memory.rows == 0);

  /* A whole micro-batch of 1 sample, then one by parts of 3. */
  OK(ga_context_set_accum_steps(ctx, 2));
  whole[0] = dw;
  whole[1] = db;
  OK(ga_accumulate(ctx, whole, 2, 1, NULL));
  OK(ga_micro_options_init(&micro, sizeof micro));
  CHECK(micro.struct_size == sizeof micro && micro.loss_scale == 0 && micro.flags == 0);
  micro.loss_scale = 4;
  OK(ga_micro_begin(ctx, -1, 3, &micro));
  OK(ga_accumulate_part(ctx, 1, db));
  OK(ga_accumulator_init(&accumulator, sizeof accumulator));
  OK(ga_accumulator_acquire(ctx, 0, &accumulator));
  CHECK(accumulator.rows == 2 && accumulator.columns == 3 && accumulator.dtype == GA_F32);
  CHECK(accumulator.alpha == 0.75 && accumulator.beta == 1);
  {
    int64_t r, c;
    float* a = (float*)accumulator.data;
    for (r = 0; r < 2; ++r)
      for (c = 0; c < 3; ++c) a[r * accumulator.leading_dimension + c] += 0.75f * 4;
  }
  OK(ga_accumulator_release(ctx, 0));
  OK(ga_micro_end(ctx));
  OK(ga_kept_info_init(&kept, sizeof kept));
  OK(ga_gradients_kept(ctx, 0, &kept));
  CHECK(kept.latest > 0 && kept.oldest == kept.latest + 1 && kept.queued == kept.oldest);
  CHECK(kept.until_micro_end == 0);
  OK(ga_window_info_init(&window, sizeof window));
  OK(ga_window(ctx, &window));
  CHECK(window.state == GA_WINDOW_FULL && window.micro_batches == 2 && window.weight == 4);
  CHECK(ga_accumulate(ctx, whole, 2, 1, NULL) == GA_ERROR_WINDOW_FULL);
  OK(ga_step_result_init(&result, sizeof result));
  OK(ga_step(ctx, &result));
  CHECK(result.outcome == GA_STEP_APPLIED && result.steps == 1 && result.weight == 4);
  {
    ga_step_result again, last;
    again.struct_size = last.struct_size = sizeof again;
    OK(ga_step_result_get(ctx, result.windows, 1, &again));
    OK(ga_step_result_get(ctx, 0, 0, &last));
    CHECK(memcmp(&result, &again, sizeof result) == 0 &&
          memcmp(&result, &last, sizeof result) == 0);
    CHECK(ga_step_result_get(ctx, 2, 1, &again) == GA_ERROR_INVALID_ARGUMENT);
  }
  CHECK(w[0] == 0); /* 1 - (1 * 1 + 3 * 4 / 4) / 4 */
  NEAR(w[5], 5);
  NEAR(bias[1], -(1 * 4 + 3 * 4 / 4.0) / 4);

  /* A schedule, a clip, a schedule of K, another address for the bias, a frozen weight. */
  OK(ga_schedule_init(&warm, sizeof warm, GA_SCHEDULE_CONSTANT));
  warm.warmup_steps = 4;
  OK(ga_group_set_schedule(ctx, group, &warm));
  OK(ga_group_lr(ctx, group, &rate));
  NEAR(rate, 0.5); /* the second of four steps of warm-up */
  OK(ga_group_set_schedule(ctx, group, NULL));
  OK(ga_group_set_lr(ctx, group, 2));
  OK(ga_group_set_weight_decay(ctx, group, 0));
  OK(ga_clip_init(&clip, sizeof clip));
  clip.scope = GA_CLIP_GLOBAL;
  clip.flavor = GA_FLAVOR_KERAS;
  clip.max_norm = 2.5;
  OK(ga_context_set_clip(ctx, &clip));
  OK(ga_group_set_clip(ctx, group, &clip));
  OK(ga_group_set_clip(ctx, group, NULL));
  clip.max_norm = 0;
  OK(ga_context_clip(ctx, &clip));
  CHECK(clip.max_norm == 2.5);
  OK(ga_group_clip(ctx, group, &clip));
  CHECK(clip.max_norm == 2.5 && clip.flavor == GA_FLAVOR_KERAS);
  OK(ga_context_set_accum_schedule(ctx, &from_step, &one_step, 1));
  moved[0] = moved[1] = 0;
  OK(ga_param_bind(ctx, 1, moved));
  OK(ga_param_set_frozen(ctx, 0, 1));
  db[0] = 3;
  OK(ga_accumulate(ctx, whole, 2, 1, NULL));
  OK(ga_step(ctx, &result));
  CHECK(result.norm == 5 && result.clip_factor == 0.5 && result.lr == 2);
  CHECK(moved[0] == -3 && moved[1] == -4);
  NEAR(w[5], 5);

  OK(ga_accumulate(ctx, whole, 2, 1, NULL));
  OK(ga_discard(ctx));
  OK(ga_step(ctx, &result));
  CHECK(result.outcome == GA_STEP_SKIPPED_EMPTY && moved[0] == -3);
  ga_context_destroy(ctx);
  ga_context_destroy(NULL);
}

/* Parameters in one block, an optimizer of the program's own, and a matrix product if there is an
   engine for it. */
static void flat_external_matmul(void) {
  float block[10] = {0};
  float g[10] = {1, 2, 3, 4, 5, 6, 0, 0, 0, 8};
  const float dy[4] = {1, 2, 3, 4}, x[6] = {1, 0, 1, 0, 1, 0}; /* batch 2, out 2, in 3 */
  const float product[6] = {1, 3, 1, 2, 4, 2};                 /* dy^T x */
  const void *whole[1], *data = NULL;
  int64_t shape[2] = {2, 3};
  ga_dtype dtype = 0;
  int64_t count = 0;
  ga_flat_entry entries[2];
  ga_context* ctx = NULL;
  ga_optimizer own;
  ga_param first = -1;
  ga_status status;
  int i;

  OK(ga_context_create(NULL, &ctx));
  OK(ga_optimizer_init(&own, sizeof own, GA_OPTIMIZER_EXTERNAL, GA_FLAVOR_TORCH));
  OK(ga_group_add(ctx, &own, NULL));
  for (i = 0; i < 2; ++i) {
    OK(ga_flat_entry_init(&entries[i], sizeof entries[i]));
    CHECK(entries[i].group == -1);
    entries[i].group = 0;
  }
  entries[0].name = "weight";
  entries[0].rank = 2;
  entries[0].shape = shape;
  entries[1].name = "scalar";
  entries[1].offset = 9;
  OK(ga_params_add_flat(ctx, block, GA_F32, entries, 2, NULL, &first));
  CHECK(first == 0);
  whole[0] = g;
  OK(ga_accumulate(ctx, whole, 1, 7, NULL));
  OK(ga_step(ctx, NULL));
  OK(ga_gradient(ctx, 1, &data, &dtype, &count));
  CHECK(dtype == GA_F32 && count == 1);
  NEAR(*(const float*)data, 8);
  CHECK(block[9] == 0);

  OK(ga_micro_begin(ctx, 0, 2, NULL));
  status = ga_accumulate_matmul(ctx, 0, 2, dy, 2, GA_TRANSPOSE, x, 3, GA_NO_TRANSPOSE, GA_F32);
  OK(ga_micro_end(ctx));
  if (status == GA_OK) {
    OK(ga_step(ctx, NULL));
    OK(ga_gradient(ctx, 0, &data, NULL, NULL));
    for (i = 0; i < 6; ++i) NEAR(((const float*)data)[i], product[i]);
  } else {
    CHECK(status == GA_ERROR_UNSUPPORTED);
    CHECK(ga_last_error()[0] != '\0');
    printf("no matrix engine here: %s\n", ga_last_error());
  }
  ga_context_destroy(ctx);
}

/* A bf16 parameter with master weights, a table of rows, a dynamic loss scale, and an EMA. */
static void precision_rows_averages(void) {
  uint16_t half[2] = {0x3f80, 0x3f80}; /* 1, 1 in bf16 */
  float table[6] = {0, 0, 0, 0, 0, 0}, average[6], values[4] = {2, 4, 6, 8};
  const uint16_t small[2] = {0x3b80, 0x3f80}, huge[2] = {0x7f80, 0}; /* 2^-8, 1; infinity */
  const int64_t two = 2, shape[2] = {3, 2};
  const int32_t indices[2] = {2, 2};
  const void* device = table;
  double scale = 0;
  ga_context* ctx = NULL;
  ga_optimizer sgd;
  ga_loss_scaler scaler;
  ga_ema ema;
  ga_param_options options;
  ga_memory memory;
  ga_step_result result;
  int i;

  OK(ga_context_create(NULL, &ctx));
  OK(ga_optimizer_init(&sgd, sizeof sgd, GA_OPTIMIZER_SGD, GA_FLAVOR_TORCH));
  sgd.lr = 1;
  OK(ga_group_add(ctx, &sgd, NULL));
  memset(&options, 0, sizeof options);
  OK(ga_param_options_init(&options, sizeof options));
  OK(ga_param_add(ctx, 0, "half", half, GA_BF16, 1, &two, &options, NULL));
  options.rows = GA_ROWS_LAZY;
  OK(ga_param_add(ctx, 0, "table", table, GA_F32, 2, shape, &options, NULL));
  OK(ga_ema_init(&ema, sizeof ema));
  ema.decay = 0.5;
  OK(ga_context_set_ema(ctx, &ema));
  OK(ga_loss_scaler_init(&scaler, sizeof scaler));
  scaler.initial_scale = 2;
  scaler.growth_interval = 2;
  OK(ga_context_set_loss_scaler(ctx, &scaler));
  OK(ga_memory_init(&memory, sizeof memory));
  OK(ga_context_memory(ctx, &memory));
  CHECK(memory.masters >= 8 && memory.averages >= 8 * 4 && memory.rows >= 3 * 4);

  OK(ga_step_result_init(&result, sizeof result));
  for (i = 0; i < 2; ++i) {
    OK(ga_loss_scale(ctx, &scale, &device));
    CHECK(scale == 2 && device == NULL);
    OK(ga_micro_begin(ctx, 0, 1, NULL));
    OK(ga_accumulate_part(ctx, 0, small));
    OK(ga_accumulate_rows(ctx, 1, indices, GA_I32, 2, values));
    OK(ga_micro_end(ctx));
    OK(ga_step(ctx, &result));
    CHECK(result.outcome == GA_STEP_APPLIED && result.loss_scale == 2 && result.skipped == 0);
  }
  CHECK(half[0] == 0x3f7f && half[1] == 0);                  /* 1 - 2 * 2^-9; 1 - 2 * 0.5 */
  CHECK(table[3] == 0 && table[4] == -8 && table[5] == -12); /* 2 * -(2 + 6) / 2 and so on */
  OK(ga_ema_copy_to(ctx, 1, average, GA_F32));
  CHECK(average[0] == 0 && average[4] == -6 && average[5] == -9);

  /* The scale grew after two steps; an infinity halves it again and moves nothing. */
  OK(ga_loss_scale(ctx, &scale, NULL));
  CHECK(scale == 4);
  OK(ga_micro_begin(ctx, 0, 1, NULL));
  OK(ga_accumulate_part(ctx, 0, huge));
  OK(ga_micro_end(ctx));
  OK(ga_step(ctx, &result));
  CHECK(result.outcome == GA_STEP_SKIPPED_NONFINITE && result.skipped == 1 && result.dropped == 0);
  OK(ga_loss_scale(ctx, &scale, NULL));
  CHECK(scale == 2 && half[0] == 0x3f7f);

  /* The program writes the parameter, and the master weights must follow. */
  half[0] = 0x4000;
  OK(ga_param_changed(ctx, 0));
  OK(ga_micro_begin(ctx, 0, 1, NULL));
  OK(ga_accumulate_part(ctx, 0, small));
  OK(ga_micro_end(ctx));
  OK(ga_step(ctx, &result));
  CHECK(half[0] == 0x4000); /* 2 - 2^-9 to nearest */
  OK(ga_context_set_loss_scaler(ctx, NULL));
  OK(ga_loss_scale(ctx, &scale, NULL));
  CHECK(scale == 1);
  ga_context_destroy(ctx);
}

/* One channel of x = 0, 2 | 4, 6 in two micro-batches: mean 3, variance 5. */
static void batch_normalisation(void) {
  const float x[4] = {0, 2, 4, 6}, dy[4] = {1, 0, 0, 1}, mean32[1] = {3}, squares[1] = {20};
  float gamma[1] = {2}, beta[1] = {1}, y[4], dx[4];
  double mean[1], variance[1];
  const double one[1] = {1};
  int64_t count = 0, steps = -1, k;
  int64_t shape[1] = {1};
  ga_context* ctx = NULL;
  ga_optimizer sgd;
  ga_bn_options options;
  ga_bn window = -1, micro = -1;
  ga_bn_info info;
  int32_t layers = 0;
  ga_memory memory;
  const double r = 1 / sqrt(5.0); /* eps is 1e-12 below */

  OK(ga_context_create(NULL, &ctx));
  OK(ga_optimizer_init(&sgd, sizeof sgd, GA_OPTIMIZER_SGD, GA_FLAVOR_TORCH));
  sgd.lr = 1;
  OK(ga_group_add(ctx, &sgd, NULL));
  OK(ga_param_add(ctx, 0, "gamma", gamma, GA_F32, 1, shape, NULL, NULL));
  OK(ga_param_add(ctx, 0, "beta", beta, GA_F32, 1, shape, NULL, NULL));
  OK(ga_bn_options_init(&options, sizeof options, GA_FLAVOR_KERAS));
  CHECK(options.layout == GA_BN_CHANNELS_LAST && options.biased == 1);
  OK(ga_bn_options_init(&options, sizeof options, GA_FLAVOR_TORCH));
  options.mode = GA_BN_WINDOW;
  options.eps = 1e-12;
  OK(ga_bn_add(ctx, "window", 1, 0, 1, &options, &window));
  OK(ga_bn_add(ctx, "micro", 1, -1, -1, NULL, &micro));
  OK(ga_bn_count(ctx, &layers));
  CHECK(layers == 2);
  OK(ga_bn_find(ctx, "window", &window));
  OK(ga_bn_info_init(&info, sizeof info));
  OK(ga_bn_describe(ctx, window, &info));
  CHECK(strcmp(info.name, "window") == 0 && info.channels == 1 && info.beta == 1);
  CHECK(info.mode == GA_BN_WINDOW && info.eps == 1e-12);
  OK(ga_memory_init(&memory, sizeof memory));
  OK(ga_context_memory(ctx, &memory));
  CHECK(memory.batch_norm == 2 * 120);

  for (k = 0; k < 2; ++k) OK(ga_bn_accumulate(ctx, window, x + 2 * k, 2, 1));
  OK(ga_bn_finalize(ctx, window));
  OK(ga_bn_statistics(ctx, window, mean, variance, GA_F64, &count));
  CHECK(mean[0] == 3 && variance[0] == 5 && count == 4);
  for (k = 0; k < 2; ++k) OK(ga_bn_forward(ctx, window, x + 2 * k, 2, 1, y + 2 * k));
  NEAR(y[0], 1 - 6 * r);
  NEAR(y[3], 1 + 6 * r);
  for (k = 0; k < 2; ++k) {
    OK(ga_micro_begin(ctx, k, 1, NULL));
    OK(ga_bn_backward_accumulate(ctx, window, x + 2 * k, dy + 2 * k, 2, 1));
    OK(ga_micro_end(ctx));
  }
  OK(ga_bn_backward_finalize(ctx, window));
  for (k = 0; k < 2; ++k) {
    OK(ga_micro_begin(ctx, k, 1, NULL));
    OK(ga_bn_backward(ctx, window, x + 2 * k, dy + 2 * k, 2, 1, dx + 2 * k));
    OK(ga_micro_end(ctx));
  }
  /* The sums of dy and of dy times the normalised x are 2 and 0, so dx = 2 r (dy - 1 / 2). */
  NEAR(dx[0], r);
  NEAR(dx[1], -r);
  OK(ga_step(ctx, NULL));
  CHECK(beta[0] == 0); /* 1 - 2 / 2 */
  CHECK(fabs((double)gamma[0] - 2) < 1e-6);
  OK(ga_bn_running(ctx, window, mean, variance, GA_F64, &steps));
  NEAR(mean[0], 0.3);
  NEAR(variance[0], 0.9 + 0.1 * 20 / 3);
  CHECK(steps == 1);

  OK(ga_bn_accumulate_stats(ctx, micro, 4, mean32, squares, GA_BN_M2, GA_F32));
  OK(ga_discard(ctx));
  OK(ga_bn_running_set(ctx, micro, one, one, GA_F64, 7));
  OK(ga_bn_infer(ctx, micro, x, 4, 1, y));
  NEAR(y[2], 3 / sqrt(1 + 1e-5));
  OK(ga_bn_set_frozen(ctx, micro, 1));
  OK(ga_bn_forward(ctx, micro, x, 4, 1, y));
  NEAR(y[3], 5 / sqrt(1 + 1e-5));
  CHECK(ga_bn_finalize(ctx, 9) == GA_ERROR_INVALID_ARGUMENT);
  ga_context_destroy(ctx);
}

/* The only rank of a communicator, which steps as a context alone does. */
static void several_ranks(void) {
  ga_context* ctx = NULL;
  ga_comm* comm = NULL;
  ga_comm_config config;
  ga_comm_options options;
  ga_optimizer sgd;
  ga_step_result result;
  unsigned char id[GA_COMM_ID_SIZE];
  int32_t rank = -1, ranks = -1;
  float p[2] = {1, 2}, g[2] = {1, 1};
  const ga_param first = 0;
  const void* gradients[1];
  const int64_t two = 2;

  gradients[0] = g;
  OK(ga_comm_unique_id(GA_COMM_LOCAL, id, sizeof id));
  OK(ga_comm_config_init(&config, sizeof config, GA_COMM_LOCAL));
  config.ranks = 1;
  config.id = id;
  OK(ga_comm_create(&config, &comm));
  OK(ga_comm_size(comm, &rank, &ranks));
  CHECK(rank == 0 && ranks == 1);
  OK(ga_context_create(NULL, &ctx));
  OK(ga_optimizer_init(&sgd, sizeof sgd, GA_OPTIMIZER_SGD, GA_FLAVOR_TORCH));
  sgd.lr = 1;
  OK(ga_group_add(ctx, &sgd, NULL));
  OK(ga_param_add(ctx, 0, "p", p, GA_F32, 1, &two, NULL, NULL));
  OK(ga_comm_options_init(&options, sizeof options));
  CHECK(options.shard == GA_SHARD_NONE && options.adder == GA_COMM_ADDER_AUTO);
  CHECK(options.overlap == 0);
  options.shard = GA_SHARD_OPTIMIZER;
  options.overlap = 1;
  OK(ga_context_set_comm(ctx, comm, &options));
  OK(ga_accumulate(ctx, gradients, 1, 1, NULL));
  OK(ga_params_ready(ctx, &first, 1));
  CHECK(ga_accumulate(ctx, gradients, 1, 1, NULL) == GA_ERROR_INVALID_STATE);
  OK(ga_step_result_init(&result, sizeof result));
  OK(ga_step(ctx, &result));
  CHECK(result.outcome == GA_STEP_APPLIED && p[0] == 0 && p[1] == 1);
  OK(ga_comm_abort(comm));
  CHECK(ga_step(ctx, NULL) == GA_ERROR_COMMUNICATION);
  ga_comm_destroy(comm); /* which the context still has */
  ga_comm_destroy(NULL);
  ga_context_destroy(ctx);
}

int main(void) {
  build();
  changes();
  versions_and_errors();
  several_ranks();
  state_on_disk();
  life_cycle();
  flat_external_matmul();
  precision_rows_averages();
  batch_normalisation();
  if (failures) fprintf(stderr, "%d checks failed\n", failures);
  return failures ? 1 : 0;
}
