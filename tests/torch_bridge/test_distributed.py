"""Pipeline schedules, DDP and FSDP2 on two real processes."""

import pytest

from tests.torch_bridge import processes


@pytest.mark.slow
def test_every_schedule_trains_as_one_process_does_and_computes_each_gradient_once():
    output = processes.run("pipeline_program.py")
    assert output.count("done") == 2


@pytest.mark.slow
def test_ddp_and_fsdp_give_the_gradients_of_the_whole_batch():
    output = processes.run("data_parallel_program.py")
    assert output.count("done") == 2
