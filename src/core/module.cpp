// SPDX-License-Identifier: Apache-2.0
#include "core/module.hpp"

#include <string>

#include "core/error.hpp"
#include "core/os/system.hpp"

namespace ga {
namespace {

// needed: a file that is not there is an error.
const void* open_table(const char* name, int32_t abi, bool needed) {
  const std::string file = os::library_file((std::string("gradaccum_") + name).c_str());
  std::string path, places;
  if (const char* folder = os::trusted_variable("GA_MODULE_PATH"); folder && *folder) {
    path = std::string(folder) + "/" + file;
    places = std::string("only in the folder that GA_MODULE_PATH names, ") + folder;
  } else {
    path = os::own_folder() + file;
    // A module in this folder that does not load is an error: no other one is tried.
    if (os::file_exists(path.c_str())) {
      places = path;
    } else {
      places = "as " + path + " and where the loader looks";
      path = file;
    }
  }

  // Never closed, because threads of an OpenMP that was loaded with the module may still run.
  void* const handle = os::open_library(path.c_str());
  const auto refuse = [&](const char* problem) {
    const char* text = os::library_error();
    fail(GA_ERROR_UNSUPPORTED, "module %s %s (looked %s): %s", file.c_str(), problem,
         places.c_str(), text ? text : "the loader gave no reason");
  };
  if (!handle && !needed && !os::file_exists(path.c_str())) return nullptr;
  if (!handle) refuse("could not be loaded");
  const std::string symbol = std::string("ga_module_") + name;
  const auto entry = reinterpret_cast<ModuleEntry>(os::find_symbol(handle, symbol.c_str()));
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

}  // namespace

const void* open_module(const char* name, int32_t abi) { return open_table(name, abi, true); }

const void* find_module(const char* name, int32_t abi) { return open_table(name, abi, false); }

}  // namespace ga
