"""Every error that a caller of the bridge can make names the argument, its value and what would work."""

import inspect

import numpy as np
import pytest
import torch

import torch_bridge
from pallas_ce import LowRank
from tests.pallas_ce.test_signatures import described_arguments
from torch_bridge import (
    LinearCrossEntropyLoss,
    cross_entropy,
    linear_cross_entropy,
    linear_distillation,
    linear_log_probs,
    linear_row_statistics,
    patch_causal_lm,
    selective_log_softmax,
    vocab_parallel_cross_entropy,
    vocab_parallel_log_probs,
)

IDS = torch.zeros(3, dtype=torch.int64)
HEAD = {"input": torch.ones(3, 4), "linear_weight": torch.ones(7, 4), "target": IDS}
NARROW = {"input": torch.ones(3, 4).bfloat16(), "linear_weight": torch.ones(7, 4).bfloat16()}
TWO = HEAD | {"target": None, "teacher_input": torch.ones(3, 5), "teacher_weight": torch.ones(7, 5)}
PART = {**HEAD, "vocab_start": 0, "vocab_size": 30}
LOGITS = {"logits": torch.zeros(3, 7), "target": IDS}
SELECTED = {"logits": torch.zeros(3, 7), "index": IDS}
TARGET_SHAPE = r"target has shape \(3, 1, 2\); it must be \(3,\), or that with K >= 1"
ORDER = r": the order is input \[\.\.\., H\], linear_weight"
EXPANDED = r"an expanded view \(shape \(3, 7\), strides \(0, 1\)\)"

TERM = {"weight": torch.ones(7, 4), "up": torch.ones(7, 2), "down": torch.ones(2, 4)}
TERMS = [
    (ValueError, r"linear_weight.up has shape \(7,\); it must be \[V, r\]", {"up": torch.ones(7)}),
    (ValueError, r"linear_weight.up has shape \(7, 0\); .* r at least 1", {"up": torch.ones(7, 0)}),
    (ValueError, r"linear_weight.up has shape \(9, 2\); it must be \(7, 2\)", {"up": torch.ones(9, 2)}),
    (ValueError, r"linear_weight.down has shape \(2, 9\); it must be \(2, 4\)", {"down": torch.ones(2, 9)}),
    (TypeError, "linear_weight.down has dtype torch.int32", {"down": torch.ones(2, 4).int()}),
    (TypeError, "linear_weight.down", {"down": None}),
    (ValueError, r"linear_weight has shape \(4,\)", {"weight": torch.ones(4)}),
    (TypeError, "linear_weight.scale is a Tensor.* multiply linear_weight.up", {"scale": torch.ones(())}),
]

MISTAKES = [
    (linear_cross_entropy, HEAD, [
        (ValueError, "input has shape", {"input": torch.ones(3, 5)}),
        (TypeError, "input is a NoneType", {"input": None}),
        (ValueError, "linear_weight has shape", {"linear_weight": torch.ones(7)}),
        (TypeError, "linear_weight has dtype", {"linear_weight": torch.ones(7, 4, dtype=torch.int32)}),
        (ValueError, "target has shape", {"target": torch.zeros(4, dtype=torch.int64)}),
        (ValueError, rf"must be \(7,\){ORDER}", {"input": HEAD["linear_weight"], "linear_weight": HEAD["input"]}),
        (ValueError, rf"must be \[V, H\]{ORDER}", {"linear_weight": torch.ones(1, 3, 4)}),
        (TypeError, f"torch.int64; .*{ORDER}", {"linear_weight": IDS, "target": HEAD["linear_weight"]}),
        (ValueError, "4 in the one and 7 in the other: pass linear_weight.T", {"linear_weight": torch.ones(4, 7)}),
        (TypeError, "'weight'; it is called 'linear_weight' or 'class_weights' here", {"weight": torch.ones(7)}),
        (TypeError, "'softcap'; it is called 'logit_softcap' here", {"softcap": 3.0}),
        (TypeError, "'student_hidden'; it is called 'input' here", {"student_hidden": 0}),
        (TypeError, "'vocab_axis'; linear_weight is .* pass linear_weight.T", {"vocab_axis": 1}),
        (TypeError, "'lse_square_scale'; it is called 'z_loss' here", {"lse_square_scale": 1e-4}),
        (TypeError, "target has dtype", {"target": torch.zeros(3)}),
        (ValueError, "linear_bias has shape", {"linear_bias": torch.ones(6)}),
        (ValueError, "token_weights has shape", {"token_weights": torch.ones(2)}),
        (ValueError, "class_weights has shape", {"class_weights": torch.ones(2)}),
        (ValueError, "vocab_size=9", {"vocab_size": 9}),
        (ValueError, "vocab_size='9' must be an int between 1 and", {"vocab_size": "9"}),
        (ValueError, "label_smoothing=1.5", {"label_smoothing": 1.5}),
        (ValueError, "z_loss=-1 must be a finite number, at least 0", {"z_loss": -1}),
        (ValueError, r"logit_softcap=1e\+39 must .* lies outside", {"logit_softcap": 1e39}),
        (ValueError, "reduction='avg'", {"reduction": "avg"}),
        (ValueError, "backward='both'", {"backward": "both"}),
        (ValueError, "normalizer is given", {"normalizer": 3.0, "reduction": "sum"}),
        (ValueError, "logit_scale has shape", {"logit_scale": torch.ones(2)}),
        (ValueError, "linear_weight lies on meta", {"linear_weight": torch.ones(7, 4, device="meta")}),
        (TypeError, "input has dtype float64, which JAX would narrow", {"input": torch.ones(3, 4).double()}),
        (TypeError, "linear_bias has dtype float64, which JAX would", {"linear_bias": torch.ones(7).double()}),
        (TypeError, "logit_softcap must be a Python number, not a torch.Tensor", {"logit_softcap": torch.tensor(3.0)}),
        (TypeError, "validate_labels=1 must be True or False", {"validate_labels": 1}),
        (ValueError, "implementation='fast'", {"implementation": "fast"}),
        (ValueError, "precision='fast' is ", {"precision": "fast"}),
        (TypeError, "precision=2 is ", {"precision": 2}),
        *((ValueError, f"shift={x} must be an int, at least 0", {"shift": x}) for x in (-1, 1.5, True)),
        *((kind, message, {"linear_weight": LowRank(**TERM | change)}) for kind, message, change in TERMS),
    ]),
    (vocab_parallel_cross_entropy, PART, [
        (ValueError, "vocab_start=24 with 7 rows", {"vocab_start": 24}),
        (ValueError, "vocab_start=None with 7 rows.*must be ints", {"vocab_start": None}),
        (ValueError, "with 0 rows.*at least one row", {"linear_weight": torch.ones(0, 4)}),
    ]),
    (vocab_parallel_log_probs, PART, [
        (ValueError, "vocab_start=24 with 7 rows", {"vocab_start": 24}),
        (ValueError, r"target has shape \(3, 2\); it must be \(3,\)", {"target": torch.zeros(3, 2).long()}),
        (ValueError, "temperature=0 must be between 1e-05 and 1e", {"temperature": 0.0}),
    ]),
    (linear_log_probs, HEAD, [
        (ValueError, TARGET_SHAPE, {"target": torch.zeros(3, 1, 2).long()}),
        (ValueError, "K >= 1 targets", {"target": torch.zeros(3, 0).long()}),
        (TypeError, "target has dtype", {"target": torch.zeros(3)}),
        (ValueError, "temperature=0 must be between 1e-05 and 1e", {"temperature": 0.0}),
        (ValueError, r"temperature has shape \(2,\).*leading shape \(3,\)", {"temperature": torch.ones(2)}),
        (TypeError, "temperature has dtype torch.int64", {"temperature": torch.ones(3).long()}),
        (TypeError, "temperature is a ndarray; it must be a number or a torch.Tensor", {"temperature": np.ones(3)}),
        (TypeError, "support has dtype torch.float32; it must hold integers", {"support": torch.ones(3, 2)}),
        (ValueError, r"support has shape \(3,\); it must be \(3,\) with K >= 1 ids behind", {"support": IDS}),
    ]),
    (linear_row_statistics, HEAD, [
        (ValueError, rf"must be \(7,\).*{ORDER}", {"input": HEAD["linear_weight"], "linear_weight": HEAD["input"]}),
    ]),
    (linear_distillation, TWO, [
        (TypeError, "'student_weight'; it is called 'linear_weight' here", {"student_weight": 0}),
        (TypeError, "'student_bias'; it is called 'linear_bias' here", {"student_bias": 0}),
        (TypeError, "'jsd_beta'; it is called 'beta' here", {"jsd_beta": 0.5}),
        (ValueError, rf"must be \(7, 5\){ORDER}", {"input": HEAD["linear_weight"], "linear_weight": HEAD["input"]}),
        (ValueError, rf"target has shape \(7,\); it must be \(3,\){ORDER}", {"target": torch.zeros(7).long()}),
        (ValueError, "7 vocabulary entries and teacher_weight 8", {"teacher_weight": torch.ones(8, 5)}),
        (ValueError, r"teacher_weight has shape \(7,\); it must be \[V, H_t\]", {"teacher_weight": torch.ones(7)}),
        (ValueError, r"teacher_input has shape \(3, 4\); it must be \(3, 5\)", {"teacher_input": torch.ones(3, 4)}),
        (ValueError, r"teacher_bias has shape \(3,\); it must be \(7,\)", {"teacher_bias": torch.ones(3)}),
        (TypeError, "row_mask has dtype torch.float32; it must be bool", {"row_mask": torch.ones(3)}),
        (ValueError, "divergence='kl' is unknown; choose from 'forward_kl'", {"divergence": "kl"}),
        (ValueError, "implementation='mosaic_gpu' does not serve distillation;", {"implementation": "mosaic_gpu"}),
        (ValueError, "reduction='max'", {"reduction": "max"}),
    ]),
    (cross_entropy, LOGITS, [
        (ValueError, r"target has shape \(2,\); it must be", {"target": IDS[:2]}),
        (ValueError, r"must be \(3, 4\): .*movedim\(1, -1\)", {"logits": torch.ones(3, 4, 1), "target": IDS[:, None]}),
        (TypeError, "'weight'; it is called 'class_weights' here", {"weight": torch.ones(7)}),
        (TypeError, "logits has dtype torch.int64", {"logits": torch.zeros(3, 7).long()}),
        (ValueError, "normalizer has shape", {"normalizer": torch.ones(1)}),
        (TypeError, "normalizer is a str", {"normalizer": "a"}),
        (ValueError, EXPANDED, {"logits": torch.zeros(7).expand(3, 7), "inplace_backward": True}),
        (ValueError, "vocab_size=8", {"vocab_size": 8}),
        (TypeError, "ignore_index='a' must be", {"ignore_index": "a"}),
    ]),
    (selective_log_softmax, SELECTED, [
        (TypeError, "index has dtype torch.float32; it must be an integer one", {"index": torch.zeros(3)}),
        (ValueError, r"index has shape \(2,\); logits' leading", {"index": IDS[:2]}),
        (TypeError, "logits have dtype", {"logits": torch.zeros(3, 7).long()}),
        (ValueError, r"logits of shape \(3, 0\), which have none", {"logits": torch.zeros(3, 0)}),
        (RuntimeError, "out of bounds", {"index": torch.tensor([0, 3, 7])}),
    ]),
]  # fmt: skip


@pytest.mark.parametrize(
    ("function", "good", "kind", "message", "bad"),
    [(function, good, *mistake) for function, good, mistakes in MISTAKES for mistake in mistakes],
)
def test_a_mistake_is_named(function, good, kind, message, bad):
    with pytest.raises(kind, match=message):
        function(**{**good, **bad})


@pytest.mark.parametrize("takes", [lambda **options: LinearCrossEntropyLoss(4, 7, **options),
                                   lambda **options: patch_causal_lm(None, **options)])  # fmt: skip
def test_an_option_that_is_kept_is_known_or_named(takes):
    with pytest.raises(TypeError, match=r"unknown option 'lse_square_scale'; it is called 'z_loss' here; choose from "):
        takes(lse_square_scale=1e-4)
    with pytest.raises(TypeError, match="reduction='sum' is an argument of the patched model's calls"):
        patch_causal_lm(None, reduction="sum")


@pytest.mark.parametrize("name", torch_bridge.__all__)
def test_every_argument_is_described(name):
    function = getattr(torch_bridge, name)
    assert described_arguments(function) == sorted(inspect.signature(function).parameters)


VALIDATED = [(linear_cross_entropy, HEAD, 7), (linear_log_probs, HEAD, 7), (cross_entropy, LOGITS, 7),
             (vocab_parallel_cross_entropy, PART, 30), (vocab_parallel_log_probs, PART, 30)]  # fmt: skip
SHIFTED = (linear_cross_entropy, linear_log_probs)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int8])
@pytest.mark.parametrize(("function", "good", "size"), VALIDATED)
def test_targets_outside_the_vocabulary_are_named_where_they_are_validated(function, good, size, dtype):
    for wrong in (-1, size):
        target = torch.tensor([-100, wrong, 0], dtype=dtype)
        message = rf"target\[1\]={wrong} is neither in \[0, vocab_size={size}\) nor ignore_index=-100"
        for shift in ({}, {"shift": 1}) if function in SHIFTED else ({},):
            with pytest.raises(ValueError, match=message):
                function(**good | {"target": target}, validate_labels=True, **shift)
    if function in SHIFTED:  # the first one is no row's
        function(**good | {"target": torch.tensor([size, 0, 6], dtype=dtype)}, validate_labels=True, shift=1)
    given = good | {"ignore_index": -1, "target": torch.tensor([-1, 0, 6], dtype=dtype)}
    if good is not PART:  # which needs a process group
        torch.testing.assert_close(function(**given, validate_labels=True), function(**given), rtol=0, atol=0)
