# SPDX-License-Identifier: Apache-2.0
#
# What the toolchain files beside this one have in common: clang by the package ziglang of the Python index, which
# brings what other systems are compiled and linked with. ga_zig_target(<zig's name>) is for each of them to call.
execute_process(COMMAND "${CMAKE_CURRENT_LIST_DIR}/../../tests/environments" zig
                OUTPUT_VARIABLE python OUTPUT_STRIP_TRAILING_WHITESPACE COMMAND_ERROR_IS_FATAL ANY)
cmake_path(GET python PARENT_PATH zig)
file(GLOB zig "${zig}/../lib/python3*/site-packages/ziglang/zig")

# zig compiles the libraries of a system when it first links for it, which takes minutes: those of C++ once for builds
# that are optimised and once for others, as CMake's checks would be. What is not optimised would want zig's library of
# UndefinedBehaviorSanitizer, which only programs without any optimisation are linked with.
macro(ga_zig_target name)
  set(CMAKE_C_COMPILER "${zig}" cc -target ${name} -O2 -fno-sanitize=undefined)
  set(CMAKE_CXX_COMPILER "${zig}" c++ -target ${name} -O2 -fno-sanitize=undefined)
  foreach(language IN ITEMS C CXX)
    set(CMAKE_${language}_COMPILER_AR "${zig}")
    set(CMAKE_${language}_COMPILER_RANLIB "${zig}")
  endforeach()
  set(CMAKE_AR "${zig}")
  set(CMAKE_RANLIB /bin/true)  # which CMake calls by itself when it installs for macOS: see zig_rules.cmake
  set(CMAKE_USER_MAKE_RULES_OVERRIDE "${CMAKE_CURRENT_LIST_DIR}/zig_rules.cmake")
endmacro()

# Libraries and packages of this machine are for another system.
set(CMAKE_FIND_ROOT_PATH "${CMAKE_CURRENT_LIST_DIR}/none")
set(CMAKE_FIND_ROOT_PATH_MODE_PROGRAM NEVER)
set(CMAKE_FIND_ROOT_PATH_MODE_INCLUDE ONLY)
set(CMAKE_FIND_ROOT_PATH_MODE_LIBRARY ONLY)
set(CMAKE_FIND_ROOT_PATH_MODE_PACKAGE ONLY)
