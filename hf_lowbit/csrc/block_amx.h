/* Block-sparse products in bfloat16 by matrix tiles (amx.h): the rows of a block are the rows of tile A as they lie.
 *
 * Blocks of 32 columns and 16 rows, or multiples of them. x is cut into tiles once a call: [tile of 16 rows][32 columns a
 * unit][16 pairs][16 rows of x].
 */

static void amx_block_x_range(void *argument, int64_t begin, int64_t end) {
    struct blocks_job *job = argument;
    const struct lowbit_blocks *p = job->p;
    int64_t units = job->columns / 32;
    for (int64_t tile = begin; tile < end; tile++) for (int64_t u = 0; u < units; u++) {
        part some = part_of(2 * p->in_features - 64 * u);
        vi rows[TILE_ROWS];
        UNROLL for (int r = 0; r < TILE_ROWS; r++) {
            int64_t m = tile * TILE_ROWS + r;
            const uint8_t *row = (const uint8_t *)((const uint16_t *)p->x + m * p->x_stride) + 64 * u;
            rows[r] = m < p->m ? load_part(row, some) : zero_i();
        }
        amx_interleave(rows, (char *)job->x + (tile * units + u) * 64 * TILE_ROWS);
    }
}

/* y of tiles of x from `tile` (MT of them) and NT tiles of rows of block row r, whose values are given, from row i of a block */
INLINE void amx_block_pass(const struct blocks_job *job, const void *values, int64_t r, int64_t i, int64_t tile, const int MT,
                           const int NT) {
    const struct lowbit_blocks *p = job->p;
    int64_t size = job->columns / 32 * 64 * TILE_ROWS, row = 2 * p->width, units = p->width / 32;
    const char *x = (const char *)job->x + tile * size;
    _tile_zero(0); _tile_zero(1); _tile_zero(2); _tile_zero(3);
    for (int64_t b0 = first_block(p, r), b = b0, end = first_block(p, r + 1); b < end; b++) {
        const char *a = (const char *)values + ((b - b0) * p->height + i) * row, *q = x + p->columns[b] * units * 64 * TILE_ROWS;
        /* the next block may lie anywhere in x */
        const char *next = b + 1 < end ? x + p->columns[b + 1] * units * 64 * TILE_ROWS : q;
        for (int64_t u = 0; u < units; u++, a += 64, q += 64 * TILE_ROWS, next += 64 * TILE_ROWS) {
            for (int j = 0; j < TILE_ROWS; j++) { FETCH(next + 64 * j); if (MT == 2) FETCH(next + size + 64 * j); }
            _tile_loadd(4, a, row);
            _tile_loadd(6, q, 64);
            _tile_dpbf16ps(0, 4, 6);
            if (NT == 2) { _tile_loadd(5, a + TILE_ROWS * row, row); _tile_dpbf16ps(1, 5, 6); }
            if (MT == 2) {
                _tile_loadd(7, q + size, 64);
                _tile_dpbf16ps(2, 4, 7);
                if (NT == 2) _tile_dpbf16ps(3, 5, 7);
            }
        }
    }
    _Alignas(64) int32_t sums[4][TILE_ROWS * LANES];
    _tile_stored(0, sums[0], 64);
    if (NT == 2) _tile_stored(1, sums[1], 64);
    if (MT == 2) _tile_stored(2, sums[2], 64);
    if (MT == 2 && NT == 2) _tile_stored(3, sums[3], 64);
    for (int mt = 0; mt < MT; mt++) for (int nt = 0; nt < NT; nt++) {
        vi words[TILE_ROWS];
        UNROLL for (int j = 0; j < TILE_ROWS; j++) words[j] = load(sums[2 * mt + nt] + j * LANES);
        transpose(words);
        int64_t m = (tile + mt) * TILE_ROWS, at = r * p->height + i + nt * TILE_ROWS;
        UNROLL for (int j = 0; j < TILE_ROWS; j++) if (m + j < p->m)
            store_rounded(p->y, TYPE_BF16, (m + j) * p->block_rows * p->height + at, as_f(words[j]), TILE_ROWS);
    }
}

static void amx_blocks_range(void *argument, int64_t begin, int64_t end) {
    struct blocks_job *job = argument;
    const struct lowbit_blocks *p = job->p;
    int64_t tiles = (p->m + TILE_ROWS - 1) / TILE_ROWS;
    void *room;
    if (!T(room_for_values)(job, begin, end, &room)) return;
    configure_tiles(16);
    for (int64_t r = begin; r < end; r++) {
        const void *values = T(values_of_row)(job, r, room);
        written_before_tiles();
        for (int64_t tile = 0; tile < tiles; tile += 2) {
            int64_t i = 0;
            for (; i + 32 <= p->height; i += 32) {
                if (tile + 2 <= tiles) amx_block_pass(job, values, r, i, tile, 2, 2);
                else amx_block_pass(job, values, r, i, tile, 1, 2);
            }
            if (i < p->height) {
                if (tile + 2 <= tiles) amx_block_pass(job, values, r, i, tile, 2, 1);
                else amx_block_pass(job, values, r, i, tile, 1, 1);
            }
        }
    }
    release_tiles();
    free(room);
}

static int amx_blocks_linear(const struct lowbit_blocks *p) {
    struct blocks_job job = {p, NULL, columns_of_blocks(p), 0};
    int64_t tiles = (p->m + TILE_ROWS - 1) / TILE_ROWS;
    job.x = scratch(tiles * TILE_ROWS * job.columns * 2);
    if (!job.x) return -1;
    parallel_for(amx_block_x_range, &job, tiles, 1, (int)p->threads);
    parallel_for(amx_blocks_range, &job, p->block_rows, 1, (int)p->threads);
    free(job.x);
    return job.failed ? -1 : 0;
}
