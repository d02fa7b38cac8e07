# SPDX-License-Identifier: Apache-2.0
"""The wheel: its tag, its files, and that it trains in an environment that has nothing else."""

import os
import pathlib
import re
import shlex
import subprocess
import sys
import zipfile

import pytest

HERE = pathlib.Path(__file__).parents[1]
NATIVE = ["_native.abi3.so", "libdnnl.so.3", "libgomp.so.1", "libgradaccum.so.0", "libgradaccum_onednn.so"]
OWN = [name for name in NATIVE if "gradaccum" in name or "native" in name]
SYSTEM = {"libc.so.6", "libm.so.6", "ld-linux-x86-64.so.2", "ld-linux-aarch64.so.1"}

# Run by the Python of the environment, which has no numpy.
PROGRAM = """
import array, pathlib, sys
import gradaccum as ga

folder = pathlib.Path(ga.__file__).parent

def loaded():
    lines = pathlib.Path("/proc/self/maps").read_text().splitlines()
    return {pathlib.Path(line.split(maxsplit=5)[5]) for line in lines if ".so" in line}

def matrix(rows, columns, values):
    return memoryview(array.array("f", values)).cast("B").cast("f", [rows, columns])

weight = array.array("f", [0] * 12)
with ga.Context() as context:
    group = context.add_group(ga.Optimizer(ga.OptimizerKind.ADAMW, lr=0.5))
    context.add_param(group, "weight", weight, shape=(4, 3))
    for samples in (32, 32, 7):
        context.accumulate([array.array("f", [samples] * 12)], weight=samples)
    assert context.step().weight == 71
assert all(abs(x + 0.5) < 1e-6 for x in weight), weight
assert not any(path.name.startswith("libstdc++") for path in loaded()), "the C++ runtime of the machine"

product = matrix(2, 3, [0] * 6)
with ga.Context() as context:
    param = context.add_param(context.add_group(ga.Optimizer(ga.OptimizerKind.SGD, lr=1)), "w", product)
    with context.micro_batch() as micro:
        micro.accumulate_matmul(param, matrix(2, 2, [1, 2, 3, 4]), matrix(2, 3, [1, 0, 2, 0, 1, 3]))
    context.step()
assert product.tolist() == [[-1, -2, -8], [-3, -4, -18]], product.tolist()

square = matrix(4, 4, [0] * 16)
with ga.Context() as context:
    muon = context.add_group(ga.Optimizer(ga.OptimizerKind.MUON, lr=1))
    context.add_param(muon, "square", square)
    context.accumulate([matrix(4, 4, [float(i % 5 == 0) for i in range(16)])])
    context.step()
assert all(0.5 < -square[i, i] < 1.5 for i in range(4)), square.tolist()

names = {path.name for path in loaded() if path.parent == folder}
assert names == set(sys.argv[1:]), names
elsewhere = [path for path in loaded() if path.name in names and path.parent != folder]
assert not elsewhere, elsewhere
"""


def run(*command: object, **environment: str) -> str:
    """The output of a command that sees nothing of this build."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("PYTHON") and name not in ("LD_LIBRARY_PATH", "LD_PRELOAD", "GA_MODULE_PATH")
    }
    done = subprocess.run(
        [str(part) for part in command], env={**kept, **environment},
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    options = os.environ.get("GA_WHEEL_OPTIONS")
    if options is None:
        pytest.skip("GA_WHEEL_OPTIONS does not say how to build a wheel")
    folder = tmp_path_factory.mktemp("wheel")
    run(HERE / "wheel", folder, *shlex.split(options), PYTHON=sys.executable)
    (made,) = folder.glob("*.whl")
    return made


@pytest.fixture(scope="module")
def files(wheel: pathlib.Path, tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    folder = tmp_path_factory.mktemp("files")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    return folder


def test_the_tag_is_what_auditwheel_finds(wheel: pathlib.Path) -> None:
    shown = run(sys.executable, "-m", "auditwheel", "show", wheel)
    found = re.search(r'platform\s+tag:\s+"(manylinux_2_(\d+)_\w+)"', shown)
    assert found, shown
    assert wheel.name.endswith(f"-cp311-abi3-{found[1]}.whl")
    assert int(found[2]) <= 35, shown  # Ubuntu 22.04, as the packages for Java and C#


def test_everything_is_in_one_folder(files: pathlib.Path) -> None:
    natives = sorted(path for path in files.rglob("*") if ".so" in path.name)
    assert [path.name for path in natives] == sorted(NATIVE)
    assert {path.parent for path in natives} == {files / "gradaccum"}
    sources = {path.name for path in (HERE / "src" / "gradaccum").glob("*.py*")}
    assert sources < {path.name for path in (files / "gradaccum").iterdir()}
    assert list(files.glob("*.dist-info/licenses/LICENSE"))


def test_pytest_finds_the_plugin(files: pathlib.Path) -> None:
    (entries,) = files.glob("*.dist-info/entry_points.txt")
    assert "[pytest11]\ngradaccum = gradaccum_pytest" in entries.read_text().replace("=", " = ").replace("  ", " ")
    assert (files / "gradaccum_pytest" / "__init__.py").exists()


@pytest.mark.parametrize("name", OWN)
def test_nothing_else_is_needed(files: pathlib.Path, name: str) -> None:
    dynamic = run("readelf", "-dW", files / "gradaccum" / name)
    needed = set(re.findall(r"\(NEEDED\).*\[(.*)\]", dynamic))
    assert needed - SYSTEM <= set(NATIVE)  # neither libstdc++ nor libgcc_s, cuBLAS or NCCL
    assert re.findall(r"\((?:RPATH|RUNPATH)\).*\[(.*)\]", dynamic) == ["$ORIGIN"]
    assert re.search(r"\(FLAGS_1\).*NODELETE", dynamic)  # threads of OpenMP outlive a dlclose()


def test_it_trains_where_there_is_nothing_else(wheel: pathlib.Path, tmp_path: pathlib.Path) -> None:
    run(sys.executable, "-m", "venv", tmp_path / "venv")
    python = tmp_path / "venv" / "bin" / "python"
    run(python, "-m", "pip", "--disable-pip-version-check", "install", "--no-index", wheel)
    (tmp_path / "program.py").write_text(PROGRAM)
    run(python, "-I", tmp_path / "program.py", *NATIVE)
