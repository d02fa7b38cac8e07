/* SPDX-License-Identifier: Apache-2.0
 *
 * The public ABI written down a second time: sizes, offsets, values of constants, function types.
 * Nothing that programs have been compiled against may change; additions go to the end. Also checked
 * by the compiler alone for a 32-bit ABI (see CMakeLists.txt).
 */
#include <gradaccum/gradaccum.h>
#include <stddef.h>

/* A size or an offset on LP64, and where pointers and size_t have 32 bits and int64_t and double are
   aligned to 8 bytes: 32-bit Arm, WebAssembly, 32-bit Windows. */
#if defined(__LP64__) || defined(_WIN64)
#define PICK(lp64, ilp32) (lp64)
#else
#define PICK(lp64, ilp32) (ilp32)
#endif
#define SIZE(type, lp64, ilp32) _Static_assert(sizeof(type) == PICK(lp64, ilp32), #type)
#define FIELD(type, field, offset, size, offset32, size32)            \
  _Static_assert(offsetof(type, field) == PICK(offset, offset32) &&   \
                     sizeof(((type*)0)->field) == PICK(size, size32), \
                 #type "." #field)
#define VALUE(constant, value) _Static_assert((constant) == (value), #constant)
#define FUNCTION(function, ...) \
  _Static_assert(_Generic(&function, __VA_ARGS__ : 1, default : 0), #function)

/* ---- Structs: size, then each field with its offset and its size ---- */

SIZE(ga_optimizer, 296, 296);
FIELD(ga_optimizer, struct_size, 0, 8, 0, 4);
FIELD(ga_optimizer, kind, 8, 4, 4, 4);
FIELD(ga_optimizer, flavor, 12, 4, 8, 4);
FIELD(ga_optimizer, lr, 16, 8, 16, 8);
FIELD(ga_optimizer, weight_decay, 24, 8, 24, 8);
FIELD(ga_optimizer, momentum, 32, 8, 32, 8);
FIELD(ga_optimizer, dampening, 40, 8, 40, 8);
FIELD(ga_optimizer, beta1, 48, 8, 48, 8);
FIELD(ga_optimizer, beta2, 56, 8, 56, 8);
FIELD(ga_optimizer, eps, 64, 8, 64, 8);
FIELD(ga_optimizer, nesterov, 72, 4, 72, 4);
FIELD(ga_optimizer, amsgrad, 76, 4, 76, 4);
FIELD(ga_optimizer, maximize, 80, 4, 80, 4);
FIELD(ga_optimizer, state_dtype, 84, 4, 84, 4);
FIELD(ga_optimizer, rho, 88, 8, 88, 8);
FIELD(ga_optimizer, lr_decay, 96, 8, 96, 8);
FIELD(ga_optimizer, initial_accumulator, 104, 8, 104, 8);
FIELD(ga_optimizer, momentum_decay, 112, 8, 112, 8);
FIELD(ga_optimizer, trust_coefficient, 120, 8, 120, 8);
FIELD(ga_optimizer, max_grad_norm, 128, 8, 128, 8);
FIELD(ga_optimizer, eps2, 136, 8, 136, 8);
FIELD(ga_optimizer, beta2_decay, 144, 8, 144, 8);
FIELD(ga_optimizer, clip_threshold, 152, 8, 152, 8);
FIELD(ga_optimizer, ns_coefficients, 160, 24, 160, 24);
FIELD(ga_optimizer, ns_steps, 184, 4, 184, 4);
FIELD(ga_optimizer, adjust_lr, 188, 4, 188, 4);
FIELD(ga_optimizer, centered, 192, 4, 192, 4);
FIELD(ga_optimizer, decoupled, 196, 4, 196, 4);
FIELD(ga_optimizer, always_adapt, 200, 4, 200, 4);
FIELD(ga_optimizer, reserved, 204, 4, 204, 4);
FIELD(ga_optimizer, beta3, 208, 8, 208, 8);
FIELD(ga_optimizer, alpha, 216, 8, 216, 8);
FIELD(ga_optimizer, alpha_warmup, 224, 8, 224, 8);
FIELD(ga_optimizer, beta3_warmup, 232, 8, 232, 8);
FIELD(ga_optimizer, clip_exponent, 240, 8, 240, 8);
FIELD(ga_optimizer, ns_precision, 248, 4, 248, 4);
FIELD(ga_optimizer, reserved2, 252, 4, 252, 4);
FIELD(ga_optimizer, ns_table, 256, 8, 256, 4);
FIELD(ga_optimizer, ns_rows, 264, 4, 260, 4);
FIELD(ga_optimizer, ns_preset, 268, 4, 264, 4);
FIELD(ga_optimizer, cautious, 272, 4, 268, 4);
FIELD(ga_optimizer, equilibrate, 276, 4, 272, 4);
FIELD(ga_optimizer, average_power, 280, 8, 280, 8);
FIELD(ga_optimizer, average_lr_power, 288, 8, 288, 8);

SIZE(ga_config, 184, 144);
FIELD(ga_config, struct_size, 0, 8, 0, 4);
FIELD(ga_config, device, 8, 4, 4, 4);
FIELD(ga_config, num_threads, 12, 4, 8, 4);
FIELD(ga_config, accum_steps, 16, 8, 16, 8);
FIELD(ga_config, gradient_kind, 24, 4, 24, 4);
FIELD(ga_config, reduce, 28, 4, 28, 4);
FIELD(ga_config, missing, 32, 4, 32, 4);
FIELD(ga_config, nonfinite, 36, 4, 36, 4);
FIELD(ga_config, gradient_life, 40, 4, 40, 4);
FIELD(ga_config, accumulation, 44, 4, 44, 4);
FIELD(ga_config, loss_scale, 48, 8, 48, 8);
FIELD(ga_config, parallel_for, 56, 8, 56, 4);
FIELD(ga_config, parallel_for_user, 64, 8, 60, 4);
FIELD(ga_config, seed, 72, 8, 64, 8);
FIELD(ga_config, noise_scale, 80, 4, 72, 4);
FIELD(ga_config, measure_norm, 84, 4, 76, 4);
FIELD(ga_config, noise_smoothing, 88, 8, 80, 8);
FIELD(ga_config, device_ordinal, 96, 4, 88, 4);
FIELD(ga_config, reserved2, 100, 4, 92, 4);
FIELD(ga_config, stream, 104, 8, 96, 4);
FIELD(ga_config, allocate, 112, 8, 100, 4);
FIELD(ga_config, free, 120, 8, 104, 4);
FIELD(ga_config, allocator_user, 128, 8, 108, 4);
FIELD(ga_config, log, 136, 8, 112, 4);
FIELD(ga_config, log_user, 144, 8, 116, 4);
FIELD(ga_config, eager, 152, 4, 120, 4);
FIELD(ga_config, eager_threads, 156, 4, 124, 4);
FIELD(ga_config, eager_bytes, 160, 8, 128, 8);
FIELD(ga_config, on_param_done, 168, 8, 136, 4);
FIELD(ga_config, on_param_done_user, 176, 8, 140, 4);

SIZE(ga_micro_options, 24, 24);
FIELD(ga_micro_options, struct_size, 0, 8, 0, 4);
FIELD(ga_micro_options, loss_scale, 8, 8, 8, 8);
FIELD(ga_micro_options, flags, 16, 4, 16, 4);
FIELD(ga_micro_options, reserved, 20, 4, 20, 4);

SIZE(ga_window_info, 64, 64);
FIELD(ga_window_info, struct_size, 0, 8, 0, 4);
FIELD(ga_window_info, state, 8, 4, 4, 4);
FIELD(ga_window_info, reserved, 12, 4, 8, 4);
FIELD(ga_window_info, micro_batches, 16, 8, 16, 8);
FIELD(ga_window_info, open_micro, 24, 8, 24, 8);
FIELD(ga_window_info, accum_steps, 32, 8, 32, 8);
FIELD(ga_window_info, weight, 40, 8, 40, 8);
FIELD(ga_window_info, windows, 48, 8, 48, 8);
FIELD(ga_window_info, steps, 56, 8, 56, 8);

SIZE(ga_kept_info, 40, 40);
FIELD(ga_kept_info, struct_size, 0, 8, 0, 4);
FIELD(ga_kept_info, latest, 8, 8, 8, 8);
FIELD(ga_kept_info, oldest, 16, 8, 16, 8);
FIELD(ga_kept_info, queued, 24, 8, 24, 8);
FIELD(ga_kept_info, until_micro_end, 32, 4, 32, 4);
FIELD(ga_kept_info, reserved, 36, 4, 36, 4);

SIZE(ga_step_result, 160, 160);
FIELD(ga_step_result, struct_size, 0, 8, 0, 4);
FIELD(ga_step_result, outcome, 8, 4, 4, 4);
FIELD(ga_step_result, reserved, 12, 4, 8, 4);
FIELD(ga_step_result, windows, 16, 8, 16, 8);
FIELD(ga_step_result, steps, 24, 8, 24, 8);
FIELD(ga_step_result, micro_batches, 32, 8, 32, 8);
FIELD(ga_step_result, weight, 40, 8, 40, 8);
FIELD(ga_step_result, norm, 48, 8, 48, 8);
FIELD(ga_step_result, clip_factor, 56, 8, 56, 8);
FIELD(ga_step_result, lr, 64, 8, 64, 8);
FIELD(ga_step_result, loss_scale, 72, 8, 72, 8);
FIELD(ga_step_result, skipped, 80, 8, 80, 8);
FIELD(ga_step_result, dropped, 88, 8, 88, 8);
FIELD(ga_step_result, window_dropped, 96, 8, 96, 8);
FIELD(ga_step_result, noise_scale, 104, 8, 104, 8);
FIELD(ga_step_result, noise_trace, 112, 8, 112, 8);
FIELD(ga_step_result, noise_signal, 120, 8, 120, 8);
FIELD(ga_step_result, dropped_micros, 128, 8, 128, 8);
FIELD(ga_step_result, eager, 136, 8, 136, 8);
FIELD(ga_step_result, eager_waited, 144, 8, 144, 8);
FIELD(ga_step_result, eager_redone, 152, 8, 152, 8);

SIZE(ga_accumulator, 64, 56);
FIELD(ga_accumulator, struct_size, 0, 8, 0, 4);
FIELD(ga_accumulator, data, 8, 8, 4, 4);
FIELD(ga_accumulator, dtype, 16, 4, 8, 4);
FIELD(ga_accumulator, reserved, 20, 4, 12, 4);
FIELD(ga_accumulator, rows, 24, 8, 16, 8);
FIELD(ga_accumulator, columns, 32, 8, 24, 8);
FIELD(ga_accumulator, leading_dimension, 40, 8, 32, 8);
FIELD(ga_accumulator, alpha, 48, 8, 40, 8);
FIELD(ga_accumulator, beta, 56, 8, 48, 8);

SIZE(ga_schedule, 88, 88);
FIELD(ga_schedule, struct_size, 0, 8, 0, 4);
FIELD(ga_schedule, kind, 8, 4, 4, 4);
FIELD(ga_schedule, reserved, 12, 4, 8, 4);
FIELD(ga_schedule, warmup_steps, 16, 8, 16, 8);
FIELD(ga_schedule, total_steps, 24, 8, 24, 8);
FIELD(ga_schedule, end_factor, 32, 8, 32, 8);
FIELD(ga_schedule, power, 40, 8, 40, 8);
FIELD(ga_schedule, gamma, 48, 8, 48, 8);
FIELD(ga_schedule, step_size, 56, 8, 56, 8);
FIELD(ga_schedule, table, 64, 8, 64, 4);
FIELD(ga_schedule, table_size, 72, 8, 72, 8);
FIELD(ga_schedule, first_step, 80, 8, 80, 8);

SIZE(ga_clip, 56, 56);
FIELD(ga_clip, struct_size, 0, 8, 0, 4);
FIELD(ga_clip, scope, 8, 4, 4, 4);
FIELD(ga_clip, flavor, 12, 4, 8, 4);
FIELD(ga_clip, max_norm, 16, 8, 16, 8);
FIELD(ga_clip, max_value, 24, 8, 24, 8);
FIELD(ga_clip, agc_factor, 32, 8, 32, 8);
FIELD(ga_clip, agc_eps, 40, 8, 40, 8);
FIELD(ga_clip, agc_units, 48, 4, 48, 4);
FIELD(ga_clip, when, 52, 4, 52, 4);

SIZE(ga_loss_scaler, 64, 64);
FIELD(ga_loss_scaler, struct_size, 0, 8, 0, 4);
FIELD(ga_loss_scaler, initial_scale, 8, 8, 8, 8);
FIELD(ga_loss_scaler, growth_factor, 16, 8, 16, 8);
FIELD(ga_loss_scaler, backoff_factor, 24, 8, 24, 8);
FIELD(ga_loss_scaler, min_scale, 32, 8, 32, 8);
FIELD(ga_loss_scaler, max_scale, 40, 8, 40, 8);
FIELD(ga_loss_scaler, growth_interval, 48, 8, 48, 8);
FIELD(ga_loss_scaler, hysteresis, 56, 4, 56, 4);
FIELD(ga_loss_scaler, reserved, 60, 4, 60, 4);

SIZE(ga_ema, 32, 32);
FIELD(ga_ema, struct_size, 0, 8, 0, 4);
FIELD(ga_ema, kind, 8, 4, 4, 4);
FIELD(ga_ema, dtype, 12, 4, 8, 4);
FIELD(ga_ema, decay, 16, 8, 16, 8);
FIELD(ga_ema, gamma, 24, 8, 24, 8);

SIZE(ga_param_options, 72, 68);
FIELD(ga_param_options, struct_size, 0, 8, 0, 4);
FIELD(ga_param_options, gradient_dtype, 8, 4, 4, 4);
FIELD(ga_param_options, accumulator_dtype, 12, 4, 8, 4);
FIELD(ga_param_options, master, 16, 4, 12, 4);
FIELD(ga_param_options, rounding, 20, 4, 16, 4);
FIELD(ga_param_options, rows, 24, 4, 20, 4);
FIELD(ga_param_options, agc_axes, 28, 4, 24, 4);
FIELD(ga_param_options, reduce, 32, 4, 28, 4);
FIELD(ga_param_options, write_early, 36, 4, 32, 4);
FIELD(ga_param_options, follow_data, 40, 4, 36, 4);
FIELD(ga_param_options, reserved, 44, 4, 40, 4);
FIELD(ga_param_options, cut_matrices, 48, 4, 44, 4);
FIELD(ga_param_options, batch_axes, 52, 4, 48, 4);
FIELD(ga_param_options, output_axis, 56, 4, 52, 4);
FIELD(ga_param_options, split_axis, 60, 4, 56, 4);
FIELD(ga_param_options, matrix_parts, 64, 4, 60, 4);
FIELD(ga_param_options, reserved2, 68, 4, 64, 4);

SIZE(ga_flat_entry, 48, 40);
FIELD(ga_flat_entry, struct_size, 0, 8, 0, 4);
FIELD(ga_flat_entry, name, 8, 8, 4, 4);
FIELD(ga_flat_entry, group, 16, 4, 8, 4);
FIELD(ga_flat_entry, rank, 20, 4, 12, 4);
FIELD(ga_flat_entry, shape, 24, 8, 16, 4);
FIELD(ga_flat_entry, offset, 32, 8, 24, 8);
FIELD(ga_flat_entry, options, 40, 8, 32, 4);

SIZE(ga_param_info, 96, 80);
FIELD(ga_param_info, struct_size, 0, 8, 0, 4);
FIELD(ga_param_info, name, 8, 8, 4, 4);
FIELD(ga_param_info, group, 16, 4, 8, 4);
FIELD(ga_param_info, dtype, 20, 4, 12, 4);
FIELD(ga_param_info, gradient_dtype, 24, 4, 16, 4);
FIELD(ga_param_info, accumulator_dtype, 28, 4, 20, 4);
FIELD(ga_param_info, data, 32, 8, 24, 4);
FIELD(ga_param_info, shape, 40, 8, 28, 4);
FIELD(ga_param_info, rank, 48, 4, 32, 4);
FIELD(ga_param_info, frozen, 52, 4, 36, 4);
FIELD(ga_param_info, count, 56, 8, 40, 8);
FIELD(ga_param_info, offset, 64, 8, 48, 8);
FIELD(ga_param_info, slot, 72, 8, 56, 4);
FIELD(ga_param_info, lr_scale, 80, 8, 64, 8);
FIELD(ga_param_info, weight_decay_scale, 88, 8, 72, 8);

SIZE(ga_state_info, 32, 24);
FIELD(ga_state_info, struct_size, 0, 8, 0, 4);
FIELD(ga_state_info, name, 8, 8, 4, 4);
FIELD(ga_state_info, dtype, 16, 4, 8, 4);
FIELD(ga_state_info, reserved, 20, 4, 12, 4);
FIELD(ga_state_info, count, 24, 8, 16, 8);

SIZE(ga_state_options, 56, 40);
FIELD(ga_state_options, struct_size, 0, 8, 0, 4);
FIELD(ga_state_options, parts, 8, 4, 4, 4);
FIELD(ga_state_options, settings, 12, 4, 8, 4);
FIELD(ga_state_options, allow_missing, 16, 4, 12, 4);
FIELD(ga_state_options, allow_extra, 20, 4, 16, 4);
FIELD(ga_state_options, unmarked, 24, 4, 20, 4);
FIELD(ga_state_options, reserved, 28, 4, 24, 4);
FIELD(ga_state_options, progress, 32, 8, 28, 4);
FIELD(ga_state_options, progress_user, 40, 8, 32, 4);
FIELD(ga_state_options, note, 48, 8, 36, 4);

SIZE(ga_memory, 88, 88);
FIELD(ga_memory, struct_size, 0, 8, 0, 4);
FIELD(ga_memory, accumulators, 8, 8, 8, 8);
FIELD(ga_memory, optimizer_state, 16, 8, 16, 8);
FIELD(ga_memory, workspace, 24, 8, 24, 8);
FIELD(ga_memory, total, 32, 8, 32, 8);
FIELD(ga_memory, masters, 40, 8, 40, 8);
FIELD(ga_memory, averages, 48, 8, 48, 8);
FIELD(ga_memory, rows, 56, 8, 56, 8);
FIELD(ga_memory, batch_norm, 64, 8, 64, 8);
FIELD(ga_memory, resident, 72, 8, 72, 8);
FIELD(ga_memory, eager, 80, 8, 80, 8);

SIZE(ga_comm_table, 80, 44);
FIELD(ga_comm_table, struct_size, 0, 8, 0, 4);
FIELD(ga_comm_table, user, 8, 8, 4, 4);
FIELD(ga_comm_table, all_to_all, 16, 8, 8, 4);
FIELD(ga_comm_table, all_gather, 24, 8, 12, 4);
FIELD(ga_comm_table, broadcast, 32, 8, 16, 4);
FIELD(ga_comm_table, abort, 40, 8, 20, 4);
FIELD(ga_comm_table, error_text, 48, 8, 24, 4);
FIELD(ga_comm_table, all_reduce, 56, 8, 28, 4);
FIELD(ga_comm_table, reduce_scatter, 64, 8, 32, 4);
FIELD(ga_comm_table, any_thread, 72, 4, 36, 4);
FIELD(ga_comm_table, on_stream, 76, 4, 40, 4);

SIZE(ga_comm_config, 56, 48);
FIELD(ga_comm_config, struct_size, 0, 8, 0, 4);
FIELD(ga_comm_config, kind, 8, 4, 4, 4);
FIELD(ga_comm_config, rank, 12, 4, 8, 4);
FIELD(ga_comm_config, ranks, 16, 4, 12, 4);
FIELD(ga_comm_config, mpi_comm, 20, 4, 16, 4);
FIELD(ga_comm_config, timeout, 24, 8, 24, 8);
FIELD(ga_comm_config, id, 32, 8, 32, 4);
FIELD(ga_comm_config, table, 40, 8, 36, 4);
FIELD(ga_comm_config, nccl_comm, 48, 8, 40, 4);

SIZE(ga_comm_options, 56, 56);
FIELD(ga_comm_options, struct_size, 0, 8, 0, 4);
FIELD(ga_comm_options, wire, 8, 4, 4, 4);
FIELD(ga_comm_options, hand_out, 12, 4, 8, 4);
FIELD(ga_comm_options, check_every, 16, 8, 16, 8);
FIELD(ga_comm_options, shard, 24, 4, 24, 4);
FIELD(ga_comm_options, adder, 28, 4, 28, 4);
FIELD(ga_comm_options, overlap, 32, 4, 32, 4);
FIELD(ga_comm_options, reserved, 36, 4, 36, 4);
FIELD(ga_comm_options, reduced, 40, 4, 40, 4);
FIELD(ga_comm_options, data_ranks, 44, 4, 44, 4);
FIELD(ga_comm_options, data_rank, 48, 4, 48, 4);
FIELD(ga_comm_options, reserved2, 52, 4, 52, 4);

SIZE(ga_build, 48, 36);
FIELD(ga_build, struct_size, 0, 8, 0, 4);
FIELD(ga_build, version, 8, 4, 4, 4);
FIELD(ga_build, onednn, 12, 4, 8, 4);
FIELD(ga_build, cuda_runtime, 16, 4, 12, 4);
FIELD(ga_build, cuda_driver, 20, 4, 16, 4);
FIELD(ga_build, openmp, 24, 4, 20, 4);
FIELD(ga_build, reserved, 28, 4, 24, 4);
FIELD(ga_build, compiler, 32, 8, 28, 4);
FIELD(ga_build, cpu_loops, 40, 8, 32, 4);

SIZE(ga_bn_info, 72, 64);
FIELD(ga_bn_info, struct_size, 0, 8, 0, 4);
FIELD(ga_bn_info, name, 8, 8, 4, 4);
FIELD(ga_bn_info, channels, 16, 8, 8, 8);
FIELD(ga_bn_info, gamma, 24, 4, 16, 4);
FIELD(ga_bn_info, beta, 28, 4, 20, 4);
FIELD(ga_bn_info, mode, 32, 4, 24, 4);
FIELD(ga_bn_info, layout, 36, 4, 28, 4);
FIELD(ga_bn_info, dtype, 40, 4, 32, 4);
FIELD(ga_bn_info, biased, 44, 4, 36, 4);
FIELD(ga_bn_info, frozen, 48, 4, 40, 4);
FIELD(ga_bn_info, reserved, 52, 4, 44, 4);
FIELD(ga_bn_info, momentum, 56, 8, 48, 8);
FIELD(ga_bn_info, eps, 64, 8, 56, 8);

SIZE(ga_bn_options, 40, 40);
FIELD(ga_bn_options, struct_size, 0, 8, 0, 4);
FIELD(ga_bn_options, mode, 8, 4, 4, 4);
FIELD(ga_bn_options, layout, 12, 4, 8, 4);
FIELD(ga_bn_options, dtype, 16, 4, 12, 4);
FIELD(ga_bn_options, biased, 20, 4, 16, 4);
FIELD(ga_bn_options, momentum, 24, 8, 24, 8);
FIELD(ga_bn_options, eps, 32, 8, 32, 8);

/* ---- Constants ---- */

VALUE(GA_OK, 0);
VALUE(GA_ERROR_INVALID_ARGUMENT, 1);
VALUE(GA_ERROR_INVALID_STATE, 2);
VALUE(GA_ERROR_OUT_OF_MEMORY, 3);
VALUE(GA_ERROR_UNSUPPORTED, 4);
VALUE(GA_ERROR_NONFINITE, 5);
VALUE(GA_ERROR_FAULT, 6);
VALUE(GA_ERROR_INTERNAL, 7);
VALUE(GA_ERROR_WINDOW_FULL, 8);
VALUE(GA_ERROR_IO, 9);
VALUE(GA_ERROR_FORMAT, 10);
VALUE(GA_ERROR_COMMUNICATION, 11);
VALUE(GA_ERROR_CANCELLED, 12);

VALUE(GA_OPTIMIZER_SGD, 0);
VALUE(GA_OPTIMIZER_ADAM, 1);
VALUE(GA_OPTIMIZER_ADAMW, 2);
VALUE(GA_OPTIMIZER_EXTERNAL, 3);
VALUE(GA_OPTIMIZER_RMSPROP, 4);
VALUE(GA_OPTIMIZER_ADAGRAD, 5);
VALUE(GA_OPTIMIZER_ADADELTA, 6);
VALUE(GA_OPTIMIZER_ADAMAX, 7);
VALUE(GA_OPTIMIZER_NADAM, 8);
VALUE(GA_OPTIMIZER_RADAM, 9);
VALUE(GA_OPTIMIZER_LION, 10);
VALUE(GA_OPTIMIZER_LAMB, 11);
VALUE(GA_OPTIMIZER_LARS, 12);
VALUE(GA_OPTIMIZER_ADAFACTOR, 13);
VALUE(GA_OPTIMIZER_MUON, 14);
VALUE(GA_OPTIMIZER_ADOPT, 15);
VALUE(GA_OPTIMIZER_ADEMAMIX, 16);
VALUE(GA_OPTIMIZER_ROWWISE_ADAGRAD, 17);
VALUE(GA_OPTIMIZER_SCHEDULE_FREE_ADAMW, 18);
VALUE(GA_OPTIMIZER_SCHEDULE_FREE_SGD, 19);

VALUE(GA_FLAVOR_TORCH, 0);
VALUE(GA_FLAVOR_KERAS, 1);
VALUE(GA_FLAVOR_BERT, 2);

VALUE(GA_F32, 1);
VALUE(GA_F64, 2);
VALUE(GA_F16, 3);
VALUE(GA_BF16, 4);
VALUE(GA_I32, 5);
VALUE(GA_I64, 6);
VALUE(GA_U8, 7);
VALUE(GA_STATE_8BIT, 16);

VALUE(GA_ADJUST_ORIGINAL, 0);
VALUE(GA_ADJUST_MATCH_RMS, 1);
VALUE(GA_ADJUST_NONE, 2);

VALUE(GA_PRECISION_F32, 0);
VALUE(GA_PRECISION_TF32, 1);
VALUE(GA_PRECISION_BF16, 2);
VALUE(GA_EQUILIBRATE_NONE, 0);
VALUE(GA_EQUILIBRATE_OUTPUTS, 1);
VALUE(GA_EQUILIBRATE_INPUTS, 2);
VALUE(GA_EQUILIBRATE_BOTH, 3);
VALUE(GA_NS_OWN, 0);
VALUE(GA_NS_YOU, 1);
VALUE(GA_NS_POLAR_EXPRESS, 2);

VALUE(GA_DEVICE_CPU, 0);
VALUE(GA_DEVICE_CUDA, 1);

VALUE(GA_GRADIENT_MEAN, 0);
VALUE(GA_GRADIENT_SUM, 1);

VALUE(GA_REDUCE_MEAN, 0);
VALUE(GA_REDUCE_SUM, 1);
VALUE(GA_REDUCE_MAX, 2);

VALUE(GA_MISSING_SKIP, 0);
VALUE(GA_MISSING_ZERO, 1);

VALUE(GA_NONFINITE_SKIP_STEP, 0);
VALUE(GA_NONFINITE_FAIL, 1);
VALUE(GA_NONFINITE_DROP_MICRO, 2);
VALUE(GA_NONFINITE_IGNORE, 3);

VALUE(GA_ACCUMULATE_PLAIN, 0);
VALUE(GA_ACCUMULATE_RUNNING_MEAN, 1);
VALUE(GA_ACCUMULATE_COMPENSATED, 2);
VALUE(GA_ACCUMULATE_STOCHASTIC, 3);

VALUE(GA_GRADIENTS_CONSUMED, 0);
VALUE(GA_GRADIENTS_LIVE, 1);

VALUE(GA_MICRO_LAST, 1);

VALUE(GA_WINDOW_EMPTY, 0);
VALUE(GA_WINDOW_OPEN, 1);
VALUE(GA_WINDOW_FULL, 2);
VALUE(GA_WINDOW_INVALID, 3);

VALUE(GA_STEP_APPLIED, 0);
VALUE(GA_STEP_SKIPPED_EMPTY, 1);
VALUE(GA_STEP_SKIPPED_NONFINITE, 2);
VALUE(GA_STEP_SKIPPED_ERROR, 3);
VALUE(GA_STEP_PENDING, 4);
VALUE(GA_STEP_SKIPPED_WEIGHT, 5);
VALUE(GA_STEP_SKIPPED_DISCARD, 6);
VALUE(GA_COMM_LOCAL, 0);
VALUE(GA_COMM_MPI, 1);
VALUE(GA_COMM_TABLE, 2);
VALUE(GA_COMM_NCCL, 3);
VALUE(GA_COMM_ID_SIZE, 128);
VALUE(GA_COMM_WIRE_EXACT, 0);
VALUE(GA_COMM_WIRE_BF16, 1);
VALUE(GA_COMM_SUM, 0);
VALUE(GA_COMM_MAX, 1);
VALUE(GA_COMM_ADDER_LIBRARY, 0);
VALUE(GA_COMM_ADDER_TRANSPORT, 1);
VALUE(GA_COMM_ADDER_AUTO, 2);
VALUE(GA_SHARD_NONE, 0);
VALUE(GA_SHARD_OPTIMIZER, 1);
VALUE(GA_SHARD_PARAMETERS, 2);
VALUE(GA_REDUCED_MEAN, 0);
VALUE(GA_REDUCED_SUM, 1);

VALUE(GA_NO_TRANSPOSE, 0);
VALUE(GA_TRANSPOSE, 1);

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
VALUE(GA_CLIP_AGC, 3);

VALUE(GA_AGC_TF, 0);
VALUE(GA_AGC_NFNETS, 1);
VALUE(GA_AGC_TORCH, 2);

VALUE(GA_CLIP_WHEN_STEP, 0);
VALUE(GA_CLIP_WHEN_MICRO, 1);

VALUE(GA_EMA_TORCH, 0);
VALUE(GA_EMA_KARRAS, 1);

VALUE(GA_MASTER_F32, 0);
VALUE(GA_MASTER_NONE, 1);

VALUE(GA_ROUND_NEAREST, 0);
VALUE(GA_ROUND_STOCHASTIC, 1);

VALUE(GA_ROWS_NONE, 0);
VALUE(GA_ROWS_DENSE, 1);
VALUE(GA_ROWS_LAZY, 2);

VALUE(GA_STATE_ALL, 0);
VALUE(GA_STATE_LIBRARY, 1);
VALUE(GA_STATE_PARAMETERS, 2);

VALUE(GA_SETTINGS_COMPARE, 0);
VALUE(GA_SETTINGS_TAKE, 1);
VALUE(GA_SETTINGS_KEEP, 2);

VALUE(GA_BN_MICRO, 0);
VALUE(GA_BN_WINDOW, 1);
VALUE(GA_BN_CUMULATIVE, 2);

VALUE(GA_BN_CHANNELS_FIRST, 0);
VALUE(GA_BN_CHANNELS_LAST, 1);

VALUE(GA_BN_VARIANCE, 0);
VALUE(GA_BN_M2, 1);

_Static_assert(sizeof(ga_status) == 4, "ga_status");
_Static_assert(sizeof(ga_optimizer_kind) == 4, "ga_optimizer_kind");
_Static_assert(sizeof(ga_flavor) == 4, "ga_flavor");
_Static_assert(sizeof(ga_dtype) == 4, "ga_dtype");
_Static_assert(sizeof(ga_adjust_lr) == 4, "ga_adjust_lr");
_Static_assert(sizeof(ga_precision) == 4, "ga_precision");
_Static_assert(sizeof(ga_newton_schulz) == 4, "ga_newton_schulz");
_Static_assert(sizeof(ga_equilibrate) == 4, "ga_equilibrate");
_Static_assert(sizeof(ga_group) == 4, "ga_group");
_Static_assert(sizeof(ga_param) == 4, "ga_param");
_Static_assert(sizeof(ga_device) == 4, "ga_device");
_Static_assert(sizeof(ga_gradient_kind) == 4, "ga_gradient_kind");
_Static_assert(sizeof(ga_reduce) == 4, "ga_reduce");
_Static_assert(sizeof(ga_missing) == 4, "ga_missing");
_Static_assert(sizeof(ga_nonfinite) == 4, "ga_nonfinite");
_Static_assert(sizeof(ga_accumulation) == 4, "ga_accumulation");
_Static_assert(sizeof(ga_gradient_life) == 4, "ga_gradient_life");
_Static_assert(sizeof(ga_window_state) == 4, "ga_window_state");
_Static_assert(sizeof(ga_step_outcome) == 4, "ga_step_outcome");
_Static_assert(sizeof(ga_transpose) == 4, "ga_transpose");
_Static_assert(sizeof(ga_schedule_kind) == 4, "ga_schedule_kind");
_Static_assert(sizeof(ga_clip_scope) == 4, "ga_clip_scope");
_Static_assert(sizeof(ga_agc_units) == 4, "ga_agc_units");
_Static_assert(sizeof(ga_clip_when) == 4, "ga_clip_when");
_Static_assert(sizeof(ga_ema_kind) == 4, "ga_ema_kind");
_Static_assert(sizeof(ga_master) == 4, "ga_master");
_Static_assert(sizeof(ga_rounding) == 4, "ga_rounding");
_Static_assert(sizeof(ga_rows) == 4, "ga_rows");
_Static_assert(sizeof(ga_state_parts) == 4, "ga_state_parts");
_Static_assert(sizeof(ga_state_settings) == 4, "ga_state_settings");
_Static_assert(sizeof(ga_bn) == 4, "ga_bn");
_Static_assert(sizeof(ga_bn_mode) == 4, "ga_bn_mode");
_Static_assert(sizeof(ga_bn_layout) == 4, "ga_bn_layout");
_Static_assert(sizeof(ga_bn_spread) == 4, "ga_bn_spread");

/* ---- Functions ---- */

FUNCTION(ga_last_error, const char* (*)(void));
FUNCTION(ga_status_name, const char* (*)(ga_status));
FUNCTION(ga_context_create, ga_status (*)(const ga_config*, ga_context**));
FUNCTION(ga_context_destroy, void (*)(ga_context*));
FUNCTION(ga_optimizer_init, ga_status (*)(ga_optimizer*, size_t, ga_optimizer_kind, ga_flavor));
FUNCTION(ga_group_add, ga_status (*)(ga_context*, const ga_optimizer*, ga_group*));
FUNCTION(ga_param_add, ga_status (*)(ga_context*, ga_group, const char*, void*, ga_dtype, int32_t,
                                     const int64_t*, const ga_param_options*, ga_param*));
FUNCTION(ga_accumulate,
         ga_status (*)(ga_context*, const void* const*, size_t, double, const ga_micro_options*));
FUNCTION(ga_step, ga_status (*)(ga_context*, ga_step_result*));
FUNCTION(ga_config_init, ga_status (*)(ga_config*, size_t));
FUNCTION(ga_context_set_accum_steps, ga_status (*)(ga_context*, int64_t));
FUNCTION(ga_context_set_accum_schedule,
         ga_status (*)(ga_context*, const int64_t*, const int64_t*, size_t));
FUNCTION(ga_micro_options_init, ga_status (*)(ga_micro_options*, size_t));
FUNCTION(ga_window_info_init, ga_status (*)(ga_window_info*, size_t));
FUNCTION(ga_window, ga_status (*)(const ga_context*, ga_window_info*));
FUNCTION(ga_discard, ga_status (*)(ga_context*));
FUNCTION(ga_step_result_init, ga_status (*)(ga_step_result*, size_t));
FUNCTION(ga_step_result_get, ga_status (*)(ga_context*, int64_t, int32_t, ga_step_result*));
FUNCTION(ga_micro_begin, ga_status (*)(ga_context*, int64_t, double, const ga_micro_options*));
FUNCTION(ga_accumulate_part, ga_status (*)(ga_context*, ga_param, const void*));
FUNCTION(ga_accumulate_rows,
         ga_status (*)(ga_context*, ga_param, const void*, ga_dtype, int64_t, const void*));
FUNCTION(ga_accumulate_matmul,
         ga_status (*)(ga_context*, ga_param, int64_t, const void*, int64_t, ga_transpose,
                       const void*, int64_t, ga_transpose, ga_dtype));
FUNCTION(ga_accumulator_init, ga_status (*)(ga_accumulator*, size_t));
FUNCTION(ga_accumulator_acquire, ga_status (*)(ga_context*, ga_param, ga_accumulator*));
FUNCTION(ga_accumulator_release, ga_status (*)(ga_context*, ga_param));
FUNCTION(ga_micro_end, ga_status (*)(ga_context*));
FUNCTION(ga_micro_abort, ga_status (*)(ga_context*));
FUNCTION(ga_kept_info_init, ga_status (*)(ga_kept_info*, size_t));
FUNCTION(ga_gradients_kept, ga_status (*)(const ga_context*, int64_t, ga_kept_info*));
FUNCTION(ga_schedule_init, ga_status (*)(ga_schedule*, size_t, ga_schedule_kind));
FUNCTION(ga_group_set_schedule, ga_status (*)(ga_context*, ga_group, const ga_schedule*));
FUNCTION(ga_group_set_lr, ga_status (*)(ga_context*, ga_group, double));
FUNCTION(ga_group_lr, ga_status (*)(const ga_context*, ga_group, double*));
FUNCTION(ga_group_last_lr, ga_status (*)(const ga_context*, ga_group, double*));
FUNCTION(ga_context_set_steps, ga_status (*)(ga_context*, int64_t));
FUNCTION(ga_clip_init, ga_status (*)(ga_clip*, size_t));
FUNCTION(ga_context_set_clip, ga_status (*)(ga_context*, const ga_clip*));
FUNCTION(ga_group_set_clip, ga_status (*)(ga_context*, ga_group, const ga_clip*));
FUNCTION(ga_context_clip, ga_status (*)(const ga_context*, ga_clip*));
FUNCTION(ga_group_clip, ga_status (*)(const ga_context*, ga_group, ga_clip*));
FUNCTION(ga_loss_scaler_init, ga_status (*)(ga_loss_scaler*, size_t));
FUNCTION(ga_context_set_loss_scaler, ga_status (*)(ga_context*, const ga_loss_scaler*));
FUNCTION(ga_loss_scale, ga_status (*)(const ga_context*, double*, const void**));
FUNCTION(ga_ema_init, ga_status (*)(ga_ema*, size_t));
FUNCTION(ga_context_set_ema, ga_status (*)(ga_context*, const ga_ema*));
FUNCTION(ga_ema_copy_to, ga_status (*)(ga_context*, ga_param, void*, ga_dtype));
FUNCTION(ga_ema_swap, ga_status (*)(ga_context*, int32_t));
FUNCTION(ga_param_options_init, ga_status (*)(ga_param_options*, size_t));
FUNCTION(ga_flat_entry_init, ga_status (*)(ga_flat_entry*, size_t));
FUNCTION(ga_params_add_flat, ga_status (*)(ga_context*, void*, ga_dtype, const ga_flat_entry*,
                                           size_t, const ga_param_options*, ga_param*));
FUNCTION(ga_param_count, ga_status (*)(const ga_context*, int32_t*));
FUNCTION(ga_param_find, ga_status (*)(const ga_context*, const char*, ga_param*));
FUNCTION(ga_param_info_init, ga_status (*)(ga_param_info*, size_t));
FUNCTION(ga_param_describe, ga_status (*)(const ga_context*, ga_param, ga_param_info*));
FUNCTION(ga_slot_count, ga_status (*)(const ga_context*, size_t*));
FUNCTION(ga_param_slot, ga_status (*)(const ga_context*, ga_param, size_t*));
FUNCTION(ga_param_bind, ga_status (*)(ga_context*, ga_param, void*));
FUNCTION(ga_param_changed, ga_status (*)(ga_context*, ga_param));
FUNCTION(ga_param_set_frozen, ga_status (*)(ga_context*, ga_param, int32_t));
FUNCTION(ga_param_set_lr_scale, ga_status (*)(ga_context*, ga_param, double));
FUNCTION(ga_param_set_part,
         ga_status (*)(ga_context*, ga_param, const int64_t*, const int64_t*, int32_t));
FUNCTION(ga_param_set_weight_decay_scale, ga_status (*)(ga_context*, ga_param, double));
FUNCTION(ga_param_remove, ga_status (*)(ga_context*, ga_param));
FUNCTION(ga_prepare, ga_status (*)(ga_context*));
FUNCTION(ga_state_info_init, ga_status (*)(ga_state_info*, size_t));
FUNCTION(ga_state_count, ga_status (*)(const ga_context*, ga_param, int32_t*));
FUNCTION(ga_state_describe, ga_status (*)(const ga_context*, ga_param, int32_t, ga_state_info*));
FUNCTION(ga_state_get, ga_status (*)(ga_context*, ga_param, const char*, void*, ga_dtype, int64_t));
FUNCTION(ga_state_set,
         ga_status (*)(ga_context*, ga_param, const char*, const void*, ga_dtype, int64_t));
FUNCTION(ga_state_reset, ga_status (*)(ga_context*, ga_param));
FUNCTION(ga_state_options_init, ga_status (*)(ga_state_options*, size_t));
FUNCTION(ga_save, ga_status (*)(ga_context*, const char*, const ga_state_options*));
FUNCTION(ga_load, ga_status (*)(ga_context*, const char*, const ga_state_options*));
FUNCTION(ga_save_to_memory,
         ga_status (*)(ga_context*, const ga_state_options*, void*, size_t, size_t*));
FUNCTION(ga_load_from_memory,
         ga_status (*)(ga_context*, const void*, size_t, const ga_state_options*));
FUNCTION(ga_state_write, ga_status (*)(ga_context*, ga_write_fn, void*, const ga_state_options*));
FUNCTION(ga_state_read,
         ga_status (*)(ga_context*, ga_read_fn, void*, int64_t, const ga_state_options*));
FUNCTION(ga_state_note, ga_status (*)(const char*, char*, size_t, size_t*));
FUNCTION(ga_group_set_weight_decay, ga_status (*)(ga_context*, ga_group, double));
FUNCTION(ga_group_set_optimizer, ga_status (*)(ga_context*, ga_group, const ga_optimizer*));
FUNCTION(ga_group_set_frozen, ga_status (*)(ga_context*, ga_group, int32_t));
FUNCTION(ga_group_count, ga_status (*)(const ga_context*, int32_t*));
FUNCTION(ga_group_optimizer, ga_status (*)(const ga_context*, ga_group, ga_optimizer*));
FUNCTION(ga_gradient, ga_status (*)(ga_context*, ga_param, const void**, ga_dtype*, int64_t*));
FUNCTION(ga_device_count, ga_status (*)(ga_device, int32_t*));
FUNCTION(ga_synchronize, ga_status (*)(ga_context*));
FUNCTION(ga_context_set_stream, ga_status (*)(ga_context*, void*));
FUNCTION(ga_memory_init, ga_status (*)(ga_memory*, size_t));
FUNCTION(ga_context_memory, ga_status (*)(const ga_context*, ga_memory*));
FUNCTION(ga_version, int32_t (*)(void));
FUNCTION(ga_build_info, const char* (*)(void));
FUNCTION(ga_build_init, ga_status (*)(ga_build*, size_t));
FUNCTION(ga_build_describe, ga_status (*)(ga_build*));
FUNCTION(ga_bn_options_init, ga_status (*)(ga_bn_options*, size_t, ga_flavor));
FUNCTION(ga_bn_add, ga_status (*)(ga_context*, const char*, int64_t, ga_param, ga_param,
                                  const ga_bn_options*, ga_bn*));
FUNCTION(ga_bn_count, ga_status (*)(const ga_context*, int32_t*));
FUNCTION(ga_bn_find, ga_status (*)(const ga_context*, const char*, ga_bn*));
FUNCTION(ga_bn_info_init, ga_status (*)(ga_bn_info*, size_t));
FUNCTION(ga_bn_describe, ga_status (*)(const ga_context*, ga_bn, ga_bn_info*));
FUNCTION(ga_bn_set_frozen, ga_status (*)(ga_context*, ga_bn, int32_t));
FUNCTION(ga_bn_accumulate, ga_status (*)(ga_context*, ga_bn, const void*, int64_t, int64_t));
FUNCTION(ga_bn_accumulate_stats, ga_status (*)(ga_context*, ga_bn, int64_t, const void*,
                                               const void*, ga_bn_spread, ga_dtype));
FUNCTION(ga_bn_finalize, ga_status (*)(ga_context*, ga_bn));
FUNCTION(ga_bn_forward, ga_status (*)(ga_context*, ga_bn, const void*, int64_t, int64_t, void*));
FUNCTION(ga_bn_backward_accumulate,
         ga_status (*)(ga_context*, ga_bn, const void*, const void*, int64_t, int64_t));
FUNCTION(ga_bn_backward_finalize, ga_status (*)(ga_context*, ga_bn));
FUNCTION(ga_bn_backward,
         ga_status (*)(ga_context*, ga_bn, const void*, const void*, int64_t, int64_t, void*));
FUNCTION(ga_bn_infer, ga_status (*)(ga_context*, ga_bn, const void*, int64_t, int64_t, void*));
FUNCTION(ga_bn_running, ga_status (*)(ga_context*, ga_bn, void*, void*, ga_dtype, int64_t*));
FUNCTION(ga_bn_running_set,
         ga_status (*)(ga_context*, ga_bn, const void*, const void*, ga_dtype, int64_t));
FUNCTION(ga_bn_statistics, ga_status (*)(ga_context*, ga_bn, void*, void*, ga_dtype, int64_t*));
FUNCTION(ga_comm_config_init, ga_status (*)(ga_comm_config*, size_t, ga_comm_kind));
FUNCTION(ga_comm_unique_id, ga_status (*)(ga_comm_kind, void*, size_t));
FUNCTION(ga_comm_create, ga_status (*)(const ga_comm_config*, ga_comm**));
FUNCTION(ga_comm_size, ga_status (*)(const ga_comm*, int32_t*, int32_t*));
FUNCTION(ga_comm_abort, ga_status (*)(ga_comm*));
FUNCTION(ga_comm_destroy, void (*)(ga_comm*));
FUNCTION(ga_comm_options_init, ga_status (*)(ga_comm_options*, size_t));
FUNCTION(ga_context_set_comm, ga_status (*)(ga_context*, ga_comm*, const ga_comm_options*));
FUNCTION(ga_params_ready, ga_status (*)(ga_context*, const ga_param*, size_t));

/* Callback types. */
_Static_assert(_Generic((ga_task)0, void (*)(void*, int64_t) : 1, default : 0), "ga_task");
_Static_assert(_Generic((ga_parallel_for)0, void (*)(void*, int64_t, ga_task, void*) : 1,
                        default : 0),
               "ga_parallel_for");

/* Everything else is checked at compile time; only the version is checked at run time. */
#if __STDC_HOSTED__
#include <stdio.h>
int main(void) {
  if (ga_version() != GA_VERSION) {
    printf("ga_version() is %d, the header says %d\n", (int)ga_version(), (int)GA_VERSION);
    return 1;
  }
  return 0;
}
#endif
