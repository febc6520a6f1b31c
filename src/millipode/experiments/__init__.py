"""The paper's figures, measured again; and how to measure."""

from millipode.experiments.experiment import Experiment, Ledger, Report, reproduce
from millipode.experiments.high_dimensional import HIGH_DIMENSIONAL
from millipode.experiments.pleiades import PLEIADES
from millipode.experiments.showcase import SHOWCASE
from millipode.experiments.stability import STABILITY
from millipode.experiments.step_cost import STEP_COST

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
