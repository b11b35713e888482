/* Products of bfloat16 pairs, summed in float32 (AVX512_BF16): a lane holds two codes of each phase. Every code is a
 * bfloat16 exactly: 8 bits suffice for its magnitude. */
#define F(name) T(name##_bf16)
#define UNIT 2
#define BLOCK (VB / 2)
#define LANE_CODES 2

INLINE int F(phases)(int field) { return field == 3 ? 4 : 8 / field; }
/* x is a bfloat16 here: dropping the low half of its float is exact */
INLINE uint16_t F(upper)(float x) { return (uint16_t)(bits_of_float(x) >> 16); }
INLINE void F(gather_phase)(char *out, const float *x, int64_t step) {
    uint16_t some[2 * LANES];
    for (int l = 0; l < 2 * LANES; l++) some[l] = F(upper)(x[l * step]);
    memcpy(out, some, sizeof some);
}
INLINE vi F(load_block)(const uint8_t *p, part some, int field) {
    vi half = load_half(p, some);
    return field == 8 ? half : _mm512_cvtepu8_epi16(_mm512_castsi512_si256(half));
}
/* 4 high bits for the 4 codes of each 16 bits, moved up by 2 */
INLINE vi F(load_high)(const uint8_t *p, part some) {
    vi words = _mm512_cvtepu16_epi64(_mm_maskz_loadu_epi8((__mmask16)some, p));
    vi control = _mm512_set1_epi64(0x3f0c3f083f043f00);
    return _mm512_slli_epi16(_mm512_multishift_epi64_epi8(control, words), 2);
}
INLINE vi F(code_table)(int field, int32_t offset) {
    int mask = field == 4 ? 15 : field == 3 ? 7 : 3;
    uint16_t table[32];
    for (int i = 0; i < 32; i++) table[i] = F(upper)((float)((i & mask) - offset));
    return load(table);
}
INLINE vi F(code)(int field, int k, vi low, vi high, vi table) {
    if (field == 8) {
        __m256i bytes = _mm512_castsi512_si256(low);
        vf first = to_f(_mm512_cvtepi8_epi32(_mm256_castsi256_si128(bytes)));
        vf second = to_f(_mm512_cvtepi8_epi32(_mm256_extracti128_si256(bytes, 1)));
        return (vi)_mm512_cvtne2ps_pbh(second, first);
    }
    if (field == 4) return _mm512_permutexvar_epi16(_mm512_srli_epi16(low, 4 * k), table);
    vi index = _mm512_srli_epi16(low, 2 * k);
    if (field == 3)
        index = _mm512_ternarylogic_epi32(_mm512_set1_epi16(4), _mm512_srli_epi16(high, k), index, 0xca);
    return _mm512_permutexvar_epi16(index, table);
}
/* as assembly, since GCC 12 copies the sum around the intrinsic */
INLINE vf F(product)(vf sum, vi w, vi x) {
    __asm__("vdpbf16ps %2, %1, %0" : "+v"(sum) : "v"(w), "v"(x));
    return sum;
}
INLINE void F(copy_row)(const struct lowbit_call *c, int64_t m, char *out) {
    memcpy(out, (const uint16_t *)c->x + m * c->x_stride, (size_t)c->p->columns * 2);
}
/* two vectors of floats -> pairs of bfloat16 */
INLINE vi F(join)(vf w[2]) {
    vi order = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8,
                                23, 7, 22, 6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
    return _mm512_permutexvar_epi16(order, (vi)_mm512_cvtne2ps_pbh(w[1], w[0]));
}

#include "float_dot.h"
#include "float_panel.h"

#undef F
#undef UNIT
#undef BLOCK
#undef LANE_CODES
