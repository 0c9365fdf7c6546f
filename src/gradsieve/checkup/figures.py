"""Small statistics over a batch."""

import torch
from torch import Tensor

from ..parameters import Direction


def correlation(a: Tensor, b: Tensor) -> float:
    """Pearson's; 0 where one of them does not vary."""
    a, b = (v.double() - v.double().mean() for v in (a, b))
    return float((a @ b) / (a.norm() * b.norm()).clamp_min(1e-300))


def rank_correlation(a: Tensor, b: Tensor) -> float:
    """Spearman's; equal values share a rank, and it is 0 where one of the two does not vary."""
    return correlation(*(_ranks(v) for v in (a, b)))


def _ranks(values: Tensor) -> Tensor:
    _, place, counts = values.double().unique(return_inverse=True, return_counts=True)
    return (counts.cumsum(0) - (counts - 1) / 2)[place]


def relative_error(found: Tensor, right: Tensor) -> float:
    """||found - right|| / ||right||."""
    return float((found.double() - right.double()).norm() / right.double().norm().clamp_min(1e-300))


def cosine(a: Direction, b: Direction) -> float:
    """Between two directions; a name that one of them lacks counts as zero."""
    dot = sum(float((a[n].double() * b[n].double()).sum()) for n in a if n in b)
    norms = [sum(float(v.double().square().sum()) for v in d.values()) ** 0.5 for d in (a, b)]
    return dot / max(norms[0] * norms[1], 1e-300)


def signal_to_noise(parts: Tensor) -> tuple[float, float, float]:
    """Of rewards from a dev batch, in standard deviations over examples: the estimate, and its 90% interval.

    `parts` (P, B): rewards from P disjoint parts of it of equal size. What a part has beyond the mean of all is noise,
    N, of which that mean keeps N / P; so F = P Var(mean) / N is 1 where there is nothing but noise, and
    1 + ratio^2 in general. One dev batch is one draw: F scatters as chi-squared with as many degrees of freedom as
    noise has directions, which are few where there are few classes. Hence the interval, and it may be wide.
    """
    count = len(parts)
    centred = parts.double() - parts.double().mean(1, keepdim=True)  # only differences between examples count
    mean = centred.mean(0)
    noise = (centred - mean) * (count / (count - 1)) ** 0.5  # (P, B)
    gram = noise @ noise.T / count
    total = float(gram.trace())
    if total <= 0:
        return (0.0, 0.0, torch.inf) if not bool(mean.any()) else (torch.inf, torch.inf, torch.inf)
    f = count * float(mean.square().sum()) / total
    directions = total**2 / max(float(gram.square().sum()), 1e-300)  # at most P - 1 can be seen
    low, high = (_chi_squared(directions, z) / directions for z in (-1.645, 1.645))

    def ratio(f: float) -> float:
        return max(f - 1, 0.0) ** 0.5

    return ratio(f), ratio(f / high), ratio(f / low) if low > 0 else torch.inf


def _chi_squared(degrees: float, z: float) -> float:
    """Its quantile where the normal distribution has z, by Wilson and Hilferty."""
    return degrees * max(0.0, 1 - 2 / (9 * degrees) + z * (2 / (9 * degrees)) ** 0.5) ** 3
