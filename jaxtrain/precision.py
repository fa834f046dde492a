"""Which numbers a run computes with, and why: a policy, its casts, its scope, and float16's loss scale."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxtrain.config.lookup import choices_hint
from jaxtrain.errors import UserError

NAMES = ("auto", "float32", "tensorfloat32", "bfloat16", "float16", "float64")

INITIAL_SCALE = 2.0**15
LARGEST_SCALE = 2.0**24
SMALLEST_SCALE = 1.0
SCALE_FACTOR = 2.0
GROWTH_INTERVAL = 2000  # good steps in a row before the scale grows


@dataclass(frozen=True)
class Policy:
    """What is stored, computed and returned in which dtype.

    name: the choice, never "auto"; stored with the run and given to `choose` again on resume. param:
    parameters and optimizer state. compute: the forward and backward pass, by `cast` of parameters and inputs
    inside the differentiated function, so that gradients arrive in `param`. output: model outputs before the
    loss. matmul: JAX's default_matmul_precision while the step is traced. reason: one clause for the log.
    """

    name: str
    param: np.dtype
    compute: np.dtype
    output: np.dtype
    matmul: str
    reason: str


def choose(name: str, platform: str, capability: str | None = None) -> Policy:
    """The policy for `name` (one of NAMES) on `platform` ("cpu", "gpu", "tpu").

    `capability` is the GPU's compute capability, like "8.0"; None asks JAX's first device, for "auto" only.
    Raises UserError for an unknown name, with the nearest, and for float64 on a TPU, which has none.
    """
    if name not in NAMES:
        raise UserError(f"precision={name!r} is unknown.{choices_hint(name, NAMES)}")
    if name == "auto":
        name, reason = _automatic(platform, capability)
    else:
        reason = _asked(name, platform)
    if name == "float64" and platform == "tpu":
        raise UserError("precision='float64': a TPU has no float64, expected another platform: use float32 or the CPU")
    compute = "float32" if name == "tensorfloat32" else name
    stored = "float64" if name == "float64" else "float32"
    matmul = {"float32": "highest", "float64": "highest", "tensorfloat32": "tensorfloat32"}.get(name, "default")
    return Policy(name, jnp.dtype(stored), jnp.dtype(compute), jnp.dtype(stored), matmul, reason)


def _automatic(platform: str, capability: str | None) -> tuple[str, str]:
    if platform == "tpu":
        return "bfloat16", "auto: a TPU multiplies bfloat16 natively"
    if platform != "gpu":
        return "float32", f"auto: bfloat16 gains little where the platform is {platform}"
    if capability is None:
        capability = str(getattr(jax.devices()[0], "compute_capability", "unknown"))
    try:
        has_bfloat16 = float(capability) >= 8.0
    except ValueError:
        return "float32", f"auto: compute capability {capability} does not tell whether the GPU has bfloat16"
    if has_bfloat16:
        return "bfloat16", f"auto: the GPU has bfloat16 (compute capability {capability}, 8.0 or more)"
    return "float32", f"auto: the GPU has no bfloat16 (compute capability {capability}, below 8.0)"


def _asked(name: str, platform: str) -> str:
    if name == "tensorfloat32" and platform == "tpu":
        return "asked for; a TPU multiplies float32 in three bfloat16 passes instead"
    if name == "tensorfloat32" and platform != "gpu":
        return f"asked for; only GPUs have it, so where the platform is {platform} this is float32"
    return "asked for"


def cast(tree: Any, dtype: Any) -> Any:
    """The floating leaves of a tree of arrays in `dtype`; integers, booleans and keys untouched."""
    return jax.tree.map(lambda x: x.astype(dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x, tree)


@contextlib.contextmanager
def scope(policy: Policy) -> Iterator[None]:
    """Trace and run under the policy: matmul precision, float64 on or off.

    What the process was set to does not matter. Holds for the current thread only, as JAX's own settings do.
    """
    with jax.enable_x64(policy.param == jnp.float64), jax.default_matmul_precision(policy.matmul):
        yield


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class LossScale:
    """The dynamic loss scale of float16, arrays only, so that it is checkpointed with the state.

    Micikevicius et al., "Mixed Precision Training", 2017. The scale is a power of two from SMALLEST_SCALE to
    LARGEST_SCALE, so that scaling and unscaling are exact.
    """

    value: jax.Array  # float32 []
    good_steps: jax.Array  # int32 [], finite ones in a row since the scale last changed


Scaling = LossScale | tuple[()]  # the empty tree: nothing is scaled


def init_loss_scale(policy: Policy) -> Scaling:
    """What the state of a run starts with: a scale for float16, () for every other policy."""
    if policy.compute != jnp.float16:
        return ()
    return LossScale(jnp.full((), INITIAL_SCALE, jnp.float32), jnp.zeros((), jnp.int32))


def scale(loss: jax.Array, scaling: Scaling) -> jax.Array:
    """The loss to differentiate, float32 []."""
    return loss * scaling.value if isinstance(scaling, LossScale) else loss


def unscale(gradients: Any, scaling: Scaling) -> Any:
    """Gradients of the loss itself from those of the scaled one; float32 leaves, as the parameters are."""
    if not isinstance(scaling, LossScale):
        return gradients
    return jax.tree.map(lambda gradient: gradient / scaling.value, gradients)


def adjust(scaling: Scaling, finite: jax.Array, growth_interval: int = GROWTH_INTERVAL) -> Scaling:
    """The scale for the next step: halved if the gradients were not `finite` (bool []), doubled when due.

    It is due after `growth_interval` finite steps in a row.
    """
    if not isinstance(scaling, LossScale):
        return scaling
    good = jnp.where(finite, scaling.good_steps + 1, 0)
    due = good >= growth_interval
    grown = jnp.where(due, jnp.minimum(scaling.value * SCALE_FACTOR, LARGEST_SCALE), scaling.value)
    shrunk = jnp.maximum(scaling.value / SCALE_FACTOR, SMALLEST_SCALE)
    return LossScale(jnp.where(finite, grown, shrunk), jnp.where(due, 0, good))


def exhausted(scaling: Scaling) -> jax.Array:
    """Whether an overflow can not be mended by a smaller scale (bool []): there is none, or it is the smallest."""
    if not isinstance(scaling, LossScale):
        return jnp.ones((), bool)
    return scaling.value <= jnp.float32(SMALLEST_SCALE)
