"""Forward passes under conditions: in full precision, by kernels with forward-mode derivatives, with clear errors."""

import re
import weakref
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

from .errors import GradsieveError


class _WatchPrecision(TorchDispatchMode):
    """Looks for matrix products and convolutions in half precision."""

    found: str | None = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if isinstance(out, Tensor) and out.dtype in (torch.float16, torch.bfloat16):
            name = func.overloadpacket.__name__
            if any(product in name for product in ("mm", "matmul", "convolution", "linear", "attention")):
                self.found = f"{name} in {out.dtype}"
        return out


_full_precision_models: "weakref.WeakSet[nn.Module]" = weakref.WeakSet()


@contextmanager
def full_precision_only(model: nn.Module) -> Iterator[None]:
    """Refuses a forward pass that computes in half precision, where a small step is lost; looks once per model."""
    if model in _full_precision_models or hasattr(model, "_orig_mod"):  # compiled code does not show its operators
        yield
        return
    with _WatchPrecision() as watch:
        yield
    if watch.found:
        raise GradsieveError(
            f"estimator 'finite_difference' measures small differences, but the model computes {watch.found}. "
            "Open autocast around dds.loss() instead of inside the model or loss_fn (the reward pass then runs in "
            "float32), or use 'jvp' (for DDS: reward='jvp')."
        )
    _full_precision_models.add(model)


@contextmanager
def plain_kernels(model: nn.Module) -> Iterator[None]:
    """Kernels with forward-mode derivatives: oneDNN's and cuDNN's LSTM and fused attention have none."""
    recurrent = any(isinstance(module, nn.RNNBase) for module in model.modules())
    with ExitStack() as stack:
        stack.enter_context(sdpa_kernel(SDPBackend.MATH))
        if recurrent:
            stack.enter_context(torch.backends.cudnn.flags(enabled=False))
            stack.callback(setattr, torch.backends.mkldnn, "enabled", torch.backends.mkldnn.enabled)
            setattr(torch.backends.mkldnn, "enabled", False)  # noqa: B010
        yield


@contextmanager
def forward_mode_errors() -> Iterator[None]:
    try:
        yield
    except (NotImplementedError, RuntimeError) as error:
        text = str(error)
        operator = re.search(r"forward AD with (\S+)", text)
        if operator:
            what = f"operator {operator[1]} has no forward-mode derivative"
        elif "jvp function for custom autograd.Function" in text:
            what = "a custom autograd.Function of the model has no jvp method"
        else:
            raise
        raise GradsieveError(
            f"estimator 'jvp' cannot differentiate this model: {what}. "
            "Use estimator 'finite_difference' (DDS: reward='finite_difference'), or 'per_example' for small cases."
        ) from error
