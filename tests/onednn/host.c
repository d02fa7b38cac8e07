/* SPDX-License-Identifier: Apache-2.0
 *
 * A program that uses the library beside its own oneDNN, or without one. It checks the result and the
 * message of ga_accumulate_matmul, and that everything else works.
 *
 *   host works
 *   host refuses <words of the message> [library that the program has loaded]
 *   host retries <folder of the module>     the first call is refused, the second is not
 *   host faults <words of the message>      the engine fails during a product
 *   host moves <folder>                     the first call is refused; then the engine of a folder in this one whose name
 *                                           is not in ASCII fails during a product
 *   host refuses_bf16 <words of the message>
 *   host no_device <words of the message>   no device of CUDA, and the reason
 *
 * Exits with 0 if everything is as expected, or 77 if the library to load is not on this machine. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "gradaccum/gradaccum.h"

#ifdef _WIN32
#include <wchar.h>

/* Its tests have no oneDNN for the program to load. */
static const char* load(const char* library) { return library; }
static void look_in(const char* folder, int in_unicode) {
  wchar_t variable[4096];
  swprintf(variable, 4096, L"GA_MODULE_PATH=%hs%ls", folder,
           in_unicode ? L"/gr\u00f6\u00dfe" : L"");
  _wputenv(variable);
}
#else
#include <dlfcn.h>

/* Returns NULL, or why the library was not loaded. */
static const char* load(const char* library) {
  return dlopen(library, RTLD_NOW | RTLD_GLOBAL) ? NULL : dlerror();
}
static void look_in(const char* folder, int in_unicode) {
  char path[4096];
  snprintf(path, sizeof path, "%s%s", folder, in_unicode ? "/gr\303\266\303\237e" : "");
  setenv("GA_MODULE_PATH", path, 1);
}
#endif

#define CHECK(condition)                                                                    \
  do {                                                                                      \
    if (!(condition)) {                                                                     \
      fprintf(stderr, "%s:%d: false: %s\nlast error: %s\n", __FILE__, __LINE__, #condition, \
              ga_last_error());                                                             \
      exit(1);                                                                              \
    }                                                                                       \
  } while (0)

enum { rows = 4, columns = 3, batch = 2 };

static float parameter[rows * columns];
static const float dy[batch * rows] = {1, 2, 3, 4, 5, 6, 7, 8};
static const float x[batch * columns] = {1, 0, -1, 2, 3, -5};

static ga_context* ctx;
static ga_param param;

static void begin(void) {
  static const int64_t shape[2] = {rows, columns};
  ga_optimizer sgd;
  ga_group group;
  CHECK(ga_context_create(NULL, &ctx) == GA_OK);
  CHECK(ga_optimizer_init(&sgd, sizeof sgd, GA_OPTIMIZER_SGD, GA_FLAVOR_TORCH) == GA_OK);
  sgd.lr = 1;
  CHECK(ga_group_add(ctx, &sgd, &group) == GA_OK);
  CHECK(ga_param_add(ctx, group, "w", parameter, GA_F32, 2, shape, NULL, &param) == GA_OK);
}

static ga_window_info window(void) {
  ga_window_info info;
  memset(&info, 0, sizeof info);
  info.struct_size = sizeof info;
  CHECK(ga_window(ctx, &info) == GA_OK);
  return info;
}

static ga_status matmul(void) {
  return ga_accumulate_matmul(ctx, param, batch, dy, rows, GA_TRANSPOSE, x, columns,
                              GA_NO_TRANSPOSE, GA_F32);
}

static float product(int i) {
  return dy[i / columns] * x[i % columns] + dy[rows + i / columns] * x[columns + i % columns];
}

/* Ends the open micro-batch, makes a step, and expects -gradient in the parameter. */
static void finish(int by_part) {
  float gradient[rows * columns];
  ga_step_result result;
  int i;
  for (i = 0; i < rows * columns; ++i) {
    gradient[i] = product(i);
    parameter[i] = 0;
  }
  if (by_part) CHECK(ga_accumulate_part(ctx, param, gradient) == GA_OK);
  CHECK(ga_micro_end(ctx) == GA_OK);
  result.struct_size = sizeof result;
  CHECK(ga_step(ctx, &result) == GA_OK && result.outcome == GA_STEP_APPLIED);
  for (i = 0; i < rows * columns; ++i)
    CHECK(parameter[i] == -gradient[i]); /* small integers: exact */
}

static void expect_refusal(const char* words) {
  ga_window_info before = window(), after;
  CHECK(matmul() == GA_ERROR_UNSUPPORTED);
  after = window();
  printf("%s\n", ga_last_error());
  CHECK(strstr(ga_last_error(), words));
  CHECK(memcmp(&before, &after, sizeof before) == 0);
}

/* Refused in a new group and in one that there is, which stays as it was. */
static void expect_refusal_of_bf16(const char* words) {
  ga_optimizer muon, still;
  ga_group group = -7;
  CHECK(ga_optimizer_init(&muon, sizeof muon, GA_OPTIMIZER_MUON, GA_FLAVOR_TORCH) == GA_OK);
  CHECK(ga_group_add(ctx, &muon, &group) == GA_OK);
  muon.ns_precision = GA_PRECISION_BF16;
  muon.lr = 0.5;
  CHECK(ga_group_set_optimizer(ctx, group, &muon) == GA_ERROR_UNSUPPORTED);
  printf("%s\n", ga_last_error());
  CHECK(strstr(ga_last_error(), words));
  still.struct_size = sizeof still;
  CHECK(ga_group_optimizer(ctx, group, &still) == GA_OK);
  CHECK(still.ns_precision == GA_PRECISION_F32 && still.lr == 1e-3);
  CHECK(ga_group_add(ctx, &muon, &group) == GA_ERROR_UNSUPPORTED && group == 1);
  CHECK(strstr(ga_last_error(), words));
}

static void expect_no_device(const char* words) {
  ga_config config;
  ga_context* none = NULL;
  int32_t count = -1;
  CHECK(ga_device_count(GA_DEVICE_CUDA, &count) == GA_OK && count == 0);
  CHECK(strstr(ga_last_error(), words));
  CHECK(ga_config_init(&config, sizeof config) == GA_OK);
  config.device = GA_DEVICE_CUDA;
  CHECK(ga_context_create(&config, &none) == GA_ERROR_UNSUPPORTED && !none);
  printf("%s\n", ga_last_error());
  CHECK(strstr(ga_last_error(), words));
}

int main(int argc, char** argv) {
  const char* how = argc > 1 ? argv[1] : "";
  const char* words = argc > 2 ? argv[2] : "";
  const char* missing = argc > 3 ? load(argv[3]) : NULL;
  if (missing) {
    printf("skipped: %s\n", missing);
    return 77;
  }
  begin();
  if (strcmp(how, "refuses_bf16") == 0 || strcmp(how, "no_device") == 0) {
    (how[0] == 'r' ? expect_refusal_of_bf16 : expect_no_device)(words);
    ga_context_destroy(ctx);
    return 0;
  }
  CHECK(ga_micro_begin(ctx, 0, 1, NULL) == GA_OK);
  if (strcmp(how, "works") == 0) {
    CHECK(matmul() == GA_OK);
    finish(0);
  } else if (strcmp(how, "refuses") == 0) {
    expect_refusal(words);
    expect_refusal(words);
    finish(1);
  } else if (strcmp(how, "retries") == 0) {
    expect_refusal("has interface 999");
    look_in(words, 0);
    CHECK(matmul() == GA_OK);
    finish(0);
  } else if (strcmp(how, "faults") == 0 || strcmp(how, "moves") == 0) {
    if (how[0] == 'm') {
      expect_refusal("has interface 999");
      look_in(words, 1);
      words = "the engine broke";
    }
    CHECK(matmul() == GA_ERROR_FAULT);
    printf("%s\n", ga_last_error());
    CHECK(strstr(ga_last_error(), words));
    CHECK(window().state == GA_WINDOW_INVALID);
    CHECK(ga_step(ctx, NULL) == GA_ERROR_INVALID_STATE);
    CHECK(ga_discard(ctx) == GA_OK);
    CHECK(ga_micro_begin(ctx, 0, 1, NULL) == GA_OK);
    finish(1);
  } else {
    fprintf(stderr, "host works | refuses | retries | faults | moves | refuses_bf16 | no_device\n");
    return 2;
  }
  ga_context_destroy(ctx);
  return 0;
}
