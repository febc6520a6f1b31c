"""Priors: what a step of length h does to y and its derivatives."""

from millipode.model.priors.ioup import IOUP
from millipode.model.priors.iwp import IWP
from millipode.model.priors.matern import MaternProcess
from millipode.model.priors.protocol import Prior

__all__ = ["IOUP", "IWP", "MaternProcess", "Prior"]
