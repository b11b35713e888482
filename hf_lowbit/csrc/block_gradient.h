/* The gradient of live blocks in bfloat16 by matrix tiles (amx.h):
 *
 *     dV[b, i, k] = sum_m dy[m, r(b) bn + i] x[m, c(b) bk + k]
 *
 * Both are cut into tiles once a call, with rows of x two by two in a word: of dy 16 columns and 32 rows stand as 16 rows of
 * 16 words, of x as they meet them. Every block then is a product of tiles that lie ready. Blocks of 16 rows and columns, or
 * multiples of them.
 */

struct gradient_job { const struct lowbit_block_gradient *p; char *dy, *x; int64_t units; };

/* words (row 2 j, row 2 j + 1) of 16 columns of `from` [M, columns], for 16 j from row 32 u on; what lies outside is zero */
INLINE void pair_rows(const uint16_t *from, int64_t stride, int64_t rows, int64_t columns, int64_t u, int64_t column, vi out[TILE_ROWS]) {
    int64_t left = columns - column;
    __mmask16 some = (__mmask16)(left >= 16 ? 0xffff : left > 0 ? (1 << left) - 1 : 0);
    UNROLL for (int j = 0; j < TILE_ROWS; j++) {
        int64_t m = 32 * u + 2 * j;
        const uint16_t *row = from + m * stride + column;
        vi even = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(m < rows ? some : 0, row));
        vi odd = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(m + 1 < rows ? some : 0, row + stride));
        out[j] = _mm512_or_si512(even, _mm512_slli_epi32(odd, 16));
    }
}

static void gradient_dy_range(void *argument, int64_t begin, int64_t end) {
    struct gradient_job *job = argument;
    const struct lowbit_block_gradient *p = job->p;
    vi words[TILE_ROWS];
    for (int64_t tile = begin; tile < end; tile++) for (int64_t u = 0; u < job->units; u++) {
        pair_rows(p->dy, p->dy_stride, p->m, p->block_rows * p->height, u, tile * TILE_ROWS, words);
        amx_interleave(words, job->dy + (tile * job->units + u) * 64 * TILE_ROWS);
    }
}
static void gradient_x_range(void *argument, int64_t begin, int64_t end) {
    struct gradient_job *job = argument;
    const struct lowbit_block_gradient *p = job->p;
    vi words[TILE_ROWS];
    for (int64_t tile = begin; tile < end; tile++) for (int64_t u = 0; u < job->units; u++) {
        pair_rows(p->x, p->x_stride, p->m, p->in_features, u, tile * TILE_ROWS, words);
        char *out = job->x + (tile * job->units + u) * 64 * TILE_ROWS;
        UNROLL for (int j = 0; j < TILE_ROWS; j++) store(out + 64 * j, words[j]);
    }
}

/* NT tiles of rows from row i of block b in block row r, and KT tiles of columns from column k */
INLINE void gradient_pass(const struct gradient_job *job, int64_t b, int64_t r, int64_t i, int64_t k, const int NT, const int KT) {
    const struct lowbit_block_gradient *p = job->p;
    int64_t size = job->units * 64 * TILE_ROWS;
    const char *dy = job->dy + (r * p->height + i) / TILE_ROWS * size;
    const char *x = job->x + (p->columns[b] * p->width + k) / TILE_ROWS * size;
    _tile_zero(0); _tile_zero(1); _tile_zero(2); _tile_zero(3);
    for (int64_t u = 0; u < size; u += 64 * TILE_ROWS) {
        _tile_loadd(4, dy + u, 64);
        _tile_loadd(6, x + u, 64);
        _tile_dpbf16ps(0, 4, 6);
        if (NT == 2) { _tile_loadd(5, dy + size + u, 64); _tile_dpbf16ps(1, 5, 6); }
        if (KT == 2) {
            _tile_loadd(7, x + size + u, 64);
            _tile_dpbf16ps(2, 4, 7);
            if (NT == 2) _tile_dpbf16ps(3, 5, 7);
        }
    }
    _Alignas(64) float sums[4][TILE_ROWS * LANES];
    _tile_stored(0, sums[0], 64);
    if (NT == 2) _tile_stored(1, sums[1], 64);
    if (KT == 2) _tile_stored(2, sums[2], 64);
    if (KT == 2 && NT == 2) _tile_stored(3, sums[3], 64);
    for (int kt = 0; kt < KT; kt++) for (int nt = 0; nt < NT; nt++) for (int j = 0; j < TILE_ROWS; j++) {
        int64_t at = (b * p->height + i + nt * TILE_ROWS + j) * p->width + k + kt * TILE_ROWS;
        store_rounded(p->out, TYPE_BF16, at, load_f(sums[2 * kt + nt] + j * LANES), TILE_ROWS);
    }
}

static void gradient_range(void *argument, int64_t begin, int64_t end) {
    struct gradient_job *job = argument;
    const struct lowbit_block_gradient *p = job->p;
    configure_tiles(16);
    for (int64_t r = begin; r < end; r++) {
        int64_t first = p->pointers ? p->pointers[r] : r * p->live, last = p->pointers ? p->pointers[r + 1] : first + p->live;
        for (int64_t b = first; b < last; b++) for (int64_t i = 0; i < p->height; i += 32) for (int64_t k = 0; k < p->width; k += 32) {
            int both = i + 32 <= p->height, wide = k + 32 <= p->width;
            if (both && wide) gradient_pass(job, b, r, i, k, 2, 2);
            else if (both) gradient_pass(job, b, r, i, k, 2, 1);
            else if (wide) gradient_pass(job, b, r, i, k, 1, 2);
            else gradient_pass(job, b, r, i, k, 1, 1);
        }
    }
    release_tiles();
}

static int amx_block_gradient(const struct lowbit_block_gradient *p) {
    struct gradient_job job = {p, NULL, NULL, (p->m + 31) / 32};
    int64_t size = job.units * 64 * TILE_ROWS, outputs = p->block_rows * p->height / TILE_ROWS;
    int64_t inputs = round_up(p->in_features, p->width) / TILE_ROWS;
    job.dy = scratch((outputs + inputs) * size);
    if (!job.dy) return -1;
    job.x = job.dy + outputs * size;
    parallel_for(gradient_dy_range, &job, outputs, 1, (int)p->threads);
    parallel_for(gradient_x_range, &job, inputs, 1, (int)p->threads);
    parallel_for(gradient_range, &job, p->block_rows, 1, (int)p->threads);
    free(job.dy);
    return 0;
}
