/* 32 rows of W times 16 or 32 rows of x, by matrix tiles; the same for int8 and bfloat16.
 *
 * Without groups (and in bfloat16, where scales are in W) the tiles C keep adding up along K. With groups the sums of each
 * leave their tiles, are scaled, and add up to y in memory, one group later: the products of the next are under way.
 * A product waits for the one before it in the same tile, so one tile of x uses two sets of C in turn.
 */

/* what a job needs beside its scratch; `codes`: of a row of W in a unit */
static struct amx_job amx_plan(const struct lowbit_call *c, int64_t codes) {
    const struct lowbit_problem *p = c->p;
    struct amx_job job = {.c = c, .step = 16, .failed = 0};
    job.units = (p->columns + codes - 1) / codes;
    job.whole_units = p->columns / codes;
    job.chunks = (job.units + CHUNK_UNITS - 1) / CHUNK_UNITS;
    job.tiles = (c->m + TILE_ROWS - 1) / TILE_ROWS;
    /* rows of x that stay in a core's cache beside a panel */
    int64_t tiles = 1024 * 1024 / (job.units * 64 * TILE_ROWS);
    job.tiles_a_block = tiles < 8 ? 8 : tiles / 2 * 2;
    job.x = scratch(job.tiles * job.units * 64 * TILE_ROWS);
    job.t = scratch(job.tiles * TILE_ROWS * 4);
    job.group_of = scratch((p->columns + 63) / 64 * 2 * 4);
    job.failed = !job.x || !job.t || !job.group_of;
    int64_t group = 0, left = p->group;
    if (!job.failed) for (int64_t i = 0; i < (p->columns + 63) / 64 * 2; i++) {
        job.group_of[i] = (int32_t)min64(group, p->groups - 1);
        if (p->grouped && (left -= 32) <= 0) { group++; left = p->group; }
    }
    return job;
}

static int amx_run(struct amx_job *job, range_function prepare, range_function multiply) {
    if (!job->failed) parallel_for(prepare, job, job->tiles, 1, job->c->threads);
    if (!job->failed) parallel_rows(multiply, job, PASS_ROWS);
    free(job->x);
    free(job->sums);
    free(job->t);
    free(job->group_of);
    return job->failed ? -1 : 0;
}

#define MULTIPLY(C, A, B) do { if (bf16) _tile_dpbf16ps(C, A, B); else _tile_dpbssd(C, A, B); } while (0)
/* C0 and C1 for the first 16 rows of x, C2 and C3 for the others, += the chunk at `a` times x at quad q */
#define PRODUCT(C0, C1, C2, C3) do { \
        _tile_loadd(4, a, CHUNK_UNITS * 64); \
        _tile_loadd(6, x + q * 64, 64); \
        MULTIPLY(C0, 4, 6); \
        _tile_loadd(5, a + CHUNK_BYTES / 2, CHUNK_UNITS * 64); \
        MULTIPLY(C1, 5, 6); \
        if (MT == 2) { \
            _tile_loadd(7, x + size + q * 64, 64); \
            MULTIPLY(C2, 4, 7); \
            MULTIPLY(C3, 5, 7); \
        } \
    } while (0)
#define CLEAR(C0, C1) do { _tile_zero(C0); _tile_zero(C1); } while (0)
#define READ_IN(C0, C1, from) do { _tile_loadd(C0, from, 64); _tile_loadd(C1, (from) + 256, 64); } while (0)
#define READ_OUT(C0, C1, out) do { _tile_stored(C0, out, 64); _tile_stored(C1, (out) + 256, 64); } while (0)

/* y[tile of x][row of W] += s (sums of group g - z times the sums of x); scale and shift: [G][PANEL] */
INLINE void amx_scale_sums(const struct amx_job *job, const int32_t *waiting, float *y, const float *scale,
                           const float *shift, int64_t tile, int64_t g, const int MT, const int late_zeros) {
    const float *row_sums = job->sums + (tile * job->c->p->groups + g) * TILE_ROWS;
    int64_t next_tile = job->c->p->groups * TILE_ROWS;
    scale += g * PANEL;
    shift += g * PANEL;
    for (int r = 0; r < PASS_ROWS; r += 4) UNROLL for (int i = 0; i < 4; i++) UNROLL for (int j = 0; j < MT; j++) {
        int at = (j * PASS_ROWS + r + i) * LANES;
        vf sum = to_f(load(waiting + at));
        if (late_zeros) sum = fnma_f(set_f(shift[r + i]), load_f(row_sums + j * next_tile), sum);
        store_f(y + at, fma_f(set_f(scale[r + i]), sum, load_f(y + at)));
    }
}

/* y [M, N] of tiles of x from `tile` and 32 rows of W from n: [MT][32 rows of W][16 rows of x] sums, and as many to add to them;
 * `scale` as in `amx_pass` */
INLINE void amx_store(const struct amx_job *job, const void *sums, const void *second, const float *scale, int64_t n, int64_t tile,
                      const int MT, const int grouped, const int bf16) {
    const struct lowbit_call *c = job->c;
    const struct lowbit_problem *p = c->p;
    const float *shift = scale + p->groups * PANEL, *bias = shift + p->groups * PANEL;
    for (int j = 0; j < 2 * MT; j++) {
        int64_t row = n + j % 2 * TILE_ROWS, m = (tile + j / 2) * TILE_ROWS;
        if (row >= p->rows) continue;
        vf out[TILE_ROWS], t = load_f(job->t + m);
        vi row_sums = job->sums && !grouped ? to_i(load_f(job->sums + m)) : zero_i();
        UNROLL for (int r = 0; r < TILE_ROWS; r++) {
            int at = (j * TILE_ROWS + r) * LANES, from = j % 2 * TILE_ROWS + r;
            if (grouped) out[r] = load_f((const float *)sums + at);
            else if (bf16) {
                out[r] = load_f((const float *)sums + at);
                if (second) out[r] = add_f(out[r], load_f((const float *)second + at));
                if (!p->grouped) out[r] = mul_f(out[r], set_f(scale[from]));
            } else {
                vi sum = load((const int32_t *)sums + at);
                if (second) sum = add_i(sum, load((const int32_t *)second + at));
                if (job->sums) sum = sub_i(sum, mul_i(set_i((int32_t)shift[from]), row_sums));
                out[r] = mul_f(to_f(sum), set_f(scale[from]));
            }
            if (!bf16) out[r] = mul_f(out[r], t);
            if (c->bias) out[r] = add_f(out[r], set_f(bias[from]));
        }
        vi words[TILE_ROWS];
        UNROLL for (int r = 0; r < TILE_ROWS; r++) words[r] = from_f(out[r]);
        transpose(words);
        int columns = (int)min64(p->rows - row, TILE_ROWS);
        UNROLL for (int r = 0; r < TILE_ROWS; r++)
            if (m + r < c->m) store_rounded(c->y, p->type, (m + r) * p->rows + row, as_f(words[r]), columns);
    }
}

/* tiles of x from `tile`, 32 rows of W from n. `scale`: [G][PANEL], then as many zero points and PANEL biases. `panel`: room for all chunks, or for 2 when this is the only pass; `first`:
 * they are still to be widened */
INLINE void amx_pass(const struct amx_job *job, char *panel, const float *scale, int64_t n, int64_t tile, int first, int only,
                     const int MT, const int grouped, const int bf16) {
    const struct lowbit_call *c = job->c;
    const struct lowbit_problem *p = c->p;
    int64_t size = job->units * 64 * TILE_ROWS, group_quads = p->group / 4, left = group_quads, g = 0;
    const int quad = bf16 ? 2 : 4;
    int64_t chunks = job->chunks, step = job->step, quads = round_up((p->columns + quad - 1) / quad, step);
    const char *x = job->x + tile * size;
    _Alignas(64) int32_t waiting[2][2 * PASS_ROWS * LANES];
    _Alignas(64) float y[2 * PASS_ROWS * LANES];
    const float *shift = scale + p->groups * PANEL;
    int set = 0;
    if (grouped) for (int i = 0; i < MT * PASS_ROWS; i++) store_f(y + i * LANES, zero_f());
    CLEAR(0, 1);
    CLEAR(2, 3);
    if (first) job->widen(job, scale, n, 0, panel);
    /* the second pass has nothing to read from memory, so it fetches what the next rows of W will widen */
    int64_t fetched = 0, packed = !first && tile % job->tiles_a_block == 2 ? PASS_ROWS * p->row_bytes : 0;
    const uint8_t *next_rows = c->weight + (n + PASS_ROWS) * p->row_bytes;
    for (int64_t i = 0; i < chunks; i++) {
        int64_t next = i + 1, q = i * CHUNK_UNITS * 16, end = min64(q + CHUNK_UNITS * 16, quads);
        if (first && next < chunks) job->widen(job, scale, n, next, panel + (only ? next & 1 : next) * CHUNK_BYTES);
        for (int64_t until = packed * next / chunks; fetched < until; fetched += 64) FETCH(next_rows + fetched);
        written_before_tiles();
        const char *a = panel + (only ? i & 1 : i) * CHUNK_BYTES;
        for (; q < end; q += step, a += 4 * step) {
            if (MT == 1 && set) PRODUCT(2, 3, 2, 3);
            else PRODUCT(0, 1, 2, 3);
            if (!grouped) { set ^= 1; continue; }
            left -= step;
            if (left > 0 && (q + step < end || next < chunks)) continue;
            if (g && job->sums) amx_scale_sums(job, waiting[(g - 1) & 1], y, scale, shift, tile, g - 1, MT, 1);
            else if (g) amx_scale_sums(job, waiting[(g - 1) & 1], y, scale, shift, tile, g - 1, MT, 0);
            if (MT == 1 && set) { READ_OUT(2, 3, waiting[g & 1]); CLEAR(2, 3); }
            else { READ_OUT(0, 1, waiting[g & 1]); CLEAR(0, 1); }
            if (MT == 2) { READ_OUT(2, 3, waiting[g & 1] + PASS_ROWS * LANES); CLEAR(2, 3); }
            set ^= 1;
            left = group_quads;
            g++;
        }
    }
    if (!grouped) { READ_OUT(0, 1, waiting[0]); READ_OUT(2, 3, MT == 1 ? waiting[1] : waiting[0] + PASS_ROWS * LANES); }
    else if (job->sums) amx_scale_sums(job, waiting[(g - 1) & 1], y, scale, shift, tile, g - 1, MT, 1);
    else amx_scale_sums(job, waiting[(g - 1) & 1], y, scale, shift, tile, g - 1, MT, 0);
    const void *second = !grouped && MT == 1 ? waiting[1] : NULL;
    amx_store(job, grouped ? (const void *)y : waiting[0], second, scale, n, tile, MT, grouped, bf16);
}

#define PASS(name, MT, grouped, bf16) \
    static void amx_pass_##name##_##MT(const struct amx_job *job, char *panel, const float *scale, int64_t n, \
                                       int64_t tile, int first, int only) { \
        amx_pass(job, panel, scale, n, tile, first, only, MT, grouped, bf16); \
    }
PASS(whole, 1, 0, 0) PASS(whole, 2, 0, 0) PASS(grouped, 1, 1, 0) PASS(grouped, 2, 1, 0) PASS(bf16, 1, 0, 1) PASS(bf16, 2, 0, 1)
#undef PASS

static void amx_range(void *argument, int64_t begin, int64_t end) {
    typedef void (*pass)(const struct amx_job *, char *, const float *, int64_t, int64_t, int, int);
    static const pass passes[3][2] = {
        {amx_pass_whole_1, amx_pass_whole_2},
        {amx_pass_grouped_1, amx_pass_grouped_2},
        {amx_pass_bf16_1, amx_pass_bf16_2},
    };
    struct amx_job *job = argument;
    const struct lowbit_problem *p = job->c->p;
    int64_t block = min64(job->tiles, job->tiles_a_block);
    int only = block <= 2, kind = !p->int8 ? 2 : p->grouped ? 1 : 0;
    int64_t panel_bytes = (only ? 2 : job->chunks) * CHUNK_BYTES, per_panel = p->groups * PANEL;
    char *panel = scratch(panel_bytes + (2 * per_panel + PANEL) * 4);
    if (!panel) { job->failed = 1; return; }
    float *scale = (float *)(panel + panel_bytes);
    configure_tiles(job->step);
    for (int64_t from = 0; from < job->tiles; from += block) {
        int64_t until = min64(from + block, job->tiles);
        for (int64_t n = begin; n < end; n += PASS_ROWS) {
            T(panel_scales)(job->c, n, 0, scale, scale + per_panel, scale + 2 * per_panel);
            for (int64_t tile = from; tile < until; tile += 2)
                passes[kind][until - tile >= 2](job, panel, scale, n, tile, tile == from, only);
        }
    }
    release_tiles();
    free(panel);
}
