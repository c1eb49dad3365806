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

void dk_attend(const float *q, const Keys *keys, const Keys *values, long type, const Mask *mask, long B, long T, long heads,
               long kv_heads, long S, long D, float scale, float *out, long threads);

void dk_prompt(const float *q, const Keys *keys, const Keys *values, long type, long causal, long B, long T,
               long heads, long kv_heads, long S, long D, float scale, float *out, long threads);

#endif
