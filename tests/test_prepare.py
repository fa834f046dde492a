"""python -m jaxtrain.prepare: converted to the bit or not at all, every record checked, mistakes in one line."""

import gzip
import json
import pathlib
import re
import shlex
import signal
import subprocess
import sys
import time
import zlib

import numpy as np
import pytest
import tiny_tfds
from conftest import REPOSITORY

from jaxtrain import main as train
from jaxtrain import prepare
from jaxtrain.data import convert
from jaxtrain.data.tfds import tfds
from jaxtrain.errors import StorageError, UserError

STORED = tiny_tfds.records(30)
SPLITS = {"train": [STORED[:7], [], STORED[7:]], "test": [STORED[:4]]}


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def in_members(content: bytes) -> bytes:
    """As `cat a.gz b.gz` makes it."""
    return gzip.compress(content[:100]) + gzip.compress(content[100:])


COMPRESSIONS = {"gzip": gzip.compress, "zlib": zlib.compress, "gzip in members": in_members}


def written(folder, compress=lambda content: content, splits=SPLITS, kind="tfrecord"):
    path = tiny_tfds.write(folder, splits, kind=kind)
    for shard in path.glob(f"*{kind}*"):
        shard.write_bytes(compress(shard.read_bytes()))
    return path


def stored_in(folder, split="train"):
    source = tfds(dataset="tiny", dir=str(folder), validation=0, test=0).open()[split]
    return source.stored.read(np.arange(len(source)))


def command(*arguments):
    return prepare.main([f"--data.{each}" if not each.startswith("--") else each for each in arguments])


def left_below(folder):
    return sorted(path for path in pathlib.Path(folder).rglob("*") if path.is_file())


@pytest.mark.parametrize("compress", COMPRESSIONS.values(), ids=COMPRESSIONS)
def test_a_run_that_meets_a_compressed_set_says_with_which_command_it_is_mended(tmp_path, capsys, compress):
    source = tmp_path / "my sets"
    written(source, compress)
    run = [f"--config={REPOSITORY}/configs/cifar.py", "--config.data.dataset=tiny", "--config.devices=1"]
    assert train.main([*run, f"--config.data.dir={source}", f"--workdir={tmp_path / 'run'}"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "-compressed TFRecord file" in line and not (tmp_path / "run").exists()
    found = re.search(r"python -m jaxtrain\.prepare (.*), then set config\.data\.dir='(.*)'", line)
    assert prepare.main(shlex.split(found.group(1))) == 0
    told = capsys.readouterr().out
    assert "tiny is ready in" in told and "30 train, 4 test (array_record)" in told
    assert f"--config.data.dir={found.group(2)}" in told
    assert stored_in(found.group(2)) == STORED and stored_in(found.group(2), "test") == STORED[:4]


def test_a_conversion_keeps_every_record_shard_and_file(tmp_path):
    """Also of a set that is not compressed; tfds itself reads what comes out."""
    import tensorflow_datasets

    path = written(tmp_path / "from")
    (path / "README.md").write_text("about it")
    assert command("dataset=tiny", f"dir={tmp_path / 'from'}", f"--to={tmp_path / 'to'}") == 0
    made = tmp_path / "to" / "tiny" / "1.0.0"
    assert sorted(file.name for file in made.iterdir()) == sorted(
        ["README.md", "dataset_info.json", "features.json", "label.labels.txt"]
        + [f"tiny-train.array_record-{number:05d}-of-00003" for number in range(3)]
        + ["tiny-test.array_record-00000-of-00001"]
    )
    infos = [json.loads((folder / "dataset_info.json").read_text()) for folder in (path, made)]
    lengths = [[split["shardLengths"] for split in info["splits"]] for info in infos]
    assert lengths[0] == lengths[1] == [["7", "0", "23"], ["4"]]
    assert stored_in(tmp_path / "to") == STORED
    theirs = tensorflow_datasets.builder("tiny", data_dir=tmp_path / "to").as_data_source(split="train")
    assert [int(each["label"]) for each in theirs] == [number % 3 for number in range(30)]
    assert not list((tmp_path / "to").rglob("incomplete.*"))


@pytest.mark.parametrize("size", (0, 1, 11, 12, 13, 1 << 16, 200_000))
def test_records_of_any_length_are_streamed(tmp_path, size):
    random = np.random.default_rng(size)
    wanted = [random.bytes(size), b"", random.bytes(3), random.bytes(size)]
    content = b"".join(map(tiny_tfds.framed, wanted))
    for number, compress in enumerate((bytes, *COMPRESSIONS.values())):
        file = tmp_path / str(number)
        file.write_bytes(compress(content))
        assert list(convert.records(str(file))) == wanted


def flipped(content: bytes) -> bytes:
    return content[:2000] + bytes([content[2000] ^ 1]) + content[2001:]


DAMAGE = {
    "a flipped bit": flipped,
    "a flipped bit, compressed": lambda content: gzip.compress(flipped(content)),
    "a flipped bit in what is compressed": lambda content: flipped(gzip.compress(content)),
    "cut short": lambda content: content[:-9],
    "cut short, compressed": lambda content: gzip.compress(content)[:-30],
    "cut short before": lambda content: gzip.compress(content[:-9]),
    "a record too few": lambda content: content[: -len(tiny_tfds.framed(STORED[-1]))],
    "garbage behind": lambda content: gzip.compress(content) + b"garbage",
    "no records": lambda content: b"this is no record file at all" * 99,
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_a_damaged_file_is_named_and_nothing_is_left(tmp_path, capsys, damage):
    path = written(tmp_path / "from")
    shard = path / "tiny-train.tfrecord-00002-of-00003"
    shard.write_bytes(damage(shard.read_bytes()))
    assert command("dataset=tiny", f"dir={tmp_path / 'from'}", f"--to={tmp_path / 'to'}") == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert str(shard) in line
    assert not left_below(tmp_path / "to")


@pytest.mark.parametrize(
    ("arguments", "words"),
    (
        ([], ("no data set given", "--data.dataset=cifar10")),
        (["--data.datset=tiny"], ("--data.datset=tiny", "Did you mean '--data.dataset'")),
        (["--chek", "--data.dataset=tiny"], ("--chek", "--check")),
        (["--data.dataset=cifra10"], ("cifra10", "cifar10")),
        (["--data.dataset=../tiny"], ("../tiny",)),
        (["--data.dataset=tiny", "--data.dir={from}", "--to={from}"], ("tiny/1.0.0 exists already", "--to")),
        (["--data.dataset=tiny", "--data.dir={from}", "--check", "--data.image=x"], ("no feature 'x'",)),
        (["--data.dataset=tiny", "--data.dir={nowhere}"], ("'tiny'", "none is prepared in")),
        (["--data.dataset=tiny", "--data.dir=gs://bucket"], ("gs://bucket", "local or mounted")),
    ),
)
def test_a_mistake_is_one_line(tmp_path, capsys, arguments, words):
    written(tmp_path / "from")
    places = {"from": tmp_path / "from", "nowhere": tmp_path / "nowhere"}
    before = left_below(tmp_path / "from")
    assert prepare.main([each.format(**places) for each in arguments]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert all(word in line for word in words), line
    assert left_below(tmp_path / "from") == before and not (tmp_path / "nowhere").exists()


def test_help_says_what_there_is(capsys):
    with pytest.raises(SystemExit) as ended:
        prepare.main(["--help"])
    told = capsys.readouterr().out
    assert ended.value.code == 0 and all(word in told for word in ("--data.dataset", "--to", "--check", "exit codes"))


@pytest.mark.parametrize("kind", ("tfrecord", "array_record"))
def test_a_check_names_every_damaged_record(tmp_path, capsys, kind):
    splits = {"train": [list(STORED)], "test": [STORED[:4]]}
    splits["train"][0][3] = tiny_tfds.example(image=b"no picture", label=1)
    splits["train"][0][20] = tiny_tfds.example(image=tiny_tfds.picture(0, (8, 8, 3), "PNG"), label=7)
    path = written(tmp_path, splits=splits, kind=kind)
    (shard,) = path.glob("tiny-test*")
    assert command("dataset=tiny", f"dir={tmp_path}") == 0
    capsys.readouterr()
    content = bytearray(shard.read_bytes())
    content[content.index(STORED[2][60:90])] ^= 1
    shard.write_bytes(content)
    assert command("dataset=tiny", f"dir={tmp_path}", "--check") == 2
    told, error = capsys.readouterr()
    lines = told.splitlines()
    assert len(lines) == 3
    assert "example 3 of tiny train" in lines[0] and "cannot be decoded" in lines[0]
    assert "example 20 of tiny train" in lines[1] and "label 7, expected 0 to 2" in lines[1]
    assert "example 2 of tiny test" in lines[2] and f"{shard} record 2" in lines[2]
    assert "3 of 34 records of tiny are damaged" in error


def test_a_check_of_a_sound_set_says_so(tmp_path, capsys):
    written(tmp_path)
    assert command("dataset=tiny", f"dir={tmp_path}", "--check") == 0
    assert "34 records of tiny are sound" in capsys.readouterr().out


def test_a_full_disk_is_a_fault_of_storage_and_nothing_is_left(tmp_path):
    """A limit to the size of files stands in for the disk."""
    written(tmp_path / "from", splits={"train": [tiny_tfds.records(2000, (32, 32, 3))]})
    code = (
        "import resource, signal, sys; signal.signal(signal.SIGXFSZ, signal.SIG_IGN);"
        "import jaxtrain.prepare; resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, resource.RLIM_INFINITY));"
        "sys.exit(jaxtrain.prepare.main(sys.argv[1:]))"
    )
    arguments = ["--data.dataset=tiny", f"--data.dir={tmp_path / 'from'}", f"--to={tmp_path / 'to'}"]
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, cwd=REPOSITORY)
    (line,) = done.stderr.splitlines()
    assert done.returncode == 5 and "File too large" in line and "make room" in line, done.stderr
    assert not left_below(tmp_path / "to")


@pytest.mark.parametrize(
    "error", (OSError(28, "No space left on device"), RuntimeError("No space left on device; at 9"))
)
def test_a_full_disk_while_a_set_is_prepared_is_a_fault_of_storage(tmp_path, monkeypatch, error):
    import tensorflow_datasets

    from jaxtrain.data import tfds_builder

    def full(self, **options):
        raise error

    monkeypatch.setattr(tensorflow_datasets.core.DatasetBuilder, "download_and_prepare", full)
    monkeypatch.setattr(tfds_builder, "_reachable", lambda url: True)
    with pytest.raises(StorageError, match="cifar10/3.0.2 cannot be written: .*No space left"):
        prepare.run(["--data.dataset=cifar10", f"--data.dir={tmp_path}"])


def test_a_folder_that_cannot_be_written_is_a_fault_of_storage(tmp_path):
    written(tmp_path / "from")
    (tmp_path / "file").write_text("")
    assert command("dataset=tiny", f"dir={tmp_path / 'from'}", f"--to={tmp_path / 'file'}") == 5


@pytest.mark.slow
@pytest.mark.parametrize("number", (signal.SIGKILL, signal.SIGINT))
def test_a_conversion_that_is_cut_off_leaves_nothing_that_looks_like_a_set(tmp_path, number):
    written(tmp_path / "from", splits={"train": [tiny_tfds.records(200) * 100] * 4})
    arguments = ["--data.dataset=tiny", f"--data.dir={tmp_path / 'from'}", f"--to={tmp_path / 'to'}"]
    home = tmp_path / "to" / "tiny"
    running = subprocess.Popen(
        [sys.executable, "-m", "jaxtrain.prepare", *arguments], cwd=REPOSITORY, stderr=subprocess.PIPE, text=True
    )
    while not any(file.stat().st_size for file in left_below(home)):
        assert running.poll() is None, running.stderr.read()
        time.sleep(0.005)
    running.send_signal(number)
    _, told = running.communicate(timeout=20)
    assert running.returncode == {signal.SIGKILL: -9, signal.SIGINT: 130}[number], told
    assert [path.name[:11] for path in home.iterdir()] == (["incomplete."] if number == signal.SIGKILL else [])
    if number == signal.SIGKILL:
        with pytest.raises(UserError, match="incomplete\\..*cut off"):
            tfds(dataset="tiny", dir=str(tmp_path / "to"))
    assert prepare.main(arguments) == 0
    assert len(stored_in(tmp_path / "to")) == 80_000


@pytest.mark.slow
def test_a_set_that_is_not_there_is_prepared_as_array_record(tmp_path, capsys):
    """By the code of its builder, here one of our own that needs no download."""
    import tensorflow_datasets as library

    class TinyMade(library.core.GeneratorBasedBuilder):
        VERSION = library.core.Version("1.0.0")

        def _info(self):
            features = {
                "image": library.features.Image(shape=(8, 8, 3)),
                "label": library.features.ClassLabel(num_classes=3),
            }
            return library.core.DatasetInfo(builder=self, features=library.features.FeaturesDict(features))

        def _split_generators(self, manager):
            return {"train": self._generate_examples()}

        def _generate_examples(self):
            for number in range(20):
                yield number, {"image": np.full((8, 8, 3), number, np.uint8), "label": number % 3}

    assert prepare.main(["--data.dataset=tiny_made", f"--data.dir={tmp_path}", "--check"]) == 0
    assert "20 records of tiny_made are sound" in capsys.readouterr().out
    info = json.loads((tmp_path / "tiny_made" / "1.0.0" / "dataset_info.json").read_text())
    assert info["fileFormat"] == "array_record"
    train = tfds(dataset="tiny_made", dir=str(tmp_path), validation=0, test=0).open()["train"]
    assert sorted(train.get(np.arange(20))["image"][:, 0, 0, 0].tolist()) == list(range(20))
    assert prepare.main(["--data.dataset=tiny_made", f"--data.dir={tmp_path}"]) == 0  # and is left as it is
