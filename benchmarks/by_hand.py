"""Four networks of the zoo and their train step as one writes them by hand: jax.numpy, jax.lax and optax, no Flax.

Each takes the parameters and the BatchNorm statistics that jaxtrain's own has, nested dicts of the same names, so that
both can be given the same weights. `benchmarks.models` and a test see to it that they give the same numbers.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

Network = Callable[[Any, Any, jax.Array], tuple[jax.Array, Any]]  # (params, statistics, inputs) -> (logits, statistics)


def train_step(
    network: Network, optimizer: optax.GradientTransformation, compiler_options: dict[str, str]
) -> Callable[..., Any]:
    """(params, statistics, opt_state, inputs, labels) -> (params, statistics, opt_state, loss), jitted and donated.

    labels: int32, of the shape of the logits without the last axis; the loss is the mean cross-entropy.
    """

    def step(params: Any, statistics: Any, opt_state: Any, inputs: jax.Array, labels: jax.Array) -> Any:
        def loss(params: Any) -> tuple[jax.Array, Any]:
            logits, new = network(params, statistics, inputs)
            return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean(), new

        (value, new), grads = jax.value_and_grad(loss, has_aux=True)(params)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), new, opt_state, value

    return jax.jit(step, donate_argnums=(0, 1, 2), compiler_options=compiler_options)


def resnet18(params: Any, statistics: Any, images: jax.Array) -> tuple[jax.Array, Any]:
    """ResNet-18 with the stem for CIFAR: uint8 [B, H, W, 3] -> [B, classes]."""
    new: dict[str, Any] = {}

    def conv_norm(path: tuple[Any, ...], x: jax.Array, stride: int = 1) -> jax.Array:
        p, old = _at(params, path), _at(statistics, path)["norm"]
        half = p["conv"]["kernel"].shape[0] // 2
        x = jax.lax.conv_general_dilated(
            x, p["conv"]["kernel"], (stride, stride), [(half, half)] * 2, dimension_numbers=("NHWC", "HWIO", "NHWC")
        )
        mean, var = _moments(x, (0, 1, 2))
        _put(new, (*path, "norm"), {"mean": 0.9 * old["mean"] + 0.1 * mean, "var": 0.9 * old["var"] + 0.1 * var})
        return (x - mean) * (jax.lax.rsqrt(var + 1e-5) * p["norm"]["scale"]) + p["norm"]["bias"]

    x = jax.nn.relu(conv_norm(("stem",), images * jnp.float32(1 / 255)))
    for stage in params["stages"]:
        for block in params["stages"][stage]:
            path, stride = ("stages", stage, block), 2 if stage != "0" and block == "0" else 1
            y = jax.nn.relu(conv_norm((*path, "layers", "0"), x, stride))
            y = conv_norm((*path, "layers", "1"), y)
            x = jax.nn.relu(y + (conv_norm((*path, "shortcut"), x, stride) if "shortcut" in _at(params, path) else x))
    return _linear(params["head"], x.mean((1, 2))), new


def vit(heads: int) -> Network:
    """ViT with a CLS token: uint8 [B, H, W, 3] -> [B, classes]."""

    def network(params: Any, statistics: Any, images: jax.Array) -> tuple[jax.Array, Any]:
        patch, width = params["embed"]["kernel"].shape[0], params["embed"]["kernel"].shape[-1]
        x = jax.lax.conv_general_dilated(
            images * jnp.float32(1 / 255),
            params["embed"]["kernel"],
            (patch, patch),
            "VALID",
            dimension_numbers=("NHWC", "HWIO", "NHWC"),
        )
        x = x.reshape(len(x), -1, width) + params["embed"]["bias"]
        x = jnp.concatenate([jnp.broadcast_to(params["cls"], (len(x), 1, width)), x], 1) + params["positions"]
        for block in _in_order(params["blocks"]):
            x = x + _attention(block["attention"], _layer_norm(block["attention_norm"], x, 1e-6), heads)
            y = jax.nn.gelu(_linear(block["mlp"]["wide"], _layer_norm(block["mlp_norm"], x, 1e-6)), approximate=False)
            x = x + _linear(block["mlp"]["narrow"], y)
        return _linear(params["head"], _layer_norm(params["norm"], x, 1e-6)[:, 0]), statistics

    return network


def gpt(heads: int) -> Network:
    """GPT-2's decoder with tied embeddings: tokens [B, T] -> [B, T, vocabulary]."""

    def network(params: Any, statistics: Any, tokens: jax.Array) -> tuple[jax.Array, Any]:
        embedding = params["embedding"]["embedding"]
        x = embedding[tokens.astype(jnp.int32)] + params["positions"]["embedding"][: tokens.shape[1]]
        for block in _in_order(params["stack"]["blocks"]):
            x = x + _attention(block["attention"], _layer_norm(block["attention_norm"], x, 1e-5), heads, causal=True)
            y = jax.nn.gelu(_linear(block["feed"]["up"], _layer_norm(block["feed_norm"], x, 1e-5)))
            x = x + _linear(block["feed"]["down"], y)
        return _layer_norm(params["norm"], x, 1e-5) @ embedding.T, statistics

    return network


def lstm(params: Any, statistics: Any, tokens: jax.Array) -> tuple[jax.Array, Any]:
    """LSTM layers over embeddings: tokens [B, T] -> [B, T, vocabulary]."""
    x = params["layers"]["embedding"]["embedding"][tokens.astype(jnp.int32)]
    for layer in _in_order(params["layers"]["recurrent"]):
        kernel = layer["recurrent"]["kernel"]

        def advance(carry: Any, x: jax.Array, kernel: jax.Array = kernel) -> Any:
            hidden, cell = carry
            into, forget, new, out = jnp.split(x + hidden @ kernel, 4, axis=-1)
            cell = jax.nn.sigmoid(forget) * cell + jax.nn.sigmoid(into) * jnp.tanh(new)
            hidden = jax.nn.sigmoid(out) * jnp.tanh(cell)
            return (hidden, cell), hidden

        zeros = jnp.zeros((len(x), len(kernel)), jnp.float32)
        x = jax.lax.scan(advance, (zeros, zeros), _linear(layer["input"], x).swapaxes(0, 1))[1].swapaxes(0, 1)
    return _linear(params["head"], x), statistics


def _attention(p: Any, x: jax.Array, heads: int, causal: bool = False) -> jax.Array:
    batch, length, width = x.shape
    query, key, value = (
        _linear(p[name], x).reshape(batch, length, heads, width // heads) for name in ("query", "key", "value")
    )
    found = jax.nn.dot_product_attention(query, key, value, is_causal=causal)
    return _linear(p["out"], found.reshape(x.shape))


def _linear(p: Any, x: jax.Array) -> jax.Array:
    """As one product of matrices: with three axes the gradient takes half as long again on a CPU."""
    rows = x.reshape(-1, x.shape[-1]) @ p["kernel"] + p["bias"]
    return rows.reshape(*x.shape[:-1], -1)


def _layer_norm(p: Any, x: jax.Array, epsilon: float) -> jax.Array:
    mean, var = _moments(x, (-1,))
    return (x - mean[..., None]) * (jax.lax.rsqrt(var[..., None] + epsilon) * p["scale"]) + p["bias"]


def _moments(x: jax.Array, axes: tuple[int, ...]) -> tuple[jax.Array, jax.Array]:
    """Mean and variance in one pass over x."""
    mean = x.mean(axes)
    return mean, jnp.maximum((x * x).mean(axes) - mean * mean, 0)


def _in_order(layers: dict[str, Any]) -> list[Any]:
    return [layers[name] for name in sorted(layers, key=int)]


def _at(tree: Any, path: tuple[Any, ...]) -> Any:
    for name in path:
        tree = tree[name]
    return tree


def _put(tree: dict[str, Any], path: tuple[Any, ...], leaf: Any) -> None:
    for name in path[:-1]:
        tree = tree.setdefault(name, {})
    tree[path[-1]] = leaf
