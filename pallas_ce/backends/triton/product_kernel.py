"""The gradient products of a part of the vocabulary, read and written where their operands and sums lie.

XLA's products need the part as an array of its own: it copies the part of the weight that a product reads and the part
of the weight's gradient that another makes, which takes a twentieth of the recomputing backward's time, and a quarter
where rows are few. They also work on rows that do not count.

*For hidden*, `sum += dlogits·weight`: M are the batch's rows, N is H, and K the part's columns. *For the weight*,
`gradient = dlogitsᵀ·hidden`: K are the batch's rows, and M and N the part's columns and H, or H and those. Columns of
the vocabulary begin at `bounds[1]`, and end with it, or in a padded shard at `bounds[2]`. Rows count up to `bounds[0]`:
as K they are rounded up to whole windows, where dlogits are 0.

The loop over tiles and windows is one, as in `kernel`.
"""

import triton
import triton.language as tl

from pallas_ce.backends.triton.kernel import in_bands


@triton.jit
def product_kernel(  # type: ignore[no-untyped-def]
    left,  # [M, K] dlogits for hidden; for the weight, [K, M], what its rows are of
    right,  # [at least VOCABULARY, N] or [N, STRIDE] weight for hidden; for it, [K, N], what its columns are of
    bounds,  # [3] int32
    scale,  # [1], which the product is multiplied by
    before,  # in `stored`'s memory: the sum that is added to, or the entries that are kept; not read
    stored,  # [M, N] for hidden; for the weight, [at least VOCABULARY, N], or [M, STRIDE] where AXIS is 1
    M: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    VOCABULARY: tl.constexpr,
    STRIDE: tl.constexpr,
    AXIS: tl.constexpr,
    FOR_HIDDEN: tl.constexpr,
    COUNTED: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    WINDOW: tl.constexpr,
    GROUP: tl.constexpr,
):
    """Multiplies for hidden states or for the weight, as FOR_HIDDEN tells."""
    rows = tl.load(bounds)
    origin = tl.load(bounds + 1)
    existing = tl.load(bounds + 2)
    row_blocks = tl.cdiv(rows if FOR_HIDDEN else M, BLOCK_M)
    length = K if FOR_HIDDEN else rows
    column_blocks: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    height: tl.constexpr = VOCABULARY if AXIS == 0 and not FOR_HIDDEN else M
    width: tl.constexpr = VOCABULARY if AXIS == 1 and not FOR_HIDDEN else N
    stride: tl.constexpr = STRIDE if AXIS == 1 and not FOR_HIDDEN else N
    if FOR_HIDDEN:
        left_windows = tl.make_tensor_descriptor(left, [M, K], [K, 1], [BLOCK_M, WINDOW])
        if AXIS == 0:
            right_windows = tl.make_tensor_descriptor(right, [VOCABULARY, N], [N, 1], [WINDOW, BLOCK_N])
        else:
            right_windows = tl.make_tensor_descriptor(right, [N, VOCABULARY], [STRIDE, 1], [BLOCK_N, WINDOW])
    else:
        left_windows = tl.make_tensor_descriptor(left, [K, M], [M, 1], [WINDOW, BLOCK_M])
        right_windows = tl.make_tensor_descriptor(right, [K, N], [N, 1], [WINDOW, BLOCK_N])
    stored_parts = tl.make_tensor_descriptor(stored, [height, width], [stride, 1], [BLOCK_M, BLOCK_N // PARTS])

    for tile in tl.range(tl.program_id(0), row_blocks * column_blocks, tl.num_programs(0), flatten=True):
        row_block, column_block = in_bands(tile, row_blocks, column_blocks, GROUP)
        m = row_block * BLOCK_M
        n = column_block * BLOCK_N
        c = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for k in tl.range(0, length, WINDOW):
            if FOR_HIDDEN:
                a = left_windows.load([m, k])
                if AXIS == 0:
                    b = right_windows.load([origin + k, n])
                else:
                    b = right_windows.load([n, origin + k]).T
                if COUNTED:  # dlogits are 0 there, but 0·NaN is not
                    exists = origin + k + tl.arange(0, WINDOW) < existing
                    b = tl.where(exists[:, None], b, tl.zeros_like(b))
            else:
                a = left_windows.load([k, m]).T
                b = right_windows.load([k, n])
            c = tl.dot(a, b, c)
        if scale is not None:
            c *= tl.load(scale)
        if FOR_HIDDEN:
            row, column = m, n
        elif AXIS == 0:
            row, column = origin + m, n
        else:
            row, column = m, origin + n
        if PARTS == 1:
            stored_parts.store([row, column], c.to(stored.dtype.element_ty))
        else:  # numbers of 32 bits, half of them at a time, which shared memory has room for
            lower, upper = tl.split(tl.permute(tl.reshape(c, (BLOCK_M, 2, BLOCK_N // 2)), (0, 2, 1)))
            if FOR_HIDDEN:
                stored_parts.atomic_add([row, column], lower)
                stored_parts.atomic_add([row, column + BLOCK_N // 2], upper)
            else:
                stored_parts.store([row, column], lower)
                stored_parts.store([row, column + BLOCK_N // 2], upper)
