"""`multi_task_cross_entropy`: several heads over one hidden state."""

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_ce.api import checks
from pallas_ce.api.checks import ArrayLike, DTypeLike
from pallas_ce.api.linear_cross_entropy import linear_cross_entropy
from pallas_ce.api.specs import PrecisionLike, WeightLike, read_weight
from pallas_ce.head import common_dtype
from pallas_ce.statistics.cross_entropy import Metrics


@dataclasses.dataclass(frozen=True)
class Task:
    """One head and its labels.

    Attributes:
        weight: `[V', H]` or `[H, V']`; each task has a vocabulary of its own.
        labels: `[...]` with hidden's leading shape; tokens that a task has no label for are ignored in it.
        task_weight: the share of this task's loss in the sum, a differentiable scalar.
        options: further arguments of `linear_cross_entropy` for this head: bias, vocab_axis, label_smoothing, ...
            Only `reduction="mean"` and "sum".
    """

    weight: WeightLike
    labels: ArrayLike
    task_weight: ArrayLike = 1.0
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)


class MultiTaskLoss(NamedTuple):
    """What `multi_task_cross_entropy` returns.

    Attributes:
        total: `Σ task_weight · loss`, `[]`.
        losses: each task's own loss by its name, `[]`, without its weight.
        metrics: each task's `Metrics` by its name.
    """

    total: jax.Array
    losses: dict[str, jax.Array]
    metrics: dict[str, Metrics]


def multi_task_cross_entropy(
    hidden: ArrayLike,
    tasks: Mapping[str, Task],
    *,
    dtype: DTypeLike | None = None,
    precision: PrecisionLike | None = None,
) -> MultiTaskLoss:
    r"""`Σ_k task_weight_k · cross_entropy_k` of several heads with vocabularies of their own over one hidden state.

    Each head is streamed as in `linear_cross_entropy`, with its own labels, normaliser and options; nothing of the size
    of any head's logits is stored. The heads' gradients of `hidden` are added in float32 and rounded once, to its
    dtype, however many heads there are.

    Args:
        hidden: `[..., H]`, any floating dtype.
        tasks: by name.
        dtype: compute dtype of all heads; by default, of each head, the common one of `hidden` and its weight.
        precision: how float32 operands of all heads are multiplied.

    Returns:
        MultiTaskLoss: total, and losses and metrics by name. Differentiate `total`, or any sum of `losses`.

    Raises:
        ValueError: no tasks; `reduction="none"` in a task; and as `linear_cross_entropy`, the task named in a note.
        TypeError: likewise.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from pallas_ce import Task, multi_task_cross_entropy
        >>> hidden = jax.random.normal(jax.random.key(0), (6, 8))
        >>> words, tags = jax.random.normal(jax.random.key(1), (100, 8)), jax.random.normal(jax.random.key(2), (12, 8))
        >>> def total(hidden, words, tags):
        ...     tasks = {
        ...         "words": Task(words, jnp.arange(6)),
        ...         "tags": Task(tags, jnp.array([0, 1, 2, -100, 3, 4]), 0.3, {"label_smoothing": 0.1}),
        ...     }
        ...     found = multi_task_cross_entropy(hidden, tasks)
        ...     return found.total, found.metrics
        >>> (d_hidden, d_words, d_tags), metrics = jax.grad(total, (0, 1, 2), has_aux=True)(hidden, words, tags)
        >>> int(metrics["tags"].num_tokens)
        5
    """
    if not isinstance(tasks, Mapping):
        raise TypeError(f"tasks is a {type(tasks).__name__}; it must be a mapping of names to Tasks")
    if not tasks:
        raise ValueError("tasks is empty; give at least one Task by name")
    hidden = checks.array("hidden", hidden)
    # The heads read it in float32, exactly, and round it back: their gradients then meet in float32, and the transpose
    # of this conversion is the one rounding.
    wide = hidden.astype(common_dtype(hidden.dtype, jnp.float32))
    total: Any = 0.0
    losses, metrics = {}, {}
    for name, task in tasks.items():
        try:
            if not isinstance(task, Task):
                raise TypeError(f"it is a {type(task).__name__}; it must be a Task")
            if not isinstance(task.options, Mapping):
                raise TypeError(f"options is a {type(task.options).__name__}; it must be a mapping of names to values")
            if "return_metrics" in task.options or task.options.get("reduction") == "none":
                raise ValueError("options may have neither return_metrics nor reduction='none': losses are scalars")
            compute = dtype or common_dtype(hidden.dtype, read_weight(task.weight).weight.dtype)
            options = {"dtype": compute, "precision": precision, **task.options, "return_metrics": True}
            losses[name], metrics[name] = linear_cross_entropy(wide, task.weight, task.labels, **options)
            total += jnp.asarray(checks.scalar("task_weight", task.task_weight), losses[name].dtype) * losses[name]
        except (ValueError, TypeError) as error:
            error.add_note(f"This is about the task {name!r}.")
            raise
    return MultiTaskLoss(total, losses, metrics)
