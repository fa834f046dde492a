"""Values and annotations: does a value conform, what does a text mean, and how to say what was expected.

Only what a config can hold counts: None, bool, int, float, str, tuples and dicts of them, literals and
unions.
"""

import ast
import collections.abc
import functools
import inspect
import math
import numbers
import operator
import types
import typing
from collections.abc import Mapping
from typing import Any, Literal, Union

from ml_collections import ConfigDict

SCALARS: tuple[type, ...] = (bool, int, float, str)
_SEQUENCES = (tuple, list, collections.abc.Sequence, collections.abc.Iterable, collections.abc.Collection)
_MAPPINGS = (dict, collections.abc.Mapping, collections.abc.MutableMapping)
_TRUTH = {"true": True, "false": False, "1": True, "0": False}
_READ_ORDER = (
    type(None),
    Literal,
    bool,
    int,
    float,
    tuple,
    dict,
    str,
    Any,
)  # a text is taken for the first it fits


class Mismatch(ValueError):
    """A value is not what its annotation says; the text is what was expected."""


def settable(annotation: Any, default: Any = inspect.Parameter.empty) -> Any:
    """The part of an annotation that a config can hold, or None where it can hold nothing of it.

    JAX's `ArrayLike` becomes a number of the default's type; where a callable may stand and no plain default
    says otherwise, nothing is offered.
    """
    plain = isinstance(default, (*SCALARS, tuple, list, dict))
    if annotation is inspect.Parameter.empty:
        unknown = default is inspect.Parameter.empty or default is None
        return Any if unknown else (_kind(type(default)) if plain else None)
    members = _members(annotation)
    if any(_is_callable(each) for each in members) and not plain:
        return None
    if Any in members:
        return Any
    if complex in members:  # an ArrayLike: any number will do, so the default decides which
        number = type(default) if isinstance(default, (bool, int)) else float
        members = [number, *(each for each in members if each not in (bool, int, float, complex))]
    kept = [each for each in map(_plain_form, members) if each is not None]
    if all(each is type(None) for each in kept):
        return None
    return functools.reduce(operator.or_, kept)


def conform(value: Any, annotation: Any) -> Any:
    """The value as the annotation wants it: an int for a float becomes one, a list for a tuple too.

    Raises Mismatch, whose text is what was expected.
    """
    for member in sorted(_members(annotation), key=lambda each: each is not type(value)):
        try:
            return _conform_one(value, member)
        except Mismatch:
            continue
    raise Mismatch(describe(annotation))


def parse(text: str, annotation: Any) -> Any:
    """What a text from the command line means as the annotation. Raises Mismatch, as `conform` does."""
    members = sorted(_members(annotation), key=lambda each: _READ_ORDER.index(_kind(each)))
    for member in members:
        try:
            return _parse_one(text, member, bare=str not in members)
        except Mismatch:
            continue
    raise Mismatch(describe(annotation))


def describe(annotation: Any) -> str:
    """What the annotation allows, in words."""
    return " or ".join(_describe_one(each) for each in _members(annotation))


def literal(text: str) -> Any:
    """A Python literal in which `dict(a=1)` may stand for `{"a": 1}`. Raises Mismatch."""
    try:
        return _evaluate(ast.parse(text.strip(), mode="eval").body)
    except (SyntaxError, ValueError, TypeError, MemoryError, RecursionError):
        raise Mismatch("a Python literal") from None


def plain(value: Any) -> Any:
    """The value in plain types, lists as tuples. Raises Mismatch for what no JSON file can hold."""
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, numbers.Integral):
        return int(value)
    if isinstance(value, numbers.Real):
        if not math.isfinite(value):
            raise Mismatch("a finite number")
        return float(value)
    if isinstance(value, (tuple, list)):
        return tuple(plain(each) for each in value)
    if _is_mapping(value):
        if not all(isinstance(key, str) for key in value):
            raise Mismatch("a dict with names as keys")
        return {key: plain(each) for key, each in value.items()}
    raise Mismatch("None, a bool, a number, text, or a tuple or dict of them")


def _conform_one(value: Any, member: Any) -> Any:
    kind = _kind(member)
    if kind is Literal:
        if isinstance(value, SCALARS) and any(type(value) is type(e) and value == e for e in typing.get_args(member)):
            return value
    elif kind is tuple:
        if isinstance(value, (tuple, list)):
            return _conform_items(value, typing.get_args(member))
    elif kind is Any:
        return plain(value)
    elif kind is dict:
        if _is_mapping(value):
            return plain(value)
    elif kind is float:
        if isinstance(value, numbers.Real) and not isinstance(value, bool) and math.isfinite(value):
            return float(value)
    elif kind is int:
        if isinstance(value, numbers.Integral) and not isinstance(value, bool):
            return int(value)
    elif isinstance(value, kind):
        return value
    raise Mismatch(_describe_one(member))


def _conform_items(values: Any, wanted: tuple[Any, ...]) -> tuple[Any, ...]:
    if not wanted:
        return plain(values)
    if len(wanted) == 2 and wanted[1] is ...:
        return tuple(conform(each, wanted[0]) for each in values)
    if len(wanted) != len(values):
        raise Mismatch(f"{len(wanted)} values")
    return tuple(conform(each, one) for each, one in zip(values, wanted, strict=True))


def _parse_one(text: str, member: Any, bare: bool) -> Any:
    kind = _kind(member)
    if kind is str:
        return text
    if kind is bool:
        if text.lower() in _TRUTH:
            return _TRUTH[text.lower()]
        raise Mismatch(_describe_one(member))
    if kind is Literal and text in typing.get_args(member):
        return text
    if kind is tuple and not text.startswith(("(", "[")):
        if not bare:
            raise Mismatch(_describe_one(member))
        return _parse_bare(text, typing.get_args(member))
    try:
        value = literal(text)
    except Mismatch:
        if kind is Any:
            return text
        raise Mismatch(_describe_one(member)) from None
    if kind is int and isinstance(value, float) and value.is_integer():
        value = int(value)  # 1e4
    return _conform_one(value, member)


def _parse_bare(text: str, wanted: tuple[Any, ...]) -> tuple[Any, ...]:
    """`a,b` for `("a", "b")`."""
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if not wanted:
        wanted = (Any, ...)
    if len(wanted) == 2 and wanted[1] is ...:
        return tuple(parse(part, wanted[0]) for part in parts)
    if len(parts) != len(wanted):
        raise Mismatch(f"{len(wanted)} values")
    return tuple(parse(part, one) for part, one in zip(parts, wanted, strict=True))


def _evaluate(node: ast.expr) -> Any:
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "dict" and not node.args:
        return {str(word.arg): _evaluate(word.value) for word in node.keywords}
    if isinstance(node, (ast.Tuple, ast.List)):
        return tuple(_evaluate(each) for each in node.elts)
    if isinstance(node, ast.Dict) and None not in node.keys:
        keys = [_evaluate(key) for key in node.keys if key is not None]
        return dict(zip(keys, map(_evaluate, node.values), strict=True))
    return ast.literal_eval(node)


def _members(annotation: Any) -> list[Any]:
    """The members of a union, nested ones too; any other annotation is its own only member."""
    origin = typing.get_origin(annotation)
    if origin is typing.Annotated:
        return _members(typing.get_args(annotation)[0])
    if origin in (Union, types.UnionType):
        return [member for each in typing.get_args(annotation) for member in _members(each)]
    return [type(None) if annotation is None else annotation]


def _is_callable(annotation: Any) -> bool:
    return collections.abc.Callable in (annotation, typing.get_origin(annotation)) or annotation is typing.Callable


def _is_mapping(value: Any) -> bool:
    return isinstance(value, (Mapping, ConfigDict))


def _kind(member: Any) -> Any:
    """The plain type, Literal or Any that an annotation without union stands for; None for any other."""
    origin = typing.get_origin(member) or member
    if origin in (*SCALARS, type(None), Any, Literal):
        return origin
    if origin in _SEQUENCES:
        return tuple
    return dict if origin in _MAPPINGS else None


def _plain_form(member: Any) -> Any:
    """The annotation with sequences as tuples, or None where a config cannot hold it."""
    kind = _kind(member)
    if kind is not tuple:
        return dict if kind is dict else (member if kind is not None else None)
    items = typing.get_args(member)
    if not items:
        return tuple
    forms = [each if each is ... else settable(each) for each in items]
    if None in forms:
        return None
    return types.GenericAlias(tuple, tuple(forms) if typing.get_origin(member) is tuple else (forms[0], ...))


def _describe_one(member: Any) -> str:
    kind = _kind(member)
    if kind is Literal:
        values = [repr(each) for each in typing.get_args(member)]
        return f"one of {', '.join(values)}" if len(values) > 1 else values[0]
    if kind is tuple:
        return _describe_tuple(typing.get_args(member))
    if kind is Any:
        return "a plain value"
    return {type(None): "None", bool: "true or false", int: "an int", float: "a float", str: "text"}.get(kind, "a dict")


def _describe_tuple(items: tuple[Any, ...]) -> str:
    if not items:
        return "a tuple"
    if len(items) == 2 and items[1] is ...:
        return f"a tuple of {describe(items[0]).removeprefix('an ').removeprefix('a ')}"
    return f"a tuple ({', '.join(describe(each).removeprefix('an ').removeprefix('a ') for each in items)})"
