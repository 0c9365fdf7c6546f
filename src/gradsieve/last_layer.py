"""Eq. 2 in the last linear layer alone, from what training computes anyway: an alignment for next to nothing.

For a layer z_i = W a_i + b the gradient of l_i is delta_i a_i^T in W and delta_i in b, with delta_i = dl_i / dz_i. So

    v . grad l_i = delta_i . c_i,    c_i = V a_i + v_b,    V and v_b being the parts of the direction v in that layer.

It needs the layer's input, which the training forward has seen, and the gradient of the losses down to its output.

c_i is how z_i would change along v. What that change has in common for all examples of the batch is left out:

    delta_i . (c_i - mean c)

In a classifier the common part is the wish for more of one class and less of another. It is large, it hides how
examples differ, and training fulfils it within a few steps, so that a direction of some steps ago still wishes what
was had since. RESULTS.md says how much better wrong labels are told from right ones without it.

What psi learns from leaves it out too. A reward by finite difference is v . grad l_i in all layers, and the pass that
measures it shows how z_i changes along v, whatever the layer:

    r_i - delta_i . mean z',    z_i' = (z_i(theta + eps v) - z_i(theta)) / eps

delta_i is the gradient of all losses by z_i. Where examples meet behind the layer, in BatchNorm or a contrastive loss,
that is more than dl_i / dz_i.
"""

import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .errors import GradsieveError, check
from .parallel import ALONE, World, whole
from .parameters import Direction, names_of, trainable


def last_linear(model: nn.Module) -> tuple[str, nn.Linear] | None:
    """The last linear layer that the model lists, if it holds a weight of its own that is trained."""
    layers = [(name, module) for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    trained = {id(p) for p in trainable(model).values()}
    return next(((name, layer) for name, layer in reversed(layers) if id(layer.weight) in trained), None)


class Outline(NamedTuple):
    """What is kept of a training forward until rewards are measured: nothing of the size of all outputs."""

    delta: Tensor
    """(B, out), summed over the places of an example."""
    total: Tensor
    """Sum of the outputs over all rows, (out,)."""
    rows: int
    calls: int
    """How often the layer was called; only the latest call counts."""

    def change(self, totals: Sequence[Tensor], passes: int) -> Tensor:
        """Of the total, to the last of so many passes, (out,); of two, the first was at theta once more.

        Outputs that are masked by infinities do not change.
        """
        check(
            len(totals) == passes * self.calls,
            f"the last layer was called {self.calls} times in the training forward, but {len(totals)} times in "
            f"{passes} when rewards were measured: use alignment='full'.",
        )
        change = totals[-1] - (self.total if passes == 1 else totals[self.calls - 1])
        return torch.where(change.isfinite(), change, 0.0)

    def less(self, r: Tensor, common: Tensor) -> Tensor:
        """r_i - delta_i . mean z', (B,)."""
        return r - self.delta @ common.to(self.delta.dtype)


class Seen(NamedTuple):
    """What the layer had to do with the losses of a training forward."""

    a: Tensor
    """Its input, (B, ..., in)."""
    delta: Tensor
    """Gradient of the losses by its output, (B, ..., out)."""

    def outline(self, totals: Sequence[Tensor]) -> Outline:
        """With the totals of the same pass."""
        places = self.delta.reshape(len(self.delta), -1, self.delta.shape[-1])
        return Outline(places.sum(1), totals[-1], places[..., 0].numel(), len(totals))


def total(z: Tensor) -> Tensor:
    """Sum over all rows, (out,), wide enough for the small difference of two such sums."""
    wide = torch.float32 if z.device.type == "mps" else torch.float64  # mps has no wider one
    return z.detach().flatten(0, -2).sum(0, dtype=wide)


class LastLayer:
    """Listens to the last linear layer that the model lists and trains.

    A hook stays on that layer. It keeps nothing outside of `heard` and `added_up`; copies of the model are not heard.
    """

    def __init__(self, model: nn.Module, world: World = ALONE):
        found = last_linear(model)
        check(
            found is not None,
            "alignment='last_layer' needs a linear layer that is trained; the model has none: use alignment='full'.",
        )
        assert found is not None
        (self.name, self.layer), self.world = found, world
        names = names_of(model)
        self.weight, self.bias = (names.get(id(p), "") for p in (self.layer.weight, self.layer.bias))
        self._listening = False
        self._latest: tuple[Tensor, Tensor] | None = None
        self._totals: list[Tensor] | None = None
        me = weakref.ref(self)

        def listen(module: nn.Module, inputs: tuple[Any, ...], output: Tensor) -> None:
            listener = me()
            if listener is None or module is not listener.layer:
                return
            if listener._listening:
                listener._latest = inputs[0].detach(), output
            if listener._totals is not None:
                listener._totals.append(total(output))

        self.layer.register_forward_hook(listen)

    @contextmanager
    def heard(self) -> Iterator[None]:
        """Inside, the layer's latest input and output are kept, for `seen`."""
        self._listening, self._latest = True, None
        try:
            yield
        finally:
            self._listening = False

    @contextmanager
    def added_up(self) -> Iterator[list[Tensor]]:
        """Inside, the `total` of each call is kept."""
        self._totals = totals = list[Tensor]()
        try:
            yield totals
        finally:
            self._totals = None

    def seen(self, losses: Tensor) -> Seen:
        """What was heard of the pass that gave the losses (B,); once for each pass."""
        latest, self._latest = self._latest, None
        wanted = (
            f"alignment='last_layer' wants one row for each of the {len(losses)} examples, on which their losses "
            f"depend, from the layer {self.name or 'itself'}, which"
        )
        if latest is None:
            raise GradsieveError(f"{wanted} was not called: use alignment='full'.")
        a, z = latest
        delta = None
        if z.ndim > 1 and len(z) == len(losses) and z.requires_grad:
            (delta,) = torch.autograd.grad(losses, z, torch.ones_like(losses), retain_graph=True, allow_unused=True)
        if delta is None:
            raise GradsieveError(f"{wanted} gave shape {tuple(z.shape)}: use alignment='full'.")
        return Seen(a, delta.to(losses.dtype))

    def alignment(self, seen: Seen, direction: Direction) -> Tensor:
        """delta_i . (c_i - mean c), (B,)."""
        v_w, v_b = direction.get(self.weight), direction.get(self.bias)
        change = torch.zeros_like(seen.delta)
        with torch.autocast(change.device.type, enabled=False):
            if v_w is not None:
                change = change + seen.a.to(v_w.dtype) @ whole(v_w, self.layer.weight).T
            if v_b is not None:
                change = change + whole(v_b, self.layer.bias)
        change = change - self.world.mean(change.flatten(0, -2).sum(0), change[..., 0].numel())
        return (change * seen.delta).flatten(1).sum(1).to(seen.delta.dtype)

    def common(self, changes: Sequence[Tensor], rows: int, eps: Tensor) -> Tensor:
        """mean z', (out,), by the changes of all parts of a batch, which have so many rows."""
        return self.world.mean(torch.stack(list(changes)).sum(0), rows) / eps
