"""How a training is split over devices: `--mesh data=2,fsdp=2,tensor=2,sequence`.

* `data`: the batch is split, parameters are whole on every device;
* `fsdp`: the batch is split, and so is the width of every matrix and of its optimiser state;
* `tensor`: attention heads, the inner features of the MLP and the vocabulary are split;
* `sequence`: between blocks the tokens of each row are split over the `tensor` devices.

The model names the dimensions of its parameters (`out_sharding`, Flax's partitioning metadata); the optimiser's state
inherits the names. Here the names meet the axes of a mesh. XLA inserts the collectives.
"""

import dataclasses
import math
import re
from typing import Any

import jax
import optax
from flax import nnx
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from experiments.lm.config import TrainConfig, UsageError

_AXES = ("data", "fsdp", "tensor")
_SEQUENCE = "sequence"
_FORM = "write for instance data=2,tensor=2 or data=2,fsdp=2,tensor=2,sequence"

# Of the parameters' dimensions, which axis each is split over.
_RULES = (("vocabulary", "tensor"), ("heads", "tensor"), ("mlp", "tensor"), ("width", "fsdp"))


@dataclasses.dataclass(frozen=True)
class Layout:
    """Where everything lies: on a mesh of `data`, `fsdp` and `tensor`, and whether tokens are split between blocks."""

    mesh: Mesh
    sequence: bool

    @property
    def rows(self) -> NamedSharding:
        """Token rows `[B, T + 1]`."""
        return NamedSharding(self.mesh, PartitionSpec(("data", "fsdp")))

    @property
    def residual(self) -> NamedSharding:
        """The residual stream and the hidden states `[B, T, width]`."""
        return NamedSharding(self.mesh, PartitionSpec(("data", "fsdp"), "tensor" if self.sequence else None))

    @property
    def whole(self) -> NamedSharding:
        """A copy on every device."""
        return NamedSharding(self.mesh, PartitionSpec())

    def of_state(self, state: Any) -> Any:
        """Shardings of a pytree of arrays, by the names that its `nnx.Param`s carry; other leaves are whole."""
        with nnx.logical_axis_rules(_RULES):
            places = nnx.get_named_sharding(state, self.mesh)

        def is_masked(x: Any) -> bool:  # where an optimiser has no state for a parameter, there is nothing to place
            return isinstance(x, optax.MaskedNode)

        return jax.tree.map(lambda x, place: x if is_masked(x) else place, state, places, is_leaf=is_masked)

    def __str__(self) -> str:
        sizes = [f"{name}={size}" for name, size in self.mesh.shape.items() if size > 1]
        used, there = self.mesh.size, jax.device_count()
        words = ", ".join([*(sizes or ["one device"]), *([_SEQUENCE] if self.sequence else [])])
        return words + (f"; {used} of {there} devices" if used != there else "")


def padded_vocab_size(config: TrainConfig) -> int:
    """The entries of embedding and head: the vocabulary, padded so that the `tensor` devices have equal parts."""
    tensor = _parse(config.mesh)[0]["tensor"]
    return math.ceil(config.vocab_size / tensor) * tensor


def make_layout(config: TrainConfig) -> Layout:
    """The layout that the configuration asks for; without a mesh everything is on the first device.

    Raises:
        UsageError: if the mesh cannot be read, does not fit the devices, or does not divide the model.
    """
    sizes, sequence = _parse(config.mesh)
    _check_division(config, sizes, sequence)
    used, there = math.prod(sizes.values()), jax.device_count()
    if used > there or (jax.process_count() > 1 and used != there):
        raise UsageError(
            f"mesh is {config.mesh!r}, of {used} devices, but there are {there}; the sizes' product may be at most "
            f"that, and must be that with several processes, for instance data={there}"
        )
    types = (AxisType.Auto,) * len(_AXES)
    return Layout(jax.make_mesh(tuple(sizes.values()), _AXES, axis_types=types, devices=jax.devices()[:used]), sequence)


def _parse(text: str) -> tuple[dict[str, int], bool]:
    """The size of every axis, and whether `sequence` was asked for."""
    words = text.split(",") if text else []
    found = [match for word in words if (match := re.fullmatch(r"(data|fsdp|tensor)=([1-9]\d*)", word))]
    sizes = dict.fromkeys(_AXES, 1) | {match[1]: int(match[2]) for match in found}
    sequence = _SEQUENCE in words
    if len(found) + sequence != len(words) or len({match[1] for match in found}) != len(found):
        raise UsageError(f"mesh is {text!r}; {_FORM}, each axis once and with at least 1 device")
    if sequence and sizes["tensor"] == 1:
        raise UsageError(f"mesh is {text!r}; sequence splits tokens over the tensor axis, so tensor must be at least 2")
    return sizes, sequence


def _check_division(config: TrainConfig, sizes: dict[str, int], sequence: bool) -> None:
    tensor, batch = sizes["tensor"], sizes["data"] * sizes["fsdp"]
    wanted = [
        ("batch_size", "data·fsdp" if sizes["fsdp"] > 1 else "data", batch),
        ("width", "fsdp", sizes["fsdp"]),
        ("attention_heads", "tensor", tensor),
        ("mlp_width", "tensor", tensor),
        *([("sequence_length", "tensor", tensor)] if sequence else []),
    ]
    for option, axis, size in wanted:
        value = getattr(config, option)
        if value % size:
            below, above = value // size * size, math.ceil(value / size) * size
            nearest = f"{below} or {above}" if below else str(above)
            raise UsageError(
                f"{option} is {value}, which does not divide evenly over {axis}={size} of mesh {config.mesh!r}; "
                f"{nearest} would, or another mesh"
            )
