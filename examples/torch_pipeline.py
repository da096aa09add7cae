"""Trains a model whose layers are on two processes, a pipeline: `python examples/torch_pipeline.py`.

`take_head` makes the last stage return hidden states in training, and the schedule's loss function has the head: no
logits of the microbatches in flight are kept. Each of two processes has a stage; any schedule of
`torch.distributed.pipelining` would do. One process with logits has the same losses. It takes seconds on a CPU, and
needs the extra `torch`.
"""

import os
import tempfile

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.multiprocessing.spawn import spawn

from torch_bridge import take_head

VOCABULARY, WIDTH, ROWS, TIME, MICROBATCHES, STEPS = 1000, 64, 16, 16, 4, 30


def make_stages() -> list[nn.Module]:
    """The first half of a model and the second, the same each time."""
    torch.manual_seed(0)
    first = nn.Sequential(nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Tanh())
    last = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())
    last.add_module("lm_head", nn.Linear(WIDTH, VOCABULARY))
    return [first, last]


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    """Numbers, and those that follow when one multiplies them by 7: `[ROWS, TIME]` each."""
    tokens = torch.randint(0, VOCABULARY, (ROWS, TIME), generator=torch.Generator().manual_seed(1))
    return tokens, 7 * tokens % VOCABULARY


def alone() -> list[float]:
    """The losses of one process, which stores logits."""
    model, (tokens, target), losses = nn.Sequential(*make_stages()), batch(), []
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), target.flatten())
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def run_stage(rank: int, folder: str) -> None:
    """What each process does; the last one compares."""
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    module = make_stages()[rank]
    loss_fn = take_head(module, "lm_head") if rank == 1 else None
    optimizer = torch.optim.Adam(module.parameters(), lr=1e-2)
    stage = PipelineStage(module, rank, 2, torch.device("cpu"))
    schedule = Schedule1F1B(stage, MICROBATCHES, loss_fn=loss_fn or nn.functional.cross_entropy)
    tokens, target = batch()
    found = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        losses: list[torch.Tensor] = []
        if rank == 0:
            schedule.step(tokens)
        else:
            schedule.step(target=target, losses=losses)
            found.append(torch.stack(losses).mean().item())
        optimizer.step()
    if rank == 1:
        expected = alone()
        print("step  one process  two stages")
        for step in range(0, STEPS, 5):
            print(f"{step:4}  {expected[step]:11.5f}  {found[step]:10.5f}")
        torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4)
        assert found[-1] < 0.2 * found[0]
    dist.destroy_process_group()


def main() -> None:
    """Starts the two processes; what one of them raises is raised here."""
    with tempfile.TemporaryDirectory() as folder:
        spawn(run_stage, (folder,), nprocs=2)


if __name__ == "__main__":
    main()
