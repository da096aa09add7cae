"""The training step and the validation loss, compiled once for one loss head."""

import concurrent.futures
import functools
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import numpy as np
import optax
from flax import nnx

from experiments.lm.config import TrainConfig, UsageError
from experiments.lm.model.mesh import make_layout
from experiments.lm.model.objective import objective
from experiments.lm.model.optimizer import make_optimizer
from experiments.lm.model.transformer import LanguageModel

Params = nnx.State[Any, Any]


class TrainState(NamedTuple):
    """All that a step changes."""

    params: Params
    optimizer: optax.OptState


class StepNumbers(NamedTuple):
    """What a step reports; scalars, still on the device."""

    loss: jax.Array
    gradient_norm: jax.Array


@dataclass(frozen=True)
class Program:
    """Compiled functions of one loss head, and facts known before they run.

    `train` maps state and placed rows `[B, T + 1]` to the next state and the step's numbers, and gives the old state
    up; `validate` maps parameters and placed rows to the mean loss over counted labels. `facts` has the `parameters`,
    the `step_temporary_bytes` that the compiler planned beside inputs and outputs, and `compile_seconds`.
    """

    head: str
    initial_state: Callable[[int], TrainState]
    abstract_state: TrainState
    placed: Callable[[np.ndarray], jax.Array]
    train: Callable[[TrainState, jax.Array], tuple[TrainState, StepNumbers]]
    validate: Callable[[Params, jax.Array], jax.Array]
    facts: dict[str, float]


def build(config: TrainConfig, head: str, end_of_text: int) -> Program:
    """Compiles the training and the validation step of one loss head: `"fused"`, `"logits"` or `"canonical"`.

    Raises:
        UsageError: if the mesh does not fit, or the fused loss cannot be served as configured.
    """
    started = time.perf_counter()
    layout = make_layout(config)
    optimizer = make_optimizer(config)

    def make_model(seed: int, config: TrainConfig = config) -> LanguageModel:
        rngs = nnx.Rngs(jax.random.key(seed))
        return LanguageModel(config, end_of_text, residual=layout.residual, rngs=rngs)

    def initial_state(seed: int) -> TrainState:
        params = nnx.state(make_model(seed), nnx.Param)
        return TrainState(params, optimizer.init(params))

    def loss_of(config: TrainConfig) -> Callable[[Params, jax.Array], jax.Array]:
        graph = nnx.graphdef(nnx.eval_shape(functools.partial(make_model, config=config), 0))
        minimised = objective(config, head)
        return lambda params, rows: minimised(nnx.merge(graph, params), rows)

    loss, validation_loss = loss_of(config), loss_of(config.without_regularisers())

    def train(state: TrainState, rows: jax.Array) -> tuple[TrainState, StepNumbers]:
        value, gradients = jax.value_and_grad(loss)(state.params, rows)
        updates, optimizer_state = optimizer.update(gradients, state.optimizer, state.params)
        params = optax.apply_updates(state.params, updates)
        return TrainState(params, optimizer_state), StepNumbers(value, optax.tree.norm(gradients))

    shapes = jax.eval_shape(initial_state, 0)
    places = layout.of_state(shapes)
    abstract_state = jax.tree.map(
        lambda x, place: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), shapes, places
    )
    make_state = jax.jit(initial_state, out_shardings=places)
    rows_shape = (config.batch_size, config.sequence_length + 1)
    rows = jax.ShapeDtypeStruct(rows_shape, np.int32, sharding=layout.rows)
    # float32 has to mean float32: by default an accelerator multiplies it in a narrower format.
    precision = jax.default_matmul_precision("highest" if config.dtype == "float32" else "default")
    # One program is lowered while the other is compiled.
    with precision, concurrent.futures.ThreadPoolExecutor() as threads:
        try:
            jitted = jax.jit(train, donate_argnums=0, out_shardings=(places, layout.whole))
            compiling = threads.submit(jitted.lower(abstract_state, rows).compile)
            validate = jax.jit(validation_loss, out_shardings=layout.whole)
            compiled_validate = validate.lower(abstract_state.params, rows).compile()
        except (ValueError, NotImplementedError) as error:
            raise UsageError(f"this configuration cannot be trained: {error}") from error
        compiled_train = compiling.result()
    plan = compiled_train.memory_analysis()

    def placed(rows: np.ndarray) -> jax.Array:
        # Every process has all rows, and hands over its own devices'.
        return jax.make_array_from_callback(rows.shape, layout.rows, lambda part: rows[part])

    return Program(
        head=head,
        initial_state=make_state,
        abstract_state=abstract_state,
        placed=placed,
        train=compiled_train,
        validate=compiled_validate,
        facts={
            "parameters": sum(leaf.size for leaf in jax.tree.leaves(abstract_state.params)),
            "step_temporary_bytes": plan.temp_size_in_bytes if plan is not None else 0,
            "compile_seconds": time.perf_counter() - started,
        },
    )
