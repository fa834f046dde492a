"""Muon: Newton-Schulz against NumPy, whole updates against the recipe written out, mistakes."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxtrain.errors import UserError
from jaxtrain.muon import QUINTIC, muon, orthogonalised

SHAPES = [(8, 12), (12, 8), (8, 12), (3, 40), (5, 5), (1, 4)]
OTHER = (3.4576, -4.7391, 2.0843)


def matrices(shapes=SHAPES, dtype=jnp.float32):
    return [jnp.asarray(np.random.default_rng(n).normal(size=shape), dtype) for n, shape in enumerate(shapes)]


def by_hand(matrix, steps, coefficients):
    """One matrix, in float64, as the record's own does it."""
    a, b, c = coefficients
    x = np.asarray(matrix, np.float64)
    wide = x.T if x.shape[0] > x.shape[1] else x
    wide = wide / (np.linalg.norm(wide) + 1e-7)
    for _ in range(steps):
        gram = wide @ wide.T
        wide = a * wide + (b * gram + c * gram @ gram) @ wide
    return wide.T if x.shape[0] > x.shape[1] else wide


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize(("steps", "coefficients"), [(1, QUINTIC), (3, OTHER), (5, QUINTIC)])
def test_newton_schulz_is_that_of_each_matrix_alone(steps, coefficients, padded):
    found = jax.jit(lambda given: orthogonalised(given, steps, coefficients, padded=padded))(matrices())
    for each, matrix in zip(found, matrices(), strict=True):
        assert each.dtype == jnp.float32
        np.testing.assert_allclose(each, by_hand(matrix, steps, coefficients), atol=2e-5)


def test_it_makes_singular_values_near_one_and_keeps_directions():
    for each, matrix in zip(orthogonalised(matrices(), 8), matrices(), strict=True):
        left, values, right = np.linalg.svd(np.asarray(matrix), full_matrices=False)
        if values.min() > 0.05 * np.linalg.norm(values):
            assert np.all(np.abs(np.linalg.svd(np.asarray(each))[1] - 1) < 0.35)
            assert np.abs(left.T @ np.asarray(each) @ right.T - np.diag(np.diag(left.T @ each @ right.T))).max() < 1e-4


@pytest.mark.parametrize("given", [[], [jnp.zeros((3, 4))]])
def test_nothing_and_zeros_stay_what_they_are(given):
    assert all(not each.any() for each in orthogonalised(given, 5, padded=True))


def test_bfloat16_is_near_and_equal_shapes_are_one_product():
    given = matrices([(8, 12), (12, 8), (8, 12)])
    half = orthogonalised(given, 3, dtype=jnp.bfloat16)
    for each, matrix in zip(half, given, strict=True):
        assert each.dtype == jnp.float32
        np.testing.assert_allclose(each, by_hand(matrix, 3, QUINTIC), atol=0.06)
    text = str(jax.make_jaxpr(lambda given: orthogonalised(given, 3, dtype=jnp.bfloat16))(given))
    assert text.count("dot_general") == 3 * 3 and "bf16[3,8,12]" in text


PARAMS = {"conv": {"kernel": (3, 3, 4, 6), "bias": (6,)}, "head": {"kernel": (6, 40)}}


def trees(count):
    """Parameters and gradients of that many steps."""
    rng = np.random.default_rng(7)
    is_shape = {"is_leaf": lambda x: isinstance(x, tuple)}
    return [
        jax.tree.map(lambda shape: jnp.asarray(rng.normal(size=shape), jnp.float32), PARAMS, **is_shape)
        for _ in range(count + 1)
    ]


@pytest.mark.parametrize(("nesterov", "every"), [(True, 1), (False, 1), (True, 2), (True, 0)])
def test_updates_are_those_of_the_recipe_written_out(nesterov, every):
    params, *steps = trees(4)
    kernels = [np.asarray(params[name]["kernel"], np.float64) for name in PARAMS]
    sums = [np.zeros_like(kernel) for kernel in kernels]
    optimizer = muon(0.2, 0.6, nesterov, 3, renormalise_every=every)
    state = optimizer.init(params)
    update = jax.jit(optimizer.update)
    adam, bias = optax.adam(0.2), params["conv"]["bias"]
    moments = adam.init(bias)
    for number, grads in enumerate(steps):
        updates, state = update(grads, state, params)
        params = optax.apply_updates(params, updates)
        for place, name in enumerate(PARAMS):
            g = np.asarray(grads[name]["kernel"], np.float64)
            sums[place] = 0.6 * sums[place] + g
            g = g + 0.6 * sums[place] if nesterov else sums[place]
            outputs = g.shape[-1]
            if every and number % every == 0:
                kernels[place] *= np.sqrt(outputs) / np.linalg.norm(kernels[place])
            matrix = g.reshape(-1, outputs)
            scale = np.sqrt(max(1, outputs / len(matrix)))
            kernels[place] -= 0.2 * scale * by_hand(matrix, 3, QUINTIC).reshape(g.shape)
            np.testing.assert_allclose(params[name]["kernel"], kernels[place], atol=1e-4)
        step, moments = adam.update(grads["conv"]["bias"], moments, bias)
        bias = bias + step
    np.testing.assert_allclose(params["conv"]["bias"], bias, rtol=1e-6)


def test_the_outputs_may_have_several_axes():
    p = {"qkv": jnp.asarray(np.random.default_rng(0).normal(size=(6, 2, 5)), jnp.float32), "gain": jnp.ones((2, 5))}
    optimizer = muon(1.0, 0.0, ns_steps=4, output_axes=2)
    updates, _ = optimizer.update(p, optimizer.init(p), p)
    wanted = by_hand(p["qkv"].reshape(6, 10), 4, QUINTIC) * np.sqrt(10 / 6)
    np.testing.assert_allclose(-updates["qkv"].reshape(6, 10), wanted, atol=2e-5)
    np.testing.assert_allclose(updates["gain"], -1, rtol=1e-5)  # no matrix: a step of Adam


@pytest.mark.parametrize(("dtype", "low"), [(jnp.float32, 0), (jnp.bfloat16, 1), (jnp.float16, 1)])
def test_products_are_in_bfloat16_where_the_run_computes_in_16_bits(dtype, low):
    params = trees(0)[0]
    optimizer = muon(0.1, dtype=dtype)
    text = str(jax.make_jaxpr(optimizer.update)(params, optimizer.init(params), params))
    assert ("bf16" in text) == bool(low)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"momentum": 1.0}, "momentum=1.0"),
        ({"ns_steps": 0}, "ns_steps=0"),
        ({"ns_coefficients": (1.0, 2.0)}, "three"),
        ({"ns_coefficients": (1.0, 2.0, float("nan"))}, "finite"),
        ({"output_axes": 0}, "output_axes=0"),
        ({"renormalise_every": -1}, "renormalise_every=-1"),
    ],
)
def test_mistakes_are_one_line(options, words):
    with pytest.raises(UserError, match=words):
        muon(0.1, **options)
