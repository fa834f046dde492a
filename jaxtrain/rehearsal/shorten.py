"""A run made short enough to be run twice: fewer steps in all, and something due every few of them."""

import functools
from collections.abc import Callable, Iterator
from typing import Any

from ml_collections import ConfigDict

from jaxtrain.config.durations import parse_duration
from jaxtrain.errors import UserError


def shortened(config: ConfigDict, most: int) -> tuple[int, list[str]]:
    """The steps to run, `most` or fewer, and the overrides that make it so.

    A schedule is squeezed in proportion: what it gives as a duration becomes the same share of the shorter run. Opens
    the data set where the config counts in epochs. Raises UserError for what cannot be opened.
    """
    examples = functools.cache(lambda: _examples(config))

    def steps_of(text: str) -> float:
        duration = parse_duration(text)
        return float(duration.steps(config.batch_size, examples() if duration.unit == "ep" else 1))

    total = parse_duration(config.total)
    whole = total.whole_steps(config.batch_size, examples() if total.unit == "ep" else 1)
    if whole <= most:
        return whole, []
    return most, [f"total={most}st", *_squeezed(config.schedule, whole, steps_of)]


def intervals(steps: int) -> list[str]:
    """Overrides by which much happens within few steps, and not at the same ones. None changes the result.

    On GPUs a step gives the same bits every time only where it is told to. Each run is a process of its own, also where
    a cluster started several.
    """
    return [
        f"checkpoint.every={max(2, steps // 9)}st",
        "checkpoint.minutes=0",
        "checkpoint.keep=3",
        f"report_every={max(3, steps // 13)}st",
        f"eval_every={max(1, steps // 4)}st",
        "max_minutes=0",
        "tensorboard=true",
        "deterministic=true",
        "distributed=off",
        "terminal=plain",
    ]


def _squeezed(schedule: ConfigDict, whole: int, steps_of: Callable[[str], float]) -> Iterator[str]:
    for option, value in schedule.items():
        many = isinstance(value, tuple)
        shares = [_share(each, whole, steps_of) for each in (value if many else (value,))]
        if any(share is not None for share in shares):
            moments = [
                old if new is None else new for old, new in zip(value if many else (value,), shares, strict=True)
            ]
            yield f"schedule.{option}={tuple(moments) if many else moments[0]}"


def _share(value: Any, whole: int, steps_of: Callable[[str], float]) -> float | None:
    """A duration as its share of the whole run; None for what is none, or is longer than the run."""
    try:
        steps = steps_of(value) if isinstance(value, str) else -1.0
    except UserError:
        return None
    return round(steps / whole, 6) if 0 <= steps <= whole else None


def _examples(config: ConfigDict) -> int:
    from jaxtrain.data.order import examples_in_epoch  # these import JAX
    from jaxtrain.job import dataset_of

    return examples_in_epoch(len(dataset_of(config).open()["train"]), config.batch_size, config.drop_remainder)
