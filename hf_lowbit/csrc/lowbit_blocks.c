/* Products with block-sparse weights on a CPU: forward, and the gradient to x as the product with the transposed blocks. */
#define _GNU_SOURCE
#include "tiers.h"
#include "parallel.h"
#include "blocks.h"

#define EXPORT __attribute__((visibility("default")))

/* the definition, an output at a time */
static void portable_range(void *argument, int64_t begin, int64_t end) {
    const struct lowbit_blocks *p = ((struct blocks_job *)argument)->p;
    for (int64_t r = begin; r < end; r++) for (int64_t m = 0; m < p->m; m++) for (int64_t i = 0; i < p->height; i++) {
        float sum = 0.0f;
        for (int64_t b = first_block(p, r), last = first_block(p, r + 1); b < last; b++) {
            int64_t column = p->columns[b] * p->width, some = min64(p->width, p->in_features - column);
            for (int64_t k = 0; k < some; k++)
                sum += load_element(p->x, p->type, m * p->x_stride + column + k) *
                       load_element(p->values, p->type, (b * p->height + i) * p->width + k);
        }
        store_element(p->y, p->type, (m * p->block_rows + r) * p->height + i, sum);
    }
}

#if defined(__x86_64__)
#include "names.h"

#define HEIGHT 6
TARGET("avx2,fma,f16c")
#define T(name) name##_blocks_avx2
#include "vector_avx2.h"
#include "block_tier.h"
TARGET_END
#include "end_tier.h"
#undef T
#undef HEIGHT

#define HEIGHT 8
#define T(name) name##_blocks_avx512
TARGET("avx512f,avx512bw,avx512vl,avx512dq,avx512vbmi,avx512vnni,avx2,fma,f16c")
#include "vector_avx512.h"
#include "block_tier.h"
TARGET_END
#ifdef COMPILER_HAS_AMX
TARGET("avx512f,avx512bw,avx512vl,avx512dq,avx512vbmi,avx512vnni,avx512bf16,avx2,fma,f16c,amx-tile,amx-int8,amx-bf16")
#include "amx.h"
#include "block_amx.h"
TARGET_END
#endif
#include "end_tier.h"
#endif

/* below so many products, waking a thread costs more than it gives */
enum { SMALL_BLOCKS = 1 << 20, FEW_TILE_ROWS = 4 };

/* 0, or -1 when there is no memory; `tier` as in lowbit_linear, and one that this processor has */
EXPORT int lowbit_block_linear(const struct lowbit_blocks *call, int64_t tier) {
    struct lowbit_blocks p = *call;
    if (p.m == 0 || p.block_rows == 0) return 0;
    if (first_block(&p, p.block_rows) * p.height * p.width * (p.m + 7) < SMALL_BLOCKS) p.threads = 1;
#if defined(__x86_64__)
#ifdef COMPILER_HAS_AMX
    if (tier >= 4 && p.type == TYPE_BF16 && p.m > FEW_TILE_ROWS && p.width % 32 == 0 && p.height % 16 == 0)
        return amx_blocks_linear(&p);
#endif
    if (tier >= 3) return blocks_linear_blocks_avx512(&p);
    if (tier > 0) return blocks_linear_blocks_avx2(&p);
#endif
    (void)tier;
    struct blocks_job job = {&p, NULL, 0, 0};
    parallel_for(portable_range, &job, p.block_rows, 1, (int)p.threads);
    return 0;
}
