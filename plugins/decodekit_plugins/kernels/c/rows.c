/* Products of a few rows with a weight [N, K] in the order in which it is stored: x [M, K] to y [M, N], in float.

   Each weight is read once. Several of its rows run side by side, and the next ones are fetched meanwhile: a core that
   waits for each line of memory reads at half its speed. An output's sum runs in one order whatever M and N are, so a row
   gives the same bits alone and in a batch. */
#include "rows.h"

/* What is fetched while rows are read: nothing, the next rows into the first cache, or what lies AHEAD bytes ahead into the
   second. A core of AMD's has few lines on their way to its first cache at once: the last makes it twice as fast. */
enum { NEVER, NEAR, FAR };
#define AHEAD 24576

static int fetches = NEVER; /* not chosen yet */

/* Which of both, 0 or 1; what else is given leaves the choice to what is known of processors. The same bits either way. */
void dk_fetch(long far) { fetches = far == 0 ? NEAR : far == 1 ? FAR : NEVER; }

static int fetch_here(void) {
#if defined __x86_64__
    if (!fetches) return __builtin_cpu_is("amd") ? FAR : NEAR;
#endif
    return fetches ? fetches : NEAR;
}

#define UNROLL _Pragma("GCC unroll 8")

/* R rows of the weight by M rows of x. `count`: how many of the R there are. */
#define BLOCK(NAME, T, LOAD, TYPE, R, M)                                                                              \
    static void NAME(const void *weight, long K, int count, const float *x, long ldx, float *y, long ldy, int fetch) {  \
        const T *w[R];                                                                                                  \
        for (int r = 0; r < R; r++) w[r] = (const T *)weight + (r < count ? r : 0) * K;                                 \
        V sums[R][M];                                                                                                   \
        UNROLL for (int r = 0; r < R; r++) UNROLL for (int m = 0; m < M; m++) sums[r][m] = all(0);                      \
        long k = 0;                                                                                                     \
        for (; k + LANES <= K; k += LANES) {                                                                            \
            V c[R];                                                                                                     \
            UNROLL for (int r = 0; r < R; r++) {                                                                        \
                c[r] = LOAD(w[r] + k);                                                                                  \
                if (fetch == NEAR) __builtin_prefetch(w[r] + k + R * K, 0, 3);                                          \
                if (fetch == FAR) __builtin_prefetch((const char *)(w[r] + k) + AHEAD, 0, 2);                           \
            }                                                                                                           \
            UNROLL for (int m = 0; m < M; m++) {                                                                        \
                V b = from_float(x + m * ldx + k);                                                                      \
                UNROLL for (int r = 0; r < R; r++) sums[r][m] += c[r] * b;                                              \
            }                                                                                                           \
        }                                                                                                               \
        if (k < K)                                                                                                      \
            for (int m = 0; m < M; m++) {                                                                               \
                V b = load_some(x, FLOAT, m * ldx + k, K - k);                                                          \
                for (int r = 0; r < R; r++) sums[r][m] += load_some(w[r], TYPE, k, K - k) * b;                          \
            }                                                                                                           \
        for (int r = 0; r < count; r++)                                                                                 \
            for (int m = 0; m < M; m++) y[m * ldy + r] = sum(sums[r][m]);                                               \
    }

#ifdef __AVX512F__
#define BLOCKS(T, LOAD, TYPE, N)                                                                                      \
    BLOCK(N##1, T, LOAD, TYPE, 4, 1)                                                                                  \
    BLOCK(N##2, T, LOAD, TYPE, 6, 2)                                                                                  \
    BLOCK(N##3, T, LOAD, TYPE, 6, 3)                                                                                  \
    BLOCK(N##4, T, LOAD, TYPE, 5, 4)                                                                                  \
    BLOCK(N##5, T, LOAD, TYPE, 4, 5)                                                                                  \
    BLOCK(N##6, T, LOAD, TYPE, 4, 6)                                                                                  \
    BLOCK(N##7, T, LOAD, TYPE, 3, 7)                                                                                  \
    BLOCK(N##8, T, LOAD, TYPE, 3, 8)
#define HEIGHTS {4, 6, 6, 5, 4, 4, 3, 3}
#else /* half as many registers, or a quarter as wide */
#define BLOCKS(T, LOAD, TYPE, N)                                                                                      \
    BLOCK(N##1, T, LOAD, TYPE, 4, 1)                                                                                  \
    BLOCK(N##2, T, LOAD, TYPE, 3, 2)                                                                                  \
    BLOCK(N##3, T, LOAD, TYPE, 2, 3)                                                                                  \
    BLOCK(N##4, T, LOAD, TYPE, 1, 4)                                                                                  \
    BLOCK(N##5, T, LOAD, TYPE, 1, 5)                                                                                  \
    BLOCK(N##6, T, LOAD, TYPE, 1, 6)                                                                                  \
    BLOCK(N##7, T, LOAD, TYPE, 1, 7)                                                                                  \
    BLOCK(N##8, T, LOAD, TYPE, 1, 8)
#define HEIGHTS {4, 3, 2, 1, 1, 1, 1, 1}
#endif

BLOCKS(float, from_float, FLOAT, float_)
BLOCKS(uint16_t, from_bfloat, BFLOAT, bfloat_)
BLOCKS(_Float16, from_half, HALF, half_)

typedef void Block(const void *, long, int, const float *, long, float *, long, int);
#define ALL(N) {N##1, N##2, N##3, N##4, N##5, N##6, N##7, N##8}
static Block *const BLOCK_OF[3][MOST] = {ALL(float_), ALL(bfloat_), ALL(half_)};
static const int ROWS_OF[MOST] = HEIGHTS;

void product(const void *weight, int type, long K, const float *x, long ldx, long M, float *y, long ldy, long first,
                    long last) {
    long pieces = (M + MOST - 1) / MOST;
    long size = (M + pieces - 1) / pieces;
    int step = ROWS_OF[size - 1], fetch = fetch_here();
    for (long n = first; n < last; n += step) {
        int count = last - n < step ? (int)(last - n) : step;
        const void *w = at(weight, type, n * K);
        for (long m = 0; m < M; m += size) {
            long rows = M - m < size ? M - m : size;
            int most = ROWS_OF[rows - 1]; /* the last piece may be smaller, and its block another */
            for (int r = 0; r < count; r += most)
                BLOCK_OF[type][rows - 1](at(w, type, r * K), K, count - r < most ? count - r : most, x + m * ldx, ldx,
                                         y + m * ldy + n + r, ldy, m ? NEVER : fetch);
        }
    }
}

void biased(float *y, long ldy, long M, const void *bias, int type, long first, long last) {
    if (bias)
        for (long m = 0; m < M; m++)
            for (long n = first; n < last; n += LANES)
                put(y + m * ldy, FLOAT, n, last, get(y + m * ldy, FLOAT, n, last) + get(bias, type, n, last));
}
