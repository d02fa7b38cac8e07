// SPDX-License-Identifier: Apache-2.0
// Files of Windows.
//
// A temporary file is open without any sharing, which is its lock: it is there from the moment that the file is, and
// Windows releases it when the process ends. Such a file is renamed and removed by its handle.
#include <aclapi.h>

#include <algorithm>
#include <cstring>
#include <vector>

#include "core/os/files.hpp"
#include "core/os/windows_text.hpp"

namespace ga::os {
namespace {

constexpr DWORD kShareAll = FILE_SHARE_READ | FILE_SHARE_WRITE | FILE_SHARE_DELETE;

HANDLE handle_of(const Handle& handle) { return reinterpret_cast<HANDLE>(handle.get()); }

int last_error() { return static_cast<int>(GetLastError()); }

std::wstring path_in(const Folder& folder, const std::string& name) {
  const bool ends = !folder.path.empty() && folder.path.back() == '\\';
  return wide(folder.path + (ends ? "" : "\\") + name);
}

// The handle is of a folder too, if that has the name.
Handle open(const std::wstring& path, DWORD access, DWORD share, DWORD flags = 0) {
  return Handle(
      reinterpret_cast<intptr_t>(CreateFileW(path.c_str(), access, share, nullptr, OPEN_EXISTING,
                                             flags | FILE_FLAG_BACKUP_SEMANTICS, nullptr)));
}

// Scanners for viruses, and programs that index or copy files, have a file open for a moment. Calls again what fails by
// that, for some two seconds.
template <class Call>
int patiently(Call&& call) {
  constexpr ULONGLONG kMilliseconds = 2000;
  const ULONGLONG start = GetTickCount64();
  for (DWORD pause = 1;; pause = std::min<DWORD>(2 * pause, 16)) {
    const int error = call();
    if (error != ERROR_SHARING_VIOLATION || GetTickCount64() - start > kMilliseconds) return error;
    Sleep(pause);
  }
}

// Whether a file system lacks what was asked for, or the process the right to it.
bool is_lacking(int error) {
  return error == ERROR_INVALID_FUNCTION || error == ERROR_NOT_SUPPORTED ||
         error == ERROR_CALL_NOT_IMPLEMENTED || error == ERROR_ACCESS_DENIED ||
         error == ERROR_PRIVILEGE_NOT_HELD || error == ERROR_INVALID_HANDLE;
}

OVERLAPPED at(int64_t offset) {
  OVERLAPPED where = {};
  where.Offset = static_cast<DWORD>(offset);
  where.OffsetHigh = static_cast<DWORD>(offset >> 32);
  return where;
}

}  // namespace

void Handle::reset(intptr_t value) noexcept {
  if (*this) {
    const DWORD error = GetLastError();
    CloseHandle(handle_of(*this));
    SetLastError(error);
  }
  value_ = value;
}

// ---- Errors -------------------------------------------------------------------------------------

std::string explain(int error) { return message_of(static_cast<DWORD>(error)); }

const int kInputOutput = ERROR_IO_DEVICE, kExists = ERROR_FILE_EXISTS,
          kTooLarge = ERROR_FILE_TOO_LARGE, kTooManyLinks = ERROR_CANT_RESOLVE_FILENAME;

// ---- Names --------------------------------------------------------------------------------------

void split(const std::string& path, std::string* folder, std::string* name) {
  const std::wstring full = full_path(path);
  const size_t slash = full.rfind(L'\\');
  if (slash == std::wstring::npos) {  // not UTF-8: examine() says so
    *folder = ".";
    *name = path;
    return;
  }
  const bool is_device = full.compare(0, 4, L"\\\\.\\") == 0;
  *folder = is_device ? "." : utf8(full.substr(0, slash + 1));
  *name = utf8(full.substr(slash + 1));
}

int open_folder(const Folder&, const std::string& path, Folder* out) {
  // FILE_ADD_FILE is what FlushFileBuffers() asks for. Where another program does not share it, or the process does not
  // have it, there is nothing to be flushed by this handle.
  const std::wstring full = full_path(path);
  Handle folder;
  for (const int access :
       {FILE_LIST_DIRECTORY | FILE_ADD_FILE, FILE_LIST_DIRECTORY, FILE_READ_ATTRIBUTES})
    if (!folder)
      folder = open(full, static_cast<DWORD>(access), FILE_SHARE_READ | FILE_SHARE_WRITE);
  if (!folder) return last_error();
  Entry entry;
  if (const int error = describe(folder, &entry); error != 0) return error;
  if (entry.kind != Kind::kFolder) return ERROR_DIRECTORY;
  // Some file systems of other makers have no final path.
  const std::wstring final_path = text_of([&](wchar_t* to, DWORD room) {
    return GetFinalPathNameByHandleW(handle_of(folder), to, room,
                                     FILE_NAME_NORMALIZED | VOLUME_NAME_DOS);
  });
  out->path = utf8(final_path.empty() ? full : final_path);
  out->handle = std::move(folder);
  return 0;
}

int examine(const Folder& folder, const std::string& name, Entry* out) {
  *out = {};
  if (full_path(name).compare(0, 4, L"\\\\.\\") ==
      0) {  // NUL, CON and so on, which are in every folder
    out->kind = Kind::kDevice;
    return 0;
  }
  const std::wstring path = path_in(folder, name);
  if (path.empty()) return last_error();
  if (name.find(':') != std::string::npos) return ERROR_INVALID_NAME;  // a stream of a file
  const Handle file = open(path, FILE_READ_ATTRIBUTES, kShareAll, FILE_FLAG_OPEN_REPARSE_POINT);
  if (!file) return last_error() == ERROR_FILE_NOT_FOUND ? 0 : last_error();
  FILE_ATTRIBUTE_TAG_INFO tag;
  if (GetFileInformationByHandleEx(handle_of(file), FileAttributeTagInfo, &tag, sizeof tag) &&
      tag.FileAttributes & FILE_ATTRIBUTE_REPARSE_POINT &&
      tag.ReparseTag == IO_REPARSE_TAG_SYMLINK) {
    out->kind = Kind::kLink;
    return 0;
  }
  return describe(file, out);
}

// The end of the whole chain of links.
int read_link(const Folder& folder, const std::string& name, std::string* out) {
  const Handle file = open(path_in(folder, name), FILE_READ_ATTRIBUTES, kShareAll);
  if (!file) return last_error();
  *out = utf8(text_of([&](wchar_t* to, DWORD room) {
    return GetFinalPathNameByHandleW(handle_of(file), to, room,
                                     FILE_NAME_NORMALIZED | VOLUME_NAME_DOS);
  }));
  return out->empty() ? last_error() : 0;
}

int check_writable(const Folder& folder, const std::string& name) {
  const std::wstring path = path_in(folder, name);
  const DWORD attributes = GetFileAttributesW(path.c_str());
  if (attributes != INVALID_FILE_ATTRIBUTES && attributes & FILE_ATTRIBUTE_READONLY)
    return ERROR_ACCESS_DENIED;
  if (open(path, GENERIC_WRITE, kShareAll)) return 0;
  const int error = last_error();
  // Who has the file open will perhaps have closed it when it is replaced.
  return error == ERROR_FILE_NOT_FOUND || error == ERROR_SHARING_VIOLATION ? 0 : error;
}

void each_name(const Folder& folder, const std::function<void(const char*)>& f) noexcept {
  WIN32_FIND_DATAW found;
  const HANDLE list = FindFirstFileExW(path_in(folder, "*").c_str(), FindExInfoBasic, &found,
                                       FindExSearchNameMatch, nullptr, FIND_FIRST_EX_LARGE_FETCH);
  if (list == INVALID_HANDLE_VALUE) return;
  do {
    f(utf8(found.cFileName).c_str());
  } while (FindNextFileW(list, &found));
  FindClose(list);
}

// ---- Writing ------------------------------------------------------------------------------------

int create_locked(const Folder& folder, const std::string& name, bool, Handle* file) {
  constexpr DWORD kAccess =
      GENERIC_WRITE | FILE_READ_ATTRIBUTES | DELETE | READ_CONTROL | WRITE_DAC;
  file->reset(
      reinterpret_cast<intptr_t>(CreateFileW(path_in(folder, name).c_str(), kAccess, 0, nullptr,
                                             CREATE_NEW, FILE_ATTRIBUTE_NORMAL, nullptr)));
  if (*file) return 0;
  return last_error() == ERROR_FILE_EXISTS ? kTaken : last_error();
}

void remove_unlocked(const Folder& folder, const char* name) noexcept {
  DeleteFileW(path_in(folder, name).c_str());
}

void remove_own(const Folder&, const std::string&, const Handle& file) noexcept {
  const DWORD error = GetLastError();
  FILE_DISPOSITION_INFO disposition = {TRUE};
  SetFileInformationByHandle(handle_of(file), FileDispositionInfo, &disposition,
                             sizeof disposition);
  SetLastError(error);
}

// The list of rights. A new file belongs to the user of the process, as other programs have it.
int copy_permissions(const Folder& folder, const std::string& name, const Entry&,
                     const Handle& to) {
  const Handle from = open(path_in(folder, name), READ_CONTROL, kShareAll);
  if (!from) return 0;  // removed since, or its rights are a secret
  PACL rights = nullptr;
  PSECURITY_DESCRIPTOR descriptor = nullptr;
  DWORD error = GetSecurityInfo(handle_of(from), SE_FILE_OBJECT, DACL_SECURITY_INFORMATION, nullptr,
                                nullptr, &rights, nullptr, &descriptor);
  if (error == 0 && rights) {
    SECURITY_DESCRIPTOR_CONTROL control = 0;
    DWORD revision = 0;
    GetSecurityDescriptorControl(descriptor, &control, &revision);
    const DWORD inherits = control & SE_DACL_PROTECTED ? PROTECTED_DACL_SECURITY_INFORMATION
                                                       : UNPROTECTED_DACL_SECURITY_INFORMATION;
    error = SetSecurityInfo(handle_of(to), SE_FILE_OBJECT, DACL_SECURITY_INFORMATION | inherits,
                            nullptr, nullptr, rights, nullptr);
  }
  LocalFree(descriptor);
  return is_lacking(static_cast<int>(error)) ? 0 : static_cast<int>(error);
}

uint64_t file_size_limit() { return UINT64_MAX; }

int reserve_room(const Handle& file, int64_t bytes) {
  LARGE_INTEGER size;
  if (!GetFileSizeEx(handle_of(file), &size) || size.QuadPart >= bytes)
    return 0;  // less would cut the file
  FILE_ALLOCATION_INFO room;
  room.AllocationSize.QuadPart = bytes;
  if (SetFileInformationByHandle(handle_of(file), FileAllocationInfo, &room, sizeof room)) return 0;
  const int error = last_error();
  const bool full = error == ERROR_DISK_FULL || error == ERROR_HANDLE_DISK_FULL ||
                    error == ERROR_DISK_QUOTA_EXCEEDED || error == ERROR_FILE_TOO_LARGE;
  return full ? error : 0;
}

int write_at(const Handle& file, int64_t offset, const void* data, size_t size, size_t* written) {
  OVERLAPPED where = at(offset);
  DWORD count = 0;
  if (!WriteFile(handle_of(file), data, static_cast<DWORD>(std::min<size_t>(size, MAXDWORD)),
                 &count, &where))
    return last_error();
  *written = count;
  return 0;
}

int synchronize(const Handle& file) { return FlushFileBuffers(handle_of(file)) ? 0 : last_error(); }

int check_close(const Handle&) { return 0; }  // FlushFileBuffers() has reported everything

// Windows 10 renames onto a file that others have open too, as long as they share its deletion: they keep the old
// contents. Older file systems do so only if nobody has the file open.
int rename_over(const Folder& folder, const std::string&, const std::string& to,
                const Handle& file) {
  const std::wstring path = path_in(folder, to);
  std::vector<char> memory(sizeof(FILE_RENAME_INFO) + path.size() * sizeof(wchar_t));
  auto* const request = reinterpret_cast<FILE_RENAME_INFO*>(memory.data());
  request->FileNameLength = static_cast<DWORD>(path.size() * sizeof(wchar_t));
  std::memcpy(request->FileName, path.data(), path.size() * sizeof(wchar_t));
  const auto rename = [&](FILE_INFO_BY_HANDLE_CLASS kind, DWORD flags) -> int {
    request->Flags = flags;
    return SetFileInformationByHandle(handle_of(file), kind, request,
                                      static_cast<DWORD>(memory.size()))
               ? 0
               : last_error();
  };
  return patiently([&] {
    int error = rename(FileRenameInfoEx,
                       FILE_RENAME_FLAG_REPLACE_IF_EXISTS | FILE_RENAME_FLAG_POSIX_SEMANTICS);
    if (error != 0 && error != ERROR_SHARING_VIOLATION) error = rename(FileRenameInfo, TRUE);
    // "Access is denied" is also what Windows says of a file that somebody has open, or had a moment ago.
    if (error == ERROR_ACCESS_DENIED &&
        (open(path, DELETE, 0) || last_error() == ERROR_SHARING_VIOLATION))
      error = ERROR_SHARING_VIOLATION;
    return error;
  });
}

int synchronize(const Folder& folder) {
  const int error = synchronize(folder.handle);
  return is_lacking(error) ? 0 : error;
}

// ---- Reading ------------------------------------------------------------------------------------

int open_for_reading(const char* path, Handle* file) {
  const std::wstring full = full_path(path);
  if (full.empty()) return last_error();
  return patiently([&] {
    *file = open(full, GENERIC_READ, kShareAll);
    return *file ? 0 : last_error();
  });
}

int describe(const Handle& file, Entry* out) {
  *out = {};
  const DWORD type = GetFileType(handle_of(file));
  if (type == FILE_TYPE_CHAR || type == FILE_TYPE_PIPE) {
    out->kind = type == FILE_TYPE_CHAR ? Kind::kDevice : Kind::kFifo;
    return 0;
  }
  BY_HANDLE_FILE_INFORMATION found;
  if (!GetFileInformationByHandle(handle_of(file), &found)) return last_error();
  out->kind = found.dwFileAttributes & FILE_ATTRIBUTE_DIRECTORY ? Kind::kFolder : Kind::kFile;
  out->size =
      static_cast<int64_t>(static_cast<uint64_t>(found.nFileSizeHigh) << 32 | found.nFileSizeLow);
  return 0;
}

int read_at(const Handle& file, int64_t offset, void* data, size_t size, size_t* got) {
  if (offset < 0) return ERROR_NEGATIVE_SEEK;
  OVERLAPPED where = at(offset);
  DWORD count = 0;
  if (!ReadFile(handle_of(file), data, static_cast<DWORD>(std::min<size_t>(size, MAXDWORD)), &count,
                &where) &&
      GetLastError() != ERROR_HANDLE_EOF)
    return last_error();
  *got = count;
  return 0;
}

}  // namespace ga::os
