"""jaxtrain: a training run is a function of (config, step).

    import jaxtrain
    config = jaxtrain.load_config("configs/digits.py")
    result = jaxtrain.train.run(config)
    result.predict(pictures)
    jaxtrain.load("runs/digits-1a2b3c4d").predict(pictures)  # later, where the run was given a workdir

Nothing is imported before it is asked for: `import jaxtrain` costs a millisecond, and JAX's flags can still be set.
"""

import importlib
from typing import Any

__version__ = "0.1.0"

_LAZY = {
    "load_config": ("jaxtrain.config", "load"),
    "base_config": ("jaxtrain.config", "base_config"),
    "curves": ("jaxtrain.reporting.curves", ""),
    "load": ("jaxtrain.result", "load"),
    "run": ("jaxtrain.train", "run"),
    "train": ("jaxtrain.train", ""),
}
__all__ = ["base_config", "curves", "load", "load_config", "run", "train"]


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'jaxtrain' has no attribute {name!r}")
    module, attribute = _LAZY[name]
    found = importlib.import_module(module)
    return getattr(found, attribute) if attribute else found


def __dir__() -> list[str]:
    return [*globals(), *_LAZY]
