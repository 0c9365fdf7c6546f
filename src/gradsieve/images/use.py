"""`gradsieve score`: from a finished run and a data set to a file of scores."""

from pathlib import Path

import torch

from .. import __version__
from ..errors import GradsieveError
from ..runs.checkpoint import OTHER_OUT
from .parts import Parts
from .scores import best, write_kept, write_scores
from .scoring import OnRows, TrainedScorer, scores_by, told_of
from .sets import set_to_score
from .train import cross_entropy

DOUBTFUL = 0.5
"""Trust, below which the user is told."""


def score_run(
    run: Path,
    out: Path,
    *,
    data: Path | None,
    split: str = "train",
    keep: float | None = None,
    device: torch.device,
    on_rows: OnRows = lambda done, total: None,
) -> list[str]:
    """Writes the scores, and with `keep` the ids of the best share beside them; returns what to tell the user.

    Of several processes each measures its share, and the first one writes.
    """
    if out.suffix != ".parquet":
        raise GradsieveError(f"--out {out} must be a file that ends in .parquet.")
    if keep is not None and not 0 < keep <= 1:
        raise GradsieveError(f"--keep is a share of the examples, above 0 and up to 1, not {keep:g}.")
    try:  # before an hour is spent
        out.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise GradsieveError(f"cannot write {out} ({error.strerror}). {OTHER_OUT}") from error
    trained = TrainedScorer(run, device)
    images = set_to_score(trained, data, split)
    parts = Parts(out, trained, images)
    told = parts.measure(lambda some, rows: told_of(trained, some, cross_entropy, rows), on_rows)
    if told is None:  # the first process goes on
        return []
    scores = scores_by(trained, told)
    origin = {"version": __version__, "run": str(run), "scorer": trained.recipe.scorer.kind, "split": split}
    write_scores(out, images, scores, origin)
    parts.remove()
    low, high = scores.aminmax()
    lines = [f"{len(images):,} scores from {float(low):.3g} to {float(high):.3g} are in {out}"]
    if trained.trust < DOUBTFUL:
        lines.append(
            f"Take care: at the end of its run these scores counted by {trained.trust:.0%}, because weights by them "
            "had not proved worth it there (record.trust)."
        )
    if keep is not None:
        kept, file = best(scores, keep), out.with_suffix(".keep.txt")
        write_kept(file, images, kept)
        lines.append(f"The {int(kept.sum()):,} best are named in {file}")
    return [*lines, f"Train on them with: gradsieve train {trained.recipe.name} --scores {out} --out DIR"]
