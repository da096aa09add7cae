"""500 steps at a vocabulary of 65,536, with our losses and without: `python -m experiments.training_evidence`.

On one GPU, in bfloat16, from the same seed and on the same text as `train_lm`'s:

    train_lm      its model on a GPU, through the fused head and through stored logits (`canonical`)
    Hugging Face  a small Qwen3 of random weights in a plain loop, by its own loss (`plain`) and by `patch_causal_lm`
    TRL           `SFTTrainer` on short rows, by TRL's own fused head (`plain`) and by `patch_causal_lm`

Of each the loss of every step, the final validation loss, milliseconds of a step and memory; and of the first two the
largest batch that fits: by the planned memory of the compiled step, then run (train_lm), or by trials (Hugging Face).
Where the text supports fewer entries than the vocabulary has, the head has all of them still, and the record says how
many the tokeniser has (`tokenizer_entries`). TRL is left out by name where it is missing.

Each point is written to `training_evidence.json` under `experiments/results/` when it is measured; run the command
again to go on. `training_evidence.md` and `.png`, made from that file after each run or with `--report` alone, compare
the curves.
"""

import argparse
import dataclasses
import functools
import importlib.util
import sys
from collections.abc import Callable, Sequence

from experiments.bench import causal_lm_training, lm_training, training_report
from experiments.bench.command import measure_and_report
from experiments.bench.processes import apart
from experiments.bench.results import Record, ResultFile, add_options, describe, run, versions
from experiments.command_line import parser_of
from experiments.lm.config import TrainConfig, default_config

STEPS, VOCABULARY = 500, 65536
_DRY_STEPS = 8
_DRY_LIMIT = 16 * 2**20  # bytes, for a CPU
_PACKAGES = ("torch", "transformers", "trl", "datasets")


def machine() -> Record:
    """What `describe` says, and the bytes that JAX may have of the device; in a process of its own, like all else."""
    import jax

    statistics = jax.local_devices()[0].memory_stats() or {}
    return describe() | {"platform": jax.default_backend(), "limit": statistics.get("bytes_limit", _DRY_LIMIT)}


def configs(data: str, dry_run: bool) -> dict[str, TrainConfig]:
    """By family of trainings."""
    if dry_run:
        config = dataclasses.replace(lm_training.DRY, steps=_DRY_STEPS, data=data, batch_size=4)
        return dict.fromkeys(training_report.FAMILIES, config)
    config = dataclasses.replace(default_config("gpu"), steps=STEPS, vocab_size=VOCABULARY, data=data)
    # Of these rows' tokens, one more than the configuration says, all are inputs.
    model = dataclasses.replace(config, width=1024, attention_heads=8, layers=8, batch_size=8, sequence_length=1023)
    short = dataclasses.replace(model, layers=4, batch_size=16, sequence_length=255)
    return dict(zip(training_report.FAMILIES, (config, model, short), strict=True))


def points(configs: dict[str, TrainConfig], limit: float, device: str) -> dict[str, Callable[[], Record]]:
    """All trainings, then the largest batches; each measured in processes of its own."""
    lm, hugging_face, trl = training_report.FAMILIES
    trainings: dict[str, Callable[..., Record]] = {
        hugging_face: causal_lm_training.train,
        trl: causal_lm_training.train_by_trl,
    }
    found: dict[str, Callable[[], Record]] = {}
    for head in lm_training.HEADS:
        found[f"{lm}, {head}"] = functools.partial(apart, lm_training.train, configs[lm], head)
    for family, train in trainings.items():
        for variant in causal_lm_training.VARIANTS:
            found[f"{family}, {variant}"] = functools.partial(apart, train, configs[family], variant, device)
    suffix = training_report.LARGEST
    for head in lm_training.HEADS:
        found[f"{lm}, {head}{suffix}"] = functools.partial(lm_training.largest, configs[lm], head, limit)
    for variant in causal_lm_training.VARIANTS:
        largest = functools.partial(apart, causal_lm_training.largest, configs[hugging_face], variant, device)
        found[f"{hugging_face}, {variant}{suffix}"] = largest
    return found


def missing() -> dict[str, str]:
    """Families that cannot be measured here, and why."""
    needs = {"Hugging Face": ("torch", "transformers"), "TRL": ("torch", "transformers", "trl", "datasets")}
    found = {}
    for family, modules in needs.items():
        if lacking := [module for module in modules if importlib.util.find_spec(module) is None]:
            found[family] = f"{lacking[0]} is not installed (pip install 'pallas-ce[trl]')"
    return found


def shown(_: str, record: Record) -> str:
    """A point's figures."""
    if "losses" not in record:
        return f"{record['batch']} rows of {record['sequence']} tokens, {record['ms']:.0f} ms a step"
    first, last = record["losses"][0], record["losses"][-1]
    return (
        f"loss {first:.3f} to {last:.3f}, validation {record['validation_loss']:.4f}, {record['ms']:.1f} ms a step, "
        f"{record['peak_mib']:.0f} MiB"
    )


def _measure(options: argparse.Namespace) -> int:
    facts = apart(machine)
    platform, limit = facts.pop("platform"), facts.pop("limit")
    if platform == "cpu" and not options.dry_run:
        print("JAX finds no GPU; --dry-run shows on a CPU that the command works", file=sys.stderr)
        return 2
    found = points(configs(options.data, options.dry_run), limit, "cpu" if options.dry_run else "cuda")
    for family, why in missing().items():
        print(f"{family} is left out: {why}", file=sys.stderr)
        found = {name: point for name, point in found.items() if not name.startswith(family)}
    file = ResultFile(training_report.NAME, "python -m experiments.training_evidence", found)
    return run([file], facts | versions(_PACKAGES), shown, options)


def main(words: Sequence[str] | None = None) -> int:
    """Measures, prints and writes each point as it goes, then the report; returns the exit status."""
    parser = parser_of(__doc__)
    add_options(parser, rounds=None)
    parser.add_argument("--data", default="", help="text file or folder, as for train_lm")
    return measure_and_report(parser, words, _measure, training_report.write)


if __name__ == "__main__":
    sys.exit(main())
