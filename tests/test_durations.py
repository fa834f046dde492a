"""Durations: one text, one meaning."""

from fractions import Fraction

import pytest

from jaxtrain.config.durations import is_moment, parse_duration
from jaxtrain.errors import UserError


@pytest.mark.parametrize(
    ("text", "steps"),
    [
        ("10ep", Fraction(10 * 37, 16)),  # 37 examples in batches of 16
        ("0.5ep", Fraction(37, 32)),
        ("5000st", Fraction(5000)),
        ("5kst", Fraction(5000)),
        ("1.5kst", Fraction(1500)),
        ("1Mex", Fraction(1_000_000, 16)),
        ("160ex", Fraction(10)),
        (" 3 ep ", Fraction(3 * 37, 16)),
        ("0st", Fraction(0)),
        (".1ep", Fraction(37, 160)),
    ],
)
def test_a_duration_is_an_exact_number_of_steps(text, steps):
    assert parse_duration(text).steps(batch_size=16, examples=37) == steps


@pytest.mark.parametrize("text", ["", "10", "ep", "10 epochs", "-1ep", "1e3st", "10Gep", "ten ep", "1,5ep", None, 10])
def test_anything_else_is_refused_in_one_line(text):
    with pytest.raises(UserError, match="10ep") as caught:
        parse_duration(text)
    assert repr(text) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("a", "b"), [("1kst", "1000st"), ("0.5ep", ".50 ep"), ("1Mex", "1000kex")])
def test_equal_durations_are_equal(a, b):
    assert parse_duration(a) == parse_duration(b)
    assert str(parse_duration(a)) == str(parse_duration(b))


@pytest.mark.parametrize(
    ("text", "is_one"),
    [("2ep", True), ("0.3", True), ("1", True), ("1.5", False), ("-0.1", False), ("cosine", False)],
)
def test_a_moment_is_a_duration_or_a_share_of_the_run(text, is_one):
    assert is_moment(text) is is_one
