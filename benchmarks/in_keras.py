"""The same four networks in Keras 3, out of its own layers. KERAS_BACKEND=jax must be set before this is imported."""

from typing import Any

import keras
from keras import layers, ops


def resnet18(classes: int, side: int, width: int = 64) -> keras.Model:
    """With the stem for CIFAR: uint8 [B, H, W, 3] -> [B, classes]."""
    inputs = keras.Input((side, side, 3), dtype="uint8")
    x = layers.ReLU()(_conv_norm(layers.Rescaling(1 / 255)(inputs), width, 3))
    for stage in range(4):
        for block in range(2):
            features, stride = width * 2**stage, 2 if stage and not block else 1
            y = layers.ReLU()(_conv_norm(x, features, 3, stride))
            shortcut = _conv_norm(x, features, 1, stride) if x.shape[-1] != features else x
            x = layers.ReLU()(layers.Add()([_conv_norm(y, features, 3), shortcut]))
    return keras.Model(inputs, layers.Dense(classes)(layers.GlobalAveragePooling2D()(x)))


def vit(classes: int, side: int, patch: int, width: int, depth: int, heads: int) -> keras.Model:
    """With a CLS token: uint8 [B, H, W, 3] -> [B, classes]."""
    inputs = keras.Input((side, side, 3), dtype="uint8")
    x = layers.Conv2D(width, patch, patch)(layers.Rescaling(1 / 255)(inputs))
    x = _Placed(first=True)(layers.Reshape((-1, width))(x))
    for _ in range(depth):
        x = _block(x, width, heads, epsilon=1e-6)
    return keras.Model(inputs, layers.Dense(classes)(layers.LayerNormalization(epsilon=1e-6)(x)[:, 0]))


def gpt(vocabulary: int, context: int, width: int, depth: int, heads: int) -> keras.Model:
    """GPT-2's decoder with tied embeddings: tokens [B, T] -> [B, T, vocabulary]."""
    inputs = keras.Input((context,), dtype="int32")
    embedding = layers.Embedding(vocabulary, width)
    x = _Placed()(embedding(inputs))
    for _ in range(depth):
        x = _block(x, width, heads, text=True)
    return keras.Model(inputs, _Tied(embedding)(layers.LayerNormalization(epsilon=1e-5)(x)))


def lstm(vocabulary: int, context: int, width: int, depth: int) -> keras.Model:
    """LSTM layers over embeddings: tokens [B, T] -> [B, T, vocabulary]."""
    inputs = keras.Input((context,), dtype="int32")
    x = layers.Embedding(vocabulary, width)(inputs)
    for _ in range(depth):
        x = layers.LSTM(width, return_sequences=True)(x)
    return keras.Model(inputs, layers.Dense(vocabulary)(x))


class _Placed(layers.Layer):
    """Adds learnt positions, behind a learnt token where that is asked for."""

    def __init__(self, first: bool = False):
        super().__init__()
        self.first = first

    def build(self, shape: Any) -> None:
        self.token = self.add_weight(shape=(1, 1, shape[-1])) if self.first else None
        self.positions = self.add_weight(shape=(1, shape[1] + self.first, shape[-1]))

    def call(self, x: Any) -> Any:
        if self.token is not None:
            x = ops.concatenate([ops.broadcast_to(self.token, (ops.shape(x)[0], 1, x.shape[-1])), x], 1)
        return x + self.positions


class _Tied(layers.Layer):
    """Logits by the weights of an embedding."""

    def __init__(self, embedding: layers.Embedding):
        super().__init__()
        self.embedding = embedding

    def call(self, x: Any) -> Any:
        return ops.matmul(x, ops.transpose(self.embedding.embeddings))


def _conv_norm(x: Any, features: int, kernel: int, stride: int = 1) -> Any:
    x = layers.ZeroPadding2D(kernel // 2)(x) if kernel > 1 else x
    x = layers.Conv2D(features, kernel, stride, use_bias=False)(x)
    return layers.BatchNormalization(momentum=0.9, epsilon=1e-5)(x)


def _block(x: Any, width: int, heads: int, *, text: bool = False, epsilon: float = 1e-5) -> Any:
    y = layers.LayerNormalization(epsilon=epsilon)(x)
    x = layers.Add()([x, layers.MultiHeadAttention(heads, width // heads)(y, y, use_causal_mask=text)])
    y = layers.Dense(4 * width)(layers.LayerNormalization(epsilon=epsilon)(x))
    y = layers.Activation(lambda y: keras.activations.gelu(y, approximate=text))(y)
    return layers.Add()([x, layers.Dense(width)(y)])
