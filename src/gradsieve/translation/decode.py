"""Beam search, all sentences and beams in one batch.

A hypothesis of n pieces (EOS counted) scores ``log p / n ** length_penalty``. At each step a sentence's candidates are
the continuations of its live hypotheses, by log p. Those that end and are among the best `beam` are finished; the best
`beam` that do not end live on. The search of a sentence is over when no live hypothesis can still beat the best
finished one, whatever follows; when `beam` are finished and the best live one, as long as it is now, scores no better
than the best of them; or at its longest length. To stop at `beam` finished alone would be wrong: in a wide beam that
many poor ones may end before the good one does. Beam 1 is greedy decoding.
"""

import torch
from torch import Tensor

from ..errors import GradsieveError
from ..parameters import untouched
from .ragged import BOS, EOS, PAD
from .translator import Translator, reordered

SLACK = 10
"""Pieces that even the translation of a single piece may have, beyond `max_ratio`."""


def longest_lengths(source_lengths: Tensor, max_ratio: float) -> Tensor:
    """How many pieces the translation of each source may have, (B,)."""
    return (source_lengths * max_ratio).ceil().long() + SLACK


@torch.no_grad()
def beam_search(
    model: Translator,
    source: Tensor,
    source_lengths: Tensor,
    *,
    beam: int = 5,
    length_penalty: float = 1.0,
    max_ratio: float = 2.0,
) -> list[list[int]]:
    """The best translation of each source (B, S): ids of its pieces, without BOS and EOS.

    The model searches in eval mode and is given back in the mode that it had.
    """
    if beam < 1 or length_penalty < 0 or max_ratio < 0:
        raise GradsieveError(
            f"beam must be 1 or more and length_penalty and max_ratio 0 or more, "
            f"not {beam}, {length_penalty} and {max_ratio}."
        )
    if not len(source):
        return []
    with untouched(model, training=False):
        return _search(model, source, source_lengths, beam, length_penalty, max_ratio)


def _search(
    model: Translator, source: Tensor, source_lengths: Tensor, beam: int, length_penalty: float, max_ratio: float
) -> list[list[int]]:
    device, size = source.device, len(source)
    limits = longest_lengths(source_lengths.to(device), max_ratio)  # (B,)
    best = torch.full((size, int(limits.max())), EOS, device=device)  # (B, longest)
    alive = torch.arange(size, device=device)  # (L,): the sentences whose search goes on; everything below is theirs
    memory = reordered(model.encode(source, source_lengths), alive.repeat_interleave(beam))  # (L K, ...)
    state = model.start(memory)
    tokens = torch.full((size, beam, 1), BOS, device=device)  # (L, K, n)
    log_prob = torch.full((size, beam), -torch.inf, device=device)  # (L, K)
    log_prob[:, 0] = 0  # all hypotheses are the same at first: only one may be continued
    best_score = torch.full((size,), -torch.inf, device=device)  # (L,)
    finished = torch.zeros(size, dtype=torch.long, device=device)  # (L,)

    for n in range(1, best.shape[1] + 1):
        following, state = model.step(memory, state, tokens[:, :, -1].flatten())  # (L K, V)
        following[:, [PAD, BOS]] = -torch.inf
        pieces = following.shape[1]
        candidates = (log_prob.flatten()[:, None] + following).view(len(alive), -1)  # (L, K V)
        # Every hypothesis has one candidate that ends, so that twice the beam holds enough that do not.
        values, places = candidates.topk(min(2 * beam, candidates.shape[1]))  # (L, 2K)
        parents, piece = places // pieces, places % pieces
        ends = piece == EOS

        ended = values.masked_fill(~ends, -torch.inf)[:, :beam] / n**length_penalty  # (L, K)
        finished += ended.isfinite().sum(1)
        score, which = ended.max(1)
        better = (score > best_score).nonzero()[:, 0]
        best[alive[better], : n - 1] = tokens[better, parents[better, which[better]], 1:]  # longer than any before it
        best_score = torch.maximum(best_score, score)

        log_prob, which = values.masked_fill(ends, -torch.inf).topk(beam)  # (L, K)
        parents, piece = parents.gather(1, which), piece.gather(1, which)
        rows = torch.arange(len(alive), device=device)[:, None]
        tokens = torch.cat([tokens[rows, parents], piece[:, :, None]], 2)  # (L, K, n + 1)

        # log p only falls; divided by the greatest length it is at its best.
        unbeatable = best_score >= log_prob[:, 0] / limits**length_penalty
        enough = (finished >= beam) & (best_score >= log_prob[:, 0] / n**length_penalty)
        over = enough | unbeatable | (limits <= n)
        cut = (over & best_score.isneginf()).nonzero()[:, 0]  # nothing has ended: the best live one must do
        best[alive[cut], :n] = tokens[cut, 0, 1:]
        if over.all():
            break
        going = (~over).nonzero()[:, 0]
        kept = (going[:, None] * beam + parents[going]).flatten()  # rows of the state: sentence and parent
        state = reordered(state, kept)
        if len(going) < len(alive):
            memory = reordered(memory, kept)  # which is the same for all hypotheses of a sentence
            alive, limits, tokens, log_prob = alive[going], limits[going], tokens[going], log_prob[going]
            best_score, finished = best_score[going], finished[going]
    return [row[: row.index(EOS)] if EOS in row else row for row in best.tolist()]
