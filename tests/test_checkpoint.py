"""Checkpoints: what is restored is what was saved, whatever befell the process, the disk or the devices."""

import dataclasses
import errno
import json
import logging
import os
import pathlib
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable
from typing import Any

import crc32c
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tensorstore
from etils import epath

from jaxtrain.errors import JaxtrainError, StorageError, UserError
from jaxtrain.storage import checkpoint, manifest
from jaxtrain.storage.checkpoint import Checkpoints, locate

REPOSITORY = pathlib.Path(__file__).resolve().parent.parent


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class State:
    step: Any
    params: Any
    opt_state: Any
    model_state: Any
    key: Any


def make_state(step: int = 3, width: int = 16) -> State:
    params = {
        "dense": {
            "kernel": jax.random.normal(jax.random.key(step), (width, 8), jnp.float32),
            "bias": jnp.full((8,), 0.1, jnp.bfloat16),
        }
    }
    mixed = {
        "count": jnp.int32(2**31 - 1),
        "seen": jnp.array([True, False]),
        "small": jnp.arange(-3, 3, dtype=jnp.int8),
        "half": jnp.array([1e-7, 65504.0], jnp.float16),
        "odd": jnp.array([jnp.nan, -0.0, jnp.inf], jnp.float32),
        "none": jnp.zeros((0, 3), jnp.float32),
        "host": np.arange(4, dtype=np.uint8),
    }
    opt_state = optax.adamw(optax.constant_schedule(1e-3)).init(params)
    return State(jnp.int32(step), params, opt_state, mixed, jax.random.key(step))


def small(step: int) -> dict[str, Any]:
    return {"step": jnp.int32(step), "w": jnp.full((64, 64), step, jnp.float32)}


def abstract(tree: Any, sharding: Any = None) -> Any:
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), tree)


def as_bytes(tree: Any) -> list[tuple[str, bytes]]:
    data = [
        jax.random.key_data(x) if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key) else x
        for x in jax.tree.leaves(tree)
    ]
    return [(str(x.dtype), np.asarray(x).tobytes()) for x in data]


def layout(devices: int, *axes: str) -> jax.NamedSharding:
    mesh = jax.make_mesh(
        (devices,), ("data",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:devices]
    )
    return jax.NamedSharding(mesh, jax.P(*axes))


def save_all(folder: pathlib.Path, *steps: int, **options: Any) -> Checkpoints:
    checkpoints = Checkpoints(folder, **options)
    for step in steps:
        checkpoints.save(step, small(step))
    checkpoints.wait()
    return checkpoints


@pytest.fixture(scope="module")
def ten_and_twenty(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    folder = tmp_path_factory.mktemp("saved")
    save_all(folder, 10, 20).close()
    return folder


@pytest.fixture
def folder(tmp_path: pathlib.Path, ten_and_twenty: pathlib.Path) -> pathlib.Path:
    """A folder of its own with sound checkpoints 10 and 20."""
    return pathlib.Path(shutil.copytree(ten_and_twenty, tmp_path / "checkpoints"))


def run_python(code: str, *arguments: Any, devices: int = 1, under: Any = ()) -> subprocess.Popen[str]:
    flags = f"--xla_force_host_platform_device_count={devices}"
    return subprocess.Popen(
        [*under, sys.executable, "-c", textwrap.dedent(code), *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": str(REPOSITORY), "XLA_FLAGS": flags},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


# What is saved comes back


def test_roundtrip_is_bit_exact_and_keeps_the_structure(tmp_path: pathlib.Path) -> None:
    state = make_state()
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(3, state, meta={"eval/accuracy": 0.5, "nested": {"a": [1, None]}})
        restored = checkpoints.restore(3, abstract(state))
        assert checkpoints.meta(3) == {"eval/accuracy": 0.5, "nested": {"a": [1, None]}}
        assert str(checkpoints.leaves(3)["opt_state/0/mu/dense/kernel"]) == "float32[16,8]"
    assert jax.tree.structure(restored) == jax.tree.structure(state)
    assert as_bytes(restored) == as_bytes(state)
    assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(restored))


@pytest.mark.parametrize("impl", ["threefry2x32", "rbg"])
def test_typed_keys_draw_the_same_numbers(tmp_path: pathlib.Path, impl: str) -> None:
    tree = {"one": jax.random.key(7, impl=impl), "many": jax.random.split(jax.random.key(8, impl=impl), 5)}
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(0, tree)
        restored = checkpoints.restore(0, abstract(tree))
    assert restored["one"].dtype == tree["one"].dtype and restored["many"].shape == (5,)
    assert as_bytes(jax.random.bits(restored["one"], (4,))) == as_bytes(jax.random.bits(tree["one"], (4,)))
    assert as_bytes(restored) == as_bytes(tree)


@pytest.mark.parametrize("devices", [1, 2, 8])
def test_saved_on_four_devices_restores_on_any_number(tmp_path: pathlib.Path, devices: int) -> None:
    tree = {
        "split": jax.device_put(jnp.arange(64, dtype=jnp.float32).reshape(16, 4), layout(4, "data")),
        "whole": jax.device_put(jnp.float32(2.5), layout(4)),
        "key": jax.device_put(jax.random.key(1), layout(4)),
    }
    wanted = {
        "split": jax.ShapeDtypeStruct((16, 4), jnp.float32, sharding=layout(devices, "data")),
        "whole": jax.ShapeDtypeStruct((), jnp.float32, sharding=layout(devices)),
        "key": jax.ShapeDtypeStruct((), tree["key"].dtype, sharding=layout(devices)),
    }
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, tree)
        restored = checkpoints.restore(1, wanted)
    assert as_bytes(restored) == as_bytes(tree)
    for name, leaf in restored.items():
        assert leaf.sharding.is_equivalent_to(wanted[name].sharding, leaf.ndim)
    assert restored["split"].addressable_shards[0].data.shape == (16 // devices, 4)


def test_donated_and_overwritten_arrays_are_saved_as_they_were(tmp_path: pathlib.Path) -> None:
    update = jax.jit(lambda tree: jax.tree.map(lambda x: x + 1, tree), donate_argnums=0)
    tree = {str(i): jnp.zeros((512, 512), jnp.float32) for i in range(8)}
    host = np.zeros((512, 512), np.float32)
    with Checkpoints(tmp_path, keep=3) as checkpoints:
        for step in range(3):
            checkpoints.save(step, {**tree, "host": host})
            host += 1
            tree = update(update(tree))
        for step in range(3):
            arrays = checkpoints.restore_flat(step)
            assert np.unique(arrays.pop("host")).tolist() == [step]
            assert np.unique(np.stack(list(arrays.values()))).tolist() == [2 * step]


def test_a_guard_against_transfers_does_not_stop_it(tmp_path: pathlib.Path) -> None:
    tree, wanted = small(1), abstract(small(1))
    with jax.transfer_guard("disallow"), Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, tree)
        restored = checkpoints.restore(1, wanted)
    assert as_bytes(restored) == as_bytes(tree)


def test_weights_alone_are_read_without_a_template(tmp_path: pathlib.Path) -> None:
    state = make_state()
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(3, state)
        params = checkpoints.restore_flat(3, "params")
        assert set(params) == {"params/dense/kernel", "params/dense/bias"}
        assert params["params/dense/bias"].dtype == jnp.bfloat16
        assert isinstance(params["params/dense/kernel"], np.ndarray)
        np.testing.assert_array_equal(params["params/dense/kernel"], state.params["dense"]["kernel"])
        assert checkpoints.restore_flat(3, "model_state/none")["model_state/none"].shape == (0, 3)
        assert set(checkpoints.restore_flat(3)) == set(checkpoints.leaves(3))
        with pytest.raises(UserError, match="holds nothing below 'param'; it holds key, model_state, opt_state"):
            checkpoints.restore_flat(3, "param")


def test_a_relative_folder_holds_after_chdir(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    checkpoints = Checkpoints("run/checkpoints")
    monkeypatch.chdir("/")
    with checkpoints:
        checkpoints.save(1, small(1))
    assert (tmp_path / "run" / "checkpoints" / "1" / "manifest.json").is_file()


@pytest.mark.parametrize("tree", [{"a": 3}, {"a": "text"}, {"a": np.array([object()])}])
def test_only_arrays_are_saved(tmp_path: pathlib.Path, tree: Any) -> None:
    with pytest.raises(UserError, match="a of the state"):
        Checkpoints(tmp_path).save(1, tree)


def test_two_leaves_of_one_path_are_refused(tmp_path: pathlib.Path) -> None:
    with pytest.raises(UserError, match="'a/b'"):
        Checkpoints(tmp_path).save(1, {"a": {"b": jnp.int32(1)}, "a/b": jnp.int32(2)})


# What does not fit is refused


def drop(tree: dict[str, Any], name: str) -> dict[str, Any]:
    return {key: value for key, value in tree.items() if key != name}


F32 = jnp.float32
STORED = {
    "w": jax.ShapeDtypeStruct((3, 4), F32),
    "b": jax.ShapeDtypeStruct((4,), F32),
    "k": jax.eval_shape(jax.random.key, 0),
}
MISFITS = {
    "missing": ({**STORED, "c": jax.ShapeDtypeStruct((2,), F32)}, "c is absent, expected float32[2]"),
    "extra": (drop(STORED, "b"), "b is float32[4], expected nothing there"),
    "shape": ({**STORED, "b": jax.ShapeDtypeStruct((5,), F32)}, "b is float32[4], expected float32[5]"),
    "dtype": ({**STORED, "b": jax.ShapeDtypeStruct((4,), jnp.int32)}, "b is float32[4], expected int32[4]"),
    "half": ({**STORED, "b": jax.ShapeDtypeStruct((4,), jnp.bfloat16)}, "expected bfloat16[4]"),
    "key": ({**STORED, "b": jax.eval_shape(jax.random.key, 0)}, "b is float32[4], expected key<fry>[]"),
    "data of a key": ({**STORED, "k": jax.ShapeDtypeStruct((2,), jnp.uint32)}, "k is key<fry>[], expected uint32[2]"),
    "implementation of a key": (
        {**STORED, "k": jax.eval_shape(lambda: jax.random.key(0, impl="rbg"))},
        "k is key<fry>[], expected key<rbg>[]",
    ),
    "rank": ({**STORED, "b": jax.ShapeDtypeStruct((4, 1), F32)}, "b is float32[4], expected float32[4,1]"),
    "another path": ({**drop(STORED, "b"), "c": STORED["b"]}, "b is float32[4], expected nothing there; c is absent"),
    "many": ({str(i): jax.ShapeDtypeStruct((), F32) for i in range(9)}, "; and 9 more"),
}


@pytest.mark.parametrize("name", MISFITS)
def test_another_structure_is_refused_in_one_line(
    tmp_path: pathlib.Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Report 7: nothing is read in part, converted or left as it was."""
    wanted, message = MISFITS[name]
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(7, {"w": jnp.ones((3, 4)), "b": jnp.ones(4), "k": jax.random.key(0)})
        checkpoints.wait()
        before = sorted(tmp_path.rglob("*"))
        monkeypatch.setattr(checkpoint.ocp, "Checkpointer", lambda *_: pytest.fail("it was read"))
        with pytest.raises(UserError) as caught:
            checkpoints.restore(7, wanted)
        with pytest.raises(UserError) as latest:
            checkpoints.restore_latest(wanted)
    assert str(latest.value) == str(caught.value)
    text = str(caught.value)
    assert message in text and str(tmp_path / "7") in text and "\n" not in text
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("read", ["restore", "restore_flat", "meta", "leaves"])
def test_a_step_that_is_not_there_is_refused_with_those_that_are(folder: pathlib.Path, read: str) -> None:
    arguments = [abstract(small(0))] if read == "restore" else []
    with pytest.raises(UserError, match=f"{folder / '15'} does not exist; .* are: 10, 20"):
        getattr(Checkpoints(folder), read)(15, *arguments)
    with pytest.raises(UserError, match="are: none"):
        getattr(Checkpoints(folder / "nowhere"), read)(15, *arguments)
    assert not (folder / "nowhere").exists()


@pytest.mark.parametrize("sums", ["crc32c", "sha256"])
def test_a_later_format_is_refused_by_its_number(folder: pathlib.Path, sums: str, monkeypatch: Any) -> None:
    with monkeypatch.context() as patch:  # the later version
        patch.setattr(manifest, "FORMAT", 99)
        patch.setitem(manifest._SUMS, 99, (sums, manifest.zlib.adler32))
        dataclasses.replace(manifest.Manifest.read(folder / "20")).write(folder / "20")
    checkpoints = Checkpoints(folder)
    for read in (
        checkpoints.latest,
        lambda: checkpoints.restore(20, abstract(small(0))),
        lambda: checkpoints.restore_latest(abstract(small(0))),
    ):
        with pytest.raises(UserError, match=f"format 99, and this jaxtrain reads up to {manifest.FORMAT}"):
            read()


def test_a_step_given_up_by_a_later_version_is_not_deleted(folder: pathlib.Path) -> None:
    path = folder / "10" / "manifest.json"
    path.write_text('{"format": 99}')
    with Checkpoints(folder, keep=1) as checkpoints:
        checkpoints.save(30, small(30))
        checkpoints.save(40, small(40))
    assert sorted(path.name for path in folder.iterdir()) == ["10", "40"]


@pytest.mark.parametrize("options, match", [({"keep": 0}, "keep is 0"), ({}, "gs://bucket")])
def test_impossible_settings_are_refused(options: dict[str, Any], match: str) -> None:
    with pytest.raises(UserError, match=match):
        Checkpoints("gs://bucket" if not options else "x", **options)


@pytest.mark.parametrize(
    "given, expected",
    [
        ("run", ("run/checkpoints", None)),
        ("run/checkpoints", ("run/checkpoints", None)),
        ("run/checkpoints/10", ("run/checkpoints", 10)),
        ("run/checkpoints/99", ("run/checkpoints", 99)),
        ("nowhere", "does not exist"),
        ("empty", "has no checkpoints"),
    ],
)
def test_locate_knows_what_a_user_means(tmp_path: pathlib.Path, given: str, expected: Any) -> None:
    save_all(tmp_path / "run" / "checkpoints", 10)
    (tmp_path / "empty").mkdir()
    if isinstance(expected, str):
        with pytest.raises(UserError, match=expected):
            locate(tmp_path / given)
    else:
        assert locate(tmp_path / given) == (tmp_path / expected[0], expected[1])


# What is damaged is passed over, and never deleted


def largest(folder: pathlib.Path) -> pathlib.Path:
    return max((p for p in folder.rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)


def halve(path: pathlib.Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def flip_a_bit(path: pathlib.Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(content)


def link_out(path: pathlib.Path) -> None:
    """Puts the same content elsewhere, and a link to it where it was."""
    elsewhere = path.parents[[p.name for p in path.parents].index("20") + 1] / "elsewhere"
    os.rename(path, elsewhere)
    path.symlink_to(elsewhere)


def edit(path: pathlib.Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))


MANIFEST = "manifest.json"
DAMAGES: dict[str, Callable[[pathlib.Path], object]] = {
    "largest file halved": lambda f: halve(largest(f)),
    "bit flipped in the largest file": lambda f: flip_a_bit(largest(f)),
    "bit flipped in orbax's metadata": lambda f: flip_a_bit(f / "arrays-0" / "_METADATA"),
    "file missing": lambda f: (f / "arrays-0" / "manifest.ocdbt").unlink(),
    "arrays missing": lambda f: shutil.rmtree(f / "arrays-0"),
    "a file more": lambda f: (f / "arrays-0" / "array_metadatas" / "process_1").write_text("{}"),
    "largest file empty": lambda f: largest(f).write_bytes(b""),
    "largest file a folder": lambda f: (path := largest(f), path.unlink(), path.mkdir()),
    "largest file a link out": lambda f: link_out(largest(f)),
    "folder of files a link out": lambda f: link_out(f / "arrays-0" / "d"),
    "arrays a link out": lambda f: link_out(f / "arrays-0"),
    "a hidden link out": lambda f: (f / "arrays-0" / ".d").symlink_to("/"),
    "links in a circle": lambda f: (path := largest(f), path.unlink(), path.symlink_to(path)),
    "manifest a folder": lambda f: ((f / MANIFEST).unlink(), (f / MANIFEST).mkdir()),
    "manifest without end": lambda f: (f / MANIFEST).write_text("[" * 100_000),
    "emptied": lambda f: (shutil.rmtree(f), f.mkdir()),
    "a file in its place": lambda f: (shutil.rmtree(f), f.write_text("")),
    "manifest missing": lambda f: (f / MANIFEST).unlink(),
    "manifest empty": lambda f: (f / MANIFEST).write_text(""),
    "manifest halved": lambda f: halve(f / MANIFEST),
    "manifest of zeros": lambda f: (f / MANIFEST).write_bytes(bytes(500)),
    "manifest a list": lambda f: (f / MANIFEST).write_text("[]"),
    "format number altered": lambda f: edit(f / MANIFEST, '"format": 2', '"format": 3'),
    "format number lowered": lambda f: edit(f / MANIFEST, '"format": 2', '"format": 1'),
    "manifest altered": lambda f: edit(f / MANIFEST, '"best": false', '"best": true'),
    "manifest of another step": lambda f: shutil.copy(f.parent / "10" / MANIFEST, f / MANIFEST),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_checkpoint_is_passed_over_said_and_left(folder: pathlib.Path, name: str) -> None:
    """Reports 35 and 40."""
    DAMAGES[name](folder / "20")
    said: list[str] = []
    checkpoints = Checkpoints(folder, keep=1, say=said.append)
    found = checkpoints.restore_latest(abstract(small(0)))
    assert found is not None and found[0] == 10 and as_bytes(found[1]) == as_bytes(small(10))
    assert checkpoints.latest() == checkpoints.latest() == 10
    assert len(said) == 1 and str(folder / "20") in said[0] and "\n" not in said[0]
    assert as_bytes(checkpoints.restore(10, abstract(small(10)))) == as_bytes(small(10))
    for _ in range(2):
        with pytest.raises(JaxtrainError, match=str(folder / "20")):
            checkpoints.restore(20, abstract(small(20)))
    checkpoints.save(21, small(21))
    assert checkpoints.latest() == 21
    left = {path.name for path in folder.iterdir()}
    assert left - {"elsewhere"} == {"20", "21"}  # retention neither counts nor deletes what is damaged
    checkpoints.close()


def test_damage_among_the_steps_kept_does_not_cost_a_good_one(folder: pathlib.Path) -> None:
    flip_a_bit(largest(folder / "20"))
    with Checkpoints(folder, say=lambda text: None) as checkpoints:
        assert checkpoints.latest() == 10
        checkpoints.save(15, small(15))
        assert checkpoints.steps() == [10, 15, 20] and checkpoints.latest() == 15


def test_an_empty_folder_is_no_checkpoint(folder: pathlib.Path) -> None:
    for name in ("30", "040", "-5", "x", ".writing", "50.orbax-checkpoint-tmp"):
        (folder / name).mkdir()
    checkpoints = Checkpoints(folder)
    assert checkpoints.latest() == 20 and checkpoints.steps() == [10, 20]


def test_every_flipped_bit_is_found(folder: pathlib.Path) -> None:
    checkpoints = Checkpoints(folder, say=lambda text: None)
    files = [p for p in (folder / "20").rglob("*") if p.is_file() and p.stat().st_size]
    assert len(files) > 5
    for path in files:
        content = path.read_bytes()
        flip_a_bit(path)
        assert checkpoints.latest() == 10, path
        found = checkpoints.restore_latest(abstract(small(0)))  # orbax reads it meanwhile, and need not notice
        assert found is not None and found[0] == 10, path
        with pytest.raises(StorageError, match=re.escape(str(path))):
            checkpoints.restore(20, abstract(small(0)))
        path.write_bytes(content)
    assert checkpoints.latest() == 20


def test_a_flipped_bit_anywhere_in_a_manifest_is_damage(folder: pathlib.Path) -> None:
    """In the number of its format too, which then is not that of a later version."""
    path = folder / "20" / MANIFEST
    content = path.read_bytes()
    for place in range(0, len(content), 3):
        path.write_bytes(content[:place] + bytes([content[place] ^ 1 << place % 8]) + content[place + 1 :])
        with pytest.raises(manifest.Damaged, match=str(path)):
            manifest.Manifest.read(folder / "20")
    path.write_bytes(content)
    assert Checkpoints(folder).latest() == 20


@pytest.mark.parametrize("orbax_fails", [False, True])
def test_what_is_verified_while_orbax_reads_is_given_out_only_if_sound(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, orbax_fails: bool
) -> None:
    tree = {"w": jnp.arange(2**20, dtype=jnp.float32)}
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, tree)
    checkpoints.wait()
    path = largest(tmp_path)
    assert path.stat().st_size > checkpoint._SMALL
    flip_a_bit(path)
    read: list[Any] = []
    load = Checkpoints._load

    def spy(*arguments: Any) -> Any:
        read.append(load(*arguments))
        if orbax_fails:
            raise StorageError("what orbax makes of it")
        return read[-1]

    monkeypatch.setattr(Checkpoints, "_load", spy)
    with pytest.raises(StorageError, match=f"{path} was altered"):
        checkpoints.restore(1, abstract(tree))
    assert as_bytes(read[0]) != as_bytes(tree)
    with pytest.raises(StorageError, match=f"{path} was altered"):
        checkpoints.restore_flat(1)
    said: list[str] = []
    assert Checkpoints(tmp_path, say=said.append).restore_latest(abstract(tree)) is None
    assert len(said) == 1 and "passed over" in said[0]


def test_a_step_that_was_asked_for_is_verified_whatever_else_is_there(folder: pathlib.Path) -> None:
    checkpoints = Checkpoints(folder)
    checkpoints.verify(10)
    flip_a_bit(largest(folder / "10"))
    checkpoints.verify(20)
    for step, found in ((10, "was altered"), (30, "its save did not finish")):
        with pytest.raises(StorageError, match=f"{folder / str(step)}.*{found}.*; start the run again"):
            checkpoints.verify(step)


def test_what_others_leave_beside_the_files_is_no_damage(folder: pathlib.Path) -> None:
    for name in (".DS_Store", ".nfs0000", "d/.hidden"):
        (folder / "20" / "arrays-0" / name).write_text("")
    (folder / "20" / "notes.txt").write_text("the good one")
    assert Checkpoints(folder, say=pytest.fail).latest() == 20


OUTSIDE = ["../../secret", "/etc/hostname", "d/../../../secret", "..", "", "."]


@pytest.mark.parametrize("name", OUTSIDE)
@pytest.mark.parametrize("key", ["arrays", "files"])
def test_a_manifest_leads_nowhere_else(folder: pathlib.Path, name: str, key: str) -> None:
    """Whoever wrote it: its own checksum fits."""
    (folder.parent / "secret").write_text("word")
    found = manifest.Manifest.read(folder / "20")
    changes: dict[str, Any] = {"arrays": name, "files": {**found.files, name: manifest.File(4, ())}}
    dataclasses.replace(found, **{key: changes[key]}).write(folder / "20")
    said: list[str] = []
    checkpoints = Checkpoints(folder, say=said.append)
    assert checkpoints.latest() == 10
    assert len(said) == 1 and f"names {name!r}, which is not inside" in said[0]
    with pytest.raises(StorageError, match="is not inside the checkpoint"):
        checkpoints.restore(20, abstract(small(0)))


def test_arrays_are_looked_up_in_the_database_alone(folder: pathlib.Path) -> None:
    """Without it orbax takes names of arrays for paths of folders, absolute ones too."""
    found = manifest.Manifest.read(folder / "20")
    (folder / "20" / "arrays-0" / "manifest.ocdbt").unlink()
    files = {name: file for name, file in found.files.items() if name != "manifest.ocdbt"}
    dataclasses.replace(found, files=files).write(folder / "20")
    said: list[str] = []
    assert Checkpoints(folder, say=said.append).latest() == 10
    assert said == [f"{folder / '20' / 'arrays-0' / 'manifest.ocdbt'} is missing; passed over"]


@pytest.mark.parametrize(
    ("name", "refused"),
    [
        ("d/another", False),  # or the trick does not work, and nothing here tells anything
        ("../secret/", True),
        ("d/../../secret/", True),
        ("/secret/", True),
    ],
)
def test_the_database_leads_nowhere_else(tmp_path: pathlib.Path, name: str, refused: bool) -> None:
    """Tensorstore refuses such names itself; if ever it does not, this says so."""
    base = tmp_path / "base"
    config = {"compression": None, "max_inline_value_bytes": 0}
    options = {"driver": "ocdbt", "base": f"file://{base}/", "config": config}
    tensorstore.KvStore.open(options).result().write("key", b"value" * 9).result()
    (data,) = (base / "d").iterdir()
    old = f"d/{data.name}"
    new = name + "x" * (len(old) - len(name))
    for path, start in ((data, data.read_bytes().index(b"\x0c\xdb")), (base / "manifest.ocdbt", 0)):
        content = path.read_bytes()
        assert old.encode() in content
        body = content[start:-4].replace(old.encode(), new.encode())
        path.write_bytes(content[:start] + body + crc32c.crc32c(body).to_bytes(4, "little"))
    target = pathlib.Path(os.path.normpath(f"{base}/{new}"))  # as a reader would that joins the two
    target.parent.mkdir(parents=True, exist_ok=True)
    os.rename(data, target)
    read = tensorstore.KvStore.open(options).result().read("key")
    if refused:
        with pytest.raises(ValueError, match="Invalid key"):
            read.result()
    else:
        assert read.result().value == b"value" * 9


WATCHED = """
    import os, sys
    import jax
    from jaxtrain.storage.checkpoint import Checkpoints

    def read(folder):
        checkpoints = Checkpoints(folder)
        wanted = {"step": jax.ShapeDtypeStruct((), "int32"), "w": jax.ShapeDtypeStruct((64, 64), "float32")}
        checkpoints.restore_latest(wanted)
        checkpoints.restore_flat(20)

    read(sys.argv[1])  # imports and compiles what it needs
    seen = []
    sys.addaudithook(lambda event, arguments: seen.append((event, arguments)))
    read(sys.argv[2])
    code = {"exec", "compile", "import", "marshal.loads", "pickle.find_class", "os.system", "subprocess.Popen"}
    print(*sorted({event for event, _ in seen} & code), sep="\\n")
    opened = [os.path.abspath(a[0]) for e, a in seen if e == "open" and isinstance(a[0], str)]
    print(*{path for path in opened if not path.startswith((sys.argv[2], "/proc", "/sys"))}, sep="\\n")
    assert len(opened) > 5
"""


def test_reading_runs_no_code_and_opens_no_other_file(folder: pathlib.Path) -> None:
    """As Python's own audit sees it: no pickle, no import, nothing executed, no file elsewhere."""
    other = shutil.copytree(folder, folder.parent / "other")
    process = run_python(WATCHED, folder, other)
    output, errors = process.communicate(timeout=60)
    assert process.returncode == 0, errors
    assert output.split() == []


@pytest.mark.parametrize(
    "change",
    [{"leaves": []}, {"leaves": {"w": {}}}, {"files": None}, {"files": {"d": 3}}, {"more": 1}, {"arrays": 5}],
    ids=str,
)
def test_a_manifest_of_another_make_is_damage(folder: pathlib.Path, change: dict[str, Any]) -> None:
    path = folder / "20" / MANIFEST
    content = {**json.loads(path.read_text()), **change}
    del content["format"], content["crc32c"]
    total = manifest._sum_of_body(2, content)
    path.write_text(json.dumps({"format": 2, "crc32c": total, **content}))
    said: list[str] = []
    assert Checkpoints(folder, say=said.append).latest() == 10
    assert len(said) == 1 and "is not a whole manifest" in said[0]


def test_nothing_there_is_none(tmp_path: pathlib.Path) -> None:
    checkpoints = Checkpoints(tmp_path / "nowhere")
    assert checkpoints.restore_latest({}) is None
    assert checkpoints.latest() is None and checkpoints.best() is None and checkpoints.steps() == []


def test_a_damaged_step_is_written_anew_by_the_run_that_reaches_it(folder: pathlib.Path) -> None:
    halve(largest(folder / "20"))
    with Checkpoints(folder, say=lambda text: None) as checkpoints:
        assert checkpoints.latest() == 10
        checkpoints.save(20, small(20))
        assert checkpoints.latest() == 20
    assert [path.name for path in (folder / "20").glob("arrays-*")] == ["arrays-1"]


# What stays


@pytest.mark.parametrize(
    "keep, every, best, expected",
    [
        (1, 0, [], [60]),
        (2, 0, [], [50, 60]),
        (9, 0, [], [10, 20, 30, 40, 50, 60]),
        (2, 0, [10], [10, 50, 60]),
        (2, 0, [10, 30], [30, 50, 60]),
        (1, 0, [60], [60]),
        (1, 20, [], [20, 40, 60]),
        (1, 30, [20], [20, 30, 60]),
    ],
)
def test_retention(tmp_path: pathlib.Path, keep: int, every: int, best: list[int], expected: list[int]) -> None:
    keep_every = (lambda step: step % every == 0) if every else None
    with Checkpoints(tmp_path, keep=keep, keep_every=keep_every) as checkpoints:
        for step in range(10, 70, 10):
            checkpoints.save(step, small(step), best=step in best)
        assert checkpoints.steps() == expected
        assert checkpoints.latest() == 60
        assert checkpoints.best() == (max(best) if best else None)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(map(str, expected))


def test_a_damaged_best_is_passed_over(tmp_path: pathlib.Path) -> None:
    with Checkpoints(tmp_path, keep=5, say=lambda text: None) as checkpoints:
        for step in (1, 2, 3):
            checkpoints.save(step, small(step), best=step < 3)
        checkpoints.wait()
        halve(largest(tmp_path / "2"))
        assert checkpoints.best() == 1


def test_the_old_one_goes_only_when_the_new_one_counts(tmp_path: pathlib.Path) -> None:
    seen: list[list[str]] = []
    with Checkpoints(tmp_path, keep=1) as checkpoints:
        for step in (1, 2):
            checkpoints.save(
                step,
                small(step),
                before_commit=lambda: seen.append(sorted(p.name for p in tmp_path.iterdir())),
            )
    assert seen == [[".writing"], [".writing", "1"]]
    assert [path.name for path in tmp_path.iterdir()] == ["2"]


def test_an_older_step_saved_later_is_there_too(tmp_path: pathlib.Path) -> None:
    save_all(tmp_path, 10, 40)
    with Checkpoints(tmp_path, keep=1) as checkpoints:
        for step in (5, 20):
            checkpoints.save(step, small(step))
            assert as_bytes(checkpoints.restore(step, abstract(small(step)))) == as_bytes(small(step))
        assert checkpoints.steps() == [20, 40]


def test_a_step_saved_again_is_replaced(tmp_path: pathlib.Path) -> None:
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(10, small(10), meta={"try": 1}, best=True)
        checkpoints.save(10, small(11), meta={"try": 2})
        assert as_bytes(checkpoints.restore(10, abstract(small(0)))) == as_bytes(small(11))
        assert checkpoints.meta(10) == {"try": 2} and checkpoints.best() is None
    assert sorted(path.name for path in (tmp_path / "10").iterdir()) == ["arrays-1", MANIFEST]


# When a save fails


def disk_full(*_: Any, **__: Any) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def in_the_background(patch: pytest.MonkeyPatch) -> None:
    wait = checkpoint.ocp.AsyncCheckpointer.wait_until_finished

    def fail(self: Any) -> None:
        wait(self)
        if threading.current_thread() is not threading.main_thread():
            disk_full()

    patch.setattr(checkpoint.ocp.AsyncCheckpointer, "wait_until_finished", fail)


def in_its_metadata(patch: pytest.MonkeyPatch) -> None:
    """Written twice a save, by a thread that all writers of the process share: there are two failures."""
    local = type(epath.Path())
    write = local.write_text

    def fail(self: Any, *arguments: Any, **options: Any) -> Any:
        return disk_full() if self.name == "_CHECKPOINT_METADATA" else write(self, *arguments, **options)

    patch.setattr(local, "write_text", fail)


FAULTS: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "orbax": in_the_background,
    "metadata": in_its_metadata,
    "flush": lambda patch: patch.setattr(checkpoint, "sync_all", disk_full),
    "checksums": lambda patch: patch.setattr(checkpoint, "checksums", disk_full),
    "arrays move": lambda patch: patch.setattr(os, "rename", disk_full),
    "manifest move": lambda patch: patch.setattr(os, "replace", disk_full),
}


@pytest.mark.parametrize(
    "fault, raised_by, step",
    [(fault, "wait", step) for fault in FAULTS for step in (20, 30)]
    + [("checksums", method, 30) for method in ("save", "close", "latest", "steps")],
)
def test_a_failed_save_is_raised_and_costs_nothing(folder: pathlib.Path, fault: str, raised_by: str, step: int) -> None:
    checkpoints = Checkpoints(folder)
    with pytest.MonkeyPatch.context() as patch:
        FAULTS[fault](patch)
        checkpoints.save(step, small(99))
        for thread in threading.enumerate():  # the fault stays until the background has met it
            if thread.name == f"checkpoint-{step}":
                thread.join()
    arguments = (40, small(40)) if raised_by == "save" else ()
    with pytest.raises(StorageError, match=f"{folder / str(step)} was not written: No space left") as caught:
        getattr(checkpoints, raised_by)(*arguments)
    assert "\n" not in str(caught.value)
    assert not list(folder.glob(".*")), "the space was not given back"
    assert checkpoints.latest() == 20
    assert as_bytes(checkpoints.restore(20, abstract(small(20)))) == as_bytes(small(20))
    checkpoints.save(step, small(step))
    assert as_bytes(checkpoints.restore(step, abstract(small(0)))) == as_bytes(small(step))
    checkpoints.close()


def test_check_raises_once_and_does_not_wait(tmp_path: pathlib.Path) -> None:
    go = threading.Event()

    def fail() -> None:
        go.wait(10)
        raise OSError(errno.EIO, "Input/output error")

    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, small(1), before_commit=fail)
    checkpoints.check()
    go.set()
    with pytest.raises(StorageError, match="Input/output error"):
        checkpoints.wait()
    checkpoints.check()
    assert checkpoints.steps() == [] and list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_made_is_named(tmp_path: pathlib.Path) -> None:
    (tmp_path / "run").write_text("a file in the way")
    with pytest.raises(StorageError, match=f"{tmp_path}/run/checkpoints/1 was not written: Not a directory"):
        Checkpoints(tmp_path / "run" / "checkpoints").save(1, small(1))


def test_a_read_only_disk_is_named(folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: pathlib.Path, *_: Any, **__: Any) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(self))

    monkeypatch.setattr(pathlib.Path, "mkdir", refuse)
    checkpoints = Checkpoints(folder)
    with pytest.raises(StorageError, match=f"{folder / '30'} was not written: Read-only file system"):
        checkpoints.save(30, small(30))
    assert checkpoints.latest() == 20


def test_a_vanished_folder_is_not_made_again(folder: pathlib.Path) -> None:
    checkpoints = Checkpoints(folder)
    checkpoints.save(30, small(30))
    checkpoints.wait()
    shutil.rmtree(folder)
    with pytest.raises(StorageError, match=f"{folder / '40'} was not written: No such file or directory"):
        checkpoints.save(40, small(40))
    assert not folder.exists()


@pytest.mark.parametrize("lost", ["checkpoints", ""], ids=["folder", "workdir"])
def test_a_folder_that_vanished_before_the_first_save_is_not_made_again(folder: pathlib.Path, lost: str) -> None:
    checkpoints = Checkpoints(folder if lost else folder / "new")
    os.rename(folder, folder.parent / "away")
    with pytest.raises(StorageError, match="was not written: No such file or directory"):
        checkpoints.save(30, small(30))
    assert not folder.exists()


@pytest.mark.parametrize("put_back", [False, True], ids=["gone", "another in its place"])
def test_a_folder_that_vanishes_in_mid_save_is_named(folder: pathlib.Path, put_back: bool) -> None:
    """Orbax makes the folders that it lacks: what it leaves there is no checkpoint, and the others are not there."""
    away = folder.parent / "away"

    def vanish() -> None:
        os.rename(folder, away)
        if put_back:
            shutil.copytree(away, folder)

    checkpoints = Checkpoints(folder)
    checkpoints.save(30, small(30), before_commit=vanish)
    with pytest.raises(StorageError, match=f"{folder / '30'} was not written: the folder has vanished"):
        checkpoints.wait()
    assert not (folder / "30").exists() and Checkpoints(away).latest() == 20
    assert not put_back or checkpoints.latest() == 20


def test_an_unreadable_file_is_passed_over(folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(manifest, "_sum_of_chunk", fail)
    said: list[str] = []
    assert Checkpoints(folder, say=said.append).latest() is None
    assert len(said) == 2 and all("cannot be read" in line for line in said)


@pytest.mark.parametrize("ends", [sys.exit, lambda: None], ids=["sys.exit(0)", "end of block"])
def test_leaving_well_raises_the_failure(tmp_path: pathlib.Path, ends: Callable[[], None]) -> None:
    with pytest.raises(StorageError, match="No space left"), Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, small(1), before_commit=disk_full)
        ends()


def test_leaving_by_an_error_keeps_that_error_and_says_the_failure(tmp_path: pathlib.Path) -> None:
    said: list[str] = []
    with pytest.raises(RuntimeError, match="loss"), Checkpoints(tmp_path, say=said.append) as checkpoints:
        checkpoints.save(1, small(1), before_commit=disk_full)
        raise RuntimeError("loss")
    assert len(said) == 1 and "No space left" in said[0]


def test_the_log_is_quiet(tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO), Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, small(1))
        checkpoints.restore(1, abstract(small(1)))
        checkpoints.restore_flat(1)
    assert caplog.text == ""


# Processes that end badly

WRITER = """
    import os, resource, sys
    import jax.numpy as jnp
    from jaxtrain.storage.checkpoint import Checkpoints

    folder, how = sys.argv[1:]
    tree = lambda step: {"w": jnp.full((1024, 1024), step, jnp.float32), "step": jnp.int32(step)}
    with Checkpoints(folder) as checkpoints:
        checkpoints.save(1, tree(1))
        checkpoints.wait()
        if how == "limit":
            resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, 2**20))
        checkpoints.save(2, tree(2))
        if how == "vanish":
            os.rename(folder, folder + "-away")
        if how == "raise":
            raise RuntimeError("boom")
        step = 2
        while how == "forever":
            step += 1
            checkpoints.save(step, tree(step))
            print(step, flush=True)
"""


@pytest.mark.parametrize(
    "how, code, steps, message",
    [
        ("exit", 0, [1, 2], ""),
        ("raise", 1, [1, 2], "RuntimeError: boom"),
        ("limit", 1, [1], "2 was not written: File too large"),
        ("vanish", 1, [1], "2 was not written: the folder has vanished"),
    ],
)
def test_a_process_ends_with_its_save_on_disk_or_says_so(
    tmp_path: pathlib.Path, how: str, code: int, steps: list[int], message: str
) -> None:
    folder = tmp_path / "checkpoints"
    process = run_python(WRITER, folder, how)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == code and message in errors
    with Checkpoints(tmp_path / "checkpoints-away" if how == "vanish" else folder) as checkpoints:
        assert checkpoints.steps() == steps and checkpoints.latest() == steps[-1]
        assert checkpoints.restore_flat(steps[-1], "step")["step"] == steps[-1]


@pytest.mark.slow
def test_killed_in_mid_save_the_newest_good_one_loads(tmp_path: pathlib.Path) -> None:
    chance = random.Random(0)
    seen = 0
    for _ in range(5):
        process = run_python(WRITER, tmp_path, "forever")
        assert process.stdout is not None
        for _ in range(chance.randrange(1, 6)):
            started = int(process.stdout.readline())
        time.sleep(chance.random() * 0.1)
        process.send_signal(signal.SIGKILL)
        process.communicate()
        said: list[str] = []
        checkpoints = Checkpoints(tmp_path, say=said.append)
        latest = checkpoints.latest()
        assert latest is not None and latest >= started - 1 and said == []
        assert np.unique(checkpoints.restore_flat(latest, "w")["w"]).tolist() == [latest]
        seen += (tmp_path / ".writing").exists()
        shutil.rmtree(tmp_path / str(latest))
    assert seen, "no kill met a save under way"


DISKS = """
    import subprocess, sys
    import jax.numpy as jnp
    from jaxtrain.storage.checkpoint import Checkpoints
    from jaxtrain.errors import StorageError

    def mount(*arguments):
        subprocess.run(["mount", *arguments, sys.argv[1]], check=True)

    def refused(step):
        try:
            checkpoints.save(step, tree(step))
            checkpoints.wait()
        except StorageError as error:
            print(error)
        assert checkpoints.latest() == step - 1
        assert (checkpoints.restore_flat(step - 1, "w")["w"] == step - 1).all()

    tree = lambda step: {"w": jnp.full((1024, 1024), step, jnp.float32)}
    mount("-t", "tmpfs", "-o", "size=11m", "none")
    with Checkpoints(sys.argv[1] + "/checkpoints", keep=9) as checkpoints:
        for step in (1, 2):
            checkpoints.save(step, tree(step))
        refused(3)
        mount("-o", "remount,size=64m")
        checkpoints.save(3, tree(3))
        checkpoints.wait()
        mount("-o", "remount,ro")
        refused(4)
"""


def test_a_full_disk_and_a_read_only_one_are_named_and_cost_nothing(tmp_path: pathlib.Path, own_disks: Any) -> None:
    """Report 40, on real disks."""
    process = run_python(DISKS, tmp_path, under=own_disks)
    output, errors = process.communicate(timeout=60)
    assert process.returncode == 0, errors
    full, read_only = output.splitlines()
    assert full == f"checkpoint {tmp_path}/checkpoints/3 was not written: No space left on device"
    assert read_only.startswith(f"checkpoint {tmp_path}/checkpoints/4 was not written: Read-only file system")


PROCESS = """
    import sys
    import jax, jax.numpy as jnp, numpy as np
    from jaxtrain.storage.checkpoint import Checkpoints

    rank, port, folder = int(sys.argv[1]), sys.argv[2], sys.argv[3]
    jax.distributed.initialize(f"localhost:{port}", num_processes=2, process_id=rank)
    mesh = jax.make_mesh((4,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    split, whole = jax.NamedSharding(mesh, jax.P("data")), jax.NamedSharding(mesh, jax.P())
    data = np.arange(32, dtype=np.float32).reshape(8, 4)
    tree = {
        "w": jax.make_array_from_callback((8, 4), split, lambda index: data[index]),
        "step": jax.make_array_from_callback((), whole, lambda index: np.int32(2)),
    }
    wanted = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), tree)
    with Checkpoints(folder, keep=1) as checkpoints:
        for step in (1, 2, 2):
            checkpoints.save(step, tree)
        checkpoints.wait()
        assert checkpoints.latest() == 2
        restored = checkpoints.restore(2, wanted)
        for shard in restored["w"].addressable_shards:
            assert (np.asarray(shard.data) == data[shard.index]).all()
"""


@pytest.mark.slow
def test_two_processes_write_one_checkpoint(tmp_path: pathlib.Path) -> None:
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    processes = [run_python(PROCESS, rank, port, tmp_path, devices=2) for rank in range(2)]
    for process in processes:
        _, errors = process.communicate(timeout=120)
        assert process.returncode == 0, errors
    checkpoints = Checkpoints(tmp_path)
    assert checkpoints.latest() == 2 and checkpoints.steps() == [2]
    expected = np.arange(32, dtype=np.float32).reshape(8, 4)
    np.testing.assert_array_equal(checkpoints.restore_flat(2)["w"], expected)
