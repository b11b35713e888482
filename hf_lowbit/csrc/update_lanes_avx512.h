/* Vectors of the update on AVX512: sixteen lanes. Names are those of update_lanes.h. */
#define LANES 16
#include "update_names.h"
typedef int32_t vi __attribute__((vector_size(64)));
typedef float vf __attribute__((vector_size(64)));

INLINE vi widen(const uint8_t *p) { return (vi)_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)p)); }
INLINE vi widen_signed(const uint8_t *p) { return (vi)_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)p)); }
INLINE void narrow(uint8_t *p, vi x) { _mm_storeu_si128((__m128i *)p, _mm512_cvtepi32_epi8((__m512i)x)); }
INLINE vi smaller(vi a, vi b) { return (vi)_mm512_min_epi32((__m512i)a, (__m512i)b); }
INLINE vi larger(vi a, vi b) { return (vi)_mm512_max_epi32((__m512i)a, (__m512i)b); }
INLINE vf smaller_f(vf a, vf b) { return _mm512_min_ps(a, b); }
INLINE vi absolute(vi x) { return (vi)_mm512_abs_epi32((__m512i)x); }
INLINE vf roots(vf x) { return _mm512_sqrt_ps(x); }
INLINE vi rounded_up(vf x) { return (vi)_mm512_cvt_roundps_epi32(x, _MM_FROUND_TO_POS_INF | _MM_FROUND_NO_EXC); }
INLINE uint32_t different(vi a, vi b) { return _mm512_cmpneq_epi32_mask((__m512i)a, (__m512i)b); }
INLINE int32_t largest(vi x) { return _mm512_reduce_max_epi32((__m512i)x); }
