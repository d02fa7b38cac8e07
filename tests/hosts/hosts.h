/* What the blocks of docs/hosts.md need of KANN, llm.c, darknet and ggml, and the training runs that
 * hosts.c makes of these blocks. Backward passes give made-up gradients, in the way of each program.
 * SPDX-License-Identifier: Apache-2.0
 */
#pragma once

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

enum { PARAMETERS = 256, WINDOWS = 12, WINDOW = 24 };

/* The gradient of a sample's loss with respect to parameter j: few bits, so that sums are exact, and
   from 1 down to 2^-15, so that the place of eps shows. */
float sample_gradient(int64_t sample, int64_t j);

/* The end of window w, whose first sample is WINDOW * w. The last one is short if the program allows it. */
int64_t window_end(int64_t w, int ends_short);

/* Each trains PARAMETERS parameters for WINDOWS windows. In darknet's network the first half are
   weights, the other half biases. */
void train_kann(float* parameters);
void train_gpt2(float* parameters);
void train_network(float* parameters);
void train_ggml(float* parameters);

#ifdef __cplusplus
}
#endif
