/* Fields of 1, 2 and 4 bits, one byte each and back: plain loops that a compiler vectorizes for the tier in force. */
/* fields of `width` bits, one byte each; writes up to 7 beyond the last */
static void spread(const uint8_t *stored, int64_t bytes, int width, uint8_t *out) {
    if (width == 4) for (int64_t i = 0; i < bytes; i++) ((pair *)out)[i] = (pair)((stored[i] | stored[i] << 4) & 0x0f0f);
    if (width == 2) for (int64_t i = 0; i < bytes; i++) {
        uint32_t b = stored[i];
        ((quad *)out)[i] = (b | b << 6 | b << 12 | b << 18) & 0x03030303u;
    }
    if (width == 1) for (int64_t i = 0; i < bytes; i++)
        ((octet *)out)[i] = (((stored[i] * 0x0101010101010101u) & 0x8040201008040201u) + 0x7f7f7f7f7f7f7f7fu) >> 7 & 0x0101010101010101u;
}

static void join(const uint8_t *in, int64_t bytes, int width, uint8_t *stored) {
    if (width == 4) for (int64_t i = 0; i < bytes; i++) { uint32_t w = ((const pair *)in)[i]; stored[i] = (uint8_t)(w | w >> 4); }
    if (width == 2) for (int64_t i = 0; i < bytes; i++) {
        uint32_t w = ((const quad *)in)[i];
        stored[i] = (uint8_t)(w | w >> 6 | w >> 12 | w >> 18);
    }
    if (width == 1) for (int64_t i = 0; i < bytes; i++) stored[i] = (uint8_t)(((const octet *)in)[i] * 0x0102040810204080u >> 56);
}
