/* Products with the live blocks of a weight, as the tiers see them.
 *
 *     y[m, r bn + i] = sum_{b in row r} sum_k x[m, c(b) bk + k] V[b, i, k]
 *
 * Blocks of a row lie one after the other. Sums are float32, in the order of the blocks; x counts as zero from K on.
 */
#ifndef LOWBIT_BLOCKS_H
#define LOWBIT_BLOCKS_H
#include "problem.h"

/* filled by Python: only fields of eight bytes, so that ctypes and C agree without padding */
struct lowbit_blocks {
    int64_t type;                        /* of x, y, and V unless it is low-bit */
    int64_t block_rows, height, width;   /* NB, bn, bk */
    int64_t live;                        /* blocks a block row, where `pointers` is NULL */
    int64_t in_features, m, x_stride;    /* elements from one row of x to the next; along K they are adjacent */
    int64_t threads;
    int64_t field, offset, row_bytes;    /* of low-bit blocks, as in problem.h; field 0: V are numbers */
    int64_t int8;                        /* int8 activations */
    const void *x, *values;
    const uint16_t *scale;               /* s, bfloat16 */
    const int32_t *columns, *pointers;   /* c(b); first block of each block row, and the number of all */
    void *y;                             /* [M, NB bn] */
};

/* the gradient of live blocks, all in bfloat16; fields as above */
struct lowbit_block_gradient {
    int64_t block_rows, height, width, live, in_features, m, x_stride, dy_stride, threads;
    const void *x, *dy;                  /* [M, K], [M, NB bn] */
    const int32_t *columns, *pointers;
    void *out;                           /* as the blocks lie */
};

/* `x`: what a tier makes of x once a call; `columns`: K up to whole blocks */
struct blocks_job { const struct lowbit_blocks *p; float *x; int64_t columns; int failed; };

static inline int64_t first_block(const struct lowbit_blocks *p, int64_t r) {
    return p->pointers ? p->pointers[r] : r * p->live;
}
static inline int64_t columns_of_blocks(const struct lowbit_blocks *p) {
    return round_up(p->in_features, p->width);
}
/* blocks of the longest of the block rows [begin, end) */
static inline int64_t most_live(const struct lowbit_blocks *p, int64_t begin, int64_t end) {
    int64_t most = p->live;
    for (int64_t r = begin; p->pointers && r < end; r++) {
        int64_t blocks = first_block(p, r + 1) - first_block(p, r);
        if (r == begin || blocks > most) most = blocks;
    }
    return most;
}
static inline int64_t bytes_of_type(const struct lowbit_blocks *p) { return p->type == TYPE_F32 ? 4 : 2; }
static inline const void *element_at(const struct lowbit_blocks *p, const void *base, int64_t i) {
    return (const char *)base + i * bytes_of_type(p);
}

#endif
