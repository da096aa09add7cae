"""What a piece of PyTorch computes: calls of the bridge, and products that have a vocabulary's columns."""

import contextlib

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from torch_bridge.autograd import NAMESPACE

_PRODUCTS = {torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.bmm, torch.ops.aten.baddbmm}


class Products(TorchDispatchMode):
    """Counts while it is entered, and not paused.

    Attributes:
        bridged: names of the bridge's operators that were called.
        wide: shapes of the operands of products that have an axis of `vocabulary`.
    """

    def __init__(self, vocabulary):
        super().__init__()
        self.vocabulary, self.bridged, self.wide, self._paused = vocabulary, [], [], False

    @contextlib.contextmanager
    def paused(self):
        """For what needs logits: generation."""
        self._paused = True
        try:
            yield
        finally:
            self._paused = False

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if not self._paused:
            shapes = [tuple(x.shape) for x in args if isinstance(x, torch.Tensor)]
            if function.namespace == NAMESPACE:
                self.bridged.append(function.name().removeprefix(f"{NAMESPACE}::"))
            elif function.overloadpacket in _PRODUCTS and any(self.vocabulary in shape for shape in shapes):
                self.wide.append(shapes)
        return function(*args, **(kwargs or {}))
