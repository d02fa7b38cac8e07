/* SPDX-License-Identifier: Apache-2.0
 *
 * Looks like a oneDNN of major version FAKE_MAJOR to whoever asks for the version, and ends the
 * process of whoever calls anything else. */
#include <stdlib.h>

typedef struct {
  int major, minor, patch;
  const char* hash;
  unsigned cpu_runtime, gpu_runtime;
} version;

const version* dnnl_version(void) {
  static const version fake = {FAKE_MAJOR, 7, 1, "fake", 2, 0};
  return &fake;
}

void dnnl_sgemm(void) { abort(); }
