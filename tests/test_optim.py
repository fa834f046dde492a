"""The optimizer: every name of the table, optax's own results, decay, clipping, rules by path, the rate."""

import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tiny
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from jaxtrain import describe, optim, train
from jaxtrain.config import lookup
from jaxtrain.config.durations import parse_duration
from jaxtrain.errors import UserError

TOTAL = 40
WITHOUT_DECAY = ("dadapt_adamw", "dog", "dowg", "madgrad", "prodigy")
RATES = {"adadelta": 10.0, "lars": 10.0, "sm3": 0.5, "radam": 0.2, "prodigy": 1.0}
RATES |= {"dadapt_adamw": 1.0, "dog": 3.0, "dowg": 1.0}
USUAL = ("adafactor", "adam", "adamw", "lamb", "lion", "muon", "sgd")
ALL = [pytest.param(name, marks=() if name in USUAL else pytest.mark.slow) for name in lookup.OPTIMIZERS]


def config(name="sgd", learning_rate=0.1, **changes):
    keys = {
        "schedule": {"name": "constant"},
        "clip_norm": 0.0,
        "decay_rules": (),
        "lr_rules": (),
        "frozen": (),
        "param_groups": (),
    }
    options = {key: changes.pop(key) for key in list(changes) if key not in keys}
    optimizer = {"name": name, "learning_rate": learning_rate, **options}
    return types.SimpleNamespace(optimizer=optimizer, **(keys | changes))


def build(params, *args, **kwargs):
    def steps_of(duration):
        return parse_duration(duration).steps(10, 100)

    return optim.build(config(*args, **kwargs), params, TOTAL, steps_of)


def make_params(dtype=jnp.float32):
    def normal(seed, *shape):
        return np.random.default_rng(seed).normal(size=shape)

    tree = {
        "conv": {"kernel": normal(0, 3, 3, 2, 8), "bias": normal(1, 8)},
        "norm": {"scale": np.ones(8)},
        "attention": {"kernel": normal(2, 8, 16), "bias": normal(3, 2, 8)},
    }
    return jax.tree.map(lambda x: jnp.asarray(x, dtype), tree)


def kernels(tree):
    return [tree["conv"]["kernel"], tree["attention"]["kernel"]]


def others(tree):
    return [tree["conv"]["bias"], tree["norm"]["scale"], tree["attention"]["bias"]]


def loss(params):
    return sum(jnp.sum((p - 0.5) ** 2) for p in jax.tree.leaves(params)) / 2


def avals(tree):
    return jax.tree.map(lambda x: (x.shape, x.dtype, x.weak_type), jax.eval_shape(lambda: tree))


def assert_same(a, b):
    jax.tree.map(np.testing.assert_array_equal, a, b)


def group(paths, name="sgd", learning_rate=0.1, **options):
    return {"name": name, "paths": paths, "learning_rate": learning_rate, **options}


# Every optimizer


@pytest.mark.parametrize("name", ALL)
def test_every_optimizer_trains_sharded_and_leaves_frozen_parameters(name):
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    params = make_params()
    specs = jax.tree.map(lambda _: PartitionSpec(), params)
    specs["conv"]["kernel"] = PartitionSpec(None, None, None, "data")
    params = jax.device_put(params, jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs))
    optimizer = build(params, name, RATES.get(name, 0.05), weight_decay=0.0, frozen=("attention/bias",))

    def advance(params, opt_state):
        def one(carry, step):
            params, opt_state = carry
            new = optimizer.update(jax.grad(loss)(params), opt_state, params, optimizer.schedule(step))
            return new[:2], new[2]

        return jax.lax.scan(one, (params, opt_state), jnp.arange(50, dtype=jnp.int32))

    opt_state = jax.jit(optimizer.init)(params)
    before = avals(params), avals(opt_state)
    started, frozen = loss(params), jax.device_get(params["attention"]["bias"])
    (params, opt_state), norms = jax.jit(advance, donate_argnums=(0, 1))(params, opt_state)
    assert (avals(params), avals(opt_state)) == before
    assert loss(params) < 0.9 * started
    assert_same(params["attention"]["bias"], frozen)
    assert norms.dtype == jnp.float32 and np.isfinite(norms).all()


@pytest.mark.parametrize("name", [name for name in lookup.OPTIMIZERS if name not in WITHOUT_DECAY])
def test_every_optimizer_decays_kernels_only(name):
    """Report 32: with a zero gradient kernels shrink by rate times decay, biases and scales stay."""
    params = make_params()
    zeros = jax.tree.map(jnp.zeros_like, params)

    def updated(weight_decay):
        optimizer = build(params, name, 0.1, weight_decay=weight_decay)
        new, opt_state, norm = optimizer.update(zeros, optimizer.init(params), params, jnp.float32(0.1))
        assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(opt_state))
        assert norm == 0
        return new

    new = updated(weight_decay=0.1)
    # Even without a gradient yogi moves a little, and fromage shrinks every parameter: that is their method.
    still = updated(weight_decay=0.0) if name in ("fromage", "yogi") else params
    assert_same(others(new), others(still))
    if name in ("lamb", "lars"):  # the decay is inside the trust ratio
        assert all(jnp.linalg.norm(after) < jnp.linalg.norm(p) for after, p in zip(*flat(new, params), strict=True))
    else:
        assert_close(kernels(new), [q - 0.01 * p for p, q in zip(kernels(params), kernels(still), strict=True)])


def flat(*trees):
    return [[kernel.ravel() for kernel in kernels(tree)] for tree in trees]


def assert_close(a, b, rtol=1e-6):
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=rtol, atol=1e-7), a, b)


# optax by hand


def decayed(params):
    return jax.tree_util.tree_map_with_path(
        lambda path, p: p.ndim > 1 and path[-1].key not in ("bias", "scale"), params
    )


@pytest.mark.parametrize(
    ("name", "options", "by_hand"),
    [
        ("sgd", {"momentum": 0.9, "nesterov": True}, lambda rate: optax.sgd(rate, 0.9, nesterov=True)),
        (
            "adamw",
            {"b2": 0.95, "weight_decay": 0.1},
            lambda rate: optax.adamw(rate, b2=0.95, weight_decay=0.1, mask=decayed),
        ),
        ("lion", {"weight_decay": 0.1}, lambda rate: optax.lion(rate, weight_decay=0.1, mask=decayed)),
        ("lamb", {"weight_decay": 0.1}, lambda rate: optax.lamb(rate, weight_decay=0.1, mask=decayed)),
        ("optax.contrib:muon", {"ns_steps": 3}, lambda rate: optax.contrib.muon(rate, ns_steps=3)),
    ],
)
@pytest.mark.parametrize("schedule", ["constant", "cosine"])
def test_equals_optax_by_hand(name, options, by_hand, schedule):
    params = ours = make_params()
    optimizer = build(params, name, 0.1, schedule={"name": schedule}, **options)
    reference = by_hand(0.1 if schedule == "constant" else optax.cosine_decay_schedule(0.1, TOTAL))
    opt_state, state = optimizer.init(ours), reference.init(params)
    ours_step, step = jax.jit(optimizer.update), jax.jit(reference.update)
    for s in range(4):
        ours, opt_state, norm = ours_step(jax.grad(loss)(ours), opt_state, ours, optimizer.schedule(s))
        grads = jax.grad(loss)(params)
        updates, state = step(grads, state, params)
        params = optax.apply_updates(params, updates)
        np.testing.assert_allclose(norm, optax.tree.norm(grads), rtol=1e-6)
    assert_close(ours, params, rtol=1e-5)


# The rate


def test_displacement_is_the_scheduled_rate_also_after_updates_left_out():
    params = {"w": jnp.zeros((), jnp.float32)}
    optimizer = build(params, "sgd", 0.5, schedule={"name": "cosine", "warmup": "10st"})
    expected = optax.warmup_cosine_decay_schedule(0.0, 0.5, 10, TOTAL)
    opt_state = optimizer.init(params)
    update, schedule = jax.jit(optimizer.update), jax.jit(optimizer.schedule)
    for step in (s for s in range(TOTAL) if s not in (7, 8, 20)):
        new, opt_state, _ = update({"w": jnp.float32(1)}, opt_state, params, schedule(jnp.int32(step)))
        np.testing.assert_allclose(params["w"] - new["w"], schedule(jnp.int32(step)), atol=1e-6)
        np.testing.assert_allclose(schedule(jnp.int32(step)), expected(step), rtol=1e-5, atol=1e-7)
        params = new


def test_many_rates_enter_as_one_array():
    params = make_params()
    optimizer = build(params, "adamw", 1.0, weight_decay=0.1)
    grads, opt_state = jax.grad(loss)(params), optimizer.init(params)
    rates = jnp.asarray([0.0, 0.1, 0.3], jnp.float32)

    def update(rate):
        return optimizer.update(grads, opt_state, params, rate)[0]

    many, one = jax.jit(jax.vmap(update))(rates), jax.jit(update)
    for i, rate in enumerate(rates):
        assert_close(jax.tree.map(lambda x, i=i: x[i], many), one(rate))


# Clipping


def test_clips_the_whole_gradient_and_reports_the_norm_before():
    params = {"w": jnp.zeros((), jnp.float32)}
    optimizer = build(params, "sgd", 1.0, clip_norm=1.0)
    halves = jnp.asarray([3.0, -1.0], jnp.float32)  # as two micro-batches give them: clipped one by one they cancel
    new, _, norm = optimizer.update({"w": halves.mean()}, optimizer.init(params), params, jnp.float32(1))
    assert (new["w"], norm) == (-1, 1)


@pytest.mark.parametrize(
    ("clip", "frozen", "norm", "moved"),
    [
        (0.0, (), 13.0, [3.0, 4.0, 12.0]),
        (26.0, (), 13.0, [3.0, 4.0, 12.0]),
        (6.5, (), 13.0, [1.5, 2.0, 6.0]),
        (2.5, ("b",), 5.0, [1.5, 2.0, 0.0]),
    ],
)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_clipping(clip, frozen, norm, moved, dtype):
    params = {"a": jnp.zeros(2, dtype), "b": jnp.zeros((), dtype)}
    grads = {"a": jnp.asarray([3, 4], dtype), "b": jnp.asarray(12, dtype)}
    optimizer = build(params, "sgd", 1.0, clip_norm=clip, frozen=frozen)
    new, _, found = optimizer.update(grads, optimizer.init(params), params, jnp.float32(1))
    assert (found, found.dtype) == (norm, jnp.float32)
    np.testing.assert_array_equal(-np.hstack([new["a"], new["b"]]).astype(np.float32), moved)


def test_the_norm_is_summed_in_float32():
    params = {"w": jnp.zeros(10_000, jnp.bfloat16)}
    optimizer = build(params, "sgd", 1.0)
    ones = {"w": jnp.ones(10_000, jnp.bfloat16)}
    assert optimizer.update(ones, optimizer.init(params), params, jnp.float32(1))[2] == 100


@pytest.mark.parametrize("bad", [jnp.nan, jnp.inf])
def test_a_non_finite_gradient_shows_in_the_norm_unless_frozen(bad):
    params = make_params()
    grads = jax.grad(loss)(params)
    grads["conv"]["bias"] = grads["conv"]["bias"].at[0].set(bad)
    for frozen in ((), ("conv",)):
        optimizer = build(params, "adamw", clip_norm=1.0, frozen=frozen)
        new, _, norm = optimizer.update(grads, optimizer.init(params), params, jnp.float32(0.1))
        assert bool(jnp.isfinite(norm)) is bool(frozen)
    assert all(jnp.isfinite(p).all() for p in jax.tree.leaves(new))


def test_gradients_do_not_scale_with_the_number_of_devices():
    inputs = np.random.default_rng(0).normal(size=(8, 5)).astype(np.float32)

    def run(devices):
        mesh = jax.make_mesh((devices,), ("data",), (AxisType.Auto,), devices=jax.devices()[:devices])
        batch = jax.device_put(inputs, NamedSharding(mesh, PartitionSpec("data")))
        params = jax.device_put({"w": jnp.ones(5, jnp.float32)}, NamedSharding(mesh, PartitionSpec()))
        optimizer = build(params, "sgd", 0.1)

        @jax.jit
        def step(params, opt_state):
            grads = jax.grad(lambda p: jnp.mean((batch @ p["w"] - 1) ** 2))(params)
            return optimizer.update(grads, opt_state, params, jnp.float32(0.1))

        opt_state, norms = optimizer.init(params), []
        for _ in range(5):
            params, opt_state, norm = jax.block_until_ready(step(params, opt_state))
            norms.append(float(norm))
        return np.asarray(params["w"]), norms

    alone = run(1)
    assert_close(run(2), alone, rtol=1e-5)
    assert_close(run(4), alone, rtol=1e-5)


# Rules by path


@pytest.mark.parametrize("name", ["sgd", "adamw", "muon", "adafactor"])
def test_decay_rules_multiply_and_the_first_match_wins(name):
    params = make_params()
    rules = (("attention/kernel", 0.5), ("attention", 3.0), ("norm/scale", 1.0), ("^conv/kernel$", 0.2))
    optimizer = build(params, name, weight_decay=0.1, decay_rules=rules)
    zeros = jax.tree.map(jnp.zeros_like, params)
    new = jax.jit(optimizer.update)(zeros, optimizer.init(params), params, jnp.float32(0.1))[0]
    shrunk = {
        "conv": {"kernel": 0.998, "bias": 1.0},
        "norm": {"scale": 0.99},
        "attention": {"kernel": 0.995, "bias": 0.97},
    }
    assert_close(new, jax.tree.map(lambda p, factor: factor * p, params, shrunk))


def test_decay_rules_reach_into_the_trust_ratio():
    params = make_params()
    grads = jax.grad(loss)(params)
    optimizer = build(params, "lamb", weight_decay=0.5, decay_rules=(("attention", 0.3), ("scale", 1.0)))
    new = optimizer.update(grads, optimizer.init(params), params, jnp.float32(0.1))[0]

    def alone(p, g, decay):
        lamb = optax.lamb(0.1, weight_decay=decay)
        return optax.apply_updates(p, lamb.update(g, lamb.init(p), p)[0])

    decays = {
        "conv": {"kernel": 0.5, "bias": 0.0},
        "norm": {"scale": 0.5},
        "attention": {"kernel": 0.15, "bias": 0.15},
    }
    assert_close(new, jax.tree.map(alone, params, grads, decays), rtol=1e-5)


def test_lr_rules_multiply_the_whole_update_and_the_first_match_wins():
    params = make_params()
    grads = jax.grad(loss)(params)
    whole = build(params, "adamw", weight_decay=0.1)
    rules = (("bias$", 2.0), ("conv", 0.5), ("scale", 0.0))
    ruled = build(params, "adamw", weight_decay=0.1, lr_rules=rules)
    moved, expected = (
        jax.tree.map(jnp.subtract, each.update(grads, each.init(params), params, jnp.float32(0.1))[0], params)
        for each in (ruled, whole)
    )
    factors = {
        "conv": {"kernel": 0.5, "bias": 2.0},
        "norm": {"scale": 0.0},
        "attention": {"kernel": 1.0, "bias": 2.0},
    }
    jax.tree.map(lambda m, e, factor: np.testing.assert_allclose(m, factor * e, atol=1e-6), moved, expected, factors)


def test_frozen_parameters_have_no_state():
    params = make_params()
    shapes = [leaf.shape for leaf in jax.tree.leaves(build(params, "adam", frozen=("conv",)).init(params))]
    assert params["conv"]["kernel"].shape not in shapes
    assert shapes.count(params["attention"]["kernel"].shape) == 2


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"decay_rules": (("head/kernel", 0.5),)}, ["decay_rules", "head/kernel", "conv/kernel"]),
        ({"lr_rules": (("conv", 1.0), ("hed", 0.5))}, ["lr_rules", "'hed'", "norm/scale"]),
        ({"frozen": ("^kernel",)}, ["frozen", "^kernel", "attention/kernel"]),
        ({"frozen": ("kernel", "(")}, ["frozen", "'('", "regular expression"]),
        ({"frozen": (".",)}, ["frozen", "every parameter"]),
        ({"lr_rules": (("conv", -1.0),)}, ["lr_rules", "'conv'", "-1"]),
        ({"decay_rules": (("conv", "half"),)}, ["decay_rules", "'conv'", "'half'"]),
        ({"clip_norm": -1.0}, ["clip_norm", "-1"]),
        ({"learning_rate": -0.1}, ["learning_rate", "-0.1"]),
        ({"learning_rate": "fast"}, ["learning_rate", "'fast'"]),
        ({"weight_decay": -0.1}, ["weight_decay", "-0.1"]),
        ({"momentun": 0.9}, ["momentun", "Did you mean 'momentum'"]),
        ({"name": "adamW"}, ["adamW", "Did you mean 'adamw'"]),
        ({"name": "adamw", "mask": True}, ["mask"]),
        ({"name": "muon", "adam_learning_rate": 0.1}, ["adam_learning_rate"]),
        ({"name": "muon", "ns_steps": 0}, ["muon", "ns_steps"]),
        ({"name": "optax.contrib:muon", "ns_coeffs": "cubic"}, ["muon", "cubic"]),
        ({"param_groups": (group("hed"),)}, ["param_groups[0].paths", "'hed'", "conv/kernel"]),
        ({"param_groups": (group("("),)}, ["param_groups[0].paths", "regular expression"]),
        ({"param_groups": (group("conv"), group("conv/bias"))}, ["param_groups[1].paths", "before it leave"]),
        ({"param_groups": (group("conv", learning_rate=-1.0),)}, ["param_groups[0].learning_rate", "-1"]),
        ({"param_groups": (group("conv", name="sdg"),)}, ["sdg", "Did you mean 'sgd'"]),
        ({"param_groups": (group("conv", momentun=0.9),)}, ["momentun", "param_groups[0]"]),
        ({"param_groups": ({"name": "sgd", "learning_rate": 0.1},)}, ["param_groups[0].paths"]),
        ({"param_groups": (group("conv", since="3ep", until="20st"),)}, ["step 30", "step 20", "param_groups[0]"]),
        ({"param_groups": (group("conv", until="soon"),)}, ["'soon'", "duration"]),
        ({"param_groups": (group("conv", schedule="linaer"),)}, ["linaer", "linear"]),
        ({"param_groups": (group("conv", name="prodigy", weight_decay=0.1),)}, ["param_groups[0].weight_decay"]),
        ({"name": "prodigy", "weight_decay": 0.1}, ["prodigy", "weight_decay"]),
    ],
)
def test_mistakes_are_one_line(changes, words):
    with pytest.raises(UserError) as caught:
        build(make_params(), **changes)
    text = str(caught.value)
    assert "\n" not in text
    assert [word for word in words if word not in text] == []


# Groups of parameters


def trained(optimizer, params, steps, state=None):
    """(params, state) after updates with the gradients of `loss` at these steps."""
    state = optimizer.init(params) if state is None else state
    update = jax.jit(optimizer.update)
    for step in steps:
        step = jnp.int32(step)
        params, state, _ = update(jax.grad(loss)(params), state, params, optimizer.schedule(step), step)
    return params, state


def test_each_group_is_trained_as_alone():
    """The first group that matches counts; rates, decays and schedules are each its own."""
    params, decay_rules = make_params(), (("bias", 0.5), ("attention", 2.0))
    groups = (
        group("bias$", "sgd", 0.3, momentum=0.9, nesterov=True, weight_decay=0.1, schedule="linear"),
        group("conv", "muon", 0.05, ns_steps=3),
        group("attention/kernel", "adamw", 0.02, weight_decay=0.2, schedule={"name": "cosine", "final": 0.1}),
    )
    together = build(params, "lion", 0.01, param_groups=groups, decay_rules=decay_rules)
    found, state = trained(together, params, range(6))
    assert isinstance(state, tuple) and len(state) == 4

    def alone(part, path, **changes):
        options = {key: value for key, value in part.items() if key not in ("paths", "schedule")}
        schedule = part.get("schedule", "constant")
        schedule = {"name": schedule} if isinstance(schedule, str) else schedule
        optimizer = build(params, **options, schedule=schedule, decay_rules=decay_rules)
        new = trained(optimizer, params, range(6))[0]
        for key in path.split("/"):
            new = new[key]
        return new

    whole = {"name": "lion", "learning_rate": 0.01}
    parts = {"conv/kernel": groups[1], "conv/bias": groups[0], "norm/scale": whole, "attention/bias": groups[0]}
    for path, part in (parts | {"attention/kernel": groups[2]}).items():
        first, last = path.split("/")
        assert_close(found[first][last], alone(part, path), rtol=1e-5)


@pytest.mark.parametrize(("since", "until"), [("", "2ep"), ("1ep", ""), ("5st", "3ep")])
def test_a_group_is_trained_in_its_part_of_the_run_alone_with_a_schedule_over_it(since, until):
    """Bit by bit as it was before and after, its optimizer's state too; an epoch is ten steps here."""
    params = make_params()
    options = {"schedule": "linear", "momentum": 0.9} | {"since": since, "until": until}
    options = {key: value for key, value in options.items() if value}
    optimizer = build(
        params, "sgd", 0.05, param_groups=(group("norm|bias", learning_rate=0.2, **options),), clip_norm=9.0
    )
    first = {"": 0, "1ep": 10, "5st": 5}[since]
    last = {"": TOTAL, "2ep": 20, "3ep": 30}[until]
    state, before = optimizer.init(params), params
    own = {"scale": (np.ones(8, np.float64), np.zeros(8))}
    update = jax.jit(optimizer.update)
    for step in range(TOTAL):
        grads = jax.grad(loss)(params)
        new, new_state, norm = update(grads, state, params, optimizer.schedule(step), jnp.int32(step))
        active = first <= step < last
        assert_same(new["norm"], params["norm"]) if not active else None
        assert tiny_same(new_state[1], state[1]) != active
        assert not tiny_same(new["conv"]["kernel"], params["conv"]["kernel"])
        counted = jax.tree.leaves(grads) if active else kernels(grads)
        np.testing.assert_allclose(norm, optax.tree.norm(counted), rtol=1e-5)
        if active:
            p, m = own["scale"]
            m = 0.9 * m + (p - 0.5) * min(1, 9.0 / float(norm))
            own["scale"] = p - 0.2 * (1 - (step - first) / (last - first)) * m, m
        params, state = new, new_state
    np.testing.assert_allclose(params["norm"]["scale"], own["scale"][0], rtol=1e-4)
    assert not tiny_same(params["norm"], before["norm"])


def tiny_same(a, b):
    return all(bool((x == y).all()) for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True))


def test_groups_and_frozen_parameters_go_together():
    params = make_params()
    groups = (group("conv", "adam"), group("norm", until="1ep"))
    optimizer = build(params, "adam", param_groups=groups, frozen=("conv/kernel", "norm"))
    new, state = trained(optimizer, params, range(3))
    assert_same((new["conv"]["kernel"], new["norm"]), (params["conv"]["kernel"], params["norm"]))
    assert not tiny_same(new["conv"]["bias"], params["conv"]["bias"])
    assert params["conv"]["kernel"].shape not in [leaf.shape for leaf in jax.tree.leaves(state)]


def test_the_header_tells_the_groups():
    group = dict(name="adam", learning_rate=0.02, paths="bias", schedule="linear", until="2ep")
    shown = describe.facts(train.build(tiny.config(param_groups=(group,)), data=tiny.data()), None)
    assert dict(shown.rows())["optimizer"].endswith("; adam(0.02) for bias until 2ep")


def test_groups_need_the_step_and_say_so():
    params = make_params()
    optimizer = build(params, param_groups=(group("conv"),))
    with pytest.raises(UserError, match=r"state\.step"):
        optimizer.update(params, optimizer.init(params), params, jnp.float32(0.1))


# Types


@pytest.mark.parametrize("name", USUAL)
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float64])
def test_parameters_keep_their_dtype_and_moments_have_float32_or_more(name, dtype):
    with jax.enable_x64(dtype == jnp.float64):
        params = make_params(dtype)
        if dtype != jnp.float64:
            params["attention"] = make_params()["attention"]
        optimizer = build(params, name, weight_decay=0.1, clip_norm=1.0)
        opt_state = jax.eval_shape(optimizer.init, params)
        new = jax.eval_shape(optimizer.update, params, opt_state, params, optimizer.schedule(0))
        dtypes = {leaf.dtype for leaf in jax.tree.leaves(opt_state)} - {jnp.dtype(jnp.int32)}
        assert dtypes <= {jnp.promote_types(dtype, jnp.float32)}
        assert avals(new[:2]) == avals((params, opt_state))
        assert new[2].dtype == jnp.float32


@pytest.mark.parametrize(("dtype", "wide"), [(jnp.bfloat16, np.float32), (jnp.float64, np.float64)])
def test_updates_are_rounded_once(dtype, wide):
    with jax.enable_x64(dtype == jnp.float64):
        params = {"kernel": jnp.asarray(np.linspace(-1, 1, 8).reshape(2, 4), dtype)}
        optimizer = build(params, "sgd", 0.1, weight_decay=0.1, clip_norm=1.0)
        opt_state = optimizer.init(params)
        new, _, _ = optimizer.update(params, opt_state, params, jnp.float32(0.25))
        p = np.asarray(params["kernel"]).astype(wide)
        expected = p - wide(0.25) * p / np.sqrt(np.square(p).sum()) - wide(0.025) * p
        np.testing.assert_allclose(
            np.asarray(new["kernel"]).astype(np.float64),
            expected.astype(dtype).astype(np.float64),
            rtol=1e-15 if wide is np.float64 else 1e-6,
        )


@pytest.mark.parametrize("name", ["sgd", "lion", "lars", "rmsprop", "signum"])
def test_strict_promotion_where_optax_permits(name):
    with jax.numpy_dtype_promotion("strict"):
        params = make_params()
        rules = {"decay_rules": (("conv", 0.5),), "lr_rules": (("bias", 2.0),), "frozen": ("norm",)}
        optimizer = build(params, name, weight_decay=0.1, clip_norm=1.0, **rules)

        def update(step):
            return optimizer.update(params, optimizer.init(params), params, optimizer.schedule(step))

        new, _, norm = jax.eval_shape(update, jnp.int32(3))
    assert avals(new) == avals(params)
    assert norm.dtype == jnp.float32


@pytest.mark.parametrize("name", ["sgd", "adamw", "prodigy"])
def test_builds_from_shapes_alone(name):
    params = make_params()
    shapes = jax.eval_shape(lambda: params)
    optimizer = build(shapes, name, weight_decay=0.0)
    state = jax.eval_shape(optimizer.init, shapes)
    assert avals(jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), state)) == avals(optimizer.init(params))


# A user's own


def halved(learning_rate, momentum: float = 0.0):
    return optax.sgd(learning_rate / 2, momentum)


def with_decay(learning_rate, weight_decay: float = 0.2, mask=None):
    return optax.chain(optax.add_decayed_weights(weight_decay, mask), optax.scale_by_learning_rate(learning_rate))


def test_a_users_own_builder():
    params = make_params()
    name, rate = f"{__name__}:halved", jnp.float32(0.1)
    optimizer = build(params, name, momentum=0.5, weight_decay=1.0)
    zeros = jax.tree.map(jnp.zeros_like, params)
    new = optimizer.update(zeros, optimizer.init(params), params, rate)[0]
    assert_close(kernels(new), [0.9 * p for p in kernels(params)])
    own = build(params, f"{__name__}:with_decay")
    new = own.update(zeros, own.init(params), params, rate)[0]
    assert_close(kernels(new), [0.98 * p for p in kernels(params)])
    assert_same(others(new), others(params))
