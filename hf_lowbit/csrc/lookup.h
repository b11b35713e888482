/* 32 packed codes at a time become the indices of a table of bfloat16 numbers.
 *
 * Fields of one byte belong to neighbouring codes, and the cheapest way to separate them leaves them in another order: code
 * `place_of(i)` stands at place i.
 */

/* which of 32 adjacent codes stands at place i: those of the first field of each byte, then of the second, ... */
INLINE int place_of(int field, int i) {
    return field == 8 ? i : field == 4 ? i % 16 * 2 + i / 16 : i % 8 * 4 + i / 8;
}

/* the packed bytes of 32 codes, as often as fields of one byte lie apart */
INLINE vi packed_bytes(int field, const uint8_t *low) {
    if (field == 4) return _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i *)low));
    int64_t bytes;
    memcpy(&bytes, low, 8);
    return _mm512_set1_epi64(bytes);
}
/* 32 codes in the order of `place_of`, each in the low bits of 16; what is above its field, a table ignores */
INLINE vi code_index(int field, vi bytes, uint32_t third) {
    vi lower = _mm512_set_epi64(0xff0fff0eff0dff0c, 0xff0bff0aff09ff08, 0xff07ff06ff05ff04, 0xff03ff02ff01ff00,
                                0xff0fff0eff0dff0c, 0xff0bff0aff09ff08, 0xff07ff06ff05ff04, 0xff03ff02ff01ff00);
    if (field == 4) {
        vi words = _mm512_shuffle_epi8(bytes, lower);
        return _mm512_srlv_epi64(words, _mm512_setr_epi64(0, 0, 0, 0, 4, 4, 4, 4));
    }
    vi words = _mm512_shuffle_epi8(bytes, _mm512_broadcast_i32x4(_mm512_castsi512_si128(lower)));
    vi two = _mm512_srlv_epi64(words, _mm512_setr_epi64(0, 0, 2, 2, 4, 4, 6, 6));
    if (field == 2) return two;
    /* brings the bit of code 4 j + p to bit 2 of word 8 p + j */
    vi first = _mm512_broadcast_i32x4(_mm_setr_epi16(62, 2, 6, 10, 14, 18, 22, 26));
    vi phase = _mm512_setr_epi32(0, 0, 0, 0, 0x10001, 0x10001, 0x10001, 0x10001,
                                 0x20002, 0x20002, 0x20002, 0x20002, 0x30003, 0x30003, 0x30003, 0x30003);
    vi control = and_i(_mm512_add_epi16(first, phase), _mm512_set1_epi16(63));
    vi bits = _mm512_multishift_epi64_epi8(control, _mm512_set1_epi64(third));
    return _mm512_ternarylogic_epi32(_mm512_set1_epi16(4), bits, two, 0xca);
}
