"""One workdir, one writer: who gets it, who is refused, who finds that it was lost."""

import builtins
import concurrent.futures
import contextlib
import dataclasses
import errno
import functools
import json
import os
import pathlib
import signal
import socket
import subprocess
import sys
import threading
import time

import pytest
import tiny

from jaxtrain import train
from jaxtrain.errors import StorageError, UserError
from jaxtrain.storage import lease
from jaxtrain.storage.lease import Holder, Lease

ROOT = pathlib.Path(__file__).resolve().parent.parent
FAST = dict(beat=0.1, stale=0.5)

HOLDS = """
import os, socket, sys, time
from pathlib import Path
from jaxtrain.errors import JaxtrainError
from jaxtrain.storage.lease import Lease
if {host!r}:
    socket.gethostname = lambda: {host!r}
folder = Path({folder!r})
try:
    with Lease(folder, print, beat=0.1, stale=0.5) as found:
        print("holds", flush=True)
        for _ in range(600):
            found.check()
            with open(folder / "written", "a") as file:
                file.write(f"{{os.getpid()}}\\n")
            time.sleep(0.05)
except JaxtrainError as error:
    print(error, flush=True)
    sys.exit(error.exit_code)
"""


@contextlib.contextmanager
def holder(folder, host=""):
    """Another process that holds the folder, and writes to it."""
    code = HOLDS.format(folder=str(folder), host=host)
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env=environment) as process:
        try:
            assert process.stdout.readline() == "holds\n"
            yield process
        finally:
            process.kill()


@pytest.fixture
def said():
    return []


@pytest.fixture
def taken(tmp_path, said):
    """Takes the folder as a starter does, and says how long that took."""

    def take(**options):
        began = time.monotonic()
        with Lease(tmp_path, said.append, **FAST | options):
            assert Holder.decoded((tmp_path / "lease.json").read_bytes()).pid == os.getpid()
        assert not (tmp_path / "lease.json").exists()
        return time.monotonic() - began

    return take


def leave(folder, **changes):
    """A lease that somebody left: this process, but for the changes."""
    found = dataclasses.replace(Holder.here(), **changes)
    (folder / "theirs").write_bytes(found.encoded())
    (folder / "theirs").rename(folder / "lease.json")  # another file, as theirs would be
    return found


def ended_process():
    with subprocess.Popen(["true"]) as process:
        pass
    return process.pid


def test_nobody_was_there(tmp_path, said):
    folder = tmp_path / "new" / "run"
    with Lease(folder, said.append) as found:
        found.check()
        content = json.loads((folder / "lease.json").read_text())
        assert content["format"] == 1 and content["pid"] == os.getpid() and content["host"] == socket.gethostname()
    assert list(folder.iterdir()) == [] and said == []


@pytest.mark.parametrize(
    "changes",
    [
        dict(pid=2**22 + 1),  # more than Linux gives
        dict(pid="ended"),
        dict(pid=os.getppid(), started="1"),  # the number is another process's by now
        dict(),  # this very process, which could not remove it then
    ],
    ids=["never", "ended", "recycled", "own"],
)
def test_what_a_dead_process_of_this_host_left_is_taken_over_at_once(changes, tmp_path, taken, said):
    left = leave(tmp_path, **changes | (dict(pid=ended_process()) if changes.get("pid") == "ended" else {}))
    assert taken(stale=60.0, beat=10.0) < 2
    (line,) = said
    assert f"pid {left.pid} on {socket.gethostname()}" in line and "no longer runs" in line


def test_a_living_run_is_refused_until_it_is_killed(tmp_path, taken, said):
    with holder(tmp_path) as process:
        with pytest.raises(UserError, match=rf"pid {process.pid} on {socket.gethostname()} .*--workdir") as refused:
            taken()
        assert refused.value.exit_code == 2 and "\n" not in str(refused.value)
        process.send_signal(signal.SIGSTOP)  # silent, but alive
        time.sleep(1.0)
        with pytest.raises(UserError, match="last sign of life 1 s ago"):
            taken()
        os.kill(process.pid, signal.SIGKILL)
        time.sleep(0.2)  # nobody has waited for it: it is a zombie
        assert taken(stale=60.0, beat=10.0) < 2
    assert len(said) == 1


@pytest.mark.parametrize(
    "changes",
    [dict(host="elsewhere"), dict(boot="another"), dict(namespace=1)],
    ids=["host", "boot", "container"],
)
def test_a_pid_means_nothing_elsewhere(changes, tmp_path, taken, said, capfd):
    """Each of these could be this very process by its number."""
    left = leave(tmp_path, **changes)
    assert 0.4 < taken() < 3
    assert f"{left}, silent for" in said[0] and len(said) == 1
    assert "looking for" in capfd.readouterr().err


def test_how_long_another_host_was_silent_says_the_file(tmp_path, taken):
    leave(tmp_path, host="elsewhere")
    os.utime(tmp_path / "lease.json", (time.time() - 100,) * 2)
    assert taken(beat=0.2, stale=60.0) < 3  # longer than a beat, though: mtimes may err


def test_another_host_that_beats_is_refused(tmp_path, taken, said):
    with holder(tmp_path, "elsewhere") as process, pytest.raises(UserError, match=f"pid {process.pid} on elsewhere"):
        taken(stale=60.0)
    assert said == []


def test_another_host_that_ends_meanwhile_leaves_it(tmp_path, taken, said):
    leave(tmp_path, host="elsewhere")
    threading.Timer(0.3, (tmp_path / "lease.json").unlink).start()
    assert taken(stale=60.0) < 3 and said == []


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"{}", b'{"format": 2}'])
def test_what_cannot_be_read_is_taken_for_another_hosts(content, tmp_path, taken, said):
    (tmp_path / "lease.json").write_bytes(content)
    taken()
    assert "unknown host" in said[0]


def test_two_threads_of_a_process_are_two_runs(tmp_path, taken):
    with Lease(tmp_path, print), pytest.raises(UserError, match="another thread of this process"):
        taken()
    taken()


@pytest.mark.parametrize("left", [None, dict(pid=2**22 + 1), dict(host="elsewhere")], ids=["none", "dead", "silent"])
def test_of_many_starters_one_wins(left, tmp_path):
    for turn in range(10):
        folder, together, refused = tmp_path / str(turn), threading.Barrier(8), threading.Semaphore(0)
        folder.mkdir()
        if left is not None:
            leave(folder, **left)

        def start(number, folder=folder, together=together, refused=refused):
            together.wait()
            try:
                with Lease(folder, lambda line: None, beat=0.02, stale=0.05):
                    return all(refused.acquire(timeout=30) for _ in range(7))
            except UserError:
                refused.release()
                return False

        with concurrent.futures.ThreadPoolExecutor(8) as pool:
            assert sum(pool.map(start, range(8))) == 1
        assert list(folder.iterdir()) == []


def test_a_takeover_that_was_itself_killed_holds_nobody_up(tmp_path, taken, monkeypatch):
    monkeypatch.setattr(lease, "TAKING", 0.5)
    leave(tmp_path, pid=ended_process())
    (tmp_path / "lease.taking").touch()
    taken()


def test_a_run_that_was_stopped_and_replaced_writes_no_more(tmp_path, said):
    with holder(tmp_path, "elsewhere") as process:
        while not (tmp_path / "written").exists():
            time.sleep(0.01)
        process.send_signal(signal.SIGSTOP)
        with Lease(tmp_path, said.append, **FAST) as found:
            assert "silent" in said[0]
            before = (tmp_path / "written").read_bytes()
            process.send_signal(signal.SIGCONT)
            out = process.communicate(timeout=30)[0]
            assert process.returncode == 5 and "took over" in out and len(out.splitlines()) == 1
            more = (tmp_path / "written").read_bytes().removeprefix(before).splitlines()
            assert len(more) <= 1  # where it was stopped between looking and writing
            found.check()  # its end has not removed ours
            assert (tmp_path / "lease.json").exists()


def test_check_looks_itself_where_beats_are_overdue(tmp_path, monkeypatch):
    """The thread that beats may come later than the loop when both wake up."""
    with Lease(tmp_path, print, beat=1000.0) as found:
        other = leave(tmp_path, host="elsewhere")
        found.check()
        clock = lease._clock()
        monkeypatch.setattr(lease, "_clock", lambda: clock + 2001.0)
        with pytest.raises(StorageError, match=f"{other} took over") as lost:
            found.check()
        assert lost.value.exit_code == 5
    assert (tmp_path / "lease.json").exists()


def test_it_beats_and_comes_again_where_somebody_removed_it(tmp_path):
    with Lease(tmp_path, print, beat=0.05) as found:
        (tmp_path / "lease.json").unlink()
        time.sleep(0.5)
        first = Holder.decoded((tmp_path / "lease.json").read_bytes())
        time.sleep(0.5)
        second = Holder.decoded((tmp_path / "lease.json").read_bytes())
        assert second == dataclasses.replace(first, beat=second.beat) and second.beat > first.beat
        found.check()


def test_a_forked_child_neither_holds_nor_releases_it(tmp_path):
    code = (
        HOLDS.format(folder=str(tmp_path), host="")
        .replace("range(600)", "range(1)")
        .replace(
            "found.check()",
            "child = os.fork(); child or found.release() or os._exit(0); os.wait(); os.stat(found._path)",
        )
    )
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, env=environment)
    assert (done.returncode, done.stderr) == (0, "")


# Odd file systems


def refusing(monkeypatch, *names):
    """A file system without links, exclusive creation, or renaming."""
    real = builtins.open

    def refused(*arguments):
        raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))

    def opened(file, mode="r", *arguments, **options):
        return refused() if "x" in mode else real(file, mode, *arguments, **options)

    for name, place, attribute, instead in (
        ("link", os, "link", refused),
        ("rename", os, "replace", refused),
        ("exclusive", builtins, "open", opened),
    ):
        if name in names:
            monkeypatch.setattr(place, attribute, instead)


def test_without_links_creation_is_still_exclusive(tmp_path, taken, said, monkeypatch):
    refusing(monkeypatch, "link")
    with Lease(tmp_path, print), pytest.raises(UserError):
        taken()
    taken()
    assert said == []


@pytest.mark.parametrize(("missing", "left"), [(["link", "exclusive"], False), (["rename"], True)])
def test_where_nothing_can_be_guarded_a_warning_says_so(missing, left, tmp_path, said, monkeypatch):
    refusing(monkeypatch, *missing)
    if left:
        leave(tmp_path, pid=ended_process())
    with Lease(tmp_path, said.append) as found:
        found.check()
    (line,) = said
    assert "cannot be guarded" in line and str(tmp_path) in line and "not supported" in line


def test_a_folder_that_cannot_be_written_is_named(tmp_path):
    folder = tmp_path / "file" / "run"
    folder.parent.write_text("")
    with pytest.raises(StorageError, match=f"cannot write to the workdir {folder}"), Lease(folder, print):
        pass


# In a run


def test_a_run_holds_its_workdir_and_leaves_it_however_it_ends(tmp_path, monkeypatch):
    found = []

    def interrupted(loop):
        found.append((tmp_path / "lease.json").exists())
        if len(found) > 10:
            raise RuntimeError("in the middle")
        return False

    with monkeypatch.context() as patch:
        patch.setattr(train.Loop, "interrupted", interrupted)
        with pytest.raises(RuntimeError, match="in the middle"):
            train.run(tiny.config(), tmp_path, data=tiny.data())
    assert all(found) and not (tmp_path / "lease.json").exists()
    left = leave(tmp_path, pid=ended_process())
    train.run(tiny.config(), tmp_path, data=tiny.data())
    assert not (tmp_path / "lease.json").exists()
    assert f"took the workdir over from {left}" in (tmp_path / "log.txt").read_text()


def test_a_second_run_is_refused_and_evaluating_is_not(tmp_path):
    train.run(tiny.config(total="3st"), tmp_path, data=tiny.data())
    with Lease(tmp_path, print):
        with pytest.raises(UserError, match="in use by"):
            train.run(tiny.config(total="6st"), tmp_path, data=tiny.data())
        assert train.run(tiny.config(total="3st"), tmp_path, mode="eval", data=tiny.data()).metrics


def test_a_run_that_lost_its_workdir_saves_nothing_there(tmp_path, monkeypatch):
    monkeypatch.setattr(train, "Lease", functools.partial(Lease, beat=1e-6))  # every look is overdue

    def interrupted(loop):
        if loop.step == 7:
            leave(tmp_path, host="elsewhere")
        return False

    monkeypatch.setattr(train.Loop, "interrupted", interrupted)
    with pytest.raises(StorageError, match="took over"):
        train.run(tiny.config(), tmp_path, data=tiny.data())
    assert not (tmp_path / "checkpoints").exists() and not (tmp_path / "metrics.jsonl").exists()
    assert Holder.decoded((tmp_path / "lease.json").read_bytes()).host == "elsewhere"
