/* Rows of numbers that are opened in registers: plain elements, or bytes that hold codes of several tokens.

   A byte holds 8 / bits codes of one channel; code p of row r is that of token p * rows + r. A code stays where it lies in
   its byte, which makes it 2^(bits p) times too large: a factor that is left to the sums. */
#ifndef DECODEKIT_ROWS_H
#define DECODEKIT_ROWS_H

#include "vectors.h"

#define QUERIES 4
#define STRIP 4   /* vectors: sums of four queries for each fit the registers */
#define AHEAD 16  /* rows that are fetched before they are read */
#define PACKED(bits) (8 * (bits)) /* kinds of rows: FLOAT, BFLOAT, HALF, or this */
#define UNROLL _Pragma("GCC unroll 16")

typedef uint8_t LooseB __attribute__((vector_size(16), aligned(1), may_alias));

#define IS_PACKED(kind) ((kind) >= PACKED(2))
#define BITS(kind) ((kind) / 8)
#define PLANES(kind) (IS_PACKED(kind) ? 64 / (kind) : 1)
INLINE long width_of(int kind) { return IS_PACKED(kind) ? 1 : (long)bytes(kind); }

INLINE I bytes_at(const void *p) {
#ifdef __AVX512F__ /* which some compilers do one by one */
    return (I)_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i_u *)p));
#else
    return __builtin_convertvector(__builtin_convertvector(*(const LooseB *)p, H), I);
#endif
}

/* The numbers of each plane from element d of a row on. */
INLINE void numbers(const char *row, long d, int kind, V *out) {
    if (IS_PACKED(kind)) {
        I whole = bytes_at(row + d);
        if (kind == PACKED(8)) out[0] = __builtin_convertvector(whole, V);
        else
            UNROLL for (int p = 0; p < 64 / kind; p++)
                out[p] = __builtin_convertvector(whole & (((1 << BITS(kind)) - 1) << (p * BITS(kind))), V);
    } else
        out[0] = load(row, kind, d);
}

/* Where vector v of a row of `width` elements, LANES at least, begins: the last one may overlap the one before. */
INLINE long place_of(long v, long width) { return v * LANES < width - LANES ? v * LANES : width - LANES; }
INLINE long vectors_in(long width) { return (width + LANES - 1) / LANES; }

/* Sums over `width` elements of each of `count` rows, `step` bytes apart, times N queries [N, room of vectors], in which what
   an overlapping vector counts twice is zero; plus `more` of each query: scores [N, room]. The rows of another side are
   fetched meanwhile, from `soon` on. */
INLINE void score(const float *asked, long wide, const float *more, const char *rows, long step, long count, long width,
                  const char *soon, float *scores, long room, int kind, int N) {
    enum { MOST = LANES };
    const int planes = PLANES(kind), lines = LANES / N / planes;
    long vectors = vectors_in(width), r = 0;
    V unit = all(1), base = all(0);
    for (int i = 0; i < LANES; i++) {
        unit[i] = 1.0f / (1 << (i / lines % planes * BITS(kind)));
        base[i] = more[i / lines / planes];
    }
    for (; r + lines <= count; r += lines) {
        V x[MOST];
        UNROLL for (int i = 0; i < MOST; i++) x[i] = all(0);
        for (long v = 0; v < vectors; v++) {
            long d = place_of(v, width);
            UNROLL for (int i = 0; i < lines; i++) {
                const char *row = rows + (r + i) * step;
                V k[4];
                numbers(row, d, kind, k);
                UNROLL for (int p = 0; p < planes; p++)
                    UNROLL for (int j = 0; j < N; j++)
                        x[(j * planes + p) * lines + i] += from_float(asked + j * wide + v * LANES) * k[p];
            }
        }
        for (long o = r * step; o < (r + lines) * step; o += 64) {
            __builtin_prefetch(soon + o, 0, 3);
            __builtin_prefetch(rows + AHEAD * step + o, 0, 3);
        }
        V found = sums_of(x) * unit + base;
        UNROLL for (int j = 0; j < N * planes; j++)
            memcpy(scores + j / planes * room + j % planes * count + r, (char *)&found + j * lines * 4, lines * 4);
    }
    for (; r < count; r++)
        for (int j = 0; j < N; j++) {
            V x[4] = {all(0), all(0), all(0), all(0)};
            for (long v = 0; v < vectors; v++) {
                V k[4];
                numbers(rows + r * step, place_of(v, width), kind, k);
                for (int p = 0; p < planes; p++) x[p] += from_float(asked + j * wide + v * LANES) * k[p];
            }
            for (int p = 0; p < planes; p++)
                scores[j * room + p * count + r] = sum(x[p]) / (1 << (p * BITS(kind))) + more[j];
        }
}

/* Adds rows times weights [N, room], one for each token, to `out` [N, D]: W vectors from vector `first` of `width` elements
   on; and `more` of each query. */
INLINE void mix(const float *weights, long room, const float *more, const char *rows, long step, long count, long width,
                long first, float *out, long D, int kind, int N, int W) {
    const int planes = PLANES(kind);
    V x[QUERIES][STRIP];
    long places[STRIP];
    UNROLL for (int w = 0; w < W; w++) places[w] = place_of(first + w, width);
    UNROLL for (int j = 0; j < N; j++)
        UNROLL for (int w = 0; w < W; w++) x[j][w] = from_float(out + j * D + places[w]) + more[j];
    for (long r = 0; r < count; r++) {
        UNROLL for (int w = 0; w < W; w++) {
            V k[4];
            numbers(rows + r * step, places[w], kind, k);
            UNROLL for (int p = 0; p < planes; p++)
                UNROLL for (int j = 0; j < N; j++) x[j][w] += weights[j * room + p * count + r] * k[p];
        }
    }
    UNROLL for (int j = 0; j < N; j++)
        UNROLL for (int w = 0; w < W; w++) store(out + j * D + places[w], FLOAT, 0, x[j][w]);
}

#endif
