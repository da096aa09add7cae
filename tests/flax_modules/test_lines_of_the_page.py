"""The lines that `docs/coming_from.md` gives for other packages' trainers, run beside these packages' own losses.

`make test-nightly` has Keras Hub and tokamax, and `make test-levanter` Levanter, each with eight devices.
"""

import contextlib
import inspect
import re
import textwrap
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_ce
from tests.flax_modules.oracle import assert_same

PAGE = Path(__file__).parents[2] / "docs" / "coming_from.md"
VOCAB, FEATURES, ROWS, LENGTH = 96, 16, 8, 12
AXES = ("fsdp", "tp")
TOKENS = np.random.default_rng(0).integers(1, VOCAB, (ROWS, LENGTH)).astype(np.int32)
WEIGHTS = np.random.default_rng(1).integers(0, 3, (ROWS, LENGTH)).astype(np.float32)


def text(section):
    """The section."""
    return PAGE.read_text().split(f"\n### {section}\n")[1].split("\n### ")[0]


def lines(section):
    """The first indented block of the section."""
    return textwrap.dedent(re.search(r"\n((?:\n|    .*\n)+)", text(section))[1])


def python(section):
    """The first Python block of the section."""
    return text(section).split("```python\n")[1].split("```")[0]


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore")  # the package's own
def test_tokamax():
    tokamax, rng = pytest.importorskip("tokamax"), np.random.default_rng(2)
    sizes = (ROWS, LENGTH, FEATURES), (FEATURES, VOCAB)

    def found(code):
        def loss(hidden, weights):
            ours = {"jax_hidden": hidden, "jax_weight": weights.T, "jax_labels": TOKENS, "pallas_ce": pallas_ce}
            theirs = {"x": hidden.reshape(-1, FEATURES), "labels": TOKENS.ravel(), "weights": weights}
            exec(code, names := {**ours, **theirs, "tokamax": tokamax})
            return names["loss"]

        return jax.value_and_grad(loss, (0, 1))(*given)

    given = [jnp.float32(rng.normal(size=size)) for size in sizes]
    assert_same(found(python("tokamax")), found(lines("tokamax")))


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore")  # the package's own
@pytest.mark.parametrize("weights", [None, WEIGHTS], ids=["all", "weighted"])
def test_keras(monkeypatch, shape, weights):
    """Loss and gradients of one step of Keras's own trainer: SGD at rate 1 takes the gradients off."""
    monkeypatch.setenv("KERAS_BACKEND", "jax")
    keras_hub = pytest.importorskip("keras_hub")
    import keras

    context = contextlib.nullcontext()
    if shape:
        devices = keras.distribution.DeviceMesh(shape, AXES, np.array(keras.distribution.list_devices()))
        layouts = keras.distribution.LayoutMap(devices)
        layouts["token_embedding/embeddings"] = ("tp", "fsdp")
        context = keras.distribution.ModelParallel(layout_map=layouts, batch_dim_name="fsdp").scope()
    sizes = {"num_layers": 1, "num_heads": 2, "hidden_dim": FEATURES, "intermediate_dim": 32, "dropout": 0.0}

    def step(kind):
        keras.utils.set_random_seed(0)
        backbone = keras_hub.models.GPT2Backbone(VOCAB, max_sequence_length=LENGTH, **sizes)
        model = kind(backbone=backbone, preprocessor=None)
        model.compile(keras.optimizers.SGD(1.0), weighted_metrics=None)
        before = model.get_weights()
        inputs = {"token_ids": TOKENS, "padding_mask": np.ones_like(TOKENS)}
        loss = model.train_on_batch(inputs, np.roll(TOKENS, -1, axis=1), weights)
        return loss, [old - new for old, new in zip(before, model.get_weights(), strict=True)]

    with context:
        exec(lines("Keras"), names := {"keras_hub": keras_hub, "pallas_ce": pallas_ce})
        assert_same(step(names["Fused"]), step(keras_hub.models.GPT2CausalLM))


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore")  # the package's own
@pytest.mark.parametrize("options", [
    {}, {"logit_soft_cap": 0.05, "logsumexp_weight": 0.01}, {"reduction": None},
    {"reduction": "sum", "reduction_axis": "position"}, {"loss_dtype": jnp.bfloat16},
], ids=lambda options: ", ".join(options) or "defaults")  # fmt: skip
def test_levanter(shape, options):
    hax = pytest.importorskip("haliax")
    import equinox as eqx
    from levanter.models import gpt2, lm_model, loss

    theirs = lm_model.LmHeadModel.compute_next_token_loss
    signature = re.search(r"def (compute_next_token_loss\(.*?\)) ->", inspect.getsource(theirs), re.DOTALL)[1]
    body = textwrap.indent(lines("Levanter"), "    ")
    names = {**vars(lm_model), "pallas_ce": pallas_ce, "next_token_loss_weight": loss.next_token_loss_weight}
    exec(f"def {signature}:\n{body}", names)
    if options.get("reduction"):
        options = {**options, "reduction": hax.sum}
    config = gpt2.Gpt2Config(LENGTH, FEATURES, num_layers=1, num_heads=2, gradient_checkpointing=False)
    model = config.build(hax.Axis("vocab", VOCAB), key=jax.random.key(0))
    axes = hax.Axis("batch", ROWS), hax.Axis("position", LENGTH)
    example = lm_model.LmExample(hax.named(jnp.asarray(TOKENS), axes), hax.named(jnp.asarray(WEIGHTS), axes))

    def found(function):
        def scalar(model):
            value = function(model, example, **options)
            return jnp.mean(value.array * jnp.linspace(0.5, 1.5, value.array.size).reshape(value.array.shape)), value

        (_, value), gradient = hax.named_jit(eqx.filter_value_and_grad(scalar, has_aux=True))(model)
        return value, gradient

    mesh = jax.make_mesh(shape or (1, 1), AXES, axis_types=(jax.sharding.AxisType.Auto,) * 2)
    with hax.partitioning.set_mesh(mesh), hax.axis_mapping({"batch": "fsdp"}):
        model, example = hax.shard(model, {"vocab": "tp", "embed": "fsdp"}), hax.shard(example)
        assert_same(found(names["compute_next_token_loss"]), found(theirs))


@pytest.mark.parametrize("weights", [None, WEIGHTS], ids=["all", "weighted"])
@pytest.mark.parametrize("alpha", [0.0, 0.1])
def test_lm1b(alpha, weights):
    """By the definition: a divergence from 1 − α for the label's class and α/(V − 1) for each other."""
    exec(python("Flax's lm1b example"), ours := {"jnp": jnp, "pallas_ce": pallas_ce})
    rng = np.random.default_rng(2)
    head = {"kernel": rng.normal(size=(FEATURES, VOCAB)), "bias": rng.normal(size=VOCAB)}
    hidden, head = jax.tree.map(jnp.float32, (rng.normal(size=(ROWS, LENGTH, FEATURES)), head))
    each = np.ones_like(WEIGHTS) if weights is None else weights

    def by_definition(hidden, head):
        logits = hidden @ head["kernel"] + head["bias"]
        targets = jnp.where(jax.nn.one_hot(TOKENS, VOCAB) > 0, 1 - alpha, alpha / (VOCAB - 1))
        losses = jnp.sum(jax.scipy.special.kl_div(targets, jax.nn.softmax(logits)), axis=-1)
        return jnp.sum(losses * each) / each.sum(), jnp.sum((jnp.argmax(logits, axis=-1) == TOKENS) * each)

    def by_page(hidden, head):
        loss, count = ours["compute_weighted_cross_entropy"]((hidden, head), TOKENS, weights, alpha)
        hits, same = ours["compute_weighted_accuracy"]((hidden, head), TOKENS, weights)
        assert count == same == each.sum()
        return loss / count, hits

    want, got = (jax.value_and_grad(f, argnums=(0, 1), has_aux=True)(hidden, head) for f in (by_definition, by_page))
    assert_same(got, want)
