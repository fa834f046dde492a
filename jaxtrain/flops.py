"""What a traced program does: its multiply-adds, counted operator by operator, and which operators it has."""

import math
from collections.abc import Callable
from typing import Any

import jax


def multiply_adds(function: Callable[..., Any], *args: Any) -> int:
    """The multiply-adds of the matrix products and convolutions in `function(*args)`; nothing is computed.

    `args` are arrays or ShapeDtypeStructs. This is what papers call FLOPs of a forward pass; everything else
    (additions, normalisation, softmax) is left out, as there. A loop of known length counts as often as it runs, a
    `while` once, of a `cond` the costliest branch.
    """
    return in_jaxpr(jax.make_jaxpr(function)(*args).jaxpr)


def primitives(jaxpr: Any) -> set[str]:
    """The names of all operators in a traced program, also in the programs that it calls."""
    found = set()
    for equation in jaxpr.eqns:
        found.add(equation.primitive.name)
        for each in _inner(equation.params):
            found |= primitives(each)
    return found


def in_jaxpr(jaxpr: Any) -> int:
    """`multiply_adds` of a traced program."""
    return sum(_of_equation(equation) for equation in jaxpr.eqns)


def _of_equation(equation: Any) -> int:
    name, parameters = equation.primitive.name, equation.params
    if name == "dot_general":
        return _of_dot(equation)
    if name == "conv_general_dilated":
        return _of_convolution(equation)
    inner = [in_jaxpr(each) for each in _inner(parameters)]
    if name == "cond":
        return max(inner)
    return sum(inner) * (parameters["length"] if name == "scan" else 1)


def _inner(parameters: dict[str, Any]) -> list[Any]:
    """The programs that an equation calls, in whatever parameter it keeps them."""
    found = []
    for value in parameters.values():
        for each in value if isinstance(value, tuple | list) else (value,):
            each = getattr(each, "jaxpr", each)  # closed, or open already
            if hasattr(each, "eqns"):
                found.append(each)
    return found


def _of_dot(equation: Any) -> int:
    (contracted, _), _ = equation.params["dimension_numbers"]
    left, result = equation.invars[0].aval.shape, equation.outvars[0].aval.shape
    return math.prod(result) * math.prod(left[axis] for axis in contracted)


def _of_convolution(equation: Any) -> int:
    numbers, kernel = equation.params["dimension_numbers"], equation.invars[1].aval.shape
    _, inputs, *sides = numbers.rhs_spec  # the kernel's input channels are those of one group
    taps = kernel[inputs] * math.prod(kernel[side] for side in sides)
    # A transposed convolution spreads its input out: most taps meet the zeros in between.
    return math.prod(equation.outvars[0].aval.shape) * taps // math.prod(equation.params["lhs_dilation"])
