#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Compares the headers of safetensors files with the reference implementation.

Usage: safetensors_oracle.py PROGRAM     exits with 77 without the package safetensors, 0.8 or later.

PROGRAM, compiled from safetensors_headers.cpp, reads files with the library and writes their headers
again. What the reference writes, the library must read; what the library writes, the reference. Of
files with random damage both must think the same: what the library accepts, the reference accepts with
the same contents, and the library is stricter only about keys that occur twice and where its message is
one of STRICTER.
"""
import collections
import ctypes
import json
import os
import random
import re
import struct
import subprocess
import sys

try:
    import safetensors
    from safetensors import TensorSpec
except ImportError:
    print("skipped: this Python has no safetensors, 0.8 or later")
    sys.exit(77)

ROUNDS = 20000
SIZES = {"float64": ("F64", 8), "float32": ("F32", 4), "float16": ("F16", 2), "bfloat16": ("BF16", 2),
         "int64": ("I64", 8), "int32": ("I32", 4), "int16": ("I16", 2), "int8": ("I8", 1),
         "uint64": ("U64", 8), "uint32": ("U32", 4), "uint16": ("U16", 2), "uint8": ("U8", 1),
         "bool": ("BOOL", 1), "float8_e4m3fn": ("F8_E4M3", 1), "float8_e5m2": ("F8_E5M2", 1),
         "float8_e8m0fnu": ("F8_E8M0", 1), "complex64": ("C64", 8)}
KNOWN = {name for name, _ in SIZES.values()}
STRICTER = [r"the field .* was unknown", "the control character", "did not end with", "__metadata__ was null",
            "the entry was an array", "too large a number"]
WORDS = [b"-1", b"1e3", b"1.0", b"9223372036854775808", b"18446744073709551616", b"null", b"true", b"{}",
         b"[]", b'""', b"0", b"1", b"8", b'"__metadata__"', b'"w0"', b'"shape"', b'"F4"', b'"U8"', b"\n",
         b"\\u0077", b"\\ud800", b"\xff", b"\0", b",", b":", b"[", b"]", b"{", b"}", b" ", b"//"]
TOKENS = re.compile(rb'"(?:[^"\\]|\\.)*"|[0-9]+|[\[\]{},:]| +')


def join(text, data):
    return struct.pack("<Q", len(text)) + text + data


def split(file):
    length, = struct.unpack("<Q", file[:8])
    return file[8:8 + length], file[8 + length:]


def by_reference(file):
    """Metadata and tensors, or the error's message. The package gives metadata only with NumPy: the
    reference has checked them, but they are read here as JSON."""
    try:
        tensors = {name: (t["dtype"], tuple(t["shape"]), bytes(t["data"]))
                   for name, t in safetensors.deserialize(file)}
        return json.loads(split(file)[0]).get("__metadata__") or {}, tensors
    except safetensors.SafetensorError as error:
        return str(error)


def by_json(file):
    """What a header says that the library has written."""
    text, data = split(file)
    header = json.loads(text)
    metadata = header.pop("__metadata__", {})
    return metadata, {name: (t["dtype"], tuple(t["shape"]), data[slice(*t["data_offsets"])])
                      for name, t in header.items()}


def repeats_a_key(file):
    keys = []
    json.loads(split(file)[0], object_pairs_hook=lambda pairs: keys.append([key for key, _ in pairs]))
    return any(len(set(names)) < len(names) for names in keys)


def by_library(files):
    """For each file, the file with its header written by the library, or the message of the refusal."""
    joined = b"".join(b"%d\n" % len(file) + file for file in files)
    output = subprocess.run([program], input=joined, stdout=subprocess.PIPE, check=True).stdout
    answers = []
    for file in files:
        line, _, output = output.partition(b"\n")
        if line.startswith(b"ok "):
            size = int(line[3:])
            answers.append(output[:size] + split(file)[1])
            output = output[size:]
        else:
            answers.append(line.decode())
    assert not output
    return answers


def random_text():
    tops = (0x20, 0x80, 0x800, 0xD800, 0x110000)
    codes = (random.randrange(random.choice(tops)) for _ in range(random.randrange(8)))
    return "".join(chr(c) for c in codes if not 0xD800 <= c < 0xE000)


def random_file():
    """As the reference writes it."""
    tensors, arrays = {}, []
    for i in range(random.randrange(5)):
        dtype = random.choice(list(SIZES))
        shape = [random.randrange(4) for _ in range(random.randrange(4))]
        size = SIZES[dtype][1]
        for dimension in shape:
            size *= dimension
        name = random.choice([f"w{i}", f"w{i}.{random_text()}"])
        arrays.append(ctypes.create_string_buffer(random.randbytes(size), size or 1))
        tensors[name] = TensorSpec(dtype=dtype, shape=shape, data_ptr=ctypes.addressof(arrays[-1]),
                                   data_len=size)
    metadata = {random_text(): random_text() for _ in range(random.randrange(3))} or None
    return bytes(safetensors.serialize(tensors, metadata=metadata))


def damaged(file):
    text, data = split(file)
    for _ in range(random.choice((1, 1, 1, 2, 3))):
        tokens = list(TOKENS.finditer(text))
        if not tokens:
            break
        token, other = random.choice(tokens), random.choice(tokens)
        numbers = [t for t in tokens if t[0].isdigit()]
        kind = random.randrange(7)
        if kind == 0:  # a bit is flipped
            i = random.randrange(len(text))
            text = text[:i] + bytes([text[i] ^ 1 << random.randrange(8)]) + text[i + 1:]
        elif kind == 1:  # what is between two tokens is removed
            text = text[:min(token.start(), other.start())] + text[max(token.start(), other.start()):]
        elif kind == 2:  # what is between two tokens is repeated
            text = text[:token.start()] + text[other.start():token.start()] + text[token.start():]
        elif kind in (3, 4):  # a token is replaced
            text = text[:token.start()] + random.choice(WORDS) + text[token.end():]
        elif kind == 5 and numbers:  # a number is slightly different
            token = random.choice(numbers)
            number = max(0, int(token[0]) + random.choice((-4, -1, 1, 4)))
            text = text[:token.start()] + b"%d" % number + text[token.end():]
        else:  # the data are
            data = random.choice((data[:-1], data + b"x"))
    return join(text, data)


program = os.path.abspath(sys.argv[1])
failures = 0


def check(holds, what, file):
    global failures
    if not holds:
        failures += 1
        if failures <= 10:
            print(f"failed: {what}\n  {split(file)[0][:2000]!r} and {len(split(file)[1])} bytes")


random.seed(1)
files = [random_file() for _ in range(ROUNDS // 10)]
for file, ours in zip(files, by_library(files)):
    check(not isinstance(ours, str), f"refused what the reference wrote: {ours}", file)
    if not isinstance(ours, str):
        expected = by_reference(file)
        check(by_json(ours) == expected, "other contents than in the reference", file)
        check(by_reference(ours) == expected, "the reference reads other contents", ours)

counts = collections.Counter()
files = [damaged(random.choice(files)) for _ in range(ROUNDS)]
for file, ours in zip(files, by_library(files)):
    theirs = by_reference(file)
    if isinstance(ours, str):
        if isinstance(theirs, str):
            counts["refused by both"] += 1
            continue
        reason = "a key occurred twice" if repeats_a_key(file) else \
            next((r for r in STRICTER if re.search(r, ours)), None)
        check(reason, f"refused what the reference reads: {ours}", file)
        counts[f"refused by the library alone: {reason}"] += 1
    elif isinstance(theirs, str) and any(t[0] not in KNOWN for t in by_json(ours)[1].values()):
        counts["read by the library alone: an unknown dtype"] += 1
    else:
        check(by_json(ours) == theirs, f"accepted; the reference: {theirs}", file)
        counts["read by both"] += 1

print(f"safetensors {safetensors.__version__}")
for what, count in sorted(counts.items()):
    print(f"{count:6} {what}")
if not counts["read by both"] or not counts["refused by both"]:
    print("failed: the damage was too small or too large")
    failures += 1
print(f"{failures} failures")
sys.exit(failures > 0)
