/* Many rows of x, int8: a panel of 2 LANES weight rows is unpacked once and meets every row of x while it is in cache.
 *
 * The panel is stored by quads: [quad][2 LANES rows][4 fields], so lanes run along n, and one quad of x is broadcast to
 * all of them. A tile of x (TILE rows) is stored by quads too. Packed words are transposed before they are unpacked: one
 * transposition serves all phases.
 */
#define PANEL (2 * LANES)

/* TILE rows of `count` words, `stride` words apart -> [count][TILE] words; may read up to the next multiple of LANES */
static void T(interleave)(const char *rows, int64_t stride, int64_t count, char *out) {
    for (int64_t i = 0; i < count; i += LANES) {
        vi words[LANES];
        for (int r = 0; r < LANES; r++) words[r] = r < TILE ? load(rows + (r * stride + i) * 4) : zero_i();
        transpose(words);
        int64_t some = min64(LANES, count - i);
        for (int l = 0; l < LANES; l++) if (l < some) store_tile(out + (i + l) * TILE * 4, words[l]);
    }
}

struct T(panel_job) {
    const struct lowbit_call *c;
    int per_byte;
    int64_t lanes, quads, tiles, tiles_a_block;
    int8_t *a;              /* [tiles][quads][TILE][4] */
    int32_t *sums;          /* [tiles][G][TILE] sums of a over a group, times -offset in symmetric groups */
    float *t;               /* [tiles * TILE] */
    int32_t offset;
    int failed;
};

static void T(panel_prepare)(void *argument, int64_t begin, int64_t end) {
    struct T(panel_job) *job = argument;
    const struct lowbit_problem *p = job->c->p;
    int64_t size = round_up(job->quads, LANES) * 4;
    int32_t factor = p->grouped && !job->c->zero ? -job->offset : 1;
    float *x = scratch(round_up(p->columns * 4, 64) + TILE * size);
    if (!x) { job->failed = 1; return; }
    int8_t *codes = (int8_t *)x + round_up(p->columns * 4, 64);
    for (int64_t tile = begin; tile < end; tile++) {
        for (int64_t r = 0; r < TILE; r++) {
            int64_t m = tile * TILE + r;
            int8_t *row = codes + r * size;
            int32_t *sums = job->sums + tile * p->groups * TILE + r;
            if (m >= job->c->m) {
                memset(row, 0, (size_t)size);
                job->t[m] = 0.0f;
            } else {
                T(load_floats)(job->c, m, x);
                job->t[m] = T(quantize_row)(x, p->columns, row);
                memset(row + p->columns, 0, (size_t)(size - p->columns));
            }
            for (int64_t g = 0; g < p->groups; g++) {
                int64_t first = g * p->group;
                sums[g * TILE] = factor * T(sum_codes)(row + first, min64(p->group, p->columns - first));
            }
            T(to_quads)(row, job->lanes, job->per_byte);
        }
        T(interleave)((char *)codes, size / 4, job->quads, (char *)job->a + tile * job->quads * 4 * TILE);
    }
    free(x);
}

/* LANES rows from n become half a panel; rows past the last one are zero */
INLINE void T(unpack_half)(const struct lowbit_call *c, int64_t n, int64_t lanes, uint8_t *out, const int field) {
    const struct lowbit_problem *p = c->p;
    const int P = field == 3 ? 4 : 8 / field;
    int64_t high_bytes = (p->columns + 7) / 8, low_bytes = p->row_bytes - (field == 3 ? high_bytes : 0);
    for (int64_t b = 0; b * LANES < lanes; b++) {
        part low_part = part_of(low_bytes - b * VB), high_part = part_of(high_bytes - b * VB / 2);
        vi low[LANES], high[LANES];
        for (int i = 0; i < LANES; i++) {
            const uint8_t *row = c->weight + (n + i) * p->row_bytes;
            int absent = n + i >= p->rows;
            low[i] = absent ? zero_i() : load_part(row + b * VB, low_part);
            /* so many rows at once are too many for the hardware to foresee: fetch the next ones while these are used */
            __builtin_prefetch(row + LANES * p->row_bytes + b * VB, 0, 2);
            if (field == 3) {
                __builtin_prefetch(row + LANES * p->row_bytes + low_bytes + b * VB / 2, 0, 2);
                high[i] = absent ? zero_i() : load_half(row + low_bytes + b * VB / 2, high_part);
            }
        }
        transpose(low);
        if (field == 3) transpose(high);
        int64_t some = min64(LANES, lanes - b * LANES);
        for (int l = 0; l < LANES; l++) {
            if (l >= some) break;
            for (int k = 0; k < P; k++)
                store(out + ((b * LANES + l) * P + k) * 2 * VB,
                      fields_across(field, k, low[l], field == 3 ? high[l / 2] : zero_i(), l & 1));
        }
    }
}

static void T(unpack_panel)(const struct lowbit_call *c, int64_t n, int64_t lanes, uint8_t *out) {
    for (int h = 0; h < 2; h++) switch (c->p->field) {
    case 2: T(unpack_half)(c, n + h * LANES, lanes, out + h * VB, 2); break;
    case 3: T(unpack_half)(c, n + h * LANES, lanes, out + h * VB, 3); break;
    case 4: T(unpack_half)(c, n + h * LANES, lanes, out + h * VB, 4); break;
    default: T(unpack_half)(c, n + h * LANES, lanes, out + h * VB, 8);
    }
}

/* scale, offset + z: [G][PANEL], and bias of the panel from row n; rows past the last one repeat it */
static void T(panel_scales)(const struct lowbit_call *c, int64_t n, int32_t offset, float *scale, float *shift, float *bias) {
    const struct lowbit_problem *p = c->p;
    for (int64_t i = 0; i < p->groups * PANEL; i++) shift[i] = (float)offset;
    for (int64_t i = 0; i < PANEL; i++) {
        int64_t row = min64(n + i, p->rows - 1), at = row * p->scale_stride;
        const uint16_t *half = (const uint16_t *)c->scale + at;
        if (p->scale_type == TYPE_BF16)
            for (int64_t g = 0; g < p->groups; g++) scale[g * PANEL + i] = float_of_bf16(half[g]);
        else for (int64_t g = 0; g < p->groups; g++) scale[g * PANEL + i] = ((const float *)c->scale)[at + g];
        if (c->zero) for (int64_t g = 0; g < p->groups; g++) shift[g * PANEL + i] += (float)c->zero[at + g];
        bias[i] = c->bias ? load_element(c->bias, c->bias_type, row) : 0.0f;
    }
}

/* sum[MT][2] += fields of the panel times quads of x */
INLINE void T(panel_sum)(const uint8_t *w, const int8_t *a, int64_t quads, vi sum[TILE][2], const int MT, const int field, int step) {
#if NARROW
    for (int64_t q = 0; q < quads; q += step) {
        int64_t end = min64(q + step, quads);
        vi narrow[TILE][2];
        UNROLL for (int j = 0; j < MT; j++) narrow[j][0] = narrow[j][1] = zero_i();
        for (int64_t i = q; i < end; i++) {
            vi w0 = load(w + i * 2 * VB), w1 = load(w + i * 2 * VB + VB);
            UNROLL for (int j = 0; j < MT; j++) {
                int32_t quad;
                memcpy(&quad, a + (i * TILE + j) * 4, 4);
                narrow[j][0] = _mm256_add_epi16(narrow[j][0], pairs(field, w0, set_i(quad)));
                narrow[j][1] = _mm256_add_epi16(narrow[j][1], pairs(field, w1, set_i(quad)));
            }
        }
        UNROLL for (int j = 0; j < MT; j++) UNROLL for (int h = 0; h < 2; h++) sum[j][h] = widen(sum[j][h], narrow[j][h]);
    }
#else
    (void)step;
    for (int64_t q = 0; q < quads; q++) {
        vi w0 = load(w + q * 2 * VB), w1 = load(w + q * 2 * VB + VB);
        UNROLL for (int j = 0; j < MT; j++) {
            int32_t quad;
            memcpy(&quad, a + (q * TILE + j) * 4, 4);
            sum[j][0] = dot(field, sum[j][0], w0, set_i(quad));
            sum[j][1] = dot(field, sum[j][1], w1, set_i(quad));
        }
    }
#endif
}

/* y of MT rows from m; `scale` and `shift` are [G][PANEL] of this panel */
INLINE void T(panel_tile)(const struct T(panel_job) *job, const uint8_t *w, const float *scale, const float *shift,
                          const float *bias, int64_t m, int64_t n, const int MT, const int grouped, const int field) {
    const struct lowbit_call *c = job->c;
    const struct lowbit_problem *p = c->p;
    int64_t tile = m / TILE, row = m % TILE;
    const int8_t *a = job->a + (tile * job->quads * TILE + row) * 4;
    const int32_t *sums = job->sums + tile * p->groups * TILE + row;
    int step = narrow_steps((int)p->field);
    vf y[TILE][2];
    UNROLL for (int j = 0; j < MT; j++) y[j][0] = y[j][1] = zero_f();
    int64_t quads_a_group = grouped ? p->group / 4 : job->quads;
    for (int64_t g = 0; g < p->groups; g++, sums += TILE) {
        int64_t first = g * quads_a_group;
        vi sum[TILE][2];
        UNROLL for (int j = 0; j < MT; j++)
            sum[j][0] = sum[j][1] = grouped == 1 ? set_i(sums[j]) : zero_i();
        T(panel_sum)(w + first * 2 * VB, a + first * TILE * 4, min64(quads_a_group, job->quads - first), sum, MT, field, step);
        UNROLL for (int h = 0; h < 2; h++) {
            vf s = load_f(scale + g * PANEL + h * LANES), z = load_f(shift + g * PANEL + h * LANES);
            UNROLL for (int j = 0; j < MT; j++) {
                if (grouped == 0) {
                    vi whole = sub_i(sum[j][h], mul_i(to_i(z), set_i(sums[j])));
                    y[j][h] = mul_f(to_f(whole), s);
                } else {
                    vf exact = to_f(sum[j][h]);
                    if (grouped == 2) exact = fnma_f(z, set_f((float)sums[j]), exact);
                    y[j][h] = fma_f(s, exact, y[j][h]);
                }
            }
        }
    }
    UNROLL for (int j = 0; j < MT; j++) UNROLL for (int h = 0; h < 2; h++) {
        int64_t left = p->rows - n - h * LANES;
        if (left <= 0) continue;
        vf out = mul_f(y[j][h], set_f(job->t[m + j]));
        if (c->bias) out = add_f(out, load_f(bias + h * LANES));
        store_rounded(c->y, p->type, (m + j) * p->rows + n + h * LANES, out, (int)min64(left, LANES));
    }
}

INLINE void T(panel_tiles)(const struct T(panel_job) *job, const uint8_t *w, const float *scale, const float *shift,
                           const float *bias, int64_t m, int64_t end, int64_t n, const int grouped, const int field) {
    for (; m + TILE <= end; m += TILE) T(panel_tile)(job, w, scale, shift, bias, m, n, TILE, grouped, field);
    for (; m + 2 <= end; m += 2) T(panel_tile)(job, w, scale, shift, bias, m, n, 2, grouped, field);
    if (m < end) T(panel_tile)(job, w, scale, shift, bias, m, n, 1, grouped, field);
}

#if NARROW
/* of the fields only 8 bits are signed; how far 16 bits reach is looked up */
#define PANEL_FIELDS(grouped) \
    if (field == 8) T(panel_tiles)(job, w, scale, shift, bias, m, end, n, grouped, 8); \
    else T(panel_tiles)(job, w, scale, shift, bias, m, end, n, grouped, 0)
#else
/* unpacked fields are bytes whatever they were stored in */
#define PANEL_FIELDS(grouped) (void)field; T(panel_tiles)(job, w, scale, shift, bias, m, end, n, grouped, 0)
#endif
#define PANEL_TILES(grouped) \
    static void T(panel_tiles_##grouped)(const struct T(panel_job) *job, const uint8_t *w, const float *scale, \
                                         const float *shift, const float *bias, int64_t m, int64_t end, int64_t n) { \
        int64_t field = job->c->p->field; \
        PANEL_FIELDS(grouped); \
    }
PANEL_TILES(0) PANEL_TILES(1) PANEL_TILES(2)

static void T(panel_range)(void *argument, int64_t begin, int64_t end) {
    struct T(panel_job) *job = argument;
    const struct lowbit_call *c = job->c;
    const struct lowbit_problem *p = c->p;
    int64_t panel_bytes = job->quads * 2 * VB, per_panel = p->groups * PANEL;
    uint8_t *w = scratch(panel_bytes + per_panel * 8 + PANEL * 4);
    if (!w) { job->failed = 1; return; }
    float *scale = (float *)(w + panel_bytes), *shift = scale + per_panel, *bias = shift + per_panel;
    for (int64_t block = 0; block < job->tiles; block += job->tiles_a_block) {
        int64_t last = min64((block + job->tiles_a_block) * TILE, c->m);
        for (int64_t n = begin; n < end; n += PANEL) {
            T(unpack_panel)(c, n, job->lanes, w);
            T(panel_scales)(c, n, job->offset, scale, shift, bias);
            int64_t m = block * TILE;
            if (!p->grouped) T(panel_tiles_0)(job, w, scale, shift, bias, m, last, n);
            else if (!c->zero) T(panel_tiles_1)(job, w, scale, shift, bias, m, last, n);
            else T(panel_tiles_2)(job, w, scale, shift, bias, m, last, n);
        }
    }
    free(w);
}

static int T(panel_linear)(const struct lowbit_call *c) {
    const struct lowbit_problem *p = c->p;
    struct T(panel_job) job = {.c = c, .per_byte = T(per_byte)(p), .lanes = T(lanes_of)(p), .failed = 0};
    job.quads = job.lanes * job.per_byte;
    job.tiles = (c->m + TILE - 1) / TILE;
    /* rows of x that stay in a core's cache beside a panel */
    job.tiles_a_block = (768 * 1024 / (job.quads * 4) < 128 ? 128 : 768 * 1024 / (job.quads * 4)) / TILE;
    job.offset = p->field == 8 ? OFFSET8 : (int32_t)p->offset;
    job.a = scratch(job.tiles * TILE * job.quads * 4);
    job.sums = scratch(job.tiles * TILE * p->groups * 4);
    job.t = scratch(job.tiles * TILE * 4);
    if (!job.a || !job.sums || !job.t) job.failed = 1;
    else {
        parallel_for(T(panel_prepare), &job, job.tiles, 1, c->threads);
        if (!job.failed) parallel_rows(T(panel_range), &job, PANEL);
    }
    free(job.a);
    free(job.sums);
    free(job.t);
    return job.failed ? -1 : 0;
}
