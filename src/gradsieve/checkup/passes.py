"""Is a pass the same when it is repeated, and does one example's loss hang on the others? Dropout, BatchNorm."""

from typing import Any

import torch
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils import _pytree as pytree

from ..parameters import norm, untouched
from ..randomness import random_state, replayed
from .case import Case
from .diagnosis import BROKEN, DOUBTFUL, FINE, Finding
from .figures import cosine, rank_correlation
from .rewards import EXAMPLES

NOISE = 0.1
"""Of the difference that a finite difference measures, above which it measures noise."""
COUPLED = 1e-3
FEW = 8
"""Examples that BatchNorm makes its statistics of, below which they are mostly noise."""
OTHER_MODE = 0.5


def check_randomness(case: Case) -> Finding:
    """The reward pass replays torch's random numbers. Is everything random of that kind?"""
    name, model, state = "randomness", case.model, random_state(case.device)

    def losses() -> Tensor:
        with untouched(model), torch.no_grad():
            return case.losses(model, case.train_batch).double()

    with replayed(case.device, state):
        first = losses()
        other_state = random_state(case.device)
    with replayed(case.device, state):
        again = losses()
    with replayed(case.device, other_state):
        other = losses()
    noise = float((first - again).abs().max())
    direction = case.direction()
    if noise > 0:
        rewards = case.rewards(direction, estimator="per_example", rows=slice(0, EXAMPLES))
        step = case.settings["epsilon"] * float(rewards.abs().mean()) / max(float(norm(direction)), 1e-300)
        seen = (
            f"the same pass with the same random numbers gives losses that differ by up to {noise:.2g}; "
            f"a finite difference measures steps of about {step:.2g}."
        )
        if noise > NOISE * step:
            advice = "Draw random numbers by torch, not by numpy or Python, and use layers that repeat themselves."
            return Finding(name, BROKEN if case.settings["reward"] == "finite_difference" else DOUBTFUL, seen, advice)
        return Finding(name, FINE, seen)
    if torch.equal(first, other):
        return Finding(name, FINE, "the pass is repeatable and has nothing random in it.")
    masks = rank_correlation(*(case.rewards(direction, state=s) for s in (state, other_state)))
    seen = (
        "the pass is repeatable: the reward pass sees the masks of the training pass. "
        f"Under other masks rewards rank the examples with correlation {masks:.2f}."
    )
    return Finding(name, FINE, seen)


def check_coupling(case: Case) -> Finding:
    """BatchNorm in training mode makes each loss depend on the whole batch, and dev gradients on the mode."""
    name, size = "BatchNorm", len(case.point.losses)
    layers = [m for m in case.model.modules() if isinstance(m, _BatchNorm) and (m.training or m.running_mean is None)]
    alone = _alone(case, size)
    depend = "" if alone is None else f"an example's loss changes by {alone:.1%} with half of the batch gone"
    if not layers:
        if alone is None or alone <= COUPLED:
            return Finding(name, FINE, "none in training mode; each example's loss is its own.")
        advice = "Weights act on pairs of examples then. Compute each loss from its own example, if you can."
        return Finding(name, DOUBTFUL, f"none in training mode, but {depend}.", advice)
    dev_size, dev_mode = len(case.losses(case.model, case.dev_batch)), case.settings["dev_mode"]
    train, evaluation = (case.dev_gradient(case.point.model, mode=mode) for mode in ("train", "eval"))
    modes = cosine(train, evaluation)
    seen = (
        f"{len(layers)} layers in training mode{': ' + depend if depend else ''}. "
        f"Dev gradients by batch and by running statistics have cosine {modes:.2f}; dev_mode is {dev_mode!r}."
    )
    if dev_mode == "eval" and modes < OTHER_MODE:
        advice = "Running statistics are not yet those of the data: pass dev_mode='train', or warm up by plain steps."
        return Finding(name, DOUBTFUL, seen, advice)
    if size < FEW or (dev_mode == "train" and dev_size < FEW):
        few = f"Statistics of {min(size, dev_size)} examples are mostly noise."
        return Finding(name, DOUBTFUL, f"{seen} {few}", f"Take batches of {2 * FEW} or more, or dev_mode='eval'.")
    return Finding(name, FINE, seen)


def _alone(case: Case, size: int) -> float | None:
    """Mean change of a loss, beside its size, with only half of the batch there; None if it cannot be cut."""
    model, half = case.model, size // 2
    with untouched(model), torch.no_grad():
        for module in model.modules():  # all but BatchNorm as in evaluation: masks would differ
            module.training = module.training and isinstance(module, _BatchNorm)
        try:
            whole = case.losses(model, case.train_batch)[:half].double()
            part = case.losses(model, _rows(case.train_batch, size, half)).double()
        except Exception:  # a batch of the user's own kind need not be one that can be cut
            return None
    if part.shape != whole.shape:
        return None
    return float((part - whole).abs().mean() / whole.abs().mean().clamp_min(1e-12))


def _rows(batch: Any, size: int, count: int) -> Any:
    def cut(leaf: Tensor) -> Tensor:
        return leaf[:count] if leaf.ndim and len(leaf) == size else leaf

    return pytree.tree_map_only(Tensor, cut, batch)
