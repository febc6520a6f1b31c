"""The parts of a filter, its state, and the results of the phases of a step."""

from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, PyTree

from millipode.covariance.innovation import Innovation
from millipode.covariance.protocol import Covariance
from millipode.covariance.transition import Transition
from millipode.filter.calibration import Diffusion
from millipode.filter.control import weights
from millipode.filter.ensemble import Drive, Members, Transported, TransportedError
from millipode.linalg.fields import Coefficient, Field
from millipode.linalg.jacobians import Jacobian
from millipode.model.information import InformationOperator, Residual
from millipode.model.priors.iwp import IWP
from millipode.model.priors.protocol import Prior
from millipode.pde.bases import Basis
from millipode.spatial.space import Space


class Tolerances(NamedTuple):
    """rtol and atol, each a number or a field."""

    rtol: Coefficient
    atol: Coefficient

    def weights(self, y: Field, other: Field | None = None) -> Field:
        """The size of an error that is just tolerated, per unknown; see ``control.weights``."""
        return weights(y, self.rtol, self.atol, other)


class Filter(NamedTuple):
    """The parts of an ODE filter, put together for one problem.

    Attributes:
        information: what the ODE says of a state.
        prior: what is assumed of the solution beforehand.
        diffusion: how γ is calibrated.
        tolerances: what error is tolerated.
        corrections: how often f is evaluated and the state corrected in a step, at most.
        space: Γ̆, in the basis of the information operator; None for the identity.
        uncertainty: the ensemble or the error estimate that is to be carried along, if any.
    """

    information: InformationOperator
    prior: Prior
    diffusion: Diffusion
    tolerances: Tolerances
    corrections: int
    space: Space | None = None
    uncertainty: Transported | TransportedError | None = None

    @property
    def basis(self) -> Basis:
        """The basis in which all fields of the filter are expressed."""
        return self.information.basis

    @property
    def sign(self) -> Array:
        """+1, or −1 where the user integrates backwards."""
        return self.information.sign

    @property
    def order(self) -> int:
        """How many derivatives the gain moves: ν, or fewer."""
        return min(self.prior.order, self.information.derivatives or self.prior.order)

    def remainder(self, h: Array) -> tuple[Coefficient, ...]:
        """What Taylor's series of the derivatives that the gain moves misses per unit of the next one."""
        if self.order == self.prior.order:
            return self.prior.remainder(h)
        rest = (jnp.zeros_like(h),) * (self.prior.order - self.order)
        return (*IWP(self.order).remainder(h), *rest)

    def dynamic(self, gamma: Coefficient) -> Coefficient | None:
        """The γ of a step, if it is to be saved with that step; None if there is one γ for all of them."""
        return gamma if self.diffusion.is_dynamic else None


class Past(NamedTuple):
    """What steps of ``filter.implicit`` need to know of earlier ones.

    Attributes:
        accurate: a root of the covariance of a scalar filter that observes y', in units of the last step.
        stiff: the same, of a filter that observes y.
        h: the last step.
        rate: by which its corrections contracted.
        share: of the usual bound, to which iterations solve linear systems.
        sketch: of its correction of y, which that depends on; see ``strictness``.
        radius: the largest eigenvalue of the Jacobian in absolute value, as far as a power iteration has
            found it, if there is one.
        direction: the field of this iteration; None if there is none.
    """

    accurate: Float[Array, "k n"]
    stiff: Float[Array, "k n"]
    h: Array
    rate: Array
    share: Array
    sketch: Float[Array, " k"]
    radius: Array
    direction: Field | None = None


class State(NamedTuple):
    """N(mean, covariance) at time t, and the sums over all steps so far that calibrate it.

    Attributes:
        t: the time.
        steps: the number of steps that led there.
        mean: of the prior's state, y first; one field per derivative.
        covariance: of the same, under the filter's own γ.
        calibration: the diffusion's accumulator.
        quadratic: Σ_n z_nᵀ S_n⁻¹ z_n.
        log_det: Σ_n log det S_n.
        rank: the number of directions in that determinant.
        memory: of the information operator.
        members: the ensemble of errors, if there is one.
        past: what steps that solve linear systems need to know of earlier ones.
    """

    t: Array
    steps: Array
    mean: tuple[Field, ...]
    covariance: Covariance
    calibration: Coefficient
    quadratic: Array
    log_det: Array
    rank: Array
    memory: PyTree[Array]
    members: Members | None = None
    past: Past | None = None


class Prediction(NamedTuple):
    """A state, extrapolated.

    Attributes:
        t: the time at the end of the step.
        h: the length of the step.
        transition: Φ and Σ.
        y: E₀ m⁻, the predicted y.
        memory: of the information operator, to be kept if the step is accepted.
    """

    t: Array
    h: Array
    transition: Transition
    y: Field
    memory: PyTree[Array]


class Calibration(NamedTuple):
    """What a residual says of γ.

    Attributes:
        local: γ̂, the quasi-MLE of this step alone.
        gamma: the γ that the filter runs with.
        process: N(0, H Σ Hᵀ), with the spatial covariance.
        form: zᵀ Γ̆⁻¹ z, if there is a spatial covariance.
    """

    local: Coefficient
    gamma: Coefficient
    process: Innovation
    form: Array | None


class Move(NamedTuple):
    """A part −k ⊗ x of the correction of a state.

    Attributes:
        gain: k, in the form of the covariance; None for the gain of the covariance itself.
        field: x.
    """

    gain: PyTree[Array] | None
    field: Field


class Corrections(NamedTuple):
    """The evaluations of f in a step, done.

    Attributes:
        residual: the last one, and its linearisation.
        gain: E₀ K with the γ of the first residual, by which an EK0 moved ξ; None if ξ moved otherwise.
        evaluations: how many there were.
        contraction: by which the second correction was smaller than the first; 0 if there was none.
        diverged: whether corrections did not contract, or left too much undone.
        moves: by what they move the state.
        iterations: of the linear solver, if there is one.
        unsolved: whether it did not converge.
        respond: the fields of these moves for any first residual, to first order; None for that residual.
    """

    residual: Residual
    gain: Jacobian | None
    evaluations: Array
    contraction: Array
    diverged: Array
    moves: tuple[Move, ...]
    iterations: Array | int = 0
    unsolved: Array | bool = False
    respond: Callable[[Field], tuple[Field, ...]] | None = None


class Attempt(NamedTuple):
    """A step that has been judged, but is not yet taken.

    Attributes:
        prediction: the extrapolated state.
        corrections: the last residual, and how it was reached.
        calibration: γ.
        error: the estimate of the local error, in units of the tolerance.
        accept: whether the step will be taken.
        drive: what moves ensemble members, if there are any.
        past: to be kept if the step is taken.
    """

    prediction: Prediction
    corrections: Corrections
    calibration: Calibration
    error: Array
    accept: Array
    drive: Drive | None = None
    past: Past | None = None


class Taken(NamedTuple):
    """The state after a step, and the moves −Σ k ⊗ x that led to it; zero if the step was rejected."""

    state: State
    moves: tuple[Move, ...]

    @property
    def gains(self) -> tuple[PyTree[Array], ...]:
        """The gains of the moves."""
        return tuple(move.gain for move in self.moves)
