"""Torch's random state: captured, replayed, and kept apart.

The reward pass must see the dropout masks of the training forward, and nothing that DDS does may change the
random numbers that the user's own training draws.
"""

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

RandomState = dict[str, Tensor]
"""Device type -> generator state. The states live on the host: reading them waits for no device."""


def seeded(*parts: object, device: torch.device | None = None) -> torch.Generator:
    """A generator for just this purpose: ``seeded(seed, "order", epoch)``."""
    digest = hashlib.sha256(repr(parts).encode()).digest()
    return torch.Generator(device or "cpu").manual_seed(int.from_bytes(digest[:8], "big") >> 1)


def random_state(device: torch.device) -> RandomState:
    state = {"cpu": torch.get_rng_state()}
    if device.type not in ("cpu", "meta"):
        state[device.type] = torch.get_device_module(device).get_rng_state(*_which(device))
    return state


def set_random_state(device: torch.device, state: RandomState) -> None:
    torch.set_rng_state(state["cpu"])
    if device.type in state and device.type != "cpu":
        torch.get_device_module(device).set_rng_state(state[device.type], *_which(device))


@contextmanager
def replayed(device: torch.device, state: RandomState) -> Iterator[None]:
    """Inside, random numbers are drawn as from `state`; outside, nothing was drawn."""
    outside = random_state(device)
    set_random_state(device, state)
    try:
        yield
    finally:
        set_random_state(device, outside)


class RandomStream:
    """A stream of random numbers of one's own: `with stream:` draws from it and leaves the global one alone."""

    def __init__(self, device: torch.device, seed: int):
        self.device, self.seed = device, seed
        self.state = {"cpu": torch.Generator().manual_seed(seed).get_state()}
        if device.type not in ("cpu", "meta"):
            self.state[device.type] = torch.Generator(device).manual_seed(seed).get_state()
        self._outside: list[RandomState] = []

    def __enter__(self) -> None:
        self._outside.append(random_state(self.device))
        set_random_state(self.device, self.state)

    def __exit__(self, *exc: Any) -> None:
        self.state = random_state(self.device)
        set_random_state(self.device, self._outside.pop())


def _which(device: torch.device) -> tuple[torch.device, ...]:
    return () if device.type == "mps" else (device,)
