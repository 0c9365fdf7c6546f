"""Can it run at all? Losses, optimizer, scorer."""

import torch
from torch import Tensor

from ..errors import GradsieveError
from ..parameters import trainable
from ..scorer import bounded, checked_scores, learned
from .case import Case
from .diagnosis import BROKEN, DOUBTFUL, FINE, Finding

NO_GRADIENT = 1e-5
"""Gradient of the weighted rewards over that of the mean score, below which the former is rounding."""
COMPARED = 8
"""Examples whose gradients are looked at."""
SATURATED = 4
"""Times the bound on scores: the tanh has a thousandth of its slope left there."""


def check_losses(case: Case, grad_enabled: bool) -> Finding:
    """One finite loss per example, each with a gradient of its own for the model's parameters."""
    name = "losses"
    if not grad_enabled:
        return Finding(name, BROKEN, "the call runs under no_grad, where no loss has a gradient.", "Leave no_grad.")
    try:
        losses = case.losses(case.model, case.train_batch)  # (B,)
    except GradsieveError as error:
        return Finding(name, BROKEN, str(error), "One loss per example: reduction='none', then no mean over the batch.")
    if not losses.requires_grad:
        advice = "Remove detach(), no_grad and inference_mode from model and loss_fn, and unfreeze what is to learn."
        return Finding(name, BROKEN, "the losses carry no gradient: loss_fn or model detaches them.", advice)
    if len(losses) == 1:
        advice = "Weights are shares of a batch: give batches of several examples."
        return Finding(name, BROKEN, "the training batch has one example, whose weight is always 1.", advice)
    if not bool(losses.isfinite().all()):
        count = int((~losses.isfinite()).sum())
        advice = "Look for a division by zero, a logarithm of 0, or a learning rate that is too high."
        return Finding(name, BROKEN, f"{count} of {len(losses)} losses are not finite.", advice)

    theta = trainable(case.model)
    gradients = [_gradient(loss, theta) for loss in losses[:COMPARED]]
    without = [n for n in theta if not any(n in gradient for gradient in gradients)]
    if len(without) == len(theta):
        advice = "loss_fn(model, batch) must use the model that it is given, and the model must not detach."
        return Finding(name, BROKEN, "no gradient of the losses reaches the model's parameters.", advice)
    if bool((losses == losses[0]).all()) and all(_same(gradients[0], other) for other in gradients[1:]):
        advice = "It looks like a mean that was repeated: return what the loss gives with reduction='none'."
        return Finding(name, BROKEN, f"all {len(losses)} losses are one number with one gradient.", advice)
    low, high = losses.detach().aminmax()
    seen = f"{len(losses)} losses from {float(low):.3g} to {float(high):.3g}, each with its gradient"
    if without:
        parts = f"{len(without)} of {len(theta)} trainable tensors get none ({', '.join(without[:3])})"
        advice = (
            "If a part is to stay as it is, freeze it by requires_grad_(False); else look for a detach() before it."
        )
        return Finding(name, DOUBTFUL, f"{seen}; but {parts}.", advice)
    return Finding(name, FINE, f"{seen}.")


def _gradient(loss: Tensor, theta: dict[str, torch.nn.Parameter]) -> dict[str, Tensor]:
    found = torch.autograd.grad(loss, list(theta.values()), retain_graph=True, allow_unused=True)
    return {n: g.to_dense() if g.is_sparse else g for n, g in zip(theta, found, strict=True) if g is not None}


def _same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def check_optimizer(case: Case) -> Finding:
    """It holds the model's parameters, moves them, and its derivative g' is known."""
    name, optimizer, theta = "optimizer", case.dds.optimizer, trainable(case.model)
    kind = type(optimizer).__name__
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    missing = [n for n, p in theta.items() if id(p) not in held]
    if len(missing) == len(theta):
        advice = "Make the optimizer from the parameters of this very model, after the model was moved or wrapped."
        return Finding(name, BROKEN, f"{kind} holds none of the model's trainable parameters.", advice)
    if case.still:
        advice = "Rewards are scaled by the learning rate: give one above 0."
        return Finding(name, BROKEN, f"the learning rate of {kind} is 0, and no schedule says what it will be.", advice)
    if missing:
        advice = "Freeze them by requires_grad_(False), or give them to the optimizer."
        seen = f"{kind} does not hold {len(missing)} of {len(theta)} trainable tensors ({', '.join(missing[:3])})."
        return Finding(name, DOUBTFUL, seen, advice)
    aware = case.settings["optimizer_aware"]
    if aware and not case.known:
        amsgrad = " with amsgrad" if any(group.get("amsgrad") for group in optimizer.param_groups) else ""
        advice = (
            "Rewards will use the plain dev gradient, Eq. 2 as printed. Say that this is what you want by "
            "optimizer_aware=False, or use SGD, Adam or AdamW."
        )
        return Finding(name, DOUBTFUL, f"the derivative g' of {kind}{amsgrad} is not known.", advice)
    used = "its derivative g' is known" if aware else "its derivative is left out, as optimizer_aware=False says"
    return Finding(name, FINE, f"{kind} holds all {len(theta)} trainable tensors; {used}.")


def check_scorer(case: Case) -> Finding:
    """One finite score per example, and a gradient that can tell examples apart."""
    name, scorer, kind = "scorer", case.dds.scorer, type(case.dds.scorer).__name__
    psi = learned(case.dds.scorer_optimizer)
    if not psi:
        advice = "A scorer learns by its parameters: give one that has some, or None for the default."
        return Finding(name, BROKEN, f"{kind} has no parameter that requires a gradient.", advice)
    losses, signals = case.point.losses, {}
    wanted = getattr(scorer, "signals", ())
    if "loss" in wanted:
        signals["loss"] = losses
    if "alignment" in wanted:
        signals["alignment"] = case.rewards(case.direction())
    with case.low():
        scores = checked_scores(scorer(case.train_batch, **signals), losses)  # (B,)
    if not bool(scores.isfinite().all()):
        advice = "Look at its input and its weights: scale the one, initialize the other anew."
        return Finding(name, BROKEN, f"{int((~scores.isfinite()).sum())} of {len(scores)} scores not finite.", advice)
    if not scores.requires_grad:
        advice = "Remove detach() and no_grad from the scorer."
        return Finding(name, BROKEN, f"the scores of {kind} carry no gradient: it cannot learn.", advice)
    r = torch.randn(len(scores), generator=torch.Generator().manual_seed(0)).to(scores)
    weights = torch.softmax(bounded(scores, case.settings["max_logit"]), dim=0)
    told_apart = _norm(((r - r.mean()) * weights).sum(), psi)
    together = _norm(scores.mean(), psi)
    count = sum(p.numel() for p in psi)
    low, high = scores.detach().aminmax()
    spread = f"scores from {float(low):.2g} to {float(high):.2g}"
    limit = case.settings["max_logit"]
    beyond = 0.0 if limit is None else float((scores.detach().abs() > SATURATED * limit).float().mean())
    if beyond > 0.5:
        advice = "Initialize its last layer with zeros or small numbers, or raise max_logit."
        seen = f"{beyond:.0%} of the {spread} lie far beyond the bound {limit:g}, where they hardly learn."
        return Finding(name, BROKEN if told_apart == 0 else DOUBTFUL, seen, advice)
    if told_apart <= NO_GRADIENT * together or told_apart == 0:
        advice = "It must see what differs between examples: the input, the label, or signals = ('loss', 'alignment')."
        return Finding(name, BROKEN, f"{kind} is constant: whatever it learns, all examples weigh the same.", advice)
    signalled = f", told {' and '.join(wanted)}" if wanted else ""
    return Finding(name, FINE, f"{kind} of {count:,} parameters{signalled}: {spread}, a gradient for each example.")


def _norm(value: Tensor, psi: list[Tensor]) -> float:
    found = torch.autograd.grad(value, psi, retain_graph=True, allow_unused=True)
    return sum(float(g.double().square().sum()) for g in found if g is not None) ** 0.5
