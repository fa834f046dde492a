"""What counts as a hang and what does not; what is left of a run that hung."""

import contextlib
import dataclasses
import functools
import os
import pathlib
import signal
import subprocess
import sys
import threading
import time

import jax
import nets
import numpy as np
import pytest
import tiny

from jaxtrain import exits, train
from jaxtrain.data import sources
from jaxtrain.loop import loop, watchdog
from jaxtrain.loop.watchdog import Watchdog

ROOT = pathlib.Path(__file__).resolve().parent.parent
SECONDS = 1 / 60  # in minutes

LIGHT = """
import sys, threading, time
from pathlib import Path
from jaxtrain.loop.watchdog import Watchdog
def hangs_here():
    threading.Event().wait(10)
with Watchdog({minutes}, Path({file!r})) as dog:
    dog.where = lambda: "at step 7"
    dog.last = [lambda: print("flushed")]
    {body}
"""


def process(body, tmp_path, minutes=SECONDS):
    code = LIGHT.format(body=body, minutes=minutes, file=str(tmp_path / "hang.txt"))
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    return subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    )


def test_a_hang_leaves_the_stacks_of_all_threads_and_exit_code_4(tmp_path):
    (tmp_path / "hang.txt").write_text("an earlier one\n")
    found = process("threading.Thread(target=hangs_here, daemon=True).start(); dog.beat(); hangs_here()", tmp_path)
    out, err = found.communicate(timeout=30)
    assert found.returncode == 4 and out == "flushed\n"
    written = (tmp_path / "hang.txt").read_text()
    assert written.startswith("an earlier one\n") and "at step 7" in written
    for stacks in (written, err):
        assert stacks.count("in hangs_here") == 2
    (line,) = [line for line in err.splitlines() if line.startswith("jaxtrain: ")]
    assert "0.01667 minutes" in line and "at step 7" in line and str(tmp_path / "hang.txt") in line


def test_a_hang_of_the_disk_too_does_not_hold_the_end_up(tmp_path):
    body = (
        "import os; from jaxtrain import exits; exits.PATIENCE = 0.3; os.mkfifo(dog.file)\n"
        "    dog.last = [hangs_here]; dog.beat(); hangs_here()"
    )
    found = process(body, tmp_path)
    _, err = found.communicate(timeout=30)
    assert found.returncode == 4 and "in hangs_here" in err


def test_what_is_no_hang(tmp_path, monkeypatch):
    """All at once: not begun, paused, switched off, beating; and one that hangs, to see that it would be noticed."""
    left = []
    monkeypatch.setattr(exits, "leave", lambda code, *last: left.append(code))
    files = [tmp_path / name for name in ("begun", "paused", "off", "beats", "hangs")]
    limits = [0.5 * SECONDS, 0.5 * SECONDS, 0.0, 0.5 * SECONDS, 0.5 * SECONDS]
    with contextlib.ExitStack() as stack:
        _, paused, off, beats, hangs = dogs = [Watchdog(*each) for each in zip(limits, files, strict=True)]
        for dog in dogs[1:]:
            dog.beat()
        for dog in dogs:
            stack.enter_context(dog)
        paused.pause()
        for _ in range(9):
            time.sleep(0.1)
            beats.beat()
    assert left == [4]


def test_time_asleep_is_no_hang(tmp_path):
    """A laptop that slept, a process that was stopped: awake again, it has all of its time."""
    found = process("dog.beat(); print('up', flush=True); time.sleep(0.5); dog.beat(); time.sleep(0.5)", tmp_path)
    assert found.stdout.readline() == "up\n"
    found.send_signal(signal.SIGSTOP)
    time.sleep(2)
    found.send_signal(signal.SIGCONT)
    _, err = found.communicate(timeout=30)
    assert (found.returncode, err) == (0, "")


def test_in_a_notebook_the_person_decides(tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(watchdog, "in_notebook", lambda: True)
    with Watchdog(0.3 * SECONDS, tmp_path / "hang.txt") as dog:
        dog.beat()
        time.sleep(1.0)
    assert "restart the kernel" in capfd.readouterr().err and (tmp_path / "hang.txt").exists()


# In a run

GO_ON = threading.Event()  # ends what hangs
STALL = ["", 0]  # what hangs, and for how many seconds at most


def stall(place):
    if STALL[0] == place:
        GO_ON.wait(STALL[1])


class Net(nets.Dropout):
    def __call__(self, x):
        if STALL[0] == "device":
            jax.debug.callback(lambda: stall("device"))
        if isinstance(x, jax.core.Tracer) and threading.current_thread() is threading.main_thread():
            stall("compilation")
        return super().__call__(x)


def compiled_late(original, job):
    """A program of the step that takes its time to be compiled; so does that of evaluation, which is traced later."""
    advance, first = original(job), [True]
    STALL[0] = "compilation"

    def advanced(*arguments):
        if first:
            first.clear()
            stall("compilation")
        return advance(*arguments)

    return advanced


class Stalling(sources.ArraySource):
    def __init__(self, role, arrays):
        super().__init__(arrays)
        self.role, self.calls = role, 0

    def get(self, ids):
        self.calls += 1
        stall(f"{self.role} batch {self.calls}")
        return super().get(ids)


def own(predict, source):
    stall("own evaluation")
    return {"rows": float(len(source))}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("place", "hangs"),
    [
        ("train batch 1", True),
        ("train batch 12", True),
        ("validation batch 1", True),
        ("validation batch 3", True),
        ("device", True),
        ("own evaluation", False),
        ("compilation", False),
    ],
)
def test_a_run_that_makes_no_progress_ends(place, hangs, tmp_path, monkeypatch):
    """Handing out steps is no progress: what the device does not finish is a hang, too."""
    codes, limit, over = [], 3.0, threading.Event()

    def leave(code, *last):
        codes.append(code)
        last[0]()
        GO_ON.set()
        over.wait()  # the real one does not come back, so nothing is watched from here on

    monkeypatch.setattr(exits, "leave", leave)
    GO_ON.clear()
    STALL[:] = place, 20.0 if hangs else 2 * limit
    if place == "compilation":
        STALL[0] = ""  # what is traced before the run begins is not watched
        monkeypatch.setattr(loop, "plain_advance", functools.partial(compiled_late, loop.plain_advance))
    found = tiny.data()
    roles = {role: Stalling(role, source.get(np.arange(len(source)))) for role, source in found.open().items()}
    config = tiny.config(
        model=dict(name="test_watchdog:Net"),
        hang_minutes=limit * SECONDS,
        eval_batch_size=8,
        evals=dict(own=dict(source="test", fn="test_watchdog:own", every="8st")),
        total="16st",
    )
    try:
        result = train.run(config, tmp_path, data=dataclasses.replace(found, open=lambda: roles))
    finally:
        STALL[0] = ""
        over.set()
    assert int(result.state.step) == 16
    assert codes == ([4] if hangs else [])
    assert (tmp_path / "hang.txt").exists() == hangs
