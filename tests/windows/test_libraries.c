/* SPDX-License-Identifier: Apache-2.0 */
/* test_libraries <gradaccum-0.dll>: two libraries in one process, as two plugins of a host may bring them, each of which
   works; and neither is unloaded, because threads may still run in it. */
#define WIN32_LEAN_AND_MEAN
#include <gradaccum/gradaccum.h>
#include <stdio.h>
#include <string.h>
#include <windows.h>

#define REQUIRE(condition)                                                              \
  do {                                                                                  \
    if (!(condition)) {                                                                 \
      printf("%s:%d: %s, error %lu\n", __FILE__, __LINE__, #condition, GetLastError()); \
      exit(1);                                                                          \
    }                                                                                   \
  } while (0)

typedef struct Library {
  HMODULE module;
#define FUNCTION(name) __typeof__(&ga_##name) name;
#define FUNCTIONS           \
  FUNCTION(context_create)  \
  FUNCTION(context_destroy) \
  FUNCTION(optimizer_init)  \
  FUNCTION(group_add)       \
  FUNCTION(param_add) FUNCTION(accumulate) FUNCTION(step) FUNCTION(last_error) FUNCTION(version)
  FUNCTIONS
#undef FUNCTION
} Library;

static Library opened(const char* path) {
  Library library;
  library.module = LoadLibraryA(path);
  REQUIRE(library.module);
#define FUNCTION(name)                                                                       \
  library.name = (__typeof__(&ga_##name))(void*)GetProcAddress(library.module, "ga_" #name); \
  REQUIRE(library.name);
  FUNCTIONS
#undef FUNCTION
  return library;
}

typedef struct Run {
  ga_context* ctx;
  float data[1000];
} Run;

static void start(const Library* library, Run* run) {
  ga_optimizer adam;
  ga_group group;
  ga_param param;
  const int64_t count = 1000;
  memset(run->data, 0, sizeof run->data);
  REQUIRE(library->context_create(NULL, &run->ctx) == GA_OK);
  REQUIRE(library->optimizer_init(&adam, sizeof adam, GA_OPTIMIZER_ADAM, GA_FLAVOR_TORCH) == GA_OK);
  REQUIRE(library->group_add(run->ctx, &adam, &group) == GA_OK);
  REQUIRE(library->param_add(run->ctx, group, "w", run->data, GA_F32, 1, &count, NULL, &param) ==
          GA_OK);
}

static void train(const Library* library, Run* run) {
  float gradient[1000];
  const void* gradients[] = {gradient};
  for (int i = 0; i < 1000; ++i) gradient[i] = (float)(i - 500) / 64;
  REQUIRE(library->accumulate(run->ctx, gradients, 1, 1, NULL) == GA_OK);
  REQUIRE(library->step(run->ctx, NULL) == GA_OK);
}

int main(int argc, char** argv) {
  char copy[MAX_PATH];
  Library libraries[2];
  Run runs[2];
  REQUIRE(argc == 2);
  REQUIRE(snprintf(copy, sizeof copy, "%s.copy.dll", argv[1]) < MAX_PATH);
  REQUIRE(CopyFileA(argv[1], copy, FALSE));
  libraries[0] = opened(argv[1]);
  libraries[1] = opened(copy);
  REQUIRE(libraries[0].module != libraries[1].module);
  for (int i = 0; i < 2; ++i) start(&libraries[i], &runs[i]);
  for (int k = 0; k < 3; ++k)
    for (int i = 0; i < 2; ++i) train(&libraries[i], &runs[i]);
  REQUIRE(runs[0].data[0] != 0);
  REQUIRE(memcmp(runs[0].data, runs[1].data, sizeof runs[0].data) == 0);

  /* An error is that of its own library. */
  REQUIRE(libraries[0].step(NULL, NULL) == GA_ERROR_INVALID_ARGUMENT);
  REQUIRE(*libraries[0].last_error() && !*libraries[1].last_error());

  libraries[0].context_destroy(runs[0].ctx);
  for (int i = 0; i < 2; ++i) {
    for (int k = 0; k < 3; ++k) FreeLibrary(libraries[i].module);
    REQUIRE(GetModuleHandleA(i == 0 ? argv[1] : copy) == libraries[i].module);
  }
  train(&libraries[1], &runs[1]);
  libraries[1].context_destroy(runs[1].ctx);
  printf("both work, and stay\n");
  return 0;
}
