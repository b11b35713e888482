/* One vector tier: included once for each, with T(name), the vectors of a vector_*.h, and the target of the compiler set. */
#include "activations.h"
#include "groups.h"
#include "dot.h"
#include "panel.h"
#ifndef VNNI
#include "product_f32.h"
#endif

/* up to so many rows of x, unpacking a panel does not pay (measured; scales of groups cost the panel less) */
#ifndef LOWBIT_FEW_ROWS
#define LOWBIT_FEW_ROWS
static inline int few_rows(const struct lowbit_call *c) { return c->m <= (c->p->grouped ? 8 : 12); }
#endif

int T(linear)(const struct lowbit_call *c) {
    if (c->p->int8) return few_rows(c) ? T(dot_linear)(c) : T(panel_linear)(c);
#if !NARROW
    int status = c->m == 1 ? T(dot_linear)(c) : 1;
    if (status != 1) return status;
#endif
#ifdef VNNI
    return linear_avx2(c);
#else
    return few_rows(c) ? T(dot_linear_f32)(c) : T(panel_linear_f32)(c);
#endif
}
