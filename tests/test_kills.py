"""Runs that are killed again and again, and faults inflicted on them, process by process, as a user would see it."""

import os

import pytest
from conftest import QUICK_FLAGS, REPOSITORY
from test_commands import is_complete

from jaxtrain import verify
from jaxtrain.rehearsal import compare, faults

pytestmark = pytest.mark.slow

OTHERS = sorted(path.stem for path in (REPOSITORY / "configs").glob("*.py") if path.stem != "digits")
ALWAYS = {"params", "opt_state", "key", "counters", "sums", "batch ids", "metrics.jsonl", "event files"}
NOISY = """
import os
from jaxtrain import config

def noise(predict, source):
    return {"pid": float(os.getpid())}

def get_config():
    found = config.load("configs/digits.py:smoke", total="24st")
    found.evals = dict(noise=dict(source="test", fn="noisy:noise", every="6st"))
    return found
"""


@pytest.fixture(autouse=True)
def at_home(monkeypatch):
    """One device, as at home, in a folder from which configs and examples are found."""
    monkeypatch.chdir(REPOSITORY)
    monkeypatch.setenv("XLA_FLAGS", QUICK_FLAGS)
    monkeypatch.setenv("PYTHONPATH", str(REPOSITORY))
    monkeypatch.setenv("TFDS_DATA_DIR", os.environ.get("TFDS_DATA_DIR", str(REPOSITORY.parent / "shared" / "tfds")))


def verified(spec, *changes, **options):
    """The verdict, which is good and compared everything."""
    verdict = verify.verify(spec, changes, minutes=20, **options)
    assert verdict.good, str(verdict)
    assert {row.name for row in verdict.rows} >= ALWAYS
    return verdict


@pytest.fixture
def optimised(monkeypatch):
    """Programs as users have them."""
    monkeypatch.setenv("XLA_FLAGS", "")


def test_twenty_kills_in_all_phases_change_no_bit(optimised):
    """Reports 4, 14, 35."""
    verdict = verified("configs/digits.py:smoke", kills=20)
    assert [fault.kind for fault in verdict.faults] == ["kill"] * 20
    assert {fault.where for fault in verdict.faults} >= faults.PHASES.keys()


# Of the four whose pictures come through TFDS one decodes by TensorFlow, which takes longer to import than all else.
THREADED = ("fashion_mnist", "resnet", "vit")


@pytest.mark.parametrize("name", OTHERS)
def test_three_kills_change_no_bit_of_any_config(name, tmp_path, monkeypatch):
    """On two devices. The run that nothing befell leaves behind what a run leaves behind."""
    monkeypatch.setenv("XLA_FLAGS", f"--xla_force_host_platform_device_count=2 {QUICK_FLAGS}")
    changes = ["loader=threads"] if name in THREADED else []
    assert len(verified(f"configs/{name}.py:smoke", *changes, keep=tmp_path / "kept").faults) == 3
    is_complete(tmp_path / "kept" / compare.NAMES[0])


def test_three_kills_change_no_bit_of_a_step_of_ones_own():
    assert len(verified("examples/gan.py:smoke").faults) == 3


@pytest.mark.parametrize("place", ["yes", "no"])
def test_kills_within_loops_of_steps_change_no_bit(place, optimised):
    """Dispatches of up to five steps, which the kills cut and a resumed run groups anew."""
    changes = ("model=mlp", "steps_per_dispatch=5", f"data.resident={place}")
    assert len(verified("configs/digits.py:smoke", *changes).faults) == 3


def test_three_kills_change_no_bit_of_any_member():
    grid = "replicas=(('seed', 2), ('optimizer.learning_rate', (.005, .01)))"
    assert len(verified("configs/digits.py:smoke", grid, "model.width=4").faults) == 3


def test_each_fault_is_answered_as_documented():
    """Reports 16, 35, 37, 40: each fault of the table in one run, which ends as if none had been."""
    found = verified("configs/digits.py:smoke", inject=",".join(IN_ONE_RUN))
    assert {fault.kind for fault in found.faults} == faults.KINDS.keys()


IN_ONE_RUN = (
    *("kill@6", "sigterm@9", "sigterm@compile", "sigint@evaluation", "corrupt@latest", "nan@13", "halve@latest"),
    *("sigint@18", "empty@latest", "usr1@20", "diskfull@24", "readonly@28", "vanish@30", "hang@35", "second@38"),
)


@pytest.mark.parametrize(
    ("spec", "answer", "inject"),
    [
        ("examples/simclr.py:smoke", "skip", "nan@7"),
        ("configs/digits.py:smoke", "rollback", "nan@13,nan@22,kill@16,sigterm@23,kill@30"),
    ],
)
def test_nan_that_is_borne_is_borne_the_same_way_whatever_befalls(spec, answer, inject):
    """Report 16."""
    verdict = verified(spec, f"on_nonfinite={answer}", inject=inject)
    assert len(verdict.faults) > inject.count("nan")


def test_what_does_not_follow_from_the_step_is_found(tmp_path, monkeypatch, capsys):
    """An evaluation that tells its process apart."""
    (tmp_path / "noisy.py").write_text(NOISY)
    monkeypatch.setenv("PYTHONPATH", f"{REPOSITORY}{os.pathsep}{tmp_path}")
    monkeypatch.syspath_prepend(tmp_path)
    arguments = [f"--config={tmp_path / 'noisy.py'}", "--kills=1", f"--keep={tmp_path / 'kept'}"]
    assert verify.main(arguments) == 1
    said = capsys.readouterr().out.splitlines()
    assert said[-1].startswith("NOT EQUAL: metrics.jsonl: ") and "eval_noise/pid" in said[-1]
    assert all((tmp_path / "kept" / name / "metrics.jsonl").is_file() for name in compare.NAMES)
