"""Distributions over groups of data that are fixed before training: what `GroupDDS` is compared with, or starts from.

Target-conditioned sampling (Wang and Neubig, 2019) draws a language by how much its text looks like the low-resource
language's. Each distribution maps ``available`` (N, n), 0 or 1, to probabilities (N, n); a row that it can draw
nothing for is zero.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from ..errors import check

Distribution = Callable[[Tensor], Tensor]
ORDERS = (1, 2, 3, 4)


def frequent_ngrams(texts: Iterable[str], n: Sequence[int] = ORDERS, most_frequent: int = 10_000) -> list[str]:
    """The most frequent character n-grams inside words, most frequent first; equals by name."""
    words = Counter(word for text in texts for word in text.split())
    counts: Counter[str] = Counter()
    for word, times in words.items():
        for order in n:
            for start in range(len(word) - order + 1):
                counts[word[start : start + order]] += times
    return sorted(counts, key=lambda ngram: (-counts[ngram], ngram))[:most_frequent]


def ngram_overlap(ngrams: Sequence[str], target_ngrams: Sequence[str]) -> float:
    """The share that two ranked lists have in common, of as many as the shorter has.

    Cut to the same length, or a large text would have most of a small one's n-grams for its size alone.
    """
    length = min(len(ngrams), len(target_ngrams))
    return len({*ngrams[:length]} & {*target_ngrams[:length]}) / length if length else 0.0


def ngram_similarity(
    texts: Iterable[str], target_texts: Iterable[str], n: Sequence[int] = ORDERS, most_frequent: int = 10_000
) -> float:
    """similarity(S_i, S), 0 to 1: what two texts have in common of their most frequent character n-grams."""
    return ngram_overlap(frequent_ngrams(texts, n, most_frequent), frequent_ngrams(target_texts, n, most_frequent))


def tcs_distribution(similarities: Tensor, temperature: float) -> Distribution:
    """p(S_i | y) proportional to exp(similarity(S_i, S) / temperature) over the groups that have y.

    A low temperature always takes the most similar group, a high one treats all alike.
    """
    check(temperature > 0, f"temperature must be above 0, not {temperature}.")
    check(bool(similarities.isfinite().all()), f"similarities must be finite, not {similarities.tolist()}.")
    logits = similarities.float() / temperature

    def distribution(available: Tensor) -> Tensor:
        has = available.bool()
        p = torch.softmax(logits.expand(has.shape).masked_fill(~has, -torch.inf), dim=1)
        return torch.where(has, p, 0.0)  # a row without groups is all NaN

    return distribution


def uniform_distribution(available: Tensor) -> Tensor:
    """The same probability for each group that has the item."""
    has = available.float()
    return has / has.sum(1, keepdim=True).clamp(min=1)


def related_distribution(related_group: int, target_group: int) -> Distribution:
    """Only the target group and the one related to it, alike where both have the item; items of neither not at all."""

    def distribution(available: Tensor) -> Tensor:
        chosen = torch.zeros_like(available)
        chosen[:, [related_group, target_group]] = available[:, [related_group, target_group]]
        return uniform_distribution(chosen)

    return distribution


def target_first_distribution(target_group: int) -> Distribution:
    """The target group wherever it has the item, else uniform: what the authors' scorer imitates before training."""

    def distribution(available: Tensor) -> Tensor:
        only = torch.zeros_like(available)
        only[:, target_group] = available[:, target_group]
        return uniform_distribution(torch.where(only.any(1, keepdim=True), only, available))

    return distribution
