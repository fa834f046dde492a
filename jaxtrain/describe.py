"""What a run says of itself before its first step, on the terminal and for --print."""

from collections.abc import Sequence
from pathlib import Path

import jax
import numpy as np
from ml_collections import ConfigDict

from jaxtrain import contract
from jaxtrain.config.keys import KEYS
from jaxtrain.config.lookup import options_of
from jaxtrain.job import Job, build
from jaxtrain.reporting.report import Facts, parameter_count, parameter_table, render_config
from jaxtrain.supply import NAMES


def facts(job: Job, folder: Path | None, notes: Sequence[str] = ()) -> Facts:
    """The header of a run."""
    config, one = job.config, job.together.alone(0) if job.together else job
    params = getattr(one.abstract, "params", {})
    return Facts(
        run=folder.name if folder else "not saved",
        workdir=folder,
        devices=_devices(job),
        precision=f"{job.policy.name} ({job.policy.reason})",
        data=_data(job),
        model=_part(job, "model" if job.parts else "step"),
        optimizer=_optimizer(job),
        replicas=_replicas(job),
        steps=f"{job.total_steps:,} steps of {config.batch_size:,} examples{' for each' if job.together else ''}, "
        f"{float(job.total_steps / job.steps_per_epoch):.4g} epochs of {float(job.steps_per_epoch):.4g} steps"
        + (f", up to {job.steps_per_dispatch} a dispatch" if job.steps_per_dispatch > 1 else ""),
        synthetic=job.dataset.synthetic,
        parameters=parameter_table(params),
        total=parameter_count(params),
        notes=(*notes, *_remarks(job)),
    )


def describe(config: ConfigDict) -> str:
    """The resolved config and the parameter table, as text. Raises UserError for what does not fit together."""
    job = build(config)
    job.rehearse()
    kinds = {key.partition(".")[0]: about.kind for key, about in KEYS.items()}
    shown = facts(job, None)
    rows = [(row.path, row.shape, f"{row.count:,}") for row in shown.parameters]
    rows.append(("total", "", f"{shown.total:,}"))
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    table = "\n".join(f"  {path:{widths[0]}}  {shape:{widths[1]}}  {count:>{widths[2]}}" for path, shape, count in rows)
    lines = "\n".join(f"  {label:9}  {text}" for label, text in shown.rows())
    return f"{render_config(job.config, kinds)}\n\nrun\n{lines}\n\nparameters\n{table}"


def _devices(job: Job) -> str:
    found = job.mesh.devices.flatten()
    kind = found[0].device_kind
    layout = ", ".join(f"{name} {size}" for name, size in job.mesh.shape.items())
    processes = f", {jax.process_count()} processes" if jax.process_count() > 1 else ""
    return f"{len(found)} × {kind} ({found[0].platform}), mesh {layout}{processes}"


def _data(job: Job) -> str:
    sizes = ", ".join(f"{len(source):,} {role}" for role, source in job.sources.items())
    shapes = ", ".join(
        f"{name} {np.dtype(leaf.dtype).name}{list(leaf.shape)}" for name, leaf in job.dataset.spec.items()
    )
    classes = f"; {job.dataset.num_classes} classes" if job.dataset.num_classes else ""
    place = f"streamed: {job.streamed_for}" if job.streamed_for else "resident on the device"
    return f"{job.dataset.name}: {sizes}; {shapes}{classes}; {place}"


def _optimizer(job: Job) -> str:
    """What updates the parameters; "" where a step of a user's own does not take it from the config."""
    if not {"parts", "optimizer"} & set(contract.asked_for(job.builder, NAMES)):
        return ""
    groups = "".join(
        f"; {group['name']}({group['learning_rate']:g}) for {group['paths']}"
        + "".join(f" {key} {group[key]}" for key in ("since", "until") if group[key])
        for group in job.config.param_groups
    )
    return f"{_named(job, 'optimizer')}, schedule {_named(job, 'schedule')}{groups}"


def _replicas(job: Job) -> str:
    """How many members there are, what they differ in, and how they lie in the program."""
    if job.together is None:
        return ""
    members, layout = job.together.members, job.together.layout
    values = {key: list(dict.fromkeys(each.values[key] for each in members)) for key in members[0].values}
    differ = " × ".join(f"{key} {_listed(found)}" for key, found in values.items())
    how = {
        "unrolled": "one after the other in one program, as it has convolutions",
        "vmap": "side by side in one program (vmap), as it has no convolutions",
    }
    spread = f"; {len(members) // layout.mesh.size} on each device" if layout.spread else ""
    return f"{len(members)} members: {differ}; {how[layout.mode]}{spread}"


def _listed(values: Sequence[float]) -> str:
    """ "0 to 7" of whole numbers in a row, else each."""
    if len(values) > 2 and all(value == values[0] + place for place, value in enumerate(values)):
        return f"{values[0]:g} to {values[-1]:g}"
    return ", ".join(f"{value:g}" for value in values)


def _part(job: Job, kind: str) -> str:
    return f"{job.objects[kind]}, given as an object" if kind in job.objects else _named(job, kind)


def _named(job: Job, key: str) -> str:
    """ "cnn(width=64)": the part's name, and the options that are not at their builder's defaults."""
    part, kind = job.config[key], KEYS[key].part
    defaults = {name: option.default for name, option in options_of(kind, part.name).items()} if kind else {}
    chosen = {name: value for name, value in part.items() if name != "name" and value != defaults.get(name, ...)}
    return f"{part.name}({', '.join(f'{name}={value!r}' for name, value in chosen.items())})"


def _remarks(job: Job) -> list[str]:
    own = [kind for kind in ("task", "step") if kind in job.objects or ":" in job.config[kind].name]
    remarks = [f"{kind} {_part(job, kind)}" for kind in own if job.parts is not None]
    if job.config.accumulate > 1 and getattr(job.abstract, "model_state", None):
        remarks.append(
            f"batch statistics are per micro-batch of {job.config.batch_size // job.config.accumulate} examples"
        )
    if "validation" not in job.sources:
        remarks.append("no validation split: nothing chooses a best step")
    elif own and job.config.best not in (job.judged or ()):
        remarks.append(f"no metric {job.config.best!r} on validation (config.best): nothing chooses a best step")
    if job.policy.compute != np.float32 and not {"parts", "dtype"} & set(contract.asked_for(job.builder, NAMES)):
        remarks.append(f"step {job.step_name} does not ask for `dtype`: nothing in it is cast to {job.policy.compute}")
    return remarks
