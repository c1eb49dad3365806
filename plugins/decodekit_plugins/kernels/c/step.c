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

typedef struct {
    Turns turns;
    Mask mask;
    long B, T;
    float *out, *q, *a, *stream, *gate, *up, *normal, *found; /* `normal` of each thread, all others shared */
} Step;

static Keys behind(const Keys *keys, int type, long start) {
    Keys k = *keys;
    k.data = at(k.data, type, start * k.slot);
    return k;
}

static Asked asked_of(const Layer *L, const Step *s, const Keys *keys, const Keys *values, long start, float scale) {
    return (Asked){keys, values, &s->mask, L->type, s->B, s->T, L->heads, L->kv_heads, start + s->T, L->dim, scale};
}

/* Thread i's part of a layer, x to y; all need a barrier behind. */
static void step(const Layer *L, const Step *s, const void *x, const Keys *keys, const Keys *values, long start, float scale, void *y,
                 int i, int n) {
    long M = s->B * s->T, wide = L->heads * L->dim, K = L->hidden, N = wide + 2 * L->kv_heads * L->dim;
    Keys k = behind(keys, L->type, start), v = behind(values, L->type, start);
    Asked asked = asked_of(L, s, keys, values, start, scale);
    float *normal = s->normal + i * M * K;
    project_few(L, x, M, normal, s->out, i, n);
    fetch(L, L->o, K, wide, i, n);
#pragma omp barrier
    for (long task = i; task < s->B * L->kv_heads; task += n)
        for (long t = 0, b = task / L->kv_heads, m = b * s->T; t < s->T; t++, m++)
            heads_of(L, s->out + m * N, m, b, t, task % L->kv_heads, &s->turns, s->q, &k, &v);
    if (attend_room(&asked)) { /* others read what is written here */
#pragma omp barrier
    }
    attend(&asked, s->q, s->a, s->found, i, n);
#pragma omp barrier
    leave_few(L, x, s->a, M, normal, s->stream, s->gate, s->up, y, i, n);
}

static void layer_of_many(const Layer *L, const Step *s, const void *x, const Keys *keys, const Keys *values, long start, float scale,
                          void *y, long threads) {
    long M = s->B * s->T, wide = L->heads * L->dim;
    float *q = floats(2 * M * wide), *a = q + M * wide;
    Keys k = behind(keys, L->type, start), v = behind(values, L->type, start);
    dk_enter(L, x, s->B, s->T, s->turns.cos, s->turns.sin, s->turns.row, s->turns.slot, q, &k, &v, threads);
    dk_attend(q, keys, values, L->type, &s->mask, s->B, s->T, L->heads, L->kv_heads, start + s->T, L->dim, scale, a, threads);
    dk_leave(L, x, a, FLOAT, M, y, threads);
    free(q);
}

/* `count` layers of one shape for new tokens behind starts[l] slots of keys[l] and values[l], which get theirs: x to y [B, T, K]. */
void dk_layers(const Layer *const *layers, long count, const void *x, long B, long T, const void *cos, const void *sin, long rope_b,
               long rope_t, const Keys *keys, const Keys *values, const long *starts, const Mask *mask, const float *scales, void *y,
               long threads) {
    const Layer *L = layers[0];
    long M = B * T, wide = L->heads * L->dim, K = L->hidden, N = wide + 2 * L->kv_heads * L->dim, most = 0;
    Step s = {.turns = {cos, sin, rope_b, rope_t}, .mask = *mask, .B = B, .T = T};
    for (long l = 0; l < count; l++) {
        Asked asked = asked_of(layers[l], &s, keys + l, values + l, starts[l], scales[l]);
        most = attend_room(&asked) > most ? attend_room(&asked) : most;
    }
    int many = many_rows(M, L->weights);
    long room = 2 * M * K + (many ? 0 : M * (N + 2 * wide + K + 2 * L->inner + threads * K) + most);
    float *between = floats(room); /* what a layer gives to the next one: two in turn */
    s.out = between + 2 * M * K;
    s.q = s.out + M * N; s.a = s.q + M * wide; s.stream = s.a + M * wide; s.gate = s.stream + M * K;
    s.up = s.gate + M * L->inner; s.normal = s.up + M * L->inner; s.found = s.normal + threads * M * K;
#define FROM(l) ((l) ? (const void *)(between + (l) % 2 * M * K) : x)
#define TO(l) ((l) + 1 < count ? (void *)(between + ((l) + 1) % 2 * M * K) : y)
    if (many) {
        for (long l = 0; l < count; l++) layer_of_many(layers[l], &s, FROM(l), keys + l, values + l, starts[l], scales[l], TO(l), threads);
    } else {
#pragma omp parallel num_threads(threads)
        for (long l = 0; l < count; l++) {
            step(layers[l], &s, FROM(l), keys + l, values + l, starts[l], scales[l], TO(l), omp_get_thread_num(), omp_get_num_threads());
            if (l + 1 < count) fetch(layers[l + 1], layers[l + 1]->q, wide, K, omp_get_thread_num(), omp_get_num_threads());
#pragma omp barrier
        }
    }
    free(between);
}
