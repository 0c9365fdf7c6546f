"""What a published number carries: code, recipe, data, seed; and the machine it was made on."""

import os
import platform
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

import torch

from .. import __version__
from .recipe import Recipe

PACKAGE = Path(__file__).parents[1]


def signature(recipe: Recipe, method: str, seed: int, data: str) -> dict[str, Any]:
    """Two runs with the same signature on the same kind of CPU give the same numbers."""
    return {
        "gradsieve": __version__,
        "commit": _commit(),
        "torch": torch.__version__,
        "recipe": recipe.hash,
        "data": data,
        "method": method,
        "seed": seed,
        "threads": torch.get_num_threads(),
    }


def environment(device: torch.device) -> dict[str, Any]:
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "platform": platform.platform(),
        "processor": platform.machine(),
        "cores": os.cpu_count(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
    }


@cache
def _commit() -> str | None:
    """Of the source tree that runs, if it is one; with "-dirty" where it differs from the commit."""
    command = ["git", "-C", str(PACKAGE), "ls-files", "--error-unmatch", "__init__.py"]
    try:
        subprocess.run(command, capture_output=True, check=True)  # else some other repository holds the installation
        command = ["git", "-C", str(PACKAGE), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None
