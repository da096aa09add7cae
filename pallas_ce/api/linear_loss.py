"""`linear_loss`: any row-wise function of the statistics, reduced, in either backward mode."""

import dataclasses
from collections.abc import Callable, Hashable
from typing import Any, ClassVar, Unpack

import jax
import jax.numpy as jnp
from jax.interpreters import partial_eval

from pallas_ce.api.checks import ArrayLike, array
from pallas_ce.api.head_options import RowLossOptions, computed_by
from pallas_ce.api.problem import Problem
from pallas_ce.api.specs import WeightLike
from pallas_ce.head import Batch
from pallas_ce.modes import evaluate
from pallas_ce.modes.call import Call, Operands
from pallas_ce.parallel.entry import program
from pallas_ce.statistics.cross_entropy import safe_inverse, zero_safe_product
from pallas_ce.statistics.row import STATISTICS, RowStatistics, from_primitives, needs_labels, primitive_names, struct
from pallas_ce.streaming.rows import flat_rows, zeroed

RowLoss = Callable[..., jax.Array]


@dataclasses.dataclass(frozen=True)
class _RowTotal:
    """A user's row loss as the modes call it: on primitive statistics, weighted and normalised. Static and hashable."""

    row_loss: RowLoss
    read: tuple[str, ...]
    unread: tuple[str, ...]
    dtype: Any
    tokens: int
    targets: tuple[int, ...]
    defined_at_zero: ClassVar[bool] = False

    @property
    def names(self) -> frozenset[str]:
        return primitive_names(self.read)

    def __call__(self, primitives: dict[str, jax.Array], given: tuple[Any, Any]) -> jax.Array:
        (by_row, token_weights), (shared, inverse_normalizer) = given
        rows = next((x.shape[0] for x in primitives.values()), self.tokens)
        # A function may mention a statistic that its result does not depend on; the compiler drops the zeros.
        zeros = {name: jnp.zeros_like(struct(name, (rows,), self.targets, self.dtype)) for name in self.unread}
        statistics = from_primitives(primitives, self.read)._replace(**zeros)
        inputs = by_row | shared
        values = self.row_loss(statistics, *(inputs[place] for place in sorted(inputs))).astype(self.dtype)
        if token_weights is not None:
            values = zero_safe_product(token_weights, values)
        return values * inverse_normalizer


@program(static=1, by_row=lambda row_loss, problem, *_: problem.options.by_row)
def _linear_loss(row_loss: RowLoss, problem: Problem, *inputs: jax.Array) -> jax.Array:
    wide, leading = problem.spec.accumulator, problem.leading
    # By their position: the inputs with a value for each row, and the inputs that all rows share.
    by_row = {i: x for i, x in enumerate(inputs) if x.shape[: len(leading)] == leading}
    shared = {i: x for i, x in enumerate(inputs) if i not in by_row}
    batch, head, mask = problem.rows_that_count()
    options, weights = problem.options, problem.token_weights
    inverse = jnp.ones((), wide)
    if options.reduction == "mean":
        each = jnp.ones(leading, wide) if weights is None else weights
        default = problem.how.divisor(jnp.sum(zeroed(mask, each)))
        inverse = safe_inverse(default if options.normalizer is None else jnp.asarray(options.normalizer, wide))

    examples = [flat_rows(leading, x) if i in by_row else x for i, x in enumerate(inputs)]
    names = [name for name in STATISTICS if batch.labels is not None or not needs_labels(name)]
    read = _statistics_read(row_loss, wide, batch, names, examples, problem.tokens)
    unread = tuple(name for name in names if name not in read)
    row_total = _RowTotal(row_loss, read, unread, wide, problem.tokens, batch.targets)
    operands = Operands(batch, head, mask, ((by_row, weights), (shared, inverse)))
    return evaluate.loss(Call(problem.how, row_total.names, row_total), operands, options.by_row)[0]


def _statistics_read(
    row_loss: RowLoss, wide: Any, batch: Batch, names: list[str], row_inputs: list[jax.Array], tokens: int
) -> tuple[str, ...]:
    """The `names` of the statistics that `row_loss`'s result depends on, from its trace."""

    def trace(rows: int) -> tuple[Any, Any]:
        fields: dict[str, Any] = {name: struct(name, (rows,), batch.targets, wide) for name in names}
        given = [jax.ShapeDtypeStruct((rows, *x.shape[1:]) if x.ndim else (), x.dtype) for x in row_inputs]
        return jax.make_jaxpr(row_loss, return_shape=True)(RowStatistics(**fields), *given)

    unlabelled = "; labels is None, so statistics.target_logit and statistics.log_prob are None"
    without = unlabelled if batch.labels is None else ""
    try:
        traced, out = trace(tokens)
    except Exception as error:
        error.add_note(f"This happened in row_loss{without}.")
        raise
    for constant in traced.consts:
        if isinstance(constant, jax.core.Tracer):
            raise ValueError(
                f"row_loss reads a traced value of shape {constant.shape} from its closure, where its gradient would "
                "be lost; pass it to linear_loss as a row input (scalars are shared by all rows)"
            )
        if jnp.ndim(constant) and jnp.shape(constant)[0] == tokens > 1:
            try:
                trace(tokens + 1)  # a table of as many entries as there are tokens serves any number of rows
            except Exception as error:
                raise ValueError(
                    f"row_loss reads an array of shape {jnp.shape(constant)}, one entry for each token, from its "
                    "closure, but it is called on blocks of the rows that count; pass the array to linear_loss as a "
                    "row input"
                ) from error
    shape = getattr(out, "shape", None)
    if shape != (tokens,) or not jnp.issubdtype(out.dtype, jnp.floating):
        described = f"{out.dtype}{list(shape)}" if shape is not None else f"a {type(out).__name__}"
        raise ValueError(
            f"row_loss returned {described} for {tokens} rows; it must return floating [{tokens}]{without}"
        )
    _, used = partial_eval.dce_jaxpr(traced.jaxpr, [True])
    return tuple(name for name, read in zip(names, used, strict=False) if read)


@computed_by(_linear_loss)
def linear_loss(
    row_loss: RowLoss,
    hidden: ArrayLike,
    weight: WeightLike,
    labels: ArrayLike | None,
    *row_inputs: ArrayLike,
    shift: int = 0,
    **options: Unpack[RowLossOptions],
) -> tuple[RowLoss, Problem, *tuple[jax.Array, ...]]:
    r"""Reduces `row_loss(statistics, *row_inputs)`, any row-wise loss, without storing logits.

    `loss = Σ_i w_i·row_loss_i / normalizer` over the rows that count. Which statistics the loss reads is found by
    tracing it; the others are not computed. `row_loss` is a static argument: pass the same function object each time,
    not a new lambda, so that JAX traces it once for each set of shapes.

    Args:
        row_loss: `(statistics, *row_inputs) -> [n]`, where `statistics` is a `RowStatistics` of `[n]` arrays and the
            row inputs are `[n, ...]`. It must treat each row by itself: it sees them in blocks and in any order, and
            only those that count. Differentiable values it needs must come as row inputs, not from its closure.
        hidden: `[..., H]`.
        weight: `[V', H]` or `[H, V']`.
        labels: `[...]` integers, or None for losses without a target. `[..., K]`: K targets for each row, for which
            `statistics.log_prob` and `.target_logit` are `[n, K]`.
        *row_inputs: `[..., *K]` with `hidden`'s leading shape (advantages, old log-probabilities, …), or scalars shared
            by all rows. Differentiable where floating.
        reduction: "mean", "sum", or "none" for `w_i·row_loss_i` `[...]`, 0 in rows that do not count.
        shift: a row meets the label and the token weight `shift` positions later; see `linear_cross_entropy`. Row
            inputs, `row_mask` and `temperature` stay with their row.
        ignore_index: rows with this label do not count; None: no label is special. Rows whose label lies outside the
            vocabulary never count. With K labels a row counts where one of them does, and those that do not have
            `target_logit` 0.
        normalizer: scalar for `reduction="mean"`; by default Σ w over the rows that count.

    Returns:
        Array: `[]`, or `[...]` for "none"; float32 (float64 for float64). 0.0 when no row counts.

    Raises:
        ValueError: shapes or names that do not fit, `row_loss` returning another shape than its rows', in_forward with
            `reduction="none"`, a budget too small for one row.
        TypeError: dtypes that do not fit; `validate_labels` on traced labels.
        NotImplementedError: when differentiated twice or in forward mode.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from pallas_ce import linear_loss
        >>> def focal(statistics, gamma):
        ...     log_p = statistics.log_prob
        ...     return -((1 - jnp.exp(log_p)) ** gamma) * log_p
        >>> hidden, weight = jnp.ones((2, 3)), jnp.zeros((4, 3))
        >>> print(linear_loss(focal, hidden, weight, jnp.array([0, 3]), 2.0))
        0.7797906

    References:
        "From Projection to Prediction: Beyond Logits for Scalable Language Models", Algorithms 2 to 4.
    """
    if not callable(row_loss) or not isinstance(row_loss, Hashable):
        raise TypeError(f"row_loss={row_loss!r} must be a hashable function (statistics, *row_inputs) -> [n]")
    problem = Problem.read(hidden, weight, labels, shift=shift, several=True, **options)
    inputs = [array(f"row_inputs[{position}]", value) for position, value in enumerate(row_inputs)]
    for position, value in enumerate(inputs):
        if value.ndim and value.shape[: len(problem.leading)] != problem.leading:
            raise ValueError(
                f"row_inputs[{position}] has shape {value.shape}; it must be a scalar or start with hidden's "
                f"leading shape {problem.leading}"
            )
    return row_loss, problem.decided(inputs), *inputs
