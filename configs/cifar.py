"""CIFAR-10 through TFDS: a ResNet-18 (He et al. 2015, v1.5) of width 16 on 32×32 colour pictures of ten classes.

    python -m jaxtrain.main --config=configs/cifar.py

Hardware: 2 cores of an AMD EPYC, no accelerator, which ran other work beside it
Time: 35:14 for the 4 epochs (median 116 examples/s; some four minutes of standstill count)
Accuracy: test 73.11 %, validation 73.98 %, on pictures decoded from JPEG files, not the official ones
Runs: 1, JAX 0.10.2, seed 0

Variants, not measured: `:epochs=30`; `:width=64,epochs=60` on an accelerator; `:depth=20,width=0`
is the ResNet-20 of the paper's section 4.2.
"""

from jaxtrain.config import base_config

MEAN, STD = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)


def get_config(model: str = "resnet", depth: int = 18, width: int = 16, epochs: int = 4, smoke: bool = False):
    config = base_config()
    config.data = dict(name="tfds", dataset="cifar10")
    config.model = dict(name=model)
    if model == "resnet":
        config.model = dict(name="resnet", depth=depth, width=width, stem="cifar")
    config.augment = (dict(name="flip"), dict(name="crop", padding=4))
    config.preprocess = (dict(name="normalise", mean=MEAN, std=STD),)
    config.task = dict(name="classification", label_smoothing=0.1)
    config.optimizer = dict(name="sgd", learning_rate=0.2, momentum=0.9, nesterov=True, weight_decay=5e-4)
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
