"""TensorFlow, where it is needed at all: on the CPU only, and quiet. The accelerator belongs to JAX."""

import os
from typing import Any

from jaxtrain.errors import UserError


def tensorflow() -> Any:
    """The module `tensorflow`, which sees no GPU. Takes seconds the first time.

    Raises UserError where TensorFlow is missing, or was already in use with a GPU in this process.
    """
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # its notes would break the terminal's live line
    os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "0")  # no part of decoding, and announced on every import
    try:
        import tensorflow as tf
    except ImportError as error:
        raise UserError(
            f"TensorFlow cannot be imported ({error}): pip install tensorflow-cpu, or config.loader='threads'"
        ) from error
    try:
        tf.config.set_visible_devices([], "GPU")
    except RuntimeError as error:  # it has started already
        if tf.config.get_visible_devices("GPU"):
            raise UserError(
                "TensorFlow already holds this process's GPUs: restart it and call "
                "tf.config.set_visible_devices([], 'GPU') first, or set config.loader='threads'"
            ) from error
    return tf
