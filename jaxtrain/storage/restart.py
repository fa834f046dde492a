"""What a restart in a used workdir may change, what it must not, and what it says of the difference."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from ml_collections import ConfigDict

from jaxtrain import config as configs
from jaxtrain import contract, optim
from jaxtrain.config.durations import parse_duration
from jaxtrain.errors import UserError
from jaxtrain.job import Job
from jaxtrain.storage import environment, workdir
from jaxtrain.storage.workdir import Record
from jaxtrain.supply import NAMES

SAMPLES = 1000  # steps at which two schedules are compared
KNOWN = {"builtins", "numpy", "jax", "flax", "keras", "optax", "jaxtrain"}  # whose versions are recorded


def continued(
    config: ConfigDict, folder: Path | None, old: Record | None, mode: str, objects: Mapping[str, Any]
) -> tuple[ConfigDict, list[str]]:
    """The config to run in `folder`, and notes for the header; `old` is what its record says.

    Another run's folder is refused (UserError), a choice once made by "auto" is kept.
    """
    if old is None or folder is None:
        if mode == "eval":
            raise UserError(f"--mode=eval needs the workdir of a run; {folder} is none")
        return config, []
    workdir.refuse_another_run(folder, old, config, _given(objects))
    config, notes = config.copy_and_resolve_references(), []
    for key in ("precision", "steps_per_dispatch"):
        if config[key] == "auto":
            config[key] = getattr(old, key)
            notes.append(f"{key} {config[key]}, as chosen at the first start")
    return config, notes


def another_length(job: Job, old: Record | None, step: int) -> str:
    """The warning where `config.total` changed and the learning rate from `step` on depends on it, else ""."""
    if old is None or old.config.total == job.config.total:
        return ""
    if not {"parts", "optimizer"} & set(contract.asked_for(job.builder, NAMES)):
        return ""
    steps = [parse_duration(text) for text in (old.config.total, job.config.total)]
    lengths = [each.whole_steps(job.config.batch_size, job.examples_in_epoch) for each in steps]
    points = np.unique(np.linspace(step, max(step, min(lengths) - 1), SAMPLES).astype(np.int32))
    rates = (optim.all_rates(job.config, length, job.steps_in) for length in lengths)
    for before, after in zip(*([np.asarray(rate(points)) for rate in each] for each in rates), strict=True):
        if not np.array_equal(before, after):
            return (
                f"total {old.config.total} → {job.config.total}: the learning rate at step {step} was {before[0]:.4g} "
                f"and is {after[0]:.4g} now: continued, not reproduced"
            )
    return ""


def record(job: Job, config: ConfigDict, folder: Path, objects: Mapping[str, Any]) -> tuple[str, ...]:
    """Leaves in the workdir what is run, and on what. Returns what changed since the last start, in words."""
    workdir.write(
        folder,
        Record(
            config=config,
            precision=job.policy.name,
            spec=dict(job.dataset.spec),
            num_classes=job.dataset.num_classes,
            class_names=tuple(job.dataset.class_names),
            sizes={role: len(source) for role, source in job.sources.items()},
            steps_per_dispatch=job.steps_per_dispatch,
            objects=_given(objects),
        ),
    )
    program = "one step" if job.steps_per_dispatch == 1 else "a loop of steps"
    now = environment.collect(set(_modules(config, objects)), job.mesh.devices.flatten(), _layout(job), program)
    return environment.record(folder, now)


def _layout(job: Job) -> str:
    """How arrays lie on the devices: "data=8", and the rules where there are some."""
    axes = " ".join(f"{name}={size}" for name, size in job.mesh.shape.items())
    rules = "; ".join(f"{pattern} {'×'.join(map(str, each))}" for pattern, each in job.config.sharding_rules)
    members = f"{len(job.together.members)} members, {job.together.layout.mode}" if job.together else ""
    return ", ".join(filter(None, [axes, rules, members]))


def _given(objects: Mapping[str, Any]) -> tuple[str, ...]:
    return tuple(sorted(name for name, value in objects.items() if value is not None))


def _modules(config: ConfigDict, objects: Mapping[str, Any]) -> Iterator[str]:
    """The modules of a user's own that a run is made of, whose sources are hashed."""
    yield from (name.partition(":")[0] for name in configs.own_names(config))
    for value in objects.values():
        module = getattr(value, "__module__", None) or type(value).__module__
        if module.partition(".")[0] not in KNOWN:
            yield module
