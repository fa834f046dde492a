"""A rehearsal as a process of its own: started, listened to, and how it ended."""

import dataclasses
import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

from jaxtrain.rehearsal.compare import Batch
from jaxtrain.rehearsal.rehearse import Plan


@dataclasses.dataclass(frozen=True)
class Ended:
    """How a process ended. `exit_code` is 128 + the number of a signal that killed it; `at` is Unix time."""

    exit_code: int
    seconds: float
    at: float
    output: str
    errors: str
    notes: tuple[dict[str, Any], ...]

    def noted(self, key: str) -> list[dict[str, Any]]:
        """The notes that have this key, in order."""
        return [note for note in self.notes if key in note]

    def first(self, key: str) -> Any:
        """The value of the first note that has this key, or None."""
        return next((note[key] for note in self.notes if key in note), None)

    @property
    def batches(self) -> list[Batch]:
        return [Batch(note["step"], note["offset"], note["ids"]) for note in self.noted("ids")]

    @property
    def last_step(self) -> int:
        """The step at which the loop ended; where nothing tells, the last one that was given a batch."""
        return int(
            next((note[key] for note in reversed(self.notes) for key in ("end", "step", "start") if key in note), 0)
        )

    @property
    def complaints(self) -> list[str]:
        """What jaxtrain itself said on stderr, one line each, perhaps in the middle of what libraries were saying."""
        return [text.partition("\n")[0] for text in self.errors.split("jaxtrain: ")[1:]]

    def phases(self, name: str) -> list[dict[str, Any]]:
        """Each with `at`, a step, and `seconds`."""
        return [note for note in self.noted("phase") if note["phase"] == name]


def start(plan: Plan, timeout: float, log: Path) -> Ended:
    """Runs the plan to the end of its process; what it says goes to `log` too.

    Raises subprocess.TimeoutExpired where it lasts longer than `timeout` seconds; it is killed then.
    """
    began = time.monotonic()
    read, write = os.pipe()
    notes: list[dict[str, Any]] = []
    listener = threading.Thread(target=_listen, args=(read, notes), name="rehearsal-notes")
    listener.start()
    process = None
    try:
        process = subprocess.Popen(
            [sys.executable, "-m", "jaxtrain.rehearsal.rehearse", dataclasses.replace(plan, notes=write).to_json()],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            pass_fds=(write,),
            start_new_session=True,  # a Ctrl-C is for the parent alone
        )
        os.close(write)
        output, errors = process.communicate(timeout=timeout)
    except BaseException:
        if process is None:
            os.close(write)
        else:
            process.kill()
            process.communicate()
        raise
    finally:
        listener.join()
    log.write_text(output + errors)
    code = process.returncode
    return Ended(
        exit_code=code if code >= 0 else 128 - code,
        seconds=time.monotonic() - began,
        at=time.time(),
        output=output,
        errors=errors.strip(),
        notes=tuple(notes),
    )


def _listen(descriptor: int, notes: list[dict[str, Any]]) -> None:
    """Reads notes until the process is gone."""
    with open(descriptor, encoding="utf-8") as lines:
        notes.extend(map(json.loads, lines))
