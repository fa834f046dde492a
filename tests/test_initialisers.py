"""`config.initialise`: what each sets, from which data, when, and mistakes in one line."""

import jax
import numpy as np
import pytest
import tiny

from jaxtrain import initialisers, train
from jaxtrain.errors import UserError

RNG = np.random.default_rng(0)
PICTURES = RNG.normal(size=(40, 9, 8, 3)).astype(np.float32).cumsum(axis=1)  # neighbours resemble each other


def examples(count):
    return {"image": PICTURES[:count]}


def drawn(*shape):
    return np.random.default_rng(1).normal(size=shape).astype(np.float32)


@pytest.mark.parametrize("shape", [(3, 3, 4, 6), (3, 3, 6, 4), (1, 5, 2, 2), (3, 2, 5)])
def test_dirac_passes_the_inputs_on_and_keeps_the_other_outputs(shape):
    new = initialisers.dirac()(drawn(*shape), examples)
    passed = min(shape[-2:])
    x = np.random.default_rng(2).normal(size=(2, *[9] * (len(shape) - 2), shape[-2])).astype(np.float32)
    with jax.default_matmul_precision("highest"):
        axes = "HW"[: len(shape) - 2]
        dimensions = (f"N{axes}C", f"{axes}IO", f"N{axes}C")
        out = jax.lax.conv_general_dilated(x, new, [1] * len(axes), "SAME", dimension_numbers=dimensions)
    if all(side % 2 for side in shape[:-2]):
        np.testing.assert_allclose(out[..., :passed], x[..., :passed], atol=1e-6)
    assert new[..., :passed].sum() == passed
    np.testing.assert_array_equal(new[..., passed:], drawn(*shape)[..., passed:])


def test_unit_std():
    new = initialisers.unit_std()(drawn(6, 10), examples)
    assert new.dtype == np.float32 and np.std(new, ddof=1) == pytest.approx(1, rel=1e-6)
    np.testing.assert_allclose(new * np.std(drawn(6, 10), ddof=1), drawn(6, 10), rtol=1e-6)


@pytest.mark.parametrize("outputs", [24, 10])
def test_whitening_makes_patches_white(outputs):
    kernel = initialisers.whitening(examples=30, epsilon=1e-9)(drawn(2, 2, 3, outputs), examples)
    half = outputs // 2
    assert kernel.dtype == np.float32
    np.testing.assert_array_equal(kernel[..., half:], -kernel[..., :half])
    patches = np.lib.stride_tricks.sliding_window_view(PICTURES[:30], (2, 2), axis=(1, 2))  # [n, h, w, c, 2, 2]
    flat = patches.transpose(0, 1, 2, 4, 5, 3).reshape(-1, 12)
    np.testing.assert_allclose(
        np.cov(flat @ kernel[..., :half].reshape(12, half), rowvar=False), np.eye(half), atol=1e-3
    )
    largest = np.linalg.eigvalsh(np.cov(flat, rowvar=False))[::-1][:half]
    np.testing.assert_allclose(np.square(kernel[..., :half]).sum((0, 1, 2)), 1 / largest, rtol=1e-3)


def test_epsilon_bounds_what_is_amplified():
    flat = {"image": np.ones((4, 5, 5, 3), np.float32)}
    kernel = initialisers.whitening(epsilon=0.25)(drawn(2, 2, 3, 24), lambda count: flat)
    np.testing.assert_allclose(np.square(kernel).sum((0, 1, 2)), 4, rtol=1e-5)


def config(**changes):
    parts = (
        dict(name="whitening", paths="^stages/0/0/conv/kernel", examples=50, epsilon=1e-3),
        dict(name="dirac", paths="stages/0/1/conv/kernel"),
        dict(name="unit_std", paths="head/kernel"),
    )
    found = tiny.config(initialise=parts, frozen=("^stages/0/0/conv/kernel",), **changes)
    found.model = dict(name="cnn", width=8, depth=1)
    found.preprocess = (dict(name="normalise", mean=(0.5,), std=(0.25,)),)
    return found


def test_it_is_done_at_step_0_on_any_number_of_devices_and_for_averages_too():
    data = tiny.data()
    states = [train.build(config(devices=devices, ema=0.9), data=data).initial() for devices in (1, 8)]
    assert tiny.same(*(jax.device_get(state) for state in states))
    state = states[1]
    assert tiny.same(state.params, state.ema["params"])
    image = data.open()["train"].get(np.arange(50))["image"].astype(np.float32)
    image = (image * np.float32(1 / 255) - np.float32(0.5)) / np.float32(0.25)
    setter = initialisers.whitening(examples=50, epsilon=1e-3)
    kernel = setter(drawn(3, 3, 1, 8), lambda count: {"image": image})
    stage = jax.device_get(state.params)["stages"]["0"]
    np.testing.assert_allclose(stage["0"]["conv"]["kernel"], kernel, rtol=1e-4, atol=1e-5)
    assert stage["1"]["conv"]["kernel"][..., :8].sum() == 8
    assert np.std(state.params["head"]["kernel"], ddof=1) == pytest.approx(1, rel=1e-5)
    plain = config()
    plain.initialise = ()
    other = train.build(plain, data=data).initial()
    assert tiny.same(state.params["stages"]["0"]["0"]["norm"], other.params["stages"]["0"]["0"]["norm"])


@pytest.mark.slow
def test_a_resumed_run_never_comes_there(tmp_path, monkeypatch):
    data = tiny.data()
    whole = train.run(config(), tmp_path / "whole", data=data)
    train.run(config(total="10st"), tmp_path / "cut", data=data)
    monkeypatch.setattr(initialisers, "applied", None)
    cut = train.run(config(), tmp_path / "cut", data=data)
    assert int(cut.state.step) == 24 and tiny.same(whole.state, cut.state)
    first = train.build(config(), data=data)
    monkeypatch.undo()
    assert tiny.same(whole.state.params["stages"]["0"]["0"]["conv"], first.initial().params["stages"]["0"]["0"]["conv"])


def wrong_shape():
    return lambda array, examples: array[..., :1]


@pytest.mark.parametrize(
    ("part", "words"),
    [
        (dict(name="dirac", paths="hed"), ["initialise[0].paths", "'hed'", "head/kernel"]),
        (dict(name="dirac", paths="("), ["regular expression"]),
        (dict(name="dirac", paths="head/kernel"), ["dirac cannot set head/kernel", "[height, width, in, out]"]),
        (dict(name="unit_std", paths="head/bias"), ["unit_std", "head/bias", "all equal"]),
        (dict(name="whitening", paths="0/1/conv/kernel"), ["whitening", "pictures [64, 8, 8, 1]", "kernel"]),
        (dict(name="whitening", paths="head/kernel"), ["whitening", "head/kernel", "even"]),
        (dict(name="whitening", paths="0/0/conv/kernel", epsilon=0.0), ["epsilon=0.0"]),
        (dict(name="whitning", paths="kernel"), ["whitning", "Did you mean 'whitening'"]),
        (dict(name="dirac"), ["paths"]),
        (dict(name="dirac", paths="kernel", scale=2.0), ["scale"]),
        (dict(name=f"{__name__}:wrong_shape", paths="head/kernel"), ["wrong_shape", "expected float32[8, 10]"]),
    ],
)
def test_mistakes_are_one_line(part, words):
    with pytest.raises(UserError) as caught:
        wanted = config()
        wanted.initialise = (part,)
        train.build(wanted, data=tiny.data()).initial()
    assert "\n" not in str(caught.value)
    assert [word for word in words if word not in str(caught.value)] == []
