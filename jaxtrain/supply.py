"""What a step is built of. Its builder names what it wants, as every builder does, and only that is made."""

import dataclasses
import functools
from collections.abc import Callable, Collection, Mapping
from fractions import Fraction
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from ml_collections import ConfigDict

from jaxtrain import config as configs
from jaxtrain import contract, optim, precision
from jaxtrain.config import lookup
from jaxtrain.config.durations import parse_duration
from jaxtrain.data.augment import Augment, chain, to_unit
from jaxtrain.data.sources import Dataset, Spec
from jaxtrain.errors import UserError
from jaxtrain.optim import Optimizer
from jaxtrain.step import Parts, Steps

if TYPE_CHECKING:
    from jaxtrain.model import Model

OF_AN_OPTIMIZER = ("optimizer", "param_groups", "schedule", "clip_norm", "decay_rules", "lr_rules", "frozen")
READERS = {  # key of the config -> the names, one of which gives a step builder what the key sets
    **{key: ("parts",) for key in ("model", "task", "ema", "accumulate", "initialise", "test_time")},
    **{key: ("parts", key) for key in ("augment", "preprocess")},
    **{key: ("parts", "optimizer") for key in OF_AN_OPTIMIZER},
}


@dataclasses.dataclass(frozen=True)
class Supply:
    """By its name here, what a step builder is given where its signature names it."""

    parts: Parts | None  # the config's model, task and optimizer, and the rest of what `supervised` is made of
    spec: Spec  # name -> ShapeDtypeStruct of one example, as the data set holds it
    num_classes: int | None  # of the data set, where it has classes
    augment: Augment  # config.augment, for training
    preprocess: Augment  # config.preprocess, for training and evaluation
    optimizer: Callable[..., Optimizer]  # params -> config.optimizer for them, with its schedule and rules
    dtype: Any  # of the computation


NAMES = lookup.STEP.supplied  # the fields, for those who need not import this module


def steps(given: Supply, builder: Any) -> Steps:
    """init, train, evaluate and predict, of a builder that a config names or that is an object."""
    if isinstance(builder, (str, Mapping, ConfigDict)):
        built = lookup.build(builder, lookup.STEPS, "step", **vars(given))
    else:
        built = builder(**{name: getattr(given, name) for name in contract.asked_for(builder, NAMES)})
    made = contract.checked_steps(built, contract.label(builder))
    return Steps(*map(_traced_once, (made.init, made.train, made.evaluate, made.predict)))


def _traced_once(function: Any) -> Any:
    """The same function, which is part of several programs, and is traced for the first of them only."""
    return function and jax.jit(function, inline=True)


def for_step(
    builder: Any,
    config: ConfigDict,
    dataset: Dataset,
    policy: precision.Policy,
    examples: int,
    *,
    model: Any = None,
    task: Any = None,
    unroll: bool = False,
) -> Supply:
    """What the step of this builder asks for; `examples` are those of an epoch. Nothing is computed, no data read.

    Raises UserError for what does not fit together, and for a key of the config that this step would never read.
    """

    def steps_of(text: str) -> Fraction:
        return parse_duration(text).steps(config.batch_size, examples)

    def optimizer(params: Any, values: Mapping[str, Any] | None = None) -> Optimizer:
        total = parse_duration(config.total).whole_steps(config.batch_size, examples)
        return optim.build(config, params, total, steps_of, values, policy.compute)

    given = Supply(
        parts=None,
        spec=dataset.spec,
        num_classes=dataset.num_classes,
        augment=_chain(config.augment),
        preprocess=_chain(config.preprocess),
        optimizer=optimizer,
        dtype=policy.compute,
    )
    asked = contract.asked_for(builder, NAMES)
    if "parts" in asked:
        return dataclasses.replace(given, parts=_parts(config, given, policy, model, task, unroll))
    _refuse_unread(config, asked, contract.label(builder), model=model, task=task)
    return given


def varied(given: Supply, values: Mapping[str, Any]) -> Supply:
    """The same with traced numbers (float32 []) in the place of the config's: see `optim.build`."""
    optimizer = functools.partial(given.optimizer, values=values)
    if given.parts is None:
        return dataclasses.replace(given, optimizer=optimizer)
    params = jax.eval_shape(functools.partial(_params, given.parts.model, given.parts.example))
    return dataclasses.replace(
        given, optimizer=optimizer, parts=dataclasses.replace(given.parts, optimizer=optimizer(params))
    )


def _parts(config: ConfigDict, given: Supply, policy: precision.Policy, model: Any, task: Any, unroll: bool) -> Parts:
    """The config's model, task and optimizer, or the objects that stand in for them."""
    supplied: dict[str, Any] = {"num_classes": given.num_classes, "dtype": given.dtype}
    if task is None or isinstance(task, (str, Mapping)):
        task = lookup.build(task or config.task, lookup.TASKS, "task", **supplied)
    batch = {name: jax.ShapeDtypeStruct((1, *leaf.shape), leaf.dtype) for name, leaf in given.spec.items()}
    raw = jax.eval_shape(task.inputs, batch)
    example = jax.eval_shape(lambda batch: task.inputs(given.preprocess(None, to_unit(batch))), batch)
    supplied["num_classes"] = getattr(task, "num_outputs", given.num_classes)
    supplied["input_shape"] = tuple(raw.shape[1:]) if hasattr(raw, "shape") else None
    from jaxtrain.model import build_model  # imports flax.nnx, a tenth of a second, and only this needs it

    network = build_model(model if model is not None else config.model, **supplied)
    return Parts(
        model=network,
        task=task,
        optimizer=given.optimizer(jax.eval_shape(lambda: _params(network, example))),
        policy=policy,
        augment=given.augment,
        preprocess=given.preprocess,
        example=example,
        accumulate=config.accumulate,
        unroll=unroll,
        ema=config.ema,
        views=lookup.build(config.test_time, lookup.TEST_TIMES, lookup.TEST_TIME.word),
        halt=config.on_nonfinite != "skip",
    )


def _params(network: "Model", example: Any) -> Any:
    zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), example)
    return network.init(jax.random.key(0, impl="threefry2x32"), zeros)[0]


def _chain(wanted: Any) -> Augment:
    return chain([lookup.build(part, lookup.AUGMENTATIONS, "augmentation") for part in wanted])


def _refuse_unread(config: ConfigDict, asked: Collection[str], step: str, **objects: Any) -> None:
    """Raises UserError for what is set, or given as an object, and would reach nothing that the step asks for."""
    unread = {key: readers for key, readers in READERS.items() if not set(readers) & set(asked)}
    found = [(f"config.{key} is {value!r}", key) for key, value, _ in configs.differing(config, configs.base_config())]
    found += [(f"a {key} is given", key) for key, value in objects.items() if value is not None]
    for what, key in found:
        if readers := unread.get(key.partition(".")[0]):
            raise UserError(
                f"{what}, but step {step} does not ask for {' or '.join(f'`{name}`' for name in readers)}, and would "
                "ignore it; leave it out, or let the step builder name that argument"
            )
