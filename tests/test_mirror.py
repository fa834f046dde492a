"""Workdirs in stores that put, get, list and delete whole files and refuse all else: appending, renaming, locking."""

import errno
import json
import os
import pathlib
import shutil

import fsspec
import pytest
import tiny
from fsspec.implementations.local import LocalFileSystem
from tiny import same

from jaxtrain import train
from jaxtrain.errors import StorageError, UserError
from jaxtrain.result import load
from jaxtrain.storage import checkpoint, lease, mirror, remote_lease
from jaxtrain.storage.remote import Remote

CHANGES = dict(model=dict(name="nets:Dropout"), ema=0.9, schedule=dict(name="linear"))
CALLS = []  # what the store was asked for: (method, path)


class Bucket(LocalFileSystem):
    """An object store: no append, no rename, no partial write. `bucket://` + the path of a folder."""

    protocol = "bucket"
    left = None  # puts until the network fails
    conditional = True

    def _open(self, path, mode="rb", **kwargs):
        assert mode in ("rb", "wb", "xb"), f"the store was asked to open {path} with {mode}"
        return super()._open(path, mode, **kwargs)

    def mv(self, *args, **kwargs):
        raise AssertionError("the store was asked to rename")

    mv_file = touch = created = link = symlink = mv

    def put_file(self, lpath, rpath, **kwargs):
        self._count("put", rpath)
        return super().put_file(lpath, rpath, **kwargs)

    def pipe_file(self, path, value, mode="overwrite", **kwargs):
        self._count("put", path)
        if mode == "create" and not type(self).conditional:
            raise NotImplementedError
        return super().pipe_file(path, value, mode=mode, **kwargs)

    @classmethod
    def _count(cls, what, path):
        CALLS.append((what, str(path)))
        if cls.left is not None:
            if cls.left == 0:
                raise ConnectionError("the network is down")
            cls.left -= 1

    @classmethod
    def _strip_protocol(cls, path):
        return LocalFileSystem._strip_protocol(str(path).removeprefix("bucket://"))


fsspec.register_implementation("bucket", Bucket, clobber=True)


@pytest.fixture(autouse=True)
def store(monkeypatch, tmp_path):
    """A store that works, and hosts that have nothing of it yet."""
    monkeypatch.setattr(Bucket, "left", None)
    monkeypatch.setattr(Bucket, "conditional", True)
    monkeypatch.setattr(remote_lease, "BEAT", 0.1)
    CALLS.clear()
    on_another_host(monkeypatch, tmp_path, "first")


def on_another_host(monkeypatch, tmp_path, name):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "caches" / name))


def run(where, **changes):
    return train.run(tiny.config(**CHANGES | changes), where, data=tiny.data())


@pytest.fixture(scope="module")
def through(tmp_path_factory):
    """A run in a folder that nothing befell: its state and its rows."""
    folder = tmp_path_factory.mktemp("through")
    return run(folder).state, rows(folder)


def rows(folder):
    """What the segments of a store, or the file of a folder, say; without the clock."""
    segments = sorted((folder / "metrics").glob("*.jsonl")) if (folder / "metrics").is_dir() else []
    newest = [path for path in segments if path.name[:6] == segments[-1].name[:6]]
    lines = [line for path in newest or [folder / "metrics.jsonl"] for line in path.read_text().splitlines()]
    found = [json.loads(line) for line in lines]
    return [{k: v for k, v in row.items() if not k.startswith(("time/", "memory/"))} for row in found]


def url(folder):
    return f"bucket://{folder}"


def test_a_run_in_a_store_is_the_same_run(through, tmp_path):
    there = run(url(tmp_path / "there"), tensorboard=True)
    assert same(there.state, through[0])
    assert rows(tmp_path / "there") == through[1]
    names = {path.relative_to(tmp_path / "there").parts[0] for path in (tmp_path / "there").rglob("*")}
    events = {name for name in names if name.startswith("events")}
    assert (
        names - events == {"config.json", "environment.json", "log.txt", "metrics", "checkpoints"} and len(events) == 1
    )
    assert checkpoint.Checkpoints(tmp_path / "there" / "checkpoints").latest() == 24


def test_a_checkpoint_counts_only_after_its_lines_and_its_arrays(tmp_path):
    run(url(tmp_path / "there"))
    paths = [path.removeprefix(str(tmp_path / "there") + "/") for _, path in CALLS]
    for step in (10, 24):
        manifest = paths.index(f"checkpoints/{step}/manifest.json")
        arrays = [n for n, path in enumerate(paths) if path.startswith(f"checkpoints/{step}/arrays")]
        lines = [n for n, path in enumerate(paths) if path.startswith("metrics/") and n < manifest]
        assert arrays and max(arrays) < manifest and lines


@pytest.mark.parametrize("same_host", [True, False], ids=["same host", "another host"])
def test_a_stopped_run_is_carried_on_from_any_host(same_host, through, tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(train.Loop, "interrupted", lambda loop: loop.step >= 13)
        run(url(tmp_path / "there"))
    if not same_host:
        on_another_host(monkeypatch, tmp_path, "second")
    resumed = run(url(tmp_path / "there"))
    assert same(resumed.state, through[0]) and rows(tmp_path / "there") == through[1]


@pytest.mark.parametrize("puts", [3, 5, 8, 12, 16, 20, 26])
def test_a_run_cut_off_at_any_upload_is_carried_on_exactly(puts, through, tmp_path, monkeypatch):
    """The store fails for good after some files: exit code 5, nothing half-done counts, the next host goes on."""
    with monkeypatch.context() as patch:
        patch.setattr(Bucket, "left", puts)
        with pytest.raises(StorageError, match="the network is down"):
            run(url(tmp_path / "there"))
    on_another_host(monkeypatch, tmp_path, "second")
    (tmp_path / "there" / "lease.json").unlink(missing_ok=True)  # the host is gone
    resumed = run(url(tmp_path / "there"))
    assert same(resumed.state, through[0]) and rows(tmp_path / "there") == through[1]


def test_lines_past_the_checkpoint_are_cut_in_the_store_too(tmp_path, monkeypatch):
    """A host that died between two checkpoints had reported more than was saved."""
    with monkeypatch.context() as patch:
        patch.setattr(train.Loop, "interrupted", lambda loop: loop.step >= 13)
        run(url(tmp_path / "there"))
    segments = sorted((tmp_path / "there" / "metrics").iterdir())
    with segments[-1].open("a") as file:
        file.write('{"step": 15, "train/loss": 1.0}\n')
    on_another_host(monkeypatch, tmp_path, "second")
    run(url(tmp_path / "there"))
    assert [row["step"] for row in rows(tmp_path / "there") if "train/loss" in row] == [5, 10, 15, 20, 24]
    generations = {path.name[:6] for path in (tmp_path / "there" / "metrics").iterdir()}
    assert generations == {"000001"}


def test_a_copy_that_was_cleared_costs_the_store_nothing(tmp_path, monkeypatch):
    run(url(tmp_path / "there"), total="12st")
    before = {path: path.read_bytes() for path in (tmp_path / "there").rglob("*") if path.is_file()}
    copy = mirror.Mirror(Remote(url(tmp_path / "there")), tmp_path / "copy")
    copy.pull()
    shutil.rmtree(tmp_path / "copy")
    (tmp_path / "copy").mkdir()
    copy.push()
    kept = {path for path in before if "metrics" not in path.parts}
    assert all(path.read_bytes() == before[path] for path in kept)


def test_old_checkpoints_go_in_the_store_too_and_a_damaged_one_is_passed_over(tmp_path, monkeypatch):
    run(url(tmp_path / "there"), total="20st")
    run(url(tmp_path / "there"))
    found = checkpoint.Checkpoints(tmp_path / "there" / "checkpoints")
    assert found.steps()[-2:] == [20, 24] and 10 not in found.steps()
    victim = max((tmp_path / "there" / "checkpoints" / "24").rglob("*"), key=lambda path: path.stat().st_size)
    victim.write_bytes(victim.read_bytes()[:-7])
    on_another_host(monkeypatch, tmp_path, "second")
    assert int(run(url(tmp_path / "there"), total="28st").state.step) == 28
    assert "passed over" in (tmp_path / "there" / "log.txt").read_text()


def test_a_workdir_in_a_store_is_loaded_and_starts_another_run(tmp_path):
    result = run(url(tmp_path / "there"), total="4st")
    assert same(load(url(tmp_path / "there"), trust=True).state.params, result.state.params)
    other = run(None, total="1st", init_from=url(tmp_path / "there"), lr_rules=((".", 0.0),))
    assert same(other.state.params, result.state.params)


@pytest.mark.parametrize(
    ("where", "said"),
    [("nonsense://x/y", "nonsense"), ("bucket:///nowhere/at/all", "holds nothing")],
)
def test_what_is_not_there_is_refused(where, said):
    with pytest.raises(UserError, match=said):
        load(where)


def test_a_missing_package_is_named():
    fsspec.register_implementation("lab", "no_such_package.Files", clobber=True, errtxt="pip install lab-files")
    with pytest.raises(UserError, match="pip install lab-files"):
        Remote("lab://x")


# One writer


def holder(**changes):
    return lease.dataclasses.replace(lease.Holder.here(), **changes)


def test_a_run_that_is_alive_keeps_others_out(tmp_path):
    there = Remote(url(tmp_path / "there"))
    there.write("lease.json", holder(pid=os.getppid(), started=lease._started(os.getppid())).encoded())
    with pytest.raises(UserError, match=f"in use by pid {os.getppid()}"):
        run(url(tmp_path / "there"), total="2st")
    assert there.list().keys() == {"lease.json"}


@pytest.mark.parametrize("other", [dict(pid=2**22 - 3), dict(host="elsewhere")], ids=["dead here", "silent elsewhere"])
def test_a_dead_run_is_taken_over(other, tmp_path):
    there, said = Remote(url(tmp_path / "there")), []
    there.write("lease.json", holder(**other).encoded())
    remote_lease.RemoteLease(there, said.append, beat=0.05, stale=0.2).release()
    assert "took" in said[-1] and "lease.json" not in there.list()


def test_a_beating_run_on_another_host_keeps_others_out(tmp_path, monkeypatch):
    there = Remote(url(tmp_path / "there"))
    there.write("lease.json", holder(host="elsewhere").encoded())
    monkeypatch.setattr(
        remote_lease.time,
        "sleep",
        lambda seconds: there.write("lease.json", holder(host="elsewhere", beat=7).encoded()),
    )
    with pytest.raises(UserError, match="in use by .* on elsewhere"):
        remote_lease.RemoteLease(there, print, beat=0.05, stale=5.0)


def test_a_run_that_lost_its_lease_writes_no_more(tmp_path):
    there = Remote(url(tmp_path / "there"))
    mine = remote_lease.RemoteLease(there, print)
    mine.beat()
    there.write("lease.json", holder(host="elsewhere").encoded())
    with pytest.raises(StorageError, match="took over"):
        mine.beat()
    mine.release()
    assert "lease.json" in there.list()


def test_a_store_without_conditional_writes_says_that_it_cannot_guard(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(Bucket, "conditional", False)
    assert int(run(url(tmp_path / "there"), total="2st").state.step) == 2
    assert "nothing guards it" in capsys.readouterr().err


def test_a_store_that_does_not_answer_is_not_taken_for_one_that_cannot_guard(tmp_path, monkeypatch):
    monkeypatch.setattr(Bucket, "left", 0)
    with pytest.raises(StorageError, match="lease.json: ConnectionError: the network is down"):
        run(url(tmp_path / "there"), total="2st")


# A mount that refuses


@pytest.fixture
def mount(tmp_path, monkeypatch):
    """A folder of a file system that knows neither append nor rename, as mounts of object stores and drives do."""
    folder = tmp_path / "mount"
    folder.mkdir()
    real_open, real_rename, real_replace = os.open, os.rename, os.replace

    def inside(*paths):
        return any(str(folder) in os.path.abspath(os.fspath(path)) for path in paths)

    def refuse(call):
        def wrapped(source, target, **kwargs):
            if inside(source, target):
                raise OSError(errno.ENOTSUP, os.strerror(errno.ENOTSUP), str(source))
            return call(source, target, **kwargs)

        return wrapped

    def refusing_open(path, flags, *args, **kwargs):
        if flags & os.O_APPEND and inside(path):
            raise OSError(errno.ENOTSUP, os.strerror(errno.ENOTSUP), str(path))
        return real_open(path, flags, *args, **kwargs)

    monkeypatch.setattr(os, "open", refusing_open)
    monkeypatch.setattr(os, "rename", refuse(real_rename))
    monkeypatch.setattr(os, "replace", refuse(real_replace))
    monkeypatch.setattr(pathlib.Path, "rename", lambda self, target: os.rename(self, target))
    monkeypatch.setattr(pathlib.Path, "replace", lambda self, target: os.replace(self, target))
    return folder


def test_a_mount_that_refuses_is_worked_in_by_copies(through, mount, tmp_path, capsys, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(train.Loop, "interrupted", lambda loop: loop.step >= 13)
        run(mount / "run")
    assert "refuses appending, renaming files, renaming folders" in capsys.readouterr().err
    on_another_host(monkeypatch, tmp_path, "second")
    resumed = run(mount / "run")
    assert same(resumed.state, through[0]) and rows(mount / "run") == through[1]


def test_a_usual_folder_needs_no_copy_and_a_refused_config_leaves_none(tmp_path, capsys):
    run(tmp_path / "run", total="2st")
    assert not (tmp_path / "caches" / "first" / "jaxtrain" / "workdirs").exists()
    assert "refuses" not in capsys.readouterr().err
    with pytest.raises(UserError):
        run(tmp_path / "never", total="2st", best="nonsense")
    assert not (tmp_path / "never").exists() and not list(tmp_path.glob(".jaxtrain*"))
