"""The kernel by Triton's interpreter, as the lowering of JAX's operation for the CPU; for processes of their own.

Whether a kernel is interpreted is decided when it is imported, by TRITON_INTERPRET=1. Triton 3.6's interpreter needs
help: it makes Python's numbers of arrays `[1]`, which NumPy refuses from 2.4 on, and it multiplies bfloat16 as if
it were integers, so that operands here have 16 bits as float16 only. It has no additions by tensor descriptors, and
reduces by a rule of ours one number at a time.
"""

import inspect
import threading
from typing import Any

import jax
import numpy as np
import pytest
import torch
from jax.interpreters import mlir
from triton.runtime import interpreter

from pallas_ce.backends import device
from pallas_ce.backends.triton import binding, configs
from pallas_ce.backends.triton.configs import Choice, Config

SMALL = Config(16, 32, 16)
FLATTENED = SMALL._replace(descriptors=True)

# XLA runs launches that need not wait for each other at once, and the interpreter changes Triton while it runs one.
_ONE_AT_A_TIME = threading.Lock()


def install(patch: pytest.MonkeyPatch, config: Config, programs: int = 3) -> None:
    """Has calls with implementation="triton" interpreted, with these tiles."""
    patched = interpreter._patch_lang_tensor

    def with_numbers(tensor: Any, scope: Any) -> None:
        patched(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    reduce = interpreter.ReduceOps.apply_impl

    def reduced(self: Any, values: Any) -> Any:
        ours = getattr(self.combine_fn, "__name__", None) == "larger"
        return self.min_max(values[0], val_reduce_op=np.max) if ours else reduce(self, values)

    patch.setattr(interpreter.ReduceOps, "apply_impl", reduced)
    patch.setattr(interpreter, "_patch_lang_tensor", with_numbers)
    patch.setattr(interpreter.InterpreterBuilder, "create_descriptor_reduce", _added, raising=False)
    patch.setattr(binding, "capability", lambda: 90)
    patch.setattr(device, "interpreted", lambda: True)
    patch.setattr(device, "refusal", lambda backend: None)
    choices = Choice(config), Choice(config._replace(descriptors=False), aligned=False)
    patch.setattr(configs, "NARROW", {90: choices})
    patch.setattr(configs, "_EXACT", choices)
    patch.setattr(configs, "PRODUCTS", {90: config} if config.descriptors else {})
    patch.setattr(device, "multiprocessors", lambda: programs)
    mlir.register_lowering(binding._call_p, mlir.lower_fun(_called_back, multiple_results=True), platform="cpu")


def _added(builder: Any, kind: Any, descriptor: Any, value: Any, indices: Any) -> Any:
    """What `atomic_add` of a descriptor does."""
    assert kind.name == "ADD"
    load = builder.create_descriptor_load
    of_caches = [None] * (len(inspect.signature(load).parameters) - 2)  # two policies until Triton 3.9, which has one
    before = load(descriptor, indices, *of_caches)
    return builder.create_descriptor_store(
        descriptor, interpreter.TensorHandle(before.data + value.data, value.dtype), indices
    )


def _called_back(*operands: Any, kernel: binding.Kernel, results: Any) -> Any:
    def run(*operands: Any) -> Any:
        return _run(kernel, results, [np.asarray(x) for x in operands])

    return jax.pure_callback(run, list(results), *operands)


def _run(call: binding.Kernel, results: Any, operands: list[np.ndarray]) -> list[np.ndarray]:
    """What a launch leaves; what it does not write is made to stand out."""
    inputs = [torch.from_numpy(np.array(x)) for x in operands]
    outputs = [torch.from_numpy(np.full(x.shape, 77, x.dtype)) for x in results]
    names = [name for name, _ in call.inputs + call.outputs]
    if binding.BEFORE in names:
        outputs[names.index(binding.STORED) - len(inputs)] = inputs[names.index(binding.BEFORE)]
    given = dict(zip(names, inputs + outputs, strict=False)) | dict(call.constants)
    function = binding._function(call.function)
    with _ONE_AT_A_TIME, np.errstate(all="ignore"):  # unselected terms may be inf·0
        function[(call.programs,)](**{name: given.get(name) for name in function.arg_names})
    return [x.numpy() for x in outputs]
