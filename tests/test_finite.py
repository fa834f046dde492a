"""A state that is not finite is found on the device, named later, and never becomes a checkpoint."""

import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxtrain.errors import NonFiniteError
from jaxtrain.loop.finite import all_finite, refusal
from jaxtrain.storage.checkpoint import Checkpoints

DTYPES = [jnp.float32, jnp.bfloat16, jnp.float16, jnp.complex64]
WRONG = {"nan": np.nan, "inf": np.inf, "-inf": -np.inf}


def layout(*axes):
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    return jax.NamedSharding(mesh, jax.P(*axes))


@pytest.mark.parametrize("shape", [(1,), (7,), (3, 1, 5), (33, 31), (8, 128)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: jnp.dtype(dtype).name)
def test_one_value_in_any_place_is_found(dtype, shape):
    size = int(np.prod(shape))
    assert all_finite({"a": jnp.ones(3), "b": jnp.zeros(shape, dtype), "c": jnp.arange(4)}).tolist() == [True] * 3
    for value in WRONG.values():
        for place in {0, size // 2, size - 1}:
            spoiled = np.zeros(size, dtype)
            spoiled[place] = value
            found = all_finite({"a": jnp.ones(3), "b": spoiled.reshape(shape), "c": jnp.arange(4)})
            assert found.tolist() == [True, False, True], (value, place)


def test_the_greatest_finite_value_and_what_is_no_number_pass():
    great = [jnp.full(1000, sign * jnp.finfo(dtype).max, dtype) for dtype in DTYPES[:3] for sign in (1, -1)]
    others = [jax.random.key(0), jnp.array([True]), jnp.int32(2**31 - 1), jnp.zeros((0, 3)), np.uint8([255])]
    assert all_finite([*great, *others]).all()
    assert all_finite({}).shape == (0,)


def test_a_scalar_may_be_infinite_but_not_nan():
    """Optimizers begin "the best so far" with infinity."""
    state = optax.contrib.reduce_on_plateau().init({"w": jnp.ones(3)})
    assert any(np.isinf(leaf).any() for leaf in jax.tree.leaves(state))
    assert all_finite(state).all()
    assert not all_finite(jnp.float32(jnp.nan)).any()


@pytest.mark.parametrize("value", WRONG)
@pytest.mark.parametrize("axes", [(), ("data",)], ids=["whole", "split"])
def test_the_first_leaf_is_named_after_the_state_was_donated(value, axes):
    tree = {"ema": {"w": jnp.ones(16)}, "opt_state": [jnp.ones(16), jnp.int32(1)], "params": {"w": jnp.ones(16)}}
    tree = jax.device_put(tree, layout())
    spoiled = tree | {"params": {"w": jax.device_put(jnp.ones(16).at[9].set(WRONG[value]), layout(*axes))}}
    sound, one = refusal(tree, 7), refusal(spoiled, 8)
    several = refusal(spoiled | {"opt_state": [jnp.full(16, WRONG[value]), jnp.int32(1)]}, 9)
    donated = jax.jit(lambda t: jax.tree.map(lambda x: x + 1, t), donate_argnums=0)(spoiled)
    assert spoiled["params"]["w"].is_deleted() and donated
    sound()
    with pytest.raises(NonFiniteError, match=r"^the state of step 8 is not finite: params/w$") as caught:
        one()
    assert caught.value.step == 8 and caught.value.exit_code == 3
    with pytest.raises(NonFiniteError, match="step 9 is not finite: opt_state/0, and 1 more arrays"):
        several()


def test_of_several_members_the_one_is_named_and_each_may_have_infinite_scalars():
    stacked = {"best": jnp.full(3, jnp.inf), "w": jnp.ones((3, 4)).at[1, 2].set(jnp.nan)}
    with pytest.raises(NonFiniteError, match=r"^the state of step 5 of seed 1 is not finite: w$"):
        refusal(types.SimpleNamespace(members=stacked), 5, ("seed 0", "seed 1", "seed 2"))()


@pytest.mark.parametrize("value", WRONG)
def test_one_value_on_any_device_is_found(value):
    """A greatest value over devices, for one, loses a NaN on the way."""
    for place in range(8):
        split = jax.device_put(jnp.ones((8, 4)).at[place, 1].set(WRONG[value]), layout("data"))
        with pytest.raises(NonFiniteError):
            refusal({"w": split}, 0)()


def test_asking_does_not_wait_and_compiles_once():
    tree = {"w": jnp.ones((64, 64))}
    refusal(tree, 0)()
    before = all_finite._cache_size()
    with jax.transfer_guard("disallow"):
        for step in range(3):
            refusal(tree, step)
    assert all_finite._cache_size() == before


@pytest.mark.parametrize("best", [False, True])
def test_what_is_not_finite_is_never_latest_or_best(tmp_path, best):
    """Report 16: neither anew nor in the place of a good checkpoint of the same step."""
    good, bad = {"w": jnp.ones(4)}, {"w": jnp.array([1, jnp.nan, 1, 1])}
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(10, good, best=True, before_commit=refusal(good, 10))
    for step in (20, 10):
        checkpoints.save(step, bad, best=best, before_commit=refusal(bad, step))
        with pytest.raises(NonFiniteError, match=f"the state of step {step} is not finite: w"):
            checkpoints.wait()
        assert checkpoints.steps() == [10] and checkpoints.latest() == checkpoints.best() == 10
        np.testing.assert_array_equal(checkpoints.restore_flat(10)["w"], good["w"])
    checkpoints.save(20, good, best=best, before_commit=refusal(good, 20))
    assert checkpoints.latest() == 20
    checkpoints.close()
