# SPDX-License-Identifier: Apache-2.0
"""The systems that packages are made for. One that is added here has a toolchain file of its name in systems/."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class System:
    name: str
    wheel: str  # platform tags, with dots between them
    java: str  # the folder of its natives in the jar
    dotnet: str  # its runtime identifier
    library: str = "libgradaccum.so.0"  # the file that programs load: the name within the library itself
    shim: str = "libgradaccum_{}.so"  # what Java and C# load
    python: str = "_native.abi3.so"  # and Python
    closes_archive: bool = True  # the static library brings its C++ runtime
    archive: str = ".tar.gz"
    classifier: str = "POSIX :: Linux"  # of the Python index


MAC = {
    "library": "libgradaccum.0.dylib", "shim": "libgradaccum_{}.dylib", "closes_archive": False, "classifier": "MacOS"
}  # fmt: skip
WINDOWS = {
    "library": "gradaccum-0.dll", "shim": "gradaccum_{}.dll", "python": "_native.pyd", "closes_archive": False,
    "archive": ".zip", "classifier": "Microsoft :: Windows",
}  # fmt: skip

SYSTEMS = {
    system.name: system
    for system in (
        System("linux-x86_64", "manylinux2014_x86_64.manylinux_2_17_x86_64", "linux-x86_64", "linux-x64"),
        System("linux-aarch64", "manylinux2014_aarch64.manylinux_2_17_aarch64", "linux-aarch64", "linux-arm64"),
        System("musl-x86_64", "musllinux_1_2_x86_64", "linux-musl-x86_64", "linux-musl-x64"),
        System("musl-aarch64", "musllinux_1_2_aarch64", "linux-musl-aarch64", "linux-musl-arm64"),
        System("windows-x86_64", "win_amd64", "windows-x86_64", "win-x64", **WINDOWS),
        System("macos-arm64", "macosx_11_0_arm64", "macos-aarch64", "osx-arm64", **MAC),
        System("macos-x86_64", "macosx_11_0_x86_64", "macos-x86_64", "osx-x64", **MAC),
    )
}
