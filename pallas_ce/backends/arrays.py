"""Arrays that a kernel reads and writes where they lie."""

import jax


def apart[T](arrays: T) -> T:
    """The arrays, each with memory of its own for a kernel's operands, or for its results.

    XLA lets a kernel read a slice, ours or a user's, and write into one, in place (`dynamic_slice_fusion`). Slices
    begin anywhere, where Mosaic and cuBLAS want multiples. And a result that takes an operand's memory would be lost:
    the kernel writes over the operand, and XLA reads the slice. Behind a barrier XLA copies slices, but not whole
    arrays. Each array has a barrier of its own: of one around all results of a kernel XLA warns.
    """
    return jax.tree.map(jax.lax.optimization_barrier, arrays)
