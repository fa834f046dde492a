"""Fashion-MNIST or CIFAR-10 through TFDS: a small vision transformer (Dosovitskiy et al., 2020) on patches of 4×4.

    python -m jaxtrain.main --config=configs/vit.py
    python -m jaxtrain.main --config=configs/vit.py:data=cifar10

Hardware: 2 cores of an Intel Xeon, no accelerator
Time: 12:39 from start to exit (231 examples/s)
Accuracy: test 79.48 %, validation 79.57 % (Fashion-MNIST)
Runs: 1, JAX 0.10.2, seed 0

Three epochs are what a CPU bears, and few for a transformer, which learns from the data what a convolution is built
with. Not measured: CIFAR-10, and larger ones: `:width=192,depth=12,heads=3,epochs=200` is ViT-Ti on small patches.
"""

from typing import Any

from jaxtrain.config import base_config

# Mean and standard deviation of the training pixels, channel by channel.
NORMALISE: dict[str, Any] = {
    "cifar10": dict(mean=(0.4914, 0.4822, 0.4465), std=(0.2470, 0.2435, 0.2616)),
    "fashion_mnist": dict(mean=(0.2860,), std=(0.3530,)),
}


def get_config(
    data: str = "fashion_mnist",
    width: int = 96,
    depth: int = 6,
    heads: int = 3,
    epochs: int = 3,
    smoke: bool = False,
):
    config = base_config()
    config.data = dict(name="tfds", dataset=data)
    # Mean pooling, as in Beyer et al., "Better plain ViT baselines for ImageNet-1k", 2022.
    config.model = dict(name="vit", patch=4, width=width, depth=depth, heads=heads, pool="mean")
    config.augment = (dict(name="flip"), dict(name="crop", padding=2))
    config.preprocess = (dict(name="normalise", **NORMALISE[data]),)
    config.task = dict(name="classification", label_smoothing=0.1)
    config.optimizer = dict(name="adamw", learning_rate=1e-3, b2=0.99, weight_decay=0.05)
    config.schedule = dict(name="cosine", warmup="100st")
    config.clip_norm = 1.0
    config.batch_size = 128
    config.eval_batch_size = 500
    config.total = f"{epochs}ep"
    if smoke:
        config.synthetic = "if_absent"
        config.data.limit = 512
        config.model = dict(name="vit", patch=4, width=16, depth=2, heads=2, pool="mean", scan=True)
        config.schedule = dict(name="cosine", warmup="2st")
        config.batch_size = 32
        config.eval_batch_size = 128
        config.total = "10st"
        config.report_every = "5st"
        config.eval_every = "10st"
    return config
