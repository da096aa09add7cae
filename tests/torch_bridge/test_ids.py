"""Ids of every integer dtype, in the vocabulary and far outside it: they mean the same, or are named in an error."""

import hypothesis
import hypothesis.strategies as st
import pytest
import torch

from tests.torch_bridge.problems import as_on_a_gpu
from torch_bridge import (
    cross_entropy,
    linear_cross_entropy,
    linear_log_probs,
    linear_row_statistics,
    selective_log_softmax,
)

DTYPES = [torch.int8, torch.uint8, torch.int16, torch.uint16, torch.int32, torch.uint32, torch.int64, torch.uint64]
ROWS, WIDTH = 6, 3
# What other widths would wrap around into the vocabulary, or into a label that is ignored.
FAR = [-1, -100, 127, 128, 255, 2**15, 2**31, 2**32 + 1, 2**32 - 100, 2**63 - 1, -(2**32) + 3, 2**63 + 2, 2**64 - 100]


@st.composite
def ids(draw):
    """A vocabulary's size, and ids as Python's integers and as a tensor that holds them."""
    size, dtype = draw(st.sampled_from([5, 300])), draw(st.sampled_from(DTYPES))
    limits = torch.iinfo(dtype)
    held = st.sampled_from([x for x in FAR if limits.min <= x <= limits.max])
    inside = st.integers(0, min(size - 1, limits.max))
    values = draw(st.lists(held | inside, min_size=ROWS, max_size=ROWS))
    as_int64 = [x - 2**64 if x >= 2**63 else x for x in values]
    tensor = torch.tensor(as_int64).view(torch.uint64) if dtype == torch.uint64 else torch.tensor(values).to(dtype)
    return size, values, tensor


def head(size):
    generator = torch.Generator().manual_seed(size)
    hidden, weight = (torch.randn(n, WIDTH, generator=generator) for n in (ROWS, size))
    return hidden, weight, (hidden.double() @ weight.double().T).log_softmax(-1)


@hypothesis.settings(max_examples=25)
@hypothesis.given(drawn=ids(), ignore_index=st.sampled_from([-100, None, 3, 2**40]), kernels=st.booleans())
def test_ids_of_every_dtype_count_as_what_they_are(drawn, ignore_index, kernels):
    size, values, target = drawn
    hidden, weight, log_p = head(size)
    counts = torch.tensor([0 <= x < size and x != ignore_index for x in values])
    inside = torch.tensor([x if 0 <= x < size else 0 for x in values])
    of_row = log_p.gather(1, inside[:, None])[:, 0].where(counts, 0.0).float()
    logits = hidden @ weight.T
    with as_on_a_gpu(kernels):
        for found in (
            -linear_cross_entropy(hidden, weight, target, ignore_index=ignore_index, reduction="none"),
            -cross_entropy(logits, target, ignore_index=ignore_index, reduction="none"),
            linear_log_probs(hidden, weight, target, ignore_index=ignore_index),
            linear_log_probs(hidden, weight, target[:, None].expand(-1, 2), ignore_index=ignore_index)[:, 1],
        ):
            torch.testing.assert_close(found, of_row, rtol=1e-5, atol=1e-5)
        mean = cross_entropy(logits, target, ignore_index=ignore_index)
    torch.testing.assert_close(mean, -of_row.sum() / counts.sum().clamp(min=1), rtol=1e-5, atol=1e-5)
    in_vocabulary = torch.tensor([0 <= x < size for x in values])
    picked = linear_row_statistics(hidden, weight, target, statistics=("target_logit",)).target_logit
    want = logits.gather(1, inside[:, None])[:, 0].where(in_vocabulary, 0.0)
    torch.testing.assert_close(picked, want, rtol=1e-5, atol=1e-5)


@hypothesis.settings(max_examples=15)
@hypothesis.given(drawn=ids())
def test_ids_that_must_lie_in_the_vocabulary_are_refused_where_one_does_not(drawn):
    size, values, target = drawn
    hidden, weight, log_p = head(size)
    bad = [i for i, x in enumerate(values) if not 0 <= x < size]
    if bad:
        with pytest.raises(RuntimeError, match="out of bounds"):
            selective_log_softmax(hidden @ weight.T, target)
        with pytest.raises(ValueError, match=rf"target\[{bad[0]}\]={values[bad[0]]} is neither in"):
            linear_cross_entropy(hidden, weight, target, ignore_index=None, validate_labels=True)
    else:
        found = selective_log_softmax(hidden @ weight.T, target)
        torch.testing.assert_close(found, log_p.gather(1, target.long()[:, None])[:, 0].float(), rtol=1e-5, atol=1e-5)
