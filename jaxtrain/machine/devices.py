"""Which devices a run computes on: what must be set before JAX starts its backend, and what JAX then found.

Device numbers are those of `nvidia-smi` on GPUs, and JAX's own elsewhere.
"""

import importlib.util
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from absl import logging as absl_logging
from ml_collections import ConfigDict

from jaxtrain.errors import UserError
from jaxtrain.machine import compilecache, distributed, hardware
from jaxtrain.machine.hardware import Gpu, cpu_count

if TYPE_CHECKING:  # `quiet` must run before JAX is imported
    import jax

__all__ = ["cpu_count", "prepare", "quiet", "select"]

Say = Callable[[str], None]

# The first is JAX's name for the share of GPU memory, the second its older one; JAX refuses both together.
MEMORY = ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION")
# Reductions in a fixed order, and no kernel chosen by a stopwatch: XLA's cache of such choices misses some
# (openxla/xla issue 37902), so a recompilation could round otherwise. The second is part of the first, and says so.
DETERMINISTIC = ("--xla_gpu_deterministic_ops=true", "--xla_gpu_autotune_level=0")
PLUGINS = {"gpu": ("jax_cuda12_plugin", "jax_cuda13_plugin"), "tpu": ("libtpu",)}
PLATFORMS = {"gpu": ("gpu", "cuda", "rocm"), "tpu": ("tpu",), "cpu": ("cpu",)}  # JAX's names for ours


def quiet() -> None:
    """Silences the start-up chatter of TensorFlow, absl and XLA. Only works before JAX is imported."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
    absl_logging.set_verbosity(absl_logging.ERROR)
    # That an accelerator is there and JAX does not see it is an error of ours, see `select`.
    logging.getLogger("jax._src.xla_bridge").setLevel(logging.ERROR)


def prepare(config: ConfigDict, *, say: Say = print) -> None:
    """Applies platform, devices, device_memory, deterministic and compile_cache of a config.

    JAX's backend is not started.

    Variables that the user set stay as they are. Where the backend is up already, as in a notebook, only what
    can still be changed is. Raises UserError, one line, for GPUs that are busy or not there, and for what
    would need another process.
    """
    quiet()
    if _started():
        _refuse_late(config)
    elif config.platform == "cpu":
        _computes_on_cpu()
    else:
        _refuse_hidden(config.platform)
        if _may_use("gpu"):
            _prepare_gpus(config, say)
            if config.deterministic and hardware.gpus():
                _prepare_determinism()
    compilecache.prepare(config.compile_cache, say)


def select(config: ConfigDict, *, root: str | Path = "/") -> list["jax.Device"]:
    """The devices of the run, in JAX's order. Starts JAX's backend.

    Raises UserError, one line, where the platform is another than the config asks for, where the machine
    shows an accelerator that JAX does not see (unless platform="cpu" says that this is meant), and where a
    device is missing.
    """
    import jax

    try:
        found = jax.devices()
    except RuntimeError as error:
        raise UserError(f"JAX does not start: {_line(error)}") from error
    kind = found[0].platform
    shown = hardware.accelerator(root) if kind == "cpu" and config.platform != "cpu" else ""
    if config.platform not in ("", kind):
        remedy = f"; {_remedy(config.platform)}" if shown == config.platform else ""
        raise UserError(f"config.platform is {config.platform!r}, but JAX runs on {kind} here{remedy}")
    if shown and _may_use(shown):
        raise UserError(
            f"this machine has a {shown.upper()} that JAX does not see; {_remedy(shown)}; "
            "or say that the CPU is meant: --config.platform=cpu"
        )
    if distributed.processes() == 1:
        return _chosen(config.devices, found)
    return _of_each_process(config.devices, found)


def _started() -> bool:
    from jax._src import xla_bridge  # there is no public way to ask without starting it

    return xla_bridge.backends_are_initialized()


def _computes_on_cpu() -> None:
    import jax

    jax.config.update("jax_platforms", "cpu")


def _may_use(kind: str) -> bool:
    """Whether neither JAX_PLATFORMS nor CUDA_VISIBLE_DEVICES hides the accelerator from JAX on purpose."""
    import jax

    options: Any = jax.config  # whose type does not list the options
    named = (options.jax_platforms or "").split(",")
    hidden = kind == "gpu" and os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1")
    return not hidden and (named == [""] or any(name in PLATFORMS[kind] for name in named))


def _refuse_hidden(kind: str) -> None:
    if kind and not _may_use(kind):
        names = [name for name in ("JAX_PLATFORMS", "CUDA_VISIBLE_DEVICES") if name in os.environ]
        settings = " and ".join(f"{name}={os.environ[name]}" for name in names)
        raise UserError(f"config.platform is {kind!r}, but {settings or 'jax_platforms'} hides it; unset that")


def _refuse_late(config: ConfigDict) -> None:
    """What a backend that is up no longer takes."""
    import jax

    kind = jax.default_backend()
    if config.platform not in ("", kind):
        raise UserError(
            f"config.platform is {config.platform!r}, but JAX has started on {kind}; start Python anew with "
            f"JAX_PLATFORMS={'cuda' if config.platform == 'gpu' else config.platform} in its environment"
        )
    share = str(config.device_memory)
    if kind == "gpu" and config.device_memory and share not in map(os.environ.get, MEMORY):
        raise UserError(
            f"config.device_memory is {share}, but JAX has started; start Python anew with "
            f"{MEMORY[0]}={share} in its environment"
        )
    if kind == "gpu" and config.deterministic and (lacking := _lacking_flags()):
        flags = " ".join(filter(None, [os.environ.get("XLA_FLAGS"), *lacking]))
        raise UserError(
            f"config.deterministic is True, but JAX has started without it; start Python anew with "
            f"XLA_FLAGS='{flags}' in its environment"
        )


def _prepare_determinism() -> None:
    """Adds to XLA_FLAGS what GPUs need so that a step gives the same bits every time. Refuses what contradicts it."""
    preset = os.environ.get("XLA_FLAGS", "")
    for flag in _lacking_flags():
        name = flag.partition("=")[0]
        if other := next((each for each in preset.split() if each.partition("=")[0] == name), ""):
            raise UserError(f"config.deterministic needs {flag}, but XLA_FLAGS says {other}; take one of them out")
        preset = f"{preset} {flag}".strip()
    os.environ["XLA_FLAGS"] = preset


def _lacking_flags() -> list[str]:
    return [flag for flag in DETERMINISTIC if flag not in os.environ.get("XLA_FLAGS", "").split()]


def _prepare_gpus(config: ConfigDict, say: Say) -> None:
    if config.device_memory:
        preset = [name for name in MEMORY if name in os.environ]
        os.environ.setdefault(preset[0] if preset else MEMORY[0], str(config.device_memory))
        if preset and os.environ[preset[0]] != str(config.device_memory):
            say(f"{preset[0]}={os.environ[preset[0]]} is set and stays; config.device_memory has no effect")
    if distributed.given_devices() or "CUDA_VISIBLE_DEVICES" in os.environ:
        return
    gpus = hardware.gpus()
    numbers = _free(config.devices, gpus) if gpus else []
    if numbers != [gpu.number for gpu in gpus]:
        os.environ["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"  # nvidia-smi's; CUDA's own puts the fastest first
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, numbers))


def _free(wanted: str | int | tuple[int, ...], gpus: list[Gpu]) -> list[int]:
    """The numbers of the GPUs to take: those listed, or else none that another process uses."""
    numbers = [gpu.number for gpu in gpus]
    if isinstance(wanted, tuple):
        return _listed(wanted, numbers)
    free = [gpu.number for gpu in gpus if not gpu.users]
    busy = "; ".join(f"{gpu} is in use by {', '.join(gpu.users)}" for gpu in gpus if gpu.users)
    if isinstance(wanted, str):  # "all"
        if busy:
            take = f"take the free ones with --config.devices={len(free)}, or " if free else ""
            listed = ",".join(map(str, numbers))
            raise UserError(f"{busy}; {take}list what to take all the same: --config.devices={listed}")
        return free
    if wanted > len(free):
        why = f": {busy}" if busy else ""
        raise UserError(f"config.devices is {wanted}, but {len(free)} of {len(gpus)} GPUs are free{why}")
    return free[:wanted]


def _chosen(wanted: str | int | tuple[int, ...], found: list["jax.Device"]) -> list["jax.Device"]:
    if isinstance(wanted, str):  # "all"
        return found
    if isinstance(wanted, int):
        if wanted > len(found):
            raise UserError(f"config.devices is {wanted}, but JAX finds {len(found)} ({found[0].platform})")
        return found[:wanted]
    numbers = _numbers(found)
    return [found[numbers.index(number)] for number in _listed(wanted, numbers)]


def _of_each_process(wanted: str | int | tuple[int, ...], found: list["jax.Device"]) -> list["jax.Device"]:
    """A number is that of each process; device numbers would be those of one host."""
    if isinstance(wanted, tuple):
        raise UserError(
            f"config.devices lists {', '.join(map(str, wanted))}, and the run has {distributed.processes()} processes; "
            "give 'all' or how many each takes, and choose among them with CUDA_VISIBLE_DEVICES on each host"
        )
    processes = sorted({device.process_index for device in found})
    own = [[device for device in found if device.process_index == process] for process in processes]
    return [device for devices in own for device in _chosen(wanted, devices)]


def _listed(wanted: tuple[int, ...], numbers: list[int]) -> list[int]:
    missing = [str(number) for number in wanted if number not in numbers]
    if missing:
        known = ", ".join(map(str, numbers))
        raise UserError(f"config.devices lists {', '.join(missing)}; the devices here are {known}")
    return list(wanted)


def _numbers(found: list["jax.Device"]) -> list[int]:
    """The number of each device: of GPUs the driver's, which CUDA_VISIBLE_DEVICES gives in JAX's order."""
    if found[0].platform != "gpu":
        return [device.id for device in found]
    names = [name.strip() for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()]
    if len(names) != len(found):
        return list(range(len(found)))
    if all(name.isdigit() for name in names):
        return [int(name) for name in names]
    numbers = {gpu.uuid: gpu.number for gpu in hardware.gpus()}
    return [numbers.get(name, place) for place, name in enumerate(names)]


def _remedy(kind: str) -> str:
    """The command that makes JAX see the accelerator, or why a plugin that is installed did not start."""
    import jax

    if any(importlib.util.find_spec(plugin) for plugin in PLUGINS[kind]):
        try:
            jax.devices(kind)
        except RuntimeError as error:
            return f"its plugin is installed, but did not start: {_line(error)}"
    extra = {"gpu": "cuda12", "tpu": "tpu"}[kind]
    return f"pip install -U 'jax[{extra}]=={jax.__version__}'"


def _line(error: BaseException) -> str:
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[0].rstrip(".;:")
