"""What a tensor is called here and elsewhere, one to one: a map imports in one direction and exports in the other."""

import dataclasses
import re
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from jaxtrain.errors import UserError

LEAVES = {  # kind of layer -> our leaf -> theirs
    "conv": {"kernel": "weight", "bias": "bias"},
    "linear": {"kernel": "weight", "bias": "bias"},
    "norm": {"scale": "weight", "bias": "bias", "mean": "running_mean", "var": "running_var"},
    "embedding": {"embedding": "weight"},
    "conv1d": {"kernel": "weight", "bias": "bias"},  # GPT-2's: a linear layer the other way round
    "array": {"": ""},
}
AXES = {"conv": (3, 2, 0, 1), "linear": (1, 0)}  # of a kernel of ours among theirs: [H, W, in, out] -> [out, in, H, W]


@dataclasses.dataclass(frozen=True)
class Rule:
    """A kind of layer. `ours` is a regular expression of its path, whose numbers `theirs` gets.

    `part` (k, n): ours is the k-th of n that theirs holds one after the other along its axis of outputs.
    """

    ours: str
    theirs: Callable[..., str] | str
    kind: str
    part: tuple[int, int] = (0, 1)


@dataclasses.dataclass(frozen=True)
class Entry:
    """One tensor of ours and where it is among theirs."""

    ours: str  # "params/stem/conv/kernel"
    theirs: str
    axes: tuple[int, ...] | None  # from ours to theirs
    part: tuple[int, int]
    axis: int  # of theirs, along which the parts lie


@dataclasses.dataclass(frozen=True)
class NameMap:
    """How one library calls the tensors of a family. `counted` are integers of theirs that nothing is computed with."""

    library: str
    rules: tuple[Rule, ...]
    counted: str = r"(?!)"  # nothing

    def entries(self, ours: Mapping[str, Any]) -> list[Entry]:
        """One for each of our names. Raises UserError for a tensor that the library has no name for."""
        return [self._entry(name) for name in ours]

    def _entry(self, name: str) -> Entry:
        path = name.partition("/")[2]  # without params or model_state
        for rule in self.rules:
            for own, other in LEAVES[rule.kind].items():
                found = re.fullmatch(rule.ours + (f"/{own}" if own else ""), path)
                if found:
                    theirs = rule.theirs if isinstance(rule.theirs, str) else rule.theirs(*map(int, found.groups()))
                    axes = AXES.get(rule.kind) if own == "kernel" else None
                    axis = -1 if rule.kind == "conv1d" else 0
                    return Entry(name, f"{theirs}.{other}" if other else theirs, axes, rule.part, axis)
        raise UserError(f"{self.library} has no name for {name}: this option of the model is none of its own")


def imported(entries: list[Entry], tensors: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Our tensors out of theirs; what is not there is left out."""
    return {entry.ours: _ours(entry, tensors[entry.theirs]) for entry in entries if entry.theirs in tensors}


def exported(entries: list[Entry], arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Their tensors out of ours: `imported` backwards."""
    parts: dict[str, dict[int, np.ndarray]] = {}
    axis = {entry.theirs: entry.axis for entry in entries}
    for entry in entries:
        array = np.asarray(arrays[entry.ours])
        array = array if entry.axes is None else array.transpose(entry.axes)
        parts.setdefault(entry.theirs, {})[entry.part[0]] = array
    return {
        name: np.concatenate([some[k] for k in sorted(some)], axis[name]) if len(some) > 1 else some[0]
        for name, some in parts.items()
    }


def _ours(entry: Entry, tensor: np.ndarray) -> np.ndarray:
    place, count = entry.part
    if count > 1:
        if not tensor.ndim or tensor.shape[entry.axis] % count:
            raise UserError(f"{entry.theirs} is {list(tensor.shape)}, expected {count} equal parts of its outputs")
        tensor = np.split(tensor, count, entry.axis)[place]
    if entry.axes is None:
        return tensor
    if tensor.ndim != len(entry.axes):
        raise UserError(f"{entry.theirs} is {list(tensor.shape)}, expected {len(entry.axes)} axes")
    return tensor.transpose(np.argsort(entry.axes))
