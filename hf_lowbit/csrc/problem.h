/* What one call computes, as the tiers see it.
 *
 *     y[m, n] = t[m] * sum_g s[n, g] * sum_{k in g} a[m, k] (q[n, k] - z[n, g]) + bias[n]
 *
 * Codes are stored as unsigned fields u = q + offset (docs/format.md), so with D = sum a u and A = sum a of a group
 *
 *     sum_{k in g} a (q - z) = D - (offset + z) A,
 *
 * and the vector units multiply unsigned fields by signed activations. Eight bits are stored signed; u = q XOR 0x80.
 */
#ifndef LOWBIT_PROBLEM_H
#define LOWBIT_PROBLEM_H

#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define INLINE static inline __attribute__((always_inline, unused))
/* arrays of vectors become registers only when every index is a constant */
#define UNROLL _Pragma("GCC unroll 16")

enum { TYPE_F32 = 0, TYPE_BF16 = 1, TYPE_F16 = 2 };

/* filled by Python once a kind of call: all int64, so that ctypes and C agree without padding */
struct lowbit_problem {
    int64_t field;         /* bits of a stored field: 2, 3, 4, 8 */
    int64_t offset;        /* u - q: 1 (ternary), 2, 4, 8, 128 */
    int64_t group;         /* codes a scale serves along K; K itself when there are no groups */
    int64_t groups;        /* G, scales a row */
    int64_t scale_stride;  /* scales from one row to the next; 0 when one scale serves all */
    int64_t scale_type;    /* TYPE_F32 or TYPE_BF16 */
    int64_t grouped;       /* 0: one scale a row, integer sums run over all of K */
    int64_t int8;          /* int8 activations, else float */
    int64_t type;          /* of x and y */
    int64_t rows;          /* N */
    int64_t columns;       /* K */
    int64_t row_bytes;     /* R */
};

struct lowbit_call {
    const struct lowbit_problem *p;
    int64_t m;             /* rows of x */
    int64_t x_stride;      /* elements from one row of x to the next; along K they are adjacent */
    const void *x;
    const uint8_t *weight;
    const void *scale;
    const int8_t *zero;    /* NULL on symmetric grids */
    const void *bias;      /* NULL when there is none */
    int64_t bias_type;
    void *y;               /* [M, N] */
    int threads;
    /* NULL, or one more product with the same x: all of its problem but `rows` is equal, and it has zero points if this has */
    const struct lowbit_call *next;
};

/* rows of W that become numbers: all of the first `c->m`, or those named by `ids`; they go to `c->y` [M, K] in the type of
 * the problem */
struct rows_job {
    const struct lowbit_call *c;
    const void *ids;       /* NULL, or [M] */
    int64_t id_bytes;      /* 4 or 8 */
    int failed;
};

static inline int64_t row_asked_for(const struct rows_job *job, int64_t i) {
    if (!job->ids) return i;
    return job->id_bytes == 4 ? ((const int32_t *)job->ids)[i] : ((const int64_t *)job->ids)[i];
}

static inline int64_t min64(int64_t a, int64_t b) { return a < b ? a : b; }
static inline int64_t round_up(int64_t value, int64_t step) { return (value + step - 1) / step * step; }

static inline float float_of_bits(uint32_t bits) { float f; memcpy(&f, &bits, 4); return f; }
static inline uint32_t bits_of_float(float f) { uint32_t bits; memcpy(&bits, &f, 4); return bits; }

static inline float float_of_bf16(uint16_t h) { return float_of_bits((uint32_t)h << 16); }

static inline uint16_t bf16_of_float(float f) {
    uint32_t u = bits_of_float(f);
    uint32_t rounded = (u + 0x7fff + ((u >> 16) & 1)) >> 16;
    return (uint16_t)((u & 0x7fffffff) > 0x7f800000 ? ((u >> 16) | 0x40) : rounded);
}

/* subnormal halves: the unit in the last place of 0.5f is the step of a subnormal half, 2^-24 */
static inline float float_of_f16(uint16_t h) {
    uint32_t u = (uint32_t)(h & 0x7fff) << 13;
    uint32_t normal = u + ((u >= 0x0f800000 ? 224u : 112u) << 23);
    float magnitude = u < 0x00800000 ? float_of_bits((h & 0x3ffu) | 0x3f000000) - 0.5f : float_of_bits(normal);
    return float_of_bits(bits_of_float(magnitude) | (uint32_t)(h & 0x8000) << 16);
}

static inline uint16_t f16_of_float(float f) {
    uint32_t sign = (bits_of_float(f) >> 16) & 0x8000, u = bits_of_float(f) & 0x7fffffff;
    uint32_t small = bits_of_float(float_of_bits(u) + 0.5f) - 0x3f000000;
    uint32_t normal = (u - 0x38000000 + 0xfff + ((u >> 13) & 1)) >> 13;
    uint32_t h = u < 0x38800000 ? small : normal;
    h = u >= 0x477ff000 ? 0x7c00 : h;
    h = u > 0x7f800000 ? 0x7e00 : h;
    return (uint16_t)(sign | h);
}

static inline float load_element(const void *p, int64_t type, int64_t i) {
    if (type == TYPE_F32) return ((const float *)p)[i];
    uint16_t h = ((const uint16_t *)p)[i];
    return type == TYPE_BF16 ? float_of_bf16(h) : float_of_f16(h);
}

static inline void store_element(void *p, int64_t type, int64_t i, float value) {
    if (type == TYPE_F32) ((float *)p)[i] = value;
    else ((uint16_t *)p)[i] = type == TYPE_BF16 ? bf16_of_float(value) : f16_of_float(value);
}

static inline float load_scale(const struct lowbit_call *c, int64_t n, int64_t g) {
    return load_element(c->scale, c->p->scale_type, n * c->p->scale_stride + g);
}

/* offset + z: what to subtract from a stored field */
static inline int32_t load_shift(const struct lowbit_call *c, int64_t n, int64_t g) {
    return (int32_t)c->p->offset + (c->zero ? c->zero[n * c->p->scale_stride + g] : 0);
}

/* scratch memory, 64 bytes aligned, NULL when there is none */
static inline void *scratch(int64_t bytes) { return aligned_alloc(64, (size_t)round_up(bytes + 64, 64)); }

#endif
