/* What a Llama-layout decoder layer is made of.

   Shapes: M tokens (B rows of T), K hidden size, D head size, S slots of keys. Tensors are dense unless strides are
   given; strides count elements. `type` is that of what comes in and goes out, `weights` that of the matrices. */
#ifndef DECODEKIT_DECODER_H
#define DECODEKIT_DECODER_H

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

typedef struct {
    const void *cos, *sin; /* of token (b, t) at b * row + t * slot */
    long row, slot;
} Turns;

/* Heads h.. of token m, of row b and place t, behind the projections: q, k and v of one head of keys, turned, and where
   they belong; q [M, heads, D] in float. */
INLINE void heads_of(const Layer *L, const float *out, long m, long b, long t, long h, const Turns *turns, float *q, const Keys *k,
                     const Keys *v) {
    long D = L->dim, group = L->heads / L->kv_heads, wide = L->heads * D, place = b * turns->row + t * turns->slot;
    int type = L->type;
    const void *c = at(turns->cos, type, place), *s = at(turns->sin, type, place);
    float head[D];
    for (long g = h * group; g < (h + 1) * group; g++) {
        memcpy(head, out + g * D, D * sizeof(float));
        turned(head, D, L->q_norm, type, L->eps_q, c, s, q + m * wide + g * D, FLOAT);
    }
    memcpy(head, out + wide + h * D, D * sizeof(float));
    turned(head, D, L->k_norm, type, L->eps_k, c, s, at(k->data, type, b * k->row + h * k->head + t * k->slot), type);
    void *to = at(v->data, type, b * v->row + h * v->head + t * v->slot);
    FOR_LANES(d, D) put(to, type, d, D, get(out + wide + (L->kv_heads + h) * D, FLOAT, d, D));
}

/* Of a few tokens x [M, K] thread i's part (of n) of each step; `normal` [M, K] is the thread's own.
   q, k and v before their turn, out [M, N]: */
void project_few(const Layer *L, const void *x, long M, float *normal, float *out, int i, int n);
/* From what attention gave, a [M, heads * D], through the output projection onto x, and through the feed-forward to y [M, K];
   stream [M, K], gate and up [M, inner] are shared. All threads pass two barriers inside, and need one behind. */
void leave_few(const Layer *L, const void *x, const float *a, long M, float *normal, float *stream, float *gate, float *up, void *y,
               int i, int n);

void dk_enter(const Layer *L, const void *x, long B, long T, const void *cos, const void *sin, long rope_b, long rope_t,
              float *q, const Keys *k, const Keys *v, long threads);
void dk_leave(const Layer *L, const void *x, const void *a, long atype, long M, void *y, long threads);

#endif
