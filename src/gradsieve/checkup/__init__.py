"""The check-up before hours are spent: can DDS work with this model, scorer, loss, optimizer and these data?"""

from .diagnosis import BROKEN, DOUBTFUL, FINE, Diagnosis, Finding
from .examine import doctor

__all__ = ["BROKEN", "DOUBTFUL", "FINE", "Diagnosis", "Finding", "doctor"]
