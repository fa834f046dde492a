"""Durations: one typed value, `"10ep"`, `"5000st"`, `"1Mex"`, a number with its unit."""

import dataclasses
import math
import re
from fractions import Fraction

from jaxtrain.errors import UserError

UNITS = {"ep": "epochs", "st": "steps", "ex": "examples"}
_FORM = re.compile(r"(\d+(?:\.\d*)?|\.\d+)\s*(k|M)?\s*(ep|st|ex)")
_SCALE = {None: 1, "k": 1_000, "M": 1_000_000}


@dataclasses.dataclass(frozen=True)
class Duration:
    """A length of training: `value` of `unit`, which is "ep", "st" or "ex"."""

    value: Fraction
    unit: str

    def steps(self, batch_size: int, examples: int) -> Fraction:
        """The duration in steps of `batch_size` over a training set of `examples`, exact and not rounded."""
        if self.unit == "st":
            return self.value
        count = self.value * examples if self.unit == "ep" else self.value
        return count / batch_size

    def whole_steps(self, batch_size: int, examples: int) -> int:
        """The same in whole steps: the last one completes the last epoch."""
        return math.ceil(self.steps(batch_size, examples))

    def __str__(self) -> str:
        return f"{self.value}{self.unit}"


def parse_duration(text: str) -> Duration:
    """Reads number, optional k or M, unit: "10ep", "5000st", "1Mex", "0.5ep". Raises UserError otherwise."""
    found = _FORM.fullmatch(text.strip()) if isinstance(text, str) else None
    if found is None:
        raise UserError(f"{text!r} is no duration; write a number with its unit: '10ep', '5000st' or '1Mex'")
    number, scale, unit = found.groups()
    return Duration(Fraction(number) * _SCALE[scale], unit)


def is_moment(text: str) -> bool:
    """Whether a text says when in a run: a duration from its start ("2ep"), or a share of it ("0.3")."""
    try:
        return 0 <= float(text) <= 1
    except ValueError:
        pass
    try:
        return parse_duration(text) is not None
    except UserError:
        return False
