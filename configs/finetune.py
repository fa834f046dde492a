"""Fine-tuning on a folder of pictures: a pretrained ResNet-50 or ViT-B/16 learns classes of one's own.

    python -m jaxtrain.main --config=configs/finetune.py:data=photos,weights=resnet50.pth

Hardware: not measured yet
Time: not measured yet
Accuracy: not measured yet
Runs: not measured yet

`photos/class/picture.jpg`; weights as torchvision, timm or Hugging Face publish them, a file or hf://owner/name. The
head is new and learns at the full rate, the rest the slower the nearer to the picture (a factor of `decay` a layer:
Howard and Ruder, 2018; Bao et al., "BEiT", 2021); `frozen=yes` trains the head alone. No weights were at hand.
"""

from jaxtrain.config import base_config

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # of ImageNet, on which the weights were trained
HALF = (0.5, 0.5, 0.5)  # what most ViTs were trained with, timm's "augreg" and Google's among them


def get_config(
    data: str = "",
    weights: str = "",
    model: str = "resnet",
    size: int = 224,
    decay: float = 0.0,
    frozen: bool = False,
    smoke: bool = False,
):
    config = base_config()
    config.data = dict(name="folder", dir=data, size=size, smallest_crop=0.25, validation=0.1, test=0.2)
    vit = model == "vit"
    config.model = dict(name="vit", size="B", patch=16) if vit else dict(name="resnet", depth=50, stem="imagenet")
    config.init_from = weights
    config.init_head = "new" if weights else "same"
    config.augment = (dict(name="flip"),)
    config.preprocess = (dict(name="normalise", mean=HALF if vit else MEAN, std=HALF if vit else STD),)
    config.task = dict(name="classification", label_smoothing=0.1)
    config.optimizer = dict(name="adamw", learning_rate=1e-3, weight_decay=0.05)
    config.lr_rules = layerwise(vit, decay or (0.75 if vit else 0.5))
    config.clip_norm = 1.0
    config.schedule = dict(name="cosine", warmup="1ep")
    config.batch_size = 64
    config.total = "10ep"
    config.test = "best"
    if frozen:
        config.lr_rules, config.frozen = (), ("^(?!head/)",)
    if smoke:  # without data or weights, where none are given
        config.synthetic = "if_absent"
        config.data.size = 32
        config.model = dict(name="vit", patch=8, width=16, depth=12, heads=2) if vit else dict(name="resnet", width=4)
        if not vit:
            config.model.stem = "imagenet"
        config.init_from, config.init_head = "", "same"
        config.schedule = dict(name="cosine")
        config.batch_size = 16
        config.total = "6st"
        config.report_every = "3st"
        config.eval_every = "6st"
    return config


def layerwise(vit: bool, decay: float) -> tuple[tuple[str, float], ...]:
    """(path, multiple of the rate): 1 for the head, `decay` times less for each layer, or stage, below it."""
    if vit:
        blocks = tuple((rf"^blocks/{block}/", decay ** (12 - block)) for block in range(12))
        return (*blocks, (r"^(embed|cls$|positions$)", decay**13))
    return (*((rf"^stages/{stage}/", decay ** (4 - stage)) for stage in range(4)), (r"^stem/", decay**5))
