"""Differentiable Data Selection: learn, while a model trains, which data help it."""

from .checkup import doctor
from .errors import GradsieveError
from .networks import ConvScorer, GroupScorer, MLPScorer, SignalScorer, like
from .record import StepRecord
from .resample import GroupDDS
from .reward import alignment
from .reweight import DDS
from .sampling import ScoreSampler

__version__ = "0.1.0"
__all__ = [
    "DDS",
    "ConvScorer",
    "GradsieveError",
    "GroupDDS",
    "GroupScorer",
    "MLPScorer",
    "ScoreSampler",
    "SignalScorer",
    "StepRecord",
    "alignment",
    "doctor",
    "like",
]
