"""Learning-rate schedules: functions of the step alone, as multiples of `optimizer.learning_rate`.

A builder returns `shape(step)`: int32 [...] → float32 [...]. Step s makes state s + 1 with the rate
`learning_rate · shape(s)`, so a run of n steps applies shape(0) … shape(n − 1); shape(n) is the end that
it approaches. Every shape but `one_cycle` begins with the same warm-up of w steps: s / w for s < w, and the
peak, 1, at s = w. A moment is a duration ("2ep", "500st") or a share of the run (0.3).
"""

from collections.abc import Callable
from fractions import Fraction
from typing import Any, Literal

import jax
import jax.numpy as jnp

from jaxtrain.errors import UserError

Moment = str | float
Shape = Callable[[Any], jax.Array]
Curve = Callable[[jax.Array], jax.Array]
StepsOf = Callable[[str], Fraction]


def constant(warmup: Moment = "0st", *, total_steps: int, steps_of: StepsOf) -> Shape:
    """Warm-up, then 1. Raises UserError for a warm-up longer than the run, as all do."""
    return _warmed(_warmup(warmup, total_steps, steps_of), jnp.ones_like)


def cosine(final: float = 0.0, warmup: Moment = "0st", *, total_steps: int, steps_of: StepsOf) -> Shape:
    """Warm-up, then half a cosine from 1 to `final` at the end of the run (Loshchilov & Hutter, 2017)."""
    _at_least_0("final", final)
    start = _warmup(warmup, total_steps, steps_of)
    return _warmed(start, lambda s: final + (1 - final) * _cosine(_left(s, start, total_steps)))


def linear(final: float = 0.0, warmup: Moment = "0st", *, total_steps: int, steps_of: StepsOf) -> Shape:
    """Warm-up, then a straight line from 1 to `final` at the end of the run."""
    _at_least_0("final", final)
    start = _warmup(warmup, total_steps, steps_of)
    return _warmed(start, lambda s: final + (1 - final) * _left(s, start, total_steps))


def rsqrt(timescale: Moment = "10000st", warmup: Moment = "0st", *, total_steps: int, steps_of: StepsOf) -> Shape:
    """Warm-up of w steps, then 1 / √(1 + (s − w) / timescale), which does not know the length of the run.

    Vaswani et al., 2017; in this form Zhai et al., "Scaling Vision Transformers", 2022. Raises UserError for
    a timescale of 0.
    """
    start = _warmup(warmup, total_steps, steps_of)
    scale = _moment("timescale", timescale, total_steps, steps_of)
    if not scale:
        raise UserError(f"config.schedule.timescale is {timescale!r}; expected more than 0")
    return _warmed(start, lambda s: jax.lax.rsqrt(1 + (s - start) / scale))


def step(
    boundaries: tuple[Moment, ...] = (0.5, 0.75),
    factor: float = 0.1,
    warmup: Moment = "0st",
    *,
    total_steps: int,
    steps_of: StepsOf,
) -> Shape:
    """Warm-up, then times `factor` at each boundary, counted from the start of the run (He et al., 2016).

    Raises UserError where boundaries do not increase, lie in the warm-up or are never reached.
    """
    _at_least_0("factor", factor)
    start = _warmup(warmup, total_steps, steps_of)
    bounds = [_moment("boundaries", each, total_steps, steps_of) for each in boundaries]
    fence = [start, *bounds, total_steps]
    if any(before >= after for before, after in zip(fence, fence[1:], strict=False)):
        raise UserError(
            f"config.schedule.boundaries are at steps {', '.join(map('{:g}'.format, bounds))}; expected them "
            f"to increase between the end of the warm-up, {start:g}, and of the run, {total_steps}"
        )

    def stairs(s: jax.Array) -> jax.Array:
        value = jnp.ones_like(s)
        for passed, bound in enumerate(bounds, 1):
            value = jnp.where(s >= bound, factor**passed, value)
        return value

    return _warmed(start, stairs)


def one_cycle(
    warmup: Moment = 0.3,
    start: float = 0.04,
    final: float = 4e-6,
    curve: Literal["cosine", "linear"] = "cosine",
    *,
    total_steps: int,
    steps_of: StepsOf,
) -> Shape:
    """From `start` up to 1 at the end of `warmup`, then down to `final` at the end of the run.

    Smith & Topin, "Super-Convergence", 2017, whose two straight lines are `curve="linear"`.
    """
    _at_least_0("start", start)
    _at_least_0("final", final)
    peak = _warmup(warmup, total_steps, steps_of)
    bend: Curve = {"cosine": _cosine, "linear": lambda left: left}[curve]

    def shape(steps: Any) -> jax.Array:
        s = jnp.asarray(steps, jnp.float32)
        rise = 1 + (start - 1) * bend(_left(s, 0, peak))
        fall = final + (1 - final) * bend(_left(s, peak, total_steps))
        return jnp.where(s < peak, rise, fall)

    return shape


def _warmed(start: float, after: Curve) -> Shape:
    """s / start for s < start, then `after(s)`; both float32."""

    def shape(steps: Any) -> jax.Array:
        s = jnp.asarray(steps, jnp.float32)
        rise = s / max(start, 1)  # a warm-up shorter than a step holds step 0 alone, where the rate is 0
        return jnp.where(s < start, rise, after(jnp.maximum(s, start)))

    return shape


def _left(s: jax.Array, start: float, stop: float) -> jax.Array:
    """The share of start … stop that lies ahead at step s: 1 up to `start`, exactly 0 from `stop` on."""
    return jnp.clip((stop - s) / (stop - start), 0, 1) if stop > start else jnp.ones_like(s)


def _cosine(left: jax.Array) -> jax.Array:
    """1 → 0 along half a cosine as `left` goes 1 → 0, exact at both ends."""
    return (1 - jnp.cos(jnp.pi * left)) / 2


def _warmup(warmup: Moment, total_steps: int, steps_of: StepsOf) -> float:
    steps = _moment("warmup", warmup, total_steps, steps_of)
    if steps > total_steps:
        raise UserError(
            f"config.schedule.warmup {warmup!r} is {steps:g} steps, longer than the run of {total_steps}; "
            "shorten it or raise config.total"
        )
    return steps


def _moment(key: str, value: Moment, total_steps: int, steps_of: StepsOf) -> float:
    """Steps from the start of the run, not rounded."""
    if isinstance(value, str):
        return float(steps_of(value))
    if not 0 <= value <= 1:
        raise UserError(
            f"config.schedule.{key} is {value!r}; expected a duration such as '500st' or '2ep', or a share "
            "of the run from 0 to 1"
        )
    return value * total_steps


def _at_least_0(key: str, value: float) -> None:
    if not value >= 0:
        raise UserError(f"config.schedule.{key} is {value!r}; expected 0 or more")
