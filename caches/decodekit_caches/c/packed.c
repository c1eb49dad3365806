/* Attention of a few queries to packed keys and values, and to the newest tokens behind them, which are not packed.

   Keys have a scale s and a least value m for each channel of a block, values for each token (or some of its channels):

       q . k = (q * s) . c + q . m            sum_t p_t v_t = sum_t (p_t s_t) c_t + sum_t p_t m_t

   so nothing is done to codes c but to make them floats. Threads share pieces of tokens; what they found is put together
   in the order of the pieces, so that sums do not depend on the number of threads. */
#include <omp.h>

#include "rows.h"

#define PIECE 256 /* tokens */

typedef struct {
    const void *codes;         /* uint8 [B, H, capacity, size / planes, D] */
    const void *scale, *least; /* keys: [B, H, capacity, D]; values: [B, H, capacity, size, groups] */
    const void *tail;          /* [B, H, room, D] */
    long capacity, room;
} Side;

typedef struct {
    const void *data;
    long type;             /* of what is added to scores, or BOOL: true for tokens that are seen */
    long row, head, query; /* strides; 0 where shared. Tokens lie side by side */
} Mask;

typedef struct {
    long bits, size, groups, type; /* type: of queries, scales, newest tokens and answers */
    long rows, heads, kv_heads, new, dim;
    long blocks, recent;
    long q_row, q_head, q_token; /* strides */
    float scale;
} Shape;

/* Memory of a thread. */
typedef struct {
    float *scores, *weights;  /* [QUERIES, room] */
    float *query, *asked;     /* [QUERIES, wide] */
    float *steps, *lows;      /* values' scales and least values [groups, room] */
    float *line;              /* [groups * room or wide] */
    char *narrow;             /* rows of less than a vector, widened to one */
    long room, wide;
} Space;

#define UP(n, unit) (((n) + (unit)-1) / (unit) * (unit))

static size_t space_of(const Shape *s, char *memory, Space *out) {
    long room = UP(s->size > PIECE ? s->size : PIECE, LANES), wide = UP(s->dim, LANES) + LANES;
    long line = s->groups * room > wide ? s->groups * room : wide;
    size_t at = 0, sizes[] = {QUERIES * room * 4, QUERIES * room * 4, QUERIES * wide * 4, QUERIES * wide * 4,
                              s->groups * room * 4, s->groups * room * 4, line * 4, room * LANES * 4};
    char *places[8];
    for (int i = 0; i < 8; i++) {
        places[i] = memory + at;
        at = UP(at + sizes[i], 64);
    }
    if (memory)
        *out = (Space){(float *)places[0], (float *)places[1], (float *)places[2], (float *)places[3],
                       (float *)places[4], (float *)places[5], (float *)places[6], places[7], room, wide};
    return at;
}

/* Rows that a vector does not fit into, copied to where it does; gives the new distance in bytes. */
static long widen(const char *rows, long step, long count, long width, int kind, char *out) {
    long unit = LANES * width_of(kind), used = width * width_of(kind);
    for (long r = 0; r < count; r++) {
        memcpy(out + r * unit, rows + r * step, used);
        memset(out + r * unit + used, 0, unit - used);
    }
    return unit;
}

/* -- a run of rows: a block, or some of the newest tokens ---------------------------------------- */

#define KINDS(CALL)                                                                                                    \
    switch (kind) {                                                                                                    \
    case FLOAT: CALL(FLOAT) break;                                                                                     \
    case BFLOAT: CALL(BFLOAT) break;                                                                                   \
    case HALF: CALL(HALF) break;                                                                                       \
    case PACKED(2): CALL(PACKED(2)) break;                                                                             \
    case PACKED(4): CALL(PACKED(4)) break;                                                                             \
    case PACKED(8): CALL(PACKED(8)) break;                                                                             \
    }

static void score_rows(Space *space, int n, const float *more, const char *rows, long step, long count, long width,
                       const char *soon, float *scores, int kind) {
#define SCORE(K)                                                                                                       \
    if (n == 1) score(space->asked, space->wide, more, rows, step, count, width, soon, scores, space->room, K, 1);     \
    else if (n == 2) score(space->asked, space->wide, more, rows, step, count, width, soon, scores, space->room, K, 2); \
    else score(space->asked, space->wide, more, rows, step, count, width, soon, scores, space->room, K, 4);
    if (width < LANES) {
        step = widen(rows, step, count, width, kind, space->narrow);
        rows = soon = space->narrow;
        width = LANES;
    }
    KINDS(SCORE)
}

/* Adds to out [n, D], `width` elements of it. */
static void mix_rows(Space *space, const float *weights, int n, const float *more, const char *rows, long step, long count,
                     long width, float *out, long D, int kind) {
    float wider[QUERIES * LANES] = {0}, *to = out;
    long apart = D, w = width;
    if (width < LANES) {
        step = widen(rows, step, count, width, kind, space->narrow);
        rows = space->narrow;
        for (int j = 0; j < n; j++) memcpy(wider + j * LANES, out + j * D, width * 4);
        to = wider;
        apart = w = LANES;
    }
    /* Strips as equal as can be: a vector that overlaps one of another strip would count twice. */
    long vectors = vectors_in(w), strips = (vectors + STRIP - 1) / STRIP;
    for (long s = 0; s < strips; s++) {
        long first = s * vectors / strips, W = (s + 1) * vectors / strips - first;
#define MIX(K, N, W) case N * 8 + W: mix(weights, space->room, more, rows, step, count, w, first, to, apart, K, N, W); break;
#define MIXES(K, N) MIX(K, N, 1) MIX(K, N, 2) MIX(K, N, 3) MIX(K, N, 4)
#define MIX_ROWS(K) switch (n * 8 + W) { MIXES(K, 1) MIXES(K, 2) MIXES(K, 4) }
        KINDS(MIX_ROWS)
    }
    if (to == wider)
        for (int j = 0; j < n; j++) memcpy(out + j * D, wider + j * LANES, width * 4);
}

/* -- keys ---------------------------------------------------------------------------------------- */

/* What is multiplied with keys: queries, times a block's scales if there are any, an overlap's lanes being zero. */
static void ask(const Shape *s, Space *space, int n, const void *scale, const void *least, float *more) {
    long D = s->dim, last = (vectors_in(D) - 1) * LANES;
    for (int j = 0; j < n; j++) {
        float *to = space->asked + j * space->wide, *line = D % LANES && D > LANES ? space->line : to;
        const float *query = space->query + j * space->wide;
        V sum_ = all(0);
        FOR_LANES(d, D) {
            V q = from_float(query + d);
            store(line, FLOAT, d, scale ? q * get(scale, s->type, d, D) : q);
            if (scale) sum_ += q * get(least, s->type, d, D);
        }
        more[j] = sum(sum_);
        if (line != to) {
            memcpy(to, line, D * 4);
            memset(to + last, 0, LANES * 4);
            memcpy(to + last + LANES - (D - last), line + last, (D - last) * 4);
        }
    }
}

/* -- values -------------------------------------------------------------------------------------- */

/* Scales, each divided by what its codes are too large by, and least values of a block, by group. */
static void marks_of(const Shape *s, Space *space, const void *scale, const void *least) {
    long G = s->groups, room = space->room, tokens = s->size, count = tokens * s->bits / 8;
    for (int which = 0; which < 2; which++) {
        float *to = which ? space->lows : space->steps, *line = G > 1 ? space->line : to;
        const void *from = which ? least : scale;
        FOR_LANES(i, tokens * G) put(line, FLOAT, i, tokens * G, get(from, s->type, i, tokens * G));
        if (G > 1)
            for (long g = 0; g < G; g++)
                for (long t = 0; t < tokens; t++) to[g * room + t] = line[t * G + g];
        if (!which)
            for (long g = 0; g < G; g++)
                for (long p = 1; p < 8 / s->bits; p++) {
                    float *plane = to + g * room + p * count, unit = 1.0f / (1 << (p * s->bits));
                    for (long t = 0; t < count; t++) plane[t] *= unit;
                }
    }
}

static void mix_block(const Shape *s, Space *space, const float *shares, int n, const char *codes, float *out) {
    long width = s->dim / s->groups, tokens = s->size, room = space->room;
    for (long g = 0; g < s->groups; g++) {
        float more[QUERIES] = {0};
        for (int j = 0; j < n; j++) {
            V low = all(0);
            FOR_LANES(t, tokens) {
                V share = get(shares + j * room, FLOAT, t, tokens);
                put(space->weights + j * room, FLOAT, t, tokens, share * get(space->steps + g * room, FLOAT, t, tokens));
                low += share * get(space->lows + g * room, FLOAT, t, tokens);
            }
            more[j] = sum(low);
        }
        mix_rows(space, space->weights, n, more, codes + g * width, s->dim, tokens * s->bits / 8, width, out + g * width, s->dim,
                 PACKED(s->bits));
    }
}

/* -- between them -------------------------------------------------------------------------------- */

static void add_mask(float *scores, const Mask *mask, long from, long count) {
    if (mask->type == BOOL)
        for (long t = 0; t < count; t++) scores[t] = ((const uint8_t *)mask->data)[from + t] ? scores[t] : -INFINITY;
    else
        FOR_LANES(t, count)
        put(scores, FLOAT, t, count, get(scores, FLOAT, t, count) + get(at(mask->data, mask->type, from), mask->type, t, count));
}

/* Scores become weights; gives their sum, and what was taken off before the exponential. */
static float weigh(float *scores, long count, float *top) {
    V most = all(-INFINITY);
    FOR_LANES(t, count) {
        V x = get(scores, FLOAT, t, count);
        for (long i = count - t; i < LANES; i++) x[i] = -INFINITY;
        most = where((x > most) | (x != x), x, most);
    }
    float best = most[0];
    for (int i = 1; i < LANES; i++) best = most[i] > best || most[i] != most[i] ? most[i] : best;
    *top = best;
    if (best == -INFINITY) {
        memset(scores, 0, count * sizeof(float));
        return 0;
    }
    V total = all(0);
    FOR_LANES(t, count) {
        V e = exponential(get(scores, FLOAT, t, count) - best);
        if (count - t < LANES)
            for (long i = count - t; i < LANES; i++) e[i] = 0;
        put(scores, FLOAT, t, count, e);
        total += e;
    }
    return sum(total);
}

/* Whether none of n queries sees any of these tokens: those before a window, or of padding. */
static int unseen(const Mask *mask, const long *masked, int n, long start, long tokens) {
    if (!mask->data || mask->type != BOOL) return 0;
    for (int j = 0; j < n; j++)
        if (memchr((const char *)mask->data + masked[j] + start, 1, tokens)) return 0;
    return 1;
}

/* Scores, weights and mix of one piece, for n queries. */
static void attend_piece(const Shape *s, const Side *keys, const Side *values, Space *space, long place, long piece,
                         long per_piece, int n, float *top, float *total, float *out, const Mask *mask, const long *masked) {
    long D = s->dim, room = space->room, lines = s->size * s->bits / 8, packed = (s->blocks + per_piece - 1) / per_piece;
    long first = piece * per_piece, tokens, start;
    float more[QUERIES];
    int filled = n == 3 ? 4 : n; /* a fourth that is not looked at */
    long count = s->blocks - first < per_piece ? s->blocks - first : per_piece, unit = width_of(s->type);
    if (piece < packed) {
        start = first * s->size;
        tokens = count * s->size;
    } else {
        first = (piece - packed) * PIECE;
        start = s->blocks * s->size + first;
        tokens = s->recent - first < PIECE ? s->recent - first : PIECE;
    }
    memset(out, 0, filled * D * sizeof(float));
    if (unseen(mask, masked, n, start, tokens)) {
        for (int j = 0; j < n; j++) top[j] = -INFINITY, total[j] = 0;
        return;
    }
    const char *k, *v;
    if (piece < packed) {
        k = (const char *)keys->codes + (place * keys->capacity + first) * lines * D;
        v = (const char *)values->codes + (place * values->capacity + first) * lines * D;
        for (long b = 0; b < count; b++) {
            long mark = (place * keys->capacity + first + b) * D;
            ask(s, space, filled, at(keys->scale, s->type, mark), at(keys->least, s->type, mark), more);
            score_rows(space, filled, more, k + b * lines * D, D, lines, D, v + b * lines * D,
                       space->scores + b * s->size, PACKED(s->bits));
        }
    } else {
        k = at(keys->tail, s->type, (place * keys->room + first) * D);
        v = at(values->tail, s->type, (place * values->room + first) * D);
        ask(s, space, filled, NULL, NULL, more);
        score_rows(space, filled, more, k, D * unit, tokens, D, v, space->scores, s->type);
    }
    for (int j = 0; j < n; j++) {
        if (mask->data) add_mask(space->scores + j * room, mask, masked[j] + start, tokens);
        total[j] = weigh(space->scores + j * room, tokens, top + j);
    }
    if (piece >= packed) {
        memset(more, 0, sizeof(more));
        mix_rows(space, space->scores, filled, more, v, D * unit, tokens, D, out, D, s->type);
        return;
    }
    for (long b = 0; b < count; b++) {
        long mark = (place * values->capacity + first + b) * s->size * s->groups;
        marks_of(s, space, at(values->scale, s->type, mark), at(values->least, s->type, mark));
        mix_block(s, space, space->scores + b * s->size, filled, v + b * lines * D, out);
    }
}

INLINE V bounded(V x) { return where(x > all(65504.0f), all(65504.0f), where(x < all(-65504.0f), all(-65504.0f), x)); }

/* q [B, heads, T, D] to out [B, T, heads, D]; a query that sees nothing gets zeros. Gives 1 if there is no memory, else 0. */
int dk_attend_packed(const Shape *s, const void *q, const Side *keys, const Side *values, const Mask *mask, void *out,
                     long threads) {
    long D = s->dim, group = s->heads / s->kv_heads, per = group * s->new;
    long per_piece = s->size < PIECE ? PIECE / s->size : 1;
    long pieces = (s->blocks + per_piece - 1) / per_piece + (s->recent + PIECE - 1) / PIECE;
    long tasks = s->rows * s->kv_heads * pieces;
    /* Of each task: QUERIES mixes more than asked, so that four can be written; of each of its queries: greatest score, sum of
       weights, and D of the mix. */
    long padded = UP(per, QUERIES);
    size_t found = UP(tasks * padded * (D + 2) * sizeof(float), 64), each = space_of(s, NULL, NULL);
    char *memory = aligned_alloc(64, found + threads * each);
    if (!memory) return 1;
    float *tops = (float *)memory, *totals = tops + tasks * padded, *mixes = totals + tasks * padded;
#pragma omp parallel num_threads(threads)
    {
        Space space;
        space_of(s, memory + found + omp_get_thread_num() * each, &space);
        memset(space.query, 0, 2 * QUERIES * space.wide * sizeof(float));
#pragma omp for schedule(static)
        for (long task = 0; task < tasks; task++) {
            long place = task / pieces, h = place % s->kv_heads, b = place / s->kv_heads;
            for (long i = 0; i < per; i += QUERIES) {
                int n = per - i < QUERIES ? (int)(per - i) : QUERIES;
                long masked[QUERIES], slot = task * padded + i;
                for (int j = 0; j < n; j++) {
                    long head = h * group + (i + j) % group, t = (i + j) / group;
                    const void *from = at(q, s->type, b * s->q_row + head * s->q_head + t * s->q_token);
                    FOR_LANES(d, D) store(space.query + j * space.wide, FLOAT, d, get(from, s->type, d, D) * s->scale);
                    masked[j] = b * mask->row + head * mask->head + t * mask->query;
                }
                attend_piece(s, keys, values, &space, place, task % pieces, per_piece, n, tops + slot, totals + slot,
                             mixes + slot * D, mask, masked);
            }
        }
#pragma omp for schedule(static)
        for (long job = 0; job < s->rows * s->kv_heads * per; job++) {
            long place = job / per, i = job % per, h = place % s->kv_heads, b = place / s->kv_heads;
            long first = place * pieces * padded + i, end = first + pieces * padded;
            void *to = at(out, s->type, ((b * s->new + i / group) * s->heads + h * group + i % group) * D);
            float top = -INFINITY, total = 0;
            for (long p = first; p < end; p += padded) top = tops[p] > top || tops[p] != tops[p] ? tops[p] : top;
            memset(space.asked, 0, D * sizeof(float));
            for (long p = first; p < end && top != -INFINITY; p += padded) {
                float share = expf(tops[p] - top);
                total += totals[p] * share;
                for (long d = 0; d < D; d++) space.asked[d] += mixes[p * D + d] * share;
            }
            float part = total == 0 ? 0 : 1 / total;
            FOR_LANES(d, D) {
                V x = from_float(space.asked + d) * part;
                put(to, s->type, d, D, s->type == HALF ? bounded(x) : x);
            }
        }
    }
    free(memory);
    return 0;
}
