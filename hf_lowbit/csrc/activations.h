/* Prepares the rows of x once a call, in the order in which the weights lie.
 *
 * P = 8 / field codes share a byte (the low plane counts at 3 bits), so a lane of 4 packed bytes holds the 4 P codes
 * k = 4 P l + P i + p of byte i and phase p. Rearranged by (lane, phase, byte), the activations of one phase of a lane
 * are 4 adjacent bytes: a quad, the unit of a dot product instruction. Quads beyond K are zero.
 */

/* codes [lanes * 4 P] in the order of k -> quads in the order (lane, phase), in place */
INLINE void T(to_quads)(int8_t *codes, int64_t lanes, int per_byte) {
    if (per_byte == 1) return;
    if (per_byte == 2) {
        for (int64_t l = 0; l < lanes; l++) {
            uint64_t v, even, odd;
            memcpy(&v, codes + 8 * l, 8);
            even = v & 0x00ff00ff00ff00ff;
            odd = v >> 8 & 0x00ff00ff00ff00ff;
            even = (even | even >> 8) & 0x0000ffff0000ffff;
            odd = (odd | odd >> 8) & 0x0000ffff0000ffff;
            v = ((even | even >> 16) & 0xffffffff) | (odd | odd >> 16) << 32;
            memcpy(codes + 8 * l, &v, 8);
        }
        return;
    }
    for (int64_t l = 0; l < lanes; l++) {
        int8_t quad[16];
        for (int i = 0; i < 4; i++) for (int p = 0; p < 4; p++) quad[4 * p + i] = codes[16 * l + 4 * i + p];
        memcpy(codes + 16 * l, quad, 16);
    }
}

/* lanes of packed bytes in a row, P, and codes in a lane */
static inline int64_t T(lanes_of)(const struct lowbit_problem *p) {
    int64_t bytes = p->field == 3 ? (p->columns + 3) / 4 : p->row_bytes;
    return (bytes + 3) / 4;
}
static inline int T(per_byte)(const struct lowbit_problem *p) { return p->field == 3 ? 4 : (int)(8 / p->field); }

static void T(load_floats)(const struct lowbit_call *c, int64_t m, float *out) {
    int64_t columns = c->p->columns;
    if (c->p->type == TYPE_F32) { memcpy(out, (const float *)c->x + m * c->x_stride, (size_t)columns * 4); return; }
    const uint16_t *x = (const uint16_t *)c->x + m * c->x_stride;
    if (c->p->type == TYPE_BF16) for (int64_t k = 0; k < columns; k++) out[k] = float_of_bf16(x[k]);
    else for (int64_t k = 0; k < columns; k++) out[k] = float_of_f16(x[k]);
}

/* codes and t of one row, as the reference defines them: NaN and infinity have no code, the row's t is NaN */
static float T(quantize_row)(const float *x, int64_t columns, int8_t *codes) {
    int32_t largest = 0;
    for (int64_t k = 0; k < columns; k++) {
        int32_t bits;
        memcpy(&bits, x + k, 4);
        bits &= 0x7fffffff;
        largest = bits > largest ? bits : largest;
    }
    float top = float_of_bits((uint32_t)largest), inverse = 1.0f / top * 127.0f;
    if (largest >= 0x7f800000 || bits_of_float(inverse) >= 0x7f800000) {
        /* NaN or infinity in the row, a row of zeros, or a magnitude so small that its inverse overflows */
        memset(codes, 0, (size_t)columns);
        return largest >= 0x7f800000 ? float_of_bits(0x7fc00000) : top / 127.0f;
    }
    for (int64_t k = 0; k < columns; k++) {
        /* rounded twice, as in the reference; -std=c11 keeps compilers from fusing the two */
        float scaled = x[k] * inverse;
        /* adding 1.5 * 2^23 rounds to the nearest integer, ties to even, and leaves it in the low bits */
        codes[k] = (int8_t)bits_of_float(scaled + 12582912.0f);
    }
    return top / 127.0f;
}

INLINE int32_t T(sum_codes)(const int8_t *codes, int64_t count) {
    int32_t sum = 0;
    for (int64_t k = 0; k < count; k++) sum += codes[k];
    return sum;
}

/* One row of floats in fixed point: x = t r, integers r in place of x. Cut into balanced digits r = sum_d 256^d r_d they are so
 * many rows of int8. The error of r is 2^-24 of the largest entry with three digits, 2^-32 with four. Returns t, or 0 when x
 * has NaN or infinity, or is too small: 2^-60, so that t of four digits is a normal float.
 */
static inline float T(fixed_point)(float *x, int64_t columns, int digits) {
    int32_t largest = 0;
    for (int64_t k = 0; k < columns; k++) {
        int32_t bits;
        memcpy(&bits, x + k, 4);
        bits &= 0x7fffffff;
        largest = bits > largest ? bits : largest;
    }
    if (largest >= 0x7f800000 || largest < 0x21800000) return 0.0f;
    int32_t *r = (int32_t *)x;
    double whole = digits == 4 ? 127.0 * 16777216.0 : 127.0 * 65536.0, top = float_of_bits((uint32_t)largest);
    if (digits == 4) for (int64_t k = 0; k < columns; k++) {
        double scaled = (double)x[k] * (whole / top);
        r[k] = (int32_t)(scaled + (scaled < 0 ? -0.5 : 0.5));
    } else {
        float factor = (float)(whole / top);
        for (int64_t k = 0; k < columns; k++) {
            float scaled = x[k] * factor;
            r[k] = (int32_t)(scaled + (scaled < 0 ? -0.5f : 0.5f));
        }
        whole = (double)factor * top;
    }
    return (float)(top / whole);
}

/* the lowest digit of integers, which lose it */
static inline void T(next_digit)(int32_t *r, int64_t columns, int8_t *codes) {
    for (int64_t k = 0; k < columns; k++) {
        codes[k] = (int8_t)r[k];
        r[k] = (r[k] - codes[k]) >> 8;
    }
}

#ifdef VB
/* VB P codes in the order of k -> their phases: P times VB of them, `apart` bytes from one phase to the next */
INLINE void T(split_phases)(const int8_t *codes, int8_t *out, int64_t apart, const int P) {
    if (P == 2) {
        uint16_t words[VB];
        memcpy(words, codes, sizeof words);
        for (int i = 0; i < 2; i++) for (int j = 0; j < VB; j++) out[i * apart + j] = (int8_t)(words[j] >> 8 * i);
    } else {
        uint32_t words[VB];
        memcpy(words, codes, sizeof words);
        for (int i = 0; i < 4; i++) for (int j = 0; j < VB; j++) out[i * apart + j] = (int8_t)(words[j] >> 8 * i);
    }
}
#endif
