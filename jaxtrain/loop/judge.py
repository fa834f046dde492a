"""Which evaluation was the best, and whether to go on: read off the history, so nothing of it needs saving.

Only validation ("eval/…") judges; the test split never chooses anything.
"""

from collections.abc import Collection
from typing import Any

from ml_collections import ConfigDict

from jaxtrain.config import lookup
from jaxtrain.config.keys import KEYS
from jaxtrain.errors import UserError


def best_line(history: list[dict[str, Any]], config: ConfigDict) -> dict[str, Any] | None:
    """The evaluation that `config.best` chooses: the first of the best."""
    lines = [line for line in history if _judged(line, config) is not None]
    if not lines:
        return None
    sign = 1 if config.best_mode == "max" else -1
    return max(lines, key=lambda line: sign * _judged(line, config))


def key_that_chooses(config: ConfigDict) -> str:
    """The key by which a config asks for a best evaluation, "" where it leaves that to the defaults."""
    wants = {
        "patience": config.patience > 0,
        "test": config.test == "best",
        "best": config.best != KEYS["best"].default,
    }
    return next((key for key, wanted in wants.items() if wanted), "")


def refuse_unknown_metric(config: ConfigDict, metrics: Collection[str]) -> None:
    """Raises UserError where no metric on validation is called what `config.best` is."""
    if config.best not in metrics:
        hint = lookup.choices_hint(config.best, metrics)
        raise UserError(f"config.best is {config.best!r}, which no metric on validation is called.{hint}")


def is_better(values: dict[str, float], history: list[dict[str, Any]], config: ConfigDict) -> bool:
    """Whether an evaluation beats all of `history`. NaN beats nothing."""
    value, best = _judged(values, config), best_line(history, config)
    if value is None:
        return False
    if best is None:
        return True
    old = _judged(best, config)
    return value > old if config.best_mode == "max" else value < old


def out_of_patience(history: list[dict[str, Any]], config: ConfigDict) -> bool:
    """Whether the last `config.patience` evaluations brought nothing better."""
    if not config.patience:
        return False
    steps = [line["step"] for line in history if f"eval/{config.best}" in line]
    best = best_line(history, config)
    return len([step for step in steps if step > (best["step"] if best else 0)]) >= config.patience


def _judged(line: dict[str, Any], config: ConfigDict) -> Any:
    value = line.get(f"eval/{config.best}")
    return None if value is None or value != value else value


def last_values(history: list[dict[str, Any]]) -> dict[str, float]:
    """The last value of each evaluation's metrics."""
    values = {key: value for line in history for key, value in line.items()}
    return {key: value for key, value in values.items() if key.startswith(("eval", "test"))}
