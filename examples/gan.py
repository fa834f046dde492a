"""A conditional GAN: a step of one's own over a state of one's own. Two networks, two optimizers, two losses.

    python -m jaxtrain.main --config=examples/gan.py

Goodfellow et al., "Generative Adversarial Nets", 2014; Mirza and Osindero, "Conditional Generative …", 2014.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx, struct
from jax.nn import leaky_relu, one_hot, sigmoid, softplus

from jaxtrain.config import base_config
from jaxtrain.metrics import Mean
from jaxtrain.model import from_nnx
from jaxtrain.state import counter, stream
from jaxtrain.step import Steps


@struct.dataclass
class State:
    step: jax.Array  # int32 []: these three a run asks for,
    offset: jax.Array  # int32 []
    key: jax.Array  # threefry key []
    params: dict  # and these are the step's own: "generator" and "critic" in both
    opt_state: dict


def mlp(inputs: int, width: int, outputs: int, dtype, rngs) -> nnx.Module:
    dense = functools.partial(nnx.Linear, dtype=dtype, rngs=rngs)
    return nnx.Sequential(dense(inputs, width), leaky_relu, dense(width, width), leaky_relu, dense(width, outputs))


def gan(spec, num_classes, optimizer, dtype, latent: int = 16, width: int = 128) -> Steps:
    """The first four are supplied because they are named; `latent` and `width` are options of config.step."""
    shape, pixels = spec["image"].shape, spec["image"].size
    generator = from_nnx(lambda rngs: mlp(latent + num_classes, width, pixels, dtype, rngs))
    critic = from_nnx(lambda rngs: mlp(pixels + num_classes, width, 1, dtype, rngs))
    networks = {"generator": generator, "critic": critic}

    def apply(network, params, values, batch):
        inputs = jnp.concatenate([values, one_hot(batch["label"], num_classes)], axis=1)
        return network.apply(params, {}, inputs, key=None, train=True)[0].astype(jnp.float32)

    def generate(params, key, batch):  # float32 [B, H, W, C] in [0, 1]; the noise of a row follows from its id
        noise = jax.vmap(lambda number: jax.random.normal(jax.random.fold_in(key, number), latent))(batch["id"])
        return sigmoid(apply(generator, params, noise, batch)).reshape(-1, *shape)

    def judge(params, images, batch):  # float32 [B], above 0 where the critic takes a picture for real
        return apply(critic, params, images.reshape(-1, pixels), batch)[:, 0]

    def init(key):
        keys = dict(zip(networks, jax.random.split(key), strict=True))
        params = {name: network.init(keys[name], None)[0] for name, network in networks.items()}
        opt_state = {name: optimizer(own).init(own) for name, own in params.items()}
        return State(counter(), counter(), key, params, opt_state)

    def train(state, batch):
        key = stream(state.key, state.step + state.offset, "noise")
        real, fake = batch["image"] / 255, generate(state.params["generator"], key, batch)
        losses = {
            "generator": lambda own: softplus(-judge(state.params["critic"], generate(own, key, batch), batch)).mean(),
            "critic": lambda own: (softplus(-judge(own, real, batch)) + softplus(judge(own, fake, batch))).mean(),
        }
        params, opt_state, metrics = {}, {}, {}
        for name, loss in losses.items():
            old, its = state.params[name], optimizer(state.params[name])
            metrics[f"{name}_loss"], grads = jax.value_and_grad(loss)(old)
            params[name], opt_state[name], _ = its.update(grads, state.opt_state[name], old, its.schedule(state.step))
        return state.replace(step=state.step + 1, params=params, opt_state=opt_state), metrics

    def evaluate(state, batch):
        pictures = batch["image"] / 255, predict(state, batch)["image"]
        real, fake = (judge(state.params["critic"], each, batch) for each in pictures)
        return {"real_accuracy": Mean.of(real > 0, batch["mask"]), "fake_accuracy": Mean.of(fake < 0, batch["mask"])}

    def predict(state, batch):
        return {"image": generate(state.params["generator"], state.key, batch)}

    return Steps(init, train, evaluate, predict)


def class_means(predict, source) -> dict[str, float]:
    """Root mean square, over pixels, of mean generated less mean real picture, class by class."""
    real = source.get(np.arange(len(source)))
    difference = predict({"label": real["label"]})["image"] - real["image"] / 255
    gaps = [difference[real["label"] == label].mean(axis=0) for label in np.unique(real["label"])]
    return {"distance": float(np.sqrt(np.square(gaps).mean()))}


def get_config(smoke: bool = False):
    config = base_config()
    config.step = dict(name="examples.gan:gan", latent=16)
    config.optimizer = dict(name="adam", learning_rate=3e-3, b1=0.5)
    config.evals = {"generated": dict(source="train", fn="examples.gan:class_means")}
    config.batch_size, config.total, config.eval_every = 64, "40st" if smoke else "100ep", "10ep"
    return config
