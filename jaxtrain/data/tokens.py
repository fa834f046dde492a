"""Windows of a long row of tokens, by number; and rows of tokens that somebody has written to files."""

import dataclasses
import pathlib

import jax
import numpy as np

from jaxtrain.data import roles
from jaxtrain.data.sources import Batch, DataAbsent, Dataset, Source, Spec
from jaxtrain.errors import UserError

FILES = {"train": ("train.bin",), "validation": ("validation.bin", "val.bin"), "test": ("test.bin",)}


@dataclasses.dataclass(frozen=True)
class Windows:
    """Example i: the `length` + 1 tokens of `stream` from i · stride on. The step from one to the next costs nothing.

    stream: uint8 (bytes) or any integers [N], in memory or mapped. end: the token that ends a text, or -1: with it an
    example has `segments`, int32 [length + 1], which number its texts from 1. widths: uint8 [N], bytes that each token
    stands for; of bytes that is known. With it an example has `bytes`, int32 [], of the tokens to be predicted.
    Tokens at the end that fill no window are left out. Raises UserError for a stream that is too short for one.
    """

    stream: np.ndarray
    length: int
    stride: int = 0  # 0: length, so that each token is predicted once
    end: int = -1
    widths: np.ndarray | None = None

    def __post_init__(self) -> None:
        if self.length < 1 or self.stride < 0:
            raise UserError(f"windows of {self.length} tokens, stride {self.stride}: expected 1 or more, and 0 or more")
        if len(self.stream) <= self.length:
            raise UserError(
                f"a text of {len(self.stream)} tokens holds no window of {self.length} + 1: take more text, a larger "
                "share of it, or a smaller config.data.window"
            )

    @property
    def spec(self) -> Spec:
        counted = self.widths is not None or self.stream.dtype == np.uint8
        return spec(self.length, self.stream.dtype == np.uint8, packed=self.end >= 0, counted=counted)

    def __len__(self) -> int:
        return (len(self.stream) - 1 - self.length) // (self.stride or self.length) + 1

    def get(self, ids: np.ndarray) -> Batch:
        starts = ids.astype(np.int64) * (self.stride or self.length)
        places = starts[:, None] + np.arange(self.length + 1)[None, :]  # [B, T + 1]
        tokens, found = np.asarray(self.stream[places]), self.spec
        batch: Batch = {"tokens": tokens.astype(found["tokens"].dtype)}
        asked = np.ones((len(ids), self.length), bool)
        if self.end >= 0:
            over = np.cumsum(tokens[:, :-1] == self.end, axis=1)  # texts that are over before each token
            batch["segments"] = np.pad(over + 1, ((0, 0), (1, 0)), constant_values=1).astype(np.int32)
            asked = batch["segments"][:, 1:] == batch["segments"][:, :-1]
        if "bytes" in found:
            widths = tokens != self.end if self.widths is None else self.widths[places]
            batch["bytes"] = (widths[:, 1:] * asked).sum(axis=1, dtype=np.int32)
        return batch


def spec(length: int, of_bytes: bool, *, packed: bool, counted: bool) -> Spec:
    """Of one window, before there are any."""
    found = {"tokens": jax.ShapeDtypeStruct((length + 1,), np.uint8 if of_bytes else np.int32)}
    if packed:
        found["segments"] = jax.ShapeDtypeStruct((length + 1,), np.int32)
    if counted:
        found["bytes"] = jax.ShapeDtypeStruct((), np.int32)
    return found


def cut(size: int, *, validation: float, test: float) -> dict[str, slice]:
    """Role → its part of a row of `size` tokens: training in front, then validation, then test; none overlap.

    In one piece each: neighbouring windows of one text would tell of each other. Raises UserError as `roles.sizes`.
    """
    found, start = {}, 0
    for role, count in roles.sizes(size, validation=validation, test=test).items():
        found[role], start = slice(start, start + count), start + count
    return found


def tokens(
    *,
    dir: str,
    vocabulary: int,
    window: int = 1024,
    stride: int = 0,
    end: int = -1,
    validation: float = 0.0005,
    test: float = 0.0,
    tokenizer: str = "",
) -> Dataset:
    """Token numbers in files, one after the other: train.bin, validation.bin (or val.bin), test.bin in `dir`.

    `vocabulary` is how many tokens there are: up to 65,536 are uint16, as nanoGPT writes them and
    `numpy.array(tokens, "<u2").tofile(…)`; more, as Llama 3 has, uint32, "<u4". They are mapped, never read as a whole.
    A role without a file is cut off the end of train.bin, in the given share
    (0: no such role). `window`, `stride` (of training windows) and `end`: see `Windows`. `tokenizer`: a tokenizer.json,
    for sampling.

    {"tokens": int32 [window + 1]}, with `end` also "segments". Raises UserError for files that hold no such numbers.
    """
    dtype = np.dtype("<u2" if vocabulary <= 1 << 16 else "<u4")
    folder, wanted = pathlib.Path(dir).expanduser(), {"validation": validation, "test": test}

    def open_tokens() -> dict[str, Source]:
        if not (folder / "train.bin").is_file():
            raise DataAbsent(f"there is no {folder / 'train.bin'}; set config.data.dir to a folder that holds it")
        streams = {role: _mapped(path, dtype) for role in FILES if (path := _file(folder, role))}
        shares = {role: 0.0 if role in streams else share for role, share in wanted.items()}
        train = streams["train"]
        streams |= {role: train[part] for role, part in cut(len(train), **shares).items()}
        return {
            role: Windows(stream, window, stride if role == "train" else 0, end) for role, stream in streams.items()
        }

    return Dataset(
        name="tokens",
        spec=spec(window, False, packed=end >= 0, counted=False),
        num_classes=vocabulary,
        class_names=(),
        open=open_tokens,
        present=lambda: (folder / "train.bin").is_file(),
    )


def _file(folder: pathlib.Path, role: str) -> pathlib.Path | None:
    return next((folder / name for name in FILES[role] if (folder / name).is_file()), None)


def _mapped(path: pathlib.Path, dtype: np.dtype) -> np.ndarray:
    size, width = path.stat().st_size, dtype.itemsize
    if not size or size % width:
        raise UserError(
            f"{path} holds {size} bytes, expected tokens of {width} bytes ({dtype.name}) for config.data.vocabulary"
        )
    return np.memmap(path, dtype, "r")
