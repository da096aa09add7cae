"""Tensors and arrays share memory, and what cannot be shared is handled or refused by name."""

import gc
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from torch_bridge import to_jax, to_torch
from torch_bridge.api.linear import linear_cross_entropy
from torch_bridge.autograd.operator import LINEAR_ROW_STATISTICS
from torch_bridge.dlpack import exchange
from torch_bridge.dlpack.exchange import check_one_device, share, words_to_int32
from torch_bridge.programs.functions import Options


def every(module, kind):
    """Names of all dtypes of a framework."""
    return sorted({name for name in dir(module) if isinstance(getattr(module, name), kind)})


@pytest.mark.parametrize("name", every(jnp, type(jnp.float32)))
def test_an_array_of_every_dtype_that_jax_has_arrives_bit_by_bit_or_is_refused_by_name(name):
    with jax.enable_x64(True):
        array = jax.device_put((np.arange(64) % 2).astype(np.dtype(getattr(jnp, name))))
        if array.dtype not in exchange.TO_TORCH:
            with pytest.raises(TypeError, match=f"array has dtype {array.dtype}, which PyTorch does not have; conv"):
                to_torch(array)
            return
        tensor = to_torch(array)
        assert str(tensor.dtype) == f"torch.{array.dtype}"
        assert tensor.view(torch.uint8).numpy().tobytes() == np.asarray(array).tobytes()


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
@pytest.mark.filterwarnings("ignore:B?Complex.* support is experimental")
@pytest.mark.parametrize("name", every(torch, torch.dtype))
def test_a_tensor_of_every_dtype_that_pytorch_has_arrives_bit_by_bit_or_is_refused_by_name(name):
    dtype = getattr(torch, name)
    try:
        tensor = torch.empty(64, dtype=dtype)
    except RuntimeError:
        pytest.skip("PyTorch makes no such tensors this way")
    with jax.enable_x64(True):
        if dtype not in exchange.TO_JAX:
            with pytest.raises(TypeError, match=rf"tensor has (dtype {dtype}, which JAX does|layout)"):
                to_jax(tensor)
            return
        tensor.view(torch.uint8).copy_(torch.arange(tensor.nbytes) % 2)
        array = to_jax(tensor)
        assert f"torch.{array.dtype}" == str(tensor.dtype)
        assert np.asarray(array).tobytes() == tensor.view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize("shape", [(), (4, 5), (0,), (0, 4), (4, 0)])
def test_a_tensor_and_its_array_share_memory_both_ways_without_gradients(shape):
    tensor = torch.ones(shape, requires_grad=True)
    array = to_jax(tensor)
    back = to_torch(array)
    assert not back.requires_grad
    assert array.shape == back.shape == shape
    assert torch.equal(back, tensor)
    if tensor.numel():
        assert array.unsafe_buffer_pointer() == tensor.data_ptr() == back.data_ptr()


def views():
    base = torch.arange(48.0).reshape(6, 8)
    return {
        "sliced rows": base[1:5],
        "sliced columns": base[:, 2:6],
        "strided": base[::2, ::3],
        "transposed": base.t(),
        "expanded": base[:1].expand(5, 8),
        "negated view": torch.imag(torch.complex(base, base).conj()),
        "conjugated": torch.complex(base, base).conj(),
        "misaligned": base.flatten()[1:],
    }


@pytest.mark.parametrize("name", views())
def test_views_that_cannot_be_shared_arrive_with_their_values(name):
    tensor = views()[name]
    array = to_jax(tensor)
    np.testing.assert_array_equal(np.asarray(array), tensor.resolve_conj().resolve_neg().numpy())
    assert array.unsafe_buffer_pointer() % 64 == 0


@pytest.mark.parametrize(
    ("convert", "given", "message"),
    [
        (to_jax, torch.ones(2, dtype=torch.int64), "x has dtype int64.*narrow"),
        (to_jax, torch.ones(2, dtype=torch.float64), "x has dtype float64.*narrow"),
        (to_jax, torch.ones(2, 2).to_sparse(), r"\bx\b"),
        (to_jax, torch.ones(2, device="meta"), r"\bx\b"),
        (to_jax, np.ones(2), "x is a ndarray"),
        (to_torch, np.ones(2), "x is a ndarray"),
        (to_torch, jax.random.key(0), r"x has dtype key<fry>.*pass jax\.random\.key_data\(x\)"),
        (lambda given, name: jax.make_jaxpr(to_torch)(given), jnp.ones(2), "traced by JAX"),
    ],
)
def test_what_would_be_narrowed_or_has_no_memory_to_share_is_refused_by_name(convert, given, message):
    with pytest.raises((TypeError, ValueError), match=message):
        convert(given, "x")


def test_tensors_on_different_devices_are_refused_by_name():
    with pytest.raises(ValueError, match="linear_weight lies on meta and input on cpu"):
        check_one_device({"input": torch.ones(2), "linear_weight": torch.ones(2, device="meta")})
    check_one_device({"input": torch.ones(2, device="meta"), "logit_scale": torch.tensor(2.0)})


def test_labels_of_64_bits_cross_as_words_and_never_wrap_around_into_the_vocabulary():
    labels = torch.tensor([0, 7, -100, 2**32 + 3, -(2**32) + 3, 2**31 - 1, -(2**63), 2**63 - 1])
    (words,) = share(["target"], [labels], labels.device, None)
    assert words.unsafe_buffer_pointer() == labels.data_ptr()  # no copy
    assert words_to_int32(words).tolist() == [0, 7, -100, -1, -1, 2**31 - 1, -1, -1]
    assert words_to_int32(words.reshape(4, 4)).tolist() == [[0, 7], [-100, -1], [-1, 2**31 - 1], [-1, -1]]


def test_memory_that_the_other_side_still_uses_is_not_reused():
    """Each side drops its own handle at once, and both allocate and fill memory of the same size."""
    rng = np.random.default_rng(0)
    held = []
    for i in range(300):
        n = int(rng.integers(1, 5)) * 4096
        array = to_jax(torch.full((n,), float(i)))  # the only reference to the tensor's memory is JAX's
        tensor = to_torch(jnp.full((n,), float(-i)))  # and to the array's, PyTorch's
        doubled = jax.jit(jnp.add)(array, array)
        held.append((i, n, array, tensor, doubled))
        torch.full((n,), np.nan)
        jnp.full((n,), jnp.nan).block_until_ready()
        if len(held) > 20:
            gc.collect(0)
            k, m, array, tensor, doubled = held.pop(int(rng.integers(len(held))))
            np.testing.assert_array_equal(np.asarray(array), np.full(m, k, np.float32))
            np.testing.assert_array_equal(tensor.numpy(), np.full(m, -k, np.float32))
            np.testing.assert_array_equal(np.asarray(doubled), np.full(m, 2 * k, np.float32))


def test_inputs_dropped_or_overwritten_after_a_call_do_not_change_its_results():
    """From several threads, as PyTorch's backward may run in: each drops and overwrites what it passed at once."""
    torch.manual_seed(0)
    hidden, weight, target = torch.randn(256, 32), torch.randn(300, 32), torch.randint(0, 300, (256,))

    def step(scale):
        h, w = (hidden * scale).requires_grad_(), weight.clone().requires_grad_()
        loss = linear_cross_entropy(h, w, target.clone(), backward="in_forward")
        with torch.no_grad():
            overwritten = [x.clone() for x in (h, w)]
        (gradient,) = torch.autograd.grad(loss, h)
        with torch.no_grad():
            h.fill_(torch.nan), w.fill_(torch.nan)
        del h, w, overwritten
        return loss.detach().clone(), gradient

    want = {scale: step(scale) for scale in (0.5, 1.0, 2.0)}
    failures = []

    def work(scale):
        for _ in range(10):
            loss, gradient = step(scale)
            if not (torch.equal(loss, want[scale][0]) and torch.equal(gradient, want[scale][1])):
                failures.append(scale)

    threads = [threading.Thread(target=work, args=(scale,)) for scale in want]
    [t.start() for t in threads]
    [t.join() for t in threads]
    assert not failures


def test_a_program_takes_all_that_it_is_given_as_one_event_orders_it():
    """On a GPU only one array brings an event: a program that left that one out would not wait for the others."""
    given = {"input": torch.ones(5, 3), "linear_weight": torch.ones(9, 3), "target": torch.ones(5, dtype=torch.int32)}
    tensors = [given.get(name) for name in LINEAR_ROW_STATISTICS.tensors]
    program = LINEAR_ROW_STATISTICS.program(tensors, ("", *Options(statistics="lse")[1:]))  # which reads no target
    lowered = program.forward.lower(*program.structs()[:3]).compile().as_text()
    taken = lowered.split("entry_computation_layout={(")[1]
    assert taken.startswith("f32[256,3]{1,0}, f32[9,3]{1,0}, s32[256]{0})")
