"""Trains a tiny language model by rewards, and compares memory with and without logits: `python -m experiments.grpo`.

Group-relative policy optimisation: sample a group of answers to each prompt, reward them, update. The task is to answer
a prompt p with tokens whose id is p modulo the number of prompts; the reward is the share of an answer's places that
do. An untrained model earns about one in as many as there are prompts.

Writes rewards, and the temporary memory of an update and of sampling, with the head streamed (`linear_log_probs`,
`linear_sample`) and with stored logits, to `experiments/results/grpo.json`, and draws `grpo.png` beside it from that
file. `--plot-only` just draws.
"""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from matplotlib.figure import Figure

from experiments.bench.results import describe
from experiments.bench.timing import temporary_mib
from experiments.command_line import command, parser_of, positive, read_record, save_figure, write_record
from experiments.lm.config import TrainConfig
from experiments.lm.model.objective import kernel
from experiments.lm.model.program import Params, TrainState
from experiments.lm.model.transformer import LanguageModel, Transformer
from pallas_ce import LogProbs, PolicyMetrics, group_advantages, linear_log_probs, linear_sample, policy_loss

RESULTS = Path(__file__).parent / "results" / "grpo.json"
VOCABULARIES = [2048, 8192, 32768, 131072]
MEMORY_SHAPE = {"prompts": 8, "group": 4, "length": 128}  # 4096 tokens
END = 0  # the token that ends an answer
REPORTED = ("reward", "kl", "entropy", "clipped")


@dataclass(frozen=True)
class Config:
    """Task, model and training.

    Attributes:
        vocabulary: V.
        prompts: how many prompts there are; each is answered in every iteration.
        group: answers to each prompt.
        length: most tokens of an answer.
        width: features of the hidden states.
        iterations: how often answers are sampled.
        epochs: updates on each set of answers; from the second on they are off-policy, and clipping matters.
        learning_rate: of Adam.
        clip_norm: of the gradient: the KL estimate e^d - d - 1 grows without bound for tokens that the initial model
            finds unlikely.
        kl_coefficient: of the penalty for leaving the initial model.
        temperature: answers are drawn from, and trained in, the distribution at this temperature.
    """

    vocabulary: int = 512
    prompts: int = 4
    group: int = 32
    length: int = 8
    width: int = 32
    iterations: int = 60
    epochs: int = 2
    learning_rate: float = 1e-2
    clip_norm: float = 1.0
    kl_coefficient: float = 1e-3
    temperature: float = 0.9


class Rollout(NamedTuple):
    """Sampled sequences and what is known of them; B of them, the answers to one prompt next to each other.

    Attributes:
        tokens: int `[B, 1 + length]`, the prompt and its answer.
        mask: bool `[B, length]`, the answer's tokens, the one that ends it included.
        rewards: `[B]`.
        old_log_probs: `[B, length]`, under the policy that sampled.
        ref_log_probs: `[B, length]`, under the initial one.
    """

    tokens: jax.Array
    mask: jax.Array
    rewards: jax.Array
    old_log_probs: jax.Array
    ref_log_probs: jax.Array


class Iteration(NamedTuple):
    """What an iteration is given and gives up.

    Attributes:
        state: of training.
        number: int32, of the iteration.
        history: `[iterations]` of each of REPORTED. It stays on the device until all have run: to fetch numbers as they
            come, even without waiting for them, takes the host a quarter of so short an iteration.
    """

    state: TrainState
    number: jax.Array
    history: dict[str, jax.Array]


class Streamed:
    """From hidden states to tokens and their probabilities at a temperature, without logits."""

    @staticmethod
    def log_probs(hidden: jax.Array, kernel: jax.Array, labels: jax.Array, temperature: float) -> LogProbs:
        """Of labels, with entropies."""
        return linear_log_probs(hidden, kernel, labels, vocab_axis=1, temperature=temperature, return_entropy=True)

    @staticmethod
    def sample(key: jax.Array, hidden: jax.Array, kernel: jax.Array, temperature: float) -> jax.Array:
        """A token for each row."""
        return linear_sample(key, hidden, kernel, vocab_axis=1, temperature=temperature).ids


class Stored:
    """The same with stored logits."""

    @staticmethod
    def log_probs(hidden: jax.Array, kernel: jax.Array, labels: jax.Array, temperature: float) -> LogProbs:
        """Of labels, with entropies."""
        log_p = jax.nn.log_softmax(hidden @ kernel / temperature)
        counts = labels >= 0
        chosen = jnp.take_along_axis(log_p, jnp.where(counts, labels, 0)[..., None], axis=-1)[..., 0]
        entropy = -jnp.sum(jnp.exp(log_p) * log_p, axis=-1)
        return LogProbs(jnp.where(counts, chosen, 0.0), jnp.where(counts, entropy, 0.0))

    @staticmethod
    def sample(key: jax.Array, hidden: jax.Array, kernel: jax.Array, temperature: float) -> jax.Array:
        """A token for each row."""
        return jax.random.categorical(key, hidden @ kernel / temperature)


HEADS: dict[str, type[Streamed | Stored]] = {"streamed": Streamed, "stored": Stored}


class Loop:
    """The parts of an iteration, for one kind of head."""

    def __init__(self, config: Config, head: str) -> None:
        self.config = config
        self.head = HEADS[head]
        self.optimizer = optax.chain(optax.clip_by_global_norm(config.clip_norm), optax.adam(config.learning_rate))
        self.graph = nnx.graphdef(nnx.eval_shape(self._model, 0))
        self.launch = jax.jit(self.iterate, donate_argnums=0)

    def _model(self, seed: int) -> LanguageModel:
        v, size = self.config.vocabulary, self.config.width
        shape = TrainConfig(vocab_size=v, width=size, layers=1, attention_heads=2, mlp_width=2 * size)
        return LanguageModel(shape, -1, rngs=nnx.Rngs(jax.random.key(seed)))

    def _merged(self, params: Params) -> tuple[Transformer, jax.Array]:
        """The body, and the head's kernel."""
        model: LanguageModel = nnx.merge(self.graph, params)
        return model.body, kernel(model)

    def initial_state(self, seed: int) -> TrainState:
        """A model that knows nothing."""
        params = nnx.state(self._model(seed), nnx.Param)
        return TrainState(params, self.optimizer.init(params))

    def log_probs(self, params: Params, tokens: jax.Array, mask: jax.Array) -> LogProbs:
        """Of the answers' tokens `[B, length]`; those behind an answer's end are ignored."""
        body, kernel = self._merged(params)
        labels = jnp.where(mask, tokens[:, 1:], -100)
        return self.head.log_probs(body(tokens[:, :-1]), kernel, labels, self.config.temperature)

    def sample(self, params: Params, key: jax.Array) -> jax.Array:
        """Prompts and sampled answers `[B, 1 + length]`, place by place."""
        config = self.config
        body, kernel = self._merged(params)
        prompts = jnp.repeat(jnp.arange(config.prompts), config.group)
        blank = jnp.zeros((prompts.size, 1 + config.length), jnp.int32).at[:, 0].set(prompts)

        def extend(place: jax.Array, tokens: jax.Array) -> jax.Array:
            hidden = body(tokens[:, :-1])[:, place]
            drawn = self.head.sample(jax.random.fold_in(key, place), hidden, kernel, config.temperature)
            return tokens.at[:, place + 1].set(drawn)

        return jax.lax.fori_loop(0, config.length, extend, blank)

    def judge(self, params: Params, initial: Params, tokens: jax.Array) -> Rollout:
        """Rewards what `params` sampled, and finds its log-probabilities."""
        config = self.config
        prompts, answers = tokens[:, 0], tokens[:, 1:]
        ends = (answers == END).astype(jnp.int32)
        mask = jnp.cumsum(ends, axis=1) - ends == 0
        right = mask & (answers % config.prompts == prompts[:, None]) & (answers != END)
        rewards = jnp.mean(right.astype(jnp.float32), axis=1)
        old, ref = (self.log_probs(p, tokens, mask).log_probs for p in (params, initial))
        return Rollout(tokens, mask, rewards, old, ref)

    def update(self, state: TrainState, rollout: Rollout) -> tuple[TrainState, PolicyMetrics]:
        """One step of GRPO."""
        advantages = group_advantages(rollout.rewards, self.config.group)

        def loss(params: Params) -> tuple[jax.Array, PolicyMetrics]:
            found = self.log_probs(params, rollout.tokens, rollout.mask)
            value, metrics = policy_loss(
                found.log_probs,
                advantages,
                rollout.mask,
                old_log_probs=rollout.old_log_probs,
                ref_log_probs=rollout.ref_log_probs,
                entropy=found.entropy,
                kl_coefficient=self.config.kl_coefficient,
                aggregation="sequence_mean",
                return_metrics=True,
            )
            return value, metrics

        gradients, metrics = jax.grad(loss, has_aux=True)(state.params)
        updates, optimizer = self.optimizer.update(gradients, state.optimizer, state.params)
        return TrainState(optax.apply_updates(state.params, updates), optimizer), metrics

    def iterate(self, given: Iteration, initial: Params, key: jax.Array) -> Iteration:
        """Samples, judges and updates: one program, after which the host has nothing to do but launch the next."""
        state, number, history = given
        tokens = self.sample(state.params, jax.random.fold_in(key, number))
        rollout = self.judge(state.params, initial, tokens)
        for _ in range(self.config.epochs):
            state, metrics = self.update(state, rollout)
        clipped = metrics.clipped_low + metrics.clipped_high
        reward = jnp.mean(rollout.rewards)
        found = {"reward": reward, "kl": metrics.kl, "entropy": metrics.entropy, "clipped": clipped}
        history = jax.tree.map(lambda values, value: values.at[number].set(value), history, found)
        return Iteration(state, number + 1, history)

    def start(self, seed: int) -> tuple[Iteration, Params, jax.Array]:
        """What the first iteration is given."""
        history = {name: jnp.zeros(self.config.iterations) for name in REPORTED}
        # The initial parameters are arrays of their own: the state's are given up.
        initial = self.initial_state(seed).params
        return Iteration(self.initial_state(seed), jnp.int32(0), history), initial, jax.random.key(seed)

    def run(self, given: Iteration, initial: Params, key: jax.Array) -> dict[str, list[float]]:
        """Launches all iterations; returns their numbers."""
        for _ in range(self.config.iterations):
            given = self.launch(given, initial, key)
        return {name: values.tolist() for name, values in jax.device_get(given.history).items()}


def train(config: Config, head: str = "streamed", seed: int = 0) -> dict[str, list[float]]:
    """Runs the loop; returns each iteration's mean reward, and after its updates KL, entropy and clipped share."""
    loop = Loop(config, head)
    return loop.run(*loop.start(seed))


def memory(config: Config, head: str) -> dict[str, float]:
    """Temporary MiB of an update and of sampling, as the compiler planned it."""
    loop = Loop(config, head)
    key = jax.eval_shape(lambda: jax.random.key(0))
    state = jax.eval_shape(loop.initial_state, 0)
    tokens = jax.eval_shape(loop.sample, state.params, key)
    rollout = jax.eval_shape(loop.judge, state.params, state.params, tokens)
    return {
        "update": temporary_mib(jax.jit(loop.update).lower(state, rollout).compile()),
        "sampling": temporary_mib(jax.jit(loop.sample).lower(state.params, key).compile()),
    }


def measure_memory(vocabularies: list[int]) -> dict[str, Any]:
    """MiB of an update and of sampling for each head and vocabulary."""
    mib: dict[str, dict[str, list[float]]] = {step: {head: [] for head in HEADS} for step in ("update", "sampling")}
    for head in HEADS:
        for vocabulary in vocabularies:
            for step, found in memory(Config(vocabulary=vocabulary, **MEMORY_SHAPE), head).items():
                mib[step][head].append(found)
    return {"shape": MEMORY_SHAPE, "vocabulary": vocabularies, "temporary_mib": mib}


def plot(record: dict[str, Any], path: Path) -> None:
    """Draws what a result file holds."""
    figure = Figure(figsize=(10, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    left.plot(record["training"]["reward"], color="tab:blue")
    left.axhline(1 / record["config"]["prompts"], color="grey", linestyle=":", label="chance")
    left.set(xlabel="iteration", ylabel="mean reward", ylim=(0, 1))
    memory = record["memory"]
    for (step, heads), line in zip(memory["temporary_mib"].items(), ("o-", "s--"), strict=True):
        for (head, mib), colour in zip(heads.items(), ("tab:blue", "tab:orange"), strict=True):
            right.plot(memory["vocabulary"], mib, line, color=colour, label=f"{step}, {head}")
    right.set(xlabel="vocabulary", ylabel="temporary memory (MiB)", xscale="log", yscale="log")
    for axes in (left, right):
        axes.grid(alpha=0.3)
        axes.legend()
    save_figure(figure, path)


def main(words: list[str] | None = None) -> None:
    """Trains, measures, writes and draws."""
    parser = parser_of(__doc__)
    parser.add_argument("--iterations", type=positive, default=Config.iterations)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--vocabularies", type=positive, nargs="+", default=VOCABULARIES, help="for the memory")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--plot-only", action="store_true", help="draw what --out holds")
    options = parser.parse_args(words)
    if not options.plot_only:
        config = Config(iterations=options.iterations)
        history = train(config, seed=options.seed)
        print(f"reward {history['reward'][0]:.3f} -> {history['reward'][-1]:.3f} in {config.iterations} iterations")
        memory = measure_memory(options.vocabularies)
        for step, mib in memory["temporary_mib"].items():
            for vocabulary, ours, theirs in zip(options.vocabularies, mib["streamed"], mib["stored"], strict=True):
                shown = f"{ours:.1f} MiB streamed, {theirs:.1f} stored, ratio {ours / theirs:.3f}"
                print(f"V {vocabulary}, {step}: {shown}")
        made = {"command": command("grpo", words), **describe()}
        write_record(options.out, {**made, "config": asdict(config), "training": history, "memory": memory})
    plot(read_record(parser, options.out), options.out.with_suffix(".png"))


if __name__ == "__main__":
    main()
