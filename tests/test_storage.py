"""Runs whose disk fails: the error names it, exit code 5, and the next start goes on as if nothing had been."""

import errno
import json
import os
import pathlib
import shutil
import subprocess
import sys
import textwrap

import jax
import numpy as np
import pytest
import tiny
from tiny import same

from jaxtrain import train
from jaxtrain.errors import StorageError, UserError
from jaxtrain.result import load
from jaxtrain.storage import checkpoint
from jaxtrain.storage.checkpoint import Checkpoints

TESTS = pathlib.Path(__file__).parent


def config(**changes):
    keep = dict(every="10st", minutes=0.0, keep=5, keep_every="")
    fixed = dict(model=dict(name="nets:Dropout"), ema=0.9, total="60st", eval_every="", checkpoint=keep)
    return tiny.config(**fixed, **changes)


@pytest.fixture(scope="module")
def through(tmp_path_factory):
    """A run that nothing befell."""
    return train.run(config(), tmp_path_factory.mktemp("through"), data=tiny.data())


@pytest.fixture(scope="module")
def finished(through):
    """Its workdir: not to be changed."""
    return through.workdir


def reported(folder):
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line["step"] for line in lines if "train/loss" in line]


def flip_a_bit(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(content)


def largest(folder):
    return max((p for p in folder.rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)


def test_a_save_that_fails_in_the_background_ends_the_run_within_an_interval(tmp_path, monkeypatch, through):
    """Report 40, as the whole run sees it."""
    write, save = checkpoint.sync_all, train.Loop.save

    def sync(folder):
        if (tmp_path / "checkpoints" / "20").exists():
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write(folder)

    def save_and_let_it_happen(loop, *arguments, **options):
        save(loop, *arguments, **options)
        loop.checkpoints._worker.join()

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "sync_all", sync)
        patch.setattr(train.Loop, "save", save_and_let_it_happen)
        with pytest.raises(StorageError, match="checkpoints/30 was not written: No space left on device") as caught:
            train.run(config(), tmp_path, data=tiny.data())
    assert caught.value.exit_code == 5
    assert 20 <= max(reported(tmp_path)) <= 35
    assert Checkpoints(tmp_path / "checkpoints").latest() == 20
    resumed = train.run(config(), tmp_path, data=tiny.data())
    assert same(resumed.state, through.state)
    assert reported(tmp_path) == list(range(5, 65, 5))


def test_a_last_checkpoint_that_is_not_sound_is_no_success(tmp_path, monkeypatch, through):
    """Exit code 0 says that the last step is on disk and loads."""
    wait = Checkpoints.wait

    def spoil(checkpoints):
        wait(checkpoints)
        if (tmp_path / "checkpoints" / "60").exists():
            patch.undo()
            flip_a_bit(largest(tmp_path / "checkpoints" / "60"))

    with monkeypatch.context() as patch:
        patch.setattr(Checkpoints, "wait", spoil)
        with pytest.raises(StorageError, match="checkpoints/60/.* was altered.*; start the run again") as caught:
            train.run(config(), tmp_path, data=tiny.data())
    assert caught.value.exit_code == 5
    resumed = train.run(config(), tmp_path, data=tiny.data())
    assert resumed.exit_code == 0 and same(resumed.state, through.state)


DAMAGES = {
    "an empty folder after it": lambda folder: (folder / "70").mkdir(),
    "arrays without a manifest after it": lambda folder: (
        shutil.copytree(folder / "60", folder / "70"),
        (folder / "70" / "manifest.json").unlink(),
    ),
    "largest file halved": lambda folder: os.truncate(path := largest(folder / "60"), path.stat().st_size // 2),
    "a bit flipped": lambda folder: flip_a_bit(largest(folder / "60")),
    "a save cut off": lambda folder: shutil.copytree(folder / "60" / "arrays-0", folder / ".writing" / "arrays"),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_a_run_goes_on_from_the_newest_good_checkpoint(finished, name, tmp_path, through, capsys):
    """Report 35: nothing good is lost, what is passed over is said in one line and left."""
    folder = tmp_path / "run"
    shutil.copytree(finished, folder)
    DAMAGES[name](folder / "checkpoints")
    resumed = train.run(config(terminal="plain"), folder, data=tiny.data())
    assert resumed.exit_code == 0 and same(resumed.state, through.state)
    assert capsys.readouterr().out.count("passed over") == (0 if "cut off" in name else 1)
    assert {"20", "30", "40", "50", "60"} <= {path.name for path in (folder / "checkpoints").iterdir()}
    assert (folder / "checkpoints" / "70").exists() == ("after it" in name)
    assert reported(folder) == list(range(5, 65, 5))


def test_a_workdir_that_vanishes_in_mid_run_is_named(tmp_path, monkeypatch):
    folder, save = tmp_path / "run", train.Loop.save

    def vanish(loop, *arguments, **options):
        if loop.step == 20:
            loop.checkpoints.wait()
            os.rename(folder, tmp_path / "away")
        save(loop, *arguments, **options)

    monkeypatch.setattr(train.Loop, "save", vanish)
    with pytest.raises(StorageError, match=rf"{folder}.*No such file or directory") as caught:
        train.run(config(), folder, data=tiny.data())
    assert caught.value.exit_code == 5 and not folder.exists()
    assert Checkpoints(tmp_path / "away" / "checkpoints").latest() == 10


@pytest.mark.parametrize(
    ("where", "expected"),
    [
        ("run", 60),
        ("run/checkpoints", 60),
        ("run/checkpoints/30", 30),
        ("run/checkpoints/33", r"run/checkpoints/33 does not exist; .* are: 20, 30, 40, 50, 60"),
        ("nowhere", r"nowhere does not exist; expected a workdir"),
        ("empty", r"empty has no checkpoints; expected a workdir"),
        ("damaged", r"every checkpoint in .*damaged/checkpoints is damaged"),
    ],
)
def test_weights_come_from_the_checkpoint_that_was_named(finished, where, expected, tmp_path):
    """Report 8: a path or a step that is not there never means a fresh start."""
    shutil.copytree(finished, tmp_path / "run")
    shutil.copytree(finished / "checkpoints" / "60", tmp_path / "damaged" / "checkpoints" / "60")
    flip_a_bit(largest(tmp_path / "damaged"))
    (tmp_path / "empty").mkdir()
    job = train.build(config(init_from=str(tmp_path / where)), data=tiny.data())
    said = []
    if isinstance(expected, str):
        with pytest.raises(UserError, match=expected):
            train.initialised(job, job.initial(), said.append)
        return
    taken = train.initialised(job, job.initial(), said.append)
    stored = Checkpoints(tmp_path / "run" / "checkpoints").restore_flat(expected, "state/params")
    for path, leaf in jax.tree_util.tree_leaves_with_path(taken.params):
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        np.testing.assert_array_equal(leaf, stored[f"state/params/{name}"])
    assert str(tmp_path / "run" / "checkpoints" / str(expected)) in said[-1]


def test_a_step_that_was_asked_for_and_is_not_there_is_refused(finished):
    with pytest.raises(UserError, match=r"checkpoints/33 does not exist; .* are: 20, 30, 40, 50, 60"):
        load(finished, checkpoint=33, trust=True)


DISK = """
    import subprocess, sys
    import nets, tiny
    from test_storage import config, reported
    from jaxtrain import train
    from jaxtrain.storage.checkpoint import Checkpoints
    from jaxtrain.errors import StorageError
    from pathlib import Path

    def mount(*arguments):
        subprocess.run(["mount", *arguments, sys.argv[1]], check=True)

    folder = Path(sys.argv[1]) / "run"
    mount("-t", "tmpfs", "-o", "size=400k", "none")
    try:
        train.run(config(), folder, data=tiny.data())
    except StorageError as error:
        print(error.exit_code, error)
    print(Checkpoints(folder / "checkpoints").latest())
    mount("-o", "remount,size=64m")
    resumed = train.run(config(), folder, data=tiny.data())
    assert tiny.same(resumed.state, train.run(config(), data=tiny.data()).state)
    assert reported(folder) == list(range(5, 65, 5))
"""


@pytest.mark.slow
def test_a_run_whose_disk_is_full_goes_on_when_there_is_space(tmp_path, own_disks):
    """Report 40, on a real disk."""
    command = [*own_disks, sys.executable, "-c", textwrap.dedent(DISK), tmp_path]
    paths = os.pathsep.join([str(TESTS), str(TESTS.parent)])
    ended = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": paths})
    assert ended.returncode == 0, ended.stderr
    error, latest = ended.stdout.splitlines()
    assert error.startswith("5 ") and str(tmp_path) in error and "No space left on device" in error
    assert int(latest) % 10 == 0
