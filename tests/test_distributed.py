"""Several processes are one run: how they join, what each of them does, and that what ends one ends all.

The processes are real, on the CPU, and killed when their time is over.
"""

import json
import re
import signal
import time
from types import SimpleNamespace

import jax
import numpy as np
import processes
import pytest
import tiny
from processes import by_hand, environment

from jaxtrain import train
from jaxtrain.errors import UserError
from jaxtrain.machine import cluster, devices, distributed
from jaxtrain.machine.cluster import Place
from jaxtrain.result import load
from jaxtrain.storage import checkpoint, workdir

SLURM_TASK = {
    "SLURM_JOB_ID": "4711",
    "SLURM_STEP_NODELIST": "node[007-008]",
    "SLURM_NTASKS": "2",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_PROCID": "1",
    "SLURM_LOCALID": "0",
}
ON_ONE_NODE = SLURM_TASK | {"SLURM_STEP_NUM_NODES": "1", "SLURM_LOCALID": "1"}
OPEN_MPI = {
    "OMPI_MCA_orte_hnp_uri": "1531576320.0;tcp://10.96.0.1,10.148.0.1:34911",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
}


def find(monkeypatch, environ, say=lambda text: None, platform=""):
    for name in [name for name in environment(1) if name.startswith(("CUDA_VISIBLE", "TPU_", "MEGASCALE_"))]:
        monkeypatch.delenv(name)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    return cluster.find(environ, say, 5.0, platform)


@pytest.mark.parametrize(
    ("environ", "place"),
    [
        ({}, None),
        ({"KUBERNETES_SERVICE_HOST": "10.0.0.1"}, None),
        (by_hand("10.0.0.1:1234", 2, 1), Place("JAX_NUM_PROCESSES", 2, 1, "10.0.0.1:1234")),
        (by_hand("[fe80::1]:1234", 16, 0), Place("JAX_NUM_PROCESSES", 16, 0, "[fe80::1]:1234")),
        ({"JAX_NUM_PROCESSES": "1"}, None),
        (SLURM_TASK, Place("SLURM", 2, 1, "node007:62055")),
        (SLURM_TASK | {"JAX_COORDINATOR_ADDRESS": "a:1"}, Place("SLURM", 2, 1, "a:1")),
        (SLURM_TASK | {"JAX_COORDINATOR_PORT": "99"}, Place("SLURM", 2, 1, "node007:99")),
        (SLURM_TASK | by_hand("a:1", 3, 2), Place("JAX_NUM_PROCESSES", 3, 2, "a:1")),
        (ON_ONE_NODE, Place("SLURM", 2, 1, "node007:62055", devices=(1,))),
        (ON_ONE_NODE | {"CUDA_VISIBLE_DEVICES": "3"}, Place("SLURM", 2, 1, "node007:62055")),
        (OPEN_MPI, Place("Open MPI", 4, 3, "10.96.0.1:62624", devices=(1,))),
        (OPEN_MPI | {"OMPI_COMM_WORLD_LOCAL_SIZE": "1"}, Place("Open MPI", 4, 3, "10.96.0.1:62624")),
        (OPEN_MPI | {"OMPI_COMM_WORLD_SIZE": "1", "OMPI_COMM_WORLD_RANK": "0"}, None),
    ],
)
def test_the_cluster_says_where_a_process_stands(environ, place, monkeypatch):
    """Report 47: what is whole is taken; a host with one process keeps all its GPUs."""
    lines = []
    assert find(monkeypatch, environ, lines.append) == place and lines == []


@pytest.mark.parametrize(
    ("environ", "says"),
    [
        ({"SLURM_JOB_ID": "1"}, None),
        (SLURM_TASK | {"SLURM_NTASKS": "1", "SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"}, None),
        # A batch script, and the shell of an `salloc`, in an allocation of two tasks.
        ({"SLURM_JOB_ID": "1", "SLURM_NTASKS": "2", "SLURM_PROCID": "0"}, "2 tasks.*SLURM_STEP_NODELIST.*srun"),
        (SLURM_TASK | {"SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"}, "2 tasks, but this step has one.*srun"),
        *(
            ({key: value for key, value in SLURM_TASK.items() if key != name}, f"2 tasks, but {name} missing")
            for name in ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_STEP_NODELIST")
        ),
        ({"KUBERNETES_SERVICE_HOST": "h", "JOB_COMPLETION_INDEX": "0"}, r"single process; pip install 'jax\[k8s\]'"),
    ],
)
def test_a_half_set_environment_is_a_single_process_and_says_why(environ, says, monkeypatch):
    """Report 47: none of these waits for anybody."""
    lines = []
    assert find(monkeypatch, environ, lines.append) is None
    assert len(lines) == (says is not None)
    if says is not None:
        assert re.search(says, lines[0]) and "\n" not in lines[0]


@pytest.mark.parametrize(
    ("environ", "named"),
    [
        ({"JAX_COORDINATOR_ADDRESS": "a:1"}, "neither JAX_NUM_PROCESSES nor JAX_PROCESS_ID"),
        ({"JAX_NUM_PROCESSES": "2"}, "JAX_COORDINATOR_ADDRESS and JAX_PROCESS_ID missing"),
        (by_hand("a:1", 2, 2), "JAX_PROCESS_ID is 2 and JAX_NUM_PROCESSES is 2"),
        (by_hand("a:1", 2, -1), "JAX_PROCESS_ID is -1"),
        (by_hand("a", 2, 1), "'a', expected HOST:PORT"),
        (by_hand("a:1", 2, 1) | {"JAX_NUM_PROCESSES": "two"}, "'two', expected an integer"),
        (SLURM_TASK | {"SLURM_PROCID": ""}, "SLURM_PROCID is '', expected an integer"),
        ({name: OPEN_MPI[name] for name in OPEN_MPI if "uri" not in name}, "Open MPI shows several processes, but not"),
    ],
)
def test_a_contradictory_environment_is_refused(environ, named, monkeypatch):
    with pytest.raises(UserError, match=named) as caught:
        find(monkeypatch, environ)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("environ", "processes"),
    [
        ({"TPU_WORKER_HOSTNAMES": "a,b", "TPU_WORKER_ID": "1"}, 2),
        ({"TPU_WORKER_HOSTNAMES": "localhost", "TPU_WORKER_ID": "0"}, 1),
        ({"TPU_SKIP_MDS_QUERY": "1"}, 1),
        ({}, 1),  # asks the metadata server, and there is none: a hosted notebook
    ],
)
def test_hosts_of_a_tpu(environ, processes, monkeypatch):
    """Only what can be seen without one: whether JAX is asked at all, and that its failure is no end."""
    from jax._src import cloud_tpu_init

    asked = []

    def detected(place, seconds):
        asked.append(place)
        if not environ:
            raise OSError("no metadata server")
        return Place("Cloud TPU", 2, 1, "a:8482")

    monkeypatch.setattr(cloud_tpu_init, "running_in_cloud_tpu_vm", True)
    monkeypatch.setattr(cluster, "_detected", detected)
    lines = []
    found = find(monkeypatch, environ, lines.append)
    assert (1 if found is None else found.processes) == processes
    assert len(asked) == (processes > 1 or not environ) and len(lines) == (not environ)
    assert find(monkeypatch, environ, platform="cpu") is None


def test_alone_nothing_is_joined_and_everything_answers(monkeypatch):
    for name in [name for name in environment(1) if name.startswith(processes.CLUSTERS)]:
        monkeypatch.delenv(name, raising=False)
    distributed.join(tiny.config())
    assert (distributed.processes(), distributed.number(), distributed.is_first()) == (1, 0, True)
    value = object()
    assert distributed.from_first(value) is value and distributed.label() == ""
    with distributed.one_end() as ending, pytest.raises(ValueError):
        assert not ending._thread.is_alive()
        raise ValueError


def test_off_joins_nobody(monkeypatch):
    for name, value in by_hand("127.0.0.1:1", 2, 1).items():
        monkeypatch.setenv(name, value)
    distributed.join(tiny.config(distributed="off"))
    jax.devices()
    with pytest.raises(UserError, match="JAX has started as one; run python -m jaxtrain.main"):
        distributed.join(tiny.config())


@pytest.mark.parametrize(("wanted", "ids"), [("all", [0, 1, 8, 9]), (1, [0, 8]), (2, [0, 1, 8, 9])])
def test_a_number_of_devices_is_that_of_each_process(wanted, ids, monkeypatch):
    monkeypatch.setattr(distributed, "processes", lambda: 2)
    found = [SimpleNamespace(id=each, process_index=each // 8, platform="cpu") for each in (0, 1, 8, 9)]
    assert [device.id for device in devices._of_each_process(wanted, found)] == ids
    for refused in (3, (0, 1)):
        with pytest.raises(UserError, match=r"config\.devices"):
            devices._of_each_process(refused, found)


def test_a_workdir_that_hosts_do_not_share_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(workdir, "SHOWS_UP", 0.2)
    monkeypatch.setattr(distributed, "processes", lambda: 2)
    monkeypatch.setattr(distributed, "from_first", lambda value: value)
    (tmp_path / "config.json").write_text("{}")
    workdir.refuse_unshared(tmp_path)
    monkeypatch.setattr(distributed, "from_first", lambda value: "another digest")
    with pytest.raises(UserError, match=f"does not see {tmp_path}/config.json"):
        workdir.refuse_unshared(tmp_path)


DIGITS = ["-m", "jaxtrain.main", "--config=configs/digits.py:smoke", "--config.total=150st"]


def lines(folder, step=None):
    """metrics.jsonl without clocks: (step, names) → values."""
    found = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    kept = [{k: v for k, v in line.items() if not k.startswith(("time/", "memory/"))} for line in found]
    return {(line["step"], *sorted(line)): line for line in kept}


def digits(folder, count=2, **options):
    command = [*DIGITS, f"--workdir={folder}", "--config.eval_every=50st"]
    return processes.started(*[command] * count, devices=2 // count, **options)


@pytest.mark.slow
def test_two_processes_are_one_run(tmp_path):
    """Reports 47 and 37: logged, the numbers of one process, and a SIGTERM to one ends both after the same step."""
    with digits(tmp_path / "two") as children:
        first, second = processes.ends(children, 150)
    assert (first.code, second.code) == (0, 0), first.err + second.err
    assert "2 processes" in first.out and "2 processes" in (tmp_path / "two" / "log.txt").read_text()
    assert second.out == second.err == ""
    (start,) = json.loads((tmp_path / "two" / "environment.json").read_text())["starts"]
    assert start["processes"] == 2 and start["devices"] == "2 × cpu"

    with digits(tmp_path / "one", 1, environments=[{}]) as children:
        assert processes.ends(children, 100)[0].code == 0
    one, two = lines(tmp_path / "one"), lines(tmp_path / "two")
    assert one.keys() == two.keys() and len(one) > 15
    for key, line in one.items():
        rounding = 1e-5 if line["step"] <= 40 else 1e-3  # it grows, as the sums over the batch are grouped otherwise
        assert two[key] == pytest.approx(line, rel=rounding, abs=rounding), key

    stop_and_resume(tmp_path / "stopped", tmp_path / "two")


def stop_and_resume(folder, through):
    with digits(folder) as children:
        until = time.monotonic() + 60
        while not (folder / "metrics.jsonl").exists() and time.monotonic() < until:
            time.sleep(0.1)
        children[1].send_signal(signal.SIGTERM)
        began = time.monotonic()
        ended = processes.ends(children, 60)
        assert time.monotonic() - began < 20
    assert [each.code for each in ended] == [143, 143], ended
    step = checkpoint.Checkpoints(folder / "checkpoints").latest()
    assert 0 < step < 150 and f"stopped at step {step} of 150" in ended[0].out
    with digits(folder) as children:
        again = processes.ends(children, 100)
    assert [each.code for each in again] == [0, 0] and f"resumed at step {step}" in again[0].out
    assert tiny.same(load(folder).state, load(through).state)
    expected, found = lines(through), lines(folder)
    for key in [key for key in expected if "eval/loss" in key or "test/loss" in key]:
        assert found[key] == expected[key]


def peer(scenario, folder, count=2, seconds=90, **options):
    return processes.run(*[["tests/peer.py", scenario, str(folder)]] * count, seconds=seconds, **options)


@pytest.mark.slow
def test_loops_of_steps_are_the_same_in_two_processes(tmp_path):
    """Bit-equal where the data comes from the hosts and where it is resident, and the numbers of one process."""
    two, other = (each.result for each in peer("looped", tmp_path))
    assert two == other and two[0] == two[1]
    (one,) = (each.result for each in peer("looped", tmp_path, count=1, environments=[{}]))
    assert two[0][0] == pytest.approx(one[0][0], rel=1e-5)


@pytest.mark.slow
def test_evaluation_clocks_and_faults_are_the_same_in_both(tmp_path):
    """Report 42: nine examples on two processes are counted as nine, in time. Then clocks that differ; then a NaN."""
    first, second = peer("several", tmp_path)
    assert (first.code, second.code) == (3, 3) and first.result == second.result
    evaluated, clocks, fault = first.result
    assert evaluated["processes"] == 2 and evaluated["rows"] == 21
    assert evaluated["metrics"]["eval_own/process"] == 0  # what process 0 found counts

    config = tiny.config(total="3st", eval_batch_size=8, eval_every="3st")
    alone = train.run(config, data=tiny.data(validation=9))
    for name, value in alone.metrics.items():
        assert evaluated["metrics"][name] == pytest.approx(value, abs=1e-5)
    assert (
        evaluated["predicted"]
        == alone.predict(tiny.data().open()["test"].get(np.arange(21))["image"])["label"].tolist()
    )

    assert clocks["code"] == 0 and clocks["saved"][-1] == clocks["step"] > 0 and len(clocks["saved"]) > 1
    assert "not finite at step" in fault and "process 1: " in second.err and "process" not in first.err
    (report,) = (tmp_path / "diverged" / "nonfinite").glob("*/report.json")
    assert len(json.loads(report.read_text())["examples"]) == 16


@pytest.mark.slow
@pytest.mark.parametrize(
    ("scenario", "reason"),
    [
        ("broken", "example 7 cannot be decoded"),
        ("another", "this process was given another run than process 0: batch_size 16 → 32"),
    ],
)
def test_an_error_in_one_process_ends_both_with_its_exit_code(scenario, reason, tmp_path):
    began = time.monotonic()
    first, second = peer(scenario, tmp_path)
    assert time.monotonic() - began < 60 and (first.code, second.code) == (2, 2)
    assert f"process 1 failed, and with it the run: {reason}" in first.err
    assert f"jaxtrain: process 1: {reason}" in second.err
    assert "Traceback" not in first.err + second.err


@pytest.mark.slow
@pytest.mark.parametrize(
    ("scenario", "code", "said"),
    [("stuck", 143, "process 1 failed, and with it the run: ended: SIGTERM"), ("hanging", 4, "the run hangs and ends")],
)
def test_what_ends_one_process_from_outside_ends_both(scenario, code, said, tmp_path):
    first, second = peer(scenario, tmp_path)
    assert (first.code, second.code) == (code, code), first.err + second.err
    assert said in first.err


@pytest.mark.slow
@pytest.mark.parametrize(("scenario", "left"), [("dies", 0), ("first_dies", 1)])
def test_a_process_that_dies_is_missed(scenario, left, tmp_path):
    """JAX aborts the other one from C++, with a stack; the last line and the exit code are ours."""
    ended = peer(scenario, tmp_path)
    assert ended[left].code == 4 and ended[1 - left].code == -signal.SIGKILL
    assert "start all processes again with the same command" in ended[left].err.splitlines()[-1]


@pytest.mark.slow
@pytest.mark.parametrize("number", [0, 1])
def test_who_does_not_find_the_others_ends_in_time(number, tmp_path):
    """Report 47: a dead coordinator, and one that nobody comes to."""
    address = processes.free_address()
    (ended,) = peer("alone", tmp_path, count=1, environments=[by_hand(address, 2, number)])
    assert ended.code == 4
    last = ended.err.splitlines()[-1]
    assert address in last and "waited 2 s" in last and "check that all 2 were started" in last
    if number == 1:
        assert float(ended.out) < 4 and len(ended.err.splitlines()) == 1


@pytest.mark.slow
def test_a_backend_that_is_up_is_refused_with_what_to_run(tmp_path):
    for ended in peer("late", tmp_path):
        assert ended.code == 2 and "run python -m jaxtrain.main" in ended.err


@pytest.mark.slow
def test_a_shell_in_an_allocation_trains_alone(tmp_path):
    """Report 47: a half-set environment, from start to end."""
    half = {"SLURM_JOB_ID": "1", "SLURM_NTASKS": "2"}
    with digits(tmp_path, 1, environments=[half]) as children:
        (ended,) = processes.ends(children, 100)
    assert ended.code == 0 and "a SLURM job of 2 tasks, but" in ended.out and "processes" not in ended.out
