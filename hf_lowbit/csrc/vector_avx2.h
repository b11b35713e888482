/* Vectors of the AVX2 tier: 32 bytes, 8 lanes of 32 bits. With AVX-VNNI products go straight to 32 bits; without it pairs
 * of products are added in 16 bits, several times as far as 15 bits reach, and then widened. */
#define VB 32
#define LANES 8
#define ROWS_GROUPED 2
#define ROWS_UNGROUPED 2
#define TILE 4
#define FLOAT_SHIFT 1       /* codes become unsigned floats: the offset is subtracted with the zero point */
#ifdef VNNI
#define OFFSET8 128
#define NARROW 0
#else
#define OFFSET8 0           /* 8 bits stay signed: |q| times a with q's sign */
#define NARROW 1
#endif
typedef __m256i vi;
typedef __m256 vf;

INLINE vi load(const void *p) { return _mm256_loadu_si256(p); }
INLINE void store(void *p, vi v) { _mm256_storeu_si256(p, v); }
INLINE vf load_f(const float *p) { return _mm256_loadu_ps(p); }
INLINE void store_f(float *p, vf v) { _mm256_storeu_ps(p, v); }
typedef int64_t part;
INLINE part part_of(int64_t left) { return left; }
static __attribute__((noinline)) vi load_end(const uint8_t *p, int64_t left) {
    uint8_t some[32] = {0};
    if (left > 0) memcpy(some, p, (size_t)left);
    return load(some);
}
INLINE vi load_part(const uint8_t *p, part left) { return left >= 32 ? load(p) : load_end(p, left); }
INLINE vi load_half(const uint8_t *p, part left) {
    return left >= 16 ? _mm256_castsi128_si256(_mm_loadu_si128((const __m128i *)p)) : load_end(p, left);
}
INLINE vi zero_i(void) { return _mm256_setzero_si256(); }
INLINE vf zero_f(void) { return _mm256_setzero_ps(); }
INLINE vi set_i(int32_t v) { return _mm256_set1_epi32(v); }
INLINE vf set_f(float v) { return _mm256_set1_ps(v); }
INLINE vi add_i(vi a, vi b) { return _mm256_add_epi32(a, b); }
INLINE vi sub_i(vi a, vi b) { return _mm256_sub_epi32(a, b); }
INLINE vi mul_i(vi a, vi b) { return _mm256_mullo_epi32(a, b); }
INLINE vf add_f(vf a, vf b) { return _mm256_add_ps(a, b); }
INLINE vf sub_f(vf a, vf b) { return _mm256_sub_ps(a, b); }
INLINE vf mul_f(vf a, vf b) { return _mm256_mul_ps(a, b); }
INLINE vf fma_f(vf a, vf b, vf c) { return _mm256_fmadd_ps(a, b, c); }
INLINE vf fnma_f(vf a, vf b, vf c) { return _mm256_fnmadd_ps(a, b, c); }
INLINE vf to_f(vi v) { return _mm256_cvtepi32_ps(v); }
INLINE vf as_f(vi v) { return _mm256_castsi256_ps(v); }
INLINE vi to_i(vf v) { return _mm256_cvttps_epi32(v); }
INLINE vi from_f(vf v) { return _mm256_castps_si256(v); }
INLINE vi and_i(vi a, vi b) { return _mm256_and_si256(a, b); }
INLINE vi shift_right(vi v, int n) { return _mm256_srli_epi32(v, n); }
INLINE int32_t sum_i(vi v) {
    __m128i s = _mm_add_epi32(_mm256_castsi256_si128(v), _mm256_extracti128_si256(v, 1));
    s = _mm_add_epi32(s, _mm_shuffle_epi32(s, 0x4e));
    return _mm_cvtsi128_si32(_mm_add_epi32(s, _mm_shuffle_epi32(s, 0xb1)));
}
INLINE float sum_f(vf v) {
    __m128 s = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    s = _mm_add_ps(s, _mm_movehl_ps(s, s));
    return _mm_cvtss_f32(_mm_add_ss(s, _mm_shuffle_ps(s, s, 1)));
}

#ifdef VNNI
/* as assembly, since GCC 12 copies the sum around the intrinsic */
INLINE vi dot(int field, vi sum, vi u, vi a) {
    (void)field;
    __asm__("%{vex%} vpdpbusd %2, %1, %0" : "+x"(sum) : "x"(u), "x"(a));
    return sum;
}
INLINE int narrow_steps(int field) { (void)field; return 1; }
#else
/* pairs of products in 16 bits: never saturated, 2 * 128 * 127 < 2^15 */
INLINE vi pairs(int field, vi u, vi a) {
    if (field == 8) return _mm256_maddubs_epi16(_mm256_abs_epi8(u), _mm256_sign_epi8(a, u));
    return _mm256_maddubs_epi16(u, a);
}
INLINE vi widen(vi sum, vi narrow) { return add_i(sum, _mm256_madd_epi16(narrow, _mm256_set1_epi16(1))); }
INLINE vi dot(int field, vi sum, vi u, vi a) { return widen(sum, pairs(field, u, a)); }
/* sums of pairs that 15 bits hold: 2 * 127 * 15 * 8, 2 * 127 * 7 * 16, 2 * 127 * 3 * 32 */
INLINE int narrow_steps(int field) { return field == 8 ? 1 : field == 4 ? 8 : field == 3 ? 16 : 32; }
#endif

INLINE vi high_mask(int p) { return _mm256_set1_epi16((short)((1 << p) | (16 << p) << 8)); }
INLINE vi with_high(vi two, vi bytes, int p) {
    vi set = _mm256_cmpeq_epi8(and_i(bytes, high_mask(p)), high_mask(p));
    return _mm256_or_si256(two, and_i(set, _mm256_set1_epi8(4)));
}
INLINE vi spread_high(vi half) {
    vi order = _mm256_setr_epi8(0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7,
                                8, 8, 9, 9, 10, 10, 11, 11, 12, 12, 13, 13, 14, 14, 15, 15);
    return _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(_mm256_castsi256_si128(half)), order);
}
INLINE vi fields(int field, int p, vi low, vi high) {
    if (field == 8) return OFFSET8 ? _mm256_xor_si256(low, _mm256_set1_epi8((char)0x80)) : low;
    if (field == 4) return and_i(_mm256_srli_epi16(low, 4 * p), _mm256_set1_epi8(15));
    vi two = and_i(_mm256_srli_epi16(low, 2 * p), _mm256_set1_epi8(3));
    return field == 2 ? two : with_high(two, high, p);
}
INLINE vi fields_across(int field, int p, vi low, vi high, int h) {
    if (field != 3) return fields(field, p, low, high);
    int b = 2 * h;
    vi order = _mm256_setr_epi8(b, b, b + 1, b + 1, b + 4, b + 4, b + 5, b + 5, b + 8, b + 8, b + 9, b + 9, b + 12, b + 12,
                                b + 13, b + 13, b, b, b + 1, b + 1, b + 4, b + 4, b + 5, b + 5, b + 8, b + 8, b + 9, b + 9,
                                b + 12, b + 12, b + 13, b + 13);
    vi two = and_i(_mm256_srli_epi16(low, 2 * p), _mm256_set1_epi8(3));
    return with_high(two, _mm256_shuffle_epi8(high, order), p);
}

typedef struct { int count; vi map; } spread;
INLINE spread spread_of(int count, vi map) { spread s = {count, map}; return s; }
static __attribute__((noinline)) vf spread_several(const uint16_t *scale, const int8_t *zero, spread s, int32_t offset) {
    float some[LANES] = {0};
    for (int i = 0; i < s.count; i++) some[i] = scale ? float_of_bf16(scale[i]) : (float)(offset + zero[i]);
    return _mm256_permutevar8x32_ps(load_f(some), s.map);
}
INLINE vf scale_at(const uint16_t *scale) { return as_f(_mm256_slli_epi32(_mm256_set1_epi16((short)*scale), 16)); }
INLINE vf choose_second(vf first, vf second, vi map) {
    return _mm256_blendv_ps(first, second, as_f(_mm256_slli_epi32(map, 31)));
}
INLINE vf spread_scales(const uint16_t *scale, spread s) {
    if (s.count == 1) return scale_at(scale);
    return s.count == 2 ? choose_second(scale_at(scale), scale_at(scale + 1), s.map) : spread_several(scale, NULL, s, 0);
}
INLINE vf spread_shifts(const int8_t *zero, spread s, int32_t offset) {
    vf first = set_f((float)(offset + zero[0]));
    if (s.count == 1) return first;
    if (s.count > 2) return spread_several(NULL, zero, s, offset);
    return choose_second(first, set_f((float)(offset + zero[1])), s.map);
}

INLINE void store_tile(void *p, vi v) { _mm_storeu_si128(p, _mm256_castsi256_si128(v)); }
INLINE void transpose(vi r[8]) {
    vi t[8], s[8];
    for (int i = 0; i < 8; i += 2) {
        t[i] = _mm256_unpacklo_epi32(r[i], r[i + 1]);
        t[i + 1] = _mm256_unpackhi_epi32(r[i], r[i + 1]);
    }
    for (int i = 0; i < 8; i += 4) for (int j = 0; j < 2; j++) {
        s[i + 2 * j] = _mm256_unpacklo_epi64(t[i + j], t[i + 2 + j]);
        s[i + 2 * j + 1] = _mm256_unpackhi_epi64(t[i + j], t[i + 2 + j]);
    }
    for (int j = 0; j < 4; j++) {
        r[j] = _mm256_permute2x128_si256(s[j], s[4 + j], 0x20);
        r[4 + j] = _mm256_permute2x128_si256(s[j], s[4 + j], 0x31);
    }
}

INLINE vi spread_lanes(vi half) { return _mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm256_castsi256_si128(half)), 2); }
INLINE vi lane_high(vi high, int h) { return _mm256_slli_epi32(h ? _mm256_srli_epi32(high, 16) : high, 2); }
INLINE vf code_table(int field, int32_t offset) { (void)field; (void)offset; return zero_f(); }
INLINE vf code_as_float(int field, int q, vi low, vi high, vf table) {
    (void)table;
    if (field == 8) return to_f(_mm256_srai_epi32(_mm256_slli_epi32(low, 24 - 8 * q), 24));
    if (field == 4) return to_f(and_i(_mm256_srli_epi32(low, 4 * q), set_i(15)));
    vi two = and_i(_mm256_srli_epi32(low, 2 * q), set_i(3));
    if (field == 2) return to_f(two);
    return to_f(_mm256_or_si256(two, and_i(_mm256_srli_epi32(high, q), set_i(4))));
}

INLINE void store_rounded(void *y, int64_t type, int64_t at, vf v, int count) {
    float some[LANES];
    if (type == TYPE_F32 && count == LANES) { store_f((float *)y + at, v); return; }
    store_f(some, v);
    for (int i = 0; i < count; i++) store_element(y, type, at + i, some[i]);
}
