"""What a tensor is called here and elsewhere, one to one: a map imports in one direction and exports in the other."""

import dataclasses
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from jaxtrain.errors import UserError

LEAVES = {  # kind of layer -> our leaf -> theirs
    "conv": {"kernel": ".weight", "bias": ".bias"},
    "linear": {"kernel": ".weight", "bias": ".bias"},
    "packed": {"kernel": "_weight", "bias": "_bias"},  # the linear layers inside torch.nn.MultiheadAttention
    "norm": {"scale": ".weight", "bias": ".bias", "mean": ".running_mean", "var": ".running_var"},
    "embedding": {"embedding": ".weight"},
    "conv1d": {"kernel": ".weight", "bias": ".bias"},  # GPT-2's: a linear layer the other way round
    "array": {"": ""},
    "channels": {"": ""},  # a number for each, [C] -> [C, 1, 1]
}
AXES = {"conv": (3, 2, 0, 1), "linear": (1, 0), "packed": (1, 0)}  # of our kernels: [H, W, in, out] -> [out, in, H, W]
STACK = re.compile(r"(^|.*/)blocks/(?=\D)")  # layers under one name, [depth, ...]: config.model.scan=True


@dataclasses.dataclass(frozen=True)
class Rule:
    """A kind of layer: its path here, its name there; each `{}` is a number, the same in both or as `theirs` counts it.

    `part` (k, n): ours is the k-th of n that theirs holds one after the other along its axis of outputs.
    """

    ours: str
    theirs: Callable[..., str] | str
    kind: str
    part: tuple[int, int] = (0, 1)


@dataclasses.dataclass(frozen=True)
class Entry:
    """One tensor of ours, or one layer of a stack of ours, and where it is among theirs."""

    ours: str  # "params/stem/conv/kernel"
    theirs: str
    axes: tuple[int, ...] | None  # from ours to theirs
    part: tuple[int, int]
    axis: int  # of theirs, along which the parts lie
    ones: int = 0  # axes of length 1 that theirs has behind ours
    layer: int | None = None  # of the stack


@dataclasses.dataclass(frozen=True)
class NameMap:
    """How one library calls the tensors of a family.

    `needs`: what each of its models has, of our paths (regular expressions). `counted`: integers of theirs that nothing
    is computed with. `tied`: what theirs may hold a second time, copy -> original.
    """

    library: str
    rules: tuple[Rule, ...]
    needs: tuple[str, ...] = ()
    counted: str = r"(?!)"  # nothing
    tied: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def entries(self, ours: Mapping[str, Any]) -> list[Entry]:
        """One for each of our arrays (only their shapes matter), of a stack one for each layer.

        Raises UserError for a tensor that the library has no name for, and for one that it would miss.
        """
        for path in self.needs:
            if not any(re.fullmatch(path, name.partition("/")[2]) for name in ours):
                raise UserError(f"{self.library} has no such model without {path.removeprefix('.*/')}")
        return [entry for name, array in ours.items() for entry in self._entries(name, array)]

    def _entries(self, name: str, array: Any) -> Iterator[Entry]:
        if not (stack := STACK.match(name)):
            yield self._entry(name)
            return
        for layer in range(array.shape[0]):
            unrolled = self._entry(f"{stack[0]}{layer}/{name.removeprefix(stack[0])}")
            yield dataclasses.replace(unrolled, ours=name, layer=layer)

    def _entry(self, name: str) -> Entry:
        path = name.partition("/")[2]  # without params or model_state
        for rule in self.rules:
            for own, other in LEAVES[rule.kind].items():
                found = re.fullmatch(rule.ours.replace("{}", r"(\d+)") + (f"/{own}" if own else ""), path)
                if found:
                    named = rule.theirs.format if isinstance(rule.theirs, str) else rule.theirs
                    theirs = named(*map(int, found.groups()))
                    axes = AXES.get(rule.kind) if own == "kernel" else None
                    axis, ones = -1 if rule.kind == "conv1d" else 0, 2 if rule.kind == "channels" else 0
                    return Entry(name, theirs + other, axes, rule.part, axis, ones)
        raise UserError(f"{self.library} has no name for {name}: this option of the model is none of its own")


def imported(entries: list[Entry], tensors: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Our tensors out of theirs; what is not there, or a stack of which a layer is not there, is left out."""
    found: dict[str, dict[int | None, np.ndarray]] = {}
    lacking = {entry.ours for entry in entries if entry.theirs not in tensors}
    for entry in entries:
        if entry.ours not in lacking:
            found.setdefault(entry.ours, {})[entry.layer] = _ours(entry, tensors[entry.theirs])
    return {name: layers[None] if None in layers else _stacked(name, layers) for name, layers in found.items()}


def exported(entries: list[Entry], arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Their tensors out of ours: `imported` backwards."""
    parts: dict[str, dict[int, np.ndarray]] = {}
    axis = {entry.theirs: entry.axis for entry in entries}
    for entry in entries:
        array = np.asarray(arrays[entry.ours])
        array = array if entry.layer is None else array[entry.layer]
        array = array if entry.axes is None else array.transpose(entry.axes)
        parts.setdefault(entry.theirs, {})[entry.part[0]] = array.reshape(*array.shape, *[1] * entry.ones)
    return {
        name: np.concatenate([some[k] for k in sorted(some)], axis[name]) if len(some) > 1 else some[0]
        for name, some in parts.items()
    }


def is_copy(library: NameMap, name: str, tensors: Mapping[str, np.ndarray]) -> bool:
    """Whether the tensor called `name` only says again what the tensor that it is tied to says."""
    original = tensors.get(library.tied.get(name, ""))
    return original is not None and np.array_equal(tensors[name], original)


def _stacked(name: str, layers: Mapping[Any, np.ndarray]) -> np.ndarray:
    shapes = {array.shape for array in layers.values()}
    if len(shapes) > 1:
        shown = " and ".join(str(list(shape)) for shape in sorted(shapes))
        raise UserError(
            f"{name} holds all layers, expected of one shape, and they are {shown}; set config.model.scan=False"
        )
    return np.stack([layers[layer] for layer in sorted(layers)])


def _ours(entry: Entry, tensor: np.ndarray) -> np.ndarray:
    place, count = entry.part
    if count > 1:
        if not tensor.ndim or tensor.shape[entry.axis] % count:
            raise UserError(f"{entry.theirs} is {list(tensor.shape)}, expected {count} equal parts of its outputs")
        tensor = np.split(tensor, count, entry.axis)[place]
    if entry.ones and tensor.shape[1:] == (1,) * entry.ones:
        return tensor.reshape(-1)
    if entry.axes is None:
        return tensor
    if tensor.ndim != len(entry.axes):
        raise UserError(f"{entry.theirs} is {list(tensor.shape)}, expected {len(entry.axes)} axes")
    return tensor.transpose(np.argsort(entry.axes))
