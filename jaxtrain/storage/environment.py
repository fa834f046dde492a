"""`environment.json`: what a run ran on, an entry for every start."""

import hashlib
import importlib.metadata
import json
import os
import platform
import re
import shlex
import socket
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from jaxtrain.errors import StorageError, UserError

FORMAT = 1
PACKAGES = (
    *("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy", "ml_collections"),
    *("tensorflow", "tensorflow-cpu", "tensorflow-datasets", "keras", "Pillow"),
    *("jax-cuda12-plugin", "jax-cuda13-plugin", "libtpu"),
)
# Variables that may change a result, and those that are only good to know when something is wrong.
ARITHMETIC = (
    *(
        "XLA_FLAGS",
        "LIBTPU_INIT_ARGS",
        "JAX_ENABLE_X64",
        "JAX_DEFAULT_MATMUL_PRECISION",
        "JAX_NUMPY_DTYPE_PROMOTION",
    ),
    *("JAX_DEFAULT_PRNG_IMPL", "JAX_THREEFRY_PARTITIONABLE", "NVIDIA_TF32_OVERRIDE", "TF_ENABLE_ONEDNN_OPTS"),
)
SURROUNDINGS = ("JAX_", "XLA_", "TPU_", "NCCL_", "CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS", "SLURM_JOB_ID")
# What may change a result. The rest (host, time, command, cores) is told, not compared.
COMPARED = (
    *("python", "packages", "processor", "devices", "processes", "layout", "program", "arithmetic", "code", "modules"),
)


def collect(
    modules: Iterable[str] = (), devices: Iterable[Any] | None = None, layout: str = "", program: str = ""
) -> dict[str, Any]:
    """What this process runs on, as JSON: versions, devices, platform, revision of the code, command line.

    `modules` names a user's own modules ("my_lab.nets"): the sources of their whole packages are hashed, as
    far as they are loaded. `devices` are those of the run's mesh (None: all), `layout` says how arrays lie on
    them, `program` what is compiled as one. Starts JAX's backend if need be.
    """
    import jax

    variables = dict(sorted(os.environ.items()))
    return {
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "command": shlex.join(sys.orig_argv),
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "python": platform.python_version(),
        "system": platform.platform(),
        "processor": _processor(),
        "cores": os.cpu_count(),
        "packages": dict(_versions()),
        "devices": _devices(jax.devices() if devices is None else devices),
        "processes": jax.process_count(),
        "layout": layout,
        "program": program,
        "arithmetic": {name: value for name, value in variables.items() if name in ARITHMETIC},
        "surroundings": {
            name: value for name, value in variables.items() if name.startswith(SURROUNDINGS) and name not in ARITHMETIC
        },
        "code": revision(Path(__file__).parent.parent),
        "modules": {name: digest for name in sorted(set(modules)) if (digest := source_hash(name))},
    }


def record(workdir: Path, environment: Mapping[str, Any]) -> tuple[str, ...]:
    """Adds this start to the workdir's `environment.json`. Returns what changed since the last one, in words.

    An empty tuple says that nothing that may change a result is different. Raises UserError for a file of a
    newer format, StorageError where it can be neither read nor written.
    """
    path = workdir / "environment.json"
    starts = read(path)
    changes = tuple(differences(starts[-1], environment)) if starts else ()
    partial = path.with_name(path.name + ".partial")
    try:
        workdir.mkdir(parents=True, exist_ok=True)
        partial.write_text(json.dumps({"format": FORMAT, "starts": [*starts, environment]}, indent=1) + "\n")
        os.replace(partial, path)
    except OSError as error:
        raise StorageError(f"cannot write {path}: {error.strerror}") from error
    return changes


def read(path: Path) -> list[dict[str, Any]]:
    """The starts that an `environment.json` tells of, the oldest first; none where it is absent."""
    if not path.exists():
        return []
    try:
        content = json.loads(path.read_text())
        if (number := int(content["format"])) > FORMAT:
            raise UserError(f"{path} has format {number}; this version reads up to {FORMAT}; update jaxtrain")
        return list(content["starts"])
    except (ValueError, KeyError, TypeError, OSError) as error:
        raise StorageError(f"{path} cannot be read ({error}); move it away") from error


def differences(before: Mapping[str, Any], after: Mapping[str, Any]) -> Iterator[str]:
    """What may change a result and is not the same: "jax 0.10.1 → 0.10.2"."""
    for field in COMPARED:
        old, new = before.get(field), after.get(field)
        if isinstance(old, Mapping) and isinstance(new, Mapping):
            for name in sorted({*old, *new}):
                if old.get(name) != new.get(name):
                    yield f"{name} {_word(old.get(name))} → {_word(new.get(name))}"
        elif field in before and old != new:  # an older version did not write it
            yield f"{field} {_word(old)} → {_word(new)}"


def revision(folder: Path) -> str | None:
    """The git revision of the checkout that holds `folder`, with a hash of uncommitted changes:
    "d22e7d5+1f3a".

    None outside a checkout or without git.
    """
    try:
        head = _git(folder, "rev-parse", "--short=12", "HEAD").decode().strip()
        tracked = _git(folder, "ls-files", "--", ".")
        changed = _git(folder, "diff", "HEAD", "--no-ext-diff", "--", ".")
    except (OSError, subprocess.SubprocessError):
        return None
    if not tracked:  # installed into an environment that lies in somebody else's checkout
        return None
    return f"{head}+{hashlib.sha256(changed).hexdigest()[:8]}" if changed else head


def source_hash(module: str) -> str | None:
    """A hash of the Python sources loaded from the top-level package of `module`; None if none is loaded."""
    top = module.partition(".")[0]
    loaded = [name for name in sys.modules if name.partition(".")[0] == top]
    sources = [(name, getattr(sys.modules[name], "__file__", None)) for name in sorted(loaded)]
    files = [(name, Path(file)) for name, file in sources if file and Path(file).is_file()]
    digest = hashlib.sha256()
    for name, file in files:
        digest.update(name.encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()[:16] if files else None


def _git(folder: Path, *arguments: str) -> bytes:
    command = ["git", "-C", str(folder), *arguments]
    return subprocess.run(command, capture_output=True, check=True, timeout=5, stdin=subprocess.DEVNULL).stdout


def _versions() -> Iterator[tuple[str, str]]:
    for name in PACKAGES:
        try:
            yield name, importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    yield "jaxtrain", _own_version()


def _own_version() -> str:
    try:
        return importlib.metadata.version("jaxtrain")
    except importlib.metadata.PackageNotFoundError:  # run from a folder that was never installed
        return "not installed"


def _processor() -> str:
    """The model of the CPU: another one may choose other vector instructions, which round differently."""
    try:
        found = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
    except OSError:
        found = None
    return found.group(1).strip() if found else f"{platform.machine()} {platform.processor()}".strip()


def _devices(devices: Iterable[Any]) -> str:
    """ "8 × gpu NVIDIA H100"; several kinds joined with " + "."""
    kinds: dict[str, int] = {}
    for device in devices:
        kind = f"{device.platform} {device.device_kind}" if device.device_kind != device.platform else device.platform
        kinds[kind] = kinds.get(kind, 0) + 1
    return " + ".join(f"{number} × {kind}" for kind, number in kinds.items())


def _word(value: Any) -> str:
    return "none" if value is None or value == "" else str(value)
