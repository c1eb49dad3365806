/* Linear layers: y [M, N] = x [M, K] times the transpose of a weight [N, K], and a bias [N] or NULL. x, y and bias are of
   one `type`, the weight of its own, and sums are kept in float. Dense tensors. */
#include <omp.h>

#include "panels.h"
#include "rows.h"
#include "tiles.h"

static void few(const void *weight, long weights, const void *bias, const void *x, long type, void *y, long M, long N, long K,
                long threads) {
    int plain = type == FLOAT;
    float *in = plain ? (float *)x : floats(M * K), *out = plain ? y : floats(M * N);
    if (!plain)
        FOR_LANES(i, M * K) put(in, FLOAT, i, M * K, get(x, type, i, M * K));
#pragma omp parallel num_threads(threads)
    {
        long first, last;
        part(N, omp_get_thread_num(), omp_get_num_threads(), &first, &last);
        product(weight, weights, K, in, K, M, out, N, first, last);
        biased(out, N, M, bias, type, first, last);
        if (!plain)
            for (long m = 0; m < M; m++)
                for (long n = first; n < last; n += LANES)
                    put(at(y, type, m * N), type, n, last, get(out + m * N, FLOAT, n, last));
    }
    if (!plain) { free(in); free(out); }
}

static void many(const void *weight, long weights, const void *bias, const void *x, long type, void *y, long M, long N, long K,
                 long threads) {
    Panels in = panels(M, K, type, weights);
    Matrix w = {weight, bias, weights, type, N, K};
#pragma omp parallel num_threads(threads)
    {
        int i = omp_get_thread_num(), n = omp_get_num_threads();
        float *room = chunk_room(&in, K);
        pack(&in, x, type, NULL, NULL, 0, i, n);
#pragma omp barrier
        spread(&in, &w, (Rows){0}, (Rows){y, type, N}, room, i, n);
        free(room);
    }
    free(in.data);
}

void dk_linear(const void *weight, long weights, const void *bias, const void *x, long type, void *y, long M, long N, long K,
               long threads) {
    (many_rows(M, weights) ? many : few)(weight, weights, bias, x, type, y, M, N, K, threads);
}

/* Whether this machine's registers make products of many rows as fast as libraries that pack the weight. */
long dk_wide(void) { return PANEL > LANES; }

/* Whether this machine has a matrix unit, and lets us use it. */
long dk_tiled(void) { return TILES && tiles_here(); }
