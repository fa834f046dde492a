"""The command line: flags → config → `train.run`. Nothing else is decided here.

What takes time to import is imported where it is needed: `--help` does not wait for it, and a signal finds `command`.
"""

import gc
import importlib
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, NoReturn

from jaxtrain import exits
from jaxtrain.errors import JaxtrainError

if TYPE_CHECKING:
    from jaxtrain.config import Config


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command line. Returns the exit code: 0 done, 2 a user's mistake, others as `errors` says."""
    return guarded(run, argv)


def guarded(command: Callable[[Sequence[str]], int], argv: Sequence[str] | None = None) -> int:
    """Runs a command in the user's folder, its mistakes told in one line. Returns the exit code."""
    from jaxtrain.machine import devices

    devices.quiet()
    if os.getcwd() not in sys.path:  # a user's own "my_lab.nets:unet", also from the installed command
        sys.path.insert(0, os.getcwd())
    try:
        return command(sys.argv[1:] if argv is None else argv)
    except JaxtrainError as error:
        complain(error)
        return error.exit_code
    except KeyboardInterrupt:
        return 130


def run(argv: Sequence[str]) -> int:
    """The same, with mistakes raised."""
    from jaxtrain import commandline
    from jaxtrain import config as configs
    from jaxtrain.machine import devices

    flags, overrides = commandline.parse(argv)
    config = configs.load(flags.config, overrides)
    if flags.print:
        devices.prepare(config)
        print(_imported("describe").describe(configs.checked(config)))
        return 0
    folder = flags.workdir or default_workdir(flags.config, config)
    train = _imported("train")
    if not gc.isenabled():  # in `command`
        gc.freeze()
        gc.enable()
    result = train.run(config, folder, mode=flags.mode, profile=flags.profile, debug=flags.debug)
    return int(result.exit_code)


def default_workdir(spec: str, config: "Config") -> Path:
    """runs/<name of the config file>-<hash of the run keys>: another run gets another folder."""
    from jaxtrain import config as configs
    from jaxtrain.config import configfile

    return Path("runs") / f"{configfile.split(spec)[0].stem}-{configs.run_hash(config)}"


def complain(error: JaxtrainError) -> None:
    """One line on stderr, red on a terminal."""
    from jaxtrain.machine import distributed

    line = f"jaxtrain: {distributed.label()}{' '.join(str(error).split())}"
    red = sys.stderr.isatty() and "NO_COLOR" not in os.environ
    print(f"\033[31m{line}\033[0m" if red else line, file=sys.stderr)


def _imported(name: str) -> ModuleType:
    """A module of the package that needs JAX."""
    return importlib.import_module(f"jaxtrain.{name}")


def command() -> NoReturn:
    """The process as a whole: where no run looks after them yet, signals end it at once and without a traceback."""
    exits.on_signal()
    gc.disable()  # until all is imported, which stays to the end: a tenth of the start would go into looking through it
    code = main()
    if code in exits.CODES.values():
        exits.soon(code)
    sys.exit(code)


if __name__ == "__main__":
    command()
