/* The vector tiers of x86-64, each from the same files with other vectors. A further tier (NEON) is one more section
 * with its vector_*.h; one with matrix units has its own panels too, see amx.h.
 */
#include "names.h"

TARGET("avx2,fma,f16c")
#define T(name) name##_avx2
#include "vector_avx2.h"
#include "tier.h"
#include "end_tier.h"
#undef T
TARGET_END

TARGET("avx2,fma,f16c,avxvnni")
#define VNNI
#define T(name) name##_avxvnni
#include "vector_avx2.h"
#include "tier.h"
#include "end_tier.h"
#undef T
#undef VNNI
TARGET_END

TARGET("avx512f,avx512bw,avx512vl,avx512dq,avx512vbmi,avx512vnni,avx2,fma,f16c")
#define T(name) name##_avx512
#include "vector_avx512.h"
#include "tier.h"
TARGET_END

/* a refinement: the same tier where the processor multiplies pairs of bfloat16 */
TARGET("avx512f,avx512bw,avx512vl,avx512dq,avx512vbmi,avx512vnni,avx512bf16,avx2,fma,f16c")
#include "product_bf16.h"
static int linear_avx512_bf16(const struct lowbit_call *c) {
    if (c->p->int8 || c->p->type != TYPE_BF16) return linear_avx512(c);
    if (c->m == 1) return linear_avx512(c);
    return few_rows(c) ? T(dot_linear_bf16)(c) : T(panel_linear_bf16)(c);
}
TARGET_END

#ifdef COMPILER_HAS_AMX
TARGET("avx512f,avx512bw,avx512vl,avx512dq,avx512vbmi,avx512vnni,avx512bf16,avx2,fma,f16c,amx-tile,amx-int8,amx-bf16")
#include "amx.h"
#include "lookup.h"
#include "amx_product.h"
#include "amx_int8.h"
#include "amx_bf16.h"

static int linear_amx(const struct lowbit_call *c) {
    if (c->m <= (c->p->int8 ? AMX_FEW_ROWS : AMX_FEW_FLOAT_ROWS) || (!c->p->int8 && c->p->type != TYPE_BF16)) return linear_avx512_bf16(c);
    return c->p->int8 ? amx_linear_int8(c) : amx_linear_bf16(c);
}
TARGET_END
#endif

#include "end_tier.h"
#undef T
