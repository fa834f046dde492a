"""configs/gpt.py beside the same model in PyTorch: the same first weights, batches, optimizer, schedule and steps.

    python -m benchmarks.torch_char_lm [WORKDIR] [CONFIG]

Our side is a run of the config (configs/gpt.py) in WORKDIR, which a finished run there answers at once. Prints the
validation losses of both in nats a character, and the median time of a step.
"""

import statistics
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
import torch
from ml_collections import ConfigDict

from benchmarks.in_torch import GPT
from jaxtrain import train
from jaxtrain.config import load
from jaxtrain.errors import UserError
from jaxtrain.job import Job
from jaxtrain.sharding import path_string

EVERY = 50  # steps between two readings of the clock


def main(workdir: str | None = None, config: str = "configs/gpt.py") -> int:
    for line in compared(load(config), workdir):
        print(line, flush=True)
    return 0


def compared(config: ConfigDict, workdir: str | None = None) -> Iterator[str]:
    """The lines of a table. Raises UserError for a config that is not a GPT without dropout."""
    theirs, their_ms = in_torch(train.build(config))
    history = train.run(config, workdir).history
    ours = {int(line["step"]): line["eval/loss"] for line in history if "eval/loss" in line}
    yield "| step | validation loss, jaxtrain | PyTorch |"
    yield "|---|---|---|"
    for step in sorted(ours.keys() & theirs.keys()):
        yield f"| {step:,} | {ours[step]:.4f} | {theirs[step]:.4f} |"
    own_ms = statistics.median(line["time/step_ms"] for line in history if "time/step_ms" in line)
    yield f"| a step, median | {own_ms:.0f} ms | {their_ms:.0f} ms |"


def in_torch(job: Job) -> tuple[dict[int, float], float]:
    """Validation loss by step, where the config evaluates, and the milliseconds of a step."""
    model = _model(job)
    update = _updates(job, model)
    every = int(job.steps_in(job.config.eval_every))
    losses, milliseconds, began = {}, [], time.perf_counter()
    with job.batches() as batches:
        for step in range(job.total_steps):
            update(step, np.asarray(next(batches)["tokens"]))
            if (step + 1) % EVERY == 0:
                milliseconds.append(1e3 * (time.perf_counter() - began) / EVERY)
            if (step + 1) % every == 0 or step + 1 == job.total_steps:
                losses[step + 1] = _validation_loss(job, model)
                print(f"PyTorch: step {step + 1:,} validation loss {losses[step + 1]:.4f}", file=sys.stderr)
            if (step + 1) % EVERY == 0:
                began = time.perf_counter()
    return losses, statistics.median(milliseconds) if milliseconds else float("nan")


def _model(job: Job) -> GPT:
    """With the weights that our run begins with."""
    options: Any = job.config.model
    if options.name != "gpt" or options.get("dropout") or options.get("scan"):
        raise UserError(f"config.model is {dict(options)}; expected a gpt without dropout and scan, as configs/gpt.py")
    sizes = {name: options[name] for name in ("context", "width", "depth", "heads")}
    model = GPT(job.dataset.num_classes or 0, **sizes)
    weights = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(job.initial().params):
        *module, kind = path_string(path).split("/")
        array = torch.from_numpy(np.array(leaf))
        name = "bias" if kind == "bias" else "weight"
        weights[".".join([*module, name])] = array.T.contiguous() if kind == "kernel" else array
    model.load_state_dict(weights)
    return model


def _updates(job: Job, model: GPT) -> Callable[[int, np.ndarray], None]:
    """update(step, tokens [B, T + 1]): the config's AdamW, without decay of vectors, at the config's rate."""
    options: Any = job.config.optimizer
    assert job.parts is not None and options.name == "adamw"
    schedule = jax.jit(job.parts.optimizer.schedule)
    groups = [
        {"params": [p for p in model.parameters() if p.ndim > 1], "weight_decay": options.weight_decay},
        {"params": [p for p in model.parameters() if p.ndim < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, betas=(options.get("b1", 0.9), options.get("b2", 0.999)))

    def update(step: int, tokens: np.ndarray) -> None:
        for group in optimizer.param_groups:
            group["lr"] = float(schedule(np.int32(step)))
        optimizer.zero_grad()
        _loss(model, tokens).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), job.config.clip_norm)
        optimizer.step()

    return update


def _loss(model: GPT, tokens: np.ndarray) -> torch.Tensor:
    """The mean over all tokens asked for."""
    text = torch.from_numpy(tokens.astype(np.int64))
    return torch.nn.functional.cross_entropy(model(text[:, :-1]).flatten(0, 1), text[:, 1:].flatten())


def _validation_loss(job: Job, model: GPT) -> float:
    """Over all windows of the validation split, each once; they are of one length."""
    source, size = job.sources["validation"], job.config.eval_batch_size
    total = 0.0
    with torch.no_grad():
        for start in range(0, len(source), size):
            tokens = source.get(np.arange(start, min(start + size, len(source))))["tokens"]
            total += len(tokens) * _loss(model, tokens).item()
    return total / len(source)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
