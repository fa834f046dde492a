"""Where this process stands among those of its run, as the cluster's environment says. JAX's backend is not started.

Which variables count is JAX's own choice where JAX makes one; what it would take for several processes and is none
(a shell inside an allocation) is seen here, for joining what never comes only ends with a time-out.
"""

import dataclasses
import importlib.util
from collections.abc import Callable, Mapping

from jaxtrain.errors import UserError

BY_HAND = ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID")
SLURM = ("SLURM_JOB_ID", "SLURM_STEP_NODELIST", "SLURM_NTASKS", "SLURM_PROCID", "SLURM_LOCALID")
REMEDY = f"set {', '.join(BY_HAND)}, or --config.distributed=off for a single process"

Say = Callable[[str], None]


@dataclasses.dataclass(frozen=True)
class Place:
    """One process of several. What is None, JAX finds out itself."""

    told_by: str
    processes: int | None = None
    number: int | None = None  # of this one, from 0
    address: str | None = None  # host:port of process 0
    devices: tuple[int, ...] = ()  # GPUs of this host that are this process's; (): all it sees


def find(environ: Mapping[str, str], say: Say, seconds: float, platform: str = "") -> Place | None:
    """The place of this process, nothing in it None; None where it is alone.

    `say` gets a line where the environment half says otherwise. JAX may need `seconds` to find process 0; `platform`
    is `config.platform`. Raises UserError, one line, for variables that contradict each other.
    """
    if any(environ.get(name) for name in BY_HAND[1:]):
        found: Place | None = _by_hand(environ)
    else:
        found = _open_mpi(environ) or _slurm(environ, say) or _tpu(environ, platform) or _kubernetes(environ, say)
        if found is None and environ.get(BY_HAND[0]):
            raise UserError(f"{BY_HAND[0]} is set, but neither {BY_HAND[1]} nor {BY_HAND[2]}, and no cluster; {REMEDY}")
    if found is None or found.processes == 1:
        return None
    place = _completed(dataclasses.replace(found, address=_address(environ)), seconds, say)
    return place if place is not None and place.processes != 1 else None


def _address(environ: Mapping[str, str]) -> str | None:
    text = environ.get(BY_HAND[0], "")
    if text and not (text.rpartition(":")[0] and text.rpartition(":")[2].isdigit()):
        raise UserError(f"{BY_HAND[0]} is {text!r}, expected HOST:PORT of process 0, such as 10.0.0.1:1234")
    return text or None


def _by_hand(environ: Mapping[str, str]) -> Place:
    missing = [name for name in BY_HAND if not environ.get(name)]
    if missing and environ.get("JAX_NUM_PROCESSES") != "1":
        raise UserError(f"{' and '.join(missing)} missing in the environment; set all of {', '.join(BY_HAND)}, or none")
    processes, number = (_integer(environ, name, "0") for name in BY_HAND[1:])
    if not 0 <= number < processes:
        raise UserError(
            f"JAX_PROCESS_ID is {number} and JAX_NUM_PROCESSES is {processes}; processes are numbered from 0"
        )
    return Place("JAX_NUM_PROCESSES", processes, number)


def _open_mpi(environ: Mapping[str, str]) -> Place | None:
    if "OMPI_COMM_WORLD_SIZE" not in environ or "OMPI_COMM_WORLD_RANK" not in environ:
        return None
    beside = _integer(environ, "OMPI_COMM_WORLD_LOCAL_SIZE", "1")
    return Place(
        "Open MPI",
        _integer(environ, "OMPI_COMM_WORLD_SIZE"),
        _integer(environ, "OMPI_COMM_WORLD_RANK"),
        devices=_own_gpu(environ, "OMPI_COMM_WORLD_LOCAL_RANK") if beside > 1 else (),
    )


def _slurm(environ: Mapping[str, str], say: Say) -> Place | None:
    if "SLURM_JOB_ID" not in environ:
        return None
    tasks = _integer(environ, "SLURM_NTASKS", "1")
    missing = [name for name in SLURM if name not in environ]
    # A shell that `salloc` or `srun --pty` opened is a step of one task, in a job of several.
    step = 1 if missing else _integer(environ, "SLURM_STEP_NUM_TASKS", str(tasks))
    if step == 1:
        if tasks > 1:
            why = f"{', '.join(missing)} missing" if missing else "this step has one"
            say(f"a SLURM job of {tasks} tasks, but {why}: a single process; srun starts one for each task")
        return None
    nodes = _integer(environ, "SLURM_STEP_NUM_NODES", "1")
    return Place(
        "SLURM",
        step,
        _integer(environ, "SLURM_PROCID"),
        devices=_own_gpu(environ, "SLURM_LOCALID") if step > nodes else (),
    )


def _tpu(environ: Mapping[str, str], platform: str) -> Place | None:
    from jax._src.cloud_tpu_init import running_in_cloud_tpu_vm  # JAX's own test, made when it was imported

    if not running_in_cloud_tpu_vm or platform not in ("", "tpu"):
        return None
    hosts = environ.get("TPU_PROCESS_ADDRESSES") or environ.get("TPU_WORKER_HOSTNAMES") or ""
    several = "," in hosts or environ.get("MEGASCALE_NUM_SLICES", "1") != "1"
    in_a_file, asks_nobody = "TPU_PROCESS_ADDRESSES_PATH" in environ, "TPU_SKIP_MDS_QUERY" in environ
    return Place("Cloud TPU") if several or in_a_file or not (hosts or asks_nobody) else None


def _kubernetes(environ: Mapping[str, str], say: Say) -> Place | None:
    if "KUBERNETES_SERVICE_HOST" not in environ or "JOB_COMPLETION_INDEX" not in environ:
        return None
    if importlib.util.find_spec("kubernetes"):
        return Place("Kubernetes")
    say(f"a pod of an indexed Job: a single process; pip install 'jax[k8s]' joins them, or {REMEDY.partition(',')[0]}")
    return None


def _completed(place: Place, seconds: float, say: Say) -> Place | None:
    """With what JAX's own detection finds. A TPU that has no metadata server (in a hosted notebook) is alone."""
    if None in (place.address, place.processes, place.number):
        try:
            place = _detected(place, seconds)
        except Exception as error:  # requests', kubernetes' and JAX's own: any failure to look
            cause = " ".join(str(error).split())[:200] or type(error).__name__
            if place.told_by != "Cloud TPU":
                raise UserError(
                    f"{place.told_by} shows several processes, but not how they meet: {cause}; {REMEDY}"
                ) from error
            say(f"a TPU, but nothing tells of other hosts: a single process ({cause})")
            return None
    if place.processes != 1 and (place.address is None or place.number is None or place.processes is None):
        raise UserError(f"{place.told_by} shows several processes, but not where process 0 is; {REMEDY}")
    return place


def _detected(place: Place, seconds: float) -> Place:
    from jax._src.clusters import ClusterEnv  # what jax.distributed.initialize() asks; it cannot be asked by itself

    address, processes, number, _ = ClusterEnv.auto_detect_unset_distributed_params(
        place.address, place.processes, place.number, [], None, int(seconds)
    )
    return dataclasses.replace(place, address=address, processes=processes, number=number)


def _own_gpu(environ: Mapping[str, str], rank: str) -> tuple[int, ...]:
    """The GPU of a process that shares its host with others of the run; () where the cluster shows it only one."""
    visible = environ.get("CUDA_VISIBLE_DEVICES", "0,1").split(",")
    return (_integer(environ, rank),) if len(visible) > 1 and rank in environ else ()


def _integer(environ: Mapping[str, str], name: str, default: str = "") -> int:
    text = environ.get(name, default)
    try:
        return int(text)
    except ValueError:
        raise UserError(f"{name} is {text!r}, expected an integer; {REMEDY}") from None
