"""The cut of a data set into train, validation and test: once, by class, for ever and for every seed."""

import numpy as np

from jaxtrain.data.order import permute
from jaxtrain.errors import UserError

_KEY = 0  # of the permutation that cuts: a constant, so no seed moves an example to another role


def sizes(size: int, *, validation: float, test: float) -> dict[str, int]:
    """How many examples `split` gives each role, which needs no labels; raises UserError as it does."""
    counts = {}
    for role, share in (("validation", validation), ("test", test)):
        count = round(share * size)
        if not 0 <= share < 1 or (share and not 0 < count < size):
            raise UserError(
                f"{role}={share} of {size} examples is {count}: expected a share from 0 (no {role}) up to, "
                "not including, 1, that takes at least one example and leaves one"
            )
        counts[role] = count
    train = size - sum(counts.values())
    if train < 1:
        raise UserError(f"validation={validation} and test={test} of {size} examples leave none to train on")
    return {"train": train, **{role: count for role, count in counts.items() if count}}


def split(labels: np.ndarray | None, size: int, *, validation: float, test: float) -> dict[str, np.ndarray]:
    """Cuts examples 0..size-1: role → ids (int32, sorted, disjoint, all of them); no role for a share of 0.

    Shares are of the whole. Test is cut before validation, so another validation share leaves test as it is.
    With `labels` (integers [size]) each role has the classes' proportions to within one example a class.
    Raises UserError where a share is not in [0, 1), takes no example, or leaves none to train on.
    """
    counts = sizes(size, validation=validation, test=test)
    rest = np.arange(size, dtype=np.int32)
    ids: dict[str, np.ndarray] = {}
    for role in ("test", "validation"):
        if role in counts:
            chosen = _choose(None if labels is None else labels[rest], rest.size, counts[role])
            ids[role], rest = rest[chosen], rest[~chosen]
    return {role: ids.get(role, rest) for role in counts}


def cut(labels: np.ndarray | None, size: int, fraction: float) -> tuple[np.ndarray, np.ndarray]:
    """(ids that stay, round(fraction * size) ids cut off), as in `split`."""
    ids = split(labels, size, validation=0.0, test=fraction)
    return ids["train"], ids.get("test", np.zeros(0, np.int32))


def _choose(labels: np.ndarray | None, size: int, count: int) -> np.ndarray:
    """A mask (bool [size]) of `count` examples: evenly spaced in a fixed random order that is then sorted by
    class, so that each class gives its part."""
    shuffled = permute(_KEY, 0, np.arange(size), size)
    if labels is not None:
        shuffled = shuffled[np.argsort(labels[shuffled], kind="stable")]
    mask = np.zeros(size, bool)
    mask[shuffled[(2 * np.arange(count) + 1) * size // (2 * count)]] = True
    return mask
