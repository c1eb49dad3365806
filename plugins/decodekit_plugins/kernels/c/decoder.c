/* The steps of a Llama-layout decoder layer for a few tokens, each in one parallel region.

   Shapes: M tokens (B rows of T), K hidden size, D head size, S slots of keys. Tensors are dense unless strides are
   given; strides count elements. `type` is that of what comes in and goes out, `weights` that of the matrices. */
#include <omp.h>

#include "attention.h"
#include "rows.h"
#include "tokens.h"

typedef struct {
    long hidden, heads, kv_heads, dim, inner;
    long type, weights;
    float eps1, eps2, eps_q, eps_k;
    const void *norm1, *norm2, *q_norm, *k_norm;      /* q_norm, k_norm: of each head, or NULL */
    const void *q, *k, *v, *o, *gate, *up, *down;     /* matrices, a row for each output */
    const void *bq, *bk, *bv, *bo, *bg, *bu, *bd;     /* biases, or NULL */
} Layer;

static float *floats(size_t count) { return aligned_alloc(64, (count * sizeof(float) + 63) / 64 * 64); }

static void biased(float *y, long ldy, long M, const void *bias, int type, long first, long last) {
    if (bias)
        for (long m = 0; m < M; m++)
            for (long n = first; n < last; n += LANES)
                put(y + m * ldy, FLOAT, n, last, get(y + m * ldy, FLOAT, n, last) + get(bias, type, n, last));
}

/* y [M, N] in float of x [M, K] in `type`, with a bias of `type` or NULL, stored in `type`. */
void dk_linear(const void *weight, long weights, const void *bias, const void *x, long type, void *y, long M, long N, long K,
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

/* From the residual stream x [M, K] to q [M, heads, D] in float, turned, and k, v [M, kv_heads, D] in the layer's type.
   cos, sin: of token (b, t) at b * rope_b + t * rope_t. */
void dk_enter(const Layer *L, const void *x, long B, long T, const void *cos, const void *sin, long rope_b, long rope_t,
              float *q, void *k, void *v, long threads) {
    long M = B * T, K = L->hidden, D = L->dim, wide = L->heads * D, narrow = L->kv_heads * D, N = wide + 2 * narrow;
    int type = L->type;
    float *normal = floats(M * K), *out = floats(M * N);
#pragma omp parallel num_threads(threads)
    {
        int i = omp_get_thread_num(), n = omp_get_num_threads();
        for (long m = i; m < M; m += n)
            normed(at(x, type, m * K), type, L->norm1, type, L->eps1, K, normal + m * K, FLOAT);
        if (M > 1 || n > 1) {
#pragma omp barrier
        }
        const void *w[3] = {L->q, L->k, L->v}, *b[3] = {L->bq, L->bk, L->bv};
        long sizes[3] = {wide, narrow, narrow}, begin = 0, first, last;
        part(N, i, n, &first, &last);
        for (int j = 0; j < 3; j++, begin += sizes[j - 1]) { /* what of this thread's part lies in each matrix */
            long low = first > begin ? first - begin : 0, high = last - begin < sizes[j] ? last - begin : sizes[j];
            if (low < high) {
                product(w[j], L->weights, K, normal, K, M, out + begin, N, low, high);
                biased(out + begin, N, M, b[j], type, low, high);
            }
        }
#pragma omp barrier
        long all_heads = L->heads + 2 * L->kv_heads;
        for (long task = i; task < M * all_heads; task += n) {
            long m = task / all_heads, h = task % all_heads, place = (m / T) * rope_b + (m % T) * rope_t;
            float *head = out + m * N + h * D;
            const void *c = at(cos, type, place), *s = at(sin, type, place);
            if (h < L->heads) turned(head, D, L->q_norm, type, L->eps_q, c, s, q + m * wide + h * D, FLOAT);
            else if ((h -= L->heads) < L->kv_heads)
                turned(head, D, L->k_norm, type, L->eps_k, c, s, at(k, type, m * narrow + h * D), type);
            else {
                h -= L->kv_heads;
                FOR_LANES(d, D) put(at(v, type, m * narrow + h * D), type, d, D, get(head, FLOAT, d, D));
            }
        }
    }
    free(normal);
    free(out);
}

/* What attention gave, a [M, heads * D] in `atype`, through the output projection onto x [M, K], and through the
   feed-forward: y [M, K], the stream behind this layer. */
void dk_leave(const Layer *L, const void *x, const void *a, long atype, long M, void *y, long threads) {
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

/* Attention of q [B, T, heads, D] to S slots, and what `dk_leave` does with what it gives. */
void dk_rest(const Layer *L, const void *x, const float *q, const Keys *keys, const Keys *values, const Mask *mask, long B,
             long T, long S, float scale, void *y, long threads) {
    float *out = floats(B * T * L->heads * L->dim);
    dk_attend(q, keys, values, L->type, mask, B, T, L->heads, L->kv_heads, S, L->dim, scale, out, threads);
    dk_leave(L, x, out, FLOAT, B * T, y, threads);
    free(out);
}
