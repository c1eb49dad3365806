/* Products of many rows. */
#ifndef DECODEKIT_PANELS_H
#define DECODEKIT_PANELS_H

#include "vectors.h"

#ifdef __AVX512F__
#define PANEL 64
#else /* fewer or shorter registers */
#define PANEL 16
#endif
#define CHUNK 48       /* outputs that are worked on together: a multiple of what every tile has */
#define FAR 1280 * 1024 /* bytes of panels that stay in the second one */
#define NEAR 36 * 1024 /* bytes of a panel that stay in the first cache meanwhile */

INLINE long lanes_of(long rows) { return rows >= PANEL ? PANEL : (rows + LANES - 1) / LANES * LANES; }

typedef struct {
    long M, K, count; /* rows, numbers of each, panels */
    float *data;      /* panel p at p * PANEL * K: [K, lanes] */
} Panels;

INLINE long rows_of(const Panels *x, long p) { return x->M - p * PANEL < PANEL ? x->M - p * PANEL : PANEL; }
INLINE float *panel_of(const Panels *x, long p) { return x->data + p * PANEL * x->K; }

/* found [CHUNK, lanes], or what was in it plus that: the first `count` rows of a [.., lda], K numbers of each, times one
   panel [K, lanes]. Rows
   up to a multiple of 12 behind them are read, and written, too. `fetch`: whether `a` comes from far. */
void multiply(const float *a, long lda, long count, const float *panel, long lanes, long K, float *found, int fresh,
              int fetch);

/* Room for x [M, K]; free its data. */
Panels panels(long M, long K);

/* Thread i's part (of n) of x [M, K] as panels; times a number for each row and one of `wtype` for each k, unless NULL. */
void pack(const Panels *to, const void *x, int type, const float *scale, const void *w, int wtype, int i, int n);

typedef struct {
    const void *weight, *bias; /* [N, K], and [N] or NULL */
    int type, btype;
    long N, K;
} Matrix;

typedef struct {
    void *data;
    int type;
    long ld; /* from one row to the next */
} Rows;

/* y = x times the matrix, with its bias and `more`: thread i's part of n. `room`: CHUNK * K floats. */
void spread(const Panels *x, const Matrix *w, Rows more, Rows y, float *room, int i, int n);

/* silu(x gate) * (x up), as panels of y: thread i's part of n. `room`, `other`: CHUNK * K floats each. */
void gated(const Panels *x, const Matrix *gate, const Matrix *up, const Panels *y, float *room, float *other, int i, int n);

#endif
