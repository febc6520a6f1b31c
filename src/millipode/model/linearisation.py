"""What a filter knows of the Jacobian of f: nothing, its diagonal, or all of it."""

import abc
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, Float, PyTree

from millipode.linalg.fields import Field, size
from millipode.linalg.jacobians import DenseJacobian, DiagonalJacobian, Jacobian, ZeroJacobian
from millipode.model.stencil import Stencil
from millipode.model.vector_field import VectorField
from millipode.pde.bases import Basis, Identity
from millipode.xla.module import Module

# Up to this many unknowns the diagonal of an undeclared Jacobian is read off the whole of it.
SMALL = 512
IDENTITY = Identity()


class Linearisation(Module):
    """How f is linearised at the predicted mean, and the basis in which the filter works for that.

    To write your own, derive from this class (an ``equinox.Module``) and write ``__call__``; return it from
    the method ``linearisation`` of a ``millipode.solvers.Solver``.
    """

    @property
    def basis(self) -> Basis:
        """The basis in which the filter's fields are expressed."""
        return IDENTITY

    @property
    def rates(self) -> Field | None:
        """The diagonal of F in user time, like the modes, if it is the same at all times; else None."""
        return None

    @property
    def is_constant(self) -> bool:
        """Whether F does not depend on y within a step."""
        return False

    @property
    def is_explicit(self) -> bool:
        """Whether F = 0."""
        return False

    @property
    def is_exact(self) -> bool:
        """Whether F is all of the Jacobian."""
        return False

    @property
    def is_implicit(self) -> bool:
        """Whether the gain solves linear systems with F, of which the covariance knows nothing."""
        return False

    @property
    def mixes(self) -> bool:
        """Whether that gain is a mixture of two, for three more systems; see ``filter.implicit``."""
        return False

    @property
    def derivatives(self) -> int | None:
        """How many derivatives that gain moves at most; None if all."""
        return None

    def cost(self, field: VectorField, t: Array, y: Field) -> float:
        """What linear systems cost in a step, in steps of an EK0: a guess."""
        return 0.0

    def memory(self) -> PyTree[Array]:
        """What the linearisation carries from step to step, as it is at the beginning."""
        return ()

    def refreshed(self, field: VectorField, t: Array, y: Field, memory: PyTree[Array]) -> PyTree[Array]:
        """The memory for a step to (t, y), from that of the step before; kept if the step is accepted.

        Here and below, y is in modes of ``basis``.
        """
        return memory

    def check(self, field: VectorField, t: Array, y: Field) -> None:
        """Raise if this linearisation does not suit a problem with a state like y, which is in space here."""

    def closed(self, field: VectorField, t: Array, y: Field) -> "Linearisation":
        """The same, with tracers that its functions close over in the open; see ``VectorField.closed``."""
        return self

    @abc.abstractmethod
    def __call__(
        self, field: VectorField, t: Array, y: Field, memory: PyTree[Array] = ()
    ) -> tuple[Field, Jacobian]:
        """f(t, y), and F.

        Args:
            field: f, in the filter's own time. Multiply a Jacobian in user time with ``field.sign``.
            t: the user's time, a number.
            y: the predicted mean, in modes of ``basis``.
            memory: what ``refreshed`` returned for this step.
        """


class ZerothOrder(Linearisation):
    """F = 0, the EK0."""

    @property
    def is_constant(self) -> bool:
        """Always."""
        return True

    @property
    def is_explicit(self) -> bool:
        """Always."""
        return True

    def __call__(
        self, field: VectorField, t: Array, y: Field, memory: PyTree[Array] = ()
    ) -> tuple[Field, ZeroJacobian]:
        """One evaluation of f."""
        return field(t, y), ZeroJacobian()


class FirstOrder(Linearisation):
    """F = ∇f, the EK1."""

    @property
    def is_exact(self) -> bool:
        """Always."""
        return True

    def __call__(
        self, field: VectorField, t: Array, y: Field, memory: PyTree[Array] = ()
    ) -> tuple[Field, DenseJacobian]:
        """One evaluation of f, and one JVP per unknown."""
        return field(t, y), DenseJacobian(whole_jacobian(field, t, y))


class WholeDiagonal(Linearisation):
    """F = diag(∇f), read off the whole Jacobian: for small problems."""

    def check(self, field: VectorField, t: Array, y: Field) -> None:
        """Refuse one JVP per unknown on a large problem."""
        if size(y) > SMALL:
            raise ValueError(
                "This solver needs the diagonal of the Jacobian, and without more information that takes one "
                f"JVP per unknown: {size(y)} here, {SMALL} at most. Pass "
                "jacobian_diagonal=callable (same signature as f, returns a y-shaped diagonal), or "
                "jacobian_diagonal=mp.Stencil(axes=..., radius=...) for a stencil on a grid, or use "
                "mp.EK0, which needs no Jacobian."
            )

    def __call__(
        self, field: VectorField, t: Array, y: Field, memory: PyTree[Array] = ()
    ) -> tuple[Field, DiagonalJacobian]:
        """One evaluation of f, and one JVP per unknown."""
        _, unravel = ravel_pytree(y)
        return field(t, y), DiagonalJacobian(unravel(jnp.diagonal(whole_jacobian(field, t, y))))


WHOLE_DIAGONAL = WholeDiagonal()


class StencilDiagonal(Linearisation):
    """F = diag(∇f), from a few JVPs for a declared stencil."""

    stencil: Stencil

    def check(self, field: VectorField, t: Array, y: Field) -> None:
        """The axes of the stencil must exist in every leaf."""
        for leaf in jax.tree.leaves(y):
            self.stencil.colours(leaf.shape)

    def __call__(
        self, field: VectorField, t: Array, y: Field, memory: PyTree[Array] = ()
    ) -> tuple[Field, DiagonalJacobian]:
        """One evaluation of f, and one JVP per colour."""
        value, diagonal = self.stencil.diagonal(field, t, y)
        return value, DiagonalJacobian(diagonal)


class GivenDiagonal(Linearisation):
    """F = diag(∇f), from a function of the user's.

    Attributes:
        function: has the signature of f, and returns the diagonal of ∂f/∂y, like y.
    """

    function: Callable

    def check(self, field: VectorField, t: Array, y: Field) -> None:
        """The function must return something like y."""
        field.check(self.function, "jacobian_diagonal", t, y)

    def closed(self, field: VectorField, t: Array, y: Field) -> "GivenDiagonal":
        """As for f."""
        return GivenDiagonal(field.closed(self.function, t, y))

    def __call__(
        self, field: VectorField, t: Array, y: Field, memory: PyTree[Array] = ()
    ) -> tuple[Field, DiagonalJacobian]:
        """One evaluation of each function."""
        return field(t, y), DiagonalJacobian(field.signed(self.function, t, y))


def diagonal(known: Callable | Stencil | None) -> Linearisation:
    """F = diag(∇f), from what is known of it; raise ``TypeError`` if that is something else."""
    if known is None:
        return WHOLE_DIAGONAL
    if isinstance(known, Stencil):
        return StencilDiagonal(known)
    if not callable(known):
        raise TypeError(
            "jacobian_diagonal must be a function with the signature of f, or an mp.Stencil; "
            f"got {type(known).__name__}."
        )
    return GivenDiagonal(known)


def whole_jacobian(field: VectorField, t: Array, y: Field) -> Float[Array, "d d"]:
    """∂f/∂y over the flattened unknowns, by one JVP for each."""
    flat, unravel = ravel_pytree(y)
    return jax.jacfwd(lambda x: ravel_pytree(field(t, unravel(x)))[0])(flat)
