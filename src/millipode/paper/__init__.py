"""The paper's figures, measured again, and the means to measure them."""

from millipode.paper.experiment import Experiment, Ledger, Report, reproduce
from millipode.paper.high_dimensional import HIGH_DIMENSIONAL
from millipode.paper.pleiades import PLEIADES
from millipode.paper.showcase import SHOWCASE
from millipode.paper.stability import STABILITY
from millipode.paper.step_cost import STEP_COST

EXPERIMENTS = {
    experiment.name: experiment for experiment in (SHOWCASE, STEP_COST, PLEIADES, HIGH_DIMENSIONAL, STABILITY)
}

__all__ = [
    "EXPERIMENTS",
    "HIGH_DIMENSIONAL",
    "PLEIADES",
    "SHOWCASE",
    "STABILITY",
    "STEP_COST",
    "Experiment",
    "Ledger",
    "Report",
    "reproduce",
]
