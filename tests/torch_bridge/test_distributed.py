"""Pipeline schedules, DDP, FSDP2 and a split vocabulary on two real processes; each program says what it shows."""

import pytest

from tests.torch_bridge import processes


@pytest.mark.slow
@pytest.mark.parametrize("program", ["pipeline_program.py", "data_parallel_program.py", "vocab_parallel_program.py"])
def test_two_processes_train_as_one_does(program):
    assert processes.run(program).count("done") == 2
