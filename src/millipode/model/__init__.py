"""The model of an ODE: its vector field, the information operator, linearisations, priors, and the start."""
