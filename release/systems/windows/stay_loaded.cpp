// SPDX-License-Identifier: Apache-2.0
//
// What is linked with this stays loaded, as CMakeLists.txt has it for other systems (-z nodelete): threads that end later
// call destructors of its thread-local objects.
#include <windows.h>

[[gnu::constructor]] static void stay_loaded() {
  HMODULE module = nullptr;
  GetModuleHandleExW(GET_MODULE_HANDLE_EX_FLAG_PIN | GET_MODULE_HANDLE_EX_FLAG_FROM_ADDRESS,
                     reinterpret_cast<LPCWSTR>(&stay_loaded), &module);
}
