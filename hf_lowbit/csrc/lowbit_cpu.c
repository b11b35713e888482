/* Products with packed low-bit weights on a CPU. Plain C11, three files that can be compiled at once:
 *
 *     cc -O2 -std=c11 -fPIC -shared -fopenmp lowbit_*.c -o _lowbit_cpu.so
 *
 * (-fopenmp may be left out.) The weights are read as they lie in the checkpoint, row by row; nothing is repacked. Every
 * tier is compiled in, and the caller names one among those that `lowbit_features` allows.
 *
 * Nothing is global except what the processor can do. Scratch memory belongs to a call, so calls may run concurrently.
 */
#define _GNU_SOURCE
#include "tiers.h"
#include "processor.h"
#include "parallel.h"
#include "portable.h"

#define EXPORT __attribute__((visibility("default")))

enum { TIER_PORTABLE = 0, TIER_AVX2 = 1, TIER_AVXVNNI = 2, TIER_AVX512 = 3, TIER_AMX = 4 };

/* raised whenever the arguments of an exported function change: a stale build is then refused, not called */
EXPORT int lowbit_abi(void) { return 2; }

/* two threads that ask first at once find the same answer */
EXPORT int lowbit_features(void) {
    static volatile int features = -1;
    if (features < 0) {
        int found = detect_features();
#ifndef COMPILER_HAS_AMX
        found &= ~FEATURE_AMX;
#endif
        features = found;
    }
    return features;
}

/* y = x W^T + bias; 0, or -1 when there is no memory, or -2 for a tier that this processor lacks */
EXPORT int lowbit_linear(const struct lowbit_problem *p, int64_t tier, int64_t threads, int64_t m, const void *x,
                         int64_t x_stride, const void *weight, const void *scale, const void *zero, const void *bias,
                         int64_t bias_type, void *y) {
    struct lowbit_call call = {p, m, x_stride, x, weight, scale, zero, bias, bias_type, y, (int)threads};
    if (m == 0 || p->rows == 0) return 0;
    /* below this much work, waking a thread costs more than it gives */
    if (p->rows * p->row_bytes * (m + 7) < 8 * 262144) call.threads = 1;
    /* groups whose scales are float32 are in no checkpoint: the vector units read bfloat16 */
    if (tier == TIER_PORTABLE || (p->grouped && p->scale_type != TYPE_BF16)) return portable_linear(&call);
#if defined(__x86_64__)
    int features = lowbit_features();
#ifdef COMPILER_HAS_AMX
    if (tier == TIER_AMX && (features & FEATURE_AMX)) return linear_amx(&call);
#endif
    if (tier == TIER_AVX512 && (features & FEATURE_AVX512_BF16)) return linear_avx512_bf16(&call);
    if (tier == TIER_AVX512 && (features & FEATURE_AVX512)) return linear_avx512(&call);
    if (tier == TIER_AVXVNNI && (features & FEATURE_AVX_VNNI)) return linear_avxvnni(&call);
    if (tier == TIER_AVX2 && (features & FEATURE_AVX2)) return linear_avx2(&call);
#endif
    return -2;
}

/* rows of W as numbers, to y [count, K] in the type of the problem; `ids` NULL: the first `count` rows. As above, or -3 for
 * an id outside [0, N), and then y is not written */
EXPORT int lowbit_rows(const struct lowbit_problem *p, int64_t tier, int64_t threads, int64_t count, const void *ids,
                       int64_t id_bytes, const void *weight, const void *scale, const void *zero, void *y) {
    struct lowbit_call call = {.p = p, .m = count, .weight = weight, .scale = scale, .zero = zero, .y = y};
    struct rows_job job = {&call, ids, id_bytes, 0};
    for (int64_t i = 0; i < count; i++) {
        int64_t n = row_asked_for(&job, i);
        if (n < 0 || n >= p->rows) return -3;
    }
    call.threads = count * p->columns < 65536 ? 1 : (int)threads;
    if (tier == TIER_PORTABLE) return rows_portable(&job);
#if defined(__x86_64__)
    int features = lowbit_features();
    if (tier >= TIER_AVX512 && (features & FEATURE_AVX512)) return rows_avx512(&job);
    if (tier <= TIER_AVXVNNI && (features & FEATURE_AVX2)) return rows_avx2(&job);
#endif
    return -2;
}
