"""What a save plan is.

Each plan writes into buffers of fixed length inside of the compiled loop. Saving never decides on the steps:
a save time inside of a step gets the model's own prediction from the step's start. Standard deviations are
kept in the covariance's own shape (one number per time if all unknowns share it).
"""

import abc
from typing import Any, ClassVar, NamedTuple

from jaxtyping import Array

from millipode.filter.state import Attempt, Filter, State, Taken
from millipode.linalg.fields import Coefficient
from millipode.posterior.posterior import Posterior
from millipode.smooth.point import Anchor
from millipode.xla.module import Module
from millipode.xla.ordering import Token, after


class Record(NamedTuple):
    """What a plan has kept so far.

    Attributes:
        buffers: for entries.
        filled: how many of them hold one.
        anchor: what fixed-point smoothing remembers.
    """

    buffers: Any
    filled: Array
    anchor: Anchor | None = None


class Saved(NamedTuple):
    """What a plan has kept at the end, time first.

    Attributes:
        t: the times.
        posterior: at these times.
        gamma: γ̂ of the steps that they lie in, if dynamic.
        valid: how many of the entries have been reached.
    """

    t: Array
    posterior: Posterior
    gamma: Coefficient | None
    valid: Array


class SavePlan(Module):
    """When to save, and where.

    Attributes:
        in_segments: whether records can be full before the end, so that the host must collect them on the
            way.
        trims: whether entries that were not reached are cut off after a solve that failed.
    """

    in_segments: ClassVar[bool] = False
    trims: ClassVar[bool] = False

    @abc.abstractmethod
    def empty(self, model: Filter, state: State) -> Record:
        """The record of a loop that starts at this state."""

    def before_step(
        self, model: Filter, state: State, a: Attempt, record: Record, reverse: bool
    ) -> tuple[Record, Token]:
        """Save what an accepted step passes over, as seen from its start.

        Args:
            model: the filter.
            state: at the start of the step.
            a: the attempt.
            record: what was saved so far.
            reverse: whether loops must have the form that reverse mode supports.

        Returns:
            The record, and a token that is known once the plan has read all that it needs of the state: the
            step then overwrites it. A token that is known earlier costs a copy of the state in every step.
        """
        return record, after(record.filled)

    def after_step(self, model: Filter, taken: Taken, accept: Array, record: Record) -> Record:
        """Save the state at the end of a step."""
        return record

    def has_room(self, record: Record) -> Array | bool:
        """Whether another step can be saved."""
        return True

    @abc.abstractmethod
    def collect(
        self, model: Filter, state: State, record: Record, arrived: Array, output_gamma: Coefficient
    ) -> Saved:
        """All that was kept.

        Args:
            model: the filter.
            state: the last one.
            record: what was saved.
            arrived: whether t = t₁.
            output_gamma: the factor of all standard deviations.
        """
