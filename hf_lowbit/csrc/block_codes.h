/* Integer products with low-bit live blocks: included once for each tier, with T(name) and the vectors of a vector_*.h.
 *
 *     y[m, r bn + i] = t[m] sum_{b in row r} s[b, i] sum_k a[m, c(b) bk + k] q[b, i, k]
 *
 * The inner sum is an exact integer; products with the scale are rounded to float32, and added in the order of the blocks. So
 * every tier gives the same bits. a are int8 activations, or pairs of digits, r_d + 256 r_{d+1}, of few rows of floats
 * (activations.h): each row is two rows of integers then, whose products are added from the lower one up.
 *
 * Few rows: the codes of several rows of a block fill a vector as they lie; sums of neighbouring lanes are added until each
 * row has one lane, in order. Many rows: lanes run along rows of x, and four codes at a time meet all of them.
 */

struct T(codes_job) {
    const struct lowbit_blocks *p;
    int64_t sets, block_columns;    /* rows of integers; KB */
    int64_t row, place;             /* bytes of a row of a block as vectors see it, and of x beside a phase of it */
    int digits;                     /* of a row of x; 0 for int8 activations */
    int8_t *x;                      /* few: [digits of all rows][KB][P][place]; many: [panel][KB][bk / 4][LANES][4] */
    int32_t *shift;                 /* -offset times the sum of x over a block: few [digits of all rows][KB], many
                                       [panel][KB][LANES] */
    float *t;                       /* [sets] */
    int failed;
};

static inline int32_t T(stored_offset)(const struct lowbit_blocks *p) { return p->field == 8 ? OFFSET8 : (int32_t)p->offset; }
static inline struct lowbit_problem T(problem_of_x)(const struct lowbit_blocks *p) {
    return (struct lowbit_problem){.type = p->type, .columns = p->in_features};
}

/* `row` bytes, as often as a vector holds them */
INLINE void T(repeat)(int8_t *out, const int8_t *from, int64_t row) {
    switch (row) {
    case 4: UNROLL for (int j = 0; j < VB / 4; j++) memcpy(out + 4 * j, from, 4); break;
    case 8: UNROLL for (int j = 0; j < VB / 8; j++) memcpy(out + 8 * j, from, 8); break;
    case 16: UNROLL for (int j = 0; j < VB / 16; j++) memcpy(out + 16 * j, from, 16); break;
    case 32: UNROLL for (int j = 0; j < VB / 32; j++) memcpy(out + 32 * j, from, 32); break;
    default: memcpy(out, from, (size_t)row);
    }
}

/* the phases of one row of int8, block by block, as often as rows of a block share a vector; what follows the row is zero.
 * `planes`: room for the row, VB P bytes more */
INLINE void T(place_codes)(const struct T(codes_job) *job, int64_t row, const int8_t *codes, int8_t *planes, const int P) {
    int64_t width = job->p->width, place = job->place, apart = round_up(job->block_columns * width, VB * P) / P;
    int8_t *out = job->x + row * job->block_columns * P * place;
    int32_t factor = -T(stored_offset)(job->p), *shift = job->shift + row * job->block_columns;
    int repeats = (int)(place / job->row), whole = width == P * job->row;
    if (P == 1) planes = (int8_t *)codes;
    else if (whole) for (int64_t j = 0; j < apart; j += VB) T(split_phases)(codes + j * P, planes + j, apart, P);
    for (int64_t c = 0; c < job->block_columns; c++, out += P * place) {
        if (whole) for (int i = 0; i < P; i++) T(repeat)(out + i * place, planes + i * apart + c * job->row, job->row);
        else {
            memset(out, 0, (size_t)(P * place));
            for (int64_t k = 0; k < width; k++) for (int64_t j = k / P; j < place; j += job->row)
                out[k % P * place + j] = codes[c * width + k];
        }
        vi sum = zero_i(), ones = set_i(0x01010101);
        for (int64_t j = 0; j < P * place; j += VB) sum = dot(0, sum, ones, load(out + j));
        shift[c] = factor * (sum_i(sum) / repeats);
    }
}
static void T(place_row)(const struct T(codes_job) *job, int64_t row, int8_t *codes, int8_t *planes) {
    const struct lowbit_blocks *p = job->p;
    if (p->field == 8) T(place_codes)(job, row, codes, planes, 1);
    else if (p->field == 4) T(place_codes)(job, row, codes, planes, 2);
    else T(place_codes)(job, row, codes, planes, 4);
}

/* 1 when a row of x can't be cut into digits, -1 when there is no memory */
static int T(place_x)(struct T(codes_job) *job) {
    const struct lowbit_blocks *p = job->p;
    struct lowbit_problem problem = T(problem_of_x)(p);
    struct lowbit_call c = {.p = &problem, .x = p->x, .x_stride = p->x_stride};
    int64_t columns = round_up(job->block_columns * p->width, 4 * VB);
    float *x = scratch(columns * 6);
    if (!x) return -1;
    int8_t *codes = (int8_t *)(x + columns), *planes = codes + columns;
    int status = 0;
    memset(codes, 0, (size_t)columns);
    for (int64_t m = 0; m < p->m && !status; m++) {
        T(load_floats)(&c, m, x);
        if (!job->digits) {
            job->t[m] = T(quantize_row)(x, p->in_features, codes);
            T(place_row)(job, m, codes, planes);
            continue;
        }
        float t = T(fixed_point)(x, p->in_features, job->digits);
        if (t == 0.0f) status = 1;
        else for (int64_t d = 0; d < job->digits; d++) {
            T(next_digit)((int32_t *)x, p->in_features, codes);
            T(place_row)(job, m * job->digits + d, codes, planes);
            if (d % 2 == 0) job->t[m * 2 + d / 2] = t * (float)(1 << 8 * d);
        }
    }
    free(x);
    return status;
}

INLINE vi T(times_256)(vi v) {
#if LANES == 16
    return _mm512_slli_epi32(v, 8);
#else
    return _mm256_slli_epi32(v, 8);
#endif
}

/* sums of neighbouring lanes of a and then of b, in order */
INLINE vi T(halve)(vi a, vi b) {
#if LANES == 16
    vi even = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30), odd = add_i(even, set_i(1));
    return add_i(_mm512_permutex2var_epi32(a, even, b), _mm512_permutex2var_epi32(a, odd, b));
#else
    return _mm256_permute4x64_epi64(_mm256_hadd_epi32(a, b), 0xd8);
#endif
}

/* LANES rows of a block from `tile` with one row of integers: their sums. V vectors hold the rows, or the sums of each where a
 * row fills `pieces` vectors. `second`: how far behind a digit the next one lies, 0 where there is none */
INLINE vi T(rows_times_x)(const uint8_t *tile, const int8_t *x, int64_t place, int64_t pieces, int64_t second, const int two,
                          const int field, const int V) {
    vi sum[LANES];
    UNROLL for (int v = 0; v < V; v++) {
        vi low = zero_i(), high = zero_i();
        for (int64_t piece = 0; piece < pieces; piece++) UNROLL for (int k = 0; k < 8 / field; k++) {
            vi u = fields(field, k, load(tile + (v * pieces + piece) * VB), zero_i());
            const int8_t *a = x + k * place + piece * VB;
            low = dot(field, low, u, load(a));
            if (two) high = dot(field, high, u, load(a + second));
        }
        sum[v] = two ? add_i(low, T(times_256)(high)) : low;
    }
    /* the compiler keeps sums in registers only where every bound is a constant */
    if (V > 8) UNROLL for (int v = 0; v < V / 2; v++) sum[v] = T(halve)(sum[2 * v], sum[2 * v + 1]);
    if (V > 4) UNROLL for (int v = 0; v < 4; v++) sum[v] = T(halve)(sum[2 * v], sum[2 * v + 1]);
    if (V > 2) UNROLL for (int v = 0; v < 2; v++) sum[v] = T(halve)(sum[2 * v], sum[2 * v + 1]);
    return V > 1 ? T(halve)(sum[0], sum[1]) : sum[0];
}

/* rows [i, i + LANES) of a block, copied where they don't fill vectors or end before */
static const uint8_t *T(tile_of_rows)(const struct T(codes_job) *job, const uint8_t *block, int64_t i, uint8_t *copy) {
    const struct lowbit_blocks *p = job->p;
    if (job->row == p->row_bytes && i + LANES <= p->height) return block + i * p->row_bytes;
    for (int64_t j = 0; j < LANES && i + j < p->height; j++)
        memcpy(copy + j * job->row, block + (i + j) * p->row_bytes, (size_t)p->row_bytes);
    return copy;
}
static vf T(scales_of_rows)(const struct lowbit_blocks *p, int64_t block, int64_t i) {
    if (i + LANES <= p->height) return T(values_at)(p->scale, TYPE_BF16, block * p->height + i);
    float some[LANES] = {0};
    for (int64_t j = 0; i + j < p->height; j++) some[j] = float_of_bf16(p->scale[block * p->height + i + j]);
    return load_f(some);
}

INLINE void T(few_codes_of_rows)(struct T(codes_job) *job, int64_t begin, int64_t end, const int field, const int V) {
    const struct lowbit_blocks *p = job->p;
    const int P = 8 / field;
    int64_t padded = round_up(p->height, LANES), pieces = job->row > VB ? job->row / VB : 1, columns = job->block_columns;
    int64_t sets_a_row = job->digits ? 2 : 1, second = columns * P * job->place;
    float *sums = scratch(job->sets * padded * 4);
    uint8_t *copy = scratch(LANES * job->row);
    if (!sums || !copy) { job->failed = 1; free(sums); free(copy); return; }
    memset(copy, 0, (size_t)(LANES * job->row));
    for (int64_t r = begin; r < end; r++) {
        memset(sums, 0, (size_t)(job->sets * padded * 4));
        for (int64_t b = first_block(p, r), last = first_block(p, r + 1); b < last; b++) {
            const uint8_t *block = (const uint8_t *)p->values + b * p->height * p->row_bytes;
            for (int64_t i = 0; i < p->height; i += LANES) {
                const uint8_t *tile = T(tile_of_rows)(job, block, i, copy);
                vf scale = T(scales_of_rows)(p, b, i);
                for (int64_t set = 0; set < job->sets; set++) {
                    int64_t digit = set % 2 * 2, row = job->digits ? set / 2 * job->digits + digit : set;
                    int64_t at = row * columns + p->columns[b];
                    const int8_t *x = job->x + at * P * job->place;
                    int32_t shift = job->shift[at];
                    float *out = sums + set * padded + i;
                    vi sum;
                    if (job->digits > digit + 1) {
                        shift += job->shift[at + columns] * 256;
                        sum = T(rows_times_x)(tile, x, job->place, pieces, second, 1, field, V);
                    } else sum = T(rows_times_x)(tile, x, job->place, pieces, 0, 0, field, V);
                    store_f(out, add_f(load_f(out), mul_f(scale, to_f(add_i(sum, set_i(shift))))));
                }
            }
        }
        for (int64_t m = 0; m < p->m; m++) for (int64_t i = 0; i < p->height; i++) {
            float whole = 0.0f;
            for (int64_t set = m * sets_a_row; set < (m + 1) * sets_a_row; set++) whole += sums[set * padded + i] * job->t[set];
            store_element(p->y, p->type, (m * p->block_rows + r) * p->height + i, whole);
        }
    }
    free(sums);
    free(copy);
}

#define EACH_VECTORS(field) \
    switch (job->row >= VB ? LANES : job->row / 4) { \
    case 1: T(few_codes_of_rows)(job, begin, end, field, 1); break; \
    case 2: T(few_codes_of_rows)(job, begin, end, field, 2); break; \
    case 4: T(few_codes_of_rows)(job, begin, end, field, 4); break; \
    case 8: T(few_codes_of_rows)(job, begin, end, field, 8); break; \
    default: T(few_codes_of_rows)(job, begin, end, field, LANES); \
    }
static void T(few_codes_range)(void *argument, int64_t begin, int64_t end) {
    struct T(codes_job) *job = argument;
    if (job->p->field == 8) EACH_VECTORS(8)
    else if (job->p->field == 4) EACH_VECTORS(4)
    else EACH_VECTORS(2)
}
#undef EACH_VECTORS

static void T(panel_codes_range)(void *argument, int64_t begin, int64_t end) {
    struct T(codes_job) *job = argument;
    const struct lowbit_blocks *p = job->p;
    struct lowbit_problem problem = T(problem_of_x)(p);
    struct lowbit_call c = {.p = &problem, .x = p->x, .x_stride = p->x_stride};
    int64_t columns = job->block_columns * p->width, quads = (p->width + 3) / 4;
    int32_t offset = T(stored_offset)(p);
    float *x = scratch(columns * 5);
    if (!x) { job->failed = 1; return; }
    int8_t *codes = (int8_t *)(x + columns);
    for (int64_t panel = begin; panel < end; panel++) for (int64_t j = 0; j < LANES; j++) {
        int64_t m = panel * LANES + j, first = panel * job->block_columns;
        memset(codes, 0, (size_t)columns);
        if (m < p->m) {
            T(load_floats)(&c, m, x);
            job->t[m] = T(quantize_row)(x, p->in_features, codes);
        }
        for (int64_t b = 0; b < job->block_columns; b++) {
            const int8_t *a = codes + b * p->width;
            int8_t *out = job->x + ((first + b) * quads * LANES + j) * 4;
            job->shift[(first + b) * LANES + j] = -offset * T(sum_codes)(a, p->width);
            for (int64_t k = 0; k + 4 <= p->width; k += 4) memcpy(out + k * LANES, a + k, 4);
            if (p->width % 4) {
                int8_t end_of_row[4] = {0};
                memcpy(end_of_row, a + quads * 4 - 4, (size_t)(p->width % 4));
                memcpy(out + (quads - 1) * 4 * LANES, end_of_row, 4);
            }
        }
    }
    free(x);
}

/* sums [rows][LANES] += s times `rows` rows of a block at u, with a panel */
INLINE void T(codes_times_panel)(const uint8_t *u, const int8_t *x, int64_t quads, vi shift, const uint16_t *scale, float *sums,
                                 const int field, const int rows) {
    vi sum[HEIGHT];
    UNROLL for (int i = 0; i < rows; i++) sum[i] = shift;
    for (int64_t k = 0; k < quads; k++) {
        vi a = load(x + k * VB);
        UNROLL for (int i = 0; i < rows; i++) {
            int32_t four;
            memcpy(&four, u + (i * quads + k) * 4, 4);
            sum[i] = dot(field, sum[i], set_i(four), a);
        }
    }
    UNROLL for (int i = 0; i < rows; i++) {
        float *out = sums + i * LANES;
        store_f(out, add_f(load_f(out), mul_f(set_f(float_of_bf16(scale[i])), to_f(sum[i]))));
    }
}

INLINE void T(many_codes_of_rows)(struct T(codes_job) *job, int64_t begin, int64_t end, const int field) {
    const struct lowbit_blocks *p = job->p;
    struct lowbit_problem problem = {.field = p->field, .columns = p->width, .row_bytes = p->row_bytes};
    int64_t quads = (p->width + 3) / 4, most = most_live(p, begin, end);
    float *sums = scratch(p->height * LANES * 4);
    uint8_t *wide = scratch(most * p->height * quads * 4);
    char *bytes = scratch(p->width + 8);
    if (!sums || !wide || !bytes) job->failed = 1;
    else for (int64_t r = begin; r < end; r++) {
        int64_t b0 = first_block(p, r), blocks = first_block(p, r + 1) - b0;
        for (int64_t i = 0; i < blocks * p->height; i++) {
            const uint8_t *stored = (const uint8_t *)p->values + (b0 * p->height + i) * p->row_bytes;
            const int8_t *u = T(unpack_fields)(&problem, stored, bytes);
            uint8_t *out = wide + i * quads * 4;
            memset(out + quads * 4 - 4, 0, 4);
            for (int64_t k = 0; k < p->width; k++) out[k] = (uint8_t)u[k] ^ (field == 8 ? OFFSET8 : 0);
        }
        for (int64_t m = 0; m < p->m; m += LANES) {
            memset(sums, 0, (size_t)(p->height * LANES * 4));
            for (int64_t b = 0; b < blocks; b++) {
                int64_t at = m / LANES * job->block_columns + p->columns[b0 + b], i = 0;
                const int8_t *x = job->x + at * quads * VB;
                const uint16_t *scale = p->scale + (b0 + b) * p->height;
                const uint8_t *u = wide + b * p->height * quads * 4;
                vi shift = load(job->shift + at * LANES);
                for (; i + HEIGHT <= p->height; i += HEIGHT)
                    T(codes_times_panel)(u + i * quads * 4, x, quads, shift, scale + i, sums + i * LANES, field, HEIGHT);
                for (; i < p->height; i++)
                    T(codes_times_panel)(u + i * quads * 4, x, quads, shift, scale + i, sums + i * LANES, field, 1);
            }
            for (int64_t j = 0; j < LANES && m + j < p->m; j++) for (int64_t i = 0; i < p->height; i++)
                store_element(p->y, p->type, ((m + j) * p->block_rows + r) * p->height + i, sums[i * LANES + j] * job->t[m + j]);
        }
    }
    free(sums);
    free(wide);
    free(bytes);
}
static void T(many_codes_range)(void *argument, int64_t begin, int64_t end) {
    struct T(codes_job) *job = argument;
    if (job->p->field == 8) T(many_codes_of_rows)(job, begin, end, 8);
    else T(many_codes_of_rows)(job, begin, end, 4);
}

/* 1 when x is to be multiplied as floats: more rows than digits pay for, or one that can't be cut up */
static int T(codes_linear)(const struct lowbit_blocks *p) {
    int digits = p->int8 ? 0 : p->type == TYPE_F32 ? 4 : 3, P = (int)(8 / p->field), few = !p->int8 || p->m <= LANES / 2;
    /* 2^16 times 128 codes of 8 bits fit 32 bits */
    if (digits && (NARROW || p->m > FEW_DIGIT_ROWS || p->width > 128)) return 1;
    int64_t columns = round_up(p->in_features, p->width) / p->width, row = 4;
    int64_t rows = p->m * (digits ? digits : 1), sets = p->m * (digits ? 2 : 1);
    while (row < p->row_bytes && row < VB) row *= 2;
    row = round_up(p->row_bytes > row ? p->row_bytes : row, row);
    int64_t place = row > VB ? row : VB, panels = (p->m + LANES - 1) / LANES;
    int64_t x = few ? rows * columns * P * place : panels * columns * ((p->width + 3) / 4) * VB;
    int64_t shift = round_up((few ? rows : panels * LANES) * columns * 4, 64);
    char *memory = scratch(x + shift + sets * 4);
    if (!memory) return -1;
    struct T(codes_job) job = {p, sets, columns, row, place, digits, (int8_t *)memory, (int32_t *)(memory + x), NULL, 0};
    job.t = (float *)(memory + x + shift);
    int status = 0;
    if (few) status = T(place_x)(&job);
    else parallel_for(T(panel_codes_range), &job, panels, 1, (int)p->threads);
    if (!status) parallel_for(few ? T(few_codes_range) : T(many_codes_range), &job, p->block_rows, 1, (int)p->threads);
    free(memory);
    return job.failed ? -1 : status;
}
