"""What tests of the bridge share: random heads, the library's drawn problems as tensors, and what a call computes."""

import contextlib
import functools
import re
from unittest import mock

import jax
import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from pallas_ce import LowRank
from tests.pallas_ce.oracle import LOW_RANK_SCALE
from torch_bridge import (
    LinearCrossEntropyLoss,
    cross_entropy,
    linear_cross_entropy,
    linear_log_probs,
    linear_row_statistics,
    selective_log_softmax,
    vocab_parallel_cross_entropy,
)
from torch_bridge.api.prepared import _known
from torch_bridge.autograd import NAMESPACE
from torch_bridge.materialized import kernels
from torch_bridge.programs.program import program as program_of

MODES = ["in_forward", "recompute"]


def _module(hidden, weight, target, **options):
    return LinearCrossEntropyLoss(*reversed(weight.shape), **options)(hidden, target)


def _part(hidden, weight, target, **options):
    return vocab_parallel_cross_entropy(hidden, weight, target, vocab_start=0, vocab_size=len(weight), **options)


# Example calls of every function, `(hidden, weight, target, **options) -> number`: of a head,
LINEAR = {
    "in_forward": functools.partial(linear_cross_entropy, backward="in_forward"),
    "recompute": functools.partial(linear_cross_entropy, backward="recompute"),
    "log_probs": lambda *head, **options: linear_log_probs(*head, **options).sum(),
    "row_statistics": lambda *head, **options: linear_row_statistics(*head, **options).lse.sum(),
}
# of a head that is a module's or split over processes,
HEADS = LINEAR | {"module": _module, "vocab_parallel": _part}
# and of stored logits.
STORED = {
    "cross_entropy": lambda hidden, weight, target, **options: cross_entropy(hidden @ weight.T, target, **options),
    "selective": lambda hidden, weight, target: selective_log_softmax(hidden @ weight.T, target).sum(),
}

NAMES = {"hidden": "input", "weight": "linear_weight", "bias": "linear_bias"}
# Arguments with an axis of the vocabulary, and those that are differentiated nowhere.
BY_ENTRY = ("linear_weight", "linear_bias", "up", "teacher_weight", "teacher_bias")
CONSTANTS = ("temperature", "teacher_input", "teacher_weight", "teacher_bias", "teacher_logit_scale")


def head(tokens=20, width=8, vocabulary=50):
    """Hidden states and a weight that want gradients, and labels."""
    torch.manual_seed(tokens)
    hidden, weight = (torch.randn(rows, width, requires_grad=True) for rows in (tokens, vocabulary))
    return hidden, weight, torch.randint(0, vocabulary, (tokens,))


def value_and_gradients(function, hidden, weight, *others):
    """The value of a function, and its gradients by its first two arguments."""
    value = function(hidden, weight, *others)
    return value.detach(), *torch.autograd.grad(value, (hidden, weight))


def tensors(p, dtype):
    """The differentiable arrays of a problem of `tests.pallas_ce.problems`."""
    return {name: torch.tensor(x, dtype=dtype, requires_grad=True) for name, x in p.arrays.items()}


def bridged(function, p, arrays, **further):
    """The result of a function of the bridge."""
    given = {NAMES.get(name, name): x for name, x in arrays.items()}
    if p.vocab_axis == 1:  # a transposed view of contiguous memory
        given["linear_weight"] = given["linear_weight"].t().contiguous().t()
    if "up" in given:
        given["linear_weight"] = LowRank(given["linear_weight"], given.pop("up"), given.pop("down"), LOW_RANK_SCALE)
    dtype = arrays["hidden"].dtype
    options = {k: torch.tensor(x, dtype=dtype) if isinstance(x, np.ndarray) else x for k, x in p.options.items()}
    return function(target=torch.tensor(p.labels).long(), **given, **options, **further)


def made(sizes, seed, *names):
    """Random tensors of those names and sizes; scales, weights and temperatures are positive."""
    generator = torch.Generator().manual_seed(seed)
    drawn = {name: torch.randn(sizes[name], generator=generator) for name in sizes}
    positive = ("scale", "token_weights", "temperature")
    return {name: drawn[name].abs() + 0.5 if name.endswith(positive) else drawn[name] for name in names}


def stored_logits(given, options, side=""):
    """`[..., V]` by the bridge's arguments, of a student or, with `side="teacher_"`, of its teacher."""
    linear = side or "linear_"
    weight, cap = given[f"{linear}weight"], options.get(f"{side}logit_softcap")
    if "up" in given and not side:
        weight = weight + LOW_RANK_SCALE * given["up"] @ given["down"]
    z = (given[f"{side}input"] @ weight.T + given.get(f"{linear}bias", 0.0)) * given.get(f"{side}logit_scale", 1.0)
    z = z[..., : options.get("vocab_size")]
    z = z if cap is None else cap * torch.tanh(z / cap)
    temperature = given.get("temperature", options.get("temperature", 1.0))
    return z / (temperature[..., None] if isinstance(temperature, torch.Tensor) else temperature)


def stored_loss(given, options):
    """Cross entropy of stored logits, by the bridge's arguments; of `logits` themselves where they are given."""
    if "logits" in given:
        given = given | {"input": given["logits"], "linear_weight": torch.eye(given["logits"].shape[-1]).double()}
    z, options = stored_logits(given, options), given | options
    target, ignored, size = options["target"], options.get("ignore_index", -100), z.shape[-1]
    counts = (target >= 0) & (target < size) & (target != ignored)
    target, log_p = target.where(counts, 0), z.log_softmax(-1)
    smoothing, by_class = options.get("label_smoothing", 0.0), options.get("class_weights", torch.ones(size)).double()
    weights = options.get("token_weights", torch.ones(target.shape)).double().where(counts, 0.0)
    of_class, of_target = by_class[target], log_p.gather(-1, target[..., None])[..., 0]
    loss = weights * ((smoothing - 1) * of_class * of_target - smoothing * (by_class * log_p).mean(-1))
    z_part = weights * options.get("z_loss", 0.0) * z.logsumexp(-1) ** 2
    if options.get("reduction") == "none":
        return loss + z_part
    if "normalizer" in options or options.get("reduction") == "sum":
        return (loss + z_part).sum() / options.get("normalizer", 1.0)
    return loss.sum() / (weights * of_class).sum().clamp(min=1e-30) + z_part.sum() / weights.sum().clamp(min=1e-30)


def assert_exact(function, exact, whole, options, mine=slice(None), *, values=(2e-5, 2e-6), slopes=(2e-4, 2e-5)):
    """A function of a head's tensors has the value and gradients of `exact(tensors, options)` in float64.

    Given the rows `mine` of the vocabulary's tensors, it has the gradients of these. `values` and `slopes` are
    relative and absolute tolerances.
    """

    def rows(name, x):
        return x[mine] if name in BY_ENTRY else x

    wide = {name: x.double().requires_grad_(name not in CONSTANTS) for name, x in whole.items()}
    given = {name: rows(name, x).clone() for name, x in whole.items()}
    leaves = {name: x.requires_grad_() for name, x in given.items() if name not in CONSTANTS}
    if "up" in given:
        given["linear_weight"] = LowRank(given["linear_weight"], given.pop("up"), given.pop("down"), LOW_RANK_SCALE)
    found, want = function(**given, **options), exact(wide, options)
    upstream = torch.linspace(-1, 1.5, found.numel()).reshape(found.shape) if found.ndim else torch.tensor(-0.7)
    got = torch.autograd.grad(found, list(leaves.values()), upstream)
    needed = torch.autograd.grad(want, [wide[name] for name in leaves], upstream.double())
    torch.testing.assert_close(found.double(), want, rtol=values[0], atol=values[1])
    for name, x, y in zip(leaves, got, needed, strict=True):
        torch.testing.assert_close(x.double(), rows(name, y), rtol=slopes[0], atol=slopes[1], msg=f"{options} {name}")


@contextlib.contextmanager
def compilations():
    """A list with an entry for each program that JAX compiles."""
    compiled = []

    def listener(event, seconds, **_):
        if "backend_compile" in event:
            compiled.append(event)

    jax.monitoring.register_event_duration_secs_listener(listener)
    try:
        yield compiled
    finally:
        jax.monitoring.unregister_event_duration_listener(listener)


def products_of(call):
    """Shapes of the results of all products in the forward that a call compiles, and in its backwards."""
    _known.clear()
    program_of.cache_clear()
    call()
    (program,) = [known.program for known, _ in _known.values()]
    flat = program.structs()
    runs = [(program.forward, range(len(program.signature.arrays)))]
    runs += [(backward.run, backward.reads) for backward in program._backwards.values()]
    found = []
    for run, reads in runs:
        lines = [x for x in run.lower(*(flat[i] for i in reads)).as_text().splitlines() if "dot_general" in x]
        found.append([tuple(map(int, re.findall(r"(\d+)x", line.rpartition("tensor<")[2]))) for line in lines])
    return found


def as_on_a_gpu(chosen=True):
    """Stored logits are served as a GPU's kernels do, by XLA, where that is chosen."""

    def serving(logits, spec):
        by_row = logits.stride(-1) == 1 and logits.ndim > 1 and logits.stride(-2) == spec.weight_rows
        return kernels.Kernels(spec, "xla") if by_row and logits.dtype != torch.float64 else None

    return mock.patch.object(kernels, "serving", serving) if chosen else contextlib.nullcontext()


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
