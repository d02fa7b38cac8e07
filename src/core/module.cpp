// SPDX-License-Identifier: Apache-2.0
#include "core/module.hpp"

#include <dlfcn.h>
#include <link.h>
#include <unistd.h>

#include <string>

#include "core/error.hpp"

namespace ga {
namespace {

// The folder of the library or program that this code is part of; "" if the system does not tell.
std::string own_folder() {
  Dl_info info;
  void* map = nullptr;
  std::string path;
  if (dladdr1(reinterpret_cast<void*>(&open_module), &info, &map, RTLD_DL_LINKMAP) != 0)
    path = static_cast<link_map*>(map)->l_name;
  if (path.empty()) {  // the program itself
    char program[4096];
    const ssize_t length = readlink("/proc/self/exe", program, sizeof program);
    if (length > 0 && length < static_cast<ssize_t>(sizeof program))
      path.assign(program, static_cast<size_t>(length));
  }
  const size_t slash = path.rfind('/');
  return slash == std::string::npos ? "" : path.substr(0, slash + 1);
}

}  // namespace

const void* open_module(const char* name, int32_t abi) {
  const std::string file = std::string("libgradaccum_") + name + ".so";
  std::string path, places;
  if (const char* folder = secure_getenv("GA_MODULE_PATH"); folder && *folder) {
    path = std::string(folder) + "/" + file;
    places = std::string("only in the folder that GA_MODULE_PATH names, ") + folder;
  } else {
    path = own_folder() + file;
    // A module in this folder that does not load is an error: no other one is tried.
    if (access(path.c_str(), F_OK) == 0) {
      places = path;
    } else {
      places = "as " + path + " and where the loader looks";
      path = file;
    }
  }

  // RTLD_LOCAL hides the symbols of the module's libraries from the host. Never closed, because
  // threads of an OpenMP that was loaded with the module may still run.
  void* const handle = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  const auto refuse = [&](const char* problem) {
    const char* text = dlerror();
    fail(GA_ERROR_UNSUPPORTED, "module %s %s (looked %s): %s", file.c_str(), problem,
         places.c_str(), text ? text : "the loader gave no reason");
  };
  if (!handle) refuse("could not be loaded");
  const std::string symbol = std::string("ga_module_") + name;
  const auto entry = reinterpret_cast<ModuleEntry>(dlsym(handle, symbol.c_str()));
  if (!entry) refuse("is not one of this library");

  char reason[512] = "no reason given";
  const void* const table = entry(reason, sizeof reason);
  if (!table) fail(GA_ERROR_UNSUPPORTED, "module %s refused: %s", file.c_str(), reason);
  if (const int32_t its_abi = *static_cast<const int32_t*>(table); its_abi != abi)
    fail(GA_ERROR_UNSUPPORTED,
         "module %s (looked %s) has interface %d, this library needs %d: the two are of different "
         "builds",
         file.c_str(), places.c_str(), its_abi, abi);
  return table;
}

}  // namespace ga
