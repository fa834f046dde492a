"""Files to predict on: pictures, arrays or tables, as the arrays that a model was trained on, a batch at a time."""

import contextlib
import csv
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

import numpy as np

from jaxtrain.data import folder, pictures
from jaxtrain.data.sources import Batch, Spec
from jaxtrain.data.text import padded
from jaxtrain.data.vocabulary import vocabulary
from jaxtrain.errors import UserError

Rows = Iterator[tuple[list[str], Batch]]  # what to call each example, and their arrays [B, ...]
KINDS = "a folder of pictures, a picture, .npy, .npz, .csv, or .txt with a text in each line"


def read(path: Path, spec: Spec, data: Mapping[str, Any], size: int) -> Rows:
    """Batches of up to `size` examples in the order of names, rows or lines.

    `spec` is that of the training's examples, `data` its `config.data`: pictures are cut to size as its evaluation did,
    or must be of that size. Nothing in a file is executed. Raises UserError for what is not there, of another kind,
    damaged or empty.
    """
    if not path.exists():
        raise UserError(f"--input={path} is not there; expected {KINDS}")
    suffix = path.suffix.lower()
    if "length" in spec and suffix in (".csv", ".txt"):
        return _texts(path, spec, data, size)
    if path.is_dir() or suffix in folder.SUFFIXES:
        return _pictures(path, spec, data, size)
    readers: dict[str, Callable[[Path, Spec, int], Rows]] = {".npy": _array, ".npz": _arrays, ".csv": _table}
    if suffix not in readers:
        raise UserError(f"--input={path} is of no known kind; expected {KINDS}")
    return readers[suffix](path, spec, size)


def _pictures(path: Path, spec: Spec, data: Mapping[str, Any], size: int) -> Rows:
    if "image" not in spec:
        raise UserError(f"--input={path} is of pictures; this model learnt from {_inputs(spec)}")
    shape = spec["image"].shape
    folders = [path, *(each for each in sorted(path.rglob("*")) if each.is_dir())] if path.is_dir() else []
    files = [file for each in folders for file in _pictures_in(each, alone=len(folders) == 1)] or [path]

    def decoded(file: Path) -> np.ndarray:
        try:
            encoded = file.read_bytes()
            return folder.cropped(encoded, shape[0]) if data["name"] == "folder" else pictures.decode(encoded, shape)
        except Exception as error:  # whatever Pillow raises for a damaged file
            reason = (str(error) or type(error).__name__).splitlines()[0]
            raise UserError(f"{file} cannot be predicted on: {reason}; mend it, or take it out of there") from error

    for some in _batched(files, size):
        names = [str(file.relative_to(path) if file != path else file.name) for file in some]
        yield names, {"image": np.stack([decoded(file) for file in some])}


def _pictures_in(where: Path, *, alone: bool) -> list[Path]:
    if not alone and not any(each.is_file() for each in where.iterdir()):
        return []
    return folder.pictures_in(where, folders=not alone)


def _array(path: Path, spec: Spec, size: int) -> Rows:
    names = [name for name in spec if name != "label"]
    if len(names) != 1:
        raise UserError(
            f"--input={path} holds one array; this model learnt from {_inputs(spec)}: give an .npz of those"
        )
    return _slices(path, {names[0]: _loaded(path)}, size)


def _arrays(path: Path, spec: Spec, size: int) -> Rows:
    found = _loaded(path)
    try:
        return _slices(path, {name: found[name] for name in found.files if name in spec}, size)
    except ValueError as error:
        raise UserError(f"--input={path} cannot be read: {error}") from error


def _loaded(path: Path) -> Any:
    try:
        return np.load(path, allow_pickle=False, mmap_mode="r")
    except (OSError, ValueError, EOFError) as error:
        raise UserError(f"--input={path} cannot be read as arrays of numbers: {str(error).splitlines()[0]}") from error


def _slices(path: Path, arrays: Mapping[str, Any], size: int) -> Rows:
    lengths = {len(array) if array.ndim else 0 for array in arrays.values()}
    if len(lengths) != 1 or 0 in lengths:
        found = ", ".join(f"{name} {list(array.shape)}" for name, array in arrays.items()) or "none that it learnt from"
        raise UserError(f"--input={path} holds {found}; expected arrays of as many examples, one or more")
    for some in _batched(range(lengths.pop()), size):
        rows = slice(some[0], some[-1] + 1)
        yield [str(row) for row in some], {name: np.asarray(array[rows]) for name, array in arrays.items()}


def _table(path: Path, spec: Spec, size: int) -> Rows:
    """Numbers: a column for each value of the one input, in order; a column "label" is passed over."""
    fields = {name: field for name, field in spec.items() if name != "label"}
    if len(fields) != 1 or not np.issubdtype(next(iter(fields.values())).dtype, np.floating):
        raise UserError(f"--input={path} holds numbers; this model learnt from {_inputs(spec)}")
    ((name, field),) = fields.items()
    wanted = math.prod(field.shape)
    with _opened(path) as file:
        lines = csv.reader(file)
        header = next(lines, [])
        columns = [place for place, title in enumerate(header) if title != "label"]
        if len(columns) != wanted:
            raise UserError(
                f"--input={path} has {len(columns)} columns besides label, expected {wanted}, with a header"
            )
        for some in _batched(enumerate(lines, 2), size):
            values = [_numbers(path, number, line, columns) for number, line in some]
            yield (
                [str(number - 2) for number, _ in some],
                {name: np.array(values, field.dtype).reshape(-1, *field.shape)},
            )


def _texts(path: Path, spec: Spec, data: Mapping[str, Any], size: int) -> Rows:
    """Texts to be classified: the lines of a file, or the column of a table that training took them from."""
    words = vocabulary(data.get("tokenizer", ""))
    title = data.get("text", "text")
    with _opened(path) as file:
        table = csv.DictReader(file) if path.suffix.lower() == ".csv" else None
        if table is not None and title not in (table.fieldnames or ()):
            raise UserError(f"--input={path} has no column {title!r}; it has {', '.join(table.fieldnames or ['none'])}")
        lines = (line.rstrip("\r\n") for line in file) if table is None else (row[title] or "" for row in table)
        for some in _batched(enumerate(lines), size):
            tokens = [found for found, _ in words.encode([line.encode() for _, line in some])]
            yield [str(number) for number, _ in some], padded(tokens, spec["tokens"].shape[0])


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[TextIO]:
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            yield file
    except (UnicodeDecodeError, csv.Error) as error:
        raise UserError(f"--input={path} is no text in UTF-8 ({error}); convert it") from error


def _numbers(path: Path, number: int, line: Sequence[str], columns: Sequence[int]) -> list[float]:
    try:
        return [float(line[place]) for place in columns]
    except (ValueError, IndexError) as error:
        raise UserError(f"--input={path}, line {number}: {error}; expected a number in each column") from error


def _inputs(spec: Spec) -> str:
    return ", ".join(f"{name} {np.dtype(field.dtype)}{list(field.shape)}" for name, field in spec.items())


def _batched(items: Any, size: int) -> Iterator[list[Any]]:
    items = iter(items)
    while some := list(itertools.islice(items, size)):
        yield some
