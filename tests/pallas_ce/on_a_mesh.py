"""Any options on four CPU devices; `test_meshes.py` runs it in a process that has them, and so does `make fuzz`."""

from typing import Any

import hypothesis
import hypothesis.strategies as st
import jax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from tests.pallas_ce.checks import assert_near_oracle, library_results
from tests.pallas_ce.layouts import LAYOUTS, flat, mesh
from tests.pallas_ce.problems import Problem, problems


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
