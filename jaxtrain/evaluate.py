"""Exact evaluation: every example of a split counts once, on any batch size and device count.

Where the source bears damaged examples, those count as `corrupt`, in the open.
"""

import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable, Generator, Mapping
from fractions import Fraction
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from jaxtrain import sharding
from jaxtrain.data.feed import Feed
from jaxtrain.data.resident import Kept, obstacle
from jaxtrain.data.sources import Source
from jaxtrain.errors import JaxtrainError
from jaxtrain.machine import compiling, distributed
from jaxtrain.metrics import Count, as_monoids, compute, empty, merge

IN_FLIGHT = 8  # batches handed to the device ahead of it, at most: more would only hold memory

EvalStep = Callable[[Any, Any], dict[str, Any]]  # (state, batch) -> metrics


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """One named evaluation. `name` is the prefix of its values in every report."""

    name: str
    source: Source
    step: EvalStep | None  # None: a function of the user's instead
    every: Fraction | None  # interval in steps; None: only when asked
    function: Callable[..., dict[str, float | str]] | None = None  # (predict, source) -> values


@dataclasses.dataclass(frozen=True)
class Evaluator:
    """How evaluations run: on which mesh, in batches of how many rows, read how."""

    mesh: Mesh
    batch_size: int
    check: Callable[[dict[str, np.ndarray]], None]  # refuses bad labels
    loader: str = "auto"
    threads: int = 0
    keep: bool = False  # batches stay on the device for the next time, where they fit
    kept: dict[int, Kept] = dataclasses.field(default_factory=dict)  # by the identity of their source

    def batches(self, source: Source) -> Generator[dict[str, jax.Array], None, None]:
        """The batches of `feed`; where they are kept, those of the first time."""
        if self.keep and not obstacle(source, self.mesh):
            yield from self.kept.setdefault(id(source), Kept(functools.partial(self.feed, source)))
            return
        with self.feed(source) as batches:
            yield from batches

    def feed(self, source: Source) -> Feed:
        """The whole source in order, the last batch filled up with rows that `mask` excludes."""
        rows = self.mesh.shape["data"]
        size = math.ceil(min(self.batch_size, len(source)) / rows) * rows
        return Feed(
            source,
            functools.partial(in_order, batch_size=size, size=len(source)),
            sharding.over_batch(self.mesh),
            stop=math.ceil(len(source) / size),
            check=self.check,
            kind=self.loader,
            threads=self.threads,
        )

    def __call__(
        self,
        evaluation: Evaluation,
        state: Any,
        predict: Callable[[dict[str, np.ndarray]], dict[str, np.ndarray]] | None = None,
        interrupt: Callable[[], None] = lambda: None,
    ) -> dict[str, Any]:
        """{"<name>/<metric>": value}, numbers; of a function of the user's also texts.

        `interrupt` may raise to leave: it is called before each batch and after them, or once before such a function.

        Of several processes all must call it; a user's function runs in each, and process 0's values count.
        """
        if evaluation.function is not None:
            interrupt()
            values: Mapping[str, Any] = evaluation.function(predict, evaluation.source)
        else:
            values = self._exact(evaluation, state, interrupt)
        values = distributed.from_first(dict(values))  # what a user's function found may differ
        return {f"{evaluation.name}/{name}": value for name, value in values.items()}

    def _exact(self, evaluation: Evaluation, state: Any, interrupt: Callable[[], None]) -> dict[str, float]:
        assert evaluation.step is not None
        sums: Any = None
        with contextlib.closing(self.batches(evaluation.source)) as batches:
            for number, batch in enumerate(batches, start=1):
                interrupt()
                sums = accumulate(evaluation.step, state, sums, batch)
                if number % IN_FLIGHT == 0:
                    jax.block_until_ready(sums)
        interrupt()
        values = compute(jax.device_get(sums))
        counted = int(values.pop("examples")) + int(values["corrupt"])
        if counted != len(evaluation.source):
            raise JaxtrainError(f"evaluation {evaluation.name} counted {counted} of {len(evaluation.source)} examples")
        return values if values["corrupt"] else {name: value for name, value in values.items() if name != "corrupt"}


def in_order(batch: int, *, batch_size: int, size: int) -> np.ndarray:
    """Ids of batch number `batch`, int32 [batch_size]; -1 where there is no example left."""
    ids = np.arange(batch * batch_size, (batch + 1) * batch_size, dtype=np.int64)
    return np.where(ids < size, ids, -1).astype(np.int32)


def accumulate(step: EvalStep, state: Any, sums: Any, batch: Any) -> Any:
    """`sums` and the metrics of one batch more; `sums` is None at first. One program per evaluation step."""
    mesh = batch["mask"].sharding.mesh
    zeros, add = _programs(mesh)
    if sums is None:
        sums = zeros(step, sharding.replicated(mesh), state, batch)
    return add(step, state, sums, batch)


@functools.cache
def _programs(mesh: Mesh) -> tuple[Any, Any]:
    add = jax.jit(_accumulate, static_argnums=0, donate_argnums=2, compiler_options=compiling.options(mesh))
    return jax.jit(_zeros, static_argnums=(0, 1)), add


def _metrics(step: EvalStep, state: Any, batch: Any) -> dict[str, Any]:
    left_out = (batch["id"] >= 0) & ~batch["mask"]  # damaged, where the source bears that
    return as_monoids(step(state, batch)) | {"examples": Count.of(batch["mask"]), "corrupt": Count.of(left_out)}


def _zeros(step: EvalStep, everywhere: NamedSharding, state: Any, batch: Any) -> dict[str, Any]:
    zeros = empty(jax.eval_shape(functools.partial(_metrics, step), state, batch))
    # Placed as `_accumulate` places its own, which would be compiled a second time for them.
    return jax.lax.with_sharding_constraint(zeros, everywhere)


def _accumulate(step: EvalStep, state: Any, sums: Any, batch: Any) -> Any:
    return merge(sums, _metrics(step, state, batch))
