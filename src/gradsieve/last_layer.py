"""Eq. 2 in the last linear layer alone, from what training computes anyway: an alignment for next to nothing.

For a layer z_i = W a_i + b the gradient of l_i is delta_i a_i^T in W and delta_i in b, with delta_i = dl_i / dz_i. So

    v . grad l_i = delta_i . c_i,    c_i = V a_i + v_b,    V and v_b being the parts of the direction v in that layer.

It needs the layer's input, which the training forward has seen, and the gradient of the losses down to its output.

c_i is how z_i would change along v. What that change has in common for all examples of the batch is left out:

    delta_i . (c_i - mean c)

In a classifier the common part is the wish for more of one class and less of another. It is large, it hides how
examples differ, and training fulfils it within a few steps, so that a direction of some steps ago still wishes what
was had since. RESULTS.md says how much better wrong labels are told from right ones without it.
"""

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

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
        self._output: Tensor | None = None
        me = weakref.ref(self)

        def listen(module: nn.Module, inputs: tuple[Any, ...], output: Tensor) -> None:
            listener = me()
            if listener is not None and listener._listening and module is listener.layer:
                listener._input, listener._output = inputs[0].detach(), output

        self.layer.register_forward_hook(listen)

    @contextmanager
    def heard(self) -> Iterator[None]:
        """Inside, the layer's latest input and output are kept."""
        self._listening = True
        try:
            yield
        finally:
            self._listening = False

    def alignment(self, losses: Tensor, direction: Direction) -> Tensor:
        """delta_i . (c_i - mean c), (B,), of the losses (B,) of the pass that was heard; once for each pass."""
        a, z, self._input, self._output = self._input, self._output, None, None
        if a is None or z is None or z.ndim < 2 or len(z) != len(losses):
            found = "was not called" if z is None else f"gave shape {tuple(z.shape)}"
            raise GradsieveError(
                f"alignment='last_layer' wants one row for each of the {len(losses)} examples from the layer "
                f"{self.name or 'itself'}, which {found}: use alignment='full'."
            )
        (delta,) = torch.autograd.grad(losses.sum(), z, retain_graph=True)
        v_w, v_b = direction.get(self.weight), direction.get(self.bias)
        change = torch.zeros_like(delta, dtype=losses.dtype)
        if v_w is not None:
            change = change + a.to(v_w.dtype) @ whole(v_w, self.layer.weight).T
        if v_b is not None:
            change = change + whole(v_b, self.layer.bias)
        change = change - self.world.mean(change.flatten(0, -2))
        return (change * delta).flatten(1).sum(1).to(losses.dtype)
