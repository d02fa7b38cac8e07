// SPDX-License-Identifier: Apache-2.0
//
// Yardsticks: the speed of this machine in loops that only move the bytes. They are independent of
// the library.
#ifndef GRADACCUM_TESTS_BENCH_YARDSTICKS_HPP_
#define GRADACCUM_TESTS_BENCH_YARDSTICKS_HPP_

#include <stdint.h>

extern "C" {

// mix(r, w): r streams read, w of them written in place, one addition each. The schedule is the
// library's: each thread has its own chunks of 64 Ki elements, and takes chunks of others when it
// has finished.
float yard_mix_1_0(const float* a, int64_t n, int threads);
void yard_mix_1_1(float* a, int64_t n, int threads);
void yard_mix_2_1(float* a, const float* g, int64_t n, int threads);
void yard_mix_4_3(float* p, float* m, float* v, const float* g, int64_t n, int threads);

// The last two with software prefetching. They are only printed, to show what the plain loops miss.
void yard_mix_2_1_prefetch(float* a, const float* g, int64_t n, int threads);
void yard_mix_4_3_prefetch(float* p, float* m, float* v, const float* g, int64_t n, int threads);

// The same with one or two streams of bfloat16 numbers, which are widened when read and truncated
// to the upper half of the float when written.
void yard_mix_2_1_half(float* a, const uint16_t* g, int64_t n, int threads);
void yard_mix_4_4_half(float* p, float* m, float* v, const float* g, uint16_t* copy, int64_t n,
                       int threads);
void yard_mix_4_3_half(float* p, uint16_t* m, uint16_t* v, const float* g, int64_t n, int threads);
void yard_widen_nt(float* to, const uint16_t* from, int64_t n, int threads);
void yard_add_half_nt(float* to, const uint16_t* a, const uint16_t* b, int64_t n, int threads);
float yard_mix_1_0_half(const uint16_t* a, int64_t n, int threads);

void yard_copy(float* to, const float* from, int64_t n, int threads);
// Non-temporal stores bypass the caches. `to` is aligned to 64 bytes.
void yard_copy_nt(float* to, const float* from, int64_t n, int threads);
void yard_add_nt(float* to, const float* a, const float* b, int64_t n, int threads);

// The work of the library's kernels, without the library around them.
void yard_overwrite(float* a, const float* g, float alpha, int64_t n, int threads);
void yard_accumulate(float* a, const float* g, float alpha, int64_t n, int threads);
double yard_overwrite_norm(float* a, const float* g, float alpha, int64_t n, int threads);
void yard_adamw(float* p, float* m, float* v, const float* g, float scale, int64_t n, int threads);

// Allocates n floats on huge pages, first touched by the threads that will use them, filled with
// small values of both signs. Blocks number 0, 1, 2, ... start at different offsets within a page:
// with equal offsets, loads of one stream falsely wait for earlier stores of another, and mix(4, 3)
// runs at half its speed. Freed by yard_free; returns NULL if out of memory.
float* yard_alloc(int64_t n, int number, int threads);
void yard_free(float* block);
}

#endif  // GRADACCUM_TESTS_BENCH_YARDSTICKS_HPP_
