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
"""

import weakref
from collections.abc import Iterator
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


class Seen(NamedTuple):
    """What the layer had to do with the losses of a training forward."""

    a: Tensor
    """Its input, (B, ..., in)."""
    z: Tensor
    """Its output, (B, ..., out), free of any graph."""
    delta: Tensor
    """dl_i / dz_i, (B, ..., out)."""
    calls: int
    """How often it was called; only the latest call counts."""


class LastLayer:
    """Listens to the last linear layer that the model lists and trains.

    A hook stays on that layer. It keeps nothing outside of `heard`, and copies of the model are not listened to.
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
        self._input: Tensor | None = None
        self._outputs: list[Tensor] = []
        me = weakref.ref(self)

        def listen(module: nn.Module, inputs: tuple[Any, ...], output: Tensor) -> None:
            listener = me()
            if listener is not None and listener._listening and module is listener.layer:
                listener._input = inputs[0].detach()
                listener._outputs.append(output)

        self.layer.register_forward_hook(listen)

    @contextmanager
    def heard(self) -> Iterator[None]:
        """Inside, the layer's latest input and its outputs are kept."""
        self._listening = True
        self._outputs.clear()
        try:
            yield
        finally:
            self._listening = False

    def seen(self, losses: Tensor) -> Seen:
        """What was heard of the pass that gave the losses (B,); once for each pass."""
        a, outputs, self._input, self._outputs = self._input, self._outputs, None, []
        if a is None or outputs[-1].ndim < 2 or len(outputs[-1]) != len(losses):
            found = f"gave shape {tuple(outputs[-1].shape)}" if outputs else "was not called"
            raise GradsieveError(
                f"alignment='last_layer' wants one row for each of the {len(losses)} examples from the layer "
                f"{self.name or 'itself'}, which {found}: use alignment='full'."
            )
        (delta,) = torch.autograd.grad(losses.sum(), outputs[-1], retain_graph=True)
        return Seen(a, outputs[-1].detach(), delta.to(losses.dtype), len(outputs))

    def alignment(self, seen: Seen, direction: Direction) -> Tensor:
        """delta_i . (c_i - mean c), (B,)."""
        v_w, v_b = direction.get(self.weight), direction.get(self.bias)
        change = torch.zeros_like(seen.delta)
        if v_w is not None:
            change = change + seen.a.to(v_w.dtype) @ whole(v_w, self.layer.weight).T
        if v_b is not None:
            change = change + whole(v_b, self.layer.bias)
        change = change - self.world.mean(change.flatten(0, -2))
        return (change * seen.delta).flatten(1).sum(1).to(seen.delta.dtype)

    def less_common(self, r: Tensor, seen: Seen, eps: Tensor) -> Tensor:
        """r_i - delta_i . mean z', (B,), of the rewards whose pass at theta + eps v was heard."""
        outputs, self._input, self._outputs = self._outputs, None, []
        check(
            len(outputs) in (seen.calls, 2 * seen.calls),
            f"the layer {self.name or 'itself'} was called {seen.calls} times in the training forward, but "
            f"{len(outputs)} times when rewards were measured: use alignment='full'.",
        )
        before = seen.z if len(outputs) == seen.calls else outputs[seen.calls - 1]  # autocast: theta came first
        change = (outputs[-1] - before).to(r.dtype).flatten(0, -2)
        return r - (seen.delta * (self.world.mean(change) / eps)).flatten(1).sum(1)
