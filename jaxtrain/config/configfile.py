"""A config file: found, run, and asked for its config with the arguments of `FILE:a=1,b=x,flag`."""

import contextlib
import traceback
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jaxtrain.config import lookup
from jaxtrain.errors import UserError

PACKAGE = Path(__file__).resolve().parent.parent
SHIPPED = (PACKAGE.parent / "configs", PACKAGE / "configs")  # in a checkout, in an installed package


def read(spec: str) -> Any:
    """What `get_config` of "FILE[:ARGS]" returns.

    "FILE:width=64,smoke" calls get_config(width=64, smoke=True); the parameters' annotations, or else their
    defaults, say how a text is read. Raises UserError, one line, for a missing file, an error in it (with its
    line), an argument that `get_config` does not take.
    """
    path, arguments = split(spec)
    module = types.ModuleType(path.stem)
    module.__file__ = str(path)
    with _located(path):
        exec(compile(path.read_bytes(), str(path), "exec"), vars(module))
    get_config = getattr(module, "get_config", None)
    if not callable(get_config):
        raise UserError(f"{path} has no function get_config; it makes the config and returns it")
    legal = lookup.options(get_config)
    given = {name: _implied(name, legal, path) if text is None else text for name, text in arguments.items()}
    values = lookup.conformed(given, legal, str(path), "get_config", text=True)
    with _located(path):
        return get_config(**values)


def split(spec: str) -> tuple[Path, dict[str, str | None]]:
    """The file of "FILE[:ARGS]" and the arguments' texts, None where one stands without a value."""
    if Path(spec).is_file():  # a name with a colon
        return Path(spec), {}
    file, _, text = spec.partition(":")
    arguments: dict[str, str | None] = {}
    for part in _parts(text):
        name, equals, value = part.partition("=")
        arguments[name.strip()] = value.strip() if equals else None
    return _find(file), arguments


def _find(file: str) -> Path:
    """The file as given or, under `configs/`, the one that comes with jaxtrain."""
    path = Path(file)
    candidates = [path, *(folder.parent / path for folder in SHIPPED if path.parts[:1] == ("configs",))]
    for candidate in candidates:
        if candidate.is_file():
            return candidate
    if path.is_dir():
        raise UserError(f"config {file!r} is a folder; name a file in it")
    shipped = {f"configs/{each.name}" for folder in SHIPPED for each in folder.glob("*.py")}
    beside = {str(each) for each in path.parent.glob("*.py")} if path.parent.is_dir() else set()
    known = shipped | beside if len(beside) < 50 else shipped
    raise UserError(f"there is no config file {file!r}.{lookup.choices_hint(file, known)}")


def _parts(text: str) -> Iterator[str]:
    """Splits at the commas outside of brackets and quotes."""
    part, depth, quote = "", 0, ""
    for letter in text:
        if letter == "," and not depth and not quote:
            yield part
            part = ""
            continue
        part += letter
        if quote:
            quote = "" if letter == quote else quote
        elif letter in "'\"":
            quote = letter
        else:
            depth += (letter in "([{") - (letter in ")]}")
    if part.strip():
        yield part


def _implied(name: str, legal: lookup.Options, path: Path) -> str:
    """An argument without a value is a switch: true."""
    if name in legal and legal[name].annotation not in (bool, Any):
        raise UserError(f"{path} takes {name} with a value: write {name}=…")
    return "true"


@contextlib.contextmanager
def _located(path: Path) -> Iterator[None]:
    """Turns what a config file raises into one line that names the file and its line."""
    try:
        yield
    except Exception as error:
        lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)]
        if isinstance(error, SyntaxError) and error.filename == str(path):
            lines.append(error.lineno)
            error = SyntaxError(error.msg)
        place = f"{path} line {lines[-1]}" if lines else str(path)
        text = " ".join(str(error).split())
        what = text if isinstance(error, UserError) else f"{type(error).__name__}: {text}"
        raise UserError(f"{place}: {what}") from error
