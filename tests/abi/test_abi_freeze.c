/* SPDX-License-Identifier: Apache-2.0
 *
 * The public ABI written down a second time: sizes, offsets, enum values, types of functions. What
 * programs were compiled against must not move; additions go to the end.
 */
#include <gradaccum/gradaccum.h>
#include <stdio.h>

#if !defined(__LP64__)
int main(void) {
  printf("skipped: the numbers are those of 64-bit Linux\n");
  return 77;
}
#else

#define SIZE(type, size) _Static_assert(sizeof(type) == (size), #type)
#define FIELD(type, field, offset, size)                                                   \
  _Static_assert(offsetof(type, field) == (offset) && sizeof(((type*)0)->field) == (size), \
                 #type "." #field)
#define VALUE(constant, value) _Static_assert((constant) == (value), #constant)
#define FUNCTION(function, ...) \
  _Static_assert(_Generic(&function, __VA_ARGS__ : 1, default : 0), #function)

/* ---- Structs: size, then each field with its offset and its size ---- */

SIZE(ga_config, 72);
FIELD(ga_config, struct_size, 0, 8);
FIELD(ga_config, device, 8, 4);
FIELD(ga_config, num_threads, 12, 4);
FIELD(ga_config, accum_steps, 16, 8);
FIELD(ga_config, gradient_kind, 24, 4);
FIELD(ga_config, reduce, 28, 4);
FIELD(ga_config, missing, 32, 4);
FIELD(ga_config, nonfinite, 36, 4);
FIELD(ga_config, gradient_life, 40, 4);
FIELD(ga_config, reserved, 44, 4);
FIELD(ga_config, loss_scale, 48, 8);
FIELD(ga_config, parallel_for, 56, 8);
FIELD(ga_config, parallel_for_user, 64, 8);

SIZE(ga_memory, 40);
FIELD(ga_memory, struct_size, 0, 8);
FIELD(ga_memory, accumulators, 8, 8);
FIELD(ga_memory, optimizer_state, 16, 8);
FIELD(ga_memory, workspace, 24, 8);
FIELD(ga_memory, total, 32, 8);

SIZE(ga_accum_phase, 16);
FIELD(ga_accum_phase, from_step, 0, 8);
FIELD(ga_accum_phase, accum_steps, 8, 8);

SIZE(ga_optimizer, 88);
FIELD(ga_optimizer, struct_size, 0, 8);
FIELD(ga_optimizer, kind, 8, 4);
FIELD(ga_optimizer, flavor, 12, 4);
FIELD(ga_optimizer, lr, 16, 8);
FIELD(ga_optimizer, weight_decay, 24, 8);
FIELD(ga_optimizer, momentum, 32, 8);
FIELD(ga_optimizer, dampening, 40, 8);
FIELD(ga_optimizer, beta1, 48, 8);
FIELD(ga_optimizer, beta2, 56, 8);
FIELD(ga_optimizer, eps, 64, 8);
FIELD(ga_optimizer, nesterov, 72, 4);
FIELD(ga_optimizer, amsgrad, 76, 4);
FIELD(ga_optimizer, maximize, 80, 4);
FIELD(ga_optimizer, reserved, 84, 4);

SIZE(ga_schedule, 80);
FIELD(ga_schedule, struct_size, 0, 8);
FIELD(ga_schedule, kind, 8, 4);
FIELD(ga_schedule, reserved, 12, 4);
FIELD(ga_schedule, warmup_steps, 16, 8);
FIELD(ga_schedule, total_steps, 24, 8);
FIELD(ga_schedule, end_factor, 32, 8);
FIELD(ga_schedule, power, 40, 8);
FIELD(ga_schedule, gamma, 48, 8);
FIELD(ga_schedule, step_size, 56, 8);
FIELD(ga_schedule, table, 64, 8);
FIELD(ga_schedule, table_size, 72, 8);

SIZE(ga_clip, 32);
FIELD(ga_clip, struct_size, 0, 8);
FIELD(ga_clip, scope, 8, 4);
FIELD(ga_clip, flavor, 12, 4);
FIELD(ga_clip, max_norm, 16, 8);
FIELD(ga_clip, max_value, 24, 8);

SIZE(ga_param_options, 16);
FIELD(ga_param_options, struct_size, 0, 8);
FIELD(ga_param_options, gradient_dtype, 8, 4);
FIELD(ga_param_options, reserved, 12, 4);

SIZE(ga_flat_entry, 32);
FIELD(ga_flat_entry, name, 0, 8);
FIELD(ga_flat_entry, group, 8, 4);
FIELD(ga_flat_entry, rank, 12, 4);
FIELD(ga_flat_entry, shape, 16, 8);
FIELD(ga_flat_entry, offset, 24, 8);

SIZE(ga_accumulator, 64);
FIELD(ga_accumulator, struct_size, 0, 8);
FIELD(ga_accumulator, data, 8, 8);
FIELD(ga_accumulator, dtype, 16, 4);
FIELD(ga_accumulator, reserved, 20, 4);
FIELD(ga_accumulator, rows, 24, 8);
FIELD(ga_accumulator, columns, 32, 8);
FIELD(ga_accumulator, leading_dimension, 40, 8);
FIELD(ga_accumulator, alpha, 48, 8);
FIELD(ga_accumulator, beta, 56, 8);

SIZE(ga_window_info, 64);
FIELD(ga_window_info, struct_size, 0, 8);
FIELD(ga_window_info, state, 8, 4);
FIELD(ga_window_info, reserved, 12, 4);
FIELD(ga_window_info, micro_batches, 16, 8);
FIELD(ga_window_info, open_micro, 24, 8);
FIELD(ga_window_info, accum_steps, 32, 8);
FIELD(ga_window_info, weight, 40, 8);
FIELD(ga_window_info, windows, 48, 8);
FIELD(ga_window_info, steps, 56, 8);

SIZE(ga_step_result, 80);
FIELD(ga_step_result, struct_size, 0, 8);
FIELD(ga_step_result, outcome, 8, 4);
FIELD(ga_step_result, reserved, 12, 4);
FIELD(ga_step_result, windows, 16, 8);
FIELD(ga_step_result, steps, 24, 8);
FIELD(ga_step_result, micro_batches, 32, 8);
FIELD(ga_step_result, weight, 40, 8);
FIELD(ga_step_result, norm, 48, 8);
FIELD(ga_step_result, clip_factor, 56, 8);
FIELD(ga_step_result, lr, 64, 8);
FIELD(ga_step_result, loss_scale, 72, 8);

/* ---- Enums and constants ---- */

VALUE(GA_OK, 0);
VALUE(GA_ERROR_INVALID_ARGUMENT, 1);
VALUE(GA_ERROR_INVALID_STATE, 2);
VALUE(GA_ERROR_OUT_OF_MEMORY, 3);
VALUE(GA_ERROR_UNSUPPORTED, 4);
VALUE(GA_ERROR_NONFINITE, 5);
VALUE(GA_ERROR_FAULT, 6);
VALUE(GA_ERROR_INTERNAL, 7);
_Static_assert(sizeof(enum ga_status) == 4, "ga_status");

VALUE(GA_F32, 1);
VALUE(GA_F64, 2);
VALUE(GA_F16, 3);
VALUE(GA_BF16, 4);

VALUE(GA_DEVICE_CPU, 0);
VALUE(GA_DEVICE_CUDA, 1);

VALUE(GA_GRADIENT_MEAN, 0);
VALUE(GA_GRADIENT_SUM, 1);

VALUE(GA_REDUCE_MEAN, 0);
VALUE(GA_REDUCE_SUM, 1);

VALUE(GA_MISSING_SKIP, 0);
VALUE(GA_MISSING_ZERO, 1);

VALUE(GA_NONFINITE_SKIP_STEP, 0);
VALUE(GA_NONFINITE_FAIL, 1);

VALUE(GA_GRADIENTS_CONSUMED, 0);
VALUE(GA_GRADIENTS_LIVE, 1);

VALUE(GA_OPTIMIZER_SGD, 0);
VALUE(GA_OPTIMIZER_ADAM, 1);
VALUE(GA_OPTIMIZER_ADAMW, 2);
VALUE(GA_OPTIMIZER_EXTERNAL, 3);

VALUE(GA_FLAVOR_TORCH, 0);
VALUE(GA_FLAVOR_KERAS, 1);
VALUE(GA_FLAVOR_BERT, 2);

VALUE(GA_SCHEDULE_CONSTANT, 0);
VALUE(GA_SCHEDULE_LINEAR, 1);
VALUE(GA_SCHEDULE_COSINE, 2);
VALUE(GA_SCHEDULE_POLYNOMIAL, 3);
VALUE(GA_SCHEDULE_INVERSE_SQRT, 4);
VALUE(GA_SCHEDULE_STEP, 5);
VALUE(GA_SCHEDULE_EXPONENTIAL, 6);
VALUE(GA_SCHEDULE_TABLE, 7);
VALUE(GA_SCHEDULE_BERT, 8);

VALUE(GA_CLIP_NONE, 0);
VALUE(GA_CLIP_GLOBAL, 1);
VALUE(GA_CLIP_PER_TENSOR, 2);

VALUE(GA_NO_TRANSPOSE, 0);
VALUE(GA_TRANSPOSE, 1);

VALUE(GA_WINDOW_EMPTY, 0);
VALUE(GA_WINDOW_OPEN, 1);
VALUE(GA_WINDOW_FULL, 2);
VALUE(GA_WINDOW_INVALID, 3);

VALUE(GA_STEP_APPLIED, 0);
VALUE(GA_STEP_SKIPPED_EMPTY, 1);
VALUE(GA_STEP_SKIPPED_NONFINITE, 2);

SIZE(ga_group, 4);
SIZE(ga_param, 4);

/* ---- Functions ---- */

FUNCTION(ga_version, int32_t (*)(void));
FUNCTION(ga_build_info, const char* (*)(void));
FUNCTION(ga_status_name, const char* (*)(ga_status));
FUNCTION(ga_last_error, const char* (*)(void));
FUNCTION(ga_config_init, ga_status (*)(ga_config*, size_t));
FUNCTION(ga_context_create, ga_status (*)(const ga_config*, ga_context**));
FUNCTION(ga_context_destroy, void (*)(ga_context*));
FUNCTION(ga_device_count, ga_status (*)(int32_t, int32_t*));
FUNCTION(ga_synchronize, ga_status (*)(ga_context*));
FUNCTION(ga_context_memory, ga_status (*)(const ga_context*, ga_memory*));
FUNCTION(ga_context_set_accum_steps, ga_status (*)(ga_context*, int64_t));
FUNCTION(ga_context_set_accum_schedule, ga_status (*)(ga_context*, const ga_accum_phase*, size_t));
FUNCTION(ga_optimizer_init, ga_status (*)(ga_optimizer*, size_t, int32_t, int32_t));
FUNCTION(ga_group_add, ga_status (*)(ga_context*, const ga_optimizer*, ga_group*));
FUNCTION(ga_group_set_lr, ga_status (*)(ga_context*, ga_group, double));
FUNCTION(ga_group_set_weight_decay, ga_status (*)(ga_context*, ga_group, double));
FUNCTION(ga_schedule_init, ga_status (*)(ga_schedule*, size_t, int32_t));
FUNCTION(ga_group_set_schedule, ga_status (*)(ga_context*, ga_group, const ga_schedule*));
FUNCTION(ga_group_lr, ga_status (*)(const ga_context*, ga_group, double*));
FUNCTION(ga_clip_init, ga_status (*)(ga_clip*, size_t));
FUNCTION(ga_context_set_clip, ga_status (*)(ga_context*, const ga_clip*));
FUNCTION(ga_group_set_clip, ga_status (*)(ga_context*, ga_group, const ga_clip*));
FUNCTION(ga_param_add, ga_status (*)(ga_context*, ga_group, const char*, void*, int32_t, int32_t,
                                     const int64_t*, const ga_param_options*, ga_param*));
FUNCTION(ga_params_add_flat, ga_status (*)(ga_context*, void*, int32_t, const ga_flat_entry*,
                                           size_t, const ga_param_options*, ga_param*));
FUNCTION(ga_param_bind, ga_status (*)(ga_context*, ga_param, void*));
FUNCTION(ga_param_set_frozen, ga_status (*)(ga_context*, ga_param, int32_t));
FUNCTION(ga_accumulate,
         ga_status (*)(ga_context*, const void* const*, size_t, double, const double*));
FUNCTION(ga_micro_begin, ga_status (*)(ga_context*, int64_t, double, const double*));
FUNCTION(ga_accumulate_part, ga_status (*)(ga_context*, ga_param, const void*));
FUNCTION(ga_accumulate_matmul, ga_status (*)(ga_context*, ga_param, int64_t, const void*, int64_t,
                                             int32_t, const void*, int64_t, int32_t, int32_t));
FUNCTION(ga_accumulator_acquire, ga_status (*)(ga_context*, ga_param, ga_accumulator*));
FUNCTION(ga_accumulator_release, ga_status (*)(ga_context*, ga_param));
FUNCTION(ga_micro_end, ga_status (*)(ga_context*));
FUNCTION(ga_window, ga_status (*)(const ga_context*, ga_window_info*));
FUNCTION(ga_step, ga_status (*)(ga_context*, ga_step_result*));
FUNCTION(ga_discard, ga_status (*)(ga_context*));
FUNCTION(ga_gradient, ga_status (*)(ga_context*, ga_param, const void**, int32_t*));

/* Callback types. */
_Static_assert(_Generic((ga_task)0, void (*)(void*, int64_t) : 1, default : 0), "ga_task");
_Static_assert(_Generic((ga_parallel_for)0, void (*)(void*, int64_t, ga_task, void*) : 1,
                        default : 0),
               "ga_parallel_for");

/* The rest is decided when this file is compiled: only the version is left to ask. */
int main(void) {
  const int32_t version = 10000 * GA_VERSION_MAJOR + 100 * GA_VERSION_MINOR + GA_VERSION_PATCH;
  if (ga_version() != version) {
    printf("ga_version() is %d, the header says %d\n", (int)ga_version(), (int)version);
    return 1;
  }
  return 0;
}
#endif
