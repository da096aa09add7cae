"""`multi_task_cross_entropy`: the sum of its heads' losses, with one rounding of hidden's gradient."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_ce import Task, linear_cross_entropy, multi_task_cross_entropy
from tests.pallas_ce import oracle
from tests.pallas_ce.checks import assert_close, relative_error
from tests.pallas_ce.problems import make

SHARES = (1.0, 0.3, -0.5)


def _heads(dtype: Any) -> tuple[Any, list[Any], list[Any], list[dict[str, Any]]]:
    problems = [make(seed, 24, 16, v) for seed, v in ((0, 70), (1, 33), (2, 12))]
    hidden = problems[0].arrays["hidden"].astype(dtype)
    options = [{"label_smoothing": 0.1}, {"z_loss": 0.01, "reduction": "sum"}, {"logit_softcap": 4.0}]
    return hidden, [p.arrays["weight"].astype(dtype) for p in problems], [p.labels for p in problems], options


def _ours(hidden: Any, weights: Any, shares: Any, labels: Any, options: Any) -> Any:
    tasks = {
        f"task{i}": Task(w, t, share, o)
        for i, (w, t, share, o) in enumerate(zip(weights, labels, shares, options, strict=True))
    }
    found = multi_task_cross_entropy(hidden, tasks)
    return found.total, found


def _oracle(hidden: Any, weights: Any, labels: Any, options: Any) -> tuple[Any, ...]:
    total, d_hidden, d_weights, losses = 0.0, 0.0, [], []
    for w, t, share, o in zip(weights, labels, SHARES, options, strict=True):
        loss, gradients = oracle.cross_entropy({"hidden": hidden, "weight": w}, t, o)
        total, d_hidden = total + share * loss, d_hidden + share * gradients["hidden"]
        d_weights.append(share * gradients["weight"])
        losses.append(loss)
    return total, d_hidden, d_weights, losses


def test_total_losses_metrics_and_gradients() -> None:
    hidden, weights, labels, options = _heads(np.float32)

    @jax.jit
    def run(*arrays: Any) -> Any:
        return jax.value_and_grad(_ours, (0, 1, 2), has_aux=True)(*arrays, labels, options)

    (total, found), (d_hidden, d_weights, d_shares) = run(hidden, weights, list(SHARES))
    want, want_hidden, want_weights, losses = _oracle(hidden, weights, labels, options)
    assert_close(total, np.float64(want), 1e-5)
    assert_close([d_hidden, d_weights], [want_hidden, want_weights], 1e-5)
    assert_close(d_shares, [np.float64(x) for x in losses], 1e-5)
    for i, t in enumerate(labels):
        name = f"task{i}"
        alone, metrics = linear_cross_entropy(hidden, weights[i], t, **options[i], return_metrics=True)
        assert_close(found.losses[name], np.asarray(alone), 1e-6)
        assert_close(found.metrics[name], jax.tree.map(np.asarray, metrics), 1e-6)


def test_hiddens_gradient_is_rounded_once_for_all_heads() -> None:
    """Each head's own dlogits are rounded, but their gradients are added in float32."""
    hidden, weights, labels, options = _heads(jnp.bfloat16)
    gradient = jax.grad(_ours, has_aux=True)
    got, _ = gradient(jnp.asarray(hidden), weights, SHARES, labels, options)
    assert got.dtype == jnp.bfloat16
    wide, _ = gradient(jnp.asarray(hidden, jnp.float32), weights, SHARES, labels, [
        {"dtype": jnp.bfloat16, **o} for o in options
    ])  # fmt: skip
    np.testing.assert_array_equal(got, wide.astype(jnp.bfloat16))
    exact = _oracle(hidden, weights, labels, options)[1]
    assert relative_error(wide, exact) < relative_error(got, exact) < 2**-8


def test_what_is_wrong_in_a_task_is_said_with_its_name() -> None:
    hidden, weight, labels = jnp.ones((3, 4)), jnp.ones((5, 4)), jnp.zeros(3, int)
    with pytest.raises(ValueError, match="tasks is empty"):
        multi_task_cross_entropy(hidden, {})
    cases: list[tuple[Task, Any, str]] = [
        (Task(weight, labels, 1.0, {"reduction": "none"}), ValueError, "reduction='none' is not for several tasks"),
        (Task(weight, labels[:2]), ValueError, "labels have shape"),
        (Task(weight, labels.astype(float)), TypeError, "labels have dtype"),
        (Task(weight, labels, jnp.ones(2)), ValueError, "task_weight has shape"),
    ]
    for task, kind, message in cases:
        with pytest.raises(kind, match=message) as raised:
            multi_task_cross_entropy(hidden, {"words": Task(weight, labels), "tags": task})
        assert raised.value.__notes__ == ["This is about the task 'tags'."]
