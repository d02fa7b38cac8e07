# SPDX-License-Identifier: Apache-2.0
"""What the bindings need to know beyond the header: names, what belongs together, and what is left out.

Names are in the words of the header; a language spells them in its own way, or has others in OTHERS of its module.
"""

from __future__ import annotations

# What is generated: enumerations and structs, and the name of the type.
TYPES = {
    "ga_status": "Status", "ga_optimizer_kind": "OptimizerKind", "ga_flavor": "Flavor", "ga_dtype": "Dtype",
    "ga_adjust_lr": "AdjustLr", "ga_precision": "Precision", "ga_newton_schulz": "NewtonSchulzPreset", "ga_equilibrate": "Equilibrate", "ga_device": "Device",
    "ga_gradient_kind": "GradientKind", "ga_reduce": "Reduce",
    "ga_missing": "Missing", "ga_nonfinite": "Nonfinite", "ga_accumulation": "Accumulation",
    "ga_gradient_life": "GradientLife", "ga_micro_flags": "MicroFlags", "ga_window_state": "WindowState",
    "ga_step_outcome": "StepOutcome", "ga_transpose": "Transpose", "ga_schedule_kind": "ScheduleKind",
    "ga_clip_scope": "ClipScope", "ga_agc_units": "AgcUnits", "ga_clip_when": "ClipWhen", "ga_ema_kind": "EmaKind",
    "ga_master": "Master", "ga_rounding": "Rounding", "ga_rows": "Rows", "ga_state_parts": "StateParts",
    "ga_state_settings": "Settings", "ga_comm_kind": "CommKind", "ga_comm_wire": "CommWire", "ga_shard": "CommShard",
    "ga_comm_adder": "CommAdder", "ga_reduced": "Reduced", "ga_bn_mode": "BnMode", "ga_bn_layout": "BnLayout", "ga_bn_spread": "BnSpread",
    "ga_optimizer": "Optimizer", "ga_config": "Config", "ga_micro_options": "MicroOptions",
    "ga_window_info": "Window", "ga_step_result": "StepResult", "ga_schedule": "Schedule", "ga_clip": "Clip",
    "ga_loss_scaler": "LossScaler", "ga_ema": "Ema", "ga_param_options": "ParamOptions",
    "ga_param_info": "ParamInfo", "ga_state_info": "StateInfo", "ga_state_options": "StateOptions",
    "ga_memory": "Memory", "ga_comm_options": "CommunicatorOptions", "ga_build": "Build",
    "ga_bn_options": "BatchNormOptions", "ga_bn_info": "BatchNormInfo", "ga_accumulator": "Accumulator",
}  # fmt: skip

# Enumerations without a typedef, by their first enumerator.
UNNAMED = {"GA_MICRO_LAST": "ga_micro_flags"}
FLAGS = {"ga_micro_flags"}  # whose enumerators are bits

# The first enumerators of enumerations that no binding has, and why.
NOT_WRAPPED = {
    "GA_COMM_SUM": "only functions of a ga_comm_table take them",
    "GA_COMM_ID_SIZE": "the length of what ga_comm_unique_id returns",
}

# What enumerators begin with, where it is not what they have in common.
PREFIXES = {
    "ga_status": "GA_ERROR_", "ga_dtype": "GA_", "ga_transpose": "GA_", "ga_micro_flags": "GA_MICRO_",
    "ga_bn_layout": "GA_BN_",
}  # fmt: skip

# Fields that no binding shows, in any struct or in one.
NOT_FIELDS = {
    "struct_size", "reserved", "reserved2",  # the raw layer's
    "log_user", "on_param_done_user", "progress_user",  # callables bring their own
    ("ga_optimizer", "ns_rows"), ("ga_schedule", "table_size"), ("ga_param_info", "rank"),  # lengths of arrays
    ("ga_accumulator", "data"),  # handed out only while it may be written
    # Called on threads, or needs memory, that the run time of a language does not manage.
    ("ga_config", "parallel_for"), ("ga_config", "parallel_for_user"), ("ga_config", "allocate"),
    ("ga_config", "free"), ("ga_config", "allocator_user"),
}  # fmt: skip

# Arrays, and the field that has their length, or a number.
LENGTHS: dict[tuple[str, str], str | int] = {
    ("ga_optimizer", "ns_coefficients"): 3,
    ("ga_optimizer", "ns_table"): "ns_rows",
    ("ga_schedule", "table"): "table_size",
    ("ga_param_info", "shape"): "rank",
}

# Integers that are enumerators, and enumerations of which 0 is not only the first enumerator.
FIELD_ENUMS = {("ga_micro_options", "flags"): "ga_micro_flags"}
OPTIONAL = {("ga_param_options", "reduce")}

# Typedefs of functions that the library calls.
CALLBACKS = {"ga_log", "ga_param_done", "ga_progress"}

# What a function is a member of, by the second part of its name: ga_group_set_lr is Group.set_lr.
OWNERS = {"context": "Context", "group": "Group", "param": "Param", "bn": "BatchNorm", "micro": "MicroBatch"}

# The members that functions are, where that does not follow from their names.
FUNCTIONS = {
    "ga_accumulate": "Context.accumulate", "ga_accumulate_part": "MicroBatch.accumulate",
    "ga_accumulate_rows": "MicroBatch.accumulate_rows", "ga_step": "Context.step", "ga_discard": "Context.discard",
    "ga_step_result_get": "Context.step_result", "ga_window": "Context.window",
    "ga_params_ready": "Context.ready", "ga_gradient": "Param.gradient", "ga_param_add": "Context.add_param",
    "ga_params_add_flat": "Context.add_flat", "ga_prepare": "Context.prepare", "ga_load": "Context.load",
    "ga_state_get": "Param.get_state", "ga_state_set": "Param.set_state", "ga_state_reset": "Param.reset_state",
    "ga_loss_scale": "Context.loss_scale", "ga_ema_swap": "Context.swap_ema",
    "ga_context_set_comm": "Context.set_communicator", "ga_context_destroy": "Context.close",
    "ga_synchronize": "Context.synchronize", "ga_group_count": "Context.group_count",
    "ga_param_count": "Context.param_count", "ga_slot_count": "Context.slot_count",
    "ga_bn_count": "Context.batch_norm_count",
}  # fmt: skip


def member(function: str) -> str | None:
    """The member that a function is, such as Group.set_lr; None: it is none."""
    part = function.split("_")[1]
    owner = OWNERS.get(part)
    return FUNCTIONS.get(function) or (f"{owner}.{function.removeprefix(f'ga_{part}_')}" if owner else None)


# Functions that have the form of those that are generated, but whose members do more than call them.
BY_HAND = {
    "ga_accumulate_part", "ga_accumulator_acquire", "ga_accumulator_release", "ga_bn_describe", "ga_context_destroy",
    "ga_discard", "ga_micro_end", "ga_param_bind", "ga_param_describe", "ga_param_remove", "ga_state_count", "ga_step",
}  # fmt: skip

# Arguments of functions of layers, and those that are written.
LAYER_ARGUMENTS = {
    "x": "the input of the layer", "dy": "the gradient of the layer's output", "samples": "samples in x",
    "positions": "positions in x: the product of the spatial dimensions; 1 without any",
    "y": "where the output is written; may be x", "dx": "where the gradient of x is written; may be dy or x",
}  # fmt: skip
WRITTEN = {"y", "dx"}

# What comments mention and only a program in C has: a sentence with one of them is left out if others remain.
C_ONLY = {
    "ga_comm_table", "ga_optimizer_init", "ga_build_info", "ga_state_note", "static", "throw", "floating-point",
    "ga_allocate", "points to", "on_stream",
}  # fmt: skip

# Names of the library that are the same everywhere: variables of the environment.
SAME = {"GA_VERBOSE", "GA_CPU_ISA"}
