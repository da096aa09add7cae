"""What a head reads of a parameter or a layer that the model has: the weight, the bias and the adapter (LoRA)."""

import sys
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

# What a layer may hold beside its parameters.
_STATE = (nnx.RngState, nnx.Intermediate, nnx.BatchStat, nnx.Cache)


class Parameters(NamedTuple):
    """The parameters of a head, to be read by `array`.

    Attributes:
        weight: `[V, H]` or `[H, V]`.
        bias: `[V]`, or None.
        lora: the adapter's factors `[H, r]` and `[r, V]`, or None.
        of_qwix: whether the adapter is one of qwix's, which keeps its scale in a rule that the layer does not know.
    """

    weight: Any
    bias: Any = None
    lora: tuple[Any, Any] | None = None
    of_qwix: bool = False


def layer(source: Any) -> Any:
    """The layer that has the weight, inside an `nnx.LoRA` or `source` itself; or `source`, a parameter."""
    inner = source.base_module if isinstance(source, nnx.LoRA) else source
    if inner is not source and isinstance(inner, nnx.LoRA | nnx.LoRALinear):
        raise ValueError(f"source is an nnx.LoRA of an {type(inner).__name__}: a head takes one adapter, so merge one")
    return inner


def parameters(source: Any) -> Parameters:
    """The parameters of a layer, or of a parameter alone."""
    inner = layer(source)
    if not isinstance(inner, nnx.Module):
        shape = getattr(inner, "shape", None)
        if shape is None:
            named = f"an nnx.LoRA of a {type(inner).__name__}" if inner is not source else f"a {type(inner).__name__}"
            raise TypeError(f"source is {named}: pass a parameter, an array, or a layer of NNX with one matrix")
        if len(shape) != 2:
            raise ValueError(f"source has shape {shape}: a head needs a weight of shape (V, H) or (H, V)")
        return Parameters(inner)
    for name, usual in (("dot_general", jax.lax.dot_general), ("einsum_op", jnp.einsum)):
        if getattr(inner, name, usual) is not usual:
            raise TypeError(f"source has {name} of its own, which the head would not call: make it JAX's")
    own = {name: x for name, x in vars(inner).items() if not isinstance(x, _STATE)}
    names = [name for name, x in own.items() if len(_shape(x) or ()) == 2 and not isinstance(x, nnx.LoRAParam)]
    if len(names) != 1:
        raise TypeError(
            f"source is a {type(inner).__name__} with the matrices {names}, but a head has one: pass the parameter"
        )
    (name,) = names
    served = {name, "bias", "lora", f"{name}_lora_a", f"{name}_lora_b"}
    if beside := sorted(key for key, x in own.items() if key not in served and _has_numbers(x)):
        raise TypeError(
            f"source is a {type(inner).__name__} with {', '.join(beside)} beside its matrix, which the head would not "
            "apply: dequantise the weight, call a bias `bias`, or pass the parameter if the logits do not depend on it"
        )
    adapters = [(x.lora_a, x.lora_b) for x in (source, own.get("lora")) if isinstance(x, nnx.LoRA)]
    if of_qwix := hasattr(inner, f"{name}_lora_b"):  # beside the weight
        adapters.append((getattr(inner, f"{name}_lora_a"), getattr(inner, f"{name}_lora_b")))
    if len(adapters) > 1:
        raise ValueError(f"source is a {type(source).__name__} with two adapters: a head takes one, so merge one")
    return Parameters(own[name], own.get("bias"), adapters[0] if adapters else None, of_qwix)


def _shape(x: Any) -> tuple[int, ...] | None:
    shape = getattr(x, "shape", None)
    return shape if isinstance(shape, tuple) else None  # of a NumPy dtype's class it is a descriptor


def _has_numbers(x: Any) -> bool:
    """Whether it is a floating array, or a module with a parameter."""
    if isinstance(x, nnx.Pytree):
        return bool(jax.tree.leaves(nnx.state(x, nnx.Param)))
    return _shape(x) is not None and hasattr(x, "dtype") and jnp.issubdtype(x.dtype, jnp.floating)


def vocab_axis(inner: Any, said: int | None) -> int:
    """Which axis of the weight is the vocabulary: as the layer `inner` has it, or as `said`."""
    known = None
    if type(inner) in (nnx.Linear, nnx.LoRALinear):
        known = 1
    elif isinstance(inner, nnx.Module) and hasattr(inner, "embedding"):
        known = 0
    elif isinstance(equation := getattr(inner, "einsum_str", None), str):
        operands, _, result = equation.replace(" ", "").partition("->")
        known = next((i for i, axis in enumerate(operands.rpartition(",")[2]) if axis in result), None)
    if said not in (0, 1, None) or (said is None and known is None):
        raise ValueError(
            f"vocab_axis={said!r}, with a {type(inner).__name__}: pass 0 for a weight [V, H], 1 for one [H, V]"
        )
    if None not in (said, known) and said != known:
        raise ValueError(f"vocab_axis={said}, but the vocabulary of this {type(inner).__name__} is axis {known}")
    return known if said is None else said  # type: ignore[return-value]


def array(parameter: Any) -> jax.Array:
    """A parameter's value; a quantised one's by the `dequantize` of its own package."""
    value = parameter
    if isinstance(parameter, nnx.Variable):
        value = parameter.get_value()
    elif not isinstance(parameter, jax.Array | np.ndarray):
        value = getattr(parameter, "value", parameter)  # a variable of Keras
    if isinstance(value, jax.Array | np.ndarray):
        return jnp.asarray(value)
    value = getattr(value, "array", value)  # qwix's wrapper, which also says how it was quantised
    package = type(value).__module__.partition(".")[0]
    dequantize = getattr(sys.modules.get(package), "dequantize", None)
    if dequantize is None:
        raise TypeError(
            f"the weight is a {package} {type(value).__name__}, and {package}.dequantize does not exist: pass the head "
            "an array or a parameter of floating dtype"
        )
    return dequantize(value)
