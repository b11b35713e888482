/* Matrix tiles (AMX): a tile is 16 rows of 64 bytes; one instruction multiplies two of them into a third.
 *
 *     C [16 rows of W][16 rows of x] += A [16 rows of W][step quads] * B [step quads][16 rows of x]
 *
 * A quad is what meets in one lane: 4 codes of 8 bits, or 2 bfloat16 numbers. W is the left operand, since that one lies
 * row by row, as the checkpoint does: its codes are widened where they stand, 64 bytes (a unit) at a time, and never
 * transposed. Widening a chunk of 32 rows runs beside the products of the chunk before. x is cut into tiles once a call. C
 * comes out with the rows of W along its rows, and is transposed on the way to y.
 *
 * Fields of one byte belong to neighbouring codes, and the cheapest widening separates them: within each 32 codes, W and x
 * stand in another order.
 *
 * Tiles must be configured before use and released after it, in each thread: torch has its own configuration, and a thread
 * that holds tiles is slower to switch. The configuration is an operand of the instruction itself, so that no compiler takes
 * the stores to it for dead.
 */
#ifndef LOWBIT_AMX_H
#define LOWBIT_AMX_H

#define TILE_ROWS 16
/* rows of W, and most rows of x, in one pass: 2 x 2 tiles */
#define PASS_ROWS 32
#define CHUNK_UNITS 4
#define CHUNK_BYTES (PASS_ROWS * CHUNK_UNITS * 64)
/* chunks of weights fetched ahead, so that memory has time to answer */
#define CHUNKS_AHEAD 6
/* into the second cache: the first one holds x and the chunks */
#define FETCH(p) __builtin_prefetch(p, 0, 2)

struct amx_job {
    const struct lowbit_call *c;
    int step;                   /* quads along K of one product: 16, or 8 where groups ask for it */
    int64_t units, chunks;      /* of a row */
    int64_t whole_units;        /* of those, how many lie before the end of a row */
    int64_t tiles, tiles_a_block;
    char *x;                    /* [tiles][units * 16 quads][16 rows of x][4 bytes] */
    float *sums;                /* [tiles][G][16] sums of a over a group: only where zero points are subtracted late */
    float *t;                   /* [tiles * 16] */
    int32_t *group_of;          /* group of each 32 codes */
    /* chunk i of 32 rows of W from n, [32][CHUNK_UNITS * 64 bytes]; scales as in `amx_pass` */
    void (*widen)(const struct amx_job *job, const float *scale, int64_t n, int64_t i, char *out);
    int failed;
};

/* tiles 0 to 3 are C, 4 and 5 are A, 6 and 7 are B */
INLINE void configure_tiles(int step) {
    struct { uint8_t palette, start_row, reserved[14]; uint16_t row_bytes[16]; uint8_t rows[16]; } tiles = {.palette = 1};
    for (int i = 0; i < 8; i++) {
        tiles.row_bytes[i] = i == 4 || i == 5 ? (uint16_t)(4 * step) : 64;
        tiles.rows[i] = i > 5 ? (uint8_t)step : TILE_ROWS;
    }
    __asm__ volatile("ldtilecfg %0" : : "m"(tiles));
}
INLINE void release_tiles(void) { __asm__ volatile("tilerelease"); }
/* compilers do not know that a tile load reads memory: what it reads must have been written */
INLINE void written_before_tiles(void) { __asm__ volatile("" : : : "memory"); }

/* 16 rows of 16 words, one cache line each, become 16 quads of 16 rows */
INLINE void amx_interleave(vi rows[TILE_ROWS], char *out) {
    transpose(rows);
    UNROLL for (int i = 0; i < TILE_ROWS; i++) store(out + i * 64, rows[i]);
}

/* How 32 rows of W from n lie: the plane of the low bits and, at 3 bits, of the third ones. Past the last row the last one
 * is widened again, and not stored. */
struct amx_rows { const uint8_t *low, *high; int64_t low_bytes, high_bytes, stride, last; };
INLINE struct amx_rows amx_rows_of(const struct lowbit_call *c, int64_t n, const int field) {
    const struct lowbit_problem *p = c->p;
    int64_t high = (p->columns + 7) / 8, low = p->row_bytes - (field == 3 ? high : 0);
    const uint8_t *row = c->weight + n * p->row_bytes;
    return (struct amx_rows){row, row + low, low, high, p->row_bytes, p->rows - 1 - n};
}

/* how far behind a chunk the bytes lie that the same rows will widen CHUNKS_AHEAD chunks from now; `bytes`: of a chunk */
INLINE int64_t amx_ahead(const struct amx_job *job, int64_t chunk, int64_t bytes) {
    int64_t i = chunk + CHUNKS_AHEAD, rows = 0;
    for (; i >= job->chunks; i -= job->chunks) rows += PASS_ROWS;
    return rows * job->c->p->row_bytes + (i - chunk) * bytes;
}

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
    if (!job->failed) parallel_for(multiply, job, job->c->p->rows, PASS_ROWS, job->c->threads);
    free(job->x);
    free(job->sums);
    free(job->t);
    free(job->group_of);
    return job->failed ? -1 : 0;
}

#endif
