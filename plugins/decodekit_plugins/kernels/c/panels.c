/* Products of many rows with a weight [N, K] in the order in which it is stored, in float.

   Rows of x become lanes: a panel holds up to PANEL of them, x[k] of all behind each other. An output of a panel is a
   number of the weight times a row of the panel, summed over k: the weight is read one number at a time, in its order, and
   needs no packing. */
#include "panels.h"
#include "tiles.h"

/* One number of each of R outputs by W vectors of a panel. */
#define TERM(R, W)                                                                                                     \
    {                                                                                                                    \
        V x[W];                                                                                                          \
        for (int w = 0; w < W; w++) x[w] = from_float(b + (k * W + w) * LANES);                                          \
        _Pragma("GCC unroll 12") for (int r = 0; r < R; r++) {                                                           \
            V y = all(rows[r / 3][(r % 3) * lda + k]);                                                                   \
            _Pragma("GCC unroll 4") for (int w = 0; w < W; w++) sums[r][w] += y * x[w];                                  \
        }                                                                                                                \
    }

/* R outputs by W vectors of a panel [.., W * LANES], over `count` numbers of K: c [R, W * LANES] (+)= a [R, lda] b. Rows
   behind these are fetched meanwhile, where they are not near yet. */
#define TILE(R, W)                                                                                                    \
    static void tile_##W(const float *a, long lda, const float *b, long count, float *c, int fresh, int fetch) {      \
        V sums[R][W];                                                                                                 \
        const float *rows[R / 3];                                                                                     \
        for (int r = 0; r < R / 3; r++) rows[r] = a + 3 * r * lda;                                                    \
        _Pragma("GCC unroll 12") for (int r = 0; r < R; r++)                                                          \
            _Pragma("GCC unroll 4") for (int w = 0; w < W; w++) sums[r][w] = fresh ? all(0) : from_float(c + (r * W + w) * LANES);\
        if (fetch)                                                                                                    \
            for (long k = 0; k < count; k++) {                                                                        \
                if (k % LANES == 0)                                                                                   \
                    _Pragma("GCC unroll 12") for (int r = 0; r < R; r++) __builtin_prefetch(a + (R + r) * lda + k, 0, 2);\
                TERM(R, W)                                                                                            \
            }                                                                                                         \
        else                                                                                                          \
            for (long k = 0; k < count; k++) TERM(R, W)                                                               \
        _Pragma("GCC unroll 12") for (int r = 0; r < R; r++)                                                          \
            _Pragma("GCC unroll 4") for (int w = 0; w < W; w++) *(V *)(c + (r * W + w) * LANES) = sums[r][w];         \
    }

#ifdef __AVX512F__
TILE(12, 1)
TILE(12, 2)
TILE(6, 3)
TILE(6, 4)
static const int TILE_OF[5] = {0, 12, 12, 6, 6};
#else
TILE(6, 1)
static const int TILE_OF[2] = {0, 6};
#endif

INLINE void tile(long lanes, const float *a, long lda, const float *b, long count, float *c, int fresh, int fetch) {
    switch (lanes / LANES) {
#ifdef __AVX512F__
    case 4: tile_4(a, lda, b, count, c, fresh, fetch); break;
    case 3: tile_3(a, lda, b, count, c, fresh, fetch); break;
    case 2: tile_2(a, lda, b, count, c, fresh, fetch); break;
#endif
    default: tile_1(a, lda, b, count, c, fresh, fetch);
    }
}

Panels float_panels(long M, long K) {
    long count = (M + PANEL - 1) / PANEL;
    return (Panels){M, K, count, 0, PANEL * K * (long)sizeof(float), floats(count * PANEL * K)};
}

Panels panels(long M, long K, int type, int weights) {
    /* Weights must be split for tiles: measured, that is worth it for so many rows. */
    long least = weights == BFLOAT ? 0 : weights == HALF ? 40 : 96;
    if (!TILES || M < least || !tiles_here()) return float_panels(M, K);
    long count = (M + PANEL - 1) / PANEL, blocks = (K + DEEP - 1) / DEEP, parts = type == FLOAT ? MOST_PARTS : 2;
    long size = blocks * parts * (PANEL / LANES) * TILE_SIZE * (long)sizeof(uint16_t);
    return (Panels){M, K, count, (int)parts, size, floats(count * size / sizeof(float))};
}

void pack(const Panels *to, const void *x, int type, const float *scale, const void *w, int wtype, int i, int n) {
    if (TILES && to->parts) {
        pack_tiles(to, x, type, scale, w, wtype, i, n);
        return;
    }
    long K = to->K, blocks = (K + LANES - 1) / LANES;
    for (long item = i; item < to->count * blocks; item += n) {
        long p = item / blocks, k = item % blocks * LANES, rows = rows_of(to, p), lanes = lanes_of(rows);
        long width = K - k < LANES ? K - k : LANES;
        float *out = (float *)panel_of(to, p) + k * lanes;
        for (long r = 0; r < lanes; r += LANES) {
            V block[LANES];
            for (long j = 0; j < LANES; j++) {
                long from = (p * PANEL + r + j) * K + k;
                block[j] = r + j < rows ? get(x, type, from, from + width) : all(0);
            }
            if (w) {
                V each = get(w, wtype, k, k + width);
                for (long j = 0; j < LANES && r + j < rows; j++) block[j] = block[j] * scale[p * PANEL + r + j] * each;
            }
            transpose(block);
            for (long j = 0; j < width; j++) *(V *)(out + j * lanes + r) = block[j];
        }
    }
}

const float *opened(const Matrix *w, long n, long count, float *room) {
    if (w->type == FLOAT && count == CHUNK) return (const float *)w->weight + n * w->K;
    const void *from = at(w->weight, w->type, n * w->K);
    FOR_LANES(k, count * w->K) put(room, FLOAT, k, count * w->K, get(from, w->type, k, count * w->K));
    memset(room + count * w->K, 0, (CHUNK - count) * w->K * sizeof(float));
    return room;
}

void multiply(const float *a, long lda, long count, const float *panel, long lanes, long K, float *found, int fresh, int fetch) {
    long step = NEAR / (lanes * (long)sizeof(float)) / LANES * LANES, size = TILE_OF[lanes / LANES];
    for (long k = 0; k < K; k += step)
        for (long n = 0; n < count; n += size)
            tile(lanes, a + n * lda + k, lda, panel + k * lanes, K - k < step ? K - k : step, found + n * lanes, fresh && k == 0, fetch);
}
