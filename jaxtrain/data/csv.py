"""Texts with labels out of a CSV file."""

import csv as reader
import pathlib
from collections.abc import Iterator

import numpy as np

from jaxtrain.data.sources import Dataset, from_arrays
from jaxtrain.data.text import padded
from jaxtrain.data.vocabulary import vocabulary
from jaxtrain.errors import UserError


def csv(
    *,
    file: str,
    dir: str = "",
    text: str = "text",
    label: str = "label",
    length: int = 256,
    tokenizer: str = "",
    validation: float = 0.1,
    test: float = 0.1,
) -> Dataset:
    """{"tokens": uint8 or int32 [length], "length": int32 [], "label": int32 []}, of a CSV file with a line of names.

    `file` is in `dir` where that is given, UTF-8; `text` and `label` name its columns. Classes are the labels found, in
    the order of their names. What is longer than `length` tokens is cut off; tokens are bytes, or those of `tokenizer`
    (a tokenizer.json), or "words:8192", as many hashes of words. Cut by class into the given shares. Raises UserError
    naming the line that is no such row.
    """
    path = pathlib.Path(dir, file).expanduser()
    texts, labels = zip(*_rows(path, text, label), strict=True)
    words = vocabulary(tokenizer)
    names = sorted(set(labels))
    if len(names) < 2:
        raise UserError(f"{path}: column {label!r} is {names[0]!r} in every row; expected two classes or more")
    arrays = padded([tokens for tokens, _ in words.encode([each.encode() for each in texts])], length)
    number = {name: place for place, name in enumerate(names)}
    arrays["label"] = np.array([number[each] for each in labels], np.int32)
    return from_arrays(arrays, validation=validation, test=test, class_names=names, name=path.stem)


def _rows(path: pathlib.Path, text: str, label: str) -> Iterator[tuple[str, str]]:
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            rows = reader.DictReader(file)
            for column in (text, label):
                if column not in (rows.fieldnames or ()):
                    named = ", ".join(rows.fieldnames or ["none"])
                    raise UserError(f"{path} has no column {column!r}; its first line names {named}")
            empty = True
            for row in rows:
                if row[text] is None or not row[label]:
                    raise UserError(
                        f"{path} line {rows.line_num}: no {label!r} or no {text!r} in this row; mend the file"
                    )
                empty = False
                yield row[text], row[label]
            if empty:
                raise UserError(f"{path} has no rows")
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}; set config.data.file") from None
    except (UnicodeDecodeError, reader.Error) as error:
        raise UserError(f"{path} is no CSV file in UTF-8 ({error})") from None
