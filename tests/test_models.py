"""One table of models, the same checks over all of them; and what each family promises beside."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jaxtrain import flops, precision
from jaxtrain.errors import UserError
from jaxtrain.model import build_model
from jaxtrain.models.airbench import AirBench
from jaxtrain.models.cnn import CNN
from jaxtrain.models.convnext import ConvNeXt
from jaxtrain.models.layers import ConvNorm, Linear, StochasticDepth, depth_rates, max_pool, normalisation
from jaxtrain.models.mlp import MLP
from jaxtrain.models.resnet import ResNet
from jaxtrain.models.unet import UNet
from jaxtrain.models.vit import ViT, resample_positions
from jaxtrain.models.wideresnet import WideResNet

BATCH, CLASSES = 16, 5
KEY = jax.random.key(0)


class Row(NamedTuple):
    """One model of the table. `slow` ones take long to compile."""

    part: dict
    shape: tuple  # of one input, a picture of noise
    outputs: tuple = (CLASSES,)  # shape, for one input
    slow: bool = True
    draws: bool = False  # dropout, or stochastic depth


VIT = dict(name="vit", patch=4, width=8, depth=2, heads=2)

ZOO = {
    "airbench": Row(dict(name="airbench", widths=(8, 8)), (10, 9, 3), slow=False),
    "airbench, residual": Row(
        dict(name="airbench", widths=(8, 8), depth=3, residual=True, activation="silu", patch=1), (9, 8, 1)
    ),
    "mlp": Row(dict(name="mlp", hidden=(16, 16), dropout=0.5), (8, 8, 1), slow=False, draws=True),
    "cnn": Row(dict(name="cnn", width=8), (8, 8, 1), slow=False),
    "cnn, dropout": Row(
        dict(name="cnn", width=16, depth=1, norm="group", dropout=0.5), (8, 8, 3), slow=False, draws=True
    ),
    "cnn, layer": Row(dict(name="cnn", width=8, norm="layer"), (9, 7, 1), slow=False),
    "cnn, none": Row(dict(name="cnn", width=8, norm="none", depth=1), (8, 8, 1), slow=False),
    "resnet 18": Row(dict(name="resnet", depth=18, width=4), (8, 8, 3), slow=False),
    "resnet 18, imagenet": Row(dict(name="resnet", depth=18, width=4, stem="imagenet"), (32, 32, 3)),
    "resnet 18, depth": Row(dict(name="resnet", depth=18, width=4, stochastic_depth=0.5), (8, 8, 3), draws=True),
    "resnet 20": Row(dict(name="resnet", depth=20, width=4), (8, 8, 3)),
    "resnet 50": Row(dict(name="resnet", depth=50, width=2), (8, 8, 3)),
    "wideresnet": Row(dict(name="wideresnet", depth=10, widen=1, dropout=0.3), (8, 8, 3), draws=True),
    "wideresnet, depth": Row(dict(name="wideresnet", depth=10, widen=1, stochastic_depth=0.5), (8, 8, 3), draws=True),
    "convnext": Row(
        dict(name="convnext", patch=2, width=4, blocks=(1, 1), layer_scale=0.1, stochastic_depth=0.5),
        (8, 8, 3),
        draws=True,
    ),
    "vit": Row(VIT, (8, 8, 3)),
    "vit, shallow": Row(VIT | dict(depth=1), (8, 8, 3), slow=False),
    "vit, scan": Row(
        VIT | dict(scan=True, remat="dots", pool="map", registers=2, dropout=0.2, stochastic_depth=0.5),
        (8, 8, 3),
        draws=True,
    ),
    "vit, remat": Row(VIT | dict(remat="full", pool="mean", dropout=0.2, stochastic_depth=0.5), (8, 12, 1), draws=True),
    "unet": Row(dict(name="unet", width=2, depth=1), (8, 8, 1), (8, 8, CLASSES)),
    "unet, dropout": Row(dict(name="unet", width=2, depth=2, norm="group", dropout=0.5), (8, 12, 1), (8, 12, CLASSES)),
}


def table(rows):
    return [pytest.param(name, marks=pytest.mark.slow) if ZOO[name].slow else name for name in rows]


DTYPES = {"float32": jnp.float32, "bfloat16": jnp.bfloat16}


def mesh(devices):
    return Mesh(np.asarray(jax.devices()[:devices]), ("data",), axis_types=(AxisType.Auto,))


def whole(devices):
    return NamedSharding(mesh(devices), PartitionSpec())


def rows(devices):
    return NamedSharding(mesh(devices), PartitionSpec("data"))


@functools.cache
def built(name, dtype="float32"):
    return build_model(ZOO[name].part, num_classes=CLASSES, input_shape=ZOO[name].shape, dtype=DTYPES[dtype])


@functools.cache
def made(name):
    """Parameters, state and a batch of noise, as NumPy arrays."""
    example = jnp.zeros((1, *ZOO[name].shape), jnp.float32)
    params, model_state = jax.jit(built(name).init)(KEY, example)
    # Gains that start at zero keep gradients from what is before them: move everything a little.
    noise = np.random.default_rng(1)
    params = jax.tree.map(lambda x: x + 0.1 * noise.normal(size=x.shape).astype(np.float32), jax.device_get(params))
    x = 0.5 + noise.normal(size=(BATCH, *ZOO[name].shape)).astype(np.float32)
    return params, jax.device_get(model_state), x


@functools.cache
def steps(name, dtype):
    """The jitted train and eval functions of a model, in which no dtype is promoted unasked."""
    model = built(name, dtype)

    def train(params, model_state, x, key):
        def loss(params):
            with jax.numpy_dtype_promotion("strict"):
                out, new = model.apply(params, model_state, x, key=key, train=True)
            picked = jax.nn.log_softmax(out.astype(jnp.float32))[..., 0]
            return -picked.mean(), (out, new)

        return jax.grad(loss, has_aux=True)(params)

    def evaluate(params, model_state, x):
        with jax.numpy_dtype_promotion("strict"):
            return model.apply(params, model_state, x, key=None, train=False)

    return jax.jit(train), jax.jit(evaluate)


# The slow half of the product seldom tells more: a dtype is decided when a model is traced, devices after that.
PLACES = [
    *(("float32", 8), ("bfloat16", 1)),
    *(pytest.param(*place, marks=pytest.mark.slow) for place in (("float32", 1), ("bfloat16", 8))),
]


@pytest.mark.parametrize(("dtype", "devices"), PLACES)
@pytest.mark.parametrize("name", table(ZOO))
def test_conformance(name, dtype, devices):
    params, model_state, x = made(name)
    params, model_state = jax.device_put((params, model_state), whole(devices))
    x = jax.device_put(x, rows(devices))
    train, evaluate = steps(name, dtype)
    compiled = train._cache_size()

    grads, (out, after) = train(params, model_state, x, KEY)
    assert (out.shape, out.dtype) == ((BATCH, *ZOO[name].outputs), DTYPES[dtype])
    grads, out = jax.device_get((grads, out))  # an operation of jnp would be compiled for each shape
    assert np.isfinite(out.astype(np.float32)).all()
    assert {leaf.dtype for leaf in jax.tree.leaves((params, after, grads))} == {jnp.dtype(jnp.float32)}
    assert jax.tree.structure(grads) == jax.tree.structure(params)
    for path, leaf in jax.tree_util.tree_leaves_with_path(grads):
        assert np.isfinite(leaf).all() and (leaf != 0).any(), jax.tree_util.keystr(path)

    after = jax.device_put(after, whole(devices))
    train(params, after, x, jax.random.key(1))
    assert train._cache_size() == compiled + 1

    first, state = evaluate(params, after, x)
    second, _ = evaluate(params, after, x)
    assert (first.shape, first.dtype) == ((BATCH, *ZOO[name].outputs), DTYPES[dtype])
    jax.tree.map(np.testing.assert_array_equal, (first, state), (second, after))


ON_ONE_TOO = ("mlp", "cnn, dropout", "resnet 18, depth", "vit, scan")  # dropout, depth that is drawn, both in a loop


@pytest.mark.parametrize("name", table(name for name in ZOO if ZOO[name].draws))
def test_dropout_masks(name):
    params, model_state, x = made(name)
    x = np.concatenate([x[: BATCH // 2]] * 2)  # equal halves: only their masks differ

    def outputs(key, devices=8, x=x):
        at = jax.device_put((params, model_state), whole(devices))
        _, (out, _) = steps(name, "float32")[0](*at, jax.device_put(x, rows(devices)), key)
        return np.asarray(out)

    first = outputs(KEY)
    assert (first[: BATCH // 2] != first[BATCH // 2 :]).any()
    np.testing.assert_array_equal(first, outputs(KEY))
    if name in ON_ONE_TOO:
        np.testing.assert_allclose(first, outputs(KEY, devices=1), rtol=1e-5, atol=1e-5)
    assert (np.abs(first - outputs(jax.random.key(1))) > 1e-3).any()


@pytest.mark.parametrize("name", ["airbench", "cnn", "resnet 18"])
def test_batch_statistics_are_global(name):
    params, model_state, x = made(name)
    x = x + np.arange(BATCH, dtype=np.float32).reshape(BATCH, 1, 1, 1)  # each device sees another mean

    def trained(devices):
        at = jax.device_put((params, model_state), whole(devices))
        return steps(name, "float32")[0](*at, jax.device_put(x, rows(devices)), KEY)

    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-5), trained(8), trained(1))


@pytest.mark.parametrize("name", table(ZOO))
def test_rows_do_not_mix_in_evaluation(name):
    params, model_state, x = made(name)
    at = jax.device_put((params, model_state), whole(8))  # as in the first test, whose program this is

    def evaluated(x):
        return jax.device_get(steps(name, "float32")[1](*at, jax.device_put(x, rows(8)))[0])

    together, alone = evaluated(x), evaluated(np.concatenate([x[:1]] * BATCH))
    np.testing.assert_allclose(together[:1], alone[:1], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("part", ["mlp", "cnn", "resnet"])
def test_whole_numbers_are_taken_too(part):
    model = build_model(part, num_classes=CLASSES, input_shape=(8, 8, 1), dtype=jnp.bfloat16)
    x = jax.ShapeDtypeStruct((2, 8, 8, 1), jnp.uint8)
    out, _ = jax.eval_shape(lambda x: model.apply(*model.init(KEY, x), x, key=None, train=False), x)
    assert (out.shape, out.dtype) == ((2, CLASSES), jnp.bfloat16)


@pytest.mark.parametrize("name", ["mlp", "cnn", "cnn, dropout", "vit, shallow"])
def test_float64_is_float64_throughout(name):
    with jax.enable_x64(True):
        wide = precision.cast(made(name), jnp.float64)
        model = build_model(ZOO[name].part, num_classes=CLASSES, input_shape=ZOO[name].shape, dtype=jnp.float64)
        found = jax.eval_shape(functools.partial(model.apply, key=KEY, train=True), *wide)
        assert {leaf.dtype for leaf in jax.tree.leaves(found)} == {jnp.dtype(jnp.float64)}


SLOW = pytest.mark.slow
IMAGENET = ((224, 224, 3), 1000)
CIFAR = ((32, 32, 3), 10)
# Parameters, and multiply-adds in billions: of torchvision's models as its documentation lists them; of ViT-Ti and S
# by timm (parameters) and Touvron et al., 2020, table 1; of the CIFAR ResNets He et al., 2015, table 6, to its digits;
# of WRN-28-10 Zagoruyko and Komodakis, 2016, table 4 (36.5 million).
PUBLISHED = [
    (dict(name="resnet", depth=18), *IMAGENET, 11_689_512, 1.81),
    pytest.param(dict(name="resnet", depth=34), *IMAGENET, 21_797_672, 3.66, marks=SLOW),
    (dict(name="resnet", depth=50), *IMAGENET, 25_557_032, 4.09),
    pytest.param(dict(name="resnet", depth=101), *IMAGENET, 44_549_160, 7.80, marks=SLOW),
    pytest.param(dict(name="resnet", depth=152), *IMAGENET, 60_192_808, 11.51, marks=SLOW),
    (dict(name="resnet", depth=20), *CIFAR, 0.27e6, None),
    pytest.param(dict(name="resnet", depth=32), *CIFAR, 0.46e6, None, marks=SLOW),
    pytest.param(dict(name="resnet", depth=44), *CIFAR, 0.66e6, None, marks=SLOW),
    pytest.param(dict(name="resnet", depth=56), *CIFAR, 0.85e6, None, marks=SLOW),
    pytest.param(dict(name="resnet", depth=110), *CIFAR, 1.7e6, None, marks=SLOW),
    # Four convolutions of 256 × 256 channels and what is before: "2M parameters"; the 96 % network is said to have 10M.
    (dict(name="airbench"), *CIFAR, 1_971_640, None),
    (dict(name="wideresnet", depth=28, widen=10), *CIFAR, 36_479_194, None),
    (dict(name="vit", size="Ti", scan=True), *IMAGENET, 5_717_416, 1.3),
    (dict(name="vit", size="S", scan=True), *IMAGENET, 22_050_664, 4.6),
    (dict(name="vit", size="B", scan=True), *IMAGENET, 86_567_656, 17.56),
    pytest.param(dict(name="vit", size="B"), *IMAGENET, 86_567_656, 17.56, marks=SLOW),
    (dict(name="vit", size="L", scan=True), *IMAGENET, 304_326_632, 61.55),
    (dict(name="convnext", size="T"), *IMAGENET, 28_589_128, 4.46),
    pytest.param(dict(name="convnext", size="S"), *IMAGENET, 50_223_688, 8.68, marks=SLOW),
    pytest.param(dict(name="convnext", size="B"), *IMAGENET, 88_591_464, 15.36, marks=SLOW),
    pytest.param(dict(name="convnext", size="L"), *IMAGENET, 197_767_336, 34.36, marks=SLOW),
]


@pytest.mark.parametrize(("part", "shape", "classes", "count", "billions"), PUBLISHED)
def test_parameters_and_multiply_adds_are_the_published(part, shape, classes, count, billions):
    """In abstract evaluation: nothing is allocated."""
    model = build_model(part, num_classes=classes, input_shape=shape)
    x = jax.ShapeDtypeStruct((1, *shape), jnp.float32)
    params, model_state = jax.eval_shape(model.init, KEY, x)
    found = sum(leaf.size for leaf in jax.tree.leaves(params))
    assert found == count if isinstance(count, int) else found == pytest.approx(count, rel=0.02)
    if billions is not None:
        macs = flops.multiply_adds(functools.partial(model.apply, key=None, train=False), params, model_state, x)
        # A figure of two digits is the count rounded: 1.3 is anything from 1.25 on.
        slack = 0.05e9 if billions * 10 % 1 == 0 else 0
        assert abs(macs - billions * 1e9) <= max(0.02 * billions * 1e9, slack)


def test_blocks_start_as_the_identity():
    model = build_model(dict(name="resnet", depth=20, width=4), num_classes=CLASSES, input_shape=(8, 8, 3))
    params, _ = jax.eval_shape(model.init, KEY, None)
    last = jax.jit(model.init)(KEY, None)[0]["stages"]["0"]["0"]["layers"]["1"]["norm"]["scale"]
    assert set(params["stages"]["0"]["0"]) == {"layers"}  # and so a shortcut without parameters
    assert not last.any()


@pytest.mark.parametrize(
    ("size", "stages"), [(1, 1), (4, 1), (8, 2), (28, 3), (32, 4), (64, 5)], ids=lambda value: str(value)
)
def test_the_cnn_grows_with_the_picture(size, stages):
    model = build_model(dict(name="cnn", width=2), num_classes=CLASSES, input_shape=(size, size, 1))
    params, _ = jax.eval_shape(model.init, KEY, None)
    assert len(params["stages"]) == stages


@pytest.mark.parametrize("norm", ["batch", "group", "layer"])
def test_normalisation_computes_in_float32(norm):
    """A mean of 500 with a spread of 1: bfloat16, which has 8 bits, would leave nothing of the spread."""
    layer = normalisation(norm, 8, dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    x = 500 + jax.random.normal(KEY, (8, 8, 8, 8), jnp.float32)
    np.testing.assert_allclose(layer(x).std(), 1.0, atol=0.05)
    block = ConvNorm(8, 8, 3, norm=norm, dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    assert block(x).dtype == jnp.bfloat16


@pytest.mark.parametrize(
    ("builder", "options", "shape", "words"),
    [
        (MLP, dict(dropout=1.0), (8, 8, 1), ["dropout", "1.0"]),
        (CNN, dict(depth=9), (8, 8, 1), ["depth=9", "8×8", "1 to 4"]),
        (CNN, dict(norm="bacth"), (8, 8, 1), ["bacth", "batch"]),
        (CNN, {}, (8, 8), ["cnn", "(8, 8)"]),
        (AirBench, dict(depth=0), (32, 32, 3), ["depth=0"]),
        (AirBench, dict(residual=True), (32, 32, 3), ["depth=2", "residual 3"]),
        (AirBench, dict(activation="relu"), (32, 32, 3), ["relu", "gelu"]),
        (AirBench, dict(widths=()), (32, 32, 3), ["widths=()"]),
        (AirBench, {}, (8, 8, 3), ["8×8", "fewer widths"]),
        (ResNet, dict(depth=19), (8, 8, 3), ["19", "18, 20"]),
        (ResNet, {}, (192,), ["resnet", "(192,)"]),
        (ResNet, dict(stochastic_depth=1.0), (8, 8, 3), ["stochastic_depth", "1.0"]),
        (WideResNet, dict(depth=27), (8, 8, 3), ["depth=27", "6n + 4"]),
        (ConvNeXt, dict(size="XL"), (64, 64, 3), ["'XL'", "Known: B, L, S, T"]),
        (ConvNeXt, {}, (28, 28, 1), ["patch=4", "32 pixels", "28×28"]),
        (UNet, {}, (24, 32, 3), ["depth=4", "multiples of 16", "24×32"]),
        (ViT, dict(size="M"), (32, 32, 3), ["size", "'M'"]),
        (ViT, dict(pool="max"), (32, 32, 3), ["pool", "'max'"]),
        (ViT, {}, (28, 28, 1), ["patch=16", "28×28"]),
        (ViT, dict(heads=5), (32, 32, 3), ["5 heads", "192"]),
    ],
)
def test_mistakes_are_one_line(builder, options, shape, words):
    model = build_model(functools.partial(builder, **options), num_classes=CLASSES, input_shape=shape)
    with pytest.raises(UserError) as error:
        jax.eval_shape(model.init, KEY, None)
    assert "\n" not in str(error.value)
    assert all(word in str(error.value) for word in words), str(error.value)


# Depth that is drawn.


def test_stochastic_depth_leaves_whole_rows_out_and_keeps_the_mean():
    layer = StochasticDepth(nnx.Rngs(0))
    x = jnp.ones((1024, 2, 3), jnp.bfloat16)
    for rate in (0.25, jnp.float32(0.25)):
        out = np.asarray(layer(x, rate).astype(jnp.float32))
        assert out.std(axis=(1, 2)).max() == 0  # a row is kept or left out as a whole
        assert set(np.unique(out)) == {0.0, np.float32(jnp.bfloat16(1 / 0.75))}
        assert out.mean() == pytest.approx(1, abs=0.08)
    layer.eval()
    assert layer(x, 0.25) is x
    assert depth_rates(0.3, 4) == pytest.approx([0, 0.1, 0.2, 0.3]) and depth_rates(0.3, 1) == [0]


# ViT: layers in a loop, layers computed twice, positions of another size.


def loss_of(model, x):
    def loss(params, key=KEY):
        out, _ = model.apply(params, {}, x, key=key, train=True)
        return jnp.square(out).mean()

    return loss


def stacked(params):
    """The parameters of blocks one by one, as `scan` keeps them."""
    blocks = [params["blocks"][str(index)] for index in range(len(params["blocks"]))]
    return params | {"blocks": jax.tree.map(lambda *leaves: np.stack(leaves), *blocks)}


@pytest.mark.slow
@pytest.mark.parametrize(("scan", "remat"), [(True, "dots"), (False, "full")])
def test_a_loop_over_layers_and_rematerialisation_change_nothing(scan, remat):
    params, _, x = made("vit")
    other = build_model(VIT | dict(scan=scan, remat=remat), num_classes=CLASSES, input_shape=(8, 8, 3))
    wanted = jax.jit(jax.grad(loss_of(built("vit"), x)))(params)
    found = jax.jit(jax.grad(loss_of(other, x)))(stacked(params) if scan else params)
    wanted = stacked(wanted) if scan else wanted
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-6), found, wanted)


def test_rematerialisation_computes_again_what_its_policy_says():
    """Of a block's products, "dots" repeats only those between positions, which have batch dimensions."""
    params, _, x = made("vit")
    count = {}
    for remat in ("none", "dots", "full"):
        model = build_model(VIT | dict(remat=remat), num_classes=CLASSES, input_shape=(8, 8, 3))
        count[remat] = flops.multiply_adds(jax.grad(loss_of(model, x)), params)
    forward = flops.multiply_adds(loss_of(built("vit"), x), params)
    assert count["none"] < count["dots"] < count["full"] < count["none"] + forward
    assert count["dots"] - count["none"] < 0.2 * (count["full"] - count["none"])


@pytest.mark.slow
def test_scanned_layers_draw_masks_of_their_own_and_new_ones_in_each_call():
    """As a user of the module itself sees it, who gives no key."""
    layer = ViT(2, scan=True, stochastic_depth=0.9, **VIT_OPTIONS)
    layer.head.kernel[...] = jnp.ones_like(layer.head.kernel[...])
    x = jax.random.normal(KEY, (4, 8, 8, 1))
    call = nnx.jit(lambda layer, x: layer(x))
    first, second = call(layer, x), call(layer, x)
    assert not bool(jnp.allclose(first, second))
    keys = jax.random.key_data(layer.blocks.depth.rngs.key[...])
    assert len({tuple(key) for key in keys.tolist()}) == 2


VIT_OPTIONS = dict(patch=4, width=8, depth=2, heads=2, input_shape=(8, 8, 1), rngs=nnx.Rngs(0))


def test_positions_are_resampled_for_pictures_of_another_size():
    grid = np.stack(np.meshgrid(np.arange(4.0), np.arange(6.0), indexing="ij"), axis=-1).astype(np.float32)
    positions = np.concatenate([np.full((1, 1, 2), 7, np.float32), grid.reshape(1, 24, 2)], axis=1)
    np.testing.assert_array_equal(resample_positions(positions, (4, 6), (4, 6)), positions)
    finer = np.asarray(resample_positions(positions, (4, 6), (8, 12)))
    assert finer.shape == (1, 1 + 96, 2)
    np.testing.assert_array_equal(finer[:, :1], positions[:, :1])  # that of the CLS token
    inner = finer[0, 1:].reshape(8, 12, 2)[2:-2, 2:-2]  # what rises linearly still does, away from the border
    np.testing.assert_allclose(np.diff(inner[..., 0], axis=0), 0.5, atol=0.05)
    np.testing.assert_allclose(np.diff(inner[..., 1], axis=1), 0.5, atol=0.05)
    constant = resample_positions(np.ones((1, 24, 2), np.float32), (4, 6), (3, 3))
    np.testing.assert_allclose(constant, np.ones((1, 9, 2)), atol=1e-6)
    with pytest.raises(UserError, match="4×7"):
        resample_positions(positions, (4, 7), (8, 14))


# Multiply-adds by the operator.


def convolution(x, kernel, **options):
    return jax.lax.conv_general_dilated(x, kernel, dimension_numbers=("NHWC", "HWIO", "NHWC"), **options)


def looped(x, w):
    return jax.lax.scan(lambda x, _: (jax.jit(jnp.dot)(x, w), None), x, length=7)[0]


SQUARE = ((3, 4), (4, 4))
OPERATORS = {
    "product": (jnp.dot, ((3, 4), (4, 5)), 3 * 4 * 5),
    "batched": (lambda a, b: jnp.einsum("bij,bjk->bik", a, b), ((2, 3, 4), (2, 4, 5)), 2 * 3 * 4 * 5),
    "strided": (
        functools.partial(convolution, window_strides=(2, 2), padding="SAME"),
        ((2, 8, 8, 3), (3, 3, 3, 5)),
        2 * 4 * 4 * 5 * 3 * 3 * 3,
    ),
    "depthwise": (
        functools.partial(convolution, window_strides=(1, 1), padding="SAME", feature_group_count=6),
        ((1, 8, 8, 6), (7, 7, 1, 6)),
        8 * 8 * 6 * 7 * 7,
    ),
    "transposed": (
        functools.partial(convolution, window_strides=(1, 1), padding=((1, 1), (1, 1)), lhs_dilation=(2, 2)),
        ((1, 4, 4, 3), (2, 2, 3, 5)),
        4 * 4 * 3 * 2 * 2 * 5,
    ),
    "loop": (looped, SQUARE, 7 * 3 * 4 * 4),
    "checkpoint": (jax.checkpoint(jnp.dot), SQUARE, 3 * 4 * 4),
    "branch": (lambda a, b: jax.lax.cond(a[0, 0] > 0, jnp.dot, lambda a, b: a, a, b), SQUARE, 3 * 4 * 4),
    "gradient": (jax.grad(lambda b, a: jnp.dot(a, b).sum(), argnums=0), ((4, 4), (3, 4)), 2 * 3 * 4 * 4),
    "none": (lambda a, b: jnp.exp(a).sum() + b.sum(), SQUARE, 0),
}


@pytest.mark.parametrize("name", OPERATORS)
def test_multiply_adds(name):
    function, shapes, wanted = OPERATORS[name]
    assert flops.multiply_adds(function, *(jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes)) == wanted


@pytest.mark.parametrize("size", [(8, 8), (7, 5), (2, 3)])
def test_the_largest_of_four_pixels_is_that_of_a_reduced_window(size):
    """Values and gradients, odd sizes too; where pixels are equal the gradient is shared and none is lost."""
    x = jax.random.normal(jax.random.key(0), (3, *size, 4))

    def pulled(pool, x):
        out, pull = jax.vjp(pool, x)
        return out, pull(jnp.arange(out.size, dtype=out.dtype).reshape(out.shape))[0]

    ours, theirs = pulled(max_pool, x), pulled(lambda x: nnx.max_pool(x, (2, 2), (2, 2)), x)
    jax.tree.map(np.testing.assert_array_equal, ours, theirs)
    out, gradient = pulled(max_pool, jnp.zeros_like(x))
    assert gradient.sum() == np.arange(out.size).sum()


@pytest.mark.parametrize("shape", [(4,), (3, 4), (2, 3, 4), (2, 3, 5, 4)])
def test_a_linear_layer_of_rows_is_that_of_flax(shape):
    x = jax.random.normal(jax.random.key(0), shape)

    def pulled(kind):
        graph, params = nnx.split(kind(4, 6, rngs=nnx.Rngs(1)))
        out, pull = jax.vjp(lambda params, x: nnx.merge(graph, params)(x), params, x)
        return out, pull(jnp.cos(out))

    ours, theirs = pulled(Linear), pulled(nnx.Linear)
    assert ours[0].shape == (*shape[:-1], 6)
    for one, other in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)
