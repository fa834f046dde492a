"""A run's folder: what was run, kept beside what came out, so that another run cannot slip in between."""

import dataclasses
import hashlib
import json
import os
import socket
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np
from ml_collections import ConfigDict

from jaxtrain import config as configs
from jaxtrain.errors import StorageError, UserError
from jaxtrain.machine import distributed

FORMAT = 1
SHOWS_UP = 60.0  # seconds in which a network file system shows a new file to other hosts
FREE_TO_CHANGE = {"total"}  # a run key, but more steps of the same run are no other run


@dataclasses.dataclass(frozen=True)
class Record:
    """`config.json`: the config, what "auto" became, and what the data looks like."""

    config: ConfigDict
    precision: str
    spec: dict[str, jax.ShapeDtypeStruct]  # of one example
    num_classes: int | None
    class_names: tuple[str, ...]
    sizes: dict[str, int] = dataclasses.field(default_factory=dict)  # role → examples: durations depend on it
    steps_per_dispatch: int = 1  # what "auto" became; older versions knew only single steps
    objects: tuple[str, ...] = ()  # parts given as objects in a notebook, which no config can name


def read(folder: Path) -> Record | None:
    """The record of a used workdir, or None. Raises UserError for one written by a newer version."""
    path = folder / "config.json"
    if not path.exists():
        return None
    try:
        content = json.loads(path.read_text())
        number = content["format"]
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path} is not a record of a run ({error}); take another workdir") from error
    if number > FORMAT:
        raise UserError(f"{path} has format {number}; this version reads up to {FORMAT}; update jaxtrain")
    data = content["data"]
    return Record(
        config=configs.from_json(json.dumps(content["config"])),
        precision=content["precision"],
        spec={name: jax.ShapeDtypeStruct(tuple(s), np.dtype(d)) for name, (s, d) in data["spec"].items()},
        num_classes=data["num_classes"],
        class_names=tuple(data["class_names"]),
        sizes=data.get("sizes", {}),
        steps_per_dispatch=content.get("steps_per_dispatch", 1),
        objects=tuple(content["objects"]),
    )


def write(folder: Path, record: Record) -> None:
    """Replaces `config.json` in one stroke. Raises StorageError where the folder cannot be written."""
    content: dict[str, Any] = {
        "format": FORMAT,
        "precision": record.precision,
        "steps_per_dispatch": record.steps_per_dispatch,
        "objects": list(record.objects),
        "data": {
            "spec": {name: [list(leaf.shape), np.dtype(leaf.dtype).name] for name, leaf in record.spec.items()},
            "num_classes": record.num_classes,
            "class_names": list(record.class_names),
            "sizes": record.sizes,
        },
        "config": json.loads(configs.to_json(record.config)),
    }
    try:
        folder.mkdir(parents=True, exist_ok=True)
        partial = folder / "config.json.partial"
        partial.write_text(json.dumps(content, indent=2) + "\n")
        os.replace(partial, folder / "config.json")
    except OSError as error:
        raise StorageError(f"cannot write to the workdir {folder}: {error.strerror}") from error


def refuse_unshared(folder: Path) -> None:
    """Raises UserError in a process of several that does not see the `config.json` which process 0 has written."""
    if distributed.processes() == 1:
        return
    path = folder / "config.json"
    expected, until = distributed.from_first(_digest(path)), time.monotonic() + SHOWS_UP
    while _digest(path) != expected:
        if time.monotonic() > until:
            raise UserError(
                f"process {distributed.number()} ({socket.gethostname()}) does not see {path}, which process 0 wrote; "
                "the workdir must lie on a file system that all hosts share"
            )
        time.sleep(0.1)


def refuse_another_run(folder: Path, old: Record, config: ConfigDict, objects: tuple[str, ...]) -> None:
    """Raises UserError naming the run keys in which `config` differs from what the workdir holds.

    Code that only the workdir names is not imported to find out: whoever wrote the workdir need not be trusted.
    """
    given = configs.own_names(config)
    foreign = [f"{key} is {name!r}" for name, key in configs.own_names(old.config).items() if name not in given]
    if foreign:
        raise UserError(
            f"workdir {folder} holds another run: there {'; '.join(foreign)}; take another --workdir or the old values"
        )
    changes = [
        f"{key} {before!r} → {after!r}"
        for key, before, after in configs.differing(old.config, config)
        if key not in FREE_TO_CHANGE
    ]
    if old.objects != objects:
        changes.append(f"objects {old.objects} → {objects}")
    if changes:
        raise UserError(
            f"workdir {folder} holds another run: {'; '.join(changes)}; take another --workdir or the old values"
        )


def _digest(path: Path) -> str:
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError:
        return ""
