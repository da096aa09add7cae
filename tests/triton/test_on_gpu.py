"""The contract on a GPU, with implementation="triton": `make test-gpu EXTRA=cuda13 ARGS="tests -k triton"`.

Tests take the tiles of the GPU's own architecture, and once more Ampere's, whose code newer GPUs run too.
"""

from collections.abc import Iterator
from typing import Any

import hypothesis
import jax
import pytest

from pallas_ce import linear_distillation
from pallas_ce.backends.triton import binding, configs
from tests.pallas_ce import test_distillation
from tests.pallas_ce.checks import assert_as_accurate_as_rounded_dlogits, assert_near_oracle, library_results
from tests.pallas_ce.kernel_cases import BFLOAT16, assert_same_bits
from tests.pallas_ce.problems import Problem, make, narrow_problems, problems
from tests.pallas_ce.streamed import two_heads
from tests.pallas_ce.sums import LOSS_SCALES, ON_GPU, PARTS, assert_adds, drawn_in_parts
from tests.pallas_ce.test_on_gpu import narrow

pytestmark = pytest.mark.gpu

both_modes = pytest.mark.parametrize("backward", ["recompute", "in_forward"])


@pytest.fixture(params=["own", "ampere"], autouse=True)
def architecture(request: pytest.FixtureRequest) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "ampere":
            patch.setattr(binding, "capability", lambda: 80)
        jax.clear_caches()
        yield


@PARTS
def test_any_options(part: int) -> None:
    drawn_in_parts(part, 64, narrow_problems(most=ON_GPU), "triton")


@both_modes
@hypothesis.settings(suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture])
@hypothesis.given(p=problems())
def test_float32_matches_the_oracle(p: Problem, backward: Any) -> None:
    assert_near_oracle(p, library_results(p, "triton", backward))


@both_modes
@hypothesis.settings(suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture])
@hypothesis.given(p=problems(low_rank=False), loss_scale=LOSS_SCALES)
def test_float32_is_added_to_sums(p: Problem, loss_scale: float, backward: Any) -> None:
    assert_adds(p, loss_scale, implementation="triton", backward=backward)


@both_modes
@pytest.mark.parametrize("axis", [0, 1])
def test_launches_in_a_captured_graph_give_the_same_bits_each_time(backward: Any, axis: int) -> None:
    """From the second call on XLA replays a CUDA graph, which may hold no allocation."""
    p = narrow(make(1, 3000, 256, 20000, vocab_axis=axis))
    assert_as_accurate_as_rounded_dlogits(p, library_results(p, "triton", backward), backward)
    assert_same_bits(jax.jit(lambda: library_results(p, "triton", backward, scratch_bytes=2**24)))


@pytest.mark.parametrize("divergence", test_distillation.DIVERGENCES)
def test_two_heads_of_a_real_vocabulary_match_the_definition(divergence: Any) -> None:
    """In two blocks of rows; XLA's own, which stores nothing, within the same bounds. Narrow: the oracle is NumPy's."""
    for name in ("triton", "xla"):
        test_distillation.assert_as_accurate_as_stored(divergence, BFLOAT16, (1024, 256, 131072), implementation=name)


def test_two_heads_with_any_options() -> None:
    test_distillation.test_value_and_gradients_match_the_definition_in_float64(implementation="triton")


@pytest.mark.parametrize("divergence", test_distillation.DIVERGENCES)
def test_divergences_have_the_same_bits_each_time(divergence: Any) -> None:
    given = two_heads(0, 3000, 256, 20000, teacher_h=512)
    arrays = {name: x.astype(BFLOAT16) for name, x in given.items()}
    run = jax.jit(jax.grad(lambda a: linear_distillation(**a, divergence=divergence, implementation="triton")))
    assert_same_bits(lambda: run(arrays))


def test_the_table_has_this_gpu() -> None:
    capability = binding.capability()
    assert capability is not None
    assert capability in configs.NARROW
