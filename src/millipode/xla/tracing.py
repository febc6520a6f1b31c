"""What is known of values and programs while JAX traces them."""

import math
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn


def is_traced(*x: Any) -> bool:
    """Whether any value in some pytrees stands for a number that is not known yet."""
    return any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(x))


def operations(jaxpr: Jaxpr) -> int:
    """How many numbers a program computes or adds up on the way; loops count as one turn."""
    count = 0
    for equation in jaxpr.eqns:
        inside = programs_inside(equation)
        count += sum(map(operations, inside)) if inside else _own(equation)
    return count


def programs_inside(equation: JaxprEqn) -> list[Jaxpr]:
    """The programs that an operation runs, such as the body of a loop."""
    parameters = jax.tree.leaves(list(equation.params.values()), is_leaf=_is_program)
    return [x.jaxpr if isinstance(x, ClosedJaxpr) else x for x in parameters if _is_program(x)]


def _own(equation: JaxprEqn) -> int:
    """The operations of one that runs no program."""
    count = sum(math.prod(getattr(x.aval, "shape", ())) for x in equation.outvars)
    if equation.primitive.name == "dot_general":
        (contracted, _), _ = equation.params["dimension_numbers"]
        count *= math.prod(getattr(equation.invars[0].aval, "shape", ())[i] for i in contracted)
    return count


def _is_program(x: Any) -> bool:
    return isinstance(x, Jaxpr | ClosedJaxpr)
