/* Products with packed low-bit weights on a CPU. Plain C11, four files that can be compiled at once:
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
EXPORT int lowbit_abi(void) { return 4; }

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

/* below this much work, waking a thread costs more than it gives */
enum { SMALL_WORK = 8 * 262144 };
static int64_t work_of(const struct lowbit_problem *p, int64_t m) { return p->rows * p->row_bytes * (m + 7); }

static int linear(const struct lowbit_call *c, int64_t tier) {
    const struct lowbit_problem *p = c->p;
    if (c->m == 0 || p->rows == 0) return 0;
    /* groups whose scales are float32 are in no checkpoint: the vector units read bfloat16 */
    if (tier == TIER_PORTABLE || (p->grouped && p->scale_type != TYPE_BF16)) return portable_linear(c);
#if defined(__x86_64__)
    int features = lowbit_features();
#ifdef COMPILER_HAS_AMX
    if (tier == TIER_AMX && (features & FEATURE_AMX)) return linear_amx(c);
#endif
    if (tier == TIER_AVX512 && (features & FEATURE_AVX512_BF16)) return linear_avx512_bf16(c);
    if (tier == TIER_AVX512 && (features & FEATURE_AVX512)) return linear_avx512(c);
    if (tier == TIER_AVXVNNI && (features & FEATURE_AVX_VNNI)) return linear_avxvnni(c);
    if (tier == TIER_AVX2 && (features & FEATURE_AVX2)) return linear_avx2(c);
#endif
    return -2;
}

/* y = x W^T + bias; 0, or -1 when there is no memory, or -2 for a tier that this processor lacks */
EXPORT int lowbit_linear(const struct lowbit_problem *p, int64_t tier, int64_t threads, int64_t m, const void *x,
                         int64_t x_stride, const void *weight, const void *scale, const void *zero, const void *bias,
                         int64_t bias_type, void *y) {
    struct lowbit_call call = {p, m, x_stride, x, weight, scale, zero, bias, bias_type, y, (int)threads, NULL};
    if (work_of(p, m) < SMALL_WORK) call.threads = 1;
    return linear(&call, tier);
}

/* one of the weights that multiply the same x; all of eight bytes, so that Python packs it without a structure */
struct lowbit_weight { int64_t rows, weight, scale, zero, bias, bias_type, y; };
enum { MOST_WEIGHTS = 8 };

#define ADDRESS(number) ((void *)(intptr_t)(number))

/* y_i = x W_i^T + bias_i for weights that agree in all of `p` but the number of rows: x is prepared once, and each has the bits of
 * one call of `lowbit_linear`. -3 for more weights than MOST_WEIGHTS */
EXPORT int lowbit_linears(const struct lowbit_problem *p, int64_t tier, int64_t threads, int64_t m, const void *x,
                          int64_t x_stride, int64_t count, const struct lowbit_weight *weights) {
    struct lowbit_problem problems[MOST_WEIGHTS];
    struct lowbit_call calls[MOST_WEIGHTS], *head = NULL;
    if (count > MOST_WEIGHTS) return -3;
    for (int64_t i = count - 1; i >= 0; i--) {
        const struct lowbit_weight *w = weights + i;
        if (w->rows == 0) continue;
        problems[i] = *p;
        problems[i].rows = w->rows;
        struct lowbit_call call = {problems + i, m, x_stride, x, ADDRESS(w->weight), ADDRESS(w->scale), ADDRESS(w->zero),
                                   ADDRESS(w->bias), w->bias_type, ADDRESS(w->y), (int)threads, head};
        if (work_of(problems + i, m) < SMALL_WORK) call.threads = 1;
        calls[i] = call;
        head = calls + i;
    }
    return head ? linear(head, tier) : 0;
}

struct experts_job { const struct lowbit_call *all; int64_t tier, scales; const int64_t *offsets; int status; };

static void each_expert(void *argument, int64_t begin, int64_t end) {
    struct experts_job *job = argument;
    const struct lowbit_problem *p = job->all->p;
    int64_t size = p->type == TYPE_F32 ? 4 : 2, scale_size = p->scale_type == TYPE_F32 ? 4 : 2;
    for (int64_t e = begin; e < end; e++) {
        struct lowbit_call c = *job->all;
        int64_t first = job->offsets[e];
        c.m = job->offsets[e + 1] - first;
        c.x = (const char *)c.x + first * c.x_stride * size;
        c.y = (char *)c.y + first * p->rows * size;
        c.weight += e * p->rows * p->row_bytes;
        c.scale = (const char *)c.scale + e * job->scales * scale_size;
        if (c.zero) c.zero += e * job->scales;
        if (c.bias) c.bias = (const char *)c.bias + e * p->rows * (c.bias_type == TYPE_F32 ? 4 : 2);
        if (work_of(p, c.m) < SMALL_WORK) c.threads = 1;
        int status = linear(&c, job->tier);
        /* threads that fail at once write the same kind of number */
        if (status) job->status = status;
    }
}

/* For each expert e of E the product of the rows [offsets[e], offsets[e + 1]) of x with its weight: the bits of one call of
 * `lowbit_linear` an expert. Rows of y that no expert owns are zeros. Small experts are shared out among the threads, and
 * all threads work together on a large one. -3 for offsets that do not ascend within [0, m].
 */
EXPORT int lowbit_experts(const struct lowbit_problem *p, int64_t tier, int64_t threads, int64_t experts, const void *offsets,
                          int64_t m, const void *x, int64_t x_stride, const void *weight, const void *scale, const void *zero,
                          const void *bias, int64_t bias_type, void *y) {
    struct lowbit_call all = {p, 0, x_stride, x, weight, scale, zero, bias, bias_type, y, (int)threads, NULL};
    struct experts_job job = {&all, tier, p->scale_stride ? p->rows * p->scale_stride : 1, offsets, 0};
    int64_t active = 0, work = 0, begin = job.offsets[0], end = job.offsets[experts];
    if (begin < 0 || end > m) return -3;
    for (int64_t e = 0; e < experts; e++) {
        int64_t rows = job.offsets[e + 1] - job.offsets[e];
        if (rows < 0) return -3;
        if (rows > 0) { active++; work += work_of(p, rows); }
    }
    int64_t row = p->rows * (p->type == TYPE_F32 ? 4 : 2);
    /* an empty y may have no address */
    if (begin > 0) memset(y, 0, (size_t)(begin * row));
    if (m > end) memset((char *)y + end * row, 0, (size_t)((m - end) * row));
    int apart = active >= threads && work < active * 16 * SMALL_WORK;
    if (apart) {
        all.threads = 1;
        parallel_each(each_expert, &job, experts, work < SMALL_WORK ? 1 : (int)threads);
    } else each_expert(&job, 0, experts);
    return job.status;
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
