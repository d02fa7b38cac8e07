# SPDX-License-Identifier: Apache-2.0
# The owner of the repository and the sum of the tag's archive are for the person to fill in who publishes.
vcpkg_from_github(
  OUT_SOURCE_PATH SOURCE_PATH
  REPO "OWNER/libgradaccum"
  REF "v${VERSION}"
  SHA512 0
)
vcpkg_cmake_configure(
  SOURCE_PATH "${SOURCE_PATH}"
  OPTIONS
    -DGA_BUILD_TESTS=OFF
    -DGA_BUILD_EXAMPLES=OFF
    -DGA_BUILD_BINDINGS=OFF
    -DGA_ENABLE_ONEDNN=OFF
    -DGA_ENABLE_MPI=OFF
    "-DGA_JSON_INCLUDE_DIR=${CURRENT_INSTALLED_DIR}/include"
    "-DGA_XXHASH_INCLUDE_DIR=${CURRENT_INSTALLED_DIR}/include"
)
vcpkg_cmake_install()
vcpkg_cmake_config_fixup(CONFIG_PATH lib/cmake/gradaccum)
vcpkg_fixup_pkgconfig()
file(REMOVE_RECURSE "${CURRENT_PACKAGES_DIR}/debug/include")
vcpkg_install_copyright(FILE_LIST "${SOURCE_PATH}/LICENSE")
