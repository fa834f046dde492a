"""The train step and the evaluation step: pure functions of (state, batch). No jit, no config, no I/O in here."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from jaxtrain import precision
from jaxtrain.data.augment import Augment, fixed_draws, to_unit
from jaxtrain.errors import UserError
from jaxtrain.metrics import Count, Last, Mean, empty, merge
from jaxtrain.optim import Optimizer
from jaxtrain.state import TrainState, counter
from jaxtrain.tasks import Task
from jaxtrain.views import Views, averaged, one_view

if TYPE_CHECKING:  # at run time it would import flax.nnx, which a step of a user's own may not need
    from jaxtrain.model import Model

Batch = Mapping[str, jax.Array]
Metrics = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Parts:
    """What a step is made of. Functions and constants; no arrays, no state."""

    model: "Model"
    task: Task
    optimizer: Optimizer
    policy: precision.Policy
    augment: Augment  # train only
    preprocess: Augment  # train and evaluation, after `augment`
    example: Any  # the model's inputs as ShapeDtypeStructs, with a leading axis of 1
    accumulate: int = 1  # micro-batches a step
    unroll: bool = False  # micro-batches one after the other in the program, not in a compiled loop
    ema: float = 0.0  # decay of the averaged weights, or 0: none
    views: Views = one_view  # of a batch, over which evaluation and prediction average the outputs
    halt: bool = True  # after a non-finite update nothing changes any more, until the loop has dealt with it


@dataclasses.dataclass(frozen=True)
class Steps:
    """What `config.step` builds: a run is `init`, then `train` again and again, with `evaluate` in between.

    The builder is called with its options and with whatever it names of `jaxtrain.supply.Supply`.
    init(key) -> state: any registered dataclass with `step`, `offset` and `key` (TrainState will do).
    train(state, batch) -> (state, metrics): the state has `step` one higher.
    evaluate(state, batch) -> metrics: `batch["mask"]` (bool [B]) is False on rows that only fill up the batch.
    predict(state, batch) -> arrays, rows in the order of the batch; None where there is nothing to predict.
    Metrics are monoids of `jaxtrain.metrics`, or plain scalars, of which the mean is reported.
    """

    init: Callable[[jax.Array], Any]
    train: Callable[[Any, Batch], tuple[Any, Metrics]]
    evaluate: Callable[[Any, Batch], Metrics] | None = None
    predict: Callable[[Any, Batch], dict[str, jax.Array]] | None = None


def supervised(parts: Parts) -> Steps:
    """The usual one: a model, a task, an optimizer."""
    return Steps(
        init=functools.partial(init_state, parts=parts),
        train=functools.partial(train_step, parts=parts),
        evaluate=functools.partial(eval_step, parts=parts),
        predict=functools.partial(predict_step, parts=parts),
    )


def init_state(key: jax.Array, *, parts: Parts) -> TrainState:
    """The state at step 0, a function of the root key alone."""
    example = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), parts.example)
    params, model_state = parts.model.init(jax.random.fold_in(key, 0), example)
    params, model_state = precision.cast((params, model_state), parts.policy.param)
    return TrainState(
        step=counter(),
        offset=counter(),
        key=key,
        params=params,
        model_state=model_state,
        opt_state=parts.optimizer.init(params),
        # A copy: the state is donated leaf by leaf, and no buffer may be given away twice.
        ema=jax.tree.map(jnp.copy, {"params": params, "model_state": model_state}) if parts.ema else (),
        loss_scale=precision.init_loss_scale(parts.policy),
        skipped=counter(),
        skipped_at=counter(-1),
    )


def train_step(state: TrainState, batch: Batch, *, parts: Parts) -> tuple[TrainState, Metrics]:
    """One update from one global batch (leading axis B). The rate applied is `schedule(state.step)`."""
    learning_rate = parts.optimizer.schedule(state.step)
    batch = prepare(batch, parts, state)
    grads, model_state, metrics = gradients(state, batch, parts)
    grads = precision.unscale(grads, state.loss_scale)
    params, opt_state, grad_norm = parts.optimizer.update(
        grads, state.opt_state, state.params, learning_rate, state.step
    )
    finite = jnp.isfinite(grad_norm) & jnp.isfinite(metrics["loss"].total)
    # A float16 gradient that overflows only asks for a smaller scale; it is a fault where none is smaller.
    fault = ~finite & precision.exhausted(state.loss_scale)
    if parts.halt:
        halted = state.skipped_at >= 0
        finite, fault = finite & ~halted, fault & ~halted
    new = dataclasses.replace(
        state,
        params=params,
        model_state=model_state,
        opt_state=opt_state,
        ema=moving_average(state.ema, {"params": params, "model_state": model_state}, parts.ema),
    )
    # A non-finite update leaves everything as it was but the counters. An interval's metrics leave it out too.
    new = _where(finite, new, state)
    metrics = metrics | {"grad_norm": Mean.of(grad_norm), "learning_rate": Last(learning_rate)}
    if "mask" in batch:  # a source that bears damaged examples
        metrics["corrupt"] = Count.of(~batch["mask"])
    metrics = _where(finite, metrics, empty(metrics) | {"learning_rate": Last(learning_rate)})
    first = (state.skipped_at < 0) & fault
    new = dataclasses.replace(
        new,
        step=state.step + 1,
        loss_scale=precision.adjust(state.loss_scale, finite),
        skipped=state.skipped + fault.astype(jnp.int32),
        skipped_at=jnp.where(first, state.step + 1, state.skipped_at),
    )
    return new, metrics | {"skipped": Last(new.skipped), "skipped_at": Last(new.skipped_at)}


def eval_step(state: TrainState, batch: Batch, *, parts: Parts) -> Metrics:
    """Metrics of one batch with the averaged weights where there are any, else the current ones.

    The outputs are averaged over the views of `config.test_time`.
    """
    batch = prepare(batch, parts)
    outputs = _outputs(state, batch, parts)
    return parts.task.metrics(outputs, batch, batch["mask"])


def predict_step(state: TrainState, batch: Batch, *, parts: Parts) -> dict[str, jax.Array]:
    """What the task makes of the model's outputs, averaged as in evaluation, row by row."""
    return parts.task.predict(_outputs(state, prepare(batch, parts), parts))


def prepare(batch: Batch, parts: Parts, state: TrainState | None = None) -> dict[str, jax.Array]:
    """Pictures to [0, 1], augmentation where there is a state that trains, then the common preprocessing."""
    batch = to_unit(batch)
    if state is None:
        return parts.preprocess(None, batch)
    key = state.stream("augment")
    fixed = {"fixed": fixed_draws(state.key, batch["id"])} if "id" in batch else {}
    batch = parts.preprocess(key, parts.augment(key, batch | fixed))
    return {name: array for name, array in batch.items() if name not in fixed}


def gradients(state: TrainState, batch: Batch, parts: Parts) -> tuple[Any, Any, Metrics]:
    """Gradient of the mean loss over the valid rows of the *global* batch, however it is cut into micro-batches.

    Or over their tokens, pixels and so on, where the task counts those.
    """
    mask = batch.get("mask")
    size = jax.tree.leaves(batch)[0].shape[0]
    batch = dict(batch, mask=jnp.ones((size,), bool) if mask is None else mask)
    valid = jnp.maximum(items(parts.task, batch).sum(dtype=jnp.float32), jnp.float32(1))
    dropout = state.stream("dropout")

    def loss(params: Any, model_state: Any, rows: Batch, key: jax.Array) -> tuple[jax.Array, Any]:
        losses, outputs, model_state = forward(params, model_state, rows, key, parts)
        if losses.ndim == 0:
            _refuse_parts_of_a_whole(parts, masked=mask is not None)
            total, metric = losses, Mean.of(losses)
        else:
            whole = Mean.of(losses, rows["mask"])
            total = jnp.where(rows["mask"], losses, 0).sum() / valid
            metric = Mean(whole.total, items(parts.task, rows).sum(dtype=jnp.int32))
        metrics = parts.task.metrics(outputs, rows, rows["mask"]) | {"loss": metric}
        return precision.scale(total, state.loss_scale), (model_state, metrics)

    gradient = jax.grad(loss, has_aux=True)
    if parts.accumulate == 1:
        grads, (model_state, metrics) = gradient(state.params, state.model_state, batch, dropout)
        return grads, model_state, metrics

    def add(carry: Any, micro: Any) -> tuple[Any, None]:
        grads, model_state, metrics = carry
        rows, index = micro
        more, (model_state, new) = gradient(state.params, model_state, rows, jax.random.fold_in(dropout, index))
        return (jax.tree.map(jnp.add, grads, more), model_state, merge(metrics, new)), None

    micro = micro_batches(batch, parts.accumulate)
    first = jax.tree.map(lambda x: x[0], micro)
    shapes = jax.eval_shape(gradient, state.params, state.model_state, first, dropout)[1][1]
    start = (jax.tree.map(jnp.zeros_like, state.params), state.model_state, empty(shapes))
    steps = jnp.arange(parts.accumulate, dtype=jnp.int32)
    (grads, model_state, metrics), _ = jax.lax.scan(
        add, start, (micro, steps), unroll=parts.accumulate if parts.unroll else 1
    )
    return grads, model_state, metrics


def forward(params: Any, model_state: Any, rows: Batch, key: jax.Array, parts: Parts) -> tuple[jax.Array, Any, Any]:
    """(losses, outputs, model_state) in training, of a prepared batch or micro-batch with B rows.

    The losses are [B], or [] for a loss of the whole global batch.
    """
    outputs, model_state = parts.model.apply(params, model_state, parts.task.inputs(rows), key=key, train=True)
    outputs = precision.cast(outputs, parts.policy.output)  # losses in float32, whatever the model computes in
    return parts.task.losses(outputs, rows), outputs, model_state


def items(task: Task, rows: Batch) -> jax.Array:
    """What each row's loss is the sum of, int32 [B]: one thing, or as many as the task counts; none where masked."""
    counts = getattr(task, "counts", None)
    return jnp.where(rows["mask"], jnp.ones(rows["mask"].shape, jnp.int32) if counts is None else counts(rows), 0)


def micro_batches(batch: Batch, parts: int) -> dict[str, jax.Array]:
    """[B, ...] → [A, B/A, ...]: every A-th row together, so that each one lies on all devices as the batch did."""

    def one(x: jax.Array) -> jax.Array:
        x = x.reshape(x.shape[0] // parts, parts, *x.shape[1:])  # [B/A, A, ...]
        return jnp.swapaxes(x, 0, 1)  # [A, B/A, ...]

    return jax.tree.map(one, dict(batch))


def moving_average(average: Any, latest: Any, decay: float) -> Any:
    """decay · average + (1 − decay) · latest on floating leaves; others are taken as they are."""
    if not decay:
        return average

    def one(old: jax.Array, new: jax.Array) -> jax.Array:
        if not jnp.issubdtype(new.dtype, jnp.floating):
            return new
        return old + jnp.asarray(1 - decay, old.dtype) * (new - old)

    return jax.tree.map(one, average, latest)


def _outputs(state: TrainState, batch: Batch, parts: Parts) -> Any:
    weights = state.ema or {"params": state.params, "model_state": state.model_state}

    def outputs(view: Batch) -> Any:
        found, _ = parts.model.apply(
            weights["params"], weights["model_state"], parts.task.inputs(view), key=None, train=False
        )
        return precision.cast(found, parts.policy.output)

    return averaged(outputs, parts.views(batch))


def _where(condition: jax.Array, new: Any, old: Any) -> Any:
    def one(a: jax.Array, b: jax.Array) -> jax.Array:
        return a if a is b else jnp.where(condition, a, b)

    return jax.tree.map(one, new, old)


def _refuse_parts_of_a_whole(parts: Parts, masked: bool) -> None:
    if masked:
        raise UserError(
            f"config.data.max_corrupt leaves damaged examples out, but task {type(parts.task).__name__} has one loss "
            "of the whole global batch, out of which none can be left; set config.data.max_corrupt=0"
        )
    if parts.accumulate > 1:
        raise UserError(
            f"config.accumulate is {parts.accumulate}, but task {type(parts.task).__name__} has one loss of the "
            "whole global batch, which cannot be summed over micro-batches; set config.accumulate=1"
        )
