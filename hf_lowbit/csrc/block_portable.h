/* Block-sparse products for any processor, an output at a time: the definition of what the tiers compute.
 *
 * Low-bit blocks become numbers of the type of x, a row of a block at a time; with int8 activations their codes are
 * multiplied, and the sums are those of block_codes.h.
 */
#include "activations.h"
#include "rows.h"

struct portable_blocks { const struct lowbit_blocks *p; int8_t *a; float *t; int failed; };

/* row i of block b as numbers of the type of x */
static const void *portable_values(const struct lowbit_blocks *p, int64_t b, int64_t i, void *room, int *failed) {
    int64_t row = b * p->height + i;
    if (!p->field) return element_at(p, p->values, row * p->width);
    struct lowbit_problem stored = {.field = p->field, .offset = p->offset, .group = p->width, .groups = 1, .scale_stride = 1,
                                    .scale_type = TYPE_BF16, .type = p->type, .rows = 1, .columns = p->width,
                                    .row_bytes = p->row_bytes};
    struct lowbit_call call = {.p = &stored, .m = 1, .weight = (const uint8_t *)p->values + row * p->row_bytes,
                               .scale = p->scale + row, .y = room};
    struct rows_job widening = {&call, NULL, 0, 0};
    T(rows_range)(&widening, 0, 1);
    *failed |= widening.failed;
    return room;
}

/* y of row i of each block of block row r, for row m of x */
static float portable_sum(struct portable_blocks *job, int64_t r, int64_t m, int64_t i, void *room) {
    const struct lowbit_blocks *p = job->p;
    struct lowbit_problem stored = {.field = p->field, .columns = p->width, .row_bytes = p->row_bytes};
    int32_t shift = p->field == 8 ? 0 : (int32_t)p->offset;
    float sum = 0.0f;
    for (int64_t b = first_block(p, r), last = first_block(p, r + 1); b < last; b++) {
        int64_t column = p->columns[b] * p->width, some = min64(p->width, p->in_features - column), row = b * p->height + i;
        if (p->int8) {
            const int8_t *a = job->a + m * p->in_features + column;
            const int8_t *u = T(unpack_fields)(&stored, (const uint8_t *)p->values + row * p->row_bytes, room);
            int32_t exact = 0;
            for (int64_t k = 0; k < some; k++) exact += a[k] * (u[k] - shift);
            float part = float_of_bf16(p->scale[row]) * (float)exact;
            sum += part;
        } else {
            const void *v = portable_values(p, b, i, room, &job->failed);
            for (int64_t k = 0; k < some; k++)
                sum += load_element(p->x, p->type, m * p->x_stride + column + k) * load_element(v, p->type, k);
        }
    }
    return p->int8 ? sum * job->t[m] : sum;
}

static void portable_blocks_range(void *argument, int64_t begin, int64_t end) {
    struct portable_blocks *job = argument;
    const struct lowbit_blocks *p = job->p;
    void *room = scratch(p->width * 4 + 8);
    if (!room) { job->failed = 1; return; }
    for (int64_t r = begin; r < end; r++) for (int64_t m = 0; m < p->m; m++) for (int64_t i = 0; i < p->height; i++)
        store_element(p->y, p->type, (m * p->block_rows + r) * p->height + i, portable_sum(job, r, m, i, room));
    free(room);
}

static int T(blocks_linear)(const struct lowbit_blocks *p) {
    struct portable_blocks job = {p, NULL, NULL, 0};
    float *x = p->int8 ? scratch(p->in_features * 4 + p->m * (p->in_features + 4)) : NULL;
    if (p->int8 && !x) return -1;
    if (p->int8) {
        struct lowbit_problem problem = {.type = p->type, .columns = p->in_features};
        struct lowbit_call c = {.p = &problem, .x = p->x, .x_stride = p->x_stride};
        job.t = x + p->in_features;
        job.a = (int8_t *)(job.t + p->m);
        for (int64_t m = 0; m < p->m; m++) {
            T(load_floats)(&c, m, x);
            job.t[m] = T(quantize_row)(x, p->in_features, job.a + m * p->in_features);
        }
    }
    parallel_for(portable_blocks_range, &job, p->block_rows, 1, (int)p->threads);
    free(x);
    return job.failed ? -1 : 0;
}
