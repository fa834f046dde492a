"""TFDS sets by record number: index, labels, roles, pixels, and what is refused."""

import itertools
import os
import pathlib
import socket
import subprocess
import sys
import time

import numpy as np
import pytest
import tiny_tfds

from jaxtrain.data import example, pictures, records, tfds_builder
from jaxtrain.data.sources import DataAbsent, EncodedSource, synthetic
from jaxtrain.data.tfds import tfds
from jaxtrain.errors import UserError

KINDS = ("tfrecord", "array_record")


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch) -> pathlib.Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "jaxtrain" / "index"


def refusal(**options) -> str:
    with pytest.raises(UserError) as caught:
        tfds(**options).open()
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("encoding", ("PNG", "JPEG"))
def test_records_are_read_by_number_across_shards(tmp_path, kind, encoding):
    stored = tiny_tfds.records(30, encoding=encoding)
    tiny_tfds.write(tmp_path, {"train": [stored[:7], [], stored[7:]], "test": [stored[:4]]}, kind=kind)
    dataset = tfds(dataset="tiny", dir=str(tmp_path), validation=0.2)
    assert dataset.num_classes == 3 and dataset.class_names == tiny_tfds.CLASSES and dataset.present()
    sources = dataset.open()
    sizes = {"train": 24, "validation": 6, "test": 4}
    assert {role: len(source) for role, source in sources.items()} == dict(dataset.sizes) == sizes
    whole = sources["train"].source
    assert whole.records(np.array([29, 0, 6, 7])) == [stored[i] for i in (29, 0, 6, 7)]
    assert all(isinstance(source, EncodedSource) and source.spec == dataset.spec for source in sources.values())
    batch = sources["validation"].get(np.arange(6))
    numbers = sources["validation"].ids
    assert batch["label"].tolist() == (numbers % 3).tolist() and batch["label"].dtype == np.int32
    assert batch["image"].shape == (6, 8, 8, 3) and batch["image"].dtype == np.uint8
    assert sorted(np.bincount(batch["label"])) == [2, 2, 2]
    expected = pictures.decode(tiny_tfds.picture(int(numbers[3]), (8, 8, 3), encoding), (8, 8, 3))
    assert np.array_equal(batch["image"][3], expected)
    assert f"example {numbers[2]} of tiny train" in sources["validation"].describe(2)


def test_own_splits_are_kept_and_shares_of_nothing_make_no_role(tmp_path):
    stored = [tiny_tfds.records(12)]
    tiny_tfds.write(tmp_path, {"train": stored, "validation": [tiny_tfds.records(5)]})
    sources = tfds(dataset="tiny", dir=str(tmp_path), validation=0.5, test=0.25).open()
    assert {role: len(source) for role, source in sources.items()} == {"train": 9, "validation": 5, "test": 3}
    sources = tfds(dataset="tiny", dir=str(tmp_path), test=0).open()
    assert {role: len(source) for role, source in sources.items()} == {"train": 12, "validation": 5}


def test_pixels_are_those_of_tfds(tmp_path):
    import tensorflow_datasets

    tiny_tfds.write(tmp_path, {"train": [tiny_tfds.records(6, (8, 12, 1))]}, shape=(8, 12, 1))
    source = tfds(dataset="tiny", dir=str(tmp_path), validation=0, test=0).open()["train"]
    features = tensorflow_datasets.builder("tiny", data_dir=tmp_path).info.features
    batch = source.get(np.arange(6))
    for row, record in enumerate(source.records(np.arange(6))):
        theirs = features.deserialize_example_np(record)
        assert np.array_equal(batch["image"][row], theirs["image"])
        assert batch["label"][row] == theirs["label"]


def test_the_index_is_kept_and_follows_the_files(tmp_path, cache, monkeypatch):
    path = tiny_tfds.write(tmp_path, {"train": [tiny_tfds.records(9)]})
    build = records._index
    built = []
    monkeypatch.setattr(records, "_index", lambda *args: built.append(1) or build(*args))

    def labels():
        (train,) = tfds(dataset="tiny", dir=str(tmp_path), validation=0, test=0).open().values()
        return train.get(np.arange(9))["label"].tolist()

    assert labels() == labels() == [0, 1, 2] * 3 and len(built) == 1
    (shard,) = path.glob("tiny-train*")
    os.utime(shard, ns=(1, 1))
    assert labels() == [0, 1, 2] * 3 and len(built) == 2
    for file in cache.iterdir():
        file.write_bytes(b"no index at all")
    assert labels() == [0, 1, 2] * 3 and len(built) == 3


@pytest.mark.parametrize("mode", (0o500, None))
def test_a_cache_that_cannot_be_written_is_done_without(tmp_path, monkeypatch, mode):
    tiny_tfds.write(tmp_path, {"train": [tiny_tfds.records(9)]})
    blocked = tmp_path / "blocked"
    if mode is None:
        blocked.write_text("a file where a folder should be")
    else:
        blocked.mkdir(mode=mode)
    monkeypatch.setenv("XDG_CACHE_HOME", str(blocked))
    assert len(tfds(dataset="tiny", dir=str(tmp_path)).open()["train"]) == 6


def cut_short(shard: pathlib.Path) -> None:
    shard.write_bytes(shard.read_bytes()[:-50])


def too_long(shard: pathlib.Path) -> None:
    shard.write_bytes(shard.read_bytes() * 2)


def not_records(shard: pathlib.Path) -> None:
    shard.write_bytes(b"some text, which is no record file" * 9)


def header_only(shard: pathlib.Path) -> None:
    shard.write_bytes(b"abc")


DAMAGES = (pathlib.Path.unlink, cut_short, not_records, header_only)


# Two ArrayRecord files in a row are one sound file, which its footer describes.
@pytest.mark.parametrize("kind, damage", (*itertools.product(KINDS, DAMAGES), ("tfrecord", too_long)))
def test_a_damaged_shard_is_named(tmp_path, kind, damage):
    path = tiny_tfds.write(tmp_path, {"train": [tiny_tfds.records(5), tiny_tfds.records(5)]}, kind=kind)
    shard = sorted(path.glob("tiny-train*"))[1]
    damage(shard)
    message = refusal(dataset="tiny", dir=str(tmp_path))
    assert (shard.name if kind == "tfrecord" else "tiny-train") in message


def test_a_count_that_differs_from_the_info_is_refused(tmp_path):
    path = tiny_tfds.write(tmp_path, {"train": [tiny_tfds.records(5)]})
    info = path / "dataset_info.json"
    info.write_text(info.read_text().replace('"5"', '"6"'))
    assert "holds 5 records, dataset_info.json says 6" in refusal(dataset="tiny", dir=str(tmp_path))


@pytest.mark.parametrize(
    "record",
    (
        b"",
        b"\x00",
        b"no protocol buffer",
        b"\xff" * 40,
        tiny_tfds.example(image=b"x"),
        tiny_tfds.example(label=b"7"),
    ),
)
def test_a_record_without_its_label_is_named(tmp_path, record):
    stored = tiny_tfds.records(9)
    tiny_tfds.write(tmp_path, {"train": [[*stored[:4], record, *stored[5:]]]})
    message = refusal(dataset="tiny", dir=str(tmp_path))
    assert "tiny-train.tfrecord-00000-of-00001 record 4 at byte" in message and "'label'" in message


@pytest.mark.parametrize("value", (0, 1, 127, 128, 300, 2**31 - 1, -1, -5))
def test_integers_of_an_example_are_read_exactly(value):
    record = b"before" + tiny_tfds.example(image=b"\x08" * 200, label=value, other=b"") + b"after"
    found = example.features(record, 6, len(record) - 5, {"label": int, "image": bytes})
    assert found == {"label": value, "image": b"\x08" * 200}


@pytest.mark.parametrize(
    "options, words",
    (
        ({"dataset": "cifra10"}, ("cifra10", "Did you mean 'cifar10'?")),
        ({"dataset": "tinny"}, ("tinny", "none is prepared in")),
        ({"dataset": "cifar10", "version": "9.9.9"}, ("9.9.9", "3.0.2")),
        ({"dataset": "cifar10:3.0.2", "version": "3.0.2"}, ("cifar10:3.0.2", "version")),
        ({"dataset": "cifar10/nope"}, ("nope",)),
        ({"dataset": "../tiny"}, ("../tiny",)),
        ({"dataset": ""}, ("''",)),
        ({"dataset": "tiny", "image": "imgae"}, ("'imgae'", "did you mean 'image'?", "id, image, label")),
        ({"dataset": "tiny", "label": "id"}, ("'id' is Text", "ClassLabel")),
        ({"dataset": "tiny", "image": "label"}, ("'label' is ClassLabel", "Image")),
        ({"dataset": "tiny", "validation": 2}, ("validation=2",)),
    ),
)
def test_what_does_not_exist_is_refused_with_the_nearest_name(tmp_path, options, words):
    tiny_tfds.write(tmp_path, {"train": [tiny_tfds.records(9)]})
    message = refusal(dir=str(tmp_path), **options)
    assert all(word in message for word in words), message


def test_pictures_of_unequal_sizes_and_sets_without_training_are_refused(tmp_path):
    tiny_tfds.write(tmp_path / "a", {"train": [tiny_tfds.records(9)]}, shape=(None, None, 3))
    assert "(None, None, 3)" in refusal(dataset="tiny", dir=str(tmp_path / "a"))
    tiny_tfds.write(tmp_path / "b", {"test": [tiny_tfds.records(9)]})
    assert "no split 'train'; it has test" in refusal(dataset="tiny", dir=str(tmp_path / "b"))


def test_an_absent_set_without_a_network_says_what_to_do(tmp_path, monkeypatch):
    def no_network(*args, **kwargs):
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", no_network)
    dataset = tfds(dataset="cifar10", dir=str(tmp_path))
    assert dataset.spec["image"].shape == (32, 32, 3) and not dataset.sizes and not dataset.present()
    assert len(synthetic(dataset).open()["train"]) == 512
    began = time.monotonic()
    with pytest.raises(DataAbsent, match="TFDS_DATA_DIR.*config.data.dir.*tfds build cifar10") as caught:
        dataset.open()
    assert time.monotonic() - began < 20 and "\n" not in str(caught.value)


def test_a_host_that_never_answers_counts_as_out_of_reach(monkeypatch):
    monkeypatch.setattr(tfds_builder, "_NETWORK_SECONDS", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        assert not tfds_builder._reachable(f"http://127.0.0.1:{silent.getsockname()[1]}/data.zip")


def test_the_folder_comes_from_the_option_then_the_environment(tmp_path, monkeypatch):
    tiny_tfds.write(tmp_path / "a", {"train": [tiny_tfds.records(9)]})
    tiny_tfds.write(tmp_path / "b", {"train": [tiny_tfds.records(12)]})
    monkeypatch.setenv("TFDS_DATA_DIR", str(tmp_path / "b"))
    options = {"dataset": "tiny", "validation": 0, "test": 0}
    assert len(tfds(**options).open()["train"]) == 12
    assert len(tfds(dir=str(tmp_path / "a"), **options).open()["train"]) == 9


def test_reading_imports_no_tensorflow_and_says_nothing(tmp_path):
    tiny_tfds.write(tmp_path, {"train": [tiny_tfds.records(30)]})
    code = (
        "import sys, numpy as np; from jaxtrain.data.tfds import tfds; from jaxtrain.data import host;"
        f"train = tfds(dataset='tiny', dir={str(tmp_path)!r}).open()['train'];"
        "batch = next(host.batches(train, lambda step: np.arange(4), 0, 1, kind='threads'));"
        "assert batch['image'].shape == (4, 8, 8, 3);"
        "assert 'tensorflow' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout == done.stderr == ""


def test_the_shared_cifar_is_read_whole(shared_tfds):
    dataset = tfds(dataset="cifar10", dir=str(shared_tfds))
    sources = dataset.open()
    assert {role: len(source) for role, source in sources.items()} == dict(dataset.sizes)
    assert dict(dataset.sizes) == {"train": 45_000, "validation": 5_000, "test": 10_000}
    labels = records.integers(sources["train"].source._records, "label")
    for role in ("train", "validation"):
        assert len(set(np.bincount(labels[sources[role].ids]))) == 1  # the classes are equal
    assert not set(sources["train"].ids) & set(sources["validation"].ids)
    batch = sources["test"].get(np.array([0, 9_999]))
    assert batch["image"].shape == (2, 32, 32, 3) and batch["image"].std() > 10
