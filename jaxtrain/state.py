"""The state of a run: arrays only, so that it can be donated, sharded, saved and compared bit by bit."""

import dataclasses
import zlib
from typing import Any

import jax
import jax.numpy as jnp


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
    """Everything that step `s` leaves behind for step `s + 1`.

    A step of a user's own may keep any pytree in `params`, `model_state` and `opt_state` (a GAN keeps two of
    each), or bring a registered dataclass of its own with `step`, `offset` and `key`.
    """

    step: jax.Array  # int32 []: batches seen; advances also when an update is skipped
    offset: jax.Array  # int32 []: batches left out by rollbacks; the data position is step + offset
    key: jax.Array  # typed threefry key []: the root of every random stream, never changed
    params: Any
    model_state: Any  # what is learnt without gradients, such as BatchNorm's running statistics
    opt_state: Any
    ema: Any = ()  # {"params", "model_state"} averaged over steps, or () when off
    loss_scale: Any = ()  # float16 only
    skipped: Any = ()  # int32 []: updates left out because loss or gradient was not finite
    skipped_at: Any = ()  # int32 []: the first step since the start whose update was left out, or -1

    def stream(self, name: str) -> jax.Array:
        """The key of one named random stream at this step, for example "augment" or "dropout"."""
        return stream(self.key, self.step + self.offset, name)


def stream(key: jax.Array, position: jax.Array, name: str) -> jax.Array:
    """The key of stream `name` at data position `position` (int32 []). The name enters by its CRC-32."""
    return jax.random.fold_in(jax.random.fold_in(key, position), zlib.crc32(name.encode()))


def counter(value: int = 0) -> jax.Array:
    """An int32 [] for a state's counters."""
    return jnp.full((), value, jnp.int32)
