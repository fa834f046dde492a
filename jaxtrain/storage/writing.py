"""Orbax as checkpoints use it: uncompressed, without its log, and with no failure of one save left for the next."""

import logging
import os

import jax
import numpy as np
import orbax.checkpoint as ocp

_log = logging.getLogger("jaxtrain")


def handler() -> ocp.PyTreeCheckpointHandler:
    """Of one flat mapping of arrays."""
    # Compressing float32 weights saves 8 % of the space, doubles the time and takes cores from the training.
    return ocp.PyTreeCheckpointHandler(use_compression=False)


def restore_args(sharding: jax.sharding.Sharding | None) -> ocp.RestoreArgs:
    """Onto that sharding; None: as NumPy."""
    if sharding is None:
        return ocp.RestoreArgs(restore_type=np.ndarray)
    return ocp.ArrayRestoreArgs(restore_type=jax.Array, sharding=sharding)


def forget_failures(writer: ocp.AsyncCheckpointer | None) -> None:
    """Waits for the rest of a failed save.

    Its arrays and each file of metadata, those in a store of the whole process, can fail apart, and orbax tells one
    failure a call: the next save would be told what is left.
    """
    for _ in range(10):
        try:
            if writer is not None:
                writer.wait_until_finished()
            return
        except Exception as error:
            _log.debug("orbax, of the same save: %s", error)


def quiet(record: logging.LogRecord) -> bool:
    """A filter for absl's log: drops orbax's progress, and the traceback of an error that we raise."""
    from_orbax = f"{os.sep}orbax{os.sep}" in record.pathname
    raised_by_us = record.filename in {"async_checkpointer.py", "future.py"} or (
        record.filename == "checkpoint.py" and record.levelno == logging.ERROR  # of metadata
    )
    return not (from_orbax and (record.levelno < logging.WARNING or raised_by_us))
