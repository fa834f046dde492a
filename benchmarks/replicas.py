"""Eight seeds of digits in one program, against eight runs one after the other: whole commands, start-up included.

Cold: each side begins with an empty compile cache, which the later of the eight runs find filled. Warm: with one that
holds its programs.
"""

import json
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence

from benchmarks.table import Row

ROOT = pathlib.Path(__file__).resolve().parent.parent


def measure(members: int = 8, changes: Sequence[str] = ()) -> Iterator[Row]:
    """`changes` are of the config, "total=40st"."""
    with tempfile.TemporaryDirectory() as folder:
        place = pathlib.Path(folder)
        for name in ("cold", "warm"):
            together = _seconds(place / f"together-{name}", place / "cache-together", [*changes, f"replicas={members}"])
            alone = [
                _seconds(place / f"alone-{name}-{seed}", place / "cache-alone", [*changes, f"seed={seed}"])
                for seed in range(members)
            ]
            detail = f"{together:.1f} s ÷ {sum(alone):.1f} s"
            yield Row(f"{members} seeds of digits ÷ {members} runs, {name} cache", together / sum(alone), 1.0, detail)
        one = _step_ms(place / "alone-warm-0")
        each = _step_ms(place / "together-warm") / members
        yield Row("a member's step ÷ a single run's", each / one, 1.0, f"{each:.2f} ms ÷ {one:.2f} ms")


def _seconds(workdir: pathlib.Path, cache: pathlib.Path, changes: Sequence[str]) -> float:
    """Of a whole command."""
    quiet = ["terminal=quiet", "tensorboard=False", f"compile_cache={cache}"]
    command = [sys.executable, "-m", "jaxtrain.main", "--config=configs/digits.py", f"--workdir={workdir}"]
    command += [f"--config.{each}" for each in (*quiet, *changes)]
    began = time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, cwd=ROOT)
    return time.perf_counter() - began


def _step_ms(workdir: pathlib.Path) -> float:
    lines = map(json.loads, (workdir / "metrics.jsonl").read_text().splitlines())
    return statistics.median(line["time/step_ms"] for line in lines if "time/step_ms" in line)
