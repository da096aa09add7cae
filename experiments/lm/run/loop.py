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


@dataclasses.dataclass
class Trainer:
    """One loss head's training on one dataset.

    Attributes:
        program: the compiled steps.
        config: the run's configuration.
        dataset: the rows to train and to validate on.
        checkpoints: where the state is saved.
        log: where numbers are recorded.
        stop_signal: asked after every step; a signal's number, 0 for none, ends the training.
        budget: end after so many steps.
    """

    program: Program
    config: TrainConfig
    dataset: Dataset
    checkpoints: Checkpoints[TrainState]
    log: MetricsLog
    stop_signal: Callable[[], int]
    budget: float = math.inf

    def __post_init__(self) -> None:
        self._seconds = self._started = 0.0
        self._first_step = 0
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
        # JSON has no NaN, which stands for the speed of a session that had nothing left to train.
        self.log.write("summary", head, steps, **{k: number for k, number in numbers.items() if not math.isnan(number)})
        return steps - step

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
            exit_code = self._exit_code(step)
            validates = last or step % self.config.validate_every == 0
            saves = last or step % self.config.checkpoint_every == 0 or exit_code is not None
            if not (validates or saves):
                continue
            self._record(step, pending, bar)
            pending = None
            self._pause_clock()
            if validates:
                validation_loss = self._validated(step, state.params)
            if saves:
                self.checkpoints.save(step, state, self._description())
            if exit_code is not None and not last:
                done = f"stopped after step {step} of {self.config.steps}; everything up to it is saved"
                raise Stopped(done, exit_code)
            self._started = time.perf_counter()
        # Without a loss it was resumed after the last step.
        return self._validated(step, state.params) if validation_loss is None else validation_loss

    def _validated(self, step: int, params: Params) -> float:
        """The mean loss over all counted labels of the validation rows, nats a token, recorded."""
        end_of_text = self.dataset.end_of_text
        batches = packing.validation_batches(self.dataset.validation, self.config.batch_size, end_of_text)
        losses = [self.program.validate(params, batch) for batch in batches]
        counts = [packing.counted_labels(batch, end_of_text) for batch in batches]
        loss = math.fsum(float(loss) * count for loss, count in zip(losses, counts, strict=True)) / sum(counts)
        self.log.write("validation", self.program.head, step, loss=loss)
        return loss

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
        speed, peak = f"{self._tokens_per_second(step):,.0f}", memory.as_text(memory.peak_bytes())
        bar.set_postfix({"loss": f"{loss:.3f}", "tokens/s": speed, "peak": peak}, refresh=False)
        bar.update()

    def _pause_clock(self) -> None:
        now = time.perf_counter()
        self._seconds += now - self._started
        self._started = now

    def _tokens_per_second(self, step: int) -> float:
        tokens = (step - self._first_step) * self.config.batch_size * self.config.sequence_length
        return tokens / self._seconds if self._seconds and tokens else math.nan

    def _exit_code(self, step: int) -> int | None:
        """What to stop with after this step, or None to go on."""
        if number := self.stop_signal():
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
