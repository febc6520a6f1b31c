"""Linear algebra on small matrices of fractions.

The constants of the filter (roots of Hilbert matrices, interpolation weights) are ill-conditioned beyond
what floating point can resolve, and depend on nothing but ν. They are worked out exactly, once.
"""

from fractions import Fraction

import numpy as np

Matrix = list[list[Fraction]]


def identity(n: int) -> Matrix:
    """The identity matrix I of size (n, n)."""
    return [[Fraction(i == j) for j in range(n)] for i in range(n)]


def transpose(a: Matrix) -> Matrix:
    """The transpose Aᵀ."""
    return [list(column) for column in zip(*a, strict=True)]


def product(a: Matrix, b: Matrix) -> Matrix:
    """The product A B."""
    columns = transpose(b)
    return [[inner(row, column) for column in columns] for row in a]


def inner(x: list[Fraction], y: list[Fraction]) -> Fraction:
    """The inner product xᵀy."""
    return sum((p * q for p, q in zip(x, y, strict=True)), Fraction(0))


def solve(a: Matrix, b: Matrix) -> Matrix:
    """A⁻¹ B by Gauss–Jordan elimination, for positive definite A."""
    n = len(a)
    rows = [[*x, *y] for x, y in zip(a, b, strict=True)]
    for k in range(n):
        rows[k] = [x / rows[k][k] for x in rows[k]]
        for i in (i for i in range(n) if i != k):
            rows[i] = [x - rows[i][k] * y for x, y in zip(rows[i], rows[k], strict=True)]
    return [row[n:] for row in rows]


def right_root(a: Matrix) -> np.ndarray:
    """Upper triangular R, in floating point, with RᵀR = A for positive definite A."""
    rest, n = [list(row) for row in a], len(a)
    root = np.zeros((n, n))
    for k in range(n):
        pivot = rest[k]
        root[k, k:] = [float(x) / float(pivot[k]) ** 0.5 for x in pivot[k:]]
        for i in range(k + 1, n):
            ratio = pivot[i] / pivot[k]
            rest[i] = [x - ratio * y for x, y in zip(rest[i], pivot, strict=True)]
    return root
