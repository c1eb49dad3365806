/* The steps of a decoder layer, each in one parallel region. */
#include <omp.h>

#include "decoder.h"
#include "panels.h"

#define SLICE 1024 /* tokens that are worked on together */

/* 1 / rms of thread i's rows of x [M, K]. */
static void scales(const void *x, int type, float eps, long M, long K, float *to, int i, int n) {
    for (long m = i; m < M; m += n) to[m] = unit(at(x, type, m * K), type, eps, K);
}

/* The same of many. */
static void project_many(const Layer *L, const void *x, const Panels *in, float *scale, float *out, int i, int n) {
    long K = L->hidden, sizes[3] = {L->heads * L->dim, L->kv_heads * L->dim, L->kv_heads * L->dim};
    long N = sizes[0] + 2 * sizes[1], begin = 0;
    int type = L->type;
    float *room = chunk_room(in, K);
    scales(x, type, L->eps1, in->M, K, scale, i, n);
#pragma omp barrier
    pack(in, x, type, scale, L->norm1, type, i, n);
#pragma omp barrier
    const void *w[3] = {L->q, L->k, L->v}, *b[3] = {L->bq, L->bk, L->bv};
    /* Matrices behind each other are one: there is more to share out. */
    int joined = w[1] == at(w[0], L->weights, sizes[0] * K) && w[2] == at(w[1], L->weights, sizes[1] * K) && !b[0] && !b[1] && !b[2];
    if (joined) sizes[0] = N;
    for (int j = 0; j < (joined ? 1 : 3); begin += sizes[j++]) {
        Matrix one = {w[j], b[j], L->weights, type, sizes[j], K};
        spread(in, &one, (Rows){0}, (Rows){out + begin, FLOAT, N}, room, i, n);
    }
    free(room);
}

/* From the residual stream x [M, K] to q [M, heads, D] in float, turned, and k, v in the layer's type, where they belong.
   cos, sin: of token (b, t) at b * rope_b + t * rope_t. */
void dk_enter(const Layer *L, const void *x, long B, long T, const void *cos, const void *sin, long rope_b, long rope_t,
              float *q, const Keys *k, const Keys *v, long threads) {
    long K = L->hidden, N = (L->heads + 2 * L->kv_heads) * L->dim;
    Turns turns = {cos, sin, rope_b, rope_t};
    for (long from = 0; from < B * T; from += SLICE) {
        long M = B * T - from < SLICE ? B * T - from : SLICE;
        const void *y = at(x, L->type, from * K);
        int many = many_rows(M, L->weights);
        Panels in = many ? panels(M, K, L->type, L->weights) : (Panels){.data = floats(threads * M * K)};
        float *out = floats(M * N), *scale = floats(M);
#pragma omp parallel num_threads(threads)
        {
            int i = omp_get_thread_num(), n = omp_get_num_threads();
            if (many) project_many(L, y, &in, scale, out, i, n);
            else project_few(L, y, M, (float *)in.data + i * M * K, out, i, n);
#pragma omp barrier
            for (long row = i; row < M; row += n)
                for (long h = 0, m = from + row; h < L->kv_heads; h++) heads_of(L, out + row * N, m, m / T, m % T, h, &turns, q, k, v);
        }
        free(in.data); free(out); free(scale);
    }
}

/* What attention gave, a [M, heads * D] in `atype`, through the output projection onto x [M, K], and through the
   feed-forward: y [M, K], the stream behind this layer. */
static void leave_rows(const Layer *L, const void *x, const void *a, long atype, long M, void *y, long threads) {
    long K = L->hidden, wide = L->heads * L->dim, inner = L->inner;
    int ready = atype == FLOAT;
    float *in = ready ? (float *)a : floats(M * wide), *stream = floats(M * K), *normal = floats(threads * M * K);
    float *gate = floats(M * inner), *up = floats(M * inner);
    if (!ready)
        FOR_LANES(i, M * wide) put(in, FLOAT, i, M * wide, get(a, atype, i, M * wide));
#pragma omp parallel num_threads(threads)
    {
        int i = omp_get_thread_num(), n = omp_get_num_threads();
        leave_few(L, x, in, M, normal + i * M * K, stream, gate, up, y, i, n);
    }
    if (!ready) free(in);
    free(stream); free(normal); free(gate); free(up);
}

static void leave_many(const Layer *L, const void *x, const void *a, long atype, long M, void *y, long threads) {
    long K = L->hidden, wide = L->heads * L->dim, inner = L->inner;
    int type = L->type;
    int weights = L->weights;
    Panels in = panels(M, wide, type, weights), normal = panels(M, K, type, weights), middle = panels(M, inner, type, weights);
    float *stream = floats(M * K), *scale = floats(M);
    Matrix o = {L->o, L->bo, L->weights, type, K, wide}, down = {L->down, L->bd, L->weights, type, K, inner};
    Matrix gate = {L->gate, L->bg, L->weights, type, inner, K}, up = {L->up, L->bu, L->weights, type, inner, K};
    Rows before = {(void *)x, type, K}, between = {stream, FLOAT, K}, behind = {y, type, K};
#pragma omp parallel num_threads(threads)
    {
        int i = omp_get_thread_num(), n = omp_get_num_threads();
        long most = wide > K ? wide : K;
        float *room = chunk_room(&middle, most > inner ? most : inner), *other = chunk_room(&normal, K);
        pack(&in, a, atype, NULL, NULL, 0, i, n);
#pragma omp barrier
        spread(&in, &o, before, between, room, i, n);
#pragma omp barrier
        scales(stream, FLOAT, L->eps2, M, K, scale, i, n);
#pragma omp barrier
        pack(&normal, stream, FLOAT, scale, L->norm2, type, i, n);
#pragma omp barrier
        gated(&normal, &gate, &up, &middle, room, other, i, n);
#pragma omp barrier
        spread(&middle, &down, between, behind, room, i, n);
        free(room); free(other);
    }
    free(in.data); free(normal.data); free(middle.data); free(stream); free(scale);
}

void dk_leave(const Layer *L, const void *x, const void *a, long atype, long M, void *y, long threads) {
    long K = L->hidden, wide = L->heads * L->dim;
    for (long m = 0; m < M; m += SLICE) {
        long count = M - m < SLICE ? M - m : SLICE;
        (many_rows(count, L->weights) ? leave_many : leave_rows)(L, at(x, L->type, m * K), at(a, atype, m * wide), atype, count,
                                                                at(y, L->type, m * K), threads);
    }
}
