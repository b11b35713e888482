/* 32 packed codes at a time become the indices of a table of bfloat16 numbers.
 *
 * The packed bytes are repeated, and shifted by the places of a field in 16 bits: each 16 bits then begin with another code.
 * What is above its field, a table ignores. So the codes leave their order: code `place_of_word(i)` stands at place i.
 */

INLINE int place_of_word(int field, int i) {
    return field == 8 ? i : field == 4 ? i % 8 * 4 + i / 8 : i % 4 * 8 + i / 4;
}

/* `low`: 16 bytes at 4 bits, 8 of the low plane below; `third`: 32 third bits */
INLINE vi code_index(int field, const uint8_t *low, uint32_t third) {
    if (field == 4) {
        vi bytes = _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i *)low));
        return _mm512_srlv_epi64(bytes, _mm512_setr_epi64(0, 0, 4, 4, 8, 8, 12, 12));
    }
    int64_t bytes;
    memcpy(&bytes, low, 8);
    vi two = _mm512_srlv_epi64(_mm512_set1_epi64(bytes), _mm512_setr_epi64(0, 2, 4, 6, 8, 10, 12, 14));
    if (field == 2) return two;
    /* brings the bit of code 8 j + i to bit 2 of word 4 i + j */
    vi first = _mm512_set1_epi64(0x0016000e0006003e), all = _mm512_set1_epi64(0x0001000100010001);
    vi control = _mm512_add_epi16(first, _mm512_mullo_epi16(all, _mm512_setr_epi64(0, 0x0001000100010001, 0x0002000200020002,
        0x0003000300030003, 0x0004000400040004, 0x0005000500050005, 0x0006000600060006, 0x0007000700070007)));
    control = and_i(control, _mm512_set1_epi16(63));
    vi bits = _mm512_multishift_epi64_epi8(control, _mm512_set1_epi64(third));
    return _mm512_ternarylogic_epi32(_mm512_set1_epi16(4), bits, two, 0xca);
}
