"""Supervised fine-tuning by TRL with a patched model: `python examples/trl_sft.py`.

`patch_causal_lm(model)` is the one line: TRL's trainer then takes the loss from hidden states and the head's weight. A
tiny Llama with random weights learns to count, by TRL as it comes and with the line; the losses are the same. It takes
less than a minute on a CPU, downloads nothing, and needs the extra `trl`.
"""

import tempfile

import torch
import transformers
from datasets import Dataset, disable_progress_bars
from tokenizers import Tokenizer, models, pre_tokenizers
from trl import SFTConfig, SFTTrainer

import torch_bridge

VOCABULARY, LENGTH, STEPS = 103, 12, 20


def tokenizer() -> transformers.PreTrainedTokenizerFast:
    """Of the numbers from 0 to 99, a word each."""
    words = {str(i): i for i in range(100)} | {"<pad>": 100, "<eos>": 101, "<unk>": 102}
    made = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    )


def make_model() -> transformers.LlamaForCausalLM:
    """A Llama of one layer, the same each time."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=64, intermediate_size=128, num_hidden_layers=1, num_attention_heads=4,
        max_position_embeddings=32, bos_token_id=101, eos_token_id=101, pad_token_id=100,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


def train(model: transformers.LlamaForCausalLM, folder: str) -> list[float]:
    """The losses of the steps."""
    texts = [" ".join(str((start + i) % 100) for i in range(LENGTH)) for start in range(100)]
    arguments = SFTConfig(
        output_dir=folder, max_steps=STEPS, per_device_train_batch_size=16, learning_rate=1e-2, max_length=LENGTH + 1,
        use_cpu=True, bf16=False, logging_steps=1, save_strategy="no", report_to=[], disable_tqdm=True,
    )  # fmt: skip
    trainer = SFTTrainer(
        model, arguments, train_dataset=Dataset.from_dict({"text": texts}), processing_class=tokenizer()
    )
    trainer.remove_callback(transformers.PrinterCallback)
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def main() -> None:
    """Trains twice, and shows the losses side by side."""
    disable_progress_bars()
    with tempfile.TemporaryDirectory() as folder:
        plain = train(make_model(), folder)
        patched = train(torch_bridge.patch_causal_lm(make_model()), folder)
    print("step  TRL alone  patched")
    for step in range(0, STEPS, 5):
        print(f"{step:4}  {plain[step]:9.4f}  {patched[step]:7.4f}")
    torch.testing.assert_close(patched, plain, rtol=1e-2, atol=1e-3)
    assert patched[-1] < 0.5 * patched[0]


if __name__ == "__main__":
    main()
