"""One run in several processes: how they join, and how they speak to each other.

Process 0 is the one that writes and tells; the others compute. They speak through the key-value store of JAX's
coordination service, which needs no device and waits for no step.
"""

import json
import os
import sys
import time
from typing import Any, TypeVar

from ml_collections import ConfigDict

from jaxtrain.errors import HangError, UserError
from jaxtrain.machine import cluster, peers
from jaxtrain.machine.cluster import Place

Value = TypeVar("Value")

OVERTIME = 5  # seconds that JAX waits longer than it is told to
SLICE = 1_000  # ms of one wait for the store: between two, a signal's handler runs
LONG = 86_400_000  # ms: whoever is waited for comes, or fails and ends the wait

_asked: dict[str, int] = {}  # keys, by kind
_joined: list[Place] = []  # at most one, and none where a script has joined by itself


def processes() -> int:
    """How many the run has; 1 for a process alone. JAX's backend need not be up."""
    return int(_state().num_processes) if is_joined() else 1


def number() -> int:
    """Of this process among those of the run; 0 for a process alone."""
    return int(_state().process_id) if is_joined() else 0


def is_first() -> bool:
    """Whether this process writes and tells."""
    return number() == 0


def is_joined() -> bool:
    """Whether JAX knows of a run of several processes, however it came to."""
    return "jax" in sys.modules and _state().client is not None


def join(config: ConfigDict) -> None:
    """Joins the processes of the run, where the environment tells of several. Starts no backend.

    Where they are joined already, as by a script that called `jax.distributed.initialize`, nothing happens. Raises
    UserError where JAX's backend is up, or the environment contradicts itself; HangError where the others do not
    come within `config.join_minutes`.
    """
    if config.distributed == "off" or is_joined():
        return
    seconds = 60 * config.join_minutes
    place = cluster.find(os.environ, print, seconds, config.platform)
    if place is None:
        return
    if _backend_is_up():
        raise UserError(
            f"{place.told_by} tells of {place.processes} processes, but JAX has started as one; run python -m "
            "jaxtrain.main, call jax.distributed.initialize() first, or set config.distributed='off'"
        )
    _connect(place, seconds)


def from_first(value: Value) -> Value:
    """Process 0's `value`, in every process: JSON, lists for tuples. All of them must call it, in the same order."""
    if processes() == 1:
        return value
    client, key = _state().client, next_key("value")
    if is_first():
        client.key_value_set(key, json.dumps(value))
        return value
    while True:
        try:
            found: Value = json.loads(client.blocking_key_value_get(key, SLICE))
            return found
        except RuntimeError as error:
            if "DEADLINE_EXCEEDED" not in str(error):
                raise


def meet() -> None:
    """Returns when every process is here. All of them must call it, in the same order."""
    if processes() > 1:
        _state().client.wait_at_barrier(next_key("meeting"), LONG)


def one_end() -> peers.Ending:
    """A context manager: what is inside ends in every process or in none, and without an error only when all do."""
    client = store() if processes() > 1 else None
    return peers.Ending(client, next_key("end"), number(), processes(), meet)


def given_devices() -> bool:
    """Whether this process shares its host with others of the run, and was given GPUs of its own."""
    return "JAX_LOCAL_DEVICE_IDS" in os.environ or any(place.devices for place in _joined)


def say(text: str) -> None:
    """A line on the terminal: on stdout by process 0, on stderr and with its number by another."""
    print(f"{label()}{text}", file=sys.stdout if is_first() else sys.stderr)


def label() -> str:
    """ "process 1: ", where this process is not the one that tells; else ""."""
    return "" if is_first() else f"process {number()}: "


def store() -> Any:
    """The client of JAX's coordination service."""
    return _state().client


def _connect(place: Place, seconds: float) -> None:
    import jax

    # JAX's own handler, in C++, would take SIGTERM away from `stopping`.
    jax.config.update("jax_enable_preemption_service", False)
    who, check = f"process {place.number} of {place.processes}", _what_to_check(place)
    left = seconds
    if place.number:
        left -= _wait_for_first(place, who, seconds, check)
    where = f", process 0 at {place.address}," if place.number else f", at {place.address},"
    peers.on_abort(f"{who}{where} waited {seconds:g} s, and not all came; {check}")
    try:
        jax.distributed.initialize(
            place.address,
            place.processes,
            place.number,
            list(place.devices) or None,
            cluster_detection_method="deactivate",
            initialization_timeout=max(1, round(left - OVERTIME)),
            heartbeat_timeout_seconds=peers.SILENCE,
            shutdown_timeout_seconds=peers.SILENCE,
        )
        _joined.append(place)
    except RuntimeError as error:
        raise HangError(
            f"{who} cannot meet the others at {place.address}: {str(error).splitlines()[0]}; if the port is taken, "
            "set JAX_COORDINATOR_PORT, or the port in JAX_COORDINATOR_ADDRESS, to another"
        ) from error
    lost = f"as it does where another one died or was silent for {peers.SILENCE} s"
    peers.on_abort(f"process {place.number}: JAX aborted it (see above), {lost}; {peers.AGAIN}")


def _wait_for_first(place: Place, who: str, seconds: float, check: str) -> float:
    """Waits until something listens where process 0 should, and returns the seconds that took.

    JAX would wait as long, and then abort the process.
    """
    import socket

    host, _, port = str(place.address).rpartition(":")
    began, cause = time.monotonic(), "no answer"
    while (left := began + seconds - time.monotonic()) > 0:
        try:
            socket.create_connection((host.strip("[]"), int(port)), timeout=min(left, 10)).close()
            return time.monotonic() - began
        except OSError as error:
            cause = error.strerror or str(error) or type(error).__name__
        time.sleep(min(left, 0.5))
    raise HangError(f"{who} waited {seconds:g} s for process 0 at {place.address}: {cause}; {check}")


def _what_to_check(place: Place) -> str:
    proxies = [name for name in os.environ if name.lower() in ("http_proxy", "https_proxy", "all_proxy")]
    by_hand = ", that JAX_COORDINATOR_ADDRESS names the host of process 0" if cluster.BY_HAND[0] in os.environ else ""
    return (
        f"check that all {place.processes} were started{by_hand}, and that hosts reach each other there"
        + (f" ({proxies[0]} is set: unset it)" if proxies else "")
        + "; config.join_minutes waits longer"
    )


def next_key(kind: str) -> str:
    """Of the store: the same in every process, as all ask in the same order; never twice."""
    _asked[kind] = _asked.get(kind, 0) + 1
    return f"jaxtrain/{kind}/{_asked[kind]}"


def _state() -> Any:
    from jax._src import distributed  # jax.distributed itself does not give the store away

    return distributed.global_state


def _backend_is_up() -> bool:
    from jax._src import xla_bridge  # there is no public way to ask without starting it

    return xla_bridge.backends_are_initialized()
