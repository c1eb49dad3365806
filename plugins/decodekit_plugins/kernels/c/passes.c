/* The passes between the matrix products of many tokens: each reads and writes memory once. Rows may lie apart: `ld` is the
   number of elements from one token to the next. All is of one `type`. */
#include <omp.h>

#include "tokens.h"

/* x / rms(x) * w, [M, K]. */
void dk_norm(const void *x, const void *w, long type, float eps, void *y, long M, long K, long threads) {
#pragma omp parallel for num_threads(threads)
    for (long m = 0; m < M; m++) normed(at(x, type, m * K), type, w, type, eps, K, at(y, type, m * K), type);
}

/* stream = x + more, and y, its norm, [M, K]; x may be stream. */
void dk_add_norm(const void *x, const void *more, const void *w, long type, float eps, void *stream, void *y, long M, long K,
                 long threads) {
#pragma omp parallel for num_threads(threads)
    for (long m = 0; m < M; m++) {
        const void *a = at(x, type, m * K), *b = at(more, type, m * K);
        void *c = at(stream, type, m * K);
        FOR_LANES(k, K) put(c, type, k, K, get(a, type, k, K) + get(b, type, k, K));
        normed(c, type, w, type, eps, K, at(y, type, m * K), type);
    }
}

/* Heads of x (token m at m * ld) to y [B, heads, T, D], turned, behind a norm of each head if there is one. */
void dk_turn(const void *x, long ld, const void *norm, float eps, const void *cos, const void *sin, long rope_b, long rope_t,
             long type, void *y, long B, long T, long heads, long D, long threads) {
#pragma omp parallel for num_threads(threads)
    for (long m = 0; m < B * T; m++) {
        long b = m / T, t = m % T, place = b * rope_b + t * rope_t;
        float head[D];
        for (long h = 0; h < heads; h++) {
            const void *from = at(x, type, m * ld + h * D);
            FOR_LANES(d, D) put(head, FLOAT, d, D, get(from, type, d, D));
            turned(head, D, norm, type, eps, at(cos, type, place), at(sin, type, place),
                   at(y, type, ((b * heads + h) * T + t) * D), type);
        }
    }
}

/* silu(gate) * up, both of K elements a token, [M, K]. */
void dk_gate(const void *gate, const void *up, long ld, long type, void *y, long M, long K, long threads) {
#pragma omp parallel for num_threads(threads)
    for (long m = 0; m < M; m++)
        FOR_LANES(k, K)
        put(y, type, m * K + k, m * K + K, silu(get(at(gate, type, m * ld), type, k, K)) * get(at(up, type, m * ld), type, k, K));
}
