"""What makes a call cheap for the host, counted rather than timed: what must not happen, and what happens once."""

import functools
import gc
import os
import sys
import types
import weakref
from unittest import mock

import jax
import pytest
import torch

from tests.torch_bridge import problems
from torch_bridge import linear_cross_entropy, linear_row_statistics
from torch_bridge.api import checks
from torch_bridge.autograd import operator as ops
from torch_bridge.dlpack import exchange

ROWS, WIDTH, VOCABULARY = 256, 16, 32


@pytest.fixture
def head():
    return problems.head(ROWS, WIDTH, VOCABULARY)


def without_gradients(function, head):
    with torch.no_grad():
        function(*head)


def with_gradients(function, head):
    function(*head).backward()


WAYS = {"without gradients": without_gradients, "with gradients": with_gradients}


def python_of_jax(call):
    """Names of JAX's Python functions that a call enters: a compiled program and an import by DLPack need none."""
    package = os.path.dirname(jax.__file__) + os.sep
    entered = []

    def profile(frame, event, _):
        if event == "call" and frame.f_code.co_filename.startswith(package):
            entered.append(frame.f_code.co_name)

    sys.setprofile(profile)
    try:
        call()
    finally:
        sys.setprofile(None)
    return entered


@pytest.mark.parametrize("name", problems.LINEAR)
@pytest.mark.parametrize("way", WAYS)
def test_a_repeated_call_traces_nothing_and_runs_no_operation_of_jax_outside_the_compiled_programs(head, name, way):
    call = functools.partial(WAYS[way], problems.LINEAR[name], head)
    call(), call()
    assert "from_dlpack" in python_of_jax(lambda: jax.dlpack.from_dlpack(head[2]))  # it is seen
    assert set(python_of_jax(call)) <= {"make_single_device_sharding"}


@pytest.fixture
def exchanged(monkeypatch):
    """How often since the last call something went to JAX, came from there, and a program's tensors were shared."""
    names = "dlpack_managed_tensor_to_buffer", "buffer_to_dlpack_managed_tensor"
    spies = {name: mock.Mock(wraps=getattr(exchange._jax, name)) for name in names}
    monkeypatch.setattr(exchange, "_jax", types.SimpleNamespace(**spies))
    spies["share"] = mock.Mock(wraps=exchange.share)  # all tensors of a program: on a GPU each time costs an event
    monkeypatch.setattr(exchange, "share", spies["share"])

    def counts():
        found = tuple(spy.call_count for spy in spies.values())
        for spy in spies.values():
            spy.reset_mock()
        return found

    return counts


@pytest.mark.parametrize(("mode", "found", "read"), [("in_forward", 3, 2), ("recompute", 1, 3)])
def test_a_pass_exchanges_what_autograd_sees_and_no_numbers_by_row(head, exchanged, mode, found, read):
    """The loss, and two sums of in_forward; what a backward reads of these and of the inputs, and the gradients."""
    without_gradients(linear_cross_entropy, head)
    assert exchanged() == (3, 1, 1)
    loss = linear_cross_entropy(*head, backward=mode)
    assert exchanged() == (3, found, 1)
    loss.backward(retain_graph=True)
    assert exchanged() == (read + 1, 2, 1)


def test_the_last_backward_in_forward_exchanges_nothing_and_copies_nothing(head, exchanged):
    loss = linear_cross_entropy(*head, backward="in_forward")
    exchanged()
    seen = operations_of_torch(loss.backward)
    assert exchanged() == (0, 0, 0)
    assert seen <= {"aten::ones_like", "aten::empty_like", "aten::empty_strided", "aten::fill_", "aten::detach",
                    "aten::item", "aten::_local_scalar_dense"}  # fmt: skip
    assert head[0].grad is not None


def operations_of_torch(call):
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], acc_events=True) as profiled:
        call()
    return {event.name for event in profiled.events() if event.name.startswith("aten::")}


@pytest.mark.parametrize(("rows", "beside"), [(ROWS, set()), (9, {"aten::constant_pad_nd"})])
def test_rows_are_padded_where_they_do_not_fill_their_bucket_and_neither_copied_nor_converted(head, rows, beside):
    hidden, weight, target = head
    call = functools.partial(without_gradients, linear_cross_entropy, (hidden[:rows], weight, target[:rows]))
    call()
    seen = operations_of_torch(call)
    assert seen & {"aten::constant_pad_nd", "aten::clone", "aten::_to_copy", "aten::clamp"} == beside
    assert beside or seen <= {"aten::detach", "aten::view", "aten::slice", "aten::as_strided"}


def test_a_program_is_found_again_without_describing_the_call_anew(head, monkeypatch):
    linear_cross_entropy(*head)
    monkeypatch.setattr(ops.Operation, "signature", lambda *_: pytest.fail("the call is described again"))
    linear_cross_entropy(*head).backward()


@pytest.mark.parametrize("name", problems.LINEAR)
def test_a_call_of_a_signature_that_was_seen_is_not_checked(head, name, monkeypatch):
    problems.LINEAR[name](*head)
    monkeypatch.setattr(checks, "head", lambda *_, **__: pytest.fail("the call is checked again"))
    problems.LINEAR[name](*head)
    with pytest.raises(pytest.fail.Exception, match="checked again"):
        problems.LINEAR[name](head[0][:5], head[1], head[2][:5])


@pytest.mark.parametrize(
    ("seen", "refused", "error"),
    [
        ({"shift": 0}, {"shift": False}, ValueError),
        ({"vocab_size": 1}, {"vocab_size": True}, ValueError),
        ({"ignore_index": 1}, {"ignore_index": True}, TypeError),
        ({"scratch_bytes": 2**20}, {"scratch_bytes": 2.0**20}, ValueError),
        ({"linear_weight": torch.zeros(1).expand(VOCABULARY, WIDTH)},
         {"linear_weight": torch.zeros(VOCABULARY, WIDTH).to_sparse()}, TypeError),
    ],
)  # fmt: skip
def test_a_call_is_checked_though_it_equals_one_that_was_seen(head, seen, refused, error):
    given = dict(zip(("input", "linear_weight", "target"), head, strict=True))
    linear_cross_entropy(**given | seen)
    with pytest.raises(error):
        linear_cross_entropy(**given | refused)


def test_an_argument_that_may_change_is_read_by_each_call(head):
    once = iter(["lse"])
    linear_row_statistics(*head, statistics=once)
    with pytest.raises(ValueError, match="statistics is empty"):
        linear_row_statistics(*head, statistics=once)


def test_no_signature_keeps_a_tensor(head):
    class Target(torch.Tensor):
        __torch_function__ = torch._C._disabled_torch_function_impl  # its products are plain tensors

    hidden, weight, target = head
    target = target.reshape(2, -1).as_subclass(Target)
    linear_cross_entropy(hidden.reshape(2, -1, WIDTH), weight, target)
    gone = weakref.ref(target)
    del target
    gc.collect()
    assert gone() is None


def test_what_pytorch_is_set_to_is_part_of_the_signature(head):
    smoothed = functools.partial(linear_cross_entropy, *head, label_smoothing=0.1)
    with torch.inference_mode():
        without = smoothed()
    loss = smoothed()
    loss.backward()
    assert loss == without
    with torch.autocast("cpu", torch.bfloat16):
        assert smoothed() != loss
    assert smoothed() == loss
