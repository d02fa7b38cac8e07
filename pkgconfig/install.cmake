# SPDX-License-Identifier: Apache-2.0
# What `cmake --install` copies, and the packages for CMake and pkg-config.

# Print one line at the end instead of one per file: install_manifest.txt in the build folder lists them.
if(PROJECT_IS_TOP_LEVEL AND NOT DEFINED CMAKE_INSTALL_MESSAGE)
  set(CMAKE_INSTALL_MESSAGE NEVER)
endif()

# What programs need when they run, and what those who build them need.
set(runtime COMPONENT gradaccum_runtime)
set(development COMPONENT gradaccum_development)
set(libraries gradaccum)
if(GA_INSTALL_STATIC)
  list(APPEND libraries gradaccum_static)
endif()
install(TARGETS ${libraries} EXPORT gradaccumTargets
        LIBRARY DESTINATION "${CMAKE_INSTALL_LIBDIR}" ${runtime} NAMELINK_COMPONENT gradaccum_development
        ARCHIVE DESTINATION "${CMAKE_INSTALL_LIBDIR}" ${development}
        RUNTIME DESTINATION "${CMAKE_INSTALL_BINDIR}" ${runtime})
if(modules)  # beside the library
  set(module_dir "${CMAKE_INSTALL_LIBDIR}")
  if(WIN32)
    set(module_dir "${CMAKE_INSTALL_BINDIR}")
  endif()
  install(TARGETS ${modules} LIBRARY DESTINATION "${module_dir}" ${runtime})
endif()
install(DIRECTORY include/gradaccum DESTINATION "${CMAKE_INSTALL_INCLUDEDIR}" ${development}
        FILES_MATCHING PATTERN "*.h" PATTERN "*.hpp")

set(package_dir "${CMAKE_INSTALL_LIBDIR}/cmake/gradaccum")
install(EXPORT gradaccumTargets NAMESPACE gradaccum:: DESTINATION "${package_dir}" ${development})
configure_package_config_file(pkgconfig/gradaccumConfig.cmake.in gradaccumConfig.cmake
                              INSTALL_DESTINATION "${package_dir}")
write_basic_package_version_file(gradaccumConfigVersion.cmake COMPATIBILITY SameMajorVersion)
install(FILES "${PROJECT_BINARY_DIR}/gradaccumConfig.cmake" "${PROJECT_BINARY_DIR}/gradaccumConfigVersion.cmake"
              pkgconfig/gradaccumTorch.cmake DESTINATION "${package_dir}" ${development})

# Paths in the .pc file are relative to the file, so that an installed tree can be moved.
set(pc_dir "${CMAKE_INSTALL_FULL_LIBDIR}/pkgconfig")
file(RELATIVE_PATH pc_prefix "${pc_dir}" "${CMAKE_INSTALL_PREFIX}")
file(RELATIVE_PATH pc_libdir "${pc_dir}" "${CMAKE_INSTALL_FULL_LIBDIR}")
file(RELATIVE_PATH pc_includedir "${pc_dir}" "${CMAKE_INSTALL_FULL_INCLUDEDIR}")
foreach(path IN ITEMS pc_prefix pc_libdir pc_includedir)
  string(REGEX REPLACE "/$" "" ${path} "${${path}}")
endforeach()
list(TRANSFORM static_libraries REPLACE "^([^/].*)" "-l\\1" OUTPUT_VARIABLE pc_libs_private)
string(REPLACE "LINKER:" "-Wl," pc_stay_loaded "${stay_loaded}")
list(JOIN pc_libs_private " " pc_libs_private)
set(pc_cflags_private)
if(WIN32)  # else the header says that the functions are in a DLL
  set(pc_cflags_private "Cflags.private: -DGA_STATIC\n")
endif()
configure_file(pkgconfig/gradaccum.pc.in gradaccum.pc @ONLY)
install(FILES "${PROJECT_BINARY_DIR}/gradaccum.pc" DESTINATION "${CMAKE_INSTALL_LIBDIR}/pkgconfig" ${development})

if(PROJECT_IS_TOP_LEVEL)
  install(CODE "message(STATUS \"Installed gradaccum ${PROJECT_VERSION} to \$ENV{DESTDIR}\${CMAKE_INSTALL_PREFIX}; \"
                                \"its files are listed in ${CMAKE_BINARY_DIR}/install_manifest.txt\")")
endif()
