"""What a run leaves in one's hands: weights that predict, the history, and where things are."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from ml_collections import ConfigDict

from jaxtrain.config import own_names
from jaxtrain.data import sources
from jaxtrain.data.sources import Dataset
from jaxtrain.errors import UserError
from jaxtrain.job import Job, build
from jaxtrain.loop.advance import abstract_sums
from jaxtrain.storage import workdir
from jaxtrain.storage.checkpoint import Checkpoints
from jaxtrain.storage.mirror import fetched

if TYPE_CHECKING:
    from jaxtrain.model import Model


@dataclasses.dataclass(frozen=True, repr=False)
class Trained:
    """A model with its weights."""

    job: Job
    state: Any

    @property
    def config(self) -> ConfigDict:
        return self.job.config

    @property
    def model(self) -> "Model":
        """Raises UserError where a step of a user's own makes its networks itself."""
        if self.job.parts is None:
            raise UserError(f"step {self.job.step_name} is not made of config.model; its networks are its own")
        return self.job.parts.model

    @property
    def weights(self) -> dict[str, Any]:
        """{"params", "model_state"} that evaluation uses: the averaged ones where there are any; dicts of arrays.

        Raises UserError where a step of a user's own keeps them elsewhere, and for several members.
        """
        if self.job.together is not None:
            raise UserError(f"there are {len(self.job.together.members)} members, each with its own: .member(0).params")
        if not hasattr(self.state, "params"):
            raise UserError(f"the state of step {self.job.step_name} has no `params`; look into .state itself")
        own = {"params": self.state.params, "model_state": getattr(self.state, "model_state", {})}
        return getattr(self.state, "ema", ()) or own

    @property
    def params(self) -> Any:
        """Those of `weights`."""
        return self.weights["params"]

    @property
    def class_names(self) -> tuple[str, ...]:
        return self.job.dataset.class_names

    def predict(self, inputs: Mapping[str, Any] | Any) -> dict[str, np.ndarray]:
        """Predictions for raw inputs as the data set holds them (for pictures: uint8 [N, H, W, C], any N).

        For classification: {"label": int32 [N], "probabilities": float32 [N, classes]}. Raises UserError for
        inputs of another shape or kind than those of the training. Of R members (config.replicas): those of each,
        [R, N, ...].
        """
        return self.job.predict(self.state, inputs)

    def member(self, index: int) -> "Trained":
        """One member of a run of several, as if it had been trained alone: its config, its state.

        `train.run(member.config, state=member.state)` carries it on. Raises UserError where there is no such member.
        """
        together = self.job.together
        if together is None or not 0 <= index < len(together.members):
            there = f"members 0 to {len(together.members) - 1}" if together else "no members (config.replicas is 1)"
            raise UserError(f"there is no member {index!r}: the run has {there}")
        return Trained(together.alone(index), together.state(self.state, index))

    def only(self, index: int | None) -> "Trained":
        """What a command goes on with: the member asked for, or the run itself where it has none.

        Raises UserError where there are several and none was asked for.
        """
        if index is not None or self.job.together is None:
            return self if index is None else self.member(index)
        names = ", ".join(f"{number}: {name}" for number, name in enumerate(self.job.together.names[:4]))
        raise UserError(
            f"the run has {len(self.job.together.members)} members ({names}, …); choose one with --member=0"
        )

    def __repr__(self) -> str:  # what a notebook shows: not the arrays
        return f"{type(self).__name__}({', '.join(self._facts())})"

    def _facts(self) -> list[str]:
        return [f"step {int(self.state.step):,}"]


@dataclasses.dataclass(frozen=True, repr=False)
class Result(Trained):
    """How a run ended."""

    history: list[dict[str, float]]  # what metrics.jsonl holds: one dict a report, each with "step"
    metrics: dict[str, float]  # the last value of each evaluation
    workdir: Path | None
    exit_code: int  # 0; 130 or 143 where a signal ended the run

    def _facts(self) -> list[str]:
        step, total = int(self.state.step), self.job.total_steps
        shown = [f"{name} {value:.4g}" for name, value in self.metrics.items() if name.endswith(("/accuracy", "/loss"))]
        where = [f"workdir {str(self.workdir)!r}"] if self.workdir else []
        return [f"step {step:,} of {max(step, total):,}", *shown, *where]


def load(folder: str | Path, *, checkpoint: int | None = None, trust: bool = False, **objects: Any) -> Trained:
    """Model, weights and config of a workdir (folder or URL), ready to predict; the data set is not needed.

    `checkpoint` is the step of the one to take, by default the newest good one. Parts that were objects in the
    notebook that trained them (`model`, `task`, `step`) are given again by keyword.

    A workdir is data: it runs no code. Where its config names modules outside jaxtrain ("my_lab.nets:unet"), they are
    imported with `trust=True` only. Raises UserError where that is so, and where something is missing.
    """
    path = fetched(folder)
    record = workdir.read(path)
    if record is None:
        raise UserError(f"{path} is not a workdir: it holds no config.json")
    missing = [name for name in record.objects if name not in objects and name != "data"]
    if missing:
        names = ", ".join(f"{name}=…" for name in missing)
        raise UserError(f"the run in {path} was given {', '.join(missing)} as objects; load(workdir, {names})")
    if not trust and (foreign := sorted(own_names(record.config))):
        raise UserError(
            f"the run in {path} is made of {', '.join(foreign)}, code outside jaxtrain, which is only imported if you "
            "trust who wrote the workdir: load(workdir, trust=True), on the command line --trust"
        )
    spec = Dataset(
        name=str(record.config.data.name),
        spec=record.spec,
        num_classes=record.num_classes,
        class_names=record.class_names,
        open=dict,
        sizes=record.sizes,
    )
    config = record.config.copy_and_resolve_references()
    with config.unlocked():
        config.precision = record.precision
        # Loading asks for no machine: whatever is here will do.
        config.platform, config.devices, config.mesh, config.sharding_rules = "", 1, (("data", -1),), ()
    # A stand-in of the same shapes: the data itself is not needed, and may be on another machine.
    job = build(config, **objects | {"data": sources.synthetic(spec)})
    checkpoints = Checkpoints(path / "checkpoints")
    chosen = checkpoints.latest() if checkpoint is None else checkpoint
    if chosen is None:
        raise UserError(f"{path} holds no checkpoint")
    wanted = {"state": job.abstract, "sums": abstract_sums(job)}
    return Trained(job, checkpoints.restore(chosen, wanted)["state"])
