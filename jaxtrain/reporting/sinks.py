"""The files that reports go to: metrics.jsonl, log.txt, TensorBoard events.

`metrics.jsonl` is the truth: one JSON object a line, "step" first, then the scalars under their names,
"time/unix" in seconds since 1970, and "synthetic": true where the data were. JSON has no NaN and no
infinities: they stand there as the strings "NaN", "Infinity" and "-Infinity" (as in protobuf's JSON), which
Python's `float` reads. The event file can be made from it again, and is, when a run goes back to an earlier
step.
"""

import json
import math
import os
import socket
import time
from pathlib import Path

from jaxtrain.errors import StorageError
from jaxtrain.reporting.terminal import Plain, Sink
from jaxtrain.reporting.wording import Line

Record = dict[str, float]  # {"step": 50, "train/loss": 2.1, …}


def file_sinks(workdir: Path, tensorboard: bool) -> list[Sink]:
    """The sinks of a workdir; none of them touches it before there is something to write."""
    events = [Events(workdir)] if tensorboard else []
    return [JsonLines(workdir / "metrics.jsonl"), LogFile(workdir / "log.txt"), *events]


class Appender:
    """A file that grows. Each piece goes to the operating system at once: a killed process loses none."""

    def __init__(self, path: Path):
        self._path = path
        self._descriptor: int | None = None

    def append(self, data: bytes) -> None:
        """Raises StorageError, with the path, where the disk is full or not writable."""
        try:
            if self._descriptor is None:
                self._path.parent.mkdir(parents=True, exist_ok=True)
                self._descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
            while data:
                data = data[os.write(self._descriptor, data) :]
        except OSError as error:
            raise _storage_error(self._path, error) from error

    def sync(self) -> None:
        """Returns when all of it is on disk."""
        if self._descriptor is not None:
            try:
                os.fsync(self._descriptor)
            except OSError as error:
                raise _storage_error(self._path, error) from error

    def close(self) -> None:
        """A later `append` opens it again."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            os.close(descriptor)


class JsonLines(Sink):
    """`metrics.jsonl`."""

    def __init__(self, path: Path):
        self._path = path
        self._file = Appender(path)

    def write(self, line: Line) -> None:
        self._file.append(_encode(record_of(line)))

    def cut(self, history: list[Record]) -> None:
        self._file.close()
        wanted = b"".join(map(_encode, history))
        if _content(self._path) not in (b"", wanted):
            _replace(self._path, wanted)

    def flush(self) -> None:
        self._file.sync()

    def close(self) -> None:
        self._file.close()

    @staticmethod
    def read(path: Path) -> list[Record]:
        """The records of a `metrics.jsonl`; none where it is absent. A torn last line is left out.

        Raises StorageError for any other line that is not a record.
        """
        lines = _content(path).splitlines()
        records = []
        for number, text in enumerate(lines, start=1):
            record = _decode(text)
            if record is not None:
                records.append(record)
            elif number < len(lines):
                raise StorageError(f"{path} line {number} is not a JSON object with a step; remove that line")
        return records


class LogFile(Plain):
    """`log.txt`: what a plain terminal says, each line with its time."""

    def __init__(self, path: Path):
        self._file = Appender(path)
        super().__init__(self._line)

    def flush(self) -> None:
        self._file.sync()

    def close(self) -> None:
        self._file.close()

    def _line(self, text: str) -> None:
        self._file.append(f"{time.strftime('%Y-%m-%d %H:%M:%S')}  {text}\n".encode())


class Events(Sink):
    """The TensorBoard event file: one, made from the history, then continued.

    tensorboardX is imported by the first report, when the device is already busy.
    """

    def __init__(self, folder: Path):
        self._folder = folder
        self._file: Appender | None = None
        self._kept: list[Record] | None = None  # what the file is to be made from, before anything else

    def write(self, line: Line) -> None:
        self._opened().append(_event(record_of(line)))

    def cut(self, history: list[Record]) -> None:
        self._close_file()
        self._kept = list(history)

    def flush(self) -> None:
        if self._kept or (self._kept is not None and self._written()):
            self._opened()

    def close(self) -> None:
        self.flush()
        self._close_file()

    def _close_file(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def _opened(self) -> Appender:
        if self._file is None:
            kept, self._kept = self._kept or [], None
            name = f"events.out.tfevents.{time.time():010.0f}.{socket.gethostname()}.{os.getpid()}.jaxtrain"
            self._make(self._folder / name, kept)
            self._file = Appender(self._folder / name)
        return self._file

    def _written(self) -> list[Path]:
        return list(self._folder.glob("events.out.tfevents.*.jaxtrain"))

    def _make(self, path: Path, history: list[Record]) -> None:
        """The new file takes the place of all that this class ever wrote here."""
        partial = self._folder / "events.partial"
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            partial.write_bytes(b"".join([_first_event(), *map(_event, history)]))
            for old in self._written():
                old.unlink()
            os.replace(partial, path)
        except OSError as error:
            raise _storage_error(path, error) from error


def record_of(line: Line) -> Record:
    """What is kept of a report."""
    return {"step": line.step, **line.scalars, **({"synthetic": True} if line.synthetic else {})}


def _encode(record: Record) -> bytes:
    finite = {name: number if math.isfinite(number) else _name(number) for name, number in record.items()}
    return json.dumps(finite, allow_nan=False).encode() + b"\n"


def _name(number: float) -> str:
    return "NaN" if math.isnan(number) else "Infinity" if number > 0 else "-Infinity"


def _decode(text: bytes) -> Record | None:
    try:
        record = json.loads(text)
        return {name: float(number) if isinstance(number, str) else number for name, number in record.items()} | {
            "step": int(record["step"])
        }
    except (ValueError, TypeError, KeyError, AttributeError):
        return None


def _content(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return b""
    except OSError as error:
        raise StorageError(f"cannot read {path}: {error.strerror}") from error


def _replace(path: Path, content: bytes) -> None:
    """Puts `content` in the place of a file in one stroke."""
    partial = path.with_name(path.name + ".partial")
    try:
        with open(partial, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    except OSError as error:
        raise _storage_error(path, error) from error


def _storage_error(path: Path, error: OSError) -> StorageError:
    return StorageError(f"cannot write {path}: {error.strerror}; mend that and run the same command again")


def _event(record: Record) -> bytes:
    """A report as a TFRecord of a TensorBoard event."""
    from tensorboardX.proto.event_pb2 import Event
    from tensorboardX.proto.summary_pb2 import Summary as Values

    place = "synthetic/" if record.get("synthetic") else ""
    values = [
        Values.Value(tag=place + name, simple_value=number)
        for name, number in record.items()
        if name not in ("step", "synthetic", "time/unix")
    ]
    when = record.get("time/unix", 0.0)
    event = Event(wall_time=when, step=int(record["step"]), summary=Values(value=values))
    return _framed(event.SerializeToString())


def _first_event() -> bytes:
    from tensorboardX.proto.event_pb2 import Event

    return _framed(Event(wall_time=time.time(), file_version="brain.Event:2").SerializeToString())


def _framed(data: bytes) -> bytes:
    """The TFRecord frame: length, checksum of the length, data, checksum of the data."""
    from tensorboardX.record_writer import masked_crc32c

    length = len(data).to_bytes(8, "little")
    checks = [masked_crc32c(part).to_bytes(4, "little") for part in (length, data)]
    return length + checks[0] + data + checks[1]
