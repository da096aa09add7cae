"""500 steps at a vocabulary of 65,536, with our losses and without: `python -m experiments.bench training_evidence`.

On one GPU, in bfloat16, from the same seed and on the same text as `train_lm`'s:

    train_lm      its model on a GPU, through the fused head and through stored logits (`canonical`)
    Hugging Face  a small Qwen3 of random weights in a plain loop, by its own loss (`plain`) and by `patch_causal_lm`
    TRL           `SFTTrainer` on short rows, by TRL's own fused head (`plain`) and by `patch_causal_lm`

Of each the loss of every step, the final validation loss, milliseconds of a step and memory; and of the first two the
largest batch that fits, by trials. Where the text supports fewer entries than the vocabulary has, the head has all of
them still, and the record says how many the tokeniser has (`tokenizer_entries`). A family whose packages are missing is
left out. `python -m experiments.bench gpu_report` compares the curves.
"""

import argparse
import dataclasses
import functools
import importlib.util
import sys
from collections.abc import Mapping
from typing import Any

from experiments.bench import trainings
from experiments.bench.processes import apart
from experiments.bench.results import Point, Record, ResultFile, versions
from experiments.bench.tables import COLUMNS, machine_line, table
from experiments.bench.trainings import FAMILIES, LARGEST
from experiments.charts import Panel
from experiments.lm.config import TrainConfig, default_config

NAME = "training_evidence"
APART = True
STEPS, VOCABULARY = 500, 65536
_DRY_STEPS = 8
_NEEDS = {"Hugging Face": ("torch", "transformers"), "TRL": ("torch", "transformers", "trl", "datasets")}


def configs(data: str, dry_run: bool) -> dict[str, TrainConfig]:
    """By family of trainings."""
    if dry_run:
        return dict.fromkeys(FAMILIES, dataclasses.replace(trainings.DRY, steps=_DRY_STEPS, data=data, batch_size=4))
    config = dataclasses.replace(default_config("gpu"), steps=STEPS, vocab_size=VOCABULARY, data=data)
    # Of these rows' tokens, one more than the configuration says, all are inputs.
    model = dataclasses.replace(config, width=1024, attention_heads=8, layers=8, batch_size=8, sequence_length=1023)
    short = dataclasses.replace(model, layers=4, batch_size=16, sequence_length=255)
    return dict(zip(FAMILIES, (config, model, short), strict=True))


def files(options: argparse.Namespace) -> list[ResultFile]:
    """All trainings that can be measured here."""
    found = configs(options.data, options.dry_run)
    for family, modules in _NEEDS.items():
        if lacking := [module for module in modules if importlib.util.find_spec(module) is None]:
            print(f"{family} is left out: {lacking[0]} is not installed", file=sys.stderr)
            del found[family]
    given = {
        f"{family}, {variant}": (family, config, variant, options.device)
        for family, config in found.items()
        for variant in FAMILIES[family]
    }
    points = [Point(name, functools.partial(apart, trainings.train, *pair)) for name, pair in given.items()]
    batches = {name + LARGEST: pair for name, pair in given.items() if pair[0] != "TRL"}
    points += [Point(name, functools.partial(trainings.largest, *pair)) for name, pair in batches.items()]
    return [ResultFile(NAME, points, NAME, versions(("torch", "transformers", "trl", "datasets")))]


def differences(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> tuple[float, int, float]:
    """The largest difference of two trainings' losses, its step from 1, and their validation losses'."""
    by_step = [abs(a - b) for a, b in zip(ours["losses"], theirs["losses"], strict=True)]
    largest = max(by_step)
    return largest, 1 + by_step.index(largest), abs(ours["validation_loss"] - theirs["validation_loss"])


def markdown(document: Record) -> str:
    """The report of a result file."""
    points = {name: {**point, "name": name.removesuffix(LARGEST)} for name, point in document["points"].items()}
    names = [f"{family}, {variant}" for family, variants in FAMILIES.items() for variant in variants]
    trained = [{**points[name], "last_loss": points[name]["losses"][-1]} for name in names if name in points]
    largest = [point for name, point in points.items() if name.endswith(LARGEST)]
    for point in largest:
        point["tokens"] = point["batch"] * point["sequence"]
        point["tokens_per_second"] = 1e3 * point["tokens"] / point["ms"]
    entries = sorted({(point["tokenizer_entries"], point["vocabulary"]) for point in trained})
    return "\n\n".join(
        [
            machine_line(document),
            *(
                f"The text supports {entries:,} entries, which are the labels there are; the head has {vocabulary:,}."
                for entries, vocabulary in entries
                if entries < vocabulary
            ),
            "## Steps",
            table(trained, COLUMNS["trained"]),
            "## How far apart",
            table(_pairs(points), COLUMNS["compared"]),
            "## The largest batch that fits",
            table(largest, COLUMNS["largest_batch"]),
        ]
    )


def _pairs(points: Mapping[str, Any]) -> list[dict[str, Any]]:
    rows = []
    for family, variants in FAMILIES.items():
        pair = [points[name] for variant in variants if (name := f"{family}, {variant}") in points]
        if len(pair) == 2:
            ours, theirs = pair
            largest, step, validation = differences(ours, theirs)
            ratios = {key: ours[key] / theirs[key] for key in ("ms", "peak_mib")}
            name = f"{family}, {' and '.join(variants)}"
            rows.append({"name": name, "largest": largest, "step": step, "validation": validation, **ratios})
    return rows


def panels(document: Record) -> list[Panel]:
    """A panel a family: the loss of every step."""
    found = []
    for family, variants in FAMILIES.items():
        points = {variant: document["points"].get(f"{family}, {variant}") for variant in variants}
        lines = {variant: dict(enumerate(point["losses"], 1)) for variant, point in points.items() if point}
        found.append(Panel(lines, x="step", y="loss (nats a token)", title=family, marked=False))
    return found
