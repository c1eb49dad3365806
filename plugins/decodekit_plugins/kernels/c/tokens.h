/* What is done to one token at a time. */
#ifndef DECODEKIT_TOKENS_H
#define DECODEKIT_TOKENS_H

#include "vectors.h"

/* 1 / rms(x) of one token. */
INLINE float unit(const void *x, int type, float eps, long K) {
    V squares = all(0);
    FOR_LANES(k, K) { V v = get(x, type, k, K); squares += v * v; }
    return 1.0f / sqrtf(sum(squares) / (float)K + eps);
}

/* x / rms(x) * w of one token. */
static inline void normed(const void *x, int type, const void *w, int wtype, float eps, long K, void *y, int ytype) {
    V scale = all(unit(x, type, eps, K));
    FOR_LANES(k, K) put(y, ytype, k, K, get(x, type, k, K) * scale * get(w, wtype, k, K));
}

/* One head of one token: its norm, if it has one, and its turn; cos and sin give D elements, of which the first half of
   cos and the second of sin are read. */
static inline void turned(float *x, long D, const void *norm, int type, float eps, const void *cos, const void *sin, void *y,
                   int ytype) {
    if (norm) normed(x, FLOAT, norm, type, eps, D, x, FLOAT);
    long half = D / 2;
    FOR_LANES(d, half) {
        V a = get(x, FLOAT, d, half), b = get(x + half, FLOAT, d, half);
        V c = get(cos, type, d, half), s = get(at(sin, type, half), type, d, half);
        put(y, ytype, d, half, a * c - b * s);
        put(at(y, ytype, half), ytype, d, half, b * c + a * s);
    }
}

#endif
