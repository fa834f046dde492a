"""`jaxtrain.verify` without a process: what --inject says, what is compared, and that every comparison can fail."""

import contextlib
import json
import random

import jax.numpy as jnp
import numpy as np
import pytest
from conftest import REPOSITORY

from jaxtrain import config as configs
from jaxtrain import verify
from jaxtrain.config import base_config
from jaxtrain.config.keys import KEYS
from jaxtrain.errors import UserError
from jaxtrain.rehearsal import answers, child, compare, faults, inflict, moments, rehearse, shorten
from jaxtrain.rehearsal.child import Ended
from jaxtrain.rehearsal.compare import Batch
from jaxtrain.rehearsal.faults import Fault
from jaxtrain.reporting.report import Report
from jaxtrain.storage.checkpoint import Checkpoints


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("", []),
        ("kill@120", [("kill", "120", 120)]),
        (
            "sigterm@7, kill@checkpoint,corrupt@latest",
            [("sigterm", "7", 7), ("kill", "checkpoint", 0), ("corrupt", "latest", 0)],
        ),
        ("nan@9,kill@3", [("nan", "9", 9), ("kill", "3", 3)]),
    ],
)
def test_faults_are_read(text, found):
    assert [(fault.kind, fault.where, fault.step) for fault in faults.parse(text)] == found


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("kil@3", ["unknown fault 'kil'", "'kill'", "sigterm"]),
        ("kill", ["'kill' says no moment", "kill@120", "checkpoint"]),
        ("kill@chekpoint", ["'kill@chekpoint'", "checkpoint?"]),
        ("kill@0", ["'kill@0'"]),
        ("kill@latest", ["'kill@latest'"]),
        ("corrupt@7", ["'corrupt@7'", "corrupt@latest"]),
        ("diskfull@evaluation", ["diskfull@120"]),
        ("second@9,kill@20", ["second@9", "put it last"]),
        ("kill@20,sigterm@20", ["sigterm@20 comes after kill@20"]),
    ],
)
def test_what_is_no_fault_is_refused_in_one_line(text, named):
    with pytest.raises(UserError) as error:
        faults.parse(text)
    assert all(each in str(error.value) for each in ["--inject", *named]) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ([], ["no config given: python -m jaxtrain.verify"]),
        (["--config=configs/digits.py", "--kill=3"], ["unknown argument '--kill=3'", "'--kills'"]),
        (["--config=configs/digits.py", "--steps=x"], ["--steps", "'x'"]),
        (["--config=configs/digits.py", "--steps=1"], ["--steps=1", "2 or more"]),
        (["--config=configs/digits.py", "--config.sed=3"], ["config.sed", "'config.seed'"]),
        (["--config=configs/digits.py", "--inject=kill"], ["says no moment"]),
        (["--config=configs/digits.py:smoke", "--inject=kill@41"], ["kill@41", "40"]),
        (["--config=configs/digits.py:smoke", "--keep=."], ["--keep=.", "new folder"]),
    ],
    ids=lambda value: " ".join(value),
)
def test_a_mistake_costs_one_line_and_starts_nothing(arguments, named, monkeypatch, capsys):
    monkeypatch.setattr(child, "start", None)
    assert verify.main(arguments) == 2
    line = capsys.readouterr().err
    assert line.count("\n") == 1 and all(each in line for each in named), line


def test_help_tells_every_fault(capsys):
    with pytest.raises(SystemExit):
        verify.main(["--help"])
    text = capsys.readouterr().out
    assert all(kind.doc in text and kind.answer in text for kind in faults.KINDS.values())


def test_every_fault_can_be_inflicted():
    assert faults.KINDS.keys() == inflict.ACTS.keys() | inflict.DAMAGES.keys() | {"nan"}


# A workdir as a run of three steps leaves it; each change is one thing that must be found.

STATE = {
    "step": jnp.int32(3),
    "params": {"w": jnp.arange(6, dtype=jnp.float32).reshape(2, 3)},
    "opt_state": {"mu": jnp.zeros((4,), jnp.bfloat16)},
    "key": jnp.array([1, 2], jnp.uint32),
}


def workdir(folder, state=STATE, losses=(3.0, 2.0, 1.0), step=3):
    with Report(folder, total_steps=3, steps_per_epoch=1.0, batch_size=4, terminal="quiet") as report:
        for number, loss in enumerate(losses, start=1):
            report.write(number, {"train/loss": loss, "time/data_wait": random.random()})
            report.write(number, {"eval/loss": loss / 2})
    with Checkpoints(folder / "checkpoints") as checkpoints:
        checkpoints.save(step, {"state": state, "sums": {"loss": jnp.float32(0)}})
    return folder


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    return workdir(tmp_path_factory.mktemp("a"))


def changed(**fields):
    return STATE | fields


@pytest.mark.parametrize(
    ("state", "field", "named"),
    [
        (STATE, "", []),
        (
            changed(params={"w": STATE["params"]["w"].at[1, 2].set(np.nextafter(np.float32(5), np.float32(6)))}),
            "params",
            ["params/w[1,2]", "5.0", "5.0000005", "1 of 6"],
        ),
        (changed(params={"w": STATE["params"]["w"].at[0, 0].set(-0.0)}), "params", ["params/w[0,0]", "-0.0"]),
        (changed(params={"v": STATE["params"]["w"]}), "params", ["params/w", "absent"]),
        (changed(opt_state={"mu": jnp.zeros((4,), jnp.float32)}), "opt_state", ["bfloat16[4]", "float32[4]"]),
        (changed(key=jnp.array([1, 3], jnp.uint32)), "key", ["key[1]"]),
        (changed(step=jnp.int32(4)), "counters", ["step: 3", "4"]),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_one_bit_of_the_state_is_found_and_named(state, field, named, reference, tmp_path):
    rows = compare.states(reference, workdir(tmp_path, state))
    assert {row.name for row in rows} == {"counters", "key", "opt_state", "params", "sums"}
    assert [row.name for row in rows if row.difference] == [field] * bool(field)
    assert all(each in row.difference for row in rows if row.difference for each in named)


def test_another_last_step_is_found(reference, tmp_path):
    (row,) = compare.states(reference, workdir(tmp_path, step=2))
    assert "3 uninterrupted, 2 resumed" in row.difference


def test_not_a_number_equals_itself_and_a_digest_tells_names_and_dtypes_apart():
    nan = {"w": np.array([np.nan, 1.0], np.float32)}
    assert not compare._field("params", nan, nan).difference
    others = [{"v": nan["w"]}, {"w": nan["w"].view(np.int32)}, {"w": nan["w"][:1]}]
    assert compare.digest(nan) not in map(compare.digest, others)


@pytest.mark.parametrize(
    ("losses", "named"),
    [
        ((3.0, 2.0, 1.0), []),
        ((3.0, 2.0000000000000004, 1.0), ["step 2 train/loss 2.0", "2.0000000000000004"]),
        ((3.0, 2.0), ["step 3 train/loss 1.0 uninterrupted", "nothing resumed"]),
        ((3.0, 2.0, 1.0, 0.5), ["nothing uninterrupted", "step 4"]),
    ],
    ids=["equal", "one bit", "one less", "one more"],
)
def test_lines_are_compared_bit_by_bit_without_the_clock(losses, named, reference, tmp_path):
    row = compare.lines(reference, workdir(tmp_path, losses=losses))
    assert bool(row.difference) == bool(named) and all(each in row.difference for each in named)


def test_a_line_that_stands_twice_or_not_at_all_is_found(reference, tmp_path):
    path = workdir(tmp_path) / "metrics.jsonl"
    whole = path.read_text().splitlines(keepends=True)
    path.write_text("".join(whole[:4] + whole[2:]))
    assert "step 2 has train/loss twice in the resumed run" in compare.lines(reference, tmp_path).difference
    path.write_text("".join(whole[:2] + whole[4:]))
    assert "step 2 train/loss" in compare.lines(reference, tmp_path).difference
    path.write_text("")
    assert "nothing resumed" in compare.lines(reference, tmp_path).difference
    assert "both are empty" in compare.lines(tmp_path, tmp_path).difference


def test_event_files_are_compared(reference, tmp_path):
    assert not compare.events(reference, workdir(tmp_path / "same")).difference
    other = workdir(tmp_path / "other", losses=(3.0, 2.0, 1.5))
    assert "step 3 train/loss" in compare.events(reference, other).difference
    (path,) = other.glob("events*")
    path.write_bytes(path.read_bytes() * 2)
    assert "twice in the resumed run" in compare.events(reference, other).difference
    path.unlink()
    assert "nothing resumed" in compare.events(reference, other).difference


A = [Batch(1, 0, 11), Batch(2, 0, 22), Batch(3, 0, 33)]


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ([A[0], A[1], A[1], A[2]], []),
        ([A[0], Batch(2, 0, 23), A[1], A[2]], ["ids of step 2", "in the resumed run"]),  # a replay tells
        ([A[0], A[1]], ["batch of step 3", "none resumed"]),
        ([A[0], A[1], Batch(3, 1, 44)], ["batch of step 3", "at offset 1"]),
    ],
    ids=["replayed", "other ids", "one less", "other offset"],
)
def test_batches_are_compared_step_by_step_and_replay_by_replay(given, named):
    row = compare.batches(A, given, 3)
    assert bool(row.difference) == bool(named) and all(each in row.difference for each in named)
    assert named or row.amount == "3 steps, 1 replayed"


def ended(code=0, errors="", notes=(), at=100.0):
    return Ended(exit_code=code, seconds=1.0, at=at, output="", errors=errors, notes=tuple(notes))


FELL = {"fault": "", "time": 95.0}
GIVEN = {"start": 0, "checkpoints": ["2", "3"]}, {"step": 3, "offset": 0, "ids": 33}


@pytest.mark.parametrize(
    ("fault", "found", "problem"),
    [
        (Fault("kill", "3"), ended(137, notes=[FELL]), ""),
        (Fault("kill", "3"), ended(0), "not reached"),
        (Fault("kill", "3"), ended(5, "jaxtrain: x", [FELL]), "exit code 5, expected 137; it said 'jaxtrain: x'"),
        (Fault("sigterm", "3"), ended(143, notes=[*GIVEN, FELL]), ""),
        (Fault("sigterm", "3"), ended(0, notes=[*GIVEN, FELL]), "exit code 0, expected 143"),
        (Fault("sigint", "3"), ended(130, notes=[*GIVEN, FELL], at=116.0), "21.0 s"),
        (Fault("usr1", "3"), ended(143, notes=[*GIVEN, {**GIVEN[1], "step": 4}, FELL]), "last step finished was 4"),
        (Fault("diskfull", "3"), ended(5, "jaxtrain: cannot write WORKDIR/x: full", [FELL]), ""),
        (Fault("diskfull", "3"), ended(5, "jaxtrain: cannot write", [FELL]), "one line that names"),
        (Fault("readonly", "3"), ended(5, "Tracejaxtrain: cannot write WORKDIR/x\nback", [FELL]), ""),
        (Fault("readonly", "3"), ended(5, "Traceback\nOSError: WORKDIR/x", [FELL]), "one line"),
        (Fault("hang", "3"), ended(4, notes=[FELL]), "no hang.txt"),
        (Fault("second", "3"), ended(0, notes=[FELL, {"second": 2}]), ""),
        (Fault("second", "3"), ended(0, notes=[FELL, {"second": 0}]), "exit code 0, expected 2"),
    ],
    ids=str,
)
def test_answers_are_held_against_the_documented_ones(fault, found, problem, reference):
    found = Ended(**vars(found) | {"errors": found.errors.replace("WORKDIR", str(reference))})
    problems = [*answers.to_fault(fault, found, reference, before=3)]
    assert len(problems) == bool(problem) and all(problem in each and str(fault) in each for each in problems), problems


def test_a_good_checkpoint_that_is_gone_is_found(reference):
    found = ended(5, f"jaxtrain: cannot write {reference}", [FELL])
    assert "step 9 is gone" in " ".join(answers.to_fault(Fault("diskfull", "3"), found, reference, before=9))


@pytest.mark.parametrize("kind", inflict.DAMAGES)
def test_damage_is_damage_and_its_answer_is_checked(kind, tmp_path):
    folder = workdir(tmp_path)
    fault, told = Fault(kind, "latest"), ended(notes=[{"start": 2, "checkpoints": ["2", "3"]}])
    assert answers.newest(folder) == 3
    inflict.DAMAGES[kind](folder / "checkpoints" / "3")
    assert answers.newest(folder) == 0
    (folder / "log.txt").write_text(f"{folder}/checkpoints/3: its checksum is wrong; passed over\n")
    assert not [*answers.to_damage(fault, 3, told, folder)]
    for notes, problem in [
        ([{"start": 3, "checkpoints": ["3"]}], "resumed at step 3"),
        ([{"start": 2, "checkpoints": ["2"]}], "was deleted"),
    ]:
        assert problem in " ".join(answers.to_damage(fault, 3, ended(notes=notes), folder))
    (folder / "log.txt").write_text("")
    assert "no line of log.txt" in " ".join(answers.to_damage(fault, 3, told, folder))


@pytest.mark.parametrize(
    ("rows", "problems", "code", "starts"),
    [
        ([compare.Row("params", "")], [], 0, "EQUAL: 9 steps with 1 kill end as"),
        ([compare.Row("params", "", "params/w: 1 uninterrupted, 2 resumed")], [], 1, "NOT EQUAL: params: params/w: 1"),
        ([compare.Row("params", "")], ["kill@3 was not reached"], 1, "NOT AS DOCUMENTED: kill@3 was not reached"),
    ],
    ids=["equal", "differs", "other answer"],
)
def test_the_verdict_is_one_line_and_an_exit_code(rows, problems, code, starts, tmp_path):
    verdict = verify.Verdict(tuple(rows), tuple(problems), 9, (Fault("kill", "3"),), tmp_path)
    assert verdict.exit_code == code and str(verdict).startswith(starts)
    assert (str(tmp_path) in str(verdict)) == bool(code)


def watched(steps):
    """The notes of a run that went through every phase."""
    phases = [{"phase": name, "at": steps, "seconds": 2.0} for name in faults.PHASES]
    return ended(notes=[*phases, *({"step": n, "offset": 0, "ids": n} for n in range(1, steps + 1))])


@pytest.mark.parametrize("seed", range(5))
def test_kills_are_drawn_over_all_phases_and_over_the_run(seed):
    drawn = moments.draw(20, 100, watched(100), random.Random(seed))
    assert len(drawn) == 20 and drawn == moments.draw(20, 100, watched(100), random.Random(seed))
    assert {fault.where for fault in drawn if not fault.step} == set(faults.PHASES)
    at = [fault.step for fault in drawn if fault.step]
    assert len(set(at)) > 1 and at == sorted(at) and at[0] >= 1 and at[-1] <= 100
    assert [fault.where for fault in drawn].index("end") >= 17  # nothing can be killed after it
    assert all(0 <= fault.seconds <= 2 for fault in drawn)


def test_a_run_without_a_phase_is_not_killed_in_it():
    drawn = moments.draw(9, 100, ended(notes=watched(100).notes[:2]), random.Random(0))  # data and compile alone
    assert {fault.where for fault in drawn if not fault.step} == {"data", "compile"}


@pytest.mark.parametrize(
    ("changes", "steps", "overrides"),
    [
        (dict(total="40st"), 40, []),
        (dict(total="3ep", batch_size=64, data=dict(name="digits")), 59, []),
        (dict(total="400st"), 100, ["total=100st"]),
        (dict(total="400st", schedule=dict(name="cosine", warmup="40st")), 100, ["total=100st", "schedule.warmup=0.1"]),
        (dict(total="400st", schedule=dict(name="cosine", warmup=0.3)), 100, ["total=100st"]),
        (
            dict(total="400st", schedule=dict(name="step", boundaries=("100st", 0.5))),
            100,
            ["total=100st", "schedule.boundaries=(0.25, 0.5)"],
        ),
        (dict(total="400st", schedule=dict(name="rsqrt", timescale="9000st")), 100, ["total=100st"]),
    ],
    ids=str,
)
def test_a_long_run_is_cut_and_its_schedule_with_it(changes, steps, overrides):
    config = base_config()
    for key, value in changes.items():
        config[key] = value
    assert shorten.shortened(config, 100) == (steps, overrides)
    adopted = configs.load("configs/digits.py", [f"schedule={config.schedule.name}", *overrides], say=lambda line: None)
    assert not overrides or adopted.total == "100st"


def test_what_verify_sets_is_legal_and_changes_no_result():
    configs.load("configs/digits.py", shorten.intervals(100))
    assert {KEYS[text.partition("=")[0]].kind for text in shorten.intervals(100)} == {"place", "view"}


def test_what_is_due_is_due_several_times_and_at_different_steps():
    for steps in (10, 40, 200, 3000):
        every = {text.split("=")[0]: text.split("=")[1] for text in shorten.intervals(steps)}
        saved, told = (int(every[key].removesuffix("st")) for key in ("checkpoint.every", "report_every"))
        assert steps / saved >= 5 and steps / told >= 3 and saved != told


def test_all_that_is_wrapped_is_where_the_run_takes_it_from(monkeypatch):
    """The training code knows nothing of the rehearsal, so nothing but this tells that a function has moved."""
    wrapped = []
    monkeypatch.setattr(rehearse, "_wrap", lambda owner, name, around: wrapped.append((owner, name)))
    stage = rehearse.Stage(rehearse.Plan((), "", poison=()))
    rehearse.arrange(stage, contextlib.ExitStack())
    assert len(wrapped) == 11 and [name for owner, name in wrapped if not callable(getattr(owner, name, None))] == []


def test_a_plan_goes_through_json_and_back():
    plan = rehearse.Plan(("--config=x",), "w", goal=7, fault=Fault("kill", "checkpoint", 5, 0.25), poison=(4,))
    text = plan.to_json()
    assert rehearse.Plan.from_json(text) == plan and json.loads(text)["goal"] == 7


def test_the_documents_tell_every_fault_as_the_table_does():
    page = (REPOSITORY / "docs" / "reliability.md").read_text()
    for name, kind in faults.KINDS.items():
        assert any(
            line.startswith(f"| `{name}` |") and line.endswith(f"| {kind.doc} | {kind.answer} |")
            for line in page.splitlines()
        ), name
