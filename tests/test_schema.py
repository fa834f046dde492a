"""Which values an annotation takes, what a text means as one, and what of an annotation a config can hold."""

import collections.abc
import inspect
from collections.abc import Callable, Sequence
from typing import Annotated, Any, Literal

import jax
import numpy as np
import optax
import pytest
from ml_collections import ConfigDict

from jaxtrain.config import schema

ROUNDS = Literal["up", "down"]
ArrayLike = jax.Array | np.ndarray | np.bool_ | np.number | bool | int | float | complex
NOTHING = inspect.Parameter.empty


@pytest.mark.parametrize(
    ("annotation", "value", "expected"),
    [
        (int, 3, 3),
        (int, np.int64(3), 3),
        (float, 3, 3.0),
        (float, np.float32(0.5), 0.5),
        (bool, True, True),
        (str, "a", "a"),
        (float | None, None, None),
        (float | int, 3, 3),
        (ROUNDS, "up", "up"),
        (Literal["all"] | int, 3, 3),
        (tuple[int, ...], [1, 2], (1, 2)),
        (tuple[str, float], ["a", 1], ("a", 1.0)),
        (tuple[tuple[str, float], ...], (["a", 1],), (("a", 1.0),)),
        (tuple, [1, [2]], (1, (2,))),
        (dict, {"a": [1]}, {"a": (1,)}),
        (dict, ConfigDict({"a": {"b": 1}}), {"a": {"b": 1}}),
        (Any, [1, "a", None], (1, "a", None)),
    ],
)
def test_conforms(annotation, value, expected):
    found = schema.conform(value, annotation)
    assert found == expected
    assert type(found) is type(expected)


@pytest.mark.parametrize(
    ("annotation", "value", "expected"),
    [
        (int, 3.0, "an int"),
        (int, True, "an int"),
        (float, True, "a float"),
        (float, float("nan"), "a float"),
        (float, float("inf"), "a float"),
        (float, "3", "a float"),
        (bool, 1, "true or false"),
        (str, 3, "text"),
        (float | None, "x", "a float or None"),
        (ROUNDS, "left", "one of 'up', 'down'"),
        (Literal[1, 2], True, "one of 1, 2"),
        (tuple[int, ...], (1, "a"), "a tuple of int"),
        (tuple[str, float], ("a",), "a tuple (text, float)"),
        (dict, 3, "a dict"),
        (Any, print, "a plain value"),
        (Any, {1: 2}, "a plain value"),
    ],
)
def test_refuses_and_says_what_was_expected(annotation, value, expected):
    with pytest.raises(schema.Mismatch) as caught:
        schema.conform(value, annotation)
    assert str(caught.value) == expected


@pytest.mark.parametrize(
    ("annotation", "text", "expected"),
    [
        (int, "3", 3),
        (int, "1e4", 10_000),
        (int, "-2", -2),
        (float, "3", 3.0),
        (float, "1e-3", 0.001),
        (bool, "true", True),
        (bool, "False", False),
        (bool, "0", False),
        (str, "3", "3"),
        (str, "", ""),
        (float | None, "None", None),
        (float | None, "2", 2.0),
        (str | None, "None", None),
        (ROUNDS, "down", "down"),
        (Literal["all"] | int | tuple[int, ...], "all", "all"),
        (Literal["all"] | int | tuple[int, ...], "2", 2),
        (Literal["all"] | int | tuple[int, ...], "0,2", (0, 2)),
        (tuple[int, ...], "(1, 2)", (1, 2)),
        (tuple[int, ...], "[1]", (1,)),
        (tuple[int, ...], "", ()),
        (tuple[int, int], "1,2", (1, 2)),
        (tuple[str, ...], "a.*,b", ("a.*", "b")),
        (tuple[dict | str, ...], "flip,crop", ("flip", "crop")),
        (tuple[dict | str, ...], "(dict(name='flip', p=.5), 'crop')", ({"name": "flip", "p": 0.5}, "crop")),
        (tuple[tuple[str, float], ...], "(('a', 1),)", (("a", 1.0),)),
        (dict | str, "dict(name='a', b=(1, 2))", {"name": "a", "b": (1, 2)}),
        (dict | str, "a:b", "a:b"),
        (Any, "3", 3),
        (Any, "some text", "some text"),
    ],
)
def test_reads_a_text(annotation, text, expected):
    found = schema.parse(text, annotation)
    assert found == expected
    assert type(found) is type(expected)


@pytest.mark.parametrize(
    ("annotation", "text"),
    [
        (int, "3.5"),
        (int, "x"),
        (int, ""),
        (float, "nan"),
        (float, "__import__('os')"),
        (bool, "yes"),
        (ROUNDS, "left"),
        (tuple[int, ...], "1,x"),
        (tuple[int, int], "1"),
        (dict, "a"),
        (dict, "dict(1)"),
    ],
)
def test_refuses_a_text(annotation, text):
    with pytest.raises(schema.Mismatch):
        schema.parse(text, annotation)


@pytest.mark.parametrize(
    ("annotation", "default", "expected"),
    [
        (int, NOTHING, int),
        (NOTHING, 3, int),
        (NOTHING, (1, 2), tuple),
        (NOTHING, None, Any),
        (NOTHING, print, None),
        (Annotated[int, "a note"], 3, int),
        (Sequence[int], NOTHING, tuple[int, ...]),
        (list[str], NOTHING, tuple[str, ...]),
        (collections.abc.Mapping[str, int], NOTHING, dict),
        (float | None, None, float | None),
        (ROUNDS, "up", ROUNDS),
        (Callable[[int], int], NOTHING, None),
        (str | Callable, "relu", str),
        (str | Callable, NOTHING, None),
        (jax.Array, NOTHING, None),
        (ArrayLike, 0.5, float),
        (ArrayLike, 5, int),
        (ArrayLike | None, None, float | None),
        (optax.ScalarOrSchedule, 0.1, float),
        (optax.ScalarOrSchedule, NOTHING, None),
        (jax.typing.DTypeLike | None, None, str | None),
    ],
)
def test_what_a_config_can_hold_of_an_annotation(annotation, default, expected):
    assert schema.settable(annotation, default) == expected
