/* Products of float32: a lane holds one code of each phase. */
#define F(name) T(name##_f32)
#define UNIT 1
#define BLOCK VB            /* packed bytes whose codes fill the lanes */
#define LANE_CODES 1        /* codes of one phase in a lane */

INLINE int F(phases)(int field) { return field == 3 ? 16 : 32 / field; }
INLINE void F(gather_phase)(char *out, const float *x, int64_t step) {
    for (int l = 0; l < LANES; l++) memcpy(out + 4 * l, x + l * step, 4);
}
INLINE vi F(load_block)(const uint8_t *p, part some, int field) { (void)field; return load_part(p, some); }
INLINE vi F(load_high)(const uint8_t *p, part some) { return spread_lanes(load_half(p, some)); }
INLINE vi F(code_table)(int field, int32_t offset) { return from_f(code_table(field, offset)); }
INLINE vi F(code)(int field, int k, vi low, vi high, vi table) {
    return from_f(code_as_float(field, k, low, high, as_f(table)));
}
INLINE vf F(product)(vf sum, vi w, vi x) { return fma_f(as_f(w), as_f(x), sum); }
INLINE void F(copy_row)(const struct lowbit_call *c, int64_t m, char *out) { T(load_floats)(c, m, (float *)out); }
INLINE vi F(join)(vf w[2]) { return from_f(w[0]); }

#include "float_dot.h"
#include "float_panel.h"

#undef F
#undef UNIT
#undef BLOCK
#undef LANE_CODES
