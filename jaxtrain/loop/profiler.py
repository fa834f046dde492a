"""A JAX trace of some steps, for TensorBoard's profiler or Perfetto."""

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

import jax


@contextlib.contextmanager
def profiler(folder: Path, span: tuple[int, int] | None, say: Callable[[str], None]) -> Iterator[Callable[[int], None]]:
    """Yields a function of the step that starts and stops a JAX trace at the two steps of `span`."""
    running = False

    def at(step: int) -> None:
        nonlocal running
        if span and not running and span[0] <= step < span[1]:
            jax.profiler.start_trace(str(folder))
            running = True
        elif span and running and step >= span[1]:
            stop()

    def stop() -> None:
        nonlocal running
        jax.profiler.stop_trace()
        running = False
        say(f"trace written to {folder}")

    try:
        yield at
    finally:
        if running:
            stop()
