/* What attention reads. */
#ifndef DECODEKIT_ATTENTION_H
#define DECODEKIT_ATTENTION_H

#include "vectors.h"

typedef struct {
    const void *data;
    long row, head, slot; /* strides; elements of a head lie side by side */
} Keys;

typedef struct {
    const void *data;
    long type; /* of what is added to scores, or BOOL: true for slots that are seen */
    long row, query; /* strides; 0 where shared. Slots lie side by side */
} Mask;

typedef struct {
    const Keys *keys, *values; /* [B, kv_heads, S, D] in `type` */
    const Mask *mask;
    long type, B, T, heads, kv_heads, S, D;
    float scale;
} Asked;

/* A thread's part, of so many `threads`, of q [B, T, heads, D] in float to out [B, T, heads, D] in float; a query that sees
   nothing gets zeros. `found`: room for so many floats as attend_room says. Where that is none, thread i does heads of keys
   i, i + threads, .. of the B * kv_heads there are; else all threads pass a barrier inside. */
long attend_room(const Asked *asked);
void attend(const Asked *asked, const float *q, float *out, float *found, int thread, int threads);

/* All of that. */
void dk_attend(const float *q, const Keys *keys, const Keys *values, long type, const Mask *mask, long B, long T, long heads,
               long kv_heads, long S, long D, float scale, float *out, long threads);

void dk_prompt(const float *q, const Keys *keys, const Keys *values, long type, long causal, long B, long T,
               long heads, long kv_heads, long S, long D, float scale, float *out, long threads);

#endif
