"""The order of writes: tokens, and that no save plan makes a step copy its state."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import millipode as mp
from common import compiled_loop
from millipode.prepare import prepare
from millipode.run.packing import Packed
from millipode.run.programs import advance_in_place, begin
from millipode.save.fixed_point import SmoothTimes
from millipode.save.plans import CountSteps, SaveEnd, SaveSteps, SaveTimes
from millipode.save.protocol import SavePlan
from millipode.xla.ordering import Token, after, after_in_branch, stored

D = 4096
PROBLEM = mp.problems.lorenz96(D)
TIMES = np.linspace(0.1, 0.9, 5)

# How to ask for every plan that there is.
PLANS = {
    SaveEnd: [{"save": "end"}],
    SaveSteps: [{"save": "steps"}, {"save": "steps", "smooth": False}],
    CountSteps: [{"save": "steps", "smooth": "recompute"}],
    SaveTimes: [{"save": TIMES, "smooth": False}],
    SmoothTimes: [{"save": TIMES}],
}
MEMBERS = [{"save": save, "smooth": False, "uncertainty": mp.Transported(2)} for save in ("end", TIMES)]


def plans(base=SavePlan):
    """All plans of the library."""
    below = {plan for kind in base.__subclasses__() for plan in {kind, *plans(kind)}}
    return {plan for plan in below if plan.__module__.startswith("millipode.")}


def copies(text):
    """How many arrays as large as y a program copies."""
    return len(re.findall(rf"f(?:64|32)\[(?:[\d,]+,)?{D}\]\S* copy\(", text))


def test_every_plan_is_among_those_below():
    assert plans() == set(PLANS)


# Passing a save time, the anchor of fixed-point smoothing takes over the highest derivative as it is.
ALLOWED = {SmoothTimes: 1}
CASES = [(plan, options) for plan, some in PLANS.items() for options in some]


@pytest.mark.parametrize(("plan", "options"), CASES + [(None, options) for options in MEMBERS], ids=str)
def test_no_plan_makes_a_step_copy_the_state(plan, options):
    program, _ = compiled_loop(PROBLEM.f, PROBLEM.y0, (0.0, 1.0), solver=mp.EK0(2), **options)
    assert copies(program.as_text()) == ALLOWED.get(plan, 0)


class Forgetful(SmoothTimes):
    """A plan that reads the state, and whose token does not wait for that."""

    def before_step(self, model, state, a, record, reverse):
        record, token = super().before_step(model, state, a, record, reverse)
        return record, Token(jnp.zeros_like(token.zero))


def test_a_token_that_does_not_wait_costs_a_copy():
    setup, y0, *_ = prepare(PROBLEM.f, PROBLEM.y0, (0.0, 1.0), solver=mp.EK0(2), save=TIMES)
    packed = Packed(setup._replace(plan=Forgetful(setup.plan.times)))
    carry = jax.eval_shape(begin, packed, y0)
    assert (
        copies(advance_in_place.lower(packed, carry, np.int32(1)).compile().as_text()) > ALLOWED[SmoothTimes]
    )


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("make", [after, after_in_branch(jnp.asarray(True))], ids=["plain", "in a branch"])
def test_tokens_are_zero_whatever_they_wait_for(make, bad):
    x = jnp.full((3, 2), bad)
    assert make(x).zero == 0
    np.testing.assert_array_equal(make(x).hold(jnp.arange(3)), np.arange(3))
    assert make(jnp.ones(3)).hold(jnp.ones(2, jnp.float32)).dtype == jnp.float32


def test_tokens_wait_for_numbers_of_any_kind():
    x = {"count": jnp.int32(3), "flag": jnp.asarray(True), "field": jnp.ones((2, 2), jnp.float32)}
    assert after(x).zero == 0 and jnp.issubdtype(after(x).zero.dtype, jnp.floating)
    assert after(jnp.int32(7)).zero == 0


def test_stored_arrays_give_the_same_number():
    x = jnp.arange(1.0, 5.0)
    assert stored(lambda a, b: jnp.sum(a * b), x, 2 * x) == 60
    assert np.isnan(stored(jnp.sum, x.at[0].set(jnp.nan)))
