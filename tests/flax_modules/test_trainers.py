"""Trainers of other packages: their own losses beside ours, on one device and on a mesh of eight.

`make test-nightly` has the packages, in an environment of their own, and eight devices.
"""

import contextlib
import functools
import importlib.metadata
import sys
import types
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from flax_modules.integrations import maxtext, tunix
from tests.flax_modules.oracle import assert_same

pytestmark = [pytest.mark.nightly, pytest.mark.filterwarnings("ignore")]  # the packages' own warnings

VOCAB, FEATURES, ROWS, LENGTH = 96, 16, 8, 12


@pytest.fixture
def mesh(shape):
    """The mesh, or None."""
    return shape and jax.make_mesh(shape, ("fsdp", "tp"), axis_types=(jax.sharding.AxisType.Auto,) * 2)


# gemma2 and gemma4 cap the logits; gemma4 and Qwens cast to a dtype of their own; Qwens take rows packed of several
# sequences.
MODELS = {
    "llama3": ("llama3", "Llama3", {}),
    "llama3 tied": ("llama3", "Llama3", {"weight_tying": True}),
    "gemma2": ("gemma", "Gemma", {"use_post_attn_norm": True, "use_post_ffw_norm": True}),
    "gemma3": ("gemma3", "Gemma3", {"param_dtype": jnp.float32, "sliding_window_size": 8}),
    "gemma4": ("gemma4", "Gemma4", {"sliding_window_size": 8}),
    "qwen2": ("qwen2", "Qwen2", {}),
    "qwen2 tied": ("qwen2", "Qwen2", {"use_tied_embedding": True}),
    "qwen3": ("qwen3", "Qwen3", {}),
    "qwen3 tied": ("qwen3", "Qwen3", {"use_tied_embedding": True}),
}


def model_of(name, features=FEATURES, seed=0):
    """A model of Tunix."""
    family, kind, options = MODELS[name]
    package = pytest.importorskip(f"tunix.models.{family}.model")
    sizes = {"num_layers": 1, "embed_dim": features, "hidden_dim": 32, "head_dim": 8}
    options = {**sizes, "num_heads": 4, "num_kv_heads": 4, **options}
    if "gemma" in family:
        options |= {"num_embed": VOCAB} | ({} if family == "gemma3" else {"final_logit_softcap": 2.0})
    else:
        options |= {"vocab_size": VOCAB, "rope_theta": 10000, "norm_eps": 1e-5}
    if family == "gemma":
        options["attention_types"] = [package.AttentionType.GLOBAL]
    made = getattr(package, kind)(package.ModelConfig(**options), rngs=nnx.Rngs(seed))
    if family == "qwen2":
        made.embedder.input_embedding[...] *= 0.05  # of deviation 1
    return made


def on(mesh, *models):
    """The models as Tunix lays them out on a mesh."""
    for model in models if mesh else ():
        state = nnx.state(model)
        with mesh:
            nnx.update(model, jax.lax.with_sharding_constraint(state, nnx.get_partition_spec(state)))
    return models[0]


def batch(mesh, inputs):
    """The inputs, laid out by rows."""
    place = functools.partial(jax.device_put, device=mesh and jax.NamedSharding(mesh, jax.P("fsdp")))
    return jax.tree.map(lambda x: place(jnp.asarray(x)), inputs)


def inputs():
    """What Tunix gives a model and its loss."""
    from tunix.sft import utils

    tokens = np.random.default_rng(0).integers(1, VOCAB, (ROWS, LENGTH)).astype(np.int32)
    mask = jnp.arange(LENGTH) < np.random.default_rng(1).integers(6, LENGTH + 1, (ROWS, 1))
    of_attention = {
        "positions": utils.build_positions_from_mask(mask),
        "attention_mask": utils.make_causal_attn_mask(mask),
    }
    return {"input_tokens": tokens, "input_mask": mask, **of_attention}


def found(mesh, model, loss, *arguments, has_aux=False, of=nnx.Param, **named):
    """Loss, metrics and gradients."""
    gradients = nnx.value_and_grad(loss, argnums=nnx.DiffState(0, of), has_aux=has_aux)
    with mesh or contextlib.nullcontext():
        return nnx.jit(lambda model: gradients(model, *arguments, **named))(model)


@pytest.mark.parametrize("name", MODELS)
def test_tunix_sft(mesh, name):
    peft_trainer = pytest.importorskip("tunix.sft.peft_trainer")
    model, arguments = on(mesh, model_of(name)), batch(mesh, inputs())
    theirs = found(mesh, model, peft_trainer._default_loss_fn, **arguments)
    assert_same(found(mesh, model, tunix.sft_loss(), **arguments), theirs)


def test_an_adapter_of_tunixs_head(mesh):
    peft_trainer, qwix = pytest.importorskip("tunix.sft.peft_trainer"), pytest.importorskip("qwix")
    model = model_of("llama3")
    provider = qwix.LoraProvider(module_path=".*lm_head", rank=4, alpha=8.0)
    model = qwix.apply_lora_to_model(model, provider, rngs=nnx.Rngs(1), **model.get_model_input())
    model.lm_head.w_lora_b[...] = jax.random.normal(jax.random.key(0), (4, VOCAB))
    arguments = {"of": nnx.LoRAParam, **batch(mesh, inputs())}
    theirs = found(mesh, on(mesh, model), peft_trainer._default_loss_fn, **arguments)
    assert_same(found(mesh, model, tunix.sft_loss(lora_scale=2.0), **arguments), theirs)


@pytest.fixture
def compare(monkeypatch):
    """Compares what a call finds before and after Tunix uses our log-probabilities."""
    common, algo_core = pytest.importorskip("tunix.rl.common"), pytest.importorskip("tunix.rl.algo_core")
    ours = mock.Mock(wraps=tunix.linear_log_probs)
    monkeypatch.setattr(tunix, "linear_log_probs", ours)
    for module, name in (
        (common, "get_per_token_logps"),
        (common, "compute_per_token_logps"),
        (algo_core, "compute_entropy_from_logits"),
    ):
        monkeypatch.setattr(module, name, getattr(module, name))  # to be put back

    def before_and_after(call):
        theirs = call()
        assert not ours.called
        jax.clear_caches()
        tunix.patch_log_probs()
        assert_same(call(), theirs)
        assert ours.called

    yield before_and_after
    jax.clear_caches()


@pytest.mark.parametrize(("algorithm", "name"), [("dpo", "llama3"), ("dpo", "llama3 tied"), ("orpo", "gemma2")])
def test_tunix_dpo(mesh, compare, algorithm, name):
    dpo_trainer = pytest.importorskip("tunix.sft.dpo.dpo_trainer")
    given, count = inputs(), LENGTH // 2
    ids, mask = given.pop("input_tokens"), given.pop("input_mask")
    refs = {"ref_chosen_logps": -30 * np.ones(ROWS // 2), "ref_rejected_logps": -31 * np.ones(ROWS // 2)}
    arrays = batch(mesh, {"input_ids": ids, "completion_mask": mask[:, -count:], **given, **refs})
    model, example = on(mesh, model_of(name)), dpo_trainer.TrainExample(**arrays, logits_to_keep=count)
    loss = dpo_trainer.dpo_loss_fn
    compare(functools.partial(found, mesh, model, loss, example, algorithm=algorithm, has_aux=True))


@pytest.mark.parametrize(
    ("policy", "name"),
    [("grpo", "gemma2"), ("grpo", "qwen2 packed"), ("gspo-token", "qwen2 tied"), ("ppo", "llama3"), ("ppo", "gemma2")],
)
def test_tunix_policy_losses(mesh, compare, policy, name):
    algo_core, common = pytest.importorskip("tunix.rl.algo_core"), pytest.importorskip("tunix.rl.common")
    packed, count, rng, more = name.endswith("packed"), LENGTH // 2, np.random.default_rng(2), {}
    model, ids = on(mesh, model_of(name.removesuffix(" packed"))), inputs()["input_tokens"]
    if packed:
        count, segments = LENGTH, np.tile([1] * (LENGTH // 2) + [2] * (LENGTH // 2), (ROWS, 1))
        more = {"segment_ids": segments, "segment_positions": np.tile(np.arange(LENGTH) % (LENGTH // 2), (ROWS, 1))}
    else:
        ids[::2, -2:] = 0  # padding
    example = {
        "prompt_ids": ids[:, :-count],
        "completion_ids": ids[:, -count:],
        "prompt_mask": ids[:, :-count] != 0,
        "completion_mask": (ids[:, -count:] != 0) & (np.arange(count) > 0),
        "advantages": rng.normal(size=(ROWS, count) if packed or policy == "ppo" else ROWS),
        "ref_per_token_logps": rng.normal(-4.5, 0.3, (ROWS, count)),
        "old_per_token_logps": rng.normal(-4.5, 0.3, (ROWS, count)),
    }
    config = types.SimpleNamespace(
        beta=0.04, kl_loss_mode="low_var_kl", kl_clamp_value=None, epsilon=0.2, loss_algo=policy, temperature=0.7,
        loss_agg_mode="token-mean", epsilon_low=0.2, epsilon_high=0.3, entropy_coef=0.1, kl_coef=0.1,
    )  # fmt: skip
    loss = algo_core.ppo_policy_loss_fn if policy == "ppo" else algo_core.grpo_loss_fn
    example = common.TrainExample(**batch(mesh, {**example, **more}))
    compare(functools.partial(found, mesh, model, loss, example, config, pad_id=0, eos_id=1, has_aux=True))


@pytest.mark.parametrize("name", ["llama3", "gemma2"])
def test_tunix_distillation(mesh, name, monkeypatch):
    strategies = pytest.importorskip("tunix.distillation.strategies")
    divergence = mock.Mock(wraps=tunix.linear_distillation)
    monkeypatch.setattr(tunix, "linear_distillation", divergence)
    given = batch(mesh, inputs())
    student, teacher = on(mesh, model_of(name)), on(mesh, model_of("llama3", 2 * FEATURES, 1))

    def forward(model, input_tokens, input_mask, positions, attention_mask):
        return model(input_tokens, positions, None, attention_mask)[0][:, :-1]

    def labels(input_tokens, input_mask, **_):
        return jnp.where(input_mask, input_tokens, -100)[:, 1:]

    results = []
    for make, labels_fn in (
        (functools.partial(tunix.logit_strategy, implementation="xla"), labels),
        (strategies.LogitStrategy, lambda **x: jax.nn.one_hot(labels(**x), VOCAB)),
    ):
        strategy = make(forward, forward, labels_fn, temperature=2.0, alpha=0.3)
        with mesh or contextlib.nullcontext():
            output = strategy.get_teacher_outputs(teacher, given)
            evaluated = nnx.jit(strategy.get_eval_loss)(student, given)
        loss = functools.partial(strategy.get_train_loss, teacher_output=output, inputs=given)
        results.append((*found(mesh, student, loss, has_aux=True), evaluated))
    assert_same(*results)
    assert divergence.call_args.kwargs["implementation"] == "xla"


def rows(count):
    """Batches as Tunix's trainer takes them."""
    peft_trainer = pytest.importorskip("tunix.sft.peft_trainer")
    given = inputs()
    return [peft_trainer.TrainingInput((given["input_tokens"] + i) % VOCAB, given["input_mask"]) for i in range(count)]


def test_tunixs_trainers_train(mesh):
    """By the hooks, with the caches of their own."""
    optax, peft_trainer = pytest.importorskip("optax"), pytest.importorskip("tunix.sft.peft_trainer")
    distillation = pytest.importorskip("tunix.distillation")
    config = peft_trainer.TrainingConfig(eval_every_n_steps=1, max_steps=3, gradient_accumulation_steps=2)

    def of_model(x):
        return {**inputs(), "input_tokens": x.input_tokens}

    def forward(model, input_tokens, input_mask, positions, attention_mask):
        return model(input_tokens, positions, None, attention_mask)[0]

    def trained(ours, distilled):
        model = on(mesh, model_of("llama3"))
        if distilled:
            make = tunix.logit_strategy if ours else distillation.strategies.LogitStrategy
            labels = (lambda x: x) if ours else functools.partial(jax.nn.one_hot, num_classes=VOCAB)
            strategy = make(forward, forward, lambda **x: labels(x["input_tokens"]))
            kind = distillation.distillation_trainer.DistillationTrainer
            trainer = kind(model, on(mesh, model_of("llama3", seed=1)), strategy, optax.sgd(0.1), config)
        else:
            trainer = peft_trainer.PeftTrainer(model, optax.sgd(0.1), config)
            if ours:
                trainer = trainer.with_loss_fn(tunix.sft_loss())
        with mesh or contextlib.nullcontext():
            trainer.with_gen_model_input_fn(of_model).train(rows(6), rows(1))
        return 0.0, nnx.state(model)

    for distilled in (False, True):
        assert_same(trained(True, distilled), trained(False, distilled))


def test_a_model_that_tunix_does_not_make_is_refused():
    pytest.importorskip("tunix")
    loss, given = tunix.sft_loss(), {**inputs()}
    with pytest.raises(TypeError, match="model is a Linear, with no lm_head and no embedder that decodes"):
        loss(nnx.Linear(2, 3, rngs=nnx.Rngs(0)), **given)
    model = model_of("llama3 tied")
    model.embedder.input_embedding_lora_a = nnx.LoRAParam(jnp.ones((2, 2)))
    with pytest.raises(TypeError, match="the embedder of this Llama3 has an adapter"):
        loss(model, **given)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("shard_mode", ["auto", "explicit"])
def test_maxtext(mesh, monkeypatch, tied, shard_mode):
    package = pytest.importorskip("maxtext")
    from flax.core.spmd import logical_axis_rules
    from maxtext.configs import pyconfig
    from maxtext.trainers.pre_train import train
    from maxtext.utils import maxtext_utils, maxtext_utils_nnx, model_creation_utils

    rng, shape = np.random.default_rng(0), (ROWS, LENGTH)
    layout = {"ici_fsdp_parallelism": 4, "ici_tensor_parallelism": 2} if mesh else {}
    config = pyconfig.initialize(
        ["test", f"{package.__path__[0]}/configs/base.yml"], run_name="test", enable_checkpointing=False,
        dataset_type="synthetic", skip_jax_distributed_system=True, base_emb_dim=FEATURES, base_num_query_heads=2,
        base_num_kv_heads=2, head_dim=8, base_mlp_dim=32, base_num_decoder_layers=1, vocab_size=VOCAB,
        max_target_length=LENGTH, dtype="float32", weight_dtype="float32", matmul_precision="highest",
        num_vocab_tiling=2, attention="dot_product", logits_via_embedding=tied, z_loss_multiplier=0.01 * tied,
        shard_mode=shard_mode, per_device_batch_size=ROWS // jax.device_count(), **layout,
    )  # fmt: skip
    devices = maxtext_utils.get_mesh_from_config(config, None if mesh else jax.devices()[:1])
    data = {f"{name}_segmentation": jnp.ones(shape, jnp.int32) for name in ("inputs", "targets")}
    data |= {name: jnp.asarray(rng.integers(0, VOCAB, shape), jnp.int32) for name in ("inputs", "targets")}
    data |= {"inputs_position": jnp.broadcast_to(jnp.arange(LENGTH), shape)}
    data["targets_segmentation"] = data["targets_segmentation"].at[:, 9:].set(0)
    with logical_axis_rules(config.logical_axis_rules), jax.set_mesh(devices):
        create, abstract = model_creation_utils.create_nnx_abstract_model(config, devices)
        model = maxtext_utils_nnx.create_nnx_sharded_model(abstract, create, devices)

        def call():
            def loss(model):
                value, more = train.loss_fn(model, config, dict(data), None, None)
                return value, {name: more[name] for name in ("xent_sum", "z_loss", "total_weights")}

            return found(None, model, loss, has_aux=True)

        theirs = call()
        monkeypatch.setattr(train, "vocab_tiling_nnx_loss", None)  # to be put back
        options = {"precision": "highest"} if mesh else {}
        maxtext.patch_vocab_tiling(**options)
        own = maxtext.LossHead.__call__
        with mock.patch.object(maxtext.LossHead, "__call__", autospec=True, side_effect=own) as called:
            ours = call()
    # Every precision is full float32 on a CPU.
    of_model = None if tied else jax.lax.Precision.HIGHEST
    assert called.call_args.args[0].precision == options.get("precision", of_model)
    if tied:  # both round what the head gives the table's gradient to bfloat16
        got, want = (x[1]["token_embedder"].pop("embedding")[...] for x in (ours, theirs))
        np.testing.assert_allclose(got, want, atol=np.max(abs(want)) / 2**8)
    assert_same(ours, theirs)


@pytest.mark.parametrize("call", [tunix.sft_loss, tunix.patch_log_probs, maxtext.patch_vocab_tiling])
def test_the_package_and_its_version_are_checked_first(monkeypatch, call):
    def version(name):
        if found is None:
            raise importlib.metadata.PackageNotFoundError(name)
        return found

    monkeypatch.setattr(importlib.metadata, "version", version)
    found = None
    with pytest.raises(ModuleNotFoundError, match=r"is not installed: pip install (google-tunix|maxtext)==0"):
        call()
    found = "9.9"
    monkeypatch.setitem(sys.modules, "tunix", None)
    monkeypatch.setitem(sys.modules, "maxtext", None)
    with (
        pytest.warns(UserWarning, match=r"(tunix|maxtext) 9\.9 was not tested with flax_modules; tested: 0"),
        contextlib.suppress(ModuleNotFoundError),
    ):
        call()
