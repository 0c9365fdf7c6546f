"""What a step of each method is, ready to be timed: ours, and what people use instead, written as they would.

Rows ``reward-*`` and ``per-example-*`` are one measurement of a batch's rewards, without training.
"""

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn import functional as F

from ..baselines import BatchWeight, Uniform
from ..budget import FIRST, LONGEST
from ..errors import GradsieveError
from ..networks import like
from ..parallel import unwrapped
from ..randomness import random_state
from ..reward import rewards
from ..reweight import DDS
from ..runs.team import Team
from .subjects import Subject, loss_fn
from .timing import Step

BATCHES = 4
"""Different ones, in turn."""


def _training(subject: Subject, device: torch.device, method: Callable[..., Any]) -> Step:
    """A training step by `method`, under the contract of all methods."""
    torch.manual_seed(0)
    model = Team().wrapped(subject.model().to(device))
    optimizer = subject.optimizer(model.parameters())
    batches = [subject.batch(subject.batch_size, device) for _ in range(BATCHES)]
    dev = [subject.batch(subject.dev_batch_size, device) for _ in range(BATCHES)]
    way, number, measured = method(model, optimizer, dev), 0, True

    def step() -> None:
        nonlocal number, measured
        number += 1
        optimizer.zero_grad()
        way.loss(batches[number % BATCHES]).backward()
        optimizer.step()
        measured = way.step() is not None

    return Step(step, lambda: measured or not isinstance(way, DDS))


def uniform(subject: Subject, device: torch.device) -> Step:
    return _training(subject, device, lambda model, optimizer, dev: Uniform(model, loss_fn))


def dds(subject: Subject, device: torch.device) -> Step:
    """With a budget of a tenth, which has made its choice before the clock starts."""
    step = _training(
        subject, device, lambda model, optimizer, dev: DDS(model, None, loss_fn, optimizer, dev, overhead=0.10)
    )
    for _ in range(FIRST * LONGEST + 1):
        step()
    return step


def dds_no_budget(subject: Subject, device: torch.device) -> Step:
    return _training(subject, device, lambda model, optimizer, dev: DDS(model, None, loss_fn, optimizer, dev))


def dds_same_scorer(subject: Subject, device: torch.device) -> Step:
    """A scorer of the model's architecture that sees images at half their size and learns at every third step."""
    shrink = 2 if subject.inputs(1).ndim == 4 else 1
    return _training(
        subject,
        device,
        lambda model, optimizer, dev: DDS(
            model, like(unwrapped(model), shrink=shrink), loss_fn, optimizer, dev, update_every=3
        ),
    )


def dds_every_step(subject: Subject, device: torch.device) -> Step:
    """Algorithm 1 to the letter: a scorer of the model's architecture, dev batches as large as the training ones."""
    size = subject.batch_size
    dev = [subject.batch(size, device) for _ in range(BATCHES)]
    return _training(
        subject,
        device,
        lambda model, optimizer, _: DDS(model, like(unwrapped(model)), loss_fn, optimizer, dev, caution=0.0),
    )


def batchweight(subject: Subject, device: torch.device) -> Step:
    return _training(subject, device, lambda model, optimizer, dev: BatchWeight(model, loss_fn, dev))


def _measuring(subject: Subject, device: torch.device) -> tuple[nn.Module, Any, dict[str, Tensor]]:
    torch.manual_seed(0)
    model = subject.model().to(device)
    batch = subject.batch(subject.batch_size, device)
    return model, batch, {name: torch.randn_like(p) for name, p in model.named_parameters()}


def _reward(estimator: str) -> Callable[[Subject, torch.device], Step]:
    def make(subject: Subject, device: torch.device) -> Step:
        model, batch, direction = _measuring(subject, device)
        state = random_state(device)
        losses = loss_fn(model, batch).detach()  # which training has computed anyway
        buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
        return Step(
            lambda: rewards(
                model, loss_fn, batch, direction, estimator=estimator, losses=losses, state=state, buffers=buffers
            )
        )

    return make


def per_example_vmap(subject: Subject, device: torch.device) -> Step:
    """Per-example gradients by torch.func, each dotted with the direction; BatchNorm in eval mode, as vmap wants."""
    model, (inputs, labels), direction = _measuring(subject, device)
    model.eval()
    theta = {name: p.detach() for name, p in model.named_parameters()}
    buffers = dict(model.named_buffers())

    def loss(theta: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(functional_call(model, (theta, buffers), (x.unsqueeze(0),)), y.unsqueeze(0))

    each = vmap(grad(loss), in_dims=(None, 0, 0), randomness="different")

    def step() -> Tensor:
        found = each(theta, inputs, labels)
        return torch.stack([(g * direction[name]).flatten(1).sum(1) for name, g in found.items()]).sum(0)

    return Step(step)


def per_example_opacus(subject: Subject, device: torch.device) -> Step:
    """Per-example gradients by Opacus, each dotted with the direction."""
    from opacus import GradSampleModule

    model, batch, direction = _measuring(subject, device)
    if any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in model.modules()):
        raise GradsieveError("Opacus refuses BatchNorm")
    wrapped = GradSampleModule(model, loss_reduction="sum")
    parameters = dict(model.named_parameters())

    def step() -> Tensor:
        wrapped.zero_grad()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # its hooks set off one of torch's
            loss_fn(wrapped, batch).sum().backward()
        parts = []
        for name, p in parameters.items():
            parts.append((p.grad_sample * direction[name]).flatten(1).sum(1))  # type: ignore[attr-defined]
            p.grad_sample = None  # type: ignore[attr-defined]
        return torch.stack(parts).sum(0)

    return Step(step)


def batchweight_higher(subject: Subject, device: torch.device) -> Step:
    """Learning to reweight (Ren et al., 2018) as written with `higher`: a differentiable copy, a second derivative."""
    import higher

    torch.manual_seed(0)
    model = subject.model().to(device)
    optimizer = subject.optimizer(model.parameters())
    batches = [subject.batch(subject.batch_size, device) for _ in range(BATCHES)]
    dev = [subject.batch(subject.dev_batch_size, device) for _ in range(BATCHES)]
    number = 0

    def step() -> Tensor:
        nonlocal number
        number += 1
        batch, dev_batch = batches[number % BATCHES], dev[number % BATCHES]
        optimizer.zero_grad()
        with higher.innerloop_ctx(model, optimizer) as (copy, inner):
            epsilon = torch.zeros(subject.batch_size, device=device, requires_grad=True)
            inner.step((epsilon * loss_fn(copy, batch)).sum())
            (found,) = torch.autograd.grad(loss_fn(copy, dev_batch).mean(), epsilon)
        weights = (-found).clamp_min(0)
        weights = weights / weights.sum().clamp_min(1e-12)
        (weights * loss_fn(model, batch)).sum().backward()
        optimizer.step()
        return weights

    return Step(step)


TOGETHER = ("uniform", "dds", "dds-no-budget", "dds-same-scorer", "dds-every-step", "batchweight")
"""Those that several processes can take steps of."""

CONTENDERS: dict[str, Callable[[Subject, torch.device], Step]] = {
    "uniform": uniform,
    "dds": dds,
    "dds-no-budget": dds_no_budget,
    "dds-same-scorer": dds_same_scorer,
    "dds-every-step": dds_every_step,
    "batchweight": batchweight,
    "batchweight-higher": batchweight_higher,
    "reward-finite-difference": _reward("finite_difference"),
    "reward-jvp": _reward("jvp"),
    "per-example-vmap": per_example_vmap,
    "per-example-opacus": per_example_opacus,
}
