"""Trains a small language model through the fused loss head: `python -m experiments.train_lm`.

By default on the Python standard library's own source, within three minutes on two CPU cores; on a GPU the model, the
batch and the vocabulary are larger. `--head both` trains the same model through stored logits too and compares them.
`--mesh` splits the training over several devices, `--coordinator` over those of several hosts.
"""

import argparse
import dataclasses
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from experiments.lm.config import OPTIONS, TrainConfig, check, default_config, merge, read_toml, refuse_changes
from experiments.lm.errors import RunError, Stopped, UsageError
from experiments.lm.run.processes import by_first, joined, read_group


class _Parser(argparse.ArgumentParser):
    """An argument parser whose errors are one sentence; thirty options of usage would bury it."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message} (--help lists the options)")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="python -m experiments.train_lm", description=__doc__, allow_abbrev=False)
    parser.add_argument("--config", metavar="FILE", help="TOML file of options; the command line overrides it")
    existing = parser.add_mutually_exclusive_group()
    existing.add_argument(
        "--resume", action="store_true", help="go on with the run in --out, or the latest default one"
    )
    existing.add_argument("--overwrite", action="store_true", help="replace the run in --out")
    parser.add_argument(
        "--stop-after", type=int, metavar="STEPS", help="save and end after so many steps; --resume goes on"
    )
    several = parser.add_argument_group("several processes", "the same command for each; a folder that all of them see")
    several.add_argument(
        "--coordinator", metavar="HOST:PORT", help="host of process 0, a port of it that is free, and the next one, too"
    )
    several.add_argument("--num-processes", type=int, metavar="INT", help="how many (default: what SLURM or MPI says)")
    several.add_argument("--process-id", type=int, metavar="INT", help="which one, from 0 (default: what they say)")
    for name, field in OPTIONS.items():
        defaults = [f"default: {field.default!r}"] if field.default != "" else []
        defaults += [f"on a GPU {field.metadata['accelerator']!r}"] if "accelerator" in field.metadata else []
        text = f"{field.metadata['help']} {f'({", ".join(defaults)})' if defaults else ''}".rstrip()
        flag = "--" + name.replace("_", "-")
        options: dict[str, Any] = {"default": argparse.SUPPRESS, "help": text.replace("%", "%%")}
        kind = type(field.default)
        if kind is bool:
            parser.add_argument(flag, action=argparse.BooleanOptionalAction, **options)
        else:
            metavar = "|".join(field.metadata.get("choices", [kind.__name__.upper()]))
            parser.add_argument(flag, type=kind, metavar=metavar, **options)
    return parser


def start_jax() -> str:
    """Starts JAX and returns its platform's name.

    Two runs of one program must give the same numbers, or resuming would not be exact: on a GPU that has to be asked
    for, before JAX starts.

    Raises:
        UsageError: if it cannot start.
    """
    flags = os.environ.get("XLA_FLAGS", "")
    if "xla_gpu_deterministic_ops" not in flags:
        os.environ["XLA_FLAGS"] = f"{flags} --xla_gpu_deterministic_ops=true".strip()
    import jax

    try:
        return jax.default_backend()
    # A platform that is asked for and missing surfaces as a RuntimeError or, without words, as an AssertionError.
    except Exception as error:
        platforms = os.environ.get("JAX_PLATFORMS", "")
        raise UsageError(f"JAX cannot start (JAX_PLATFORMS={platforms}): {str(error) or 'no such device'}") from error


def run(arguments: argparse.Namespace) -> None:
    """Carries out a parsed command, as one of several processes or alone.

    Raises:
        UsageError: for input that cannot be used; nothing has been written then.
        RunError: if the training fails.
        Stopped: if it is ended early; what was done is saved.
    """
    if arguments.stop_after is not None and arguments.stop_after < 1:
        raise UsageError(f"--stop-after is {arguments.stop_after}; it must be at least 1")
    group = read_group(arguments.coordinator, arguments.num_processes, arguments.process_id, os.environ)
    # The command line has the last word over the file.
    overrides = read_toml(Path(arguments.config)) if arguments.config is not None else {}
    merge(TrainConfig(), overrides, str(arguments.config))  # checks names and types
    overrides |= {name: value for name, value in vars(arguments).items() if name in OPTIONS}
    with joined(group):
        _train(arguments, overrides)


def _train(arguments: argparse.Namespace, overrides: dict[str, Any]) -> None:
    # Imported here because they need packages that may be missing.
    from experiments.lm.data.dataset import load_dataset
    from experiments.lm.model.mesh import make_layout, refuse_other_padding
    from experiments.lm.run import run_directory
    from experiments.lm.run.programs_kept import programs_kept
    from experiments.lm.run.session import train_heads

    backend = start_jax()
    out = str(overrides.get("out", ""))
    if arguments.resume:
        folder = Path(by_first(lambda: str(run_directory.choose_existing(out))))
        stored = run_directory.stored_config(folder)
        config = merge(stored, overrides, "the command")
        check(config)
        refuse_changes(dataclasses.asdict(stored), config, str(folder))
        refuse_other_padding(stored, config)
    else:
        config = merge(default_config(backend), overrides, "the command")
        check(config)
        folder = Path(by_first(lambda: str(run_directory.choose_new(out, arguments.overwrite))))
    layout = make_layout(config)
    if config.mesh:
        print(f"mesh: {layout}", flush=True)
    with programs_kept(Path(config.cache_dir) / "programs"):
        print(train_heads(config, load_dataset(config), folder, backend, arguments))


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit code: 0, 1 for a failed training, 2 for input that cannot be used."""
    arguments = argparse.Namespace()
    try:
        _parser().parse_args(argv, arguments)
        run(arguments)
    except ModuleNotFoundError as error:
        package = str(error.name).partition(".")[0]
        return _end(f"error: the package {package} is missing; run: pip install 'pallas-ce[experiments]'", 2)
    except (UsageError, RunError) as error:
        return _end(f"error: {error}", error.exit_code)
    except Stopped as stop:
        folder = f" --out {arguments.out}" if "out" in arguments else ""
        return _end(f"{stop}; go on with --resume{folder}", stop.exit_code)
    except KeyboardInterrupt:
        return _end("interrupted", 130)
    except OSError as error:
        return _end(f"error: reading or writing failed: {error}", 1)
    return 0


def _end(message: str, exit_code: int) -> int:
    print(" ".join(message.split()), file=sys.stderr)  # One line, also where a library's own message has several.
    return exit_code


if __name__ == "__main__":
    sys.exit(main())
