"""Linear algebra that knows nothing of filters: fields, Jacobians, square roots, fractions."""
