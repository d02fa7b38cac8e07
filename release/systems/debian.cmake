# SPDX-License-Identifier: Apache-2.0
#
# What the toolchain files for Debian's cross compilers have in common. ga_debian_target(<Debian's name> <emulator>) is
# for each of them to call: programs are compiled by the package g++-<name> and run by emulation (qemu-user).
macro(ga_debian_target name emulator)
  set(CMAKE_C_COMPILER ${name}-gcc)
  set(CMAKE_CXX_COMPILER ${name}-g++)
  set(CMAKE_CROSSCOMPILING_EMULATOR ${emulator} -L /usr/${name})

  # Libraries and packages of this machine are for another processor.
  set(CMAKE_FIND_ROOT_PATH /usr/${name})
  set(CMAKE_FIND_ROOT_PATH_MODE_PROGRAM NEVER)
  set(CMAKE_FIND_ROOT_PATH_MODE_INCLUDE ONLY)
  set(CMAKE_FIND_ROOT_PATH_MODE_LIBRARY ONLY)
  set(CMAKE_FIND_ROOT_PATH_MODE_PACKAGE ONLY)
endmacro()
