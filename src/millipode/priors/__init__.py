"""Priors: what a step of length h does to y and its derivatives."""

from millipode.priors.ioup import IOUP
from millipode.priors.iwp import IWP
from millipode.priors.matern import MaternProcess
from millipode.priors.transition import BlockTransition, Prior, Row, Transition

__all__ = ["IOUP", "IWP", "BlockTransition", "MaternProcess", "Prior", "Row", "Transition"]
