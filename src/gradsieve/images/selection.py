"""Training on what a scorer of an earlier run thinks of the data: the best examples only, or all of them weighted."""

import hashlib
from dataclasses import replace

import torch

from ..errors import GradsieveError
from .data import Splits
from .recipe import SelectionSettings
from .scores import best, read_scores


def selected(splits: Splits, settings: SelectionSettings) -> Splits:
    """The training set filtered or weighted by a file of scores, which becomes part of the data's checksum."""
    file = settings.file
    if not file.is_file():
        raise GradsieveError(f"selection.file={file} is no file. Make one with: gradsieve score RUN --out {file}")
    scores = read_scores(file, splits.train)
    splits = replace(splits, selection=hashlib.sha256(file.read_bytes()).hexdigest()[:16])
    if settings.use == "weight":
        return replace(splits, weights=torch.softmax(scores, dim=0) * len(scores))  # 1 on the average
    kept = best(scores, settings.keep)
    damaged = None if splits.damaged is None else splits.damaged[kept]
    return replace(splits, train=splits.train[kept], damaged=damaged)
