/* Products with block-sparse weights on a CPU: forward, the gradient to x as the product with the transposed blocks, and the
 * gradient of the blocks. */
#define _GNU_SOURCE
#include "tiers.h"
#include "parallel.h"
#include "blocks.h"

#define EXPORT __attribute__((visibility("default")))

/* up to so many rows, x is multiplied with low-bit blocks as digits (measured) */
enum { FEW_DIGIT_ROWS = 8 };

#define T(name) name##_blocks_portable
#include "block_portable.h"
#undef T

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

TARGET("avx2,fma,f16c,avxvnni")
#define VNNI
#define T(name) name##_blocks_avxvnni
#include "vector_avx2.h"
#include "block_tier.h"
TARGET_END
#include "end_tier.h"
#undef T
#undef VNNI
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
#include "block_gradient.h"
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
    if (tier >= 4 && p.type == TYPE_BF16 && !p.int8 && p.m > FEW_TILE_ROWS && p.width % 32 == 0 && p.height % 16 == 0)
        return amx_blocks_linear(&p);
#endif
    if (tier >= 3) return blocks_linear_blocks_avx512(&p);
    if (tier == 2) return blocks_linear_blocks_avxvnni(&p);
    if (tier == 1) return blocks_linear_blocks_avx2(&p);
#endif
    (void)tier;
    return blocks_linear_blocks_portable(&p);
}

/* 0, or -1 when there is no memory, or -2 where there are no matrix tiles or the blocks do not fill them */
EXPORT int lowbit_block_gradient(const struct lowbit_block_gradient *call, int64_t tier) {
    struct lowbit_block_gradient p = *call;
#if defined(__x86_64__) && defined(COMPILER_HAS_AMX)
    if (tier < 4 || p.height % 16 || p.width % 16) return -2;
    int64_t blocks = p.pointers ? p.pointers[p.block_rows] : p.block_rows * p.live;
    if (blocks * p.height * p.width * p.m < SMALL_BLOCKS) p.threads = 1;
    return amx_block_gradient(&p);
#else
    (void)p;
    (void)tier;
    return -2;
#endif
}
