"""What may befall a process that uses the bridge, done to it: `docs/robustness.md` has the list."""

import sys

import jax
import pytest
import torch

import torch_bridge
from tests.torch_bridge import processes
from torch_bridge import linear_cross_entropy
from torch_bridge.dlpack import exchange

FORKED = """
import os, warnings
import torch
from torch_bridge import linear_cross_entropy

told = []
warnings.showwarning = lambda message, *_: told.append("JAX is multithreaded" in str(message))

def forked(work):
    if (child := os.fork()) == 0:
        try:
            work()
        except RuntimeError as error:
            os._exit(7 * ("forked from one in which JAX had started" in str(error)))
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

given = torch.ones(64, 8), torch.ones(100, 8), torch.zeros(64, dtype=torch.long)
assert forked(lambda: linear_cross_entropy(*given)) == 0  # JAX starts in the child
before = linear_cross_entropy(*given)
assert forked(lambda: given[0] + 1) == 0
assert forked(lambda: linear_cross_entropy(*given)) == 7
assert torch.equal(before, linear_cross_entropy(*given))
assert len(list(torch.utils.data.DataLoader([0, 1], num_workers=1))) == 2
assert not any(told)  # these children compute nothing, or are told
warnings.simplefilter("always", RuntimeWarning)
forked(lambda: None)
assert told.count(True) == 1  # the user's own filter comes first
"""


@pytest.mark.nightly
def test_in_a_process_that_was_forked_too_late_the_bridge_says_so_where_jax_would_hang() -> None:
    processes.script(FORKED)


ENDING = """
import sys, time, types
import torch
from torch_bridge import cross_entropy, linear_cross_entropy
from torch_bridge.dlpack import exchange

def sleep(seconds):
    print("waited", seconds)
    time.sleep(seconds)

exchange.time = types.SimpleNamespace(sleep=sleep)
labels = torch.zeros(64, dtype=torch.long)
linear_cross_entropy(torch.ones(64, 8, requires_grad=True), torch.ones(100, 8), labels).backward()
cross_entropy(torch.ones(64, 8), labels)
assert "torch._dynamo" not in sys.modules  # whoever does not compile does not wait for it
"""


def test_a_process_that_ends_after_a_call_waits_for_jax_to_drop_the_tensors() -> None:
    """Once; without that it aborts now and then, which no test can bring about."""
    assert processes.script(ENDING) == f"waited {exchange.LETTING_GO_SECONDS}\n"


def test_a_call_without_room_is_an_error_and_the_next_one_works() -> None:
    """Stored logits of 2^50 bytes, more than a process can address."""
    hidden, weight = (torch.ones(2**24, 2, dtype=torch.bfloat16) for _ in range(2))
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"RESOURCE_EXHAUSTED|[Oo]ut of memory"):
        linear_cross_entropy(hidden, weight, torch.zeros(2**24, dtype=torch.int32), implementation="reference")
    few = linear_cross_entropy(torch.ones(8, 2), torch.ones(32, 2), torch.zeros(8, dtype=torch.long))
    torch.testing.assert_close(few, torch.tensor(32.0).log())


def test_a_torch_that_is_too_old_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", "2.10.1+cu130")
    monkeypatch.delitem(sys.modules, "torch_bridge.versions")
    with pytest.raises(ImportError, match=r"torch_bridge needs torch>=2\.11, and 2\.10\.1\+cu130 is installed: pip"):
        _ = torch_bridge.linear_log_probs
