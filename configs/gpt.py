"""Shakespeare, byte by byte, with a small GPT: tiny_shakespeare through TFDS, or any text files.

    python -m jaxtrain.main --config=configs/gpt.py

Hardware: 2 cores of an Intel Xeon, no accelerator
Time: 7:56 from start to exit (72 examples/s)
Accuracy: validation loss 1.653 nats a character, test 1.735 (nanoGPT's 10 M parameters: 1.47 on validation, on a GPU)
Runs: 1, JAX 0.10.2, seed 0

The same model in PyTorch, from the same weights on the same batches, reaches 1.655 (`benchmarks/torch_char_lm.py`).
`:style=llama` has RMSNorm, rotary positions, SwiGLU and half as many key heads. nanoGPT's own size, for a GPU:
`:width=384,depth=6,heads=6,window=256,batch_size=64,steps=5000,dropout=0.2`. Neither is measured. Other text:
`--config.data.dataset= --config.data.files='corpus/*.txt'`; with a tokenizer, `--config.data.tokenizer=tokenizer.json`.
Afterwards: `python -m jaxtrain.sample --workdir=… --prompt='ROMEO:'`.
"""

from jaxtrain.config import base_config


def get_config(
    style: str = "gpt",
    width: int = 128,
    depth: int = 4,
    heads: int = 4,
    window: int = 128,
    batch_size: int = 16,
    steps: int = 2000,
    dropout: float = 0.0,
    smoke: bool = False,
):
    config = base_config()
    config.data = dict(name="text", dataset="tiny_shakespeare", window=window, stride=1)
    config.task = dict(name="language_modelling")
    config.model = dict(name=style, width=width, depth=depth, heads=heads, dropout=dropout)
    config.model.update(dict(kv_heads=heads // 2, tied=True) if style == "llama" else dict(context=window))
    config.optimizer = dict(name="adamw", learning_rate=2e-3, weight_decay=0.1, b2=0.99)
    config.schedule = dict(name="cosine", warmup="100st")
    config.clip_norm = 1.0
    config.batch_size = batch_size
    config.eval_batch_size = 128
    config.total = f"{steps}st"
    config.best, config.best_mode = "loss", "min"
    config.eval_every = "500st"
    config.evals = {"sample": dict(fn="sample", every="500st")}
    if smoke:
        config.synthetic = "if_absent"
        config.data.window = 16
        config.model.update(dict(width=16, depth=2, heads=2, scan=True))
        config.batch_size = 16
        config.eval_batch_size = 1024
        config.schedule.warmup = "2st"
        config.total = "20st"
        config.report_every = "5st"
        config.eval_every = "20st"
        config.evals = {"sample": dict(fn="sample", every="20st")}
    return config
