/* Few rows of x, float: lanes run along k, weights are used straight from memory.
 *
 * A block is BLOCK packed bytes; a lane of the vector holds part of them. Codes become floats, exactly, and meet the x of
 * their phase; the sums of a lane are multiplied by the lane's scale:
 *
 *     y += s[g] * (D - (offset + z[g]) X)        D, X: the lane's sums of x u and of x
 *
 * W itself is never rounded. Included once for each kind of product, with F(name) and the functions of a product_*.h.
 */

struct F(dot_job) {
    const struct lowbit_call *c;
    int phases;
    int64_t blocks;
    char *x;                /* [M][blocks][phases] vectors */
    float *lane_sums;       /* [M][blocks][LANES] */
    float *row_sums;        /* [M] */
    struct T(group_map) map;
    int32_t offset;         /* what float codes still carry */
};

static void F(dot_prepare)(struct F(dot_job) *job, int64_t m, float *x) {
    const struct lowbit_problem *p = job->c->p;
    int64_t phases = job->phases, lane = phases * LANE_CODES, size = job->blocks * LANES * lane;
    T(load_floats)(job->c, m, x);
    memset(x + p->columns, 0, (size_t)(size - p->columns) * 4);
    float sum = 0.0f;
    for (int64_t l = 0; l < job->blocks * LANES; l++) {
        float part = 0.0f;
        for (int64_t i = 0; i < lane; i++) part += x[l * lane + i];
        job->lane_sums[m * job->blocks * LANES + l] = part;
        sum += part;
    }
    job->row_sums[m] = sum;
    char *out = job->x + m * job->blocks * phases * VB;
    for (int64_t b = 0; b < job->blocks; b++)
        for (int64_t i = 0; i < phases; i++)
            F(gather_phase)(out + (b * phases + i) * VB, x + b * LANES * lane + i, phases);
}

static void __attribute__((noinline)) F(dot_finish)(const struct F(dot_job) *job, int64_t m, int64_t n, int MT, int NT,
                                                    int grouped, vf sums[4][4]) {
    const struct lowbit_call *c = job->c;
    const struct lowbit_problem *p = c->p;
    for (int i = 0; i < NT && n + i < p->rows; i++) {
        float scale = grouped ? 1.0f : load_scale(c, n + i, 0);
        float bias = c->bias ? load_element(c->bias, c->bias_type, n + i) : 0.0f;
        int32_t shift = grouped ? 0 : job->offset + (c->zero ? c->zero[(n + i) * p->scale_stride] : 0);
        for (int j = 0; j < MT; j++) {
            float out = sum_f(sums[i][j]);
            if (shift) out -= (float)shift * job->row_sums[m + j];
            out *= scale;
            store_element(c->y, p->type, (m + j) * p->rows + n + i, c->bias ? out + bias : out);
        }
    }
}

INLINE void F(dot_tile)(const struct F(dot_job) *job, int64_t m, int64_t n, const int field, const int grouped,
                        const int MT, const int NT) {
    const struct lowbit_call *c = job->c;
    const struct lowbit_problem *p = c->p;
    const int phases = F(phases)(field), shifted = FLOAT_SHIFT && field != 8;
    int64_t blocks = job->blocks, high_bytes = (p->columns + 7) / 8, low_bytes = p->row_bytes - (field == 3 ? high_bytes : 0);
    const uint8_t *row[4];
    const uint16_t *scales[4];
    const int8_t *zeros[4];
    /* fetched ahead: the same place of rows that come later, far enough for memory to answer */
    int64_t ahead = round_up(8192, NT * p->row_bytes);
    UNROLL for (int i = 0; i < NT; i++) {
        int64_t r = min64(n + i, p->rows - 1);
        row[i] = c->weight + r * p->row_bytes;
        scales[i] = (const uint16_t *)c->scale + r * p->scale_stride;
        zeros[i] = c->zero + r * p->scale_stride;
    }
    const char *x = job->x + m * blocks * phases * VB;
    const float *sums = job->lane_sums + m * blocks * LANES;
    vi table = F(code_table)(field, (int32_t)p->offset);
    vf y[4][4], total[4][4];
    UNROLL for (int i = 0; i < NT; i++) UNROLL for (int j = 0; j < MT; j++) y[i][j] = total[i][j] = zero_f();
    for (int64_t b = 0; b < blocks; b++) {
        part low_part = part_of(low_bytes - b * BLOCK), high_part = part_of(high_bytes - b * BLOCK / 2);
        int64_t group = grouped ? job->map.first[b] : 0;
        spread lanes = grouped ? spread_of(job->map.count[b], load(job->map.map + b * LANES)) : spread_of(1, zero_i());
        vi low[4], high[4];
        UNROLL for (int i = 0; i < NT; i++) {
            low[i] = F(load_block)(row[i] + b * BLOCK, low_part, field);
            high[i] = field == 3 ? F(load_high)(row[i] + low_bytes + b * BLOCK / 2, high_part) : zero_i();
            __builtin_prefetch(row[i] + ahead + b * BLOCK);
            if (field == 3) __builtin_prefetch(row[i] + ahead + low_bytes + b * BLOCK / 2);
            if (grouped) UNROLL for (int j = 0; j < MT; j++) total[i][j] = zero_f();
        }
        UNROLL for (int k = 0; k < phases; k++) {
            vi part_of_x[4];
            UNROLL for (int j = 0; j < MT; j++) part_of_x[j] = load(x + ((j * blocks + b) * phases + k) * VB);
            UNROLL for (int i = 0; i < NT; i++) {
                vi code = F(code)(field, k, low[i], high[i], table);
                UNROLL for (int j = 0; j < MT; j++) total[i][j] = F(product)(total[i][j], code, part_of_x[j]);
            }
        }
        if (grouped) UNROLL for (int i = 0; i < NT; i++) {
            vf scale = spread_scales(scales[i] + group, lanes), shift = zero_f();
            if (c->zero) shift = spread_shifts(zeros[i] + group, lanes, job->offset);
            else if (shifted) shift = set_f((float)job->offset);
            UNROLL for (int j = 0; j < MT; j++) {
                vf sum = total[i][j];
                if (c->zero || shifted) sum = fnma_f(shift, load_f(sums + (j * blocks + b) * LANES), sum);
                y[i][j] = fma_f(scale, sum, y[i][j]);
            }
        }
    }
    vf sums_of_lanes[4][4];
    UNROLL for (int i = 0; i < NT; i++) UNROLL for (int j = 0; j < MT; j++)
        sums_of_lanes[i][j] = grouped ? y[i][j] : total[i][j];
    F(dot_finish)(job, m, n, (int)min64(MT, c->m - m), NT, grouped, sums_of_lanes);
}

INLINE void F(dot_range)(const struct F(dot_job) *job, int64_t begin, int64_t end, const int field, const int grouped) {
    for (int64_t n = begin; n < end; n += 4) {
        int64_t m = 0, rows = job->c->m;
        for (; m + 2 <= rows; m += 4)
            for (int i = 0; i < 4; i += 2) if (n + i < end) F(dot_tile)(job, m, n + i, field, grouped, 4, 2);
        if (m < rows) F(dot_tile)(job, m, n, field, grouped, 1, 4);
    }
}

#define FLOAT_DOT(field, grouped) \
    static void F(dot_##field##_##grouped)(void *job, int64_t begin, int64_t end) { \
        F(dot_range)(job, begin, end, field, grouped); \
    }
FLOAT_DOT(2, 0) FLOAT_DOT(2, 1) FLOAT_DOT(3, 0) FLOAT_DOT(3, 1)
FLOAT_DOT(4, 0) FLOAT_DOT(4, 1) FLOAT_DOT(8, 0) FLOAT_DOT(8, 1)
#undef FLOAT_DOT

static int F(dot_linear)(const struct lowbit_call *c) {
    static const range_function table[4][2] = {
        {F(dot_2_0), F(dot_2_1)}, {F(dot_3_0), F(dot_3_1)}, {F(dot_4_0), F(dot_4_1)}, {F(dot_8_0), F(dot_8_1)},
    };
    const struct lowbit_problem *p = c->p;
    int phases = F(phases)((int)p->field), lane = phases * LANE_CODES;
    int64_t blocks = (p->columns + LANES * lane - 1) / (LANES * lane);
    int64_t padded = c->m == 1 ? 1 : round_up(c->m, 4), rows = round_up(c->m * 4, 64);
    int64_t x = padded * blocks * phases * VB, sums = padded * blocks * LANES * 4;
    int64_t map = p->grouped ? round_up(T(group_map_bytes)(blocks), 64) : 0;
    char *memory = scratch(x + sums + rows + map + blocks * LANES * lane * 4);
    if (!memory) return -1;
    struct F(dot_job) job = {c, phases, blocks, memory, (float *)(memory + x), (float *)(memory + x + sums), {0}, 0};
    job.offset = FLOAT_SHIFT && p->field != 8 ? (int32_t)p->offset : 0;
    if (p->grouped) job.map = T(map_groups)(p, blocks, lane, memory + x + sums + rows);
    float *floats = (float *)(memory + x + sums + rows + map);
    for (int64_t m = 0; m < c->m; m++) F(dot_prepare)(&job, m, floats);
    memset(job.x + c->m * blocks * phases * VB, 0, (size_t)((padded - c->m) * blocks * phases * VB));
    memset(job.lane_sums + c->m * blocks * LANES, 0, (size_t)((padded - c->m) * blocks * LANES * 4));
    parallel_rows(table[p->field == 8 ? 3 : p->field - 2][p->grouped != 0], &job, 16);
    free(memory);
    return 0;
}
