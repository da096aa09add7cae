"""Any options on four CPU devices; `test_meshes.py` runs it in a process that has them, and so does `make fuzz`."""

from typing import Any

import hypothesis
import hypothesis.strategies as st
import jax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from tests.pallas_ce import spoilt
from tests.pallas_ce.checks import assert_near_oracle, library_results
from tests.pallas_ce.layouts import LAYOUTS, flat, mesh
from tests.pallas_ce.problems import Problem, problems
from tests.pallas_ce.spoilt_functions import FUNCTIONS


@hypothesis.given(
    p=problems(multiple=4, low_rank=False),
    layout=st.sampled_from(LAYOUTS),
    backward=st.sampled_from(["recompute", "in_forward"]),
)
def test_any_options_split_over_a_mesh(p: Problem, layout: Any, backward: str) -> None:
    """Rows, vocabulary and width, as the parallelisms of training split them."""
    rows = P(flat(layout.hidden))
    specs = {"hidden": rows, "weight": layout.weight, "bias": layout.bias, "token_weights": rows, "logit_scale": P()}
    on = mesh(shape=(2, 2))
    p.arrays = {name: jax.device_put(x, NamedSharding(on, specs[name])) for name, x in p.arrays.items()}
    assert_near_oracle(p, library_results(p, "xla", backward))


# Sizes that four devices share; of heads that are told which implementation, each with what it makes of rows.
EVEN = spoilt.Sizes(rows=12, width=8, classes=1008, padded=1024, scratch_bytes=None)
SPREAD = [
    (name, way)
    for name in ("linear_cross_entropy", "linear_row_statistics", "linear_loss", "linear_distillation, jsd")
    for way in FUNCTIONS[name].ways
    if way[0] == "xla"
] + [("linear_top_k", ("", "")), ("linear_sample, {'top_p': 0.9}", ("", ""))]


@hypothesis.given(case=st.sampled_from(SPREAD), layout=st.sampled_from(LAYOUTS), seed=st.integers(0, 2**16))
def test_what_is_not_finite_on_a_mesh_is_where_plain_jax_has_it(case: Any, layout: Any, seed: int) -> None:
    name, way = case
    rows = P(flat(layout.hidden))
    by_row = dict.fromkeys(("hidden", "teacher_hidden", "token_weights", "temperature", "row_input"), rows)
    specs = {**by_row, **dict.fromkeys(("weight", "teacher_weight"), layout.weight), "bias": layout.bias}
    on = mesh(shape=(2, 2))

    def put(name: str, x: Any) -> Any:
        spec = specs.get(name, P())
        fits = all(size % 4 == 0 for size, axes in zip(x.shape, spec, strict=False) if axes)
        return jax.device_put(x, NamedSharding(on, spec if fits else P()))

    spoilt.check(FUNCTIONS[name], EVEN, way, seed, put=put)
