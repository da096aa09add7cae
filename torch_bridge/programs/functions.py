"""The functions of `pallas_ce` on named arrays, with PyTorch's names for the arguments. No PyTorch in here."""

import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

import pallas_ce
from pallas_ce import LowRank
from pallas_ce.api.integration import Known, PerInput, cross_entropy_steps

Arrays = Mapping[str, jax.Array]
Outputs = tuple[tuple[jax.Array, ...], tuple[jax.Array, ...]]

# Rows for which "auto" chooses a backward mode. What a forward keeps must not depend on how many rows come: what
# PyTorch has compiled for changing shapes would not fit.
_TYPICAL_ROWS = 4096


class Options(NamedTuple):
    """Static options of a call; each function reads the ones that are its parameters.

    The operators take all but `vocab_axis`, by the types here. `term_scale` is the factor of the weight's low-rank
    term, `statistics` are names joined by commas, and `fixed_temperature` is a temperature that is a number.
    """

    vocab_axis: int = 0
    dtype: str = "float32"
    precision: str = "highest"
    logit_softcap: float | None = None
    vocab_size: int | None = None
    implementation: str | None = None
    scratch_bytes: int | None = None
    term_scale: float = 1.0
    ignore_index: int | None = -100
    reduction: str = "mean"
    backward: str = "auto"
    return_metrics: bool = False
    statistics: str = ""
    fixed_temperature: float = 1.0
    return_entropy: bool = False
    return_sum_sq_probs: bool = False
    return_hit: bool = False
    divergence: str = "forward_kl"
    beta: float = 0.5
    teacher_dtype: str | None = None
    teacher_logit_softcap: float | None = None


# The names in `pallas_ce` of tensors that have another name here.
NAMES = {
    "input": "hidden",
    "linear_weight": "weight",
    "linear_up": "up",
    "linear_down": "down",
    "linear_bias": "bias",
    "target": "labels",
    "teacher_input": "teacher_hidden",
}


class Function(NamedTuple):
    """A function of a head, on arrays by PyTorch's names, and its `integration.Steps`."""

    public: Callable[..., Any]
    steps: Any

    def read(self, options: Options, arrays: Arrays) -> Any:
        """The checked arguments; arrays that are missing are left to the function's defaults."""
        static = options._asdict()
        static |= {"temperature": options.fixed_temperature, "statistics": options.statistics.split(",")}
        static |= {"teacher_vocab_axis": 0, "teacher_precision": options.precision}
        named: dict[str, Any] = {NAMES.get(name, name): x for name, x in arrays.items()}
        up, down = named.pop("up", None), named.pop("down", None)
        if up is not None and down is not None:
            # Like the weight `[V, H]`, but these are small: where that lies as `[H, V]` they are transposed here.
            term = (up.T, down.T) if options.vocab_axis else (up, down)
            named["weight"] = LowRank(named["weight"], *term, options.term_scale)
        parameters = inspect.signature(self.public).parameters
        if "backward" in parameters:
            static["backward"] = _mode(options, named["hidden"], named["weight"])
        return self.steps.read(**{name: x for name, x in static.items() if name in parameters} | named)

    def compute(self, checked: Any, known: Any) -> Outputs:
        """Outputs with gradients, and others: numbers, or arrays by row, in the order of the result's fields."""
        values = jax.tree.leaves(self.steps.compute(*checked, known))
        if self.steps is cross_entropy_steps:  # the metrics have no gradient
            return tuple(values[:1]), tuple(values[1:])
        floating = tuple(x for x in values if jnp.issubdtype(x.dtype, jnp.floating))
        return floating, tuple(x for x in values if not jnp.issubdtype(x.dtype, jnp.floating))

    def shortcuts(self, checked: Any, known: Known | None) -> tuple[Arrays, frozenset[str]]:
        """What spares the loss's backward work, by names of inputs.

        First in_forward's sums: gradients but for the loss's cotangent, where that alone is missing. A program finishes
        the sums of a low-rank term, which are small and transposed where the weight is `[H, V]`. Then the inputs whose
        gradients `add_gradients` makes: where a backward recomputes, for one number's cotangent.
        """
        if known is None or self.steps is not cross_entropy_steps:
            return {}, frozenset()
        problem, sums = checked[-1], known.sums
        if all(x is None for x in sums):
            adds = not problem.options.by_row and problem.up is None
            return {}, frozenset(("input", "linear_weight", "linear_bias") if adds else ())
        named = {"input": sums.hidden, "linear_weight": sums.weight, "linear_bias": sums.bias}
        scaled = problem.logit_scale is None
        return {name: x for name, x in named.items() if scaled and x is not None}, frozenset()


def needs_grad(names: Iterable[str]) -> PerInput[bool]:
    """Flags of the inputs with these names."""
    wanted = {NAMES.get(name, name) for name in names}
    return PerInput.by_name(lambda name: name in wanted)


def _mode(options: Options, hidden: jax.Array, weight: Any) -> str | None:
    """The loss's backward mode; "auto" as for a typical number of rows."""
    if options.backward != "auto" or options.implementation == "reference":
        return options.backward
    names = ("vocab_axis", "dtype", "precision", "vocab_size", "implementation", "scratch_bytes", "reduction")
    static: dict[str, Any] = {name: getattr(options, name) for name in names}
    typical = jax.ShapeDtypeStruct((_TYPICAL_ROWS, hidden.shape[1]), hidden.dtype)
    like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), weight)
    return pallas_ce.explain(typical, like, differentiate=("hidden", "weight"), **static).backward
