"""Speed of training loops beside their compiled step launched back to back: `python -m experiments.train_speed`.

Trains `train_lm`'s default model of the device through the fused head and through stored logits, in turn, with all that
the loop does but validations and checkpoints, and launches the compiled step of each as often in between; and likewise
`grpo`'s default model through the fused head, where a step is an iteration. Writes each one's milliseconds and tokens
per second, the loop's `ratio` (the step's milliseconds over the loop's), the fused loop's rate over that with stored
logits (`fused_to_canonical`), and what a `start` of `train_lm` takes in processes of its own, to
`experiments/results/train_speed.json`.
"""

import argparse
import dataclasses
import functools
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax

from experiments import grpo
from experiments.bench import timing
from experiments.bench.command import parsed
from experiments.bench.lm_training import DRY, HEADS, loop_records, starts
from experiments.bench.results import Record, ResultFile, add_options, describe, run
from experiments.command_line import parser_of, positive
from experiments.lm.config import TrainConfig, default_config
from experiments.lm.data.dataset import load_dataset
from experiments.lm.data.packing import Dataset, training_batch
from experiments.lm.model.program import Params, Program, TrainState, build
from experiments.lm.run.loop import WARM_UP
from experiments.train_lm import start_jax


def loop_milliseconds(program: Program, config: TrainConfig, dataset: Dataset) -> float:
    """Of a step in the training loop, its warm-up left out."""
    (summary,) = [record for record in loop_records(program, config, dataset) if record["kind"] == "summary"]
    return 1e3 * config.batch_size * config.sequence_length / float(summary["tokens_per_second"])


def step_milliseconds(program: Program, config: TrainConfig, dataset: Dataset) -> float:
    """Of the compiled step among as many launched back to back, on one batch that is there."""
    state = program.initial_state(config.seed)
    rows = program.placed(training_batch(dataset.training, config.seed, 0, config.batch_size))

    def launched(state: TrainState, launches: int) -> TrainState:
        for _ in range(launches):
            state, _ = program.train(state, rows)
        return jax.block_until_ready(state)

    state = launched(state, WARM_UP)
    started = time.perf_counter()
    launched(state, config.steps - WARM_UP)
    return 1e3 * (time.perf_counter() - started) / (config.steps - WARM_UP)


def measure_lm(config: TrainConfig, steps: int, rounds: int) -> Record:
    """Both heads' loops and steps of `train_lm` in turn, `steps` of each in a round."""
    dataset = load_dataset(config)
    dataset = dataclasses.replace(dataset, validation=dataset.validation[: config.batch_size])
    total = steps + WARM_UP
    config = dataclasses.replace(config, steps=total, validate_every=total, checkpoint_every=total)
    programs = {head: build(config, head, dataset.end_of_text) for head in HEADS}
    timed = {"loop": loop_milliseconds, "step": step_milliseconds}
    runs = {(head, kind): functools.partial(timed[kind], programs[head]) for head in HEADS for kind in timed}
    found = timing.in_turn(runs, lambda milliseconds: milliseconds(config, dataset), rounds)
    tokens = config.batch_size * config.sequence_length
    results = {
        head: _compared(found[head, "loop"], found[head, "step"], tokens) | {"start": starts(config, head)}
        for head in HEADS
    }
    return {
        "steps": steps,
        "config": dataclasses.asdict(config),
        "results": results,
        "fused_to_canonical": found["canonical", "loop"]["ms"] / found["fused", "loop"]["ms"],
    }


def measure_grpo(steps: int, rounds: int) -> Record:
    """The loop of `grpo`, its numbers fetched, and its compiled iteration in turn."""
    config = grpo.Config(iterations=steps)
    loop = grpo.Loop(config, "streamed")

    def launched(iteration: grpo.Iteration, initial: Params, key: jax.Array) -> None:
        for _ in range(steps):
            iteration = loop.launch(iteration, initial, key)
        jax.block_until_ready(iteration)

    def milliseconds(run: Callable[..., Any]) -> float:
        given = jax.block_until_ready(loop.start(0))
        started = time.perf_counter()
        run(*given)
        return 1e3 * (time.perf_counter() - started) / steps

    found = timing.in_turn({"loop": loop.run, "step": launched}, milliseconds, rounds)
    tokens = config.prompts * config.group * config.length
    results = {"fused": _compared(found["loop"], found["step"], tokens)}
    return {"steps": steps, "config": dataclasses.asdict(config), "results": results}


def _compared(loop: dict[str, Any], step: dict[str, Any], tokens: int) -> dict[str, Any]:
    """A loop whose step takes so many tokens, beside that step."""
    rate = {"ratio": step["ms"] / loop["ms"], "tokens_per_second": 1e3 * tokens / loop["ms"]}
    return {"loop": loop, "step": step, **rate}


def _shown(_: str, record: Record) -> str:
    words = [
        f"{head} {found['tokens_per_second']:,.0f} tokens/s, {found['ratio']:.3f} of its step's"
        for head, found in record["results"].items()
    ]
    compared = "fused_to_canonical" in record
    return "; ".join([*words, f"fused / canonical {record['fused_to_canonical']:.3f}"] if compared else words)


def _config(options: argparse.Namespace, backend: str) -> TrainConfig:
    return dataclasses.replace(DRY if options.dry_run else default_config(backend), data=options.data)


def main(words: Sequence[str] | None = None) -> int:
    """Measures, prints and writes; returns the exit status."""
    parser = parser_of(__doc__)
    add_options(parser)
    parser.add_argument("--steps", type=positive, default=100, help="of a loop, and of a series of launches")
    parser.add_argument("--data", default="", help="text file or folder, as for train_lm")
    options = parsed(parser, words)
    config = _config(options, start_jax())
    points = {
        "defaults": functools.partial(measure_lm, config, options.steps, options.rounds),
        # Its iterations are short, and what begins and ends a series is not to count.
        "grpo": functools.partial(measure_grpo, 10 * options.steps, options.rounds),
    }
    file = ResultFile("train_speed", "python -m experiments.train_speed", points)
    return run([file], describe() | {"rounds": options.rounds}, _shown, options)


if __name__ == "__main__":
    sys.exit(main())
