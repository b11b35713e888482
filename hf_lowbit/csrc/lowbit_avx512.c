/* The tiers of AVX512, without and with matrix tiles (AMX). */
#define _GNU_SOURCE
#include "tiers.h"

#if defined(__x86_64__)
#include "parallel.h"
#include "names.h"

TARGET("avx512f,avx512bw,avx512vl,avx512dq,avx512vbmi,avx512vnni,avx2,fma,f16c")
#define T(name) name##_avx512
#include "vector_avx512.h"
#include "tier.h"
#include "rows.h"
TARGET_END

/* a refinement: the same tier where the processor multiplies pairs of bfloat16 */
TARGET("avx512f,avx512bw,avx512vl,avx512dq,avx512vbmi,avx512vnni,avx512bf16,avx2,fma,f16c")
#include "product_bf16.h"

int linear_avx512_bf16(const struct lowbit_call *c) {
    /* one row is faster in fixed point, see dot.h */
    if (c->p->int8 || c->p->type != TYPE_BF16 || c->m == 1) return linear_avx512(c);
    return few_rows(c) ? T(dot_linear_bf16)(c) : T(panel_linear_bf16)(c);
}
TARGET_END

#ifdef COMPILER_HAS_AMX
TARGET("avx512f,avx512bw,avx512vl,avx512dq,avx512vbmi,avx512vnni,avx512bf16,avx2,fma,f16c,amx-tile,amx-int8,amx-bf16")
#include "amx.h"
#include "lookup.h"
#include "amx_product.h"
#include "amx_slabs.h"
#include "amx_int8.h"
#include "amx_bf16.h"

/* up to so many rows of x, the kernels without tiles are as fast (measured) */
enum { FEW_ROWS_INT8 = 4, FEW_ROWS_FLOAT = 1 };

int linear_amx(const struct lowbit_call *c) {
    int int8 = c->p->int8 != 0;
    if (c->m <= (int8 ? FEW_ROWS_INT8 : FEW_ROWS_FLOAT) || (!int8 && c->p->type != TYPE_BF16)) return linear_avx512_bf16(c);
    return int8 ? amx_linear_int8(c) : amx_linear_bf16(c);
}
TARGET_END
#endif
#include "end_tier.h"
#endif
