/* Many rows of x and long rows of W, by matrix tiles in bfloat16: K is cut into slabs.
 *
 * Where x does not stay in a core's cache, panels of W that meet a part of it must be widened again for the next part, and
 * widening costs more than the products of the part. So a slab of columns of many rows of x stays, and panels of W pass by,
 * each widened once; sums wait in memory from slab to slab, and go on in the order that they have without slabs.
 */

/* rows of x that share a widening; x of a slab; sums that wait */
enum { SLAB_TILES = 32, SLAB_BYTES = 1024 * 1024, SLAB_PANELS = 8 };

/* chunks from `begin` to `end` of tiles of x from `tile` times a panel; `sums`: [MT][2 tiles] */
INLINE void amx_slab_pass(const struct amx_job *job, char *panel, const float *scale, int64_t n, int64_t tile, int64_t begin,
                          int64_t end, int first, float *sums, const int MT) {
    const struct lowbit_problem *p = job->c->p;
    const int bf16 = 1;
    int64_t size = job->units * 64 * TILE_ROWS, step = job->step, quads = round_up((p->columns + 1) / 2, step);
    const char *x = job->x + tile * size;
    if (begin == 0) { CLEAR(0, 1); CLEAR(2, 3); }
    else { READ_IN(0, 1, sums); if (MT == 2) READ_IN(2, 3, sums + PASS_ROWS * LANES); }
    if (first) job->widen(job, scale, n, begin, panel);
    for (int64_t i = begin; i < end; i++) {
        int64_t q = i * CHUNK_UNITS * 16, until = min64(q + CHUNK_UNITS * 16, quads);
        if (first && i + 1 < end) job->widen(job, scale, n, i + 1, panel + (i + 1 - begin) * CHUNK_BYTES);
        written_before_tiles();
        const char *a = panel + (i - begin) * CHUNK_BYTES;
        for (; q < until; q += step, a += 4 * step) PRODUCT(0, 1, 2, 3);
    }
    READ_OUT(0, 1, (int32_t *)sums);
    if (MT == 2) READ_OUT(2, 3, (int32_t *)sums + PASS_ROWS * LANES);
}

static void amx_slabs_range(void *argument, int64_t begin, int64_t end) {
    struct amx_job *job = argument;
    const struct lowbit_problem *p = job->c->p;
    int64_t block = min64(job->tiles, SLAB_TILES), per_panel = (2 * p->groups + 1) * PANEL, sums_of = block * TILE_ROWS * PASS_ROWS;
    int64_t slab = SLAB_BYTES / (block * CHUNK_UNITS * 64 * TILE_ROWS);
    char *panel = scratch(slab * CHUNK_BYTES);
    float *scale = scratch(SLAB_PANELS * per_panel * 4), *sums = scratch(SLAB_PANELS * sums_of * 4);
    if (!panel || !scale || !sums) job->failed = 1;
    else configure_tiles(job->step);
    for (int64_t from = 0; !job->failed && from < job->tiles; from += block)
    for (int64_t rows = begin; rows < end; rows += SLAB_PANELS * PASS_ROWS) {
        int64_t until = min64(from + block, job->tiles), panels = (min64(rows + SLAB_PANELS * PASS_ROWS, end) - rows + PASS_ROWS - 1) / PASS_ROWS;
        for (int64_t i = 0; i < panels; i++) {
            float *s = scale + i * per_panel;
            T(panel_scales)(job->c, rows + i * PASS_ROWS, 0, s, s + p->groups * PANEL, s + 2 * p->groups * PANEL);
        }
        for (int64_t chunk = 0; chunk < job->chunks; chunk += slab) for (int64_t i = 0; i < panels; i++)
            for (int64_t tile = from, next = min64(chunk + slab, job->chunks); tile < until; tile += 2) {
                float *to = sums + i * sums_of + (tile - from) * TILE_ROWS * PASS_ROWS;
                int64_t n = rows + i * PASS_ROWS;
                if (until - tile >= 2) amx_slab_pass(job, panel, scale + i * per_panel, n, tile, chunk, next, tile == from, to, 2);
                else amx_slab_pass(job, panel, scale + i * per_panel, n, tile, chunk, next, tile == from, to, 1);
            }
        for (int64_t i = 0; i < panels; i++) for (int64_t tile = from; tile < until; tile += 2) {
            const float *of = sums + i * sums_of + (tile - from) * TILE_ROWS * PASS_ROWS;
            if (until - tile >= 2) amx_store(job, of, NULL, scale + i * per_panel, rows + i * PASS_ROWS, tile, 2, 0, 1);
            else amx_store(job, of, NULL, scale + i * per_panel, rows + i * PASS_ROWS, tile, 1, 0, 1);
        }
    }
    if (!job->failed) release_tiles();
    free(panel);
    free(scale);
    free(sums);
}
#undef MULTIPLY
#undef PRODUCT
#undef CLEAR
#undef READ_OUT
#undef READ_IN
