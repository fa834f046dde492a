"""Fashion-MNIST through TFDS: 28×28 grey pictures of ten kinds of clothes, and a small network for a CPU.

    python -m jaxtrain.main --config=configs/fashion_mnist.py

Hardware: 2 cores of an Intel Xeon, no accelerator
Time: 2:46 from start to exit (1,174 examples/s)
Accuracy: test 89.07 %, validation 90.10 %
Runs: 1, JAX 0.10.2, seed 0

Variants, not measured: `:width=32,epochs=20`, `:model=resnet,epochs=20`.
"""

from jaxtrain.config import base_config


def get_config(model: str = "cnn", width: int = 16, epochs: int = 3, smoke: bool = False):
    config = base_config()
    config.data = dict(name="tfds", dataset="fashion_mnist")
    config.model = dict(name=model, width=width)
    config.augment = (dict(name="flip"), dict(name="crop", padding=2))
    config.preprocess = (dict(name="normalise", mean=(0.2860,), std=(0.3530,)),)
    config.optimizer = dict(name="adamw", learning_rate=2e-3, weight_decay=0.05)
    config.schedule = dict(name="one_cycle")
    config.batch_size = 128
    config.eval_batch_size = 500
    config.total = f"{epochs}ep"
    if smoke:
        config.synthetic = "if_absent"
        config.data.limit = 512
        config.model = dict(name="cnn", width=8)
        config.batch_size = 32
        config.eval_batch_size = 128
        config.total = "10st"
        config.report_every = "5st"
        config.eval_every = "10st"
    return config
