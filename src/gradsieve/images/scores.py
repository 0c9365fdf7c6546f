"""Scores in a Parquet file: a row for each example, whichever tool wrote it; and the list of those to keep."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..errors import GradsieveError
from ..runs.checkpoint import OTHER_OUT, written_whole
from .data import ImageSet

ROWS = 50_000
"""That are written at once."""
NAMED = 3
"""Ids that a message names."""


def percentiles(scores: Tensor) -> Tensor:
    """The share of the set that weighs less, in per cent, (N,): the middle one has 50; equals share one."""
    _, place, counts = scores.double().unique(return_inverse=True, return_counts=True)
    return (100 * (counts.cumsum(0) - counts / 2) / len(scores))[place].float()


def best(scores: Tensor, share: float) -> Tensor:
    """Which are among the best `share`, (N,) bool: one at least, and of equals the earlier ones."""
    kept = torch.zeros(len(scores), dtype=torch.bool)
    kept[scores.argsort(descending=True, stable=True)[: max(1, round(share * len(scores)))]] = True
    return kept


def ids(images: ImageSet, begin: int, end: int) -> list[str]:
    return [images.source.id(row) for row in images.rows[begin:end].tolist()]


def write_scores(file: Path, images: ImageSet, scores: Tensor, origin: dict[str, Any]) -> None:
    """Columns id, label, score, weight_percentile, in the order of the set. `origin` goes into the file's metadata."""
    import pyarrow
    from pyarrow import parquet

    fields = {
        "id": pyarrow.string(),
        "label": pyarrow.int64(),
        "score": pyarrow.float32(),
        "weight_percentile": pyarrow.float32(),
    }
    schema = pyarrow.schema(fields, metadata={"gradsieve": json.dumps(origin)})
    columns = images.labels, scores, percentiles(scores)
    with written_whole(file, OTHER_OUT) as place, parquet.ParquetWriter(place, schema) as writer:
        for begin in range(0, len(images), ROWS):
            end = min(begin + ROWS, len(images))
            parts = [ids(images, begin, end), *(column[begin:end].numpy() for column in columns)]
            writer.write_batch(pyarrow.record_batch(parts, schema=schema))


def write_kept(file: Path, images: ImageSet, kept: Tensor) -> None:
    """The ids to keep, one a line, in the order of the set."""
    chosen = images[kept]
    with written_whole(file, OTHER_OUT) as place, place.open("w", encoding="utf-8") as lines:
        for begin in range(0, len(chosen), ROWS):
            lines.writelines(f"{name}\n" for name in ids(chosen, begin, begin + ROWS))


def read_scores(file: Path, images: ImageSet) -> Tensor:
    """The score of each image of the set, (N,). Every one must be there; others may be too."""
    numbers = {name: place for place, name in enumerate(ids(images, 0, len(images)))}
    scores = torch.full((len(images),), torch.nan)
    for names, labels, found in _rows(file):
        pairs = [(row, numbers[name]) for row, name in enumerate(names) if name in numbers]
        if not pairs:
            continue
        rows, places = (torch.tensor(column) for column in zip(*pairs, strict=True))
        scores[places] = found[rows]
        if labels is not None and (other := int((labels[rows] != images.labels[places]).sum())):
            raise GradsieveError(
                f"{file}: {other:,} examples have another label there than here. They are scores of other labels: "
                "of another damage or seed, or from before a correction. Score this set anew."
            )
    if missing := scores.isnan().nonzero().squeeze(1).tolist():
        names = [name for name in numbers if numbers[name] in set(missing[:NAMED])]
        raise GradsieveError(
            f"{file} has no score for {len(missing):,} of {len(images):,} training examples ({', '.join(names)}, ...). "
            "Score this very set: gradsieve score RUN --data DIR --out FILE."
        )
    return scores


def _rows(file: Path) -> Iterator[tuple[list[str], Tensor | None, Tensor]]:
    """Ids, labels if there are any, and scores, some rows at a time."""
    from pyarrow import ArrowException, parquet, types

    try:
        with parquet.ParquetFile(file) as table:
            schema = table.schema_arrow
            kinds: dict[str, Callable[[Any], bool]] = {
                "id": lambda t: types.is_string(t) or types.is_large_string(t),
                "score": types.is_floating,
            }
            for name, right in kinds.items():
                if name not in schema.names or not right(schema.field(name).type):
                    raise GradsieveError(
                        f"{file} is no file of scores: it needs the columns id (text) and score (a floating-point "
                        f"number) and has {', '.join(schema.names)}."
                    )
            columns = [name for name in ("id", "label", "score") if name in schema.names]
            label = schema.field("label").type if "label" in columns else None
            if label is not None and not (types.is_integer(label) or types.is_floating(label)):
                raise GradsieveError(
                    f"{file}: column label is of type {label}, but must hold the numbers of classes. "
                    "Write them so, or leave the column out."
                )
            for batch in table.iter_batches(ROWS, columns=columns):
                for name in columns:
                    if count := batch[name].null_count:
                        raise GradsieveError(f"{file}: column {name} has no value in {count:,} rows. Leave them out.")
                labels = torch.tensor(batch["label"].to_pylist()) if "label" in columns else None
                yield batch["id"].to_pylist(), labels, torch.tensor(batch["score"].to_pylist(), dtype=torch.float32)
    except (OSError, ArrowException) as error:
        raise GradsieveError(f"{file} cannot be read as a Parquet file of scores ({error}).") from error
