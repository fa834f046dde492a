"""What attention computes, by JAX's own function where that does it."""

from typing import Literal

import jax
import jax.numpy as jnp
from flax import nnx

Implementation = Literal["cudnn"] | None


def attend(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    *,
    mask: jax.Array | None = None,
    causal: bool = False,
    dropout: nnx.Dropout | None = None,
    implementation: Implementation = None,
) -> jax.Array:
    """Each query's mean of the values, weighted by its softmax over the keys: Vaswani et al., 2017.

    query [B, T, N, H], key, value [B, S, K, H], K a divisor of N, mask bool [B, 1, T, S], true: seen -> [B, T, N, H].
    dropout: of the weights; while it is active, all of them are computed, [B, N, T, S], which fused kernels spare.
    """
    # JAX's function has float16 on GPUs only.
    known = query.dtype != jnp.float16 or jax.default_backend() == "gpu"
    if known and (dropout is None or dropout.deterministic):
        # It takes its logits to float32 by a promotion, which it refuses itself where promotion is strict.
        with jax.numpy_dtype_promotion("standard"):
            return jax.nn.dot_product_attention(
                query, key, value, mask=mask, is_causal=causal, implementation=implementation
            )
    batch, length, heads, size = query.shape
    grouped = query.reshape(batch, length, key.shape[2], -1, size)  # [B, T, K, N / K, H]
    wide = jnp.promote_types(query.dtype, jnp.float32)
    logits = jnp.einsum("btkgh,bskh->bkgts", grouped, key, preferred_element_type=wide) / size**0.5
    seen = jnp.tri(length, key.shape[1], dtype=bool)[None, None] if causal else jnp.ones((1, 1, 1, 1), bool)
    seen = seen if mask is None else seen & mask
    weights = jax.nn.softmax(jnp.where(seen[:, :, None], logits, -0.7 * jnp.finfo(wide).max), axis=-1)
    weights = weights if dropout is None else dropout(weights)
    return jnp.einsum("bkgts,bskh->btkgh", weights.astype(value.dtype), value).reshape(query.shape)
