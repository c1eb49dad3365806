/* Attention of a few queries to all keys, in pieces of slots that threads share; sums do not depend on their number. */
#include <omp.h>

#include "attention.h"

#define PIECE 256 /* slots */

#define QUERIES 4
#define AHEAD 8 /* slots that are fetched before they are read */
#define STRIP 64 /* of a head: four vectors for each of four queries */

INLINE float dot(const float *a, const void *b, int type, long D) {
    V s = all(0);
    FOR_LANES(d, D) s += get(a, FLOAT, d, D) * get(b, type, d, D);
    return sum(s);
}

/* Scores of N queries for LANES / N slots at a time: as many sums as a vector holds. */
#define SCORES(N)                                                                                                     \
    INLINE long scores_##N(const float *query, const void *keys, long slot, long count, long D, float *scores, int type) {  \
        enum { AT_ONCE = LANES / N };                                                                                   \
        long s = 0;                                                                                                     \
        for (; s + AT_ONCE <= count; s += AT_ONCE) {                                                                    \
            V x[LANES];                                                                                                 \
            for (int i = 0; i < LANES; i++) x[i] = all(0);                                                              \
            for (long d = 0; d < D; d += LANES)                                                                         \
                _Pragma("GCC unroll 16") for (int i = 0; i < AT_ONCE; i++) {                                            \
                    V k = load(at(keys, type, (s + i) * slot), type, d);                                                \
                    __builtin_prefetch(at(keys, type, (s + i + AT_ONCE) * slot + d), 0, 3);                             \
                    _Pragma("GCC unroll 4") for (int j = 0; j < N; j++)                                                 \
                        x[j * AT_ONCE + i] += from_float(query + j * D + d) * k;                                        \
                }                                                                                                       \
            V found = sums_of(x);                                                                                       \
            for (int j = 0; j < N; j++) memcpy(scores + j * PIECE + s, (char *)&found + j * AT_ONCE * 4, AT_ONCE * 4);  \
        }                                                                                                               \
        return s;                                                                                                       \
    }
SCORES(1)
SCORES(2)
SCORES(4)

/* Scores [n, PIECE] of n queries [QUERIES, D], of which those behind n may be anything. */
INLINE void score_of(const float *query, int n, const void *keys, long slot, long count, long D, float *scores, int type) {
    long s = 0;
    if (D % LANES == 0)
        s = n == 1   ? scores_1(query, keys, slot, count, D, scores, type)
            : n == 2 ? scores_2(query, keys, slot, count, D, scores, type)
                     : scores_4(query, keys, slot, count, D, scores, type);
    for (; s < count; s++)
        for (int j = 0; j < n; j++) scores[j * PIECE + s] = dot(query + j * D, at(keys, type, s * slot), type, D);
}

/* Code of its own for each type: no question inside of loops. */
#define BY_TYPE(CALL, ...)                                                                                            \
    if (type == FLOAT) CALL(__VA_ARGS__, FLOAT);                                                                        \
    else if (type == BFLOAT) CALL(__VA_ARGS__, BFLOAT);                                                                 \
    else CALL(__VA_ARGS__, HALF)

static void add_mask(float *scores, const Mask *mask, long b, long t, long first, long count) {
    long from = b * mask->row + t * mask->query + first;
    if (mask->type == BOOL)
        for (long s = 0; s < count; s++) scores[s] = ((const uint8_t *)mask->data)[from + s] ? scores[s] : -INFINITY;
    else
        FOR_LANES(s, count)
        put(scores, FLOAT, s, count, get(scores, FLOAT, s, count) + get(at(mask->data, mask->type, from), mask->type, s, count));
}

/* Scores become weights; gives their sum, and what was taken off before the exponential. */
static float weigh(float *scores, long count, float *top) {
    float best = -INFINITY;
    for (long s = 0; s < count; s++) best = scores[s] > best || scores[s] != scores[s] ? scores[s] : best;
    *top = best;
    if (best == -INFINITY) {
        memset(scores, 0, count * sizeof(float));
        return 0;
    }
    V total = all(0);
    long s = 0;
    for (; s + LANES <= count; s += LANES) {
        V e = exponential(from_float(scores + s) - best);
        *(LooseV *)(scores + s) = e;
        total += e;
    }
    float rest = 0;
    if (s < count) {
        V e = exponential(load_some(scores, FLOAT, s, count - s) - best);
        store_some(scores, FLOAT, s, e, count - s);
        for (long i = 0; i < count - s; i++) rest += e[i];
    }
    return sum(total) + rest;
}

/* N queries by W vectors of values, from element d on. */
#define MIX(N, W)                                                                                                     \
    INLINE void mix_##N##_##W(const float *weights, const void *values, long slot, long count, long D, float *out, int type) { \
        V x[N][W];                                                                                                      \
        for (int i = 0; i < N; i++)                                                                                     \
            for (int j = 0; j < W; j++) x[i][j] = all(0);                                                               \
        for (long s = 0; s < count; s++) {                                                                              \
            _Pragma("GCC unroll 4") for (int j = 0; j < W; j++) {                                                       \
                V v = load(at(values, type, s * slot), type, j * LANES);                                                \
                __builtin_prefetch(at(values, type, (s + AHEAD) * slot + j * LANES), 0, 3);                             \
                _Pragma("GCC unroll 4") for (int i = 0; i < N; i++) x[i][j] += weights[i * PIECE + s] * v;              \
            }                                                                                                           \
        }                                                                                                               \
        for (int i = 0; i < N; i++)                                                                                     \
            for (int j = 0; j < W; j++) store(out + i * D, FLOAT, j * LANES, x[i][j]);                                  \
    }
#define MIXES(N) MIX(N, 1) MIX(N, 2) MIX(N, 3) MIX(N, 4)
MIXES(1)
MIXES(2)
MIXES(3)
MIXES(4)
#define WIDE(N, W) case N * 8 + W: mix_##N##_##W(weights, v, slot, count, D, to, type); break;
#define WIDTHS(N) WIDE(N, 1) WIDE(N, 2) WIDE(N, 3) WIDE(N, 4)

/* out [n, D] = weights [n, PIECE] times values, for n <= QUERIES. */
INLINE void mix_of(const float *weights, int n, const void *values, long slot, long count, long D, float *out, int type) {
    for (long d = 0; d < D; d += STRIP) {
        long width = D - d < STRIP ? D - d : STRIP;
        const void *v = at(values, type, d);
        float *to = out + d;
        if (width % LANES == 0)
            switch (n * 8 + width / LANES) { WIDTHS(1) WIDTHS(2) WIDTHS(3) WIDTHS(4) }
        else
            for (int i = 0; i < n; i++)
                for (long e = 0; e < width; e += LANES) {
                    V x = all(0);
                    for (long s = 0; s < count; s++) x += weights[i * PIECE + s] * get(at(v, type, s * slot), type, e, width);
                    put(to + i * D, FLOAT, e, width, x);
                }
    }
}

static long pieces_of(const Asked *j) { return (j->S + PIECE - 1) / PIECE; }

/* Of each piece and query: greatest score, sum of weights, and D of the mix. */
long attend_room(const Asked *j) { return pieces_of(j) > 1 ? j->B * j->T * j->heads * pieces_of(j) * (j->D + 2) : 0; }

void attend(const Asked *j, const float *q, float *out, float *found, int thread, int threads) {
    long T = j->T, D = j->D, heads = j->heads, kv_heads = j->kv_heads;
    long group = heads / kv_heads, per = group * T, pieces = pieces_of(j), tasks = j->B * kv_heads * pieces;
    int type = j->type;
    float *tops = found, *totals = found + tasks * per, *mixes = found + 2 * tasks * per;
    float scores[QUERIES * PIECE] __attribute__((aligned(64)));
    float query[QUERIES * D] __attribute__((aligned(64))), mixed[QUERIES * D];
    for (long task = thread; task < tasks; task += threads) {
        long piece = task % pieces, h = task / pieces % kv_heads, b = task / pieces / kv_heads;
        long first = piece * PIECE, count = j->S - first < PIECE ? j->S - first : PIECE;
        const void *k = at(j->keys->data, type, b * j->keys->row + h * j->keys->head + first * j->keys->slot);
        const void *v = at(j->values->data, type, b * j->values->row + h * j->values->head + first * j->values->slot);
        for (long i = 0; i < per; i += QUERIES) {
            int n = per - i < QUERIES ? (int)(per - i) : QUERIES;
            float top[QUERIES], total[QUERIES];
            for (int o = 0; o < n; o++) {
                const float *from = q + ((b * T + (i + o) / group) * heads + h * group + (i + o) % group) * D;
                for (long d = 0; d < D; d++) query[o * D + d] = from[d] * j->scale;
            }
            if (n == 3) memcpy(query + 3 * D, query, D * sizeof(float)); /* a fourth that is not looked at */
            BY_TYPE(score_of, query, n, k, j->keys->slot, count, D, scores);
            for (int o = 0; o < n; o++) {
                if (j->mask->data) add_mask(scores + o * PIECE, j->mask, b, (i + o) / group, first, count);
                total[o] = weigh(scores + o * PIECE, count, top + o);
            }
            float *to = pieces > 1 ? mixes + (task * per + i) * D : mixed;
            BY_TYPE(mix_of, scores, n, v, j->values->slot, count, D, to);
            for (int o = 0; o < n; o++) {
                if (pieces > 1) {
                    tops[task * per + i + o] = top[o];
                    totals[task * per + i + o] = total[o];
                    continue;
                }
                float *to = out + ((b * T + (i + o) / group) * heads + h * group + (i + o) % group) * D;
                float part = total[o] == 0 ? 0 : 1 / total[o];
                for (long d = 0; d < D; d++) to[d] = mixed[o * D + d] * part;
            }
        }
    }
    if (pieces == 1) return;
#pragma omp barrier
    for (long job = thread; job < j->B * kv_heads * per; job += threads) {
        long place = job / per * pieces, i = job % per, h = job / per % kv_heads, b = job / per / kv_heads;
        float *to = out + ((b * T + i / group) * heads + h * group + i % group) * D;
        float top = -INFINITY, total = 0;
        for (long p = place; p < place + pieces; p++) {
            float mine = tops[p * per + i];
            top = mine > top || mine != mine ? mine : top;
        }
        for (long d = 0; d < D; d++) to[d] = 0;
        if (top == -INFINITY) continue;
        for (long p = place; p < place + pieces; p++) {
            float share = expf(tops[p * per + i] - top);
            total += totals[p * per + i] * share;
            for (long d = 0; d < D; d++) to[d] += mixes[(p * per + i) * D + d] * share;
        }
        for (long d = 0; d < D; d++) to[d] /= total;
    }
}

void dk_attend(const float *q, const Keys *keys, const Keys *values, long type, const Mask *mask, long B, long T, long heads,
               long kv_heads, long S, long D, float scale, float *out, long threads) {
    Asked asked = {keys, values, mask, type, B, T, heads, kv_heads, S, D, scale};
    float *found = floats(attend_room(&asked));
#pragma omp parallel num_threads(threads)
    attend(&asked, q, out, found, omp_get_thread_num(), omp_get_num_threads());
    free(found);
}
