"""Signals: what they end, how soon, with which exit code, and what is on disk then."""

import ctypes
import dataclasses
import os
import pathlib
import signal
import socket
import subprocess
import sys
import textwrap
import time

import jax
import nets
import numpy as np
import pytest
import tiny
from tiny import same

from jaxtrain import exits, train
from jaxtrain.data import sources
from jaxtrain.loop import stopping
from jaxtrain.storage import checkpoint

TESTS = pathlib.Path(__file__).resolve().parent
SIGNALS = [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1]


def started(*arguments, **variables):
    """A process of its own, to be read from line by line."""
    paths = os.pathsep.join(map(str, (TESTS.parent, TESTS)))
    environment = os.environ | {"PYTHONPATH": paths, "PYTHONUNBUFFERED": "1"} | variables
    pipe = subprocess.PIPE
    return subprocess.Popen([sys.executable, *arguments], stdout=pipe, stderr=pipe, text=True, env=environment)


def wait_for(process, line):
    """Returns once the process has printed that line."""
    for found in process.stdout:
        if found.strip() == line:
            return
    raise AssertionError(f"ended without {line!r}: {process.stderr.read()}")


def stuck_in_c():
    """For ever in a C call that neither holds Python nor ends by a signal: it waits for a lock that it has."""
    lock = ctypes.create_string_buffer(256)
    print("stuck", flush=True)
    for _ in range(2):
        ctypes.CDLL(None).pthread_mutex_lock(lock)


# Without JAX: what a thread, a handler and a process do


LIGHT = """
import ctypes, os, signal, sys, threading, time
from jaxtrain import errors
from jaxtrain.loop import stopping
stopping.PATIENCE = 0.3
def stuck():
    print("stuck", flush=True)
    lock = ctypes.create_string_buffer(256)
    for _ in range(2):
        ctypes.CDLL(None).pthread_mutex_lock(lock)
def save():
    return "; step 3 is saved"
def fail():
    raise errors.StorageError("the disk is full")
with stopping.Stopper() as stop:
    {body}
sys.exit(stop.exit_code)
"""
INT, TERM, USR1 = SIGNALS


@pytest.mark.parametrize(
    ("body", "sent", "code", "said"),
    [
        ("stuck()", [INT], 130, "Ctrl-C: what did not end"),
        ("stuck()", [TERM], 143, "SIGTERM: what did not end"),
        ("stuck()", [USR1], 143, "SIGUSR1 (a scheduler's notice): what did not end"),
        ("stop.working()\n    with stop.away(save): stuck()", [TERM], 143, "was left; step 3 is saved"),
        ("stop.working()\n    with stop.away(fail): stuck()", [TERM], 5, "not saved: StorageError: the disk is full"),
        ("stop.working(); stuck()", [INT, INT], 130, ""),
        ("stop.working(); stuck()", [TERM, TERM], 143, ""),
        ("stop.working(); stuck()", [USR1, INT], 130, ""),
    ],
)
def test_a_signal_ends_what_is_inside_c(body, sent, code, said):
    """Report 37: Python's own handlers do not run there."""
    process = started("-c", LIGHT.format(body=body))
    wait_for(process, "stuck")
    began = time.monotonic()
    for number in sent:
        process.send_signal(number)
        if len(sent) > 1:
            time.sleep(2 * stopping.ECHO)
    out, err = process.communicate(timeout=30)
    assert process.returncode == code and said in out + err, err
    assert len(err.splitlines()) <= 1 and time.monotonic() - began < 10


@pytest.mark.parametrize(
    ("body", "sent"),
    [
        ("stop.working(); print('stuck', flush=True); time.sleep(1)", [TERM]),
        ("stop.working(); print('stuck', flush=True); time.sleep(1)", [USR1, TERM]),
        ("stop.away(None).__enter__(); print('stuck', flush=True); time.sleep(1)", [TERM]),
    ],
    ids=["one", "a notice, then the end", "away"],
)
def test_where_there_is_something_to_lose_the_main_thread_is_waited_for(body, sent):
    process = started("-c", LIGHT.format(body=body + "; print('by itself')"))
    wait_for(process, "stuck")
    for number in sent:
        process.send_signal(number)
        time.sleep(2 * stopping.ECHO)
    out, err = process.communicate(timeout=30)
    assert (process.returncode, out.strip(), err) == (143, "by itself", "")


def test_a_forked_child_is_not_the_run():
    """Loader processes are ended by SIGTERM: neither do they ignore it, nor does the run stop with them."""
    body = """
    print("stuck", flush=True)
    child = os.fork()
    if not child:
        time.sleep(30)
    time.sleep(0.3)
    os.kill(child, signal.SIGTERM)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), bool(stop))
    """
    process = started("-W", "ignore", "-c", LIGHT.format(body=body.strip()))
    out, err = process.communicate(timeout=30)
    assert out.split() == ["stuck", "-15", "False"] and process.returncode == 0, err


def test_a_second_one_without_a_thread_that_watches(monkeypatch):
    """As in a program with an event loop: its wakeup descriptor stays, and handlers do what they can."""
    left = []
    monkeypatch.setattr(exits, "leave", left.append)
    others, reader = socket.socketpair()
    with others, reader:
        others.setblocking(False)
        signal.set_wakeup_fd(others.fileno(), warn_on_full_buffer=False)
        try:
            with stopping.Stopper() as stop:
                os.kill(os.getpid(), signal.SIGTERM)
                assert stop.exit_code == 143 and left == []
                stop._handle(signal.SIGTERM, None)
                assert left == []  # the same one, passed on by a launcher
                time.sleep(2 * stopping.ECHO)
                stop._handle(signal.SIGTERM, None)
                assert left == [143]
        finally:
            assert signal.set_wakeup_fd(-1) == others.fileno()


def test_everything_is_as_before_afterwards():
    before = [signal.getsignal(number) for number in SIGNALS]
    with stopping.Stopper():
        assert [signal.getsignal(number) for number in SIGNALS] != before
    assert [signal.getsignal(number) for number in SIGNALS] == before
    assert signal.set_wakeup_fd(-1) == -1


@pytest.mark.parametrize("number", SIGNALS, ids=lambda number: number.name)
def test_before_a_run_begins_a_signal_ends_the_command_without_a_traceback(number, tmp_path):
    (tmp_path / "slow.py").write_text(f"import os, time\nos.kill(os.getpid(), {int(number)})\ntime.sleep(30)\n")
    process = started("-m", "jaxtrain.main", f"--config={tmp_path / 'slow.py'}")
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out, err) == (exits.CODES[number], "", "")


def test_a_loader_that_nobody_can_end_does_not_hold_the_end_up():
    """Python joins the threads of a pool before it exits."""
    code = LIGHT.format(body="pass").replace("sys.exit(stop.exit_code)", "") + textwrap.dedent(
        """
        from concurrent.futures import ThreadPoolExecutor
        from jaxtrain import exits, main
        def stopped():
            ThreadPoolExecutor(1).submit(stuck)
            return 143
        exits.PATIENCE, main.main = 0.3, stopped
        main.command()
        """
    )
    process = started("-c", code)
    assert process.communicate(timeout=30) == ("stuck\n", "") and process.returncode == 143


# With JAX: runs


class Net(nets.Dropout):
    """Keeps XLA busy for minutes, inside C, where the process is to be stuck in its first compilation."""

    def __call__(self, x):
        if os.environ.get("STUCK") == "compile":
            numbers = jax.numpy.arange(60_000, dtype=np.float32)
            x = x + 0 * jax.lax.reduce_window(numbers, 0.0, jax.lax.add, (30_000,), (1,), "SAME").sum()
        return super().__call__(x)


class Slow(sources.ArraySource):
    """The same examples, later or never."""

    def __init__(self, role, arrays):
        super().__init__(arrays)
        self.role, self.calls = role, 0

    def get(self, ids):
        self.calls += 1
        found = os.environ.get("STUCK"), self.role
        if found == ("start-up", "train") or (found == ("a stall", "train") and self.calls > 15):
            stuck_in_c()
        if found == ("training", "train") or (found == ("evaluation", "validation") and self.calls > 1):
            time.sleep(0.1 if self.role == "train" else 3.0)
            if self.calls == 12 or self.role == "validation":
                print("stuck", flush=True)
        return super().get(ids)


def own(predict, source):
    """An evaluation of the user's."""
    rows = len(predict(source.get(np.arange(9)))["label"])
    if os.environ.get("STUCK") == "own evaluation":
        stuck_in_c()
    return {"rows": float(rows)}


def run(folder):
    """40 steps, evaluated after each eighth; in a process with STUCK in its environment, fewer."""
    found = tiny.data(train=256)
    roles = {role: Slow(role, source.get(np.arange(len(source)))) for role, source in found.open().items()}
    config = tiny.config(
        model=dict(name="test_stopping:Net"),
        total="40st",
        eval_batch_size=8,
        evals=dict(own=dict(source="test", fn="test_stopping:own", every="8st")),
        terminal="plain",
    )
    return train.run(config, pathlib.Path(folder), data=dataclasses.replace(found, open=lambda: roles))


@pytest.fixture(scope="module")
def through(tmp_path_factory):
    return run(tmp_path_factory.mktemp("through"))


def told(result):
    """All but the clock's: each reported step once, as if nothing had come."""
    return [
        (line["step"], key, value)
        for line in result.history
        for key, value in line.items()
        if key.startswith(("train/", "eval", "test/"))
    ]


def test_a_signal_before_the_first_step_leaves_nothing_to_resume(tmp_path, monkeypatch):
    start = train.start

    def signalled(*arguments):
        os.kill(os.getpid(), signal.SIGTERM)
        return start(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(train, "start", signalled)
        stopped = run(tmp_path)
    assert stopped.exit_code == 143 and int(stopped.state.step) == 0
    assert checkpoint.Checkpoints(tmp_path / "checkpoints").steps() == []


# Each signal while there is something to save, and each place once: what a signal is called is all that differs.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("stuck", "number"),
    [
        *(("training", number) for number in SIGNALS),
        ("evaluation", TERM),
        ("own evaluation", INT),
        ("own evaluation", USR1),
        ("compile", TERM),
        ("start-up", INT),
        ("a stall", INT),
        ("a stall", TERM),
    ],
    ids=lambda value: getattr(value, "name", value),
)
def test_out_in_20_seconds_with_everything_saved(stuck, number, tmp_path, through):
    """Report 37: and the resumed run equals one that was never stopped."""
    process = started(
        "-c", f"import sys, test_stopping as t; sys.exit(t.run({str(tmp_path)!r}).exit_code)", STUCK=stuck
    )
    if stuck == "compile":
        while not (tmp_path / "config.json").exists():  # the last thing before the loop
            assert process.poll() is None, process.stderr.read()
            time.sleep(0.1)
        time.sleep(2.0)
    else:
        wait_for(process, "stuck")
        time.sleep(2.0 if stuck == "a stall" else 0.0)  # what was read ahead is trained on first
    began = time.monotonic()
    process.send_signal(number)
    out, err = process.communicate(timeout=60)
    assert process.returncode == exits.CODES[number], out + err
    assert time.monotonic() - began < 20 and "Traceback" not in err
    assert exits.name(number) in (tmp_path / "log.txt").read_text()
    assert not (tmp_path / "lease.json").exists()
    saved = checkpoint.Checkpoints(tmp_path / "checkpoints").latest()
    if stuck == "training":
        assert f"stopped at step {saved} of 40" in out
    elif stuck == "a stall":
        assert 10 < saved <= 15  # what came; 10 is the last checkpoint that was due
    else:
        assert saved == (8 if "evaluation" in stuck else None)
    if stuck in ("own evaluation", "a stall"):
        assert f"step {saved} is saved" in out
    resumed = run(tmp_path)
    assert same(resumed.state, through.state) and told(resumed) == told(through)
