"""What a run answered to a fault, held against what `faults.KINDS` documents. Each finding is one line."""

from collections.abc import Iterator, Sequence
from pathlib import Path

from jaxtrain.rehearsal.child import Ended
from jaxtrain.rehearsal.faults import Fault
from jaxtrain.storage.checkpoint import Checkpoints

SIGNALS = ("sigterm", "sigint", "usr1")
STORAGE = ("diskfull", "readonly")
SIGNAL_SECONDS = 20.0


def newest(workdir: Path) -> int:
    """The newest good checkpoint of a workdir; 0: there is none."""
    return Checkpoints(workdir / "checkpoints", say=lambda line: None).latest() or 0


def to_fault(fault: Fault, ended: Ended, workdir: Path, before: int) -> Iterator[str]:
    """What is wrong with how a process answered the fault; `before` is the newest good checkpoint of its start."""
    fell = next(iter(ended.noted("fault")), None)
    if fell is None and fault.kind != "nan":
        yield f"{fault} was not reached: the run ended with exit code {ended.exit_code} before"
        return
    if ended.exit_code != fault.exit_code:
        yield f"{fault}: exit code {ended.exit_code}, expected {fault.exit_code}{said(ended)}"
        return
    if fault.kind in SIGNALS and fell is not None:
        yield from _to_signal(fault, ended, workdir, ended.at - fell["time"])
    if fault.kind in STORAGE:
        yield from _to_storage(fault, ended, workdir, before)
    if fault.kind == "hang" and not (workdir / "hang.txt").is_file():
        yield f"{fault}: there is no hang.txt in the workdir"
    if fault.kind == "vanish":
        yield from _names(fault, ended, str(workdir))
        yield from _to_vanishing(fault, workdir)
    if fault.kind == "second" and ended.first("second") != 2:
        yield f"{fault}: the second run ended with exit code {ended.first('second')}, expected 2"
    if fault.kind == "nan":
        yield from _to_stopping(fault, ended, workdir)


def _to_signal(fault: Fault, ended: Ended, workdir: Path, seconds: float) -> Iterator[str]:
    if seconds > SIGNAL_SECONDS:
        yield f"{fault}: it took {seconds:.1f} s to end, expected {SIGNAL_SECONDS:g} s at most"
    if (saved := newest(workdir)) != ended.last_step:
        yield f"{fault}: the newest checkpoint is of step {saved}, the last step finished was {ended.last_step}"


def _to_storage(fault: Fault, ended: Ended, workdir: Path, before: int) -> Iterator[str]:
    yield from _names(fault, ended, str(workdir))
    if (saved := newest(workdir)) < before:
        yield f"{fault}: the good checkpoint of step {before} is gone, the newest is of step {saved}"


def _to_stopping(fault: Fault, ended: Ended, workdir: Path) -> Iterator[str]:
    for what in (f"step {fault.step},", "first in losses", "with examples "):
        yield from _names(fault, ended, what)
    if not (kept := workdir / "nonfinite" / fault.where / "batch.npz").is_file():
        yield f"{fault}: the batch was not kept in {kept}"


def to_borne(faults: Sequence[Fault], workdir: Path) -> Iterator[str]:
    """The same for NaN that a run which ended well bore: its last state counts an update left out, or batches."""
    if not faults:
        return
    checkpoints = Checkpoints(workdir / "checkpoints", say=lambda line: None)
    state = checkpoints.restore_flat(newest(workdir), "state")
    if not any(state.get(f"state/{counter}", 0) for counter in ("skipped", "offset")):
        yield f"{', '.join(map(str, faults))}: the last state counts neither an update nor batches left out"


def _to_vanishing(fault: Fault, workdir: Path) -> Iterator[str]:
    """Orbax may leave debris of the save that was under way; nothing in it may be taken for a run."""
    made = [*workdir.glob("config.json"), *workdir.glob("checkpoints/*/manifest.json")]
    if made:
        yield f"{fault}: {made[0]} was made anew in a folder that had vanished"


def _names(fault: Fault, ended: Ended, what: str) -> Iterator[str]:
    """The error is one line and says `what`. Around it libraries may say that their writes fail too."""
    if len(ended.complaints) != 1 or what not in ended.complaints[0]:
        yield f"{fault}: expected one line that names {what}{said(ended)}"


def to_damage(fault: Fault, step: int, ended: Ended, workdir: Path) -> Iterator[str]:
    """The same for a checkpoint, of `step`, that was damaged before the process started."""
    resumed = ended.first("start")
    if resumed is None or resumed >= step:
        yield f"{fault}: the run resumed at step {resumed}, expected one before {step}, whose checkpoint was damaged"
    folder = workdir / "checkpoints" / str(step)
    told = [line for line in (workdir / "log.txt").read_text().splitlines() if str(folder) in line]
    if not any("passed over" in line for line in told):
        yield f"{fault}: no line of log.txt says that {folder} is passed over"
    if str(step) not in (ended.first("checkpoints") or ()):
        yield f"{fault}: {folder} was deleted"


def said(ended: Ended) -> str:
    """The last of what a process said on stderr, as the end of a sentence."""
    lines = ended.errors.splitlines()
    return f"; it said {lines[-1]!r}" + (f" and {len(lines) - 1} lines more" if len(lines) > 1 else "") if lines else ""
