"""Proves that a run which is killed and resumed equals one that is not, and rehearses faults.

    python -m jaxtrain.verify --config=configs/digits.py

The run is made short, run once from start to end and once with kills or other faults; then the two are compared bit by
bit. The user's own workdir is not touched.
"""

import argparse
import dataclasses
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from jaxtrain import commandline
from jaxtrain import config as configs
from jaxtrain import main as entry
from jaxtrain.errors import UserError
from jaxtrain.rehearsal import faults, shorten
from jaxtrain.rehearsal.trial import Trial
from jaxtrain.rehearsal.verdict import Verdict, table

KILLS = 3


def verify(
    spec: str,
    changes: Sequence[str] = (),
    *,
    steps: int = 200,
    minutes: float = 5.0,
    kills: int | None = None,
    seed: int = 0,
    inject: str = "",
    keep: str | Path | None = None,
    cost: bool = False,
    say: Callable[[str], None] = print,
) -> Verdict:
    """Runs "FILE[:ARGS]" with `changes` ("model.width=64") twice, once with faults, and compares.

    steps, minutes: the run is cut to these steps, and to what can be run twice in this time. kills: SIGKILLs at moments
    drawn by `seed`; by default 3, or none where `inject` ("sigterm@120,corrupt@latest") interrupts the run itself.
    keep: a new folder for both workdirs; else they are in a temporary one, which stays where the verdict is bad. cost:
    measure what config.deterministic, which both runs have, costs; on GPUs that is done anyway. say: gets lines.
    Raises UserError for mistakes, and where the time is too short; JaxtrainError where the run fails without any fault.
    """
    wanted = faults.parse(inject)
    config = configs.load(spec, changes, say=lambda line: None)
    if steps < 2:
        raise UserError(f"--steps={steps}: there is nothing to interrupt; expected 2 or more")
    most, cut = shorten.shortened(config, steps)
    if late := next((fault for fault in wanted if fault.step > most), None):
        raise UserError(f"--inject: {late} is past the last step, {most}; --steps=… gives more")
    if kills is None:
        kills = 0 if any(fault.ends or fault.where == faults.LATEST for fault in wanted) else KILLS
    folder = _folder(keep)
    say(f"{spec}: {most} steps, uninterrupted and with faults, in {folder}")
    nan = [fault for fault in wanted if fault.kind == "nan"]
    borne = nan if config.on_nonfinite != "stop" else []
    trial = Trial(
        folder=folder,
        arguments=(f"--config={spec}", *(f"--config.{each}" for each in [*shorten.intervals(most), *changes, *cut])),
        faults=[fault for fault in wanted if fault not in borne],
        borne=borne,
        poisonable=bool(nan),
        minutes=minutes,
        rng=random.Random(seed),
        say=say,
    )
    return _verdict(trial, kills, cost, keep is None)


def _folder(keep: str | Path | None) -> Path:
    if keep is None:
        return Path(tempfile.mkdtemp(prefix="jaxtrain-verify-"))
    folder = Path(keep).absolute()
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"--keep={keep} is there already; expected a new folder")
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _verdict(trial: Trial, kills: int, cost: bool, temporary: bool) -> Verdict:
    """The trial's verdict. A temporary folder goes where nobody has a use for it."""
    try:
        verdict = trial.run(kills, cost)
    except subprocess.TimeoutExpired:
        raise UserError(
            f"{trial.minutes:g} minutes are not enough; --minutes=… gives more; both runs are in {trial.folder}"
        ) from None
    except UserError:
        if temporary:
            shutil.rmtree(trial.folder)
        raise
    if not (verdict.good and temporary):
        return verdict
    shutil.rmtree(trial.folder)
    return dataclasses.replace(verdict, folder=None)


def run(argv: Sequence[str]) -> int:
    """The command. Returns the exit code; raises what is a mistake."""
    import jax

    jax.config.update("jax_platforms", "cpu")  # the accelerator belongs to the runs
    flags, changes = commandline.parse(argv, _parser())
    options = {name: value for name, value in vars(flags).items() if name != "config"}
    verdict = verify(flags.config, changes, **options)
    print(table(verdict.rows))
    if verdict.cost is not None:
        print(f"a step takes {verdict.cost:.2f} times as long with config.deterministic as without")
    print(verdict)
    return verdict.exit_code


def _parser() -> argparse.ArgumentParser:
    parser = commandline.Parser(
        prog="python -m jaxtrain.verify",
        description="Proves that this run, killed and resumed, equals itself uninterrupted; rehearses faults.",
        epilog="\n".join(_epilog()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--config", metavar="FILE[:ARGS]", help="as of jaxtrain.main, with the same --config.KEY=VALUE")
    add("--steps", type=int, default=200, help="of the run, at most (200)")
    add("--minutes", type=float, default=5.0, help="for everything (5)")
    add("--kills", type=int, help="SIGKILLs at drawn moments (3; 0 where --inject interrupts the run)")
    add("--seed", type=int, default=0, help="of the moments (0)")
    add("--inject", metavar="FAULT@WHEN,…", default="", help="faults, in the order in which they fall")
    add("--cost", action="store_true", help="measure what config.deterministic costs, as is done on GPUs anyway")
    add("--keep", metavar="DIR", help="a new folder for both workdirs; else a temporary one")
    return parser


def _epilog() -> list[str]:
    lines = ["faults for --inject; WHEN is a step, a phase, or latest:"]
    lines += [f"  {name:<9} {kind.doc}\n            → {kind.answer}" for name, kind in faults.KINDS.items()]
    lines += ["", "phases:", *(f"  {name:<11} {doc}" for name, doc in faults.PHASES.items())]
    return [*lines, "", "exit codes: 0 equal, and every fault answered as documented; 1 not; 2 a mistake"]


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command line. Returns the exit code."""
    return entry.guarded(run, argv)


if __name__ == "__main__":
    sys.exit(main())
