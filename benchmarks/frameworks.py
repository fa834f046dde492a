"""Steps a second of a network so small that a step is nothing but overhead, in several people's training loops.

Ours is a whole run: order, feed, metrics, reports. Against Keras' `fit` on JAX, the loop of NNX's tutorials and
PyTorch's usual one. Where Keras or PyTorch is not installed, a line says so instead.
"""

import importlib.util
import os
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from statistics import median
from typing import Any, Literal

import jax
import numpy as np
import optax
from flax import nnx

from benchmarks.table import Row
from benchmarks.turns import interleaved, ratio
from jaxtrain import train
from jaxtrain.config import base_config
from jaxtrain.data import sources

ROUNDS, STEPS = 5, 5000
INPUTS, HIDDEN, CLASSES, BATCH = 64, 128, 10, 64
RATE = 1e-3
FUSED = 32  # steps a dispatch, in the last comparison
Run = Callable[[int], None]  # trains so many steps, from where it was or anew


def measure(rounds: int = ROUNDS, steps: int = STEPS) -> Iterator[Row]:
    """An MLP of 64, 128 and 10 with AdamW, 64 examples a step. Start-up and compilation are cancelled out."""
    runs: dict[str, Run] = {
        "ours": our_run(1),
        "ours fused": our_run(FUSED),
        "ours by default": our_run("auto"),
        "nnx": nnx_run(),
    }
    for library, made in (
        ("keras", {"keras": partial(keras_run, 1), "keras fused": partial(keras_run, FUSED)}),
        ("torch", {"torch": torch_run}),
    ):
        if importlib.util.find_spec(library):
            runs |= {name: make() for name, make in made.items()}
        else:
            print(f"tiny MLP ÷ {library}: skipped, {library} is not installed", file=sys.stderr)
    seconds = interleaved({name: partial(_step_seconds, run, steps) for name, run in runs.items()}, rounds)
    for ours, theirs, aim, label in (
        ("ours", "keras", 3.0, "Keras fit on JAX, one step a dispatch each"),
        ("ours fused", "keras fused", 1.5, f"Keras fit on JAX, {FUSED} steps a dispatch each"),
        ("ours by default", "nnx", 8.0, "a loop of nnx.jit, ours dispatched as a run does by default"),
        ("ours", "nnx", 8.0, "a loop of nnx.jit, one step a dispatch"),
        ("ours by default", "torch", 4.0, "PyTorch eager, ours dispatched as a run does by default"),
        ("ours", "torch", 4.0, "PyTorch eager, one step a dispatch"),
    ):
        if theirs in seconds:
            detail = f"{1 / median(seconds[ours]):,.0f}/s ÷ {1 / median(seconds[theirs]):,.0f}/s"
            name = f"tiny MLP: steps/s ÷ {label}"
            yield Row(name, ratio(seconds[theirs], seconds[ours]), aim, detail, at_least=True)


def _step_seconds(run: Run, steps: int) -> float:
    """Of `steps` more of them: the longer run less the shorter one."""
    spent = []
    for number in (10, 10 + steps):
        began = time.perf_counter()
        run(number)
        spent.append(time.perf_counter() - began)
    return (spent[1] - spent[0]) / steps


def _examples(batches: int = 8) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    size = batches * BATCH
    return rng.standard_normal((size, INPUTS), np.float32), (np.arange(size) % CLASSES).astype(np.int32)


def our_run(steps_per_dispatch: int | Literal["auto"]) -> Run:
    """train.run, without a workdir."""
    config = base_config()
    config.model = dict(name="mlp", hidden=(HIDDEN,))
    config.optimizer = dict(name="adamw", learning_rate=RATE)
    config.schedule = dict(name="constant")
    config.batch_size, config.devices, config.steps_per_dispatch = BATCH, 1, steps_per_dispatch
    config.eval_every, config.test, config.terminal = "", "no", "quiet"
    inputs, labels = _examples()
    data = sources.from_arrays(inputs.reshape(-1, 8, 8, 1), labels, validation=0, test=0)

    def run(steps: int) -> None:
        config.total = f"{steps}st"
        train.run(config, data=data)

    return run


def nnx_run() -> Run:
    """As flax.readthedocs.io has it."""

    class MLP(nnx.Module):
        def __init__(self, rngs: nnx.Rngs):
            self.first, self.second = nnx.Linear(INPUTS, HIDDEN, rngs=rngs), nnx.Linear(HIDDEN, CLASSES, rngs=rngs)

        def __call__(self, x: jax.Array) -> jax.Array:
            return self.second(nnx.relu(self.first(x)))

    def loss(model: MLP, inputs: jax.Array, labels: jax.Array) -> tuple[jax.Array, jax.Array]:
        logits = model(inputs)
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean(), logits

    @nnx.jit
    def step(model: MLP, optimizer: nnx.Optimizer, metrics: nnx.MultiMetric, inputs: Any, labels: Any) -> None:
        (value, logits), grads = nnx.value_and_grad(loss, has_aux=True)(model, inputs, labels)
        metrics.update(loss=value, logits=logits, labels=labels)
        optimizer.update(model, grads)

    model = MLP(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adamw(RATE), wrt=nnx.Param)
    metrics = nnx.MultiMetric(accuracy=nnx.metrics.Accuracy(), loss=nnx.metrics.Average("loss"))
    inputs, labels = _examples()

    def run(steps: int) -> None:
        for number in range(steps):
            rows = slice(number % 8 * BATCH, (number % 8 + 1) * BATCH)
            step(model, optimizer, metrics, inputs[rows], labels[rows])
        metrics.compute()
        metrics.reset()

    return run


def keras_run(steps_per_execution: int) -> Run:
    """One `fit`."""
    os.environ["KERAS_BACKEND"] = "jax"
    import keras

    model = keras.Sequential(
        [keras.Input((INPUTS,)), keras.layers.Dense(HIDDEN, activation="relu"), keras.layers.Dense(CLASSES)]
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(
        optimizer=keras.optimizers.AdamW(RATE), loss=loss, metrics=["accuracy"], steps_per_execution=steps_per_execution
    )

    def run(steps: int) -> None:
        model.fit(*_examples(steps), batch_size=BATCH, verbose=0)

    return run


def torch_run() -> Run:
    """The usual loop, with a count of hits."""
    import torch
    from torch import nn

    model = nn.Sequential(nn.Linear(INPUTS, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, CLASSES))
    optimizer = torch.optim.AdamW(model.parameters(), RATE)
    inputs, labels = (torch.from_numpy(array) for array in _examples())
    labels = labels.long()

    def run(steps: int) -> None:
        hits = torch.zeros((), dtype=torch.long)
        for number in range(steps):
            rows = slice(number % 8 * BATCH, (number % 8 + 1) * BATCH)
            optimizer.zero_grad()
            logits = model(inputs[rows])
            nn.functional.cross_entropy(logits, labels[rows]).backward()
            optimizer.step()
            hits += (logits.detach().argmax(1) == labels[rows]).sum()

    return run
