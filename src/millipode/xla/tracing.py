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


def constants_inside(jaxpr: Jaxpr) -> int:
    """The bytes of all constants of the programs that a program runs."""
    count = 0
    for equation in jaxpr.eqns:
        for program in _programs(equation):
            if isinstance(program, ClosedJaxpr):
                count += sum(getattr(x, "nbytes", 0) for x in program.consts)
            count += constants_inside(_opened(program))
    return count


def programs_inside(equation: JaxprEqn) -> list[Jaxpr]:
    """The programs that an operation runs, such as the body of a loop."""
    return [_opened(x) for x in _programs(equation)]


def _programs(equation: JaxprEqn) -> list[Jaxpr | ClosedJaxpr]:
    parameters = jax.tree.leaves(list(equation.params.values()), is_leaf=_is_program)
    return [x for x in parameters if _is_program(x)]


def _opened(program: Jaxpr | ClosedJaxpr) -> Jaxpr:
    return program.jaxpr if isinstance(program, ClosedJaxpr) else program


def _own(equation: JaxprEqn) -> int:
    """The operations of one that runs no program."""
    count = sum(math.prod(getattr(x.aval, "shape", ())) for x in equation.outvars)
    if equation.primitive.name == "dot_general":
        (contracted, _), _ = equation.params["dimension_numbers"]
        count *= math.prod(getattr(equation.invars[0].aval, "shape", ())[i] for i in contracted)
    return count


def _is_program(x: Any) -> bool:
    return isinstance(x, Jaxpr | ClosedJaxpr)
