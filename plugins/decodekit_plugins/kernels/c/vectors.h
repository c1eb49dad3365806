/* Sixteen floats at a time, in the vector language that GCC and Clang share: each machine gets its own instructions.

   Elements are stored as float (0), bfloat16 (1) or float16 (2); sums are kept in float. */
#ifndef DECODEKIT_VECTORS_H
#define DECODEKIT_VECTORS_H

#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define LANES 16
#define INLINE static inline __attribute__((always_inline))
enum { FLOAT = 0, BFLOAT = 1, HALF = 2, BOOL = 3 };

typedef float V __attribute__((vector_size(64)));
typedef uint32_t U __attribute__((vector_size(64)));
typedef int32_t I __attribute__((vector_size(64)));
typedef float V8 __attribute__((vector_size(32)));
typedef float V4 __attribute__((vector_size(16)));
typedef float LooseV __attribute__((vector_size(64), aligned(4), may_alias));
typedef uint16_t H __attribute__((vector_size(32)));
typedef uint16_t LooseH __attribute__((vector_size(32), aligned(2), may_alias));
typedef _Float16 F __attribute__((vector_size(32)));
typedef _Float16 LooseF __attribute__((vector_size(32), aligned(2), may_alias));

INLINE V all(float x) { return (V){x, x, x, x, x, x, x, x, x, x, x, x, x, x, x, x}; } /* one load, where x is in memory */

INLINE V from_float(const float *p) { return *(const LooseV *)p; }
#ifdef __AVX512F__ /* what some compilers do in halves, or one by one */
#include <immintrin.h>
INLINE V from_bfloat(const uint16_t *p) {
    return (V)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i_u *)p)), 16);
}
INLINE V from_half(const _Float16 *p) { return (V)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i_u *)p)); }
INLINE F to_half(V x) { return (F)_mm512_cvtps_ph((__m512)x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
#else
INLINE V from_bfloat(const uint16_t *p) { return (V)(__builtin_convertvector(*(const LooseH *)p, U) << 16); }
INLINE V from_half(const _Float16 *p) { return __builtin_convertvector(*(const LooseF *)p, V); }
INLINE F to_half(V x) { return __builtin_convertvector(x, F); }
#endif

INLINE H to_bfloat(V x) { /* round to nearest, ties to even; what is no number stays none */
    U u = (U)x, nan = (U)(x != x);
    u = (u + 0x7fff + ((u >> 16) & 1)) & ~nan;
    return __builtin_convertvector((u | (nan & 0x7fc00000)) >> 16, H);
}

INLINE size_t bytes(int type) { return type == FLOAT ? 4 : type == BOOL ? 1 : 2; }
INLINE void *at(const void *p, int type, long i) { return (char *)p + i * (long)bytes(type); }

INLINE V load(const void *p, int type, long i) {
    if (type == FLOAT) return from_float((const float *)p + i);
    if (type == BFLOAT) return from_bfloat((const uint16_t *)p + i);
    return from_half((const _Float16 *)p + i);
}

INLINE float number(const void *p, int type, long i) {
    return type == FLOAT    ? ((const float *)p)[i]
           : type == BFLOAT ? (union { uint32_t u; float f; }){(uint32_t)((const uint16_t *)p)[i] << 16}.f
                            : (float)((const _Float16 *)p)[i];
}

INLINE void store(void *p, int type, long i, V x) {
    if (type == FLOAT) *(LooseV *)((float *)p + i) = x;
    else if (type == BFLOAT) *(LooseH *)((uint16_t *)p + i) = to_bfloat(x);
    else *(LooseF *)((_Float16 *)p + i) = to_half(x);
}

/* The first n elements, n < LANES; zeros behind them. */
INLINE V load_some(const void *p, int type, long i, long n) {
    char some[64] = {0};
    memcpy(some, at(p, type, i), n * bytes(type));
    return load(some, type, 0);
}

INLINE void store_some(void *p, int type, long i, V x, long n) {
    char some[64];
    store(some, type, 0, x);
    memcpy(at(p, type, i), some, n * bytes(type));
}

/* Room for so many; there is nobody to tell where there is none, but a word is better than a fault. */
INLINE float *floats(size_t count) {
    float *room = aligned_alloc(64, (count * sizeof(float) + 64) / 64 * 64);
    if (!room) {
        fprintf(stderr, "decodekit: no memory for %zu numbers in a kernel\n", count);
        abort();
    }
    return room;
}

#define FOR_LANES(i, count) for (long i = 0; i < (count); i += LANES)
INLINE V get(const void *p, int type, long i, long end) {
    return end - i >= LANES ? load(p, type, i) : load_some(p, type, i, end - i);
}
INLINE void put(void *p, int type, long i, long end, V x) {
    if (end - i >= LANES) store(p, type, i, x);
    else store_some(p, type, i, x, end - i);
}

INLINE float sum(V x) {
    union { V v; V8 h[2]; } a = {x};
    union { V8 v; V4 h[2]; } b = {a.h[0] + a.h[1]};
    V4 c = b.h[0] + b.h[1];
    return (c[0] + c[2]) + (c[1] + c[3]);
}

/* The sums of sixteen vectors, side by side. */
#define PAIR(a, b, A, B) (__builtin_shufflevector(a, b, A) + __builtin_shufflevector(a, b, B))
#define EVEN 0, 16, 2, 18, 4, 20, 6, 22, 8, 24, 10, 26, 12, 28, 14, 30
#define ODD 1, 17, 3, 19, 5, 21, 7, 23, 9, 25, 11, 27, 13, 29, 15, 31
#define EVEN2 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29
#define ODD2 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31
#define EVEN4 0, 1, 2, 3, 16, 17, 18, 19, 8, 9, 10, 11, 24, 25, 26, 27
#define ODD4 4, 5, 6, 7, 20, 21, 22, 23, 12, 13, 14, 15, 28, 29, 30, 31
#define EVEN8 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23
#define ODD8 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31
INLINE V sums_of(const V *x) {
    V a[8], b[4], c[2];
    for (int i = 0; i < 8; i++) a[i] = PAIR(x[2 * i], x[2 * i + 1], EVEN, ODD);
    for (int i = 0; i < 4; i++) b[i] = PAIR(a[2 * i], a[2 * i + 1], EVEN2, ODD2);
    for (int i = 0; i < 2; i++) c[i] = PAIR(b[2 * i], b[2 * i + 1], EVEN4, ODD4);
    return PAIR(c[0], c[1], EVEN8, ODD8);
}

/* Sixteen vectors of sixteen, rows for columns. */
INLINE void transpose(V *x) {
#define SWAP(A, B, LOW, HIGH) { V a = x[A], b = x[B]; x[A] = __builtin_shufflevector(a, b, LOW); x[B] = __builtin_shufflevector(a, b, HIGH); }
#define LOW1 0, 16, 2, 18, 4, 20, 6, 22, 8, 24, 10, 26, 12, 28, 14, 30
#define HIGH1 1, 17, 3, 19, 5, 21, 7, 23, 9, 25, 11, 27, 13, 29, 15, 31
    for (int i = 0; i < 16; i += 2) SWAP(i, i + 1, LOW1, HIGH1)
    for (int i = 0; i < 16; i++) if (!(i & 2)) SWAP(i, i + 2, EVEN2, ODD2)
    for (int i = 0; i < 16; i++) if (!(i & 4)) SWAP(i, i + 4, EVEN4, ODD4)
    for (int i = 0; i < 8; i++) SWAP(i, i + 8, EVEN8, ODD8)
#undef SWAP
}

INLINE V where(I mask, V yes, V no) { return (V)((mask & (I)yes) | (~mask & (I)no)); }
INLINE V greater(V a, V b) { return where(a > b, a, b); }
INLINE float greatest(V x) {
    float best = x[0];
    for (int i = 1; i < LANES; i++) best = x[i] > best ? x[i] : best;
    return best;
}

/* e to the x, to two units in the last place; 0 below -87, and what is no number stays none. */
INLINE V exponential(V x) {
    V y = where(x > all(88.0f), all(88.0f), where(x < all(-87.0f), all(-87.0f), x));
    V turns = y * 1.44269504f + 12582912.0f; /* rounds: what is added leaves no bits for a fraction */
    I power = (I)turns - 0x4b400000;
    turns -= 12582912.0f;
    V r = y - turns * 0.693359375f + turns * 2.12194440e-4f;
    V p = all(1.9875691500e-4f);
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    p = (V)((I)p + (power << 23));
    p = where(x < all(-87.0f), all(0.0f), where(x > all(88.72f), all(INFINITY), p));
    return where(x != x, x, p);
}

INLINE V silu(V x) { return x / (1.0f + exponential(-x)); }

#endif
