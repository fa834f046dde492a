"""Shakespeare, byte by byte, with an LSTM: tiny_shakespeare through TFDS, or any text files.

    python -m jaxtrain.main --config=configs/char_lstm.py

Hardware: 2 cores of an AMD EPYC, no accelerator, of which other work took seven eighths
Time: 43:23 beside that work, 11 minutes of which on a processor
Accuracy: validation loss 1.664 nats a character, test 1.725 (nanoGPT's 10 M parameters: 1.47 on validation, on a GPU)
Runs: 1, JAX 0.10.2, seed 0

Other text: `--config.data.dataset= --config.data.files='corpus/*.txt'`. Afterwards:
`python -m jaxtrain.sample --workdir=… --prompt='ROMEO:'`. Variant, not measured: `:cell=gru`.
"""

from jaxtrain.config import base_config


def get_config(cell: str = "lstm", width: int = 256, depth: int = 1, steps: int = 2000, smoke: bool = False):
    config = base_config()
    config.data = dict(name="text", dataset="tiny_shakespeare", window=128, stride=1)
    config.task = dict(name="language_modelling")
    config.model = dict(name="rnn", cell=cell, width=width, depth=depth, dropout=0.1)
    config.optimizer = dict(name="adamw", learning_rate=5e-3, weight_decay=0.01)
    config.schedule = dict(name="cosine", warmup="100st")
    config.clip_norm = 1.0
    config.batch_size = 32
    config.eval_batch_size = 128
    config.total = f"{steps}st"
    config.best, config.best_mode = "loss", "min"
    config.eval_every = "500st"
    config.evals = {"sample": dict(fn="sample", every="500st")}
    if smoke:
        config.synthetic = "if_absent"
        config.data.window = 16
        config.model.width = 16
        config.batch_size = 16
        config.eval_batch_size = 1024
        config.schedule.warmup = "2st"
        config.total = "20st"
        config.report_every = "5st"
        config.eval_every = "20st"
        config.evals = {"sample": dict(fn="sample", every="20st")}
    return config
