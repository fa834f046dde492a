"""Two runs compared bit by bit: arrays, batches, reported lines, event files. Each names what differs first."""

import dataclasses
import hashlib
import struct
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from jaxtrain.errors import StorageError
from jaxtrain.reporting.sinks import JsonLines
from jaxtrain.storage.checkpoint import Checkpoints

NAMES = ("uninterrupted", "resumed")  # of the two runs, in this order everywhere
COUNTERS = ("step", "offset", "skipped", "skipped_at", "loss_scale")
Entry: TypeAlias = tuple[float, str, float]  # step, key, value
CLOCK = ("time/", "memory/")  # what no two runs have in common


@dataclasses.dataclass(frozen=True)
class Row:
    """One comparison: of what, how much of it, and the first difference, "" where there is none."""

    name: str
    amount: str
    difference: str = ""
    digest: str = ""


@dataclasses.dataclass(frozen=True)
class Batch:
    """What a step was given: the data position is step − 1 + offset; `ids` is a checksum of the example ids."""

    step: int
    offset: int
    ids: int


def states(a: Path, b: Path) -> list[Row]:
    """The newest checkpoints of two workdirs, a row for each field of the state. Raises StorageError without one."""
    arrays = []
    found = []
    for name, folder in zip(NAMES, (a, b), strict=True):
        checkpoints = Checkpoints(folder / "checkpoints", say=lambda line: None)
        step = checkpoints.latest()
        if step is None:
            raise StorageError(f"the {name} run left no good checkpoint in {checkpoints.folder}")
        found.append(step)
        arrays.append(_by_field(checkpoints.restore_flat(step)))
    if found[0] != found[1]:
        return [Row("checkpoint", "newest", _both("its step", *found))]
    fields = dict.fromkeys([*arrays[0], *arrays[1]])
    return [_field(field, arrays[0].get(field, {}), arrays[1].get(field, {})) for field in fields]


def _by_field(arrays: Mapping[str, np.ndarray]) -> dict[str, dict[str, np.ndarray]]:
    """By field of the state; scalars that count are one field, `counters`, and partial sums of metrics another."""
    fields: dict[str, dict[str, np.ndarray]] = {}
    for path, array in sorted(arrays.items()):
        top, _, rest = path.replace("state/members/", "state/", 1).partition("/")  # of several, those of all
        field = rest.partition("/")[0] if top == "state" else top
        fields.setdefault("counters" if field in COUNTERS else field, {})[path.removeprefix("state/")] = array
    return fields


def _field(name: str, a: Mapping[str, np.ndarray], b: Mapping[str, np.ndarray]) -> Row:
    amount = f"{len(a)} array{'s' * (len(a) != 1)}, {sum(array.nbytes for array in a.values()):,} bytes"
    for path in dict.fromkeys([*a, *b]):
        if difference := _leaf(path, a.get(path), b.get(path)):
            return Row(name, amount, difference)
    return Row(name, amount, digest=digest(a))


def _leaf(path: str, a: np.ndarray | None, b: np.ndarray | None) -> str:
    """How two arrays differ; "" where they are bit-equal."""
    if a is None or b is None or a.dtype != b.dtype or a.shape != b.shape:
        shown = ["absent" if each is None else f"{each.dtype}{list(each.shape)}" for each in (a, b)]
        return _both(path, *shown)
    unlike = _bytes(a) != _bytes(b)
    if not unlike.any():
        return ""
    places = unlike.reshape(a.size, -1).any(axis=1)
    first = int(places.argmax())
    index = ",".join(map(str, np.unravel_index(first, a.shape)))
    where = f"{path}[{index}]" if a.shape else path
    more = f" ({int(places.sum()):,} of {a.size:,} numbers differ)" if a.size > 1 else ""
    return _both(where, str(a.reshape(-1)[first]), str(b.reshape(-1)[first])) + more


def _bytes(array: np.ndarray) -> np.ndarray:
    return np.frombuffer(np.ascontiguousarray(array).tobytes(), np.uint8)


def digest(arrays: Mapping[str, np.ndarray]) -> str:
    """SHA-256 of paths, dtypes, shapes and bytes."""
    total = hashlib.sha256()
    for path, array in sorted(arrays.items()):
        total.update(f"{path} {array.dtype} {array.shape}\n".encode())
        total.update(np.ascontiguousarray(array).tobytes())
    return total.hexdigest()


def batches(a: Sequence[Batch], b: Sequence[Batch], steps: int) -> Row:
    """What each step was given, in the order in which it was: every step up to `steps`, replays as the first time."""
    known: dict[tuple[int, int], int] = {}
    replayed = 0
    for name, given in zip(NAMES, (a, b), strict=True):
        for batch in given:
            before = known.setdefault((batch.step, batch.offset), batch.ids)
            if before != batch.ids:
                what = f"ids of step {batch.step} at offset {batch.offset}"
                return Row("batch ids", "", f"{what}: crc {before:08x}, then {batch.ids:08x} in the {name} run")
    last = [{batch.step: batch for batch in given} for given in (a, b)]
    for step in range(1, steps + 1):
        one, other = (found.get(step) for found in last)
        if one is None or one != other:
            return Row("batch ids", "", _both(f"the batch of step {step}", _shown(one), _shown(other)))
    replayed = len(b) - len(last[1])
    return Row("batch ids", f"{steps} steps, {replayed} replayed", digest=_digest_of(last[0][s].ids for s in last[0]))


def _shown(batch: Batch | None) -> str:
    return "none" if batch is None else f"crc {batch.ids:08x} at offset {batch.offset}"


def _digest_of(numbers: Iterable[int]) -> str:
    return hashlib.sha256(",".join(map(str, numbers)).encode()).hexdigest()


def lines(a: Path, b: Path) -> Row:
    """`metrics.jsonl`: the same lines in the same order, nothing twice; without what the clock and the memory say."""
    read = [JsonLines.read(folder / "metrics.jsonl") for folder in (a, b)]
    entries = [
        [(line["step"], key, value) for line in found for key, value in line.items() if _is_compared(key)]
        for found in read
    ]
    return _sequences("metrics.jsonl", f"{len(read[0])} lines", entries)


def events(a: Path, b: Path) -> Row:
    """The event files, likewise."""
    entries = [[entry for entry in _events(folder) if _is_compared(entry[1])] for folder in (a, b)]
    return _sequences("event files", f"{len(entries[0])} values", entries)


def _is_compared(key: str) -> bool:
    return key not in ("step", "synthetic") and not key.removeprefix("synthetic/").startswith(CLOCK)


def _sequences(name: str, amount: str, entries: Sequence[Sequence[Entry]]) -> Row:
    """Two sequences of (step, key, value), each key once a step, values bit by bit."""
    for run, found in zip(NAMES, entries, strict=True):
        seen = set()
        for step, key, _ in found:
            if (step, key) in seen:
                return Row(name, amount, f"step {step} has {key} twice in the {run} run")
            seen.add((step, key))
    for place in range(max(map(len, entries))):
        one, other = (found[place] if place < len(found) else None for found in entries)
        if one is None or other is None or one[:2] != other[:2] or _bits(one[2]) != _bits(other[2]):
            shown = ["nothing" if each is None else f"step {each[0]} {each[1]} {each[2]!r}" for each in (one, other)]
            return Row(name, amount, _both("the first entry that differs", *shown))
    if not entries[0]:
        return Row(name, "", "both are empty: nothing was reported")
    told = (f"{step} {key} {_bits(value).hex()}" for step, key, value in entries[0])
    return Row(name, amount, digest=hashlib.sha256("\n".join(told).encode()).hexdigest())


def _bits(value: float) -> bytes:
    return struct.pack("<d", value)


def _events(folder: Path) -> list[Entry]:
    """(step, tag, value) in order. Raises StorageError for a file that is cut or altered."""
    from tensorboardX.proto.event_pb2 import Event
    from tensorboardX.record_writer import masked_crc32c

    found = []
    for path in sorted(folder.glob("events.out.tfevents.*.jaxtrain")):
        data = path.read_bytes()
        while data:
            length = int.from_bytes(data[:8], "little")
            body, check = data[12 : 12 + length], data[12 + length : 16 + length]
            if masked_crc32c(body) != int.from_bytes(check, "little"):
                raise StorageError(f"{path} is cut or altered")
            event, data = Event.FromString(body), data[16 + length :]
            found += [(event.step, value.tag, value.simple_value) for value in event.summary.value]
    return found


def _both(what: str, a: Any, b: Any) -> str:
    return f"{what}: {a} {NAMES[0]}, {b} {NAMES[1]}"
