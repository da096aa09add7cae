"""The GRPO experiment on a smaller task: it learns, and both kinds of head agree."""

import json
import math
import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments import grpo

SMALL = grpo.Config(vocabulary=257, prompts=2, group=16, length=4, width=16, iterations=40)
ROOT = Path(__file__).parents[2]


def test_the_reward_rises() -> None:
    history = grpo.train(SMALL)
    assert all(len(values) == SMALL.iterations for values in history.values())
    assert np.mean(history["reward"][:3]) < 0.65  # chance is a half
    assert np.mean(history["reward"][-3:]) > 0.85


def test_streamed_and_stored_log_probabilities_make_the_same_update() -> None:
    tokens: Any = None
    after: list[Any] = []
    for head in grpo.HEADS:
        loop = grpo.Loop(SMALL, head)
        state = loop.initial_state(0)
        # Each head has noise of its own: both are given what the first one sampled.
        tokens = jax.jit(loop.sample)(state.params, jax.random.key(1)) if tokens is None else tokens
        rollout = jax.jit(loop.judge)(state.params, state.params, tokens)
        gradient_step = jax.jit(loop.update)(state, rollout)
        after.append((rollout._replace(tokens=rollout.tokens.astype(float)), gradient_step[1]))
    for ours, theirs in zip(*(jax.tree.leaves(x) for x in after), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("head", grpo.HEADS)
def test_tokens_are_as_frequent_as_the_log_probabilities_say(head: str) -> None:
    rows, v, temperature = 20_000, 23, 0.6
    row, kernel = jax.random.normal(jax.random.key(0), (4,)), 0.3 * jax.random.normal(jax.random.key(1), (4, v))
    hidden = jnp.tile(row, (rows, 1))
    both = grpo.HEADS[head]
    expected = rows * jnp.exp(both.log_probs(hidden[:v], kernel, jnp.arange(v), temperature).log_probs)
    observed = jnp.bincount(both.sample(jax.random.key(2), hidden, kernel, temperature), length=v)
    # Pearson's test; the draws are the same in every run, so that a small threshold never flakes.
    assert jax.scipy.stats.chi2.sf(jnp.sum((observed - expected) ** 2 / expected), v - 1) > 1e-3


@pytest.mark.parametrize("head", grpo.HEADS)
def test_a_key_decides_the_answers(head: str) -> None:
    loop = grpo.Loop(SMALL, head)
    sample, params = jax.jit(loop.sample), loop.initial_state(0).params
    first, again, other = (np.asarray(sample(params, jax.random.key(seed))) for seed in (1, 1, 2))
    np.testing.assert_array_equal(first, again)
    np.testing.assert_array_equal(first[:, 0], np.repeat([0, 1], 16))
    assert np.mean(first[:, 1:] != other[:, 1:]) > 0.9
    # Rows and places have noise of their own.
    assert len(np.unique(first[:, 1:])) > 64


def test_only_the_stored_head_samples_from_an_array_of_rows_times_vocabulary() -> None:
    # Embedding and kernel have fewer elements too: the width is less than the 48 rows.
    config = grpo.Config(vocabulary=8192, prompts=4, group=12, length=4, width=16)
    largest = {}
    for head in grpo.HEADS:
        loop = grpo.Loop(config, head)
        params = jax.eval_shape(loop.initial_state, 0).params
        key = jax.eval_shape(lambda: jax.random.key(0))
        text = jax.jit(loop.sample).lower(params, key).compile().as_text()
        shapes = re.findall(r"\b(?:f|bf|s|u|pred)\d*\[([\d,]+)\]", text)
        largest[head] = max(math.prod(int(x) for x in shape.split(",")) for shape in shapes)
    assert largest["streamed"] < 48 * 8192 <= largest["stored"]


def test_answers_stop_counting_at_their_end_and_rewards_are_shares() -> None:
    loop = grpo.Loop(grpo.Config(vocabulary=257, prompts=2, group=64, length=6, width=16), "streamed")
    params = loop.initial_state(0).params
    rollout = jax.jit(loop.judge)(params, params, jax.jit(loop.sample)(params, jax.random.key(0)))
    answers, mask = np.asarray(rollout.tokens)[:, 1:], np.asarray(rollout.mask)
    assert not np.all(mask)
    for answer, counts, prompt, reward in zip(
        answers, mask, np.asarray(rollout.tokens)[:, 0], rollout.rewards, strict=True
    ):
        stop = next((i for i, token in enumerate(answer) if token == grpo.END), len(answer))
        np.testing.assert_array_equal(counts, np.arange(6) <= stop)
        right = sum(int(t % 2 == prompt) for t in answer[:stop])
        np.testing.assert_allclose(reward, right / 6, rtol=1e-6)
    assert np.all(np.asarray(rollout.old_log_probs)[~mask] == 0)


def test_without_stored_logits_update_and_sampling_take_less_memory_at_a_large_vocabulary() -> None:
    config = grpo.Config(vocabulary=8192, prompts=4, group=16, length=16, width=16)
    streamed, stored = (grpo.memory(config, head) for head in ("streamed", "stored"))
    assert streamed["update"] < stored["update"] / 4
    assert streamed["sampling"] < stored["sampling"] / 2


def test_the_command_writes_what_it_draws(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "grpo.json"
    grpo.main(["--iterations", "1", "--vocabularies", "257", "--out", str(out)])
    assert "in 1 iterations" in capsys.readouterr().out
    record = json.loads(out.read_text())
    assert len(record["training"]["reward"]) == 1
    picture = out.with_suffix(".png")
    drawn = picture.read_bytes()
    picture.unlink()
    grpo.main(["--plot-only", "--out", str(out)])
    assert picture.read_bytes() == drawn


def test_the_recorded_run_learned_and_its_memory_stayed_small() -> None:
    record = json.loads((ROOT / "experiments/results/grpo.json").read_text())
    reward, memory = record["training"]["reward"], record["memory"]["temporary_mib"]
    assert reward[0] < 0.35
    assert np.mean(reward[-10:]) > 0.9
    assert memory["update"]["streamed"][-1] < memory["update"]["stored"][-1] / 50
    assert memory["sampling"]["streamed"][-1] < memory["sampling"]["stored"][-1] / 5
