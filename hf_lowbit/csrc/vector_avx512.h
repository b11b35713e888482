/* Vectors of the AVX512-VNNI tier: 64 bytes, 16 lanes of 32 bits. Names are those of vector_avx2.h. */
#define VB 64
#define LANES 16
#define OFFSET8 128         /* what the vector units add to a code of 8 bits: they need unsigned fields */
#define NARROW 0            /* products go straight to 32 bits */
#define ROWS_GROUPED 2      /* weight rows at once, for 4 rows of x */
#define ROWS_UNGROUPED 4
#define TILE 8              /* rows of x at once in a panel product */
#define FLOAT_SHIFT 0       /* codes become signed floats by table: no offset remains */
typedef __m512i vi;
typedef __m512 vf;

INLINE vi load(const void *p) { return _mm512_loadu_si512(p); }
INLINE void store(void *p, vi v) { _mm512_storeu_si512(p, v); }
INLINE vf load_f(const float *p) { return _mm512_loadu_ps(p); }
INLINE void store_f(float *p, vf v) { _mm512_storeu_ps(p, v); }
/* which bytes of a vector, or of half a vector, lie before the end of a row */
typedef __mmask64 part;
INLINE part part_of(int64_t left) { return left >= 64 ? ~0ull : left > 0 ? ~0ull >> (64 - left) : 0; }
INLINE vi load_part(const uint8_t *p, part some) { return _mm512_maskz_loadu_epi8(some, p); }
INLINE vi load_half(const uint8_t *p, part some) {
    return _mm512_castsi256_si512(_mm256_maskz_loadu_epi8((__mmask32)some, p));
}
INLINE vi zero_i(void) { return _mm512_setzero_si512(); }
INLINE vf zero_f(void) { return _mm512_setzero_ps(); }
INLINE vi set_i(int32_t v) { return _mm512_set1_epi32(v); }
INLINE vf set_f(float v) { return _mm512_set1_ps(v); }
INLINE vi add_i(vi a, vi b) { return _mm512_add_epi32(a, b); }
INLINE vi sub_i(vi a, vi b) { return _mm512_sub_epi32(a, b); }
INLINE vi mul_i(vi a, vi b) { return _mm512_mullo_epi32(a, b); }
INLINE vf add_f(vf a, vf b) { return _mm512_add_ps(a, b); }
INLINE vf sub_f(vf a, vf b) { return _mm512_sub_ps(a, b); }
INLINE vf mul_f(vf a, vf b) { return _mm512_mul_ps(a, b); }
INLINE vf fma_f(vf a, vf b, vf c) { return _mm512_fmadd_ps(a, b, c); }
INLINE vf fnma_f(vf a, vf b, vf c) { return _mm512_fnmadd_ps(a, b, c); }
INLINE vf to_f(vi v) { return _mm512_cvtepi32_ps(v); }
INLINE vf as_f(vi v) { return _mm512_castsi512_ps(v); }
INLINE vi to_i(vf v) { return _mm512_cvttps_epi32(v); }
INLINE vi from_f(vf v) { return _mm512_castps_si512(v); }
INLINE int32_t sum_i(vi v) { return _mm512_reduce_add_epi32(v); }
INLINE float sum_f(vf v) { return _mm512_reduce_add_ps(v); }
INLINE vi and_i(vi a, vi b) { return _mm512_and_si512(a, b); }
INLINE vi shift_right(vi v, int n) { return _mm512_srli_epi32(v, n); }

/* as assembly, since GCC 12 copies the sum around the intrinsic */
INLINE vi dot(int field, vi sum, vi u, vi a) {
    (void)field;
    __asm__("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(u), "v"(a));
    return sum;
}

INLINE int narrow_steps(int field) { (void)field; return 1; }

/* the high plane of 3 bits, one row: 32 bytes, spread so that each 64 bits hold the high bits of 8 bytes of the low plane */
INLINE vi spread_high(vi half) { return _mm512_cvtepu32_epi64(_mm512_castsi512_si256(half)); }
/* fields of phase p: byte j holds u[k], k = P j + p */
INLINE vi fields(int field, int p, vi low, vi high) {
    if (field == 8) return _mm512_xor_si512(low, _mm512_set1_epi8((char)0x80));
    if (field == 4) return and_i(_mm512_srli_epi16(low, 4 * p), _mm512_set1_epi8(15));
    vi two = and_i(_mm512_srli_epi16(low, 2 * p), _mm512_set1_epi8(3));
    if (field == 2) return two;
    /* brings bit 4 i + p of each 64 to bit 2 of byte i */
    vi control = _mm512_add_epi8(_mm512_set1_epi64(0x1c1814100c080400), _mm512_set1_epi8((char)(p + 62)));
    vi bits = _mm512_multishift_epi64_epi8(and_i(control, _mm512_set1_epi8(63)), high);
    return _mm512_ternarylogic_epi32(two, bits, _mm512_set1_epi8(4), 0xf8);
}
/* as `fields`, for 32 bits of high plane in each lane, of which the half `h` belongs to the lane */
INLINE vi fields_across(int field, int p, vi low, vi high, int h) {
    if (field != 3) return fields(field, p, low, high);
    vi two = and_i(_mm512_srli_epi16(low, 2 * p), _mm512_set1_epi8(3));
    vi control = _mm512_add_epi8(_mm512_set1_epi64(0x2c2824200c080400), _mm512_set1_epi8((char)(p + 16 * h + 62)));
    vi bits = _mm512_multishift_epi64_epi8(and_i(control, _mm512_set1_epi8(63)), high);
    return _mm512_ternarylogic_epi32(two, bits, _mm512_set1_epi8(4), 0xf8);
}

/* scales and shifts of the groups that the lanes of a block belong to; `map` counts from the block's first group */
typedef struct { __mmask16 some; vi map, words; } spread;
INLINE spread spread_of(int count, vi map) {
    spread s = {(__mmask16)((1u << count) - 1), map, _mm512_slli_epi32(map, 16)};
    return s;
}
INLINE vf spread_scales(const uint16_t *scale, spread s) {
    vi some = _mm512_castsi256_si512(_mm256_maskz_loadu_epi16(s.some, scale));
    return as_f(_mm512_maskz_permutexvar_epi16(0xaaaaaaaa, s.words, some));
}
INLINE vf spread_shifts(const int8_t *zero, spread s, int32_t offset) {
    vi some = _mm512_cvtepi8_epi32(_mm_maskz_loadu_epi8(s.some, zero));
    return to_f(add_i(_mm512_permutexvar_epi32(s.map, some), set_i(offset)));
}

INLINE void store_tile(void *p, vi v) { _mm256_storeu_si256(p, _mm512_castsi512_si256(v)); }
/* 16 rows of 16 lanes become 16 lanes of 16 rows */
INLINE void transpose(vi r[16]) {
    vi t[16];
    for (int i = 0; i < 16; i += 2) {
        t[i] = _mm512_unpacklo_epi32(r[i], r[i + 1]);
        t[i + 1] = _mm512_unpackhi_epi32(r[i], r[i + 1]);
    }
    for (int i = 0; i < 16; i += 4) for (int j = 0; j < 2; j++) {
        r[i + 2 * j] = _mm512_unpacklo_epi64(t[i + j], t[i + 2 + j]);
        r[i + 2 * j + 1] = _mm512_unpackhi_epi64(t[i + j], t[i + 2 + j]);
    }
    for (int j = 0; j < 4; j++) {
        t[j] = _mm512_shuffle_i32x4(r[j], r[4 + j], 0x88);
        t[4 + j] = _mm512_shuffle_i32x4(r[j], r[4 + j], 0xdd);
        t[8 + j] = _mm512_shuffle_i32x4(r[8 + j], r[12 + j], 0x88);
        t[12 + j] = _mm512_shuffle_i32x4(r[8 + j], r[12 + j], 0xdd);
    }
    for (int j = 0; j < 4; j++) {
        r[j] = _mm512_shuffle_i32x4(t[j], t[8 + j], 0x88);
        r[8 + j] = _mm512_shuffle_i32x4(t[j], t[8 + j], 0xdd);
        r[4 + j] = _mm512_shuffle_i32x4(t[4 + j], t[12 + j], 0x88);
        r[12 + j] = _mm512_shuffle_i32x4(t[4 + j], t[12 + j], 0xdd);
    }
}

/* a lane holds 32 / field codes (16 at 3 bits); code q of each lane as a float, signed. `high`: see spread_lanes */
INLINE vi spread_lanes(vi half) { return _mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm512_castsi512_si256(half)), 2); }
INLINE vi lane_high(vi high, int h) { return _mm512_slli_epi32(h ? _mm512_srli_epi32(high, 16) : high, 2); }
INLINE vf code_table(int field, int32_t offset) {
    vi lane = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
    int mask = field == 4 ? 15 : field == 3 ? 7 : 3;
    return to_f(sub_i(and_i(lane, set_i(mask)), set_i(offset)));
}
INLINE vf code_as_float(int field, int q, vi low, vi high, vf table) {
    if (field == 8) return to_f(_mm512_srai_epi32(_mm512_slli_epi32(low, 24 - 8 * q), 24));
    if (field == 4) return _mm512_permutexvar_ps(_mm512_srli_epi32(low, 4 * q), table);
    vi index = _mm512_srli_epi32(low, 2 * q);
    if (field == 3) index = _mm512_ternarylogic_epi32(set_i(4), _mm512_srli_epi32(high, q), index, 0xca);
    return _mm512_permutexvar_ps(index, table);
}

/* rounds to the type of y and stores the first `count` lanes */
INLINE void store_rounded(void *y, int64_t type, int64_t at, vf v, int count) {
    __mmask16 mask = (__mmask16)((1u << count) - 1);
    if (type == TYPE_F32) { _mm512_mask_storeu_ps((float *)y + at, mask, v); return; }
    __m256i half;
    if (type == TYPE_F16) half = _mm512_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    else {
        vi bits = _mm512_castps_si512(v), odd = and_i(_mm512_srli_epi32(bits, 16), set_i(1));
        vi rounded = _mm512_srli_epi32(add_i(add_i(bits, set_i(0x7fff)), odd), 16);
        rounded = _mm512_mask_mov_epi32(rounded, _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q), set_i(0x7fc0));
        half = _mm512_cvtepi32_epi16(rounded);
    }
    _mm256_mask_storeu_epi16((uint16_t *)y + at, mask, half);
}
