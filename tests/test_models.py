"""One table of models, the same checks over all of them; and what each family promises beside."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jaxtrain import precision
from jaxtrain.errors import UserError
from jaxtrain.model import build_model
from jaxtrain.models.cnn import CNN
from jaxtrain.models.layers import ConvNorm, normalisation
from jaxtrain.models.mlp import MLP
from jaxtrain.models.resnet import ResNet

BATCH, CLASSES = 16, 5
KEY = jax.random.key(0)

# name -> (part, shape of one input)
ZOO = {
    "mlp": (dict(name="mlp", hidden=(16, 16), dropout=0.5), (8, 8, 1)),
    "cnn": (dict(name="cnn", width=8), (8, 8, 1)),
    "cnn, dropout": (dict(name="cnn", width=16, depth=1, norm="group", dropout=0.5), (8, 8, 3)),
    "cnn, layer": (dict(name="cnn", width=8, norm="layer"), (9, 7, 1)),
    "cnn, none": (dict(name="cnn", width=8, norm="none", depth=1), (8, 8, 1)),
    "resnet 18": (dict(name="resnet", depth=18, width=4), (8, 8, 3)),
    "resnet 18, imagenet": (dict(name="resnet", depth=18, width=4, stem="imagenet"), (32, 32, 3)),
    "resnet 20": (dict(name="resnet", depth=20, width=4), (8, 8, 3)),
    "resnet 50": (dict(name="resnet", depth=50, width=2), (8, 8, 3)),
}
DROPOUT = ["mlp", "cnn, dropout"]
SLOW = ["resnet 18, imagenet", "resnet 20", "resnet 50"]  # to compile
TABLE = [pytest.param(name, marks=pytest.mark.slow) if name in SLOW else name for name in ZOO]
QUICK = {"xla_backend_optimization_level": 0}  # to compile, not to run
DTYPES = {"float32": jnp.float32, "bfloat16": jnp.bfloat16}


def mesh(devices):
    return Mesh(np.asarray(jax.devices()[:devices]), ("data",), axis_types=(AxisType.Auto,))


def whole(devices):
    return NamedSharding(mesh(devices), PartitionSpec())


def rows(devices):
    return NamedSharding(mesh(devices), PartitionSpec("data"))


@functools.cache
def built(name, dtype="float32"):
    part, shape = ZOO[name]
    return build_model(part, num_classes=CLASSES, input_shape=shape, dtype=DTYPES[dtype])


@functools.cache
def made(name):
    """Parameters, state and a batch of noise, as NumPy arrays."""
    example = jnp.zeros((1, *ZOO[name][1]), jnp.float32)
    params, model_state = jax.jit(built(name).init, compiler_options=QUICK)(KEY, example)
    # Gains that start at zero keep gradients from what is before them: move everything a little.
    noise = np.random.default_rng(1)
    params = jax.tree.map(lambda x: x + 0.1 * noise.normal(size=x.shape).astype(np.float32), jax.device_get(params))
    x = 0.5 + noise.normal(size=(BATCH, *ZOO[name][1])).astype(np.float32)
    return params, jax.device_get(model_state), x


@functools.cache
def steps(name, dtype):
    """The jitted train and eval functions of a model, in which no dtype is promoted unasked."""
    model = built(name, dtype)

    def train(params, model_state, x, key):
        def loss(params):
            with jax.numpy_dtype_promotion("strict"):
                out, new = model.apply(params, model_state, x, key=key, train=True)
            picked = jax.nn.log_softmax(out.astype(jnp.float32))[:, 0]
            return -picked.mean(), (out, new)

        return jax.grad(loss, has_aux=True)(params)

    def evaluate(params, model_state, x):
        with jax.numpy_dtype_promotion("strict"):
            return model.apply(params, model_state, x, key=None, train=False)

    return jax.jit(train, compiler_options=QUICK), jax.jit(evaluate, compiler_options=QUICK)


@pytest.mark.parametrize("devices", [1, 8])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", TABLE)
def test_conformance(name, dtype, devices):
    params, model_state, x = made(name)
    params, model_state = jax.device_put((params, model_state), whole(devices))
    x = jax.device_put(x, rows(devices))
    train, evaluate = steps(name, dtype)
    compiled = train._cache_size()

    grads, (out, after) = train(params, model_state, x, KEY)
    assert (out.shape, out.dtype) == ((BATCH, CLASSES), DTYPES[dtype])
    assert bool(jnp.isfinite(out).all())
    assert {leaf.dtype for leaf in jax.tree.leaves((params, after, grads))} == {jnp.dtype(jnp.float32)}
    assert jax.tree.structure(grads) == jax.tree.structure(params)
    for path, leaf in jax.tree_util.tree_leaves_with_path(grads):
        assert bool(jnp.isfinite(leaf).all() and (leaf != 0).any()), jax.tree_util.keystr(path)

    after = jax.device_put(after, whole(devices))
    train(params, after, x, jax.random.key(1))
    assert train._cache_size() == compiled + 1

    first, state = evaluate(params, after, x)
    second, _ = evaluate(params, after, x)
    assert (first.shape, first.dtype) == ((BATCH, CLASSES), DTYPES[dtype])
    assert bool((first == second).all())
    assert jax.tree.all(jax.tree.map(lambda a, b: bool((a == b).all()), state, after))


@pytest.mark.parametrize("name", DROPOUT)
def test_dropout_masks(name):
    params, model_state, x = made(name)
    x = np.concatenate([x[: BATCH // 2]] * 2)  # equal halves: only their masks differ

    def outputs(key, devices=1, x=x):
        at = jax.device_put((params, model_state), whole(devices))
        _, (out, _) = steps(name, "float32")[0](*at, jax.device_put(x, rows(devices)), key)
        return np.asarray(out)

    first = outputs(KEY)
    assert (first[: BATCH // 2] != first[BATCH // 2 :]).any()
    np.testing.assert_array_equal(first, outputs(KEY))
    np.testing.assert_allclose(first, outputs(KEY, devices=8), rtol=1e-5, atol=1e-5)
    assert (np.abs(first - outputs(jax.random.key(1))) > 1e-3).any()


@pytest.mark.parametrize("name", ["cnn", "resnet 18"])
def test_batch_statistics_are_global(name):
    params, model_state, x = made(name)
    x = x + np.arange(BATCH, dtype=np.float32).reshape(BATCH, 1, 1, 1)  # each device sees another mean

    def trained(devices):
        at = jax.device_put((params, model_state), whole(devices))
        return steps(name, "float32")[0](*at, jax.device_put(x, rows(devices)), KEY)

    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-5), trained(8), trained(1))


@pytest.mark.parametrize("name", TABLE)
def test_rows_do_not_mix_in_evaluation(name):
    params, model_state, x = made(name)
    evaluate = steps(name, "float32")[1]
    together, _ = evaluate(params, model_state, x)
    alone, _ = evaluate(params, model_state, np.concatenate([x[:1]] * BATCH))
    np.testing.assert_allclose(together[:1], alone[:1], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("part", ["mlp", "cnn", "resnet"])
def test_whole_numbers_are_taken_too(part):
    model = build_model(part, num_classes=CLASSES, input_shape=(8, 8, 1), dtype=jnp.bfloat16)
    x = jax.ShapeDtypeStruct((2, 8, 8, 1), jnp.uint8)
    out, _ = jax.eval_shape(lambda x: model.apply(*model.init(KEY, x), x, key=None, train=False), x)
    assert (out.shape, out.dtype) == ((2, CLASSES), jnp.bfloat16)


@pytest.mark.parametrize("name", ["mlp", "cnn", "cnn, dropout"])
def test_float64_is_float64_throughout(name):
    with jax.enable_x64(True):
        wide = precision.cast(made(name), jnp.float64)
        model = build_model(ZOO[name][0], num_classes=CLASSES, input_shape=ZOO[name][1], dtype=jnp.float64)
        found = jax.eval_shape(functools.partial(model.apply, key=KEY, train=True), *wide)
        assert {leaf.dtype for leaf in jax.tree.leaves(found)} == {jnp.dtype(jnp.float64)}


# torchvision's own numbers for ImageNet; He et al., 2015, table 6, for CIFAR-10, in tens of thousands.
COUNTS = [
    (18, (224, 224, 3), 1000, 11_689_512),
    (34, (224, 224, 3), 1000, 21_797_672),
    (50, (224, 224, 3), 1000, 25_557_032),
    (101, (224, 224, 3), 1000, 44_549_160),
    pytest.param(152, (224, 224, 3), 1000, 60_192_808, marks=pytest.mark.slow),
    (20, (32, 32, 3), 10, 270_000),
    (32, (32, 32, 3), 10, 460_000),
    (44, (32, 32, 3), 10, 660_000),
    (56, (32, 32, 3), 10, 850_000),
]


@pytest.mark.parametrize(("depth", "shape", "classes", "published"), COUNTS)
def test_published_parameter_counts(depth, shape, classes, published):
    model = build_model(dict(name="resnet", depth=depth), num_classes=classes, input_shape=shape)
    params, _ = jax.eval_shape(model.init, KEY, jnp.zeros((1, *shape), jnp.float32))
    count = sum(leaf.size for leaf in jax.tree.leaves(params))
    assert (count if classes == 1000 else round(count, -4)) == published


def test_blocks_start_as_the_identity():
    model = build_model(dict(name="resnet", depth=20, width=4), num_classes=CLASSES, input_shape=(8, 8, 3))
    params, _ = jax.eval_shape(model.init, KEY, None)
    last = jax.jit(model.init, compiler_options=QUICK)(KEY, None)[0]["stages"]["0"]["0"]["layers"]["1"]["norm"]["scale"]
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
        (ResNet, dict(depth=19), (8, 8, 3), ["19", "18, 20"]),
        (ResNet, {}, (192,), ["resnet", "(192,)"]),
    ],
)
def test_mistakes_are_one_line(builder, options, shape, words):
    model = build_model(functools.partial(builder, **options), num_classes=CLASSES, input_shape=shape)
    with pytest.raises(UserError) as error:
        jax.eval_shape(model.init, KEY, None)
    assert "\n" not in str(error.value)
    assert all(word in str(error.value) for word in words), str(error.value)
