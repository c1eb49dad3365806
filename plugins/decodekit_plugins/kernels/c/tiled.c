/* Products of many rows by the matrix unit, shared out among threads. Outputs are worked on in chunks, and a chunk in pieces
   of K: its weights are split into parts once, and stay in the second cache while all of x passes. */
#include "tiles.h"

#if TILES
#define OUTPUTS 128 /* in a chunk at most */
#define LEAST 32    /* at least: two tiles */
#define PIECE 768   /* numbers of K */

/* Numbers of K in each piece. */
static long piece_of(long K) {
    long pieces = (K + PIECE - 1) / PIECE;
    return ((K + pieces - 1) / pieces + DEEP - 1) / DEEP * DEEP;
}

#define WEIGHTS (OUTPUTS * PIECE * MOST_PARTS / 2) /* room in floats, of which each holds two parts */

long tiles_room(const Panels *x) { return WEIGHTS + x->count * OUTPUTS * PANEL; }

/* Outputs first.. of one matrix to y, or, where there is a second, of both, gated, to `to`. */
static void chunk(const Panels *x, const Matrix *one, const Matrix *two, long first, long count, Rows more, Rows y,
                  const Panels *to, float *room) {
    uint16_t *weights = (uint16_t *)room;
    long K = x->K, piece = piece_of(K), rows = (count + LEAST - 1) / LEAST * LEAST, all = two ? 2 * rows : rows;
    int parts = parts_of(one->type, x->parts);
    for (long k = 0; k < K; k += piece) {
        long deep = K - k < piece ? K - k : piece, step = all * DEEP;
        open_tiles(one, first, count, rows, k, deep, parts, weights, step);
        if (two) open_tiles(two, first, count, rows, k, deep, parts, weights + rows * DEEP, step);
        for (long p = 0; p < x->count; p++) {
            long lanes = lanes_of(rows_of(x, p));
            float *found = room + WEIGHTS + (K > PIECE ? p : 0) * OUTPUTS * PANEL;
            multiply_tiles(weights, all, parts, x, p, k, deep, found, k == 0);
            if (k + piece < K) continue;
            if (two) {
                gate_by(found, found + rows * lanes, count, lanes, one, two, first);
                put_tiles(to, p, first, count, found);
            } else unpack(found, count, lanes, one, first, more, y, p * PANEL, rows_of(x, p));
        }
    }
}

/* Thread i's chunks of n threads', of `most` outputs or less, so that all find something to do. */
static void chunks(const Panels *x, const Matrix *one, const Matrix *two, Rows more, Rows y, const Panels *to, float *room,
                   long most, int i, int n) {
    long N = one->N, size = most, first, last;
    while (size > LEAST && N < 3 * n * size) size -= LEAST;
    part_of((N + size - 1) / size, i, n, &first, &last);
    tiles_on();
    for (long c = first; c < last; c++)
        chunk(x, one, two, c * size, N - c * size < size ? N - c * size : size, more, y, to, room);
    tiles_off();
}

void spread_tiles(const Panels *x, const Matrix *w, Rows more, Rows y, float *room, int i, int n) {
    chunks(x, w, NULL, more, y, NULL, room, OUTPUTS, i, n);
}

void gated_tiles(const Panels *x, const Matrix *gate, const Matrix *up, const Panels *y, float *room, int i, int n) {
    chunks(x, gate, up, (Rows){0}, (Rows){0}, y, room, OUTPUTS / 2, i, n);
}
#endif
