"""Are the rewards right, and do they say anything? Estimators, precision, noise of the dev batch."""

import copy

import torch
from torch import Tensor

from ..errors import GradsieveError
from ..parameters import full_precision, norm, trainable
from ..reward import ESTIMATORS
from .case import Case
from .diagnosis import BROKEN, DOUBTFUL, FINE, Finding, Verdict
from .figures import rank_correlation, relative_error, signal_to_noise

EXAMPLES = 8
"""Of the training batch that brute force is tried on: one backward pass each."""
GOOD_ERROR, GOOD_RANK = 0.1, 0.9
BAD_ERROR, BAD_RANK = 0.9, 0.5
DEV_PARTS = 16
"""That the dev batch is divided into: a dev gradient and a reward pass each."""
FEWEST = 8
WIDE = 10.0


def check_rewards(case: Case) -> Finding:
    """Each estimator against brute force, on a few examples of the user's own model."""
    name, chosen, few = "rewards", case.settings["reward"], slice(0, EXAMPLES)
    direction = case.direction()
    right = case.rewards(direction, estimator="per_example", rows=few)
    if not bool(right.isfinite().all()) or not bool(right.any()):
        what = "zero" if bool(right.isfinite().all()) else "not finite"
        length = float(norm(direction))
        advice = "Look at learning rate and dev loss; rewards are products of training and dev gradients."
        return Finding(name, BROKEN, f"by brute force the rewards are {what} (|v| = {length:.2g}).", advice)
    seen, verdicts, errors = [], {}, {}
    for estimator in (e for e in ESTIMATORS if e != "per_example"):
        used = f"{estimator}{' (used)' if estimator == chosen else ''}"
        try:
            found = case.rewards(direction, estimator=estimator, rows=few)
        except (GradsieveError, RuntimeError, NotImplementedError) as error:
            verdicts[estimator], errors[estimator] = BROKEN, str(error).splitlines()[0]
            seen.append(f"{used} fails")
            continue
        off, rank = relative_error(found, right), rank_correlation(found, right)
        verdicts[estimator] = _verdict(off, rank)
        lost = int(((found == 0) & (right != 0)).sum())
        vanished = f", {lost} of {len(right)} vanish" if lost else ""
        seen.append(f"{used} {off:.1%} off, rank correlation {rank:.3f}{vanished}")
    text = f"against brute force on {len(right)} examples: {'; '.join(seen)}."
    verdict = verdicts.get(chosen, FINE)
    if verdict == FINE:
        return Finding(name, FINE, text)
    if chosen in errors:
        text = f"{text} {errors[chosen]}"
    others = [e for e in verdicts if verdicts[e] == FINE] or ["per_example"]
    return Finding(name, verdict, text, f"Pass reward={others[0]!r} to DDS (dds.reward={others[0]} in a recipe).")


def _verdict(error: float, rank: float) -> Verdict:
    if not error <= BAD_ERROR or rank < BAD_RANK:
        return BROKEN
    return FINE if error <= GOOD_ERROR and rank >= GOOD_RANK else DOUBTFUL


def check_precision(case: Case) -> Finding:
    """Whether gradients and steps in reduced precision are lost."""
    name, theta = "precision", trainable(case.model)
    dtypes = sorted({str(p.dtype).removeprefix("torch.") for p in theta.values()})
    kinds = " and ".join(dtypes)
    if all(torch.finfo(p.dtype).bits >= 32 for p in theta.values()):
        if case.autocast is None:
            return Finding(name, FINE, f"parameters in {kinds}.")
        low = str(case.autocast).removeprefix("torch.")
        return Finding(name, FINE, f"parameters in {kinds}, the forward pass in {low}, rewards in float32.")
    keep = "Keep parameters in float32 and open torch.autocast around dds.loss()"
    if case.settings["reward"] == "finite_difference":
        seen = f"parameters in {kinds}: the small step of a finite difference is rounded away."
        return Finding(name, BROKEN, seen, f"{keep}, or pass reward='jvp' to DDS.")
    lost = _underflow(case)
    seen = f"parameters in {kinds}: {lost:.1%} of the direction v underflows to zero."
    if lost < 0.01:
        return Finding(name, FINE, seen)
    return Finding(name, BROKEN if lost > 0.5 else DOUBTFUL, seen, f"{keep}.")


def _underflow(case: Case) -> float:
    """The share of ||v||, v = g' d_theta in float32, in coordinates where v in the model's own precision is zero."""
    wide = copy.deepcopy(case.point.model).float()
    d_theta = case.dev_gradient(wide, batch=full_precision(case.dev_batch))
    narrow, whole, lost = case.direction(), 0.0, 0.0
    for name, g in case.point.derivative.items():
        if name in d_theta:
            scale = g.float() if isinstance(g, Tensor) else g
            v = (scale * d_theta[name]).double().square()
            whole += float(v.sum())
            lost += float(v[narrow[name] == 0].sum() if name in narrow else v.sum())
    return (lost / whole) ** 0.5 if whole else 1.0


def check_noise(case: Case) -> Finding:
    """Reward-to-noise ratio: do parts of the dev batch agree on which examples help?

    A figure, not a verdict. On digits, 20 seeds, the verdict "its upper end is below 1.5" was passed on shuffled dev
    labels and on true ones in 30% and 20% of the cases (MLP, Adam), 35% and 45% (MLP, SGD), 55% and 0% (CNN, Adam).
    """
    name, size = "dev batch", len(case.losses(case.model, case.dev_batch))
    if size < FEWEST:
        advice = "Take dev batches of 16 or more."
        return Finding(name, DOUBTFUL, f"{size} dev examples are too few to tell signal from noise.", advice)
    order = torch.randperm(size, generator=torch.Generator().manual_seed(0))
    count = min(DEV_PARTS, size)
    parts = order[: size - size % count].to(case.device).chunk(count)
    found = torch.stack([case.rewards(case.direction(rows)) for rows in parts]).cpu()  # (P, B)
    ratio, least, most = signal_to_noise(found)
    span = f"{least:.1f} to {most:.1f}" if most < WIDE else f"{least:.1f} or more"
    seen = (
        f"{size} dev examples on {found.shape[1]} training examples: reward-to-noise ratio {ratio:.1f} ({span}, as far "
        "as one batch tells). Below 1 is common so early, and no fault; it grows with the root of the dev batch's size."
    )
    return Finding(name, FINE, seen)
