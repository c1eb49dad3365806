/* Attention of many queries (arXiv:2205.14135): queries of a panel are lanes, so that both products are those of panels, and
   the softmax needs no sums across a vector. Keys and values of a block are read once for all heads that share them. */
#include <omp.h>

#include "attention.h"
#include "panels.h"

#define SLOTS (2 * CHUNK) /* of keys in a block */

typedef struct {
    const float *q;
    const Keys *keys, *values;
    long type, causal, T, heads, group, S, D;
    float scale;
    float *out;
} Job;

INLINE V lanes(void) { return (V){0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15}; }

/* Queries first.. of a head, as a panel [D, wide], scaled. */
static void queries(const Job *j, long b, long h, long first, long rows, long wide, float *to) {
    for (long d = 0; d < j->D; d += LANES) {
        long width = j->D - d < LANES ? j->D - d : LANES;
        for (long r = 0; r < wide; r += LANES) {
            V x[LANES];
            for (long i = 0; i < LANES; i++) {
                long from = ((b * j->T + first + r + i) * j->heads + h) * j->D + d;
                x[i] = r + i < rows ? get(j->q, FLOAT, from, from + width) * j->scale : all(0);
            }
            transpose(x);
            for (long i = 0; i < width; i++) *(V *)(to + (d + i) * wide + r) = x[i];
        }
    }
}

/* Keys [count, D] in float, zeros up to SLOTS behind them; values turned, [D, SLOTS]. */
static void block(const Job *j, long b, long h, long first, long count, float *keys, float *values) {
    const void *k = at(j->keys->data, j->type, b * j->keys->row + h * j->keys->head + first * j->keys->slot);
    const void *v = at(j->values->data, j->type, b * j->values->row + h * j->values->head + first * j->values->slot);
    for (long s = 0; s < count; s++)
        FOR_LANES(d, j->D) put(keys + s * j->D, FLOAT, d, j->D, get(at(k, j->type, s * j->keys->slot), j->type, d, j->D));
    memset(keys + count * j->D, 0, (SLOTS - count) * j->D * sizeof(float));
    for (long d = 0; d < j->D; d += LANES) {
        long width = j->D - d < LANES ? j->D - d : LANES;
        for (long s = 0; s < SLOTS; s += LANES) {
            V x[LANES];
            for (long i = 0; i < LANES; i++)
                x[i] = s + i < count ? get(at(v, j->type, (s + i) * j->values->slot), j->type, d, d + width) : all(0);
            transpose(x);
            for (long i = 0; i < width; i++) *(V *)(values + (d + i) * SLOTS + s) = x[i];
        }
    }
}

/* Scores [SLOTS, wide] become weights; totals and what was mixed [D, wide] so far are scaled to
   the greatest score so far, `tops`. */
static void weigh(float *scores, long count, long wide, float *tops, float *totals, float *mixed, long D) {
    for (long r = 0; r < wide; r += LANES) {
        V best = *(V *)(tops + r), old = best, total = all(0);
        for (long s = 0; s < count; s++) {
            V x = *(V *)(scores + s * wide + r);
            best = where((x > best) | (x != x), x, best);
        }
        V taken = where(best == all(-INFINITY), all(0), best);
        for (long s = 0; s < count; s++) {
            V *x = (V *)(scores + s * wide + r);
            *x = exponential(*x - taken);
            total += *x;
        }
        V share = exponential(old - taken);
        *(V *)(totals + r) = *(V *)(totals + r) * share + total;
        *(V *)(tops + r) = best;
        int same = 1;
        for (int i = 0; i < LANES; i++) same &= share[i] == 1;
        if (!same)
            for (long d = 0; d < D; d++) *(V *)(mixed + d * wide + r) *= share;
    }
}

/* A panel of queries, first.., to all heads that share the keys of head h. */
static void attend_panel(const Job *j, long b, long h, long first, float *room) {
    long D = j->D, padded = (D + CHUNK - 1) / CHUNK * CHUNK, rows = j->T - first < PANEL ? j->T - first : PANEL;
    long wide = lanes_of(rows), offset = j->S - j->T, end = j->causal ? offset + first + rows : j->S;
    float *keys = room, *values = keys + SLOTS * D, *scores = values + padded * SLOTS, *asked = scores + SLOTS * wide;
    float *mixed = asked + j->group * D * wide, *tops = mixed + j->group * padded * wide, *totals = tops + j->group * wide;
    memset(values + D * SLOTS, 0, (padded - D) * SLOTS * sizeof(float));
    for (long g = 0; g < j->group; g++) {
        queries(j, b, h * j->group + g, first, rows, wide, asked + g * D * wide);
        FOR_LANES(r, wide) *(V *)(tops + g * wide + r) = all(-INFINITY);
    }
    memset(mixed, 0, j->group * padded * wide * sizeof(float));
    memset(totals, 0, j->group * wide * sizeof(float));
    for (long s = 0; s < end; s += SLOTS) {
        long count = end - s < SLOTS ? end - s : SLOTS;
        block(j, b, h, s, count, keys, values);
        for (long g = 0; g < j->group; g++) {
            float *to = mixed + g * padded * wide;
            multiply(keys, D, count, asked + g * D * wide, wide, D, scores, 1, 0);
            if (j->causal && s + count > offset + first)
                for (long i = 0; i < count; i++)
                    FOR_LANES(r, wide) {
                        V *x = (V *)(scores + i * wide + r);
                        *x = where(lanes() + (float)r < all((float)(s + i - offset - first)), all(-INFINITY), *x);
                    }
            weigh(scores, count, wide, tops + g * wide, totals + g * wide, to, D);
            multiply(values, SLOTS, D, scores, wide, count, to, 0, 0);
        }
    }
    for (long g = 0; g < j->group; g++)
        for (long d = 0; d < D; d += LANES)
            for (long r = 0; r < rows; r += LANES) {
                V x[LANES], total = *(V *)(totals + g * wide + r), part = where(total == all(0), all(0), 1.0f / total);
                for (long i = 0; i < LANES; i++) x[i] = *(V *)(mixed + (g * padded + d + i) * wide + r) * part;
                transpose(x);
                for (long i = 0; i < LANES && r + i < rows; i++) {
                    long to = ((b * j->T + first + r + i) * j->heads + h * j->group + g) * D;
                    put(j->out + to, FLOAT, d, D, x[i]);
                }
            }
}

/* q [B, T, heads, D] in float to out [B, T, heads, D] in float; keys and values [B, kv_heads, S, D] in `type`. `causal`:
   query t sees slots up to S - T + t. A query that sees nothing gets zeros. */
void dk_prompt(const float *q, const Keys *keys, const Keys *values, long type, long causal, long B, long T,
               long heads, long kv_heads, long S, long D, float scale, float *out, long threads) {
    long group = heads / kv_heads, panels = (T + PANEL - 1) / PANEL, padded = (D + CHUNK - 1) / CHUNK * CHUNK;
    Job job = {q, keys, values, type, causal, T, heads, group, S, D, scale, out};
#pragma omp parallel num_threads(threads)
    {
        float *room = floats(SLOTS * D + padded * SLOTS + SLOTS * PANEL + group * PANEL * (D + padded + 2));
#pragma omp for schedule(dynamic, 1)
        for (long task = B * kv_heads * panels - 1; task >= 0; task--) /* later queries see more: they go first */
            attend_panel(&job, task % (B * kv_heads) / kv_heads, task % kv_heads, task / (B * kv_heads) * PANEL, room);
        free(room);
    }
}
