"""Memory that a training step has freed stays for the next one, as torch's allocator on a GPU keeps it."""

import ctypes
import sys

TRIM_THRESHOLD, MMAP_THRESHOLD = -1, -3
"""As malloc.h numbers them."""
NEVER = -1
LARGEST = 32 << 20
"""Bytes; where glibc's own adjustment of that threshold ends. Larger blocks come from the system, and go back to it."""


def keep_freed_memory() -> None:
    """To be called before training, once in each process. Where malloc is not glibc's it does nothing.

    glibc hands the top of the heap back to the system when a step frees its activations, so that the next step has the
    system clear every page of it anew, DDS's more than plain training's, as its graphs are larger. docs/cost.md has the
    figures.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform.startswith("linux") else None
    if mallopt is not None:
        mallopt(TRIM_THRESHOLD, NEVER)
        mallopt(MMAP_THRESHOLD, LARGEST)
