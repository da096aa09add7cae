"""Trains a small language model through the fused loss head: `python -m experiments.train_lm`.

By default on the Python standard library's own source, within three minutes on two CPU cores; on a GPU the model, the
batch and the vocabulary are larger. `--head both` trains the same model through stored logits too and compares them.
`--mesh` splits the training over several devices. Ctrl-C and SIGTERM save and end it; `--resume` goes on. The folder of
a run has config.toml, metrics.jsonl, loss.png and checkpoints.
"""

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from experiments.lm import config as configs
from experiments.lm.config import OPTIONS, TrainConfig, UsageError, merge, read_toml

DEFAULT = Path("runs/train_lm")
_CONFIG, _METRICS = "config.toml", "metrics.jsonl"


def _parser() -> argparse.ArgumentParser:
    prog = "python -m experiments.train_lm"
    # Thirty options of usage would bury an error.
    parser = argparse.ArgumentParser(prog, "%(prog)s [--help] [--OPTION VALUE ...]", __doc__, allow_abbrev=False)
    parser.add_argument("--config", metavar="FILE", help="TOML file of options; the command line overrides it")
    parser.add_argument("--out", metavar="FOLDER", help=f"of the run; default: {DEFAULT}, numbered if that exists")
    parser.add_argument("--resume", action="store_true", help="go on with the run in --out, or the latest default one")
    several = parser.add_argument_group(
        "several processes", "the same command for each, and one --out; JAX finds out the rest under SLURM and MPI"
    )
    several.add_argument("--coordinator", metavar="HOST:PORT", help="host of process 0, and a port of it that is free")
    several.add_argument("--num-processes", type=int, metavar="INT", help="how many")
    several.add_argument("--process-id", type=int, metavar="INT", help="which one, from 0")
    configs.add_options(parser)
    return parser


def start_jax() -> str:
    """Starts JAX and returns its platform's name.

    Two runs of one program must give the same numbers, or resuming would not be exact: on a GPU that has to be asked
    for, before JAX starts.
    """
    flags = os.environ.get("XLA_FLAGS", "")
    if "xla_gpu_deterministic_ops" not in flags:
        os.environ["XLA_FLAGS"] = f"{flags} --xla_gpu_deterministic_ops=true".strip()
    import jax

    return jax.default_backend()


def _folder(out: str | None, resume: bool) -> Path:
    """The run's folder: the one asked for, the latest of the numbered default ones, or the next."""
    numbered = [run for run in DEFAULT.parent.glob(f"{DEFAULT.name}*") if run.is_dir()]
    if out is not None:
        folder = Path(out)
    elif resume:
        folder = max(numbered, key=lambda run: run.stat().st_mtime, default=DEFAULT)
    else:
        names = (DEFAULT.with_name(f"{DEFAULT.name}-{number}") for number in range(2, len(numbered) + 3))
        folder = next(run for run in (DEFAULT, *names) if not run.exists())
    if resume and not (folder / _CONFIG).is_file():
        raise UsageError(f"there is no run to resume in {folder}: it has no {_CONFIG}; start one without --resume")
    if not resume and folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UsageError(f"{folder} is not an empty folder; continue the run in it with --resume, or change --out")
    return folder


def _configuration(arguments: argparse.Namespace, folder: Path, backend: str) -> TrainConfig:
    """Defaults, or the resumed run's options, then the file's, then the command line's."""
    from experiments.lm.model.mesh import padded_vocab_size

    given = {name: value for name, value in vars(arguments).items() if name in OPTIONS}
    values = (read_toml(Path(arguments.config)) if arguments.config else {}) | given
    if not arguments.resume:
        return merge(configs.default_config(backend), values, arguments.config or "the command")
    stored = merge(TrainConfig(), read_toml(folder / _CONFIG), str(folder / _CONFIG))
    config = merge(stored, values, "the command")
    for name in OPTIONS:
        old, new = getattr(stored, name), getattr(config, name)
        if name not in configs.FREE_ON_RESUME and old != new:
            raise UsageError(f"{folder} was made with {name} = {old!r}, but now {name} = {new!r}; resume with the same")
    old, new = padded_vocab_size(stored), padded_vocab_size(config)
    if old != new:
        raise UsageError(
            f"mesh is {config.mesh!r}, which pads the vocabulary to {new} entries, but the run was started with mesh "
            f"{stored.mesh!r} and has {old}; resume with a tensor axis that divides {old}"
        )
    return config


def run(arguments: argparse.Namespace) -> int:
    """Carries out a parsed command; returns the exit code.

    Raises:
        UsageError: for input that cannot be used; nothing has been written then.
        RunError: if the loss is not finite.
    """
    import jax

    if arguments.coordinator is not None:
        if arguments.out is None:
            raise UsageError("--coordinator needs --out, a folder that all processes see")
        jax.distributed.initialize(arguments.coordinator, arguments.num_processes, arguments.process_id)
    backend = start_jax()
    folder = _folder(arguments.out, arguments.resume)
    config = _configuration(arguments, folder, backend)

    from experiments.lm import records
    from experiments.lm.data.dataset import load_dataset
    from experiments.lm.loop import Trainer, checkpoints, stop_requests
    from experiments.lm.model.mesh import make_layout
    from experiments.lm.model.program import build
    from experiments.lm.programs_kept import programs_kept

    if config.mesh:
        print(f"mesh: {make_layout(config)}", flush=True)
    first = jax.process_index() == 0  # the process that writes all but its shares of the checkpoints
    metrics = folder / _METRICS
    finished = {record["head"] for record in records.read_records(metrics) if record["kind"] == "summary"}
    with programs_kept(Path(config.cache_dir) / "programs"), stop_requests() as stop:
        dataset = load_dataset(config)
        for head in config.loss_heads():
            if head in finished:
                continue
            program = build(config, head, dataset.end_of_text)
            temporaries, seconds = program.facts["step_temporary_bytes"], program.facts["compile_seconds"]
            print(
                f"{head}: {program.facts['parameters']:,} parameters, compiled in {seconds:.1f} s; "
                f"a step needs {records.as_text(temporaries)} of temporaries",
                flush=True,
            )
            # Only now: a configuration that cannot be trained leaves nothing behind.
            folder.mkdir(parents=True, exist_ok=True)
            if first:
                (folder / _CONFIG).write_text(configs.to_toml(config), encoding="utf-8")
            with (
                records.MetricsLog(metrics if first else None) as log,
                checkpoints(folder / "checkpoints" / head) as kept,
            ):
                step = Trainer(program, config, dataset, log, kept, stop).run()
            if step < config.steps:
                out = "" if arguments.out is None else f" --out {arguments.out}"
                print(f"stopped after step {step} of {config.steps}; go on with --resume{out}", file=sys.stderr)
                return 130
    if first:
        found = list(records.read_records(metrics))
        records.plot(found, folder)
        print(records.report(found, folder))
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit code: 0, 1 for a failed training, 2 for input that cannot be used."""
    from experiments.lm.loop import RunError

    try:
        return run(_parser().parse_args(argv))
    except (UsageError, RunError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1 if isinstance(error, RunError) else 2


if __name__ == "__main__":
    sys.exit(main())
