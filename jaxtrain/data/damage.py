"""Examples that cannot be read or decoded: how they are named, and how many of them a source bears.

A source that may bear some has an attribute `damage`, a `Damage`. Where its limit is not 0, its batches have a
`mask` (bool [B]) that is False where an example is damaged; the arrays hold zeros there. That depends on the
example alone, so a step sees the same rows on every rerun, whatever the threads, loader or devices.
"""

import threading

import numpy as np

from jaxtrain.data.sources import Batch, EncodedSource, Source
from jaxtrain.errors import JaxtrainError, StorageError, UserError


class Damage:
    """The damaged examples of a source. More than `limit` different ones are refused."""

    def __init__(self, limit: int):
        self.limit = limit
        self._lock = threading.Lock()
        self._known: set[str] = set()
        self._news: list[str] = []

    def bear(self, name: str, what: str) -> None:
        """Counts the example of that name in, at most once. Raises UserError where that is one too many."""
        with self._lock:
            if name in self._known:
                return
            if len(self._known) == self.limit:
                raise UserError(
                    f"{what}; with it there are more than the {self.limit} that config.data.max_corrupt allows: mend "
                    "the data set, or allow more"
                )
            self._known.add(name)
            self._news.append(what)

    def news(self) -> list[str]:
        """One line for each example that was counted in since the last call."""
        with self._lock:
            news, self._news = self._news, []
        return news


def of(source: Source) -> Damage | None:
    """What the source bears; None where every example must be sound."""
    damage = getattr(source, "damage", None)
    return damage if damage is not None and damage.limit else None


def load(source: Source, ids: np.ndarray) -> Batch:
    """The examples of `ids` (integers [B]), and `mask` where the source bears damage.

    Raises UserError naming the example that cannot be decoded; StorageError where the disk fails.
    """
    try:
        batch = _load(source, ids)
    except JaxtrainError:
        raise
    except Exception as error:
        batch = one_by_one(source, ids)
        if not batch["mask"].all():
            return batch
        if _is_of_the_disk(error):
            raise StorageError(
                f"a read failed, and not when tried again: {error}; see to the disk, then resume"
            ) from error
        raise
    return batch if of(source) is None else {**batch, "mask": np.ones(len(ids), bool)}


def one_by_one(source: Source, ids: np.ndarray) -> Batch:
    """The same, and `mask` whatever the source bears, each example on its own: the first that fails is named."""
    borne, rows = of(source), []
    for number in ids.tolist():
        try:
            rows.append(_load(source, np.array([number])))
        except JaxtrainError:
            raise
        except Exception as cause:
            failure = fault(source, number, cause)
            if borne is None or not isinstance(failure, UserError):
                raise failure from cause
            borne.bear(_name(source, number), _told(source, number, cause))
            rows.append({})
    blank = {key: np.zeros((1, *field.shape), field.dtype) for key, field in source.spec.items()}
    batch = {key: np.concatenate([row.get(key, zeros) for row in rows]) for key, zeros in blank.items()}
    return {**batch, "mask": np.array([bool(row) for row in rows])}


def fault(source: Source, number: int, cause: Exception) -> Exception:
    """What to raise for an example that made `cause`: `cause` itself where it is neither the data's nor the disk's."""
    if _is_of_the_disk(cause):
        return StorageError(f"{_name(source, number)} cannot be read: {cause}; see to the disk, then resume")
    if isinstance(cause, MemoryError | ImportError):
        return cause
    remedy = "mend or remove it in the data set"
    if getattr(source, "damage", None) is not None:
        remedy += ", or leave out up to n such examples with config.data.max_corrupt=n"
    return UserError(f"{_told(source, number, cause)}; {remedy}")


def _is_of_the_disk(error: Exception) -> bool:
    return isinstance(error, OSError) and error.errno is not None  # Pillow's own have no number


def _load(source: Source, ids: np.ndarray) -> Batch:
    """As `source.get`, which for encoded sources is the same with names for what fails."""
    return source.decode(source.records(ids)) if isinstance(source, EncodedSource) else source.get(ids)


def _told(source: Source, number: int, cause: Exception) -> str:
    reason = (str(cause) or type(cause).__name__).splitlines()[0]
    return f"{_name(source, number)} cannot be decoded: {reason}"


def _name(source: Source, number: int) -> str:
    describe = getattr(source, "describe", None)
    return str(describe(number)) if describe else f"example {number}"
