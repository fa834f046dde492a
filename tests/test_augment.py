"""Augmentations: every one on every kind of picture, what each means, what each refuses."""

import inspect
import zlib
from collections import defaultdict

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from jax.sharding import NamedSharding, PartitionSpec

from jaxtrain import train
from jaxtrain.config import lookup
from jaxtrain.data import augment
from jaxtrain.errors import UserError
from jaxtrain.step import prepare

B, H, W = 16, 12, 10

TABLE = {
    "alternating_flip": augment.alternating_flip(),
    "flip": augment.flip(),
    "crop": augment.crop(padding=3),
    "crop_constant": augment.crop(padding=3, mode="constant"),
    "cutout": augment.cutout(size=5),
    "mixup": augment.mixup(),
    "cutmix": augment.cutmix(),
    "colour_jitter": augment.colour_jitter(0.4, 0.3, 0.0),
    "linear_jitter": augment.linear_jitter(0.2, 0.3),
    "normalise": augment.normalise((0.5,), (0.25,)),
    "chain": augment.chain([augment.flip(), augment.crop(2), augment.mixup()]),
}
STILL = ("normalise", "alternating_flip")  # nothing is drawn from the key of the step
MOVES = ("flip", "alternating_flip", "crop", "crop_constant", "cutmix")  # any dtype: pixels are only moved
every = pytest.mark.parametrize("name", TABLE)


def batch_of(channels=3, dtype=np.float32, size=B, seed=0):
    image = np.random.default_rng(seed).integers(0, 256, (size, H, W, channels), dtype=np.uint8)
    image = image if dtype == np.uint8 else (image / 255).astype(dtype)
    label = np.arange(size, dtype=np.int32) % 10
    mask = np.ones((size,), bool)
    ids = np.arange(size, dtype=np.int32)
    fixed = augment.fixed_draws(key_of(9), jnp.asarray(ids))
    rest = {"label": label, "id": ids, "mask": mask, "epoch": np.zeros(size, np.int32), "fixed": fixed}
    return jax.tree.map(jnp.asarray, {"image": image} | rest)


def key_of(number=0):
    return jax.random.key(number, impl="threefry2x32")


def same(a, b):
    jax.tree.map(np.testing.assert_array_equal, a, b)


@pytest.fixture(autouse=True)
def strict():
    with jax.numpy_dtype_promotion("strict"):
        yield


def test_the_table_covers_every_name_of_the_config():
    assert {name for name in TABLE if name not in ("crop_constant", "chain")} == set(lookup.AUGMENTATIONS)
    for target in lookup.AUGMENTATIONS.values():
        assert inspect.isfunction(lookup.resolve(target, lookup.AUGMENTATIONS, "augmentation"))


@pytest.mark.parametrize("channels", [1, 3])
@every
def test_shapes_dtypes_and_the_rest_of_the_batch_are_kept(name, channels):
    batch = batch_of(channels)
    out = jax.jit(TABLE[name])(key_of(), batch)
    assert out["image"].shape == batch["image"].shape and out["image"].dtype == jnp.float32
    assert bool(jnp.isfinite(out["image"]).all())
    same([out[rest] for rest in ("label", "id", "mask")], [batch[rest] for rest in ("label", "id", "mask")])
    added = {key: out[key].dtype for key in out.keys() - batch.keys()}
    mixes = name in ("mixup", "cutmix", "chain")
    assert added == ({"mixed_label": jnp.int32, "mix": jnp.float32} if mixes else {})


@pytest.mark.parametrize("channels", [1, 3])
@every
def test_eight_devices_give_what_one_gives(name, channels):
    """To the bit where pixels are only moved, to the last one where there is arithmetic."""
    batch, key = batch_of(channels), key_of(3)
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    rows, everywhere = NamedSharding(mesh, PartitionSpec("data")), NamedSharding(mesh, PartitionSpec())
    args = jax.device_put(key, everywhere), jax.device_put(batch, rows)
    program = jax.jit(TABLE[name], out_shardings=rows).lower(*args).compile()
    assert "all-gather" not in program.as_text()  # pictures stay where they are, but for one neighbour's
    sharded, run = program(*args), jax.jit(TABLE[name])
    assert sharded["image"].sharding.num_devices == 8
    tolerance = 0 if name in MOVES else 2e-7
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=tolerance), sharded, run(key, batch))


@every
def test_another_key_another_picture_the_same_key_the_same(name):
    batch, run = batch_of(), jax.jit(TABLE[name])
    first, again, other = run(key_of(1), batch), run(key_of(1), batch), run(key_of(2), batch)
    same(first, again)
    assert bool((first["image"] != other["image"]).any()) == (name not in STILL)


@every
def test_examples_are_drawn_one_by_one(name):
    """Rows that hold the same picture come out different, unless nothing is drawn."""
    batch = batch_of()
    batch["image"] = jnp.concatenate([batch["image"][:1], batch["image"][1:2]] * (B // 2))
    image = np.asarray(jax.jit(TABLE[name])(key_of(), batch)["image"])
    distinct = len({row.tobytes() for row in image[::2]})
    assert distinct == 1 if name == "normalise" else distinct >= 2


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float32])
@every
def test_the_dtype_of_the_picture_is_kept(name, dtype):
    out = jax.eval_shape(TABLE[name], key_of(), batch_of(dtype=dtype))
    assert out["image"].dtype == dtype and not out["image"].weak_type


@pytest.mark.parametrize("dtype", [jnp.bfloat16])
def test_half_precision_pictures_stay_near_the_full_ones(dtype):
    one = augment.chain([augment.colour_jitter(), augment.mixup(), augment.cutout(3)])
    full, half = (jax.jit(one)(key_of(), batch_of(dtype=each))["image"] for each in (np.float32, dtype))
    np.testing.assert_allclose(half.astype(jnp.float32), full, atol=0.02)


@every
def test_bytes_are_moved_as_they_are_or_refused(name):
    batch = batch_of(dtype=np.uint8)
    if name not in MOVES:
        with pytest.raises(UserError, match="uint8.*to_unit"):
            jax.eval_shape(TABLE[name], key_of(), batch)
        return
    as_bytes = jax.jit(TABLE[name])(key_of(), batch)["image"]
    as_floats = jax.jit(TABLE[name])(key_of(), augment.to_unit(batch))["image"]
    same(augment.to_unit({"image": as_bytes})["image"], as_floats)


def test_float64_in_scope_changes_no_draw():
    with jax.enable_x64(True):
        out = jax.jit(TABLE["chain"])(key_of(5), batch_of())
    wanted = jax.jit(TABLE["chain"])(key_of(5), batch_of())
    assert [leaf.dtype for leaf in out.values()] == [leaf.dtype for leaf in wanted.values()]
    same(out, wanted)


@every
def test_float64_in_scope_changes_no_dtype(name):
    wanted = jax.eval_shape(TABLE[name], key_of(), batch_of())
    batch, key = batch_of(), key_of()
    with jax.enable_x64(True):
        assert jax.eval_shape(TABLE[name], key, batch) == wanted


# What each one means.


def test_a_flip_flips_and_only_some():
    batch = batch_of(size=64)
    image, out = np.asarray(batch["image"]), np.asarray(augment.flip()(key_of(), batch)["image"])
    flipped = (out == image[:, :, ::-1]).all(axis=(1, 2, 3))
    kept = (out == image).all(axis=(1, 2, 3))
    assert (flipped ^ kept).all() and 16 <= flipped.sum() <= 48
    same(augment.flip(1.0)(key_of(), batch)["image"], image[:, :, ::-1])
    same(augment.flip(0.0)(key_of(), batch)["image"], image)


def test_an_alternating_flip_shows_each_picture_both_ways_in_any_two_epochs():
    """Which way comes first is of the run: its root key and the example tell, not the step, nor the row."""
    batch, flip = batch_of(size=64), jax.jit(augment.alternating_flip())
    image = np.asarray(batch["image"])

    def flipped(epoch, step=0, rows=slice(None)):
        given = {name: array[rows] for name, array in batch.items()} | {"epoch": jnp.full(64, epoch, jnp.int32)}
        out = np.asarray(flip(key_of(step), given)["image"])
        mirrored = (out == image[rows][:, :, ::-1]).all(axis=(1, 2, 3))
        assert (mirrored ^ (out == image[rows]).all(axis=(1, 2, 3))).all()
        return mirrored

    first = flipped(0)
    assert 16 <= first.sum() <= 48
    for epoch, step in ((0, 5), (1, 6), (2, 7), (7, 8)):
        same(flipped(epoch, step), first ^ bool(epoch % 2))
    same(flipped(0, 1, np.arange(64)[::-1]), first[::-1])
    other = augment.fixed_draws(key_of(10), batch["id"])
    assert bool((other != batch["fixed"]).any()) and len(np.unique(batch["fixed"])) == 64


def test_the_step_gives_each_example_its_fixed_draw():
    """A run of its own key draws others; the batch that the task sees has no `fixed`."""
    job = train.build(tiny.config(augment=(dict(name="alternating_flip"),)), data=tiny.data())
    ready = jax.jit(lambda state, batch: prepare(batch, job.parts, state))
    with job.batches(0, 12) as feed:
        batches = [jax.device_get(batch) for batch in feed]
    seen = {}
    for batch in batches:
        out = ready(job.initial(), batch)
        assert out.keys() == batch.keys()
        plain = np.asarray(augment.to_unit(batch)["image"])
        mirrored = (np.asarray(out["image"]) != plain).any(axis=(1, 2, 3))
        for number, epoch, was in zip(batch["id"], batch["epoch"], mirrored, strict=True):
            seen.setdefault(int(number), set()).add(bool(was) ^ bool(epoch % 2))
    assert len(seen) == 64 and all(len(found) == 1 for found in seen.values())
    assert 16 <= sum(found == {True} for found in seen.values()) <= 48


@pytest.mark.parametrize(("brightness", "contrast"), [(0.2, 0.0), (0.0, 0.4), (0.2, 0.4)])
def test_a_linear_jitter_shifts_then_stretches_about_the_centre(brightness, contrast):
    """What a shift and a factor do to normalised pictures, done before."""
    batch, mean = batch_of(size=64), np.array([0.1, 0.2, 0.3], np.float32)
    out = augment.linear_jitter(brightness, contrast, tuple(map(float, mean)))(key_of(), batch)["image"]
    before, after = np.asarray(batch["image"]) - mean, np.asarray(out) - mean
    factor = np.ptp(after, axis=(1, 2, 3)) / np.ptp(before, axis=(1, 2, 3)) if not brightness else None
    lines = [np.polyfit(b.ravel(), a.ravel(), 1) for b, a in zip(before, after, strict=True)]
    slope, offset = np.array(lines).T
    np.testing.assert_allclose(after, slope[:, None, None, None] * before + offset[:, None, None, None], atol=1e-5)
    assert factor is None or np.allclose(factor, slope, rtol=1e-4)
    assert np.abs(slope - 1).max() <= contrast + 1e-5 and np.abs(offset / slope).max() <= brightness + 1e-5
    assert np.ptp(slope) >= 1.5 * contrast - 1e-5 and np.ptp(offset / slope) >= 1.5 * brightness - 1e-5


def test_alternating_wants_to_know_example_and_epoch():
    for name in ("fixed", "epoch"):
        batch = {key: value for key, value in batch_of().items() if key != name}
        with pytest.raises(UserError, match=f"'{name}'.*fixed_draws"):
            augment.alternating_flip()(key_of(), batch)


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("mode", ["reflect", "constant"])
def test_a_crop_is_a_window_of_the_padded_picture_and_every_window_occurs(mode, channels):
    padding = 2
    batch = batch_of(channels, size=256)
    padded = np.pad(np.asarray(batch["image"]), ((0, 0), (padding, padding), (padding, padding), (0, 0)), mode=mode)
    out = np.asarray(jax.jit(augment.crop(padding, mode))(key_of(), batch)["image"])
    corners = [(row, column) for row in range(2 * padding + 1) for column in range(2 * padding + 1)]
    matches = np.array(
        [(out == padded[:, y : y + H, x : x + W]).all(axis=(1, 2, 3)) for y, x in corners]
    )  # [corners, B]
    assert (matches.sum(axis=0) == 1).all() and matches.any(axis=1).all()


def test_no_padding_is_no_crop():
    batch = batch_of()
    same(augment.crop(0)(key_of(), batch)["image"], batch["image"])


@pytest.mark.parametrize("size", [1, 4, 5])
def test_cutout_paints_one_square_and_clips_it(size):
    batch = batch_of(size=128)
    batch["image"] = jnp.ones_like(batch["image"])
    out = np.asarray(jax.jit(augment.cutout(size, fill=0.25))(key_of(), batch)["image"])
    assert set(np.unique(out)) == {np.float32(0.25), np.float32(1)}
    hole = out[..., 0] == np.float32(0.25)
    assert (hole[..., None] == (out == np.float32(0.25))).all()
    heights, widths = hole.any(axis=2).sum(axis=1), hole.any(axis=1).sum(axis=1)
    assert (hole.sum(axis=(1, 2)) == heights * widths).all()
    assert heights.max() == widths.max() == size and min(heights.min(), widths.min()) >= size // 2
    assert size == 1 or (hole.sum(axis=(1, 2)) == size * size).mean() < 1  # some stick out
    assert hole.any(axis=0).mean() > 0.5  # all over the picture


def test_mixup_blends_with_the_row_before_by_its_weight():
    batch = batch_of()
    out = jax.jit(augment.mixup(alpha=1.0))(key_of(), batch)
    image, weight = np.asarray(batch["image"]), np.asarray(out["mix"])[:, None, None, None]
    np.testing.assert_allclose(out["image"], weight * image + (1 - weight) * np.roll(image, 1, axis=0), atol=1e-6)
    same(out["mixed_label"], np.roll(np.asarray(batch["label"]), 1))
    assert len(np.unique(weight)) == B


def test_cutmix_weighs_by_the_pixels_that_are_left():
    size = 64
    batch = batch_of(1, size=size)
    marks = jnp.arange(size, dtype=jnp.float32)[:, None, None, None]
    batch["image"] = jnp.broadcast_to(marks, batch["image"].shape)
    out = jax.jit(augment.cutmix())(key_of(), batch)
    image, owner = np.asarray(out["image"])[..., 0], np.arange(size)[:, None, None]
    assert ((image == owner) | (image == (owner - 1) % size)).all()
    np.testing.assert_allclose(out["mix"], (image == owner).mean(axis=(1, 2)), atol=1e-7)
    same(out["mixed_label"], np.roll(np.asarray(batch["label"]), 1))
    pasted = image != owner
    assert (pasted.sum(axis=(1, 2)) == pasted.any(axis=2).sum(axis=1) * pasted.any(axis=1).sum(axis=1)).all()
    assert len(np.unique(out["mix"])) > size // 4


@pytest.mark.parametrize("alpha", [0.05, 0.2, 1.0, 20.0])
def test_weights_are_beta_distributed(alpha):
    stats = pytest.importorskip("scipy.stats", reason="SciPy comes with JAX")
    batch = {"image": jnp.zeros((4000, 1, 1, 1)), "label": jnp.zeros((4000,), jnp.int32)}
    weight = np.asarray(jax.jit(augment.mixup(alpha))(key_of(7), batch)["mix"])
    assert ((weight >= 0) & (weight <= 1)).all()
    # In float32 much of the mass of a small alpha lies on 0 and 1 themselves: compare at the points between.
    at = np.linspace(0.001, 0.999, 50)
    found = np.searchsorted(np.sort(weight), at, side="right") / len(weight)
    np.testing.assert_allclose(found, stats.beta(alpha, alpha).cdf(at), atol=0.03)


@pytest.mark.parametrize("alpha", [1e-30, 1e30])
def test_extreme_weights_are_numbers(alpha):
    weight = jax.jit(augment.mixup(alpha))(key_of(), batch_of(size=64))["mix"]
    np.testing.assert_allclose(np.abs(np.asarray(weight) - 0.5), 0.5 if alpha < 1 else 0, atol=1e-6)


@pytest.mark.parametrize("build", [augment.mixup, augment.cutmix])
def test_padding_is_never_mixed_into_a_picture(build):
    batch = batch_of()
    real = jnp.arange(B) % 3 != 0
    batch["image"] = jnp.where(real[:, None, None, None], batch["image"], jnp.nan)
    batch["label"] = jnp.where(real, batch["label"], -1)
    batch["mask"] = real
    out = jax.jit(build(1.0))(key_of(), batch)
    assert bool(jnp.isfinite(out["image"][real]).all()) and bool((out["mixed_label"][real] >= 0).all())
    alone = real & ~jnp.roll(real, 1)
    same(out["image"][alone], batch["image"][alone])
    same(out["mixed_label"][alone], batch["label"][alone])


@every
def test_padded_rows_leave_the_others_alone(name):
    """What stands in a padded row changes nothing in a real one."""
    batch = batch_of()
    batch["mask"] = batch["id"] < B - 3
    poisoned = batch | {"image": batch["image"].at[-3:].set(jnp.nan)}
    run = jax.jit(TABLE[name])
    same(run(key_of(), batch)["image"][: B - 3], run(key_of(), poisoned)["image"][: B - 3])


def colour(name, strength):
    return augment.colour_jitter(**(dict(brightness=0.0, contrast=0.0, saturation=0.0) | {name: strength}))


LUMA = np.array([0.299, 0.587, 0.114], np.float32)
NEUTRAL = {
    "brightness": lambda image: np.zeros_like(image),
    "contrast": lambda image: (image @ LUMA).mean(axis=(1, 2))[:, None, None, None] + np.zeros_like(image),
    "saturation": lambda image: (image @ LUMA)[..., None] + np.zeros_like(image),
}


@pytest.mark.parametrize("name", NEUTRAL)
def test_colour_moves_each_picture_by_one_factor_within_its_strength(name):
    batch = batch_of()
    batch["image"] = 0.4 + 0.2 * batch["image"]  # so that nothing is clipped
    image = np.asarray(batch["image"])
    out = np.asarray(jax.jit(colour(name, 0.3))(key_of(), batch)["image"])
    neutral = NEUTRAL[name](image)
    moved, offset = (out - neutral).reshape(B, -1), (image - neutral).reshape(B, -1)
    factor = (moved * offset).sum(axis=1) / (offset * offset).sum(axis=1)
    np.testing.assert_allclose(moved, factor[:, None] * offset, atol=2e-6)
    assert (np.abs(factor - 1) <= 0.3).all() and np.ptp(factor) > 0.2
    same(colour(name, 0.0)(key_of(), batch)["image"], batch["image"])


@pytest.mark.parametrize("channels", [1, 2, 3, 4])
def test_colours_stay_in_range_and_grey_is_its_own_grey(channels):
    out = augment.colour_jitter(5.0, 5.0)(key_of(), batch_of(channels))["image"]
    assert float(out.min()) >= 0 and float(out.max()) <= 1


@pytest.mark.parametrize(
    ("channels", "mean", "std"),
    [
        (1, (0.3,), (0.5,)),
        (3, (0.3,), (0.5,)),
        (3, (0.1, 0.2, 0.3), (0.4, 0.5, 0.6)),
        (3, [0, 0, 0], [1, 2, 3]),
    ],
)
def test_normalise(channels, mean, std):
    batch = batch_of(channels)
    out = augment.normalise(mean, std)(None, batch)["image"]  # no key: it also runs in evaluation
    wanted = (np.asarray(batch["image"]) - np.float32(mean)) / np.float32(std)
    np.testing.assert_allclose(out, wanted, atol=1e-6)


def test_to_unit():
    image = np.arange(256, dtype=np.uint8).reshape(1, 16, 16, 1)
    out = augment.to_unit({"image": jnp.asarray(image), "label": jnp.int32(1)})
    np.testing.assert_array_equal(out["image"], image.astype(np.float32) * np.float32(1 / 255))
    assert float(out["image"].max()) == 1.0
    assert out["image"].dtype == jnp.float32 and out["label"] == 1
    same(augment.to_unit(out), out)
    same(augment.to_unit({"tokens": jnp.ones((2, 3), jnp.int32)}), {"tokens": np.ones((2, 3))})
    with pytest.raises(UserError, match="int32"):
        augment.to_unit({"image": jnp.asarray(image, jnp.int32)})


# Chains.


def test_a_chain_gives_each_its_own_key_and_the_last_may_go():
    batch, key = batch_of(), key_of(9)
    flip, crop = augment.flip(), augment.crop(3)
    wanted = crop(jax.random.fold_in(key, 1), flip(jax.random.fold_in(key, 0), batch))
    same(augment.chain([flip, crop])(key, batch), wanted)
    same(augment.chain([flip])(key, batch), flip(jax.random.fold_in(key, 0), batch))
    same(augment.chain([])(key, batch), batch)
    same(augment.chain([augment.normalise((0.0,), (1.0,))])(None, batch), batch)


@pytest.mark.parametrize("name", [name for name in TABLE if name != "normalise"])
def test_without_a_key_nothing_random_runs(name):
    with pytest.raises(UserError, match="without a key.*preprocess"):
        augment.chain([TABLE[name]])(None, batch_of())


def test_augmentation_varies_over_the_epochs_and_a_rerun_is_identical():
    """16 pictures, 4 epochs: nearly every picture is seen in several versions; evaluation sees one."""
    batch = batch_of()
    run = jax.jit(
        lambda step, batch: augment.chain([augment.flip(), augment.crop(2)])(jax.random.fold_in(key_of(0), step), batch)
    )

    def checksums():
        seen = defaultdict(list)
        for step in range(8):  # batches of 8
            rows = jax.tree.map(lambda x, step=step: x[(step % 2) * 8 :][:8], batch)
            for name, picture in zip(rows["id"], np.asarray(run(jnp.int32(step), rows)["image"]), strict=True):
                seen[int(name)].append(zlib.crc32(picture.tobytes()))
        return seen

    first = checksums()
    assert first == checksums()
    assert sum(len(set(each)) >= 2 for each in first.values()) >= 0.9 * len(first)


# Refusals.


@pytest.mark.parametrize(
    ("build", "options", "words"),
    [
        (augment.flip, dict(p=1.5), "flip: p=1.5"),
        (augment.flip, dict(p=-0.1), "p=-0.1"),
        (augment.flip, dict(p=float("nan")), "p=nan"),
        (augment.flip, dict(p="half"), "p='half'"),
        (augment.flip, dict(p=True), "p=True"),
        (augment.crop, dict(padding=-1), "padding=-1"),
        (augment.crop, dict(padding=1.5), "padding=1.5"),
        (augment.crop, dict(mode="wrap"), "mode='wrap'.*'reflect'"),
        (augment.cutout, dict(size=0), "size=0"),
        (augment.cutout, dict(fill=float("inf")), "fill=inf"),
        (augment.mixup, dict(alpha=0.0), "alpha=0.0"),
        (augment.cutmix, dict(alpha=-1), "alpha=-1"),
        (augment.colour_jitter, dict(contrast=-0.2), "contrast=-0.2"),
        (augment.linear_jitter, dict(brightness=-0.1), "brightness=-0.1"),
        (augment.linear_jitter, dict(contrast=float("nan")), "contrast=nan"),
        (augment.linear_jitter, dict(centre=()), r"centre=\(\)"),
        (augment.normalise, dict(mean=(0.5,), std=(0.0,)), r"std=\(0.0,\)"),
        (augment.normalise, dict(mean=(0.5,), std=(1.0, -1.0, 1.0)), "std="),
        (augment.normalise, dict(mean=0.5, std=(1.0,)), "mean=0.5"),
        (augment.normalise, dict(mean=(), std=(1.0,)), r"mean=\(\)"),
    ],
)
def test_bad_options_are_refused_when_built(build, options, words):
    with pytest.raises(UserError, match=words) as caught:
        build(**options)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("one", "channels", "words"),
    [
        (augment.crop(10), 3, "padding=10.*12x10.*at most 9"),
        (augment.cutout(11), 3, "size=11.*12x10"),
        (augment.colour_jitter(0.1, 0.1, 0.1), 1, "saturation=0.1.*3 channels.*found 1"),
        (augment.normalise((0.1, 0.2, 0.3), (1.0,)), 1, "mean has 3 numbers.*1 channels"),
        (augment.linear_jitter(centre=(0.1, 0.2)), 3, "linear_jitter: centre has 2 numbers.*3 channels"),
        (augment.normalise((0.1,), (1.0, 1.0)), 3, "std has 2 numbers.*3 channels"),
        (augment.chain([augment.mixup(), augment.cutmix()]), 3, "cutmix.*mixed already"),
    ],
)
def test_what_does_not_fit_the_picture_is_refused_when_traced(one, channels, words):
    with pytest.raises(UserError, match=words) as caught:
        jax.eval_shape(one, key_of(), batch_of(channels))
    assert "\n" not in str(caught.value)


def test_constant_padding_may_exceed_the_picture():
    out = augment.crop(20, "constant")(key_of(), batch_of())["image"]
    assert out.shape == (B, H, W, 3)


@every
def test_a_batch_without_pictures_is_refused(name):
    with pytest.raises(UserError, match=r"\[B, H, W, C\].*tokens"):
        TABLE[name](key_of(), {"tokens": jnp.zeros((2, 3), jnp.int32)})


@pytest.mark.parametrize("build", [augment.mixup, augment.cutmix])
def test_mixing_wants_labels(build):
    with pytest.raises(UserError, match="batch.'label'.*image"):
        build()(key_of(), {"image": batch_of()["image"]})


@pytest.mark.parametrize(
    "one", [augment.flip(), augment.crop(3), augment.alternating_flip()], ids=["flip", "crop", "alternating"]
)
def test_a_map_of_labels_moves_with_the_picture(one):
    batch = batch_of(channels=1, dtype=np.uint8)
    batch["label"] = batch["image"][..., 0].astype(jnp.int32)
    out = jax.jit(one)(key_of(), batch)
    assert not bool((out["image"] == batch["image"]).all())
    same(out["label"], out["image"][..., 0].astype(jnp.int32))


@pytest.mark.parametrize("one", [augment.crop(3, mode="constant"), augment.mixup(), augment.cutmix()])
def test_a_map_of_labels_is_refused_where_it_would_become_wrong(one):
    batch = batch_of() | {"label": jnp.zeros((B, H, W), jnp.int32)}
    with pytest.raises(UserError, match="labels"):
        jax.eval_shape(one, key_of(), batch)
