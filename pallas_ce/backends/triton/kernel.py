"""The kernel for logits, rows × columns tile by tile, and for their statistics while a tile is in registers.

A tile is `hidden[rows]·weight[columns]ᵀ`, a loop over windows of H. It never leaves the registers as a whole, unless
`stored` is asked for. The kernel makes from it the outputs that there are:

* *statistics* of each row over the tile's columns, one number for each row and tile. They are `Σ e^{z-m}`,
  `Σ e^{z-m}(z-m)`, `Σ e^{2(z-m)}`, `Σ e^{z-m}(z-μ)²`, `Σ u (z-m)`, and the lowest column where z is largest. `m` is the
  tile's maximum, or the row's `reference` if there is one: the same for all tiles, so that it needs no maximum. XLA
  merges the tiles by the rules that all backends share. No tile waits for another, and nothing is added atomically, so
  the same inputs give the same bits.
* *exponentials*, `e^{z-reference}` in the operands' dtype, for the in-forward mode; see `backends.exponentials`.
* *dlogits*, recomputed, by the formula of `statistics.gradient`, in the operands' dtype.
* *distances*, `z-m` from the tile's maxima, for two heads whose logits XLA compares. In float16 the farthest are its
  least finite number, and -inf stays.

XLA adds single entries of a row, its targets' and its largest; see `backends.entries`.

Logits are `z = softcap(scale·(hidden·weight + low·up + bias)) / T`, where `low·up`, a few entries long, is a low-rank
term of the weight. `c·tanh(x/c)` is `c - 2c/(e^{2x/c} + 1)`, which is good to 1e-7·c; where |x/c| < 1/4, the odd
polynomial of degree 9 is good to 1e-8 of the result.

Exponentials are base 2, which is the instruction: `e^y = 2^{y·log2e}`. Distances below -200 count as -200, where
float32 has 0, so that 0·(-inf) does not arise. Maxima and minima are those that keep NaN (`max.NaN`), or a clamp would
make a small number of it.

COLUMNS columns are worked on, those from `bounds[3]` on. Only those below `bounds[1]` count, of dlogits those from
`bounds[0]` on, and rows up to `bounds[2]`: behind it nothing is computed, because fewer tiles are visited. Offsets of
rows and columns in memory are 64 bits wide. Loads beyond an array give 0.

With tensor descriptors a program works on many tiles, and the loop over tiles and windows is flattened to one: loads of
the next tile's windows are under way during the epilogue. A second loop, or a product outside of it, would undo that,
so the windows of a low-rank term are more windows of the same loop, which reads them through other descriptors.
"""

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
FARTHEST = tl.constexpr(-200.0)
LEAST_FLOAT16 = tl.constexpr(-65504.0)
TINY = tl.constexpr(2.0**-126)


@triton.jit
def in_bands(tile, row_blocks, column_blocks: tl.constexpr, GROUP: tl.constexpr):  # type: ignore[no-untyped-def]
    """The row and column block of a tile, numbered band by band of row blocks, so that neighbours share a cache."""
    band: tl.constexpr = GROUP * column_blocks
    in_band = tile % band
    start = (tile // band) * GROUP
    height = tl.minimum(row_blocks - start, GROUP)
    return start + in_band % height, in_band // height


@triton.jit
def larger(a, b):  # type: ignore[no-untyped-def]
    """NaN where either is."""
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _by_row(vector, rows, ROWS: tl.constexpr):  # type: ignore[no-untyped-def]
    """`[rows, 1]` of a vector by row; 0 behind its end."""
    return tl.load(vector + rows, mask=rows < ROWS, other=0.0)[:, None]


@triton.jit
def _capped(x, CAP: tl.constexpr):  # type: ignore[no-untyped-def]
    """`c·tanh(x/c)`."""
    t = x * (1.0 / CAP)
    far = CAP - 2.0 * CAP / (tl.exp2(t * (2.0 * LOG2E)) + 1.0)
    s = t * t
    near = x * (1.0 + s * (-1.0 / 3 + s * (2.0 / 15 + s * (-17.0 / 315 + s * (62.0 / 2835)))))
    return tl.where(s < 0.0625, near, far)


@triton.jit
def head_kernel(  # type: ignore[no-untyped-def]
    hidden,  # [ROWS, H]
    weight,  # [at least VOCABULARY, H], or [H, STRIDE] where AXIS is 1
    bounds,  # [4] int32
    bias,  # [VOCABULARY]
    scale,  # [1]
    inverse_temperature,  # [ROWS]
    u,  # [VOCABULARY]
    low,  # [ROWS, RANK]
    up,  # [at least VOCABULARY, RANK], or [RANK, STRIDE]
    before,  # where `stored` is, if there is something that is kept where no tile is worked on; not read
    reference,  # [ROWS]; of dlogits the rows' largest logits, inf for a row of -inf only
    prob,  # [ROWS], and so the next five
    prob_log_prob,
    prob_sq,
    prob_deviation_sq,
    entropy,
    logit_weights,
    max,  # [column blocks, ROWS], and so the next six
    sum_exp,
    sum_exp_shifted,
    sum_exp_sq,
    sum_exp_deviation_sq,
    weighted_sum,
    argmax,
    stored,  # [ROWS, COLUMNS], exponentials, dlogits or distances
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    VOCABULARY: tl.constexpr,
    ORIGIN: tl.constexpr,
    H: tl.constexpr,
    STRIDE: tl.constexpr,
    AXIS: tl.constexpr,
    CAP: tl.constexpr,
    UNIFORM: tl.constexpr,
    RANK: tl.constexpr,
    RANK_STEP: tl.constexpr,
    PRECISION: tl.constexpr,
    MASKED: tl.constexpr,
    GRADIENT: tl.constexpr,
    DESCRIPTORS: tl.constexpr,
    STORES: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    WINDOW: tl.constexpr,
    GROUP: tl.constexpr,
):
    """Makes logits tile by tile, and the outputs from them; names in capitals come from a head and a table's entry."""
    first = tl.load(bounds)
    last = tl.load(bounds + 1)
    row_blocks = tl.cdiv(tl.load(bounds + 2), BLOCK_ROWS)
    origin = tl.multiple_of(tl.load(bounds + 3), ORIGIN) if ORIGIN else 0
    column_blocks: tl.constexpr = (COLUMNS + BLOCK_COLUMNS - 1) // BLOCK_COLUMNS
    ragged: tl.constexpr = H % WINDOW != 0
    length: tl.constexpr = (H + WINDOW - 1) // WINDOW * WINDOW
    rank: tl.constexpr = (RANK + WINDOW - 1) // WINDOW * WINDOW
    if DESCRIPTORS:
        hidden_windows = tl.make_tensor_descriptor(hidden, [ROWS, H], [H, 1], [BLOCK_ROWS, WINDOW])
        if AXIS == 0:
            weight_windows = tl.make_tensor_descriptor(weight, [VOCABULARY, H], [H, 1], [BLOCK_COLUMNS, WINDOW])
        else:
            weight_windows = tl.make_tensor_descriptor(weight, [H, VOCABULARY], [STRIDE, 1], [WINDOW, BLOCK_COLUMNS])
        if low is not None:
            low_windows = tl.make_tensor_descriptor(low, [ROWS, RANK], [RANK, 1], [BLOCK_ROWS, WINDOW])
            if AXIS == 0:
                up_windows = tl.make_tensor_descriptor(up, [VOCABULARY, RANK], [RANK, 1], [BLOCK_COLUMNS, WINDOW])
            else:
                up_windows = tl.make_tensor_descriptor(up, [RANK, VOCABULARY], [STRIDE, 1], [WINDOW, BLOCK_COLUMNS])
        if STORES:
            stored_tiles = tl.make_tensor_descriptor(stored, [ROWS, COLUMNS], [COLUMNS, 1], [BLOCK_ROWS, BLOCK_COLUMNS])

    for tile in tl.range(tl.program_id(0), row_blocks * column_blocks, tl.num_programs(0), flatten=DESCRIPTORS):
        row_block, column_block = in_bands(tile, row_blocks, column_blocks, GROUP)
        row = row_block * BLOCK_ROWS
        column = column_block * BLOCK_COLUMNS
        rows = row + tl.arange(0, BLOCK_ROWS)
        places = column + tl.arange(0, BLOCK_COLUMNS)
        columns = origin + places
        has_row = rows < ROWS
        has_column = columns < VOCABULARY

        z = tl.zeros((BLOCK_ROWS, BLOCK_COLUMNS), tl.float32)
        if DESCRIPTORS:
            for window in tl.range(0, length + rank, WINDOW):
                left, right, entry = hidden_windows, weight_windows, window
                if low is not None:  # noqa: SIM102, as this is known when compiling
                    if window >= length:
                        left, right, entry = low_windows, up_windows, window - length
                a = left.load([row, entry])
                if AXIS == 0:
                    z = tl.dot(a, right.load([origin + column, entry]).T, z, input_precision=PRECISION)
                else:
                    z = tl.dot(a, right.load([entry, origin + column]), z, input_precision=PRECISION)
        else:
            if low is not None:
                for start in tl.static_range(0, RANK, RANK_STEP):
                    some = start + tl.arange(0, RANK_STEP)
                    low_at = low + rows.to(tl.int64)[:, None] * RANK + some[None, :]
                    if AXIS == 0:
                        up_at = up + columns.to(tl.int64)[None, :] * RANK + some[:, None]
                    else:
                        up_at = up + some.to(tl.int64)[:, None] * STRIDE + columns[None, :]
                    a_low = tl.load(low_at, mask=has_row[:, None], other=0.0)
                    b_up = tl.load(up_at, mask=has_column[None, :], other=0.0)
                    z = tl.dot(a_low, b_up, z, input_precision=PRECISION)
            lane = tl.arange(0, WINDOW)
            row_at = hidden + rows.to(tl.int64)[:, None] * H + lane[None, :]
            if AXIS == 0:
                column_at = weight + columns.to(tl.int64)[None, :] * H + lane[:, None]
            else:
                column_at = weight + lane.to(tl.int64)[:, None] * STRIDE + columns[None, :]
            for window in tl.range(0, H, WINDOW):
                if ragged:
                    inside = lane < H - window
                    a = tl.load(row_at, mask=has_row[:, None] & inside[None, :], other=0.0)
                    b = tl.load(column_at, mask=has_column[None, :] & inside[:, None], other=0.0)
                else:
                    a = tl.load(row_at, mask=has_row[:, None], other=0.0)
                    b = tl.load(column_at, mask=has_column[None, :], other=0.0)
                z = tl.dot(a, b, z, input_precision=PRECISION)
                row_at += WINDOW
                if AXIS == 0:
                    column_at += WINDOW
                else:
                    column_at += WINDOW * STRIDE

        if bias is not None:
            z += tl.load(bias + columns, mask=has_column, other=0.0)[None, :]
        if scale is not None:
            z *= tl.load(scale)
        if CAP is not None:
            z = _capped(z, CAP)
        if inverse_temperature is not None:
            z *= _by_row(inverse_temperature, rows, ROWS)
        counts = columns < last
        if u is not None:
            weights = tl.load(u + columns, mask=has_column, other=0.0)[None, :]

        if GRADIENT:
            dz = tl.zeros((BLOCK_ROWS, BLOCK_COLUMNS), tl.float32)
            if prob is not None:
                log_p = tl.minimum(z - _by_row(reference, rows, ROWS), 0.0, propagate_nan=tl.PropagateNan.ALL)
                log_p = larger(log_p, FARTHEST)
                p = tl.exp2(log_p * LOG2E)
                inner = _by_row(prob, rows, ROWS)
                if prob_log_prob is not None:
                    inner += _by_row(prob_log_prob, rows, ROWS) * log_p
                if prob_sq is not None:
                    inner += _by_row(prob_sq, rows, ROWS) * p
                if prob_deviation_sq is not None:
                    deviation = log_p + _by_row(entropy, rows, ROWS)
                    inner += _by_row(prob_deviation_sq, rows, ROWS) * deviation * deviation
                dz = p * inner
            if logit_weights is not None:
                if u is not None:
                    dz += _by_row(logit_weights, rows, ROWS) * weights
                else:
                    dz += _by_row(logit_weights, rows, ROWS) * UNIFORM
            if CAP is not None:
                ratio = z * (1.0 / CAP)
                if inverse_temperature is not None:
                    inverse = _by_row(inverse_temperature, rows, ROWS)
                    ratio /= tl.where(inverse == 0.0, 1.0, inverse)  # 0 in a row that is not there
                dz *= 1.0 - ratio * ratio
            if MASKED:
                dz = tl.where((counts & (columns >= first))[None, :], dz, 0.0)
            z = dz
        else:
            if MASKED:
                z = tl.where(counts[None, :], z, float("-inf"))
            part = column_block.to(tl.int64) * ROWS + rows
            if max is not None:
                top = tl.reduce(z, 1, larger)
                tl.store(max + part, top, mask=has_row)
            if argmax is not None:
                place = tl.where((z == top[:, None]) | (z != z), columns[None, :], 2147483647)
                tl.store(argmax + part, tl.min(place, axis=1), mask=has_row)
            if reference is not None:
                measured = z - _by_row(reference, rows, ROWS)
            else:
                measured = z - tl.where(tl.abs(top) == float("inf"), 0.0, top)[:, None]
            if sum_exp is not None:
                distance = larger(measured, FARTHEST)
                e = tl.exp2(distance * LOG2E)
                total = tl.sum(e, axis=1)
                tl.store(sum_exp + part, total, mask=has_row)
                if sum_exp_shifted is not None:
                    shifted = tl.sum(e * distance, axis=1)
                    tl.store(sum_exp_shifted + part, shifted, mask=has_row)
                if sum_exp_sq is not None:
                    tl.store(sum_exp_sq + part, tl.sum(e * e, axis=1), mask=has_row)
                if sum_exp_deviation_sq is not None:
                    deviation = distance - (shifted / tl.maximum(total, TINY))[:, None]
                    tl.store(sum_exp_deviation_sq + part, tl.sum(e * deviation * deviation, axis=1), mask=has_row)
            if weighted_sum is not None:
                if u is not None:
                    weighted = tl.where(counts[None, :] & (weights != 0.0) & (measured != 0.0), weights * measured, 0.0)
                else:
                    weighted = tl.where(counts[None, :], measured, 0.0) * UNIFORM
                tl.store(weighted_sum + part, tl.sum(weighted, axis=1), mask=has_row)

        if stored is not None:
            if not GRADIENT:
                if sum_exp is not None:
                    z = e
                elif stored.dtype.element_ty == tl.float16:
                    z = tl.where(z == float("-inf"), z, larger(measured, LEAST_FLOAT16))
                else:
                    z = measured
            kept = z.to(stored.dtype.element_ty)
            if STORES:
                stored_tiles.store([row, column], kept)
            else:
                at = stored + rows.to(tl.int64)[:, None] * COLUMNS + places[None, :]
                tl.store(at, kept, mask=has_row[:, None] & (places < COLUMNS)[None, :])
