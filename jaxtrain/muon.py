"""Muon: momentum of each matrix, made orthogonal by a few Newton-Schulz steps (Jordan et al., 2024).

optax.contrib has one too; this one orthogonalises all matrices of a shape in one batched product, does so in bfloat16
where the run computes in 16 bits, takes kernels of convolutions as matrices, and can renormalise the weights.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxtrain.errors import UserError

QUINTIC = (3.4445, -4.7750, 2.0315)  # steep at 0; takes singular values to about 0.7 … 1.2 within five steps


class MuonState(NamedTuple):
    """What is kept between updates."""

    updates: jax.Array  # int32 []: made so far
    momentum: Any  # as the parameters


def muon(
    learning_rate: Any,
    momentum: float = 0.95,
    nesterov: bool = True,
    ns_steps: int = 5,
    ns_coefficients: tuple[float, float, float] = QUINTIC,
    output_axes: int = 1,
    renormalise_every: int = 0,
    padded: bool = False,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    *,
    dtype: Any = jnp.float32,
) -> optax.GradientTransformation:
    """Parameters of two axes or more by Muon, the others by Adam (`b1`, `b2`, `eps`) at the same rate.

    A parameter is a matrix [inputs, outputs] of which the last `output_axes` axes are the outputs, so a kernel
    [height, width, in, out] of a convolution is one of height · width · in by out. The update of it is
    learning_rate · sqrt(max(1, outputs / inputs)) · its orthogonalised momentum: g + momentum · m with `nesterov`, m
    being the sum over past g of momentum^age.

    `ns_coefficients` (a, b, c) are those of X ← aX + (bA + cA²)X, A = XXᵀ, which is done `ns_steps` times, in bfloat16
    where `dtype`, that of the run's computation, has 16 bits, else in the parameters' dtype. Matrices of a shape are
    one batch; with `padded` all are one, filled up with zeros (the same result: more arithmetic, fewer kernels).
    `renormalise_every=n` scales each such parameter, before the first of every n updates, to a Frobenius norm of
    sqrt(outputs).

    Raises UserError for numbers that make no sense.
    """
    _refuse_nonsense(momentum, ns_steps, ns_coefficients, output_axes, renormalise_every)
    low = jnp.dtype(dtype).itemsize == 2

    def init(params: Any) -> MuonState:
        return MuonState(jnp.zeros((), jnp.int32), jax.tree.map(jnp.zeros_like, params))

    def update(grads: Any, state: MuonState, params: Any = None) -> tuple[Any, MuonState]:
        sums = jax.tree.map(lambda g, m: g + momentum * m, grads, state.momentum)
        wanted = jax.tree.map(lambda g, m: g + momentum * m, grads, sums) if nesterov else sums
        flat, structure = jax.tree.flatten(wanted)
        matrices = [_matrix(each, output_axes) for each in flat]
        directions = orthogonalised(matrices, ns_steps, ns_coefficients, jnp.bfloat16 if low else None, padded)
        steps = [
            -learning_rate * math.sqrt(max(1, each.shape[1] / each.shape[0])) * each.reshape(leaf.shape)
            for each, leaf in zip(directions, flat, strict=True)
        ]
        if renormalise_every:
            due = state.updates % renormalise_every == 0
            weights = jax.tree.leaves(params)
            steps = [u + jnp.where(due, _normed(p, output_axes) - p, 0) for u, p in zip(steps, weights, strict=True)]
        return jax.tree.unflatten(structure, steps), MuonState(state.updates + 1, sums)

    return optax.partition(
        {"muon": optax.GradientTransformation(init, update), "adam": optax.adam(learning_rate, b1, b2, eps)},
        lambda params: jax.tree.map(lambda p: "muon" if p.ndim > max(1, output_axes) else "adam", params),
    )


def orthogonalised(
    matrices: Sequence[jax.Array],
    steps: int,
    coefficients: tuple[float, float, float] = QUINTIC,
    dtype: Any = None,
    padded: bool = False,
) -> list[jax.Array]:
    """Each of `matrices` (float [m, n]) with its singular values brought near 1, in its dtype; zeros stay zeros.

    The products are in `dtype`, None: in the matrices' own. Those of a shape, or of a shape transposed, are one batch;
    with `padded` all are.
    """
    wide = [each.T if each.shape[0] > each.shape[1] else each for each in matrices]
    shapes = sorted({each.shape for each in wide})
    most = tuple(map(max, zip(*shapes, strict=True))) if shapes else ()
    found: dict[int, jax.Array] = {}
    for shape in [most] if padded and shapes else shapes:
        members = [index for index, each in enumerate(wide) if padded or each.shape == shape]
        stack = jnp.stack([_filled(wide[index], shape) for index in members])  # [k, m, n]
        for index, each in zip(members, _newton_schulz(stack, steps, coefficients, dtype), strict=True):
            rows, columns = wide[index].shape
            found[index] = each[:rows, :columns]
    return [
        (found[index].T if each.shape[0] > each.shape[1] else found[index]).astype(each.dtype)
        for index, each in enumerate(matrices)
    ]


def _newton_schulz(x: jax.Array, steps: int, coefficients: tuple[float, float, float], dtype: Any) -> jax.Array:
    """[k, m, n] with m <= n, each of norm at most 1 to begin with, as the iteration needs."""
    a, b, c = coefficients
    norm = jnp.sqrt(jnp.sum(jnp.square(x), axis=(1, 2), keepdims=True))
    x = (x / (norm + 1e-7)).astype(dtype or x.dtype)
    for _ in range(steps):
        gram = x @ x.mT
        x = a * x + (b * gram + c * (gram @ gram)) @ x
    return x


def _matrix(p: jax.Array, output_axes: int) -> jax.Array:
    """[inputs, outputs]"""
    return p.reshape(-1, math.prod(p.shape[-output_axes:]))


def _filled(matrix: jax.Array, shape: Sequence[int]) -> jax.Array:
    """The matrix with zeros below and to its right."""
    return jnp.pad(matrix, [(0, size - old) for size, old in zip(shape, matrix.shape, strict=True)])


def _normed(p: jax.Array, output_axes: int) -> jax.Array:
    """The parameter scaled to a norm of sqrt(outputs); zeros stay zeros."""
    norm = jnp.sqrt(jnp.sum(jnp.square(p)))
    return p * (math.sqrt(math.prod(p.shape[-output_axes:])) / jnp.where(norm > 0, norm, 1))


def _refuse_nonsense(
    momentum: float, ns_steps: int, coefficients: Sequence[float], output_axes: int, renormalise_every: int
) -> None:
    wrong = {
        f"momentum={momentum!r}, expected a number from 0 to below 1": not 0 <= momentum < 1,
        f"ns_steps={ns_steps!r}, expected 1 or more": ns_steps < 1,
        f"ns_coefficients={coefficients!r}, expected three finite numbers": len(coefficients) != 3
        or not all(math.isfinite(each) for each in coefficients),
        f"output_axes={output_axes!r}, expected 1 or more": output_axes < 1,
        f"renormalise_every={renormalise_every!r}, expected a number of updates, or 0: never": renormalise_every < 0,
    }
    for text, is_wrong in wrong.items():
        if is_wrong:
            raise UserError(f"muon: {text}")
