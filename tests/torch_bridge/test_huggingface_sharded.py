"""A patched model under FSDP1 and FSDP2, as accelerate wraps it and with a head by itself: as in one process."""

import types
import warnings

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from tests.torch_bridge import models, processes
from torch_bridge import patch_causal_lm


def make(tied):
    return models.make(tie_word_embeddings=tied)


def as_accelerate_does(model, mesh):
    """By accelerate's own function: its `Accelerator` takes FSDP2 on accelerators only."""
    from accelerate.utils import FullyShardedDataParallelPlugin, fsdp2_prepare_model

    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="transformer_based_wrap", cpu_ram_efficient_loading=False
    )
    accelerator = types.SimpleNamespace(
        state=types.SimpleNamespace(fsdp_plugin=plugin), torch_device_mesh=mesh, mixed_precision="no",
        parallelism_config=types.SimpleNamespace(fsdp_dim_names=("shards",)), device=torch.device("cpu"),
    )  # fmt: skip
    return fsdp2_prepare_model(accelerator, model)


def head_by_itself(model, mesh):
    fully_shard(model.lm_head, mesh=mesh, reshard_after_forward=True)
    return fully_shard(model, mesh=mesh)


def check_steps(rank, reference, model):
    optimizers = [torch.optim.SGD(x.parameters(), lr=0.1) for x in (reference, model)]
    for _ in range(2):
        tokens = torch.randint(3, models.VOCABULARY, (4, 9), generator=torch.Generator().manual_seed(1))
        mine = tokens[2 * rank : 2 * rank + 2]
        reference(input_ids=tokens, labels=tokens).loss.backward()
        out = model(input_ids=mine, labels=mine)
        assert out.logits is None
        out.loss.backward()
        parameters = dict(model.named_parameters())
        for name, parameter in reference.named_parameters():
            if parameter.requires_grad:
                gradient = parameters[name].grad.full_tensor()
                torch.testing.assert_close(gradient, parameter.grad, rtol=1e-4, atol=1e-6)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


def train(rank, _):
    warnings.simplefilter("ignore")
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("shards",))
    for shard, tied, backward in [
        (as_accelerate_does, True, "auto"),
        (as_accelerate_does, False, "recompute"),
        (head_by_itself, False, "recompute"),
    ]:
        model = shard(patch_causal_lm(make(tied), backward=backward), mesh)
        assert isinstance(model.lm_head, FSDPModule)
        check_steps(rank, make(tied), model)


def train_under_fsdp1(rank, _):
    warnings.simplefilter("ignore")
    for tied in (True, False):
        layers, plain = ModuleWrapPolicy({type(make(tied).model.layers[0])}), models.step(make(tied))
        wrapped = {"device_id": torch.device("cpu"), "use_orig_params": True}
        model = FullyShardedDataParallel(patch_causal_lm(make(tied)), auto_wrap_policy=layers, **wrapped)
        out, _ = models.step(model)
        assert out.logits is None
        torch.testing.assert_close(out.loss, plain[0].loss)
        with FullyShardedDataParallel.summon_full_params(model, with_grads=True):
            found = {name.replace("_fsdp_wrapped_module.", ""): x.grad for name, x in model.named_parameters()}
            torch.testing.assert_close(found, plain[1], rtol=1e-4, atol=1e-6)
    by_itself = FullyShardedDataParallel(
        patch_causal_lm(make(False)), auto_wrap_policy=ModuleWrapPolicy({torch.nn.Linear}), **wrapped
    )
    with pytest.raises(ValueError, match="the head of this LlamaForCausalLM is a FullyShardedDataParallel"):
        by_itself(**models.batch())


def train_adapters(rank, _):
    import peft

    def adapted(model, options):
        torch.manual_seed(2)
        config = peft.LoraConfig(task_type="CAUSAL_LM", init_lora_weights=False, **options)
        return peft.get_peft_model(model, config).train()

    warnings.simplefilter("ignore")
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("shards",))
    for options in (
        {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]},
        {"target_modules": ["q_proj", "lm_head"]},
    ):
        model = as_accelerate_does(adapted(patch_causal_lm(make(tied=False)), options), mesh)
        assert isinstance(model.get_base_model().lm_head, FSDPModule)
        check_steps(rank, adapted(make(tied=False), options), model)


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.parametrize("way", [train, train_under_fsdp1])
def test_under_fsdp_a_patched_model_trains_as_in_one_process(way):
    processes.run(way)


@pytest.mark.nightly
def test_under_fsdp2_adapters_and_a_head_that_is_saved_or_has_one_train_as_in_one_process():
    pytest.importorskip("peft")
    processes.run(train_adapters)
