/* bfloat16 activations for the matrix tiles: x cut up, codes of W widened to what they mean.
 *
 * A code of a group can mean one of 16 numbers, s (c - z) rounded once to bfloat16, as the reference rounds W: a table of
 * them makes widening a lookup. Without groups the table holds c - z, which is exact, and the scale waits for the sum. Eight
 * bits are computed.
 */

static void amx_prepare_bf16(void *argument, int64_t begin, int64_t end) {
    struct amx_job *job = argument;
    const struct lowbit_call *c = job->c;
    int16_t places[32];
    for (int i = 0; i < 32; i++) places[i] = (int16_t)place_of_word((int)c->p->field, i);
    vi order = load(places);
    for (int64_t tile = begin; tile < end; tile++) for (int64_t u = 0; u < job->units; u++) {
        part some = part_of(2 * c->p->columns - 64 * u);
        vi rows[TILE_ROWS];
        UNROLL for (int r = 0; r < TILE_ROWS; r++) {
            int64_t m = tile * TILE_ROWS + r;
            const uint8_t *row = (const uint8_t *)((const uint16_t *)c->x + m * c->x_stride) + 64 * u;
            rows[r] = m < c->m ? _mm512_permutexvar_epi16(order, load_part(row, some)) : zero_i();
        }
        amx_interleave(rows, job->x + (tile * job->units + u) * 64 * TILE_ROWS);
    }
}

INLINE vi amx_eight_bits(__m256i stored, vf s, vf z) {
    vf a = sub_f(to_f(_mm512_cvtepi8_epi32(_mm256_castsi256_si128(stored))), z);
    vf b = sub_f(to_f(_mm512_cvtepi8_epi32(_mm256_extracti128_si256(stored, 1))), z);
    return (vi)_mm512_cvtne2ps_pbh(mul_f(b, s), mul_f(a, s));
}
INLINE vi amx_meaning(int field, const uint8_t *low, uint32_t third, vi table, vf s, vf z) {
    if (field == 8) return amx_eight_bits(_mm256_loadu_si256((const __m256i *)low), s, z);
    return _mm512_permutexvar_epi16(code_index(field, low, third), table);
}

/* `every`: units from one group to the next, 1, 2 or 4; 4 also stands for more, and for no groups */
INLINE void amx_widen_bf16(const struct amx_job *job, const float *scale, int64_t n, int64_t chunk, char *out, const int field, const int every) {
    const struct lowbit_call *c = job->c;
    const struct lowbit_problem *p = c->p;
    const int bytes = field == 3 ? 8 : 4 * field;
    int64_t first = chunk * CHUNK_UNITS, some = min64(CHUNK_UNITS, job->units - first);
    int64_t whole = min64(CHUNK_UNITS, job->whole_units - first);
    struct amx_rows rows = amx_rows_of(c, n, field);
    const uint8_t *low = rows.low + first * bytes, *high = rows.high + first * 4;
    const float *shift = scale + p->groups * PANEL;
    const int32_t *group_of = job->group_of + first;
    int64_t ahead = amx_ahead(job, chunk, CHUNK_UNITS * bytes);
    int64_t high_ahead = field == 3 ? amx_ahead(job, chunk, CHUNK_UNITS * 4) : 0;
    const int grouped = p->grouped != 0, shifted = c->zero != NULL;
    vf codes = code_table(field == 8 ? 4 : field, (int32_t)p->offset), s = set_f(1.0f), z = zero_f();
    vi table = _mm512_broadcast_i64x4((__m256i)_mm512_cvtneps_pbh(codes));
    for (int64_t r = 0; r < PASS_ROWS; r++, out += CHUNK_UNITS * 64) {
        UNROLL for (int at = 0; at < CHUNK_UNITS * bytes; at += 64) FETCH(low + ahead + at);
        if (field == 3) FETCH(high + high_ahead);
        UNROLL for (int i = 0; i < CHUNK_UNITS; i++) {
            if (whole < CHUNK_UNITS && i >= some) break;
            if (i % every == 0 && (grouped || shifted)) {
                int64_t at = group_of[i] * PANEL + r;
                if (grouped) s = set_f(scale[at]);
                if (shifted) z = set_f(shift[at]);
                if (field != 8)
                    table = _mm512_broadcast_i64x4((__m256i)_mm512_cvtneps_pbh(mul_f(sub_f(codes, z), s)));
            }
            uint32_t third = 0;
            if (whole == CHUNK_UNITS || i < whole) {
                if (field == 3) memcpy(&third, high + i * 4, 4);
                store(out + i * 64, amx_meaning(field, low + i * bytes, third, table, s, z));
            } else {
                _Alignas(64) uint8_t tail[32] = {0};
                memcpy(tail, low + i * bytes, (size_t)(rows.low_bytes - (first + i) * bytes));
                if (field == 3) memcpy(&third, high + i * 4, (size_t)(rows.high_bytes - (first + i) * 4));
                store(out + i * 64, amx_meaning(field, tail, third, table, s, z));
            }
        }
        int64_t more = r < rows.last;
        low += more ? rows.stride : 0;
        high += more ? rows.stride : 0;
    }
}

#define WIDEN(field, every) \
    static void amx_widen_bf16_##field##_##every(const struct amx_job *job, const float *scale, int64_t n, int64_t chunk, \
                                                 char *out) { \
        amx_widen_bf16(job, scale, n, chunk, out, field, every); \
    }
WIDEN(2, 1) WIDEN(2, 2) WIDEN(2, 4) WIDEN(3, 1) WIDEN(3, 2) WIDEN(3, 4)
WIDEN(4, 1) WIDEN(4, 2) WIDEN(4, 4) WIDEN(8, 1) WIDEN(8, 2) WIDEN(8, 4)
#undef WIDEN

static int amx_linear_bf16(const struct lowbit_call *c) {
    typedef void (*widen)(const struct amx_job *, const float *, int64_t, int64_t, char *);
    static const widen table[4][3] = {
        {amx_widen_bf16_2_1, amx_widen_bf16_2_2, amx_widen_bf16_2_4},
        {amx_widen_bf16_3_1, amx_widen_bf16_3_2, amx_widen_bf16_3_4},
        {amx_widen_bf16_4_1, amx_widen_bf16_4_2, amx_widen_bf16_4_4},
        {amx_widen_bf16_8_1, amx_widen_bf16_8_2, amx_widen_bf16_8_4},
    };
    const struct lowbit_problem *p = c->p;
    struct amx_job job = amx_plan(c, 32);
    int every = !p->grouped || p->group % 128 == 0 ? 2 : p->group % 64 == 0 ? 1 : 0;
    job.widen = table[p->field == 8 ? 3 : p->field - 2][every];
    return amx_run(&job, amx_prepare_bf16, job.tiles > job.tiles_a_block ? amx_slabs_range : amx_range);
}
