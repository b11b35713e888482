/* The tier for any processor: plain C, written so that a compiler can vectorize the inner loops.
 *
 * A row of weights is unpacked once to q - z (16 bits hold it at every width), then multiplied with every row of x.
 */
#ifndef LOWBIT_PORTABLE_H
#define LOWBIT_PORTABLE_H

#include <math.h>

#include "parallel.h"
#include "problem.h"

static inline int stored_field(const struct lowbit_problem *p, const uint8_t *row, int64_t k) {
    switch (p->field) {
    case 8: return row[k] ^ 0x80;
    case 4: return row[k >> 1] >> (k & 1) * 4 & 15;
    case 2: return row[k >> 2] >> (k & 3) * 2 & 3;
    default: return (row[k >> 2] >> (k & 3) * 2 & 3) | (row[(p->columns + 3) / 4 + (k >> 3)] >> (k & 7) & 1) << 2;
    }
}

static void unpack_row(const struct lowbit_call *c, int64_t n, int16_t *out) {
    const struct lowbit_problem *p = c->p;
    const uint8_t *row = c->weight + n * p->row_bytes;
    for (int64_t g = 0; g < p->groups; g++) {
        int64_t begin = g * p->group, end = min64(begin + p->group, p->columns);
        int shift = load_shift(c, n, g);
        for (int64_t k = begin; k < end; k++) out[k] = (int16_t)(stored_field(p, row, k) - shift);
    }
}

#define T(name) name##_portable
#include "activations.h"
#include "rows.h"
#undef T

struct portable_job { const struct lowbit_call *c; float *x, *t; int8_t *a; int failed; };

static void portable_quantize(void *argument, int64_t begin, int64_t end) {
    struct portable_job *job = argument;
    int64_t columns = job->c->p->columns;
    for (int64_t m = begin; m < end; m++) {
        load_floats_portable(job->c, m, job->x + m * columns);
        if (job->c->p->int8) job->t[m] = quantize_row_portable(job->x + m * columns, columns, job->a + m * columns);
    }
}

static float portable_output(const struct portable_job *job, const int16_t *w, int64_t m, int64_t n) {
    const struct lowbit_problem *p = job->c->p;
    float y = 0.0f;
    for (int64_t g = 0; g < p->groups; g++) {
        int64_t begin = g * p->group, end = min64(begin + p->group, p->columns);
        float sum;
        if (p->int8) {
            const int8_t *a = job->a + m * p->columns;
            int32_t exact = 0;
            for (int64_t k = begin; k < end; k++) exact += a[k] * w[k];
            sum = (float)exact;
        } else {
            /* partial sums: a compiler may not reorder one sum of floats, and many are more exact than one */
            const float *x = job->x + m * p->columns;
            float parts[16] = {0};
            int64_t k = begin;
            for (; k + 16 <= end; k += 16) for (int i = 0; i < 16; i++) parts[i] += x[k + i] * w[k + i];
            for (; k < end; k++) parts[0] += x[k] * w[k];
            for (int i = 8; i > 0; i /= 2) for (int j = 0; j < i; j++) parts[j] += parts[j + i];
            sum = parts[0];
        }
        y += sum * load_scale(job->c, n, g);
    }
    return p->int8 ? y * job->t[m] : y;
}

static void portable_rows(void *argument, int64_t begin, int64_t end) {
    struct portable_job *job = argument;
    const struct lowbit_call *c = job->c;
    int16_t *w = scratch(c->p->columns * 2);
    if (!w) { job->failed = 1; return; }
    for (int64_t n = begin; n < end; n++) {
        unpack_row(c, n, w);
        float bias = c->bias ? load_element(c->bias, c->bias_type, n) : 0.0f;
        for (int64_t m = 0; m < c->m; m++) {
            float y = portable_output(job, w, m, n);
            store_element(c->y, c->p->type, m * c->p->rows + n, c->bias ? y + bias : y);
        }
    }
    free(w);
}

static int portable_linear(const struct lowbit_call *c) {
    int64_t count = c->m * c->p->columns;
    struct portable_job job = {c, scratch(count * 4), scratch(c->m * 4), scratch(count), 0};
    if (!job.x || !job.t || !job.a) job.failed = 1;
    else {
        parallel_for(portable_quantize, &job, c->m, 1, c->threads);
        parallel_rows(portable_rows, &job, 1);
    }
    free(job.x);
    free(job.t);
    free(job.a);
    return job.failed ? -1 : 0;
}

#endif
