"""Every error a caller can make: it names the argument, its value, and what would work."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_ce
from pallas_ce import ClassSample

HIDDEN, WEIGHT, LABELS = jnp.ones((4, 3)), jnp.ones((5, 3)), jnp.array([0, 1, 2, 4])
LOGITS, INTEGERS, COMPLEX = jnp.zeros((2, 3)), jnp.zeros((2, 3), int), jnp.ones(4, complex)
KEY, KEYS = jax.random.key(0), jax.random.split(jax.random.key(0), 5)
NAN, INFINITY, IN_FORWARD = float("nan"), float("inf"), {"backward": "in_forward"}
TWICE, ONCE = jnp.zeros((4, 2), int), jnp.zeros(4, int)

Row = tuple[dict[str, Any], type[Exception], str]


class _Unhashable:
    __hash__ = None  # type: ignore[assignment]

    def __call__(self, statistics: Any) -> Any:
        return statistics.lse


def _lse(statistics: Any, *row_inputs: Any) -> Any:
    return statistics.lse + sum(row_inputs)


def _linear_loss(
    hidden: Any, weight: Any, labels: Any, row_loss: Any = _lse, row_inputs: Any = (), **options: Any
) -> Any:
    return pallas_ce.linear_loss(row_loss, hidden, weight, labels, *row_inputs, **options)


def _one_id_too_many(key: Any, num_samples: int, vocab_size: int) -> Any:
    return ClassSample(jnp.zeros(num_samples + 1, int), jnp.zeros(vocab_size))


def _too_few_expected(key: Any, num_samples: int, vocab_size: int) -> Any:
    return ClassSample(jnp.zeros(num_samples, int), jnp.zeros(num_samples))


HEAD = {"hidden": HIDDEN, "weight": WEIGHT}
LABELLED, OF_STORED = {**HEAD, "labels": LABELS}, {"logits": LOGITS, "labels": jnp.array([0, 1])}
# Arguments with which nothing is wrong, to which a row of a table below adds one mistake.
ARGUMENTS: dict[str, dict[str, Any]] = {
    "linear_cross_entropy": LABELLED,
    "linear_row_statistics": LABELLED,
    "linear_loss": LABELLED,
    "explain": HEAD,
    "linear_log_probs": LABELLED,
    "linear_top_k": {**HEAD, "k": 1},
    "linear_sample": {"key": KEY, **HEAD},
    "sampled_softmax_cross_entropy": {**LABELLED, "key": KEY, "num_samples": 2},
    "linear_distillation": {**HEAD, "teacher_hidden": jnp.ones((4, 7)), "teacher_weight": jnp.ones((5, 7))},
    "linear_chain_crf": {"emissions": jnp.ones((2, 3, 4)), "tags": INTEGERS, "transitions": jnp.ones((4, 4))},
    "cross_entropy": OF_STORED,
    "chunked_cross_entropy": OF_STORED,
    "selective_log_softmax": {"logits": LOGITS, "index": jnp.zeros(2, int)},
    "top_k_distillation_loss": {"log_probs": LOGITS, "teacher_log_probs": LOGITS},
    "policy_loss": {"log_probs": LOGITS, "advantages": jnp.zeros(2)},
    "group_advantages": {"rewards": jnp.zeros(4), "group_size": 2},
    "kl_estimate": {"log_probs": jnp.zeros(3), "ref_log_probs": jnp.zeros(3)},
    "dpo_loss": {name: jnp.zeros(2) for name in ("chosen", "rejected", "ref_chosen", "ref_rejected")},
    "MeshAxes": {},
}

# What describes the head is read by all of its functions, in one place.
OF_THE_HEAD: list[Row] = [
    ({"hidden": jnp.float32(1)}, ValueError, r"hidden has shape \(\); it must be \[\.\.\., H\]"),
    ({"hidden": "text"}, TypeError, "hidden is a str"),
    ({"hidden": jnp.ones((4, 3), int)}, TypeError, "hidden has dtype int32; it must be a floating dtype"),
    ({"weight": jnp.ones(5)}, ValueError, r"weight has shape \(5,\); it must have two axes, \[V, H\] or \[H, V\]"),
    ({"weight": jnp.ones((1, 5, 3))}, ValueError, r"weight has shape \(1, 5, 3\); it must have two axes"),
    ({"weight": jnp.ones((5, 3), int)}, TypeError, "weight has dtype int32; it must be a floating dtype"),
    ({"weight": jnp.ones((0, 3))}, ValueError, r"weight has shape \(0, 3\); both axes must be at least 1"),
    ({"weight": jnp.ones((5, 2))}, ValueError, r"hidden has shape \(4, 3\) and weight \(5, 2\).* 3 in the one and 2"),
    ({"weight": jnp.ones((3, 5))}, ValueError, r"vocab_axis=0: .*is vocab_axis the right one\?"),
    ({"vocab_axis": 1}, ValueError, r"vocab_axis=1: .*is vocab_axis the right one\?"),
    ({"vocab_axis": 2}, ValueError, r"vocab_axis=2 must be 0 \(weight \[V, H\]\) or 1"),
    ({"vocab_axis": -1}, ValueError, "vocab_axis=-1 must be 0"),
    ({"vocab_axis": True}, ValueError, "vocab_axis=True must be 0"),
    ({"bias": jnp.ones(4)}, ValueError, r"bias has shape \(4,\); it must be \(5,\), one entry for each"),
    ({"bias": jnp.ones(4), "vocab_size": 4}, ValueError, r"bias has shape \(4,\); it must be \(5,\)"),
    ({"bias": jnp.ones(5, int)}, TypeError, "bias has dtype int32; it must be a floating dtype"),
    ({"vocab_size": 0}, ValueError, "vocab_size=0 must be an int between 1 and the weight's 5 entries"),
    ({"vocab_size": 6}, ValueError, "vocab_size=6 must be an int between 1 and the weight's 5 entries"),
    ({"vocab_size": 4.0}, ValueError, r"vocab_size=4\.0 must be an int between 1 and"),
    ({"vocab_size": True}, ValueError, "vocab_size=True must be an int between 1 and"),
    ({"logit_softcap": 0.0}, ValueError, r"logit_softcap=0\.0 must be a finite number above 0, or None for no cap"),
    ({"logit_softcap": -3}, ValueError, "logit_softcap=-3 must be a finite number above 0"),
    ({"logit_softcap": NAN}, ValueError, "logit_softcap=nan must be a finite number above 0"),
    ({"logit_softcap": INFINITY}, ValueError, "logit_softcap=inf must be a finite number above 0"),
    ({"logit_softcap": 1e39}, ValueError, r"logit_softcap=1e\+39 lies outside \[1e-08, 1e\+33\]"),
    ({"logit_softcap": "soft"}, TypeError, "logit_softcap='soft' must be a number above 0"),
    ({"logit_softcap": 10**400}, ValueError, "logit_softcap=1000.*… must be"),
    ({"logit_scale": jnp.ones(4)}, ValueError, r"logit_scale has shape \(4,\); it must be a scalar"),
    ({"logit_scale": NAN}, ValueError, "logit_scale=nan must be a finite number"),
    ({"logit_scale": 10**400}, ValueError, "logit_scale=1000.*… must be"),
    ({"logit_scale": None}, TypeError, "logit_scale is a NoneType"),
    ({"dtype": jnp.int8}, TypeError, "dtype=.*int8.* asks for computing in int8; supported are bfloat16, float16"),
    ({"dtype": "floaty"}, TypeError, "dtype='floaty' names no compute dtype; supported are bfloat16, float16"),
    ({"dtype": jnp.float64}, ValueError, r"dtype=float64 needs JAX's 64-bit mode: jax\.config\.update"),
    ({"hidden": HIDDEN.astype(jnp.float8_e4m3fn)}, TypeError, "hidden float8_e4m3fn .*names no compute dtype"),
    ({"precision": "fast"}, ValueError, "precision='fast' is unknown; choose from 'default', .*'TF32_TF32_F32'"),
    ({"precision": "ANY_F8_ANY_F8_F32"}, ValueError, "='ANY_F8_ANY_F8_F32' multiplies 8-bit operands, .* choose"),
    ({"precision": ("high", "high")}, TypeError, r"precision=\('high', 'high'\) is a tuple; it must be one name"),
    ({"precision": 2}, TypeError, "precision=2 is a int; it must be one name for all products, a jax.lax.Prec"),
    ({"implementation": "cuda"}, ValueError, r"implementation='cuda' is unknown; choose from \(.*'xla'.*\) or None"),
    ({"scratch_bytes": 0}, ValueError, "scratch_bytes=0 must be a positive int, or None for the default"),
    ({"scratch_bytes": True}, ValueError, "scratch_bytes=True must be a positive int"),
    ({"scratch_bytes": 1e9}, ValueError, r"scratch_bytes=1000000000\.0 must be a positive int"),
    ({"scratch_bytes": 0, "implementation": "reference"}, ValueError, "scratch_bytes=0 must be a positive int"),
    ({"scratch_bytes": 9, "implementation": "xla"}, ValueError, r"=9 cannot hold one row .* at least \d+ bytes are"),
]
# What names mesh axes without saying what they split.
EXAMPLE = "must be a MeshAxes, such as MeshAxes(vocabulary='tensor')"
OF_MESH_AXES: list[Row] = [
    ({"mesh_axes": axes}, TypeError, re.escape(f"mesh_axes={axes!r} {EXAMPLE}"))
    for axes in ("tensor", ("data", "tensor"), {"vocabulary": "tensor"})
]
OF_A_LOSS: list[Row] = [
    ({"labels": LABELS[:, None, None]}, ValueError, r"labels have shape \(4, 1, 1\); hidden's leading shape \(4,\)"),
    ({"labels": LABELS * 1.0}, TypeError, "labels have dtype float32; they must be integers"),
    ({"labels": LABELS > 1}, TypeError, "labels have dtype bool; they must be integers"),
    ({"ignore_index": 1.0}, TypeError, r"ignore_index=1\.0 must be a Python int, or None"),
    ({"ignore_index": jnp.int32(1)}, TypeError, r"ignore_index=Array\(1.*\) must be a Python int, or None"),
    ({"token_weights": jnp.ones(5)}, ValueError, r"token_weights has shape \(5,\); hidden's leading shape \(4,\)"),
    ({"token_weights": "heavy"}, TypeError, "token_weights is a str"),
    ({"token_weights": COMPLEX}, TypeError, "token_weights has dtype complex64; it must be real"),
    ({"normalizer": jnp.ones(4)}, ValueError, r"normalizer has shape \(4,\); it must be a scalar"),
    ({"normalizer": 3, "reduction": "sum"}, ValueError, "normalizer is given with reduction='sum'; only reduction='m"),
    *(
        ({"labels": np.array([0, -100, bad, -9]), "validate_labels": True}, ValueError,
         rf"labels\[2\]={bad} is neither in \[0, vocab_size=5\) nor ignore_index=-100")
        for bad in (5, -1, -7, 2**32)
    ),
    ({"labels": np.array([0, -100]), "hidden": HIDDEN[:2], "validate_labels": True, "ignore_index": None}, ValueError,
     r"labels\[1\]=-100 is neither in .* nor ignore_index=None"),
    ({"labels": np.array([[0, 1], [4, 4]], np.uint8), "hidden": jnp.ones((2, 2, 3)), "vocab_size": 4,
      "validate_labels": True}, ValueError, r"labels\[1, 0\]=4 is neither in \[0, vocab_size=4\)"),
    ({"reduction": "max"}, ValueError, "reduction='max' is unknown; choose from 'mean', 'sum', 'none'"),
    ({"backward": "fast"}, ValueError, "backward='fast' is unknown; choose from 'auto', 'recompute', 'in_forward'"),
    ({**IN_FORWARD, "reduction": "none"}, ValueError, "needs a scalar loss, .* or backward='recompute'"),
    ({"backward": "recompute", "implementation": "reference"}, ValueError, "leave backward='auto'"),
    ({**IN_FORWARD, "scratch_bytes": 90, "implementation": "xla"}, ValueError, "=90 cannot hold one row .*in_forward"),
]  # fmt: skip
ALONE = {"implementation": "mosaic_gpu", "dtype": jnp.bfloat16}
OF_ONE: dict[str, list[Row]] = {
    "linear_cross_entropy": [
        ({"labels": None}, TypeError, "labels is a NoneType"),
        ({"labels": TWICE}, ValueError, r"labels have shape \(4, 2\); hidden's leading shape \(4,\) is needed"),
        ({"label_smoothing": 1.5}, ValueError, r"label_smoothing=1\.5 must be between 0 and 1"),
        ({"label_smoothing": -0.1}, ValueError, r"label_smoothing=-0\.1 must be between 0 and 1"),
        ({"label_smoothing": NAN}, ValueError, "label_smoothing=nan must be between 0 and 1"),
        ({"z_loss": NAN}, ValueError, "z_loss=nan must be a finite number"),
        ({"z_loss": -1}, ValueError, "z_loss=-1 must be a finite number, at least 0"),
        ({"z_loss": [1e-4]}, ValueError, r"z_loss has shape \(1,\); it must be a scalar"),
        ({"class_weights": jnp.ones(4)}, ValueError, r"class_weights has shape \(4,\); .* \(5,\), one"),
        ({"class_weights": jnp.ones(5), "vocab_size": 4}, ValueError, r" \(5,\); it must be \(4,\), one .* vocab_size"),
        ({"class_weights": jnp.ones(5, complex)}, TypeError, "class_weights has dtype complex64; it must be real"),
    ],
    "linear_row_statistics": [
        ({"labels": LABELS > 1}, TypeError, "labels have dtype bool; they must be integers"),
        ({"labels": LABELS[:2]}, ValueError, r"labels have shape \(2,\); hidden's leading shape \(4,\)"),
        ({"labels": None}, ValueError, "names 'target_logit', which needs labels; labels is None"),
        ({"labels": None, "statistics": ("log_prob",)}, ValueError, "'log_prob', which needs labels"),
        ({"logit_weights": jnp.ones(6)}, ValueError, r"logit_weights has shape \(6,\); it must be \(5,\)"),
        ({"row_mask": jnp.ones(5, bool)}, ValueError, r"row_mask has shape \(5,\); hidden's leading shape"),
        ({"row_mask": jnp.ones(4)}, TypeError, "row_mask has dtype float32; it must be bool: pass row_mask !="),
        ({"statistics": ()}, ValueError, r"statistics is empty; choose from \('lse', "),
        ({"statistics": "lse"}, TypeError, r"statistics='lse' must be a sequence of names, .*\('lse',\)"),
        ({"statistics": None}, TypeError, "statistics=None must be a sequence of names"),
        ({"statistics": ("lse", "mean")}, ValueError, r"names 'mean', which is unknown; choose from \('lse'"),
    ],
    "linear_loss": [
        ({"logit_weights": jnp.ones(6)}, ValueError, r"logit_weights has shape \(6,\); it must be \(5,\)"),
        ({"row_mask": jnp.ones(4, int)}, TypeError, "row_mask has dtype int32; it must be bool: pass row_mask != 0"),
        ({"row_loss": None}, TypeError, "row_loss=None must be a hashable function"),
        ({"row_loss": _Unhashable()}, TypeError, "row_loss=.*_Unhashable.* must be a hashable function"),
        ({"row_loss": lambda s: s.lse.sum()}, ValueError, r"returned float32\[\] for 4 rows; .* floating \[4\]"),
        ({"row_loss": lambda s: s.lse[:, None]}, ValueError, r"row_loss returned float32\[4, 1\] for 4 rows"),
        ({"row_loss": lambda s: s.argmax}, ValueError, r"returned int32\[4\] for 4 rows; it must return floating"),
        ({"row_loss": lambda s: (s.lse, s.lse)}, ValueError, "row_loss returned a tuple for 4 rows"),
        ({"row_loss": lambda s: s.log_prob, "labels": None}, ValueError, "labels is None, so .*s.log_prob are None"),
        ({"row_loss": lambda s: -s.log_prob, "labels": None}, TypeError, "labels is None, so .*s.log_prob are None"),
        ({"row_inputs": (1.0, jnp.ones(3))}, ValueError, r"row_inputs\[1\] has shape \(3,\); it must be a scalar or"),
        ({"row_inputs": (None,)}, TypeError, r"row_inputs\[0\] is a NoneType"),
        ({"labels": None, "validate_labels": True}, ValueError, "validate_labels=True needs labels, which is None"),
    ],
    "explain": [
        ({"differentiate": "hidden"}, TypeError, r"differentiate='hidden' must be a sequence of names"),
        ({"differentiate": ("labels",)}, ValueError, r"differentiate names \['labels'\], .* choose from \('hid"),
        ({"reduction": "max"}, ValueError, "reduction='max' is unknown"),
        ({**IN_FORWARD, "reduction": "none"}, ValueError, "needs a scalar loss"),
        ({"hidden": [[1.0]]}, TypeError, "hidden is a list; it must be an array or a jax.ShapeDtypeStruct"),
    ],
    "linear_log_probs": [
        ({"labels": jnp.zeros((4, 2, 1), int)}, ValueError, r"shape \(4, 2, 1\).*\(4,\), or that with K >= 1 labels"),
        ({"labels": jnp.zeros((4, 0), int)}, ValueError, "K >= 1"),
        ({"temperature": NAN}, ValueError, "temperature=nan"),
        ({"temperature": jnp.ones(3)}, ValueError, r"temperature has shape \(3,\).*leading shape \(4,\)"),
        ({"temperature": jnp.ones(4, int)}, TypeError, "temperature has dtype int32"),
        ({"temperature": jnp.ones(4), **ALONE}, ValueError, "Python number"),
        ({"labels": ONCE + 7, "validate_labels": True}, ValueError, r"labels\[0\]=7 is neither"),
    ],
    "linear_top_k": [
        ({"k": 6}, ValueError, "k=6 must be an int between 1 and vocab_size=5"),
        ({"k": 4, "vocab_size": 3}, ValueError, "k=4 must be an int between 1 and vocab_size=3"),
        ({"temperature": np.array([1.0, -2.0, 1.0, 1.0])}, ValueError, "temperature=-2 must be"),
        ({"k": 3, "scratch_bytes": 50}, ValueError, "scratch_bytes=50 cannot hold one row in the forward pass"),
    ],
    "linear_sample": [
        *(
            ({"key": key}, TypeError, "key is .*; it must be one key, such as")
            for key in ("abc", 0, KEYS, np.zeros((2, 2), np.uint32), np.zeros(2, np.float32))
        ),
        ({"temperature": -1.0}, ValueError, "temperature=-1 must be a finite number at least 0"),
        ({"top_k": 6}, ValueError, "top_k=6 must be an int between 1 and vocab_size=5"),
        ({"scratch_bytes": 9}, ValueError, "scratch_bytes=9 cannot hold one row"),
    ],
    "sampled_softmax_cross_entropy": [
        *(({"key": key}, TypeError, "key is .*; it must be one key, such as") for key in ("abc", 0, KEYS)),
        ({"num_samples": 6}, ValueError, "num_samples=6 must be an int between 1 and vocab_size=5"),
        ({"sampler": "zipf"}, ValueError, r"sampler='zipf' is unknown; choose from 'log_uniform', 'uniform'"),
        ({"sampler": _one_id_too_many}, ValueError, r"returned ids int32\[3\], where integer\[2\] is needed"),
        ({"sampler": _too_few_expected}, ValueError, r"log_expected float32\[2\], where floating\[5\]"),
    ],
    "linear_distillation": [
        ({"divergence": "kl"}, ValueError, "divergence='kl' is unknown; choose from 'forward_kl'"),
        ({"beta": 1.0}, ValueError, r"beta=1\.0 must lie strictly between 0 and 1; for the ends .*='forward_kl'"),
        ({"beta": "half"}, TypeError, "beta is a str that JAX cannot read as an array"),
        ({"implementation": "mosaic_gpu"}, ValueError, "implementation='mosaic_gpu' does not serve distillation yet"),
        ({"implementation": "cuda"}, ValueError, "implementation='cuda' is unknown"),
        ({"teacher_hidden": jnp.ones((3, 7))}, ValueError, r"teacher_hidden has shape \(3, 7\) and hidden \(4, 3\)"),
        ({"teacher_weight": jnp.ones((6, 7))}, ValueError, "5 vocabulary entries and teacher_weight 6; pass vocab_s"),
        ({"reduction": "max"}, ValueError, "reduction='max' is unknown"),
        ({"scratch_bytes": 100}, ValueError, "scratch_bytes=100 cannot hold one row in the forward pass"),
    ],
    "linear_chain_crf": [
        ({"emissions": jnp.ones(3)}, ValueError, r"emissions has shape \(3,\); it must be \[..., T, K\]"),
        ({"tags": jnp.zeros((2, 4), int)}, ValueError, r"tags have shape \(2, 4\); emissions' \(2, 3\) is needed"),
        ({"transitions": jnp.ones((3, 3))}, ValueError, r"\(3, 3\); it must be \(4, 4\), or \(2, 2, 4, 4\)"),
    ],
    "chunked_cross_entropy": [
        *(
            ({"chunk_size": size}, ValueError, "chunk_size=.* must be a positive int, or 0 for 4096")
            for size in (-1, 2.0, True)
        ),
        ({"chunks": 4}, TypeError, r"chunked_cross_entropy\(\) got an unexpected keyword argument 'chunks'"),
    ],
    "selective_log_softmax": [
        ({"index": jnp.zeros(2)}, TypeError, "index has dtype float32; it must be an integer one"),
        ({"index": jnp.zeros(3, int)}, ValueError, r"index has shape \(3,\); logits' leading shape \(2,\)"),
        ({"index": jnp.zeros((2, 1, 1), int)}, ValueError, r"index has shape \(2, 1, 1\)"),
        ({"logits": INTEGERS}, TypeError, "logits have dtype int32"),
    ],
    "top_k_distillation_loss": [
        ({"divergence": "kl"}, ValueError, "divergence='kl' is unknown"),
        ({"divergence": "jsd", "beta": 1.0}, ValueError, r"beta=1\.0 must lie strictly between 0 and 1"),
        ({"log_probs": jnp.zeros(3)}, ValueError, r"log_probs has shape \(3,\); it must be \[..., T, K\]"),
        ({"teacher_log_probs": jnp.zeros((2, 4))}, ValueError, r"teacher_log_probs has shape \(2, 4\)"),
        ({"mask": jnp.ones((2, 3), bool)}, ValueError, r"mask has shape \(2, 3\); it must be \(2,\)"),
    ],
    "policy_loss": [
        ({"advantages": jnp.zeros(3)}, ValueError, r"advantages has shape \(3,\); it must be \(2, 3\) or \(2,\)"),
        ({"mask": jnp.ones((3, 2), bool)}, ValueError, r"mask has shape \(3, 2\)"),
        ({"mask": jnp.ones((2, 3), int)}, TypeError, "mask has dtype int32; it must be bool"),
        ({"log_probs": INTEGERS}, TypeError, "log_probs has dtype int32"),
        ({"log_probs": jnp.float32(0)}, ValueError, r"log_probs has shape \(\); it must be \[..., T\]"),
        ({"old_log_probs": jnp.zeros(2)}, ValueError, "old_log_probs has shape"),
        ({"kl_coefficient": 0.1}, ValueError, r"kl_coefficient=0\.1 needs ref_log_probs"),
        ({"kl_estimator": "k4"}, ValueError, "kl_estimator='k4' is unknown; choose from 'k1', 'k2', 'k3'"),
        ({"entropy_coefficient": 0.1}, ValueError, r"entropy_coefficient=0\.1 needs entropy"),
        ({"aggregation": "mean"}, ValueError, "aggregation='mean' is unknown"),
        ({"level": "word"}, ValueError, "level='word' is unknown"),
        ({"aggregation": "fixed_length"}, ValueError, "length=None with .*: 'fixed_length' needs a"),
        ({"aggregation": "fixed_length", "length": 0}, ValueError, "length=0 must be above 0"),
        ({"aggregation": "fixed_length", "length": -5.0}, ValueError, r"length=-5\.0 must be above 0"),
        ({"aggregation": "fixed_length", "length": "a"}, TypeError, "length is a str that JAX cannot read"),
        ({"length": 3}, ValueError, "length=3 with aggregation='token_mean': .* the others take none"),
        ({"ratio_limit": 1.1}, ValueError, r"ratio_limit=1\.1 must lie above"),
        ({"ratio_limit": "a"}, TypeError, "ratio_limit is a str"),
        ({"clip_low": 2.0}, ValueError, r"clip_low=2\.0 must be between"),
        ({"normalizer": 2, "aggregation": "none"}, ValueError, "divides by nothing"),
    ],
    "group_advantages": [
        ({"group_size": 2.0}, TypeError, r"group_size=2\.0 must be an int"),
        ({"rewards": jnp.zeros(3)}, ValueError, "group_size=2"),
    ],
    "kl_estimate": [({"estimator": "k4"}, ValueError, "estimator='k4'")],
    "dpo_loss": [
        ({"beta": 0.0}, ValueError, r"beta=0\.0 must be above 0"),
        ({"beta": np.float32(-1)}, ValueError, r"beta=np.float32\(-1.0\) must be above 0"),
        ({"label_smoothing": 0.6}, ValueError, r"label_smoothing=0\.6 must be between 0 and 0\.5"),
        ({"label_smoothing": 0.1, "kind": "ipo"}, ValueError, r"label_smoothing=0\.1 is for kind='sigmoid'"),
        ({"kind": "nca"}, ValueError, "kind='nca' is unknown"),
        ({"reduction": "max"}, ValueError, "reduction='max' is unknown"),
        ({"rejected": jnp.zeros(3)}, ValueError, r"rejected has shape \(3,\); it must be \(2,\)"),
    ],
    "MeshAxes": [
        ({"vocabulary": axes}, ValueError, re.escape(f"vocabulary={axes!r} must be the name of a mesh axis"))
        for axes in (3, None, ("data", 4))
    ],
}
OF_LOGITS: list[Row] = [
    ({"logits": jnp.zeros(()), "labels": 0}, ValueError, r"logits have shape \(\); they must be \[..., V\]"),
    ({"logits": INTEGERS}, TypeError, "logits have dtype int32; supported are bfloat16"),
    ({"labels": jnp.zeros(1, int)}, ValueError, r"labels have shape \(1,\); logits' leading shape \(2,\) is needed"),
    ({"labels": jnp.zeros(2)}, TypeError, "labels have dtype float32; they must be integers"),
    ({"vocab_size": 4}, ValueError, "vocab_size=4 must be .* the logits' 3 columns"),
    ({"class_weights": [1.0]}, ValueError, r"class_weights has shape \(1,\)"),
    ({"token_weights": [1.0]}, ValueError, "token_weights .* logits' leading shape"),
    ({"label_smoothing": 2.0}, ValueError, r"label_smoothing=2\.0 must be between 0 and 1"),
    ({"z_loss": -1e-4}, ValueError, "z_loss=-0.0001 must be a finite number, at least 0"),
    ({"logit_softcap": 0.0}, ValueError, r"logit_softcap=0\.0 must be a finite number above"),
    ({"reduction": "avg"}, ValueError, "reduction='avg' is unknown"),
    ({"labels": np.array([0, 5]), "validate_labels": True}, ValueError, r"labels\[1\]=5 is neither in"),
]
HEADS = ("linear_cross_entropy", "linear_row_statistics", "linear_loss", "explain")
ROWS = [
    *((name, *row) for name in HEADS for row in OF_THE_HEAD),
    *((name, *row) for name in ("linear_log_probs", *HEADS[:3]) for row in OF_MESH_AXES),
    *((name, *row) for name in ("linear_cross_entropy", "linear_loss") for row in OF_A_LOSS),
    *((name, *row) for name in ("cross_entropy", "chunked_cross_entropy") for row in OF_LOGITS),
    *((name, *row) for name, rows in OF_ONE.items() for row in rows),
]


@pytest.mark.parametrize(("name", "mistake", "error", "words"), ROWS, ids=[f"{row[0]} {row[3]}" for row in ROWS])
def test_a_mistake_is_named(name: str, mistake: dict[str, Any], error: type[Exception], words: str) -> None:
    function = _linear_loss if name == "linear_loss" else getattr(pallas_ce, name)
    with pytest.raises(error, match=words):
        function(**(ARGUMENTS[name] | mistake))


def test_what_must_not_be_traced_is_named() -> None:
    with pytest.raises(TypeError, match="logit_softcap must be a Python number"):
        jax.jit(lambda cap: pallas_ce.linear_cross_entropy(HIDDEN, WEIGHT, LABELS, logit_softcap=cap))(1.0)
    with pytest.raises(ValueError, match=r"row_loss reads a traced value of shape \(\) from its closure.*a row input"):
        jax.grad(lambda beta: _linear_loss(HIDDEN, WEIGHT, LABELS, lambda s: s.lse * beta))(1.0)


def test_a_fault_in_the_teachers_head_is_said_to_be_there() -> None:
    with pytest.raises(ValueError, match="the hidden size is 7 in the one and 3 in the other") as raised:
        pallas_ce.linear_distillation(HIDDEN, WEIGHT, jnp.ones((4, 7)), WEIGHT)
    assert raised.value.__notes__[0].startswith("This is about the teacher's head")
