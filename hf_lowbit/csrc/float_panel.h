/* Many rows of x, float: a panel of 2 LANES weight rows is expanded once and meets every row of x while it is in cache.
 *
 * The panel is stored by units of UNIT adjacent k (4 bytes a row): [unit][2 LANES rows]; a tile of x likewise:
 * [unit][TILE rows]. Long rows are cut into chunks whose panel fits a core's cache; sums wait in memory between chunks.
 */

struct F(panel_job) {
    const struct lowbit_call *c;
    int64_t lanes, units, tiles, tiles_a_block, lanes_a_chunk;
    char *x;                /* [tiles][units][TILE][4 bytes] */
    int32_t offset;
    int failed;
};

static void F(panel_prepare)(void *argument, int64_t begin, int64_t end) {
    struct F(panel_job) *job = argument;
    int64_t columns = job->c->p->columns, stride = round_up(job->units, LANES);
    char *rows = scratch(TILE * stride * 4);
    if (!rows) { job->failed = 1; return; }
    for (int64_t tile = begin; tile < end; tile++) {
        for (int64_t r = 0; r < TILE; r++) {
            int64_t m = tile * TILE + r, filled = m < job->c->m ? columns * 4 / UNIT : 0;
            char *row = rows + r * stride * 4;
            if (filled) F(copy_row)(job->c, m, row);
            memset(row + filled, 0, (size_t)(job->units * 4 - filled));
        }
        T(interleave)(rows, stride, job->units, job->x + tile * job->units * TILE * 4);
    }
    free(rows);
}

/* w = s (q - z) of LANES rows from n, lanes [first, last) of the packed bytes */
INLINE void F(expand_half)(const struct lowbit_call *c, int64_t n, int64_t first, int64_t last, const float *scale,
                           const float *shift, char *out, const int field, const int shifted) {
    const struct lowbit_problem *p = c->p;
    const int codes = field == 3 ? 16 : 32 / field;
    int64_t high_bytes = (p->columns + 7) / 8, low_bytes = p->row_bytes - (field == 3 ? high_bytes : 0);
    int64_t lanes_a_group = p->grouped ? p->group / codes : INT64_MAX;
    vf table = code_table(field, (int32_t)p->offset);
    for (int64_t b = first / LANES; b * LANES < last; b++) {
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
        for (int l = 0; l < LANES; l++) {
            int64_t lane = b * LANES + l, g = lane / lanes_a_group;
            if (lane >= last) break;
            vf s = load_f(scale + g * 2 * LANES), z = load_f(shift + g * 2 * LANES);
            vi upper = field == 3 ? lane_high(high[l / 2], l & 1) : zero_i();
            char *at = out + (lane - first) * codes / UNIT * 2 * VB;
            for (int q = 0; q < codes; q += UNIT) {
                vf w[2];
                for (int i = 0; i < UNIT; i++) {
                    w[i] = code_as_float(field, q + i, low[l], upper, table);
                    if (shifted) w[i] = sub_f(w[i], z);
                    w[i] = mul_f(w[i], s);
                }
                store(at + q / UNIT * 2 * VB, F(join)(w));
            }
        }
    }
}

#define EXPAND_HALF(field) \
    static void F(expand_##field)(const struct lowbit_call *c, int64_t n, int64_t first, int64_t last, \
                                  const float *scale, const float *shift, char *out) { \
        if (c->zero || (FLOAT_SHIFT && field != 8)) F(expand_half)(c, n, first, last, scale, shift, out, field, 1); \
        else F(expand_half)(c, n, first, last, scale, shift, out, field, 0); \
    }
EXPAND_HALF(2) EXPAND_HALF(3) EXPAND_HALF(4) EXPAND_HALF(8)
#undef EXPAND_HALF

/* MT rows from m: adds one chunk to `waiting` [rows][2 LANES], or finishes y */
INLINE void F(panel_tile)(const struct F(panel_job) *job, const char *w, int64_t unit, int64_t units, float *waiting,
                          int first, int last, const float *bias, int64_t m, int64_t n, const int MT) {
    const struct lowbit_call *c = job->c;
    const char *x = job->x + ((m / TILE * job->units + unit) * TILE + m % TILE) * 4;
    vf y[TILE][2];
    UNROLL for (int j = 0; j < MT; j++) UNROLL for (int h = 0; h < 2; h++)
        y[j][h] = first ? zero_f() : load_f(waiting + j * 2 * LANES + h * LANES);
    for (int64_t u = 0; u < units; u++) {
        vi w0 = load(w + u * 2 * VB), w1 = load(w + u * 2 * VB + VB);
        UNROLL for (int j = 0; j < MT; j++) {
            int32_t bits;
            memcpy(&bits, x + (u * TILE + j) * 4, 4);
            y[j][0] = F(product)(y[j][0], w0, set_i(bits));
            y[j][1] = F(product)(y[j][1], w1, set_i(bits));
        }
    }
    UNROLL for (int j = 0; j < MT; j++) UNROLL for (int h = 0; h < 2; h++) {
        if (!last) { store_f(waiting + j * 2 * LANES + h * LANES, y[j][h]); continue; }
        int64_t left = c->p->rows - n - h * LANES;
        if (left <= 0) continue;
        vf out = c->bias ? add_f(y[j][h], load_f(bias + h * LANES)) : y[j][h];
        store_rounded(c->y, c->p->type, (m + j) * c->p->rows + n + h * LANES, out, (int)min64(left, LANES));
    }
}

static void F(panel_range)(void *argument, int64_t begin, int64_t end) {
    struct F(panel_job) *job = argument;
    const struct lowbit_call *c = job->c;
    const struct lowbit_problem *p = c->p;
    int64_t codes = p->field == 3 ? 16 : 32 / p->field, per_panel = p->groups * PANEL;
    int64_t panel_bytes = job->lanes_a_chunk * codes / UNIT * 2 * VB, block_rows = job->tiles_a_block * TILE;
    char *w = scratch(panel_bytes + per_panel * 8 + PANEL * 4 + block_rows * PANEL * 4);
    if (!w) { job->failed = 1; return; }
    float *scale = (float *)(w + panel_bytes), *shift = scale + per_panel, *bias = shift + per_panel;
    float *waiting = bias + PANEL;
    for (int64_t block = 0; block < c->m; block += block_rows) for (int64_t n = begin; n < end; n += PANEL) {
        T(panel_scales)(c, n, job->offset, scale, shift, bias);
        for (int64_t lane = 0; lane < job->lanes; lane += job->lanes_a_chunk) {
            int64_t until = min64(lane + job->lanes_a_chunk, job->lanes), unit = lane * codes / UNIT;
            int64_t units = (until - lane) * codes / UNIT, end_m = min64(block + block_rows, c->m), m = block;
            int first = lane == 0, last = until == job->lanes;
            UNROLL for (int h = 0; h < 2; h++) {
                int at = h * LANES;
                switch (p->field) {
                case 2: F(expand_2)(c, n + at, lane, until, scale + at, shift + at, w + h * VB); break;
                case 3: F(expand_3)(c, n + at, lane, until, scale + at, shift + at, w + h * VB); break;
                case 4: F(expand_4)(c, n + at, lane, until, scale + at, shift + at, w + h * VB); break;
                default: F(expand_8)(c, n + at, lane, until, scale + at, shift + at, w + h * VB);
                }
            }
#define WAITING waiting + (m - block) * PANEL
            for (; m + TILE <= end_m; m += TILE)
                F(panel_tile)(job, w, unit, units, WAITING, first, last, bias, m, n, TILE);
            for (; m + 2 <= end_m; m += 2) F(panel_tile)(job, w, unit, units, WAITING, first, last, bias, m, n, 2);
            if (m < end_m) F(panel_tile)(job, w, unit, units, WAITING, first, last, bias, m, n, 1);
#undef WAITING
        }
    }
    free(w);
}

static int F(panel_linear)(const struct lowbit_call *c) {
    const struct lowbit_problem *p = c->p;
    int64_t codes = p->field == 3 ? 16 : 32 / p->field;
    struct F(panel_job) job = {.c = c, .lanes = T(lanes_of)(p), .failed = 0};
    job.units = job.lanes * codes / UNIT;
    job.tiles = (c->m + TILE - 1) / TILE;
    /* a quarter of a core's second cache for the panel, the rest for rows of x */
    job.lanes_a_chunk = min64(job.lanes, round_up(256 * 1024 / (2 * VB) * UNIT / codes, LANES));
    int64_t rows = 512 * 1024 / (job.units * 4);
    job.tiles_a_block = (rows < 128 ? 128 : rows) / TILE;
    job.offset = FLOAT_SHIFT && p->field != 8 ? (int32_t)p->offset : 0;
    job.x = scratch(job.tiles * TILE * job.units * 4);
    if (!job.x) return -1;
    parallel_for(F(panel_prepare), &job, job.tiles, 1, c->threads);
    if (!job.failed) parallel_rows(F(panel_range), &job, PANEL);
    free(job.x);
    return job.failed ? -1 : 0;
}
