"""A run that takes a second: 8×8 pictures, 10 classes, a small net. Tests change what they are about."""

from typing import Any

import jax
import numpy as np

from jaxtrain.config import base_config
from jaxtrain.data import sources


def config(**changes: Any):
    """A checked-in-spirit tiny config; `changes` are top-level keys."""
    config = base_config()
    config.model = dict(name="mlp", hidden=(16,))
    config.optimizer = dict(name="sgd", learning_rate=0.05, momentum=0.9)
    config.schedule = dict(name="constant")
    config.batch_size = 16
    config.total = "24st"
    config.report_every = "5st"
    config.eval_every = "8st"
    config.checkpoint = dict(every="10st", minutes=0.0, keep=2, keep_every="")
    # A step a dispatch, each batch from the host: most tests look in between. test_dispatch.py has the other ways.
    config.steps_per_dispatch = 1
    config.data.resident = "no"
    config.terminal = "quiet"
    config.tensorboard = False
    for key, value in changes.items():
        config[key] = value
    return config


def same(a: Any, b: Any) -> bool:
    """Every leaf bit-equal."""
    leaves = [
        [np.asarray(jax.random.key_data(x) if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key) else x) for x in t]
        for t in (jax.tree.leaves(a), jax.tree.leaves(b))
    ]
    return len(leaves[0]) == len(leaves[1]) and all(
        x.dtype == y.dtype and x.tobytes() == y.tobytes() for x, y in zip(*leaves, strict=True)
    )


def data(train: int = 64, validation: int = 37, test: int = 21, seed: int = 0) -> sources.Dataset:
    """Learnable noise: the class shifts one pixel. Ids of the three roles do not overlap in content."""
    rng = np.random.default_rng(seed)
    roles = {}
    for role, size in (("train", train), ("validation", validation), ("test", test)):
        label = np.arange(size, dtype=np.int32) % 10
        image = rng.integers(0, 128, (size, 8, 8, 1), dtype=np.uint8)
        image[np.arange(size), label % 8, label // 8] = 255
        roles[role] = sources.ArraySource({"image": image, "label": label})
    return sources.Dataset(
        name="tiny",
        spec=roles["train"].spec,
        num_classes=10,
        class_names=tuple(str(number) for number in range(10)),
        open=lambda: roles,
    )
