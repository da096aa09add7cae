"""Training one loss head: step, record, validate, save, and stop when asked to.

The device always has its next steps before it: their batches are there, and a step's numbers are read when those after
it have been launched. Only validations, checkpoints and the end of the warm-up wait for all of them.
"""

import collections
import concurrent.futures
import contextlib
import math
import signal
import threading
import time
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from tqdm import tqdm

from experiments.lm.config import TrainConfig, UsageError
from experiments.lm.data import packing
from experiments.lm.data.packing import Dataset
from experiments.lm.model.optimizer import learning_rate_schedule
from experiments.lm.model.program import Params, Program, StepNumbers, TrainState
from experiments.lm.records import MetricsLog, as_text, peak_bytes

# A step's numbers are read when this many more have been launched: the host's work in the meantime costs nothing.
_LATE = 3

# Batches made ahead. A GPU's copy may wait for the steps launched before it, and the launch that needs it for the copy:
# a batch is to be on its way before any step is launched that may still be at work when the batch is needed.
_AHEAD = _LATE + 2

# Steps after a start that do not count as its speed: an accelerator loads kernels and captures graphs in them.
WARM_UP = 3

# One older checkpoint is kept beside the newest.
_KEPT = 2


class RunError(Exception):
    """The training failed after a valid start."""


def made_ahead[Item](make: Callable[[int], Item], numbers: range, count: int) -> Generator[Item]:
    """`make(number)` for each number in order, up to `count` made on one thread before they are asked for.

    What `make` raises comes in place of its item. Close it if it is not used up (`contextlib.closing`).
    """
    with concurrent.futures.ThreadPoolExecutor(1, "ahead") as thread:
        waiting = collections.deque(thread.submit(make, number) for number in numbers[:count])
        try:
            for number in numbers[count:]:
                item = waiting.popleft().result()
                waiting.append(thread.submit(make, number))
                yield item
            while waiting:
                yield waiting.popleft().result()
        finally:
            thread.shutdown(cancel_futures=True)


@contextlib.contextmanager
def stop_requests() -> Iterator[Callable[[int], bool]]:
    """Within the block, Ctrl-C and SIGTERM are noted; yields what tells whether to stop after a step.

    A second one ends the process at once. Of several processes each must stop after the same step: SIGTERM is left to
    JAX's preemption service, which agrees on one, and Ctrl-C ends them at their last checkpoint.
    """
    if jax.process_count() > 1:
        from jax.experimental.multihost_utils import reached_preemption_sync_point

        yield reached_preemption_sync_point
        return
    noted: list[int] = []

    def note(number: int, _: object) -> None:
        if noted:
            raise KeyboardInterrupt
        noted.append(number)

    # Python delivers signals to the main thread only.
    main = threading.current_thread() is threading.main_thread()
    previous = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM) if main}
    try:
        yield lambda step: bool(noted)
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def checkpoints(folder: Path) -> ocp.CheckpointManager:
    """Orbax's manager of one head's checkpoints: a write that is cut short is passed over."""
    options = ocp.CheckpointManagerOptions(
        max_to_keep=_KEPT, enable_async_checkpointing=False, create=True, cleanup_tmp_directories=True
    )
    return ocp.CheckpointManager(folder.absolute(), options=options)


def save(manager: ocp.CheckpointManager, step: int, state: TrainState, dataset: Dataset) -> None:
    """Writes the state, and which text it was trained on; returns once it is complete on disk."""
    items = {"state": ocp.args.StandardSave(_by_path(state)), "text": ocp.args.JsonSave(dataset.digest)}
    manager.save(step, args=ocp.args.Composite(**items))


def restore(manager: ocp.CheckpointManager, step: int, like: TrainState, dataset: Dataset) -> TrainState:
    """The state saved at the step, placed as `like`; a UsageError if it was trained on another text."""
    wanted = _by_path(like)
    items = {"state": ocp.args.StandardRestore(wanted), "text": ocp.args.JsonRestore()}
    found = manager.restore(step, args=ocp.args.Composite(**items))
    if found["text"] != dataset.digest:
        raise UsageError(
            f"the text is not the one that the checkpoint in {manager.directory} was trained on; "
            "resume with the same text or start a new run"
        )
    return TrainState(*jax.tree.unflatten(jax.tree.structure(like), [found["state"][name] for name in wanted]))


def _by_path(tree: Any) -> dict[str, Any]:
    """The leaves by their path in the tree, so that a checkpoint does not depend on the classes of its containers."""
    leaves, _ = jax.tree.flatten_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in leaves}


class Trainer:
    """One loss head's training on one dataset.

    It goes on from the manager's newest checkpoint, and saves there; without a manager nowhere. `stop` says whether to
    end after a step.
    """

    def __init__(
        self,
        program: Program,
        config: TrainConfig,
        dataset: Dataset,
        log: MetricsLog,
        manager: ocp.CheckpointManager | None = None,
        stop: Callable[[int], bool] = lambda step: False,
    ) -> None:
        self.program, self.config, self.dataset = program, config, dataset
        self.log, self.manager, self.stop = log, manager, stop
        self._seconds = self._started = self._warm_up_seconds = 0.0
        self._first_step = 0
        self._pending = collections.deque[tuple[int, StepNumbers]]()
        self._learning_rates = np.asarray(jax.vmap(learning_rate_schedule(config))(np.arange(config.steps)))

    def run(self) -> int:
        """Trains to the last step, or until it is to stop; what was done is saved. Returns the steps taken in all.

        Raises:
            UsageError: if the newest checkpoint is of another text.
            RunError: if the loss is not finite.
        """
        head, steps = self.program.head, self.config.steps
        manager, program = self.manager, self.program
        step = (manager.latest_step() or 0) if manager else 0
        like, seed = program.abstract_state, self.config.seed
        state = restore(manager, step, like, self.dataset) if manager and step else program.initial_state(seed)
        self.log.rewind(head, step)
        self._first_step = step
        # Lines in a log file are for looking at later: few of them.
        with tqdm(total=steps, initial=step, desc=head, unit="step", dynamic_ncols=True) as bar:
            bar.mininterval = 0.2 if bar.fp.isatty() else 10.0
            step, state = self._train(step, state, bar)
        if step < steps:
            return step
        numbers = {
            "validation_loss": self._validated(step, state.params),
            "unigram_entropy": self.dataset.unigram_entropy,
            "tokens_per_second": self._tokens_per_second(steps),
            "peak_bytes": peak_bytes(),
            **self.program.facts,
        }
        # JSON has no NaN, which stands for the speed of a session that had nothing left to train but its warm-up.
        self.log.write("summary", head, steps, **{k: number for k, number in numbers.items() if not math.isnan(number)})
        return step

    def _train(self, step: int, state: TrainState, bar: "tqdm[Any]") -> tuple[int, TrainState]:
        config = self.config
        self._started = time.perf_counter()
        with contextlib.closing(made_ahead(self._batch, range(step, config.steps), _AHEAD)) as batches:
            for rows in batches:
                state, numbers = self.program.train(state, rows)
                step += 1
                for number in numbers:
                    number.copy_to_host_async()
                self._pending.append((step, numbers))
                stops, warm = self.stop(step), step - self._first_step == WARM_UP
                saves = stops or step == config.steps or step % config.checkpoint_every == 0
                validates = step < config.steps and step % config.validate_every == 0
                pauses = saves or validates or warm
                while self._pending and (pauses or len(self._pending) > _LATE):
                    self._record(*self._pending.popleft(), bar)
                if not pauses:
                    continue
                self._pause_clock()
                if warm:
                    self._warm_up_seconds = self._seconds
                if validates:
                    self._validated(step, state.params)
                if saves and self.manager is not None:
                    save(self.manager, step, state, self.dataset)
                if stops:
                    break
                self._started = time.perf_counter()
        return step, state

    def _batch(self, step: int) -> jax.Array:
        rows = packing.training_batch(self.dataset.training, self.config.seed, step, self.config.batch_size)
        return self.program.placed(rows)

    def _validated(self, step: int, params: Params) -> float:
        """The mean loss over all counted labels of the validation rows, nats a token, recorded."""
        loss = packing.mean_loss(
            self.dataset, self.config.batch_size, lambda rows: self.program.validate(params, self.program.placed(rows))
        )
        self.log.write("validation", self.program.head, step, loss=loss)
        return loss

    def _record(self, step: int, numbers: StepNumbers, bar: "tqdm[Any]") -> None:
        loss, gradient_norm = float(numbers.loss), float(numbers.gradient_norm)
        if not (math.isfinite(loss) and math.isfinite(gradient_norm)):
            raise RunError(f"the loss became {loss} at step {step}; lower --learning-rate, or resume before it")
        self._pause_clock()
        rate, seconds = float(self._learning_rates[step - 1]), round(self._seconds, 4)
        numbers_of_step = {"loss": loss, "gradient_norm": gradient_norm, "learning_rate": rate, "seconds": seconds}
        self.log.write("train", self.program.head, step, **numbers_of_step)
        speed, peak = self._tokens_per_second(step), as_text(peak_bytes())
        shown = {} if math.isnan(speed) else {"tokens/s": f"{speed:,.0f}"}
        bar.set_postfix({"loss": f"{loss:.3f}", **shown, "peak": peak}, refresh=False)
        bar.update()

    def _pause_clock(self) -> None:
        now = time.perf_counter()
        self._seconds += now - self._started
        self._started = now

    def _tokens_per_second(self, step: int) -> float:
        """Of the steps after the warm-up; NaN where there is none."""
        tokens = (step - self._first_step - WARM_UP) * self.config.batch_size * self.config.sequence_length
        return tokens / (self._seconds - self._warm_up_seconds) if self._warm_up_seconds and tokens > 0 else math.nan
