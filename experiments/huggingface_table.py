"""A Hugging Face model's training steps by several losses, on a GPU: `python -m experiments.huggingface_table`.

Qwen3 with random weights in bfloat16, in PyTorch's eager mode with its fused AdamW, at three sizes, by transformers'
own loss (`plain`), with Liger's kernels (`liger`, left out by name where it is missing or fails) and with
`patch_causal_lm`, as it is (`fused`) and with `backward="recompute", scratch_bytes=96 * 2**20` (`fused, lean`). Losses
and head gradients of the first step must agree. `huggingface_table.json` has, of each size and loss,

    ms                  of a step, the median of several processes' steps, which take turns
    torch_peak_mib      the most in PyTorch's tensors
    driver_mib          the most of the GPU's memory that the process takes within a step, by the driver's count
    first_step_seconds  "before", with empty caches of compiled programs, and "after", with those of the first process

and of JAX what it takes of a GPU before it computes anything. Imports are not counted. Run the command again to go on.
"""

import functools
import sys
from collections.abc import Callable, Sequence

from experiments.bench.command import parsed
from experiments.bench.peers import torch_missing
from experiments.bench.results import Record, ResultFile, add_options, describe, run, versions
from experiments.command_line import parser_of

_PACKAGES = ("transformers", "liger-kernel", "triton")


def points(device: str, rounds: int) -> dict[str, Callable[[], Record]]:
    """JAX's idle footprint, and each size; on a CPU the sizes are those of a dry run."""
    from experiments.bench import huggingface

    found: dict[str, Callable[[], Record]] = {huggingface.IDLE: functools.partial(huggingface.idle, device)}
    for setting in huggingface.SETTINGS:
        name = f"H {setting.width}, {setting.layers} layers, {setting.tokens} tokens"
        measured = huggingface.dry(setting) if device == "cpu" else setting
        found[name] = functools.partial(huggingface.measure, measured, device, rounds)
    return found


def shown(_: str, record: Record) -> str:
    """A point's figures."""
    if "results" not in record:
        return f"{record['mib']:.0f} MiB"
    figures = [
        f"{variant} {found['ms']:.1f} ms, {found['torch_peak_mib']:.0f} and {found['driver_mib']:.0f} MiB, first step "
        f"{found['first_step_seconds']['before']:.1f} s and {found['first_step_seconds']['after']:.1f} s"
        for variant, found in record["results"].items()
    ]
    return "; ".join([*figures, *(f"{variant} left out, {why}" for variant, why in record["left_out"].items())])


def main(words: Sequence[str] | None = None) -> int:
    """Measures, prints and writes as it goes; returns the exit status."""
    parser = parser_of(__doc__)
    add_options(parser, "processes of each loss at a size, at least 2: the first fills the caches")
    parser.set_defaults(rounds=2)
    options = parsed(parser, words)
    if options.rounds < 2:
        parser.error("--rounds must be at least 2: the first process of a loss fills the caches, the next finds them")
    if reason := torch_missing(not options.dry_run, "; --dry-run shows on a CPU that the command works"):
        print(reason, file=sys.stderr)
        return 2
    found = versions(_PACKAGES)
    if "transformers" not in found:
        print("the model is transformers', which is missing: pip install 'pallas-ce[huggingface]'", file=sys.stderr)
        return 2
    import torch

    import torch_bridge  # before JAX starts, which leaves the device's memory to both  # noqa: F401

    return run(
        [
            ResultFile(
                "huggingface_table",
                "python -m experiments.huggingface_table",
                points("cpu" if options.dry_run else "cuda", options.rounds),
            )
        ],
        describe() | {"torch": torch.__version__, **found, "rounds": options.rounds},
        shown,
        options,
    )


if __name__ == "__main__":
    sys.exit(main())
