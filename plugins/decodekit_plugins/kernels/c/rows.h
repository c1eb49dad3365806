/* Products of a few rows. */
#ifndef DECODEKIT_ROWS_H
#define DECODEKIT_ROWS_H

#include "vectors.h"

#define MOST 8 /* rows of x that registers hold the sums of */

/* Whether panels are faster: weights in half precision must be opened for them first. */
INLINE int many_rows(long M, int type) { return M > (type == FLOAT ? MOST : 2 * MOST); }

/* Outputs first to last (excluded) of y [M, ...], which begins at output 0: x [M, K] times the weight [N, K] of `type`, both
   with `ld` elements from one row to the next, in float. */
void product(const void *weight, int type, long K, const float *x, long ldx, long M, float *y, long ldy, long first, long last);

/* Adds a bias of `type`, unless NULL, to outputs first to last of y. */
void biased(float *y, long ldy, long M, const void *bias, int type, long first, long last);

/* The part of N that thread `i` of `n` takes, in whole lines of memory. */
INLINE void part(long N, int i, int n, long *first, long *last) {
    long size = ((N + n - 1) / n + LANES - 1) / LANES * LANES;
    *first = size * i < N ? size * i : N;
    *last = *first + size < N ? *first + size : N;
}

#endif
