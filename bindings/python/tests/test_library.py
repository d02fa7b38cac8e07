# SPDX-License-Identifier: Apache-2.0
"""Which library the package gets where gradaccum_cuda is installed: folders as pip makes them, with this build's library."""

import os
import pathlib
import shutil
import subprocess
import sys

import pytest

import gradaccum

BUILT = pathlib.Path(gradaccum.__file__).parent
LIBRARY = pathlib.Path(os.environ.get("GA_LIBRARY", ""))
NAME = "libgradaccum.so.0"

pytestmark = pytest.mark.skipif(not LIBRARY.is_file(), reason="GA_LIBRARY does not name the library")

# Prints which libraries the process has.
PROGRAM = """
import gradaccum
print(*sorted({line.split(maxsplit=5)[5].strip() for line in open("/proc/self/maps") if "/libgradaccum.so" in line}))
"""
REASON = "import gradaccum as ga; print(ga.no_device_reason(ga.Device.CUDA))"
CONTEXT = "import gradaccum as ga; ga.Context(ga.Config(device=ga.Device.CUDA))"


class Site:
    """A folder with the package as its wheel has it, for Linux x86-64."""

    def __init__(self, folder: pathlib.Path) -> None:
        self.folder = folder
        shutil.copytree(BUILT, folder / "gradaccum", ignore=shutil.ignore_patterns("__pycache__", "keras", "torch", "check"))
        shutil.copyfile(LIBRARY, folder / "gradaccum" / NAME)
        self.describe("gradaccum", gradaccum.__version__, "Provides-Extra: cuda\n")

    def describe(self, name: str, version: str, more: str = "") -> None:
        info = self.folder / f"{name}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.4\nName: {name}\nVersion: {version}\n{more}")

    def add_cuda(self, version: str = gradaccum.__version__) -> pathlib.Path:
        """Returns the path of its library."""
        cuda = self.folder / "gradaccum_cuda"
        cuda.mkdir()
        (cuda / "__init__.py").touch()
        shutil.copyfile(LIBRARY, cuda / NAME)
        self.describe("gradaccum_cuda", version)
        return cuda / NAME

    def run(self, program: str, **environment: str) -> str:
        """The output, and what it ended with."""
        kept = {name: value for name, value in os.environ.items() if name not in ("LD_LIBRARY_PATH", "GA_MODULE_PATH")}
        return subprocess.run(
            [sys.executable, "-c", program], cwd=self.folder, env={**kept, "PYTHONPATH": str(self.folder), **environment},
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        ).stdout.strip()  # fmt: skip


@pytest.fixture
def site(tmp_path: pathlib.Path) -> Site:
    return Site(tmp_path)


def test_the_library_of_gradaccum_cuda_is_the_only_one(site: Site) -> None:
    library = site.add_cuda()
    assert site.run(PROGRAM) == str(library)
    assert site.run("import gradaccum.options" + PROGRAM) == str(library)


def test_another_version_is_refused(site: Site) -> None:
    site.add_cuda("0.0.1")
    last = site.run(PROGRAM).splitlines()[-1]
    assert last == (
        f"ImportError: gradaccum is {gradaccum.__version__}, but gradaccum_cuda, which has the library for GPUs, is 0.0.1: "
        f"pip install 'gradaccum[cuda]=={gradaccum.__version__}', or pip uninstall gradaccum-cuda"
    )


def test_a_library_that_does_not_load_is_refused(site: Site) -> None:
    site.add_cuda().write_bytes(b"")
    last = site.run(PROGRAM).splitlines()[-1]
    assert last.startswith("ImportError: the library of gradaccum_cuda could not be loaded: ")


def test_nothing_is_loaded_without_it(site: Site) -> None:
    loaded, costly = site.run(PROGRAM + "import sys; print('importlib.metadata' in sys.modules)").splitlines()
    assert "gradaccum_cuda" not in loaded
    assert costly == "False"


def test_a_folder_of_a_build_keeps_its_library(site: Site) -> None:
    library = site.add_cuda()
    (site.folder / "gradaccum" / NAME).unlink()
    assert str(library) not in site.run(PROGRAM)


def test_a_module_of_the_package_keeps_its_library(site: Site) -> None:
    library = site.add_cuda()
    (site.folder / "gradaccum" / "libgradaccum_cuda.so").touch()
    assert str(library) not in site.run(PROGRAM)


def test_a_library_that_the_program_names_stays(site: Site, tmp_path_factory: pytest.TempPathFactory) -> None:
    site.add_cuda()
    folder = tmp_path_factory.mktemp("own")
    shutil.copyfile(LIBRARY, folder / NAME)
    own = str(folder / NAME)
    assert site.run(PROGRAM, LD_LIBRARY_PATH=f"/nowhere:{folder}") == own
    assert site.run(f"import ctypes; ctypes.CDLL({own!r})" + PROGRAM) == own


def test_it_says_how_to_install_the_module(site: Site) -> None:
    for program in (REASON, CONTEXT):
        said = site.run(program, GA_MODULE_PATH=str(site.folder)).splitlines()[-1]
        assert "module libgradaccum_cuda.so could not be loaded" in said
        assert said.endswith("; pip install 'gradaccum[cuda]' installs this module")


def test_it_does_not_name_a_package_that_is_there_or_is_not_made(site: Site) -> None:
    site.add_cuda()
    assert site.run(REASON, GA_MODULE_PATH=str(site.folder)).endswith("No such file or directory")
    shutil.rmtree(site.folder / "gradaccum_cuda")
    shutil.rmtree(site.folder / f"gradaccum-{gradaccum.__version__}.dist-info")
    site.describe("gradaccum", gradaccum.__version__)  # as of another system
    assert site.run(REASON, GA_MODULE_PATH=str(site.folder)).endswith("No such file or directory")
