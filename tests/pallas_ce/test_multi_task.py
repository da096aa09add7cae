"""`multi_task_cross_entropy`: the sum of its heads' losses, with one rounding of hidden's gradient."""

import functools
from typing import Any

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_ce import Task, multi_task_cross_entropy
from tests.pallas_ce import oracle
from tests.pallas_ce.checks import assert_close, call, relative_error, with_gradients
from tests.pallas_ce.problems import Problem, make

FIRST_ON = st.sampled_from([True, False])  # of few examples the first is the simplest: here that is the richest


@st.composite
def _several(draw: Any) -> list[Problem]:
    """One to three heads of different vocabularies, layouts and options over one hidden state."""
    n, h = draw(st.sampled_from([24, 1])), draw(st.sampled_from([16, 5]))
    heads = []
    for v in draw(st.sampled_from([(33, 12, 70), (12,), (7, 33), (1, 70)])):
        p = make(draw(st.integers(0, 99)), n, h, v, draw(st.sampled_from([1.0, 5.0])), draw(st.sampled_from([0, 1])))
        rng = np.random.default_rng(draw(st.integers(0, 99)))
        size = max(1, v - 2) if draw(FIRST_ON) else v
        arrays = {"bias": rng.normal(size=v), "logit_scale": np.array(1.3), "token_weights": rng.uniform(0.1, 2, n)}
        options = {"label_smoothing": 0.1, "z_loss": 0.01, "logit_softcap": 4.0, "ignore_index": 0, "vocab_size": size,
                   "class_weights": rng.uniform(0.1, 2, size).astype(np.float32)}  # fmt: skip
        p.arrays |= {"hidden": heads[0].arrays["hidden"]} if heads else {}
        p.arrays |= {name: x.astype(np.float32) for name, x in arrays.items() if draw(FIRST_ON)}
        p.options = {name: x for name, x in options.items() if name == "vocab_size" or draw(FIRST_ON)}
        p.options["reduction"] = draw(st.sampled_from(["mean", "sum"]))
        heads.append(p)
    return heads


def _ours(heads: list[Problem], hidden: Any, arrays: list[dict[str, Any]], shares: Any) -> Any:
    def task(share: Any, hidden: Any, weight: Any, labels: Any, **options: Any) -> Task:
        return Task(weight, labels, share, options)

    given = zip(heads, arrays, shares, strict=True)
    tasks = {
        f"task{i}": call(functools.partial(task, share), p, {"hidden": hidden, **of_head})
        for i, (p, of_head, share) in enumerate(given)
    }
    return multi_task_cross_entropy(hidden, tasks)


def _oracle(heads: list[Problem], shares: Any) -> tuple[Any, ...]:
    """The total, the gradients of hidden, of each head's arrays and of the shares, which are the heads' losses."""
    total, d_hidden, d_heads, losses = 0.0, 0.0, [], []
    for p, share in zip(heads, shares, strict=True):
        loss, gradients = oracle.cross_entropy(p.arrays, p.labels, p.options)
        total, d_hidden = total + share * loss, d_hidden + share * gradients.pop("hidden")
        d_heads.append({name: share * g for name, g in gradients.items()})
        losses.append(np.float64(loss))
    return total, d_hidden, d_heads, losses


@hypothesis.given(heads=_several(), wide=st.booleans())
def test_total_losses_metrics_and_gradients(heads: list[Problem], wide: bool) -> None:
    shares = (0.3, 1.0, -0.5)[: len(heads)]
    with jax.enable_x64(wide):
        dtype = np.float64 if wide else np.float32
        arrays = [{name: x for name, x in p.arrays.items() if name != "hidden"} for p in heads]
        given = jax.tree.map(dtype, (heads[0].arrays["hidden"], arrays, [*shares]))
        found, gradients = with_gradients(lambda given: _ours(heads, *given), given, lambda found: found.total)
    want, *want_gradients = _oracle(heads, shares)
    bound = 1e-11 if wide else 1e-5
    terms = max(1.0, *(abs(x) for x in want_gradients[-1]))
    assert_close(found.total, want, bound, floor=bound / 10 * terms)
    assert_close(list(gradients), want_gradients, bound, floor=bound / 5)
    for i, p in enumerate(heads):
        logits = oracle.Logits(p.arrays, p.options["vocab_size"], p.options.get("logit_softcap"))
        counts = oracle.counted(p.labels, p.arrays, p.options)
        metrics = found.metrics[f"task{i}"]
        assert_close(found.losses[f"task{i}"], want_gradients[-1][i], bound, floor=bound / 10 * terms)
        assert metrics.num_tokens == counts.sum()
        assert_close(metrics.cross_entropy + metrics.z_loss, want_gradients[-1][i], bound, floor=bound / 10 * terms)
        assert_close(metrics.mean_lse, (logits.lse * counts).sum() / max(counts.sum(), 1), bound)


def test_hiddens_gradient_is_rounded_once_for_all_heads() -> None:
    """Each head's own dlogits are rounded, but their gradients are added in float32."""
    heads, shares = [make(seed, 24, 16, v) for seed, v in ((0, 70), (1, 33), (2, 12))], (1.0, 0.3, -0.5)
    for p, options in zip(heads, ({"label_smoothing": 0.1}, {"z_loss": 0.01}, {"logit_softcap": 4.0}), strict=True):
        p.options = options
        p.arrays = {name: jnp.asarray(x, jnp.bfloat16) for name, x in p.arrays.items()}
        p.arrays["hidden"] = heads[0].arrays["hidden"]
    hidden, weights = heads[0].arrays["hidden"], [{"weight": p.arrays["weight"]} for p in heads]
    gradient = jax.grad(lambda hidden: _ours(heads, hidden, weights, shares).total)
    got = gradient(hidden)
    assert got.dtype == jnp.bfloat16
    exact = _oracle(heads, shares)[1]
    for p in heads:
        p.options["dtype"] = jnp.bfloat16
    wide = gradient(hidden.astype(jnp.float32))
    np.testing.assert_array_equal(got, wide.astype(jnp.bfloat16))
    assert relative_error(wide, exact) < relative_error(got, exact) < 2**-8


def test_what_is_wrong_in_a_task_is_said_with_its_name() -> None:
    hidden, weight, labels = jnp.ones((3, 4)), jnp.ones((5, 4)), jnp.zeros(3, int)
    with pytest.raises(ValueError, match="tasks is empty"):
        multi_task_cross_entropy(hidden, {})
    with pytest.raises(TypeError, match="tasks is a list; it must be a mapping"):
        multi_task_cross_entropy(hidden, [Task(weight, labels)])  # type: ignore[arg-type]
    cases: list[tuple[Any, Any, str]] = [
        ((weight, labels), TypeError, "it is a tuple; it must be a Task"),
        (Task(weight, labels, 1.0, None), TypeError, "options is a NoneType; it must be a mapping"),
        (
            Task(weight, labels, 1.0, {"reduction": "none"}),
            ValueError,
            "may have neither return_metrics nor reduction='none'",
        ),
        (Task(weight, labels, 1.0, {"return_metrics": True}), ValueError, "may have neither return_metrics nor"),
        (Task(weight, labels.astype(float)), TypeError, "labels have dtype"),
        (Task(weight, labels, jnp.ones(2)), ValueError, "task_weight has shape"),
    ]
    for task, kind, message in cases:
        with pytest.raises(kind, match=message) as raised:
            multi_task_cross_entropy(hidden, {"words": Task(weight, labels), "tags": task})
        assert raised.value.__notes__ == ["This is about the task 'tags'."]
