"""SimCLR: one loss of the whole global batch, by a task and a step of one's own on top of the usual one.

    python -m jaxtrain.main --config=examples/simclr.py

Chen et al., "A Simple Framework for Contrastive Learning of Visual Representations", 2020. Labels are not used.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxtrain.config import base_config
from jaxtrain.metrics import Mean
from jaxtrain.models.cnn import CNN
from jaxtrain.step import Parts, Steps, supervised


class Encoder(nnx.Module):
    """[B, H, W, C] -> representation [B, features], and its projection [B, features / 2] for the loss."""

    def __init__(self, width: int = 32, depth: int = 0, features: int = 64, *, input_shape, dtype, rngs):
        self.backbone = CNN(features, width, depth, input_shape=input_shape, dtype=dtype, rngs=rngs)
        self.hidden = nnx.Linear(features, features, dtype=dtype, rngs=rngs)
        self.out = nnx.Linear(features, features // 2, dtype=dtype, rngs=rngs)

    def __call__(self, x):
        x = self.backbone(x)
        return {"representation": x, "projection": self.out(nnx.relu(self.hidden(nnx.relu(x))))}


@dataclasses.dataclass(frozen=True)
class Contrast:
    """NT-Xent: each view finds its partner, the row beside it, among all views of the batch."""

    temperature: float = 0.2

    def inputs(self, batch):
        return batch["image"]

    def losses(self, outputs, batch):  # float32 []: one loss of the whole global batch, over however many devices
        similar, partner = self.similarity(outputs)
        return -jnp.take_along_axis(jax.nn.log_softmax(similar), partner[:, None], axis=1).mean()

    def metrics(self, outputs, batch, mask):
        similar, partner = self.similarity(outputs)
        return {"partner_accuracy": Mean.of(similar.argmax(axis=1) == partner, mask)}

    def predict(self, outputs):
        return {"representation": outputs["representation"]}

    def similarity(self, outputs):
        """Cosines over temperature of all views, float32 [2B, 2B], -inf with itself; the partner's row, int32 [2B]."""
        z = outputs["projection"]
        z = z / jnp.linalg.norm(z, axis=1, keepdims=True)
        rows = jnp.arange(len(z), dtype=jnp.int32)
        return jnp.where(rows[:, None] == rows[None, :], -jnp.inf, z @ z.T / self.temperature), rows ^ 1


def simclr(parts: Parts) -> Steps:
    """The usual step on twice as many rows. There is nothing to evaluate but what is made of the representation."""

    def two_views(key, batch):
        views = [parts.augment(own, batch) for own in jax.random.split(key)]
        return jax.tree.map(lambda *both: jnp.stack(both, axis=1).reshape(-1, *both[0].shape[1:]), *views)  # [2B, ...]

    return dataclasses.replace(supervised(dataclasses.replace(parts, augment=two_views)), evaluate=None)


def neighbours(predict, source) -> dict[str, float]:
    """How often the nearest other example, by cosine of the representations, is of the same class."""
    examples = source.get(np.arange(len(source)))
    found = predict({"image": examples["image"]})["representation"]
    found = found / np.linalg.norm(found, axis=1, keepdims=True)
    similar = found @ found.T
    np.fill_diagonal(similar, -np.inf)
    return {"accuracy": float((examples["label"][similar.argmax(axis=1)] == examples["label"]).mean())}


def get_config(smoke: bool = False):
    config = base_config()
    config.step = "examples.simclr:simclr"
    config.task = dict(name="examples.simclr:Contrast", temperature=0.2)
    config.model = dict(name="examples.simclr:Encoder", width=32)
    config.augment = (dict(name="crop", padding=2, mode="constant"), dict(name="cutout", size=2, fill=0.0))
    config.preprocess = (dict(name="normalise", mean=(0.305,), std=(0.376,)),)
    config.optimizer = dict(name="adamw", learning_rate=3e-3)
    config.evals = {"neighbours": dict(source="train", fn="examples.simclr:neighbours")}
    config.batch_size, config.total, config.eval_every = 256, "20st" if smoke else "40ep", "4ep"
    return config
