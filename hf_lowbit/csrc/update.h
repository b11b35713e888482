/* One optimizer step of a packed weight, row by row; the definition is hf_lowbit/functional/update.py, bit for bit.
 *
 * Numbers meet the operations of the definition in its order, each rounded once (-std=c11 fuses none); all else is
 * integers. A row is worked off in passes over buffers that stay in cache, plain loops that a compiler vectorizes for the
 * target in force: included once a tier, with T(name) and T(roots).
 */
#define mix T(mix)
#define spread T(spread)
#define join T(join)
#define load_gradient T(load_gradient)
#define load_moment T(load_moment)
#define save_moment T(save_moment)
#define largest T(largest)
#define direct T(direct)
#define move_codes T(move_codes)
#define update_range T(update_range)

INLINE uint32_t mix(uint32_t x) {
    x = (x ^ x >> 16) * 0x7FEB352Du;
    x = (x ^ x >> 15) * 0x846CA68Bu;
    return x ^ x >> 16;
}

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

static void load_gradient(const struct lowbit_update *u, int64_t n, float *g) {
    int64_t step = u->grad_column, columns = u->columns;
    if (u->grad_type == TYPE_F32) {
        const float *from = (const float *)u->grad + n * u->grad_row;
        if (step == 1) memcpy(g, from, (size_t)columns * 4);
        else for (int64_t k = 0; k < columns; k++) g[k] = from[k * step];
        return;
    }
    const uint16_t *from = (const uint16_t *)u->grad + n * u->grad_row;
    quad *restrict bits = (quad *)g;
    if (u->grad_type == TYPE_F16) for (int64_t k = 0; k < columns; k++) g[k] = float_of_f16(from[k * step]);
    else if (step != 1) for (int64_t k = 0; k < columns; k++) bits[k] = (uint32_t)from[k * step] << 16;
    else for (int64_t k = 0; k < columns; k++) bits[k] = (uint32_t)from[k] << 16;
}

/* moments as numbers: functional/moments.py, `decode` */
static void load_moment(const struct lowbit_update *u, const struct lowbit_moment *moment, int64_t n, struct lowbit_buffers *b, float *x) {
    int64_t columns = u->columns;
    quad *pattern = (quad *)x;
    if (u->state_bits == 32) memcpy(x, (const float *)moment->codes + n * columns, (size_t)columns * 4);
    if (u->state_bits == 16) {
        const uint16_t *from = (const uint16_t *)moment->codes + n * columns;
        for (int64_t k = 0; k < columns; k++) pattern[k] = (uint32_t)from[k] << 16;
    }
    if (u->state_bits > 8) return;
    const uint8_t *codes = moment->codes + n * u->state_row;
    int shift = u->state_bits == 8 ? 20 : 23;
    if (u->state_bits == 4) {
        uint8_t *fields = b->bytes;
        spread(codes, u->state_row, 4, fields);
        /* sign extension of four bits */
        if (moment->is_signed) for (int64_t k = 0; k < columns; k++) fields[k] = (uint8_t)((fields[k] ^ 8) - 8);
        codes = fields;
    }
    for (int64_t block = 0; block < u->blocks; block++) {
        int64_t begin = block * u->width, end = min64(begin + u->width, columns);
        int32_t base = moment->base[n * u->blocks + block];
        if (!moment->is_signed) {
            for (int64_t k = begin; k < end; k++) pattern[k] = (uint32_t)(codes[k] + base) << shift;
            continue;
        }
        for (int64_t k = begin; k < end; k++) {
            int32_t field = (int8_t)codes[k], level = field < 0 ? -field : field;
            uint32_t bits = (uint32_t)(level + base) << shift | ((uint32_t)field & 0x80000000u);
            pattern[k] = field == 0 ? 0 : bits;
        }
    }
}

/* the larger of patterns without sign */
static int32_t largest(const quad *pattern, int64_t begin, int64_t end) {
    int32_t most = 0;
    for (int64_t k = begin; k < end; k++) {
        int32_t bits = (int32_t)(pattern[k] & 0x7fffffffu);
        most = bits > most ? bits : most;
    }
    return most;
}

/* numbers as moments: `encode`, and for 16 bits `to_bfloat16` */
static void save_moment(const struct lowbit_update *u, struct lowbit_moment *moment, int64_t n, struct lowbit_buffers *b, const float *x, const uint32_t *noise) {
    int64_t columns = u->columns;
    const quad *pattern = (const quad *)x;
    if (u->state_bits == 32) memcpy((float *)moment->codes + n * columns, x, (size_t)columns * 4);
    if (u->state_bits == 16) {
        uint16_t *to = (uint16_t *)moment->codes + n * columns;
        for (int64_t k = 0; k < columns; k++) to[k] = (uint16_t)((pattern[k] + (noise[k] & 0xffff)) >> 16);
    }
    if (u->state_bits > 8) return;
    int shift = u->state_bits == 8 ? 20 : 23, top = u->state_bits == 8 ? 255 : 15, low = 1;
    if (moment->is_signed) { top >>= 1; low = 0; }
    uint32_t mask = (1u << shift) - 1;
    uint8_t *codes = u->state_bits == 8 ? moment->codes + n * u->state_row : b->bytes;
    for (int64_t block = 0; block < u->blocks; block++) {
        int64_t begin = block * u->width, end = min64(begin + u->width, columns);
        int32_t base = (begin < end ? largest(pattern, begin, end) >> shift : 0) - (top - 1);
        base = base < 0 ? 0 : base;
        moment->base[n * u->blocks + block] = (int16_t)base;
        for (int64_t k = begin; k < end; k++) {
            int32_t code = (int32_t)((noise[k] & mask) + (pattern[k] & 0x7fffffffu)) >> shift;
            code -= base;
            code = code < low ? low : code;
            code = code > top ? top : code;
            int32_t sign = (int32_t)pattern[k] >> 31;
            codes[k] = (uint8_t)((code ^ sign) - sign);
        }
    }
    if (u->state_bits == 4) {
        for (int64_t k = 0; k < columns; k++) codes[k] &= 15;
        codes[columns] = 0;
        join(codes, u->state_row, 4, moment->codes + n * u->state_row);
    }
}

/* u = direction of the rule, and the new moments: functional/directions.py. `g` becomes u */
static void direct(const struct lowbit_update *u, struct lowbit_buffers *b) {
    int64_t columns = u->columns;
    float *restrict g = b->g, *restrict m = b->m, *restrict v = b->v;
    float beta1 = (float)u->beta1, rest1 = (float)u->rest1, beta2 = (float)u->beta2, rest2 = (float)u->rest2;
    if (u->rule == RULE_ADAMW) {
        float eps = (float)u->eps, factor = (float)u->factor;
        for (int64_t k = 0; k < columns; k++) {
            m[k] = m[k] * beta1 + g[k] * rest1;
            v[k] = v[k] * beta2 + g[k] * g[k] * rest2;
        }
        T(roots)(v, columns, g);
        for (int64_t k = 0; k < columns; k++) g[k] = m[k] / (g[k] + eps) * factor;
    } else if (u->rule == RULE_LION) {
        for (int64_t k = 0; k < columns; k++) {
            float sum = m[k] * beta1 + g[k] * rest1;
            m[k] = m[k] * beta2 + g[k] * rest2;
            g[k] = (float)((sum > 0) - (sum < 0));
        }
    } else {
        if (u->first) memcpy(m, g, (size_t)columns * 4);
        else for (int64_t k = 0; k < columns; k++) m[k] = m[k] * beta1 + g[k];
        if (!u->nesterov) memcpy(g, m, (size_t)columns * 4);
        else for (int64_t k = 0; k < columns; k++) g[k] = g[k] + m[k] * beta1;
    }
}

/* codes of [begin, end), which share a scale: functional/stochastic.py. Counts what changed and the levels asked for */
static void move_codes(const struct lowbit_update *u, struct lowbit_buffers *b, int64_t begin, int64_t end, float inverse, float zero) {
    const float unit = 0x1.fffffep-32f, rate = (float)u->rate, decay = (float)u->decay, span = (float)(u->qmax - u->qmin);
    const int32_t low = (int32_t)u->qmin, high = (int32_t)u->qmax;
    const uint32_t *restrict words = b->words;
    const float *restrict d = b->g;
    int8_t *restrict codes = (int8_t *)b->codes;
    int32_t *restrict moves = b->moves, changed = 0, asked = 0;
    for (int64_t k = begin; k < end; k++) {
        float step = d[k] * rate * inverse - ((float)codes[k] - zero) * decay;
        float size = __builtin_fabsf(step) - (float)(int32_t)(words[k] & 0x7fffffffu) * unit;
        /* further than from one end of the grid to the other no code can go */
        size = size < span ? size : span;
        /* rounded up; no compiler vectorizes ceilf at -O2 */
        int32_t whole = (int32_t)size;
        whole += size > (float)whole;
        moves[k] = step < 0 ? -whole : whole;
    }
    for (int64_t k = begin; k < end; k++) {
        int32_t q = codes[k], move = moves[k], moved = q + move;
        asked += move < 0 ? -move : move;
        moved = moved < low ? low : moved;
        moved = moved > high ? high : moved;
        changed += moved != q;
        codes[k] = (int8_t)moved;
    }
    b->changed += changed;
    b->levels += asked;
}

static void update_range(void *argument, int64_t first, int64_t last) {
    struct update_job *job = argument;
    struct lowbit_update *u = job->u;
    int64_t columns = u->columns, room = round_up(columns + 16, 64);
    struct lowbit_buffers buffers = {0}, *b = &buffers;
    char *memory = scratch(room * (4 * 6 + 2));
    if (!memory) { job->failed = 1; return; }
    b->g = (float *)memory; b->m = b->g + room; b->v = b->m + room;
    b->words = (uint32_t *)(b->v + room); b->noise = b->words + room; b->moves = (int32_t *)(b->noise + room);
    b->codes = (uint8_t *)(b->moves + room); b->bytes = b->codes + room;
    int moments = u->rule == RULE_ADAMW ? 2 : 1, half = (int)((columns + 3) / 4);
    for (int64_t n = first; n < last; n++) {
        uint8_t *row = u->stored + n * u->row_bytes;
        uint32_t row_word = mix((uint32_t)(n + u->row_key));
        for (int64_t k = 0; k < columns; k++) b->words[k] = mix(row_word + job->column_words[k]);
        load_gradient(u, n, b->g);
        load_moment(u, &u->m, n, b, b->m);
        if (moments == 2) load_moment(u, &u->v, n, b, b->v);
        direct(u, b);
        if (u->state_bits < 32) for (int64_t k = 0; k < columns; k++) {
            uint32_t x = b->words[k] * 0x31848BABu;
            b->noise[k] = x ^ x >> 15;
        }
        save_moment(u, &u->m, n, b, b->m, b->noise);
        if (moments == 2) {
            if (u->state_bits < 32)
                for (int64_t k = 0; k < columns; k++) b->noise[k] = (uint32_t)((int32_t)b->noise[k] >> 8) ^ b->noise[k] << 24;
            save_moment(u, &u->v, n, b, b->v, b->noise);
        }
        if (u->field == 8) memcpy(b->codes, row, (size_t)columns);
        else {
            uint8_t *restrict codes = b->codes, *restrict bytes = b->bytes, offset = (uint8_t)u->offset;
            spread(row, u->field == 3 ? half : u->row_bytes, u->field == 3 ? 2 : (int)u->field, b->codes);
            if (u->field == 3) {
                spread(row + half, u->row_bytes - half, 1, b->bytes);
                for (int64_t k = 0; k < columns; k++) codes[k] |= (uint8_t)(bytes[k] << 2);
            }
            for (int64_t k = 0; k < columns; k++) codes[k] = (uint8_t)(codes[k] - offset);
        }
        int64_t groups = (columns + u->group - 1) / u->group;
        for (int64_t i = 0; i < groups; i++) {
            int64_t place = n * u->scale_stride + i;
            float zero = u->zero ? (float)u->zero[place] : 0.0f;
            float inverse = 1.0f / load_element(u->scale, u->scale_type, place);
            move_codes(u, b, i * u->group, min64((i + 1) * u->group, columns), inverse, zero);
        }
        if (u->field == 8) { memcpy(row, b->codes, (size_t)columns); continue; }
        uint8_t *restrict codes = b->codes, *restrict bytes = b->bytes, offset = (uint8_t)u->offset;
        for (int64_t k = 0; k < columns; k++) codes[k] = (uint8_t)(codes[k] + offset);
        memset(codes + columns, 0, 8);
        if (u->field == 3) {
            for (int64_t k = 0; k < columns + 8; k++) bytes[k] = codes[k] >> 2;
            for (int64_t k = 0; k < columns; k++) codes[k] &= 3;
            join(b->bytes, u->row_bytes - half, 1, row + half);
            join(b->codes, half, 2, row);
        } else join(b->codes, u->row_bytes, (int)u->field, row);
    }
    free(memory);
    /* threads that end at once add up */
    __atomic_fetch_add(&u->changed, b->changed, __ATOMIC_RELAXED);
    __atomic_fetch_add(&u->levels, b->levels, __ATOMIC_RELAXED);
}

#undef mix
#undef spread
#undef join
#undef load_gradient
#undef load_moment
#undef save_moment
#undef largest
#undef direct
#undef move_codes
#undef update_range
