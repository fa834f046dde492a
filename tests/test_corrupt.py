"""Damaged examples (Report 43): named in one line by any loader; where a data set bears some, masked and counted."""

import dataclasses
import errno
import io
import os

import numpy as np
import pytest
import tiny
import tiny_tfds
from PIL import Image, ImageFile
from tiny import same

from jaxtrain import train
from jaxtrain.config.keys import KEYS
from jaxtrain.data import damage, host, order
from jaxtrain.data.pictures import decode
from jaxtrain.data.sources import EncodedSource
from jaxtrain.data.tfds import tfds
from jaxtrain.errors import StorageError, UserError
from jaxtrain.step import Steps

SIZE, BAD, SHAPE = 30, 7, (8, 8, 3)
LOADERS = ("threads", "tf.data")
KINDS = ("tfrecord", "array_record")


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def encoded(pixels, encoding="PNG"):
    stream = io.BytesIO()
    Image.fromarray(pixels).save(stream, encoding)
    return stream.getvalue()


JPEG = tiny_tfds.picture(BAD, SHAPE, "JPEG")
RECORDS = {
    "zero bytes": tiny_tfds.example(image=b"", label=1),
    "a line of text": tiny_tfds.example(image=b"this is no picture", label=1),
    "a truncated JPEG": tiny_tfds.example(image=JPEG[: len(JPEG) * 7 // 10], label=1),
    "a picture of another size": tiny_tfds.example(image=tiny_tfds.picture(BAD, (8, 12, 3), "PNG"), label=1),
    "a picture of 16 bits": tiny_tfds.example(image=encoded(np.zeros((8, 8), np.uint16)), label=1),
    "a number for a picture": tiny_tfds.example(image=3, label=1),
    "no picture": tiny_tfds.example(label=1),
    "text for a label": tiny_tfds.example(image=JPEG, label=b"cat"),
    "no record": b"",
    "no Example": b"no protocol buffer",
}


def written(folder, record=None, kind="tfrecord", at=(BAD,), roles=("train",)):
    """The set with some records replaced. Example BAD is the second shard's third."""
    stored = tiny_tfds.records(SIZE)
    for number in at if record is not None else ():
        stored[number] = record
    path = tiny_tfds.write(folder, {role: [stored[:5], stored[5:]] for role in roles}, kind=kind)
    return sorted(path.glob("tiny-train*"))[1]


def flip(shard, offset):
    content = bytearray(shard.read_bytes())
    content[offset] ^= 4
    shard.write_bytes(content)


def opened(folder, **options):
    return tfds(dataset="tiny", dir=str(folder), **({"validation": 0, "test": 0} | options)).open()["train"]


def loaded(source, loader, threads=2, batch=10):
    plan = order.Shuffled((3,), batch, len(source))
    return list(host.batches(source, lambda step: plan(step)[0], 0, 6, kind=loader, threads=threads))


def named(error, kind="tfrecord"):
    message = str(error)
    assert "\n" not in message and f"example {BAD} of tiny train" in message
    assert f"tiny-train.{kind}-00001-of-00002 record 2" in message
    return message


@pytest.mark.parametrize("loader", LOADERS)
@pytest.mark.parametrize("record", RECORDS.values(), ids=RECORDS)
def test_a_damaged_example_is_named(tmp_path, record, loader):
    written(tmp_path, record)
    source = opened(tmp_path)
    with pytest.raises(UserError) as caught:
        loaded(source, loader)
    assert "config.data.max_corrupt" in named(caught.value) and caught.value.exit_code == 2
    with pytest.raises(UserError) as caught:  # also where a function of the user's own reads
        source.get(np.arange(SIZE))
    named(caught.value)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("loader", LOADERS)
def test_a_flipped_bit_is_found(tmp_path, kind, loader):
    """Pillow decodes most of these without a word: the file's own checksums tell."""
    shard = written(tmp_path, kind=kind)
    offset = shard.read_bytes().index(tiny_tfds.picture(BAD, SHAPE, "PNG")[-60:-20])
    source = opened(tmp_path)
    flip(shard, offset)
    with pytest.raises(UserError) as caught:
        loaded(source, loader)
    assert any(word in named(caught.value, kind) for word in ("checksum", "hash mismatch"))


def test_what_a_picture_holds_counts_and_not_its_name(tmp_path):
    """A PNG in a set of JPEGs, grey and palette pictures in one of colour: decoded, the same by both loaders."""
    stored = tiny_tfds.records(6, encoding="JPEG")
    grey = Image.open(io.BytesIO(JPEG)).convert("L")
    palette = Image.open(io.BytesIO(JPEG)).quantize()
    stored[2] = tiny_tfds.example(image=encoded(np.asarray(grey)), label=1)
    stream = io.BytesIO()
    palette.save(stream, "PNG")
    stored[4] = tiny_tfds.example(image=stream.getvalue(), label=1)
    tiny_tfds.write(tmp_path, {"train": [stored]})
    source = opened(tmp_path)
    ways = [next(host.batches(source, lambda step: np.arange(6), 0, 1, kind=loader)) for loader in LOADERS]
    assert np.array_equal(ways[0]["image"], ways[1]["image"])
    assert np.array_equal(ways[0]["image"][4], np.asarray(palette.convert("RGB")))


@pytest.mark.parametrize("channels", (1, 4))
def test_colours_are_not_turned_into_others(tmp_path, channels):
    """Pillow and TensorFlow make other greys of colours, so one or four channels must be there."""
    tiny_tfds.write(tmp_path, {"train": [tiny_tfds.records(1)]}, shape=(8, 8, channels))
    for loader in LOADERS:
        with pytest.raises(UserError, match="example 0 of tiny train .*: the picture is of mode RGB, expected"):
            list(host.batches(opened(tmp_path), lambda step: np.array([0]), 0, 1, kind=loader))


def test_a_huge_picture_is_refused_before_it_is_decoded(monkeypatch):
    large = encoded(np.zeros((1, 9), np.uint8))
    monkeypatch.setattr(ImageFile.ImageFile, "load", lambda self: pytest.fail("decoded"))
    with pytest.raises(ValueError, match="the picture is 1x9, expected 8x8"):
        decode(large, (8, 8, 1))


@pytest.mark.parametrize("loader", LOADERS)
def test_a_disk_that_fails_is_a_fault_of_storage_and_never_borne(tmp_path, monkeypatch, loader):
    written(tmp_path)
    source = opened(tmp_path, max_corrupt=9)
    monkeypatch.setattr(os, "pread", lambda *args: (_ for _ in ()).throw(OSError(errno.EIO, "Input/output error")))
    with pytest.raises(StorageError, match="example .* of tiny train .*Input/output error") as caught:
        loaded(source, loader)
    assert caught.value.exit_code == 5


def test_a_read_that_fails_once_is_a_fault_of_storage():
    class Once:
        spec, damage = tiny.data().spec, None

        def get(self, ids):
            if len(ids) > 1:
                raise OSError(errno.ESTALE, "Stale file handle")
            return {key: np.zeros((1, *field.shape), field.dtype) for key, field in self.spec.items()}

    with pytest.raises(StorageError, match="Stale file handle"):
        damage.load(Once(), np.arange(3))


@pytest.mark.parametrize("record", RECORDS.values(), ids=RECORDS)
def test_where_damage_is_borne_the_same_rows_are_masked_by_any_loader(tmp_path, record):
    written(tmp_path / "sound")
    written(tmp_path / "damaged", record)
    sound, source = opened(tmp_path / "sound"), opened(tmp_path / "damaged", max_corrupt=1)
    assert isinstance(source, EncodedSource)
    expected = loaded(sound, "threads")
    masked = 0
    ways = [loaded(source, "threads", 1), loaded(source, "threads", 5), loaded(source, "tf.data")]
    for step, batches in enumerate(zip(expected, *ways, strict=True)):
        ids = order.ids(3, step, 10, SIZE)[0]
        for batch in batches[1:]:
            assert batch["mask"].tolist() == (ids != BAD).tolist() and batch["mask"].dtype == bool
            for key in ("image", "label"):
                kept = (ids != BAD).reshape(-1, *[1] * (batch[key].ndim - 1))
                assert np.array_equal(batch[key], np.where(kept, batches[0][key], 0))
                assert batch[key].dtype == batches[0][key].dtype
        masked += int((ids == BAD).sum())
    assert masked == 2  # two epochs
    (news,) = source.damage.news()
    named(news)
    assert not source.damage.news()


def config(folder, **changes):
    data = dict(name="tfds", dataset="tiny", dir=str(folder), validation=0.2, test=0.2, max_corrupt=1)
    if "max_corrupt" in changes:
        data["max_corrupt"] = changes.pop("max_corrupt")
    return tiny.config(data=data, loader="threads", batch_size=8, devices=2, **changes)


def in_role(role, folder):
    """An example of a sound set that is cut into that role."""
    dataset = tfds(dataset="tiny", dir=str(folder), validation=0.2, test=0.2)
    return int(dataset.open()[role].ids[1])


@pytest.mark.slow
def test_training_leaves_a_damaged_example_out_and_stays_exact(tmp_path):
    written(tmp_path / "sound")
    bad = in_role("train", tmp_path / "sound")
    written(tmp_path / "damaged", RECORDS["a truncated JPEG"], at=(bad,))
    whole = train.run(config(tmp_path / "damaged", total="12st"), tmp_path / "whole")
    train.run(config(tmp_path / "damaged", total="7st"), tmp_path / "cut")
    resumed = train.run(config(tmp_path / "damaged", total="12st"), tmp_path / "cut")
    assert same(whole.state, resumed.state)
    number = np.searchsorted(whole.job.sources["train"].ids, bad)
    seen = sum(int((order.ids(0, step, 8, 18)[0] == number).sum()) for step in range(12))
    assert seen >= 5
    assert sum(line.get("train/corrupt", 0) for line in whole.history) == seen
    assert not any("corrupt" in key for line in whole.history for key in line if not key.startswith("train/"))
    log = (tmp_path / "whole" / "log.txt").read_text()
    assert log.count(f"example {bad} of tiny train") == 1 and "left out" in log


def test_a_masked_row_weighs_nothing(tmp_path):
    """The update is that of the sound rows alone, whatever stands in the masked one."""
    written(tmp_path)
    job = train.build(config(tmp_path, max_corrupt=1))
    with job.batches(0, 1) as batches:
        batch = next(batches)
    assert batch["mask"].tolist() == [True] * 8
    mask = np.arange(8) != 3
    states = []
    for junk in (0, 255):
        image = np.where(mask[:, None, None, None], np.asarray(batch["image"]), np.uint8(junk))
        states.append(job.step(job.initial(), batch | {"image": image, "mask": mask})[0])
    assert same(*states)
    assert not same(states[0], job.step(job.initial(), batch)[0])


def test_evaluation_refuses_a_damaged_example_or_counts_it_in_the_open(tmp_path):
    written(tmp_path / "sound")
    bad = [in_role(role, tmp_path / "sound") for role in ("validation", "test")]
    written(tmp_path / "damaged", RECORDS["zero bytes"], at=bad)
    job = train.build(config(tmp_path / "damaged", max_corrupt=0))
    for name, number in zip(("eval", "test"), bad, strict=True):
        with pytest.raises(UserError, match=f"example {number} of tiny train"):
            job.evaluate(name, job.initial())
    result = train.run(config(tmp_path / "damaged", max_corrupt=2, total="3st"), tmp_path / "run")
    for name, number in zip(("eval", "test"), bad, strict=True):
        assert result.metrics[f"{name}/corrupt"] == 1 and np.isfinite(result.metrics[f"{name}/loss"])
        assert f"example {number} of tiny train" in (tmp_path / "run" / "log.txt").read_text()
    assert not any(key == "train/corrupt" for line in result.history for key in line)


def test_an_example_without_its_label_is_borne_too(tmp_path):
    """The cut into roles reads all labels; this one's class is its own."""
    written(tmp_path, RECORDS["no Example"])
    with pytest.raises(UserError, match="record 2 .*'label'"):
        train.build(config(tmp_path, max_corrupt=0))
    job = train.build(config(tmp_path))
    assert sum(map(len, job.sources.values())) == SIZE


def test_more_than_the_limit_end_the_run(tmp_path):
    written(tmp_path, RECORDS["zero bytes"], at=range(0, SIZE, 6))
    with pytest.raises(UserError, match="of tiny train.* cannot be decoded.* than the 4 that config.data.max_corrupt"):
        train.run(config(tmp_path, max_corrupt=4, total="6st"))
    train.run(config(tmp_path, max_corrupt=5, total="6st"))


def test_what_would_ignore_the_mask_is_refused(tmp_path):
    written(tmp_path)

    def own(spec):
        return Steps(lambda key: None, lambda state, batch: (state, {}))

    @dataclasses.dataclass
    class Whole:
        num_classes: int

        def inputs(self, batch):
            return batch["image"]

        def losses(self, outputs, batch):
            return outputs.mean()

        def metrics(self, outputs, batch, mask):
            return {}

    unread = {key: KEYS[key].default for key in ("model", "optimizer", "schedule")}
    with pytest.raises(UserError, match="max_corrupt masks damaged examples, and step own"):
        train.build(config(tmp_path, **unread), step=own)
    job = train.build(config(tmp_path), task=Whole(3))
    with pytest.raises(UserError, match="max_corrupt .* Whole has one loss of the whole global batch"):
        job.rehearse()


@pytest.mark.parametrize("limit", (-1, -5))
def test_a_limit_below_zero_is_refused(tmp_path, limit):
    written(tmp_path)
    with pytest.raises(UserError, match=f"max_corrupt is {limit}, expected 0 or more"):
        opened(tmp_path, max_corrupt=limit)
