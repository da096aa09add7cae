"""Two processes train a head under DDP, FSDP1 and FSDP2: the gradients equal the whole batch's in one process."""

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel

from tests.torch_bridge import processes
from torch_bridge import LinearCrossEntropyLoss, linear_cross_entropy, take_head

WIDTH, VOCABULARY, BATCH = 8, 30, 6


class Model(nn.Module):
    def __init__(self, width=WIDTH, vocabulary=VOCABULARY, **options):
        super().__init__()
        torch.manual_seed(0)
        self.trunk = nn.Linear(width, width)
        self.head = LinearCrossEntropyLoss(width, vocabulary, bias=True, **options)

    def forward(self, x, target):
        return self.head(self.trunk(x), target)


def check_head_in_loss(mesh, x, target, reference):
    """A head that the loss took is there after the forward in the root's group, or where it is not sharded again."""
    want = [parameter.grad for parameter in reference.parameters()]
    for reshards in (None, False, True):  # None: not wrapped by itself
        model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, VOCABULARY))
        model.load_state_dict(dict(zip(model.state_dict(), reference.state_dict().values(), strict=True)))
        loss = take_head(model, "1")
        if reshards is not None:
            fully_shard(model[1], mesh=mesh, reshard_after_forward=reshards)
        fully_shard(model, mesh=mesh)
        if reshards:
            with pytest.raises(TypeError, match="linear_weight is a DTensor"):
                loss(model(x), target)
            continue
        loss(model(x), target).backward()
        for parameter, gradient in zip(model.parameters(), want, strict=True):
            torch.testing.assert_close(parameter.grad.full_tensor(), gradient)


def check_fsdp1(x, target, reference):
    for original in (False, True):
        model = FullyShardedDataParallel(Model(), use_orig_params=original, device_id=torch.device("cpu"))
        model(x, target).backward()
        with pytest.raises(ValueError, match="FSDP1"):
            linear_cross_entropy(x, model.head.weight, target)
    with FullyShardedDataParallel.summon_full_params(model, with_grads=True):
        torch.testing.assert_close([x.grad for x in model.parameters()], [x.grad for x in reference.parameters()])


def train(rank, _):
    torch.manual_seed(1)
    x, target = torch.randn(BATCH, WIDTH), torch.randint(0, VOCABULARY, (BATCH,))
    mine = slice(rank * BATCH // 2, (rank + 1) * BATCH // 2)
    reference = Model()
    reference(x, target).backward()

    ddp = Model()
    wrapped = DistributedDataParallel(ddp)
    wrapped(x[mine], target[mine]).backward()
    mesh = init_device_mesh("cpu", (2,))
    sharded = Model()
    fully_shard(sharded.head, mesh=mesh)
    fully_shard(sharded, mesh=mesh)
    sharded(x[mine], target[mine]).backward()
    for name, parameter in reference.named_parameters():
        torch.testing.assert_close(dict(ddp.named_parameters())[name].grad, parameter.grad)
        gathered = dict(sharded.named_parameters())[name].grad.full_tensor()
        torch.testing.assert_close(gathered, parameter.grad)

    with pytest.raises(TypeError, match="linear_weight is a DTensor"):  # sharded again after the forward
        linear_cross_entropy(x, sharded.head.weight, target)
    check_head_in_loss(mesh, x[mine], target[mine], reference)
    check_fsdp1(x[mine], target[mine], reference)


@pytest.mark.nightly
@pytest.mark.slow
def test_every_kind_of_data_parallelism_trains_as_one_process_does():
    processes.run(train)


def train_by_kernels(rank, device):
    """In bfloat16, of a size that kernels serve: FSDP2 beside the whole batch in one process."""
    for backward in ("in_forward", "recompute"):
        torch.manual_seed(1)
        x = torch.randn(512, 256, dtype=torch.bfloat16, device=device)
        target = torch.randint(0, 4096, (512,), device=device)
        reference, sharded = (Model(256, 4096, backward=backward).to(x) for _ in range(2))
        reference(x, target).backward()
        mesh = init_device_mesh(device, (2,))
        fully_shard(sharded.head, mesh=mesh)
        fully_shard(sharded, mesh=mesh)
        sharded(x.chunk(2)[rank], target.chunk(2)[rank]).backward()
        for parameter, exact in zip(sharded.parameters(), reference.parameters(), strict=True):
            difference = parameter.grad.full_tensor().float() - exact.grad.float()
            assert difference.norm() <= 2**-7 * exact.grad.float().norm()


@pytest.mark.gpu
def test_fsdp2_trains_on_two_gpus_as_one_process_does():
    processes.run(train_by_kernels, "cuda")
