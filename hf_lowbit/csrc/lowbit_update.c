/* The update of direct training: moments, direction, noise, rounding and repacking in one pass over a packed weight.
 *
 * The tiers are one file, update.h, compiled for three targets. Bits do not depend on the tier or on the number of threads:
 * noise belongs to the element, and each row is worked off by one thread.
 */
#define _GNU_SOURCE
#ifdef __clang__
/* gcc has it so with -std=c11 */
#pragma STDC FP_CONTRACT OFF
#endif
#include "tiers.h"
#include "parallel.h"
#include <math.h>

#define EXPORT __attribute__((visibility("default")))

enum { RULE_ADAMW = 0, RULE_LION = 1, RULE_MOMENTUM = 2 };

typedef uint16_t __attribute__((may_alias)) pair;
typedef uint32_t __attribute__((may_alias)) quad;
typedef uint64_t __attribute__((may_alias)) octet;

/* codes: float32, bfloat16, bytes or nibbles [rows, columns]; base [rows, blocks] for 8 and 4 bits */
struct lowbit_moment { uint8_t *codes; int16_t *base; int64_t is_signed; };

/* filled by Python: only fields of eight bytes, so that ctypes and C agree without padding */
struct lowbit_update {
    int64_t field, offset, qmin, qmax, group, scale_stride, scale_type; /* as in problem.h */
    int64_t rows, columns, row_bytes;
    int64_t grad_type, grad_row, grad_column;      /* strides in elements */
    int64_t rule, first, nesterov;                 /* first: no momentum yet */
    int64_t state_bits, blocks, width, state_row;  /* blocks a row, elements a block, bytes a row */
    int64_t row_key, column_key, threads;
    double beta1, rest1, beta2, rest2, eps, factor, rate, decay;
    uint8_t *stored;
    const void *scale;
    const int8_t *zero;                            /* NULL on symmetric grids */
    const void *grad;
    struct lowbit_moment m, v;
    int64_t changed, levels;                       /* results */
};

/* buffers of one thread. Of a row: gradient, moments and codes, in place or copied; of a block: the rest */
struct lowbit_buffers {
    const float *g;
    float *m, *v, *inverse, *zero;
    uint8_t *m_row, *v_row, *codes, *code_copy, *bytes;
    int32_t *words;
    const uint32_t *column_words;
    uint32_t row_word;
    int64_t changed, levels;
};
struct update_job { struct lowbit_update *u; const uint32_t *column_words; int failed; };

/* elements at a time of a row whose moments have no blocks */
enum { CHUNK = 512 };

static uint32_t mix_word(uint32_t x) {
    x = (x ^ x >> 16) * 0x7FEB352Du;
    x = (x ^ x >> 15) * 0x846CA68Bu;
    return x ^ x >> 16;
}

#define T(name) name##_portable
#include "update_lanes.h"
#include "update.h"
#define END_TIER
#include "update_names.h"

#if defined(__x86_64__)
TARGET("avx2,fma,f16c,popcnt")
#define T(name) name##_avx2
#include "update_lanes_avx2.h"
#include "update.h"
#define END_TIER
#include "update_names.h"
TARGET_END

TARGET("avx512f,avx512bw,avx512vl,avx512dq,avx512vbmi,avx2,fma,f16c,popcnt")
#define T(name) name##_avx512
#include "update_lanes_avx512.h"
#include "update.h"
#define END_TIER
#include "update_names.h"
TARGET_END
#endif

/* 0, or -1 when there is no memory; `tier` as in lowbit_linear, and one that this processor has */
EXPORT int lowbit_update(struct lowbit_update *u, int64_t tier) {
    uint32_t *column_words = scratch(round_up(u->columns + 32, 64) * 4);
    if (!column_words) return -1;
    for (int64_t k = 0; k < u->columns; k++) column_words[k] = mix_word((uint32_t)(k + u->column_key));
    struct update_job job = {u, column_words, 0};
    u->changed = u->levels = 0;
    range_function run = update_range_portable;
#if defined(__x86_64__)
    if (tier >= 3) run = update_range_avx512;
    else if (tier > 0) run = update_range_avx2;
#endif
    (void)tier;
    parallel_for(run, &job, u->rows, 1, u->rows * u->columns < 32768 ? 1 : (int)u->threads);
    free(column_words);
    return job.failed ? -1 : 0;
}
