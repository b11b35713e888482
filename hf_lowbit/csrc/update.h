/* One optimizer step of a packed weight, row by row; the definition is hf_lowbit/functional/update.py, bit for bit.
 *
 * Numbers meet the operations of the definition in its order, each rounded once (-std=c11 fuses none); all else is
 * integers. A row is worked off block by block, as moments of 8 and 4 bits are cut. The first pass over a block does
 * everything but storing such moments, which must know the largest of their block first: a second pass does that. What is
 * left of a block after its last whole vector is copied to a vector of its own and back.
 *
 * Included once a tier, with T(name), LANES, and what compilers do badly with their vector types: see update_lanes.h; a
 * comparison of vectors gives lanes of 0 or -1.
 */
typedef uint32_t vu __attribute__((vector_size(4 * LANES)));
typedef uint16_t vh __attribute__((vector_size(2 * LANES)));

#include "update_fields.h"

INLINE vi load(const void *p) { vi x; memcpy(&x, p, sizeof x); return x; }
INLINE vf load_f(const void *p) { vf x; memcpy(&x, p, sizeof x); return x; }
INLINE vi load_half(const void *p) { vh x; memcpy(&x, p, sizeof x); return __builtin_convertvector(x, vi); }
INLINE void store(void *p, vi x) { memcpy(p, &x, sizeof x); }
INLINE void store_f(void *p, vf x) { memcpy(p, &x, sizeof x); }
INLINE void store_half(void *p, vi x) { vh h = __builtin_convertvector(x, vh); memcpy(p, &h, sizeof h); }
INLINE vi all(int32_t x) { return x - (vi){0}; }
INLINE vf all_f(float x) { return x - (vf){0}; }
INLINE vi shift_right(vi x, int n) { return (vi)((vu)x >> n); }
INLINE vi mix(vi x) {
    x = (x ^ shift_right(x, 16)) * 0x7FEB352D;
    x = (x ^ shift_right(x, 15)) * (int32_t)0x846CA68B;
    return x ^ shift_right(x, 16);
}
/* the words that round moments: the first's, and the second's */
INLINE vi noise_of_m(vi word) { word = word * 0x31848BAB; return word ^ shift_right(word, 15); }
INLINE vi noise_of_v(vi noise) { return (noise >> 8) ^ (noise << 24); }
/* lanes that lie before the end, of which `left` elements are to come */
INLINE vi before_end(int64_t left) {
    static const int32_t lanes[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    return load(lanes) < all((int32_t)left);
}
INLINE int64_t sum_of(vi x) {
    int32_t lanes[LANES];
    int64_t sum = 0;
    memcpy(lanes, &x, sizeof x);
    for (int i = 0; i < LANES; i++) sum += lanes[i];
    return sum;
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
INLINE vf read_moment(int bits, int is_signed, const uint8_t *from, vi base) {
    if (bits == 32) return load_f(from);
    if (bits == 16) return (vf)(load_half(from) << 16);
    int shift = bits == 8 ? 20 : 23;
    if (!is_signed) return (vf)((widen(from) + base) << shift);
    vi field = bits == 8 ? widen_signed(from) : (widen(from) ^ 8) - 8;
    vi pattern = (absolute(field) + base) << shift;
    return (vf)((pattern | (field & INT32_MIN)) & (field != 0));
}

/* `encode` of a vector whose block's base is known; `pattern` without its sign if it has none */
INLINE vi fields_of(int bits, int is_signed, vi base, vi pattern, vi noise) {
    int shift = bits == 8 ? 20 : 23, top = (bits == 8 ? 255 : 15) >> is_signed;
    vi size = is_signed ? pattern & INT32_MAX : pattern;
    vi code = (((noise & ((1 << shift) - 1)) + size) >> shift) - base;
    code = smaller(larger(code, all(!is_signed)), all(top));
    if (is_signed) { vi sign = pattern >> 31; code = (code ^ sign) - sign; }
    return bits == 8 ? code : code & 15;
}

/* the base of a block, from the largest pattern in it */
INLINE int32_t base_of(int bits, int is_signed, vi most) {
    int32_t base = (largest(most) >> (bits == 8 ? 20 : 23)) - (((bits == 8 ? 255 : 15) >> is_signed) - 1);
    return base < 0 ? 0 : base;
}

/* what all vectors of a block share */
struct constants {
    vf unit, rate, span, beta1, rest1, beta2, rest2, eps, factor, decay;
    vi row_word, low, high, offset, m_base, v_base;
    int first, nesterov, decays;
};
/* what they add to */
struct sums { vi asked, most_m, most_v; int64_t changed; };
/* where one vector lies; `inverse` and `zero` move along only where a row has groups */
struct place { const float *g, *inverse, *zero; const uint32_t *column_words; uint8_t *m, *v, *codes; float *m_out, *v_out; int32_t *words; };

/* `i` elements further, whose moments take `size` bytes each */
INLINE struct place along(struct place at, int64_t i, int size, int two, int grouped) {
    at.g += i; at.column_words += i; at.codes += i; at.m += i * size; at.m_out += i; at.v_out += i; at.words += i;
    if (two) at.v += i * size;
    if (grouped) { at.inverse += i; at.zero += i; }
    return at;
}

/* the first pass over a vector, of which `left` lanes count */
INLINE void step(const struct constants *c, struct sums *sums, struct place at, int64_t left, int rule, int bits) {
    vi word = mix(c->row_word + load(at.column_words));
    vf g = load_f(at.g), m = read_moment(bits, 1, at.m, c->m_base), v = m, d;
    if (rule == RULE_ADAMW) {
        v = read_moment(bits, 0, at.v, c->v_base);
        m = m * c->beta1 + g * c->rest1;
        v = v * c->beta2 + g * g * c->rest2;
        d = m / (roots(v) + c->eps) * c->factor;
    } else if (rule == RULE_LION) {
        vf sum = m * c->beta1 + g * c->rest1;
        m = m * c->beta2 + g * c->rest2;
        d = __builtin_convertvector((sum < 0) - (sum > 0), vf);
    } else {
        m = c->first ? g : m * c->beta1 + g;
        d = c->nesterov ? g + m * c->beta1 : m;
    }
    if (bits == 32) {
        store_f(at.m, m);
        if (rule == RULE_ADAMW) store_f(at.v, v);
    } else if (bits == 16) {
        vi noise = noise_of_m(word);
        store_half(at.m, shift_right((vi)m + (noise & 0xffff), 16));
        if (rule == RULE_ADAMW) store_half(at.v, shift_right((vi)v + (noise_of_v(noise) & 0xffff), 16));
    } else {
        vi live = left < LANES ? before_end(left) : all(-1);
        store_f(at.m_out, m);
        sums->most_m = larger(sums->most_m, (vi)m & (left < LANES ? live & INT32_MAX : all(INT32_MAX)));
        if (rule == RULE_ADAMW) {
            store_f(at.v_out, v);
            sums->most_v = larger(sums->most_v, left < LANES ? (vi)v & live : (vi)v);
        }
        store(at.words, word);
    }
    vi q = widen_signed(at.codes) - c->offset;
    vf size = d * c->rate * load_f(at.inverse);
    if (c->decays) size = size - (__builtin_convertvector(q, vf) - load_f(at.zero)) * c->decay;
    vi down = (vi)size >> 31;
    size = (vf)((vi)size & INT32_MAX) - __builtin_convertvector(word & INT32_MAX, vf) * c->unit;
    /* further than from one end of the grid to the other no code can go */
    vi whole = rounded_up(smaller_f(size, c->span));
    vi moved = smaller(larger(q + ((whole ^ down) - down), c->low), c->high);
    uint32_t differ = different(moved, q);
    if (left < LANES) { differ &= (1u << left) - 1; whole &= before_end(left); }
    sums->changed += __builtin_popcount(differ);
    sums->asked += whole;
    narrow(at.codes, moved + c->offset);
}

/* `step` of the last `left` elements of a block, on copies of them */
INLINE void step_rest(const struct constants *c, struct sums *sums, struct place at, int64_t left, int rule, int bits) {
    struct { float g[LANES], m[LANES], v[LANES]; uint32_t columns[LANES]; uint8_t codes[LANES]; } copy;
    size_t some = (size_t)left, moment = some * (size_t)(bits > 8 ? bits / 8 : 1);
    memset(&copy, 0, sizeof copy);
    memcpy(copy.g, at.g, some * 4);
    memcpy(copy.m, at.m, moment);
    if (rule == RULE_ADAMW) memcpy(copy.v, at.v, moment);
    memcpy(copy.columns, at.column_words, some * 4);
    memcpy(copy.codes, at.codes, some);
    struct place there = {copy.g, at.inverse, at.zero, copy.columns, (uint8_t *)copy.m, (uint8_t *)copy.v, copy.codes, at.m_out, at.v_out, at.words};
    step(c, sums, there, left, rule, bits);
    memcpy(at.m, copy.m, moment);
    if (rule == RULE_ADAMW) memcpy(at.v, copy.v, moment);
    memcpy(at.codes, copy.codes, some);
}

/* the second pass over one vector */
INLINE void save(const float *x, uint8_t *to, int64_t left, vi base, vi noise, int is_signed, int bits) {
    vi fields = fields_of(bits, is_signed, base, load(x), noise);
    if (left >= LANES) { narrow(to, fields); return; }
    uint8_t copy[LANES];
    narrow(copy, fields);
    memcpy(to, copy, (size_t)left);
}

/* both passes over the elements [begin, end) of a row, which is block `block` of its moments */
INLINE void work(const struct lowbit_update *u, struct lowbit_buffers *b, int64_t block, int64_t begin, int64_t end, int rule, int bits, int grouped) {
    const int blocks = bits < 16, two = rule == RULE_ADAMW;
    struct constants c = {
        all_f(0x1.fffffep-32f), all_f((float)u->rate), all_f((float)(u->qmax - u->qmin)), all_f((float)u->beta1),
        all_f((float)u->rest1), all_f((float)u->beta2), all_f((float)u->rest2), all_f((float)u->eps), all_f((float)u->factor),
        all_f((float)u->decay), all((int32_t)b->row_word), all((int32_t)u->qmin), all((int32_t)u->qmax),
        all(u->field == 8 ? 0 : (int32_t)u->offset), all(blocks ? u->m.base[block] : 0), all(blocks && two ? u->v.base[block] : 0),
        u->first != 0, u->nesterov != 0, u->decay != 0,
    };
    struct sums sums = {all(0), all(0), all(0), 0};
    /* read once: as far as a compiler knows, a byte that is stored may be part of these structures */
    struct place at = {b->g, b->inverse, b->zero, b->column_words, b->m_row, b->v_row, b->codes, b->m, b->v, b->words};
    const int size = bits > 8 ? bits / 8 : 1;
    int64_t count = end - begin, i = 0;
    at.g += begin; at.column_words += begin; at.codes += begin; at.m += begin * size;
    if (two) at.v += begin * size;
    for (; i + LANES <= count; i += LANES) step(&c, &sums, along(at, i, size, two, grouped), LANES, rule, bits);
    if (i < count) step_rest(&c, &sums, along(at, i, size, two, grouped), count - i, rule, bits);
    b->changed += sums.changed;
    b->levels += sum_of(sums.asked);
    if (!blocks) return;
    int32_t m_base = base_of(bits, 1, sums.most_m), v_base = two ? base_of(bits, 0, sums.most_v) : 0;
    u->m.base[block] = (int16_t)m_base;
    if (two) u->v.base[block] = (int16_t)v_base;
    for (i = 0; i < count; i += LANES) {
        vi noise = noise_of_m(load(at.words + i));
        save(at.m_out + i, at.m + i, count - i, all(m_base), noise, 1, bits);
        if (two) save(at.v_out + i, at.v + i, count - i, all(v_base), noise_of_v(noise), 0, bits);
    }
}

/* code of its own for each number of bits of the rule that is used most */
static void work_adamw(const struct lowbit_update *u, struct lowbit_buffers *b, int64_t block, int64_t begin, int64_t end, int grouped) {
    switch (u->state_bits) {
    case 32: work(u, b, block, begin, end, RULE_ADAMW, 32, grouped); break;
    case 16: work(u, b, block, begin, end, RULE_ADAMW, 16, grouped); break;
    case 8: work(u, b, block, begin, end, RULE_ADAMW, 8, grouped); break;
    default: work(u, b, block, begin, end, RULE_ADAMW, 4, grouped);
    }
}

static int64_t moment_bytes(const struct lowbit_update *u) {
    return u->state_bits > 8 ? u->columns * u->state_bits / 8 : u->state_row;
}

/* the row's moment, where it lies; of 4 bits, a byte each in a copy */
static uint8_t *open_moment(const struct lowbit_update *u, const struct lowbit_moment *moment, int64_t n, uint8_t *copy) {
    int64_t bytes = moment_bytes(u);
    uint8_t *row = moment->codes + n * bytes;
    if (u->state_bits != 4) return row;
    spread(row, bytes, 4, copy);
    return copy;
}

static void close_moment(const struct lowbit_update *u, const struct lowbit_moment *moment, int64_t n, uint8_t *row) {
    if (u->state_bits != 4) return;
    /* the half byte that a row of odd length leaves */
    row[u->columns] = 0;
    join(row, u->state_row, 4, moment->codes + n * u->state_row);
}

static void open_codes(const struct lowbit_update *u, struct lowbit_buffers *b, uint8_t *row, int64_t half) {
    if (u->field == 8) { b->codes = row; return; }
    uint8_t *restrict codes = b->codes = b->code_copy, *restrict bytes = b->bytes;
    spread(row, u->field == 3 ? half : u->row_bytes, u->field == 3 ? 2 : (int)u->field, codes);
    if (u->field != 3) return;
    spread(row + half, u->row_bytes - half, 1, bytes);
    for (int64_t k = 0; k < u->columns; k++) codes[k] |= (uint8_t)(bytes[k] << 2);
}

static void close_codes(const struct lowbit_update *u, struct lowbit_buffers *b, uint8_t *row, int64_t half) {
    if (u->field == 8) return;
    uint8_t *restrict codes = b->codes, *restrict bytes = b->bytes;
    memset(codes + u->columns, 0, 8);
    if (u->field != 3) { join(codes, u->row_bytes, (int)u->field, row); return; }
    for (int64_t k = 0; k < u->columns + 8; k++) bytes[k] = codes[k] >> 2;
    for (int64_t k = 0; k < u->columns; k++) codes[k] &= 3;
    join(bytes, u->row_bytes - half, 1, row + half);
    join(codes, half, 2, row);
}

/* 1 / s and z of each element of [begin, end), or for one vector where a row has one scale */
static void load_scales(const struct lowbit_update *u, struct lowbit_buffers *b, int64_t n, int64_t begin, int64_t end) {
    for (int64_t i = begin / u->group; i * u->group < end; i++) {
        int64_t from = i * u->group - begin, to = min64(from + u->group, end - begin), place = n * u->scale_stride + i;
        if (from < 0) from = 0;
        float inverse = 1.0f / load_element(u->scale, u->scale_type, place), zero = u->zero ? (float)u->zero[place] : 0.0f;
        if (u->group >= u->columns) { from = 0; to = LANES; }
        for (int64_t k = from; k < to; k++) { b->inverse[k] = inverse; b->zero[k] = zero; }
    }
}

static void update_range(void *argument, int64_t first, int64_t last) {
    struct update_job *job = argument;
    struct lowbit_update *u = job->u;
    int64_t columns = u->columns, width = u->state_bits > 8 ? CHUNK : u->width, half = (columns + 3) / 4;
    int64_t row_room = round_up(columns + 32, 64), room = round_up(width + 32, 64);
    char *memory = scratch(4 * (row_room + 5 * room) + 4 * row_room);
    if (!memory) { job->failed = 1; return; }
    struct lowbit_buffers buffers = {0}, *b = &buffers;
    float *gradient = (float *)memory;
    b->m = gradient + row_room; b->v = b->m + room; b->inverse = b->v + room; b->zero = b->inverse + room;
    b->words = (int32_t *)(b->zero + room);
    uint8_t *m_copy = (uint8_t *)(b->words + room), *v_copy = m_copy + row_room;
    b->code_copy = v_copy + row_room; b->bytes = b->code_copy + row_room;
    b->column_words = job->column_words;
    int two = u->rule == RULE_ADAMW, grouped = u->group < columns, in_place = u->grad_type == TYPE_F32 && u->grad_column == 1;
    for (int64_t n = first; n < last; n++) {
        uint8_t *row = u->stored + n * u->row_bytes;
        b->row_word = mix_word((uint32_t)(n + u->row_key));
        b->g = in_place ? (const float *)u->grad + n * u->grad_row : gradient;
        if (!in_place) load_gradient(u, n, gradient);
        b->m_row = open_moment(u, &u->m, n, m_copy);
        if (two) b->v_row = open_moment(u, &u->v, n, v_copy);
        open_codes(u, b, row, half);
        for (int64_t begin = 0, block = n * u->blocks; begin < columns; begin += width, block++) {
            int64_t end = min64(begin + width, columns);
            if (grouped || begin == 0) load_scales(u, b, n, begin, end);
            if (two) work_adamw(u, b, block, begin, end, grouped);
            else work(u, b, block, begin, end, (int)u->rule, (int)u->state_bits, grouped);
        }
        close_codes(u, b, row, half);
        close_moment(u, &u->m, n, b->m_row);
        if (two) close_moment(u, &u->v, n, b->v_row);
    }
    free(memory);
    /* threads that end at once add up */
    __atomic_fetch_add(&u->changed, b->changed, __ATOMIC_RELAXED);
    __atomic_fetch_add(&u->levels, b->levels, __ATOMIC_RELAXED);
}
