"""Tiny Hugging Face models of every kind that is patched, randomly initialised, and a batch for them."""

import contextlib

import torch
import transformers as hf

from tests.torch_bridge.problems import Products

VOCABULARY = 99
SIZES = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}

# One of each kind first: the tests at every change take these.
MODELS = {
    "llama": lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**SIZES)),
    "gemma2": lambda: hf.Gemma2ForCausalLM(hf.Gemma2Config(**SIZES, head_dim=8, final_logit_softcapping=2.0)),
    "gpt2": lambda: hf.GPT2LMHeadModel(hf.GPT2Config(
        n_embd=16, n_layer=2, n_head=2, vocab_size=VOCABULARY, n_positions=64, bos_token_id=1, eos_token_id=2,
        embd_pdrop=0.0, attn_pdrop=0.0, resid_pdrop=0.0,
    )),
    # Not known by name: compared with their own forward.
    "granite": lambda: hf.GraniteForCausalLM(hf.GraniteConfig(**SIZES, logits_scaling=3.0)),
    "cohere": lambda: hf.CohereForCausalLM(hf.CohereConfig(**SIZES, logit_scale=0.5)),
    "olmo2": lambda: hf.Olmo2ForCausalLM(hf.Olmo2Config(**SIZES)),
    "phi": lambda: hf.PhiForCausalLM(hf.PhiConfig(**SIZES, embd_pdrop=0.0)),  # its head has a bias
    "gemma3": lambda: hf.Gemma3ForCausalLM(hf.Gemma3TextConfig(**SIZES, head_dim=8, final_logit_softcapping=2.0)),
    "qwen2": lambda: hf.Qwen2ForCausalLM(hf.Qwen2Config(**SIZES)),
    "qwen3": lambda: hf.Qwen3ForCausalLM(hf.Qwen3Config(**SIZES, head_dim=8)),
    "mistral": lambda: hf.MistralForCausalLM(hf.MistralConfig(**SIZES)),
    # Its base_model_prefix names no module.
    "llama4": lambda: hf.Llama4ForCausalLM(
        hf.Llama4TextConfig(**SIZES, head_dim=8, num_local_experts=2, intermediate_size_mlp=32)
    ),
}  # fmt: skip
# Mixtures, whose routers have losses of their own.
ROUTED = {
    "mixtral": lambda: hf.MixtralForCausalLM(hf.MixtralConfig(**SIZES, num_local_experts=2, output_router_logits=True)),
    "qwen3_moe": lambda: hf.Qwen3MoeForCausalLM(hf.Qwen3MoeConfig(
        **SIZES, head_dim=8, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, router_aux_loss_coef=0.1,
    )),
}  # fmt: skip


def make(name="llama", **options):
    """A model of that name, or a Llama with options in its configuration."""
    torch.manual_seed(0)
    return (hf.LlamaForCausalLM(hf.LlamaConfig(**SIZES | options)) if options else (MODELS | ROUTED)[name]()).train()


def batch():
    torch.manual_seed(1)
    tokens = torch.randint(3, VOCABULARY, (3, 9))
    labels = tokens.clone()
    labels[0, :4] = -100
    labels[2, 6:] = -100
    return {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "labels": labels}


def step(model, **further):
    """What a model returns for the batch, and the gradients of its parameters."""
    model.zero_grad()
    out = model(**batch() | further)
    out.loss.backward()
    return out, {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def relative(got, want):
    return float((got - want).norm() / want.norm().clamp(min=1e-6))


def check_step(model, want, *, watched=False, loss=1e-5, gradients=1e-5, **further):
    """A patched model's step is the one that is wanted, without logits; returns its gradients.

    Where it is `watched`, by the bridge's operators and without products of the vocabulary.
    """
    products = Products(VOCABULARY)
    with products if watched else contextlib.nullcontext():
        out, found = step(model, **further)
    assert out.logits is None
    if watched:
        assert (products.bridged, products.wide) == (["linear_cross_entropy", "linear_cross_entropy_backward"], [])
    exact, exact_gradients = want
    assert type(out) is type(exact)
    assert relative(out.loss.detach(), exact.loss.detach()) <= loss
    assert found.keys() == exact_gradients.keys()
    for name, gradient in exact_gradients.items():
        assert relative(found[name], gradient) <= gradients, name
    return found
