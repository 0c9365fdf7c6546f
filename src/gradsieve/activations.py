"""Eq. 2 from what the training backward has computed anyway: exact, and without a further pass through the model.

A linear layer, a convolution, an embedding, a normalization: its output z = f(a; W) is linear in its parameters. So z
changes by f(a_i; V) along the direction v, V being its part in that layer, and

    v . grad l_i = sum over layers of delta_i . f(a_i; V),        delta_i = dl_i / dz_i.

The training forward has seen a_i, and the backward of sum_i w_i l_i comes by w_i delta_i.

Under BatchNorm in training mode what comes back to z_i is the gradient of all losses, not of l_i alone. r_i is then
what the example does, through its own activations, to the loss of the whole batch: the same total, divided otherwise.
"""

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from .errors import GradsieveError
from .parameters import Direction, names_of, snapshot

LINEAR_IN_PARAMETERS = (
    nn.Linear,
    nn.modules.conv._ConvNd,
    nn.Embedding,
    nn.LayerNorm,
    nn.GroupNorm,
    nn.modules.batchnorm._BatchNorm,
)


@dataclass
class _Call:
    """A layer at work."""

    name: str
    layer: nn.Module
    parameters: dict[str, str]
    """The layer's own names of them -> the model's."""
    input: Tensor
    buffers: dict[str, Tensor]
    delta: Tensor | None = None
    """Gradient of the training loss by the output, once the backward has come by."""


@dataclass
class Heard:
    """A training forward, and then its backward, as the layers saw them."""

    calls: list[_Call] = field(default_factory=list)
    factors: Tensor | None = None
    """(B,): what the backward has multiplied each l_i by, weight and a GradScaler's scale."""

    def listen(self, losses: Tensor) -> None:
        """To what comes back to them."""
        self.factors = torch.full_like(losses, torch.nan).detach()  # until then
        losses.register_hook(lambda factors: setattr(self, "factors", factors.detach()))

    @torch.no_grad()
    def rewards(self, direction: Direction) -> Tensor:
        """v . grad l_i, (B,); 0 for an example that had no part in the backward."""
        assert self.factors is not None
        total, count = torch.zeros_like(self.factors), len(self.factors)
        for call in self.calls:
            own = {n: direction[whole] for n, whole in call.parameters.items() if whole in direction}
            if call.delta is None or not own:
                continue
            if len(call.delta) != count:
                raise GradsieveError(
                    f"reward='activations' wants one row for each of {count} examples from {call.name}, which "
                    f"gave shape {tuple(call.delta.shape)}: use reward='finite_difference'."
                )
            zeros = {n: torch.zeros_like(p) for n, p in call.layer.named_parameters()}
            change = functional_call(call.layer, {**zeros, **own, **call.buffers}, (call.input,))
            total += (call.delta.to(change.dtype) * change).flatten(1).sum(1)
        return torch.where(self.factors != 0, total / self.factors, 0.0)


class Activations:
    """Listens to every layer that is trained. Its hooks keep nothing outside of `heard`."""

    def __init__(self, model: nn.Module):
        self._heard: Heard | None = None
        self._unknown: list[tuple[str, nn.Module]] = []
        self.names = names_of(model)
        me = weakref.ref(self)
        for name, layer in model.named_modules():
            if not any(True for _ in layer.parameters(recurse=False)):
                continue
            if not isinstance(layer, LINEAR_IN_PARAMETERS) or (isinstance(layer, nn.Embedding) and layer.max_norm):
                self._unknown.append((name, layer))
            else:
                layer.register_forward_hook(_listener(me, name, weakref.ref(layer)))
        self._check()

    def _check(self) -> None:
        """Layers may be frozen and unfrozen."""
        for name, layer in self._unknown:
            if _trains(layer):
                raise GradsieveError(
                    f"reward='activations' knows layers that are linear in their parameters, but {name or 'the model'} "
                    f"is a {type(layer).__name__}: use reward='finite_difference'."
                )

    @contextmanager
    def heard(self) -> Iterator[Heard]:
        """Inside, layers at work are noted."""
        self._check()
        self._heard = Heard()
        try:
            yield self._heard
        finally:
            self._heard = None


def _trains(layer: nn.Module) -> bool:
    return any(p.requires_grad for p in layer.parameters(recurse=False))


def _listener(me: "weakref.ref[Activations]", name: str, original: "weakref.ref[nn.Module]") -> Any:
    def listen(layer: nn.Module, inputs: tuple[Any, ...], output: Tensor) -> None:
        owner = me()
        if owner is None or owner._heard is None or layer is not original():  # a copy of the model has our hooks too
            return
        if not output.requires_grad or not _trains(layer):
            return
        given = inputs[0].detach()
        given = given.float() if given.dtype in (torch.float16, torch.bfloat16) else given
        parameters = {n: owner.names.get(id(p), "") for n, p in layer.named_parameters(remove_duplicate=False)}
        call = _Call(name, layer, parameters, given, snapshot(dict(layer.named_buffers())))
        output.register_hook(lambda delta: setattr(call, "delta", delta.detach()))
        owner._heard.calls.append(call)

    return listen
