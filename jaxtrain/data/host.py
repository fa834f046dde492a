"""Batches on the host: ids → decoded arrays, read ahead in parallel, in the order of the plan."""

import collections
import itertools
import math
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from jaxtrain.data import damage
from jaxtrain.data.sources import ArraySource, Batch, EncodedSource, Source, Subset, SyntheticSource, example_bytes
from jaxtrain.data.tensorflow_cpu import tensorflow
from jaxtrain.errors import UserError
from jaxtrain.machine.hardware import cpu_count

IdPlan = Callable[[int], np.ndarray]  # step → ids, integers [B], the same B for every step

KINDS = ("auto", "threads", "tf.data")
_SMALL_BYTES = 1 << 20  # a batch of arrays up to this size is copied faster than handed to another thread
_RECORDS = 32  # decoded by one call of tf.data's function, at most: less overhead, still in parallel


def batches(
    source: Source,
    plan: IdPlan,
    start: int,
    stop: int | None,
    *,
    threads: int = 0,
    lookahead: int = 2,
    kind: str = "auto",
) -> Generator[Batch, None, None]:
    """`source.get(plan(step))` for step = start, start + 1, ..., stop - 1 (stop None: for ever).

    `kind` says how encoded sources are decoded: "threads" in a pool of `threads` (0: as many as CPUs are
    allowed), without TensorFlow; "tf.data" by TensorFlow's operations, to the same bits; "auto" as "tf.data".
    Other sources never need TensorFlow. At least `lookahead` batches are read ahead; `start` may be anything
    at no cost. Close the iterator to end its threads. A source that bears damage adds `mask`, see `data.damage`.

    Raises UserError for an unknown kind, and naming the example that cannot be decoded; StorageError where the
    disk fails.
    """
    if kind not in KINDS:
        raise UserError(f"loader is {kind!r}, expected one of {', '.join(KINDS)}")
    threads = threads or cpu_count()
    if isinstance(source, EncodedSource) and kind != "threads":
        return _by_tf_data(source, plan, start, stop, threads, lookahead)
    if _is_quick(source) and example_bytes(source) * len(plan(start)) <= _SMALL_BYTES:
        return (damage.load(source, plan(step)) for step in _steps(start, stop))
    return _by_threads(source, plan, start, stop, threads, lookahead)


def _steps(start: int, stop: int | None) -> Iterator[int]:
    return itertools.count(start) if stop is None else iter(range(start, stop))


def _is_quick(source: Source) -> bool:
    """Whether `get` only copies."""
    while isinstance(source, Subset):
        source = source.source
    return isinstance(source, ArraySource | SyntheticSource)


def _by_threads(
    source: Source, plan: IdPlan, start: int, stop: int | None, threads: int, lookahead: int
) -> Generator[Batch, None, None]:
    """One batch a task."""
    with _Ahead(threads) as ahead:
        yield from ahead(lambda step: damage.load(source, plan(step)), start, stop, lookahead)


def _by_tf_data(
    source: EncodedSource, plan: IdPlan, start: int, stop: int | None, threads: int, lookahead: int
) -> Generator[Batch, None, None]:
    """Records as bytes → tf.data, which decodes pieces of batches in parallel and keeps their order."""
    tf = tensorflow()
    borne = damage.of(source)
    with _Ahead(threads) as ahead:
        step = start
        while stop is None or step < stop:
            decoded = _decoded(tf, source, plan, step, stop, threads, lookahead, ahead)
            try:
                for batch in decoded:
                    yield batch if borne is None else {**batch, "mask": np.ones(len(plan(step)), bool)}
                    step += 1
            except tf.errors.OpError as error:  # which ends tf.data's iterator
                yield _recovered(tf, source, plan(step), error)
                step += 1


def _decoded(
    tf: Any,
    source: EncodedSource,
    plan: IdPlan,
    start: int,
    stop: int | None,
    threads: int,
    lookahead: int,
    ahead: "_Ahead",
) -> Iterator[Batch]:
    # Graph operations as they stand: AutoGraph would rewrite Python, and print what it cannot.
    decode_graph = tf.autograph.experimental.do_not_convert(source.decode_graph)
    size = len(plan(start))
    piece = math.gcd(size, _RECORDS)

    def read() -> Iterator[np.ndarray]:
        # Many reads at once: tf.data itself asks for one at a time.
        for records in ahead(lambda step: source.records(plan(step)), start, stop, lookahead):
            yield from np.array(records, dtype=object).reshape(-1, piece)  # [B] bytes

    dataset = (
        tf.data.Dataset.from_generator(read, output_signature=tf.TensorSpec((piece,), tf.string))
        .map(decode_graph, num_parallel_calls=threads, deterministic=True)
        .rebatch(size)
        .prefetch(lookahead)
        .with_options(_options(tf, threads))
    )
    return iter(dataset.as_numpy_iterator())


def _options(tf: Any, threads: int) -> Any:
    options = tf.data.Options()
    options.deterministic = True
    options.autotune.enabled = False
    options.threading.private_threadpool_size = threads
    return options


def _recovered(tf: Any, source: EncodedSource, ids: np.ndarray, error: Exception) -> Batch:
    """The batch that made tf.data fail, where the source bears the damage in it; else raises what names it."""
    batch = damage.one_by_one(source, ids)
    if not batch["mask"].all():
        return batch
    for number in ids.tolist():
        try:
            source.decode_graph(tf.constant(source.records(np.array([number]))))
        except tf.errors.OpError as cause:
            raise damage.fault(source, number, cause) from error
    raise error


class _Ahead:
    """Threads that load steps ahead of the one that is asked for."""

    def __init__(self, threads: int):
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="jaxtrain-decode")
        self._threads, self._closed = threads, False

    def __call__(self, load: Callable[[int], Any], start: int, stop: int | None, lookahead: int) -> Iterator[Any]:
        """`load(step)` of each step in order; as many more under way as there are threads, and `lookahead`."""
        steps = _steps(start, stop)
        first = itertools.islice(steps, lookahead + self._threads)
        try:
            pending = collections.deque(self._pool.submit(load, step) for step in first)
            while pending:
                loaded = pending.popleft().result()
                pending.extend(self._pool.submit(load, step) for step in itertools.islice(steps, 1))
                yield loaded
        except Exception:
            if not self._closed:  # tf.data goes on for a while after it was closed; nobody waits for what it gets
                raise

    def __enter__(self) -> "_Ahead":
        return self

    def __exit__(self, *exception: object) -> None:
        self._closed = True
        self._pool.shutdown(cancel_futures=True)
