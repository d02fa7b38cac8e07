// SPDX-License-Identifier: Apache-2.0
// What every exported function does before and after its work: checks pointers and the structs that it is given, and
// makes the call on a context inside guard().
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>

#include "context/context.hpp"
#include "core/error.hpp"

struct ga_context final : ga::Context {
  using Context::Context;
};
struct ga_comm final {
  std::shared_ptr<ga::Comm> comm;  // which contexts may keep longer
};

namespace ga::api {

constexpr size_t kLargestStruct = 1 << 16;  // a larger struct_size is garbage

// Sizes of the structs in the first release: no program was compiled with a smaller one.
template <class T>
constexpr size_t first_size(const T*) {
  return sizeof(T);
}
constexpr size_t first_size(const ga_config*) { return offsetof(ga_config, seed); }
constexpr size_t first_size(const ga_memory*) { return offsetof(ga_memory, masters); }
constexpr size_t first_size(const ga_optimizer*) { return offsetof(ga_optimizer, rho); }
constexpr size_t first_size(const ga_schedule*) { return offsetof(ga_schedule, first_step); }
constexpr size_t first_size(const ga_clip*) { return offsetof(ga_clip, agc_factor); }
constexpr size_t first_size(const ga_param_options*) { return offsetof(ga_param_options, master); }
constexpr size_t first_size(const ga_step_result*) { return offsetof(ga_step_result, skipped); }

template <class T>
void require(const T* pointer, const char* name) {
  if (!pointer) fail(GA_ERROR_INVALID_ARGUMENT, "%s was NULL", name);
}

template <class T>
void check_size(size_t size, const char* type) {
  constexpr size_t first = first_size(static_cast<const T*>(nullptr));
  if (size < first || size > kLargestStruct)
    fail(GA_ERROR_INVALID_ARGUMENT,
         "struct_size of %s was %zu, expected sizeof(%s), at least %zu (%zu in this version of the "
         "library)",
         type, size, type, first, sizeof(T));
}

// The library's defaults, overwritten by the struct that the caller filled, unless that is NULL.
template <class T>
T read_struct(const T* given, T defaults, const char* type) {
  if (!given) return defaults;
  const size_t size = given->struct_size;
  check_size<T>(size, type);
  const auto* bytes = reinterpret_cast<const unsigned char*>(given);
  if (std::any_of(bytes + std::min(size, sizeof(T)), bytes + size,
                  [](unsigned char b) { return b != 0; }))
    fail(
        GA_ERROR_UNSUPPORTED,
        "%s of %zu bytes has fields set that this version of the library (%zu bytes) does not know",
        type, size, sizeof(T));
  std::memcpy(&defaults, given, std::min(size, sizeof(T)));
  defaults.struct_size = sizeof(T);
  return defaults;
}

// set(NULL), or set() with a struct as read_struct() returns it.
template <class T, class Set>
void set_struct(const T* given, T (*defaults)(), const char* type, Set&& set) {
  if (!given) return set(nullptr);
  const T s = read_struct(given, defaults(), type);
  set(&s);
}

// A struct that the library fills: fields that only the caller knows become 0.
template <class T>
void check_out(const T* out, const char* type) {
  require(out, type);
  check_size<T>(out->struct_size, type);
}

template <class T>
void write_struct(T* out, const T& value) {
  const size_t size = out->struct_size;
  std::memset(static_cast<void*>(out), 0, size);
  std::memcpy(static_cast<void*>(out), &value, std::min(size, sizeof(T)));
  out->struct_size = size;
}

// Writes the defaults to a struct of the caller, but no byte after the fields that the library
// knows.
template <class T>
void init_struct(T* out, size_t size, T defaults, const char* type) {
  require(out, type);
  check_size<T>(size, type);
  defaults.struct_size = std::min(size, sizeof(T));
  std::memcpy(static_cast<void*>(out), &defaults, defaults.struct_size);
}

inline void check_reserved(const char* type, int32_t value) {
  if (value != 0) fail(GA_ERROR_INVALID_ARGUMENT, "%s: reserved was %d, expected 0", type, value);
}

// A struct whose defaults are zeros.
template <class T>
T zeros() {
  T t = {};
  t.struct_size = sizeof t;
  return t;
}

template <class T>
ga_status init_zeros(T* out, size_t size, const char* type) {
  return guard([&] { init_struct(out, size, zeros<T>(), type); });
}

// A flag of the caller's.
inline bool flag(const char* name, int32_t value) {
  ga::check_choice(name, value, 1, "0 or 1");
  return value != 0;
}

// An id for the caller, who may not want it.
template <class Id>
void give(Id* out, Id id) {
  if (out) *out = id;
}

// Runs body() as a call of that function on ctx. changing: whether it does more than ask.
template <class Use, class Body>
ga_status call(const ga_context* ctx, bool changing, const char* function, Body& body) {
  ga_status status = GA_OK;
  const ga_status refused = guard([&] {
    require(ctx, "ctx");
    const Use use(*ctx, function, changing);
    if (ga::Log* const log = ctx->log())
      status = log->call(function, body);
    else
      body();
  });
  return refused != GA_OK ? refused : status;
}

// function: the name of the caller, an exported function.
template <class Body>
ga_status on(ga_context* ctx, Body&& body, const char* function = __builtin_FUNCTION()) {
  return call<Context::Use>(ctx, true, function, body);
}

// As on(), for the functions that several threads may call at once with ga_config.eager.
template <class Body>
ga_status contribute(ga_context* ctx, Body&& body, const char* function = __builtin_FUNCTION()) {
  if (ctx && ctx->callers()) return call<Context::SharedUse>(ctx, true, function, body);
  return call<Context::Use>(ctx, true, function, body);
}

// As on(), for functions that only ask: they are legal while parameters and EMA are exchanged.
template <class Body>
ga_status ask(const ga_context* ctx, Body&& body, const char* function = __builtin_FUNCTION()) {
  return call<Context::Use>(ctx, false, function, body);
}

}  // namespace ga::api
