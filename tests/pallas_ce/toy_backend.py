"""A complete backend in the plainest arithmetic: all logits of a block of rows at once, in NumPy's operations.

It shares no computation with the other backends, so that it shows what `Backend` asks for, and that its seven functions
are all that a backend needs: the contract's tests take it like any other, as implementation "toy".
"""

from typing import Any

import jax
import jax.numpy as jnp

from pallas_ce.backends.protocol import Backend, Gradient, Mode, Plan
from pallas_ce.head import PLAIN, Batch, BatchSpec, Head, HeadSpec
from pallas_ce.statistics.row import Partial
from pallas_ce.streaming.gradient_products import BY_COLUMN, Arrays, PerInput, TileStep, WeightGradient, put_in_sums
from pallas_ce.streaming.rows import RowBlock
from pallas_ce.streaming.tiles import Tiles


class ToyBackend(Backend):
    name = "toy"

    def refusal(self, spec: HeadSpec, rows: BatchSpec = PLAIN, *, padded_share: bool = False) -> str | None:
        """Refuses nothing."""

    def minimum_scratch(self, spec: HeadSpec, mode: Mode | None) -> int:
        return spec.accumulator.itemsize * spec.vocab_size

    def plan(self, spec: HeadSpec, tokens: int, mode: Mode | None, scratch_bytes: int, spare_bytes: int = 0) -> Plan:
        rows = min(tokens, scratch_bytes // self.minimum_scratch(spec, mode))
        return Plan(rows, -(-spec.vocab_size // 2), rows * self.minimum_scratch(spec, mode), spec.vocab_size)

    def statistics(
        self, head: Head, batch: Batch, names: frozenset[str], plan: Plan, filled: jax.Array | None = None
    ) -> Partial:
        return partial(head, batch, logits(head, batch))

    def recompute(self, head: Head, batch: Batch, gradient: Gradient, plan: Plan, block: RowBlock) -> TileStep:
        whole = dlogits(head, batch, logits(head, batch), gradient)
        axis, tiles = head.spec.vocab_axis, Tiles(plan.vocab_size, plan.columns)

        def step(index: jax.Array, hidden_sum: jax.Array | None, weight_sum: WeightGradient | None) -> Arrays:
            tile = tiles.tile(index)
            part = tile.take(whole, 1) if tile.valid is None else tile.take(whole, 1) * tile.valid
            found = products(head.columns(tile.take), batch, part, gradient.needs)
            return put_in_sums(found, block, hidden_sum, weight_sum, axis)

        return step

    def stash(
        self, head: Head, batch: Batch, names: frozenset[str], plan: Plan, block: RowBlock
    ) -> tuple[Partial, jax.Array]:
        z = logits(head, batch)
        return partial(head, batch, z), z

    def stash_products(
        self, head: Head, batch: Batch, gradient: Gradient, stash: Any, sums: Arrays, plan: Plan, block: RowBlock
    ) -> tuple[Arrays, None]:
        dz = dlogits(head, batch, stash, gradient)
        existing = head.columns(lambda x, axis: jax.lax.slice_in_dim(x, 0, head.spec.vocab_size, axis=axis))
        found = products(existing, batch, dz, gradient.needs)

        def total(before: jax.Array | None, share: jax.Array | None, adds: Any = True) -> jax.Array | None:
            if before is None or share is None:
                return None
            padding = [(0, n - own) for n, own in zip(before.shape, share.shape, strict=True)]
            return (jnp.where(adds, before, 0) + jnp.pad(gradient.factor * share, padding)).astype(before.dtype)

        to = gradient.weight_sum
        weight = None if to is None else total(to.array, found.weight, to.adds)
        return found._replace(weight=weight).of(BY_COLUMN, lambda share, before: total(before, share), sums), None


def dot(head: Head, subscripts: str, a: Any, b: Any) -> jax.Array:
    wide, operands = head.spec.accumulator, (a.astype(head.spec.dtype), b.astype(head.spec.dtype))
    return jnp.einsum(subscripts, *operands, precision="highest", preferred_element_type=wide)


def with_weight(head: Head, batch: Batch) -> jax.Array:
    """`hidden·weight`, a low-rank term with it."""
    z = dot(head, "nh,vh->nv" if head.spec.vocab_axis == 0 else "nh,hv->nv", batch.hidden, head.weight)
    return z if head.up is None else z + dot(head, "nr,vr->nv", batch.low, head.up)


def logits(head: Head, batch: Batch) -> jax.Array:
    """`[n, V]`, -inf in columns that do not exist."""
    v = head.spec.vocab_size
    z = with_weight(head, batch)[:, :v]
    z = z if head.vocab_scale is None else z * head.vocab_scale[None, :v].astype(z.dtype)
    z = z if head.bias is None else z + head.bias[None, :v].astype(z.dtype)
    z = z if head.logit_scale is None else z * head.logit_scale
    z = z if head.spec.softcap is None else head.spec.softcap * jnp.tanh(z / head.spec.softcap)
    z = z if batch.inverse_temperature is None else z * batch.inverse_temperature[:, None]
    return z if head.valid_columns is None else jnp.where(jnp.arange(v)[None, :] < head.valid_columns, z, -jnp.inf)


def hits(labels: jax.Array, v: int) -> jax.Array:
    """`[n, K, V]`, where each row's targets lie."""
    return labels.reshape(labels.shape[0], -1, 1) == jnp.arange(v)[None, None, :]


def partial(head: Head, batch: Batch, z: jax.Array) -> Partial:
    top = z.max(axis=1)
    m = jnp.where(jnp.isinf(top), 0, top)
    y = z - m[:, None]
    e = jnp.exp(y)
    total, shifted = e.sum(axis=1), jnp.where(e == 0, 0, e * y).sum(axis=1)
    mean = shifted / jnp.where(total == 0, 1, total)
    u, target = head.tile_logit_weights(0, z.shape[1])[None, :], None
    valid = True if head.valid_columns is None else jnp.arange(z.shape[1])[None, :] < head.valid_columns
    if batch.labels is not None:
        target = jnp.where(hits(batch.labels, z.shape[1]), z[:, None, :], 0).sum(axis=2).reshape(batch.labels.shape)
    return Partial(
        jnp.where(jnp.isnan(total), jnp.nan, top), total, shifted, sum_exp_sq=(e * e).sum(axis=1),
        target_logit=target,
        weighted_sum=jnp.where((u != 0) & valid, u * y, 0).sum(axis=1),
        sum_weights=jnp.broadcast_to(jnp.where(valid, u, 0).sum(), top.shape),
        argmax=z.argmax(axis=1).astype(jnp.int32),
        sum_exp_deviation_sq=jnp.where(e == 0, 0, e * (y - mean[:, None]) ** 2).sum(axis=1),
    )  # fmt: skip


def dlogits(head: Head, batch: Batch, z: jax.Array, gradient: Gradient) -> jax.Array:
    """`[n, V]`, before scale and normalisation."""
    (c, top, argmax), dz, v = gradient[:3], jnp.zeros_like(z), z.shape[1]
    if c.prob is not None and top is not None:
        log_p = z - jnp.where(jnp.isneginf(top), 0, top)[:, None]
        p = jnp.exp(log_p)
        log_p = jnp.where(p == 0, 0, log_p)
        factors = [(c.prob, 1.0), (c.prob_log_prob, log_p), (c.prob_sq, p)]
        if c.prob_deviation_sq is not None and c.entropy is not None:
            factors.append((c.prob_deviation_sq, (log_p + c.entropy[:, None]) ** 2))
        dz += sum(p * given[:, None] * factor for given, factor in factors if given is not None)
    for given, places in ((c.target, batch.labels), (c.argmax, argmax)):
        if given is not None and places is not None:
            dz += jnp.where(hits(places, v), given.reshape(len(given), -1, 1), 0).sum(axis=1)
    if c.logit_weights is not None:
        dz += c.logit_weights[:, None] * head.tile_logit_weights(0, v)[None, :]
    if head.spec.softcap is not None:
        inverse = 1.0 if batch.inverse_temperature is None else batch.inverse_temperature[:, None]
        dz *= 1 - (z / (head.spec.softcap * inverse)) ** 2
    return dz if head.valid_columns is None else jnp.where(jnp.arange(v)[None, :] < head.valid_columns, dz, 0)


def products(head: Head, batch: Batch, dz: jax.Array, needs: PerInput[bool]) -> Arrays:
    """Products of a head with the dlogits' columns."""
    for_hidden = for_weight = for_up = for_down = for_scale = None
    for_bias = dz.sum(axis=0) if needs.bias else None
    if head.vocab_scale is not None:
        for_scale = (dz * with_weight(head, batch)).sum(axis=0) if needs.vocab_scale else None
        dz = dz * head.vocab_scale.astype(dz.dtype)
    if needs.hidden:
        for_hidden = dot(head, "nv,vh->nh" if head.spec.vocab_axis == 0 else "nv,hv->nh", dz, head.weight)
    if needs.weight:
        for_weight = dot(head, "nv,nh->vh" if head.spec.vocab_axis == 0 else "nv,nh->hv", dz, batch.hidden)
    if needs.down:
        for_down = dot(head, "nv,vr->nr", dz, head.up)
    if needs.up:
        for_up = dot(head, "nv,nr->vr", dz, batch.low)
    of_term = {"up": for_up, "down": for_down, "vocab_scale": for_scale}
    return PerInput(hidden=for_hidden, weight=for_weight, bias=for_bias, logit_scale=None, **of_term)
