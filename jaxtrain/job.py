"""From a config to what a run consists of: mesh, data, model, task, optimizer, steps. No state yet, no data read."""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping
from fractions import Fraction
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from ml_collections import ConfigDict

from jaxtrain import contract, dispatch, initialisers, members, metrics, precision, sharding, supply
from jaxtrain.config import checked, lookup, parse_duration
from jaxtrain.data import damage, order, resident, sources
from jaxtrain.data.augment import to_unit
from jaxtrain.data.feed import Feed
from jaxtrain.data.sources import Dataset, Source
from jaxtrain.errors import UserError
from jaxtrain.evaluate import Evaluation, Evaluator
from jaxtrain.loop import judge
from jaxtrain.machine import compiling, devices
from jaxtrain.members import Together
from jaxtrain.step import Parts, Steps
from jaxtrain.supply import Supply

ROLES = ("train", "validation", "test")


@dataclasses.dataclass(frozen=True)
class Job:
    """Everything a run needs but its state. `train.build(config)` gives one to a notebook."""

    config: ConfigDict
    mesh: Mesh
    dataset: Dataset
    sources: Mapping[str, Source]  # by role
    policy: precision.Policy
    supply: Supply  # what the step is built of
    builder: Any  # of the step: a part of the config, or an object
    steps: Steps
    total_steps: int
    steps_per_epoch: Fraction
    abstract: Any  # the state as ShapeDtypeStructs with shardings
    objects: Mapping[str, str] = dataclasses.field(default_factory=dict)  # parts given as objects: kind → its name
    together: Together | None = None  # where config.replicas trains several in one program

    def __repr__(self) -> str:
        return f"Job({self.dataset.name}, {self.total_steps:,} steps of {self.config.batch_size:,} examples)"

    def initial(self) -> Any:
        """The state at step 0, on the mesh, `config.initialise` applied. Reads what of the data that asks for."""
        if self.together is not None:
            # Each by the program of its single run: another one might round otherwise.
            return self.together.whole([self.together.alone(index).initial() for index in range(len(self.seeds))])
        shardings = jax.tree.map(lambda leaf: leaf.sharding, self.abstract)
        # It runs once: on a CPU, optimising it takes XLA seconds that it never gives back.
        hurried = {"xla_backend_optimization_level": 0} if self.mesh.devices.flat[0].platform == "cpu" else {}
        with precision.scope(self.policy):
            drawn = jax.jit(_init, static_argnums=0, out_shardings=shardings, compiler_options=hurried)(
                self.steps.init, np.uint32(self.config.seed)
            )
            return self._initialised(drawn) if self.config.initialise else drawn

    def _initialised(self, state: Any) -> Any:
        """The state with the parameters that `config.initialise` sets, also where they are averaged."""
        paths, structure = sharding.paths(self.abstract.params)
        drawn = dict(zip(paths, jax.tree.leaves(sharding.gathered(self.mesh, state.params)), strict=True))
        found = drawn | initialisers.applied(self.config.initialise, drawn, self.first_examples)
        params = jax.tree.unflatten(structure, [found[path] for path in paths])
        place = jax.tree.map(lambda leaf: leaf.sharding, self.abstract)
        new = {"params": jax.device_put(params, place.params)}
        if getattr(state, "ema", ()):
            new["ema"] = state.ema | {"params": jax.device_put(params, place.ema["params"])}
        assert self.parts is not None  # else the config is refused
        # An optimizer may remember the parameters that it began with.
        new["opt_state"] = jax.jit(self.parts.optimizer.init, out_shardings=place.opt_state)(new["params"])
        return dataclasses.replace(state, **new)

    def first_examples(self, count: int) -> dict[str, np.ndarray]:
        """The first `count` of the training split as a model sees them: to [0, 1], preprocessed, not augmented."""
        source = self.sources["train"]
        batch = source.get(np.arange(min(count, len(source))))
        kept = np.flatnonzero(batch.get("mask", np.ones(len(batch[next(iter(batch))]), bool)))  # not the damaged ones
        batch = {name: array[kept] for name, array in batch.items()}
        with jax.default_device(self.mesh.local_devices[0]):  # one of the run's own, of several that there may be
            return jax.device_get(self.supply.preprocess(None, to_unit(jax.tree.map(jnp.asarray, batch))))

    @property
    def seeds(self) -> tuple[int, ...]:
        """Of each member; of a single run its own."""
        found = self.together.members if self.together else ()
        return tuple(int(each.values.get("seed", self.config.seed)) for each in found) or (self.config.seed,)

    @property
    def rows(self) -> int:
        """Of a training batch: of all members."""
        return self.config.batch_size * len(self.seeds)

    @functools.cached_property
    def steps_per_dispatch(self) -> int:
        """1: a program of one step; more: a compiled loop of at most so many."""
        chosen = self.config.steps_per_dispatch
        if chosen != "auto":
            return int(chosen)
        if self.together is not None:
            return self.together.alone(0).steps_per_dispatch  # as the single run does, whose bits it has
        return dispatch.steps_per_dispatch(self.traced[0], self.mesh.devices.flat[0].platform, self.mesh.shape["data"])

    @functools.cached_property
    def streamed_for(self) -> str:
        """Why training batches come from the host; "" where the set lies on the device, and they are gathered there.

        Raises UserError for a set that should and cannot.
        """
        wanted = self.config.data.resident
        if wanted == "no":
            return "config.data.resident is 'no'"
        obstacle = resident.obstacle(self.sources["train"], self.mesh)
        if wanted == "yes" and obstacle:
            raise UserError(f"config.data.resident is 'yes', but {obstacle}; set it to 'auto' or 'no'")
        if wanted == "auto" and self.total_steps < self.steps_per_epoch:
            return "the run is shorter than an epoch"
        return obstacle

    @functools.cached_property
    def plan(self) -> order.Shuffled:
        """Data position → the ids of its batch."""
        config, size = self.config, len(self.sources["train"])
        return order.Shuffled(self.seeds, config.batch_size, size, self.examples_in_epoch)

    @functools.cached_property
    def columns(self) -> dict[str, jax.Array]:
        """The training set on every device, arrays [N, ...]; uploaded when first asked for."""
        config = self.config
        return resident.upload(self.sources["train"], self.mesh, self.check, threads=config.threads, kind=config.loader)

    def batches(self, start: int = 0, stop: int | None = None, *, stack: int = 0) -> Feed:
        """Training batches of steps start, start + 1, …, as sharded arrays. Close it, or use `with`.

        With `stack` n, of n steps at once, arrays [n, B, ...].
        """
        config, source = self.config, self.sources["train"]
        varies = isinstance(source, sources.VaryingSource)
        return Feed(
            source.varied(self.seeds[0]) if isinstance(source, sources.VaryingSource) else source,
            self.plan,
            sharding.over_batch(self.mesh),
            start=start,
            stop=stop,
            prefetch=config.prefetch,
            varies=varies,
            stack=stack,
            check=self.check,
            kind=config.loader,
            threads=config.threads,
        )

    @property
    def examples_in_epoch(self) -> int:
        """Of training: all, or as many as fill whole batches where `config.drop_remainder` asks for that."""
        config = self.config
        return order.examples_in_epoch(len(self.sources["train"]), config.batch_size, config.drop_remainder)

    @property
    def abstract_batch(self) -> dict[str, jax.ShapeDtypeStruct]:
        """A training batch as ShapeDtypeStructs: what the source gives, and what the feed adds."""
        spec = dict(self.dataset.spec) | {name: jax.ShapeDtypeStruct((), np.int32) for name in ("id", "epoch")}
        if damage.of(self.sources["train"]):
            spec["mask"] = jax.ShapeDtypeStruct((), np.bool_)
        size, where = self.rows, sharding.over_batch(self.mesh)
        return {
            name: jax.ShapeDtypeStruct((size, *leaf.shape), leaf.dtype, sharding=where) for name, leaf in spec.items()
        }

    def left_out(self) -> list[str]:
        """One line for each damaged example that was left out since the last call."""
        sources = [*self.sources.values(), *(evaluation.source for evaluation in self.evaluations.values())]
        borne = {id(found): found for source in sources if (found := damage.of(source))}
        return [line for found in borne.values() for line in found.news()]

    def steps_in(self, text: str) -> Fraction:
        """A duration such as "2ep" in steps."""
        return parse_duration(text).steps(self.config.batch_size, self.examples_in_epoch)

    @functools.cached_property
    def step(self) -> Callable[[Any, Any], tuple[Any, Any]]:
        """The train step, jitted, its state donated: `state, metrics = job.step(state, batch)`."""
        jitted = jax.jit(self.steps.train, donate_argnums=0, compiler_options=compiling.options(self.mesh))

        def step(state: Any, batch: Any) -> tuple[Any, Any]:
            with precision.scope(self.policy):
                return jitted(state, batch)

        return step

    @functools.cached_property
    def traced(self) -> tuple[Any, dict[str, Any]]:
        """One train step: its jaxpr, and its metrics as ShapeDtypeStructs.

        Raises UserError for a step that breaks its contract.
        """
        with precision.scope(self.policy):
            return contract.traced(self.steps, self.step_name, self.abstract, self.abstract_batch)

    @property
    def outcome(self) -> dict[str, Any]:
        """The metrics of one train step as ShapeDtypeStructs."""
        return self.traced[1]

    def rehearse(self) -> None:
        """Raises UserError for a step or evaluation that cannot be made, or a best step that nothing measures: what
        can be known before anything is computed or written."""
        _ = self.outcome, self.streamed_for, self.evaluations
        if key := judge.key_that_chooses(self.config):
            if self.judged is None:
                function = f"evaluate function in step {self.step_name}"
                lacking = function if "validation" in self.sources else "validation split"
                raise UserError(f"config.{key} is {self.config[key]!r}, but there is no {lacking} to tell what is best")
            judge.refuse_unknown_metric(self.config, self.judged)

    @functools.cached_property
    def judged(self) -> list[str] | None:
        """What the step measures on validation; None where it does not."""
        if self.steps.evaluate is None or "validation" not in self.sources:
            return None
        mask = jax.ShapeDtypeStruct((self.rows,), np.bool_, sharding=sharding.over_batch(self.mesh))
        with precision.scope(self.policy):
            found = jax.eval_shape(self.steps.evaluate, self.abstract, self.abstract_batch | {"mask": mask})
            return metrics.names(found)

    @property
    def parts(self) -> Parts | None:
        """Model, task, optimizer and so on, where the step is made of them."""
        return self.supply.parts

    @property
    def step_name(self) -> str:
        return self.objects.get("step", self.config.step.name)

    @functools.cached_property
    def evaluator(self) -> Evaluator:
        """Runs the evaluations of this job."""
        config = self.config
        size = config.eval_batch_size or config.batch_size
        loader = config.loader
        if loader == "auto" and not self.streamed_for:
            loader = "threads"  # what is read once needs no TensorFlow, whose import takes seconds
        return Evaluator(self.mesh, size, self.check, loader, config.threads, keep=not self.streamed_for)

    def blamed(self, state: Any, step: int) -> tuple["Job", Any]:
        """(job, state) to study the first update left out at `step` with: of several members, those of the one."""
        if self.together is None:
            return self, state
        index = int(np.argmax(sharding.gathered(self.mesh, state.members.skipped_at) == step))
        return self.together.alone(index), self.together.state(state, index)

    def check(self, batch: dict[str, np.ndarray]) -> None:
        """Refuses what the task cannot learn from, such as labels out of range."""
        if self.parts is not None:
            getattr(self.parts.task, "check", lambda batch: None)(batch)

    @functools.cached_property
    def evaluations(self) -> dict[str, Evaluation]:
        """By name: "eval" on validation, "test" on test, and those of `config.evals` as "eval_<name>"."""
        return dict(_evaluations(self))

    def evaluate(self, name: str, state: Any, interrupt: Callable[[], None] = lambda: None) -> dict[str, float]:
        """The values of one named evaluation. A user's function also gets `job` and `state` where it names them.

        Of several members it is called for each by itself.
        """
        if self.together and self.evaluations[name].function is not None:
            return self.together.evaluate(name, state, interrupt)
        predict, found = functools.partial(self.predict, state), self.evaluations[name]
        if found.function is not None:
            known, takes = {"job": self, "state": state}, lookup.parameters(found.function)
            given = {each: known[each] for each in known if each in takes}
            found = dataclasses.replace(found, function=functools.partial(found.function, **given))
        with precision.scope(self.policy):
            return self.evaluator(found, state, predict, interrupt)

    def predict(self, state: Any, batch: Mapping[str, Any] | Any) -> dict[str, np.ndarray]:
        """The task's predictions for raw inputs: a dict of arrays [N, ...], or the pictures alone; any N.

        Of several members, those of each: arrays [R, N, ...].

        Of several processes all must call it with the same inputs, and get all predictions.
        """
        if self.steps.predict is None:
            raise UserError(f"step {self.step_name} brings no predict function")
        source = contract.inputs(batch, self.dataset.spec)
        rows = []
        reader = dataclasses.replace(self.evaluator, check=lambda batch: None)
        call = _caller(self.mesh)
        with precision.scope(self.policy), reader.feed(source) as batches:
            for part in batches:
                rows.append(sharding.gathered(self.mesh, call(self.steps.predict, state, part)))
        found = {key: np.concatenate([row[key] for row in rows])[: len(source)] for key in rows[0]}
        return {key: np.moveaxis(array, 1, 0) for key, array in found.items()} if self.together else found


def build(config: ConfigDict, *, model: Any = None, task: Any = None, data: Any = None, step: Any = None) -> Job:
    """The job that a checked config describes. Raises UserError for whatever does not fit together.

    Objects given here stand in for the config's parts: a Flax NNX class or a `Model`; a task; a `Dataset`, or
    arrays for `sources.from_arrays`; a step builder, a function of any fields of `Supply` by name that returns `Steps`.
    """
    config = checked(config)
    found = devices.select(config)
    mesh = sharding.make_mesh(found, config.mesh)
    if not members.are_spread(config, mesh):
        _refuse_uneven(config, mesh)
    policy = precision.choose(config.precision, found[0].platform)
    with precision.scope(policy):
        return _built(config, mesh, policy, model, task, data, step)


def _built(
    config: ConfigDict, mesh: Mesh, policy: precision.Policy, model: Any, task: Any, data: Any, step: Any
) -> Job:
    platform = mesh.devices.flat[0].platform
    dataset = dataset_of(config, data)
    roles = dict(dataset.open())
    if "train" not in roles:
        raise UserError(f"data set {dataset.name} has no training split")
    examples = order.examples_in_epoch(len(roles["train"]), config.batch_size, config.drop_remainder)
    unroll = platform == "cpu"  # XLA runs convolutions in a compiled loop ten times slower there
    builder = config.step if step is None else step
    made = supply.for_step(builder, config, dataset, policy, examples, model=model, task=task, unroll=unroll)
    if made.parts is None and damage.of(roles["train"]):
        raise UserError(
            f"config.data.max_corrupt masks damaged examples, and step {contract.label(builder)} would train on them "
            "(it does not ask for `parts`); set config.data.max_corrupt=0 and mend the data set"
        )
    steps = supply.steps(made, builder)
    abstract = abstract_state(steps, contract.label(builder), mesh, config.sharding_rules)
    given = {"model": model, "task": task, "data": data, "step": step}
    job = Job(
        config=config,
        mesh=mesh,
        dataset=dataset,
        sources=roles,
        policy=policy,
        supply=made,
        builder=builder,
        steps=steps,
        total_steps=parse_duration(config.total).whole_steps(config.batch_size, examples),
        steps_per_epoch=Fraction(examples, config.batch_size),
        abstract=abstract,
        objects={kind: contract.label(value) for kind, value in given.items() if value is not None},
    )
    if config.replicas == 1:
        return job

    def supplied(other: ConfigDict) -> Supply:
        return supply.for_step(builder, other, dataset, policy, examples, model=model, task=task, unroll=unroll)

    return members.together(job, supplied)


def dataset_of(config: ConfigDict, data: Any = None) -> Dataset:
    """The data set, or a synthetic one of the same shapes where the config asks for that."""
    if isinstance(data, Dataset):
        return data
    if data is not None:
        return sources.from_arrays(data)
    dataset = lookup.build_of(lookup.DATASET, config.data)
    if config.synthetic == "yes" or (config.synthetic == "if_absent" and not dataset.present()):
        return sources.synthetic(dataset)
    return dataset


def abstract_state(steps: Steps, name: str, mesh: Mesh, rules: sharding.Rules) -> Any:
    """The state's shapes, dtypes and shardings. Raises UserError for a state that no run can carry."""
    shapes = jax.eval_shape(functools.partial(_init, steps.init), np.uint32(0))
    contract.refuse_incomplete_state(name, shapes)
    shardings = sharding.of_state(mesh, shapes, rules)
    return jax.tree.map(
        lambda leaf, where: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=where), shapes, shardings
    )


def _evaluations(job: Job) -> Iterator[tuple[str, Evaluation]]:
    config = job.config

    def every(text: str) -> Fraction | None:
        return job.steps_in(text) if text else None

    step = job.steps.evaluate  # a step of a user's own may bring none
    if step is not None and "validation" in job.sources:
        yield "eval", Evaluation("eval", job.sources["validation"], step, every(config.eval_every))
    if step is not None and "test" in job.sources:
        yield "test", Evaluation("test", job.sources["test"], step, None)
    for name, wanted in config.evals.items():
        name = f"eval_{name}"
        yield name, _named(job, name, wanted, every(wanted.get("every", config.eval_every)))


def _named(job: Job, name: str, wanted: Mapping[str, Any], every: Fraction | None) -> Evaluation:
    source = wanted.get("source", "validation")
    if isinstance(source, str) and source in ROLES:
        if source not in job.sources:
            raise UserError(f"evaluation {name} asks for the {source} split, which {job.dataset.name} lacks")
        found = job.sources[source]
    else:
        other = lookup.build_of(lookup.DATASET, source).open()
        found = other.get("test") or other.get("validation") or other["train"]
    if "fn" in wanted:
        function = lookup.resolve(wanted["fn"], lookup.EVALUATIONS, "evaluation function")
        return Evaluation(name, found, None, every, function)
    if "task" in wanted or "test_time" in wanted:
        step = _with_others(job, name, wanted).evaluate
        return Evaluation(name, found, job.together.evaluation(step) if job.together else step, every)
    if job.steps.evaluate is None:
        raise UserError(f"evaluation {name} has no fn, and step {job.step_name} brings no evaluate function")
    return Evaluation(name, found, job.steps.evaluate, every)


def _with_others(job: Job, name: str, wanted: Mapping[str, Any]) -> Steps:
    """The same step over another task, or other views of the pictures."""
    if job.parts is None:
        word = "task" if "task" in wanted else "test_time"
        raise UserError(f"evaluation {name} has a {word}, and step {job.step_name} is not made of one; give it a fn")
    parts, supplied = job.parts, {"num_classes": job.dataset.num_classes, "dtype": job.supply.dtype}
    if "task" in wanted:
        parts = dataclasses.replace(parts, task=lookup.build(wanted["task"], lookup.TASKS, "task", **supplied))
    if "test_time" in wanted:
        views = lookup.build(wanted["test_time"], lookup.TEST_TIMES, lookup.TEST_TIME.word)
        parts = dataclasses.replace(parts, views=views)
    return supply.steps(dataclasses.replace(job.supply, parts=parts), job.builder)


def _init(init: Callable[[jax.Array], Any], seed: jax.Array) -> Any:
    return init(jax.random.key(seed, impl="threefry2x32"))


@functools.cache
def _caller(mesh: Mesh) -> Any:
    """The function that it is given first, compiled and called with the rest."""
    return jax.jit(_call, static_argnums=0, compiler_options=compiling.options(mesh))


def _call(function: Callable[..., Any], *args: Any) -> Any:
    return function(*args)


def _refuse_uneven(config: ConfigDict, mesh: Mesh) -> None:
    rows = config.accumulate * mesh.shape["data"]
    if config.batch_size % rows:
        lower = config.batch_size // rows * rows
        nearest = " or ".join(str(size) for size in (lower, lower + rows) if size)
        raise UserError(
            f"config.batch_size is {config.batch_size}; it does not divide over {mesh.shape['data']} devices"
            + (f" × {config.accumulate} micro-batches" if config.accumulate > 1 else "")
            + f"; take {nearest}"
        )
