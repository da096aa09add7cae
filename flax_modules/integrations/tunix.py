"""Tunix's trainers: SFT, DPO and ORPO, PPO, GRPO and its variants, and distillation from logits.

A model of Tunix returns logits. Here it runs with a head that hands on what it reads, so that hidden states come out in
the logits' place, and the loss reads the head's parameters. Losses stay Tunix's own where they are made from
log-probabilities.
"""

import contextlib
import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from flax_modules.integrations import check_version
from flax_modules.nnx import LossHead
from pallas_ce import linear_distillation, linear_log_probs
from pallas_ce.api.integration import implementation_of_pair

# The version whose trainers the tests have run.
TESTED = "0.1.7"


def sft_loss(**options: Any) -> Callable[..., jax.Array]:
    """The loss of `PeftTrainer`, for its `with_loss_fn`: `trainer.with_loss_fn(tunix.sft_loss())`.

    It is the mean over the tokens that `input_mask` has, as Tunix's own. A head's adapter of qwix (LoRA) counts and is
    trained; give its `lora_scale`.

    Args:
        **options: of the `LossHead` that computes it, as `z_loss`, `implementation` or `lora_scale`.

    Returns:
        The loss function, which takes a model and the arguments that Tunix gives its own.

    Raises:
        ModuleNotFoundError: Tunix is not installed.
    """
    check_version("google-tunix", TESTED)

    # NNX differentiates no function of `**inputs`.
    def loss(
        model: Any,
        input_tokens: jax.Array,
        input_mask: jax.Array,
        positions: Any,
        attention_mask: Any,
        images: Any = None,
    ) -> jax.Array:
        hidden = _hidden(model, input_tokens, positions=positions, attention_mask=attention_mask, images=images)
        mask = input_mask.astype(jnp.float32)
        return _head(model, options)(hidden, input_tokens, shift=1, token_weights=mask)  # type: ignore[return-value]

    return loss


def patch_log_probs(**options: Any) -> None:
    """Has the losses that Tunix makes from log-probabilities use `linear_log_probs`.

    They are DPO and ORPO, PPO's policy, GRPO, DAPO, Dr. GRPO and GSPO. The log-probabilities of the old policy and the
    reference model are made in the same way. It holds for the whole process, in all that is compiled from then on: call
    it before training.

    Args:
        **options: of the head, as for `sft_loss`; a loss's own have no effect.

    Raises:
        ModuleNotFoundError: Tunix is not installed.
    """
    check_version("google-tunix", TESTED)
    from tunix.rl import algo_core, common

    def of_last(count: int, model: Any, hidden: jax.Array, tokens: jax.Array, **asked: Any) -> Any:
        """Log-probabilities of the last `count` tokens, and entropies where asked for."""
        head = _head(model, options)
        return linear_log_probs(
            hidden[:, -count - 1 : -1],
            labels=tokens[:, -count:],
            ignore_index=None,
            **asked,
            **head._options(None, "implementation", "scratch_bytes"),
        )

    def get_per_token_logps(
        model: Any, *, input_tokens: jax.Array, attn_mask: jax.Array, logits_to_keep: int, **inputs: Any
    ) -> jax.Array:
        hidden = _hidden(model, input_tokens, attention_mask=attn_mask, **inputs)
        return of_last(logits_to_keep, model, hidden, input_tokens)

    @functools.partial(jax.jit, static_argnames=("pad_id", "eos_id", "stop_gradient", "return_logits", "temperature"))
    def compute_per_token_logps(
        graphdef: Any, state: Any, *, stop_gradient: bool = True, return_logits: bool = False, temperature: float = 1.0,
        images: Any = None, **ids: Any,
    ) -> Any:  # fmt: skip
        model = nnx.merge(graphdef, state)
        tokens, positions, mask, not_padding = common.process_ids(**ids)
        segments, segmented = ids.get("segment_ids"), {}
        parameters = inspect.signature(model.__call__).parameters.values()
        if any(x.name == "segment_ids" or x.kind == x.VAR_KEYWORD for x in parameters):
            segmented = {"segment_ids": not_padding if segments is None else segments}
        hidden = _hidden(model, tokens, positions=positions, attention_mask=mask, images=images, **segmented)
        # Packed, prompts and completions are in one row, whose first token nothing predicts.
        count = ids["completion_tokens"].shape[1] - (segments is not None)
        # 0 is greedy sampling, whose log-probabilities Tunix does not temper.
        asked = {"temperature": temperature or 1.0, "return_entropy": return_logits}
        found = of_last(count, model, hidden, tokens, **asked)
        if segments is not None:
            found = jax.tree.map(lambda x: jnp.pad(x, ((0, 0), (1, 0))), found)
        if stop_gradient:
            found = jax.lax.stop_gradient(found)
        return (found.log_probs, (found.entropy,)) if return_logits else found

    # Losses of policies ask for logits only to hand them to this function; here it meets the entropies, in a tuple.
    theirs = algo_core.compute_entropy_from_logits
    common.get_per_token_logps = get_per_token_logps
    common.compute_per_token_logps = compute_per_token_logps
    algo_core.compute_entropy_from_logits = lambda logits: logits[0] if isinstance(logits, tuple) else theirs(logits)


def logit_strategy(
    student_forward_fn: Callable[..., jax.Array],
    teacher_forward_fn: Callable[..., jax.Array],
    labels_fn: Callable[..., jax.Array],
    temperature: float = 2.0,
    alpha: float = 0.5,
    **options: Any,
) -> Any:
    """A strategy for `DistillationTrainer`, as Tunix's `LogitStrategy`, which stores neither head's logits.

    On a mesh Tunix lays the teacher's weight out like a batch in each step, since it comes with one. The metrics are
    without the teacher's own loss, which would take a product more.

    Args:
        student_forward_fn: of the student and the inputs; returns the student's logits, or a slice of their rows.
        teacher_forward_fn: of the teacher and the inputs.
        labels_fn: of the inputs; returns ids `[B, T]`, where Tunix's takes one-hot rows. Ids of -100 do not count.
        temperature: of both heads in the divergence, which is multiplied by its square.
        alpha: weight of the divergence, from 0 to 1; the cross entropy has the rest.
        **options: of the heads, as for `sft_loss`.

    Returns:
        The strategy.

    Raises:
        ModuleNotFoundError: Tunix is not installed.
        ValueError: a temperature or an alpha that Tunix refuses.
    """
    check_version("google-tunix", TESTED)
    from tunix.distillation import strategies

    def hidden_of(forward: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
        def headless(model: Any, **inputs: Any) -> jax.Array:
            with _without_head(model):
                return forward(model, **inputs)

        return headless

    class Strategy(strategies.LogitStrategy):  # type: ignore[misc]
        """A strategy whose outputs are hidden states and their head, in the logits' place."""

        def get_student_outputs(self, model: Any, inputs: dict[str, Any]) -> Any:
            return super().get_student_outputs(model, inputs), _head(model, options)

        def get_teacher_outputs(self, model: Any, inputs: dict[str, Any]) -> Any:
            head = _head(model, options)._options(None)
            del head["vocab_size"]  # one vocabulary, the student's
            arrays = {f"teacher_{name}": head.pop(name) for name in ("weight", "bias")}
            self.of_teacher = {f"teacher_{name}": value for name, value in head.items()}
            return arrays | {"teacher_hidden": super().get_teacher_outputs(model, inputs)}

        def compute_eval_loss(self, student_output: Any, labels: jax.Array) -> Any:
            hidden, head = student_output
            return head(hidden, labels, normalizer=labels.size), {}

        def compute_loss(self, student_output: Any, teacher_output: Any, labels: jax.Array) -> Any:
            hidden, head = student_output
            heads = {**head._options(None, "implementation", "scratch_bytes"), **teacher_output, **self.of_teacher}
            heads["implementation"] = implementation_of_pair(heads["implementation"])
            divergence = linear_distillation(hidden, **heads, temperature=self.temperature)
            soft, (hard, _) = divergence * self.temperature**2, self.compute_eval_loss(student_output, labels)
            metrics = {"distill/soft_loss": soft, "distill/hard_loss": hard, "distill/kl_div": divergence}
            return self.alpha * soft + (1 - self.alpha) * hard, metrics

    return Strategy(hidden_of(student_forward_fn), hidden_of(teacher_forward_fn), labels_fn, temperature, alpha)


def _hidden(model: Any, tokens: jax.Array, *, images: Any = None, **inputs: Any) -> jax.Array:
    """What the model's head reads; not every model takes images."""
    if images is not None:
        inputs["images"] = images
    with _without_head(model):
        return model(tokens, cache=None, **inputs)[0]


def _head(model: Any, options: dict[str, Any]) -> LossHead:
    """The model's head with its parameters, as the model multiplies and caps."""
    cap = getattr(model, "final_logits_softcap", getattr(model.config, "final_logit_softcap", None))
    options = {"logit_softcap": cap, **options}
    if hasattr(model, "lm_head"):
        return LossHead.of(model.lm_head, **options)
    tied = model.embedder
    if hasattr(tied, "input_embedding_lora_a"):
        raise TypeError(f"the embedder of this {type(model).__name__} has an adapter, and is its head: merge it first")
    of_model = getattr(getattr(tied, "config", None), "dtype", None)
    return LossHead.of(tied.input_embedding, vocab_axis=0, **{"dtype": getattr(tied, "dtype", of_model), **options})


@contextlib.contextmanager
def _without_head(model: Any) -> Iterator[None]:
    """Meanwhile the model returns hidden states in the place of logits."""
    tied = getattr(model, "embedder", None)
    if not hasattr(model, "lm_head") and not hasattr(tied, "input_embedding"):
        raise TypeError(f"model is a {type(model).__name__}, with no lm_head and no embedder that decodes")
    head = (model, "lm_head") if hasattr(model, "lm_head") else (tied, "decode")
    changes: list[tuple[Any, str, Any]] = [(*head, lambda hidden: hidden)]
    if hasattr(model, "final_logits_softcap"):
        changes.append((model, "final_logits_softcap", None))
    elif hasattr(model.config, "final_logit_softcap"):
        changes.append((model, "config", dataclasses.replace(model.config, final_logit_softcap=None)))
    with contextlib.ExitStack() as stack:
        for owner, name, value in changes:
            own = vars(owner)  # beside NNX's bookkeeping of its attributes
            stack.callback(*((own.__setitem__, name, own[name]) if name in own else (own.pop, name)))
            own[name] = value
        yield
