"""Products with the live blocks of a weight on tensor cores: forward, a fused SwiGLU, and the gradient of the blocks.

    product    y[m, r bn + i] = sum_{b in row r} sum_k x[m, c(b) bk + k] V[b, i, k]
    swiglu     h = silu(g) u, g and u two such products whose blocks share one mask: x is read once
    gradient   dV[b, i, k] = sum_m dy[m, r(b) bn + i] x[m, c(b) bk + k]

One program has a tile of rows of x and of rows of one block row, and walks along its blocks: no atomics, sums in a fixed
order. The gradient to x is the product with the transposed blocks. V is the left operand, whose rows fill the 64 of a
product instruction on Hopper while rows of x may be few. The column of the next block is read one step ahead: an address
that is known only when a step begins would leave no time for copies of several steps to be under way at once.

Shape legend: M rows of x, bn x bk a block, BM, BN, BK powers of two that cover a tile's share of M, bn and bk.
"""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["rows"])
def product_kernel(
    x, values, second, columns, pointers, y, rows, in_features, block_rows, live, x_stride,
    HEIGHT: tl.constexpr, WIDTH: tl.constexpr, HAS_POINTERS: tl.constexpr, SWIGLU: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, EVEN: tl.constexpr,
    PRECISION: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """One [BN, BM] tile of y^T.

    x [M, x_stride], values (and, for SWIGLU, second: those of "up" beside "gate") [blocks, bn, bk], columns int32
    [blocks], pointers int32 [block_rows + 1] or, without HAS_POINTERS, `live` blocks a row; y [M, block_rows * bn].
    EVEN: whole blocks, within K. UPCAST: for the interpreter, which cannot multiply bfloat16.
    """
    PARTS: tl.constexpr = (HEIGHT + BLOCK_N - 1) // BLOCK_N
    ms = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    row, part = tl.program_id(1) // PARTS, tl.program_id(1) % PARTS
    ns, ks = part * BLOCK_N + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K)
    if HAS_POINTERS:
        first, last = tl.load(pointers + row), tl.load(pointers + row + 1)
    else:
        first, last = row * live, row * live + live
    x_rows = x + tl.minimum(ms, rows - 1).to(tl.int64)[None, :] * x_stride
    at = first.to(tl.int64) * (HEIGHT * WIDTH) + ns[:, None] * WIDTH + ks[None, :]
    v_at, w_at = values + at, second + at
    sums = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    ups = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    column = tl.load(columns + first, mask=first < last, other=0)
    for block in range(first, last):
        following = tl.load(columns + tl.minimum(block + 1, last - 1))
        k = column * WIDTH + ks
        if EVEN:
            a = tl.load(x_rows + k[:, None], mask=(ms < rows)[None, :], other=0)
            v = tl.load(v_at)
        else:
            within = (ns < HEIGHT)[:, None] & (ks < WIDTH)[None, :]
            read = (ms < rows)[None, :] & ((ks < WIDTH) & (k < in_features))[:, None]
            a = tl.load(x_rows + k[:, None], mask=read, other=0)
            v = tl.load(v_at, mask=within, other=0)
        if UPCAST:
            a, v = a.to(tl.float32), v.to(tl.float32)
        sums = tl.dot(v, a, sums, input_precision=PRECISION)
        if SWIGLU:
            if EVEN:
                w = tl.load(w_at)
            else:
                w = tl.load(w_at, mask=within, other=0)
            if UPCAST:
                w = w.to(tl.float32)
            ups = tl.dot(w, a, ups, input_precision=PRECISION)
        v_at += HEIGHT * WIDTH
        w_at += HEIGHT * WIDTH
        column = following
    if SWIGLU:
        sums = sums / (1.0 + tl.exp(-sums)) * ups
    out = ms.to(tl.int64)[None, :] * (block_rows * HEIGHT) + row * HEIGHT + ns[:, None]
    tl.store(y + out, sums.to(y.dtype.element_ty), mask=(ms < rows)[None, :] & (ns < HEIGHT)[:, None])


@triton.jit(do_not_specialize=["rows"])
def gradient_kernel(
    gradient, x, block_rows, columns, out, rows, in_features, gradient_stride, x_stride,
    HEIGHT: tl.constexpr, WIDTH: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, EVEN: tl.constexpr,
    PRECISION: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """One [BN, BK] tile of the gradient of one block: gradient [M, N], x [M, K], block_rows and columns int32 [blocks],
    out [blocks, bn, bk]."""
    PARTS: tl.constexpr = (HEIGHT + BLOCK_N - 1) // BLOCK_N
    block, part = tl.program_id(0) // PARTS, tl.program_id(0) % PARTS
    ns, ks, ms = part * BLOCK_N + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_M)
    n = tl.load(block_rows + block) * HEIGHT + ns
    k = tl.load(columns + block) * WIDTH + ks
    sums = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
    for begin in range(0, rows, BLOCK_M):
        m = (begin + ms).to(tl.int64)
        inside = m < rows
        if EVEN:
            d = tl.load(gradient + m[None, :] * gradient_stride + n[:, None], mask=inside[None, :], other=0)
            a = tl.load(x + m[:, None] * x_stride + k[None, :], mask=inside[:, None], other=0)
        else:
            d_inside, a_inside = (ns < HEIGHT)[:, None] & inside[None, :], inside[:, None] & (k < in_features)[None, :]
            d = tl.load(gradient + m[None, :] * gradient_stride + n[:, None], mask=d_inside, other=0)
            a = tl.load(x + m[:, None] * x_stride + k[None, :], mask=a_inside & (ks < WIDTH)[None, :], other=0)
        if UPCAST:
            d, a = d.to(tl.float32), a.to(tl.float32)
        sums = tl.dot(d, a, sums, input_precision=PRECISION)
    at = block.to(tl.int64) * (HEIGHT * WIDTH) + ns[:, None] * WIDTH + ks[None, :]
    tl.store(out + at, sums.to(out.dtype.element_ty), mask=(ns < HEIGHT)[:, None] & (ks < WIDTH)[None, :])
