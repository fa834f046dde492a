"""The train step of four networks as a run makes it, with metrics and checks, against the same network elsewhere.

References: the step as one writes it by hand for jax.jit (benchmarks.by_hand), Keras 3's `fit` on JAX, PyTorch's eager
loop, each on one batch, in float32. Where Keras or PyTorch is not installed, a line says so instead.
"""

import dataclasses
import importlib.util
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from benchmarks import by_hand
from benchmarks.table import Row
from benchmarks.turns import interleaved, ratio
from jaxtrain import metrics, precision, train
from jaxtrain.config import base_config
from jaxtrain.data import sources
from jaxtrain.job import Job
from jaxtrain.loop.advance import plain_advance, zero_sums
from jaxtrain.machine import compiling

ROUNDS, STEPS = 7, 4
RATE, MOMENTUM, DECAY = 1e-3, 0.9, 0.05
CLASSES, SIDE, VOCABULARY = 10, 32, 256
Run = Callable[[int], float]  # steps -> a loss of theirs, when all is computed


@dataclasses.dataclass(frozen=True)
class Network:
    """One network four times."""

    title: str
    batch: int
    model: dict[str, Any]  # ours
    hand: by_hand.Network
    elsewhere: str  # its name in in_keras and, written as a class, in in_torch
    arguments: dict[str, int]
    length: int = 0  # of a text; 0: pictures

    def examples(self) -> tuple[np.ndarray, np.ndarray]:
        """Inputs and labels of one batch: noise."""
        rng = np.random.default_rng(0)
        if not self.length:
            image = rng.integers(0, 256, (self.batch, SIDE, SIDE, 3), dtype=np.uint8)
            return image, (np.arange(self.batch) % CLASSES).astype(np.int32)
        tokens = rng.integers(0, VOCABULARY, (self.batch, self.length + 1), dtype=np.uint8)
        return tokens[:, :-1], tokens[:, 1:].astype(np.int32)


def networks(*, shrink: int = 1) -> list[Network]:
    """ResNet-18 with the CIFAR stem, ViT-Ti on patches of 4, GPT-mini (minGPT's), two layers of LSTM; or narrower."""
    resnet, vit, gpt, lstm = 64 // shrink, 192 // shrink, 192 // shrink, 256 // shrink
    depth, blocks = max(1, 12 // shrink), max(1, 6 // shrink)
    return [
        Network(
            title="ResNet-18",
            batch=8,
            model=dict(name="resnet", depth=18, stem="cifar", width=resnet),
            hand=by_hand.resnet18,
            elsewhere="ResNet18",
            arguments=dict(width=resnet),
        ),
        Network(
            title="ViT-Ti",
            batch=8,
            model=dict(name="vit", patch=4, width=vit, depth=depth, heads=3),
            hand=by_hand.vit(3),
            elsewhere="ViT",
            arguments=dict(side=SIDE, patch=4, width=vit, depth=depth, heads=3),
        ),
        Network(
            title="GPT-mini",
            batch=8,
            model=dict(name="gpt", context=128, width=gpt, depth=blocks, heads=6),
            hand=by_hand.gpt(6),
            elsewhere="GPT",
            arguments=dict(context=128, width=gpt, depth=blocks, heads=6),
            length=128,
        ),
        Network(
            title="LSTM",
            batch=16,
            model=dict(name="rnn", width=lstm, depth=2),
            hand=by_hand.lstm,
            elsewhere="LSTM",
            arguments=dict(width=lstm, depth=2),
            length=128,
        ),
    ]


def measure(rounds: int = ROUNDS, steps: int = STEPS, shrink: int = 1) -> Iterator[Row]:
    """Medians of `rounds` rounds of `steps` steps each."""
    for network in networks(shrink=shrink):
        yield from _compared(network, rounds, steps)


def _compared(network: Network, rounds: int, steps: int) -> Iterator[Row]:
    job = our_job(network)
    state = job.initial()
    size = sum(leaf.size for leaf in jax.tree.leaves(state.params))
    runs = {"hand": step_by_hand(network, job, state), "ours": our_step(job, state)}  # which gives its state away
    for _ in range(3):  # the first loss is that of the weights, the others those of what was learnt
        found = [run(1) for run in runs.values()]
        assert abs(found[0] - found[1]) < 1e-3 * found[0], f"{network.title}: not the same: losses {found}"
    measured = {name: partial(_timed, run, steps) for name, run in runs.items()}
    for library, step in (("keras", keras_step), ("torch", torch_step)):
        if importlib.util.find_spec(library):
            run, count = step(network)
            assert count == size, f"{network.title} has {size:,} parameters, and {count:,} in {library}"
            measured[library] = partial(_timed, run, steps, once=library == "keras")
        else:
            print(f"{network.title} ÷ {library}: skipped, {library} is not installed", file=sys.stderr)
    seconds = interleaved(measured, rounds)
    for name, aim, label in (
        ("hand", 1.02, "the step by hand"),
        ("keras", 0.9, "Keras 3 on JAX"),
        ("torch", None, "PyTorch eager"),
    ):
        if name in seconds:
            middle = [1e3 * statistics.median(seconds[each]) for each in ("ours", name)]
            detail = f"{middle[0]:.1f} ms ÷ {middle[1]:.1f} ms, batch {network.batch}"
            yield Row(f"{network.title}: step ÷ {label}", ratio(seconds["ours"], seconds[name]), aim, detail)


def _timed(run: Run, steps: int, once: bool = False) -> float:
    """Seconds a step; `once`: without what a call costs that is not the steps, as `fit` has it."""
    spent = []
    for number in [1, 1 + steps] if once else [steps]:
        began = time.perf_counter()
        run(number)
        spent.append(time.perf_counter() - began)
    return (spent[-1] - (spent[0] if once else 0)) / steps


def our_job(network: Network) -> Job:
    """On one device, as a run has it."""
    config = base_config()
    config.model = network.model
    config.task = dict(name="language_modelling" if network.length else "classification")
    config.optimizer = dict(name="adamw", learning_rate=RATE, weight_decay=DECAY)
    config.schedule = dict(name="constant")
    config.batch_size, config.devices, config.precision = network.batch, 1, "float32"
    config.eval_every, config.test = "", "no"
    config.steps_per_dispatch, config.data.resident = 1, "no"  # as the references take their steps
    inputs, labels = network.examples()
    if network.length:
        last = labels[:, -1:].astype(inputs.dtype)
        arrays, classes = {"tokens": np.concatenate([inputs, last], axis=1)}, VOCABULARY
    else:
        arrays, classes = {"image": inputs, "label": labels}, CLASSES
    return train.build(config, data=sources.from_arrays(arrays, validation=0, test=0, num_classes=classes))


def our_step(job: Job, state: Any) -> Run:
    """The program of a run."""
    advance, zeros = plain_advance(job), zero_sums(job)
    with job.batches() as batches:
        batch = next(batches)

    def run(steps: int) -> float:
        nonlocal state
        sums = zeros
        with precision.scope(job.policy):
            for _ in range(steps):
                state, sums = advance(state, sums, batch, 1)
        jax.block_until_ready(state)
        return metrics.compute(sums)["loss"]

    return run


def step_by_hand(network: Network, job: Job, state: Any) -> Run:
    """From a copy of these weights, compiled as ours is."""
    optimizer = optax.adamw(RATE, weight_decay=DECAY, mask=lambda params: jax.tree.map(lambda p: p.ndim > 1, params))
    params, statistics = jax.tree.map(jnp.copy, (state.params, state.model_state))
    carry = (params, statistics, jax.jit(optimizer.init)(params))
    step = by_hand.train_step(network.hand, optimizer, compiling.options(job.mesh))
    inputs, labels = jax.device_put(network.examples())

    def run(steps: int) -> float:
        nonlocal carry
        for _ in range(steps):
            *carry, loss = step(*carry, inputs, labels)
        jax.block_until_ready(carry)
        return float(loss)

    return run


def keras_step(network: Network) -> tuple[Run, int]:
    """A run is one `fit`."""
    os.environ["KERAS_BACKEND"] = "jax"
    import keras

    from benchmarks import in_keras

    sizes = dict(vocabulary=VOCABULARY) if network.length else dict(classes=CLASSES, side=SIDE)
    if network.length:
        sizes["context"] = network.length
    model = getattr(in_keras, network.elsewhere.lower())(**sizes | network.arguments)
    model.compile(
        optimizer=keras.optimizers.AdamW(RATE, weight_decay=DECAY),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    )
    inputs, labels = network.examples()

    def run(steps: int) -> float:
        arrays = (np.tile(array, (steps,) + (1,) * (array.ndim - 1)) for array in (inputs, labels))
        history = model.fit(*arrays, batch_size=network.batch, shuffle=False, verbose=0)
        return history.history["loss"][-1]

    return run, sum(int(np.prod(variable.shape)) for variable in model.trainable_variables)


def torch_step(network: Network) -> tuple[Run, int]:
    """The usual loop."""
    import torch

    from benchmarks import in_torch

    sizes = dict(vocabulary=VOCABULARY) if network.length else dict(classes=CLASSES)
    model = getattr(in_torch, network.elsewhere)(**sizes | network.arguments)
    optimizer = torch.optim.AdamW(model.parameters(), RATE, weight_decay=DECAY)
    inputs, labels = map(torch.from_numpy, network.examples())
    inputs, labels = inputs.long() if network.length else inputs.permute(0, 3, 1, 2).contiguous(), labels.long()

    def run(steps: int) -> float:
        for _ in range(steps):
            optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(model(inputs).flatten(0, -2), labels.flatten())
            loss.backward()
            optimizer.step()
        return loss.item()

    second = sum(p.numel() for name, p in model.named_parameters() if "bias_hh" in name)  # one too many of each layer
    return run, sum(p.numel() for p in model.parameters()) - second
