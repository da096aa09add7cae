"""Training with rewards (GRPO) by TRL with a patched model: `python examples/trl_grpo.py`.

`patch_causal_lm(model)` is the one line: the log-probabilities of the policy and of the old one then come from hidden
states and the head's weight, in training and where TRL scores its samples; only generation makes logits, of one token
at a time. A tiny Qwen with random weights learns to say small numbers. It takes less than a minute on a CPU, downloads
nothing, and needs the extra `trl`.
"""

import tempfile
from typing import Any

import torch
import transformers
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from trl import GRPOConfig, GRPOTrainer

import torch_bridge

VOCABULARY, STEPS = 103, 30


def tokenizer() -> transformers.PreTrainedTokenizerFast:
    """Of the numbers from 0 to 99, a word each."""
    words = {str(i): i for i in range(100)} | {"<pad>": 100, "<eos>": 101, "<unk>": 102}
    made = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>", padding_side="left"
    )


def make_model() -> transformers.Qwen2ForCausalLM:
    """A Qwen of one layer."""
    torch.manual_seed(0)
    config = transformers.Qwen2Config(
        vocab_size=VOCABULARY, hidden_size=64, intermediate_size=128, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=32, bos_token_id=101, eos_token_id=101, pad_token_id=100,
    )  # fmt: skip
    return transformers.Qwen2ForCausalLM(config)


def small_numbers(completions: list[str], **_: Any) -> list[float | None]:
    """The reward: the share of an answer's words that are numbers below 50."""
    return [sum(int(word) < 50 for word in answer.split()) / max(len(answer.split()), 1) for answer in completions]


def main() -> None:
    """Trains, and shows how the mean reward grows."""
    model = torch_bridge.patch_causal_lm(make_model())
    prompts = [f"{i} {(7 * i) % 100}" for i in range(100)]
    with tempfile.TemporaryDirectory() as folder:
        arguments = GRPOConfig(
            output_dir=folder, max_steps=STEPS, per_device_train_batch_size=32, num_generations=8, temperature=1.0,
            max_completion_length=6, learning_rate=1e-2, use_cpu=True, bf16=False, logging_steps=1, save_strategy="no",
            report_to=[], disable_tqdm=True,
        )  # fmt: skip
        trainer = GRPOTrainer(
            model, small_numbers, arguments, train_dataset=Dataset.from_dict({"prompt": prompts}),
            processing_class=tokenizer(),
        )  # fmt: skip
        trainer.remove_callback(transformers.PrinterCallback)
        trainer.train()
    rewards = [entry["reward"] for entry in trainer.state.log_history if "reward" in entry]
    for step in range(0, STEPS, 5):
        print(f"steps {step:2} to {step + 4:2}: mean reward {sum(rewards[step : step + 5]) / 5:.2f}")
    assert sum(rewards[-5:]) / 5 > sum(rewards[:5]) / 5 + 0.3


if __name__ == "__main__":
    main()
