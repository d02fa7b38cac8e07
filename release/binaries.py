# SPDX-License-Identifier: Apache-2.0
"""What the files of systems say of themselves, as LLVM's tools read it. Those for glibc auditwheel reads, which finds no
other C library here."""

from __future__ import annotations

import pathlib
import re
import subprocess

from systems import System

# What a file may need: of Windows 10 and later, and of every macOS; python3.dll comes with Python. Without case.
NEEDED = {
    "windows": r"kernel32\.dll|advapi32\.dll|ntdll\.dll|api-ms-win-crt-[a-z0-9-]+\.dll|python3\.dll|gradaccum-0\.dll",
    "macos": r"/usr/lib/libSystem\.B\.dylib|@rpath/libgradaccum\.0\.dylib",
    "musl": r"libc\.so|libgradaccum\.so\.0",
}
# What it may export. zig's linker for macOS knows no lists: what the C++ runtime means for all of a program goes with it.
EXPORTED = {
    "windows": r"(ga_|Java_|JNI_|CSharp_)\w+|GaFailure|PyInit__native",
    "musl": r"(ga_|Java_|JNI_|CSharp_)\w+|GaFailure|PyInit__native",
    "macos": r"_(ga_|Java_|JNI_|CSharp_)\w+|_GaFailure|_PyInit__native|__Zn[wa]\w+|__Zd[la]\w+|___dso_handle|__mh_dylib_header",
}
OLDEST_MAC = "11.0"


def tool(*command: object) -> str:
    return subprocess.run([str(part) for part in command], stdout=subprocess.PIPE, text=True, check=True).stdout


def exported_by(library: pathlib.Path) -> list[str]:
    """By a library for macOS."""
    return re.findall(r"^[0-9a-f]+ \w (\S+)$", tool("llvm-nm", "-gU", library), re.M)


def faults_of_archive(system: System, archive: pathlib.Path, library: pathlib.Path) -> list[str]:
    """What is wrong with a static library for macOS, beside the shared one."""
    kind, _, processor = system.name.partition("-")
    if kind != "macos":
        return []
    text = tool("llvm-objdump", "--macho", "--private-headers", archive)
    members = tool("llvm-ar", "t", archive).split()
    faults = [f"not all members are for {processor}"] if text.count(f" {processor.upper()} ") != len(members) else []
    if len(re.findall(rf"\bminos {re.escape(OLDEST_MAC)}$", text, re.M)) != len(members):
        faults.append(f"not all members are for macOS from {OLDEST_MAC} on")
    missing = {name for name in exported_by(library) if name.startswith("_ga_")} - set(exported_by(archive))
    return faults + [f"it has no {name}" for name in sorted(missing)]


def faults_of(system: System, path: pathlib.Path) -> list[str]:
    """What is wrong with a library or a module for one of these systems."""
    kind, _, processor = system.name.partition("-")
    faults = []
    if kind == "windows":
        text = tool("llvm-readobj", "--file-headers", "--coff-imports", "--coff-exports", path)
        needed = re.findall(r"^Import \{\n  Name: (\S+)", text, re.M)
        exported = re.findall(r"^Export \{\n.*\n  Name: (\S+)", text, re.M)
        if "IMAGE_FILE_MACHINE_AMD64" not in text:
            faults.append(f"it is not for {processor}")
    elif kind == "macos":
        text = tool("llvm-objdump", "--macho", "--private-headers", path)
        needed = re.findall(r"cmd LC_LOAD\w*_DYLIB\n.*\n\s+name (\S+)", text)
        exported = exported_by(path)
        own = re.findall(r"cmd LC_ID_DYLIB\n.*\n\s+name (\S+)", text)
        if path.name == system.library and own != [f"@rpath/{path.name}"]:
            faults.append(f"its name is {own}")
        if path.name != system.library and "path @loader_path (" not in text:
            faults.append("it does not find the library beside it")
        if processor.upper() not in text.partition("Load command")[0]:
            faults.append(f"it is not for {processor}")
        if not re.search(rf"\bminos {re.escape(OLDEST_MAC)}$", text, re.M):
            faults.append(f"it is not for macOS from {OLDEST_MAC} on")
        if processor == "arm64" and "LC_CODE_SIGNATURE" not in text:
            faults.append("it has no signature, without which no Mac with this processor loads it")
    elif kind == "musl":
        text = tool("llvm-readelf", "-h", "-d", path)
        needed = re.findall(r"\(NEEDED\) .*\[(\S+)\]", text)
        exported = re.findall(r"^[0-9a-f]+ [B-Z] ([^@\s]+)", tool("llvm-nm", "-gD", "--defined-only", path), re.M)
        if {"x86_64": "X86-64", "aarch64": "AArch64"}[processor] not in text:
            faults.append(f"it is not for {processor}")
    else:
        return []
    faults += [f"it needs {name}" for name in needed if not re.fullmatch(NEEDED[kind], name, re.I)]
    faults += [f"it exports {name}" for name in exported if not re.fullmatch(EXPORTED[kind], name)]
    if not needed or not exported:
        faults.append("what it needs and exports could not be read")
    return faults
