"""The order of examples: a bijection, the same on host and device, that looks shuffled."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from jaxtrain import train
from jaxtrain.data import order
from jaxtrain.errors import UserError

SIZES = (1, 2, 3, 4, 10, 64, 1437, 50_000)


def chi_square(counts: np.ndarray) -> float:
    """How many standard deviations Pearson's chi-square of equally likely counts lies above its mean."""
    expected = counts.mean()
    freedom = counts.size - 1
    return float((((counts - expected) ** 2 / expected).sum() - freedom) / np.sqrt(2 * freedom))


@pytest.mark.parametrize("size", SIZES)
def test_permute_is_a_bijection_and_the_same_in_numpy_and_jax(size):
    device = jax.jit(lambda seed, epoch: order.permute(seed, epoch, jnp.arange(size), size, jnp))
    for seed, epoch in ((0, 0), (1, 7), (2**32 - 1, 123_456)):
        host = order.permute(seed, epoch, np.arange(size), size)
        assert host.dtype == np.int32
        assert np.array_equal(np.sort(host), np.arange(size))
        assert np.array_equal(host, device(np.uint32(seed), np.uint32(epoch)))


@pytest.mark.parametrize("size", (2**31 - 1, 2**30 + 1, 46_340**2))
def test_permute_stays_exact_at_the_largest_sizes(size):
    positions = np.concatenate([np.arange(1000), np.arange(size - 1000, size)])
    host = order.permute(5, 1, positions, size)
    assert host.min() >= 0 and host.max() < size
    assert np.unique(host).size == positions.size
    assert np.array_equal(host, order.permute(5, 1, jnp.asarray(positions, jnp.uint32), size, jnp))


@pytest.mark.parametrize("size", (0, -1, 2**31))
def test_permute_refuses_a_size_it_cannot_order(size):
    with pytest.raises(UserError, match=str(size)):
        order.permute(0, 0, np.arange(1), size)


@pytest.mark.parametrize("batch_size, size", ((8, 64), (16, 37), (7, 1), (5, 3), (64, 10)))
def test_each_id_comes_once_an_epoch_and_batches_straddle_epochs(batch_size, size):
    epochs = 4
    steps = -(-epochs * size // batch_size)
    pairs = [order.ids(3, step, batch_size, size) for step in range(steps)]
    ids = np.concatenate([ids for ids, _ in pairs])[: epochs * size]
    numbers = np.concatenate([epoch for _, epoch in pairs])[: epochs * size]
    assert np.array_equal(numbers, np.repeat(np.arange(epochs), size))
    for epoch in range(epochs):
        assert sorted(ids[numbers == epoch]) == list(range(size))


@pytest.mark.parametrize("batch_size, size", ((128, 50_000), (4096, 1437), (1, 2**31 - 1), (2**16, 2**31 - 1)))
def test_ids_are_right_beyond_32_bits_on_host_and_device(batch_size, size):
    device = jax.jit(lambda step: order.ids(9, step, batch_size, size, jnp))
    for step in (0, 1, 390, 391, 10**6, 2**25 + 17, 2**31 - 1):
        numbers = [step * batch_size + i for i in (0, batch_size // 2, batch_size - 1)]  # Python's: exact
        expected = [int(order.permute(9, n // size % 2**32, np.array([n % size]), size)[0]) for n in numbers]
        host_ids, host_epochs = order.ids(9, step, batch_size, size)
        assert [int(host_ids[n - numbers[0]]) for n in numbers] == expected
        device_ids, device_epochs = device(np.int32(step))
        assert np.array_equal(host_ids, device_ids) and np.array_equal(host_epochs, device_epochs)
        assert host_ids.dtype == device_ids.dtype == host_epochs.dtype == device_epochs.dtype == np.int32


def test_ids_take_a_traced_step_and_a_traced_seed():
    seeds, steps = jnp.arange(3, dtype=jnp.uint32), jnp.arange(4, dtype=jnp.int32)
    replicas = jax.vmap(lambda seed: jax.lax.map(lambda step: order.ids(seed, step, 8, 37, jnp)[0], steps))(seeds)
    for seed, step in itertools.product(range(3), range(4)):
        assert np.array_equal(replicas[seed, step], order.ids(seed, step, 8, 37)[0])


def test_seed_and_epoch_change_the_order():
    orders = {order.permute(seed, epoch, np.arange(100), 100).tobytes() for seed in range(20) for epoch in range(20)}
    assert len(orders) == 400


@pytest.mark.parametrize("size", (2, 3, 4, 5))
def test_every_permutation_of_a_small_set_is_equally_likely(size):
    seeds = np.arange(6000, dtype=np.uint32)
    images = np.stack([order.permute(seeds, 0, np.full(6000, p), size) for p in range(size)], axis=1)
    _, counts = np.unique(images, axis=0, return_counts=True)
    assert counts.size == np.prod(np.arange(1, size + 1))
    assert chi_square(counts) < 4


@pytest.mark.parametrize("vary", ("seed", "epoch"))
@pytest.mark.parametrize("size", (10, 37, 256))
def test_positions_and_pairs_are_uniform_over_seeds_and_over_epochs(vary, size):
    trials = np.arange(10_000, dtype=np.uint32)
    seed, epoch = (trials, 1) if vary == "seed" else (1, trials)
    first, second, last = (
        order.permute(seed, epoch, np.full(trials.size, position), size) for position in (0, 1, size - 1)
    )
    for image in (first, second, last):
        assert chi_square(np.bincount(image, minlength=size)) < 4
    gaps = (second - first) % size  # never 0, otherwise uniform
    assert chi_square(np.bincount(gaps, minlength=size)[1:]) < 4
    assert abs(np.corrcoef(first, last)[0, 1]) < 0.15


@pytest.mark.parametrize("size", (1437, 50_000))
def test_one_order_looks_shuffled(size):
    images = [order.permute(seed, 2, np.arange(size), size).astype(np.float64) for seed in range(8)]
    for image in images:
        noise = 5 / np.sqrt(size)
        assert abs(np.corrcoef(image, np.arange(size))[0, 1]) < noise
        for lag in (1, 2, 38, 224):  # 38 and 224 are the sides of the network's square
            assert abs(np.corrcoef(image[:-lag], image[lag:])[0, 1]) < noise
        thirds = np.histogram2d(np.arange(size), image, bins=8)[0]
        assert abs(chi_square(thirds)) < 6
    fixed = sum(int((image == np.arange(size)).sum()) for image in images)
    assert 0 <= fixed <= 20  # one is expected in each of the eight orders
    assert abs(np.corrcoef(images[0], images[1])[0, 1]) < 5 / np.sqrt(size)


def test_the_shuffled_plan_is_ids_of_the_step():
    plan = order.Shuffled((4,), 16, 37)
    for step in (0, 1, 511, 512, 10**9, 2):
        for planned, expected in zip(plan(step), order.ids(4, step, 16, 37), strict=True):
            assert np.array_equal(planned, expected)


@pytest.mark.parametrize(("seeds", "epoch_size"), (((4,), None), ((4, 5, 9), None), ((4, 5), 32)))
def test_a_plan_inside_a_program_is_the_plan_outside(seeds, epoch_size):
    plan = order.Shuffled(seeds, 16, 37, epoch_size)
    traced = jax.jit(plan.traced)
    for step in (0, 1, 2, 512, 10**9):
        for inside, outside in zip(traced(jnp.int32(step)), plan(step), strict=True):
            assert inside.dtype == outside.dtype == np.int32
            assert np.array_equal(inside, outside)


@pytest.mark.parametrize("batch_size, size", ((16, 37), (8, 64), (10, 10), (7, 50)))
def test_whole_batches_alone_leave_out_others_in_each_epoch(batch_size, size):
    kept = order.examples_in_epoch(size, batch_size, True)
    assert kept == size - size % batch_size and order.examples_in_epoch(size, batch_size, False) == size
    plan = order.Shuffled((3,), batch_size, size, kept)
    left_out = set()
    for epoch in range(20):
        pairs = [plan(epoch * (kept // batch_size) + step) for step in range(kept // batch_size)]
        ids, epochs = (np.concatenate(column) for column in zip(*pairs, strict=True))
        assert set(epochs) == {epoch} and len(set(ids)) == kept and set(ids) <= set(range(size))
        assert np.array_equal(ids, order.permute(3, epoch, np.arange(kept), size))
        left_out |= set(range(size)) - set(ids)
    assert bool(left_out) == (kept < size) and (kept == size or len(left_out) > size - kept)


def test_a_run_that_drops_the_rest_has_whole_epochs():
    job = train.build(tiny.config(drop_remainder=True, total="3ep", eval_every="1ep"), data=tiny.data(train=50))
    assert (job.steps_per_epoch, job.total_steps, job.steps_in("2ep")) == (3, 9, 6)
    with job.batches(0, 9) as feed:
        epochs = [np.asarray(batch["epoch"]) for batch in feed]
    assert [set(each) for each in epochs] == [{step // 3} for step in range(9)]
    result = train.run(job.config, data=tiny.data(train=50))
    assert [line["step"] for line in result.history if "eval/accuracy" in line] == [3, 6, 9]


def test_a_batch_larger_than_the_set_leaves_no_epoch():
    with pytest.raises(UserError, match=r"drop_remainder.*64.*37"):
        order.examples_in_epoch(37, 64, True)


def test_each_seed_of_a_plan_has_its_rows():
    plan = order.Shuffled((4, 5), 16, 37)
    for number, seed in enumerate((4, 5)):
        for planned, expected in zip(plan(700), order.ids(seed, 700, 16, 37), strict=True):
            assert np.array_equal(planned[16 * number : 16 * (number + 1)], expected)


def test_a_batch_larger_than_a_block_is_planned():
    batch_size = 2 * order.BLOCK + 1
    assert np.array_equal(order.Shuffled((0,), batch_size, 37)(5)[0], order.ids(0, 5, batch_size, 37)[0])


def test_the_order_never_changes():
    assert order.ids(0, 0, 8, 50_000)[0].tolist() == [45526, 40724, 11270, 21831, 31941, 39051, 42851, 3494]
    assert order.permute(1, 2, np.arange(7), 7).tolist() == [1, 3, 6, 5, 4, 0, 2]


@pytest.mark.parametrize("seed", (-1, 2**32))
def test_a_seed_outside_32_bits_is_refused(seed):
    with pytest.raises(UserError, match=str(seed)):
        order.Shuffled((seed,), 8, 64)
