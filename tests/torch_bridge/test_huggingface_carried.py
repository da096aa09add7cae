"""A patch goes with a model's pickles, copies, replicas and wrapped forwards; what loses it says so."""

import copy
import functools
import inspect
import io
import pickle
import types
import warnings

import pytest
import torch
import transformers as hf

from tests.torch_bridge.models import batch, make
from torch_bridge import patch_causal_lm, unpatch_causal_lm


def pickled(model):
    return pickle.loads(pickle.dumps(model))


def saved(model):
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


@pytest.mark.parametrize("carry", [pickled, saved, copy.deepcopy])
@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_a_pickled_saved_or_copied_model_is_patched_with_the_same_options_and_can_be_unpatched(carry, name):
    model = patch_causal_lm(make(name), label_smoothing=0.1)
    plain = unpatch_causal_lm(copy.deepcopy(model))(**batch()).loss
    want = model(**batch())
    found = carry(carry(model))
    got = found(**batch())
    assert got.logits is None
    assert torch.equal(got.loss, want.loss)
    with torch.no_grad():
        model.get_output_embeddings().weight.zero_()
    assert torch.equal(found(**batch()).loss, want.loss)
    with pytest.raises(ValueError, match="is patched already"):
        patch_causal_lm(found)
    torch.testing.assert_close(unpatch_causal_lm(found)(**batch()).loss, plain)
    assert patch_causal_lm(found)(**batch()).logits is None


def test_a_patched_model_is_of_its_own_kind_and_leaves_nothing_when_it_is_unpatched(tmp_path):
    model = make()
    before = set(model.__dict__)
    patch_causal_lm(model)
    assert isinstance(model, hf.LlamaForCausalLM)
    assert type(model).__name__ == "LlamaForCausalLM"
    signature = inspect.signature(model.forward)
    assert {"input_ids", "labels"} <= set(signature.parameters)
    assert "self" not in signature.parameters
    model.save_pretrained(tmp_path)
    assert type(hf.AutoModelForCausalLM.from_pretrained(tmp_path)) is hf.LlamaForCausalLM
    unpatch_causal_lm(model)
    assert type(pickled(model)) is type(model) is hf.LlamaForCausalLM
    assert set(model.__dict__) == before
    with pytest.raises(ValueError, match="not patched"):
        unpatch_causal_lm(model)


@pytest.fixture
def mixed_precision():
    accelerate = pytest.importorskip("accelerate")
    reset = accelerate.state.AcceleratorState._reset_state  # one is made of another test's Trainer
    reset(reset_partial_state=True)
    yield accelerate.Accelerator(mixed_precision="bf16", cpu=True)
    reset(reset_partial_state=True)


@pytest.mark.filterwarnings("ignore")
def test_after_the_unwrapping_that_is_advised_a_model_is_patched_as_before_and_can_be_unpatched(mixed_precision):
    model = patch_causal_lm(make(), label_smoothing=0.1)
    want = model(**batch()).loss
    wrapped = mixed_precision.prepare(model)
    assert wrapped(**batch()).logits is None
    with pytest.raises(ValueError, match=r"was wrapped after patching: .*keep_fp32_wrapper=False"):
        unpatch_causal_lm(model)
    inner = mixed_precision.unwrap_model(wrapped, keep_fp32_wrapper=False)
    assert torch.equal(inner(**batch()).loss, want)
    assert unpatch_causal_lm(inner)(**batch()).logits is not None
    inner.forward = types.MethodType(type(inner).forward, inner)  # its own, as an unwrapping leaves it
    assert patch_causal_lm(inner)(**batch()).logits is None


def test_a_forward_that_takes_the_patched_ones_place_is_warned_of_by_name():
    """As `use_liger_kernel=True` of Trainer does it; one that wraps it is not."""

    def lce_forward(self, *args, **kwargs):
        return hf.LlamaForCausalLM.forward(self, *args, **kwargs)

    model = patch_causal_lm(make(), label_smoothing=0.1)
    theirs = model.forward
    wrapped = functools.wraps(theirs)(lambda *args, **kwargs: theirs(*args, **kwargs))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model.forward = wrapped
        del model.forward
    with pytest.warns(UserWarning, match=r"LlamaForCausalLM was replaced by .*lce_forward.*label_smoothing.*liger"):
        model.forward = types.MethodType(lce_forward, model)
    with pytest.raises(ValueError, match="wrapped after patching"):
        unpatch_causal_lm(model)
    del model.forward
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        unpatch_causal_lm(model).forward = print


def test_a_replica_of_data_parallel_computes_with_its_own_weights():
    """As `torch.nn.parallel.replicate` makes one for each GPU, and fills it."""
    model = patch_causal_lm(make())

    def replicated(module):
        replica = module._replicate_for_data_parallel()
        for name, child in module.named_children():
            setattr(replica, name, replicated(child))
        for name, parameter in module._parameters.items():
            setattr(replica, name, None if parameter is None else 2 * parameter)
        return replica

    replica = replicated(model)
    assert replica.forward.__self__ is replica
    out = replica(**batch())
    assert out.logits is None
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2)
    torch.testing.assert_close(out.loss, model(**batch()).loss)


@pytest.mark.parametrize("items", [torch.tensor([7]), torch.tensor([[7]]), torch.tensor(7), 7])
def test_the_number_of_items_has_any_shape_of_one_number_and_the_loss_that_shape_as_the_models_own(items):
    """Trainer passes a vector; DataParallel gives each replica a part."""
    model = make()
    want = model(**batch(), num_items_in_batch=items).loss
    got = patch_causal_lm(model)(**batch(), num_items_in_batch=items).loss
    torch.testing.assert_close(got, want)
    with pytest.raises(ValueError, match="normalizer has shape"):
        model(**batch(), num_items_in_batch=torch.tensor([7, 7]))
