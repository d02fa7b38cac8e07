# SPDX-License-Identifier: Apache-2.0
"""What the files for systems that are not here say of themselves, as LLVM's tools read it."""

from __future__ import annotations

import pathlib
import re
import subprocess

from systems import System

# What every installation of the system has, by names in lower case; python3.dll comes with Python.
OF_WINDOWS = re.compile(r"kernel32\.dll|advapi32\.dll|ntdll\.dll|api-ms-win-crt-[a-z0-9-]+\.dll|python3\.dll|gradaccum-0\.dll")
OF_MAC = re.compile(r"/usr/lib/libsystem\.b\.dylib|@rpath/libgradaccum\.0\.dylib")
OLDEST_MAC = "11.0"


def objdump(*arguments: object) -> str:
    return subprocess.run(["llvm-objdump", *map(str, arguments)], stdout=subprocess.PIPE, text=True, check=True).stdout


def faults_of(system: System, path: pathlib.Path) -> list[str]:
    """What is wrong with a library or a module for Windows or macOS; what is for Linux, auditwheel reads."""
    if system.name.startswith("windows"):
        text = objdump("-p", path)
        needed, allowed = re.findall(r"DLL Name: (\S+)", text), OF_WINDOWS
        faults = [] if "coff-x86-64" in text else ["it is not for x86-64"]
    elif system.name.startswith("macos"):
        text = objdump("--macho", "--private-headers", path)
        own = re.findall(r"cmd LC_ID_DYLIB\n.*\n\s+name (\S+)", text)
        needed, allowed = re.findall(r"cmd LC_LOAD\w*_DYLIB\n.*\n\s+name (\S+)", text), OF_MAC
        faults = []
        if path.name == system.library and own != [f"@rpath/{path.name}"]:
            faults.append(f"its name is {own}")
        if path.name != system.library and "path @loader_path (" not in text:
            faults.append("it does not find the library beside it")
        if not re.search(rf"\bminos {re.escape(OLDEST_MAC)}$", text, re.M):
            faults.append(f"it is not for macOS from {OLDEST_MAC} on")
        if system.name.endswith("arm64") and "LC_CODE_SIGNATURE" not in text:
            faults.append("it has no signature, without which no Mac with this processor loads it")
    else:
        return []
    faults += [f"it needs {name}" for name in needed if not allowed.fullmatch(name.lower())]
    return faults if needed else [*faults, "what it needs could not be read"]
