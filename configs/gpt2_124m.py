"""GPT-2, 124 M parameters (Radford et al., 2019), on token files such as nanoGPT's OpenWebText. For accelerators.

    python -m jaxtrain.main --config=configs/gpt2_124m.py --config.data.dir=DIR

Hardware: not measured yet; meant for 8 accelerators of 80 GB
Time: not measured yet; 600,000 steps of 491,520 tokens
Accuracy: not measured yet; nanoGPT gives a validation loss of 2.85 nats a token on OpenWebText after as many steps
Runs: 0 at this size; its shapes and its 124,439,808 parameters are tested without computing them

DIR holds train.bin and val.bin, GPT-2's tokens as uint16. `:style=llama` is the same size in the style of Llama. A
batch that does not fit: `--config.accumulate=8`, or `--config.model.remat=dots`.
"""

from jaxtrain.config import base_config


def get_config(style: str = "gpt", batch_size: int = 480, steps: int = 600_000, smoke: bool = False):
    config = base_config()
    config.data = dict(name="tokens", dir="openwebtext", vocabulary=50257, window=1024, stride=1024)
    config.task = dict(name="language_modelling")
    config.model = dict(name=style, width=768, depth=12, heads=12, scan=True)
    config.model.update(dict(kv_heads=12, tied=True) if style == "llama" else dict(context=1024))
    config.optimizer = dict(name="adamw", learning_rate=6e-4, weight_decay=0.1, b2=0.95)
    config.schedule = dict(name="cosine", warmup="2000st")
    config.clip_norm = 1.0
    config.batch_size = batch_size
    config.total = f"{steps}st"
    config.best, config.best_mode = "loss", "min"
    config.report_every = "10st"
    config.eval_every = "1000st"
    if smoke:
        config.synthetic = "if_absent"
        config.data.update(dict(vocabulary=64, window=16, stride=0))
        config.model.update(dict(width=16, depth=2, heads=2, remat="dots"))
        if style == "llama":
            config.model.kv_heads = 2
        config.batch_size = 16
        config.eval_batch_size = 128
        config.schedule.warmup = "2st"
        config.total = "10st"
        config.report_every = "5st"
        config.eval_every = "10st"
    return config
