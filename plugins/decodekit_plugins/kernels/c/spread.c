/* Products of many rows, shared out among threads, with what is done to their outputs while these are near. */
#include "panels.h"
#include "tiles.h"

void unpack(const float *found, long count, long lanes, const Matrix *w, long n, Rows more, Rows y, long first, long rows) {
    int plain = y.type == FLOAT && (!more.data || more.type == FLOAT);
    for (long r = 0; r < rows; r += LANES)
        for (long c = 0; c < count; c += LANES) {
            long width = count - c < LANES ? count - c : LANES, high = rows - r < LANES ? rows - r : LANES;
            long to = (first + r) * y.ld + n + c, from = (first + r) * more.ld + n + c;
            V block[LANES], add = w->bias ? get(w->bias, w->btype, n + c, n + c + width) : all(0);
            for (long j = 0; j < LANES; j++) block[j] = j < width ? *(const V *)(found + (c + j) * lanes + r) : all(0);
            transpose(block);
            if (plain && width == LANES && high == LANES)
                for (long j = 0; j < LANES; j++) {
                    V sum = block[j] + add;
                    if (more.data) sum += load(more.data, FLOAT, from + j * more.ld);
                    store(y.data, FLOAT, to + j * y.ld, sum);
                }
            else
                for (long j = 0; j < high; j++, to += y.ld, from += more.ld) {
                    V sum = block[j] + add;
                    if (more.data) sum += get(more.data, more.type, from, from + width);
                    put(y.data, y.type, to, to + width, sum);
                }
        }
}

/* How thread i of n shares in all chunks of all panels: tasks first..last, each a chunk of N and `size` panels, which stay
   in the second cache while chunks pass. */
typedef struct {
    long chunks, size, first, last;
} Share;

static Share share(const Panels *x, long N, int i, int n) {
    Share s = {.chunks = (N + CHUNK - 1) / CHUNK, .size = x->count};
    while (s.size > 1 && (s.size * x->size > FAR || (x->count + s.size - 1) / s.size * s.chunks < 4 * n))
        s.size = (s.size + 1) / 2;
    part_of((x->count + s.size - 1) / s.size * s.chunks, i, n, &s.first, &s.last);
    return s;
}

#define FOR_TASKS(s, t) for (long t = (s).first; t < (s).last; t++)
#define FOR_PANELS(s, t, x, p)                                                                                        \
    for (long p = t / (s).chunks * (s).size; p < (t / (s).chunks + 1) * (s).size && p < (x)->count; p++)
#define CHUNK_OF(s, t, N, n, count) long n = t % (s).chunks * CHUNK, count = (N) - n < CHUNK ? (N) - n : CHUNK

float *chunk_room(const Panels *x, long K) { return floats(TILES && x->parts ? tiles_room(x) : CHUNK * K); }

void spread(const Panels *x, const Matrix *w, Rows more, Rows y, float *room, int i, int n) {
    if (TILES && x->parts) {
        spread_tiles(x, w, more, y, room, i, n);
        return;
    }
    float found[CHUNK * PANEL] __attribute__((aligned(64)));
    Share s = share(x, w->N, i, n);
    FOR_TASKS(s, t) {
        CHUNK_OF(s, t, w->N, first, count);
        const float *a = opened(w, first, count, room);
        int fetch = a != room;
        FOR_PANELS(s, t, x, p) {
            multiply(a, w->K, count, panel_of(x, p), lanes_of(rows_of(x, p)), w->K, found, 1, fetch);
            unpack(found, count, lanes_of(rows_of(x, p)), w, first, more, y, p * PANEL, rows_of(x, p));
            fetch = 0;
        }
    }
}

void gate_by(float *found, const float *up_found, long count, long lanes, const Matrix *gate, const Matrix *up, long first) {
    for (long c = 0; c < count; c++) {
        V more = gate->bias ? all(number(gate->bias, gate->btype, first + c)) : all(0);
        V also = up->bias ? all(number(up->bias, up->btype, first + c)) : all(0);
        FOR_LANES(r, lanes) {
            V *x = (V *)(found + c * lanes + r);
            *x = silu(*x + more) * (*(const V *)(up_found + c * lanes + r) + also);
        }
    }
}

void gated(const Panels *x, const Matrix *gate, const Matrix *up, const Panels *y, float *room, float *other, int i,
                  int n) {
    if (TILES && x->parts) {
        gated_tiles(x, gate, up, y, room, i, n);
        return;
    }
    float found[2][CHUNK * PANEL] __attribute__((aligned(64)));
    Share s = share(x, gate->N, i, n);
    FOR_TASKS(s, t) {
        CHUNK_OF(s, t, gate->N, first, count);
        const float *a = opened(gate, first, count, room), *b = opened(up, first, count, other);
        int fetch = a != room;
        FOR_PANELS(s, t, x, p) {
            long lanes = lanes_of(rows_of(x, p));
            multiply(a, x->K, count, panel_of(x, p), lanes, x->K, found[0], 1, fetch);
            multiply(b, x->K, count, panel_of(x, p), lanes, x->K, found[1], 1, fetch);
            fetch = 0;
            gate_by(found[0], found[1], count, lanes, gate, up, first);
            memcpy((float *)panel_of(y, p) + first * lanes, found[0], count * lanes * sizeof(float));
        }
    }
}
