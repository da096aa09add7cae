"""`precision`: what every product of a head multiplies with, in the programs of all functions; and float32 heads."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.lax import DotAlgorithmPreset, Precision

from pallas_ce import Task, linear_cross_entropy, linear_log_probs, multi_task_cross_entropy
from pallas_ce.api.problem import Problem
from tests.pallas_ce.cases import DISTILLATIONS, HEADS, SERVED, total
from tests.pallas_ce.checks import assert_close, with_gradients
from tests.pallas_ce.problems import STREAMED

H, V = 16, 40
HIDDEN, WEIGHT = jax.random.normal(jax.random.key(0), (8, H)), jax.random.normal(jax.random.key(1), (V, H))
LABELS = jnp.array([0, 1, 2, 3, -100, 5, 39, 7])

# What the program of a CPU says of a product in each of these.
LEVELS = {"default": "precision = [DEFAULT, DEFAULT]", "tensorfloat32": "precision = [HIGH, HIGH]",
          "highest": "precision = [HIGHEST, HIGHEST]"}  # fmt: skip
SHOWN = LEVELS | {"BF16_BF16_F32_X3": "lhs_precision_type = bf16, rhs_precision_type = bf16, accumulation_type = f32"}

WAYS = [
    *((name, {} if x is None else {"implementation": x}) for name in HEADS for x in SERVED[name]),
    *((name, {"backward": mode}) for name in ("linear_cross_entropy", "linear_loss") for mode in
      ("in_forward", "recompute")),
]  # fmt: skip
every_way = pytest.mark.parametrize(("name", "options"), WAYS)


def products(function: Any, dtype: Any = jnp.float32, weight: Any = None, **options: Any) -> list[str]:
    """Products of a function and its gradients, as in the program."""

    def run(hidden: Any, weight: Any) -> Any:
        return with_gradients(lambda head: function(*head, LABELS, **options), (hidden, weight), total)

    given = HIDDEN.astype(dtype), WEIGHT.astype(dtype) if weight is None else weight
    text = jax.jit(run).lower(*given).as_text()
    found = [line for line in text.splitlines() if "stablehlo.dot_general" in line]
    assert found
    return found


def assert_all(lines: list[str], precision: str) -> None:
    for line in lines:
        assert SHOWN[precision] in line, line


@pytest.mark.nightly(keep=8)
@every_way
@pytest.mark.parametrize("precision", SHOWN)
def test_every_product_of_every_function_has_the_precision_asked_for(
    name: str, options: dict[str, Any], precision: str
) -> None:
    teacher = {"teacher_precision": precision} if name in DISTILLATIONS else {}
    assert_all(products(HEADS[name], precision=precision, **options, **teacher), precision)


@pytest.mark.nightly(keep=2)
@pytest.mark.parametrize("name", HEADS)
def test_jaxs_configuration_decides_where_nothing_is_said(name: str) -> None:
    teacher = {"teacher_precision": "tensorfloat32"} if name in DISTILLATIONS else {}
    asked = {"precision": "tensorfloat32", **teacher}
    with jax.default_matmul_precision("BF16_BF16_F32_X3"):
        assert_all(products(HEADS[name]), "BF16_BF16_F32_X3")
        assert_all(products(HEADS[name], **asked), "tensorfloat32")
        assert_all(products(HEADS[name], jnp.bfloat16), "default")
    assert_all(products(HEADS[name]), "highest")


def test_heads_of_several_tasks_have_one_precision_and_may_have_their_own() -> None:
    def loss(hidden: Any, weight: Any, labels: Any, **options: Any) -> Any:
        tasks = {"words": Task(weight, labels), "tags": Task(weight[:9], labels, options=options)}
        return multi_task_cross_entropy(hidden, tasks, precision="default").total

    assert_all(products(loss), "default")
    shown = {line[line.index("precision = [") :].partition("]")[0] + "]" for line in products(loss, precision="high")}
    assert shown == {SHOWN["default"], SHOWN["tensorfloat32"]}


def test_a_teacher_has_a_precision_of_its_own() -> None:
    for name in DISTILLATIONS:
        found = products(HEADS[name], precision="default", teacher_precision="tensorfloat32")
        count = {level: sum(SHOWN[level] in line for line in found) for level in LEVELS}
        assert count["highest"] == 0 < count["tensorfloat32"] < count["default"]


@pytest.mark.parametrize(
    ("dtype", "alike"),
    [
        (jnp.float32, ({}, {"precision": "highest"}, {"precision": "float32"}, {"precision": Precision.HIGHEST})),
        (jnp.float32, ({"precision": "fastest"}, {"precision": "bfloat16"}, {"precision": DotAlgorithmPreset.DEFAULT})),
        (jnp.float32, ({"precision": "TF32_TF32_F32"}, {"precision": DotAlgorithmPreset.TF32_TF32_F32})),
        (jnp.bfloat16, ({}, *({"precision": level} for level in LEVELS), {"precision": "BF16_BF16_F32"})),
        (jnp.float16, ({}, {"precision": "highest"}, {"precision": DotAlgorithmPreset.F16_F16_F32})),
    ],
)
def test_what_means_the_same_is_one_program(dtype: Any, alike: Any) -> None:
    specs = {Problem.read(HIDDEN, WEIGHT, dtype=dtype, **options).spec for options in alike}
    assert len(specs) == 1
    other = Problem.read(HIDDEN, WEIGHT, dtype=dtype, precision="TF32_TF32_F32_X3").spec
    assert other not in specs
    assert other.precision == DotAlgorithmPreset.TF32_TF32_F32_X3


@pytest.mark.parametrize("implementation", ["xla", "reference"])
def test_a_float32_head_of_bfloat16_inputs(implementation: str) -> None:
    """Log-probabilities and gradients of float32 products, the latter in the inputs' dtype."""
    narrow = HIDDEN.astype(jnp.bfloat16), WEIGHT.astype(jnp.bfloat16)
    wide = tuple(x.astype(jnp.float32) for x in narrow)
    run = functools.partial(linear_log_probs, labels=LABELS, dtype=jnp.float32, implementation=implementation)
    got, gradients = with_gradients(lambda head: run(*head), narrow)
    want, exact = with_gradients(lambda head: run(*head), wide)
    rounded = jax.tree.map(lambda x: x.astype(jnp.bfloat16), exact)
    assert got.dtype == jnp.float32
    assert {x.dtype for x in gradients} == {np.dtype(jnp.bfloat16)}
    np.testing.assert_array_equal(got, want)
    assert_close(gradients, rounded, 1e-6)
    assert_all(products(functools.partial(linear_log_probs, dtype=jnp.float32), jnp.bfloat16), "highest")


@pytest.mark.nightly(keep=4)
@pytest.mark.parametrize(("implementation", "backward"), STREAMED)
@pytest.mark.parametrize("vocab_axis", [0, 1])
@pytest.mark.parametrize("masters", [jnp.bfloat16, jnp.float32])
def test_products_of_bfloat16_inputs_are_bfloat16_products(
    masters: Any, vocab_axis: int, implementation: str, backward: str
) -> None:
    """dlogits left in float32 would silently run float32 products: the commonest performance bug of this field."""
    loss = functools.partial(linear_cross_entropy, dtype=jnp.bfloat16, vocab_axis=vocab_axis)
    weight = (WEIGHT.T if vocab_axis else WEIGHT).astype(masters)
    for line in products(loss, jnp.bfloat16, weight, implementation=implementation, backward=backward):
        operands, result = line.rsplit(":", 1)[1].split("->")
        assert operands.count("xbf16>") == 2, line
        assert "xf32>" in result, line
