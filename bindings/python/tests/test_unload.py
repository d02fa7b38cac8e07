# SPDX-License-Identifier: Apache-2.0
"""The natives stay in memory, whoever closes them: OpenMP's threads outlive the passes that they work for.

Python itself never closes an extension; a host that has opened it, or a program that embeds Python, may.
"""

import os
import subprocess
import sys

import pytest

import gradaccum._native

# Opens a shared object, the extension or the library under it, trains on several threads, closes it and waits, 50 times.
PROGRAM = """
import _ctypes, ctypes, sys, threading, time

COUNT = 1 << 17

def checked(status):
    assert status == 0, status

def train(library):
    context, group, param = ctypes.c_void_p(), ctypes.c_int32(), ctypes.c_int32()
    optimizer = ctypes.create_string_buffer(4096)
    data, gradients = (ctypes.c_float * COUNT)(), (ctypes.c_void_p * 1)(ctypes.addressof(gradient))
    checked(library.ga_context_create(None, ctypes.byref(context)))
    checked(library.ga_optimizer_init(optimizer, ctypes.c_size_t(len(optimizer)), 0, 0))
    checked(library.ga_group_add(context, optimizer, ctypes.byref(group)))
    shape = (ctypes.c_int64 * 1)(COUNT)
    checked(library.ga_param_add(context, group, b"p", data, GA_F32, 1, shape, None, ctypes.byref(param)))
    for _ in range(2):
        checked(library.ga_accumulate(context, gradients, ctypes.c_size_t(1), ctypes.c_double(1), None))
    checked(library.ga_step(context, None))
    library.ga_context_destroy(context)
    assert data[0] == data[COUNT - 1] < 0, data[0]
    trained.append(1)

def is_mapped():
    with open("/proc/self/maps") as maps:
        return sys.argv[1] in maps.read()

GA_F32 = int(sys.argv[2])
assert not is_mapped()
gradient = (ctypes.c_float * COUNT)(*[1] * COUNT)
trained = []
for _ in range(50):
    library = ctypes.CDLL(sys.argv[1])
    threads = [threading.Thread(target=train, args=[library]) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    train(library)  # last, on a thread that stays
    _ctypes.dlclose(library._handle)
    time.sleep(0.02)
assert is_mapped(), "it is gone"
print(len(trained))
"""


@pytest.mark.parametrize("which", ["extension", "library"])
def test_closing(which: str) -> None:
    path = gradaccum._native.__file__
    if which == "library":
        path = os.environ.get("GA_LIBRARY", "")
        if not path:
            pytest.skip("GA_LIBRARY does not name the library")
    command = [sys.executable, "-c", PROGRAM, path, str(int(gradaccum.Dtype.F32))]
    # OpenMP's threads wait in a loop, as they do for a while by default, and not in the kernel.
    environment = {**os.environ, "OMP_NUM_THREADS": "2", "OMP_WAIT_POLICY": "active"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "200\n"), done.stderr
