"""What DDS is compared with, one file each, under the contract of `gradsieve.DDS`."""

from .batchweight import BatchWeight
from .mentornet import MentorNet
from .spcl import SPCL
from .uniform import Uniform

__all__ = ["SPCL", "BatchWeight", "MentorNet", "Uniform"]
