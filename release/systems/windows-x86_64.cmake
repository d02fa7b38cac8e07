# SPDX-License-Identifier: Apache-2.0
#
# GCC's code for AVX crashes on Windows (GCC bug 54412), so clang it is. Programs are run by Wine.
include("${CMAKE_CURRENT_LIST_DIR}/zig.cmake")
set(CMAKE_SYSTEM_NAME Windows)
set(CMAKE_SYSTEM_PROCESSOR AMD64)
ga_zig_target(x86_64-windows-gnu)
set(CMAKE_CROSSCOMPILING_EMULATOR "${CMAKE_CURRENT_LIST_DIR}/../../tests/windows/wine" "${CMAKE_BINARY_DIR}/wine")
