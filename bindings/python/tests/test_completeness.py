# SPDX-License-Identifier: Apache-2.0
"""What gradaccum.h and its parts have, the package reaches."""

import ast
import dataclasses
import os
import pathlib
import re
import subprocess
import sys
from collections.abc import Iterator

import gradaccum as ga
import pytest
from gradaccum import enums, options

SOURCES = pathlib.Path(ga.__file__).parent
HEADER = os.environ.get("GA_HEADER", "")

# What is not reached, and why.
NOT_CALLED = {
    "ga_last_error": "the message of an Error",  # and called, in no_device_reason()
    "ga_status_name": "Status has the names",
    "ga_param_count": "Context.params has the parameters",
    "ga_load_from_memory": "load_from_buffer() of the raw layer calls it",
    "ga_state_note": "state_note() of the raw layer calls it",
}
NOT_FIELDS = {
    "struct_size", "reserved", "reserved2",  # the raw layer's
    "parallel_for", "parallel_for_user", "allocate", "free", "allocator_user",  # not wrapped: gradaccum.i
    "log_user", "progress_user", "on_param_done_user", "table_size",  # of log, progress, on_param_done and table
    "rank", "ns_rows",  # of shape and ns_table
}  # fmt: skip
STRUCTS = {
    "ga_optimizer": options.Optimizer, "ga_config": options.Config, "ga_clip": options.Clip,
    "ga_loss_scaler": options.LossScaler, "ga_ema": options.Ema, "ga_schedule": options.Schedule,
    "ga_param_options": options.ParamOptions, "ga_micro_options": options.MicroOptions,
    "ga_bn_options": options.BatchNormOptions, "ga_state_options": options.StateOptions,
    "ga_window_info": options.Window, "ga_step_result": options.StepResult,
    "ga_param_info": options.ParamInfo, "ga_bn_info": options.BatchNormInfo,
    "ga_state_info": options.StateInfo, "ga_memory": options.Memory, "ga_build": options.Build,
    "ga_flat_entry": ga.FlatEntry,
    "ga_comm_options": options.CommunicatorOptions,
    "ga_comm_config": None,  # the arguments of Communicator.local(), mpi() and nccl()
    "ga_comm_table": None,  # Communicator.from_all_gather() makes it by ctypes
    "ga_kept_info": None,  # what Kept asks for
    "ga_accumulator": None,  # Accumulator has a Tensor: data, dtype, rows, columns, leading_dimension
}  # fmt: skip


def header() -> str:
    if not HEADER:
        pytest.skip("GA_HEADER does not name gradaccum.h")
    parts = sorted(pathlib.Path(HEADER).parent.glob("*.h"))
    return re.sub(r"/\*.*?\*/", "", "".join(part.read_text() for part in parts), flags=re.S)


def test_every_function_is_called() -> None:
    text = header()
    functions = set(re.findall(r"^GA_API [\w\s*]*?\b(ga_\w+)\(", text, re.M))
    library = os.environ.get("GA_LIBRARY", "")
    if library:
        symbols = subprocess.run(["nm", "-D", "--defined-only", library], capture_output=True, text=True)
        exported = {line.split()[-1].split("@")[0] for line in symbols.stdout.splitlines()}
        assert functions == {name for name in exported if name.startswith("ga_")}
    assert len(functions) > 80
    code = "\n".join(path.read_text() for path in SOURCES.glob("*.py") if path.name != "_raw.py")
    called = set(re.findall(r"_(?:raw|native)\.(ga_\w+)", code))
    initialised = {name for name in functions if name.endswith("_init")}
    missing = functions - called - initialised - set(NOT_CALLED)
    assert not missing, missing


def test_every_field_is_there() -> None:
    structs = re.findall(r"struct (ga_\w+) \{(.*?)\}", header(), re.S)
    assert {name for name, _ in structs} == set(STRUCTS)
    for name, body in structs:
        kind = STRUCTS[name]
        if kind is None:
            continue
        have = set(getattr(kind, "_fields", ())) if kind is options.StepResult else {
            field.name for field in dataclasses.fields(kind)
        }
        fields = set()
        for declaration in body.split(";"):
            for part in declaration.split(","):
                match = re.search(r"(\w+)(?:\[\d+\])?\s*$", part)
                fields.update(match.groups() if match else ())
        assert fields - NOT_FIELDS - have == set(), name
        assert have - fields <= {"flavor"}, name  # BatchNormOptions: whose defaults


def test_every_enumerator_is_there() -> None:
    bodies = re.findall(r"enum \{(.*?)\}", header(), re.S)
    wanted = {}
    for body in bodies:
        wanted.update({name: int(value) for name, value in re.findall(r"(GA_\w+) = (\d+)", body)})
    prefixes = {
        "Status": "ERROR_", "OptimizerKind": "OPTIMIZER_", "Flavor": "FLAVOR_", "Dtype": "",
        "AdjustLr": "ADJUST_", "Precision": "PRECISION_", "NewtonSchulzPreset": "NS_", "Equilibrate": "EQUILIBRATE_",
        "Device": "DEVICE_", "GradientKind": "GRADIENT_", "Reduce": "REDUCE_",
        "Missing": "MISSING_", "Nonfinite": "NONFINITE_", "Accumulation": "ACCUMULATE_",
        "GradientLife": "GRADIENTS_", "MicroFlags": "MICRO_", "WindowState": "WINDOW_",
        "StepOutcome": "STEP_", "ScheduleKind": "SCHEDULE_", "ClipScope": "CLIP_", "AgcUnits": "AGC_",
        "ClipWhen": "CLIP_WHEN_", "EmaKind": "EMA_", "Master": "MASTER_", "Rounding": "ROUND_",
        "Rows": "ROWS_", "StateParts": "STATE_", "Settings": "SETTINGS_", "BnMode": "BN_",
        "BnLayout": "BN_", "BnSpread": "BN_", "CommKind": "COMM_", "CommWire": "COMM_WIRE_",
        "CommShard": "SHARD_", "CommAdder": "COMM_ADDER_", "Reduced": "REDUCED_",
    }  # fmt: skip
    have = {"GA_OK": 0, "GA_NO_TRANSPOSE": 0, "GA_TRANSPOSE": 1}  # success; the strides of a matrix
    have["GA_COMM_ID_SIZE"] = len(ga.Communicator.new_id())
    have.update({"GA_COMM_SUM": 0, "GA_COMM_MAX": 1})  # only functions of a ga_comm_table take them
    for name, prefix in prefixes.items():
        members = getattr(enums, name).__members__
        have.update({f"GA_{prefix}{member}": int(value) for member, value in members.items()})
    for own in ("GA_DEFAULT", "GA_MICRO_NONE"):
        del have[own]
    assert have == wanted


def test_everything_public_is_exported() -> None:
    for name in ga.__all__:
        assert getattr(ga, name) is not None
    public = {name for name in dir(enums) if name[0].isupper()} - {"IntEnum", "IntFlag"}
    assert public <= set(ga.__all__)


def undocumented(node: ast.Module | ast.ClassDef, name: str) -> Iterator[str]:
    """What is public in a module or a class and has no docstring; a field has a string after it."""
    if ast.get_docstring(node) is None:
        yield name
    for part, after in zip(node.body, [*node.body[1:], None], strict=True):
        if isinstance(part, ast.FunctionDef):
            setter = any(isinstance(by, ast.Attribute) and by.attr == "setter" for by in part.decorator_list)
            if part.name[0] != "_" and not setter and ast.get_docstring(part) is None:
                yield f"{name}.{part.name}"
        elif isinstance(part, ast.ClassDef) and part.name[0] != "_":
            yield from undocumented(part, f"{name}.{part.name}")
        elif isinstance(part, (ast.Assign, ast.AnnAssign)) and isinstance(node, ast.ClassDef):
            target = part.target if isinstance(part, ast.AnnAssign) else part.targets[0]
            text = isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
            if isinstance(target, ast.Name) and target.id[0] != "_" and not text:
                yield f"{name}.{target.id}"


def test_everything_public_is_documented() -> None:
    found = [path for pattern in ("*.py", "torch/*.py", "keras/*.py") for path in SOURCES.glob(pattern)]
    files = [path for path in found if path.name != "_raw.py"]
    assert len(files) > 10
    missing = [
        name
        for path in files
        for name in undocumented(ast.parse(path.read_text()), str(path.relative_to(SOURCES)))
    ]
    assert missing == []


def test_comments_mention_what_there_is() -> None:
    mentioned = {
        match
        for path in SOURCES.glob("*.py")
        for match in re.findall(r"``([A-Z]\w+)\.(\w+)(?:\(.*?\))?``", path.read_text())
    }
    assert len(mentioned) > 50
    for owner, name in mentioned:
        kind = getattr(ga, owner)
        assert hasattr(kind, name) or name in getattr(kind, "__dataclass_fields__", {}), f"{owner}.{name}"


@pytest.mark.parametrize("platform", ["linux", "win32"])
def test_types_are_strict(platform: str, tmp_path: pathlib.Path) -> None:
    pytest.importorskip("mypy", reason="mypy is not installed")
    here = pathlib.Path(__file__).parent
    environment = {**os.environ, "MYPYPATH": str(SOURCES.parent)}
    done = subprocess.run(
        [
            sys.executable, "-m", "mypy", "--strict", "--cache-dir", str(tmp_path), "--platform", platform, "-p", "gradaccum",
            "--exclude", "gradaccum/(check|torch|keras)/",  # need torch and Keras: tests/torch, tests/keras
        ],
        env=environment, cwd=here, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
