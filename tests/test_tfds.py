"""TFDS sets by record number: index, labels, roles, pixels, and what is refused."""

import importlib
import io
import itertools
import json
import os
import pathlib
import socket
import subprocess
import sys
import time

import crc32c
import numpy as np
import pytest
import tiny_tfds
from conftest import REPOSITORY

from jaxtrain import main as entry
from jaxtrain.data import example, host, pictures, records, roles, tfds_builder
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


def labels_of(folder) -> list[int]:
    sources = tfds(dataset="tiny", dir=str(folder), validation=0.3).open()
    return [sources[role].get(np.arange(len(sources[role])))["label"].tolist() for role in ("train", "validation")]


@pytest.fixture
def built(monkeypatch) -> list[str]:
    """What was derived from the files and not found in the cache."""
    found = []
    for name in ("_index", "_counted"):
        build = getattr(records, name)
        monkeypatch.setattr(records, name, lambda *args, name=name, build=build: found.append(name) or build(*args))
    cut = roles.split
    monkeypatch.setattr(roles, "split", lambda *args, **options: found.append("cut") or cut(*args, **options))
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_the_index_is_kept_and_follows_the_files(tmp_path, built, kind):
    path = tiny_tfds.write(tmp_path, {"train": [tiny_tfds.records(9)]}, kind=kind)
    first = labels_of(tmp_path)
    assert len(built) == 2
    assert labels_of(tmp_path) == first and len(built) == 2  # nothing is done again, whatever the set's size
    (shard,) = path.glob("tiny-train*")
    os.utime(shard, ns=(1, 1))
    assert labels_of(tmp_path) == first and len(built) == 4
    shard.unlink()
    with pytest.raises(UserError, match=f"{shard.name}: No such file"):
        labels_of(tmp_path)


READ_AT_RANDOM = """
import sys, jax, numpy, PIL.Image, tensorflow_datasets
from jaxtrain.data import host, order
from jaxtrain.data.tfds import tfds
def memory():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("VmRSS"))
before = memory()
train = tfds(dataset="tiny", dir=sys.argv[1]).open()["train"]
plan = order.Shuffled((0,), 100, len(train))
for batch in host.batches(train, lambda step: plan(step)[0], 10**9, 10**9 + 100, kind="threads", threads=2):
    assert batch["image"].shape == (100, 8, 8, 3)
print(len(train), memory() - before)
"""


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_memory_does_not_grow_with_the_set(tmp_path, kind):
    """Whole process, everything touched counted: a set ten times as large takes a few megabytes more at most."""
    stored = tiny_tfds.records(50)
    taken, sizes = {}, {"small": 20_000, "large": 200_000}
    for name, size in sizes.items():
        shard = stored * (size // 50 // 8)
        tiny_tfds.write(tmp_path / name, {"train": [shard] * 8}, kind=kind)
        command = [sys.executable, "-c", READ_AT_RANDOM, str(tmp_path / name)]
        for _ in range(2):  # the first start makes the index
            done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=REPOSITORY)
        count, kilobytes = map(int, done.stdout.split())
        assert count == size * 7 // 10
        taken[name] = kilobytes
    data = sum(file.stat().st_size for file in (tmp_path / "large").rglob("*") if file.is_file())
    assert taken["large"] - taken["small"] < min(8_000, data / 1024 / 6), taken


def pickled(file: pathlib.Path) -> None:
    stream = io.BytesIO()
    np.save(stream, np.array([print], dtype=object), allow_pickle=True)
    file.write_bytes(stream.getvalue() + crc32c.crc32c(stream.getvalue()).to_bytes(4, "little"))


HARM = {
    "garbage": lambda file: file.write_bytes(b"no index at all"),
    "nothing": lambda file: file.write_bytes(b""),
    "cut short": lambda file: file.write_bytes(file.read_bytes()[:-9]),
    "another bit": lambda file: file.write_bytes(file.read_bytes()[:-6] + b"\x01" + file.read_bytes()[-5:]),
    "longer": lambda file: file.write_bytes(file.read_bytes() + b"\x00"),
    "a folder": lambda file: (file.unlink(), file.mkdir()),
    "objects": pickled,
}


@pytest.mark.parametrize("harm", HARM.values(), ids=HARM)
def test_a_damaged_index_is_made_anew(tmp_path, cache, built, harm):
    tiny_tfds.write(tmp_path, {"train": [tiny_tfds.records(9)]})
    first = labels_of(tmp_path)
    made = len(built)
    for file in cache.iterdir():
        harm(file)
    assert labels_of(tmp_path) == first and len(built) == 2 * made
    if harm is not HARM["a folder"]:
        assert labels_of(tmp_path) == first and len(built) == 2 * made


def test_processes_that_build_one_index_at_once_do_not_disturb_each_other(tmp_path, cache):
    path = tiny_tfds.write(tmp_path, {"train": [tiny_tfds.records(2000)]})
    (shard,) = path.glob("tiny-train*")
    code = (
        "import sys; from jaxtrain.data.records import TFRecords, integers; sys.stdin.read();"
        f"print(integers(TFRecords([{str(shard)!r}], [2000]), 'label').sum())"
    )
    pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    running = [subprocess.Popen([sys.executable, "-c", code], **pipes) for _ in range(3)]
    done = [process.communicate("") for process in running]
    assert [out.strip() for out, _ in done] == [str(sum(n % 3 for n in range(2000)))] * 3, done
    assert sorted(file.suffix for file in cache.iterdir()) == [".npy", ".npy"]


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
        ({"dataset": "../tiny"}, ("../tiny", "name/config")),
        ({"dataset": "tiny/.."}, ("tiny/..", "name/config")),
        ({"dataset": "tiny/../../x"}, ("tiny/../../x", "name/config")),
        ({"dataset": "tiny/config=.."}, ("config=..", "name/config")),
        ({"dataset": "/etc/passwd"}, ("/etc/passwd", "name/config")),
        ({"dataset": "huggingface:mnist"}, ("huggingface:mnist", "fetched and run")),
        ({"dataset": "tiny", "version": "../1.0.0"}, ("'../1.0.0'", "three numbers")),
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


@pytest.fixture
def network(monkeypatch) -> list[str]:
    """No network; what was asked of it all the same."""
    asked = []

    def refuse(*args, **options):
        asked.append(str(args))
        raise socket.gaierror(-2, "Name or service not known")

    for target, name in ((socket, "getaddrinfo"), (socket, "create_connection"), (socket.socket, "connect")):
        monkeypatch.setattr(target, name, refuse)
    return asked


@pytest.mark.parametrize("loader", ("threads", "tf.data"))
def test_prepared_data_needs_no_network(tmp_path, network, loader):
    """Report 44."""
    tiny_tfds.write(tmp_path, {"train": [tiny_tfds.records(9)]})
    train = tfds(dataset="tiny", dir=str(tmp_path)).open()["train"]
    assert len(list(host.batches(train, lambda step: np.arange(4), 0, 2, kind=loader))) == 2
    assert not network


def registered(folder: pathlib.Path, name: str) -> pathlib.Path:
    """A folder of cifar10, which tfds knows how to prepare."""
    path = folder / "cifar10" / name
    path.mkdir(parents=True)
    return path


def without_info(folder):
    (registered(folder, "3.0.2") / "cifar10-train.tfrecord-00000-of-00001").write_bytes(b"")


def cut_off(folder):
    (registered(folder, "incomplete.4HB2QX_3.0.2") / "cifar10-train.tfrecord-00000-of-00001").write_bytes(b"")


def another_version(folder):
    (registered(folder, "3.0.1") / "dataset_info.json").write_text("{}")


def own(damage):
    """Damage to a set that only its files tell of."""

    def make(folder):
        damage(tiny_tfds.write(folder, {"train": [tiny_tfds.records(5)] * 3}))

    return make


def renamed(path):
    path.rename(path.parent / "incomplete.4HB2QX_1.0.0")


def one_shard_more(path):
    info = path / "dataset_info.json"
    info.write_text(info.read_text().replace('["5", "5", "5"]', '["5", "5", "5", "5"]'))


UNREADABLE_INFO = ("1.0.0/dataset_info.json cannot be read", "copy the file")
HALF = {
    "no data at all": ("cifar10", lambda folder: None, ("cifar10 is not prepared in", "TFDS_DATA_DIR")),
    "no folder": ("cifar10", lambda folder: folder.rmdir(), ("cifar10 is not prepared in", "jaxtrain.prepare")),
    "another version": ("cifar10", another_version, ("3.0.2 is wanted, 3.0.1 is there: set config.data.version",)),
    "copied by half": ("cifar10", without_info, ("cifar10/3.0.2 has no dataset_info.json",)),
    "prepared by half": ("cifar10", cut_off, ("incomplete.4HB2QX_3.0.2", "cut off")),
    "prepared by half, unknown to tfds": ("tiny", own(renamed), ("incomplete.4HB2QX_1.0.0", "cut off")),
    "a deleted shard": (
        "tiny", own(lambda path: (path / "tiny-train.tfrecord-00001-of-00003").unlink()),
        ("tiny-train.tfrecord-00001-of-00003: No such file", "copy the file"),
    ),
    "fewer shards than the info says": (
        "tiny", own(one_shard_more), ("tiny-train.tfrecord-00000-of-00004: No such file",)
    ),
    "half an info": (
        "tiny", own(lambda path: os.truncate(path / "dataset_info.json", 40)), UNREADABLE_INFO
    ),
    "no info": ("tiny", own(lambda path: (path / "dataset_info.json").unlink()), UNREADABLE_INFO),
    "half the features": (
        "tiny", own(lambda path: os.truncate(path / "features.json", 40)), ("features.json cannot be read",)
    ),
    "no features": ("tiny", own(lambda path: (path / "features.json").unlink()), ("'tiny'", "none is prepared in")),
}  # fmt: skip


@pytest.mark.parametrize(("dataset", "damage", "words"), HALF.values(), ids=HALF)
def test_half_a_set_is_refused_by_name_and_nothing_is_written(tmp_path, network, capsys, dataset, damage, words):
    """Report 44, as a user sees it."""
    folder, workdir = tmp_path / "sets", tmp_path / "run"
    folder.mkdir()
    damage(folder)
    began = time.monotonic()
    arguments = [f"--config.data.dataset={dataset}", f"--config.data.dir={folder}", f"--workdir={workdir}"]
    assert entry.main([f"--config={REPOSITORY}/configs/cifar.py", *arguments]) == 2
    assert time.monotonic() - began < 20
    (line,) = capsys.readouterr().err.splitlines()
    assert all(word in line for word in words), line
    assert not workdir.exists() and not list(tmp_path.rglob("*.partial"))


def test_an_absent_set_without_a_network_says_what_to_do(tmp_path, network):
    dataset = tfds(dataset="cifar10", dir=str(tmp_path))
    assert dataset.spec["image"].shape == (32, 32, 3) and not dataset.sizes and not dataset.present()
    assert len(synthetic(dataset).open()["train"]) == 512
    began = time.monotonic()
    with pytest.raises(
        DataAbsent, match="TFDS_DATA_DIR.*config.data.dir.*jaxtrain.prepare --data.dataset=cifar10"
    ) as caught:
        dataset.open()
    assert time.monotonic() - began < 20 and "\n" not in str(caught.value)


TRACE = """
import pathlib
pathlib.Path({trace!r}).write_text("this code ran")
import tensorflow_datasets
class Text(tensorflow_datasets.features.Text):
    pass
"""


@pytest.fixture
def foreign(tmp_path, monkeypatch) -> pathlib.Path:
    """A module on the path whose import leaves this file."""
    trace = tmp_path / "trace"
    (tmp_path / "modules").mkdir()
    (tmp_path / "modules" / "foreign.py").write_text(TRACE.format(trace=str(trace)))
    monkeypatch.syspath_prepend(tmp_path / "modules")
    yield trace
    sys.modules.pop("foreign", None)


def edited(path: pathlib.Path, change) -> None:
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def legacy(features):
    features["featuresDict"]["features"]["id"] = {"type": "foreign.Text", "content": {}}


def nested(features):
    inner = {"pythonClassName": "foreign.Text", "text": {}}
    where = "tensorflow_datasets.core.features.sequence_feature.Sequence"
    features["featuresDict"]["features"]["id"] = {"pythonClassName": where, "sequence": {"feature": inner}}


CODE = {
    "a feature": lambda features: features["featuresDict"]["features"]["id"].update(pythonClassName="foreign.Text"),
    "the proto's own name for it": lambda features: features["featuresDict"]["features"].update(
        id={"python_class_name": "foreign.Text", "text": {}}
    ),
    "inside another": nested,
    "as old versions wrote it": legacy,
    "the whole": lambda features: features.update(pythonClassName="foreign.Text"),
}


@pytest.mark.parametrize("change", CODE.values(), ids=CODE)
def test_reading_runs_no_code_that_the_data_names(tmp_path, foreign, change):
    path = tiny_tfds.write(tmp_path, {"train": [tiny_tfds.records(9)]})
    edited(path / "features.json", change)
    edited(path / "dataset_info.json", lambda info: info.update(moduleName="foreign"))
    assert "names the class foreign.Text" in refusal(dataset="tiny", dir=str(tmp_path))
    assert not foreign.exists() and "foreign" not in sys.modules


def test_the_module_of_a_set_is_not_imported(tmp_path, foreign):
    path = tiny_tfds.write(tmp_path, {"train": [tiny_tfds.records(9)]})
    edited(path / "dataset_info.json", lambda info: info.update(moduleName="foreign"))
    assert len(tfds(dataset="tiny", dir=str(tmp_path), validation=0, test=0).open()["train"]) == 9
    assert not foreign.exists()


def test_a_class_that_the_user_imported_is_trusted(tmp_path, foreign):
    path = tiny_tfds.write(tmp_path, {"train": [tiny_tfds.records(9)]})
    edited(path / "features.json", CODE["a feature"])
    importlib.import_module("foreign")
    assert len(tfds(dataset="tiny", dir=str(tmp_path), validation=0, test=0).open()["train"]) == 9


def test_a_config_by_default_cannot_lead_out_of_the_folder(tmp_path, foreign):
    elsewhere = tiny_tfds.write(tmp_path / "elsewhere", {"train": [tiny_tfds.records(9)]})
    edited(elsewhere / "features.json", CODE["a feature"])
    home = tmp_path / "sets" / "tiny"
    (home / ".config").mkdir(parents=True)
    (home / ".config" / "metadata.json").write_text('{"default_config_name": "../../elsewhere/tiny"}')
    assert "no name of a folder" in refusal(dataset="tiny", dir=str(tmp_path / "sets"))
    assert not foreign.exists()


@pytest.mark.parametrize(
    "change",
    (
        lambda info: info["splits"][0].update(filepathTemplate="../../../secret/{SPLIT}"),
        lambda info: info["splits"][0].update(filepathTemplate="/secret/{SPLIT}"),
        lambda info: info["splits"][0].update(name="../../../train"),
        lambda info: info.update(name="../../tiny"),
        lambda info: info.update(version="../../1.0.0"),
        lambda info: info.update(configName="../.."),
    ),
)
def test_names_in_the_info_cannot_lead_out_of_the_folder(tmp_path, change):
    path = tiny_tfds.write(tmp_path, {"train": [tiny_tfds.records(9)]})
    edited(path / "dataset_info.json", change)
    try:
        sources = tfds(dataset="tiny", dir=str(tmp_path), validation=0, test=0).open()
    except UserError as error:
        assert "\n" not in str(error)
    else:
        files = [pathlib.Path(file) for source in sources.values() for file in source.stored.paths]
        assert files and all(file.is_relative_to(path) for file in files)


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
    labels = records.integers(sources["train"].source.stored, "label")
    for role in ("train", "validation"):
        assert len(set(np.bincount(labels[sources[role].ids]))) == 1  # the classes are equal
    assert not set(sources["train"].ids) & set(sources["validation"].ids)
    batch = sources["test"].get(np.array([0, 9_999]))
    assert batch["image"].shape == (2, 32, 32, 3) and batch["image"].std() > 10
