/* Products of panels by a processor's matrix unit (Intel's AMX), which multiplies bfloat16 and sums in float.

   A float is the sum of three bfloat16, exactly, since these hold eight of its 24 bits each; so products of floats are
   sums of products of parts, of which those are left out that are smaller than a float's last bit (arXiv:1904.06376).
   That takes six products, or three where the weight is bfloat16 itself, of which the unit does sixteen in the time of
   one in float. */
#ifndef DECODEKIT_TILES_H
#define DECODEKIT_TILES_H

#include "panels.h"

#if defined(__AMX_BF16__) && defined(__AVX512BW__)
#define TILES 1
#else
#define TILES 0
#endif

#define DEEP 32  /* numbers of K in a tile, two behind each other */
#define TILE_SIZE 512 /* bfloat16 of a tile: 16 rows */
#define MOST_PARTS 3

/* Whether the system lets us use it. */
int tiles_here(void);

/* Sets the unit up for this thread; tiles_off when it is done. */
void tiles_on(void);
void tiles_off(void);

/* As `pack`: panels are tiles [K / DEEP, parts, lanes / 16] of [16 pairs of k, 16 rows of x, 2]. */
void pack_tiles(const Panels *to, const void *x, int type, const float *scale, const void *w, int wtype, int i, int n);

/* Numbers k..k + count of a panel, [count, lanes] in float; `count` is a multiple of DEEP, or up to the end of K. */
void put_tiles(const Panels *to, long p, long k, long count, const float *x);

/* Rows n.. and numbers k..k + deep of a weight, as `to_rows` rows of tiles, a multiple of 16, zeros behind the rows that there
   are: [deep / DEEP, parts, .., 16] of [16 outputs, DEEP]. `step`: elements from one part's tiles to the next one's. */
void open_tiles(const Matrix *w, long n, long count, long to_rows, long k, long deep, int parts, uint16_t *to, long step);

/* found [rows, lanes], or what was in it plus that: weights of `rows` rows, a multiple of 32, times numbers k..k + deep of a
   panel. */
void multiply_tiles(const uint16_t *a, long rows, int wparts, const Panels *x, long p, long k, long deep, float *found, int fresh);

/* As `spread` and `gated`. `room`: so many floats as `tiles_room` says. */
long tiles_room(const Panels *x);
void spread_tiles(const Panels *x, const Matrix *w, Rows more, Rows y, float *room, int i, int n);
void gated_tiles(const Panels *x, const Matrix *gate, const Matrix *up, const Panels *y, float *room, int i, int n);

/* In how many parts a weight is taken, where x has so many. */
INLINE int parts_of(int type, int parts) { return type == BFLOAT ? 1 : type == HALF || parts < MOST_PARTS ? 2 : MOST_PARTS; }

#endif
