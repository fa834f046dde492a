"""What a GPU server is asked first, as JSON: python -m benchmarks.gpu [--toy] [--minutes=8] [--output=FILE] [PART …]

Needs no network and nothing beside the package; the pictures of the recipe are $CIFAR_JPEG (a .tar or .tar.xz of
train/<class>/*.jpg and test/…), else cifar10 below $TFDS_DATA_DIR, else synthetic, which the result says. `--toy` runs
every part at sizes for a CPU. A part that fails is written down as an error, and the exit code is 1; one that the time
does not reach says so. Each figure is the median of its rounds unless it says otherwise.
"""

import argparse
import contextlib
import dataclasses
import datetime
import importlib.util
import io
import json
import os
import statistics
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from benchmarks import loop
from jaxtrain import config as configs
from jaxtrain import flops, precision, train
from jaxtrain.data import sources
from jaxtrain.job import Job
from jaxtrain.loop.advance import plain_advance, zero_sums
from jaxtrain.loop.intake import open_intake
from jaxtrain.storage.checkpoint import Checkpoints

ROOT = Path(__file__).resolve().parent.parent
# Dense products of bfloat16, FLOP/s, by the makers' data sheets; the first name that is part of the device's counts.
PEAKS = {
    **{"H200": 989e12, "H100 PCIe": 756e12, "H100": 989e12, "GH200": 989e12, "B200": 2250e12, "A100": 312e12},
    **{"L40S": 362e12, "L4": 121e12, "A10G": 70e12, "RTX 4090": 165e12, "V100": 125e12, "T4": 65e12},
}
AIMS: dict[str, dict[str, tuple[str, float]]] = {  # on an H200
    "recipe": {"seconds": ("<=", 1.2)},
    "resnet50": {"images_per_second": (">=", 6000)},
    "vit_b16": {"images_per_second": (">=", 3750)},
    "gpt2_124m": {"tokens_per_second": (">=", 470_000)},
    "loop": {"tax": ("<=", 0.01)},
    "save": {"stall_ms": ("<=", 60)},
}
Found = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Sizes:
    """At full size, or for a CPU."""

    toy: bool

    def of(self, full: Any, toy: Any) -> Any:
        return toy if self.toy else full


def recipe(sizes: Sizes) -> Found:
    """configs/cifar.py: its steps on the device, and apart from them what comes before; the test accuracy."""
    began = time.perf_counter()
    dataset, pictures = _pictures(sizes.of(0, 512))
    loaded = time.perf_counter()
    config = configs.load("configs/cifar.py" + sizes.of("", ":smoke"), terminal="quiet")
    job = train.build(config, data=dataset)
    with precision.scope(job.policy):
        advance, zeros = plain_advance(job), zero_sums(job)
        with open_intake(job, 0) as intake:
            jax.block_until_ready(intake.take(1)[0])
        uploaded = time.perf_counter()
        _steps(job, advance, job.initial(), zeros, 1)  # its state is thrown away
        compiled = time.perf_counter()
        runs = []
        for seed in range(sizes.of(3, 1)):
            runs.append(_recipe_run(job, advance, zeros, seed))
    seconds, accuracies = zip(*runs, strict=True)
    return {
        "steps": job.total_steps,
        "seconds": statistics.median(seconds),
        "test_accuracy": statistics.mean(accuracies),
        "runs": len(runs),
        "pictures": pictures,
        "decode_seconds": loaded - began,
        "upload_seconds": uploaded - loaded,
        "compile_seconds": compiled - uploaded,
        "all_in_all_seconds": compiled - began + seconds[0],
        "resident": not job.streamed_for,
        "steps_per_dispatch": job.steps_per_dispatch,
    }


def _recipe_run(job: Job, advance: Any, zeros: Any, seed: int) -> tuple[float, float]:
    """Seconds of the steps, and the accuracy after them, of a seed: the program is one for all."""
    config = job.config.copy_and_resolve_references()
    config.seed = seed
    state = dataclasses.replace(job, config=config).initial()
    jax.block_until_ready(state)
    began = time.perf_counter()
    state = _steps(job, advance, state, zeros, job.total_steps)
    seconds = time.perf_counter() - began
    return seconds, job.evaluate("test", state)["test/accuracy"]


def _steps(job: Job, advance: Any, state: Any, sums: Any, steps: int) -> Any:
    """The state after so many steps, computed."""
    with open_intake(job, 0) as intake:
        while steps:
            data, count = intake.take(steps)
            state, sums = advance(state, sums, data, count)
            steps -= count
    return jax.block_until_ready(state)


def _pictures(limit: int) -> tuple[sources.Dataset | None, str]:
    """CIFAR-10, the first `limit` of each role (0: all), or None for what the config names; and which it is."""
    archive = os.environ.get("CIFAR_JPEG", "")
    if not archive:
        there = (Path(os.environ.get("TFDS_DATA_DIR", "/nowhere")) / "cifar10").is_dir()
        return None if there else _noise(limit or 50_000), "TFDS" if there else "synthetic"
    roles: dict[str, list[tuple[bytes, int]]] = {"train": [], "test": []}
    classes: dict[str, int] = {}
    with tarfile.open(archive) as tar:
        members = sorted((each for each in tar if each.isfile()), key=lambda each: each.name)
        for member in members:
            role, name = member.name.removeprefix("./").split("/")[:2]
            file = tar.extractfile(member)
            assert file is not None
            roles[role].append((file.read(), classes.setdefault(name, len(classes))))
    arrays = {
        role: _decoded(found[:: max(1, len(found) // limit)] if limit else found) for role, found in roles.items()
    }
    return sources.from_arrays(arrays["train"], test=arrays["test"], validation=0, num_classes=10), "JPEG files"


def _decoded(pictures: list[tuple[bytes, int]]) -> tuple[np.ndarray, np.ndarray]:
    from PIL import Image

    def one(data: tuple[bytes, int]) -> np.ndarray:
        return np.asarray(Image.open(io.BytesIO(data[0])).convert("RGB"))

    with ThreadPoolExecutor() as pool:
        images = np.stack(list(pool.map(one, pictures, chunksize=256)))
    return images, np.array([label for _, label in pictures], np.int32)


def _noise(count: int) -> sources.Dataset:
    random = np.random.default_rng(0)
    images = random.integers(0, 256, (count + count // 5, 32, 32, 3), dtype=np.uint8)
    return sources.from_arrays(images, np.arange(len(images)) % 10, validation=0, test=1 / 6)


def resnet50(sizes: Sizes) -> Found:
    """bfloat16, batch statistics, SGD with Nesterov's momentum; uint8 pictures of 224 gathered on the device."""
    model = dict(name="resnet", depth=sizes.of(50, 18), stem="imagenet", width=sizes.of(64, 4))
    return _pictures_per_second(model, sizes) | _torch_resnet50(sizes)


def vit_b16(sizes: Sizes) -> Found:
    """bfloat16, AdamW, the attention of `jax.nn.dot_product_attention`."""
    model = (
        dict(name="vit", size="B", patch=16)
        if not sizes.toy
        else dict(name="vit", patch=16, width=16, depth=2, heads=2)
    )
    return _pictures_per_second(model, sizes, optimizer=dict(name="adamw", learning_rate=1e-3, weight_decay=0.1))


SGD = dict(name="sgd", learning_rate=0.1, momentum=0.9, nesterov=True)


def _pictures_per_second(model: dict[str, Any], sizes: Sizes, optimizer: dict[str, Any] = SGD) -> Found:
    batch, side = sizes.of(256, 8), sizes.of(224, 64)
    random = np.random.default_rng(0)
    images = random.integers(0, 256, (2 * batch, side, side, 3), dtype=np.uint8)
    job = _job(model, batch, optimizer, dict(image=images, label=np.arange(2 * batch, dtype=np.int32) % 1000), 1000)
    seconds, found = _seconds_a_step(job, sizes)
    return {"images_per_second": batch / seconds, "batch": batch} | found


def gpt2_124m(sizes: Sizes) -> Found:
    """bfloat16, AdamW, 1,024 tokens a text."""
    length, vocabulary, batch = sizes.of(1024, 32), sizes.of(50257, 64), sizes.of(32, 4)
    model = dict(name="gpt", context=length, width=sizes.of(768, 16), depth=sizes.of(12, 2), heads=sizes.of(12, 2))
    tokens = np.random.default_rng(0).integers(0, vocabulary, (2 * batch, length + 1), dtype=np.int32)
    optimizer = dict(name="adamw", learning_rate=6e-4, weight_decay=0.1, b2=0.95)
    job = _job(model, batch, optimizer, dict(tokens=tokens), vocabulary, task=dict(name="language_modelling"))
    seconds, found = _seconds_a_step(job, sizes)
    return {"tokens_per_second": batch * length / seconds, "batch": batch} | found


def _job(
    model: dict[str, Any], batch: int, optimizer: dict[str, Any], arrays: Any, classes: int, **changes: Any
) -> Job:
    """A job on one device, its data resident."""
    config = configs.base_config()
    config.model, config.optimizer, config.batch_size, config.devices = model, optimizer, batch, 1
    config.data.resident = "yes"
    config.update(changes)
    return train.build(config, data=sources.from_arrays(arrays, validation=0, test=0, num_classes=classes))


def _seconds_a_step(job: Job, sizes: Sizes) -> tuple[float, Found]:
    """Median over rounds of steps of the run's own program; MFU counts the products of a step, recomputed ones not."""
    rounds, steps = sizes.of((5, 10), (2, 2))
    began = time.perf_counter()
    with precision.scope(job.policy):
        advance, zeros = plain_advance(job), zero_sums(job)
        state = _steps(job, advance, job.initial(), zeros, 1)
        compiled = time.perf_counter() - began
        seconds = []
        for _ in range(rounds):
            began = time.perf_counter()
            state = _steps(job, advance, state, zeros, steps)
            seconds.append((time.perf_counter() - began) / steps)
    second, work = statistics.median(seconds), 2 * flops.in_jaxpr(job.traced[0])
    found = {
        "step_ms": 1e3 * second,
        "first_step_seconds": compiled,
        "tflops": work / second / 1e12,
        "precision": job.policy.name,
        "parameters": sum(leaf.size for leaf in jax.tree.leaves(job.abstract.params)),
    }
    peak = _peak()
    return second, found | ({"mfu": work / second / peak} if peak else {})


def _peak() -> float | None:
    kind = jax.devices()[0].device_kind
    return next((peak for name, peak in PEAKS.items() if name in kind), None)


def _torch_resnet50(sizes: Sizes) -> Found:
    """The same step in PyTorch: eager, channels last, bfloat16 autocast. Only where it finds a GPU, or for a toy."""
    if not (importlib.util.find_spec("torch") and importlib.util.find_spec("torchvision")):
        return {"torch": "not installed"}
    if not sizes.toy and not _said(TORCH_HAS_GPU):
        return {"torch": "installed without a GPU"}
    code = TORCH_RESNET50.format(batch=sizes.of(256, 8), side=sizes.of(224, 64), steps=sizes.of(20, 2))
    return {"torch_images_per_second": float(_said(code))}


TORCH_HAS_GPU = "import torch; print(1 if torch.cuda.is_available() else '')"
# In a process of its own: JAX holds most of the GPU's memory in this one.
TORCH_RESNET50 = """
import time, torch, torchvision
device = "cuda" if torch.cuda.is_available() else "cpu"
net = torchvision.models.resnet50().to(device, memory_format=torch.channels_last)
optimizer = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9, nesterov=True)
x = torch.randint(0, 256, ({batch}, 3, {side}, {side}), dtype=torch.uint8, device=device)
x = x.contiguous(memory_format=torch.channels_last)
y = torch.arange({batch}, device=device) % 1000
def step():
    with torch.autocast(device, torch.bfloat16):
        loss = torch.nn.functional.cross_entropy(net(x / 255), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss
for _ in range(3):
    step().item()
began = time.perf_counter()
for _ in range({steps}):
    loss = step()
loss.item()
print({batch} * {steps} / (time.perf_counter() - began))
"""


def loop_tax(sizes: Sizes) -> Found:
    """The whole loop of a run against its bare step, at a step of some 5 ms."""
    batch, hidden = sizes.of((8192, (8192, 8192, 8192)), (64, (16,)))
    config, data = loop.config_of(hidden, batch), loop.data_of(batch)
    steps, ratios = sizes.of(200, 20), []
    for _ in range(sizes.of(5, 1)):
        bare, full = loop.bare(config, data, steps), loop.full(config, data, steps)
        ratios.append((full / bare, bare))
    ratio, bare = (statistics.median(each) for each in zip(*ratios, strict=True))
    return {"tax": ratio - 1, "bare_step_ms": 1e3 * bare}


def save(sizes: Sizes) -> Found:
    """How long a save of 1.5 GB in the background holds the loop up, and how long it takes."""
    megabytes, arrays = sizes.of(1500, 1), 60
    key = jax.random.key(0)
    state = {
        str(n): jax.random.normal(jax.random.fold_in(key, n), (megabytes * 250_000 // arrays,)) for n in range(arrays)
    }
    jax.block_until_ready(state)
    stalls, whole = [], []
    for _ in range(3):
        with tempfile.TemporaryDirectory() as folder, Checkpoints(Path(folder)) as checkpoints:
            began = time.perf_counter()
            checkpoints.save(1, state)
            stalls.append(time.perf_counter() - began)
            checkpoints.wait()
            whole.append(time.perf_counter() - began)
    return {
        "stall_ms": 1e3 * statistics.median(stalls),
        "save_seconds": statistics.median(whole),
        "megabytes": megabytes,
    }


# The command line, left as soon as the first step is done.
FIRST_STEP = """
import os, sys, jax
from jaxtrain import main, train
def leave(loop):
    jax.block_until_ready(loop.state)
    os._exit(0 if loop.step >= 1 else 1)
train.Loop.write_interval = leave
main.main(["--config=configs/digits.py", "--workdir={folder}/run", "--config.report_every=1st",
           "--config.compile_cache={folder}/cache", "--config.terminal=quiet"])
"""


def first_step(sizes: Sizes) -> Found:
    """From the start of the process to the first step of configs/digits.py, the compile cache empty, then full."""
    seconds = []
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(2):
            began = time.perf_counter()
            _said(FIRST_STEP.format(folder=folder), XLA_PYTHON_CLIENT_PREALLOCATE="false")
            seconds.append(time.perf_counter() - began)
    return dict(zip(("cold_seconds", "warm_seconds"), seconds, strict=True))


def _said(code: str, **environment: str) -> str:
    """What a process of its own prints."""
    found = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=os.environ | environment,
        timeout=300,
    )
    if found.returncode:
        raise RuntimeError(f"a process of its own ended with {found.returncode}: {found.stderr.strip()[-300:]}")
    return found.stdout.strip()


def several(sizes: Sizes) -> Found:
    """From one device to all: images/s of ResNet-50 with as many pictures a device; an all-reduce of 256 MB."""
    devices = jax.device_count()
    if devices == 1:
        return {"skipped": "one device"}
    model = dict(name="resnet", depth=sizes.of(50, 18), stem="imagenet", width=sizes.of(64, 4))
    batch, side = sizes.of(128, 4), sizes.of(224, 64)
    rates = {}
    for count in (1, devices):
        images = np.zeros((2 * batch * count, side, side, 3), np.uint8)
        arrays = dict(image=images, label=np.arange(len(images), dtype=np.int32) % 1000)
        job = _job(model, batch * count, SGD, arrays, 1000, devices=count)
        rates[count] = batch * count / _seconds_a_step(job, sizes)[0]
    return {
        "devices": devices,
        "images_per_second": rates[devices],
        "efficiency": rates[devices] / rates[1] / devices,
        "all_reduce_gb_per_second": _all_reduce(sizes.of(256, 1)),
    }


def _all_reduce(megabytes: int) -> float:
    """Bus bandwidth as NCCL counts it: 2 (n - 1) / n of the bytes, by the seconds."""
    mesh = jax.make_mesh((jax.device_count(),), ("data",))
    count = jax.device_count()
    each = NamedSharding(mesh, PartitionSpec("data"))
    x = jax.device_put(jnp.ones((count, megabytes * 250_000), jnp.float32), each)
    total = jax.jit(
        jax.shard_map(lambda x: jax.lax.psum(x, "data"), mesh=mesh, in_specs=each.spec, out_specs=PartitionSpec())
    )
    total(x).block_until_ready()
    seconds = []
    for _ in range(10):
        began = time.perf_counter()
        total(x).block_until_ready()
        seconds.append(time.perf_counter() - began)
    return 2 * (count - 1) / count * megabytes / 1e3 / statistics.median(seconds)


PARTS: dict[str, Callable[[Sizes], Found]] = {
    "recipe": recipe,
    "resnet50": resnet50,
    "vit_b16": vit_b16,
    "gpt2_124m": gpt2_124m,
    "loop": loop_tax,
    "save": save,
    "first_step": first_step,
    "several": several,
}


def measured(names: list[str], sizes: Sizes, seconds: float) -> Iterator[tuple[str, Found]]:
    """Each part with what it found, or why not."""
    until = time.monotonic() + seconds
    for name in names:
        if time.monotonic() > until:
            yield name, {"skipped": "out of time"}
            continue
        began = time.monotonic()
        try:
            found = PARTS[name](sizes)
        except Exception as error:  # the other parts are worth their minutes; the exit code tells
            found = {"error": f"{type(error).__name__}: {' '.join(str(error).split())[:500]}"}
        yield name, found | {"took_seconds": time.monotonic() - began}


def judged(name: str, found: Found) -> dict[str, str]:
    """Each aim of the part: "met" or "missed", with the aim."""
    verdicts = {}
    for key, (sign, aim) in AIMS.get(name, {}).items():
        if key in found:
            met = found[key] <= aim if sign == "<=" else found[key] >= aim
            verdicts[key] = f"{'met' if met else 'missed'} ({sign} {aim:g})"
    return verdicts


def main(argv: list[str] | None = None) -> int:
    """Prints a line a part on stderr, the whole as JSON on stdout or into a file, rewritten after each part."""
    parser = argparse.ArgumentParser(prog="benchmarks.gpu", description="; ".join(PARTS))
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)}; all where none is named")
    parser.add_argument("--toy", action="store_true", help="sizes for a CPU")
    parser.add_argument("--minutes", type=float, default=8.0, help="no part begins after them")
    parser.add_argument("--output", type=Path, help="a file for the JSON")
    options = parser.parse_args(argv)
    if unknown := [name for name in options.parts if name not in PARTS]:
        parser.error(f"there is no part {', '.join(unknown)}; known: {', '.join(PARTS)}")
    device = jax.devices()[0]
    result: Found = {
        "date": str(datetime.date.today()),
        "device": f"{jax.device_count()} × {device.device_kind}",
        "platform": device.platform,
        "jax": jax.__version__,
        "toy": options.toy,
    }
    parts: dict[str, Found] = {}
    for name, found in measured(options.parts or list(PARTS), Sizes(options.toy), 60 * options.minutes):
        if not options.toy and (verdicts := judged(name, found)):
            found["aims_on_an_h200"] = verdicts
        parts[name] = found
        result["parts"] = parts
        print(f"{name}: {json.dumps(found)}", file=sys.stderr)
        if options.output:
            options.output.write_text(json.dumps(result, indent=1) + "\n")
    if not options.output:
        print(json.dumps(result, indent=1))
    return 1 if any("error" in found for found in parts.values()) else 0


if __name__ == "__main__":
    with contextlib.suppress(BrokenPipeError):
        sys.exit(main())
