/* A decoder layer for a few tokens. What it reads is its weights, so threads wait for each other as seldom as can be, and
   fetch the beginning of the next matrix before they do. */
#include <omp.h>

#include "decoder.h"

#define SOON 16384 /* bytes of a matrix that are fetched before its product */

/* Fetches what thread i of n reads first of a matrix [N, K]. */
static void fetch(const Layer *L, const void *w, long N, long K, int i, int n) {
    long first, last, size = (long)bytes(L->weights);
    part(N, i, n, &first, &last);
    const char *from = at(w, L->weights, first * K);
    long most = (last - first) * K * size;
    for (long b = 0; b < most && b < SOON; b += 64) __builtin_prefetch(from + b, 0, 2);
}

static void norms(const void *x, int xtype, const void *w, int type, float eps, long M, long K, float *to) {
    for (long m = 0; m < M; m++) normed(at(x, xtype, m * K), xtype, w, type, eps, K, to + m * K, FLOAT);
}

void project_few(const Layer *L, const void *x, long M, float *normal, float *out, int i, int n) {
    long K = L->hidden, sizes[3] = {L->heads * L->dim, L->kv_heads * L->dim, L->kv_heads * L->dim};
    long N = sizes[0] + 2 * sizes[1], begin = 0, first, last;
    norms(x, L->type, L->norm1, L->type, L->eps1, M, K, normal);
    const void *w[3] = {L->q, L->k, L->v}, *b[3] = {L->bq, L->bk, L->bv};
    part(N, i, n, &first, &last);
    for (int j = 0; j < 3; j++, begin += sizes[j - 1]) { /* what of this thread's part lies in each matrix */
        long low = first > begin ? first - begin : 0, high = last - begin < sizes[j] ? last - begin : sizes[j];
        if (low < high) {
            product(w[j], L->weights, K, normal, K, M, out + begin, N, low, high);
            biased(out + begin, N, M, b[j], L->type, low, high);
        }
    }
}

void leave_few(const Layer *L, const void *x, const float *a, long M, float *normal, float *stream, float *gate, float *up, void *y,
               int i, int n) {
    long K = L->hidden, wide = L->heads * L->dim, inner = L->inner, first, last, low, high;
    int type = L->type;
    part(K, i, n, &first, &last);
    product(L->o, L->weights, wide, a, wide, M, stream, K, first, last);
    biased(stream, K, M, L->bo, type, first, last);
    for (long m = 0; m < M; m++)
        for (long k = first; k < last; k += LANES)
            put(stream + m * K, FLOAT, k, last, get(stream + m * K, FLOAT, k, last) + get(at(x, type, m * K), type, k, last));
    fetch(L, L->gate, inner, K, i, n);
#pragma omp barrier
    norms(stream, FLOAT, L->norm2, type, L->eps2, M, K, normal);
    part(inner, i, n, &low, &high);
    product(L->gate, L->weights, K, normal, K, M, gate, inner, low, high);
    biased(gate, inner, M, L->bg, type, low, high);
    product(L->up, L->weights, K, normal, K, M, up, inner, low, high);
    biased(up, inner, M, L->bu, type, low, high);
    for (long m = 0; m < M; m++)
        for (long k = low; k < high; k += LANES)
            put(gate + m * inner, FLOAT, k, high,
                silu(get(gate + m * inner, FLOAT, k, high)) * get(up + m * inner, FLOAT, k, high));
    fetch(L, L->down, K, inner, i, n);
#pragma omp barrier
    product(L->down, L->weights, inner, gate, inner, M, normal, K, first, last); /* the norm is not read any more */
    biased(normal, K, M, L->bd, type, first, last);
    for (long m = 0; m < M; m++)
        for (long k = first; k < last; k += LANES)
            put(at(y, type, m * K), type, k, last, get(normal + m * K, FLOAT, k, last) + get(stream + m * K, FLOAT, k, last));
}

/* A layer for new tokens behind `start` slots of keys and values, which get theirs: x to y [B, T, K]. */
void dk_layer(const Layer *L, const void *x, long B, long T, const void *cos, const void *sin, long rope_b, long rope_t,
              const Keys *keys, const Keys *values, long start, const Mask *mask, float scale, void *y, long threads) {
    Keys k = *keys, v = *values;
    k.data = at(k.data, L->type, start * k.slot);
    v.data = at(v.data, L->type, start * v.slot);
    long M = B * T, D = L->dim, wide = L->heads * D, K = L->hidden, N = wide + 2 * L->kv_heads * D, S = start + T;
    if (many_rows(M, L->weights)) {
        float *q = floats(2 * M * wide), *a = q + M * wide;
        dk_enter(L, x, B, T, cos, sin, rope_b, rope_t, q, &k, &v, threads);
        dk_attend(q, keys, values, L->type, mask, B, T, L->heads, L->kv_heads, S, D, scale, a, threads);
        dk_leave(L, x, a, FLOAT, M, y, threads);
        free(q);
        return;
    }
    Turns turns = {cos, sin, rope_b, rope_t};
    Asked asked = {keys, values, mask, L->type, B, T, L->heads, L->kv_heads, S, D, scale};
    float *room = floats(M * (N + 2 * wide + K + 2 * L->inner + threads * K) + attend_room(&asked));
    float *out = room, *q = out + M * N, *a = q + M * wide, *stream = a + M * wide, *gate = stream + M * K;
    float *up = gate + M * L->inner, *normal = up + M * L->inner, *found = normal + threads * M * K;
#pragma omp parallel num_threads(threads)
    {
        int i = omp_get_thread_num(), n = omp_get_num_threads();
        project_few(L, x, M, normal + i * M * K, out, i, n);
        fetch(L, L->o, K, wide, i, n);
#pragma omp barrier
        for (long task = i; task < B * L->kv_heads; task += n)
            for (long t = 0, b = task / L->kv_heads; t < T; t++)
                heads_of(L, out + (b * T + t) * N, b * T + t, b, t, task % L->kv_heads, &turns, q, &k, &v);
        if (attend_room(&asked)) { /* others read what is written here */
#pragma omp barrier
        }
        attend(&asked, q, a, found, i, n);
#pragma omp barrier
        leave_few(L, x, a, M, normal + i * M * K, stream, gate, up, y, i, n);
    }
    free(room);
}
