"""Dev data that also stand in training: rows that are the same, byte by byte."""

import ctypes
from collections.abc import Iterable
from hashlib import blake2b
from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree

from .diagnosis import BROKEN, DOUBTFUL, FINE, Finding

MANY = 0.1
"""Share of the dev examples that makes the dev set a part of the training set."""
SHORTEST = 8
"""Bytes of a row; shorter ones are the same by chance."""


def fingerprint(content: bytes) -> bytes:
    return blake2b(content, digest_size=16).digest()


def row_fingerprints(batch: Any) -> set[bytes]:
    """Of each row of the batch's largest tensor, which is the input; empty if there is no tensor of rows."""
    tensors = [t.detach() for t in pytree.tree_leaves(batch) if isinstance(t, Tensor) and t.ndim]
    if not tensors:
        return set()
    widest = max(tensors, key=lambda t: t.numel() * t.element_size()).cpu().contiguous()
    length = widest[0].numel() * widest.element_size() if len(widest) else 0
    if length < SHORTEST:
        return set()
    start = widest.data_ptr()
    return {fingerprint(ctypes.string_at(start + i * length, length)) for i in range(len(widest))}


def check_overlap(dev: Iterable[bytes], train: Iterable[bytes], what: str, others: str) -> Finding:
    """From fingerprints; `dev` is kept, `train` may be a stream."""
    wanted = set(dev)
    if not wanted:
        return Finding("overlap", FINE, f"{what} have nothing to compare rows by.")
    found = wanted.intersection(train)
    share = len(found) / len(wanted)
    if not found:
        return Finding("overlap", FINE, f"none of {len(wanted):,} {what} stands in {others}.")
    seen = f"{len(found):,} of {len(wanted):,} {what} ({share:.0%}) also stand in {others}, byte by byte."
    advice = (
        "What the model has learned by heart tells nothing of new data: take them out of training, or choose a dev set "
        "that is not part of it."
    )
    return Finding("overlap", BROKEN if share >= MANY else DOUBTFUL, seen, advice)
