"""Tiny Hugging Face models of every kind that is patched, randomly initialised, and a batch for them."""

import torch
import transformers as hf

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

MODELS = {
    "llama": lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**SIZES)),
    "qwen2": lambda: hf.Qwen2ForCausalLM(hf.Qwen2Config(**SIZES)),
    "qwen3": lambda: hf.Qwen3ForCausalLM(hf.Qwen3Config(**SIZES, head_dim=8)),
    "gemma2": lambda: hf.Gemma2ForCausalLM(hf.Gemma2Config(**SIZES, head_dim=8, final_logit_softcapping=2.0)),
    "gemma3": lambda: hf.Gemma3ForCausalLM(hf.Gemma3TextConfig(**SIZES, head_dim=8, final_logit_softcapping=2.0)),
    "mistral": lambda: hf.MistralForCausalLM(hf.MistralConfig(**SIZES)),
    "phi": lambda: hf.PhiForCausalLM(hf.PhiConfig(**SIZES, embd_pdrop=0.0)),
    "gpt2": lambda: hf.GPT2LMHeadModel(hf.GPT2Config(
        n_embd=16, n_layer=2, n_head=2, vocab_size=VOCABULARY, n_positions=64, bos_token_id=1, eos_token_id=2,
        embd_pdrop=0.0, attn_pdrop=0.0, resid_pdrop=0.0,
    )),
    # Not known by name: compared with their own forward.
    "granite": lambda: hf.GraniteForCausalLM(hf.GraniteConfig(**SIZES, logits_scaling=3.0)),
    "cohere": lambda: hf.CohereForCausalLM(hf.CohereConfig(**SIZES, logit_scale=0.5)),
    "olmo2": lambda: hf.Olmo2ForCausalLM(hf.Olmo2Config(**SIZES)),
}  # fmt: skip


def make(name="llama", **options):
    """A model of that name, or a Llama with options in its configuration."""
    torch.manual_seed(0)
    return (hf.LlamaForCausalLM(hf.LlamaConfig(**SIZES, **options)) if options else MODELS[name]()).train()


def batch():
    torch.manual_seed(1)
    tokens = torch.randint(3, VOCABULARY, (3, 9))
    labels = tokens.clone()
    labels[0, :4] = -100
    labels[2, 6:] = -100
    return {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "labels": labels}
