"""Training one loss head: step, record, validate, save, and stop when asked to."""

import dataclasses
import math
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from tqdm import tqdm

from experiments.lm.config import TrainConfig, refuse_changes
from experiments.lm.data import packing
from experiments.lm.data.packing import Dataset
from experiments.lm.errors import RunError, Stopped, UsageError
from experiments.lm.model.optimizer import learning_rate_schedule
from experiments.lm.model.program import Params, Program, StepNumbers, TrainState
from experiments.lm.run import memory
from experiments.lm.run.checkpoint import Checkpoints
from experiments.lm.run.metrics import MetricsLog


@dataclasses.dataclass(frozen=True)
class Result:
    """What a finished training gave.

    Attributes:
        validation_loss: over all validation rows after the last step, nats a token.
        steps_taken: training steps since the start or the resumption.
        tokens_per_second: of those steps; NaN where all of them had been taken before.
        peak_bytes: see `memory.peak_bytes`.
    """

    validation_loss: float
    steps_taken: int
    tokens_per_second: float
    peak_bytes: int


class Trainer:
    """One loss head's training on one dataset.

    Args:
        program: the compiled steps.
        config: the run's configuration.
        dataset: the rows to train and to validate on.
        checkpoints: where the state is saved.
        log: where numbers are recorded.
        stop_signal: asked after every step; a signal's number ends the training.
        budget: end after so many steps.
    """

    def __init__(
        self,
        program: Program,
        config: TrainConfig,
        dataset: Dataset,
        checkpoints: Checkpoints[TrainState],
        log: MetricsLog,
        stop_signal: Callable[[], int | None],
        budget: float = math.inf,
    ) -> None:
        self.program = program
        self.config = config
        self.dataset = dataset
        self.checkpoints = checkpoints
        self.log = log
        self.stop_signal = stop_signal
        self.budget = budget
        self._seconds = 0.0
        self._started = 0.0
        self._first_step = 0
        self._learning_rates = np.asarray(jax.vmap(learning_rate_schedule(config))(np.arange(config.steps)))

    def run(self, resume: bool) -> Result:
        """Trains to the last step and validates.

        Args:
            resume: go on from the newest checkpoint, where there is one.

        Raises:
            UsageError: if the checkpoint does not fit this run.
            RunError: if the loss is not finite.
            Stopped: if the training was ended early; what was done is saved.
        """
        step, state = self._restore() if resume else (0, self.program.initial_state(self.config.seed))
        self.log.rewind(self.program.head, step)
        self._first_step = step
        steps = self.config.steps
        # Lines in a log file are for looking at later: few of them.
        with tqdm(total=steps, initial=step, desc=self.program.head, unit="step", dynamic_ncols=True) as bar:
            bar.mininterval = 0.2 if bar.fp.isatty() else 10.0
            validation_loss = self._train(step, state, bar)
        return Result(validation_loss, steps - step, self._tokens_per_second(steps), memory.peak_bytes())

    def _train(self, step: int, state: TrainState, bar: "tqdm[Any]") -> float:
        pending: StepNumbers | None = None
        validation_loss: float | None = None
        self._started = time.perf_counter()
        while step < self.config.steps:
            batch = packing.training_batch(self.dataset.training, self.config.seed, step, self.config.batch_size)
            state, numbers = self.program.train(state, batch)
            if pending is not None:
                self._record(step, pending, bar)  # While the device works on the next step.
            pending, step = numbers, step + 1
            last = step == self.config.steps
            stopped = self._stop_reason(step)
            validates = last or step % self.config.validate_every == 0
            saves = last or step % self.config.checkpoint_every == 0 or stopped is not None
            if not (validates or saves):
                continue
            self._record(step, pending, bar)
            pending = None
            self._pause_clock()
            if validates:
                validation_loss = self.validate(state.params)
                self.log.write("validation", self.program.head, step, loss=validation_loss)
            if saves:
                self.checkpoints.save(step, state, self._description())
            if stopped is not None and not last:
                raise Stopped(
                    f"stopped after step {step} of {self.config.steps}; everything up to it is saved", stopped
                )
            self._started = time.perf_counter()
        if validation_loss is None:  # Resumed after the last step.
            validation_loss = self.validate(state.params)
            self.log.write("validation", self.program.head, step, loss=validation_loss)
        return validation_loss

    def validate(self, params: Params) -> float:
        """The mean loss over all counted labels of the validation rows, nats a token."""
        end_of_text = self.dataset.end_of_text
        batches = packing.validation_batches(self.dataset.validation, self.config.batch_size, end_of_text)
        losses = [self.program.validate(params, batch) for batch in batches]
        counts = [packing.counted_labels(batch, end_of_text) for batch in batches]
        return math.fsum(float(loss) * count for loss, count in zip(losses, counts, strict=True)) / sum(counts)

    def _record(self, step: int, numbers: StepNumbers, bar: "tqdm[Any]") -> None:
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
        shown = {
            "loss": f"{loss:.3f}",
            "tokens/s": f"{self._tokens_per_second(step):,.0f}",
            "peak": memory.as_text(memory.peak_bytes()),
        }
        bar.set_postfix(shown, refresh=False)
        bar.update()

    def _pause_clock(self) -> None:
        now = time.perf_counter()
        self._seconds += now - self._started
        self._started = now

    def _tokens_per_second(self, step: int) -> float:
        tokens = (step - self._first_step) * self.config.batch_size * self.config.sequence_length
        return tokens / self._seconds if self._seconds and tokens else math.nan

    def _stop_reason(self, step: int) -> int | None:
        """The exit code to stop with after this step, or None to go on."""
        number = self.stop_signal()
        if number is not None:
            return 128 + number
        return 0 if step - self._first_step >= self.budget else None

    def _description(self) -> dict[str, Any]:
        return {"config": dataclasses.asdict(self.config), "text": self.dataset.digest}

    def _restore(self) -> tuple[int, TrainState]:
        steps = self.checkpoints.steps()
        if not steps:
            return 0, self.program.initial_state(self.config.seed)
        description = self.checkpoints.description(steps[-1])
        refuse_changes(description["config"], self.config, f"the checkpoint in {self.checkpoints.folder}")
        if description["text"] != self.dataset.digest:
            raise UsageError(
                f"the text is not the one that the checkpoint in {self.checkpoints.folder} was trained on; "
                "resume with the same text or start a new run"
            )
        return steps[-1], self.checkpoints.restore(steps[-1], self.program.abstract_state)
