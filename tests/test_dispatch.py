"""Resident data and fused steps: the same batches, the same bits in any grouping, cut where something is due."""

import dataclasses
import itertools
import json
import os
import subprocess
import sys
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
import tiny_tfds
from conftest import REPOSITORY
from tiny import same

from jaxtrain import dispatch, flops, train
from jaxtrain.data import damage, resident, sources
from jaxtrain.errors import NonFiniteError, UserError
from jaxtrain.loop.intake import batch_of, open_intake
from jaxtrain.machine import hardware

NET = dict(model=dict(name="nets:Dropout"), ema=0.9, augment=(dict(name="flip"), dict(name="crop", padding=1)))


def config(steps=1, place="no", **changes):
    """`steps` a dispatch, the data resident ("yes") or streamed ("no")."""
    found = tiny.config(**{**NET, "steps_per_dispatch": steps} | changes)
    found.data.resident = place
    return found


def told(result):
    """The history, but for clocks and memory."""
    return [{k: v for k, v in row.items() if not k.startswith(("time/", "memory/"))} for row in result.history]


@pytest.mark.parametrize("devices", [1, 8])
@pytest.mark.parametrize("steps", [1, 3])
def test_batches_are_equal_to_the_bit_wherever_they_come_from(devices, steps):
    """Also where a batch straddles epochs: 64 examples in batches of 24, from the third step on."""
    ways = [config(steps, place, batch_size=24, devices=devices) for place in ("no", "yes")]
    jobs = [train.build(way, data=tiny.data()) for way in ways]
    with jobs[0].batches(2, 11) as feed:
        expected = [jax.device_get(batch) for batch in feed]
    for job in jobs:
        find, found = jax.jit(batch_of(job)), []
        with open_intake(job, 2) as intake:
            while len(found) < 9:
                data, count = intake.take(9 - len(found))
                assert 1 <= count <= steps
                found += [find(data, jnp.int32(2 + len(found) + each)) for each in range(count)]
        for batch, wanted in zip(found, expected, strict=True):
            assert batch.keys() == wanted.keys()
            assert all(batch[name].dtype == each.dtype for name, each in wanted.items())
            assert all(np.array_equal(batch[name], each) for name, each in wanted.items())
            assert len({str(shard.index) for shard in batch["id"].addressable_shards}) == devices


@pytest.fixture(scope="module")
def looped():
    """What a loop makes of the run: three steps a dispatch, streamed."""
    return train.run(config(3), data=tiny.data())


@pytest.mark.parametrize(("steps", "place"), [(3, "yes"), (32, "no"), (32, "yes")])
def test_any_grouping_gives_the_same_bits(steps, place, looped):
    found = train.run(config(steps, place), data=tiny.data())
    assert same(found.state, looped.state) and told(found) == told(looped)


def test_a_program_of_one_step_gives_the_same_bits_wherever_its_data_lies():
    found = [train.run(config(1, place), data=tiny.data()) for place in ("no", "yes")]
    assert same(found[0].state, found[1].state) and told(found[0]) == told(found[1])


def test_what_is_due_cuts_the_dispatches(monkeypatch):
    """Reports at 5, 10, …, evaluations at 8 and 16, checkpoints at 10 and 20, the end at 24."""
    taken, make = [], train.Loop.opened

    def opened(loop):
        intake = make(loop)
        take = intake.take

        def watched(limit):
            taken.append((loop.step, take(limit)[1]))
            return take.__self__._columns, taken[-1][1]

        intake.take = watched
        return intake

    monkeypatch.setattr(train.Loop, "opened", opened)
    train.run(config(32, "yes"), data=tiny.data())
    ends = [step + count for step, count in taken]
    assert ends == [5, 8, 10, 15, 16, 20, 24]


@pytest.mark.parametrize("stops", [(3,), (4, 11), (1, 2, 23)], ids=str)
def test_a_run_stopped_between_dispatches_and_grouped_anew_is_the_same(stops, looped, tmp_path, monkeypatch):
    for stop, steps, place in zip(stops, itertools.cycle((2, 4)), itertools.cycle(("yes", "no"))):
        with monkeypatch.context() as patch:
            patch.setattr(train.Loop, "interrupted", lambda loop, stop=stop: loop.step >= stop)
            stopped = train.run(config(steps, place), tmp_path, data=tiny.data())
        assert stop <= int(stopped.state.step) < stop + steps
    found = train.run(config(32, "yes"), tmp_path, data=tiny.data())
    assert same(found.state, looped.state) and told(found) == told(looped)


@pytest.mark.parametrize(("steps", "place"), [(4, "no"), (4, "yes"), (1, "yes")])
def test_one_program_for_the_whole_run(steps, place, caplog):
    jax.config.update("jax_log_compiles", True)
    try:
        train.run(config(steps, place), data=tiny.data())
    finally:
        jax.config.update("jax_log_compiles", False)
    text = [record.getMessage() for record in caplog.records if "Finished XLA compilation of" in record.getMessage()]
    assert sum("_advance" in line or "_repeat" in line for line in text) == 1, text


@pytest.mark.parametrize(("steps", "place"), [(4, "no"), (32, "yes")])
@pytest.mark.parametrize("answer", ["stop", "rollback"])
def test_a_fault_inside_a_dispatch_is_that_of_its_step(steps, place, answer, tmp_path):
    """Report 16. The 14th batch holds a NaN; a rollback goes to step 10 and leaves four batches out."""
    image = np.random.default_rng(0).random((640, 8, 8, 1), np.float32)
    label = np.arange(640, dtype=np.int32) % 10
    wanted = config(steps, place, on_nonfinite=answer, model=dict(name="nets:Linear"), augment=())

    def data():
        return sources.from_arrays(dict(image=image, label=label), validation=0.1, test=0)

    job = train.build(wanted, data=data())
    bad = job.sources["train"].ids[job.plan(13)[0][5]]
    image[bad, 0, 0, 0] = np.nan
    if answer == "stop":
        with pytest.raises(NonFiniteError, match="not finite at step 14, parameters untouched"):
            train.run(wanted, tmp_path, data=data())
        return
    result = train.run(wanted, tmp_path, data=data())
    assert int(result.state.step) == 24 and int(result.state.offset) == 4


def program(model, batch):
    """The jaxpr of a step."""
    data = sources.from_arrays(
        np.zeros((2 * batch, 8, 8, 1), np.uint8), np.arange(2 * batch) % 10, validation=0, test=0
    )
    return train.build(tiny.config(model=model, batch_size=batch), data=data).traced[0]


@pytest.mark.parametrize(
    ("model", "batch", "cpu", "gpu"),
    [
        (dict(name="mlp", hidden=(16,)), 16, dispatch.LOOP, dispatch.LOOP),
        (dict(name="mlp", hidden=(512, 512)), 256, 1, dispatch.LOOP),  # large enough
        (dict(name="cnn", width=4), 16, 1, dispatch.LOOP),  # convolutions
    ],
)
def test_the_rule_follows_from_program_and_platform(model, batch, cpu, gpu):
    found = program(model, batch)
    assert dispatch.steps_per_dispatch(found, "cpu", 1) == cpu
    assert dispatch.steps_per_dispatch(found, "gpu", 1) == dispatch.steps_per_dispatch(found, "tpu", 1) == gpu


def test_a_large_step_is_dispatched_alone_and_many_devices_make_it_small():
    work = 3 * dispatch.ACCELERATOR_STEP
    size = round((work / 2) ** (1 / 3)) + 1  # of x @ w and its gradient by w

    def step(w, x):
        return jax.grad(lambda w: (x @ w).sum())(w)

    square = jax.ShapeDtypeStruct((size, size), jnp.float32)
    traced = jax.make_jaxpr(step)(square, square).jaxpr
    assert flops.in_jaxpr(traced) > 2 * dispatch.ACCELERATOR_STEP
    assert [dispatch.steps_per_dispatch(traced, "gpu", devices) for devices in (1, 8)] == [1, dispatch.LOOP]


def test_the_choice_is_kept_on_resume_and_another_is_told(tmp_path, capsys):
    train.run(config("auto", total="8st"), tmp_path, data=tiny.data())
    assert json.loads((tmp_path / "config.json").read_text())["steps_per_dispatch"] == dispatch.LOOP
    with mock.patch.object(dispatch, "steps_per_dispatch", lambda *arguments: 1):
        train.run(config("auto", total="16st", terminal="plain"), tmp_path, data=tiny.data())
    said = capsys.readouterr().out
    assert f"steps_per_dispatch {dispatch.LOOP}, as chosen at the first start" in said and "reproduce" not in said
    train.run(config(1, total="24st", terminal="plain"), tmp_path, data=tiny.data())
    assert "program a loop of steps → one step: this run continues, it does not reproduce" in capsys.readouterr().out


class Drawn(sources.ArraySource):
    def varied(self, seed):
        return self


class Bearing(sources.ArraySource):
    damage = damage.Damage(3)


@pytest.mark.parametrize(
    ("source", "total", "memory", "reason"),
    [
        (sources.ArraySource, "24st", 1 << 30, ""),
        (sources.ArraySource, "3st", 1 << 30, "shorter than an epoch"),
        (sources.ArraySource, "24st", 1 << 10, "more than the 0 MiB"),
        (Drawn, "24st", 1 << 30, "drawn anew"),
        (Bearing, "24st", 1 << 30, "max_corrupt"),
    ],
)
def test_a_set_that_is_not_resident_says_why(source, total, memory, reason, monkeypatch):
    monkeypatch.setattr(resident, "memory", lambda: memory)
    found = tiny.data()
    arrays = found.open()["train"]
    columns = {name: arrays.column(name) for name in ("image", "label")}
    data = dataclasses.replace(found, open=lambda: {"train": source(columns)})
    wanted = config(1, "auto", total=total)
    said = train.build(wanted, data=data).streamed_for
    assert reason in said and bool(reason) == bool(said)
    if reason and total == "24st":
        wanted.data.resident = "yes"
        with pytest.raises(UserError, match=f"'yes', but .*{reason}"):
            _ = train.build(wanted, data=data).streamed_for


def test_memory_is_what_the_machine_has_or_its_control_group_grants(tmp_path):
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/meminfo").write_text("MemTotal:       16000 kB\nMemFree:  1 kB\n")
    assert hardware.memory(tmp_path) == 16000 << 10
    (tmp_path / "proc/self/cgroup").write_text("0::/jobs/7\n")
    (tmp_path / "sys/fs/cgroup/jobs/7").mkdir(parents=True)
    (tmp_path / "sys/fs/cgroup/jobs/7/memory.max").write_text("max\n")
    assert hardware.memory(tmp_path) == 16000 << 10
    (tmp_path / "sys/fs/cgroup/jobs/memory.max").write_text("4096\n")
    assert hardware.memory(tmp_path) == 4096
    assert hardware.memory(tmp_path / "nowhere") == 0


def test_evaluations_of_a_resident_run_read_their_data_once(monkeypatch):
    """Also where the first was cut off in the middle."""
    job = train.build(config(1, "yes", eval_batch_size=8), data=tiny.data())
    state, read, get = job.initial(), [], sources.ArraySource.get
    monkeypatch.setattr(sources.ArraySource, "get", lambda source, ids: read.append(len(ids)) or get(source, ids))
    calls = iter(range(100))

    def cut_off():
        if next(calls) == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        job.evaluate("eval", state, cut_off)
    first = job.evaluate("eval", state)
    before = len(read)
    assert job.evaluate("eval", state) == first and len(read) == before > 0
    streamed = train.build(config(1, "no", eval_batch_size=8), data=tiny.data())
    assert streamed.evaluate("eval", state) == first


def test_a_resident_run_imports_no_tensorflow(tmp_path):
    """Pictures in TFRecords, which a stream decodes by tf.data."""
    rows = tiny_tfds.records(40)
    tiny_tfds.write(tmp_path, {"train": [rows[:24]], "test": [rows[24:]]})
    code = (
        "import sys, tiny; from jaxtrain import train; config = tiny.config(total='6st', eval_every='3st');"
        f"config.data = dict(name='tfds', dataset='tiny', dir={str(tmp_path)!r}, resident='auto');"
        "result = train.run(config); assert not result.job.streamed_for, result.job.streamed_for;"
        "print(result.metrics['test/loss'] > 0, 'tensorflow' in sys.modules)"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(REPOSITORY), str(REPOSITORY / "tests")])}
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert found.stdout.split() == ["True", "False"], found.stderr
