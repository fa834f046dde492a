"""Which examples a step sees: step → example ids, in O(1), the same integers on host and device.

Example number n of a run is `n = step * batch_size + i`; its epoch is `n // size`; its id is the image of
`n % size` under a permutation keyed by (seed, epoch). So the position in the data is a function of the step:
nothing is stored, a seek costs nothing, batches straddle epochs, and neither devices, hosts nor threads can
change the order. Where the rest of an epoch that fills no batch is dropped, an epoch has fewer numbers than examples:
those whose place in its order comes last are left out.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxtrain.errors import UserError

# What a step loads: its ids (integers [B], -1: an empty row), or (ids, epochs) as `ids` gives them. A pure
# function of the step: it is called more than once for one, and from several threads.
Plan = Callable[[int], Any]

ROUNDS = 10  # four already give a random-looking order; small domains like more (Black & Rogaway, 2002)
BLOCK = 8192  # examples planned at once: numpy's cost a call is then spread over many small batches


def ids(
    seed: Any, step: Any, batch_size: int, size: int, xp: Any = np, *, epoch_size: int | None = None
) -> tuple[Any, Any]:
    """The examples of global batch `step`: (ids in 0..size-1, their epochs), both int32 [batch_size].

    An epoch is of `epoch_size` examples, 1 to `size`; None: of all.

    With `xp=numpy`, step is any integer; with `xp=jax.numpy` it may be a traced int32, and the result is the
    same: step * batch_size may exceed 32 bits in both. The number of epochs must stay below 2**31.
    """
    _refuse(size)
    span = size if epoch_size is None else epoch_size
    if xp is np:
        epoch, first = divmod(int(step) * batch_size, span)
        epoch %= 2**32
    else:
        epoch, first = _divide_product(xp.asarray(step, dtype=xp.uint32), batch_size, span, xp)
    position = xp.arange(batch_size, dtype=xp.uint32) + xp.asarray(first, dtype=xp.uint32)  # [B], below 2**32
    epochs = position // np.uint32(span) + xp.asarray(epoch, dtype=xp.uint32)  # [B]
    return permute(seed, epochs, position % np.uint32(span), size, xp), epochs.astype(xp.int32)


def examples_in_epoch(size: int, batch_size: int, drop_remainder: bool) -> int:
    """How many of `size` examples an epoch holds: all, or as many as fill whole batches.

    Raises UserError where those are none.
    """
    if not drop_remainder:
        return size
    if batch_size > size:
        raise UserError(
            f"config.drop_remainder leaves nothing: config.batch_size is {batch_size} and there are {size} training "
            "examples; take a smaller batch"
        )
    return size // batch_size * batch_size


def permute(seed: Any, epoch: Any, positions: Any, size: int, xp: Any = np) -> Any:
    """Where `positions` (integers [...] in 0..size-1) go in the order of `epoch`: int32 [...], a bijection.

    An alternating Feistel network on Z_a x Z_b with a * b just above `size`, walking on while it lands
    outside (Black & Rogaway, "Ciphers with arbitrary finite domains", 2002). `seed` and `epoch` are uint32
    values, scalar or of the shape of `positions`. Integer arithmetic in 32 bits: numpy and jax.numpy (also
    traced) agree bit by bit.
    """
    _refuse(size)
    rows = math.isqrt(size - 1) + 1
    columns = -(-size // rows)
    positions = xp.asarray(positions, dtype=xp.uint32)
    with np.errstate(over="ignore"):  # wrapping is meant; numpy warns of it for scalars only
        key = _mix(_mix(xp.asarray(seed, dtype=xp.uint32)) ^ xp.asarray(epoch, dtype=xp.uint32))
        shuffle = functools.partial(_feistel, key=key, rows=np.uint32(rows), columns=np.uint32(columns))
        if rows * columns == size:
            return shuffle(positions).astype(xp.int32)
        return _walk(shuffle, positions, np.uint32(size), xp).astype(xp.int32)


@dataclasses.dataclass(frozen=True)
class Shuffled:
    """`ids` as a function of the step alone, a Plan: of each seed `batch_size` rows, one seed's after the other's.

    Called with a step it gives NumPy arrays, and plans many small batches at once, which costs a tenth; `traced` gives
    the same integers inside a program. Raises UserError for a seed or a size that cannot be ordered.
    """

    seeds: tuple[int, ...]
    batch_size: int
    size: int
    epoch_size: int | None = None

    def __post_init__(self) -> None:
        _refuse(self.size)
        for seed in self.seeds:
            if not 0 <= seed < 2**32:
                raise UserError(f"seed is {seed}, expected 0 to {2**32 - 1}")

    def __call__(self, step: int) -> tuple[np.ndarray, np.ndarray]:
        number, row = divmod(step, self._steps)
        columns = self._block(number)
        return columns[0][row], columns[1][row]

    def traced(self, step: jax.Array) -> tuple[jax.Array, jax.Array]:
        """(ids, epochs), int32 [seeds * batch_size], of a traced step (int32 [])."""
        found = [self._of(np.uint32(seed), step, self.batch_size, jnp) for seed in self.seeds]
        example_ids, epochs = zip(*found, strict=True)
        return jnp.concatenate(example_ids), jnp.concatenate(epochs)

    def _of(self, seed: Any, step: Any, batch_size: int, xp: Any) -> tuple[Any, Any]:
        return ids(seed, step, batch_size, self.size, xp, epoch_size=self.epoch_size)

    @functools.cached_property
    def _steps(self) -> int:
        """Steps planned at once."""
        return max(1, BLOCK // self.batch_size)

    @functools.cached_property
    def _block(self) -> Callable[[int], tuple[np.ndarray, np.ndarray]]:
        @functools.lru_cache(maxsize=4)  # readers ahead of the consumer may be in the next block
        def block(number: int) -> tuple[np.ndarray, np.ndarray]:
            # So many batches are one batch that is so many times as large.
            found = [self._of(seed, number, self._steps * self.batch_size, np) for seed in self.seeds]
            example_ids, epochs = zip(*found, strict=True)
            return self._side_by_side(example_ids), self._side_by_side(epochs)

        return block

    def _side_by_side(self, columns: Iterable[np.ndarray]) -> np.ndarray:
        """[steps * B] of each seed → [steps, seeds * B]."""
        return np.concatenate([column.reshape(self._steps, self.batch_size) for column in columns], axis=1)


def _refuse(size: int) -> None:
    if not 1 <= size < 2**31:
        raise UserError(f"a data set of {size} examples cannot be ordered: expected 1 to {2**31 - 1}")


def _mix(x: Any) -> Any:
    """The hash lowbias32 (C. Wellons, "Prospecting for hash functions", 2018), a bijection of uint32."""
    x = (x ^ (x >> 16)) * np.uint32(0x7FEB352D)
    x = (x ^ (x >> 15)) * np.uint32(0x846CA68B)
    return x ^ (x >> 16)


def _feistel(value: Any, *, key: Any, rows: np.uint32, columns: np.uint32) -> Any:
    """Over Z_rows x Z_columns; a round shifts one half by a hash of the other, so it can be undone."""
    left, right = value // columns, value % columns
    for number in range(1, ROUNDS + 1):
        round_key = _mix(key + np.uint32(number * 0x9E3779B9 & 0xFFFFFFFF))
        if number % 2:
            left = (left + _mix(right ^ round_key) % rows) % rows
        else:
            right = (right + _mix(left ^ round_key) % columns) % columns
    return left * columns + right


def _walk(shuffle: Callable[[Any], Any], value: Any, size: np.uint32, xp: Any) -> Any:
    """Applies `shuffle` until the result is in 0..size-1: still a bijection, for its cycles come back."""

    def unfinished(state: tuple[Any, Any]) -> Any:
        return xp.any(state[1])

    def onward(state: tuple[Any, Any]) -> tuple[Any, Any]:
        value, outside = state
        value = xp.where(outside, shuffle(value), value)
        return value, value >= size

    state = (value, xp.ones(value.shape, dtype=bool))
    if xp is not np:
        return lax.while_loop(unfinished, onward, state)[0]
    while unfinished(state):
        state = onward(state)
    return state[0]


def _divide_product(step: Any, factor: int, divisor: int, xp: Any) -> tuple[Any, Any]:
    """divmod(step * factor, divisor) for a traced uint32 `step`, where the product may need 64 bits.

    The sum over the bits of `step` of divmod(factor * 2**bit, divisor), which are constants; the remainder is
    reduced after each, so that it stays below 2**32. The quotient is modulo 2**32. Unrolled, since XLA then
    fuses it.
    """
    quotient, remainder = xp.zeros_like(step), xp.zeros_like(step)
    for bit in range(32):
        whole, part = divmod(factor << bit, divisor)
        is_set = (step >> bit) & np.uint32(1)
        remainder = remainder + is_set * np.uint32(part)
        carry = (remainder >= np.uint32(divisor)).astype(xp.uint32)
        quotient = quotient + is_set * np.uint32(whole % 2**32) + carry
        remainder = remainder - carry * np.uint32(divisor)
    return quotient, remainder
