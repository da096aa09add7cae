"""Every error a caller can make: it names the argument, its value, and what would work."""

import inspect
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_ce
from pallas_ce import (
    cross_entropy,
    explain,
    linear_chain_crf,
    linear_cross_entropy,
    linear_distillation,
    linear_log_probs,
    linear_loss,
    linear_row_statistics,
    linear_sample,
    linear_top_k,
    policy_loss,
    sampled_softmax_cross_entropy,
)
from pallas_ce.statistics.row import STATISTICS

HIDDEN, WEIGHT = jnp.ones((4, 3)), jnp.ones((5, 3))
LABELS = jnp.array([0, 1, 2, 4])
NAN = float("nan")


def _cross_entropy(hidden: Any = HIDDEN, weight: Any = WEIGHT, labels: Any = LABELS, **options: Any) -> Any:
    return linear_cross_entropy(hidden, weight, labels, **options)


def _statistics(hidden: Any = HIDDEN, weight: Any = WEIGHT, labels: Any = LABELS, **options: Any) -> Any:
    return linear_row_statistics(hidden, weight, labels, **options)


def _lse(statistics: Any, *row_inputs: Any) -> Any:
    return statistics.lse + sum(row_inputs)


def _loss(
    row_loss: Any = _lse,
    *row_inputs: Any,
    hidden: Any = HIDDEN,
    weight: Any = WEIGHT,
    labels: Any = LABELS,
    **options: Any,
) -> Any:
    return linear_loss(row_loss, hidden, weight, labels, *row_inputs, **options)


def _explain(hidden: Any = HIDDEN, weight: Any = WEIGHT, **options: Any) -> Any:
    return explain(hidden, weight, **options)


# What describes the head is read by all four functions, in one place.
HEAD_ERRORS: list[tuple[dict[str, Any], type[Exception], str]] = [
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
    ({"logit_softcap": float("inf")}, ValueError, "logit_softcap=inf must be a finite number above 0"),
    ({"logit_softcap": "soft"}, TypeError, "logit_softcap='soft' must be a number above 0"),
    ({"logit_scale": jnp.ones(4)}, ValueError, r"logit_scale has shape \(4,\); it must be a scalar"),
    ({"logit_scale": NAN}, ValueError, "logit_scale=nan must be a finite number"),
    ({"logit_scale": None}, TypeError, "logit_scale is a NoneType"),
    ({"dtype": jnp.int8}, TypeError, "dtype=.*int8.* asks for computing in int8; supported are bfloat16, float16"),
    ({"dtype": "floaty"}, TypeError, "dtype='floaty' names no compute dtype; supported are bfloat16, float16"),
    ({"dtype": jnp.float64}, ValueError, r"dtype=float64 needs JAX's 64-bit mode: jax\.config\.update"),
    ({"hidden": HIDDEN.astype(jnp.float8_e4m3fn)}, TypeError, "hidden float8_e4m3fn .*names no compute dtype"),
    ({"implementation": "cuda"}, ValueError, r"implementation='cuda' is unknown; choose from \(.*'xla'.*\) or None"),
    ({"scratch_bytes": 0}, ValueError, "scratch_bytes=0 must be a positive int, or None for the default"),
    ({"scratch_bytes": True}, ValueError, "scratch_bytes=True must be a positive int"),
    ({"scratch_bytes": 1e9}, ValueError, r"scratch_bytes=1000000000\.0 must be a positive int"),
    ({"scratch_bytes": 0, "implementation": "reference"}, ValueError, "scratch_bytes=0 must be a positive int"),
    (
        {"scratch_bytes": 9, "implementation": "xla"},
        ValueError,
        r"scratch_bytes=9 cannot hold one row .* at least \d+ bytes are needed",
    ),
]


@pytest.mark.parametrize("call", [_cross_entropy, _statistics, _loss, _explain])
@pytest.mark.parametrize(("arguments", "error", "message"), HEAD_ERRORS, ids=lambda x: x if isinstance(x, str) else "")
def test_a_head_that_does_not_fit_is_named(
    arguments: dict[str, Any], error: type[Exception], message: str, call: Callable[..., Any]
) -> None:
    with pytest.raises(error, match=message):
        call(**arguments)


LOSS_ERRORS: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"labels": LABELS[:, None, None]}, ValueError, r"labels have shape \(4, 1, 1\); hidden's leading shape \(4,\)"),
    ({"labels": LABELS * 1.0}, TypeError, "labels have dtype float32; they must be integers"),
    ({"labels": LABELS > 1}, TypeError, "labels have dtype bool; they must be integers"),
    ({"ignore_index": 1.0}, TypeError, r"ignore_index=1\.0 must be a Python int, or None"),
    ({"ignore_index": jnp.int32(1)}, TypeError, r"ignore_index=Array\(1.*\) must be a Python int, or None"),
    ({"token_weights": jnp.ones(5)}, ValueError, r"token_weights has shape \(5,\); hidden's leading shape \(4,\)"),
    ({"token_weights": "heavy"}, TypeError, "token_weights is a str"),
    ({"normalizer": jnp.ones(4)}, ValueError, r"normalizer has shape \(4,\); it must be a scalar"),
    ({"normalizer": NAN}, ValueError, "normalizer=nan must be a finite number"),
    ({"normalizer": 3, "reduction": "sum"}, ValueError, "normalizer is given with reduction='sum'; only reduction='m"),
    ({"reduction": "max"}, ValueError, "reduction='max' is unknown; choose from 'mean', 'sum', 'none'"),
    ({"backward": "fast"}, ValueError, "backward='fast' is unknown; choose from 'auto', 'recompute', 'in_forward'"),
    ({"backward": "in_forward", "reduction": "none"}, ValueError, "needs a scalar loss, .* or backward='recompute'"),
    ({"backward": "recompute", "implementation": "reference"}, ValueError, "leave backward='auto'"),
    (
        {"backward": "in_forward", "scratch_bytes": 90, "implementation": "xla"},
        ValueError,
        "scratch_bytes=90 cannot hold one row .*in_forward",
    ),
]


@pytest.mark.parametrize("call", [_cross_entropy, _loss])
@pytest.mark.parametrize(("arguments", "error", "message"), LOSS_ERRORS, ids=lambda x: x if isinstance(x, str) else "")
def test_loss_options_that_do_not_fit_are_named(
    arguments: dict[str, Any], error: type[Exception], message: str, call: Callable[..., Any]
) -> None:
    with pytest.raises(error, match=message):
        call(**arguments)


class _Unhashable:
    __hash__ = None  # type: ignore[assignment]

    def __call__(self, statistics: Any) -> Any:
        return statistics.lse


# Each call has one mistake of its own.
OTHER_ERRORS: list[tuple[Callable[[], Any], type[Exception], str]] = [
    (lambda: _cross_entropy(labels=None), TypeError, "labels is a NoneType"),
    (lambda: _statistics(labels=LABELS > 1), TypeError, "labels have dtype bool; they must be integers"),
    (lambda: _statistics(labels=LABELS[:2]), ValueError, r"labels have shape \(2,\); hidden's leading shape \(4,\)"),
    (lambda: _cross_entropy(label_smoothing=1.5), ValueError, r"label_smoothing=1\.5 must be between 0 and 1"),
    (lambda: _cross_entropy(label_smoothing=-0.1), ValueError, r"label_smoothing=-0\.1 must be between 0 and 1"),
    (lambda: _cross_entropy(label_smoothing=NAN), ValueError, "label_smoothing=nan must be between 0 and 1"),
    (lambda: _cross_entropy(label_smoothing=np.ones(1)), ValueError, r"label_smoothing has shape \(1,\); it must be"),
    (lambda: _cross_entropy(z_loss=NAN), ValueError, "z_loss=nan must be a finite number"),
    (lambda: _cross_entropy(z_loss=[1e-4]), ValueError, r"z_loss has shape \(1,\); it must be a scalar"),
    (lambda: _cross_entropy(z_loss=None), TypeError, "z_loss is a NoneType"),
    (lambda: _cross_entropy(class_weights=jnp.ones(4)), ValueError, r"class_weights has shape \(4,\); .* \(5,\), one"),
    (
        lambda: _cross_entropy(class_weights=jnp.ones(5), vocab_size=4),
        ValueError,
        r"class_weights has shape \(5,\); it must be \(4,\), one entry for each of vocab_size",
    ),
    (lambda: _statistics(logit_weights=jnp.ones(6)), ValueError, r"logit_weights has shape \(6,\); it must be \(5,\)"),
    (lambda: _loss(logit_weights=jnp.ones(6)), ValueError, r"logit_weights has shape \(6,\); it must be \(5,\)"),
    (lambda: _statistics(row_mask=jnp.ones(5, bool)), ValueError, r"row_mask has shape \(5,\); hidden's leading shape"),
    (
        lambda: _statistics(row_mask=jnp.ones(4)),
        TypeError,
        "row_mask has dtype float32; it must be bool: pass row_mask !=",
    ),
    (
        lambda: _loss(row_mask=jnp.ones(4, int)),
        TypeError,
        "row_mask has dtype int32; it must be bool: pass row_mask != 0",
    ),
    (lambda: _statistics(statistics=()), ValueError, r"statistics is empty; choose from \('lse', "),
    (lambda: _statistics(statistics="lse"), TypeError, r"statistics='lse' must be a sequence of names, .*\('lse',\)"),
    (lambda: _statistics(statistics=None), TypeError, "statistics=None must be a sequence of names"),
    (
        lambda: _statistics(statistics=("lse", "mean")),
        ValueError,
        r"names 'mean', which is unknown; choose from \('lse'",
    ),
    (lambda: _statistics(labels=None), ValueError, "names 'target_logit', which needs labels; labels is None"),
    (lambda: _statistics(labels=None, statistics=("log_prob",)), ValueError, "'log_prob', which needs labels"),
    (lambda: _loss(None), TypeError, "row_loss=None must be a hashable function"),
    (lambda: _loss(_Unhashable()), TypeError, "row_loss=.*_Unhashable.* must be a hashable function"),
    (lambda: _loss(lambda s: s.lse.sum()), ValueError, r"row_loss returned float32\[\] for 4 rows; .* floating \[4\]"),
    (lambda: _loss(lambda s: s.lse[:, None]), ValueError, r"row_loss returned float32\[4, 1\] for 4 rows"),
    (
        lambda: _loss(lambda s: s.argmax),
        ValueError,
        r"row_loss returned int32\[4\] for 4 rows; it must return floating",
    ),
    (lambda: _loss(lambda s: (s.lse, s.lse)), ValueError, "row_loss returned a tuple for 4 rows"),
    (
        lambda: _loss(lambda s: s.log_prob, labels=None),
        ValueError,
        "labels is None, so .* statistics.log_prob are None",
    ),
    (
        lambda: _loss(lambda s: -s.log_prob, labels=None),
        TypeError,
        "labels is None, so .* statistics.log_prob are None",
    ),
    (
        lambda: jax.grad(lambda beta: _loss(lambda s: s.lse * beta))(1.0),
        ValueError,
        r"row_loss reads a traced value of shape \(\) from its closure.*pass it to linear_loss as a row input",
    ),
    (lambda: _loss(_lse, 1.0, jnp.ones(3)), ValueError, r"row_inputs\[1\] has shape \(3,\); it must be a scalar or"),
    (lambda: _loss(_lse, None), TypeError, r"row_inputs\[0\] is a NoneType"),
    (
        lambda: jax.jit(lambda c: _cross_entropy(logit_softcap=c))(1.0),
        TypeError,
        "logit_softcap must be a Python number",
    ),
    (lambda: _explain(differentiate="hidden"), TypeError, r"differentiate='hidden' must be a sequence of names"),
    (
        lambda: _explain(differentiate=("labels",)),
        ValueError,
        r"differentiate names \['labels'\], .* choose from \('hid",
    ),
    (lambda: _explain(reduction="max"), ValueError, "reduction='max' is unknown"),
    (lambda: _explain(backward="in_forward", reduction="none"), ValueError, "needs a scalar loss"),
    (lambda: explain([[1.0]], WEIGHT), TypeError, "hidden is a list; it must be an array or a jax.ShapeDtypeStruct"),
]


@pytest.mark.parametrize(("call", "error", "message"), OTHER_ERRORS, ids=[message for *_, message in OTHER_ERRORS])
def test_a_mistake_is_named(call: Callable[[], Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call()


@pytest.mark.parametrize("call", [_cross_entropy, _loss])
@pytest.mark.parametrize("bad", [5, -1, -7, 2**32])
def test_validate_labels_names_the_first_bad_label(call: Callable[..., Any], bad: int) -> None:
    labels = np.array([0, -100, bad, -9], np.int64)
    with pytest.raises(ValueError, match=rf"labels\[2\]={bad} is neither in \[0, vocab_size=5\) nor ignore_index=-100"):
        call(labels=labels, validate_labels=True)
    with pytest.raises(ValueError, match=r"labels\[1\]=-100 is neither in .* nor ignore_index=None"):
        call(labels=labels, validate_labels=True, ignore_index=None)


def test_validate_labels_names_the_place_in_any_leading_shape() -> None:
    with pytest.raises(ValueError, match=r"labels\[1, 0\]=4 is neither in \[0, vocab_size=4\)"):
        linear_cross_entropy(
            HIDDEN.reshape(2, 2, 3), WEIGHT, np.array([[0, 1], [4, 4]], np.uint8), vocab_size=4, validate_labels=True
        )


@pytest.mark.parametrize("ignore_index", [-100, 255, 3])
def test_validate_labels_accepts_good_labels_and_ignored_ones(ignore_index: int) -> None:
    labels = np.array([0, ignore_index, 4, 2])
    loss = _cross_entropy(labels=labels, validate_labels=True, ignore_index=ignore_index)
    np.testing.assert_allclose(loss, np.log(5), rtol=1e-6)
    _cross_entropy(hidden=HIDDEN[:0], labels=labels[:0], validate_labels=True)


@pytest.mark.parametrize("transform", [jax.jit, jax.vmap])
def test_validate_labels_refuses_labels_that_are_being_traced(transform: Any) -> None:
    message = "validate_labels=True reads the labels' values.*or pass validate_labels=False"
    hidden, labels = jnp.ones((2, 4, 3)), jnp.zeros((2, 4), int)
    with pytest.raises(TypeError, match=message):
        transform(lambda h, y: linear_cross_entropy(h, WEIGHT, y, validate_labels=True))(hidden, labels)


def test_validate_labels_reads_labels_that_jit_and_grad_do_not_trace() -> None:
    loss = jax.jit(jax.grad(lambda h: _cross_entropy(h, validate_labels=True)))
    assert loss(HIDDEN).shape == HIDDEN.shape


def test_arguments_may_be_numpy_arrays_lists_and_numbers() -> None:
    want = _cross_entropy()
    got = _cross_entropy(
        np.ones((4, 3)), [[1.0] * 3] * 5, [0, 1, 2, 4], vocab_size=np.int64(5), logit_scale=np.float64(1)
    )
    np.testing.assert_array_equal(got, want)
    scaled = _cross_entropy(z_loss=np.float32(0.1), logit_softcap=jnp.float32(9), scratch_bytes=np.int64(2**20))
    assert np.isfinite(scaled)
    assert explain(np.ones((4, 3)), np.ones((5, 3))).logits_bytes == 4 * 4 * 5


@pytest.mark.parametrize("leading", [(), (0,), (2, 0), (2, 2)])
def test_any_leading_shape_is_accepted(leading: tuple[int, ...]) -> None:
    hidden, labels = jnp.ones((*leading, 3)), jnp.zeros(leading, int)
    assert linear_cross_entropy(hidden, WEIGHT, labels, reduction="none").shape == leading
    assert linear_loss(_lse, hidden, WEIGHT, labels, 0.5, reduction="none").shape == leading
    found = linear_row_statistics(hidden, WEIGHT, labels, row_mask=jnp.ones(leading, bool))
    assert found.lse is not None
    assert found.lse.shape == leading


LOGITS = jnp.zeros((4, 5))
BY_NORMALIZER: dict[str, Callable[[Any], Any]] = {
    "linear_cross_entropy": lambda z: _cross_entropy(normalizer=z),
    "linear_loss": lambda z: _loss(normalizer=z),
    "cross_entropy": lambda z: cross_entropy(LOGITS, LABELS, normalizer=z),
    "linear_distillation": lambda z: linear_distillation(HIDDEN, WEIGHT, HIDDEN, -WEIGHT, normalizer=z),
    "linear_chain_crf": lambda z: linear_chain_crf(LOGITS, LABELS, jnp.zeros((5, 5)), normalizer=z),
    "sampled_softmax": lambda z: sampled_softmax_cross_entropy(
        HIDDEN, WEIGHT, LABELS, key=jax.random.key(0), num_samples=3, normalizer=z
    ),
    "policy_loss": lambda z: policy_loss(-jnp.ones((2, 3)), jnp.ones(2), normalizer=z),
}


@pytest.mark.parametrize("name", BY_NORMALIZER)
def test_counts_that_32_bits_do_not_hold_are_normalizers(name: str) -> None:
    loss = BY_NORMALIZER[name]
    for count in (3_000_000_000, np.int64(3_000_000_000), np.array(3_000_000_000)):
        np.testing.assert_allclose(loss(count), loss(3e9), rtol=1e-6)
    for wrong in (-1, -0.5, NAN):
        with pytest.raises(ValueError, match=f"normalizer={wrong} must be a finite number, at least 0"):
            loss(wrong)
    with pytest.raises(TypeError, match="normalizer has dtype complex64; it must be real"):
        loss(jnp.complex64(1))


@pytest.mark.parametrize("name", ["token_weights", "class_weights"])
def test_complex_weights_are_refused(name: str) -> None:
    weights = jnp.ones(4 if name == "token_weights" else 5, complex)
    with pytest.raises(TypeError, match=f"{name} has dtype complex64; it must be real"):
        _cross_entropy(**{name: weights})


@pytest.mark.parametrize("key", ["abc", 0, jax.random.split(jax.random.key(0), 5)])
def test_a_key_that_is_none_is_named(key: Any) -> None:
    with pytest.raises(TypeError, match=r"key is .*; it must be one key, such as"):
        linear_sample(key, HIDDEN, WEIGHT)
    with pytest.raises(TypeError, match=r"key is .*; it must be one key, such as"):
        sampled_softmax_cross_entropy(HIDDEN, WEIGHT, LABELS, key=key, num_samples=2)


def test_labels_are_needed_to_be_validated() -> None:
    with pytest.raises(ValueError, match="validate_labels=True needs labels, which is None"):
        _loss(labels=None, validate_labels=True)


@pytest.mark.parametrize("wrong", ["tensor", ("data", "tensor"), {"vocabulary": "tensor"}])
def test_mesh_axes_by_name_only_are_refused(wrong: Any) -> None:
    example = re.escape(f"MeshAxes(vocabulary={wrong if isinstance(wrong, str) else 'tensor'!r})")
    for call in (_cross_entropy, _statistics, _loss, linear_log_probs):
        arguments = (HIDDEN, WEIGHT, LABELS) if call is linear_log_probs else ()
        with pytest.raises(
            TypeError, match=f"mesh_axes={re.escape(repr(wrong))} must be a MeshAxes, such as {example}"
        ):
            call(*arguments, mesh_axes=wrong)


def test_numbers_beyond_any_float_are_refused_as_any_that_is_too_large() -> None:
    for name in ("logit_scale", "z_loss", "label_smoothing", "normalizer", "logit_softcap"):
        with pytest.raises(ValueError, match=f"{name}=1000.*… must be"):
            _cross_entropy(**{name: 10**400})


COLD, HOT = 1e-5, 1e30
# Logits of up to 1e4. Those of one row tie, so that its probabilities and slopes are of order 1.
LARGE = {
    "hidden": jax.random.normal(jax.random.key(1), (40, 16)).at[0].set(1.0) * 150,
    "weight": jax.random.normal(jax.random.key(2), (30, 16)).at[:3].set(4.16) * 1.0,
}
ROWS = jnp.arange(40) % 30


def _squared_lse_less_log_prob(statistics: Any) -> Any:
    return statistics.lse**2 - statistics.log_prob


TEMPERED: dict[str, Callable[..., Any]] = {
    "statistics": lambda h, w, t, **o: linear_row_statistics(h, w, ROWS, statistics=STATISTICS, temperature=t, **o)[
        :-1
    ],
    "log_probs": lambda h, w, t, **o: linear_log_probs(
        h, w, ROWS, temperature=t, return_entropy=True, return_sum_sq_probs=True, **o
    )[:3],
    "loss": lambda h, w, t, **o: linear_loss(lambda s: s.lse**2 - s.log_prob, h, w, ROWS, temperature=t, **o),
    "top_k": lambda h, w, t, **o: linear_top_k(h, w, 3, temperature=t, **o),
    "sample": lambda h, w, t, **o: linear_sample(jax.random.key(0), h, w, temperature=t, **o),
    "sample of top_k": lambda h, w, t, **o: linear_sample(jax.random.key(0), h, w, temperature=t, top_k=2, **o),
    **{
        name: lambda h, w, t, name=name, **o: linear_distillation(
            h, w, h[::-1], w, divergence=name, temperature=t, reduction="none", **o
        )
        for name in ("forward_kl", "reverse_kl", "jsd")
    },
}


@pytest.mark.parametrize("name", TEMPERED)
@pytest.mark.parametrize("temperature", [COLD, HOT])
def test_values_and_gradients_stay_finite_at_the_ends_of_the_temperatures_range(name: str, temperature: float) -> None:
    def total(arrays: dict[str, jax.Array], t: Any, **options: Any) -> Any:
        found = TEMPERED[name](arrays["hidden"], arrays["weight"], t, **options)
        floating = [x for x in jax.tree.leaves(found) if jnp.issubdtype(x.dtype, jnp.floating)]
        return sum(jnp.sum(x * 1e-3) for x in floating), floating

    assert np.abs(LARGE["hidden"] @ LARGE["weight"].T).max() == pytest.approx(1e4, rel=0.01)
    by_number = jax.grad(total, has_aux=True)(LARGE, temperature)
    by_row = jax.grad(total, has_aux=True)(LARGE, jnp.full(40, temperature), logit_softcap=30.0)
    for x in jax.tree.leaves((by_number, by_row)):
        assert np.isfinite(x).all()


@pytest.mark.parametrize("name", TEMPERED)
@pytest.mark.parametrize("wrong", [0.99 * COLD, 1.01 * HOT, np.full(40, 1e-37), 10**400, float("inf")])
def test_temperatures_outside_their_range_are_refused_with_its_bounds(name: str, wrong: Any) -> None:
    with pytest.raises(ValueError, match=r"temperature=\S+ must be a finite number .*1e-05, at most 1e\+30\)"):
        TEMPERED[name](LARGE["hidden"], LARGE["weight"], wrong)


# What is not an array: options by name, a configuration, a function.
NO_ARRAYS = {"options", "config", "sampler"}


@pytest.mark.parametrize("name", [name for name in pallas_ce.__all__ if inspect.isfunction(getattr(pallas_ce, name))])
def test_signatures_say_what_is_an_array(name: str) -> None:
    for parameter in inspect.signature(getattr(pallas_ce, name)).parameters.values():
        assert "Any" not in str(parameter.annotation) or parameter.name in NO_ARRAYS, parameter
