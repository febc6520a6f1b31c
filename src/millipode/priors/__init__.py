"""Priors: what a step of length h does to one block (y, y', …, y^(ν)) of the state."""

from millipode.priors.iwp import IWP
from millipode.priors.transition import Prior, Transition

__all__ = ["IWP", "Prior", "Transition"]
