// SPDX-License-Identifier: Apache-2.0
//
// One training step of a stack of dense layers, y = relu(x W^T) and the last one without relu, mean
// squared error, AdamW and clipping by the global norm: forward and backward by oneDNN, the rest by
// the library. Also plain matrix products.
#ifndef GRADACCUM_TESTS_BENCH_STACK_HPP_
#define GRADACCUM_TESTS_BENCH_STACK_HPP_

#include <stdint.h>

extern "C" {

// C (m x n) = op(A) op(B) by oneDNN's matmul, all dense and row-major. a_transposed: A is stored as
// k x m, and so on.
struct stack_matmul;
stack_matmul* stack_matmul_create(int64_t m, int64_t k, int64_t n, int a_transposed,
                                  int b_transposed);
void stack_matmul_run(stack_matmul* product, const float* a, const float* b, float* c);
void stack_matmul_destroy(stack_matmul* product);

// The version of the loaded oneDNN, 100 * major + minor.
int stack_onednn_version(void);

// How weight gradients reach the library.
enum {
  STACK_WRITTEN = 0 /* written out, then ga_accumulate */,
  STACK_MATMUL = 1 /* ga_accumulate_matmul */
};

// weights[layer] is width x width and is trained in place. inputs and targets hold micros x batch x
// width.
struct stack;
stack* stack_create(int layers, int64_t width, int64_t batch, int micros, float* const* weights,
                    const float* inputs, const float* targets, double lr, double max_norm, int way,
                    int threads);
// Runs one window of `micros` micro-batches and its step. Returns 0 on success; otherwise
// stack_error returns the message.
int stack_step(stack* s);
// The mean of the micro-batches' losses in the last step.
double stack_loss(const stack* s);
void stack_destroy(stack* s);

const char* stack_error(void);
}

#endif  // GRADACCUM_TESTS_BENCH_STACK_HPP_
