"""Text to numbers: bytes as they are, hashed words, or a tokenizer made with Hugging Face's `tokenizers`."""

import pathlib
import re
import zlib
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from jaxtrain.errors import UserError

WORDS = "words:"  # and how many numbers there are
_WORD = re.compile(r"\w+|[^\w\s]")  # or a mark
_ENDS = ("<|endoftext|>", "</s>", "<|end_of_text|>", "<eos>", "[SEP]")  # what tokenizers call the end of a text


class Vocabulary(Protocol):
    """size: tokens in all; end: the one that ends a text, -1 where there is none."""

    size: int
    end: int

    def encode(self, texts: Sequence[bytes]) -> list[tuple[np.ndarray, np.ndarray]]:
        """Of each UTF-8 text its tokens, integers [n], and how many of its bytes each stands for, uint8 [n]."""

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of tokens."""


class Bytes:
    """The 256 bytes. A text ends with byte 0, which none contains."""

    size, end = 256, 0

    def encode(self, texts: Sequence[bytes]) -> list[tuple[np.ndarray, np.ndarray]]:
        """uint8 and ones; nothing is copied."""
        arrays = [np.frombuffer(text, np.uint8) for text in texts]
        return [(array, np.ones_like(array)) for array in arrays]

    def decode(self, tokens: Sequence[int]) -> str:
        """What is no UTF-8 is shown as U+FFFD."""
        return bytes(tokens).decode("utf-8", "replace")


class Words:
    """Words and marks by their hash, 1 to size - 1, whatever their case: Weinberger et al., "Feature Hashing", 2009.

    Nothing is learnt or kept, so that the same word has the same number in every text; there is no way back.
    """

    end = -1

    def __init__(self, size: int):
        self.size = size

    def encode(self, texts: Sequence[bytes]) -> list[tuple[np.ndarray, np.ndarray]]:
        """int32 and uint8. What is no UTF-8 is taken for U+FFFD."""
        found = [_WORD.findall(text.decode("utf-8", "replace")) for text in texts]
        return [(self._numbers(words), _sizes(words)) for words in found]

    def _numbers(self, words: Sequence[str]) -> np.ndarray:
        return np.array([1 + zlib.crc32(word.lower().encode()) % (self.size - 1) for word in words], np.int32)

    def decode(self, tokens: Sequence[int]) -> str:
        raise UserError(f"tokens of '{WORDS}{self.size}' are hashes of words, which cannot be turned back into text")


def _sizes(words: Sequence[str]) -> np.ndarray:
    return np.array([min(255, len(word.encode())) for word in words], np.uint8)


class Subwords:
    """A `tokenizer.json`. Raises UserError where it, or the package that reads it, is missing."""

    def __init__(self, path: str):
        self._path = path
        self._tokenizer = _read(path)
        self.size = int(self._tokenizer.get_vocab_size(with_added_tokens=True))
        found = [self._tokenizer.token_to_id(name) for name in _ENDS]
        self.end = next((number for number in found if number is not None), -1)

    def encode(self, texts: Sequence[bytes]) -> list[tuple[np.ndarray, np.ndarray]]:
        """int32 and uint8. Raises UserError for what is no UTF-8."""
        try:
            decoded = [text.decode() for text in texts]
        except UnicodeDecodeError as error:
            raise UserError(
                f"the text is not UTF-8 ({error}), which a tokenizer needs: convert it, or learn bytes "
                "(config.data.tokenizer='')"
            ) from None
        encodings = self._tokenizer.encode_batch(decoded, add_special_tokens=False)
        return [
            (np.array(each.ids, np.int32), _widths(text, each)) for text, each in zip(decoded, encodings, strict=True)
        ]

    def decode(self, tokens: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(tokens), skip_special_tokens=False))


def vocabulary(tokenizer: str = "") -> Vocabulary:
    """Of the file `tokenizer`; hashed words where that is "words:8192" or so; the bytes where it is ""."""
    if tokenizer.startswith(WORDS):
        size = tokenizer.removeprefix(WORDS)
        if not size.isdecimal() or int(size) < 2:
            raise UserError(f"config.data.tokenizer is {tokenizer!r}, expected '{WORDS}' and a number from 2 on")
        return Words(int(size))
    return Subwords(tokenizer) if tokenizer else Bytes()


def _read(path: str) -> Any:
    try:
        from tokenizers import Tokenizer
    except ImportError:
        raise UserError(
            f"config.data.tokenizer is {path!r}, and the package tokenizers is missing: pip install 'jaxtrain[text]'"
        ) from None
    if not pathlib.Path(path).is_file():
        raise UserError(f"config.data.tokenizer is {path!r}, which is no file; expected a tokenizer.json")
    try:
        return Tokenizer.from_file(path)
    except Exception as error:  # the package has no class of its own for it
        raise UserError(f"config.data.tokenizer: {path} is no tokenizer.json ({error})") from None


def _widths(text: str, encoding: Any) -> np.ndarray:
    """Bytes by which each token carries the text on: they add up to where the last of them ends."""
    lengths = [len(character.encode()) for character in text]
    before = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])  # bytes before each character
    ends = before[[end for _, end in encoding.offsets]] if encoding.offsets else np.zeros(0, np.int64)
    return np.diff(np.maximum.accumulate(ends), prepend=0).clip(0, 255).astype(np.uint8)
