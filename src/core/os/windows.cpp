// SPDX-License-Identifier: Apache-2.0
// Windows 10 and later, and what runs its programs elsewhere.
#include <malloc.h>

#include <algorithm>
#include <new>
#include <system_error>
#include <thread>
#include <vector>

#include "core/os/system.hpp"
#include "core/os/windows_text.hpp"

namespace ga::os {

// ---- Memory -------------------------------------------------------------------------------------

void* allocate_aligned(size_t bytes, size_t alignment) {
  void* const data = _aligned_malloc(std::max<size_t>(bytes, 1), alignment);
  if (!data) throw std::bad_alloc();
  return data;
}

void free_aligned(void* data) noexcept { _aligned_free(data); }

// Large pages want a privilege that programs do not have: pages of 4 KiB. Addresses that are reserved and never
// committed cost nothing, so the alignment may.
void* map_pages(size_t bytes) {
  if (bytes > SIZE_MAX / 2) throw std::bad_alloc();
  void* const reserved = VirtualAlloc(nullptr, bytes + kHugePage, MEM_RESERVE, PAGE_NOACCESS);
  if (!reserved) throw std::bad_alloc();
  char* const data = static_cast<char*>(reserved) +
                     (kHugePage - reinterpret_cast<uintptr_t>(reserved) % kHugePage) % kHugePage;
  if (VirtualAlloc(data, std::max<size_t>(bytes, 1), MEM_COMMIT, PAGE_READWRITE)) return data;
  VirtualFree(reserved, 0, MEM_RELEASE);
  throw std::bad_alloc();
}

void unmap_pages(void* data, size_t) noexcept {
  MEMORY_BASIC_INFORMATION info;
  if (VirtualQuery(data, &info, sizeof info) != 0) VirtualFree(info.AllocationBase, 0, MEM_RELEASE);
}

// ---- Processors ---------------------------------------------------------------------------------

namespace {

// The largest cache of these levels that the first processor has.
int64_t largest_cache(int from, int to) {
  DWORD bytes = 0;
  GetLogicalProcessorInformation(nullptr, &bytes);
  std::vector<SYSTEM_LOGICAL_PROCESSOR_INFORMATION> all(
      bytes / sizeof(SYSTEM_LOGICAL_PROCESSOR_INFORMATION));
  int64_t size = 0;
  if (all.empty() || !GetLogicalProcessorInformation(all.data(), &bytes)) return size;
  for (const auto& part : all)
    if (part.Relationship == RelationCache && part.ProcessorMask & 1 && part.Cache.Level >= from &&
        part.Cache.Level <= to)
      size = std::max(size, static_cast<int64_t>(part.Cache.Size));
  return size;
}

}  // namespace

int64_t second_level_cache() { return largest_cache(2, 2); }

int64_t last_level_cache() { return largest_cache(1, 4); }

int usable_processors() {
  DWORD_PTR process = 0, system = 0;
  if (!GetProcessAffinityMask(GetCurrentProcess(), &process, &system)) return 1;
  return std::max(1, __builtin_popcountll(process));
}

// ---- Threads ------------------------------------------------------------------------------------

bool start_thread(void (*run)(void*), void* data) {
  try {
    std::thread(run, data).detach();
    return true;
  } catch (const std::system_error&) {
  } catch (const std::bad_alloc&) {
  }
  return false;
}

// ---- Libraries ----------------------------------------------------------------------------------

namespace {

HMODULE own_module(DWORD flags) {
  HMODULE module = nullptr;
  GetModuleHandleExW(flags | GET_MODULE_HANDLE_EX_FLAG_FROM_ADDRESS,
                     reinterpret_cast<LPCWSTR>(&own_module), &module);
  return module;
}

// The library is never unloaded, as CMakeLists.txt has it for other systems (-z nodelete): threads of contexts that
// were not destroyed may still run in it.
[[gnu::constructor]] void stay_loaded() { own_module(GET_MODULE_HANDLE_EX_FLAG_PIN); }

}  // namespace

std::string own_folder() {
  const HMODULE module = own_module(GET_MODULE_HANDLE_EX_FLAG_UNCHANGED_REFCOUNT);
  if (!module) return "";
  const std::string path =
      utf8(text_of([&](wchar_t* to, DWORD room) { return GetModuleFileNameW(module, to, room); }));
  return path.substr(0, path.rfind('\\') + 1);  // npos + 1 is 0
}

std::string library_file(const char* name) { return std::string(name) + ".dll"; }

bool file_exists(const char* path) {
  return GetFileAttributesW(full_path(path).c_str()) != INVALID_FILE_ATTRIBUTES;
}

// What the library needs may be beside it. Neither the current folder nor the PATH is searched.
void* open_library(const char* path) {
  const bool has_folder = std::string(path).find_first_of("/\\") != std::string::npos;
  const std::wstring file = has_folder ? full_path(path) : wide(path);
  const DWORD flags =
      LOAD_LIBRARY_SEARCH_DEFAULT_DIRS | (has_folder ? LOAD_LIBRARY_SEARCH_DLL_LOAD_DIR : 0);
  return LoadLibraryExW(file.c_str(), nullptr, flags);
}

void* find_symbol(void* library, const char* name) {
  return reinterpret_cast<void*>(GetProcAddress(static_cast<HMODULE>(library), name));
}

const char* library_error() {
  const DWORD error = GetLastError();  // which a thread's first use of the text below may change
  thread_local std::string text;
  text = message_of(error);
  return text.c_str();
}

// ---- The process --------------------------------------------------------------------------------

int64_t process_id() { return GetCurrentProcessId(); }

// Not getenv(), which has the text in the code page of the system. Windows has no programs with the rights of another
// user than the one who sets their variables.
const char* trusted_variable(const char* name) {
  thread_local std::string text;
  const std::wstring wanted = wide(name);
  SetLastError(ERROR_SUCCESS);
  text = utf8(text_of(
      [&](wchar_t* to, DWORD room) { return GetEnvironmentVariableW(wanted.c_str(), to, room); }));
  return text.empty() && GetLastError() == ERROR_ENVVAR_NOT_FOUND ? nullptr : text.c_str();
}

void at_fork(void (*)()) {}  // Windows has no fork()

}  // namespace ga::os
