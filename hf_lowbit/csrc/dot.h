/* Few rows of x, int8: lanes run along k, weights are used straight from memory.
 *
 * One block of a weight row is VB packed bytes. For each phase its fields (a mask and a shift) meet the quads of x. The
 * sums of a lane are exact integers; with groups they become floats once a block and are multiplied by the lane's scale:
 *
 *     y += s[g] * (D - (offset + z[g]) A)        D, A: the lane's sums of a u and of a
 *
 * One row of floats is exact enough in fixed point (activations.h), and then costs less than floats do: three digits for
 * bfloat16 and float16, four for float32. NaN and infinity can't be cut up.
 */

struct T(dot_job) {
    const struct lowbit_call *c;
    int per_byte;
    int64_t blocks;
    int8_t *quads;          /* [M][blocks][P][VB] */
    int32_t *lane_sums;     /* [M][blocks][LANES]; times -offset when there are no zero points, else as float */
    int32_t *row_sums;      /* [M] */
    float *t;               /* [M] */
    struct T(group_map) map;
    int32_t offset;
    int digits;             /* 0, or the rows of x are digits of one */
    int64_t rows;           /* M, or digits */
};

/* row m of `codes`, which is padded with zeros, in the order of the weights, and its sums */
static void T(dot_arrange)(struct T(dot_job) *job, int64_t m, const int8_t *codes) {
    const struct lowbit_problem *p = job->c->p;
    int64_t P = job->per_byte, size = job->blocks * P * VB;
    int8_t *out = job->quads + m * size;
    int32_t *sums = job->lane_sums + m * job->blocks * LANES;
    vi total = zero_i(), ones = set_i(0x01010101), offset = set_i(-job->offset);
    for (int64_t b = 0; b < job->blocks; b++, out += P * VB) {
        const int8_t *block = codes + b * P * VB;
        if (P == 4) T(split_phases)(block, out, VB, 4);
        else if (P == 2) T(split_phases)(block, out, VB, 2);
        else memcpy(out, block, VB);
        vi sum = zero_i();
        for (int64_t i = 0; i < P; i++) sum = dot(0, sum, ones, load(out + i * VB));
        total = add_i(total, sum);
        if (!p->grouped) continue;
        if (job->c->zero) store_f((float *)sums + b * LANES, to_f(sum));
        else store(sums + b * LANES, mul_i(sum, offset));
    }
    job->row_sums[m] = sum_i(total);
}

static void T(dot_prepare)(struct T(dot_job) *job, int64_t m, float *x, int8_t *codes) {
    int64_t columns = job->c->p->columns, size = job->blocks * job->per_byte * VB;
    T(load_floats)(job->c, m, x);
    job->t[m] = T(quantize_row)(x, columns, codes);
    memset(codes + columns, 0, (size_t)(size - columns));
    T(dot_arrange)(job, m, codes);
}

/* the digits of the only row of x; 0 when it can't be cut up */
static int T(dot_prepare_digits)(struct T(dot_job) *job, float *x, int8_t *codes) {
    int64_t columns = job->c->p->columns, size = job->blocks * job->per_byte * VB;
    T(load_floats)(job->c, 0, x);
    float t = T(fixed_point)(x, columns, job->digits);
    if (t == 0.0f) return 0;
    for (int d = 0; d < job->digits; d++) {
        T(next_digit)((int32_t *)x, columns, codes);
        memset(codes + columns, 0, (size_t)(size - columns));
        T(dot_arrange)(job, d, codes);
        job->t[d] = t * (float)(1 << 8 * d);
    }
    return 1;
}

/* adds up the lanes, integers without groups and floats with them, and finishes y */
static void __attribute__((noinline)) T(dot_finish)(const struct T(dot_job) *job, int64_t m, int64_t n, int MT, int NT,
                                                    int grouped, vi sums[4][4]) {
    const struct lowbit_call *c = job->c;
    const struct lowbit_problem *p = c->p;
    for (int i = 0; i < NT && n + i < p->rows; i++) {
        float scale = grouped ? 1.0f : load_scale(c, n + i, 0), whole = 0.0f;
        float bias = c->bias ? load_element(c->bias, c->bias_type, n + i) : 0.0f;
        int32_t shift = job->offset + (c->zero && !grouped ? c->zero[(n + i) * p->scale_stride] : 0);
        for (int j = 0; j < MT; j++) {
            float out = grouped ? sum_f(as_f(sums[i][j]))
                                : (float)(sum_i(sums[i][j]) - shift * job->row_sums[m + j]) * scale;
            out *= job->t[m + j];
            whole += out;
            if (!job->digits) store_element(c->y, p->type, (m + j) * p->rows + n + i, c->bias ? out + bias : out);
        }
        if (job->digits) store_element(c->y, p->type, n + i, c->bias ? whole + bias : whole);
    }
}

/* MT rows of x from m, NT weight rows from n; grouped: more than one scale a row */
INLINE void T(dot_tile)(const struct T(dot_job) *job, int64_t m, int64_t n, const int field, const int grouped,
                        const int MT, const int NT) {
    const struct lowbit_call *c = job->c;
    const struct lowbit_problem *p = c->p;
    const int P = field == 3 ? 4 : 8 / field;
    int64_t blocks = job->blocks, high_bytes = (p->columns + 7) / 8, low_bytes = p->row_bytes - (field == 3 ? high_bytes : 0);
    const uint8_t *row[4];
    const uint16_t *scales[4];
    const int8_t *zeros[4];
    /* fetched ahead: the same place of rows that come later, far enough for memory to answer */
    int64_t ahead = round_up(8192, NT * p->row_bytes);
    UNROLL for (int i = 0; i < NT; i++) {
        /* past the last row the last one is computed again, and not stored */
        int64_t r = min64(n + i, p->rows - 1);
        row[i] = c->weight + r * p->row_bytes;
        scales[i] = (const uint16_t *)c->scale + r * p->scale_stride;
        zeros[i] = c->zero + r * p->scale_stride;
    }
    const int8_t *a = job->quads + m * blocks * P * VB;
    const int32_t *sums = job->lane_sums + m * blocks * LANES;
    vi total[4][4];
    vf y[4][4];
    UNROLL for (int i = 0; i < NT; i++) UNROLL for (int j = 0; j < MT; j++) { total[i][j] = zero_i(); y[i][j] = zero_f(); }
    for (int64_t b = 0; b < blocks; b++) {
        part low_part = part_of(low_bytes - b * VB), high_part = part_of(high_bytes - b * VB / 2);
        int64_t group = grouped ? job->map.first[b] : 0;
        spread lanes = grouped ? spread_of(job->map.count[b], load(job->map.map + b * LANES)) : spread_of(1, zero_i());
        vi low[4], high[4];
        UNROLL for (int i = 0; i < NT; i++) {
            low[i] = load_part(row[i] + b * VB, low_part);
            high[i] = field == 3 ? spread_high(load_half(row[i] + low_bytes + b * VB / 2, high_part)) : zero_i();
            __builtin_prefetch(row[i] + ahead + b * VB);
            if (field == 3) __builtin_prefetch(row[i] + ahead + low_bytes + b * VB / 2);
            if (grouped) UNROLL for (int j = 0; j < MT; j++)
                total[i][j] = c->zero ? zero_i() : load(sums + (j * blocks + b) * LANES);
        }
#if NARROW
        /* the phases of a block fit 16 bits together */
        vi narrow[4][4];
#endif
        UNROLL for (int k = 0; k < P; k++) {
            vi x[4];
            UNROLL for (int j = 0; j < MT; j++) x[j] = load(a + (j * blocks + b) * P * VB + k * VB);
            UNROLL for (int i = 0; i < NT; i++) {
                vi u = fields(field, k, low[i], high[i]);
#if NARROW
                UNROLL for (int j = 0; j < MT; j++) {
                    vi product = pairs(field, u, x[j]);
                    narrow[i][j] = k ? _mm256_add_epi16(narrow[i][j], product) : product;
                }
#else
                UNROLL for (int j = 0; j < MT; j++) total[i][j] = dot(field, total[i][j], u, x[j]);
#endif
            }
        }
#if NARROW
        UNROLL for (int i = 0; i < NT; i++) UNROLL for (int j = 0; j < MT; j++)
            total[i][j] = widen(total[i][j], narrow[i][j]);
#endif
        if (grouped) UNROLL for (int i = 0; i < NT; i++) {
            vf scale = spread_scales(scales[i] + group, lanes), shift = zero_f();
            if (c->zero) shift = spread_shifts(zeros[i] + group, lanes, job->offset);
            UNROLL for (int j = 0; j < MT; j++) {
                vf exact = to_f(total[i][j]);
                if (c->zero) exact = fnma_f(shift, as_f(load(sums + (j * blocks + b) * LANES)), exact);
                y[i][j] = fma_f(scale, exact, y[i][j]);
            }
        }
    }
    vi sums_of_lanes[4][4];
    UNROLL for (int i = 0; i < NT; i++) UNROLL for (int j = 0; j < MT; j++)
        sums_of_lanes[i][j] = grouped ? from_f(y[i][j]) : total[i][j];
    T(dot_finish)(job, m, n, (int)min64(MT, job->rows - m), NT, grouped, sums_of_lanes);
}

INLINE void T(dot_range)(const struct T(dot_job) *job, int64_t begin, int64_t end, const int field, const int grouped) {
    const int NT = grouped ? ROWS_GROUPED : ROWS_UNGROUPED;
    for (int64_t n = begin; n < end; n += 4) {
        int64_t m = 0, rows = job->rows;
        /* two or three rows that remain cost less as four, the last of them zero, than one by one */
        for (; m + 2 <= rows; m += 4)
            for (int i = 0; i < 4; i += NT) if (n + i < end) T(dot_tile)(job, m, n + i, field, grouped, 4, NT);
        if (m < rows) T(dot_tile)(job, m, n, field, grouped, 1, 4);
    }
}

#define DOT_RANGE(field, grouped) \
    static void T(dot_##field##_##grouped)(void *job, int64_t begin, int64_t end) { \
        T(dot_range)(job, begin, end, field, grouped); \
    }
DOT_RANGE(2, 0) DOT_RANGE(2, 1) DOT_RANGE(3, 0) DOT_RANGE(3, 1)
DOT_RANGE(4, 0) DOT_RANGE(4, 1) DOT_RANGE(8, 0) DOT_RANGE(8, 1)

/* float activations: one row only. 1 when x has to be multiplied in floats */
static int T(dot_linear)(const struct lowbit_call *c) {
    static const range_function table[4][2] = {
        {T(dot_2_0), T(dot_2_1)}, {T(dot_3_0), T(dot_3_1)}, {T(dot_4_0), T(dot_4_1)}, {T(dot_8_0), T(dot_8_1)},
    };
    const struct lowbit_problem *p = c->p;
    int P = T(per_byte)(p), digits = p->int8 ? 0 : p->type == TYPE_F32 ? 4 : 3;
    int64_t m = digits ? digits : c->m, blocks = (T(lanes_of)(p) + LANES - 1) / LANES, size = blocks * P * VB;
    int64_t padded = m == 1 ? 1 : round_up(m, 4), rows = round_up(m * 4, 64);
    int64_t quads = padded * size, sums = padded * blocks * LANES * 4;
    int64_t map = p->grouped ? round_up(T(group_map_bytes)(blocks), 64) : 0;
    char *memory = scratch(quads + sums + 2 * rows + map + size * 5);
    if (!memory) return -1;
    struct T(dot_job) job = {c, P, blocks, (int8_t *)memory, (int32_t *)(memory + quads), NULL, NULL, {0}, 0, digits, m};
    job.row_sums = (int32_t *)(memory + quads + sums);
    job.t = (float *)(memory + quads + sums + rows);
    job.offset = p->field == 8 ? OFFSET8 : (int32_t)p->offset;
    char *rest = memory + quads + sums + 2 * rows;
    if (p->grouped) job.map = T(map_groups)(p, blocks, 4 * P, rest);
    float *x = (float *)(rest + map);
    if (digits && !T(dot_prepare_digits)(&job, x, (int8_t *)(x + size))) {
        free(memory);
        return 1;
    }
    if (!digits) for (int64_t i = 0; i < m; i++) T(dot_prepare)(&job, i, x, (int8_t *)(x + size));
    memset(job.quads + m * size, 0, (size_t)((padded - m) * size));
    memset(job.lane_sums + m * blocks * LANES, 0, (size_t)((padded - m) * blocks * LANES * 4));
    parallel_rows(table[p->field == 8 ? 3 : p->field - 2][p->grouped != 0], &job, 16);
    free(memory);
    return 0;
}
