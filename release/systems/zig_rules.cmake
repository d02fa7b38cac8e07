# SPDX-License-Identifier: Apache-2.0
# How zig makes what CMake's own rules for a system make in another way. CMake reads this file after them.
foreach(language IN ITEMS C CXX)
  set(CMAKE_${language}_ARCHIVE_CREATE "<CMAKE_AR> ar qc <TARGET> <LINK_FLAGS> <OBJECTS>")
  set(CMAKE_${language}_ARCHIVE_APPEND "<CMAKE_AR> ar q <TARGET> <LINK_FLAGS> <OBJECTS>")
  set(CMAKE_${language}_ARCHIVE_FINISH "<CMAKE_AR> ranlib <TARGET>")
  if(APPLE)  # its linker makes no bundles; a dynamic library can be loaded as one is
    set(CMAKE_SHARED_MODULE_CREATE_${language}_FLAGS "-dynamiclib -Wl,-headerpad_max_install_names")
    set(CMAKE_SHARED_MODULE_LOADER_${language}_FLAG "")
    set(CMAKE_SHARED_LIBRARY_RUNTIME_${language}_FLAG -Wl,-rpath,)  # which CMake knows by the version of an SDK
  endif()
endforeach()
