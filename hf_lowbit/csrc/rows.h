/* Rows of W as numbers, for gradients and for looking up: w[n, k] = s[n, g] (q[n, k] - z[n, g]).
 *
 * The difference of integers is exact, the product is formed in float32, and rounded once to the type of the output: what
 * the reference does, bit for bit. A row is unpacked to bytes first, then multiplied group by group; both loops are plain C
 * that compilers turn into vectors, so a tier is only another target of the same text, included with T(name).
 */

/* the fields of a row, one a byte; 8 bits are signed and lie there already. `out` has room up to a multiple of 8 codes */
static const int8_t *T(unpack_fields)(const struct lowbit_problem *p, const uint8_t *row, char *out) {
    if (p->field == 8) return (const int8_t *)row;
    int64_t high_bytes = (p->columns + 7) / 8, low_bytes = p->row_bytes - (p->field == 3 ? high_bytes : 0);
    if (p->field == 4) {
        uint16_t *two = (uint16_t *)out;
        for (int64_t i = 0; i < low_bytes; i++) two[i] = (uint16_t)((row[i] | row[i] << 4) & 0x0f0f);
        return (const int8_t *)out;
    }
    uint32_t *four = (uint32_t *)out;
    for (int64_t i = 0; i < low_bytes; i++) {
        uint32_t b = row[i];
        four[i] = (b | b << 6 | b << 12 | b << 18) & 0x03030303;
    }
    if (p->field == 3) for (int64_t i = 0; i < low_bytes; i++) {
        uint32_t b = row[low_bytes + i / 2] >> (i & 1) * 4 & 15;
        four[i] |= ((b | b << 7 | b << 14 | b << 21) & 0x01010101) << 2;
    }
    return (const int8_t *)out;
}

static void T(rows_range)(void *argument, int64_t begin, int64_t end) {
    struct rows_job *job = argument;
    const struct lowbit_call *c = job->c;
    const struct lowbit_problem *p = c->p;
    char *fields = scratch(p->columns + 8);
    if (!fields) { job->failed = 1; return; }
    /* eight bits are stored as what they are, all others as u = q + offset */
    const int32_t unsigned_by = p->field == 8 ? (int32_t)p->offset : 0;
    for (int64_t i = begin; i < end; i++) {
        int64_t n = row_asked_for(job, i);
        const int8_t *u = T(unpack_fields)(p, c->weight + n * p->row_bytes, fields);
        for (int64_t g = 0; g < p->groups; g++) {
            int64_t first = g * p->group, last = min64(first + p->group, p->columns);
            int32_t shift = load_shift(c, n, g) - unsigned_by;
            float s = load_scale(c, n, g);
            if (p->type == TYPE_F32) {
                float *out = (float *)c->y + i * p->columns;
                for (int64_t k = first; k < last; k++) out[k] = (float)(u[k] - shift) * s;
            } else if (p->type == TYPE_BF16) {
                uint16_t *out = (uint16_t *)c->y + i * p->columns;
                for (int64_t k = first; k < last; k++) out[k] = bf16_of_float((float)(u[k] - shift) * s);
            } else {
                uint16_t *out = (uint16_t *)c->y + i * p->columns;
                for (int64_t k = first; k < last; k++) out[k] = f16_of_float((float)(u[k] - shift) * s);
            }
        }
    }
    free(fields);
}

int T(rows)(struct rows_job *job) {
    parallel_for(T(rows_range), job, job->c->m, 1, job->c->threads);
    return job->failed ? -1 : 0;
}
