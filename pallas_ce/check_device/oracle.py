"""The loss and its gradients in float64 NumPy, by their definitions; no code is shared with the implementations."""

from collections.abc import Mapping
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]


def loss_and_gradients(
    arrays: Mapping[str, Array], softcap: float | None, smoothing: float, rounded_to: Any = None
) -> tuple[float, dict[str, Array]]:
    """The mean over the rows that count of the sum of a row's cross entropies, and its gradients.

    Args:
        arrays: hidden `[N, H]`, weight `[V, H]`, labels `[N, K]`, where negative ones do not count; maybe bias `[V]`
            and temperature `[N]`.
        softcap: c of `c·tanh(z/c)`, or None.
        smoothing: α of label smoothing.
        rounded_to: a dtype for gradients that are exact products of dlogits rounded to it, rounded themselves: about as
            accurate as can be where such operands are multiplied.
    """
    labels, x = arrays["labels"], {name: array.astype(np.float64) for name, array in arrays.items()}
    hidden, weight = x["hidden"], x["weight"]
    temperature = x.get("temperature", np.ones(len(hidden)))[:, None]
    z = hidden @ weight.T + x.get("bias", 0.0)
    bent = np.zeros(()) if softcap is None else np.tanh(z / softcap)
    z = (z if softcap is None else softcap * bent) / temperature
    shifted = z - z.max(axis=1, keepdims=True)
    log_p = shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
    # The distribution that each row is compared with: K one-hot rows added up, smoothed.
    counts = labels >= 0
    target = np.zeros_like(log_p)
    np.add.at(target, (np.nonzero(counts)[0], labels[counts]), 1.0 - smoothing)
    target += smoothing / log_p.shape[1] * counts.sum(axis=1, keepdims=True)
    rows = counts.any(axis=1).sum()
    slope = (1.0 - bent**2) / temperature
    dlogits = (np.exp(log_p) * target.sum(axis=1, keepdims=True) - target) * slope / rows

    def rounded(values: Array) -> Array:
        if rounded_to is None:
            return values
        # Implementations scale by powers of two, too: float16 would underflow.
        unit = 2.0 ** np.floor(np.log2(np.abs(values).max()))
        return (values / unit).astype(rounded_to).astype(np.float64) * unit

    dlogits = rounded(dlogits)
    exact = {"hidden": dlogits @ weight, "weight": dlogits.T @ hidden, "bias": dlogits.sum(axis=0)}
    return float(-(target * log_p).sum() / rows), {name: rounded(exact[name]) for name in exact if name in x}
