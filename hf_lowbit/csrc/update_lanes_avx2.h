/* Vectors of the update on AVX2: eight lanes. Names are those of update_lanes.h. */
#define LANES 8
#include "update_names.h"
typedef int32_t vi __attribute__((vector_size(32)));
typedef float vf __attribute__((vector_size(32)));

INLINE vi widen(const uint8_t *p) { return (vi)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)p)); }
INLINE vi widen_signed(const uint8_t *p) { return (vi)_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)p)); }
INLINE void narrow(uint8_t *p, vi x) {
    /* the bytes of each half side by side, then the halves */
    __m256i bytes = _mm256_shuffle_epi8((__m256i)x, _mm256_set1_epi32(0x0c080400));
    bytes = _mm256_permutevar8x32_epi32(bytes, _mm256_setr_epi32(0, 4, 0, 4, 0, 4, 0, 4));
    _mm_storel_epi64((__m128i *)p, _mm256_castsi256_si128(bytes));
}
INLINE vi smaller(vi a, vi b) { return (vi)_mm256_min_epi32((__m256i)a, (__m256i)b); }
INLINE vi larger(vi a, vi b) { return (vi)_mm256_max_epi32((__m256i)a, (__m256i)b); }
INLINE vf smaller_f(vf a, vf b) { return _mm256_min_ps(a, b); }
INLINE vi absolute(vi x) { return (vi)_mm256_abs_epi32((__m256i)x); }
INLINE vf roots(vf x) { return _mm256_sqrt_ps(x); }
INLINE vi rounded_up(vf x) { return (vi)_mm256_cvttps_epi32(_mm256_ceil_ps(x)); }
INLINE uint32_t different(vi a, vi b) {
    return 255 ^ (uint32_t)_mm256_movemask_ps(_mm256_castsi256_ps(_mm256_cmpeq_epi32((__m256i)a, (__m256i)b)));
}
INLINE int32_t largest(vi x) {
    __m128i half = _mm_max_epi32(_mm256_castsi256_si128((__m256i)x), _mm256_extracti128_si256((__m256i)x, 1));
    half = _mm_max_epi32(half, _mm_shuffle_epi32(half, 0x4e));
    return _mm_cvtsi128_si32(_mm_max_epi32(half, _mm_shuffle_epi32(half, 0xb1)));
}
