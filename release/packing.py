# SPDX-License-Identifier: Apache-2.0
"""Archives whose bytes depend on nothing but the names and contents of their files, and on one time."""

from __future__ import annotations

import base64
import gzip
import hashlib
import io
import os
import pathlib
import tarfile
import time
import zipfile
from collections.abc import Iterable, Mapping

# What an archive gets under a name: the bytes, or a file to read them from. A link is stored as one in a tarball, and
# as what it points to elsewhere.
Content = bytes | pathlib.Path

# The licences of what packages contain, by the names of their texts.
SPDX = {
    "LICENSE": "Apache-2.0",
    "nlohmann-json": "MIT",
    "xxhash": "BSD-2-Clause",
    "libcxx": "Apache-2.0 WITH LLVM-exception",
    "libcxxabi": "Apache-2.0 WITH LLVM-exception",
    "libunwind": "Apache-2.0 WITH LLVM-exception",
    "onednn-LICENSE": "Apache-2.0",
    "onednn-THIRD-PARTY-PROGRAMS": "BSD-3-Clause AND BSL-1.0",  # those of its sources for the CPU
    "libgomp": "GPL-3.0-or-later WITH GCC-exception-3.1",
    "cuda": "LicenseRef-CUDA",
}


def expression_of(licences: Iterable[str]) -> str:
    """The SPDX expression of a package with these texts."""
    terms = {term for path in licences for term in SPDX[pathlib.PurePath(path).stem].split(" AND ")}
    return " AND ".join(sorted(terms))


def contents_of(folder: pathlib.Path) -> dict[str, Content]:
    """All files and links in a folder, by their names relative to it."""
    return {
        str(path.relative_to(folder)): path
        for path in sorted(folder.rglob("*"))
        if path.is_file() or path.is_symlink()
    }


def read(content: Content) -> bytes:
    return content if isinstance(content, bytes) else content.read_bytes()


def is_executable(content: Content) -> bool:
    return isinstance(content, pathlib.Path) and bool(content.stat().st_mode & 0o100)


def write_tar_gz(path: pathlib.Path, files: Mapping[str, Content], when: int) -> None:
    """In the order of names, without owners; gzip's header has neither a name nor a time."""
    plain = io.BytesIO()
    with tarfile.open(fileobj=plain, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for name, content in sorted(files.items()):
            info = tarfile.TarInfo(name)
            info.mtime = when
            info.mode = 0o644
            if isinstance(content, pathlib.Path) and content.is_symlink():
                info.type, info.linkname, info.mode = tarfile.SYMTYPE, os.readlink(content), 0o777
                archive.addfile(info)
                continue
            if is_executable(content):
                info.mode = 0o755
            data = read(content)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    with path.open("wb") as out, gzip.GzipFile("", "wb", 9, out, mtime=0) as packed:
        packed.write(plain.getvalue())


def write_zip(path: pathlib.Path, files: Mapping[str, Content], when: int) -> None:
    """In the order of the mapping: some formats want a certain file first or last."""
    date = time.gmtime(max(when, 315532800))[:6]  # zip's years begin at 1980
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as archive:
        for name, content in files.items():
            info = zipfile.ZipInfo(name, date)
            info.compress_type = zipfile.ZIP_DEFLATED
            info.create_system = 3  # modes as Unix has them
            info.external_attr = (0o100755 if is_executable(content) else 0o100644) << 16
            archive.writestr(info, read(content))


def write_wheel(
    folder: pathlib.Path, name: str, version: str, tags: str, files: Mapping[str, Content], when: int
) -> pathlib.Path:
    """Adds WHEEL and RECORD to the files, which have METADATA already. Tags: python-abi-platforms, with dots."""
    info = f"{name.replace('-', '_')}-{version}.dist-info"
    python, abi, platforms = tags.split("-", 2)
    lines = ["Wheel-Version: 1.0", "Generator: gradaccum release/make", "Root-Is-Purelib: false"]
    lines += [f"Tag: {python}-{abi}-{platform}" for platform in platforms.split(".")]
    whole = dict(sorted(files.items()))
    whole[f"{info}/WHEEL"] = ("\n".join(lines) + "\n").encode()
    record = []
    for path, content in whole.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(read(content)).digest()).rstrip(b"=").decode()
        record.append(f"{path},sha256={digest},{len(read(content))}")
    whole[f"{info}/RECORD"] = ("\n".join([*record, f"{info}/RECORD,,"]) + "\n").encode()
    made = folder / f"{name.replace('-', '_')}-{version}-{tags}.whl"
    write_zip(made, whole, when)
    return made
