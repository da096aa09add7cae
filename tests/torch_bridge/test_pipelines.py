"""Two processes train a small model under every schedule: losses and gradients equal one process's."""

import collections
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import (
    Schedule1F1B,
    ScheduleDualPipeV,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleLoopedBFS,
    ScheduleZBVZeroBubble,
)

from tests.torch_bridge import processes
from torch_bridge import put_head_back, returning, take_head
from torch_bridge.programs import calls

WIDTH, VOCABULARY, BATCH, TIME, MICROBATCHES = 16, 61, 8, 5, 4

# The stages of each rank. A V has the last stage on the first one's rank, and two neighbours on the other.
SINGLE, LOOP, V = ([0], [1]), ([0, 2], [1, 3]), ([0, 3], [1, 2])
# What the calls of the head's backward are asked for.
WHOLE = {("input", "linear_weight", "linear_bias")}
SPLIT = {("input",), ("linear_weight", "linear_bias")}

SCHEDULES = {
    ScheduleGPipe: (SINGLE, WHOLE),
    Schedule1F1B: (SINGLE, WHOLE),
    ScheduleLoopedBFS: (LOOP, WHOLE),
    ScheduleInterleaved1F1B: (LOOP, WHOLE),
    ScheduleInterleavedZeroBubble: (LOOP, SPLIT),
    ScheduleZBVZeroBubble: (V, SPLIT),
    ScheduleDualPipeV: (V, WHOLE | SPLIT),
}


class Stage(PipelineStage):
    """A stage that with gloo opens no connection to its own rank.

    Neighbours on one rank hand each other tensors directly, but PyTorch 2.11 tries a message between them first. NCCL
    can send to itself, gloo cannot.
    """

    def _get_init_p2p_neighbors_ops(self):
        operations = super()._get_init_p2p_neighbors_ops()
        return [x for x in operations if dist.get_backend() != "gloo" or x.group_peer != self.group_rank]

    def _backward_metadata_inference(self, *args, **options):
        """From PyTorch 2.12 on: a backward of the first microbatch for its metadata only, which does not count."""
        found = super()._backward_metadata_inference(*args, **options)
        calls.backward.reset_mock()
        return found


def make_model(stages, device):
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(stages)]
    layers[-1].add_module("lm_head", nn.Linear(WIDTH, VOCABULARY))
    return [layer.to(device) for layer in layers]


def make_batch(device):
    torch.manual_seed(1)
    x, target = torch.randn(BATCH, TIME, WIDTH), torch.randint(0, VOCABULARY, (BATCH, TIME))
    return x.to(device), target.to(device)


def loss_of_logits(logits, target):
    return nn.functional.cross_entropy(logits.flatten(0, 1), target.flatten())


def want(stages, x, target):
    model = nn.Sequential(*make_model(stages, x.device))
    microbatches = zip(x.chunk(MICROBATCHES), target.chunk(MICROBATCHES), strict=True)
    losses = torch.stack([loss_of_logits(model(a), b) for a, b in microbatches])
    losses.mean().backward()
    return model, losses.detach()


def train(kind, rank, device):
    of_ranks, asked = SCHEDULES[kind]
    stages, mine = sum(map(len, of_ranks)), of_ranks[rank]
    modules = make_model(stages, device)
    x, target = make_batch(device)
    loss_fn = take_head(modules[-1], "lm_head") if stages - 1 in mine else None
    built = [Stage(modules[i], i, stages, device) for i in mine]
    arguments = {"n_microbatches": MICROBATCHES, "loss_fn": loss_fn or loss_of_logits}
    schedule = kind(built[0] if of_ranks is SINGLE else built, **arguments)
    model, losses = want(stages, x, target)
    calls.backward.reset_mock()
    found: list[torch.Tensor] = []
    given = {"target": target, "losses": found} if stages - 1 in mine else {}
    schedule.step(*([x] if rank == 0 else []), **given)
    exact = dict(model.named_parameters())
    for i in mine:
        for name, parameter in modules[i].named_parameters():
            reference = exact[f"{i}.{name}"].grad
            assert torch.allclose(parameter.grad, reference, rtol=1e-4, atol=1e-6), f"{kind.__name__} {i}.{name}"
    if loss_fn is not None:
        torch.testing.assert_close(torch.stack(found), losses, rtol=1e-5, atol=1e-6)
        assert list(modules[-1].state_dict()) == list(model[-1].state_dict())
        asked_of_backward = [call.args[-1] for call in calls.backward.call_args_list]
        computed = collections.Counter(name for names in asked_of_backward for name in names)
        assert computed == {"input": MICROBATCHES, "linear_weight": MICROBATCHES, "linear_bias": MICROBATCHES}
        assert set(asked_of_backward) == asked
    dist.barrier()


def evaluate(rank, device):
    """Logits without targets; the loss of hidden states within `returning`."""
    modules = make_model(2, device)
    x, target = make_batch(device)
    logits = nn.Sequential(*make_model(2, device))(x)
    loss_fn = take_head(modules[-1], "lm_head")
    modules[rank].eval()
    schedule = ScheduleGPipe(PipelineStage(modules[rank], rank, 2, device), MICROBATCHES)
    out = schedule.eval(*([x] if rank == 0 else []))
    if rank == 1:
        torch.testing.assert_close(out, logits)
    with returning("hidden", modules[rank]):
        schedule = ScheduleGPipe(PipelineStage(modules[rank], rank, 2, device), MICROBATCHES, loss_fn=loss_fn)
        found: list[torch.Tensor] = []
        schedule.eval(*([x] if rank == 0 else []), **({"target": target, "losses": found} if rank == 1 else {}))
    if rank == 1:
        torch.testing.assert_close(torch.stack(found).mean(), loss_of_logits(logits, target))
        put_head_back(modules[1], "lm_head")
        assert type(modules[1].lm_head) is nn.Linear


def every_schedule(rank, device):
    calls.backward = mock.Mock(wraps=calls.backward)  # tells which gradients each is asked for
    for kind in SCHEDULES:
        train(kind, rank, torch.device(device))
    evaluate(rank, torch.device(device))


@pytest.mark.nightly
@pytest.mark.slow
def test_every_schedule_trains_as_one_process_does():
    processes.run(every_schedule)


@pytest.mark.gpu
def test_every_schedule_trains_on_two_gpus_as_one_process_does():
    processes.run(every_schedule, "cuda")
