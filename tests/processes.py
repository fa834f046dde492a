"""Runs of several processes on one machine, each with simulated CPU devices. None of them outlives its test."""

import contextlib
import dataclasses
import json
import os
import pathlib
import socket
import subprocess
import sys
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent
CLUSTERS = ("SLURM_", "OMPI_", "JAX_COORDINATOR", "JAX_NUM_", "JAX_PROCESS_", "KUBERNETES_", "JOB_COMPLETION_")


@dataclasses.dataclass(frozen=True)
class Ended:
    """How a process ended. `out` and `err` are without what gloo prints."""

    code: int
    out: str
    err: str

    @property
    def result(self):
        """The JSON of its last line."""
        return json.loads(self.out.splitlines()[-1])


def free_address() -> str:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return f"127.0.0.1:{free.getsockname()[1]}"


def environment(devices: int, **more: str) -> dict[str, str]:
    """Of a child with so many devices, in no cluster but for `more`."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(CLUSTERS)}
    flags = f"--xla_force_host_platform_device_count={devices}"
    paths = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    return kept | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags, "PYTHONPATH": paths} | more


def by_hand(address: str, processes: int, number: int) -> dict[str, str]:
    return {
        "JAX_COORDINATOR_ADDRESS": address,
        "JAX_NUM_PROCESSES": str(processes),
        "JAX_PROCESS_ID": str(number),
    }


@contextlib.contextmanager
def started(*commands: list[str], devices: int = 2, environments: list[dict[str, str]] | None = None):
    """Popen objects of `commands`, joined by hand unless `environments` says otherwise; killed at the end."""
    address, count = free_address(), len(commands)
    places = environments or [by_hand(address, count, number) for number in range(count)]
    children = [
        subprocess.Popen(
            [sys.executable, *command],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env=environment(devices, **place),
        )
        for command, place in zip(commands, places, strict=True)
    ]
    try:
        yield children
    finally:
        for child in children:
            child.kill()
            child.communicate()


def ends(children, seconds: float) -> list[Ended]:
    """How they ended. Fails where one is still there after so many seconds in all."""
    until = time.monotonic() + seconds
    found = []
    for child in children:
        out, err = child.communicate(timeout=max(0.1, until - time.monotonic()))
        found.append(Ended(child.returncode, without_gloo(out), without_gloo(err)))
    return found


def without_gloo(text: str) -> str:
    return "".join(line for line in text.splitlines(keepends=True) if "peer ranks" not in line)


def run(*commands: list[str], seconds: float = 120, **options) -> list[Ended]:
    """Starts them, and waits for their ends."""
    with started(*commands, **options) as children:
        return ends(children, seconds)
