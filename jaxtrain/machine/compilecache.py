"""JAX's cache of compiled programs: where it lies, and that small programs are kept too."""

import hashlib
import os
import platform
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from jaxtrain.machine import hardware


def prepare(wanted: str, say: Callable[[str], None]) -> None:
    """Turns the cache on in the folder `wanted`: "auto" in the user's cache, "" not at all.

    A folder that cannot be written is told with `say`, and the run does without. JAX_COMPILATION_CACHE_DIR,
    where the user set it, stands in for "auto".
    """
    import jax
    from jax.experimental.compilation_cache import compilation_cache

    folder = _folder(wanted, say) if wanted else None
    # By default JAX keeps only what took a second to compile.
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    options: Any = jax.config  # whose type does not list the options
    if options.jax_compilation_cache_dir != folder:
        jax.config.update("jax_compilation_cache_dir", folder)
        compilation_cache.reset_cache()  # JAX looks at the folder once a process


def _folder(wanted: str, say: Callable[[str], None]) -> str | None:
    preset = os.environ.get("JAX_COMPILATION_CACHE_DIR")
    if wanted == "auto" and preset:
        return preset
    try:
        folder = _own_folder() if wanted == "auto" else Path(wanted).expanduser().absolute()
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):  # permissions do not say it all: a mount may be read-only
            return str(folder)
    except (OSError, RuntimeError) as error:  # RuntimeError: no home directory
        say(f"no compile cache, so every start compiles anew: {error}; --config.compile_cache=FOLDER helps")
        return None


def _own_folder() -> Path:
    """In the user's cache, by kind of CPU: machines that share a home may not run each other's programs."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    features = hashlib.sha256(hardware.cpu_key().encode()).hexdigest()[:8]
    return Path(base) / "jaxtrain" / "xla" / f"{platform.machine()}-{features}"
