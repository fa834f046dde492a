"""Augmentation as pure device functions: `augment(key, batch) -> batch`.

Each builder below checks its options once and returns such a function. A batch is a dict of arrays; an
augmentation reads `image` [B, H, W, C] and, to mix pictures, `label` int32 [B]; where `label` is a map [B, H, W],
a class for each pixel, it moves with the picture. Every other entry passes untouched. All randomness is drawn
for the whole global batch from one threefry key, a draw per example, so that what happens to an example depends
on the key and its row and not on how many devices hold the batch. What is drawn once for an example and kept for the
whole run comes from `fixed`, uint32 [B], which the train step adds to the batch (see `fixed_draws`).
Evaluation has no key (None): what draws refuses to run there. Nothing is jitted here: the train step is.

Pictures are floating, in [0, 1] (see `to_unit`), where an augmentation does arithmetic on them; flip, crop
and cutmix only move pixels and take any dtype. The dtype of the picture is kept. A batch with padded rows
says so with `mask` bool [B], true for real rows: no real picture is mixed with padding.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxtrain.errors import UserError

Batch = Mapping[str, jax.Array]
Augment = Callable[[jax.Array | None, Batch], dict[str, jax.Array]]

LUMA = (0.299, 0.587, 0.114)  # ITU-R BT.601, what Pillow and torchvision call grey


def to_unit(batch: Batch) -> dict[str, jax.Array]:
    """`image` uint8 [B, H, W, C] → float32 in [0, 1].

    A floating picture passes untouched, and so does a batch without one.
    Raises UserError for any other dtype, whose range nobody has told us.
    """
    image = batch.get("image")
    if image is None or jnp.issubdtype(image.dtype, jnp.floating):
        return dict(batch)
    if image.dtype != jnp.uint8:
        raise UserError(f"image is {image.dtype}, expected uint8 or floating: convert it in the source")
    # A product: XLA makes one of the division in some programs and not in others, with other last bits.
    return {**batch, "image": image.astype(jnp.float32) * jnp.float32(1 / 255)}


def chain(augments: Sequence[Augment]) -> Augment:
    """One after the other, the i-th with `fold_in(key, i)`: removing the last leaves the draws of the others.

    Without a key (None, in evaluation) each is given none.
    """

    def augment(key: jax.Array | None, batch: Batch) -> dict[str, jax.Array]:
        batch = dict(batch)
        for position, one in enumerate(augments):
            batch = one(None if key is None else jax.random.fold_in(key, position), batch)
        return batch

    return augment


def fixed_draws(key: jax.Array, ids: jax.Array) -> jax.Array:
    """Random bits uint32 [B] of each example (ids int32 [B]) that stay the same in a run, whose root key `key` is.

    The train step puts them into the batch as `fixed`; a step of a user's own does the same where an augmentation asks.
    """
    return jax.vmap(lambda each: jax.random.bits(jax.random.fold_in(key, each), (), jnp.uint32))(ids)


def flip(p: float = 0.5) -> Augment:
    """Mirror left and right with probability `p`."""
    _expect(_within(p, 0, 1), "flip", "p", p, "a number from 0 to 1")

    def augment(key: jax.Array | None, batch: Batch) -> dict[str, jax.Array]:
        image = _image("flip", batch)
        (draw,) = _draws("flip", key, 1, image)
        return _mirrored(batch, draw < p)

    return augment


def alternating_flip() -> Augment:
    """Mirror left and right one half of the pictures in even epochs, and the other half in odd ones.

    Which half a picture is in is drawn once for the whole run: any two epochs in a row show it both ways.
    Jordan, "94% on CIFAR-10 in 3.29 Seconds on a Single GPU", 2024.
    """

    def augment(key: jax.Array | None, batch: Batch) -> dict[str, jax.Array]:
        if key is None:
            raise UserError(
                "alternating_flip: was called without a key, not in training: move it from preprocess to augment"
            )
        _image("alternating_flip", batch)
        lacking = [name for name in ("fixed", "epoch") if name not in batch]
        if lacking:
            raise UserError(
                f"alternating_flip: needs batch[{lacking[0]!r}], found {sorted(batch)}: a step of your own adds "
                "'fixed' with jaxtrain.data.augment.fixed_draws(state.key, batch['id']); 'epoch' is in training batches"
            )
        parity = batch["fixed"] ^ batch["epoch"].astype(jnp.uint32)
        return _mirrored(batch, (parity & jnp.uint32(1)).astype(bool))

    return augment


def crop(padding: int = 4, mode: str = "reflect") -> Augment:
    """Pad each side by `padding` pixels and cut a window of the old size at a uniformly drawn place.

    `mode` is "reflect" (mirrored without repeating the edge) or "constant" (zeros). Reflection needs a
    picture larger than the padding: UserError when the step is traced.
    """
    _expect(_is_int(padding, 0), "crop", "padding", padding, "a whole number of pixels, 0 or more")
    _expect(mode in ("reflect", "constant"), "crop", "mode", mode, "'reflect' or 'constant'")

    def augment(key: jax.Array | None, batch: Batch) -> dict[str, jax.Array]:
        image = _image("crop", batch)
        _, height, width, _ = image.shape
        if mode == "reflect" and padding >= min(height, width):
            raise UserError(
                f"crop: padding={padding} reflects past a picture of {height}x{width}, "
                f"expected at most {min(height, width) - 1}: pad less or use mode='constant'"
            )
        if mode == "constant" and "label" in _moving(batch):
            raise UserError("crop: mode='constant' pads the map of labels with a class: use mode='reflect'")
        top, left = _whole(_draws("crop", key, 2, image), 2 * padding + 1)

        # One gather of windows: on a CPU, a one-hot matmul takes 4 times as long, and rounds on other devices.
        def window(picture: jax.Array, row: jax.Array, column: jax.Array) -> jax.Array:
            rest = picture.shape[2:]
            return jax.lax.dynamic_slice(picture, (row, column, *[jnp.int32(0)] * len(rest)), (height, width, *rest))

        def cut(pictures: jax.Array) -> jax.Array:
            sides = ((0, 0), (padding, padding), (padding, padding), (0, 0))[: pictures.ndim]
            return jax.vmap(window)(jnp.pad(pictures, sides, mode=mode), top, left)

        return {**batch, **{name: cut(batch[name]) for name in _moving(batch)}}

    return augment


def cutout(size: int = 8, fill: float = 0.5) -> Augment:
    """Paint a square of `size` pixels with `fill`.

    Its centre is drawn over the whole picture, so that it may stick out and cover less.
    DeVries and Taylor, "Improved Regularization of Convolutional Neural Networks with Cutout", 2017.
    """
    _expect(_is_int(size, 1), "cutout", "size", size, "a whole number of pixels, 1 or more")
    _expect(_within(fill), "cutout", "fill", fill, "a finite number in the picture's own scale")

    def augment(key: jax.Array | None, batch: Batch) -> dict[str, jax.Array]:
        image = _floating_image("cutout", batch)
        if size > min(image.shape[1:3]):
            raise UserError(f"cutout: size={size} exceeds a picture of {image.shape[1]}x{image.shape[2]}: shrink it")
        length = jnp.full((len(image),), size, jnp.int32)
        hole, _ = _box(_draws("cutout", key, 2, image), length, length, image.shape)
        return {**batch, "image": jnp.where(hole, jnp.asarray(fill, image.dtype), image)}

    return augment


def mixup(alpha: float = 0.2) -> Augment:
    """Blend each picture with another: weight · own + (1 - weight) · other.

    The weight is drawn from Beta(alpha, alpha), one per example (in the paper, one per batch).
    Labels stay whole numbers: adds `mixed_label` int32 [B], the other's label, and `mix` float32 [B], the
    weight of `label`. Zhang et al., "mixup: Beyond Empirical Risk Minimization", 2017.
    """
    _expect(_within(alpha, 0) and alpha > 0, "mixup", "alpha", alpha, "a number above 0")

    def augment(key: jax.Array | None, batch: Batch) -> dict[str, jax.Array]:
        image = _floating_image("mixup", batch)
        other, mixed_label = _partners("mixup", batch)
        weight = _symmetric_beta(_draws("mixup", key, 2, image), alpha)
        share = _per_example(weight).astype(image.dtype)
        blend = other + share * (image - other)  # exactly the picture itself where it is its own partner
        return {**batch, "image": blend, "mixed_label": mixed_label, "mix": weight}

    return augment


def cutmix(alpha: float = 1.0) -> Augment:
    """Paste a box of another picture over a share 1 - weight of each picture.

    The weight is drawn from Beta(alpha, alpha), one per example (in the paper, one per batch).
    The box's centre is drawn over the whole picture and what sticks out is lost, so `mix` float32 [B], the
    weight of `label`, is the share of pixels that are really left; `mixed_label` int32 [B] is the label of
    the pasted box. Yun et al., "CutMix: Regularization Strategy to Train Strong Classifiers with Localizable
    Features", 2019.
    """
    _expect(_within(alpha, 0) and alpha > 0, "cutmix", "alpha", alpha, "a number above 0")

    def augment(key: jax.Array | None, batch: Batch) -> dict[str, jax.Array]:
        image = _image("cutmix", batch)
        _, height, width, _ = image.shape
        other, mixed_label = _partners("cutmix", batch)
        draws = _draws("cutmix", key, 4, image)
        side = jnp.sqrt(1 - _symmetric_beta(draws[:2], alpha))
        box, area = _box(
            draws[2:],
            (side * height).astype(jnp.int32),
            (side * width).astype(jnp.int32),
            image.shape,
        )
        left = (height * width - area).astype(jnp.float32) / (height * width)
        return {**batch, "image": jnp.where(box, other, image), "mixed_label": mixed_label, "mix": left}

    return augment


def colour_jitter(brightness: float = 0.2, contrast: float = 0.2, saturation: float = 0.0) -> Augment:
    """Scale brightness, then contrast about the picture's mean grey, then saturation about each pixel's grey.

    Each strength s draws one factor per example from [max(0, 1 - s), 1 + s]; 0 leaves that step out. The
    result is clipped to [0, 1]. Saturation needs three channels: UserError when the step is traced. The
    operations are those of Howard, "Some Improvements on Deep Convolutional Neural Network Based Image
    Classification", 2013, in fixed order.
    """
    strengths = dict(brightness=brightness, contrast=contrast, saturation=saturation)
    for name, strength in strengths.items():
        _expect(_within(strength, 0), "colour_jitter", name, strength, "a number, 0 or more")

    def augment(key: jax.Array | None, batch: Batch) -> dict[str, jax.Array]:
        image = _floating_image("colour_jitter", batch)
        if saturation and image.shape[-1] != 3:
            raise UserError(f"colour_jitter: saturation={saturation} needs 3 channels, found {image.shape[-1]}: use 0")
        draws = _draws("colour_jitter", key, len(strengths), image)
        for (name, strength), draw in zip(strengths.items(), draws, strict=True):
            if strength:
                low = max(0.0, 1 - strength)
                factor = _per_example(low + draw * (1 + strength - low)).astype(image.dtype)
                neutral = _neutral(name, image)
                image = jnp.clip(neutral + factor * (image - neutral), 0, 1)
        return {**batch, "image": image}

    return augment


def linear_jitter(brightness: float = 0.0, contrast: float = 0.0, centre: tuple[float, ...] = (0.5,)) -> Augment:
    """centre + factor · (image + shift - centre), not clipped: one shift and one factor per example.

    The shift is drawn from [-brightness, brightness], the factor from [1 - contrast, 1 + contrast]. `centre` is one
    number for all channels or one a channel: given the mean of the data set, this is what a shift and a factor do to
    normalised pictures.
    """
    for name, strength in (("brightness", brightness), ("contrast", contrast)):
        _expect(_within(strength, 0), "linear_jitter", name, strength, "a number, 0 or more")
    _expect(_are_numbers(centre), "linear_jitter", "centre", centre, "a tuple of finite numbers, like (0.5,)")

    def augment(key: jax.Array | None, batch: Batch) -> dict[str, jax.Array]:
        image = _floating_image("linear_jitter", batch)
        draws = (2 * _draws("linear_jitter", key, 2, image) - 1).astype(image.dtype)
        middle = jnp.asarray(_channels("linear_jitter", "centre", centre, image))
        shifted = image + _per_example(draws[0] * brightness) - middle
        return {**batch, "image": middle + _per_example(1 + draws[1] * contrast) * shifted}

    return augment


def normalise(mean: tuple[float, ...], std: tuple[float, ...]) -> Augment:
    """(image - mean) / std, with one number for all channels or one a channel; draws nothing."""
    for name, values in (("mean", mean), ("std", std)):
        _expect(_are_numbers(values), "normalise", name, values, "a tuple of finite numbers, like (0.5,)")
    _expect(all(value > 0 for value in std), "normalise", "std", std, "numbers above 0")

    def augment(key: jax.Array | None, batch: Batch) -> dict[str, jax.Array]:
        image = _floating_image("normalise", batch)
        centre, spread = (_channels("normalise", name, v, image) for name, v in (("mean", mean), ("std", std)))
        return {**batch, "image": (image - centre) / spread}

    return augment


def _draws(part: str, key: jax.Array | None, count: int, image: jax.Array) -> jax.Array:
    """All that an augmentation draws, in one go: uniform float32 [count, B] in [0, 1)."""
    if key is None:
        raise UserError(f"{part}: draws at random and was called without a key: move it from preprocess to augment")
    return jax.random.uniform(key, (count, len(image)), jnp.float32)


def _whole(draws: jax.Array, below: int) -> jax.Array:
    """Uniform draws from [0, 1) as whole numbers int32 in 0..below-1."""
    return (draws * below).astype(jnp.int32)


def _partners(part: str, batch: Batch) -> tuple[jax.Array, jax.Array]:
    """(image [B, H, W, C], label int32 [B]) of the row before: the batch's order is already random.

    A shift, and not a permutation, so that devices exchange one picture with their neighbour instead of all.
    Where the row before is padding, the row is its own partner.
    """
    if "mixed_label" in batch:
        raise UserError(f"{part}: the batch is mixed already and holds two labels a picture: keep one of mixup, cutmix")
    if "label" not in batch:
        raise UserError(f"{part}: needs batch['label'], found {sorted(batch)}: mix labelled pictures only")
    image, label = batch["image"], batch["label"].astype(jnp.int32)
    if label.ndim != 1:
        raise UserError(f"{part}: mixes pictures of one label each, found labels {list(label.shape)}: leave it out")
    other_image, other_label = jnp.roll(image, 1, axis=0), jnp.roll(label, 1, axis=0)
    if "mask" not in batch:
        return other_image, other_label
    real = jnp.roll(batch["mask"], 1, axis=0)
    return jnp.where(_per_example(real), other_image, image), jnp.where(real, other_label, label)


def _symmetric_beta(draws: jax.Array, alpha: float) -> jax.Array:
    """Beta(alpha, alpha) float32 [B] in [0, 1], exact and without rejection, of two uniform draws [2, B].

    A Student t variate of 2·alpha degrees of freedom by Bailey, "Polar generation of random variates with the
    t-distribution", 1994, brought to [0, 1]. `jax.random.beta` is a loop that takes a second to compile and,
    on a sharded batch, an all-reduce a round.
    """
    u, v = draws
    tail = (1 - u) ** jnp.float32(1 / alpha)  # of (0, 1]
    cosine = jnp.cos(v * jnp.float32(2 * math.pi))
    body = (1 - tail) * cosine * cosine
    return 0.5 + 0.5 * jnp.sign(cosine) * jnp.sqrt(body / (tail + body))


def _box(draws: jax.Array, height: jax.Array, width: jax.Array, shape: tuple[int, ...]) -> tuple[jax.Array, jax.Array]:
    """A box of height, width int32 [B] about a centre given by two uniform draws [2, B].

    Returns where it is, bool [B, H, W, 1], and how many pixels of the picture it covers, int32 [B].
    """
    rows = _span(_whole(draws[0], shape[1]), height, shape[1])  # [B, H]
    columns = _span(_whole(draws[1], shape[2]), width, shape[2])  # [B, W]
    area = jnp.sum(rows, axis=1, dtype=jnp.int32) * jnp.sum(columns, axis=1, dtype=jnp.int32)
    return rows[:, :, None, None] & columns[:, None, :, None], area


def _span(centre: jax.Array, length: jax.Array, extent: int) -> jax.Array:
    """The pixels, bool [B, extent], of segments given by centre and length, int32 [B]."""
    start = (centre - length // 2)[:, None]
    pixel = jnp.arange(extent, dtype=jnp.int32)[None, :]
    return (start <= pixel) & (pixel < start + length[:, None])


def _neutral(name: str, image: jax.Array) -> jax.Array:
    """What a colour factor of 0 leaves: black, the mean grey of the picture, or each pixel's grey."""
    if name == "brightness":
        return jnp.zeros_like(image)
    size, height, width, channels = image.shape
    luma = LUMA if channels == 3 else (1 / channels,) * channels
    # In this order XLA's CPU code is 2 to 7 times as fast as by a mean over pixels or a sum over channels.
    if name == "contrast":
        columns = jnp.sum(image.reshape(size, height, width * channels), axis=1)  # [B, W·C]
        share = np.asarray(luma, image.dtype)[None, None, :] / (height * width)
        return _per_example(jnp.sum(columns.reshape(size, width, channels) * share, axis=(1, 2)))
    red, green, blue = (image[..., i : i + 1] * weight for i, weight in enumerate(luma))
    return red + green + blue  # [B, H, W, 1]


def _channels(part: str, name: str, values: Sequence[float], image: jax.Array) -> np.ndarray:
    """One number or one a channel as [1, 1, 1, 1 or C] in the picture's dtype."""
    if len(values) not in (1, image.shape[-1]):
        raise UserError(
            f"{part}: {name} has {len(values)} numbers and the picture {image.shape[-1]} channels: "
            f"give 1 or {image.shape[-1]}"
        )
    return np.asarray(values, image.dtype).reshape(1, 1, 1, -1)


def _moving(batch: Batch) -> list[str]:
    """The arrays of a batch that move as the picture does."""
    return ["image", *(["label"] if "label" in batch and batch["label"].ndim == 3 else [])]


def _mirrored(batch: Batch, which: jax.Array) -> dict[str, jax.Array]:
    """The batch with left and right of its pictures swapped where `which`, bool [B], is true."""

    def one(picture: jax.Array) -> jax.Array:
        return jnp.where(which.reshape(-1, *[1] * (picture.ndim - 1)), picture[:, :, ::-1], picture)

    return {**batch, **{name: one(batch[name]) for name in _moving(batch)}}


def _per_example(values: jax.Array) -> jax.Array:
    """[B] → [B, 1, 1, 1]"""
    return values[:, None, None, None]


def _image(part: str, batch: Batch) -> jax.Array:
    if "image" not in batch or batch["image"].ndim != 4:
        found = {name: tuple(value.shape) for name, value in batch.items()}
        raise UserError(f"{part}: needs batch['image'] of shape [B, H, W, C], found {found}")
    return batch["image"]


def _floating_image(part: str, batch: Batch) -> jax.Array:
    image = _image(part, batch)
    if not jnp.issubdtype(image.dtype, jnp.floating):
        raise UserError(f"{part}: image is {image.dtype}, expected floating in [0, 1]: apply to_unit first")
    return image


def _expect(ok: bool, part: str, name: str, value: Any, expected: str) -> None:
    if not ok:
        raise UserError(f"{part}: {name}={value!r}, expected {expected}")


def _within(value: Any, low: float = -math.inf, high: float = math.inf) -> bool:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return number and math.isfinite(value) and low <= value <= high


def _are_numbers(values: Any) -> bool:
    return isinstance(values, list | tuple) and len(values) > 0 and all(_within(value) for value in values)


def _is_int(value: Any, low: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= low
