"""ImageNet from a folder of pictures, one folder a class, at 224×224: for machines with accelerators.

    python -m jaxtrain.main --config=configs/imagenet.py:data=/data/imagenet
    python -m jaxtrain.main --config=configs/imagenet.py:data=/data/imagenet,model=vit
    python -m jaxtrain.main --config=configs/imagenet.py:data=/data/imagenet,model=convnext

Hardware: not measured yet
Time: not measured yet
Accuracy: not measured yet
Runs: not measured yet

Nothing was measured: of this file only `:smoke` was run, and the whole step at full size traced, not computed. The
folder holds `train` and `val`, as ImageNet is usually unpacked. The papers report their last step on `val`, and so
does this: nothing is cut off for a test of its own (`--config.data.test=0.05` does). Recipes: Goyal et al., 2017, with
label smoothing and a cosine (resnet: 50); Beyer et al., "Better plain ViT baselines", 2022 (vit: S/16); Liu et al.,
2022 (convnext: T), at a quarter of its batch and rate.
"""

from jaxtrain.config import base_config

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # of ImageNet, as torchvision has them
MODELS = {
    "resnet": dict(name="resnet", depth=50, stem="imagenet"),
    "vit": dict(name="vit", size="S", patch=16, pool="mean", scan=True, remat="dots"),
    "convnext": dict(name="convnext", size="T", patch=4, stochastic_depth=0.1),
}
SMOKE = {
    "resnet": dict(name="resnet", depth=18, width=4, stem="imagenet"),
    "vit": dict(name="vit", patch=16, width=16, depth=2, heads=2, pool="mean", scan=True, remat="dots"),
    "convnext": dict(name="convnext", patch=8, width=8, blocks=(1, 1)),
}


def get_config(data: str = "", model: str = "resnet", smoke: bool = False):
    config = base_config()
    config.data = dict(name="folder", dir=data, size=224, test=0.0)
    config.model = MODELS[model]
    config.augment = (dict(name="flip"),)
    config.preprocess = (dict(name="normalise", mean=MEAN, std=STD),)
    config.task = dict(name="classification", label_smoothing=0.1, top_k=5)
    config.batch_size = 1024
    config.schedule = dict(name="cosine", warmup="5ep")
    config.total = "90ep"
    if model == "resnet":
        # Goyal's decay of 1e-4 is part of a gradient with momentum 0.9; outside of it, ten times as much does the same.
        config.optimizer = dict(name="sgd", learning_rate=0.4, momentum=0.9, nesterov=True, weight_decay=1e-3)
    elif model == "vit":
        # Their decay of 1e-4 is not multiplied by the rate, as ours is.
        config.optimizer = dict(name="adamw", learning_rate=1e-3, weight_decay=0.1)
        config.augment += (dict(name="mixup", alpha=0.2),)
        config.task = dict(name="classification", top_k=5)
        config.clip_norm = 1.0
    else:
        config.optimizer = dict(name="adamw", learning_rate=1e-3, weight_decay=0.05)
        config.augment += (dict(name="mixup", alpha=0.8),)
        config.schedule = dict(name="cosine", warmup="20ep")
        config.total = "300ep"
        config.ema = 0.9999
    if smoke:
        config.synthetic = "if_absent"
        config.data.size = 64
        config.data.test = 0.2
        config.model = SMOKE[model]
        config.schedule = dict(name="cosine", warmup="1st")
        config.batch_size = 16
        config.eval_batch_size = 64
        config.total = "6st"
        config.report_every = "3st"
        config.eval_every = "6st"
    return config
