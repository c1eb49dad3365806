/* Products of many rows with a weight [N, K] in the order in which it is stored, in float.

   Rows of x become lanes: a panel holds up to PANEL of them, x[k] of all behind each other. An output of a panel is a
   number of the weight times a row of the panel, summed over k: the weight is read one number at a time, in its order, and
   needs no packing. */
#include "panels.h"

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

Panels panels(long M, long K) {
    long count = (M + PANEL - 1) / PANEL;
    return (Panels){M, K, count, floats(count * PANEL * K)};
}

void pack(const Panels *to, const void *x, int type, const float *scale, const void *w, int wtype, int i, int n) {
    long K = to->K, blocks = (K + LANES - 1) / LANES;
    for (long item = i; item < to->count * blocks; item += n) {
        long p = item / blocks, k = item % blocks * LANES, rows = rows_of(to, p), lanes = lanes_of(rows);
        long width = K - k < LANES ? K - k : LANES;
        float *out = panel_of(to, p) + k * lanes;
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

/* found [count, lanes], transposed, with the bias and what is in `more` (data may be NULL) to columns n.. of y, and rows
   `first`.. of it. */
static void unpack(const float *found, long count, long lanes, const Matrix *w, long n, Rows more, Rows y, long first,
                   long rows) {
    for (long c = 0; c < count; c += LANES) {
        long width = count - c < LANES ? count - c : LANES;
        V add = w->bias ? get(w->bias, w->btype, n + c, n + c + width) : all(0);
        for (long r = 0; r < rows; r += LANES) {
            V block[LANES];
            for (long j = 0; j < LANES; j++) block[j] = j < width ? *(const V *)(found + (c + j) * lanes + r) : all(0);
            transpose(block);
            for (long j = 0; j < LANES && r + j < rows; j++) {
                long to = (first + r + j) * y.ld + n + c, from = (first + r + j) * more.ld + n + c;
                V sum = block[j] + add;
                if (more.data) sum += get(more.data, more.type, from, from + width);
                put(y.data, y.type, to, to + width, sum);
            }
        }
    }
}

/* Weights n.. of a matrix, CHUNK rows in float: as they are, or opened into `room` with zeros behind. */
static const float *opened(const Matrix *w, long n, long count, float *room) {
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

/* How thread i of n shares in all chunks of all panels: tasks first..last, each a chunk of N and `size` panels, which stay
   in the second cache while chunks pass. */
typedef struct {
    long chunks, size, first, last;
} Share;

static Share share(const Panels *x, long N, int i, int n) {
    Share s = {.chunks = (N + CHUNK - 1) / CHUNK, .size = x->count};
    while (s.size > 1 && (s.size * PANEL * x->K * (long)sizeof(float) > FAR || (x->count + s.size - 1) / s.size * s.chunks < 4 * n))
        s.size = (s.size + 1) / 2;
    long tasks = (x->count + s.size - 1) / s.size * s.chunks, each = tasks / n, more = tasks % n;
    s.first = i * each + (i < more ? i : more);
    s.last = s.first + each + (i < more);
    return s;
}

#define FOR_TASKS(s, t) for (long t = (s).first; t < (s).last; t++)
#define FOR_PANELS(s, t, x, p)                                                                                        \
    for (long p = t / (s).chunks * (s).size; p < (t / (s).chunks + 1) * (s).size && p < (x)->count; p++)
#define CHUNK_OF(s, t, N, n, count) long n = t % (s).chunks * CHUNK, count = (N) - n < CHUNK ? (N) - n : CHUNK

void spread(const Panels *x, const Matrix *w, Rows more, Rows y, float *room, int i, int n) {
    float found[CHUNK * PANEL] __attribute__((aligned(64)));
    Share s = share(x, w->N, i, n);
    FOR_TASKS(s, t) {
        CHUNK_OF(s, t, w->N, first, count);
        const float *a = opened(w, first, count, room);
        int fetch = a != room;
        FOR_PANELS(s, t, x, p) {
            multiply(a, w->K, count, panel_of(x, p), lanes_of(rows_of(x, p)), w->K, found, 1, fetch);
            unpack(found, count, lanes_of(rows_of(x, p)), w, first, more, y, p * PANEL, rows_of(x, p));
            fetch = 0;
        }
    }
}

void gated(const Panels *x, const Matrix *gate, const Matrix *up, const Panels *y, float *room, float *other, int i,
                  int n) {
    float found[2][CHUNK * PANEL] __attribute__((aligned(64)));
    Share s = share(x, gate->N, i, n);
    FOR_TASKS(s, t) {
        CHUNK_OF(s, t, gate->N, first, count);
        const float *a = opened(gate, first, count, room), *b = opened(up, first, count, other);
        int fetch = a != room;
        FOR_PANELS(s, t, x, p) {
            long lanes = lanes_of(rows_of(x, p));
            multiply(a, x->K, count, panel_of(x, p), lanes, x->K, found[0], 1, fetch);
            multiply(b, x->K, count, panel_of(x, p), lanes, x->K, found[1], 1, fetch);
            fetch = 0;
            float *to = panel_of(y, p) + first * lanes;
            for (long c = 0; c < count; c++) {
                V more = gate->bias ? all(number(gate->bias, gate->btype, first + c)) : all(0);
                V also = up->bias ? all(number(up->bias, up->btype, first + c)) : all(0);
                FOR_LANES(r, lanes)
                *(V *)(to + c * lanes + r) =
                    silu(*(V *)(found[0] + c * lanes + r) + more) * (*(V *)(found[1] + c * lanes + r) + also);
            }
        }
    }
}
