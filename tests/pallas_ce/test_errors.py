"""Every error a caller can make: it names the argument, its value, and what would work.

What several functions read by one reader is tried on one of them; `test_each_function_has_the_reader_of_a_head` shows
that the others have it.
"""

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_ce
from pallas_ce import ClassSample, LowRank

HIDDEN, WEIGHT, LABELS = np.ones((4, 3)), np.ones((5, 3)), np.array([0, 1, 2, 4])
LOGITS, INTEGERS, COMPLEX = np.zeros((2, 3)), np.zeros((2, 3), int), np.ones(4, complex)
UP, DOWN = np.ones((5, 2)), np.ones((2, 3))
KEY, NAN, IN_FORWARD = jax.random.key(0), float("nan"), {"backward": "in_forward"}
KERNELS = {"implementation": "mosaic_gpu", "dtype": jnp.bfloat16}

Row = tuple[dict[str, Any], type[Exception], str]


class _Unhashable:
    __hash__ = None  # type: ignore[assignment]

    def __call__(self, statistics: Any) -> Any:
        return statistics.lse


def _lse(statistics: Any, *row_inputs: Any) -> Any:
    return statistics.lse + sum(row_inputs)


def _linear_loss(row_loss: Any = _lse, row_inputs: Any = (), **head: Any) -> Any:
    given = [head.pop(name) for name in ("hidden", "weight", "labels")]
    return pallas_ce.linear_loss(row_loss, *given, *row_inputs, **head)


def _one_id_too_many(key: Any, num_samples: int, vocab_size: int) -> Any:
    return ClassSample(np.zeros(num_samples + 1, int), np.zeros(vocab_size))


def _too_few_expected(key: Any, num_samples: int, vocab_size: int) -> Any:
    return ClassSample(np.zeros(num_samples, int), np.zeros(num_samples))


HEAD = {"hidden": HIDDEN, "weight": WEIGHT}
LABELLED, OF_STORED = {**HEAD, "labels": LABELS}, {"logits": LOGITS, "labels": np.array([0, 1])}
# Arguments with which nothing is wrong, to which a row of a table below adds one mistake.
ARGUMENTS: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("linear_cross_entropy", "linear_row_statistics", "linear_loss", "linear_log_probs"), LABELLED),
    "explain": HEAD,
    "linear_top_k": {**HEAD, "k": 1},
    "linear_sample": {"key": KEY, **HEAD},
    "sampled_softmax_cross_entropy": {**LABELLED, "key": KEY, "num_samples": 2},
    "linear_distillation": {**HEAD, "teacher_hidden": np.ones((4, 7)), "teacher_weight": np.ones((5, 7))},
    "linear_cross_entropy_and_gradients": {**LABELLED, "weight_sum": np.zeros((5, 3))},
    "linear_chain_crf": {"emissions": np.ones((2, 3, 4)), "tags": INTEGERS, "transitions": np.ones((4, 4))},
    **dict.fromkeys(("cross_entropy", "chunked_cross_entropy"), OF_STORED),
    "selective_log_softmax": {"logits": LOGITS, "index": np.zeros(2, int)},
    "top_k_distillation_loss": {"log_probs": LOGITS, "teacher_log_probs": LOGITS},
    "policy_loss": {"log_probs": LOGITS, "advantages": np.zeros(2)},
    "group_advantages": {"rewards": np.zeros(4), "group_size": 2},
    "kl_estimate": {"log_probs": np.zeros(3), "ref_log_probs": np.zeros(3)},
    "dpo_loss": {name: np.zeros(2) for name in ("chosen", "rejected", "ref_chosen", "ref_rejected")},
    "MeshAxes": {},
}
OF_ONE: dict[str, list[Row]] = {
    "linear_cross_entropy": [
        ({"hidden": "text"}, TypeError, "hidden is a str"),
        ({"hidden": np.ones((4, 3), int)}, TypeError, "hidden has dtype int32; it must be a floating dtype"),
        ({"hidden": HIDDEN.astype(jnp.float8_e4m3fn)}, TypeError, "hidden float8_e4m3fn .*names no compute dtype"),
        ({"weight": np.ones(5)}, ValueError, r"weight has shape \(5,\); it must have two axes, \[V, H\] or \[H, V\]"),
        ({"weight": np.ones((5, 3), int)}, TypeError, "weight has dtype int32; it must be a floating dtype"),
        ({"weight": np.ones((0, 3))}, ValueError, r"weight has shape \(0, 3\); both axes must be at least 1"),
        ({"weight": np.ones((3, 5))}, ValueError, r"weight \(3, 5\).* vocab_axis=0: .*is vocab_axis the right one\?"),
        ({"vocab_axis": 1}, ValueError, r"vocab_axis=1: .*is vocab_axis the right one\?"),
        ({"vocab_axis": 2}, ValueError, r"vocab_axis=2 must be 0 \(weight \[V, H\]\) or 1"),
        ({"vocab_axis": True}, ValueError, "vocab_axis=True must be 0"),
        ({"bias": np.ones(5, int)}, TypeError, "bias has dtype int32; it must be a floating dtype"),
        ({"vocab_scale": np.ones(4)}, ValueError, r"vocab_scale has shape \(4,\); it must be \(5,\), one entry"),
        ({"vocab_size": 0}, ValueError, "vocab_size=0 must be an int between 1 and the weight's 5 entries"),
        ({"vocab_size": 4.0}, ValueError, r"vocab_size=4\.0 must be an int between 1 and"),
        ({"logit_softcap": 0.0}, ValueError, r"logit_softcap=0\.0 must be a finite number above 0, or None for no cap"),
        ({"logit_softcap": NAN}, ValueError, "logit_softcap=nan must be a finite number above 0"),
        ({"logit_softcap": 1e39}, ValueError, r"logit_softcap=1e\+39 must .* lies outside \[1e-08, 1e\+33\]"),
        ({"logit_softcap": "soft"}, TypeError, "logit_softcap='soft' must be a finite number above 0"),
        ({"logit_softcap": 10**400}, ValueError, "logit_softcap=1000.*… must be"),
        ({"logit_scale": np.ones(4)}, ValueError, r"logit_scale has shape \(4,\); it must be a scalar"),
        ({"logit_scale": None}, TypeError, "logit_scale is None; it must be a number"),
        ({"dtype": "floaty"}, TypeError, "dtype='floaty' names no compute dtype; supported are bfloat16, float16"),
        ({"dtype": jnp.float64}, ValueError, r"dtype=float64 needs JAX's 64-bit mode: jax\.config\.update"),
        ({"precision": "ANY_F8_ANY_F8_F32"}, ValueError, "='ANY_F8_ANY_F8_F32' multiplies 8-bit operands, .* choose"),
        ({"precision": 2}, TypeError, "precision=2 is a int; it must be one name for all products, a jax.lax.Prec"),
        ({"implementation": "cuda"}, ValueError, r"implementation='cuda' is unknown; choose from \(.*'xla'.*\) or N"),
        ({"implementation": ""}, ValueError, r"implementation='' is unknown"),
        ({"scratch_bytes": True}, ValueError, "scratch_bytes=True must be a positive int"),
        ({"scratch_bytes": 9, "implementation": "xla"}, ValueError, r"=9 cannot hold one row .* at least \d+ bytes"),
        ({"mesh_axes": "tensor"}, TypeError, r"mesh_axes='tensor' must be a MeshAxes, such as MeshAxes\(vocabulary="),
        ({"labels": None}, TypeError, "labels is a NoneType"),
        ({"labels": LABELS[:, None]}, ValueError, r"labels have shape \(4, 1\); hidden's leading shape \(4,\)"),
        ({"labels": LABELS > 1}, TypeError, "labels have dtype bool; integers are needed"),
        ({"labels": np.eye(4, 5)}, TypeError, "integers are needed; of class probabilities take labels.argmax"),
        ({"weight": LABELS}, ValueError, "must have two axes, .*; arguments come as hidden, weight, labels"),
        ({"labels": np.array([0, -100, 2**32, -9]), "validate_labels": True}, ValueError,
         rf"labels\[2\]={2**32} is neither in \[0, vocab_size=5\) nor ignore_index=-100"),
        ({"labels": np.array([0, -100]), "hidden": HIDDEN[:2], "validate_labels": True, "ignore_index": None},
         ValueError, r"labels\[1\]=-100 is neither in .* nor ignore_index=None"),
        ({"labels": np.array([[0, 1], [4, 4]], np.uint8), "hidden": np.ones((2, 2, 3)), "vocab_size": 4,
          "validate_labels": True}, ValueError, r"labels\[1, 0\]=4 is neither in \[0, vocab_size=4\)"),
        ({"ignore_index": 1.0}, TypeError, r"ignore_index=1\.0 must be a Python int, or None"),
        ({"token_weights": np.ones(5)}, ValueError, r"token_weights has shape \(5,\); hidden's leading shape \(4,\)"),
        ({"token_weights": COMPLEX}, TypeError, "token_weights has dtype complex64; it must be real"),
        ({"normalizer": np.ones(4)}, ValueError, r"normalizer has shape \(4,\); it must be a scalar"),
        ({"normalizer": 3, "reduction": "sum"}, ValueError, "normalizer is given with reduction='sum'; only reductio"),
        ({"reduction": "max"}, ValueError, "reduction='max' is unknown; choose from 'mean', 'sum', 'none'"),
        ({"backward": "fast"}, ValueError, "backward='fast' is unknown; choose from 'auto', 'recompute', 'in_forward'"),
        ({**IN_FORWARD, "reduction": "none"}, ValueError, "needs a scalar loss, .* or backward='recompute'"),
        ({"backward": "recompute", "implementation": "reference"}, ValueError, "leave backward='auto'"),
        ({**IN_FORWARD, "scratch_bytes": 90, "implementation": "xla"}, ValueError, "=90 cannot hold .*in_forward"),
        ({"label_smoothing": 1.5}, ValueError, r"label_smoothing=1\.5 must be between 0 and 1"),
        ({"z_loss": -1}, ValueError, "z_loss=-1 must be a finite number, at least 0"),
        ({"z_loss": [1e-4]}, ValueError, r"z_loss has shape \(1,\); it must be a scalar"),
        ({"class_weights": np.ones(5), "vocab_size": 4}, ValueError, r" \(5,\); vocab_size's shape \(4,\) is needed"),
        ({"class_weights": np.ones(5, complex)}, TypeError, "class_weights has dtype complex64; it must be real"),
        *(({"shift": x}, ValueError, f"shift={x!r} must be an int, at least 0") for x in (-1, 1.0, True, "1", None)),
        *(({"weight": LowRank(WEIGHT, *term)}, error, words) for term, error, words in (
            ((UP[:, :1], DOWN), ValueError, r"weight.down has shape \(2, 3\).* equal to weight.up's, 1"),
            ((UP[1:], DOWN), ValueError, r"up.*\(4, 2\)"),
            ((UP, DOWN[:, 1:]), ValueError, r"down.*\(2, 2\)"),
            ((UP[:, 0], DOWN), ValueError, "up"),
            ((UP.astype(int), DOWN), TypeError, "up"),
            ((UP, DOWN, "2"), TypeError, "weight.scale is a str"),
            ((UP, DOWN, np.ones(())), TypeError, "weight.scale is a .* multiply weight.up"),
            ((UP, DOWN, NAN), ValueError, "weight.scale"),
        )),
    ],
    "linear_row_statistics": [
        ({"labels": None}, ValueError, "names 'target_logit', which needs labels; labels is None"),
        ({"hidden": WEIGHT, "weight": HIDDEN}, ValueError, r"hidden's leading shape \(5,\).*arguments come as "),
        ({"row_mask": np.ones(4)}, TypeError, "row_mask has dtype float32; it must be bool: pass row_mask !="),
        ({"statistics": ()}, ValueError, r"statistics is empty; choose from \('lse', "),
        ({"statistics": "lse"}, TypeError, r"statistics='lse' must be a sequence of names, .*\('lse',\)"),
        ({"statistics": ("lse", "mean")}, ValueError, r"names 'mean', which is unknown; choose from \('lse'"),
    ],
    "linear_loss": [
        ({"row_loss": _Unhashable()}, TypeError, "row_loss=.*_Unhashable.* must be a hashable function"),
        ({"row_loss": lambda s: s.lse.sum()}, ValueError, r"returned float32\[\] for 4 rows; .* floating \[4\]"),
        ({"row_loss": lambda s: s.argmax}, ValueError, r"returned int32\[4\] for 4 rows; it must return floating"),
        ({"row_loss": lambda s: (s.lse, s.lse)}, ValueError, "row_loss returned a tuple for 4 rows"),
        ({"row_loss": lambda s: s.log_prob, "labels": None}, ValueError, "labels is None, so .*s.log_prob are None"),
        ({"row_loss": lambda s: -s.log_prob, "labels": None}, TypeError, "labels is None, so .*s.log_prob are None"),
        ({"row_inputs": (1.0, np.ones(3))}, ValueError, r"row_inputs\[1\] has shape \(3,\); it must be a scalar or"),
        ({"row_inputs": ({"a": 1.0},)}, TypeError, r"row_inputs\[0\] is a dict; it must be one array"),
        ({"labels": None, "validate_labels": True}, ValueError, "validate_labels=True needs labels, which is None"),
        ({"labels": None, "shift": 1}, ValueError, "shift=1 needs labels, which is None"),
    ],
    "explain": [
        ({"differentiate": ("labels",)}, ValueError, r"differentiate names \['labels'\], .* choose from \('hid"),
        ({**IN_FORWARD, "reduction": "none"}, ValueError, "needs a scalar loss"),
        ({"hidden": [[1.0]]}, TypeError, "hidden is a list; it must be an array or a jax.ShapeDtypeStruct"),
    ],
    "linear_log_probs": [
        ({"labels": np.zeros((4, 0), int)}, ValueError, r"shape \(4, 0\).*\(4,\), or that with K >= 1 labels"),
        ({"temperature": np.ones(4), **KERNELS}, ValueError, "Python number"),
        ({"labels": LABELS + 7, "validate_labels": True}, ValueError, r"labels\[0\]=7 is neither"),
        ({"hidden": HIDDEN[0], "labels": LABELS[0], "shift": 1}, ValueError, "an axis of positions; hidden is a singl"),
        ({"support": jnp.zeros((4, 2))}, TypeError, "support has dtype float32"),
        *(({"support": np.zeros(shape, int)}, ValueError, rf"support has shape {re.escape(str(shape))}")
          for shape in ((4,), (4, 0), (3, 2))),
        ({"labels": np.zeros((4, 2), int), "support": np.zeros((4, 2), int)}, ValueError,
         r"one label of each row, \(4,\), and labels have shape \(4, 2\)"),
    ],
    "linear_top_k": [
        ({"k": 4, "vocab_size": 3}, ValueError, "k=4 must be an int between 1 and vocab_size=3"),
        ({"k": 3, "scratch_bytes": 50}, ValueError, "scratch_bytes=50 cannot hold one row in the forward pass"),
    ],
    "linear_sample": [
        *(({"key": key}, TypeError, "key is .*; it must be one key, such as")
          for key in ("abc", 0, jax.random.split(KEY, 5), np.zeros((2, 2), np.uint32), np.zeros(2, np.float32))),
        ({"temperature": -1.0}, ValueError, "temperature=-1 must be 0, or between 1e-05 and 1e"),
        *(({"top_p": x}, ValueError, f"top_p={x} must be above 0 and at most 1") for x in (0, -0.1, 1.5, NAN)),
        *(({"min_p": x}, ValueError, f"min_p={x} must be at least 0 and at most 1") for x in (-0.1, 1.5, NAN)),
        ({"top_p": np.float32([0.5, 2, 1, 1])}, ValueError, "top_p=2 must be above 0"),
        ({"top_p": np.float32([0.5, 0, 1, 1])}, ValueError, "top_p=0 must be above 0"),
        ({"top_p": np.ones(3)}, ValueError, r"top_p has shape \(3,\); it must be a scalar or have hidden's leading"),
        ({"min_p": np.ones(4, int)}, TypeError, "min_p has dtype int32; it must be a floating dtype"),
        ({"top_p": "0.9"}, TypeError, "top_p is a str"),
    ],
    "sampled_softmax_cross_entropy": [
        ({"sampler": "zipf"}, ValueError, r"sampler='zipf' is unknown; choose from 'log_uniform', 'uniform'"),
        ({"sampler": _one_id_too_many}, ValueError, r"returned ids int64\[3\], where integer\[2\] is needed"),
        ({"sampler": _too_few_expected}, ValueError, r"log_expected float32\[2\], where floating\[5\]"),
    ],
    "linear_distillation": [
        ({"beta": 1.0}, ValueError, r"beta=1\.0 must be strictly between 0 and 1; for the ends .*='forward_kl'"),
        ({"implementation": "mosaic_gpu"}, ValueError, "implementation='mosaic_gpu' does not serve distillation;"),
        ({"teacher_hidden": np.ones((3, 7))}, ValueError, r"teacher_hidden has shape \(3, 7\) and hidden \(4, 3\)"),
        ({"hidden": WEIGHT, "weight": HIDDEN}, ValueError, "the order is hidden, weight, teacher_hidden, teac"),
        ({"hidden": WEIGHT, "weight": HIDDEN, "labels": LABELS}, ValueError, "arguments come as hidden, weight, l"),
        ({"teacher_weight": np.ones((6, 7))}, ValueError, "5 vocabulary entries and teacher_weight 6; pass vocab_s"),
        ({"scratch_bytes": 100}, ValueError, "scratch_bytes=100 cannot hold one row in the forward pass"),
    ],
    "linear_cross_entropy_and_gradients": [
        ({"weight_sum": WEIGHT.T}, ValueError, r"weight_sum has shape \(3, 5\); it must be \(5, 3\), the"),
        ({"weight_sum": np.ones((5, 3), jnp.float16)}, TypeError, "weight_sum is float16; it must be float32"),
        ({"weight_sum": np.ones((5, 3), int)}, TypeError, "weight_sum is int"),
        ({"bias_sum": np.ones(5)}, ValueError, "bias_sum is given and bias is None"),
        ({"bias": np.ones(5), "bias_sum": np.ones(4)}, ValueError, r"bias_sum has shape \(4,\)"),
        ({"reduction": "none"}, ValueError, "reduction='none' has no single gradient"),
        ({"loss_scale": np.ones(2)}, ValueError, "loss_scale"),
        ({"loss_scale": "1"}, TypeError, "loss_scale"),
        ({"weight": LowRank(WEIGHT, UP, DOWN)}, TypeError, "weight is a LowRank"),
    ],
    "linear_chain_crf": [
        ({"emissions": np.ones(3)}, ValueError, r"emissions has shape \(3,\); it must be \[..., T, K\]"),
        ({"tags": np.zeros((2, 4), int)}, ValueError, r"tags have shape \(2, 4\); emissions' \(2, 3\) is needed"),
        ({"transitions": np.ones((3, 3))}, ValueError, r"\(3, 3\); it must be \(4, 4\), or \(2, 2, 4, 4\)"),
    ],
    "cross_entropy": [
        ({"logits": np.zeros(()), "labels": 0}, ValueError, r"logits have shape \(\); they must be \[..., V\]"),
        ({"vocab_size": 4}, ValueError, "vocab_size=4 must be .* the logits' 3 columns"),
        ({"token_weights": [1.0]}, ValueError, "token_weights .* logits' leading shape"),
        ({"labels": np.array([0, 5]), "validate_labels": True}, ValueError, r"labels\[1\]=5 is neither in"),
    ],
    "chunked_cross_entropy": [
        ({"chunk_size": True}, ValueError, "chunk_size=True must be a positive int, or 0 for 4096"),
        ({"chunks": 4}, TypeError, r"chunked_cross_entropy\(\) got an unexpected keyword argument 'chunks'"),
    ],
    "policy_loss": [
        ({"ratio_limit": 9.0, "objective": "sapo"}, ValueError, r"ratio_limit=9\.0 is for objective='clip'"),
        ({"gate_temperatures": 1.0, "objective": "sapo"}, ValueError, r"gate_temperatures=1\.0 must be a pair"),
        ({"sampler_log_probs": np.zeros((2, 3)), "sampler_range": (-1.0, 2.0)}, ValueError, "sampler_range=-1.0 must"),
        ({"sampler_log_probs": np.zeros((2, 3)), "sampler_range": (3.0, 2.0)}, ValueError, r"sampler_range=\(3\.0, 2"),
        ({"kl_coefficient": 0.1}, ValueError, r"kl_coefficient=0\.1 needs ref_log_probs"),
        ({"entropy_coefficient": 0.1}, ValueError, r"entropy_coefficient=0\.1 needs entropy"),
        ({"aggregation": "fixed_length"}, ValueError, "length=None with .*: 'fixed_length' needs a"),
        ({"aggregation": "fixed_length", "length": 0}, ValueError, "length=0 must be above 0"),
        ({"length": 3}, ValueError, "length=3 with aggregation='token_mean': .* the others take none"),
        ({"ratio_limit": 1.1}, ValueError, r"ratio_limit=1\.1 must lie above"),
        ({"normalizer": 2, "aggregation": "none"}, ValueError, "divides by nothing"),
    ],
    "dpo_loss": [({"label_smoothing": 0.1, "kind": "ipo"}, ValueError, r"label_smoothing=0\.1 is for kind='sigmoid'")],
}  # fmt: skip
# By function, mistakes in single arguments that a reader of several functions names.
NAMED: dict[str, dict[str, Any]] = {
    "linear_row_statistics": {"labels": LABELS > 1, "logit_weights": np.ones(6), "row_mask": np.ones(5, bool),
                              "mesh_axes": ("data",)},
    "linear_loss": {"labels": LABELS * 1.0, "row_inputs": (None,), "reduction": "max", "backward": "fast",
                    "mesh_axes": ("data",)},
    "explain": {"differentiate": "hidden", "reduction": "max"},
    "linear_log_probs": {"labels": LABELS[:2], "temperature": np.ones(3), "mesh_axes": ("data",)},
    "linear_top_k": {"k": 6, "temperature": np.ones(4, int), "row_mask": np.ones(4)},
    "linear_sample": {"top_k": 6, "scratch_bytes": 9, "row_mask": np.ones(4)},
    "sampled_softmax_cross_entropy": {"key": "abc", "num_samples": 6, "reduction": "max"},
    "linear_distillation": {"divergence": "kl", "reduction": "max", "implementation": "cuda", "beta": "half"},
    "cross_entropy": {"logits": INTEGERS, "labels": np.zeros(1, int), "class_weights": [1.0], "logit_softcap": 0.0},
    "chunked_cross_entropy": {"labels": np.zeros(2), "label_smoothing": 2.0, "z_loss": -1e-4, "reduction": "avg"},
    "selective_log_softmax": {"index": np.zeros((2, 1, 1), int), "logits": INTEGERS},
    "top_k_distillation_loss": {"divergence": "kl", "log_probs": np.zeros(3), "teacher_log_probs": np.zeros((2, 4)),
                                "mask": np.ones((2, 3), bool)},
    "policy_loss": {"advantages": np.zeros(3), "mask": np.ones((2, 3), int), "log_probs": jnp.float32(0),
                    "old_log_probs": np.zeros(2), "kl_estimator": "k4", "aggregation": "mean", "level": "word",
                    "ratio_limit": "a", "clip_low": 2.0},
    "group_advantages": {"group_size": 2.0, "rewards": np.zeros(3)},
    "kl_estimate": {"estimator": "k4"},
    "dpo_loss": {"beta": np.float32(-1), "label_smoothing": 0.6, "kind": "nca", "rejected": np.zeros(3)},
    "MeshAxes": {"vocabulary": ("data", 4)},
}  # fmt: skip
ROWS = [(name, *row) for name, rows in OF_ONE.items() for row in rows]
HEADS = [name for name, given in ARGUMENTS.items() if "hidden" in given]


def called(name: str, **mistake: Any) -> Any:
    function = _linear_loss if name == "linear_loss" else getattr(pallas_ce, name)
    return function(**(ARGUMENTS[name] | mistake))


@pytest.mark.parametrize(("name", "mistake", "error", "words"), ROWS, ids=[f"{row[0]} {row[3]}" for row in ROWS])
def test_a_mistake_is_named(name: str, mistake: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        called(name, **mistake)


@pytest.mark.parametrize(("name", "argument"), [(name, x) for name, given in NAMED.items() for x in given])
def test_an_argument_is_named_with_what_is_wrong(name: str, argument: str) -> None:
    with pytest.raises((TypeError, ValueError), match=rf"\b({argument}|group_size)\b"):
        called(name, **{argument: NAMED[name][argument]})


@pytest.mark.parametrize("name", HEADS)
def test_each_function_has_the_reader_of_a_head(name: str) -> None:
    for mistake, words in (
        ({"hidden": jnp.float32(1)}, r"hidden has shape \(\); it must be \[\.\.\., H\]"),
        ({"bias": jnp.ones(4), "vocab_size": 4}, r"bias has shape \(4,\); it must be \(5,\), one entry"),
        ({"vocab_size": 6}, "vocab_size=6 must be an int between 1 and the weight's 5 entries"),
        ({"logit_scale": NAN}, "logit_scale=nan must be a finite number"),
        ({"precision": "fast"}, "precision='fast' is unknown; choose from 'default', .*'TF32_TF32_F32'"),
        ({"scratch_bytes": 0}, "scratch_bytes=0 must be a positive int, or None for the default"),
    ):
        with pytest.raises(ValueError, match=words):
            called(name, **mistake)


def test_what_must_not_be_traced_is_named() -> None:
    with pytest.raises(TypeError, match="logit_softcap must be a Python number"):
        jax.jit(lambda cap: called("linear_cross_entropy", logit_softcap=cap))(1.0)
    with pytest.raises(ValueError, match=r"row_loss reads a traced value of shape \(\) from its closure.*a row input"):
        jax.grad(lambda beta: called("linear_loss", row_loss=lambda s: s.lse * beta))(1.0)


def test_a_fault_in_the_teachers_head_is_said_to_be_there() -> None:
    with pytest.raises(ValueError, match="the hidden size is 7 in the one and 3 in the other") as raised:
        called("linear_distillation", teacher_weight=WEIGHT)
    assert raised.value.__notes__[0].startswith("This is about the teacher's head")


@pytest.mark.parametrize(
    ("name", "tensor"), [("linear_cross_entropy", "labels"), ("explain", "hidden"), ("cross_entropy", "logits")]
)
def test_tensors_belong_to_the_bridge(name: str, tensor: str) -> None:
    torch = pytest.importorskip("torch")
    given = ARGUMENTS[name] | {tensor: torch.zeros(ARGUMENTS[name][tensor].shape)}
    with pytest.raises(TypeError, match=rf"{tensor} is a torch\.Tensor: torch_bridge has these functions"):
        getattr(pallas_ce, name)(**given)
