/* The steps of a Llama-layout decoder layer, each in one parallel region.

   Shapes: M tokens (B rows of T), K hidden size, D head size, S slots of keys. Tensors are dense unless strides are
   given; strides count elements. `type` is that of what comes in and goes out, `weights` that of the matrices. */
#include <omp.h>

#include "attention.h"
#include "panels.h"
#include "rows.h"
#include "tokens.h"

#define SLICE 1024 /* tokens that are worked on together */

typedef struct {
    long hidden, heads, kv_heads, dim, inner;
    long type, weights;
    float eps1, eps2, eps_q, eps_k;
    const void *norm1, *norm2, *q_norm, *k_norm;      /* q_norm, k_norm: of each head, or NULL */
    const void *q, *k, *v, *o, *gate, *up, *down;     /* matrices, a row for each output */
    const void *bq, *bk, *bv, *bo, *bg, *bu, *bd;     /* biases, or NULL */
} Layer;

/* Heads of q, k and v [M, N] behind the projections: turned, and where they belong. Thread i's part of n. */
static void heads(const Layer *L, float *out, long M, long T, const void *cos, const void *sin, long rope_b, long rope_t,
                  long from, float *q, const Keys *k, const Keys *v, int i, int n) {
    long D = L->dim, wide = L->heads * D, N = wide + 2 * L->kv_heads * D;
    int type = L->type;
    for (long row = i; row < M; row += n) {
        long m = from + row, b = m / T, t = m % T, place = b * rope_b + t * rope_t;
        const void *c = at(cos, type, place), *s = at(sin, type, place);
        float *head = out + row * N;
        for (long h = 0; h < L->heads; h++, head += D)
            turned(head, D, L->q_norm, type, L->eps_q, c, s, q + m * wide + h * D, FLOAT);
        for (long h = 0; h < L->kv_heads; h++, head += D)
            turned(head, D, L->k_norm, type, L->eps_k, c, s, at(k->data, type, b * k->row + h * k->head + t * k->slot), type);
        for (long h = 0; h < L->kv_heads; h++, head += D) {
            void *to = at(v->data, type, b * v->row + h * v->head + t * v->slot);
            FOR_LANES(d, D) put(to, type, d, D, get(head, FLOAT, d, D));
        }
    }
}

/* out [M, N]: q, k and v of a few tokens. */
static void project_few(const Layer *L, const void *x, long M, float *normal, float *out, int i, int n) {
    long K = L->hidden, sizes[3] = {L->heads * L->dim, L->kv_heads * L->dim, L->kv_heads * L->dim};
    long N = sizes[0] + 2 * sizes[1], begin = 0, first, last;
    int type = L->type;
    for (long m = i; m < M; m += n) normed(at(x, type, m * K), type, L->norm1, type, L->eps1, K, normal + m * K, FLOAT);
#pragma omp barrier
    const void *w[3] = {L->q, L->k, L->v}, *b[3] = {L->bq, L->bk, L->bv};
    part(N, i, n, &first, &last);
    for (int j = 0; j < 3; j++, begin += sizes[j - 1]) { /* what of this thread's part lies in each matrix */
        long low = first > begin ? first - begin : 0, high = last - begin < sizes[j] ? last - begin : sizes[j];
        if (low < high) {
            product(w[j], L->weights, K, normal, K, M, out + begin, N, low, high);
            biased(out + begin, N, M, b[j], type, low, high);
        }
    }
}

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
    for (long from = 0; from < B * T; from += SLICE) {
        long M = B * T - from < SLICE ? B * T - from : SLICE;
        const void *y = at(x, L->type, from * K);
        int many = many_rows(M, L->weights);
        Panels in = many ? panels(M, K, L->type, L->weights) : (Panels){.data = floats(M * K)};
        float *out = floats(M * N), *scale = floats(M);
#pragma omp parallel num_threads(threads)
        {
            int i = omp_get_thread_num(), n = omp_get_num_threads();
            if (many) project_many(L, y, &in, scale, out, i, n);
            else project_few(L, y, M, in.data, out, i, n);
#pragma omp barrier
            heads(L, out, M, T, cos, sin, rope_b, rope_t, from, q, k, v, i, n);
        }
        free(in.data); free(out); free(scale);
    }
}

/* What attention gave, a [M, heads * D] in `atype`, through the output projection onto x [M, K], and through the
   feed-forward: y [M, K], the stream behind this layer. */
static void leave_few(const Layer *L, const void *x, const void *a, long atype, long M, void *y, long threads) {
    long K = L->hidden, wide = L->heads * L->dim, inner = L->inner;
    int type = L->type;
    int ready = atype == FLOAT;
    float *in = ready ? (float *)a : floats(M * wide), *stream = floats(M * K), *normal = floats(M * K);
    float *gate = floats(M * inner), *up = floats(M * inner);
    if (!ready)
        FOR_LANES(i, M * wide) put(in, FLOAT, i, M * wide, get(a, atype, i, M * wide));
#pragma omp parallel num_threads(threads)
    {
        int i = omp_get_thread_num(), n = omp_get_num_threads();
        long first, last;
        part(K, i, n, &first, &last);
        product(L->o, L->weights, wide, in, wide, M, stream, K, first, last);
        biased(stream, K, M, L->bo, type, first, last);
        for (long m = 0; m < M; m++)
            for (long k = first; k < last; k += LANES)
                put(stream + m * K, FLOAT, k, last,
                    get(stream + m * K, FLOAT, k, last) + get(at(x, type, m * K), type, k, last));
#pragma omp barrier
        for (long m = i; m < M; m += n)
            normed(stream + m * K, FLOAT, L->norm2, type, L->eps2, K, normal + m * K, FLOAT);
#pragma omp barrier
        long low, high;
        part(inner, i, n, &low, &high);
        product(L->gate, L->weights, K, normal, K, M, gate, inner, low, high);
        biased(gate, inner, M, L->bg, type, low, high);
        product(L->up, L->weights, K, normal, K, M, up, inner, low, high);
        biased(up, inner, M, L->bu, type, low, high);
        for (long m = 0; m < M; m++)
            for (long k = low; k < high; k += LANES)
                put(gate + m * inner, FLOAT, k, high,
                    silu(get(gate + m * inner, FLOAT, k, high)) * get(up + m * inner, FLOAT, k, high));
#pragma omp barrier
        float *out = normal; /* read by nobody any more */
        product(L->down, L->weights, inner, gate, inner, M, out, K, first, last);
        biased(out, K, M, L->bd, type, first, last);
        for (long m = 0; m < M; m++)
            for (long k = first; k < last; k += LANES)
                put(at(y, type, m * K), type, k, last,
                    get(out + m * K, FLOAT, k, last) + get(stream + m * K, FLOAT, k, last));
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
    for (long m = 0; m < M; m += SLICE)
        (many_rows(M < SLICE ? M : SLICE, L->weights) ? leave_many : leave_few)(L, at(x, L->type, m * K), at(a, atype, m * wide), atype, M - m < SLICE ? M - m : SLICE,
                                           at(y, L->type, m * K), threads);
}

/* A layer for new tokens behind `start` slots of keys and values, which get theirs: x to y [B, T, K]. */
void dk_layer(const Layer *L, const void *x, long B, long T, const void *cos, const void *sin, long rope_b, long rope_t,
              const Keys *keys, const Keys *values, long start, const Mask *mask, float scale, void *y, long threads) {
    Keys k = *keys, v = *values;
    k.data = at(k.data, L->type, start * k.slot);
    v.data = at(v.data, L->type, start * v.slot);
    float *q = floats(2 * B * T * L->heads * L->dim), *out = q + B * T * L->heads * L->dim;
    dk_enter(L, x, B, T, cos, sin, rope_b, rope_t, q, &k, &v, threads);
    dk_attend(q, keys, values, L->type, mask, B, T, L->heads, L->kv_heads, start + T, L->dim, scale, out, threads);
    dk_leave(L, x, out, FLOAT, B * T, y, threads);
    free(q);
}
