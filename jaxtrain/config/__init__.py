"""The config: a typed table that knows its keys, and what follows from one: checks, identity, JSON.

A file calls `base_config()`, changes it and returns it from `get_config`. A key or a type that is not legal
is refused where it is assigned; options of parts, ranges and what must fit together, by `checked`.
"""

import hashlib
import json
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from ml_collections import ConfigDict, FieldReference

from jaxtrain.config import configfile, grid, keys, lookup, overrides, schema
from jaxtrain.config.durations import Duration, is_moment, parse_duration
from jaxtrain.config.keys import DURATION, GROUPS, INTERVAL, KEYS, Key
from jaxtrain.errors import UserError

__all__ = [
    "KEYS",
    "Config",
    "Duration",
    "base_config",
    "check",
    "checked",
    "differing",
    "from_json",
    "load",
    "parse_duration",
    "run_hash",
    "run_keys",
    "to_json",
]

PLACE_OPTIONS = {"data": ("dir", "resident")}  # options of a run key that do not change the result
ROLES = ("train", "validation", "test")


class UnknownKey(UserError, AttributeError):
    """A key that no config has; also an AttributeError, so that `hasattr` works."""


class Table(ConfigDict):
    """A ConfigDict with the keys of KEYS under `prefix`, each of its type. A typo raises, also in `get`."""

    prefix = ""

    def __setitem__(self, name: str, value: Any) -> None:
        key = self.prefix + str(name)
        if isinstance(value, FieldReference):
            value = value.get()
        if key in GROUPS:
            value = self._group(key, value)
        elif key in KEYS:
            value = _typed(key, value, KEYS[key])
        else:
            raise UnknownKey(keys.unknown(key))
        self._fields[name] = value

    def __getitem__(self, name: str) -> Any:
        try:
            return super().__getitem__(name)
        except (KeyError, TypeError):
            raise UnknownKey(keys.unknown(self.prefix + str(name))) from None

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self[name]

    def lock(self) -> "Table":
        """As ConfigDict's, but the options of parts stay open: their builder's signature checks them."""
        super().lock()
        for name, value in self._fields.items():
            if isinstance(value, ConfigDict) and name not in GROUPS:
                value.unlock()
        return self

    def _group(self, key: str, value: Any) -> "Table":
        if not isinstance(value, (Mapping, ConfigDict)):
            raise UserError(f"config.{key} is {value!r}, expected a dict of {', '.join(keys.members(key))}")
        group = self._fields.get(key)
        if group is None:
            group = Checkpoint()
        for name in value:
            group[name] = value[name]
        return group.lock()


class Checkpoint(Table):
    """The keys of `config.checkpoint`."""

    prefix = "checkpoint."


class Config(Table):
    """What `base_config()` returns."""


def base_config() -> Config:
    """A config with every legal key at its default, typed and locked; `jaxtrain.config.keys` says what they mean."""
    config = Config()
    for key, about in KEYS.items():
        group, _, name = key.rpartition(".")
        if group:
            config[group] = {name: about.default}
        else:
            config[key] = about.default
    return config.lock()


def load(spec: str, changes: overrides.Overrides = (), *, say: Callable[[str], None] = print, **more: Any) -> Config:
    """The checked config of "FILE[:ARGS]" with `changes` and `more` on top.

    `FILE` is a path or, when it begins with configs/, one that comes with jaxtrain; `ARGS` reach its
    `get_config`. `changes` are texts "model.width=64" or a mapping of keys to values; `more` is such a mapping
    too: load("configs/digits.py", seed=3, model=dict(width=64)). `say` gets a line where naming another builder
    drops options. Raises UserError, one line, for any mistake.
    """
    try:
        config = adopted(configfile.read(spec))
        overrides.apply(config, changes, say)
        overrides.apply(config, more, say)
        check(config)
    except UserError as error:
        from_file = not (changes or more)
        raise UserError(f"{spec}: {error}" if from_file and spec not in str(error) else str(error)) from error
    return config


def check(config: ConfigDict) -> None:
    """Raises UserError for anything in the config that is not legal, see `checked`."""
    checked(config)


def checked(config: ConfigDict) -> Config:
    """A checked copy in which every option of every part is written out, so that it says all it means.

    Raises UserError, one line, for an illegal key, type, range, name or option.
    """
    result = adopted(config)
    for key, about in KEYS.items():
        value = get(result, key)
        if about.rule is not None and not about.rule.holds(value):
            raise UserError(f"config.{key} is {value!r}, expected {about.rule.expected}")
        if isinstance(value, tuple) and about.part is not None:
            result[key] = tuple(
                lookup.checked(each, about.part, f"config.{key}[{place}]") for place, each in enumerate(value)
            )
        elif about.part is not None:
            result[key] = lookup.checked(value, about.part, f"config.{key}")
    _check_moments(result)
    result.param_groups = tuple(
        _param_group(f"config.param_groups[{place}]", each) for place, each in enumerate(result.param_groups)
    )
    if result.batch_size % result.accumulate:
        raise UserError(
            f"config.accumulate is {result.accumulate}; it must divide config.batch_size, {result.batch_size}"
        )
    grid.members(result)
    result.evals = {name: _evaluation(name, each) for name, each in result.evals.items()}
    return result


def adopted(config: Any) -> Config:
    """A copy as a Config, typed anew. Raises UserError for a key too many or too few."""
    if not isinstance(config, (ConfigDict, Mapping)):
        raise UserError(f"{type(config).__name__} is no config; start from jaxtrain.config.base_config()")
    result = base_config()
    missing = [key for key in result if key not in config]
    if missing:
        raise UserError(f"the config lacks {', '.join(missing[:3])}; start from jaxtrain.config.base_config()")
    for key in config:
        result[key] = config[key]
    return result


def get(config: ConfigDict, key: str) -> Any:
    """The value of a key of KEYS, plain: dicts and tuples, no ConfigDict."""
    for name in key.split("."):
        config = config[name]
    return schema.plain(config)


def run_keys(config: ConfigDict) -> dict[str, Any]:
    """What determines the result, flat ("model.depth" -> 18): options written out, durations in one form."""
    return {key: value for key, value, _ in _settings(checked(config))}


def run_hash(config: ConfigDict) -> str:
    """Eight hex digits that name the run: equal for configs with equal run keys, whatever their place and
    view.

    What is at its default does not count, so that a version with more keys gives the same command the same
    name.
    """
    chosen = {key: value for key, value, default in _settings(checked(config)) if value != default}
    return hashlib.sha256(json.dumps(chosen, sort_keys=True).encode()).hexdigest()[:8]


def differing(a: ConfigDict, b: ConfigDict) -> list[tuple[str, Any, Any]]:
    """The run keys in which two configs differ, with both values; None where a builder has no such option."""
    left, right = run_keys(a), run_keys(b)
    keys = [key for key in (left | right) if left.get(key) != right.get(key)]
    renamed = {key.removesuffix("name") for key in keys if key.endswith(".name")}
    # Another builder says enough; that its options differ too goes without saying.
    keys = [key for key in keys if key.endswith(".name") or not key.startswith(tuple(renamed))]
    return [(key, left.get(key), right.get(key)) for key in keys]


def own_names(config: ConfigDict) -> dict[str, str]:
    """Code of a user's own: each "package.module:attribute" in a config, with its key. Nothing is imported."""
    return dict(
        found
        for key, about in KEYS.items()
        if about.part or key == "evals"
        for found in _own_names(key, get(config, key))
    )


def _own_names(key: str, value: Any) -> Iterator[tuple[str, str]]:
    if isinstance(value, str):
        if re.fullmatch(r"[\w.]+:[\w.]+", value):
            yield value, key
    elif isinstance(value, Mapping):
        for name, each in value.items():
            yield from _own_names(f"{key}.{name}", each)
    elif isinstance(value, (tuple, list)):
        for each in value:
            yield from _own_names(key, each)


def to_json(config: ConfigDict, **options: Any) -> str:
    """The config as JSON; `options` are those of `json.dumps`."""
    return json.dumps({key: schema.plain(config[key]) for key in config}, **options)


def from_json(text: str) -> Config:
    """The config behind `to_json`; lists become tuples, keys that are not in the text take their default.

    Raises UserError for a key that this version does not have.
    """
    config = base_config()
    for key, value in json.loads(text).items():
        config[key] = value
    return config


def _typed(key: str, value: Any, about: Key) -> Any:
    try:
        value = schema.conform(value, about.annotation)
    except schema.Mismatch as wanted:
        wanted = schema.Mismatch("a name or dict(name=…, option=…)") if about.part else wanted
        raise UserError(_mismatch(key, value, wanted)) from None
    if about.part is not None:
        value = tuple(map(_named, value)) if isinstance(value, tuple) else _named(value)
    return ConfigDict(value, type_safe=False) if isinstance(value, dict) else value


def _named(part: dict[str, Any] | str) -> dict[str, Any]:
    return {"name": part} if isinstance(part, str) else part


def _mismatch(key: str, value: Any, wanted: schema.Mismatch) -> str:
    """The error line for a value, or for the one option in it, that no config can hold."""
    if isinstance(value, (Mapping, ConfigDict)):
        for name in value:
            try:
                schema.plain(value[name])
            except schema.Mismatch as plain:
                return _mismatch(f"{key}.{name}", value[name], plain)
    text = " ".join(repr(value).split())
    text = text if len(text) <= 80 else f"{text[:77]}..."
    return f"config.{key} is {text} ({type(value).__name__}), expected {wanted}"


def _check_moments(config: Config) -> None:
    """An option of the schedule whose default is a duration, or a share of the run, must be one."""
    for name, parameter in lookup.options_of(lookup.SCHEDULE, config.schedule.name).items():
        if isinstance(parameter.default, str) and is_moment(parameter.default):
            value = config.schedule[name]
            if not is_moment(value):
                raise UserError(
                    f"config.schedule.{name} is {value!r}, expected a duration such as '500st' or '2ep', "
                    "or a share of the run such as '0.3'"
                )


def _param_group(where: str, group: Mapping[str, Any]) -> dict[str, Any]:
    """A group, checked as a part, with its schedule and its part of the run checked too."""
    for key in ("since", "until"):
        if not INTERVAL.holds(group[key]):
            raise UserError(f"{where}.{key} is {group[key]!r}, expected {INTERVAL.expected}")
    schedule = group["schedule"]
    return dict(group) | ({"schedule": lookup.checked(schedule, lookup.SCHEDULE, where)} if schedule else {})


def _evaluation(name: str, given: Any) -> dict[str, Any]:
    """One entry of `config.evals`, checked."""
    where = f"config.evals.{name}"
    if not isinstance(given, (Mapping, ConfigDict)):
        raise UserError(f"{where} is {given!r}, expected dict(source=…, task=… or fn=…, every=…)")
    value = lookup.conformed(given, lookup.options(_evaluation_options), f"evaluation {name!r}", where)
    for other in ("task", "test_time"):
        if "fn" in value and other in value:
            raise UserError(f"{where} has both a {other} and a fn; take one")
    if "fn" in value:
        lookup.resolve(value["fn"], lookup.EVALUATIONS, "evaluation function")
    if "task" in value:
        value["task"] = lookup.checked(value["task"], lookup.TASK, f"{where}.task")
    if "test_time" in value:
        value["test_time"] = lookup.checked(value["test_time"], lookup.TEST_TIME, f"{where}.test_time")
    if value.get("source", "train") not in ROLES:
        value["source"] = lookup.checked(value["source"], lookup.DATASET, f"{where}.source")
    if not INTERVAL.holds(value.get("every", "")):
        raise UserError(f"{where}.every is {value['every']!r}, expected {INTERVAL.expected}")
    return value


def _evaluation_options(
    source: dict | str = "", task: dict | str = "", test_time: dict | str = "", fn: str = "", every: str = ""
) -> None:
    """The signature is the schema of an evaluation."""


def _settings(config: Config) -> Iterator[tuple[str, Any, Any]]:
    """(flat key, value, default) of each run key; ... as the default of what always counts."""
    for key, about in KEYS.items():
        if about.kind != "run":
            continue
        value = get(config, key)
        if about.part is None:
            yield key, str(parse_duration(value)) if about.rule is DURATION else value, about.default
            continue
        parts = [(key, value)] if isinstance(value, dict) else [(f"{key}.{n}", each) for n, each in enumerate(value)]
        for where, part in parts:
            legal = lookup.options_of(about.part, part["name"])
            for option, each in part.items():
                if option not in PLACE_OPTIONS.get(key, ()):
                    yield f"{where}.{option}", each, legal[option].default if option in legal else ...
