"""Writes a data set folder as tensorflow-datasets does, byte by byte, so that tests can write it wrongly."""

import io
import json
import pathlib
import struct

import numpy as np
from PIL import Image

from jaxtrain.data.records import masked_crc32c

CLASSES = ("ant", "bee", "cow")
Shards = list[list[bytes]]


def picture(number: int, shape: tuple[int, int, int], encoding: str) -> bytes:
    """A smooth picture with some noise, different for each number; JPEG with halved chroma."""
    random = np.random.default_rng(number)
    height, width, channels = shape
    coarse = random.integers(0, 200, (4, 4, channels)).repeat(height // 4, 0).repeat(width // 4, 1)
    pixels = (coarse + random.integers(0, 56, shape)).astype(np.uint8)
    stream = io.BytesIO()
    options = {"quality": 75} if encoding == "JPEG" else {}
    Image.fromarray(pixels.squeeze()).save(stream, encoding, **options)
    return stream.getvalue()


def example(**features: bytes | int) -> bytes:
    """A serialized tf.train.Example."""
    entries = b""
    for name, value in features.items():
        number, payload = (1, _field(1, value)) if isinstance(value, bytes) else (3, _field(1, _varint(value)))
        entries += _field(1, _field(1, name.encode()) + _field(2, _field(number, payload)))
    return _field(1, entries)


def records(count: int, shape: tuple[int, int, int] = (8, 8, 3), encoding: str = "PNG", first: int = 0) -> list[bytes]:
    return [
        example(id=f"{number}".encode(), image=picture(number, shape, encoding), label=number % len(CLASSES))
        for number in range(first, first + count)
    ]


def write(
    folder: pathlib.Path,
    splits: dict[str, Shards],
    shape: tuple[int | None, int | None, int] = (8, 8, 3),
    kind: str = "tfrecord",
) -> pathlib.Path:
    """The set "tiny" in `folder`; returns the folder of its files."""
    path = folder / "tiny" / "1.0.0"
    path.mkdir(parents=True)
    image = {"dtype": "uint8", "shape": {"dimensions": [str(-1 if size is None else size) for size in shape]}}
    where = "tensorflow_datasets.core.features"
    features = {
        "id": {"pythonClassName": f"{where}.text_feature.Text", "text": {}},
        "image": {"pythonClassName": f"{where}.image_feature.Image", "image": image},
        "label": {
            "pythonClassName": f"{where}.class_label_feature.ClassLabel",
            "classLabel": {"numClasses": str(len(CLASSES))},
        },
    }
    top = {"pythonClassName": f"{where}.features_dict.FeaturesDict", "featuresDict": {"features": features}}
    (path / "features.json").write_text(json.dumps(top))
    (path / "label.labels.txt").write_text("\n".join(CLASSES) + "\n")
    info = {"name": "tiny", "version": "1.0.0", "fileFormat": kind, "splits": []}
    for split, shards in splits.items():
        info["splits"].append(
            {
                "name": split,
                "filepathTemplate": "{DATASET}-{SPLIT}.{FILEFORMAT}-{SHARD_X_OF_Y}",
                "shardLengths": [str(len(shard)) for shard in shards],
                "numBytes": "1",
            }
        )
        for number, shard in enumerate(shards):
            _write_shard(path / f"tiny-{split}.{kind}-{number:05d}-of-{len(shards):05d}", shard, kind)
    (path / "dataset_info.json").write_text(json.dumps(info))
    return path


def framed(data: bytes) -> bytes:
    """A record as it stands in a TFRecord file."""
    length = struct.pack("<Q", len(data))
    return length + struct.pack("<I", masked_crc32c(length)) + data + struct.pack("<I", masked_crc32c(data))


def _write_shard(path: pathlib.Path, shard: list[bytes], kind: str) -> None:
    if kind == "tfrecord":
        path.write_bytes(b"".join(map(framed, shard)))
        return
    from array_record.python.array_record_module import ArrayRecordWriter

    writer = ArrayRecordWriter(str(path), "group_size:1")
    for data in shard:
        writer.write(data)
    writer.close()


def _varint(value: int) -> bytes:
    value %= 2**64
    parts = []
    while value > 127:
        parts.append(value & 127 | 128)
        value >>= 7
    return bytes([*parts, value])


def _field(number: int, data: bytes) -> bytes:
    return _varint(number << 3 | 2) + _varint(len(data)) + data
