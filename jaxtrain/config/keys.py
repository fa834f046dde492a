"""Every legal key of a config: default, kind, meaning, type and range, in one literal table."""

import dataclasses
import re
from collections.abc import Callable
from typing import Any, Literal

from jaxtrain.config import lookup
from jaxtrain.config.durations import parse_duration
from jaxtrain.config.lookup import Kind
from jaxtrain.errors import UserError

KINDS = {
    "run": "change the result; refused in a used workdir",
    "place": "where and how it is computed; may change on resume",
    "view": "what is reported and kept, and when; may change on resume",
}


@dataclasses.dataclass(frozen=True)
class Rule:
    """What a value must satisfy beyond its type; `expected` ends the sentence "… is x, expected"."""

    expected: str
    holds: Callable[[Any], bool]


@dataclasses.dataclass(frozen=True)
class Key:
    """One key. `type` is an annotation, else the default's own type; `part` says what builder it names."""

    default: Any
    kind: Literal["run", "place", "view"]
    doc: str
    type: Any = None
    rule: Rule | None = None
    part: Kind | None = None

    @property
    def annotation(self) -> Any:
        """The type of a value, also where the default's own type says it."""
        return type(self.default) if self.type is None else self.type


def _is_duration(text: str) -> bool:
    try:
        return parse_duration(text).value > 0
    except UserError:
        return False


def _are_regexes(values: tuple[Any, ...]) -> bool:
    for value in values:
        try:
            re.compile(value if isinstance(value, str) else value[0])
        except re.error:
            return False
    return True


NOT_NEGATIVE = Rule("0 or more", lambda value: value >= 0)
MORE_THAN_0 = Rule("more than 0", lambda value: value > 0)
POSITIVE = Rule("1 or more", lambda value: value >= 1)
SHARE = Rule("0 or more and less than 1", lambda value: 0 <= value < 1)
DURATION = Rule("a duration such as '10ep', '5000st' or '1Mex'", _is_duration)
INTERVAL = Rule("a duration such as '1ep' or '50st', or '' for never", lambda text: not text or _is_duration(text))
REGEXES = Rule("valid regular expressions", _are_regexes)
SEED = Rule("0 to 2³¹ - 1", lambda value: 0 <= value < 2**31)
REPLICAS = Rule(
    "1 or more, or a grid such as (('seed', 4), ('optimizer.learning_rate', (.1, .2)))",
    lambda value: bool(value) if isinstance(value, tuple) else value >= 1,
)
DEVICES = Rule("'all', a number from 1 on, or device numbers without repeats", lambda value: _are_devices(value))


def _are_devices(value: str | int | tuple[int, ...]) -> bool:
    if isinstance(value, tuple):
        return len(value) == len(set(value)) > 0 and min(value) >= 0
    return value == "all" or (isinstance(value, int) and value >= 1)


PART = dict | str
PARTS = tuple[dict | str, ...]
GRID = tuple[tuple[str, int | tuple[int | float, ...]], ...]
PATH_NUMBERS = tuple[tuple[str, float], ...]

KEYS = {
    # What is learnt, from what, and how
    "seed": Key(0, "run", "root of every random stream and of the data order", rule=SEED),
    "replicas": Key(
        1,
        "run",
        "members in one program: of seeds seed, seed + 1, …; or a grid, (('seed', 4), ('optimizer.learning_rate', "
        "(.1, .2)))",
        int | GRID,
        REPLICAS,
    ),
    "total": Key("10ep", "run", "length of the run: epochs '10ep', steps '5000st' or examples '1Mex'", rule=DURATION),
    "batch_size": Key(128, "run", "examples a step, over all devices", rule=POSITIVE),
    "data": Key(
        dict(name="digits"),
        "run",
        "data set (its `dir` is place, and `resident`: whole on the device, where it fits)",
        PART,
        part=lookup.DATASET,
    ),
    "synthetic": Key(
        "no",
        "run",
        "random data of the same shapes: never, always, or where the real set is absent",
        Literal["no", "yes", "if_absent"],
    ),
    "drop_remainder": Key(
        False, "run", "whether an epoch leaves out the examples that fill no whole batch, others in each epoch"
    ),
    "augment": Key((), "run", "augmentations of training batches, in order", PARTS, part=lookup.AUGMENTATION),
    "preprocess": Key((), "run", "the same for every batch, after them", PARTS, part=lookup.AUGMENTATION),
    "task": Key(dict(name="classification"), "run", "losses and metrics", PART, part=lookup.TASK),
    "model": Key(dict(name="cnn"), "run", "network", PART, part=lookup.MODEL),
    "step": Key(dict(name="supervised"), "run", "the whole train step", PART, part=lookup.STEP),
    "init_from": Key(
        "", "run", "whose parameters to start from: workdir, checkpoint, .safetensors, .pt, index.json, hf://owner/name"
    ),
    "init_head": Key("same", "run", "from there too, or drawn anew (other classes)", Literal["same", "new"]),
    "init_positions": Key(
        "same", "run", "of a ViT: from there, or resampled to this size of pictures", Literal["same", "resample"]
    ),
    "initialise": Key(
        (),
        "run",
        "parameters to set at step 0, dict(name=…, paths=path regex), in order",
        PARTS,
        part=lookup.INITIALISER,
    ),
    # Optimisation
    "optimizer": Key(
        dict(name="adamw", learning_rate=1e-3),
        "run",
        "optax optimizer with its options; learning_rate and weight_decay (decoupled) with any",
        PART,
        part=lookup.OPTIMIZER,
    ),
    "param_groups": Key(
        (),
        "run",
        "other optimizers by path: dict(name=…, learning_rate=…, paths=path regex), with schedule=…, since='1ep', "
        "until='3ep' if need be",
        PARTS,
        part=lookup.PARAM_GROUP,
    ),
    "schedule": Key(
        dict(name="cosine"), "run", "of the learning rate; warmup='2ep' with any", PART, part=lookup.SCHEDULE
    ),
    "clip_norm": Key(0.0, "run", "largest global norm of the gradient; 0: no clipping", rule=NOT_NEGATIVE),
    "decay_rules": Key(
        (),
        "run",
        "(path regex, multiple of weight_decay); by default biases and norms are spared",
        PATH_NUMBERS,
        REGEXES,
    ),
    "lr_rules": Key((), "run", "(path regex, multiple of the learning rate)", PATH_NUMBERS, REGEXES),
    "frozen": Key((), "run", "path regexes of parameters that stay as they are", tuple[str, ...], REGEXES),
    "ema": Key(0.0, "run", "decay of an average of the parameters, used in evaluation; 0: none", rule=SHARE),
    "accumulate": Key(1, "run", "micro-batches a step; divides batch_size", rule=POSITIVE),
    "precision": Key(
        "auto",
        "run",
        "of computation; parameters stay float32 (float64 with float64)",
        Literal["auto", "float32", "tensorfloat32", "bfloat16", "float16", "float64"],
    ),
    "best": Key("accuracy", "run", "validation metric that chooses the best checkpoint"),
    "best_mode": Key("max", "run", "whether more of it is better", Literal["max", "min"]),
    "patience": Key(0, "run", "evaluations without a better one before stopping; 0: never", rule=NOT_NEGATIVE),
    # Place
    "platform": Key("", "place", "'cpu', 'gpu' or 'tpu'; '': what JAX finds", Literal["", "cpu", "gpu", "tpu"]),
    "devices": Key(
        "all",
        "place",
        "'all', how many, or which, as (0, 2); GPUs in use are only taken when listed",
        Literal["all"] | int | tuple[int, ...],
        DEVICES,
    ),
    "device_memory": Key(0.0, "place", "share of GPU memory to take; 0: JAX's default", rule=SHARE),
    "deterministic": Key(
        False,
        "place",
        "GPUs: only kernels that give the same bits every time; costs speed, `python -m jaxtrain.verify` says how much",
    ),
    "distributed": Key(
        "auto",
        "place",
        "join the processes of the run: where SLURM, Open MPI, a TPU pod, Kubernetes or JAX_COORDINATOR_ADDRESS, "
        "JAX_NUM_PROCESSES and JAX_PROCESS_ID tell of several, or never",
        Literal["auto", "off"],
    ),
    "join_minutes": Key(5.0, "place", "to wait for the other processes at the start", rule=MORE_THAN_0),
    "mesh": Key((("data", -1),), "place", "(axis, size) of the devices; -1: the rest", tuple[tuple[str, int], ...]),
    "sharding_rules": Key(
        (),
        "place",
        "(path regex, axis or None for each dimension) of parameters",
        tuple[tuple[str, tuple[str | None, ...]], ...],
        REGEXES,
    ),
    "threads": Key(0, "place", "of the data loader; 0: what affinity and cgroup allow", rule=NOT_NEGATIVE),
    "prefetch": Key(2, "place", "batches prepared ahead", rule=NOT_NEGATIVE),
    "loader": Key("auto", "place", "how the host reads", Literal["auto", "threads", "tf.data"]),
    "steps_per_dispatch": Key(
        "auto",
        "place",
        "handed to the device at once: 1 is a program of one step, more a compiled loop of at most so many",
        Literal["auto"] | int,
        Rule("'auto' or 1 or more", lambda value: value == "auto" or value >= 1),
    ),
    "compile_cache": Key("auto", "place", "folder of compiled programs; 'auto': in the user's cache, '': none"),
    "eval_batch_size": Key(0, "place", "0: batch_size", rule=NOT_NEGATIVE),
    # What a healthy run never meets: no part of the result, so that it may change after a fault
    "on_nonfinite": Key(
        "stop",
        "place",
        "at a loss or gradient that is NaN or infinite: stop the run, skip the update, or roll back to the last "
        "checkpoint and leave out the batches from there to the fault",
        Literal["stop", "skip", "rollback"],
    ),
    "max_skipped": Key(100, "place", "updates skipped before the run stops", rule=NOT_NEGATIVE),
    "max_rollbacks": Key(10, "place", "rollbacks before the run stops", rule=NOT_NEGATIVE),
    # View
    "report_every": Key("50st", "view", "between two lines of metrics", rule=DURATION),
    "eval_every": Key("1ep", "view", "between two evaluations on validation; '': never", rule=INTERVAL),
    "test_time": Key(
        dict(name="none"),
        "view",
        "views of a picture over which evaluation and prediction average the outputs",
        PART,
        part=lookup.TEST_TIME,
    ),
    "evals": Key(
        {},
        "view",
        "more evaluations: name -> dict(source=split or data set, task=…, test_time=… or fn='pkg.mod:f', every=…)",
        dict,
    ),
    "test": Key(
        "last",
        "view",
        "which weights the test split judges once, at the end: the last, the best on validation, or none",
        Literal["last", "best", "no"],
    ),
    "checkpoint.every": Key("", "view", "between two checkpoints; '': only by minutes", rule=INTERVAL),
    "checkpoint.minutes": Key(10.0, "view", "between two checkpoints; 0: not by minutes", rule=NOT_NEGATIVE),
    "checkpoint.keep": Key(2, "view", "newest checkpoints to keep; the best is kept besides", rule=POSITIVE),
    "checkpoint.keep_every": Key("", "view", "checkpoints to keep for good, as '10ep'", rule=INTERVAL),
    "max_minutes": Key(0.0, "view", "ends the run cleanly; 0: no limit", rule=NOT_NEGATIVE),
    "hang_minutes": Key(
        30.0,
        "view",
        "without a step, evaluation batch or save that ends before the run does, with exit code 4; 0: no limit",
        rule=NOT_NEGATIVE,
    ),
    "tensorboard": Key(True, "view", "write event files"),
    "terminal": Key("auto", "view", "display", Literal["auto", "live", "plain", "quiet"]),
}

GROUPS = ("checkpoint",)  # keys that hold keys


def members(group: str) -> list[str]:
    """The keys of a group, without its name."""
    return [key.removeprefix(f"{group}.") for key in KEYS if key.startswith(f"{group}.")]


def top_level() -> list[str]:
    """The names one can write after `config.`."""
    return list(dict.fromkeys(key.partition(".")[0] for key in KEYS))


def unknown(key: str) -> str:
    """The error line for a key that no config has."""
    leaves = {option: f"optimizer.{option}" for option in lookup.OPTIMIZER.own}
    leaves |= {key.rpartition(".")[2]: key for key in KEYS if "." in key}
    group = key.partition(".")[0]
    near = lookup.nearest(key, [*KEYS, *leaves]) or lookup.nearest(group, top_level())
    known = members(group) if group in GROUPS else top_level()
    hint = f" Did you mean {'config.' + leaves.get(near, near)!r}?" if near else ""
    return f"there is no config.{key}.{hint} Known: {', '.join(known)}."
