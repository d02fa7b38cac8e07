# SPDX-License-Identifier: Apache-2.0
# The component torch of the package: the target gradaccum::torch, for programs that include gradaccum/torch.hpp. It is
# made of the folders include and lib of a torch, since find_package(Torch) of the Python index's torch stops without a
# CUDA toolkit. A project that has the sources of gradaccum within may include this file. It reads
#
#   GA_TORCH_ROOT    the folder with include and lib: torch in the packages of a Python, or an unpacked LibTorch
#   GA_TORCH_PYTHON  without GA_TORCH_ROOT: a Python that has torch
#
# and without both searches CMAKE_PREFIX_PATH. A target `torch` that the project has already, by find_package(Torch), is
# used instead. It sets
#
#   gradaccum_torch_FOUND    whether there is a target gradaccum::torch
#   gradaccum_torch_MESSAGE  if not, the reason
#   GA_TORCH_LIBRARY         libtorch.so, which programs that compute on a GPU link besides

set(gradaccum_torch_FOUND FALSE)
set(gradaccum_torch_MESSAGE)
if(TARGET gradaccum::torch)
  set(gradaccum_torch_FOUND TRUE)
  return()
endif()
if(TARGET torch)
  add_library(gradaccum::torch INTERFACE IMPORTED)
  target_link_libraries(gradaccum::torch INTERFACE gradaccum::gradaccum torch)
  set(gradaccum_torch_FOUND TRUE)
  return()
endif()

set(_ga_root "${GA_TORCH_ROOT}")
if(NOT _ga_root AND GA_TORCH_PYTHON)
  # Without importing it, which takes seconds.
  execute_process(
    COMMAND "${GA_TORCH_PYTHON}" -c
            "import importlib.util as u; print(u.find_spec('torch').submodule_search_locations[0])"
    OUTPUT_VARIABLE _ga_root OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET RESULT_VARIABLE _ga_failed)
  if(_ga_failed)
    set(gradaccum_torch_MESSAGE "GA_TORCH_PYTHON is ${GA_TORCH_PYTHON}, which has no torch.")
    return()
  endif()
endif()
set(_ga_where)
if(_ga_root)
  set(_ga_where HINTS "${_ga_root}" NO_DEFAULT_PATH)
endif()
unset(_ga_include)
find_path(_ga_include torch/csrc/api/include/torch/torch.h ${_ga_where} PATH_SUFFIXES include NO_CACHE)
foreach(_ga_name IN ITEMS torch torch_cpu c10)
  unset(_ga_library_${_ga_name})
  find_library(_ga_library_${_ga_name} ${_ga_name} ${_ga_where} PATH_SUFFIXES lib NO_CACHE)
  if(NOT _ga_library_${_ga_name} OR NOT _ga_include)
    if(_ga_root)
      set(gradaccum_torch_MESSAGE "The headers or libraries of torch were not found in ${_ga_root}, which needs the "
                                  "folders include and lib. Set GA_TORCH_ROOT to the folder of a torch that has them.")
    else()
      set(gradaccum_torch_MESSAGE "LibTorch was not found. Set GA_TORCH_ROOT to the folder that has its include and "
                                  "lib, or GA_TORCH_PYTHON to a Python that has torch.")
    endif()
    list(JOIN gradaccum_torch_MESSAGE "" gradaccum_torch_MESSAGE)
    return()
  endif()
endforeach()

# Of the version, and of the C++ that the headers need.
set(_ga_header "${_ga_include}/torch/headeronly/version.h")
if(NOT EXISTS "${_ga_header}")
  set(_ga_header "${_ga_include}/torch/csrc/api/include/torch/version.h")
endif()
file(STRINGS "${_ga_header}" _ga_lines REGEX "^#define TORCH_VERSION_M")
string(REGEX REPLACE "^.*_MAJOR ([0-9]+).*_MINOR ([0-9]+).*$" "\\1.\\2" _ga_version "${_ga_lines}")
if(_ga_version VERSION_LESS 2.1)
  set(gradaccum_torch_MESSAGE
      "The torch in ${_ga_include} is ${_ga_version}, and gradaccum/torch.hpp needs 2.1 or later: see GA_TORCH_ROOT.")
  return()
endif()
set(_ga_standard 17)
file(STRINGS "${_ga_include}/torch/csrc/api/include/torch/all.h" _ga_lines REGEX "^#error C\\+\\+[0-9]+ or later")
if(_ga_lines MATCHES "C\\+\\+([0-9]+)")
  set(_ga_standard ${CMAKE_MATCH_1})
endif()

foreach(_ga_name IN ITEMS torch_cpu c10)
  add_library(gradaccum::lib${_ga_name} SHARED IMPORTED)
  set_target_properties(gradaccum::lib${_ga_name} PROPERTIES IMPORTED_LOCATION "${_ga_library_${_ga_name}}")
endforeach()
add_library(gradaccum::torch INTERFACE IMPORTED)
target_include_directories(gradaccum::torch SYSTEM INTERFACE
  "${_ga_include}" "${_ga_include}/torch/csrc/api/include")
target_compile_features(gradaccum::torch INTERFACE cxx_std_${_ga_standard})
target_link_libraries(gradaccum::torch INTERFACE gradaccum::gradaccum gradaccum::libtorch_cpu gradaccum::libc10)
# Older builds for Python have strings and lists of the C++ runtime's former ABI.
cmake_path(GET _ga_include PARENT_PATH _ga_root)
set(_ga_config "${_ga_root}/share/cmake/Torch/TorchConfig.cmake")
if(EXISTS "${_ga_config}")
  file(STRINGS "${_ga_config}" _ga_lines REGEX "_GLIBCXX_USE_CXX11_ABI=[01]")
  if(_ga_lines MATCHES "_GLIBCXX_USE_CXX11_ABI=([01])")
    target_compile_definitions(gradaccum::torch INTERFACE _GLIBCXX_USE_CXX11_ABI=${CMAKE_MATCH_1})
  endif()
endif()
set(GA_TORCH_LIBRARY "${_ga_library_torch}")
set(gradaccum_torch_FOUND TRUE)
