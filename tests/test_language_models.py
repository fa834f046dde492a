"""One table of models of text, the same checks over all of them; and what each family promises beside."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jaxtrain.errors import UserError
from jaxtrain.model import build_model
from jaxtrain.models.attention import attend

BATCH, LENGTH, VOCABULARY = 8, 12, 11
KEY = jax.random.key(0)
SMALL = dict(width=8, depth=2, heads=2)
SLOW = pytest.mark.slow

# What reads from left to right and says, after each token, what follows.
CAUSAL = {
    "gpt": dict(name="gpt", context=LENGTH, dropout=0.2, **SMALL),
    "gpt, scan, full": dict(
        name="gpt", context=LENGTH, dropout=0.2, attention_dropout=0.2, scan=True, remat="full", **SMALL
    ),
    "llama": dict(name="llama", width=8, depth=2, heads=4, kv_heads=2, qk_norm=True, tied=True),
    "llama, scan, dots": dict(name="llama", width=8, depth=2, heads=4, kv_heads=2, scan=True, remat="dots"),
    "lstm": dict(name="rnn", cell="lstm", width=8, depth=2, dropout=0.2),
    "gru": dict(name="rnn", cell="gru", width=8, depth=2),
}
# What reads a whole text and names its class.
WHOLE = {
    "encoder": dict(name="encoder", vocabulary=VOCABULARY, context=LENGTH, dropout=0.2, **SMALL),
    "encoder, cls, scan": dict(
        name="encoder", vocabulary=VOCABULARY, context=LENGTH, pool="cls", scan=True, remat="dots", **SMALL
    ),
    "lstm, classes": dict(name="rnn_classifier", vocabulary=VOCABULARY, width=8),
    "gru, classes": dict(name="rnn_classifier", vocabulary=VOCABULARY, cell="gru", width=8, depth=2),
}
ZOO = CAUSAL | WHOLE
QUICKLY = ["llama, scan, dots", "gru", "encoder", "gru, classes"]  # one of each kind; GPT's is in other tests
TABLE = [name if name in QUICKLY else pytest.param(name, marks=SLOW) for name in ZOO]
# Of two that differ by a loop over layers, which changes nothing (as a test says), one.
CAUSAL_TABLE = ["llama, scan, dots", "gru", *(pytest.param(name, marks=SLOW) for name in ("gpt", "lstm"))]
WHOLE_TABLE = [name if name in QUICKLY else pytest.param(name, marks=SLOW) for name in WHOLE]
DTYPES = {"float32": jnp.float32, "bfloat16": jnp.bfloat16}


def on(devices, *axes):
    mesh = Mesh(np.asarray(jax.devices()[:devices]), ("data",), axis_types=(AxisType.Auto,))
    return NamedSharding(mesh, PartitionSpec(*axes))


@functools.cache
def built(name, dtype="float32"):
    return build_model(ZOO[name], num_classes=VOCABULARY, input_shape=(LENGTH,), dtype=DTYPES[dtype])


@functools.cache
def made(name):
    """Parameters and inputs, as NumPy arrays; everything a little off its initial value."""
    params, state = jax.jit(built(name).init)(KEY, None)
    assert state == {}
    noise = np.random.default_rng(1)
    params = jax.tree.map(lambda x: x + 0.2 * noise.normal(size=x.shape).astype(np.float32), jax.device_get(params))
    tokens = noise.integers(0, VOCABULARY, (BATCH, LENGTH)).astype(np.int32)
    if name in CAUSAL:
        return params, tokens
    return params, {"tokens": tokens, "length": np.arange(BATCH, dtype=np.int32) + LENGTH - BATCH}


@functools.cache
def jitted(name, dtype="float32"):
    """The train and eval functions of a model."""
    model = built(name, dtype)

    def train(params, inputs, key):
        def loss(params):
            out, _ = model.apply(params, {}, inputs, key=key, train=True)
            return -jax.nn.log_softmax(out.astype(jnp.float32))[..., 0].mean(), out

        return jax.grad(loss, has_aux=True)(params)

    def evaluate(params, inputs):
        return model.apply(params, {}, inputs, key=None, train=False)[0]

    return jax.jit(train), jax.jit(evaluate)


def evaluated(name, params, inputs):
    return np.asarray(jitted(name)[1](params, inputs))


def shape_of(name):
    return (BATCH, LENGTH, VOCABULARY) if name in CAUSAL else (BATCH, VOCABULARY)


# All but the first seldom tell more: a dtype is decided when a model is traced, devices after that.
PLACES = [
    ("float32", 8),
    *(pytest.param(*place, marks=SLOW) for place in (("bfloat16", 1), ("float32", 1), ("bfloat16", 8))),
]


@pytest.mark.parametrize(("dtype", "devices"), PLACES)
@pytest.mark.parametrize("name", TABLE)
def test_conformance(name, dtype, devices):
    params, inputs = jax.device_put(made(name)[0], on(devices)), jax.device_put(made(name)[1], on(devices, "data"))
    train, evaluate = jitted(name, dtype)
    compiled = train._cache_size()
    grads, out = train(params, inputs, KEY)
    assert (out.shape, out.dtype) == (shape_of(name), DTYPES[dtype])
    grads, out = jax.device_get((grads, out))  # an operation of jnp would be compiled for each shape
    assert np.isfinite(out.astype(np.float32)).all()
    assert {leaf.dtype for leaf in jax.tree.leaves((params, grads))} == {jnp.dtype(jnp.float32)}
    for path, leaf in jax.tree_util.tree_leaves_with_path(grads):
        assert np.isfinite(leaf).all() and (leaf != 0).any(), jax.tree_util.keystr(path)
    train(params, inputs, jax.random.key(1))
    assert train._cache_size() == compiled + 1
    first, second = evaluate(params, inputs), evaluate(params, inputs)
    assert (first.shape, first.dtype) == (shape_of(name), DTYPES[dtype])
    np.testing.assert_array_equal(first, second)


@pytest.mark.parametrize("name", TABLE)
def test_bfloat16_is_computed_and_float32_stored(name):
    inputs, model = made(name)[1], built(name, "bfloat16")
    params, _ = jax.eval_shape(model.init, KEY, None)
    out, _ = jax.eval_shape(functools.partial(model.apply, key=KEY, train=True), params, {}, inputs)
    assert (out.shape, out.dtype) == (shape_of(name), jnp.bfloat16)
    assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {jnp.dtype(jnp.float32)}


@pytest.mark.parametrize("name", CAUSAL_TABLE)
def test_the_future_is_not_seen(name):
    """Another token at place t changes the logits from t on, and no bit of those before."""
    params, tokens = made(name)
    before = evaluated(name, params, tokens)
    for place in (1, LENGTH // 2, LENGTH - 1):
        other = tokens.copy()
        other[:, place] = (other[:, place] + 1) % VOCABULARY
        after = evaluated(name, params, other)
        np.testing.assert_array_equal(before[:, :place], after[:, :place])
        assert (np.abs(before[:, place] - after[:, place]).max(axis=-1) > 1e-4).all()


@pytest.mark.parametrize("name", WHOLE_TABLE)
def test_padding_does_not_change_the_result(name):
    params, inputs = made(name)
    before = evaluated(name, params, inputs)
    behind = np.arange(LENGTH)[None] >= inputs["length"][:, None]
    other = dict(inputs, tokens=np.where(behind, VOCABULARY - 1 - inputs["tokens"], inputs["tokens"]))
    assert (other["tokens"] != inputs["tokens"]).any()
    np.testing.assert_array_equal(before, evaluated(name, params, other))
    shorter = {"tokens": inputs["tokens"][:, :-4], "length": np.full((BATCH,), LENGTH - 8, np.int32)}
    longer = {"tokens": inputs["tokens"], "length": shorter["length"]}
    np.testing.assert_allclose(evaluated(name, params, shorter), evaluated(name, params, longer), atol=1e-5)
    empty = dict(inputs, length=np.zeros((BATCH,), np.int32))
    assert np.isfinite(evaluated(name, params, empty)).all()


@pytest.mark.parametrize("name", CAUSAL_TABLE)
def test_packed_texts_are_the_same_texts_alone(name):
    params, tokens = made(name)
    segments = np.repeat([[1, 2, 3, 0]], [5, 4, 2, 1], axis=1).repeat(BATCH, axis=0).astype(np.int32)
    packed = evaluated(name, params, {"tokens": tokens, "segments": segments})
    assert np.isfinite(packed).all()
    for start, end in ((0, 5), (5, 9), (9, 11)):
        alone = np.zeros_like(tokens)
        alone[:, : end - start] = tokens[:, start:end]
        found = evaluated(name, params, alone)[:, : end - start]
        np.testing.assert_allclose(packed[:, start:end], found, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", CAUSAL_TABLE)
def test_cached_logits_are_those_of_the_whole_text(name):
    params, tokens = made(name)
    whole = evaluated(name, params, tokens)

    @jax.jit
    def step(cache, token):
        return built(name).apply(params, {}, {"tokens": token, "cache": cache}, key=None, train=False)[0]

    def begin(tokens):
        return built(name).apply(params, {}, {"tokens": tokens, "room": LENGTH}, key=None, train=False)[0]

    logits, cache = jax.jit(begin)(tokens[:, :5])
    np.testing.assert_allclose(logits, whole[:, :5], rtol=1e-4, atol=1e-5)
    for place in range(5, LENGTH):
        logits, cache = step(cache, tokens[:, place : place + 1])
        np.testing.assert_allclose(logits[:, 0], whole[:, place], rtol=1e-4, atol=1e-5)
    assert step._cache_size() == 1


def stacked(params):
    """Those of an unrolled model in the form of a scanned one."""
    blocks = params["stack"]["blocks"]
    in_order = [blocks[str(number)] for number in range(len(blocks))]
    return params | {"stack": {"blocks": jax.tree.map(lambda *leaves: np.stack(leaves), *in_order)}}


@pytest.mark.parametrize(
    ("scan", "remat"),
    [(True, "dots"), pytest.param(False, "full", marks=SLOW)],
)
def test_scan_and_remat_change_nothing(scan, remat):
    part = dict(name="gpt", context=LENGTH, **SMALL)
    plain = build_model(part, num_classes=VOCABULARY, input_shape=(LENGTH,))
    other = build_model(part | dict(scan=scan, remat=remat), num_classes=VOCABULARY, input_shape=(LENGTH,))
    params, tokens = made("gpt")

    def gradient(model):
        def loss(params):
            out, _ = model.apply(params, {}, tokens, key=KEY, train=True)
            return jnp.square(out).mean(), out

        return jax.jit(jax.grad(loss, has_aux=True))

    grads, out = gradient(plain)(params)
    found, again = gradient(other)(stacked(params) if scan else params)
    close = functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-6)
    close(out, again)
    jax.tree.map(close, stacked(jax.device_get(grads)) if scan else grads, found)


@pytest.mark.parametrize("name", ["encoder", *(pytest.param(name, marks=SLOW) for name in ("gpt, scan, full", "lstm"))])
def test_dropout_masks(name):
    params, inputs = made(name)
    inputs = jax.tree.map(lambda leaf: np.concatenate([leaf[: BATCH // 2]] * 2), inputs)  # only the masks differ
    train = jitted(name)[0]

    def outputs(key, devices=8):
        at = jax.device_put(params, on(devices)), jax.device_put(inputs, on(devices, "data"))
        return np.asarray(train(*at, key)[1])

    first = outputs(KEY)
    assert (first[: BATCH // 2] != first[BATCH // 2 :]).any()
    np.testing.assert_array_equal(first, outputs(KEY))
    assert (np.abs(first - outputs(jax.random.key(1))) > 1e-3).any()


@pytest.mark.parametrize(("key_heads", "mask", "causal"), [(4, None, True), (2, "texts", True), (1, "texts", False)])
def test_attention_written_out_is_the_fused_one(key_heads, mask, causal):
    """With a dropout so small that nothing falls, and in float16, which JAX's function has not on a CPU."""
    rng = np.random.default_rng(0)
    query, key, value = (rng.normal(size=(2, LENGTH, heads, 8)) for heads in (4, key_heads, key_heads))
    texts = np.repeat([0, 1, 2], [5, 4, 3])
    seen = None if mask is None else np.broadcast_to(texts[None] == texts[:, None], (2, 1, LENGTH, LENGTH))

    @jax.jit
    def all_of_them():
        def found(dtype=jnp.float32, rate=None, train=True):
            dropout = None if rate is None else nnx.Dropout(rate, rngs=nnx.Rngs(0), deterministic=not train)
            given = (jnp.asarray(each, dtype) for each in (2 * query, key, value))
            return attend(*given, mask=seen, causal=causal, dropout=dropout)

        return found(), found(rate=1e-7), found(rate=0.5, train=False), found(jnp.float16), found(rate=0.5)

    plain, kept, evaluated, half, dropped = map(np.asarray, all_of_them())
    np.testing.assert_allclose(kept, plain, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(evaluated, plain, rtol=1e-6)
    np.testing.assert_allclose(half, plain, atol=0.01)
    assert half.dtype == np.float16 and np.abs(dropped - plain).max() > 0.1


def llama_count(vocabulary, width, depth, heads, kv_heads, hidden, tied):
    block = 2 * width * width + 2 * width * width * kv_heads // heads + 3 * width * hidden + 2 * width
    return vocabulary * width * (1 if tied else 2) + depth * block + width


# GPT-2's are OpenAI's own, counted in its published weights; TinyLlama's likewise.
COUNTS = [
    (dict(name="gpt"), 50257, 124_439_808),
    (dict(name="gpt", scan=True, remat="dots"), 50257, 124_439_808),
    (dict(name="gpt", width=1024, depth=24, heads=16, scan=True), 50257, 354_823_168),
    (dict(name="gpt", width=1600, depth=48, heads=25, scan=True), 50257, 1_557_611_200),
    (dict(name="llama", hidden=5632, scan=True), 32000, 1_100_048_384),
    (dict(name="llama", width=4096, depth=32, kv_heads=32, hidden=11008, scan=True), 32000, 6_738_415_616),
    (dict(name="llama", width=64, depth=3, heads=4, hidden=9, tied=True), 99, llama_count(99, 64, 3, 4, 4, 9, True)),
    (dict(name="rnn", width=200, depth=2), 10000, 2 * 10000 * 200 + 10000 + 2 * (4 * 200 * 400 + 800)),
]  # fmt: skip


@pytest.mark.parametrize(("part", "vocabulary", "published"), COUNTS)
def test_published_parameter_counts(part, vocabulary, published):
    model = build_model(part, num_classes=vocabulary, input_shape=(8,))
    params, _ = jax.eval_shape(model.init, KEY, None)
    assert sum(leaf.size for leaf in jax.tree.leaves(params)) == published


@pytest.mark.parametrize(("name", "gates"), [pytest.param("lstm", 4, marks=SLOW), ("gru", 3)])
def test_the_recurrent_cells_are_those_of_the_papers(name, gates):
    """One step of each against the equations written out in NumPy."""

    def sigmoid(x):
        return 1 / (1 + np.exp(-x))

    params, tokens = made(name)
    layers = params["layers"]
    x = layers["embedding"]["embedding"][tokens[:, :1]][:, 0]  # [B, D]
    for number in range(2):
        weights = layers["recurrent"][str(number)]
        wanted = np.split(x @ weights["input"]["kernel"] + weights["input"]["bias"], gates, axis=1)
        if name == "lstm":
            into, _, new, out = wanted
            x = sigmoid(out) * np.tanh(sigmoid(into) * np.tanh(new))
        else:
            bias = np.split(weights["recurrent"]["bias"], 3)
            reset, update = sigmoid(wanted[0] + bias[0]), sigmoid(wanted[1] + bias[1])
            x = (1 - update) * np.tanh(wanted[2] + reset * bias[2])
    expected = x @ params["head"]["kernel"] + params["head"]["bias"]
    np.testing.assert_allclose(evaluated(name, params, tokens)[:, 0], expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("part", "words"),
    [
        (dict(name="gpt", width=10, heads=4), ["4 heads", "width of 10"]),
        (dict(name="llama", width=8, heads=4, kv_heads=3), ["3 key heads"]),
        (dict(name="llama", width=12, heads=4, kv_heads=4), ["rotary", "3 numbers"]),
        (dict(name="gpt", width=8, heads=2, depth=0), ["depth is 0"]),
        (dict(name="gpt", width=8, heads=2, dropout=1.0), ["dropout", "1.0"]),
        (dict(name="encoder", width=8, heads=2, attention_dropout=-0.1), ["dropout", "-0.1"]),
        (dict(name="gpt", width=8, heads=2, depth=1, context=4), ["12 tokens", "config.model.context"]),
        (dict(name="encoder", width=8, heads=2, depth=1, context=4), ["12 tokens", "config.model.context"]),
    ],
)
def test_mistakes_are_one_line(part, words):
    model = build_model(part, num_classes=VOCABULARY, input_shape=(LENGTH,))
    tokens = jnp.zeros((2, LENGTH), jnp.int32)
    inputs = {"tokens": tokens, "length": tokens[:, 0]} if part["name"] == "encoder" else tokens

    def both():
        params, state = model.init(KEY, None)
        return model.apply(params, state, inputs, key=None, train=False)

    with pytest.raises(UserError) as error:
        jax.eval_shape(both)
    assert "\n" not in str(error.value)
    assert all(word in str(error.value) for word in words), str(error.value)
