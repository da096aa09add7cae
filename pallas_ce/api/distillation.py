"""`linear_distillation`: a student's head against a teacher's, neither's logits stored."""

import functools
import inspect
from typing import Any, Literal, Unpack, get_args

import jax
import jax.numpy as jnp

from pallas_ce.api import checks
from pallas_ce.api.checks import ArrayLike
from pallas_ce.api.head_options import DistillationOptions, computed_by
from pallas_ce.api.problem import Problem
from pallas_ce.api.specs import WeightLike
from pallas_ce.backends import reference
from pallas_ce.modes import two_heads
from pallas_ce.modes.call import Known, Operands
from pallas_ce.parallel.entry import program
from pallas_ce.parallel.reverse_mode import reverse_mode_only
from pallas_ce.statistics.divergences import Divergence, Name, PairPartial, finalise_pairs
from pallas_ce.statistics.row import Partial
from pallas_ce.streaming.gradient_products import PerInput
from pallas_ce.streaming.rows import flat_rows


@program(static=1, by_row=lambda pair, student, *_: student.options.by_row)
def compute(pair: two_heads.Pair, student: Problem, teacher: Problem, known: Known | None = None) -> jax.Array:
    """The loss. `known`: what `keep` has found for the same call."""
    given = operands(student, teacher)._replace(known=known)
    if not student.tokens:
        values = jnp.zeros(student.leading, student.spec.accumulator)
    elif pair.how.mode is not None:
        values = two_heads.row_divergences(pair, reverse_mode_only(given))
    else:
        batch, mask, hidden = flat_rows(student.leading, (given.batch, given.mask, given.inputs.hidden))
        found = reference.divergences(pair.divergence, batch, given.head, mask, hidden, given.inputs.head)
        values = found.reshape(student.leading)
    return student.reduced(values, given.mask)


def keep(pair: two_heads.Pair, student: Problem, teacher: Problem, _: PerInput[bool]) -> Known | None:
    """What `compute` takes as `known`; None for the reference, which differentiates its logits anew."""
    if pair.how.mode is None or not student.tokens:
        return None
    return Known(two_heads.statistics(pair, operands(student, teacher)))


def operands(student: Problem, teacher: Problem) -> Operands:
    """What `two_heads` works on: the student's rows and head, and the teacher as constants."""
    batch, head, mask = student.rows_that_count()
    constant, constant_head, _ = jax.lax.stop_gradient(teacher.rows_that_count())
    return Operands(batch._replace(labels=None), head, mask, two_heads.Teacher(constant.hidden, constant_head))


@computed_by(compute)
def linear_distillation(
    hidden: ArrayLike,
    weight: WeightLike,
    teacher_hidden: ArrayLike,
    teacher_weight: WeightLike,
    labels: ArrayLike | None = None,
    *,
    divergence: Name = "forward_kl",
    beta: float = 0.5,
    ignore_index: int | None = -100,
    teacher_vocab_axis: int | None = None,
    implementation: Literal["triton", "xla", "reference"] | None = None,
    **options: Unpack[DistillationOptions],
) -> tuple[two_heads.Pair, Problem, Problem]:
    r"""A divergence between a student's and a teacher's next-token distributions, without storing either's logits.

    With `p = softmax(student's logits / T)`, `q = softmax(teacher's logits / T)` for each row:

        forward_kl   KL(q‖p) = Σ_v q_v (log q_v - log p_v)
        reverse_kl   KL(p‖q)
        jsd          β·KL(q‖m) + (1-β)·KL(p‖m),   m = β·q + (1-β)·p

    and `loss = Σ_i w_i·divergence_i / normalizer` over the rows that count. Both heads are streamed over the vocabulary
    together: once in the forward (twice for "jsd", whose mixture needs both log-sum-exps first), once in the backward,
    which recomputes tiles of both heads' logits and makes the student's gradients. O(N) numbers are kept in between.
    By Triton's kernels "jsd" takes one pass, too: they put the logits of a block of rows in scratch. 16-bit heads have
    float16 logits there, each as its distance from the largest of a tile, up to 65,504, so that small divergences lose
    digits; `implementation="xla"` keeps float32 tiles.

    Differentiable in `hidden`, `weight`, `bias`, `vocab_scale`, `logit_scale` and `token_weights`, in reverse mode,
    once. The teacher and the temperature are constants: they get no gradient.

    Args:
        hidden: the student's `[..., H]`.
        weight: the student's `[V', H]` or `[H, V']`.
        teacher_hidden: `[..., H_t]` with `hidden`'s leading shape; H_t may differ from H.
        teacher_weight: `[V'', H_t]` or `[H_t, V'']`. The first V entries of both weights are one vocabulary.
        labels: `[...]` integers that only say which rows count, or None.
        divergence: "forward_kl" (mode-covering; the usual choice for distillation), "reverse_kl" (mode-seeking) or
            "jsd" (the generalised Jensen-Shannon divergence).
        beta: β of "jsd", strictly between 0 and 1; towards 0 jsd/β tends to the forward, towards 1 jsd/(1-β) to the
            reverse divergence. A Python number.
        temperature: T > 0 for both heads, a scalar or `[...]`. Multiply the loss by T² for gradients whose size does
            not depend on it.
        ignore_index: rows with this label do not count, nor do those with a label outside the vocabulary.
        reduction: "mean", "sum", or "none" for `w_i·divergence_i` `[...]`.
        normalizer: scalar for the mean; by default Σ w over the rows that count.
        bias: the student's `[V']`.
        vocab_size: V; entries from there on are padding in both heads. By default all, if both have as many.
        logit_softcap: the cap of the student's logits.
        logit_scale: their scale, differentiable.
        dtype: compute dtype of the student's products.
        precision: how float32 operands of the student's products are multiplied; see `linear_cross_entropy`.
        teacher_vocab_axis: by default the student's.
        implementation: "xla" (any platform), "triton" (kernels for NVIDIA GPUs from Ampere on), "reference"
            (materialised logits, any derivative), or None: the kernels where they serve both heads and neither is in
            full float32, else "xla".
        scratch_bytes: bound on scratch memory; 512 MiB by default, never more than both heads' logits would take (but
            at least 1 MiB). "triton" needs a row of both heads' logits.

    Returns:
        Array: `[]`, or `[...]` for "none", float32 (float64 for a float64 student); 0.0 when no row counts. +inf, with
        gradient 0, for a row whose divergence is infinite; 0 for a row in which either head has only logits of -inf.

    Raises:
        ValueError: shapes, names or values that do not fit, a budget too small for one row.
        TypeError: dtypes that do not fit.
        NotImplementedError: when differentiated twice or in forward mode; see `implementation="reference"`.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from pallas_ce import linear_distillation
        >>> k = jax.random.split(jax.random.key(0), 4)
        >>> hidden, weight = jax.random.normal(k[0], (6, 8)), jax.random.normal(k[1], (50, 8))
        >>> teacher = jax.random.normal(k[2], (6, 16)), jax.random.normal(k[3], (50, 16))
        >>> loss, d_weight = jax.value_and_grad(linear_distillation, 1)(hidden, weight, *teacher, temperature=2.0)
        >>> bool(loss > 0), d_weight.shape
        (True, (50, 8))
        >>> bool(linear_distillation(hidden, weight, hidden, weight, divergence="jsd") < 1e-6)
        True

    References:
        "Distilling the Knowledge in a Neural Network" (Hinton, Vinyals, Dean), section 2. "On-Policy Distillation of
        Language Models" (Agarwal et al.), section 2: the generalised Jensen-Shannon divergence.
    """
    named: dict[str, Any] = {"ignore_index": ignore_index, "implementation": implementation, **options}
    of_teacher = {name.removeprefix("teacher_"): named.pop(name) for name in options if name.startswith("teacher_")}
    temperature = named.pop("temperature", 1.0)
    student = Problem.read(hidden, weight, labels, **named).tempered(temperature)
    try:
        teacher = Problem.read(
            teacher_hidden,
            teacher_weight,
            vocab_axis=student.spec.vocab_axis if teacher_vocab_axis is None else teacher_vocab_axis,
            vocab_size=options.get("vocab_size"),
            mesh_axes=student.mesh_axes,
            **of_teacher,
        )
    except (ValueError, TypeError) as error:
        error.add_note("This is about the teacher's head: teacher_hidden, teacher_weight and the others of that name.")
        raise
    if teacher.leading != student.leading:
        raise ValueError(
            f"teacher_hidden has shape {teacher.hidden.shape} and hidden {student.hidden.shape}; they must have the "
            "same leading shape (the order is hidden, weight, teacher_hidden, teacher_weight)"
        )
    if student.spec.vocab_size != teacher.spec.vocab_size:
        raise ValueError(
            f"the student's weight has {student.spec.weight_rows} vocabulary entries and teacher_weight "
            f"{teacher.spec.weight_rows}; pass vocab_size, the entries that both have"
        )
    if student.mesh_axes and student.mesh_axes.vocabulary and student.spec.weight_rows != teacher.spec.weight_rows:
        raise ValueError(
            f"weight has {student.spec.weight_rows} vocabulary entries over the devices and teacher_weight "
            f"{teacher.spec.weight_rows}; where mesh_axes names vocabulary={student.mesh_axes.vocabulary}, each device "
            "has the same entries of both: pad the smaller weight, and pass vocab_size"
        )
    checks.choice("divergence", divergence, get_args(Name))
    beta = checks.beta(beta)
    between = Divergence(divergence, beta if divergence == "jsd" else 0.5)
    student = student.decided(teacher, task="pair")
    for mode in (None, "recompute"):  # raises where the budget is too small
        two_heads.block_sizes(student.how, student.spec, teacher.spec, max(student.tokens, 1), mode)
    return two_heads.Pair(between, student.how), student, teacher


def read_of_part(*, parts: Any = None, sums: Any = None, **arguments: Any) -> Any:
    """What `compute_of_part` takes, from the arguments of `linear_distillation`, where V is the part's."""
    pair, student, teacher = inspect.unwrap(linear_distillation)(**arguments)
    if pair.how.mode is None:
        raise ValueError(
            f"implementation={student.implementation!r} does not know parts of a vocabulary; "
            "choose 'xla', 'triton' or None"
        )
    return pair, student, teacher, parts, sums


def compute_of_part(pair: Any, student: Any, teacher: Any, parts: Any, sums: Any, _: None = None) -> jax.Array:
    """What a process can make next, of its own columns of both heads, for wrappers that exchange arrays.

    It depends on what all have found before:

        nothing            `[N, 4]`, "jsd", or `[N, 5]`: the statistics of its columns
        parts              "jsd" only, `[N, 2]`: its columns' sums of the mixture, which are to be added up
        parts and sums     the loss of the whole vocabulary, the same in each process; so for the others from `parts`

    The loss has the derivatives in the student's own columns, and a share of the hidden states' gradient. `parts` are
    `[N, processes, 4 or 5]`.
    """
    by_row: Any = functools.partial(two_heads.by_row, pair, operands(student, teacher))
    if parts is None:
        numbers = 5 if pair.divergence.name != "jsd" else 4  # a cross term needs no second pass
        own = by_row(lambda _, block, __: jax.tree.leaves(block.partial()), lambda zeros: [zeros] * numbers)
        return jnp.stack(own, axis=1)
    each = (part.T for part in jnp.unstack(parts, axis=1))
    found = finalise_pairs(pair.divergence, (PairPartial(Partial(*x[:2]), Partial(*x[2:4]), *x[4:]) for x in each))
    if pair.divergence.name == "jsd":
        if sums is None:
            own = by_row(lambda _, block, found: block.mixture_sums(found), lambda zeros: (zeros, zeros), found)
            return jnp.stack(own, axis=1)
        found = found.with_mixture(*sums.T)
    return compute(pair, student, teacher, Known(jax.lax.stop_gradient(found)))
