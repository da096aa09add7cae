"""`linear_loss`: which rows reach a row loss, and what their derivatives may not leak into."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_ce import linear_loss, linear_row_statistics
from tests.pallas_ce.problems import WAYS

HIDDEN, WEIGHT = jnp.ones((4, 3)), jnp.ones((5, 3))

every_way = pytest.mark.parametrize(("implementation", "backward"), WAYS)


def _singular(statistics: Any, advantage: Any, power: Any) -> Any:
    """A row loss, infinite where statistics are 0, as in ignored rows."""
    return advantage * jnp.log(statistics.entropy) ** power + jnp.sqrt(statistics.lse)


@every_way
@pytest.mark.parametrize("labels", [[-100, -100, -100, -100], [0, -100, 4, -100]])
def test_rows_that_do_not_count_never_reach_the_row_loss(labels: list[int], implementation: Any, backward: Any) -> None:
    counts = np.array(labels) >= 0

    def loss(hidden: Any, weight: Any, advantage: Any, power: Any) -> Any:
        return linear_loss(
            _singular, hidden, weight, jnp.array(labels), advantage, power,
            implementation=implementation, backward=backward,
        )  # fmt: skip

    advantage = jnp.where(counts, 1.0, jnp.nan)
    value, gradients = jax.value_and_grad(loss, (0, 1, 2, 3))(HIDDEN, WEIGHT, advantage, 2.0)
    assert np.isfinite(value)
    assert all(np.all(np.isfinite(g)) for g in gradients)
    assert np.all(np.asarray(gradients[2])[~counts] == 0)
    assert np.any(np.asarray(gradients[2])) == counts.any()


def test_an_error_inside_the_row_loss_says_so() -> None:
    def broken(statistics: Any) -> Any:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine") as raised:
        linear_loss(broken, HIDDEN, WEIGHT, None)
    assert raised.value.__notes__[0].startswith("This happened in row_loss; labels is None, so statistics.target_logit")


def test_a_statistic_may_be_mentioned_without_being_needed() -> None:
    def row_loss(statistics: Any) -> Any:
        _ = statistics.entropy * 2
        return -statistics.log_prob * jnp.ones_like(statistics.sum_sq_probs)

    labels = jnp.array([0, 1, -100, 4])
    np.testing.assert_allclose(linear_loss(row_loss, HIDDEN, WEIGHT, labels), np.log(5), rtol=1e-6)


@every_way
def test_a_loss_of_the_argmax_alone_has_no_gradient_but_its_inputs(implementation: Any, backward: Any) -> None:
    def loss(hidden: Any, scale: Any) -> Any:
        return linear_loss(
            lambda s, scale: scale * (s.argmax == 0), hidden, WEIGHT, jnp.array([0, 1, -100, 4]), scale,
            implementation=implementation, backward=backward,
        )  # fmt: skip

    d_hidden, d_scale = jax.grad(loss, (0, 1))(HIDDEN, 2.0)
    assert np.all(np.asarray(d_hidden) == 0)
    assert d_scale == 1.0


def test_an_array_by_row_in_the_closure_is_refused_and_a_table_as_long_as_there_are_tokens_is_not() -> None:
    """The loss is called on blocks and in another order: the array's entries would meet other rows' statistics.

    What decides is whether the function also serves other numbers of rows.
    """
    hidden, table, entries = jnp.ones((6, 3)), jnp.arange(6.0), jnp.array([5, 0, 1, 2, 3, 4])
    got = linear_loss(lambda s, b: s.lse * table[b], hidden, WEIGHT, None, entries, reduction="none")
    np.testing.assert_allclose(got, table[entries] * linear_row_statistics(hidden, WEIGHT, statistics=("lse",)).lse)
    for labels in (None, jnp.array([0, 1, -100, 4, 2, 3])):
        with pytest.raises(ValueError, match=r"reads an array of shape \(6,\), one entry for each token.*row input"):
            linear_loss(lambda s: s.lse * table, hidden, WEIGHT, labels)
