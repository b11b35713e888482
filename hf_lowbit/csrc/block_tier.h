/* Block-sparse products with vectors: included once for each tier, with T(name) and the vectors of a vector_*.h.
 *
 * Few rows of x: lanes run along a row of a block, and values are read once, in the order in which they lie.
 * Many rows: lanes run along rows of x, which are turned into panels once a call; each value meets a whole panel.
 * Low-bit blocks that are not multiplied as integers become numbers a block row at a time, and those are multiplied.
 */
#include "activations.h"
#include "rows.h"

/* rows of x at once: with lanes along K, and in a panel */
#define FEW 4
#define ACROSS (2 * LANES)

/* where the blocks of block row r lie as numbers of the type of x; low-bit ones are written to `room` */
static const void *T(values_of_row)(struct blocks_job *job, int64_t r, void *room) {
    const struct lowbit_blocks *p = job->p;
    int64_t first = first_block(p, r) * p->height, rows = first_block(p, r + 1) * p->height - first;
    if (!p->field) return element_at(p, p->values, first * p->width);
    struct lowbit_problem stored = {.field = p->field, .offset = p->offset, .group = p->width, .groups = 1, .scale_stride = 1,
                                    .scale_type = TYPE_BF16, .type = p->type, .rows = rows, .columns = p->width,
                                    .row_bytes = p->row_bytes};
    struct lowbit_call call = {.p = &stored, .m = rows, .weight = (const uint8_t *)p->values + first * p->row_bytes,
                               .scale = p->scale + first, .y = room};
    struct rows_job widening = {&call, NULL, 0, 0};
    T(rows_range)(&widening, 0, rows);
    job->failed |= widening.failed;
    return room;
}
/* room for the numbers of one of the block rows [begin, end), where they don't lie there already */
static int T(room_for_values)(struct blocks_job *job, int64_t begin, int64_t end, void **room) {
    const struct lowbit_blocks *p = job->p;
    *room = p->field ? scratch(most_live(p, begin, end) * p->height * p->width * bytes_of_type(p)) : NULL;
    if (p->field && !*room) job->failed = 1;
    return !p->field || *room;
}

INLINE vf T(values_at)(const void *p, int64_t type, int64_t i) {
    if (type == TYPE_F32) return load_f((const float *)p + i);
#if LANES == 16
    __m256i half = _mm256_loadu_si256((const __m256i *)((const uint16_t *)p + i));
    if (type == TYPE_F16) return _mm512_cvtph_ps(half);
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16));
#else
    __m128i half = _mm_loadu_si128((const __m128i *)((const uint16_t *)p + i));
    if (type == TYPE_F16) return _mm256_cvtph_ps(half);
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(half), 16));
#endif
}

#include "block_codes.h"

/* y of FEW rows of x and block row r, whose values are given: `sums` [height][FEW][LANES] */
INLINE void T(few_rows_of_block)(const struct blocks_job *job, int64_t m, int64_t r, const void *values, float *sums,
                                 const int count, const int type) {
    const struct lowbit_blocks *p = job->p;
    int64_t whole = p->width / LANES * LANES;
    memset(sums, 0, (size_t)(p->height * count * LANES * 4));
    for (int64_t b0 = first_block(p, r), b = b0, end = first_block(p, r + 1); b < end; b++) {
        const float *x = job->x + m * job->columns + p->columns[b] * p->width;
        for (int64_t i = 0; i < p->height; i++) {
            const void *v = element_at(p, values, ((b - b0) * p->height + i) * p->width);
            vf sum[FEW];
            UNROLL for (int j = 0; j < count; j++) sum[j] = load_f(sums + (i * count + j) * LANES);
            for (int64_t k = 0; k < whole; k += LANES) {
                vf value = T(values_at)(v, type, k);
                UNROLL for (int j = 0; j < count; j++) sum[j] = fma_f(value, load_f(x + j * job->columns + k), sum[j]);
            }
            UNROLL for (int j = 0; j < count; j++) store_f(sums + (i * count + j) * LANES, sum[j]);
            for (int64_t k = whole; k < p->width; k++) for (int j = 0; j < count; j++)
                sums[(i * count + j) * LANES + k - whole] += load_element(v, type, k) * x[j * job->columns + k];
        }
    }
    for (int64_t i = 0; i < p->height; i++) for (int j = 0; j < count; j++)
        store_element(p->y, type, (m + j) * p->block_rows * p->height + r * p->height + i, sum_f(load_f(sums + (i * count + j) * LANES)));
}

#define FEW_ROWS(count, type) T(few_rows_of_block)(job, m, r, values, sums, count, type)
#define EACH_TYPE(count) do { \
        if (p->type == TYPE_F32) FEW_ROWS(count, TYPE_F32); \
        else if (p->type == TYPE_BF16) FEW_ROWS(count, TYPE_BF16); \
        else FEW_ROWS(count, TYPE_F16); \
    } while (0)
static void T(few_blocks_range)(void *argument, int64_t begin, int64_t end) {
    struct blocks_job *job = argument;
    const struct lowbit_blocks *p = job->p;
    float *sums = scratch(p->height * FEW * LANES * 4);
    void *room;
    if (!T(room_for_values)(job, begin, end, &room) || !sums) { job->failed = 1; free(sums); free(room); return; }
    for (int64_t r = begin; r < end; r++) {
        const void *values = T(values_of_row)(job, r, room);
        for (int64_t m = 0; m < p->m; m += FEW) switch (min64(p->m - m, FEW)) {
            case 1: EACH_TYPE(1); break;
            case 2: EACH_TYPE(2); break;
            case 3: EACH_TYPE(3); break;
            default: EACH_TYPE(4);
        }
    }
    free(sums);
    free(room);
}
#undef FEW_ROWS
#undef EACH_TYPE

/* x [M, K] -> float32 [M, columns] */
static void T(widen_x_range)(void *argument, int64_t begin, int64_t end) {
    struct blocks_job *job = argument;
    const struct lowbit_blocks *p = job->p;
    for (int64_t m = begin; m < end; m++) {
        float *out = job->x + m * job->columns;
        for (int64_t k = 0; k < job->columns; k++)
            out[k] = k < p->in_features ? load_element(p->x, p->type, m * p->x_stride + k) : 0.0f;
    }
}

/* x [M, K] -> panels float32 [M / ACROSS][columns][ACROSS] */
static void T(panel_x_range)(void *argument, int64_t begin, int64_t end) {
    struct blocks_job *job = argument;
    const struct lowbit_blocks *p = job->p;
    for (int64_t panel = begin; panel < end; panel++) {
        float *out = job->x + panel * job->columns * ACROSS;
        for (int64_t k = 0; k < job->columns; k += 16) for (int64_t j = 0; j < ACROSS; j++) {
            int64_t m = panel * ACROSS + j, some = min64(16, job->columns - k);
            for (int64_t i = 0; i < some; i++)
                out[(k + i) * ACROSS + j] = m < p->m && k + i < p->in_features ? load_element(p->x, p->type, m * p->x_stride + k + i) : 0.0f;
        }
    }
}

/* sums [rows][ACROSS] += `rows` rows of a block at v, times the panel at x */
INLINE void T(block_times_panel)(const float *v, const float *x, int64_t width, float *sums, const int rows) {
    vf sum[HEIGHT][2];
    UNROLL for (int i = 0; i < rows; i++) UNROLL for (int h = 0; h < 2; h++) sum[i][h] = load_f(sums + i * ACROSS + h * LANES);
    for (int64_t k = 0; k < width; k++) {
        vf x0 = load_f(x + k * ACROSS), x1 = load_f(x + k * ACROSS + LANES);
        UNROLL for (int i = 0; i < rows; i++) {
            vf value = set_f(v[i * width + k]);
            sum[i][0] = fma_f(value, x0, sum[i][0]);
            sum[i][1] = fma_f(value, x1, sum[i][1]);
        }
    }
    UNROLL for (int i = 0; i < rows; i++) UNROLL for (int h = 0; h < 2; h++) store_f(sums + i * ACROSS + h * LANES, sum[i][h]);
}

static void T(many_blocks_range)(void *argument, int64_t begin, int64_t end) {
    struct blocks_job *job = argument;
    const struct lowbit_blocks *p = job->p;
    int64_t size = p->height * p->width;
    float *sums = scratch(p->height * ACROSS * 4);
    float *widened = p->type == TYPE_F32 ? NULL : scratch(most_live(p, begin, end) * size * 4);
    void *room;
    if (!T(room_for_values)(job, begin, end, &room) || !sums || (p->type != TYPE_F32 && !widened)) {
        job->failed = 1;
        free(sums); free(widened); free(room);
        return;
    }
    for (int64_t r = begin; r < end; r++) {
        int64_t b0 = first_block(p, r), blocks = first_block(p, r + 1) - b0;
        const void *v = T(values_of_row)(job, r, room);
        const float *values = v;
        if (widened) {
            for (int64_t i = 0; i < blocks * size; i++) widened[i] = load_element(v, p->type, i);
            values = widened;
        }
        for (int64_t m = 0; m < p->m; m += ACROSS) {
            memset(sums, 0, (size_t)(p->height * ACROSS * 4));
            for (int64_t b = 0; b < blocks; b++) {
                const float *x = job->x + m * job->columns + p->columns[b0 + b] * p->width * ACROSS, *v = values + b * size;
                int64_t i = 0;
                for (; i + HEIGHT <= p->height; i += HEIGHT) T(block_times_panel)(v + i * p->width, x, p->width, sums + i * ACROSS, HEIGHT);
                for (; i + 2 <= p->height; i += 2) T(block_times_panel)(v + i * p->width, x, p->width, sums + i * ACROSS, 2);
                for (; i < p->height; i++) T(block_times_panel)(v + i * p->width, x, p->width, sums + i * ACROSS, 1);
            }
            for (int64_t j = 0; j < ACROSS && m + j < p->m; j++) {
                int64_t at = ((m + j) * p->block_rows + r) * p->height;
                for (int64_t i = 0; i < p->height; i++) store_element(p->y, p->type, at + i, sums[i * ACROSS + j]);
            }
        }
    }
    free(sums);
    free(widened);
    free(room);
}

static int T(blocks_linear)(const struct lowbit_blocks *p) {
    int status = p->field ? T(codes_linear)(p) : 1;
    if (status != 1) return status;
    struct blocks_job job = {p, NULL, columns_of_blocks(p), 0};
    int few = p->m <= 2 * FEW;
    job.x = scratch(round_up(p->m, ACROSS) * job.columns * 4);
    if (!job.x) return -1;
    if (few) parallel_for(T(widen_x_range), &job, p->m, 1, (int)p->threads);
    else parallel_for(T(panel_x_range), &job, (p->m + ACROSS - 1) / ACROSS, 1, (int)p->threads);
    parallel_for(few ? T(few_blocks_range) : T(many_blocks_range), &job, p->block_rows, 1, (int)p->threads);
    free(job.x);
    return job.failed ? -1 : 0;
}
#undef FEW
#undef ACROSS
