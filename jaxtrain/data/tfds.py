"""Pictures with labels from TensorFlow Datasets: the registered builders, read by record number.

TensorFlow is not imported to name, check, index, cut or read a set; only `decode_graph` and a first
preparation use it.
"""

import contextlib
import http.client
import io
import os
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np
from absl import logging

from jaxtrain.data import example, roles
from jaxtrain.data.records import ArrayRecords, Records, TFRecords, integers
from jaxtrain.data.sources import Batch, DataAbsent, Dataset, Source, Spec, cut_source, subset
from jaxtrain.data.tensorflow_cpu import tensorflow
from jaxtrain.errors import UserError
from jaxtrain.lookup import nearest

_NETWORK_SECONDS = 10.0  # after which a host that holds a set's files counts as out of reach
_PICTURE_MODES = {1: "L", 3: "RGB", 4: "RGBA"}  # Pillow's names, by channels
_READERS: dict[str, type[TFRecords] | type[ArrayRecords]] = {
    "tfrecord": TFRecords,
    "array_record": ArrayRecords,
}


def tfds(
    *,
    dataset: str,
    dir: str = "",
    validation: float = 0.1,
    test: float = 0.2,
    image: str = "image",
    label: str = "label",
    version: str = "",
    limit: int = 0,
) -> Dataset:
    """A data set of TFDS: {"image": uint8 [H, W, C], "label": int32 []}, from features of these or other names.

    `dataset` is a name as tfds takes it ("cifar10", "cifar10_corrupted/fog_1"); the data is in `dir`, else in
    $TFDS_DATA_DIR, else in ~/tensorflow_datasets, and is downloaded and prepared there where it is missing
    and its host can be reached. Splits named validation and test keep their roles; a missing one is the given
    share of the training split, cut by class once for ever (0: no such role). `limit` takes the first examples
    of each role only, for trying things out (0: all).

    Raises UserError for an unknown set, version or feature, pictures of unequal sizes, damaged or missing
    files; `open()` raises DataAbsent where there is no data and no way to get it.
    """
    folder = os.path.expanduser(dir or os.environ.get("TFDS_DATA_DIR") or "~/tensorflow_datasets")
    builder = _builder(dataset, folder, version)
    spec = {
        "image": _image_spec(dataset, builder.info.features, image),
        "label": jax.ShapeDtypeStruct((), np.int32),
    }
    classes = _feature(dataset, builder.info.features, label, "ClassLabel")

    def present() -> bool:
        with _quiet():
            return builder.is_prepared()

    def open_tfds() -> dict[str, Source]:
        if not present():
            _prepare(builder, dataset, folder)
        roles = _roles(builder, dataset, spec, image, label, validation=validation, test=test)
        return {role: _first(source, limit) for role, source in roles.items()}

    return Dataset(
        name=dataset,
        spec=spec,
        num_classes=classes.num_classes,
        class_names=tuple(classes.names),
        open=open_tfds,
        present=present,
        sizes=_sizes(builder.info.splits, validation=validation, test=test),
    )


def _first(source: Source, limit: int) -> Source:
    return subset(source, np.arange(limit)) if 0 < limit < len(source) else source


class Pictures:
    """One split: an EncodedSource over records that hold an encoded picture and an integer label."""

    def __init__(self, name: str, records: Records, spec: Spec, image: str, label: str):
        self.name, self.spec = name, spec
        self._records, self._image, self._label = records, image, label

    def __len__(self) -> int:
        return len(self._records)

    def get(self, ids: np.ndarray) -> Batch:
        return self.decode(self.records(ids))

    def records(self, ids: np.ndarray) -> list[bytes]:
        return self._records.read(ids)

    def decode(self, records: Sequence[bytes]) -> Batch:
        """By Pillow, which agrees with `decode_graph` to the bit: both use the accurate integer transform."""
        shape, wanted = self.spec["image"].shape, {self._image: bytes, self._label: int}
        images = np.empty((len(records), *shape), np.uint8)  # [B, H, W, C]
        labels = np.empty(len(records), np.int32)
        for row, record in enumerate(records):
            found = example.features(record, 0, len(record), wanted)
            images[row] = _decode(found[self._image], shape)
            labels[row] = found[self._label]
        return {"image": images, "label": labels}

    def decode_graph(self, serialized: Any) -> dict[str, Any]:
        import tensorflow as tf

        shape = self.spec["image"].shape
        string, integer = (tf.io.FixedLenFeature([], dtype) for dtype in (tf.string, tf.int64))
        found = tf.io.parse_example(serialized, {self._image: string, self._label: integer})

        def decode(encoded: Any) -> Any:
            picture = tf.cond(
                tf.io.is_jpeg(encoded),
                lambda: tf.io.decode_jpeg(encoded, shape[2], dct_method="INTEGER_ACCURATE"),
                lambda: tf.io.decode_image(encoded, shape[2], expand_animations=False),
            )
            return tf.ensure_shape(picture, shape)

        images = tf.map_fn(decode, found[self._image], fn_output_signature=tf.TensorSpec(shape, tf.uint8))
        return {"image": images, "label": tf.cast(found[self._label], tf.int32)}

    def describe(self, number: int) -> str:
        return f"example {number} of {self.name} ({self._records.where(number)})"


def _decode(encoded: Any, shape: tuple[int, ...]) -> np.ndarray:
    from PIL import Image

    with Image.open(io.BytesIO(encoded)) as picture:
        mode = _PICTURE_MODES[shape[2]]
        pixels = np.asarray(picture if picture.mode == mode else picture.convert(mode))
    if pixels.shape[:2] != shape[:2]:
        raise ValueError(f"the picture is {pixels.shape[0]}x{pixels.shape[1]}, expected {shape[0]}x{shape[1]}")
    return pixels.reshape(shape)


def _roles(
    builder: Any, dataset: str, spec: Spec, image: str, label: str, *, validation: float, test: float
) -> dict[str, Source]:
    """The set's own splits, and what is missing cut from the training split."""
    splits = builder.info.splits
    if "train" not in splits:
        raise UserError(f"data set {dataset} has no split 'train'; it has {', '.join(splits)}")
    shares = _shares(splits, validation=validation, test=test)
    records = _records(builder, dataset, "train")
    labels = integers(records, label) if any(shares.values()) else None
    found = cut_source(Pictures(f"{dataset} train", records, spec, image, label), labels, **shares)
    for role in ("validation", "test"):
        if role in splits:
            own = _records(builder, dataset, role)
            found[role] = Pictures(f"{dataset} {role}", own, spec, image, label)
    return found


def _shares(splits: Any, **shares: float) -> dict[str, float]:
    """What to cut from the training split: nothing for a role that has a split of its own."""
    return {role: 0.0 if role in splits else share for role, share in shares.items()}


def _sizes(splits: Any, **shares: float) -> dict[str, int]:
    """Examples by role, as far as they are known without the data: all, or nothing."""
    if "train" not in splits:
        return {}
    own = {role: splits[role].num_examples for role in shares if role in splits}
    return {**roles.sizes(splits["train"].num_examples, **_shares(splits, **shares)), **own}


def _records(builder: Any, dataset: str, split: str) -> Records:
    kind = builder.info.file_format.value
    if kind not in _READERS:
        raise UserError(
            f"data set {dataset} is stored as {kind}, expected {' or '.join(_READERS)}: prepare it again "
            "with tfds build --file_format=array_record"
        )
    info = builder.info.splits[split]
    return _READERS[kind]([os.fspath(path) for path in info.filepaths], info.shard_lengths)


def _builder(dataset: str, folder: str, version: str) -> Any:
    """The tfds builder; UserError for a name, config or version that does not exist."""
    import tensorflow_datasets as library

    try:
        with _quiet():
            return library.builder(dataset, data_dir=folder, **({"version": version} if version else {}))
    except library.core.DatasetNotFoundError as error:
        known = library.list_builders(with_community_datasets=False)
        near = nearest(dataset.split("/")[0].split(":")[0], known)
        hint = f" Did you mean {near!r}?" if near else ""
        raise UserError(
            f"unknown TFDS data set {dataset!r}, and none is prepared in {folder}.{hint} "
            f"tfds has {len(known)}: https://www.tensorflow.org/datasets/catalog"
        ) from error
    except (AssertionError, ImportError, OSError, RuntimeError, TypeError, ValueError) as error:
        raise UserError(f"TFDS data set {dataset!r} in {folder}: {_line(error)}") from error


def _feature(dataset: str, features: Any, name: str, kind: str) -> Any:
    """The feature `name`, checked to be of class `kind`."""
    if name not in features:
        near = nearest(name, features)
        hint = f"did you mean {near!r}? " if near else ""
        raise UserError(f"data set {dataset} has no feature {name!r}; {hint}it has {', '.join(sorted(features))}")
    if type(features[name]).__name__ != kind:
        found = type(features[name]).__name__
        raise UserError(f"data set {dataset}: feature {name!r} is {found}, expected {kind}")
    return features[name]


def _image_spec(dataset: str, features: Any, name: str) -> jax.ShapeDtypeStruct:
    feature = _feature(dataset, features, name, "Image")
    shape = tuple(feature.shape)
    if None in shape or len(shape) != 3 or shape[2] not in _PICTURE_MODES or feature.np_dtype != np.uint8:
        raise UserError(
            f"data set {dataset}: feature {name!r} has shape {shape}, {np.dtype(feature.np_dtype)}; expected "
            "uint8 pictures of one size, (H, W, 1, 3 or 4)"
        )
    return jax.ShapeDtypeStruct(shape, np.uint8)


def _prepare(builder: Any, dataset: str, folder: str) -> None:
    """Downloads and prepares the set in `folder`; DataAbsent where its host is out of reach or it fails."""
    remedy = (
        "set TFDS_DATA_DIR or config.data.dir to a folder that holds it, or on a connected machine run "
        f"tfds build {dataset} --data_dir=DIR and copy DIR"
    )
    url = next(iter(getattr(builder, "url_infos", None) or ()), None)
    if url is not None and url.startswith("http") and not _reachable(url):
        raise DataAbsent(f"data set {dataset} is not prepared in {folder}, and {url} cannot be reached; {remedy}")
    import tensorflow_datasets as library

    tensorflow()  # before tfds imports it
    try:
        builder.download_and_prepare(download_config=library.download.DownloadConfig(try_download_gcs=False))
    except Exception as error:  # whatever a builder's own code raises
        raise DataAbsent(f"data set {dataset} cannot be prepared in {folder}: {_line(error)}; {remedy}") from error


def _reachable(url: str) -> bool:
    """Whether the host answers at all, in bounded time: looking up its name may hang too, so in a thread."""
    answers: list[bool] = []

    def ask() -> None:
        request = urllib.request.Request(url, method="HEAD")
        try:
            urllib.request.urlopen(request, timeout=_NETWORK_SECONDS).close()
        except (urllib.error.HTTPError, http.client.HTTPException):
            pass  # an answer: this host takes no HEAD, or wants a browser
        except OSError:
            return
        answers.append(True)

    thread = threading.Thread(target=ask, daemon=True, name="jaxtrain-reachable")
    thread.start()
    thread.join(_NETWORK_SECONDS)
    return bool(answers)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without tfds' warnings of a folder that is not there: our one line says it better."""
    verbosity = logging.get_verbosity()
    logging.set_verbosity(logging.ERROR)
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)


def _line(error: BaseException) -> str:
    """The first line of a message that may have fifty, without tfds' dump of the arguments before it."""
    line = (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".: ")
    return line.partition('}": ')[2] or line
