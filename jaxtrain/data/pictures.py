"""Pictures with labels out of records: decoded by Pillow or by TensorFlow, to the same pixels."""

import io
from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxtrain.data import damage, example
from jaxtrain.data.damage import Damage
from jaxtrain.data.records import Records
from jaxtrain.data.sources import Batch, Spec

MODES = {1: "L", 3: "RGB", 4: "RGBA"}  # Pillow's names of what can be decoded, by channels
_EIGHT_BIT = {"1", "L", "LA", "P", "PA", "RGB", "RGBA", "CMYK", "YCbCr"}


class Pictures:
    """One split: an EncodedSource over records that hold an encoded picture and an integer label.

    `name` is what to call the split. Up to `max_corrupt` damaged examples are borne, see `data.damage`.
    """

    def __init__(self, name: str, records: Records, spec: Spec, image: str, label: str, damage: Damage):
        self.name, self.stored, self.spec, self.damage = name, records, spec, damage
        self._image, self._label = image, label

    def __len__(self) -> int:
        return len(self.stored)

    def get(self, ids: np.ndarray) -> Batch:
        return damage.load(self, ids)

    def records(self, ids: np.ndarray) -> list[bytes]:
        return self.stored.read(ids)

    def decode(self, records: Sequence[bytes]) -> Batch:
        """By Pillow, which agrees with `decode_graph` to the bit: both use the accurate integer transform."""
        shape, wanted = self.spec["image"].shape, {self._image: bytes, self._label: int}
        images = np.empty((len(records), *shape), np.uint8)  # [B, H, W, C]
        labels = np.empty(len(records), np.int32)
        for row, record in enumerate(records):
            found = example.features(record, 0, len(record), wanted)
            images[row] = decode(found[self._image], shape)
            labels[row] = found[self._label]
        return {"image": images, "label": labels}

    def decode_graph(self, serialized: Any) -> dict[str, Any]:
        import tensorflow as tf

        shape = self.spec["image"].shape
        string, integer = (tf.io.FixedLenFeature([], dtype) for dtype in (tf.string, tf.int64))
        found = tf.io.parse_example(serialized, {self._image: string, self._label: integer})
        images = tf.map_fn(
            lambda encoded: _decode_graph(tf, encoded, shape),
            found[self._image],
            fn_output_signature=tf.TensorSpec(shape, tf.uint8),
        )
        return {"image": images, "label": tf.cast(found[self._label], tf.int32)}

    def describe(self, number: int) -> str:
        return f"example {number} of {self.name} ({self.stored.where(number)})"


def decode(encoded: bytes, shape: tuple[int, ...]) -> np.ndarray:
    """The pixels (uint8 [H, W, C]) of an encoded picture, by what it holds and not by what it is called.

    Three channels are made of grey, palette or CMYK; one or four must be there. Raises ValueError for a picture of
    another size or kind, and whatever Pillow raises for one that is damaged.
    """
    with opened(encoded) as picture:
        if picture.size != (shape[1], shape[0]):
            raise ValueError(f"the picture is {picture.height}x{picture.width}, expected {shape[0]}x{shape[1]}")
        return np.asarray(converted(picture, shape[2])).reshape(shape)


def opened(encoded: bytes) -> Any:
    """A Pillow picture. Raises ValueError for what is none of a known kind."""
    from PIL import Image, UnidentifiedImageError

    try:
        return Image.open(io.BytesIO(encoded))
    except UnidentifiedImageError as error:  # which names an object in memory
        raise ValueError(f"{len(encoded)} bytes that are no picture of a known kind") from error


def converted(picture: Any, channels: int) -> Any:
    """A Pillow picture of that many channels: three are made of grey, palette or CMYK; one or four must be there."""
    mode = MODES[channels]
    convertible = _EIGHT_BIT if channels == 3 else {mode, "1"} if channels == 1 else {mode}
    if picture.mode not in convertible:
        raise ValueError(f"the picture is of mode {picture.mode}, expected {mode}")
    return picture if picture.mode == mode else picture.convert(mode)


def _decode_graph(tf: Any, encoded: Any, shape: tuple[int, ...]) -> Any:
    """The same by TensorFlow's operations."""
    channels = 3 if shape[2] == 3 else 0  # 0: those of the picture, so that another number of them is an error
    # A PNG of 16 bits of grey, of which eight would be lost.
    deep = (tf.strings.substr(encoded, 0, 4) == b"\x89PNG") & (tf.strings.substr(encoded, 24, 2) == b"\x10\x00")
    with tf.control_dependencies([tf.debugging.Assert(~deep, ["a picture of 16 bits"])]):
        picture = tf.cond(
            tf.io.is_jpeg(encoded),
            lambda: tf.io.decode_jpeg(encoded, channels, dct_method="INTEGER_ACCURATE"),
            lambda: tf.io.decode_image(encoded, channels, expand_animations=False),
        )
    return tf.ensure_shape(picture, shape)
