"""The GRPO experiment on a smaller task: it learns, and both ways of making log-probabilities agree."""

import json
from pathlib import Path
from typing import Any

import jax
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
    after: list[Any] = []
    for head in grpo.HEADS:
        loop = grpo.Loop(SMALL, head)
        state = loop.initial_state(0)
        rollout = jax.jit(loop.sample)(state.params, state.params, jax.random.key(1))
        gradient_step = jax.jit(loop.update)(state, rollout)
        after.append((rollout._replace(tokens=rollout.tokens.astype(float)), gradient_step[1]))
    for ours, theirs in zip(*(jax.tree.leaves(x) for x in after), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-5)


def test_answers_stop_counting_at_their_end_and_rewards_are_shares() -> None:
    loop = grpo.Loop(grpo.Config(vocabulary=257, prompts=2, group=64, length=6, width=16), "streamed")
    state = loop.initial_state(0)
    rollout = jax.jit(loop.sample)(state.params, state.params, jax.random.key(0))
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


def test_without_stored_logits_the_update_takes_less_memory_at_a_large_vocabulary() -> None:
    config = grpo.Config(vocabulary=8192, prompts=4, group=4, length=64, width=16)
    assert grpo.update_bytes(config, "streamed") < grpo.update_bytes(config, "stored") / 4


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
    assert memory["streamed"][-1] < memory["stored"][-1] / 50
