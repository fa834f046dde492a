"""Texts to be learnt: files, or a set of TFDS such as tiny_shakespeare; and who speaks in a play."""

import collections
import dataclasses
import functools
import glob
import os
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jaxtrain.data import example, tfds_builder
from jaxtrain.data import tokens as rows
from jaxtrain.data.indexcache import Stamp, cached, stamps
from jaxtrain.data.records import Records
from jaxtrain.data.sources import DataAbsent, Dataset, Source, from_arrays
from jaxtrain.data.tfds import data_folder, open_records
from jaxtrain.data.vocabulary import Bytes, Vocabulary, Words, vocabulary
from jaxtrain.errors import UserError


@dataclasses.dataclass(frozen=True)
class Texts:
    """Documents of one role, and by what a cache tells them from others."""

    stamps: Sequence[Stamp]
    read: Callable[[], list[bytes]]


def text(
    *,
    dataset: str = "",
    files: str = "",
    dir: str = "",
    window: int = 256,
    stride: int = 0,
    tokenizer: str = "",
    pack: bool = False,
    separator: str = "",
    validation: float = 0.05,
    test: float = 0.05,
    feature: str = "text",
    version: str = "",
) -> Dataset:
    """Windows of `window` + 1 tokens out of texts: {"tokens": [window + 1], "bytes": int32 []}.

    dataset: a set of TFDS with a feature `feature` of text, found as `tfds` finds it; or files: a pattern such as
    "corpus/*.txt", in `dir` where that is given, in the order of their names. tokenizer: a tokenizer.json of Hugging
    Face's `tokenizers`; without, tokens are bytes (uint8). stride: of training windows, 0: window; 1 makes every
    position a beginning. pack: each file, record or, with `separator`, piece between separators is a text of its own
    with a token that ends it, and {"segments": int32 [window + 1]} numbers the texts of a window. Splits of the set are
    kept; what is missing is the given share of the text, in one piece off its end (0: no such role).

    Raises UserError for what does not exist, is no text, or is too short.
    """
    if bool(dataset) == bool(files):
        raise UserError(
            f"data text: dataset={dataset!r} and files={files!r}; give one of them, as dataset='tiny_shakespeare' or "
            "files='corpus/*.txt'"
        )
    if separator and not pack:
        raise UserError(f"data text: separator={separator!r} tells texts apart for pack=True; set it too")
    words = vocabulary(tokenizer)
    if isinstance(words, Words):
        raise UserError(f"data text: tokenizer={tokenizer!r} has no way back to text; take a tokenizer.json, or bytes")
    if pack and words.end < 0:
        raise UserError(f"data text: pack=True needs a token that ends a text, and {tokenizer} has none")
    of_bytes = isinstance(words, Bytes)
    corpus = _of_tfds(dataset, dir, feature, version) if dataset else _of_files(files, dir)

    def open_text() -> dict[str, Source]:
        found = {role: _stream(texts, words, tokenizer, pack, separator) for role, texts in corpus.open().items()}
        shares = {"validation": validation, "test": test}
        parts = rows.cut(
            len(found["train"]), **{role: 0.0 if role in found else share for role, share in shares.items()}
        )
        found |= {role: found["train"][part] for role, part in parts.items()}
        end = words.end if pack else -1
        return {
            role: rows.Windows(
                stream[:, 0] if not of_bytes else stream,
                window,
                stride if role == "train" else 0,
                end,
                None if of_bytes else stream[:, 1],
            )
            for role, stream in found.items()
        }

    return Dataset(
        name=dataset or "text",
        spec=rows.spec(window, of_bytes, packed=pack, counted=True),
        num_classes=words.size,
        class_names=(),
        open=open_text,
        present=corpus.present,
    )


def speakers(
    *,
    dataset: str = "tiny_shakespeare",
    dir: str = "",
    speakers: int = 8,
    length: int = 256,
    tokenizer: str = "",
    validation: float = 0.1,
    test: float = 0.1,
    feature: str = "text",
    version: str = "",
) -> Dataset:
    """Who speaks, of the `speakers` who say most: {"tokens": [length], "length": int32 [], "label": int32 []}.

    A play is paragraphs, each a line "NAME:" and what that one says; the name is left out, and a long speech is cut
    into pieces. Tokens are bytes (uint8), or int32: those of `tokenizer` (a tokenizer.json), or "words:8192", as many
    hashes of words. All splits of the set are taken together and cut by class: plays follow each other in it, and
    nobody speaks in two of them. Raises UserError for a text in which nobody speaks.
    """
    if speakers < 2 or length < 1:
        raise UserError(f"data speakers: speakers={speakers}, length={length}; expected 2 and 1 or more")
    corpus, words = _of_tfds(dataset, dir, feature, version), vocabulary(tokenizer)

    def opened() -> Dataset:
        # Joined as they are: the splits of tiny_shakespeare are cuts of one text.
        whole = b"".join(piece for texts in corpus.open().values() for piece in texts.read())
        names, label, pieces = _speeches(whole, speakers, length, words)
        arrays = padded(pieces, length) | {"label": label}
        return from_arrays(arrays, validation=validation, test=test, class_names=names, name="speakers")

    there = opened() if corpus.present() else None  # a megabyte: read at once, for the names
    spec = {
        "tokens": jax.ShapeDtypeStruct((length,), np.int32 if tokenizer else np.uint8),
        "length": jax.ShapeDtypeStruct((), np.int32),
        "label": jax.ShapeDtypeStruct((), np.int32),
    }
    return Dataset(
        name=f"speakers of {dataset}",
        spec=spec,
        num_classes=speakers,
        class_names=there.class_names if there else (),
        open=lambda: (there or opened()).open(),
        present=corpus.present,
        sizes=there.sizes if there else {},
    )


def padded(pieces: Sequence[np.ndarray], length: int) -> dict[str, np.ndarray]:
    """Tokens [N, length], zeros behind, and how many are text, int32 [N]; what is longer is cut off."""
    tokens = np.zeros((len(pieces), length), pieces[0].dtype if pieces else np.uint8)
    for row, piece in zip(tokens, pieces, strict=True):
        row[: len(piece)] = piece[:length]
    return {"tokens": tokens, "length": np.array([min(len(piece), length) for piece in pieces], np.int32)}


@dataclasses.dataclass(frozen=True)
class _Corpus:
    """Where texts come from. `open` gives role → texts, "train" among them."""

    open: Callable[[], Mapping[str, Texts]]
    present: Callable[[], bool]


def _of_tfds(dataset: str, dir: str, feature: str, version: str) -> _Corpus:
    folder = data_folder(dir)
    builder = tfds_builder.find(dataset, folder, version)
    kind = type(builder.info.features[feature]).__name__ if feature in builder.info.features else "missing"
    if kind != "Text":
        raise UserError(
            f"data set {dataset}: feature {feature!r} is {kind}, expected Text; it has "
            f"{', '.join(sorted(builder.info.features))}"
        )

    def opened() -> dict[str, Texts]:
        if not tfds_builder.is_prepared(builder):
            tfds_builder.fetch(builder, dataset, folder)
        splits = [role for role in ("train", "validation", "test") if role in builder.info.splits]
        if "train" not in splits:
            raise UserError(f"data set {dataset} has no split 'train'; it has {', '.join(builder.info.splits)}")
        found = {role: open_records(builder, dataset, folder, role) for role in splits}
        return {
            role: Texts(records.stamps, functools.partial(_texts, records, feature)) for role, records in found.items()
        }

    return _Corpus(opened, lambda: tfds_builder.is_prepared(builder))


def _texts(records: Records, feature: str) -> list[bytes]:
    """All records' texts. Raises UserError naming one that is damaged."""
    found = []
    for number in range(len(records)):
        try:
            (record,) = records.read(np.array([number]))
            found.append(example.features(record, 0, len(record), {feature: bytes})[feature])
        except (ValueError, IndexError) as error:
            raise UserError(f"{records.where(number)}: {error}; prepare the data set again or copy the file") from error
    return found


def _of_files(files: str, dir: str) -> _Corpus:
    pattern = os.path.join(os.path.expanduser(dir), files)

    def paths() -> list[str]:
        return sorted(path for path in glob.glob(pattern, recursive=True) if os.path.isfile(path))

    def opened() -> dict[str, Texts]:
        found = paths()
        if not found:
            raise DataAbsent(f"no file is called {pattern!r}; set config.data.files, and config.data.dir if need be")
        return {"train": Texts(stamps(found), lambda: [pathlib.Path(path).read_bytes() for path in found])}

    return _Corpus(opened, lambda: bool(paths()))


def _stream(texts: Texts, words: Vocabulary, tokenizer: str, pack: bool, separator: str) -> np.ndarray:
    """All documents in one row: uint8 [N] of bytes; else int32 [N, 2], tokens and the bytes they stand for."""

    def made() -> np.ndarray:
        documents = texts.read()
        if separator:
            documents = [piece for text in documents for piece in text.split(separator.encode()) if piece]
        encoded = words.encode(documents)
        if isinstance(words, Bytes):
            return _bytes([tokens for tokens, _ in encoded], words.end if pack else None)
        pairs = [np.stack([tokens, widths.astype(np.int32)], axis=1) for tokens, widths in encoded]
        ends = [np.array([[words.end, 0]], np.int32)] if pack else []
        return np.concatenate([each for pair in pairs for each in (pair, *ends)])

    if not tokenizer:
        return made()
    what = f"tokens, packed {pack}, separated by {separator!r}"
    return cached([*texts.stamps, *stamps([tokenizer])], what, made)


def _bytes(documents: Sequence[np.ndarray], end: int | None) -> np.ndarray:
    if end is None:
        return documents[0] if len(documents) == 1 else np.concatenate(documents)
    if any((document == end).any() for document in documents):
        raise UserError(f"data text: pack=True ends a text with byte {end}, and one holds it: is it a text?")
    last = np.array([end], np.uint8)
    return np.concatenate([each for document in documents for each in (document, last)])


def _speeches(
    play: bytes, speakers: int, length: int, words: Vocabulary
) -> tuple[tuple[str, ...], np.ndarray, list[np.ndarray]]:
    """Names, the one who says most first; whose (int32 [N]) each piece (up to `length` tokens) is."""
    spoken: dict[str, list[bytes]] = collections.defaultdict(list)
    for paragraph in play.split(b"\n\n"):
        name, colon, speech = paragraph.strip().partition(b":\n")
        if colon and b"\n" not in name:
            spoken[name.decode("utf-8", "replace")].append(speech)
    if len(spoken) < speakers:
        raise UserError(
            f"data speakers: {len(spoken)} speak in this text, and config.data.speakers is {speakers}; expected "
            "paragraphs that begin with a line 'NAME:'"
        )
    names = sorted(spoken, key=lambda name: (-sum(map(len, spoken[name])), name))[:speakers]
    found: list[tuple[int, Any]] = []
    for label, who in enumerate(names):
        for tokens, _ in words.encode(spoken[who]):
            found += [(label, tokens[start : start + length]) for start in range(0, len(tokens), length)]
    label_of = np.array([label for label, _ in found], np.int32)
    return tuple(names), label_of, [piece for _, piece in found]
