"""The benchmark of the head on a GPU, at a size that takes a moment."""

import pytest

pytestmark = pytest.mark.gpu


def test_every_contender_is_timed_beside_the_bare_products() -> None:
    from experiments import gpu_head

    record = gpu_head.measure((512, 4096, 256), gpu_head.standard(), rounds=1)
    found = record["results"]
    assert set(gpu_head.standard()) < set(found)
    assert all(found[name]["ratio"] > 0 for name in gpu_head.standard())
    assert found["three"]["ms"] > found["bare"]["ms"] > 0


def test_options_are_timed_beside_the_bare_products() -> None:
    from experiments import gpu_head

    record = gpu_head.measure((512, 4096, 256), gpu_head.option_programs(512), rounds=1)
    assert all(record["results"][name]["ratio"] > 0 for name in gpu_head.option_programs(512))
