"""Pipeline schedules, DDP, FSDP2 and a split vocabulary on two real processes."""

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


@pytest.mark.slow
def test_unequal_parts_of_a_vocabulary_give_the_loss_and_gradients_of_the_whole_head():
    output = processes.run("vocab_parallel_program.py")
    assert output.count("done") == 2
