"""Batches on the host: ids → decoded arrays, read ahead in parallel, in the order of the plan."""

import collections
import itertools
import math
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from jaxtrain.data.sources import ArraySource, Batch, EncodedSource, Source, Subset, SyntheticSource
from jaxtrain.data.tensorflow_cpu import tensorflow
from jaxtrain.errors import UserError
from jaxtrain.machine import cpu_count

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
    at no cost. Close the iterator to end its threads.

    Raises UserError for an unknown kind, and naming the example that cannot be decoded.
    """
    if kind not in KINDS:
        raise UserError(f"loader is {kind!r}, expected one of {', '.join(KINDS)}")
    threads = threads or cpu_count()
    if isinstance(source, EncodedSource) and kind != "threads":
        return _by_tf_data(source, plan, start, stop, threads, lookahead)
    if _is_quick(source) and _bytes(source) * len(plan(start)) <= _SMALL_BYTES:
        return (source.get(plan(step)) for step in _steps(start, stop))
    return _by_threads(source, plan, start, stop, threads, lookahead)


def _steps(start: int, stop: int | None) -> Iterator[int]:
    return itertools.count(start) if stop is None else iter(range(start, stop))


def _is_quick(source: Source) -> bool:
    """Whether `get` only copies."""
    while isinstance(source, Subset):
        source = source.source
    return isinstance(source, ArraySource | SyntheticSource)


def _bytes(source: Source) -> int:
    """Of one example."""
    return sum(math.prod(field.shape) * np.dtype(field.dtype).itemsize for field in source.spec.values())


def _by_threads(
    source: Source, plan: IdPlan, start: int, stop: int | None, threads: int, lookahead: int
) -> Generator[Batch, None, None]:
    """One batch a task; the results are taken in the order of the steps."""

    def load(step: int) -> Batch:
        ids = plan(step)
        try:
            return source.get(ids)
        except UserError:
            raise
        except Exception as error:
            raise _blame(source, ids, source.get, error) from error

    ahead = _steps(start, stop)
    pool = ThreadPoolExecutor(threads, thread_name_prefix="jaxtrain-decode")
    try:
        pending = collections.deque(pool.submit(load, step) for step in itertools.islice(ahead, lookahead + threads))
        while pending:
            batch = pending.popleft().result()
            pending.extend(pool.submit(load, step) for step in itertools.islice(ahead, 1))
            yield batch
    finally:
        pool.shutdown(cancel_futures=True)


def _by_tf_data(
    source: EncodedSource, plan: IdPlan, start: int, stop: int | None, threads: int, lookahead: int
) -> Generator[Batch, None, None]:
    """Records as bytes → tf.data, which decodes pieces of batches in parallel and keeps their order."""
    tf = tensorflow()
    # Graph operations as they stand: AutoGraph would rewrite Python, and print what it cannot.
    decode_graph = tf.autograph.experimental.do_not_convert(source.decode_graph)
    size = len(plan(start))
    piece = math.gcd(size, _RECORDS)

    def read() -> Iterator[np.ndarray]:
        for step in _steps(start, stop):
            records = np.array(source.records(plan(step)), dtype=object)  # [B] bytes
            yield from records.reshape(-1, piece)

    dataset = (
        tf.data.Dataset.from_generator(read, output_signature=tf.TensorSpec((piece,), tf.string))
        .map(decode_graph, num_parallel_calls=threads, deterministic=True)
        .rebatch(size)
        .prefetch(lookahead)
        .with_options(_options(tf, threads))
    )
    decoded = dataset.as_numpy_iterator()

    def decode(ids: np.ndarray) -> Any:
        return source.decode_graph(tf.constant(source.records(ids)))

    for step in _steps(start, stop):
        try:
            batch = next(decoded)
        except tf.errors.OpError as error:
            raise _blame(source, plan(step), decode, error) from error
        yield batch


def _options(tf: Any, threads: int) -> Any:
    options = tf.data.Options()
    options.deterministic = True
    options.autotune.enabled = False
    options.threading.private_threadpool_size = threads
    return options


def _blame(source: Source, ids: np.ndarray, decode: Callable[[np.ndarray], Any], error: Exception) -> Exception:
    """The UserError that names the example `error` came from; the error itself where none fails alone."""
    for example in ids.tolist():
        try:
            decode(np.array([example]))
        except UserError as own:
            return own
        except Exception as cause:
            name = source.describe(example) if isinstance(source, EncodedSource) else f"example {example}"
            reason = (str(cause) or type(cause).__name__).splitlines()[0]
            return UserError(f"{name} cannot be decoded: {reason}; mend or remove it in the data set")
    return error
