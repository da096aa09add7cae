"""The accounting of the pipeline's last stage, and the figures that were recorded with it."""

import json

import jax
import pytest
import torch
from jax.sharding import AbstractDevice, AbstractMesh
from torch._subclasses.fake_tensor import FakeTensorMode

from experiments import pipeline_memory


def test_the_counter_follows_storages_from_their_making_to_their_end():
    with FakeTensorMode(), pipeline_memory.Counter(0) as counter:
        first = torch.empty(1000, dtype=torch.float32)
        view = first.view(10, 100).t()
        assert counter.now == 4000
        doubled = first * 2
        assert counter.now == counter.peak == 8000
        del first
        assert counter.now == 8000  # the view holds it
        del view
        assert counter.now == 4000
        del doubled
    assert (counter.now, counter.peak) == (0, 8000)


def test_stored_logits_of_every_microbatch_in_flight_are_counted():
    shape = {"tokens": 64, "width": 8, "vocabulary": 4096, "in_flight": 3}
    logits = 64 * 4096
    peaks = [pipeline_memory.counted("logits", {**shape, "in_flight": n}) for n in (3, 4)]
    assert peaks[1] - peaks[0] == pytest.approx(
        logits * (2 + 4), rel=0.02
    )  # bfloat16, and log-probabilities in float32
    peaks = [pipeline_memory.counted("fused", {**shape, "in_flight": n}) for n in (3, 4)]
    assert peaks[1] - peaks[0] < 64 * (8 * 4 + 100)  # hidden states, their gradient, and a few numbers


def test_the_recorded_figures_are_those_of_the_program_and_keep_the_promise():
    record = json.loads(pipeline_memory.RESULTS.read_text())
    assert record["shape"] == {"tokens": 4096, "width": 2048, "vocabulary": 151_936, "in_flight": 4}
    recorded_on = AbstractDevice(record["device"], 132, platform="cuda")
    with jax.sharding.use_abstract_mesh(AbstractMesh((), (), (), abstract_device=recorded_on)):
        of_program = {
            name: pipeline_memory.counted(name, record["shape"], record["implementation"])
            for name in pipeline_memory.contenders()
        }
    for name, row in pipeline_memory.compare(of_program).items():
        # Measured once, on a GPU; since then tiles may have been chosen that take a little more or less.
        assert record["counted"][name] == pytest.approx(row, rel=0.02)
    assert record["device"] == "NVIDIA H200"
    for how in ("counted", "measured", "allocators"):
        assert record[how]["fused"]["head_saved"] > 0.8
        assert record[how]["fused"]["stage_saved"] > 0.43


def test_every_contender_computes_the_same_gradients():
    shape = {"tokens": 24, "width": 16, "vocabulary": 200}
    found = {}
    for name, contender in pipeline_memory.contenders().items():
        torch.manual_seed(0)
        head = torch.nn.Linear(shape["width"], shape["vocabulary"], bias=False)
        hidden = torch.randn(1, shape["tokens"], shape["width"], requires_grad=True)
        module, loss_fn = contender(head)
        target = torch.randint(0, shape["vocabulary"], (1, shape["tokens"]))
        found[name] = torch.autograd.grad(loss_fn(module(hidden), target), (hidden, head.weight))
    for name in ("chunked", "fused"):
        torch.testing.assert_close(found[name], found["logits"], rtol=1e-4, atol=1e-7)


@pytest.mark.slow
def test_a_measured_run_is_written_beside_the_counts_and_drawn(tmp_path, capsys):
    shape = ["--tokens=256", "--width=64", "--vocabulary=100000", "--in-flight=3"]
    pipeline_memory.main([*shape, "--device=cpu", "--implementation=xla", f"--out={tmp_path / 'run.json'}"])
    record = json.loads((tmp_path / "run.json").read_text())
    assert set(record["measured"]) == set(record["allocators"]) == {"logits", "chunked", "fused"}
    assert record["measured"]["logits"]["head_bytes"] > 3 * 256 * 100000 * 2  # bfloat16 logits of every microbatch
    assert (tmp_path / "run.png").stat().st_size > 0
    assert capsys.readouterr().out.count("saved") == 18
