/* The vector tiers of x86-64, each from the same files with other vectors. A further tier (AMX, NEON) is one more section:
 * its vector_*.h, and where it has matrix units, its own panel_sum.
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
    return few_rows(c) ? T(dot_linear_bf16)(c) : T(panel_linear_bf16)(c);
}
#include "end_tier.h"
#undef T
TARGET_END
