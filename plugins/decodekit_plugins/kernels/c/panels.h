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
    int parts;        /* of a number, in tiles (`tiles.h`); 0: floats [K, lanes] */
    long size;        /* bytes from one panel to the next */
    void *data;
} Panels;

INLINE long rows_of(const Panels *x, long p) { return x->M - p * PANEL < PANEL ? x->M - p * PANEL : PANEL; }
INLINE void *panel_of(const Panels *x, long p) { return (char *)x->data + p * x->size; }

/* What thread i of n takes of `count` things: first..last. */
INLINE void part_of(long count, int i, int n, long *first, long *last) {
    long each = count / n, more = count % n;
    *first = i * each + (i < more ? i : more);
    *last = *first + each + (i < more);
}

/* Room for x [M, K], in what this machine multiplies best by weights of a type, for answers of `type`; free its data.
   `float_panels`: in floats. */
Panels panels(long M, long K, int type, int weights);
Panels float_panels(long M, long K);

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

/* found [CHUNK, lanes], or what was in it plus that: the first `count` rows of a [.., lda], K numbers of each, times one
   panel of floats [K, lanes]. Rows up to a multiple of 12 behind them are read, and written, too. `fetch`: whether `a`
   comes from far. */
void multiply(const float *a, long lda, long count, const float *panel, long lanes, long K, float *found, int fresh,
              int fetch);

/* Weights n.. of a matrix, CHUNK rows in float: as they are, or opened into `room` with zeros behind. */
const float *opened(const Matrix *w, long n, long count, float *room);

/* Room for what a thread works on: weights with rows of K numbers at most, and products of as many rows as x has. */
float *chunk_room(const Panels *x, long K);

/* found [count, lanes], transposed, with the bias and what is in `more` (data may be NULL) to columns n.. of y, and `rows`
   rows from `first` on of it. */
void unpack(const float *found, long count, long lanes, const Matrix *w, long n, Rows more, Rows y, long first, long rows);

/* found becomes silu(found) * up, both [count, lanes], outputs first.. of two matrices, behind their biases. */
void gate_by(float *found, const float *up_found, long count, long lanes, const Matrix *gate, const Matrix *up, long first);

/* y = x times the matrix, with its bias and `more`: thread i's part of n. */
void spread(const Panels *x, const Matrix *w, Rows more, Rows y, float *room, int i, int n);

/* silu(x gate) * (x up), as panels of y: thread i's part of n. */
void gated(const Panels *x, const Matrix *gate, const Matrix *up, const Panels *y, float *room, float *other, int i, int n);

#endif
