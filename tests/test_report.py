"""Reports: every sink gets every line once, also over kills, restarts and full disks."""

import json
import math
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from jaxtrain.errors import StorageError, UserError
from jaxtrain.reporting import sinks
from jaxtrain.reporting.report import Facts, Pace, Report

FACTS = Facts(
    run="digits",
    workdir=None,
    devices="1 × cpu",
    precision="float32",
    data="digits",
    model="cnn",
    steps="100",
)


def a_report(workdir: Path | None, **options: object) -> Report:
    options = {"terminal": "quiet", "total_steps": 100, "steps_per_epoch": 10.0, "batch_size": 8} | options
    return Report(workdir, **options)


def fill(workdir: Path, steps: list[int], **options: object) -> list[dict[str, float]]:
    with a_report(workdir, **options) as report:
        for step in steps:
            report.write(step, {"train/loss": 1 / step, "eval/accuracy": step / 100})
    return report.history


def records(workdir: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]


def events(workdir: Path) -> list[tuple[int, str, float]]:
    """(step, tag, value) of all event files, their frames checked."""
    from tensorboardX.proto.event_pb2 import Event
    from tensorboardX.record_writer import masked_crc32c

    found = []
    for path in sorted(workdir.glob("*tfevents*")):
        data = path.read_bytes()
        while data:
            length = int.from_bytes(data[:8], "little")
            assert masked_crc32c(data[:8]) == int.from_bytes(data[8:12], "little")
            body, data = data[12 : 12 + length], data[12 + length :]
            assert masked_crc32c(body) == int.from_bytes(data[:4], "little")
            event, data = Event.FromString(body), data[4:]
            found += [(event.step, one.tag, one.simple_value) for one in event.summary.value]
    return found


def read_jsonl(workdir: Path, output: str) -> bool:
    return records(workdir)[0]["train/loss"] == 0.5


def read_log(workdir: Path, output: str) -> bool:
    return "step 10/100  epoch 1.00/10  loss 0.5000" in (workdir / "log.txt").read_text()


def read_events(workdir: Path, output: str) -> bool:
    return (10, "train/loss", 0.5) in events(workdir)


def read_terminal(workdir: Path, output: str) -> bool:
    return "step 10/100  epoch 1.00/10  loss 0.5000" in output


@pytest.mark.parametrize("arrived", [read_jsonl, read_log, read_events, read_terminal])
def test_one_write_reaches_every_sink(arrived, tmp_path, capsys):
    with a_report(tmp_path, terminal="plain") as report:
        report.write(10, {"train/loss": 0.5})
    assert arrived(tmp_path, capsys.readouterr().out)


def test_a_line_is_on_disk_as_soon_as_it_is_written(tmp_path):
    with a_report(tmp_path) as report:
        report.write(10, {"train/loss": 0.5})
        assert read_jsonl(tmp_path, "") and read_log(tmp_path, "") and read_events(tmp_path, "")


def test_history_is_what_the_file_holds(tmp_path):
    assert fill(tmp_path, [10, 20]) == records(tmp_path) == a_report(tmp_path).history
    assert list(records(tmp_path)[0])[0] == "step"


def test_without_a_workdir_there_is_a_history_and_no_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with a_report(None, terminal="plain") as report:
        report.write(1, {"train/loss": 1.0})
        report.flush()
        report.cut(0)
    assert report.history == [] and not list(tmp_path.iterdir())


def test_an_unused_report_touches_nothing(tmp_path):
    with a_report(tmp_path / "new") as report:
        report.cut(0)
        report.flush()
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("step", [0, 10, 15, 30, 99])
def test_after_a_cut_each_reported_step_stands_once(step, tmp_path):
    fill(tmp_path, [10, 20, 30])
    kept = [at for at in (10, 20, 30) if at <= step]
    with a_report(tmp_path) as report:
        report.cut(step)
        assert [row["step"] for row in report.history] == kept
        report.write(step + 1, {"train/loss": 7.0})
    assert [row["step"] for row in records(tmp_path)] == [*kept, step + 1]
    assert [at for at, tag, _ in events(tmp_path) if tag == "train/loss"] == [*kept, step + 1]


def test_a_cut_alone_brings_all_files_into_agreement(tmp_path):
    fill(tmp_path, [10, 20])
    with a_report(tmp_path) as report:
        report.cut(10)
    assert [row["step"] for row in records(tmp_path)] == [10]
    assert {at for at, _, _ in events(tmp_path)} == {10}
    with a_report(tmp_path) as report:
        report.cut(0)
    assert records(tmp_path) == [] and events(tmp_path) == []


def test_the_events_of_others_stay(tmp_path):
    other = tmp_path / "events.out.tfevents.1.host.profile-empty"
    other.touch()
    fill(tmp_path, [10])
    fill(tmp_path, [20])
    assert other.exists() and len(list(tmp_path.glob("*tfevents*"))) == 2


def test_many_restarts_within_a_second_lose_no_event(tmp_path):
    for step in range(1, 6):
        fill(tmp_path, [step])
    assert [at for at, tag, _ in events(tmp_path) if tag == "train/loss"] == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("tail", [b'{"step": 30, "tra', b"\x00" * 40, b"{}\n", b"null\n", b'"30"', b'{"step": "x"}\n'])
def test_a_torn_last_line_is_left_out_and_removed(tail, tmp_path):
    fill(tmp_path, [10, 20])
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(path.read_bytes() + tail)
    assert [row["step"] for row in a_report(tmp_path).history] == [10, 20]
    fill(tmp_path, [30])
    assert [row["step"] for row in records(tmp_path)] == [10, 20, 30]


def test_a_last_line_without_its_end_is_kept_and_not_run_into(tmp_path):
    fill(tmp_path, [10, 20])
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(path.read_bytes().rstrip(b"\n"))
    fill(tmp_path, [30])
    assert [row["step"] for row in records(tmp_path)] == [10, 20, 30]


def test_a_damaged_line_in_the_middle_is_named(tmp_path):
    fill(tmp_path, [10, 20, 30])
    path = tmp_path / "metrics.jsonl"
    lines = path.read_text().splitlines()
    path.write_text("\n".join([lines[0], lines[1][:9], lines[2]]) + "\n")
    with pytest.raises(StorageError, match=f"{path} line 2"):
        a_report(tmp_path)


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf, 1e-300, 0.1, -0.0, 1e22])
def test_any_number_survives_as_valid_json(number, tmp_path):
    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON")

    with a_report(tmp_path, terminal="plain") as report:
        report.write(1, {"train/loss": number, "eval/accuracy": number})
    (line,) = (tmp_path / "metrics.jsonl").read_text().splitlines()
    found = float(json.loads(line, parse_constant=refuse)["train/loss"])
    again = a_report(tmp_path).history[0]["train/loss"]
    assert repr(found) == repr(again) == repr(number)


def test_synthetic_data_is_said_in_every_report(tmp_path, capsys):
    with a_report(tmp_path, terminal="plain", synthetic=True) as report:
        report.write(10, {"train/loss": 0.5})
        report.write(10, {"eval/loss": 0.5})
        report.summary()
    assert all(row["synthetic"] is True for row in records(tmp_path))
    assert all(tag.startswith("synthetic/") for _, tag, _ in events(tmp_path))
    for text in (capsys.readouterr().out, (tmp_path / "log.txt").read_text()):
        told = [line for line in text.splitlines() if "step 10" in line or "finished" in line]
        assert len(told) == 3 and all("SYNTHETIC DATA" in line for line in told)
    with a_report(tmp_path) as report:  # and a restart keeps it
        report.cut(10)
    assert all(row["synthetic"] is True for row in records(tmp_path))


@pytest.mark.parametrize("mode", ["live", "plain", "quiet"])
def test_close_ends_everything_and_can_be_called_twice(mode, tmp_path):
    before = set(threading.enumerate())
    report = a_report(tmp_path, terminal=mode)
    report.header(FACTS)
    report.write(10, {"train/loss": 0.5})
    report.close()
    report.close()
    assert set(threading.enumerate()) == before
    with pytest.raises(ValueError, match="closed"):
        report.write(20, {"train/loss": 0.5})


def full_disk(descriptor: int, data: bytes) -> int:
    raise OSError(28, "No space left on device")


@pytest.mark.parametrize("name", ["metrics.jsonl", "log.txt"])
def test_a_full_disk_is_a_storage_error_naming_the_file(name, tmp_path, monkeypatch):
    with a_report(tmp_path) as report:
        report.write(10, {"train/loss": 0.5})
        with monkeypatch.context() as patch:
            patch.setattr(sinks.os, "write", full_disk)
            with pytest.raises(StorageError, match=f"{name}: No space left") as caught:
                report.write(20, {"train/loss": 0.5}) if name == "metrics.jsonl" else report.say("hello")
    assert "\n" not in str(caught.value) and caught.value.exit_code == 5


def test_a_workdir_that_cannot_be_made_is_a_storage_error(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(StorageError, match=f"cannot read {tmp_path}/file/run/metrics.jsonl: Not a directory"):
        a_report(tmp_path / "file" / "run")
    with a_report(tmp_path / "later") as report:
        (tmp_path / "later").touch()
        with pytest.raises(StorageError, match="cannot .*metrics.jsonl: Not a directory"):
            report.write(1, {"train/loss": 1.0})


LIMITED = """
import pathlib, resource, signal, sys
from jaxtrain.errors import StorageError
from jaxtrain.reporting.report import Report
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (2000, 2000))
folder = pathlib.Path(sys.argv[1])
report = Report(folder, total_steps=100, steps_per_epoch=10, batch_size=8, terminal="quiet")
try:
    for step in range(1, 100):
        report.write(step, {"train/loss": 1.0})
except StorageError as error:
    print(error)
report.close()
"""


def test_a_line_cut_short_by_a_real_limit_is_mended_by_the_next_run(tmp_path):
    command = [sys.executable, "-c", LIMITED, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    assert "metrics.jsonl: File too large" in done.stdout
    whole = len(a_report(tmp_path).history)
    fill(tmp_path, [100])
    assert 5 < whole < 30 and [row["step"] for row in records(tmp_path)] == [*range(1, whole + 1), 100]


def test_flush_returns_when_the_lines_are_durable(tmp_path, monkeypatch):
    synced = []
    with a_report(tmp_path) as report:
        report.write(10, {"train/loss": 0.5})
        monkeypatch.setattr(sinks.os, "fsync", lambda number: synced.append(os.fstat(number).st_ino))
        report.flush()
    assert (tmp_path / "metrics.jsonl").stat().st_ino in synced


def test_an_unknown_terminal_is_refused_with_the_choices(tmp_path):
    with pytest.raises(UserError, match="'fancy'; expected one of auto, live, plain, quiet"):
        a_report(tmp_path, terminal="fancy")


def test_the_speed_leaves_out_start_up_and_pauses():
    pace = Pace()
    pace.mark(50, now=100.0)  # a minute and a half of compiling lie before it
    assert pace.seconds_per_step is None
    pace.mark(100, now=101.0)
    pace.pause()
    pace.mark(150, now=131.0)  # the first evaluation, which compiles, lies before it
    pace.mark(200, now=132.0)
    assert pace.seconds_per_step == pace.latest == pytest.approx(0.02)


def test_speed_and_memory_are_added_where_the_caller_gives_none(tmp_path):
    with a_report(tmp_path) as report:
        report.write(10, {"train/loss": 0.5})
        report.write(20, {"train/loss": 0.5})
        report.write(30, {"train/loss": 0.5, "time/examples_per_second": 123.0})
        report.write(30, {"eval/loss": 0.5})
    first, second, third, evaluation = report.history
    assert "time/examples_per_second" not in first and second["time/examples_per_second"] > 0
    assert third["time/examples_per_second"] == 123.0
    assert first["memory/host_bytes"] > 1e6
    assert set(evaluation) == {"step", "eval/loss", "time/unix"}


def test_the_summary_tells_results_time_and_places(tmp_path, capsys):
    with a_report(tmp_path, terminal="plain") as report:
        report.write(50, {"eval/accuracy": 0.75, "eval/loss": 0.5}, best=True)
        report.write(100, {"eval/accuracy": 0.5})
        report.write(100, {"test/accuracy": 0.625, "eval_hard/accuracy": 0.25})
        capsys.readouterr()
        best = report.history[0]
        report.summary(ended="finished", step=100, seconds=83, best=best, places={"metrics": tmp_path})
    told = capsys.readouterr().out.splitlines()
    assert told == [
        "finished at step 100",
        "  best        validation accuracy 75.00% at step 50",
        "  validation  accuracy 50.00%  loss 0.5000",
        "  hard        accuracy 25.00%",
        "  test        accuracy 62.50%",
        "  time        1:23",
        f"  metrics     {tmp_path}",
    ]


def test_importing_it_imports_nothing_heavy():
    heavy = {"jax", "numpy", "tensorboardX", "tensorflow", "matplotlib", "IPython", "google.protobuf"}
    code = f"import jaxtrain.reporting.report, sys; print(sorted({heavy} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "[]"


@pytest.mark.slow
def test_tensorflow_reads_the_events(tmp_path):
    fill(tmp_path, [10, 20])
    code = (
        "import sys, tensorflow as tf\n"
        "for event in tf.compat.v1.train.summary_iterator(sys.argv[1]):\n"
        "    for value in event.summary.value:\n"
        "        print(event.step, value.tag, value.simple_value)"
    )
    (path,) = map(str, tmp_path.glob("*tfevents*"))
    done = subprocess.run([sys.executable, "-c", code, path], capture_output=True, text=True, check=True)
    assert "20 train/loss 0.05" in done.stdout and "10 eval/accuracy 0.1" in done.stdout
