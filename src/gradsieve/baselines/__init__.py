"""What DDS is compared with, one file each, under the contract of `gradsieve.DDS`."""

from .uniform import Uniform

__all__ = ["Uniform"]
