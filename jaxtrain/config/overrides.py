"""Values set from outside the file: `--config.model.width=64`, or a mapping in a notebook.

A part's option may be set whether or not the file wrote it; its builder's signature says what is legal and of
which type. Naming another builder drops the options of the old one, and says so.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from ml_collections import ConfigDict

from jaxtrain.config import keys, lookup, schema
from jaxtrain.config.keys import GROUPS, KEYS
from jaxtrain.errors import UserError

Say = Callable[[str], None]
Overrides = Mapping[str, Any] | Sequence[str]


def apply(config: ConfigDict, overrides: Overrides, say: Say) -> None:
    """Sets each override in `config`, names of parts before their options; `say` gets a line for what that
    drops.

    `overrides` are texts "model.width=64", or a mapping of keys ("model.width", or "model" with a dict) to
    values. Raises UserError, one line, for an unknown key or option, or a value of another type.
    """
    items = list(_items(overrides))
    for path, value, text in sorted(items, key=lambda item: not _names_part(item[0])):
        try:
            _set(config, path, value, text, say)
        except UserError as error:
            shown = f"--config.{path}={value}" if text else f"config.{path}={value!r}"
            raise UserError(f"{shown}: {error}") from None


def _items(overrides: Overrides) -> Iterator[tuple[str, Any, bool]]:
    """(key, value, whether the value is a text to be read) of each override."""
    if isinstance(overrides, Mapping):
        for key, value in overrides.items():
            nested = key in GROUPS or (key in KEYS and isinstance(KEYS[key].default, dict))
            if nested and isinstance(value, (Mapping, ConfigDict)):
                yield from ((f"{key}.{name}", value[name], False) for name in value)
            else:
                yield key, value, False
        return
    for each in overrides:
        path, equals, text = each.partition("=")
        if not equals:
            raise UserError(f"{each!r} sets nothing; write key=value")
        yield path, text, True


def _names_part(path: str) -> bool:
    return _is_part(path) or (path.endswith(".name") and _is_part(path.removesuffix(".name")))


def _is_part(key: str) -> bool:
    return key in KEYS and KEYS[key].part is not None and isinstance(KEYS[key].default, dict)


def _set(config: ConfigDict, path: str, value: Any, text: bool, say: Say) -> None:
    key, _, rest = path.partition(".")
    if _names_part(path):
        _set_part(config, key, _read(path, value, str if rest else KEYS[key].annotation, text), say)
    elif path in KEYS:
        _set_key(config, path, _read(path, value, KEYS[path].annotation, text))
    elif _is_part(key):
        _set_option(config, key, rest, value, text)
    elif key == "evals":
        _set_evaluation(config, rest, value, text)
    elif path in GROUPS:
        raise UserError(f"config.{path} holds {', '.join(keys.members(path))}; set one of them")
    elif key in KEYS:
        raise UserError(f"config.{key} is one value, not a table; set config.{key} itself")
    else:
        raise UserError(keys.unknown(path))


def _read(path: str, value: Any, annotation: Any, text: bool) -> Any:
    try:
        return schema.parse(value, annotation) if text else value
    except schema.Mismatch as wanted:
        raise UserError(f"config.{path} expects {wanted}") from None


def _set_key(config: ConfigDict, path: str, value: Any) -> None:
    group, _, name = path.rpartition(".")
    (config[group] if group else config)[name] = value


def _set_part(config: ConfigDict, key: str, value: Any, say: Say) -> None:
    kind = KEYS[key].part
    assert kind is not None
    old, options = lookup.split(config[key])
    name, given = lookup.split(value)
    if name == old:
        config[key] = {"name": name} | options | given
        return
    lookup.resolve(name, kind.table, kind.word)
    kept = {option: each for option, each in options.items() if option in kind.own}
    config[key] = {"name": name} | kept | given
    dropped = {option: each for option, each in options.items() if option not in kept}
    notes = [
        f"dropped of {old!r}: {_shown(dropped.items())}" if dropped else "",
        f"kept: {_shown(kept.items())}" if kept else "",
    ]
    if any(notes):
        say(f"config.{key} is {name!r} now; {'; '.join(note for note in notes if note)}")


def _shown(items: Iterable[tuple[str, Any]]) -> str:
    return ", ".join(f"{option}={value!r}" for option, value in items)


def _set_option(config: ConfigDict, key: str, option: str, value: Any, text: bool) -> None:
    kind = KEYS[key].part
    assert kind is not None
    name, _ = lookup.split(config[key])
    legal = lookup.options_of(kind, name)
    config[key][option] = lookup.conformed_one(
        option, value, legal, f"{kind.word} {name!r}", f"config.{key}", text=text
    )


def _set_evaluation(config: ConfigDict, rest: str, value: Any, text: bool) -> None:
    name, _, field = rest.partition(".")
    value = _read(f"evals.{rest}", value, dict | str if field else dict, text)
    evaluations = config.evals.to_dict()
    evaluations[name] = evaluations.get(name, {}) | {field: value} if field else value
    config.evals = evaluations
