// SPDX-License-Identifier: Apache-2.0
//
// Yardsticks: what this machine gives to loops that do nothing but move the bytes. They know
// nothing of the library.
#ifndef GRADACCUM_TESTS_BENCH_YARDSTICKS_HPP_
#define GRADACCUM_TESTS_BENCH_YARDSTICKS_HPP_

#include <stdint.h>

extern "C" {

// mix(r, w): r streams read, w of them written in place, one addition each. Chunks of 64 Ki
// elements, each thread has its own, and takes from the others when it is done: the schedule of the
// library.
float yard_mix_1_0(const float* a, int64_t n, int threads);
void yard_mix_1_1(float* a, int64_t n, int threads);
void yard_mix_2_1(float* a, const float* g, int64_t n, int threads);
void yard_mix_4_3(float* p, float* m, float* v, const float* g, int64_t n, int threads);

// The same two, with software prefetching: printed, to show what the plain loops leave.
void yard_mix_2_1_prefetch(float* a, const float* g, int64_t n, int threads);
void yard_mix_4_3_prefetch(float* p, float* m, float* v, const float* g, int64_t n, int threads);

// The same with one stream or two of 16-bit numbers, in bfloat16: read and widened, written as
// upper halves.
void yard_mix_2_1_half(float* a, const uint16_t* g, int64_t n, int threads);
void yard_mix_4_4_half(float* p, float* m, float* v, const float* g, uint16_t* copy, int64_t n,
                       int threads);
void yard_mix_4_3_half(float* p, uint16_t* m, uint16_t* v, const float* g, int64_t n, int threads);
void yard_widen_nt(float* to, const uint16_t* from, int64_t n, int threads);
void yard_add_half_nt(float* to, const uint16_t* a, const uint16_t* b, int64_t n, int threads);
float yard_mix_1_0_half(const uint16_t* a, int64_t n, int threads);

void yard_copy(float* to, const float* from, int64_t n, int threads);
// Non-temporal stores: what is written does not pass through the caches. `to` is a multiple of 64
// bytes.
void yard_copy_nt(float* to, const float* from, int64_t n, int threads);
void yard_add_nt(float* to, const float* a, const float* b, int64_t n, int threads);

// The work of the library's own loops, without a library around it.
void yard_overwrite(float* a, const float* g, float alpha, int64_t n, int threads);
void yard_accumulate(float* a, const float* g, float alpha, int64_t n, int threads);
double yard_overwrite_norm(float* a, const float* g, float alpha, int64_t n, int threads);
void yard_adamw(float* p, float* m, float* v, const float* g, float scale, int64_t n, int threads);

// n floats on huge pages, touched by the threads that will use them, filled with small values of
// both signs. Blocks number 0, 1, 2, ... start at different offsets within a page: loads of streams
// at the same offset falsely wait for earlier stores of another (mix(4, 3) then runs at half its
// speed). Freed by yard_free; NULL when memory is short.
float* yard_alloc(int64_t n, int number, int threads);
void yard_free(float* block);
}

#endif  // GRADACCUM_TESTS_BENCH_YARDSTICKS_HPP_
