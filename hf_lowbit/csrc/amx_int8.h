/* int8 activations for the matrix tiles: x quantized and cut up, codes of W widened to signed bytes.
 *
 * Below 8 bits codes are widened less their zero point, which fits 8 bits too: the sums then need a scale and nothing else.
 * Eight bits with zero points subtract z times the sum of x later, as panel.h does.
 */

/* which of 32 adjacent codes stands at place i: those of the first field of each byte, then of the second, ... */
INLINE int place_of_byte(int field, int i) {
    return field == 8 ? i : field == 4 ? i % 16 * 2 + i / 16 : i % 8 * 4 + i / 8;
}

static void amx_prepare_int8(void *argument, int64_t begin, int64_t end) {
    struct amx_job *job = argument;
    const struct lowbit_problem *p = job->c->p;
    int64_t size = job->units * 64;
    float *x = scratch(round_up(p->columns * 4, 64) + size * TILE_ROWS);
    if (!x) { job->failed = 1; return; }
    int8_t *codes = (int8_t *)x + round_up(p->columns * 4, 64), places[64];
    for (int i = 0; i < 64; i++) places[i] = (int8_t)(i / 32 * 32 + place_of_byte((int)p->field, i % 32));
    vi order = load(places);
    for (int64_t tile = begin; tile < end; tile++) {
        for (int64_t r = 0; r < TILE_ROWS; r++) {
            int64_t m = tile * TILE_ROWS + r;
            int8_t *row = codes + r * size;
            job->t[m] = 0.0f;
            if (m < job->c->m) {
                T(load_floats)(job->c, m, x);
                job->t[m] = T(quantize_row)(x, p->columns, row);
                memset(row + p->columns, 0, (size_t)(size - p->columns));
            } else memset(row, 0, (size_t)size);
            if (job->sums) for (int64_t g = 0; g < p->groups; g++) {
                int64_t first = g * p->group;
                int32_t sum = T(sum_codes)(row + first, min64(p->group, p->columns - first));
                job->sums[(tile * p->groups + g) * TILE_ROWS + r] = (float)sum;
            }
        }
        for (int64_t u = 0; u < job->units; u++) {
            vi rows[TILE_ROWS];
            UNROLL for (int r = 0; r < TILE_ROWS; r++)
                rows[r] = _mm512_permutexvar_epi8(order, load(codes + r * size + u * 64));
            amx_interleave(rows, job->x + (tile * job->units + u) * 64 * TILE_ROWS);
        }
    }
    free(x);
}

/* 64 fields from `low` (and `high`, the third bits), in the order of `place_of_byte`; bytes outside the parts count as zero */
INLINE vi amx_fields(int field, const uint8_t *low, part low_part, const uint8_t *high, part high_part) {
    if (field == 8) return load_part(low, low_part);
    if (field == 4) {
        vi halves = _mm512_permutexvar_epi64(_mm512_setr_epi64(0, 1, 0, 1, 2, 3, 2, 3), load_half(low, low_part));
        vi shifts = _mm512_setr_epi32(0, 0, 0, 0, 4, 4, 4, 4, 0, 0, 0, 0, 4, 4, 4, 4);
        return and_i(_mm512_srlv_epi32(halves, shifts), _mm512_set1_epi8(15));
    }
    vi quarter = _mm512_castsi128_si512(_mm_maskz_loadu_epi8((__mmask16)low_part, low));
    vi spread_out = _mm512_permutexvar_epi64(_mm512_setr_epi64(0, 0, 0, 0, 1, 1, 1, 1), quarter);
    vi two = and_i(_mm512_srlv_epi64(spread_out, _mm512_setr_epi64(0, 2, 4, 6, 0, 2, 4, 6)), _mm512_set1_epi8(3));
    if (field == 2) return two;
    /* brings the bit of each code to bit 2 of its byte */
    vi bits = _mm512_broadcastq_epi64(_mm_maskz_loadu_epi8((__mmask16)high_part, high));
    vi first = _mm512_set1_epi64(0x1a16120e0a06023e), all = _mm512_set1_epi64(0x0101010101010101);
    vi phase = _mm512_mullo_epi64(all, _mm512_setr_epi64(0, 1, 2, 3, 32, 33, 34, 35));
    vi control = and_i(_mm512_add_epi8(first, phase), _mm512_set1_epi8(63));
    return _mm512_ternarylogic_epi32(two, _mm512_multishift_epi64_epi8(control, bits), _mm512_set1_epi8(4), 0xf8);
}

INLINE void amx_widen(const struct amx_job *job, int64_t n, int64_t chunk, char *out, const int field, const int shifted) {
    const struct lowbit_call *c = job->c;
    const struct lowbit_problem *p = c->p;
    const int bytes = field == 3 ? 16 : 8 * field;
    int64_t first = chunk * CHUNK_UNITS, some = min64(CHUNK_UNITS, job->units - first);
    int64_t whole = min64(CHUNK_UNITS, job->whole_units - first), stride = p->scale_stride;
    struct amx_rows rows = amx_rows_of(c, n, field);
    const uint8_t *low = rows.low + first * bytes, *high = rows.high + first * 8;
    const int8_t *zero = c->zero + n * stride;
    const int32_t *group_of = job->group_of + 2 * first;
    int64_t ahead = amx_ahead(job, chunk, CHUNK_UNITS * bytes);
    int64_t high_ahead = field == 3 ? amx_ahead(job, chunk, CHUNK_UNITS * 8) : 0;
    vi offset = _mm512_set1_epi8((char)p->offset);
#define UNIT_AT(i, low_part, high_part) do { \
        vi codes = amx_fields(field, low + (i) * bytes, low_part, high + (i) * 8, high_part); \
        if (field != 8) codes = _mm512_sub_epi8(codes, offset); \
        if (shifted) { \
            vi z = _mm512_set1_epi8(zero[group_of[2 * (i) + 1]]); \
            codes = _mm512_sub_epi8(codes, _mm512_mask_set1_epi8(z, 0xffffffff, zero[group_of[2 * (i)]])); \
        } \
        store(out + (i) * 64, codes); \
    } while (0)
    for (int64_t r = 0; r < PASS_ROWS; r++, out += CHUNK_UNITS * 64) {
        UNROLL for (int at = 0; at < CHUNK_UNITS * bytes; at += 64) FETCH(low + ahead + at);
        if (field == 3) FETCH(high + high_ahead);
        if (whole == CHUNK_UNITS) { UNROLL for (int i = 0; i < CHUNK_UNITS; i++) UNIT_AT(i, ~0ull, 0xff); }
        else for (int64_t i = 0; i < some; i++) {
            part low_part = part_of(rows.low_bytes - (first + i) * bytes);
            UNIT_AT(i, low_part, part_of(rows.high_bytes - (first + i) * 8) & 0xff);
        }
        int64_t more = r < rows.last;
        low += more ? rows.stride : 0;
        high += more ? rows.stride : 0;
        zero += more ? stride : 0;
    }
#undef UNIT_AT
}

#define WIDEN(field, shifted) \
    static void amx_widen_##field##_##shifted(const struct amx_job *job, const float *scale, int64_t n, int64_t chunk, char *out) { \
        (void)scale; \
        amx_widen(job, n, chunk, out, field, shifted); \
    }
WIDEN(2, 0) WIDEN(2, 1) WIDEN(3, 0) WIDEN(3, 1) WIDEN(4, 0) WIDEN(4, 1) WIDEN(8, 0)
#undef WIDEN

static int amx_linear_int8(const struct lowbit_call *c) {
    const struct lowbit_problem *p = c->p;
    struct amx_job job = amx_plan(c, 64);
    int zeros = c->zero != NULL;
    job.widen = p->field == 2 ? (zeros ? amx_widen_2_1 : amx_widen_2_0)
              : p->field == 3 ? (zeros ? amx_widen_3_1 : amx_widen_3_0)
              : p->field == 4 ? (zeros ? amx_widen_4_1 : amx_widen_4_0) : amx_widen_8_0;
    if (p->grouped && p->group % 64) job.step = 8;
    if (p->field == 8 && zeros && !(job.sums = scratch(job.tiles * TILE_ROWS * p->groups * 4))) job.failed = 1;
    return amx_run(&job, amx_prepare_int8, amx_range);
}
