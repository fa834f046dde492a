"""Pictures with labels from TensorFlow Datasets: the registered builders, read by record number.

TensorFlow is not imported to name, check, index, cut or read a set; only decoding in a graph and a first
preparation use it.
"""

import os
import shlex
from typing import Any

import jax
import numpy as np

from jaxtrain.config.lookup import nearest
from jaxtrain.data import roles, tfds_builder
from jaxtrain.data.damage import Damage
from jaxtrain.data.indexcache import cached
from jaxtrain.data.pictures import MODES, Pictures
from jaxtrain.data.records import ArrayRecords, Compressed, Records, TFRecords, integers
from jaxtrain.data.sources import Dataset, Source, Spec, subset
from jaxtrain.errors import UserError

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
    max_corrupt: int = 0,
) -> Dataset:
    """A data set of TFDS: {"image": uint8 [H, W, C], "label": int32 []}, from features of these or other names.

    `dataset` is a name as tfds takes it ("cifar10", "cifar10_corrupted/fog_1"); the data is in `dir`, else in
    $TFDS_DATA_DIR, else in ~/tensorflow_datasets, and is downloaded and prepared there where it is missing
    and its host can be reached. Splits named validation and test keep their roles; a missing one is the given
    share of the training split, cut by class once for ever (0: no such role). `limit` takes the first examples
    of each role only, for trying things out (0: all). Up to `max_corrupt` damaged examples are left out of
    losses and metrics, each told (0: the first ends the run), see `data.damage`.

    Raises UserError for an unknown set, version or feature, pictures of unequal sizes, damaged or missing
    files; `open()` raises DataAbsent where there is no data and no way to get it.
    """
    folder = data_folder(dir)
    builder = tfds_builder.find(dataset, folder, version)
    splits, shares = builder.info.splits, {"validation": validation, "test": test}
    spec = _spec(dataset, builder.info.features, image, label)
    classes = builder.info.features[label]
    if max_corrupt < 0:
        raise UserError(f"config.data.max_corrupt is {max_corrupt}, expected 0 or more")

    def open_tfds() -> dict[str, Source]:
        if not tfds_builder.is_prepared(builder):
            tfds_builder.fetch(builder, dataset, folder)
        if "train" not in splits:
            raise UserError(f"data set {dataset} has no split 'train'; it has {', '.join(splits)}")
        damage = Damage(max_corrupt)
        own = [role for role in ("train", *shares) if role in splits]
        found = {role: open_split(builder, dataset, folder, role, image, label, damage) for role in own}
        ids = _cut(found["train"].stored, label, lenient=max_corrupt > 0, shares=_shares(splits, **shares))
        cut = {role: subset(found["train"], of_role) for role, of_role in ids.items()}
        sources: dict[str, Source] = {**found, **cut}
        return {role: _first(source, limit) for role, source in sources.items()}

    return Dataset(
        name=dataset,
        spec=spec,
        num_classes=classes.num_classes,
        class_names=tuple(classes.names),
        open=open_tfds,
        present=lambda: tfds_builder.is_prepared(builder),
        sizes={role: min(size, limit or size) for role, size in _sizes(splits, **shares).items()},
    )


def data_folder(dir: str = "") -> str:
    """Where TFDS sets are: `dir`, else what the environment says, else tfds' own default; absolute."""
    folder = os.path.expanduser(dir or os.environ.get("TFDS_DATA_DIR") or "~/tensorflow_datasets")
    return folder if "://" in folder else os.path.abspath(folder)


def open_split(builder: Any, dataset: str, folder: str, split: str, image: str, label: str, damage: Damage) -> Pictures:
    """The pictures and labels of one split, whole."""
    spec = _spec(dataset, builder.info.features, image, label)
    return Pictures(f"{dataset} {split}", open_records(builder, dataset, folder, split), spec, image, label, damage)


def open_records(builder: Any, dataset: str, folder: str, split: str) -> Records:
    """The records of one split. Raises UserError, for compressed files with the command that mends it."""
    kind = builder.info.file_format.value
    if kind not in _READERS:
        raise UserError(
            f"data set {dataset} is stored as {kind}, expected {' or '.join(_READERS)}: prepare it again "
            "with tfds build --file_format=array_record"
        )
    try:
        return _READERS[kind](*tfds_builder.files(builder, split))
    except Compressed as error:
        target = f"{folder}-array_record"
        command = [f"--data.dataset={dataset}", f"--data.dir={folder}", f"--to={target}"]
        raise UserError(
            f"{error}; run python -m jaxtrain.prepare {shlex.join(command)}, then set config.data.dir={target!r}"
        ) from error


def _cut(records: Records, label: str, *, lenient: bool, shares: dict[str, float]) -> dict[str, np.ndarray]:
    """Which of these examples go to which role, where there is more than one: it takes all labels, so it is kept."""
    sizes = roles.sizes(len(records), **shares)
    if len(sizes) == 1:
        return {}

    def cut() -> np.ndarray:
        labels = integers(records, label, lenient=lenient)
        return np.concatenate([*roles.split(labels, len(records), **shares).values()])

    ids = cached(records.stamps, f"cut by {label}, lenient {lenient}: {shares}", cut)  # int32 [N], role after role
    return dict(zip(sizes, np.split(ids, np.cumsum([*sizes.values()])[:-1]), strict=True))


def _first(source: Source, limit: int) -> Source:
    return subset(source, np.arange(limit)) if 0 < limit < len(source) else source


def _shares(splits: Any, **shares: float) -> dict[str, float]:
    """What to cut from the training split: nothing for a role that has a split of its own."""
    return {role: 0.0 if role in splits else share for role, share in shares.items()}


def _sizes(splits: Any, **shares: float) -> dict[str, int]:
    """Examples by role, as far as they are known without the data: all, or nothing."""
    if "train" not in splits:
        return {}
    own = {role: splits[role].num_examples for role in shares if role in splits}
    return {**roles.sizes(splits["train"].num_examples, **_shares(splits, **shares)), **own}


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


def _spec(dataset: str, features: Any, image: str, label: str) -> Spec:
    """Of one example. Raises UserError where the set has no such features."""
    picture = _image_spec(dataset, features, image)
    _feature(dataset, features, label, "ClassLabel")
    return {"image": picture, "label": jax.ShapeDtypeStruct((), np.int32)}


def _image_spec(dataset: str, features: Any, name: str) -> jax.ShapeDtypeStruct:
    feature = _feature(dataset, features, name, "Image")
    shape = tuple(feature.shape)
    if None in shape or len(shape) != 3 or shape[2] not in MODES or feature.np_dtype != np.uint8:
        raise UserError(
            f"data set {dataset}: feature {name!r} has shape {shape}, {np.dtype(feature.np_dtype)}; expected "
            "uint8 pictures of one size, (H, W, 1, 3 or 4)"
        )
    return jax.ShapeDtypeStruct(shape, np.uint8)
