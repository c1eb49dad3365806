#include "tiles.h"

#if TILES
#include <sys/syscall.h>
#include <unistd.h>

#define SOON 256 /* bytes ahead that weights are fetched */

typedef uint16_t H32 __attribute__((vector_size(64)));

int tiles_here(void) {
    static int known = -1; /* Linux gives the unit's registers to processes that ask */
    if (known < 0) known = syscall(SYS_arch_prctl, 0x1023 /* ARCH_REQ_XCOMP_PERM */, 18L /* tile data */) == 0;
    return known;
}

void tiles_on(void) {
    static const struct {
        uint8_t palette, start, none[14];
        uint16_t bytes[16];
        uint8_t rows[16];
    } shape = {1, 0, {0}, {64, 64, 64, 64, 64, 64, 64, 64}, {16, 16, 16, 16, 16, 16, 16, 16}};
    _tile_loadconfig(&shape);
}

void tiles_off(void) { _tile_release(); }

/* The highest eight bits of x and of what that leaves, thrice: x is their sum. What is no number, or endless, is the first
   part alone. */
INLINE void split(V x, int parts, V *to) {
    for (int part = 0; part < parts; part++) {
        to[part] = (V)((U)x & 0xffff0000);
        x -= to[part];
        if (part == 0) {
            I odd = ((I)to[0] & 0x7f800000) == 0x7f800000;
            x = where(odd, all(0), x);
        }
    }
}

/* Two times sixteen floats as bfloat16, in order. */
INLINE H32 halves(V a, V b) {
    return __builtin_shufflevector((H32)a, (H32)b, 1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31, 33, 35, 37, 39,
                                   41, 43, 45, 47, 49, 51, 53, 55, 57, 59, 61, 63);
}

INLINE uint16_t *tile_of(const Panels *x, long p, long block, long lanes) {
    return (uint16_t *)panel_of(x, p) + block * x->parts * (lanes / LANES) * TILE_SIZE;
}

/* Rows of x, each times a number of `scale` and numbers `w` of each k, unless NULL, as tiles of each part. Numbers from `left`
   on, and rows from `count` on, are zeros. */
INLINE void pack_tile(const void *x, int type, long K, long count, long left, const float *scale, const float *w, int parts,
                      uint16_t *to, long step) {
    V pairs[MOST_PARTS][LANES];
    long low = left < LANES ? left : LANES;
    for (long j = 0; j < LANES; j++) {
        V a = all(0), b = all(0), high[MOST_PARTS], more[MOST_PARTS];
        if (j < count) {
            a = get(x, type, j * K, j * K + low);
            if (left > LANES) b = get(x, type, j * K + LANES, j * K + left);
            if (scale) {
                a *= scale[j] * from_float(w);
                b *= scale[j] * from_float(w + LANES);
            }
        }
        split(a, parts, high);
        split(b, parts, more);
        for (int part = 0; part < parts; part++) pairs[part][j] = (V)halves(high[part], more[part]);
    }
    for (int part = 0; part < parts; part++) {
        transpose(pairs[part]);
        for (int j = 0; j < LANES; j++) *(V *)(to + part * step + j * DEEP) = pairs[part][j];
    }
}

void pack_tiles(const Panels *to, const void *x, int type, const float *scale, const void *w, int wtype, int i, int n) {
    long K = to->K, blocks = (K + DEEP - 1) / DEEP;
    for (long item = i; item < to->count * blocks; item += n) {
        long p = item / blocks, k = item % blocks * DEEP, rows = rows_of(to, p), lanes = lanes_of(rows), step = lanes * DEEP;
        long left = K - k < DEEP ? K - k : DEEP;
        float each[DEEP] __attribute__((aligned(64))) = {0};
        if (w)
            for (long d = 0; d < left; d++) each[d] = number(w, wtype, k + d);
        for (long r = 0; r < lanes; r += LANES) {
            const void *from = at(x, type, (p * PANEL + r) * K + k);
            const float *times = w ? scale + p * PANEL + r : NULL;
            uint16_t *tile = tile_of(to, p, k / DEEP, lanes) + r * DEEP;
            long count = rows - r < LANES ? rows - r : LANES;
            if (count == LANES && left == DEEP && type == FLOAT && to->parts == MOST_PARTS)
                pack_tile(from, FLOAT, K, LANES, DEEP, times, each, MOST_PARTS, tile, step);
            else pack_tile(from, type, K, count, left, times, each, to->parts, tile, step);
        }
    }
}

void put_tiles(const Panels *to, long p, long k, long count, const float *x) {
    long lanes = lanes_of(rows_of(to, p)), groups = lanes / LANES;
    for (long c = 0; c < count; c += 2) {
        uint16_t *out = tile_of(to, p, (k + c) / DEEP, lanes) + (k + c) % DEEP / 2 * 2 * LANES;
        for (long g = 0; g < groups; g++) {
            V a[MOST_PARTS], b[MOST_PARTS];
            split(*(const V *)(x + c * lanes + g * LANES), to->parts, a);
            split(c + 1 < count ? *(const V *)(x + (c + 1) * lanes + g * LANES) : all(0), to->parts, b);
            for (int part = 0; part < to->parts; part++)
                *(U *)(out + (part * groups + g) * TILE_SIZE) = ((U)a[part] >> 16) | (U)b[part];
        }
    }
    if (k + count == to->K) /* nothing behind the last k may be no number */
        for (long c = (count + 1) / 2 * 2; (k + c) % DEEP; c += 2)
            for (long g = 0; g < groups * to->parts; g++)
                *(U *)(tile_of(to, p, (k + c) / DEEP, lanes) + g * TILE_SIZE + (k + c) % DEEP / 2 * 2 * LANES) = (U){0};
}

/* One tile of each part, from 16 rows of a weight. */
INLINE void open_tile(const void *w, int type, long K, int parts, uint16_t *to, long step) {
    for (long r = 0; r < LANES; r++) {
        V a[MOST_PARTS], b[MOST_PARTS];
        const char *soon = (const char *)at(w, type, r * K) + SOON; /* no stream of memory: a row's next lines */
        __builtin_prefetch(soon, 0, 3);
        if (type == FLOAT) __builtin_prefetch(soon + 64, 0, 3);
        split(load(w, type, r * K), parts, a);
        split(load(w, type, r * K + LANES), parts, b);
        for (int part = 0; part < parts; part++) *(H32 *)(to + part * step + r * DEEP) = halves(a[part], b[part]);
    }
}

/* The same where less is there: `count` rows of `left` numbers. */
static void open_rest(const void *w, int type, long K, int parts, uint16_t *to, long step, long count, long left) {
    char some[LANES * DEEP * sizeof(float)] __attribute__((aligned(64))) = {0};
    for (long r = 0; r < count; r++) memcpy(at(some, type, r * DEEP), at(w, type, r * K), left * bytes(type));
    open_tile(some, type, DEEP, parts, to, step);
}

void open_tiles(const Matrix *w, long n, long count, long to_rows, long k, long deep, int parts, uint16_t *to, long step) {
    for (long r = 0; r < to_rows; r += LANES)
        for (long d = 0; d < deep; d += DEEP) {
            uint16_t *tile = to + d / DEEP * parts * step + r * DEEP;
            const void *from = at(w->weight, w->type, (n + r) * w->K + k + d);
            long rows = count - r < 0 ? 0 : count - r, left = deep - d;
            if (rows < LANES || left < DEEP)
                open_rest(from, w->type, w->K, parts, tile, step, rows < LANES ? rows : LANES, left < DEEP ? left : DEEP);
            else if (w->type == BFLOAT) open_tile(from, BFLOAT, w->K, 1, tile, step);
            else if (w->type == HALF) open_tile(from, HALF, w->K, 2, tile, step);
            else if (parts == 2) open_tile(from, FLOAT, w->K, 2, tile, step);
            else open_tile(from, FLOAT, w->K, 3, tile, step);
        }
}

/* Two by G tiles of outputs [32, G * 16], over `blocks` tiles of K: their parts a and b, which follow each other at `na`
   and `nb` elements. */
#define A(PART) { _tile_loadd(4, a + (PART) * na, 64); _tile_loadd(5, a + (PART) * na + TILE_SIZE, 64); }
#define B(PART) { _tile_loadd(6, b + (PART) * nb, 64); if (G == 2) _tile_loadd(7, b + (PART) * nb + TILE_SIZE, 64); }
#define MULTIPLY                                                                                                       \
    {                                                                                                                  \
        _tile_dpbf16ps(0, 4, 6);                                                                                       \
        _tile_dpbf16ps(1, 5, 6);                                                                                       \
        if (G == 2) { _tile_dpbf16ps(2, 4, 7); _tile_dpbf16ps(3, 5, 7); }                                              \
    }
INLINE void block(int G, int wparts, int parts, const uint16_t *a, long na, const uint16_t *b, long nb, long blocks, float *c,
                  long ldc, int fresh) {
    float *d = c + LANES * ldc;
    long stride = ldc * (long)sizeof(float);
    if (fresh) {
        _tile_zero(0); _tile_zero(1); _tile_zero(2); _tile_zero(3);
    } else {
        _tile_loadd(0, c, stride); _tile_loadd(1, d, stride);
        if (G == 2) { _tile_loadd(2, c + LANES, stride); _tile_loadd(3, d + LANES, stride); }
    }
    for (long k = 0; k < blocks; k++, a += wparts * na, b += parts * nb) {
        A(0)
        if (parts > 2) { B(2) MULTIPLY }
        B(1) MULTIPLY
        B(0) MULTIPLY
        if (wparts > 1) { A(1) MULTIPLY }
        if (wparts > 1 && parts > 2) { B(1) MULTIPLY }
        if (wparts > 2) { A(2) B(0) MULTIPLY }
    }
    _tile_stored(0, c, stride); _tile_stored(1, d, stride);
    if (G == 2) { _tile_stored(2, c + LANES, stride); _tile_stored(3, d + LANES, stride); }
}

#define BLOCK(W, X)                                                                                                    \
    static void block_##W##X(const uint16_t *a, long na, const uint16_t *b, long nb, long blocks, float *c, long ldc,  \
                             int fresh, int two) {                                                                     \
        if (two) block(2, W, X, a, na, b, nb, blocks, c, ldc, fresh);                                                  \
        else block(1, W, X, a, na, b, nb, blocks, c, ldc, fresh);                                                      \
    }
BLOCK(1, 2)
BLOCK(2, 2)
BLOCK(1, 3)
BLOCK(2, 3)
BLOCK(3, 3)

void multiply_tiles(const uint16_t *a, long rows, int wparts, const Panels *x, long p, long k, long deep, float *found, int fresh) {
    int parts = x->parts;
    void (*const run)(const uint16_t *, long, const uint16_t *, long, long, float *, long, int, int) =
        parts == 2 ? wparts == 1 ? block_12 : block_22 : wparts == 1 ? block_13 : wparts == 2 ? block_23 : block_33;
    long lanes = lanes_of(rows_of(x, p)), groups = lanes / LANES, na = rows * DEEP, nb = groups * TILE_SIZE;
    const uint16_t *b = tile_of(x, p, k / DEEP, lanes);
    for (long g = 0; g < groups; g += 2)
        for (long r = 0; r < rows; r += 2 * LANES)
            run(a + r * DEEP, na, b + g * TILE_SIZE, nb, (deep + DEEP - 1) / DEEP, found + r * lanes + g * LANES, lanes, fresh,
                g + 1 < groups);
}
#endif
