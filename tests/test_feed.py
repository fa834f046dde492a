"""Batches on host and device: the plan's order whatever the threads, named failures, threads that end."""

import gc
import os
import pathlib
import subprocess
import sys
import threading
import time

import jax
import numpy as np
import pytest
import tiny_tfds
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxtrain.data import host, order
from jaxtrain.data.feed import Feed
from jaxtrain.data.sources import ArraySource, subset
from jaxtrain.data.tfds import tfds
from jaxtrain.errors import UserError

ROOT = pathlib.Path(__file__).resolve().parent.parent
SIZE = 37
KINDS = ("threads", "tf.data")


def over_devices(count: int) -> NamedSharding:
    return NamedSharding(Mesh(jax.devices()[:count], ("data",)), PartitionSpec("data"))


def numbered(size: int = SIZE) -> ArraySource:
    """Example i holds i everywhere."""
    return ArraySource({"image": np.arange(size, dtype=np.uint8)[:, None, None].repeat(2, 1), "label": np.arange(size)})


class Slow:
    """A source of one's own that is not quick: later batches are often ready before earlier ones."""

    def __init__(self, fail: int = -1, delay: float = 0.002):
        self.fail, self.delay = fail, delay
        self.spec = {"label": jax.ShapeDtypeStruct((), np.int32)}

    def __len__(self) -> int:
        return SIZE

    def get(self, ids: np.ndarray) -> dict[str, np.ndarray]:
        time.sleep(self.delay * (int(ids[0]) % 3))
        if self.fail in ids:
            raise OSError("stale\nfile handle")
        return {"label": ids.astype(np.int32)}


@pytest.fixture(autouse=True)
def no_thread_is_left(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    before = set(threading.enumerate())
    yield
    left = [t.name for t in set(threading.enumerate()) - before if t.name.startswith("jaxtrain")]
    assert not left


@pytest.fixture
def pictures(tmp_path):
    """An encoded source of JPEG and PNG pictures, and their folder."""
    stored = tiny_tfds.records(20, (24, 32, 3), "JPEG") + tiny_tfds.records(17, (24, 32, 3), "PNG", first=20)
    tiny_tfds.write(tmp_path, {"train": [stored]}, shape=(24, 32, 3))
    return tfds(dataset="tiny", dir=str(tmp_path), validation=0, test=0).open()["train"]


@pytest.mark.parametrize("threads", (1, 2, 5))
@pytest.mark.parametrize("source", (numbered(), subset(numbered(99), np.arange(SIZE)), Slow()))
def test_batches_follow_the_plan_whatever_the_threads(source, threads):
    plan = order.Shuffled((3,), 8, SIZE)
    found = host.batches(source, lambda step: plan(step)[0], 4, 15, threads=threads)
    labels = [batch["label"].tolist() for batch in found]
    assert labels == [order.ids(3, step, 8, SIZE)[0].tolist() for step in range(4, 15)]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("batch_size, threads", ((8, 1), (32, 3), (13, 2)))
def test_both_ways_of_decoding_give_the_same_bits(pictures, kind, batch_size, threads):
    plan = order.Shuffled((1,), batch_size, len(pictures))
    found = host.batches(pictures, lambda step: plan(step)[0], 2, 7, threads=threads, kind=kind)
    count = 0
    for step, batch in enumerate(found, start=2):
        expected = pictures.get(plan(step)[0])
        assert batch.keys() == expected.keys()
        for key in batch:
            assert batch[key].dtype == expected[key].dtype and np.array_equal(batch[key], expected[key])
        count += 1
    assert count == 5


def test_both_ways_agree_on_the_shared_cifar(shared_tfds):
    test = tfds(dataset="cifar10", dir=str(shared_tfds), validation=0).open()["test"]
    ways = [host.batches(test, order_of_cifar, 0, 4, kind=kind) for kind in KINDS]
    for one, other in zip(*ways, strict=True):
        assert np.array_equal(one["image"], other["image"]) and np.array_equal(one["label"], other["label"])


def order_of_cifar(step: int) -> np.ndarray:
    return order.ids(0, step, 128, 10_000)[0]


def test_tensorflow_sees_no_gpu(pictures):
    next(host.batches(pictures, lambda step: np.arange(4), 0, 1, kind="tf.data"))
    import tensorflow

    assert tensorflow.config.get_visible_devices("GPU") == []


@pytest.mark.slow
def test_tensorflow_prints_nothing(tmp_path):
    tiny_tfds.write(tmp_path, {"train": [tiny_tfds.records(30)]})
    code = (
        "import numpy as np; from jaxtrain.data.tfds import tfds; from jaxtrain.data import host;"
        f"train = tfds(dataset='tiny', dir={str(tmp_path)!r}).open()['train'];"
        "endless = host.batches(train, lambda step: np.arange(4), 0, None, kind='tf.data', threads=4);"
        "[next(endless) for _ in range(3)]; endless.close()"
    )
    environment = {key: value for key, value in os.environ.items() if not key.startswith("TF_")}
    done = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True, env=environment, cwd=ROOT
    )
    assert done.stdout == done.stderr == ""


def test_a_source_that_fails_is_named():
    with pytest.raises(UserError, match="example 9 cannot be decoded: stale; ") as caught:
        list(host.batches(Slow(fail=9), lambda step: np.array([1, 9]), 0, 1))
    assert isinstance(caught.value.__cause__, OSError)


def test_an_unknown_loader_is_refused():
    with pytest.raises(UserError, match="'fast', expected one of auto, threads, tf.data"):
        host.batches(numbered(), lambda step: np.arange(4), 0, 1, kind="fast")


@pytest.mark.parametrize("kind", host.KINDS)
def test_arrays_are_read_by_any_loader(kind):
    (batch,) = host.batches(numbered(), lambda step: np.arange(4), 0, 1, kind=kind)
    assert batch["label"].tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("devices", (1, 2, 8))
def test_a_training_batch_is_the_plans_on_any_number_of_devices(devices):
    with Feed(numbered(), order.Shuffled((5,), 16, SIZE), over_devices(devices), start=3, stop=9) as feed:
        batches = list(feed)
    assert len(batches) == 6
    for step, batch in enumerate(batches, start=3):
        ids, epochs = order.ids(5, step, 16, SIZE)
        for key, expected in (("id", ids), ("epoch", epochs), ("label", ids)):
            assert batch[key].dtype == np.int32 and np.array_equal(batch[key], expected)
            assert len(batch[key].sharding.device_set) == devices
        assert batch["image"].dtype == np.uint8 and np.array_equal(batch["image"][:, 0, 0, 0], ids)
        assert batch.keys() == {"image", "label", "id", "epoch"}


def test_an_evaluation_batch_has_a_mask():
    def plan(step: int) -> np.ndarray:
        ids = np.arange(step * 16, step * 16 + 16)
        return np.where(ids < SIZE, ids, -1).astype(np.int32)

    with Feed(numbered(), plan, over_devices(8), stop=3) as feed:
        batches = jax.device_get(list(feed))
    labels = np.concatenate([batch["label"][batch["mask"]] for batch in batches])
    assert labels.tolist() == list(range(SIZE))
    assert np.concatenate([batch["id"][~batch["mask"]] for batch in batches]).tolist() == [-1] * 11


@pytest.mark.parametrize("batch_size, devices", ((12, 8), (1, 2)))
def test_a_batch_that_does_not_divide_is_refused(batch_size, devices):
    with pytest.raises(UserError, match=f"a batch of {batch_size} does not divide"):
        Feed(numbered(), order.Shuffled((0,), batch_size, SIZE), over_devices(devices))


@pytest.mark.parametrize("kind, source", (("auto", numbered()), ("threads", Slow(delay=0))))
def test_a_distant_start_is_as_quick_as_the_first(kind, source):
    def seconds(start: int) -> float:
        began = time.perf_counter()
        with Feed(source, order.Shuffled((0,), 8, SIZE), over_devices(1), start=start, kind=kind) as feed:
            assert np.array_equal(next(feed)["id"], order.ids(0, start, 8, SIZE)[0])
        return time.perf_counter() - began

    seconds(0)
    near, far = (min(seconds(start) for _ in range(5)) for start in (0, 10**9))
    assert far < 5 * near + 0.05


def test_an_error_comes_after_the_batches_before_it_and_for_ever():
    with Feed(Slow(fail=20), lambda step: np.array([step]), over_devices(1)) as feed:
        for step in range(20):
            assert int(next(feed)["id"][0]) == step
        for _ in range(2):
            with pytest.raises(UserError, match="example 20"):
                next(feed)


def test_check_sees_host_batches_and_may_refuse():
    seen = []

    def check(batch):
        seen.append({key: type(array) for key, array in batch.items()})
        if len(seen) == 2:
            raise UserError("label 99 of example 3")

    with Feed(numbered(), order.Shuffled((0,), 8, SIZE), over_devices(1), check=check) as feed:
        next(feed)
        with pytest.raises(UserError, match="label 99"):
            next(feed)
    assert seen[0] == dict.fromkeys(("image", "label", "id", "epoch"), np.ndarray)


@pytest.mark.parametrize("source", (numbered(), Slow(delay=0)))
def test_closing_is_prompt_while_the_producer_waits(source):
    feed = Feed(source, order.Shuffled((0,), 8, SIZE), over_devices(1), prefetch=1)
    next(feed)
    time.sleep(0.05)  # the buffer is full
    began = time.monotonic()
    feed.close()
    feed.close()
    assert time.monotonic() - began < 1
    with pytest.raises(StopIteration):
        next(feed)


def test_closing_frees_a_consumer_that_waits():
    feed = Feed(Slow(delay=0.3), lambda step: np.array([2]), over_devices(1), threads=1)
    waiting = threading.Thread(target=lambda: list(feed))
    waiting.start()
    time.sleep(0.05)
    feed.close()
    waiting.join(5)
    assert not waiting.is_alive()


def test_a_feed_that_is_dropped_ends_its_threads():
    next(Feed(numbered(), order.Shuffled((0,), 8, SIZE), over_devices(1)))
    gc.collect()
    assert not [t for t in threading.enumerate() if t.name == "jaxtrain-feed"]


def test_prefetch_is_bounded():
    loaded = []

    def check(batch):
        loaded.append(1)

    with Feed(numbered(), order.Shuffled((0,), 8, SIZE), over_devices(1), prefetch=3, check=check):
        time.sleep(0.2)
        assert len(loaded) <= 4  # three in the buffer, one that waits for room


def test_waited_counts_what_the_consumer_lost():
    with Feed(Slow(delay=0.05), lambda step: np.array([2]), over_devices(1), stop=4, threads=1) as feed:
        list(feed)
        assert 0.1 < feed.waited < 5
    with Feed(numbered(), order.Shuffled((0,), 8, SIZE), over_devices(1), prefetch=8) as feed:
        next(feed)
        time.sleep(0.2)
        before = feed.waited
        for _ in range(4):
            next(feed)
        assert feed.waited - before < 0.1


WORKER = """
import os, sys
os.environ.update(JAX_PLATFORMS="cpu", XLA_FLAGS="--xla_force_host_platform_device_count=2")
import jax, numpy as np
jax.distributed.initialize(sys.argv[2], 2, int(sys.argv[1]))
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtrain.data import order
from jaxtrain.data.feed import Feed
from jaxtrain.data.sources import ArraySource

class Watched(ArraySource):
    asked = []
    def get(self, ids):
        self.asked.extend(ids.tolist())
        return super().get(ids)

source = Watched({"label": np.arange(37)})
sharding = NamedSharding(Mesh(jax.devices(), ("data",)), PartitionSpec("data"))
with Feed(source, order.Shuffled((5,), 16, 37), sharding, stop=3) as feed:
    for step, batch in enumerate(feed):
        ids, epochs = order.ids(5, step, 16, 37)
        assert batch["label"].shape == (16,)
        for key, expected in (("label", ids), ("id", ids), ("epoch", epochs)):
            for shard in batch[key].addressable_shards:
                assert np.array_equal(shard.data, expected[shard.index]), key
assert len(source.asked) == 3 * 8, source.asked
print("rows", source.asked)
"""


@pytest.mark.slow
def test_each_process_loads_only_its_rows(tmp_path):
    import socket

    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    workers = [
        subprocess.Popen(
            [sys.executable, "-c", WORKER, str(number), address], stdout=subprocess.PIPE, text=True, cwd=ROOT
        )
        for number in range(2)
    ]
    outputs = [worker.communicate(timeout=120)[0] for worker in workers]
    assert [worker.returncode for worker in workers] == [0, 0]
    assert outputs[0] != outputs[1]
