"""`gradsieve doctor` for images: the check-up on what a recipe would train, and on the data as a whole."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import torch

from ..checkup import DOUBTFUL, FINE, Diagnosis, Finding, doctor
from ..checkup.overlap import check_overlap, fingerprint
from ..errors import GradsieveError
from ..reweight import DDS
from ..runs.progress import duration
from .data import ImageSet, Joined, Source, Splits
from .load import load_splits
from .recipe import ImageRecipe
from .train import SetUp, cross_entropy
from .view import Pictures

OnRows = Callable[[int, int], None]
"""``on_rows(done, total)`` hears of the progress."""
NAMED = 5
"""Classes that a finding names."""


def examine(
    recipe: ImageRecipe,
    method: str,
    *,
    data: Path | None,
    device: torch.device,
    on_rows: OnRows = lambda done, total: None,
) -> Diagnosis:
    """What `doctor` finds on the first batches, with the whole sets compared and the time of a run foretold."""
    splits = load_splits(recipe, data, 0)
    setup = SetUp(recipe, method, splits, 0, device)
    setup.try_out()
    way = setup.way
    if not isinstance(way, DDS):
        raise GradsieveError(f"the doctor examines DDS; {method} has no scorer. Choose --method dds or dds-retrained.")
    with setup.low:
        found = doctor(
            setup.model,
            way.scorer,
            cross_entropy,
            setup.optimizer,
            next(iter(setup.stream)),
            way.dev.draw(),
            settings={**recipe.dds.model_dump(), "scorer_optimizer": way.scorer_optimizer},
        )
    findings = [check_sets(splits, on_rows) if finding.name == "overlap" else finding for finding in found]
    findings.append(check_classes(splits))
    if found.plain_seconds is not None and found.dds_seconds is not None:
        findings.append(forecast(recipe, found.plain_seconds, found.dds_seconds))
    return replace(found, findings=tuple(findings))


def check_classes(splits: Splits) -> Finding:
    """What dev does not show, no training example is rewarded for."""
    train, dev = (torch.bincount(s.labels, minlength=splits.num_classes) for s in (splits.train, splits.dev))
    seen = f"{len(splits.train):,} training and {len(splits.dev):,} dev examples of {splits.num_classes} classes"
    missing = ((train > 0) & (dev == 0)).nonzero().squeeze(1).tolist()
    if not missing:
        return Finding("classes", FINE, f"{seen}, {int(dev.min())} to {int(dev.max())} of each in dev.")
    names = [splits.classes[label] if splits.classes else str(label) for label in missing[:NAMED]]
    more = ", ..." if len(missing) > NAMED else ""
    advice = "DDS learns to do without a class that dev does not have: bring dev examples of it, if test has any."
    return Finding("classes", DOUBTFUL, f"{seen}; dev has none of {', '.join(names)}{more} ({len(missing)}).", advice)


def forecast(recipe: ImageRecipe, plain: float, dds: float) -> Finding:
    overhead = recipe.dds.overhead
    whole = plain * (1 + overhead) if overhead else plain + (dds - plain) / recipe.dds.update_every
    with_dds, without = (duration(recipe.steps * seconds) for seconds in (whole, plain))
    dds_takes = f"{with_dds} with DDS{' if the budget can be kept' if overhead else ''}"
    seen = f"{recipe.steps:,} steps: about {dds_takes}, {without} plain; evaluation and reading not counted."
    return Finding("time", FINE, seen)


def check_sets(splits: Splits, on_rows: OnRows) -> Finding:
    """Pictures of the dev set that also stand in the training set, over the whole of both."""
    dev = splits.dev
    lengths = {length(dev.source, row) for row in dev.rows.tolist()}
    wanted = {fingerprint(content(dev.source, row)) for row in dev.rows.tolist()}
    return check_overlap(wanted, _fingerprints(splits.train, lengths, on_rows), "pictures of dev", "the training set")


def _fingerprints(images: ImageSet, lengths: set[int | None], on_rows: OnRows) -> Iterator[bytes]:
    """One after the other; a file of a length that no dev picture has is not read."""
    for done, row in enumerate(images.rows.tolist(), 1):
        if length(images.source, row) in lengths:
            yield fingerprint(content(images.source, row))
        if done % 1000 == 0 or done == len(images):
            on_rows(done, len(images))


def content(source: Source, row: int) -> bytes:
    """The picture as it lies there: the bytes of its file, or of its pixels."""
    if isinstance(source, Joined):
        return content(*source.place(row))
    if isinstance(source, Pictures):
        raw, _ = source.locate(row)
        return raw.read_bytes() if isinstance(raw, Path) else raw
    return source.read([row], None).numpy().tobytes()


def length(source: Source, row: int) -> int | None:
    """Of the file, where that can be told without reading it."""
    if isinstance(source, Joined):
        return length(*source.place(row))
    return source.length(row) if isinstance(source, Pictures) else None
