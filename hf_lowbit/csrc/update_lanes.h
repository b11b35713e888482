/* Vectors of the update without a vector unit: four lanes, that a compiler may find a unit for. */
#define LANES 4
#include "update_names.h"
typedef int32_t vi __attribute__((vector_size(16)));
typedef float vf __attribute__((vector_size(16)));

INLINE vi widen(const uint8_t *p) { return (vi){p[0], p[1], p[2], p[3]}; }
INLINE vi widen_signed(const uint8_t *p) { return (vi){(int8_t)p[0], (int8_t)p[1], (int8_t)p[2], (int8_t)p[3]}; }
/* the low byte of each lane */
INLINE void narrow(uint8_t *p, vi x) { for (int i = 0; i < 4; i++) p[i] = (uint8_t)x[i]; }
INLINE vi smaller(vi a, vi b) { vi less = a < b; return (less & a) | (~less & b); }
INLINE vi larger(vi a, vi b) { vi more = a > b; return (more & a) | (~more & b); }
INLINE vf smaller_f(vf a, vf b) { vi less = a < b; return (vf)((less & (vi)a) | (~less & (vi)b)); }
INLINE vi absolute(vi x) { vi sign = x >> 31; return (x ^ sign) - sign; }
INLINE vf roots(vf x) { return (vf){sqrtf(x[0]), sqrtf(x[1]), sqrtf(x[2]), sqrtf(x[3])}; }
/* to whole numbers, which int32 holds */
INLINE vi rounded_up(vf x) {
    vi whole = __builtin_convertvector(x, vi);
    return whole - (x > __builtin_convertvector(whole, vf));
}
/* a bit for each lane */
INLINE uint32_t different(vi a, vi b) {
    vi differ = a != b;
    return (uint32_t)((differ[0] & 1) | (differ[1] & 2) | (differ[2] & 4) | (differ[3] & 8));
}
INLINE int32_t largest(vi x) {
    int32_t most = x[0];
    for (int i = 1; i < 4; i++) most = x[i] > most ? x[i] : most;
    return most;
}
