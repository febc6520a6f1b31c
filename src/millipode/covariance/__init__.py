"""Covariances of the state, each as a square root C = RᵀR in the structure that the paper proves.

| structure | matrix | stored | preserved by |
|---|---|---|---|
| Kronecker | C = I ⊗ RᵀR | R: (n−1, n) | EK0 with a shared diffusion |
| block-diagonal | C = blockdiag(RᵢᵀRᵢ) | R: (n−1, n, *shape) | diagonal Jacobians |
| coupled | C = blockdiag over modes | R: (k, n c, *modes) | Jacobians that couple c components per mode |
| dense | C = RᵀR | R: (n d, n d) | all Jacobians |

The noise-free correction leaves a block of rank n−1, so structured factors drop a row.
"""

from millipode.covariance.blockdiagonal import BlockDiagonal
from millipode.covariance.coupled import Coupled
from millipode.covariance.dense import Dense
from millipode.covariance.kronecker import Kronecker
from millipode.covariance.protocol import Covariance, Kernel

STRUCTURES: dict[str, type[Covariance]] = {
    "kronecker": Kronecker,
    "blockdiagonal": BlockDiagonal,
    "coupled": Coupled,
    "dense": Dense,
}

__all__ = ["STRUCTURES", "BlockDiagonal", "Coupled", "Covariance", "Dense", "Kernel", "Kronecker"]
