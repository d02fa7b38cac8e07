# SPDX-License-Identifier: Apache-2.0
import os
import re

from conan import ConanFile
from conan.tools.build import check_min_cppstd
from conan.tools.cmake import CMake, CMakeDeps, CMakeToolchain, cmake_layout
from conan.tools.files import copy, load

required_conan_version = ">=2.0"


class GradaccumConan(ConanFile):
    name = "gradaccum"
    description = "Gradient accumulation and optimizer steps behind a C ABI"
    license = "Apache-2.0"
    topics = ("machine-learning", "training", "optimizer", "gradient-accumulation")
    settings = "os", "arch", "compiler", "build_type"
    package_type = "shared-library"  # the archive is in the package too, as gradaccum::gradaccum_static of CMake
    options = {"openmp": [True, False]}
    default_options = {"openmp": True}

    @property
    def _root(self):
        return os.path.join(self.recipe_folder, "..", "..", "..")

    def set_version(self):
        header = load(self, os.path.join(self._root, "include", "gradaccum", "gradaccum.h"))
        self.version = ".".join(re.findall(r"^#define GA_VERSION_(?:MAJOR|MINOR|PATCH) (\d+)$", header, re.M))

    def export_sources(self):
        for pattern in ("CMakeLists.txt", "LICENSE", "include/*", "src/*", "pkgconfig/*"):
            copy(self, pattern, self._root, self.export_sources_folder)

    def requirements(self):
        self.requires("nlohmann_json/[>=3.9 <4]", visible=False)
        self.requires("xxhash/[>=0.8 <1]", visible=False)

    def validate(self):
        check_min_cppstd(self, 17)

    def layout(self):
        cmake_layout(self)

    def generate(self):
        toolchain = CMakeToolchain(self)
        for name in ("GA_BUILD_TESTS", "GA_BUILD_EXAMPLES", "GA_BUILD_BINDINGS", "GA_ENABLE_ONEDNN", "GA_ENABLE_MPI"):
            toolchain.cache_variables[name] = "OFF"
        toolchain.cache_variables["GA_ENABLE_OPENMP"] = "ON" if self.options.openmp else "OFF"
        for variable, package in (("GA_JSON_INCLUDE_DIR", "nlohmann_json"), ("GA_XXHASH_INCLUDE_DIR", "xxhash")):
            if package in self.dependencies:  # or the profile says that it is the system's
                folders = self.dependencies[package].cpp_info.aggregated_components().includedirs
                toolchain.cache_variables[variable] = folders[0]
        toolchain.generate()
        CMakeDeps(self).generate()

    def build(self):
        cmake = CMake(self)
        cmake.configure()
        cmake.build()

    def package(self):
        copy(self, "LICENSE", self.source_folder, os.path.join(self.package_folder, "licenses"))
        CMake(self).install()

    def package_info(self):
        self.cpp_info.set_property("cmake_find_mode", "none")  # the library brings its own package for CMake
        self.cpp_info.builddirs = ["lib/cmake/gradaccum"]
        self.cpp_info.libs = ["gradaccum"]
