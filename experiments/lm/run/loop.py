"""Training one loss head: step, record, validate, save, and stop when asked to.

The device always has its next steps before it: their batches are there, and a step's numbers are read when those after
it have been launched. Only validations, checkpoints and the end of the warm-up wait for all of them.
"""

import collections
import contextlib
import dataclasses
import math
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from tqdm import tqdm

from experiments.lm.config import TrainConfig, refuse_changes
from experiments.lm.data import packing
from experiments.lm.data.ahead import made_ahead
from experiments.lm.data.packing import Dataset
from experiments.lm.errors import RunError, Stopped, UsageError
from experiments.lm.model.optimizer import learning_rate_schedule
from experiments.lm.model.program import Params, Program, StepNumbers, TrainState
from experiments.lm.run import memory
from experiments.lm.run.checkpoint import Checkpoints
from experiments.lm.run.metrics import MetricsLog

# A step's numbers are read when so many more have been launched: what the host does in the meantime costs nothing.
_LATE = 3

# Batches made ahead. A GPU's copy may wait for the steps launched before it, and the launch that needs it for the copy:
# a batch is to be on its way before any step is launched that may still be at work when the batch is needed.
_AHEAD = _LATE + 2

# Steps after a start that do not count as its speed: an accelerator loads kernels and captures graphs in them.
WARM_UP = 3


@dataclasses.dataclass
class Trainer:
    """One loss head's training on one dataset.

    Attributes:
        program: the compiled steps.
        config: the run's configuration.
        dataset: the rows to train and to validate on.
        checkpoints: where the state is saved.
        log: where numbers are recorded.
        stop_signal: called after every step; what it returns is called when the step's numbers are read, and gives a
            signal's number, which ends the training, or 0.
        budget: end after so many steps.
    """

    program: Program
    config: TrainConfig
    dataset: Dataset
    checkpoints: Checkpoints[TrainState]
    log: MetricsLog
    stop_signal: Callable[[], Callable[[], int]]
    budget: float = math.inf

    def __post_init__(self) -> None:
        self._seconds = self._started = self._warm_up_seconds = 0.0
        self._first_step = 0
        self._signal = 0
        self._pending = collections.deque[tuple[int, StepNumbers, Callable[[], int]]]()
        self._learning_rates = np.asarray(jax.vmap(learning_rate_schedule(self.config))(np.arange(self.config.steps)))

    def run(self, resume: bool) -> int:
        """Trains to the last step, validates and records the summary; returns how many steps that took.

        Args:
            resume: go on from the newest checkpoint, where there is one.

        Raises:
            UsageError: if the checkpoint does not fit this run.
            RunError: if the loss is not finite.
            Stopped: if the training was ended early; what was done is saved.
        """
        head, steps = self.program.head, self.config.steps
        step, state = self._restore() if resume else (0, self.program.initial_state(self.config.seed))
        self.log.rewind(head, step)
        self._first_step = step
        # Lines in a log file are for looking at later: few of them.
        with tqdm(total=steps, initial=step, desc=head, unit="step", dynamic_ncols=True) as bar:
            bar.mininterval = 0.2 if bar.fp.isatty() else 10.0
            validation_loss = self._train(step, state, bar)
        numbers = {
            "validation_loss": validation_loss,
            "unigram_entropy": self.dataset.unigram_entropy,
            "tokens_per_second": self._tokens_per_second(steps),
            "peak_bytes": memory.peak_bytes(),
            **self.program.facts,
        }
        # JSON has no NaN, which stands for the speed of a session that had nothing left to train but its warm-up.
        self.log.write("summary", head, steps, **{k: number for k, number in numbers.items() if not math.isnan(number)})
        return steps - step

    def _train(self, step: int, state: TrainState, bar: "tqdm[Any]") -> float:
        validation_loss: float | None = None
        self._started = time.perf_counter()
        with contextlib.closing(made_ahead(self._batch, range(step, self.config.steps), _AHEAD)) as batches:
            for rows in batches:
                state, numbers = self.program.train(state, rows)
                step += 1
                for number in numbers:
                    number.copy_to_host_async()
                self._pending.append((step, numbers, self.stop_signal()))
                if len(self._pending) > _LATE:
                    self._record(*self._pending.popleft(), bar)
                last, warm = step == self.config.steps, step - self._first_step == WARM_UP
                validates = last or step % self.config.validate_every == 0
                saves = last or step % self.config.checkpoint_every == 0
                if not (validates or saves or warm or self._exit_code(step) is not None):
                    continue
                while self._pending:
                    self._record(*self._pending.popleft(), bar)
                self._pause_clock()
                if warm:
                    self._warm_up_seconds = self._seconds
                exit_code = self._exit_code(step)
                if validates:
                    validation_loss = self._validated(step, state.params)
                if saves or exit_code is not None:
                    self.checkpoints.save(step, state, self._description())
                if exit_code is not None and not last:
                    done = f"stopped after step {step} of {self.config.steps}; everything up to it is saved"
                    raise Stopped(done, exit_code)
                self._started = time.perf_counter()
        # Without a loss it was resumed after the last step.
        return self._validated(step, state.params) if validation_loss is None else validation_loss

    def _batch(self, step: int) -> jax.Array:
        rows = packing.training_batch(self.dataset.training, self.config.seed, step, self.config.batch_size)
        return self.program.placed(rows)

    def _validated(self, step: int, params: Params) -> float:
        """The mean loss over all counted labels of the validation rows, nats a token, recorded."""
        end_of_text = self.dataset.end_of_text
        batches = packing.validation_batches(self.dataset.validation, self.config.batch_size, end_of_text)
        losses = [self.program.validate(params, self.program.placed(batch)) for batch in batches]
        counts = [packing.counted_labels(batch, end_of_text) for batch in batches]
        loss = math.fsum(float(loss) * count for loss, count in zip(losses, counts, strict=True)) / sum(counts)
        self.log.write("validation", self.program.head, step, loss=loss)
        return loss

    def _record(self, step: int, numbers: StepNumbers, signal: Callable[[], int], bar: "tqdm[Any]") -> None:
        self._signal = self._signal or signal()
        loss, gradient_norm = float(numbers.loss), float(numbers.gradient_norm)
        if not (math.isfinite(loss) and math.isfinite(gradient_norm)):
            saved = self.checkpoints.steps()
            kept = f"the checkpoint of step {saved[-1]} is kept" if saved else "no checkpoint had been saved yet"
            raise RunError(f"the loss became {loss} at step {step}; lower --learning-rate ({kept})")
        self._pause_clock()
        self.log.write(
            "train",
            self.program.head,
            step,
            loss=loss,
            gradient_norm=gradient_norm,
            learning_rate=float(self._learning_rates[step - 1]),
            seconds=round(self._seconds, 4),
        )
        speed, peak = self._tokens_per_second(step), memory.as_text(memory.peak_bytes())
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

    def _exit_code(self, step: int) -> int | None:
        """What to stop with after this step, or None to go on."""
        if self._signal:
            return 128 + self._signal
        return 0 if step - self._first_step >= self.budget else None

    def _description(self) -> dict[str, Any]:
        return {"config": dataclasses.asdict(self.config), "text": self.dataset.digest}

    def _restore(self) -> tuple[int, TrainState]:
        steps = self.checkpoints.steps()
        if not steps:
            tqdm.write(f"--resume: no checkpoint in {self.checkpoints.folder}, so it starts at step 0", file=sys.stderr)
            return 0, self.program.initial_state(self.config.seed)
        description = self.checkpoints.description(steps[-1])
        refuse_changes(description["config"], self.config, f"the checkpoint in {self.checkpoints.folder}")
        if description["text"] != self.dataset.digest:
            raise UsageError(
                f"the text is not the one that the checkpoint in {self.checkpoints.folder} was trained on; "
                "resume with the same text or start a new run"
            )
        return steps[-1], self.checkpoints.restore(steps[-1], self.program.abstract_state)
